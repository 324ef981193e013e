//! What the parts of one daemon share.

use super::reload::Reloader;
use super::{Actors, Settings, specs};
use crate::admin::Views;
use crate::domain::limits::ConnectionLimits;
use crate::domain::{
    DeviceId, DueHooks, Grant, Inventory, KubeletGeneration, LedgerHealth, Listed, Plan,
    ResourceName, ResourceSpec, Unread,
};
use crate::health::Judgement;
use crate::hook::HookExecutor;
use crate::host::{self, HostRoot};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::ledger::core::{HeldBack, Ledger};
use crate::ledger::release_hooks;
use crate::registration::ResourceStatus;
use crate::serving::{Refusals, Sockets, SpecFiles};
use crate::store::Store;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::{RwLock, watch};

/// What the parts share: the settings, the addresses of the actors, the snapshots with their
/// publishers, and the resources that several parts use. `parts.rs` makes each part of it. It is
/// dropped when all parts run, so a channel ends with the part that publishes in it.
pub(super) struct Wiring {
    pub(super) settings: Settings,
    pub(super) host_root: HostRoot,
    /// The boot that new grants belong to.
    pub(super) boot_id: String,
    pub(super) actors: Actors,
    /// Published snapshots outlive their publisher.
    pub(super) views: Views,
    pub(super) publishers: Publishers,
    pub(super) names: watch::Receiver<Arc<BTreeMap<String, DeviceId>>>,
    /// The lists of an earlier process.
    pub(super) listed: Arc<Listed>,
    pub(super) store: Arc<Mutex<Store>>,
    pub(super) sockets: Arc<Sockets>,
    pub(super) limits: ConnectionLimits,
    pub(super) executor: HookExecutor,
    pub(super) spec_files: SpecFiles,
    /// One connection for all callers.
    pub(super) pod_resources: PodResources,
    pub(super) reloader: Reloader,
    /// Separates Allocates from pod listings.
    pub(super) gate: Arc<RwLock<()>>,
    /// Separates Registers from the offer of a handover.
    pub(super) registering: Arc<RwLock<()>>,
    pub(super) leaving: watch::Sender<bool>,
    pub(super) ending: watch::Sender<bool>,
}

/// The publishers of the snapshots in [`Views`], and of the ids.
pub(super) struct Publishers {
    pub(super) plan: watch::Sender<Arc<Plan>>,
    pub(super) inventory: Arc<watch::Sender<Arc<Inventory>>>,
    pub(super) grants: Arc<watch::Sender<Arc<Vec<Arc<Grant>>>>>,
    pub(super) due: Arc<watch::Sender<Arc<DueHooks>>>,
    pub(super) names: Arc<watch::Sender<Arc<BTreeMap<String, DeviceId>>>>,
    pub(super) ledger_health: Arc<watch::Sender<LedgerHealth>>,
    pub(super) judgement: Arc<watch::Sender<Judgement>>,
    pub(super) unread: Arc<watch::Sender<Unread>>,
    pub(super) registrations: Arc<watch::Sender<BTreeMap<ResourceName, ResourceStatus>>>,
    pub(super) kubelet: Arc<watch::Sender<Option<KubeletGeneration>>>,
    pub(super) not_served: watch::Sender<Option<String>>,
    pub(super) ready: watch::Sender<bool>,
}

impl Wiring {
    /// The snapshots begin with what the ledger has, so the first judgement and the first list are
    /// made with every held id (I3) and every due hook.
    pub(super) fn new(
        settings: Settings,
        host_root: HostRoot,
        store: Store,
        damage: Option<Arc<str>>,
        ledger: &Ledger,
        specs: Arc<[Arc<ResourceSpec>]>,
        actors: Actors,
    ) -> Self {
        let (ready, ready_view) = watch::channel(specs.is_empty());
        let due = ledger.due(&release_hooks(specs.iter()), &HeldBack::new());
        let (due, due_view) = watch::channel(Arc::new(due));
        let config = &settings.config;
        let (health, policy) = (config.health.clone(), config.policy);
        let patterns = specs::patterns(config);
        let plan = Plan { number: 1, specs, patterns, health, ledger: policy };
        let (plan, plan_view) = watch::channel(Arc::new(plan));
        let (inventory, inventory_view) = watch::channel(Arc::new(Inventory::default()));
        let (grants, grants_view) =
            watch::channel(Arc::new(ledger.grants().cloned().collect::<Vec<_>>()));
        let (ledger_health, ledger_health_view) = watch::channel(store.kept());
        let (names, names_view) = watch::channel(Arc::clone(ledger.names()));
        let verdicts = Arc::new(ledger.verdicts().clone());
        let (judgement, judgement_view) =
            watch::channel(Judgement { verdicts, ..Judgement::default() });
        let (unread, unread_view) = watch::channel(Unread::default());
        let (registrations, registrations_view) = watch::channel(BTreeMap::new());
        let (kubelet, kubelet_view) = watch::channel(None);
        let (not_served, not_served_view) = watch::channel(None);

        let executor = HookExecutor::new(host_root.clone());
        let reloader = Reloader::new(
            config,
            host_root.clone(),
            plan.clone(),
            actors.discovery.mailbox(),
            actors.ledger.mailbox(),
        );
        let limits = ConnectionLimits::of(host::open_files());
        let views = Views {
            inventory: inventory_view,
            grants: grants_view,
            due: due_view,
            judgement: judgement_view,
            unread: unread_view,
            registrations: registrations_view,
            kubelet: kubelet_view,
            checkpoint: CheckpointReader::new(settings.device_plugins()),
            config: reloader.report(),
            ledger_health: ledger_health_view,
            refusals: Refusals::default(),
            plan: plan_view,
            recovery: damage,
            shortages: executor.shortages().clone(),
            not_served: not_served_view,
            ready: ready_view,
        };
        Wiring {
            // A captured sysfs tree has no boot id. It counts as one boot.
            boot_id: host::boot_id(&settings.roots.host).unwrap_or_else(|| "unknown".into()),
            publishers: Publishers {
                plan,
                inventory: Arc::new(inventory),
                grants: Arc::new(grants),
                due: Arc::new(due),
                names: Arc::new(names),
                ledger_health: Arc::new(ledger_health),
                judgement: Arc::new(judgement),
                unread: Arc::new(unread),
                registrations: Arc::new(registrations),
                kubelet: Arc::new(kubelet),
                not_served,
                ready,
            },
            names: names_view,
            listed: Arc::new(ledger.listed().clone()),
            store: Arc::new(Mutex::new(store)),
            sockets: Arc::new(Sockets::new(&settings.device_plugins(), limits)),
            spec_files: SpecFiles::new(&config.cdi_directory, &config.device_info_directory),
            pod_resources: PodResources::new(settings.pod_resources()),
            gate: Arc::default(),
            registering: Arc::default(),
            leaving: watch::Sender::new(false),
            ending: watch::Sender::new(false),
            settings,
            host_root,
            actors,
            views,
            limits,
            executor,
            reloader,
        }
    }
}
