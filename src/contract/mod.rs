//! Contracts: what a container gets for its devices. One file for each contract, all of them pure.
//!
//! A contract's output is an ABI. The kubelet stores the response and replays it at every start of
//! the container, as long as the pod exists and across versions of Holdfast (I6). Most contracts
//! answer as another device plugin does, so that its pods run unchanged. `docs/contracts.md` has
//! the table, and lists the intended differences.
//!
//! Beyond a device's PCI function and nodes, contracts read these attributes:
//!
//! | attribute | of | read by |
//! | --- | --- | --- |
//! | `uuid`, `index`, `minor` | an NVIDIA GPU or MIG instance: UUID and numbers | `nvidia` |
//! | `integrated` | the GPU of a Tegra system: `tegra` | `nvidia` |
//! | `fme_node` | an Intel FPGA: its management node, `/dev/dfl-fme.0` | `intel-fpga` |
//! | `vdpa` | a function with a vDPA device: its name, `vdpa0` | `sriov` |
//! | `mdev_uuid` | a mediated device: its UUID | `kubevirt` |
//!
//! `index` is the number in the order of the PCI addresses (`0`), `minor` the number of the node.

mod amd;
pub mod cdi;
pub mod claim;
pub mod device_info;
mod generic;
mod intel_fpga;
mod intel_gpu;
mod kubevirt;
mod nodes;
mod nvidia;
pub mod nvidia_cdi;
mod rdma_shared;
mod sriov;
#[cfg(test)]
mod testing;
mod xilinx;

use crate::domain::{
    AllocId, ContainerEdits, Contract, Device, DeviceClass, DeviceNode, EditMount, NvidiaFeatures,
    ResourceSpec, VdpaType,
};

/// The input of a contract.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "a function shows nothing")]
pub struct Request<'a> {
    /// The resource.
    pub spec: &'a ResourceSpec,
    /// The devices behind the requested ids, in their order.
    pub devices: &'a [&'a Device],
    /// The id of this answer.
    pub alloc_id: &'a AllocId,
    /// Whether a node exists on the host.
    pub node_exists: &'a dyn Fn(&str) -> bool,
    /// What the node has of NVIDIA's driver beyond its GPUs.
    pub nvidia: &'a NvidiaExtras,
}

/// What a node has of NVIDIA's driver beyond its GPUs.
#[derive(Debug, Clone, Default)]
pub struct NvidiaExtras {
    /// The features that a container gets where the configuration leaves it to the node.
    pub features: NvidiaFeatures,
    /// The nodes of the configured IMEX channels, in their order.
    pub channels: Vec<DeviceNode>,
}

/// The edits for one container.
#[must_use]
pub fn edits(request: &Request<'_>) -> ContainerEdits {
    // Several shares of one device are one device to the container.
    let mut distinct: Vec<&Device> = Vec::new();
    for device in request.devices {
        if !distinct.iter().any(|known| known.id == device.id) {
            distinct.push(device);
        }
    }
    let request = &Request { devices: &distinct, ..*request };
    let spec = request.spec;
    let mut edits = by_contract(request);
    cdi::use_names(request, &mut edits);
    add_configured(spec, &mut edits);
    edits
}

/// Adds the environment and the mounts of the configuration, which override the contract.
fn add_configured(spec: &ResourceSpec, edits: &mut ContainerEdits) {
    edits.envs.extend(spec.env.clone());
    for mount in &spec.mounts {
        edits.mounts.retain(|known| known.container != mount.container);
        edits.mounts.push(EditMount {
            host: mount.host.clone(),
            container: mount.container.clone(),
            read_only: mount.read_only,
        });
    }
}

/// Why the contract cannot answer for a device, which then must not be offered; `None` if it can.
#[must_use]
pub fn unanswerable(spec: &ResourceSpec, device: &Device) -> Option<String> {
    match &spec.contract {
        Contract::Nvidia(options) => nvidia::unanswerable(device, options),
        _ => None,
    }
}

/// What a container would miss of a device although all its known nodes exist. Such a device is
/// unhealthy, because a container could not use it. `None` if the answer is complete.
#[must_use]
pub fn missing(spec: &ResourceSpec, device: &Device) -> Option<&'static str> {
    let has = |begin: &str| {
        device.nodes.iter().any(|node| node.required && node.container.starts_with(begin))
    };
    let lacks = |begin: &'static str| (!has(begin)).then_some(begin);
    let is_for_guest = device.nodes.iter().any(|node| node.container.starts_with("/dev/vfio/"));
    match &spec.contract {
        _ if is_for_guest => device.own_nodes().next().is_none().then_some("/dev/vfio/<group>"),
        Contract::Nvidia(options) if !options.pass_device_specs => None,
        Contract::Nvidia(_) => device.own_nodes().next().is_none().then_some("/dev/nvidia<minor>"),
        Contract::Sriov(options) => match options.vdpa {
            Some(VdpaType::Vhost) => lacks("/dev/vhost-vdpa-"),
            // A function in a pod's network namespace shows the host no RDMA device. Then its class
            // is no longer `rdma`.
            None if device.class == DeviceClass::Rdma && sriov::gives_rdma(spec, options) => {
                lacks(UVERBS)
            }
            Some(VdpaType::Virtio) | None => None,
        },
        Contract::RdmaShared => lacks(UVERBS),
        Contract::Amd | Contract::IntelGpu(_) => lacks(RENDER),
        Contract::Generic | Contract::IntelFpga(_) | Contract::Xilinx(_) | Contract::Kubevirt => {
            match device.class {
                DeviceClass::Gpu
                    if device
                        .pci
                        .as_ref()
                        .is_some_and(|function| function.driver.as_deref() != Some("nvidia")) =>
                {
                    lacks(RENDER)
                }
                DeviceClass::Rdma => lacks(UVERBS),
                // An interface is no node.
                DeviceClass::Nic | DeviceClass::Other => None,
                _ => device.own_nodes().next().is_none().then_some("/dev"),
            }
        }
    }
}

/// The node through which a container computes on a GPU.
const RENDER: &str = "/dev/dri/renderD";
/// The node through which a container uses an RDMA device.
const UVERBS: &str = "/dev/infiniband/uverbs";

/// The contract's edits for distinct devices.
fn by_contract(request: &Request<'_>) -> ContainerEdits {
    match &request.spec.contract {
        Contract::Generic => generic::edits(request),
        Contract::Nvidia(options) => nvidia::edits(request, options),
        Contract::Amd => amd::edits(request),
        Contract::IntelGpu(options) => intel_gpu::edits(request, options),
        Contract::IntelFpga(options) => intel_fpga::edits(request, options),
        Contract::Xilinx(options) => xilinx::edits(request, options),
        Contract::Sriov(options) => sriov::edits(request, options),
        Contract::RdmaShared => rdma_shared::edits(request),
        Contract::Kubevirt => kubevirt::edits(request),
    }
}

/// An attribute of a device.
fn attribute<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.get(name)
}

/// The address of a device, as other plugins name it; its id where it has none.
fn address(device: &Device) -> String {
    device
        .pci
        .as_ref()
        .map_or_else(|| device.id.to_string(), |function| function.address.to_string())
}
