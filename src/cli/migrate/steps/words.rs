//! The sentences of `migrate status` and `migrate plan`. Pure.

use super::{Holding, Moving, Resource, State};
use crate::domain::Api;

/// Holders that a sentence names.
const NAMED_MAX: usize = 8;

pub(super) const RETURNING: &str =
    "10 s from the reload, until the schedulers know that no new claim gets a device";
pub(super) const NOT_REGISTERED: &str =
    "the kubelet, which has not opened the stream of the resource (`holdfast status`)";
pub(super) const NOT_PUBLISHED: &str =
    "the API server, which has no slice with the resource yet (`holdfast status`)";
/// What follows the fact that pods with a number are Pending, where nothing is held by number.
const CLASS: &str = ", or get a claim by a DeviceClass with `extendedResourceName`";
/// The same where containers have devices by number. The kubelet reports these devices as
/// allocatable, and gives one to the next pod as soon as it is free. Seen on Kubernetes 1.36.2.
const WAITING: &str = ", and get the device of a container that ends";
pub(super) const ENABLED: &str =
    "none ends, and all keep their devices: a restart of Holdfast does not affect them";

/// A holder with its devices.
pub(super) fn holding(held: &Holding) -> String {
    format!("{} ({})", held.holder, held.devices.join(", "))
}

fn holdings(all: &[&Holding]) -> String {
    let named: Vec<String> = all.iter().take(NAMED_MAX).map(|held| holding(held)).collect();
    let more = match all.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!("; and {more} more (`holdfast migrate status`)"),
    };
    named.join("; ") + &more
}

fn names<'a>(resources: impl Iterator<Item = &'a Resource>) -> String {
    resources.map(|resource| resource.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// What a resource waits for whose holders by the other API have not ended.
pub(super) fn left(api: Api, leaving: &[&Holding]) -> String {
    let what = if api == Api::Dra {
        "containers that have devices by number; until then the resource stays registered, and pods \
         that request a number get the devices of those that end"
    } else {
        "claims that have devices; until then these stay in the slices, with a taint"
    };
    format!("the end of {what}: {}", holdings(leaving))
}

pub(super) fn enable(needs_restart: bool) -> String {
    if needs_restart {
        "Restart Holdfast: the files have `[dra] enabled = true`, which takes effect at a start"
    } else {
        "Set `enabled = true` in `[dra]`, give Holdfast its rights in the cluster (docs/dra.md), \
         and restart it"
    }
    .to_owned()
}

pub(super) fn set(changed: &[&Moving<'_>], to: Api) -> String {
    format!(
        "Set `api = \"{}\"` for {}, run `holdfast config check`, and reload: `systemctl reload \
         holdfast`; in a DaemonSet, change the ConfigMap",
        to.as_str(),
        names(changed.iter().map(|it| it.resource))
    )
}

/// What the change does to pods.
pub(super) fn changed(changed: &[&Moving<'_>], to: Api) -> Vec<String> {
    let mut pods = vec!["no pod has to end before".to_owned()];
    let held = |claim| changed.iter().flat_map(|it| it.held_by(claim)).collect::<Vec<_>>();
    let (by_number, by_claim) = (held(false), held(true));
    let gave_number = changed.iter().any(|it| it.api.gives_by_number());
    match to {
        Api::Dra => {
            let class = if by_number.is_empty() { CLASS } else { WAITING };
            pods.push(format!(
                "free devices are in the slices within a second; the kubelet gives none to a \
                 container, so new pods that request a number stay Pending{class}"
            ));
        }
        Api::Both => {
            let number = if gave_number { "" } else { " and healthy for the kubelet" };
            pods.push(format!(
                "free devices are in the slices{number} within a second: new pods may request a \
                 number or have a claim"
            ));
        }
        Api::Plugin | Api::Returning { .. } => {
            pods.push(
                "all devices get the taint `holdfast.dev/not-for-claims`: the schedulers allocate \
                 none to a new claim"
                    .to_owned(),
            );
            pods.push(
                "a claim that was allocated before is prepared within 10 s; later its Prepare \
                 fails: delete its pod"
                    .to_owned(),
            );
        }
    }
    if !by_number.is_empty() {
        let taint = if to == Api::Plugin { "" } else { ", with the taint `holdfast.dev/held`" };
        pods.push(format!(
            "these keep their devices{taint}, also when a container starts again: {}",
            holdings(&by_number)
        ));
    }
    if !by_claim.is_empty() {
        pods.push(format!("these keep their devices: {}", holdings(&by_claim)));
    }
    pods
}

pub(super) fn wait() -> String {
    format!("Wait for {} s, until the schedulers know the taints", Api::KNOWN_WITHIN.as_secs())
}

/// What the end of the wait does to pods.
pub(super) fn returned(moving: &[Moving<'_>]) -> Vec<String> {
    let by_number = Api::Returning { by_number: true };
    let now = moving.iter().all(|it| [Api::Plugin, by_number].contains(&it.api));
    let when = if now { "before and after it" } else { "after it" };
    vec![format!("new pods that request a number get free devices {when}")]
}

/// The end of the holders by the other API, and what it does.
pub(super) fn end(to: Api, leaving: &[&Holding]) -> (String, Vec<String>) {
    let (who, then) = if to == Api::Dra {
        (
            "containers",
            "each device loses its taint when the end of its pod is proven; after the last one \
             the resource is no longer registered with the kubelet, and pods that request a number \
             get a claim if a DeviceClass has the `extendedResourceName`",
        )
    } else {
        (
            "claims",
            "each device leaves the slices when its claim has ended, and is healthy for the kubelet",
        )
    };
    let action = format!("Let these {who} end, at any time: {}", holdings(leaving));
    (action, vec![then.to_owned()])
}

/// What a restart of the kubelet does.
pub(super) fn restart(moving: &[Moving<'_>], dra: bool) -> Vec<String> {
    let mut lines = Vec::new();
    if dra {
        lines.push(
            "the kubelet deletes the slices of this node, and Holdfast publishes them again"
                .to_owned(),
        );
    }
    if moving.iter().any(|it| !it.held_by(true).is_empty()) {
        lines.push("pods with a claim run on; the kubelet does not prepare it again".to_owned());
    }
    let by_number: Vec<&Holding> = moving.iter().flat_map(|it| it.held_by(false)).collect();
    if by_number.is_empty() {
        return lines;
    }
    lines.push(
        "containers that run keep their devices by number; the kubelet rejects a pod if a container \
         of it is not running at that time, and Holdfast does not run or the container has an \
         unhealthy device"
            .to_owned(),
    );
    let unhealthy = by_number.iter().filter(|held| !held.unhealthy.is_empty());
    lines.extend(unhealthy.map(|held| {
        format!("{} may be rejected: unhealthy: {}", held.holder, held.unhealthy.join(", "))
    }));
    lines
}

/// What a reboot does.
pub(super) fn reboot(moving: &[Moving<'_>]) -> Vec<String> {
    let mut lines = Vec::new();
    let has = |claim| moving.iter().any(|it| !it.held_by(claim).is_empty());
    if has(true) {
        lines.push("the kubelet prepares the claims again, with the same devices".to_owned());
    }
    if has(false) {
        let is_number = |it: &&Moving<'_>| !it.held_by(false).is_empty();
        let gives = moving.iter().filter(is_number).all(|it| it.api.gives_by_number());
        let then = if gives { "" } else { ", which stay Pending without a claim" };
        lines.push(format!(
            "pods get the same devices by number if Holdfast registers before the kubelet admits \
             them, as the service does; in a DaemonSet they may be rejected, and their controllers \
             create others{then}"
        ));
    }
    if lines.is_empty() {
        lines.push("no pod has a device".to_owned());
    }
    lines
}

/// What becomes of pods that request a number and have their devices by a claim, when devices are
/// given by number again. Both were seen on Kubernetes 1.36.2.
fn of_claims_by_number(chosen: &[&Resource]) -> Vec<String> {
    let has_claims = |it: &&Resource| it.held_by(true).next().is_some();
    let claimed = || chosen.iter().copied().filter(has_claims);
    let mut all = Vec::new();
    if claimed().next().is_some() {
        // The scheduler subtracts all numbers that pods request from the allocatable one, which
        // lacks the devices of claims.
        all.push(
            "a pod that requests a number and has its devices by a claim counts twice: until it \
             ends, as many free devices are not given by number"
                .to_owned(),
        );
    }
    // A kubelet that has the resource calls us before each start, and has no device of such a pod.
    let stopped: Vec<&Resource> = claimed().filter(|it| it.pre_start).collect();
    if !stopped.is_empty() {
        all.push(format!(
            "such a pod of {} runs on, but the kubelet does not start its container again: delete \
             the pod",
            names(stopped.into_iter())
        ));
    }
    all
}

/// What can go wrong on the way.
pub(super) fn warnings(state: &State, to: Api, chosen: &[&Resource]) -> Vec<String> {
    let mut all = state.problems.clone();
    if !state.kubelet {
        all.push("the kubelet's socket is missing: nothing is registered".to_owned());
    }
    let lost = chosen.iter().filter(|it| {
        state.kubelet && it.listed && !it.registered && it.held_by(false).next().is_some()
    });
    all.extend(lost.map(|it| {
        format!(
            "the kubelet does not have {}, whose containers have devices: at its restart it \
             rejects pods with a container that does not run, and after five minutes it starts \
             none of their containers again (`holdfast status`)",
            it.name
        )
    }));
    if to != Api::Dra {
        all.extend(of_claims_by_number(chosen));
    }
    match to {
        Api::Dra => {
            all.push(
                "without a DeviceClass with `extendedResourceName` (Kubernetes 1.36), pods that \
                 request a number stay Pending: change their manifests, or let other nodes serve \
                 them"
                    .to_owned(),
            );
            all.push(
                "with such a class they get a claim, but only while no device of the resource is \
                 allocatable on the node: after the last container with one by number has ended. \
                 Cordon the node until then: else they get the devices of containers that end, by \
                 number again"
                    .to_owned(),
            );
            let refused: Vec<&Resource> =
                chosen.iter().filter(|it| it.pre_start).copied().collect();
            if !refused.is_empty() {
                all.push(format!(
                    "until five minutes later, the kubelet treats such pods as those of the device \
                     plugin of {}: their start fails",
                    names(refused.into_iter())
                ));
            }
        }
        Api::Both => all.push(
            "a claim and a container may race for a device: the loser's pod is deleted or \
             rejected, and its controller creates another (docs/dra.md)"
                .to_owned(),
        ),
        Api::Plugin | Api::Returning { .. } => {
            if state.dra {
                all.push(
                    "leave `[dra] enabled = true` until no claim has a device: without the driver \
                     the kubelet does not unprepare a claim, and its pod stays Terminating"
                        .to_owned(),
                );
            }
        }
    }
    all
}
