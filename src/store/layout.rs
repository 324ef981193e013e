//! Where things lie below the state directory, who may write there, and where damaged things go.

use super::StoreError;
use super::error::wants_room;
use crate::domain::Timestamp;
use crate::host::{self, private};
use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(super) fn journal_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("journal")
}

/// The journal's directory, where there is one. One that cannot be looked at is no missing one.
pub(super) fn is_there(state_dir: &Path) -> Result<PathBuf, StoreError> {
    let journal = journal_dir(state_dir);
    match journal.try_exists() {
        Ok(true) => Ok(journal),
        Ok(false) => Err(StoreError::NoJournal { path: state_dir.to_owned() }),
        Err(error) => Err(StoreError::io("look at", &journal)(error)),
    }
}

pub(super) fn database_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("db")
}

/// What this daemon makes in its state directory, what a file system does, and what the package looks for (docs/install.md).
fn is_own(name: &str) -> bool {
    ["lock", "journal", "db", "lost+found", "remove-with-package"].contains(&name)
        || name.starts_with("db.")
        || name.contains(".quarantine")
}

/// Takes from others what they may do with the state directory and everything in it: an earlier version left that to the umask, and grants have
/// environments. How many modes were changed.
///
/// # Errors
/// When one cannot be changed.
pub fn keep_private(state_dir: &Path) -> io::Result<usize> {
    private::make_private(state_dir, is_own)
}

/// A folder for a copy of the database, which nobody else reads; it goes with this value.
pub(super) fn scratch() -> Result<tempfile::TempDir, StoreError> {
    let mut folder = tempfile::Builder::new();
    folder.prefix("holdfast-").permissions(Permissions::from_mode(0o700));
    folder.tempdir().map_err(StoreError::io("create", &std::env::temp_dir()))
}

/// `<state-dir>/lock`: locked by the one writer. It tells during which boot of the machine the last one came, or that it
/// closed its journal; and up to which sequence number entries have been confirmed: a journal whose end is cleanly gone
/// looks whole by itself.
///
/// One line: `<sequence number, 20 digits> <crc32 of those, 8 hex digits> <boot id>`, or in place of the boot `closed` and
/// the first number of the segment with which the journal ended.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    path: PathBuf,
    text: String,
    confirmed: u64,
}

/// Bytes in front of the boot id.
const CONFIRMED_BYTES: usize = 30;

fn closed(segment: u64) -> String {
    format!("closed {segment:020}")
}

impl Lock {
    pub(super) fn take(state_dir: &Path) -> Result<Self, StoreError> {
        let path = state_dir.join("lock");
        let opened =
            match host::open_regular(&path, File::options().mode(private::FILE).create(true).truncate(false).read(true).write(true)) {
                // What is there can still be locked and read.
                Err(error) if wants_room(&error) => host::open_regular(&path, File::options().read(true)).map_err(|_| error),
                opened => opened,
            };
        let mut file = opened.map_err(StoreError::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path: state_dir.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", &path)(error)),
        }
        // What cannot be read is no boot that this could be.
        let mut text = String::new();
        if file.read_to_string(&mut text).is_err() {
            text.clear();
        }
        let confirmed = confirmed(&text);
        if confirmed.is_none() {
            text.clear();
        }
        Ok(Lock { file, path, text, confirmed: confirmed.unwrap_or(0) })
    }

    /// Whether the last writer ran in this boot: then everything that it wrote is there, synced or not.
    pub(super) fn is_of_boot(&self, boot_id: Option<&str>) -> bool {
        boot_id.is_some_and(|boot_id| self.text.get(CONFIRMED_BYTES..) == Some(boot_id))
    }

    /// Whether the last writer closed its journal with this segment: then what is confirmed here is everything, whatever the
    /// machine went through since. A later writer has a later segment, as soon as it has confirmed anything.
    pub(super) fn is_closed_with(&self, segment: Option<u64>) -> bool {
        segment.is_some_and(|segment| self.text.get(CONFIRMED_BYTES..) == Some(closed(segment).as_str()))
    }

    /// Every entry up to this number has been confirmed, and perhaps later ones too.
    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// An entry has been confirmed, and all before it.
    pub(super) fn confirm(&mut self, seq: u64) {
        self.confirmed = seq;
    }

    /// Tells the next start what was confirmed. No sync, and no error: what is told here is true whenever it was written.
    pub(super) fn tell(&self) {
        drop(self.file.write_all_at(front(self.confirmed).as_bytes(), 0));
    }

    /// Notes, durably, that nothing comes after what has been confirmed in this segment. No error: where it cannot be noted,
    /// the next boot's first start reads more than it needs.
    pub(super) fn close(&mut self, segment: u64) {
        self.note(front(self.confirmed) + &closed(segment));
        drop(sync_data(&self.file));
    }

    /// Notes the boot. No sync: after a power cut any boot that is told here is another one. No error: where it cannot be
    /// noted, the next start reads more than it needs.
    pub(super) fn note_boot(&mut self, boot_id: Option<&str>) {
        self.note(front(self.confirmed) + boot_id.unwrap_or_default());
    }

    fn note(&mut self, text: String) {
        if text == self.text {
            return;
        }
        // Over what is there, which takes no room on a disk that has none.
        let written = self.file.write_all_at(text.as_bytes(), 0).and_then(|()| self.file.set_len(text.len() as u64));
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "it cannot be noted how far the journal is whole");
        }
        self.text = text;
    }
}

impl Drop for Lock {
    /// At once: a process that is just being started by another thread has a copy of the descriptor until its program runs.
    fn drop(&mut self) {
        drop(self.file.unlock());
    }
}

/// Up to which entry the last writer confirmed, without being one; 0 where that cannot be read.
pub(super) fn peek_confirmed(state_dir: &Path) -> u64 {
    let read = host::read_regular(&state_dir.join("lock")).ok().and_then(|text| String::from_utf8(text).ok());
    read.and_then(|text| confirmed(&text)).unwrap_or(0)
}

/// What was moved aside in a state directory.
pub(super) fn moved_aside(state_dir: &Path) -> Vec<PathBuf> {
    let inside = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let all = inside(state_dir.to_owned()).chain(inside(journal_dir(state_dir)));
    let mut found: Vec<PathBuf> = all.filter(|path| path.to_string_lossy().contains(".quarantine")).collect();
    found.sort();
    found
}

fn front(confirmed: u64) -> String {
    let digits = format!("{confirmed:020}");
    let crc = crc32fast::hash(digits.as_bytes());
    format!("{digits} {crc:08x} ")
}

/// What a lock tells of confirmed entries; `None` if it is damaged, or an earlier version wrote it.
fn confirmed(text: &str) -> Option<u64> {
    let confirmed = text.get(..20)?.parse().ok()?;
    text.starts_with(&front(confirmed)).then_some(confirmed)
}

/// sled writes segments of 128 KiB, a few at a time. What is left after that is the journal's.
pub(super) const ROOM_MIN: u64 = 1024 * 1024;

/// Whether sled may write to `dir`: after an error for want of room it may never answer again. Where nothing is yet, the
/// directory above it tells. A limit of file sizes is a want of room too, since sled has one file.
pub(super) fn has_room(dir: &Path) -> bool {
    let log = || fs::metadata(dir.join("db")).map_or(0, |about| about.len());
    let below_limit = host::file_size_limit().map_or(u64::MAX, |limit| limit.saturating_sub(log()));
    host::free_bytes(dir.parent().unwrap_or(dir)).min(host::free_bytes(dir)).min(below_limit) >= ROOM_MIN
}

/// Where there is none, sled is not begun.
pub(super) fn require_room(dir: &Path) -> Result<(), StoreError> {
    if has_room(dir) { Ok(()) } else { Err(StoreError::io("write", dir)(io::ErrorKind::StorageFull.into())) }
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

/// Puts a copy of a directory in its place, which holds its bytes durably, and moves the directory itself away: to what it
/// returns. For files that somebody has open and does not let go.
pub(super) fn exchange(dir: &Path) -> Result<PathBuf, StoreError> {
    let copy = dir.with_extension("copy");
    remove(&copy)?;
    // A copy that does not fit must not take the last room from the journal first.
    if host::free_bytes(dir) < bytes_below(dir)?.saturating_mul(2) {
        return Err(StoreError::io("copy", dir)(io::ErrorKind::StorageFull.into()));
    }
    if let Err(error) = copy_directory(dir, &copy) {
        // The first error tells more.
        drop(remove(&copy));
        return Err(error);
    }
    let aside = quarantine(dir)?;
    fs::rename(&copy, dir).map_err(StoreError::io("rename", &copy))?;
    sync_directory(dir.parent().unwrap_or(dir))?;
    Ok(aside)
}

/// Where a database is written anew. What is there means nothing.
pub(super) fn fresh_dir(dir: &Path) -> PathBuf {
    dir.with_extension("fresh")
}

/// Where a database is for the moment in which the one that was written anew takes its place.
fn former_dir(dir: &Path) -> PathBuf {
    dir.with_extension("former")
}

/// Puts the database that was written anew in the place of the one in `dir`. Nobody has either open.
pub(super) fn put_fresh_in_place(dir: &Path) -> Result<(), StoreError> {
    let (fresh, former) = (fresh_dir(dir), former_dir(dir));
    remove(&former)?;
    fs::rename(dir, &former).map_err(StoreError::io("rename", dir))?;
    if let Err(error) = fs::rename(&fresh, dir) {
        take_former_back(dir);
        return Err(StoreError::io("rename", &fresh)(error));
    }
    sync_directory(dir.parent().unwrap_or(dir))?;
    remove(&former)
}

/// The database of a state directory for somebody who reads beside its writer, or after it has ended in any way.
pub(super) fn database_to_read(state_dir: &Path) -> PathBuf {
    let dir = database_dir(state_dir);
    let former = former_dir(&dir);
    if !dir.exists() && former.exists() { former } else { dir }
}

/// What a start does first: a process that ended between the two renames has left the former database beside its place.
pub(super) fn take_former_back(dir: &Path) {
    if !dir.exists() && former_dir(dir).exists() {
        // What is not there is made new, and said to be gone.
        drop(fs::rename(former_dir(dir), dir));
    }
}

/// Removes what a process has left that ended while it wrote the database anew.
pub(super) fn clear_up(dir: &Path) -> Result<(), StoreError> {
    remove(&fresh_dir(dir))?;
    if dir.exists() { remove(&former_dir(dir)) } else { Ok(()) }
}

fn bytes_below(dir: &Path) -> Result<u64, StoreError> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).map_err(StoreError::io("read", dir))? {
        let path = entry.map_err(StoreError::io("read", dir))?.path();
        let about = path.metadata().map_err(StoreError::io("read", &path))?;
        bytes += if about.is_dir() { bytes_below(&path)? } else { about.len() };
    }
    Ok(bytes)
}

/// Copies a directory with everything below it, and makes the copy durable.
pub(super) fn copy_directory(from: &Path, to: &Path) -> Result<(), StoreError> {
    private::make_private_folder(to).map_err(StoreError::io("create", to))?;
    for entry in fs::read_dir(from).map_err(StoreError::io("read", from))? {
        let entry = entry.map_err(StoreError::io("read", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy_directory(&source, &target)?;
        } else {
            copy_file(&source, &target).map_err(StoreError::io("copy", &source))?;
        }
    }
    sync_directory(to)
}

fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = host::open_regular(from, File::options().read(true))?;
    let mut target = File::create_new(to)?;
    io::copy(&mut source, &mut target)?;
    target.sync_all()
}

/// Removes a directory, if it is there.
pub(super) fn remove(dir: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("delete", dir)(error)),
        _ => Ok(()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_let_go_although_a_child_that_is_being_started_has_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        assert!(matches!(Lock::take(dir.path()), Err(StoreError::InUse { .. })));
        let inherited = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(Lock::take(dir.path()).is_ok());
        drop(inherited);
    }
}
