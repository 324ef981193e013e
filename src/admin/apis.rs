//! Which API of Kubernetes gives the devices of each resource, and how many each can give now: for
//! `migrate status` and `migrate plan`.

use super::Views;
use crate::domain::{Api, DeviceId, Grant, HeldBy, InSlice, Offering, ResourceName, ResourceSpec};
use crate::slices::published::Published;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The answer of `/v1/apis`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApisReport {
    /// Whether the driver for claims runs (`[dra] enabled` at the start).
    pub dra: bool,
    /// The resources by name.
    pub resources: Vec<ApiReport>,
}

/// One resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiReport {
    /// Its name.
    pub name: String,
    /// The key `api`: `plugin`, `dra` or `both`.
    pub api: String,
    /// Whether it is on the way from claims to the device plugin ([`Api::Returning`]).
    pub returning: bool,
    /// Whether the kubelet should have a list of it.
    pub listed: bool,
    /// Whether the kubelet has opened our stream.
    pub registered: bool,
    /// Free devices that the kubelet may give by number: healthy in its list.
    pub by_number: usize,
    /// Free devices that the scheduler may allocate to claims: in the slices, without a taint.
    pub by_claim: usize,
    /// Devices in the slices, as the API server has them.
    pub published: usize,
    /// Whether the kubelet calls before a container starts (`pre_start_required`).
    pub pre_start: bool,
}

impl ApisReport {
    pub(super) fn of(views: &Views) -> Self {
        let inventory = Arc::clone(&views.inventory.borrow());
        let lists = Arc::clone(&views.lists.borrow());
        let grants = Arc::clone(&views.grants.borrow());
        let published = views.published.borrow().clone();
        let registrations = views.registrations.borrow();
        // What the configuration no longer has cannot move: it is offered for its holders alone.
        let configured = inventory.resources.iter().filter(|(_, it)| !it.spec.is_orphan());
        let report = |(name, offering): (&ResourceName, &Arc<Offering>)| ApiReport {
            listed: lists.resources.contains_key(name),
            registered: registrations.get(name).is_some_and(|status| status.registered),
            ..report(offering, &grants, published.as_deref())
        };
        ApisReport { dra: published.is_some(), resources: configured.map(report).collect() }
    }
}

/// What the table of [`Api`] makes of the devices and their holders.
fn report(offering: &Offering, grants: &[Arc<Grant>], published: Option<&Published>) -> ApiReport {
    let ResourceSpec { name, api, .. } = &*offering.spec;
    let held = |by_claim: bool| -> BTreeSet<&DeviceId> {
        let is_it = |it: &&Arc<Grant>| {
            it.is_live() && it.resource == *name && it.claim.is_some() == by_claim
        };
        let held = grants.iter().filter(is_it).flat_map(|grant| grant.held_devices());
        held.map(|device| &device.id).collect()
    };
    let (by_number, by_claims) = (held(false), held(true));
    let free = offering.devices.iter().filter(|(id, offered)| {
        offered.health.is_healthy() && !by_number.contains(id) && !by_claims.contains(id)
    });
    let free = free.count();
    let is_offered = api.in_slice(HeldBy::Nothing) == InSlice::Offered;
    ApiReport {
        name: name.to_string(),
        api: api.as_str().to_owned(),
        returning: matches!(api, Api::Returning { .. }),
        by_number: if api.gives_by_number() { free } else { 0 },
        by_claim: if is_offered && published.is_some() { free } else { 0 },
        published: published.map_or(0, |it| it.devices_of(name.as_str())),
        pre_start: offering.spec.needs_pre_start(),
        ..ApiReport::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        AllocId, Attributes, ClaimHold, ClaimRef, ContainerEdits, Device, DeviceClass, GrantState,
        GrantedDevice, Health, Offered, Reason, Timestamp,
    };

    /// The devices `a` to `d`; `d` is unhealthy.
    fn offering(api: Api) -> Offering {
        let device = |id: &str| {
            let device = Device {
                id: DeviceId::new(id),
                key: format!("dev:/dev/{id}"),
                class: DeviceClass::Char,
                pci: None,
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: Attributes::default(),
            };
            let health =
                if id == "d" { Health::Unhealthy(Reason::Cordoned) } else { Health::Healthy };
            (DeviceId::new(id), Offered { device: Arc::new(device), health })
        };
        let spec = ResourceSpec::new("x.y/z".parse().unwrap(), DeviceClass::Char);
        let spec = Arc::new(ResourceSpec { api, ..spec });
        Offering { spec, devices: ["a", "b", "c", "d"].map(device).into() }
    }

    fn grant(id: &str, by_claim: bool) -> Arc<Grant> {
        let claim = ClaimRef { uid: "u".into(), namespace: "n".into(), name: "c".into() };
        let hold = ClaimHold { claim, allocation: "1".into(), devices: Vec::new() };
        Arc::new(Grant {
            alloc_id: AllocId::new(id),
            resource: "x.y/z".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: DeviceId::new(id),
                key: String::new(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: ContainerEdits::default(),
            claim: by_claim.then(|| Arc::new(hold)),
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: GrantState::Granted,
        })
    }

    #[test]
    fn a_free_and_healthy_device_is_for_the_apis_that_give_it() {
        let published = Published { resources: vec![("x.y/z".into(), 3)], ..Published::default() };
        let returning = |by_number| Api::Returning { by_number };
        for (api, word, by_number, by_claim) in [
            (Api::Plugin, "plugin", 2, 0),
            (Api::Dra, "dra", 0, 2),
            (Api::Both, "both", 2, 2),
            (returning(true), "plugin", 2, 0),
            (returning(false), "plugin", 0, 0),
        ] {
            for by_a_claim in [true, false] {
                let grants = [grant("a", by_a_claim)];
                let report = report(&offering(api), &grants, Some(&published));
                assert_eq!((report.by_number, report.by_claim), (by_number, by_claim), "{api:?}");
                assert_eq!(report.returning, matches!(api, Api::Returning { .. }));
                assert_eq!((&*report.api, report.published), (word, 3));
            }
        }
        let off = report(&offering(Api::Both), &[], None);
        assert_eq!((off.by_number, off.by_claim, off.published), (3, 0, 0));
    }
}
