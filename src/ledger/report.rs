//! The log lines and metrics about grants.

use super::core::{Change, Doubt, Proof};
use crate::domain::{
    Entry, Grant, GrantState, HookState, LedgerHealth, Observation, PendingHook, Refuse,
    Unreadable, UnreadableReason,
};
use crate::store::StoreError;
use crate::telemetry::metrics;
use std::sync::Arc;

/// Logs one line for each change of a grant.
pub(super) fn log_change(change: &Change, entry: &Entry) {
    if *change == Change::Nothing {
        return;
    }
    match entry {
        Entry::Grant(grant) => {
            let devices: Vec<&str> =
                grant.devices.iter().map(|device| device.id.as_str()).collect();
            // A lost grant that the kubelet's checkpoint had is bound from the beginning.
            let how = if grant.state == GrantState::Granted {
                "grant recorded"
            } else if let Some(hold) = &grant.claim {
                let (claim, allocation) = (&hold.claim, &hold.allocation);
                tracing::info!(alloc_id = %grant.alloc_id, resource = %grant.resource, ?devices, %claim, uid = claim.uid, allocation, "claim recorded");
                return;
            } else {
                "grant restored from the kubelet's checkpoint"
            };
            tracing::info!(alloc_id = %grant.alloc_id, resource = %grant.resource, ?devices, "{how}");
        }
        Entry::Moved { alloc_id, state } => match state {
            GrantState::Granted => {}
            GrantState::Bound { pod, container, .. } => tracing::info!(
                %alloc_id, namespace = pod.namespace.as_deref(), pod = pod.name.as_deref(), uid = pod.uid, container, "grant bound to container"
            ),
            GrantState::Prepared { pods, unprepared_at, .. } => {
                let pods: Vec<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
                tracing::info!(%alloc_id, ?pods, unprepared = unprepared_at.is_some(), "claim has other pods or was unprepared");
            }
            GrantState::Suspect { pod, .. } => {
                tracing::info!(%alloc_id, uid = pod.uid, "pod no longer listed by the kubelet; grant is suspect");
            }
            GrantState::Released { released_by, .. } => {
                metrics::released(released_by);
                tracing::info!(%alloc_id, released_by, "grant released");
            }
        },
        Entry::Named { key, id } => tracing::debug!(key, %id, "device id assigned"),
        Entry::Judged { device, .. } => tracing::debug!(%device, "verdict recorded"),
        Entry::Hook(hook) => tell_hook(hook),
        Entry::Gone { devices, since } => {
            tracing::debug!(devices = devices.len(), ?since, "absence of devices recorded");
        }
        Entry::Forgotten { devices } => {
            tracing::debug!(devices = devices.len(), "devices forgotten");
        }
        Entry::Listed { resource, devices } => {
            tracing::debug!(%resource, devices = devices.len(), "device list recorded");
        }
    }
}

/// Logs an id that is requested while another container seems to have it.
pub(super) fn doubted(grant: &Grant, doubt: &Doubt, refuse: Refuse) {
    let Doubt { id, pod, container, proof } = doubt;
    let (namespace, name, uid) = (pod.namespace.as_deref(), pod.name.as_deref(), &pod.uid);
    match (proof, refuse) {
        (Proof::Complete, Refuse::Proven) => {
            tracing::error!(resource = %grant.resource, %id, namespace, pod = name, uid, container, "refused: a running container has this device");
        }
        (Proof::Unreadable(why), Refuse::Proven) => {
            tracing::error!(resource = %grant.resource, %id, namespace, pod = name, uid, container, why, "refused: a pod may have this device");
        }
        (Proof::Complete | Proof::Unreadable(_), Refuse::Never) => tracing::error!(
            resource = %grant.resource, %id, namespace, pod = name, uid, container,
            "granted although a running container has this device: the configuration refuses nothing"
        ),
        (Proof::None, _) => tracing::warn!(
            resource = %grant.resource, %id, namespace, pod = name, uid, container,
            "granted although a running pod has this device: the kubelet started recently or lost its checkpoint, so nothing is proven"
        ),
    }
    let is_refused = *proof != Proof::None && refuse == Refuse::Proven;
    metrics::doubted(grant.resource.as_str(), *proof == Proof::Complete, is_refused);
}

/// Logs each time that the journal fails or recovers. A full disk refuses every Allocate, but is
/// logged once.
pub(super) fn changed(
    before: LedgerHealth,
    now: LedgerHealth,
    serves: bool,
    error: Option<&Arc<StoreError>>,
) {
    match (before.journal, now.journal) {
        (true, false) => {
            let error = error
                .map_or_else(|| "a sync of the journal failed".to_owned(), ToString::to_string);
            if serves {
                tracing::error!(%error, "the ledger cannot be written; grants are served, but are lost if the daemon ends before they are written");
            } else {
                tracing::error!(%error, "the ledger cannot be written; grants are refused until it can");
            }
        }
        (false, true) => {
            tracing::info!(late = before.not_durable, "the ledger can be written again");
        }
        _ => {}
    }
    if let (None, Some(Unreadable { since, because: UnreadableReason::Slow })) =
        (before.unreadable, now.unreadable)
    {
        tracing::warn!(
            since = since.to_seconds(),
            "the history cannot be read yet: its database is slow to open; grants are recorded in the journal, and nothing is lost"
        );
    }
}

/// Counts the result of a pass.
pub(super) fn reconciled(observation: &Observation, entries: &[Entry]) {
    let result = match (entries.is_empty(), &observation.checkpoint) {
        (false, _) => "changed",
        (true, Some(_)) => "unchanged",
        (true, None) => "blind",
    };
    metrics::reconciled(result);
}

/// Logs the progress of a hook.
fn tell_hook(hook: &PendingHook) {
    let PendingHook { resource, device, alloc_id, state, .. } = hook;
    match state {
        HookState::Due => {
            tracing::info!(%resource, %device, %alloc_id, "device released; the hook after release is due");
        }
        HookState::Failed { tries, why, .. } => {
            tracing::error!(%resource, %device, %alloc_id, tries, why, "the hook after release has failed; no container starts with the device until the hook succeeds");
        }
        HookState::Done => {
            tracing::info!(%resource, %device, %alloc_id, "the hook after release is done");
        }
    }
}
