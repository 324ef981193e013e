//! The store: a write-ahead journal, and sled as the database of grants, live and past.
//!
//! The rule of recovery (`recovery`):
//!
//! 1. The journal is the write-ahead log. Each of its segments begins with all live grants.
//! 2. sled follows it on a thread of its own, and has every live and every past grant.
//! 3. A journal that is whole up to its last confirmed entry is the base of a start; otherwise the newest whole copy is.
//! 4. The other copy's later entries are applied by sequence number. What neither has is counted as missing.
//! 5. The kubelet's checkpoint is the last resort (`ledger/core/rebuild.rs`).
//!
//! ```text
//!            commit ─▶ journal (one write, one fdatasync) ─▶ the answer to Allocate
//!      after_commit ─▶ queue ─▶ the index thread: sled (no flush)
//!                               └▶ checkpoint: flush + fdatasync, then old segments are deleted
//!
//!   <state-dir>/lock                          one writer at a time; its boot, and the last confirmed entry
//!   <state-dir>/journal/<first seq>.log       all live grants, then the entries since
//!   <state-dir>/journal/<first seq>.draft     an import that was cut short; it means nothing
//!   <state-dir>/db/                           sled: live grants, names, hooks that have not run, history
//!   <state-dir>/db.compact/                   a compaction that was cut short; it means nothing
//!   <state-dir>/….quarantine-<millis>         damaged files, kept for inspection and never read again
//! ```
//!
//! What [`Store::append`] has confirmed is found again by [`Store::open`], whatever the process, the machine or one of the two
//! copies goes through in between; what cannot be found again is counted in [`RecoveryReport`] (I1, I9). The state directory is
//! bounded:
//!
//! | what | its bound |
//! | --- | --- |
//! | the history's records | a third of `history_size`, and less beside thousands of live grants |
//! | sled's files | five and a half times its records: then they are compacted, which takes three and a half times more |
//! | the journal, beside what is live | some megabytes; half of `history_size` while sled cannot be written |
//! | quarantined files | `history_size`, and the age of the history; the newest stays whatever its size |

#[cfg(test)]
mod bounds_tests;
mod error;
mod export;
#[cfg(test)]
mod import_tests;
mod index;
mod journal;
mod layout;
mod lock;
mod notes;
mod peek;
mod recovery;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod slow_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod upkeep;

pub use error::StoreError;
pub use export::{Export, ExportLine, Past};
pub use index::PendingCheckpoint;
pub use journal::PendingSync;
pub use journal::codec::VERSION as RECORDS;
pub use layout::keep_private;
pub use peek::{History, journal_bytes, peek, peek_history};
pub use recovery::{
    DatabaseCheck, JournalCheck, LiveCheck, RecoveryReport, Verification, Verifier, verify,
};

use self::index::{IndexWorker, Update};
use self::journal::{Journal, JournalReplay, codec};
use self::lock::Lock;
use self::notes::{Notes, encode_all};
use crate::domain::{
    AllocId, DeviceId, Durability, Entry, Gone, Grant, LedgerHealth, Listed, PendingHooks,
    Retention, Verdicts,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// A checkpoint starts a new segment when this much was appended, some 1500 grants, or as much as its head has.
const SEGMENT_BYTES: u64 = 1024 * 1024;
/// A commit starts a new segment itself when no checkpoint has done so up to here. It costs that one Allocate a copy of
/// the live state, 2 to 5 ms with 1000 grants; and no more than all the commits before it together, since a head is not
/// copied before as much was appended.
const SEGMENT_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Entries that may be accepted without a journal: so many Allocates, and no more.
const UNWRITTEN_MAX: usize = 4096;
/// Older segments that may wait for a checkpoint at start. A daemon that dies before its first one adds one per start, of
/// some 0.7 MB with 1000 live grants, and each costs a start in another boot half a millisecond.
const OLD_SEGMENTS_MAX: usize = 64;

/// The payload of every live grant, with the sequence number of the latest entry about it.
type LivePayloads = BTreeMap<AllocId, (u64, Vec<u8>)>;

/// The durable state at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Live grants, in the order of their ids, which is that of their making.
    pub grants: Vec<Grant>,
    /// The id of each device that ever got one, by physical key.
    pub names: BTreeMap<String, DeviceId>,
    /// The last list that the kubelet got for each resource, as far as it is known.
    pub listed: Listed,
    /// Hooks after release that have not run, as far as they are known.
    pub owed: PendingHooks,
    /// Verdicts on devices' health.
    pub verdicts: Verdicts,
    /// Since when devices have been gone.
    pub gone: Gone,
    /// How it was recovered.
    pub report: RecoveryReport,
}

impl Recovered {
    fn of(replay: JournalReplay, report: RecoveryReport) -> Self {
        let notes = Notes::of(&replay);
        let grants =
            replay.grants.into_values().map(|(_, grant)| grant).filter(Grant::is_live).collect();
        Recovered::with(grants, notes, report)
    }

    fn with(
        grants: Vec<Grant>,
        Notes { names, listed, owed, verdicts, gone }: Notes,
        report: RecoveryReport,
    ) -> Self {
        Recovered { grants, names, listed, owed, verdicts, gone, report }
    }
}

/// The open store. One owner writes; the database follows on a thread of its own.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    durability: Durability,
    retention: Retention,
    journal: Journal,
    /// The journal could not be written, and no new segment could be opened since.
    failed: bool,
    /// Entries that were accepted meanwhile and are only in memory, in full.
    unwritten: Vec<Entry>,
    next_seq: u64,
    /// Payload of every live grant. Bytes, not values: a head copies them, and 1000 are 0.7 MB instead of 1.5.
    live: LivePayloads,
    notes: Notes,
    index: IndexWorker,
    report: RecoveryReport,
    /// Bytes of one commit, kept for the next.
    buffer: Vec<u8>,
    lock: Lock,
}

impl Store {
    /// Confirms entries: all of them are durable as [`Durability`] says when this returns, or none is to be relied on.
    ///
    /// # Errors
    /// When the journal cannot be written. Every later commit then starts with an attempt at a new segment.
    pub fn append(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        self.commit(entries)?;
        self.after_commit();
        Ok(())
    }

    /// The first half of [`Store::append`]: the entries are durable. A process that is killed before [`Store::after_commit`] leaves a
    /// journal that has more than is noted, as any kill may do.
    ///
    /// # Errors
    /// As [`Store::append`].
    pub fn commit(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let payloads = encode_all(entries)?;
        self.retry_unwritten()?;
        if self.journal.has_outgrown(SEGMENT_BYTES_MAX) {
            match self.rotate() {
                Ok(()) => {}
                Err(error) if self.has_failed() => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "journal rotation failed; continuing in the current segment")
                }
            }
        }
        self.write(&payloads)?;
        let first = self.next_seq - payloads.len() as u64;
        for ((entry, payload), seq) in entries.iter().zip(payloads).zip(first..) {
            self.apply_and_index(seq, entry, payload);
        }
        Ok(())
    }

    /// The second half of [`Store::append`], to be called after the callers were answered, and some time after a start: notes the last
    /// confirmed entry in the lock file, fills the segment with zeros ahead, and sends the entries to the query database.
    pub fn after_commit(&mut self) {
        self.lock.write_confirmed();
        self.journal.prepare(self.durability);
        self.index.send_pending();
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

    /// Where the journal has failed, begins a new segment with everything live and with the unwritten entries. Before every
    /// commit; and now and then, so that unwritten entries do not wait for one.
    ///
    /// # Errors
    /// When the journal still cannot be written.
    pub fn retry_unwritten(&mut self) -> Result<(), StoreError> {
        if !self.has_failed() {
            return Ok(());
        }
        self.rotate()?;
        if self.unwritten.is_empty() {
            return Ok(());
        }
        // The head has what is live. The history wants the rest, and a batch has to be synced in any case.
        let unwritten = std::mem::take(&mut self.unwritten);
        let payloads = encode_all(&unwritten);
        payloads
            .and_then(|payloads| self.write(&payloads))
            .inspect_err(|_| self.unwritten = unwritten)?;
        self.lock.write_confirmed();
        Ok(())
    }

    /// Accepts entries that could not be confirmed, for a caller that answers all the same. They are in memory only,
    /// until a segment can be written: its head has everything live.
    ///
    /// # Errors
    /// When the journal can be written, so that the entries were refused for another reason; and when too many wait.
    pub fn accept_unwritten(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if !self.has_failed() || self.unwritten.len() + entries.len() > UNWRITTEN_MAX {
            return Err(StoreError::TooManyUnwritten { entries: self.unwritten.len() });
        }
        let payloads = encode_all(entries)?;
        for (entry, payload) in entries.iter().zip(payloads) {
            self.unwritten.push(self.in_full(entry));
            self.apply_and_index(self.next_seq, entry, payload);
            self.next_seq += 1;
        }
        // In place, which needs no free space. If this process ends before they are written, the next one sees that something is
        // missing, and asks the kubelet.
        self.lock.confirm(self.next_seq - 1);
        self.lock.write_confirmed();
        Ok(())
    }

    /// The entry as one that can be read without those before it: a new head does not have the grant that it releases.
    fn in_full(&self, entry: &Entry) -> Entry {
        let Entry::Moved { alloc_id, state } = entry else { return entry.clone() };
        let grant = self.live.get(alloc_id).and_then(|(_, payload)| codec::decode_grant(payload));
        grant.map_or_else(
            || entry.clone(),
            |grant| Entry::Grant(Arc::new(Grant { state: state.clone(), ..grant })),
        )
    }

    /// Applies a confirmed entry to memory. Returns what it changes in the database.
    fn apply(&mut self, entry: &Entry, payload: Vec<u8>, seq: u64) -> Vec<Update> {
        match entry {
            Entry::Grant(grant) => vec![self.apply_grant(grant, seq, payload)],
            Entry::Moved { alloc_id, state } => {
                let Some(grant) =
                    self.live.get(alloc_id).and_then(|(_, payload)| codec::decode_grant(payload))
                else {
                    tracing::warn!(%alloc_id, "an entry moves a grant that is not live");
                    return Vec::new();
                };
                let grant = Arc::new(Grant { state: state.clone(), ..grant });
                match codec::encode(&Entry::Grant(Arc::clone(&grant))) {
                    Ok(payload) => vec![self.apply_grant(&grant, seq, payload)],
                    Err(error) => {
                        tracing::error!(%alloc_id, %error, "a grant stays as it was");
                        Vec::new()
                    }
                }
            }
            note => {
                let forgotten = self.notes.apply(note);
                match note {
                    Entry::Named { key, id } => vec![Update::Name(key.clone(), id.clone())],
                    Entry::Hook(hook) => vec![Update::Hook(hook.clone(), payload)],
                    _ => forgotten.into_iter().map(Update::ForgetName).collect(),
                }
            }
        }
    }

    fn apply_grant(&mut self, grant: &Arc<Grant>, seq: u64, payload: Vec<u8>) -> Update {
        if grant.is_live() {
            self.live.insert(grant.alloc_id.clone(), (seq, payload.clone()));
            Update::Live(grant.alloc_id.clone(), payload)
        } else {
            self.live.remove(&grant.alloc_id);
            Update::Released(Arc::clone(grant), payload)
        }
    }

    fn apply_and_index(&mut self, seq: u64, entry: &Entry, payload: Vec<u8>) {
        for update in self.apply(entry, payload, seq) {
            self.index.add(seq, update);
        }
    }

    /// Whether it has this grant, and it was not released.
    #[must_use]
    pub fn is_live(&self, id: &AllocId) -> bool {
        self.live.contains_key(id)
    }

    /// Which of these grants it knows, live or released. While the query database opens, only what is live is known: one that was
    /// released and is taken for held is released again when its pod is seen to be gone.
    ///
    /// # Errors
    /// When the query database fails: then nothing is known of released grants.
    pub fn known_among(&self, ids: &BTreeSet<AllocId>) -> Result<BTreeSet<AllocId>, StoreError> {
        let mut known: BTreeSet<AllocId> =
            ids.iter().filter(|id| self.is_live(id)).cloned().collect();
        if known.len() < ids.len() {
            match self.past().and_then(|past| past.look_up(ids)) {
                Ok((released, _)) => known.extend(released),
                Err(StoreError::Unopened { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }

    /// What the journal lacks and the query database has, which was opened behind the start: to be appended again. Each is returned
    /// once, and not when it has become known in another way meanwhile.
    #[must_use]
    pub fn take_found(&self) -> Vec<Entry> {
        let is_unknown = |entry: &Entry| match entry {
            Entry::Grant(grant) => !self.is_live(&grant.alloc_id),
            Entry::Named { key, .. } => !self.notes.names.contains_key(key),
            Entry::Hook(hook) => self
                .notes
                .owed
                .get(&hook.resource)
                .is_none_or(|owed| !owed.contains_key(&hook.device)),
            _ => false,
        };
        self.index.take_found().into_iter().filter(is_unknown).collect()
    }

    /// Takes over grants that it had lost, and counts them in its report.
    ///
    /// # Errors
    /// As [`Store::append`].
    pub fn adopt(&mut self, grants: &[Grant]) -> Result<(), StoreError> {
        let entries: Vec<Entry> =
            grants.iter().map(|grant| Entry::Grant(Arc::new(grant.clone()))).collect();
        self.append(&entries)?;
        self.report.from_kubelet += grants.len();
        Ok(())
    }

    /// The durable state now, for an actor that is rebuilt: from memory, without reading the disk.
    #[must_use]
    pub fn load(&self) -> Recovered {
        let grants =
            self.live.values().filter_map(|(_, payload)| codec::decode_grant(payload)).collect();
        let mut report = self.report.clone();
        let late = self.index.late();
        report.findings.extend(late.findings.iter().cloned());
        report.quarantined.extend(late.quarantined.iter().cloned());
        report.from_database += late.from_database;
        Recovered::with(grants, self.notes.clone(), report)
    }

    /// Whether entries can be confirmed, and whether the query database follows: (journal, query database).
    #[must_use]
    pub fn is_sound(&self) -> (bool, bool) {
        (!self.has_failed(), self.index.is_sound())
    }

    /// The same, and how many entries are unwritten.
    #[must_use]
    pub fn kept(&self) -> LedgerHealth {
        let (journal, database) = self.is_sound();
        LedgerHealth {
            journal,
            database,
            not_durable: self.unwritten.len(),
            unreadable: self.index.unreadable(),
        }
    }

    fn has_failed(&self) -> bool {
        self.failed || self.journal.is_broken()
    }
}
