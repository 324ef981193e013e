//! Which GPUs are a hive by NVLink: each of them is joined with each other one.

use super::pci::PciAddress;
use std::collections::BTreeMap;

/// The links of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvLinks {
    /// The GPUs that it reaches by NVLink, and by how many links that lead straight there. Through a switch all are reached alike, by
    /// one.
    pub peers: BTreeMap<PciAddress, u32>,
    /// Links that are not active: nothing is plugged in, or they are not trained yet; and other GPUs of which it could not be told.
    pub down: u32,
}

/// The hives of these GPUs as [`topology::hives`](super::topology::hives) reads them: `nvlink:<first GPU>`. Of a mesh in which not
/// everybody reaches everybody the largest hives are taken first, and of equally large ones that of the lowest addresses; each GPU
/// is in one. Where some of a hive are joined by more links than others, these are a hive within it.
pub(super) fn hives(links: &BTreeMap<PciAddress, &NvLinks>) -> BTreeMap<PciAddress, String> {
    // Either end may know of it.
    let to = |from: PciAddress, to: PciAddress| links.get(&from).and_then(|links| links.peers.get(&to)).copied().unwrap_or_default();
    let mut named = BTreeMap::new();
    split(links.keys().copied().collect(), 1, &|a, b| to(a, b).max(to(b, a)), "nvlink:", &mut named);
    named
}

/// By how many links two GPUs are joined.
type Joined<'a> = dyn Fn(PciAddress, PciAddress) -> u32 + 'a;

/// Names the hives of at least so many links between any two.
fn split(mut gpus: Vec<PciAddress>, least: u32, joined: &Joined<'_>, within: &str, named: &mut BTreeMap<PciAddress, String>) {
    loop {
        let mut hive = Vec::new();
        grow(&mut Vec::new(), &gpus, &|a, b| joined(a, b) >= least, &mut hive);
        let (Some(first), true) = (hive.first(), hive.len() > 1) else { return };
        let name = format!("{within}{first}");
        gpus.retain(|gpu| !hive.contains(gpu));
        for gpu in &hive {
            named.insert(*gpu, name.clone());
        }
        let weakest = hive.iter().flat_map(|a| hive.iter().filter(move |b| a != *b).map(move |b| joined(*a, *b))).min();
        split(hive, weakest.unwrap_or(least) + 1, joined, &format!("{name}/"), named);
    }
}

/// Looks for more than `best` that are all joined: these and some of those, which are joined with all of these. A GPU has so few
/// links that there are few to try; where all are joined with all, the first try is the last.
fn grow(these: &mut Vec<PciAddress>, those: &[PciAddress], is_joined: &dyn Fn(PciAddress, PciAddress) -> bool, best: &mut Vec<PciAddress>) {
    if these.len() > best.len() {
        best.clone_from(these);
    }
    for (at, gpu) in those.iter().enumerate() {
        if these.len() + those.len() - at <= best.len() {
            return;
        }
        let next: Vec<PciAddress> = those[at + 1..].iter().copied().filter(|other| is_joined(*gpu, *other)).collect();
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

    /// What comes of so many GPUs that are joined like this, by their numbers.
    fn of(gpus: u8, joined: &[(u8, u8, u32)]) -> Vec<String> {
        let links = |number: u8| {
            let peers = joined.iter().filter(|(one, ..)| *one == number).map(|(_, other, count)| (gpu(*other), *count)).collect();
            NvLinks { peers, down: 0 }
        };
        let links: BTreeMap<PciAddress, NvLinks> = (0..gpus).map(|number| (gpu(number), links(number))).collect();
        let hives = hives(&links.iter().map(|(gpu, links)| (*gpu, links)).collect());
        let short = |name: &String| name.replace("0000:", "").replace(":00.0", "").replace("nvlink:", "");
        (0..gpus).map(|number| hives.get(&gpu(number)).map(short).unwrap_or_default()).collect()
    }

    #[test]
    fn those_are_a_hive_that_all_reach_each_other() {
        assert_eq!(of(3, &[]), ["", "", ""]);
        assert_eq!(of(5, &[(0, 3, 4), (1, 2, 4)]), ["00", "01", "01", "00", ""], "bridges between two cards");
        let all: Vec<_> = (0..16).flat_map(|a| (a + 1..16).map(move |b| (a, b, 1))).collect();
        assert_eq!(of(16, &all), vec!["00"; 16], "a switch");
        assert_eq!(of(3, &[(0, 1, 1), (1, 2, 1)]), ["00", "00", ""], "of a chain two");
        assert_eq!(of(4, &[(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1)]), ["00", "00", "02", "02"], "of a ring two and two");
        assert_eq!(of(4, &[(0, 1, 1), (1, 2, 1), (1, 3, 1), (2, 3, 1)]), ["", "01", "01", "01"], "three, not two and two");
    }

    /// The mesh of a DGX-1 with V100: two fours on one socket each, and each GPU joined with one of the other four.
    #[test]
    fn of_a_cube_mesh_the_fours_are_hives_and_those_with_two_links_hives_within_them() {
        let four = |first: u8| {
            [(0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 1)].map(|(a, b, links)| (first + a, first + b, links))
        };
        let across = (0..4).map(|number| (number, number + 4, 2));
        let mesh: Vec<_> = four(0).into_iter().chain(four(4)).chain(across).collect();
        assert_eq!(of(8, &mesh), ["00/00", "00/01", "00/01", "00/00", "04/04", "04/05", "04/05", "04/04"]);
    }

    #[test]
    fn what_a_link_less_costs_is_the_whole_and_not_the_hive() {
        let lame = [(0, 1, 3), (0, 2, 4), (0, 3, 4), (1, 2, 4), (1, 3, 4), (2, 3, 4)];
        assert_eq!(of(4, &lame), ["00/00", "00", "00/00", "00/00"], "three of them are joined by all their links");
    }
}
