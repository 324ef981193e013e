//! The released grants, in a tree of their own that no start reads.

use super::{failure, guard};
use crate::domain::{Entry, Grant, GrantState};
use crate::store::{StoreError, codec};
use std::path::{Path, PathBuf};

/// The released grants of an open database, to be read without it.
#[derive(Debug)]
pub(in crate::store) struct History {
    dir: PathBuf,
    tree: sled::Tree,
}

impl History {
    pub(super) fn new(dir: &Path, tree: sled::Tree) -> Self {
        History { dir: dir.to_owned(), tree }
    }

    /// Released grants, newest first, until `take` says no more. A record that cannot be read is skipped.
    pub(in crate::store) fn read(&self, mut take: impl FnMut(Grant) -> bool) -> Result<(), StoreError> {
        let read = guard(|| {
            for pair in self.tree.iter().rev() {
                let (key, value) = pair?;
                if let Some(Entry::Grant(grant)) = codec::unstamp(&key, &value).ok().and_then(|record| codec::decode(record.payload).ok())
                    && !take(*grant)
                {
                    break;
                }
            }
            Ok(())
        });
        read.map_err(|error| failure(&self.dir, error))
    }
}

/// The time of release first, so that the newest are found without an index.
pub(super) fn history_key(grant: &Grant) -> Vec<u8> {
    let at = if let GrantState::Released { released_at, .. } = &grant.state { released_at.0 } else { 0 };
    let mut key = at.to_be_bytes().to_vec();
    key.extend_from_slice(grant.alloc_id.as_str().as_bytes());
    key
}
