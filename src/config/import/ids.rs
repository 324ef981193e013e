//! Ids and addresses of PCI devices, in the spelling of sysfs.
//!
//! Plugins compare texts exactly, so another spelling selects nothing there. Holdfast reads ids as
//! numbers. The user wants the device, so the import writes the id, with a warning.

use super::error::ImportError;
use super::field::Field;
use crate::domain::PciAddress;

/// The texts of a list, for our key of this name. `notes` gets a warning for each that the plugin
/// does not find.
pub(super) fn texts(
    list: &Field<'_>,
    key: &str,
    notes: &mut Vec<String>,
) -> Result<Vec<String>, ImportError> {
    let mut texts = Vec::new();
    for item in list.items()? {
        let text = item.text()?;
        let known = in_sysfs(key, text);
        if let Some(known) = known.as_ref().filter(|known| *known != text) {
            notes.push(format!(
                "{}: the plugin compares texts exactly, and selects nothing by `{text}`; Holdfast \
                 selects `{known}`",
                item.place()
            ));
        }
        texts.push(known.unwrap_or_else(|| text.to_owned()));
    }
    Ok(texts)
}

/// The id or address as sysfs has it; `None` for a list of other texts, and for a wrong one.
fn in_sysfs(key: &str, text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    match key {
        "vendor" | "device" => {
            let digits = lower.strip_prefix("0x").unwrap_or(&lower);
            let id = u16::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?;
            Some(format!("{id:04x}"))
        }
        "address" => Some(lower.parse::<PciAddress>().ok()?.to_string()),
        // Of virtual functions, with their numbers.
        "pf" => {
            let (address, numbers) = lower.split_at(lower.find('#').unwrap_or(lower.len()));
            Some(format!("{}{numbers}", address.parse::<PciAddress>().ok()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Imported, Peer, import};
    use super::in_sysfs;

    #[test]
    fn an_id_is_written_as_sysfs_has_it() {
        for (key, text, known) in [
            ("vendor", "0x8086", Some("8086")),
            ("device", "0X101E", Some("101e")),
            ("device", "19", Some("0019")),
            ("device", "+19", None),
            ("device", "ens1f0", None),
            ("address", "0000:1A:01.1", Some("0000:1a:01.1")),
            ("address", "1A:01.1", None),
            ("pf", "0000:1A:00.0#0-3,7", Some("0000:1a:00.0#0-3,7")),
            ("pf", "0000:1A:00.0", Some("0000:1a:00.0")),
            ("pf", "ens1f0#0", None),
            ("driver", "VFIO", None),
        ] {
            assert_eq!(in_sysfs(key, text).as_deref(), known, "{key} {text}");
        }
    }

    #[test]
    fn a_spelling_that_the_plugin_does_not_find_causes_a_warning() {
        let sriov = "{resourceList: [{resourceName: a, selectors: {vendors: ['0x8086'], \
                     devices: ['0X1889', '154c'], pciAddresses: ['0000:1A:01.1'], \
                     rootDevices: ['0000:1A:00.0#0']}}]}";
        let rdma =
            "{configList: [{resourceName: a, rdmaHcaMax: 5, selectors: {vendors: ['15B3']}}]}";
        for (peer, text, wanted, warnings) in [
            (
                Peer::Sriov,
                sriov,
                &["[\"8086\"]", "[\"1889\", \"154c\"]", "[\"0000:1a:01.1\"]", "00:1a:00.0#0"][..],
                &["`0x8086`", "`0X1889`", "`0000:1A:01.1`", "`0000:1A:00.0#0`"][..],
            ),
            (Peer::RdmaShared, rdma, &["[\"15b3\"]"], &["`15B3`"]),
        ] {
            let Imported { toml, warnings: found, wrong } = import(peer, text, None, None).unwrap();
            assert!(wanted.iter().all(|wanted| toml.contains(wanted)) && wrong == 0, "{toml}");
            assert_eq!(found.len(), warnings.len(), "{found:#?}");
            for (found, wanted) in found.iter().zip(warnings) {
                assert!(found.contains(wanted) && found.contains("selects nothing by"), "{found}");
            }
        }
    }
}
