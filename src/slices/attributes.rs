//! What is published of a device, for the expressions of claims and device classes (CEL).
//!
//! An expression that reads an attribute which one device lacks fails for the whole claim. So the
//! attributes that device classes use are on every device of a class, and are empty where the value
//! is unknown. What changes while a device runs, such as the name of an interface, is not
//! published.
//!
//! The API server refuses a slice as a whole for one bad value. So every value is checked here, and
//! a bad one is left out and returned as a [`Dropped`].

use self::vendors::Value;
use super::api::{self, Attribute, Capacity, RequestPolicy, ValidRange, limits};
use super::names;
use crate::domain::{
    Device, DeviceClass, DeviceId, GpuDescription, NvmlSnapshot, PciFunction, ResourceSpec, Sharing,
};
use std::fmt;

mod rules;
pub mod vendors;

pub use self::rules::{is_label_value, refused_key, refused_value, violations};

/// The PCI root of a function: `pci0000:00`. Kubernetes defines the name and the value
/// (`dynamic-resource-allocation/deviceattribute`), so that a claim may have devices of several
/// drivers below one root.
pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
/// The PCI address of a function, defined by Kubernetes.
pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
/// The NUMA node, defined by Kubernetes.
pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
/// The NUMA node as drivers for network devices name it.
pub const NUMA_NODE_OF_DRANET: &str = "dra.net/numaNode";

/// The capacity of a device that several claims may have: how many of them.
pub const SHARES: &str = "shares";

/// What is published besides the record of a device. The facts may become known later.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts<'a> {
    /// The version of NVIDIA's driver: `580.95.05`.
    pub nvidia_driver: Option<&'a str>,
    /// NVML's answers.
    pub nvml: Option<&'a NvmlSnapshot>,
    /// Whether the attributes of vendors' drivers are published too (`[dra] vendor_attributes`).
    pub vendors: bool,
    /// How many shares of the device are held otherwise than by claims for parts of its capacity.
    pub taken: u32,
}

impl<'a> Facts<'a> {
    /// NVML's description of the GPU with this function.
    pub(super) fn description(self, pci: &PciFunction) -> Option<&'a GpuDescription> {
        self.nvml?.gpus.get(&pci.address)?.description.as_ref()
    }
}

/// An attribute, a capacity or a taint that is not published.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dropped {
    /// The name of the device.
    pub device: String,
    /// The name of the attribute.
    pub attribute: String,
    /// The rule that it violates.
    pub why: &'static str,
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Dropped { device, attribute, why } = self;
        write!(f, "`{attribute}` of the device `{device}` is not published: {why}")
    }
}

/// The attributes of one id of a resource, in the order of their importance, and what they are
/// about.
struct Draft<'a> {
    device: &'a Device,
    values: Vec<(&'static str, Attribute)>,
    capacity: Vec<(&'static str, Capacity)>,
    /// Its memory in bytes.
    memory: Option<u64>,
    /// The number of claims that may have a part of its capacity; `None` for other devices.
    shares: Option<u32>,
    /// What is added as long as there is room, without a report of what is not.
    rest: vendors::Values,
}

/// Describes one id of a resource: a device, or a share of it. `name` is its name in the API.
#[must_use]
pub fn describe(
    name: &str,
    spec: &ResourceSpec,
    id: &DeviceId,
    device: &Device,
    facts: Facts<'_>,
) -> (api::Device, Vec<Dropped>) {
    let shares = match spec.sharing {
        Sharing::Replicas(shares) if spec.divided(&id.share(0)).is_some() => Some(shares),
        _ => None,
    };
    let mut draft = Draft {
        device,
        values: Vec::new(),
        capacity: Vec::new(),
        memory: None,
        shares: shares.filter(|_| id.shared().is_none()),
        rest: vendors::Values::new(),
    };
    draft.add_common(spec, id);
    draft.add_class();
    draft.add_pci();
    draft.add_part();
    draft.add_nvidia(facts);
    draft.add_capacity(facts.taken);
    if facts.vendors {
        draft.add_vendor(spec, facts);
    }
    checked(name, draft)
}

impl Draft<'_> {
    fn text(&mut self, name: &'static str, value: impl Into<String>) {
        self.values.push((name, Attribute::Text(value.into())));
    }

    fn int(&mut self, name: &'static str, value: Option<u32>) {
        self.values.extend(value.map(|value| (name, Attribute::Int(value.into()))));
    }

    /// A value of the record under its published name, if the record has one.
    fn known(&mut self, name: &'static str, recorded: &str) {
        if let Some(value) = self.device.attribute(recorded) {
            self.text(name, value);
        }
    }

    /// As [`Draft::known`], but empty if the record has none.
    fn always(&mut self, name: &'static str, recorded: &str) {
        self.text(name, self.device.attribute(recorded).unwrap_or_default());
    }

    /// What every device has.
    fn add_common(&mut self, spec: &ResourceSpec, id: &DeviceId) {
        let pci = self.device.pci.as_deref();
        let hex = |number: Option<u16>| number.map(|id| format!("{id:04x}")).unwrap_or_default();
        self.text("class", self.device.class.as_str());
        self.text("resource", spec.name.as_str());
        self.text("vendor", hex(pci.and_then(|pci| pci.vendor)));
        self.text("device", hex(pci.and_then(|pci| pci.device)));
        self.always("model", "model");
        self.text("driver", pci.and_then(|pci| pci.driver.as_deref()).unwrap_or_default());
        self.text("id", short(id.as_str()));
        self.values.push(("shared", Attribute::Bool(!spec.is_exclusive())));
        self.values.push(("vf", Attribute::Bool(pci.is_some_and(PciFunction::is_vf))));
        if let Some(whole) = id.shared().filter(|_| !spec.is_exclusive()) {
            self.text("shareOf", short(whole.as_str()));
        }
    }

    /// What every device of the class has, and what is known of it.
    fn add_class(&mut self) {
        let pci = self.device.pci.as_deref();
        match self.device.class {
            DeviceClass::Gpu => {
                self.known("uuid", "uuid");
                self.known("hive", "hive");
            }
            DeviceClass::Rdma | DeviceClass::Nic => {
                let rdma = pci.map(|pci| &pci.rdma[..]).unwrap_or_default();
                self.values.push(("rdma", Attribute::Bool(!rdma.is_empty())));
                self.always("linkType", "link_type");
                self.known("linkLayer", "link_layer");
                if let [only] = rdma {
                    self.text("rdmaDevice", only);
                }
                self.known("vdpa", "vdpa");
            }
            DeviceClass::Nvme => {
                self.always("serial", "serial");
                self.known("firmware", "firmware");
                if let Some(nqn) = self.device.attribute("subsystem_nqn") {
                    self.text("subsystemNqn", short(nqn));
                }
                let nsid = self.device.attribute("nsid").and_then(|nsid| nsid.parse().ok());
                self.int("nsid", nsid);
            }
            DeviceClass::Fpga => {
                self.known("afuId", "afu_id");
                self.known("interfaceId", "interface_id");
            }
            DeviceClass::Char => {
                let path = self.device.nodes.first().map(|node| node.host.clone());
                self.text("path", path.unwrap_or_default());
            }
            DeviceClass::Accelerator | DeviceClass::Other => {}
        }
    }

    /// The place of a PCI function. A node of `/dev` has only its NUMA node.
    fn add_pci(&mut self) {
        if let [node] = self.device.numa_nodes[..] {
            self.int(NUMA_NODE, Some(node));
            self.int(NUMA_NODE_OF_DRANET, Some(node));
        }
        let Some(pci) = self.device.pci.as_deref() else { return };
        self.text(PCIE_ROOT, pcie_root(pci));
        self.text(PCI_BUS_ID, pci.address.to_string());
        // The outermost switch, by its upstream port: cards with a switch of their own have an
        // inner one, which no other device shares.
        if let [_root_port, switch, _, ..] = pci.bridges[..] {
            self.text("switch", switch.to_string());
        }
        if let Some(pf) = pci.physfn.filter(|_| pci.is_vf()) {
            self.text("pf", pf.to_string());
        }
        self.int("vfIndex", pci.vf_index.filter(|_| pci.is_vf()));
        self.int("iommuGroup", self.device.iommu_group());
    }

    /// What a part of a function has: a MIG instance, a mediated device, a namespace.
    fn add_part(&mut self) {
        let device = self.device;
        let Some(part) = device.attribute("part") else { return };
        self.text("part", part);
        self.text("parent", short(device.attribute("parent").unwrap_or_default()));
        let profile = ["mig_profile", "mdev_type_name", "mdev_type"];
        if let Some(profile) = profile.into_iter().find_map(|name| device.attribute(name)) {
            self.text("profile", profile);
        }
    }

    /// What NVIDIA's driver and NVML report.
    fn add_nvidia(&mut self, facts: Facts<'_>) {
        let Some(pci) = self.device.pci.as_deref().filter(|pci| {
            self.device.class == DeviceClass::Gpu && pci.driver.as_deref() == Some("nvidia")
        }) else {
            return;
        };
        if let Some(version) = facts.nvidia_driver {
            match semver(version) {
                Some(version) => self.values.push(("driverVersion", Attribute::Version(version))),
                None => self.text("driverRelease", version),
            }
        }
        let described = facts.description(pci);
        if let Some((major, minor)) = described.and_then(|of| of.compute) {
            let version = Attribute::Version(format!("{major}.{minor}.0"));
            self.values.push(("cudaComputeCapability", version));
        }
        self.memory = vendors::memory(self.device, described);
    }

    /// The memory, and for parts of the capacity the number of claims that may have one. A claim
    /// without a request has the memory of one share. What is `taken` otherwise is missing.
    fn add_capacity(&mut self, taken: u32) {
        let (memory, Some(shares)) = (self.memory, self.shares) else {
            let memory = self.memory.map(|bytes| ("memory", Capacity::of_bytes(bytes)));
            return self.capacity.extend(memory);
        };
        let taken = taken.min(shares);
        let policy =
            |usual: &str, valid_range| Some(RequestPolicy { usual: usual.to_owned(), valid_range });
        if let Some(bytes) = memory {
            // In whole MiB: the API server returns the same text for such a number.
            let part = (bytes / u64::from(shares)) >> 20 << 20;
            let memory = Capacity::of_bytes(bytes - part * u64::from(taken));
            let request_policy = policy(&Capacity::of_bytes(part).value, None);
            self.capacity.push(("memory", Capacity { request_policy, ..memory }));
        }
        // The API refuses a value that is smaller than the least request. With nothing left, the
        // device has a taint.
        let left = (shares - taken).max(1);
        let range = ValidRange { min: "1".to_owned(), max: None };
        let request_policy = policy("1", Some(range));
        self.capacity.push((SHARES, Capacity { value: left.to_string(), request_policy }));
    }

    /// What the vendor's driver publishes. A MIG instance has more than the API allows with it. So
    /// what matters least comes after the vendor's values.
    fn add_vendor(&mut self, spec: &ResourceSpec, facts: Facts<'_>) {
        self.rest = vendors::values(spec, self.device, facts);
        if self.rest.is_empty() || self.device.class != DeviceClass::Gpu {
            return;
        }
        for name in [NUMA_NODE_OF_DRANET, "iommuGroup"] {
            if let Some(at) = self.values.iter().position(|(known, _)| *known == name) {
                let (name, value) = self.values.remove(at);
                self.rest.push((name, Value::Attribute(value)));
            }
        }
    }
}

/// The first element of a function's path below `/sys/devices` that the kernel names by a root bus
/// (`pci_register_host_bridge`): `pci0000:15`.
///
/// Behind a volume management device the path has two; the first one counts. A virtual function
/// may be on another bus than its physical function, and has the same path above it.
pub(super) fn pcie_root(pci: &PciFunction) -> String {
    let top = pci.bridges.first().copied().or(pci.physfn).unwrap_or(pci.address);
    format!("pci{:04x}:{:02x}", top.domain, top.bus)
}

/// A text of at most [`limits::VALUE`] bytes that identifies `text`: itself, or its start and its
/// hash.
fn short(text: &str) -> String {
    if text.len() <= limits::VALUE {
        return text.to_owned();
    }
    let hash = format!("-{:08x}", names::hash(text));
    let end = text.floor_char_boundary(limits::VALUE - hash.len());
    format!("{}{hash}", &text[..end])
}

/// A version by the rules of semver 2.0.0: three numbers without leading zeros. `580.95.05` becomes
/// `580.95.5`, and `12.4` becomes `12.4.0`. `None` for any other text.
#[must_use]
pub fn semver(text: &str) -> Option<String> {
    let mut numbers = [0_u64; 3];
    let parts: Vec<&str> = text.split('.').collect();
    if parts.len() > numbers.len() {
        return None;
    }
    for (number, part) in numbers.iter_mut().zip(parts) {
        *number = part.parse().ok().filter(|_| part.bytes().all(|b| b.is_ascii_digit()))?;
    }
    let [major, minor, patch] = numbers;
    Some(format!("{major}.{minor}.{patch}"))
}

/// The device with the values that the API server accepts.
fn checked(name: &str, draft: Draft<'_>) -> (api::Device, Vec<Dropped>) {
    let allow_multiple_allocations = draft.shares.is_some();
    let mut device =
        api::Device { name: name.to_owned(), allow_multiple_allocations, ..api::Device::default() };
    let mut dropped = Vec::new();
    let mut drop = |attribute: &str, why| {
        dropped.push(Dropped { device: name.to_owned(), attribute: attribute.to_owned(), why });
    };
    let mut room = limits::ATTRIBUTES.saturating_sub(draft.capacity.len());
    for (key, value) in draft.values {
        let refused = refused_key(key).or_else(|| refused_value(&value));
        match refused {
            // An expression may read it: it stays, without its value.
            Some(why) if ALWAYS.contains(&key) => {
                drop(key, why);
                device.attributes.insert(key.to_owned(), Attribute::text(""));
            }
            Some(why) => {
                drop(key, why);
                continue;
            }
            None if room == 0 => {
                drop(key, "a device has at most 32 attributes and capacities");
                continue;
            }
            None => drop_nothing(device.attributes.insert(key.to_owned(), value)),
        }
        room = room.saturating_sub(1);
    }
    device.capacity =
        draft.capacity.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    for (key, value) in draft.rest {
        match value {
            _ if room == 0 => break,
            Value::Attribute(value) => match refused_key(key).or_else(|| refused_value(&value)) {
                // An expression may read it.
                Some(why) => {
                    drop(key, why);
                    device.attributes.insert(key.to_owned(), Attribute::text(""));
                }
                None => drop_nothing(device.attributes.insert(key.to_owned(), value)),
            },
            Value::Capacity(mut value) => {
                // It is another name for a part of the device: two sums would count it twice.
                let nothing = || {
                    let range = ValidRange { min: "0".to_owned(), max: Some("0".to_owned()) };
                    RequestPolicy { usual: "0".to_owned(), valid_range: Some(range) }
                };
                value.request_policy = allow_multiple_allocations.then(nothing);
                device.capacity.insert(key.to_owned(), value);
            }
        }
        room -= 1;
    }
    (device, dropped)
}

/// An attribute is never added twice.
fn drop_nothing(former: Option<Attribute>) {
    debug_assert!(former.is_none(), "{former:?}");
}

/// The attributes with a text that every device of a class has.
pub const ALWAYS: &[&str] = &[
    "class", "resource", "vendor", "device", "model", "driver", "id", "linkType", "serial", "path",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Attributes, DeviceNode, GpuDescription, MigAttributes, NvmlGpu, Sharing};
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    const ADDRESS: &str = "0000:18:00.0";

    fn function(address: &str, bridges: &[&str]) -> PciFunction {
        PciFunction {
            vendor: Some(0x10de),
            device: Some(0x2330),
            driver: Some("nvidia".into()),
            bridges: bridges.iter().map(|bridge| bridge.parse().unwrap()).collect(),
            ..PciFunction::at(address.parse().unwrap())
        }
    }

    fn device(class: DeviceClass, id: &str, attributes: &[(&'static str, &str)]) -> Device {
        let bridges = ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"];
        Device {
            id: DeviceId::new(id),
            key: format!("pci:{ADDRESS}/10de:2330"),
            class,
            pci: Some(Box::new(function(ADDRESS, &bridges))),
            numa_nodes: vec![1],
            nodes: vec![DeviceNode::at("/dev/nvidia0")],
            attributes: attributes.iter().map(|(name, value)| (*name, *value)).collect(),
        }
    }

    fn described(device: &Device, facts: Facts<'_>) -> (Value, Vec<Dropped>) {
        let spec = ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), device.class);
        let (published, dropped) = describe("d", &spec, &device.id, device, facts);
        assert_eq!(violations(&published), [""; 0]);
        (serde_json::to_value(&published).unwrap(), dropped)
    }

    #[test]
    fn a_gpu_has_its_place_its_versions_and_its_memory() {
        let gpu = device(DeviceClass::Gpu, "GPU-1", &[("uuid", "GPU-1"), ("model", "H100")]);
        let description = GpuDescription {
            memory_mib: Some(81_559),
            compute: Some((9, 0)),
            ..GpuDescription::default()
        };
        let answer = NvmlGpu { description: Some(description), ..NvmlGpu::default() };
        let nvml = NvmlSnapshot { gpus: [(ADDRESS.parse().unwrap(), answer)].into() };
        let facts =
            Facts { nvidia_driver: Some("580.95.05"), nvml: Some(&nvml), vendors: false, taken: 0 };
        let (published, dropped) = described(&gpu, facts);
        let text = |text: &str| json!({ "string": text });
        let expected = json!({
            "name": "d",
            "attributes": {
                "class": text("gpu"), "resource": text("nvidia.com/gpu"), "vendor": text("10de"),
                "device": text("2330"), "model": text("H100"), "driver": text("nvidia"),
                "id": text("GPU-1"), "uuid": text("GPU-1"), "shared": {"bool": false},
                "vf": {"bool": false}, "switch": text("0000:16:00.0"),
                "resource.kubernetes.io/pcieRoot": text("pci0000:15"),
                "resource.kubernetes.io/pciBusID": text(ADDRESS),
                "resource.kubernetes.io/numaNode": {"int": 1}, "dra.net/numaNode": {"int": 1},
                "driverVersion": {"version": "580.95.5"},
                "cudaComputeCapability": {"version": "9.0.0"},
            },
            "capacity": {"memory": {"value": "81559Mi"}},
        });
        assert_eq!((published, dropped), (expected, vec![]));

        let (unknown, _) = described(
            &gpu,
            Facts { nvidia_driver: Some("580-beta"), nvml: None, vendors: false, taken: 0 },
        );
        assert_eq!(unknown["attributes"]["driverRelease"], text("580-beta"));
        assert_eq!(unknown["attributes"]["driverVersion"], Value::Null);
    }

    #[test]
    fn claims_may_have_parts_of_the_memory_and_no_vendor_counts_it_twice() {
        let gpu = device(DeviceClass::Gpu, "GPU-1", &[]);
        let described = GpuDescription { memory_mib: Some(81_559), ..GpuDescription::default() };
        let nvml = NvmlSnapshot {
            gpus: [(
                ADDRESS.parse().unwrap(),
                NvmlGpu { description: Some(described), ..NvmlGpu::default() },
            )]
            .into(),
        };
        let spec = ResourceSpec {
            sharing: Sharing::Replicas(4),
            capacity: true,
            api: crate::domain::Api::Dra,
            ..ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu)
        };
        let of = |spec: &ResourceSpec, id: &DeviceId, taken| {
            let facts = Facts { nvml: Some(&nvml), vendors: true, taken, ..Facts::default() };
            let (published, dropped) = describe("d", spec, id, &gpu, facts);
            assert!(dropped.is_empty() && violations(&published).is_empty(), "{dropped:?}");
            serde_json::to_value(published).unwrap()
        };
        let none = json!({"default": "0", "validRange": {"min": "0", "max": "0"}});
        let shares = |value: &str| json!({"value": value, "requestPolicy": {"default": "1", "validRange": {"min": "1"}}});
        let whole = of(&spec, &gpu.id, 0);
        assert_eq!(whole["allowMultipleAllocations"], true);
        assert_eq!(
            whole["capacity"],
            json!({
                "memory": {"value": "81559Mi", "requestPolicy": {"default": "20389Mi"}},
                "shares": shares("4"),
                "gpu.nvidia.com/memory": {"value": "81559Mi", "requestPolicy": none},
            })
        );
        assert_eq!(whole["attributes"]["shared"], json!({"bool": true}));
        assert_eq!(whole["attributes"]["shareOf"], Value::Null);
        let left = of(&spec, &gpu.id, 3)["capacity"].clone();
        assert_eq!(left["shares"], shares("1"));
        assert_eq!(left["memory"]["value"], "20392Mi", "what a request may have is still there");
        assert_eq!(of(&spec, &gpu.id, 9)["capacity"]["shares"], shares("1"), "the API's least");
        // The share of a claim from before the key was set, and the same resource without it.
        let plain = ResourceSpec { capacity: false, ..spec.clone() };
        for (spec, id) in [(&spec, gpu.id.share(1)), (&plain, gpu.id.share(1))] {
            let share = of(spec, &id, 0);
            assert_eq!(share["allowMultipleAllocations"], Value::Null);
            assert_eq!(share["capacity"]["memory"], json!({"value": "81559Mi"}));
            assert_eq!(share["capacity"]["shares"], Value::Null);
        }
    }

    #[test]
    fn a_part_has_its_whole_its_profile_and_its_own_memory() {
        let record = [
            ("part", "mig"),
            ("parent", "GPU-1"),
            ("mig_profile", "1g.10gb"),
            ("gi", "3"),
            ("ci", "0"),
        ];
        let part = device(DeviceClass::Gpu, "MIG-1", &record);
        let size = MigAttributes { memory_mb: 10 << 10, ..MigAttributes::default() };
        let description = GpuDescription {
            memory_mib: Some(81_559),
            instances: [((3, 0), size)].into(),
            ..GpuDescription::default()
        };
        let answer = NvmlGpu { description: Some(description), ..NvmlGpu::default() };
        let nvml = NvmlSnapshot { gpus: [(ADDRESS.parse().unwrap(), answer)].into() };
        let (published, _) = described(
            &part,
            Facts { nvidia_driver: None, nvml: Some(&nvml), vendors: false, taken: 0 },
        );
        for (name, value) in [("part", "mig"), ("parent", "GPU-1"), ("profile", "1g.10gb")] {
            assert_eq!(published["attributes"][name], json!({ "string": value }));
        }
        assert_eq!(published["capacity"], json!({"memory": {"value": "10Gi"}}));
    }

    #[test]
    fn a_value_that_the_api_refuses_is_left_out_or_empty_and_reported() {
        let long = "x".repeat(65);
        let gpu = device(DeviceClass::Gpu, &long, &[("uuid", &long), ("model", &long)]);
        let (published, dropped) = described(&gpu, Facts::default());
        let dropped: Vec<&str> = dropped.iter().map(|it| it.attribute.as_str()).collect();
        assert_eq!(dropped, ["model", "uuid"]);
        assert_eq!(published["attributes"]["model"], json!({"string": ""}), "expressions read it");
        assert_eq!(published["attributes"]["uuid"], Value::Null);
        let id = published["attributes"]["id"]["string"].as_str().unwrap();
        assert!(id.len() == 64 && id.starts_with("xxx") && id != &long[..64], "{id}");
    }

    #[test]
    fn the_pci_root_is_that_of_the_path() {
        let vf = PciFunction {
            physfn: Some("0000:00:02.0".parse().unwrap()),
            ..function("0000:01:00.0", &[])
        };
        for (function, root) in [
            (function("0000:00:1f.0", &[]), "pci0000:00"),
            (function("10001:81:00.0", &["0000:97:00.5", "10001:80:01.0"]), "pci0000:97"),
            (function("10000:00:04.0", &[]), "pci10000:00"),
            (vf, "pci0000:00"),
        ] {
            assert_eq!(pcie_root(&function), root);
        }
    }

    #[test]
    fn a_share_names_its_device() {
        let gpu = device(DeviceClass::Gpu, "GPU-1", &[]);
        let spec = ResourceSpec {
            sharing: Sharing::Replicas(2),
            ..ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu)
        };
        let (share, _) = describe("d", &spec, &gpu.id.share(1), &gpu, Facts::default());
        let value = |name: &str| share.attributes[name].clone();
        assert_eq!(
            (value("id"), value("shareOf"), value("shared")),
            (Attribute::text("GPU-1::1"), Attribute::text("GPU-1"), Attribute::Bool(true))
        );
    }

    /// One device of each class, with every fact.
    fn all_names() -> BTreeSet<String> {
        let record = [
            ("uuid", "u"),
            ("model", "m"),
            ("hive", "h"),
            ("link_type", "ether"),
            ("link_layer", "Ethernet"),
            ("vdpa", "vdpa0"),
            ("serial", "s"),
            ("firmware", "f"),
            ("subsystem_nqn", "q"),
            ("nsid", "1"),
            ("afu_id", "a"),
            ("interface_id", "i"),
            ("part", "mig"),
            ("parent", "p"),
            ("mig_profile", "1g"),
            ("iommu_group", "4"),
        ];
        let description = GpuDescription { compute: Some((9, 0)), ..GpuDescription::default() };
        let answer = NvmlGpu { description: Some(description), ..NvmlGpu::default() };
        let nvml = NvmlSnapshot { gpus: [(ADDRESS.parse().unwrap(), answer)].into() };
        let classes = [
            DeviceClass::Gpu,
            DeviceClass::Rdma,
            DeviceClass::Nvme,
            DeviceClass::Fpga,
            DeviceClass::Accelerator,
            DeviceClass::Char,
        ];
        let mut names = BTreeSet::new();
        for (class, version) in classes.into_iter().flat_map(|it| [(it, "1.2.3"), (it, "x")]) {
            let mut device = device(class, "GPU-1", &record);
            let pci = device.pci.as_mut().unwrap();
            (pci.physfn, pci.vf_index) = (Some("0000:18:00.7".parse().unwrap()), Some(1));
            pci.rdma = vec!["mlx5_0".into()];
            let spec = ResourceSpec {
                sharing: Sharing::Replicas(2),
                ..ResourceSpec::new("a.b/c".parse().unwrap(), class)
            };
            let facts =
                Facts { nvidia_driver: Some(version), nvml: Some(&nvml), vendors: false, taken: 0 };
            let (published, _) = describe("d", &spec, &device.id.share(0), &device, facts);
            names.extend(published.attributes.into_keys());
        }
        names
    }

    #[test]
    fn dra_md_has_a_row_for_every_attribute_and_no_other() {
        let page = include_str!("../../docs/dra.md");
        let (_, rest) = page.split_once("| attribute | type | devices | value |\n").unwrap();
        let rows = rest.lines().skip(1).take_while(|line| line.starts_with('|'));
        let cells = rows.map(|row| row.split('|').nth(1).unwrap());
        let documented = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let documented: BTreeSet<String> = documented.map(str::to_owned).collect();
        assert_eq!(documented, all_names());
    }

    #[test]
    fn versions_become_semver() {
        for (text, version) in [
            ("580.95.05", Some("580.95.5")),
            ("12.4", Some("12.4.0")),
            ("007", Some("7.0.0")),
            ("1.2.3.4", None),
            ("1..2", None),
            ("1.2-rc", None),
            ("", None),
            ("+1.2", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(semver(text).as_deref(), version, "{text}");
        }
    }

    #[test]
    fn the_rules_for_names_are_those_of_the_api() {
        for key in ["class", "_x1", "resource.kubernetes.io/pcieRoot", &"k".repeat(32)] {
            assert_eq!(refused_key(key), None, "{key}");
        }
        let domain = format!("{}/k", "d".repeat(64));
        for key in ["", "1x", "a-b", "a.b", "/x", "A_/x", "a/b/c", &"k".repeat(33), &domain] {
            assert!(refused_key(key).is_some(), "{key}");
        }
        let device = |taint: &str, value: &str, effect: &str| api::Device {
            name: "d".into(),
            taints: vec![api::Taint {
                key: taint.into(),
                value: value.into(),
                effect: effect.into(),
                time_added: None,
            }],
            ..api::Device::default()
        };
        assert_eq!(violations(&device("holdfast.dev/xid", "79", "NoSchedule")), [""; 0]);
        for (key, value, effect) in [
            ("holdfast.dev/", "", "NoSchedule"),
            ("holdfast.dev/a b", "", "NoSchedule"),
            ("holdfast.dev/xid", "-", "NoSchedule"),
            ("holdfast.dev/xid", &"x".repeat(64), "NoSchedule"),
            ("holdfast.dev/xid", "", "no"),
        ] {
            assert_eq!(violations(&device(key, value, effect)).len(), 1, "{key} {value} {effect}");
        }
    }

    proptest! {
        #[test]
        fn no_record_makes_a_device_that_the_api_refuses(
            id in ".{0,90}",
            values in prop::collection::vec(".{0,90}", 12),
            class in prop::sample::select(vec![
                DeviceClass::Gpu, DeviceClass::Rdma, DeviceClass::Nvme, DeviceClass::Fpga,
                DeviceClass::Char, DeviceClass::Accelerator,
            ]),
            version in ".{0,90}",
            vendor in prop::sample::select(vec![0x10de_u16, 0x1002, 0x8086, 0x15b3]),
            driver in prop::sample::select(vec!["nvidia", "amdgpu", "xe", "vfio-pci"]),
            is_vf in any::<bool>(),
        ) {
            let names = [
                "uuid", "model", "serial", "firmware", "subsystem_nqn", "nsid", "hive", "part",
                "parent", "link_type", "vdpa", "afu_id",
            ];
            let mut device = device(class, &id, &[]);
            device.attributes = names.into_iter().zip(values).collect::<Attributes>();
            let spec = ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), class);
            let facts = Facts { nvidia_driver: Some(&version), nvml: None, vendors: false, taken: 0 };
            let (mut published, _) = describe("d", &spec, &device.id, &device, facts);
            prop_assert_eq!(violations(&published), Vec::<String>::new());
            let always = ["class", "resource", "vendor", "device", "model", "driver", "id"];
            for name in always {
                prop_assert!(published.attributes.contains_key(name), "{}", name);
            }

            // The vendor's attributes change no other one, but for those that matter least.
            let pci = device.pci.as_mut().unwrap();
            (pci.vendor, pci.driver) = (Some(vendor), Some(driver.into()));
            pci.physfn = is_vf.then(|| "0000:18:00.7".parse().unwrap());
            (published, _) = describe("d", &spec, &device.id, &device, facts);
            let facts = Facts { vendors: true, ..facts };
            let (with, _) = describe("d", &spec, &device.id, &device, facts);
            prop_assert_eq!(violations(&with), Vec::<String>::new());
            for (name, value) in &published.attributes {
                let found = with.attributes.get(name);
                let is_least = [NUMA_NODE_OF_DRANET, "iommuGroup"].contains(&name.as_str());
                prop_assert!(found == Some(value) || is_least && found.is_none(), "{}", name);
            }
        }
    }
}
