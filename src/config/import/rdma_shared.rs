//! Mellanox' k8s-rdma-shared-dev-plugin: `config.json`, as its code parses it.

use super::super::tree::Table;
use super::doc::Field;
use super::{Draft, ImportError, plain, resource, set_table, text, texts};

pub(super) fn read(root: &Field<'_>, prefix: &str, draft: &mut Draft) -> Result<(), ImportError> {
    let list = root.get("configList").ok_or_else(|| root.wrong("a configuration with `configList`"))?;
    for entry in list.items()? {
        let name = entry.get("resourceName").ok_or_else(|| entry.wrong("a `resourceName`"))?.text()?;
        let prefix = entry.get("resourcePrefix").filter(Field::says_something).map_or(Ok(prefix), |prefix| prefix.text())?;
        let mut pool = resource(&format!("{prefix}/{name}"), "rdma");
        pool.set("contract", text("rdma-shared"));
        let most = entry.get("rdmaHcaMax").ok_or_else(|| entry.wrong("`rdmaHcaMax`, how many containers there may be"))?;
        pool.set("pool", plain(most.number()?));
        let mut select = Table::default();
        let selectors = entry.get("selectors");
        for (theirs, ours) in
            [("vendors", "vendor"), ("deviceIDs", "device"), ("drivers", "driver"), ("ifNames", "interface"), ("linkTypes", "link_type")]
        {
            let list = selectors.as_ref().and_then(|selectors| selectors.get(theirs)).filter(Field::says_something);
            if let Some(list) = list {
                select.set(ours, texts(&list.texts()?));
            }
        }
        if let Some(interfaces) = entry.get("devices").filter(Field::says_something) {
            if select.get("interface").is_some() {
                return Err(interfaces.wrong("one of `devices` and `selectors.ifNames`"));
            }
            select.set("interface", texts(&interfaces.texts()?));
        }
        set_table(&mut pool, "select", select);
        draft.resources.push(pool);
    }
    draft.no_equal(Some(root), &[("periodicUpdateInterval", "the kernel's events tell of adapters that come and go, at once")]);
    Ok(())
}
