//! The SR-IOV network device plugin: `config.json`, as its code parses it.

use super::super::tree::{Is, Table, Value};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text, texts};
use crate::domain::PciAddress;
use std::collections::{BTreeMap, BTreeSet};

/// The selectors of the plugin, and ours; all are lists of texts.
const LISTS: [(&str, &str); 9] = [
    ("vendors", "vendor"),
    ("devices", "device"),
    ("drivers", "driver"),
    ("pciAddresses", "address"),
    ("pfNames", "pf"),
    ("rootDevices", "pf"),
    ("linkTypes", "link_type"),
    ("acpiIndexes", ATTRIBUTES[0]),
    ("pKeys", ATTRIBUTES[1]),
];
/// The plugin's selector without an equivalent. Without it a pool would offer too many devices.
const UNSUPPORTED: &str = "ddpProfiles";
/// Our keys that select by an attribute.
const ATTRIBUTES: [&str; 2] = ["acpi_index", "pkey"];
/// Drivers for guests and for programs in user space. With any other driver a function may have an
/// RDMA device.
const PASS_THROUGH_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// A word in the SR-IOV operator's policies that means the default driver of a function.
const NO_DRIVER: &str = "netdevice";

/// Every key that is read.
pub(super) const KEYS: &[&str] = &[
    "resourceList[].resourceName",
    "resourceList[].resourcePrefix",
    "resourceList[].deviceType",
    "resourceList[].excludeTopology",
    "resourceList[].additionalInfo",
    "resourceList[].selectors",
    "resourceList[].selectors.vendors",
    "resourceList[].selectors.devices",
    "resourceList[].selectors.drivers",
    "resourceList[].selectors.pciAddresses",
    "resourceList[].selectors.pfNames",
    "resourceList[].selectors.rootDevices",
    "resourceList[].selectors.linkTypes",
    "resourceList[].selectors.isRdma",
    "resourceList[].selectors.needVhostNet",
    "resourceList[].selectors.vdpaType",
    "resourceList[].selectors.acpiIndexes",
    "resourceList[].selectors.ddpProfiles",
    "resourceList[].selectors.pKeys",
    "resourceList[].selectors.auxTypes",
];

/// Internal fields of the plugin's pool type, which have no JSON name of their own. The operator
/// writes them, empty, and the plugin does not read them.
const INTERNAL_KEYS: [&str; 2] = ["SelectorObj", "SelectorObjs"];

pub(super) fn read(
    source: &Source,
    prefix: Option<&str>,
    draft: &mut Draft,
) -> Result<(), ImportError> {
    let root = source.root(Decoder::Json)?;
    let flag =
        |names: &[&str]| source.flags.last(names, "").map(|flag| flag.field(Decoder::JsonOfYaml));
    let flag_prefix = draft
        .setting(flag(&["resource-prefix"]), |field| field.text().map(str::to_owned))
        .filter(|flag_prefix| !flag_prefix.is_empty());
    let prefix = prefix.or(flag_prefix.as_deref()).unwrap_or("intel.com");
    let cdi = draft.setting(flag(&["use-cdi"]), Field::truth).unwrap_or(false);
    for elsewhere in
        source.flags.elsewhere.iter().filter(|elsewhere| elsewhere.name == "resource-prefix")
    {
        draft.warn(format!(
            "`resource-prefix` at {} has no value in the manifest; set it with `--prefix`",
            elsewhere.place
        ));
    }
    let list = root
        .get("resourceList")
        .ok_or_else(|| root.wrong("a configuration with `resourceList`"))?;
    for pool in list.items()? {
        for key in INTERNAL_KEYS {
            drop(pool.get(key).inspect(|field| field.read_all()));
        }
        match offer(&pool, prefix, draft) {
            Ok(Ok(mut offered)) => {
                if cdi {
                    offered.set("cdi", texts(&["annotations"]));
                }
                draft.offer(offered, &pool);
            }
            Ok(Err(why)) => {
                pool.read_all();
                draft.warn(format!(
                    "{} is left out: {why}",
                    pool.place_of(&name_of(&pool, prefix)?)
                ));
            }
            Err(error) => {
                pool.read_all();
                let place = name_of(&pool, prefix)
                    .map_or_else(|_| pool.place(), |name| pool.place_of(&name));
                draft.wrong(&place, &error);
            }
        }
    }
    draft.unknown(&root, KEYS);
    Ok(())
}

fn name_of(pool: &Field<'_>, prefix: &str) -> Result<String, ImportError> {
    let name = pool.get("resourceName").ok_or_else(|| pool.wrong("a `resourceName`"))?;
    let prefix = pool
        .get("resourcePrefix")
        .filter(Field::has_effect)
        .map_or(Ok(prefix), |prefix| prefix.text())?;
    Ok(format!("{prefix}/{}", name.text()?))
}

/// The `deviceType` of a pool; `Auxiliary` means scalable functions.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Net,
    Accelerator,
    Auxiliary,
}

impl Kind {
    fn of(pool: &Field<'_>) -> Result<Self, ImportError> {
        let kind = pool.get("deviceType").filter(Field::has_effect);
        match kind.as_ref().map_or(Ok("netDevice"), |kind| kind.text())? {
            "netDevice" => Ok(Kind::Net),
            "accelerator" => Ok(Kind::Accelerator),
            "auxNetDevice" => Ok(Kind::Auxiliary),
            _ => Err(kind.as_ref().unwrap_or(pool).wrong("netDevice, accelerator or auxNetDevice")),
        }
    }

    /// Whether a selector has a meaning for pools of this kind. Others stay unread.
    fn reads(self, key: &str) -> bool {
        match key {
            "vendors" | "devices" | "drivers" => true,
            "pciAddresses" | "acpiIndexes" => self != Kind::Auxiliary,
            "vdpaType" | "pKeys" | UNSUPPORTED => self == Kind::Net,
            "auxTypes" => self == Kind::Auxiliary,
            _ => self != Kind::Accelerator,
        }
    }
}

/// The selection of functions, and the extras that a container gets.
#[derive(Default)]
struct Selector<'a> {
    scalable: bool,
    lists: BTreeMap<&'static str, Vec<String>>,
    places: BTreeMap<&'static str, Field<'a>>,
    rdma: bool,
    vhost_net: bool,
    vdpa: Option<String>,
}

/// The resource, or the reason why it cannot be expressed here.
fn offer(
    pool: &Field<'_>,
    prefix: &str,
    draft: &mut Draft,
) -> Result<Result<Table, String>, ImportError> {
    let name = &name_of(pool, prefix)?;
    let kind = Kind::of(pool)?;
    let selectors = match selectors(pool, kind)? {
        Ok(selectors) => selectors,
        Err(why) => return Ok(Err(why)),
    };
    let Some(selector) = selectors.first() else { return Ok(Err("it selects nothing".into())) };
    for of in selectors.iter().filter_map(|selector| selector.no_driver()) {
        draft.warn(format!(
            "{}: `{NO_DRIVER}` is not a driver, and no function has it; leave out `drivers` to \
             accept any driver",
            of.place()
        ));
    }
    // Any other function may have an RDMA device, and is in the pool with it and without it.
    let class = match (kind, selector.rdma) {
        (Kind::Accelerator, _) => "accelerator",
        (_, true) => "rdma",
        (_, false) if selectors.iter().all(Selector::is_passed_through) => "nic",
        (_, false) => "network",
    };
    let mut offered = resource(name, class);
    offered.set("contract", text("sriov"));
    let mut options = Table::default();
    if selector.rdma {
        options.set("rdma", plain(true));
    }
    if selector.vhost_net {
        options.set("vhost_net", plain(true));
    }
    if let Some(vdpa) = &selector.vdpa {
        options.set("vdpa", text(vdpa));
    }
    if let Some(info) = pool.get("additionalInfo").filter(Field::has_effect) {
        set_table(&mut options, "additional_info", additional_info(&info, draft)?);
    }
    if draft.setting(pool.get("excludeTopology"), Field::truth) == Some(true) {
        offered.set("topology", plain(false));
    }
    let mut selects = selectors.iter().map(Selector::table);
    set_table(&mut offered, "select", selects.next().unwrap_or_default());
    let or: Vec<Value> = selects.map(|is| Value { place: None, is: Is::Table(is) }).collect();
    if !or.is_empty() {
        offered.set("or", Is::List(or));
    }
    set_table(&mut offered, "sriov", options);
    Ok(Ok(offered))
}

/// The additional information of each PCI address, and of `*` for all of them.
fn additional_info(info: &Field<'_>, draft: &mut Draft) -> Result<Table, ImportError> {
    let mut by_address = Table::default();
    for (address, fields) in info.entries()? {
        if address != "*" && address.to_ascii_lowercase().parse::<PciAddress>().is_err() {
            fields.read_all();
            draft.warn(format!(
                "{} is left out: it is not a PCI address, and no device has it",
                fields.place()
            ));
            continue;
        }
        let mut table = Table::default();
        for (key, value) in fields.entries()? {
            table.set(key, text(value.text()?));
        }
        by_address.set(address, Is::Table(table));
    }
    Ok(by_address)
}

/// The selectors of a pool: a function must match one. Two that differ in one list only are one.
fn selectors<'a>(
    pool: &Field<'a>,
    kind: Kind,
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
        let next = match selector(&each, kind)? {
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
    fn no_driver(&self) -> Option<&Field<'a>> {
        let drivers = self.lists.get("driver")?;
        drivers.iter().any(|driver| driver == NO_DRIVER).then(|| self.places.get("driver"))?
    }

    /// Whether all of its functions are given to a guest or to a program in user space.
    fn is_passed_through(&self) -> bool {
        let is = |driver: &String| PASS_THROUGH_DRIVERS.contains(&driver.as_str());
        self.lists.get("driver").is_some_and(|drivers| drivers.iter().all(is))
    }

    /// The same as a table of ours.
    fn table(&self) -> Table {
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
        let mut texts = list.texts()?;
        if ours == "pf" {
            // The plugin reads only the first entry for a port.
            let mut ports = BTreeSet::new();
            texts.retain(|text| {
                ports.insert(text.split('#').next().unwrap_or(text).to_ascii_lowercase())
            });
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
