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
//! | `auxiliary` | a scalable function: its name, `mlx5_core.sf.4` | `sriov` |
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
    AllocId, ContainerEdits, Contract, Device, DeviceClass, DeviceNode, EditDevice, EditMount,
    MemberPath, NvidiaFeatures, ResourceSpec, VdpaType, template,
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
    let request = &Request { devices: &distinct(request.devices), ..*request };
    let mut edits = by_contract(request);
    cdi::use_names(request, &mut edits);
    add_configured(request, &mut edits);
    nodes::use_lasting_paths(request.devices, &mut edits);
    edits
}

/// The devices, each once: several shares of one device are one device to the container.
fn distinct<'a>(devices: &[&'a Device]) -> Vec<&'a Device> {
    let mut distinct: Vec<&Device> = Vec::new();
    for device in devices {
        if !distinct.iter().any(|known| known.id == device.id) {
            distinct.push(device);
        }
    }
    distinct
}

/// Adds the environment, the nodes and the mounts of the configuration, which override the
/// contract. A variable with placeholders has one value for each device, with commas. A variable
/// with a number in its name is one variable for each device.
fn add_configured(request: &Request<'_>, edits: &mut ContainerEdits) {
    let spec = request.spec;
    for (name, text) in &spec.env {
        if name.contains(template::NUMBER) {
            let values = request.devices.iter().filter_map(|of| template::fill(text, of).ok());
            for (number, value) in values.enumerate() {
                edits.envs.insert(name.replace(template::NUMBER, &number.to_string()), value);
            }
            continue;
        }
        let value = if template::has_placeholder(text) {
            let values = request.devices.iter().filter_map(|of| template::fill(text, of).ok());
            let values: Vec<String> = values.collect();
            // Placeholders with a `?`, and no device has a value.
            if values.is_empty() {
                continue;
            }
            values.join(",")
        } else {
            template::plain(text)
        };
        edits.envs.insert(name.clone(), value);
    }
    for node in request.devices.iter().flat_map(|device| companions(spec, device)) {
        let is_known = edits.devices.iter().any(|known| known.container == node.container);
        if !is_known && (node.required || (request.node_exists)(&node.host)) {
            let DeviceNode { host, container, permissions, .. } = node;
            edits.devices.push(EditDevice { host, container, permissions });
        }
    }
    for mount in &spec.mounts {
        edits.mounts.retain(|known| known.container != mount.container);
        edits.mounts.push(EditMount {
            host: mount.host.clone(),
            container: mount.container.clone(),
            read_only: mount.read_only,
        });
    }
}

/// The nodes of the configuration that go with a device. They are its own as little as
/// `/dev/nvidiactl` is: several containers may have them.
pub fn companions<'a>(
    spec: &'a ResourceSpec,
    device: &'a Device,
) -> impl Iterator<Item = DeviceNode> + 'a {
    spec.nodes.iter().filter_map(|MemberPath { path, optional }| {
        let host = template::fill_path(path.host.literal()?, device).ok()?;
        let container = match path.container.as_deref().map(|of| template::fill_path(of, device)) {
            None => host.clone(),
            Some(Ok(folder)) if folder.ends_with('/') => {
                format!("{folder}{}", host.rsplit('/').next().unwrap_or(&host))
            }
            Some(container) => container.ok()?,
        };
        let permissions = path.permissions.clone();
        Some(DeviceNode { container, permissions, required: !optional, ..DeviceNode::at(host) })
    })
}

/// The placeholder that a device has no value for, with the key of the configuration.
fn unfilled(spec: &ResourceSpec, device: &Device) -> Option<String> {
    let of_env = spec
        .env
        .iter()
        .find_map(|(name, text)| Some((format!("env.{name}"), template::lacking(text, device)?)));
    let of_nodes = || {
        let texts = spec.nodes.iter().filter(|node| !node.optional).flat_map(|node| {
            node.path.host.literal().into_iter().chain(node.path.container.as_deref())
        });
        let mut unfilled = texts.filter_map(|text| template::fill_path(text, device).err());
        Some(("nodes".to_owned(), unfilled.next()?))
    };
    let (key, name) = of_env.or_else(of_nodes)?;
    Some(format!("`{key}` needs its `{{{name}}}`, which it does not have"))
}

/// Why the contract cannot answer for a device, which then must not be offered; `None` if it can.
#[must_use]
pub fn unanswerable(spec: &ResourceSpec, device: &Device) -> Option<String> {
    if let Some(why) = unfilled(spec, device) {
        return Some(why);
    }
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

/// The address of a device, as other plugins name it; its id where it has none. A scalable function
/// has a name on the auxiliary bus.
fn address(device: &Device) -> String {
    if let Some(name) = attribute(device, "auxiliary") {
        return name.to_owned();
    }
    device
        .pci
        .as_ref()
        .map_or_else(|| device.id.to_string(), |function| function.address.to_string())
}

#[cfg(test)]
mod tests {
    use super::testing::{device, edits_of, spec};
    use super::*;
    use crate::domain::{CharPath, ContractKind};

    fn node(host: &str, optional: bool) -> MemberPath {
        let path = CharPath {
            host: host.into(),
            container: None,
            permissions: "rw".into(),
            udev: Vec::new(),
        };
        MemberPath { path, optional }
    }

    fn npus() -> (ResourceSpec, [Device; 2]) {
        let mut spec = spec("huawei.com/npu", ContractKind::Generic);
        spec.nodes = vec![node("/dev/davinci_manager", false), node("/dev/log{index}", true)];
        spec.env = [("VISIBLE", "{index}"), ("ALL", "on {{x}}"), ("ID", "{id}"), ("N{n}", "{id}")]
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .into();
        (spec, ["3", "11"].map(|n| device(n, &[&format!("/dev/davinci{n}")], &[])))
    }

    #[test]
    fn every_container_gets_the_nodes_and_variables_of_its_devices() {
        let (spec, [first, second]) = npus();
        let edits = edits_of(&spec, &[&second, &first, &second]);
        let nodes: Vec<&str> = edits.devices.iter().map(|node| node.container.as_str()).collect();
        let expected =
            ["/dev/davinci11", "/dev/davinci3", "/dev/davinci_manager", "/dev/log11", "/dev/log3"];
        assert_eq!(nodes, expected);
        let env: Vec<(&str, &str)> =
            edits.envs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            env,
            [("ALL", "on {x}"), ("ID", "11,3"), ("N0", "11"), ("N1", "3"), ("VISIBLE", "11,3")]
        );
        let objects = first.objects();
        assert!(objects.iter().all(|object| !object.as_str().contains("manager")), "{objects:?}");
    }

    #[test]
    fn a_device_without_a_value_for_a_placeholder_is_not_offered() {
        let (mut spec, [first, _]) = npus();
        assert_eq!(unanswerable(&spec, &first), None);
        spec.env.insert("UUID".into(), "a{uuid}".into());
        assert_eq!(
            unanswerable(&spec, &first).as_deref(),
            Some("`env.UUID` needs its `{uuid}`, which it does not have")
        );
        spec.env.insert("UUID".into(), "a{uuid?}".into());
        assert_eq!(unanswerable(&spec, &first), None);
        assert!(!edits_of(&spec, &[&first]).envs.contains_key("UUID"), "without any value");
        spec.env.clear();
        spec.nodes.push(node("/dev/x{serial}", true));
        assert_eq!(unanswerable(&spec, &first), None, "an optional node is left out");
        spec.nodes.push(node("/dev/x{serial}", false));
        assert_eq!(
            unanswerable(&spec, &first).as_deref(),
            Some("`nodes` needs its `{serial}`, which it does not have")
        );
    }
}
