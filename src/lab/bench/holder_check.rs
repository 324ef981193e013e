//! Compares the holders in the simulated kubelet with the daemon's ledger.

use super::node::Node;
use crate::console::exit::Failed;
use crate::domain::ResourceName;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Maximum wait until the last grants are bound to their pods.
const BIND_TIMEOUT: Duration = Duration::from_secs(60);
/// Waits until the last grants are bound. Returns the number of holders, and the differences.
pub(super) async fn check_holders(node: &Node) -> Result<(usize, Vec<String>), Failed> {
    let until = Instant::now() + BIND_TIMEOUT;
    loop {
        let held = held(node);
        let different = differences(&held, &node.query("who").await?);
        if different.is_empty() || Instant::now() > until {
            return Ok((held.len(), different));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// A grant in the kubelet: the devices of a running container.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    alloc_id: String,
    pod_uid: String,
    container: String,
    resource: ResourceName,
    devices: BTreeSet<String>,
}

fn held(node: &Node) -> Vec<Held> {
    let holders = node.kubelet.view(|view| view.holders());
    let of = |holder: &crate::lab::sim::kubelet::Holder| {
        let (pod_uid, container) = (holder.pod_uid.clone(), holder.container.clone());
        let alloc_ids = holder.alloc_ids.clone();
        let devices = holder.devices.clone().into_iter();
        devices
            .map(move |(resource, devices)| Held {
                alloc_id: alloc_ids
                    .get(&resource)
                    .map(|id| id.as_str().to_owned())
                    .unwrap_or_default(),
                pod_uid: pod_uid.clone(),
                container: container.clone(),
                resource,
                devices: devices.iter().map(|id| id.as_str().to_owned()).collect(),
            })
            .collect::<Vec<_>>()
    };
    holders.iter().flat_map(of).collect()
}

/// Differences between the ledger's document and the containers, in words.
fn differences(held: &[Held], who: &Value) -> Vec<String> {
    let grants: BTreeMap<&str, &Value> = who["grants"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|grant| Some((grant["alloc_id"].as_str()?, grant)))
        .collect();
    let difference = |held: &Held| {
        let at = format!("{} of pod {} ({})", held.container, held.pod_uid, held.resource);
        let Some(grant) = grants.get(held.alloc_id.as_str()) else {
            return Some(format!(
                "{at} runs with grant `{}`, which is not live in the ledger",
                held.alloc_id
            ));
        };
        let devices: BTreeSet<&str> =
            grant["devices"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let same = devices.iter().copied().eq(held.devices.iter().map(String::as_str))
            && grant["resource"] == held.resource.as_str()
            && grant["pod"]["uid"] == held.pod_uid.as_str()
            && grant["container"] == held.container.as_str();
        (!same).then(|| format!("{at} runs with {:?}, but the ledger has {grant}", held.devices))
    };
    held.iter().filter_map(difference).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_holder_that_differs_from_the_kubelet_is_reported() {
        let held = Held {
            alloc_id: "a".into(),
            pod_uid: "uid".into(),
            container: "main".into(),
            resource: "example.com/bench0".parse().unwrap(),
            devices: ["x".to_owned(), "y".to_owned()].into(),
        };
        let grant = json!({ "alloc_id": "a", "resource": "example.com/bench0", "devices": ["y", "x"], "pod": { "uid": "uid" }, "container": "main" });
        let differing = |grant: Value| {
            differences(std::slice::from_ref(&held), &json!({ "grants": [grant] })).len()
        };
        assert_eq!(differing(grant.clone()), 0);
        for (key, other) in [
            ("alloc_id", json!("b")),
            ("resource", json!("example.com/bench1")),
            ("devices", json!(["x"])),
            ("pod", Value::Null),
            ("container", json!("init")),
        ] {
            let mut other_grant = grant.clone();
            other_grant[key] = other;
            assert_eq!(differing(other_grant), 1, "{key}");
        }
    }
}
