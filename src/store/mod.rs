//! The store: a write-ahead journal and sled, each able to rebuild the other.
//!
//! ```text
//!            append ─▶ journal (one write, one fdatasync) ─▶ the answer to Allocate
//!                         └▶ live map in memory ─▶ sled (no flush) ─▶ checkpoint: flush + fdatasync, old segments deleted
//!
//!   <state-dir>/lock                          one writer at a time
//!   <state-dir>/journal/<first seq>.log       every entry since the last checkpoint, after a copy of everything live
//!   <state-dir>/db/                           sled: live grants, names, history
//!   <state-dir>/….quarantine-<millis>         what was damaged; kept for a person to look at, never read again
//! ```
//!
//! It promises: what [`Store::append`] has confirmed is found again by [`Store::open`], whatever the process, the machine
//! or one of the two copies goes through in between; what cannot be found again is counted in [`RecoveryReport`], never
//! passed over (I1, I9). It does not know what a grant means: it keeps entries and folds them.

mod codec;
mod database;
mod error;
mod export;
mod journal;
mod layout;
mod peek;
mod recovery;
mod replay;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;

pub use error::StoreError;
pub use export::Export;
pub use journal::PendingSync;
pub use peek::{peek, peek_history};
pub use recovery::RecoveryReport;

use self::database::{Image, Opened, Shelf};
use self::journal::Journal;
use self::layout::{database_dir, journal_dir, lock, note, quarantine};
use self::recovery::{LivePayloads, Truth, catch_up, decode_grant, encode, encode_live, note_findings, open_segment};
use self::replay::Fold;
use crate::domain::{AllocId, DeviceId, Durability, Entry, Grant, Timestamp};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

/// A checkpoint starts a new segment when this much has been appended: some 1500 grants.
const SEGMENT_BYTES: u64 = 1024 * 1024;
/// An append starts a new segment itself when no checkpoint has done so up to here. It costs that one Allocate a copy of
/// the live state, 2 to 5 ms with 1000 grants.
const SEGMENT_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Older segments that may wait for a checkpoint at start. A daemon that dies before its first one adds one per start, and
/// each costs the next start the decoding of everything that was live: more than the checkpoint that removes it.
const OLD_SEGMENTS_MAX: usize = 2;
/// Older segments that are kept for a database that cannot be written, before the oldest are given up (their live grants
/// are in every later head; what goes is history).
const OLD_SEGMENTS_WITHOUT_DATABASE_MAX: usize = 64;

/// The durable truth at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Live grants, in the order of their ids, which is that of their making.
    pub grants: Vec<Grant>,
    /// The id of each device that ever got one, by physical key.
    pub names: BTreeMap<String, DeviceId>,
    /// How it was come by.
    pub report: RecoveryReport,
}

/// The open store. It is a value without threads; one owner writes.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    durability: Durability,
    journal: Journal,
    /// Why the journal cannot be written, until a new segment could be opened.
    failed: bool,
    next_seq: u64,
    /// Payload of every live grant. Bytes, not values: a head copies them, and 1000 are 0.7 MB instead of 1.5.
    live: LivePayloads,
    names: BTreeMap<String, DeviceId>,
    shelf: Option<Shelf>,
    report: RecoveryReport,
    /// Bytes of one append, kept for the next.
    buffer: Vec<u8>,
    /// Held for its lock.
    _lock: File,
}

impl Store {
    /// Opens the store, creating it where there is none, and rebuilds what is live from both copies.
    ///
    /// # Errors
    /// When the directory is in use, cannot be written, or was written by a later version. Damage is no error: it is in
    /// the report.
    pub fn open(state_dir: &Path, durability: Durability) -> Result<(Store, Recovered), StoreError> {
        let began = Instant::now();
        let journal_dir = journal_dir(state_dir);
        fs::create_dir_all(&journal_dir).map_err(StoreError::io("create", &journal_dir))?;
        let lock = lock(state_dir)?;
        let mut report = RecoveryReport::default();

        let database_dir = database_dir(state_dir);
        let had_database = database_dir.exists();
        // The two copies are read side by side.
        let (fold, opened) = std::thread::scope(|scope| {
            let quarantined = &mut report.quarantined;
            let database = scope.spawn(|| database::open_or_replace(&database_dir, quarantined));
            let fold = Fold::read(&journal_dir);
            let opened = database
                .join()
                .unwrap_or_else(|_| Err(StoreError::Database { path: database_dir.clone(), why: "opening it panicked".into() }));
            (fold, opened)
        });
        let fold = fold?;
        let (mut shelf, holds, salvaged) = match opened {
            Ok(Opened { shelf, holds, salvaged }) => (Some(shelf), holds, salvaged),
            Err(error @ (StoreError::InUse { .. } | StoreError::Newer { .. })) => return Err(error),
            // The journal alone is enough to go on; every checkpoint tries the database again.
            Err(error) => {
                report.findings.push(error.to_string());
                (None, Image::default(), None)
            }
        };
        note_findings(&fold, &holds, had_database, &mut report);
        let image = salvaged.as_ref().map_or(&holds, |(image, why)| {
            report.findings.push(format!("the query database was damaged ({why}); its history stays in the copy that was moved away"));
            image
        });
        let (old_segments, damaged) = (fold.segments.clone(), fold.damaged.clone());
        let history = |wanted: &_| shelf.as_ref().and_then(|shelf| shelf.released_among(wanted).ok()).unwrap_or_default();
        let truth = recovery::merge(fold, image, &mut report, history);

        // A new segment always: an old one is never written to again.
        let newest = old_segments.last().map_or(0, |(first, _)| *first);
        let first = truth.last.max(newest) + 1;
        let live = encode_live(&truth)?;
        let names: BTreeMap<_, _> = truth.names.iter().map(|(key, (_, id))| (key.clone(), id.clone())).collect();
        let (journal, next_seq) = open_segment(&journal_dir, first, &live, &names)?;
        // Only now is everything in a sound place, and the damaged may go.
        for path in damaged {
            report.quarantined.push(quarantine(&path)?);
        }
        let caught_up = shelf.as_mut().map_or(Ok(()), |shelf| catch_up(shelf, &holds, &truth, &live));
        let mut store = Store {
            dir: state_dir.to_owned(),
            durability,
            journal,
            failed: false,
            next_seq,
            live,
            names,
            shelf,
            report,
            buffer: Vec::new(),
            _lock: lock,
        };
        if let Err(error) = caught_up {
            store.report.findings.push(error.to_string());
            store.abandon_database(&error);
        }
        if !store.report.is_clean() || old_segments.len() > OLD_SEGMENTS_MAX {
            // After damage both copies are made whole before anybody relies on them.
            store.checkpoint()?;
        }
        store.report.took = began.elapsed();
        let grants = truth.live.into_values().map(|(_, grant)| grant).collect();
        let recovered = Recovered { grants, names: store.names.clone(), report: store.report.clone() };
        Ok((store, recovered))
    }

    /// Confirms entries: all of them are durable as [`Durability`] says when this returns, or none is to be relied on.
    ///
    /// # Errors
    /// When the journal cannot be written. Every later append then starts with an attempt at a new segment.
    pub fn append(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let payloads = entries.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        if self.failed || self.journal.bytes_appended() > SEGMENT_BYTES_MAX {
            match self.rotate() {
                Ok(()) => {}
                Err(error) if self.failed => return Err(error),
                Err(error) => tracing::warn!(%error, "the journal stays in its full segment"),
            }
        }
        self.buffer.clear();
        for (payload, seq) in payloads.iter().zip(self.next_seq..) {
            codec::frame(&mut self.buffer, seq, payload);
        }
        let mut written = self.journal.append(&self.buffer);
        if self.durability == Durability::PowerLoss {
            written = written.and_then(|()| self.journal.sync());
        }
        // The numbers are used up either way: the bytes of a failed write may be on the disk.
        let first = self.next_seq;
        self.next_seq += entries.len() as u64;
        if let Err(error) = written {
            self.failed = true;
            return Err(error);
        }
        for ((entry, payload), seq) in entries.iter().zip(payloads).zip(first..) {
            self.apply(seq, entry, payload);
        }
        Ok(())
    }

    /// What makes everything appended so far survive a power cut, for a thread that may wait: the store can be appended to
    /// meanwhile. `None` if nothing is new, as always with [`Durability::PowerLoss`].
    ///
    /// # Errors
    /// When the file cannot be shared.
    pub fn begin_sync(&self) -> Result<Option<PendingSync>, StoreError> {
        if self.failed { Ok(None) } else { self.journal.begin_sync() }
    }

    /// Takes note of how such a sync has ended.
    ///
    /// # Errors
    /// The sync's own; the next append then starts a new segment with everything live.
    pub fn end_sync(&mut self, sync: &PendingSync, result: Result<(), StoreError>) -> Result<(), StoreError> {
        // A segment that has been replaced since has everything live in its successor's head.
        if result.is_ok() {
            self.journal.end_sync(sync);
        } else {
            self.failed = true;
        }
        result
    }

    /// Makes sled's copy durable, deletes journal segments that nobody needs any more, and starts a new one when the
    /// present one is long. Takes milliseconds: for the background, every some thousand entries and at shutdown.
    ///
    /// # Errors
    /// When the journal cannot be written. A database that fails is reopened or rebuilt here and is no error.
    pub fn checkpoint(&mut self) -> Result<(), StoreError> {
        if self.failed || self.journal.bytes_appended() > SEGMENT_BYTES {
            self.rotate()?;
        }
        self.journal.sync()?;
        if self.shelf.is_none() {
            self.restore_database();
        }
        let now = Timestamp::from_system(SystemTime::now());
        let checkpointed = match self.shelf.as_mut().map(|shelf| shelf.checkpoint(self.next_seq - 1, now)) {
            Some(Ok(())) => true,
            Some(Err(error)) => {
                self.abandon_database(&error);
                false
            }
            None => false,
        };
        self.delete_old_segments(if checkpointed { 0 } else { OLD_SEGMENTS_WITHOUT_DATABASE_MAX })
    }

    /// What is durable now, for an actor that is rebuilt: from memory, without reading the disk.
    #[must_use]
    pub fn load(&self) -> Recovered {
        let grants = self.live.values().filter_map(|(_, payload)| decode_grant(payload)).collect();
        Recovered { grants, names: self.names.clone(), report: self.report.clone() }
    }

    /// Whether entries can be confirmed, and whether both copies are being kept: (journal, query database).
    #[must_use]
    pub fn is_sound(&self) -> (bool, bool) {
        (!self.failed, self.shelf.is_some())
    }

    /// Closes both copies after a last checkpoint, so that the next start has nothing to replay.
    ///
    /// # Errors
    /// As [`Store::checkpoint`].
    pub fn close(mut self) -> Result<(), StoreError> {
        let checkpointed = self.checkpoint();
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
        checkpointed
    }

    /// Applies a confirmed entry to memory and to sled.
    fn apply(&mut self, seq: u64, entry: &Entry, payload: Vec<u8>) {
        let shelved = match entry {
            Entry::Grant(grant) if grant.is_live() => self.put(&grant.alloc_id, seq, payload),
            Entry::Grant(grant) => self.retire(grant, seq, &payload),
            Entry::Moved { alloc_id, state } => {
                let Some(grant) = self.live.get(alloc_id).and_then(|(_, payload)| decode_grant(payload)) else {
                    tracing::warn!(%alloc_id, "an entry moves a grant that is not live");
                    return;
                };
                self.moved(Grant { state: state.clone(), ..grant }, seq)
            }
            Entry::Named { key, id } => {
                self.names.insert(key.clone(), id.clone());
                self.shelf.as_ref().map_or(Ok(()), |shelf| shelf.name(key, seq, id))
            }
        };
        // The journal has it: the grant stands, and sled is rebuilt from there.
        if let Err(error) = shelved {
            self.abandon_database(&error);
        }
    }

    fn moved(&mut self, grant: Grant, seq: u64) -> Result<(), StoreError> {
        let whole = Entry::Grant(Box::new(grant));
        let payload = encode(&whole)?;
        match &whole {
            Entry::Grant(grant) if grant.is_live() => self.put(&grant.alloc_id, seq, payload),
            Entry::Grant(grant) => self.retire(grant, seq, &payload),
            _ => Ok(()),
        }
    }

    fn put(&mut self, alloc_id: &AllocId, seq: u64, payload: Vec<u8>) -> Result<(), StoreError> {
        let shelved = self.shelf.as_ref().map_or(Ok(()), |shelf| shelf.put(alloc_id, seq, &payload));
        self.live.insert(alloc_id.clone(), (seq, payload));
        shelved
    }

    fn retire(&mut self, grant: &Grant, seq: u64, payload: &[u8]) -> Result<(), StoreError> {
        self.live.remove(&grant.alloc_id);
        self.shelf.as_mut().map_or(Ok(()), |shelf| shelf.retire(grant, seq, payload))
    }

    /// Starts a new segment with everything live.
    fn rotate(&mut self) -> Result<(), StoreError> {
        let rotated = self.try_to_rotate();
        match rotated {
            // What an earlier attempt left behind and could not remove.
            Err(error) if error.is_in_the_way() => self.try_to_rotate(),
            done => done,
        }
    }

    fn try_to_rotate(&mut self) -> Result<(), StoreError> {
        let dir = journal_dir(&self.dir);
        match open_segment(&dir, self.next_seq, &self.live, &self.names) {
            Ok((journal, next_seq)) => {
                (self.journal, self.next_seq, self.failed) = (journal, next_seq, false);
                Ok(())
            }
            Err(error) => {
                if !matches!(dir.join(journal::file_name(self.next_seq)).try_exists(), Ok(false)) {
                    // A head, or a part of one, is there and has these numbers. It would be read after whatever else the
                    // present segment took, and contradict it: so that takes nothing more, and the next head comes after.
                    self.failed = true;
                    self.next_seq += 1.max((self.live.len() + self.names.len()) as u64);
                }
                Err(error)
            }
        }
    }

    fn abandon_database(&mut self, error: &StoreError) {
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
    }

    /// Opens the database again, or a new one, and fills it from memory and from the journal's segments.
    fn restore_database(&mut self) {
        let mut quarantined = Vec::new();
        let restored = Fold::read(&journal_dir(&self.dir)).and_then(|fold| {
            let Opened { mut shelf, holds, .. } = database::open_or_replace(&database_dir(&self.dir), &mut quarantined)?;
            let live = self.live.iter().filter_map(|(id, (seq, payload))| Some((id.clone(), (*seq, decode_grant(payload)?)))).collect();
            let (released, names) = (fold.grants.into_iter().filter(|(_, (_, grant))| !grant.is_live()).collect(), fold.names);
            let truth = Truth { live, released, names, last: self.next_seq - 1 };
            catch_up(&mut shelf, &holds, &truth, &self.live)?;
            Ok(shelf)
        });
        self.report.quarantined.extend(quarantined);
        match restored {
            Ok(shelf) => self.shelf = Some(shelf),
            Err(error) => tracing::error!(%error, "the query database stays closed"),
        }
    }

    /// Deletes all segments before the present one but the newest `keep`.
    fn delete_old_segments(&self, keep: usize) -> Result<(), StoreError> {
        let dir = journal_dir(&self.dir);
        let mut old = journal::segments(&dir)?;
        old.retain(|(first, _)| *first < self.journal.first());
        for (_, path) in old.iter().rev().skip(keep) {
            note("delete");
            fs::remove_file(path).map_err(StoreError::io("delete", path))?;
        }
        Ok(())
    }
}
