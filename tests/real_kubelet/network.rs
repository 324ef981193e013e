//! A network of pods: an address and a pair of interfaces for each, which go with the namespace of the pod.

use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// Addresses that belong to nobody: they are for measuring between networks.
const SUBNET: &str = "198.18.0.0/24";

/// The plugins that the network is made of; containerd itself wants the last one.
const PLUGINS: [&str; 3] = ["ptp", "host-local", "loopback"];

/// Where the plugins lie: `CNI_PATH`, else where Debian or everybody else has them.
pub(crate) fn plugins() -> Option<PathBuf> {
    let named = std::env::var_os("CNI_PATH").map(PathBuf::from);
    let folders = named
        .map_or_else(|| vec!["/usr/lib/cni".into(), "/opt/cni/bin".into()], |folder| vec![folder]);
    folders.into_iter().find(|folder| PLUGINS.iter().all(|plugin| folder.join(plugin).is_file()))
}

/// Has containerd find the network.
pub(crate) fn write(dir: &Path) {
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": SUBNET}]], "dataDir": dir.join("addresses")});
    let network =
        json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]});
    fs::create_dir_all(dir.join("cni")).unwrap();
    fs::write(dir.join("cni/pods.conflist"), network.to_string()).unwrap();
}
