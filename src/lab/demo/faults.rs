//! The steps with failures: a restart of the kubelet, a panic of two actors, the failure and
//! return of a device.

use super::environment::{all_run, answered, held_by_kubelet, pods, recorded};
use super::first_steps::{DEVICES, lines};
use super::{Demo, Step, Stop, ms};
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

impl Demo {
    pub(super) async fn kubelet_restart(&mut self) -> Result<(), Stop> {
        self.begin(Step::KubeletRestart)?;
        let after = self.env.first_batch_after.as_millis();
        self.screen.explain(format_args!(
            "A new kubelet admits the running pods again, about {after} ms after its socket appears. A plugin that is not registered \
             by then loses train-0: its init container has exited, so its GPUs are checked again."
        ))?;
        let held = self.env.kubelet.view(held_by_kubelet);
        let broken_step = self.env.breaks(Step::KubeletRestart);
        if broken_step {
            self.env.stop_daemon().await;
        }
        self.env.kubelet.restart().await?;
        let admitted =
            self.env.kubelet.wait_for(|view| view.is_settled(), self.env.timeout()).await;
        admitted.map_err(|error| Stop::Aborted(error.to_string()))?;
        if broken_step {
            self.env.start_daemon().await?;
        }
        let kubelet = &self.env.kubelet;
        for resource in self.env.resources() {
            if let Some(took) = kubelet.view(|view| view.first_list(resource)) {
                self.screen.fact(
                    resource.as_str(),
                    format_args!("first list {} after the kubelet's socket appeared", ms(took)),
                )?;
            }
        }
        let admitted = kubelet
            .view(|view| view.events().since_start(|kind| matches!(kind, EventKind::SourcesReady)));
        self.screen.fact(
            "pods",
            format_args!("admitted again within {}", ms(admitted.unwrap_or_default())),
        )?;

        let (expected, seen) = kubelet.view(|view| (all_run(view), pods(view)));
        self.screen.claim(
            "every pod survives, including the one with the init container",
            expected,
            seen,
        )?;
        let expected = self.env.capacities_of(DEVICES, DEVICES);
        let seen = self.env.kubelet_shows(&expected, |view| self.env.capacities(view)).await;
        self.screen.claim("every device is allocatable again", expected, seen)?;
        let seen = self.env.kubelet.view(held_by_kubelet);
        self.screen.claim("every container holds what it held", held, seen)
    }

    pub(super) async fn actor_death(&mut self) -> Result<(), Stop> {
        self.begin(Step::ActorDeath)?;
        self.screen.explain(
            "mpi-0 requests a virtual function for each of four containers. After the first answer two actors panic: serving, \
             which answers the kubelet, and the ledger. The supervisor rebuilds both.",
        )?;
        let from = self.env.kubelet.view(|view| view.events().iter().count());
        let mut spec = PodSpec::new("demo", "mpi-0");
        for rank in 0..4 {
            spec = spec.app(&format!("rank-{rank}"), &self.env.rdma, 1);
        }
        // A broken step stops the whole daemon, as an actor's panic would without a supervisor.
        let stopped_daemon =
            if self.env.breaks(Step::ActorDeath) { self.env.take_daemon() } else { None };
        let actors = stopped_daemon.as_ref().map_or_else(
            || self.env.daemon().map(|daemon| daemon.actors.clone()),
            |daemon| Ok(daemon.actors.clone()),
        )?;
        let kubelet = &self.env.kubelet;
        let kill = async {
            // If the kubelet never gets this far, the claims report it.
            drop(kubelet.wait_for(|view| allocates(view, from) > 0, self.env.timeout()).await);
            let answers = kubelet.view(|view| allocates(view, from));
            match stopped_daemon {
                Some(daemon) => daemon.stop().await,
                None => {
                    actors.ledger.mailbox::<Crash>().send(Crash);
                    actors.serving.mailbox::<Crash>().send(Crash);
                }
            }
            answers
        };
        let (_, answers) = tokio::join!(self.env.add_pod(spec), kill);
        self.show_allocations(from)?;

        let of_4 = |answers: usize| format!("{answers} of 4 Allocates were answered");
        self.screen.claim(
            "they panicked while the pod was being admitted",
            of_4(answers.clamp(1, 3)),
            of_4(answers),
        )?;
        self.await_rebuild().await?;
        let seen = self.env.kubelet.view(|view| stream_ends(view, from));
        self.screen.claim("no stream of the kubelet ended, so it saw no failure", "", seen)?;
        let expected = "ledger panicked 1 time\nserving panicked 1 time";
        self.screen.claim(
            "both actors panicked exactly once",
            expected,
            panics(&["ledger", "serving"]),
        )?;
        let (expected, seen) = self.env.kubelet.view(|view| (all_run(view), pods(view)));
        self.screen.claim("the pod and all other pods run", expected, seen)?;
        let on_disk =
            self.env.on_disk().map_or_else(|error| error.to_string(), |grants| recorded(&grants));
        let expected = self.env.kubelet.view(|view| answered(view, 0));
        self.screen.claim("each answer is on disk exactly once", expected, on_disk)?;
        self.holders_agree("the daemon still agrees with the kubelet on every holder").await
    }

    /// Waits until both actors answer again: sends each a message without effect, after the one
    /// that made it panic.
    async fn await_rebuild(&self) -> Result<(), Stop> {
        // Without a daemon there is nothing to wait for, and the claims report that.
        let Ok(daemon) = self.env.daemon() else { return Ok(()) };
        let actors = &daemon.actors;
        let nothing = Retire { resource: self.env.rdma.clone(), newest: 0 };
        let rebuilt = async {
            actors.ledger.mailbox::<Reconcile>().call(Reconcile, self.env.timeout()).await?;
            actors.serving.mailbox::<Retire>().call(nothing, self.env.timeout()).await
        };
        rebuilt.await.map_err(|error| Stop::Aborted(error.to_string()))
    }

    pub(super) async fn device_failure(&mut self) -> Result<(), Stop> {
        self.begin(Step::DeviceFailure)?;
        let (index, id) = self.free_gpu()?;
        self.screen.explain(format_args!(
            "The driver loses a GPU that no container holds: /dev/nvidia{index} disappears."
        ))?;
        let began = Instant::now();
        if !self.env.breaks(Step::DeviceFailure) {
            self.env.node.remove_gpu_node(index)?;
        }
        let (health, expected) = (
            "Unhealthy, node_missing",
            self.env.capacities_of([GPUS - 1, DEVICES[1], DEVICES[2]], DEVICES),
        );
        let ((judged, seen), (listed, capacities)) =
            self.health_becomes(&id, health, &expected, began).await?;
        self.screen.fact("device", &id)?;
        self.screen.fact(
            "unhealthy",
            format_args!("after {}; in the kubelet's list after {}", ms(judged), ms(listed)),
        )?;
        self.screen.claim("the device is unhealthy, with the reason", health, seen)?;
        self.screen.claim(
            "the kubelet counts one GPU less as allocatable, but still as capacity",
            expected,
            capacities,
        )?;

        let (healthy, count) = self.healthy_and_free()?;
        let spec = PodSpec::new("demo", "sweep-0").app("search", &self.env.gpu, count);
        let uid = self.env.add_pod(spec).await;
        let seen = self.gpus_of(&uid, "search");
        self.screen.claim(
            "sweep-0, which requests all remaining GPUs, gets the healthy ones",
            lines(&healthy),
            lines(&seen),
        )
    }

    pub(super) async fn device_return(&mut self) -> Result<(), Stop> {
        self.begin(Step::DeviceReturn)?;
        let (index, id) = self.free_gpu()?;
        self.screen
            .explain(format_args!("/dev/nvidia{index} is back. No process is restarted."))?;
        let began = Instant::now();
        if !self.env.breaks(Step::DeviceReturn) {
            self.env.node.restore_gpu_node(index)?;
        }
        let (health, expected) = ("Healthy", self.env.capacities_of(DEVICES, DEVICES));
        let ((judged, seen), (listed, capacities)) =
            self.health_becomes(&id, health, &expected, began).await?;
        self.screen.fact(
            "healthy",
            format_args!("after {}; in the kubelet's list after {}", ms(judged), ms(listed)),
        )?;
        self.screen.claim("the device becomes healthy without an operator", health, seen)?;
        self.screen.claim("the kubelet counts it again", expected, capacities)?;
        let spec = PodSpec::new("demo", "late-0").app("train", &self.env.gpu, 1);
        let uid = self.env.add_pod(spec).await;
        let seen = self.gpus_of(&uid, "train");
        self.screen.claim("late-0 gets it, the only free GPU", &id, lines(&seen))?;
        self.holders_agree("the daemon agrees with the kubelet on every holder").await
    }

    /// Waits until the daemon's list has this health and the kubelet's status has these counts.
    /// Returns the time and the result of both.
    async fn health_becomes(
        &self,
        id: &DeviceId,
        health: &str,
        capacities: &str,
        began: Instant,
    ) -> Result<(Seen, Seen), Stop> {
        let text_of = |inventory: &Arc<Inventory>| {
            let offering = inventory.resources.get(&self.env.gpu);
            let found = offering
                .and_then(|offering| offering.devices.get(id))
                .map(|offered| offered.health);
            let text = |health: Health| match health.reason() {
                Some(reason) => format!("{}, {reason}", health.as_str()),
                None => health.as_str().to_owned(),
            };
            found.map_or_else(|| "not in the list".to_owned(), text)
        };
        let inventory = &self.env.daemon()?.views.inventory;
        let judged = async {
            let seen = self.env.daemon_shows(inventory, health, text_of).await;
            (began.elapsed(), seen)
        };
        let counted = async {
            let seen = self.env.kubelet_shows(capacities, |view| self.env.capacities(view)).await;
            (began.elapsed(), seen)
        };
        Ok(tokio::join!(judged, counted))
    }

    /// The last GPU that no container holds.
    fn free_gpu(&self) -> Result<(usize, DeviceId), Stop> {
        let held = self.env.kubelet.view(held_by_kubelet);
        let mut gpus = (0..GPUS).map(|index| (index, self.env.node.gpu_uuid(index)));
        let free = gpus.rfind(|(_, uuid)| !held.contains(uuid));
        free.map(|(index, uuid)| (index, DeviceId::new(uuid)))
            .ok_or_else(|| Stop::Aborted("no GPU is free".to_owned()))
    }

    /// The GPUs that are healthy and free, and their number.
    fn healthy_and_free(&self) -> Result<(Vec<DeviceId>, u32), Stop> {
        let held = self.env.kubelet.view(held_by_kubelet);
        let inventory = self.env.daemon()?.views.inventory.borrow().clone();
        let offered = inventory
            .resources
            .get(&self.env.gpu)
            .into_iter()
            .flat_map(|offering| &offering.devices);
        let free = offered
            .filter(|(id, offered)| offered.health.is_healthy() && !held.contains(id.as_str()));
        let ids: Vec<DeviceId> = free.map(|(id, _)| id.clone()).collect();
        let count = u32::try_from(ids.len()).unwrap_or_default();
        Ok((ids, count))
    }
}

/// The number of answered Allocate calls since the event at `from`.
fn allocates(view: &View<'_>, from: usize) -> usize {
    view.events()
        .iter()
        .skip(from)
        .filter(|event| matches!(event.kind, EventKind::Allocated { .. }))
        .count()
}

/// Resources whose stream ended or was cut off since the event at `from`.
fn stream_ends(view: &View<'_>, from: usize) -> String {
    let is_end = |kind: &EventKind| {
        matches!(kind, EventKind::StreamEnded { .. } | EventKind::Disconnected { .. })
    };
    let ends = view.events().iter().skip(from).filter(|event| is_end(&event.kind));
    let resources: BTreeSet<&ResourceName> =
        ends.filter_map(|event| event.kind.resource()).collect();
    resources
        .iter()
        .map(|resource| format!("{resource}: its stream ended"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// How often these actors have panicked in this process, as in `/metrics`.
fn panics(actors: &[&str]) -> String {
    let count = |actor: &&str| {
        let count = metrics::counted(Metric::ActorRestarts, &[actor]);
        format!("{actor} panicked {count} time{}", if count == 1 { "" } else { "s" })
    };
    actors.iter().map(count).collect::<Vec<_>>().join("\n")
}
