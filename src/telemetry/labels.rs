//! The node's labels: a feature file for the local source of Node Feature Discovery (NFD).
//!
//! NFD reads every file of its folder that does not begin with a dot, one label per line. It
//! ignores a file of more than 64 KiB (its `source/local/local.go`). NFD refuses a label that is
//! invalid in Kubernetes. Names and values have at most 63 characters, of letters, digits, `-`, `_`
//! and `.`, and begin and end with a letter or digit.
//!
//! A label describes the devices of a node, not their health. It changes when a device is added or
//! removed, so that a short failure does not change where pods are placed.
//!
//! The labels of NVIDIA's GPUs depend on answers of NVML, which come after the start, or never.
//! Until then those of the former file stay, if a checksum in it shows that the driver's files are
//! the same. So a restart removes no label.

use super::amd_labels::amd_labels;
use super::gpu_labels::{GpuOffers, Labels, gpu_labels};
use super::label_value::{LENGTH_MAX, is_valid};
use crate::domain::{Device, DeviceId, Inventory, NvidiaNode, Offering};
use std::collections::BTreeMap;

/// The file's name.
pub const FILE: &str = "holdfast";

/// The largest file that NFD reads.
pub const FILE_BYTES_MAX: u64 = 65_536;
const SIZE_MAX: usize = 65_536;
/// The prefix of the names: a domain of ours, because NFD refuses Kubernetes' own.
const PREFIX: &str = "holdfast.dev/";

/// Begins the line with the checksum, and every label of NVIDIA's GPUs.
const CHECKSUM: &str = "# GPUs of NVIDIA's driver: ";
const NVIDIA: &str = "nvidia.com/";

/// The part of the file about NVIDIA's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPart {
    /// The checksum of what does not depend on NVML.
    checksum: String,
    labels: Labels,
}

impl GpuPart {
    /// The part of a file that was written before; `None` if it has none.
    #[must_use]
    pub fn in_file(text: &str) -> Option<Self> {
        let checksum = text.lines().find_map(|line| line.strip_prefix(CHECKSUM))?;
        let labels = text.lines().filter(|line| line.starts_with(NVIDIA));
        let labels = labels.filter_map(|line| line.split_once('='));
        let valid = labels.filter(|(_, value)| value.is_empty() || is_valid(value));
        Some(GpuPart {
            checksum: checksum.to_owned(),
            labels: valid.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        })
    }

    /// The part for this node. While NVML has not described every GPU, the `former` part of the
    /// same hardware stays.
    #[must_use]
    pub fn of(node: &NvidiaNode, offers: &GpuOffers, former: Option<&Self>) -> Option<Self> {
        if node.gpus.is_empty() {
            return None;
        }
        let mut plain = node.hardware();
        for (name, value) in gpu_labels(&node.without_nvml(), offers) {
            plain.extend(["\n", &name, "=", &value]);
        }
        let checksum = format!("{:08x}", crc32fast::hash(plain.as_bytes()));
        let same = former.filter(|former| !node.is_described() && former.checksum == checksum);
        Some(match same {
            Some(former) => former.clone(),
            None => GpuPart { checksum, labels: gpu_labels(node, offers) },
        })
    }
}

/// The file's text.
#[must_use]
pub fn features(inventory: &Inventory, gpus: Option<&GpuPart>) -> String {
    let mut text =
        String::from("# Written by Holdfast when the node's devices change; do not edit.\n");
    if let Some(GpuPart { checksum, labels }) = gpus {
        text.extend([CHECKSUM, checksum, "\n"]);
        for (name, value) in labels {
            text.extend([name, "=", value, "\n"]);
        }
    }
    for (name, value) in amd_labels(inventory) {
        text.extend([name.as_str(), "=", &value, "\n"]);
    }
    for (resource, offering) in &inventory.resources {
        for (what, value) in of_resource(offering) {
            let line = format!("{PREFIX}{}={value}\n", name(resource.as_str(), what));
            if text.len() + line.len() <= SIZE_MAX {
                text.push_str(&line);
            }
        }
    }
    text
}

/// The number of devices, and the attributes that all of them share.
fn of_resource(offering: &Offering) -> Vec<(&'static str, String)> {
    let devices: BTreeMap<&DeviceId, &Device> = offering
        .devices
        .values()
        .map(|offered| (&offered.device.id, offered.device.as_ref()))
        .collect();
    if devices.is_empty() {
        return Vec::new();
    }
    let common = |of: fn(&Device) -> Option<&str>| {
        let mut all = devices.values().map(|device| of(device));
        let first = all.next().flatten()?;
        all.all(|other| other == Some(first)).then(|| value(first)).flatten()
    };
    let mut labels = vec![("count", devices.len().to_string())];
    labels.extend(common(|device| device.attribute("model")).map(|model| ("model", model)));
    labels.extend(
        common(|device| device.pci.as_ref()?.driver.as_deref()).map(|driver| ("driver", driver)),
    );
    labels
}

/// `nvidia.com_gpu.count`. A name that is too long is cut, and made unique by the checksum of the
/// whole name.
fn name(resource: &str, what: &str) -> String {
    let plain = resource.replace('/', "_");
    let length_max = LENGTH_MAX - what.len() - 1;
    if plain.len() <= length_max {
        return format!("{plain}.{what}");
    }
    let sum = format!("{:08x}", crc32fast::hash(resource.as_bytes()));
    // Names of resources are ASCII.
    format!("{}-{sum}.{what}", &plain[..length_max - sum.len() - 1])
}

/// A text as a valid label value: `NVIDIA H100 80GB HBM3` is `NVIDIA-H100-80GB-HBM3`. `None` if no
/// character is left.
fn value(text: &str) -> Option<String> {
    let plain: String = text
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '.') { c } else { '-' })
        .collect();
    let words: Vec<&str> = plain.split('-').filter(|word| !word.is_empty()).collect();
    let mut value = words.join("-");
    value.truncate(LENGTH_MAX);
    let value = value.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{DeviceClass, Health, Offered, PciFunction, Reason, ResourceSpec};
    use std::sync::Arc;

    fn offering(resource: &str, devices: &[(&str, Option<&str>, Option<&str>)]) -> Offering {
        let spec = Arc::new(ResourceSpec::new(resource.parse().unwrap(), DeviceClass::Gpu));
        let mut ids = BTreeMap::new();
        for (n, (id, model, driver)) in (0u8..).zip(devices) {
            let pci = PciFunction {
                driver: driver.map(str::to_owned),
                ..PciFunction::at(format!("0000:{n:02x}:00.0").parse().unwrap())
            };
            let device = Arc::new(Device {
                id: DeviceId::new(*id),
                key: String::new(),
                class: DeviceClass::Gpu,
                pci: Some(Box::new(pci)),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: model.map(|model| ("model", model.to_owned())).into_iter().collect(),
            });
            // Two shares of each, one of them unhealthy: labels depend on neither.
            ids.insert(
                device.id.share(0),
                Offered { device: Arc::clone(&device), health: Health::Healthy },
            );
            ids.insert(
                device.id.share(1),
                Offered { device, health: Health::Unhealthy(Reason::Xid) },
            );
        }
        Offering { spec, devices: ids }
    }

    fn inventory(offerings: Vec<Offering>) -> Inventory {
        Inventory {
            resources: offerings
                .into_iter()
                .map(|offering| (offering.spec.name.clone(), Arc::new(offering)))
                .collect(),
        }
    }

    #[test]
    fn the_file_matches_the_golden_text() {
        let h100 = Some("NVIDIA H100 80GB HBM3");
        let gpus =
            offering("nvidia.com/gpu", &[("a", h100, Some("nvidia")), ("b", h100, Some("nvidia"))]);
        let mixed = offering(
            "example.com/nic",
            &[("c", Some("one"), Some("mlx5_core")), ("d", Some("other"), Some("mlx5_core"))],
        );
        let some = offering("example.com/part", &[("e", Some("one"), None), ("f", None, None)]);
        let none = offering("example.com/none", &[]);
        let wanted = "# Written by Holdfast when the node's devices change; do not edit.\n\
                      holdfast.dev/example.com_nic.count=2\n\
                      holdfast.dev/example.com_nic.driver=mlx5_core\n\
                      holdfast.dev/example.com_part.count=2\n\
                      holdfast.dev/nvidia.com_gpu.count=2\n\
                      holdfast.dev/nvidia.com_gpu.model=NVIDIA-H100-80GB-HBM3\n\
                      holdfast.dev/nvidia.com_gpu.driver=nvidia\n";
        assert_eq!(features(&inventory(vec![gpus, mixed, some, none]), None), wanted);
    }

    #[test]
    fn every_label_is_valid_in_kubernetes() {
        let long = format!("{}.example.com/{}", "d".repeat(60), "r".repeat(60));
        let longer = format!("{}.example.com/{}s", "d".repeat(60), "r".repeat(59));
        for resource in ["a.b/c", "nvidia.com/mig-1g.10gb", &long] {
            assert!(is_valid(&name(resource, "driver")), "{resource}");
        }
        assert_ne!(name(&long, "count"), name(&longer, "count"), "both are cut at the same place");
        for text in [
            "NVIDIA H100 80GB HBM3",
            "Ärger (Größe)",
            "..x..",
            &"m".repeat(100),
            &format!("{} x", "m".repeat(62)),
            "MI300X/OAM",
        ] {
            assert!(value(text).is_some_and(|value| is_valid(&value)), "{text}: {:?}", value(text));
        }
        assert_eq!(value("™ -"), None);
    }

    #[test]
    fn the_gpus_of_the_former_file_stay_until_nvml_has_described_them() {
        use crate::domain::{Contract, GpuDescription, NvidiaGpu, NvidiaOptions, Plan, Sharing};
        let node = |driver: &str, memory_mib: Option<u64>| NvidiaNode {
            driver: Some(driver.into()),
            machine: None,
            gpus: vec![NvidiaGpu {
                address: "0000:18:00.0".parse().unwrap(),
                model: Some("NVIDIA L4".into()),
                class: None,
                in_mig_mode: false,
                instances: Vec::new(),
                description: memory_mib
                    .map(|_| GpuDescription { memory_mib, ..GpuDescription::default() }),
            }],
        };
        let offers = |replicas: u32| {
            let spec = ResourceSpec {
                contract: Contract::Nvidia(NvidiaOptions::default()),
                sharing: Sharing::replicas(replicas),
                ..ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu)
            };
            let plan = Plan { specs: [Arc::new(spec)].into(), ..Plan::default() };
            GpuOffers::of(&plan).unwrap()
        };
        let text = |part: &Option<GpuPart>| features(&Inventory::default(), part.as_ref());
        let has_memory =
            |part: &Option<GpuPart>| text(part).contains("\nnvidia.com/gpu.memory=23034\n");
        let first = GpuPart::of(&node("580.1", Some(23_034)), &offers(1), None);
        assert!(has_memory(&first));
        let read = GpuPart::in_file(&text(&first));
        assert_eq!(read, first, "the file contains all of it");
        let after =
            |node: &NvidiaNode, replicas| GpuPart::of(node, &offers(replicas), read.as_ref());
        assert_eq!(after(&node("580.1", None), 1), first);
        assert!(!has_memory(&after(&node("580.2", None), 1)), "another driver");
        assert!(!has_memory(&after(&node("580.1", None), 2)), "other shares");
        let now = after(&node("580.1", Some(1)), 1);
        assert!(text(&now).contains("\nnvidia.com/gpu.memory=1\n"), "NVML has answered");
        assert_eq!(after(&NvidiaNode::default(), 1), None);
        assert_eq!(GpuPart::in_file(&text(&None)), None);
    }

    #[test]
    fn the_file_never_exceeds_the_size_that_nfd_reads() {
        let many = (0..2000)
            .map(|n| {
                offering(
                    &format!("example.com/resource-{n}"),
                    &[("a", Some("model"), Some("driver"))],
                )
            })
            .collect();
        let text = features(&inventory(many), None);
        assert!(text.len() <= SIZE_MAX && text.len() > SIZE_MAX - 100 && text.ends_with('\n'));
    }
}
