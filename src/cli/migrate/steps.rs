//! The way of resources from one API of Kubernetes to another: from the state to its steps. Pure.
//!
//! The kubelet of Kubernetes 1.36 behaves as stated, in pkg/kubelet/cm:
//!
//! - `devicemanager/manager.go`, `devicesToAllocate`: at its start the kubelet admits every pod
//!   again. A container that runs needs nothing. For any other container the resource must be
//!   registered, and the devices that it has must be healthy.
//! - `devicemanager`, `getContainerDeviceRequest` and `callPreStartContainerIfNeeded` treat the
//!   request of a pod whose devices come from a claim (`extendedResourceName`) as one of the device
//!   plugin, for as long as the resource is known: five minutes after its plugin has left
//!   (`endpointStopGracePeriod`).
//! - `dra/plugin/dra_plugin_manager.go`, `NewDRAPluginManager`: a start deletes all slices of the
//!   node. `dra/manager.go`, `unprepareResources`: without the driver a claim is not unprepared,
//!   and its pod does not end.
//!
//! The scheduler uses a class of that name where the node has no allocatable device of the resource
//! (pkg/scheduler/framework/plugins/noderesources/fit.go, `shouldDelegateResourceToDRA`).

mod words;

use crate::domain::Api;
use serde::Serialize;

/// What the running daemon has (`migrate status -o json`).
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct State {
    pub(super) schema: u32,
    /// Whether the driver for claims runs.
    pub(super) dra: bool,
    /// Whether the files have another value of `[dra] enabled`, which takes effect at a start.
    pub(super) needs_restart: bool,
    /// Whether the kubelet is there.
    pub(super) kubelet: bool,
    /// Why claims cannot get devices, or why the files are not in use, one sentence each.
    pub(super) problems: Vec<String>,
    pub(super) resources: Vec<Resource>,
}

/// A resource.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Resource {
    pub(super) name: String,
    /// The key `api`: `plugin`, `dra` or `both`.
    pub(super) api: String,
    /// Whether it returns from claims to the device plugin, for 10 s after a reload.
    pub(super) returning: bool,
    /// Whether the kubelet should have a list of it.
    pub(super) listed: bool,
    /// Whether the kubelet has it.
    pub(super) registered: bool,
    /// Free devices that the kubelet may give by number.
    pub(super) by_number: usize,
    /// Free devices that the scheduler may allocate to claims.
    pub(super) by_claim: usize,
    /// Devices in the slices, as the API server has them.
    pub(super) published: usize,
    /// Whether the kubelet calls before a container starts.
    #[serde(skip)]
    pub(super) pre_start: bool,
    pub(super) held: Vec<Holding>,
    /// What the next step waits for, one sentence each.
    pub(super) waits_for: Vec<String>,
}

/// Devices that are held.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Holding {
    /// Whether a claim holds them, and not a container that got them by number.
    pub(super) claim: bool,
    /// The pod and its container, or the claim and its pods.
    pub(super) holder: String,
    pub(super) devices: Vec<String>,
    /// The unhealthy ones among them, with the reason.
    pub(super) unhealthy: Vec<String>,
    /// What the release waits for, if the pod has ended.
    pub(super) release_waits_for: Option<String>,
}

impl Resource {
    /// The API that gives its devices to new pods.
    pub(super) fn api(&self) -> Api {
        match self.api.as_str() {
            "dra" => Api::Dra,
            "both" => Api::Both,
            _ if self.returning => Api::Returning { by_number: self.by_number > 0 },
            _ => Api::Plugin,
        }
    }

    /// The holders by one of the APIs.
    pub(super) fn held_by(&self, claim: bool) -> impl Iterator<Item = &Holding> {
        self.held.iter().filter(move |held| held.claim == claim)
    }

    /// The holders whose end the move to an API waits for: those by the other one. With `both` it
    /// waits for none.
    fn leaving(&self, to: Api) -> Vec<&Holding> {
        match to {
            Api::Both => Vec::new(),
            Api::Dra => self.held_by(false).collect(),
            Api::Plugin | Api::Returning { .. } => self.held_by(true).collect(),
        }
    }

    /// What the next step waits for.
    pub(super) fn waits(&self, state: &State) -> Vec<String> {
        let api = self.api();
        let leaving = self.leaving(api);
        let mut waits = Vec::new();
        if self.returning {
            waits.push(words::RETURNING.to_owned());
        }
        if !leaving.is_empty() {
            waits.push(words::left(api, &leaving));
        }
        let releases = leaving.iter().filter_map(|held| {
            let why = held.release_waits_for.as_ref()?;
            Some(format!("the release of {} waits for {why}", words::holding(held)))
        });
        waits.extend(releases);
        if state.kubelet && self.listed && !self.registered {
            waits.push(words::NOT_REGISTERED.to_owned());
        }
        if self.by_claim > 0 && self.published == 0 {
            waits.push(words::NOT_PUBLISHED.to_owned());
        }
        waits
    }
}

/// The steps to an API (`migrate plan -o json`).
#[derive(Debug, Serialize)]
pub(super) struct Plan {
    pub(super) schema: u32,
    pub(super) to: &'static str,
    pub(super) resources: Vec<String>,
    /// What can go wrong, one sentence each.
    pub(super) warnings: Vec<String>,
    pub(super) steps: Vec<Step>,
}

/// One step.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Step {
    /// `enable`, `set`, `wait` or `end`.
    pub(super) kind: &'static str,
    /// What to do.
    pub(super) action: String,
    /// What happens to pods, one sentence each.
    pub(super) pods: Vec<String>,
    /// What a restart of the kubelet does after this step.
    pub(super) kubelet_restart: Vec<String>,
    /// What a reboot of the node does after this step.
    pub(super) reboot: Vec<String>,
}

/// A resource in the course of the plan.
pub(super) struct Moving<'a> {
    pub(super) resource: &'a Resource,
    pub(super) api: Api,
    /// Whether the holders that it waited for have ended.
    pub(super) is_done: bool,
}

impl<'a> Moving<'a> {
    /// The holders that are left, by one of the APIs.
    pub(super) fn held_by(&self, claim: bool) -> Vec<&'a Holding> {
        let is_gone = self.is_done && claim == (self.api == Api::Plugin);
        self.resource.held_by(claim).filter(|_| !is_gone).collect()
    }
}

/// The steps that lead the chosen resources to an API.
pub(super) fn steps(state: &State, to: Api, chosen: &[&Resource]) -> Plan {
    let mut steps = Vec::new();
    let mut dra = state.dra;
    let now = |resource| Moving { resource, api: Resource::api(resource), is_done: false };
    let mut moving: Vec<Moving<'_>> = chosen.iter().map(|it| now(*it)).collect();
    let mut step = |kind, action, pods, moving: &[Moving<'_>], dra| {
        let (kubelet_restart, reboot) = (words::restart(moving, dra), words::reboot(moving));
        steps.push(Step { kind, action, pods, kubelet_restart, reboot });
    };
    if to != Api::Plugin && !dra {
        dra = true;
        let pods = vec![words::ENABLED.to_owned()];
        step("enable", words::enable(state.needs_restart), pods, &moving, dra);
    }
    let changed: Vec<&Moving<'_>> =
        moving.iter().filter(|it| it.api.as_str() != to.as_str()).collect();
    if !changed.is_empty() {
        let (action, pods) = (words::set(&changed, to), words::changed(&changed, to));
        moving.iter_mut().for_each(|it| it.api = to.after(it.api));
        step("set", action, pods, &moving, dra);
    }
    if moving.iter().any(|it| matches!(it.api, Api::Returning { .. })) {
        let pods = words::returned(&moving);
        moving.iter_mut().for_each(|it| it.api = Api::Plugin);
        step("wait", words::wait(), pods, &moving, dra);
    }
    let leaving: Vec<&Holding> = chosen.iter().flat_map(|it| it.leaving(to)).collect();
    if !leaving.is_empty() {
        moving.iter_mut().for_each(|it| it.is_done = true);
        let (action, pods) = words::end(to, &leaving);
        step("end", action, pods, &moving, dra);
    }
    let warnings = if steps.is_empty() { Vec::new() } else { words::warnings(state, to, chosen) };
    let resources = chosen.iter().map(|it| it.name.clone()).collect();
    Plan { schema: 1, to: to.as_str(), resources, warnings, steps }
}

#[cfg(test)]
mod tests;
