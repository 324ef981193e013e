//! Kubelets that come and go: each life has a thread and a runtime of its own, with which everything that it has open ends.

use super::caller::{self, Heard, failed};
use crate::console::exit::Failed;
use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// One life of a private kubelet. Dropping it is a kill: every connection is cut, its socket's file stays.
#[derive(Debug)]
pub(super) struct Life {
    /// When its socket was about to appear.
    began: Instant,
    heard: mpsc::UnboundedReceiver<Heard>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// How long it took after a kubelet's socket had appeared until the last of the resources had come so far.
#[derive(Debug)]
pub(super) struct Back {
    pub(super) registered: Duration,
    pub(super) listed: Duration,
}

impl Life {
    /// Cleans the directory of the sockets in it, as a kubelet does, and begins to listen.
    pub(super) fn begin(device_plugins: &Path) -> Result<Life, Failed> {
        for entry in std::fs::read_dir(device_plugins)? {
            let entry = entry?;
            if entry.file_type()?.is_socket() {
                std::fs::remove_file(entry.path())?;
            }
        }
        let ((tell, told), (stop, stopped)) = (oneshot::channel(), oneshot::channel::<()>());
        let dir = device_plugins.to_owned();
        let thread = std::thread::Builder::new().name("kubelet".into()).spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(tell.send(Err(error.into()))),
            };
            runtime.block_on(async {
                let began = Instant::now();
                // Whoever began it waits for this.
                drop(tell.send(caller::serve(&dir).map(|heard| (began, heard))));
                drop(stopped.await);
            });
        })?;
        let (began, heard) = told.blocking_recv().map_err(|_| failed("the private kubelet has ended"))??;
        Ok(Life { began, heard, stop: Some(stop), thread: Some(thread) })
    }

    /// Waits for the first list of each of so many resources. The lists, by resource, and how long they took.
    pub(super) fn lists(&mut self, resources: u64, within: Duration) -> Result<(BTreeMap<String, Heard>, Back), Failed> {
        let deadline = Instant::now() + within;
        let mut lists = BTreeMap::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        while u64::try_from(lists.len()).unwrap_or(u64::MAX) < resources {
            let next = async { tokio::time::timeout_at(deadline.into(), self.heard.recv()).await };
            let Ok(Some(heard)) = runtime.block_on(next) else {
                return Err(failed(format_args!("{} of {resources} resources were registered within {within:?}", lists.len())));
            };
            // A second Register of the same resource settles the first one.
            lists.entry(heard.resource.clone()).or_insert(heard);
        }
        let after = |of: fn(&Heard) -> Instant| lists.values().map(|heard| of(heard) - self.began).max().unwrap_or_default();
        let back = Back { registered: after(|heard| heard.registered), listed: after(|heard| heard.listed) };
        Ok((lists, back))
    }

    /// Kills it, and waits until nothing of it is left.
    pub(super) fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed.
            drop(thread.join());
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.end();
    }
}
