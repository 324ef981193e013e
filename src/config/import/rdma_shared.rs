//! Mellanox' k8s-rdma-shared-dev-plugin: `config.json`, as its code parses it.

use super::super::tree::{Table, Value};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::ids;
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text, texts};

/// Every key that is read.
pub(super) const KEYS: &[&str] = &[
    "periodicUpdateInterval",
    "configList[].resourceName",
    "configList[].resourcePrefix",
    "configList[].rdmaHcaMax",
    "configList[].devices",
    "configList[].selectors.vendors",
    "configList[].selectors.deviceIDs",
    "configList[].selectors.drivers",
    "configList[].selectors.ifNames",
    "configList[].selectors.linkTypes",
];

const LISTS: [(&str, &str); 5] = [
    ("vendors", "vendor"),
    ("deviceIDs", "device"),
    ("drivers", "driver"),
    ("ifNames", "interface"),
    ("linkTypes", "link_type"),
];

pub(super) fn read(
    source: &Source,
    prefix: Option<&str>,
    draft: &mut Draft,
) -> Result<(), ImportError> {
    let root = source.root(Decoder::Json)?;
    let cdi = source.flags.last(&["use-cdi"], "").map(|flag| flag.field(Decoder::JsonOfYaml));
    let cdi = draft.setting(cdi, Field::truth).unwrap_or(false);
    let list =
        root.get("configList").ok_or_else(|| root.wrong("a configuration with `configList`"))?;
    for entry in list.items()? {
        let mut notes = Vec::new();
        match pool(&entry, prefix.unwrap_or("rdma"), &mut notes) {
            Ok(mut pool) => {
                notes.iter().for_each(|note| draft.warn(note));
                if cdi {
                    pool.set("cdi", texts(&["annotations"]));
                }
                draft.offer(pool, &entry);
            }
            Err(error) => {
                entry.read_all();
                draft.wrong(&entry.place(), &error);
            }
        }
    }
    draft.overlap = Some(("adapter", may_overlap));
    draft.no_equivalent(
        root.get("periodicUpdateInterval"),
        "the kernel's events report added and removed adapters at once",
    );
    draft.unknown(&root, KEYS);
    Ok(())
}

/// Whether an adapter may have both selections: no list of one excludes that of the other.
fn may_overlap(one: &Table, other: &Table) -> bool {
    let list = |pool: &Table, key| {
        let list = pool.get("select")?.as_table()?.get(key)?.as_list()?;
        Some(
            list.iter().filter_map(Value::as_text).map(str::to_ascii_lowercase).collect::<Vec<_>>(),
        )
    };
    LISTS.iter().all(|(_, key)| match (list(one, key), list(other, key)) {
        (Some(one), Some(other)) => one.iter().any(|text| other.contains(text)),
        _ => true,
    })
}

fn pool(entry: &Field<'_>, prefix: &str, notes: &mut Vec<String>) -> Result<Table, ImportError> {
    let name = entry.get("resourceName").ok_or_else(|| entry.wrong("a `resourceName`"))?.text()?;
    let prefix = entry
        .get("resourcePrefix")
        .filter(Field::has_effect)
        .map_or(Ok(prefix), |prefix| prefix.text())?;
    let mut pool = resource(&format!("{prefix}/{name}"), "rdma");
    pool.set("contract", text("rdma-shared"));
    let most = entry
        .get("rdmaHcaMax")
        .ok_or_else(|| entry.wrong("`rdmaHcaMax`, the number of containers,"))?;
    let containers = most.number()?;
    if containers == 0 {
        return Err(most.wrong("a number of containers above 0"));
    }
    set_from(&mut pool, "pool", plain(containers), &most);
    let mut select = Table::default();
    let selectors = entry.get("selectors");
    if let Some(selectors) = selectors.as_ref().filter(|selectors| !selectors.is_map()) {
        return Err(selectors.wrong("a mapping"));
    }
    for (theirs, ours) in LISTS {
        let list = selectors
            .as_ref()
            .and_then(|selectors| selectors.get(theirs))
            .filter(Field::has_effect);
        if let Some(list) = list {
            set_from(&mut select, ours, texts(&ids::texts(&list, ours, notes)?), &list);
        }
    }
    match (entry.get("devices").filter(Field::has_effect), select.0.is_empty()) {
        (Some(interfaces), true) => {
            set_from(&mut select, "interface", texts(&interfaces.texts()?), &interfaces);
        }
        (Some(interfaces), false) => {
            return Err(interfaces.wrong("one of `devices` and `selectors`"));
        }
        // All adapters would be one pool. The plugin refuses to start in this case.
        (None, true) => return Err(entry.wrong("`selectors`, or `devices`,")),
        (None, false) => {}
    }
    set_table(&mut pool, "select", select);
    Ok(pool)
}
