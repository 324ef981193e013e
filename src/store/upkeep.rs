//! What keeps the open store in order: syncs behind the answers, checkpoints, new segments, and the end.

use super::journal::{self, PendingSync};
use super::layout::journal_dir;
use super::recovery::open_segment;
use super::shelver::PendingCheckpoint;
use super::work::Order;
use super::{SEGMENT_BYTES, Store, StoreError};

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

    /// Whether so much was appended that a checkpoint should not wait for its time: the journal stays short, however many grants come.
    #[must_use]
    pub fn wants_checkpoint(&self) -> bool {
        !self.has_failed() && self.journal.has_outgrown(SEGMENT_BYTES)
    }

    /// Has sled's copy made durable, journal segments deleted that nobody needs any more, and starts a new one when the
    /// present one is long. Every some thousand entries, soon after a start, and at shutdown. Nobody has to wait for its
    /// end; the store can be appended to meanwhile.
    ///
    /// # Errors
    /// When the journal cannot be written, or too much waits for the database already.
    pub fn begin_checkpoint(&mut self) -> Result<PendingCheckpoint, StoreError> {
        self.settle()?;
        if self.journal.has_outgrown(SEGMENT_BYTES) {
            self.rotate()?;
        }
        self.shelver.replace_stuck()?;
        let sync = self.journal.begin_sync()?;
        self.shelver.checkpoint(Order {
            applied: self.next_seq - 1,
            sync,
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
        self.shelver.hurry();
        self.checkpoint()?;
        // It has synced the head too: what cannot be read of that later is damage, and no write that was cut off.
        self.lock.confirm(self.next_seq - 1);
        self.journal.trim();
        self.lock.close(self.journal.first());
        Ok(())
    }

    /// Starts a new segment with everything live.
    pub(super) fn rotate(&mut self) -> Result<(), StoreError> {
        let rotated = self.try_to_rotate();
        match rotated {
            // What an earlier attempt left behind and could not remove.
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
}
