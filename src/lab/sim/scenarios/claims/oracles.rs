//! The oracles.
//!
//! | oracle | checked | condition |
//! | --- | --- | --- |
//! | twice | always | an exclusive device is not in containers of a claim and of another holder |
//! | lost | always | the durable ledger has the devices in a claim's containers (below) |
//! | durable | at each answer | the durable ledger has exactly the answered devices |
//! | bytes | at each answer | the answer and the CDI file are those of before (below) |
//! | allocation | at each answer | the devices were allocated to this UID during the call |
//! | given | at each start | containers get each device of the claim once, and no other |
//! | files | at each start | each CDI name is defined (below) |
//! | runs | when idle | every pod that the scheduler has bound runs (below) |
//! | slices | when idle | the slices are those of the ledger |
//! | released | before idle | no grant has been unprepared and without a process for 30 s |
//! | held | at the end | no claim is in the ledger, and none has a file |
//!
//! The same claim with the same devices has the same bytes until the next boot or the kubelet's
//! next Unprepare. A device has another node in each boot.
//!
//! Up to 1.36 the kubelet unprepares a claim although another pod of its record uses it. If the
//! daemon dies before it answers, the kubelet starts that pod without another Prepare. While no
//! daemon runs, no claim gets the device, and the next start restores the claim from the record. So
//! the record counts as the ledger until then, and a missing file as an attempt that failed.
//!
//! The control plane frees a claim whose only pod was deleted by force, and may allocate other
//! devices to it. If a later pod uses the claim before the kubelet has unprepared it, the kubelet
//! gives it the former devices without another Prepare, and keeps them prepared. Pods that need
//! these devices, or the new ones of this claim, rightly wait for the end of that pod; a pod that
//! needs both waits for itself.

use super::cluster::{Cluster, Part, Pod};
use super::machine::{Held, Machine, devices};
use super::slices::wanted;
use super::world::{Crash, Step, World, slice_name_of};
use crate::domain::{AllocId, ClaimRef, DeviceId, DraName, Grant, GrantState, PreparedDevice};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The UID of a claim, and its devices.
type Allocation = (String, BTreeSet<Part>);
/// The devices of an answer, and the text of the claim's CDI file.
type Answer = (Vec<PreparedDevice>, Option<String>);

/// A violated oracle.
#[derive(Debug, Clone)]
pub(super) struct Violation {
    pub(super) oracle: &'static str,
    pub(super) at: Duration,
    pub(super) what: String,
}

/// What was covered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Covered {
    pub(super) answers: u64,
    /// Answers that repeat an earlier one.
    pub(super) repeated: u64,
    /// Pods whose containers have started.
    pub(super) starts: u64,
}

impl Covered {
    pub(super) fn plus(self, other: Covered) -> Covered {
        Covered {
            answers: self.answers + other.answers,
            repeated: self.repeated + other.repeated,
            starts: self.starts + other.starts,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Oracles {
    pub(super) violation: Option<Violation>,
    pub(super) crashes: BTreeMap<(Step, Crash), u64>,
    pub(super) covered: Covered,
    /// By claim and devices, with the boot.
    answers: BTreeMap<Allocation, (String, Answer)>,
    /// The claims that the kubelet has asked to unprepare since their last answer.
    unprepared: BTreeSet<String>,
    seen: u64,
}

impl Oracles {
    pub(super) fn violated(&mut self, oracle: &'static str, at: Duration, what: String) {
        self.violation.get_or_insert(Violation { oracle, at, what });
    }

    /// The kubelet has an answer for a claim. The call began at `from`.
    pub(super) fn answered(
        &mut self,
        world: &World,
        of: &ClaimRef,
        devices: &[PreparedDevice],
        from: Duration,
    ) {
        let now = world.handle.now();
        world.log(format_args!("{} is answered: {devices:?}", of.uid));
        self.covered.answers += 1;
        self.unprepared.remove(&of.uid);
        let part = |device: &PreparedDevice| (device.name.clone(), device.share_id.clone());
        let names: BTreeSet<Part> = devices.iter().map(part).collect();
        let (text, durable, boot_id) = {
            let machine = world.machine();
            let grants = machine.durable.of_claim(&of.uid);
            let holds = grants.filter_map(|grant| grant.claim.as_deref());
            let durable: BTreeSet<Part> = holds
                .flat_map(|hold| &hold.devices)
                .map(|device| (device.allocated.name.clone(), device.allocated.share_id.clone()))
                .collect();
            (machine.cdi_text(&of.uid), durable, machine.boot_id())
        };
        if durable != names {
            self.violated(
                "durable",
                now,
                format!("{}: {names:?} is answered, {durable:?} is durable", of.uid),
            );
        }
        if !world.cluster().had(&of.uid, &names, from) {
            self.violated("allocation", now, format!("{}: {names:?} was not allocated", of.uid));
        }
        let key = (of.uid.clone(), names);
        let answer = (devices.to_vec(), text);
        let first = self.answers.insert(key, (boot_id.clone(), answer.clone()));
        self.covered.repeated += u64::from(first.is_some());
        if let Some((_, first)) = first.filter(|(boot, first)| *boot == boot_id && *first != answer)
        {
            self.violated("bytes", now, format!("{}: {answer:?} after {first:?}", of.uid));
        }
    }

    /// The kubelet asks to unprepare a claim: the next Prepare may have another answer.
    pub(super) fn asked_to_unprepare(&mut self, uid: &str) {
        self.answers.retain(|(claim, _), _| claim != uid);
        self.unprepared.insert(uid.to_owned());
    }

    /// No file defines a CDI name of a claim.
    pub(super) fn undefined(&mut self, now: Duration, claim: &str, what: String) {
        if !self.unprepared.contains(claim) {
            self.violated("files", now, what);
        }
    }

    /// The containers of a pod start. `wanted` are the devices that its claims have by the kubelet.
    pub(super) fn started(&mut self, now: Duration, wanted: &[DeviceId], held: &[Held]) {
        self.covered.starts += 1;
        let claimed = held.iter().filter(|held| held.claim.is_some());
        let mut got: Vec<&DeviceId> = claimed.map(|held| &held.device).collect();
        got.sort();
        let mut wanted: Vec<&DeviceId> = wanted.iter().collect();
        wanted.sort();
        if got != wanted {
            self.violated("given", now, format!("containers get {got:?} for {wanted:?}"));
        }
    }

    /// Called after every step. `is_up` is whether a daemon runs.
    pub(super) fn check(&mut self, machine: &Machine, is_up: bool, now: Duration) {
        if self.seen == machine.changes || self.violation.is_some() {
            return;
        }
        self.seen = machine.changes;
        let mut holders: BTreeMap<&DeviceId, BTreeSet<(Option<&str>, &str)>> = BTreeMap::new();
        for (pod, held) in &machine.containers {
            for Held { device, claim, is_admin } in held {
                let is_known = |uid: &String| {
                    let is_restored = !is_up && self.unprepared.contains(uid);
                    is_held(machine, uid, device) || is_restored && machine.has_record(uid)
                };
                if let Some(uid) = claim.as_ref().filter(|uid| !is_known(uid)) {
                    let what = format!("{pod} runs with {device} of claim {uid}");
                    return self.violated("lost", now, what);
                }
                if !is_admin {
                    let holder =
                        (claim.as_deref(), if claim.is_some() { "" } else { pod.as_str() });
                    holders.entry(device).or_default().insert(holder);
                }
            }
        }
        let twice = holders.into_iter().find(|(_, holders)| {
            holders.len() > 1 && holders.iter().any(|(claim, _)| claim.is_some())
        });
        if let Some((device, holders)) = twice {
            self.violated("twice", now, format!("{device} is held by {holders:?}"));
        }
    }

    /// When everything works and nothing has changed for minutes.
    pub(super) fn idle(&mut self, world: &World) {
        let now = world.handle.now();
        let (machine, cluster) = (world.machine(), world.cluster());
        let outdated = outdated(world, &machine, &cluster);
        let waiting: Vec<&String> = cluster
            .pods
            .values()
            .filter(|pod| pod.is_bound && !pod.is_deleted && !machine.runs(&pod.uid))
            .filter(|pod| !waits_for_any(pod, &outdated, &cluster))
            .map(|pod| &pod.uid)
            .collect();
        if !waiting.is_empty() {
            self.violated("runs", now, format!("{waiting:?} do not run"));
        }
        let grants: Vec<Arc<Grant>> = machine.durable.grants().cloned().collect();
        let wanted: BTreeMap<(String, String), bool> = wanted(&grants)
            .pools
            .iter()
            .flat_map(|(pool, devices)| {
                let tainted = |it: &crate::slices::api::Device| !it.taints.is_empty();
                devices.values().map(move |it| ((pool.clone(), it.name.clone()), tainted(it)))
            })
            .collect();
        let published = cluster.published();
        if published.as_ref() != Some(&wanted) {
            self.violated("slices", now, format!("{published:?} for {wanted:?}"));
        }
    }

    /// When everything works. `before` are the [`ended`] grants of half a minute ago.
    pub(super) fn released(&mut self, world: &World, before: &BTreeSet<AllocId>) {
        let left: Vec<AllocId> = ended(world).intersection(before).cloned().collect();
        if !left.is_empty() {
            self.violated("released", world.handle.now(), format!("{left:?} have no process"));
        }
    }

    /// When no pod has existed for minutes.
    pub(super) fn end(&mut self, world: &World) {
        let (now, machine) = (world.handle.now(), world.machine());
        let left: Vec<String> = machine
            .durable
            .grants()
            .filter_map(|grant| Some(format!("{:?} {:?}", grant.claim.as_ref()?, grant.state)))
            .collect();
        let files = machine.cdi_claims();
        if !left.is_empty() || !files.is_empty() {
            self.violated("held", now, format!("{left:?}, files of {files:?}"));
        }
        let known: Vec<&String> = machine.claims_file().claims.keys().collect();
        if !known.is_empty() {
            self.violated("held", now, format!("the kubelet has {known:?}"));
        }
    }
}

/// The live grants that are unprepared and whose pods have no process.
pub(super) fn ended(world: &World) -> BTreeSet<AllocId> {
    let machine = world.machine();
    let has_ended = |grant: &&Arc<Grant>| {
        let is_unprepared =
            matches!(grant.state, GrantState::Prepared { unprepared_at: Some(_), .. });
        is_unprepared && grant.pods().all(|pod| machine.cgroup(&pod.uid).is_dead())
    };
    machine.durable.grants().filter(has_ended).map(|grant| grant.alloc_id.clone()).collect()
}

/// The claims that pods use which exist, each with a device that is no longer allocated to it: in
/// their containers, or prepared for them by the kubelet.
fn outdated(world: &World, machine: &Machine, cluster: &Cluster) -> BTreeSet<(String, DraName)> {
    let exists = |uid: &String| cluster.pods.get(uid).is_some_and(|pod| !pod.is_deleted);
    let pods = machine.containers.iter().filter(|(uid, _)| exists(uid));
    let claimed = pods.flat_map(|(_, held)| held);
    let name = |id: &DeviceId| {
        let (_, pool) = devices().find(|(known, _)| known == id)?;
        Some(slice_name_of(id, pool.class))
    };
    let mut used: BTreeSet<(String, DraName)> =
        claimed.filter_map(|held| Some((held.claim.clone()?, name(&held.device)?))).collect();
    for info in world.kubelet().iter().flat_map(|kubelet| kubelet.prepared()) {
        let names = info.devices.iter().map(|device| device.name.clone());
        let is_used = info.pods.iter().any(exists);
        used.extend(names.filter(|_| is_used).map(|name| (info.of.uid.clone(), name)));
    }
    used.retain(|(uid, device)| !cluster.devices_of(uid).contains(device));
    used
}

/// Whether a pod needs one of these claims or devices.
fn waits_for_any(pod: &Pod, held: &BTreeSet<(String, DraName)>, cluster: &Cluster) -> bool {
    let claims = pod.claims.iter().filter_map(|name| cluster.get(name));
    let mut uids = claims.map(|claim| claim.claim.uid);
    uids.any(|uid| {
        let devices = cluster.devices_of(&uid);
        held.iter().any(|(claim, device)| *claim == uid || devices.contains(device))
    })
}

/// Whether the durable ledger has the device as one of the claim's.
fn is_held(machine: &Machine, uid: &str, device: &DeviceId) -> bool {
    let mut grants = machine.durable.of_claim(uid);
    grants.any(|grant| grant.devices.iter().any(|held| held.id == *device))
}
