//! The labels of AMD's node labeller, under its names and with its values, so that selectors of
//! pods stay as they are.
//!
//! A property that all GPUs share is one label, and its value is in the value. Where they differ,
//! each value is a label with the number of its GPUs. The older names (`beta.amd.com`) have both. A
//! fact that is not known omits its label, and so does a value that Kubernetes does not accept.
//!
//! That program reads firmware versions by ioctl of the driver. They are in no file, and their
//! labels are left out. It also reads the family in this way; here it follows from the version of
//! the graphics engine.

use super::gpu_labels::Labels;
use super::label_value::is_valid;
use crate::domain::{Device, DeviceClass, DeviceId, Inventory};
use std::collections::BTreeMap;

const DRIVER: &str = "amdgpu";

/// Families by the version of the graphics engine, first and last of each (Linux `kfd_device.c` has
/// the versions, `amdgpu_discovery.c` the families). 100306 is that of two families.
const FAMILIES: [(u32, u32, &str); 16] = [
    (80_001, 80_001, "CZ"),
    (80_002, 80_003, "VI"),
    (90_000, 90_000, "AI"),
    (90_002, 90_002, "RV"),
    (90_004, 90_010, "AI"),
    (90_012, 90_012, "RV"),
    (90_400, 90_500, "AI"),
    (100_100, 100_103, "NV"),
    (100_300, 100_302, "NV"),
    (100_303, 100_303, "VGH"),
    (100_304, 100_304, "NV"),
    (100_305, 100_305, "YC"),
    (110_000, 110_002, "GC_11_0_0"),
    (110_003, 110_003, "GC_11_0_1"),
    (110_500, 110_503, "GC_11_5_0"),
    (120_000, 120_001, "GC_12_0_0"),
];

/// The labels of the offered GPUs of AMD's driver. Without such a GPU there are none: another
/// plugin then has its own labels.
#[must_use]
pub fn amd_labels(inventory: &Inventory) -> Labels {
    let offered = inventory.resources.values().flat_map(|offering| offering.devices.values());
    let gpus = offered.map(|offered| offered.device.as_ref()).filter(|device| {
        let driver = device.pci.as_ref().and_then(|function| function.driver.as_deref());
        device.class == DeviceClass::Gpu && driver == Some(DRIVER)
    });
    // Several shares are one device.
    let gpus: BTreeMap<&DeviceId, &Device> = gpus.map(|device| (&device.id, device)).collect();
    let mut labels = Labels::new();
    if gpus.is_empty() {
        return labels;
    }
    for (kind, of) in COUNTED {
        count(kind, gpus.values().filter_map(|device| of(device)), &mut labels);
    }
    for (kind, name) in
        [("driver-version", "driver_version"), ("driver-src-version", "driver_source")]
    {
        let version = gpus.values().find_map(|device| device.attribute(name));
        labels.extend(version.map(|version| (named(kind), version.to_owned())));
    }
    let mut modes = gpus.values().filter_map(|device| {
        let [compute, memory] =
            ["compute_partition", "memory_partition"].map(|name| device.attribute(name));
        Some(format!("{}_{}", compute?, memory?))
    });
    if let Some(first) = modes.next().filter(|first| modes.all(|other| other == *first)) {
        labels.insert(named("compute-memory-partition"), first);
    }
    for kind in ["compute", "memory"] {
        let name = format!("{kind}_partitions");
        let is_able = gpus.values().any(|device| device.attribute(&name).is_some());
        labels.insert(named(&format!("{kind}-partitioning-supported")), is_able.to_string());
    }
    labels.retain(|name, value| is_valid(value) && name.split('/').nth(1).is_some_and(is_valid));
    labels
}

/// A property whose values are counted, by the name in the label.
type Counted = (&'static str, fn(&Device) -> Option<String>);

const COUNTED: [Counted; 6] = [
    ("family", |device| {
        let version: u32 = device.attribute("gfx_version")?.parse().ok()?;
        family(version).map(str::to_owned)
    }),
    ("device-id", |device| {
        // The other partitions of a GPU are no PCI functions, and have no such number there.
        let id = device.pci.as_ref()?.device.filter(|_| device.attribute("xcp").is_none())?;
        Some(format!("{id:04x}"))
    }),
    ("product-name", |device| {
        let name = device.attribute("model")?.replace(' ', "_").replace(['(', ')'], "");
        (!name.is_empty()).then_some(name)
    }),
    ("vram", |device| {
        let mib: u64 = device.attribute("vram_mib")?.parse().ok()?;
        Some(format!("{}G", (mib + 512) / 1024))
    }),
    ("simd-count", |device| device.attribute("simd_count").map(str::to_owned)),
    ("cu-count", |device| device.attribute("cu_count").map(str::to_owned)),
];

fn family(version: u32) -> Option<&'static str> {
    let found = FAMILIES.iter().find(|(first, last, _)| (*first..=*last).contains(&version));
    found.map(|(_, _, name)| *name)
}

fn named(kind: &str) -> String {
    format!("amd.com/gpu.{kind}")
}

/// The labels of a property by its values.
fn count(kind: &str, values: impl Iterator<Item = String>, labels: &mut Labels) {
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for value in values {
        *counts.entry(value).or_default() += 1;
    }
    let is_one = counts.len() == 1;
    for (value, number) in counts {
        let name = named(kind);
        labels.insert(format!("beta.{name}.{value}"), number.to_string());
        if is_one {
            labels.insert(format!("beta.{name}"), value.clone());
            labels.insert(name, value);
        } else {
            labels.insert(format!("{name}.{value}"), number.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Attributes, Health, Offered, Offering, PciFunction, ResourceSpec};
    use std::sync::Arc;

    fn gpu(number: u8, driver: &str, attributes: &[(&'static str, &str)]) -> Device {
        let address = format!("0000:{number:02x}:00.0");
        let pci = PciFunction {
            device: Some(0x74a1),
            driver: Some(driver.into()),
            ..PciFunction::at(address.parse().unwrap())
        };
        Device {
            id: DeviceId::new(address),
            key: String::new(),
            class: DeviceClass::Gpu,
            pci: Some(Box::new(pci)),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: attributes.iter().copied().collect::<Attributes>(),
        }
    }

    /// The labels of these devices. Each is offered in two shares.
    fn labels(devices: &[Device]) -> Vec<String> {
        let name: crate::domain::ResourceName = "amd.com/gpu".parse().unwrap();
        let spec = Arc::new(ResourceSpec::new(name.clone(), DeviceClass::Gpu));
        let shares = devices.iter().flat_map(|device| {
            let device = Arc::new(device.clone());
            [0, 1].map(|share| {
                let offered = Offered { device: Arc::clone(&device), health: Health::Healthy };
                (DeviceId::new(format!("{}::{share}", device.id)), offered)
            })
        });
        let offering = Arc::new(Offering { spec, devices: shares.collect() });
        let inventory = Inventory { resources: [(name, offering)].into() };
        amd_labels(&inventory).into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    const MI300X: [(&str, &str); 10] = [
        ("model", "AMD Instinct MI300X (OAM)"),
        ("vram_mib", "196592"),
        ("simd_count", "1216"),
        ("cu_count", "304"),
        ("gfx_version", "90402"),
        ("compute_partition", "spx"),
        ("memory_partition", "nps1"),
        ("compute_partitions", "spx, dpx, qpx, cpx"),
        ("driver_version", "6.10.5"),
        ("driver_source", "2AD12F2BD6BC5D3C6A24E0F"),
    ];

    #[test]
    fn gpus_of_one_kind_have_the_labels_of_amds_labeller() {
        let found = labels(&[gpu(1, "amdgpu", &MI300X), gpu(2, "amdgpu", &MI300X)]);
        let expected = [
            "amd.com/gpu.compute-memory-partition=spx_nps1",
            "amd.com/gpu.compute-partitioning-supported=true",
            "amd.com/gpu.cu-count=304",
            "amd.com/gpu.device-id=74a1",
            "amd.com/gpu.driver-src-version=2AD12F2BD6BC5D3C6A24E0F",
            "amd.com/gpu.driver-version=6.10.5",
            "amd.com/gpu.family=AI",
            "amd.com/gpu.memory-partitioning-supported=false",
            "amd.com/gpu.product-name=AMD_Instinct_MI300X_OAM",
            "amd.com/gpu.simd-count=1216",
            "amd.com/gpu.vram=192G",
            "beta.amd.com/gpu.cu-count=304",
            "beta.amd.com/gpu.cu-count.304=2",
            "beta.amd.com/gpu.device-id=74a1",
            "beta.amd.com/gpu.device-id.74a1=2",
            "beta.amd.com/gpu.family=AI",
            "beta.amd.com/gpu.family.AI=2",
            "beta.amd.com/gpu.product-name=AMD_Instinct_MI300X_OAM",
            "beta.amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM=2",
            "beta.amd.com/gpu.simd-count=1216",
            "beta.amd.com/gpu.simd-count.1216=2",
            "beta.amd.com/gpu.vram=192G",
            "beta.amd.com/gpu.vram.192G=2",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn gpus_that_differ_are_counted_and_others_have_no_labels() {
        let with = |number, vram| gpu(number, "amdgpu", &[("vram_mib", vram), ("model", "Ü")]);
        let found = labels(&[with(1, "16368"), with(2, "16368"), with(3, "512")]);
        for (label, is_there) in [
            ("amd.com/gpu.vram.16G=2", true),
            ("amd.com/gpu.vram.1G=1", true),
            ("beta.amd.com/gpu.vram.1G=1", true),
            ("amd.com/gpu.device-id=74a1", true),
            ("amd.com/gpu.vram=16G", false),
            ("amd.com/gpu.product-name=Ü", false),
        ] {
            assert_eq!(found.iter().any(|found| found == label), is_there, "{label}: {found:?}");
        }
        assert!(labels(&[gpu(1, "vfio-pci", &MI300X), gpu(2, "nvidia", &[])]).is_empty());
        // A part that is no PCI function of its own.
        let part = gpu(1, "amdgpu", &[("xcp", "amdgpu_xcp_1")]);
        assert!(!labels(&[part]).iter().any(|label| label.contains("device-id")));
    }

    #[test]
    fn the_family_follows_from_the_version_of_the_graphics_engine() {
        for (version, expected) in [
            (70_000, None),
            (80_003, Some("VI")),
            (90_006, Some("AI")),
            (90_010, Some("AI")),
            (90_012, Some("RV")),
            (90_500, Some("AI")),
            (100_100, Some("NV")),
            (100_303, Some("VGH")),
            (100_306, None),
            (110_001, Some("GC_11_0_0")),
            (110_003, Some("GC_11_0_1")),
            (110_501, Some("GC_11_5_0")),
            (120_001, Some("GC_12_0_0")),
            (130_000, None),
        ] {
            assert_eq!(family(version), expected, "{version}");
        }
    }
}
