//! Which of the free ids fit together best: pure, deterministic, of exactly the wanted size.
//!
//! The devices of a resource are the leaves of a tree: NUMA nodes, host bridges, root ports, switches, cards, and hives, which
//! are GPUs with links of their own (NVLink, XGMI) and nearer than any switch. Of every
//! choice of the wanted size, the best one has the smallest score, from left to right:
//!
//! | | `closest` | `packed` | `spread` |
//! | --- | --- | --- | --- |
//! | 1 | pairs of shares of one device | the same | the same |
//! | 2 | how far its company is, where that is at least as many as are wanted | the same | the same |
//! | 3 | how far the two are that are farthest | groups that were whole | how unevenly sockets are used |
//! | 4 | how far its company is, where that is fewer | what is left over in groups that are used | how unevenly their groups are used, and so on |
//! | 5 | groups that were whole and are broken into | how far its company is, where that is fewer | the same |
//! | 6 | what is left over in the smallest group of devices around all, then in those around that one | | |
//! | 7 | how unevenly devices are shared | | |
//! | last | the ids | the ids | the ids |
//!
//! A group is whole while everything in it is free; one is broken into when only a part of it is taken. The company is what
//! the same container was just given of other resources (`serving/affinity.rs`): for each of these devices it counts how many
//! of the groups around it have nothing of the choice, so that eight GPUs are best served by adapters on all sides of them.
//! A few adapters go where the GPUs are, whatever the policy would keep whole; many GPUs are first near to each other, and
//! then to the adapter.
//!
//! The best choice is found exactly: for each group, the best choice of every size, put together from those of its parts.

mod tree;

use crate::domain::topology::{Nearness, Placement};
use crate::domain::{Device, DeviceId, Offering};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use tree::{Group, Parts, Tree};

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
    choose_beside(offering, &[], available, must_include, size)
}

/// The same, near to devices that the container has been given of other resources.
///
/// # Errors
/// When that many cannot be chosen.
pub fn choose_beside(
    offering: &Offering,
    company: &[Arc<Device>],
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
    let company: BTreeMap<&DeviceId, &Device> = company.iter().map(|device| (&device.id, &**device)).collect();
    let tree = Tree::new(offering, &company, &ids, &must);
    let policy = Policy { placement: offering.spec.placement, company_first: company.len() >= size };
    let chosen = tree.choose(policy, size);
    let (first, rest): (Vec<_>, Vec<_>) = chosen.into_iter().map(|index| ids[index]).partition(|id| must.binary_search(id).is_ok());
    Ok(first.into_iter().chain(rest).cloned().collect())
}

/// Each id once, in their order.
fn sorted(mut ids: Vec<&DeviceId>) -> Vec<&DeviceId> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// What decides between choices.
#[derive(Debug, Clone, Copy)]
struct Policy {
    placement: Placement,
    /// Whether it is more important to be near to the company than anything that the placement is about.
    company_first: bool,
}

impl Tree {
    fn choose(&self, policy: Policy, size: usize) -> Vec<usize> {
        let (solved, mut best) = (self.0.solve(policy, size, 0), None);
        self.0.search(&solved, policy, size, Around::default(), &mut best);
        best.map(|(_, ids)| ids.to_vec()).unwrap_or_default()
    }
}

/// What a choice costs, the most important first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost([i32; Cost::PARTS]);

impl Cost {
    const PARTS: usize = 16;
    /// Pairs of shares of one device.
    const SAME: usize = 0;
    /// How far the company is, less a constant.
    const COMPANY: usize = 1;
    /// What the placement is about, and what follows; of closest, how unevenly devices are shared comes second.
    const PLACEMENT: usize = 2;
    const UNEVEN: usize = 3;
    /// How far the company is, where the placement comes first. Levels of deeper trees are compared in the one before.
    const COMPANY_LAST: usize = Cost::PARTS - 1;

    fn add(&mut self, part: usize, cost: usize) {
        let part = &mut self.0[part.min(Cost::COMPANY_LAST - 1)];
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

/// The best choice of one size in a group: what it costs, and its ids in their order.
type Choice<'a> = (&'a Cost, &'a [usize]);

/// The best choice of each size in a group, in two lists for all of them: there are thousands, of a few ids each.
#[derive(Debug, Clone, Default)]
struct Choices {
    /// `None` where there is none of that size.
    costs: Vec<Option<Cost>>,
    /// The id of the first size, the two of the second, and so on.
    ids: Vec<usize>,
}

impl Choices {
    fn with_room(most: usize) -> Self {
        Choices { costs: Vec::with_capacity(most + 1), ids: Vec::with_capacity(most * (most + 1) / 2) }
    }

    /// The largest size.
    fn most(&self) -> usize {
        self.costs.len().saturating_sub(1)
    }

    /// Adds the one of the next size.
    fn push(&mut self, cost: Option<Cost>, ids: impl Iterator<Item = usize>) {
        let end = self.ids.len() + self.costs.len();
        self.costs.push(cost);
        self.ids.extend(ids);
        self.ids.resize(end, 0);
    }

    /// The same, of ids that are not in their order.
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

/// Two choices as one: most are worse than another in their first parts, and are not made.
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
            let (cost, known) = (one[part].saturating_add(other[part]), known_one[part].saturating_add(known_other[part]));
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

/// A choice among those of other groups: pairs of shares of one device, how far the company is where that comes first, how
/// far at worst, what it costs, what is left over in its group and around it, how unevenly devices are shared.
type Rank = (i32, i32, Reverse<Nearness>, Cost, usize, usize, i32);

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
    fn cost(&self, policy: Policy, count: usize, depth: usize) -> Cost {
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
            cost.add(Cost::SAME, count * (count - 1) / 2);
        }
        let company_last = !policy.company_first && policy.placement != Placement::Closest;
        cost.attract(if company_last { Cost::COMPANY_LAST } else { Cost::COMPANY }, self.pull);
        match policy.placement {
            Placement::Closest => {
                cost.add(Cost::PLACEMENT, usize::from(was_whole && count < self.free && !is_device));
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
                let mut choices = Choices::with_room(most);
                (0..=most).for_each(|count| choices.push_unsorted(Cost::default(), &free[..count]));
                (choices, Vec::new())
            }
            Parts::Groups(groups) => 'solved: {
                // Where one is wanted each device is looked at by itself.
                if let Some(alike) = Alike::of(groups).filter(|_| size > 1) {
                    break 'solved (alike.choices(policy, most, depth + 1), Vec::new());
                }
                let parts: Vec<Solved> = groups.iter().map(|part| part.solve(policy, size, depth + 1)).collect();
                let mut rest = parts.iter();
                let first = rest.next().map(|part| part.choices.clone()).unwrap_or_default();
                (rest.fold(first, |choices, part| join(&choices, &part.choices, size)), parts)
            }
        };
        for (count, cost) in choices.costs.iter_mut().enumerate() {
            *cost = cost.filter(|_| count >= self.must).map(|cost| cost.plus(&self.cost(policy, count, depth)));
        }
        Solved { choices, parts }
    }

    /// Looks for the best choice in this group and in every one below it.
    fn search<'a>(&self, solved: &'a Solved, policy: Policy, size: usize, around: Around, best: &mut Option<(Rank, &'a [usize])>) {
        if self.free < size {
            return;
        }
        let Around { depth, cost, left } = around;
        if let Some((own, ids)) = solved.choices.get(size) {
            let mut cost = own.plus(&cost);
            let same = std::mem::take(&mut cost.0[Cost::SAME]);
            let company = if policy.company_first { std::mem::take(&mut cost.0[Cost::COMPANY]) } else { 0 };
            let rank = if policy.placement == Placement::Closest {
                let uneven = std::mem::take(&mut cost.0[Cost::UNEVEN]);
                // The shares of a device are no others' to need whole.
                let left_here = if self.is_device() { 0 } else { self.free - size };
                (same, company, Reverse(self.nearness), cost, left_here, left, uneven)
            } else {
                (same, company, Reverse(Nearness::System), cost, 0, 0, 0)
            };
            let found = (rank, ids);
            if best.as_ref().is_none_or(|known| found < *known) {
                *best = Some(found);
            }
        }
        // Only for the nearest is it of interest how much smaller a group could be.
        if let (Parts::Groups(groups), Placement::Closest) = (&self.parts, policy.placement) {
            let around = Around { depth: depth + 1, cost: cost.plus(&self.cost(policy, size, depth)), left: left + self.free - size };
            for (part, solved) in groups.iter().zip(&solved.parts).filter(|(part, _)| part.must == self.must) {
                part.search(solved, policy, size, around, best);
            }
        }
    }
}

/// Whole devices that are as good as each other, as those behind one switch mostly are.
struct Alike<'a> {
    /// Any of those that are free, for what one costs.
    any: &'a Group,
    /// The ids of those that are free, those first that must be included.
    ids: Vec<usize>,
}

impl<'a> Alike<'a> {
    /// `None` where one may be better than another, or none is free.
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

    /// The best choices of each size up to `most`: the first ones.
    fn choices(&self, policy: Policy, most: usize, depth: usize) -> Choices {
        let each = self.any.cost(policy, 1, depth);
        let (mut choices, mut cost) = (Choices::with_room(most), Cost::default());
        for count in 0..=most {
            choices.push_unsorted(cost, &self.ids[..count]);
            cost = cost.plus(&each);
        }
        choices
    }
}

/// The best choice of each size out of two parts.
fn join(left: &Choices, right: &Choices, size: usize) -> Choices {
    let (most_left, most_right) = (left.most(), right.most());
    let most = size.min(most_left + most_right);
    let mut joined = Choices::with_room(most);
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

/// The lower one of what two sorted lists begin with.
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
