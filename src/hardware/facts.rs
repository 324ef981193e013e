//! What a subject's file knows of one device beyond its PCI record.

use crate::domain::{Attributes, DeviceNode};

/// Identity, nodes and description of one device.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// An identity of the thing itself; `None` when only its place names it.
    pub(super) identity: Option<String>,
    /// Nodes that a container needs, in order.
    pub(super) nodes: Vec<DeviceNode>,
    /// Description by name, as `Device::attributes` lists it.
    pub(super) attributes: Attributes,
    /// What it is cut into: each part is a device of its own, and the whole is not offered then.
    pub(super) parts: Vec<Part>,
    /// What the parts are; `None` where there are none, and never will be while it is as it is.
    pub(super) parts_are: Option<&'static str>,
}

/// One part of a function that is offered on its own: a MIG instance, a mediated device, a partition, a port, a namespace.
#[derive(Debug)]
pub(super) struct Part {
    /// Tells it from the other parts of its function, for as long as it is there: `gi1-ci0`.
    pub(super) name: String,
    /// What is known of it.
    pub(super) facts: Facts,
}

impl Facts {
    /// Notes an attribute where it is known.
    pub(super) fn note(&mut self, name: &'static str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.attributes.insert(name, value.to_string());
        }
    }

    /// Cuts it into parts.
    pub(super) fn cut(&mut self, what: &'static str, parts: Vec<Part>) {
        self.parts_are = Some(what);
        self.parts = parts;
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
