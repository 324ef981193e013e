//! Who answers what comes in: this instance, or the one that it has handed over to.
//!
//! The kubelet asks on the connection that it has, and takes every error of an Allocate for the end of the pod. So a
//! request that comes while the ledger changes hands waits, and then goes to whoever has it, as if the kubelet had asked
//! there. When that one is lost, the request waits again: somebody takes over from it.

use super::plugin::Shared;
use crate::domain::{ContainerEdits, DeviceId, Refusal, ResourceName, Stage};
use crate::kubelet::api::v1beta1::edits;
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::kubelet::uds;
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::{RwLockReadGuard, watch};
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::Channel;

/// How long a request waits for somebody to answer it. A handover takes a tenth of a second, and longer on a node with
/// thousands of devices; the kubelet's sync loop stands still meanwhile, which is better than a pod that failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long the other instance may take: longer than its own deadlines are.
const ALLOCATE_WITHIN: Duration = Duration::from_secs(4);
const PRE_START_WITHIN: Duration = Duration::from_secs(29);

/// Who answers.
pub(super) enum Turn<'a> {
    /// This instance, for as long as the gate is held.
    Ours(RwLockReadGuard<'a, ()>),
    /// The one that serves this socket.
    Theirs(PathBuf),
}

/// Finds out for one request, again and again until it is answered.
pub(super) struct Turns<'a> {
    shared: &'a Shared,
    resource: &'a ResourceName,
    stage: watch::Receiver<Stage>,
    until: Instant,
    /// Why the one that was asked last has not answered; another one is waited for.
    lost: Option<String>,
}

impl<'a> Turns<'a> {
    pub(super) fn new(shared: &'a Shared, resource: &'a ResourceName) -> Self {
        Turns { shared, resource, stage: shared.stage.clone(), until: Instant::now() + PATIENCE, lost: None }
    }

    /// Who is to be asked.
    ///
    /// # Errors
    /// When nobody will answer.
    pub(super) async fn next(&mut self) -> Result<Turn<'a>, Status> {
        let nobody = |lost: &Option<String>| {
            let why = lost.as_deref().unwrap_or("the daemon is ending, or hands over to another one that does not answer");
            Status::unavailable(format!("nobody answers for {}: {why}", self.resource))
        };
        if self.lost.is_some() && !matches!(tokio::time::timeout_at(self.until, self.stage.changed()).await, Ok(Ok(()))) {
            return Err(nobody(&self.lost));
        }
        loop {
            // Held from before the look at the stage: whoever freezes this instance waits for it.
            let gate = self.shared.gate.read().await;
            match &*self.stage.borrow_and_update() {
                Stage::Serving => return Ok(Turn::Ours(gate)),
                Stage::Succeeded(sockets) | Stage::Ending(Some(sockets)) => {
                    let not_offered = || Status::not_found(Refusal::NotOffered(self.resource.clone()).to_string());
                    return sockets.get(self.resource).cloned().map(Turn::Theirs).ok_or_else(not_offered);
                }
                Stage::Ending(None) => return Err(nobody(&self.lost)),
                Stage::Frozen => drop(gate),
            }
            if !matches!(tokio::time::timeout_at(self.until, self.stage.changed()).await, Ok(Ok(()))) {
                return Err(nobody(&self.lost));
            }
        }
    }

    /// The one that was asked has gone without an answer.
    pub(super) fn lost(&mut self, error: &Status) {
        tracing::warn!(resource = %self.resource, error = error.message(), "the instance that took over does not answer; waiting for another");
        self.lost = Some(error.message().to_owned());
    }
}

/// What came of passing a request on.
pub(super) enum Passed<T> {
    /// An answer, perhaps a refusal, in the other instance's words.
    Answered(Result<T, Status>),
    /// Nobody is there, or went away meanwhile. What was granted all the same is a grant without a pod, and is released.
    Lost(Status),
}

pub(super) async fn allocate(socket: &Path, containers: &[Vec<DeviceId>]) -> Passed<Vec<ContainerEdits>> {
    let container = |ids: &Vec<DeviceId>| api::ContainerAllocateRequest { devices_ids: names(ids) };
    let request = api::AllocateRequest { container_requests: containers.iter().map(container).collect() };
    pass_on(socket, ALLOCATE_WITHIN, async |mut there| {
        Ok(there.allocate(request).await?.into_inner().container_responses.into_iter().map(edits).collect())
    })
    .await
}

pub(super) async fn pre_start(socket: &Path, ids: &[DeviceId]) -> Passed<()> {
    let request = api::PreStartContainerRequest { devices_ids: names(ids) };
    pass_on(socket, PRE_START_WITHIN, async |mut there| there.pre_start_container(request).await.map(drop)).await
}

fn names(ids: &[DeviceId]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

async fn pass_on<T>(socket: &Path, within: Duration, ask: impl AsyncFnOnce(DevicePluginClient<Channel>) -> Result<T, Status>) -> Passed<T> {
    let lost = |why: &str| Passed::Lost(Status::unavailable(format!("`{}` {why}", socket.display())));
    let asked = async {
        let Ok(channel) = uds::connect(socket).await else { return lost("does not answer") };
        match ask(DevicePluginClient::new(channel)).await {
            // A status with a cause was made on our side: the connection broke.
            Err(status) if status.source().is_some() => lost("has broken the connection"),
            answer => Passed::Answered(answer),
        }
    };
    tokio::time::timeout(within, asked).await.unwrap_or_else(|_| lost("does not answer in time"))
}
