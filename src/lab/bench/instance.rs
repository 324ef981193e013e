//! A daemon of the measurement's own: nothing of the machine's is used but its disk.

use super::report::{self, Report};
use crate::app::{App, Settings};
use crate::config::{self, Roots};
use crate::console::exit::{FAILURE, Failed, USAGE};
use crate::console::progress;
use crate::domain::Durability;
use crate::host;
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// A socket's path has at most 107 bytes, and what comes behind the temporary directory needs the rest.
const TEMP_DIR_MAX: usize = 16;

/// What every measurement asks.
#[derive(Debug, Clone, Args)]
pub(super) struct Common {
    /// Measure on a tmpfs too, where syncing costs nothing and nothing survives a power cut
    #[arg(long)]
    allow_tmpfs: bool,
    /// Draw the percentiles of what was measured, as SVG
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
}

impl Common {
    /// A directory on the file system of `state_dir`, where ledgers are written.
    pub(super) fn place(&self, state_dir: &Path) -> Result<TempDir, Failed> {
        report::prepare(self.plot.as_deref())?;
        let near = near(state_dir)?;
        if !self.allow_tmpfs && host::is_tmpfs(&near) {
            return Err(Failed::new(
                USAGE,
                format_args!(
                    "`{}` is on a tmpfs, where syncing costs nothing and nothing survives a power cut: choose another place with \
                     --state-dir, or say --allow-tmpfs",
                    near.display()
                ),
            ));
        }
        temporary(&near)
    }
}

/// The directory where ledgers are written: that of the machine's own, or the nearest one that is there.
pub(super) fn near(state_dir: &Path) -> std::io::Result<PathBuf> {
    let absolute = std::path::absolute(state_dir)?;
    Ok(absolute.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned())
}

/// A directory for what may be anywhere. Sockets go below it, so its path is short.
pub(super) fn scratch() -> Result<TempDir, Failed> {
    let temp = std::env::temp_dir();
    temporary(if temp.as_os_str().len() > TEMP_DIR_MAX { Path::new("/tmp") } else { &temp })
}

/// A directory of the measurement's own, which goes with the value.
pub(super) fn temporary(dir: &Path) -> Result<TempDir, Failed> {
    let made = tempfile::Builder::new().prefix(".holdfast-bench-").tempdir_in(dir);
    made.map_err(|error| Failed::new(FAILURE, format_args!("no directory can be made in `{}`: {error}", dir.display())))
}

/// What the private daemon offers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer {
    pub(super) resources: u64,
    /// Files that stand for the device nodes of each.
    pub(super) files: u64,
    /// Ids of each file.
    pub(super) replicas: u64,
}

/// The places of a private daemon; they go with the value.
#[derive(Debug)]
pub(super) struct Instance {
    /// Sockets and the host's tree: short paths, and any file system will do.
    scratch: TempDir,
    /// The ledger, where the machine's own would be.
    state: TempDir,
}

impl Instance {
    /// Makes the directories; the ledger's is `state`.
    pub(super) fn create(state: TempDir, durability: Durability, offer: Offer) -> Result<Self, Failed> {
        let instance = Instance { scratch: scratch()?, state };
        let roots = instance.roots();
        for dir in [roots.host.join("dev"), roots.kubelet.join("device-plugins"), roots.run] {
            fs::create_dir_all(dir)?;
        }
        let mut config = format!("[ledger]\ndurability = \"{}\"\n[telemetry]\nlisten = \"off\"\n", durability.as_str());
        for resource in 0..offer.resources {
            for file in 0..offer.files {
                fs::write(roots.host.join(format!("dev/bench{resource}-{file}")), "")?;
            }
            config.push_str(&format!(
                "[[resource]]\nname = \"{}\"\nclass = \"char\"\npaths = [\"/dev/bench{resource}-*\"]\nreplicas = {}\n",
                Self::resource(resource),
                offer.replicas
            ));
        }
        fs::write(instance.config_file(), config)?;
        Ok(instance)
    }

    /// The name of the n-th resource.
    pub(super) fn resource(number: u64) -> String {
        format!("example.com/bench{number}")
    }

    pub(super) fn config_file(&self) -> PathBuf {
        self.scratch.path().join("config.toml")
    }

    pub(super) fn roots(&self) -> Roots {
        let below = |name: &str| self.scratch.path().join(name);
        Roots { host: below("host"), kubelet: self.kubelet_dir(), state: self.state_dir().to_owned(), run: below("run") }
    }

    pub(super) fn kubelet_dir(&self) -> PathBuf {
        self.scratch.path().join("kubelet")
    }

    pub(super) fn state_dir(&self) -> &Path {
        self.state.path()
    }

    fn settings(&self) -> Result<Settings, Failed> {
        Ok(Settings::new(self.roots(), config::load(Some(&self.config_file()), &config::Node::default())?))
    }

    /// Runs the daemon on this thread as `holdfast run` would, and the measurement on a thread of its own, as the kubelet is a process
    /// of its own.
    pub(super) fn beside(&self, measure: Box<dyn FnOnce() -> Result<Report, Failed> + Send>) -> Result<Report, Failed> {
        actix::System::new().block_on(async {
            let interrupts = Interrupts::new()?;
            let (done, answer) = oneshot::channel();
            let thread = std::thread::Builder::new().name("caller".into()).spawn(move || {
                // Nobody waits for it when the daemon could not be started.
                drop(done.send(measure()));
            })?;
            let app = App::start(self.settings()?).await?;
            let measured = interrupts.or(async { answer.await.map_err(|_| Failed::new(FAILURE, "the calling thread died"))? }).await;
            app.shut_down().await;
            match measured {
                Ok(_) => drop(thread.join()),
                // The other thread may be waiting for what will not come.
                Err(_) => progress::wipe(),
            }
            measured
        })
    }
}

/// Who may end a measurement before its end.
#[derive(Debug)]
pub(super) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// From now on they end nothing by themselves.
    pub(super) fn new() -> Result<Self, Failed> {
        Ok(Interrupts { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// What a measurement comes to, unless somebody ends it before: what it has made is removed then too.
    pub(super) async fn or(mut self, measuring: impl Future<Output = Result<Report, Failed>>) -> Result<Report, Failed> {
        tokio::select! {
            measured = measuring => measured,
            _ = self.interrupt.recv() => Err(Failed::new(FAILURE, "interrupted")),
            _ = self.terminate.recv() => Err(Failed::new(FAILURE, "ended by SIGTERM")),
        }
    }
}
