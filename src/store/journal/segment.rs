//! The segment that is being written: create, append, fdatasync, preallocate.
//!
//! WAL preallocation: the zeros behind the records were written before. An append that makes a file longer has to write its
//! inode too, so its fdatasync takes a third longer, or twice as long. More zeros are written after the answers, as soon as half of
//! them are used.

use super::{HEADER_BYTES_MAX, MAGIC, codec, file_name};
use crate::domain::Durability;
use crate::host::{self, private};
use crate::store::StoreError;
use crate::store::layout::{note, sync_data, sync_directory};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Zeros ahead, at most and at least: some 400 grants, and half as many.
const ZEROS_MAX: u64 = 256 * 1024;
const ZEROS_MIN: u64 = ZEROS_MAX / 2;
/// They are written in pieces of this.
const ZEROS: [u8; 16 * 1024] = [0; 16 * 1024];

/// The segment that is being written.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    first: u64,
    head_bytes: u64,
    bytes: u64,
    /// Length of the file with the zeros, or less.
    allocated: u64,
    /// How many of the bytes are on the disk. 0: the file's name is not there either.
    synced: u64,
    /// A sync has failed. The kernel reports that once and then forgets what it could not write, so this segment takes nothing more.
    broken: Arc<AtomicBool>,
}

/// A sync of what had been appended when it began, for a thread that may wait.
#[derive(Debug)]
pub struct PendingSync {
    file: File,
    path: PathBuf,
    first: u64,
    bytes: u64,
    named: bool,
    broken: Arc<AtomicBool>,
}

impl PendingSync {
    /// Syncs: the data, then the name of a new file.
    ///
    /// # Errors
    /// When the disk refuses. The segment then takes nothing more.
    pub fn run(&self) -> Result<(), StoreError> {
        sync(&self.file, &self.path, self.named)
            .inspect_err(|_| self.broken.store(true, Ordering::Release))
    }
}

fn sync(file: &File, path: &Path, named: bool) -> Result<(), StoreError> {
    sync_data(file).map_err(StoreError::io("sync", path))?;
    match path.parent() {
        Some(dir) if !named => sync_directory(dir),
        _ => Ok(()),
    }
}

impl Journal {
    fn new(
        file: File,
        path: PathBuf,
        first: u64,
        head_bytes: u64,
        bytes: u64,
        synced: u64,
    ) -> Self {
        Journal {
            file,
            path,
            first,
            head_bytes,
            bytes,
            allocated: bytes,
            synced,
            broken: Arc::default(),
        }
    }

    /// Opens a new segment that starts with `head`. The first sync makes it durable; nothing was promised before.
    pub(crate) fn create(dir: &Path, first: u64, head: &[&[u8]]) -> Result<Self, StoreError> {
        let path = dir.join(file_name(first));
        let bytes = header_and_head(first, head);
        let file = OpenOptions::new().write(true).create_new(true).mode(private::FILE).open(&path);
        let file = file.map_err(StoreError::io("create", &path))?;
        note("write");
        if let Err(error) = file.write_all_at(&bytes, 0) {
            // Half a head is of no use.
            drop(fs::remove_file(&path));
            return Err(StoreError::io("write", &path)(error));
        }
        let mut journal =
            Journal::new(file, path, first, bytes.len() as u64, bytes.len() as u64, 0);
        journal.preallocate();
        Ok(journal)
    }

    /// Opens a new segment with a head and entries. It is on disk before it has its name, so nobody reads a part of it.
    pub(crate) fn create_whole(
        dir: &Path,
        first: u64,
        head: &[&[u8]],
        entries: &[Vec<u8>],
    ) -> Result<Self, StoreError> {
        let path = dir.join(file_name(first));
        let draft = path.with_extension("draft");
        let mut bytes = header_and_head(first, head);
        let head_bytes = bytes.len() as u64;
        codec::frame(&mut bytes, first + head.len() as u64, entries.iter().map(Vec::as_slice));
        // A draft of an earlier attempt is overwritten.
        let file = host::open_regular(
            &draft,
            File::options().create(true).truncate(true).write(true).mode(private::FILE),
        );
        let file = file.map_err(StoreError::io("create", &draft))?;
        note("write");
        let written = file
            .write_all_at(&bytes, 0)
            .map_err(StoreError::io("write", &draft))
            .and_then(|()| sync(&file, &draft, true));
        if let Err(error) = written {
            drop(fs::remove_file(&draft));
            return Err(error);
        }
        note("rename");
        fs::rename(&draft, &path).map_err(StoreError::io("rename", &draft))?;
        sync_directory(dir)?;
        Ok(Journal::new(file, path, first, head_bytes, bytes.len() as u64, bytes.len() as u64))
    }

    /// No segment: the file system takes none. Nothing is written until one can be created.
    pub(crate) fn none(dir: &Path) -> Result<Self, StoreError> {
        let file = File::open(dir).map_err(StoreError::io("open", dir))?;
        let journal = Journal::new(file, dir.to_owned(), 0, 0, 0, 0);
        journal.broken.store(true, Ordering::Release);
        Ok(journal)
    }

    /// Appends whole records with one write. They survive the death of the process.
    pub(crate) fn append(&mut self, records: &[u8]) -> Result<(), StoreError> {
        note("write");
        if let Err(error) = self.file.write_all_at(records, self.bytes) {
            // Otherwise a start that finds no room for a new head would believe what was written of it.
            self.trim();
            return Err(StoreError::io("write", &self.path)(error));
        }
        self.bytes += records.len() as u64;
        self.allocated = self.allocated.max(self.bytes);
        Ok(())
    }

    /// Appends whole records with one write and one fdatasync. They survive the death of the machine.
    pub(crate) fn commit(&mut self, records: &[u8]) -> Result<(), StoreError> {
        self.append(records)?;
        self.sync()
    }

    /// Prepares the next commits, after the answers: zeros ahead, and what was written so far on the disk.
    pub(crate) fn prepare(&mut self, durability: Durability) {
        if self.is_broken() {
            return;
        }
        let preallocates = self.allocated < self.bytes + ZEROS_MIN;
        if preallocates {
            self.preallocate();
        }
        if durability == Durability::ProcessCrash {
            return;
        }
        if self.synced == 0 {
            // The head and the segment's name. The next commit reports an error.
            drop(self.sync());
        } else if preallocates && sync_data(&self.file).is_err() {
            // Without this the next commit's fdatasync would write the zeros too.
            self.broken.store(true, Ordering::Release);
        }
    }

    /// Writes zeros ahead. Without them the next appends make the file longer one by one.
    fn preallocate(&mut self) {
        let end = self.bytes + ZEROS_MAX;
        let write = |at: u64| {
            self.file.write_all_at(
                &ZEROS[..usize::try_from(end - at).unwrap_or(usize::MAX).min(ZEROS.len())],
                at,
            )
        };
        match (self.allocated..end).step_by(ZEROS.len()).try_for_each(write) {
            Ok(()) => self.allocated = end,
            // The last free space may be needed for more than zeros.
            Err(_) => self.trim(),
        }
    }

    /// Gives back the zeros. What was appended stays as it is.
    pub(crate) fn trim(&mut self) {
        // An error leaves zeros there, or a part of what was not confirmed.
        drop(self.file.set_len(self.bytes));
        self.allocated = self.bytes;
    }

    /// Makes what was appended survive the death of the machine: one fdatasync, or nothing if nothing is new.
    pub(crate) fn sync(&mut self) -> Result<(), StoreError> {
        if self.bytes > self.synced {
            let synced = sync(&self.file, &self.path, self.synced > 0);
            synced.inspect_err(|_| self.broken.store(true, Ordering::Release))?;
            self.synced = self.bytes;
        }
        Ok(())
    }

    /// The same for another thread; `None` if nothing is new.
    pub(crate) fn begin_sync(&self) -> Result<Option<PendingSync>, StoreError> {
        if self.bytes == self.synced {
            return Ok(None);
        }
        let file = self.file.try_clone().map_err(StoreError::io("sync", &self.path))?;
        let (path, named, broken) = (self.path.clone(), self.synced > 0, Arc::clone(&self.broken));
        Ok(Some(PendingSync { file, path, first: self.first, bytes: self.bytes, named, broken }))
    }

    /// Takes note of a sync that was done, unless it was of another segment.
    pub(crate) fn end_sync(&mut self, done: &PendingSync) {
        if done.first == self.first {
            self.synced = self.synced.max(done.bytes);
        }
    }

    /// Whether a sync of it has failed.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Every later write fails.
    #[cfg(test)]
    pub(crate) fn break_for_test(&mut self) {
        self.file = File::open(&self.path).expect("the segment is there");
    }

    /// Sequence number of the first record that this segment holds or will hold.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Whether more than that was appended, and more than the head that its successor is to copy.
    pub(crate) fn has_outgrown(&self, bytes: u64) -> bool {
        self.bytes_appended() > bytes.max(self.head_bytes)
    }

    /// Bytes of the head.
    pub(crate) fn head_bytes(&self) -> u64 {
        self.head_bytes
    }

    /// Bytes after the head.
    pub(crate) fn bytes_appended(&self) -> u64 {
        self.bytes - self.head_bytes
    }
}

fn header_and_head(first: u64, head: &[&[u8]]) -> Vec<u8> {
    // The header's crc tells a later version from a flipped bit.
    let text = format!("{MAGIC}{} head={}", codec::FRAMING, head.len());
    let mut bytes = format!("{text} crc={:08x}\n", crc32fast::hash(text.as_bytes())).into_bytes();
    debug_assert!(bytes.len() <= HEADER_BYTES_MAX, "the reader looks no further");
    codec::frame(&mut bytes, first, head.iter().copied());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::samples::made;

    #[test]
    fn zeros_are_written_ahead_before_they_are_needed() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path(), 1, &[]).unwrap();
        for seq in 1..=1500 {
            let payload = codec::encode(&made(seq)).unwrap();
            let mut bytes = Vec::new();
            codec::frame(&mut bytes, seq, std::iter::once(payload.as_slice()));
            journal.commit(&bytes).unwrap();
            journal.prepare(Durability::PowerLoss);
            let (bytes, long) = (journal.bytes, fs::metadata(&journal.path).unwrap().len());
            assert!(
                journal.allocated == long && (ZEROS_MIN..=ZEROS_MAX).contains(&(long - bytes)),
                "{seq}: {bytes} of {long}"
            );
        }
        journal.trim();
        assert_eq!(fs::metadata(&journal.path).unwrap().len(), journal.bytes);
    }
}
