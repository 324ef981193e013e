//! `sriov`: answers as the SR-IOV network device plugin. A container finds its functions in
//! `PCIDEVICE_<resource>`, and details of each in `PCIDEVICE_<resource>_INFO`. A CNI plugin moves
//! the network interface itself.

use super::{Request, address, attribute, nodes};
use crate::domain::{
    ContainerEdits, Device, DeviceClass, DeviceNode, EditDevice, ResourceSpec, SriovOptions,
    VdpaType,
};
use std::collections::BTreeMap;

/// The details of one function in `_INFO`: by provider, then by key.
type Info = BTreeMap<&'static str, BTreeMap<String, String>>;

const VHOST_NODES: [(&str, &str); 2] =
    [("net-mount", "/dev/vhost-net"), ("tun-mount", "/dev/net/tun")];

pub(super) fn edits(request: &Request<'_>, options: &SriovOptions) -> ContainerEdits {
    let mut edits = ContainerEdits::default();
    let mut infos: BTreeMap<String, Info> = BTreeMap::new();
    for device in request.devices {
        let Function { info, devices } = function(request, device, options);
        for node in devices {
            if !edits.devices.iter().any(|known| known.host == node.host) {
                edits.devices.push(node);
            }
        }
        infos.insert(address(device), info);
    }
    let ids: Vec<String> = request.devices.iter().map(|device| address(device)).collect();
    let variable = variable(request.spec.name.as_str());
    edits.envs.insert(format!("{variable}_INFO"), go_json(&infos));
    edits.envs.insert(variable, ids.join(","));
    edits
}

/// The same for the containers of a claim with one function. The names of the variables contain its
/// address: a container may have several claims, and the last variable of a name would win. The
/// first of the functions that a container gets together has the variables with all of them too.
pub(super) fn claimed(
    request: &Request<'_>,
    options: &SriovOptions,
    together: &Request<'_>,
) -> ContainerEdits {
    let listed = (!together.devices.is_empty()).then(|| edits(together, options).envs);
    let mut edits = edits(request, options);
    let variable = variable(request.spec.name.as_str());
    let of = request.devices.first().map_or_else(String::new, |device| address(device));
    let of = of.replace(|c: char| !c.is_ascii_alphanumeric(), "_").to_ascii_uppercase();
    for (name, own) in [
        (format!("{variable}_INFO"), format!("{variable}_{of}_INFO")),
        (variable.clone(), format!("{variable}_{of}")),
    ] {
        let value = edits.envs.remove(&name);
        edits.envs.extend(value.map(|value| (own, value)));
    }
    edits.envs.extend(listed.into_iter().flatten());
    edits
}

/// `PCIDEVICE_INTEL_COM_MY-POOL`: a dash stays, although shells cannot read such a variable.
fn variable(resource: &str) -> String {
    format!("PCIDEVICE_{}", resource.to_ascii_uppercase().replace(['/', '.'], "_"))
}

/// The details and nodes of one function.
#[derive(Default)]
struct Function {
    info: Info,
    devices: Vec<EditDevice>,
}

impl Function {
    /// Adds nodes, and notes each in the details by its key; of several nodes with one key the last
    /// is noted.
    fn add(
        &mut self,
        provider: &'static str,
        nodes: impl IntoIterator<Item = (&'static str, EditDevice)>,
    ) {
        for (key, node) in nodes {
            self.info.entry(provider).or_default().insert(key.to_owned(), node.container.clone());
            self.devices.push(node);
        }
    }
}

/// In the order of the plugin's providers.
fn function(request: &Request<'_>, device: &Device, options: &SriovOptions) -> Function {
    let mut function = Function::default();
    let address = address(device);
    function.info.insert("generic", BTreeMap::from([("deviceID".to_owned(), address.clone())]));
    // The driver of the function decides which nodes exist.
    let vfio = |node: &DeviceNode| node.container == "/dev/vfio/vfio";
    let group =
        |node: &DeviceNode| node.container.strip_prefix("/dev/vfio/").is_some_and(is_number);
    let uio = |node: &DeviceNode| node.container.strip_prefix("/dev/uio").is_some_and(is_number);
    function.add("vfio", own(device, "mount", vfio).chain(own(device, "dev-mount", group)));
    function.add("uio", own(device, "mount", uio));
    if function.devices.is_empty() {
        // A host with VFIO through iommufd only.
        let of_iommufd = device.nodes.iter().filter(|node| {
            node.container == "/dev/iommu" || node.container.starts_with("/dev/vfio/devices/")
        });
        function.devices.extend(of_iommufd.map(given));
    }
    if !options.additional_info.is_empty() {
        let of = |key: &str| {
            options
                .additional_info
                .get(key)
                .into_iter()
                .flatten()
                .map(|(key, value)| (key.clone(), value.clone()))
        };
        // By the PCI address, also for a scalable function on it.
        let at = device.pci.as_ref().map_or(address, |pci| pci.address.to_string());
        function.info.insert("extra", of("*").chain(of(&at)).collect());
    }
    match options.vdpa {
        Some(VdpaType::Vhost) => {
            function.add("vdpa", own(device, "mount", is_vhost_vdpa));
        }
        Some(VdpaType::Virtio) if attribute(device, "vdpa").is_some() => {
            drop(function.info.insert("vdpa", BTreeMap::new()));
        }
        Some(VdpaType::Virtio) => {}
        None if gives_rdma(request.spec, options) => add_rdma(&mut function, device),
        None => {}
    }
    if options.vhost_net && (request.node_exists)(VHOST_NODES[0].1) {
        function.info.insert(
            "vhost",
            VHOST_NODES.map(|(key, node)| (key.to_owned(), node.to_owned())).into(),
        );
        if (request.node_exists)(VHOST_NODES[1].1) {
            function.devices.extend(VHOST_NODES.map(|(_, node)| nodes::at(node, "rw")));
        }
    }
    function
}

/// Whether a container gets the RDMA nodes of its functions.
pub(super) fn gives_rdma(spec: &ResourceSpec, options: &SriovOptions) -> bool {
    options.rdma.unwrap_or(spec.class == DeviceClass::Rdma)
}

/// The node of a function's vDPA device.
pub(super) fn vhost_vdpa(device: &Device) -> Option<&str> {
    device.nodes.iter().find(|node| is_vhost_vdpa(node)).map(|node| node.container.as_str())
}

fn is_vhost_vdpa(node: &DeviceNode) -> bool {
    node.container.starts_with("/dev/vhost-vdpa-")
}

fn add_rdma(function: &mut Function, device: &Device) {
    let names = device.pci.as_ref().map(|pci| pci.rdma.as_slice()).unwrap_or_default();
    let mut rdma: Vec<(usize, &DeviceNode)> = device
        .nodes
        .iter()
        .filter_map(|node| Some((nodes::rdma_kind(&node.container)?, node)))
        .collect();
    if rdma.is_empty() && names.is_empty() {
        return;
    }
    rdma.sort_by_key(|(kind, _)| *kind);
    // The connection manager's node of old kernels has no key.
    let (keyed, plain): (Vec<_>, Vec<_>) =
        rdma.into_iter().partition(|(kind, _)| nodes::RDMA_KINDS[*kind] != "ucm");
    function.devices.extend(plain.into_iter().map(|(_, node)| given(node)));
    function
        .add("rdma", keyed.into_iter().map(|(kind, node)| (nodes::RDMA_KINDS[kind], given(node))));
    let named = names.first().map(|name| ("rdma_dev".to_owned(), name.clone()));
    function.info.entry("rdma").or_default().extend(named);
}

/// The matching nodes of a device, under one key.
fn own(
    device: &Device,
    key: &'static str,
    fits: impl Fn(&DeviceNode) -> bool,
) -> impl Iterator<Item = (&'static str, EditDevice)> {
    device.nodes.iter().filter(move |node| fits(node)).map(move |node| (key, given(node)))
}

fn given(node: &DeviceNode) -> EditDevice {
    EditDevice {
        host: node.host.clone(),
        container: node.container.clone(),
        permissions: "rw".into(),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// JSON as Go's `encoding/json` writes it: sorted keys, and escapes for characters with a meaning
/// in HTML or JavaScript.
fn go_json(infos: &BTreeMap<String, Info>) -> String {
    let plain = serde_json::to_string(infos).unwrap_or_default();
    let mut text = String::with_capacity(plain.len());
    for character in plain.chars() {
        match character {
            // These occur only within strings.
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            _ => text.push(character),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::testing::{edits_of, edits_where, function, golden, paths, spec};
    use super::*;
    use crate::domain::{Contract, ContractKind, PciFunction};

    fn sriov(options: SriovOptions) -> ResourceSpec {
        spec("intel.com/my-pool_1.x", Contract::Sriov(options))
    }

    fn rdma_vf() -> Device {
        let nodes =
            ["uverbs7", "issm3", "umad3", "rdma_cm"].map(|name| format!("/dev/infiniband/{name}"));
        let vf = function("0000:3b:00.2", "mlx5_core", &nodes.each_ref().map(String::as_str));
        let pci =
            vf.pci.clone().map(|pci| Box::new(PciFunction { rdma: vec!["mlx5_4".into()], ..*pci }));
        Device { pci, ..vf }
    }

    #[test]
    fn an_interface_is_named_by_its_address_alone() {
        let (first, second) =
            (function("0000:3b:02.1", "iavf", &[]), function("0000:3b:02.0", "iavf", &[]));
        let edits = edits_of(&sriov(SriovOptions::default()), &[&first, &second]);
        assert_eq!(golden(&edits), include_str!("golden/sriov.json").trim_end());
    }

    #[test]
    fn a_function_for_dpdk_has_vfio_nodes_and_the_configured_extras() {
        let mut first =
            function("0000:3b:00.2", "vfio-pci", &["/dev/vfio/vfio", "/dev/vfio/devices/vfio3"]);
        // Without an IOMMU the node has another name on the host.
        first.nodes.push(DeviceNode {
            container: "/dev/vfio/7".into(),
            ..DeviceNode::at("/dev/vfio/noiommu-7")
        });
        let second = function("0000:3b:00.3", "vfio-pci", &["/dev/vfio/vfio", "/dev/vfio/91"]);
        let table = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let additional_info = BTreeMap::from([
            ("*".into(), table("zone", "a<b>&c")),
            ("0000:3b:00.2".into(), table("zone", "b")),
        ]);
        let edits = edits_of(
            &sriov(SriovOptions { additional_info, ..SriovOptions::default() }),
            &[&first, &second],
        );
        assert_eq!(golden(&edits), include_str!("golden/sriov-vfio.json").trim_end());
    }

    #[test]
    fn an_rdma_function_brings_its_nodes_and_those_of_vhost_where_they_are_wanted() {
        let options = SriovOptions { rdma: Some(true), vhost_net: true, ..SriovOptions::default() };
        let edits = edits_of(&sriov(options), &[&rdma_vf()]);
        assert_eq!(golden(&edits), include_str!("golden/sriov-rdma.json").trim_end());
    }

    #[test]
    fn a_scalable_function_is_named_as_on_the_auxiliary_bus() {
        let attributes = [("auxiliary", "mlx5_core.sf.2"), ("part", "sf")];
        let function = Device { attributes: attributes.into_iter().collect(), ..rdma_vf() };
        let table = |value: &str| BTreeMap::from([("rack".to_owned(), value.to_owned())]);
        let additional_info =
            BTreeMap::from([("*".into(), table("r0")), ("0000:3b:00.2".into(), table("r1"))]);
        let options = SriovOptions { rdma: Some(true), additional_info, ..SriovOptions::default() };
        let edits = edits_of(&sriov(options), &[&function]);
        assert_eq!(golden(&edits), include_str!("golden/sriov-scalable.json").trim_end());
    }

    #[test]
    fn in_the_class_rdma_the_nodes_come_unless_they_are_not_wanted() {
        let usual = ResourceSpec { class: DeviceClass::Rdma, ..spec("a.b/c", ContractKind::Sriov) };
        assert_eq!(edits_of(&usual, &[&rdma_vf()]).devices.len(), 4);
        let contract =
            Contract::Sriov(SriovOptions { rdma: Some(false), ..SriovOptions::default() });
        assert_eq!(edits_of(&ResourceSpec { contract, ..usual }, &[&rdma_vf()]).devices, []);
    }

    #[test]
    fn vdpa_is_a_node_with_vhost_and_nothing_but_a_name_with_virtio() {
        let mut vf = function("0000:3b:00.2", "mlx5_core", &["/dev/vhost-vdpa-0"]);
        vf.attributes.insert("vdpa", "vdpa0");
        let info = |vdpa| {
            let edits = edits_of(
                &sriov(SriovOptions { vdpa: Some(vdpa), ..SriovOptions::default() }),
                &[&vf],
            );
            (edits.envs["PCIDEVICE_INTEL_COM_MY-POOL_1_X_INFO"].clone(), edits.devices.len())
        };
        let expected = |vdpa: &str| {
            format!(
                r#"{{"0000:3b:00.2":{{"generic":{{"deviceID":"0000:3b:00.2"}},"vdpa":{vdpa}}}}}"#
            )
        };
        assert_eq!(info(VdpaType::Vhost), (expected(r#"{"mount":"/dev/vhost-vdpa-0"}"#), 1));
        assert_eq!(info(VdpaType::Virtio), (expected("{}"), 0));
    }

    #[test]
    fn the_other_drivers_for_user_space_have_a_node_too() {
        for driver in ["igb_uio", "uio_pci_generic"] {
            let edits = edits_of(
                &sriov(SriovOptions::default()),
                &[&function("0000:3b:00.2", driver, &["/dev/uio3"])],
            );
            assert_eq!(paths(&edits), ["/dev/uio3"], "{driver}");
            assert!(
                edits.envs["PCIDEVICE_INTEL_COM_MY-POOL_1_X_INFO"]
                    .ends_with(r#""uio":{"mount":"/dev/uio3"}}}"#),
                "{driver}"
            );
        }
    }

    #[test]
    fn where_vfio_is_iommufd_alone_its_nodes_are_given() {
        let vf = |nodes: &[&str]| {
            paths(&edits_of(
                &sriov(SriovOptions::default()),
                &[&function("0000:3b:00.2", "vfio-pci", nodes)],
            ))
            .join(" ")
        };
        assert_eq!(
            vf(&["/dev/iommu", "/dev/vfio/devices/vfio3"]),
            "/dev/iommu /dev/vfio/devices/vfio3"
        );
        let both = ["/dev/vfio/vfio", "/dev/vfio/7", "/dev/iommu", "/dev/vfio/devices/vfio3"];
        assert_eq!(vf(&both), "/dev/vfio/vfio /dev/vfio/7", "as the other plugin answers");
    }

    #[test]
    fn without_vhost_on_the_host_no_vhost_node_is_given() {
        let options = SriovOptions { vhost_net: true, ..SriovOptions::default() };
        let vf = function("0000:3b:00.2", "iavf", &[]);
        assert_eq!(
            edits_where(&sriov(options.clone()), &[&vf], |_| false),
            edits_of(&sriov(SriovOptions::default()), &[&vf])
        );
        // With `/dev/vhost-net` alone, the plugin lists both nodes and passes neither.
        let half = edits_where(&sriov(options), &[&vf], |path| path == "/dev/vhost-net");
        assert!(
            half.devices.is_empty() && half.envs.values().any(|info| info.contains("tun-mount"))
        );
    }
}
