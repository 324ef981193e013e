//! The claims that the kubelet knows, and their file `dra_manager_state`.

use crate::domain::{CheckpointClaimDevice, ClaimRef, DraName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

/// Below the kubelet's directory.
const FILE_NAME: &str = "dra_manager_state";

/// A claim in the kubelet's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClaimInfo {
    pub(super) claim: ClaimRef,
    pub(super) pods: BTreeSet<String>,
    /// The devices of each driver of the allocation.
    pub(super) drivers: BTreeMap<String, Vec<CheckpointClaimDevice>>,
    /// Known in memory only: a restart forgets it.
    pub(super) prepared: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: String,
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
struct Data {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "ClaimInfoStateList")]
    claims: Vec<State>,
}

#[derive(Serialize, Deserialize)]
struct State {
    #[serde(rename = "ClaimUID")]
    uid: String,
    #[serde(rename = "ClaimName")]
    name: String,
    #[serde(rename = "Namespace")]
    namespace: String,
    #[serde(rename = "PodUIDs")]
    pods: BTreeMap<String, Empty>,
    #[serde(rename = "DriverState")]
    drivers: BTreeMap<String, Devices>,
}

/// The value of an entry of a Go set.
#[derive(Serialize, Deserialize)]
struct Empty {}

#[derive(Serialize, Deserialize)]
struct Devices {
    /// `null` before the driver's answer.
    #[serde(rename = "Devices")]
    devices: Option<Vec<Device>>,
}

#[derive(Serialize, Deserialize)]
struct Device {
    #[serde(rename = "PoolName")]
    pool: String,
    #[serde(rename = "DeviceName")]
    device: String,
    #[serde(rename = "ShareID")]
    share_id: Option<String>,
    #[serde(rename = "RequestNames")]
    requests: Vec<String>,
    #[serde(rename = "CDIDeviceIDs")]
    cdi_devices: Vec<String>,
}

/// Replaces the file by rename.
pub(super) fn write<'a>(
    kubelet_dir: &Path,
    claims: impl Iterator<Item = &'a ClaimInfo>,
) -> io::Result<()> {
    let data = Data {
        kind: "DRACheckpoint".to_owned(),
        api_version: "checkpoint.dra.kubelet.k8s.io/v1".to_owned(),
        claims: claims.map(state).collect(),
    };
    let data = serde_json::to_string(&data)?;
    let checksum = crc32fast::hash(data.as_bytes());
    let temporary = kubelet_dir.join(format!(".{FILE_NAME}.tmp"));
    fs::write(&temporary, serde_json::to_vec(&Document { data, checksum })?)?;
    fs::rename(temporary, kubelet_dir.join(FILE_NAME))
}

/// Reads the file; no claims if there is none. The kubelet does not start with a damaged one.
pub(super) fn read(kubelet_dir: &Path) -> io::Result<Vec<ClaimInfo>> {
    let bytes = match fs::read(kubelet_dir.join(FILE_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        bytes => bytes?,
    };
    let Document { data, checksum } = serde_json::from_slice(&bytes)?;
    if crc32fast::hash(data.as_bytes()) != checksum {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "checkpoint is corrupted"));
    }
    let Data { claims, .. } = serde_json::from_str(&data)?;
    Ok(claims.into_iter().map(info).collect())
}

fn state(info: &ClaimInfo) -> State {
    let device = |device: &CheckpointClaimDevice| Device {
        pool: device.name.pool.clone(),
        device: device.name.device.clone(),
        share_id: device.share_id.clone(),
        requests: device.requests.clone(),
        cdi_devices: device.cdi_devices.clone(),
    };
    let devices = |devices: &[CheckpointClaimDevice]| Devices {
        devices: (!devices.is_empty()).then(|| devices.iter().map(device).collect()),
    };
    State {
        uid: info.claim.uid.clone(),
        name: info.claim.name.clone(),
        namespace: info.claim.namespace.clone(),
        pods: info.pods.iter().map(|pod| (pod.clone(), Empty {})).collect(),
        drivers: info.drivers.iter().map(|(name, of)| (name.clone(), devices(of))).collect(),
    }
}

fn info(state: State) -> ClaimInfo {
    let device = |device: Device| CheckpointClaimDevice {
        name: DraName { pool: device.pool, device: device.device },
        share_id: device.share_id,
        requests: device.requests,
        cdi_devices: device.cdi_devices,
    };
    let devices = |of: Devices| of.devices.into_iter().flatten().map(device).collect();
    ClaimInfo {
        claim: ClaimRef { uid: state.uid, namespace: state.namespace, name: state.name },
        pods: state.pods.into_keys().collect(),
        drivers: state.drivers.into_iter().map(|(name, of)| (name, devices(of))).collect(),
        prepared: false,
    }
}
