//! PreStartContainer, which the kubelet calls before every start of a container, also after a boot
//! and after the container's own end.
//!
//! First the start gate: a container does not start with a device that another pod had, before that
//! pod has ended and its hook after release is done. The ledger checks that
//! (`ledger/core/passage.rs`). Then the hook before start of each of the container's devices. The
//! kubelet sends only ids, and waits for 30 s. After an error it tries again, with growing pauses;
//! the pod does not fail.
//!
//! A reset takes the device from every container that has it. So it waits until the device's grants
//! are known to be of one pod, such as those of an init container, which has ended before the next
//! one starts. While an earlier pod's release is not proven, the kubelet gets an error and tries
//! again.

use super::core::{Holders, holders};
use super::shared::Shared;
use crate::domain::{
    Device, DeviceId, Grant, Health, Hook, Inventory, Offering, Phase, Reason, Refusal,
    ResourceName, StartBlocked,
};
use crate::hook::Occasion;
use crate::messages::{CheckStart, Mailbox};
use futures_util::future::try_join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tonic::Status;

/// Deadline for all devices of a container together. The kubelet waits for 30 s.
const DEADLINE: Duration = Duration::from_secs(28);
/// How often the gate is checked for a container that has to wait, mostly for the last seconds of a
/// pod.
const CHECK_EVERY: Duration = Duration::from_millis(200);
/// Deadline of one check. It reads a few files.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long a hook waits for processes or memory before the kubelet gets an error. The kubelet
/// tries again.
const SHORTAGE_WITHIN: Duration = Duration::from_secs(5);
/// The pause before such a hook is tried again.
const SHORTAGE_RETRY: Duration = Duration::from_millis(500);
/// How long a reset waits until the ledger knows the holders from the kubelet's checkpoint. That
/// takes milliseconds.
const HOLDERS_WITHIN: Duration = Duration::from_secs(5);

/// Whether the kubelet has to call PreStartContainer for this resource.
pub(super) fn is_needed(lists: &Inventory, resource: &ResourceName) -> bool {
    lists.resources.get(resource).is_some_and(|offering| offering.spec.needs_pre_start())
}

/// Waits for the start gate, and runs the hook for each device.
///
/// # Errors
/// When the container may not start yet: the error names the device, its holder and the remedy.
/// When a hook has failed: the error names the hook, the device and the reason.
pub(super) async fn before_start(
    shared: &Shared,
    resource: &ResourceName,
    ids: Vec<DeviceId>,
) -> Result<(), Status> {
    let lists = shared.lists.borrow().clone();
    let nothing = || Status::not_found(Refusal::NotOffered(resource.clone()).to_string());
    let offering = lists.resources.get(resource).ok_or_else(nothing)?;
    let until = Instant::now() + DEADLINE;
    if offering.spec.is_gated() {
        wait_for_gate(&shared.check_start, resource, &ids, until).await?;
    }
    let Some(hook) = &offering.spec.hooks.before_start else { return Ok(()) };
    let failed = |id: &DeviceId, why: &dyn std::fmt::Display| {
        let error = format!(
            "the hook {} of {resource} failed for device `{id}`: {why}",
            Phase::BeforeStart
        );
        tracing::warn!(%resource, device = %id, %why, "the hook before start failed; the container does not start yet");
        Status::failed_precondition(error)
    };
    let runs = devices(offering, &ids)?.into_iter().map(|(id, device)| async move {
        let ran = one(shared, resource, hook, &id, device).await;
        ran.map_err(|why| failed(&id, &why))
    });
    let ran = tokio::time::timeout_at(until, try_join_all(runs)).await;
    let late = || {
        failed(
            ids.first().unwrap_or(&DeviceId::new("")),
            &"the hooks of the container's devices took too long together",
        )
    };
    ran.unwrap_or_else(|_| Err(late())).map(drop)
}

/// Waits until the ledger lets the container start. A failed hook after release is retried by the
/// hook runner, and is not waited for.
async fn wait_for_gate(
    ledger: &Mailbox<CheckStart>,
    resource: &ResourceName,
    ids: &[DeviceId],
    until: Instant,
) -> Result<(), Status> {
    let mut logged = false;
    loop {
        let answer = ledger
            .call(CheckStart { resource: resource.clone(), ids: ids.to_vec() }, ANSWER_WITHIN)
            .await;
        let Err((id, blocked)) = answer.map_err(|error| Status::unavailable(error.to_string()))?
        else {
            return Ok(());
        };
        if !std::mem::replace(&mut logged, true) {
            tracing::info!(%resource, device = %id, why = %blocked, "a container has to wait before it starts");
        }
        if matches!(blocked, StartBlocked::Failed { .. }) || Instant::now() + CHECK_EVERY > until {
            tracing::warn!(%resource, device = %id, why = %blocked, "a container cannot start yet; the kubelet will retry");
            return Err(Status::failed_precondition(format!(
                "a container with device `{id}` of {resource} cannot start yet: {blocked}"
            )));
        }
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

/// The devices of these ids, each once.
fn devices(offering: &Offering, ids: &[DeviceId]) -> Result<Vec<(DeviceId, Arc<Device>)>, Status> {
    let mut devices = BTreeMap::new();
    for id in ids {
        let resource = || offering.spec.name.clone();
        let unknown = || {
            Status::not_found(Refusal::Unknown { resource: resource(), id: id.clone() }.to_string())
        };
        let offered = offering.devices.get(id).ok_or_else(unknown)?;
        if let Health::Unhealthy(reason @ Reason::DeviceGone) = offered.health {
            return Err(Status::failed_precondition(
                Refusal::Unhealthy { resource: resource(), id: id.clone(), reason }.to_string(),
            ));
        }
        devices
            .entry(offered.device.id.clone())
            .or_insert((id.clone(), Arc::clone(&offered.device)));
    }
    Ok(devices.into_values().collect())
}

async fn one(
    shared: &Shared,
    resource: &ResourceName,
    hook: &Hook,
    id: &DeviceId,
    device: Arc<Device>,
) -> Result<(), String> {
    if *hook == Hook::Reset {
        let mut grants = shared.grants.clone();
        let is_known = |grants: &Arc<Vec<Arc<Grant>>>| {
            holders(grants.iter().map(AsRef::as_ref), &device) != Holders::Unknown
        };
        let known = tokio::time::timeout(HOLDERS_WITHIN, grants.wait_for(is_known)).await;
        let known = matches!(known, Ok(Ok(_)));
        if !known {
            return Err("several containers have the device, and their pods are not known yet; the kubelet will retry".into());
        }
        if let Holders::Several(pod) =
            holders(shared.grants.borrow().iter().map(AsRef::as_ref), &device)
        {
            return Err(format!(
                "another pod ({pod}) still has the device until its end is proven; the kubelet will retry"
            ));
        }
    }
    let grants = shared.grants.borrow().clone();
    let mut of_id = grants.iter().filter(|grant| {
        grant.resource == *resource && grant.devices.iter().any(|held| held.id == *id)
    });
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
    let until = Instant::now() + SHORTAGE_WITHIN;
    loop {
        match shared.performer.run(hook, &occasion).await {
            Err(error)
                if error.is_no_result(Phase::BeforeStart)
                    && Instant::now() + SHORTAGE_RETRY < until =>
            {
                tokio::time::sleep(SHORTAGE_RETRY).await;
            }
            Err(error) if error.is_no_result(Phase::BeforeStart) => {
                return Err(format!("{error}; the kubelet will retry"));
            }
            Err(error) if shared.performer.outputs().of(&whole).is_empty() => {
                return Err(error.to_string());
            }
            Err(error) => {
                return Err(format!(
                    "{error}; `holdfast device show {whole}` on the node shows its last output"
                ));
            }
            Ok(()) => return Ok(()),
        }
    }
}
