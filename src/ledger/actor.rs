//! The ledger actor's messages and the order of their effects.
//!
//! A commit is one message: write and sync, apply to the ledger, answer (I1). Its follow-up (log,
//! metrics, publication, query database) is the next message, [`AfterCommit`].

use super::committer::{Reply, Written, write};
use super::config::LedgerConfig;
use super::core::{Change, Ledger, LedgerState, Waiting, never_started};
use super::reconciler::Reconciler;
use super::report;
use super::sight::{Seen, is_held, unseen};
use super::upkeep::Upkeep;
use crate::domain::{AllocId, Entry, Grant, Inventory, LedgerHealth, Refusal, WhenNotDurable};
use crate::host::{self, HostRoot};
use crate::messages::{Crash, Publish, Record, RecordError, WithReply};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, Context, Handler, Message, StreamHandler};
use std::any::Any;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_stream::wrappers::WatchStream;

/// Rate limit for publications of new grants: every subscriber reads all live grants each time.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(10);
/// The addition to this limit for each live grant.
const PUBLISH_INTERVAL_PER_GRANT: Duration = Duration::from_micros(40);

/// The ledger actor.
pub struct LedgerActor {
    pub(super) config: LedgerConfig,
    pub(super) state: LedgerState<Reply>,
    pub(super) reconciler: Reconciler,
    published_at: Instant,
    /// Whether a publication is scheduled.
    publishes: bool,
    pub(super) upkeep: Upkeep,
    _life: Box<dyn Any + Send>,
}

impl std::fmt::Debug for LedgerActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LedgerActor").field("ledger", self.ledger()).finish_non_exhaustive()
    }
}

/// Makes every waiting request durable. It is queued behind them.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Commit;

/// The follow-up of a commit, queued right behind its answers.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct AfterCommit {
    entries: Vec<(Change, Entry)>,
    appended: Written,
    kept: LedgerHealth,
    took: Duration,
}

/// The kubelet was asked for the holders of a grant's devices: record the grant, or refuse it.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Decide {
    request: WithReply<Record>,
    /// The grants whose holders the kubelet lists.
    seen: Seen,
}

impl LedgerActor {
    /// Builds the actor from the content of the store, at the start and after each failure.
    pub fn new(config: LedgerConfig, life: impl Any + Send) -> Self {
        let recovered = config.recovered.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ledger = recovered.unwrap_or_else(|| config.recover());
        let upkeep = Upkeep::new(&config);
        let reconciler = Reconciler::new(&config);
        LedgerActor {
            state: LedgerState::new(ledger, config.release_hooks()),
            config,
            reconciler,
            published_at: Instant::now(),
            publishes: false,
            upkeep,
            _life: Box::new(life),
        }
    }

    /// The live grants.
    pub(super) fn ledger(&self) -> &Ledger {
        self.state.ledger()
    }

    /// The root of the host's file system.
    pub(super) fn host_root(&self) -> HostRoot {
        HostRoot::new(&self.config.host_root)
    }

    /// Puts entries into the next commit.
    pub(super) fn submit(
        &mut self,
        entries: Vec<Entry>,
        context: &mut Context<Self>,
    ) -> oneshot::Receiver<Written> {
        let (reply, answer) = oneshot::channel();
        self.schedule_commit(entries, Reply::Internal(reply), context);
        answer
    }

    pub(super) fn schedule_commit(
        &mut self,
        entries: Vec<Entry>,
        reply: Reply,
        context: &mut Context<Self>,
    ) {
        if self.state.add(entries, reply) {
            context.notify(Commit);
        }
    }

    /// Writes and syncs a batch, applies it, and answers (I1).
    fn commit(&mut self, batch: Vec<Waiting<Reply>>, context: &mut Context<Self>) {
        let (entries, replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        let counts: Vec<usize> = entries.iter().map(Vec::len).collect();
        let entries: Vec<Entry> = entries.into_iter().flatten().collect();
        let serves = self.config.plan.borrow().ledger.when_not_durable == WhenNotDurable::Serve;
        let outcome = write(&self.config.store, &entries, serves);
        if outcome.is_too_large() && replies.len() > 1 {
            // Nothing was written. Only the request with the oversized entry is refused.
            let mut entries = entries.into_iter();
            for (count, reply) in counts.into_iter().zip(replies) {
                self.commit(vec![(entries.by_ref().take(count).collect(), reply)], context);
            }
            return;
        }
        let changes: Vec<Change> = match &outcome.result {
            Ok(()) => self.state.apply(&entries),
            Err(_) => Vec::new(),
        };
        if changes.iter().any(|change| matches!(change, Change::Named | Change::Forgotten)) {
            // The scan that follows the answer must find them.
            self.publish_names();
        }
        let unanswered: Vec<AllocId> =
            replies.into_iter().filter_map(|reply| reply.send(outcome.result.clone())).collect();
        match &outcome.result {
            // `note_kept` logs a journal that cannot be written, once.
            Err(error) if outcome.kept.journal => {
                tracing::error!(%error, "entries were not recorded");
            }
            Err(error) => {
                tracing::debug!(%error, entries = entries.len(), "entries were not recorded");
            }
            Ok(()) => {}
        }
        if outcome.appended.is_err() && !outcome.is_too_large() {
            metrics::journal_failed();
        }
        context.notify(AfterCommit {
            entries: changes.into_iter().zip(entries).collect(),
            appended: outcome.appended,
            kept: outcome.kept,
            took: outcome.took,
        });
        self.release_unanswered(unanswered, context);
    }

    /// Releases grants that were written after their Allocate had failed. No hook becomes due: no
    /// container had the devices.
    fn release_unanswered(&mut self, ids: Vec<AllocId>, context: &mut Context<Self>) {
        if ids.is_empty() {
            return;
        }
        let now = host::now().wall;
        let released = |alloc_id| Entry::Moved { alloc_id, state: never_started(now) };
        // If this cannot be written, a later pass releases them.
        drop(self.submit(ids.into_iter().map(released).collect(), context));
    }

    /// Publishes now, or as soon as the rate limit allows.
    fn publish_soon(&mut self, context: &mut Context<Self>) {
        let grants = u32::try_from(self.ledger().grants().len()).unwrap_or(u32::MAX);
        let interval = PUBLISH_INTERVAL.max(PUBLISH_INTERVAL_PER_GRANT.saturating_mul(grants));
        match interval.checked_sub(self.published_at.elapsed()) {
            None => context.notify(Publish),
            Some(wait) if !std::mem::replace(&mut self.publishes, true) => {
                context.notify_later(Publish, wait);
            }
            Some(_) => {}
        }
    }

    pub(super) fn publish(&mut self) {
        self.published_at = Instant::now();
        self.publish_due();
        let grants = Arc::new(self.ledger().grants().cloned().collect::<Vec<_>>());
        self.config.grants.send_replace(grants);
    }

    fn publish_names(&self) {
        self.config.names.send_replace(Arc::clone(self.ledger().names()));
    }
}

impl Actor for LedgerActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        self.publish();
        self.publish_names();
        self.drop_undue(context);
        context.add_stream(WatchStream::new(self.config.inventory.clone()));
        context.add_stream(WatchStream::from_changes(self.config.kubelet.clone()));
        self.begin_upkeep(context);
        self.reconcile(context);
        self.look_for_lacking(context);
    }
}

impl StreamHandler<Arc<Inventory>> for LedgerActor {
    fn handle(&mut self, inventory: Arc<Inventory>, context: &mut Self::Context) {
        self.follow_hooks(context);
        // The list does not wait for the disk: an id that came and went before this write is not
        // remembered. One list may be too long for a record, and must not cost the others.
        for entry in self.ledger().unlisted(&inventory) {
            drop(self.submit(vec![entry], context));
        }
    }

    /// The publisher ends only with the daemon.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Handler<WithReply<Record>> for LedgerActor {
    type Result = ();

    fn handle(&mut self, request: WithReply<Record>, context: &mut Self::Context) {
        if request.reply.is_closed() {
            // It waited too long in the mailbox, and the Allocate has failed.
            return;
        }
        let Record { grant, exclusive } = &request.message;
        if !exclusive || !is_held(self.ledger(), grant) {
            return self.decide(request, &Seen::default(), context);
        }
        let unseen = unseen(self.ledger(), grant, &self.reconciler.observer);
        let (observer, me) = (self.reconciler.observer.clone(), context.address());
        actix::spawn(async move {
            let (listed, checkpoint) =
                tokio::join!(observer.listed(&unseen), observer.checkpoint());
            // If the actor has failed in the meantime, the caller sends its message again.
            let _ = me.send(Decide { request, seen: Seen { listed, checkpoint } }).await;
        });
    }
}

impl Handler<Decide> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Decide { request, seen }: Decide, context: &mut Self::Context) {
        self.decide(request, &seen, context);
    }
}

impl LedgerActor {
    /// Schedules the commit of a grant, or answers at once where there is nothing to write.
    fn decide(&mut self, request: WithReply<Record>, seen: &Seen, context: &mut Context<Self>) {
        let WithReply { message: Record { grant, exclusive }, reply } = request;
        // A message that is sent again after a failure: the first one may have reached the store.
        if self.ledger().grant(&grant.alloc_id).is_some() {
            return drop(reply.send(Ok(())));
        }
        match self.refusal(&grant, exclusive, seen) {
            Some(refusal) => drop(reply.send(Err(RecordError::from(refusal)))),
            None => {
                let reply = Reply::Allocate(reply, grant.alloc_id.clone());
                self.schedule_commit(vec![Entry::Grant(grant)], reply, context);
            }
        }
    }

    /// Why a grant is refused. Entries that wait for the commit count too.
    fn refusal(&mut self, grant: &Grant, exclusive: bool, seen: &Seen) -> Option<Refusal> {
        let refused = self.state.refusal(grant);
        if refused.is_some() || !exclusive {
            return refused;
        }
        self.reconciler.refusal(&self.state, &self.config, grant, seen, host::now())
    }
}

impl Handler<Commit> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Commit, context: &mut Self::Context) {
        let batch = self.state.take();
        self.commit(batch, context);
    }
}

impl Handler<AfterCommit> for LedgerActor {
    type Result = ();

    fn handle(
        &mut self,
        AfterCommit { entries, appended, kept, took }: AfterCommit,
        context: &mut Self::Context,
    ) {
        if appended.is_ok() {
            metrics::journal_synced(took);
        }
        self.note_kept(kept, appended.as_ref().err(), context);
        if entries.is_empty() {
            return;
        }
        if self.config.process_crash {
            self.sync_behind(context);
        }
        self.follow_up();
        for (change, entry) in &entries {
            report::log_change(change, entry);
        }
        if entries.iter().any(|(_, entry)| matches!(entry, Entry::Grant(_))) {
            self.publish_soon(context);
        } else {
            context.notify(Publish);
        }
        self.checkpoint_later(context);
    }
}

impl Handler<Publish> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Publish, context: &mut Self::Context) {
        self.publishes = false;
        self.publish();
        self.ensure_scheduled(context);
    }
}

impl Handler<Crash> for LedgerActor {
    type Result = ();

    #[expect(clippy::panic, reason = "this message requests a crash")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
