//! The slices of other DRA drivers on this node, and the devices that they share with this driver.
//!
//! They are read, and never written. The scheduler knows devices by driver and name only. So it may
//! give one piece of hardware to two claims if two drivers publish it.

use super::DRIVER;
use super::api::{Attribute, Device, ResourceSlice};
use super::wanted::WantedDevices;
use crate::domain::PciAddress;
use std::collections::{BTreeMap, BTreeSet};

/// The drivers that are reported: a node has a few.
pub const DRIVERS_MAX: usize = 16;

/// Attributes with the PCI address of the device itself, by their names in lower case, in any
/// domain: `pciBusID` of Kubernetes, and what drivers used before it.
const ADDRESSES: [&str; 4] = ["pcibusid", "pciaddress", "pciaddr", "deviceid"];
/// The attribute with the UUID of the device: of a GPU, or of a part of one.
const UUID: &str = "uuid";
/// Attributes that only a part of a device has. It may have the PCI address of the whole.
const OF_PARTS: [&str; 4] = ["part", "parent", "parentuuid", "parentpciaddr"];

/// What identifies the hardware of a published device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Hardware {
    addresses: BTreeSet<PciAddress>,
    uuids: BTreeSet<String>,
    is_part: bool,
}

impl Hardware {
    fn of(device: &Device) -> Self {
        let mut hardware = Hardware::default();
        for (name, value) in &device.attributes {
            let name = name.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
            let Attribute::Text(text) = value else { continue };
            let text = text.to_ascii_lowercase();
            hardware.is_part |= OF_PARTS.contains(&name.as_str()) && !text.is_empty();
            if ADDRESSES.contains(&name.as_str()) {
                // `deviceID` is the number of a model with many drivers, which is no address.
                hardware.addresses.extend(text.parse::<PciAddress>());
            } else if name == UUID && !text.is_empty() {
                hardware.uuids.insert(text);
            }
        }
        hardware
    }

    /// Whether both are the same hardware, or one is a part of the other. Two parts of one device
    /// have its PCI address, and only their UUIDs show whether they are the same.
    fn is_shared_with(&self, other: &Hardware) -> bool {
        let are_parts = self.is_part && other.is_part;
        !self.uuids.is_disjoint(&other.uuids)
            || (!are_parts && !self.addresses.is_disjoint(&other.addresses))
    }
}

/// The slice of another driver.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OtherSlice {
    driver: String,
    devices: Vec<Hardware>,
}

/// The slices of other drivers by the names of their objects.
#[derive(Debug, Clone, Default)]
pub struct Others(BTreeMap<String, OtherSlice>);

/// Another driver on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherDriver {
    /// Its name: `gpu.nvidia.com`.
    pub driver: String,
    /// The devices that it publishes.
    pub devices: usize,
    /// The devices of this driver that are the same hardware, by their names here.
    pub same: BTreeSet<String>,
}

impl Others {
    /// Takes a list: the slices of this node, of any driver.
    pub fn list(&mut self, listed: &[ResourceSlice]) {
        self.0.clear();
        listed.iter().for_each(|slice| self.change(slice));
    }

    /// Takes a new or changed slice.
    pub fn change(&mut self, slice: &ResourceSlice) {
        if slice.spec.driver != DRIVER {
            let devices = slice.spec.devices.iter().map(Hardware::of).collect();
            let known = OtherSlice { driver: slice.spec.driver.clone(), devices };
            self.0.insert(slice.metadata.name.clone(), known);
        }
    }

    /// Takes a deleted slice.
    pub fn delete(&mut self, slice: &ResourceSlice) {
        self.0.remove(&slice.metadata.name);
    }

    /// The drivers, with the `wanted` devices that they publish too. Those that share
    /// hardware come first.
    #[must_use]
    pub fn drivers(&self, wanted: &WantedDevices) -> Vec<OtherDriver> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let own = wanted.pools.values().flatten();
        let own: Vec<(&String, Hardware)> =
            own.map(|(name, device)| (name, Hardware::of(device))).collect();
        let mut drivers: BTreeMap<&str, OtherDriver> = BTreeMap::new();
        for slice in self.0.values() {
            let known = drivers.entry(&slice.driver).or_insert_with(|| OtherDriver {
                driver: slice.driver.clone(),
                devices: 0,
                same: BTreeSet::new(),
            });
            known.devices += slice.devices.len();
            let is_same = |one: &Hardware| slice.devices.iter().any(|it| it.is_shared_with(one));
            let same = own.iter().filter(|(_, hardware)| is_same(hardware));
            known.same.extend(same.map(|(name, _)| (*name).clone()));
        }
        let mut drivers: Vec<OtherDriver> = drivers.into_values().collect();
        drivers.sort_by_key(|driver| driver.same.is_empty());
        drivers.truncate(DRIVERS_MAX);
        drivers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::names::NodeName;
    use serde_json::{Value, json};

    fn device(name: &str, attributes: &[(&str, &str)]) -> Device {
        let attributes: serde_json::Map<String, Value> = attributes
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!({ "string": value })))
            .collect();
        serde_json::from_value(json!({ "name": name, "attributes": attributes })).unwrap()
    }

    fn slice(name: &str, driver: &str, devices: &[Device]) -> ResourceSlice {
        let mut slice = ResourceSlice::default();
        (slice.metadata.name, slice.spec.driver) = (name.into(), driver.into());
        slice.spec.devices = devices.to_vec();
        slice
    }

    fn wanted(devices: &[Device]) -> WantedDevices {
        let devices = devices.iter().map(|it| (it.name.clone(), it.clone())).collect();
        WantedDevices {
            node: NodeName::new("n1").unwrap(),
            pools: [("n1/gpu".to_owned(), devices)].into(),
            claimed: BTreeSet::new(),
            dropped: BTreeSet::new(),
        }
    }

    /// The names of our devices that the other driver has too.
    fn same(ours: &[Device], theirs: Device) -> Vec<String> {
        let mut others = Others::default();
        others.change(&slice("s", "gpu.nvidia.com", &[theirs]));
        let [driver] = &others.drivers(&wanted(ours))[..] else { panic!("one driver") };
        assert_eq!(driver.devices, 1);
        driver.same.iter().cloned().collect()
    }

    const BUS: &str = "resource.kubernetes.io/pciBusID";

    #[test]
    fn the_same_hardware_has_the_same_address_or_uuid() {
        let ours = [
            device("a", &[(BUS, "0000:18:00.0"), ("uuid", "GPU-AA"), ("device", "2330")]),
            device("b", &[(BUS, "0000:19:00.0"), ("uuid", "GPU-BB"), ("device", "2330")]),
            device("misc", &[("class", "char")]),
        ];
        let theirs = |attributes: &[(&str, &str)]| device("gpu-0", attributes);
        assert_eq!(same(&ours, theirs(&[(BUS, "0000:18:00.0")])), ["a"]);
        assert_eq!(same(&ours, theirs(&[("pciAddress", "0000:19:00.0")])), ["b"], "its own domain");
        assert_eq!(same(&ours, theirs(&[("k8s.cni.cncf.io/deviceID", "0000:19:00.0")])), ["b"]);
        assert_eq!(same(&ours, theirs(&[("gpu.nvidia.com/uuid", "gpu-aa")])), ["a"]);
        let elsewhere =
            [("deviceID", "2330"), ("uuid", ""), ("pfPciAddress", "0000:18:00.0"), (BUS, "?")];
        assert_eq!(same(&ours, theirs(&elsewhere)), [""; 0]);
    }

    #[test]
    fn a_part_shares_hardware_with_its_whole_and_not_with_another_part() {
        let whole = [device("whole", &[(BUS, "0000:18:00.0"), ("uuid", "GPU-AA")])];
        let part =
            |uuid| [device("part", &[(BUS, "0000:18:00.0"), ("uuid", uuid), ("parent", "GPU-AA")])];
        let theirs = |uuid| {
            let attributes = [(BUS, "0000:18:00.0"), ("uuid", uuid), ("parentUUID", "GPU-AA")];
            device("gpu-0-mig-1", &attributes)
        };
        assert_eq!(same(&whole, theirs("MIG-1")), ["whole"]);
        assert_eq!(same(&part("MIG-1"), whole[0].clone()), ["part"]);
        assert_eq!(same(&part("MIG-1"), theirs("MIG-2")), [""; 0]);
        assert_eq!(same(&part("MIG-1"), theirs("MIG-1")), ["part"]);
    }

    #[test]
    fn slices_come_change_and_go_and_the_drivers_are_bounded() {
        let ours = wanted(&[device("a", &[(BUS, "0000:18:00.0")])]);
        let theirs = device("d", &[(BUS, "0000:18:00.0")]);
        let mut others = Others::default();
        let own = slice("own", DRIVER, std::slice::from_ref(&theirs));
        others.list(&[own.clone(), slice("s", "dra.cpu", &[])]);
        let cpu = OtherDriver { driver: "dra.cpu".into(), devices: 0, same: BTreeSet::new() };
        assert_eq!(others.drivers(&ours), std::slice::from_ref(&cpu));
        let gpu = slice("t", "gpu.nvidia.com", &[theirs]);
        others.change(&gpu);
        let same: Vec<usize> = others.drivers(&ours).iter().map(|it| it.same.len()).collect();
        assert_eq!(same, [1, 0]);
        others.delete(&gpu);
        assert_eq!(others.drivers(&ours), [cpu]);
        others.list(&[own]);
        assert_eq!(others.drivers(&ours), []);
        for number in 0..DRIVERS_MAX + 9 {
            others.change(&slice(&format!("s{number}"), &format!("d{number}.example.com"), &[]));
        }
        assert_eq!(others.drivers(&ours).len(), DRIVERS_MAX);
    }
}
