//! The SR-IOV network device plugin: `config.json`, as its code parses it.

use super::super::tree::{Is, Table};
use super::doc::Field;
use super::{Draft, ImportError, plain, resource, set_table, text, texts};
use std::collections::BTreeMap;

/// What selects, there and here; all lists of texts.
const LISTS: [(&str, &str); 7] = [
    ("vendors", "vendor"),
    ("devices", "device"),
    ("drivers", "driver"),
    ("pciAddresses", "address"),
    ("pfNames", "pf"),
    ("rootDevices", "pf"),
    ("linkTypes", "link_type"),
];
/// What selects there and has no equal: without it a pool would offer more than was meant.
const UNSAYABLE: [&str; 4] = ["acpiIndexes", "ddpProfiles", "pKeys", "auxTypes"];
/// What hands a function to a guest or a program, which leaves it without an RDMA device. Under any other driver it may have one.
const HANDS_OVER: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

pub(super) fn read(root: &Field<'_>, prefix: &str, draft: &mut Draft) -> Result<(), ImportError> {
    let list = root.get("resourceList").ok_or_else(|| root.wrong("a configuration with `resourceList`"))?;
    for pool in list.items()? {
        let name = pool.get("resourceName").ok_or_else(|| pool.wrong("a `resourceName`"))?.text()?;
        let prefix = pool.get("resourcePrefix").filter(Field::says_something).map_or(Ok(prefix), |prefix| prefix.text())?;
        let name = format!("{prefix}/{name}");
        match offer(&name, &pool, draft)? {
            Ok(offered) => draft.resources.push(offered),
            Err(why) => {
                pool.read_all();
                draft.warn(format!("`{}` ({name}) is left out: {why}", pool.path));
            }
        }
    }
    Ok(())
}

/// What selects functions, and what a container gets of them.
#[derive(Default, PartialEq)]
struct Selector {
    lists: BTreeMap<&'static str, Vec<String>>,
    rdma: bool,
    vhost_net: bool,
    vdpa: Option<String>,
}

/// The resource, or why it cannot be said here.
fn offer(name: &str, pool: &Field<'_>, draft: &mut Draft) -> Result<Result<Table, String>, ImportError> {
    let kind = pool.get("deviceType").filter(Field::says_something).map_or(Ok("netDevice"), |kind| kind.text())?;
    let is_accelerator = match kind {
        "netDevice" => false,
        "accelerator" => true,
        "auxNetDevice" => return Ok(Err("`deviceType` is auxNetDevice, and scalable functions are not offered here".into())),
        _ => return Err(pool.wrong("a `deviceType` of netDevice, accelerator or auxNetDevice")),
    };
    let selector = match selectors(pool)? {
        Ok(selector) => selector,
        Err(why) => return Ok(Err(why)),
    };
    let has = |key: &str, is: &dyn Fn(&str) -> bool| selector.lists.get(key).is_some_and(|list| list.iter().all(|text| is(text)));
    let is_mellanox =
        has("vendor", &|vendor| vendor.trim_start_matches("0x") == "15b3") || has("driver", &|driver| driver.starts_with("mlx"));
    let drivers = selector.lists.get("driver").map(Vec::as_slice).unwrap_or_default();
    let handed_over = drivers.iter().filter(|driver| HANDS_OVER.contains(&driver.as_str())).count();
    let class = match (is_accelerator, selector.rdma || (is_mellanox && handed_over == 0)) {
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
    } else if class == "nic" && (drivers.is_empty() || handed_over < drivers.len()) {
        draft.warn(format!(
            "{name}: functions that have an RDMA device are of the class `rdma` here, and not offered by this resource; where all of them \
             have one, class = \"rdma\" with sriov = {{ rdma = false }} is right"
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
    if let Some(info) = pool.get("additionalInfo").filter(Field::says_something) {
        let mut by_address = Table::default();
        for (address, fields) in info.entries()? {
            let mut table = Table::default();
            for (key, value) in fields.entries()? {
                table.set(key, text(value.text()?));
            }
            by_address.set(address, Is::Table(table));
        }
        options.set("additional_info", Is::Table(by_address));
    }
    draft.no_equal(Some(pool), &[("excludeTopology", "the kubelet is always told the NUMA node")]);
    let mut select = Table::default();
    for (_, key) in LISTS {
        if let Some(list) = selector.lists.get(key) {
            select.set(key, texts(list));
        }
    }
    set_table(&mut offered, "select", select);
    set_table(&mut offered, "sriov", options);
    Ok(Ok(offered))
}

/// The selectors of a pool as one. Several select what any of them does; here that can be said where they differ in one list.
fn selectors(pool: &Field<'_>) -> Result<Result<Selector, String>, ImportError> {
    let Some(field) = pool.get("selectors") else { return Ok(Ok(Selector::default())) };
    let each = if field.is_list() { field.items()? } else { vec![field] };
    let mut merged: Option<Selector> = None;
    for each in each {
        let next = match selector(&each)? {
            Ok(next) => next,
            Err(why) => return Ok(Err(why)),
        };
        let Some(there) = &mut merged else {
            merged = Some(next);
            continue;
        };
        let same = (there.rdma, there.vhost_net, &there.vdpa) == (next.rdma, next.vhost_net, &next.vdpa)
            && there.lists.keys().eq(next.lists.keys());
        let differ: Vec<&str> = there.lists.iter().filter(|(key, list)| next.lists.get(*key) != Some(list)).map(|(key, _)| *key).collect();
        match differ.as_slice() {
            [] if same => {}
            [key] if same => {
                let more = next.lists.get(key).cloned().unwrap_or_default();
                there.lists.entry(key).or_default().extend(more);
            }
            _ => {
                return Ok(Err(format!("`{}` differs from the first in more than one list, and one resource has one `select`", each.path)));
            }
        }
    }
    Ok(Ok(merged.unwrap_or_default()))
}

fn selector(field: &Field<'_>) -> Result<Result<Selector, String>, ImportError> {
    if !field.is_map() {
        return Err(field.wrong("a selector such as { \"vendors\": [\"15b3\"] }"));
    }
    for key in UNSAYABLE {
        if field.get(key).is_some_and(|list| list.says_something()) {
            return Ok(Err(format!("`{}.{key}` has no equal, and without it more would be offered than is meant", field.path)));
        }
    }
    let truth = |key: &str| field.get(key).map_or(Ok(false), |value| value.truth());
    let vdpa = field.get("vdpaType").filter(Field::says_something).map(|kind| kind.text().map(str::to_owned)).transpose()?;
    let mut told = Selector { rdma: truth("isRdma")?, vhost_net: truth("needVhostNet")?, vdpa, ..Selector::default() };
    for (theirs, ours) in LISTS {
        let Some(list) = field.get(theirs).filter(Field::says_something) else { continue };
        if told.lists.insert(ours, list.texts()?).is_some() {
            return Ok(Err(format!("`{}` has `pfNames` and `rootDevices`, of which both must match there, and one does here", field.path)));
        }
    }
    Ok(Ok(told))
}
