//! Which of the free ids fit together best: pure, deterministic, of exactly the wanted size.

use crate::domain::{DeviceId, Offering};
use std::collections::{BTreeMap, BTreeSet};

/// Why there is no answer. The kubelet never asks like this.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unanswerable {
    #[error("{must} devices must be included, more than the {size} that are wanted")]
    TooManyMust { must: usize, size: usize },
    #[error("{size} devices are wanted, but only {available} are available")]
    TooFew { size: usize, available: usize },
}

/// Where a group of ids is near: one NUMA node, or none that is known.
type Place = Option<u32>;

/// Chooses `size` ids of `available` that include `must_include`.
///
/// The ids come from as few NUMA nodes as can be: first where the ids are that must be included, then where all the
/// rest fits with the least left over, else where the most is free. Within a node, ids of different devices come
/// before a second share of one, and the smaller id decides. The answer begins with what must be included.
pub(super) fn choose(
    offering: &Offering,
    available: &[DeviceId],
    must_include: &[DeviceId],
    size: usize,
) -> Result<Vec<DeviceId>, Unanswerable> {
    let must: BTreeSet<&DeviceId> = must_include.iter().collect();
    let all: BTreeSet<&DeviceId> = available.iter().chain(must_include).collect();
    if must.len() > size {
        return Err(Unanswerable::TooManyMust { must: must.len(), size });
    }
    if all.len() < size {
        return Err(Unanswerable::TooFew { size, available: all.len() });
    }
    let place = |id: &DeviceId| offering.devices.get(id).and_then(|offered| offered.device.numa_nodes.first().copied());
    let mut chosen: Vec<DeviceId> = must.iter().map(|id| (*id).clone()).collect();
    let near: BTreeSet<Place> = chosen.iter().map(place).collect();
    let mut groups: BTreeMap<Place, Vec<&DeviceId>> = BTreeMap::new();
    for id in all.difference(&must) {
        groups.entry(place(id)).or_default().push(id);
    }
    // A request on an empty set starts where all of it fits; each step takes one whole place.
    while chosen.len() < size {
        let missing = size - chosen.len();
        let best = groups.iter().min_by_key(|(place, ids)| {
            let fits = ids.len() >= missing;
            // A known place beats an unknown one: ids of unknown place may be anywhere.
            (!near.contains(place), !fits, place.is_none(), if fits { ids.len() } else { usize::MAX - ids.len() }, **place)
        });
        let Some((&best, _)) = best else { break };
        let ids = groups.remove(&best).unwrap_or_default();
        take(offering, &mut chosen, ids, missing);
    }
    Ok(chosen)
}

/// Moves up to `count` of `ids` to `chosen`: new devices first, then second shares of the least used one.
fn take(offering: &Offering, chosen: &mut Vec<DeviceId>, ids: Vec<&DeviceId>, count: usize) {
    let device = |id: &DeviceId| offering.devices.get(id).map_or_else(|| id.clone(), |offered| offered.device.id.clone());
    let mut used: BTreeMap<DeviceId, usize> = BTreeMap::new();
    for id in chosen.iter() {
        *used.entry(device(id)).or_default() += 1;
    }
    // The n-th share taken of a device ranks with the n-th of every other.
    let mut ranked: Vec<(usize, &DeviceId)> = Vec::with_capacity(ids.len());
    for id in ids {
        let uses = used.entry(device(id)).or_default();
        ranked.push((*uses, id));
        *uses += 1;
    }
    ranked.sort_unstable();
    chosen.extend(ranked.into_iter().take(count).map(|(_, id)| id.clone()));
}

#[cfg(test)]
mod tests {
    use super::super::core::tests::offering;
    use super::*;
    use proptest::prelude::*;

    fn ids(text: &str) -> Vec<DeviceId> {
        text.split_whitespace().map(DeviceId::new).collect()
    }

    fn two_nodes() -> Offering {
        let (zero, one) = (Some(0), Some(1));
        offering(&[("a0", "a0", zero), ("a1", "a1", zero), ("a2", "a2", zero), ("b0", "b0", one), ("b1", "b1", one), ("x", "x", None)])
    }

    #[test]
    fn the_smallest_node_that_fits_is_taken() {
        let chosen = choose(&two_nodes(), &ids("a0 a1 a2 b0 b1 x"), &[], 2).unwrap();
        assert_eq!(chosen, ids("b0 b1"));
    }

    #[test]
    fn what_must_be_included_draws_the_rest_to_its_node() {
        let chosen = choose(&two_nodes(), &ids("a0 a1 a2 b0 b1 x"), &ids("a2"), 2).unwrap();
        assert_eq!(chosen, ids("a2 a0"));
    }

    #[test]
    fn a_request_larger_than_a_node_takes_the_fullest_first() {
        let chosen = choose(&two_nodes(), &ids("a0 a1 a2 b0 b1 x"), &[], 4).unwrap();
        assert_eq!(chosen, ids("a0 a1 a2 b0"));
    }

    #[test]
    fn shares_of_different_devices_come_first() {
        let offering = offering(&[("a::0", "a", None), ("a::1", "a", None), ("b::0", "b", None), ("b::1", "b", None)]);
        assert_eq!(choose(&offering, &ids("a::0 a::1 b::0 b::1"), &[], 2).unwrap(), ids("a::0 b::0"));
        assert_eq!(choose(&offering, &ids("a::1 b::0 b::1"), &ids("a::0"), 3).unwrap(), ids("a::0 b::0 a::1"));
    }

    #[test]
    fn the_impossible_is_said() {
        assert!(choose(&two_nodes(), &ids("a0"), &[], 2).is_err());
        assert!(choose(&two_nodes(), &ids("a0 a1"), &ids("a0 a1"), 1).is_err());
    }

    proptest! {
        #[test]
        fn the_answer_has_the_size_holds_what_it_must_and_does_not_depend_on_order(
            devices in proptest::collection::vec((0..40_u8, proptest::option::of(0..4_u32)), 1..40),
            must in proptest::collection::vec(any::<proptest::sample::Index>(), 0..5),
            wanted in any::<proptest::sample::Index>(),
            seed in any::<u64>(),
        ) {
            let named: Vec<(String, String, Option<u32>)> =
                devices.iter().enumerate().map(|(i, (device, numa))| (format!("{device}::{i}"), device.to_string(), *numa)).collect();
            let refs: Vec<(&str, &str, Option<u32>)> = named.iter().map(|(id, device, numa)| (id.as_str(), device.as_str(), *numa)).collect();
            let offering = offering(&refs);
            let available: Vec<DeviceId> = offering.devices.keys().cloned().collect();
            let must: BTreeSet<DeviceId> = must.iter().map(|index| index.get(&available).clone()).collect();
            let must: Vec<DeviceId> = must.into_iter().collect();
            let size = must.len() + wanted.index(available.len() - must.len() + 1);
            let chosen = choose(&offering, &available, &must, size).unwrap();
            prop_assert_eq!(chosen.len(), size);
            let distinct: BTreeSet<&DeviceId> = chosen.iter().collect();
            prop_assert_eq!(distinct.len(), size);
            prop_assert!(must.iter().all(|id| distinct.contains(id)));
            prop_assert!(chosen.iter().all(|id| available.contains(id)));
            let mut shuffled = available.clone();
            let turn = usize::try_from(seed % 97).unwrap() % shuffled.len();
            shuffled.rotate_left(turn);
            shuffled.reverse();
            prop_assert_eq!(choose(&offering, &shuffled, &must, size).unwrap(), chosen);
        }
    }
}
