//! Sorts free devices by NUMA node, as the topology manager's hint does.

use crate::domain::DeviceId;
use std::collections::{BTreeMap, BTreeSet};

/// The kubelet tries every set of NUMA nodes. A machine with more nodes than this gets no hint.
const NODES_MAX: usize = 8;

/// Free devices, grouped by their NUMA nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// Near the nodes of the hint.
    pub(super) aligned: BTreeSet<DeviceId>,
    /// Near other nodes.
    pub(super) unaligned: BTreeSet<DeviceId>,
    /// Without a NUMA node; all devices where there is no hint.
    pub(super) anywhere: BTreeSet<DeviceId>,
}

/// Sorts the free devices by the narrowest set of nodes that has `required` free or reusable
/// devices.
pub(super) fn places(
    all: &BTreeMap<DeviceId, Vec<i64>>,
    available: &BTreeSet<DeviceId>,
    reusable: &BTreeSet<DeviceId>,
    required: usize,
) -> Places {
    let near = |id: &DeviceId, mask: &BTreeSet<i64>| {
        all.get(id).is_some_and(|nodes| nodes.iter().any(|node| mask.contains(node)))
    };
    let nodes: BTreeSet<i64> = all.values().flatten().copied().collect();
    let usable: BTreeSet<&DeviceId> = available.iter().chain(reusable).collect();
    let enough =
        |mask: &BTreeSet<i64>| usable.iter().filter(|id| near(id, mask)).count() >= required;
    let Some(mask) = masks(&nodes).into_iter().find(enough) else {
        return Places { anywhere: available.clone(), ..Places::default() };
    };
    let mut places = Places::default();
    for id in available {
        let place = if near(id, &mask) {
            &mut places.aligned
        } else if all.get(id).is_some_and(|nodes| !nodes.is_empty()) {
            &mut places.unaligned
        } else {
            &mut places.anywhere
        };
        place.insert(id.clone());
    }
    places
}

/// Every non-empty set of nodes, narrow ones first.
fn masks(nodes: &BTreeSet<i64>) -> Vec<BTreeSet<i64>> {
    if nodes.len() > NODES_MAX {
        return Vec::new();
    }
    let of_bits = |bits: usize| {
        nodes
            .iter()
            .enumerate()
            .filter(|(index, _)| bits & (1 << index) != 0)
            .map(|(_, node)| *node)
            .collect()
    };
    let mut masks: Vec<BTreeSet<i64>> = (1..1_usize << nodes.len()).map(of_bits).collect();
    masks.sort_by_key(BTreeSet::len);
    masks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> BTreeSet<DeviceId> {
        ids.iter().map(|id| DeviceId::new(*id)).collect()
    }

    #[test]
    fn the_narrowest_set_of_nodes_with_enough_devices_counts() {
        let nodes: [(&str, &[i64]); 5] =
            [("a", &[0]), ("b", &[1]), ("c", &[1]), ("d", &[0, 1]), ("e", &[])];
        let all =
            nodes.into_iter().map(|(id, nodes)| (DeviceId::new(id), nodes.to_vec())).collect();
        let free = ids(&["a", "b", "c", "d", "e"]);
        let of = |required| places(&all, &free, &BTreeSet::new(), required);
        let expected = |aligned: &[&str], unaligned: &[&str], anywhere: &[&str]| Places {
            aligned: ids(aligned),
            unaligned: ids(unaligned),
            anywhere: ids(anywhere),
        };
        assert_eq!(of(2), expected(&["a", "d"], &["b", "c"], &["e"]));
        assert_eq!(of(3), expected(&["b", "c", "d"], &["a"], &["e"]));
        assert_eq!(of(4), expected(&["a", "b", "c", "d"], &[], &["e"]));
        assert_eq!(of(5), expected(&[], &[], &["a", "b", "c", "d", "e"]), "no hint");
        let reused = places(&all, &ids(&["b"]), &ids(&["c"]), 2);
        assert_eq!(reused, expected(&["b"], &[], &[]));
    }
}
