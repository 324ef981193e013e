//! Near misses: devices that one criterion keeps out of a resource. They explain why a resource has
//! no device.

use super::criteria::{Host, driver, is_usable, is_vf, selects_part, vendor};
use super::exclusion::exclusion;
use crate::domain::{
    Device, DeviceClass, DeviceId, Pf, PfSelect, ResourceName, ResourceSpec, SELECTABLE, Select,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::sync::Arc;

/// A device that would be offered except for one criterion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearMiss {
    /// The device.
    pub device: DeviceId,
    /// The key of the configuration that keeps it out, or `host` where the host uses the device. It
    /// is `driver` also for a device without a driver, which no key selects.
    pub criterion: &'static str,
    /// The value that the resource wants.
    pub wanted: String,
    /// The value of the device; `None` where it is unknown.
    pub found: Option<String>,
}

/// The most devices that a sentence names.
const NAMED_MAX: usize = 4;
/// The most criteria that a sentence names.
const CRITERIA_MAX: usize = 2;

/// Why a resource has no device although there are near misses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nearest<'a> {
    misses: &'a [NearMiss],
    /// A miss of the criterion that keeps out the most devices.
    pub first: &'a NearMiss,
    /// Whether every device lacks only a driver.
    pub is_unbound: bool,
}

impl<'a> Nearest<'a> {
    /// Summarizes these misses; `None` where there are none.
    #[must_use]
    pub fn of(misses: &'a [NearMiss]) -> Option<Self> {
        let is_unbound = misses.iter().all(NearMiss::is_unbound);
        let count =
            |criterion: &str| misses.iter().filter(|miss| miss.criterion == criterion).count();
        // Of equally frequent criteria, the first.
        let first = misses.iter().rev().max_by_key(|miss| count(miss.criterion))?;
        Some(Nearest { misses, first, is_unbound })
    }
}

impl NearMiss {
    fn is_unbound(&self) -> bool {
        self.criterion == "driver" && self.found.is_none()
    }
}

/// One clause for each of the criteria that keep out the most devices.
impl Display for Nearest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_unbound {
            let them = if self.misses.len() == 1 { "it" } else { "them" };
            return write!(
                f,
                "{} would be offered, but no driver is bound to {them}",
                named(self.misses.iter())
            );
        }
        let mut criteria: Vec<&str> = vec![self.first.criterion];
        for miss in self.misses {
            if !criteria.contains(&miss.criterion) {
                criteria.push(miss.criterion);
            }
        }
        for (index, criterion) in criteria.into_iter().take(CRITERIA_MAX).enumerate() {
            let misses = || self.misses.iter().filter(|miss| miss.criterion == criterion);
            let known: BTreeSet<&str> = misses().filter_map(|miss| miss.found.as_deref()).collect();
            let unknown = misses().any(|miss| miss.found.is_none()).then_some("not known");
            let is =
                known.into_iter().take(NAMED_MAX).chain(unknown).collect::<Vec<_>>().join(" or ");
            let wanted = misses().next().map(|miss| miss.wanted.as_str()).unwrap_or_default();
            let between = if index == 0 { "" } else { "; " };
            write!(
                f,
                "{between}{} would be offered if not for `{criterion}`: wanted {wanted}, found {is}",
                named(misses())
            )?;
        }
        Ok(())
    }
}

fn named<'a>(misses: impl Iterator<Item = &'a NearMiss> + Clone) -> String {
    let some: Vec<&str> = misses.clone().take(NAMED_MAX).map(|miss| miss.device.as_str()).collect();
    let more = misses.count() - some.len();
    if more == 0 { some.join(", ") } else { format!("{} and {more} more", some.join(", ")) }
}

/// A criterion: its key, how to clear it, the value that the resource wants (empty: none), and the
/// device's value.
struct Criterion {
    key: &'static str,
    clear: fn(&mut Select),
    wanted: fn(&Select) -> String,
    found: fn(&Host<'_>, &Device) -> Option<String>,
}

const CRITERIA: &[Criterion] = &[
    Criterion {
        key: "driver",
        clear: |select| select.driver.clear(),
        wanted: |select| list(&select.driver),
        found: |_, device| driver(device).map(str::to_owned),
    },
    Criterion {
        key: "vendor",
        clear: |select| select.vendor.clear(),
        wanted: |select| hex(&select.vendor),
        found: |_, device| vendor(device).map(|vendor| format!("{vendor:04x}")),
    },
    Criterion {
        key: "device",
        clear: |select| select.device.clear(),
        wanted: |select| hex(&select.device),
        found: |_, device| device.pci.as_ref()?.device.map(|device| format!("{device:04x}")),
    },
    Criterion {
        key: "address",
        clear: |select| select.address.clear(),
        wanted: |select| list(&select.address),
        found: |_, device| Some(device.pci.as_ref()?.address.to_string()),
    },
    Criterion {
        key: "vf",
        clear: |select| select.vf = None,
        wanted: |select| select.vf.map(|vf| vf.to_string()).unwrap_or_default(),
        found: |_, device| is_vf(device).map(|vf| vf.to_string()),
    },
    Criterion {
        key: "pf",
        clear: |select| select.pf.clear(),
        wanted: |select| list(&select.pf.iter().map(pf).collect::<Vec<_>>()),
        found: |_, device| {
            let function = device.pci.as_ref()?;
            let number = function.vf_index.map(|index| format!("#{index}")).unwrap_or_default();
            Some(format!("{}{number}", function.physfn?))
        },
    },
    Criterion {
        key: "interface",
        clear: |select| select.interface.clear(),
        wanted: |select| list(&select.interface),
        found: |_, device| Some(list(&device.pci.as_ref()?.net)).filter(|names| !names.is_empty()),
    },
    Criterion {
        key: "link_type",
        clear: |select| select.link_type.clear(),
        wanted: |select| list(&select.link_type),
        found: |host, device| host.link_type(device),
    },
    Criterion {
        key: "model",
        clear: |select| select.model.clear(),
        wanted: |select| list(&select.model),
        found: |_, device| device.attribute("model").map(str::to_owned),
    },
    Criterion {
        key: "numa_node",
        clear: |select| select.numa_node.clear(),
        wanted: |select| list(&select.numa_node),
        found: |_, device| Some(list(&device.numa_nodes)).filter(|nodes| !nodes.is_empty()),
    },
    Criterion {
        key: "iommu_group",
        clear: |select| select.iommu_group.clear(),
        wanted: |select| list(&select.iommu_group),
        found: |_, device| device.iommu_group().map(|group| group.to_string()),
    },
    Criterion {
        key: "part",
        clear: |select| select.part = None,
        wanted: |select| select.part.map(|part| part.to_string()).unwrap_or_default(),
        found: |_, device| Some(device.attribute("part").is_some().to_string()),
    },
    Criterion {
        key: "mig_profile",
        clear: |select| select.mig_profile.clear(),
        wanted: |select| list(&select.mig_profile),
        found: |_, device| device.attribute("mig_profile").map(str::to_owned),
    },
    Criterion {
        key: "uuid",
        clear: |select| select.uuid.clear(),
        wanted: |select| list(&select.uuid),
        found: |_, device| {
            device.attribute("uuid").or(device.attribute("mdev_uuid")).map(str::to_owned)
        },
    },
    Criterion {
        key: "mdev_type",
        clear: |select| select.mdev_type.clear(),
        wanted: |select| list(&select.mdev_type),
        found: |_, device| device.attribute("mdev_type").map(str::to_owned),
    },
    Criterion {
        key: "attribute",
        clear: |select| select.attribute.clear(),
        wanted: |select| {
            let each = |(name, globs): (&String, &Vec<String>)| format!("{name} {}", list(globs));
            list(&select.attribute.iter().map(each).collect::<Vec<_>>())
        },
        // Which of them differs is not known here: all of the device that may be selected by.
        found: |_, device| {
            let each = |name: &&str| Some(format!("{name} {}", device.attribute(name)?));
            let found: Vec<String> = SELECTABLE.iter().filter_map(each).collect();
            (!found.is_empty()).then(|| list(&found))
        },
    },
    Criterion {
        key: "id",
        clear: |select| select.id.clear(),
        wanted: |select| list(&select.id),
        found: |_, device| Some(device.id.to_string()),
    },
];

/// The devices that `spec` would offer except for one criterion, in the order of their addresses.
/// `taken` maps a device's key to its resource. A `char` resource has no near misses: it selects by
/// paths only.
#[must_use]
pub fn near_misses(
    devices: &[Arc<Device>],
    taken: &BTreeMap<&str, &ResourceName>,
    spec: &ResourceSpec,
) -> Vec<NearMiss> {
    if spec.class == DeviceClass::Char {
        return Vec::new();
    }
    let host = Host::of(devices);
    let of_class = devices.iter().filter(|device| spec.takes(device.class));
    of_class
        .filter_map(|device| {
            near_miss(&host, device, taken.get(device.key.as_str()).copied(), spec)
        })
        .collect()
}

fn near_miss(
    host: &Host<'_>,
    device: &Device,
    taken: Option<&ResourceName>,
    spec: &ResourceSpec,
) -> Option<NearMiss> {
    let miss = |criterion, wanted: &str, found: Option<String>| {
        Some(NearMiss { device: device.id.clone(), criterion, wanted: wanted.to_owned(), found })
    };
    let is_excluded = spec.exclude.as_ref().is_some_and(|exclude| host.matches(exclude, device));
    let is_selected = spec.selections().any(|select| host.matches(select, device));
    let has_driver = device.pci.as_ref().is_none_or(|function| function.driver.is_some());
    let is_meant = spec.selections().any(|select| selects_part(select, device));
    match (is_selected, is_excluded, is_usable(device) && is_meant) {
        (true, false, true) => match taken.filter(|other| **other != spec.name) {
            Some(other) => {
                miss("name", "not offered by an earlier resource", Some(other.to_string()))
            }
            None => exclusion(spec, device).and_then(|exclusion| {
                miss(exclusion.criterion, exclusion.wanted, Some(exclusion.found))
            }),
        },
        (true, true, true) => miss("exclude", "not excluded", Some("excluded".into())),
        (true, false, false) if !has_driver => miss("driver", "any", None),
        (true, false, false) => {
            let parts = device.attribute("parts").map(|parts| format!("split into parts: {parts}"));
            parts.and_then(|parts| miss("part", "whole", Some(parts)))
        }
        (false, false, _) => spec.selections().find_map(|select| {
            let (criterion, wanted) = the_one(host, device, select, has_driver)?;
            miss(criterion.key, &wanted, (criterion.found)(host, device))
        }),
        _ => None,
    }
}

/// The one criterion of a selection that keeps a device out, with the value that it wants.
fn the_one(
    host: &Host<'_>,
    device: &Device,
    select: &Select,
    has_driver: bool,
) -> Option<(&'static Criterion, String)> {
    CRITERIA.iter().find_map(|criterion| {
        let wanted = (criterion.wanted)(select);
        let mut rest = select.clone();
        (criterion.clear)(&mut rest);
        // A device without a driver cannot be used. Then a missing driver is the one criterion.
        let is_usable = is_usable(device) || criterion.key == "driver" && !has_driver;
        let is_the_one = !wanted.is_empty()
            && is_usable
            && selects_part(&rest, device)
            && host.matches(&rest, device);
        is_the_one.then_some((criterion, wanted))
    })
}

fn list<T: Display>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn hex(values: &[u16]) -> String {
    list(&values.iter().map(|value| format!("{value:04x}")).collect::<Vec<_>>())
}

fn pf(select: &PfSelect) -> String {
    let range = |(from, to): &(u32, u32)| {
        if from == to { from.to_string() } else { format!("{from}-{to}") }
    };
    let numbers: Vec<String> = select.vfs.iter().map(range).collect();
    let pf = match &select.pf {
        Pf::Interface(name) => name.clone(),
        Pf::Address(address) => address.to_string(),
    };
    if numbers.is_empty() { pf } else { format!("{pf}#{}", numbers.join(",")) }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{device, spec};
    use super::*;
    use crate::domain::DeviceNode;

    fn gpu(address: &str, driver: Option<&str>) -> Arc<Device> {
        let mut gpu = device(address, address);
        gpu.numa_nodes = vec![1];
        gpu.attributes.insert("model", "NVIDIA A10");
        let function = gpu.pci.as_mut().unwrap();
        (function.vendor, function.device, function.iommu_group) =
            (Some(0x10de), Some(0x2236), Some(7));
        function.net = vec!["ens1f0".into()];
        function.driver = driver.map(str::to_owned);
        if driver.is_some() {
            gpu.nodes.push(DeviceNode::at("/dev/nvidia0"));
        }
        Arc::new(gpu)
    }

    /// `criterion: wanted, found` of a node's only device.
    fn why(gpu: Arc<Device>, wanted: Select) -> Vec<String> {
        let spec = spec("a.com/gpu", DeviceClass::Gpu, wanted);
        let misses = near_misses(&[gpu], &BTreeMap::new(), &spec);
        misses
            .into_iter()
            .map(|miss| {
                format!(
                    "{}: {}, {}",
                    miss.criterion,
                    miss.wanted,
                    miss.found.as_deref().unwrap_or("-")
                )
            })
            .collect()
    }

    #[test]
    fn the_one_criterion_that_keeps_a_device_out_is_named() {
        let all = || Select {
            vendor: vec![0x10de],
            device: vec![0x2236],
            driver: vec!["nvidia".into()],
            vf: Some(false),
            model: vec!["NVIDIA A*".into()],
            numa_node: vec![0, 1],
            iommu_group: vec![7],
            part: Some(false),
            address: vec!["0000:01:00.0".parse().unwrap()],
            id: vec![DeviceId::new("0000:01:00.0")],
            ..Select::default()
        };
        let of = |wanted| why(gpu("0000:01:00.0", Some("nvidia")), wanted);
        assert_eq!(of(all()), Vec::<String>::new(), "it is offered");
        for (wanted, expected) in [
            (Select { vendor: vec![0x1002], ..all() }, "vendor: 1002, 10de"),
            (Select { device: vec![0x20b0, 0x2330], ..all() }, "device: 20b0, 2330, 2236"),
            (Select { driver: vec!["vfio-pci".into()], ..all() }, "driver: vfio-pci, nvidia"),
            (Select { vf: Some(true), ..all() }, "vf: true, false"),
            (
                Select { model: vec!["NVIDIA H100*".into()], ..all() },
                "model: NVIDIA H100*, NVIDIA A10",
            ),
            (Select { numa_node: vec![0], ..all() }, "numa_node: 0, 1"),
            (Select { iommu_group: vec![8], ..all() }, "iommu_group: 8, 7"),
            (Select { part: Some(true), ..all() }, "part: true, false"),
            (
                Select { address: vec!["0000:02:00.0".parse().unwrap()], ..all() },
                "address: 0000:02:00.0, 0000:01:00.0",
            ),
            (Select { id: vec![DeviceId::new("GPU-1")], ..all() }, "id: GPU-1, 0000:01:00.0"),
            (Select { uuid: vec!["GPU-1".into()], ..all() }, "uuid: GPU-1, -"),
            (Select { link_type: vec!["ether".into()], ..all() }, "link_type: ether, -"),
            (Select { interface: vec!["ens9f0".into()], ..all() }, "interface: ens9f0, ens1f0"),
            (Select { pf: vec!["ens1#0-3,7".parse().unwrap()], ..all() }, "pf: ens1#0-3,7, -"),
        ] {
            assert_eq!(of(wanted), [expected]);
        }
        assert_eq!(
            of(Select { vendor: vec![1], device: vec![1], ..all() }),
            Vec::<String>::new(),
            "two criteria exclude it"
        );
    }

    #[test]
    fn a_missing_driver_is_named_with_and_without_a_wanted_one() {
        let unbound = || gpu("0000:01:00.0", None);
        assert_eq!(why(unbound(), Select::default()), ["driver: any, -"]);
        assert_eq!(
            why(unbound(), Select { driver: vec!["nvidia".into()], ..Select::default() }),
            ["driver: nvidia, -"]
        );
    }

    #[test]
    fn excluded_devices_and_devices_of_another_resource_are_near_misses() {
        let mut excluding = (*spec("a.com/gpu", DeviceClass::Gpu, Select::default())).clone();
        let devices = [gpu("0000:01:00.0", Some("nvidia"))];
        let other: ResourceName = "a.com/other".parse().unwrap();
        let taken = BTreeMap::from([(devices[0].key.as_str(), &other)]);
        let miss = near_misses(&devices, &taken, &excluding);
        assert_eq!((miss[0].criterion, miss[0].found.as_deref()), ("name", Some("a.com/other")));
        excluding.exclude = Some(Select { vendor: vec![0x10de], ..Select::default() });
        assert_eq!(near_misses(&devices, &BTreeMap::new(), &excluding)[0].criterion, "exclude");
    }
}
