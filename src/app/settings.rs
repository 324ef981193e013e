//! The settings that a daemon is started with.

use crate::config::{Config, Roots};
use crate::health::LEAVE_AFTER;
use crate::{host, store};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The daemon's settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The root directories.
    pub roots: Roots,
    /// The validated configuration.
    pub config: Config,
    /// How long a device that is free and no longer found stays in the list, unhealthy.
    pub leave_after: Duration,
}

impl Settings {
    /// The settings of a real daemon.
    #[must_use]
    pub fn new(roots: Roots, config: Config) -> Self {
        Settings { roots, config, leave_after: LEAVE_AFTER }
    }

    /// Removes other users' access to the ledger, which contains environments, and their write
    /// access to our sockets' directory. A directory that was made by hand has the umask's access.
    pub(super) fn close_folders(&self) {
        let Roots { state, run, .. } = &self.roots;
        match store::keep_private(state) {
            Ok(0) => {}
            Ok(changed) => {
                tracing::warn!(changed, state_dir = %state.display(), "the state directory was accessible to other users; its access is now \
                     restricted to root");
            }
            Err(error) => {
                tracing::warn!(%error, state_dir = %state.display(), "cannot restrict access to the state directory");
            }
        }
        match host::private::keep_others_from_writing(run) {
            Ok(true) => {
                tracing::warn!(run_dir = %run.display(), "the run directory was writable by other users; their write access is now \
                     removed");
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, run_dir = %run.display(), "cannot restrict access to the run directory");
            }
            Ok(false) | Err(_) => {}
        }
    }

    /// Without the client of the API server there are no labels to wait for.
    #[cfg(not(feature = "cluster"))]
    pub async fn wait_for_labels(&mut self) {}

    /// `<kubelet-dir>/device-plugins`.
    pub(super) fn device_plugins(&self) -> PathBuf {
        self.roots.kubelet.join("device-plugins")
    }

    pub(super) fn pod_resources(&self) -> PathBuf {
        self.config.pod_resources(&self.roots.kubelet)
    }

    pub(super) fn kubelet_root(&self) -> PathBuf {
        self.config.kubelet_root(&self.roots.kubelet)
    }
}
