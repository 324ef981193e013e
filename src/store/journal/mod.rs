//! The write-ahead log: segments that each begin with everything live.
//!
//! A segment is `<state-dir>/journal/<first seq, 20 digits>.log`. It has a header line, the head
//! (every live grant and note at its creation), the entries since in order, and zeros. Only the
//! process that created a segment writes it. A segment is never repaired, and never appended to
//! after a restart.

pub(crate) mod codec;
mod replay;
mod scan;
mod segment;

pub(super) use self::replay::JournalReplay;
pub(super) use self::segment::Journal;
pub use self::segment::PendingSync;

use super::StoreError;
use super::layout::note;
use crate::host;
use std::fs;
use std::path::{Path, PathBuf};

/// The first word of a segment. The version of the framing follows.
const MAGIC: &str = "holdfast-journal ";
/// The maximum length of the header line.
const HEADER_BYTES_MAX: usize = 64;

/// The bytes that were appended to the segments in `dir`, with their heads, and without the zeros
/// ahead.
pub(super) fn bytes_used(dir: &Path) -> Result<u64, StoreError> {
    let used = |path: &Path| {
        host::read_regular(path)
            .map(|bytes| used(&bytes) as u64)
            .map_err(StoreError::io("read", path))
    };
    segments(dir)?.iter().map(|(_, path)| used(path)).sum()
}

/// The length of a segment without the zeros at its end. No record ends with a zero.
pub(super) fn used(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
}

/// The file name of a segment.
pub(super) fn file_name(first: u64) -> String {
    format!("{first:020}.log")
}

/// Every segment in `dir`, oldest first. Other files are ignored.
pub(super) fn segments(dir: &Path) -> Result<Vec<(u64, PathBuf)>, StoreError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(StoreError::io("read", dir))? {
        let path = entry.map_err(StoreError::io("read", dir))?.path();
        let first = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_suffix(".log"));
        if let Some(first) =
            first.filter(|digits| digits.len() == 20).and_then(|digits| digits.parse().ok())
        {
            found.push((first, path));
        }
    }
    found.sort();
    Ok(found)
}

/// The segments before `first`, oldest first: number, file and length.
pub(super) fn sizes_before(dir: &Path, first: u64) -> Result<Vec<(u64, PathBuf, u64)>, StoreError> {
    let size = |(number, path): (u64, PathBuf)| match path.metadata() {
        Ok(about) => Ok((number, path, about.len())),
        Err(error) => Err(StoreError::io("read", &path)(error)),
    };
    segments(dir)?.into_iter().filter(|(number, _)| *number < first).map(size).collect()
}

/// Deletes all segments before `first`, the oldest first, so that a concurrent reader finds no gap.
pub(super) fn delete_before(dir: &Path, first: u64) -> Result<(), StoreError> {
    segments(dir)?
        .iter()
        .filter(|(number, _)| *number < first)
        .try_for_each(|(_, path)| delete(path))
}

/// Deletes one segment.
pub(super) fn delete(path: &Path) -> Result<(), StoreError> {
    note("delete");
    fs::remove_file(path).map_err(StoreError::io("delete", path))
}

/// The finding of a damaged segment.
pub(super) fn damage_finding(path: &Path) -> String {
    format!("journal segment `{}` is damaged", path.display())
}

/// The finding of a journal that ends with `last`, before the last confirmed entry.
pub(super) fn end_finding(last: u64, confirmed: u64) -> Option<String> {
    (confirmed > last).then(|| {
        format!("the journal ends with entry {last}, and entries up to {confirmed} were confirmed")
    })
}
