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

/// The bytes of all files in a directory and in those below it, to a depth that no file of ours has. What cannot be read is left out.
#[must_use]
pub fn size_below(dir: &Path) -> u64 {
    fn size(dir: &Path, depth: u32) -> u64 {
        let Some(depth) = depth.checked_sub(1) else { return 0 };
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let of_entry = |entry: std::fs::DirEntry| match entry.metadata() {
            Ok(about) if about.is_dir() => size(&entry.path(), depth),
            Ok(about) => about.len(),
            Err(_) => 0,
        };
        entries.map(of_entry).sum()
    }
    size(dir, 4)
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

    #[test]
    fn the_size_is_that_of_all_files_and_nothing_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("below")).unwrap();
        std::fs::write(dir.path().join("a"), [7; 100]).unwrap();
        std::fs::write(dir.path().join("below/b"), [7; 20]).unwrap();
        std::os::unix::fs::symlink("..", dir.path().join("below/up")).unwrap();
        assert_eq!(size_below(dir.path()), 120 + "..".len() as u64);
        assert_eq!(size_below(&dir.path().join("nothing")), 0);
    }
}
