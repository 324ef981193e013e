//! Actions on the node's kubelet and its pods, and queries of both.

use super::node::Node;
use super::sockets::latency;
use crate::domain::{DeviceId, ListedContainer, ListedPod, PodName, ResourceName};
use crate::lab::sim::kubelet::pod_resources::{self, DeviceMessage, PodMessage};
use crate::lab::sim::kubelet::state::Shared;
use crate::lab::sim::kubelet::{PodSpec, Start, View, start};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tonic::Status;

/// The longest time until the containers of a deleted pod end.
const TERMINATION: Duration = Duration::from_secs(2);
/// The longest time that an empty cgroup stays.
const CGROUP_KEPT: Duration = Duration::from_millis(200);

/// The pod-resources API did not answer, or refused.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the kubelet refused the listing: {0}")]
pub struct PodResourcesError(#[source] pub Box<Status>);

impl Node {
    /// Starts the kubelet. Nothing happens if it runs.
    pub fn start_kubelet(&self, how: Start) {
        let shared = Arc::clone(self.shared());
        // It fails only if the kubelet runs already.
        self.handle().spawn(async move { drop(start::start(&shared, how).await) });
    }

    /// Kills the kubelet: its connections are cut, its files stay, containers continue to run.
    pub fn kill_kubelet(&self) {
        self.shared().close();
    }

    /// Kills the kubelet and starts it again after `down_for`.
    pub fn restart_kubelet(&self, down_for: Duration, how: Start) {
        self.kill_kubelet();
        let node = self.clone();
        self.handle().spawn(async move {
            node.handle().sleep(down_for).await;
            node.start_kubelet(how);
        });
    }

    /// Starts the kubelet again each time it has been down for `down_for`, as systemd does, also
    /// after a crash.
    pub fn supervise_kubelet(&self, down_for: Duration) {
        let node = self.clone();
        self.handle().spawn(async move {
            let mut changes = node.shared().changes();
            loop {
                if !node.view(|view| view.is_running()) {
                    node.handle().sleep(down_for).await;
                    node.start_kubelet(Start::default());
                }
                if changes.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Reboots: every process and container dies, cgroups and CDI devices are removed, the disk
    /// stays. The kubelet starts after `down_for`. The scenario starts the daemon, when
    /// [`Node::boot_id`] has changed.
    pub fn reboot(&self, down_for: Duration) {
        self.kill_kubelet();
        self.kill_processes();
        self.shared().end_containers();
        self.memory().reboot();
        self.restart_kubelet(down_for, Start::default());
    }

    /// Binds a pod to the node; the kubelet decides on it later.
    pub fn add_pod(&self, spec: PodSpec) {
        self.shared().bind_pod(spec);
    }

    /// Deletes a pod, including one that was deleted by force before. A kubelet that has settled
    /// ends its containers after a delay; then its devices are free. Without such a kubelet the
    /// containers continue to run.
    pub fn delete_pod(&self, uid: &str) {
        let (node, uid) = (self.clone(), uid.to_owned());
        let wait = self.handle().random(|random| random.between(Duration::ZERO, TERMINATION));
        let removal = self.handle().random(|random| random.between(Duration::ZERO, CGROUP_KEPT));
        self.handle().spawn(async move {
            node.handle().sleep(wait).await;
            let mut changes = node.shared().changes();
            while !node.view(|view| view.is_settled()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
            node.shared().stop_pod(&uid);
            node.memory().empty_cgroup(&uid);
            node.handle().sleep(removal).await;
            // Files in memory cannot fail.
            drop(node.shared().end_pod(&uid));
        });
    }

    /// Deletes a pod by force: the kubelet forgets it at once, its containers continue to run until
    /// [`Node::delete_pod`].
    pub fn force_delete_pod(&self, uid: &str) {
        self.shared().orphan_pod(uid);
    }

    /// A container ends without a command, and is started again after the kubelet's backoff.
    pub fn crash_container(&self, uid: &str, container: &str) {
        self.shared().crash_container(uid, container);
    }

    /// The containers of a pod do their work and end; the pod itself stays until it is deleted.
    pub fn complete_pod(&self, uid: &str) {
        if self.shared().complete_pod(uid) {
            let (node, uid) = (self.clone(), uid.to_owned());
            let removal =
                self.handle().random(|random| random.between(Duration::ZERO, CGROUP_KEPT));
            self.memory().empty_cgroup(&uid);
            self.handle().spawn(async move {
                node.handle().sleep(removal).await;
                node.memory().remove_pod_cgroup(&uid);
            });
        }
    }

    /// Requests another decision on a running pod, as a resize in place does.
    pub fn resize_pod(&self, uid: &str) {
        self.shared().resize_pod(uid);
    }

    /// Deletes the checkpoint. The kubelet writes it again with the next list or allocation.
    pub fn delete_checkpoint(&self) {
        self.memory().delete_checkpoint();
    }

    /// Damages the checkpoint.
    pub fn corrupt_checkpoint(&self) {
        self.memory().corrupt_checkpoint();
    }

    /// `v1.PodResourcesLister/List`: every active pod. The kubelet frees the devices of all other
    /// pods, and with them forgets the reservation of an Allocate under way.
    ///
    /// # Errors
    /// When the kubelet is down, or the rate limit is exceeded.
    pub async fn list_pods(&self) -> Result<Vec<ListedPod>, PodResourcesError> {
        let pods = self.query(pod_resources::list).await?;
        Ok(pods.into_iter().map(listed).collect())
    }

    /// `v1.PodResourcesLister/Get`: the pods with these names. Frees nothing.
    ///
    /// # Errors
    /// When the kubelet is down or does not have this call, or the rate limit is exceeded.
    pub async fn get_pods(
        &self,
        names: &BTreeSet<PodName>,
    ) -> Result<BTreeMap<PodName, Option<ListedPod>>, PodResourcesError> {
        let mut pods = BTreeMap::new();
        for name in names {
            let PodName { namespace, name: pod } = name;
            let answer = self.query(|shared, n| pod_resources::get(shared, n, namespace, pod));
            let found = match answer.await {
                Err(PodResourcesError(status)) if status.message().ends_with("not found") => None,
                answer => Some(listed(answer?)),
            };
            pods.insert(name.clone(), found);
        }
        Ok(pods)
    }

    /// `v1.PodResourcesLister/GetAllocatableResources`: the healthy ids of each resource.
    ///
    /// # Errors
    /// When the kubelet is down or too old for this call, or the rate limit is exceeded.
    pub async fn allocatable(
        &self,
    ) -> Result<BTreeMap<ResourceName, BTreeSet<DeviceId>>, PodResourcesError> {
        self.query(pod_resources::allocatable).await.map(by_resource)
    }

    async fn query<T>(
        &self,
        answer: impl FnOnce(&Shared, u64) -> Result<T, Status>,
    ) -> Result<T, PodResourcesError> {
        let handle = self.handle();
        handle.sleep(latency(handle)).await;
        let instance = self.memory().pod_resources();
        let answer = instance
            .ok_or_else(|| Status::unavailable("connection refused"))
            .and_then(|instance| answer(self.shared(), instance));
        handle.sleep(latency(handle)).await;
        answer.map_err(|status| PodResourcesError(Box::new(status)))
    }

    /// Reads the whole state at one time.
    pub fn view<R>(&self, read: impl FnOnce(&View<'_>) -> R) -> R {
        self.shared().view(read)
    }
}

/// A listed pod, with the messages of each container merged.
fn listed(pod: PodMessage) -> ListedPod {
    let container = |(name, messages)| ListedContainer {
        name,
        devices: by_resource(messages),
        cpus: BTreeSet::new(),
    };
    ListedPod {
        namespace: pod.namespace,
        name: pod.name,
        containers: pod.containers.into_iter().map(container).collect(),
    }
}

fn by_resource(messages: Vec<DeviceMessage>) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
    let mut devices: BTreeMap<ResourceName, BTreeSet<DeviceId>> = BTreeMap::new();
    for message in messages {
        devices.entry(message.resource).or_default().insert(message.id);
    }
    devices
}
