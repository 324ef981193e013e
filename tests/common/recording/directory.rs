//! Reports changes of the kubelet's files by inotify.

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// A folder below the kubelet's directory, and the files in it that are reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folder {
    /// Relative to the kubelet's directory; empty for this directory itself.
    pub(crate) path: &'static str,
    /// The prefix of the names in the recording.
    pub(crate) prefix: &'static str,
    /// The only file that is reported. Without one, every file that does not begin with a dot:
    /// those belong to plugins, or are temporary.
    pub(crate) only: Option<&'static str>,
}

/// A watch of folders of the kubelet.
#[derive(Debug)]
pub(crate) struct Directory {
    inotify: Inotify,
    folders: Vec<(WatchDescriptor, Folder)>,
}

impl Directory {
    pub(crate) fn watch(kubelet_dir: &Path, folders: &[Folder]) -> Self {
        let inotify = Inotify::init().unwrap();
        let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVED_TO;
        let watch = |folder: &Folder| {
            let path = kubelet_dir.join(folder.path);
            (inotify.watches().add(path, mask).unwrap(), *folder)
        };
        let folders = folders.iter().map(watch).collect();
        Directory { inotify, folders }
    }

    /// Becomes readable with the next event.
    pub(crate) fn readable(&self) -> OwnedFd {
        self.inotify.as_fd().try_clone_to_owned().unwrap()
    }

    /// The name of each reported file and its change, as far as it is known now.
    pub(crate) fn events(&mut self) -> Vec<(String, &'static str)> {
        let (mut found, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            let events = match self.inotify.read_events(&mut buffer) {
                Ok(events) => events,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return found,
                Err(error) => panic!("inotify: {error}"),
            };
            for event in events {
                let name = event.name.unwrap_or_default().to_string_lossy().into_owned();
                let what = match event.mask {
                    EventMask::CREATE => "created",
                    EventMask::DELETE => "deleted",
                    EventMask::MOVED_TO => "replaced",
                    // A sub-directory.
                    _ => continue,
                };
                let folder = self.folders.iter().find(|(watch, _)| *watch == event.wd);
                let Some((_, folder)) = folder else { continue };
                if folder.only.map_or(!name.starts_with('.'), |only| only == name) {
                    found.push((format!("{}{name}", folder.prefix), what));
                }
            }
        }
    }
}
