//! Collecting and sorting without code of its own for every kind of item.
//!
//! The standard library's sort is compiled anew for each type of item and each comparison, some 5 KB each, and `collect` into a
//! `BTreeMap` or a `BTreeSet` sorts first: together half a megabyte of a binary that every node keeps in memory. What is gathered
//! and arranged here is short; what is long or often sorted has the library's sort.

use std::cmp::Ordering;

/// Iterators whose items are put into a collection one by one.
pub trait Gather: Iterator + Sized {
    /// The same as `collect`; of equal keys the last one stays.
    fn gather<C: Default + Extend<Self::Item>>(self) -> C {
        let mut gathered = C::default();
        gathered.extend(self);
        gathered
    }
}

impl<I: Iterator> Gather for I {}

/// Lists that are sorted by the places of their items. Items that are equal stay as they stood.
pub trait Arrange<T> {
    /// The same as `sort_by`.
    fn arrange_by(&mut self, compare: impl Fn(&T, &T) -> Ordering);

    /// The same as `sort_by_key`, and each key is made once.
    fn arrange_by_key<K: Ord>(&mut self, key: impl Fn(&T) -> K);

    /// The same as `sort`.
    fn arrange(&mut self)
    where
        T: Ord,
    {
        self.arrange_by(Ord::cmp);
    }
}

impl<T> Arrange<T> for Vec<T> {
    fn arrange_by(&mut self, compare: impl Fn(&T, &T) -> Ordering) {
        let order = order(self.len(), &|one, other| compare(&self[one], &self[other]));
        put(self, order);
    }

    fn arrange_by_key<K: Ord>(&mut self, key: impl Fn(&T) -> K) {
        let keys: Vec<K> = self.iter().map(key).collect();
        let order = order(self.len(), &|one, other| keys[one].cmp(&keys[other]));
        put(self, order);
    }
}

/// The places of so many items in their order: the one sort that is compiled.
fn order(items: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut places: Vec<usize> = (0..items).collect();
    places.sort_by(|one, other| compare(*one, *other));
    places
}

/// Puts the items of these places one behind the other.
fn put<T>(list: &mut Vec<T>, order: Vec<usize>) {
    let mut items: Vec<Option<T>> = list.drain(..).map(Some).collect();
    list.extend(order.into_iter().filter_map(|place| items[place].take()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn what_is_gathered_is_what_is_collected() {
        let pairs = [(3, 'a'), (1, 'b'), (3, 'c'), (2, 'd')];
        assert_eq!(pairs.into_iter().gather::<BTreeMap<_, _>>(), pairs.into_iter().collect());
        assert_eq!([3, 1, 3].into_iter().gather::<BTreeSet<_>>(), [1, 3].into());
    }

    proptest! {
        #[test]
        fn what_is_arranged_is_what_is_sorted(list: Vec<(u8, u16)>) {
            let (mut arranged, mut sorted) = (list.clone(), list.clone());
            arranged.arrange();
            sorted.sort_unstable();
            prop_assert_eq!(&arranged, &sorted);
            let (mut arranged, mut sorted) = (list.clone(), list.clone());
            arranged.arrange_by_key(|(key, _)| key % 4);
            sorted.sort_by_key(|(key, _)| key % 4);
            prop_assert_eq!(&arranged, &sorted);
            let (mut arranged, mut sorted) = (list.clone(), list);
            arranged.arrange_by(|one, other| (other.0 % 9).cmp(&(one.0 % 9)).then(one.0.cmp(&other.0)));
            sorted.sort_by(|one, other| (other.0 % 9).cmp(&(one.0 % 9)).then(one.0.cmp(&other.0)));
            prop_assert_eq!(arranged, sorted);
        }
    }
}
