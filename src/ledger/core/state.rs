//! What the ledger's actor knows between two messages, and what it decides.
//!
//! The actor adds the store, timers and answers; the simulation adds a disk and virtual time. Both
//! keep one order: a decision counts the entries that wait for the next write, and
//! [`LedgerState::apply`] follows the write of the entries that [`LedgerState::take`] gave.

use super::claims::{Recording, record_claim, release_claim};
use super::hooks::{HeldBack, ReleaseHooks, owing, undue};
use super::passage::{Passage, View, passage};
use super::reconcile::reconcile;
use super::refusal::held_by_another;
use super::stuck::{Vouched, release_stuck};
use super::watchlist::Watchlist;
use super::{Agenda, Change, Ledger};
use crate::domain::{
    AllocId, CgroupState, Checkpoint, CheckpointEntry, ClaimRef, DeviceId, DueHooks, Entry, Grant,
    GrantState, Moment, NotReleased, Observation, Refusal, ResourceName, Safeguard, StartBlocked,
    Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The entries of one request, with what answers it.
pub type Waiting<R> = (Vec<Entry>, R);

/// The ledger, the entries that wait for the next write, and what observations have shown. `R`
/// answers a request.
#[derive(Debug)]
pub struct LedgerState<R> {
    ledger: Ledger,
    watchlist: Watchlist,
    /// The resources with an after-release hook.
    hooks: Arc<ReleaseHooks>,
    held_back: HeldBack,
    /// The answers of other plugins in the last checkpoint.
    others: BTreeSet<AllocId>,
    waiting: Vec<Waiting<R>>,
}

/// What follows from an observation of the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// The checkpoint has answers of other plugins for these resources. The next pass decides, with
    /// their grants: a device that a pod releases may be theirs.
    TakeOver(BTreeSet<ResourceName>),
    /// The entries to write in one commit, and whether the checkpoint still has a removed pod.
    Decided(Vec<Entry>, bool),
}

/// Whether a container may start, and what must be written first.
pub type StartDecision = (Result<(), (DeviceId, StartBlocked)>, Vec<Entry>);

impl<R> LedgerState<R> {
    /// The state after a start: `ledger` is what the store has.
    #[must_use]
    pub fn new(ledger: Ledger, hooks: Arc<ReleaseHooks>) -> Self {
        LedgerState {
            ledger,
            watchlist: Watchlist::default(),
            hooks,
            held_back: HeldBack::new(),
            others: BTreeSet::new(),
            waiting: Vec::new(),
        }
    }

    /// The live grants, all of them durable.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What observations have shown about the grants.
    #[must_use]
    pub fn watchlist(&self) -> &Watchlist {
        &self.watchlist
    }

    /// Adds entries to the next write. True for the first ones: the caller must schedule the write.
    pub fn add(&mut self, entries: Vec<Entry>, reply: R) -> bool {
        self.waiting.push((entries, reply));
        self.waiting.len() == 1
    }

    /// The entries that wait for the write.
    pub fn uncommitted(&self) -> impl Iterator<Item = &Entry> {
        self.waiting.iter().flat_map(|(entries, _)| entries)
    }

    /// Whether an entry of a claim waits for the write.
    #[must_use]
    pub fn is_uncommitted(&self, claim_uid: &str) -> bool {
        let is_its =
            |grant: &Grant| grant.claim.as_ref().is_some_and(|of| of.claim.uid == claim_uid);
        self.uncommitted().any(|entry| match entry {
            Entry::Grant(grant) => is_its(grant),
            Entry::Moved { alloc_id, .. } => {
                self.ledger.grant(alloc_id).is_some_and(|grant| is_its(grant))
            }
            _ => false,
        })
    }

    /// The entries to write now, by request. The next write begins empty.
    #[must_use]
    pub fn take(&mut self) -> Vec<Waiting<R>> {
        std::mem::take(&mut self.waiting)
    }

    /// Applies entries that were written.
    pub fn apply(&mut self, entries: &[Entry]) -> Vec<Change> {
        entries.iter().map(|entry| self.ledger.evolve(entry)).collect()
    }

    /// Why an Allocate is refused without another look at the node: a hook is pending for one of
    /// the devices, or a device is held as another one.
    #[must_use]
    pub fn refusal(&self, wanted: &Grant) -> Option<Refusal> {
        let waits = self.ledger.waits(&self.hooks, self.uncommitted(), wanted);
        let grants = self.uncommitted().filter_map(|entry| match entry {
            Entry::Grant(grant) => Some(&**grant),
            _ => None,
        });
        waits.or_else(|| held_by_another(&self.ledger, grants, wanted))
    }

    /// Decides a Prepare ([`record_claim`]).
    pub fn record_claim(
        &mut self,
        wanted: &[Arc<Grant>],
        cgroup: &impl Fn(&str) -> CgroupState,
        now: Moment,
    ) -> Recording {
        let uncommitted: Vec<&Entry> = self.uncommitted().collect();
        let recording =
            record_claim(&self.ledger, &self.hooks, &uncommitted, wanted, cgroup, now.wall);
        let claim = wanted.first().and_then(|grant| grant.claim.as_ref());
        if let (Ok(_), Some(hold)) = (&recording.answer, claim) {
            self.watchlist.note_answered(&hold.claim.uid, now.boot);
        }
        recording
    }

    /// Decides an Unprepare ([`release_claim`]).
    #[must_use]
    pub fn release_claim(
        &self,
        uid: &str,
        pods: &BTreeSet<String>,
        cgroup: &impl Fn(&str) -> CgroupState,
        now: Timestamp,
    ) -> Vec<Entry> {
        let uncommitted: Vec<&Entry> = self.uncommitted().collect();
        release_claim(&self.ledger, &self.hooks, &uncommitted, uid, pods, cgroup, now)
    }

    /// Decides an operator's release of a claim ([`release_stuck`]).
    ///
    /// # Errors
    /// When the claim may be in use.
    pub fn release_stuck(
        &self,
        claim: &ClaimRef,
        pods: Vouched<'_>,
        cgroup: &impl Fn(&str) -> CgroupState,
        now: Timestamp,
    ) -> Result<Vec<Entry>, NotReleased> {
        let uncommitted: Vec<&Entry> = self.uncommitted().collect();
        release_stuck(&self.ledger, &self.hooks, &uncommitted, claim, pods, cgroup, now)
    }

    /// Decides what follows from an observation. `is_ours` is whether Holdfast offers a resource.
    pub fn observe(
        &mut self,
        seen: &Observation,
        is_ours: impl Fn(&ResourceName) -> bool,
        now: Moment,
    ) -> Observed {
        let others = seen.checkpoint.as_deref().map(|checkpoint| self.others(checkpoint, is_ours));
        if let Some(others) = others.filter(|others| !others.is_empty())
            && Safeguard::TakeOver.is_on()
        {
            return Observed::TakeOver(others);
        }
        let mut entries = reconcile(&mut self.watchlist, &self.ledger, seen, now);
        // The pending hooks come first, in one commit with the releases that cause them.
        let hooks = owing(&self.ledger, &self.hooks, &entries, self.uncommitted());
        entries.splice(0..0, hooks);
        let is_outdated = Agenda::of(&self.ledger, &self.watchlist, now).is_outdated(seen);
        Observed::Decided(entries, is_outdated)
    }

    /// The resources for which the checkpoint has answers of another plugin that are not known.
    /// Each answer counts once.
    pub fn others(
        &mut self,
        checkpoint: &Checkpoint,
        is_ours: impl Fn(&ResourceName) -> bool,
    ) -> BTreeSet<ResourceName> {
        // A kubelet of the first API version stores no alloc-id: such an answer may be ours.
        let may_be_ours = |entry: &CheckpointEntry| {
            let ids = entry.device_ids.iter();
            let mut holders = ids.flat_map(|id| self.ledger.holders(&entry.resource, id));
            holders.any(|grant| grant.state == GrantState::Granted)
        };
        let others = checkpoint.entries().iter().filter(|entry| {
            entry.alloc_id.is_none() && is_ours(&entry.resource) && !may_be_ours(entry)
        });
        let others: BTreeMap<AllocId, &ResourceName> =
            others.map(|entry| (entry.grant_id(), &entry.resource)).collect();
        let is_new = |id: &AllocId| !self.others.contains(id) && self.ledger.grant(id).is_none();
        let new = others.iter().filter(|(id, _)| is_new(id));
        let resources = new.map(|(_, resource)| (*resource).clone()).collect();
        self.others = others.into_keys().collect();
        resources
    }

    /// The hooks that may run now.
    #[must_use]
    pub fn due(&self) -> DueHooks {
        self.ledger.due(&self.hooks, &self.held_back)
    }

    /// Adopts the hooks of another configuration. Returns whether they differ.
    pub fn follow(&mut self, hooks: Arc<ReleaseHooks>) -> bool {
        let are_new = hooks != self.hooks;
        self.hooks = hooks;
        are_new
    }

    /// The entries that drop pending hooks which only a former configuration had.
    #[must_use]
    pub fn undue(&self) -> Vec<Entry> {
        undue(&self.ledger, &self.hooks)
    }

    /// Decides whether a container with these devices may start. A container that waits for hooks
    /// is held back, so that the hooks may run.
    pub fn check_start(
        &mut self,
        resource: &ResourceName,
        ids: &[DeviceId],
        view: &impl View,
        now: Timestamp,
    ) -> StartDecision {
        let passage = passage(&self.ledger, &self.hooks, resource, ids, view, now);
        let Some(sharing) = self.hooks.get(resource) else { return (Ok(()), Vec::new()) };
        for id in ids {
            let device = (resource.clone(), sharing.whole(resource, id));
            if passage.waits_for_hooks() {
                self.held_back.insert(device);
            } else {
                self.held_back.remove(&device);
            }
        }
        match passage {
            Passage::Open => (Ok(()), Vec::new()),
            Passage::Barred(id, barred) => (Err((id, barred)), Vec::new()),
            Passage::HandedOn(id, former, moves) => {
                let waits = Err((id, StartBlocked::Due { former: former.to_string() }));
                // Such an entry may already wait for the write.
                let moved: BTreeSet<&AllocId> = self.uncommitted().filter_map(moved).collect();
                if moves.iter().filter_map(self::moved).any(|id| moved.contains(id)) {
                    return (waits, Vec::new());
                }
                // The container waits for the hooks that become due by this commit.
                let mut entries = owing(&self.ledger, &self.hooks, &moves, self.uncommitted());
                entries.extend(moves);
                (waits, entries)
            }
        }
    }

    /// Lets no container be held back: another kubelet may start, without a call, one that the
    /// former kubelet had to leave. A container that still has to wait calls again.
    pub fn new_kubelet(&mut self) {
        self.held_back.clear();
    }
}

fn moved(entry: &Entry) -> Option<&AllocId> {
    if let Entry::Moved { alloc_id, .. } = entry { Some(alloc_id) } else { None }
}
