//! The parts that all API objects have: metadata, lists, the events of a watch, and the answer to a
//! request that failed (apimachinery's `meta/v1`). Unknown fields are ignored.

use super::error::Cause;
use crate::domain::null_as_empty;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// The metadata of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectMeta {
    /// Its name.
    pub name: String,
    /// Its namespace; empty for an object of the whole cluster.
    pub namespace: String,
    /// Distinguishes it from an earlier object of the same name.
    pub uid: String,
    /// The version of its content. It is compared for equality only.
    pub resource_version: String,
    /// Rises with each change of `spec`; 0 for kinds that do not count.
    pub generation: i64,
    /// Since when it waits for its finalizers, as RFC 3339.
    pub deletion_timestamp: Option<String>,
    /// Its labels.
    #[serde(deserialize_with = "null_as_empty")]
    pub labels: BTreeMap<String, String>,
    /// The annotations that are read.
    pub annotations: Annotations,
}

/// The annotations of an object that this program reads (`types.go` of resource.k8s.io/v1).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Annotations {
    /// `true` of a claim that the scheduler has made for a pod that requests numbers.
    #[serde(rename = "resource.kubernetes.io/extended-resource-claim")]
    pub extended_resource_claim: String,
    /// Of a claim made from a template: its name in the pod.
    #[serde(rename = "resource.kubernetes.io/pod-claim-name")]
    pub pod_claim_name: Option<String>,
}

/// An object, or its `PartialObjectMetadata`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Object {
    pub(super) metadata: ObjectMeta,
}

/// A list of objects.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "Received<T>", bound(deserialize = "T: Deserialize<'de>"))]
pub struct List<T> {
    /// The version of the list: a watch from here on misses nothing.
    pub resource_version: String,
    /// The objects.
    pub items: Vec<T>,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
struct Received<T> {
    metadata: ListMeta,
    #[serde(default, deserialize_with = "null_as_empty")]
    items: Vec<T>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
}

impl<T> From<Received<T>> for List<T> {
    fn from(Received { metadata, items }: Received<T>) -> Self {
        List { resource_version: metadata.resource_version, items }
    }
}

/// One line of a watch. Its type decides how its object is read.
#[derive(Debug, Deserialize)]
pub(super) struct Event {
    pub(super) r#type: String,
}

/// The object of such a line.
#[derive(Debug, Deserialize)]
pub(super) struct EventObject<T> {
    pub(super) object: T,
}

/// The answer to a request that failed. Proxies answer with other texts.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    pub(super) message: String,
    pub(super) reason: String,
    pub(super) code: u16,
    pub(super) details: StatusDetails,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct StatusDetails {
    pub(super) name: String,
    #[serde(deserialize_with = "null_as_empty")]
    pub(super) causes: Vec<Cause>,
    retry_after_seconds: u64,
}

impl Status {
    /// `details.retryAfterSeconds`, which is equal to the header `Retry-After`.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.details.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }
}
