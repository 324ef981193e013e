//! NVIDIA GPUs: their nodes, identity, MIG instances, and what NVML must be asked.
//!
//! The driver makes no class device in sysfs. Identity and minor number are in
//! `/proc/driver/nvidia/gpus/<address>/information` (text of the driver's `nv-procfs.c`).
//!
//! MIG instances are not in sysfs either. Each has a folder below
//! `/proc/driver/nvidia/capabilities/gpu<minor>/mig`. A container needs the nodes of both of its
//! capabilities in addition to the GPU's own (NVIDIA's MIG user guide, "Device nodes and
//! capabilities").
//!
//! Before driver 470 an instance was named
//! `MIG-<UUID of the GPU>/<GPU instance>/<compute instance>`. Since then it has a UUID of its own
//! (the same guide, "CUDA visible devices"), which only NVML reports. NVML also reports which GPUs
//! are connected by NVLink. [`query`] lists what NVML must be asked. The ids of instances do not
//! depend on the answer, which may come late or never.
//!
//! In MIG mode a GPU cannot be used as a whole, even while it has no instance: between two layouts,
//! and on some GPUs after each boot. The folder exists in either mode, so only NVML reports the
//! mode.

use super::facts::{Facts, Part, optional, required, without_parts};
use super::pci::{folder, is_numbered};
use super::select::Selection;
use super::tegra;
use crate::domain::{
    Device, DeviceClass, DeviceNode, MigPlace, NvmlGpuQuery, NvmlQuery, NvmlSnapshot, PciAddress,
    PciFunction,
};
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// PCI vendor id of NVIDIA.
pub(super) const VENDOR: u16 = 0x10de;
/// The kernel driver whose GPUs CUDA can use.
pub(super) const DRIVER: &str = "nvidia";
/// The first driver release whose MIG instances have their own UUIDs.
const FIRST_WITH_MIG_UUIDS: u32 = 470;

pub(super) fn facts(
    root: &HostRoot,
    function: &PciFunction,
    gpus: &Gpus,
    nvml: &NvmlSnapshot,
) -> Facts {
    let mut facts = Facts::default();
    if function.driver.as_deref() != Some(DRIVER) {
        return facts;
    }
    let Information { model, minor, uuid, is_excluded } =
        gpus.by_address.get(&function.address).cloned().unwrap_or_default();
    facts.note("excluded", is_excluded.then_some(true));
    let uuid = uuid.or_else(|| nvml.uuid(function.address).map(str::to_owned));
    facts.nodes.extend(minor.as_ref().map(|minor| required(format!("/dev/nvidia{minor}"))));
    facts.nodes.push(required("/dev/nvidiactl"));
    // Created on first use (nvidia-modprobe), or never if the module is not loaded: their absence
    // is no fault.
    facts
        .nodes
        .extend(["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"].map(optional));
    facts.nodes.iter_mut().for_each(|node| place(root, node));
    facts.note("model", model);
    if let Some(minor) = &minor {
        let gpu = CutGpu {
            address: function.address,
            minor,
            uuid: uuid.as_deref(),
            index: gpus.index(function.address),
        };
        cut_into_instances(root, &mut facts, &gpu, nvml);
    }
    if facts.parts_are.is_none() && nvml.is_in_mig_mode(function.address) {
        facts.cut("mig", Vec::new());
    }
    facts.note("minor", minor);
    facts.note("index", gpus.index(function.address));
    facts.note("uuid", uuid.clone());
    if function.is_vf() {
        // Since driver 550 a virtual function is set to a type, without a mediated device; 0 is
        // none.
        let kind = root.read(&format!("{}/nvidia/current_vgpu_type", folder(function.address)));
        facts.note("vgpu_type", kind.filter(|kind| kind != "0"));
    } else {
        facts.identity = uuid;
    }
    if facts.attributes.get("model").is_some_and(tegra::is_model) {
        tegra::mark(root, &mut facts, &gpus.nodes_beside(function.address));
    }
    facts
}

/// Finds a node of `/dev` on the host: a driver in a container makes its nodes below the root of
/// that container. The container of a pod gets it at the usual path.
pub(super) fn place(root: &HostRoot, node: &mut DeviceNode) {
    let below = |of: &str| format!("{of}{}", node.host);
    let roots = root.nvidia().of_nodes();
    let found = roots.into_iter().map(below).find(|path| root.node_exists(path));
    node.host = found.unwrap_or_else(|| below(root.nvidia().of_missing_nodes()));
}

/// Warnings for the operator about GPUs in MIG mode without a usable instance, one sentence each.
pub(super) fn without_instances(devices: &[Arc<Device>]) -> Vec<String> {
    let why = "it is in MIG mode without an instance; create instances with \
                   `nvidia-smi mig -cgi <profiles> -C`, or end the mode with `nvidia-smi -mig 0`";
    without_parts(devices, "mig", why)
}

/// What the driver's files do not contain, and NVML must be asked:
///
/// - the UUID of GPUs that show none;
/// - the MIG instances of a driver that gives them UUIDs;
/// - whether a GPU is in MIG mode;
/// - the links between GPUs that a resource offers as wholes. MIG instances have no links;
/// - the description of every GPU, and the size of its MIG instances, if labels need them.
pub(super) fn query(root: &HostRoot, offered: &Selection, described: bool) -> NvmlQuery {
    let gpus = Gpus::read(root);
    if gpus.by_address.is_empty() {
        return NvmlQuery::new();
    }
    let by_place = names_by_place(root);
    // NVML does not know excluded GPUs.
    let known: BTreeMap<PciAddress, Information> =
        gpus.by_address.into_iter().filter(|(_, gpu)| !gpu.is_excluded).collect();
    let of_gpu = |(gpu, information): (&PciAddress, &Information)| {
        let minor = information.minor.as_ref();
        let instances =
            minor.filter(|_| !by_place).map(|minor| places(root, minor)).unwrap_or_default();
        let uuid = information.uuid.is_none() || !instances.is_empty();
        // Also queried of a GPU with instances: the answer is needed as soon as its instances are
        // removed.
        let mig_mode = minor.is_some_and(|minor| root.is_dir(&mig_folder(minor)));
        (uuid || mig_mode || described)
            .then_some((*gpu, NvmlGpuQuery { uuid, instances, mig_mode, links: false, described }))
    };
    let linked = offered.resources.values().flat_map(|devices| {
        let wholes: Vec<PciAddress> = devices.iter().filter_map(|device| whole(device)).collect();
        if wholes.len() > 1 { wholes } else { Vec::new() }
    });
    let linked: BTreeSet<PciAddress> = linked.filter(|gpu| known.contains_key(gpu)).collect();
    let mut query: NvmlQuery = known.iter().filter_map(of_gpu).collect();
    for gpu in linked {
        query.entry(gpu).or_default().links = true;
    }
    query
}

/// The function that NVIDIA's driver reports errors of a GPU for: the physical function of a
/// virtual one, and the GPU of a MIG instance.
#[must_use]
pub fn nvidia_gpu(device: &Device) -> Option<PciAddress> {
    let function = device.pci.as_deref().filter(|_| device.class == DeviceClass::Gpu)?;
    let is_driven = function.vendor == Some(VENDOR) && function.driver.as_deref() == Some(DRIVER);
    is_driven.then(|| function.physfn.unwrap_or(function.address))
}

/// The address of a GPU that the host's driver uses as one whole.
fn whole(device: &Device) -> Option<PciAddress> {
    let function = device
        .pci
        .as_deref()
        .filter(|_| device.class == DeviceClass::Gpu && device.attribute("part").is_none())?;
    (function.driver.as_deref() == Some(DRIVER) && !function.is_vf()).then_some(function.address)
}

/// The folder of a GPU's MIG instances. A driver without MIG support has no such folder.
fn mig_folder(minor: &str) -> String {
    format!("proc/driver/nvidia/capabilities/gpu{minor}/mig")
}

fn places(root: &HostRoot, minor: &str) -> BTreeSet<MigPlace> {
    let dir = mig_folder(minor);
    let of = |gi: String| {
        let instances = numbered(root, &format!("{dir}/gi{gi}"), "ci");
        instances.into_iter().filter_map(move |ci| Some((gi.parse().ok()?, ci.parse().ok()?)))
    };
    numbered(root, &dir, "gi").into_iter().flat_map(of).collect()
}

/// The driver's GPUs, read once for a whole scan.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    by_address: BTreeMap<PciAddress, Information>,
    /// Whether the platform has a GPU that is no PCI function. It is the first one.
    pub(super) has_platform: bool,
}

impl Gpus {
    pub(super) fn read(root: &HostRoot) -> Self {
        let addresses = root
            .entries("proc/driver/nvidia/gpus")
            .into_iter()
            .filter_map(|name| name.parse().ok());
        let by_address = addresses.map(|gpu| (gpu, Information::read(root, gpu))).collect();
        Gpus { by_address, has_platform: false }
    }

    /// Whether one of them is the GPU of a Tegra system.
    pub(super) fn has_integrated(&self) -> bool {
        self.by_address.values().any(|gpu| gpu.model.as_deref().is_some_and(tegra::is_model))
    }

    /// The nodes of the other GPUs.
    fn nodes_beside(&self, gpu: PciAddress) -> BTreeSet<String> {
        let others = self.by_address.iter().filter(|(address, _)| **address != gpu);
        let minors = others.filter_map(|(_, information)| information.minor.as_ref());
        minors.map(|minor| format!("/dev/nvidia{minor}")).collect()
    }

    /// The number of a GPU as NVIDIA's tools count: in the order of addresses, without excluded
    /// GPUs.
    fn index(&self, gpu: PciAddress) -> Option<usize> {
        let place = self
            .by_address
            .iter()
            .filter(|(_, information)| !information.is_excluded)
            .position(|(address, _)| *address == gpu)?;
        Some(place + usize::from(self.has_platform))
    }
}

/// The driver's values for a GPU in `/proc`.
#[derive(Debug, Clone, Default)]
struct Information {
    model: Option<String>,
    minor: Option<String>,
    uuid: Option<String>,
    /// The driver was configured to exclude it (its parameter `ExcludedGpus`, or the board's
    /// controller). No process can open it.
    is_excluded: bool,
}

impl Information {
    fn read(root: &HostRoot, gpu: PciAddress) -> Self {
        let text =
            root.read(&format!("proc/driver/nvidia/gpus/{gpu}/information")).unwrap_or_default();
        Information {
            model: field(&text, "Model"),
            minor: field(&text, "Device Minor").filter(|minor| minor.parse::<u32>().is_ok()),
            // Until a GPU was initialised once, its UUID is shown with question marks.
            uuid: field(&text, "GPU UUID").filter(|uuid| !uuid.contains('?')),
            // Drivers before 455 use the second name.
            is_excluded: ["GPU Excluded", "Blacklisted"]
                .iter()
                .any(|name| field(&text, name).as_deref() == Some("Yes")),
        }
    }
}

/// The numbers of the entries `<prefix><number>` of a folder.
fn numbered(root: &HostRoot, dir: &str, prefix: &str) -> Vec<String> {
    root.entries(dir)
        .iter()
        .filter(|entry| is_numbered(entry, prefix))
        .map(|entry| entry[prefix.len()..].to_owned())
        .collect()
}

/// A GPU that may be cut into instances.
struct CutGpu<'a> {
    address: PciAddress,
    minor: &'a str,
    uuid: Option<&'a str>,
    index: Option<usize>,
}

/// Cuts a GPU with GPU instances into its compute instances: only these can be used.
fn cut_into_instances(root: &HostRoot, facts: &mut Facts, gpu: &CutGpu<'_>, nvml: &NvmlSnapshot) {
    let CutGpu { address, minor, uuid, index } = *gpu;
    let dir = mig_folder(minor);
    let instances = numbered(root, &dir, "gi");
    if instances.is_empty() {
        return;
    }
    let minors = root.read("proc/driver/nvidia-caps/mig-minors").unwrap_or_default();
    let (by_place, places) = (names_by_place(root), places(root, minor));
    let mut parts = Vec::new();
    for gi in instances {
        let capability = |path: &str| {
            let access = root
                .read(&format!("{dir}/{path}/access"))
                .and_then(|text| field(&text, "DeviceFileMinor"));
            // The same numbers are also in one list: `gpu0/gi1/ci0/access 13`.
            let listed = || {
                minors
                    .lines()
                    .find_map(|line| line.strip_prefix(&format!("gpu{minor}/{path}/access ")))
                    .map(str::to_owned)
            };
            access.or_else(listed).filter(|minor| minor.parse::<u32>().is_ok())
        };
        let gi_cap = capability(&format!("gi{gi}"));
        for ci in numbered(root, &format!("{dir}/gi{gi}"), "ci") {
            // Without both capabilities a container cannot use the instance.
            let Some((gi_cap, ci_cap)) = gi_cap.clone().zip(capability(&format!("gi{gi}/ci{ci}")))
            else {
                continue;
            };
            let mut instance = Facts { nodes: facts.nodes.clone(), ..Facts::default() };
            let caps = [&gi_cap, &ci_cap]
                .map(|minor| required(format!("/dev/nvidia-caps/nvidia-cap{minor}")));
            instance.nodes.extend(caps.map(|mut node| {
                place(root, &mut node);
                node
            }));
            let of_its_place =
                || uuid.filter(|_| by_place).map(|uuid| format!("MIG-{uuid}/{gi}/{ci}"));
            let place: Option<MigPlace> = gi.parse().ok().zip(ci.parse().ok());
            let known = place.and_then(|place| nvml.instance(address, place));
            let number = place.and_then(|place| nvml.index(address, place, &places));
            // As NVIDIA's tools and plugin count: the GPU, and its instance.
            instance.note("index", index.zip(number).map(|(gpu, own)| format!("{gpu}:{own}")));
            instance.note("uuid", known.map(|it| it.uuid.clone()).or_else(of_its_place));
            instance.note("mig_profile", known.and_then(|it| it.profile.as_deref()));
            instance.note("model", facts.attributes.get("model"));
            for (name, value) in
                [("gi", &gi), ("ci", &ci), ("gi_cap", &gi_cap), ("ci_cap", &ci_cap)]
            {
                instance.note(name, Some(value));
            }
            parts.push(Part { name: format!("gi{gi}-ci{ci}"), facts: instance });
        }
    }
    facts.cut("mig", parts);
}

/// Whether the driver names a MIG instance by its place.
fn names_by_place(root: &HostRoot) -> bool {
    driver_release(root).is_some_and(|release| release < FIRST_WITH_MIG_UUIDS)
}

/// The first number of the release that the kernel has loaded: 470.
fn driver_release(root: &HostRoot) -> Option<u32> {
    driver_version(root)?.split_once('.')?.0.parse().ok()
}

/// The version of NVIDIA's driver, `470.57.02` (`/proc/driver/nvidia/version`). `None` if it is not
/// loaded.
#[must_use]
pub fn driver_version(root: &HostRoot) -> Option<String> {
    let version = field(&root.read("proc/driver/nvidia/version")?, "NVRM version")?;
    let is_version = |word: &&str| {
        word.split_once('.').is_some_and(|(release, _)| release.parse::<u32>().is_ok())
    };
    version.split_whitespace().find(is_version).map(str::to_owned)
}

/// The value of a line such as `GPU UUID: \t GPU-0473…`.
fn field(information: &str, name: &str) -> Option<String> {
    let value = information
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?
        .trim();
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::Scan;
    use super::super::describe::Describer;
    use super::super::disks::Disks;
    use super::super::testing::{device, function, write};
    use super::*;
    use crate::domain::{MigInstance, NvidiaRoots};
    use std::fs;

    fn gpu() -> PciFunction {
        PciFunction {
            vendor: Some(VENDOR),
            driver: Some(DRIVER.into()),
            ..function("0004:04:00.0")
        }
    }

    fn facts(root: &HostRoot, function: &PciFunction, nvml: &NvmlSnapshot) -> Facts {
        super::facts(root, function, &Gpus::read(root), nvml)
    }

    #[test]
    fn an_excluded_gpu_is_marked_and_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        // The format of driver 580.
        let text = |uuid: &str, minor: u8, excluded: &str| {
            format!(
                "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.da.00.0c\nBus Type: \t PCIe\n\
                 DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t 0004:04:00.0\nDevice Minor: \t {minor}\n\
                 GPU Firmware: \t 580.159.04\n{excluded}\n"
            )
        };
        let seen = |excluded: &str| {
            write(
                dir.path(),
                "proc/driver/nvidia/gpus/0004:03:00.0/information",
                &text("GPU-????????", 0, excluded),
            );
            write(
                dir.path(),
                "proc/driver/nvidia/gpus/0004:04:00.0/information",
                &text("GPU-1", 1, "GPU Excluded:\t No"),
            );
            let [first, second] = ["0004:03:00.0", "0004:04:00.0"].map(|address| {
                facts(
                    &root,
                    &PciFunction { address: address.parse().unwrap(), ..gpu() },
                    &NvmlSnapshot::default(),
                )
                .attributes
            });
            let wanted = query(&root, &Selection::default(), false).len();
            (
                first.contains_key("excluded"),
                first.get("index").map(str::to_owned),
                second.contains_key("excluded"),
                second["index"].to_owned(),
                wanted,
            )
        };
        for excluded in ["GPU Excluded:\t Yes", "Blacklisted:\t Yes"] {
            assert_eq!(seen(excluded), (true, None, false, "0".into(), 0), "{excluded}");
        }
        for excluded in ["GPU Excluded:\t No", "Blacklisted:\t No", ""] {
            assert_eq!(
                seen(excluded),
                (false, Some("0".into()), false, "1".into(), 1),
                "{excluded}"
            );
        }
    }

    #[test]
    fn identity_and_minor_come_from_procfs() {
        let dir = tempfile::tempdir().unwrap();
        let text = "Model: \t\t Tesla V100\nIRQ:   \t\t 33\nGPU UUID: \t GPU-04732404-7fc3\nDevice Minor: \t 3\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", text);
        write(
            dir.path(),
            "proc/driver/nvidia/gpus/0004:03:00.0/information",
            "Device Minor: \t 0\n",
        );
        let facts = facts(&HostRoot::new(dir.path()), &gpu(), &NvmlSnapshot::default());
        assert_eq!(facts.identity.as_deref(), Some("GPU-04732404-7fc3"));
        assert_eq!(facts.nodes[0].host, "/dev/nvidia3");
        assert_eq!(
            &facts.attributes["index"], "1",
            "the minor number is not the number of NVIDIA's tools"
        );
        assert_eq!(&facts.attributes["model"], "Tesla V100");
    }

    #[test]
    fn a_uuid_of_question_marks_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let text = "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 0\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", text);
        let facts = facts(&HostRoot::new(dir.path()), &gpu(), &NvmlSnapshot::default());
        assert_eq!(facts.identity, None);
        assert!(!facts.attributes.contains_key("uuid"));
    }

    #[test]
    fn a_gpu_that_is_cut_is_offered_instance_by_instance() {
        let dir = tempfile::tempdir().unwrap();
        let information = "Model: \t H100\nGPU UUID: \t GPU-1\nDevice Minor: \t 2\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", information);
        let mig = "proc/driver/nvidia/capabilities/gpu2/mig";
        write(
            dir.path(),
            &format!("{mig}/gi1/access"),
            "DeviceFileMinor: 300\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
        );
        write(dir.path(), &format!("{mig}/gi1/ci0/access"), "DeviceFileMinor: 301\n");
        // This minor number is only in the list.
        write(dir.path(), &format!("{mig}/gi11/ci1/access"), "");
        write(
            dir.path(),
            "proc/driver/nvidia-caps/mig-minors",
            "config 1\ngpu2/gi11/access 390\ngpu2/gi11/ci1/access 391\n",
        );
        // The capabilities of this instance are unknown.
        write(dir.path(), &format!("{mig}/gi9/ci0/access"), "DeviceFileMinor: none\n");
        let facts = facts(&HostRoot::new(dir.path()), &gpu(), &NvmlSnapshot::default());
        assert_eq!(facts.parts_are, Some("mig"));
        let parts: Vec<_> = facts.parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(parts, ["gi1-ci0", "gi11-ci1"]);
        let nodes = |part: usize| -> Vec<&str> {
            let required = facts.parts[part].facts.nodes.iter().filter(|node| node.required);
            required.map(|node| node.host.as_str()).collect()
        };
        assert_eq!(
            nodes(0),
            [
                "/dev/nvidia2",
                "/dev/nvidiactl",
                "/dev/nvidia-caps/nvidia-cap300",
                "/dev/nvidia-caps/nvidia-cap301"
            ]
        );
        assert_eq!(
            nodes(1)[2..],
            ["/dev/nvidia-caps/nvidia-cap390", "/dev/nvidia-caps/nvidia-cap391"]
        );
        let attributes = &facts.parts[0].facts.attributes;
        assert_eq!((&attributes["gi"], &attributes["ci"]), ("1", "0"));
        assert!(!attributes.contains_key("minor"), "that would name the whole GPU");
    }

    #[test]
    fn nodes_are_those_of_the_configured_root() {
        let dir = tempfile::tempdir().unwrap();
        let information = "GPU UUID: \t GPU-1\nDevice Minor: \t 2\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", information);
        for node in
            ["dev/nvidia2", "dev/nvidiactl", "run/nvidia/driver/dev/nvidiactl", "x/dev/nvidia2"]
        {
            write(dir.path(), node, "");
        }
        let hosts = |driver: Option<&str>, dev: Option<&str>| {
            let [driver, dev] = [driver, dev].map(|root| root.map(str::to_owned));
            let root = HostRoot::new(dir.path()).with_nvidia(&NvidiaRoots { driver, dev });
            let nodes = facts(&root, &gpu(), &NvmlSnapshot::default()).nodes;
            let required: Vec<DeviceNode> =
                nodes.into_iter().filter(|node| node.required).collect();
            assert!(required.iter().all(|node| node.container.starts_with("/dev/nvidia")));
            required.into_iter().map(|node| node.host).collect::<Vec<_>>()
        };
        assert_eq!(hosts(None, None), ["/dev/nvidia2", "/dev/nvidiactl"]);
        assert_eq!(hosts(Some("/x"), None), ["/x/dev/nvidia2", "/dev/nvidiactl"]);
        assert_eq!(hosts(Some("/x"), Some("")), ["/dev/nvidia2", "/dev/nvidiactl"]);
        // A node that is missing there is missing.
        assert_eq!(hosts(None, Some("/x")), ["/x/dev/nvidia2", "/x/dev/nvidiactl"]);
    }

    #[test]
    fn only_old_drivers_name_an_instance_by_its_place() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            "proc/driver/nvidia/gpus/0004:04:00.0/information",
            "GPU UUID: \t GPU-1\nDevice Minor: \t 2\n",
        );
        let mig = "proc/driver/nvidia/capabilities/gpu2/mig";
        write(dir.path(), &format!("{mig}/gi1/access"), "DeviceFileMinor: 300\n");
        write(dir.path(), &format!("{mig}/gi1/ci0/access"), "DeviceFileMinor: 301\n");
        let uuid = || {
            facts(&HostRoot::new(dir.path()), &gpu(), &NvmlSnapshot::default()).parts[0]
                .facts
                .attributes
                .get("uuid")
                .map(str::to_owned)
        };
        assert_eq!(uuid(), None, "a driver without a version line has an unknown release");
        for (version, expected) in [
            (
                "NVIDIA UNIX x86_64 Kernel Module  460.73.01  Thu Apr  1 21:40:36 UTC 2021",
                Some("MIG-GPU-1/1/0"),
            ),
            ("NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021", None),
            (
                "NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder)",
                None,
            ),
        ] {
            write(
                dir.path(),
                "proc/driver/nvidia/version",
                &format!("NVRM version: {version}\nGCC version: 12.2.0\n"),
            );
            assert_eq!(uuid().as_deref(), expected, "{version}");
        }
    }

    #[test]
    fn nvml_supplies_missing_names_without_renaming() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let known = "GPU UUID: \t GPU-1\nDevice Minor: \t 2\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", known);
        let query = |root: &HostRoot| query(root, &Selection::default(), false);
        assert!(
            query(&root).is_empty() && query(&HostRoot::new(dir.path().join("nothing"))).is_empty()
        );

        write(
            dir.path(),
            "proc/driver/nvidia/gpus/0004:05:00.0/information",
            "GPU UUID: \t GPU-????????\nDevice Minor: \t 3\n",
        );
        for instance in ["gi1/ci0", "gi1/ci1", "gi13/ci0"] {
            let mig = "proc/driver/nvidia/capabilities/gpu2/mig";
            write(dir.path(), &format!("{mig}/{instance}/access"), "DeviceFileMinor: 301\n");
            write(
                dir.path(),
                &format!("{mig}/{}/access", &instance[..instance.len() - 4]),
                "DeviceFileMinor: 300\n",
            );
        }
        let [cut, unused]: [PciAddress; 2] =
            ["0004:04:00.0", "0004:05:00.0"].map(|address| address.parse().unwrap());
        let wanted = query(&root);
        let of_cut =
            NvmlGpuQuery { mig_mode: true, ..NvmlGpuQuery::names([(1, 0), (1, 1), (13, 0)]) };
        assert_eq!(wanted, [(cut, of_cut), (unused, NvmlGpuQuery::names([]))].into());

        let mut nvml = NvmlSnapshot::default();
        let instance = |uuid: &str, index| MigInstance {
            uuid: uuid.into(),
            profile: Some("1g.10gb".into()),
            index: Some(index),
        };
        let known = &mut nvml.gpus.entry(cut).or_default().instances;
        known.insert((13, 0), instance("MIG-a", 2));
        nvml.gpus.entry(unused).or_default().uuid = Some("GPU-2".into());
        let cut_address = cut;
        let cut = facts(&root, &gpu(), &nvml);
        let numbers = |cut: &Facts| -> Vec<Option<String>> {
            let number = |part: &Part| part.facts.attributes.get("index").map(str::to_owned);
            cut.parts.iter().map(number).collect()
        };
        assert_eq!(numbers(&cut), [None, None, None], "NVML has not counted all of them");
        let mut all = nvml.clone();
        let known = &mut all.gpus.entry(cut_address).or_default().instances;
        known.insert((1, 0), instance("MIG-b", 0));
        known.insert((1, 1), instance("MIG-c", 1));
        let places = ["0:0", "0:1", "0:2"].map(|number| Some(number.to_owned()));
        assert_eq!(numbers(&facts(&root, &gpu(), &all)), places);
        let uuids: Vec<_> =
            cut.parts.iter().map(|part| part.facts.attributes.get("uuid")).collect();
        assert_eq!(uuids, [None, None, Some("MIG-a")]);
        assert!(
            cut.parts.iter().all(|part| part.facts.identity.is_none()),
            "its place names it, independent of NVML's answer"
        );
        let unused = facts(&root, &PciFunction { address: unused, ..gpu() }, &nvml);
        assert_eq!(
            (unused.identity.as_deref(), &unused.attributes["uuid"]),
            (Some("GPU-2"), "GPU-2")
        );

        // A driver that names instances by their places needs no answer from NVML.
        write(
            dir.path(),
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  460.73.01  Thu\n",
        );
        let of_cut = NvmlGpuQuery { mig_mode: true, ..NvmlGpuQuery::default() };
        assert_eq!(
            query(&root).into_values().collect::<Vec<_>>(),
            [of_cut, NvmlGpuQuery::names([])]
        );
    }

    #[test]
    fn a_gpu_in_mig_mode_without_instances_is_not_offered_and_warned_of() {
        let dir = tempfile::tempdir().unwrap();
        let (root, address) = (HostRoot::new(dir.path()), gpu().address);
        write(
            dir.path(),
            "proc/driver/nvidia/gpus/0004:04:00.0/information",
            "GPU UUID: \t GPU-1\nDevice Minor: \t 2\n",
        );
        assert!(
            query(&root, &Selection::default(), false).is_empty(),
            "a driver that knows of no MIG"
        );
        fs::create_dir_all(dir.path().join("proc/driver/nvidia/capabilities/gpu2/mig")).unwrap();
        let wanted = NvmlGpuQuery { mig_mode: true, ..NvmlGpuQuery::default() };
        assert_eq!(query(&root, &Selection::default(), false), [(address, wanted)].into());

        let gpu = PciFunction { class: Some(0x03_0200), ..gpu() };
        let scan = Scan::of([(address, gpu.clone())].into());
        let described = |mig_mode| {
            let mut nvml = NvmlSnapshot::default();
            nvml.gpus.entry(address).or_default().mig_mode = mig_mode;
            let devices: Vec<_> = Describer::new(&root, &scan, &nvml, &Disks::of(&root))
                .devices(&gpu)
                .into_iter()
                .map(Arc::new)
                .collect();
            (
                devices[0].attribute("parts").map(str::to_owned),
                devices.len() - 1,
                without_instances(&devices),
            )
        };
        for whole in [None, Some(false)] {
            assert_eq!(described(whole), (None, 0, vec![]), "{whole:?}");
        }
        let (parts_are, parts, warnings) = described(Some(true));
        assert_eq!((parts_are.as_deref(), parts), (Some("mig"), 0));
        assert!(
            warnings[0]
                .starts_with("GPU-1 is not offered, because it is in MIG mode without an instance"),
            "{warnings:?}"
        );
        let mig = "proc/driver/nvidia/capabilities/gpu2/mig";
        for instance in ["gi1", "gi1/ci0"] {
            write(dir.path(), &format!("{mig}/{instance}/access"), "DeviceFileMinor: 300\n");
        }
        for mode in [None, Some(false), Some(true)] {
            assert_eq!(
                described(mode),
                (Some("mig".into()), 1, vec![]),
                "the driver's files show that it is cut"
            );
        }
    }

    #[test]
    fn without_its_driver_a_gpu_has_no_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let facts = facts(
            &HostRoot::new(dir.path()),
            &PciFunction { driver: Some("nouveau".into()), ..gpu() },
            &NvmlSnapshot::default(),
        );
        assert!(facts.nodes.is_empty());
    }

    #[test]
    fn links_are_queried_between_whole_gpus_of_one_resource() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let name = |number: u8| format!("0000:{number:02x}:00.0");
        let gpu = |number: u8| {
            let mut gpu = device(&name(number), &name(number));
            (gpu.class, gpu.pci.as_mut().unwrap().driver) = (DeviceClass::Gpu, Some(DRIVER.into()));
            gpu
        };
        for number in 1..8 {
            write(
                dir.path(),
                &format!("proc/driver/nvidia/gpus/{}/information", name(number)),
                "GPU UUID: \t GPU-1\nDevice Minor: \t 2\n",
            );
        }
        let (mut part, mut function, mut for_a_guest) = (gpu(3), gpu(4), gpu(5));
        part.attributes.insert("part", "mig");
        function.pci.as_mut().unwrap().physfn = name(1).parse().ok();
        for_a_guest.pci.as_mut().unwrap().driver = Some("vfio-pci".into());
        let resource = |name: &str, devices: Vec<Device>| {
            (name.parse().unwrap(), devices.into_iter().map(Arc::new).collect())
        };
        let wanted = |devices| -> Vec<String> {
            let resources =
                [resource("nvidia.com/gpu", devices), resource("nvidia.com/single", vec![gpu(6)])]
                    .into();
            let query = query(&root, &Selection { resources, warnings: Vec::new() }, false);
            assert!(
                query.values().all(
                    |wanted| *wanted == NvmlGpuQuery { links: true, ..NvmlGpuQuery::default() }
                ),
                "{query:?}"
            );
            query.into_keys().map(|gpu| gpu.to_string()).collect()
        };
        assert_eq!(
            wanted(vec![gpu(1), gpu(2), part, function, for_a_guest, gpu(9)]),
            ["0000:01:00.0", "0000:02:00.0"]
        );
        assert!(wanted(vec![gpu(1)]).is_empty(), "a single GPU has no peer");
    }
}
