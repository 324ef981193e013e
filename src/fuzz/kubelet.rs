//! The kubelet's own files.

use super::Seeds;
use super::device_plugin::sample_edits;
use super::input::Input;
use crate::domain::{DRA_DRIVER, ResourceName, Timestamp};
use crate::kubelet::api::v1beta1;
use crate::kubelet::checkpoint::{parse, parse_whole};
use crate::kubelet::dra::state;
use crate::kubelet::proto::v1beta1 as api_beta;
use prost::Message as _;
use serde_json::Value;
use std::collections::BTreeSet;

/// A prefix of a longer file is not tried at every length.
const CUTS_MAX: usize = 64;

/// `kubelet_internal_checkpoint`: a file that is read has every entry of its JSON, and a part of
/// such a file is an error.
pub fn checkpoint(data: &[u8]) {
    let read = parse(data, Timestamp(7));
    let whole = parse_whole(data);
    let Ok(checkpoint) = read else {
        assert!(whole.is_err(), "both readers refuse the same files");
        return;
    };
    // A field that is not read may have what this reader refuses: a number without bounds.
    let Ok(file) = serde_json::from_slice::<Value>(data) else { return };
    let entries = file["Data"]["PodDeviceEntries"].as_array().cloned().unwrap_or_default();
    let is_name = |entry: &&Value| {
        entry["ResourceName"].as_str().is_some_and(|name| name.parse::<ResourceName>().is_ok())
    };
    let mut wanted: Vec<&str> =
        entries.iter().filter(is_name).map(|entry| text(&entry["PodUID"])).collect();
    wanted.sort_unstable();
    let found: Vec<&str> = checkpoint.entries().iter().map(|it| it.pod_uid.as_str()).collect();
    assert_eq!(found, wanted, "every pod of the file");
    if let Ok(whole) = whole {
        assert_eq!(whole.ours.len() + whole.others.len(), wanted.len(), "an answer for each entry");
        let ours = checkpoint.entries().iter().filter(|entry| entry.alloc_id.is_some()).count();
        assert_eq!(whole.ours.len(), ours, "both readers know the same answers as ours");
    }
    assert_cuts_fail(data, |cut| parse(cut, Timestamp(7)).is_ok() || parse_whole(cut).is_ok());
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// No part of a JSON document is read as a document.
fn assert_cuts_fail(data: &[u8], is_read: impl Fn(&[u8]) -> bool) {
    let whole = data.trim_ascii_end();
    let step = (whole.len() / CUTS_MAX).max(1);
    for end in (0..whole.len()).rev().step_by(step) {
        assert!(!is_read(&whole[..end]), "the first {end} bytes are read as a whole file");
    }
}

/// Checkpoints of a kubelet 1.36: two plugins, no device pods, and answers with every field.
pub(super) fn checkpoint_seeds() -> Seeds {
    let edits = sample_edits();
    let base64 = |response: &api_beta::ContainerAllocateResponse| {
        use base64::Engine as _;
        base64::engine::general_purpose::STANDARD.encode(response.encode_to_vec())
    };
    let ours = base64(&v1beta1::response(edits));
    let file = |entries: &str| {
        let registered = r#"{"example.com/gpu":["a","b"],"example.com/foo":null}"#;
        format!(
            r#"{{"Data":{{"PodDeviceEntries":{entries},"RegisteredDevices":{registered}}},"Checksum":2706400148}}"#
        )
        .into_bytes()
    };
    let entry = |uid: &str, name: &str, ids: &str, answer: &str| {
        format!(
            r#"{{"PodUID":"{uid}","ContainerName":"main","ResourceName":"{name}","DeviceIDs":{ids},"AllocResp":{answer}}}"#
        )
    };
    let one = entry("u-1", "example.com/gpu", r#"{"0":["a"],"1":["a","b"]}"#, &format!("{ours:?}"));
    let other = entry("u-2", "example.com/foo", r#"{"-1":["x"]}"#, r#""CgsKBlJJR19kMRIBMQ==""#);
    let third = entry("u-3", "nonsense", "null", "null");
    vec![
        ("two-plugins", file(&format!("[{one},{other},{third}]"))),
        ("one", file(&format!("[{one}]"))),
        ("empty", file("[]")),
        ("null", file("null")),
    ]
}

/// `dra_manager_state`: the first byte chooses between the file itself, and its data with a correct
/// checksum.
pub fn claim_state(data: &[u8]) {
    let mut input = Input::new(data);
    let with_checksum = input.truth();
    let data = input.rest();
    if !with_checksum {
        return claim_file(data);
    }
    let inner = String::from_utf8_lossy(data);
    let checksum = crc32fast::hash(inner.as_bytes());
    let file = serde_json::json!({ "Data": inner, "Checksum": checksum }).to_string();
    claim_file(file.as_bytes());
    if state::claims_in(file.as_bytes(), DRA_DRIVER).is_ok() {
        let wrong = serde_json::json!({ "Data": inner, "Checksum": checksum ^ 1 }).to_string();
        assert!(state::claims_in(wrong.as_bytes(), DRA_DRIVER).is_err(), "a wrong checksum");
    }
}

fn claim_file(bytes: &[u8]) {
    let Ok(claims) = state::claims_in(bytes, DRA_DRIVER) else { return };
    let Ok(file) = serde_json::from_slice::<Value>(bytes) else { return };
    let Ok(data) = serde_json::from_str::<Value>(text(&file["Data"])) else { return };
    let list = data["ClaimInfoStateList"].as_array().cloned().unwrap_or_default();
    let of_driver = |claim: &&Value| claim["DriverState"].get(DRA_DRIVER).is_some();
    let wanted: Vec<&str> =
        list.iter().filter(of_driver).map(|claim| text(&claim["ClaimUID"])).collect();
    let found: Vec<&str> = claims.iter().map(|claim| claim.claim.uid.as_str()).collect();
    assert_eq!(found, wanted, "every claim of the driver");
    for (claim, of) in claims.iter().zip(list.iter().filter(of_driver)) {
        let pods: BTreeSet<String> =
            of["PodUIDs"].as_object().into_iter().flatten().map(|(uid, _)| uid.clone()).collect();
        assert_eq!(claim.pods, pods, "every pod of the claim");
        let devices = of["DriverState"][DRA_DRIVER]["Devices"].as_array().cloned();
        let named: BTreeSet<String> = devices
            .into_iter()
            .flatten()
            .map(|device| text(&device["DeviceName"]).to_owned())
            .collect();
        let found: BTreeSet<String> =
            claim.devices.iter().map(|device| device.name.device.clone()).collect();
        assert_eq!(found, named, "every device of the claim");
    }
    assert_cuts_fail(bytes, |cut| state::claims_in(cut, DRA_DRIVER).is_ok());
}

/// The record of a kubelet 1.36 with claims of two drivers, and without claims.
pub(super) fn claim_state_seeds() -> Seeds {
    let claims = r#"[{"ClaimUID":"u-1","ClaimName":"gpu","Namespace":"team","PodUIDs":{"p-1":{},"p-2":{}},"DriverState":{"holdfast.dev":{"Devices":[{"PoolName":"n1/gpu","DeviceName":"gpu-1","ShareID":null,"RequestNames":["gpu"],"CDIDeviceIDs":["k8s.holdfast.dev/claim=u-1-gpu-1"]},{"PoolName":"n1/gpu","DeviceName":"gpu-2","ShareID":"s-1","RequestNames":["gpu","all"],"CDIDeviceIDs":null}]},"other.example.com":{"Devices":null}}},{"ClaimUID":"u-2","ClaimName":"nic","Namespace":"team","PodUIDs":null,"DriverState":{"holdfast.dev":{"Devices":null}}}]"#;
    let data = |list: &str| {
        format!(
            r#"{{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":{list}}}"#
        )
    };
    let file = |data: &str| {
        let checksum = crc32fast::hash(data.as_bytes());
        serde_json::json!({ "Data": data, "Checksum": checksum }).to_string().into_bytes()
    };
    let tagged = |tag: u8, bytes: &[u8]| [&[tag], bytes].concat();
    vec![
        ("data", tagged(b'1', data(claims).as_bytes())),
        ("data-null", tagged(b'1', data("null").as_bytes())),
        ("file", tagged(b'0', &file(&data(claims)))),
        ("file-empty", tagged(b'0', &file(&data("[]")))),
    ]
}
