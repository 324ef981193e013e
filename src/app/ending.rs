//! The way back from [`App::start`], and what goes on from one instance to the next.
//!
//! ```text
//!   calls that have come are answered ─▶ connections are released: nothing is read any more ─▶ the ledger is closed ─▶ the descriptors are
//!   dropped (the kubelet sees the end), or go to another process, or to the next start in this one
//! ```
//!
//! From the end of the connections on the kubelet has no device, until the next instance lists them: nothing that takes time comes
//! after it.

use super::{App, Views};
use crate::handover::{Label, PassedFds};
use crate::registration::ResourceStatus;
use crate::serving::{Shared, serve_passed};
use crate::store::Store;
use actix::Arbiter;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long calls that have come may take. An Allocate has a deadline of two seconds itself.
const DRAIN_DEADLINE: Duration = Duration::from_millis(2500);

/// How long the last checkpoint may take. It takes milliseconds, or may never end on a disk without room.
const CHECKPOINT_DEADLINE: Duration = Duration::from_millis(2000);

/// How long the ledger may take to close, and servers to end. All are of this machine.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// How long the sockets of the earlier instance are served after every resource is registered: a call that the kubelet began before may
/// still be on its way there.
const SERVE_PASSED_FOR: Duration = Duration::from_secs(1);

impl App {
    /// Ends everything in order: calls that have come are answered, the ledger is checkpointed and closed, the connections end
    /// last. An empty list is never sent: the kubelet would take every device for gone.
    pub async fn shut_down(self) {
        drop(self.leave(false, true).await);
        tracing::info!("ended");
    }

    /// The same, but for the connections. They end with what is returned.
    pub async fn shut_down_for_next(self) -> PassedFds {
        self.leave(true, true).await
    }

    /// Writes the checkpoint of a handover, while everything goes on: it may take long.
    pub async fn checkpoint(&self) {
        checkpoint(&self.store).await;
    }

    /// The same for an instance that starts at once, in this boot: the ledger is not closed for a reboot, which takes time.
    pub async fn hand_over(self) -> PassedFds {
        self.leave(true, false).await
    }

    async fn leave(self, keep_files: bool, seal: bool) -> PassedFds {
        let App { store, shared: Shared { sockets, .. }, leaving, ending, arbiters, ledger_guardian, tasks, files, .. } = self;
        for task in &tasks {
            task.abort();
        }
        for task in tasks {
            // What it listened on is free when it is gone.
            drop(task.await);
        }
        for file in files {
            drop(std::fs::remove_file(file));
        }
        if seal {
            checkpoint(&store).await;
        }
        leaving.send_replace(true);
        if tokio::time::timeout(DRAIN_DEADLINE, sockets.connections.idle()).await.is_err() {
            tracing::warn!("a call is still in flight and is cut off");
        }
        // At once: no call is read between.
        let (passed, servers) = sockets.release(keep_files);
        let ended = async {
            for server in &servers {
                server.closed().await;
            }
        };
        if tokio::time::timeout(CLOSE_DEADLINE, ended).await.is_err() {
            tracing::warn!("a server does not end; its connections end with the process");
        }
        let closing = async {
            let Some(store) = close_ledger(ending, arbiters, ledger_guardian, store).await.filter(|_| seal) else { return };
            // Where that is noted, the first start after a reboot needs the journal alone.
            let sealed = tokio::task::spawn_blocking(move || store.into_inner().unwrap_or_else(PoisonError::into_inner).close());
            if let Ok(Err(error)) = sealed.await {
                tracing::warn!(%error, "the ledger is not closed in order; the journal has everything");
            }
        };
        // The kubelet is not kept waiting by a disk.
        if tokio::time::timeout(CLOSE_DEADLINE, closing).await.is_err() {
            tracing::warn!("the ledger is not closed in time; the journal has everything");
        }
        passed
    }

    /// Goes on with what the kubelet has open at an earlier instance: serves its sockets, has the kubelet send again what it has got no
    /// answer to, and holds the connections open until the kubelet closes them.
    pub fn receive(&mut self, passed: PassedFds) {
        let inventory = self.views.inventory.borrow().clone();
        let is_offered = |label: &Label| match label {
            Label::Socket(resource) | Label::Connection { resource, .. } => inventory.resources.contains_key(resource),
        };
        let (offered, gone): (Vec<_>, Vec<_>) = passed.0.into_iter().partition(|(label, _)| is_offered(label));
        // Nothing would answer for these resources any more: the kubelet is to see that.
        PassedFds(gone).end();
        if offered.is_empty() {
            return;
        }
        let mut connections = Vec::new();
        for (label, fd) in offered {
            let Label::Socket(resource) = &label else {
                connections.push((label, fd));
                continue;
            };
            if let Err(error) = serve_passed(&self.shared, resource, fd) {
                tracing::warn!(%resource, %error, "a socket of the earlier instance cannot be served");
            }
        }
        tracing::info!(connections = connections.len(), "going on with what the kubelet has open at the earlier instance");
        // Only now: the kubelet dials these sockets at once.
        self.shared.sockets.connections.hold(connections);
        let (sockets, views) = (Arc::clone(&self.shared.sockets), self.views.clone());
        self.tasks.push(tokio::spawn(async move {
            views.registered().await;
            tokio::time::sleep(SERVE_PASSED_FOR).await;
            sockets.supersede_passed();
        }));
    }
}

impl Views {
    /// Waits until the kubelet has every resource from here, or is away.
    pub async fn registered(&self) {
        let (mut ready, mut registrations) = (self.ready.clone(), self.registrations.clone());
        // Errors mean that the daemon is ending.
        drop(ready.wait_for(|ready| *ready).await);
        drop(registrations.wait_for(|all| all.values().all(ResourceStatus::is_known)).await);
    }
}

/// Away from this thread, which goes on serving.
async fn checkpoint(store: &Arc<Mutex<Store>>) {
    let store = Arc::clone(store);
    let checkpoint = tokio::task::spawn_blocking(move || {
        let begun = store.lock().unwrap_or_else(PoisonError::into_inner).begin_checkpoint();
        drop(store);
        begun.and_then(|begun| begun.wait_for(CHECKPOINT_DEADLINE))
    });
    match tokio::time::timeout(DRAIN_DEADLINE, checkpoint).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "the last checkpoint failed; the journal has everything"),
        Ok(Err(_)) | Err(_) => tracing::warn!("the last checkpoint did not end; the journal has everything"),
    }
}

/// Ends the actors. What is left is the store, unless a reader has it: then the lock is free when that one drops it.
async fn close_ledger(
    ending: watch::Sender<bool>,
    arbiters: Vec<Arbiter>,
    guardian: JoinHandle<()>,
    store: Arc<Mutex<Store>>,
) -> Option<Mutex<Store>> {
    ending.send_replace(true);
    for arbiter in arbiters {
        arbiter.stop();
        // The lock is free only when the ledger's actor is gone. A panic there has been logged.
        drop(tokio::task::spawn_blocking(move || arbiter.join()).await);
    }
    // It has the store too, for the actor's next life.
    drop(guardian.await);
    Arc::into_inner(store)
}
