//! The disk's floor: what one journal record costs, whoever writes it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// A growing file beside the ledger's.
#[derive(Debug)]
pub(super) struct DiskFloor {
    file: File,
    record: Vec<u8>,
    /// Makes each record another one: a disk that recognises what it has already must not win by it.
    state: u64,
}

impl DiskFloor {
    pub(super) fn create(dir: &Path, record_bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).open(dir.join("floor"))?;
        let record = vec![0; usize::try_from(record_bytes).unwrap_or(1024)];
        Ok(DiskFloor { file, record, state: 0x9e37_79b9_7f4a_7c15 })
    }

    /// Appends one record and syncs it; how long both took.
    pub(super) fn append(&mut self) -> io::Result<Duration> {
        for chunk in self.record.chunks_mut(8) {
            // xorshift64: plenty for bytes that only have to differ.
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            chunk.copy_from_slice(&self.state.to_le_bytes()[..chunk.len()]);
        }
        let began = Instant::now();
        self.file.write_all(&self.record)?;
        self.file.sync_data()?;
        Ok(began.elapsed())
    }
}
