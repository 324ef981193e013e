//! The start of a daemon, step by step.

use super::actors::Slots;
use super::recovery::Opened;
use super::wiring::Wiring;
use super::{App, Settings, StartError, error, recovery, specs, take_over};
use crate::discovery::DiscoveryActor;
use crate::domain::{Inventory, ResourceName};
use crate::health::HealthActor;
use crate::host::{self, HostRoot};
use crate::ledger::LedgerActor;
use crate::ledger::core::Ledger;
use crate::registration::Registration;
use crate::serving::Serving;
use crate::supervisor::{Policy, Supervision};
use crate::tasks::mps;
use actix::Arbiter;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

impl App {
    /// Starts everything. Must be called on the thread of a running actix system.
    ///
    /// Returns when the first inventory is published and registration begun; see `views.ready`.
    ///
    /// # Errors
    /// When the kubelet's directory is not usable, or the ledger cannot be opened.
    pub async fn start(settings: Settings) -> Result<App, StartError> {
        App::start_after(settings, false).await
    }

    /// The same. If connections of an earlier instance follow (`is_next`), the kubelet's pods are
    /// not listed before [`App::receive`]: an Allocate may wait in these connections, unread.
    ///
    /// # Errors
    /// As [`App::start`].
    pub async fn start_after(settings: Settings, is_next: bool) -> Result<App, StartError> {
        error::check_kubelet_dir(&settings.roots.kubelet)?;
        let host_root =
            HostRoot::new(&settings.roots.host).with_nvidia(&settings.config.nvidia_roots);
        let Opened { store, recovered, damage } = recovery::open(&settings, &host_root)?;
        let specs = specs::specs(&settings.config, &host_root, &recovered.grants);
        let names: Vec<ResourceName> = specs.specs.iter().map(|spec| spec.name.clone()).collect();
        let (slots, ledger) = (Slots::new(), Ledger::from(recovered));
        let wiring =
            Wiring::new(settings, host_root, store, damage, &ledger, specs, slots.actors());
        let unlisted = Arc::clone(&wiring.gate).try_read_owned().ok().filter(|_| is_next);
        // An earlier process may have answered just before it was killed.
        wiring.hold_unrecorded(&ledger);
        wiring.sockets.sweep();

        let (escalate, mut escalated) = mpsc::channel(1);
        let ending = wiring.ending.subscribe();
        let supervision = Supervision { policy: Policy::default(), escalate, ending };
        // A stalled disk must not delay the streams, and a slow scan must not delay an Allocate.
        let (ledger_arbiter, discovery_arbiter) = (arbiter("the ledger")?, arbiter("discovery")?);
        let here = Arbiter::current();

        let config = wiring.ledger(ledger);
        let ledger_guardian =
            slots.ledger.start(ledger_arbiter.handle(), supervision.clone(), move |life| {
                LedgerActor::new(config.clone(), life)
            });
        // The devices that another plugin granted are known before the first judgement too.
        take_over::from_other_plugins(&wiring.actors.ledger.mailbox(), names.clone()).await;
        let config = wiring.health();
        slots.health.start(here.clone(), supervision.clone(), move |life| {
            HealthActor::new(config.clone(), life)
        });
        let (nvml, question, answers) = wiring.nvml();
        let config = wiring.discovery(question, answers);
        slots.discovery.start(discovery_arbiter.handle(), supervision.clone(), move |life| {
            DiscoveryActor::new(config.clone(), life)
        });
        let shared = wiring.serving();
        let config = shared.clone();
        slots.serving.start(here.clone(), supervision.clone(), move |life| {
            Serving::new(config.clone(), life)
        });

        // One queued event covers all changes.
        let (config_changed, config_changes) = mpsc::channel(1);
        let watcher = wiring.watcher(config_changed);
        watcher.read_kubelet_socket();
        // No resource is registered before there is a list to send.
        tokio::select! {
            () = until_listed(wiring.views.inventory.clone(), &names) => {}
            Some(actor) = escalated.recv() => return Err(StartError::Escalated(actor)),
        }
        // Before the first Register: the kubelet may start containers at once.
        let spec_files = wiring.spec_files().begin();
        let mps = tokio::spawn(wiring.mps().run());
        let offered = wiring.views.inventory.borrow().clone();
        mps::first_look(&offered, wiring.views.mps.clone()).await;
        let config = wiring.registration();
        slots.registration.start(here, supervision, move |life| {
            Registration::new(config.clone(), life.number, life)
        });

        let mut tasks = wiring.background(watcher, nvml, spec_files);
        tasks.push(mps);
        let (upgrade, upgrades) = mpsc::channel(1);
        // One request at a time, and one in the queue.
        let (ask, asked) = mpsc::channel(1);
        tasks.extend(wiring.servers(upgrade, ask));
        let files = wiring.socket_files();
        let Wiring { actors, views, store, leaving, ending, reloader, .. } = wiring;
        Ok(App {
            actors,
            views,
            escalated,
            store,
            shared,
            leaving,
            ending,
            arbiters: vec![ledger_arbiter, discovery_arbiter],
            ledger_guardian,
            tasks: tasks.into_iter().collect(),
            asked,
            upgrades,
            reloader,
            config_changes,
            files,
            unlisted,
        })
    }
}

/// Waits until each of these resources has a list.
async fn until_listed(mut inventory: watch::Receiver<Arc<Inventory>>, names: &[ResourceName]) {
    let is_complete = |inventory: &Arc<Inventory>| {
        names.iter().all(|name| inventory.resources.contains_key(name))
    };
    // The publisher ends only with the daemon.
    drop(inventory.wait_for(is_complete).await);
}

/// Starts a thread for an actor that may block.
fn arbiter(what: &'static str) -> Result<Arbiter, StartError> {
    Arbiter::try_with_tokio_rt(host::runtime).map_err(|why| StartError::NoThread { what, why })
}
