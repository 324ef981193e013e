//! Converts between the device-plugin API's messages and the core's values.

use super::super::core::{ListedDevice, Options};
use crate::domain::{ContainerEdits, DeviceId};
use crate::kubelet::api::v1beta1;
pub(super) use crate::kubelet::api::v1beta1::edits;
use crate::kubelet::proto::v1beta1 as api;

pub(super) fn options(options: &api::DevicePluginOptions) -> Options {
    Options {
        preferred_allocation: options.get_preferred_allocation_available,
        pre_start: options.pre_start_required,
    }
}

pub(super) fn listed(response: api::ListAndWatchResponse) -> Vec<ListedDevice> {
    let device = |device: api::Device| ListedDevice {
        id: DeviceId::new(device.id),
        healthy: device.health == "Healthy",
        numa_nodes: device
            .topology
            .map(|topology| topology.nodes.iter().map(|node| node.id).collect())
            .unwrap_or_default(),
    };
    response.devices.into_iter().map(device).collect()
}

pub(super) fn response(edits: &ContainerEdits) -> api::ContainerAllocateResponse {
    v1beta1::response(edits.clone())
}
