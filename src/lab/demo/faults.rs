//! The chapters with failures: a restart of the kubelet, a panic of two actors, the failure and
//! return of a device.

use super::beginning::{DEVICES, lines};
use super::stage::{all_run, answered, held_by_kubelet, pods, recorded};
use super::{Chapter, Stop, Story, ms};
use crate::domain::{DeviceId, Health, Inventory, ResourceName};
use crate::lab::sim::hardware::GPUS;
use crate::lab::sim::kubelet::{EventKind, PodSpec, View};
use crate::messages::{Crash, Reconcile, Retire};
use crate::telemetry::metrics;
use crate::telemetry::table::Metric;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time of an observation, and its result.
type Seen = (Duration, String);

impl Story {
    pub(super) async fn kubelet_restart(&mut self) -> Result<(), Stop> {
        self.begin(Chapter::KubeletRestart)?;
        let after = self.stage.first_batch_after.as_millis();
        self.screen.say(format_args!(
            "A new kubelet admits the pods that run already, some {after} ms after its socket appears. Who is not registered by then \
             loses train-0: its init container has ended, so its GPUs are checked anew."
        ))?;
        let held = self.stage.kubelet.view(held_by_kubelet);
        let spoilt = self.stage.spoils(Chapter::KubeletRestart);
        if spoilt {
            self.stage.stop_daemon().await;
        }
        self.stage.kubelet.restart().await?;
        let admitted = self.stage.kubelet.wait_for(|view| view.is_settled(), self.stage.patience()).await;
        admitted.map_err(|error| Stop::Trouble(error.to_string()))?;
        if spoilt {
            self.stage.start_daemon().await?;
        }
        let kubelet = &self.stage.kubelet;
        for resource in self.stage.resources() {
            if let Some(took) = kubelet.view(|view| view.first_list(resource)) {
                self.screen.fact(resource.as_str(), format_args!("first list {} after the kubelet's socket", ms(took)))?;
            }
        }
        let admitted = kubelet.view(|view| view.events().since_start(|kind| matches!(kind, EventKind::SourcesReady)));
        self.screen.fact("pods", format_args!("admitted again by {} after it", ms(admitted.unwrap_or_default())))?;

        let (expected, seen) = kubelet.view(|view| (all_run(view), pods(view)));
        self.screen.claim("every pod survives, the one with the init container too", expected, seen)?;
        let expected = self.stage.capacities_of(DEVICES, DEVICES);
        let seen = self.stage.kubelet_shows(&expected, |view| self.stage.capacities(view)).await;
        self.screen.claim("every device is allocatable again", expected, seen)?;
        let seen = self.stage.kubelet.view(held_by_kubelet);
        self.screen.claim("every container holds what it held", held, seen)
    }

    pub(super) async fn actor_death(&mut self) -> Result<(), Stop> {
        self.begin(Chapter::ActorDeath)?;
        self.screen.say(
            "mpi-0 asks for a virtual function for each of four containers. After the first answer two actors panic: the one that \
             answers the kubelet, and the one that keeps the ledger. They are built anew.",
        )?;
        let from = self.stage.kubelet.view(|view| view.events().iter().count());
        let mut spec = PodSpec::new("demo", "mpi-0");
        for rank in 0..4 {
            spec = spec.app(&format!("rank-{rank}"), &self.stage.rdma, 1);
        }
        // A spoilt chapter stops the whole daemon, as an actor's panic would without a supervisor.
        let victim = if self.stage.spoils(Chapter::ActorDeath) { self.stage.take_daemon() } else { None };
        let actors =
            victim.as_ref().map_or_else(|| self.stage.daemon().map(|daemon| daemon.actors.clone()), |daemon| Ok(daemon.actors.clone()))?;
        let kubelet = &self.stage.kubelet;
        let strike = async {
            // If the kubelet never gets this far, the claims report it.
            drop(kubelet.wait_for(|view| allocates(view, from) > 0, self.stage.patience()).await);
            let answers = kubelet.view(|view| allocates(view, from));
            match victim {
                Some(daemon) => daemon.stop().await,
                None => {
                    actors.ledger.mailbox::<Crash>().tell(Crash);
                    actors.serving.mailbox::<Crash>().tell(Crash);
                }
            }
            answers
        };
        let (_, answers) = tokio::join!(self.stage.add_pod(spec), strike);
        self.show_allocations(from)?;

        let of_4 = |answers: usize| format!("{answers} of 4 Allocates were answered");
        self.screen.claim("they died while the pod was being admitted", of_4(answers.clamp(1, 3)), of_4(answers))?;
        self.await_rebirth().await?;
        let seen = self.stage.kubelet.view(|view| stream_ends(view, from));
        self.screen.claim("no stream of the kubelet ended: it noticed nothing", "", seen)?;
        let expected = "ledger died 1 time\nserving died 1 time";
        self.screen.claim("both actors really died, once", expected, deaths(&["ledger", "serving"]))?;
        let (expected, seen) = self.stage.kubelet.view(|view| (all_run(view), pods(view)));
        self.screen.claim("the pod runs, and so do all others", expected, seen)?;
        let on_disk = self.stage.on_disk().map_or_else(|error| error.to_string(), |grants| recorded(&grants));
        let expected = self.stage.kubelet.view(|view| answered(view, 0));
        self.screen.claim("each answer is on disk exactly once", expected, on_disk)?;
        self.holders_agree("the daemon still agrees with the kubelet on who holds what").await
    }

    /// Waits until both actors answer again: sends each a message without effect, after the one
    /// that made it panic.
    async fn await_rebirth(&self) -> Result<(), Stop> {
        // Without a daemon there is nothing to wait for, and the claims report that.
        let Ok(daemon) = self.stage.daemon() else { return Ok(()) };
        let actors = &daemon.actors;
        let nothing = Retire { resource: self.stage.rdma.clone(), newest: 0 };
        let reborn = async {
            actors.ledger.mailbox::<Reconcile>().call(Reconcile, self.stage.patience()).await?;
            actors.serving.mailbox::<Retire>().call(nothing, self.stage.patience()).await
        };
        reborn.await.map_err(|error| Stop::Trouble(error.to_string()))
    }

    pub(super) async fn device_failure(&mut self) -> Result<(), Stop> {
        self.begin(Chapter::DeviceFailure)?;
        let (index, id) = self.free_gpu()?;
        self.screen.say(format_args!("The driver gives up a GPU that nobody holds: /dev/nvidia{index} disappears."))?;
        let began = Instant::now();
        if !self.stage.spoils(Chapter::DeviceFailure) {
            self.stage.node.remove_gpu_node(index)?;
        }
        let (health, expected) = ("Unhealthy, node_missing", self.stage.capacities_of([GPUS - 1, DEVICES[1], DEVICES[2]], DEVICES));
        let ((judged, seen), (heard, capacities)) = self.health_becomes(&id, health, &expected, began).await?;
        self.screen.fact("device", &id)?;
        self.screen.fact("unhealthy", format_args!("after {}; in the kubelet's list after {}", ms(judged), ms(heard)))?;
        self.screen.claim("the device is unhealthy, with the reason", health, seen)?;
        self.screen.claim("the kubelet counts one GPU less as allocatable, and keeps it as capacity", expected, capacities)?;

        let (healthy, count) = self.healthy_and_free()?;
        let spec = PodSpec::new("demo", "sweep-0").app("search", &self.stage.gpu, count);
        let uid = self.stage.add_pod(spec).await;
        let seen = self.gpus_of(&uid, "search");
        self.screen.claim("sweep-0, which asks for all that is left, gets the healthy ones", lines(&healthy), lines(&seen))
    }

    pub(super) async fn device_return(&mut self) -> Result<(), Stop> {
        self.begin(Chapter::DeviceReturn)?;
        let (index, id) = self.free_gpu()?;
        self.screen.say(format_args!("/dev/nvidia{index} is back. Nobody restarts anything."))?;
        let began = Instant::now();
        if !self.stage.spoils(Chapter::DeviceReturn) {
            self.stage.node.restore_gpu_node(index)?;
        }
        let (health, expected) = ("Healthy", self.stage.capacities_of(DEVICES, DEVICES));
        let ((judged, seen), (heard, capacities)) = self.health_becomes(&id, health, &expected, began).await?;
        self.screen.fact("healthy", format_args!("after {}; in the kubelet's list after {}", ms(judged), ms(heard)))?;
        self.screen.claim("the device is healthy by itself", health, seen)?;
        self.screen.claim("the kubelet counts it again", expected, capacities)?;
        let spec = PodSpec::new("demo", "late-0").app("train", &self.stage.gpu, 1);
        let uid = self.stage.add_pod(spec).await;
        let seen = self.gpus_of(&uid, "train");
        self.screen.claim("late-0 gets it: the only GPU that was free", &id, lines(&seen))?;
        self.holders_agree("the daemon agrees with the kubelet on who holds what").await
    }

    /// Waits until the daemon's list has this health and the kubelet's status has these counts.
    /// Returns the time and the result of both.
    async fn health_becomes(&self, id: &DeviceId, health: &str, capacities: &str, began: Instant) -> Result<(Seen, Seen), Stop> {
        let look = |inventory: &Arc<Inventory>| {
            let offering = inventory.resources.get(&self.stage.gpu);
            let found = offering.and_then(|offering| offering.devices.get(id)).map(|offered| offered.health);
            let text = |health: Health| match health.reason() {
                Some(reason) => format!("{}, {reason}", health.as_str()),
                None => health.as_str().to_owned(),
            };
            found.map_or_else(|| "not in the list".to_owned(), text)
        };
        let inventory = &self.stage.daemon()?.views.inventory;
        let judged = async {
            let seen = self.stage.daemon_shows(inventory, health, look).await;
            (began.elapsed(), seen)
        };
        let counted = async {
            let seen = self.stage.kubelet_shows(capacities, |view| self.stage.capacities(view)).await;
            (began.elapsed(), seen)
        };
        Ok(tokio::join!(judged, counted))
    }

    /// The last GPU that no container holds.
    fn free_gpu(&self) -> Result<(usize, DeviceId), Stop> {
        let held = self.stage.kubelet.view(held_by_kubelet);
        let mut gpus = (0..GPUS).map(|index| (index, self.stage.node.gpu_uuid(index)));
        let free = gpus.rfind(|(_, uuid)| !held.contains(uuid));
        free.map(|(index, uuid)| (index, DeviceId::new(uuid))).ok_or_else(|| Stop::Trouble("no GPU is free".to_owned()))
    }

    /// The GPUs that are healthy and free, and their number.
    fn healthy_and_free(&self) -> Result<(Vec<DeviceId>, u32), Stop> {
        let held = self.stage.kubelet.view(held_by_kubelet);
        let inventory = self.stage.daemon()?.views.inventory.borrow().clone();
        let offered = inventory.resources.get(&self.stage.gpu).into_iter().flat_map(|offering| &offering.devices);
        let free = offered.filter(|(id, offered)| offered.health.is_healthy() && !held.contains(id.as_str()));
        let ids: Vec<DeviceId> = free.map(|(id, _)| id.clone()).collect();
        let count = u32::try_from(ids.len()).unwrap_or_default();
        Ok((ids, count))
    }
}

/// The number of answered Allocate calls since the event at `from`.
fn allocates(view: &View<'_>, from: usize) -> usize {
    view.events().iter().skip(from).filter(|event| matches!(event.kind, EventKind::Allocated { .. })).count()
}

/// Resources whose stream ended or was cut off since the event at `from`.
fn stream_ends(view: &View<'_>, from: usize) -> String {
    let is_end = |kind: &EventKind| matches!(kind, EventKind::StreamEnded { .. } | EventKind::Disconnected { .. });
    let ends = view.events().iter().skip(from).filter(|event| is_end(&event.kind));
    let resources: BTreeSet<&ResourceName> = ends.filter_map(|event| event.kind.resource()).collect();
    resources.iter().map(|resource| format!("{resource}: its stream ended")).collect::<Vec<_>>().join("\n")
}

/// How often these actors have panicked in this process, as in `/metrics`.
fn deaths(actors: &[&str]) -> String {
    let count = |actor: &&str| {
        let count = metrics::counted(Metric::ActorRestarts, &[actor]);
        format!("{actor} died {count} time{}", if count == 1 { "" } else { "s" })
    };
    actors.iter().map(count).collect::<Vec<_>>().join("\n")
}
