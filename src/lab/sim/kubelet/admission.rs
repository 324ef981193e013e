//! The kubelet's sync loop: one task admits the pods, one after the other.

use super::core::{Choice, Step};
use super::error::AllocateError;
use super::event::EventKind;
use super::hook::{Hook, Verdict};
use super::pod::{ContainerKind, ContainerSpec, PodPhase, PodSpec};
use super::state::{Shared, State};
use super::worker;
use crate::domain::{DeviceId, ResourceName};
use futures_util::future;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Why an admission stops.
pub(super) enum Halt {
    /// The pod is rejected.
    Refused(AllocateError),
    /// The kubelet has exited; its next instance decides.
    Over,
}

impl From<AllocateError> for Halt {
    fn from(error: AllocateError) -> Self {
        Halt::Refused(error)
    }
}

/// The next work of the sync loop.
enum Work {
    Admit(PodSpec),
    Resize(PodSpec),
}

/// After a gap, admits the pods that the node has already, then every added pod, until the instance
/// ends.
pub(super) async fn sync_loop(shared: &Arc<Shared>, instance: u64) {
    shared.environment.sleep(shared.behaviour.gaps.to_first_batch).await;
    shared.hook(instance, Hook::BeforeFirstBatch).await;
    let batch = shared.in_instance(instance, |state| {
        state.pods.iter().map(|pod| pod.spec.uid.clone()).collect::<Vec<_>>()
    });
    for uid in batch.unwrap_or_default() {
        let spec = shared.in_instance(instance, |state| {
            let present = state.instance.as_mut()?;
            // Each pod is known before it is admitted. A pod that has ended is not admitted again.
            present.known.insert(uid.clone());
            state
                .pods
                .iter()
                .find(|pod| pod.spec.uid == uid && !pod.is_over())
                .map(|pod| pod.spec.clone())
        });
        if let Some(spec) = spec.flatten() {
            admit(shared, instance, &spec).await;
            shared.hook(instance, Hook::BetweenPodsOfBatch).await;
        }
    }
    shared.hook(instance, Hook::BeforeSourcesReady).await;
    shared.with_instance(instance, |present| present.manager.set_sources_ready());
    shared.log(EventKind::SourcesReady);

    loop {
        match shared.in_instance(instance, next).flatten() {
            Some(Work::Admit(spec)) => admit(shared, instance, &spec).await,
            Some(Work::Resize(spec)) => resize(shared, instance, &spec).await,
            None => shared.pod_added.notified().await,
        }
    }
}

fn next(state: &mut State) -> Option<Work> {
    let present = state.instance.as_mut()?;
    if let Some(pod) = state.pods.iter().find(|pod| !present.known.contains(&pod.spec.uid)) {
        present.known.insert(pod.spec.uid.clone());
        return Some(Work::Admit(pod.spec.clone()));
    }
    let uid = present.resizes.pop_front()?;
    let pod = state.pods.iter().find(|pod| pod.spec.uid == uid && !pod.is_over())?;
    Some(Work::Resize(pod.spec.clone()))
}

/// Decides on one pod, for the first time or again. A rejected pod keeps its devices until the next
/// purge.
async fn admit(shared: &Arc<Shared>, instance: u64, spec: &PodSpec) {
    match decide(shared, instance, spec).await {
        Ok(()) => {
            shared.log(EventKind::Admitted { pod_uid: spec.uid.clone() });
            worker::work(shared, instance, &spec.uid);
        }
        Err(Halt::Refused(error)) => reject(shared, instance, spec, &error).await,
        Err(Halt::Over) => {}
    }
}

/// Decides again on a running pod: a rejection leaves the pod as it is.
async fn resize(shared: &Arc<Shared>, instance: u64, spec: &PodSpec) {
    if let Err(Halt::Refused(error)) = decide(shared, instance, spec).await {
        shared
            .log(EventKind::ResizeRefused { pod_uid: spec.uid.clone(), error: error.to_string() });
    }
}

async fn decide(shared: &Shared, instance: u64, spec: &PodSpec) -> Result<(), Halt> {
    for container in spec.in_order() {
        allocate(shared, instance, spec, container).await?;
    }
    if spec.lacks_cpu { Err(AllocateError::NoCpu.into()) } else { Ok(()) }
}

async fn allocate(
    shared: &Shared,
    instance: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
) -> Result<(), Halt> {
    shared.with_instance(instance, |present| present.manager.begin(&spec.uid)).ok_or(Halt::Over)?;
    if shared.behaviour.topology_manager {
        check_topology(shared, instance, spec, container)?;
    }
    allocate_resources(shared, instance, spec, container).await?;
    let leaves_devices = container.kind == ContainerKind::Init;
    shared
        .with_instance(instance, |present| {
            present.manager.finish(&spec.uid, &container.name, leaves_devices);
        })
        .ok_or(Halt::Over)
}

/// The resources of a container in random order, as Go walks a map.
pub(super) fn resources(shared: &Shared, container: &ContainerSpec) -> Vec<(ResourceName, usize)> {
    let required = |count: &u32| usize::try_from(*count).unwrap_or(usize::MAX);
    let mut left: Vec<_> = container
        .resources
        .iter()
        .map(|(resource, count)| (resource.clone(), required(count)))
        .collect();
    let mut order = Vec::with_capacity(left.len());
    while !left.is_empty() {
        order.push(left.remove(shared.environment.below(left.len())));
    }
    order
}

/// Gives a container the devices that it has not got yet: at its admission, and at its start where
/// nothing is recorded.
pub(super) async fn allocate_resources(
    shared: &Shared,
    instance: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
) -> Result<(), Halt> {
    let (mut purged, mut changed) = (false, false);
    for (resource, required) in resources(shared, container) {
        let step = shared.in_instance(instance, |state| {
            if !state
                .instance
                .as_ref()
                .is_some_and(|present| present.manager.is_plugin_resource(&resource))
            {
                return Ok(Step::Nothing);
            }
            if !std::mem::replace(&mut purged, true) {
                state.purge();
            }
            let Some(present) = &mut state.instance else { return Ok(Step::Nothing) };
            present.manager.allocate(&spec.uid, &container.name, &resource, required)
        });
        let ids = match step.ok_or(Halt::Over)?? {
            Step::Nothing => continue,
            Step::Allocate(ids) => ids,
            Step::Choose(choice) => choose(shared, instance, &resource, choice).await?,
        };
        changed = true;
        call(shared, instance, spec, container, &resource, &ids).await?;
    }
    if changed {
        shared.write_checkpoint(instance).await.map_err(AllocateError::Checkpoint)?;
    }
    Ok(())
}

fn check_topology(
    shared: &Shared,
    instance: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
) -> Result<(), Halt> {
    shared.in_instance(instance, State::purge).ok_or(Halt::Over)?;
    for (resource, required) in resources(shared, container) {
        let hints = shared.with_instance(instance, |present| {
            present.manager.topology_hints(&spec.uid, &container.name, &resource, required)
        });
        if let Err(error) = hints.ok_or(Halt::Over)? {
            shared.panic(&error);
            return Err(Halt::Over);
        }
    }
    Ok(())
}

/// Calls GetPreferredAllocation if the plugin offers it, and reserves devices by its answer.
async fn choose(
    shared: &Shared,
    instance: u64,
    resource: &ResourceName,
    choice: Choice,
) -> Result<BTreeSet<DeviceId>, Halt> {
    let endpoint = shared.with_instance(instance, |present| {
        let endpoint = present
            .manager
            .endpoint(resource)
            .ok_or_else(|| AllocateError::EndpointNotFound(resource.clone()))?;
        let wanted = endpoint.options.is_some_and(|options| options.preferred_allocation);
        // A stopped endpoint fails the call with its own text, inside that of the call.
        let stopped = |error: AllocateError| AllocateError::Preferred(error.to_string());
        wanted.then(|| present.manager.callable(resource).map_err(stopped)).transpose()
    });
    let preferred = match endpoint.ok_or(Halt::Over)?? {
        None => BTreeSet::new(),
        Some(client) => {
            let preferred = client
                .preferred(&choice.candidates(), choice.must_include(), choice.required)
                .await;
            preferred.map_err(AllocateError::Preferred)?
        }
    };
    let mut below = |count| shared.environment.below(count);
    Ok(shared
        .with_instance(instance, |present| present.manager.choose(choice, &preferred, &mut below))
        .ok_or(Halt::Over)??)
}

/// Calls Allocate and records the granted devices.
async fn call(
    shared: &Shared,
    instance: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
    resource: &ResourceName,
    ids: &BTreeSet<DeviceId>,
) -> Result<(), Halt> {
    let fails = shared.hook(instance, Hook::BeforeAllocate).await == Verdict::Fail;
    let asked_at = shared.environment.now();
    let client = shared.with_instance(instance, |present| {
        if present.allocating == 0 {
            present.allocating_since = asked_at;
        }
        present.allocating += 1;
        present.manager.callable(resource)
    });
    let answer = match client.ok_or(Halt::Over)? {
        Err(error) => Err(error),
        Ok(_) if fails => Err(AllocateError::Rpc(BROKEN.to_owned())),
        Ok(client) => {
            // The hook runs while the plugin works; its answer waits for the hook.
            let (answer, verdict) =
                future::join(client.allocate(ids), shared.hook(instance, Hook::DuringAllocate))
                    .await;
            let answer = if verdict == Verdict::Fail { Err(BROKEN.to_owned()) } else { answer };
            answer.map_err(AllocateError::Rpc)
        }
    };
    let answered_at = shared.environment.now();
    shared.hook(instance, Hook::AfterAllocate).await;
    // A listing does no harm from now on: the answer is recorded in the same step.
    shared
        .with_instance(instance, |present| {
            present.allocating = present.allocating.saturating_sub(1);
        })
        .ok_or(Halt::Over)?;
    let edits = match answer {
        Ok(Some(edits)) => edits,
        // As in the kubelet, the reservation stays: only a purge or a failed call drops it.
        Ok(None) => return Err(AllocateError::NoContainers.into()),
        Err(error) => {
            shared
                .with_instance(instance, |present| present.manager.forget_reservations())
                .ok_or(Halt::Over)?;
            return Err(error.into());
        }
    };
    let granted = shared.with_instance(instance, |present| {
        present.manager.granted(&spec.uid, &container.name, resource, ids, edits)
    });
    if let Err(error) = granted.ok_or(Halt::Over)? {
        shared.panic(&error);
        return Err(Halt::Over);
    }
    shared.log(EventKind::Allocated {
        resource: resource.clone(),
        pod_uid: spec.uid.clone(),
        container: container.name.clone(),
        devices: ids.clone(),
        took: answered_at.saturating_sub(asked_at),
    });
    Ok(())
}

/// The error of a call whose connection broke, as grpc-go words it.
const BROKEN: &str = "rpc error: code = Unavailable desc = error reading from server: EOF";

/// The pod fails for good, and its running containers are killed. Its devices count as free from
/// now on. A real kubelet counts them as held again when it begins to kill, at most two seconds
/// later, until the kill is complete. So this one gives away devices of running containers sooner.
async fn reject(shared: &Arc<Shared>, instance: u64, spec: &PodSpec, error: &AllocateError) {
    shared.hook(instance, Hook::BeforeReject).await;
    let at = shared.environment.now();
    let (reason, message) = match error {
        AllocateError::NoCpu => ("OutOfcpu", format!("Pod was rejected: {error}")),
        _ => (
            "UnexpectedAdmissionError",
            format!("Pod was rejected: Allocate failed due to {error}, which is unexpected"),
        ),
    };
    let reason = reason.to_owned();
    shared.in_instance(instance, |state| {
        *state.rejections.entry(reason.clone()).or_default() += 1;
        if let Some(pod) = state.pod(&spec.uid) {
            pod.phase = PodPhase::Failed { reason: reason.clone(), message: message.clone() };
        }
        state.events.push(at, EventKind::Rejected { pod_uid: spec.uid.clone(), reason, message });
    });
    let steps = usize::try_from(shared.behaviour.kill_within.as_millis()).unwrap_or_default();
    if steps == 0 {
        return kill(shared, &spec.uid);
    }
    let wait =
        Duration::from_millis(u64::try_from(shared.environment.below(steps)).unwrap_or_default());
    let (shared, uid) = (Arc::clone(shared), spec.uid.clone());
    // The container runtime continues the kill when the kubelet dies.
    let _ = Arc::clone(&shared).environment.spawn(Box::pin(async move {
        shared.environment.sleep(wait).await;
        kill(&shared, &uid);
    }));
}

fn kill(shared: &Shared, uid: &str) {
    let found = shared.update(|state| {
        let containers = state.pod(uid).map(|pod| pod.containers.values_mut());
        containers
            .map(|containers| containers.for_each(|container| container.running = false))
            .is_some()
    });
    // A pod that was deleted by force meanwhile continues to run.
    if found {
        worker::note(shared, shared.environment.remove_cgroup(uid));
    }
}
