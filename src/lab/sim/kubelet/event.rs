//! The simulator's events, with times: the demo prints them, the tests and benchmarks measure with
//! them.

use super::hook::{Hook, Verdict};
use super::interleaving::Interleaving;
use crate::domain::{DeviceId, ResourceName};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Since the simulator was created, across restarts of the kubelet.
    pub at: Duration,
    /// The kind of event.
    pub kind: EventKind,
}

/// The kinds of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// `kubelet.sock` listens: the n-th start.
    Started {
        /// Counts from 1.
        start: u64,
    },
    /// The kubelet has exited; the files of its sockets still exist.
    Stopped,
    /// The checkpoint could not be used: all devices count as free.
    CheckpointUnreadable {
        /// Why.
        error: String,
    },
    /// A file of the node could not be written: the checkpoint, a cgroup, a log folder.
    FileFailed {
        /// Why.
        error: String,
    },
    /// The plugin was dialled and returned its options; Register is answered next.
    Options {
        /// The resource.
        resource: ResourceName,
        /// The number of the client, in the order of the Register calls.
        client: u64,
    },
    /// Register was answered with success.
    Registered {
        /// The resource.
        resource: ResourceName,
        /// The number of the client.
        client: u64,
        /// The endpoint, as the plugin named it.
        endpoint: String,
    },
    /// Register was answered with an error.
    RegisterFailed {
        /// The name, as the plugin gave it.
        resource: String,
        /// The error.
        error: String,
    },
    /// A list arrived.
    Listed {
        /// The resource.
        resource: ResourceName,
        /// The number of the client.
        client: u64,
        /// Its healthy devices.
        healthy: usize,
        /// Its other devices.
        unhealthy: usize,
    },
    /// A ListAndWatch stream ended, or could not be opened.
    StreamEnded {
        /// The resource.
        resource: ResourceName,
        /// The number of the client.
        client: u64,
    },
    /// A client was cut and the resource's endpoint stopped: 0 devices are allocatable.
    Disconnected {
        /// The resource.
        resource: ResourceName,
        /// The number of the client that was cut, which need not be the one whose stream ended.
        client: u64,
    },
    /// An Allocate call was answered.
    Allocated {
        /// The resource.
        resource: ResourceName,
        /// The pod's UID.
        pod_uid: String,
        /// The container.
        container: String,
        /// The ids.
        devices: BTreeSet<DeviceId>,
        /// How long the answer took.
        took: Duration,
    },
    /// A pod was admitted, the first time or again after a restart.
    Admitted {
        /// The pod's UID.
        pod_uid: String,
    },
    /// A pod was rejected; its containers are killed.
    Rejected {
        /// The pod's UID.
        pod_uid: String,
        /// The reason of its status.
        reason: String,
        /// The message of its status.
        message: String,
    },
    /// The first batch of pods after a start is complete.
    SourcesReady,
    /// A pod was deleted.
    Deleted {
        /// The pod's UID.
        pod_uid: String,
    },
    /// A list no longer has devices that a container holds, or that an Allocate under way reserves.
    Vanished {
        /// The resource.
        resource: ResourceName,
        /// The ids.
        devices: BTreeSet<DeviceId>,
    },
    /// Clients of a resource have met in an order that is known to cause failures.
    Interleaving {
        /// The resource.
        resource: ResourceName,
        /// Which order.
        which: Interleaving,
    },
    /// A container could not be started; it is tried again.
    StartFailed {
        /// The pod's UID.
        pod_uid: String,
        /// The container.
        container: String,
        /// The reason in its status, such as `CreateContainerConfigError: ...`.
        error: String,
    },
    /// The admission of a running pod refused its resize: the pod stays as it is.
    ResizeRefused {
        /// The pod's UID.
        pod_uid: String,
        /// Why.
        error: String,
    },
    /// A container was started.
    ContainerStarted {
        /// The pod's UID.
        pod_uid: String,
        /// The container.
        container: String,
    },
    /// A flow of the kubelet was held at a hook, or continues in an unusual way.
    Held {
        /// The hook.
        hook: Hook,
        /// The time that it was held.
        held: Duration,
        /// How it continues.
        verdict: Verdict,
    },
    /// An Allocate has been under way for more than five minutes: the kubelet's health check fails.
    Stuck,
    /// The real kubelet would have crashed.
    Panicked {
        /// The place, and the device.
        site: String,
    },
}

impl EventKind {
    /// The resource that the event belongs to.
    #[must_use]
    pub fn resource(&self) -> Option<&ResourceName> {
        match self {
            EventKind::Options { resource, .. }
            | EventKind::Registered { resource, .. }
            | EventKind::Listed { resource, .. }
            | EventKind::StreamEnded { resource, .. }
            | EventKind::Disconnected { resource, .. }
            | EventKind::Vanished { resource, .. }
            | EventKind::Interleaving { resource, .. }
            | EventKind::Allocated { resource, .. } => Some(resource),
            _ => None,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>10.3} ms  ", self.at.as_secs_f64() * 1000.0)?;
        match &self.kind {
            EventKind::Started { start } => write!(f, "kubelet started (start {start})"),
            EventKind::Stopped => write!(f, "kubelet stopped"),
            EventKind::CheckpointUnreadable { error } => {
                write!(f, "checkpoint unreadable: {error}")
            }
            EventKind::FileFailed { error } => write!(f, "{error}"),
            EventKind::Options { resource, client } => {
                write!(f, "{resource}: options of client {client}")
            }
            EventKind::Registered { resource, client, endpoint } => {
                write!(f, "{resource}: registered client {client} at {endpoint}")
            }
            EventKind::RegisterFailed { resource, error } => {
                write!(f, "{resource}: register failed: {error}")
            }
            EventKind::Listed { resource, client, healthy, unhealthy } => {
                write!(
                    f,
                    "{resource}: list of client {client}, {healthy} healthy, {unhealthy} unhealthy"
                )
            }
            EventKind::StreamEnded { resource, client } => {
                write!(f, "{resource}: stream of client {client} ended")
            }
            EventKind::Disconnected { resource, client } => {
                write!(f, "{resource}: client {client} disconnected")
            }
            EventKind::Allocated { resource, pod_uid, container, devices, took } => {
                write!(
                    f,
                    "{resource}: {} allocated to {pod_uid}/{container} in {took:?}",
                    devices.len()
                )
            }
            EventKind::Admitted { pod_uid } => write!(f, "pod {pod_uid} admitted"),
            EventKind::Rejected { pod_uid, reason, message } => {
                write!(f, "pod {pod_uid} rejected: {reason}: {message}")
            }
            EventKind::SourcesReady => write!(f, "first pods admitted"),
            EventKind::Deleted { pod_uid } => write!(f, "pod {pod_uid} deleted"),
            EventKind::Vanished { resource, devices } => {
                write!(f, "{resource}: {} held devices left the list", devices.len())
            }
            EventKind::Interleaving { resource, which } => {
                write!(f, "{resource}: interleaving {which}")
            }
            EventKind::StartFailed { pod_uid, container, error } => {
                write!(f, "{pod_uid}/{container} not started: {error}")
            }
            EventKind::ResizeRefused { pod_uid, error } => {
                write!(f, "pod {pod_uid} not resized: {error}")
            }
            EventKind::ContainerStarted { pod_uid, container } => {
                write!(f, "{pod_uid}/{container} started")
            }
            EventKind::Held { hook, held, verdict } => {
                write!(f, "held at {hook:?} for {held:?}: {verdict:?}")
            }
            EventKind::Stuck => write!(f, "an Allocate has blocked the kubelet for five minutes"),
            EventKind::Panicked { site } => write!(f, "the kubelet would have crashed {site}"),
        }
    }
}

/// The newest events. Old ones are dropped, so that a long benchmark does not fill the memory.
#[derive(Debug, Default)]
pub struct EventLog {
    events: VecDeque<Event>,
    total: u64,
}

impl EventLog {
    /// A soak of an hour keeps its last minutes; every test keeps all events.
    const EVENTS_MAX: usize = 100_000;

    pub(super) fn push(&mut self, at: Duration, kind: EventKind) {
        if self.events.len() == Self::EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(Event { at, kind });
        self.total += 1;
    }

    /// All events so far, including the dropped ones.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The events, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Event> {
        self.events.iter()
    }

    /// The highest number of events that fit within any window of this length.
    pub fn busiest(&self, within: Duration, fits: impl Fn(&EventKind) -> bool) -> usize {
        let times: Vec<Duration> =
            self.events.iter().filter(|event| fits(&event.kind)).map(|event| event.at).collect();
        let window = |(first, from): (usize, &Duration)| {
            times.partition_point(|at| *at < *from + within) - first
        };
        times.iter().enumerate().map(window).max().unwrap_or_default()
    }

    /// The time from the newest start of the kubelet to the first later event that fits, if there
    /// is one.
    pub fn since_start(&self, fits: impl Fn(&EventKind) -> bool) -> Option<Duration> {
        let start = self
            .events
            .iter()
            .rposition(|event| matches!(event.kind, EventKind::Started { .. }))?;
        let started = self.events.get(start)?.at;
        self.events
            .iter()
            .skip(start)
            .find(|event| fits(&event.kind))
            .map(|event| event.at.saturating_sub(started))
    }
}
