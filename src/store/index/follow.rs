//! Brings the database up to date with the journal: after every opening, and whenever it lags
//! behind.
//!
//! Segments are read one at a time, and released grants go into the history at once. So memory does
//! not grow with a journal that became long while the database could not be opened.

use super::database::Database;
use super::reader::DatabaseSnapshot;
use super::work::{Start, Update};
use crate::domain::{AllocId, Entry, Grant, HookState, PendingHook};
use crate::store::journal::{JournalReplay, codec, segments};
use crate::store::layout::journal_dir;
use crate::store::notes::Notes;
use crate::store::{LivePayloads, StoreError};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The result.
#[derive(Debug, Default)]
pub(super) struct Followed {
    /// First sequence number of the oldest segment; 0 without one.
    pub(super) oldest: u64,
    /// The last entry of the journal.
    pub(super) last: u64,
    /// The last entry at the database's last checkpoint.
    pub(super) applied: u64,
    /// The segment that is being written.
    pub(super) newest: PathBuf,
    /// Damaged segments.
    pub(super) damaged: Vec<PathBuf>,
    /// Entries that only the database has. They must be recorded again.
    pub(super) found: Vec<Entry>,
}

/// Writes the journal's content to the database. With `has_found`, entries that only the
/// database has are not recorded yet. Calls `progress` before every write.
pub(super) fn follow(
    database: &mut Database,
    state_dir: &Path,
    start: Option<&Start>,
    has_found: bool,
    progress: impl Fn(),
) -> Result<Followed, StoreError> {
    let snapshot = &database.reader().snapshot()?;
    let mut follower = Follower { database, snapshot, released: BTreeSet::new(), progress };
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
    let found = start.map(|start| follower.found(start.lost_after, &live, &replay.notes));
    let found = found.unwrap_or_default();
    // Nothing is deleted that the journal may have lost: entries that were just found are not
    // recorded yet, and after damage there may be no new head yet.
    let keeps = has_found || !found.is_empty() || replay.missing() > 0;
    follower.live(&live, keeps)?;
    follower.notes(&replay.notes, keeps)?;
    let (oldest, last, applied) = (replay.oldest(), replay.last, snapshot.applied);
    let newest = replay.segments.last().map(|(_, path)| path.clone()).unwrap_or_default();
    Ok(Followed { oldest, last, applied, newest, damaged: replay.damaged, found })
}

struct Follower<'a, F> {
    database: &'a mut Database,
    snapshot: &'a DatabaseSnapshot,
    released: BTreeSet<AllocId>,
    progress: F,
}

impl<F: Fn()> Follower<'_, F> {
    fn write(&mut self, seq: u64, update: &Update) -> Result<(), StoreError> {
        (self.progress)();
        self.database.write(seq, update)
    }

    /// Adds a released grant to the history, unless it is there.
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

    /// Entries after `lost_after` that only the database has.
    fn found(&self, lost_after: u64, live: &LivePayloads, notes: &Notes) -> Vec<Entry> {
        let is_unknown = |entry: &Entry| match entry {
            Entry::Grant(grant) => {
                let id = &grant.alloc_id;
                !live.contains_key(id) && !self.released.contains(id)
            }
            note => !notes.knows(note),
        };
        let entries = self.snapshot.entries_after(lost_after);
        entries.filter_map(|(_, entry)| entry).filter(is_unknown).collect()
    }

    /// Makes the live grants those of the journal. With `keeps` nothing is deleted, or replaced by
    /// an older value.
    fn live(&mut self, live: &LivePayloads, keeps: bool) -> Result<(), StoreError> {
        let snapshot = self.snapshot;
        for id in snapshot.live.keys() {
            if !keeps && !live.contains_key(id) && !self.released.contains(id) {
                self.write(0, &Update::Discard(id.clone()))?;
            }
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
    fn notes(&mut self, notes: &Notes, keeps: bool) -> Result<(), StoreError> {
        let Notes { names, hooks, .. } = &self.snapshot.notes;
        for (key, (seq, id)) in &notes.names {
            if names.get(key).is_none_or(|(_, there)| there != id) {
                self.write(*seq, &Update::Name(key.clone(), id.clone()))?;
            }
        }
        for (key, (seq, hook)) in &notes.hooks {
            if hooks.get(key).is_none_or(|(_, there)| there != hook) {
                let hook = Box::new(hook.clone());
                let payload = codec::encode(&Entry::Hook(hook.clone()))?;
                self.write(*seq, &Update::Hook(hook, payload))?;
            }
        }
        if keeps {
            return Ok(());
        }
        for key in names.keys().filter(|key| !notes.names.contains_key(*key)) {
            self.write(0, &Update::ForgetName(key.clone()))?;
        }
        for (key, (seq, hook)) in hooks {
            if !notes.hooks.contains_key(key) {
                let done = Box::new(PendingHook { state: HookState::Done, ..hook.clone() });
                self.write(*seq, &Update::Hook(done, Vec::new()))?;
            }
        }
        Ok(())
    }
}
