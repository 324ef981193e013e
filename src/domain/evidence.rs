//! The result of one scan of the host: the input of every verdict.

use super::device::{Device, INTEGRATED_KEY};
use super::device_id::DeviceId;
use super::pci::PciAddress;
use super::resource_name::ResourceName;
use super::time::Moment;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The gaps of a scan (I12). A device that is not found in a gap may still exist.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unread {
    /// Why there may be PCI functions that were not found.
    pub functions: Option<String>,
    /// Functions with unread parts, and why.
    pub of_function: BTreeMap<PciAddress, String>,
    /// Resources of the class `char` with nodes that may exist but were not found, and why.
    pub resources: BTreeMap<ResourceName, String>,
    /// Why the GPU of a system on a chip may exist although it was not found.
    pub integrated: Option<String>,
    /// Why nothing newer is known: the present scan does not end.
    pub late: Option<String>,
}

impl Unread {
    /// Whether the scan has no gaps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Unread::default()
    }

    /// Why a device with this key ([`Device::key`]) may exist although the scan did not find it for
    /// the resource; `None` if it does not exist.
    #[must_use]
    pub fn why(&self, resource: &ResourceName, key: &str) -> Option<&str> {
        if key == INTEGRATED_KEY {
            return self.integrated.as_deref();
        }
        let Some(function) = key.strip_prefix("pci:") else {
            // An unknown device may be in any of these gaps.
            let any = self
                .functions
                .as_ref()
                .or_else(|| self.of_function.values().next())
                .or(self.integrated.as_ref())
                .filter(|_| key.is_empty());
            return self.resources.get(resource).or(any).map(String::as_str);
        };
        let address = function.split('/').next().and_then(|address| address.parse().ok());
        self.functions.as_ref().or_else(|| self.of_function.get(&address?)).map(String::as_str)
    }

    /// Whether a device with this key, of any resource, may exist although the scan did not find
    /// it.
    #[must_use]
    pub fn may_hide(&self, key: &str) -> bool {
        if key == INTEGRATED_KEY {
            return self.integrated.is_some();
        }
        let Some(function) = key.strip_prefix("pci:") else {
            return !self.resources.is_empty() || key.is_empty() && !self.is_empty();
        };
        let address = function.split('/').next().and_then(|address| address.parse().ok());
        self.functions.is_some()
            || address.is_some_and(|address| self.of_function.contains_key(&address))
    }

    /// Why the record of a device may be older than the scan; `None` if it is not. Nodes of `/dev`
    /// have no such record.
    #[must_use]
    pub fn why_of(&self, device: &Device) -> Option<&str> {
        if device.key == INTEGRATED_KEY {
            return self.integrated.as_deref();
        }
        let function = device.pci.as_ref()?;
        self.functions
            .as_ref()
            .or_else(|| self.of_function.get(&function.address))
            .map(String::as_str)
    }

    /// Each reason once, for status output.
    #[must_use]
    pub fn reasons(&self) -> BTreeSet<&str> {
        self.functions
            .iter()
            .chain(self.of_function.values())
            .chain(self.resources.values())
            .chain(&self.integrated)
            .chain(&self.late)
            .map(String::as_str)
            .collect()
    }
}

/// One scan of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evidence {
    /// When the scan began: its results are not older.
    pub began: Moment,
    /// Every device that was found, offered or not.
    pub devices: BTreeMap<DeviceId, Arc<Device>>,
    /// The devices that each resource selects.
    pub selected: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// Required device nodes that were missing.
    pub missing_nodes: BTreeSet<String>,
    /// What a container would miss of a selected device, or of one that is not selected because it
    /// lacks this, although all known nodes of the device are present.
    pub unfulfilled: BTreeMap<DeviceId, String>,
    /// The gaps: the parts of the host that could not be read.
    pub unread: Unread,
}

impl Evidence {
    /// A missing node that the device requires, or else the entry of the device in `unfulfilled`.
    #[must_use]
    pub fn missing_node<'a>(&'a self, device: &'a Device) -> Option<&'a str> {
        let missing = device
            .nodes
            .iter()
            .find(|node| node.required && self.missing_nodes.contains(&node.host));
        let unfulfilled = || self.unfulfilled.get(&device.id).map(String::as_str);
        missing.map(|node| node.host.as_str()).or_else(unfulfilled)
    }
}
