//! What can go wrong with the store, in words for the person who has to act.

use crate::host;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("failed to {doing} `{path}`: {source}{}", Advice(source))]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or directory.
        path: PathBuf,
        /// Why it was refused.
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
        "`{path}` was written by a newer Holdfast (record version {version}; this one reads {known}): run that version or a newer one; its \
         grants would be lost otherwise",
        known = super::RECORDS
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The version that was found.
        version: u32,
    },
    /// There is no journal to read.
    #[error("state directory `{path}` has no journal: no Holdfast has run with this `--state-dir`")]
    NoJournal {
        /// The state directory.
        path: PathBuf,
    },
    /// Too many entries were accepted without a journal, or the journal can be written.
    #[error(
        "{entries} entries are waiting to be written; new grants are refused until the journal is writable"
    )]
    TooManyUnwritten {
        /// How many wait.
        entries: usize,
    },
    /// One entry is larger than a record can be.
    #[error("an entry of {bytes} bytes does not fit into a journal record of at most 2 MB")]
    TooLarge {
        /// The size of its payload.
        bytes: usize,
    },
    /// The query database is not open, and nothing speaks against it.
    #[error("query database `{path}` is not open yet: {why}")]
    Unopened {
        /// Its directory.
        path: PathBuf,
        /// Why it takes so long.
        why: String,
    },
    /// The query database failed. The journal is not touched by that.
    #[error(
        "query database `{path}` failed: {why}: it is rebuilt from the journal at the next checkpoint"
    )]
    Database {
        /// Its directory.
        path: PathBuf,
        /// What sled said.
        why: String,
    },
}

impl StoreError {
    /// For `map_err`: the operation and the path of an I/O error.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { doing, path: path.to_owned(), source }
    }

    /// Whether the file system takes nothing more, full or read-only, or this process has no room for it: descriptors, threads, memory. That is no
    /// damage, and may end by itself.
    pub(super) fn is_out_of_resources(&self) -> bool {
        matches!(self, StoreError::Io { source, .. } if is_out_of_space(source) || host::is_shortage(source))
    }

    /// Whether there is something already where a file was to be created.
    pub(super) fn is_in_the_way(&self) -> bool {
        matches!(self, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// Whether the file system takes nothing more.
pub(super) fn is_out_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem | FileTooLarge)
}

/// What to do about an I/O error, where that is known.
struct Advice<'a>(&'a io::Error);

impl fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.kind() {
            io::ErrorKind::PermissionDenied => {
                ": the state directory must be writable for the user that runs Holdfast (`--state-dir` chooses another)"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": make room on its file system",
            io::ErrorKind::ReadOnlyFilesystem => {
                ": its file system is mounted read-only, as the kernel does after disk errors: make that writable"
            }
            io::ErrorKind::FileTooLarge => ": raise the limit of file sizes of this process (RLIMIT_FSIZE, `LimitFSIZE` of the unit)",
            io::ErrorKind::NotADirectory => ": a file is in the way of a directory",
            io::ErrorKind::AlreadyExists => ": something else has that name: move it away (`mv`) and start again",
            _ if host::NotRegular::is(self.0) => ": move it away (`mv`) and start again; what belongs there is made new",
            _ => "",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_path_the_reason_and_the_way_out() {
        let error = StoreError::io("write", Path::new("/var/lib/holdfast/journal/1.log"))(
            io::ErrorKind::StorageFull.into(),
        );
        let text = error.to_string();
        for part in ["`/var/lib/holdfast/journal/1.log`", "no storage space", "make room"] {
            assert!(text.contains(part), "`{part}` in `{text}`");
        }
    }
}
