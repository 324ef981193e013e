//! The evidence of one observation about one grant.

use super::Ledger;
use crate::domain::{
    CgroupState, Checkpoint, CheckpointEntry, DeviceId, Grant, ListedContainer, ListedPod,
    Observation, PodName, PodRef, PodReport, ResourceName,
};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The time between the first and the last observation that together prove an absence: listings
/// without a pod, or answers of the API server without a claim.
pub const ABSENCE_MIN: Duration = Duration::from_secs(5);

/// Whether the kubelet lists a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listing {
    /// The kubelet was not asked, did not answer, or started too recently for an absence to mean
    /// anything.
    Silent,
    /// It lists the pod, or a pod that may be this one.
    Present,
    /// Its listing does not contain the pod.
    Absent,
}

/// An observation with indexes for its look-ups.
pub(super) struct Evidence<'a> {
    observation: &'a Observation,
    ledger: &'a Ledger,
    checkpoint: Option<&'a Checkpoint>,
    /// The listed pods of a name: one, or two while one of them is being removed.
    listed: BTreeMap<Name<'a>, Vec<&'a ListedPod>>,
    /// The UIDs whose log folders have a name.
    namesakes: BTreeMap<Name<'a>, Vec<&'a str>>,
    orphan: OnceCell<bool>,
}

/// A pod's namespace and name.
type Name<'a> = (&'a str, &'a str);

impl<'a> Evidence<'a> {
    pub(super) fn new(ledger: &'a Ledger, observation: &'a Observation) -> Self {
        Evidence {
            observation,
            ledger,
            checkpoint: observation.checkpoint.as_deref(),
            listed: grouped(observation.pods.found().map(|pod| (name_of(pod), pod))),
            namesakes: grouped(
                observation.names.iter().map(|(uid, name)| (as_name(name), uid.as_str())),
            ),
            orphan: OnceCell::new(),
        }
    }

    /// The checkpoint's entry that holds the response for this grant.
    pub(super) fn checkpointed(&self, grant: &Grant) -> Option<&'a CheckpointEntry> {
        self.checkpoint?.answered(&grant.alloc_id)
    }

    /// Whether the kubelet has given the grant's container another grant since.
    pub(super) fn is_superseded(&self, grant: &Grant) -> bool {
        self.ledger.is_superseded(grant, self.checkpoint)
    }

    /// Whether there is a checkpoint, and it has no entry of this pod.
    pub(super) fn checkpoint_lacks(&self, uid: &str) -> bool {
        self.checkpoint.is_some() && !self.checkpoint_has(uid)
    }

    /// Whether there is a checkpoint, and it has no entry of this grant.
    pub(super) fn checkpoint_lacks_grant(&self, grant: &Grant) -> bool {
        self.checkpoint.is_some() && self.checkpointed(grant).is_none()
    }

    fn checkpoint_has(&self, uid: &str) -> bool {
        self.checkpoint.is_some_and(|checkpoint| !checkpoint.of_pod(uid).is_empty())
    }

    pub(super) fn cgroup(&self, uid: &str) -> CgroupState {
        self.observation.cgroups.get(uid).copied().unwrap_or_default()
    }

    /// The pod's names: from its log folder, or else from the one listed container that can only be
    /// this one.
    pub(super) fn names(&self, grant: &Grant, uid: &str, container: &str) -> Option<PodName> {
        if let Some(name) = self.observation.names.get(uid) {
            return Some(name.clone());
        }
        // Another pod's grant of the same ids could be the listed one.
        let rival = grant
            .devices
            .iter()
            .flat_map(|device| self.ledger.holders(&grant.resource, &device.id));
        if rival.into_iter().any(|other| {
            other.pod().is_none_or(|pod| pod.uid != uid) && other.alloc_id != grant.alloc_id
        }) {
            return None;
        }
        let ids = ids(grant);
        let same = |listed: &ListedContainer| {
            listed.name == container && listed.devices.get(&grant.resource) == Some(&ids)
        };
        // Only among all pods it can be the only one.
        let mut found = self.listed().filter(|pod| pod.containers.iter().any(same));
        match (found.next(), found.next()) {
            // The log folder of another UID with this name shows that the name is taken.
            (Some(pod), None) if !self.namesakes.contains_key(&name_of(pod)) => {
                Some(pod.full_name())
            }
            _ => None,
        }
    }

    /// Whether the kubelet lists the pod of a bound grant.
    pub(super) fn listing(&self, grant: &Grant, pod: &PodRef) -> Listing {
        let name = pod.names();
        if !self.observation.pods.covers(name) {
            return Listing::Silent;
        }
        let present = match name {
            Some(name) => self
                .listed
                .get(&name)
                .into_iter()
                .flatten()
                .any(|listed| self.is_ours(grant, &pod.uid, name, listed)),
            // The kubelet has forgotten it and none of its processes runs: a pod that is listed
            // with its ids got them later.
            _ if self.checkpoint_lacks(&pod.uid) && self.cgroup(&pod.uid).is_dead() => false,
            // Without a name: a pod that has one of our ids, or a pod without a known UID, may be
            // this one.
            _ => self.listed().any(|listed| {
                has_one_of(listed, &grant.resource, &ids(grant))
                    || !self.namesakes.contains_key(&name_of(listed))
            }),
        };
        match (present, self.observation.kubelet_settled) {
            (true, _) => Listing::Present,
            (false, true) => Listing::Absent,
            // After a start the list is empty until the first pods have come, and no signal marks
            // that point.
            (false, false) => Listing::Silent,
        }
    }

    /// Whether a settled kubelet's listing does not have the pod. Without a name it may be any
    /// listed one.
    pub(super) fn is_unlisted(&self, pod: &PodRef) -> bool {
        let Some(name) = pod.names() else { return false };
        // A running pod of another UID has the name now.
        let is_other = |listed: &Vec<&ListedPod>| {
            let mut namesakes = self.namesakes.get(&name).into_iter().flatten();
            let is_alive =
                |uid: &&&str| **uid != pod.uid && self.cgroup(uid) == CgroupState::Populated;
            listed.len() == 1
                && self.cgroup(&pod.uid).is_dead()
                && namesakes.any(|uid| is_alive(&uid))
        };
        self.observation.kubelet_settled
            && self.observation.pods.covers(Some(name))
            && self.listed.get(&name).is_none_or(is_other)
    }

    /// Whether a listed pod of our name is our pod: true unless it is proven to be another.
    fn is_ours(&self, grant: &Grant, uid: &str, name: Name<'_>, listed: &ListedPod) -> bool {
        if has_one_of(listed, &grant.resource, &ids(grant)) && self.checkpoint_has(uid) {
            return true;
        }
        // The next pod of a StatefulSet has the same name and another UID.
        let namesakes =
            self.namesakes.get(&name).into_iter().flatten().filter(|other| **other != uid);
        let replaced = namesakes.into_iter().any(|other| {
            let in_its_place = self.checkpoint_has(other) && self.checkpoint_lacks(uid);
            let alive_instead =
                self.cgroup(other) == CgroupState::Populated && self.cgroup(uid).is_dead();
            in_its_place || alive_instead
        });
        // Kubelets before 1.34 list pods that have ended, without devices; their checkpoint entries
        // are removed too.
        let ended = !has_one_of(listed, &grant.resource, &ids(grant)) && self.checkpoint_lacks(uid);
        !replaced && !ended
    }

    /// Whether evidence other than our alloc-id shows that a container may have the devices of a
    /// grant that is in no checkpoint: an entry whose response has no alloc-id, or a listed
    /// container that no other grant explains.
    pub(super) fn may_be_in_use(&self, grant: &Grant) -> bool {
        let ids = ids(grant);
        // A grant of another plugin may be known as such.
        let is_unmarked = |entry: &CheckpointEntry| {
            entry.alloc_id.is_none() && self.ledger.grant(&entry.grant_id()).is_none()
        };
        let has_unmarked = |checkpoint: &Checkpoint| {
            ids.iter().any(|id| checkpoint.having(&grant.resource, id).any(is_unmarked))
        };
        if self.checkpoint.is_some_and(has_unmarked) {
            return true;
        }
        let explained = |listed: &ListedPod| {
            let others = ids.iter().flat_map(|id| self.ledger.holders(&grant.resource, id));
            others.into_iter().filter_map(|other| other.pod()).any(|pod| {
                pod.namespace.as_deref() == Some(listed.namespace.as_str())
                    && pod.name.as_deref() == Some(listed.name.as_str())
            })
        };
        self.listed().any(|listed| has_one_of(listed, &grant.resource, &ids) && !explained(listed))
            || *self.orphan.get_or_init(|| self.has_unexplained_orphan())
    }

    /// Whether a pod runs that the kubelet has forgotten and that no grant is bound to. A forced
    /// deletion removes a pod's entries from the checkpoint at once, perhaps before they were read.
    /// Then this pod may be the holder of any grant.
    fn has_unexplained_orphan(&self) -> bool {
        let running = self
            .observation
            .cgroups
            .iter()
            .filter(|(_, state)| **state == CgroupState::Populated)
            .map(|(uid, _)| uid.as_str());
        let bound = self.ledger.pods();
        let is_listed = |uid: &str| {
            self.observation
                .names
                .get(uid)
                .is_some_and(|name| self.listed.contains_key(&as_name(name)))
        };
        running
            .into_iter()
            .any(|uid| !self.checkpoint_has(uid) && !is_listed(uid) && !bound.contains(uid))
    }

    /// All pods of the kubelet; none if it was not asked for all.
    fn listed(&self) -> impl Iterator<Item = &'a ListedPod> {
        let all = match &self.observation.pods {
            PodReport::All(pods) => pods.as_slice(),
            PodReport::Nothing | PodReport::Named(_) => &[],
        };
        all.iter()
    }
}

fn ids(grant: &Grant) -> BTreeSet<DeviceId> {
    grant.devices.iter().map(|device| device.id.clone()).collect()
}

fn name_of(listed: &ListedPod) -> Name<'_> {
    (&listed.namespace, &listed.name)
}

fn as_name(name: &PodName) -> Name<'_> {
    (&name.namespace, &name.name)
}

fn grouped<'a, T>(named: impl Iterator<Item = (Name<'a>, T)>) -> BTreeMap<Name<'a>, Vec<T>> {
    let mut groups: BTreeMap<Name<'a>, Vec<T>> = BTreeMap::new();
    for (name, item) in named {
        groups.entry(name).or_default().push(item);
    }
    groups
}

fn has_one_of(listed: &ListedPod, resource: &ResourceName, ids: &BTreeSet<DeviceId>) -> bool {
    listed
        .containers
        .iter()
        .filter_map(|container| container.devices.get(resource))
        .any(|devices| !devices.is_disjoint(ids))
}
