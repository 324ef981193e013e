//! The kubelet's pod-resources API, asked: who holds what, by pod name and container name, without UIDs.
//!
//! Kubelets before 1.20 have v1alpha1 alone, which lists and nothing else: pods that have ended among the others, as v1
//! does before 1.34, and application containers only. That a container is not in a listing proves nothing in either
//! version, v1 leaves out the init containers; the sidecars that v1alpha1 would leave out as well came with 1.28.
//!
//! Never ask [`PodResources::list`] while an Allocate is under way: the kubelet frees what dead pods held before it
//! answers, and forgets the reservation of that Allocate with it.

use super::proto::podresources_v1 as api;
use super::proto::podresources_v1::pod_resources_lister_client::PodResourcesListerClient;
use super::proto::podresources_v1alpha1 as api_v1alpha1;
use super::proto::podresources_v1alpha1::pod_resources_lister_client::PodResourcesListerClient as ClientV1Alpha1;
use super::uds;
use crate::domain::{DeviceId, ListedContainer, ListedPod, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::RwLock;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// How long an Allocate may have to wait for a listing that is under way.
const LIST_WHEN_IDLE_DEADLINE: Duration = Duration::from_millis(500);

/// A busy kubelet answers in milliseconds; one that takes longer is asked again later.
const DEADLINE: Duration = Duration::from_secs(2);

/// A node of 110 pods with 64 devices each stays below 1 MiB; tonic's own limit of 4 MiB leaves too little room.
const RESPONSE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The kubelet could not be asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PodResourcesError {
    /// It did not answer in time.
    #[error("the kubelet did not answer `{method}` within {DEADLINE:?}")]
    Late {
        /// The called method.
        method: &'static str,
    },
    /// It answered with an error, or does not listen.
    #[error("the kubelet refused `{method}`")]
    Refused {
        /// The called method.
        method: &'static str,
        /// What it answered.
        #[source]
        status: Box<Status>,
    },
}

/// The client. It connects with its first call, and again when the kubelet was restarted.
#[derive(Debug, Clone)]
pub struct PodResources {
    client: PodResourcesListerClient<Channel>,
    fallback: ClientV1Alpha1<Channel>,
}

impl PodResources {
    /// A client of the kubelet that listens at `socket`, now or later.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        let channel = uds::connect_lazy(socket);
        PodResources {
            client: PodResourcesListerClient::new(channel.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            fallback: ClientV1Alpha1::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX),
        }
    }

    /// Every active pod; of an older kubelet also those that have ended. v1alpha1 where the kubelet has no v1: it is asked
    /// for v1 every time, so that an upgraded one is noticed.
    pub async fn list(&self) -> Result<Vec<ListedPod>, PodResourcesError> {
        let (mut client, mut fallback) = (self.client.clone(), self.fallback.clone());
        match in_time("List", client.list(with_deadline(api::ListPodResourcesRequest {}))).await {
            Ok(response) => Ok(response.into_inner().pod_resources.into_iter().map(listed).collect()),
            Err(PodResourcesError::Refused { status, .. }) if status.code() == Code::Unimplemented => {
                let request = with_deadline(api_v1alpha1::ListPodResourcesRequest {});
                let response = in_time("List of v1alpha1", fallback.list(request)).await?;
                Ok(response.into_inner().pod_resources.into_iter().map(listed_v1alpha1).collect())
            }
            Err(error) => Err(error),
        }
    }

    /// The listing, unless an Allocate is under way or the kubelet does not answer at once. Allocates hold `gate`: the kubelet
    /// frees what dead pods held before it answers, and forgets with it what it has just reserved. An Allocate that comes
    /// meanwhile waits for the listing.
    pub async fn list_when_idle(&self, gate: &RwLock<()>) -> Option<Vec<ListedPod>> {
        let _gate = gate.try_write().ok()?;
        match tokio::time::timeout(LIST_WHEN_IDLE_DEADLINE, self.list()).await {
            Ok(Ok(pods)) => Some(pods),
            Ok(Err(error)) => {
                tracing::debug!(%error, "no pod listing");
                None
            }
            Err(_) => None,
        }
    }

    /// Every healthy id that the kubelet has, held ones too, by resource; resources without one are left out. Frees nothing.
    /// Kubelets before 1.23 do not know the call, or have it turned off: there this is refused.
    pub async fn allocatable(&self) -> Result<BTreeMap<ResourceName, BTreeSet<DeviceId>>, PodResourcesError> {
        let mut client = self.client.clone();
        let call = client.get_allocatable_resources(with_deadline(api::AllocatableResourcesRequest {}));
        let response = in_time("GetAllocatableResources", call).await?.into_inner();
        Ok(by_resource(response.devices.into_iter().map(|found| (found.resource_name, found.device_ids))))
    }

    /// One active pod; `None` where the kubelet knows none of that name. v1alpha1 has no such call: there this is refused.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Option<ListedPod>, PodResourcesError> {
        let mut client = self.client.clone();
        let request = api::GetPodResourcesRequest { pod_name: name.to_owned(), pod_namespace: namespace.to_owned() };
        match in_time("Get", client.get(with_deadline(request))).await {
            Ok(response) => Ok(response.into_inner().pod_resources.map(listed)),
            // The kubelet has no code of its own for a missing pod.
            Err(PodResourcesError::Refused { status, .. }) if status.code() == Code::Unknown && status.message().ends_with("not found") => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

fn with_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

/// The deadline of the request reaches the kubelet; this one also holds when nobody reads the connection.
async fn in_time<T>(method: &'static str, call: impl Future<Output = Result<T, Status>>) -> Result<T, PodResourcesError> {
    let answer = tokio::time::timeout(DEADLINE, call).await.map_err(|_elapsed| PodResourcesError::Late { method })?;
    answer.map_err(|status| PodResourcesError::Refused { method, status: Box::new(status) })
}

fn listed(pod: api::PodResources) -> ListedPod {
    let devices = |found: Vec<api::ContainerDevices>| found.into_iter().map(|found| (found.resource_name, found.device_ids));
    let container = |found: api::ContainerResources| {
        // Of processors the kubelet has 0 and above.
        let cpus = found.cpu_ids.into_iter().filter_map(|cpu| u32::try_from(cpu).ok()).collect();
        ListedContainer { name: found.name, devices: by_resource(devices(found.devices)), cpus }
    };
    ListedPod { namespace: pod.namespace, name: pod.name, containers: pod.containers.into_iter().map(container).collect() }
}

fn listed_v1alpha1(pod: api_v1alpha1::PodResources) -> ListedPod {
    let devices = |found: Vec<api_v1alpha1::ContainerDevices>| found.into_iter().map(|found| (found.resource_name, found.device_ids));
    let container = |found: api_v1alpha1::ContainerResources| ListedContainer {
        name: found.name,
        devices: by_resource(devices(found.devices)),
        cpus: BTreeSet::new(),
    };
    ListedPod { namespace: pod.namespace, name: pod.name, containers: pod.containers.into_iter().map(container).collect() }
}

/// The kubelet sends one message for each id and NUMA node: they are put together by resource.
fn by_resource(messages: impl Iterator<Item = (String, Vec<String>)>) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
    let mut devices: BTreeMap<ResourceName, BTreeSet<DeviceId>> = BTreeMap::new();
    for (resource, ids) in messages {
        // What is not a resource name was not registered by a device plugin: nothing of ours.
        if let Ok(resource) = resource.parse() {
            devices.entry(resource).or_default().extend(ids.into_iter().map(DeviceId::new));
        }
    }
    devices
}
