//! Claims of Dynamic Resource Allocation (DRA). The scheduler allocates devices to a claim by their
//! names, and the kubelet asks the driver to prepare it for a pod.

use super::device_id::DeviceId;
use super::edits::ContainerEdits;
use super::pod::PodRef;
use super::safeguard::Safeguard;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The name of this driver in the DRA API (`spec.driver` of its `ResourceSlice` objects). It is the
/// same for the devices of all vendors.
pub const DRA_DRIVER: &str = "holdfast.dev";

/// A `ResourceClaim` as the kubelet names it (`Claim` of the kubelet's DRA API). Its UID
/// distinguishes it from an earlier claim of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    /// The claim's UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl ClaimRef {
    /// Whether namespace and name are known. They are not if the claim was restored from its CDI
    /// file.
    #[must_use]
    pub fn is_named(&self) -> bool {
        !self.name.is_empty()
    }
}

impl fmt::Display for ClaimRef {
    /// `namespace/name`, or the UID where the name is not known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_named() {
            write!(f, "{}/{}", self.namespace, self.name)
        } else {
            f.write_str(&self.uid)
        }
    }
}

/// The name of a device in the DRA API. The driver's name is the same for all devices of this
/// daemon. A name never changes while a claim may hold the device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DraName {
    /// `spec.pool.name` of its `ResourceSlice`.
    pub pool: String,
    /// The name in the pool, a DNS label.
    pub device: String,
}

impl fmt::Display for DraName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.device)
    }
}

/// One device that the scheduler allocated to a claim (`DeviceRequestAllocationResult` of
/// resource.k8s.io/v1).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Allocated {
    /// The request in the claim: `gpu`, or `gpu/large` for one of its alternatives.
    pub request: String,
    /// The device.
    #[serde(flatten)]
    pub name: DraName,
    /// The share of a device with consumable capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Access for an administrator: the device may have another holder.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin: bool,
}

impl Allocated {
    /// The request without the alternative, as the kubelet expects it in an answer.
    #[must_use]
    pub fn request_name(&self) -> &str {
        self.request.split('/').next().unwrap_or_default()
    }

    /// Whether it is the same device, or the same share of it, for the same request. A device that
    /// was restored from a CDI file has no request, and is for any.
    #[must_use]
    pub fn is_for(&self, other: &Allocated) -> bool {
        let is_restored = self.request.is_empty() || other.request.is_empty();
        (&self.name, &self.share_id) == (&other.name, &other.share_id)
            && (is_restored || self.request_name() == other.request_name())
    }
}

/// Where an opaque configuration of a claim comes from (`DeviceAllocationConfiguration.source`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ConfigSource {
    /// The `DeviceClass`, which an administrator wrote.
    FromClass,
    /// The claim itself.
    FromClaim,
}

/// A configuration in the allocation of a claim (`OpaqueDeviceConfiguration`): for this driver, or
/// for the driver of a vendor that has no device in the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpaqueConfig {
    /// The driver that it is for.
    pub driver: String,
    /// Where it comes from.
    pub source: ConfigSource,
    /// The requests that it applies to; empty means all.
    pub requests: Vec<String>,
    /// Its parameters, a JSON document.
    pub parameters: String,
}

/// A `ResourceClaim` as the API server has it, as far as it is about this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Its identity. The UID may be another than that of an earlier claim of this name.
    pub claim: ClaimRef,
    /// Whether devices are allocated to it (`status.allocation`), also of other drivers only.
    pub is_allocated: bool,
    /// The allocated devices of this driver, in the order of the claim.
    pub devices: Vec<Allocated>,
    /// The pods that it is reserved for (`status.reservedFor`).
    pub reserved_for: Vec<PodRef>,
    /// The configurations, in the order of the claim: a later one has precedence.
    pub configs: Vec<OpaqueConfig>,
    /// Whether the scheduler has made it for a pod that requests numbers: a class has the name of
    /// an extended resource. Then each request is for one resource of one container. An init
    /// container may have several requests for one resource; any other container has one.
    pub is_by_number: bool,
    /// The name of the claim in the pod, if it was made from a template.
    pub pod_claim: Option<String>,
    /// Whether it is being deleted (`metadata.deletionTimestamp`). Its pods may still run.
    pub is_deleted: bool,
}

/// One device of a prepared claim, with all that its containers get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedDevice {
    /// What the scheduler allocated.
    #[serde(flatten)]
    pub allocated: Allocated,
    /// The id of the device.
    pub id: DeviceId,
    /// The qualified CDI names in the answer. They are recorded, so that each answer of a boot has
    /// the same bytes: the kubelet may append a second answer to the first.
    pub cdi_devices: Vec<String>,
    /// The content of the CDI device of this claim. The file is written again from it at a start,
    /// and from the present nodes at the first Prepare after a reboot.
    pub edits: ContainerEdits,
    /// The text of the file about all devices of its request, which it mounts as the first of them
    /// (`[dra] device_metadata`). Empty: it mounts none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub metadata: String,
}

/// What a grant records of its claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimHold {
    /// The claim.
    pub claim: ClaimRef,
    /// Identifies the allocation: a claim may be allocated again under the same UID.
    pub allocation: String,
    /// The devices of one resource, sorted by request and name.
    pub devices: Vec<ClaimedDevice>,
}

impl ClaimHold {
    /// Whether the claim has the device only with access for an administrator.
    #[must_use]
    pub fn is_for_admin(&self, id: &DeviceId) -> bool {
        let mut of_id = self.devices.iter().filter(|device| device.id == *id).peekable();
        of_id.peek().is_some() && of_id.all(|device| device.allocated.admin)
    }

    /// Whether both are the same allocation of the same claim. A hold that was restored from the
    /// kubelet's file has no allocation: then its devices decide.
    #[must_use]
    pub fn is_same_allocation(&self, other: &ClaimHold) -> bool {
        self.claim.uid == other.claim.uid
            && (self.allocation == other.allocation
                || self.is_restored_part_of(other)
                || !Safeguard::ClaimAllocation.is_on())
    }

    /// Whether it was restored from the kubelet's file.
    #[must_use]
    pub fn is_restored(&self) -> bool {
        self.allocation.is_empty()
    }

    fn is_restored_part_of(&self, other: &ClaimHold) -> bool {
        self.is_restored() && self.devices.iter().all(|device| other.has(&device.allocated))
    }

    /// Whether it has the device for the same request.
    #[must_use]
    pub fn has(&self, wanted: &Allocated) -> bool {
        self.devices.iter().any(|device| device.allocated.is_for(wanted))
    }
}

/// One device in the answer to the kubelet (`Device` of the kubelet's DRA API).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// The request in the claim, without the alternative.
    pub request: String,
    /// The device.
    pub name: DraName,
    /// The qualified CDI names that the runtime resolves.
    pub cdi_devices: Vec<String>,
    /// The share of a device with consumable capacity.
    pub share_id: Option<String>,
}

/// The name of a device of a claim for its CDI device: that in the slice, or for a part of a
/// device's capacity that of the share. The CDI names of an answer have it: the UID of the claim, a
/// hyphen and the name. So the kubelet's record shows which share a claim has.
#[must_use]
pub fn own_name<'a>(uid: &str, cdi_devices: &'a [String], in_slice: &'a str) -> &'a str {
    let of_claim =
        |qualified: &'a String| qualified.split_once('=')?.1.strip_prefix(uid)?.strip_prefix('-');
    cdi_devices.iter().find_map(of_claim).unwrap_or(in_slice)
}

impl PreparedDevice {
    /// The device, or the share of it, that the claim with this UID has ([`own_name`]).
    #[must_use]
    pub fn own(&self, uid: &str) -> DraName {
        let device = own_name(uid, &self.cdi_devices, &self.name.device);
        DraName { pool: self.name.pool.clone(), device: device.to_owned() }
    }
}

impl From<&ClaimedDevice> for PreparedDevice {
    fn from(device: &ClaimedDevice) -> Self {
        PreparedDevice {
            request: device.allocated.request_name().to_owned(),
            name: device.allocated.name.clone(),
            cdi_devices: device.cdi_devices.clone(),
            share_id: device.allocated.share_id.clone(),
        }
    }
}

/// The health of a device as the kubelet shows it in the status of a pod (`DeviceHealth` of the
/// kubelet's DRA health API).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimHealth {
    /// The device.
    pub name: DraName,
    /// `None` if the device was never examined.
    pub is_healthy: Option<bool>,
    /// The reason and the detail, at most 1024 bytes.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocated(request: &str) -> Allocated {
        let name = DraName { pool: "n1/gpu".into(), device: "gpu-5a7c".into() };
        Allocated { request: request.into(), name, share_id: None, admin: false }
    }

    #[test]
    fn an_answer_names_the_request_without_its_alternative() {
        for (request, expected) in [("gpu", "gpu"), ("gpu/large", "gpu"), ("", "")] {
            assert_eq!(allocated(request).request_name(), expected);
        }
    }

    #[test]
    fn an_answer_shows_which_share_a_claim_has() {
        let cdi = |names: &[&str]| names.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
        for (names, expected) in [
            (cdi(&["nvidia.com/gpu=gpu-1", "k8s.holdfast.dev/claim=u-1-gpu-1-s2"]), "gpu-1-s2"),
            (cdi(&["k8s.holdfast.dev/claim=u-1-gpu-1"]), "gpu-1"),
            (cdi(&["nvidia.com/gpu=u-2-x", "nvidia.com/gpu=u-1", "u-1-x"]), "gpu-1"),
            (cdi(&[]), "gpu-1"),
        ] {
            assert_eq!(own_name("u-1", &names, "gpu-1"), expected, "{names:?}");
        }
    }

    #[test]
    fn a_claimed_device_is_recorded_in_the_words_of_the_api() {
        let device = ClaimedDevice {
            allocated: allocated("gpu/large"),
            id: DeviceId::new("GPU-5A7C"),
            cdi_devices: vec!["k8s.holdfast.dev/claim=u-gpu-5a7c".into()],
            edits: ContainerEdits::default(),
            metadata: String::new(),
        };
        let text = serde_json::to_string(&device).unwrap();
        assert!(
            text.starts_with(
                r#"{"request":"gpu/large","pool":"n1/gpu","device":"gpu-5a7c","id":"GPU-5A7C","#
            ),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<ClaimedDevice>(&text).unwrap(), device);
        let answer = PreparedDevice::from(&device);
        assert_eq!((answer.request.as_str(), &answer.name), ("gpu", &device.allocated.name));
    }
}
