//! The selectors of a pool.

use super::super::error::ImportError;
use super::super::field::Field;
use super::super::ids;
use super::super::values::{plain, set_from, set_table, texts};
use super::{Kind, LISTS};
use crate::config::tree::Table;
use std::collections::{BTreeMap, BTreeSet};

/// The plugin's selector without an equivalent. Without it a pool would offer too many devices.
pub(super) const UNSUPPORTED: &str = "ddpProfiles";
/// Our keys that select by an attribute.
pub(super) const ATTRIBUTES: [&str; 2] = ["acpi_index", "pkey"];
/// Drivers for guests and for programs in user space. With any other driver a function may have an
/// RDMA device.
const PASS_THROUGH_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// A word in the SR-IOV operator's policies that means the default driver of a function.
pub(super) const NO_DRIVER: &str = "netdevice";

/// The selection of functions, and the extras that a container gets.
#[derive(Default)]
pub(super) struct Selector<'a> {
    scalable: bool,
    lists: BTreeMap<&'static str, Vec<String>>,
    places: BTreeMap<&'static str, Field<'a>>,
    pub(super) rdma: bool,
    pub(super) vhost_net: bool,
    pub(super) vdpa: Option<String>,
}

/// The selectors of a pool: a function must match one. Two that differ in one list only are one.
pub(super) fn selectors<'a>(
    pool: &Field<'a>,
    kind: Kind,
    notes: &mut Vec<String>,
) -> Result<Result<Vec<Selector<'a>>, String>, ImportError> {
    // Without selectors the plugin does not start; all functions would be one pool.
    let field = pool
        .get("selectors")
        .ok_or_else(|| pool.wrong("`selectors` such as { \"vendors\": [\"15b3\"] }"))?;
    let each = if field.is_list() { field.items()? } else { vec![field.clone()] };
    if each.is_empty() {
        return Err(field.wrong("at least one selector"));
    }
    let mut all: Vec<Selector<'_>> = Vec::new();
    for each in each {
        let next = match selector(&each, kind, notes)? {
            Ok(next) => next,
            Err(why) => return Ok(Err(why)),
        };
        let Some(first) = all.first() else {
            all.push(next);
            continue;
        };
        if (first.rdma, first.vhost_net, &first.vdpa) != (next.rdma, next.vhost_net, &next.vdpa) {
            return Ok(Err(format!(
                "{} differs from the first in `isRdma`, `needVhostNet` or `vdpaType`, and a \
                 resource has the same for all of its devices",
                each.place()
            )));
        }
        if !all.iter_mut().any(|there| there.takes(&next)) {
            all.push(next);
        }
    }
    // One that is empty selects every function, with the others or without them.
    if let Some(any) = all.iter().position(|selector| selector.lists.is_empty()) {
        all = vec![all.swap_remove(any)];
    }
    Ok(Ok(all))
}

impl<'a> Selector<'a> {
    /// Takes another selector into this one, where they differ in at most one list.
    fn takes(&mut self, next: &Selector<'a>) -> bool {
        if !self.lists.keys().eq(next.lists.keys()) {
            return false;
        }
        let differs = |(key, list): &(&&'static str, &mut Vec<String>)| next.lists[**key] != **list;
        let mut differing: Vec<_> = self.lists.iter_mut().filter(differs).collect();
        match differing.as_mut_slice() {
            [] => true,
            [(key, list)] => {
                list.extend(next.lists[**key].iter().cloned());
                true
            }
            _ => false,
        }
    }

    /// The place of its drivers if they have the operator's word for any.
    pub(super) fn no_driver(&self) -> Option<&Field<'a>> {
        let drivers = self.lists.get("driver")?;
        drivers.iter().any(|driver| driver == NO_DRIVER).then(|| self.places.get("driver"))?
    }

    /// Whether all of its functions are given to a guest or to a program in user space.
    pub(super) fn is_passed_through(&self) -> bool {
        let is = |driver: &String| PASS_THROUGH_DRIVERS.contains(&driver.as_str());
        self.lists.get("driver").is_some_and(|drivers| drivers.iter().all(is))
    }

    /// The same as a table of ours.
    pub(super) fn table(&self) -> Table {
        let (mut select, mut attribute) = (Table::default(), Table::default());
        if self.scalable {
            select.set("part", plain(true));
        }
        for (_, key) in LISTS {
            let Some((list, from)) = self.lists.get(key).zip(self.places.get(key)) else {
                continue;
            };
            if ATTRIBUTES.contains(&key) {
                let globs: Vec<String> =
                    list.iter().map(|text| glob::Pattern::escape(text)).collect();
                set_from(&mut attribute, key, texts(&globs), from);
            } else if select.get(key).is_none() {
                set_from(&mut select, key, texts(list), from);
            }
        }
        set_table(&mut select, "attribute", attribute);
        select
    }
}

fn selector<'a>(
    field: &Field<'a>,
    kind: Kind,
    notes: &mut Vec<String>,
) -> Result<Result<Selector<'a>, String>, ImportError> {
    if !field.is_map() {
        return Err(field.wrong("a selector such as { \"vendors\": [\"15b3\"] }"));
    }
    let get = |key: &str| if kind.reads(key) { field.get(key) } else { None };
    if let Some(list) = get(UNSUPPORTED).filter(Field::has_effect) {
        return Ok(Err(format!(
            "`{}` has no equivalent, and without it more devices would be offered than intended",
            list.path
        )));
    }
    if kind == Kind::Auxiliary {
        let types = get("auxTypes").map_or(Ok(Vec::new()), |types| types.texts())?;
        if types.is_empty() || types.iter().any(|kind| kind != "sf") {
            return Err(field.wrong("`auxTypes` with the only value that the plugin knows, \"sf\""));
        }
    }
    let truth = |key: &str| get(key).map_or(Ok(false), |value| value.truth());
    let vdpa = get("vdpaType").filter(Field::has_effect);
    let vdpa = vdpa.map(|kind| match kind.text()? {
        known @ ("virtio" | "vhost") => Ok(known.to_owned()),
        _ => Err(kind.wrong("`virtio` or `vhost`")),
    });
    let mut selector = Selector {
        scalable: kind == Kind::Auxiliary,
        rdma: truth("isRdma")?,
        vhost_net: truth("needVhostNet")?,
        vdpa: vdpa.transpose()?,
        ..Selector::default()
    };
    if selector.rdma && selector.vdpa.is_some() {
        return Err(field.wrong("one of `isRdma` and `vdpaType`"));
    }
    for (theirs, ours) in LISTS {
        let Some(list) = get(theirs).filter(Field::has_effect) else { continue };
        let mut texts = ids::texts(&list, ours, notes)?;
        if ours == "pf" {
            // The plugin reads only the first entry for a port.
            let mut ports = BTreeSet::new();
            texts.retain(|text| {
                ports.insert(text.split('#').next().unwrap_or(text).to_ascii_lowercase())
            });
        }
        if theirs == "pfNames" {
            // The plugin ignores the case of an interface, and most names are in lower case.
            let lower: Vec<String> = texts.iter().map(|text| text.to_ascii_lowercase()).collect();
            texts.extend(
                lower.into_iter().filter(|lower| !texts.contains(lower)).collect::<Vec<_>>(),
            );
        }
        selector.places.insert(ours, list.clone());
        if selector.lists.insert(ours, texts).is_some() {
            return Ok(Err(format!(
                "{} has `pfNames` and `rootDevices`: in the plugin both must match, in Holdfast \
                 one of them",
                field.place()
            )));
        }
    }
    Ok(Ok(selector))
}
