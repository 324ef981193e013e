//! A start of the kubelet, phase by phase.

use super::admission;
use super::core::DeviceManager;
use super::event::EventKind;
use super::pod::Pod;
use super::state::Shared;
use super::status;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Conditions of a start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Start {
    /// The container runtime is down when the kubelet lists the running containers: it believes
    /// that none runs, and decides again on every pod.
    pub runtime_down: bool,
}

/// Starts on the state that the last instance left; returns when `kubelet.sock` answers. An error
/// if it runs. A start that a kill overtakes ends without an error.
pub(in crate::lab::sim) async fn start(shared: &Arc<Shared>, how: Start) -> Result<(), io::Error> {
    if shared.peek().instance.is_some() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the kubelet is already running"));
    }
    shared.environment.prepare()?;
    let instance = shared.open();
    let started = phases(shared, instance, how).await;
    if started.is_err() && shared.with_instance(instance, |_| ()).is_some() {
        shared.close();
    }
    started
}

async fn phases(shared: &Arc<Shared>, instance: u64, how: Start) -> Result<(), io::Error> {
    let gaps = shared.behaviour.gaps;
    shared.environment.serve_pod_resources(shared, instance)?;
    shared.environment.sleep(gaps.to_container_manager).await;
    let running = match how.runtime_down {
        true => BTreeSet::new(),
        false => running_containers(&shared.peek().pods, shared.environment.now()),
    };
    shared.environment.sleep(gaps.to_device_manager).await;
    let snapshot = shared.environment.read_checkpoint().unwrap_or_else(|error| {
        shared.log(EventKind::CheckpointUnreadable { error });
        None
    });
    let snapshot = snapshot.unwrap_or_default();
    let known = snapshot.healthy.into_keys().collect();
    let manager = DeviceManager::start(snapshot.held, known, running, shared.environment.now());
    let manager = manager.panics(shared.behaviour.panics).aligns(shared.behaviour.topology_manager);
    if shared.with_instance(instance, |present| present.manager = manager).is_none() {
        return Ok(());
    }
    for name in shared.environment.stale_sockets()? {
        shared.environment.remove_socket(&name).await?;
        if shared.with_instance(instance, |_| ()).is_none() {
            return Ok(());
        }
    }
    shared.environment.serve_registration(shared, instance)?;
    shared.log(EventKind::Started { start: instance });
    let (reporter, looping) = (Arc::clone(shared), Arc::clone(shared));
    shared.spawn(instance, async move { status::report_status(&reporter, instance).await });
    shared.spawn(instance, async move { admission::sync_loop(&looping, instance).await });
    Ok(())
}

fn running_containers(pods: &[Pod], now: Duration) -> BTreeSet<(String, String)> {
    let containers = pods.iter().flat_map(|pod| {
        pod.containers.iter().map(|(name, container)| (&pod.spec.uid, name, container))
    });
    containers
        .filter(|(_, _, container)| container.runs(now))
        .map(|(uid, name, _)| (uid.clone(), name.clone()))
        .collect()
}
