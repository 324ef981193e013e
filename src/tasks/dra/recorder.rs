//! Claims in the ledger.

use super::records::Records;
use crate::domain::{
    AllocId, ClaimHold, ClaimRef, ContainerEdits, DraName, Grant, GrantState, KubeletGeneration,
    Refusal,
};
use crate::host;
use crate::messages::{Mailbox, RecordClaim, RecordError, ReleaseClaim};
use crate::serving::claims::{
    ClaimLedger, DecidedClaim, DecidedHold, HeldByNumber, NotRecorded, RecordedClaim,
};
use crate::slices::holders::{Lost, still_lost};
use crate::slices::published::Published;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long the ledger may take to record or release a claim. The kubelet waits for 45 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Records and releases claims by messages to the ledger.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    pub(crate) record: Mailbox<RecordClaim>,
    pub(crate) release: Mailbox<ReleaseClaim>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) boot_id: String,
    pub(crate) kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The kubelet's record, which has the claim until it is unprepared.
    pub(crate) records: Records,
    /// The devices of claims that containers have, each with the grant of the container.
    pub(crate) lost: watch::Sender<Arc<Lost>>,
    /// What the API server has, and whether it drops taints.
    pub(crate) published: watch::Receiver<Option<Arc<Published>>>,
}

#[tonic::async_trait]
impl ClaimLedger for Recorder {
    fn recorded(&self, claim: &ClaimRef) -> Option<RecordedClaim> {
        let grants = self.grants.borrow();
        let mut is_of_boot = true;
        let mut known =
            DecidedClaim { claim: claim.clone(), reserved_for: Vec::new(), holds: Vec::new() };
        for grant in grants.iter().filter(|grant| grant.is_live()) {
            let Some(hold) = grant.claim.as_deref().filter(|hold| hold.claim.uid == claim.uid)
            else {
                continue;
            };
            is_of_boot &= !grant.is_of_former_boot(&self.boot_id);
            known.reserved_for = grant.pods().cloned().collect();
            known.holds.push(DecidedHold {
                resource: grant.resource.clone(),
                devices: grant.devices.clone(),
                hold: hold.clone(),
            });
        }
        known.holds.sort_by(|a, b| a.resource.cmp(&b.resource));
        let is_known = !known.holds.is_empty();
        is_known.then_some(RecordedClaim { claim: known, is_of_boot })
    }

    fn grants(&self) -> Arc<Vec<Arc<Grant>>> {
        Arc::clone(&self.grants.borrow())
    }

    async fn record(&self, decided: DecidedClaim) -> Result<Vec<ClaimHold>, NotRecorded> {
        let message = RecordClaim { grants: self.grants_of(decided) };
        match self.record.call(message, ANSWER_WITHIN).await {
            Ok(Ok(grants)) => {
                let holds = grants.iter().filter_map(|grant| grant.claim.as_deref().cloned());
                Ok(holds.collect())
            }
            Ok(Err(RecordError::Refused(refusal))) => Err(blocked(refusal)),
            Ok(Err(error @ (RecordError::Store(_) | RecordError::NotOneClaim))) => {
                Err(NotRecorded::Failed(error.to_string()))
            }
            Err(error) => Err(NotRecorded::Failed(error.to_string())),
        }
    }

    async fn release(&self, claim: &ClaimRef) -> Result<(), String> {
        let message =
            ReleaseClaim { claim: claim.clone(), pods: self.records.pods_of(&claim.uid).await };
        match self.release.call(message, ANSWER_WITHIN).await {
            Ok(released) => released.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn evict(&self, lost: &BTreeSet<DraName>, container: &AllocId) -> bool {
        let grants = self.grants.borrow().clone();
        self.lost.send_if_modified(|known| {
            let mut now = still_lost(known, &grants);
            now.extend(lost.iter().map(|name| (name.clone(), container.clone())));
            let is_other = **known != now;
            *known = Arc::new(now);
            is_other
        });
        self.published.borrow().as_ref().is_none_or(|published| !published.drops_taints)
    }
}

/// A refusal that may end.
fn blocked(refusal: Refusal) -> NotRecorded {
    let why = refusal.to_string();
    match refusal {
        Refusal::Held { resource, id, container: Some(container), .. } => {
            NotRecorded::HeldByNumber(HeldByNumber { resource, id, container, why })
        }
        _ => NotRecorded::Blocked(why),
    }
}

impl Recorder {
    /// One grant for each resource.
    fn grants_of(&self, decided: DecidedClaim) -> Vec<Arc<Grant>> {
        let (now, kubelet) = (host::now().wall, *self.kubelet.borrow());
        let DecidedClaim { reserved_for, holds, .. } = decided;
        let grant = |DecidedHold { resource, devices, hold }: DecidedHold| {
            Arc::new(Grant {
                alloc_id: AllocId::new(uuid::Uuid::now_v7().to_string()),
                resource,
                devices,
                edits: ContainerEdits::default(),
                claim: Some(Arc::new(hold)),
                boot_id: self.boot_id.clone(),
                kubelet,
                granted_at: now,
                version: env!("CARGO_PKG_VERSION").into(),
                state: GrantState::Prepared {
                    pods: reserved_for.clone(),
                    prepared_at: now,
                    unprepared_at: None,
                },
            })
        };
        holds.into_iter().map(grant).collect()
    }
}
