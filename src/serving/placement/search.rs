//! The search for the best choice in a tree of devices: each group is solved from its parts.

use super::choices::{Choices, Cost, join};
use super::tree::{Group, Parts, Tree};
use crate::domain::topology::{Nearness, Placement};
use std::cmp::Reverse;

/// The rules that compare choices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    pub(super) placement: Placement,
    /// Whether nearness to the neighbours comes before the placement's own rules.
    pub(super) neighbours_first: bool,
}

impl Tree {
    pub(super) fn choose(&self, policy: Policy, size: usize) -> Vec<usize> {
        let (solved, mut best) = (self.0.solve(policy, size, 0), None);
        self.0.search(&solved, policy, size, Around::default(), &mut best);
        best.map(|(_, ids)| ids.to_vec()).unwrap_or_default()
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
