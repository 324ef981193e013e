//! Claims from the API server.

use crate::cluster::{Client, ResourceClaim};
use crate::domain::{
    Allocated, AllocatedClaim, ClaimRef, ConfigSource, DRA_DRIVER, OpaqueConfig, PodRef,
};
use crate::serving::claims::ClaimSource;

/// Reads claims with a client.
#[derive(Debug, Clone)]
pub(crate) struct ApiClaims(pub(crate) Client);

#[tonic::async_trait]
impl ClaimSource for ApiClaims {
    async fn get(&self, claim: &ClaimRef) -> Result<Option<AllocatedClaim>, String> {
        let found = self.0.claim(&claim.namespace, &claim.name).await;
        found.map(|found| found.map(of_this_driver)).map_err(|error| error.to_string())
    }
}

/// The parts of a claim that are about this driver.
pub(super) fn of_this_driver(claim: ResourceClaim) -> AllocatedClaim {
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
    let configs = devices.config.into_iter().filter_map(|config| {
        let opaque = config.opaque.filter(|opaque| opaque.driver == DRA_DRIVER)?;
        let source = match config.source.as_str() {
            "FromClass" => ConfigSource::FromClass,
            _ => ConfigSource::FromClaim,
        };
        Some(OpaqueConfig {
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
        let found = of_this_driver(serde_json::from_value(claim).unwrap());
        assert!(found.is_allocated && !found.is_deleted);
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
        assert!(!of_this_driver(serde_json::from_value(claim).unwrap()).is_allocated);
    }
}
