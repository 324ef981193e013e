//! The lists for the kubelet's device-plugin API, when claims get the devices of some resources.

use super::held::Held;
use crate::domain::{Api, Health, Inventory, Offering, Reason};
use std::sync::Arc;

/// The lists for the kubelet. A resource whose devices are given to claims is among them only while
/// a container holds one of its devices through the device plugin. The kubelet starts this
/// container again with the same ids, so they stay in the list as they are (I3). All others are
/// unhealthy there, so no container gets them by number. After a change back from claims, the ids
/// that claims still hold are unhealthy too.
///
/// Unchanged lists are shared with `before`, and everything with the inventory if no resource is
/// for claims and no claim holds a device.
pub(crate) fn plugin_lists(
    inventory: &Arc<Inventory>,
    held: &Held,
    before: &Arc<Inventory>,
) -> Arc<Inventory> {
    let is_whole = |offering: &Arc<Offering>| {
        offering.spec.api == Api::Plugin && held.of_claims(&offering.spec.name).is_empty()
    };
    if inventory.resources.values().all(is_whole) {
        return Arc::clone(inventory);
    }
    let mut lists = Inventory::default();
    for (name, offering) in &inventory.resources {
        let list = if is_whole(offering) {
            Some(Arc::clone(offering))
        } else {
            reduced(offering, held).map(|list| match before.resources.get(name) {
                Some(before) if **before == list => Arc::clone(before),
                _ => Arc::new(list),
            })
        };
        lists.resources.extend(list.map(|list| (name.clone(), list)));
    }
    if lists == **before { Arc::clone(before) } else { Arc::new(lists) }
}

/// The list without the ids that containers must not get by number. `None` for a resource for
/// claims if no container has a device of it by number.
fn reduced(offering: &Offering, held: &Held) -> Option<Offering> {
    let name = &offering.spec.name;
    let (by_number, by_claims) = (held.of_plugin(name), held.of_claims(name));
    let is_for_claims = offering.spec.api == Api::Dra;
    if is_for_claims && by_number.is_empty() {
        return None;
    }
    let mut list = offering.clone();
    for (id, offered) in &mut list.devices {
        let is_out = by_claims.contains(id) || is_for_claims;
        if offered.health.is_healthy() && is_out && !by_number.contains(id) {
            offered.health = Health::Unhealthy(Reason::Deselected);
        }
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::super::held;
    use super::*;
    use crate::domain::{
        AllocId, Attributes, ClaimHold, ClaimRef, ContainerEdits, Device, DeviceClass, DeviceId,
        Grant, GrantState, GrantedDevice, Offered, ResourceSpec, Timestamp,
    };

    fn offered(id: &str) -> (DeviceId, Offered) {
        let device = Device {
            id: DeviceId::new(id),
            key: format!("dev:/dev/{id}"),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        (DeviceId::new(id), Offered { device: Arc::new(device), health: Health::Healthy })
    }

    /// The resources, each with its API and the devices `a` and `b`.
    fn inventory(resources: &[(&str, Api)]) -> Arc<Inventory> {
        let offering = |(name, api): &(&str, Api)| {
            let spec = ResourceSpec::new(format!("x.y/{name}").parse().unwrap(), DeviceClass::Char);
            let spec = Arc::new(ResourceSpec { api: *api, ..spec });
            let devices = [offered("a"), offered("b")].into();
            (spec.name.clone(), Arc::new(Offering { spec, devices }))
        };
        Arc::new(Inventory { resources: resources.iter().map(offering).collect() })
    }

    fn grant(resource: &str, id: &str) -> Grant {
        let device = GrantedDevice {
            id: DeviceId::new(id),
            key: String::new(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        };
        Grant {
            alloc_id: AllocId::new(id),
            resource: format!("x.y/{resource}").parse().unwrap(),
            devices: vec![device],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: GrantState::Granted,
        }
    }

    /// Each list, with the ids that the kubelet may give away.
    fn shown(lists: &Inventory) -> Vec<String> {
        let list = |offering: &Arc<Offering>| {
            let ids: Vec<String> = offering.healthy().iter().map(ToString::to_string).collect();
            let all = offering.devices.len();
            format!("{}: {} of {all}", offering.spec.name, ids.join(","))
        };
        lists.resources.values().map(list).collect()
    }

    #[test]
    fn a_resource_for_claims_is_listed_only_while_a_container_has_a_device_by_number() {
        let both = inventory(&[("claims", Api::Dra), ("number", Api::Plugin)]);
        let lists = |grants: &[Grant], before: &Arc<Inventory>| {
            plugin_lists(&both, &held(grants.iter()), before)
        };
        let none = lists(&[], &Arc::default());
        assert_eq!(shown(&none), ["x.y/number: a,b of 2"]);
        let one = lists(&[grant("claims", "a"), grant("number", "b")], &none);
        assert_eq!(shown(&one), ["x.y/claims: a of 2", "x.y/number: a,b of 2"]);
        let claims = &one.resources[&"x.y/claims".parse().unwrap()];
        assert_eq!(
            claims.devices[&DeviceId::new("b")].health,
            Health::Unhealthy(Reason::Deselected)
        );
        // The last one is released.
        let mut released = grant("claims", "a");
        released.state = GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(2),
            released_by: "pod_gone".into(),
            other_pods: Vec::new(),
        };
        assert_eq!(shown(&lists(&[released], &one)), ["x.y/number: a,b of 2"]);
    }

    #[test]
    fn an_id_that_a_claim_holds_is_not_given_away_by_number() {
        let plugin = inventory(&[("number", Api::Plugin)]);
        let mut of_claim = grant("number", "a");
        of_claim.claim = Some(Arc::new(ClaimHold {
            claim: ClaimRef { uid: "u".into(), namespace: "n".into(), name: "c".into() },
            allocation: "1".into(),
            devices: Vec::new(),
        }));
        let lists = plugin_lists(&plugin, &held([&of_claim].into_iter()), &Arc::default());
        assert_eq!(shown(&lists), ["x.y/number: b of 2"]);
        // A claim is no reason to keep the list of a resource for claims.
        let claims = inventory(&[("number", Api::Dra)]);
        let lists = plugin_lists(&claims, &held([&of_claim].into_iter()), &Arc::default());
        assert!(lists.resources.is_empty());
    }

    #[test]
    fn unchanged_lists_are_shared() {
        let plugin = inventory(&[("number", Api::Plugin)]);
        let lists = plugin_lists(&plugin, &Held::default(), &Arc::default());
        assert!(Arc::ptr_eq(&lists, &plugin));
        let claims = inventory(&[("claims", Api::Dra), ("number", Api::Plugin)]);
        let grants = [grant("claims", "a")];
        let first = plugin_lists(&claims, &held(grants.iter()), &lists);
        let number = "x.y/number".parse().unwrap();
        assert!(Arc::ptr_eq(&first.resources[&number], &claims.resources[&number]));
        let same = inventory(&[("claims", Api::Dra), ("number", Api::Plugin)]);
        let second = plugin_lists(&same, &held(grants.iter()), &first);
        assert!(Arc::ptr_eq(&first, &second));
    }
}
