//! Which of the free ids fit together best: pure, deterministic, of exactly the wanted size.
//!
//! The devices of a resource are the leaves of a tree: NUMA nodes, host bridges, root ports, switches, cards. Of every
//! choice of the wanted size, the best one has the smallest score, from left to right:
//!
//! | | `closest` | `packed` | `spread` |
//! | --- | --- | --- | --- |
//! | 1 | pairs of shares of one device | the same | the same |
//! | 2 | how far the two are that are farthest | groups that were whole | how unevenly sockets are used |
//! | 3 | groups that were whole and are broken into | what is left over in groups that are used | how unevenly their groups are used, and so on |
//! | 4 | what is left over in the smallest group of devices around all, then in those around that one | | |
//! | 5 | how unevenly devices are shared | | |
//! | last | the ids | the ids | the ids |
//!
//! A group is whole while everything in it is free; one is broken into when only a part of it is taken. The best choice is
//! found exactly: for each group, the best choice of every size, put together from those of its parts.

use crate::domain::topology::{Nearness, Place, Placement, places};
use crate::domain::{DeviceId, Offering};
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};

/// Why there is no answer. The kubelet never asks like this.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unanswerable {
    /// More is to be included than is wanted.
    #[error("{must} devices must be included, more than the {size} that are wanted")]
    TooManyMust {
        /// How many.
        must: usize,
        /// How many are wanted.
        size: usize,
    },
    /// Less is free than is wanted.
    #[error("{size} devices are wanted, but only {available} are available")]
    TooFew {
        /// How many are wanted.
        size: usize,
        /// How many there are.
        available: usize,
    },
}

/// Chooses `size` ids of `available` that include `must_include`, as the resource's [`Placement`] wants it. The answer
/// begins with what must be included, and goes on in the order of the ids.
///
/// # Errors
/// When that many cannot be chosen.
pub fn choose(offering: &Offering, available: &[DeviceId], must_include: &[DeviceId], size: usize) -> Result<Vec<DeviceId>, Unanswerable> {
    let must: BTreeSet<&DeviceId> = must_include.iter().collect();
    let all: BTreeSet<&DeviceId> = available.iter().chain(must_include).collect();
    if must.len() > size {
        return Err(Unanswerable::TooManyMust { must: must.len(), size });
    }
    if all.len() < size {
        return Err(Unanswerable::TooFew { size, available: all.len() });
    }
    let ids: Vec<&DeviceId> = all.into_iter().collect();
    let tree = Tree::new(offering, &ids, &must);
    let chosen = tree.choose(offering.spec.placement, size);
    let (first, rest): (Vec<_>, Vec<_>) = chosen.into_iter().map(|index| ids[index]).partition(|id| must.contains(id));
    Ok(first.into_iter().chain(rest).cloned().collect())
}

/// Where a part of the tree is; devices of one place are one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Numa(u32),
    Pci(Place),
}

/// One device, with the ids of it that are free.
#[derive(Debug)]
struct Leaf {
    path: Vec<(Nearness, Key)>,
    /// Indexes of ids, those first that must be included.
    free: Vec<usize>,
    must: usize,
    /// Free or not.
    total: usize,
}

/// A group of devices, or one device.
#[derive(Debug)]
struct Group {
    /// What two of it are to each other at least.
    nearness: Nearness,
    parts: Parts,
    free: usize,
    must: usize,
    total: usize,
}

#[derive(Debug)]
enum Parts {
    Groups(Vec<Group>),
    /// The free ids of one device.
    Shares(Vec<usize>),
}

#[derive(Debug)]
struct Tree(Group);

impl Tree {
    fn new(offering: &Offering, ids: &[&DeviceId], must: &BTreeSet<&DeviceId>) -> Self {
        // What is asked for and not offered is a device of its own.
        let device = |id: &DeviceId| offering.devices.get(id).map_or_else(|| id.clone(), |offered| offered.device.id.clone());
        let mut leaves: BTreeMap<DeviceId, Leaf> = BTreeMap::new();
        for offered in offering.devices.values() {
            let leaf = leaves.entry(offered.device.id.clone());
            leaf.or_insert_with(|| Leaf { path: path(offered), free: Vec::new(), must: 0, total: 0 }).total += 1;
        }
        for (index, id) in ids.iter().enumerate() {
            let leaf = leaves.entry(device(id)).or_insert_with(|| Leaf { path: Vec::new(), free: Vec::new(), must: 0, total: 1 });
            if must.contains(id) {
                leaf.free.insert(leaf.must, index);
                leaf.must += 1;
            } else {
                leaf.free.push(index);
            }
        }
        let mut leaves: Vec<Leaf> = leaves.into_values().collect();
        put_bridges_on_nodes(&mut leaves);
        Tree(group(Nearness::System, leaves, 0))
    }

    fn choose(&self, placement: Placement, size: usize) -> Vec<usize> {
        let mut best: Option<(Rank, Choice)> = None;
        self.0.search(placement, size, Around::default(), &mut best);
        best.map(|(_, choice)| choice.ids).unwrap_or_default()
    }
}

/// Where a device is, from far to near.
fn path(offered: &crate::domain::Offered) -> Vec<(Nearness, Key)> {
    let numa = offered.device.numa_nodes.first().map(|node| (Nearness::Numa, Key::Numa(*node)));
    numa.into_iter().chain(places(&offered.device).into_iter().map(|(nearness, place)| (nearness, Key::Pci(place)))).collect()
}

/// Functions below one host bridge may tell of different NUMA nodes, or of none: the bridge is on the lowest that is told.
fn put_bridges_on_nodes(leaves: &mut [Leaf]) {
    let bridge = |leaf: &Leaf| leaf.path.iter().map(|(_, key)| *key).find(|key| matches!(key, Key::Pci(Place::HostBridge(..))));
    let mut nodes: BTreeMap<Key, Key> = BTreeMap::new();
    for leaf in leaves.iter() {
        if let (Some(bridge), Some((_, node @ Key::Numa(_)))) = (bridge(leaf), leaf.path.first()) {
            let known = nodes.entry(bridge).or_insert(*node);
            *known = (*known).min(*node);
        }
    }
    for leaf in leaves {
        if let Some(node) = bridge(leaf).and_then(|bridge| nodes.get(&bridge)) {
            leaf.path.retain(|(_, key)| !matches!(key, Key::Numa(_)));
            leaf.path.insert(0, (Nearness::Numa, *node));
        }
    }
}

/// Devices that share the first `depth` places. A group of a single part is that part.
fn group(nearness: Nearness, mut leaves: Vec<Leaf>, depth: usize) -> Group {
    if leaves.len() == 1 {
        let Leaf { free, must, total, .. } = leaves.remove(0);
        return Group { nearness: Nearness::Device, free: free.len(), must, total, parts: Parts::Shares(free) };
    }
    let mut by_place: BTreeMap<Key, (Nearness, Vec<Leaf>)> = BTreeMap::new();
    let mut groups = Vec::new();
    for leaf in leaves {
        match leaf.path.get(depth).copied() {
            Some((nearness, key)) => by_place.entry(key).or_insert_with(|| (nearness, Vec::new())).1.push(leaf),
            None => groups.push(group(Nearness::Device, vec![leaf], depth)),
        }
    }
    groups.extend(by_place.into_values().map(|(nearness, leaves)| group(nearness, leaves, depth + 1)));
    if groups.len() == 1 {
        return groups.remove(0);
    }
    let sum = |count: fn(&Group) -> usize| groups.iter().map(count).sum();
    Group {
        nearness,
        free: sum(|part| part.free),
        must: sum(|part| part.must),
        total: sum(|part| part.total),
        parts: Parts::Groups(groups),
    }
}

/// What a choice costs, the most important first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost([u32; Cost::PARTS]);

impl Cost {
    /// Deeper trees than this are compared in the last part.
    const PARTS: usize = 16;

    fn add(&mut self, part: usize, cost: usize) {
        let part = &mut self.0[part.min(Cost::PARTS - 1)];
        *part = part.saturating_add(u32::try_from(cost).unwrap_or(u32::MAX));
    }

    fn plus(mut self, other: &Cost) -> Cost {
        self.0.iter_mut().zip(other.0).for_each(|(part, other)| *part = part.saturating_add(other));
        self
    }
}

/// The best choice of one size in a group: ids in their order.
#[derive(Debug, Clone)]
struct Choice {
    cost: Cost,
    ids: Vec<usize>,
}

/// A choice among those of other groups: pairs of shares of one device, how far at worst, what it costs, what is left over
/// in its group and around it, how unevenly devices are shared.
type Rank = (u32, Reverse<Nearness>, Cost, usize, usize, u32);

/// The groups around one.
#[derive(Debug, Clone, Copy, Default)]
struct Around {
    depth: usize,
    cost: Cost,
    left: usize,
}

impl Group {
    fn is_device(&self) -> bool {
        matches!(self.parts, Parts::Shares(_))
    }

    /// What it costs that `count` ids of this group, `depth` groups down, are taken.
    fn cost(&self, placement: Placement, count: usize, depth: usize) -> Cost {
        let mut cost = Cost::default();
        if count == 0 {
            return cost;
        }
        let is_device = self.is_device();
        let was_whole = self.total > 1 && self.free == self.total;
        // Of even use, the sum of squares is smallest.
        let used = self.total - self.free;
        let unevenness = (used + count).pow(2) - used.pow(2);
        if is_device {
            cost.add(0, count * (count - 1) / 2);
        }
        match placement {
            Placement::Closest => {
                cost.add(1, usize::from(was_whole && count < self.free && !is_device));
                cost.add(2, if is_device { unevenness } else { 0 });
            }
            Placement::Packed => {
                cost.add(1, usize::from(was_whole));
                cost.add(2, self.free - count);
            }
            Placement::Spread => cost.add(1 + depth, unevenness),
        }
        cost
    }

    /// The best choice of each size up to `size`; `None` where there is none.
    fn best(&self, placement: Placement, size: usize, depth: usize) -> Vec<Option<Choice>> {
        let most = size.min(self.free);
        let mut table: Vec<Option<Choice>> = match &self.parts {
            Parts::Shares(free) => {
                let taken = |count: usize| {
                    let mut ids = free[..count].to_vec();
                    ids.sort_unstable();
                    Choice { cost: Cost::default(), ids }
                };
                (0..=most).map(|count| Some(taken(count))).collect()
            }
            Parts::Groups(groups) => {
                let nothing = vec![Some(Choice { cost: Cost::default(), ids: Vec::new() })];
                groups.iter().fold(nothing, |table, part| join(&table, &part.best(placement, size, depth + 1), size))
            }
        };
        for (count, choice) in table.iter_mut().enumerate() {
            if count < self.must {
                *choice = None;
            } else if let Some(choice) = choice {
                choice.cost = choice.cost.plus(&self.cost(placement, count, depth));
            }
        }
        table
    }

    /// Looks for the best choice in this group and in every one below it.
    fn search(&self, placement: Placement, size: usize, around: Around, best: &mut Option<(Rank, Choice)>) {
        if self.free < size {
            return;
        }
        let Around { depth, cost, left } = around;
        if let Some(choice) = self.best(placement, size, depth).into_iter().nth(size).flatten() {
            let mut cost = choice.cost.plus(&cost);
            let same = std::mem::take(&mut cost.0[0]);
            let rank = if placement == Placement::Closest {
                let uneven = std::mem::take(&mut cost.0[2]);
                // The shares of a device are no others' to need whole.
                let left_here = if self.is_device() { 0 } else { self.free - size };
                (same, Reverse(self.nearness), cost, left_here, left, uneven)
            } else {
                (same, Reverse(Nearness::System), cost, 0, 0, 0)
            };
            let is_better = best.as_ref().is_none_or(|(known, known_choice)| (&rank, &choice.ids) < (known, &known_choice.ids));
            if is_better {
                *best = Some((rank, choice));
            }
        }
        // Only for the nearest is it of interest how much smaller a group could be.
        if let (Parts::Groups(groups), Placement::Closest) = (&self.parts, placement) {
            let around = Around { depth: depth + 1, cost: cost.plus(&self.cost(placement, size, depth)), left: left + self.free - size };
            let must = |part: &Group| part.must == self.must;
            groups.iter().filter(|part| must(part)).for_each(|part| part.search(placement, size, around, best));
        }
    }
}

/// The best choice of each size out of two parts.
fn join(left: &[Option<Choice>], right: &[Option<Choice>], size: usize) -> Vec<Option<Choice>> {
    let most = size.min((left.len() + right.len()).saturating_sub(2));
    let mut joined: Vec<Option<Choice>> = vec![None; most + 1];
    for (a, left) in left.iter().enumerate().filter_map(|(a, choice)| Some((a, choice.as_ref()?))) {
        for (b, right) in right.iter().enumerate().filter_map(|(b, choice)| Some((b, choice.as_ref()?))) {
            let Some(place) = joined.get_mut(a + b) else { break };
            let cost = left.cost.plus(&right.cost);
            let is_better = place.as_ref().is_none_or(|known| {
                cost.cmp(&known.cost).then_with(|| compare(merged(&left.ids, &right.ids), &known.ids)) == Ordering::Less
            });
            if is_better {
                *place = Some(Choice { cost, ids: merged(&left.ids, &right.ids).collect() });
            }
        }
    }
    joined
}

fn compare(ids: impl Iterator<Item = usize>, known: &[usize]) -> Ordering {
    ids.cmp(known.iter().copied())
}

/// Two sorted lists as one.
fn merged<'a>(left: &'a [usize], right: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    let (mut left, mut right) = (left.iter().copied().peekable(), right.iter().copied().peekable());
    std::iter::from_fn(move || match (left.peek(), right.peek()) {
        (Some(a), Some(b)) if a <= b => left.next(),
        (Some(_), None) => left.next(),
        _ => right.next(),
    })
}

#[cfg(test)]
mod tests;
