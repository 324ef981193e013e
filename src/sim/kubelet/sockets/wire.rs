//! The device-plugin API's messages, as the core's values and back.

use super::super::core::{ListedDevice, Options};
use crate::domain::{ContainerEdits, DeviceId, EditDevice, EditMount};
use crate::kubelet::proto::v1beta1 as api;

pub(super) fn options(options: &api::DevicePluginOptions) -> Options {
    Options { preferred_allocation: options.get_preferred_allocation_available, pre_start: options.pre_start_required }
}

pub(super) fn listed(response: api::ListAndWatchResponse) -> Vec<ListedDevice> {
    let device = |device: api::Device| ListedDevice {
        id: DeviceId::new(device.id),
        healthy: device.health == "Healthy",
        numa_nodes: device.topology.map(|topology| topology.nodes.iter().map(|node| node.id).collect()).unwrap_or_default(),
    };
    response.devices.into_iter().map(device).collect()
}

pub(super) fn edits(response: api::ContainerAllocateResponse) -> ContainerEdits {
    let mount = |mount: api::Mount| EditMount { host: mount.host_path, container: mount.container_path, read_only: mount.read_only };
    let device = |spec: api::DeviceSpec| EditDevice { host: spec.host_path, container: spec.container_path, permissions: spec.permissions };
    ContainerEdits {
        envs: response.envs,
        mounts: response.mounts.into_iter().map(mount).collect(),
        devices: response.devices.into_iter().map(device).collect(),
        annotations: response.annotations,
        cdi_devices: response.cdi_devices.into_iter().map(|device| device.name).collect(),
    }
}

pub(super) fn response(edits: &ContainerEdits) -> api::ContainerAllocateResponse {
    let mount = |mount: &EditMount| api::Mount {
        container_path: mount.container.clone(),
        host_path: mount.host.clone(),
        read_only: mount.read_only,
    };
    let device = |device: &EditDevice| api::DeviceSpec {
        container_path: device.container.clone(),
        host_path: device.host.clone(),
        permissions: device.permissions.clone(),
    };
    api::ContainerAllocateResponse {
        envs: edits.envs.clone(),
        mounts: edits.mounts.iter().map(mount).collect(),
        devices: edits.devices.iter().map(device).collect(),
        annotations: edits.annotations.clone(),
        cdi_devices: edits.cdi_devices.iter().map(|name| api::CdiDevice { name: name.clone() }).collect(),
    }
}
