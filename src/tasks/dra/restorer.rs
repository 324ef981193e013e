//! Restores the claims that the ledger has lost, before the kubelet finds the driver.
//!
//! The kubelet's record (`dra_manager_state`) has each claim with its pods and our answer. Where
//! the record cannot be read, as in a DaemonSet, the claims' own CDI files show which devices
//! containers of this boot may have. They have neither the claim's name nor its pods, so such a
//! claim is held until the kubelet prepares it again or unprepares it, or an operator releases it.
//!
//! Each start compares: an intact ledger may be older than the kubelet's record, if it was put back
//! from a copy.

use super::live_claims;
use super::records::Records;
use crate::domain::{
    ClaimRef, DeviceClass, DeviceId, DraName, Grant, Inventory, KubeletClaim, KubeletClaims,
    PreparedDevice,
};
use crate::host;
use crate::kubelet::dra::state::ClaimStateError;
use crate::messages::{Mailbox, RestoreClaims};
use crate::serving::claims::{ClaimDevices, ClaimFiles, NameOf, named_devices};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long the ledger may take to record the claims.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// The pause before claims that could not be recorded are tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// The UIDs of claims in a problem; of more, the number is shown.
const UIDS_SHOWN: usize = 4;

/// Restores claims.
pub(crate) struct Restorer {
    /// The kubelet's record.
    pub(crate) records: Records,
    pub(crate) files: ClaimFiles,
    pub(crate) devices: Arc<dyn ClaimDevices>,
    pub(crate) name_of: NameOf,
    pub(crate) restore: Mailbox<RestoreClaims>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    /// Which claims are held without their names.
    pub(crate) problem: watch::Sender<Option<String>>,
}

/// The claims that are not restored yet, by their UIDs.
#[derive(Debug, Default)]
pub(crate) struct Left {
    claims: BTreeSet<String>,
    /// Whether they could not be recorded. Otherwise the node does not have their devices now.
    is_unrecorded: bool,
}

impl Restorer {
    /// Restores all claims that can be restored. Returns those with a device that this node does
    /// not have now, or that could not be recorded.
    pub(crate) async fn begin(&mut self) -> Left {
        let kept = self.kept().await;
        let left = self.restore(&kept).await;
        // The files of other claims are stale.
        self.files.spare_only(&kept.claims.into_keys().collect());
        if let Err(error) = self.files.keep(live_claims(&self.grants.borrow())) {
            tracing::warn!(%error, "cannot update the CDI files of claims");
        }
        left
    }

    /// Restores the claims that were left when their devices appear, or when they can be recorded,
    /// and reports those without names while they are held.
    pub(crate) async fn follow(mut self, mut left: Left) {
        let mut again = Instant::now() + AGAIN_AFTER;
        loop {
            self.report();
            let is_over = tokio::select! {
                changed = self.grants.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    continue;
                }
                changed = self.inventory.changed(), if !left.claims.is_empty() => changed.is_err(),
                () = tokio::time::sleep_until(again), if left.is_unrecorded => false,
            };
            if is_over {
                return;
            }
            let mut kept = self.kept().await;
            kept.claims.retain(|uid, _| left.claims.contains(uid));
            left = self.restore(&kept).await;
            again = Instant::now() + AGAIN_AFTER;
        }
    }

    /// The claims of the kubelet's record, or else those that only their CDI files show.
    async fn kept(&self) -> KubeletClaims {
        match self.records.read().await {
            Ok(record) => KubeletClaims::clone(&record),
            Err(error) => self.by_files(&error),
        }
    }

    /// The claims that only their CDI files show.
    fn by_files(&self, error: &ClaimStateError) -> KubeletClaims {
        let known: BTreeSet<String> =
            live_claims(&self.grants.borrow()).map(|hold| hold.claim.uid.clone()).collect();
        let unknown = self.files.unknown(&known);
        if unknown.is_empty() {
            tracing::debug!(%error, "no claim can be restored from the kubelet's record");
        } else {
            tracing::warn!(%error, claims = unknown.len(), "the ledger lacks claims that have CDI files");
        }
        of_files(unknown, &self.inventory.borrow(), &*self.name_of)
    }

    async fn restore(&mut self, kept: &KubeletClaims) -> Left {
        self.inventory.mark_unchanged();
        let devices = |claim: &KubeletClaim| {
            let uid = &claim.claim.uid;
            claim.devices.iter().map(|device| device.own(uid)).collect::<BTreeSet<_>>()
        };
        let wanted: BTreeSet<DraName> = kept.claims.values().flat_map(devices).collect();
        if wanted.is_empty() {
            return Left::default();
        }
        let is_wanted = |name: &DraName| wanted.contains(name);
        let named = named_devices(&*self.devices, is_wanted, &*self.name_of);
        let is_here = |claim: &KubeletClaim| devices(claim).iter().all(|it| named.contains_key(it));
        let claims: BTreeSet<String> = kept
            .claims
            .iter()
            .filter(|(_, claim)| !is_here(claim))
            .map(|(uid, _)| uid.clone())
            .collect();
        let mut left = Left { claims, is_unrecorded: false };
        if !left.claims.is_empty() {
            tracing::warn!(claims = ?left.claims, "claims have devices that this node does not have now");
        }
        let message = RestoreClaims { kept: Arc::new(kept.clone()), named: Arc::new(named) };
        let restored = self.restore.call(message, ANSWER_WITHIN).await;
        let restored = restored.map_err(|error| error.to_string());
        match restored.and_then(|restored| restored.map_err(|error| error.to_string())) {
            Ok(0) => {}
            Ok(grants) => tracing::warn!(grants, "the ledger lacked claims; they are back"),
            Err(error) => {
                tracing::error!(
                    error,
                    "cannot restore the claims that the ledger lacks; trying again"
                );
                left = Left { claims: kept.claims.keys().cloned().collect(), is_unrecorded: true };
            }
        }
        left
    }

    /// Reports the claims without names.
    fn report(&mut self) {
        let grants = self.grants.borrow_and_update().clone();
        let nameless = live_claims(&grants).filter(|hold| !hold.claim.is_named());
        let uids: BTreeSet<&str> = nameless.map(|hold| hold.claim.uid.as_str()).collect();
        let problem = (!uids.is_empty()).then(|| {
            let shown: Vec<&str> = uids.iter().copied().take(UIDS_SHOWN).collect();
            let more = uids.len().saturating_sub(UIDS_SHOWN);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            format!(
                "the ledger was lost, and the kubelet's record of claims cannot be read: the \
                 devices of claims {}{more} stay held until the kubelet unprepares the claims; \
                 `holdfast release --claim UID --force` releases a claim that no container uses",
                shown.join(", ")
            )
        });
        self.problem.send_if_modified(|known| {
            let is_changed = *known != problem;
            if is_changed {
                *known = problem;
            }
            is_changed
        });
    }
}

/// Claims as their CDI files show them.
fn of_files(
    unknown: BTreeMap<String, Vec<(String, String)>>,
    inventory: &Inventory,
    name_of: &dyn Fn(&DeviceId, DeviceClass) -> DraName,
) -> KubeletClaims {
    let offerings = inventory.resources.values();
    let devices = offerings.flat_map(|offering| &offering.devices);
    let pools: BTreeMap<String, String> = devices
        .map(|(id, offered)| name_of(id, offered.device.class))
        .map(|name| (name.device, name.pool))
        .collect();
    let device = |(device, qualified): (String, String)| PreparedDevice {
        // A file has no request.
        request: String::new(),
        name: DraName { pool: pools.get(&device).cloned().unwrap_or_default(), device },
        cdi_devices: vec![qualified],
        share_id: None,
    };
    let claim = |(uid, devices): (String, Vec<(String, String)>)| {
        let claim = ClaimRef { uid: uid.clone(), namespace: String::new(), name: String::new() };
        let devices = devices.into_iter().map(device).collect();
        (uid, KubeletClaim { claim, pods: BTreeSet::new(), devices })
    };
    KubeletClaims { claims: unknown.into_iter().map(claim).collect(), read_at: host::now() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Attributes, Device, Health, Offered, Offering, ResourceSpec};

    #[test]
    fn a_file_shows_a_claim_without_its_name_and_devices_in_the_pools_of_this_node() {
        let device = Device {
            id: DeviceId::new("misc:fuse"),
            key: String::new(),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        let spec = ResourceSpec::new("example.com/fuse".parse().unwrap(), DeviceClass::Char);
        let (spec, id) = (Arc::new(spec), device.id.clone());
        let offered = Offered { device: Arc::new(device), health: Health::Healthy };
        let offering = Offering { devices: [(id, offered)].into(), spec: Arc::clone(&spec) };
        let inventory = Inventory { resources: [(spec.name.clone(), Arc::new(offering))].into() };
        let name_of =
            |_: &DeviceId, _| DraName { pool: "n1/char".into(), device: "misc-fuse".into() };
        let devices = ["misc-fuse", "gone"].map(|name| (name.to_owned(), format!("k={name}")));
        let unknown = BTreeMap::from([("u1".to_owned(), devices.to_vec())]);
        let kept = of_files(unknown, &inventory, &name_of);
        let KubeletClaim { claim, pods, devices } = &kept.claims["u1"];
        assert!(!claim.is_named() && pods.is_empty());
        let names: Vec<String> = devices.iter().map(|device| device.name.to_string()).collect();
        assert_eq!(names, ["n1/char/misc-fuse", "/gone"]);
        assert_eq!(devices[0].cdi_devices, ["k=misc-fuse"]);
    }
}
