//! Resources: names, the selection of devices, and sharing between containers.

use super::contract::{CdiAnswer, Contract};
use super::device::{DeviceClass, DeviceId};
use super::hook::Hooks;
use super::pci::PciAddress;
use super::select::PfSelect;
use super::sharing::{PerContainer, Sharing};
use super::topology::Placement;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of an extended resource, such as `nvidia.com/gpu`, valid by the kubelet's own rules.
/// Clones share one text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ResourceName(Arc<str>);

/// An invalid resource name: the kubelet would refuse it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is not a resource name: {why}")]
pub struct InvalidResourceName {
    /// The refused text.
    pub name: String,
    /// The rule that it violates.
    pub why: &'static str,
}

/// Placeholder for the node in a resource name, where each device node is a resource of its own.
pub const NODE: &str = "{node}";
/// Placeholder for the profile in a resource name, where the MIG instances of each profile are a
/// resource of their own.
pub const MIG_PROFILE: &str = "{mig_profile}";

impl ResourceName {
    /// Parses a name pattern with the placeholder for the node: `example.com/{node}`.
    ///
    /// # Errors
    /// If `{node}` is not in the part after `/`, or if the kubelet would refuse the name with a
    /// plain word in place of `{node}`.
    pub fn for_each_node(text: &str) -> Result<Self, InvalidResourceName> {
        Self::pattern(text, NODE, "node", "`{node}` must be in the part after `/`")
    }

    /// Parses a name pattern with the placeholder for a MIG profile: `nvidia.com/mig-{mig_profile}`.
    ///
    /// # Errors
    /// As [`ResourceName::for_each_node`].
    pub fn for_each_profile(text: &str) -> Result<Self, InvalidResourceName> {
        let place = "`{mig_profile}` must be in the part after `/`";
        Self::pattern(text, MIG_PROFILE, "1g.10gb", place)
    }

    /// A name with a placeholder, which must be valid with `example` in its place.
    fn pattern(
        text: &str,
        placeholder: &str,
        example: &str,
        place: &'static str,
    ) -> Result<Self, InvalidResourceName> {
        let refuse = |why| InvalidResourceName { name: text.to_owned(), why };
        if !text.split_once('/').is_some_and(|(prefix, name)| {
            name.contains(placeholder) && !prefix.contains(placeholder)
        }) {
            return Err(refuse(place));
        }
        text.replace(placeholder, example)
            .parse::<ResourceName>()
            .map_err(|error| refuse(error.why))?;
        Ok(ResourceName(text.into()))
    }

    /// Whether it is a pattern of [`ResourceName::for_each_node`].
    #[must_use]
    pub fn is_for_each_node(&self) -> bool {
        self.0.contains(NODE)
    }

    /// Whether it is a pattern of [`ResourceName::for_each_profile`].
    #[must_use]
    pub fn is_for_each_profile(&self) -> bool {
        self.0.contains(MIG_PROFILE)
    }

    /// Whether it is a pattern, which stands for several resources.
    #[must_use]
    pub fn is_pattern(&self) -> bool {
        self.is_for_each_node() || self.is_for_each_profile()
    }

    /// The name for one MIG profile. As NVIDIA's plugin has it, `1g.10gb+me` becomes `1g.10gb.me`.
    ///
    /// # Errors
    /// If the result is not a valid name.
    pub fn of_profile(&self, profile: &str) -> Result<Self, InvalidResourceName> {
        self.0.replace(MIG_PROFILE, &profile.replace('+', ".")).parse()
    }

    /// The profile for which this pattern makes that name, with `.` in place of `+`.
    #[must_use]
    pub fn profile_in<'a>(&self, name: &'a ResourceName) -> Option<&'a str> {
        let (before, after) = self.0.split_once(MIG_PROFILE)?;
        let profile = name.0.strip_prefix(before)?.strip_suffix(after)?;
        profile.starts_with(|c: char| c.is_ascii_digit()).then_some(profile)
    }

    /// The name for one node below `/dev`: `net/tun` becomes `net_tun`. Characters that are not
    /// allowed become `_`.
    ///
    /// # Errors
    /// If the result is not a valid name, for example because it is too long or begins with `_`.
    pub fn of_node(&self, path: &str) -> Result<Self, InvalidResourceName> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let word: String = path.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        self.0.replace(NODE, &word).parse()
    }

    /// The text of the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The domain before the slash.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.0.split('/').next().unwrap_or_default()
    }

    /// The name as a file name: `nvidia.com/gpu` becomes `nvidia.com_gpu`.
    #[must_use]
    pub fn file_stem(&self) -> String {
        self.0.replace('/', "_")
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The rules of Kubernetes' `IsExtendedResourceName` (pkg/apis/core/v1/helper).
impl FromStr for ResourceName {
    type Err = InvalidResourceName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |why| Err(InvalidResourceName { name: text.to_owned(), why });
        let Some((prefix, name)) = text.split_once('/') else {
            return refuse("it needs a domain and a name, as in `example.com/device`");
        };
        if name.contains('/') {
            return refuse("it has more than one `/`");
        }
        if text.contains("kubernetes.io/") {
            return refuse("`kubernetes.io/` belongs to Kubernetes");
        }
        if text.starts_with("requests.") {
            return refuse("it must not start with `requests.`, which quotas use");
        }
        // The kubelet checks "requests." + name, so 9 of the 253 characters are already used.
        let label = |label: &str| {
            !label.is_empty()
                && label.len() <= 63
                && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if prefix.len() > 244 || !prefix.split('.').all(label) {
            return refuse(
                "the part before `/` must be a lower-case DNS name of at most 244 characters",
            );
        }
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = name.as_bytes();
        let inner =
            bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if bytes.len() > 63 || !inner || !edge(bytes.first()) || !edge(bytes.last()) {
            return refuse(
                "the part after `/` must be at most 63 letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
            );
        }
        Ok(ResourceName(text.into()))
    }
}

impl<'de> Deserialize<'de> for ResourceName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

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
}

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

/// One resource of the validated configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceSpec {
    /// Its name.
    pub name: ResourceName,
    /// The class of its devices.
    pub class: DeviceClass,
    /// The contract, which defines the content of an Allocate response.
    pub contract: Contract,
    /// Ways to pass CDI names in the response instead of device nodes. Empty: the nodes themselves.
    pub cdi: Vec<CdiAnswer>,
    /// The selection of devices.
    pub select: Select,
    /// The devices to leave out of the selection; `None` leaves out none.
    pub exclude: Option<Select>,
    /// Paths, for the class `char`.
    pub paths: Vec<CharPath>,
    /// The number of containers that share a device.
    pub sharing: Sharing,
    /// The limit of ids for one container.
    pub per_container: PerContainer,
    /// The preference among several suitable devices.
    pub placement: Placement,
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
            class,
            contract: Contract::Generic,
            cdi: Vec::new(),
            select: Select::default(),
            exclude: None,
            paths: Vec::new(),
            sharing: Sharing::Exclusive,
            per_container: PerContainer::Any,
            placement: Placement::default(),
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
    fn names_follow_the_kubelets_rules() {
        for good in ["nvidia.com/gpu", "a/b", "intel.com/My_Pool.1-x", "amd.com/cpx_nps4"] {
            assert!(good.parse::<ResourceName>().is_ok(), "{good}");
        }
        let long = format!("{}/x", vec!["a".repeat(60); 5].join("."));
        for bad in [
            "gpu",
            "nvidia.com/",
            "/gpu",
            "NVIDIA.com/gpu",
            "nvidia.com/gpu/1",
            "kubernetes.io/gpu",
            "x.kubernetes.io/gpu",
            "requests.nvidia.com/gpu",
            "nvidia.com/-gpu",
            "nvidia.com/gpu-",
            "nvidia..com/gpu",
            "nvidia.com/g pu",
            &long,
        ] {
            assert!(bad.parse::<ResourceName>().is_err(), "{bad}");
        }
    }
    #[test]
    fn a_name_for_each_node_is_a_name_with_the_node_in_it() {
        let name = |text: &str| ResourceName::for_each_node(text);
        let smarter = name("smarter-devices/{node}").unwrap();
        assert!(
            smarter.is_for_each_node() && smarter.as_str().parse::<ResourceName>().is_err(),
            "the kubelet never gets it"
        );
        for (path, of) in [
            ("i2c-13", "i2c-13"),
            ("net/tun", "net_tun"),
            ("vcsm.cma", "vcsm_cma"),
            ("bus/usb/001/002", "bus_usb_001_002"),
        ] {
            assert_eq!(smarter.of_node(path).unwrap().as_str(), format!("smarter-devices/{of}"));
        }
        assert_eq!(
            name("a.b/tty-{node}-x").unwrap().of_node("S0").unwrap().as_str(),
            "a.b/tty-S0-x"
        );
        for path in ["_x", "x_", ".hidden", "", &"x".repeat(64)] {
            assert!(smarter.of_node(path).is_err(), "{path}");
        }
        for bad in ["{node}", "{node}/x", "a.b/x", "a.b/{nod}", "a.b/-{node}", "a.b/{node}/x"] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

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
