//! The pod workers: each starts the containers of one pod, in order, and again when they end.

use super::admission::{self, Halt};
use super::core::PreStart;
use super::event::EventKind;
use super::pod::{Container, ContainerKind, ContainerSpec, PodPhase, PodSpec};
use super::state::{Shared, State};
use crate::domain::ResourceName;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The kubelet's deadline of `PreStartContainer`, the only deadline that it sets.
const PRE_START_WITHIN: Duration = Duration::from_secs(30);

/// Starts a worker for a pod, unless one is running.
pub(super) fn work(shared: &Arc<Shared>, instance: u64, uid: &str) {
    if shared.with_instance(instance, |present| present.workers.insert(uid.to_owned()))
        == Some(true)
    {
        let (worker, uid) = (Arc::clone(shared), uid.to_owned());
        shared.spawn(instance, async move { run(&worker, instance, &uid).await });
    }
}

enum Next {
    Start(Box<(PodSpec, ContainerSpec)>),
    Wait(Duration),
    Nothing,
}

async fn run(shared: &Shared, instance: u64, uid: &str) {
    loop {
        let now = shared.environment.now();
        match shared.in_instance(instance, |state| next(state, uid, now)).unwrap_or(Next::Nothing) {
            Next::Start(start) => start_container(shared, instance, &start.0, &start.1).await,
            Next::Wait(time) => shared.environment.sleep(time).await,
            Next::Nothing => return,
        }
    }
}

/// The next work for a pod. Without work, the worker leaves the pod in the same step.
fn next(state: &mut State, uid: &str, now: Duration) -> Next {
    let work = state.pod(uid).filter(|pod| !pod.is_over()).and_then(|pod| {
        for container in pod
            .containers
            .values_mut()
            .filter(|container| container.running && !container.runs(now))
        {
            (container.running, container.ended, container.ends_at) = (false, true, None);
        }
        if let Some(end) = pod
            .containers
            .values()
            .find_map(|container| container.ends_at.filter(|_| container.running))
        {
            return Some(Next::Wait(end - now));
        }
        let waits = |container: &&ContainerSpec| {
            pod.containers.get(&container.name).is_none_or(|known| !known.running && !known.ended)
        };
        let container = pod.spec.in_order().find(waits)?;
        let due = pod.containers.get(&container.name).map_or(now, |known| known.retry_at);
        Some(match due.checked_sub(now).filter(|wait| !wait.is_zero()) {
            Some(wait) => Next::Wait(wait),
            None => Next::Start(Box::new((pod.spec.clone(), container.clone()))),
        })
    });
    if let Some(work) = work {
        return work;
    }
    if let Some(present) = &mut state.instance {
        present.workers.remove(uid);
    }
    if let Some(pod) = state.pod(uid).filter(|pod| pod.phase == PodPhase::Pending) {
        pod.phase = PodPhase::Running;
    }
    Next::Nothing
}

async fn start_container(
    shared: &Shared,
    instance: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
) {
    // The sandbox, and with it the folder for logs, comes before the options.
    let logs = shared.in_instance(instance, |state| {
        let pod = state.pod(&spec.uid).filter(|pod| !pod.is_over());
        pod.map_or(Ok(()), |_| shared.environment.create_logs(spec, &container.name))
    });
    note(shared, logs.unwrap_or(Ok(())));
    let options = match run_options(shared, instance, spec, container).await {
        Err(Halt::Over) => return,
        Err(Halt::Refused(error)) => Err(format!("CreateContainerConfigError: {error}")),
        Ok(started) => {
            match started.edits.cdi_devices.iter().find(|name| !shared.environment.resolves(name)) {
                Some(name) => Err(format!(
                    "CreateContainerError: CDI device injection failed: unresolvable CDI devices {name}"
                )),
                None => Ok(started),
            }
        }
    };
    let now = shared.environment.now();
    let (pod_uid, name) = (spec.uid.clone(), container.name.clone());
    let files = shared.in_instance(instance, |state| {
        // A pod that was deleted or rejected meanwhile is not started.
        let Some(pod) = state.pod(&spec.uid).filter(|pod| !pod.is_over()) else { return Ok(()) };
        let known = pod.containers.entry(name.clone()).or_default();
        match options {
            Ok(started) => {
                let is_new = !std::mem::replace(&mut pod.has_cgroup, true);
                let ends_at =
                    (container.kind == ContainerKind::Init).then(|| now + init_duration(shared));
                *known = Container { running: true, ends_at, retry_at: now, ..started };
                state.events.push(now, EventKind::ContainerStarted { pod_uid, container: name });
                if is_new { shared.environment.create_pod(spec) } else { Ok(()) }
            }
            Err(error) => {
                known.waiting = Some(error.clone());
                known.retry_at = now + shared.behaviour.restart_after;
                state.events.push(now, EventKind::StartFailed { pod_uid, container: name, error });
                Ok(())
            }
        }
    });
    note(shared, files.unwrap_or(Ok(())));
}

/// The run time of an init container, drawn at random.
fn init_duration(shared: &Shared) -> Duration {
    let most = usize::try_from(shared.behaviour.init_takes.as_millis()).unwrap_or_default();
    Duration::from_millis(u64::try_from(shared.environment.below(most + 1)).unwrap_or_default())
}

/// `GetDeviceRunContainerOptions`: PreStartContainer where the plugin requested it, Allocate where
/// nothing is recorded, then the stored answers of all resources merged in random order.
async fn run_options(
    shared: &Shared,
    instance: u64,
    spec: &PodSpec,
    container: &ContainerSpec,
) -> Result<Container, Halt> {
    let mut lacks = false;
    let resources = admission::resources(shared, container);
    for (resource, _) in &resources {
        let call = shared.with_instance(instance, |present| {
            if !present.manager.is_plugin_resource(resource) {
                return Ok(PreStart::Skip);
            }
            lacks |= present.manager.held().get(&spec.uid, &container.name, resource).is_none();
            present.manager.pre_start(&spec.uid, &container.name, resource)
        });
        if let PreStart::Call(client, ids) = call.ok_or(Halt::Over)?? {
            let called = tokio::select! {
                biased;
                called = client.pre_start(&ids) => called,
                () = shared.environment.sleep(PRE_START_WITHIN) => Err("rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned()),
            };
            let failed = |error| {
                super::error::AllocateError::Rpc(format!(
                    "device plugin PreStartContainer rpc failed with err: {error}"
                ))
            };
            called.map_err(failed)?;
        }
    }
    if lacks {
        admission::allocate_resources(shared, instance, spec, container).await?;
    }
    let order: Vec<ResourceName> =
        admission::resources(shared, container).into_iter().map(|(resource, _)| resource).collect();
    shared
        .with_instance(instance, |present| {
            let held = present.manager.held();
            let of_container = || held.container(&spec.uid, &container.name);
            Container {
                edits: held.edits(&spec.uid, &container.name, &order),
                devices: of_container()
                    .map(|(resource, held)| (resource.clone(), held.ids()))
                    .collect(),
                alloc_ids: of_container()
                    .filter_map(|(resource, held)| Some((resource.clone(), held.alloc_id()?)))
                    .collect(),
                ..Container::default()
            }
        })
        .ok_or(Halt::Over)
}

/// A container ends without a command and waits for its next start.
pub(super) fn crash(shared: &Arc<Shared>, uid: &str, container: &str) {
    let retry_at = shared.environment.now() + shared.behaviour.restart_after;
    let instance = shared.update(|state| {
        let container = state.pod(uid)?.containers.get_mut(container)?;
        (container.running, container.ends_at) = (false, None);
        container.retry_at = retry_at;
        state.instance.as_ref().map(|instance| instance.number)
    });
    if let Some(instance) = instance {
        work(shared, instance, uid);
    }
}

pub(super) fn note(shared: &Shared, result: io::Result<()>) {
    if let Err(error) = result {
        shared.log(EventKind::FileFailed {
            error: format!("failed to write the pod's files: {error}"),
        });
    }
}
