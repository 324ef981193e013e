//! The reader of the checkpoint that the parts of the running daemon share.
//!
//! It parses each version of the file once, and records since when the file cannot be read.

use super::{CheckpointError, open, parse, read_kept, read_others};
use crate::domain::{Checkpoint, CheckpointGrant, Timestamp};
use crate::host;
use serde::{Deserialize, Serialize};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Two writes in one tick of the kernel's clock leave the same times. After a longer time without a
/// write the times identify the version.
const TICK: Duration = Duration::from_millis(100);

/// An unreadable checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointUnread {
    /// Since when.
    pub since: Timestamp,
    /// Whether it is missing. On a node where no device was ever allocated, that is normal.
    pub missing: bool,
    /// The reason, with the path.
    pub why: String,
}

type Found = Result<Arc<Checkpoint>, Arc<CheckpointError>>;

/// Reads the checkpoint. Cheap to clone; the clones share their state.
#[derive(Debug, Clone)]
pub struct CheckpointReader {
    device_plugins: Arc<Path>,
    /// The last result, with the version of the file.
    parsed: Arc<Mutex<Option<(Version, Found)>>>,
    unread: Arc<Mutex<Option<CheckpointUnread>>>,
}

/// Identifies a version of the file. The kubelet replaces the file, and the file system may reuse
/// an inode.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    /// `None` if the next version could have the same times.
    fn of(metadata: &Metadata, now: Timestamp) -> Option<Self> {
        let changed = Duration::new(
            metadata.ctime().try_into().ok()?,
            metadata.ctime_nsec().try_into().ok()?,
        );
        let version = Version {
            inode: (metadata.dev(), metadata.ino()),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        };
        (Duration::from_millis(now.0) > changed + TICK).then_some(version)
    }
}

impl CheckpointReader {
    /// A reader of the checkpoint in this device-plugin directory.
    #[must_use]
    pub fn new(device_plugins: PathBuf) -> Self {
        CheckpointReader {
            device_plugins: device_plugins.into(),
            parsed: Arc::default(),
            unread: Arc::default(),
        }
    }

    /// The current checkpoint; `None` if it is missing or cannot be read. Parsing a large one is
    /// slow.
    #[must_use]
    pub fn read(&self) -> Option<Arc<Checkpoint>> {
        let found = self.find(host::now().wall);
        self.note(&found);
        found.ok()
    }

    /// Every answer of ours in the checkpoint.
    ///
    /// # Errors
    /// When it is missing, unreadable or malformed.
    pub fn read_kept(&self) -> Result<Vec<CheckpointGrant>, CheckpointError> {
        read_kept(&self.device_plugins)
    }

    /// Every answer of another plugin in the checkpoint.
    ///
    /// # Errors
    /// As [`CheckpointReader::read_kept`].
    pub fn read_others(&self) -> Result<Vec<CheckpointGrant>, CheckpointError> {
        read_others(&self.device_plugins)
    }

    /// Since when it cannot be read, and why; `None` after a successful read, and before the first
    /// one.
    #[must_use]
    pub fn unread(&self) -> Option<CheckpointUnread> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn find(&self, now: Timestamp) -> Found {
        // One caller parses; the others wait for its result.
        let mut parsed = self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = open(&self.device_plugins)?;
        let version = Version::of(&opened.metadata, now);
        if let (Some(version), Some((known, found))) = (&version, &*parsed)
            && version == known
        {
            return found.clone();
        }
        // Frees the former result before the next one is built.
        *parsed = None;
        let written_at = opened.written_at();
        let found = match opened.read() {
            Ok(bytes) => parse(&bytes, written_at).map(Arc::new).map_err(Arc::new),
            // The next try may succeed, so this result is not kept.
            Err(error @ CheckpointError::Io { .. }) => return Err(error.into()),
            Err(error) => Err(error.into()),
        };
        *parsed = version.map(|version| (version, found.clone()));
        found
    }

    /// Logs the first failure and the first success after it.
    fn note(&self, found: &Found) {
        let mut unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner);
        let Err(error) = found else {
            if unread.take_if(|unread| !unread.missing).is_some() {
                tracing::info!("the kubelet's checkpoint can be read again");
            }
            *unread = None;
            return;
        };
        let (missing, why) = (error.is_missing(), error.to_string());
        let since = match &*unread {
            Some(before) if before.missing == missing => before.since,
            _ if missing => host::now().wall,
            _ => {
                tracing::warn!(%error, "cannot read the kubelet's checkpoint; new grants are not bound to their \
                     pods");
                host::now().wall
            }
        };
        *unread = Some(CheckpointUnread { since, missing, why });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BYTES_MAX, FILE_NAME};
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    const NULL: &str = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;

    #[test]
    fn an_unreadable_checkpoint_is_reported_until_it_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let put = |what: &str| match what {
            "missing" => {}
            "directory" => fs::create_dir(&path).unwrap(),
            "pipe" => {
                nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600))
                    .unwrap();
            }
            "device" => symlink("/dev/zero", &path).unwrap(),
            "loop" => symlink(&path, &path).unwrap(),
            "large" => File::create(&path).unwrap().set_len(BYTES_MAX + 1).unwrap(),
            text => fs::write(&path, text).unwrap(),
        };
        let secret = r#"{"Data":"hunter2-of-a-container"}"#;
        let reader = CheckpointReader::new(dir.path().to_owned());
        assert_eq!(reader.unread(), None, "before the first try");
        for what in [
            "missing",
            "directory",
            "pipe",
            "device",
            "loop",
            "large",
            "",
            "\u{0}\u{1}",
            &NULL[..40],
            "[]",
            secret,
        ] {
            put(what);
            assert_eq!(reader.read(), None, "{what}");
            let unread = reader.unread().unwrap();
            assert_eq!(unread.missing, what == "missing", "{what}: {unread:?}");
            assert!(!unread.why.contains("hunter2"), "{unread:?}");
            assert_eq!(reader.read(), None, "{what}");
            assert_eq!(reader.unread(), Some(unread), "{what}: the time is that of the first try");
            if path.is_dir() {
                fs::remove_dir(&path).unwrap();
            } else {
                drop(fs::remove_file(&path));
            }
        }
        fs::write(&path, NULL).unwrap();
        assert!(reader.read().is_some());
        assert_eq!(reader.unread(), None);
    }

    #[test]
    fn a_version_is_parsed_once_and_the_next_one_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let put = |text: &str| fs::write(&path, text).unwrap();
        let (young, old) = (host::now().wall, Timestamp(host::now().wall.0 + 3_600_000));
        let reader = CheckpointReader::new(dir.path().to_owned());
        let is_same = |one: &Found, other: &Found| match (one, other) {
            (Ok(one), Ok(other)) => Arc::ptr_eq(one, other),
            (Err(one), Err(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        put(NULL);
        assert!(
            !is_same(&reader.find(young), &reader.find(young)),
            "the next one could have the same times"
        );
        let first = reader.find(old);
        assert!(first.is_ok() && is_same(&first, &reader.find(old)));
        // As the kubelet does it, with the same size.
        fs::write(path.with_extension("tmp"), NULL.replace('1', "2")).unwrap();
        fs::rename(path.with_extension("tmp"), &path).unwrap();
        let second = reader.find(old);
        assert!(second.is_ok() && !is_same(&first, &second) && is_same(&second, &reader.find(old)));
        put("[");
        let broken = reader.find(old);
        assert!(
            broken.is_err() && is_same(&broken, &reader.find(old)),
            "an invalid checkpoint is not parsed again either"
        );
        put(NULL);
        assert!(reader.find(old).is_ok());
    }
}
