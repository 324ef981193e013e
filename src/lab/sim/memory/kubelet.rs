//! What happens to the node's kubelet and its pods, and what both look like.

use super::node::Node;
use super::sockets::latency;
use crate::domain::{DeviceId, ListedContainer, ListedPod, ResourceName};
use crate::lab::sim::kubelet::pod_resources::{self, DeviceMessage, PodMessage};
use crate::lab::sim::kubelet::state::Shared;
use crate::lab::sim::kubelet::{PodSpec, Start, View, start};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tonic::Status;

/// The longest time that the containers of a deleted pod take to end.
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
        // It fails only if it runs already.
        self.handle().spawn(async move { drop(start::start(&shared, how).await) });
    }

    /// Kills the kubelet: its connections are cut, its files stay, containers run on.
    pub fn kill_kubelet(&self) {
        self.shared().close();
    }

    /// Kills the kubelet and starts it again after a while.
    pub fn restart_kubelet(&self, down_for: Duration, how: Start) {
        self.kill_kubelet();
        let node = self.clone();
        self.handle().spawn(async move {
            node.handle().sleep(down_for).await;
            node.start_kubelet(how);
        });
    }

    /// Starts the kubelet again whenever it has been down for this long, as systemd does: after a crash too.
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

    /// Reboots: every process and container dies, cgroups and CDI devices are gone, the disk stays. The kubelet comes
    /// after a while; the daemon is the scenario's to start, when [`Node::boot_id`] is another one.
    pub fn reboot(&self, down_for: Duration) {
        self.kill_kubelet();
        self.kill_processes();
        self.shared().end_containers();
        self.memory().reboot();
        self.restart_kubelet(down_for, Start::default());
    }

    /// Binds a pod to the node; the kubelet decides on it when it comes to it.
    pub fn add_pod(&self, spec: PodSpec) {
        self.shared().bind_pod(spec);
    }

    /// Deletes a pod, also one that was deleted by force before: a kubelet that has settled ends its containers after a
    /// while, which is when its devices are free. While there is none they run on.
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

    /// Deletes a pod by force: the kubelet forgets it at once, its containers run on until [`Node::delete_pod`].
    pub fn force_delete_pod(&self, uid: &str) {
        self.shared().orphan_pod(uid);
    }

    /// A container ends by itself, and is started again after the kubelet's back-off.
    pub fn crash_container(&self, uid: &str, container: &str) {
        self.shared().crash_container(uid, container);
    }

    /// The containers of a pod do their work and end; the pod itself stays until it is deleted.
    pub fn complete_pod(&self, uid: &str) {
        if self.shared().complete_pod(uid) {
            let (node, uid) = (self.clone(), uid.to_owned());
            let removal = self.handle().random(|random| random.between(Duration::ZERO, CGROUP_KEPT));
            self.memory().empty_cgroup(&uid);
            self.handle().spawn(async move {
                node.handle().sleep(removal).await;
                node.memory().remove_pod_cgroup(&uid);
            });
        }
    }

    /// Asks for another decision on a pod that runs, as a resize in place does.
    pub fn resize_pod(&self, uid: &str) {
        self.shared().resize_pod(uid);
    }

    /// The checkpoint is lost. The kubelet writes it anew with the next list or allocation.
    pub fn delete_checkpoint(&self) {
        self.memory().delete_checkpoint();
    }

    /// The checkpoint is damaged.
    pub fn corrupt_checkpoint(&self) {
        self.memory().corrupt_checkpoint();
    }

    /// `v1.PodResourcesLister/List`: every active pod. The kubelet frees what others held, and forgets with it the
    /// reservation of an Allocate under way.
    ///
    /// # Errors
    /// When the kubelet is down, or there are too many calls.
    pub async fn list_pods(&self) -> Result<Vec<ListedPod>, PodResourcesError> {
        let pods = self.ask(pod_resources::list).await?;
        Ok(pods.into_iter().map(listed).collect())
    }

    /// `v1.PodResourcesLister/Get`: one active pod. Frees nothing.
    ///
    /// # Errors
    /// When there is none, the kubelet is down, or there are too many calls.
    pub async fn get_pod(&self, namespace: &str, name: &str) -> Result<ListedPod, PodResourcesError> {
        self.ask(|shared, life| pod_resources::get(shared, life, namespace, name)).await.map(listed)
    }

    /// `v1.PodResourcesLister/GetAllocatableResources`: the healthy ids of each resource.
    ///
    /// # Errors
    /// When the kubelet is down or older than 1.23, or there are too many calls.
    pub async fn allocatable(&self) -> Result<BTreeMap<ResourceName, BTreeSet<DeviceId>>, PodResourcesError> {
        self.ask(pod_resources::allocatable).await.map(by_resource)
    }

    async fn ask<T>(&self, answer: impl FnOnce(&Shared, u64) -> Result<T, Status>) -> Result<T, PodResourcesError> {
        let handle = self.handle();
        handle.sleep(latency(handle)).await;
        let life = self.memory().pod_resources();
        let answer = life.ok_or_else(|| Status::unavailable("connection refused")).and_then(|life| answer(self.shared(), life));
        handle.sleep(latency(handle)).await;
        answer.map_err(|status| PodResourcesError(Box::new(status)))
    }

    /// Looks at everything at one moment.
    pub fn view<R>(&self, look: impl FnOnce(&View<'_>) -> R) -> R {
        self.shared().view(look)
    }
}

/// A listed pod, with the messages of each container put together.
fn listed(pod: PodMessage) -> ListedPod {
    let container = |(name, messages)| ListedContainer { name, devices: by_resource(messages), cpus: BTreeSet::new() };
    ListedPod { namespace: pod.namespace, name: pod.name, containers: pod.containers.into_iter().map(container).collect() }
}

fn by_resource(messages: Vec<DeviceMessage>) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
    let mut devices: BTreeMap<ResourceName, BTreeSet<DeviceId>> = BTreeMap::new();
    for message in messages {
        devices.entry(message.resource).or_default().insert(message.id);
    }
    devices
}
