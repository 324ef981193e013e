//! The disk's lower bounds: the cost of a record, as an append and as a file that is written again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The size of one container's entry with a GPU in the kubelet's checkpoint: names, the id, and in
/// base64 an answer of five nodes, a variable and an annotation. A plain node takes 300 bytes.
const ENTRY_BYTES: usize = 700;
/// The size of its list of registered devices: 512 ids.
const LIST_BYTES: usize = 12 * 1024;
/// Containers until the file starts again: the default number of pods of a kubelet.
const ENTRIES_MAX: usize = 110;

/// Bytes that differ from all before, so that a disk with deduplication has no advantage.
#[derive(Debug)]
struct Noise(u64);

impl Noise {
    fn new() -> Self {
        Noise(0x9e37_79b9_7f4a_7c15)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            // xorshift64: plenty for bytes that only have to differ.
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            chunk.copy_from_slice(&self.0.to_le_bytes()[..chunk.len()]);
        }
    }
}

/// A growing file next to the ledger's.
#[derive(Debug)]
pub(super) struct Append {
    file: File,
    record: Vec<u8>,
    noise: Noise,
}

impl Append {
    pub(super) fn create(dir: &Path, record_bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).open(dir.join("floor"))?;
        let record = vec![0; usize::try_from(record_bytes).unwrap_or(1024)];
        Ok(Append { file, record, noise: Noise::new() })
    }

    /// Appends one record and syncs it; how long both took.
    pub(super) fn append(&mut self) -> io::Result<Duration> {
        self.noise.fill(&mut self.record);
        let began = Instant::now();
        self.file.write_all(&self.record)?;
        self.file.sync_data()?;
        Ok(began.elapsed())
    }
}

/// A checkpoint file next to the ledger, written as the kubelet does: a temporary file, synced,
/// replaces the former one.
#[derive(Debug)]
pub(super) struct Rewrite {
    dir: PathBuf,
    bytes: Vec<u8>,
    entries: usize,
    noise: Noise,
}

impl Rewrite {
    pub(super) fn new(dir: &Path) -> Self {
        Rewrite { dir: dir.to_owned(), bytes: Vec::new(), entries: 0, noise: Noise::new() }
    }

    /// Writes it with one more entry. Returns the time until that was done, and the time until the
    /// directory was synced too; without that sync a power cut may bring the former file back.
    pub(super) fn rewrite(&mut self) -> io::Result<(Duration, Duration)> {
        self.entries = self.entries % ENTRIES_MAX + 1;
        self.bytes.resize(LIST_BYTES + self.entries * ENTRY_BYTES, 0);
        self.noise.fill(&mut self.bytes);
        let (temporary, name) = (self.dir.join(".checkpoint.tmp"), self.dir.join("checkpoint"));
        let began = Instant::now();
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(&self.bytes)?;
        file.sync_all()?;
        drop(file);
        std::fs::rename(temporary, name)?;
        let renamed = began.elapsed();
        File::open(&self.dir)?.sync_all()?;
        Ok((renamed, began.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_grows_by_an_entry_has_other_bytes_each_time_and_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut floor = Rewrite::new(dir.path());
        let mut write = || {
            let (renamed, synced) = floor.rewrite().unwrap();
            assert!(renamed <= synced);
            std::fs::read(dir.path().join("checkpoint")).unwrap()
        };
        let (first, second) = (write(), write());
        assert_eq!(
            (first.len(), second.len()),
            (LIST_BYTES + ENTRY_BYTES, LIST_BYTES + 2 * ENTRY_BYTES)
        );
        assert_ne!(first[..LIST_BYTES], second[..LIST_BYTES]);
        assert_eq!(
            (2..=ENTRIES_MAX).map(|_| write().len()).last(),
            Some(first.len()),
            "it starts again"
        );
        assert_eq!(dir.path().read_dir().unwrap().count(), 1);
    }
}
