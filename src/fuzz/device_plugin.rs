//! Messages of the device-plugin API, and of the pod-resources API.

use super::Seeds;
use super::input::Input;
use crate::domain::{
    AllocId, ApiCapabilities, ContainerEdits, Device, DeviceClass, DeviceId, Health, Offered,
    Offering, ResourceName, ResourceSpec, is_unprintable,
};
use crate::kubelet::api::{Plugin, v1alpha, v1beta1};
use crate::kubelet::pod_resources;
use crate::kubelet::proto::podresources_v1;
use crate::kubelet::proto::v1alpha as api_alpha;
use crate::kubelet::proto::v1alpha::device_plugin_server::DevicePlugin as _;
use crate::kubelet::proto::v1beta1 as api_beta;
use crate::kubelet::proto::v1beta1::device_plugin_server::DevicePlugin as _;
use crate::serving::placement;
use futures_util::FutureExt as _;
use futures_util::stream::BoxStream;
use prost::Message as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use tonic::{Request, Status};

/// A plugin that prefers as the daemon does, and answers with the ids that it got.
#[derive(Debug)]
struct Echo {
    offering: Offering,
    asked: Mutex<Vec<Vec<DeviceId>>>,
}

/// Ids that are offered.
const OFFERED: [&str; 6] = ["a", "b", "c", "d::1", "d::2", "e"];

impl Echo {
    fn new() -> Self {
        let name = "example.com/gpu".parse().expect("a name");
        let spec = Arc::new(ResourceSpec::new(name, DeviceClass::Other));
        let device = |(number, id): (u32, &&str)| {
            let device = device(id, number / 3);
            (device.id.clone(), Offered { device: Arc::new(device), health: Health::Healthy })
        };
        let devices = (0..).zip(&OFFERED).map(device).collect();
        Echo { offering: Offering { spec, devices }, asked: Mutex::default() }
    }
}

fn device(id: &str, node: u32) -> Device {
    Device {
        id: DeviceId::new(id),
        key: format!("dev:/dev/{id}"),
        class: DeviceClass::Other,
        pci: None,
        numa_nodes: vec![node],
        nodes: Vec::new(),
        attributes: std::iter::empty::<(&'static str, &str)>().collect(),
    }
}

#[tonic::async_trait]
impl Plugin for Echo {
    fn lists(&self) -> Result<BoxStream<'static, Arc<Offering>>, Status> {
        let once = futures_util::stream::once(std::future::ready(Arc::new(self.offering.clone())));
        Ok(Box::pin(once))
    }

    async fn allocate(
        &self,
        containers: Vec<Vec<DeviceId>>,
        _: ApiCapabilities,
    ) -> Result<Vec<ContainerEdits>, Status> {
        let edits = |ids: &Vec<DeviceId>| {
            let envs = ids.iter().enumerate();
            let envs = envs.map(|(number, id)| (format!("ID_{number}"), id.to_string())).collect();
            ContainerEdits { envs, ..ContainerEdits::default() }
        };
        let answers = containers.iter().map(edits).collect();
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).extend(containers);
        Ok(answers)
    }

    fn preferred(
        &self,
        available: Vec<DeviceId>,
        must_include: Vec<DeviceId>,
        size: usize,
    ) -> Result<Vec<DeviceId>, Status> {
        // The kubelet asks for a few: the size of the search is bounded elsewhere.
        let size = size.min(16);
        let chosen = placement::choose(&self.offering, &available, &must_include, size)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let known: BTreeSet<&DeviceId> = available.iter().chain(&must_include).collect();
        assert_eq!(chosen.len(), size, "as many as were requested");
        assert_eq!(chosen.iter().collect::<BTreeSet<_>>().len(), size, "each once");
        assert!(chosen.iter().all(|id| known.contains(id)), "only available ones");
        assert!(must_include.iter().all(|id| chosen.contains(id)), "with those that must be");
        Ok(chosen)
    }

    fn needs_pre_start(&self) -> bool {
        true
    }

    async fn pre_start(&self, _: Vec<DeviceId>) -> Result<(), Status> {
        Ok(())
    }
}

/// Messages of the device-plugin API, and of the pod-resources API. The first byte chooses the
/// message.
pub fn device_plugin(data: &[u8]) {
    let mut input = Input::new(data);
    let choice = input.small(6);
    let bytes = input.rest();
    match choice {
        0 => allocate(bytes),
        1 => preferred(bytes),
        2 => {
            let Ok(response) = api_beta::ContainerAllocateResponse::decode(bytes) else { return };
            let edits = v1beta1::edits(response.clone());
            assert_eq!(v1beta1::response(edits), response, "an answer is read without a loss");
        }
        3 => {
            let Ok(request) = api_alpha::AllocateRequest::decode(bytes) else { return };
            let plugin = Arc::new(Echo::new());
            let service = v1alpha::Service(Arc::clone(&plugin) as Arc<dyn Plugin>);
            let answer = service.allocate(Request::new(request.clone())).now_or_never();
            let answer = answer.expect("no wait").expect("an answer").into_inner();
            let envs: Vec<String> = answer.envs.into_values().collect();
            assert_eq!(envs.len(), request.devices_i_ds.len(), "every id reaches the plugin");
        }
        4 => {
            let Ok(pod) = podresources_v1::PodResources::decode(bytes) else { return };
            let listed = pod_resources::listed(pod.clone());
            let ids = pod.containers.iter().flat_map(|container| &container.devices);
            let ids: BTreeSet<&str> = ids
                .filter(|devices| devices.resource_name.parse::<ResourceName>().is_ok())
                .flat_map(|devices| devices.device_ids.iter().map(String::as_str))
                .collect();
            let found = listed.containers.iter().flat_map(|container| container.devices.values());
            let found: BTreeSet<&str> = found.flatten().map(DeviceId::as_str).collect();
            assert_eq!(found, ids, "every id that the kubelet lists");
            assert_eq!(listed.containers.len(), pod.containers.len(), "every container");
        }
        _ => {
            let Ok(request) = api_beta::PreStartContainerRequest::decode(bytes) else { return };
            let service = v1beta1::Service(Arc::new(Echo::new()));
            let answer = service.pre_start_container(Request::new(request)).now_or_never();
            assert!(answer.is_some_and(|answer| answer.is_ok()), "an answer");
        }
    }
}

fn allocate(bytes: &[u8]) {
    let Ok(request) = api_beta::AllocateRequest::decode(bytes) else { return };
    let plugin = Arc::new(Echo::new());
    let service = v1beta1::Service(Arc::clone(&plugin) as Arc<dyn Plugin>);
    let answer = service.allocate(Request::new(request.clone())).now_or_never();
    let answer = answer.expect("no wait").expect("an answer").into_inner();
    let containers = request.container_requests;
    assert_eq!(answer.container_responses.len(), containers.len(), "one answer for each container");
    let asked = plugin.asked.lock().unwrap_or_else(PoisonError::into_inner);
    for ((container, response), asked) in
        containers.iter().zip(answer.container_responses).zip(asked.iter())
    {
        let ids: Vec<&str> = asked.iter().map(DeviceId::as_str).collect();
        assert_eq!(ids, container.devices_ids, "every id reaches the plugin, in its order");
        assert_eq!(response.envs.len(), ids.len(), "the answers are in the order of the request");
    }
}

fn preferred(bytes: &[u8]) {
    let Ok(request) = api_beta::PreferredAllocationRequest::decode(bytes) else { return };
    // A search costs more than a message.
    if bytes.len() > 400 {
        return;
    }
    let service = v1beta1::Service(Arc::new(Echo::new()));
    let count = request.container_requests.len();
    let answer = service.get_preferred_allocation(Request::new(request)).now_or_never();
    match answer.expect("no wait") {
        Ok(answer) => assert_eq!(answer.into_inner().container_responses.len(), count),
        Err(status) => assert!(!status.message().contains(is_unprintable), "{status}"),
    }
}

pub(super) fn sample_edits() -> ContainerEdits {
    use crate::domain::{EditDevice, EditMount};
    let text = |text: &str| text.to_owned();
    ContainerEdits {
        envs: BTreeMap::from([(text("GPU"), text("0"))]),
        mounts: vec![EditMount { host: text("/a"), container: text("/b"), read_only: true }],
        devices: vec![EditDevice {
            host: text("/dev/a"),
            container: text("/dev/b"),
            permissions: text("rw"),
        }],
        annotations: BTreeMap::from([(text(AllocId::ANNOTATION), text("alloc-7"))]),
        cdi_devices: vec![text("vendor.com/gpu=0")],
    }
}

/// One message of each kind.
pub(super) fn seeds() -> Seeds {
    let ids = |ids: &[&str]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
    let allocate = api_beta::AllocateRequest {
        container_requests: vec![
            api_beta::ContainerAllocateRequest { devices_ids: ids(&["a", "b"]) },
            api_beta::ContainerAllocateRequest { devices_ids: ids(&["c"]) },
        ],
    };
    let preferred = api_beta::PreferredAllocationRequest {
        container_requests: vec![api_beta::ContainerPreferredAllocationRequest {
            available_device_i_ds: ids(&OFFERED),
            must_include_device_i_ds: ids(&["d::1"]),
            allocation_size: 3,
        }],
    };
    let old = api_alpha::AllocateRequest { devices_i_ds: ids(&["a", "b"]) };
    let devices = podresources_v1::ContainerDevices {
        resource_name: "example.com/gpu".into(),
        device_ids: ids(&["a", "b"]),
        topology: None,
    };
    let pod = podresources_v1::PodResources {
        name: "pod".into(),
        namespace: "team".into(),
        containers: vec![podresources_v1::ContainerResources {
            name: "main".into(),
            devices: vec![devices],
            cpu_ids: vec![1, 2],
            ..podresources_v1::ContainerResources::default()
        }],
    };
    let start = api_beta::PreStartContainerRequest { devices_ids: ids(&["a"]) };
    let tagged = |tag: u8, bytes: Vec<u8>| [&[tag], bytes.as_slice()].concat();
    vec![
        ("allocate", tagged(0, allocate.encode_to_vec())),
        ("preferred", tagged(1, preferred.encode_to_vec())),
        ("answer", tagged(2, v1beta1::response(sample_edits()).encode_to_vec())),
        ("allocate-v1alpha", tagged(3, old.encode_to_vec())),
        ("pod", tagged(4, pod.encode_to_vec())),
        ("pre-start", tagged(5, start.encode_to_vec())),
    ]
}
