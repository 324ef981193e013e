//! The kubelet's sync loop: one task admits the pods, one after the other.

use super::core::Step;
use super::error::AllocateError;
use super::event::EventKind;
use super::pod::{Container, ContainerKind, ContainerSpec, PodPhase, PodSpec};
use super::state::Shared;
use crate::domain::{DeviceId, ResourceName};
use std::collections::BTreeSet;
use std::io;

/// Why an admission stops.
enum Halt {
    /// The pod is rejected.
    Refused(AllocateError),
    /// The kubelet is gone; its next life decides.
    Over,
}

impl From<AllocateError> for Halt {
    fn from(error: AllocateError) -> Self {
        Halt::Refused(error)
    }
}

/// Admits what the node has after a gap, then what is added, until the life ends.
pub(super) async fn sync_loop(shared: &Shared, life: u64) {
    tokio::time::sleep(shared.config.first_batch_after).await;
    let batch = shared.in_life(life, |state| {
        let batch: Vec<PodSpec> = state.pods.iter().filter(|pod| !pod.is_failed()).map(|pod| pod.spec.clone()).collect();
        if let Some(present) = &mut state.life {
            present.known = state.pods.iter().map(|pod| pod.spec.uid.clone()).collect();
        }
        batch
    });
    for spec in batch.unwrap_or_default() {
        admit(shared, life, &spec).await;
    }
    shared.life(life, |present| present.manager.set_sources_ready());
    shared.log(EventKind::SourcesReady);

    loop {
        let added = shared.in_life(life, |state| {
            let present = state.life.as_mut()?;
            let pod = state.pods.iter().find(|pod| !present.known.contains(&pod.spec.uid))?;
            present.known.insert(pod.spec.uid.clone());
            Some(pod.spec.clone())
        });
        match added.flatten() {
            Some(spec) => admit(shared, life, &spec).await,
            None => shared.pod_added.notified().await,
        }
    }
}

/// Decides on one pod, for the first time or again. Nothing that it got is taken back when it is rejected: the next
/// purge does that.
async fn admit(shared: &Shared, life: u64, spec: &PodSpec) {
    for container in spec.in_order() {
        match allocate(shared, life, spec, container).await {
            Ok(()) => {}
            Err(Halt::Refused(error)) => return reject(shared, life, spec, &error),
            Err(Halt::Over) => return,
        }
    }
    start(shared, life, spec);
}

async fn allocate(shared: &Shared, life: u64, spec: &PodSpec, container: &ContainerSpec) -> Result<(), Halt> {
    shared.life(life, |present| present.manager.begin(&spec.uid)).ok_or(Halt::Over)?;
    if shared.config.topology_manager {
        check_topology(shared, life, spec, container)?;
    }
    let (mut purged, mut changed) = (false, false);
    for (resource, count) in &container.resources {
        let step = shared.in_life(life, |state| {
            let in_charge =
                |state: &super::state::State| state.life.as_ref().is_some_and(|present| present.manager.is_plugin_resource(resource));
            if !in_charge(state) {
                return Ok(Step::Nothing);
            }
            if !purged {
                state.purge();
                purged = true;
            }
            let required = usize::try_from(*count).unwrap_or(usize::MAX);
            state
                .life
                .as_mut()
                .map_or(Ok(Step::Nothing), |present| present.manager.allocate(&spec.uid, &container.name, resource, required))
        });
        let ids = match step.ok_or(Halt::Over)?? {
            Step::Nothing => continue,
            Step::Allocate(ids) => ids,
            Step::Choose(choice) => choose(shared, life, resource, choice).await?,
        };
        changed = true;
        call(shared, life, spec, container, resource, &ids).await?;
    }
    if changed {
        shared.write_checkpoint(life).map_err(AllocateError::Checkpoint)?;
    }
    let leaves_devices = container.kind == ContainerKind::Init;
    shared.life(life, |present| present.manager.finish(&spec.uid, &container.name, leaves_devices)).ok_or(Halt::Over)
}

fn check_topology(shared: &Shared, life: u64, spec: &PodSpec, container: &ContainerSpec) -> Result<(), Halt> {
    shared.in_life(life, super::state::State::purge).ok_or(Halt::Over)?;
    for (resource, count) in &container.resources {
        let required = usize::try_from(*count).unwrap_or(usize::MAX);
        let hints = shared.life(life, |present| present.manager.topology_hints(&spec.uid, &container.name, resource, required));
        if let Err(error) = hints.ok_or(Halt::Over)? {
            shared.panic(&error);
            return Err(Halt::Over);
        }
    }
    Ok(())
}

/// Asks the plugin which devices it prefers, if it offers that, and takes them.
async fn choose(shared: &Shared, life: u64, resource: &ResourceName, choice: super::core::Choice) -> Result<BTreeSet<DeviceId>, Halt> {
    let endpoint = shared.life(life, |present| {
        let endpoint = present.manager.endpoint(resource).ok_or_else(|| AllocateError::EndpointNotFound(resource.clone()))?;
        let wanted = endpoint.options.is_some_and(|options| options.preferred_allocation);
        // A stopped endpoint fails the call with its own text, inside that of the call.
        let stopped = |error: AllocateError| AllocateError::Preferred(error.to_string());
        wanted.then(|| present.manager.callable(resource).map_err(stopped)).transpose()
    });
    let preferred = match endpoint.ok_or(Halt::Over)?? {
        None => BTreeSet::new(),
        Some(client) => {
            let preferred = client.preferred(&choice.candidates(), choice.must_include(), choice.required).await;
            preferred.map_err(AllocateError::Preferred)?
        }
    };
    Ok(shared.life(life, |present| present.manager.choose(choice, &preferred)).ok_or(Halt::Over)??)
}

/// The Allocate call, and the record of what it gave.
async fn call(
    shared: &Shared,
    life: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
    resource: &ResourceName,
    ids: &BTreeSet<DeviceId>,
) -> Result<(), Halt> {
    let asked_at = shared.now();
    let client = shared.life(life, |present| present.manager.callable(resource)).ok_or(Halt::Over)?;
    let answer = match client {
        Ok(client) => client.allocate(ids).await.map_err(AllocateError::Rpc),
        Err(error) => Err(error),
    };
    let edits = match answer {
        Ok(Some(edits)) => edits,
        // The reservation stays, as in the kubelet: only a purge or a failed call drops it.
        Ok(None) => return Err(AllocateError::NoContainers.into()),
        Err(error) => {
            shared.life(life, |present| present.manager.forget_reservations()).ok_or(Halt::Over)?;
            return Err(error.into());
        }
    };
    let granted = shared.life(life, |present| present.manager.granted(&spec.uid, &container.name, resource, ids, edits));
    if let Err(error) = granted.ok_or(Halt::Over)? {
        shared.panic(&error);
        return Err(Halt::Over);
    }
    shared.log(EventKind::Allocated {
        resource: resource.clone(),
        pod_uid: spec.uid.clone(),
        container: container.name.clone(),
        devices: ids.clone(),
        took: shared.now().saturating_sub(asked_at),
    });
    Ok(())
}

/// The pod fails for good, and what runs of it is killed.
fn reject(shared: &Shared, life: u64, spec: &PodSpec, error: &AllocateError) {
    let at = shared.now();
    let reason = "UnexpectedAdmissionError".to_owned();
    let message = format!("Pod was rejected: Allocate failed due to {error}, which is unexpected");
    shared.in_life(life, |state| {
        state.rejections += 1;
        if let Some(pod) = state.pod(&spec.uid) {
            pod.containers.values_mut().for_each(|container| container.running = false);
            pod.phase = PodPhase::Failed { reason: reason.clone(), message: message.clone() };
        }
        state.events.push(at, EventKind::Rejected { pod_uid: spec.uid.clone(), reason, message });
    });
    note(shared, shared.files.remove_cgroup(&spec.uid));
}

/// The pod runs: its init containers to their end, the others on. One that ran before goes on as it is.
fn start(shared: &Shared, life: u64, spec: &PodSpec) {
    let at = shared.now();
    let files = shared.in_life(life, |state| {
        let edits: Vec<_> = match &state.life {
            Some(present) => {
                spec.in_order().map(|container| (container, present.manager.held().edits(&spec.uid, &container.name))).collect()
            }
            None => Vec::new(),
        };
        let mut files = Ok(());
        // A pod that was deleted while it was admitted is not started.
        let Some(pod) = state.pod(&spec.uid) else { return files };
        if pod.phase == PodPhase::Pending {
            pod.phase = PodPhase::Running;
            files = shared.files.create_pod(spec);
            for (container, edits) in edits {
                files = files.and(shared.files.create_container(spec, &container.name));
                let running = container.kind != ContainerKind::Init;
                pod.containers.insert(container.name.clone(), Container { running, edits });
            }
        }
        state.events.push(at, EventKind::Admitted { pod_uid: spec.uid.clone() });
        files
    });
    note(shared, files.unwrap_or(Ok(())));
}

fn note(shared: &Shared, result: io::Result<()>) {
    if let Err(error) = result {
        shared.log(EventKind::FileFailed { error: format!("failed to write the pod's files: {error}") });
    }
}
