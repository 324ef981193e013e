//! Restarting kubelets: each run has a thread and a runtime of its own, so that its end closes all
//! its connections.

use super::caller::{self, FirstList, failed};
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
pub(super) struct KubeletRun {
    /// Just before its socket appears.
    began: Instant,
    first_lists: mpsc::UnboundedReceiver<FirstList>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Time from the socket's appearance until the last resource had registered, and had sent its list.
#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) registered: Duration,
    pub(super) listed: Duration,
}

impl KubeletRun {
    /// Removes the sockets in the directory, as a kubelet does, and starts to listen.
    pub(super) fn begin(device_plugins: &Path) -> Result<KubeletRun, Failed> {
        for entry in std::fs::read_dir(device_plugins)? {
            let entry = entry?;
            if entry.file_type()?.is_socket() {
                std::fs::remove_file(entry.path())?;
            }
        }
        let ((sender, receiver), (stop, stopped)) = (oneshot::channel(), oneshot::channel::<()>());
        let dir = device_plugins.to_owned();
        let thread = std::thread::Builder::new().name("kubelet".into()).spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(sender.send(Err(error.into()))),
            };
            runtime.block_on(async {
                let began = Instant::now();
                // The receiver waits below, so the send succeeds.
                drop(sender.send(caller::serve(&dir).map(|first_lists| (began, first_lists))));
                drop(stopped.await);
            });
        })?;
        let (began, first_lists) =
            receiver.blocking_recv().map_err(|_| failed("the private kubelet ended"))??;
        Ok(KubeletRun { began, first_lists, stop: Some(stop), thread: Some(thread) })
    }

    /// Waits for the first list of `resources` resources. Returns the lists by resource, and their
    /// times.
    pub(super) fn lists(
        &mut self,
        resources: u64,
        within: Duration,
    ) -> Result<(BTreeMap<String, FirstList>, Recovery), Failed> {
        let deadline = Instant::now() + within;
        let mut lists = BTreeMap::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        while u64::try_from(lists.len()).unwrap_or(u64::MAX) < resources {
            let next =
                async { tokio::time::timeout_at(deadline.into(), self.first_lists.recv()).await };
            let Ok(Some(first_list)) = runtime.block_on(next) else {
                return Err(failed(format_args!(
                    "only {} of {resources} resources were registered within {within:?}",
                    lists.len()
                )));
            };
            // Ignore a second Register of the same resource (the settling Register).
            lists.entry(first_list.resource.clone()).or_insert(first_list);
        }
        let after = |of: fn(&FirstList) -> Instant| {
            lists.values().map(|first_list| of(first_list) - self.began).max().unwrap_or_default()
        };
        let recovery = Recovery {
            registered: after(|first_list| first_list.registered),
            listed: after(|first_list| first_list.listed),
        };
        Ok((lists, recovery))
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

impl Drop for KubeletRun {
    fn drop(&mut self) {
        self.end();
    }
}
