//! The meaning of sled's errors: damage, or a refusal by the system.

use crate::host;
use crate::store::StoreError;
use std::fs::{self, File};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// The directory of sled's large pages.
pub(super) const BLOBS: &str = "blobs";

/// The error of a refusal by the system. sled returns some of them as text, and panics on others. A
/// missing file is no refusal.
fn of_the_system(error: &sled::Error) -> Option<io::Error> {
    let by_number = |number| {
        Some(io::Error::from_raw_os_error(number))
            .filter(|error| error.kind() != io::ErrorKind::NotFound)
    };
    if let sled::Error::Io(error) = error
        && let Some(number) = error.raw_os_error()
    {
        return by_number(number);
    }
    // The format of an `io::Error` with `{:?}`.
    let text = error.to_string();
    let digits: String =
        text.split_once("Os { code: ")?.1.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().and_then(by_number)
}

/// After a panic of one of its threads, sled opens no database in this process, not even an intact
/// one.
fn is_poisoned(error: &sled::Error) -> bool {
    matches!(error, sled::Error::ReportableBug(text) if text.contains("IO thread unexpectedly panicked"))
}

/// Runs a call of sled. A panic becomes an error.
pub(crate) fn guard<T>(operation: impl FnOnce() -> sled::Result<T>) -> sled::Result<T> {
    catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(sled::Error::ReportableBug(text.unwrap_or_else(|| "sled panicked".into())))
    })
}

/// Converts an error about the database in `dir`. Only [`StoreError::Database`] means damage.
pub(super) fn failure(dir: &Path, error: &sled::Error) -> StoreError {
    match of_the_system(error) {
        Some(source) => StoreError::io("use", dir)(source),
        None if is_poisoned(error) => {
            StoreError::Unopened { path: dir.to_owned(), why: error.to_string() }
        }
        None => StoreError::Database { path: dir.to_owned(), why: error.to_string() },
    }
}

/// Checks that all files are regular and can be read. sled would wait forever on a FIFO. A segment
/// that it cannot read is an empty one to it, which it overwrites.
pub(super) fn check_files(dir: &Path) -> Result<(), StoreError> {
    let unable = |path: &Path, error: io::Error| {
        let why = StoreError::io("open", path)(error).to_string();
        StoreError::Unopened { path: dir.to_owned(), why }
    };
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| unable(dir, error))?,
    };
    for entry in entries {
        let path = entry.map_err(|error| unable(dir, error))?.path();
        if path.file_name().is_some_and(|name| name == BLOBS) {
            check_files(&path)?;
        } else {
            host::open_regular(&path, File::options().read(true))
                .and_then(|mut file| io::copy(&mut file, &mut io::sink()))
                .map_err(|error| unable(&path, error))?;
        }
    }
    Ok(())
}

/// Compares the database with a journal whose oldest segment begins at `oldest`. `applied` is the
/// last entry at the database's last checkpoint. Returns the problem as a sentence.
pub(crate) fn database_finding(oldest: u64, applied: u64, existed: bool) -> Option<String> {
    if !existed && oldest > 1 {
        Some("the query database is missing, and with it the history".into())
    } else if applied + 1 < oldest {
        Some(format!("the query database has lost its entries after {applied}"))
    } else if oldest == 0 && applied > 0 {
        Some("the journal is missing; grants come from the query database".into())
    } else {
        None
    }
}

/// The finding of a damaged database.
pub(crate) fn history_finding(why: &str) -> String {
    format!("the query database was damaged ({why}); its history stays in the quarantined copy")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_damage(error: &sled::Error) -> bool {
        matches!(failure(Path::new("/x"), error), StoreError::Database { .. })
    }

    #[test]
    fn errors_of_the_system_are_not_damage_in_any_form() {
        // EIO, ENOMEM, EAGAIN, EACCES, ENFILE, EMFILE, EFBIG, ENOSPC, EROFS, EDQUOT
        for number in [5, 12, 11, 13, 23, 24, 27, 28, 30, 122] {
            let error = || io::Error::from_raw_os_error(number);
            let direct = sled::Error::Io(error());
            // A clone by sled, and a panic of `unwrap`.
            let cloned = direct.clone();
            let panicked = guard::<()>(|| {
                panic!("called `Result::unwrap()` on an `Err` value: {:?}", error())
            })
            .unwrap_err();
            for error in [direct, cloned, panicked] {
                assert!(!is_damage(&error), "{number}: {error}");
                assert!(
                    matches!(failure(Path::new("/x"), &error), StoreError::Io { .. }),
                    "{number}: {error}"
                );
            }
        }
    }

    #[test]
    fn wrong_content_and_missing_files_are_damage() {
        let panicked =
            guard::<()>(|| panic!("index out of bounds: the len is 3 but the index is 7"))
                .unwrap_err();
        let short = sled::Error::Io(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "failed to fill whole buffer",
        ));
        let missing = sled::Error::Io(io::Error::from_raw_os_error(2));
        let corrupt = sled::Error::Corruption { at: None, bt: () };
        assert!([panicked, short, missing, corrupt].iter().all(is_damage));
    }

    #[test]
    fn a_poisoned_sled_is_not_damage_of_this_database() {
        let broken = sled::Error::ReportableBug(
            "IO thread unexpectedly panicked. please report this bug".into(),
        );
        assert!(matches!(failure(Path::new("/x"), &broken), StoreError::Unopened { .. }));
    }
}
