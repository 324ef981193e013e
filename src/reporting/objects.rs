//! The objects that are written: `Event` of core v1, and a patch of a node's status.
//!
//! Core v1 and not events.k8s.io/v1: `kubectl describe` and `kubectl get events` read core v1, a
//! kubelet's credentials may write it in every version, and its count and message may change
//! (apiserver's `ValidateEventUpdate` makes them immutable in events.k8s.io/v1).

use super::CONTROLLER;
use super::seen::Pod;
use crate::domain::Timestamp;
use serde::{Serialize, Serializer};

/// The type of the condition.
pub const CONDITION: &str = "HoldfastDevicesHealthy";
/// The namespace of Events about objects of the cluster, such as nodes.
const DEFAULT_NAMESPACE: &str = "default";
/// The longest name of an object (RFC 1123 subdomain) less the suffix of an Event's name.
const NAME_BYTES_MAX: usize = 253 - 17;

/// What an Event is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// This node.
    Node,
    /// A pod that holds devices.
    Pod(Pod),
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Devices have failed.
    Unhealthy,
    /// Devices are healthy again.
    Recovered,
}

impl Kind {
    /// The Event's `reason`.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Kind::Unhealthy => "DeviceUnhealthy",
            Kind::Recovered => "DeviceRecovered",
        }
    }

    /// The Event's `type`.
    fn severity(self) -> &'static str {
        match self {
            Kind::Unhealthy => "Warning",
            Kind::Recovered => "Normal",
        }
    }
}

/// `Event` of core v1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    api_version: &'static str,
    kind: &'static str,
    /// Its name and namespace.
    pub metadata: Metadata,
    /// What it is about.
    pub involved_object: Involved,
    /// In CamelCase.
    pub reason: &'static str,
    /// For people, at most 1024 bytes.
    pub message: String,
    source: Source,
    #[serde(serialize_with = "seconds")]
    first_timestamp: Timestamp,
    #[serde(serialize_with = "seconds")]
    last_timestamp: Timestamp,
    /// How often it happened.
    pub count: u32,
    r#type: &'static str,
    action: &'static str,
    reporting_component: &'static str,
    reporting_instance: String,
}

/// The name of an Event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Metadata {
    /// Unique in the namespace.
    pub name: String,
    /// That of the pod; `default` for the node.
    pub namespace: String,
}

/// `ObjectReference` of core v1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Involved {
    api_version: &'static str,
    /// `Pod` or `Node`.
    pub kind: &'static str,
    /// Its namespace; a node has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// Its UID. For a node its name: `kubectl describe node` searches for both, since the kubelet
    /// writes the name too.
    pub uid: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Source {
    component: &'static str,
    host: String,
}

/// What changes in an Event that happens again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EventPatch {
    /// The newest message.
    pub message: String,
    #[serde(serialize_with = "seconds")]
    last_timestamp: Timestamp,
    /// How often it happened.
    pub count: u32,
}

/// A write of an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventWrite {
    /// A new Event.
    Create(Box<Event>),
    /// One that happened again.
    Patch(Metadata, EventPatch),
}

/// How often something happened, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) count: u32,
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
}

impl Event {
    /// An Event of this node about `target`. `number` makes its name unique.
    pub(super) fn new(
        node: &str,
        target: &Target,
        kind: Kind,
        message: String,
        times: Times,
        number: u64,
    ) -> Self {
        let (involved, name, namespace) = match target {
            Target::Node => ("Node", node, None),
            Target::Pod(pod) => ("Pod", pod.name.as_str(), Some(pod.namespace.clone())),
        };
        let uid = match target {
            Target::Node => node.to_owned(),
            Target::Pod(pod) => pod.uid.clone(),
        };
        let short = name.get(..NAME_BYTES_MAX.min(name.len())).unwrap_or("holdfast");
        let short = short.trim_end_matches(['-', '.']);
        Event {
            api_version: "v1",
            kind: "Event",
            metadata: Metadata {
                name: format!("{short}.{number:016x}"),
                namespace: namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            },
            involved_object: Involved {
                api_version: "v1",
                kind: involved,
                namespace,
                name: name.to_owned(),
                uid,
            },
            reason: kind.reason(),
            message,
            source: Source { component: CONTROLLER, host: node.to_owned() },
            first_timestamp: times.first,
            last_timestamp: times.last,
            count: times.count,
            r#type: kind.severity(),
            action: "CheckHealth",
            reporting_component: CONTROLLER,
            reporting_instance: node.to_owned(),
        }
    }
}

impl EventPatch {
    pub(super) fn new(message: String, times: Times) -> Self {
        EventPatch { message, last_timestamp: times.last, count: times.count }
    }
}

/// The status of a condition (`ConditionStatus`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Status {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// That is not known.
    Unknown,
}

impl Status {
    /// The word of the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Status::True => "True",
            Status::False => "False",
            Status::Unknown => "Unknown",
        }
    }

    /// The status with this word.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        [Status::True, Status::False, Status::Unknown].into_iter().find(|it| it.as_str() == word)
    }
}

/// A strategic merge patch of `nodes/status`. The list of conditions is merged by `type`, so no
/// other condition is touched. Without a condition it changes nothing, and the answer is the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StatusPatch {
    /// The condition to write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<PatchedStatus>,
}

/// The part of the status that is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PatchedStatus {
    /// One condition.
    pub conditions: [Condition; 1],
}

/// `NodeCondition` of core v1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    pub(super) r#type: &'static str,
    /// Whether all devices are healthy.
    pub status: Status,
    /// In CamelCase.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    #[serde(serialize_with = "seconds")]
    pub(super) last_heartbeat_time: Timestamp,
    #[serde(serialize_with = "seconds")]
    pub(super) last_transition_time: Timestamp,
}

/// A time of the API: RFC 3339 in whole seconds (apimachinery's `meta/v1.Time`).
pub(super) fn seconds<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&time.to_seconds())
}
