//! The SR-IOV network device plugin: `config.json`, as its code parses it.

use super::super::tree::{Is, Table};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text, texts};
use crate::domain::PciAddress;
use std::collections::{BTreeMap, BTreeSet};

/// The selectors of the plugin, and ours; all are lists of texts.
const LISTS: [(&str, &str); 7] = [
    ("vendors", "vendor"),
    ("devices", "device"),
    ("drivers", "driver"),
    ("pciAddresses", "address"),
    ("pfNames", "pf"),
    ("rootDevices", "pf"),
    ("linkTypes", "link_type"),
];
/// The plugin's selectors without an equivalent. Without them a pool would offer too many devices.
const UNSUPPORTED: [&str; 4] = ["acpiIndexes", "ddpProfiles", "pKeys", "auxTypes"];
/// Drivers that give a function to a guest or a user-space program, so that it has no RDMA device.
/// With any other driver it may have one.
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
    let Some(file) = &source.file else {
        return Err(ImportError::new(
            "the manifest has the plugin's container but not its file; add the ConfigMap after a \
             line `---`",
        ));
    };
    let root = Field::root(file, Decoder::Json);
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

/// The selection of functions, and the extras that a container gets.
#[derive(Default)]
struct Selector<'a> {
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
    let is_accelerator = match is_accelerator(pool)? {
        Ok(is_accelerator) => is_accelerator,
        Err(why) => return Ok(Err(why)),
    };
    let selector = match selectors(pool, is_accelerator)? {
        Ok(selector) => selector,
        Err(why) => return Ok(Err(why)),
    };
    let has = |key: &str, is: &dyn Fn(&str) -> bool| {
        selector.lists.get(key).is_some_and(|list| list.iter().all(|text| is(text)))
    };
    if let Some(of) = selector
        .places
        .get("driver")
        .filter(|_| selector.lists["driver"].iter().any(|driver| driver == NO_DRIVER))
    {
        draft.warn(format!(
            "{}: `{NO_DRIVER}` is not a driver, and no function has it; leave out `drivers` to \
             accept any driver",
            of.place()
        ));
    }
    let is_mellanox = has("vendor", &|vendor| vendor.trim_start_matches("0x") == "15b3")
        || has("driver", &|driver| driver.starts_with("mlx"));
    let drivers = selector.lists.get("driver").map(Vec::as_slice).unwrap_or_default();
    let passed_through =
        drivers.iter().filter(|driver| PASS_THROUGH_DRIVERS.contains(&driver.as_str())).count();
    let class = match (is_accelerator, selector.rdma || (is_mellanox && passed_through == 0)) {
        (true, _) => "accelerator",
        (false, true) => "rdma",
        (false, false) => "nic",
    };
    let mut offered = resource(name, class);
    offered.set("contract", text("sriov"));
    let mut options = Table::default();
    if class == "rdma" && !selector.rdma {
        options.set("rdma", plain(false));
        draft.warn(format!(
            "{name}: functions of these adapters have RDMA devices and are of the class `rdma`; without RDMA on the node it is `nic`"
        ));
    } else if class == "nic" && (drivers.is_empty() || passed_through < drivers.len()) {
        draft.warn(format!(
            "{name}: functions that have an RDMA device are of the class `rdma` here, and not \
             offered by this resource; if all of them have one, use class = \"rdma\" with sriov = \
             {{ rdma = false }}"
        ));
    } else if selector.rdma {
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
    draft.no_equivalent(pool.get("excludeTopology"), "the kubelet always gets the NUMA node");
    let mut select = Table::default();
    for (_, key) in LISTS {
        if let Some((list, from)) = selector.lists.get(key).zip(selector.places.get(key)) {
            set_from(&mut select, key, texts(list), from);
        }
    }
    set_table(&mut offered, "select", select);
    set_table(&mut offered, "sriov", options);
    Ok(Ok(offered))
}

/// Whether the pool has accelerators and no network functions, or why it cannot be expressed here.
fn is_accelerator(pool: &Field<'_>) -> Result<Result<bool, String>, ImportError> {
    let kind = pool.get("deviceType").filter(Field::has_effect);
    match kind.as_ref().map_or(Ok("netDevice"), |kind| kind.text())? {
        "netDevice" => Ok(Ok(false)),
        "accelerator" => Ok(Ok(true)),
        "auxNetDevice" => Ok(Err(
            "`deviceType` is auxNetDevice, and scalable functions are not offered here".into(),
        )),
        _ => Err(kind.as_ref().unwrap_or(pool).wrong("netDevice, accelerator or auxNetDevice")),
    }
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

/// Merges the selectors of a pool into one. Several selectors select the union. That can be
/// expressed here if they differ in one list only.
fn selectors<'a>(
    pool: &Field<'a>,
    is_accelerator: bool,
) -> Result<Result<Selector<'a>, String>, ImportError> {
    // Without selectors the plugin does not start; all functions would be one pool.
    let field = pool
        .get("selectors")
        .ok_or_else(|| pool.wrong("`selectors` such as { \"vendors\": [\"15b3\"] }"))?;
    let each = if field.is_list() { field.items()? } else { vec![field.clone()] };
    if each.is_empty() {
        return Err(field.wrong("at least one selector"));
    }
    let mut merged: Option<Selector<'_>> = None;
    for each in each {
        let next = match selector(&each, is_accelerator)? {
            Ok(next) => next,
            Err(why) => return Ok(Err(why)),
        };
        let Some(there) = &mut merged else {
            merged = Some(next);
            continue;
        };
        let same = (there.rdma, there.vhost_net, &there.vdpa)
            == (next.rdma, next.vhost_net, &next.vdpa)
            && there.lists.keys().eq(next.lists.keys());
        let differ: Vec<&str> = there
            .lists
            .iter()
            .filter(|(key, list)| next.lists.get(*key) != Some(list))
            .map(|(key, _)| *key)
            .collect();
        match differ.as_slice() {
            [] if same => {}
            [key] if same => {
                let more = next.lists.get(key).cloned().unwrap_or_default();
                there.lists.entry(key).or_default().extend(more);
            }
            _ => {
                return Ok(Err(format!(
                    "{} differs from the first in more than one list, and one resource has one `select`",
                    each.place()
                )));
            }
        }
    }
    Ok(Ok(merged.unwrap_or_default()))
}

fn selector<'a>(
    field: &Field<'a>,
    is_accelerator: bool,
) -> Result<Result<Selector<'a>, String>, ImportError> {
    if !field.is_map() {
        return Err(field.wrong("a selector such as { \"vendors\": [\"15b3\"] }"));
    }
    // These keys have no meaning for an accelerator, so they stay unread.
    let of_net = |key: &str| if is_accelerator { None } else { field.get(key) };
    for key in UNSUPPORTED {
        if of_net(key).is_some_and(|list| list.has_effect()) {
            return Ok(Err(format!(
                "`{}.{key}` has no equivalent, and without it more devices would be offered than \
                 intended",
                field.path
            )));
        }
    }
    let truth = |key: &str| of_net(key).map_or(Ok(false), |value| value.truth());
    let vdpa = of_net("vdpaType").filter(Field::has_effect);
    let vdpa = vdpa.map(|kind| match kind.text()? {
        known @ ("virtio" | "vhost") => Ok(known.to_owned()),
        _ => Err(kind.wrong("`virtio` or `vhost`")),
    });
    let mut selector = Selector {
        rdma: truth("isRdma")?,
        vhost_net: truth("needVhostNet")?,
        vdpa: vdpa.transpose()?,
        ..Selector::default()
    };
    if selector.rdma && selector.vdpa.is_some() {
        return Err(field.wrong("one of `isRdma` and `vdpaType`"));
    }
    for (theirs, ours) in LISTS {
        let is_common = matches!(ours, "vendor" | "device" | "driver" | "address");
        let list = if is_common { field.get(theirs) } else { of_net(theirs) };
        let Some(list) = list.filter(Field::has_effect) else { continue };
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
