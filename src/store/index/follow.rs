//! The one way from the journal into the database: after every opening, and whenever the database is behind.
//!
//! Segments are read one at a time, and released grants go into the history at once: the journal may have gathered much while the
//! database could not be opened, and memory must not grow with it.

use super::database::{Database, Update};
use super::reader::DatabaseSnapshot;
use super::work::Start;
use crate::domain::{AllocId, Entry, Grant, HookState, PendingHook};
use crate::store::journal::{JournalReplay, codec, segments};
use crate::store::layout::journal_dir;
use crate::store::{LivePayloads, StoreError};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct TrackedStream {
    /// First sequence number of the oldest segment; 0 without one.
    pub(super) oldest: u64,
    /// The last entry of the journal.
    pub(super) last: u64,
    /// The last entry that the database's last checkpoint had.
    pub(super) applied: u64,
    /// Segments with damage inside.
    pub(super) damaged: Vec<PathBuf>,
    /// Entries that only the database has: to be recorded again.
    pub(super) found: Vec<Entry>,
}

/// Gives the database what the journal has. `beat` is called at every progress.
pub(super) fn follow(
    database: &mut Database,
    state_dir: &Path,
    start: Option<&Start>,
    beat: impl Fn(),
) -> Result<TrackedStream, StoreError> {
    let snapshot = &database.reader().snapshot()?;
    let mut follower = Follower { database, snapshot, released: BTreeSet::new(), beat };
    let mut replay = JournalReplay::of(state_dir);
    let mut orphans = Vec::new();
    for (first, path) in segments(&journal_dir(state_dir))? {
        replay.read_segment(first, &path)?;
        for (seq, grant) in replay.take_released() {
            follower.release(seq, grant)?;
        }
        orphans.extend(replay.take_released_orphans());
    }
    // Releases of grants whose own entry only the database has.
    for (id, (seq, state)) in orphans {
        let known = snapshot.live.get(&id).filter(|_| !follower.released.contains(&id));
        if let Some(grant) = known.and_then(|(_, payload)| codec::decode_grant(payload)) {
            follower.release(seq, Grant { state, ..grant })?;
        }
    }
    let live = replay.live_payloads()?;
    let found =
        start.map(|start| follower.found(start.lost_after, &live, &replay)).unwrap_or_default();
    // What the journal may lack is not deleted: not before what was found is recorded, nor where no new head could be written.
    let keeps = !found.is_empty() || replay.missing() > 0;
    follower.live(&live, keeps)?;
    follower.notes(&replay, keeps)?;
    let (oldest, last, applied) = (replay.oldest(), replay.last, snapshot.applied);
    Ok(TrackedStream { oldest, last, applied, damaged: replay.damaged, found })
}

struct Follower<'a, F> {
    database: &'a mut Database,
    snapshot: &'a DatabaseSnapshot,
    released: BTreeSet<AllocId>,
    beat: F,
}

impl<F: Fn()> Follower<'_, F> {
    fn write(&mut self, seq: u64, update: &Update) -> Result<(), StoreError> {
        (self.beat)();
        self.database.write(seq, update)
    }

    /// A released grant goes into the history, unless it is there.
    fn release(&mut self, seq: u64, grant: Grant) -> Result<(), StoreError> {
        let is_there =
            seq <= self.snapshot.applied && !self.snapshot.live.contains_key(&grant.alloc_id);
        self.released.insert(grant.alloc_id.clone());
        if is_there {
            return Ok(());
        }
        let grant = Arc::new(grant);
        let payload = codec::encode(&Entry::Grant(Arc::clone(&grant)))?;
        self.write(seq, &Update::Released(grant, payload))
    }

    /// What only the database has, of entries after `lost_after`.
    fn found(&self, lost_after: u64, live: &LivePayloads, replay: &JournalReplay) -> Vec<Entry> {
        let snapshot = self.snapshot;
        let is_lost = |id: &AllocId, seq: u64| {
            seq > lost_after && !live.contains_key(id) && !self.released.contains(id)
        };
        let grants = snapshot.live.iter().filter(|(id, (seq, _))| is_lost(id, *seq));
        let grants = grants
            .filter_map(|(_, (_, payload))| codec::decode_grant(payload))
            .map(|grant| Entry::Grant(Arc::new(grant)));
        let names = snapshot
            .names
            .iter()
            .filter(|(key, (seq, _))| *seq > lost_after && !replay.names.contains_key(*key));
        let names = names.map(|(key, (_, id))| Entry::Named { key: key.clone(), id: id.clone() });
        let hooks = snapshot
            .hooks
            .iter()
            .filter(|(key, (seq, _))| *seq > lost_after && !replay.owed.contains_key(*key));
        grants
            .chain(names)
            .chain(hooks.map(|(_, (_, hook))| Entry::Hook(Box::new(hook.clone()))))
            .collect()
    }

    /// Makes the live grants those of the journal. `keeps`: nothing is deleted or replaced by something older.
    fn live(&mut self, live: &LivePayloads, keeps: bool) -> Result<(), StoreError> {
        let snapshot = self.snapshot;
        for id in snapshot
            .live
            .keys()
            .filter(|id| !keeps && !live.contains_key(*id) && !self.released.contains(*id))
            .collect::<Vec<_>>()
        {
            self.write(0, &Update::Discard(id.clone()))?;
        }
        for (id, (seq, payload)) in live {
            let differs = |at: u64, there: &Vec<u8>| {
                if keeps { at < *seq && there != payload } else { at > *seq || there != payload }
            };
            if snapshot.live.get(id).is_none_or(|(at, there)| differs(*at, there)) {
                self.write(*seq, &Update::Live(id.clone(), payload.clone()))?;
            }
        }
        Ok(())
    }

    /// The same for names and hooks.
    fn notes(&mut self, replay: &JournalReplay, keeps: bool) -> Result<(), StoreError> {
        let snapshot = self.snapshot;
        for (key, (seq, id)) in &replay.names {
            if snapshot.names.get(key).is_none_or(|(_, there)| there != id) {
                self.write(*seq, &Update::Name(key.clone(), id.clone()))?;
            }
        }
        for (key, (seq, hook)) in &replay.owed {
            if snapshot.hooks.get(key).is_none_or(|(_, there)| there != hook) {
                let hook = Box::new(hook.clone());
                let payload = codec::encode(&Entry::Hook(hook.clone()))?;
                self.write(*seq, &Update::Hook(hook, payload))?;
            }
        }
        if keeps {
            return Ok(());
        }
        for key in snapshot.names.keys().filter(|key| !replay.names.contains_key(*key)) {
            self.write(0, &Update::ForgetName(key.clone()))?;
        }
        for (_, (seq, hook)) in
            snapshot.hooks.iter().filter(|(key, _)| !replay.owed.contains_key(*key))
        {
            self.write(
                *seq,
                &Update::Hook(
                    Box::new(PendingHook { state: HookState::Done, ..hook.clone() }),
                    Vec::new(),
                ),
            )?;
        }
        Ok(())
    }
}
