//! CDI: the container runtime reads device nodes (and Intel's hook) from a file instead of the
//! answer.
//!
//! There is one file for each device, so that a device comes and goes without effect on others. The
//! names are an ABI like every answer. Their kind is that of the plugin that is replaced, where it
//! has one. A file has the lowest CDI version that supports its content, because a runtime refuses
//! what it does not know.

use super::{NvidiaExtras, Request, address, by_contract, intel_fpga};
use crate::domain::{
    AllocId, CdiAnswer, ContainerEdits, Contract, Device, DeviceClass, EditDevice, EditMount,
    FpgaMode, ResourceSpec,
};
use serde::Serialize;

/// Prefix of the names of all files.
pub const FILE_PREFIX: &str = "holdfast-";

/// Prefix of the annotation keys that runtimes read.
const ANNOTATION_PREFIX: &str = "cdi.k8s.io/";

/// The hook that programs an Intel FPGA, at the path where Intel's plugin installs it.
const FPGA_HOOK: Hook =
    Hook { hook_name: "createRuntime", path: "/opt/intel/fpga-sw/intel-fpga-crihook" };

/// A file that describes a container's devices to other programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecFile {
    /// The name of the file.
    pub name: String,
    /// The content.
    pub text: String,
}

/// Whether an answer of the resource has CDI names with files of ours.
#[must_use]
pub fn is_used(spec: &ResourceSpec) -> bool {
    !spec.cdi.is_empty() || has_hook(spec)
}

/// The files of these devices. A device without nodes and hooks has no file, because a runtime
/// would refuse it.
#[must_use]
pub fn files<'a>(
    spec: &ResourceSpec,
    devices: impl IntoIterator<Item = &'a Device>,
    node_exists: &dyn Fn(&str) -> bool,
) -> Vec<SpecFile> {
    if !is_used(spec) {
        return Vec::new();
    }
    // No answer is made, so no id is needed.
    let (alloc_id, nvidia) = (&AllocId::new(""), &NvidiaExtras::default());
    let request = Request { spec, devices: &[], alloc_id, node_exists, nvidia };
    let definitions = devices.into_iter().flat_map(|device| definitions(&request, device));
    definitions.filter_map(|definition| definition.file()).collect()
}

/// The name of the file that defines a qualified name, for any device.
#[must_use]
pub fn file_name(qualified: &str) -> String {
    // Names cannot contain `+` or `@`, so each name has its own file.
    format!("{FILE_PREFIX}{}.json", qualified.replace('/', "+").replace('=', "@"))
}

/// The names of a device's files, also of an absent device.
pub fn file_names_of<'a>(
    spec: &'a ResourceSpec,
    device: &'a Device,
) -> impl Iterator<Item = String> {
    let nodes =
        (!spec.cdi.is_empty()).then(|| Definition::of_nodes(spec, device, Edits::default()));
    let hook = has_hook(spec).then(|| Definition::of_hook(device));
    nodes.into_iter().chain(hook).map(|definition| file_name(&definition.qualified()))
}

/// The qualified names in an answer.
pub fn names(edits: &ContainerEdits) -> impl Iterator<Item = &str> {
    let annotated = edits
        .annotations
        .iter()
        .filter(|(key, _)| key.starts_with(ANNOTATION_PREFIX))
        .flat_map(|(_, names)| names.split(','));
    edits.cdi_devices.iter().map(String::as_str).chain(annotated)
}

/// Replaces the nodes by CDI names.
pub(super) fn use_names(request: &Request<'_>, edits: &mut ContainerEdits) {
    if request.spec.cdi.is_empty() {
        return;
    }
    let mut names: Vec<String> = Vec::new();
    for name in request
        .devices
        .iter()
        .flat_map(|device| definitions(request, device))
        .map(|definition| definition.qualified())
    {
        // Several ports of one card share its hook.
        if !names.contains(&name) {
            names.push(name);
        }
    }
    edits.devices.clear();
    edits.cdi_devices.clear();
    if request.spec.cdi.contains(&CdiAnswer::Annotations) && !names.is_empty() {
        edits
            .annotations
            .insert(format!("{ANNOTATION_PREFIX}holdfast_{}", request.alloc_id), names.join(","));
    }
    if request.spec.cdi.contains(&CdiAnswer::Cri) {
        edits.cdi_devices = names;
    }
}

/// The definitions for a device: its nodes, if they are passed by CDI, and Intel's hook.
fn definitions(request: &Request<'_>, device: &Device) -> Vec<Definition> {
    let spec = request.spec;
    let mut definitions = Vec::new();
    if !spec.cdi.is_empty() {
        let nodes = by_contract(&Request { devices: &[device], ..*request }).devices;
        let edits =
            Edits { device_nodes: nodes.into_iter().map(Node::from).collect(), ..Edits::default() };
        definitions.push(Definition::of_nodes(spec, device, edits));
    }
    definitions.retain(|definition| !definition.edits.device_nodes.is_empty());
    definitions.extend(has_hook(spec).then(|| Definition::of_hook(device)));
    definitions
}

/// A name, with its edits for the runtime.
struct Definition {
    /// `vendor/class`.
    kind: String,
    name: String,
    edits: Edits,
}

impl Definition {
    fn of_nodes(spec: &ResourceSpec, device: &Device, edits: Edits) -> Self {
        Definition { kind: kind(spec), name: name(spec, device), edits }
    }

    fn of_hook(device: &Device) -> Self {
        let edits = Edits { hooks: vec![FPGA_HOOK], ..Edits::default() };
        Definition {
            kind: intel_fpga::CDI_KIND.to_owned(),
            name: intel_fpga::region(device).to_owned(),
            edits,
        }
    }

    fn qualified(&self) -> String {
        format!("{}={}", self.kind, self.name)
    }

    fn file(&self) -> Option<SpecFile> {
        let text = text(&self.kind, &[(&self.name, &self.edits)])?;
        Some(SpecFile { name: file_name(&self.qualified()), text })
    }
}

/// The text of a file that defines these names of a kind. It has the lowest CDI version that
/// supports their edits.
pub(super) fn text(kind: &str, devices: &[(&str, &Edits)]) -> Option<String> {
    let is_number = |name: &str| name.starts_with(|c: char| c.is_ascii_digit());
    let is_elsewhere =
        |edits: &Edits| edits.device_nodes.iter().any(|node| node.host_path.is_some());
    let is_newer = |(name, edits): &(&str, &Edits)| is_number(name) || is_elsewhere(edits);
    let document = Spec {
        cdi_version: if devices.iter().any(is_newer) { "0.5.0" } else { "0.3.0" },
        kind,
        devices: devices
            .iter()
            .map(|(name, container_edits)| SpecDevice { name, container_edits })
            .collect(),
    };
    Some(serde_json::to_string_pretty(&document).ok()? + "\n")
}

/// `vendor/class`.
fn kind(spec: &ResourceSpec) -> String {
    match spec.contract {
        Contract::IntelGpu(_) => "intel.cdi.k8s.io/gpu".to_owned(),
        Contract::Sriov(_) if spec.name.prefix().starts_with(|c: char| c.is_ascii_alphabetic()) => {
            let class = match spec.class {
                DeviceClass::Accelerator => "net-accel",
                _ if spec.select.part == Some(true) => "net-sf",
                _ => "net-pci",
            };
            format!("{}/{class}", spec.name.prefix())
        }
        _ => format!("holdfast.dev/{}", spec.class),
    }
}

/// The name of a device within its kind.
fn name(spec: &ResourceSpec, device: &Device) -> String {
    let name = match spec.contract {
        Contract::IntelGpu(_) | Contract::Sriov(_) => address(device),
        _ => device.id.to_string(),
    };
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    if name.chars().all(fits) && is_end(name.chars().next()) && is_end(name.chars().last()) {
        return name;
    }
    // Characters that CDI forbids are replaced. The checksum keeps names distinct that are equal
    // afterwards.
    let plain: String = name.chars().map(|c| if fits(c) { c } else { '_' }).collect();
    format!("d{plain}-{:08x}", crc32fast::hash(name.as_bytes()))
}

fn has_hook(spec: &ResourceSpec) -> bool {
    matches!(&spec.contract, Contract::IntelFpga(options) if options.mode == FpgaMode::Region)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    cdi_version: &'static str,
    kind: &'a str,
    devices: Vec<SpecDevice<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice<'a> {
    name: &'a str,
    container_edits: &'a Edits,
}

/// What a runtime changes in a container for a name.
#[derive(Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<Node>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
}

/// Everything but the annotations, which CDI does not have, and the names of other files.
impl From<&ContainerEdits> for Edits {
    fn from(edits: &ContainerEdits) -> Self {
        Edits {
            env: edits.envs.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            device_nodes: edits.devices.iter().cloned().map(Node::from).collect(),
            hooks: Vec::new(),
            mounts: edits.mounts.iter().cloned().map(Mount::from).collect(),
        }
    }
}

#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: String,
    /// Only set if the host path differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_path: Option<String>,
    permissions: String,
}

impl From<EditDevice> for Node {
    fn from(node: EditDevice) -> Self {
        let host_path = (node.host != node.container).then_some(node.host);
        Node { path: node.container, host_path, permissions: node.permissions }
    }
}

#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Hook {
    hook_name: &'static str,
    path: &'static str,
}

#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    options: [&'static str; 3],
}

/// With the options that containerd gives a mount of the kubelet.
impl From<EditMount> for Mount {
    fn from(mount: EditMount) -> Self {
        let access = if mount.read_only { "ro" } else { "rw" };
        Mount {
            host_path: mount.host,
            container_path: mount.container,
            options: ["rbind", "rprivate", access],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{ALLOC_ID, device, edits_of, function, golden, spec};
    use super::*;
    use crate::domain::{
        ContractKind, DeviceId, DeviceNode, IntelFpgaOptions, Select, SriovOptions,
    };
    use std::collections::BTreeSet;

    fn with_cdi(spec: ResourceSpec) -> ResourceSpec {
        ResourceSpec { cdi: vec![CdiAnswer::Cri, CdiAnswer::Annotations], ..spec }
    }

    fn files_of(spec: &ResourceSpec, devices: &[&Device]) -> Vec<SpecFile> {
        files(spec, devices.iter().copied(), &|_| true)
    }

    #[test]
    fn names_stand_for_the_nodes_and_everything_else_stays_in_the_answer() {
        let spec = with_cdi(spec("intel.com/dpdk", ContractKind::Sriov));
        let mut vf = function("0000:3b:00.2", "vfio-pci", &["/dev/vfio/vfio"]);
        vf.nodes.push(DeviceNode {
            container: "/dev/vfio/7".into(),
            ..DeviceNode::at("/dev/vfio/noiommu-7")
        });
        let interface = function("0000:3b:02.0", "iavf", &[]);
        let edits = edits_of(&spec, &[&vf, &interface, &vf]);
        assert_eq!(golden(&edits), include_str!("golden/cdi-answer.json").trim_end());
        // A device without nodes would be refused by a runtime.
        let files = files_of(&spec, &[&vf, &interface]);
        let file = SpecFile {
            name: "holdfast-intel.com+net-pci@0000:3b:00.2.json".into(),
            text: include_str!("golden/cdi-spec-sriov.json").into(),
        };
        assert_eq!(files, [file]);
        assert_eq!(
            names(&edits).map(file_name).collect::<BTreeSet<_>>(),
            BTreeSet::from([files[0].name.clone()])
        );
    }

    #[test]
    fn scalable_functions_have_a_kind_of_their_own() {
        let of_functions = spec("nvidia.com/sf", Contract::Sriov(SriovOptions::default()));
        let select = Select { part: Some(true), ..Select::default() };
        assert_eq!(kind(&of_functions), "nvidia.com/net-pci");
        assert_eq!(kind(&ResourceSpec { select, ..of_functions }), "nvidia.com/net-sf");
    }

    #[test]
    fn a_file_has_the_lowest_version_that_it_needs() {
        let fuse = device("misc:fuse", &["/dev/fuse"], &[]);
        let generic = with_cdi(spec("example.com/fuse", ContractKind::Generic));
        assert_eq!(
            files_of(&generic, &[&fuse])[0].text,
            include_str!("golden/cdi-spec-generic.json")
        );
        let version = |spec: &ResourceSpec, device: &Device| {
            let document: serde_json::Value =
                serde_json::from_str(&files_of(spec, &[device])[0].text).unwrap();
            document["cdiVersion"].as_str().unwrap().to_owned()
        };
        assert_eq!(version(&generic, &fuse), "0.3.0");
        assert_eq!(
            version(&generic, &function("0000:18:00.0", "nvme", &["/dev/nvme0n1"])),
            "0.5.0",
            "a digit in front"
        );
        let elsewhere = DeviceNode { host: "/dev/fuse1".into(), ..DeviceNode::at("/dev/fuse") };
        assert_eq!(
            version(&generic, &Device { nodes: vec![elsewhere], ..fuse }),
            "0.5.0",
            "another path in the container"
        );
    }

    #[test]
    fn the_hook_of_an_fpga_always_has_a_file() {
        let region = Contract::IntelFpga(IntelFpgaOptions { mode: FpgaMode::Region });
        let card = device("0000:b1:00.0", &["/dev/dfl-port.0"], &[("fme_node", "/dev/dfl-fme.0")]);
        let plain = spec("fpga.intel.com/region", region);
        assert_eq!(files_of(&plain, &[&card])[0].text, include_str!("golden/cdi-spec-fpga.json"));
        assert_eq!(edits_of(&plain, &[&card]).devices.len(), 1, "the nodes stay in the answer");
        let whole = with_cdi(plain);
        let other = Device {
            id: DeviceId::new("0000:b1:00.0-port1"),
            nodes: vec![DeviceNode::at("/dev/dfl-port.1")],
            ..card.clone()
        };
        let edits = edits_of(&whole, &[&card, &other]);
        let names = [
            "holdfast.dev/other=0000:b1:00.0",
            "intel.cdi.k8s.io/fpga=dfl-fme.0",
            "holdfast.dev/other=0000:b1:00.0-port1",
        ];
        assert_eq!(
            (edits.devices.len(), edits.cdi_devices),
            (0, names.map(str::to_owned).to_vec())
        );
        let written: BTreeSet<String> =
            files_of(&whole, &[&card, &other]).into_iter().map(|file| file.name).collect();
        assert_eq!(written, names.map(file_name).into());
        assert_eq!(
            [&card, &other]
                .iter()
                .flat_map(|device| file_names_of(&whole, device))
                .collect::<BTreeSet<_>>(),
            written
        );
    }

    #[test]
    fn a_resource_without_cdi_has_no_file() {
        let fuse = device("misc:fuse", &["/dev/fuse"], &[]);
        let plain = spec("example.com/fuse", ContractKind::Generic);
        assert!(!is_used(&plain) && files_of(&plain, &[&fuse]).is_empty());
        let edits = edits_of(&plain, &[&fuse]);
        assert!(names(&edits).next().is_none() && !edits.devices.is_empty());
    }

    #[test]
    fn every_name_is_one_that_cdi_allows_and_no_two_devices_share_one() {
        let spec = with_cdi(spec("example.com/x", ContractKind::Generic));
        let ids = [
            "misc:fuse",
            "0000:3b:00.2",
            "usb-A+B-0:0",
            "usb-A@B-0:0",
            "_x",
            "x_",
            "é",
            "x/y=z",
            "GPU-1",
            "a b",
        ];
        let mut found = BTreeSet::new();
        for id in ids {
            let name = name(&spec, &device(id, &[], &[]));
            let bytes = name.as_bytes();
            assert!(
                bytes[0].is_ascii_alphanumeric() && bytes[bytes.len() - 1].is_ascii_alphanumeric(),
                "{id}: {name}"
            );
            assert!(
                name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.:".contains(c)),
                "{id}: {name}"
            );
            assert!(found.insert(file_name(&format!("{}={name}", kind(&spec)))), "{id}: {name}");
        }
        assert!(
            found.contains("holdfast-holdfast.dev+other@misc:fuse.json"),
            "allowed characters stay"
        );
    }

    #[test]
    fn the_annotation_of_each_answer_has_a_key_of_its_own() {
        let spec = with_cdi(spec("example.com/fuse", ContractKind::Generic));
        let edits = edits_of(&spec, &[&device("misc:fuse", &["/dev/fuse"], &[])]);
        let key = edits.annotations.keys().next().unwrap();
        assert_eq!(*key, format!("cdi.k8s.io/holdfast_{ALLOC_ID}"));
        assert!(key.len() - "cdi.k8s.io/".len() <= 63, "Kubernetes allows no longer one");
    }
}
