//! Rebuilds grants that a damaged ledger has lost and the kubelet's checkpoint still has.
//!
//! The kubelet writes every answer of ours into its checkpoint, including the alloc-id, with the
//! pod and the container. So a grant that neither the journal nor sled has comes back as bound, and
//! only its keys may be unknown.
//!
//! In the same way the ledger takes over grants of another plugin when a node moves to Holdfast:
//! its containers keep running, and their devices are held like any others.

use crate::domain::{
    AllocId, CheckpointGrant, DeviceId, Grant, GrantState, GrantedDevice, PodRef, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};

/// The version in a rebuilt grant: the version that made it is not known.
pub(super) const REBUILT: &str = "rebuilt";
/// The version if another plugin made the grant.
const OTHER_PLUGIN: &str = "other plugin";

/// Rebuilds the grants that are not among the `known` ones, live and released. `names` maps
/// physical keys to ids.
///
/// The kubelet's checkpoint may still have a removed pod until its next write. The usual proof then
/// releases its grant. The rebuilt grant has no boot id, which requires more evidence than a grant
/// of this boot would.
#[must_use]
pub fn rebuild(
    kept: Vec<CheckpointGrant>,
    known: &BTreeSet<AllocId>,
    names: &BTreeMap<String, DeviceId>,
    now: Timestamp,
) -> Vec<Grant> {
    let keys: BTreeMap<&DeviceId, &String> = names.iter().map(|(key, id)| (id, key)).collect();
    let device = |(id, numa_nodes): (DeviceId, Vec<u32>)| {
        let whole = id.shared();
        let key = keys
            .get(&id)
            .or_else(|| keys.get(whole.as_ref()?))
            .map_or_else(String::new, |key| (*key).clone());
        GrantedDevice { id, key, numa_nodes, nodes: Vec::new(), objects: Vec::new() }
    };
    let lost = kept.into_iter().filter(|kept| !known.contains(&kept.alloc_id));
    let mut grants: BTreeMap<AllocId, Grant> = BTreeMap::new();
    for kept in lost {
        let pod = PodRef { uid: kept.pod_uid, namespace: None, name: None };
        let grant = Grant {
            version: if kept.alloc_id.is_of_other_plugin() { OTHER_PLUGIN } else { REBUILT }.into(),
            granted_at: kept.alloc_id.made_at().unwrap_or(now),
            alloc_id: kept.alloc_id.clone(),
            resource: kept.resource,
            devices: kept.devices.into_iter().map(device).collect(),
            edits: kept.edits,
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            state: GrantState::Bound { pod, container: kept.container, bound_at: now },
        };
        grants.entry(kept.alloc_id).or_insert(grant);
    }
    grants.into_values().collect()
}

/// Which of the kubelet's non-live grants an undamaged ledger cannot have had: they are not
/// `released`, and they are not so old that their release may have been forgotten.
#[must_use]
pub fn unheard_of(
    mut kept: Vec<CheckpointGrant>,
    released: &BTreeSet<AllocId>,
    forgotten_until: Option<Timestamp>,
) -> Vec<CheckpointGrant> {
    kept.retain(|kept| {
        !released.contains(&kept.alloc_id) && kept.alloc_id.made_at() > forgotten_until
    });
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ContainerEdits;

    fn kept(alloc_id: &str, id: &str) -> CheckpointGrant {
        CheckpointGrant {
            alloc_id: AllocId::new(alloc_id),
            pod_uid: "u1".into(),
            container: "main".into(),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: BTreeMap::from([(DeviceId::new(id), vec![1])]),
            edits: ContainerEdits {
                cdi_devices: vec!["a/b=c".into()],
                ..ContainerEdits::default()
            },
        }
    }

    #[test]
    fn what_the_ledger_lost_comes_back_bound_with_its_id_its_time_and_its_answer() {
        let id = "01890a5d-ac96-774b-bcce-b302099a8057";
        let names = BTreeMap::from([("pci:0000:01:00.0".to_owned(), DeviceId::new("GPU-1"))]);
        let rebuilt = rebuild(
            vec![kept(id, "GPU-1"), kept("known", "GPU-2")],
            &BTreeSet::from([AllocId::new("known")]),
            &names,
            Timestamp(7),
        );
        let [grant] = &rebuilt[..] else { panic!("{rebuilt:?}") };
        assert_eq!((grant.alloc_id.as_str(), grant.granted_at), (id, Timestamp(0x0189_0a5d_ac96)));
        assert_eq!(
            grant.devices,
            [GrantedDevice {
                id: DeviceId::new("GPU-1"),
                key: "pci:0000:01:00.0".into(),
                numa_nodes: vec![1],
                nodes: Vec::new(),
                objects: Vec::new()
            }]
        );
        assert_eq!(
            (grant.pod().unwrap().uid.as_str(), grant.container(), grant.state_name()),
            ("u1", Some("main"), "bound")
        );
        assert_eq!(grant.edits.cdi_devices, ["a/b=c"]);
    }

    #[test]
    fn what_was_released_or_may_have_been_is_nothing_that_a_sound_ledger_lacks() {
        let ids = [
            "01890a5d-ac96-774b-bcce-b302099a8057",
            "01890a5d-ac97-774b-bcce-b302099a8057",
            "01890a5d-ac98-774b-bcce-b302099a8057",
        ];
        let all = || ids.map(|id| kept(id, "GPU-1")).to_vec();
        let lacking = |released: &[&str], forgotten| {
            let released = released.iter().copied().map(AllocId::new).collect();
            unheard_of(all(), &released, forgotten)
                .into_iter()
                .map(|kept| kept.alloc_id.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(lacking(&[], None), ids);
        assert_eq!(lacking(&ids[1..2], None), [ids[0], ids[2]]);
        assert_eq!(lacking(&[], Some(Timestamp(0x0189_0a5d_ac97))), [ids[2]]);
    }

    #[test]
    fn a_share_has_the_key_of_its_device_and_an_unknown_device_none() {
        let names = BTreeMap::from([("dev:/dev/a".to_owned(), DeviceId::new("a"))]);
        let keys = |id: &str| {
            rebuild(vec![kept("x", id)], &BTreeSet::new(), &names, Timestamp(7))[0].devices[0]
                .key
                .clone()
        };
        assert_eq!([keys("a::3"), keys("b")], ["dev:/dev/a", ""]);
    }
}
