//! Collecting into sorted collections without code of its own for every kind of item.

/// Iterators whose items are put into a collection one by one.
///
/// `collect` into a `BTreeMap` or a `BTreeSet` sorts the items first, by a sort that is compiled anew for each type of item: some
/// 5 KB each, half a megabyte of a binary that every node keeps in memory. What is gathered here is short.
pub trait Gather: Iterator + Sized {
    /// The same as `collect`; of equal keys the last one stays.
    fn gather<C: Default + Extend<Self::Item>>(self) -> C {
        let mut gathered = C::default();
        gathered.extend(self);
        gathered
    }
}

impl<I: Iterator> Gather for I {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn what_is_gathered_is_what_is_collected() {
        let pairs = [(3, 'a'), (1, 'b'), (3, 'c'), (2, 'd')];
        assert_eq!(pairs.into_iter().gather::<BTreeMap<_, _>>(), pairs.into_iter().collect());
        assert_eq!([3, 1, 3].into_iter().gather::<BTreeSet<_>>(), [1, 3].into());
    }
}
