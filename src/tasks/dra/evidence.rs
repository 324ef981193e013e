//! Asks the API server about claims that may have ended without an Unprepare. Nothing is asked
//! while the pods of all claims have cgroups. The kubelet's record comes from [`super::records`].
//!
//! The API server is asked for the claim. A service account gets 404 for a claim that was deleted.
//! To a kubelet the node authorizer answers 403 then, as it does for a claim that no pod of its
//! node uses, so 403 alone proves nothing. But a kubelet may list the pods of its node, and a claim
//! none of whose pods exists is no longer in use here.
//!
//! Where the kubelet's record cannot be seen, as in a DaemonSet, the answer alone shows pods that
//! were added to the claim after its Prepare (`status.reservedFor`).

use super::api_claims::of_this_driver;
use super::suspects::{Seen, Suspects};
use crate::cluster::{Client, ClusterError};
use crate::domain::{
    AllocatedClaim, CgroupState, ClaimEvidence, ClaimLook, ClaimRef, DraName, Grant,
    KubeletGeneration, PodRef,
};
use crate::host;
use crate::host::pods::PodCgroups;
use crate::messages::{Mailbox, Reconcile};
use crate::slices::names::NodeName;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Between two looks at the cgroups while there are claims: as often as the ledger looks.
const LOOK_EVERY: Duration = Duration::from_secs(15);

/// The task.
pub(crate) struct EvidenceTask {
    pub(crate) node: NodeName,
    /// Its own: a slow answer about an old claim must not delay a Prepare.
    pub(crate) client: Client,
    pub(crate) host_root: PathBuf,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// Its part about the API server.
    pub(crate) evidence: watch::Sender<Arc<ClaimEvidence>>,
    pub(crate) reconcile: Mailbox<Reconcile>,
}

/// A live claim: all its grants together.
#[derive(Debug, Clone)]
struct Claimed {
    claim: ClaimRef,
    devices: BTreeSet<DraName>,
    pods: BTreeSet<String>,
}

impl EvidenceTask {
    /// Collects, for ever.
    pub(crate) async fn run(mut self) {
        let (mut suspects, mut api) = (Suspects::default(), BTreeMap::new());
        let mut cgroups = PodCgroups::default();
        loop {
            let claims = claims(&self.grants.borrow_and_update());
            let seen = self.look(&claims, &mut cgroups).await;
            suspects.observe(&seen, *self.kubelet.borrow(), host::now().boot);
            api.retain(|uid: &String, _| suspects.has(uid));
            let due = suspects.due(host::now().boot).and_then(|claim| claims.get(&claim.uid));
            if let Some(claimed) = due {
                let at = host::now().boot;
                let answer = self.ask(claimed).await;
                let uid = &claimed.claim.uid;
                let is_gone = answer.as_ref().map(|(is_gone, _)| *is_gone);
                suspects.note_answer(uid, is_gone, host::now().boot);
                match answer {
                    Some((is_gone, pods)) => {
                        drop(api.insert(uid.clone(), ClaimLook { is_gone, at, pods }));
                    }
                    None => drop(api.remove(uid)),
                }
            }
            self.publish(&api);
            let due = suspects.wake_at().map(|at| at.saturating_sub(host::now().boot));
            let wait = host::until_tick(LOOK_EVERY).min(due.unwrap_or(LOOK_EVERY));
            let is_open = if claims.is_empty() {
                self.grants.changed().await.is_ok()
            } else {
                tokio::time::sleep(wait).await;
                self.grants.has_changed().is_ok()
            };
            if !is_open {
                return;
            }
        }
    }

    /// Looks at the cgroups of the claims' pods, on a thread that may block.
    async fn look(
        &self,
        claims: &BTreeMap<String, Claimed>,
        cgroups: &mut PodCgroups,
    ) -> Vec<Seen> {
        if claims.is_empty() {
            return Vec::new();
        }
        let claims: Vec<Claimed> = claims.values().cloned().collect();
        let (mut found, host_root) = (std::mem::take(cgroups), self.host_root.clone());
        let looking = tokio::task::spawn_blocking(move || {
            let mut pods = claims.iter().flat_map(|claimed| &claimed.pods);
            if !pods.all(|uid| found.state(uid) == CgroupState::Populated) {
                // The kubelet may have made another hierarchy.
                found = PodCgroups::find(&host_root, None);
            }
            let is_absent = |uid: &String| found.state(uid) == CgroupState::Absent;
            let seen = |Claimed { claim, pods, .. }: Claimed| Seen {
                is_removed: pods.iter().all(is_absent),
                claim,
            };
            let seen: Vec<Seen> = claims.into_iter().map(seen).collect();
            (found, seen)
        });
        let (found, seen) = looking.await.unwrap_or_default();
        *cgroups = found;
        seen
    }

    /// Whether nothing on this node is allocated to the claim any longer, and the pods that it is
    /// reserved for; `None` if that is not known.
    async fn ask(&self, Claimed { claim, devices, pods }: &Claimed) -> Option<(bool, Vec<PodRef>)> {
        let unknown = |error: ClusterError| {
            tracing::debug!(%claim, uid = claim.uid, %error, "cannot ask about a claim");
        };
        match self.client.claim(&claim.namespace, &claim.name).await {
            Ok(found) => {
                let found = found.map(|found| of_this_driver(found, false));
                let is_gone = is_gone(found.as_ref(), claim, devices, &self.node);
                let same = found.filter(|found| found.claim.uid == claim.uid);
                Some((is_gone, same.map(|found| found.reserved_for).unwrap_or_default()))
            }
            Err(error) if error.code() == Some(403) && !pods.is_empty() => {
                let bound = self.client.pods_of(self.node.as_str()).await.map_err(unknown).ok()?;
                Some((bound.is_disjoint(pods), Vec::new()))
            }
            Err(error) => {
                unknown(error);
                None
            }
        }
    }

    /// Publishes the answers, and has the ledger compare its claims with them.
    fn publish(&self, api: &BTreeMap<String, ClaimLook>) {
        let is_changed = self.evidence.send_if_modified(|known| {
            let is_changed = known.api != *api;
            if is_changed {
                Arc::make_mut(known).api = api.clone();
            }
            is_changed
        });
        if is_changed {
            self.reconcile.send(Reconcile);
        }
    }
}

/// The claims of the live grants, by UID.
fn claims(grants: &[Arc<Grant>]) -> BTreeMap<String, Claimed> {
    let mut claims: BTreeMap<String, Claimed> = BTreeMap::new();
    for grant in grants.iter().filter(|grant| grant.is_live()) {
        let Some(hold) = grant.claim.as_deref() else { continue };
        let claimed = claims.entry(hold.claim.uid.clone()).or_insert_with(|| Claimed {
            claim: hold.claim.clone(),
            devices: BTreeSet::new(),
            pods: BTreeSet::new(),
        });
        claimed.devices.extend(hold.devices.iter().map(|device| device.allocated.name.clone()));
        claimed.pods.extend(grant.pods().map(|pod| pod.uid.clone()));
    }
    claims
}

/// Whether the API server's answer means that nothing on this node is allocated to the claim.
fn is_gone(
    found: Option<&AllocatedClaim>,
    claim: &ClaimRef,
    held: &BTreeSet<DraName>,
    node: &NodeName,
) -> bool {
    let Some(found) = found.filter(|found| found.claim.uid == claim.uid) else { return true };
    let is_here = |name: &DraName| held.contains(name) || node.has_pool(&name.pool);
    !found.devices.iter().any(|device| is_here(&device.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Allocated;

    fn name(pool: &str, device: &str) -> DraName {
        DraName { pool: pool.into(), device: device.into() }
    }

    fn found(uid: &str, names: &[DraName]) -> AllocatedClaim {
        let device = |name: &DraName| Allocated {
            request: "gpu".into(),
            name: name.clone(),
            share_id: None,
            admin: false,
        };
        AllocatedClaim {
            claim: ClaimRef { uid: uid.into(), namespace: "ml".into(), name: "c".into() },
            is_allocated: !names.is_empty(),
            devices: names.iter().map(device).collect(),
            reserved_for: Vec::new(),
            configs: Vec::new(),
            is_by_number: false,
            pod_claim: None,
            is_deleted: false,
        }
    }

    #[test]
    fn a_claim_is_gone_if_it_does_not_exist_or_has_nothing_of_this_node() {
        let node = NodeName::new("n1").unwrap();
        let held = BTreeSet::from([name("n1/gpu", "a")]);
        let claim = found("u1", &[]).claim;
        let is_gone = |found: Option<AllocatedClaim>| is_gone(found.as_ref(), &claim, &held, &node);
        assert!(is_gone(None));
        assert!(is_gone(Some(found("u2", &[name("n1/gpu", "a")]))), "a later claim of this name");
        assert!(is_gone(Some(found("u1", &[]))), "deallocated");
        assert!(is_gone(Some(found("u1", &[name("n12/gpu", "a"), name("n1", "a")]))));
        assert!(!is_gone(Some(found("u1", &[name("n1/gpu", "a")]))));
        assert!(!is_gone(Some(found("u1", &[name("n1/net", "b")]))), "another device of this node");
        // A node with another name than before.
        let held = BTreeSet::from([name("old/gpu", "a")]);
        let still = found("u1", &[name("n2/gpu", "x"), name("old/gpu", "a")]);
        assert!(!super::is_gone(Some(&still), &claim, &held, &node));
    }
}
