//! The durable union: everything that the ledger writes to its journal.

use super::device::DeviceId;
use super::grant::{AllocId, Grant, GrantState, GrantedDevice};
use super::hook::PendingHook;
use super::resource::ResourceName;
use super::time::Timestamp;
use super::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Every id that the kubelet has been told of, by resource, with what is needed to offer it on when its device has gone.
///
/// A list is in memory once: the ledger, the store and what is being written share it.
pub type Listed = BTreeMap<ResourceName, Arc<[GrantedDevice]>>;

/// Takes note of a resource's list; one without ids is none.
pub fn note_list(listed: &mut Listed, resource: &ResourceName, devices: Arc<[GrantedDevice]>) {
    if devices.is_empty() {
        listed.remove(resource);
    } else {
        listed.insert(resource.clone(), devices);
    }
}

/// Since when devices have been gone that the ledger remembers.
pub type Gone = BTreeMap<DeviceId, Timestamp>;

/// Takes note of devices that have gone, or (`None`) are there again.
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
/// An entry carries the whole grant or a whole state, never a difference: applying one twice changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
pub enum Entry {
    /// A grant, new or (at the head of a journal segment) carried over in the state it has.
    Grant(Arc<Grant>),
    /// A grant moved on to another state.
    Moved {
        /// Which grant.
        alloc_id: AllocId,
        /// Its new state.
        #[serde(flatten)]
        state: GrantState,
    },
    /// A device got its id, and keeps it (I6).
    Named {
        /// The device's physical key ([`super::Device::key`]).
        key: String,
        /// Its id.
        id: DeviceId,
    },
    /// The list of a resource has other ids than before: the next life of the daemon does not drop one at once (I3).
    Listed {
        /// The resource.
        resource: ResourceName,
        /// Every id in the list; none when the resource is no longer offered.
        devices: Arc<[GrantedDevice]>,
    },
    /// What is known of a device's health (I5).
    Judged {
        /// The device.
        device: DeviceId,
        /// Its verdict; `None` when there is nothing to be remembered any more.
        verdict: Option<Box<Verdict>>,
    },
    /// Devices are neither found, listed nor held since then; or they are again. What is remembered of a device that has gone is
    /// forgotten in the end ([`Entry::Forgotten`]).
    Gone {
        /// Which.
        devices: Vec<DeviceId>,
        /// Since when; `None` when they are there again.
        since: Option<Timestamp>,
    },
    /// Nothing is remembered any more of these devices, which have gone: neither their ids nor what was known of their health.
    Forgotten {
        /// Which.
        devices: Vec<DeviceId>,
    },
    /// How far the hook has come that is owed to a device after its release. It stands in front of the release that owes it,
    /// so a write that was cut off has both or a hook that nobody runs yet.
    Hook(Box<PendingHook>),
}
