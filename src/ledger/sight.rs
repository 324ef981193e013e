//! What can be seen while an Allocate waits. Only a held id makes it look.

use super::core::{Doubt, Ledger, Proof, Sight, Watchlist, doubt};
use super::observe::Looker;
use super::report;
use crate::domain::{AllocId, Checkpoint, Grant, GrantState, Refusal, Refuse};
use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::sync::Arc;

/// So many cgroups below a pod's own are populated when a container runs: one of them may be the sandbox's. Where a runtime
/// gives that none, a pod of one container counts only if the kubelet lists it.
const RUNNING_BELOW: usize = 2;

/// Whether a living container of another pod has one of the devices of an exclusive grant (I2). Without proof it is only
/// told, and with it too where the operator wants it so.
pub(super) fn refusal(
    ledger: &Ledger,
    watchlist: &Watchlist,
    grant: &Grant,
    looker: &Looker,
    settled: bool,
    listed: &BTreeSet<AllocId>,
    refuse: Refuse,
) -> Option<Refusal> {
    let doubt = doubt(ledger, watchlist, grant, &Now { looker, settled, listed, checkpoint: OnceCell::new() })?;
    report::doubted(grant, &doubt, refuse);
    let Doubt { id, pod, container, proof } = doubt;
    let resource = grant.resource.clone();
    match proof {
        _ if refuse != Refuse::Proven => None,
        Proof::None => None,
        Proof::Unreadable(why) => Some(Refusal::Unreadable { resource, id, why }),
        Proof::Complete => Some(Refusal::InUse { resource, id, pod: pod.to_string(), container }),
    }
}

/// Those that hold a device of a grant without a container that is seen to run: of them the kubelet is asked.
pub(super) fn unseen(ledger: &Ledger, grant: &Grant, looker: &Looker) -> Vec<Arc<Grant>> {
    let holders = grant.devices.iter().flat_map(|device| ledger.holders(&grant.resource, &device.id));
    let is_unseen = |holder: &&Arc<Grant>| {
        let (GrantState::Bound { pod, .. } | GrantState::Suspect { pod, .. }) = &holder.state else { return false };
        let is_seen = looker.populated_below(&pod.uid).is_ok_and(|running| running >= RUNNING_BELOW);
        pod.name.is_some() && pod.namespace.is_some() && !is_seen
    };
    holders.filter(is_unseen).cloned().collect()
}

struct Now<'a> {
    looker: &'a Looker,
    settled: bool,
    /// Grants whose holders the kubelet lists.
    listed: &'a BTreeSet<AllocId>,
    checkpoint: OnceCell<Option<Checkpoint>>,
}

impl Sight for Now<'_> {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> Result<bool, String> {
        let running = self.looker.populated_below(uid);
        running.map(|running| running >= RUNNING_BELOW).map_err(|error| format!("the cgroup of pod {uid} cannot be read: {error}"))
    }

    fn is_listed(&self, alloc_id: &AllocId) -> bool {
        self.listed.contains(alloc_id)
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.get_or_init(|| self.looker.checkpoint()).as_ref()
    }
}
