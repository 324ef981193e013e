//! Keeps the kubelet's pods unlisted until the kubelet has recorded an answer to Allocate.
//!
//! Before the kubelet answers List, it computes which devices are taken, from its records
//! (`UpdateAllocatedDevices`). An answer that it has not recorded yet is missing there, and the
//! kubelet gives the device to the next pod too. A busy kubelet records an answer tens of
//! milliseconds after it was sent. Its checkpoint shows that it has: the grant is bound then.

use crate::domain::{AllocId, Grant, GrantState};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedRwLockReadGuard, watch};

/// The kubelet has recorded an answer by then, also where its checkpoint does not show it, or the
/// answer was lost.
pub const RECORDED_WITHIN: Duration = Duration::from_secs(10);

/// Keeps `gate` locked for reading until the grants with these ids are bound.
pub(crate) fn hold_until_recorded(
    gate: OwnedRwLockReadGuard<()>,
    ids: BTreeSet<AllocId>,
    grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
) {
    tokio::spawn(hold(gate, ids, grants, RECORDED_WITHIN));
}

async fn hold(
    gate: OwnedRwLockReadGuard<()>,
    mut ids: BTreeSet<AllocId>,
    mut grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    within: Duration,
) {
    // A grant is published after its answer, so one that is missing was not published yet.
    let are_recorded = grants.wait_for(|grants| {
        let recorded = grants.iter().filter(|grant| grant.state != GrantState::Granted);
        recorded.for_each(|grant| _ = ids.remove(&grant.alloc_id));
        ids.is_empty()
    });
    drop(tokio::time::timeout(within, are_recorded).await);
    drop(gate);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ContainerEdits, PodRef, Timestamp};
    use tokio::sync::RwLock;

    fn snapshot(grants: &[(&str, bool)]) -> Arc<Vec<Arc<Grant>>> {
        let pod = PodRef { uid: "u1".into(), namespace: None, name: None };
        let bound =
            GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp::default() };
        let grant = |(id, is_bound): &(&str, bool)| Grant {
            alloc_id: AllocId::new(id),
            resource: "example.com/gpu".parse().unwrap(),
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            granted_at: Timestamp::default(),
            version: String::new(),
            state: if *is_bound { bound.clone() } else { GrantState::Granted },
        };
        Arc::new(grants.iter().map(grant).map(Arc::new).collect())
    }

    #[actix::test]
    async fn pods_stay_unlisted_until_each_answer_is_recorded_or_the_time_is_over() {
        let gate = Arc::new(RwLock::new(()));
        let hour = Duration::from_secs(3600);
        for within in [hour, Duration::from_millis(100)] {
            let grants = watch::Sender::new(snapshot(&[("old", true)]));
            let ids = ["a", "b"].map(AllocId::new).into();
            let guard = Arc::clone(&gate).read_owned().await;
            let held = tokio::spawn(hold(guard, ids, grants.subscribe(), within));
            for now in [
                &[("old", true)][..],
                &[("a", false), ("b", false)],
                &[("a", true), ("b", false)],
                // The pod of `a` has ended meanwhile.
                &[("b", false)],
            ] {
                grants.send_replace(snapshot(now));
                tokio::task::yield_now().await;
                assert!(gate.try_write().is_err(), "{now:?}");
            }
            if within == hour {
                grants.send_replace(snapshot(&[("b", true)]));
            }
            held.await.unwrap();
            assert!(gate.try_write().is_ok(), "{within:?}");
        }
    }
}
