//! Paths below the state directory, free space, and file operations whose order matters.

use super::StoreError;
use crate::domain::{Retention, Timestamp};
use crate::host::{self, private};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

#[cfg(test)]
pub(super) use super::testing::{note, with_my_steps};

pub(super) fn journal_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("journal")
}

pub(super) fn database_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("db")
}

/// The journal's directory, if it exists. A directory that cannot be read is an error.
pub(super) fn require_journal(state_dir: &Path) -> Result<PathBuf, StoreError> {
    let journal = journal_dir(state_dir);
    match journal.try_exists() {
        Ok(true) => Ok(journal),
        Ok(false) => Err(StoreError::NoJournal { path: state_dir.to_owned() }),
        Err(error) => Err(StoreError::io("read", &journal)(error)),
    }
}

/// Names that the daemon creates, that a file system creates, and that the package reads
/// (docs/install.md).
fn is_own(name: &str) -> bool {
    ["lock", "journal", "db", "lost+found", "remove-with-package"].contains(&name)
        || name.starts_with("db.")
        || name.contains(".quarantine")
}

/// Makes the state directory and its content private: grants contain environments. Returns the
/// number of changed modes.
///
/// # Errors
/// When a mode cannot be changed.
pub fn keep_private(state_dir: &Path) -> io::Result<usize> {
    private::make_private(state_dir, is_own)
}

/// A private temporary folder for a copy of the database. It is deleted on drop.
pub(super) fn scratch() -> Result<tempfile::TempDir, StoreError> {
    let mut folder = tempfile::Builder::new();
    folder.prefix("holdfast-").permissions(Permissions::from_mode(0o700));
    folder.tempdir().map_err(StoreError::io("create", &std::env::temp_dir()))
}

/// The maximum number of quarantined files and directories.
const QUARANTINED_MAX: usize = 8;
/// The free space that sled needs. It writes segments of 128 KiB, a few at a time. The last
/// megabyte is the journal's.
pub(super) const FREE_BYTES_MIN: u64 = 1024 * 1024;

/// Whether sled may write to `dir`. sled may hang after an error for lack of space. A limit of file
/// sizes counts too, since sled has one file.
pub(super) fn has_free_space(dir: &Path) -> bool {
    let log = || fs::metadata(dir.join("db")).map_or(0, |about| about.len());
    let below_limit = host::file_size_limit().map_or(u64::MAX, |limit| limit.saturating_sub(log()));
    let parent = dir.parent().unwrap_or(dir);
    host::free_bytes(parent).min(host::free_bytes(dir)).min(below_limit) >= FREE_BYTES_MIN
}

/// Fails without free space for sled.
pub(super) fn require_free_space(dir: &Path) -> Result<(), StoreError> {
    if has_free_space(dir) {
        Ok(())
    } else {
        Err(StoreError::io("write", dir)(io::ErrorKind::StorageFull.into()))
    }
}

/// Renames a damaged file or directory. Returns its new path.
pub(super) fn quarantine(path: &Path) -> Result<PathBuf, StoreError> {
    let millis = Timestamp::from_system(SystemTime::now()).0;
    let target = |millis: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".quarantine-{millis}"));
        PathBuf::from(name)
    };
    // A second one in the same millisecond takes the next number.
    let free = (millis..).map(target).find(|target| !target.exists());
    let target = free.unwrap_or_else(|| path.with_extension("quarantine"));
    fs::rename(path, &target).map_err(StoreError::io("rename", path))?;
    Ok(target)
}

/// The quarantined files of a state directory.
pub(super) fn quarantined(state_dir: &Path) -> Vec<PathBuf> {
    let inside =
        |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let all = inside(state_dir.to_owned()).chain(inside(journal_dir(state_dir)));
    let mut found: Vec<PathBuf> =
        all.filter(|path| path.to_string_lossy().contains(".quarantine")).collect();
    found.sort();
    found
}

/// Deletes the oldest quarantined files above the limits. The newest one is kept at any size.
pub(super) fn delete_quarantined(state_dir: &Path, retention: Retention, now: Timestamp) {
    // The name ends with the time.
    let moved_at = |path: &Path| {
        path.to_string_lossy()
            .rsplit('-')
            .next()
            .and_then(|millis| millis.parse().ok())
            .unwrap_or(0_u64)
    };
    let mut aside: Vec<_> =
        quarantined(state_dir).into_iter().map(|path| (moved_at(&path), path)).collect();
    aside.sort_unstable_by(|one, other| other.cmp(one));
    let oldest = now.0.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX));
    let mut kept = 0_u64;
    for (place, (at, path)) in aside.iter().enumerate() {
        let bytes = if path.is_dir() {
            host::size_below(path)
        } else {
            path.metadata().map_or(0, |about| about.len())
        };
        let is_too_much =
            place > 0 && (place >= QUARANTINED_MAX || kept.saturating_add(bytes) > retention.bytes);
        if !is_too_much && *at >= oldest {
            kept += bytes;
            continue;
        }
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        let why = if is_too_much { "above the limits" } else { "too old" };
        match removed {
            Ok(()) => {
                tracing::warn!(path = %path.display(), bytes, why, "deleted damaged files that were kept for inspection");
            }
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "failed to delete damaged files");
            }
        }
    }
}

/// Copies a directory recursively.
pub(super) fn copy_directory(from: &Path, to: &Path) -> Result<(), StoreError> {
    private::make_private_folder(to).map_err(StoreError::io("create", to))?;
    for entry in fs::read_dir(from).map_err(StoreError::io("read", from))? {
        let entry = entry.map_err(StoreError::io("read", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy_directory(&source, &target)?;
        } else {
            let copied = host::open_regular(&source, File::options().read(true))
                .and_then(|mut source| io::copy(&mut source, &mut File::create_new(&target)?));
            copied.map_err(StoreError::io("copy", &source))?;
        }
    }
    Ok(())
}

/// Removes a directory, if it exists.
pub(super) fn remove(dir: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StoreError::io("delete", dir)(error))
        }
        _ => Ok(()),
    }
}

/// Makes a file's data durable.
pub(super) fn sync_data(file: &File) -> io::Result<()> {
    note("sync");
    file.sync_data()
}

/// Makes the names in a directory durable.
pub(super) fn sync_directory(dir: &Path) -> Result<(), StoreError> {
    note("sync directory");
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(StoreError::io("sync", dir))
}

/// Tests record the steps whose order matters (`testing.rs`).
#[cfg(not(test))]
#[inline]
pub(super) fn note(_step: &'static str) {}

/// Tests record the steps of another thread as their own.
#[cfg(not(test))]
pub(super) fn with_my_steps<T>(run: impl FnOnce() -> T + Send) -> impl FnOnce() -> T + Send {
    run
}
