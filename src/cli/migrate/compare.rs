//! Compares what the kubelet has of other plugins with what Holdfast would offer. Pure.

use super::answers::Answer;
use super::fate::{Fate, Host};
use crate::domain::{ContainerEdits, DeviceId, PodRef, ResourceName};
use std::collections::{BTreeMap, BTreeSet};

/// What the kubelet has of one resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Theirs {
    /// Its ids: healthy ones and held ones.
    pub(super) listed: BTreeSet<DeviceId>,
    /// The containers with an answer of another plugin.
    pub(super) holders: Vec<Holder>,
    /// How many containers have an answer of Holdfast already.
    pub(super) of_ours: usize,
}

/// A container with an answer of another plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Holder {
    /// Its pod.
    pub(super) pod: PodRef,
    /// Its name.
    pub(super) container: String,
    /// Its ids of the resource.
    pub(super) ids: BTreeSet<DeviceId>,
    /// The stored answer.
    pub(super) edits: ContainerEdits,
    /// Whether the pod has no cgroup. The kubelet keeps the entries of a removed pod until its next
    /// write.
    pub(super) has_ended: bool,
}

/// One resource that the kubelet has of another plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resource {
    /// Its name.
    pub(super) name: ResourceName,
    /// Whether Holdfast would offer a resource of this name.
    pub(super) is_offered: bool,
    /// Whether the user keeps its plugin.
    pub(super) is_kept: bool,
    /// How many containers have an answer of Holdfast already.
    pub(super) of_ours: usize,
    /// How many ids the kubelet has.
    pub(super) listed: usize,
    /// How many of them stay.
    pub(super) same: usize,
    /// The free ids that do not stay.
    pub(super) free: Vec<(DeviceId, Fate)>,
    /// The containers that hold ids.
    pub(super) holders: Vec<(Holder, Vec<(DeviceId, Fate)>)>,
    /// How the answers to new containers differ from those that running containers have; `None` if
    /// no container shows the present answer, or if Holdfast has no id to answer for.
    pub(super) changes: Option<Vec<String>>,
}

/// The result of the comparison.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    /// The resources of other plugins.
    pub(super) resources: Vec<Resource>,
    /// The resources that appear with the switch, with the number of their ids.
    pub(super) appearing: BTreeMap<ResourceName, usize>,
}

/// Compares. `then` has Holdfast's answer of each resource for one device. `is_kept` selects the
/// resources whose plugin stays.
#[must_use]
pub(super) fn compare(
    theirs: &BTreeMap<ResourceName, Theirs>,
    host: &Host<'_>,
    then: &BTreeMap<ResourceName, Answer>,
    is_kept: impl Fn(&ResourceName) -> bool,
) -> Comparison {
    let resources = theirs.iter().map(|(name, theirs)| {
        let kept = is_kept(name);
        let fate = |id: &DeviceId, edits: Option<&ContainerEdits>| {
            if kept { Fate::Kept } else { host.fate(name, id, edits) }
        };
        let holders: Vec<(Holder, Vec<(DeviceId, Fate)>)> = theirs
            .holders
            .iter()
            .map(|holder| {
                let answer = (holder.ids.len() == 1).then_some(&holder.edits);
                let fates = holder.ids.iter().map(|id| (id.clone(), fate(id, answer)));
                (holder.clone(), fates.collect())
            })
            .collect();
        let held: BTreeSet<&DeviceId> =
            theirs.holders.iter().flat_map(|holder| &holder.ids).collect();
        let (same, free): (Vec<_>, Vec<_>) = theirs
            .listed
            .iter()
            .map(|id| (id.clone(), fate(id, None)))
            .partition(|(_, fate)| fate.needs_drain() == Some(false));
        let now = theirs.holders.iter().map(|holder| Answer::of(&holder.edits));
        let changes = now
            .reduce(Answer::or)
            .zip(then.get(name).filter(|_| !kept))
            .map(|(now, then)| now.changes(then));
        Resource {
            name: name.clone(),
            is_offered: host.plan.contains_key(name),
            is_kept: kept,
            of_ours: theirs.of_ours,
            listed: theirs.listed.len(),
            same: same.len(),
            free: free.into_iter().filter(|(id, _)| !held.contains(id)).collect(),
            holders,
            changes,
        }
    });
    let appearing = host
        .plan
        .iter()
        .filter(|(name, ids)| !ids.is_empty() && !theirs.contains_key(*name))
        .map(|(name, ids)| (name.clone(), ids.len()))
        .collect();
    Comparison { resources: resources.collect(), appearing }
}

/// The answer to the question of the verb.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No pod needs a drain.
    NoDrain,
    /// A pod needs a drain.
    Drain,
    /// It cannot be determined.
    #[default]
    Unknown,
}

impl Comparison {
    /// The verdict. `is_known` is whether every holder could be read. A pod that certainly needs a
    /// drain counts before what is unknown.
    #[must_use]
    pub(super) fn verdict(&self, is_known: bool) -> Verdict {
        let needs: Vec<Option<bool>> = self
            .resources
            .iter()
            .flat_map(|resource| &resource.holders)
            .filter(|(holder, _)| !holder.has_ended)
            .flat_map(|(_, ids)| ids.iter().map(|(_, fate)| fate.needs_drain()))
            .collect();
        if needs.contains(&Some(true)) {
            Verdict::Drain
        } else if needs.contains(&None) || !is_known {
            Verdict::Unknown
        } else {
            Verdict::NoDrain
        }
    }

    /// Whether an id was not found on a host that could not be read completely.
    #[must_use]
    pub(super) fn has_unread(&self) -> bool {
        let mut held = self.resources.iter().flat_map(|resource| &resource.holders);
        held.any(|(_, ids)| ids.iter().any(|(_, fate)| *fate == Fate::Unread))
    }

    /// The pods that need a drain.
    #[must_use]
    pub(super) fn to_drain(&self) -> BTreeSet<String> {
        self.resources
            .iter()
            .flat_map(|resource| &resource.holders)
            .filter(|(holder, ids)| {
                !holder.has_ended && ids.iter().any(|(_, fate)| fate.needs_drain() == Some(true))
            })
            .map(|(holder, _)| holder.pod.to_string())
            .collect()
    }
}
