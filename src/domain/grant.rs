//! Grants: which container holds which devices. The ledger rebuilds them from its entries.

use super::claim::ClaimHold;
use super::device_id::DeviceId;
use super::edits::ContainerEdits;
use super::object::{Object, is_driver_wide, share, share_with_claim};
use super::pod::PodRef;
use super::resource_name::ResourceName;
use super::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// The permanent name of one grant: a UUID of version 7, so that ids sort by time.
///
/// It travels in the Allocate response as the annotation `holdfast.dev/alloc-id`, which the kubelet
/// keeps in its checkpoint. The checkpoint then shows exactly which pod and container a grant went
/// to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AllocId(Arc<str>);

/// The prefix of the id of a grant that another plugin made.
const OTHER_PLUGIN: &str = "other-plugin";

impl AllocId {
    /// The annotation's key.
    pub const ANNOTATION: &'static str = "holdfast.dev/alloc-id";

    /// Accepts any text.
    pub fn new(text: impl AsRef<str>) -> Self {
        AllocId(Arc::from(text.as_ref()))
    }

    /// The id for a grant that another plugin made. Its answer carries no id, so this one is
    /// derived from the entry in the kubelet's checkpoint, and every read derives the same id.
    #[must_use]
    pub fn of_other_plugin(pod_uid: &str, container: &str, resource: &ResourceName) -> Self {
        AllocId(format!("{OTHER_PLUGIN}:{pod_uid}/{container}/{resource}").into())
    }

    /// Whether another plugin made the grant.
    #[must_use]
    pub fn is_of_other_plugin(&self) -> bool {
        self.0.strip_prefix(OTHER_PLUGIN).is_some_and(|rest| rest.starts_with(':'))
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The time in the id: a UUID of version 7 begins with the milliseconds since 1970, 48 bits of
    /// them (RFC 9562). `None` for any other text.
    #[must_use]
    pub fn made_at(&self) -> Option<Timestamp> {
        let (high, rest) = self.0.split_once('-')?;
        let (low, rest) = rest.split_once('-')?;
        let is_v7 = high.len() == 8 && low.len() == 4 && rest.starts_with('7');
        is_v7
            .then(|| u64::from_str_radix(&format!("{high}{low}"), 16).ok().map(Timestamp))
            .flatten()
    }
}

impl fmt::Display for AllocId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Identifies one start of the kubelet, by its registration socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KubeletGeneration {
    /// Inode of `kubelet.sock`.
    pub inode: u64,
    /// When the socket was made, nanoseconds since 1970: an inode number alone may be used again.
    /// This is its modification time, which `bind` sets; a `chmod` or a relabelling of the socket
    /// does not change it.
    #[serde(rename = "ctime_ns")]
    pub made_ns: i64,
}

impl KubeletGeneration {
    /// When the socket was made; `None` if the clock was before 1970.
    #[must_use]
    pub fn made_at(&self) -> Option<Timestamp> {
        u64::try_from(self.made_ns / 1_000_000).ok().map(Timestamp)
    }
}

/// One id of a grant, with the facts that keep it in the list after the device was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantedDevice {
    /// The id in the kubelet's request.
    pub id: DeviceId,
    /// The physical key of the device behind it ([`super::Device::key`]).
    pub key: String,
    /// Its NUMA nodes at that time; the kubelet has copied them into its own record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numa_nodes: Vec<u32>,
    /// Its nodes on the host, except those in the answer. A container reaches these others by a
    /// name: a GPU's, or a CDI name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// The objects that are held with it ([`super::Device::objects`]); empty if they were not
    /// recorded: [`Grant::objects`] returns them in any case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Object>,
}

impl GrantedDevice {
    /// The PCI function that its key names, `0000:18:00.0`; the key of a part names the whole
    /// function.
    #[must_use]
    pub fn function(&self) -> Option<&str> {
        self.key.strip_prefix("pci:")?.split('/').next()
    }
}

/// The state of a grant. Only proof changes it; absence alone is no proof (I4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum GrantState {
    /// Allocate was answered; the container is not known yet.
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
    /// Bound, but the kubelet no longer lists the pod. Still held: the proof of release is not
    /// complete.
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
    /// A claim holds it ([`Grant::claim`]): the kubelet has asked to prepare the claim.
    Prepared {
        /// The pods that use the claim, in the order in which the kubelet named them.
        pods: Vec<PodRef>,
        /// When it was first prepared.
        prepared_at: Timestamp,
        /// When the kubelet unprepared it, if a process of a pod still ran or may have run. Still
        /// held until that process has ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unprepared_at: Option<Timestamp>,
    },
    /// Released, by the named proof.
    Released {
        /// The pod that held it, of several the first; `None` when it was never bound.
        pod: Option<PodRef>,
        /// The container's name, where it was bound.
        container: Option<String>,
        /// When it was bound, or the claim prepared.
        bound_at: Option<Timestamp>,
        /// When the proof was complete.
        released_at: Timestamp,
        /// The proof, as the documentation names it: `pod_gone`, `handed_on`, `superseded`,
        /// `never_started`; for a claim `unprepared`, `claim_gone`, `reallocated`,
        /// `never_prepared`, `operator`.
        released_by: String,
        /// The other pods that used the claim.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        other_pods: Vec<PodRef>,
    },
}

impl GrantState {
    /// Whether only a claim's grant has this state.
    #[must_use]
    pub fn is_of_claim(&self) -> bool {
        match self {
            GrantState::Prepared { .. } => true,
            GrantState::Released { other_pods, .. } => !other_pods.is_empty(),
            GrantState::Granted | GrantState::Bound { .. } | GrantState::Suspect { .. } => false,
        }
    }
}

/// One answered Allocate: the ids of one container, and their state. Or the devices of one resource
/// in a claim that was prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its id.
    pub alloc_id: AllocId,
    /// The resource.
    pub resource: ResourceName,
    /// The ids, in the order of the request.
    pub devices: Vec<GrantedDevice>,
    /// The answer to the container: the kubelet replays it at every container start, so it must
    /// stay true. Empty for a claim.
    pub edits: ContainerEdits,
    /// The claim that holds the devices; `None` if a container got them by an Allocate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Arc<ClaimHold>>,
    /// The boot of the grant (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The kubelet that sent the request; `None` if its socket could not be read.
    pub kubelet: Option<KubeletGeneration>,
    /// The time of the grant.
    pub granted_at: Timestamp,
    /// The version of Holdfast that made the grant.
    pub version: String,
    /// Its state.
    #[serde(flatten)]
    pub state: GrantState,
}

impl Grant {
    /// The objects that its container holds. If they were not recorded, as in grants of earlier
    /// versions and of a pool, they are derived from the keys and from the nodes in the answer.
    #[must_use]
    pub fn objects(&self) -> Vec<Object> {
        let of = |device: &GrantedDevice| -> Vec<Object> {
            if !device.objects.is_empty() {
                return device.objects.clone();
            }
            let is_char = device.key.starts_with("dev:");
            let answered = self.edits.devices.iter().map(|node| (&node.host, &node.container));
            let nodes = answered.chain(device.nodes.iter().map(|node| (node, node)));
            let own = nodes
                .filter(|(_, name)| is_char || !is_driver_wide(name))
                .map(|(node, _)| Object::node(node));
            // The id of a network function is its address.
            let whole = device.id.shared().unwrap_or_else(|| device.id.clone());
            let function =
                whole.as_str().parse().ok().filter(|_| device.key.is_empty()).map(Object::function);
            Object::of_key(&device.key).into_iter().chain(function).chain(own).collect()
        };
        self.held_devices().flat_map(of).collect()
    }

    /// The devices that are held, which excludes other holders. A device that a claim has only with
    /// access for an administrator is not held.
    pub fn held_devices(&self) -> impl Iterator<Item = &GrantedDevice> {
        let is_held = |device: &&GrantedDevice| {
            self.claim.as_ref().is_none_or(|claim| !claim.is_for_admin(&device.id))
        };
        self.devices.iter().filter(is_held)
    }

    /// Whether it was made in another boot than this one, as far as both are known.
    #[must_use]
    pub fn is_of_former_boot(&self, boot_id: &str) -> bool {
        !self.boot_id.is_empty() && !boot_id.is_empty() && self.boot_id != boot_id
    }

    /// Replaces the device numbers of a former boot by those of the nodes now, as far as the host
    /// shows them: `behind` returns the objects behind a node. A grant of this boot stays as it is,
    /// and so does one whose boot is not known. A claim holds no nodes until it is prepared again,
    /// and then those of its devices in this boot.
    #[must_use]
    pub fn in_boot(mut self, boot_id: &str, behind: impl Fn(&str) -> Vec<Object>) -> Self {
        if !self.is_of_former_boot(boot_id) {
            return self;
        }
        for device in self.devices.iter_mut().filter(|device| !device.objects.is_empty()) {
            if self.claim.is_some() && device.objects.iter().any(|object| !object.is_of_boot()) {
                device.objects.retain(|object| !object.is_of_boot());
                continue;
            }
            device.objects.retain(|object| !object.is_number());
            let nodes = device.objects.iter().filter_map(Object::as_node);
            let now: BTreeSet<Object> = nodes.flat_map(&behind).collect();
            let new: Vec<_> = now.into_iter().filter(|it| !device.objects.contains(it)).collect();
            device.objects.extend(new);
        }
        self
    }

    /// Adds the objects of its devices that were not recorded, as far as the host shows them now:
    /// `behind` returns the object behind a node. The runtime opens the nodes of the answer by
    /// their paths at every start of the container, so the objects there now are the held ones.
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

    /// Whether an id of the `wanted` grant may be granted at the same time although it leads to an
    /// object of this grant. The grants of one claim are one holder. Two claims that were restored
    /// had the object before.
    #[must_use]
    pub fn is_beside(&self, wanted: &Grant, id: &DeviceId) -> bool {
        let rule = match (&self.claim, &wanted.claim) {
            (None, None) => share,
            (Some(ours), Some(theirs)) if ours.claim.uid == theirs.claim.uid => return true,
            (Some(ours), Some(theirs)) if ours.is_restored() && theirs.is_restored() => {
                return true;
            }
            _ => share_with_claim,
        };
        // A claim passes no share on, so it has one alone.
        let is_of_claim = self.claim.is_some() || wanted.claim.is_some();
        let has_it =
            || self.resource == wanted.resource && self.held_devices().any(|it| it.id == *id);
        if is_of_claim && id.shared().is_some() && has_it() {
            return false;
        }
        self.devices.iter().any(|held| rule((&self.resource, &held.id), (&wanted.resource, id)))
    }

    /// Whether it still holds its devices: true in every state but released.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !matches!(self.state, GrantState::Released { .. })
    }

    /// The pod, if it is known; of several pods that use a claim, the first.
    #[must_use]
    pub fn pod(&self) -> Option<&PodRef> {
        match &self.state {
            GrantState::Granted => None,
            GrantState::Bound { pod, .. } | GrantState::Suspect { pod, .. } => Some(pod),
            GrantState::Prepared { pods, .. } => pods.first(),
            GrantState::Released { pod, .. } => pod.as_ref(),
        }
    }

    /// The holder in a message: its claim, or its pod as far as it is known.
    #[must_use]
    pub fn holder(&self) -> String {
        match (&self.claim, self.pod()) {
            (Some(hold), _) => format!("claim {}", hold.claim),
            (None, Some(pod)) => format!("pod {pod}"),
            (None, None) => format!("a container that got it by grant {}", self.alloc_id),
        }
    }

    /// All known pods: more than one only for a claim.
    pub fn pods(&self) -> impl Iterator<Item = &PodRef> {
        let others: &[PodRef] = match &self.state {
            GrantState::Prepared { pods, .. } => pods.get(1..).unwrap_or_default(),
            GrantState::Released { other_pods, .. } => other_pods,
            GrantState::Granted | GrantState::Bound { .. } | GrantState::Suspect { .. } => &[],
        };
        self.pod().into_iter().chain(others)
    }

    /// Whether the kubelet's checkpoint of device plugins has named its container.
    #[must_use]
    pub fn is_placed(&self) -> bool {
        matches!(self.state, GrantState::Bound { .. } | GrantState::Suspect { .. })
    }

    /// The container's name, if it is known. The kubelet does not name the containers of a claim.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match &self.state {
            GrantState::Granted | GrantState::Prepared { .. } => None,
            GrantState::Bound { container, .. } | GrantState::Suspect { container, .. } => {
                Some(container)
            }
            GrantState::Released { container, .. } => container.as_deref(),
        }
    }

    /// The state's name, as `who -o json` prints it.
    #[must_use]
    pub fn state_name(&self) -> &'static str {
        match self.state {
            GrantState::Granted => "granted",
            GrantState::Bound { .. } => "bound",
            GrantState::Suspect { .. } => "suspect",
            GrantState::Prepared { .. } => "prepared",
            GrantState::Released { .. } => "released",
        }
    }
}
