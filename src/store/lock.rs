//! `<state-dir>/lock`: the lock of the one writer, with the last entry that it confirmed.

use super::StoreError;
use super::error::is_out_of_space;
use super::layout::sync_data;
use crate::host::{self, private};
use std::fs::{File, TryLockError};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The lock file, locked by the one writer.
///
/// It has one line: `<last confirmed entry, 20 digits> <crc32 of those, 8 hex digits> <boot id>`.
/// After a clean stop `closed <first entry of the newest segment>` replaces the boot id. A journal
/// that was cut between two records shows no damage; the number shows that its end is missing.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    path: PathBuf,
    text: String,
    confirmed: u64,
}

/// The bytes before the boot id.
const CONFIRMED_BYTES: usize = 30;

/// How long to wait for the lock. Unit tests share a process: a program that one of them starts has
/// a copy of each open file, and with it the lock of another test, until it runs.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 10 } else { 0 });

fn closed(segment: u64) -> String {
    format!("closed {segment:020}")
}

impl Lock {
    pub(super) fn take(state_dir: &Path) -> Result<Self, StoreError> {
        let path = state_dir.join("lock");
        let opened = match host::open_regular(
            &path,
            File::options().mode(private::FILE).create(true).truncate(false).read(true).write(true),
        ) {
            // An existing file can still be locked and read.
            Err(error) if is_out_of_space(&error) => {
                host::open_regular(&path, File::options().read(true)).map_err(|_| error)
            }
            opened => opened,
        };
        let mut file = opened.map_err(StoreError::io("create", &path))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if began.elapsed() < PATIENCE => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(StoreError::InUse { path: state_dir.to_owned() });
                }
                Err(TryLockError::Error(error)) => {
                    return Err(StoreError::io("lock", &path)(error));
                }
            }
        }
        // An unreadable line matches no boot.
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

    /// Whether the last writer ran in this boot. Everything that it wrote is then there, synced or
    /// not.
    pub(super) fn is_of_boot(&self, boot_id: Option<&str>) -> bool {
        boot_id.is_some_and(|boot_id| self.text.get(CONFIRMED_BYTES..) == Some(boot_id))
    }

    /// Whether the last writer closed its journal with this segment. Then no entry follows the last
    /// confirmed one, in any boot.
    pub(super) fn is_closed_with(&self, segment: Option<u64>) -> bool {
        segment.is_some_and(|segment| {
            self.text.get(CONFIRMED_BYTES..) == Some(closed(segment).as_str())
        })
    }

    /// Entries up to this number were confirmed, and perhaps later ones.
    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Records that entries up to this one are confirmed.
    pub(super) fn confirm(&mut self, seq: u64) {
        self.confirmed = seq;
    }

    /// Writes the last confirmed entry for the next start. Without a sync, and without an error: an
    /// older number is correct too.
    pub(super) fn write_confirmed(&self) {
        drop(self.file.write_all_at(front(self.confirmed).as_bytes(), 0));
    }

    /// Records durably that this segment is complete. Without an error: the next start only reads
    /// more.
    pub(super) fn close(&mut self, segment: u64) {
        self.note(front(self.confirmed) + &closed(segment));
        drop(sync_data(&self.file));
    }

    /// Records the boot. Without a sync: after a power cut any boot in this file is another one.
    pub(super) fn note_boot(&mut self, boot_id: Option<&str>) {
        self.note(front(self.confirmed) + boot_id.unwrap_or_default());
    }

    fn note(&mut self, text: String) {
        if text == self.text {
            return;
        }
        // A write in place needs no free space.
        let written = self
            .file
            .write_all_at(text.as_bytes(), 0)
            .and_then(|()| self.file.set_len(text.len() as u64));
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "failed to write the last confirmed entry");
        }
        self.text = text;
    }
}

impl Drop for Lock {
    /// Explicit, since a child process that is being started has a copy of the descriptor.
    fn drop(&mut self) {
        drop(self.file.unlock());
    }
}

/// The last confirmed entry, for a reader without the lock; 0 if unknown.
pub(super) fn read_confirmed(state_dir: &Path) -> u64 {
    let read = host::read_regular(&state_dir.join("lock"))
        .ok()
        .and_then(|text| String::from_utf8(text).ok());
    read.and_then(|text| confirmed(&text)).unwrap_or(0)
}

fn front(confirmed: u64) -> String {
    let digits = format!("{confirmed:020}");
    let crc = crc32fast::hash(digits.as_bytes());
    format!("{digits} {crc:08x} ")
}

/// The number in a lock file; `None` if the file is damaged.
fn confirmed(text: &str) -> Option<u64> {
    let confirmed = text.get(..20)?.parse().ok()?;
    text.starts_with(&front(confirmed)).then_some(confirmed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_released_although_a_child_process_has_a_copy_of_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        assert!(matches!(Lock::take(dir.path()), Err(StoreError::InUse { .. })));
        let inherited = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(Lock::take(dir.path()).is_ok());
        drop(inherited);
    }
}
