//! Devices that are plugged in and removed: by the button of their slot, and by the kernel's
//! request.

use crate::hardware::{ADAPTER, EMPTY};
use crate::machine::Machine;
use crate::node::Node;
use serde_json::json;

const DISK: &str = "example.com/disk";
const ADAPTERS: &str = "example.com/adapter";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/disk"
class = "nvme"
[[resource]]
name = "example.com/adapter"
class = "nic"
"#;

/// Plugs a disk into an empty slot.
fn plug_disk(machine: &Machine, (_, bus): (u8, &str)) {
    machine.plug(&json!({
        "driver": "nvme", "id": "disk", "serial": "PLUGGED", "bus": bus, "drive": "plugged",
    }));
}

pub(crate) fn by_the_button(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    node.wait("the disks that are always there", |node| {
        (node.healthy(DISK).len() == 3).then_some(())
    });
    let before = node.healthy(DISK);
    plug_disk(machine, EMPTY[0]);
    let plugged = node.wait("the plugged disk", |node| {
        node.healthy(DISK).into_iter().find(|id| !before.contains(id))
    });
    // A pod for each disk, so that one of them has this one.
    let pods = ["first", "second", "third", "fourth"].map(|name| node.pod(name, DISK));
    let holder = pods.iter().find(|pod| pod.devices[0] == plugged).unwrap();

    machine.unplug("disk");
    node.wait_for_health(DISK, &plugged, "device_gone");
    assert_eq!(node.holders(&plugged), [holder.name.as_str()]);
    // In another slot it is the same disk.
    plug_disk(machine, EMPTY[1]);
    node.wait_for_health(DISK, &plugged, "");
    assert_eq!(node.holders(&plugged), [holder.name.as_str()]);
    let failures = node.failures(&plugged);
    assert_eq!(failures.last().unwrap()["reason"], "device_gone", "{failures:#?}");
    assert_eq!(failures.last().unwrap()["held_by"], json!([holder.alloc_id()]));
    // The kernel removes the disk's node before its controller, which is no failure of its own.
    assert_eq!(node.logged(&["the device is unhealthy", &plugged]).len(), 1);

    // Without a holder it leaves the list after a while.
    node.delete(holder);
    node.wait_for_holders(&plugged, &[]);
    machine.unplug("disk");
    node.wait("the disk is not listed", |node| {
        (!node.listed().iter().any(|(id, _)| *id == plugged)).then_some(())
    });
    node.end_daemon();
}

pub(crate) fn by_the_kernel(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    let adapter = machine.address_in(ADAPTER);
    node.wait_for_healthy(ADAPTERS, std::slice::from_ref(&adapter));
    node.pod("holder", ADAPTERS);
    machine.run(&format!("echo 1 > /sys/bus/pci/devices/{adapter}/remove"));
    node.wait_for_health(ADAPTERS, &adapter, "device_gone");
    assert_eq!(node.holders(&adapter), ["holder"]);
    machine.run("echo 1 > /sys/bus/pci/rescan");
    node.wait_for_health(ADAPTERS, &adapter, "");
    assert_eq!(node.holders(&adapter), ["holder"]);
    node.end_daemon();
}
