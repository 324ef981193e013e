//! Watches directories that may not exist yet.
//!
//! inotify follows inodes, not paths: a directory that is removed and created again is another one,
//! and a missing directory cannot be watched. So each wanted directory is watched if it exists,
//! otherwise its nearest existing ancestor. Any change there leads to another attempt, and the
//! caller is notified to read again.
use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use tokio_stream::StreamExt;

/// A change in a watched directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// An entry was created, moved in, moved out or removed.
    Entry {
        /// The wanted directory.
        dir: PathBuf,
        /// The entry's name.
        name: String,
    },
    /// Anything may have changed: a wanted directory appeared or disappeared, or the kernel dropped
    /// events.
    Anything,
}

/// A set of watched directories. One inotify instance: their number per user is small (128).
#[derive(Debug)]
pub struct DirWatch {
    events: inotify::EventStream<[u8; 4096]>,
    watches: inotify::Watches,
    wanted: BTreeSet<PathBuf>,
    watched: BTreeMap<PathBuf, WatchDescriptor>,
    /// Directories that the kernel refuses to watch.
    refused: BTreeSet<PathBuf>,
}

impl DirWatch {
    /// Watches `dirs`, those that exist now and those that appear later.
    ///
    /// # Errors
    /// If the kernel refuses an inotify instance (`fs.inotify.max_user_instances`).
    pub fn new(dirs: impl IntoIterator<Item = PathBuf>) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let watches = inotify.watches();
        let events = inotify.into_event_stream([0; 4096])?;
        let mut this = DirWatch {
            events,
            watches,
            wanted: dirs.into_iter().collect(),
            watched: BTreeMap::new(),
            refused: BTreeSet::new(),
        };
        this.rearm();
        Ok(this)
    }

    /// Replaces the wanted directories.
    pub fn want(&mut self, dirs: impl IntoIterator<Item = PathBuf>) {
        self.wanted = dirs.into_iter().collect();
        self.rearm();
    }

    /// Whether all directories are watched; the caller must poll those that are not.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.refused.is_empty()
    }

    /// Tries again to watch the wanted directories; cheap if nothing changed. Call it on the slow
    /// poll too.
    pub fn rearm(&mut self) {
        // A directory may be created after it was found missing and before its ancestor is watched,
        // so repeat until nothing changes. Each round adds a step of the path, so there are few.
        let mut targets = self.targets();
        loop {
            self.watch(&targets);
            let now = self.targets();
            if now == targets {
                return;
            }
            targets = now;
        }
    }

    /// The directories that can be watched now: each wanted directory, or its nearest existing
    /// ancestor. For a relative path this may be the empty path, which means the current directory.
    fn targets(&self) -> BTreeSet<PathBuf> {
        let nearest = |dir: &PathBuf| {
            dir.ancestors()
                .find(|path| path.is_dir() || path.as_os_str().is_empty())
                .map(Path::to_path_buf)
        };
        self.wanted.iter().filter_map(nearest).collect()
    }

    fn watch(&mut self, targets: &BTreeSet<PathBuf>) {
        let stale: Vec<PathBuf> =
            self.watched.keys().filter(|path| !targets.contains(*path)).cloned().collect();
        for path in stale {
            if let Some(watch) = self.watched.remove(&path) {
                // An error means that the directory was removed, and the watch with it.
                drop(self.watches.remove(watch));
            }
        }
        let mask = WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        self.refused.retain(|path| targets.contains(path));
        for path in targets {
            // Adding a watch for an inode that has one returns the same descriptor. So this also
            // repairs a path that now leads to another inode.
            let place = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            match self.watches.add(place, mask) {
                Ok(watch) => {
                    self.watched.insert(path.clone(), watch);
                    self.refused.remove(path);
                }
                // Logged once: each rearm tries again.
                Err(error) => {
                    if self.refused.insert(path.clone()) {
                        let path = path.display();
                        tracing::warn!(%path, %error, "cannot watch directory (see fs.inotify.max_user_watches); falling back to polling");
                    }
                }
            }
        }
    }

    /// Waits for the next change.
    ///
    /// # Errors
    /// If inotify itself fails.
    pub async fn next(&mut self) -> io::Result<Change> {
        loop {
            let event = match self.events.next().await {
                Some(event) => event?,
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            };
            if event
                .mask
                .intersects(EventMask::Q_OVERFLOW | EventMask::DELETE_SELF | EventMask::MOVE_SELF)
            {
                self.watched.retain(|_, watch| *watch != event.wd);
                self.rearm();
                return Ok(Change::Anything);
            }
            let Some(dir) = self
                .watched
                .iter()
                .find(|(_, watch)| **watch == event.wd)
                .map(|(dir, _)| dir.clone())
            else {
                continue;
            };
            let name = event.name.map(|name| name.to_string_lossy().into_owned());
            // A step on the way to a wanted directory appeared or disappeared.
            let path = name.as_ref().map(|name| dir.join(name));
            if path.is_some_and(|path| self.wanted.iter().any(|wanted| wanted.starts_with(&path))) {
                self.rearm();
                return Ok(Change::Anything);
            }
            if let Some(name) = name.filter(|_| self.wanted.contains(&dir)) {
                return Ok(Change::Entry { dir, name });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    async fn wait_for(watch: &mut DirWatch, wanted: &Change) {
        let search = async { while watch.next().await.unwrap() != *wanted {} };
        tokio::time::timeout(Duration::from_secs(10), search).await.expect("the change is seen");
    }

    #[tokio::test]
    async fn events_that_the_kernel_drops_are_a_change_of_anything() {
        let root = tempfile::tempdir().unwrap();
        let mut watch = DirWatch::new([root.path().to_owned()]).unwrap();
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        // Each round is two events.
        for _ in 0..=limit.trim().parse::<u32>().unwrap() / 2 {
            let file = root.path().join("file");
            std::fs::write(&file, "").unwrap();
            std::fs::remove_file(file).unwrap();
        }
        wait_for(&mut watch, &Change::Anything).await;
    }

    #[tokio::test]
    async fn a_directory_that_is_removed_and_created_again_is_watched() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("kubelet/device-plugins");
        let mut watch = DirWatch::new([dir.clone()]).unwrap();
        for round in 0..3 {
            std::fs::create_dir_all(&dir).unwrap();
            wait_for(&mut watch, &Change::Anything).await;
            watch.rearm();
            let name = format!("kubelet{round}.sock");
            std::fs::write(dir.join(&name), "").unwrap();
            wait_for(&mut watch, &Change::Entry { dir: dir.clone(), name }).await;
            std::fs::remove_dir_all(root.path().join("kubelet")).unwrap();
        }
    }

    #[tokio::test]
    async fn an_absent_relative_directory_is_awaited() {
        let watch = DirWatch::new([PathBuf::from("never-made/device-plugins")]).unwrap();
        assert!(watch.watched.contains_key(Path::new("")), "{:?}", watch.watched.keys());
    }

    #[tokio::test]
    async fn changes_next_to_the_path_are_not_reported() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("plugins");
        let mut watch = DirWatch::new([dir.clone()]).unwrap();
        std::fs::write(root.path().join("noise"), "").unwrap();
        std::fs::create_dir(&dir).unwrap();
        assert_eq!(watch.next().await.unwrap(), Change::Anything);
    }
}
