//! The gate: when a container may start with a device that another pod had (PreStartContainer).
//!
//! The kubelet gives a device on as soon as a pod is over for it, which is long before its release is proven, and the next pod
//! is not to find what the hook after release takes away. So a container of a resource with such a hook is let start when
//! nobody but its own pod has a live grant of its devices, and no hook is owed for them.
//!
//! | another pod's grant of the device | then |
//! | --- | --- |
//! | the kubelet's checkpoint has the device for one pod and nothing of the other, whose cgroup is gone or empty | the other's grant is released (`handed_on`) and owes its hook, in one commit; the hook is due at once, since everybody who holds the device waits here |
//! | likewise, but the checkpoint has another grant for the other's container: a static pod has come back with its UID | likewise |
//! | a process of that pod runs, or that cannot be seen | the container waits |
//! | the checkpoint knows both pods otherwise, or neither | the container waits: nobody can say who calls |
//! | of no pod yet, and not in the checkpoint | the container waits: it is released as `never_started`, or becomes some pod's |
//!
//! The kubelet does not say which container it starts, only with which ids. It does not have to: the kubelet has a device for
//! one pod at a time, and starts no container of a pod with a device that it does not have for it.

use super::hooks::{ReleaseHooks, comes_after};
use super::{HANDED_ON, Ledger};
use crate::domain::{
    CgroupState, Checkpoint, DeviceId, Entry, FormerHolder, Grant, GrantState, PodName, PodRef, ResourceName, Sharing, StartBlocked,
    Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What can be seen while a container waits for its start. Only a device that several grants have makes anybody look.
pub trait View {
    /// What a pod's cgroup tells now.
    fn cgroup(&self, uid: &str) -> CgroupState;
    /// A pod's names, where they can be seen now.
    fn name(&self, uid: &str) -> Option<PodName>;
    /// The kubelet's checkpoint, if it can be read.
    fn checkpoint(&self) -> Option<&Checkpoint>;
}

/// Whether a container may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passage {
    /// It may.
    Open,
    /// It waits, for this device among others.
    Barred(DeviceId, StartBlocked),
    /// Former holders are gone, of this device among others: this is to be written, with the hooks that it owes in front. Then
    /// it is asked again.
    HandedOn(DeviceId, FormerHolder, Vec<Entry>),
}

impl Passage {
    /// Whether only hooks are waited for: then whoever has the devices is one pod, which is kept from starting with them.
    #[must_use]
    pub fn waits_for_hooks(&self) -> bool {
        matches!(self, Passage::HandedOn(..) | Passage::Barred(_, StartBlocked::Due { .. } | StartBlocked::Failed { .. }))
    }
}

/// Decides it for the ids that the container gets of a resource.
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

/// The grants of pods that had the device before and are gone. An error where there is another pod of which that is not so.
fn former<'a>(
    ledger: &Ledger,
    id: &DeviceId,
    holders: &[&'a Arc<Grant>],
    view: &impl View,
) -> Result<Vec<(&'a Grant, FormerHolder)>, StartBlocked> {
    let known: BTreeSet<Option<&str>> = holders.iter().map(|grant| grant.pod().map(|pod| pod.uid.as_str())).collect();
    if known.len() <= 1 && (holders.len() <= 1 || !known.contains(&None)) {
        return Ok(Vec::new());
    }
    let checkpoint = view.checkpoint();
    let in_checkpoint = |grant: &Grant| checkpoint?.answered(&grant.alloc_id);
    // Of which pod each is: the checkpoint may know it before the ledger does.
    let mut pods: BTreeMap<&str, Vec<(&Grant, Option<FormerHolder>)>> = BTreeMap::new();
    for grant in holders {
        let former = grant.pod().zip(grant.container()).map(|(pod, container)| former_of(pod, container, view));
        let uid = grant.pod().map(|pod| pod.uid.as_str()).or_else(|| Some(in_checkpoint(grant)?.pod_uid.as_str()));
        let Some(uid) = uid else { return Err(StartBlocked::Unknown { alloc_id: grant.alloc_id.clone() }) };
        pods.entry(uid).or_default().push((grant, former));
    }
    if pods.len() <= 1 {
        return Ok(Vec::new());
    }
    let having = holders.first().zip(checkpoint).map(|(grant, checkpoint)| checkpoint.having(&grant.resource, id));
    let present: BTreeSet<&str> = having.into_iter().flatten().map(|entry| entry.pod_uid.as_str()).collect();
    let mut gone = Vec::new();
    for (uid, grants) in &pods {
        if present.len() == 1 && present.contains(uid) {
            continue;
        }
        for (grant, former) in grants {
            // A pod that only the checkpoint knows is in it.
            let Some(former) = former.clone() else { return Err(StartBlocked::Unknown { alloc_id: grant.alloc_id.clone() }) };
            let is_in_it = checkpoint.is_some_and(|checkpoint| !checkpoint.of_pod(uid).is_empty());
            if present.len() != 1 || is_in_it && !ledger.is_superseded(grant, checkpoint) {
                return Err(StartBlocked::CheckpointUnclear { former });
            }
            match view.cgroup(uid) {
                CgroupState::Absent | CgroupState::Empty => gone.push((*grant, former)),
                cgroup @ (CgroupState::Populated | CgroupState::Unknown) => return Err(StartBlocked::Runs { former, cgroup }),
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
        GrantState::Granted | GrantState::Released { .. } => None,
    };
    let (pod, container, released_by) = (Some(pod), Some(container), HANDED_ON.to_owned());
    Entry::Moved {
        alloc_id: grant.alloc_id.clone(),
        state: GrantState::Released { pod, container, bound_at, released_at: now, released_by },
    }
}

#[cfg(test)]
mod tests;
