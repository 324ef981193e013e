//! Where things lie below the state directory, who may write there, and where damaged things go.

use super::StoreError;
use crate::domain::Timestamp;
use std::fs::{self, File, TryLockError};
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
