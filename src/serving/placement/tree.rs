//! The tree of a resource's devices, and how near its groups are to the company.

use crate::domain::topology::{Nearness, Place, hives, places};
use crate::domain::{Device, DeviceId, Offering};
use std::collections::{BTreeMap, BTreeSet};

/// Where a part of the tree is; devices of one place are one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Numa(u32),
    Pci(Place),
    /// How many hives are around this one, and its number among those.
    Hive(usize, usize),
}

/// One device, with the ids of it that are free.
#[derive(Debug)]
struct Leaf<'a> {
    /// `None` where it is not offered.
    device: Option<&'a Device>,
    path: Path,
    /// Indexes of ids, those first that must be included.
    free: Vec<usize>,
    must: usize,
    /// Free or not.
    total: usize,
}

impl Leaf<'_> {
    fn keys(&self) -> impl Iterator<Item = Key> {
        self.path.iter().map(|(_, key)| *key)
    }
}

/// A group of devices, or one device.
#[derive(Debug)]
pub(super) struct Group {
    /// What two of it are to each other at least.
    pub(super) nearness: Nearness,
    pub(super) parts: Parts,
    pub(super) free: usize,
    pub(super) must: usize,
    pub(super) total: usize,
    /// For each device of the company, how many of the groups around that one this is.
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

/// How many devices of the company are in each place.
type Company = BTreeMap<Key, usize>;

impl Tree {
    pub(super) fn new<'a>(
        offering: &'a Offering,
        company: &BTreeMap<&DeviceId, &Device>,
        ids: &[&'a DeviceId],
        must: &BTreeSet<&DeviceId>,
    ) -> Self {
        // What is asked for and not offered is a device of its own.
        let device = |id: &&'a DeviceId| offering.devices.get(*id).map_or(*id, |offered| &offered.device.id);
        let mut leaves: BTreeMap<&DeviceId, Leaf<'a>> = BTreeMap::new();
        for offered in offering.devices.values() {
            let (device, leaf) = (&*offered.device, leaves.entry(&offered.device.id));
            leaf.or_insert_with(|| Leaf { device: Some(device), path: path(device), free: Vec::new(), must: 0, total: 0 }).total += 1;
        }
        for (index, id) in ids.iter().enumerate() {
            let leaf =
                leaves.entry(device(id)).or_insert_with(|| Leaf { device: None, path: Vec::new(), free: Vec::new(), must: 0, total: 1 });
            if must.contains(id) {
                leaf.free.insert(leaf.must, index);
                leaf.must += 1;
            } else {
                leaf.free.push(index);
            }
        }
        let mut leaves: Vec<Leaf<'_>> = leaves.into_values().collect();
        let mut company: Vec<Path> = company.values().map(|device| path(device)).collect();
        put_bridges_on_nodes(&mut leaves, &mut company);
        put_hives(&mut leaves);
        let mut crowd = Company::new();
        company.iter().flatten().for_each(|(_, key)| *crowd.entry(*key).or_default() += 1);
        // Those of one place side by side.
        leaves.sort_by(|a, b| a.keys().cmp(b.keys()));
        Tree(group(Nearness::System, &mut leaves, 0, &crowd))
    }
}

/// Where a device is, from far to near.
type Path = Vec<(Nearness, Key)>;

fn path(device: &Device) -> Path {
    let (numa, places) = (device.numa_nodes.first(), places(device));
    let mut path = Path::with_capacity(places.len() + 1);
    path.extend(numa.map(|node| (Nearness::Numa, Key::Numa(*node))));
    path.extend(places.into_iter().map(|(nearness, place)| (nearness, Key::Pci(place))));
    path
}

/// Functions below one host bridge may tell of different NUMA nodes, or of none: the bridge is on the lowest that is told.
/// So it is for the company, which has no say in it.
fn put_bridges_on_nodes(leaves: &mut [Leaf<'_>], company: &mut [Path]) {
    let bridge = |path: &Path| path.iter().map(|(_, key)| *key).find(|key| matches!(key, Key::Pci(Place::HostBridge(..))));
    let mut nodes: BTreeMap<Key, Key> = BTreeMap::new();
    for Leaf { path, .. } in leaves.iter() {
        if let (Some(bridge), Some((_, node @ Key::Numa(_)))) = (bridge(path), path.first()) {
            let known = nodes.entry(bridge).or_insert(*node);
            *known = (*known).min(*node);
        }
    }
    for path in leaves.iter_mut().map(|leaf| &mut leaf.path).chain(company) {
        if let Some(node) = bridge(path).and_then(|bridge| nodes.get(&bridge)) {
            path.retain(|(_, key)| !matches!(key, Key::Numa(_)));
            path.insert(0, (Nearness::Numa, *node));
        }
    }
}

/// A hive is one group, put below all that its devices have in common. A tree can say no more than this:
///
/// - Where a hive reaches over several switches or sockets, these are parts of it, and what is left of them when the hive is taken
///   out are groups of their own: two devices behind one switch in different hives are as far from each other as the hives.
/// - A device is in one hive. That it has links to some of another one (a cube mesh, a ring) is not known here.
fn put_hives(leaves: &mut [Leaf<'_>]) {
    for around in 0.. {
        let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, leaf) in leaves.iter().enumerate() {
            if let Some(hive) = leaf.device.and_then(|device| hives(device).nth(around)) {
                members.entry(hive).or_default().push(at);
            }
        }
        if members.is_empty() {
            return;
        }
        for (number, members) in members.into_values().enumerate().filter(|(_, members)| members.len() > 1) {
            let first = &leaves[members[0]].path;
            let common = |path: &Path| first.iter().zip(path).take_while(|((_, one), (_, other))| one == other).count();
            let depth = members.iter().map(|at| common(&leaves[*at].path)).min().unwrap_or_default();
            for at in members {
                let path = &mut leaves[at].path;
                let above = depth.checked_sub(1).map_or(Nearness::System, |above| path[above].0);
                path.insert(depth, (above, Key::Hive(around, number)));
                path[depth..].iter_mut().for_each(|(nearness, _)| *nearness = nearness.in_hives(around + 1));
            }
        }
    }
}

/// Devices that share the first `depth` places, in the order of the others. A group of a single part is that part.
fn group(nearness: Nearness, leaves: &mut [Leaf<'_>], depth: usize, company: &Company) -> Group {
    let near = |key: &Key| company.get(key).copied().unwrap_or_default();
    if let [Leaf { path, free, must, total, .. }] = leaves {
        let pull = path.iter().skip(depth).map(|(_, key)| near(key)).sum();
        let free = std::mem::take(free);
        return Group { nearness: Nearness::Device, free: free.len(), must: *must, total: *total, pull, parts: Parts::Shares(free) };
    }
    let place = |leaf: &Leaf<'_>| leaf.path.get(depth).copied();
    let same = |a: &Leaf<'_>, b: &Leaf<'_>| place(a).zip(place(b)).is_some_and(|((_, a), (_, b))| a == b);
    let of_place = |leaves: &mut [Leaf<'_>]| match leaves.first().and_then(place) {
        Some((nearness, key)) => {
            let below = group(nearness, leaves, depth + 1, company);
            Group { pull: below.pull + near(&key), ..below }
        }
        None => group(Nearness::Device, leaves, depth, company),
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
