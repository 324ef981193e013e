//! The kubelet's own view of the holders, compared with the ledger's.

use crate::daemon::Held;
use crate::node::Node;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use holdfast::kubelet::pod_resources::PodResources;
use holdfast::kubelet::proto::v1beta1::ContainerAllocateResponse;
use prost::Message as _;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

pub(crate) const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";
const POD_RESOURCES: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";

/// Container (`uid container`), resource, ids and alloc-id of every grant.
pub(crate) type Grants = BTreeSet<(String, String, BTreeSet<String>, String)>;

/// The kubelet's checkpoint, for the pods that it has.
fn checkpointed(pods: &BTreeMap<String, String>) -> Grants {
    let document: Value = serde_json::from_slice(&fs::read(CHECKPOINT).unwrap()).unwrap();
    let entries = document["Data"]["PodDeviceEntries"].as_array().into_iter().flatten();
    // It is not written when devices become free: entries of other pods are outdated.
    let known = entries.filter(|entry| pods.contains_key(entry["PodUID"].as_str().unwrap()));
    let grant = |entry: &Value| {
        let text = |key: &str| entry[key].as_str().unwrap().to_owned();
        let ids = entry["DeviceIDs"]
            .as_object()
            .unwrap()
            .values()
            .flat_map(|ids| ids.as_array().unwrap());
        let response =
            ContainerAllocateResponse::decode(&*STANDARD.decode(text("AllocResp")).unwrap())
                .unwrap();
        let alloc_id = response.annotations["holdfast.dev/alloc-id"].clone();
        let holder = format!("{} {}", text("PodUID"), text("ContainerName"));
        (
            holder,
            text("ResourceName"),
            ids.map(|id| id.as_str().unwrap().to_owned()).collect(),
            alloc_id,
        )
    };
    known.map(grant).collect()
}

/// The kubelet's listing of its pods: `uid container`, resource and ids. It leaves out init
/// containers.
fn listed(pods: &BTreeMap<String, String>) -> Option<BTreeSet<(String, String, BTreeSet<String>)>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listed = runtime.block_on(async { PodResources::new(POD_RESOURCES).list().await }).ok()?;
    let mut found = BTreeSet::new();
    for pod in listed {
        let uid = pods.iter().find(|(_, name)| **name == pod.name).map(|(uid, _)| uid.clone())?;
        for container in pod.containers {
            for (resource, ids) in container.devices {
                let ids = ids.iter().map(|id| id.as_str().to_owned()).collect();
                found.insert((
                    format!("{uid} {}", container.name),
                    resource.as_str().to_owned(),
                    ids,
                ));
            }
        }
    }
    Some(found)
}

/// The live grants of the ledger. A grant with an unknown container has `?` in its place.
fn recorded(held: &[Held]) -> Grants {
    let grant = |held: &Held| {
        let holder = held
            .holder
            .as_ref()
            .map_or("?".to_owned(), |holder| holder.split_once(' ').unwrap().1.to_owned());
        (
            holder,
            held.resource.clone(),
            held.devices.iter().cloned().collect(),
            held.alloc_id.clone(),
        )
    };
    held.iter().map(grant).collect()
}

/// The grants on which the ledger (`held`), the checkpoint and the listing agree; otherwise the
/// differences.
pub(crate) fn agreement(node: &Node, held: &[Held]) -> Result<Grants, String> {
    let list = node.pods.list().ok_or("the kubelet does not answer")?;
    let pods = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|pod| pod["status"]["phase"] != "Failed");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pods: BTreeMap<String, String> =
        pods.map(|pod| (text(&pod["metadata"]["uid"]), text(&pod["metadata"]["name"]))).collect();
    let (ledger, checkpoint) = (recorded(held), checkpointed(&pods));
    if ledger != checkpoint {
        let only = |of: &Grants, other: &Grants| of.difference(other).cloned().collect::<Vec<_>>();
        return Err(format!(
            "only the ledger has {:?}, only the kubelet's checkpoint has {:?}",
            only(&ledger, &checkpoint),
            only(&checkpoint, &ledger)
        ));
    }
    let listed = listed(&pods).ok_or("the kubelet does not list its pods")?;
    let of_main = ledger.iter().filter(|(holder, ..)| holder.ends_with(" main"));
    let expected: BTreeSet<_> = of_main
        .map(|(holder, resource, ids, _)| (holder.clone(), resource.clone(), ids.clone()))
        .collect();
    if expected == listed {
        Ok(ledger)
    } else {
        Err(format!("the ledger has {expected:?}, the kubelet lists {listed:?}"))
    }
}

/// Deletes the kubelet's checkpoint. The kubelet must be stopped.
pub(crate) fn forget_checkpoint() {
    fs::remove_file(CHECKPOINT).unwrap();
}
