//! Server-side apply of the status of a claim's devices, its rules, and the rights for it, as in
//! Kubernetes 1.36 (`validateDeviceStatus`, `AuthorizedForDeviceStatus`); pure.
//!
//! Each entry belongs to the field manager that applied it, as a whole. An entry that its manager
//! does not apply again is removed.

use super::access::User;
use super::names;
use super::patch::{ConditionStatus, Time, strict};
use super::profile::Profile;
use super::refusal::{Cause, Refusal};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The header of such a patch.
pub(super) const CONTENT_TYPE: &str = "application/apply-patch+yaml";

const CONDITIONS_MAX: usize = 8;
const REASON_BYTES_MAX: usize = 1024;
const MESSAGE_BYTES_MAX: usize = 32 * 1024;
const DATA_BYTES_MAX: usize = 10 * 1024;
const INTERFACE_BYTES_MAX: usize = 256;
const ADDRESS_BYTES_MAX: usize = 128;
const IPS_MAX: usize = 16;

/// What may be applied. Unknown fields are errors, as in `schema`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Applied {
    api_version: String,
    kind: String,
    metadata: Metadata,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "the fields are checked by their types")]
struct Metadata {
    name: String,
    namespace: String,
    #[serde(default)]
    uid: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Status {
    devices: Vec<Value>,
}

/// `AllocatedDeviceStatus`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    driver: String,
    pool: String,
    device: String,
    #[serde(default, rename = "shareID")]
    share_id: Option<String>,
    #[serde(default)]
    conditions: Vec<Condition>,
    #[serde(default)]
    data: Option<Map<String, Value>>,
    #[serde(default)]
    network_data: NetworkData,
}

/// `Condition` of apimachinery's `meta/v1`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(dead_code, reason = "some fields are checked by their types")]
struct Condition {
    r#type: String,
    status: ConditionStatus,
    reason: String,
    message: String,
    last_transition_time: Time,
}

/// `NetworkDeviceData`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct NetworkData {
    interface_name: String,
    hardware_address: String,
    ips: Vec<String>,
}

/// What identifies an entry: driver, pool, device and share.
fn key(entry: &Value) -> Value {
    let mut key = Map::new();
    for field in ["driver", "pool", "device", "shareID"] {
        if let Some(value) = entry.get(field).filter(|value| !value.is_null()) {
            key.insert(field.to_owned(), value.clone());
        }
    }
    key.into()
}

fn entries(claim: &Value) -> Vec<Value> {
    claim["status"]["devices"].as_array().cloned().unwrap_or_default()
}

/// The claim after `manager` has applied this patch by force.
pub(super) fn apply(
    old: &Value,
    patch: &Value,
    manager: &str,
    user: &User,
    profile: Profile,
) -> Result<Value, Refusal> {
    let applied: Applied = strict(patch)?;
    let name = old["metadata"]["name"].as_str().unwrap_or_default();
    let invalid = |field: &str, message: &str| {
        Err(Refusal::invalid("resourceclaims", name, vec![cause(field, message)]))
    };
    if manager.is_empty() {
        return invalid("fieldManager", "Required value: is required for apply patch");
    }
    if applied.api_version != "resource.k8s.io/v1" || applied.kind != "ResourceClaim" {
        return Err(Refusal::new(400, "the object in the patch has another kind"));
    }
    if applied.metadata.name != name {
        return Err(Refusal::new(400, "the name in the patch is not that of the URL"));
    }
    let uid = applied.metadata.uid.as_str();
    if !uid.is_empty() && old["metadata"]["uid"] != uid {
        return invalid("metadata.uid", "Invalid value: field is immutable");
    }
    let mut new = old.clone();
    let before = entries(old);
    let owned = owned(old, manager);
    let wanted = applied.status.devices;
    let keys: Vec<Value> = wanted.iter().map(key).collect();
    let is_left = |entry: &&Value| !owned.contains(&key(entry)) && !keys.contains(&key(entry));
    let mut after: Vec<Value> = before.iter().filter(is_left).cloned().collect();
    after.extend(wanted.iter().cloned());
    let is_dropped = !profile.device_status && before.is_empty();
    if is_dropped {
        after.clear();
    }
    let changed = before.iter().filter(|entry| !after.contains(entry));
    let changed = changed.chain(after.iter().filter(|entry| !before.contains(entry)));
    let drivers: BTreeSet<&str> = changed.filter_map(|entry| entry["driver"].as_str()).collect();
    let node = node(old);
    let is_checked = profile.granular_status && !old["status"]["allocation"].is_null();
    for driver in drivers.into_iter().filter(|_| is_checked) {
        if !user.may_report(driver, node) {
            let mut cause = cause("status.devices", &user.may_not_report(driver));
            cause.reason = "FieldValueForbidden";
            return Err(Refusal::invalid("resourceclaims", name, vec![cause]));
        }
    }
    let causes = problems(old, &after)?;
    if !causes.is_empty() {
        return Err(Refusal::invalid("resourceclaims", name, causes));
    }
    match after.is_empty() {
        true => drop(new["status"].as_object_mut().map(|status| status.remove("devices"))),
        false => new["status"]["devices"] = after.into(),
    }
    let kept = if is_dropped { Vec::new() } else { keys };
    own(&mut new, manager, kept);
    Ok(new)
}

/// The keys of the entries that a field manager has applied.
fn owned(claim: &Value, manager: &str) -> Vec<Value> {
    let managers = claim["metadata"]["managedFields"].as_array().into_iter().flatten();
    let of = managers.filter(|it| it["manager"] == manager);
    of.filter_map(|it| it["fieldsV1"]["f:status"]["f:devices"].as_array())
        .flatten()
        .cloned()
        .collect()
}

fn own(claim: &mut Value, manager: &str, keys: Vec<Value>) {
    let known = claim["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let mut managers: Vec<Value> =
        known.into_iter().filter(|it| it["manager"] != manager).collect();
    if !keys.is_empty() {
        managers.push(json!({
            "manager": manager, "operation": "Apply", "subresource": "status",
            "fieldsV1": { "f:status": { "f:devices": keys } },
        }));
    }
    match managers.is_empty() {
        true => drop(claim["metadata"].as_object_mut().map(|it| it.remove("managedFields"))),
        false => claim["metadata"]["managedFields"] = managers.into(),
    }
}

/// The node of an allocation (`nodeNameFromAllocation`).
fn node(claim: &Value) -> Option<&str> {
    let terms = claim["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"].as_array()?;
    let [term] = terms.as_slice() else { return None };
    let [field] = term["matchFields"].as_array()?.as_slice() else { return None };
    let [node] = field["values"].as_array()?.as_slice() else { return None };
    node.as_str().filter(|_| field["key"] == "metadata.name" && field["operator"] == "In")
}

fn cause(field: &str, message: &str) -> Cause {
    Cause { reason: "FieldValueInvalid", field: field.to_owned(), message: message.to_owned() }
}

/// The entries that break a rule.
fn problems(claim: &Value, entries: &[Value]) -> Result<Vec<Cause>, Refusal> {
    let results = claim["status"]["allocation"]["devices"]["results"].as_array();
    let allocated: Vec<Value> = results.into_iter().flatten().map(key).collect();
    let mut causes = Vec::new();
    for (number, value) in entries.iter().enumerate() {
        let at = format!("status.devices[{number}]");
        let entry: Entry = strict(value)?;
        if !allocated.contains(&key(value)) {
            let text =
                format!("Invalid value: {}: must be an allocated device in the claim", key(value));
            causes.push(cause(&at, &text));
        }
        let is_twice = entries[..number].iter().any(|other| key(other) == key(value));
        let network = &entry.network_data;
        let is_uuid = |id: &str| id.len() == 36 && id.split('-').count() == 5;
        let data = entry.data.map_or(0, |data| Value::from(data).to_string().len());
        for (is_wrong, field) in [
            (is_twice, ""),
            (entry.driver.is_empty() || !names::is_subdomain(&entry.driver, 63), ".driver"),
            (!names::is_pool(&entry.pool), ".pool"),
            (!names::is_label(&entry.device), ".device"),
            (entry.share_id.as_deref().is_some_and(|id| !is_uuid(id)), ".shareID"),
            (entry.conditions.len() > CONDITIONS_MAX, ".conditions"),
            (data > DATA_BYTES_MAX, ".data"),
            (network.interface_name.len() > INTERFACE_BYTES_MAX, ".networkData.interfaceName"),
            (network.hardware_address.len() > ADDRESS_BYTES_MAX, ".networkData.hardwareAddress"),
            (network.ips.len() > IPS_MAX, ".networkData.ips"),
        ] {
            if is_wrong {
                causes.push(cause(&format!("{at}{field}"), "Invalid value"));
            }
        }
        for (number, condition) in entry.conditions.iter().enumerate() {
            let mut others = entry.conditions[..number].iter();
            let is_twice = others.any(|other| other.r#type == condition.r#type);
            for (is_wrong, field) in [
                (!names::is_label_name(&condition.r#type) || is_twice, "type"),
                (!is_reason(&condition.reason), "reason"),
                (condition.message.len() > MESSAGE_BYTES_MAX, "message"),
            ] {
                if is_wrong {
                    let field = format!("{at}.conditions[{number}].{field}");
                    causes.push(cause(&field, "Invalid value"));
                }
            }
        }
    }
    Ok(causes)
}

/// `[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?`
fn is_reason(text: &str) -> bool {
    let is_end = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let bytes = text.as_bytes();
    text.len() <= REASON_BYTES_MAX
        && bytes.first().is_some_and(u8::is_ascii_alphabetic)
        && bytes.last().is_some_and(|last| is_end(*last))
        && bytes.iter().all(|byte| is_end(*byte) || b",:".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: &str = "b8e3a3c0-0000-4000-8000-000000000001";

    fn claim() -> Value {
        let result = |driver: &str, device: &str| json!({ "request": "r", "driver": driver, "pool": "n1/gpu", "device": device });
        let mut share = result("holdfast.dev", "g1");
        share["shareID"] = SHARE.into();
        let field = json!({ "key": "metadata.name", "operator": "In", "values": ["n1"] });
        json!({
            "metadata": { "name": "a", "namespace": "ml", "uid": "u1" },
            "status": { "allocation": {
                "devices": { "results": [
                    result("holdfast.dev", "g0"), share, result("other.example.com", "d"),
                ] },
                "nodeSelector": { "nodeSelectorTerms": [{ "matchFields": [field] }] },
            } },
        })
    }

    fn entry(device: &str) -> Value {
        json!({ "driver": "holdfast.dev", "pool": "n1/gpu", "device": device, "conditions": [{
            "type": "Ready", "status": "True", "reason": "Prepared", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }] })
    }

    fn patch(devices: &[Value]) -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "name": "a", "namespace": "ml", "uid": "u1" },
            "status": { "devices": devices },
        })
    }

    fn pod(node: &str) -> User {
        User::Pod(Some(node.into()))
    }

    fn applied(old: &Value, patch: &Value, user: &User) -> Result<Value, (u16, String)> {
        let manager = if *user == User::Admin { "kubectl" } else { "holdfast.dev" };
        apply(old, patch, manager, user, Profile::V1_36).map_err(|refusal| {
            let field = refusal.causes.first().map(|cause| cause.field.clone());
            (refusal.code, field.unwrap_or_default())
        })
    }

    #[test]
    fn a_manager_has_the_entries_that_it_applied_last() {
        let mut shared = entry("g1");
        shared["shareID"] = SHARE.into();
        let both = applied(&claim(), &patch(&[entry("g0"), shared.clone()]), &pod("n1")).unwrap();
        assert_eq!(entries(&both).len(), 2);
        assert_eq!(applied(&both, &patch(&[entry("g0"), shared]), &pod("n1")).unwrap(), both);
        let mut other = entry("d");
        other["driver"] = "other.example.com".into();
        let three = applied(&both, &patch(&[other.clone()]), &User::Admin).unwrap();
        assert_eq!(entries(&three).len(), 3);
        let left = applied(&three, &patch(&[]), &pod("n1")).unwrap();
        assert_eq!(entries(&left), [other]);
        assert_eq!(applied(&claim(), &patch(&[]), &pod("n1")).unwrap(), claim());
    }

    #[test]
    fn the_rules_and_the_rights_are_those_of_the_api_server() {
        let refused = |change: fn(&mut Value), user: &User| {
            let mut patch = patch(&[entry("g0")]);
            change(&mut patch);
            applied(&claim(), &patch, user).unwrap_err()
        };
        let node = pod("n1");
        let invalid = |field: &str| (422, field.to_owned());
        assert_eq!(
            refused(|it| it["metadata"]["uid"] = "u2".into(), &node),
            invalid("metadata.uid")
        );
        assert_eq!(refused(|it| it["status"]["spec"] = 1.into(), &node).0, 400);
        let first = "status.devices[0]";
        for (change, field) in [
            ((|it| it["device"] = "g9".into()) as fn(&mut Value), ""),
            (|it| it["shareID"] = SHARE.into(), ""),
            (|it| it["conditions"][0]["reason"] = "a b".into(), ".conditions[0].reason"),
            (|it| it["conditions"] = vec![it["conditions"][0].clone(); 9].into(), ".conditions"),
            (
                |it| it["networkData"] = json!({ "interfaceName": "e".repeat(257) }),
                ".networkData.interfaceName",
            ),
        ] {
            let mut entry = entry("g0");
            change(&mut entry);
            let error = applied(&claim(), &patch(&[entry]), &node).unwrap_err();
            assert_eq!(error, invalid(&format!("{first}{field}")));
        }
        // The right is for the own driver, in claims of the own node.
        let forbidden = invalid("status.devices");
        for user in [pod("n2"), User::Pod(None)] {
            assert_eq!(refused(|_| (), &user), forbidden);
        }
        let of_other =
            |it: &mut Value| it["status"]["devices"][0]["driver"] = "other.example.com".into();
        assert_eq!(refused(of_other, &node), forbidden);
        let former = apply(&claim(), &patch(&[entry("g0")]), "h", &pod("n2"), Profile::V1_35);
        assert_eq!(entries(&former.unwrap()).len(), 1, "1.35 has no such right");
        let off = Profile { device_status: false, ..Profile::V1_36 };
        assert_eq!(apply(&claim(), &patch(&[entry("g0")]), "h", &node, off).unwrap(), claim());
    }
}
