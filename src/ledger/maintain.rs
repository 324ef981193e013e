//! What keeps the store in order behind the answers: syncs after them, checkpoints of the query database, and the attempts
//! to write again what could not be written.

use super::actor::LedgerActor;
use super::committer::lock;
use super::report;
use crate::domain::{LedgerHealth, WhenNotDurable};
use crate::messages::Reconcile;
use crate::store::StoreError;
use crate::telemetry::metrics;
use actix::{AsyncContext, Context, Handler, Message};
use std::sync::Arc;
use std::time::Duration;

/// How long after an answer its entry is synced where that is not done before: a burst is synced once.
const SYNC_AFTER: Duration = Duration::from_millis(2);
/// How long after a change the query database may lag behind the journal, and how long a checkpoint is given before it is
/// asked how it went.
const CHECKPOINT_AFTER: Duration = Duration::from_secs(30);
/// The same while it is not kept.
const MEND_AFTER: Duration = Duration::from_secs(5);
/// How long after a start the journal is readied: behind the registrations. An Allocate that comes before does it.
const READY_AFTER: Duration = Duration::from_millis(300);
/// How long after a failure the journal is tried again, when no Allocate does so before.
const SETTLE_AFTER: Duration = Duration::from_secs(1);

/// A sync after the answer has ended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Synced;

impl LedgerActor {
    pub(super) fn begin_upkeep(&mut self, context: &mut Context<Self>) {
        self.look_after_database(context);
        self.settle_later(context);
        context.run_later(READY_AFTER, |this, _| lock(&this.config.store).after_commit());
        // By then it is known whether the database is slow to open.
        context.run_later(MEND_AFTER, |this, context| {
            let kept = lock(&this.config.store).kept();
            this.note_kept(kept, None, context);
        });
    }

    /// Takes note of how the store is kept now.
    pub(super) fn note_kept(&mut self, kept: LedgerHealth, error: Option<&Arc<StoreError>>, context: &mut Context<Self>) {
        if self.upkeep.kept != kept {
            let serves = self.config.plan.borrow().ledger.when_not_durable == WhenNotDurable::Serve;
            report::changed(self.upkeep.kept, kept, serves, error);
            let lost = self.upkeep.kept.database && !kept.database;
            self.upkeep.kept = kept;
            self.config.kept.send_replace(kept);
            if let Some(timer) = self.upkeep.checkpoint_timer.take_if(|_| lost) {
                context.cancel_future(timer);
                self.look_after_database(context);
            }
        }
        self.settle_later(context);
    }

    /// There is room again one day, and nobody may ask for a device until then.
    fn settle_later(&mut self, context: &mut Context<Self>) {
        if self.upkeep.kept.journal || self.upkeep.settle_timer.is_some() {
            return;
        }
        self.upkeep.settle_timer = Some(context.run_later(SETTLE_AFTER, |this, context| {
            this.upkeep.settle_timer = None;
            let kept = {
                let mut store = lock(&this.config.store);
                // That it failed has been said.
                drop(store.retry_unwritten());
                store.kept()
            };
            this.note_kept(kept, None, context);
        }));
    }

    pub(super) fn checkpoint_later(&mut self, context: &mut Context<Self>) {
        self.upkeep.behind = true;
        self.look_after_database(context);
    }

    /// Readies the store for what comes, and begins a checkpoint when the journal has become long.
    pub(super) fn follow_up(&self) {
        let mut store = lock(&self.config.store);
        store.after_commit();
        if store.wants_checkpoint() {
            if let Err(error) = store.begin_checkpoint() {
                tracing::warn!(%error, "the query database lags behind the journal");
            }
            store.after_commit();
        }
    }

    /// A checkpoint in a while; and another look after it, since nobody waits for its end.
    fn look_after_database(&mut self, context: &mut Context<Self>) {
        if self.upkeep.checkpoint_timer.is_some() {
            return;
        }
        let wait = if self.upkeep.kept.database { CHECKPOINT_AFTER } else { MEND_AFTER };
        self.upkeep.checkpoint_timer = Some(context.run_later(wait, |this, context| {
            this.upkeep.checkpoint_timer = None;
            this.record_found(context);
            let behind = std::mem::take(&mut this.upkeep.behind);
            let (begun, kept) = {
                let mut store = lock(&this.config.store);
                let kept = store.kept();
                // It is rebuilt from the journal, which comes first.
                let begun = (behind || !kept.database).then(|| if kept.journal { store.begin_checkpoint().map(drop) } else { Ok(()) });
                (begun, store.kept())
            };
            // How it ends is logged where it happens.
            if let Some(Err(error)) = &begun {
                tracing::warn!(%error, "the query database lags behind the journal");
            }
            this.upkeep.behind |= behind && !kept.journal;
            this.note_kept(kept, None, context);
            if begun.is_some() {
                this.look_after_database(context);
            }
        }));
    }

    /// Records what the journal had lost and a database had that was slow to open.
    fn record_found(&mut self, context: &mut Context<Self>) {
        let found = lock(&self.config.store).take_found();
        if found.is_empty() {
            return;
        }
        tracing::warn!(entries = found.len(), "the journal lacked entries that the query database has; they are back");
        // A failed write is logged, and the next start finds the same again.
        drop(self.submit(found, context));
        // What has become of their pods meanwhile.
        context.notify(Reconcile);
    }

    /// Entries are safe from the process's death already; this is for the power. The next append does not wait for it.
    pub(super) fn sync_behind(&mut self, context: &mut Context<Self>) {
        if !std::mem::replace(&mut self.upkeep.syncing, true) {
            context.run_later(SYNC_AFTER, Self::sync_now);
        }
    }

    fn sync_now(&mut self, context: &mut Context<Self>) {
        let pending = lock(&self.config.store).begin_sync();
        let pending = pending.inspect_err(|error| tracing::error!(%error, "the journal cannot be synced")).ok().flatten();
        let Some(pending) = pending else { return self.upkeep.syncing = false };
        let (store, me) = (Arc::clone(&self.config.store), context.address());
        actix::spawn(async move {
            let sync = move || {
                let result = pending.run();
                lock(&store).end_sync(&pending, result)
            };
            match tokio::task::spawn_blocking(sync).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    metrics::journal_failed();
                    tracing::error!(%error, "the journal cannot be synced");
                }
                Err(error) => tracing::error!(%error, "the journal's sync died"),
            }
            // The actor may have died meanwhile; its next life syncs with its first commit.
            let _ = me.send(Synced).await;
        });
    }
}

impl Handler<Synced> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Synced, context: &mut Self::Context) {
        self.upkeep.syncing = false;
        let kept = lock(&self.config.store).kept();
        self.note_kept(kept, None, context);
        self.sync_behind(context);
    }
}
