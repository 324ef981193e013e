//! The store's maintenance after the answers: syncs, checkpoints of the query database, and retries
//! of failed writes.

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

/// The delay of the sync if entries are synced after their answer: a burst has one sync.
const SYNC_AFTER: Duration = Duration::from_millis(2);
/// How long the query database may lag behind the journal after a change. Also the time after which
/// the result of a checkpoint is checked.
const CHECKPOINT_AFTER: Duration = Duration::from_secs(30);
/// The same delay while the query database is not kept up to date.
const MEND_AFTER: Duration = Duration::from_secs(5);
/// The delay after a start until the journal is prepared, behind the registrations. An earlier
/// Allocate prepares it itself.
const READY_AFTER: Duration = Duration::from_millis(300);
/// The delay of a retry after a failure of the journal, unless an Allocate retries earlier.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A sync after the answer is done.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Synced;

impl LedgerActor {
    pub(super) fn begin_upkeep(&mut self, context: &mut Context<Self>) {
        self.look_after_database(context);
        self.retry_later(context);
        context.run_later(READY_AFTER, |this, _| lock(&this.config.store).after_commit());
        // By then the store knows whether the database is slow to open.
        context.run_later(MEND_AFTER, |this, context| {
            let kept = lock(&this.config.store).kept();
            this.note_kept(kept, None, context);
        });
    }

    /// Records the state of the store, and reports changes of it.
    pub(super) fn note_kept(
        &mut self,
        kept: LedgerHealth,
        error: Option<&Arc<StoreError>>,
        context: &mut Context<Self>,
    ) {
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
        self.retry_later(context);
    }

    /// Space may be free again later, and no Allocate may come until then.
    fn retry_later(&mut self, context: &mut Context<Self>) {
        if self.upkeep.kept.journal || self.upkeep.retry_timer.is_some() {
            return;
        }
        self.upkeep.retry_timer = Some(context.run_later(RETRY_AFTER, |this, context| {
            this.upkeep.retry_timer = None;
            let kept = {
                let mut store = lock(&this.config.store);
                // This failure was already logged.
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

    /// Prepares the store for the next entries, and begins a checkpoint if the journal has become
    /// long.
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

    /// Schedules a checkpoint, and a check of its result: no caller waits for its end.
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
                // The database is rebuilt from the journal, so the journal must be writable first.
                let begun = (behind || !kept.database).then(|| {
                    if kept.journal { store.begin_checkpoint().map(drop) } else { Ok(()) }
                });
                (begun, store.kept())
            };
            // Its result is logged where it ends.
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

    /// Records the entries that the journal had lost and a slowly opening database still had.
    fn record_found(&mut self, context: &mut Context<Self>) {
        let found = lock(&self.config.store).found();
        if found.is_empty() {
            return;
        }
        tracing::warn!(
            entries = found.len(),
            "the journal lacked entries that the query database has; they are back"
        );
        // A failed write is logged, and the database keeps them.
        drop(self.submit(found, context));
        // Checks the pods of these grants.
        context.notify(Reconcile);
    }

    /// The entries already survive a crash of the process; this sync is for a power cut. The next
    /// append does not wait for it.
    pub(super) fn sync_behind(&mut self, context: &mut Context<Self>) {
        if !std::mem::replace(&mut self.upkeep.syncing, true) {
            context.run_later(SYNC_AFTER, Self::sync_now);
        }
    }

    fn sync_now(&mut self, context: &mut Context<Self>) {
        let pending = lock(&self.config.store).begin_sync();
        let pending = pending
            .inspect_err(|error| tracing::error!(%error, "failed to sync the journal"))
            .ok()
            .flatten();
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
                    tracing::error!(%error, "failed to sync the journal");
                }
                Err(error) => tracing::error!(%error, "journal sync task panicked"),
            }
            // If the actor has failed in the meantime, its successor syncs with its first commit.
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
