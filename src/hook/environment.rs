//! The environment variables of a command.

use crate::domain::{AllocId, Device, Phase, PodRef, ResourceName};
use crate::host::HostRoot;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where a command without a path finds its programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The device that a hook is run for, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occasion {
    /// The phase.
    pub phase: Phase,
    /// The resource.
    pub resource: ResourceName,
    /// The device; for a pool, the whole pool.
    pub device: Arc<Device>,
    /// The grant that holds the device, or held it last; `None` if several hold it.
    pub alloc_id: Option<AllocId>,
    /// The pod of that grant, where it is known.
    pub pod: Option<PodRef>,
    /// Its container, where it is known.
    pub container: Option<String>,
}

/// The variables of a command. Unknown values have no variable.
///
/// | variable | value |
/// | --- | --- |
/// | `HOLDFAST_PHASE` | `before_start`, `after_release` or `check` |
/// | `HOLDFAST_RESOURCE` | such as `nvidia.com/gpu` |
/// | `HOLDFAST_DEVICE_ID`, `HOLDFAST_DEVICE_KEY` | as `discover` shows them; for a pool, its name |
/// | `HOLDFAST_PCI_ADDRESS` | such as `0000:18:00.0` |
/// | `HOLDFAST_DEVICE_NODES` | the nodes of `/dev`, one in each line |
/// | `HOLDFAST_ALLOC_ID` | the grant that holds it, or held it last |
/// | `HOLDFAST_POD_UID`, `HOLDFAST_POD_NAMESPACE` | the pod of that grant |
/// | `HOLDFAST_POD_NAME`, `HOLDFAST_CONTAINER` | the pod's name, and the container of that grant |
/// | `HOLDFAST_HOST_ROOT` | the root of the host's `/sys` and `/dev` |
#[must_use]
pub fn environment(occasion: &Occasion, host_root: &HostRoot) -> BTreeMap<String, String> {
    let Occasion { phase, resource, device, alloc_id, pod, container } = occasion;
    let nodes: Vec<&str> = device.nodes.iter().map(|node| node.host.as_str()).collect();
    let pod = pod.as_ref();
    let variables = [
        ("PHASE", Some(phase.to_string())),
        ("RESOURCE", Some(resource.to_string())),
        ("DEVICE_ID", Some(device.id.to_string())),
        ("DEVICE_KEY", Some(device.key.clone())),
        ("PCI_ADDRESS", device.pci.as_ref().map(|pci| pci.address.to_string())),
        ("DEVICE_NODES", Some(nodes.join("\n")).filter(|nodes| !nodes.is_empty())),
        ("ALLOC_ID", alloc_id.as_ref().map(ToString::to_string)),
        ("POD_UID", pod.map(|pod| pod.uid.clone())),
        ("POD_NAMESPACE", pod.and_then(|pod| pod.namespace.clone())),
        ("POD_NAME", pod.and_then(|pod| pod.name.clone())),
        ("CONTAINER", container.clone()),
        ("HOST_ROOT", host_root.path("").to_str().map(str::to_owned)),
    ];
    let known = variables
        .into_iter()
        .filter_map(|(name, value)| Some((format!("HOLDFAST_{name}"), value?)));
    known.chain([("PATH".to_owned(), PATH.to_owned())]).collect()
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use crate::domain::{Attributes, DeviceClass, DeviceId, DeviceNode, PciFunction};

    /// A GPU after its release.
    pub(in crate::hook) fn occasion() -> Occasion {
        let device = Device {
            id: DeviceId::new("GPU-1"),
            key: "pci:0000:18:00.0/10de:2330".into(),
            class: DeviceClass::Gpu,
            pci: Some(Box::new(PciFunction::at("0000:18:00.0".parse().unwrap()))),
            numa_nodes: Vec::new(),
            nodes: vec![DeviceNode::at("/dev/nvidia0"), DeviceNode::at("/dev/nvidiactl")],
            attributes: Attributes::default(),
        };
        Occasion {
            phase: Phase::AfterRelease,
            resource: "nvidia.com/gpu".parse().unwrap(),
            device: Arc::new(device),
            alloc_id: Some(AllocId::new("a-1")),
            pod: Some(PodRef { uid: "u1".into(), namespace: Some("ml".into()), name: None }),
            container: Some("main".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::occasion;
    use super::*;

    #[test]
    fn the_environment_has_the_known_facts_only() {
        let variables: Vec<String> = environment(&occasion(), &HostRoot::new("/host"))
            .into_iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        assert_eq!(
            variables,
            [
                "HOLDFAST_ALLOC_ID=a-1",
                "HOLDFAST_CONTAINER=main",
                "HOLDFAST_DEVICE_ID=GPU-1",
                "HOLDFAST_DEVICE_KEY=pci:0000:18:00.0/10de:2330",
                "HOLDFAST_DEVICE_NODES=/dev/nvidia0\n/dev/nvidiactl",
                "HOLDFAST_HOST_ROOT=/host/",
                "HOLDFAST_PCI_ADDRESS=0000:18:00.0",
                "HOLDFAST_PHASE=after_release",
                "HOLDFAST_POD_NAMESPACE=ml",
                "HOLDFAST_POD_UID=u1",
                "HOLDFAST_RESOURCE=nvidia.com/gpu",
                &format!("PATH={PATH}"),
            ]
        );
    }
}
