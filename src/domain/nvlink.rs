//! NVLink hives: groups of GPUs with a direct link between every two of them.

use super::pci::PciAddress;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The links of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLinks {
    /// The GPUs that it reaches by NVLink, with the number of direct links. A switch reaches all
    /// GPUs alike, and counts as one link.
    pub peers: BTreeMap<PciAddress, u32>,
    /// The number of links that are not active, because nothing is plugged in or training is not
    /// done. Also counts GPUs whose links could not be determined.
    pub down: u32,
}

/// The hives of these GPUs, in the form that [`topology::hives`](super::topology::hives) reads:
/// `nvlink:<first GPU>`. Each GPU is in one hive. In an incomplete mesh the largest hives are taken
/// first, and among equals the one with the lowest addresses. GPUs of a hive with more links
/// between them than others form a hive within it.
pub(super) fn hives(links: &BTreeMap<PciAddress, &NvLinks>) -> BTreeMap<PciAddress, String> {
    // Each end may know the link.
    let to = |from: PciAddress, to: PciAddress| {
        links.get(&from).and_then(|links| links.peers.get(&to)).copied().unwrap_or_default()
    };
    let mut named = BTreeMap::new();
    split(
        links.keys().copied().collect(),
        1,
        &|a, b| to(a, b).max(to(b, a)),
        "nvlink:",
        &mut named,
    );
    named
}

/// The number of links between two GPUs.
type Joined<'a> = dyn Fn(PciAddress, PciAddress) -> u32 + 'a;

/// Names the hives with at least `least` links between every two GPUs.
fn split(
    mut gpus: Vec<PciAddress>,
    least: u32,
    joined: &Joined<'_>,
    within: &str,
    named: &mut BTreeMap<PciAddress, String>,
) {
    loop {
        let mut hive = Vec::new();
        grow(&mut Vec::new(), &gpus, &|a, b| joined(a, b) >= least, &mut hive);
        let (Some(first), true) = (hive.first(), hive.len() > 1) else { return };
        let name = format!("{within}{first}");
        gpus.retain(|gpu| !hive.contains(gpu));
        for gpu in &hive {
            named.insert(*gpu, name.clone());
        }
        let weakest = hive
            .iter()
            .flat_map(|a| hive.iter().filter(move |b| a != *b).map(move |b| joined(*a, *b)))
            .min();
        split(hive, weakest.unwrap_or(least) + 1, joined, &format!("{name}/"), named);
    }
}

/// Searches for more than `best` GPUs that are all linked with each other. They are `these` and
/// some of `those`; each of `those` is linked with all of `these`. A GPU has few links, so there
/// are few combinations. In a full mesh the first attempt is the last.
fn grow(
    these: &mut Vec<PciAddress>,
    those: &[PciAddress],
    is_joined: &dyn Fn(PciAddress, PciAddress) -> bool,
    best: &mut Vec<PciAddress>,
) {
    if these.len() > best.len() {
        best.clone_from(these);
    }
    for (at, gpu) in those.iter().enumerate() {
        if these.len() + those.len() - at <= best.len() {
            return;
        }
        let next: Vec<PciAddress> =
            those[at + 1..].iter().copied().filter(|other| is_joined(*gpu, *other)).collect();
        these.push(*gpu);
        grow(these, &next, is_joined, best);
        these.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8) -> PciAddress {
        format!("0000:{number:02x}:00.0").parse().unwrap()
    }

    /// The hives of `gpus` GPUs with these links, by number.
    fn of(gpus: u8, joined: &[(u8, u8, u32)]) -> Vec<String> {
        let links = |number: u8| {
            let peers = joined
                .iter()
                .filter(|(one, ..)| *one == number)
                .map(|(_, other, count)| (gpu(*other), *count))
                .collect();
            NvLinks { peers, down: 0 }
        };
        let links: BTreeMap<PciAddress, NvLinks> =
            (0..gpus).map(|number| (gpu(number), links(number))).collect();
        let hives = hives(&links.iter().map(|(gpu, links)| (*gpu, links)).collect());
        let short =
            |name: &String| name.replace("0000:", "").replace(":00.0", "").replace("nvlink:", "");
        (0..gpus).map(|number| hives.get(&gpu(number)).map(short).unwrap_or_default()).collect()
    }

    #[test]
    fn a_hive_is_a_set_of_gpus_that_all_reach_each_other() {
        assert_eq!(of(3, &[]), ["", "", ""]);
        assert_eq!(
            of(5, &[(0, 3, 4), (1, 2, 4)]),
            ["00", "01", "01", "00", ""],
            "bridges between two cards"
        );
        let all: Vec<_> = (0..16).flat_map(|a| (a + 1..16).map(move |b| (a, b, 1))).collect();
        assert_eq!(of(16, &all), vec!["00"; 16], "a switch");
        assert_eq!(of(3, &[(0, 1, 1), (1, 2, 1)]), ["00", "00", ""], "of a chain two");
        assert_eq!(
            of(4, &[(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1)]),
            ["00", "00", "02", "02"],
            "of a ring two and two"
        );
        assert_eq!(
            of(4, &[(0, 1, 1), (1, 2, 1), (1, 3, 1), (2, 3, 1)]),
            ["", "01", "01", "01"],
            "three, not two and two"
        );
    }

    /// The mesh of a DGX-1 with V100: two groups of four, one on each socket. Each GPU also has a
    /// link with one GPU of the other group.
    #[test]
    fn a_cube_mesh_has_hives_of_four_and_inner_hives() {
        let four = |first: u8| {
            [(0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 1)]
                .map(|(a, b, links)| (first + a, first + b, links))
        };
        let across = (0..4).map(|number| (number, number + 4, 2));
        let mesh: Vec<_> = four(0).into_iter().chain(four(4)).chain(across).collect();
        assert_eq!(
            of(8, &mesh),
            ["00/00", "00/01", "00/01", "00/00", "04/04", "04/05", "04/05", "04/04"]
        );
    }

    #[test]
    fn one_missing_link_splits_the_whole_and_not_the_hive() {
        let lame = [(0, 1, 3), (0, 2, 4), (0, 3, 4), (1, 2, 4), (1, 3, 4), (2, 3, 4)];
        assert_eq!(
            of(4, &lame),
            ["00/00", "00", "00/00", "00/00"],
            "three of them are joined by all their links"
        );
    }
}
