//! Examples of choices, and a comparison with a brute-force search that uses no tree.

use super::*;
use crate::domain::topology::{Nearness, Placement, hives, nearness, places};
use crate::domain::{Api, Device, Health, Offered, Sharing};
use crate::hardware::testing;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A device: its name, its NUMA node, and the bridges above it as bus numbers, from the root port
/// down.
type Where<'a> = (&'a str, Option<u32>, &'a [u8]);

fn device((name, numa, bridges): Where<'_>, number: u8) -> Arc<Device> {
    let mut device = testing::device(&format!("0000:{:02x}:00.0", 0x80 + number), name);
    let function = device.pci.as_mut().unwrap();
    function.bridges =
        bridges.iter().map(|bus| format!("0000:{bus:02x}:01.0").parse().unwrap()).collect();
    device.numa_nodes = numa.into_iter().collect();
    Arc::new(device)
}

fn offering(placement: Placement, devices: &[Where<'_>], shares: u32) -> Offering {
    let mut offering = super::super::core::tests::offering(&[]);
    let mut spec = (*offering.spec).clone();
    (spec.placement, spec.sharing) = (placement, Sharing::replicas(shares));
    offering.spec = Arc::new(spec);
    for (number, place) in devices.iter().enumerate() {
        let device = device(*place, u8::try_from(number).unwrap());
        let offered = || Offered { device: Arc::clone(&device), health: Health::Healthy };
        offering.devices.extend(offering.spec.sharing.ids(&device.id).map(|id| (id, offered())));
    }
    offering
}

fn ids(text: &str) -> Vec<DeviceId> {
    text.split_whitespace().map(DeviceId::new).collect()
}

fn text(ids: &[DeviceId]) -> String {
    ids.iter().map(DeviceId::as_str).collect::<Vec<_>>().join(" ")
}

/// A board with two sockets, two switches on each, and two devices behind each switch.
const BOARD: [Where<'static>; 8] = [
    ("a0", Some(0), &[0x10, 0x11]),
    ("a1", Some(0), &[0x10, 0x11]),
    ("b0", Some(0), &[0x20, 0x21]),
    ("b1", Some(0), &[0x20, 0x21]),
    ("c0", Some(1), &[0x30, 0x31]),
    ("c1", Some(1), &[0x30, 0x31]),
    ("d0", Some(1), &[0x40, 0x41]),
    ("d1", Some(1), &[0x40, 0x41]),
];

fn on_board(placement: Placement, available: &str, must: &str, size: usize) -> String {
    text(&choose(&offering(placement, &BOARD, 1), &ids(available), &ids(must), size).unwrap())
}

const ALL: &str = "a0 a1 b0 b1 c0 c1 d0 d1";

#[test]
fn closest_prefers_one_switch_then_one_socket() {
    let closest = |available, must, size| on_board(Placement::Closest, available, must, size);
    assert_eq!(closest(ALL, "", 2), "a0 a1");
    assert_eq!(closest("a0 b0 c0 c1", "", 2), "c0 c1");
    assert_eq!(closest(ALL, "", 4), "a0 a1 b0 b1");
    assert_eq!(closest(ALL, "d1", 2), "d1 d0");
    assert_eq!(closest("a0 b0 b1 c0 d0", "", 3), "a0 b0 b1", "one socket, not two");
    assert_eq!(
        closest(ALL, "a0 c0", 3),
        "a0 c0 a1",
        "the two that must be included are the farthest already"
    );
}

#[test]
fn whole_switches_stay_free_for_larger_requests() {
    let closest = |available, size| on_board(Placement::Closest, available, "", size);
    assert_eq!(closest("a0 a1 b1 c0 c1 d0 d1", 1), "b1", "its neighbour is taken already");
    assert_eq!(closest("a0 a1 b1 d0", 1), "d0", "its socket has fewer free devices");
    let four = [
        ("a", &[1, 2][..]),
        ("b", &[1, 2]),
        ("c", &[1, 2]),
        ("d", &[1, 2]),
        ("e", &[3, 4]),
        ("f", &[3, 4]),
        ("g", &[3, 4]),
        ("h", &[3, 4]),
    ];
    let four = offering(Placement::Closest, &four.map(|(name, bridges)| (name, None, bridges)), 1);
    let first = choose(&four, &ids("a b c d e f g h"), &[], 2).unwrap();
    assert_eq!(text(&first), "a b");
    assert_eq!(
        text(&choose(&four, &ids("c d e f g h"), &[], 2).unwrap()),
        "c d",
        "the other switch stays whole"
    );
    assert_eq!(text(&choose(&four, &ids("c d e f g h"), &[], 4).unwrap()), "e f g h");
}

#[test]
fn packed_fills_used_groups_and_spread_uses_the_emptiest() {
    assert_eq!(
        on_board(Placement::Packed, "a0 a1 b1 c1 d0 d1", "", 2),
        "b1 c1",
        "at any distance from each other"
    );
    assert_eq!(on_board(Placement::Packed, ALL, "", 3), "a0 a1 b0");
    assert_eq!(on_board(Placement::Spread, ALL, "", 2), "a0 c0");
    assert_eq!(on_board(Placement::Spread, ALL, "", 4), "a0 b0 c0 d0");
    assert_eq!(
        on_board(Placement::Spread, "a1 b0 b1 c0 c1 d0 d1", "", 1),
        "c0",
        "on the socket without a grant"
    );
}

#[test]
fn shares_of_different_devices_come_first_and_of_the_least_used_one() {
    let shared = |placement| offering(placement, &[("a", None, &[]), ("b", None, &[])], 3);
    let closest = shared(Placement::Closest);
    let choose = |offering: &Offering, available, must, size| {
        text(&choose(offering, &ids(available), &ids(must), size).unwrap())
    };
    assert_eq!(choose(&closest, "a::0 a::1 a::2 b::0 b::1 b::2", "", 2), "a::0 b::0");
    assert_eq!(choose(&closest, "a::1 b::0 b::1", "a::0", 3), "a::0 a::1 b::0");
    assert_eq!(choose(&closest, "a::1 b::0 b::1 b::2", "", 1), "b::0", "less used");
    assert_eq!(choose(&shared(Placement::Spread), "a::1 b::0 b::1 b::2", "", 1), "b::0");
    assert_eq!(
        choose(&shared(Placement::Packed), "a::1 b::0 b::1 b::2", "", 1),
        "a::1",
        "more used"
    );
}

#[test]
fn with_both_apis_containers_get_the_last_of_equal_devices() {
    let with_both = |mut offering: Offering| {
        Arc::make_mut(&mut offering.spec).api = Api::Both;
        offering
    };
    let board = |placement| with_both(offering(placement, &BOARD, 1));
    let closest = board(Placement::Closest);
    assert_eq!(of(&closest, ALL, "", 1), "d1");
    assert_eq!(of(&closest, ALL, "", 2), "d1 d0");
    assert_eq!(of(&closest, ALL, "a0", 2), "a0 a1", "nearness comes first");
    assert_eq!(of(&closest, "a0 a1 b0 c0 d0", "", 2), "a1 a0", "one switch comes first");
    assert_eq!(of(&board(Placement::Packed), ALL, "", 3), "d1 d0 c1");
    assert_eq!(of(&board(Placement::Spread), ALL, "", 2), "d1 b1");
    let shared = with_both(offering(Placement::Closest, &[("a", None, &[]), ("b", None, &[])], 3));
    assert_eq!(of(&shared, "a::0 a::1 a::2 b::0 b::1 b::2", "a::1", 3), "a::1 b::2 b::1");
    assert_eq!(of(&closest, "?0 ?1", "", 1), "?1");
}

#[test]
fn the_ids_of_one_device_need_not_be_adjacent() {
    let choose =
        |offering: &Offering, available| text(&choose(offering, &ids(available), &[], 2).unwrap());
    let mut pooled =
        offering(Placement::Closest, &[("a", None, &[]), ("ab", None, &[]), ("b", None, &[])], 1);
    let first = pooled.devices[&DeviceId::new("a")].clone();
    pooled.devices.insert(DeviceId::new("ac"), first);
    assert_eq!(choose(&pooled, "a ac b"), "a b", "`ac` is of the device `a`");
    let shared = offering(Placement::Closest, &[("a", None, &[]), ("b", None, &[])], 2);
    assert_eq!(
        choose(&shared, "a a::0 b::0"),
        "a b::0",
        "not offered, but the name of a device that is"
    );
}

/// A device of another resource, behind these bridges.
fn neighbour((name, numa, bridges): Where<'_>, number: u8) -> Arc<Device> {
    device((name, numa, bridges), 0x40 + number)
}

fn choose_near_devices(
    placement: Placement,
    neighbours: &[Where<'_>],
    available: &str,
    size: usize,
) -> String {
    let neighbours: Vec<_> =
        neighbours.iter().zip(0..).map(|(place, number)| neighbour(*place, number)).collect();
    text(
        &choose_near(&offering(placement, &BOARD, 1), &neighbours, &ids(available), &[], size)
            .unwrap(),
    )
}

#[test]
fn few_devices_are_near_their_neighbours_and_many_are_near_each_other_first() {
    const ON: [Where<'static>; 4] = [
        ("x", Some(0), &[0x10, 0x11]),
        ("y", Some(0), &[0x20, 0x21]),
        ("z", Some(1), &[0x30, 0x31]),
        ("w", Some(1), &[0x40, 0x41]),
    ];
    let [a, _, _, d] = ON;
    let closest = |neighbours: &[Where<'_>], available, size| {
        choose_near_devices(Placement::Closest, neighbours, available, size)
    };
    assert_eq!(closest(&[d], ALL, 1), "d0", "its switch is split for it");
    assert_eq!(
        closest(&[d], "a0 a1 b0 c0 c1", 1),
        "c0",
        "the socket, because the switch has no free device"
    );
    assert_eq!(
        closest(&[a, d], ALL, 2),
        "a0 d0",
        "one for each, although these are far from each other"
    );
    assert_eq!(closest(&ON, ALL, 2), "a0 c0", "one for each socket");
    assert_eq!(closest(&[d], "b0 b1 c0 d0", 2), "b0 b1", "two are near to each other first");
    assert_eq!(closest(&[d], "b0 b1 d0 d1", 2), "d0 d1", "then to the neighbour");
    assert_eq!(
        closest(&[("far", None, &[])], ALL, 1),
        "a0",
        "a device without a place attracts no device"
    );
    assert_eq!(
        choose_near_devices(Placement::Packed, &[d], "a0 b0 b1 c0 c1 d0 d1", 1),
        "d0",
        "although the neighbour of another is taken"
    );
    assert_eq!(
        choose_near_devices(Placement::Packed, &[d], "a0 b0 b1 c0 c1 d0 d1", 3),
        "a0 b0 b1",
        "many are packed first"
    );
    assert_eq!(choose_near_devices(Placement::Packed, &[d], ALL, 2), "d0 d1", "and then near");
    assert_eq!(choose_near_devices(Placement::Spread, &[d], ALL, 1), "d0");
    assert_eq!(
        choose_near_devices(Placement::Spread, &[d], ALL, 2),
        "a0 d0",
        "as even as any, and near"
    );
}

#[test]
fn behind_one_switch_the_port_of_the_neighbour_is_preferred() {
    let at = |name, port: &'static [u8]| (name, Some(0), port);
    let board =
        [at("a", &[0x10, 0x11, 0x12]), at("b", &[0x10, 0x11, 0x13]), at("c", &[0x10, 0x11, 0x14])];
    let of = |neighbours: &[Where<'_>], must: &str| {
        let neighbours: Vec<_> = neighbours.iter().map(|place| neighbour(*place, 0)).collect();
        text(
            &choose_near(
                &offering(Placement::Closest, &board, 1),
                &neighbours,
                &ids("a b c"),
                &ids(must),
                2,
            )
            .unwrap(),
        )
    };
    assert_eq!(of(&[], ""), "a b");
    assert_eq!(of(&[], "c"), "c a");
    assert_eq!(of(&[at("x", &[0x10, 0x11, 0x14])], ""), "a c");
}

/// The board with hives: the name of each, and its devices.
fn with_hives(placement: Placement, hives: &[(&str, &str)]) -> Offering {
    let mut offering = offering(placement, &BOARD, 1);
    for (hive, members) in hives {
        for id in ids(members) {
            let offered = offering.devices.get_mut(&id).unwrap();
            Arc::make_mut(&mut offered.device).attributes.insert("hive", *hive);
        }
    }
    offering
}

fn of(offering: &Offering, available: &str, must: &str, size: usize) -> String {
    text(&choose(offering, &ids(available), &ids(must), size).unwrap())
}

#[test]
fn two_cards_with_a_bridge_are_chosen_together_in_any_place() {
    // Across two switches, across two sockets, and behind one switch.
    let hives = [("nvlink:1", "a1 b0"), ("nvlink:2", "b1 c0"), ("nvlink:3", "d0 d1")];
    let closest = with_hives(Placement::Closest, &hives);
    assert_eq!(of(&closest, "a0 a1 b0 c1", "", 2), "a1 b0", "before the two behind one switch");
    assert_eq!(of(&closest, ALL, "", 2), "d0 d1", "the nearest pair with a bridge");
    assert_eq!(of(&closest, "a0 a1 b1 c0 c1", "c0", 2), "c0 b1");
    assert_eq!(of(&closest, "a1 b0 d1", "", 1), "d1", "the other one of its bridge is in use");
    assert_eq!(of(&with_hives(Placement::Packed, &hives), "a0 a1 b1 c0 c1", "c0", 2), "c0 b1");
    assert_eq!(of(&with_hives(Placement::Packed, &hives[..1]), "a1 b0 c1 d0 d1", "", 2), "a1 b0");
    assert_eq!(
        of(&with_hives(Placement::Spread, &hives[..1]), "a1 b0 b1", "", 2),
        "a1 b1",
        "one of a bridge"
    );
}

#[test]
fn devices_of_one_link_switch_are_equally_near_and_other_rules_decide() {
    let closest = with_hives(Placement::Closest, &[("nvlink:1", ALL)]);
    assert_eq!(of(&closest, ALL, "", 2), "a0 a1");
    assert_eq!(of(&closest, "a0 b0 c0 c1 d0", "", 3), "c0 c1 d0", "one socket");
    assert_eq!(of(&with_hives(Placement::Spread, &[("nvlink:1", ALL)]), ALL, "", 2), "a0 c0");
    let seven = with_hives(Placement::Closest, &[("nvlink:1", "a0 a1 b0 b1 c0 c1 d0")]);
    assert_eq!(
        of(&seven, "a0 d0 d1", "", 2),
        "a0 d0",
        "one whose links are down is far, although behind the same switch"
    );
}

#[test]
fn a_mesh_prefers_hives_and_within_them_more_links() {
    let mesh = [
        ("nvlink:a/a", "a0 b1"),
        ("nvlink:a/b", "a1 b0"),
        ("nvlink:c/c", "c0 c1"),
        ("nvlink:c/d", "d0 d1"),
    ];
    let closest = with_hives(Placement::Closest, &mesh);
    assert_eq!(
        of(&closest, "a0 a1 b0 b1", "", 2),
        "a0 b1",
        "two links before one, and before one switch"
    );
    assert_eq!(of(&closest, "a0 a1 c0 d0", "", 2), "a0 a1");
    assert_eq!(of(&closest, "a0 b0 b1 c0 c1 d0 d1", "", 4), "c0 c1 d0 d1");
    assert_eq!(
        of(&closest, ALL, "d1", 3),
        "d1 c0 c1",
        "two more links are used, and no pair is split"
    );
}

#[test]
fn impossible_requests_fail_and_unknown_devices_are_far_from_all() {
    let offering = offering(Placement::Closest, &BOARD, 1);
    assert!(choose(&offering, &ids("a0"), &[], 2).is_err());
    assert!(choose(&offering, &ids("a0 a1"), &ids("a0 a1"), 1).is_err());
    assert_eq!(text(&choose(&offering, &ids("?0 ?1 c0 d0"), &[], 2).unwrap()), "c0 d0");
}

/// A random board. For each device: the branch that it takes at each level of bridges, whether it
/// is free, and its hives. Then the number of shares of a device.
type Board = (Vec<(Vec<u8>, bool, Vec<u8>)>, u32);

fn any_board() -> impl Strategy<Value = Board> {
    let (branches, hives) =
        (proptest::collection::vec(0..2_u8, 1..5), proptest::collection::vec(0..2_u8, 0..3));
    (proptest::collection::vec((branches, proptest::bool::weighted(0.8), hives), 1..8), 1..3_u32)
        .prop_filter("at most twelve ids", |(devices, shares)| {
            devices.len() * (*shares as usize) <= 12
        })
}

/// A branch is a bridge. Its number encodes the path to it. The first branch is the socket.
fn place(path: &[u8]) -> (Option<u32>, Vec<u8>) {
    let bus = |depth: usize| {
        1 + u8::try_from(
            path[..=depth].iter().fold(1_usize, |number, branch| number * 2 + usize::from(*branch)),
        )
        .unwrap()
    };
    (Some(u32::from(path[0])), (1..path.len()).map(bus).collect())
}

/// The offered devices of a board, and the free ids.
fn lay_out((devices, shares): &Board, placement: Placement) -> (Offering, Vec<DeviceId>) {
    let named: Vec<(String, Option<u32>, Vec<u8>)> = devices
        .iter()
        .enumerate()
        .map(|(number, (path, ..))| {
            let (numa, bridges) = place(path);
            (format!("d{number:02}"), numa, bridges)
        })
        .collect();
    let refs: Vec<Where<'_>> = named
        .iter()
        .map(|(name, numa, bridges)| (name.as_str(), *numa, bridges.as_slice()))
        .collect();
    let mut offering = offering(placement, &refs, *shares);
    for (id, offered) in &mut offering.devices {
        let number: usize = id.as_str()[1..3].parse().unwrap();
        let hive: Vec<String> = devices[number].2.iter().map(u8::to_string).collect();
        if !hive.is_empty() {
            Arc::make_mut(&mut offered.device).attributes.insert("hive", hive.join("/"));
        }
    }
    let is_free = |id: &&DeviceId| {
        let number: usize = id.as_str()[1..3].parse().unwrap();
        // The last share of a device in use is free.
        devices[number].1 || (*shares > 1 && id.as_str().ends_with('1'))
    };
    let free = offering.devices.keys().filter(is_free).cloned().collect();
    (offering, free)
}

/// The nearness of two devices that are offered together. If they are in different hives, or one is
/// in none, neither is nearer to the other than its own hive reaches.
fn near(offering: &Offering, a: &Device, b: &Device) -> Nearness {
    let of = |hive: &str| -> Vec<&Device> {
        let devices = offering.devices.values().map(|offered| &*offered.device);
        devices.filter(|device| hives(device).any(|other| other == hive)).collect()
    };
    let reach = |hive: &str| {
        of(hive)
            .into_iter()
            .flat_map(|a| of(hive).into_iter().map(|b| nearness(a, b)).collect::<Vec<_>>())
            .min()
    };
    let shared = hives(a).filter(|hive| hives(b).any(|other| other == *hive)).count();
    let others = hives(a).skip(shared).chain(hives(b).skip(shared));
    others.filter_map(reach).chain([nearness(a, b)]).min().unwrap().in_hives(shared)
}

/// The places around a device. A place that contains only a part of the device's hive counts as
/// another place for the devices in the hive.
fn all_places(offering: &Offering, device: &Device) -> BTreeSet<String> {
    let plain = |device: &Device| -> BTreeSet<String> {
        let numa = device.numa_nodes.iter().map(|node| format!("node {node}"));
        numa.chain(places(device).iter().map(|(_, place)| format!("{place:?}"))).collect()
    };
    let of_hive = |place: &str| -> String {
        let is_outside = |hive: &&str| {
            let devices = offering.devices.values().map(|offered| &*offered.device);
            let mut members = devices.filter(|device| hives(device).any(|other| other == *hive));
            members.any(|member| !plain(member).contains(place))
        };
        hives(device).filter(is_outside).collect::<Vec<_>>().join(" ")
    };
    plain(device).into_iter().map(|place| format!("{place} of {}", of_hive(&place))).collect()
}

/// Cached values: the nearness of each pair, and the places around each device.
struct Known {
    near: BTreeMap<(DeviceId, DeviceId), Nearness>,
    places: BTreeMap<DeviceId, BTreeSet<String>>,
}

impl Known {
    fn of(offering: &Offering) -> Known {
        let of = |id: &DeviceId| &*offering.devices[id].device;
        let pairs =
            offering.devices.keys().flat_map(|a| offering.devices.keys().map(move |b| (a, b)));
        let near =
            pairs.map(|(a, b)| ((a.clone(), b.clone()), near(offering, of(a), of(b)))).collect();
        let places =
            offering.devices.keys().map(|id| (id.clone(), all_places(offering, of(id)))).collect();
        Known { near, places }
    }

    fn near(&self, a: &DeviceId, b: &DeviceId) -> Nearness {
        self.near[&(a.clone(), b.clone())]
    }
}

/// The number of places around each neighbour that contain no chosen device.
fn neighbour_distance(
    (offering, known): (&Offering, &Known),
    neighbours: &[Arc<Device>],
    chosen: &[&DeviceId],
) -> usize {
    let taken_places: BTreeSet<&String> = chosen.iter().flat_map(|id| &known.places[*id]).collect();
    let offered_places: BTreeSet<&String> = known.places.values().flatten().collect();
    let apart = |other: &Arc<Device>| {
        let around = all_places(&Offering { devices: [].into(), ..offering.clone() }, other);
        let is_around = |place: &&&String| around.iter().any(|around| place.starts_with(around));
        offered_places.difference(&taken_places).filter(is_around).count()
    };
    neighbours.iter().map(apart).sum()
}

/// The score of a choice by its definition. Every group is a set of devices that are at least so
/// near to one of them.
fn score(
    (offering, known): (&Offering, &Known),
    neighbours: &[Arc<Device>],
    free: &[DeviceId],
    chosen: &[&DeviceId],
) -> (usize, Vec<usize>, Vec<DeviceId>) {
    let of = |id: &DeviceId| &*offering.devices[id].device;
    let levels: BTreeSet<Nearness> = known.near.values().copied().collect();
    let ball = |id: &DeviceId, level: Nearness| -> BTreeSet<&DeviceId> {
        offering.devices.keys().filter(|other| known.near(id, other) >= level).collect()
    };
    let groups: BTreeSet<BTreeSet<&DeviceId>> = offering
        .devices
        .keys()
        .flat_map(|id| levels.iter().map(move |level| ball(id, *level)))
        .collect();
    let taken =
        |group: &BTreeSet<&DeviceId>| chosen.iter().filter(|id| group.contains(**id)).count();
    let free_of = |group: &BTreeSet<&DeviceId>| free.iter().filter(|id| group.contains(id)).count();
    let is_device = |group: &&BTreeSet<&DeviceId>| {
        group.iter().all(|id| of(id).id == of(group.first().unwrap()).id)
    };
    let touched: Vec<&BTreeSet<&DeviceId>> =
        groups.iter().filter(|group| taken(group) > 0).collect();
    let pairs = |group: &&BTreeSet<&DeviceId>| taken(group) * (taken(group) - 1) / 2;
    let same: usize =
        touched.iter().copied().filter(|group| is_device(group)).map(|group| pairs(&group)).sum();
    let whole: Vec<&BTreeSet<&DeviceId>> = touched
        .iter()
        .copied()
        .filter(|group| group.len() > 1 && free_of(group) == group.len())
        .collect();
    let broken =
        whole.iter().filter(|group| taken(group) < group.len() && !is_device(group)).count();
    let uneven = |group: &BTreeSet<&DeviceId>| {
        let used = group.len() - free_of(group);
        (used + taken(group)).pow(2) - used.pow(2)
    };
    let mut sorted: Vec<DeviceId> = chosen.iter().map(|id| (*id).clone()).collect();
    sorted.sort();
    let apart = neighbour_distance((offering, known), neighbours, chosen);
    let is_first = neighbours.len() >= chosen.len();
    let mut rest = match offering.spec.placement {
        Placement::Closest => {
            let mut around: Vec<_> =
                groups.iter().filter(|group| taken(group) == chosen.len()).collect();
            around.sort_by_key(|group| group.len());
            let left = |groups: &[&BTreeSet<&DeviceId>]| {
                groups.iter().map(|group| free_of(group) - chosen.len()).sum()
            };
            let nearest = |a: &&DeviceId| chosen.iter().map(|b| known.near(a, b)).min().unwrap();
            let worst = Reverse(chosen.iter().map(nearest).min().unwrap());
            let far = levels.iter().filter(|level| Reverse(**level) < worst).count();
            let uneven = touched.iter().copied().filter(|group| is_device(group)).map(uneven).sum();
            let (first, rest) = around.split_at(1);
            let first = if is_device(&first[0]) { 0 } else { left(first) };
            if is_first {
                vec![far, broken, first, left(rest), uneven]
            } else {
                vec![far, apart, broken, first, left(rest), uneven]
            }
        }
        Placement::Packed => {
            vec![whole.len(), touched.iter().map(|group| free_of(group) - taken(group)).sum()]
        }
        Placement::Spread => {
            let depth = |group: &BTreeSet<&DeviceId>| {
                groups.iter().filter(|other| other.is_superset(group) && *other != group).count()
            };
            let sum = |at: usize| {
                touched.iter().copied().filter(|group| depth(group) == at).map(uneven).sum()
            };
            (0..12).map(sum).collect()
        }
    };
    if is_first {
        rest.insert(0, apart);
    } else if offering.spec.placement != Placement::Closest {
        rest.push(apart);
    }
    (same, rest, sorted)
}

fn subsets(free: &[DeviceId], size: usize) -> Vec<Vec<&DeviceId>> {
    (0..1_u32 << free.len())
        .filter(|bits| bits.count_ones() as usize == size)
        .map(|bits| {
            free.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1).map(|(_, id)| id).collect()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_choice_is_the_best_of_all(
        board in any_board(),
        placement in prop_oneof![Just(Placement::Closest), Just(Placement::Packed), Just(Placement::Spread)],
        wanted in any::<proptest::sample::Index>(),
        must in proptest::collection::vec(any::<proptest::sample::Index>(), 0..3),
        neighbours in proptest::collection::vec(proptest::collection::vec(0..2_u8, 1..5), 0..4),
    ) {
        let (offering, free) = lay_out(&board, placement);
        let neighbours: Vec<_> = neighbours.iter().zip(0..).map(|(path, number): (_, u8)| {
            let (numa, bridges) = place(path);
            neighbour((["n0", "n1", "n2", "n3"][usize::from(number)], numa, &bridges), number)
        }).collect();
        prop_assume!(!free.is_empty());
        let must: BTreeSet<DeviceId> = must.iter().map(|index| index.get(&free).clone()).collect();
        let size = (1 + wanted.index(free.len())).max(must.len());
        let must: Vec<DeviceId> = must.into_iter().collect();
        let known = Known::of(&offering);
        let best = subsets(&free, size)
            .into_iter()
            .filter(|subset| must.iter().all(|id| subset.contains(&id)))
            .map(|subset| score((&offering, &known), &neighbours, &free, &subset))
            .min()
            .unwrap();
        let chosen = choose_near(&offering, &neighbours, &free, &must, size).unwrap();
        let found = score((&offering, &known), &neighbours, &free, &chosen.iter().collect::<Vec<_>>());
        prop_assert_eq!(found, best, "{:?} of {:?}", placement, offering.devices.values().map(|offered| &offered.device.id).collect::<Vec<_>>());
        prop_assert!(chosen.starts_with(&must));
        let mut turned = free.clone();
        turned.reverse();
        prop_assert_eq!(choose_near(&offering, &neighbours, &turned, &must, size).unwrap(), chosen, "the order of the ids does not matter");
    }
}
