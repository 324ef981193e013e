//! The status of prepared claims (`ResourceClaim.status.devices`, KEP-4817): what is true of their
//! devices, and the object that is written; pure.
//!
//! The rules are those of Kubernetes 1.36 (`validateDeviceStatus` of its resource validation): an
//! entry is for an allocated device or share, has at most 8 conditions, and the reason of a
//! condition is one word. The API server removes the entries of devices that are deallocated.

use super::objects::{Status, seconds};
use super::words;
use crate::domain::{
    AllocId, ClaimHold, ClaimRef, ClaimedDevice, DRA_DRIVER, DraName, Grant, GrantState, Health,
    Inventory, Offered, Reason, Timestamp, Verdicts,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The types of the conditions of each entry. `Ready` is that of the API: the device was prepared
/// as the claim wants it. `Healthy` is the verdict about the device.
pub const TYPES: [&str; 2] = ["Ready", "Healthy"];

/// What an entry is about: a device, or the share that a claim has of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryKey {
    /// The name in the slice.
    pub name: DraName,
    /// The share of a device that claims have parts of.
    pub share_id: Option<String>,
}

impl From<&ClaimedDevice> for EntryKey {
    fn from(device: &ClaimedDevice) -> Self {
        let allocated = &device.allocated;
        EntryKey { name: allocated.name.clone(), share_id: allocated.share_id.clone() }
    }
}

/// The content of a condition, without its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Whether it holds.
    pub status: Status,
    /// In CamelCase.
    pub reason: String,
    /// For people, at most 1024 bytes.
    pub message: String,
}

/// The only interface of a network function (`NetworkDeviceData`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// Its name on the host.
    pub interface_name: String,
    /// Its hardware address, empty if it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hardware_address: String,
}

/// The networks of claims' devices that were checked; `None` of a device without one.
pub type Networks = BTreeMap<(AllocId, EntryKey), Option<Network>>;

/// What is true of a device of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenEntry {
    /// The conditions with [`TYPES`].
    pub conditions: [Content; 2],
    /// `None` if the device has no interface, or it is not seen: it may be in a pod.
    pub network: Option<Network>,
}

/// A claim that is prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenClaim {
    /// The claim.
    pub claim: ClaimRef,
    /// Its grants: others after it was allocated again under the same UID.
    pub grants: BTreeSet<AllocId>,
    /// Whether it is from an earlier process, or from before the ledger was lost.
    pub is_older: bool,
    /// Its devices.
    pub entries: BTreeMap<EntryKey, SeenEntry>,
}

/// The claims that are prepared, by their UIDs. One without a name, as after a loss of the ledger,
/// is none of them.
#[must_use]
pub fn seen(
    inventory: &Inventory,
    verdicts: &Verdicts,
    grants: &[Arc<Grant>],
    networks: &Networks,
) -> BTreeMap<String, SeenClaim> {
    let mut claims: BTreeMap<String, SeenClaim> = BTreeMap::new();
    for (grant, hold) in prepared(grants) {
        let claim = claims.entry(hold.claim.uid.clone()).or_insert_with(|| SeenClaim {
            claim: hold.claim.clone(),
            grants: BTreeSet::new(),
            is_older: false,
            entries: BTreeMap::new(),
        });
        claim.grants.insert(grant.alloc_id.clone());
        claim.is_older |= hold.is_restored();
        let offering = inventory.resources.get(&grant.resource);
        for device in &hold.devices {
            let key = EntryKey::from(device);
            let offered = offering.and_then(|offering| offering.devices.get(&device.id));
            let message = words::bounded(&format!("{} {}", grant.resource, device.id));
            let ready = Content { status: Status::True, reason: "Prepared".into(), message };
            let network = networks.get(&(grant.alloc_id.clone(), key.clone())).cloned().flatten();
            let conditions = [ready, healthy(offered, verdicts)];
            claim.entries.insert(key, SeenEntry { conditions, network });
        }
    }
    claims
}

/// The grants of claims that are prepared and not unprepared.
pub fn prepared(grants: &[Arc<Grant>]) -> impl Iterator<Item = (&Grant, &ClaimHold)> {
    grants.iter().filter_map(|grant| {
        let is_prepared = matches!(grant.state, GrantState::Prepared { unprepared_at: None, .. });
        let hold = grant.claim.as_deref().filter(|hold| is_prepared && hold.claim.is_named())?;
        Some((&**grant, hold))
    })
}

fn healthy(offered: Option<&Offered>, verdicts: &Verdicts) -> Content {
    let Some(offered) = offered else {
        return Content {
            status: Status::Unknown,
            reason: "NotFound".into(),
            message: "the device is not in the inventory of the node".into(),
        };
    };
    let Health::Unhealthy(reason) = offered.health else {
        let (reason, message) = ("Healthy".into(), String::new());
        return Content { status: Status::True, reason, message };
    };
    let detail = verdicts.get(&offered.device.id).map_or("", |verdict| verdict.detail(reason));
    Content {
        status: if reason == Reason::Unread { Status::Unknown } else { Status::False },
        reason: words::camel_case(reason),
        message: words::bounded(&words::reading(reason, detail)),
    }
}

/// A server-side apply of the status: it has all entries of the field manager, which the API server
/// compares with those that it has. Without an entry, the former ones are removed. The UID is that
/// of the claim: the status of a later claim of this name is not changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimPatch {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata,
    status: PatchedStatus,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Metadata {
    name: String,
    namespace: String,
    uid: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct PatchedStatus {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<Entry>,
}

/// `AllocatedDeviceStatus`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    driver: &'static str,
    pool: String,
    device: String,
    #[serde(rename = "shareID", skip_serializing_if = "Option::is_none")]
    share_id: Option<String>,
    conditions: [Condition; 2],
    #[serde(skip_serializing_if = "Option::is_none")]
    network_data: Option<Network>,
}

/// `Condition` of apimachinery's `meta/v1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Condition {
    r#type: &'static str,
    status: Status,
    reason: String,
    message: String,
    #[serde(serialize_with = "seconds")]
    last_transition_time: Timestamp,
}

/// An entry as the API server has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoredEntry {
    /// The conditions with [`TYPES`], and the time when the status of each changed.
    pub conditions: [Option<(Content, Timestamp)>; 2],
    /// The network.
    pub network: Option<Network>,
}

impl StoredEntry {
    /// Whether it has what is true, but for messages. A network that is no longer seen stays.
    pub(super) fn is_like(&self, seen: &SeenEntry) -> bool {
        let mut conditions = self.conditions.iter().zip(&seen.conditions);
        let has_conditions = conditions.all(|(stored, seen)| {
            let is_it = |it: &Content| (it.status, &it.reason) == (seen.status, &seen.reason);
            stored.as_ref().is_some_and(|(content, _)| is_it(content))
        });
        has_conditions && (seen.network.is_none() || self.network == seen.network)
    }

    /// Whether the messages are those of what is true.
    pub(super) fn has_messages(&self, seen: &SeenEntry) -> bool {
        let mut conditions = self.conditions.iter().zip(&seen.conditions);
        conditions.all(|(stored, seen)| {
            stored.as_ref().is_some_and(|(content, _)| content.message == seen.message)
        })
    }
}

impl ClaimPatch {
    /// Whether it removes the entries.
    #[must_use]
    pub fn is_removal(&self) -> bool {
        self.status.devices.is_empty()
    }

    /// The patch that gives a claim these entries and no others of this driver.
    pub(super) fn new(claim: &ClaimRef, entries: &BTreeMap<EntryKey, StoredEntry>) -> Self {
        let ClaimRef { name, namespace, uid } = claim.clone();
        let condition = |r#type: &'static str, (content, time): &(Content, Timestamp)| Condition {
            r#type,
            status: content.status,
            reason: content.reason.clone(),
            message: content.message.clone(),
            last_transition_time: *time,
        };
        let entry = |(key, stored): (&EntryKey, &StoredEntry)| {
            let [Some(ready), Some(healthy)] = &stored.conditions else { return None };
            Some(Entry {
                driver: DRA_DRIVER,
                pool: key.name.pool.clone(),
                device: key.name.device.clone(),
                share_id: key.share_id.clone(),
                conditions: [condition(TYPES[0], ready), condition(TYPES[1], healthy)],
                network_data: stored.network.clone(),
            })
        };
        ClaimPatch {
            api_version: "resource.k8s.io/v1",
            kind: "ResourceClaim",
            metadata: Metadata { name, namespace, uid },
            status: PatchedStatus { devices: entries.iter().filter_map(entry).collect() },
        }
    }
}
