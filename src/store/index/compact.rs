//! Compaction: sled's files grow with what is written and do not shrink with what is removed. So a copy of the trees takes their place.

use super::database::{Database, options};
use super::failure::{failure, guard};
use super::reader::LOOKS;
use crate::host;
use crate::store::StoreError;
use crate::store::layout::{remove, sync_directory};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files of more than so many times the bytes of their records are compacted. Records that come and go have four to five times as
/// many, since a page of sixteen records is written five times until it is full; records of one write have two to three and a half.
const FILES_MAX: (u64, u64) = (11, 2);
/// And of more than this: an empty database has half of it.
const FILES_MIN: u64 = 1024 * 1024;

/// Where the copy is written. What a process has left there means nothing.
pub(crate) fn compact_dir(dir: &Path) -> PathBuf {
    dir.with_extension("compact")
}

/// Puts the copy in the place of the database in `dir`, in one step. Neither is open.
pub(super) fn replace_with_copy(dir: &Path) -> Result<(), StoreError> {
    let copy = compact_dir(dir);
    host::exchange(&copy, dir).map_err(StoreError::io("rename", &copy))?;
    sync_directory(dir.parent().unwrap_or(dir))?;
    remove(&copy)
}

impl Database {
    /// Whether the files are far longer than their records, and nobody reads them. All that is live is read to know that, when the
    /// history alone could be the reason.
    pub(crate) fn is_bloated(&self) -> Result<bool, StoreError> {
        let files = host::size_below(&self.dir);
        let is_much =
            |records: u64| files > records.saturating_mul(FILES_MAX.0) / FILES_MAX.1 + FILES_MIN;
        if !is_much(self.history.bytes) || Arc::strong_count(&self.readers) > 1 {
            return Ok(false);
        }
        let bytes = guard(|| {
            let mut bytes = self.history.bytes;
            for pair in [&self.live, &self.names, &self.hooks].into_iter().flatten() {
                let (key, value) = pair?;
                bytes += (key.len() + value.len()) as u64;
            }
            Ok(bytes)
        });
        bytes.map(is_much).map_err(|error| failure(&self.dir, &error))
    }

    /// Writes a copy of everything, durably. `go_on` is asked before each record; when it says no, the copy is incomplete and this
    /// returns `false`.
    pub(crate) fn write_copy(&self, go_on: impl Fn() -> bool) -> Result<bool, StoreError> {
        let dir = compact_dir(&self.dir);
        remove(&dir)?;
        let written = guard(|| {
            let copy = Database::with_trees(&dir, options(&dir).open()?)?;
            let trees = [
                (&self.live, &copy.live),
                (&self.names, &copy.names),
                (&self.hooks, &copy.hooks),
                (&self.meta, &copy.meta),
            ];
            for (from, to) in trees.into_iter().chain([(&self.past, &copy.past)]) {
                for pair in from {
                    if !go_on() {
                        return Ok(false);
                    }
                    let (key, value) = pair?;
                    to.insert(&key, value)?;
                    for tree in [from, to] {
                        (1..LOOKS).try_for_each(|_| tree.contains_key(&key).map(drop))?;
                    }
                }
            }
            // Not what the last checkpoint has noted: something may have come since.
            copy.set_numbers(&Database::length(self.history))?;
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
