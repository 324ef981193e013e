//! The store: a write-ahead journal and sled, each able to rebuild the other.
//!
//! ```text
//!            append ─▶ journal (one write, synced) ─▶ the answer to Allocate
//!                         └▶ live map in memory ─▶ queue ─▶ the shelver's thread: sled (no flush)
//!                                                           ─▶ checkpoint: flush + fdatasync, old segments deleted
//!
//!   <state-dir>/lock                          one writer at a time; the last one's boot or end, and its last confirmed entry
//!   <state-dir>/journal/<first seq>.log       every entry since the last checkpoint, after a copy of everything live
//!   <state-dir>/journal/<first seq>.draft           an import that was cut short; it means nothing
//!   <state-dir>/db/                           sled: live grants, names, hooks that are owed, history
//!   <state-dir>/….quarantine-<millis>         what was damaged; kept for a person to look at, never read again
//! ```
//!
//! It promises: what [`Store::append`] has confirmed is found again by [`Store::open`], whatever the process, the machine
//! or one of the two copies goes through in between; what cannot be found again is counted in [`RecoveryReport`], never
//! passed over (I1, I9). It does not know what a grant means: it keeps entries and folds them.

#[cfg(test)]
mod bounds_tests;
mod codec;
mod database;
mod desk;
mod direct;
mod error;
mod export;
mod follow;
mod journal;
mod layout;
mod open;
mod opening;
mod peek;
mod recovery;
mod replay;
#[cfg(test)]
mod samples;
mod shared;
mod shelver;
#[cfg(test)]
mod slow_tests;
mod take_over;
#[cfg(test)]
mod tests;
mod upkeep;
mod verify;
mod work;

pub use codec::VERSION as RECORDS;
pub use error::StoreError;
pub use export::{Export, Past, Told};
pub use journal::PendingSync;
pub use layout::keep_private;
pub use peek::{History, journal_bytes, peek, peek_history};
pub use recovery::RecoveryReport;
pub use shelver::PendingCheckpoint;
pub use verify::{DatabaseCheck, JournalCheck, LiveCheck, Verification, Verifier, verify};

use self::journal::Journal;
use self::layout::Lock;
use self::recovery::{LivePayloads, Notes, decode_grant, encode};
use self::shelver::Shelver;
use crate::domain::{
    AllocId, DeviceId, Durability, Entry, Gone, Grant, LedgerHealth, Listed, PendingHooks, Verdicts, note_gone, note_hook, note_list,
    note_verdict,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// A checkpoint starts a new segment when this much has been appended, some 1500 grants, or as much as its head has.
const SEGMENT_BYTES: u64 = 1024 * 1024;
/// An append starts a new segment itself when no checkpoint has done so up to here. It costs that one Allocate a copy of
/// the live state, 2 to 5 ms with 1000 grants; and no more than all the appends before it together, since a head is not
/// copied before as much was appended.
const SEGMENT_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Entries that may be owed: so many Allocates without a ledger, and no more.
const OWED_MAX: usize = 4096;
/// Older segments that may wait for a checkpoint at start. A daemon that dies before its first one adds one per start, of
/// some 0.7 MB with 1000 live grants, and each costs a start in another boot half a millisecond.
const OLD_SEGMENTS_MAX: usize = 64;

/// The durable truth at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Live grants, in the order of their ids, which is that of their making.
    pub grants: Vec<Grant>,
    /// The id of each device that ever got one, by physical key.
    pub names: BTreeMap<String, DeviceId>,
    /// What the kubelet was told last, as far as it is known.
    pub listed: Listed,
    /// What is owed to devices after their release, as far as it is known.
    pub owed: PendingHooks,
    /// What is remembered of devices' health.
    pub verdicts: Verdicts,
    /// Since when devices have been gone.
    pub gone: Gone,
    /// How it was come by.
    pub report: RecoveryReport,
}

/// The open store. One owner writes; the database follows on a thread of its own.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    durability: Durability,
    journal: Journal,
    /// The journal could not be written, and no new segment could be opened since.
    failed: bool,
    /// What was taken over meanwhile and is nowhere but in memory, in full.
    owed: Vec<Entry>,
    next_seq: u64,
    /// Payload of every live grant. Bytes, not values: a head copies them, and 1000 are 0.7 MB instead of 1.5.
    live: LivePayloads,
    notes: Notes,
    shelver: Shelver,
    report: RecoveryReport,
    /// Bytes of one append, kept for the next.
    buffer: Vec<u8>,
    lock: Lock,
}

impl Store {
    /// Confirms entries: all of them are durable as [`Durability`] says when this returns, or none is to be relied on.
    ///
    /// # Errors
    /// When the journal cannot be written. Every later append then starts with an attempt at a new segment.
    pub fn append(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        self.record(entries)?;
        self.follow_up();
        Ok(())
    }

    /// What comes behind the answers, and some time after a start: notes up to where everything is confirmed, so that a journal whose
    /// end is cleanly gone does not look whole; and readies the journal for what comes next.
    pub fn follow_up(&mut self) {
        self.lock.tell();
        self.journal.make_ready(self.durability);
    }

    /// As [`Store::append`], for somebody who has to answer first and calls [`Store::follow_up`] behind it. A process that is killed in
    /// between leaves a journal that has more than is noted, which is what any kill may do.
    ///
    /// # Errors
    /// As [`Store::append`].
    pub fn record(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let payloads = entries.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        self.settle()?;
        if self.journal.has_outgrown(SEGMENT_BYTES_MAX) {
            match self.rotate() {
                Ok(()) => {}
                Err(error) if self.has_failed() => return Err(error),
                Err(error) => tracing::warn!(%error, "the journal stays in its full segment"),
            }
        }
        self.write(&payloads)?;
        let first = self.next_seq - payloads.len() as u64;
        for ((entry, payload), seq) in entries.iter().zip(payloads).zip(first..) {
            self.apply(seq, entry, payload);
        }
        Ok(())
    }

    /// Appends payloads as the durability demands, with the next sequence numbers.
    fn write(&mut self, payloads: &[Vec<u8>]) -> Result<(), StoreError> {
        self.buffer.clear();
        codec::frame(&mut self.buffer, self.next_seq, payloads.iter().map(Vec::as_slice));
        let written = match self.durability {
            Durability::PowerLoss => self.journal.commit(&self.buffer),
            Durability::ProcessCrash => self.journal.append(&self.buffer),
        };
        // The numbers are used up either way: the bytes of a failed write may be on the disk.
        self.next_seq += payloads.len() as u64;
        match written {
            Ok(()) => self.lock.confirm(self.next_seq - 1),
            Err(_) => self.failed = true,
        }
        written
    }

    /// Lets the query database have what was confirmed since the last time: soon after the answers, and not before them. Whoever
    /// asks the database, and every checkpoint, does so too.
    pub fn tell_database(&self) {
        self.shelver.tell_all();
    }

    /// Where the journal has failed, begins a new segment with everything live and with what was owed. Before every
    /// append; and now and then, so that what is owed does not wait for one.
    ///
    /// # Errors
    /// When the journal cannot be written still.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        if !self.has_failed() {
            return Ok(());
        }
        self.rotate()?;
        if self.owed.is_empty() {
            return Ok(());
        }
        // The head has what is live. The history wants the rest, and a batch has to be synced in any case.
        let owed = std::mem::take(&mut self.owed);
        let payloads = owed.iter().map(encode).collect::<Result<Vec<_>, _>>();
        payloads.and_then(|payloads| self.write(&payloads)).inspect_err(|_| self.owed = owed)?;
        self.lock.tell();
        Ok(())
    }

    /// Takes entries over that could not be confirmed, for somebody who answers all the same. They are in memory only,
    /// until a segment can be written: its head has everything live.
    ///
    /// # Errors
    /// When the journal can be written, so that the entries were refused for another reason; and when too much is owed.
    pub fn owe(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if !self.has_failed() || self.owed.len() + entries.len() > OWED_MAX {
            return Err(StoreError::TooMuchOwed { entries: self.owed.len() });
        }
        let payloads = entries.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        for (entry, payload) in entries.iter().zip(payloads) {
            self.owed.push(self.in_full(entry));
            self.apply(self.next_seq, entry, payload);
            self.next_seq += 1;
        }
        // Over what is there, which takes no room: if this process ends before, the next one knows that something is missing,
        // and asks the kubelet.
        self.lock.confirm(self.next_seq - 1);
        self.lock.tell();
        Ok(())
    }

    /// The entry as one that can be read without those before it: a new head does not have the grant that it releases.
    fn in_full(&self, entry: &Entry) -> Entry {
        let Entry::Moved { alloc_id, state } = entry else { return entry.clone() };
        let grant = self.live.get(alloc_id).and_then(|(_, payload)| decode_grant(payload));
        grant.map_or_else(|| entry.clone(), |grant| Entry::Grant(Arc::new(Grant { state: state.clone(), ..grant })))
    }

    /// Whether it has this grant, and it was not given back.
    #[must_use]
    pub fn is_live(&self, id: &AllocId) -> bool {
        self.live.contains_key(id)
    }

    /// Which of these grants it knows, live or released. While the query database opens, only what is live is known: one that was
    /// released and is taken for held is released again when its pod is seen to be gone.
    ///
    /// # Errors
    /// When the query database fails: then nobody knows what was released.
    pub fn known_among(&self, ids: &BTreeSet<AllocId>) -> Result<BTreeSet<AllocId>, StoreError> {
        let mut known: BTreeSet<AllocId> = ids.iter().filter(|id| self.is_live(id)).cloned().collect();
        if known.len() < ids.len() {
            match self.past().and_then(|past| past.look_up(ids)) {
                Ok((released, _)) => known.extend(released),
                Err(StoreError::Unopened { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }

    /// What the journal had lost and the query database had, which was opened behind the start: to be appended again. Each is returned
    /// once, and not when it has become known by another way meanwhile.
    #[must_use]
    pub fn take_found(&self) -> Vec<Entry> {
        let is_unknown = |entry: &Entry| match entry {
            Entry::Grant(grant) => !self.is_live(&grant.alloc_id),
            Entry::Named { key, .. } => !self.notes.names.contains_key(key),
            Entry::Hook(hook) => self.notes.owed.get(&hook.resource).is_none_or(|owed| !owed.contains_key(&hook.device)),
            _ => false,
        };
        self.shelver.take_found().into_iter().filter(is_unknown).collect()
    }

    /// Takes over grants that it had lost, and says so in its report.
    ///
    /// # Errors
    /// As [`Store::append`].
    pub fn adopt(&mut self, grants: &[Grant]) -> Result<(), StoreError> {
        let entries: Vec<Entry> = grants.iter().map(|grant| Entry::Grant(Arc::new(grant.clone()))).collect();
        self.append(&entries)?;
        self.report.from_kubelet += grants.len();
        Ok(())
    }

    /// What is durable now, for an actor that is rebuilt: from memory, without reading the disk.
    #[must_use]
    pub fn load(&self) -> Recovered {
        let grants = self.live.values().filter_map(|(_, payload)| decode_grant(payload)).collect();
        let mut report = self.report.clone();
        self.shelver.add_findings(&mut report);
        let Notes { names, listed, owed, verdicts, gone } = self.notes.clone();
        Recovered { grants, names, listed, owed, verdicts, gone, report }
    }

    /// Whether entries can be confirmed, and whether both copies are being kept: (journal, query database).
    #[must_use]
    pub fn is_sound(&self) -> (bool, bool) {
        (!self.has_failed(), self.shelver.is_sound())
    }

    /// The same, and how much is owed.
    #[must_use]
    pub fn kept(&self) -> LedgerHealth {
        let (journal, database) = self.is_sound();
        LedgerHealth { journal, database, not_durable: self.owed.len(), unreadable: self.shelver.unreadable() }
    }

    fn has_failed(&self) -> bool {
        self.failed || self.journal.is_broken()
    }

    /// Applies a confirmed entry to memory, and lets sled have it.
    fn apply(&mut self, seq: u64, entry: &Entry, payload: Vec<u8>) {
        match entry {
            Entry::Grant(grant) => self.follow(grant, seq, payload),
            Entry::Moved { alloc_id, state } => {
                let Some(grant) = self.live.get(alloc_id).and_then(|(_, payload)| decode_grant(payload)) else {
                    tracing::warn!(%alloc_id, "an entry moves a grant that is not live");
                    return;
                };
                let grant = Arc::new(Grant { state: state.clone(), ..grant });
                match encode(&Entry::Grant(Arc::clone(&grant))) {
                    Ok(payload) => self.follow(&grant, seq, payload),
                    Err(error) => tracing::error!(%alloc_id, %error, "a grant stays as it was"),
                }
            }
            Entry::Named { key, id } => {
                self.notes.names.insert(key.clone(), id.clone());
                self.shelver.name(key, seq, id);
            }
            Entry::Listed { resource, devices } => note_list(&mut self.notes.listed, resource, devices.clone()),
            Entry::Judged { device, verdict } => note_verdict(&mut self.notes.verdicts, device, verdict.as_deref().cloned()),
            Entry::Hook(hook) => {
                note_hook(&mut self.notes.owed, hook);
                self.shelver.hook(hook, seq, payload);
            }
            Entry::Gone { devices, since } => note_gone(&mut self.notes.gone, devices, *since),
            Entry::Forgotten { devices } => {
                for key in self.notes.forget(devices) {
                    self.shelver.forget_name(key);
                }
            }
        }
    }

    fn follow(&mut self, grant: &Arc<Grant>, seq: u64, payload: Vec<u8>) {
        if grant.is_live() {
            self.shelver.put(&grant.alloc_id, seq, &payload);
            self.live.insert(grant.alloc_id.clone(), (seq, payload));
        } else {
            self.live.remove(&grant.alloc_id);
            self.shelver.retire(Arc::clone(grant), seq, payload);
        }
    }
}
