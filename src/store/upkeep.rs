//! Maintenance of the open store: syncs after the answers, checkpoints, new segments, imports, and
//! the close.

use super::index::CheckpointOrder;
use super::journal::{self, Journal, JournalReplay, PendingSync};
use super::layout::journal_dir;
use super::notes::{encode_all, head, open_segment};
use super::{PendingCheckpoint, SEGMENT_BYTES, SEGMENT_BYTES_MAX, Store, StoreError};
use crate::domain::{Entry, GrantState, Timestamp};
use std::fs;

/// The minimum size of the journal for a database that cannot be written, even with a small
/// history.
const JOURNAL_MIN: u64 = 2 * SEGMENT_BYTES_MAX;

impl Store {
    /// Begins a sync of everything appended so far, for a thread that may block. The store accepts
    /// entries meanwhile. `None` if nothing is new, as always with
    /// [`super::Durability::PowerLoss`].
    ///
    /// # Errors
    /// When the file descriptor cannot be duplicated.
    pub fn begin_sync(&self) -> Result<Option<PendingSync>, StoreError> {
        if self.has_failed() { Ok(None) } else { self.journal.begin_sync() }
    }

    /// Records the result of a sync.
    ///
    /// # Errors
    /// The error of the sync. The next commit then starts a new segment.
    pub fn end_sync(
        &mut self,
        sync: &PendingSync,
        result: Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        // If a new segment was started meanwhile, its head has everything live.
        if result.is_ok() {
            self.journal.end_sync(sync);
        } else {
            self.failed = true;
        }
        result
    }

    /// Whether the journal is long enough for a checkpoint before its usual time.
    #[must_use]
    pub fn wants_checkpoint(&self) -> bool {
        !self.has_failed() && self.journal.has_outgrown(SEGMENT_BYTES)
    }

    /// Begins a checkpoint: sled becomes durable, old segments are deleted, and a long segment is
    /// replaced. Called every some thousand entries, soon after a start, and at shutdown. The store
    /// accepts entries meanwhile.
    ///
    /// # Errors
    /// When the journal cannot be written, or the database does not answer.
    pub fn begin_checkpoint(&mut self) -> Result<PendingCheckpoint, StoreError> {
        self.retry_unwritten()?;
        if self.journal.has_outgrown(SEGMENT_BYTES) {
            self.rotate()?;
        }
        if !self.index.is_writable() {
            self.delete_oldest()?;
        }
        self.journal.sync()?;
        self.index.checkpoint(CheckpointOrder {
            applied: self.next_seq - 1,
            live_bytes: self.journal.head_bytes(),
            newest_segment: self.journal.first(),
        })
    }

    /// A checkpoint, until its end.
    ///
    /// # Errors
    /// When the journal cannot be written. A database that fails is reopened or rebuilt, and is no
    /// error.
    pub fn checkpoint(&mut self) -> Result<(), StoreError> {
        self.begin_checkpoint()?.wait()
    }

    /// Closes both copies after a checkpoint. The next start has nothing to replay.
    ///
    /// # Errors
    /// As [`Store::checkpoint`].
    pub fn close(mut self) -> Result<(), StoreError> {
        self.index.end_soon();
        self.checkpoint()?;
        // The checkpoint has synced the head too: damage there is no torn write.
        self.lock.confirm(self.next_seq - 1);
        self.journal.trim();
        self.lock.close(self.journal.first());
        Ok(())
    }

    /// Imports the entries of another ledger in one step: after a crash the next start finds all of
    /// them or none. They are in a new segment, which is renamed to its final name after its sync.
    ///
    /// # Errors
    /// When the journal cannot be written. If only the sync of its directory fails, the entries may
    /// be there.
    pub fn import(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let notes = encode_all(&self.notes.entries().collect::<Vec<_>>())?;
        let head = head(&self.live, &notes);
        let payloads = encode_all(entries)?;
        let journal =
            Journal::create_whole(&journal_dir(&self.dir), self.next_seq, &head, &payloads)?;
        let first = self.next_seq + head.len() as u64;
        (self.journal, self.failed, self.next_seq) = (journal, false, first + entries.len() as u64);
        self.lock.confirm(self.next_seq - 1);
        self.lock.write_confirmed();
        // Usually more than the queue of the database takes.
        self.index.fall_behind();
        for ((entry, payload), seq) in entries.iter().zip(payloads).zip(first..) {
            self.apply(entry, payload, seq);
        }
        Ok(())
    }

    /// Starts a new segment, whose head has everything live.
    pub(super) fn rotate(&mut self) -> Result<(), StoreError> {
        match self.try_to_rotate() {
            // An earlier attempt left a file that it could not remove.
            Err(error) if error.is_in_the_way() => self.try_to_rotate(),
            done => done,
        }
    }

    fn try_to_rotate(&mut self) -> Result<(), StoreError> {
        let dir = journal_dir(&self.dir);
        match open_segment(&dir, self.next_seq, &self.live, &self.notes) {
            Ok((journal, next_seq)) => {
                std::mem::replace(&mut self.journal, journal).trim();
                (self.next_seq, self.failed) = (next_seq, false);
                Ok(())
            }
            Err(error) => {
                if !matches!(dir.join(journal::file_name(self.next_seq)).try_exists(), Ok(false)) {
                    // A head, or a part of one, has these numbers. Recovery reads it after the
                    // present segment. So the present segment is closed, and the next head has
                    // later numbers.
                    self.failed = true;
                    self.next_seq += 1.max((self.live.len() + self.notes.len()) as u64);
                }
                Err(error)
            }
        }
    }

    /// Deletes the oldest segments of a journal that is too long, while the database cannot be
    /// written. Their live grants are in every later head. Their released grants are lost, and that
    /// is logged.
    fn delete_oldest(&self) -> Result<(), StoreError> {
        let (dir, newest) = (journal_dir(&self.dir), self.journal.first());
        let older = journal::sizes_before(&dir, newest)?;
        let newest_bytes =
            fs::metadata(dir.join(journal::file_name(newest))).map_or(0, |about| about.len());
        // With thousands of live grants most of the journal are heads.
        let most = self.retention.journal().max(JOURNAL_MIN).max(2 * newest_bytes);
        let mut bytes: u64 = older.iter().map(|(_, _, bytes)| bytes).sum();
        for (first, path, length) in older {
            if bytes <= most {
                break;
            }
            bytes -= length;
            let mut replay = JournalReplay::of(&self.dir);
            // An unreadable segment is of no use for the database either.
            drop(replay.read_segment(first, &path));
            let released = replay.take_released();
            let at = |state: &GrantState| {
                if let GrantState::Released { released_at, .. } = state {
                    Some(*released_at)
                } else {
                    None
                }
            };
            let until = released.iter().filter_map(|(_, grant)| at(&grant.state)).max();
            self.index.note_deleted(until);
            tracing::warn!(
                grants = released.len(),
                until = until.map(Timestamp::to_seconds),
                "deleted the oldest journal segment: the journal reached its limit while the query database cannot be written; the history loses its released grants"
            );
            journal::delete(&path)?;
        }
        Ok(())
    }
}
