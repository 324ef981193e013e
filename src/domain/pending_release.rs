//! Why a grant is still held although its pod has ended, or may have ended: the proofs of its
//! release that are missing (I4).

use super::grant::{AllocId, Grant, GrantState};
use super::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What this node shows of the pod of a grant that is to be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PodSight {
    /// Its cgroup was removed.
    Gone,
    /// No process of it runs. Its cgroup exists, so the kubelet may start it again.
    Ended,
    /// The kubelet no longer lists it, or has unprepared its claim, and a process of it runs, as
    /// after a forced deletion.
    Running,
    /// No process of it has been seen since the last boot.
    NotStarted,
    /// The kubelet no longer lists it. Its cgroup was not read, or cannot be read.
    Unlisted,
}

impl PodSight {
    /// The state of its grant for people, such as `pod gone`.
    #[must_use]
    pub fn state(self) -> &'static str {
        match self {
            PodSight::Gone => "pod gone",
            PodSight::Ended => "pod ended",
            PodSight::Running => "pod deleted",
            PodSight::NotStarted => "pod not started",
            PodSight::Unlisted => "pod unlisted",
        }
    }

    /// The explanation of the state: one sentence without a full stop.
    #[must_use]
    pub fn in_words(self) -> &'static str {
        match self {
            PodSight::Gone => "the pod has ended, and the kubelet has removed its cgroup",
            PodSight::Ended => "no process of the pod runs, but its cgroup still exists",
            PodSight::Running => {
                "the kubelet has forgotten the pod, but a process of it still runs"
            }
            PodSight::NotStarted => "no process of the pod has been seen since the last boot",
            PodSight::Unlisted => "the kubelet no longer lists the pod",
        }
    }
}

/// A part of the proof of a release that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingProof {
    /// A kubelet that has run for a minute: before that its list may lack pods.
    KubeletSettled,
    /// Two lists of the kubelet's pod-resources API without the pod, 5 s apart.
    Lists,
    /// The end of the pod's processes.
    Processes,
    /// The removal of the pod's cgroup.
    Cgroup,
    /// A readable cgroup hierarchy of the kubelet.
    CgroupUnreadable,
    /// After a reboot: a checkpoint of the kubelet without the grant, or a process of the pod.
    Checkpoint,
    /// The kubelet's `NodeUnprepareResources` for the claim.
    Unprepare,
}

impl MissingProof {
    /// A few words, for a cell of a table.
    #[must_use]
    pub fn short(self) -> &'static str {
        match self {
            MissingProof::KubeletSettled => "kubelet up for 60 s",
            MissingProof::Lists => "2 kubelet lists without it",
            MissingProof::Processes => "end of its processes",
            MissingProof::Cgroup => "removal of its cgroup",
            MissingProof::CgroupUnreadable => "a readable cgroup",
            MissingProof::Checkpoint => "kubelet's checkpoint",
            MissingProof::Unprepare => "unprepare by the kubelet",
        }
    }

    /// What is missing, in words.
    #[must_use]
    pub fn in_words(self) -> &'static str {
        match self {
            MissingProof::KubeletSettled => {
                "a kubelet that has run for a minute; before that its list may lack pods"
            }
            MissingProof::Lists => "two lists of the kubelet without the pod, 5 s apart",
            MissingProof::Processes => "the end of all processes of the pod",
            MissingProof::Cgroup => "the removal of the pod's cgroup by the kubelet",
            MissingProof::CgroupUnreadable => {
                "the cgroup of the pod, which cannot be read; see `holdfast doctor`"
            }
            MissingProof::Checkpoint => {
                "a checkpoint of the kubelet without the pod, since the machine was rebooted"
            }
            MissingProof::Unprepare => "the kubelet's unprepare of the claim",
        }
    }
}

/// The release of one grant that waits for proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingRelease {
    /// What this node shows of the pod.
    pub pod: PodSight,
    /// Since when the kubelet has not listed the pod, or when it unprepared the claim; `null` if it
    /// still may list it.
    pub since: Option<Timestamp>,
    /// How many lists of the kubelet in succession lacked the pod, 5 s apart in all for two.
    #[serde(default)]
    pub lists: u32,
    /// The missing proofs. If there are none, the next check of the kubelet decides: it is made
    /// within 15 s.
    pub waits_for: Vec<MissingProof>,
}

/// The releases that wait for proof, by grant.
pub type PendingReleases = BTreeMap<AllocId, PendingRelease>;

impl PendingRelease {
    /// What the state of a grant shows alone, without a look at the pod.
    #[must_use]
    pub fn of_state(grant: &Grant) -> Option<PendingRelease> {
        let (pod, since, waits_for) = match grant.state {
            GrantState::Suspect { suspect_at, .. } => (PodSight::Unlisted, suspect_at, Vec::new()),
            GrantState::Prepared { unprepared_at: Some(at), .. } => {
                (PodSight::Running, at, vec![MissingProof::Processes])
            }
            _ => return None,
        };
        Some(PendingRelease { pod, since: Some(since), lists: 0, waits_for })
    }

    /// The release of a grant, from a look at the pods or else from its state.
    #[must_use]
    pub fn of(grant: &Grant, pending: &PendingReleases) -> Option<PendingRelease> {
        pending.get(&grant.alloc_id).cloned().or_else(|| PendingRelease::of_state(grant))
    }

    /// The missing proofs in a few words, with the time since when the pod is not listed.
    #[must_use]
    pub fn short(&self) -> String {
        let waits: Vec<_> = self.waits_for.iter().map(|proof| proof.short()).collect();
        let since = self.since.map(|since| format!("since {}", since.to_seconds()));
        match (waits.is_empty(), self.pod) {
            (true, PodSight::Unlisted) => since.unwrap_or_default(),
            (true, _) => [Some("next check".to_owned()), since]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(", "),
            (false, _) => {
                let since = since.map(|since| format!(", {since}")).unwrap_or_default();
                waits.join(" + ") + &since
            }
        }
    }
}

impl Grant {
    /// The state for people: the state of the grant, or that of its pod if the release is pending.
    #[must_use]
    pub fn state_for_people(&self, pending: Option<&PendingRelease>) -> &'static str {
        match (&self.state, pending) {
            (GrantState::Prepared { unprepared_at: Some(_), .. }, _) => "unprepared",
            (_, Some(pending)) => pending.pod.state(),
            _ => self.state_name(),
        }
    }
}
