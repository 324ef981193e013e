//! The devices of the node, and the resources that offer them.

use crate::domain::{
    Attributes, Device, DeviceClass, DeviceId, Evidence, ResourceName, ResourceSpec, Sharing,
    Unread,
};
use crate::lab::sim::memory::Node;
use crate::ledger::core::ReleaseHooks;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// The resource of every run: one container has a device at a time.
pub(super) fn gpu() -> ResourceName {
    "example.com/gpu".parse().unwrap()
}

/// The second resource of some runs: two containers share a device.
pub(super) fn nic() -> ResourceName {
    "example.com/nic".parse().unwrap()
}

const GPUS: usize = 4;
const NICS: usize = 2;

/// The devices, present or absent.
#[derive(Debug, Clone)]
pub(super) struct Hardware {
    /// The present devices.
    pub(super) present: watch::Sender<BTreeSet<DeviceId>>,
    all: Arc<[(ResourceName, DeviceId)]>,
    pub(super) specs: Arc<[Arc<ResourceSpec>]>,
    /// The hooks after the release of a GPU.
    pub(super) hooks: Arc<ReleaseHooks>,
}

impl Hardware {
    /// GPUs, and NICs on some nodes. Some GPUs have a hook after their release.
    pub(super) fn new(has_nics: bool, has_hook: bool) -> Self {
        let gpus = (0..GPUS).map(|n| (gpu(), DeviceId::new(format!("GPU-{n}"))));
        let nics =
            (0..NICS).filter(|_| has_nics).map(|n| (nic(), DeviceId::new(format!("NIC-{n}"))));
        let spec = |class, name, containers| {
            Arc::new(ResourceSpec {
                sharing: Sharing::replicas(containers),
                ..ResourceSpec::new(name, class)
            })
        };
        let mut specs = vec![spec(DeviceClass::Gpu, gpu(), 1)];
        specs.extend(has_nics.then(|| spec(DeviceClass::Nic, nic(), 2)));
        let all: Arc<[_]> = gpus.chain(nics).collect();
        Hardware {
            present: watch::Sender::new(all.iter().map(|(_, id)| id.clone()).collect()),
            all,
            specs: specs.into(),
            hooks: Arc::new(ReleaseHooks::of([
                (gpu(), has_hook.then_some(Sharing::Exclusive)),
                (nic(), None),
            ])),
        }
    }

    /// The resources.
    pub(super) fn resources(&self) -> impl Iterator<Item = &ResourceName> {
        self.specs.iter().map(|spec| &spec.name)
    }

    /// Every device of a resource.
    pub(super) fn devices(&self, resource: &ResourceName) -> Vec<DeviceId> {
        self.all.iter().filter(|(of, _)| of == resource).map(|(_, id)| id.clone()).collect()
    }

    /// The number of all devices.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn lose(&self, n: usize) {
        self.present.send_if_modified(|present| present.remove(&self.all[n].1));
    }

    pub(super) fn find(&self, n: usize) {
        self.present.send_if_modified(|present| present.insert(self.all[n].1.clone()));
    }

    /// The result of a scan now.
    pub(super) fn scan(&self, node: &Node) -> Arc<Evidence> {
        let present = self.present.borrow().clone();
        let (mut devices, mut selected) = (BTreeMap::new(), BTreeMap::<_, BTreeSet<_>>::new());
        for (resource, id) in self.all.iter().filter(|(_, id)| present.contains(id)) {
            let class = if *resource == gpu() { DeviceClass::Gpu } else { DeviceClass::Nic };
            let device = Device {
                id: id.clone(),
                key: format!("pci:{id}"),
                class,
                pci: None,
                numa_nodes: vec![0],
                nodes: Vec::new(),
                attributes: Attributes::default(),
            };
            devices.insert(id.clone(), Arc::new(device));
            selected.entry(resource.clone()).or_default().insert(id.clone());
        }
        Arc::new(Evidence {
            began: node.moment(),
            devices,
            selected,
            missing_nodes: BTreeSet::new(),
            unfulfilled: Default::default(),
            unread: Unread::default(),
        })
    }
}
