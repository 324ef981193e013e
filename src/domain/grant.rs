//! Grants: who holds what, and the durable facts from which that is rebuilt.

use super::device::DeviceId;
use super::edits::ContainerEdits;
use super::hook::PendingHook;
use super::object::{Object, is_driver_wide, share};
use super::resource::ResourceName;
use super::time::Timestamp;
use super::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Names one grant for ever: a UUID of version 7, so that ids sort by time.
///
/// It travels in the Allocate response as the annotation `holdfast.dev/alloc-id`, which the kubelet keeps in its
/// checkpoint: reading that back tells exactly which pod and container a grant went to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AllocId(Arc<str>);

/// How the id of a grant begins that another plugin has made.
const OTHER_PLUGIN: &str = "other-plugin";

impl AllocId {
    /// The annotation's key.
    pub const ANNOTATION: &'static str = "holdfast.dev/alloc-id";

    /// Takes the text as it is.
    pub fn new(text: impl AsRef<str>) -> Self {
        AllocId(Arc::from(text.as_ref()))
    }

    /// Names what another plugin has given a container of a resource: its answer carries no id, so this is made of what the kubelet's
    /// checkpoint tells of it, and is the same whenever it is read.
    #[must_use]
    pub fn of_other_plugin(pod_uid: &str, container: &str, resource: &ResourceName) -> Self {
        AllocId(format!("{OTHER_PLUGIN}:{pod_uid}/{container}/{resource}").into())
    }

    /// Whether another plugin gave the devices.
    #[must_use]
    pub fn is_of_other_plugin(&self) -> bool {
        self.0.strip_prefix(OTHER_PLUGIN).is_some_and(|rest| rest.starts_with(':'))
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// When it was made: a UUID of version 7 begins with the milliseconds since 1970, 48 bits of them (RFC 9562). `None`
    /// for any other text.
    #[must_use]
    pub fn made_at(&self) -> Option<Timestamp> {
        let (high, rest) = self.0.split_once('-')?;
        let (low, rest) = rest.split_once('-')?;
        let is_v7 = high.len() == 8 && low.len() == 4 && rest.starts_with('7');
        is_v7.then(|| u64::from_str_radix(&format!("{high}{low}"), 16).ok().map(Timestamp)).flatten()
    }
}

impl fmt::Display for AllocId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Tells one start of the kubelet from the next: the identity of its registration socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KubeletGeneration {
    /// Inode of `kubelet.sock`.
    pub inode: u64,
    /// When it was made, nanoseconds since 1970: an inode number alone may be used again. It is the time of its modification,
    /// which `bind` sets; a `chmod` or a relabelling of the socket makes no other kubelet of it.
    #[serde(rename = "ctime_ns")]
    pub made_ns: i64,
}

impl KubeletGeneration {
    /// When it was made; `None` by a clock that stands before 1970.
    #[must_use]
    pub fn made_at(&self) -> Option<Timestamp> {
        u64::try_from(self.made_ns / 1_000_000).ok().map(Timestamp)
    }
}

/// A pod. Its UID tells it from an earlier pod of the same name; a name that cannot be known is `None`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// The pod's UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its name.
    pub name: Option<String>,
}

impl fmt::Display for PodRef {
    /// `namespace/name`, or the UID where the name is not known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => write!(f, "{namespace}/{name}"),
            _ => f.pad(&self.uid),
        }
    }
}

/// One id of a grant, with what is needed to offer it on when the device itself has gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantedDevice {
    /// The id that the kubelet asked for.
    pub id: DeviceId,
    /// The physical key of the device behind it ([`super::Device::key`]).
    pub key: String,
    /// Its NUMA nodes at that time; the kubelet has copied them into its own record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numa_nodes: Vec<u32>,
    /// Its nodes on the host, less those that the answer names: others reach the container by a name, of a GPU or of CDI.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// What is held with it ([`super::Device::objects`]); none where that was not noted: [`Grant::objects`] tells in any case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Object>,
}

impl GrantedDevice {
    /// The PCI function that its key names, `0000:18:00.0`; the key of a part names the whole function.
    #[must_use]
    pub fn function(&self) -> Option<&str> {
        self.key.strip_prefix("pci:")?.split('/').next()
    }
}

/// How far a grant has come. Only proof moves it on; absence alone is none (I4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum GrantState {
    /// Allocate was answered; which container got the devices is not known yet.
    Granted,
    /// The kubelet's checkpoint names the container.
    Bound {
        /// The pod that holds it.
        pod: PodRef,
        /// The container's name.
        container: String,
        /// When that became known.
        bound_at: Timestamp,
    },
    /// Bound, but the kubelet no longer lists the pod. Still held: the proof of release is not complete.
    Suspect {
        /// The pod that held it.
        pod: PodRef,
        /// The container's name.
        container: String,
        /// When it was bound.
        bound_at: Timestamp,
        /// When the pod was first missed.
        suspect_at: Timestamp,
    },
    /// Given back, by the proof that is named.
    Released {
        /// The pod that held it; `None` when it was never bound.
        pod: Option<PodRef>,
        /// The container's name, where it was bound.
        container: Option<String>,
        /// When it was bound.
        bound_at: Option<Timestamp>,
        /// When the proof was complete.
        released_at: Timestamp,
        /// The proof, in words of the documentation: `pod_gone`, `handed_on`, `superseded`, `never_started`.
        released_by: String,
    },
}

/// One answered Allocate: which ids one container got, and what became of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its id.
    pub alloc_id: AllocId,
    /// The resource.
    pub resource: ResourceName,
    /// The ids, in the order of the request.
    pub devices: Vec<GrantedDevice>,
    /// What the container got: the kubelet replays it at every container start, so it must stay true.
    pub edits: ContainerEdits,
    /// The boot in which it was made (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The kubelet that asked; `None` when its socket could not be read.
    pub kubelet: Option<KubeletGeneration>,
    /// When it was made.
    pub granted_at: Timestamp,
    /// The version of Holdfast that made it.
    pub version: String,
    /// How far it has come.
    #[serde(flatten)]
    pub state: GrantState,
}

impl Grant {
    /// What its container holds. Where that was not noted, as in grants of earlier versions and in one of a pool, it is what the keys and the
    /// nodes of the answer name.
    #[must_use]
    pub fn objects(&self) -> Vec<Object> {
        let of = |device: &GrantedDevice| -> Vec<Object> {
            if !device.objects.is_empty() {
                return device.objects.clone();
            }
            let is_char = device.key.starts_with("dev:");
            let answered = self.edits.devices.iter().map(|node| (&node.host, &node.container));
            let nodes = answered.chain(device.nodes.iter().map(|node| (node, node)));
            let own = nodes.filter(|(_, name)| is_char || !is_driver_wide(name)).map(|(node, _)| Object::node(node));
            // The id of a network function is its address.
            let whole = device.id.shared().unwrap_or_else(|| device.id.clone());
            let function = whole.as_str().parse().ok().filter(|_| device.key.is_empty()).map(Object::function);
            Object::of_key(&device.key).into_iter().chain(function).chain(own).collect()
        };
        self.devices.iter().flat_map(of).collect()
    }

    /// The same with the objects of its devices where these were not noted, as far as the host shows them now: `behind` tells what is behind a
    /// node. The runtime opens the nodes of the answer by their paths at every start of the container, so what is there now is what is held.
    #[must_use]
    pub fn resolve(mut self, behind: impl Fn(&str) -> Vec<Object>) -> Self {
        if self.devices.iter().all(|device| !device.objects.is_empty()) {
            return self;
        }
        let known = self.objects();
        let nodes = known.iter().filter_map(Object::as_node).flat_map(&behind);
        let all: Vec<Object> = nodes.chain(known.iter().cloned()).collect();
        for device in self.devices.iter_mut().filter(|device| device.objects.is_empty()) {
            device.objects.clone_from(&all);
        }
        self
    }

    /// Whether an id may be given beside it although it leads to what this holds.
    #[must_use]
    pub fn is_beside(&self, resource: &ResourceName, id: &DeviceId) -> bool {
        self.devices.iter().any(|held| share((&self.resource, &held.id), (resource, id)))
    }

    /// Whether it still holds its devices: everything but released.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !matches!(self.state, GrantState::Released { .. })
    }

    /// The pod, where it is known.
    #[must_use]
    pub fn pod(&self) -> Option<&PodRef> {
        match &self.state {
            GrantState::Granted => None,
            GrantState::Bound { pod, .. } | GrantState::Suspect { pod, .. } => Some(pod),
            GrantState::Released { pod, .. } => pod.as_ref(),
        }
    }

    /// The container's name, where it is known.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match &self.state {
            GrantState::Granted => None,
            GrantState::Bound { container, .. } | GrantState::Suspect { container, .. } => Some(container),
            GrantState::Released { container, .. } => container.as_deref(),
        }
    }

    /// The alphabetic word of the state, as `who -o json` prints it.
    #[must_use]
    pub fn state_name(&self) -> &'static str {
        match self.state {
            GrantState::Granted => "granted",
            GrantState::Bound { .. } => "bound",
            GrantState::Suspect { .. } => "suspect",
            GrantState::Released { .. } => "released",
        }
    }
}

/// Every id that the kubelet has been told of, by resource, with what is needed to offer it on when its device has gone.
///
/// A list is in memory once: the ledger, the store and what is being written share it.
pub type Listed = BTreeMap<ResourceName, Arc<[GrantedDevice]>>;

/// Takes note of a resource's list; one without ids is none.
pub fn note_list(listed: &mut Listed, resource: &ResourceName, devices: Arc<[GrantedDevice]>) {
    if devices.is_empty() {
        listed.remove(resource);
    } else {
        listed.insert(resource.clone(), devices);
    }
}

/// Since when devices have been gone that the ledger remembers.
pub type Gone = BTreeMap<DeviceId, Timestamp>;

/// Takes note of devices that have gone, or (`None`) are there again.
pub fn note_gone(gone: &mut Gone, devices: &[DeviceId], since: Option<Timestamp>) {
    for device in devices {
        match since {
            Some(since) => drop(gone.insert(device.clone(), since)),
            None => drop(gone.remove(device)),
        }
    }
}

/// One durable fact. The ledger is the fold of its entries, in order.
///
/// An entry carries the whole grant or a whole state, never a difference: applying one twice changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
pub enum Entry {
    /// A grant, new or (at the head of a journal segment) carried over in the state it has.
    Grant(Arc<Grant>),
    /// A grant moved on to another state.
    Moved {
        /// Which grant.
        alloc_id: AllocId,
        /// Its new state.
        #[serde(flatten)]
        state: GrantState,
    },
    /// A device got its id, and keeps it (I6).
    Named {
        /// The device's physical key ([`super::Device::key`]).
        key: String,
        /// Its id.
        id: DeviceId,
    },
    /// The list of a resource has other ids than before: the next life of the daemon does not drop one at once (I3).
    Listed {
        /// The resource.
        resource: ResourceName,
        /// Every id in the list; none when the resource is no longer offered.
        devices: Arc<[GrantedDevice]>,
    },
    /// What is known of a device's health (I5).
    Judged {
        /// The device.
        device: DeviceId,
        /// Its verdict; `None` when there is nothing to be remembered any more.
        verdict: Option<Box<Verdict>>,
    },
    /// Devices are neither found, listed nor held since then; or they are again. What is remembered of a device that has gone is
    /// forgotten in the end ([`Entry::Forgotten`]).
    Gone {
        /// Which.
        devices: Vec<DeviceId>,
        /// Since when; `None` when they are there again.
        since: Option<Timestamp>,
    },
    /// Nothing is remembered any more of these devices, which have gone: neither their ids nor what was known of their health.
    Forgotten {
        /// Which.
        devices: Vec<DeviceId>,
    },
    /// How far the hook has come that is owed to a device after its release. It stands in front of the release that owes it,
    /// so a write that was cut off has both or a hook that nobody runs yet.
    Hook(Box<PendingHook>),
}
