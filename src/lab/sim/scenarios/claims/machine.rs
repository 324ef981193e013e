//! The machine: the state that outlives a process on it, and what of it outlives a power cut.

use super::kubelet::ClaimInfo;
use super::world::pools;
use crate::domain::{
    CgroupState, Checkpoint, CheckpointEntry, DeviceId, Entry, KubeletClaim, KubeletClaims,
    KubeletGeneration, Moment, PodName, Timestamp,
};
use crate::lab::sim::random::Random;
use crate::ledger::core::Ledger;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// A device in the containers of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Held {
    pub(super) device: DeviceId,
    /// The UID of the claim; `None` for a device that was requested by number.
    pub(super) claim: Option<String>,
    pub(super) is_admin: bool,
}

/// The kubelet's file of claims.
#[derive(Debug, Clone, Default)]
pub(super) struct ClaimsFile {
    pub(super) claims: BTreeMap<String, ClaimInfo>,
}

#[derive(Debug)]
pub(super) struct Machine {
    dir: tempfile::TempDir,
    journal: Vec<Entry>,
    /// The entries of the journal that a power cut leaves.
    synced: usize,
    /// The ledger that they result in.
    pub(super) durable: Ledger,
    boots: u64,
    ids: u64,
    pub(super) kubelet: Option<KubeletGeneration>,
    kubelets: u64,
    pub(super) cgroups: BTreeMap<String, CgroupState>,
    /// By the UID of a pod whose containers run.
    pub(super) containers: BTreeMap<String, Vec<Held>>,
    /// The log folders of pods.
    pub(super) names: BTreeMap<String, PodName>,
    claims: ClaimsFile,
    /// Its version before, while the rename may be lost.
    former: Option<ClaimsFile>,
    checkpoint: (Vec<CheckpointEntry>, Timestamp),
    /// The version of the devices' driver: what containers get of a device depends on it.
    pub(super) driver: u64,
    /// Changes of what the oracles compare.
    pub(super) changes: u64,
}

impl Machine {
    pub(super) fn new() -> Self {
        Machine {
            dir: tempfile::tempdir().unwrap(),
            journal: Vec::new(),
            synced: 0,
            durable: Ledger::default(),
            boots: 1,
            ids: 0,
            kubelet: None,
            kubelets: 0,
            cgroups: BTreeMap::new(),
            containers: BTreeMap::new(),
            names: BTreeMap::new(),
            claims: ClaimsFile::default(),
            former: None,
            checkpoint: (Vec::new(), Timestamp(0)),
            driver: 0,
            changes: 0,
        }
    }

    pub(super) fn boot_id(&self) -> String {
        format!("boot-{}", self.boots)
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// The ledger that a process finds at its start.
    pub(super) fn read_ledger(&self) -> Ledger {
        let mut ledger = Ledger::default();
        for entry in &self.journal {
            ledger.evolve(entry);
        }
        ledger
    }

    pub(super) fn write_entries(&mut self, entries: &[Entry]) {
        self.journal.extend(entries.iter().cloned());
    }

    pub(super) fn sync_entries(&mut self) {
        for entry in &self.journal[self.synced..] {
            self.durable.evolve(entry);
        }
        self.synced = self.journal.len();
        self.changes += 1;
    }

    /// The folder of CDI files, empty after a boot.
    pub(super) fn cdi(&self) -> PathBuf {
        self.dir.path().join("cdi")
    }

    pub(super) fn claims_file(&self) -> &ClaimsFile {
        &self.claims
    }

    /// Whether the kubelet's file has the claim.
    pub(super) fn has_record(&self, uid: &str) -> bool {
        self.claims.claims.values().any(|info| info.of.uid == uid)
    }

    /// Replaces the kubelet's file by a rename.
    pub(super) fn write_claims(&mut self, claims: BTreeMap<String, ClaimInfo>) {
        let file = ClaimsFile { claims };
        self.former = Some(std::mem::replace(&mut self.claims, file));
    }

    /// The kubelet's file as a reader parses it now.
    pub(super) fn kubelet_claims(&self, now: Moment) -> KubeletClaims {
        let entry = |info: &ClaimInfo| KubeletClaim {
            claim: info.of.clone(),
            pods: info.pods.clone(),
            devices: info.devices.clone(),
        };
        let claims = self.claims.claims.values().map(|info| (info.of.uid.clone(), entry(info)));
        KubeletClaims { claims: claims.collect(), read_at: now }
    }

    pub(super) fn checkpoint(&self) -> Arc<Checkpoint> {
        Arc::new(Checkpoint::new(self.checkpoint.0.clone(), self.checkpoint.1))
    }

    pub(super) fn change_checkpoint(
        &mut self,
        now: Timestamp,
        change: impl FnOnce(&mut Vec<CheckpointEntry>),
    ) {
        change(&mut self.checkpoint.0);
        self.checkpoint.1 = now;
    }

    pub(super) fn checkpoint_entries(&self) -> &[CheckpointEntry] {
        &self.checkpoint.0
    }

    pub(super) fn new_kubelet(&mut self, now: Timestamp) {
        self.kubelets += 1;
        let made_ns = i64::try_from(now.0).unwrap() * 1_000_000;
        self.kubelet = Some(KubeletGeneration { inode: self.kubelets, made_ns });
    }

    /// Every process has ended, the folders in memory are empty, the clocks continue.
    pub(super) fn reboot(&mut self) {
        self.boots += 1;
        self.cgroups.clear();
        self.containers.clear();
        self.changes += 1;
        drop(fs::remove_dir_all(self.cdi()));
    }

    /// A reboot without a sync: the disk has what was synced, and any part of what came after it.
    pub(super) fn cut_power(&mut self, random: &mut Random) {
        let kept = self.synced + random.below(self.journal.len() - self.synced + 1);
        self.journal.truncate(kept);
        // Read and written again at the start.
        self.sync_entries();
        if let Some(former) = self.former.take().filter(|_| random.chance(0.5)) {
            self.claims = former;
        }
        self.reboot();
    }

    /// The node of a device: at each boot the kernel gives the nodes of a class in another order.
    /// The shares of a device have a fixed one.
    pub(super) fn node(&self, id: &DeviceId) -> String {
        let place = |pool: &super::world::Pool| {
            let mut ids = devices().filter(|(_, of)| of.prefix == pool.prefix && !of.is_divided);
            ids.position(|(known, _)| known == *id)
        };
        let shifted = pools().find_map(|pool| Some((pool, place(pool)?)));
        let Some((pool, place)) = shifted else { return format!("/dev/{id}") };
        format!("/dev/{}-{}", pool.prefix, (place as u64 + self.boots) % u64::from(pool.count))
    }

    /// The devices that the runtime adds for a CDI name of a claim. `None` if no file defines it.
    pub(super) fn resolve(&self, cdi_name: &str) -> Option<Vec<DeviceId>> {
        let (kind, device) = cdi_name.split_once('=')?;
        if kind != crate::contract::claim::KIND {
            // The driver's own file.
            return Some(Vec::new());
        }
        for entry in fs::read_dir(self.cdi()).ok()?.flatten() {
            if entry.path().extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let document: Value = serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()?;
            let defined = document["devices"].as_array()?;
            let Some(found) = defined.iter().find(|found| found["name"] == device) else {
                continue;
            };
            let nodes = found["containerEdits"]["deviceNodes"].as_array()?;
            let id = |node: &Value| {
                let path = node.get("hostPath").unwrap_or(&node["path"]).as_str()?;
                devices().map(|(id, _)| id).find(|id| self.node(id) == path)
            };
            return nodes.iter().map(id).collect();
        }
        None
    }

    /// The content of a claim's CDI file.
    pub(super) fn cdi_text(&self, uid: &str) -> Option<String> {
        let name = crate::contract::claim::file_name(uid)?;
        fs::read_to_string(self.cdi().join(name)).ok()
    }

    /// The UIDs of the claims that have a CDI file.
    pub(super) fn cdi_claims(&self) -> Vec<String> {
        let entries = fs::read_dir(self.cdi()).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter_map(|name| crate::contract::claim::uid_of_file(&name).map(str::to_owned))
            .collect()
    }

    /// Whether the containers of a pod run.
    pub(super) fn runs(&self, pod: &str) -> bool {
        self.containers.contains_key(pod)
    }

    pub(super) fn start_containers(&mut self, pod: &str, held: Vec<Held>) {
        self.cgroups.insert(pod.to_owned(), CgroupState::Populated);
        let name = PodName { namespace: "ml".into(), name: format!("pod-{pod}") };
        self.names.insert(pod.to_owned(), name);
        self.containers.insert(pod.to_owned(), held);
        self.changes += 1;
    }

    /// The containers have ended; the cgroup still exists.
    pub(super) fn stop_containers(&mut self, pod: &str) {
        if self.containers.remove(pod).is_some() {
            self.cgroups.insert(pod.to_owned(), CgroupState::Empty);
        }
    }

    pub(super) fn cgroup(&self, pod: &str) -> CgroupState {
        self.cgroups.get(pod).copied().unwrap_or(CgroupState::Absent)
    }
}

/// The devices of the node: id and resource.
pub(super) fn devices() -> impl Iterator<Item = (DeviceId, &'static super::world::Pool)> {
    let of = |pool: &'static super::world::Pool| {
        let id = |n| {
            if pool.is_divided {
                DeviceId::new(pool.prefix).share(n)
            } else {
                DeviceId::new(format!("{}-{n}", pool.prefix))
            }
        };
        (0..pool.count).map(move |n| (id(n), pool))
    };
    pools().flat_map(of)
}
