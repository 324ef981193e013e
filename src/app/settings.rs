//! What a daemon is started with.

use crate::config::{Config, Roots};
use crate::health::LEAVE_AFTER;
use std::path::PathBuf;
use std::time::Duration;

/// What the daemon runs on.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where everything lies.
    pub roots: Roots,
    /// The validated configuration.
    pub config: Config,
    /// How long a device that nobody holds and that is no longer found stays in the list, unhealthy.
    pub leave_after: Duration,
}

impl Settings {
    /// A daemon as it is run.
    #[must_use]
    pub fn new(roots: Roots, config: Config) -> Self {
        Settings { roots, config, leave_after: LEAVE_AFTER }
    }

    /// `<kubelet-dir>/device-plugins`.
    pub(super) fn device_plugins(&self) -> PathBuf {
        self.roots.kubelet.join("device-plugins")
    }

    pub(super) fn pod_resources(&self) -> PathBuf {
        let default = || self.roots.kubelet.join("pod-resources/kubelet.sock");
        self.config.pod_resources_socket.clone().unwrap_or_else(default)
    }
}
