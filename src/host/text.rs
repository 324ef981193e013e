//! The text of small files of sysfs and procfs.

use rustix::buffer::spare_capacity;
use std::fs::File;
use std::io::{self, Read};

/// The longest text that is read from one file: sysfs has a page, `/proc` a little more.
const FILE_BYTES_MAX: u64 = 64 * 1024;
/// The longest attribute of sysfs on most machines.
const PAGE_BYTES: usize = 4096;

/// The text without surrounding white space and NULs.
pub(super) fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
}

/// A scan reads thousands of small files, with one call each if possible: sysfs returns a whole
/// attribute at once and reports a size. `/proc` reports none and returns its text in parts.
pub(super) fn read_bounded(file: File, stated: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(PAGE_BYTES);
    rustix::io::read(&file, spare_capacity(&mut bytes))?;
    if stated == 0 || bytes.len() >= PAGE_BYTES {
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}
