//! The metadata of devices for the containers of a claim (KEP-5304): a file for each request, with
//! the devices and their attributes as the slice has them.
//!
//! Kubernetes defines the path in the container and the content (package `api/metadata` of
//! k8s.io/dynamic-resource-allocation, 1.36). It is a matter of the driver and the container alone:
//! the first device of a request mounts the file. The text is a part of the record, as everything
//! is that containers get, so the file can be written again with the same bytes.

use crate::domain::{Allocated, AllocatedClaim, DRA_DRIVER, DraName, EditMount};
use crate::slices::api::Attribute;
use crate::slices::names::is_subdomain;
use serde_json::json;
use std::collections::BTreeMap;

/// The only version that Kubernetes 1.36 knows.
const API_VERSION: &str = "metadata.resource.k8s.io/v1alpha1";
const FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The text of the file for a request with these devices, and their attributes.
pub(super) fn text<'a>(
    claim: &AllocatedClaim,
    request: &str,
    devices: impl Iterator<Item = (&'a DraName, BTreeMap<String, Attribute>)>,
) -> String {
    let device = |(name, attributes): (&DraName, _)| {
        let attributes: BTreeMap<String, Attribute> = attributes;
        json!({
            "driver": DRA_DRIVER, "pool": name.pool, "name": name.device, "attributes": attributes,
        })
    };
    let mut document = json!({
        "apiVersion": API_VERSION,
        "kind": "DeviceMetadata",
        "metadata": {
            "name": claim.claim.name, "namespace": claim.claim.namespace, "uid": claim.claim.uid,
            "generation": 1,
        },
        "requests": [{ "name": request, "devices": devices.map(device).collect::<Vec<_>>() }],
    });
    if let Some(pod_claim) = &claim.pod_claim {
        document["podClaimName"] = pod_claim.as_str().into();
    }
    format!("{document}\n")
}

/// The mount of the file at `host` for a request. `None` if a name cannot be a part of a path: the
/// annotation of a claim is a user's.
pub(super) fn mount(claim: &AllocatedClaim, of: &Allocated, host: String) -> Option<EditMount> {
    let (folder, name) = match &claim.pod_claim {
        Some(pod_claim) => ("resourceclaimtemplates", pod_claim),
        None => ("resourceclaims", &claim.claim.name),
    };
    let request = of.request_name();
    let container = format!("{FOLDER}/{folder}/{name}/{request}/{DRA_DRIVER}-metadata.json");
    let is_valid = is_subdomain(name) && is_subdomain(request);
    is_valid.then_some(EditMount { host, container, read_only: true })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ClaimRef;

    fn claim(name: &str, pod_claim: Option<&str>) -> AllocatedClaim {
        AllocatedClaim {
            claim: ClaimRef { uid: "u".into(), namespace: "ml".into(), name: name.into() },
            is_allocated: true,
            devices: Vec::new(),
            reserved_for: Vec::new(),
            configs: Vec::new(),
            is_by_number: false,
            pod_claim: pod_claim.map(str::to_owned),
            is_deleted: false,
        }
    }

    /// The form of the examples of package `devicemetadata` of the library, whose reader also reads
    /// keys in another order.
    #[test]
    fn the_text_is_that_of_the_library() {
        let name = DraName { pool: "n1/gpu".into(), device: "gpu-1".into() };
        let attributes = [
            ("model", Attribute::text("H100")),
            ("vf", Attribute::Bool(false)),
            ("driverVersion", Attribute::Version("1.0.0".into())),
            ("resource.kubernetes.io/numaNode", Attribute::Int(1)),
        ];
        let attributes = attributes.map(|(name, value)| (name.to_owned(), value)).into();
        let text =
            text(&claim("train-x", Some("train")), "gpu/large", [(&name, attributes)].into_iter());
        let expected = json!({
            "apiVersion": "metadata.resource.k8s.io/v1alpha1", "kind": "DeviceMetadata",
            "metadata": { "name": "train-x", "namespace": "ml", "uid": "u", "generation": 1 },
            "podClaimName": "train",
            "requests": [{ "name": "gpu/large", "devices": [{
                "driver": "holdfast.dev", "pool": "n1/gpu", "name": "gpu-1",
                "attributes": {
                    "model": { "string": "H100" }, "vf": { "bool": false },
                    "driverVersion": { "version": "1.0.0" },
                    "resource.kubernetes.io/numaNode": { "int": 1 },
                },
            }] }],
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), expected);
        assert!(text.ends_with('\n') && text.lines().count() == 1, "{text}");
    }

    #[test]
    fn the_path_is_that_of_the_claim_or_of_its_template() {
        let of = |request: &str| Allocated {
            request: request.into(),
            name: DraName { pool: "n1/gpu".into(), device: "gpu-1".into() },
            share_id: None,
            admin: false,
        };
        let path = |claim, request| mount(&claim, &of(request), "/h".into()).map(|it| it.container);
        assert_eq!(
            path(claim("train.a", None), "gpu/large").as_deref(),
            Some(
                "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/train.a/gpu/\
                 holdfast.dev-metadata.json"
            )
        );
        assert_eq!(
            path(claim("train-x", Some("train")), "gpu").as_deref(),
            Some(
                "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/train/gpu/\
                 holdfast.dev-metadata.json"
            )
        );
        for bad in ["", "..", "../x", "a/b", "a..b", "A", "é", "a b", &"a".repeat(254)] {
            assert_eq!(path(claim("c", Some(bad)), "gpu"), None, "{bad}");
            assert_eq!(path(claim("c", None), bad).filter(|_| bad != "a/b"), None, "{bad}");
        }
    }
}
