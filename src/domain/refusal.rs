//! Reasons to refuse an Allocate. The kubelet shows the text as the reason of the pod's failure.

use super::device_id::DeviceId;
use super::grant::{AllocId, Grant, GrantState};
use super::health::Reason;
use super::hook::StartBlocked;
use super::object::Object;
use super::resource_name::ResourceName;

/// A request that cannot be granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The id is not in the resource's list.
    #[error(
        "{resource} has no device `{id}`; its list may have changed since the kubelet chose it"
    )]
    Unknown {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
    },
    /// The request contains the id twice.
    #[error("device `{id}` of {resource} is requested twice in one request")]
    Duplicate {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
    },
    /// The device is not healthy.
    #[error("device `{id}` of {resource} is not healthy: {reason}")]
    Unhealthy {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// Why.
        reason: Reason,
    },
    /// No response can be made for the device now. It is in the list only because a container holds
    /// it.
    #[error("device `{id}` of {resource} cannot be granted, because {why}")]
    Unanswerable {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// The reason from the contract.
        why: String,
    },
    /// A required check failed because a file cannot be read now.
    #[error("device `{id}` of {resource} cannot be checked now and is not granted: {why}")]
    Unreadable {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// The unread file, and why.
        why: String,
    },
    /// A container holds the same object by another id.
    #[error("device `{id}` of {resource} is {object}, which {holder} holds as `{held}` of {by}")]
    HeldAsOther {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// The object that both ids lead to.
        object: Object,
        /// The holder: `pod <namespace>/<name>`, or a grant whose pod is not known yet.
        holder: String,
        /// The holder's id for the object.
        held: DeviceId,
        /// The resource of that id.
        by: ResourceName,
    },
    /// Another holder has the device: a claim, or, if a claim wants it, any holder.
    #[error("device `{id}` of {resource} is held by {holder}; {free_when}")]
    Held {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// The holder: a claim, a pod, or a grant whose pod is not known yet.
        holder: String,
        /// When the device is free, as a part of a sentence.
        free_when: &'static str,
        /// The grant of the holder, if it is a container that got the device through the device
        /// plugin.
        container: Option<AllocId>,
    },
    /// A hook must run on the device before the claim gets it.
    #[error("device `{id}` of {resource} is not ready: {blocked}")]
    NotReady {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// The hook.
        blocked: Box<StartBlocked>,
    },
    /// A container of another pod provably has the device.
    #[error(
        "device `{id}` of {resource} is still in use by container `{container}` of pod {pod}, which the kubelet no longer tracks; it is \
         freed when the pod's processes exit"
    )]
    InUse {
        /// The requested resource.
        resource: ResourceName,
        /// The requested id.
        id: DeviceId,
        /// `namespace/name`, or the pod's UID if its name is not known.
        pod: String,
        /// The container.
        container: String,
    },
    /// The request exceeds the limit for one container.
    #[error(
        "a container may have 1 of {resource}, but requests {requested}; requesting more than one \
         share does not grant more of the device, so set the limit to 1"
    )]
    TooMany {
        /// The requested resource.
        resource: ResourceName,
        /// The number of requested ids.
        requested: usize,
    },
    /// The request contains two shares of one device, but each must be of another device.
    #[error(
        "a container gets shares of different devices of {resource}, but `{first}` and `{second}` are shares of the same device; \
         fewer devices have a free share than the container requests"
    )]
    SameDevice {
        /// The requested resource.
        resource: ResourceName,
        /// One id of the device.
        first: DeviceId,
        /// Another id of the device.
        second: DeviceId,
    },
    /// The request names no device.
    #[error("the request for {0} names no device")]
    Empty(ResourceName),
    /// The resource is not configured, or no longer configured.
    #[error("{0} is not offered by this node's configuration")]
    NotOffered(ResourceName),
    /// A file that lists the devices for the container runtime, or for a CNI plugin, cannot be
    /// written.
    #[error("containers with {resource} need the file `{file}`, but it cannot be written: {why}")]
    FileNotWritten {
        /// The requested resource.
        resource: ResourceName,
        /// Its path.
        file: String,
        /// The error of the system.
        why: String,
    },
    /// The kubelet's version of the API has no call before a container starts.
    #[error(
        "{resource} has hooks and needs a call before a container starts (PreStartContainer), \
         which device-plugin API {api} does not support"
    )]
    HooksUnsupported {
        /// The requested resource.
        resource: ResourceName,
        /// The version of the API.
        api: &'static str,
    },
    /// The kubelet's version of the API cannot carry CDI names.
    #[error("{resource} uses CDI devices, which device-plugin API {api} does not support")]
    CdiUnsupported {
        /// The requested resource.
        resource: ResourceName,
        /// The version of the API.
        api: &'static str,
    },
}

impl Refusal {
    /// The refusal of a device that another claim, or another holder than the claim, has.
    #[must_use]
    pub fn held(resource: &ResourceName, id: &DeviceId, holder: &Grant) -> Self {
        let free_when = match holder.state {
            GrantState::Prepared { unprepared_at: None, .. } => {
                "it is free when the kubelet has unprepared that claim"
            }
            GrantState::Prepared { unprepared_at: Some(_), .. } => {
                "that claim is unprepared, and the device is free when no process of its pods runs"
            }
            _ => "it is free when the end of that pod is proven",
        };
        Refusal::Held {
            resource: resource.clone(),
            id: id.clone(),
            holder: holder.holder(),
            free_when,
            container: holder.claim.is_none().then(|| holder.alloc_id.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_is_one_sentence_with_single_spaces() {
        let resource = || "nvidia.com/gpu".parse::<ResourceName>().unwrap();
        let id = || DeviceId::new("GPU-1");
        let refusals = [
            Refusal::Unknown { resource: resource(), id: id() },
            Refusal::Duplicate { resource: resource(), id: id() },
            Refusal::Unhealthy { resource: resource(), id: id(), reason: Reason::Xid },
            Refusal::Unanswerable { resource: resource(), id: id(), why: "it has no node".into() },
            Refusal::InUse {
                resource: resource(),
                id: id(),
                pod: "ml/train-0".into(),
                container: "main".into(),
            },
            Refusal::Held {
                resource: resource(),
                id: id(),
                holder: "claim ml/train".into(),
                free_when: "it is free when the kubelet has unprepared that claim",
                container: None,
            },
            Refusal::NotReady {
                resource: resource(),
                id: id(),
                blocked: Box::new(StartBlocked::Due { former: "pod ml/train-0".into() }),
            },
            Refusal::TooMany { resource: resource(), requested: 2 },
            Refusal::SameDevice { resource: resource(), first: id(), second: id() },
            Refusal::Empty(resource()),
            Refusal::NotOffered(resource()),
            Refusal::FileNotWritten {
                resource: resource(),
                file: "/run/cdi/x.json".into(),
                why: "no space left".into(),
            },
            Refusal::HooksUnsupported { resource: resource(), api: "v1alpha" },
            Refusal::CdiUnsupported { resource: resource(), api: "v1alpha" },
        ];
        for refusal in refusals {
            let text = refusal.to_string();
            assert!(
                !text.contains("  ") && !text.contains('\n') && text.contains("nvidia.com/gpu"),
                "{text}"
            );
        }
    }
}
