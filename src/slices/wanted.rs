//! The slices that this node should have: from the inventory to the devices of each pool, and from
//! there to slices.
//!
//! A device stays in its slice while it is published, so most changes touch one slice. A device
//! that a claim holds is published for as long as the claim holds it, even if it is absent.

mod candidates;
pub(super) mod counters;
mod taints;

use super::api::object;
use super::api::{self, Attribute, ResourceSlice, limits};
use super::attributes::{Dropped, Facts, SHARES, describe};
use super::names::NodeName;
use crate::domain::{DeviceId, DraName, Offering, ResourceName, Verdicts};
use candidates::{Candidate, candidates};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What decides which devices are published, and how.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The node.
    pub node: &'a NodeName,
    /// The resources of the inventory. Their API decides which devices are published
    /// ([`Api::in_slice`](crate::domain::Api::in_slice)).
    pub resources: &'a BTreeMap<ResourceName, Arc<Offering>>,
    /// The devices that claims hold. They are published under any circumstances.
    pub claimed: &'a BTreeSet<DraName>,
    /// The ids that containers hold by the device plugin. The scheduler does not know of them.
    pub held: &'a BTreeSet<(ResourceName, DeviceId)>,
    /// The shares of devices that claims hold, each with the name under which a claim has it.
    pub shares: &'a BTreeMap<(ResourceName, DeviceId), DraName>,
    /// The verdicts, for the values and the effects of taints.
    pub verdicts: &'a Verdicts,
    /// Facts that are not in the records of devices.
    pub facts: Facts<'a>,
}

/// The devices to publish, without their places in slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedDevices {
    /// The node.
    pub node: NodeName,
    /// The devices of each pool, by name.
    pub pools: BTreeMap<String, BTreeMap<String, api::Device>>,
    /// The devices that claims hold.
    pub claimed: BTreeSet<DraName>,
    /// What is not published, since the API server would refuse it.
    pub dropped: BTreeSet<Dropped>,
}

/// The devices to publish.
#[must_use]
pub fn wanted_devices(inputs: &Inputs<'_>) -> WantedDevices {
    let mut wanted = WantedDevices {
        node: inputs.node.clone(),
        pools: BTreeMap::new(),
        claimed: inputs.claimed.clone(),
        dropped: BTreeSet::new(),
    };
    let mut pool_of_claim: BTreeMap<&str, &str> = BTreeMap::new();
    pool_of_claim.extend(inputs.claimed.iter().map(|it| (it.device.as_str(), it.pool.as_str())));
    for (name, candidate) in candidates(inputs) {
        let Candidate { offering, id, offered, family, .. } = &candidate;
        let pool = inputs.node.pool(*family);
        let facts = Facts { taken: candidate.taken, ..inputs.facts };
        let (mut device, dropped) = describe(&name, &offering.spec, id, &offered.device, facts);
        device.taints = taints::of(inputs, &candidate);
        let is_in_another_pool =
            pool_of_claim.get(device.name.as_str()).is_some_and(|claimed| *claimed != pool);
        if is_in_another_pool {
            device.taints.push(taints::held_by_claim());
        }
        wanted.dropped.extend(dropped);
        wanted.pools.entry(pool).or_default().insert(device.name.clone(), device);
    }
    wanted
}

/// The slices of one pool by number, each with its devices.
type Slices = BTreeMap<u32, Vec<api::Device>>;

/// The devices in their slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    node: NodeName,
    pools: BTreeMap<String, Slices>,
    claimed: BTreeSet<DraName>,
}

impl Layout {
    /// No slices yet.
    #[must_use]
    pub fn new(node: NodeName) -> Self {
        Layout { node, pools: BTreeMap::new(), claimed: BTreeSet::new() }
    }

    /// The layout of slices that an earlier instance wrote.
    pub fn of_slices<'a>(
        node: NodeName,
        slices: impl IntoIterator<Item = &'a ResourceSlice>,
    ) -> Self {
        let mut newest: BTreeMap<(&str, u32), &ResourceSlice> = BTreeMap::new();
        for slice in slices {
            let pool = &slice.spec.pool;
            let index = node.slice_index(&pool.name, &slice.metadata.name);
            let Some(index) = index.filter(|index| *index < counters::FIRST) else { continue };
            let known = newest.entry((&pool.name, index)).or_insert(slice);
            if known.spec.pool.generation < pool.generation {
                *known = slice;
            }
        }
        let mut pools: BTreeMap<String, Slices> = BTreeMap::new();
        let mut placed: BTreeSet<(&str, &str)> = BTreeSet::new();
        for ((pool, index), slice) in newest {
            let devices = slice.spec.devices.iter();
            let devices = devices.filter(|device| placed.insert((pool, &device.name))).cloned();
            pools.entry(pool.to_owned()).or_default().insert(index, devices.collect());
        }
        Layout { node, pools, claimed: BTreeSet::new() }
    }

    /// The next layout. A device stays in its slice; a new one fills the first gap. A pool that was
    /// published keeps one slice, also without devices: without any slice the scheduler could not
    /// distinguish it from a pool that it does not know yet.
    #[must_use]
    pub fn followed_by(&self, wanted: &WantedDevices) -> Layout {
        let none = BTreeMap::new();
        let names: BTreeSet<&String> = self.pools.keys().chain(wanted.pools.keys()).collect();
        let pools = names.into_iter().map(|pool| {
            let devices = wanted.pools.get(pool).unwrap_or(&none);
            let former = self.pools.get(pool);
            (pool.clone(), arrange(pool, former, devices, &wanted.claimed))
        });
        Layout {
            node: wanted.node.clone(),
            pools: pools.filter(|(_, slices)| !slices.is_empty()).collect(),
            claimed: wanted.claimed.clone(),
        }
    }

    /// The pools, each with the numbers of its slices and their devices, as they are written.
    ///
    /// `has_taints`: whether the API server keeps taints. Without them a tainted device is left
    /// out, unless a claim holds it.
    pub fn pools(
        &self,
        has_taints: bool,
    ) -> impl Iterator<Item = (&str, BTreeMap<u32, Vec<api::Device>>)> {
        self.pools.iter().map(move |(pool, slices)| {
            let written = |devices: &[api::Device]| self.written(pool, devices, has_taints);
            (pool.as_str(), slices.iter().map(|(at, devices)| (*at, written(devices))).collect())
        })
    }

    /// Whether a claim holds the device.
    #[must_use]
    pub fn is_claimed(&self, pool: &str, device: &str) -> bool {
        self.claimed.contains(&DraName { pool: pool.to_owned(), device: device.to_owned() })
    }

    /// Whether claims hold devices.
    #[must_use]
    pub fn has_claims(&self) -> bool {
        !self.claimed.is_empty()
    }

    /// Sets the devices that claims hold.
    pub fn claim(&mut self, claimed: &BTreeSet<DraName>) {
        self.claimed.clone_from(claimed);
    }

    /// Adds the devices of a published slice that have no place, if claims hold them, or if they
    /// are among the `wanted` ones.
    pub fn adopt(
        &mut self,
        pool: &str,
        index: u32,
        published: &[api::Device],
        wanted: Option<&BTreeMap<String, api::Device>>,
    ) {
        for device in published {
            let is_wanted = wanted.is_some_and(|wanted| wanted.contains_key(&device.name));
            if !is_wanted && !self.is_claimed(pool, &device.name) {
                continue;
            }
            let slices = self.pools.entry(pool.to_owned()).or_default();
            if slices.values().flatten().any(|known| known.name == device.name) {
                continue;
            }
            let devices = slices.entry(index).or_default();
            devices.push(absent(device));
            if devices.len() > limits::DEVICES {
                // The API server does not have all of them in this slice yet.
                let is_new = |it: &api::Device| published.iter().all(|known| known.name != it.name);
                let moved = devices.iter().rposition(is_new).map(|at| devices.remove(at));
                moved.into_iter().for_each(|moved| place(slices, moved));
            }
            slices.values_mut().for_each(|devices| devices.sort_by_key(order));
        }
    }

    fn written(&self, pool: &str, devices: &[api::Device], has_taints: bool) -> Vec<api::Device> {
        if has_taints {
            return devices.to_vec();
        }
        let stays =
            |device: &&api::Device| device.taints.is_empty() || self.is_claimed(pool, &device.name);
        let untainted = |device: &api::Device| {
            let mut written = api::Device { taints: Vec::new(), ..device.clone() };
            // A claim has at least one share, so that there is none for another claim.
            if let Some(shares) = written.capacity.get_mut(SHARES)
                && !device.taints.is_empty()
            {
                shares.value = "1".to_owned();
            }
            written
        };
        devices.iter().filter(stays).map(untainted).collect()
    }

    /// The slices as objects of a first generation.
    #[must_use]
    pub fn objects(&self) -> Vec<ResourceSlice> {
        let mut objects = Vec::new();
        for (pool, slices) in self.pools(true) {
            let slices = self.contents(pool, slices, true);
            let count = slices.len();
            for (index, content) in slices {
                objects.push(object(&self.node, pool, index, 1, count, content));
            }
        }
        objects
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Whether the change from `former` is good news alone: taints were removed, and devices were
    /// added without one. Bad news is urgent: a claim could get the device until it is published.
    #[must_use]
    pub fn is_good_news_after(&self, former: &Layout) -> bool {
        let devices = |layout: &'_ Layout| -> BTreeMap<(String, String), api::Device> {
            let pools = layout.pools.iter();
            let all = pools.flat_map(|(pool, slices)| {
                slices
                    .values()
                    .flatten()
                    .map(move |it| ((pool.clone(), it.name.clone()), it.clone()))
            });
            all.collect()
        };
        let (before, now) = (devices(former), devices(self));
        before.iter().all(|(name, before)| {
            now.get(name).is_some_and(|now| now.taints.iter().all(|it| before.taints.contains(it)))
        })
    }
}

/// Arranges the devices of one pool.
fn arrange(
    pool: &str,
    former: Option<&Slices>,
    wanted: &BTreeMap<String, api::Device>,
    claimed: &BTreeSet<DraName>,
) -> Slices {
    let mut slices = Slices::new();
    let mut placed: BTreeSet<&str> = BTreeSet::new();
    for (index, devices) in former.into_iter().flatten() {
        let kept: Vec<api::Device> = devices
            .iter()
            .filter_map(|device| {
                let is_claimed = || {
                    let name = DraName { pool: pool.to_owned(), device: device.name.clone() };
                    claimed.contains(&name)
                };
                let now = wanted.get(&device.name).cloned();
                now.or_else(|| is_claimed().then(|| absent(device)))
            })
            .collect();
        placed.extend(devices.iter().map(|device| device.name.as_str()));
        if !kept.is_empty() {
            slices.insert(*index, kept);
        }
    }
    let mut new: Vec<&api::Device> =
        wanted.values().filter(|device| !placed.contains(device.name.as_str())).collect();
    new.sort_by_key(|device| order(device));
    new.into_iter().for_each(|device| place(&mut slices, device.clone()));
    slices.values_mut().for_each(|devices| devices.sort_by_key(order));
    if slices.is_empty()
        && let Some((first, _)) = former.and_then(BTreeMap::first_key_value)
    {
        slices.insert(*first, Vec::new());
    }
    slices
}

/// Puts a device into the first gap.
fn place(slices: &mut Slices, device: api::Device) {
    let mut index = 0;
    while slices.get(&index).is_some_and(|devices| devices.len() >= limits::DEVICES) {
        index += 1;
    }
    slices.entry(index).or_default().push(device);
}

/// The order in a slice: by id. It is fixed, since another order is another write.
fn order(device: &api::Device) -> (String, String) {
    let id = match device.attributes.get("id") {
        Some(Attribute::Text(id)) => id.clone(),
        _ => String::new(),
    };
    (id, device.name.clone())
}

/// A device that a claim holds and the inventory no longer has.
fn absent(device: &api::Device) -> api::Device {
    let taints = vec![taints::absent()];
    api::Device { taints, consumes_counters: Vec::new(), ..device.clone() }
}

#[cfg(test)]
mod tests {
    use super::super::api::NO_SCHEDULE;
    use super::super::attributes::violations;
    use super::super::names::{device_name, is_label};
    use super::*;
    use crate::domain::{
        Api, Attributes, Cordon, Device, DeviceClass, Health, Offered, PciFunction, Reason,
        ResourceSpec, Sharing, Timestamp, Verdict,
    };
    use proptest::prelude::*;

    const POOL: &str = "n1/gpu";

    fn node() -> NodeName {
        NodeName::new("n1").unwrap()
    }

    fn device(address: &str, class: DeviceClass) -> Arc<Device> {
        Arc::new(Device {
            id: DeviceId::new(address),
            key: format!("pci:{address}/10de:2330"),
            class,
            pci: Some(Box::new(PciFunction::at(address.parse().unwrap()))),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        })
    }

    fn address(number: usize) -> String {
        format!("0000:{number:02x}:00.0")
    }

    /// An offering of these numbers, with the health of some.
    fn offering(name: &str, numbers: &[usize], unhealthy: &[(usize, Reason)]) -> Arc<Offering> {
        let spec = ResourceSpec::new(name.parse().unwrap(), DeviceClass::Gpu);
        let spec = Arc::new(ResourceSpec { api: Api::Dra, ..spec });
        let devices = numbers.iter().map(|number| {
            let device = device(&address(*number), DeviceClass::Gpu);
            let reason = unhealthy.iter().find(|(it, _)| it == number).map(|(_, reason)| *reason);
            let health = reason.map_or(Health::Healthy, Health::Unhealthy);
            (device.id.clone(), Offered { device, health })
        });
        Arc::new(Offering { spec, devices: devices.collect() })
    }

    #[derive(Default)]
    struct World {
        resources: BTreeMap<ResourceName, Arc<Offering>>,
        claimed: BTreeSet<DraName>,
        held: BTreeSet<(ResourceName, DeviceId)>,
        shares: BTreeMap<(ResourceName, DeviceId), DraName>,
        verdicts: Verdicts,
    }

    impl World {
        fn with(offerings: &[Arc<Offering>]) -> Self {
            let resources =
                offerings.iter().map(|it| (it.spec.name.clone(), Arc::clone(it))).collect();
            World { resources, ..World::default() }
        }

        fn wanted(&self) -> WantedDevices {
            wanted_devices(&Inputs {
                node: &node(),
                resources: &self.resources,
                claimed: &self.claimed,
                held: &self.held,
                shares: &self.shares,
                verdicts: &self.verdicts,
                facts: Facts::default(),
            })
        }

        fn taints(&self) -> Vec<String> {
            let wanted = self.wanted();
            let devices = wanted.pools.values().flat_map(BTreeMap::values);
            let taints = devices.flat_map(|device| &device.taints);
            taints.map(|it| format!("{}={}:{}", it.key, it.value, it.effect)).collect()
        }
    }

    fn claim(number: usize) -> DraName {
        DraName { pool: POOL.into(), device: device_name(&DeviceId::new(address(number))) }
    }

    /// The numbers of the devices in each slice.
    fn places(layout: &Layout) -> BTreeMap<u32, Vec<usize>> {
        let number = |it: &api::Device| usize::from_str_radix(&it.name[5..7], 16).unwrap();
        let mut pools = layout.pools(true);
        let slices = pools.next().map(|(_, slices)| slices).unwrap_or_default();
        let numbers = |devices: Vec<api::Device>| devices.iter().map(number).collect();
        slices.into_iter().map(|(index, devices)| (index, numbers(devices))).collect()
    }

    /// A resource of one device with this number of shares, of whose capacity claims have parts if
    /// `capacity`.
    fn shared(shares: u32, capacity: bool) -> World {
        let mut offering = offering("a.b/gpu", &[1], &[]);
        let of = Arc::make_mut(&mut offering);
        let sharing = Sharing::Replicas(shares);
        of.spec = Arc::new(ResourceSpec { sharing, capacity, ..ResourceSpec::clone(&of.spec) });
        let (whole, offered) = of.devices.pop_first().unwrap();
        of.devices = sharing.ids(&whole).map(|id| (id, offered.clone())).collect();
        World::with(&[offering])
    }

    /// Each device with its taints, the claims that may have it, and whether several may.
    fn shown(world: &World) -> Vec<(String, Vec<String>, Option<String>)> {
        let wanted = world.wanted();
        let devices = wanted.pools.values().flat_map(BTreeMap::values);
        let shown = devices.map(|it| {
            assert!(violations(it).is_empty(), "{it:?}");
            let taints = it.taints.iter().map(|it| format!("{}={}", &it.key[13..], it.value));
            let shares = it.capacity.get(SHARES);
            assert_eq!(it.allow_multiple_allocations, shares.is_some());
            (it.name.clone(), taints.collect(), shares.map(|it| it.value.clone()))
        });
        shown.collect()
    }

    #[test]
    fn claims_have_parts_of_one_device_or_shares_by_their_names() {
        let resource: ResourceName = "a.b/gpu".parse().unwrap();
        let (whole, name) = (DeviceId::new(address(1)), claim(1).device);
        let named = |device: &str| DraName { pool: POOL.into(), device: device.into() };
        let one = |taints: &[&str], shares: &str| {
            let taints = taints.iter().map(|&it| it.to_owned()).collect();
            (name.clone(), taints, Some(shares.to_owned()))
        };
        let mut world = shared(3, true);
        assert_eq!(shown(&world), [one(&[], "3")]);
        let hold = |world: &mut World, share, name: &str| {
            world.shares.insert((resource.clone(), whole.share(share)), named(name));
            world.claimed.insert(named(name));
        };
        hold(&mut world, 1, &name);
        assert_eq!(shown(&world), [one(&[], "3")], "the scheduler counts that part");
        // A claim from before the key was set, and a container.
        let share = format!("{name}-s0");
        hold(&mut world, 0, &share);
        let former = (share, vec!["not-for-claims=".to_owned()], None);
        assert_eq!(shown(&world), [one(&[], "2"), former.clone()]);
        world.held.insert((resource.clone(), whole.share(2)));
        assert_eq!(shown(&world), [one(&[], "1"), former.clone()]);
        world.shares.clear();
        world.claimed = [named(&former.0)].into();
        hold(&mut world, 0, &former.0);
        world.held.insert((resource.clone(), whole.share(1)));
        assert_eq!(shown(&world), [one(&["held=device-plugin"], "1"), former.clone()]);
        world.held.clear();
        for share in [1, 2] {
            hold(&mut world, share, &format!("{name}-s{share}"));
        }
        assert_eq!(shown(&world)[0], one(&["held=claim"], "1"));
        // The key was removed.
        let mut world = shared(2, false);
        hold(&mut world, 1, &name);
        let shares = shown(&world);
        assert_eq!(shares[0], (format!("{name}-s0"), vec![], None));
        assert_eq!(shares[1], (format!("{name}-s1"), vec!["held=claim".to_owned()], None));
    }

    #[test]
    fn a_device_with_parts_that_is_not_selected_any_more_is_for_no_other_claim() {
        let resource: ResourceName = "a.b/gpu".parse().unwrap();
        let whole = DeviceId::new(address(1));
        let mut world = shared(3, true);
        world.shares.insert((resource.clone(), whole.share(1)), claim(1));
        world.claimed.insert(claim(1));
        let ending = [(claim(1).device, vec!["not-for-claims=".to_owned()], Some("3".to_owned()))];
        let change = |world: &mut World, change: &dyn Fn(&mut Offering)| {
            let (name, mut of) = world.resources.pop_first().unwrap();
            change(Arc::make_mut(&mut of));
            world.resources.insert(name, of);
        };
        // The free shares are in the list for a minute, and then only the one of the claim.
        change(&mut world, &|of| {
            for share in [0, 2] {
                let free = of.devices.get_mut(&whole.share(share)).unwrap();
                free.health = Health::Unhealthy(Reason::Deselected);
            }
        });
        assert_eq!(shown(&world), ending);
        change(&mut world, &|of| of.devices.retain(|id, _| *id == whole.share(1)));
        assert_eq!(shown(&world), ending);
        // An API server without taints: the part of the claim leaves nothing.
        let layout = Layout::new(node()).followed_by(&world.wanted());
        let (_, slices) = layout.pools(false).next().unwrap();
        let [device] = &slices[&0][..] else { panic!("{slices:?}") };
        assert_eq!((device.taints.len(), device.capacity[SHARES].value.as_str()), (0, "1"));
    }

    #[test]
    fn a_device_stays_in_its_slice_and_a_gap_is_filled_first() {
        let all: Vec<usize> = (0..130).collect();
        let first =
            Layout::new(node()).followed_by(&World::with(&[offering("a.b/c", &all, &[])]).wanted());
        let counts: Vec<usize> = places(&first).values().map(Vec::len).collect();
        assert_eq!(counts, [64, 64, 2]);
        let fewer: Vec<usize> =
            all.iter().copied().filter(|it| ![3, 70, 128].contains(it)).collect();
        let without = World::with(&[offering("a.b/c", &fewer, &[])]);
        let second = first.followed_by(&without.wanted());
        let more: Vec<usize> = fewer.iter().copied().chain([200, 201, 202]).collect();
        let third = second.followed_by(&World::with(&[offering("a.b/c", &more, &[])]).wanted());
        let places = places(&third);
        let added = |index: u32| places[&index].iter().filter(|it| **it >= 200).count();
        assert_eq!((added(0), added(1), added(2)), (1, 1, 1));
        assert!(places[&0].is_sorted() && places[&0].contains(&63) && places[&1].contains(&64));
        let objects = third.objects();
        assert_eq!(
            Layout::of_slices(node(), &objects).pools,
            third.pools,
            "as an instance reads it"
        );
    }

    #[test]
    fn an_empty_pool_has_one_slice_only_if_it_was_published() {
        let nothing = World::with(&[offering("a.b/c", &[], &[])]).wanted();
        assert_eq!(Layout::new(node()).followed_by(&nothing).objects(), []);
        let one =
            Layout::new(node()).followed_by(&World::with(&[offering("a.b/c", &[1], &[])]).wanted());
        let emptied = one.followed_by(&nothing).objects();
        let slices: Vec<_> =
            emptied.iter().map(|it| (it.metadata.name.as_str(), it.spec.devices.len())).collect();
        assert_eq!(slices, [("n1-holdfast.dev-gpu-0", 0)]);
    }

    #[test]
    fn a_claimed_device_stays_although_it_is_absent() {
        let mut world = World::with(&[offering("a.b/c", &[1, 2], &[])]);
        let before = Layout::new(node()).followed_by(&world.wanted());
        world.claimed.insert(claim(1));
        world.resources.clear();
        let after = before.followed_by(&world.wanted());
        assert_eq!(places(&after), [(0, vec![1])].into());
        let [slice] = &after.objects()[..] else { panic!("one slice") };
        assert_eq!(slice.spec.devices[0].taints[0].key, "holdfast.dev/device-gone");
        assert!(!after.is_good_news_after(&before) && before.is_good_news_after(&before));
        world.claimed.clear();
        assert_eq!(places(&after.followed_by(&world.wanted())), [(0, vec![])].into());
    }

    #[test]
    fn health_cordons_and_holders_are_taints() {
        let mut world = World::with(&[offering("a.b/c", &[1], &[(1, Reason::Xid)])]);
        let id = DeviceId::new(address(1));
        let faults = [(Reason::Xid, "Xid 79".to_owned())].into();
        let verdict = Verdict { faults, ..Verdict::default() };
        assert_eq!(world.taints(), ["holdfast.dev/xid=:NoSchedule"]);
        world.verdicts.insert(id.clone(), verdict.clone());
        assert_eq!(world.taints(), ["holdfast.dev/xid=79:NoSchedule"]);
        world.held.insert(("a.b/c".parse().unwrap(), id.clone()));
        let held = "holdfast.dev/held=device-plugin:NoSchedule";
        assert_eq!(world.taints(), ["holdfast.dev/xid=79:NoSchedule", held]);

        let reason = "fan, replaced: on Monday".to_owned();
        let cordon = |evicts| Some(Cordon { reason: reason.clone(), at: Timestamp(0), evicts });
        let cordoned = "holdfast.dev/cordoned=fan:NoExecute";
        world.verdicts.insert(id.clone(), Verdict { cordon: cordon(true), ..verdict.clone() });
        let both = ["holdfast.dev/xid=79:NoSchedule", cordoned, held];
        assert_eq!(world.taints(), both, "only the order deletes pods");
        let mut world = World::with(&[offering("a.b/c", &[1], &[(1, Reason::Cordoned)])]);
        world.verdicts.insert(id.clone(), Verdict { cordon: cordon(true), ..verdict.clone() });
        assert_eq!(world.taints(), [cordoned]);
        world.verdicts.insert(id, Verdict { cordon: cordon(false), ..verdict });
        assert_eq!(world.taints(), ["holdfast.dev/cordoned=fan:NoSchedule"]);
        let viable = World::with(&[offering("a.b/c", &[1], &[(1, Reason::GroupNotViable)])]);
        assert_eq!(viable.taints(), ["holdfast.dev/iommu-group-not-viable=:NoSchedule"]);
    }

    fn with_api(api: Api, offering: &Arc<Offering>) -> Arc<Offering> {
        let spec = ResourceSpec { api, ..(*offering.spec).clone() };
        Arc::new(Offering { spec: Arc::new(spec), ..(**offering).clone() })
    }

    /// The devices 1 (free), 2 (of a container) and 3 (of a claim), each with its taints.
    #[test]
    fn the_api_of_the_resource_decides_what_the_slice_says_of_each_device() {
        let (held, ending) = ("held=device-plugin", "not-for-claims=");
        let of_both = Api::Returning { by_number: true };
        for (api, expected) in [
            (Api::Plugin, vec![(3, ending)]),
            (Api::Dra, vec![(1, ""), (2, held), (3, "")]),
            (Api::Both, vec![(1, ""), (2, held), (3, "")]),
            (of_both, vec![(1, ending), (2, held), (3, ending)]),
            (Api::Returning { by_number: false }, vec![(1, ending), (2, held), (3, ending)]),
        ] {
            let mut world = World::with(&[with_api(api, &offering("a.b/c", &[1, 2, 3], &[]))]);
            world.held.insert(("a.b/c".parse().unwrap(), DeviceId::new(address(2))));
            world.claimed.insert(claim(3));
            let wanted = world.wanted();
            let of = |number: usize| {
                let device = wanted.pools.get(POOL)?.get(&claim(number).device)?;
                assert!(device.taints.iter().all(|it| it.effect == NO_SCHEDULE));
                let taints = device.taints.iter().map(|it| format!("{}={}", it.key, it.value));
                let taints: Vec<String> = taints.collect();
                Some((number, taints.join(",").replace("holdfast.dev/", "")))
            };
            let shown: Vec<_> = (1..=3).filter_map(of).collect();
            let expected: Vec<_> =
                expected.into_iter().map(|(number, taint)| (number, taint.to_owned())).collect();
            assert_eq!(shown, expected, "{api:?}");
        }
    }

    #[test]
    fn a_lost_device_evicts_the_pods_of_its_claims() {
        let mut world =
            World::with(&[with_api(Api::Both, &offering("a.b/c", &[1, 2], &[(2, Reason::Xid)]))]);
        world.held.insert(("a.b/c".parse().unwrap(), DeviceId::new(address(1))));
        let mut wanted = world.wanted();
        // The second one is held as another object of the container; the third one is unknown.
        wanted.evict(&[claim(1), claim(2), claim(3)].into());
        let taints = |number: usize| {
            let device = &wanted.pools[POOL][&claim(number).device];
            let taints = device.taints.iter();
            taints.map(|it| format!("{}={}:{}", it.key, it.value, it.effect)).collect::<Vec<_>>()
        };
        let evicts = "holdfast.dev/held=device-plugin:NoExecute";
        assert_eq!(taints(1), [evicts]);
        assert_eq!(taints(2), ["holdfast.dev/xid=:NoSchedule", evicts]);
        let layout = Layout::new(node()).followed_by(&wanted);
        let before = Layout::new(node()).followed_by(&world.wanted());
        assert!(!layout.is_good_news_after(&before), "an eviction is urgent");
    }

    #[test]
    fn a_device_that_moves_to_a_resource_for_claims_is_that_ones() {
        let ending = with_api(Api::Returning { by_number: true }, &offering("a.b/old", &[1], &[]));
        let failed = offering("a.b/new", &[1], &[(1, Reason::PortDown)]);
        let world = World::with(&[ending, failed]);
        assert_eq!(world.taints(), ["holdfast.dev/port-down=:NoSchedule"]);
    }

    #[test]
    fn without_taints_a_tainted_device_is_left_out_unless_a_claim_holds_it() {
        let xid = [(1, Reason::Xid), (2, Reason::Xid)];
        let mut world = World::with(&[offering("a.b/c", &[1, 2, 3], &xid)]);
        world.claimed.insert(claim(2));
        let layout = Layout::new(node()).followed_by(&world.wanted());
        let (_, slices) = layout.pools(false).next().unwrap();
        let names: Vec<&str> = slices[&0].iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, [claim(2).device, claim(3).device]);
        assert!(slices[&0].iter().all(|it| it.taints.is_empty()));
    }

    #[test]
    fn a_device_that_two_resources_have_is_published_once() {
        let deselected = offering("a.b/old", &[1], &[(1, Reason::Deselected)]);
        let both = World::with(&[deselected, offering("a.b/new", &[1], &[])]);
        let wanted = both.wanted();
        let devices: Vec<_> = wanted.pools[POOL].values().collect();
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].attributes["resource"], Attribute::text("a.b/new"));
    }

    #[test]
    fn the_shares_of_two_pools_have_different_names() {
        let pooled = |name: &str| {
            let offering = (*offering(name, &[1], &[])).clone();
            let spec = ResourceSpec { sharing: Sharing::Pool(2), ..(*offering.spec).clone() };
            let any = offering.devices.into_values().next().unwrap();
            let ids = spec.sharing.ids(&any.device.id);
            let devices = ids.map(|id| (id, any.clone())).collect();
            Arc::new(Offering { spec: Arc::new(spec), devices })
        };
        let world = World::with(&[pooled("a.b/c"), pooled("a.b/d")]);
        let names = world.wanted().pools[POOL].keys().cloned().collect::<Vec<_>>();
        assert!(names.len() == 4 && names.iter().all(|name| is_label(name)), "{names:?}");
    }

    proptest! {
        /// Any history of devices that come and go: each slice fulfils the limits, no name is twice
        /// in a pool, and a device never changes its slice.
        #[test]
        fn a_layout_is_always_valid_and_keeps_places(
            steps in prop::collection::vec(
                (prop::collection::btree_set(0_usize..200, 0..140), prop::collection::btree_set(0_usize..200, 0..3)),
                1..8,
            ),
        ) {
            let mut layout = Layout::new(node());
            let mut published: BTreeSet<usize> = BTreeSet::new();
            for (numbers, claimed) in steps {
                let numbers: Vec<usize> = numbers.into_iter().collect();
                let mut world = World::with(&[offering("a.b/c", &numbers, &[])]);
                let claimed: BTreeSet<usize> = claimed.intersection(&published).copied().collect();
                world.claimed = claimed.iter().map(|number| claim(*number)).collect();
                let next = layout.followed_by(&world.wanted());
                let (before, after) = (places(&layout), places(&next));
                let place = |places: &BTreeMap<u32, Vec<usize>>, number: usize| {
                    places.iter().find(|(_, it)| it.contains(&number)).map(|(index, _)| *index)
                };
                let now: Vec<usize> = after.values().flatten().copied().collect();
                let unique: BTreeSet<usize> = now.iter().copied().collect();
                prop_assert_eq!(now.len(), unique.len());
                prop_assert_eq!(&unique, &numbers.iter().copied().chain(claimed).collect());
                for number in &unique {
                    let former = place(&before, *number);
                    prop_assert!(former.is_none() || former == place(&after, *number));
                }
                for object in next.objects() {
                    prop_assert!(object.spec.devices.len() <= limits::DEVICES);
                    prop_assert!(object.spec.devices.iter().all(|it| violations(it).is_empty()));
                }
                (layout, published) = (next, unique);
            }
        }
    }
}
