//! Shutdown, the way back from [`App::start`], and what passes from one instance to the next.
//!
//! ```text
//!   the tasks end ─▶ the checkpoint is written, while calls are served ─▶ received calls are
//!   answered ─▶ connections are released: no further reads ─▶ the actors end, and the ledger is
//!   closed ─▶ the descriptors are dropped (the kubelet sees the end), or pass to another process,
//!   or to the next start in this one
//! ```
//!
//! A handover has written its checkpoint before this ([`App::checkpoint`]).
//!
//! From the end of the connections until the next instance lists them, the kubelet has no devices.
//! So no slow step comes after it.

use super::App;
use crate::handover::{Label, PassedFds};
use crate::serving::{Shared, serve_passed};
use crate::store::Store;
use actix::Arbiter;
use futures_util::StreamExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long calls that were received may take. An Allocate has a deadline of two seconds itself.
const DRAIN_DEADLINE: Duration = Duration::from_millis(2500);

/// How long the last checkpoint may take. It takes milliseconds, but may hang on a full disk.
const CHECKPOINT_DEADLINE: Duration = Duration::from_millis(2000);

/// How long the ledger may take to close, and servers to end. All are local.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// How long the sockets of the earlier instance are served after every resource is registered. A
/// call that the kubelet began earlier may still arrive there.
const SERVE_PASSED_FOR: Duration = Duration::from_secs(1);

/// What comes after this instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// Nothing, as far as is known: the kubelet sees the end.
    Nothing,
    /// A start of the next process, or of the machine. It gets the connections.
    NextStart,
    /// Another instance, at once and in this boot. It gets the connections.
    OtherInstance,
}

impl App {
    /// A clean shutdown: the ledger is checkpointed, received calls are answered, the ledger is
    /// closed, the connections end last. An empty list is never sent: the kubelet would treat every
    /// device as absent.
    pub async fn shut_down(self) {
        drop(self.leave(After::Nothing).await);
        tracing::info!("ended");
    }

    /// The same, without the end of the connections. They end when the returned value is dropped.
    pub async fn shut_down_for_next(self) -> PassedFds {
        self.leave(After::NextStart).await
    }

    /// Writes the checkpoint of a handover while this instance still serves, because it may take
    /// long.
    pub async fn checkpoint(&self) {
        checkpoint(&self.store).await;
    }

    /// The same for an instance that starts at once, in this boot. The ledger is not sealed for a
    /// reboot, because that takes time.
    pub async fn hand_over(self) -> PassedFds {
        self.leave(After::OtherInstance).await
    }

    async fn leave(self, after: After) -> PassedFds {
        let is_passed = after != After::Nothing;
        // A reboot may follow.
        let seals = after != After::OtherInstance;
        let App {
            store,
            shared: Shared { sockets, gate, .. },
            leaving,
            ending,
            arbiters,
            ledger_guardian,
            mut tasks,
            files,
            ..
        } = self;
        for task in &tasks {
            task.abort();
        }
        // The listening addresses are free when the tasks have ended.
        while tasks.next().await.is_some() {}
        for file in files {
            drop(std::fs::remove_file(file));
        }
        if seals {
            checkpoint(&store).await;
        }
        leaving.send_replace(true);
        // From here to the end nothing lists the kubelet's pods: the kubelet would forget an
        // Allocate that it has sent and that was not read yet.
        let idle = async {
            let unlisted = gate.read().await;
            sockets.connections.idle(is_passed).await;
            unlisted
        };
        let unlisted = tokio::time::timeout(DRAIN_DEADLINE, idle).await;
        if unlisted.is_err() {
            tracing::warn!("a call is still in flight; aborting it");
        }
        // Immediately after the drain: no call is read in between.
        let (passed, servers) = sockets.release(is_passed);
        let ended = async {
            for server in &servers {
                server.closed().await;
            }
        };
        if tokio::time::timeout(CLOSE_DEADLINE, ended).await.is_err() {
            tracing::warn!(
                "a gRPC server did not end in time; its connections end with the process"
            );
        }
        let closing = async {
            let Some(store) = close_ledger(ending, arbiters, ledger_guardian, store).await else {
                return;
            };
            // Both wait for the database, whose disk may stall. With the mark of a close, the first
            // start after a reboot needs only the journal.
            let sealed = tokio::task::spawn_blocking(move || {
                let store = store.into_inner().unwrap_or_else(PoisonError::into_inner);
                if seals {
                    return store.close();
                }
                drop(store);
                Ok(())
            });
            if let Ok(Err(error)) = sealed.await {
                tracing::warn!(%error, "the ledger was not closed cleanly; the journal has every entry");
            }
        };
        // A slow disk must not delay the kubelet.
        if tokio::time::timeout(CLOSE_DEADLINE, closing).await.is_err() {
            tracing::warn!("the ledger was not closed in time; the journal has every entry");
        }
        drop(unlisted);
        passed
    }

    /// Continues with the kubelet's connections of an earlier instance: serves its sockets, makes
    /// the kubelet send its unanswered calls again, and holds the connections open until the
    /// kubelet closes them. Until these calls have arrived, it does not list the kubelet's pods.
    pub fn receive(&mut self, passed: PassedFds) {
        let unlisted = self.unlisted.take();
        let lists = self.views.lists.borrow().clone();
        let sockets = &self.shared.sockets;
        let is_offered = |label: &Label| match label {
            Label::Socket(resource) | Label::Connection { resource, .. } => {
                lists.resources.contains_key(resource)
            }
            Label::DraSocket(_) | Label::DraConnection => sockets.dra.is_served(),
        };
        let (offered, gone): (Vec<_>, Vec<_>) =
            passed.0.into_iter().partition(|(label, _)| is_offered(label));
        // This instance does not serve these. The end of their connections shows that to the
        // kubelet, and so do the missing files of the DRA driver's sockets.
        let gone = sockets.dra.remove(gone);
        PassedFds(gone).end();
        if offered.is_empty() {
            return;
        }
        let (mut connections, mut dra) = (Vec::new(), Vec::new());
        for (label, fd) in offered {
            match label {
                Label::Socket(resource) => {
                    if let Err(error) = serve_passed(&self.shared, &resource, fd) {
                        tracing::warn!(%resource, %error, "cannot serve a socket of the earlier instance");
                    }
                }
                Label::DraSocket(socket) => dra.push((socket, fd)),
                Label::Connection { .. } | Label::DraConnection => connections.push((label, fd)),
            }
        }
        sockets.dra.pass(dra);
        tracing::info!(
            connections = connections.len(),
            "continuing with the kubelet's connections of the earlier instance"
        );
        // Only now, because the kubelet dials these sockets at once.
        self.shared.sockets.connections.hold(connections);
        let (sockets, views) = (Arc::clone(&self.shared.sockets), self.views.clone());
        self.tasks.push(tokio::spawn(async move {
            views.registered().await;
            tokio::time::sleep(SERVE_PASSED_FOR).await;
            sockets.supersede_passed();
            drop(unlisted);
        }));
    }
}

/// On a blocking thread: this thread continues to serve.
async fn checkpoint(store: &Arc<Mutex<Store>>) {
    let store = Arc::clone(store);
    let checkpoint = tokio::task::spawn_blocking(move || {
        let begun = store.lock().unwrap_or_else(PoisonError::into_inner).begin_checkpoint();
        drop(store);
        begun.and_then(|begun| begun.wait_for(CHECKPOINT_DEADLINE))
    });
    match tokio::time::timeout(DRAIN_DEADLINE, checkpoint).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, "the last checkpoint failed; the journal has every entry");
        }
        Ok(Err(_)) | Err(_) => {
            tracing::warn!("the last checkpoint did not end; the journal has every entry");
        }
    }
}

/// Ends the actors. Only the store remains. If a reader still has it, the lock is released when
/// that reader ends.
async fn close_ledger(
    ending: watch::Sender<bool>,
    arbiters: Vec<Arbiter>,
    guardian: JoinHandle<()>,
    store: Arc<Mutex<Store>>,
) -> Option<Mutex<Store>> {
    ending.send_replace(true);
    for arbiter in arbiters {
        arbiter.stop();
        // The lock is released when the ledger's actor has ended. A panic there has been logged.
        drop(tokio::task::spawn_blocking(move || arbiter.join()).await);
    }
    // The guardian has the store too, for the actor's next life.
    drop(guardian.await);
    Arc::into_inner(store)
}
