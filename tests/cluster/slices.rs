//! The published devices: what the API server accepts, and how soon they are back after a kubelet
//! has deleted them.

use crate::api::{Event, SLICES};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node::{DEVICES, NODE};
use crate::objects::text_of;
use crate::real::binary::binary;
use crate::{SOON, archive, say, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Starts of the kubelet.
const WIPES: usize = 50;
/// How long a node may be without slices after such a start.
const BACK_MAX: Duration = Duration::from_secs(1);
const DRIVER: &str = "holdfast.dev";
/// The classes of devices that captured machines have.
const CLASSES: [&str; 6] = ["gpu", "fpga", "rdma", "nic", "nvme", "accelerator"];

impl Cluster {
    /// The slices of the driver, once they have this number of devices, by name.
    pub(crate) fn published(&self, devices: usize) -> Vec<Value> {
        wait_for(&format!("{devices} devices are published"), SOON, || {
            let mut slices = self.api.list(SLICES);
            slices.retain(|slice| slice["spec"]["driver"] == DRIVER);
            let count = |slice: &Value| slice["spec"]["devices"].as_array().map_or(0, Vec::len);
            (slices.iter().map(count).sum::<usize>() == devices).then_some(slices)
        })
    }

    /// The published device with this value of an attribute.
    pub(crate) fn device(&self, attribute: &str, value: &str) -> Option<Value> {
        let slices = self.api.list(SLICES);
        let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array());
        let has = |device: &&Value| device["attributes"][attribute]["string"] == value;
        devices.flatten().find(has).cloned()
    }
}

/// Removes the fields of a slice that the API server drops because their gate is off.
fn drop_fields(cluster: &Cluster, slice: &mut Value) {
    let spec = slice["spec"].as_object_mut().unwrap();
    let (parts, taints) =
        (cluster.is_off("DRAPartitionableDevices"), cluster.is_off("DRADeviceTaints"));
    if parts {
        spec.remove("sharedCounters");
    }
    for device in spec.get_mut("devices").and_then(Value::as_array_mut).into_iter().flatten() {
        let device = device.as_object_mut().unwrap();
        device.retain(|field, _| {
            !(parts && field == "consumesCounters" || taints && field == "taints")
        });
    }
}

/// What a slice has, except for the time that the API server adds to a taint. No devices are the
/// same as `null` (up to 1.34).
fn spec(slice: &Value) -> Value {
    let mut spec = slice["spec"].clone();
    if spec["devices"].is_null() {
        spec.as_object_mut().unwrap().remove("devices");
    }
    for device in spec["devices"].as_array_mut().into_iter().flatten() {
        for taint in device["taints"].as_array_mut().into_iter().flatten() {
            taint.as_object_mut().unwrap().remove("timeAdded");
        }
    }
    spec
}

pub(crate) fn are_accepted_unchanged(cluster: &mut Cluster) {
    let Some(captures) = archive::captures() else { return };
    let config = cluster.dir.join("captures.toml");
    let resources = CLASSES.map(resource).concat();
    let (mut slices, mut devices, mut sets) = (0, 0, 0);
    for capture in captures {
        let wholes = wholes(&capture.root);
        for vendors in [false, true] {
            let dra = format!("[dra]\nenabled = true\nvendor_attributes = {vendors}\n");
            fs::write(&config, dra + &wholes + &resources).unwrap();
            for slice in discovered(&capture.root, &config) {
                let accepted = cluster.api.create(SLICES, &slice);
                slices += 1;
                devices += slice["spec"]["devices"].as_array().map_or(0, Vec::len);
                sets += slice["spec"]["sharedCounters"].as_array().map_or(0, Vec::len);
                let mut expected = slice;
                drop_fields(cluster, &mut expected);
                assert_eq!(spec(&accepted), spec(&expected), "{} was changed", capture.name);
                cluster.api.delete(&format!("{SLICES}/{}", text_of(&accepted, "name")), None);
            }
        }
    }
    assert!(slices > 0 && devices > 0, "the captures have no device for claims");
    assert!(sets > 0, "no captured machine has a physical function with virtual functions");
    say(format_args!(
        "{slices} slices with {devices} devices and {sets} sets of counters are accepted unchanged"
    ));
}

/// A resource with all devices of a class; two pods may have each GPU.
fn resource(class: &str) -> String {
    let replicas = if class == "gpu" { "replicas = 2\n" } else { "" };
    format!(
        "[[resource]]\nname = \"example.com/{class}\"\nclass = \"{class}\"\n{replicas}api = \"dra\"\n"
    )
}

/// A resource for each physical function with virtual functions, which are parts of it.
fn wholes(root: &Path) -> String {
    let found = discover(root, &["--all"]);
    let all = found["devices"].as_array().unwrap().iter();
    let wholes = all.filter(|device| device["vfs"].as_array().is_some_and(|vfs| !vfs.is_empty()));
    let resource = |(number, whole): (usize, &Value)| {
        let class = whole["class"].as_str().filter(|class| CLASSES.contains(class))?;
        let address = &whole["pci_address"];
        Some(format!(
            "[[resource]]\nname = \"example.com/whole-{number}\"\nclass = \"{class}\"\napi = \"dra\"\nselect = {{ address = [{address}] }}\n"
        ))
    };
    wholes.enumerate().filter_map(resource).collect()
}

/// The slices of a captured machine.
fn discovered(root: &Path, config: &Path) -> Vec<Value> {
    let config = ["--config", config.to_str().unwrap()];
    let options = ["--slices", "--node-name", "captured"];
    let list = discover(root, &[&options[..], &config[..]].concat());
    list["items"].as_array().unwrap().clone()
}

/// What `discover` finds on a captured machine.
fn discover(root: &Path, options: &[&str]) -> Value {
    let mut discover = Command::new(binary());
    discover.arg("--host-root").arg(root).args(["--state-dir", "/nonexistent", "discover"]);
    let output = discover.args(options).args(["-o", "json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub(crate) fn return_after_a_wipe(cluster: &mut Cluster) {
    let _daemon = Daemon::start(cluster);
    let before = cluster.published(DEVICES);
    let events = cluster.api.watch(SLICES);
    let mut times = Vec::new();
    for _ in 0..WIPES {
        cluster.node.kill_kubelet();
        while events.try_recv().is_ok() {}
        cluster.node.launch_kubelet();
        let deleted = last(&events, "DELETED", before.len());
        let back = last(&events, "ADDED", before.len());
        times.push(back.duration_since(deleted));
        let after = cluster.published(DEVICES);
        let specs = |slices: &[Value]| -> Vec<Value> { slices.iter().map(spec).collect() };
        assert_eq!(specs(&after), specs(&before), "other slices after a start of the kubelet");
    }
    times.sort_unstable();
    let in_time = times.iter().filter(|time| **time <= BACK_MAX).count();
    say(format_args!(
        "the slices are back after {in_time} of {WIPES} starts of the kubelet within {BACK_MAX:?}: p50 {:.0?}, max {:.0?}",
        times[WIPES / 2],
        times[WIPES - 1]
    ));
    assert_eq!(in_time, WIPES, "{times:?}");
    assert!(cluster.api.list(SLICES).iter().all(|slice| slice["spec"]["nodeName"] == NODE));
}

/// The time of the last of `count` slices with this kind of event.
fn last(events: &Receiver<Event>, kind: &str, count: usize) -> Instant {
    let mut names = BTreeSet::new();
    loop {
        let event = events.recv_timeout(SOON).unwrap_or_else(|_| panic!("no slice is {kind}"));
        if event.kind == kind {
            names.insert(text_of(&event.object, "name"));
        }
        if names.len() == count {
            return event.at;
        }
    }
}
