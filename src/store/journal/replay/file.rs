//! Reads a segment's file, also while another thread or process writes to it.

use crate::host;
use crate::store::StoreError;
use crate::store::journal::used;
use std::path::Path;

/// `EIO` of Linux.
const EIO: i32 = 5;

/// The content of a segment without the zeros at its end. `None`: the disk cannot read the sectors,
/// which is damage.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match host::read_regular(path) {
        Ok(mut bytes) => {
            bytes.truncate(used(&bytes));
            Ok(Some(bytes))
        }
        Err(error) if error.raw_os_error() == Some(EIO) => Ok(None),
        Err(error) => Err(StoreError::io("read", path)(error)),
    }
}

/// Reads a segment that looks damaged once more. A read of a file is not atomic: while another
/// thread or process writes, it may miss bytes of a page that it has passed, and see later ones.
/// The second read has every byte that was written before the last one of the first read.
pub(super) fn read_again(path: &Path, first: Vec<u8>) -> Result<Vec<u8>, StoreError> {
    let Some(mut bytes) = read(path)? else { return Ok(first) };
    bytes.truncate(first.len());
    Ok(bytes)
}
