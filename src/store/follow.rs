//! Giving the database what the journal has, one segment after the other: what was given back goes into it at once and is not kept in
//! memory, however much the journal has gathered while the database could not be opened.

use super::database::{Image, Shelf};
use super::journal;
use super::layout::journal_dir;
use super::recovery::{self, LivePayloads, Truth, encode, encode_live};
use super::replay::Fold;
use super::{RecoveryReport, StoreError};
use crate::domain::{AllocId, DeviceId, Entry, Grant, GrantState, HookState, PendingHook, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a start knew that did not wait for the database.
#[derive(Debug, Clone)]
pub(super) struct Start {
    /// The number of the segment that it has begun.
    pub(super) first: u64,
    /// The highest number in the journal before.
    pub(super) last: u64,
    /// Whether there was a database.
    pub(super) existed: bool,
    /// Whether the journal may lack what the database has: in one boot nothing is lost.
    pub(super) may_have_lost: bool,
}

impl Fold {
    /// Forgets the grants that were given back, and returns them with the number of the entry that says so. Nothing follows that entry.
    pub(super) fn take_released(&mut self) -> Vec<(u64, Grant)> {
        let released: Vec<AllocId> = self.grants.iter().filter(|(_, (_, grant))| !grant.is_live()).map(|(id, _)| id.clone()).collect();
        released.iter().for_each(|id| drop(self.payloads.remove(id)));
        released.iter().filter_map(|id| self.grants.remove(id)).collect()
    }

    /// Forgets the grants of which only such states are known, and returns these.
    pub(super) fn take_orphans(&mut self, is_wanted: impl Fn(&GrantState) -> bool) -> BTreeMap<AllocId, (u64, GrantState)> {
        let (taken, left) = std::mem::take(&mut self.orphans).into_iter().partition(|(_, (_, state))| is_wanted(state));
        self.orphans = left;
        taken
    }
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Followed {
    /// First sequence number of the oldest segment; 0 without one.
    pub(super) oldest: u64,
    /// Segments with damage inside.
    pub(super) damaged: Vec<PathBuf>,
    /// What only the database has, and the journal has lost: to be recorded again.
    pub(super) found: Vec<Entry>,
}

/// What the journal said when the database was left out.
struct Before {
    complete_from: u64,
    last: u64,
    is_broken: bool,
    known: BTreeSet<AllocId>,
    hooks: BTreeSet<(ResourceName, DeviceId)>,
}

impl Before {
    fn of(fold: &Fold, released: &BTreeSet<AllocId>) -> Self {
        Before {
            complete_from: fold.complete_from,
            last: fold.last,
            is_broken: fold.is_broken(),
            known: fold.grants.keys().chain(released).cloned().collect(),
            hooks: fold.owed.keys().cloned().collect(),
        }
    }

    /// Whether the journal may have lost the entry of this number ([`recovery::merge`] has the rule).
    fn may_have_lost(&self, seq: u64) -> bool {
        seq >= self.complete_from && (self.is_broken || seq > self.last)
    }
}

/// Gives `shelf`, which holds `image`, everything that the journal has. `lost_and_found` is what may have been lost in the journal:
/// what the database holds, or what could be read of a damaged one. `beat` is called whenever it has got further.
pub(super) fn follow(
    shelf: &mut Shelf,
    image: &Image,
    lost_and_found: &Image,
    state_dir: &Path,
    start: Option<&Start>,
    beat: impl Fn(),
) -> Result<Followed, StoreError> {
    let segments = journal::segments(&journal_dir(state_dir))?;
    let mut fold = Fold::of(state_dir);
    let start = start.filter(|start| start.may_have_lost);
    let (mut before, mut released, mut orphans) = (None, BTreeSet::new(), BTreeMap::new());
    for (first, path) in &segments {
        if before.is_none() && start.is_some_and(|start| *first >= start.first) {
            before = Some(Before::of(&fold, &released));
        }
        fold.read_segment(*first, path)?;
        for (seq, grant) in fold.take_released() {
            retire(shelf, image, seq, &grant)?;
            released.insert(grant.alloc_id);
            beat();
        }
        orphans.extend(fold.take_orphans(|state| matches!(state, GrantState::Released { .. })));
    }
    // What became of grants of which the journal has nothing else, and the database the rest.
    for (id, (seq, state)) in orphans {
        let known = image.live.get(&id).filter(|_| !released.contains(&id));
        if let Some(grant) = known.and_then(|(_, payload)| recovery::decode_grant(payload)) {
            retire(shelf, image, seq, &Grant { state, ..grant })?;
        }
    }
    let (oldest, damaged) = (fold.oldest(), fold.damaged.clone());
    let mut truth = recovery::merge(fold, &Image::default(), &mut RecoveryReport::default(), |_| None);
    let live = encode_live(&mut truth)?;
    let found = before.map(|before| found(&before, lost_and_found, &truth, &released)).unwrap_or_default();
    catch_up(shelf, image, &truth, &live, &found, beat)?;
    Ok(Followed { oldest, damaged, found })
}

/// A grant that was given back goes into the history, unless it is there.
fn retire(shelf: &mut Shelf, image: &Image, seq: u64, grant: &Grant) -> Result<(), StoreError> {
    if seq > image.applied || image.live.contains_key(&grant.alloc_id) {
        shelf.retire(grant, seq, &encode(&Entry::Grant(Arc::new(grant.clone())))?)?;
    }
    Ok(())
}

/// What the journal has lost and nobody has told it since.
fn found(before: &Before, image: &Image, truth: &Truth, released: &BTreeSet<AllocId>) -> Vec<Entry> {
    let is_unknown = |id: &AllocId| !before.known.contains(id) && !truth.live.contains_key(id) && !released.contains(id);
    let grants = image.live.iter().filter(|(id, (seq, _))| is_unknown(id) && before.may_have_lost(*seq));
    let grants = grants.filter_map(|(_, (_, payload))| recovery::decode_grant(payload)).map(|grant| Entry::Grant(Arc::new(grant)));
    let names = image.names.iter().filter(|(key, (seq, _))| !truth.names.contains_key(*key) && before.may_have_lost(*seq));
    let names = names.map(|(key, (_, id))| Entry::Named { key: key.clone(), id: id.clone() });
    let is_unknown = |key| !before.hooks.contains(key) && !truth.owed.contains_key(key);
    let hooks = image.hooks.iter().filter(|(key, (seq, _))| is_unknown(key) && before.may_have_lost(*seq));
    let hooks = hooks.map(|(_, (_, hook))| Entry::Hook(Box::new(hook.clone())));
    grants.chain(names).chain(hooks).collect()
}

/// Gives the database what it lacks, and takes away what is not so any more. What it has already is not written again, and what was
/// found in it alone stays until it is recorded.
pub(super) fn catch_up(
    shelf: &mut Shelf,
    image: &Image,
    truth: &Truth,
    live: &LivePayloads,
    found: &[Entry],
    beat: impl Fn(),
) -> Result<(), StoreError> {
    let found_grants: BTreeSet<&AllocId> =
        found.iter().filter_map(|entry| if let Entry::Grant(grant) = entry { Some(&grant.alloc_id) } else { None }).collect();
    for (seq, grant) in truth.released.values() {
        retire(shelf, image, *seq, grant)?;
        beat();
    }
    let is_over = |id: &AllocId| !live.contains_key(id) && !truth.released.contains_key(id) && !found_grants.contains(id);
    for id in image.live.keys().filter(|id| is_over(id)) {
        shelf.discard(id)?;
    }
    for (id, (seq, payload)) in live {
        if image.live.get(id).is_none_or(|(_, there)| there != payload) {
            shelf.put(id, *seq, payload)?;
            beat();
        }
    }
    for (key, (seq, id)) in &truth.names {
        if image.names.get(key).is_none_or(|(_, there)| there != id) {
            shelf.name(key, *seq, id)?;
        }
    }
    let found_names: BTreeSet<&String> =
        found.iter().filter_map(|entry| if let Entry::Named { key, .. } = entry { Some(key) } else { None }).collect();
    for key in image.names.keys().filter(|key| !truth.names.contains_key(*key) && !found_names.contains(key)) {
        shelf.forget_name(key)?;
    }
    for (key, (seq, hook)) in &truth.owed {
        if image.hooks.get(key).is_none_or(|(_, there)| there != hook) {
            shelf.hook(hook, *seq, &encode(&Entry::Hook(Box::new(hook.clone())))?)?;
        }
    }
    let is_found = |hook: &PendingHook| found.iter().any(|entry| matches!(entry, Entry::Hook(found) if **found == *hook));
    for (key, (seq, hook)) in &image.hooks {
        if !truth.owed.contains_key(key) && !is_found(hook) {
            shelf.hook(&PendingHook { state: HookState::Done, ..hook.clone() }, *seq, &[])?;
        }
    }
    Ok(())
}
