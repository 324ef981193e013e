//! The durable facts: every kind of entry that the ledger writes to its journal.

use super::device_id::DeviceId;
use super::grant::{AllocId, Grant, GrantState, GrantedDevice};
use super::hook::PendingHook;
use super::resource_name::ResourceName;
use super::time::Timestamp;
use super::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Every id that the kubelet got in a list, by resource, with the facts that keep it in the list
/// after its device was removed.
///
/// A list is in memory once: the ledger, the store and the entries that wait for a write share it.
pub type Listed = BTreeMap<ResourceName, Arc<[GrantedDevice]>>;

/// Records a resource's list; a list without ids removes it.
pub fn note_list(listed: &mut Listed, resource: &ResourceName, devices: Arc<[GrantedDevice]>) {
    if devices.is_empty() {
        listed.remove(resource);
    } else {
        listed.insert(resource.clone(), devices);
    }
}

/// The times since when remembered devices have been absent.
pub type Gone = BTreeMap<DeviceId, Timestamp>;

/// Records devices that are absent, or (`None`) present again.
pub fn note_gone(gone: &mut Gone, devices: &[DeviceId], since: Option<Timestamp>) {
    for device in devices {
        match since {
            Some(since) => drop(gone.insert(device.clone(), since)),
            None => drop(gone.remove(device)),
        }
    }
}

/// One durable fact. The ledger is the fold of its entries, in order.
///
/// An entry carries the whole grant or a whole state, never a difference: applying one twice
/// changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
pub enum Entry {
    /// A grant, new or (at the head of a journal segment) carried over in the state it has.
    Grant(Arc<Grant>),
    /// A grant has another state.
    Moved {
        /// The grant's id.
        alloc_id: AllocId,
        /// Its new state.
        #[serde(flatten)]
        state: GrantState,
    },
    /// A device got its id, which is permanent (I6).
    Named {
        /// The device's physical key ([`super::Device::key`]).
        key: String,
        /// Its id.
        id: DeviceId,
    },
    /// The list of a resource has other ids than before: after a restart the daemon does not drop
    /// such an id at once (I3).
    Listed {
        /// The resource.
        resource: ResourceName,
        /// Every id in the list; none when the resource is no longer offered.
        devices: Arc<[GrantedDevice]>,
    },
    /// The verdict of a device (I5).
    Judged {
        /// The device.
        device: DeviceId,
        /// Its verdict; `None` if nothing is left to remember.
        verdict: Option<Box<Verdict>>,
    },
    /// Devices are neither found, listed nor held since then; or they are present again. The
    /// records of an absent device are dropped in the end ([`Entry::Forgotten`]).
    Gone {
        /// The devices.
        devices: Vec<DeviceId>,
        /// Since when; `None` if they are present again.
        since: Option<Timestamp>,
    },
    /// The records of these absent devices were dropped: their ids and their verdicts.
    Forgotten {
        /// The devices.
        devices: Vec<DeviceId>,
    },
    /// The progress of a device's after-release hook. It is written before the release that causes
    /// it, so a torn write has both, or a hook that must not run yet.
    Hook(Box<PendingHook>),
}
