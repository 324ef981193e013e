//! The devices of a pool that is left out. The plugin offers a device in the first pool that
//! selects it, so later pools may get more here than there.

use super::super::draft::Draft;
use super::super::field::Field;
use super::super::ids;
use super::{Kind, LISTS};
use crate::config::tree::{Table, Value};
use crate::domain::{Pf, PfSelect};
use std::collections::BTreeMap;

/// A pool that is left out.
pub(super) struct Owned {
    name: String,
    /// The number of pools before it that are offered.
    before: usize,
    kind: Kind,
    /// The lists of each selector, by our keys.
    selectors: Vec<BTreeMap<&'static str, Vec<String>>>,
}

/// What a pool selects. A list that cannot be read excludes nothing.
pub(super) fn of(pool: &Field<'_>, name: String, draft: &Draft) -> Owned {
    let kind = Kind::of(pool).unwrap_or(Kind::Net);
    let selectors = pool.get("selectors");
    let each = selectors.map_or_else(Vec::new, |field| field.items().unwrap_or(vec![field]));
    let lists = |selector: &Field<'_>| {
        let list = |(theirs, ours): (&'static str, &'static str)| {
            let list = kind.reads(theirs).then(|| selector.get(theirs)).flatten()?;
            let texts =
                ids::texts(&list, ours, &mut Vec::new()).ok().filter(|texts| !texts.is_empty())?;
            Some((ours, texts))
        };
        LISTS.into_iter().filter_map(list).collect()
    };
    Owned { name, before: draft.offers.len(), kind, selectors: each.iter().map(lists).collect() }
}

/// Notes the later resources that may get devices of these pools.
pub(super) fn note(pools: &[Owned], draft: &mut Draft) {
    for pool in pools {
        let later = draft.offers.iter().skip(pool.before).map(|offer| &offer.table);
        let later = later.filter(|table| pool.may_share_with(table));
        let name = |table: &Table| Some(table.get("name")?.as_text()?.to_owned());
        let later = later.filter_map(name).collect();
        draft.unclaimed.push((pool.name.clone(), later));
    }
}

impl Owned {
    /// Whether a resource may select a device of this pool: no list of one excludes that of the
    /// other.
    fn may_share_with(&self, later: &Table) -> bool {
        let select = later.get("select").and_then(Value::as_table);
        let or = later.get("or").and_then(Value::as_list).unwrap_or_default();
        let selections: Vec<Option<&Table>> =
            std::iter::once(select).chain(or.iter().map(Value::as_table)).collect();
        let is_accelerator = later.get("class").and_then(Value::as_text) == Some("accelerator");
        let is_part = select.is_some_and(|select| select.get("part").is_some());
        let kind = match (is_accelerator, is_part) {
            (true, _) => Kind::Accelerator,
            (false, true) => Kind::Auxiliary,
            (false, false) => Kind::Net,
        };
        let may_share = |key: &str, list: &[String], select: Option<&Table>| {
            let other = select.and_then(|select| select.get(key)?.as_list());
            other.is_none_or(|other| {
                let mut other = other.iter().filter_map(Value::as_text);
                other.any(|text| list.iter().any(|one| may_be_equal(one, text)))
            })
        };
        kind == self.kind
            && self.selectors.iter().any(|lists| {
                let may_be_in = |select: &Option<&Table>| {
                    lists.iter().all(|(key, list)| may_share(key, list, *select))
                };
                selections.iter().any(may_be_in)
            })
    }
}

/// Whether two texts may select the same device. Both may be physical functions with numbers of
/// their virtual functions, one by its interface and one by its address.
fn may_be_equal(one: &str, other: &str) -> bool {
    if one.eq_ignore_ascii_case(other) {
        return true;
    }
    let (Ok(one), Ok(other)) = (one.parse::<PfSelect>(), other.parse::<PfSelect>()) else {
        return false;
    };
    let is_one_pf = match (&one.pf, &other.pf) {
        (Pf::Interface(one), Pf::Interface(other)) => one.eq_ignore_ascii_case(other),
        (Pf::Address(one), Pf::Address(other)) => one == other,
        _ => true,
    };
    let overlaps =
        |(first, last): &(u32, u32)| other.vfs.iter().any(|(from, to)| first <= to && from <= last);
    is_one_pf && (one.vfs.is_empty() || other.vfs.is_empty() || one.vfs.iter().any(overlaps))
}

#[cfg(test)]
mod tests {
    use super::may_be_equal;

    #[test]
    fn texts_of_two_pools_may_select_one_device() {
        for (one, other, expected) in [
            ("8086", "8086", true),
            ("8086", "15b3", false),
            ("ens1f0#0-3", "ENS1F0#3-5", true),
            ("ens1f0#0-3", "ens1f0#4-5", false),
            ("ens1f0", "ens1f0#4-5", true),
            ("ens1f0#0", "ens1f1#0", false),
            ("ens1f0#0", "0000:3b:00.0#0", true),
            ("ens1f0#0", "0000:3b:00.0#1", false),
            ("0000:3b:00.0", "0000:3B:00.0#1", true),
        ] {
            assert_eq!(may_be_equal(one, other), expected, "{one} {other}");
        }
    }
}
