//! Why an Allocate is refused. The kubelet shows the text as the reason of the pod's failure.

use super::device::DeviceId;
use super::health::Reason;
use super::object::Object;
use super::resource::ResourceName;

/// A request that cannot be granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The id is not in the resource's list.
    #[error("{resource} has no device `{id}`; its list may have changed since the kubelet chose it")]
    Unknown {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
    },
    /// The id comes twice in one request.
    #[error("device `{id}` of {resource} is asked for twice in one request")]
    Duplicate {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
    },
    /// The device is not healthy.
    #[error("device `{id}` of {resource} is not healthy: {reason}")]
    Unhealthy {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
        /// Why.
        reason: Reason,
    },
    /// No container could be told of it now: it is in the list because somebody holds it.
    #[error("device `{id}` of {resource} cannot be given, because {why}")]
    Unanswerable {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
        /// What the contract says.
        why: String,
    },
    /// Something that has to be checked before cannot be read now.
    #[error("device `{id}` of {resource} cannot be checked now, so it is not given: {why}")]
    Unreadable {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
        /// What could not be read.
        why: String,
    },
    /// A container has the same thing by another id.
    #[error("device `{id}` of {resource} is {object}, which {holder} holds as `{held}` of {by}")]
    HeldAsOther {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
        /// What both ids lead to.
        object: Object,
        /// Who has it: `pod <namespace>/<name>`, or a grant whose pod is not known yet.
        holder: String,
        /// The id that it has it by.
        held: DeviceId,
        /// The resource of that.
        by: ResourceName,
    },
    /// A container of another pod has it, provably.
    #[error(
        "device `{id}` of {resource} is still in use by container `{container}` of pod {pod}, which the kubelet no longer tracks; it is \
         freed when the processes of that pod have ended"
    )]
    InUse {
        /// The resource asked for.
        resource: ResourceName,
        /// The id asked for.
        id: DeviceId,
        /// `namespace/name`, or the pod's UID where its name is not known.
        pod: String,
        /// The container.
        container: String,
    },
    /// More is asked for than one container may have.
    #[error("a container may have 1 of {resource}, but {asked} are asked for: more shares are no more of the device; set the limit to 1")]
    TooMany {
        /// The resource asked for.
        resource: ResourceName,
        /// How many ids.
        asked: usize,
    },
    /// Two shares of one device, where each must be of another.
    #[error(
        "a container gets shares of different devices of {resource}, but `{first}` and `{second}` are of one: fewer devices have a free \
         share than are asked for"
    )]
    SameDevice {
        /// The resource asked for.
        resource: ResourceName,
        /// One id of the device.
        first: DeviceId,
        /// Another one.
        second: DeviceId,
    },
    /// The request names no device.
    #[error("the request for {0} names no device")]
    Empty(ResourceName),
    /// The resource is not configured (any more).
    #[error("{0} is not offered by this node's configuration")]
    NotOffered(ResourceName),
    /// A file that tells the container runtime, or a CNI plugin, of the devices is not there.
    #[error("{resource} needs the file `{file}` for its containers, which cannot be written: {why}")]
    FileNotWritten {
        /// The resource asked for.
        resource: ResourceName,
        /// Its path.
        file: String,
        /// What the system says.
        why: String,
    },
    /// The kubelet's version of the API has no call before a container starts.
    #[error(
        "{resource} has hooks that come before a container starts, and the kubelet's device-plugin API {api} has no call before a container starts"
    )]
    NoRoomForHook {
        /// The resource asked for.
        resource: ResourceName,
        /// The version of the API.
        api: &'static str,
    },
    /// The kubelet's version of the API cannot tell what the container needs.
    #[error("{resource} reaches its containers by CDI names, which the kubelet's device-plugin API {api} cannot tell")]
    NoRoomForCdi {
        /// The resource asked for.
        resource: ResourceName,
        /// The version of the API.
        api: &'static str,
    },
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
            Refusal::InUse { resource: resource(), id: id(), pod: "ml/train-0".into(), container: "main".into() },
            Refusal::TooMany { resource: resource(), asked: 2 },
            Refusal::SameDevice { resource: resource(), first: id(), second: id() },
            Refusal::Empty(resource()),
            Refusal::NotOffered(resource()),
            Refusal::FileNotWritten { resource: resource(), file: "/run/cdi/x.json".into(), why: "no space left".into() },
            Refusal::NoRoomForHook { resource: resource(), api: "v1alpha" },
            Refusal::NoRoomForCdi { resource: resource(), api: "v1alpha" },
        ];
        for refusal in refusals {
            let text = refusal.to_string();
            assert!(!text.contains("  ") && !text.contains('\n') && text.contains("nvidia.com/gpu"), "{text}");
        }
    }
}
