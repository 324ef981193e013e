//! Device nodes in the answers of contracts.

use crate::domain::{ContainerEdits, Device, EditDevice, EditMount};

/// The nodes of `devices`, each container path once: every device has the shared nodes (`/dev/kfd`,
/// `rdma_cm`).
pub(super) fn of(devices: &[&Device]) -> Vec<EditDevice> {
    let mut nodes: Vec<EditDevice> = Vec::new();
    for node in devices.iter().flat_map(|device| &device.nodes) {
        if !nodes.iter().any(|known| known.container == node.container) {
            nodes.push(EditDevice {
                host: node.host.clone(),
                container: node.container.clone(),
                permissions: node.permissions.clone(),
            });
        }
    }
    nodes
}

/// The same, with these permissions.
pub(super) fn with(devices: &[&Device], permissions: &str) -> Vec<EditDevice> {
    of(devices)
        .into_iter()
        .map(|node| EditDevice { permissions: permissions.to_owned(), ..node })
        .collect()
}

/// Names nodes by links that stay right over a reboot, because the kubelet replays the answer then.
pub(super) fn use_lasting_paths(devices: &[&Device], edits: &mut ContainerEdits) {
    let nodes = devices.iter().flat_map(|device| &device.nodes);
    // A pool has thousands of nodes, and few of them have a link.
    for node in nodes.filter(|node| node.link.is_some()) {
        for edit in edits.devices.iter_mut().filter(|edit| edit.host == node.host) {
            node.lasting_path().clone_into(&mut edit.host);
        }
    }
}

/// A node at the same path in the container.
pub(super) fn at(path: impl Into<String>, permissions: &str) -> EditDevice {
    let host = path.into();
    EditDevice { container: host.clone(), host, permissions: permissions.to_owned() }
}

/// A mount at the same path in the container.
pub(super) fn mount(path: impl Into<String>, read_only: bool) -> EditMount {
    let host = path.into();
    EditMount { container: host.clone(), host, read_only }
}

/// The kinds of RDMA nodes, in the order of Mellanox' rdmamap for one adapter; both plugins for
/// RDMA use it.
pub(super) const RDMA_KINDS: [&str; 5] = ["ucm", "issm", "umad", "uverbs", "rdma_cm"];

/// The kind of an RDMA node; `None` for any other node.
pub(super) fn rdma_kind(path: &str) -> Option<usize> {
    let name = path.strip_prefix("/dev/infiniband/")?;
    RDMA_KINDS.iter().position(|kind| name.starts_with(kind))
}
