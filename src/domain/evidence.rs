//! What one look at the host has shown: the input of every judgement.

use super::device::{Device, DeviceId};
use super::pci::PciAddress;
use super::resource::ResourceName;
use super::time::Moment;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a scan could not read (I12): that something was not found there shows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unread {
    /// Why PCI functions may be there that were not found.
    pub functions: Option<String>,
    /// Functions of which something could not be read, and why.
    pub of_function: BTreeMap<PciAddress, String>,
    /// Resources of the class `char` of which nodes may be there that were not found, and why.
    pub resources: BTreeMap<ResourceName, String>,
}

impl Unread {
    /// Whether the scan has seen everything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Unread::default()
    }

    /// Why a device with this key ([`Device::key`]) may be there although a resource did not find it; `None` where it is not.
    #[must_use]
    pub fn why(&self, resource: &ResourceName, key: &str) -> Option<&str> {
        let Some(function) = key.strip_prefix("pci:") else {
            // What is not known of a device may be any of these.
            let any = self.functions.as_ref().or_else(|| self.of_function.values().next()).filter(|_| key.is_empty());
            return self.resources.get(resource).or(any).map(String::as_str);
        };
        let address = function.split('/').next().and_then(|address| address.parse().ok());
        self.functions.as_ref().or_else(|| self.of_function.get(&address?)).map(String::as_str)
    }

    /// Whether a device with this key, of whatever resource, may be there although the scan did not find it.
    #[must_use]
    pub fn may_hide(&self, key: &str) -> bool {
        let Some(function) = key.strip_prefix("pci:") else {
            return !self.resources.is_empty() || key.is_empty() && !self.is_empty();
        };
        let address = function.split('/').next().and_then(|address| address.parse().ok());
        self.functions.is_some() || address.is_some_and(|address| self.of_function.contains_key(&address))
    }

    /// Why what is known of a PCI device may be older than the scan; `None` where it is not.
    #[must_use]
    pub fn why_of(&self, device: &Device) -> Option<&str> {
        let function = device.pci.as_ref()?;
        self.functions.as_ref().or_else(|| self.of_function.get(&function.address)).map(String::as_str)
    }

    /// Each reason once, for a person.
    #[must_use]
    pub fn reasons(&self) -> BTreeSet<&str> {
        self.functions.iter().chain(self.of_function.values()).chain(self.resources.values()).map(String::as_str).collect()
    }
}

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
    /// What a container would miss of a device that its resource selects, although all nodes that are known of it are there.
    pub unfulfilled: BTreeMap<DeviceId, &'static str>,
    /// What could not be read.
    pub unread: Unread,
}

impl Evidence {
    /// What is missing that the device cannot do without: a node, or what its name begins with.
    #[must_use]
    pub fn missing_node<'a>(&'a self, device: &'a Device) -> Option<&'a str> {
        let missing = device.nodes.iter().find(|node| node.required && self.missing_nodes.contains(&node.host));
        missing.map(|node| node.host.as_str()).or_else(|| self.unfulfilled.get(&device.id).copied())
    }
}
