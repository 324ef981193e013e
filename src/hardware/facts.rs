//! What a subject's file knows of one device beyond its PCI record.

use crate::domain::DeviceNode;
use std::collections::BTreeMap;

/// Identity, nodes and description of one device.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// An identity of the thing itself; `None` when only its place names it.
    pub(super) identity: Option<String>,
    /// Nodes that a container needs, in order.
    pub(super) nodes: Vec<DeviceNode>,
    /// Description by name.
    pub(super) attributes: BTreeMap<String, String>,
}

impl Facts {
    /// Notes an attribute where it is known.
    pub(super) fn note(&mut self, name: &str, value: Option<String>) {
        if let Some(value) = value {
            self.attributes.insert(name.to_owned(), value);
        }
    }
}

/// A node without which the device is of no use.
pub(super) fn required(path: impl Into<String>) -> DeviceNode {
    DeviceNode::at(path)
}

/// A node that a container gets where it exists.
pub(super) fn optional(path: impl Into<String>) -> DeviceNode {
    DeviceNode::at(path).optional()
}
