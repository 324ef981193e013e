//! The features of NVIDIA's driver that containers get by default.

use crate::domain::{Inventory, NvidiaFeature, NvidiaFeatures};
use crate::hardware;
use crate::host::HostRoot;

/// The folder of RDMA devices in a container.
const RDMA: &str = "/dev/infiniband/";

/// The features that containers get where the configuration leaves it to the node. RDMA devices
/// that this daemon offers are for the containers that request them.
pub(super) fn by_node(root: &HostRoot, inventory: &Inventory) -> NvidiaFeatures {
    let mut features = hardware::nvidia_features(root);
    let offers_rdma = || {
        let devices = inventory.resources.values().flat_map(|offering| offering.devices.values());
        let mut nodes = devices.flat_map(|offered| &offered.device.nodes);
        nodes.any(|node| node.container.starts_with(RDMA))
    };
    if features.contains(&NvidiaFeature::Mofed) && offers_rdma() {
        features.remove(&NvidiaFeature::Mofed);
    }
    features
}
