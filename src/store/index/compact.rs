//! Compaction. sled's files grow with every write and never shrink, so a copy of the trees replaces
//! them.

use super::database::{Database, options};
use super::failure::{failure, guard};
use super::reader::READS_PER_RECORD;
use super::shared::Shared;
use crate::host;
use crate::store::StoreError;
use crate::store::layout::{FREE_BYTES_MIN, remove, sync_directory};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files longer than this multiple of their records are compacted. Records that come and go take
/// four to five times their size, since a page of sixteen records is written five times until it is
/// full. Records of one write take two to three and a half times.
const FILES_MAX: (u64, u64) = (11, 2);
/// And longer than this. An empty database has half of it.
const FILES_MIN: u64 = 1024 * 1024;

/// The directory of the copy. One that a killed process left is deleted.
pub(crate) fn compact_dir(dir: &Path) -> PathBuf {
    dir.with_extension("compact")
}

/// Replaces the database in `dir` by a copy, in one step, and leaves it closed. Without enough free
/// space, or at the end of the process, nothing happens.
pub(super) fn compact(
    database: &mut Option<Database>,
    dir: &Path,
    shared: &Shared,
) -> Result<(), StoreError> {
    let (copy, before) = (compact_dir(dir), host::size_below(dir));
    if host::free_bytes(dir) < before.saturating_add(FREE_BYTES_MIN) {
        tracing::debug!(bytes = before, "not enough free space to compact the query database");
        return Ok(());
    }
    let goes_on = || {
        shared.note_progress();
        !shared.is_ending()
    };
    let replace = |database: &mut Option<Database>| {
        database.take().into_iter().for_each(Database::close);
        host::exchange(&copy, dir).map_err(StoreError::io("rename", &copy))?;
        sync_directory(dir.parent().unwrap_or(dir))
    };
    let written = database.as_ref().map_or(Ok(false), |database| database.write_copy(goes_on));
    let replaced =
        written.and_then(|is_complete| if is_complete { replace(database) } else { Ok(()) });
    if replaced.is_ok() && database.is_none() {
        tracing::debug!(before, after = host::size_below(dir), "the query database was compacted");
    }
    replaced.and(remove(&copy))
}

impl Database {
    /// Whether the files are far longer than their records, and no reader uses them. The live
    /// records are counted only if the history is small enough to be the cause.
    pub(crate) fn needs_compaction(&self) -> Result<bool, StoreError> {
        let files = host::size_below(&self.dir);
        let is_too_long =
            |records: u64| files > records.saturating_mul(FILES_MAX.0) / FILES_MAX.1 + FILES_MIN;
        if !is_too_long(self.history.bytes) || Arc::strong_count(&self.readers) > 1 {
            return Ok(false);
        }
        let bytes = guard(|| {
            let mut bytes = self.history.bytes;
            for pair in
                [&self.trees.live, &self.trees.names, &self.trees.hooks].into_iter().flatten()
            {
                let (key, value) = pair?;
                bytes += (key.len() + value.len()) as u64;
            }
            Ok(bytes)
        });
        bytes.map(is_too_long).map_err(|error| failure(&self.dir, &error))
    }

    /// Writes a durable copy of all trees. Returns false if `goes_on`, which is called before each
    /// record, returned false: the copy is then incomplete.
    pub(crate) fn write_copy(&self, goes_on: impl Fn() -> bool) -> Result<bool, StoreError> {
        let dir = compact_dir(&self.dir);
        remove(&dir)?;
        let written = guard(|| {
            let copy = Database::with_trees(&dir, options(&dir).open()?)?;
            for (from, to) in self.trees.all().into_iter().zip(copy.trees.all()) {
                for pair in from {
                    if !goes_on() {
                        return Ok(false);
                    }
                    let (key, value) = pair?;
                    to.insert(&key, value)?;
                    for tree in [from, to] {
                        (1..READS_PER_RECORD)
                            .try_for_each(|_| tree.contains_key(&key).map(drop))?;
                    }
                }
            }
            // The current size, since changes may have come after the last checkpoint.
            copy.set_numbers(&Database::size_numbers(self.history))?;
            copy.persist()?;
            copy.close();
            Ok(true)
        });
        let written = written.map_err(|error| failure(&dir, &error))?;
        if written {
            sync_directory(&dir)?;
        }
        Ok(written)
    }
}
