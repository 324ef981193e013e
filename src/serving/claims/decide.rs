//! Whether a claim may be prepared, and with which devices.

use super::found::{Found, allocations, is_unchanged};
use super::{ClaimDevices, DecidedClaim, DecidedHold, metadata};
use crate::contract::claim;
use crate::domain::{
    Allocated, AllocatedClaim, ClaimHold, ClaimRef, ClaimedDevice, ConfigSource, DRA_DRIVER,
    Device, DeviceClass, DeviceId, DraName, EditMount, Grant, Health, OpaqueConfig, Reason,
    ResourceName, printable,
};
use crate::slices::attributes::vendors::Vendor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The longest kind of a configuration in an error message, in characters.
const KIND_SHOWN: usize = 80;

/// Why a claim is not prepared. The kubelet shows the text in an event of the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotPrepared {
    /// Its UID cannot be a part of a path.
    #[error("claim {0} has a UID that is not valid")]
    Uid(ClaimRef),
    /// The API server has no such claim, or one of the same name with another UID.
    #[error("claim {0} with this UID no longer exists")]
    Gone(ClaimRef),
    /// No device is allocated to it.
    #[error("claim {0} is not allocated")]
    NotAllocated(ClaimRef),
    /// The kubelet has unprepared it since this call began, so it no longer waits for the answer.
    #[error("claim {0} was unprepared while it was prepared")]
    Unprepared(ClaimRef),
    /// No pod may use it.
    #[error("claim {0} is not reserved for a pod")]
    NotReserved(ClaimRef),
    /// The allocation has devices of other drivers only.
    #[error("claim {0} has no device of this driver")]
    NoDevice(ClaimRef),
    /// A configuration for this driver, which has none.
    #[error(
        "the {of} has the configuration `{kind}` for this driver, which knows no configuration; \
         remove it"
    )]
    UnknownConfig {
        /// `claim ns/name`, or `DeviceClass`.
        of: String,
        /// Its `kind` and `apiVersion`.
        kind: String,
    },
    /// A configuration for the driver of a vendor, in whose place this driver has the device.
    #[error(
        "the {of} has the configuration `{kind}` for the driver {driver}, and device {name} was \
         allocated in place of a device of that driver; Holdfast knows no configuration, and the \
         device would be used without it: remove the configuration"
    )]
    VendorConfig {
        /// `claim ns/name`, or `DeviceClass`.
        of: String,
        /// Its `kind` and `apiVersion`.
        kind: String,
        /// The vendor's driver.
        driver: &'static str,
        /// The device.
        name: DraName,
    },
    /// No resource of this node has a device of this name.
    #[error("device {0} is not a device of this node, or it was removed")]
    NotHere(DraName),
    /// A resource has it that is offered by number.
    #[error(
        "device {name} belongs to {resource}, whose devices are not given to claims (`api` of the \
         resource)"
    )]
    NotForClaims {
        /// The device.
        name: DraName,
        /// The resource.
        resource: ResourceName,
    },
    /// Two devices of the claim would have one CDI name.
    #[error(
        "the claim has two devices named `{0}` in different pools, and their CDI names collide"
    )]
    SameName(String),
    /// The device has failed.
    #[error("device {name} (`{id}` of {resource}) is unhealthy: {reason}")]
    Unhealthy {
        /// The device.
        name: DraName,
        /// Its resource.
        resource: ResourceName,
        /// Its id.
        id: DeviceId,
        /// Why.
        reason: Reason,
    },
    /// A container would lack a part of the device.
    #[error("device {name}: {why}")]
    Unusable {
        /// The device.
        name: DraName,
        /// Why.
        why: String,
    },
    /// The API server did not return the claim in time.
    #[error("the API server did not return claim {claim} in time: {why}")]
    NoAnswer {
        /// The claim.
        claim: ClaimRef,
        /// Its last error.
        why: String,
    },
    /// A device did not become free in time.
    #[error("claim {claim} still waits; the kubelet tries again: {why}")]
    Blocked {
        /// The claim.
        claim: ClaimRef,
        /// What is waited for.
        why: String,
    },
    /// A container has a device of the claim through the device plugin.
    #[error("claim {claim} has lost a device: {why}; {advice}; a new pod gets another device")]
    Lost {
        /// The claim.
        claim: ClaimRef,
        /// The device and the container's pod.
        why: String,
        /// What happens to the pods of the claim, or what to do with them.
        advice: String,
    },
    /// It could not be recorded, so it is not prepared.
    #[error("claim {claim} could not be recorded, so it is not prepared: {why}")]
    NotRecorded {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        why: String,
    },
    /// Its CDI file cannot be written. The record stays for the next try.
    #[error("the CDI file of claim {claim} cannot be written: {why}")]
    NoFile {
        /// The claim.
        claim: ClaimRef,
        /// The error of the system.
        why: String,
    },
}

impl NotPrepared {
    /// The reason in one word, for metrics.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            NotPrepared::Unhealthy { .. } => "unhealthy",
            NotPrepared::Blocked { .. } | NotPrepared::Lost { .. } => "blocked",
            NotPrepared::NoAnswer { .. } => "api_server",
            NotPrepared::NotRecorded { .. }
            | NotPrepared::NoFile { .. }
            | NotPrepared::Unusable { .. } => "error",
            NotPrepared::Uid(_)
            | NotPrepared::Gone(_)
            | NotPrepared::NotAllocated(_)
            | NotPrepared::Unprepared(_)
            | NotPrepared::NotReserved(_)
            | NotPrepared::NoDevice(_)
            | NotPrepared::UnknownConfig { .. }
            | NotPrepared::VendorConfig { .. }
            | NotPrepared::NotHere(_)
            | NotPrepared::NotForClaims { .. }
            | NotPrepared::SameName(_) => "refused",
        }
    }
}

/// Checks that the API server has this claim, allocated with devices of this driver, and reserved
/// for a pod. A claim that is being deleted counts: its pods may still start.
pub(super) fn check<'a>(
    of: &ClaimRef,
    found: Option<&'a AllocatedClaim>,
) -> Result<&'a AllocatedClaim, NotPrepared> {
    let claim = found.filter(|found| found.claim.uid == of.uid);
    let claim = claim.ok_or_else(|| NotPrepared::Gone(of.clone()))?;
    if !claim.is_allocated {
        return Err(NotPrepared::NotAllocated(of.clone()));
    }
    if claim.devices.is_empty() {
        return Err(NotPrepared::NoDevice(of.clone()));
    }
    // Without it, the call is a late one for a pod that has ended.
    if claim.reserved_for.is_empty() {
        return Err(NotPrepared::NotReserved(of.clone()));
    }
    match claim.configs.iter().find(|config| config.driver == DRA_DRIVER) {
        None => Ok(claim),
        Some(config) => {
            Err(NotPrepared::UnknownConfig { of: source(of, config), kind: kind(config) })
        }
    }
}

/// Where a configuration is.
fn source(of: &ClaimRef, config: &OpaqueConfig) -> String {
    match config.source {
        ConfigSource::FromClass => "DeviceClass".to_owned(),
        ConfigSource::FromClaim => format!("claim {of}"),
    }
}

/// Refuses a device in whose place a vendor's driver would have applied a configuration.
fn check_vendor(
    claim: &AllocatedClaim,
    of: &Allocated,
    device: &Device,
) -> Result<(), NotPrepared> {
    let Some(vendor) = Vendor::of(device) else { return Ok(()) };
    // An entry names a request with all of its alternatives, or one alternative.
    let is_about_it = |config: &&OpaqueConfig| {
        let is_it = |request: &String| *request == of.request || request == of.request_name();
        config.driver == vendor.driver()
            && (config.requests.is_empty() || config.requests.iter().any(is_it))
    };
    match claim.configs.iter().find(is_about_it) {
        None => Ok(()),
        Some(config) => Err(NotPrepared::VendorConfig {
            of: source(&claim.claim, config),
            kind: kind(config),
            driver: vendor.driver(),
            name: of.name.clone(),
        }),
    }
}

/// The kind of a configuration as a reader knows it, `GpuConfig of x.example.com/v1`. Its text is
/// a user's.
fn kind(config: &OpaqueConfig) -> String {
    let document: Option<serde_json::Value> =
        serde_json::from_slice(config.parameters.as_bytes()).ok();
    let text = |key: &str| {
        let text = document.as_ref()?.get(key)?.as_str()?;
        Some(printable(text).chars().take(KIND_SHOWN).collect::<String>())
    };
    match (text("kind"), text("apiVersion")) {
        (Some(kind), Some(version)) => format!("{kind} of {version}"),
        (Some(kind), None) => kind,
        _ => "without a kind".into(),
    }
}

/// Decides which devices the claim gets, and what its containers get of them. `recorded` is the
/// record of this allocation from a former boot. Its devices are not checked as new ones are: the
/// claim keeps them. One whose resource was removed is as it was, if its nodes still lead to it.
pub(super) fn decide(
    claim: &AllocatedClaim,
    allocation: &str,
    devices: &dyn ClaimDevices,
    grants: &[Arc<Grant>],
    name_of: &dyn Fn(&DeviceId, DeviceClass) -> DraName,
    recorded: Option<DecidedClaim>,
) -> Result<DecidedClaim, NotPrepared> {
    let inventory = devices.inventory();
    let mut allocated: Vec<&Allocated> = claim.devices.iter().collect();
    allocated.sort_unstable();
    let all = allocations(claim, &allocated, &inventory, grants, name_of);
    let mut pools: BTreeMap<&str, &str> = BTreeMap::new();
    let mut holds: BTreeMap<ResourceName, DecidedHold> = BTreeMap::new();
    for (of, found) in allocated.iter().zip(&all) {
        if *pools.entry(&of.name.device).or_insert(&of.name.pool) != of.name.pool {
            return Err(NotPrepared::SameName(of.name.device.clone()));
        }
        let found = match found {
            // The contract of a removed resource is not known.
            Some(found) if recorded.is_none() || !found.offering.spec.is_orphan() => found,
            found if recorded.as_ref().is_some_and(|it| is_unchanged(it, of, *found, devices)) => {
                continue;
            }
            _ => return Err(NotPrepared::NotHere(of.name.clone())),
        };
        check_device(claim, of, *found, recorded.is_some())?;
        let of_request: Vec<(&Allocated, Found<'_>)> = (allocated.iter().zip(&all))
            .filter(|(it, _)| it.request == of.request)
            .filter_map(|(it, found)| Some((*it, (*found)?)))
            .collect();
        // A container has all devices of a request. What is about them is recorded once.
        let is_first = of_request.first().is_some_and(|(first, _)| first == of);
        let lists = is_first && claim.is_by_number;
        let together: Vec<&Device> = of_request
            .iter()
            .map(|(_, it)| it)
            .filter(|it| lists && it.offering.spec.name == found.offering.spec.name)
            .map(|it| &*it.offered.device)
            .collect();
        let own = name_of(found.id, found.offered.device.class).device;
        let file = if is_first {
            metadata_file(claim, of, &own, &of_request, devices, name_of)
        } else {
            None
        };
        let (device, granted) = one(&claim.claim, of, &own, *found, &together, file, devices)?;
        let spec = &found.offering.spec;
        let hold = holds.entry(spec.name.clone()).or_insert_with(|| DecidedHold {
            resource: spec.name.clone(),
            devices: Vec::new(),
            hold: ClaimHold {
                claim: claim.claim.clone(),
                allocation: allocation.to_owned(),
                devices: Vec::new(),
            },
        });
        hold.hold.devices.push(device);
        if !hold.devices.iter().any(|known| known.id == granted.id) {
            hold.devices.push(granted);
        }
    }
    if let Some(recorded) = recorded.filter(|_| holds.is_empty()) {
        return Ok(recorded);
    }
    Ok(DecidedClaim {
        claim: claim.claim.clone(),
        reserved_for: claim.reserved_for.clone(),
        holds: holds.into_values().collect(),
    })
}

/// The file with the metadata of a request, and its text, for the first device of it.
fn metadata_file(
    claim: &AllocatedClaim,
    of: &Allocated,
    own: &str,
    of_request: &[(&Allocated, Found<'_>)],
    devices: &dyn ClaimDevices,
    name_of: &dyn Fn(&DeviceId, DeviceClass) -> DraName,
) -> Option<(EditMount, String)> {
    let file = claim::metadata_file_name(&claim.claim.uid, own)?;
    let mount = metadata::mount(claim, of, devices.metadata_path(&file)?)?;
    let described = of_request.iter().map(|(of, Found { offering, id, offered })| {
        // As the slice has them, where a part of a device has the name of the device.
        let is_part = of.name != name_of(id, offered.device.class);
        let whole = offering.spec.divided(id).filter(|_| is_part);
        (&of.name, devices.attributes(offering, whole.as_ref().unwrap_or(id), offered))
    });
    Some((mount, metadata::text(claim, &of.request, described)))
}

/// Checks that a claim may have this device, or that a recorded device is present with its driver.
fn check_device(
    claim: &AllocatedClaim,
    of: &Allocated,
    Found { offering, id, offered }: Found<'_>,
    is_recorded: bool,
) -> Result<(), NotPrepared> {
    let (name, resource) = (of.name.clone(), offering.spec.name.clone());
    if !is_recorded {
        check_vendor(claim, of, &offered.device)?;
        if !offering.spec.api.serves_claims() {
            return Err(NotPrepared::NotForClaims { name, resource });
        }
    }
    match offered.health {
        Health::Unhealthy(reason)
            if !may_be_prepared(reason) && (!is_recorded || reason.is_of_presence()) =>
        {
            Err(NotPrepared::Unhealthy { name, resource, id: id.clone(), reason })
        }
        _ => Ok(()),
    }
}

/// Decides what containers get of one device.
fn one(
    claim: &ClaimRef,
    of: &Allocated,
    own: &str,
    Found { offering, id, offered }: Found<'_>,
    together: &[&Device],
    metadata: Option<(EditMount, String)>,
    devices: &dyn ClaimDevices,
) -> Result<(ClaimedDevice, crate::domain::GrantedDevice), NotPrepared> {
    let (mut edits, granted) = devices
        .claimed(offering, id, offered, together)
        .map_err(|why| NotPrepared::Unusable { name: of.name.clone(), why })?;
    let (mount, text) = metadata.unzip();
    edits.mounts.extend(mount);
    let claimed = claim::claimed(claim, of.clone(), own, id.clone(), edits);
    Ok((ClaimedDevice { metadata: text.unwrap_or_default(), ..claimed }, granted))
}

/// Whether a device with this reason may be prepared: the failure may end soon, or the ledger knows
/// what the claim has to wait for.
fn may_be_prepared(reason: Reason) -> bool {
    let is_soft = !reason.timings().fail_after.is_zero();
    is_soft || matches!(reason, Reason::HeldAsOther | Reason::HookPending | Reason::HookFailed)
}
