//! What becomes of a device id after the switch: whether Holdfast offers the same id, or the same
//! device in another form. Pure.

use crate::domain::{
    ContainerEdits, Device, DeviceId, Health, Reason, ResourceName, ResourceSpec, Sharing,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An id that Holdfast would offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Offer {
    /// The device behind it; of a pool, its first member.
    pub(super) device: Arc<Device>,
    /// Its health by this scan; `None` if that cannot be determined.
    pub(super) health: Option<Health>,
}

/// The ids that Holdfast would offer, by resource.
pub(super) type Plan = BTreeMap<ResourceName, BTreeMap<DeviceId, Offer>>;

/// The ids of one resource with these devices, in the order of their ids.
pub(super) fn offers(spec: &ResourceSpec, devices: &[Offer]) -> BTreeMap<DeviceId, Offer> {
    if matches!(spec.sharing, Sharing::Pool(_)) {
        // A pool is healthy with one healthy member.
        let member = devices.iter().find(|offer| offer.health.is_some_and(Health::is_healthy));
        let pool = member.or(devices.first()).into_iter();
        return pool
            .flat_map(|pool| spec.sharing.ids(&pool.device.id).map(|id| (id, pool.clone())))
            .collect();
    }
    let ids = |offer: &Offer| {
        let ids: Vec<DeviceId> = spec.sharing.ids(&offer.device.id).collect();
        ids.into_iter().map(|id| (id, offer.clone())).collect::<Vec<_>>()
    };
    devices.iter().flat_map(ids).collect()
}

/// How a device is offered, if not as the id that the kubelet has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// The same id under another resource name.
    OtherName,
    /// Under another id.
    OtherId,
    /// The whole device is an id now; its shares would be ids.
    AsShares,
    /// A share is an id now; the whole device would be one.
    AsWhole,
    /// With fewer shares than now.
    FewerShares,
    /// The whole device is an id now; its parts would be ids.
    AsParts,
    /// A part is an id now; the device that it is a part of would be one.
    WithinWhole,
}

/// What becomes of an id after the switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// It stays: the same id under the same name.
    Same,
    /// It stays, and is unhealthy for this reason. The kubelet rejects its pod when it restarts.
    Unhealthy(Reason),
    /// Its device is offered in another form.
    Otherwise {
        /// The difference.
        how: How,
        /// The resource that offers it.
        resource: ResourceName,
        /// The ids there, sorted.
        ids: Vec<DeviceId>,
    },
    /// Its device is present, and no resource offers it.
    NotOffered(DeviceId),
    /// No device of the node has this id.
    NoDevice,
    /// Unknown: parts of the host could not be read, and the device may be there.
    Unread,
    /// The user keeps the plugin of this resource.
    Kept,
}

impl Fate {
    /// Whether a pod that holds the id needs a drain; `None` if that is unknown.
    #[must_use]
    pub(super) fn needs_drain(&self) -> Option<bool> {
        match self {
            Fate::Same | Fate::Kept => Some(false),
            Fate::Unread => None,
            Fate::Unhealthy(_) | Fate::Otherwise { .. } | Fate::NotOffered(_) | Fate::NoDevice => {
                Some(true)
            }
        }
    }
}

/// The host as Holdfast finds it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host<'a> {
    /// What Holdfast would offer.
    pub(super) plan: &'a Plan,
    /// Every device, offered or not.
    pub(super) devices: &'a [Arc<Device>],
    /// Whether parts of the host could not be read.
    pub(super) is_unread: bool,
}

impl Host<'_> {
    /// What becomes of an id. `edits` is the answer to the container that holds it, if this is the
    /// only id of that container.
    #[must_use]
    pub(super) fn fate(
        &self,
        resource: &ResourceName,
        id: &DeviceId,
        edits: Option<&ContainerEdits>,
    ) -> Fate {
        if let Some(offer) = self.plan.get(resource).and_then(|ids| ids.get(id)) {
            return offer.health.and_then(Health::reason).map_or(Fate::Same, Fate::Unhealthy);
        }
        let behind = self.behind(id, edits);
        if let Some(fate) = behind.iter().find_map(|device| self.elsewhere(resource, id, device)) {
            return fate;
        }
        match behind.first() {
            _ if self.is_unread => Fate::Unread,
            Some(device) => Fate::NotOffered(device.id.clone()),
            None => Fate::NoDevice,
        }
    }

    /// How Holdfast offers this device, or its parts, or its whole; the same resource first.
    fn elsewhere(&self, resource: &ResourceName, id: &DeviceId, device: &Device) -> Option<Fate> {
        let others = self.plan.iter().filter(|(name, _)| *name != resource);
        let resources = self.plan.get_key_value(resource).into_iter().chain(others);
        let parent = device.attribute("parent");
        let mut related = None;
        for (name, offered) in resources {
            let ids_of = |is_it: &dyn Fn(&Device) -> bool| -> Vec<DeviceId> {
                offered
                    .iter()
                    .filter(|(_, offer)| is_it(&offer.device))
                    .map(|(id, _)| id.clone())
                    .collect()
            };
            let fate = |how, ids| Fate::Otherwise { how, resource: name.clone(), ids };
            let same = ids_of(&|other| other.key == device.key);
            if let Some(first) = same.first() {
                return Some(fate(form(id, first, &same), same));
            }
            let parts = ids_of(&|other| other.attribute("parent") == Some(device.id.as_str()));
            let wholes = ids_of(&|other| parent == Some(other.id.as_str()));
            for (how, ids) in [(How::AsParts, parts), (How::WithinWhole, wholes)] {
                if !ids.is_empty() && related.is_none() {
                    related = Some(fate(how, ids));
                }
            }
        }
        related
    }

    /// The devices that the id may mean, the most certain one first.
    fn behind(&self, id: &DeviceId, edits: Option<&ContainerEdits>) -> Vec<&Device> {
        let whole = id.shared().unwrap_or_else(|| id.clone());
        let all = || self.devices.iter().map(AsRef::as_ref);
        let by_identity = all().filter(|device| device.id == whole);
        let by_attribute = all().filter(|device| is_called(device, whole.as_str()));
        let by_node = all().filter(|device| has_node_of(device, whole.as_str()));
        let mut by_answer: Vec<&Device> =
            all().filter(|device| edits.is_some_and(|edits| is_in_answer(device, edits))).collect();
        // A MIG instance's container gets the node of its GPU too.
        by_answer.sort_by_key(|device| device.attribute("part").is_none());
        by_identity.chain(by_attribute).chain(by_node).chain(by_answer).collect()
    }
}

/// How the device of `id` is offered by these ids.
fn form(id: &DeviceId, first: &DeviceId, offered: &[DeviceId]) -> How {
    if offered.contains(id) {
        return How::OtherName;
    }
    let whole = |id: &DeviceId| id.shared().unwrap_or_else(|| id.clone());
    match (id.shared(), first.shared()) {
        _ if whole(id) != whole(first) => How::OtherId,
        (None, Some(_)) => How::AsShares,
        (Some(_), None) => How::AsWhole,
        (Some(_), Some(_)) => How::FewerShares,
        (None, None) => How::OtherId,
    }
}

/// Whether another plugin may name the device so: by its UUID, its identity or its PCI address.
fn is_called(device: &Device, name: &str) -> bool {
    let is = |attribute| device.attribute(attribute) == Some(name);
    let is_address = || {
        device.pci.as_ref().is_some_and(|function| function.address.to_string() == name)
            && device.attribute("part").is_none()
    };
    is("uuid") || is("mdev_uuid") || is("unique_id") || is_address()
}

/// Whether the name is that of the device's node below `/dev`. GKE's plugin names GPUs `nvidia0`,
/// their shares `nvidia0/vgpu3`, and MIG instances `nvidia0/gi1`
/// (container-engine-accelerators: `pkg/gpu/nvidia/manager.go`, `mig/mig.go`, `gpusharing.go`).
fn has_node_of(device: &Device, name: &str) -> bool {
    let numbered = |text: &str, prefix: &str| {
        text.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let name = match name.rsplit_once('/') {
        Some((whole, share)) if numbered(share, "vgpu") => whole,
        _ => name,
    };
    if let Some((gpu, instance)) = name.split_once("/gi") {
        let node = format!("/dev/{gpu}");
        return device.attribute("part") == Some("mig")
            && device.attribute("gi") == Some(instance)
            && device.nodes.iter().any(|known| known.container == node);
    }
    let node = format!("/dev/{name}");
    device.own_nodes().any(|known| known.container == node)
}

/// Whether the answer contains every node of its own that the device needs.
fn is_in_answer(device: &Device, edits: &ContainerEdits) -> bool {
    let mut nodes = device.own_nodes().peekable();
    nodes.peek().is_some()
        && nodes.all(|node| edits.devices.iter().any(|given| given.host == node.host))
}
