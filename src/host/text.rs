//! The text of small files of sysfs and procfs.

use std::fs::File;
use std::io::{self, Read};

/// The longest text that is read from one file: sysfs has a page, `/proc` a little more.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// The text without surrounding white space and NULs.
pub(super) fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
}

/// A scan reads thousands of small files, with one call each if possible: sysfs returns a whole
/// attribute at once and reports a size. `/proc` reports none and returns its text in parts.
pub(super) fn read_bounded(mut file: File, stated: u64) -> io::Result<Vec<u8>> {
    let mut page = [0; 4096];
    let first = file.read(&mut page)?;
    let mut bytes = page[..first].to_vec();
    if stated == 0 || first == page.len() {
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}
