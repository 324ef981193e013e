//! What the publisher learns, requests and reports.

use super::super::api::{OwnerReference, ResourceSlice};
use super::super::wanted::WantedDevices;
use std::time::Duration;

/// What happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// The devices to publish.
    DevicesChanged(WantedDevices),
    /// The answer to [`Action::List`]: the slices of this node, of any driver.
    Listed(Vec<ResourceSlice>),
    /// The watch reports a new or changed slice of this node.
    Changed(ResourceSlice),
    /// The watch reports a deleted slice, in its last version.
    Deleted(ResourceSlice),
    /// The watch ended, and may have missed changes.
    WatchLost,
    /// The answer to a write: the object, or `None` for a deletion.
    Accepted(Option<ResourceSlice>),
    /// A request failed.
    Failed(Failure),
    /// The kubelet has registered the driver. After its start it deletes all slices of the node.
    KubeletRegistered,
    /// The object of the node was read; `None` if there is none.
    OwnerRead(Option<OwnerReference>),
    /// The API server was not reachable, and is again. It may be another version, or have other
    /// feature gates, and keep fields that it dropped.
    ServerChanged,
}

/// A request that failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failure {
    /// The status; `None` without an answer. The request may have been carried out then.
    pub status: Option<u16>,
    /// The server's text, or why there is no answer.
    pub message: String,
    /// The fields that the server refuses (`details.causes` of the `Status`).
    pub causes: Vec<Cause>,
    /// The pause that the server asks for.
    pub retry_after: Option<Duration>,
}

/// One field that the server refuses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cause {
    /// Its path: `spec.devices[3].attributes[model].string`.
    pub field: String,
    /// Why.
    pub message: String,
}

/// The next request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// List the slices of this node, and watch from there.
    List,
    /// Create the slice.
    Create(ResourceSlice),
    /// Replace the slice. Its `resourceVersion` is the precondition.
    Update(ResourceSlice),
    /// Delete the slice with this name, if it has this UID and this version.
    Delete {
        /// Its name.
        name: String,
        /// Precondition `uid`.
        uid: String,
        /// Precondition `resourceVersion`.
        resource_version: String,
    },
    /// Nothing until this time, or until the next event.
    Wait(Option<Duration>),
}

/// What an operator should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The API server drops these fields of slices: their feature is off there. Without taints a
    /// device that must not be used is left out. Without counters nothing is.
    FieldsDropped(&'static str),
    /// The API server refuses a device. It is not published until it changes.
    DeviceRefused {
        /// Its pool.
        pool: String,
        /// Its name.
        device: String,
        /// The server's reason.
        why: String,
    },
    /// The API server refuses a request.
    Refused {
        /// The name of the slice; empty for a list.
        slice: String,
        /// The status.
        status: u16,
        /// The server's text.
        why: String,
        /// When the next request is sent.
        retry_after: Duration,
    },
    /// Another program writes this slice again and again. One try is made every 30 s.
    Contended(String),
    /// No other program has written the slices for a minute.
    Uncontended,
}
