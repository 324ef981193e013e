//! The score of a choice, and the best choice of each size in a group of devices.

/// The score of a choice, the most important part first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost(pub(super) [i32; Cost::PARTS]);

impl Cost {
    const PARTS: usize = 16;
    /// Pairs of shares of one device.
    pub(super) const SAME: usize = 0;
    /// The neighbour distance, less a constant.
    pub(super) const NEIGHBOURS: usize = 1;
    /// The placement's own rules. For `closest`, the second of them is how unevenly devices are
    /// used.
    pub(super) const PLACEMENT: usize = 2;
    pub(super) const UNEVEN: usize = 3;
    /// The neighbour distance if the placement comes first. Levels of deeper trees are added to the
    /// part before.
    pub(super) const NEIGHBOURS_LAST: usize = Cost::PARTS - 1;

    pub(super) fn add(&mut self, part: usize, cost: usize) {
        let part = &mut self.0[part.min(Cost::NEIGHBOURS_LAST - 1)];
        *part = part.saturating_add(i32::try_from(cost).unwrap_or(i32::MAX));
    }

    pub(super) fn attract(&mut self, part: usize, pull: usize) {
        self.0[part] = self.0[part].saturating_sub(i32::try_from(pull).unwrap_or(i32::MAX));
    }

    pub(super) fn plus(mut self, other: &Cost) -> Cost {
        self.0.iter_mut().zip(other.0).for_each(|(part, other)| *part = part.saturating_add(other));
        self
    }
}

/// The best choice of one size in a group: its cost, and its ids in order.
type Choice<'a> = (&'a Cost, &'a [usize]);

/// The best choice of each size in a group, in two lists for all sizes: there are thousands, with a
/// few ids each.
#[derive(Debug, Clone, Default)]
pub(super) struct Choices {
    /// `None` if there is no choice of that size.
    pub(super) costs: Vec<Option<Cost>>,
    /// The one id of size 1, then the two of size 2, and so on.
    ids: Vec<usize>,
}

impl Choices {
    pub(super) fn with_capacity(most: usize) -> Self {
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
    pub(super) fn push_unsorted(&mut self, cost: Cost, ids: &[usize]) {
        let start = self.ids.len();
        self.push(Some(cost), ids.iter().copied());
        self.ids[start..].sort_unstable();
    }

    pub(super) fn get(&self, size: usize) -> Option<Choice<'_>> {
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

/// The best choice of each size from two parts.
pub(super) fn join(left: &Choices, right: &Choices, size: usize) -> Choices {
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
