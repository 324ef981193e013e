//! Reports changes of the kubelet's sockets and of the files in its device-plugin directory, by
//! inotify.

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// A watch of the two directories with sockets of the kubelet.
#[derive(Debug)]
pub(crate) struct Directory {
    inotify: Inotify,
    pod_resources: WatchDescriptor,
}

impl Directory {
    pub(crate) fn watch(kubelet_dir: &Path) -> Self {
        let inotify = Inotify::init().unwrap();
        let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVED_TO;
        inotify.watches().add(kubelet_dir.join("device-plugins"), mask).unwrap();
        let pod_resources = inotify.watches().add(kubelet_dir.join("pod-resources"), mask).unwrap();
        Directory { inotify, pod_resources }
    }

    /// Becomes readable with the next event.
    pub(crate) fn readable(&self) -> OwnedFd {
        self.inotify.as_fd().try_clone_to_owned().unwrap()
    }

    /// The name of each file and its last change, as far as it is known now. Names that begin with
    /// a dot belong to plugins: temporary files, and their sockets.
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
                if event.wd != self.pod_resources && !name.starts_with('.') {
                    found.push((name, what));
                } else if event.wd == self.pod_resources && name == "kubelet.sock" {
                    found.push((format!("pod-resources/{name}"), what));
                }
            }
        }
    }
}
