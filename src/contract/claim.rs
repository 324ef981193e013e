//! What the containers of a claim get: CDI devices, and nothing else.
//!
//! Dynamic Resource Allocation has no other channel to a container. A driver does not learn which
//! containers of the pod use a claim, and a container may have several claims: of a variable that
//! two of them set, the last one wins. So no variable lists devices, and each name of a variable
//! has one value on the node.
//!
//! A claim that the scheduler makes for a pod with a number of a resource is another matter: each
//! of its requests is for one resource of one container. A container has a request whole. So the
//! first of its network functions also has the variables that list them, as in an answer of the
//! device plugin.
//!
//! Each claim has a file of its own. Its devices are those of the claim, each with its edits as the
//! ledger records them. So the file can be written again at each start of the daemon. Only the
//! links to disks are followed then, because a runtime does not follow them in a file.

use super::cdi::{Edits, SpecFile, text};
use super::{Request, add_configured, by_contract, distinct, nodes, nvidia, nvidia_cdi, sriov};
use crate::domain::{
    Allocated, ClaimHold, ClaimRef, ClaimedDevice, ContainerEdits, Contract, Device, DeviceId,
    own_name,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The kind of the names in the files of claims.
pub const KIND: &str = "k8s.holdfast.dev/claim";
/// The beginning of the names of these files.
const FILE_PREFIX: &str = "holdfast-claim-";
const FILE_SUFFIX: &str = ".json";
/// The end of the names of files with the metadata of devices. A runtime does not read them.
const METADATA_SUFFIX: &str = ".metadata";
/// The API server's UIDs have 36 bytes. The name of a file has at most 255.
const UID_MAX: usize = 128;

/// What the containers of a claim get of one device. The edits have the CDI names of other files
/// too, such as the GPU's in the file of NVIDIA's driver. `is_defined` reports whether a file
/// defines such a name. The devices of `request` are those that a container gets together with this
/// one for a number of the resource. There are none if that is not known, or if this one is not the
/// first of them.
#[must_use]
pub fn edits(
    request: &Request<'_>,
    device: &Device,
    is_defined: &dyn Fn(&str) -> bool,
) -> ContainerEdits {
    let together = &Request { devices: &distinct(request.devices), ..*request };
    let request = &Request { devices: &[device], ..*request };
    let mut edits = match &request.spec.contract {
        Contract::Nvidia(options) => {
            let defined = |name: &String| is_defined(&format!("{}/gpu={name}", options.cdi_vendor));
            let names = [nvidia_cdi::lasting_name, nvidia_cdi::name];
            let name = names.iter().filter_map(|name| name(request.spec, device)).find(defined);
            nvidia::claimed(request, options, name.as_deref())
        }
        Contract::Sriov(options) => sriov::claimed(request, options, together),
        _ => by_contract(request),
    };
    // CDI has no annotations of containers.
    edits.annotations.clear();
    add_configured(request, &mut edits);
    nodes::use_lasting_paths(request.devices, &mut edits);
    edits
}

/// A device of a prepared claim, with these edits. `name` is that of the id, which for a part of a
/// device's capacity is not the allocated one. A device without content has no CDI device of its
/// own, because a runtime would refuse it.
#[must_use]
pub fn claimed(
    claim: &ClaimRef,
    allocated: Allocated,
    name: &str,
    id: DeviceId,
    mut edits: ContainerEdits,
) -> ClaimedDevice {
    let mut cdi_devices = std::mem::take(&mut edits.cdi_devices);
    if Edits::from(&edits) != Edits::default() {
        cdi_devices.push(format!("{KIND}={}-{name}", claim.uid));
    }
    ClaimedDevice { allocated, id, cdi_devices, edits, metadata: String::new() }
}

/// The file of a claim: the devices of all its grants. `real_path` follows a link to a node; a link
/// that leads nowhere stays, so that the runtime reports it. `None` if none of the devices has
/// content, or if the UID is not one that may be a part of a path.
#[must_use]
pub fn file<'a>(
    claim: &ClaimRef,
    holds: impl IntoIterator<Item = &'a ClaimHold>,
    real_path: &dyn Fn(&str) -> Option<String>,
) -> Option<SpecFile> {
    let name = file_name(&claim.uid)?;
    let devices = holds.into_iter().flat_map(|hold| &hold.devices);
    let edits_of = |device: &ClaimedDevice| {
        let mut edits = device.edits.clone();
        for node in &mut edits.devices {
            node.host = real_path(&node.host).unwrap_or_else(|| std::mem::take(&mut node.host));
        }
        Edits::from(&edits)
    };
    // Two shares of one device are two devices of the API; one that is allocated twice is one.
    let edits: BTreeMap<String, Edits> = devices
        .map(|device| (device_name(claim, device), edits_of(device)))
        .filter(|(_, edits)| *edits != Edits::default())
        .collect();
    let devices: Vec<(&str, &Edits)> =
        edits.iter().map(|(name, edits)| (name.as_str(), edits)).collect();
    let text = (!devices.is_empty()).then(|| text(KIND, &devices)).flatten()?;
    Some(SpecFile { name, text })
}

/// Whether the holds have the content of each of their devices in the file. A device whose contract
/// could not be fulfilled when it was restored has none.
pub fn is_whole<'a>(holds: impl IntoIterator<Item = &'a ClaimHold>) -> bool {
    let is_whole = |claim: &ClaimRef, device: &ClaimedDevice| {
        let own = format!("{KIND}={}", device_name(claim, device));
        !device.cdi_devices.contains(&own) || Edits::from(&device.edits) != Edits::default()
    };
    holds.into_iter().all(|hold| hold.devices.iter().all(|device| is_whole(&hold.claim, device)))
}

/// The names of the devices in a claim's file, and the qualified CDI name of each.
#[must_use]
pub fn devices_in(text: &[u8], uid: &str) -> Vec<(String, String)> {
    #[derive(Deserialize)]
    struct Spec {
        devices: Vec<Named>,
    }
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    let Ok(Spec { devices }) = serde_json::from_slice(text) else { return Vec::new() };
    let of_claim = |Named { name }: Named| {
        let device = name.strip_prefix(uid)?.strip_prefix('-')?.to_owned();
        Some((device, format!("{KIND}={name}")))
    };
    devices.into_iter().filter_map(of_claim).collect()
}

/// The name of a claim's file; `None` for a text that is no UID.
#[must_use]
pub fn file_name(uid: &str) -> Option<String> {
    is_uid(uid).then(|| format!("{FILE_PREFIX}{uid}{FILE_SUFFIX}"))
}

/// The name of the file with the metadata of the request that has this device as its first; `None`
/// for a text that is no UID.
#[must_use]
pub fn metadata_file_name(uid: &str, device: &str) -> Option<String> {
    is_uid(uid).then(|| format!("{FILE_PREFIX}{uid}+{device}{METADATA_SUFFIX}"))
}

/// The files with the metadata of the devices of a claim.
pub fn metadata_files<'a>(
    holds: impl IntoIterator<Item = &'a ClaimHold>,
) -> impl Iterator<Item = SpecFile> {
    let devices =
        holds.into_iter().flat_map(|hold| hold.devices.iter().map(|it| (&hold.claim, it)));
    devices.filter(|(_, device)| !device.metadata.is_empty()).filter_map(|(claim, device)| {
        let name = metadata_file_name(&claim.uid, name_in_file(claim, device))?;
        Some(SpecFile { name, text: device.metadata.clone() })
    })
}

/// The UID of the claim that a file is for, also one with metadata; `None` for another file.
#[must_use]
pub fn uid_of_file(name: &str) -> Option<&str> {
    let rest = name.strip_prefix(FILE_PREFIX)?;
    let of_metadata = || Some(rest.strip_suffix(METADATA_SUFFIX)?.split_once('+')?.0);
    rest.strip_suffix(FILE_SUFFIX).or_else(of_metadata).filter(|uid| is_uid(uid))
}

/// Whether a text may be the UID of a claim: it becomes a part of a path and of a CDI name.
#[must_use]
pub fn is_uid(text: &str) -> bool {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= UID_MAX
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        && is_end(text.chars().next())
        && is_end(text.chars().last())
}

/// The name of a device in the file of its claim.
fn device_name(claim: &ClaimRef, device: &ClaimedDevice) -> String {
    format!("{}-{}", claim.uid, name_in_file(claim, device))
}

fn name_in_file<'a>(claim: &ClaimRef, device: &'a ClaimedDevice) -> &'a str {
    own_name(&claim.uid, &device.cdi_devices, &device.allocated.name.device)
}

#[cfg(test)]
mod tests {
    use super::super::NvidiaExtras;
    use super::super::testing::{device, function, spec, with_extras};
    use super::*;
    use crate::domain::{
        AllocId, Api, ContractKind, DeviceClass, DeviceListStrategy, DeviceNode, DraName, FpgaMode,
        IntelFpgaOptions, NvidiaFeature, NvidiaOptions, PciFunction, ResourceSpec, SriovOptions,
    };

    const UID: &str = "5d2f6c3e-0c1b-4c8e-9d5a-3f0f5a7c1e42";

    fn claim() -> ClaimRef {
        ClaimRef { uid: UID.into(), namespace: "ml".into(), name: "train".into() }
    }

    fn of_claims(name: &str, contract: impl Into<Contract>) -> ResourceSpec {
        ResourceSpec { api: Api::Dra, ..spec(name, contract) }
    }

    fn allocated(device: &Device) -> Allocated {
        let text = device.id.as_str().to_ascii_lowercase();
        let device = text.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let name = DraName { pool: "n1/net".into(), device };
        Allocated { request: "one".into(), name, share_id: None, admin: false }
    }

    /// A claim with these devices, if these CDI names are defined.
    fn hold_with(
        spec: &ResourceSpec,
        devices: &[&Device],
        nvidia: &NvidiaExtras,
        is_defined: &dyn Fn(&str) -> bool,
    ) -> ClaimHold {
        hold_of(spec, devices, &[], nvidia, is_defined)
    }

    /// The same with the devices that a container gets together.
    fn hold_of(
        spec: &ResourceSpec,
        devices: &[&Device],
        together: &[&Device],
        nvidia: &NvidiaExtras,
        is_defined: &dyn Fn(&str) -> bool,
    ) -> ClaimHold {
        let alloc_id = &AllocId::new("");
        let request = Request { spec, devices: together, alloc_id, node_exists: &|_| true, nvidia };
        let devices = devices.iter().map(|device| {
            let edits = edits(&request, device, is_defined);
            let of = allocated(device);
            let name = of.name.device.clone();
            claimed(&claim(), of, &name, device.id.clone(), edits)
        });
        ClaimHold { claim: claim(), allocation: "a".into(), devices: devices.collect() }
    }

    fn hold(spec: &ResourceSpec, devices: &[&Device]) -> ClaimHold {
        hold_with(spec, devices, &NvidiaExtras::default(), &|_| false)
    }

    /// The answer's CDI names and the file, as one text.
    fn golden(hold: &ClaimHold) -> String {
        let names = hold.devices.iter().flat_map(|device| &device.cdi_devices);
        let names: String = names.map(|name| format!("{name}\n")).collect();
        let file = file(&hold.claim, [hold], &|_| None);
        names + &file.map_or_else(String::new, |file| file.text)
    }

    fn rdma_vf() -> Device {
        let nodes = ["uverbs7", "issm3", "rdma_cm"].map(|name| format!("/dev/infiniband/{name}"));
        let vf = function("0000:3b:00.2", "mlx5_core", &nodes.each_ref().map(String::as_str));
        let pci =
            vf.pci.clone().map(|pci| Box::new(PciFunction { rdma: vec!["mlx5_4".into()], ..*pci }));
        Device { pci, ..vf }
    }

    #[test]
    fn every_contract_gives_a_claim_its_devices() {
        let mut noiommu = function("0000:3b:00.3", "vfio-pci", &["/dev/vfio/vfio"]);
        noiommu.nodes.push(DeviceNode {
            container: "/dev/vfio/7".into(),
            ..DeviceNode::at("/dev/vfio/noiommu-7")
        });
        let i915 = function("0000:03:00.0", "i915", &["/dev/dri/card0", "/dev/dri/renderD128"]);
        let amd =
            device("0000:0a:00.0", &["/dev/dri/card1", "/dev/kfd", "/dev/dri/renderD129"], &[]);
        let port = device("0000:b1:00.0", &["/dev/dfl-port.0"], &[("fme_node", "/dev/dfl-fme.0")]);
        let alveo = function("0000:d8:00.1", "xocl", &["/dev/dri/renderD128"]);
        let fuse = device("misc:fuse", &["/dev/fuse"], &[]);
        let loop0 = device("block:loop0", &["/dev/loop0"], &[]);
        let devel = Contract::IntelFpga(IntelFpgaOptions { mode: FpgaMode::RegionDevel });
        let rdma = SriovOptions { rdma: Some(true), ..SriovOptions::default() };
        for (spec, devices, expected) in [
            (
                with_extras(of_claims("example.com/fuse", ContractKind::Generic)),
                vec![&fuse, &loop0],
                include_str!("golden/claim-generic.txt"),
            ),
            (
                of_claims("amd.com/gpu", ContractKind::Amd),
                vec![&amd],
                include_str!("golden/claim-amd.txt"),
            ),
            (
                of_claims("gpu.intel.com/i915", ContractKind::IntelGpu),
                vec![&i915],
                include_str!("golden/claim-intel-gpu.txt"),
            ),
            (
                of_claims("fpga.intel.com/x", devel),
                vec![&port],
                include_str!("golden/claim-intel-fpga.txt"),
            ),
            (
                of_claims("amd.com/u250", ContractKind::Xilinx),
                vec![&alveo],
                include_str!("golden/claim-xilinx.txt"),
            ),
            (
                of_claims("intel.com/my-pool_1.x", Contract::Sriov(rdma)),
                vec![&rdma_vf(), &noiommu],
                include_str!("golden/claim-sriov.txt"),
            ),
        ] {
            assert_eq!(golden(&hold(&spec, &devices)), expected, "{}", spec.name);
        }
    }

    /// After a reboot an index may be that of another GPU, and the kubelet keeps the former name.
    #[test]
    fn a_claim_names_a_gpu_by_its_uuid_where_a_file_defines_that() {
        let options = NvidiaOptions {
            device_id_strategy: crate::domain::DeviceIdStrategy::Index,
            ..NvidiaOptions::default()
        };
        let spec = of_claims("nvidia.com/gpu", Contract::Nvidia(options));
        let mut gpu = gpu();
        gpu.attributes.insert("index", "0");
        let names = |is_defined: &dyn Fn(&str) -> bool| {
            let hold = hold_with(&spec, &[&gpu], &NvidiaExtras::default(), is_defined);
            hold.devices[0].cdi_devices[0].clone()
        };
        assert_eq!(names(&|_| true), "nvidia.com/gpu=GPU-5A7C");
        assert_eq!(names(&|name| name == "nvidia.com/gpu=0"), "nvidia.com/gpu=0");
    }

    fn gpu() -> Device {
        let nodes = ["/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl"];
        device("GPU-5A7C", &nodes, &[("uuid", "GPU-5A7C"), ("minor", "3")])
    }

    #[test]
    fn devices_for_a_number_have_the_variables_of_the_device_plugin() {
        let rdma = SriovOptions { rdma: Some(true), ..SriovOptions::default() };
        let mut spec = of_claims("intel.com/dpdk", Contract::Sriov(rdma));
        spec.env.insert("ON".into(), "1".into());
        let (one, two) = (rdma_vf(), function("0000:3b:00.3", "iavf", &[]));
        let together = [&two, &one, &two];
        let hold = hold_of(&spec, &[&one, &two], &together, &NvidiaExtras::default(), &|_| false);
        let mut by_number = super::super::testing::edits_of(&spec, &[&two, &one]).envs;
        assert_eq!(by_number["PCIDEVICE_INTEL_COM_DPDK"], "0000:3b:00.3,0000:3b:00.2");
        // Those of one device, which each claim has.
        let own = |name: &str| name.contains("_0000_3B_00_");
        for device in &hold.devices {
            let mut envs = device.edits.envs.clone();
            assert!(envs.keys().any(|name| own(name)), "{envs:?}");
            envs.retain(|name, _| !own(name));
            assert_eq!(envs, by_number);
        }
        // NVIDIA's runtime adds no GPU.
        let spec = of_claims("nvidia.com/gpu", Contract::Nvidia(NvidiaOptions::default()));
        let gpu = gpu();
        let hold = hold_of(&spec, &[&gpu], &[&gpu], &NvidiaExtras::default(), &|_| false);
        by_number = hold.devices[0].edits.envs.clone();
        assert_eq!(by_number.get("NVIDIA_VISIBLE_DEVICES").map(String::as_str), Some("void"));
    }

    #[test]
    fn a_gpu_of_nvidia_has_its_cdi_name_or_its_nodes() {
        let options = NvidiaOptions { imex_channels: vec![2], ..NvidiaOptions::default() };
        let spec = of_claims("nvidia.com/gpu", Contract::Nvidia(options));
        let extras = NvidiaExtras {
            features: [NvidiaFeature::Gds].into(),
            channels: vec![DeviceNode::at("/dev/nvidia-caps-imex-channels/channel2")],
        };
        let named = hold_with(&spec, &[&gpu()], &extras, &|name| name == "nvidia.com/gpu=GPU-5A7C");
        assert_eq!(golden(&named), include_str!("golden/claim-nvidia.txt"));
        let nodes = hold_with(&spec, &[&gpu()], &extras, &|_| false);
        assert_eq!(golden(&nodes), include_str!("golden/claim-nvidia-nodes.txt"));
        // A resource for claims has the file of its kind, however others name their GPUs.
        assert_eq!(nvidia_cdi::kind(&spec).as_deref(), Some("nvidia.com/gpu"));
        assert_eq!(nvidia_cdi::kind(&ResourceSpec { api: Api::Plugin, ..spec }), None);
    }

    #[test]
    fn no_answer_has_what_only_the_device_plugin_can_carry() {
        let by = [DeviceListStrategy::CdiAnnotations, DeviceListStrategy::VolumeMounts];
        let options = NvidiaOptions { device_list_strategy: by.into(), ..NvidiaOptions::default() };
        let spec = of_claims("nvidia.com/gpu", Contract::Nvidia(options));
        let gpu = hold(&spec, &[&gpu()]).devices.remove(0);
        assert!(gpu.edits.annotations.is_empty() && gpu.edits.mounts.is_empty(), "{gpu:?}");
        assert!(gpu.edits.cdi_devices.is_empty(), "the answer has the names");
    }

    #[test]
    fn a_device_without_content_has_no_cdi_device() {
        let nic = Device { class: DeviceClass::Nic, ..function("0000:3b:02.0", "iavf", &[]) };
        let spec = of_claims("example.com/nic", ContractKind::Generic);
        let empty = hold(&spec, &[&nic]);
        assert_eq!(golden(&empty), "");
        let fuse = device("misc:fuse", &["/dev/fuse"], &[]);
        let both = hold(&spec, &[&nic, &fuse]);
        let text = file(&claim(), [&both], &|_| None).unwrap().text;
        assert!(!text.contains("3b-02") && text.contains("misc-fuse"), "{text}");
    }

    #[test]
    fn a_file_has_the_devices_of_all_grants_in_one_order() {
        let spec = of_claims("example.com/x", ContractKind::Generic);
        let one = hold(&spec, &[&device("b", &["/dev/b"], &[])]);
        let two = hold(&spec, &[&device("a", &["/dev/a"], &[])]);
        let forward = file(&claim(), [&one, &two], &|_| None).unwrap();
        assert_eq!(forward, file(&claim(), [&two, &one], &|_| None).unwrap());
        assert_eq!(forward.name, format!("holdfast-claim-{UID}.json"));
        assert!(forward.text.find("-a\"").unwrap() < forward.text.find("-b\"").unwrap());
    }

    #[test]
    fn a_file_has_the_present_path_of_a_disk() {
        let link = "/dev/disk/by-id/nvme-eui.1";
        let mut disk = device("nvme-eui.1", &["/dev/nvme0n1"], &[]);
        disk.nodes[0].link = Some(link.into());
        let hold = hold(&of_claims("example.com/disk", ContractKind::Generic), &[&disk]);
        assert_eq!(hold.devices[0].edits.devices[0].host, link, "the ledger has the lasting path");
        let at = |real: Option<&str>| {
            let real_path = |path: &str| real.filter(|_| path == link).map(str::to_owned);
            let text = file(&claim(), [&hold], &real_path).unwrap().text;
            let file: serde_json::Value = serde_json::from_str(&text).unwrap();
            let node = &file["devices"][0]["containerEdits"]["deviceNodes"][0];
            assert_eq!(node["path"], "/dev/nvme0n1");
            node["hostPath"].as_str().map(str::to_owned)
        };
        assert_eq!(at(Some("/dev/nvme0n1")), None);
        assert_eq!(at(Some("/dev/nvme1n1")).as_deref(), Some("/dev/nvme1n1"));
        assert_eq!(at(None).as_deref(), Some(link), "the runtime reports a disk that is absent");
    }

    #[test]
    fn only_a_uid_becomes_a_part_of_a_path() {
        for uid in [UID, "1", "abc", &"a".repeat(UID_MAX)] {
            let name = file_name(uid).unwrap();
            assert!(name.starts_with(super::super::cdi::FILE_PREFIX) && name.len() <= 255);
            assert_eq!(uid_of_file(&name), Some(uid));
            assert_eq!(uid_of_file(&metadata_file_name(uid, "a-b").unwrap()), Some(uid));
        }
        let long = "a".repeat(UID_MAX + 1);
        for uid in [
            "", ".", "..", "../x", "a/b", "a\0b", "a b", "-a", "a-", "a.b", "é", "a+b", "a\n",
            &*long,
        ] {
            assert_eq!(file_name(uid), None, "{uid:?}");
            assert_eq!(uid_of_file(&format!("{FILE_PREFIX}{uid}{FILE_SUFFIX}")), None, "{uid:?}");
            let claim = ClaimRef { uid: uid.into(), ..claim() };
            let spec = of_claims("example.com/x", ContractKind::Generic);
            let hold = hold(&spec, &[&device("b", &["/dev/b"], &[])]);
            assert_eq!(file(&claim, [&hold], &|_| None), None, "{uid:?}");
        }
        for other in [
            "holdfast-claim-x.com+gpu.json",
            "holdfast-claim-a.json.new",
            "holdfast-claim-a.metadata",
            "holdfast-claim-a+fuse.json",
            "holdfast-claim-..+fuse.metadata",
            "a.json",
        ] {
            assert_eq!(uid_of_file(other), None, "{other}");
        }
    }
}
