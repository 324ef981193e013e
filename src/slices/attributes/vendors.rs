//! What the DRA drivers of vendors publish of the same hardware, in their domains, so that the
//! expressions of claims for them find it (`[dra] vendor_attributes`). Sources:
//! `cmd/gpu-kubelet-plugin/deviceinfo.go` and `mig.go` of NVIDIA's driver,
//! `cmd/gpu-kubeletplugin/deviceinfo.go` of AMD's, `cmd/kubelet-gpu-plugin/node_state.go` and
//! `pkg/gpu/device/models.go` of Intel's, and `pkg/devicestate/discovery.go` of the SR-IOV driver.
//!
//! An attribute that a vendor's driver has on each of its devices is here too, and a text is empty
//! while it is unknown. Other types have no such value, and are left out.

use super::{Facts, pcie_root, semver};
use crate::domain::{Device, DeviceClass, GpuDescription, MigPlace, PciFunction, ResourceSpec};
use crate::slices::api::{Attribute, Capacity};

/// PCI vendors.
const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;
const INTEL: u16 = 0x8086;

/// A vendor's driver. Its name is the domain of its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA's driver for GPUs.
    Nvidia,
    /// AMD's driver for GPUs.
    Amd,
    /// Intel's driver for GPUs.
    Intel,
    /// The driver for SR-IOV virtual functions of networks.
    Sriov,
}

impl Vendor {
    /// All of them.
    pub const ALL: [Vendor; 4] = [Vendor::Nvidia, Vendor::Amd, Vendor::Intel, Vendor::Sriov];

    /// The name of the driver in the DRA API.
    #[must_use]
    pub fn driver(self) -> &'static str {
        match self {
            Vendor::Nvidia => "gpu.nvidia.com",
            Vendor::Amd => "gpu.amd.com",
            Vendor::Intel => "gpu.intel.com",
            Vendor::Sriov => "sriovnetwork.k8snetworkplumbingwg.io",
        }
    }

    /// The vendor whose driver would publish the device in the state in which it is.
    #[must_use]
    pub fn of(device: &Device) -> Option<Vendor> {
        let pci = device.pci.as_deref()?;
        let (driver, part) = (pci.driver.as_deref()?, device.attribute("part"));
        match device.class {
            DeviceClass::Gpu => match (pci.vendor?, driver, part) {
                (NVIDIA, "nvidia", None) if !pci.is_vf() => Some(Vendor::Nvidia),
                (NVIDIA, "nvidia", Some("mig")) => Some(Vendor::Nvidia),
                (NVIDIA, "vfio-pci", None) => Some(Vendor::Nvidia),
                (AMD, "amdgpu", None | Some("partition")) => Some(Vendor::Amd),
                (INTEL, "i915" | "xe", None) => Some(Vendor::Intel),
                _ => None,
            },
            DeviceClass::Rdma | DeviceClass::Nic if pci.is_vf() => Some(Vendor::Sriov),
            _ => None,
        }
    }
}

/// An attribute or a capacity.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Attribute(Attribute),
    Capacity(Capacity),
}

/// The values of a vendor's driver, in the order of their importance: a device has room for a
/// limited number.
pub(super) type Values = Vec<(&'static str, Value)>;

/// What the vendor's driver publishes of the device, as far as it is known.
pub(super) fn values(spec: &ResourceSpec, device: &Device, facts: Facts<'_>) -> Values {
    let Some((vendor, pci)) = Vendor::of(device).zip(device.pci.as_deref()) else {
        return Values::new();
    };
    let mut list = List(Values::new());
    match vendor {
        Vendor::Nvidia if pci.driver.as_deref() == Some("vfio-pci") => list.add_vfio(device, pci),
        Vendor::Nvidia => list.add_nvidia(device, pci, facts),
        Vendor::Amd => list.add_amd(device, pci),
        Vendor::Intel => list.add_intel(pci),
        Vendor::Sriov => list.add_sriov(spec, device, pci),
    }
    list.0
}

struct List(Values);

impl List {
    fn add(&mut self, name: &'static str, value: Option<Attribute>) {
        self.0.extend(value.map(|value| (name, Value::Attribute(value))));
    }

    fn text(&mut self, name: &'static str, value: impl Into<String>) {
        self.add(name, Some(Attribute::text(value)));
    }

    fn capacity(&mut self, name: &'static str, value: Option<Capacity>) {
        self.0.extend(value.map(|value| (name, Value::Capacity(value))));
    }

    /// A GPU or a MIG instance of NVIDIA's driver.
    fn add_nvidia(&mut self, device: &Device, pci: &PciFunction, facts: Facts<'_>) {
        let recorded = |name: &str| device.attribute(name).unwrap_or_default();
        let is_part = device.attribute("part").is_some();
        let described = facts.description(pci);
        let version = |of: fn(&GpuDescription) -> Option<(i32, i32)>| {
            let (major, minor) = described.and_then(of)?;
            Some(Attribute::Version(format!("{major}.{minor}.0")))
        };
        self.text("gpu.nvidia.com/type", if is_part { "mig" } else { "gpu" });
        self.text("gpu.nvidia.com/productName", recorded("model"));
        self.capacity("gpu.nvidia.com/memory", memory(device, described).map(Capacity::of_bytes));
        if is_part {
            self.text("gpu.nvidia.com/profile", recorded("mig_profile"));
            self.text("gpu.nvidia.com/parentUUID", recorded("parent"));
        }
        self.text("gpu.nvidia.com/uuid", recorded("uuid"));
        self.add("gpu.nvidia.com/cudaComputeCapability", version(|of| of.compute));
        let driver = facts.nvidia_driver.and_then(semver).map(Attribute::Version);
        self.add("gpu.nvidia.com/driverVersion", driver);
        let compute = described.and_then(|of| of.compute);
        self.text("gpu.nvidia.com/architecture", compute.map_or("", architecture));
        self.add("gpu.nvidia.com/cudaDriverVersion", version(|of| of.cuda));
        let brand = described.and_then(|of| of.brand.as_deref());
        self.text("gpu.nvidia.com/brand", brand.unwrap_or_default());
        // There is no room for the engines of a MIG instance, the other capacities.
    }

    /// A GPU of NVIDIA for a virtual machine. The UUID is that of the driver, which it has not.
    fn add_vfio(&mut self, device: &Device, pci: &PciFunction) {
        self.text("gpu.nvidia.com/type", "vfio");
        self.text("gpu.nvidia.com/vendorID", hex(pci.vendor));
        self.text("gpu.nvidia.com/deviceID", hex(pci.device));
        self.text("gpu.nvidia.com/productName", device.attribute("model").unwrap_or_default());
    }

    fn add_amd(&mut self, device: &Device, pci: &PciFunction) {
        let is_part = device.attribute("part").is_some();
        self.text("gpu.amd.com/type", if is_part { "amdgpu-partition" } else { "amdgpu" });
        self.text("gpu.amd.com/deviceID", hex(pci.device));
        let mode = |name| device.attribute(name);
        if let Some((compute, memory)) = mode("compute_partition").zip(mode("memory_partition")) {
            self.text("gpu.amd.com/partitionProfile", format!("{compute}_{memory}"));
        }
        if let [node] = device.numa_nodes[..] {
            self.add("gpu.amd.com/numaNode", Some(Attribute::Int(node.into())));
        }
        self.text("gpu.amd.com/pciAddr", pci.address.to_string());
    }

    fn add_intel(&mut self, pci: &PciFunction) {
        self.text("gpu.intel.com/type", if pci.is_vf() { "vf" } else { "gpu" });
        self.text("gpu.intel.com/family", pci.device.map_or("", family));
        self.text("gpu.intel.com/driver", pci.driver.as_deref().unwrap_or_default());
        let has_vfs = pci.sriov_totalvfs.is_some_and(|most| most > 0);
        self.add("gpu.intel.com/sriov", Some(Attribute::Bool(has_vfs)));
        self.text("gpu.intel.com/pciId", hex(pci.device));
        self.text("gpu.intel.com/pciAddress", pci.address.to_string());
        // The bus alone, as that driver has it.
        let root = pcie_root(pci);
        self.text("gpu.intel.com/pciRoot", root.rsplit(':').next().unwrap_or_default());
        // 1000 thousandths of a GPU, as the API server writes it.
        self.capacity(
            "gpu.intel.com/millicores",
            Some(Capacity { value: "1k".into(), request_policy: None }),
        );
    }

    fn add_sriov(&mut self, spec: &ResourceSpec, device: &Device, pci: &PciFunction) {
        let plain = |id: Option<u16>| id.map(|id| format!("{id:04x}")).unwrap_or_default();
        let address = pci.address.to_string();
        // An administrator chooses it there. Here it is the name of the resource.
        let resource = spec.name.as_str().split('/').next_back().unwrap_or_default();
        self.text("sriovnetwork.k8snetworkplumbingwg.io/pciAddress", address.clone());
        self.text("sriovnetwork.k8snetworkplumbingwg.io/vendor", plain(pci.vendor));
        self.text("sriovnetwork.k8snetworkplumbingwg.io/deviceID", plain(pci.device));
        self.text("sriovnetwork.k8snetworkplumbingwg.io/resourceName", resource);
        self.text("k8s.cni.cncf.io/resourceName", resource);
        self.text("k8s.cni.cncf.io/deviceID", address);
        let number = pci.vf_index.map(|number| Attribute::Int(number.into()));
        self.add("sriovnetwork.k8snetworkplumbingwg.io/vfID", number);
        let link = match device.attribute("link_type") {
            Some("ether") => "ethernet",
            Some("infiniband") => "infiniband",
            _ => "unknown",
        };
        self.text("sriovnetwork.k8snetworkplumbingwg.io/linkType", link);
        let rdma = Attribute::Bool(!pci.rdma.is_empty());
        self.add("sriovnetwork.k8snetworkplumbingwg.io/rdmaCapable", Some(rdma));
        let pf = pci.physfn.map(|pf| pf.to_string()).unwrap_or_default();
        self.text("sriovnetwork.k8snetworkplumbingwg.io/pfPciAddress", pf);
    }
}

fn hex(id: Option<u16>) -> String {
    id.map(|id| format!("{id:#06x}")).unwrap_or_default()
}

/// The memory of a GPU or a MIG instance of NVIDIA's driver, in bytes.
pub(super) fn memory(device: &Device, described: Option<&GpuDescription>) -> Option<u64> {
    let described = described?;
    let number = |name: &str| device.attribute(name)?.parse::<u32>().ok();
    let place: Option<MigPlace> = number("gi").zip(number("ci"));
    let mib = match place {
        Some(place) => described.instances.get(&place).map(|instance| instance.memory_mb),
        None => described.memory_mib.filter(|_| device.attribute("part").is_none()),
    };
    mib?.checked_mul(1 << 20)
}

/// The architecture of a CUDA compute capability, as NVIDIA's driver names it
/// (`nvmlDeviceGetArchitecture`).
fn architecture((major, minor): (i32, i32)) -> &'static str {
    match (major, minor) {
        (3, _) => "Kepler",
        (5, _) => "Maxwell",
        (6, _) => "Pascal",
        (7, ..5) => "Volta",
        (7, _) => "Turing",
        (8, ..9) => "Ampere",
        (8, _) => "Ada Lovelace",
        (9, _) => "Hopper",
        (10..=12, _) => "Blackwell",
        (13, _) => "Rubin",
        _ => "Unknown",
    }
}

/// The series of Intel's GPU with this device id, as its driver names it.
fn family(id: u16) -> &'static str {
    match id {
        0x56a0..=0x56a6 => "Arc A-Series",
        0x56b0..=0x56b3 => "Arc Pro A-Series",
        0x56c0 | 0x56c1 => "Data Center Flex",
        0x0b69 | 0x0bd0..=0x0bdb => "Data Center Max",
        0xb080..=0xb087 | 0xe20b | 0xe20c => "Arc B-Series",
        0xe211 | 0xe212 | 0xe222 | 0xe223 => "Arc Pro B-Series",
        0x4626 | 0xa7a0 => "Iris Xe",
        0x7d67 => "Intel Graphics",
        _ => "Unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::super::{NUMA_NODE_OF_DRANET, describe, violations};
    use super::*;
    use crate::domain::{DeviceId, DeviceNode, MigAttributes, NvmlGpu, NvmlSnapshot, Sharing};
    use crate::slices::api::{self, limits};
    use serde_json::{Value as Json, json};
    use std::collections::BTreeSet;

    const ADDRESS: &str = "0000:18:00.0";
    const GPU: &str = "GPU-5ca1ab1e-0000-4000-8000-000000000000";

    fn device(class: DeviceClass, pci: PciFunction, record: &[(&'static str, &str)]) -> Device {
        let bridges = ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"];
        let bridges = bridges.map(|bridge| bridge.parse().unwrap()).into();
        Device {
            id: DeviceId::new("id"),
            key: "k".into(),
            class,
            pci: Some(Box::new(PciFunction { bridges, ..pci })),
            numa_nodes: vec![1],
            nodes: vec![DeviceNode::at("/dev/n")],
            attributes: record.iter().copied().chain([("iommu_group", "4")]).collect(),
        }
    }

    fn function(vendor: u16, device: u16, driver: &str) -> PciFunction {
        PciFunction {
            vendor: Some(vendor),
            device: Some(device),
            driver: Some(driver.into()),
            ..PciFunction::at(ADDRESS.parse().unwrap())
        }
    }

    /// A GPU of NVIDIA, and one of its MIG instances.
    fn nvidia() -> [Device; 2] {
        let pci = || function(NVIDIA, 0x2330, "nvidia");
        let model = ("model", "NVIDIA H100 80GB HBM3");
        let part = [
            model,
            ("uuid", "MIG-5ca1ab1e-0000-4000-8000-000000000001"),
            ("part", "mig"),
            ("parent", GPU),
            ("mig_profile", "1g.10gb"),
            ("gi", "3"),
            ("ci", "0"),
        ];
        let whole = [model, ("uuid", GPU), ("hive", "h")];
        [device(DeviceClass::Gpu, pci(), &whole), device(DeviceClass::Gpu, pci(), &part)]
    }

    fn nvml() -> NvmlSnapshot {
        let size = MigAttributes { memory_mb: 9984, ..MigAttributes::default() };
        let description = GpuDescription {
            memory_mib: Some(81_559),
            compute: Some((9, 0)),
            brand: Some("Nvidia".into()),
            cuda: Some((12, 8)),
            instances: [((3, 0), size)].into(),
            ..GpuDescription::default()
        };
        let answer = NvmlGpu { description: Some(description), ..NvmlGpu::default() };
        NvmlSnapshot { gpus: [(ADDRESS.parse().unwrap(), answer)].into() }
    }

    /// The device as it is published.
    fn published(device: &Device, shares: bool) -> api::Device {
        let nvml = nvml();
        let facts =
            Facts { nvidia_driver: Some("580.95.05"), nvml: Some(&nvml), vendors: true, taken: 0 };
        let mut spec = ResourceSpec::new("example.com/sriov_nic_1".parse().unwrap(), device.class);
        if shares {
            spec.sharing = Sharing::Replicas(2);
        }
        let id = if shares { device.id.share(1) } else { device.id.clone() };
        let (published, dropped) = describe("d", &spec, &id, device, facts);
        assert_eq!((violations(&published), dropped), (vec![], vec![]));
        published
    }

    /// What is published in these domains.
    fn of(domains: &[&str], device: &Device) -> Json {
        let device = published(device, false);
        let is_in = |name: &str| domains.iter().any(|of| name.starts_with(&format!("{of}/")));
        let mut found = serde_json::Map::new();
        for (name, value) in device.attributes.iter().filter(|(name, _)| is_in(name)) {
            let value = match value {
                Attribute::Text(text) => json!(text),
                Attribute::Int(number) => json!(number),
                Attribute::Bool(is) => json!(is),
                Attribute::Version(version) => json!({ "version": version }),
                Attribute::Unknown => panic!("{name}"),
            };
            found.insert(name.clone(), value);
        }
        for (name, value) in device.capacity.iter().filter(|(name, _)| is_in(name)) {
            found.insert(name.clone(), json!({ "quantity": value.value }));
        }
        Json::Object(found)
    }

    #[test]
    fn gpus_of_nvidia() {
        let [whole, part] = nvidia();
        let expected = json!({
            "gpu.nvidia.com/type": "gpu",
            "gpu.nvidia.com/uuid": GPU,
            "gpu.nvidia.com/productName": "NVIDIA H100 80GB HBM3",
            "gpu.nvidia.com/brand": "Nvidia",
            "gpu.nvidia.com/architecture": "Hopper",
            "gpu.nvidia.com/cudaComputeCapability": {"version": "9.0.0"},
            "gpu.nvidia.com/driverVersion": {"version": "580.95.5"},
            "gpu.nvidia.com/cudaDriverVersion": {"version": "12.8.0"},
            "gpu.nvidia.com/memory": {"quantity": "81559Mi"},
        });
        assert_eq!(of(&["gpu.nvidia.com"], &whole), expected);
        let expected = json!({
            "gpu.nvidia.com/type": "mig",
            "gpu.nvidia.com/uuid": "MIG-5ca1ab1e-0000-4000-8000-000000000001",
            "gpu.nvidia.com/parentUUID": GPU,
            "gpu.nvidia.com/profile": "1g.10gb",
            "gpu.nvidia.com/productName": "NVIDIA H100 80GB HBM3",
            "gpu.nvidia.com/brand": "Nvidia",
            "gpu.nvidia.com/architecture": "Hopper",
            "gpu.nvidia.com/cudaComputeCapability": {"version": "9.0.0"},
            "gpu.nvidia.com/driverVersion": {"version": "580.95.5"},
            "gpu.nvidia.com/cudaDriverVersion": {"version": "12.8.0"},
            "gpu.nvidia.com/memory": {"quantity": "9984Mi"},
        });
        assert_eq!(of(&["gpu.nvidia.com"], &part), expected);
        let guest = device(DeviceClass::Gpu, function(NVIDIA, 0x2330, "vfio-pci"), &[]);
        let expected = json!({
            "gpu.nvidia.com/type": "vfio",
            "gpu.nvidia.com/vendorID": "0x10de",
            "gpu.nvidia.com/deviceID": "0x2330",
            "gpu.nvidia.com/productName": "",
        });
        assert_eq!(of(&["gpu.nvidia.com"], &guest), expected);
    }

    #[test]
    fn a_full_device_lacks_what_matters_least() {
        let [whole, part] = nvidia();
        for (device, shares, lacks) in [
            (&whole, false, &[][..]),
            (&whole, true, &[]),
            (&part, false, &["iommuGroup"]),
            (&part, true, &[NUMA_NODE_OF_DRANET, "iommuGroup"]),
        ] {
            let published = published(device, shares);
            let count = published.attributes.len() + published.capacity.len();
            assert_eq!(count == limits::ATTRIBUTES, !lacks.is_empty(), "{count}");
            let has = |name: &&str| published.attributes.contains_key(*name);
            let names = [NUMA_NODE_OF_DRANET, "iommuGroup", "gpu.nvidia.com/brand", "uuid"];
            let missing: Vec<&str> = names.into_iter().filter(|name| !has(name)).collect();
            assert_eq!(missing, lacks, "{count}");
        }
    }

    #[test]
    fn a_text_that_the_api_refuses_is_empty_and_reported() {
        let record = [("model", "x".repeat(65))];
        let record = record.each_ref().map(|(name, value)| (*name, value.as_str()));
        let gpu = device(DeviceClass::Gpu, function(NVIDIA, 1, "nvidia"), &record);
        let facts = Facts { vendors: true, ..Facts::default() };
        let spec = ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu);
        let (published, dropped) = describe("d", &spec, &gpu.id, &gpu, facts);
        let name = "gpu.nvidia.com/productName";
        assert_eq!(published.attributes[name], Attribute::text(""));
        let dropped: Vec<&str> = dropped.iter().map(|it| it.attribute.as_str()).collect();
        assert_eq!(dropped, ["model", name]);
    }

    #[test]
    fn gpus_of_amd() {
        let modes = [("compute_partition", "cpx"), ("memory_partition", "nps4")];
        let whole = device(DeviceClass::Gpu, function(AMD, 0x74a1, "amdgpu"), &[]);
        let part = [("part", "partition"), ("parent", "p"), modes[0], modes[1]];
        let part = device(DeviceClass::Gpu, function(AMD, 0x74a1, "amdgpu"), &part);
        let mut expected = json!({
            "gpu.amd.com/type": "amdgpu",
            "gpu.amd.com/deviceID": "0x74a1",
            "gpu.amd.com/numaNode": 1,
            "gpu.amd.com/pciAddr": ADDRESS,
        });
        assert_eq!(of(&["gpu.amd.com"], &whole), expected);
        expected["gpu.amd.com/type"] = json!("amdgpu-partition");
        expected["gpu.amd.com/partitionProfile"] = json!("cpx_nps4");
        assert_eq!(of(&["gpu.amd.com"], &part), expected);
    }

    #[test]
    fn gpus_of_intel() {
        let pci = PciFunction { sriov_totalvfs: Some(31), ..function(INTEL, 0x56c0, "i915") };
        let expected = json!({
            "gpu.intel.com/type": "gpu",
            "gpu.intel.com/family": "Data Center Flex",
            "gpu.intel.com/driver": "i915",
            "gpu.intel.com/sriov": true,
            "gpu.intel.com/pciId": "0x56c0",
            "gpu.intel.com/pciAddress": ADDRESS,
            "gpu.intel.com/pciRoot": "15",
            "gpu.intel.com/millicores": {"quantity": "1k"},
        });
        assert_eq!(of(&["gpu.intel.com"], &device(DeviceClass::Gpu, pci, &[])), expected);
    }

    #[test]
    fn virtual_functions() {
        let vf = PciFunction {
            physfn: Some("0000:18:00.7".parse().unwrap()),
            vf_index: Some(2),
            rdma: vec!["mlx5_2".into()],
            ..function(0x15b3, 0x101e, "mlx5_core")
        };
        let vf = device(DeviceClass::Rdma, vf, &[("link_type", "ether")]);
        let expected = json!({
            "sriovnetwork.k8snetworkplumbingwg.io/pciAddress": ADDRESS,
            "sriovnetwork.k8snetworkplumbingwg.io/vendor": "15b3",
            "sriovnetwork.k8snetworkplumbingwg.io/deviceID": "101e",
            "sriovnetwork.k8snetworkplumbingwg.io/resourceName": "sriov_nic_1",
            "sriovnetwork.k8snetworkplumbingwg.io/vfID": 2,
            "sriovnetwork.k8snetworkplumbingwg.io/linkType": "ethernet",
            "sriovnetwork.k8snetworkplumbingwg.io/rdmaCapable": true,
            "sriovnetwork.k8snetworkplumbingwg.io/pfPciAddress": "0000:18:00.7",
            "k8s.cni.cncf.io/resourceName": "sriov_nic_1",
            "k8s.cni.cncf.io/deviceID": ADDRESS,
        });
        assert_eq!(of(&[Vendor::Sriov.driver(), "k8s.cni.cncf.io"], &vf), expected);
    }

    #[test]
    fn other_devices_have_no_attributes_of_a_vendor() {
        let vf = |mut pci: PciFunction| {
            pci.physfn = Some("0000:18:00.7".parse().unwrap());
            pci
        };
        for (class, pci, record) in [
            // A vGPU, a mediated device, a GPU of a virtual machine, and a physical function.
            (DeviceClass::Gpu, vf(function(NVIDIA, 1, "nvidia")), &[][..]),
            (DeviceClass::Gpu, function(NVIDIA, 1, "nvidia"), &[("part", "mdev")]),
            (DeviceClass::Gpu, function(AMD, 1, "vfio-pci"), &[]),
            (DeviceClass::Rdma, function(0x15b3, 1, "mlx5_core"), &[]),
            (DeviceClass::Accelerator, function(INTEL, 1, "habanalabs"), &[]),
        ] {
            let device = device(class, pci, record);
            assert_eq!(Vendor::of(&device), None, "{device:?}");
            let names = published(&device, false).attributes.into_keys();
            let foreign: Vec<String> = names
                .filter(|name| name.contains('/') && !name.starts_with("resource.kubernetes.io/"))
                .collect();
            assert_eq!(foreign, [NUMA_NODE_OF_DRANET]);
        }
    }

    #[test]
    fn without_nvml_a_text_is_empty_and_a_version_is_missing() {
        let [whole, _] = nvidia();
        let facts = Facts { vendors: true, ..Facts::default() };
        let spec = ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu);
        let (published, _) = describe("d", &spec, &whole.id, &whole, facts);
        for name in ["gpu.nvidia.com/architecture", "gpu.nvidia.com/brand"] {
            assert_eq!(published.attributes[name], Attribute::text(""));
        }
        assert!(!published.attributes.contains_key("gpu.nvidia.com/cudaComputeCapability"));
        assert!(published.capacity.is_empty());
    }

    #[test]
    fn dra_md_has_a_row_for_every_attribute_of_a_vendor_and_no_other() {
        let page = include_str!("../../../docs/dra.md");
        let (_, rest) = page.split_once("| driver | attributes | not published |\n").unwrap();
        let rows = rest.lines().skip(1).take_while(|line| line.starts_with('|'));
        let mut documented = BTreeSet::new();
        for row in rows {
            let cells: Vec<&str> = row.split('|').collect();
            let words = |cell: &str| -> Vec<String> {
                cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
            };
            let domain = words(cells[1]).remove(0);
            documented.extend(
                words(cells[2])
                    .into_iter()
                    .map(|name| if name.contains('/') { name } else { format!("{domain}/{name}") }),
            );
        }
        let vf = PciFunction {
            physfn: Some("0000:18:00.7".parse().unwrap()),
            vf_index: Some(2),
            ..function(0x15b3, 1, "mlx5_core")
        };
        let modes = [("compute_partition", "cpx"), ("memory_partition", "nps4")];
        let [whole, part] = nvidia();
        let nvml = nvml();
        let facts =
            Facts { nvidia_driver: Some("1.2.3"), nvml: Some(&nvml), vendors: true, taken: 0 };
        let spec = ResourceSpec::new("a.b/c".parse().unwrap(), DeviceClass::Gpu);
        let names = [
            whole,
            part,
            device(DeviceClass::Gpu, function(NVIDIA, 1, "vfio-pci"), &[]),
            device(DeviceClass::Gpu, function(AMD, 1, "amdgpu"), &modes),
            device(DeviceClass::Gpu, function(INTEL, 1, "xe"), &[]),
            device(DeviceClass::Nic, vf, &[]),
        ]
        .iter()
        .flat_map(|device| values(&spec, device, facts))
        .map(|(name, _)| name.to_owned())
        .collect::<BTreeSet<String>>();
        assert_eq!(documented, names);
    }
}
