//! The parts of API objects that are read: their metadata (apimachinery's `meta/v1`).

use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// The metadata of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectMeta {
    /// Its name.
    pub name: String,
    /// Distinguishes it from an earlier object of the same name.
    pub uid: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// An object, or its `PartialObjectMetadata`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Object {
    pub(super) metadata: ObjectMeta,
}

/// A list of objects.
#[derive(Debug, Deserialize)]
pub(super) struct List {
    pub(super) metadata: ListMeta,
    #[serde(default)]
    pub(super) items: Vec<Object>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMeta {
    /// The version of the list: a watch from here on misses nothing.
    pub(super) resource_version: String,
}

/// One line of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct Event {
    pub(super) r#type: String,
    pub(super) object: serde_json::Value,
}

/// The answer to a request that failed. Proxies answer with other texts.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    pub(super) message: String,
    pub(super) code: u16,
    details: Details,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Details {
    retry_after_seconds: u64,
}

impl Status {
    /// `details.retryAfterSeconds`, which is equal to the header `Retry-After`.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.details.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }
}
