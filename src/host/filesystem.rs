//! What kind of file system a path lies on.

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use std::path::Path;

/// Whether `path` lies in memory. Where it cannot be found out it does not.
#[must_use]
pub fn is_tmpfs(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}
