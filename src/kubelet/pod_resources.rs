//! A client of the kubelet's pod-resources API: the devices of containers by pod name and container
//! name, without UIDs.
//!
//! Kubelets before 1.20 have only v1alpha1, and of its calls only List. It lists pods that have
//! ended too, as v1 does before 1.34, and application containers only. A missing container proves
//! nothing in either version, because v1 leaves out init containers. v1alpha1 would also leave out
//! sidecars, but those came with 1.28.
//!
//! Never call [`PodResources::list`] while an Allocate is in flight. Before the kubelet answers it,
//! it frees the devices of dead pods, and forgets the reservation of that Allocate with them. An
//! Allocate of another plugin cannot be seen, so [`PodResources::get`] is preferred, which frees
//! nothing.

use super::proto::podresources_v1 as api;
use super::proto::podresources_v1::pod_resources_lister_client::PodResourcesListerClient;
use super::proto::podresources_v1alpha1 as api_v1alpha1;
use super::proto::podresources_v1alpha1::pod_resources_lister_client::PodResourcesListerClient as ClientV1Alpha1;
use super::uds;
use crate::domain::{DeviceId, ListedContainer, ListedPod, PodName, PodReport, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::RwLock;
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// How long an Allocate may have to wait for a listing in flight.
const LIST_WHEN_IDLE_DEADLINE: Duration = Duration::from_millis(500);

/// The deadline of a call. A busy kubelet answers in milliseconds; a slower one is called again
/// later.
const DEADLINE: Duration = Duration::from_secs(2);

/// The kubelet answers 100 calls a second, of all clients together, and 10 at once (`DefaultQPS`,
/// `DefaultBurstTokens` of its pod-resources API).
const GET_EVERY: Duration = Duration::from_millis(10);
/// The calls before the first wait. Other clients have the rest.
const GETS_AT_ONCE: usize = 5;

/// A node of 110 pods with 64 devices each needs less than 1 MiB. tonic's default of 4 MiB leaves
/// too little reserve.
const RESPONSE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A failed call.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PodResourcesError {
    /// The kubelet did not answer in time.
    #[error("the kubelet did not answer `{method}` in time")]
    Late {
        /// The called method.
        method: &'static str,
    },
    /// The kubelet answered with an error, or does not listen.
    #[error("the kubelet {} `{method}`", if status.code() == Code::Unavailable { "does not answer" } else { "refused" })]
    Refused {
        /// The called method.
        method: &'static str,
        /// Its answer.
        #[source]
        status: Box<Status>,
    },
}

impl PodResourcesError {
    /// Whether the kubelet does not have the call, or has it switched off by its feature gate.
    #[must_use]
    pub fn is_unknown_call(&self) -> bool {
        match self {
            PodResourcesError::Late { .. } => false,
            // grpc-go's code for an error without one: the kubelet has none for a gate.
            PodResourcesError::Refused { status, .. } => {
                matches!(status.code(), Code::Unimplemented | Code::Unknown)
            }
        }
    }
}

/// The client. It connects at its first call, and again after a restart of the kubelet.
#[derive(Debug, Clone)]
pub struct PodResources {
    client: PodResourcesListerClient<Channel>,
    fallback: ClientV1Alpha1<Channel>,
}

impl PodResources {
    /// A client of the kubelet with this socket, which need not exist yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        let channel = uds::connect_lazy(socket);
        PodResources {
            client: PodResourcesListerClient::new(channel.clone())
                .max_decoding_message_size(RESPONSE_BYTES_MAX),
            fallback: ClientV1Alpha1::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX),
        }
    }

    /// Every active pod; older kubelets also list pods that have ended. If the kubelet has no v1,
    /// this uses v1alpha1. Each call tries v1 first, so that an upgrade is noticed.
    pub async fn list(&self) -> Result<Vec<ListedPod>, PodResourcesError> {
        let (mut client, mut fallback) = (self.client.clone(), self.fallback.clone());
        match in_time("List", client.list(with_deadline(api::ListPodResourcesRequest {}))).await {
            Ok(response) => {
                Ok(response.into_inner().pod_resources.into_iter().map(listed).collect())
            }
            Err(PodResourcesError::Refused { status, .. })
                if status.code() == Code::Unimplemented =>
            {
                let request = with_deadline(api_v1alpha1::ListPodResourcesRequest {});
                let response = in_time("List of v1alpha1", fallback.list(request)).await?;
                Ok(response.into_inner().pod_resources.into_iter().map(listed_v1alpha1).collect())
            }
            Err(error) => Err(error),
        }
    }

    /// The listing; nothing if an Allocate is in flight or the kubelet does not answer at once.
    /// Allocates hold `gate`: before the kubelet answers List, it frees the devices of dead pods,
    /// and drops its newest reservation with them. An Allocate that arrives during the listing
    /// waits for it.
    pub async fn list_when_idle(&self, gate: &RwLock<()>) -> PodReport {
        let Ok(_gate) = gate.try_write() else { return PodReport::Nothing };
        match tokio::time::timeout(LIST_WHEN_IDLE_DEADLINE, self.list()).await {
            Ok(Ok(pods)) => PodReport::All(pods),
            Ok(Err(error)) => {
                tracing::debug!(%error, "cannot list the pods");
                PodReport::Nothing
            }
            Err(_) => PodReport::Nothing,
        }
    }

    /// These pods, as far as the kubelet answers within that time; all pods, as
    /// [`PodResources::list_when_idle`] has them, if the kubelet does not have Get.
    pub async fn report(
        &self,
        names: impl IntoIterator<Item = PodName>,
        within: Duration,
        gate: &RwLock<()>,
    ) -> PodReport {
        match self.get_all(names, within).await {
            Ok(found) => PodReport::Named(found),
            Err(error) if error.is_unknown_call() => self.list_when_idle(gate).await,
            Err(error) => {
                tracing::debug!(%error, "cannot get the pods");
                PodReport::Nothing
            }
        }
    }

    /// Every healthy id that the kubelet has, held ones included, by resource. Resources without an
    /// id are left out. Frees nothing. Kubelets before 1.23 do not have the call, or have it
    /// switched off: then it is refused.
    pub async fn allocatable(
        &self,
    ) -> Result<BTreeMap<ResourceName, BTreeSet<DeviceId>>, PodResourcesError> {
        let mut client = self.client.clone();
        let call =
            client.get_allocatable_resources(with_deadline(api::AllocatableResourcesRequest {}));
        let response = in_time("GetAllocatableResources", call).await?.into_inner();
        Ok(by_resource(
            response.devices.into_iter().map(|found| (found.resource_name, found.device_ids)),
        ))
    }

    async fn get_all(
        &self,
        names: impl IntoIterator<Item = PodName>,
        within: Duration,
    ) -> Result<BTreeMap<PodName, Option<ListedPod>>, PodResourcesError> {
        let (mut pods, until) = (BTreeMap::new(), Instant::now() + within);
        for name in names {
            if pods.len() >= GETS_AT_ONCE {
                tokio::time::sleep(GET_EVERY).await;
            }
            let late = |_elapsed| Err(PodResourcesError::Late { method: "Get" });
            let answer = timeout_at(until, self.get(&name.namespace, &name.name)).await;
            match answer.unwrap_or_else(late) {
                Ok(found) => drop(pods.insert(name, found)),
                Err(error) if pods.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(pods)
    }

    /// One pod, also one that has ended and was not removed; `None` if the kubelet has none with
    /// that name. Frees nothing. Kubelets before 1.34 do not have the call, or have it switched off
    /// (`KubeletPodResourcesGet`): then it is refused.
    pub async fn get(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ListedPod>, PodResourcesError> {
        let mut client = self.client.clone();
        let request = api::GetPodResourcesRequest {
            pod_name: name.to_owned(),
            pod_namespace: namespace.to_owned(),
        };
        match in_time("Get", client.get(with_deadline(request))).await {
            Ok(response) => Ok(response.into_inner().pod_resources.map(listed)),
            // The kubelet has no code of its own for a missing pod.
            Err(PodResourcesError::Refused { status, .. })
                if status.code() == Code::Unknown && status.message().ends_with("not found") =>
            {
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

/// Limits a call on our side. The request's own deadline reaches the kubelet; this one also holds
/// when no process reads the connection.
async fn in_time<T>(
    method: &'static str,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, PodResourcesError> {
    let answer = tokio::time::timeout(DEADLINE, call)
        .await
        .map_err(|_elapsed| PodResourcesError::Late { method })?;
    answer.map_err(|status| PodResourcesError::Refused { method, status: Box::new(status) })
}

pub(crate) fn listed(pod: api::PodResources) -> ListedPod {
    let devices = |found: Vec<api::ContainerDevices>| {
        found.into_iter().map(|found| (found.resource_name, found.device_ids))
    };
    let container = |found: api::ContainerResources| {
        // The kubelet's CPU ids are never negative.
        let cpus = found.cpu_ids.into_iter().filter_map(|cpu| u32::try_from(cpu).ok()).collect();
        ListedContainer { name: found.name, devices: by_resource(devices(found.devices)), cpus }
    };
    ListedPod {
        namespace: pod.namespace,
        name: pod.name,
        containers: pod.containers.into_iter().map(container).collect(),
    }
}

fn listed_v1alpha1(pod: api_v1alpha1::PodResources) -> ListedPod {
    let devices = |found: Vec<api_v1alpha1::ContainerDevices>| {
        found.into_iter().map(|found| (found.resource_name, found.device_ids))
    };
    let container = |found: api_v1alpha1::ContainerResources| ListedContainer {
        name: found.name,
        devices: by_resource(devices(found.devices)),
        cpus: BTreeSet::new(),
    };
    ListedPod {
        namespace: pod.namespace,
        name: pod.name,
        containers: pod.containers.into_iter().map(container).collect(),
    }
}

/// The kubelet sends one message for each id and NUMA node; this merges them by resource.
fn by_resource(
    messages: impl Iterator<Item = (String, Vec<String>)>,
) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
    let mut devices: BTreeMap<ResourceName, BTreeSet<DeviceId>> = BTreeMap::new();
    for (resource, ids) in messages {
        // A device plugin cannot register an invalid resource name, so this is not ours.
        if let Ok(resource) = resource.parse() {
            devices.entry(resource).or_default().extend(ids.into_iter().map(DeviceId::new));
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_absent_kubelet_has_refused_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let error = PodResources::new(dir.path().join("absent")).list().await.unwrap_err();
        assert_eq!(error.to_string(), "the kubelet does not answer `List`");
    }
}
