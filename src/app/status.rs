//! What `status` and readiness say of the daemon.

use super::Views;
use super::devices::{self, DeviceReport};
use super::reload::ConfigReport;
use crate::domain::{DeviceId, Grant, KubeletGeneration, LedgerHealth, PendingHook, Source, WhenNotDurable};
use crate::hook::NotRun;
use crate::kubelet::checkpoint::CheckpointUnread;
use crate::picture::Holder;
use crate::registration::ResourceStatus;
use crate::serving::Unrecorded;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// The daemon at a glance (`status -o json`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The version of this document's form.
    pub schema: u32,
    /// The daemon's version.
    pub version: String,
    /// Seconds since its start.
    pub uptime_seconds: u64,
    /// Whether READY has been reached.
    pub ready: bool,
    /// The kubelet's registration socket; `null` while there is none.
    pub kubelet: Option<KubeletGeneration>,
    /// Whether that socket was left behind: nobody has listened on it when it was tried last.
    #[serde(default)]
    pub socket_left_behind: bool,
    /// Since when the kubelet's checkpoint cannot be read, and why; `null` where it can, and where there is none and nothing is held.
    #[serde(default)]
    pub checkpoint_unread: Option<CheckpointUnread>,
    /// The configuration that runs, and what is to be said of its files.
    #[serde(default)]
    pub config: ConfigReport,
    /// How the ledger is kept.
    pub ledger: LedgerHealth,
    /// Whether new grants are refused while it cannot be written; otherwise they are answered and in memory only.
    #[serde(default)]
    pub ledger_refuses: bool,
    /// What was refused since a grant was recorded, because none can be; `null` where nothing was.
    #[serde(default)]
    pub not_recorded: Option<Unrecorded>,
    /// What was wrong with the ledger at the start, and what came of it; `null` where everything was sound.
    #[serde(default)]
    pub recovery: Option<String>,
    /// Why `/metrics`, `/healthz` and `/readyz` are not served; `null` where they are, and where nobody wants them.
    #[serde(default)]
    pub not_served: Option<String>,
    /// The hooks after release that are due or have failed: their devices are free and unhealthy meanwhile, or their next
    /// holder waits for its start.
    #[serde(default)]
    pub hooks: Vec<HookReport>,
    /// The hooks and checks that cannot be run at present.
    #[serde(default)]
    pub not_run: Vec<NotRun>,
    /// The resources by name.
    pub resources: Vec<ResourceReport>,
    /// The devices that are unhealthy, and those that may soon be.
    #[serde(default)]
    pub ailing: Vec<DeviceReport>,
    /// Signals of health that are not there, each with the reason.
    #[serde(default)]
    pub signals_off: BTreeMap<Source, String>,
    /// What the last scan of the host could not read, one sentence each.
    #[serde(default)]
    pub unread: BTreeSet<String>,
}

/// A hook after release of [`Status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookReport {
    /// What is owed, and how far it has come.
    #[serde(flatten)]
    pub owed: PendingHook,
    /// Who has been given the device, as healthy as ever, and does not start before; with nobody the device is unhealthy until then.
    #[serde(default)]
    pub awaited_by: Vec<Holder>,
}

/// One resource of [`Status`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResourceReport {
    /// Its name.
    pub name: String,
    /// Whether the kubelet has opened our stream.
    pub registered: bool,
    /// Ids in the list.
    pub devices: usize,
    /// Healthy ids among them.
    pub healthy: usize,
    /// Ids that a grant holds.
    pub held: usize,
    /// Why the last registration failed; `null` when it did not.
    pub problem: Option<String>,
    /// What the kubelet has otherwise than Holdfast, although it has opened our stream: another list, or an answer of another
    /// plugin; `null` when nothing is known of that.
    #[serde(default)]
    pub disagreement: Option<String>,
    /// From the begin of the last registration to its stream, in milliseconds.
    pub last_registration_ms: Option<f64>,
    /// The version of the device-plugin API that the kubelet took last; `null` until it has taken one.
    pub api_version: Option<String>,
}

impl Status {
    /// Reads the views.
    pub(super) fn of(views: &Views, uptime: std::time::Duration) -> Self {
        let registrations = views.registrations.borrow().clone();
        let grants = views.grants.borrow().clone();
        let inventory = views.inventory.borrow().clone();
        let held = |name: &str| {
            let live = grants.iter().filter(|grant| grant.is_live() && grant.resource.as_str() == name);
            live.flat_map(|grant| &grant.devices).map(|device| &device.id).collect::<BTreeSet<_>>().len()
        };
        let report = |(name, offering): (&crate::domain::ResourceName, &Arc<crate::domain::Offering>)| {
            let registration = registrations.get(name).cloned().unwrap_or_default();
            ResourceReport {
                name: name.to_string(),
                registered: registration.registered,
                devices: offering.devices.len(),
                healthy: offering.devices.values().filter(|offered| offered.health.is_healthy()).count(),
                held: held(name.as_str()),
                problem: registration.problem,
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
            ledger_refuses: views.plan.borrow().ledger.when_not_durable == WhenNotDurable::Refuse,
            not_recorded: views.refusals.unrecorded(),
            hooks: hooks(views, &grants),
            not_run: views.shortages.all(),
            recovery: views.recovery.as_deref().map(str::to_owned),
            not_served: views.not_served.borrow().clone(),
            resources: inventory.resources.iter().map(report).collect(),
            ailing: devices::reports(views).into_iter().filter(is_ailing).collect(),
            signals_off: views.judgement.borrow().off.clone(),
            unread: views.unread.borrow().reasons().into_iter().map(str::to_owned).collect(),
        }
    }
}

/// What is owed to free devices, and what a pod waits for.
fn hooks(views: &Views, grants: &[Arc<Grant>]) -> Vec<HookReport> {
    let due = views.due.borrow().clone();
    let report = |owed: &PendingHook| {
        let has_it = |grant: &&Arc<Grant>| {
            let is_it = |id: &DeviceId| *id == owed.device || id.shared().is_some_and(|whole| whole == owed.device);
            grant.is_live() && grant.resource == owed.resource && grant.devices.iter().any(|device| is_it(&device.id))
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

fn is_ailing(device: &DeviceReport) -> bool {
    device.health.as_deref() == Some("Unhealthy") || device.state == "suspect" || device.cordoned.is_some()
}

/// Sets `ready` once every resource is registered or waits for an absent kubelet (I11), and never takes it back.
///
/// A resource that the kubelet refuses counts too: it is tried on, and said; one name must not have the service manager
/// end the daemon that serves all others.
pub(super) async fn become_ready(views: Views, ready: watch::Sender<bool>) {
    let mut registrations = views.registrations;
    let inventory = views.inventory;
    let is_settled = |status: &ResourceStatus| status.is_known() || status.problem.is_some();
    let settled = registrations.wait_for(|all| inventory.borrow().resources.keys().all(|name| all.get(name).is_some_and(is_settled))).await;
    if settled.is_ok() {
        ready.send_replace(true);
    }
}
