//! What outlives a process of the daemon: the node's devices, and the journal on its disk.

use super::daemon::gpu;
use crate::domain::{AllocId, Device, DeviceClass, DeviceId, Entry, Evidence};
use crate::ledger::core::Ledger;
use crate::sim::memory::Node;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// The devices of the node, whether they are there or not.
#[derive(Debug, Clone)]
pub(super) struct Hardware(pub(super) watch::Sender<BTreeSet<DeviceId>>);

impl Hardware {
    pub(super) fn new(devices: usize) -> Self {
        Hardware(watch::Sender::new((0..devices).map(|n| DeviceId::new(format!("GPU-{n}"))).collect()))
    }

    pub(super) fn lose(&self, n: usize) {
        self.0.send_if_modified(|devices| devices.remove(&DeviceId::new(format!("GPU-{n}"))));
    }

    pub(super) fn find(&self, n: usize) {
        self.0.send_if_modified(|devices| devices.insert(DeviceId::new(format!("GPU-{n}"))));
    }

    /// What a scan finds now.
    pub(super) fn scan(&self, node: &Node) -> Arc<Evidence> {
        let device = |id: &DeviceId| Device {
            id: id.clone(),
            key: format!("pci:{id}"),
            class: DeviceClass::Gpu,
            pci: None,
            numa_nodes: vec![0],
            nodes: Vec::new(),
            attributes: BTreeMap::new(),
        };
        let devices: BTreeMap<_, _> = self.0.borrow().iter().map(|id| (id.clone(), Arc::new(device(id)))).collect();
        let selected = BTreeMap::from([(gpu(), devices.keys().cloned().collect())]);
        Arc::new(Evidence { began: node.moment(), devices, selected, missing_nodes: BTreeSet::new() })
    }
}

/// What outlives the process: the journal.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<Mutex<Journal>>);

#[derive(Debug, Default)]
pub(super) struct Journal {
    pub(super) entries: Vec<Entry>,
    /// Their fold.
    ledger: Ledger,
    pub(super) lives: u64,
    next_id: u64,
    /// Whether the kubelet was asked for its pods beside an Allocate.
    pub(super) listed_in_allocate: bool,
}

impl Disk {
    pub(super) fn lock(&self) -> MutexGuard<'_, Journal> {
        self.0.lock().unwrap()
    }

    /// Looks at what is durable.
    pub(super) fn ledger<R>(&self, look: impl FnOnce(&Ledger) -> R) -> R {
        look(&self.lock().ledger)
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.lock().entries.clone()
    }

    pub(super) fn listed_in_allocate(&self) -> bool {
        self.lock().listed_in_allocate
    }

    pub(super) fn next_alloc_id(&self) -> AllocId {
        let mut journal = self.lock();
        journal.next_id += 1;
        AllocId::new(format!("alloc-{:08}", journal.next_id))
    }

    /// Appends and syncs: what comes back is durable (I1).
    pub(super) async fn append(&self, node: &Node, entries: Vec<Entry>) {
        let wait = node.handle().random(|random| {
            let slow = random.chance(0.02);
            random.between(Duration::from_micros(50), Duration::from_millis(if slow { 40 } else { 1 }))
        });
        node.handle().sleep(wait).await;
        let mut journal = self.lock();
        entries.iter().for_each(|entry| {
            journal.ledger.evolve(entry);
        });
        journal.entries.extend(entries);
    }
}
