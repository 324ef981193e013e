//! What can be seen while an Allocate waits. Only a held id makes it look.

use super::core::{Doubt, Ledger, Sight, Watchlist, doubt};
use super::observe::Looker;
use super::report;
use crate::domain::{Checkpoint, Grant, Refusal, Refuse};
use std::cell::OnceCell;

/// Whether a living container of another pod has one of the devices of an exclusive grant (I2). Without proof it is only
/// told, and with it too where the operator wants it so.
pub(super) fn refusal(
    ledger: &Ledger,
    watchlist: &Watchlist,
    grant: &Grant,
    looker: &Looker,
    settled: bool,
    refuse: Refuse,
) -> Option<Refusal> {
    let doubt = doubt(ledger, watchlist, grant, &Now { looker, settled, checkpoint: OnceCell::new() })?;
    report::doubted(grant, &doubt, refuse);
    let Doubt { id, pod, container, proven } = doubt;
    let pod = match (pod.namespace, pod.name) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        _ => pod.uid,
    };
    (proven && refuse == Refuse::Proven).then(|| Refusal::InUse { resource: grant.resource.clone(), id, pod, container })
}

struct Now<'a> {
    looker: &'a Looker,
    settled: bool,
    checkpoint: OnceCell<Option<Checkpoint>>,
}

impl Sight for Now<'_> {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> bool {
        // One of them may be the sandbox's. Where a runtime gives that none, a pod of one container is granted over, and told.
        self.looker.populated_below(uid) >= 2
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.get_or_init(|| self.looker.checkpoint()).as_ref()
    }
}
