//! The store: a write-ahead journal (WAL), and sled as the database of grants, live and past.
//!
//! The rule of recovery (`recovery`):
//!
//! 1. The journal is the write-ahead log. Each of its segments begins with all live grants.
//! 2. sled follows it on a thread of its own, and has every live and every past grant.
//! 3. A journal that is whole up to its last confirmed entry is the base of a start. Otherwise the
//!    newest whole copy is.
//! 4. The other copy's later entries are applied by sequence number. Entries that neither copy has
//!    are counted as missing.
//! 5. The kubelet's checkpoint is the last resort (`ledger/core/rebuild.rs`).
//!
//! ```text
//!        commit ─▶ journal (one write, one fdatasync) ─▶ the answer to Allocate
//!  after_commit ─▶ the last confirmed entry in the lock file, zeros ahead of the journal
//!   flush point ─▶ the index thread: sled (a query, a checkpoint, or a full batch)
//!                   └▶ checkpoint: flush + fdatasync, then old segments are deleted
//!
//!   <state-dir>/lock                          one writer; its boot, and the last confirmed entry
//!   <state-dir>/journal/<first seq>.log       all live grants, then the entries since
//!   <state-dir>/journal/<first seq>.draft     an unfinished import; ignored
//!   <state-dir>/db/                           sled: live grants, names, pending hooks, history
//!   <state-dir>/db.compact/                   an unfinished compaction; ignored
//!   <state-dir>/….quarantine-<millis>         damaged files, kept for inspection, never read
//! ```
//!
//! [`Store::open`] finds every entry that [`Store::append`] has confirmed, after a kill, after a
//! power cut, and after damage to one of the two copies. [`RecoveryReport`] counts the entries that
//! it cannot find (I1, I9). The state directory is bounded:
//!
//! | content | bound |
//! | --- | --- |
//! | records of the history | a third of `history_size`; less with thousands of live grants |
//! | sled's files | 5.5 times its records, then compaction, which takes another 3.5 times |
//! | the journal without heads | some MB; half of `history_size` while sled is not writable |
//! | quarantined files | `history_size`, and the history's age; the newest is always kept |

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
pub use export::{Export, ExportLine, ReleasedGrants};
pub use index::{Pending, PendingCheckpoint};
pub use journal::PendingSync;
pub use journal::codec::VERSION as RECORDS;
pub use layout::keep_private;
pub use peek::{History, journal_bytes, peek, peek_history};
pub use recovery::{
    DatabaseCheck, JournalCheck, LiveCheck, Recovered, RecoveryReport, Verification, Verifier,
    verify,
};

use self::index::{IndexWorker, Update};
use self::journal::{Journal, codec};
use self::lock::Lock;
use self::notes::{Notes, encode_all};
use crate::domain::{AllocId, Durability, Entry, Grant, LedgerHealth, Retention};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// A checkpoint starts a new segment after this many bytes, some 1500 grants, or as many as the
/// head has.
const SEGMENT_BYTES: u64 = 1024 * 1024;
/// A commit starts a new segment after this many bytes, if no checkpoint has. This Allocate then
/// copies the live state: 2 to 5 ms with 1000 grants. A head is copied only after as many bytes
/// were appended, so heads at most double the writes.
const SEGMENT_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Entries that may wait in memory while the journal cannot be written.
const UNWRITTEN_MAX: usize = 4096;
/// Older segments that may wait for a checkpoint at start. A daemon that dies before its first
/// checkpoint adds one per start, about 0.7 MB with 1000 live grants. Each costs a start in another
/// boot half a millisecond.
const OLD_SEGMENTS_MAX: usize = 64;

/// The payload of every live grant, with the sequence number of its latest entry.
type LivePayloads = BTreeMap<AllocId, (u64, Vec<u8>)>;

/// The open store. It has one owner. sled follows on a thread of its own.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    durability: Durability,
    retention: Retention,
    journal: Journal,
    /// Whether the journal could not be written, and no new segment has been opened since.
    failed: bool,
    /// Entries that were accepted in the meantime, each readable without the entries before it.
    unwritten: Vec<Entry>,
    next_seq: u64,
    /// Encoded, since heads copy the payloads: 1000 take 0.7 MB instead of 1.5.
    live: LivePayloads,
    notes: Notes,
    index: IndexWorker,
    report: RecoveryReport,
    /// The buffer of a commit, reused by the next.
    buffer: Vec<u8>,
    lock: Lock,
}

impl Store {
    /// Confirms entries: all of them are durable, to the degree of [`Durability`], when this
    /// returns `Ok`. After an error none may be relied on.
    ///
    /// # Errors
    /// When the journal cannot be written. Every later commit then begins with a new segment.
    pub fn append(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        self.commit(entries)?;
        self.after_commit();
        Ok(())
    }

    /// The first half of [`Store::append`]: makes the entries durable, and those that were found at
    /// the start. A process that is killed before [`Store::after_commit`] leaves a lock file with
    /// an older last entry, which is correct too.
    ///
    /// # Errors
    /// As [`Store::append`].
    pub fn commit(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if entries.is_empty() {
            return self.sync_recovered();
        }
        let payloads = encode_all(entries)?;
        self.retry_unwritten()?;
        if self.journal.has_outgrown(SEGMENT_BYTES_MAX) {
            match self.rotate() {
                Ok(()) => {}
                Err(error) if self.has_failed() => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "journal rotation failed; continuing in the current segment");
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

    /// Makes durable what an earlier process has written without a sync. Nothing is left to sync
    /// after this process's first commit or first [`Store::after_commit`], which the ledger calls
    /// soon after its start.
    fn sync_recovered(&mut self) -> Result<(), StoreError> {
        if self.durability == Durability::PowerLoss && !self.journal.is_broken() {
            return self.journal.sync();
        }
        Ok(())
    }

    /// The second half of [`Store::append`], after the callers were answered, and once after a
    /// start: writes the last confirmed entry to the lock file, and preallocates the segment.
    pub fn after_commit(&mut self) {
        self.lock.write_confirmed();
        self.journal.prepare(self.durability);
        // What was found and is recorded now may be released before the next call.
        drop(self.found());
    }

    /// Appends payloads with the next sequence numbers, as the durability demands.
    fn write(&mut self, payloads: &[Vec<u8>]) -> Result<(), StoreError> {
        self.buffer.clear();
        codec::frame(&mut self.buffer, self.next_seq, payloads.iter().map(Vec::as_slice));
        let written = match self.durability {
            Durability::PowerLoss => self.journal.commit(&self.buffer),
            Durability::ProcessCrash => self.journal.append(&self.buffer),
        };
        // The numbers are used even after a failure: its bytes may be on the disk.
        self.next_seq += payloads.len() as u64;
        match written {
            Ok(()) => self.lock.confirm(self.next_seq - 1),
            Err(_) => self.failed = true,
        }
        written
    }

    /// After a failure of the journal, begins a new segment with all live grants and the unwritten
    /// entries. Called before every commit, and at intervals, so that unwritten entries do not wait
    /// for a commit.
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
        // The head has the live grants. The other entries are for the history.
        let unwritten = std::mem::take(&mut self.unwritten);
        let payloads = encode_all(&unwritten);
        payloads
            .and_then(|payloads| self.write(&payloads))
            .inspect_err(|_| self.unwritten = unwritten)?;
        self.lock.write_confirmed();
        Ok(())
    }

    /// Accepts entries that could not be confirmed, for a caller that answers anyway. They are in
    /// memory only, until a new segment can be written.
    ///
    /// # Errors
    /// When the journal is writable, so the entries were refused for another reason; and when too
    /// many entries wait.
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
        // The write in place needs no free space. If this process ends before the entries are
        // written, the next one sees that entries are missing, and reads the kubelet's checkpoint.
        self.lock.confirm(self.next_seq - 1);
        self.lock.write_confirmed();
        Ok(())
    }

    /// The entry in a form that can be read without earlier entries: the new head does not have the
    /// grant that this entry releases.
    fn in_full(&self, entry: &Entry) -> Entry {
        let Entry::Moved { alloc_id, state } = entry else { return entry.clone() };
        let grant = self.live.get(alloc_id).and_then(|(_, payload)| codec::decode_grant(payload));
        grant.map_or_else(
            || entry.clone(),
            |grant| Entry::Grant(Arc::new(Grant { state: state.clone(), ..grant })),
        )
    }

    /// Applies a confirmed entry to memory. Returns its changes of the database.
    fn apply(&mut self, entry: &Entry, payload: Vec<u8>, seq: u64) -> Vec<Update> {
        match entry {
            Entry::Grant(grant) => vec![self.apply_grant(grant, seq, payload)],
            Entry::Moved { alloc_id, state } => {
                let Some(grant) =
                    self.live.get(alloc_id).and_then(|(_, payload)| codec::decode_grant(payload))
                else {
                    tracing::warn!(%alloc_id, "ignoring an entry about a grant that is not live");
                    return Vec::new();
                };
                let grant = Arc::new(Grant { state: state.clone(), ..grant });
                match codec::encode(&Entry::Grant(Arc::clone(&grant))) {
                    Ok(payload) => vec![self.apply_grant(&grant, seq, payload)],
                    Err(error) => {
                        tracing::error!(%alloc_id, %error, "cannot encode a changed grant; it keeps its former state");
                        Vec::new()
                    }
                }
            }
            note => {
                let removed = self.notes.apply(seq, note);
                match note {
                    Entry::Named { key, id } => vec![Update::Name(key.clone(), id.clone())],
                    Entry::Hook(hook) => vec![Update::Hook(hook.clone(), payload)],
                    _ => removed.into_iter().map(Update::ForgetName).collect(),
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

    /// Whether the grant is live.
    #[must_use]
    pub fn is_live(&self, id: &AllocId) -> bool {
        self.live.contains_key(id)
    }

    /// A function that returns the known ones among these grants, live or released. It waits for
    /// the query database, so it is called without a lock of the store. While that opens, or if it
    /// fails, only live grants are known: a released grant that is taken over again is released
    /// again once its pod is absent.
    pub fn known_among(
        &self,
        ids: BTreeSet<AllocId>,
    ) -> impl FnOnce() -> BTreeSet<AllocId> + Send + use<> {
        let mut known: BTreeSet<AllocId> =
            ids.iter().filter(|id| self.is_live(id)).cloned().collect();
        let released = (known.len() < ids.len()).then(|| self.released_grants());
        move || {
            match released.map(|released| released.and_then(|released| released.look_up(&ids))) {
                Some(Ok((released, _))) => known.extend(released),
                None | Some(Err(StoreError::Unopened { .. })) => {}
                Some(Err(error)) => {
                    tracing::warn!(%error, "cannot read released grants; one that the kubelet still has is held until its end is proven again");
                }
            }
            known
        }
    }

    /// The entries that only the query database has, if it was opened after the start. They must be
    /// appended again. The database keeps each until it is known.
    #[must_use]
    pub fn found(&self) -> Vec<Entry> {
        self.index.found(|entry| match entry {
            Entry::Grant(grant) => !self.is_live(&grant.alloc_id),
            note => !self.notes.knows(note),
        })
    }

    /// Adds grants that the ledger had lost, and counts them in the report.
    pub fn adopt(&mut self, grants: &[Grant]) -> Result<(), StoreError> {
        let entries: Vec<Entry> =
            grants.iter().map(|grant| Entry::Grant(Arc::new(grant.clone()))).collect();
        self.append(&entries)?;
        self.report.from_kubelet += grants.len();
        Ok(())
    }

    /// The current state for an actor that is rebuilt, from memory.
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

    /// Whether the journal is writable, and whether the query database follows it.
    #[must_use]
    pub fn is_sound(&self) -> (bool, bool) {
        (!self.has_failed(), self.index.is_sound())
    }

    /// The health of both copies, with the number of unwritten entries.
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
