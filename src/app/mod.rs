//! The application: wiring, supervision and shutdown. It is the only module that knows all actors.
//!
//! [`App::start`] wires everything in order. [`App::shut_down`] (`ending.rs`) goes the reverse way.
//! The streams end last, because the kubelet keeps the devices while they are open.

mod checks;
mod control;
mod devices;
mod ending;
mod error;
mod files;
mod hooks;
mod kernel_log;
mod labels;
mod listen;
mod measures;
mod nvml;
mod page;
mod problems;
mod processors;
mod rebuild;
mod reload;
mod rescans;
mod settings;
mod specs;
mod status;
pub mod supervisor;
mod take_over;
mod views;
mod watcher;

pub use control::{
    ControlError, Installed, LedgerEnd, Order, Upgrade, UpgradeOrder, ask_to_hand_over,
    get as control_get, order as control_order, read_ledger, verify as verify_ledger,
};
pub use devices::DeviceReport;
pub use error::StartError;
pub use measures::write_held;
pub use problems::{Problem, problem_summary};
pub use processors::Processors;
pub use reload::ConfigReport;
pub use settings::Settings;
pub use status::{HookReport, ResourceReport, Status};
pub use views::{Actors, Views};

use self::specs::Specs;
use self::supervisor::{Policy, Slot, Supervision};
use crate::discovery::{DiscoveryActor, DiscoveryConfig};
use crate::domain::limits::ConnectionLimits;
use crate::domain::{Durability, Inventory, Plan, ResourceName, Unread};
use crate::handover::{self, Offer};
use crate::hardware;
use crate::health::{HealthActor, HealthConfig, Judgement};
use crate::hook::HookExecutor;
use crate::host::{self, HostRoot};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::ledger::core::{HeldBack, Ledger};
use crate::ledger::{LedgerActor, LedgerConfig, release_hooks};
use crate::registration::{Registration, RegistrationConfig};
use crate::serving::{Affinity, Preparer, Refusals, Serving, Shared, Sockets, SpecFiles};
use crate::store::Store;
use actix::Arbiter;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tokio::sync::{RwLock, mpsc, watch};

/// A running daemon.
#[derive(Debug)]
pub struct App {
    /// The actors.
    pub actors: Actors,
    /// The published state, for readers outside the actors.
    pub views: Views,
    escalated: mpsc::Receiver<&'static str>,
    store: Arc<Mutex<Store>>,
    shared: Shared,
    leaving: watch::Sender<bool>,
    ending: watch::Sender<bool>,
    arbiters: Vec<Arbiter>,
    ledger_guardian: tokio::task::JoinHandle<()>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    asked: mpsc::Receiver<handover::Asked>,
    upgrades: mpsc::Receiver<UpgradeOrder>,
    reloader: reload::Reloader,
    config_changes: mpsc::Receiver<()>,
    /// Files that are removed at the end.
    files: Vec<PathBuf>,
}

/// An event that concerns the whole daemon.
#[derive(Debug)]
pub enum AppEvent {
    /// This actor has died too often.
    Escalated(&'static str),
    /// Another instance requests a handover.
    Asked(handover::Asked),
    /// An operator requests an upgrade to another binary.
    Upgrade(UpgradeOrder),
    /// The configuration files have changed.
    ConfigChanged,
}

impl App {
    /// Starts everything. Must be called on the thread of a running actix system.
    ///
    /// Returns when the first inventory is published and registration begun; see `views.ready`.
    ///
    /// # Errors
    /// When the kubelet's directory is not usable, or the ledger cannot be opened.
    #[expect(clippy::too_many_lines, reason = "wiring, one straight line")]
    pub async fn start(settings: Settings) -> Result<App, StartError> {
        let roots = settings.roots.clone();
        error::check_kubelet_dir(&roots.kubelet)?;
        let host_root = HostRoot::new(&roots.host);

        tracing::debug!("opening the ledger");
        // The running kernel's boot id, not the host root's: written pages survive until it ends.
        let boot_id = host::boot_id(Path::new("/"));
        let (mut store, mut recovered) = Store::open_keeping(
            &roots.state,
            settings.config.durability,
            boot_id.as_deref(),
            settings.config.retention,
        )?;
        // Only now: a start that the user can fix ends in one sentence, without log lines around
        // it.
        tracing::info!(version = env!("CARGO_PKG_VERSION"), kubelet_dir = %roots.kubelet.display(), "starting");
        settings.close_folders();
        rebuild::complete(&mut store, &mut recovered, &settings.device_plugins(), &host_root);
        tracing::info!(grants = recovered.grants.len(), state_dir = %roots.state.display(), "ledger recovered");
        let recovery =
            (!recovered.report.is_clean()).then(|| Arc::<str>::from(recovered.report.to_string()));
        if let Some(report) = &recovery {
            tracing::warn!(%report, "the ledger was damaged");
        }

        let Specs { specs, patterns } =
            specs::specs(&settings.config, &host_root, &recovered.grants);
        let names: Vec<ResourceName> = specs.iter().map(|spec| spec.name.clone()).collect();

        let (health, policy) = (settings.config.health.clone(), settings.config.policy);
        let first = Plan { number: 1, specs: Arc::clone(&specs), patterns, health, ledger: policy };
        let (plan, plan_view) = watch::channel(Arc::new(first));

        // Published snapshots outlive their publisher.
        let (inventory, inventory_view) = watch::channel(Arc::new(Inventory::default()));
        // The grants are known before the first judgement: the first list has every held id (I3).
        let recovered = Ledger::from(recovered);
        let hooks = release_hooks(specs.iter());
        // The due hooks are known before it too.
        let (due, due_view) = watch::channel(Arc::new(recovered.due(&hooks, &HeldBack::new())));
        let (grants, grants_view) =
            watch::channel(Arc::new(recovered.grants().cloned().collect::<Vec<_>>()));
        let (kept, kept_view) = watch::channel(store.kept());
        let (remembered, names_view) = watch::channel(Arc::clone(recovered.names()));
        let (listed, verdicts) =
            (Arc::new(recovered.listed().clone()), Arc::new(recovered.verdicts().clone()));
        let (judgement, judgement_view) =
            watch::channel(Judgement { verdicts, ..Judgement::default() });
        let (inventory, judgement) = (Arc::new(inventory), Arc::new(judgement));
        let (unread, unread_view) = watch::channel(Unread::default());
        let (registrations, registrations_view) = watch::channel(BTreeMap::new());
        let (kubelet, kubelet_view) = watch::channel(None);
        let (leaving, leaving_view) = watch::channel(false);
        let (ending, ending_view) = watch::channel(false);
        let (gate, registering) = (Arc::new(RwLock::new(())), Arc::new(RwLock::new(())));
        // One connection for all callers.
        let pod_resources = PodResources::new(settings.pod_resources());
        let checkpoint = CheckpointReader::new(settings.device_plugins());
        let store = Arc::new(Mutex::new(store));
        let limits = ConnectionLimits::of(host::open_files());
        let sockets = Arc::new(Sockets::new(&settings.device_plugins(), limits));
        sockets.sweep();

        let discovery = Slot::<DiscoveryActor>::new("discovery");
        let health = Slot::<HealthActor>::new("health");
        let ledger = Slot::<LedgerActor>::new("ledger");
        let serving = Slot::<Serving>::new("serving");
        let registration = Slot::<Registration>::new("registration");
        let actors = Actors {
            discovery: discovery.handle(),
            health: health.handle(),
            ledger: ledger.handle(),
            serving: serving.handle(),
            registration: registration.handle(),
        };

        let (escalate, mut escalated) = mpsc::channel(1);
        let supervision = Supervision { policy: Policy::default(), escalate, ending: ending_view };
        // A stalled disk must not delay the streams, and a slow scan must not delay an Allocate.
        let arbiter = |what| {
            Arbiter::try_with_tokio_rt(host::runtime)
                .map_err(|why| StartError::NoThread { what, why })
        };
        let (ledger_arbiter, discovery_arbiter, here) =
            (arbiter("the ledger")?, arbiter("discovery")?, Arbiter::current());

        // A captured sysfs tree has no boot id. It counts as one boot.
        let boot_of_grants = host::boot_id(&roots.host).unwrap_or_else(|| "unknown".into());
        let config = LedgerConfig {
            store: Arc::clone(&store),
            recovered: Arc::new(Mutex::new(Some(recovered))),
            process_crash: settings.config.durability == Durability::ProcessCrash,
            plan: plan_view.clone(),
            kept: Arc::new(kept),
            grants: Arc::new(grants),
            due: Arc::new(due),
            forget: Some(actors.health.mailbox()),
            names: Arc::new(remembered),
            inventory: inventory_view.clone(),
            checkpoint: checkpoint.clone(),
            pod_resources: pod_resources.clone(),
            host_root: roots.host.clone(),
            boot_id: boot_of_grants.clone(),
            kubelet: kubelet_view.clone(),
            gate: Arc::clone(&gate),
        };
        let guardian = ledger.start(ledger_arbiter.handle(), supervision.clone(), move |life| {
            LedgerActor::new(config.clone(), life)
        });

        // The devices that another plugin granted are known before the first judgement too.
        take_over::from_other_plugins(&actors.ledger.mailbox(), names.clone()).await;

        let probed_root = host_root.clone();
        let config = HealthConfig {
            plan: plan_view.clone(),
            boot_id: boot_of_grants.clone(),
            leave_after: settings.leave_after,
            listed,
            grants: grants_view.clone(),
            due: due_view.clone(),
            kubelet: kubelet_view.clone(),
            inventory,
            judgement: Arc::clone(&judgement),
            probe_device: Arc::new(move |device| hardware::signals(&probed_root, device)),
            rescan: actors.discovery.mailbox(),
            ledger: actors.ledger.mailbox(),
        };
        health.start(here.clone(), supervision.clone(), move |life| {
            HealthActor::new(config.clone(), life)
        });

        let (asker, question, nvml) = nvml::NvmlTask::new(&settings, &actors, &judgement);
        let config = DiscoveryConfig {
            host_root: host_root.clone(),
            plan: plan.clone(),
            grants: grants_view.clone(),
            inventory: inventory_view.clone(),
            names: names_view,
            nvml,
            question,
            unread: Arc::new(unread),
            remember: actors.ledger.mailbox(),
            discovered: actors.health.mailbox(),
            found: actors.ledger.mailbox(),
        };
        discovery.start(discovery_arbiter.handle(), supervision.clone(), move |life| {
            DiscoveryActor::new(config.clone(), life)
        });

        let files = SpecFiles::new(
            &settings.config.cdi_directory,
            &settings.config.device_info_directory,
            &host_root,
        );
        let performer = HookExecutor::new(host_root.clone());
        let (outputs, shortages) = (performer.outputs().clone(), performer.shortages().clone());
        let refusals = Refusals::default();
        let preparer = Preparer::new(
            inventory_view.clone(),
            host_root.clone(),
            files.clone(),
            boot_of_grants.clone(),
            kubelet_view.clone(),
        );
        let shared = Shared {
            inventory: inventory_view.clone(),
            grants: grants_view.clone(),
            performer: performer.clone(),
            preparer: Arc::new(preparer),
            record: actors.ledger.replying_mailbox(),
            unusable: actors.health.mailbox(),
            check_start: actors.ledger.mailbox(),
            opened: actors.registration.mailbox(),
            ended: actors.registration.mailbox(),
            closed_early: actors.registration.mailbox(),
            sockets: Arc::clone(&sockets),
            affinity: Affinity::default(),
            refusals: refusals.clone(),
            gate: Arc::clone(&gate),
            leaving: leaving_view.clone(),
        };
        let of_serving = shared.clone();
        serving.start(here.clone(), supervision.clone(), move |life| {
            Serving::new(of_serving.clone(), life)
        });

        // One queued event covers all changes.
        let (config_changed, config_changes) = mpsc::channel(1);
        let watcher = watcher::Watcher {
            device_plugins: settings.device_plugins(),
            host_root: host_root.clone(),
            plan: plan_view.clone(),
            config_dirs: reload::directories(&settings.config),
            config_changed,
            kubelet: Arc::new(kubelet),
            sockets: Arc::clone(&sockets),
            rescan: actors.discovery.mailbox(),
            device_events: actors.health.mailbox(),
            judgement: Arc::clone(&judgement),
            reconcile: actors.ledger.mailbox(),
            kubelet_seen: actors.registration.mailbox(),
            checkpoint_written: actors.registration.mailbox(),
            socket_lost: actors.registration.mailbox(),
        };
        watcher.read_kubelet_socket();

        // No resource is registered before there is a list to send.
        let mut first = inventory_view.clone();
        let complete = |inventory: &Arc<Inventory>| {
            names.iter().all(|name| inventory.resources.contains_key(name))
        };
        tokio::select! {
            _ = first.wait_for(complete) => {}
            Some(actor) = escalated.recv() => return Err(StartError::Escalated(actor)),
        }

        // Before the first Register: the kubelet may start containers at once.
        let keeper = files::Writer {
            files,
            host_root: host_root.clone(),
            inventory: inventory_view.clone(),
            grants: grants_view.clone(),
        }
        .begin();
        let config = RegistrationConfig {
            kubelet_socket: watcher::kubelet_socket(&settings.device_plugins()),
            device_plugins: settings.device_plugins(),
            checkpoint: checkpoint.clone(),
            pod_resources: pod_resources.clone(),
            inventory: inventory_view.clone(),
            bind: actors.serving.mailbox(),
            retire: actors.serving.mailbox(),
            kubelet: kubelet_view.clone(),
            status: Arc::new(registrations),
            registering: Arc::clone(&registering),
            leaving: leaving_view,
        };
        registration.start(here, supervision, move |life| {
            Registration::new(config.clone(), life.number, life)
        });

        let checker = checks::Runner {
            performer: performer.clone(),
            inventory: inventory_view.clone(),
            checked: actors.health.mailbox(),
        };
        let runner = hooks::Runner {
            performer,
            due: due_view.clone(),
            inventory: inventory_view.clone(),
            grants: grants_view.clone(),
            ended: actors.ledger.mailbox(),
        };

        let labels = settings
            .config
            .features_directory
            .clone()
            .map(|folder| tokio::spawn(labels::keep(folder, inventory_view.clone())));
        let reloader = reload::Reloader::new(
            &settings.config,
            host_root.clone(),
            plan,
            actors.discovery.mailbox(),
            actors.ledger.mailbox(),
        );
        let (ready, ready_view) = watch::channel(specs.is_empty());
        let (not_served, not_served_view) = watch::channel(None);
        let views = Views {
            inventory: inventory_view,
            grants: grants_view,
            judgement: judgement_view,
            unread: unread_view,
            due: due_view,
            registrations: registrations_view,
            kubelet: kubelet_view,
            checkpoint,
            config: reloader.report(),
            ledger_health: kept_view,
            refusals,
            plan: plan_view,
            recovery,
            shortages,
            not_served: not_served_view,
            ready: ready_view,
        };
        let mut tasks = vec![
            tokio::spawn(watcher.run()),
            tokio::spawn(status::become_ready(views.clone(), ready)),
        ];
        // Kernel messages can be matched to devices now that the devices are known.
        tasks.push(tokio::spawn(kernel_log::follow(
            host_root.clone(),
            actors.health.mailbox(),
            judgement,
        )));
        let background = [
            tokio::spawn(asker.run()),
            tokio::spawn(runner.run()),
            tokio::spawn(checker.run()),
            tokio::spawn(keeper.run()),
        ];
        tasks.extend(background);
        tasks.extend(labels);
        tasks.extend(listen::serve(&settings, &views, limits.telemetry, not_served));
        let control = control::socket_path(&roots.run);
        let processors = processors::CpuQuery { pod_resources, gate: Arc::clone(&gate), host_root };
        let (upgrade, upgrades) = mpsc::channel(1);
        let (publish, operator) = (actors.ledger.mailbox(), actors.health.mailbox());
        let source = control::Source::new(
            views.clone(),
            &store,
            publish,
            operator,
            processors,
            upgrade,
            outputs,
        );
        tasks.extend(control::serve(&control, source, limits.control));
        // One request at a time, and one in the queue.
        let (ask, asked) = mpsc::channel(1);
        tasks.extend(handover::listen(
            &roots.run,
            Offer { fds: Arc::new(move || sockets.share()), registering },
            ask,
            limits.handover,
        ));
        let files = vec![control, handover::socket_path(&roots.run)];

        Ok(App {
            actors,
            views,
            escalated,
            store,
            shared,
            leaving,
            ending,
            arbiters: vec![ledger_arbiter, discovery_arbiter],
            ledger_guardian: guardian,
            tasks,
            asked,
            upgrades,
            reloader,
            config_changes,
            files,
        })
    }

    /// Waits for an event that concerns the whole daemon.
    pub async fn event(&mut self) -> AppEvent {
        tokio::select! {
            actor = self.escalated.recv() => AppEvent::Escalated(actor.unwrap_or("supervisor")),
            Some(asked) = self.asked.recv() => AppEvent::Asked(asked),
            Some(order) = self.upgrades.recv() => AppEvent::Upgrade(order),
            Some(()) = self.config_changes.recv() => AppEvent::ConfigChanged,
        }
    }

    /// Waits until an actor has died too often. Returns its name.
    pub async fn escalated(&mut self) -> &'static str {
        self.escalated.recv().await.unwrap_or("supervisor")
    }
}
