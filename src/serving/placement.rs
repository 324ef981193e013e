//! Chooses the free ids that fit together best. Pure, deterministic, of exactly the requested size.
//!
//! The devices of a resource are the leaves of a tree: NUMA nodes, host bridges, root ports,
//! switches, cards, and hives. A hive is a group of GPUs with direct links (NVLink, XGMI), which
//! are nearer than any switch. Of all choices of the requested size, the best one has the smallest
//! score, compared row by row:
//!
//! | | `closest` | `packed` | `spread` |
//! | --- | --- | --- | --- |
//! | 1 | pairs of shares of one device | the same | the same |
//! | 2 | neighbour distance (a) | the same | the same |
//! | 3 | distance of the two farthest | groups that were whole | uneven use of sockets |
//! | 4 | neighbour distance (b) | left over in used groups | uneven use of their groups, ... |
//! | 5 | groups that were whole and are split | neighbour distance (b) | the same |
//! | 6 | left over in the smallest group around all, then around it | | |
//! | 7 | uneven use of devices | | |
//! | last | the ids | the ids | the ids |
//!
//! (a) if there are at least as many neighbours as requested ids; (b) if there are fewer.
//!
//! A group is whole while everything in it is free. It is split when only a part of it is taken.
//! The neighbours are the devices of other resources that the same container was just given
//! (`serving/affinity.rs`). The neighbour distance is the number of groups around each of them that
//! contain no chosen device. So the best adapters for eight GPUs are those on all sides of them. A
//! few adapters are near the GPUs, even if the policy would keep groups whole. Many GPUs are near
//! each other first, and near the adapter second.
//!
//! The result is exact: the best choice of each size in a group is composed from its parts' ones.

mod tree;

use crate::domain::topology::{Nearness, Placement};
use crate::domain::{Device, DeviceId, Offering};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use tree::{Group, Parts, Tree};

/// Why there is no answer. The kubelet never sends such a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unanswerable {
    /// More ids must be included than are requested.
    #[error("{must} devices must be included, but only {size} are requested")]
    TooManyMust {
        /// Number of ids that must be included.
        must: usize,
        /// Number of requested ids.
        size: usize,
    },
    /// Fewer ids are available than are requested.
    #[error("{size} devices are requested, but only {available} are available")]
    TooFew {
        /// Number of requested ids.
        size: usize,
        /// Number of available ids.
        available: usize,
    },
}

/// Chooses `size` ids of `available` that include `must_include`, by the resource's [`Placement`].
/// The answer has the ids that must be included first, then the others in order.
///
/// # Errors
/// When that many cannot be chosen.
pub fn choose(
    offering: &Offering,
    available: &[DeviceId],
    must_include: &[DeviceId],
    size: usize,
) -> Result<Vec<DeviceId>, Unanswerable> {
    choose_near(offering, &[], available, must_include, size)
}

/// The same, near devices of other resources that the container has.
///
/// # Errors
/// When that many cannot be chosen.
pub fn choose_near(
    offering: &Offering,
    neighbours: &[Arc<Device>],
    available: &[DeviceId],
    must_include: &[DeviceId],
    size: usize,
) -> Result<Vec<DeviceId>, Unanswerable> {
    let must = sorted(must_include.iter().collect());
    let ids = sorted(available.iter().chain(must_include).collect());
    if must.len() > size {
        return Err(Unanswerable::TooManyMust { must: must.len(), size });
    }
    if ids.len() < size {
        return Err(Unanswerable::TooFew { size, available: ids.len() });
    }
    let neighbours: BTreeMap<&DeviceId, &Device> =
        neighbours.iter().map(|device| (&device.id, &**device)).collect();
    let tree = Tree::new(offering, &neighbours, &ids, &must);
    let policy =
        Policy { placement: offering.spec.placement, neighbours_first: neighbours.len() >= size };
    let chosen = tree.choose(policy, size);
    let (first, rest): (Vec<_>, Vec<_>) =
        chosen.into_iter().map(|index| ids[index]).partition(|id| must.binary_search(id).is_ok());
    Ok(first.into_iter().chain(rest).cloned().collect())
}

/// The ids, sorted and without duplicates.
fn sorted(mut ids: Vec<&DeviceId>) -> Vec<&DeviceId> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The rules that compare choices.
#[derive(Debug, Clone, Copy)]
struct Policy {
    placement: Placement,
    /// Whether nearness to the neighbours comes before the placement's own rules.
    neighbours_first: bool,
}

impl Tree {
    fn choose(&self, policy: Policy, size: usize) -> Vec<usize> {
        let (solved, mut best) = (self.0.solve(policy, size, 0), None);
        self.0.search(&solved, policy, size, Around::default(), &mut best);
        best.map(|(_, ids)| ids.to_vec()).unwrap_or_default()
    }
}

/// The score of a choice, the most important part first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost([i32; Cost::PARTS]);

impl Cost {
    const PARTS: usize = 16;
    /// Pairs of shares of one device.
    const SAME: usize = 0;
    /// The neighbour distance, less a constant.
    const NEIGHBOURS: usize = 1;
    /// The placement's own rules. For `closest`, the second of them is how unevenly devices are
    /// used.
    const PLACEMENT: usize = 2;
    const UNEVEN: usize = 3;
    /// The neighbour distance if the placement comes first. Levels of deeper trees are added to the
    /// part before.
    const NEIGHBOURS_LAST: usize = Cost::PARTS - 1;

    fn add(&mut self, part: usize, cost: usize) {
        let part = &mut self.0[part.min(Cost::NEIGHBOURS_LAST - 1)];
        *part = part.saturating_add(i32::try_from(cost).unwrap_or(i32::MAX));
    }

    fn attract(&mut self, part: usize, pull: usize) {
        self.0[part] = self.0[part].saturating_sub(i32::try_from(pull).unwrap_or(i32::MAX));
    }

    fn plus(mut self, other: &Cost) -> Cost {
        self.0.iter_mut().zip(other.0).for_each(|(part, other)| *part = part.saturating_add(other));
        self
    }
}

/// The best choice of one size in a group: its cost, and its ids in order.
type Choice<'a> = (&'a Cost, &'a [usize]);

/// The best choice of each size in a group, in two lists for all sizes: there are thousands, with a
/// few ids each.
#[derive(Debug, Clone, Default)]
struct Choices {
    /// `None` if there is no choice of that size.
    costs: Vec<Option<Cost>>,
    /// The one id of size 1, then the two of size 2, and so on.
    ids: Vec<usize>,
}

impl Choices {
    fn with_capacity(most: usize) -> Self {
        Choices {
            costs: Vec::with_capacity(most + 1),
            ids: Vec::with_capacity(most * (most + 1) / 2),
        }
    }

    /// The largest size.
    fn most(&self) -> usize {
        self.costs.len().saturating_sub(1)
    }

    /// Adds the choice of the next size.
    fn push(&mut self, cost: Option<Cost>, ids: impl Iterator<Item = usize>) {
        let end = self.ids.len() + self.costs.len();
        self.costs.push(cost);
        self.ids.extend(ids);
        self.ids.resize(end, 0);
    }

    /// The same, with ids that are not sorted.
    fn push_unsorted(&mut self, cost: Cost, ids: &[usize]) {
        let start = self.ids.len();
        self.push(Some(cost), ids.iter().copied());
        self.ids[start..].sort_unstable();
    }

    fn get(&self, size: usize) -> Option<Choice<'_>> {
        let cost = self.costs.get(size)?.as_ref()?;
        let start = size * size.saturating_sub(1) / 2;
        Some((cost, &self.ids[start..start + size]))
    }
}

/// Two choices as one. Most are worse in the first parts of the score, and are not summed.
#[derive(Debug, Clone, Copy)]
struct Both<'a>(Choice<'a>, Choice<'a>);

impl<'a> Both<'a> {
    fn ids(&self) -> impl Iterator<Item = usize> + use<'a> {
        let (mut left, mut right) = (self.0.1, self.1.1);
        std::iter::from_fn(move || take_first(&mut left, &mut right))
    }

    fn is_better(&self, known: &Both<'_>) -> bool {
        let (Cost(one), Cost(other)) = (self.0.0, self.1.0);
        let (Cost(known_one), Cost(known_other)) = (known.0.0, known.1.0);
        for part in 0..Cost::PARTS {
            let (cost, known) = (
                one[part].saturating_add(other[part]),
                known_one[part].saturating_add(known_other[part]),
            );
            if cost != known {
                return cost < known;
            }
        }
        self.ids().lt(known.ids())
    }
}

/// The best choices in a group, and in each of its parts.
#[derive(Debug)]
struct Solved {
    choices: Choices,
    parts: Vec<Solved>,
}

/// The score of a choice among those of other groups: pairs of shares of one device, the neighbour
/// distance if that comes first, the distance of the two farthest, the cost, what is left over in
/// its group and around it, how unevenly devices are used.
type Rank = (i32, i32, Reverse<Nearness>, Cost, usize, usize, i32);

/// The groups around a group.
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

    /// The cost of taking `count` ids of this group, which is `depth` levels down.
    fn cost(&self, policy: Policy, count: usize, depth: usize) -> Cost {
        let mut cost = Cost::default();
        if count == 0 {
            return cost;
        }
        let is_device = self.is_device();
        let was_whole = self.total > 1 && self.free == self.total;
        // The sum of squares is smallest if the use is even.
        let used = self.total - self.free;
        let unevenness = (used + count).pow(2) - used.pow(2);
        if is_device {
            cost.add(Cost::SAME, count * (count - 1) / 2);
        }
        let neighbours_last = !policy.neighbours_first && policy.placement != Placement::Closest;
        cost.attract(
            if neighbours_last { Cost::NEIGHBOURS_LAST } else { Cost::NEIGHBOURS },
            self.pull,
        );
        match policy.placement {
            Placement::Closest => {
                cost.add(
                    Cost::PLACEMENT,
                    usize::from(was_whole && count < self.free && !is_device),
                );
                cost.add(Cost::UNEVEN, if is_device { unevenness } else { 0 });
            }
            Placement::Packed => {
                cost.add(Cost::PLACEMENT, usize::from(was_whole));
                cost.add(Cost::PLACEMENT + 1, self.free - count);
            }
            Placement::Spread => cost.add(Cost::PLACEMENT + depth, unevenness),
        }
        cost
    }

    /// The best choice of each size up to `size`.
    fn solve(&self, policy: Policy, size: usize, depth: usize) -> Solved {
        let most = size.min(self.free);
        let (mut choices, parts) = match &self.parts {
            Parts::Shares(free) => {
                let mut choices = Choices::with_capacity(most);
                (0..=most).for_each(|count| choices.push_unsorted(Cost::default(), &free[..count]));
                (choices, Vec::new())
            }
            Parts::Groups(groups) => 'solved: {
                // If one id is requested, each device is compared on its own.
                if let Some(alike) = Alike::of(groups).filter(|_| size > 1) {
                    break 'solved (alike.choices(policy, most, depth + 1), Vec::new());
                }
                let parts: Vec<Solved> =
                    groups.iter().map(|part| part.solve(policy, size, depth + 1)).collect();
                let mut rest = parts.iter();
                let first = rest.next().map(|part| part.choices.clone()).unwrap_or_default();
                (rest.fold(first, |choices, part| join(&choices, &part.choices, size)), parts)
            }
        };
        for (count, cost) in choices.costs.iter_mut().enumerate() {
            *cost = cost
                .filter(|_| count >= self.must)
                .map(|cost| cost.plus(&self.cost(policy, count, depth)));
        }
        Solved { choices, parts }
    }

    /// Finds the best choice in this group and in every one below it.
    fn search<'a>(
        &self,
        solved: &'a Solved,
        policy: Policy,
        size: usize,
        around: Around,
        best: &mut Option<(Rank, &'a [usize])>,
    ) {
        if self.free < size {
            return;
        }
        let Around { depth, cost, left } = around;
        if let Some((own, ids)) = solved.choices.get(size) {
            let mut cost = own.plus(&cost);
            let same = std::mem::take(&mut cost.0[Cost::SAME]);
            let neighbours = if policy.neighbours_first {
                std::mem::take(&mut cost.0[Cost::NEIGHBOURS])
            } else {
                0
            };
            let rank = if policy.placement == Placement::Closest {
                let uneven = std::mem::take(&mut cost.0[Cost::UNEVEN]);
                // Shares of one device are not needed together by another request.
                let left_here = if self.is_device() { 0 } else { self.free - size };
                (same, neighbours, Reverse(self.nearness), cost, left_here, left, uneven)
            } else {
                (same, neighbours, Reverse(Nearness::System), cost, 0, 0, 0)
            };
            let found = (rank, ids);
            if best.as_ref().is_none_or(|known| found < *known) {
                *best = Some(found);
            }
        }
        // Only `closest` compares how much smaller the group could be.
        if let (Parts::Groups(groups), Placement::Closest) = (&self.parts, policy.placement) {
            let around = Around {
                depth: depth + 1,
                cost: cost.plus(&self.cost(policy, size, depth)),
                left: left + self.free - size,
            };
            for (part, solved) in
                groups.iter().zip(&solved.parts).filter(|(part, _)| part.must == self.must)
            {
                part.search(solved, policy, size, around, best);
            }
        }
    }
}

/// Whole devices with equal scores, as those behind one switch mostly have.
struct Alike<'a> {
    /// One of the free devices: its cost is that of each.
    any: &'a Group,
    /// The ids of the free devices, those first that must be included.
    ids: Vec<usize>,
}

impl<'a> Alike<'a> {
    /// `None` if the scores may differ, or no device is free.
    fn of(groups: &'a [Group]) -> Option<Self> {
        let any = groups.iter().find(|part| part.free > 0)?;
        let mut ids = Vec::with_capacity(groups.len());
        for part in groups {
            let Parts::Shares(free) = &part.parts else { return None };
            if part.total != 1 || part.pull != any.pull {
                return None;
            }
            ids.extend(free.iter().map(|id| (part.must == 0, *id)));
        }
        ids.sort_unstable();
        Some(Alike { any, ids: ids.into_iter().map(|(_, id)| id).collect() })
    }

    /// The best choice of each size up to `most`: the first ids.
    fn choices(&self, policy: Policy, most: usize, depth: usize) -> Choices {
        let each = self.any.cost(policy, 1, depth);
        let (mut choices, mut cost) = (Choices::with_capacity(most), Cost::default());
        for count in 0..=most {
            choices.push_unsorted(cost, &self.ids[..count]);
            cost = cost.plus(&each);
        }
        choices
    }
}

/// The best choice of each size from two parts.
fn join(left: &Choices, right: &Choices, size: usize) -> Choices {
    let (most_left, most_right) = (left.most(), right.most());
    let most = size.min(most_left + most_right);
    let mut joined = Choices::with_capacity(most);
    for count in 0..=most {
        let both = (count.saturating_sub(most_right)..=count.min(most_left))
            .filter_map(|taken| Some(Both(left.get(taken)?, right.get(count - taken)?)));
        let best = both.reduce(|known, both| if both.is_better(&known) { both } else { known });
        match best {
            Some(best) => joined.push(Some(best.0.0.plus(best.1.0)), best.ids()),
            None => joined.push(None, std::iter::empty()),
        }
    }
    joined
}

/// The lower one of the first elements of two sorted lists.
fn take_first<'a>(left: &mut &'a [usize], right: &mut &'a [usize]) -> Option<usize> {
    let is_left = match (left.first(), right.first()) {
        (Some(one), Some(other)) => one <= other,
        (one, _) => one.is_some(),
    };
    let lower = if is_left { left } else { right };
    let (first, rest) = lower.split_first()?;
    *lower = rest;
    Some(*first)
}

#[cfg(test)]
mod tests;
