//! Claims of DRA: how one is recorded, refused and released.
//!
//! The scheduler allocates devices to a claim by name. The kubelet asks to prepare the claim for a
//! pod, as often as it wants, and to unprepare it when its last pod on the node has ended. All
//! grants of one allocation are recorded in one commit, one for each resource.
//!
//! A Prepare depends on the live grants of the same claim:
//!
//! - None: the grants are recorded.
//! - Of the same allocation: the answer is the recorded one, and new pods are added. Devices that a
//!   torn write has lost are recorded, and a restored grant gets its allocation. A grant of a
//!   former boot gets the nodes that its devices have now.
//! - Of another allocation, and no process of its pods runs: they are released as `reallocated`,
//!   and the new grants are recorded in the same commit.
//! - Of another allocation otherwise: the Prepare is refused.
//!
//! A device is refused while another live grant has it or an object of it
//! ([`super::held_by_another`]), and while a hook of it is pending. A claim that waits holds
//! nothing: all of it is recorded, or nothing. Its caller asks again. That is also so for a device
//! of a restored grant, as the kubelet's record may be older than the other grant
//! ([`super::restore_claims`]). If the other grant was restored too, both were answered, and both
//! stay.
//!
//! An Unprepare releases the claim if no process of its pods runs. These are the pods of each
//! Prepare, and those that the kubelet's record has: it prepares a claim once for all of its pods,
//! and records each of them until the claim is unprepared. The kubelet also unprepares a
//! claim while a container of a force-deleted pod runs, and up to 1.36 while another pod uses it.
//! Then only the request is recorded ([`GrantState::Prepared`]), and reconciliation releases the
//! claim after the last process ([`super::prepared`]). A cgroup without a process is proof here,
//! which it is not for `pod_gone`: the kubelet starts no sandbox of a claim that it has unprepared
//! without another Prepare.
//!
//! An unprepared claim leaves no record that refuses a late Prepare. Serving asks the API server
//! about the claim at each Prepare, and only that answer shows whether the claim is still allocated
//! to a pod. A record here could refuse a valid Prepare forever.

use super::Ledger;
use super::claim_end::{UNPREPARED, has_ended, lacking, limit, nameless, released};
use super::hooks::{ReleaseHooks, owing};
use super::refusal::held_by_another;
use crate::domain::{
    AllocId, CgroupState, ClaimHold, Entry, Grant, GrantState, PodRef, Refusal, Safeguard,
    Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// `released_by` of the former allocation of a claim that was allocated again.
pub const REALLOCATED: &str = "reallocated";

/// The result of a Prepare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// What to write in one commit. A refusal may come with the release of the former allocation.
    pub entries: Vec<Entry>,
    /// The grants in force after the commit, or why there are none.
    pub answer: Result<Vec<Arc<Grant>>, Refusal>,
}

/// Whether these are grants of one allocation of one claim, for at least one pod.
#[must_use]
pub fn is_one_claim(grants: &[Arc<Grant>]) -> bool {
    let of = |grant: &Grant| {
        let claim = grant.claim.as_ref()?;
        let has_pod = matches!(&grant.state, GrantState::Prepared { pods, .. } if !pods.is_empty());
        let claimed: BTreeSet<_> = claim.devices.iter().map(|device| &device.id).collect();
        let granted: BTreeSet<_> = grant.devices.iter().map(|device| &device.id).collect();
        let is_whole = has_pod && claimed == granted && !claimed.is_empty();
        is_whole.then(|| (claim.claim.uid.clone(), claim.allocation.clone()))
    };
    let mut all = grants.iter().map(|grant| of(grant));
    all.next()
        .flatten()
        .is_some_and(|first| !first.1.is_empty() && all.all(|other| other.as_ref() == Some(&first)))
}

/// Decides a Prepare. `wanted` are the grants of one claim ([`is_one_claim`]), `uncommitted`
/// the entries that wait for the commit; none of them is of this claim. `cgroup` reads the state of
/// a pod's cgroup.
pub fn record_claim(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    uncommitted: &[&Entry],
    wanted: &[Arc<Grant>],
    cgroup: &impl Fn(&str) -> CgroupState,
    now: Timestamp,
) -> Recording {
    let mut entries = Vec::new();
    match new_entries(ledger, hooks, uncommitted, wanted, cgroup, now, &mut entries) {
        Ok((new, grants)) => {
            entries.extend(new);
            Recording { entries, answer: Ok(grants) }
        }
        Err(refusal) => Recording { entries, answer: Err(refusal) },
    }
}

type Recorded = (Vec<Entry>, Vec<Arc<Grant>>);

/// The entries of a claim that may be recorded. The `released` entries of a former allocation are
/// written in any case.
fn new_entries(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    uncommitted: &[&Entry],
    wanted: &[Arc<Grant>],
    cgroup: &impl Fn(&str) -> CgroupState,
    now: Timestamp,
    released: &mut Vec<Entry>,
) -> Result<Recorded, Refusal> {
    let Some(whole) = whole(wanted) else { return Ok(Recorded::default()) };
    let is_same =
        |grant: &&Arc<Grant>| grant.claim.as_ref().is_some_and(|of| of.is_same_allocation(&whole));
    let (same, former): (Vec<_>, Vec<_>) = ledger.of_claim(&whole.claim.uid).partition(is_same);
    let mut in_use = former.iter().filter(|grant| !has_ended(grant, cgroup));
    if let Some((grant, device)) = in_use.find_map(|grant| Some((grant, grant.devices.first()?))) {
        return Err(Refusal::Held {
            resource: grant.resource.clone(),
            id: device.id.clone(),
            holder: format!("the former allocation of claim {}", whole.claim),
            free_when: "it is free when no process of the claim's former pods runs",
            container: None,
        });
    }
    *released = ends(ledger, hooks, uncommitted, &former, REALLOCATED, now);
    let uncommitted: Vec<&Entry> = uncommitted.iter().copied().chain(released.iter()).collect();
    let missing: Vec<Arc<Grant>> =
        wanted.iter().filter_map(|grant| without(grant, &same)).collect();
    let changed = same.iter().filter_map(|grant| renewed(grant, wanted));
    let mut changed: BTreeMap<AllocId, Grant> =
        changed.map(|grant| (grant.alloc_id.clone(), grant)).collect();
    for grant in missing.iter().map(|grant| &**grant).chain(changed.values()) {
        if let Some(refusal) = refusal(ledger, hooks, &uncommitted, grant) {
            return Err(refusal);
        }
    }
    let coming: Vec<&PodRef> = wanted.iter().flat_map(|grant| grant.pods()).collect();
    let (mut entries, mut grants) = (Vec::new(), Vec::new());
    for grant in same {
        let state = joined(grant, &coming, cgroup);
        let grant = match (changed.remove(&grant.alloc_id), state) {
            (None, None) => Arc::clone(grant),
            (None, Some(state)) => {
                let alloc_id = grant.alloc_id.clone();
                entries.push(Entry::Moved { alloc_id, state: state.clone() });
                Arc::new(Grant { state, ..Grant::clone(grant) })
            }
            (Some(changed), state) => {
                let state = state.unwrap_or_else(|| changed.state.clone());
                let grant = Arc::new(allocated(Grant { state, ..changed }, &whole.allocation));
                entries.push(Entry::Grant(Arc::clone(&grant)));
                grant
            }
        };
        grants.push(grant);
    }
    entries.extend(missing.iter().cloned().map(Entry::Grant));
    grants.extend(missing);
    grants.sort_by(|one, other| {
        (&one.resource, &one.alloc_id).cmp(&(&other.resource, &other.alloc_id))
    });
    Ok((entries, grants))
}

/// A grant of a former boot, or a restored one, with what the claim gets of its devices now. The
/// kernel may have given their nodes to other devices, and the kubelet's record lacks which
/// alternative was allocated, or for an administrator. A device that is not wanted stays as it is:
/// its resource was removed.
fn renewed(grant: &Grant, wanted: &[Arc<Grant>]) -> Option<Grant> {
    let mut hold = ClaimHold::clone(grant.claim.as_deref()?);
    let (boot_id, is_restored) = (&wanted.first()?.boot_id, hold.is_restored());
    if !is_restored && !grant.is_of_former_boot(boot_id) {
        return None;
    }
    let mut renewed = Grant { boot_id: boot_id.clone(), ..grant.clone() };
    if let (true, Some(wanted)) = (is_restored, &wanted.first()?.claim) {
        // A CDI file has only its UID.
        hold.claim = wanted.claim.clone();
    }
    for device in &mut hold.devices {
        let of_it = |wanted: &'_ Arc<Grant>| {
            let mut claimed = wanted.claim.iter().flat_map(|hold| &hold.devices);
            let claimed = claimed.find(|new| new.allocated.is_for(&device.allocated))?.clone();
            let granted = wanted.devices.iter().find(|granted| granted.id == claimed.id);
            Some((claimed, granted.cloned()))
        };
        let Some((claimed, granted)) = wanted.iter().find_map(of_it) else { continue };
        device.allocated = claimed.allocated;
        if claimed.id != device.id {
            continue;
        }
        (device.edits, device.metadata) = (claimed.edits, claimed.metadata);
        if !is_restored {
            device.cdi_devices = claimed.cdi_devices;
        }
        let held = renewed.devices.iter_mut().filter(|held| held.id == device.id);
        held.zip(granted).for_each(|(held, granted)| *held = granted);
    }
    renewed.claim = Some(Arc::new(hold));
    Some(renewed)
}

/// A grant with its allocation: it no longer counts as restored.
fn allocated(mut grant: Grant, allocation: &str) -> Grant {
    if let Some(hold) = &mut grant.claim {
        allocation.clone_into(&mut Arc::make_mut(hold).allocation);
    }
    grant
}

/// All devices of the wanted grants as one hold.
fn whole(wanted: &[Arc<Grant>]) -> Option<ClaimHold> {
    let mut holds = wanted.iter().filter_map(|grant| grant.claim.as_deref());
    let mut whole = holds.next()?.clone();
    whole.devices.extend(holds.flat_map(|hold| hold.devices.iter().cloned()));
    Some(whole)
}

/// Why a grant of a claim cannot be recorded now.
fn refusal(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    uncommitted: &[&Entry],
    wanted: &Grant,
) -> Option<Refusal> {
    let grants = uncommitted
        .iter()
        .filter_map(|entry| if let Entry::Grant(grant) = entry { Some(&**grant) } else { None });
    held_by_another(ledger, grants, wanted).or_else(|| {
        let (device, hook) = ledger.pending_hook(hooks, uncommitted.iter().copied(), wanted)?;
        Some(Refusal::NotReady {
            resource: wanted.resource.clone(),
            id: device.clone(),
            blocked: Box::new(hook.start_blocked()),
        })
    })
}

/// The part of a wanted grant whose devices no live grant of the same allocation has. After a torn
/// write, or a reload between two Prepares, that may be a part of it.
fn without(wanted: &Arc<Grant>, same: &[&Arc<Grant>]) -> Option<Arc<Grant>> {
    let hold = wanted.claim.as_ref()?;
    let is_held = |device: &_| {
        same.iter().filter_map(|grant| grant.claim.as_ref()).any(|hold| hold.has(device))
    };
    if !hold.devices.iter().any(|device| is_held(&device.allocated)) {
        return Some(Arc::clone(wanted));
    }
    let mut hold = ClaimHold::clone(hold);
    hold.devices.retain(|device| !is_held(&device.allocated));
    let mut rest = Grant::clone(wanted);
    rest.devices.retain(|device| hold.devices.iter().any(|claimed| claimed.id == device.id));
    let has_rest = !hold.devices.is_empty();
    rest.claim = Some(Arc::new(hold));
    has_rest.then(|| Arc::new(rest))
}

/// The state of a live grant with the pods of another Prepare; `None` if that changes nothing. The
/// claim is in use again, so a former Unprepare is void.
fn joined(
    grant: &Grant,
    coming: &[&PodRef],
    cgroup: &impl Fn(&str) -> CgroupState,
) -> Option<GrantState> {
    let GrantState::Prepared { pods: known, prepared_at, unprepared_at } = &grant.state else {
        return None;
    };
    let mut pods = known.clone();
    for pod in coming {
        match pods.iter_mut().find(|known| known.uid == pod.uid) {
            Some(known) => {
                known.namespace = known.namespace.take().or_else(|| pod.namespace.clone());
                known.name = known.name.take().or_else(|| pod.name.clone());
            }
            None => pods.push(PodRef::clone(pod)),
        }
    }
    limit(&mut pods, cgroup);
    let unprepared_after = unprepared_at.filter(|_| !Safeguard::ClaimInUseAgain.is_on());
    let is_changed = pods != *known || *unprepared_at != unprepared_after;
    is_changed.then_some(GrantState::Prepared {
        pods,
        prepared_at: *prepared_at,
        unprepared_at: unprepared_after,
    })
}

/// The entries of an Unprepare. None if no live grant is of this claim, or if nothing changes.
/// `listed` are the UIDs of the claim's pods in the kubelet's record, as far as it can be read.
pub fn release_claim(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    uncommitted: &[&Entry],
    uid: &str,
    listed: &BTreeSet<String>,
    cgroup: &impl Fn(&str) -> CgroupState,
    now: Timestamp,
) -> Vec<Entry> {
    let grants: Vec<&Arc<Grant>> = ledger.of_claim(uid).collect();
    let listed = &listed.iter().map(|uid| (uid.clone(), nameless(uid))).collect();
    // A torn write may have left different pods in the grants.
    let runs = |pod: &PodRef| !cgroup(&pod.uid).is_dead();
    let is_over = grants
        .iter()
        .all(|grant| has_ended(grant, cgroup) && !lacking(grant, listed).iter().any(runs));
    if is_over || !Safeguard::ClaimInUse.is_on() {
        return ends(ledger, hooks, uncommitted, &grants, UNPREPARED, now);
    }
    let noted = |grant: &&Arc<Grant>| {
        let GrantState::Prepared { pods, prepared_at, unprepared_at } = &grant.state else {
            return None;
        };
        let (mut pods, prepared_at) = (pods.clone(), *prepared_at);
        pods.extend(lacking(grant, listed));
        let unprepared_at = unprepared_at.or(Some(now));
        let state = GrantState::Prepared { pods, prepared_at, unprepared_at };
        (state != grant.state).then_some(())?;
        Some(Entry::Moved { alloc_id: grant.alloc_id.clone(), state })
    };
    grants.iter().filter_map(noted).collect()
}

/// The releases of grants, with their pending hooks first.
pub(super) fn ends(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    uncommitted: &[&Entry],
    grants: &[&Arc<Grant>],
    proof: &str,
    now: Timestamp,
) -> Vec<Entry> {
    let released = |grant: &&Arc<Grant>| Entry::Moved {
        alloc_id: grant.alloc_id.clone(),
        state: released(grant, proof, now),
    };
    let moves: Vec<Entry> = grants.iter().map(released).collect();
    let mut entries = owing(ledger, hooks, &moves, uncommitted.iter().copied());
    entries.extend(moves);
    entries
}

#[cfg(test)]
mod tests;
