//! What the parts of one daemon share.

use super::reload::Reloader;
use super::specs::Specs;
use super::{Actors, Settings, specs};
use crate::admin::{Views, listen};
use crate::domain::limits::ConnectionLimits;
use crate::domain::{
    ClaimEvidence, DeviceId, DueHooks, Grant, Inventory, KubeletGeneration, LedgerHealth, Listed,
    MpsStates, NvidiaNode, Plan, ResourceName, Unread,
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
use crate::slices::published::Published;
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
    /// Makes the streams send their lists again.
    pub(super) resend: Arc<watch::Sender<()>>,
    /// Separates Registers from the offer of a handover.
    pub(super) registering: Arc<RwLock<()>>,
    pub(super) leaving: watch::Sender<bool>,
    pub(super) ending: watch::Sender<bool>,
}

/// The publishers of the snapshots in [`Views`], and of the ids.
pub(super) struct Publishers {
    pub(super) plan: watch::Sender<Arc<Plan>>,
    pub(super) inventory: Arc<watch::Sender<Arc<Inventory>>>,
    pub(super) lists: Arc<watch::Sender<Arc<Inventory>>>,
    pub(super) grants: Arc<watch::Sender<Arc<Vec<Arc<Grant>>>>>,
    pub(super) due: Arc<watch::Sender<Arc<DueHooks>>>,
    pub(super) names: Arc<watch::Sender<Arc<BTreeMap<String, DeviceId>>>>,
    pub(super) ledger_health: Arc<watch::Sender<LedgerHealth>>,
    pub(super) judgement: Arc<watch::Sender<Judgement>>,
    pub(super) unread: Arc<watch::Sender<Unread>>,
    /// The GPUs of NVIDIA's driver; `None` while they cannot be read.
    pub(super) gpus: watch::Sender<Option<Arc<NvidiaNode>>>,
    pub(super) registrations: Arc<watch::Sender<BTreeMap<ResourceName, ResourceStatus>>>,
    pub(super) kubelet: Arc<watch::Sender<Option<KubeletGeneration>>>,
    pub(super) mps: Arc<watch::Sender<Arc<MpsStates>>>,
    /// Why `/metrics` is not served, or not as configured.
    pub(super) telemetry: listen::Problems,
    /// Why the labels that the node has in the API server are not followed.
    pub(super) not_followed: watch::Sender<Option<String>>,
    /// Why the file with the labels of the node cannot be read.
    pub(super) labels_not_read: watch::Sender<Option<String>>,
    /// Why the labels for Node Feature Discovery are not written.
    pub(super) labels_not_written: watch::Sender<Option<String>>,
    /// Why Events and the condition of the node cannot be written.
    pub(super) not_reported: watch::Sender<Vec<String>>,
    /// Why the kubelet does not reach the DRA driver.
    pub(super) dra_sockets: watch::Sender<Option<String>>,
    /// Why the devices for claims are not published in the API server.
    pub(super) dra_slices: watch::Sender<Option<String>>,
    /// What the API server has of the devices for claims.
    pub(super) published: watch::Sender<Option<Arc<Published>>>,
    /// Which claims the ledger has lost, and holds without their names.
    pub(super) dra_claims: watch::Sender<Option<String>>,
    /// Why the status of claims cannot be written.
    pub(super) dra_statuses: watch::Sender<Option<String>>,
    /// The evidence about claims that may have ended. Empty without the DRA driver.
    pub(super) claim_evidence: watch::Sender<Arc<ClaimEvidence>>,
    pub(super) ready: watch::Sender<bool>,
}

impl Publishers {
    /// The snapshots begin with what the ledger has, so the first judgement and the first list are
    /// made with every held id (I3) and every due hook.
    fn new(ledger: &Ledger, health: LedgerHealth, plan: Plan) -> Self {
        let due = ledger.due(&release_hooks(plan.specs.iter()), &HeldBack::new());
        let verdicts = Arc::new(ledger.verdicts().clone());
        Publishers {
            ready: watch::Sender::new(plan.specs.is_empty()),
            plan: watch::Sender::new(Arc::new(plan)),
            inventory: Arc::default(),
            lists: Arc::default(),
            grants: Arc::new(watch::Sender::new(Arc::new(ledger.grants().cloned().collect()))),
            due: Arc::new(watch::Sender::new(Arc::new(due))),
            names: Arc::new(watch::Sender::new(Arc::clone(ledger.names()))),
            ledger_health: Arc::new(watch::Sender::new(health)),
            judgement: Arc::new(watch::Sender::new(Judgement { verdicts, ..Judgement::default() })),
            unread: Arc::default(),
            gpus: watch::Sender::default(),
            registrations: Arc::default(),
            kubelet: Arc::default(),
            mps: Arc::default(),
            telemetry: listen::Problems::default(),
            not_followed: watch::Sender::default(),
            labels_not_read: watch::Sender::default(),
            labels_not_written: watch::Sender::default(),
            not_reported: watch::Sender::default(),
            dra_sockets: watch::Sender::default(),
            dra_slices: watch::Sender::default(),
            published: watch::Sender::default(),
            dra_claims: watch::Sender::default(),
            dra_statuses: watch::Sender::default(),
            claim_evidence: watch::Sender::default(),
        }
    }
}

impl Wiring {
    pub(super) fn new(
        settings: Settings,
        host_root: HostRoot,
        store: Store,
        damage: Option<Arc<str>>,
        ledger: &Ledger,
        specs: Specs,
        actors: Actors,
    ) -> Self {
        let config = &settings.config;
        let publishers = Publishers::new(ledger, store.kept(), specs::first_plan(config, specs));
        let executor = HookExecutor::new(host_root.clone());
        let reloader = Reloader::new(
            config,
            host_root.clone(),
            publishers.plan.clone(),
            actors.discovery.mailbox(),
            actors.ledger.mailbox(),
        );
        let spec_files =
            SpecFiles::new(&config.cdi_directory, &config.device_info_directory, &host_root);
        let views = Views {
            inventory: publishers.inventory.subscribe(),
            lists: publishers.lists.subscribe(),
            grants: publishers.grants.subscribe(),
            due: publishers.due.subscribe(),
            judgement: publishers.judgement.subscribe(),
            unread: publishers.unread.subscribe(),
            registrations: publishers.registrations.subscribe(),
            kubelet: publishers.kubelet.subscribe(),
            checkpoint: CheckpointReader::new(settings.device_plugins()),
            config: reloader.report(),
            ledger_health: publishers.ledger_health.subscribe(),
            refusals: Refusals::default(),
            plan: publishers.plan.subscribe(),
            recovery: damage,
            shortages: executor.shortages().clone(),
            mps: publishers.mps.subscribe(),
            not_served: publishers.telemetry.not_served.subscribe(),
            not_readable: [
                publishers.telemetry.tls.subscribe(),
                publishers.telemetry.reviews.subscribe(),
            ],
            not_followed: [
                publishers.not_followed.subscribe(),
                publishers.labels_not_read.subscribe(),
            ],
            labels_not_written: publishers.labels_not_written.subscribe(),
            not_reported: publishers.not_reported.subscribe(),
            dra: [
                publishers.dra_sockets.subscribe(),
                publishers.dra_slices.subscribe(),
                publishers.dra_claims.subscribe(),
                publishers.dra_statuses.subscribe(),
            ],
            published: publishers.published.subscribe(),
            nvidia_driver: spec_files.gpus.problem(),
            ready: publishers.ready.subscribe(),
        };
        let limits = ConnectionLimits::of(host::open_files());
        Wiring {
            // A captured sysfs tree has no boot id. It counts as one boot.
            boot_id: host::boot_id(&settings.roots.host).unwrap_or_else(|| "unknown".into()),
            names: publishers.names.subscribe(),
            listed: Arc::new(ledger.listed().clone()),
            store: Arc::new(Mutex::new(store)),
            sockets: Arc::new(Sockets::new(&settings.device_plugins(), limits)),
            spec_files,
            pod_resources: PodResources::new(settings.pod_resources()),
            gate: Arc::default(),
            resend: Arc::default(),
            registering: Arc::default(),
            leaving: watch::Sender::new(false),
            ending: watch::Sender::new(false),
            settings,
            host_root,
            actors,
            views,
            publishers,
            limits,
            executor,
            reloader,
        }
    }
}
