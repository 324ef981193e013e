//! What an error of sled's says: the database is damaged, or the system refuses something.

use crate::host;
use crate::store::StoreError;
use std::fs::{self, File};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// The directory of sled's large pages.
pub(super) const BLOBS: &str = "blobs";

/// What the system has refused, if that is what went wrong. sled passes some of it on as a text, and panics over some. A file that
/// is missing is nothing that the system refuses.
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
    // As an `io::Error` is written with `{:?}`.
    let text = error.to_string();
    let digits: String =
        text.split_once("Os { code: ")?.1.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().and_then(by_number)
}

/// After a panic of one of its threads sled opens nothing more in this process, be it as sound as it may.
fn is_of_another(error: &sled::Error) -> bool {
    matches!(error, sled::Error::ReportableBug(text) if text.contains("IO thread unexpectedly panicked"))
}

/// Runs something of sled's; a panic becomes an error.
pub(crate) fn guard<T>(operation: impl FnOnce() -> sled::Result<T>) -> sled::Result<T> {
    catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(sled::Error::ReportableBug(text.unwrap_or_else(|| "it panicked".into())))
    })
}

/// What an error says of the database in `dir`. Only [`StoreError::Database`] says that it is damaged.
pub(super) fn failure(dir: &Path, error: &sled::Error) -> StoreError {
    match of_the_system(error) {
        Some(source) => StoreError::io("use", dir)(source),
        None if is_of_another(error) => {
            StoreError::Unopened { path: dir.to_owned(), why: error.to_string() }
        }
        None => StoreError::Database { path: dir.to_owned(), why: error.to_string() },
    }
}

/// sled opens whatever has the name of one of its files, and would wait for the other end of a FIFO for ever.
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
                .map_err(|error| unable(&path, error))?;
        }
    }
    Ok(())
}

/// What is wrong with the database beside a journal whose oldest segment begins at `oldest`, in words. `applied` is the last entry
/// of its last checkpoint.
pub(crate) fn database_finding(oldest: u64, applied: u64, existed: bool) -> Option<String> {
    if !existed && oldest > 1 {
        Some("the query database is gone, and with it the history".into())
    } else if applied + 1 < oldest {
        Some(format!("the query database has lost what it had after entry {applied}"))
    } else if oldest == 0 && applied > 0 {
        Some("the journal is gone; grants come from the query database".into())
    } else {
        None
    }
}

/// What is said of a database whose records were damaged.
pub(crate) fn history_finding(why: &str) -> String {
    format!(
        "the query database was damaged ({why}); its history stays in the copy that was moved away"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_damage(error: &sled::Error) -> bool {
        matches!(failure(Path::new("/x"), error), StoreError::Database { .. })
    }

    #[test]
    fn what_the_system_refuses_is_no_damage_however_sled_passes_it_on() {
        // EIO, ENOMEM, EAGAIN, EACCES, ENFILE, EMFILE, EFBIG, ENOSPC, EROFS, EDQUOT
        for number in [5, 12, 11, 13, 23, 24, 27, 28, 30, 122] {
            let error = || io::Error::from_raw_os_error(number);
            let told = sled::Error::Io(error());
            // As sled clones it, and as a panic of an `unwrap` tells it.
            let cloned = told.clone();
            let panicked = guard::<()>(|| {
                panic!("called `Result::unwrap()` on an `Err` value: {:?}", error())
            })
            .unwrap_err();
            for error in [told, cloned, panicked] {
                assert!(!is_damage(&error), "{number}: {error}");
                assert!(
                    matches!(failure(Path::new("/x"), &error), StoreError::Io { .. }),
                    "{number}: {error}"
                );
            }
        }
    }

    #[test]
    fn what_was_read_and_is_wrong_is_damage_and_so_is_a_file_that_is_missing() {
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
    fn sled_that_opens_nothing_more_in_this_process_says_nothing_of_this_database() {
        let broken = sled::Error::ReportableBug(
            "IO thread unexpectedly panicked. please report this bug".into(),
        );
        assert!(matches!(failure(Path::new("/x"), &broken), StoreError::Unopened { .. }));
    }
}
