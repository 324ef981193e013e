//! The parts of Kubernetes objects that this program reads. Unknown fields are ignored.

use super::metadata::ObjectMeta;
use crate::domain::{Allocated, DraName, null_as_empty};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;

/// A claim for devices (`ResourceClaim` of resource.k8s.io/v1).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ResourceClaim {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// What was allocated, and for whom.
    pub status: ClaimStatus,
}

/// The state of a claim (`ResourceClaimStatus`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimStatus {
    /// The devices, while the claim is allocated. They can change under the same UID: the claim is
    /// deallocated, then allocated again.
    pub allocation: Option<Allocation>,
    /// The consumers that may use the claim: pods.
    #[serde(deserialize_with = "null_as_empty")]
    pub reserved_for: Vec<Consumer>,
    /// What the drivers report about the devices.
    #[serde(deserialize_with = "null_as_empty")]
    pub devices: Vec<DeviceStatus>,
}

/// What a driver reports about an allocated device (`AllocatedDeviceStatus`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceStatus {
    /// The driver's name.
    pub driver: String,
    /// The pool.
    pub pool: String,
    /// The device's name in the pool.
    pub device: String,
    /// The share of a device with consumable capacity.
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    /// The conditions. A device has one of each type.
    #[serde(deserialize_with = "null_as_empty")]
    pub conditions: Vec<Condition>,
    /// The network, if the device has one.
    pub network_data: Option<NetworkData>,
}

/// The network of a device (`NetworkDeviceData`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkData {
    /// The name of the interface.
    pub interface_name: String,
    /// Its hardware address.
    pub hardware_address: String,
}

/// The allocation of a claim (`AllocationResult`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocation {
    /// The devices and their configuration.
    pub devices: AllocatedDevices,
    /// The nodes that can use the devices, as the API has it.
    pub node_selector: Option<Value>,
    /// When it was allocated, as RFC 3339.
    pub allocation_timestamp: Option<String>,
}

/// The devices of an allocation (`DeviceAllocationResult`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AllocatedDevices {
    /// The devices, of all drivers.
    #[serde(deserialize_with = "null_as_empty")]
    pub results: Vec<DeviceResult>,
    /// Their configuration. A later entry overrides an earlier one.
    #[serde(deserialize_with = "null_as_empty")]
    pub config: Vec<DeviceConfig>,
}

/// One allocated device (`DeviceRequestAllocationResult`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceResult {
    /// The request in the claim, `<request>` or `<request>/<alternative>`.
    pub request: String,
    /// The driver's name.
    pub driver: String,
    /// The pool.
    pub pool: String,
    /// The device's name in the pool.
    pub device: String,
    /// The share of a device with consumable capacity.
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    /// Access for an administrator: the device may have another holder. Absent is `false`.
    pub admin_access: Option<bool>,
}

impl From<&DeviceResult> for Allocated {
    fn from(result: &DeviceResult) -> Self {
        Allocated {
            request: result.request.clone(),
            name: DraName { pool: result.pool.clone(), device: result.device.clone() },
            share_id: result.share_id.clone(),
            admin: result.admin_access == Some(true),
        }
    }
}

/// One entry of the configuration (`DeviceAllocationConfiguration`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DeviceConfig {
    /// `FromClass` or `FromClaim`.
    pub source: String,
    /// The requests that it is for. None means all.
    #[serde(deserialize_with = "null_as_empty")]
    pub requests: Vec<String>,
    /// The parameters for one driver.
    pub opaque: Option<OpaqueConfig>,
}

/// The parameters for one driver (`OpaqueDeviceConfiguration`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct OpaqueConfig {
    /// The driver's name.
    pub driver: String,
    /// Any JSON.
    pub parameters: Value,
}

/// A consumer of a claim (`ResourceClaimConsumerReference`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Consumer {
    /// The API group; empty for pods.
    pub api_group: String,
    /// `pods`.
    pub resource: String,
    /// The name in the claim's namespace.
    pub name: String,
    /// The UID.
    pub uid: String,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// Its state.
    pub status: NodeStatus,
}

/// The state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// What the kubelet has read on its machine.
    pub node_info: NodeInfo,
    /// The conditions, of all programs.
    #[serde(deserialize_with = "null_as_empty")]
    pub conditions: Vec<Condition>,
}

/// A condition of a node (`NodeCondition`), or of a device of a claim (`Condition` of
/// apimachinery's `meta/v1`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// Its type. There is one of each type.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// In CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
    /// When the status changed, as RFC 3339.
    pub last_transition_time: Option<String>,
}

/// What the kubelet has read on its machine (`NodeSystemInfo`). A part that is unknown is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeInfo {
    /// The kernel's boot id: /proc/sys/kernel/random/boot_id.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// /etc/machine-id.
    #[serde(rename = "machineID")]
    pub machine_id: String,
}

/// The extra of a user that names the node of a token's pod (Kubernetes 1.32).
const NODE_OF_TOKEN: &str = "authentication.kubernetes.io/node-name";
/// The group and the name of kubelets (apiserver's `user` package, and the node authorizer).
const NODES_GROUP: &str = "system:nodes";
const NODE_USER: &str = "system:node:";

/// The version of a server (`Info` of apimachinery's `pkg/version`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct VersionInfo {
    /// `v1.36.1`.
    pub(super) git_version: String,
}

/// Who the API server takes this program for (`UserInfo` of authentication.k8s.io/v1).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct UserInfo {
    /// The user: `system:node:<node>`, `system:serviceaccount:<namespace>:<name>`, …
    pub username: String,
    /// Distinguishes users that have the same name at different times.
    pub uid: String,
    /// The user's groups.
    #[serde(deserialize_with = "null_as_empty")]
    pub groups: Vec<String>,
    /// Further facts.
    #[serde(deserialize_with = "extra")]
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The extra of a user. The list of each key may be `null` too (see [`null_as_empty`]).
fn extra<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Vec<String>>, D::Error> {
    let received: BTreeMap<String, Option<Vec<String>>> = null_as_empty(deserializer)?;
    Ok(received.into_iter().map(|(key, values)| (key, values.unwrap_or_default())).collect())
}

impl UserInfo {
    /// The node whose kubelet has these credentials.
    #[must_use]
    pub fn kubelet_of(&self) -> Option<&str> {
        let is_node = self.groups.iter().any(|group| group == NODES_GROUP);
        let name = self.username.strip_prefix(NODE_USER)?;
        (is_node && !name.is_empty()).then_some(name)
    }

    /// The node that the API server knows these credentials to be for: that of the kubelet, or that
    /// of the pod whose token is used.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        let of_token = self.extra.get(NODE_OF_TOKEN).and_then(|names| names.first());
        self.kubelet_of().or(of_token.map(String::as_str)).filter(|name| !name.is_empty())
    }
}

/// The answer to the question who we are (`SelfSubjectReview`).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SelfSubjectReview {
    pub(super) status: SelfSubjectReviewStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SelfSubjectReviewStatus {
    pub(super) user_info: UserInfo,
}

/// The answer to the question whose token this is (`TokenReview`).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TokenReview {
    pub(super) status: TokenReviewStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TokenReviewStatus {
    pub(super) authenticated: bool,
    pub(super) user: UserInfo,
}

/// The answer to the question what a user may do (`SubjectAccessReview`).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SubjectAccessReview {
    pub(super) status: SubjectAccessReviewStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SubjectAccessReviewStatus {
    pub(super) allowed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::with_one_null;
    use serde_json::json;

    fn user(name: &str, groups: &[&str], node: Option<&str>) -> UserInfo {
        let extra = node.map(|node| (NODE_OF_TOKEN.to_owned(), vec![node.to_owned()]));
        let groups = groups.iter().map(|group| (*group).to_owned()).collect();
        let extra = extra.into_iter().collect();
        UserInfo { username: name.into(), groups, extra, ..UserInfo::default() }
    }

    #[test]
    fn the_node_is_that_of_the_kubelet_or_of_the_token() {
        let nodes = ["system:nodes", "system:authenticated"];
        for (user, expected) in [
            (user("system:node:gpu-7", &nodes, None), Some("gpu-7")),
            (user("system:node:gpu-7", &["other"], None), None),
            (user("system:node:", &nodes, None), None),
            (user("system:serviceaccount:a:b", &["x"], Some("gpu-8")), Some("gpu-8")),
            (user("system:serviceaccount:a:b", &["x"], Some("")), None),
            (user("admin", &["system:masters"], None), None),
        ] {
            assert_eq!(user.node(), expected, "{user:?}");
        }
    }

    #[test]
    fn a_claim_is_read_and_its_unknown_fields_are_ignored() {
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "name": "c", "namespace": "n", "uid": "u", "resourceVersion": "7",
                "deletionTimestamp": "2026-01-02T03:04:05Z", "managedFields": [{}],
                "labels": { "a": "b" } },
            "spec": { "devices": { "requests": [{ "name": "gpu" }] } },
            "status": {
                "reservedFor": [{ "resource": "pods", "name": "p", "uid": "pu" }],
                "allocation": {
                    "allocationTimestamp": "2026-01-02T03:04:00Z",
                    "nodeSelector": { "nodeSelectorTerms": [] },
                    "devices": {
                        "results": [
                            { "request": "gpu/large", "driver": "holdfast.dev", "pool": "n1/gpu",
                              "device": "gpu-1", "shareID": "s", "adminAccess": true,
                              "tolerations": [] },
                            { "request": "nic", "driver": "other", "pool": "p", "device": "d",
                              "adminAccess": null },
                        ],
                        "config": [{ "source": "FromClass", "requests": ["gpu"],
                            "opaque": { "driver": "holdfast.dev", "parameters": { "a": [1] } } }],
                    },
                },
            },
        });
        let nulls = with_one_null(&object, &["labels"]);
        let lists = ["reservedFor", "results", "config", "requests"];
        assert!(lists.iter().all(|list| nulls.iter().any(|(at, _)| at.ends_with(list))));
        for (at, object) in nulls {
            let read = serde_json::from_value::<ResourceClaim>(object);
            assert!(read.is_ok(), "{at} is null");
        }
        let claim: ResourceClaim = serde_json::from_value(object).unwrap();
        assert_eq!(claim.metadata.deletion_timestamp.as_deref(), Some("2026-01-02T03:04:05Z"));
        assert_eq!(claim.metadata.resource_version, "7");
        assert_eq!(claim.status.reserved_for[0].uid, "pu");
        let Allocation { devices, node_selector, allocation_timestamp } =
            claim.status.allocation.unwrap();
        assert_eq!(allocation_timestamp.as_deref(), Some("2026-01-02T03:04:00Z"));
        assert_eq!(node_selector, Some(json!({ "nodeSelectorTerms": [] })));
        let first = Allocated::from(&devices.results[0]);
        assert_eq!((first.request_name(), first.admin), ("gpu", true));
        assert_eq!(first.share_id.as_deref(), Some("s"));
        assert!(!Allocated::from(&devices.results[1]).admin);
        let opaque = devices.config[0].opaque.as_ref().unwrap();
        assert_eq!(opaque.parameters, json!({ "a": [1] }));
    }

    #[test]
    fn a_claim_without_an_allocation_has_none() {
        for status in [json!({}), json!({ "allocation": null })] {
            let claim: ResourceClaim = serde_json::from_value(json!({ "status": status })).unwrap();
            assert_eq!(claim, ResourceClaim::default());
        }
    }

    #[test]
    fn an_empty_list_of_a_node_or_user_may_be_null() {
        let node: Node =
            serde_json::from_value(json!({ "status": { "conditions": null } })).unwrap();
        assert_eq!(node, Node::default());
        let read: UserInfo =
            serde_json::from_value(json!({ "groups": null, "extra": null })).unwrap();
        assert_eq!(read, UserInfo::default());
        let read: UserInfo = serde_json::from_value(json!({ "extra": { "a": null } })).unwrap();
        assert_eq!(read.extra, BTreeMap::from([("a".to_owned(), Vec::new())]));
    }
}
