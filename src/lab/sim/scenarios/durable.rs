//! State that outlives a process of the daemon: the journal on its disk.

use crate::domain::{AllocId, Entry, KubeletGeneration, ResourceName};
use crate::lab::sim::memory::Node;
use crate::ledger::core::Ledger;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The journal, which outlives the process, and the records about the daemon that the oracles read.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<Mutex<Journal>>);

/// The sender of a Register: the daemon's instance, the kubelet's, the resource.
pub(super) type Sender = (u64, Option<KubeletGeneration>, ResourceName);

#[derive(Debug, Default)]
pub(super) struct Journal {
    pub(super) entries: Vec<Entry>,
    /// The ledger that they result in.
    ledger: Ledger,
    pub(super) instances: u64,
    next_id: u64,
    /// Whether the kubelet's pods were listed while an Allocate was under way.
    pub(super) listed_in_allocate: bool,
    /// When the ledger's actor last died.
    pub(super) died_at: Option<Duration>,
    /// How often a hook ran on a free device, and for a container that waited.
    pub(super) free_hooks: u64,
    pub(super) gated_hooks: u64,
    /// A container that had the device of a running hook.
    pub(super) hook_in_use: Option<String>,
    /// When each Register was sent.
    pub(super) registers: BTreeMap<Sender, Vec<Duration>>,
    /// When each list was sent, by the daemon's instance, the resource and the registration.
    pub(super) lists: BTreeMap<(u64, ResourceName, u64), Vec<Duration>>,
    /// How often the daemon held a truce with another plugin of a resource.
    pub(super) truces: u64,
}

impl Disk {
    pub(super) fn lock(&self) -> MutexGuard<'_, Journal> {
        self.0.lock().unwrap()
    }

    /// Reads the durable ledger.
    pub(super) fn ledger<R>(&self, read: impl FnOnce(&Ledger) -> R) -> R {
        read(&self.lock().ledger)
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.lock().entries.clone()
    }

    /// Every grant that was ever recorded.
    pub(super) fn granted(&self) -> BTreeSet<AllocId> {
        let id = |entry: &Entry| {
            if let Entry::Grant(grant) = entry { Some(grant.alloc_id.clone()) } else { None }
        };
        self.lock().entries.iter().filter_map(id).collect()
    }

    pub(super) fn listed_in_allocate(&self) -> bool {
        self.lock().listed_in_allocate
    }

    pub(super) fn hook_in_use(&self) -> Option<String> {
        self.lock().hook_in_use.clone()
    }

    pub(super) fn next_alloc_id(&self) -> AllocId {
        let mut journal = self.lock();
        journal.next_id += 1;
        AllocId::new(format!("alloc-{:08}", journal.next_id))
    }

    /// Appends and syncs: the entries are durable when this returns (I1).
    pub(super) async fn append(&self, node: &Node, entries: &[Entry]) {
        let wait = node.handle().random(|random| {
            let slow = random.chance(0.02);
            random.between(
                Duration::from_micros(50),
                Duration::from_millis(if slow { 40 } else { 1 }),
            )
        });
        node.handle().sleep(wait).await;
        let mut journal = self.lock();
        entries.iter().for_each(|entry| {
            journal.ledger.evolve(entry);
        });
        journal.entries.extend_from_slice(entries);
    }
}
