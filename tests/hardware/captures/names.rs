//! A published id stays the same (I6) in any order of discovery, and when more facts become known
//! later.

use crate::hardware::captures::archive::{Capture, captures};
use crate::hardware::captures::rewrite::{self, Mapping};
use holdfast::domain::{Device, DeviceClass, DeviceId, ResourceSpec, Select};
use holdfast::hardware::{Discovery, discover};
use holdfast::host::HostRoot;
use holdfast::lab::sim::hardware::SimNode;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Discovers every device that can be offered, so that every name is remembered.
fn found(root: &Path, remembered: &BTreeMap<String, DeviceId>) -> Discovery {
    let spec = |class: &str| {
        let name = format!("example.com/{class}").parse().unwrap();
        let class: DeviceClass = serde_json::from_str(&format!("\"{class}\"")).unwrap();
        Arc::new(ResourceSpec { class, select: Select::default(), ..ResourceSpec::orphan(name) })
    };
    let specs: Vec<_> = ["gpu", "fpga", "rdma", "nic", "nvme", "accelerator"].map(spec).into();
    discover(&HostRoot::new(root), &specs, remembered)
}

/// The captured machines, and a simulated one whose GPUs have numbers, identities and nodes.
fn machines() -> (Vec<(String, PathBuf)>, tempfile::TempDir) {
    let simulated = crate::hardware::captures::archive::folder();
    SimNode::create(simulated.path()).unwrap();
    let captured =
        captures().unwrap_or_default().into_iter().map(|Capture { name, root, .. }| (name, root));
    let machines =
        captured.chain([("simulated".to_owned(), simulated.path().to_owned())]).collect();
    (machines, simulated)
}

fn by_key(found: &Discovery) -> BTreeMap<&str, &Arc<Device>> {
    found.devices.iter().map(|device| (device.key.as_str(), device)).collect()
}

#[test]
fn another_order_of_enumeration_renames_no_device() {
    let (machines, _simulated) = machines();
    let mut renumbered = BTreeSet::new();
    for (name, root) in &machines {
        let copy = rewrite::copy(root, &Mapping::Renumbered);
        let (before, after) = (found(root, &BTreeMap::new()), found(copy.path(), &BTreeMap::new()));
        let (before, after) = (by_key(&before), by_key(&after));
        let ids = |devices: &BTreeMap<&str, &Arc<Device>>| {
            devices
                .iter()
                .map(|(key, device)| ((*key).to_owned(), device.id.clone()))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(ids(&before), ids(&after), "{name}");
        for (key, device) in &before {
            let (old, new) = (device.pci.as_ref().unwrap(), after[key].pci.as_ref().unwrap());
            let changed = [
                ("rdma", old.rdma != new.rdma),
                ("nvme", old.nvme != new.nvme),
                ("drm", old.drm != new.drm),
            ];
            renumbered.extend(
                changed
                    .iter()
                    .filter(|(_, changed)| *changed)
                    .map(|(what, _)| (*what, (*key).to_owned())),
            );
            let minors =
                [device, after[key]].map(|device| device.attribute("minor").map(str::to_owned));
            renumbered.extend((minors[0] != minors[1]).then(|| ("nvidia", (*key).to_owned())));
        }
    }
    for (kind, least) in [("rdma", 2), ("nvme", 5), ("drm", 2), ("nvidia", 8)] {
        let count = renumbered.iter().filter(|(what, _)| *what == kind).count();
        assert!(
            count >= least || machines.len() == 1,
            "only {count} things of the kind {kind} were renumbered"
        );
    }
}

#[test]
fn an_identity_that_is_learnt_later_renames_no_device() {
    let (machines, _simulated) = machines();
    let mut learnt = 0;
    for (name, root) in &machines {
        let bare = rewrite::copy(root, &Mapping::Anonymous);
        let named: BTreeMap<String, DeviceId> =
            found(bare.path(), &BTreeMap::new()).named.into_iter().collect();
        let (later, fresh) = (found(root, &named), found(root, &BTreeMap::new()));
        let (later, fresh) = (by_key(&later), by_key(&fresh));
        for (key, id) in &named {
            assert_eq!(later[key.as_str()].id, *id, "{name} {key}");
            learnt += usize::from(fresh[key.as_str()].id != *id);
        }
    }
    assert!(learnt >= 8, "only {learnt} things have an identity of their own");
}
