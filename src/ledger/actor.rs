//! The shell: group commit and publication.
//!
//! A commit takes everything that is in the mailbox: the first `Record` of a batch puts a `Commit` behind those that
//! already wait, so one write and one fdatasync answer them all, and a lone one waits for nobody.

use super::config::LedgerConfig;
use super::core::{Change, HeldBack, Ledger, ReleaseHooks, Watchlist, held_as_other};
use super::forgetting::Forgetting;
use super::looks::Looks;
use super::observe::{KubeletAge, Looker};
use super::recording::{Answer, Recording, Waiting, Written};
use super::report;
use super::sight::{Seen, is_held, refusal, unseen};
use super::upkeep::Upkeep;
use crate::domain::{Entry, Grant, Inventory, Refusal, WhenNotDurable};
use crate::host::{self, HostRoot};
use crate::messages::{Crash, Publish, Record, RecordError};
use crate::store::{Store, StoreError};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, Context, Handler, Message, StreamHandler};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_stream::wrappers::WatchStream;

/// Whoever answers a lone Allocate, and whoever asked, have the processors for so long: a small node has two. Then the others learn of it.
const TOLD_AFTER: Duration = Duration::from_millis(1);
/// Others learn of an Allocate soon after its answer, and of many that come together at most this often.
const PUBLISH_EVERY: Duration = Duration::from_millis(10);
/// The same for each live grant: all of them are told, and counted, every time.
const PUBLISH_EVERY_PER_GRANT: Duration = Duration::from_micros(40);

/// The actor.
pub struct LedgerActor {
    pub(super) config: LedgerConfig,
    /// What is known, and durable.
    pub(super) ledger: Ledger,
    pub(super) watchlist: Watchlist,
    pub(super) looker: Looker,
    pub(super) held_back: HeldBack,
    /// The resources with a hook after release.
    pub(super) hooks: Arc<ReleaseHooks>,
    pub(super) kubelet_age: KubeletAge,
    pending: Vec<(Vec<Entry>, Waiting)>,
    /// Confirmed, and in nobody's log yet.
    untold: Vec<(Change, Entry)>,
    /// Whether something is known that was not published.
    unpublished: bool,
    /// Whether a `Publish` is on its way.
    publishes: bool,
    published_at: Instant,
    pub(super) upkeep: Upkeep,
    pub(super) looks: Looks,
    pub(super) forgetting: Forgetting,
    _life: Box<dyn Any + Send>,
}

impl std::fmt::Debug for LedgerActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LedgerActor").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}

/// Behind every `Record` that waits: make them all durable.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Commit;

/// The kubelet has been asked about who holds devices of a grant: make it durable, or refuse it.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), RecordError>")]
struct Decide {
    record: Record,
    /// Grants whose holders it lists.
    seen: Seen,
}

impl LedgerActor {
    /// Builds one life of the actor from what the store has.
    pub fn new(config: LedgerConfig, life: impl Any + Send) -> Self {
        let recovered = config.recovered.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ledger = recovered.unwrap_or_else(|| lock(&config.store).load().into());
        let upkeep = Upkeep::new(&config);
        let (looker, hooks) = (Looker::new(&config), config.release_hooks());
        LedgerActor {
            config,
            ledger,
            watchlist: Watchlist::default(),
            looker,
            hooks,
            held_back: HeldBack::new(),
            kubelet_age: KubeletAge::default(),
            pending: Vec::new(),
            untold: Vec::new(),
            unpublished: false,
            publishes: false,
            published_at: Instant::now(),
            upkeep,
            looks: Looks::new(),
            forgetting: Forgetting::default(),
            _life: Box::new(life),
        }
    }

    /// The host's files.
    pub(super) fn host_root(&self) -> HostRoot {
        HostRoot::new(&self.config.host_root)
    }

    /// What is about to be written.
    pub(super) fn written(&self) -> impl Iterator<Item = &Entry> {
        self.pending.iter().flat_map(|(entries, _)| entries)
    }

    /// Puts entries into the next commit.
    pub(super) fn submit(&mut self, entries: Vec<Entry>, context: &mut Context<Self>) -> oneshot::Receiver<Written> {
        let (answer, answered) = oneshot::channel();
        self.wait(entries, Waiting::Here(answer), context);
        answered
    }

    fn wait(&mut self, entries: Vec<Entry>, waiting: Waiting, context: &mut Context<Self>) {
        if self.pending.is_empty() {
            context.notify(Commit);
        }
        self.pending.push((entries, waiting));
    }

    /// Why a grant would give away by another id what is held: what is about to be written counts too.
    fn held_as_other(&self, grant: &Grant) -> Option<Refusal> {
        let pending = self.written().filter_map(|entry| if let Entry::Grant(grant) = entry { Some(&**grant) } else { None });
        held_as_other(&self.ledger, pending, grant)
    }

    /// Durable, then known, then answered (I1). Whatever else there is to do comes behind.
    fn commit(&mut self, context: &mut Context<Self>) {
        let (entries, waiting): (Vec<_>, Vec<_>) = self.pending.drain(..).unzip();
        let counts: Vec<usize> = entries.iter().map(Vec::len).collect();
        let entries: Vec<Entry> = entries.into_iter().flatten().collect();
        if entries.is_empty() {
            return;
        }
        let began = Instant::now();
        let (appended, result, kept) = {
            let mut store = lock(&self.config.store);
            let appended = store.record(&entries).map_err(Arc::new);
            let serves = self.config.plan.borrow().ledger.when_not_durable == WhenNotDurable::Serve;
            let owed = appended.is_err() && serves && store.owe(&entries).is_ok();
            (appended.clone(), if owed { Ok(()) } else { appended }, store.kept())
        };
        let took = began.elapsed();
        let is_too_large = appended.as_ref().is_err_and(|error| matches!(**error, StoreError::TooLarge { .. }));
        if is_too_large && waiting.len() > 1 {
            // Nothing was written. What does not fit is refused to whoever asked for it, and to nobody beside.
            let mut entries = entries.into_iter();
            for (count, waiting) in counts.into_iter().zip(waiting) {
                self.pending.push((entries.by_ref().take(count).collect(), waiting));
                self.commit(context);
            }
            return;
        }
        if let Err(error) = &result {
            // A journal that cannot be written is told of once, below.
            if kept.journal {
                tracing::error!(%error, "an entry cannot be recorded");
            } else {
                tracing::debug!(%error, entries = entries.len(), "not recorded");
            }
        } else {
            let changes: Vec<Change> = entries.iter().map(|entry| self.ledger.evolve(entry)).collect();
            if changes.iter().any(|change| matches!(change, Change::Named | Change::Forgotten)) {
                // The scan after the answer must find them.
                self.publish_names();
            }
            self.untold.extend(changes.into_iter().zip(entries));
        }
        let is_lone = matches!(waiting[..], [Waiting::Allocate(_)]);
        waiting.into_iter().for_each(|waiting| waiting.tell(result.clone()));
        match &appended {
            Ok(()) => metrics::journal_synced(took),
            Err(_) if is_too_large => {}
            Err(_) => metrics::journal_failed(),
        }
        self.note_kept(kept, appended.as_ref().err(), context);
        if result.is_ok() && self.config.process_crash {
            self.sync_behind(context);
        }
        self.unpublished = true;
        if is_lone {
            context.run_later(TOLD_AFTER, Self::tell_others);
        } else {
            self.tell_others(context);
        }
    }

    /// Notes what was confirmed, for the next start, the log and everybody else. No caller waits for it.
    fn tell_others(&mut self, context: &mut Context<Self>) {
        let untold = std::mem::take(&mut self.untold);
        if untold.is_empty() {
            return;
        }
        self.follow_up();
        for (change, entry) in &untold {
            report::tell(change, entry);
        }
        let granted = untold.iter().any(|(_, entry)| matches!(entry, Entry::Grant(_)));
        let grants = u32::try_from(self.ledger.grants().len()).unwrap_or(u32::MAX);
        let every = PUBLISH_EVERY.max(PUBLISH_EVERY_PER_GRANT.saturating_mul(grants));
        match every.checked_sub(self.published_at.elapsed()).filter(|_| granted) {
            // Behind the Allocates that wait.
            None => context.notify(Publish),
            Some(wait) if !std::mem::replace(&mut self.publishes, true) => drop(context.notify_later(Publish, wait)),
            Some(_) => {}
        }
        self.checkpoint_later(context);
    }

    pub(super) fn publish(&mut self) {
        (self.unpublished, self.published_at) = (false, Instant::now());
        self.publish_due();
        let grants = Arc::new(self.ledger.grants().cloned().collect::<Vec<_>>());
        self.config.grants.send_replace(grants);
    }

    fn publish_names(&self) {
        self.config.names.send_replace(Arc::clone(self.ledger.names()));
    }
}

pub(super) fn lock(store: &Mutex<Store>) -> MutexGuard<'_, Store> {
    // The store marks itself failed before it changes anything that a panic could leave half done.
    store.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.look(context);
        self.look_for_lacking(context);
    }
}

impl StreamHandler<Arc<Inventory>> for LedgerActor {
    fn handle(&mut self, inventory: Arc<Inventory>, context: &mut Self::Context) {
        self.follow_hooks(context);
        self.forget_later(context);
        let entries = self.ledger.unlisted(&inventory);
        if !entries.is_empty() {
            // The list does not wait for the disk: an id that came and went before this was written is not remembered.
            drop(self.submit(entries, context));
        }
    }

    /// The publisher ends with the daemon only.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Handler<Record> for LedgerActor {
    type Result = Recording;

    fn handle(&mut self, record: Record, context: &mut Self::Context) -> Self::Result {
        if !record.exclusive || !is_held(&self.ledger, &record.grant) {
            return Handler::<Decide>::handle(self, Decide { record, seen: Seen::default() }, context);
        }
        let unseen = unseen(&self.ledger, &record.grant, &self.looker);
        let (looker, me) = (self.looker.clone(), context.address());
        Recording::Later(Box::pin(async move {
            let (listed, checkpoint) = tokio::join!(looker.listed(&unseen), looker.checkpoint());
            me.send(Decide { record, seen: Seen { listed, checkpoint } }).await.unwrap_or_else(|_| die())
        }))
    }
}

impl Handler<Decide> for LedgerActor {
    type Result = Recording;

    fn handle(&mut self, Decide { record: Record { grant, exclusive }, seen }: Decide, context: &mut Self::Context) -> Self::Result {
        // Sent again after a death: the first time may have reached the store.
        if self.ledger.grant(&grant.alloc_id).is_some() {
            return Recording::Now(Ok(()));
        }
        if let Some(refusal) = self.ledger.waits(&self.hooks, self.written(), &grant) {
            return Recording::Now(Err(refusal.into()));
        }
        if let Some(refusal) = self.held_as_other(&grant) {
            return Recording::Now(Err(refusal.into()));
        }
        if exclusive {
            let settled = self.kubelet_age.is_settled(*self.config.kubelet.borrow(), host::now());
            let refuse = self.config.plan.borrow().ledger.refuse;
            if let Some(refusal) = refusal(&self.ledger, &self.watchlist, &grant, &self.looker, settled, &seen, refuse) {
                return Recording::Now(Err(refusal.into()));
            }
        }
        let answer = Answer::default();
        self.wait(vec![Entry::Grant(grant)], Waiting::Allocate(answer.clone()), context);
        Recording::WithCommit(answer)
    }
}

/// Waits for the commit. When the actor dies before it, the waiting message dies too, and the caller's mailbox sends
/// it to the next life.
pub(super) async fn answer(answered: oneshot::Receiver<Written>) -> Written {
    answered.await.unwrap_or_else(|_| die())
}

/// Ends this task as a panic would, without another report of the same death.
fn die() -> ! {
    std::panic::resume_unwind(Box::new("the ledger actor died before its commit"))
}

impl Handler<Commit> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Commit, context: &mut Self::Context) {
        self.commit(context);
    }
}

impl Handler<Publish> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Publish, context: &mut Self::Context) {
        self.publishes = false;
        if self.unpublished {
            self.publish();
            lock(&self.config.store).tell_database();
            self.look_some_time(context);
        }
    }
}

impl Handler<Crash> for LedgerActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
