//! What kind of file system a path lies on, and what room it has.

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::{FsFlags, statvfs};
use std::path::Path;

/// Whether `path` lies in memory. Where it cannot be found out it does not.
#[must_use]
pub fn is_tmpfs(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}

/// How many bytes may be written to the file system of `path`; none if it is read-only. Where it cannot be found out there
/// is room enough.
#[must_use]
pub fn room(path: &Path) -> u64 {
    statvfs(path).map_or(u64::MAX, |about| {
        if about.flags().contains(FsFlags::ST_RDONLY) { 0 } else { about.blocks_available().saturating_mul(about.fragment_size()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_where_a_file_can_be_written_and_where_nothing_is_known() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), [7; 4096]).unwrap();
        assert!(room(dir.path()) > 0);
        assert_eq!(room(&dir.path().join("nothing")), u64::MAX);
    }
}
