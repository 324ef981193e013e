//! A private daemon; it shares only the disk with the machine's own one.

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

/// Maximum length of the temporary directory's path: a socket's path has at most 107 bytes, and the
/// names below need the rest.
const TEMP_DIR_MAX: usize = 16;

/// Options of every measurement with a private instance.
#[derive(Debug, Clone, Args)]
pub(super) struct Common {
    /// Allow a tmpfs for the ledger, where a sync costs nothing and no data survives a power cut
    #[arg(long)]
    allow_tmpfs: bool,
    /// Draw the measured percentiles, as SVG
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
}

impl Common {
    /// A new directory on the file system of `state_dir`, where the ledger is measured.
    pub(super) fn place(&self, state_dir: &Path) -> Result<TempDir, Failed> {
        report::prepare(self.plot.as_deref())?;
        let near = near(state_dir)?;
        if !self.allow_tmpfs && host::is_tmpfs(&near) {
            return Err(Failed::new(
                USAGE,
                format_args!(
                    "`{}` is on a tmpfs, where a sync costs nothing and no data survives a power cut; choose another directory \
                     with --state-dir, or use --allow-tmpfs",
                    near.display()
                ),
            ));
        }
        temporary(&near)
    }
}

/// The state directory, or its nearest existing parent.
pub(super) fn near(state_dir: &Path) -> std::io::Result<PathBuf> {
    let absolute = std::path::absolute(state_dir)?;
    Ok(absolute.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned())
}

/// A directory on any file system. Its path is short, since sockets are created in it.
pub(super) fn scratch() -> Result<TempDir, Failed> {
    let temp = std::env::temp_dir();
    temporary(if temp.as_os_str().len() > TEMP_DIR_MAX { Path::new("/tmp") } else { &temp })
}

/// A private directory; dropping the value removes it.
pub(super) fn temporary(dir: &Path) -> Result<TempDir, Failed> {
    let made = tempfile::Builder::new().prefix(".holdfast-bench-").tempdir_in(dir);
    made.map_err(|error| {
        Failed::new(
            FAILURE,
            format_args!("cannot create a directory in `{}`: {error}", dir.display()),
        )
    })
}

/// The resources of the private daemon.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer {
    pub(super) resources: u64,
    /// Files of each resource, which replace device nodes.
    pub(super) files: u64,
    /// Ids of each file.
    pub(super) replicas: u64,
}

/// The directories of a private daemon; dropping the value removes them.
#[derive(Debug)]
pub(super) struct Instance {
    /// Sockets and the host's tree: short paths, on any file system.
    scratch: TempDir,
    /// The ledger, on the file system of the machine's own one.
    state: TempDir,
}

impl Instance {
    /// Creates the directories; `state` is the ledger's.
    pub(super) fn create(
        state: TempDir,
        durability: Durability,
        offer: Offer,
    ) -> Result<Self, Failed> {
        let instance = Instance { scratch: scratch()?, state };
        let roots = instance.roots();
        for dir in [roots.host.join("dev"), roots.kubelet.join("device-plugins"), roots.run] {
            fs::create_dir_all(dir)?;
        }
        let mut config = format!(
            "[ledger]\ndurability = \"{}\"\n[telemetry]\nlisten = \"off\"\n",
            durability.as_str()
        );
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

    /// The name of resource `number`.
    pub(super) fn resource(number: u64) -> String {
        format!("example.com/bench{number}")
    }

    pub(super) fn config_file(&self) -> PathBuf {
        self.scratch.path().join("config.toml")
    }

    pub(super) fn roots(&self) -> Roots {
        let below = |name: &str| self.scratch.path().join(name);
        Roots {
            host: below("host"),
            kubelet: self.kubelet_dir(),
            state: self.state_dir().to_owned(),
            run: below("run"),
        }
    }

    pub(super) fn kubelet_dir(&self) -> PathBuf {
        self.scratch.path().join("kubelet")
    }

    pub(super) fn state_dir(&self) -> &Path {
        self.state.path()
    }

    fn settings(&self) -> Result<Settings, Failed> {
        Ok(Settings::new(
            self.roots(),
            config::load(Some(&self.config_file()), &config::Node::default())?,
        ))
    }

    /// Runs the daemon on this thread as `holdfast run` would, and the measurement on its own
    /// thread, as the kubelet is another process.
    pub(super) fn measure_with_daemon(
        &self,
        measure: Box<dyn FnOnce() -> Result<Report, Failed> + Send>,
    ) -> Result<Report, Failed> {
        actix::System::new().block_on(async {
            let interrupts = Interrupts::new()?;
            let (done, answer) = oneshot::channel();
            let thread = std::thread::Builder::new().name("caller".into()).spawn(move || {
                // The send fails if the daemon could not be started.
                drop(done.send(measure()));
            })?;
            let app = App::start(self.settings()?).await?;
            let measured = interrupts
                .or(async {
                    answer.await.map_err(|_| Failed::new(FAILURE, "the calling thread panicked"))?
                })
                .await;
            app.shut_down().await;
            match measured {
                Ok(_) => drop(thread.join()),
                // Do not join: the thread may wait for events that never come.
                Err(_) => progress::wipe(),
            }
            measured
        })
    }
}

/// The signals that end a measurement early.
#[derive(Debug)]
pub(super) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// Installs handlers, so that the signals no longer end the process.
    pub(super) fn new() -> Result<Self, Failed> {
        Ok(Interrupts {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// The result of a measurement, or an error if a signal ends it early. Its directories are
    /// removed in both cases.
    pub(super) async fn or(
        mut self,
        measuring: impl Future<Output = Result<Report, Failed>>,
    ) -> Result<Report, Failed> {
        tokio::select! {
            measured = measuring => measured,
            _ = self.interrupt.recv() => Err(Failed::new(FAILURE, "interrupted")),
            _ = self.terminate.recv() => Err(Failed::new(FAILURE, "ended by SIGTERM")),
        }
    }
}
