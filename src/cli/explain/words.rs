//! The sentences of an explanation. Pure.

use super::Held;
use crate::admin::{DeviceReport, HookReport};
use crate::cli::document::{Row, holder_in_words, proof_in_words};
use crate::domain::{DeviceId, Grant, GrantState, HookState, MissingProof, PendingRelease};

/// What a device is: `GPU-5a7c: gpu, nvidia0, NUMA node 0`.
pub(super) fn heading(
    id: &DeviceId,
    report: Option<&DeviceReport>,
    grant: Option<&Grant>,
) -> String {
    let key =
        report.map(|device| device.key.as_str()).filter(|key| !key.is_empty()).or_else(|| {
            let device = grant?.devices.iter().find(|device| super::whole(&device.id) == *id)?;
            Some(device.key.as_str())
        });
    let address = key.and_then(|key| key.strip_prefix("pci:")?.split('/').next());
    let class = report.and_then(|device| device.class).map(|class| class.to_string());
    let names = report.map(|device| device.names.join(", ")).filter(|names| !names.is_empty());
    let numa = report.map_or(&[][..], |device| &device.numa_nodes);
    let numa = numa.iter().map(|node| format!("NUMA node {node}")).collect::<Vec<_>>();
    let facts: Vec<String> = class
        .into_iter()
        .chain(address.filter(|address| *address != id.as_str()).map(str::to_owned))
        .chain(names)
        .chain(numa)
        .collect();
    if facts.is_empty() { id.to_string() } else { format!("{id}: {}", facts.join(", ")) }
}

/// Whether and as what a device is offered.
pub(super) fn offered(report: Option<&DeviceReport>) -> String {
    let Some(device) = report else {
        return "no: no resource lists it; `holdfast discover` shows what is offered".into();
    };
    let resources = device.resources.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    match (device.health.as_deref(), device.reason.as_deref()) {
        _ if resources.is_empty() => {
            "no: no resource lists it; `holdfast discover` shows what is offered".into()
        }
        (_, Some("deselected")) => format!(
            "no longer: the configuration does not select it; it stays in the list of {resources} \
             while it is held"
        ),
        (Some("Healthy"), _) => format!("yes, as {resources}"),
        _ => format!("no: it is in the list of {resources} as unhealthy"),
    }
}

/// What happens next with a device; `None` if that depends on its holder alone.
pub(super) fn upcoming(
    id: &DeviceId,
    report: Option<&DeviceReport>,
    hooks: &[HookReport],
    is_held: bool,
) -> Option<String> {
    let device = report.filter(|device| !device.resources.is_empty())?;
    let hook = hooks.iter().map(|hook| &hook.owed).find(|hook| hook.device == *id);
    if device.cordoned.is_some() {
        return Some(format!("no new container gets it until `holdfast device uncordon {id}`"));
    }
    match hook.map(|hook| &hook.state) {
        Some(HookState::Due) => {
            return Some("no container starts with it until its hook after release has run".into());
        }
        Some(HookState::Failed { tries, why, .. }) => {
            return Some(format!(
                "no container starts with it until its hook after release succeeds; it failed \
                 {tries} times: {why}"
            ));
        }
        _ => {}
    }
    match (device.health.as_deref(), device.healthy_in_seconds) {
        (_, Some(seconds)) => {
            Some(format!("healthy in {seconds} s, if no symptom appears until then"))
        }
        (Some("Unhealthy"), None) => Some(
            "no new container gets it until the cause has ended; docs/health.md explains the reason"
                .into(),
        ),
        _ => (!is_held).then(|| "it is free: the next container that asks may get it".to_owned()),
    }
}

/// A grant with its words.
pub(super) fn held<'a>(
    grant: &'a Grant,
    row: Row<'a>,
    release: Option<&PendingRelease>,
) -> Held<'a> {
    let holder = format!("{}, since {}", holder_in_words(grant), grant.granted_at.to_seconds());
    let api = match &grant.claim {
        Some(_) => "a ResourceClaim (Dynamic Resource Allocation)",
        None if grant.alloc_id.is_of_other_plugin() => "an Allocate of another device plugin",
        None => "an Allocate (device plugin)",
    };
    let state = grant.state_for_people(release);
    let since = release.and_then(|release| release.since);
    let subject = match grant.claim {
        Some(_) => ", since",
        None => "; the kubelet has not listed it since",
    };
    let since = since.map(|since| format!("{subject} {}", since.to_seconds())).unwrap_or_default();
    let (about, next) = about(grant, release);
    let explained = format!("{state}: {about}{since}");
    let waits = release.iter().flat_map(|release| {
        release.waits_for.iter().map(|proof| match (proof, release.lists) {
            (MissingProof::Lists, 1) => format!("{} (one came)", proof.in_words()),
            _ => proof.in_words().to_owned(),
        })
    });
    Held { row, holder, api, explained, waits: waits.collect(), next }
}

/// What the state means, and what follows it.
fn about(grant: &Grant, release: Option<&PendingRelease>) -> (&'static str, &'static str) {
    const PROVEN: &str = "the device is released as soon as that is proven, usually within a \
         minute; if not, see HoldfastGrantSuspect in docs/operate.md";
    match (&grant.state, release) {
        (GrantState::Prepared { unprepared_at: Some(_), .. }, _) => {
            ("the kubelet has unprepared the claim", PROVEN)
        }
        (_, Some(release)) if release.waits_for.is_empty() => (
            release.pod.in_words(),
            "the next check of the kubelet, within 15 s, decides about the release",
        ),
        (_, Some(release)) => (release.pod.in_words(), PROVEN),
        (GrantState::Granted, _) => (
            "Allocate was answered; the kubelet has not named the container yet",
            "bound when the kubelet's checkpoint names it; released if a later one lacks it for 60 s",
        ),
        (GrantState::Prepared { .. }, _) => (
            "the claim is prepared",
            "released when the kubelet has unprepared it and no process of its pods runs",
        ),
        _ => ("the container may use it", "released when the pod has ended and that is proven"),
    }
}

/// The last holder of what is free now.
pub(super) fn last_held(grant: &Grant) -> Vec<(&'static str, String)> {
    let GrantState::Released { released_at, released_by, .. } = &grant.state else {
        return Vec::new();
    };
    let (from, until) = (grant.granted_at.to_seconds(), released_at.to_seconds());
    vec![
        ("last held", format!("by {}, from {from} until {until}", holder_in_words(grant))),
        ("proof", proof_in_words(released_by)),
    ]
}
