//! Restarting kubelets: each run has a thread and a runtime of its own, so that its end closes all
//! its connections.

use super::caller::{self, Heard, failed};
use crate::console::exit::Failed;
use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// One run of a private kubelet. Dropping it is a kill: every connection is cut, but the file of
/// its socket remains.
#[derive(Debug)]
pub(super) struct Life {
    /// Just before its socket appears.
    began: Instant,
    heard: mpsc::UnboundedReceiver<Heard>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Time from the socket's appearance until the last resource had registered, and had sent its list.
#[derive(Debug)]
pub(super) struct Back {
    pub(super) registered: Duration,
    pub(super) listed: Duration,
}

impl Life {
    /// Removes the sockets in the directory, as a kubelet does, and starts to listen.
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
                // The receiver waits below, so the send succeeds.
                drop(tell.send(caller::serve(&dir).map(|heard| (began, heard))));
                drop(stopped.await);
            });
        })?;
        let (began, heard) = told.blocking_recv().map_err(|_| failed("the private kubelet has ended"))??;
        Ok(Life { began, heard, stop: Some(stop), thread: Some(thread) })
    }

    /// Waits for the first list of `resources` resources. Returns the lists by resource, and their
    /// times.
    pub(super) fn lists(&mut self, resources: u64, within: Duration) -> Result<(BTreeMap<String, Heard>, Back), Failed> {
        let deadline = Instant::now() + within;
        let mut lists = BTreeMap::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        while u64::try_from(lists.len()).unwrap_or(u64::MAX) < resources {
            let next = async { tokio::time::timeout_at(deadline.into(), self.heard.recv()).await };
            let Ok(Some(heard)) = runtime.block_on(next) else {
                return Err(failed(format_args!("{} of {resources} resources were registered within {within:?}", lists.len())));
            };
            // Ignore a second Register of the same resource (the settling Register).
            lists.entry(heard.resource.clone()).or_insert(heard);
        }
        let after = |of: fn(&Heard) -> Instant| lists.values().map(|heard| of(heard) - self.began).max().unwrap_or_default();
        let back = Back { registered: after(|heard| heard.registered), listed: after(|heard| heard.listed) };
        Ok((lists, back))
    }

    /// Kills it, and waits until its thread has ended.
    pub(super) fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has been printed already.
            drop(thread.join());
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.end();
    }
}
