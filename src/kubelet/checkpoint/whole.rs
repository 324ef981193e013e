//! The whole checkpoint: the answers of every plugin, and the ids that each resource has.

use super::{CheckpointError, PodDeviceEntry, alloc_id, kept, of_other, open};
use crate::domain::{CheckpointGrant, DeviceId, ResourceName};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What the kubelet's checkpoint contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WholeCheckpoint {
    /// Every answer of ours.
    pub ours: Vec<CheckpointGrant>,
    /// Every answer of another plugin.
    pub others: Vec<CheckpointGrant>,
    /// The healthy ids of each resource at the kubelet's last write (`RegisteredDevices`).
    pub registered: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: Data,
    /// Every kubelet writes it, so a file without it is damaged. Its value cannot be verified: it
    /// is a hash over a dump of Go values.
    #[expect(dead_code, reason = "only its presence and its type are checked")]
    checksum: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    #[serde(deserialize_with = "Option::deserialize")]
    pod_device_entries: Option<Vec<PodDeviceEntry>>,
    #[serde(deserialize_with = "Option::deserialize")]
    registered_devices: Option<BTreeMap<String, Option<BTreeSet<DeviceId>>>>,
}

/// Reads the whole checkpoint in the device-plugin directory.
///
/// # Errors
/// When it is missing, unreadable or not the JSON that kubelets write. Then nothing is known.
pub fn read_whole_checkpoint(device_plugin_dir: &Path) -> Result<WholeCheckpoint, CheckpointError> {
    parse(&open(device_plugin_dir)?.read()?)
}

pub(crate) fn parse(bytes: &[u8]) -> Result<WholeCheckpoint, CheckpointError> {
    let Document { data, .. } =
        serde_json::from_slice(bytes).map_err(CheckpointError::Malformed)?;
    let mut whole = WholeCheckpoint::default();
    for entry in data.pod_device_entries.into_iter().flatten() {
        if entry.alloc_resp.as_deref().and_then(alloc_id).is_some() {
            whole.ours.extend(kept(entry));
        } else {
            whole.others.extend(of_other(entry));
        }
    }
    // The kubelet registers no invalid name.
    whole.registered = data
        .registered_devices
        .into_iter()
        .flatten()
        .filter_map(|(name, ids)| Some((name.parse().ok()?, ids.unwrap_or_default())))
        .collect();
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(
        entries: &str,
        registered: &str,
        checksum: &str,
    ) -> Result<WholeCheckpoint, CheckpointError> {
        let text = format!(
            r#"{{"Data":{{"PodDeviceEntries":{entries},"RegisteredDevices":{registered}}},"Checksum":{checksum}}}"#
        );
        parse(text.as_bytes())
    }

    #[test]
    fn the_ids_of_each_resource_are_read_with_the_answers_of_other_plugins() {
        let entry = r#"[{"PodUID":"u","ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{"0":["x"]},"AllocResp":""}]"#;
        let whole = of(entry, r#"{"a.b/c":["x","y"],"nonsense":["z"],"a.b/d":null}"#, "7").unwrap();
        assert_eq!((whole.ours.len(), whole.others.len()), (0, 1));
        assert_eq!(whole.others[0].devices.keys().map(DeviceId::as_str).collect::<Vec<_>>(), ["x"]);
        let ids = |name: &str| whole.registered[&name.parse().unwrap()].len();
        assert_eq!((ids("a.b/c"), ids("a.b/d"), whole.registered.len()), (2, 0, 2));
    }

    #[test]
    fn a_file_that_lacks_a_part_is_damaged() {
        assert_eq!(of("null", "null", "1").unwrap(), WholeCheckpoint::default());
        for (entries, registered, checksum) in [
            ("null", "null", "\"1\""),
            ("null", "null", "-1"),
            ("7", "{}", "1"),
            ("null", "[]", "1"),
        ] {
            assert!(
                of(entries, registered, checksum).is_err(),
                "{entries} {registered} {checksum}"
            );
        }
        for text in [
            r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}}}"#,
            r#"{"Data":{"PodDeviceEntries":null},"Checksum":1}"#,
            r#"{"Data":{"RegisteredDevices":{}},"Checksum":1}"#,
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
