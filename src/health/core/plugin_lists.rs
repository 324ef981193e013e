//! The lists for the kubelet's device-plugin API, when claims get the devices of some resources.

use super::held::Held;
use crate::domain::{Api, Grant, Health, HeldBy, Inventory, Offering, Reason};
use std::sync::Arc;

/// The lists for the kubelet. [`Api::is_in_list`] decides about each id. A resource whose free
/// devices are not given by number is among the lists only while a container holds one of its
/// devices through the device plugin: the kubelet starts this container again with the same ids, so
/// they stay as they are (I3). Such a list has no NUMA nodes: other pods get the devices by claims
/// for the same number, and the kubelet's Topology Manager would reject them for the lack of a
/// healthy device near one.
///
/// Unchanged lists are shared with `before`, and everything with the inventory if all free devices
/// are given by number and no claim holds one.
pub(crate) fn plugin_lists(
    inventory: &Arc<Inventory>,
    held: &Held,
    before: &Arc<Inventory>,
) -> Arc<Inventory> {
    let is_whole = |offering: &Arc<Offering>| {
        offering.spec.api.gives_by_number() && held.of_claims(&offering.spec.name).is_empty()
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

/// Whether the lists depend on who holds a device: claims have devices of the node, or may get
/// some. Otherwise a list stays the same when a device is given to a container.
pub(crate) fn depend_on_holders<'a>(
    inventory: &Inventory,
    mut grants: impl Iterator<Item = &'a Grant>,
) -> bool {
    inventory.resources.values().any(|offering| offering.spec.api != Api::Plugin)
        || grants.any(|grant| grant.claim.is_some())
}

/// The list without the ids that containers must not get by number. `None` if no id is given by
/// number and no container has one.
fn reduced(offering: &Offering, held: &Held) -> Option<Offering> {
    let (api, name) = (offering.spec.api, &offering.spec.name);
    let (by_number, by_claims) = (held.of_plugin(name), held.of_claims(name));
    if !api.gives_by_number() && by_number.is_empty() {
        return None;
    }
    let mut list = offering.clone();
    if !api.gives_by_number() {
        Arc::make_mut(&mut list.spec).topology = false;
    }
    for (id, offered) in &mut list.devices {
        let held = match (by_number.contains(id), by_claims.contains(id)) {
            (true, _) => HeldBy::Container,
            (false, true) => HeldBy::Claim,
            (false, false) => HeldBy::Nothing,
        };
        if offered.health.is_healthy() && !api.is_in_list(held) {
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
        GrantState, GrantedDevice, Offered, ResourceSpec, Timestamp,
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

    fn of_claim(resource: &str, id: &str) -> Grant {
        let claim = ClaimRef { uid: "u".into(), namespace: "n".into(), name: "c".into() };
        let hold = ClaimHold { claim, allocation: "1".into(), devices: Vec::new() };
        Grant { claim: Some(Arc::new(hold)), ..grant(resource, id) }
    }

    /// The device `a` is held by each kind of holder, and `b` is free.
    #[test]
    fn the_api_of_the_resource_decides_what_the_list_says_of_each_device() {
        let of_both = Api::Returning { by_number: true };
        for (api, free, by_container, by_claim) in [
            (Api::Plugin, Some("a,b"), Some("a,b"), Some("b")),
            (Api::Dra, None, Some("a"), None),
            (Api::Both, Some("a,b"), Some("a,b"), Some("b")),
            (of_both, Some("a,b"), Some("a,b"), Some("b")),
            (Api::Returning { by_number: false }, None, Some("a"), None),
        ] {
            let inventory = inventory(&[("r", api)]);
            let list = |grants: &[Grant]| {
                shown(&plugin_lists(&inventory, &held(grants.iter()), &Arc::default()))
            };
            let expected = |ids: Option<&str>| -> Vec<String> {
                ids.map(|ids| format!("x.y/r: {ids} of 2")).into_iter().collect()
            };
            assert_eq!(list(&[]), expected(free), "{api:?}");
            assert_eq!(list(&[grant("r", "a")]), expected(by_container), "{api:?}");
            // A list of a resource that is only for claims has no NUMA nodes.
            let held = held([&grant("r", "a")].into_iter());
            let spec = plugin_lists(&inventory, &held, &Arc::default());
            assert_eq!(spec.resources[&"x.y/r".parse().unwrap()].spec.topology, free.is_some());
            assert_eq!(list(&[of_claim("r", "a")]), expected(by_claim), "{api:?}");
        }
    }

    #[test]
    fn an_id_that_a_claim_holds_is_not_given_away_by_number() {
        let plugin = inventory(&[("number", Api::Plugin)]);
        let of_claim = of_claim("number", "a");
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
