//! KubeVirt's host devices: `permittedHostDevices` of a KubeVirt or HyperConverged object, as
//! virt-handler reads it.

use super::super::tree::{Is, Table, Value};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::generic::id_of;
use super::source::Source;
use super::values::{resource, set_from, set_table, text, texts};

/// Every key that is read.
pub(super) const KEYS: &[&str] = &[
    "permittedHostDevices",
    "permittedHostDevices.pciHostDevices",
    "permittedHostDevices.pciHostDevices[].pciVendorSelector",
    "permittedHostDevices.pciHostDevices[].pciDeviceSelector",
    "permittedHostDevices.pciHostDevices[].resourceName",
    "permittedHostDevices.pciHostDevices[].externalResourceProvider",
    "permittedHostDevices.pciHostDevices[].disabled",
    "permittedHostDevices.mediatedDevices",
    "permittedHostDevices.mediatedDevices[].mdevNameSelector",
    "permittedHostDevices.mediatedDevices[].resourceName",
    "permittedHostDevices.mediatedDevices[].externalResourceProvider",
    "permittedHostDevices.mediatedDevices[].disabled",
    "permittedHostDevices.usb",
    "permittedHostDevices.usbHostDevices",
    "permittedHostDevices.usb[].selectors.vendor",
    "permittedHostDevices.usb[].selectors.product",
    "permittedHostDevices.usb[].resourceName",
    "permittedHostDevices.usb[].externalResourceProvider",
    "permittedHostDevices.usb[].disabled",
    "mediatedDevicesConfiguration",
];

/// The driver that virt-handler requires of a function.
const DRIVER: &str = "vfio-pci";

/// The devices of one kind under one name. Several entries may have the same name.
struct Offered<'a> {
    name: &'a str,
    entries: Vec<(Field<'a>, Table)>,
}

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let Some(file) = &source.file else {
        return Err(ImportError::new(
            "the manifest has a container of KubeVirt, but no KubeVirt or HyperConverged object; \
             add it after a line `---`",
        ));
    };
    let root = Field::root(file, Decoder::Yaml);
    let permitted = root.get("permittedHostDevices");
    let permitted = permitted.unwrap_or_else(|| root.clone());
    let is_ours = |key: &str| permitted.get(key).filter(Field::has_effect);
    let usb = || is_ours("usb").or_else(|| is_ours("usbHostDevices"));
    let (mut is_any, mut is_internal) = (false, false);
    for (list, class, of) in [
        (is_ours("pciHostDevices"), "pci", pci as Reader<'_>),
        (is_ours("mediatedDevices"), "pci", mdev as Reader<'_>),
        (usb(), "char", usb_device as Reader<'_>),
    ] {
        let Some(list) = list else { continue };
        is_any = true;
        for Offered { name, entries } in each(&list, of, &mut is_internal, draft)? {
            offer(name, class, entries, draft);
        }
    }
    if !is_any {
        return Err(permitted.wrong("`permittedHostDevices` with a list of devices"));
    }
    draft.no_equivalent(
        root.get("mediatedDevicesConfiguration"),
        "virt-handler still makes the mediated devices",
    );
    if is_internal {
        draft.warn(
            "set `externalResourceProvider: true` for each of these devices in KubeVirt, or \
             virt-handler registers the same resources",
        );
    }
    draft.warn("device ids change: drain the node first");
    draft.unknown(&permitted, KEYS);
    Ok(())
}

type Reader<'a> = fn(&Field<'a>) -> Result<Result<Table, String>, ImportError>;

/// The entries of a list, by name, in their order.
fn each<'a>(
    list: &Field<'a>,
    of: Reader<'a>,
    is_internal: &mut bool,
    draft: &mut Draft,
) -> Result<Vec<Offered<'a>>, ImportError> {
    let mut all: Vec<Offered<'a>> = Vec::new();
    for entry in list.items()? {
        let read = || {
            let name = entry.get("resourceName").ok_or_else(|| entry.wrong("a `resourceName`"))?;
            let truth = |key: &str| entry.get(key).map_or(Ok(false), |value| value.truth());
            let (external, disabled) = (truth("externalResourceProvider")?, truth("disabled")?);
            Ok((name.text()?, external, disabled, of(&entry)?))
        };
        match read() {
            Ok((name, _, true, _)) => {
                entry.read_all();
                draft.warn(format!("{} is left out: it is disabled", entry.place_of(name)));
            }
            Ok((name, _, _, Err(why))) => {
                entry.read_all();
                draft.warn(format!("{} is left out: {why}", entry.place_of(name)));
            }
            Ok((name, external, _, Ok(table))) => {
                *is_internal |= !external;
                match all.iter_mut().find(|offered| offered.name == name) {
                    Some(offered) => offered.entries.push((entry, table)),
                    None => all.push(Offered { name, entries: vec![(entry, table)] }),
                }
            }
            Err(error) => {
                entry.read_all();
                draft.wrong(&entry.place(), &error);
            }
        }
    }
    Ok(all)
}

/// One resource of all entries with its name.
fn offer(name: &str, class: &str, entries: Vec<(Field<'_>, Table)>, draft: &mut Draft) {
    let Some((at, _)) = entries.first() else { return };
    let at = at.clone();
    let mut offered = resource(name, class);
    offered.set("contract", text("kubevirt"));
    let mut tables = entries.into_iter().map(|(_, table)| table);
    let list = |tables: Vec<Table>| {
        let value = |table| Value { place: None, is: Is::Table(table) };
        Is::List(tables.into_iter().map(value).collect())
    };
    if class == "char" {
        offered.set("paths", list(tables.collect()));
    } else {
        set_table(&mut offered, "select", tables.next().unwrap_or_default());
        let or: Vec<Table> = tables.collect();
        if !or.is_empty() {
            offered.set("or", list(or));
        }
    }
    draft.offer(offered, &at);
}

fn pci(entry: &Field<'_>) -> Result<Result<Table, String>, ImportError> {
    let ids = entry.get("pciVendorSelector").or_else(|| entry.get("pciDeviceSelector"));
    let ids = ids.ok_or_else(|| entry.wrong("a `pciVendorSelector`"))?;
    let is_id = |id: &str| id.len() == 4 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let (vendor, device) = ids
        .text()?
        .split_once(':')
        .filter(|(vendor, device)| is_id(vendor) && is_id(device))
        .ok_or_else(|| ids.wrong("vendor and device, such as 10DE:1EB8,"))?;
    let mut select = Table::default();
    set_from(&mut select, "vendor", texts(&[vendor.to_ascii_lowercase()]), &ids);
    set_from(&mut select, "device", texts(&[device.to_ascii_lowercase()]), &ids);
    select.set("driver", texts(&[DRIVER]));
    Ok(Ok(select))
}

fn mdev(entry: &Field<'_>) -> Result<Result<Table, String>, ImportError> {
    let of = entry.get("mdevNameSelector").ok_or_else(|| entry.wrong("a `mdevNameSelector`"))?;
    let name = of.text()?;
    // virt-handler reads a space in the name of a type as `_`.
    let mut names = vec![name.to_owned()];
    names.extend(name.contains('_').then(|| name.replace('_', " ")));
    let mut select = Table::default();
    set_from(&mut select, "mdev_type", texts(&names), &of);
    Ok(Ok(select))
}

fn usb_device(entry: &Field<'_>) -> Result<Result<Table, String>, ImportError> {
    let wanted = "`selectors` with a `vendor` and a `product`";
    let selectors = entry.get("selectors").ok_or_else(|| entry.wrong(wanted))?;
    let each = selectors.items()?;
    let [one] = each.as_slice() else {
        let several = "KubeVirt gives the USB devices of all its selectors to a guest as one \
                       device, and Holdfast offers each alone";
        return if each.is_empty() {
            Err(selectors.wrong(wanted))
        } else {
            Ok(Err(several.into()))
        };
    };
    let mut usb = Table::default();
    for key in ["vendor", "product"] {
        let id = one.get(key).ok_or_else(|| one.wrong("a `vendor` and a `product`"))?;
        usb.set(key, text(id_of(&id)?));
    }
    let mut table = Table::default();
    table.set("usb", Is::Table(usb));
    Ok(Ok(table))
}
