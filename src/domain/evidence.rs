//! What one look at the host has shown: the input of every judgement.

use super::device::{Device, DeviceId};
use super::resource::ResourceName;
use super::time::Moment;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One scan of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evidence {
    /// When the scan began: what it shows is not older.
    pub began: Moment,
    /// Every device that was found, offered or not.
    pub devices: BTreeMap<DeviceId, Arc<Device>>,
    /// Which of them each resource selects.
    pub selected: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// Required device nodes that were not there.
    pub missing_nodes: BTreeSet<String>,
}

impl Evidence {
    /// Whether every node that the device cannot do without was there.
    #[must_use]
    pub fn has_nodes(&self, device: &Device) -> bool {
        !device.nodes.iter().any(|node| node.required && self.missing_nodes.contains(&node.host))
    }
}
