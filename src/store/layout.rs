//! Where things lie below the state directory, who may write there, and where damaged things go.

use super::StoreError;
use crate::domain::Timestamp;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(super) fn journal_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("journal")
}

pub(super) fn database_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("db")
}

/// `<state-dir>/lock`: locked by the one writer, and it tells during which boot of the machine the last one came.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    path: PathBuf,
    last_boot: String,
}

impl Lock {
    pub(super) fn take(state_dir: &Path) -> Result<Self, StoreError> {
        let path = state_dir.join("lock");
        let mut options = File::options();
        let mut file = options.create(true).truncate(false).read(true).write(true).open(&path).map_err(StoreError::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path: state_dir.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", &path)(error)),
        }
        // What cannot be read is no boot that this could be.
        let mut last_boot = String::new();
        if file.read_to_string(&mut last_boot).is_err() {
            last_boot.clear();
        }
        Ok(Lock { file, path, last_boot })
    }

    /// Whether the last writer ran in this boot: then everything that it wrote is there, synced or not.
    pub(super) fn is_of_boot(&self, boot_id: Option<&str>) -> bool {
        boot_id.is_some_and(|boot_id| boot_id == self.last_boot)
    }

    /// Notes the boot. No sync: after a power cut any boot that is told here is another one.
    pub(super) fn note_boot(&mut self, boot_id: Option<&str>) -> Result<(), StoreError> {
        let boot_id = boot_id.unwrap_or_default();
        if boot_id == self.last_boot {
            return Ok(());
        }
        let written = self.file.set_len(0).and_then(|()| self.file.rewind()).and_then(|()| self.file.write_all(boot_id.as_bytes()));
        written.map_err(StoreError::io("write", &self.path))?;
        boot_id.clone_into(&mut self.last_boot);
        Ok(())
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
type Steps = std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>;

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::RefCell<Steps> = std::cell::RefCell::default();
}

/// Runs something on another thread whose steps are this one's.
#[cfg(test)]
pub(super) fn with_my_steps<T>(run: impl FnOnce() -> T + Send) -> impl FnOnce() -> T + Send {
    let steps = STEPS.with_borrow(Clone::clone);
    move || {
        STEPS.set(steps);
        run()
    }
}

/// Outside tests nobody counts steps.
#[cfg(not(test))]
pub(super) fn with_my_steps<T>(run: impl FnOnce() -> T + Send) -> impl FnOnce() -> T + Send {
    run
}

/// Notes a step whose place among the others is a promise. Outside tests it is nothing.
#[inline]
pub(super) fn note(step: &'static str) {
    #[cfg(test)]
    STEPS.with_borrow(|steps| steps.lock().unwrap().push(step));
    #[cfg(not(test))]
    let _ = step;
}

/// The steps of this thread and of those that run for it, since the last call.
#[cfg(test)]
pub(super) fn take_steps() -> Vec<&'static str> {
    STEPS.with_borrow(|steps| std::mem::take(&mut *steps.lock().unwrap()))
}
