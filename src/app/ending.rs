//! The way back from [`App::start`], in the steps of a shutdown and of a handover.
//!
//! ```text
//!   shutdown:  quiesce ─▶ the ledger is closed ─▶ streams end, or go on with systemd
//!   handover:  quiesce ─▶ the ledger is closed ─▶ the other instance serves ─▶ streams end, or go on there
//! ```
//!
//! From the end of the streams on the kubelet has no device, until the next instance lists them: nothing that takes time comes
//! after it.

use super::{App, handover};
use crate::domain::{Stage, Successor};
use crate::serving::Sockets;
use crate::store::Store;
use actix::Arbiter;
use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// How long it is waited for Allocates that have begun. Their own deadline is two seconds.
const DRAIN_DEADLINE: Duration = Duration::from_millis(2500);

/// How long it is waited for the last checkpoint. It takes milliseconds, or may never end on a disk without room.
const CHECKPOINT_DEADLINE: Duration = Duration::from_millis(2000);

/// Turns of the event loop. A request that lies in a socket is read, decoded and begun after four.
const TURNS: usize = 32;

/// How long it is waited for the ledger to close, and for connections to take their last answers. All are of this machine.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// What is left of a daemon whose ledger is closed: the kubelet's connections.
#[derive(Debug)]
pub(super) struct Frozen {
    stage: watch::Sender<Stage>,
    sockets: Arc<Sockets>,
    /// Whether the other instance holds them open too, and wants their streams to go on.
    stays_open: Cell<bool>,
}

impl App {
    /// Ends everything in order: Allocates that have begun are answered, the ledger is checkpointed and closed, the streams end
    /// last. An empty list is never sent: the kubelet would take every device for gone.
    pub async fn shut_down(self) {
        self.close().await.leave().await;
        tracing::info!("ended");
    }

    /// The same for a process of systemd's, which keeps what the kubelet has open for the next one (`run_dir` is the directory of the control
    /// socket): the streams do not end before it is known that there is none.
    pub async fn shut_down_for_the_next(self, run_dir: &Path) {
        let frozen = self.close().await;
        if handover::keep(&frozen.sockets, run_dir) {
            frozen.stay_open();
        }
        frozen.leave().await;
        tracing::info!("ended");
    }

    /// Ends everything but the kubelet's connections, and the ledger in order.
    async fn close(self) -> Frozen {
        let (frozen, ledger) = self.quiesce().await;
        let closing = async {
            let Some(store) = ledger.close().await else { return };
            // Where that is noted, the first start after a reboot needs the journal alone.
            let sealed = tokio::task::spawn_blocking(move || store.into_inner().unwrap_or_else(PoisonError::into_inner).close());
            if let Ok(Err(error)) = sealed.await {
                tracing::warn!(%error, "the ledger is not closed in order; the journal has everything");
            }
        };
        let closing = tokio::time::timeout(CLOSE_DEADLINE, closing);
        // The kubelet is not kept waiting by a disk.
        if closing.await.is_err() {
            tracing::warn!("the ledger is not closed in time; the journal has everything");
        }
        frozen
    }

    /// Ends everything but the kubelet's connections: the ledger is free for another instance, and what the kubelet asks
    /// waits until there is one.
    pub(super) async fn freeze(self) -> Frozen {
        let (frozen, ledger) = self.quiesce().await;
        // The other one starts in this boot, and believes what was written in it.
        drop(ledger.close().await);
        frozen
    }

    /// Answers what has begun, and begins nothing more.
    async fn quiesce(self) -> (Frozen, Ledger) {
        let App { gate, store, sockets, stage, ending, arbiters, tasks, files, .. } = self;
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
        let checkpointed = Arc::clone(&store);
        // Away from this thread, which goes on serving.
        let checkpoint = tokio::task::spawn_blocking(move || {
            let begun = checkpointed.lock().unwrap_or_else(PoisonError::into_inner).begin_checkpoint();
            drop(checkpointed);
            begun.and_then(|begun| begun.wait_for(CHECKPOINT_DEADLINE))
        });
        match tokio::time::timeout(DRAIN_DEADLINE, checkpoint).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "the last checkpoint failed; the journal has everything"),
            Ok(Err(_)) | Err(_) => tracing::warn!("the last checkpoint did not end; the journal has everything"),
        }
        // What the kubelet has sent by now is read, and an Allocate among it begins.
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        stage.send_replace(Stage::Frozen);
        if tokio::time::timeout(DRAIN_DEADLINE, gate.write()).await.is_err() {
            tracing::warn!("an Allocate is still under way and is cut off");
        }
        (Frozen { stage, sockets, stays_open: Cell::new(false) }, Ledger { ending, arbiters, store })
    }
}

impl Frozen {
    /// Passes on what the kubelet asks here.
    pub(super) fn pass_on(&self, successor: Successor) {
        self.stage.send_replace(Stage::Succeeded(successor));
    }

    /// The other instance holds the connections open too, and their streams go on.
    pub(super) fn stay_open(&self) {
        self.stays_open.set(true);
    }

    /// Has nothing left to do, for a process that ends now: the streams end, unless they are to go on without it.
    pub(super) async fn leave(&self) {
        if !self.stays_open.get() {
            return self.end_streams().await;
        }
        // The files of the sockets stay: the other instance answers there for a while, and removes them. The streams would end with the
        // last of these.
        std::mem::forget(self.stage.clone());
    }

    /// Ends the streams and closes the sockets.
    pub(super) async fn end_streams(&self) {
        self.stage.send_modify(|stage| {
            *stage = match stage {
                Stage::Succeeded(successor) => Stage::Ending(Some(Arc::clone(successor))),
                _ => Stage::Ending(None),
            }
        });
        // An answer is not given before its connection has sent it.
        if tokio::time::timeout(CLOSE_DEADLINE, self.sockets.close_all()).await.is_err() {
            tracing::warn!("a connection is not closed by its other side and is cut off");
        }
    }
}

/// The actors, and the ledger that they use.
struct Ledger {
    ending: watch::Sender<bool>,
    arbiters: Vec<Arbiter>,
    store: Arc<Mutex<Store>>,
}

impl Ledger {
    /// Ends the actors. What is left is the store, unless somebody has not let go of it: its lock is free when it is dropped.
    async fn close(self) -> Option<Mutex<Store>> {
        let Ledger { ending, arbiters, store } = self;
        ending.send_replace(true);
        for arbiter in arbiters {
            arbiter.stop();
            // The ledger's lock is free only when its actor is gone. A panic there has been logged.
            drop(tokio::task::spawn_blocking(move || arbiter.join()).await);
        }
        // Its guardian and those who ask for it let go of it when they see their end: whoever starts again finds it free.
        for _ in 0..TURNS {
            if Arc::strong_count(&store) > 1 {
                tokio::task::yield_now().await;
            }
        }
        Arc::into_inner(store)
    }
}
