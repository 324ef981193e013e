//! The nodes of `/dev` that the `char` resources name, with the patterns that could not be read.

use crate::domain::{Device, ResourceName, ResourceSpec};
use crate::host::ReadFailure;
use std::collections::BTreeMap;

/// The nodes that the `char` resources name.
#[derive(Debug, Default)]
pub(super) struct CharDevices {
    /// By resource, in the order of their nodes. Each node is in the first resource that names it.
    pub(super) by_resource: BTreeMap<ResourceName, Vec<Device>>,
    /// Patterns that match no node, or only nodes of other resources.
    pub(super) warnings: Vec<String>,
    /// The resources whose missing nodes may exist because a read failed, and why.
    pub(super) unread: BTreeMap<ResourceName, String>,
}

/// Records that a resource could not be read completely.
pub(super) fn note_failure(found: &mut CharDevices, spec: &ResourceSpec, failures: &[ReadFailure]) {
    if let Some(failure) = failures.first() {
        found.unread.entry(spec.name.clone()).or_insert_with(|| failure.to_string());
    }
}
