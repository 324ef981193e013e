//! Reads `kubelet_internal_checkpoint`: the kubelet's own record of the ids of each container.
//!
//! The file is advisory. Its checksum cannot be computed outside Go (FNV over a Go dump of the
//! value) and is ignored, as are unknown fields. Entries of removed pods stay until the next write.
//! The file is valuable because it contains our own response, with the annotation that carries the
//! alloc-id.

mod reader;
mod whole;

pub use reader::{CheckpointReader, CheckpointUnread};
#[cfg(any(test, fuzzing))]
pub(crate) use whole::parse as parse_whole;
pub use whole::{WholeCheckpoint, read_whole_checkpoint};

use super::api;
use super::proto::v1beta1::ContainerAllocateResponse;
use crate::domain::{
    AllocId, Checkpoint, CheckpointEntry, CheckpointGrant, ContainerEdits, DeviceId, ResourceName,
    Timestamp,
};
use crate::host::{open_to_read, read_whole};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// File name in the device-plugin directory.
pub const FILE_NAME: &str = "kubelet_internal_checkpoint";
/// A larger file is not read. 250 pods with 64 devices and 20 KiB of response each make about 7
/// MiB.
pub const BYTES_MAX: u64 = 32 * 1024 * 1024;

/// Why the checkpoint is not available.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It could not be read; `NotFound` on a node where no device was ever allocated.
    #[error("failed to read the kubelet's checkpoint `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is larger than any kubelet writes.
    #[error("the kubelet's checkpoint `{}` has more than {BYTES_MAX} bytes and is not read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is not the JSON that kubelets 1.20 to 1.36 write.
    #[error("the kubelet's checkpoint is invalid: {} in line {}, column {}", kind(.0), .0.line(), .0.column())]
    Malformed(serde_json::Error),
}

impl CheckpointError {
    /// Whether there is no checkpoint.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, CheckpointError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// The kind of the error, without values of the file: they may be secrets of a container.
pub(super) fn kind(error: &serde_json::Error) -> &'static str {
    match error.classify() {
        Category::Eof => "it is truncated,",
        Category::Data => "it has an unknown structure,",
        Category::Syntax | Category::Io => "it is not JSON,",
    }
}

/// The file, with the used part of each entry: it may have 100,000 entries, each with an answer.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", bound = "T: Deserialize<'de>")]
struct Document<T> {
    data: Data<T>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", bound = "T: Deserialize<'de>")]
struct Data<T> {
    /// Null on a node without device pods; every kubelet writes the key. A file without it is not
    /// taken to mean that there are no entries.
    #[serde(deserialize_with = "Option::deserialize")]
    pod_device_entries: Option<Vec<T>>,
}

/// An entry of any plugin; `None` for an invalid resource name. No kubelet accepts one, so it is
/// not ours.
#[derive(Deserialize)]
#[serde(from = "PodDeviceEntry")]
struct Any(Option<CheckpointEntry>);

/// An entry with our answer.
#[derive(Deserialize)]
#[serde(from = "PodDeviceEntry")]
struct Ours(Option<CheckpointGrant>);

/// An entry with another plugin's answer.
#[derive(Deserialize)]
#[serde(from = "PodDeviceEntry")]
struct OfOthers(Option<CheckpointGrant>);

#[derive(Deserialize)]
struct PodDeviceEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ContainerName")]
    container_name: String,
    #[serde(rename = "ResourceName")]
    resource_name: String,
    /// By NUMA node, `-1` for none. An id near two nodes is listed under both.
    #[serde(rename = "DeviceIDs", default)]
    device_ids: Option<BTreeMap<String, Option<BTreeSet<DeviceId>>>>,
    /// Base64 of the protobuf message.
    #[serde(rename = "AllocResp", default)]
    alloc_resp: Option<String>,
}

/// Reads the checkpoint in the device-plugin directory.
///
/// # Errors
/// When it is missing, unreadable or malformed. Then the grants are unknown, and no conclusion may
/// be drawn from it.
pub fn read(device_plugin_dir: &Path) -> Result<Checkpoint, CheckpointError> {
    let opened = open(device_plugin_dir)?;
    let written_at = opened.written_at();
    parse(&opened.read()?, written_at)
}

/// Reads every answer of ours in the checkpoint: the source to rebuild a ledger that lost both
/// copies.
///
/// # Errors
/// As [`read`].
pub fn read_kept(device_plugin_dir: &Path) -> Result<Vec<CheckpointGrant>, CheckpointError> {
    let entries: Vec<Ours> = entries(&open(device_plugin_dir)?.read()?)?;
    Ok(entries.into_iter().filter_map(|Ours(kept)| kept).collect())
}

/// Reads every answer of another plugin in the checkpoint: the holders on a node that used one
/// before.
///
/// # Errors
/// As [`read`].
pub fn read_others(device_plugin_dir: &Path) -> Result<Vec<CheckpointGrant>, CheckpointError> {
    let entries: Vec<OfOthers> = entries(&open(device_plugin_dir)?.read()?)?;
    Ok(entries.into_iter().filter_map(|OfOthers(kept)| kept).collect())
}

/// The open file. The kubelet replaces it by rename, and the times must be those of the bytes that
/// are read.
struct Opened {
    path: PathBuf,
    file: File,
    metadata: Metadata,
}

fn open(device_plugin_dir: &Path) -> Result<Opened, CheckpointError> {
    let path = device_plugin_dir.join(FILE_NAME);
    match open_to_read(&path).and_then(|file| Ok((file.metadata()?, file))) {
        Ok((metadata, file)) => Ok(Opened { path, file, metadata }),
        Err(source) => Err(CheckpointError::Io { path, source }),
    }
}

impl Opened {
    fn written_at(&self) -> Timestamp {
        Timestamp::from_system(self.metadata.modified().unwrap_or(UNIX_EPOCH))
    }

    fn read(self) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path;
        read_whole(self.file, BYTES_MAX).map_err(|source| match source.kind() {
            io::ErrorKind::FileTooLarge => CheckpointError::TooLarge { path },
            _ => CheckpointError::Io { path, source },
        })
    }
}

fn entries<T: DeserializeOwned>(bytes: &[u8]) -> Result<Vec<T>, CheckpointError> {
    let document: Document<T> =
        serde_json::from_slice(bytes).map_err(CheckpointError::Malformed)?;
    Ok(document.data.pod_device_entries.unwrap_or_default())
}

/// Parses the file's bytes.
///
/// # Errors
/// When they are not the JSON that the kubelet writes.
pub fn parse(bytes: &[u8], written_at: Timestamp) -> Result<Checkpoint, CheckpointError> {
    let entries: Vec<Any> = entries(bytes)?;
    Ok(Checkpoint::new(entries.into_iter().filter_map(|Any(entry)| entry).collect(), written_at))
}

impl From<PodDeviceEntry> for Any {
    fn from(entry: PodDeviceEntry) -> Self {
        let resource = entry.resource_name.parse().ok();
        Any(resource.map(|resource| CheckpointEntry {
            resource,
            pod_uid: entry.pod_uid,
            container: entry.container_name,
            device_ids: entry
                .device_ids
                .into_iter()
                .flatten()
                .filter_map(|(_, ids)| ids)
                .flatten()
                .collect(),
            alloc_id: entry.alloc_resp.as_deref().and_then(alloc_id),
        }))
    }
}

impl From<PodDeviceEntry> for Ours {
    fn from(entry: PodDeviceEntry) -> Self {
        Ours(kept(entry))
    }
}

impl From<PodDeviceEntry> for OfOthers {
    fn from(entry: PodDeviceEntry) -> Self {
        OfOthers(of_other(entry))
    }
}

fn kept(entry: PodDeviceEntry) -> Option<CheckpointGrant> {
    let response = response(entry.alloc_resp.as_deref()?)?;
    let alloc_id = response.annotations.get(AllocId::ANNOTATION).map(AllocId::new)?;
    let resource = entry.resource_name.parse().ok()?;
    Some(grant_with(entry, resource, alloc_id, api::v1beta1::edits(response)))
}

/// One entry with another plugin's answer. Some checkpoints have no answer; one that cannot be
/// decoded counts as empty.
fn of_other(entry: PodDeviceEntry) -> Option<CheckpointGrant> {
    let resource: ResourceName = entry.resource_name.parse().ok()?;
    let response = entry.alloc_resp.as_deref().and_then(response).unwrap_or_default();
    if response.annotations.contains_key(AllocId::ANNOTATION) {
        return None;
    }
    let alloc_id = AllocId::of_other_plugin(&entry.pod_uid, &entry.container_name, &resource);
    Some(grant_with(entry, resource, alloc_id, api::v1beta1::edits(response)))
}

fn grant_with(
    entry: PodDeviceEntry,
    resource: ResourceName,
    alloc_id: AllocId,
    edits: ContainerEdits,
) -> CheckpointGrant {
    let mut devices: BTreeMap<DeviceId, Vec<u32>> = BTreeMap::new();
    for (node, ids) in entry.device_ids.into_iter().flatten() {
        for id in ids.into_iter().flatten() {
            devices.entry(id).or_default().extend(node.parse::<u32>().ok());
        }
    }
    CheckpointGrant {
        alloc_id,
        pod_uid: entry.pod_uid,
        container: entry.container_name,
        resource,
        devices,
        edits,
    }
}

/// Our annotation in a stored response.
fn alloc_id(text: &str) -> Option<AllocId> {
    response(text)?.annotations.remove(AllocId::ANNOTATION).map(AllocId::new)
}

/// A stored response. One that cannot be decoded is not ours.
fn response(text: &str) -> Option<ContainerAllocateResponse> {
    let bytes = STANDARD.decode(text).ok()?;
    ContainerAllocateResponse::decode(bytes.as_slice()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ContainerEdits, EditDevice, EditMount};
    use proptest::prelude::*;

    /// As a kubelet 1.36 wrote it for a static pod with two devices of another plugin.
    const REAL: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"6c66f772555a04be4eb20709fe93c16a","ContainerName":"main","ResourceName":"example.com/foo","DeviceIDs":{"-1":["d0","d1"]},"AllocResp":"CgsKBlJJR19kMRIBMQoLCgZSSUdfZDASATEaHAoLL2Rldi9mb28tZDESCS9kZXYvemVybxoCcncaHAoLL2Rldi9mb28tZDASCS9kZXYvemVybxoCcnc="}],"RegisteredDevices":{"example.com/foo":["d0","d1"]}},"Checksum":2706400148}"#;

    fn ids(ids: &[&str]) -> BTreeSet<DeviceId> {
        ids.iter().map(|id| DeviceId::new(*id)).collect()
    }

    fn of(entries: &str) -> Result<Checkpoint, CheckpointError> {
        parse(format!(r#"{{"Data":{{"PodDeviceEntries":{entries},"RegisteredDevices":{{}}}},"Checksum":1}}"#).as_bytes(), Timestamp(7))
    }

    #[test]
    fn a_real_checkpoint_is_read() {
        let checkpoint = parse(REAL.as_bytes(), Timestamp(7)).unwrap();
        let entry = CheckpointEntry {
            pod_uid: "6c66f772555a04be4eb20709fe93c16a".into(),
            container: "main".into(),
            resource: "example.com/foo".parse().unwrap(),
            device_ids: ids(&["d0", "d1"]),
            alloc_id: None,
        };
        assert_eq!(checkpoint, Checkpoint::new(vec![entry], Timestamp(7)));
    }

    #[test]
    fn the_alloc_id_is_found_in_the_stored_response() {
        let annotations = BTreeMap::from([(AllocId::ANNOTATION.to_owned(), "alloc-7".to_owned())]);
        let response =
            ContainerAllocateResponse { annotations, ..ContainerAllocateResponse::default() };
        let base64 = STANDARD.encode(response.encode_to_vec());
        let json = format!(
            r#"[{{"PodUID":"u","ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{{"0":["x"]}},"AllocResp":"{base64}"}}]"#
        );
        assert_eq!(of(&json).unwrap().entries()[0].alloc_id, Some(AllocId::new("alloc-7")));
    }

    #[test]
    fn a_stored_response_is_read_unchanged() {
        let edits = ContainerEdits {
            envs: BTreeMap::from([("GPU".to_owned(), "0".to_owned())]),
            mounts: vec![EditMount { host: "/a".into(), container: "/b".into(), read_only: true }],
            devices: vec![EditDevice {
                host: "/dev/a".into(),
                container: "/dev/b".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([(AllocId::ANNOTATION.to_owned(), "alloc-7".to_owned())]),
            cdi_devices: vec!["vendor.com/gpu=0".into()],
        };
        let ours = STANDARD.encode(api::v1beta1::response(edits.clone()).encode_to_vec());
        let json = format!(
            r#"{{"Data":{{"PodDeviceEntries":[
                {{"PodUID":"u","ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{{"0":["x"],"1":["x"],"-1":["y"]}},"AllocResp":"{ours}"}},
                {{"PodUID":"v","ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{{"0":["z"]}},"AllocResp":""}}],
              "RegisteredDevices":{{}}}},"Checksum":1}}"#
        );
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE_NAME), json).unwrap();
        let grant = CheckpointGrant {
            alloc_id: AllocId::new("alloc-7"),
            pod_uid: "u".into(),
            container: "c".into(),
            resource: "a.b/c".parse().unwrap(),
            devices: BTreeMap::from([
                (DeviceId::new("x"), vec![0, 1]),
                (DeviceId::new("y"), vec![]),
            ]),
            edits,
        };
        assert_eq!(
            read_kept(dir.path()).unwrap(),
            [grant],
            "and another plugin's answer is left alone"
        );
    }

    #[test]
    fn a_node_without_device_pods_has_null_entries() {
        assert_eq!(of("null").unwrap().entries(), []);
    }

    #[test]
    fn an_id_near_two_numa_nodes_is_one_id() {
        let json = r#"[{"PodUID":"u","ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{"0":["x","y"],"1":["x"],"2":null},"AllocResp":""}]"#;
        assert_eq!(of(json).unwrap().entries()[0].device_ids, ids(&["x", "y"]));
    }

    #[test]
    fn fields_of_later_kubelets_are_skipped_and_missing_ones_are_empty() {
        let json = r#"[{"PodUID":"u","ContainerName":"c","ResourceName":"a.b/c","New":{"deep":[1]}},{"PodUID":"v","ContainerName":"c","ResourceName":"nonsense"}]"#;
        let checkpoint = of(json).unwrap();
        let entries = checkpoint.entries();
        assert_eq!(entries.len(), 1);
        assert!(entries[0].device_ids.is_empty() && entries[0].alloc_id.is_none());
    }

    #[test]
    fn a_response_that_cannot_be_decoded_has_no_alloc_id() {
        for response in ["%%%", "/////w==", "CgsKBlJJR19k"] {
            let json = format!(
                r#"[{{"PodUID":"u","ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{{}},"AllocResp":"{response}"}}]"#
            );
            assert_eq!(of(&json).unwrap().entries()[0].alloc_id, None, "{response}");
        }
    }

    #[test]
    fn what_is_not_a_checkpoint_is_an_error() {
        let another =
            r#"{"Data":{"Entries":[{"PodUID":"u"}],"RegisteredDevices":{}},"Checksum":1}"#;
        for text in
            ["", "{}", "null", "[]", r#"{"Data":7}"#, r#"{"Data":{}}"#, another, &REAL[..200]]
        {
            assert!(parse(text.as_bytes(), Timestamp(0)).is_err(), "{text}");
        }
    }

    #[test]
    fn it_is_read_with_its_modification_time_and_up_to_the_size_limit() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path()), Err(CheckpointError::Io { .. })));
        std::fs::write(dir.path().join(FILE_NAME), REAL).unwrap();
        let modified = std::fs::metadata(dir.path().join(FILE_NAME)).unwrap().modified().unwrap();
        assert_eq!(read(dir.path()).unwrap().written_at(), Timestamp::from_system(modified));
        File::create(dir.path().join(FILE_NAME)).unwrap().set_len(BYTES_MAX + 1).unwrap();
        assert!(matches!(read(dir.path()), Err(CheckpointError::TooLarge { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn arbitrary_bytes_do_not_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), cut in any::<prop::sample::Index>(), whole in any::<bool>()) {
            let mut bytes = REAL.as_bytes().to_vec();
            for (at, byte) in flips {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if !whole { bytes.truncate(cut.index(bytes.len())); }
            drop(parse(&bytes, Timestamp(0)));
        }

        #[test]
        fn arbitrary_stored_responses_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(alloc_id(&STANDARD.encode(bytes)));
        }
    }
}
