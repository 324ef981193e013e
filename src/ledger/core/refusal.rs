//! When a grant is refused: a living container of another pod provably has the device (I2).
//!
//! The kubelet decides which container gets which id, and gives an id again on purpose: an init
//! container passes its devices to the next container of its pod. Allocate does not name its
//! container. But the kubelet admits all containers of a pod before any of them runs. So a pod does
//! not request an id that it holds *while it runs*, as long as the kubelet remembers its
//! assignments. It may forget them: it drops a reservation if a client lists pods at the wrong
//! moment, and it drops a force-deleted pod while its containers keep running. Then an answer would
//! put two pods on one device. A refusal makes the kubelet count again.
//!
//! A refusal needs all of this proof:
//!
//! - The kubelet has settled. Rules out: a kubelet that does not know all its pods yet.
//! - The holder's pod is known, and a container of it runs, or the kubelet itself still lists the
//!   holder's container with the id (`Get`; init containers are not listed). Rules out: the next
//!   container of a pod that is being admitted.
//! - This kubelet lists it so, gave the id itself, or has or had the grant in its checkpoint, or
//!   does not list the pod. Rules out: a kubelet that lost its checkpoint, and asks again for
//!   containers of a pod that it runs.
//! - The kubelet has not given the holder's container other devices since. Rules out: a static pod
//!   that was removed and came back with its UID, and has other devices now.
//!
//! With less proof the grant is made, and the doubt is logged: [`Doubt`].

use super::{Ledger, Watchlist};
use crate::domain::{
    AllocId, Checkpoint, DeviceId, Grant, GrantState, GrantedDevice, PodRef, Refusal, Safeguard,
    overlap,
};

/// The number of latest grants of a device that are checked. An unreleased device collects more
/// grants, but none of a running pod: the next grant would have found it, and would have been
/// refused.
pub const HOLDERS_MAX: usize = 256;

/// The evidence at the moment of an Allocate.
pub trait Sight {
    /// Whether the kubelet has settled.
    fn kubelet_settled(&self) -> bool;
    /// Whether any container of a pod runs. Its sandbox alone does not count: it keeps running
    /// briefly after the pod is done, when the kubelet has rightly given its devices to another
    /// pod.
    ///
    /// # Errors
    /// The reason why that cannot be read.
    fn has_running_container(&self, uid: &str) -> Result<bool, String>;
    /// Whether the kubelet lists the container that holds this grant with its devices.
    fn is_listed(&self, alloc_id: &AllocId) -> bool;
    /// The kubelet's checkpoint, if it can be read.
    fn checkpoint(&self) -> Option<&Checkpoint>;
}

/// An id that another container seems to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Doubt {
    /// The id.
    pub id: DeviceId,
    /// The pod that has it.
    pub pod: PodRef,
    /// Its container.
    pub container: String,
    /// Whether that is proven: then the grant is refused.
    pub proof: Proof,
}

/// How complete the proof of a doubt is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// Not complete.
    None,
    /// Complete except that a container runs, which cannot be read for this reason. Granting the
    /// device would treat a failed read as an absence.
    Unreadable(String),
    /// Complete.
    Complete,
}

/// Whether a container has one of the ids of a requested grant; a proven doubt comes before any
/// other. Meant for devices that one container has at a time.
#[must_use]
pub fn doubt(
    ledger: &Ledger,
    watchlist: &Watchlist,
    wanted: &Grant,
    sight: &impl Sight,
) -> Option<Doubt> {
    let latest = |id| ledger.holders(&wanted.resource, id).rev().take(HOLDERS_MAX);
    let mut doubts = wanted
        .devices
        .iter()
        .flat_map(|device| latest(&device.id).map(|holder| (&device.id, holder)));
    let mut first = None;
    doubts
        .find_map(|(id, holder)| {
            let (GrantState::Bound { pod, container, .. }
            | GrantState::Suspect { pod, container, .. }) = &holder.state
            else {
                return None;
            };
            let is_listed = sight.is_listed(&holder.alloc_id);
            let proof = match sight.has_running_container(&pod.uid) {
                _ if is_listed => Proof::Complete,
                Ok(true) => Proof::Complete,
                Ok(false) => return None,
                Err(why) => Proof::Unreadable(why),
            };
            let gave_it = wanted.kubelet.is_some() && holder.kubelet == wanted.kubelet;
            let knew_it = wanted
                .kubelet
                .is_some_and(|kubelet| watchlist.was_known_to(kubelet, &holder.alloc_id));
            let is_unlisted = matches!(holder.state, GrantState::Suspect { .. });
            let remembers = is_listed
                || gave_it
                || knew_it
                || is_unlisted
                || is_checkpointed(sight, &holder.alloc_id);
            let may_be_proven =
                Safeguard::RefusalOnProof.is_on() && sight.kubelet_settled() && remembers;
            let proven = may_be_proven
                && sight
                    .checkpoint()
                    .and_then(|checkpoint| checkpoint.in_place_of(holder))
                    .is_none();
            let proof = if proven { proof } else { Proof::None };
            let doubt =
                Doubt { id: id.clone(), pod: pod.clone(), container: container.clone(), proof };
            if doubt.proof != Proof::None {
                return Some(doubt);
            }
            first.get_or_insert(doubt);
            None
        })
        .or(first)
}

/// Why a grant would give an object to a second holder that a live grant holds (I2). `pending`
/// grants wait for the commit.
///
/// - Between two containers: the object is held by another id. An id is a way to a kernel object,
///   and no kubelet passes such an object to the next container of a pod.
/// - Between a claim and another claim or a container: it is held by any id. A claim passes nothing
///   on, and is prepared for a pod whose UID is known.
///
/// Both need no further proof. [`Grant::is_beside`] has the exceptions.
#[must_use]
pub fn held_by_another<'a>(
    ledger: &'a Ledger,
    mut pending: impl Iterator<Item = &'a Grant>,
    wanted: &'a Grant,
) -> Option<Refusal> {
    let by_pending = pending.find_map(|other| {
        let others = other.objects();
        let has_id = |id: &DeviceId| {
            other.resource == wanted.resource && other.held_devices().any(|held| held.id == *id)
        };
        let is_other = |device: &&GrantedDevice| {
            !other.is_beside(wanted, &device.id)
                && (overlap(&device.objects, &others) || has_id(&device.id))
        };
        wanted.held_devices().find(is_other).map(|device| (device, other))
    });
    let (device, holder) = by_pending.or_else(|| ledger.other_holder(wanted))?;
    if holder.claim.is_some() || wanted.claim.is_some() {
        if !Safeguard::ClaimGate.is_on() {
            return None;
        }
        return Some(Refusal::held(&wanted.resource, &device.id, holder));
    }
    let holds = |held: &&GrantedDevice| overlap(&device.objects, &held.objects);
    let held = holder.devices.iter().find(holds).or(holder.devices.first())?;
    let theirs = holder.objects();
    let object =
        device.objects.iter().find(|object| overlap(std::slice::from_ref(object), &theirs))?;
    Some(Refusal::HeldAsOther {
        resource: wanted.resource.clone(),
        id: device.id.clone(),
        object: object.clone(),
        holder: holder.holder(),
        held: held.id.clone(),
        by: holder.resource.clone(),
    })
}

fn is_checkpointed(sight: &impl Sight, alloc_id: &AllocId) -> bool {
    sight.checkpoint().is_some_and(|checkpoint| checkpoint.answered(alloc_id).is_some())
}
