//! Writes the status of claims (`[dra] claim_status`). [`Statuses`] decides each request; here it
//! is sent. The kubelet's calls neither wait for it nor fail by it.

use crate::cluster::{self, Client, ClusterError, ResourceClaim};
use crate::domain::{ClaimRef, DRA_DRIVER, DraName, Grant, Inventory, Timestamp};
use crate::hardware;
use crate::health::Judgement;
use crate::host::{self, HostRoot};
use crate::reporting::claims::{
    ClaimPatch, Content, EntryKey, Network, Networks, StoredEntry, TYPES, prepared, seen,
};
use crate::reporting::objects::Status;
use crate::reporting::statuses::{Request, Stored};
use crate::reporting::{Outcome, Statuses, Step};
use crate::tasks::reporting::{Part, outcome_of};
use crate::telemetry::metrics;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The snapshots are read once in this time: each Allocate publishes one.
const READ_EVERY: Duration = Duration::from_millis(500);

/// The task.
pub(crate) struct StatusesTask {
    /// With a connection of its own: requests on one connection wait for each other.
    pub(crate) client: Client,
    pub(crate) host_root: HostRoot,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) judgement: watch::Receiver<Judgement>,
    pub(crate) statuses: Statuses,
    /// Why the status cannot be written at present.
    pub(crate) problem: watch::Sender<Option<String>>,
}

impl StatusesTask {
    /// Writes, for ever.
    pub(crate) async fn run(mut self) {
        let mut part = Part::new("the status of claims", "claim");
        metrics::reporting_begins(part.kind);
        let mut networks = Networks::new();
        self.observe(&mut networks).await;
        loop {
            let (inventory, grants) = (self.inventory.has_changed(), self.grants.has_changed());
            if inventory.unwrap_or_default() || grants.unwrap_or_default() {
                self.observe(&mut networks).await;
            }
            let until = match self.statuses.next(host::now()) {
                Step::Write(Request::Read(claim)) => {
                    let outcome = self.read(&claim).await;
                    self.statuses.done(outcome, host::now());
                    continue;
                }
                Step::Write(Request::Write(claim, patch)) => {
                    let outcome = self.write(&claim, &patch, &mut part).await;
                    self.statuses.done(outcome, host::now());
                    part.show_in(&self.problem);
                    continue;
                }
                Step::Wait(until) => until,
            };
            // A write that is no longer needed cannot fail.
            if self.statuses.is_complete() && !part.is_lasting {
                part.ends();
            }
            part.show_in(&self.problem);
            if self.wait(until).await.is_err() {
                // The daemon ends.
                return;
            }
        }
    }

    /// Takes the newest snapshots. An interface is looked for at once: a network plugin may move it
    /// into the pod, where it is not seen.
    async fn observe(&mut self, networks: &mut Networks) {
        let inventory = self.inventory.borrow_and_update().clone();
        let grants = self.grants.borrow_and_update().clone();
        self.look(networks, &inventory, &grants).await;
        let verdicts = self.judgement.borrow().verdicts.clone();
        self.statuses.observe(seen(&inventory, &verdicts, &grants, networks), host::now());
    }

    /// Looks for the interfaces of the devices that claims have got, once.
    async fn look(&self, networks: &mut Networks, inventory: &Inventory, grants: &[Arc<Grant>]) {
        let (mut keys, mut new) = (BTreeSet::new(), Vec::new());
        for (grant, hold) in prepared(grants) {
            let offering = inventory.resources.get(&grant.resource);
            for device in &hold.devices {
                let key = (grant.alloc_id.clone(), EntryKey::from(device));
                let offered = offering.and_then(|offering| offering.devices.get(&device.id));
                if let Some(offered) = offered.filter(|_| !networks.contains_key(&key)) {
                    new.push((key.clone(), Arc::clone(&offered.device)));
                }
                keys.insert(key);
            }
        }
        networks.retain(|key, _| keys.contains(key));
        let without = |device: &crate::domain::Device| {
            device.pci.as_deref().is_none_or(|function| function.net.is_empty())
        };
        let (absent, new): (Vec<_>, Vec<_>) =
            new.into_iter().partition(|(_, device)| without(device));
        networks.extend(absent.into_iter().map(|(key, _)| (key, None)));
        if new.is_empty() {
            return;
        }
        let root = self.host_root.clone();
        let looking = tokio::task::spawn_blocking(move || {
            let found = new.into_iter().map(|(key, device)| {
                let found = hardware::interface(&root, &device);
                let network = found.map(|(interface_name, hardware_address)| Network {
                    interface_name,
                    hardware_address,
                });
                (key, network)
            });
            found.collect::<Vec<_>>()
        });
        networks.extend(looking.await.unwrap_or_default());
    }

    /// Waits for a change, or until this time of the boot clock. Ends early, if at all.
    async fn wait(&mut self, until: Option<Duration>) -> Result<(), watch::error::RecvError> {
        tokio::time::sleep(READ_EVERY).await;
        let due = async {
            match until {
                Some(until) => {
                    tokio::time::sleep(until.saturating_sub(host::now().boot)).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = self.inventory.changed() => {
                changed?;
                self.inventory.mark_changed();
            }
            changed = self.grants.changed() => {
                changed?;
                self.grants.mark_changed();
            }
            () = due => {}
        }
        Ok(())
    }

    async fn read(&self, claim: &ClaimRef) -> Outcome<Stored> {
        match self.client.claim(&claim.namespace, &claim.name).await {
            Ok(Some(found)) if found.metadata.uid == claim.uid => Outcome::Accepted(stored(&found)),
            Ok(_) => Outcome::Absent,
            Err(error) => {
                tracing::debug!(%claim, uid = claim.uid, %error, "cannot read a claim");
                outcome_of(&error)
            }
        }
    }

    async fn write(
        &self,
        claim: &ClaimRef,
        patch: &ClaimPatch,
        part: &mut Part,
    ) -> Outcome<Stored> {
        let answer = self.client.apply_claim_status(&claim.namespace, &claim.name, patch).await;
        let outcome = match &answer {
            Ok(_) => Outcome::Accepted(Stored::new()),
            Err(error) => outcome_of(error),
        };
        if is_ordinary_end(&answer) {
            // The claim was deleted or deallocated.
            metrics::reported(part.kind, "not_found");
            return outcome;
        }
        part.answered(&answer, matches!(outcome, Outcome::Refused));
        part.is_lasting = false;
        if let Ok(found) = answer
            && !patch.is_removal()
            && found.status.allocation.is_some()
            && stored(&found).is_empty()
        {
            part.is_lasting = true;
            part.problem = Some(
                "the API server drops the status of claims: its feature gate \
                 DRAResourceClaimDeviceStatus is off"
                    .into(),
            );
        }
        outcome
    }
}

/// Whether the claim does not exist, or is another one, or its devices were deallocated: each of
/// its pods has ended or will, and nothing is wrong.
fn is_ordinary_end(answer: &Result<ResourceClaim, ClusterError>) -> bool {
    let Err(error) = answer else { return false };
    let is_of_end = |field: &str| field == "metadata.uid" || field.starts_with("status.devices[");
    let is_end = error.code() == Some(422)
        && error.details().is_some_and(|details| {
            let mut causes = details.causes.iter();
            !details.causes.is_empty()
                && causes.all(|cause| {
                    let is_entry = cause.message.contains("must be an allocated device");
                    is_of_end(&cause.field) && (is_entry || cause.field == "metadata.uid")
                })
        });
    error.is_absence() || is_end
}

/// The entries of this driver in a claim.
fn stored(claim: &ResourceClaim) -> Stored {
    let entries = claim.status.devices.iter().filter(|entry| entry.driver == DRA_DRIVER);
    let entry = |entry: &cluster::DeviceStatus| {
        let name = DraName { pool: entry.pool.clone(), device: entry.device.clone() };
        let conditions = TYPES.map(|of| {
            let condition = entry.conditions.iter().find(|it| it.r#type == of)?;
            let time = condition.last_transition_time.clone().map(serde_json::Value::String)?;
            let content = Content {
                status: Status::of(&condition.status)?,
                reason: condition.reason.clone(),
                message: condition.message.clone(),
            };
            Some((content, serde_json::from_value::<Timestamp>(time).ok()?))
        });
        let network = entry.network_data.clone().map(|network| Network {
            interface_name: network.interface_name,
            hardware_address: network.hardware_address,
        });
        let key = EntryKey { name, share_id: entry.share_id.clone() };
        (key, StoredEntry { conditions, network })
    };
    entries.map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cause, Details};
    use serde_json::json;

    #[test]
    fn the_entries_of_this_driver_are_read_and_an_unknown_condition_is_written_again() {
        let condition = |of: &str, status: &str| {
            json!({ "type": of, "status": status, "reason": "R", "message": "m",
                "lastTransitionTime": "1970-01-01T00:00:07Z" })
        };
        let claim = serde_json::from_value(json!({ "status": { "devices": [
            { "driver": "other.example.com", "pool": "p", "device": "d", "conditions": null },
            { "driver": DRA_DRIVER, "pool": "n1/net", "device": "nic", "shareID": "s",
              "conditions": [condition("Ready", "True"), condition("Healthy", "Maybe")],
              "networkData": { "interfaceName": "ens1", "ips": ["192.0.2.1/24"] } },
        ] } }));
        let found = stored(&claim.unwrap());
        let name = DraName { pool: "n1/net".into(), device: "nic".into() };
        let entry = &found[&EntryKey { name, share_id: Some("s".into()) }];
        assert_eq!(found.len(), 1);
        let ready = Content { status: Status::True, reason: "R".into(), message: "m".into() };
        assert_eq!(entry.conditions, [Some((ready, Timestamp(7000))), None]);
        assert_eq!(entry.network.as_ref().unwrap().interface_name, "ens1");
    }

    #[test]
    fn a_claim_that_has_ended_is_no_problem_and_a_refused_entry_is_one() {
        let refused = |field: &str, message: &str| {
            let cause = Cause { field: field.into(), message: message.into(), ..Cause::default() };
            let details = Details { causes: vec![cause], ..Details::default() };
            Err(ClusterError::Refused {
                code: 422,
                message: String::new(),
                retry_after: None,
                details: Box::new(details),
            })
        };
        let not_allocated = "Invalid value: {}: must be an allocated device in the claim";
        assert!(is_ordinary_end(&refused("status.devices[0]", not_allocated)));
        assert!(is_ordinary_end(&refused("metadata.uid", "field is immutable")));
        assert!(!is_ordinary_end(&refused("status.devices[0].conditions[0].reason", "no word")));
        assert!(!is_ordinary_end(&Ok(ResourceClaim::default())));
    }
}
