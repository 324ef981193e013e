//! Which ids an Allocate may be given, and whether its answer can say what they bring: pure.

use crate::domain::{ContainerEdits, DeviceId, Health, Offered, Offering, PerContainer, Refusal, ResourceName, Wire};

/// Decides on one container's request. The answer holds the devices in the order of the request.
///
/// A held id is given again without a question: the kubelet decides (I2), and it does so on purpose when an init
/// container hands its devices on to the next container of its pod.
///
/// # Errors
/// When an id is unknown, asked for twice or unhealthy, when none is asked for, or more than a container may have. The error
/// names the id.
pub(crate) fn decide<'a>(offering: &'a Offering, ids: &[DeviceId]) -> Result<Vec<&'a Offered>, Refusal> {
    let resource = || offering.spec.name.clone();
    if ids.is_empty() {
        return Err(Refusal::Empty(resource()));
    }
    let mut granted = Vec::with_capacity(ids.len());
    for (index, id) in ids.iter().enumerate() {
        if ids[..index].contains(id) {
            return Err(Refusal::Duplicate { resource: resource(), id: id.clone() });
        }
        let offered = offering.devices.get(id).ok_or_else(|| Refusal::Unknown { resource: resource(), id: id.clone() })?;
        if let Health::Unhealthy(reason) = offered.health {
            return Err(Refusal::Unhealthy { resource: resource(), id: id.clone(), reason });
        }
        granted.push(offered);
    }
    match offering.spec.per_container {
        PerContainer::One if ids.len() > 1 => return Err(Refusal::TooMany { resource: resource(), asked: ids.len() }),
        PerContainer::Distinct => {
            let of = |index: usize| &granted[index].device.id;
            if let Some((first, second)) = (1..ids.len()).find_map(|b| Some(((0..b).find(|a| of(*a) == of(b))?, b))) {
                return Err(Refusal::SameDevice { resource: resource(), first: ids[first].clone(), second: ids[second].clone() });
            }
        }
        PerContainer::One | PerContainer::Any => {}
    }
    Ok(granted)
}

/// Decides whether an answer on this wire loses nothing that the container needs.
///
/// # Errors
/// When it would lose CDI names: the container would start without what they stand for.
pub(super) fn fits(resource: &ResourceName, edits: &ContainerEdits, wire: Wire) -> Result<(), Refusal> {
    if edits.cdi_devices.is_empty() || wire.has_cdi {
        return Ok(());
    }
    Err(Refusal::NoRoomForCdi { resource: resource.clone(), api: wire.api })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::domain::{Device, DeviceClass, Reason, ResourceSpec};
    use std::collections::BTreeMap;
    use std::sync::Arc;

    /// A resource with the given (id, device behind it, NUMA node).
    pub(in crate::serving) fn offering(ids: &[(&str, &str, Option<u32>)]) -> Offering {
        let spec = ResourceSpec::new("example.com/device".parse().unwrap(), DeviceClass::Gpu);
        let offered = |device: &str, numa: Option<u32>| Offered {
            device: Arc::new(Device {
                id: DeviceId::new(device),
                key: format!("dev:{device}"),
                class: DeviceClass::Gpu,
                pci: None,
                numa_nodes: numa.into_iter().collect(),
                nodes: Vec::new(),
                attributes: BTreeMap::new(),
            }),
            health: Health::Healthy,
        };
        let devices = ids.iter().map(|(id, device, numa)| (DeviceId::new(*id), offered(device, *numa))).collect();
        Offering { spec: Arc::new(spec), devices }
    }

    fn ids(ids: &[&str]) -> Vec<DeviceId> {
        ids.iter().map(|id| DeviceId::new(*id)).collect()
    }

    #[test]
    fn healthy_ids_are_given_in_the_order_of_the_request() {
        let offering = offering(&[("a", "a", None), ("b", "b", None)]);
        let granted = decide(&offering, &ids(&["b", "a"])).unwrap();
        assert_eq!(granted.iter().map(|offered| offered.device.id.as_str()).collect::<Vec<_>>(), ["b", "a"]);
    }

    #[test]
    fn every_refusal_names_the_id() {
        let mut offering = offering(&[("a", "a", None), ("sick", "sick", None)]);
        offering.devices.get_mut(&DeviceId::new("sick")).unwrap().health = Health::Unhealthy(Reason::NodeMissing);
        for (request, named) in [(vec!["a", "ghost"], "ghost"), (vec!["a", "a"], "`a`"), (vec!["a", "sick"], "sick"), (vec![], "no device")]
        {
            let error = decide(&offering, &ids(&request)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn one_container_has_no_more_than_it_may() {
        let shares = [("a::0", "a", None), ("a::1", "a", None), ("b::0", "b", None)];
        for (per_container, request, refused) in [
            (PerContainer::Any, vec!["a::0", "a::1"], None),
            (PerContainer::One, vec!["a::1"], None),
            (PerContainer::One, vec!["a::0", "b::0"], Some("may have 1 of example.com/device, but 2 are asked for")),
            (PerContainer::Distinct, vec!["a::1", "b::0"], None),
            (PerContainer::Distinct, vec!["a::0", "b::0", "a::1"], Some("`a::0` and `a::1` are of one")),
        ] {
            let mut offering = offering(&shares);
            offering.spec = Arc::new(ResourceSpec { per_container, ..(*offering.spec).clone() });
            let error = decide(&offering, &ids(&request)).err().map(|refusal| refusal.to_string());
            let said = error.as_ref().zip(refused).is_some_and(|(error, refused)| error.contains(refused) && !error.contains("  "));
            assert!(said || error.is_none() && refused.is_none(), "{per_container:?} {request:?}: {error:?}");
        }
    }

    #[test]
    fn what_the_wire_cannot_tell_is_refused_in_words_and_not_left_out() {
        let name: ResourceName = "example.com/device".parse().unwrap();
        let plain = ContainerEdits { envs: BTreeMap::from([("A".to_owned(), "1".to_owned())]), ..ContainerEdits::default() };
        let cdi = ContainerEdits { cdi_devices: vec!["example.com/device=0".to_owned()], ..plain.clone() };
        let [beta, alpha] = [Wire { api: "v1beta1", has_cdi: true }, Wire { api: "v1alpha", has_cdi: false }];
        assert_eq!((fits(&name, &plain, alpha), fits(&name, &plain, beta), fits(&name, &cdi, beta)), (Ok(()), Ok(()), Ok(())));
        let error = fits(&name, &cdi, alpha).unwrap_err().to_string();
        assert!(error.contains("CDI") && error.contains("v1alpha") && error.contains("example.com/device"), "{error}");
    }
}
