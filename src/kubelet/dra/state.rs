//! Reads `dra_manager_state`: the kubelet's own record of the claims that it has prepared, or is
//! about to prepare.
//!
//! The file is JSON with two fields: `Data`, which is JSON too, as a text, and `Checksum`, the
//! CRC-32 (IEEE) of that text. A kubelet does not start with another checksum. Unknown fields are
//! ignored.

use crate::domain::{
    CheckpointClaim, CheckpointClaimDevice, ClaimRef, DraName, KubeletClaim, KubeletClaims,
};
use crate::host::{self, read_bounded};
use crate::kubelet::checkpoint::{BYTES_MAX, kind};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// File name in the kubelet's directory.
pub const FILE_NAME: &str = "dra_manager_state";

/// The kind and the version of the data. Another version may have other fields, and their absence
/// would look like a node without claims.
const KIND: (&str, &str) = ("DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1");

/// Why the kubelet's record is not available. Only [`ClaimStateError::Absent`] means that there is
/// none; after the others nothing is known.
#[derive(Debug, thiserror::Error)]
pub enum ClaimStateError {
    /// There is no file: no kubelet with DRA has run on this node, or the file was lost.
    #[error("there is no record of claims `{}`", path.display())]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// It could not be read, or has more than [`BYTES_MAX`] bytes.
    #[error("cannot read the kubelet's record of claims `{}`: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is not what kubelets 1.32 to 1.37 write.
    #[error("the kubelet's record of claims `{}` is invalid: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason, without values of the file.
        why: String,
    },
    /// Its checksum is another one: it is damaged, and the kubelet will not start with it.
    #[error(
        "the kubelet's record of claims `{}` is damaged: its checksum is {stored:#x}, and that of its \
         content {computed:#x}",
        path.display()
    )]
    WrongChecksum {
        /// The file.
        path: PathBuf,
        /// The checksum in the file.
        stored: u32,
        /// The checksum of its data.
        computed: u32,
    },
}

impl ClaimStateError {
    /// Whether there is no record.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, ClaimStateError::Absent { .. })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: String,
    checksum: u32,
}

#[derive(Deserialize)]
struct Data {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    /// Null on a node without claims; every kubelet writes the key.
    #[serde(rename = "ClaimInfoStateList", deserialize_with = "Option::deserialize")]
    claims: Option<Vec<ClaimInfoState>>,
}

#[derive(Deserialize)]
struct ClaimInfoState {
    #[serde(rename = "ClaimUID")]
    uid: String,
    #[serde(rename = "ClaimName")]
    name: String,
    #[serde(rename = "Namespace")]
    namespace: String,
    #[serde(rename = "PodUIDs", default)]
    pods: Option<BTreeMap<String, IgnoredAny>>,
    /// Has each driver of the allocation from the beginning, and its devices after its answer.
    #[serde(rename = "DriverState", default)]
    drivers: Option<BTreeMap<String, DriverState>>,
}

#[derive(Deserialize)]
struct DriverState {
    #[serde(rename = "Devices", default)]
    devices: Option<Vec<Device>>,
}

#[derive(Deserialize)]
struct Device {
    #[serde(rename = "PoolName")]
    pool: String,
    #[serde(rename = "DeviceName")]
    device: String,
    /// Written by kubelet 1.35 and newer.
    #[serde(rename = "ShareID", default)]
    share_id: Option<String>,
    #[serde(rename = "RequestNames", default)]
    requests: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs", default)]
    cdi_devices: Option<Vec<String>>,
}

/// The claims with a device of `driver` in the kubelet's record, in its order. `root` is the
/// kubelet's directory.
///
/// # Errors
/// When there is no record, and when it cannot be read; see [`ClaimStateError`].
pub fn read_claims(root: &Path, driver: &str) -> Result<Vec<CheckpointClaim>, ClaimStateError> {
    let claims = read_all(root)?.into_iter();
    Ok(claims.filter_map(|claim| of_driver(claim, driver)).collect())
}

/// The number of claims of each driver in the kubelet's record.
///
/// # Errors
/// As [`read_claims`].
pub fn read_drivers(root: &Path) -> Result<BTreeMap<String, usize>, ClaimStateError> {
    let mut drivers = BTreeMap::new();
    let claims = read_all(root)?.into_iter().filter_map(|claim| claim.drivers);
    for driver in claims.flat_map(BTreeMap::into_keys) {
        *drivers.entry(driver).or_default() += 1;
    }
    Ok(drivers)
}

/// The claims with a device of `driver` in the content of a record.
#[cfg(any(test, fuzzing))]
pub(crate) fn claims_in(
    bytes: &[u8],
    driver: &str,
) -> Result<Vec<CheckpointClaim>, ClaimStateError> {
    let claims = parse(bytes, PathBuf::from(FILE_NAME))?.into_iter();
    Ok(claims.filter_map(|claim| of_driver(claim, driver)).collect())
}

/// The claims of all drivers.
fn read_all(root: &Path) -> Result<Vec<ClaimInfoState>, ClaimStateError> {
    let path = root.join(FILE_NAME);
    let bytes = match read_bounded(&path, BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ClaimStateError::Absent { path });
        }
        Err(source) => return Err(ClaimStateError::Unreadable { path, source }),
    };
    parse(&bytes, path)
}

/// The kubelet's record as evidence: its claims with a device of `driver`, and when it was read.
///
/// # Errors
/// As [`read_claims`].
pub fn read_record(root: &Path, driver: &str) -> Result<KubeletClaims, ClaimStateError> {
    // Before the content: what the kubelet writes from now on may be missing in it.
    let read_at = host::now();
    let claims = read_claims(root, driver)?.into_iter().map(KubeletClaim::from);
    let claims = claims.map(|kept| (kept.claim.uid.clone(), kept)).collect();
    Ok(KubeletClaims { claims, read_at })
}

fn parse(bytes: &[u8], path: PathBuf) -> Result<Vec<ClaimInfoState>, ClaimStateError> {
    let Document { data, checksum: stored } = match serde_json::from_slice(bytes) {
        Ok(document) => document,
        Err(error) => return Err(malformed(path, &error)),
    };
    let computed = crc32fast::hash(data.as_bytes());
    if computed != stored {
        return Err(ClaimStateError::WrongChecksum { path, stored, computed });
    }
    let Data { kind, api_version, claims } = match serde_json::from_slice(data.as_bytes()) {
        Ok(data) => data,
        Err(error) => return Err(malformed(path, &error)),
    };
    if (kind.as_str(), api_version.as_str()) != KIND {
        let why = format!("its kind or version is not {} of {}", KIND.0, KIND.1);
        return Err(ClaimStateError::Malformed { path, why });
    }
    Ok(claims.unwrap_or_default())
}

fn malformed(path: PathBuf, error: &serde_json::Error) -> ClaimStateError {
    let (kind, line, column) = (kind(error), error.line(), error.column());
    ClaimStateError::Malformed { path, why: format!("{kind} in line {line}, column {column}") }
}

/// `None` if the claim has no device of the driver.
fn of_driver(claim: ClaimInfoState, driver: &str) -> Option<CheckpointClaim> {
    let ClaimInfoState { uid, name, namespace, pods, drivers } = claim;
    let recorded = drivers?.remove(driver)?.devices.unwrap_or_default();
    let mut devices: Vec<CheckpointClaimDevice> = Vec::new();
    for device in recorded {
        let device = CheckpointClaimDevice {
            name: DraName { pool: device.pool, device: device.device },
            share_id: device.share_id,
            requests: device.requests.unwrap_or_default(),
            cdi_devices: device.cdi_devices.unwrap_or_default(),
        };
        // Kubelets up to 1.36 append the devices of each further answer.
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    Some(CheckpointClaim {
        claim: ClaimRef { uid, namespace, name },
        pods: pods.unwrap_or_default().into_keys().collect(),
        devices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DRA_DRIVER;
    use proptest::prelude::*;
    use std::fs::{self, File};

    /// In the field names and the order of kubelet 1.36: a prepared claim, one that is about to be
    /// prepared, and one of another driver.
    const GOLDEN: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"gpu\",\"Namespace\":\"team\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{},\"4f3c8cd1-7f8d-4b0e-9b9e-1f2a6d4a1c11\":{}},\"DriverState\":{\"holdfast.dev\":{\"Devices\":[{\"PoolName\":\"n1/gpu\",\"DeviceName\":\"gpu-5a7c\",\"ShareID\":null,\"RequestNames\":[\"gpu\"],\"CDIDeviceIDs\":[\"k8s.holdfast.dev/claim=u-gpu-5a7c\"]},{\"PoolName\":\"n1/gpu\",\"DeviceName\":\"gpu-6b1d\",\"ShareID\":\"s-1\",\"RequestNames\":[\"gpu\",\"all\"],\"CDIDeviceIDs\":null}]},\"other.example.com\":{\"Devices\":null}}},{\"ClaimUID\":\"u-2\",\"ClaimName\":\"nic\",\"Namespace\":\"team\",\"PodUIDs\":{\"p-2\":{}},\"DriverState\":{\"holdfast.dev\":{\"Devices\":null}}},{\"ClaimUID\":\"u-3\",\"ClaimName\":\"fpga\",\"Namespace\":\"team\",\"PodUIDs\":{\"p-3\":{}},\"DriverState\":{\"other.example.com\":{\"Devices\":[{\"PoolName\":\"n1\",\"DeviceName\":\"x\",\"RequestNames\":null,\"CDIDeviceIDs\":[\"a.b/c=d\"]}]}}}]}","Checksum":CHECKSUM}"#;

    fn golden() -> String {
        let data: serde_json::Value =
            serde_json::from_str(&GOLDEN.replace("CHECKSUM", "0")).unwrap();
        let checksum = crc32fast::hash(data["Data"].as_str().unwrap().as_bytes());
        GOLDEN.replace("CHECKSUM", &checksum.to_string())
    }

    /// A file with this data and its checksum.
    fn file_of(data: &str) -> String {
        let checksum = crc32fast::hash(data.as_bytes());
        serde_json::json!({ "Data": data, "Checksum": checksum }).to_string()
    }

    fn read(text: &str) -> Result<Vec<CheckpointClaim>, ClaimStateError> {
        claims_in(text.as_bytes(), DRA_DRIVER)
    }

    fn list(claims: &str) -> String {
        file_of(&format!(
            r#"{{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":{claims}}}"#
        ))
    }

    #[test]
    fn the_kubelets_record_has_our_claims_with_their_pods_and_devices() {
        let name = |device: &str| DraName { pool: "n1/gpu".into(), device: device.into() };
        let device = |device, share_id, requests: &[&str], cdi: &[&str]| CheckpointClaimDevice {
            name: name(device),
            share_id,
            requests: requests.iter().map(ToString::to_string).collect(),
            cdi_devices: cdi.iter().map(ToString::to_string).collect(),
        };
        let claim = |uid: &str, name: &str, pods: &[&str], devices| CheckpointClaim {
            claim: ClaimRef { uid: uid.into(), namespace: "team".into(), name: name.into() },
            pods: pods.iter().map(ToString::to_string).collect(),
            devices,
        };
        let pods = ["139cdb46-f989-4f17-9561-ca10cfb509a6", "4f3c8cd1-7f8d-4b0e-9b9e-1f2a6d4a1c11"];
        let devices = vec![
            device("gpu-5a7c", None, &["gpu"], &["k8s.holdfast.dev/claim=u-gpu-5a7c"]),
            device("gpu-6b1d", Some("s-1".into()), &["gpu", "all"], &[]),
        ];
        assert_eq!(
            read(&golden()).unwrap(),
            [
                claim("067798be-454e-4be4-9047-1aa06aea63f7", "gpu", &pods, devices),
                claim("u-2", "nic", &["p-2"], vec![]),
            ]
        );
    }

    #[test]
    fn the_record_has_the_time_of_the_read_and_a_device_of_each_request() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_record(dir.path(), DRA_DRIVER).unwrap_err().is_absent());
        let path = dir.path().join(FILE_NAME);
        fs::write(&path, golden()).unwrap();
        let before = host::now();
        let record = read_record(dir.path(), DRA_DRIVER).unwrap();
        assert!(before.boot <= record.read_at.boot && record.read_at.boot <= host::now().boot);
        assert_eq!(record.claims.len(), 2);
        assert!(record.claims["u-2"].devices.is_empty());
        let devices = &record.claims["067798be-454e-4be4-9047-1aa06aea63f7"].devices;
        let requests = devices.iter().map(|it| (it.request.as_str(), it.name.device.as_str()));
        let expected = [("gpu", "gpu-5a7c"), ("gpu", "gpu-6b1d"), ("all", "gpu-6b1d")];
        assert_eq!(requests.collect::<Vec<_>>(), expected);
        fs::write(&path, "{}").unwrap();
        assert!(!read_record(dir.path(), DRA_DRIVER).unwrap_err().is_absent());
    }

    /// The checksum that Go's `hash/crc32` computes for this text (its IEEE table).
    #[test]
    fn the_checksum_is_crc_32_ieee() {
        assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn absent_unreadable_damaged_and_malformed_are_different_results() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let read = || read_claims(dir.path(), DRA_DRIVER);
        let absent = read().unwrap_err();
        assert!(absent.is_absent(), "{absent}");

        fs::write(&path, golden()).unwrap();
        assert_eq!(read().unwrap().len(), 2);
        let drivers = read_drivers(dir.path()).unwrap();
        let counts = [(DRA_DRIVER.to_owned(), 2), ("other.example.com".to_owned(), 2)];
        assert_eq!(drivers, counts.into());
        fs::write(&path, golden().replace("gpu-5a7c", "gpu-5a7d")).unwrap();
        let damaged = read().unwrap_err();
        assert!(matches!(damaged, ClaimStateError::WrongChecksum { .. }), "{damaged}");
        assert!(!damaged.is_absent());
        assert!(read_drivers(dir.path()).is_err());

        File::create(&path).unwrap().set_len(BYTES_MAX + 1).unwrap();
        let large = read().unwrap_err();
        assert!(matches!(large, ClaimStateError::Unreadable { .. }), "{large}");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let directory = read().unwrap_err();
        assert!(matches!(directory, ClaimStateError::Unreadable { .. }), "{directory}");
        assert!(!directory.is_absent());
    }

    #[test]
    fn what_is_not_a_record_of_this_version_is_an_error_without_its_values() {
        let kind = |kind: &str, version: &str| {
            file_of(&format!(
                r#"{{"kind":"{kind}","apiVersion":"{version}","ClaimInfoStateList":[]}}"#
            ))
        };
        let without_list =
            file_of(r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1"}"#);
        for text in [
            "",
            "{}",
            "null",
            &golden()[..300],
            r#"{"Data":{},"Checksum":0}"#,
            r#"{"Data":"","Checksum":0}"#,
            &kind("DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v2"),
            &kind("Checkpoint", "checkpoint.dra.kubelet.k8s.io/v1"),
            &without_list,
            &list(r#"[{"ClaimUID":7}]"#),
            &list(r#"[{"ClaimUID":"hunter2"}]"#),
        ] {
            let error = read(text).unwrap_err();
            assert!(matches!(error, ClaimStateError::Malformed { .. }), "{text}: {error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_node_without_claims_has_an_empty_or_null_list() {
        assert_eq!(read(&list("null")).unwrap(), []);
        assert_eq!(read(&list("[]")).unwrap(), []);
    }

    #[test]
    fn fields_of_later_kubelets_are_ignored_and_devices_that_were_appended_twice_are_one() {
        let device = r#"{"PoolName":"p","DeviceName":"d","RequestNames":["r"],"CDIDeviceIDs":["a.b/c=d"],"New":[1]}"#;
        let claims = read(&list(&format!(
            r#"[{{"ClaimUID":"u","ClaimName":"c","Namespace":"n","New":{{}},"DriverState":{{"holdfast.dev":{{"New":1,"Devices":[{device},{device}]}}}}}}]"#
        )))
        .unwrap();
        assert_eq!((claims.len(), claims[0].devices.len(), claims[0].pods.len()), (1, 1, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn arbitrary_bytes_do_not_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), keeps_checksum in any::<bool>()) {
            let text = golden();
            let document: serde_json::Value = serde_json::from_str(&text).unwrap();
            let mut bytes = if keeps_checksum {
                document["Data"].as_str().unwrap().as_bytes().to_vec()
            } else {
                text.into_bytes()
            };
            for (at, byte) in flips {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let file = if keeps_checksum { file_of(&String::from_utf8_lossy(&bytes)).into_bytes() } else { bytes };
            drop(parse(&file, PathBuf::new()));
        }
    }
}
