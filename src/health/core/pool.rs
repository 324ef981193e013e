//! A pool: the devices of a resource as one device, which every container gets.

use crate::domain::{Attributes, Device, DeviceId, DeviceNode, Offered, ResourceSpec};
use std::sync::Arc;

/// The id of a resource's pool, which is not an id of its list.
pub(super) fn id(spec: &ResourceSpec) -> DeviceId {
    DeviceId::new(spec.name.as_str())
}

/// The pool of a resource: all nodes of its healthy members. It is healthy with at least one
/// healthy member. `None` without members.
///
/// It has no NUMA node: its members may be on several.
pub(crate) fn pool(spec: &ResourceSpec, members: &[Offered]) -> Option<Offered> {
    let health =
        members.iter().map(|member| member.health).min_by_key(|health| !health.is_healthy())?;
    let mut nodes: Vec<DeviceNode> = Vec::new();
    // Unhealthy members are left out, if there is a healthy one.
    let usable = members.iter().filter(|member| member.health.is_healthy() == health.is_healthy());
    for node in usable.flat_map(|member| &member.device.nodes) {
        if !nodes.iter().any(|known| known.container == node.container) {
            nodes.push(node.clone());
        }
    }
    let name = spec.name.as_str();
    let device = Device {
        id: id(spec),
        key: format!("pool:{name}"),
        class: spec.class,
        pci: None,
        numa_nodes: Vec::new(),
        nodes,
        attributes: Attributes::default(),
    };
    Some(Offered { device: Arc::new(device), health })
}
