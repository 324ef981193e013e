//! What a container gets for its devices: one file for each contract, all of them pure.
//!
//! A contract's output is an ABI: the kubelet keeps the response and replays it at every start of the container, for
//! as long as the pod lives and across versions of Holdfast (I6). And most of them answer as another device plugin does,
//! whose pods then run on unchanged; `docs/contracts.md` has the table, and says where they differ on purpose.
//!
//! What a contract has to know of a device beyond its PCI function and its nodes, it reads from these attributes:
//!
//! | attribute | of | read by |
//! | --- | --- | --- |
//! | `uuid`, `index`, `minor` | an NVIDIA GPU or MIG instance: its UUID, its number in the order of the PCI addresses (`0`), and that of its node | `nvidia` |
//! | `fme_node` | an Intel FPGA: its management node, `/dev/dfl-fme.0` | `intel-fpga` |
//! | `vdpa` | a function with a vDPA device: its name, `vdpa0` | `sriov` |
//! | `mdev_uuid` | a mediated device: its UUID | `kubevirt` |

mod amd;
pub mod cdi;
pub mod device_info;
mod generic;
mod intel_fpga;
mod intel_gpu;
mod kubevirt;
mod nodes;
mod nvidia;
mod rdma_shared;
mod sriov;
#[cfg(test)]
mod testing;
mod xilinx;

use crate::domain::{AllocId, ContainerEdits, Contract, Device, DeviceClass, EditMount, ResourceSpec, VdpaType};

/// What a contract looks at.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "a function shows nothing")]
pub struct Request<'a> {
    /// The resource.
    pub spec: &'a ResourceSpec,
    /// The devices behind the ids that are asked for, in their order.
    pub devices: &'a [&'a Device],
    /// Names this answer and no other.
    pub alloc_id: &'a AllocId,
    /// Whether a node is there on the host.
    pub node_exists: &'a dyn Fn(&str) -> bool,
}

/// What one container gets.
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
    cdi::tell(request, &mut edits);
    // What the configuration says explicitly wins over the contract.
    edits.envs.extend(spec.env.clone());
    for mount in &spec.mounts {
        edits.mounts.retain(|known| known.container != mount.container);
        edits.mounts.push(EditMount { host: mount.host.clone(), container: mount.container.clone(), read_only: mount.read_only });
    }
    edits
}

/// Why the resource has no answer for a device, which is then not to be offered; `None` where it has one.
#[must_use]
pub fn unanswerable(spec: &ResourceSpec, device: &Device) -> Option<String> {
    match &spec.contract {
        Contract::Nvidia(options) => nvidia::unanswerable(device, options),
        _ => None,
    }
}

/// What a container would miss of a device, although every node that is known of it is there: then it is not healthy, since a container that
/// gets it could do nothing with it. `None` where the answer has all that it needs.
#[must_use]
pub fn missing(spec: &ResourceSpec, device: &Device) -> Option<&'static str> {
    let has = |begin: &str| device.nodes.iter().any(|node| node.required && node.container.starts_with(begin));
    let lacks = |begin: &'static str| (!has(begin)).then_some(begin);
    let is_for_guest = device.nodes.iter().any(|node| node.container.starts_with("/dev/vfio/"));
    match &spec.contract {
        _ if is_for_guest => device.own_nodes().next().is_none().then_some("/dev/vfio/<group>"),
        Contract::Nvidia(options) if !options.pass_device_specs => None,
        Contract::Nvidia(_) => device.own_nodes().next().is_none().then_some("/dev/nvidia<minor>"),
        Contract::Sriov(options) => match options.vdpa {
            Some(VdpaType::Vhost) => lacks("/dev/vhost-vdpa-"),
            // A function in a pod's network namespace shows no RDMA device to the host, and is no device of that class then.
            None if device.class == DeviceClass::Rdma && sriov::gives_rdma(spec, options) => lacks(UVERBS),
            Some(VdpaType::Virtio) | None => None,
        },
        Contract::RdmaShared => lacks(UVERBS),
        Contract::Amd | Contract::IntelGpu(_) => lacks(RENDER),
        Contract::Generic | Contract::IntelFpga(_) | Contract::Xilinx(_) | Contract::Kubevirt => match device.class {
            DeviceClass::Gpu if device.pci.as_ref().is_some_and(|function| function.driver.as_deref() != Some("nvidia")) => lacks(RENDER),
            DeviceClass::Rdma => lacks(UVERBS),
            // An interface is no node.
            DeviceClass::Nic | DeviceClass::Other => None,
            _ => device.own_nodes().next().is_none().then_some("/dev"),
        },
    }
}

/// The node through which a container computes on a GPU.
const RENDER: &str = "/dev/dri/renderD";
/// The node through which a container uses an RDMA device.
const UVERBS: &str = "/dev/infiniband/uverbs";

/// What the contract says of devices of which none comes twice.
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

/// What is known of a device by this name.
fn attribute<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.get(name)
}

/// The address of a device, as other plugins name it; its id where it has none.
fn address(device: &Device) -> String {
    device.pci.as_ref().map_or_else(|| device.id.to_string(), |function| function.address.to_string())
}
