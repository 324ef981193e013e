//! Errors of the store, for the person who has to act.

use crate::host;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("failed to {doing} `{path}`: {source}{}", Advice(source))]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason of the system.
        source: io::Error,
    },
    /// Another process has the same state directory open.
    #[error(
        "state directory `{path}` is in use by another process: stop the other Holdfast first, or give this one another `--state-dir`"
    )]
    InUse {
        /// The state directory.
        path: PathBuf,
    },
    /// A later version of Holdfast has written here.
    #[error(
        "`{path}` was written by a newer Holdfast (record version {version}; this one reads {known}): \
         run that version or a newer one; otherwise its grants would be lost",
        known = super::RECORDS
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        version: u32,
    },
    /// There is no journal to read.
    #[error("state directory `{path}` has no journal: no Holdfast has run with this `--state-dir`")]
    NoJournal {
        /// The state directory.
        path: PathBuf,
    },
    /// Too many entries wait for the journal, or the journal is writable.
    #[error(
        "{entries} entries are waiting to be written; new grants are refused until the journal is writable"
    )]
    TooManyUnwritten {
        /// The number of waiting entries.
        entries: usize,
    },
    /// One entry is larger than a record can be.
    #[error("{entry} has {bytes} bytes, and a record of the journal holds at most 2 MB")]
    TooLarge {
        /// The entry in words.
        entry: String,
        /// The size of its payload.
        bytes: usize,
    },
    /// The query database is not open, and not damaged.
    #[error("query database `{path}` is not open yet: {why}")]
    Unopened {
        /// Its directory.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The query database failed. The journal is not affected.
    #[error(
        "query database `{path}` failed ({why}); it is rebuilt from the journal at the next checkpoint"
    )]
    Database {
        /// Its directory.
        path: PathBuf,
        /// The error of sled.
        why: String,
    },
}

impl StoreError {
    /// The operation and the path of an I/O error, for `map_err`.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { doing, path: path.to_owned(), source }
    }

    /// Whether the file system is full or read-only, or this process lacks descriptors, threads or
    /// memory. That is no damage, and may be temporary.
    pub(super) fn is_out_of_resources(&self) -> bool {
        matches!(self, StoreError::Io { source, .. } if is_out_of_space(source) || host::is_shortage(source))
    }

    /// Whether a file already exists where one was to be created.
    pub(super) fn is_in_the_way(&self) -> bool {
        matches!(self, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// Whether the file system accepts no writes.
pub(super) fn is_out_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem | FileTooLarge)
}

/// The remedy for an I/O error, if it is known.
struct Advice<'a>(&'a io::Error);

impl fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.kind() {
            io::ErrorKind::PermissionDenied => {
                ": only root, or the user that runs Holdfast, may use the state directory: use `sudo`, or set another with `--state-dir`"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": make room on its file system",
            io::ErrorKind::ReadOnlyFilesystem => {
                ": its file system is mounted read-only, as after disk errors: make it writable"
            }
            io::ErrorKind::FileTooLarge => ": raise the limit of file sizes of this process (RLIMIT_FSIZE, `LimitFSIZE` of the unit)",
            io::ErrorKind::NotADirectory => ": a file is in the way of a directory",
            io::ErrorKind::AlreadyExists => ": another file has that name: move it away (`mv`) and start again",
            _ if host::NotRegular::is(self.0) => ": move it away (`mv`) and start again; Holdfast creates the file",
            _ => "",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_path_the_reason_and_the_remedy() {
        let error = StoreError::io("write", Path::new("/var/lib/holdfast/journal/1.log"))(
            io::ErrorKind::StorageFull.into(),
        );
        let text = error.to_string();
        for part in ["`/var/lib/holdfast/journal/1.log`", "no storage space", "make room"] {
            assert!(text.contains(part), "`{part}` in `{text}`");
        }
    }
}
