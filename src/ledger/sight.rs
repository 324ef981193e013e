//! What can be seen while an Allocate waits. Only a held id makes it look.

use super::core::{Doubt, Ledger, Sight, Watchlist, doubt};
use super::observe::Looker;
use super::report;
use crate::domain::{AllocId, Checkpoint, Grant, GrantState, Refusal, Refuse};
use std::collections::BTreeSet;
use std::sync::Arc;

/// So many cgroups below a pod's own are populated when a container runs: one of them may be the sandbox's. Where a runtime
/// gives that none, a pod of one container counts only if the kubelet lists it.
const RUNNING_BELOW: usize = 2;

/// What was seen of the kubelet for an Allocate of a held id.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Grants whose holders it lists.
    pub(super) listed: BTreeSet<AllocId>,
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
}

/// Whether a living container of another pod has one of the devices of an exclusive grant (I2). Without proof it is only
/// told, and with it too where the operator wants it so.
pub(super) fn refusal(
    ledger: &Ledger,
    watchlist: &Watchlist,
    grant: &Grant,
    looker: &Looker,
    settled: bool,
    seen: &Seen,
    refuse: Refuse,
) -> Option<Refusal> {
    let doubt = doubt(ledger, watchlist, grant, &Now { looker, settled, seen })?;
    report::doubted(grant, &doubt, refuse);
    let Doubt { id, pod, container, proven } = doubt;
    let resource = grant.resource.clone();
    (proven && refuse == Refuse::Proven).then(|| Refusal::InUse { resource, id, pod: pod.to_string(), container })
}

/// Those that hold a device of a grant.
pub(super) fn holders(ledger: &Ledger, grant: &Grant) -> Vec<Arc<Grant>> {
    grant.devices.iter().flat_map(|device| ledger.holders(&grant.resource, &device.id)).cloned().collect()
}

/// Those of them without a container that is seen to run: of them the kubelet is asked.
pub(super) fn unseen(mut holders: Vec<Arc<Grant>>, looker: &Looker) -> Vec<Arc<Grant>> {
    holders.retain(|holder| {
        let (GrantState::Bound { pod, .. } | GrantState::Suspect { pod, .. }) = &holder.state else { return false };
        pod.name.is_some() && pod.namespace.is_some() && looker.populated_below(&pod.uid) < RUNNING_BELOW
    });
    holders
}

struct Now<'a> {
    looker: &'a Looker,
    settled: bool,
    seen: &'a Seen,
}

impl Sight for Now<'_> {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> bool {
        self.looker.populated_below(uid) >= RUNNING_BELOW
    }

    fn is_listed(&self, alloc_id: &AllocId) -> bool {
        self.seen.listed.contains(alloc_id)
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.seen.checkpoint.as_deref()
    }
}
