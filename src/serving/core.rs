//! Decides which ids an Allocate may grant, and whether its answer can carry the result. Pure.

use crate::domain::{
    ApiCapabilities, ContainerEdits, Device, DeviceId, Grant, GrantedDevice, Health, Offered,
    Offering, PerContainer, Reason, Refusal, ResourceSpec, overlap,
};
use std::sync::Arc;

/// Decides on one container's request. The answer has the devices in the order of the request.
///
/// A held id is granted again: the kubelet decides (I2). It does so on purpose when an init
/// container passes its devices to the next container of its pod.
///
/// # Errors
/// When an id is unknown, unhealthy or requested twice, when the request is empty, or when it has
/// more ids than a container may have. The error names the id.
pub(crate) fn decide<'a>(
    offering: &'a Offering,
    ids: &[DeviceId],
) -> Result<Vec<&'a Offered>, Refusal> {
    let resource = || offering.spec.name.clone();
    if ids.is_empty() {
        return Err(Refusal::Empty(resource()));
    }
    let mut granted = Vec::with_capacity(ids.len());
    for (index, id) in ids.iter().enumerate() {
        if ids[..index].contains(id) {
            return Err(Refusal::Duplicate { resource: resource(), id: id.clone() });
        }
        let offered = offering
            .devices
            .get(id)
            .ok_or_else(|| Refusal::Unknown { resource: resource(), id: id.clone() })?;
        if let Health::Unhealthy(reason) = offered.health {
            return Err(Refusal::Unhealthy { resource: resource(), id: id.clone(), reason });
        }
        granted.push(offered);
    }
    match offering.spec.per_container {
        PerContainer::One if ids.len() > 1 => {
            return Err(Refusal::TooMany { resource: resource(), requested: ids.len() });
        }
        PerContainer::Distinct => {
            let of = |index: usize| &granted[index].device.id;
            if let Some((first, second)) =
                (1..ids.len()).find_map(|b| Some(((0..b).find(|a| of(*a) == of(b))?, b)))
            {
                return Err(Refusal::SameDevice {
                    resource: resource(),
                    first: ids[first].clone(),
                    second: ids[second].clone(),
                });
            }
        }
        PerContainer::One | PerContainer::Any => {}
    }
    Ok(granted)
}

/// The refusal with the claim that holds the device: the list only shows that the device is not
/// given by number.
pub(super) fn with_holder(refusal: Refusal, grants: &[Arc<Grant>]) -> Refusal {
    let Refusal::Unhealthy { resource, id, reason: Reason::Deselected } = &refusal else {
        return refusal;
    };
    let holds = |grant: &&Arc<Grant>| {
        let is_of_claim = grant.is_live() && grant.claim.is_some() && grant.resource == *resource;
        is_of_claim && grant.held_devices().any(|held| held.id == *id)
    };
    grants.iter().find(holds).map_or(refusal.clone(), |holder| Refusal::held(resource, id, holder))
}

/// Decides whether this API version can carry everything that the container needs.
///
/// # Errors
/// When it cannot carry CDI names, a hook before start or the start gate: the container would start
/// without its devices, or too early.
pub(super) fn fits(
    spec: &ResourceSpec,
    edits: &ContainerEdits,
    capabilities: ApiCapabilities,
) -> Result<(), Refusal> {
    let resource = || spec.name.clone();
    if !edits.cdi_devices.is_empty() && !capabilities.has_cdi {
        return Err(Refusal::CdiUnsupported { resource: resource(), api: capabilities.api });
    }
    if spec.needs_pre_start() && !capabilities.has_pre_start {
        return Err(Refusal::HooksUnsupported { resource: resource(), api: capabilities.api });
    }
    Ok(())
}

/// The holders of a device that a hook will reset before a container starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holders {
    /// One grant, or several of one pod, whose containers start one after the other. Also if no
    /// grant is known.
    One,
    /// Several grants, and the pod of one is not known yet.
    Unknown,
    /// A pod other than that of the last grant: its name, or its UID.
    Several(String),
}

/// The holders of the device's PCI function among these grants, by any resource and id.
pub(super) fn holders<'a>(grants: impl Iterator<Item = &'a Grant>, device: &Device) -> Holders {
    let function = device.pci.as_ref().map(|pci| pci.address.to_string());
    let objects = device.objects();
    let is_same = |held: &GrantedDevice| {
        held.key == device.key
            || function.is_some() && held.function() == function.as_deref()
            || overlap(&held.objects, &objects)
    };
    let holders: Vec<&Grant> =
        grants.filter(|grant| grant.is_live() && grant.held_devices().any(is_same)).collect();
    let [others @ .., last] = &holders[..] else { return Holders::One };
    let Some(pod) = last.pod() else {
        return if others.is_empty() { Holders::One } else { Holders::Unknown };
    };
    for holder in others.iter().chain([last]) {
        if holder.pod().is_none() {
            return Holders::Unknown;
        }
        // Several pods may use a claim.
        if let Some(other) = holder.pods().find(|other| other.uid != pod.uid) {
            return Holders::Several(other.to_string());
        }
    }
    Holders::One
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::domain::{
        AllocId, Attributes, DeviceClass, GrantState, Hook, Hooks, PciFunction, PodRef, Reason,
        Timestamp,
    };
    use std::collections::BTreeMap;
    use std::sync::Arc;

    /// A resource with these devices: id, id of the device behind it, NUMA node.
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
                attributes: Attributes::default(),
            }),
            health: Health::Healthy,
        };
        let devices = ids
            .iter()
            .map(|(id, device, numa)| (DeviceId::new(*id), offered(device, *numa)))
            .collect();
        Offering { spec: Arc::new(spec), devices }
    }

    fn ids(ids: &[&str]) -> Vec<DeviceId> {
        ids.iter().map(|id| DeviceId::new(*id)).collect()
    }

    #[test]
    fn healthy_ids_are_granted_in_the_order_of_the_request() {
        let offering = offering(&[("a", "a", None), ("b", "b", None)]);
        let granted = decide(&offering, &ids(&["b", "a"])).unwrap();
        assert_eq!(
            granted.iter().map(|offered| offered.device.id.as_str()).collect::<Vec<_>>(),
            ["b", "a"]
        );
    }

    #[test]
    fn every_refusal_names_the_id() {
        let mut offering = offering(&[("a", "a", None), ("gpu-7", "gpu-7", None)]);
        offering.devices.get_mut(&DeviceId::new("gpu-7")).unwrap().health =
            Health::Unhealthy(Reason::NodeMissing);
        for (request, named) in [
            (vec!["a", "no-such-id"], "no-such-id"),
            (vec!["a", "a"], "`a`"),
            (vec!["a", "gpu-7"], "gpu-7"),
            (vec![], "no device"),
        ] {
            let error = decide(&offering, &ids(&request)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_container_gets_at_most_its_limit() {
        let shares = [("a::0", "a", None), ("a::1", "a", None), ("b::0", "b", None)];
        for (per_container, request, refused) in [
            (PerContainer::Any, vec!["a::0", "a::1"], None),
            (PerContainer::One, vec!["a::1"], None),
            (
                PerContainer::One,
                vec!["a::0", "b::0"],
                Some("may have 1 of example.com/device, but requests 2"),
            ),
            (PerContainer::Distinct, vec!["a::1", "b::0"], None),
            (
                PerContainer::Distinct,
                vec!["a::0", "b::0", "a::1"],
                Some("`a::0` and `a::1` are shares of the same device"),
            ),
        ] {
            let mut offering = offering(&shares);
            offering.spec = Arc::new(ResourceSpec { per_container, ..(*offering.spec).clone() });
            let error = decide(&offering, &ids(&request)).err().map(|refusal| refusal.to_string());
            let is_as_expected = error
                .as_ref()
                .zip(refused)
                .is_some_and(|(error, refused)| error.contains(refused) && !error.contains("  "));
            assert!(
                is_as_expected || error.is_none() && refused.is_none(),
                "{per_container:?} {request:?}: {error:?}"
            );
        }
    }

    #[test]
    fn edits_that_the_api_version_cannot_carry_are_refused() {
        let spec = ResourceSpec::new("example.com/device".parse().unwrap(), DeviceClass::Gpu);
        let plain = ContainerEdits {
            envs: BTreeMap::from([("A".to_owned(), "1".to_owned())]),
            ..ContainerEdits::default()
        };
        let cdi = ContainerEdits {
            cdi_devices: vec!["example.com/device=0".to_owned()],
            ..plain.clone()
        };
        let [beta, alpha] = [
            ApiCapabilities { api: "v1beta1", has_cdi: true, has_pre_start: true },
            ApiCapabilities { api: "v1alpha", has_cdi: false, has_pre_start: false },
        ];
        assert_eq!(
            (fits(&spec, &plain, alpha), fits(&spec, &plain, beta), fits(&spec, &cdi, beta)),
            (Ok(()), Ok(()), Ok(()))
        );
        let error = fits(&spec, &cdi, alpha).unwrap_err().to_string();
        assert!(
            error.contains("CDI")
                && error.contains("v1alpha")
                && error.contains("example.com/device"),
            "{error}"
        );
        let hooks = Hooks { before_start: Some(Hook::Reset), ..Hooks::default() };
        let hooked = ResourceSpec { hooks, ..spec };
        assert_eq!(fits(&hooked, &plain, beta), Ok(()));
        let error = fits(&hooked, &plain, alpha).unwrap_err().to_string();
        assert!(
            error.contains("before a container starts") && error.contains("v1alpha"),
            "{error}"
        );
    }

    #[test]
    fn a_reset_needs_known_holders_of_one_pod() {
        let address = "0000:18:00.0";
        let device = Device {
            id: DeviceId::new("GPU-1"),
            key: format!("pci:{address}/10de:2330"),
            class: DeviceClass::Gpu,
            pci: Some(Box::new(PciFunction::at(address.parse().unwrap()))),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        let grant = |uid: Option<&str>, key: &str| {
            let bound = |uid: &str| GrantState::Bound {
                pod: PodRef {
                    uid: uid.into(),
                    namespace: Some("ml".into()),
                    name: Some(format!("pod-{uid}")),
                },
                container: "main".into(),
                bound_at: Timestamp(1),
            };
            Grant {
                alloc_id: AllocId::new("a"),
                resource: "example.com/device".parse().unwrap(),
                devices: vec![GrantedDevice {
                    id: DeviceId::new("x"),
                    key: key.into(),
                    numa_nodes: Vec::new(),
                    nodes: Vec::new(),
                    objects: Vec::new(),
                }],
                edits: ContainerEdits::default(),
                claim: None,
                boot_id: "boot".into(),
                kubelet: None,
                granted_at: Timestamp(1),
                version: "1".into(),
                state: uid.map_or(GrantState::Granted, bound),
            }
        };
        let ask = |grants: &[(Option<&str>, &str)]| {
            let grants: Vec<Grant> = grants.iter().map(|(uid, key)| grant(*uid, key)).collect();
            holders(grants.iter(), &device)
        };
        let (own, part, other) = (
            "pci:0000:18:00.0/10de:2330",
            "pci:0000:18:00.0/10de:2330/gi1-ci0",
            "pci:0000:19:00.0/10de:2330",
        );
        assert_eq!(ask(&[]), Holders::One);
        assert_eq!(ask(&[(None, own)]), Holders::One);
        assert_eq!(ask(&[(Some("u1"), own), (Some("u1"), own)]), Holders::One);
        assert_eq!(ask(&[(Some("u1"), own), (None, own)]), Holders::Unknown);
        assert_eq!(ask(&[(None, own), (Some("u1"), own)]), Holders::Unknown);
        assert_eq!(
            ask(&[(Some("u1"), own), (Some("u2"), own)]),
            Holders::Several("ml/pod-u1".into())
        );
        assert_eq!(
            ask(&[(Some("u1"), part), (Some("u2"), own)]),
            Holders::Several("ml/pod-u1".into())
        );
        assert_eq!(ask(&[(Some("u1"), other), (Some("u2"), own)]), Holders::One);
    }

    #[test]
    fn a_refusal_names_the_claim_that_holds_the_device() {
        use crate::domain::{ClaimHold, ClaimRef};
        let resource: crate::domain::ResourceName = "example.com/device".parse().unwrap();
        let refused = |id: &str, reason| Refusal::Unhealthy {
            resource: resource.clone(),
            id: DeviceId::new(id),
            reason,
        };
        let claim = ClaimRef { uid: "u".into(), namespace: "ml".into(), name: "train".into() };
        let hold = ClaimHold { claim, allocation: "1".into(), devices: Vec::new() };
        let device = GrantedDevice {
            id: DeviceId::new("x"),
            key: String::new(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        };
        let holder = Grant {
            alloc_id: AllocId::new("a"),
            resource: resource.clone(),
            devices: vec![device],
            edits: ContainerEdits::default(),
            claim: Some(Arc::new(hold)),
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: GrantState::Prepared {
                pods: Vec::new(),
                prepared_at: Timestamp(1),
                unprepared_at: None,
            },
        };
        let shown = |refusal| with_holder(refusal, &[Arc::new(holder.clone())]).to_string();
        let text = shown(refused("x", Reason::Deselected));
        assert!(text.contains("device `x` of example.com/device is held by claim ml/train"));
        for other in [refused("y", Reason::Deselected), refused("x", Reason::Xid)] {
            assert_eq!(shown(other.clone()), other.to_string());
        }
    }
}
