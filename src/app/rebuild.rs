//! Completes a damaged ledger from the kubelet's checkpoint.

use crate::domain::{AllocId, HookState, Timestamp, without_output};
use crate::hardware;
use crate::host::HostRoot;
use crate::kubelet::checkpoint;
use crate::ledger::core::rebuild;
use crate::store::{Recovered, Store, StoreError};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

/// Completes a recovered ledger. Adds grants that only the kubelet's checkpoint has and objects
/// that earlier versions did not record. Removes output of commands that earlier versions recorded.
pub(super) fn complete(
    store: &mut Store,
    recovered: &mut Recovered,
    device_plugins: &Path,
    host_root: &HostRoot,
) {
    from_kubelet(store, recovered, device_plugins);
    let behind = |node: &str| hardware::objects_of_node(host_root, node);
    recovered.grants = std::mem::take(&mut recovered.grants)
        .into_iter()
        .map(|grant| grant.resolve(behind))
        .collect();
    forget_outputs(recovered);
}

/// Adds the grants of the kubelet's checkpoint to a ledger that may lack grants. Grants that
/// neither of them has are lost; the report counts them.
fn from_kubelet(store: &mut Store, recovered: &mut Recovered, device_plugins: &Path) {
    if !recovered.report.may_lack_grants() {
        return;
    }
    match restore(store, recovered, device_plugins) {
        Ok(0) => {}
        Ok(grants) => tracing::warn!(
            grants,
            "the ledger lacked grants that the kubelet's checkpoint has; restored them"
        ),
        Err(error) => {
            tracing::error!(%error, "cannot restore lost grants from the kubelet's checkpoint")
        }
    }
}

/// Removes the output of commands that an earlier version recorded. The page and the log keep
/// showing how hooks and checks ended.
fn forget_outputs(recovered: &mut Recovered) {
    for hook in recovered.owed.values_mut().flat_map(|devices| devices.values_mut()) {
        if let HookState::Failed { why, .. } = &mut hook.state {
            why.truncate(without_output(why).len());
        }
    }
    for incident in recovered.verdicts.values_mut().flat_map(|verdict| &mut verdict.incidents) {
        incident.detail.truncate(without_output(&incident.detail).len());
    }
}

fn restore(
    store: &mut Store,
    recovered: &mut Recovered,
    device_plugins: &Path,
) -> Result<usize, StoreError> {
    let stored = match checkpoint::read_kept(device_plugins) {
        Ok(stored) => stored,
        Err(error) => {
            // A new node has none. With a damaged ledger it matters.
            tracing::info!(%error, "no grant can be restored from the kubelet's checkpoint");
            return Ok(0);
        }
    };
    let ids: BTreeSet<AllocId> = stored.iter().map(|stored| stored.alloc_id.clone()).collect();
    let grants = rebuild(
        stored,
        &store.known_among(&ids)?,
        &recovered.names,
        Timestamp::from_system(SystemTime::now()),
    );
    store.adopt(&grants)?;
    let adopted = grants.len();
    recovered.grants.extend(grants);
    recovered.report.from_kubelet += adopted;
    Ok(adopted)
}
