//! Where things lie below the state directory, who may write there, and where damaged things go.

use super::StoreError;
use crate::domain::Timestamp;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(super) fn journal_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("journal")
}

pub(super) fn database_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("db")
}

pub(super) fn lock(state_dir: &Path) -> Result<File, StoreError> {
    let path = state_dir.join("lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(StoreError::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: state_dir.to_owned() }),
        Err(TryLockError::Error(error)) => Err(StoreError::io("lock", &path)(error)),
    }
}

/// Renames what is damaged, and says to what.
pub(super) fn quarantine(path: &Path) -> Result<PathBuf, StoreError> {
    let millis = Timestamp::from_system(SystemTime::now()).0;
    // Two in one millisecond: the next number is as good.
    let free = (millis..).map(|millis| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".quarantine-{millis}"));
        PathBuf::from(name)
    });
    let target = free.into_iter().find(|target| !target.exists()).unwrap_or_else(|| path.with_extension("quarantine"));
    fs::rename(path, &target).map_err(StoreError::io("rename", path))?;
    Ok(target)
}

/// Makes a file's data durable, and lets a test see that it was done and when.
pub(super) fn sync_data(file: &File) -> io::Result<()> {
    note("sync");
    file.sync_data()
}

/// Makes the names in a directory durable.
pub(super) fn sync_directory(dir: &Path) -> Result<(), StoreError> {
    note("sync directory");
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(StoreError::io("sync", dir))
}

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::RefCell<Vec<&'static str>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Notes a step whose place among the others is a promise. Outside tests it is nothing.
#[inline]
pub(super) fn note(step: &'static str) {
    #[cfg(test)]
    STEPS.with_borrow_mut(|steps| steps.push(step));
    #[cfg(not(test))]
    let _ = step;
}

/// The steps of this thread since the last call.
#[cfg(test)]
pub(super) fn take_steps() -> Vec<&'static str> {
    STEPS.take()
}
