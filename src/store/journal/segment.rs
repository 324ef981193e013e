//! The segment that is being written: create, append, fdatasync, preallocate.
//!
//! Zeros are written ahead of the records (WAL preallocation). An append that makes a file longer
//! must also write its inode, and its fdatasync takes a third longer to twice as long. When half of
//! the zeros are used, more are written after the answers.

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

/// Zeros ahead, at most and at least: for some 400 grants, and half as many.
const ZEROS_MAX: u64 = 256 * 1024;
const ZEROS_MIN: u64 = ZEROS_MAX / 2;
/// The zeros of one write.
const ZEROS: [u8; 16 * 1024] = [0; 16 * 1024];

/// The segment that is being written.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    first: u64,
    head_bytes: u64,
    bytes: u64,
    /// The length of the file with the zeros, or less.
    allocated: u64,
    /// The number of synced bytes. With 0 the file's name is not durable either.
    synced: u64,
    /// Whether a sync has failed. The kernel reports that once and drops the unwritten pages, so
    /// this segment is closed for entries.
    broken: Arc<AtomicBool>,
}

/// A sync of the entries before its beginning, for a thread that may block.
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
    /// Syncs the data, then the name of a new file.
    ///
    /// # Errors
    /// When the disk refuses. The segment is then closed for entries.
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

    /// Creates a segment that starts with `head`. The first sync makes it durable; no entry is
    /// confirmed before.
    pub(crate) fn create(dir: &Path, first: u64, head: &[&[u8]]) -> Result<Self, StoreError> {
        let path = dir.join(file_name(first));
        let bytes = header_and_head(first, head);
        let file = OpenOptions::new().write(true).create_new(true).mode(private::FILE).open(&path);
        let file = file.map_err(StoreError::io("create", &path))?;
        note("write");
        if let Err(error) = file.write_all_at(&bytes, 0) {
            // A part of a head is useless.
            drop(fs::remove_file(&path));
            return Err(StoreError::io("write", &path)(error));
        }
        let mut journal =
            Journal::new(file, path, first, bytes.len() as u64, bytes.len() as u64, 0);
        journal.preallocate();
        Ok(journal)
    }

    /// Creates a segment with a head and entries. It is durable before it gets its name, so no
    /// process reads a part of it.
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

    /// A placeholder without a file, if the file system accepts no segment. Every write fails until
    /// a segment can be created.
    pub(crate) fn none(dir: &Path) -> Result<Self, StoreError> {
        let file = File::open(dir).map_err(StoreError::io("open", dir))?;
        let journal = Journal::new(file, dir.to_owned(), 0, 0, 0, 0);
        journal.broken.store(true, Ordering::Release);
        Ok(journal)
    }

    /// Appends records with one write. They survive a crash of the process.
    pub(crate) fn append(&mut self, records: &[u8]) -> Result<(), StoreError> {
        note("write");
        if let Err(error) = self.file.write_all_at(records, self.bytes) {
            // Otherwise a start that finds no space for a new head would read a part of it.
            self.trim();
            return Err(StoreError::io("write", &self.path)(error));
        }
        self.bytes += records.len() as u64;
        self.allocated = self.allocated.max(self.bytes);
        Ok(())
    }

    /// Appends records with one write and one fdatasync. They survive a crash of the machine.
    pub(crate) fn commit(&mut self, records: &[u8]) -> Result<(), StoreError> {
        self.append(records)?;
        self.sync()
    }

    /// Prepares the next commits, after the answers: writes zeros ahead, and syncs a new segment.
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
            // Syncs the head and the file's name. The next commit reports an error.
            drop(self.sync());
        } else if preallocates && sync_data(&self.file).is_err() {
            // Without this sync the next commit's fdatasync would write the zeros too.
            self.broken.store(true, Ordering::Release);
        }
    }

    /// Writes zeros ahead of the records.
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
            // The last free space may be needed for records.
            Err(_) => self.trim(),
        }
    }

    /// Truncates the zeros. Records stay.
    pub(crate) fn trim(&mut self) {
        // An error leaves zeros, or a part of an unconfirmed write.
        drop(self.file.set_len(self.bytes));
        self.allocated = self.bytes;
    }

    /// Makes the appended records survive a crash of the machine: one fdatasync, or none if nothing
    /// is new.
    pub(crate) fn sync(&mut self) -> Result<(), StoreError> {
        if self.bytes > self.synced {
            let synced = sync(&self.file, &self.path, self.synced > 0);
            synced.inspect_err(|_| self.broken.store(true, Ordering::Release))?;
            self.synced = self.bytes;
        }
        Ok(())
    }

    /// Begins a sync on another thread. `None` if nothing is new.
    pub(crate) fn begin_sync(&self) -> Result<Option<PendingSync>, StoreError> {
        if self.bytes == self.synced {
            return Ok(None);
        }
        let file = self.file.try_clone().map_err(StoreError::io("sync", &self.path))?;
        let (path, named, broken) = (self.path.clone(), self.synced > 0, Arc::clone(&self.broken));
        Ok(Some(PendingSync { file, path, first: self.first, bytes: self.bytes, named, broken }))
    }

    /// Records a finished sync, unless it was of another segment.
    pub(crate) fn end_sync(&mut self, done: &PendingSync) {
        if done.first == self.first {
            self.synced = self.synced.max(done.bytes);
        }
    }

    /// Whether a sync has failed.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Makes every later write fail.
    #[cfg(test)]
    pub(crate) fn break_for_test(&mut self) {
        self.file = File::open(&self.path).expect("the segment is there");
    }

    /// The sequence number of the first record.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Whether more than `bytes` was appended, and more than the size of the head, which its
    /// successor copies.
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

pub(super) fn header_and_head(first: u64, head: &[&[u8]]) -> Vec<u8> {
    // The header's crc distinguishes a later version from a flipped bit.
    let text = format!("{MAGIC}{} head={}", codec::FRAMING, head.len());
    let mut bytes = format!("{text} crc={:08x}\n", crc32fast::hash(text.as_bytes())).into_bytes();
    debug_assert!(bytes.len() <= HEADER_BYTES_MAX, "the reader's limit");
    codec::frame(&mut bytes, first, head.iter().copied());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::samples::made;

    #[test]
    fn zeros_are_always_written_ahead_of_the_records() {
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
