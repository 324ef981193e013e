//! The kubelet's pod-resources API, asked: who holds what, by pod name and container name, without UIDs.
//!
//! Never ask [`PodResources::list`] while an Allocate is under way: the kubelet frees what dead pods held before it
//! answers, and forgets the reservation of that Allocate with it.

use super::proto::podresources_v1 as api;
use super::proto::podresources_v1::pod_resources_lister_client::PodResourcesListerClient;
use super::uds;
use crate::domain::{DeviceId, ListedContainer, ListedPod, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

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
}

impl PodResources {
    /// A client of the kubelet that listens at `socket`, now or later.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        let client = PodResourcesListerClient::new(uds::connect_lazy(socket));
        PodResources { client: client.max_decoding_message_size(RESPONSE_BYTES_MAX) }
    }

    /// Every active pod.
    pub async fn list(&self) -> Result<Vec<ListedPod>, PodResourcesError> {
        let mut client = self.client.clone();
        let request = with_deadline(api::ListPodResourcesRequest {});
        let response = in_time("List", client.list(request)).await?;
        Ok(response.into_inner().pod_resources.into_iter().map(listed).collect())
    }

    /// One active pod; `None` where the kubelet knows none of that name.
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

/// The kubelet sends one message for each id and NUMA node: they are put together by resource.
fn listed(pod: api::PodResources) -> ListedPod {
    let container = |container: api::ContainerResources| {
        let mut devices: BTreeMap<ResourceName, BTreeSet<DeviceId>> = BTreeMap::new();
        for message in container.devices {
            // What is not a resource name was not registered by a device plugin: nothing of ours.
            if let Ok(resource) = message.resource_name.parse() {
                devices.entry(resource).or_default().extend(message.device_ids.into_iter().map(DeviceId::new));
            }
        }
        ListedContainer { name: container.name, devices }
    };
    ListedPod { namespace: pod.namespace, name: pod.name, containers: pod.containers.into_iter().map(container).collect() }
}
