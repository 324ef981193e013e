//! A private node: its files, a simulated kubelet in this process, and a daemon in another process.

use super::instance::{near, scratch, temporary};
use super::process::{self, Daemon, Readings};
use crate::config::Roots;
use crate::console::exit::{FAILURE, Failed};
use crate::domain::ResourceName;
use crate::host;
use crate::lab::sim::kubelet::{HookTable, Kubelet, KubeletConfig, WaitError};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// Maximum time until the kubelet has every list: a machine with hundreds of daemons is busy.
const LISTS_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval of the check that the daemon is still running.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// Options of a private node.
#[derive(Debug, Clone, Args)]
pub(super) struct NodeOptions {
    /// The daemon to measure, such as another release [default: `holdfast` next to `holdfast-lab`,
    /// or this program]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// The node. Fields are dropped in this order: the directories last.
#[derive(Debug)]
pub(super) struct Node {
    daemon: Daemon,
    pub(super) kubelet: Kubelet,
    pub(super) hooks: HookTable,
    pub(super) resources: Vec<ResourceName>,
    /// Time from the start of the daemon until the kubelet had the first list of every resource.
    pub(super) first_lists: Duration,
    scratch: TempDir,
    state: TempDir,
    binary: Option<PathBuf>,
}

/// The configuration of plain nodes: `resources` resources, each with the nodes
/// `/dev/bench<resource>-*`.
pub(super) fn plain_config(resources: usize, replicas: usize) -> String {
    let of = |resource| {
        format!(
            "[[resource]]\nname = \"example.com/bench{resource}\"\nclass = \"char\"\npaths = [\"/dev/bench{resource}-*\"]\nreplicas = {replicas}\n"
        )
    };
    (0..resources).map(of).collect()
}

/// Creates files that replace the device nodes of [`plain_config`], evenly distributed among the
/// resources.
pub(super) fn plain_files(host: &Path, resources: usize, files: usize) -> std::io::Result<()> {
    (0..files)
        .try_for_each(|file| fs::write(plain_file(host, file % resources, file / resources), ""))
}

/// The path of one of these files.
pub(super) fn plain_file(host: &Path, resource: usize, file: usize) -> PathBuf {
    host.join(format!("dev/bench{resource}-{file}"))
}

impl NodeOptions {
    /// Creates the node, with the ledger on the file system of `state_dir`. `host` fills the host's
    /// tree. Starts the kubelet and the daemon, and waits until the kubelet has a list of every
    /// resource of `config`.
    pub(super) async fn start(
        &self,
        state_dir: &Path,
        config: &str,
        host: impl FnOnce(&Path) -> std::io::Result<()>,
    ) -> Result<Node, Failed> {
        let (scratch, state) = (scratch()?, temporary(&near(state_dir)?)?);
        let roots = roots(scratch.path(), state.path());
        for dir in [&roots.host.join("dev"), &roots.run] {
            fs::create_dir_all(dir)?;
        }
        host(&roots.host)?;
        write_config(scratch.path(), config)?;
        let loaded = crate::config::load(
            Some(&config_file(scratch.path())),
            &crate::config::Node::default(),
        )?;
        let resources: Vec<ResourceName> =
            loaded.resources.iter().map(|spec| spec.name.clone()).collect();
        let hooks = HookTable::default();
        let settings = KubeletConfig {
            hooks: hooks.clone(),
            ..KubeletConfig::new(&roots.kubelet, &roots.host)
        };
        let kubelet = Kubelet::start(settings).await?;
        let began = Instant::now();
        let daemon = Daemon::start(
            self.binary.as_deref(),
            &roots,
            &config_file(scratch.path()),
            &log(scratch.path()),
        )?;
        let binary = self.binary.clone();
        let mut node = Node {
            daemon,
            kubelet,
            hooks,
            resources,
            first_lists: Duration::ZERO,
            scratch,
            state,
            binary,
        };
        let until = began + LISTS_TIMEOUT;
        while let Err(unseen) = node.listed(CHECK_EVERY).await {
            node.daemon.check_running(&log(node.scratch.path()))?;
            if Instant::now() > until {
                let what = format_args!(
                    "the private daemon did not list every resource within {LISTS_TIMEOUT:?}: {unseen}"
                );
                return Err(Failed::new(FAILURE, what));
            }
        }
        node.first_lists = began.elapsed();
        Ok(node)
    }
}

impl Node {
    /// Waits for the first list of every resource.
    async fn listed(&self, within: Duration) -> Result<(), WaitError> {
        self.kubelet
            .wait_for(|view| self.resources.iter().all(|resource| view.lists(resource) > 0), within)
            .await
    }

    pub(super) fn roots(&self) -> Roots {
        roots(self.scratch.path(), self.state.path())
    }

    pub(super) fn config_file(&self) -> PathBuf {
        config_file(self.scratch.path())
    }

    /// Readings of the daemon from `/proc`.
    pub(super) fn readings(&mut self) -> Result<Readings, Failed> {
        self.daemon.readings(&log(self.scratch.path()))
    }

    /// Size of the ledger in bytes.
    pub(super) fn state_bytes(&self) -> u64 {
        host::size_below(self.state.path())
    }

    /// Writes another configuration, and reloads the daemon.
    pub(super) fn reload(&self, config: &str) -> Result<(), Failed> {
        write_config(self.scratch.path(), config)?;
        Ok(self.daemon.reload()?)
    }

    /// Kills the daemon and starts another one.
    pub(super) fn kill(&mut self) -> Result<(), Failed> {
        self.daemon.kill();
        self.daemon = Daemon::start(
            self.binary.as_deref(),
            &self.roots(),
            &config_file(self.scratch.path()),
            &log(self.scratch.path()),
        )?;
        Ok(())
    }

    /// The JSON document of a verb on this node.
    pub(super) async fn query(&self, verb: &str) -> Result<serde_json::Value, Failed> {
        let command = process::command(
            self.binary.as_deref(),
            &self.roots(),
            &config_file(self.scratch.path()),
        )?;
        // Do not block: the simulated kubelet runs on this thread.
        let output =
            tokio::process::Command::from(command).args([verb, "-o", "json"]).output().await?;
        let document = serde_json::from_slice(&output.stdout);
        document.map_err(|_| {
            let stderr = String::from_utf8_lossy(&output.stderr);
            Failed::new(
                FAILURE,
                format_args!(
                    "`holdfast {verb}` did not answer ({}): {}",
                    output.status,
                    stderr.trim()
                ),
            )
        })
    }

    /// Stops the daemon cleanly.
    pub(super) async fn stop(self) -> Result<(), Failed> {
        self.daemon.stop().await
    }
}

fn roots(scratch: &Path, state: &Path) -> Roots {
    Roots {
        host: scratch.join("host"),
        kubelet: scratch.join("kubelet"),
        state: state.to_owned(),
        run: scratch.join("run"),
    }
}

fn config_file(scratch: &Path) -> PathBuf {
    scratch.join("config.toml")
}

fn log(scratch: &Path) -> PathBuf {
    scratch.join("log")
}

fn write_config(scratch: &Path, resources: &str) -> std::io::Result<()> {
    fs::write(config_file(scratch), format!("[telemetry]\nlisten = \"off\"\n{resources}"))
}

/// Returns when SIGINT or SIGTERM arrives.
pub(super) async fn interrupted() {
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}
