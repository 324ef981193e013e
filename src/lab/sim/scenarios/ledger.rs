//! The ledger's actor: it writes the entries that wait, one group after the other, and may die.

use super::actor::{Actor, answer};
use super::daemon::Inner;
use super::durable::Disk;
use crate::domain::{Entry, Grant, Refusal};
use crate::ledger::core::{Ledger, LedgerState, ReleaseHooks};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The share of commits that the actor does not survive.
const DEATHS: f64 = 0.01;
/// How often a message that waits for its turn looks.
const TURN: Duration = Duration::from_micros(50);

/// An actor that begins its life. The ledger is folded from the written entries, not from an
/// earlier life's memory.
pub(super) fn recovered(disk: &Disk, hooks: &Arc<ReleaseHooks>) -> Actor {
    let mut ledger = Ledger::default();
    disk.lock().entries.iter().for_each(|entry| {
        ledger.evolve(entry);
    });
    Actor::new(LedgerState::new(ledger, Arc::clone(hooks)))
}

impl Inner {
    /// Writes, applies and answers the entries that wait, again and again.
    pub(super) async fn commit_all(self: Arc<Self>) {
        loop {
            let begun = self.lock().actor.begin_write();
            let Some((entries, replies)) = begun else {
                self.to_commit.notified().await;
                continue;
            };
            self.disk.append(&self.node, &entries).await;
            if self.node.handle().random(|random| random.chance(DEATHS)) {
                self.disk.lock().died_at = Some(self.node.handle().now());
                // A caller without an answer asks the next life, which begins with a pass.
                self.lock().actor = recovered(&self.disk, &self.hardware.hooks);
                self.to_look.notify_one();
            } else {
                self.lock().actor.end_write(&entries);
                answer(replies);
            }
            self.to_run.notify_one();
            self.judge();
        }
    }

    /// Waits for the turn of a message to the actor.
    pub(super) async fn turn(&self) {
        while self.lock().actor.is_writing {
            self.node.handle().sleep(TURN).await;
        }
    }

    pub(super) fn submit(&self, entries: Vec<Entry>) -> oneshot::Receiver<()> {
        let done = self.lock().actor.submit(entries);
        self.to_commit.notify_one();
        done
    }

    /// Writes entries that the next pass decides again if the actor dies.
    pub(super) async fn commit(&self, entries: Vec<Entry>) {
        if !entries.is_empty() {
            self.turn().await;
            // An error is the actor's death.
            drop(self.submit(entries).await);
        }
    }

    /// Records the grant of an Allocate. `refusal` decides from what the node shows.
    pub(super) async fn record(
        &self,
        grant: Arc<Grant>,
        refusal: impl Fn() -> Option<String>,
    ) -> Result<(), String> {
        loop {
            self.turn().await;
            let refused: Option<Refusal> = {
                let cores = self.lock();
                // The former life may have written it.
                if cores.actor.ledger().grant(&grant.alloc_id).is_some() {
                    return Ok(());
                }
                cores.actor.state.refusal(&grant)
            };
            if let Some(why) = refused.map(|refused| refused.to_string()).or_else(&refusal) {
                return Err(why);
            }
            if self.submit(vec![Entry::Grant(Arc::clone(&grant))]).await.is_ok() {
                return Ok(());
            }
        }
    }
}
