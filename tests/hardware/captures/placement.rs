//! The distances between devices of real machines, and the preferred devices.

use crate::hardware::captures::archive::{Capture, captures};
use holdfast::domain::topology::{Nearness, nearness};
use holdfast::domain::{
    Device, DeviceClass, DeviceId, Health, Offered, Offering, PciAddress, ResourceSpec, Select,
};
use holdfast::hardware::{Discovery, discover};
use holdfast::host::HostRoot;
use holdfast::serving::placement::choose;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn found(capture: &Capture) -> Discovery {
    discover(&HostRoot::new(&capture.root), &[], &BTreeMap::new())
}

#[test]
fn the_distance_of_every_pair_of_devices_is_correct() {
    let Some(captures) = captures() else { return };
    let mut levels = BTreeSet::new();
    for capture in captures.iter().filter(|capture| !capture.pairs.is_empty()) {
        let found = found(capture);
        let at = |text: &serde_json::Value| -> Arc<Device> {
            let address: PciAddress = text.as_str().unwrap().parse().unwrap();
            let is_there = |device: &&Arc<Device>| {
                device.pci.as_ref().is_some_and(|function| function.address == address)
            };
            Arc::clone(found.devices.iter().find(is_there).unwrap())
        };
        for pair in &capture.pairs {
            let near = nearness(&at(&pair["a"]), &at(&pair["b"]));
            assert_eq!(
                near.to_string(),
                pair["level"].as_str().unwrap(),
                "{}: {pair}",
                capture.name
            );
            levels.insert(near);
        }
    }
    assert!(levels.len() >= 5, "the captures have only {levels:?}");
}

/// Two switches with four vector engines each.
#[test]
fn requests_of_two_devices_leave_the_other_switch_whole() {
    let Some(captures) = captures() else { return };
    let capture = captures.iter().find(|capture| capture.name == "nec-ve8-plx").unwrap();
    let engines: Vec<Arc<Device>> = found(capture)
        .devices
        .into_iter()
        .filter(|device| device.class == DeviceClass::Accelerator)
        .collect();
    assert_eq!(engines.len(), 8);
    let name = "example.com/ve".parse().unwrap();
    let spec = ResourceSpec {
        class: DeviceClass::Accelerator,
        select: Select::default(),
        ..ResourceSpec::orphan(name)
    };
    let offered = |device: &Arc<Device>| {
        (device.id.clone(), Offered { device: Arc::clone(device), health: Health::Healthy })
    };
    let offering =
        Offering { spec: Arc::new(spec), devices: engines.iter().map(offered).collect() };
    let switch = |id: &DeviceId| {
        let device = &offering.devices[id].device;
        engines
            .iter()
            .filter(|other| nearness(device, other) >= Nearness::Switch(1))
            .map(|other| other.id.clone())
            .collect::<BTreeSet<_>>()
    };
    let mut free: Vec<DeviceId> = offering.devices.keys().cloned().collect();
    let four: BTreeSet<DeviceId> = choose(&offering, &free, &[], 4).unwrap().into_iter().collect();
    assert_eq!(four, switch(four.first().unwrap()), "a whole switch");

    let mut taken = BTreeSet::new();
    for _ in 0..2 {
        let two = choose(&offering, &free, &[], 2).unwrap();
        free.retain(|id| !two.contains(id));
        taken.extend(two);
    }
    assert_eq!(taken, switch(taken.first().unwrap()), "both from one");
    assert_eq!(
        free.iter().cloned().collect::<BTreeSet<_>>(),
        switch(&free[0]),
        "the other one is whole"
    );
}
