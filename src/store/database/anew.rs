//! Writing the database anew into another directory: sled's files grow with what is written and do not shrink with what is removed.

use super::{LOOKS, Shelf, failure, guard, options};
use crate::host;
use crate::store::StoreError;
use crate::store::layout::sync_directory;
use std::path::Path;
use std::sync::Arc;

/// Files of more than so many times the bytes of their records are written anew. What comes and goes for a while has four to five times as
/// many, since a page of sixteen records is written five times until it is full; what is written in one go, two to three and a half.
const FILES_MAX: (u64, u64) = (11, 2);
/// And of more than this: an empty database has half of it.
const FILES_MIN: u64 = 1024 * 1024;

impl Shelf {
    /// Whether the files are far longer than what is in them, and nobody reads it. All that is live is read to know that, when the
    /// history alone could be the reason.
    pub(in crate::store) fn is_bloated(&self) -> Result<bool, StoreError> {
        let files = host::size_below(&self.dir);
        let is_much = |records: u64| files > records.saturating_mul(FILES_MAX.0) / FILES_MAX.1 + FILES_MIN;
        if !is_much(self.history.bytes) || !self.is_measured || Arc::strong_count(&self.readers) > 1 {
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

    /// Writes everything into a new database in `dir`, durably. `go_on` is asked before each record; `false` where it has said no, and
    /// nothing is to be made of `dir` then.
    pub(in crate::store) fn write_anew(&self, dir: &Path, go_on: impl Fn() -> bool) -> Result<bool, StoreError> {
        let written = guard(|| {
            let fresh = Shelf::with_trees(dir, options(dir).open()?)?;
            let trees = [(&self.live, &fresh.live), (&self.names, &fresh.names), (&self.hooks, &fresh.hooks), (&self.meta, &fresh.meta)];
            for (from, to) in trees.into_iter().chain([(&self.past, &fresh.past)]) {
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
            fresh.set_numbers(&Shelf::length(self.history))?;
            fresh.persist()?;
            fresh.close();
            Ok(true)
        });
        let written = written.map_err(|error| failure(dir, &error))?;
        if written {
            sync_directory(dir)?;
        }
        Ok(written)
    }
}
