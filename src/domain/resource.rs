//! Resources: the selection of devices, and what a container gets of them.

use super::api::Api;
use super::contract::{CdiAnswer, Contract};
use super::device::DeviceClass;
use super::device_id::DeviceId;
use super::hook::Hooks;
use super::pci::PciAddress;
use super::resource_name::ResourceName;
use super::select::{PfSelect, UsbSelect};
use super::sharing::{PerContainer, Sharing};
use super::topology::Placement;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Selection of devices within the class. For each list that is not empty, the device must match
/// one element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Select {
    /// PCI vendor ids.
    pub vendor: Vec<u16>,
    /// PCI device ids.
    pub device: Vec<u16>,
    /// Kernel drivers by name.
    pub driver: Vec<String>,
    /// PCI addresses.
    pub address: Vec<PciAddress>,
    /// `true`: virtual functions only. `false`: no virtual functions.
    pub vf: Option<bool>,
    /// Device ids.
    pub id: Vec<DeviceId>,
    /// Virtual functions, by physical function and number.
    pub pf: Vec<PfSelect>,
    /// `ether` or `infiniband`.
    pub link_type: Vec<String>,
    /// Globs over the models.
    pub model: Vec<String>,
    /// UUIDs of GPUs, MIG instances and mediated devices.
    pub uuid: Vec<String>,
    /// NUMA nodes.
    pub numa_node: Vec<u32>,
    /// IOMMU groups.
    pub iommu_group: Vec<u32>,
    /// Types of mediated devices, or the names of these types.
    pub mdev_type: Vec<String>,
    /// Globs over the profiles of MIG instances. `+` in a profile also matches `.`.
    pub mig_profile: Vec<String>,
    /// Offers nothing while the devices are of several kinds: wholes and parts, or MIG instances of
    /// several profiles.
    pub uniform: bool,
    /// `true`: only parts of functions, which are MIG instances, partitions, ports and namespaces.
    /// `false`: only whole functions.
    pub part: Option<bool>,
    /// Functions by the names of their network interfaces.
    pub interface: Vec<String>,
    /// Globs over attributes, by the names in [`SELECTABLE`]: each attribute must match one of its
    /// globs.
    pub attribute: BTreeMap<String, Vec<String>>,
}

/// The attributes of a device that [`Select::attribute`] may name: those that stay while the device
/// is in use.
pub const SELECTABLE: [&str; 11] = [
    "acpi_index",
    "afu_id",
    "compute_partition",
    "firmware",
    "interface_id",
    "memory_partition",
    "node_guid",
    "pkey",
    "serial",
    "sys_image_guid",
    "vdpa_driver",
];

/// A pattern for nodes of the host's `/dev`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePattern {
    /// A glob, such as `/dev/ttyUSB*`.
    Glob(String),
    /// A regular expression, searched for in the paths below `/dev`, such as `^video[0-9]+$`.
    Regex(String),
}

impl NodePattern {
    /// The path, if the pattern has no wildcard.
    #[must_use]
    pub fn literal(&self) -> Option<&str> {
        match self {
            NodePattern::Glob(path) if !path.contains(['*', '?', '[']) => Some(path),
            _ => None,
        }
    }

    /// The literal prefix of every match.
    #[must_use]
    pub fn beginning(&self) -> String {
        match self {
            NodePattern::Glob(glob) => {
                glob.split(['*', '?', '[']).next().unwrap_or_default().to_owned()
            }
            NodePattern::Regex(regex) => format!("/dev/{}", literal_beginning(regex)),
        }
    }

    /// The deepest folder that contains every match, directly or in a subfolder.
    #[must_use]
    pub fn folder(&self) -> String {
        self.beginning().rsplit_once('/').map_or("/dev", |(folder, _)| folder).to_owned()
    }
}

/// The literal prefix of every match of a regular expression; empty if it is not obvious.
fn literal_beginning(regex: &str) -> &str {
    // With an alternative anywhere, matches can have different prefixes.
    let Some(rest) = regex.strip_prefix('^').filter(|rest| !rest.contains('|')) else { return "" };
    let end = rest.find(|c: char| r".+*?()|[]{}^$\".contains(c)).unwrap_or(rest.len());
    // A quantifier can make the last character optional.
    let is_repeated = rest[end..].starts_with(['*', '?', '{']);
    let last = rest[..end].char_indices().next_back().map_or(0, |(at, _)| at);
    if is_repeated { &rest[..last] } else { &rest[..end] }
}

impl From<&str> for NodePattern {
    fn from(glob: &str) -> Self {
        NodePattern::Glob(glob.to_owned())
    }
}

impl fmt::Display for NodePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (NodePattern::Glob(text) | NodePattern::Regex(text)) = self;
        f.pad(text)
    }
}

/// One path of a `char` resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CharPath {
    /// The nodes of the host.
    pub host: NodePattern,
    /// Path in the container; `None` means the host's path. A path that ends in `/` is a folder:
    /// the node keeps its name.
    pub container: Option<String>,
    /// Any of `r`, `w` and `m` (mknod).
    pub permissions: String,
    /// Properties of udev that the nodes must have, each with a glob for its value.
    pub udev: Vec<(String, String)>,
}

/// A node of a group, or one that goes with each device of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberPath {
    /// The node. With a group it may be a folder, or after the first member a glob. With a device,
    /// its paths may have placeholders, as in [`template`](super::template).
    pub path: CharPath,
    /// Whether the device is usable without it.
    pub optional: bool,
}

/// A bind mount for every container of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountSpec {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Whether the mount is read-only in the container.
    pub read_only: bool,
}

/// The classes of the devices of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Only [`ResourceSpec::class`].
    Class,
    /// Network functions with an RDMA device and without one; the class is `nic`.
    Network,
    /// Every PCI function; the class is `other`.
    Pci,
}

/// One resource of the validated configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceSpec {
    /// Its name.
    pub name: ResourceName,
    /// The API that gives its devices to new pods.
    pub api: Api,
    /// The class of its devices.
    pub class: DeviceClass,
    /// Whether it also has devices of other classes.
    pub scope: Scope,
    /// The contract, which defines the content of an Allocate response.
    pub contract: Contract,
    /// Ways to pass CDI names in the response instead of device nodes. Empty: the nodes themselves.
    pub cdi: Vec<CdiAnswer>,
    /// The selection of devices.
    pub select: Select,
    /// Further selections: a device that matches one of them is selected too.
    pub or: Vec<Select>,
    /// The devices to leave out of the selection; `None` leaves out none.
    pub exclude: Option<Select>,
    /// Paths, for the class `char`.
    pub paths: Vec<CharPath>,
    /// Groups of paths, for the class `char`: each group is one device. It exists while its first
    /// path leads to a node or a folder of nodes.
    pub groups: Vec<Vec<MemberPath>>,
    /// USB devices by their ids, for the class `char`.
    pub usb: Vec<UsbSelect>,
    /// Nodes that every container gets in addition to those of its devices. They belong to no
    /// device alone.
    pub nodes: Vec<MemberPath>,
    /// The number of containers that share a device.
    pub sharing: Sharing,
    /// Whether claims ask for parts of a device's capacity, instead of shares by their names.
    pub capacity: bool,
    /// The limit of ids for one container.
    pub per_container: PerContainer,
    /// The preference among several suitable devices.
    pub placement: Placement,
    /// Whether the kubelet gets the NUMA nodes of the devices.
    pub topology: bool,
    /// Environment variables of every container.
    pub env: BTreeMap<String, String>,
    /// Mounts of every container.
    pub mounts: Vec<MountSpec>,
    /// The hooks: before a container starts, after a release, and the health check.
    pub hooks: Hooks,
}

impl ResourceSpec {
    /// A resource that offers every device of a class, each to one container, with the contract
    /// `generic`.
    #[must_use]
    pub fn new(name: ResourceName, class: DeviceClass) -> Self {
        ResourceSpec {
            name,
            api: Api::Plugin,
            class,
            scope: Scope::Class,
            contract: Contract::Generic,
            cdi: Vec::new(),
            select: Select::default(),
            or: Vec::new(),
            exclude: None,
            paths: Vec::new(),
            groups: Vec::new(),
            usb: Vec::new(),
            nodes: Vec::new(),
            sharing: Sharing::Exclusive,
            capacity: false,
            per_container: PerContainer::Any,
            placement: Placement::default(),
            topology: true,
            env: BTreeMap::new(),
            mounts: Vec::new(),
            hooks: Hooks::default(),
        }
    }

    /// A resource that is not configured, or no longer configured, and selects no devices.
    #[must_use]
    pub fn orphan(name: ResourceName) -> Self {
        // Matches no device: an id is never empty.
        let nothing = Select { id: vec![DeviceId::new("")], ..Select::default() };
        ResourceSpec { select: nothing, ..ResourceSpec::new(name, DeviceClass::Other) }
    }

    /// Whether it is an [`ResourceSpec::orphan`], which selects no devices.
    #[must_use]
    pub fn is_orphan(&self) -> bool {
        matches!(&self.select.id[..], [id] if id.as_str().is_empty())
    }

    /// The device that claims get instead of this share of it, if they ask for parts of its
    /// capacity. Each of them then holds one share, which the scheduler does not choose.
    #[must_use]
    pub fn divided(&self, id: &DeviceId) -> Option<DeviceId> {
        id.shared().filter(|_| self.capacity && self.api.serves_claims())
    }

    /// Whether devices of this class may belong to it.
    #[must_use]
    pub fn takes(&self, class: DeviceClass) -> bool {
        match self.scope {
            Scope::Class => self.class == class,
            Scope::Network => matches!(class, DeviceClass::Nic | DeviceClass::Rdma),
            Scope::Pci => class != DeviceClass::Char,
        }
    }

    /// The word for its devices in the configuration.
    #[must_use]
    pub fn class_word(&self) -> &'static str {
        match self.scope {
            Scope::Class => self.class.as_str(),
            Scope::Network => "network",
            Scope::Pci => "pci",
        }
    }

    /// Its selections: a device must match one of them.
    pub fn selections(&self) -> impl Iterator<Item = &Select> {
        std::iter::once(&self.select).chain(&self.or)
    }

    /// Every path whose nodes are devices, or parts of one: those of `paths` and of the groups.
    pub fn device_paths(&self) -> impl Iterator<Item = &CharPath> {
        let of_groups = self.groups.iter().flatten().map(|member| &member.path);
        self.paths.iter().chain(of_groups)
    }

    /// Whether at most one container holds a device at a time.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.sharing == Sharing::Exclusive
    }

    /// Whether a container waits until the hook after release of the device's former pod has ended.
    /// Only for exclusive devices: a share has other holders next to it.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.hooks.after_release.is_some() && self.is_exclusive()
    }

    /// Whether the kubelet must call PreStartContainer before a container starts
    /// (`pre_start_required`).
    #[must_use]
    pub fn needs_pre_start(&self) -> bool {
        self.hooks.before_start.is_some() || self.is_gated()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_literal_beginning_of_a_pattern_is_found() {
        for (regex, beginning, folder) in [
            ("^i2c-[0-9]*$", "/dev/i2c-", "/dev"),
            ("^bus/usb/.*$", "/dev/bus/usb/", "/dev/bus/usb"),
            ("^snd$", "/dev/snd", "/dev"),
            ("^video0*$", "/dev/video", "/dev"),
            ("^video0+$", "/dev/video0", "/dev"),
            ("^a|b", "/dev/", "/dev"),
            ("video", "/dev/", "/dev"),
            ("^é?", "/dev/", "/dev"),
        ] {
            let pattern = NodePattern::Regex(regex.to_owned());
            assert_eq!(
                (pattern.beginning().as_str(), pattern.folder().as_str(), pattern.literal()),
                (beginning, folder, None)
            );
        }
        let glob = NodePattern::from("/dev/dvb/adapter*/demux0");
        assert_eq!(
            (glob.beginning().as_str(), glob.folder().as_str(), glob.literal()),
            ("/dev/dvb/adapter", "/dev/dvb", None)
        );
        assert_eq!(NodePattern::from("/dev/fuse").literal(), Some("/dev/fuse"));
    }
}
