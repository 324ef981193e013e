//! The border between the wire and the domain.

use super::proto::v1beta1 as api;
use crate::domain::{ContainerEdits, Offering};

/// One resource as a ListAndWatch message: the complete list, in the order of the ids.
#[must_use]
pub fn list(offering: &Offering) -> api::ListAndWatchResponse {
    let device = |(id, offered): (&crate::domain::DeviceId, &crate::domain::Offered)| api::Device {
        id: id.to_string(),
        health: offered.health.as_str().to_owned(),
        topology: topology(&offered.device.numa_nodes),
    };
    api::ListAndWatchResponse { devices: offering.devices.iter().map(device).collect() }
}

/// NUMA nodes as the kubelet wants them: unset where nothing is known, and no node that its 64-bit mask cannot hold.
fn topology(numa_nodes: &[u32]) -> Option<api::TopologyInfo> {
    let nodes: Vec<_> = numa_nodes.iter().filter(|node| **node < 64).map(|node| api::NumaNode { id: i64::from(*node) }).collect();
    (!nodes.is_empty()).then_some(api::TopologyInfo { nodes })
}

/// What a container gets, as the API's response.
#[must_use]
pub fn response(edits: ContainerEdits) -> api::ContainerAllocateResponse {
    let mount =
        |mount: crate::domain::EditMount| api::Mount { container_path: mount.container, host_path: mount.host, read_only: mount.read_only };
    let device = |device: crate::domain::EditDevice| api::DeviceSpec {
        container_path: device.container,
        host_path: device.host,
        permissions: device.permissions,
    };
    api::ContainerAllocateResponse {
        envs: edits.envs,
        mounts: edits.mounts.into_iter().map(mount).collect(),
        devices: edits.devices.into_iter().map(device).collect(),
        annotations: edits.annotations,
        cdi_devices: edits.cdi_devices.into_iter().map(|name| api::CdiDevice { name }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_numa_node_is_no_topology_and_several_are_all_told() {
        assert_eq!(topology(&[]), None);
        assert_eq!(topology(&[64, 250]), None);
        let nodes: Vec<i64> = topology(&[0, 8, 64]).unwrap().nodes.iter().map(|node| node.id).collect();
        assert_eq!(nodes, [0, 8]);
    }
}
