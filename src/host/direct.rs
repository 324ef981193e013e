//! Writes that go past the page cache.

use nix::fcntl::OFlag;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a file that is there for writes that go past the page cache, in whole blocks and from memory that begins at a multiple of one,
/// and that are on the disk when they return (`O_DIRECT` and `O_DSYNC`, open(2)).
///
/// # Errors
/// Where the file system knows no such writes (`EINVAL`), and whatever else open(2) refuses.
pub fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).custom_flags((OFlag::O_DIRECT | OFlag::O_DSYNC).bits()).open(path)
}
