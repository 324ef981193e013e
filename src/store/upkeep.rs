//! What keeps the open store in order: syncs after the answers, checkpoints, new segments, imports, and the end.

use super::index::CheckpointOrder;
use super::journal::{self, Journal, JournalReplay, PendingSync};
use super::layout::journal_dir;
use super::notes::{encode_all, head, open_segment};
use super::{PendingCheckpoint, SEGMENT_BYTES, SEGMENT_BYTES_MAX, Store, StoreError};
use crate::domain::{Entry, GrantState, Timestamp};
use std::fs;

/// So much of the journal is kept for a database that cannot be written, however small the history is to be.
const JOURNAL_MIN: u64 = 2 * SEGMENT_BYTES_MAX;

impl Store {
    /// What makes everything appended so far survive a power cut, for a thread that may wait: the store can be appended to
    /// meanwhile. `None` if nothing is new, as always with [`super::Durability::PowerLoss`].
    ///
    /// # Errors
    /// When the file cannot be shared.
    pub fn begin_sync(&self) -> Result<Option<PendingSync>, StoreError> {
        if self.has_failed() { Ok(None) } else { self.journal.begin_sync() }
    }

    /// Takes note of how such a sync has ended.
    ///
    /// # Errors
    /// The sync's own; the next commit then starts a new segment with everything live.
    pub fn end_sync(
        &mut self,
        sync: &PendingSync,
        result: Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        // A segment that was replaced since has everything live in its successor's head.
        if result.is_ok() {
            self.journal.end_sync(sync);
        } else {
            self.failed = true;
        }
        result
    }

    /// Whether so much was appended that a checkpoint should not wait for its time: the journal stays short, however many grants come.
    #[must_use]
    pub fn wants_checkpoint(&self) -> bool {
        !self.has_failed() && self.journal.has_outgrown(SEGMENT_BYTES)
    }

    /// Has sled made durable and old journal segments deleted, and starts a new segment when the present one is long. Every some
    /// thousand entries, soon after a start, and at shutdown. Nobody has to wait for its end; the store can be appended to
    /// meanwhile.
    ///
    /// # Errors
    /// When the journal cannot be written, or the database does not answer.
    pub fn begin_checkpoint(&mut self) -> Result<PendingCheckpoint, StoreError> {
        self.retry_unwritten()?;
        if self.journal.has_outgrown(SEGMENT_BYTES) {
            self.rotate()?;
        }
        if !self.index.is_writable() {
            self.give_up_oldest()?;
        }
        self.journal.sync()?;
        self.index.checkpoint(CheckpointOrder {
            applied: self.next_seq - 1,
            live: self.journal.head_bytes(),
            newest_segment: self.journal.first(),
        })
    }

    /// The same, and waits for its end.
    ///
    /// # Errors
    /// When the journal cannot be written. A database that fails is reopened or rebuilt here and is no error.
    pub fn checkpoint(&mut self) -> Result<(), StoreError> {
        self.begin_checkpoint()?.wait()
    }

    /// Closes both copies after a last checkpoint, so that the next start has nothing to replay.
    ///
    /// # Errors
    /// As [`Store::checkpoint`].
    pub fn close(mut self) -> Result<(), StoreError> {
        self.index.hurry();
        self.checkpoint()?;
        // It has synced the head too: unreadable bytes there are damage later, and no torn write.
        self.lock.confirm(self.next_seq - 1);
        self.journal.trim();
        self.lock.close(self.journal.first());
        Ok(())
    }

    /// Takes over entries of another ledger as one: whatever happens meanwhile, the next start finds all of them or none. They come
    /// with a new segment, which has its name only when it is on disk.
    ///
    /// # Errors
    /// When the journal cannot be written. If only its directory cannot be synced, the entries may be there all the same.
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
        // More than the database's queue takes, as a rule.
        self.index.fall_behind();
        for ((entry, payload), seq) in entries.iter().zip(payloads).zip(first..) {
            self.apply(entry, payload, seq);
        }
        Ok(())
    }

    /// Starts a new segment with everything live.
    pub(super) fn rotate(&mut self) -> Result<(), StoreError> {
        match self.try_to_rotate() {
            // An earlier attempt left a file behind that it could not remove.
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
                    // A head, or a part of one, is there and has these numbers. It would be read after whatever else the
                    // present segment took, and contradict it: so that takes nothing more, and the next head comes after.
                    self.failed = true;
                    self.next_seq += 1.max((self.live.len() + self.notes.len()) as u64);
                }
                Err(error)
            }
        }
    }

    /// Deletes the journal's oldest segments when it is longer than it may be while the database cannot be written. Their live grants are
    /// in every later head; what goes is history, and that is logged.
    fn give_up_oldest(&self) -> Result<(), StoreError> {
        let (dir, newest) = (journal_dir(&self.dir), self.journal.first());
        let older = journal::sizes_before(&dir, newest)?;
        let newest_bytes =
            fs::metadata(dir.join(journal::file_name(newest))).map_or(0, |about| about.len());
        // With thousands of live grants the heads are most of it.
        let most = self.retention.journal().max(JOURNAL_MIN).max(2 * newest_bytes);
        let mut bytes: u64 = older.iter().map(|(_, _, bytes)| bytes).sum();
        for (first, path, length) in older {
            if bytes <= most {
                break;
            }
            bytes -= length;
            let mut replay = JournalReplay::of(&self.dir);
            // What cannot be read is of no use for the database either.
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
            self.index.note_given_up(until);
            tracing::warn!(
                grants = released.len(),
                until = until.map(Timestamp::to_seconds),
                "the history loses released grants: the journal is as long as it may be while the query database cannot be written"
            );
            journal::delete(&path)?;
        }
        Ok(())
    }
}
