//! `kubelet_internal_checkpoint`: the device manager's state across a restart, in the kubelet's
//! format.

use super::super::environment::Snapshot;
use super::super::held::{Held, PodDevices};
use super::wire;
use crate::domain::{DeviceId, ResourceName};
use crate::kubelet::proto::v1beta1::ContainerAllocateResponse;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The file's name below the device-plugin directory.
pub(in super::super) const FILE_NAME: &str = "kubelet_internal_checkpoint";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: Data,
    /// The real kubelet hashes a dump of the Go values. Readers must not depend on it, and this one
    /// does not check it.
    #[serde(default)]
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// `null` when nothing is held.
    pod_device_entries: Option<Vec<PodDeviceEntry>>,
    registered_devices: Option<BTreeMap<ResourceName, BTreeSet<DeviceId>>>,
}

#[derive(Serialize, Deserialize)]
struct PodDeviceEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ContainerName")]
    container: String,
    #[serde(rename = "ResourceName")]
    resource: ResourceName,
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<i64, Vec<DeviceId>>,
    #[serde(rename = "AllocResp")]
    alloc_resp: String,
}

/// The content of the file for this snapshot.
pub(super) fn encode(snapshot: &Snapshot) -> Result<Vec<u8>, serde_json::Error> {
    let entry =
        |(pod_uid, container, resource, held): (&str, &str, &ResourceName, &Held)| PodDeviceEntry {
            pod_uid: pod_uid.to_owned(),
            container: container.to_owned(),
            resource: resource.clone(),
            device_ids: held.by_numa.clone(),
            alloc_resp: STANDARD.encode(wire::response(&held.edits).encode_to_vec()),
        };
    let entries: Vec<PodDeviceEntry> = snapshot.held.iter().map(entry).collect();
    let data = Data {
        pod_device_entries: (!entries.is_empty()).then_some(entries),
        registered_devices: Some(snapshot.healthy.clone()),
    };
    let checksum = u64::from(crc32fast::hash(&serde_json::to_vec(&data)?));
    serde_json::to_vec(&Document { data, checksum })
}

/// Reads a checkpoint. Entries with a broken response are left out.
pub(super) fn decode(bytes: &[u8]) -> Result<Snapshot, serde_json::Error> {
    let document: Document = serde_json::from_slice(bytes)?;
    let mut held = PodDevices::default();
    for entry in document.data.pod_device_entries.unwrap_or_default() {
        let response = STANDARD
            .decode(&entry.alloc_resp)
            .ok()
            .and_then(|bytes| ContainerAllocateResponse::decode(&*bytes).ok());
        if let Some(response) = response {
            let edits = wire::edits(response);
            held.insert(
                &entry.pod_uid,
                &entry.container,
                &entry.resource,
                Held { by_numa: entry.device_ids, edits },
            );
        }
    }
    Ok(Snapshot { held, healthy: document.data.registered_devices.unwrap_or_default() })
}
