//! PreStartContainer, before every start of a container, also after a boot and after the container's own end. First the gate:
//! what another pod had is not started with before that pod is gone and its hook after release has ended, which the ledger
//! knows (`ledger/core/passage.rs`). Then the hook before start of each of the container's devices. The kubelet names
//! ids only, waits for 30 s, and tries again, with growing pauses, after an error; the pod does not fail.
//!
//! A reset takes the device from everybody who has it. So it waits until it is known that the grants of the device are of
//! one pod: an init container's, which has ended before the next one starts. While an earlier pod's release is not proven,
//! the kubelet is told so, and tries again.

use super::core::{Holders, holders};
use super::plugin::Shared;
use crate::domain::{Device, DeviceId, Grant, Health, Hook, Inventory, Offering, Phase, Reason, Refusal, ResourceName, StartBlocked};
use crate::hook::Occasion;
use crate::messages::{Mailbox, Pass};
use futures_util::future::try_join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tonic::Status;

/// For all devices of a container together. The kubelet waits for 30 s.
const DEADLINE: Duration = Duration::from_secs(28);
/// How often the ledger is asked whether a container may start that has to wait: mostly for the last seconds of a pod.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long one answer may take: it reads a few files.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long a hook waits for which the system has no room, before the kubelet is told so. It tries again by itself.
const ROOM_WITHIN: Duration = Duration::from_secs(5);
/// Until such a hook is tried again.
const ROOM_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// How long a reset waits for the ledger to learn from the kubelet's checkpoint who the holders are. That takes milliseconds.
const HOLDERS_WITHIN: Duration = Duration::from_secs(5);

/// Whether the kubelet is to call before a container starts.
pub(super) fn is_needed(inventory: &Inventory, resource: &ResourceName) -> bool {
    inventory.resources.get(resource).is_some_and(|offering| offering.spec.needs_pre_start())
}

/// Waits at the gate, and runs the hook for each device.
///
/// # Errors
/// When the gate stays shut, in words that name the device, who had it and what to do; when a hook has failed, in words that
/// name the hook, the device and the reason.
pub(super) async fn before_start(shared: &Shared, resource: &ResourceName, ids: Vec<DeviceId>) -> Result<(), Status> {
    let inventory = shared.inventory.borrow().clone();
    let nothing = || Status::not_found(Refusal::NotOffered(resource.clone()).to_string());
    let offering = inventory.resources.get(resource).ok_or_else(nothing)?;
    let until = Instant::now() + DEADLINE;
    if offering.spec.is_gated() {
        pass(&shared.pass, resource, &ids, until).await?;
    }
    let Some(hook) = &offering.spec.hooks.before_start else { return Ok(()) };
    let failed = |id: &DeviceId, why: &dyn std::fmt::Display| {
        let error = format!("the hook {} of {resource} has failed for device `{id}`: {why}", Phase::BeforeStart);
        tracing::warn!(%resource, device = %id, %why, "the hook before start has failed; the container waits");
        Status::failed_precondition(error)
    };
    let runs = devices(offering, &ids)?.into_iter().map(|(id, device)| async move {
        let ran = one(shared, resource, hook, &id, device).await;
        ran.map_err(|why| failed(&id, &why))
    });
    let ran = tokio::time::timeout_at(until, try_join_all(runs)).await;
    let late = || failed(ids.first().unwrap_or(&DeviceId::new("")), &"all of them together have taken too long");
    ran.unwrap_or_else(|_| Err(late())).map(drop)
}

/// Waits until the ledger lets the container start. A hook that has failed is run again by itself, and not waited for.
async fn pass(ledger: &Mailbox<Pass>, resource: &ResourceName, ids: &[DeviceId], until: Instant) -> Result<(), Status> {
    let mut said = false;
    loop {
        let answer = ledger.call(Pass { resource: resource.clone(), ids: ids.to_vec() }, ANSWER_WITHIN).await;
        let Err((id, barred)) = answer.map_err(|error| Status::unavailable(error.to_string()))? else { return Ok(()) };
        if !std::mem::replace(&mut said, true) {
            tracing::info!(%resource, device = %id, why = %barred, "a container is about to start, and waits");
        }
        if matches!(barred, StartBlocked::Failed { .. }) || Instant::now() + ASK_EVERY > until {
            tracing::warn!(%resource, device = %id, why = %barred, "a container cannot start yet; the kubelet tries again");
            return Err(Status::failed_precondition(format!("device `{id}` of {resource} cannot be started with yet: {barred}")));
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

/// The devices behind the ids, each once.
fn devices(offering: &Offering, ids: &[DeviceId]) -> Result<Vec<(DeviceId, Arc<Device>)>, Status> {
    let mut devices = BTreeMap::new();
    for id in ids {
        let resource = || offering.spec.name.clone();
        let unknown = || Status::not_found(Refusal::Unknown { resource: resource(), id: id.clone() }.to_string());
        let offered = offering.devices.get(id).ok_or_else(unknown)?;
        if let Health::Unhealthy(reason @ Reason::DeviceGone) = offered.health {
            return Err(Status::failed_precondition(Refusal::Unhealthy { resource: resource(), id: id.clone(), reason }.to_string()));
        }
        devices.entry(offered.device.id.clone()).or_insert((id.clone(), Arc::clone(&offered.device)));
    }
    Ok(devices.into_values().collect())
}

async fn one(shared: &Shared, resource: &ResourceName, hook: &Hook, id: &DeviceId, device: Arc<Device>) -> Result<(), String> {
    if *hook == Hook::Reset {
        let mut grants = shared.grants.clone();
        let is_known = |grants: &Arc<Vec<Arc<Grant>>>| holders(grants.iter().map(AsRef::as_ref), &device) != Holders::Unknown;
        let known = tokio::time::timeout(HOLDERS_WITHIN, grants.wait_for(is_known)).await;
        let known = matches!(known, Ok(Ok(_)));
        if !known {
            return Err("several containers have it, and it is not known yet of which pods; it is tried again".into());
        }
        if let Holders::Several(pod) = holders(shared.grants.borrow().iter().map(AsRef::as_ref), &device) {
            return Err(format!("another pod ({pod}) has it still, until its end is proven; it is tried again"));
        }
    }
    let grants = shared.grants.borrow().clone();
    let mut of_id = grants.iter().filter(|grant| grant.resource == *resource && grant.devices.iter().any(|held| held.id == *id));
    let holder = of_id.next().filter(|_| of_id.next().is_none());
    let whole = device.id.clone();
    let occasion = Occasion {
        phase: Phase::BeforeStart,
        resource: resource.clone(),
        device,
        alloc_id: holder.map(|grant| grant.alloc_id.clone()),
        pod: holder.and_then(|grant| grant.pod().cloned()),
        container: holder.and_then(|grant| grant.container().map(str::to_owned)),
    };
    let until = Instant::now() + ROOM_WITHIN;
    loop {
        match shared.performer.run(hook, &occasion).await {
            Err(error) if error.is_no_result(Phase::BeforeStart) && Instant::now() + ROOM_AGAIN_AFTER < until => {
                tokio::time::sleep(ROOM_AGAIN_AFTER).await;
            }
            Err(error) if error.is_no_result(Phase::BeforeStart) => return Err(format!("{error}; the kubelet tries again")),
            Err(error) if shared.performer.outputs().of(&whole).is_empty() => return Err(error.to_string()),
            Err(error) => return Err(format!("{error}; `holdfast device show {whole}` on the node shows what it wrote last")),
            Ok(()) => return Ok(()),
        }
    }
}
