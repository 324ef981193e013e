//! The daemon's state as `status` and readiness report it.

use super::Views;
use super::config_report::ConfigReport;
use super::devices::{self, DeviceReport};
use crate::domain::{
    AllocId, Api, DeviceId, Grant, KubeletGeneration, LedgerHealth, MpsStates, Offering,
    PendingHook, PendingRelease, PendingReleases, Source, WhenNotDurable,
};
use crate::hook::NotRun;
use crate::kubelet::api::is_too_long;
use crate::kubelet::checkpoint::CheckpointUnread;
use crate::picture::Holder;
use crate::registration::ResourceStatus;
use crate::serving::Unrecorded;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// The daemon's state (`status -o json`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The version of this document's schema.
    pub schema: u32,
    /// The daemon's version.
    pub version: String,
    /// Seconds since its start.
    pub uptime_seconds: u64,
    /// Whether READY has been reached.
    pub ready: bool,
    /// The kubelet's registration socket; `null` while there is none.
    pub kubelet: Option<KubeletGeneration>,
    /// Whether that socket was left behind: no process listened on it at the last try.
    pub socket_left_behind: bool,
    /// Since when the kubelet's checkpoint cannot be read, and why. `null` if it can be read, or if
    /// there is none and no device is held.
    pub checkpoint_unread: Option<CheckpointUnread>,
    /// The running configuration, and remarks on its files.
    pub config: ConfigReport,
    /// The state of the ledger's storage.
    pub ledger: LedgerHealth,
    /// Whether the ledger did not answer when this was asked: a write to its disk may hang. The
    /// page does not ask.
    #[serde(default)]
    pub ledger_hangs: bool,
    /// Whether new grants are refused while the ledger cannot be written. Otherwise they are
    /// answered, and are in memory only.
    pub ledger_refuses: bool,
    /// The Allocates that were refused because no grant can be recorded, since the last recorded
    /// grant. `null` if there are none.
    pub not_recorded: Option<Unrecorded>,
    /// The damage of the ledger at the start, and its repair. `null` if the ledger was intact.
    pub recovery: Option<String>,
    /// Why `/metrics`, `/healthz` and `/readyz` are not served. `null` if they are served, or not
    /// configured.
    pub not_served: Option<String>,
    /// Why readers of `/metrics` are refused although it is served, or get a former certificate.
    /// Empty without a problem, and without TLS and `telemetry.authorize`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_readable: Vec<String>,
    /// Why the labels that the node has in the API server or in a file are not followed. `null` if
    /// they are, or if the configuration does not use them.
    #[serde(default)]
    pub labels_not_followed: Option<String>,
    /// Why the labels for Node Feature Discovery are not written. `null` if they are, or if
    /// `labels.features_d` is off.
    #[serde(default)]
    pub labels_not_written: Option<String>,
    /// Why Events and the condition of the node cannot be written. Empty without a problem, and if
    /// both are switched off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_reported: Vec<String>,
    /// Why pods with claims wait, or what an operator must decide about DRA: the driver's sockets,
    /// the API server, claims that the ledger has lost, another driver with the same devices. Empty
    /// without a problem, and if `[dra]` is off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dra_problems: Vec<String>,
    /// The hooks after release that are due or have failed. Until then their devices are free and
    /// unhealthy, or their next holder waits for its start.
    pub hooks: Vec<HookReport>,
    /// The grants that are held although their pods have ended, or are no longer listed, each with
    /// the proofs that its release waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_releases: Vec<PendingReport>,
    /// The hooks and checks that cannot be run now.
    pub not_run: Vec<NotRun>,
    /// The control daemons of MPS that Holdfast runs, by resource.
    pub mps: MpsStates,
    /// The resources by name.
    pub resources: Vec<ResourceReport>,
    /// The devices that are unhealthy, suspect or cordoned.
    pub ailing: Vec<DeviceReport>,
    /// Health signals that are unavailable, each with the reason.
    pub signals_off: BTreeMap<Source, String>,
    /// Why containers with a CDI name of a GPU lack a part of NVIDIA's driver, or the whole. `null`
    /// if they lack none.
    #[serde(default)]
    pub nvidia_driver: Option<String>,
    /// The reads that failed in the last scan, one sentence each.
    pub unread: BTreeSet<String>,
}

/// A hook after release of [`Status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookReport {
    /// The pending hook and its state.
    #[serde(flatten)]
    pub owed: PendingHook,
    /// The holders that were granted the device and wait for their start; the device is healthy for
    /// them. If there are none, the device is unhealthy until the hook is done.
    pub awaited_by: Vec<Holder>,
}

/// A grant of [`Status`] whose release waits for proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingReport {
    /// The grant.
    pub alloc_id: AllocId,
    /// Its resource.
    pub resource: String,
    /// The ids of its devices.
    pub devices: Vec<String>,
    /// Its holder.
    pub holder: Holder,
    /// What the release waits for.
    pub release: PendingRelease,
}

/// One resource of [`Status`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResourceReport {
    /// Its name.
    pub name: String,
    /// Whether the kubelet has opened our stream.
    pub registered: bool,
    /// Whether its devices are given to claims only, so it is not registered.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_claims: bool,
    /// The key `api` of the resource, `dra` or `both`; `null` if its devices are given by number
    /// only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api: Option<String>,
    /// Ids in the list.
    pub devices: usize,
    /// Healthy ids among them.
    pub healthy: usize,
    /// Healthy ids in the list for the kubelet, in which an id that a claim holds is unhealthy. The
    /// kubelet counts them as allocatable.
    #[serde(default)]
    pub allocatable: usize,
    /// Ids that a grant holds.
    pub held: usize,
    /// Why the last registration failed, or why the kubelet got no list; `null` if neither is so.
    pub problem: Option<String>,
    /// Whether the list is longer than the kubelet accepts, and was not sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub too_long: bool,
    /// How the kubelet's state differs from ours, although it has opened our stream: another list,
    /// or an answer of another plugin. `null` if no difference is known.
    pub disagreement: Option<String>,
    /// The time from the start of the last registration to its stream, in milliseconds.
    pub last_registration_ms: Option<f64>,
    /// The version of the device-plugin API that the kubelet accepted last. `null` before the first
    /// one.
    pub api_version: Option<String>,
}

impl ResourceReport {
    /// `yes`; `no`; `claims` for a resource that is not to be registered; `yes, claims` if claims
    /// get its devices too; or `ending` if it is registered only for containers that have devices
    /// by number.
    #[must_use]
    pub fn registered(&self) -> &'static str {
        match (self.only_claims, self.registered, self.api.as_deref()) {
            (true, ..) => "claims",
            (false, false, _) => "no",
            (false, true, None) => "yes",
            (false, true, Some("dra")) => "ending",
            (false, true, Some(_)) => "yes, claims",
        }
    }
}

impl Status {
    /// The numbers of registered resources, and of those that should be.
    #[must_use]
    pub fn registered(&self) -> (usize, usize) {
        let listed = self.resources.iter().filter(|resource| !resource.only_claims);
        listed
            .fold((0, 0), |(yes, all), resource| (yes + usize::from(resource.registered), all + 1))
    }

    /// Reads the views.
    pub(super) fn of(views: &Views, uptime: std::time::Duration) -> Self {
        let registrations = views.registrations.borrow().clone();
        let grants = views.grants.borrow().clone();
        let inventory = views.inventory.borrow().clone();
        let lists = views.lists.borrow().clone();
        let healthy = |offering: &Offering| {
            offering.devices.values().filter(|offered| offered.health.is_healthy()).count()
        };
        let held = |name: &str| {
            let live =
                grants.iter().filter(|grant| grant.is_live() && grant.resource.as_str() == name);
            live.flat_map(|grant| &grant.devices)
                .map(|device| &device.id)
                .collect::<BTreeSet<_>>()
                .len()
        };
        let report = |(name, offering): (&crate::domain::ResourceName, &Arc<Offering>)| {
            let registration = registrations.get(name).cloned().unwrap_or_default();
            let listed = lists.resources.get(name);
            let too_long = listed.is_some_and(|listed| is_too_long(listed));
            let not_sent = too_long.then(|| {
                format!(
                    "the list of {} devices is longer than the kubelet accepts in one message, and \
                     is not sent",
                    offering.devices.len()
                )
            });
            ResourceReport {
                name: name.to_string(),
                registered: registration.registered && !too_long,
                only_claims: listed.is_none(),
                api: Some(offering.spec.api.as_str())
                    .filter(|api| *api != Api::Plugin.as_str())
                    .map(str::to_owned),
                devices: offering.devices.len(),
                healthy: healthy(offering),
                allocatable: listed.filter(|_| !too_long).map_or(0, |listed| healthy(listed)),
                held: held(name.as_str()),
                problem: not_sent.or(registration.problem),
                too_long,
                disagreement: registration.disagreement,
                #[expect(clippy::cast_precision_loss, reason = "microseconds of a registration")]
                last_registration_ms: registration.last_registration_us.map(|us| us as f64 / 1e3),
                api_version: registration.api_version.map(str::to_owned),
            }
        };
        Status {
            schema: 1,
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_seconds: uptime.as_secs(),
            ready: *views.ready.borrow(),
            kubelet: *views.kubelet.borrow(),
            socket_left_behind: views.socket_left_behind(),
            checkpoint_unread: views.checkpoint_unread(),
            config: views.config.borrow().clone(),
            ledger: *views.ledger_health.borrow(),
            ledger_hangs: false,
            ledger_refuses: views.plan.borrow().ledger.when_not_durable == WhenNotDurable::Refuse,
            not_recorded: views.refusals.unrecorded(),
            hooks: hooks(views, &grants),
            pending_releases: pending_reports(views, &PendingReleases::new()),
            not_run: views.shortages.all(),
            mps: MpsStates::clone(&views.mps.borrow()),
            recovery: views.recovery.as_deref().map(str::to_owned),
            not_served: views.not_served.borrow().clone(),
            not_readable: views
                .not_readable
                .iter()
                .filter_map(|why| why.borrow().clone())
                .collect(),
            labels_not_followed: views.not_followed.iter().find_map(|why| why.borrow().clone()),
            labels_not_written: views.labels_not_written.borrow().clone(),
            not_reported: views.not_reported.borrow().clone(),
            dra_problems: views.dra_problems(),
            resources: inventory.resources.iter().map(report).collect(),
            ailing: devices::reports(views).into_iter().filter(is_ailing).collect(),
            signals_off: views.judgement.borrow().off.clone(),
            nvidia_driver: views.nvidia_driver.borrow().clone(),
            unread: views.unread.borrow().reasons().into_iter().map(str::to_owned).collect(),
        }
    }
}

/// The pending hooks, each with the pods that wait for it.
fn hooks(views: &Views, grants: &[Arc<Grant>]) -> Vec<HookReport> {
    let due = views.due.borrow().clone();
    let report = |owed: &PendingHook| {
        let has_it = |grant: &&Arc<Grant>| {
            let is_it = |id: &DeviceId| {
                *id == owed.device || id.shared().is_some_and(|whole| whole == owed.device)
            };
            grant.is_live()
                && grant.resource == owed.resource
                && grant.devices.iter().any(|device| is_it(&device.id))
        };
        let mut awaited_by: Vec<Holder> = Vec::new();
        if due.gated.get(&owed.resource).is_some_and(|devices| devices.contains_key(&owed.device)) {
            awaited_by.extend(grants.iter().filter(has_it).map(|grant| Holder::of(grant)));
            awaited_by.sort();
        }
        HookReport { owed: owed.clone(), awaited_by }
    };
    due.all().map(report).collect()
}

/// The grants whose release waits for proof.
pub(super) fn pending_reports(views: &Views, pending: &PendingReleases) -> Vec<PendingReport> {
    let grants = views.grants.borrow().clone();
    let report = |grant: &Arc<Grant>| {
        let release = PendingRelease::of(grant, pending)?;
        Some(PendingReport {
            alloc_id: grant.alloc_id.clone(),
            resource: grant.resource.to_string(),
            devices: grant.devices.iter().map(|device| device.id.to_string()).collect(),
            holder: Holder::of(grant).with_release(Some(&release)),
            release,
        })
    };
    grants.iter().filter_map(report).collect()
}

fn is_ailing(device: &DeviceReport) -> bool {
    device.health.as_deref() == Some("Unhealthy")
        || device.state == "suspect"
        || device.cordoned.is_some()
}

/// Sets `ready` when every resource is registered, is refused with a report, or waits for an absent
/// kubelet (I11). It is never reset.
///
/// Registration continues for a refused resource. One refused name must not make the service
/// manager end the daemon that serves all others.
pub(crate) async fn become_ready(views: Views, ready: watch::Sender<bool>) {
    let mut registrations = views.registrations;
    let lists = views.lists;
    let has_result = |status: &ResourceStatus| status.is_known() || status.problem.is_some();
    let settled = registrations
        .wait_for(|all| {
            lists.borrow().resources.keys().all(|name| all.get(name).is_some_and(has_result))
        })
        .await;
    if settled.is_ok() {
        ready.send_replace(true);
    }
}
