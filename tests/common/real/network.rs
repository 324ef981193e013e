//! A network of pods: each has an address and a pair of interfaces, which end with its namespace.

use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// Addresses that no network uses: they are reserved for measurements between networks.
const SUBNET: &str = "198.18.0.0/24";

/// The CNI plugins of the network; containerd itself needs the last one.
const PLUGINS: [&str; 3] = ["ptp", "host-local", "loopback"];

/// The folder of the plugins: `CNI_PATH`, otherwise the one of Debian or the usual one.
pub(crate) fn plugins() -> Option<PathBuf> {
    let named = std::env::var_os("CNI_PATH").map(PathBuf::from);
    let folders = named
        .map_or_else(|| vec!["/usr/lib/cni".into(), "/opt/cni/bin".into()], |folder| vec![folder]);
    folders.into_iter().find(|folder| PLUGINS.iter().all(|plugin| folder.join(plugin).is_file()))
}

/// Configures containerd for the network.
pub(crate) fn write(dir: &Path) {
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": SUBNET}]], "dataDir": dir.join("addresses")});
    let network =
        json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]});
    fs::create_dir_all(dir.join("cni")).unwrap();
    fs::write(dir.join("cni/pods.conflist"), network.to_string()).unwrap();
}
