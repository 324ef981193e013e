//! Why a claim is not released for an operator.

use super::claim::ClaimRef;
use super::pod::PodRef;

/// Why a claim is not released for an operator. Each text has what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReleased {
    /// No live grant is of it.
    #[error("no device is held by a claim `{0}`; `holdfast who` lists the claims")]
    Unknown(String),
    /// Several claims had this name one after the other.
    #[error(
        "several claims with the name `{claim}` hold devices; use one of their UIDs: {}",
        uids.join(", ")
    )]
    Several {
        /// Namespace and name.
        claim: String,
        /// The UIDs.
        uids: Vec<String>,
    },
    /// The kubelet knows it.
    #[error(
        "the kubelet still has claim {0} in `dra_manager_state`, and unprepares it after the end of \
         its pods; delete the pods"
    )]
    Kept(ClaimRef),
    /// The kubelet may know it, and pods of it that the ledger does not know.
    #[error(
        "`dra_manager_state` of the kubelet cannot be read, and may have more pods of claim {0}; make \
         sure that no container has its devices, then add `--force`"
    )]
    RecordUnread(ClaimRef),
    /// A pod of it runs.
    #[error("a process of pod {pod} runs, which uses claim {claim}; end the pod first")]
    Running {
        /// The claim.
        claim: ClaimRef,
        /// The pod.
        pod: Box<PodRef>,
    },
    /// A pod of it may start its containers again.
    #[error(
        "the cgroup of pod {pod} exists, which uses claim {claim}; delete the pod, and wait until \
         the kubelet has removed it"
    )]
    Remains {
        /// The claim.
        claim: ClaimRef,
        /// The pod.
        pod: Box<PodRef>,
    },
    /// It is not known whether a pod of it runs.
    #[error("the cgroup of pod {pod} cannot be read, which uses claim {claim}; try again")]
    Unreadable {
        /// The claim.
        claim: ClaimRef,
        /// The pod.
        pod: Box<PodRef>,
    },
    /// A claim that was restored without its pods.
    #[error(
        "the pods of claim {0} are not known; make sure that no container has its devices, then \
         add `--force`"
    )]
    PodsUnknown(ClaimRef),
    /// The release could not be made durable.
    #[error("the release cannot be recorded: {0}")]
    NotRecorded(String),
}
