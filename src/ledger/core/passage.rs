//! The gate: when a container may start with a device that another pod had (PreStartContainer).
//!
//! The kubelet gives a device to the next pod as soon as it considers the former pod ended. That is
//! long before the release is proven, and the next pod must not find what the after-release hook
//! removes. So a container of a resource with such a hook may start only when no pod but its own
//! has a live grant of its devices, and no hook is pending for them.
//!
//! The decision depends on another pod's grant of the device:
//!
//! - The kubelet's checkpoint has the device for one pod and no entry of the other, whose cgroup is
//!   absent or empty: the other's grant is released (`handed_on`), with its pending hook in the
//!   same commit. The hook is due at once, because every holder of the device waits here.
//! - The same, but the checkpoint has another grant for the other's container, because a static pod
//!   came back with its UID: the same.
//! - A process of that pod runs, or its cgroup cannot be read: the container waits.
//! - The checkpoint has the device for a pod that the ledger does not know, because another plugin
//!   gave it, or for one with an older grant, because the kubelet wrote an older state last: the
//!   container waits, and nothing is released.
//! - The checkpoint knows both pods in another way, or neither: the container waits, because the
//!   caller cannot be identified.
//! - The grant has no pod yet, and is not in the checkpoint: the container waits until the grant is
//!   released as `never_started`, or is bound to a pod.
//!
//! The kubelet does not name the container that it starts, only its ids. That is enough: the
//! kubelet has a device for one pod at a time, and starts no container of a pod with a device that
//! it does not have for it.

use super::hooks::{ReleaseHooks, comes_after};
use super::{HANDED_ON, Ledger};
use crate::domain::{
    CgroupState, Checkpoint, DeviceId, Entry, FormerHolder, Grant, GrantState, PodName, PodRef,
    ResourceName, Sharing, StartBlocked, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The observations available while a container waits for its start. They are made only if a device
/// has several grants.
pub trait View {
    /// The current state of a pod's cgroup.
    fn cgroup(&self, uid: &str) -> CgroupState;
    /// A pod's names, if they can be seen now.
    fn name(&self, uid: &str) -> Option<PodName>;
    /// The kubelet's checkpoint, if it can be read.
    fn checkpoint(&self) -> Option<&Checkpoint>;
}

/// Whether a container may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passage {
    /// It may start.
    Open,
    /// It waits, for this device among others.
    Barred(DeviceId, StartBlocked),
    /// Former holders of this device, among others, have ended. The entries must be written, with
    /// their pending hooks first. Then the question is asked again.
    HandedOn(DeviceId, FormerHolder, Vec<Entry>),
}

impl Passage {
    /// Whether only hooks block the start: then all holders of the devices are one pod, which is
    /// kept from starting.
    #[must_use]
    pub fn waits_for_hooks(&self) -> bool {
        matches!(
            self,
            Passage::HandedOn(..)
                | Passage::Barred(_, StartBlocked::Due { .. } | StartBlocked::Failed { .. })
        )
    }
}

/// Decides for the ids that the container gets of a resource.
pub fn passage(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    resource: &ResourceName,
    ids: &[DeviceId],
    view: &impl View,
    now: Timestamp,
) -> Passage {
    let Some(sharing @ Sharing::Exclusive) = hooks.get(resource) else { return Passage::Open };
    let (mut moves, mut first) = (BTreeMap::new(), None);
    for id in ids {
        let holders: Vec<&Arc<Grant>> = ledger.holders(resource, id).collect();
        match former(ledger, id, &holders, view) {
            Err(barred) => return Passage::Barred(id.clone(), barred),
            Ok(gone) => {
                for (grant, former) in gone {
                    first.get_or_insert_with(|| (id.clone(), former.clone()));
                    moves.insert(&grant.alloc_id, released(grant, former, now));
                }
            }
        }
    }
    if let Some((id, former)) = first {
        return Passage::HandedOn(id, former, moves.into_values().collect());
    }
    let owed = |id: &DeviceId| {
        let hook = ledger.owed().get(resource)?.get(&sharing.whole(resource, id))?;
        let is_after = ledger.holders(resource, id).all(|grant| comes_after(grant, hook));
        is_after.then(|| Passage::Barred(id.clone(), hook.start_blocked()))
    };
    ids.iter().find_map(owed).unwrap_or(Passage::Open)
}

/// The grants of pods that had the device before and have ended. An error if another pod is not
/// proven to have ended.
fn former<'a>(
    ledger: &Ledger,
    id: &DeviceId,
    holders: &[&'a Arc<Grant>],
    view: &impl View,
) -> Result<Vec<(&'a Grant, FormerHolder)>, StartBlocked> {
    let known: BTreeSet<Option<&str>> =
        holders.iter().map(|grant| grant.pod().map(|pod| pod.uid.as_str())).collect();
    let checkpoint = view.checkpoint();
    let having = holders
        .first()
        .zip(checkpoint)
        .map(|(grant, checkpoint)| checkpoint.having(&grant.resource, id));
    let present: BTreeSet<&str> =
        having.into_iter().flatten().map(|entry| entry.pod_uid.as_str()).collect();
    // The container may be of a pod that the ledger does not know: another plugin gave the device.
    let is_of_other = || {
        let mut uids = known.iter().flatten();
        !present.is_empty() && !known.contains(&None) && uids.all(|uid| !present.contains(uid))
    };
    let is_one = known.len() <= 1 && (holders.len() <= 1 || !known.contains(&None));
    if known.is_empty() || is_one && !is_of_other() {
        return Ok(Vec::new());
    }
    let in_checkpoint = |grant: &Grant| checkpoint?.answered(&grant.alloc_id);
    // The pod of each grant: the checkpoint may know it before the ledger does.
    let mut pods: BTreeMap<&str, Vec<(&Grant, Option<FormerHolder>)>> = BTreeMap::new();
    for grant in holders {
        let former = grant
            .pod()
            .zip(grant.container())
            .map(|(pod, container)| former_of(pod, container, view));
        let uid = grant
            .pod()
            .map(|pod| pod.uid.as_str())
            .or_else(|| Some(in_checkpoint(grant)?.pod_uid.as_str()));
        let Some(uid) = uid else {
            return Err(StartBlocked::Unknown { alloc_id: grant.alloc_id.clone() });
        };
        pods.entry(uid).or_default().push((grant, former));
    }
    if pods.len() <= 1 && !is_of_other() {
        return Ok(Vec::new());
    }
    // The kubelet may write an older state last. Then a grant is newer than that of the pod in the
    // file, and its container may be the one that asks.
    let last = present.iter().filter_map(|uid| pods.get(uid)).flatten();
    let last = last.map(|(grant, _)| &grant.alloc_id).max();
    let mut gone = Vec::new();
    for (uid, grants) in &pods {
        if present.len() == 1 && present.contains(uid) {
            continue;
        }
        for (grant, former) in grants {
            // A pod that only the checkpoint knows is still in the checkpoint.
            let Some(former) = former.clone() else {
                return Err(StartBlocked::Unknown { alloc_id: grant.alloc_id.clone() });
            };
            let is_in_it = checkpoint.is_some_and(|checkpoint| !checkpoint.of_pod(uid).is_empty());
            if present.len() != 1 || is_in_it && !ledger.is_superseded(grant, checkpoint) {
                return Err(StartBlocked::CheckpointUnclear { former });
            }
            match view.cgroup(uid) {
                CgroupState::Absent | CgroupState::Empty
                    if last.is_none_or(|last| *last < grant.alloc_id) =>
                {
                    return Err(StartBlocked::CheckpointUnclear { former });
                }
                CgroupState::Absent | CgroupState::Empty => gone.push((*grant, former)),
                cgroup @ (CgroupState::Populated | CgroupState::Unknown) => {
                    return Err(StartBlocked::Runs { former, cgroup });
                }
            }
        }
    }
    Ok(gone)
}

fn former_of(pod: &PodRef, container: &str, view: &impl View) -> FormerHolder {
    let mut pod = pod.clone();
    if pod.name.is_none()
        && let Some(PodName { namespace, name }) = view.name(&pod.uid)
    {
        (pod.namespace, pod.name) = (Some(namespace), Some(name));
    }
    FormerHolder { pod, container: container.to_owned() }
}

fn released(grant: &Grant, FormerHolder { pod, container }: FormerHolder, now: Timestamp) -> Entry {
    let bound_at = match grant.state {
        GrantState::Bound { bound_at, .. } | GrantState::Suspect { bound_at, .. } => Some(bound_at),
        GrantState::Granted | GrantState::Prepared { .. } | GrantState::Released { .. } => None,
    };
    let (pod, container, released_by) = (Some(pod), Some(container), HANDED_ON.to_owned());
    Entry::Moved {
        alloc_id: grant.alloc_id.clone(),
        state: GrantState::Released {
            pod,
            container,
            bound_at,
            released_at: now,
            other_pods: Vec::new(),
            released_by,
        },
    }
}

#[cfg(test)]
mod tests;
