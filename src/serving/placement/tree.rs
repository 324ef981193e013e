//! The tree of a resource's devices, and how near its groups are to the neighbours.

use crate::domain::topology::{Nearness, Place, hives, places};
use crate::domain::{Api, Device, DeviceId, Offering};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// The place of a part of the tree. Devices of one place are one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Numa(u32),
    Pci(Place),
    /// The number of hives around this one, and its index among those of this level.
    Hive(usize, usize),
}

/// One device, with its free ids.
#[derive(Debug)]
struct Leaf<'a> {
    device: &'a DeviceId,
    /// `None` if the device is not offered.
    offered: Option<&'a Device>,
    path: Path,
    /// Indexes of the free ids, those first that must be included.
    free: Vec<usize>,
    must: usize,
    /// All ids, free or not.
    total: usize,
}

impl<'a> Leaf<'a> {
    fn of(device: &'a Device) -> Self {
        Leaf {
            device: &device.id,
            offered: Some(device),
            path: path(device),
            free: Vec::new(),
            must: 0,
            total: 0,
        }
    }

    fn unknown(id: &'a DeviceId) -> Self {
        Leaf { device: id, offered: None, path: Path::new(), free: Vec::new(), must: 0, total: 0 }
    }

    fn by_place(&self, other: &Leaf<'_>) -> Ordering {
        let parting =
            self.path.iter().zip(&other.path).find(|((_, ours), (_, theirs))| ours != theirs);
        parting.map_or_else(
            || self.path.len().cmp(&other.path.len()),
            |((_, ours), (_, theirs))| ours.cmp(theirs),
        )
    }

    fn add(&mut self, index: usize, is_must: bool) {
        if is_must {
            self.free.insert(self.must, index);
            self.must += 1;
        } else {
            self.free.push(index);
        }
    }

    /// Takes over the ids of another leaf, which is the same device and has higher ids. One of the
    /// two may not be offered.
    fn add_all(&mut self, other: &mut Self) {
        if self.total == 0 {
            self.path = std::mem::take(&mut other.path);
            self.offered = other.offered;
        }
        self.free.splice(self.must..self.must, other.free.drain(..other.must));
        self.free.append(&mut other.free);
        self.must += other.must;
        self.total += other.total;
    }
}

/// A group of devices, or one device.
#[derive(Debug)]
pub(super) struct Group {
    /// The least nearness between two of its devices.
    pub(super) nearness: Nearness,
    pub(super) parts: Parts,
    pub(super) free: usize,
    pub(super) must: usize,
    pub(super) total: usize,
    /// The sum over the neighbours of the number of groups around each that this group is.
    pub(super) pull: usize,
}

#[derive(Debug)]
pub(super) enum Parts {
    Groups(Vec<Group>),
    /// The free ids of one device.
    Shares(Vec<usize>),
}

#[derive(Debug)]
pub(super) struct Tree(pub(super) Group);

/// The rank of an id among `count` ones, from its index or back: of equal choices the one with the
/// lowest ranks is the best. The scheduler gives claims the first devices of a slice, which are
/// sorted by id. So containers get the last ones where the two do not know of each other.
pub(super) fn rank(offering: &Offering, count: usize, index: usize) -> usize {
    if offering.spec.api == Api::Both { count - 1 - index } else { index }
}

/// The number of neighbours in each place.
type Neighbours = BTreeMap<Key, usize>;

impl Tree {
    /// `ids` and `must` are sorted.
    pub(super) fn new(
        offering: &Offering,
        neighbours: &BTreeMap<&DeviceId, &Device>,
        ids: &[&DeviceId],
        must: &[&DeviceId],
    ) -> Self {
        let mut leaves = leaves(offering, ids, must);
        for leaf in &mut leaves {
            leaf.free.iter_mut().for_each(|index| *index = rank(offering, ids.len(), *index));
            let (must, free) = leaf.free.split_at_mut(leaf.must);
            must.sort_unstable();
            free.sort_unstable();
        }
        let mut neighbours: Vec<Path> = neighbours.values().map(|device| path(device)).collect();
        put_bridges_on_nodes(&mut leaves, &mut neighbours);
        put_hives(&mut leaves);
        let mut counts = Neighbours::new();
        neighbours.iter().flatten().for_each(|(_, key)| *counts.entry(*key).or_default() += 1);
        // Devices of one place become adjacent.
        leaves.sort_by(Leaf::by_place);
        Tree(group(Nearness::System, &mut leaves, 0, &counts))
    }
}

/// The devices with their requested ids. Both lists are in the order of the ids, so they are read
/// in one pass.
fn leaves<'a>(offering: &'a Offering, ids: &[&'a DeviceId], must: &[&DeviceId]) -> Vec<Leaf<'a>> {
    let mut leaves: Vec<Leaf<'a>> = Vec::with_capacity(offering.devices.len());
    let mut asked = ids.iter().copied().enumerate().peekable();
    let is_must = |id: &DeviceId| must.binary_search(&id).is_ok();
    // A requested id that is not offered is a device of its own.
    let unknown = |(index, id): (usize, &'a DeviceId)| {
        let mut leaf = Leaf::unknown(id);
        leaf.add(index, is_must(id));
        leaf
    };
    for (id, offered) in &offering.devices {
        leaves.extend(std::iter::from_fn(|| asked.next_if(|(_, asked)| *asked < id)).map(unknown));
        let device = &offered.device.id;
        if leaves.last().is_none_or(|last| last.device != device || last.total == 0) {
            leaves.push(Leaf::of(&offered.device));
        }
        if let Some(leaf) = leaves.last_mut() {
            leaf.total += 1;
            if let Some((index, id)) = asked.next_if(|(_, asked)| *asked == id) {
                leaf.add(index, is_must(id));
            }
        }
    }
    leaves.extend(asked.map(unknown));
    // The ids of one device may not be adjacent.
    if !leaves.is_sorted_by(|one, other| one.device < other.device) {
        leaves.sort_by(|one, other| one.device.cmp(other.device));
        leaves.dedup_by(|later, first| {
            let is_same = later.device == first.device;
            if is_same {
                first.add_all(later);
            }
            is_same
        });
    }
    leaves.iter_mut().for_each(|leaf| leaf.total = leaf.total.max(1));
    leaves
}

/// The places of a device, from far to near.
type Path = Vec<(Nearness, Key)>;

fn path(device: &Device) -> Path {
    let (numa, places) = (device.numa_nodes.first(), places(device));
    let mut path = Path::with_capacity(places.len() + 1);
    path.extend(numa.map(|node| (Nearness::Numa, Key::Numa(*node))));
    path.extend(places.into_iter().map(|(nearness, place)| (nearness, Key::Pci(place))));
    path
}

/// Functions below one host bridge may report different NUMA nodes, or none. The bridge is then on
/// the lowest reported node, also for the neighbours, whose own node does not count.
fn put_bridges_on_nodes(leaves: &mut [Leaf<'_>], neighbours: &mut [Path]) {
    let bridge = |path: &Path| {
        path.iter().map(|(_, key)| *key).find(|key| matches!(key, Key::Pci(Place::HostBridge(..))))
    };
    let mut nodes: BTreeMap<Key, Key> = BTreeMap::new();
    for Leaf { path, .. } in leaves.iter() {
        if let (Some(bridge), Some((_, node @ Key::Numa(_)))) = (bridge(path), path.first()) {
            let known = nodes.entry(bridge).or_insert(*node);
            *known = (*known).min(*node);
        }
    }
    for path in leaves.iter_mut().map(|leaf| &mut leaf.path).chain(neighbours) {
        if let Some(node) = bridge(path).and_then(|bridge| nodes.get(&bridge)) {
            path.retain(|(_, key)| !matches!(key, Key::Numa(_)));
            path.insert(0, (Nearness::Numa, *node));
        }
    }
}

/// A hive is one group, below all places that its devices have in common. A tree cannot express
/// more:
///
/// - If a hive spans several switches or sockets, these are parts of it, and the rest of them forms
///   groups of its own. Two devices behind one switch in different hives are then as far from each
///   other as the hives.
/// - A device is in one hive. Links to some devices of another hive (a cube mesh, a ring) are not
///   known here.
fn put_hives(leaves: &mut [Leaf<'_>]) {
    for around in 0.. {
        let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, leaf) in leaves.iter().enumerate() {
            if let Some(hive) = leaf.offered.and_then(|device| hives(device).nth(around)) {
                members.entry(hive).or_default().push(at);
            }
        }
        if members.is_empty() {
            return;
        }
        for (number, members) in
            members.into_values().enumerate().filter(|(_, members)| members.len() > 1)
        {
            let first = &leaves[members[0]].path;
            let common = |path: &Path| {
                first.iter().zip(path).take_while(|((_, one), (_, other))| one == other).count()
            };
            let depth =
                members.iter().map(|at| common(&leaves[*at].path)).min().unwrap_or_default();
            for at in members {
                let path = &mut leaves[at].path;
                let above = depth.checked_sub(1).map_or(Nearness::System, |above| path[above].0);
                path.insert(depth, (above, Key::Hive(around, number)));
                path[depth..]
                    .iter_mut()
                    .for_each(|(nearness, _)| *nearness = nearness.in_hives(around + 1));
            }
        }
    }
}

/// The group of devices that share the first `depth` places. The leaves are sorted by place. A
/// group of a single part is that part.
fn group(
    nearness: Nearness,
    leaves: &mut [Leaf<'_>],
    depth: usize,
    neighbours: &Neighbours,
) -> Group {
    let near = |key: &Key| neighbours.get(key).copied().unwrap_or_default();
    if let [Leaf { path, free, must, total, .. }] = leaves {
        let pull = path.iter().skip(depth).map(|(_, key)| near(key)).sum();
        let free = std::mem::take(free);
        return Group {
            nearness: Nearness::Device,
            free: free.len(),
            must: *must,
            total: *total,
            pull,
            parts: Parts::Shares(free),
        };
    }
    let place = |leaf: &Leaf<'_>| leaf.path.get(depth).copied();
    let same =
        |a: &Leaf<'_>, b: &Leaf<'_>| place(a).zip(place(b)).is_some_and(|((_, a), (_, b))| a == b);
    let of_place = |leaves: &mut [Leaf<'_>]| match leaves.first().and_then(place) {
        Some((nearness, key)) => {
            let below = group(nearness, leaves, depth + 1, neighbours);
            Group { pull: below.pull + near(&key), ..below }
        }
        None => group(Nearness::Device, leaves, depth, neighbours),
    };
    let mut groups: Vec<Group> = leaves.chunk_by_mut(same).map(of_place).collect();
    if groups.len() == 1 {
        return groups.remove(0);
    }
    let sum = |count: fn(&Group) -> usize| groups.iter().map(count).sum();
    Group {
        nearness,
        free: sum(|part| part.free),
        must: sum(|part| part.must),
        total: sum(|part| part.total),
        pull: 0,
        parts: Parts::Groups(groups),
    }
}
