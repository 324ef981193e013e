//! Writing the journal: one file at a time, appended to, synced, replaced by the next.
//!
//! A segment is `<state-dir>/journal/<first seq, 20 digits>.log`: a header line, the head (every live grant and every
//! name at that moment), then the entries in the order in which they became true, then zeros. A segment is opened once, by
//! the process that writes it; it is never appended to again after a restart and never repaired.
//!
//! The zeros are room that the file system need not find any more: an append that makes the file longer has to write the
//! inode too, or commit the file system's own journal, and its sync takes a third longer, or twice as long. They are
//! written behind the answers, as soon as half of them are used.

use super::StoreError;
use super::codec;
use super::layout::{note, sync_data, sync_directory};
use crate::domain::{Arrange, Durability};
use crate::host::{self, private};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// First word of a segment; the version of the framing follows.
pub(super) const MAGIC: &str = "holdfast-journal ";
/// The header line is never longer than this.
pub(super) const HEADER_BYTES_MAX: usize = 64;
/// How much room there is at most, and at least: some 400 grants, and half as many.
const ROOM_BYTES: u64 = 256 * 1024;
const ROOM_BYTES_MIN: u64 = ROOM_BYTES / 2;
/// It is written in pieces of this.
const ZEROS: [u8; 16 * 1024] = [0; 16 * 1024];

/// The segment that is being written.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    first: u64,
    head_bytes: u64,
    bytes: u64,
    /// From the start of the file to the end of the zeros, or less.
    room: u64,
    /// So many of the bytes are known to survive the death of the machine. 0: nor is the file's name.
    synced: u64,
    /// A sync has failed. The kernel reports that once and then forgets what it could not write, so nothing in this
    /// segment can be vouched for any more.
    broken: Arc<AtomicBool>,
}

/// A sync of what had been appended when it began, to be done on a thread that may wait.
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
        sync(&self.file, &self.path, self.named).inspect_err(|_| self.broken.store(true, Ordering::Release))
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
    /// Opens a new segment that starts with `head`. The first sync makes it durable; nothing has been promised before.
    pub(super) fn create<'a>(dir: &Path, first: u64, head: impl ExactSizeIterator<Item = &'a [u8]>) -> Result<Self, StoreError> {
        let path = dir.join(file_name(first));
        let mut bytes = header(head.len()).into_bytes();
        codec::frame(&mut bytes, first, head);
        let file =
            OpenOptions::new().write(true).create_new(true).mode(private::FILE).open(&path).map_err(StoreError::io("create", &path))?;
        note("write");
        if let Err(error) = file.write_all_at(&bytes, 0) {
            // Half a head is of no use, and nobody has been told of it.
            drop(fs::remove_file(&path));
            return Err(StoreError::io("write", &path)(error));
        }
        let bytes = bytes.len() as u64;
        let mut journal = Journal { file, path, first, head_bytes: bytes, bytes, room: bytes, synced: 0, broken: Arc::default() };
        journal.make_room();
        Ok(journal)
    }

    /// Opens a new segment that has a head and entries at once. It is on disk before it has its name: nobody ever reads a part
    /// of it.
    pub(super) fn create_whole(dir: &Path, first: u64, head: &[Vec<u8>], entries: &[Vec<u8>]) -> Result<Self, StoreError> {
        let path = dir.join(file_name(first));
        let draft = path.with_extension("draft");
        let mut bytes = header(head.len()).into_bytes();
        codec::frame(&mut bytes, first, head.iter().map(Vec::as_slice));
        let head_bytes = bytes.len() as u64;
        codec::frame(&mut bytes, first + head.len() as u64, entries.iter().map(Vec::as_slice));
        // One of an earlier attempt is of no use.
        let file = host::open_regular(&draft, File::options().create(true).truncate(true).write(true).mode(private::FILE));
        let file = file.map_err(StoreError::io("create", &draft))?;
        note("write");
        let written = file.write_all_at(&bytes, 0).map_err(StoreError::io("write", &draft)).and_then(|()| sync(&file, &draft, true));
        if let Err(error) = written {
            drop(fs::remove_file(&draft));
            return Err(error);
        }
        note("rename");
        fs::rename(&draft, &path).map_err(StoreError::io("rename", &draft))?;
        sync_directory(dir)?;
        let bytes = bytes.len() as u64;
        Ok(Journal { file, path, first, head_bytes, bytes, room: bytes, synced: bytes, broken: Arc::default() })
    }

    /// No segment: the file system takes none. Nothing is written before one could be created.
    pub(super) fn none(dir: &Path) -> Result<Self, StoreError> {
        let file = File::open(dir).map_err(StoreError::io("open", dir))?;
        let broken = Arc::new(AtomicBool::new(true));
        Ok(Journal { file, path: dir.to_owned(), first: 0, head_bytes: 0, bytes: 0, room: 0, synced: 0, broken })
    }

    /// Appends whole records with one write. They survive the death of the process, not yet that of the machine.
    pub(super) fn append(&mut self, records: &[u8]) -> Result<(), StoreError> {
        note("write");
        if let Err(error) = self.file.write_all_at(records, self.bytes) {
            // What was written of it is taken back. Otherwise a start that finds no room for a new head would believe it.
            self.trim();
            return Err(StoreError::io("write", &self.path)(error));
        }
        self.bytes += records.len() as u64;
        self.room = self.room.max(self.bytes);
        Ok(())
    }

    /// Appends whole records with one write and one fdatasync. They survive the death of the machine.
    pub(super) fn commit(&mut self, records: &[u8]) -> Result<(), StoreError> {
        self.append(records)?;
        self.sync()
    }

    /// Prepares the segment for the next commits, after the answers: zeros ahead, and everything written so far on the disk.
    pub(super) fn make_ready(&mut self, durability: Durability) {
        if self.is_broken() {
            return;
        }
        let has_room = self.room >= self.bytes + ROOM_BYTES_MIN;
        if !has_room {
            self.make_room();
        }
        if durability == Durability::ProcessCrash {
            return;
        }
        if self.synced == 0 {
            // What a start has written: everything that is live, and its name. An error is one of the next commit.
            drop(self.sync());
        } else if !has_room && sync_data(&self.file).is_err() {
            // The next commit's fdatasync would have to write the zeros too.
            self.broken.store(true, Ordering::Release);
        }
    }

    /// Makes room for what comes. Without it the next appends make the file longer one by one.
    fn make_room(&mut self) {
        let end = self.bytes + ROOM_BYTES;
        let write = |at: u64| self.file.write_all_at(&ZEROS[..usize::try_from(end - at).unwrap_or(usize::MAX).min(ZEROS.len())], at);
        match (self.room..end).step_by(ZEROS.len()).try_for_each(write) {
            Ok(()) => self.room = end,
            // What little there is may be somebody's who needs it more.
            Err(_) => self.trim(),
        }
    }

    /// Gives back the room that is left over. What was appended stays as it is.
    pub(super) fn trim(&mut self) {
        // An error leaves zeros there, or a part of what was not confirmed.
        drop(self.file.set_len(self.bytes));
        self.room = self.bytes;
    }

    /// Makes what was appended survive the death of the machine: one fdatasync, or nothing if nothing is new.
    pub(super) fn sync(&mut self) -> Result<(), StoreError> {
        if self.bytes > self.synced {
            let synced = sync(&self.file, &self.path, self.synced > 0);
            synced.inspect_err(|_| self.broken.store(true, Ordering::Release))?;
            self.synced = self.bytes;
        }
        Ok(())
    }

    /// The same for somebody else to do; `None` if nothing is new.
    pub(super) fn begin_sync(&self) -> Result<Option<PendingSync>, StoreError> {
        if self.bytes == self.synced {
            return Ok(None);
        }
        let file = self.file.try_clone().map_err(StoreError::io("sync", &self.path))?;
        let (path, named, broken) = (self.path.clone(), self.synced > 0, Arc::clone(&self.broken));
        Ok(Some(PendingSync { file, path, first: self.first, bytes: self.bytes, named, broken }))
    }

    /// Takes note of a sync that has been done, unless it was of another segment.
    pub(super) fn end_sync(&mut self, done: &PendingSync) {
        if done.first == self.first {
            self.synced = self.synced.max(done.bytes);
        }
    }

    /// Whether a sync of it has failed.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Every later write fails.
    #[cfg(test)]
    pub(super) fn break_for_test(&mut self) {
        self.file = File::open(&self.path).expect("the segment is there");
    }

    /// Sequence number of the first record that this segment holds or will hold.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Whether more than that has been appended, and more than the head that its successor is to copy.
    pub(super) fn has_outgrown(&self, bytes: u64) -> bool {
        self.bytes_appended() > bytes.max(self.head_bytes)
    }

    /// Bytes of the head.
    pub(super) fn head_bytes(&self) -> u64 {
        self.head_bytes
    }

    /// Bytes after the head.
    pub(super) fn bytes_appended(&self) -> u64 {
        self.bytes - self.head_bytes
    }
}

/// The header line. Its crc tells a later version from a flipped bit.
fn header(records: usize) -> String {
    let text = format!("{MAGIC}{} head={records}", codec::FRAMING);
    format!("{text} crc={:08x}\n", crc32fast::hash(text.as_bytes()))
}

/// Bytes of everything that was appended to the segments in `dir`, their heads included; what is behind is room.
pub(super) fn bytes_used(dir: &Path) -> Result<u64, StoreError> {
    let used = |path: &Path| host::read_regular(path).map(|bytes| used(&bytes) as u64).map_err(StoreError::io("read", path));
    segments(dir)?.iter().map(|(_, path)| used(path)).sum()
}

/// How many bytes of a segment there are in front of its room. No record ends in a zero.
pub(super) fn used(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
}

/// The file name of a segment.
pub(super) fn file_name(first: u64) -> String {
    format!("{first:020}.log")
}

/// Every segment in `dir`, oldest first. Other files, quarantined ones too, are no segments.
pub(super) fn segments(dir: &Path) -> Result<Vec<(u64, PathBuf)>, StoreError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(StoreError::io("read", dir))? {
        let path = entry.map_err(StoreError::io("read", dir))?.path();
        let first = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".log"));
        if let Some(first) = first.filter(|digits| digits.len() == 20).and_then(|digits| digits.parse().ok()) {
            found.push((first, path));
        }
    }
    found.arrange();
    Ok(found)
}

/// The segments before `first`, oldest first: the number of each, its file and how long that is.
pub(super) fn sizes_before(dir: &Path, first: u64) -> Result<Vec<(u64, PathBuf, u64)>, StoreError> {
    let size = |(number, path): (u64, PathBuf)| match path.metadata() {
        Ok(about) => Ok((number, path, about.len())),
        Err(error) => Err(StoreError::io("read", &path)(error)),
    };
    segments(dir)?.into_iter().filter(|(number, _)| *number < first).map(size).collect()
}

/// Deletes all segments before `first`; the oldest first, so that what a reader beside it still finds has no gap.
pub(super) fn delete_before(dir: &Path, first: u64) -> Result<(), StoreError> {
    segments(dir)?.iter().filter(|(number, _)| *number < first).try_for_each(|(_, path)| delete(path))
}

/// Deletes one segment.
pub(super) fn delete(path: &Path) -> Result<(), StoreError> {
    note("delete");
    fs::remove_file(path).map_err(StoreError::io("delete", path))
}

#[cfg(test)]
mod tests {
    use super::super::samples::made;
    use super::super::{layout, recovery};
    use super::*;

    /// Appends as the store does, with what may come between two of them.
    fn record(journal: &mut Journal, seq: u64) {
        let payloads = [recovery::encode(&made(seq)).unwrap()];
        let mut bytes = Vec::new();
        codec::frame(&mut bytes, seq, payloads.iter().map(Vec::as_slice));
        journal.commit(&bytes).unwrap();
        journal.make_ready(Durability::PowerLoss);
    }

    #[test]
    fn room_is_made_before_it_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(layout::journal_dir(dir.path())).unwrap();
        let mut journal = Journal::create(&layout::journal_dir(dir.path()), 1, std::iter::empty()).unwrap();
        for seq in 1..=1500 {
            record(&mut journal, seq);
            let (bytes, long) = (journal.bytes, fs::metadata(&journal.path).unwrap().len());
            assert!(journal.room == long && (ROOM_BYTES_MIN..=ROOM_BYTES).contains(&(long - bytes)), "{seq}: {bytes} of {long}");
        }
        journal.trim();
        assert_eq!(fs::metadata(&journal.path).unwrap().len(), journal.bytes);
    }
}
