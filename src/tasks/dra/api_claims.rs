//! Claims from the API server.

use crate::cluster::{Client, ResourceClaim};
use crate::domain::{
    Allocated, AllocatedClaim, ClaimRef, ConfigSource, DRA_DRIVER, OpaqueConfig, PodRef,
};
use crate::serving::claims::ClaimSource;
use crate::slices::attributes::vendors::Vendor;

/// Reads claims with a client.
#[derive(Debug, Clone)]
pub(crate) struct ApiClaims {
    pub(crate) client: Client,
    /// Whether devices have the attributes of vendors' drivers.
    pub(crate) vendors: bool,
}

#[tonic::async_trait]
impl ClaimSource for ApiClaims {
    async fn get(&self, claim: &ClaimRef) -> Result<Option<AllocatedClaim>, String> {
        let found = self.client.claim(&claim.namespace, &claim.name).await;
        let reduced = |found| of_this_driver(found, self.vendors);
        found.map(|found| found.map(reduced)).map_err(|error| error.to_string())
    }
}

/// The parts of a claim that are about this driver. With `vendors`, the configurations for a
/// vendor's driver that has no device in the claim are parts too: a device of this driver may have
/// been allocated in place of one of that driver.
pub(super) fn of_this_driver(claim: ResourceClaim, vendors: bool) -> AllocatedClaim {
    let ResourceClaim { metadata, status } = claim;
    let pod = |name: String, uid: String| PodRef {
        uid,
        namespace: Some(metadata.namespace.clone()),
        name: Some(name),
    };
    let consumers = status.reserved_for.into_iter();
    let is_pod = |resource: &str, group: &str| resource == "pods" && group.is_empty();
    let reserved_for = consumers
        .filter(|consumer| is_pod(&consumer.resource, &consumer.api_group))
        .map(|consumer| pod(consumer.name, consumer.uid))
        .collect();
    let is_allocated = status.allocation.is_some();
    let devices = status.allocation.map(|allocation| allocation.devices).unwrap_or_default();
    let results = devices.results.iter().filter(|result| result.driver == DRA_DRIVER);
    let is_in_place = |driver: &str| {
        vendors
            && Vendor::ALL.iter().any(|vendor| vendor.driver() == driver)
            && devices.results.iter().all(|result| result.driver != driver)
    };
    let configs = devices.config.into_iter().filter_map(|config| {
        let is_ours = |driver: &str| driver == DRA_DRIVER || is_in_place(driver);
        let opaque = config.opaque.filter(|opaque| is_ours(&opaque.driver))?;
        let source = match config.source.as_str() {
            "FromClass" => ConfigSource::FromClass,
            _ => ConfigSource::FromClaim,
        };
        Some(OpaqueConfig {
            driver: opaque.driver,
            source,
            requests: config.requests,
            parameters: opaque.parameters.to_string(),
        })
    });
    AllocatedClaim {
        is_allocated,
        devices: results.map(Allocated::from).collect(),
        configs: configs.collect(),
        reserved_for,
        is_by_number: metadata.annotations.extended_resource_claim == "true",
        pod_claim: metadata.annotations.pod_claim_name,
        is_deleted: metadata.deletion_timestamp.is_some(),
        claim: ClaimRef { uid: metadata.uid, namespace: metadata.namespace, name: metadata.name },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_reduced_to_the_parts_of_this_driver() {
        let claim = serde_json::json!({
            "metadata": { "name": "c", "namespace": "ml", "uid": "u1" },
            "status": {
                "allocation": { "devices": {
                    "results": [
                        { "request": "gpu/large", "driver": DRA_DRIVER, "pool": "n1/gpu", "device": "g" },
                        { "request": "nic", "driver": "other.example.com", "pool": "p", "device": "d" },
                    ],
                    "config": [
                        { "source": "FromClass", "opaque": { "driver": "other.example.com", "parameters": {} } },
                        { "source": "FromClaim", "requests": ["gpu"],
                          "opaque": { "driver": DRA_DRIVER, "parameters": { "kind": "X" } } },
                    ],
                } },
                "reservedFor": [
                    { "resource": "pods", "name": "a", "uid": "p1" },
                    { "apiGroup": "batch", "resource": "jobs", "name": "j", "uid": "j1" },
                ],
            },
        });
        let found = of_this_driver(serde_json::from_value(claim).unwrap(), false);
        assert!(found.is_allocated && !found.is_deleted && !found.is_by_number);
        assert_eq!(found.claim.to_string(), "ml/c");
        let devices: Vec<&str> =
            found.devices.iter().map(|device| device.name.device.as_str()).collect();
        assert_eq!(devices, ["g"]);
        let pods: Vec<String> = found.reserved_for.iter().map(ToString::to_string).collect();
        assert_eq!(pods, ["ml/a"]);
        assert_eq!(found.configs.len(), 1);
        assert_eq!(found.configs[0].parameters, r#"{"kind":"X"}"#);
        assert_eq!(found.configs[0].source, ConfigSource::FromClaim);

        let claim =
            serde_json::json!({ "metadata": { "name": "c", "namespace": "ml", "uid": "u1" } });
        assert!(!of_this_driver(serde_json::from_value(claim).unwrap(), false).is_allocated);
    }

    #[test]
    fn a_claim_for_numbers_has_the_annotation_of_the_scheduler() {
        let found = |annotations: serde_json::Value| {
            let claim = serde_json::json!({ "metadata": { "annotations": annotations } });
            of_this_driver(serde_json::from_value(claim).unwrap(), false).is_by_number
        };
        const NAME: &str = "resource.kubernetes.io/extended-resource-claim";
        assert!(found(serde_json::json!({ NAME: "true", "a": "b" })));
        assert!(!found(serde_json::json!({ NAME: "false" })));
        assert!(!found(serde_json::json!({ "a": "true" })));
    }

    #[test]
    fn a_configuration_of_a_vendor_without_a_device_of_its_driver_is_kept_if_asked_for() {
        let configs = |other: &str, vendors: bool| -> Vec<String> {
            let config = |driver: &str| {
                serde_json::json!({
                    "source": "FromClaim", "opaque": { "driver": driver, "parameters": {} },
                })
            };
            let claim = serde_json::json!({
                "metadata": { "name": "c", "namespace": "ml", "uid": "u1" },
                "status": { "allocation": { "devices": {
                    "results": [
                        { "request": "a", "driver": DRA_DRIVER, "pool": "n1/gpu", "device": "g" },
                        { "request": "b", "driver": other, "pool": "n1", "device": "d" },
                    ],
                    "config": [
                        config("gpu.nvidia.com"), config("x.example.com"), config(DRA_DRIVER),
                    ],
                } } },
            });
            let found = of_this_driver(serde_json::from_value(claim).unwrap(), vendors);
            found.configs.into_iter().map(|config| config.driver).collect()
        };
        assert_eq!(configs("x.example.com", true), ["gpu.nvidia.com", DRA_DRIVER]);
        assert_eq!(configs("x.example.com", false), [DRA_DRIVER]);
        assert_eq!(configs("gpu.nvidia.com", true), [DRA_DRIVER], "its own driver applies it");
    }
}
