//! The SR-IOV network device plugin: `config.json`, as its code parses it.

mod owned;
mod selector;

use self::selector::{NO_DRIVER, Selector, UNSUPPORTED, selectors};
use super::super::tree::{Is, Table, Value};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_table, text, texts};
use crate::domain::PciAddress;

/// The selectors of the plugin, and ours; all are lists of texts.
const LISTS: [(&str, &str); 9] = [
    ("vendors", "vendor"),
    ("devices", "device"),
    ("drivers", "driver"),
    ("pciAddresses", "address"),
    ("pfNames", "pf"),
    ("rootDevices", "pf"),
    ("linkTypes", "link_type"),
    ("acpiIndexes", selector::ATTRIBUTES[0]),
    ("pKeys", selector::ATTRIBUTES[1]),
];
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
    let mut left_out = Vec::new();
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
                let name = name_of(&pool, prefix)?;
                draft.warn(format!("{} is left out: {why}", pool.place_of(&name)));
                left_out.push(owned::of(&pool, name, draft));
                pool.read_all();
            }
            Err(error) => {
                pool.read_all();
                let place = name_of(&pool, prefix)
                    .map_or_else(|_| pool.place(), |name| pool.place_of(&name));
                draft.wrong(&place, &error);
            }
        }
    }
    owned::note(&left_out, draft);
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

/// The resource, or the reason why it cannot be expressed here.
fn offer(
    pool: &Field<'_>,
    prefix: &str,
    draft: &mut Draft,
) -> Result<Result<Table, String>, ImportError> {
    let name = &name_of(pool, prefix)?;
    let kind = Kind::of(pool)?;
    let mut notes = Vec::new();
    let selectors = match selectors(pool, kind, &mut notes)? {
        Ok(selectors) => selectors,
        Err(why) => return Ok(Err(why)),
    };
    notes.iter().for_each(|note| draft.warn(note));
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
