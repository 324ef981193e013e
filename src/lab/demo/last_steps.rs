//! The last steps: a restart of the daemon, the deletion of a pod, and the table of all holders.

use super::environment::{all_run, held_by_grants, held_by_kubelet, holder, pods};
use super::first_steps::{DEVICES, lines};
use super::{Demo, Step, Stop, ms};
use crate::console::table::Table;
use crate::domain::{DeviceId, Durability, Entry, Grant, GrantState, ResourceName, Timestamp};
use crate::lab::sim::kubelet::{EventKind, PodSpec, View};
use crate::store::Store;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

impl Demo {
    pub(super) async fn daemon_restart(&mut self) -> Result<(), Stop> {
        self.begin(Step::DaemonRestart)?;
        self.screen.explain("An upgrade: the daemon shuts down, and another one starts on the same state directory.")?;
        let before = facts(self.ask_who().await);
        let from = self.env.kubelet.view(|view| view.events().iter().count());
        self.env.stop_daemon().await;
        let on_disk = self.env.on_disk().map_or_else(|error| error.to_string(), facts_of);
        if self.env.breaks(Step::DaemonRestart) {
            // The kubelet's copies alone would restore the ledger.
            std::fs::remove_dir_all(self.env.state_dir())?;
            std::fs::remove_file(self.env.kubelet_checkpoint())?;
        }
        let started = self.env.start_daemon().await?;
        let expected = self.env.capacities_of(DEVICES, DEVICES);
        let seen = self.env.kubelet_shows(&expected, |view| self.env.capacities(view)).await;
        self.screen.fact(
            "first inventory",
            format_args!("{} after the start, the ledger recovered before it", ms(started)),
        )?;
        for resource in self.env.resources() {
            if let Some(gap) = self.env.kubelet.view(|view| gap(view, resource, from)) {
                self.screen.fact(
                    resource.as_str(),
                    format_args!("{} from the end of its stream to the next list", ms(gap)),
                )?;
            }
        }
        self.screen.claim(
            "while no daemon runs, the journal contains every grant",
            &before,
            on_disk,
        )?;
        self.screen.claim("every device is allocatable again", expected, seen)?;
        self.screen.claim(
            "the new daemon has lost nothing: same grants, same ids, same holders",
            &before,
            facts(self.ask_who().await),
        )?;
        let (expected, seen) = self.env.kubelet.view(|view| (all_run(view), pods(view)));
        self.screen.claim("every pod still runs", expected, seen)
    }

    pub(super) async fn release(&mut self) -> Result<(), Stop> {
        self.begin(Step::Release)?;
        self.screen.explain(
            "serve-0 is deleted, and next-0 requests a GPU. All eight were held, \
             so it can only get that one.",
        )?;
        let kubelet = &self.env.kubelet;
        let uid = kubelet.view(|view| {
            view.pods()
                .iter()
                .find(|pod| pod.spec.name == "serve-0")
                .map(|pod| pod.spec.uid.clone())
        });
        let uid = uid.ok_or_else(|| Stop::Aborted("serve-0 does not exist".to_owned()))?;
        let freed = self.gpus_of(&uid, "api");
        kubelet.delete_pod(&uid)?;
        let next =
            self.env.add_pod(PodSpec::new("demo", "next-0").app("api", &self.env.gpu, 1)).await;
        let got = self.gpus_of(&next, "api");
        self.screen.claim(
            "the kubelet gives it to next-0 at once, and Holdfast grants it: the kubelet decides",
            lines(&freed),
            lines(&got),
        )?;

        // The reconcile pass that binds next-0 has found that serve-0 was deleted.
        let mut expected: Vec<String> =
            self.env.kubelet.view(held_by_kubelet).lines().map(str::to_owned).collect();
        expected.push(format!("serve-0/api: {}", lines(&freed)));
        expected.sort();
        let expected = expected.join("\n");
        let views = &self.env.daemon()?.views;
        let text_of =
            |grants: &Arc<Vec<Arc<Grant>>>| held_by_grants(grants.iter().map(AsRef::as_ref));
        self.env.daemon_shows(&views.grants, &expected, text_of).await;
        if self.env.breaks(Step::Release) {
            self.release_without_proof(&uid).await?;
        }
        let age = self.kubelet_age()?.as_secs_f64();
        let cgroup =
            self.env.settings.roots.host.join("sys/fs/cgroup/kubepods").join(format!("pod{uid}"));
        let ended =
            if cgroup.exists() { "no: its cgroup exists" } else { "yes: its cgroup was removed" };
        self.screen.explain(
            "A missing pod is no proof: serve-0's grant stays recorded next to the new \
             one until all of these are true:",
        )?;
        self.screen.fact("processes ended", ended)?;
        let young = format_args!(
            "not yet: it started {age:.1} s ago, and before 60 s it may not list every pod"
        );
        self.screen.fact("kubelet settled", young)?;
        self.screen.fact(
            "missed twice",
            "not yet: in two lists of a settled kubelet, at least 5 s apart",
        )?;
        let seen = facts_held(self.ask_who().await);
        self.screen.claim("nothing was released without proof", &expected, seen)?;
        let on_disk = self
            .env
            .on_disk()
            .map_or_else(|error| error.to_string(), |grants| held_by_grants(&grants));
        self.screen.claim("both grants are on disk", expected, on_disk)
    }

    /// Marks the pod's grants as released while the daemon is stopped.
    async fn release_without_proof(&mut self, uid: &str) -> Result<(), Stop> {
        self.env.stop_daemon().await;
        let aborted = |error: crate::store::StoreError| Stop::Aborted(error.to_string());
        let (mut store, recovered) =
            Store::open(self.env.state_dir(), Durability::PowerLoss, None).map_err(aborted)?;
        for grant in
            recovered.grants.iter().filter(|grant| grant.pod().is_some_and(|pod| pod.uid == uid))
        {
            let state = GrantState::Released {
                pod: grant.pod().cloned(),
                container: grant.container().map(str::to_owned),
                bound_at: None,
                released_at: Timestamp::from_system(SystemTime::now()),
                other_pods: Vec::new(),
                released_by: "no proof".to_owned(),
            };
            store
                .append(&[Entry::Moved { alloc_id: grant.alloc_id.clone(), state }])
                .map_err(aborted)?;
        }
        store.close().map_err(aborted)?;
        self.env.start_daemon().await.map(drop)
    }

    /// The age of the kubelet's socket.
    fn kubelet_age(&self) -> Result<Duration, Stop> {
        let generation = *self.env.daemon()?.views.kubelet.borrow();
        let born =
            generation.and_then(|kubelet| u64::try_from(kubelet.made_ns).ok()).unwrap_or_default();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(now.saturating_sub(Duration::from_nanos(born)))
    }

    pub(super) async fn who_holds_what(&mut self) -> Result<(), Stop> {
        self.screen.section("The holder of each device, as in `holdfast who`")?;
        let grants = self.ask_who().await.map_err(Stop::Aborted)?;
        let mut held: BTreeMap<(&ResourceName, &DeviceId), Vec<String>> = BTreeMap::new();
        for grant in &grants {
            let exists = |pod: &crate::domain::PodRef| {
                self.env.kubelet.view(|view| view.pod(&pod.uid).is_some())
            };
            let deleted = if grant.pod().is_some_and(exists) { "" } else { " (deleted)" };
            for device in &grant.devices {
                held.entry((&grant.resource, &device.id))
                    .or_default()
                    .push(format!("{}{deleted}", holder(grant)));
            }
        }
        // These GPUs differ at the end of their ids.
        let table = Table::new(&["resource", "device", "held by"])
            .shrinking(&["resource", "device", "held by"]);
        let mut table = table.omitting(&["resource"]);
        for ((resource, id), holders) in held {
            table.row([resource.to_string(), id.to_string(), holders.join(", ")]);
        }
        self.screen.table(&table)?;
        let crash = self.env.kubelet.panicked().unwrap_or_default();
        self.screen.claim(
            "no held device ever left the list, which would have crashed the kubelet",
            "",
            crash,
        )
    }
}

/// The time from the end of the daemon's stream to the next list of the same resource.
fn gap(view: &View<'_>, resource: &ResourceName, from: usize) -> Option<Duration> {
    let ours =
        || view.events().iter().skip(from).filter(|event| event.kind.resource() == Some(resource));
    let ended = ours().find(|event| matches!(event.kind, EventKind::StreamEnded { .. }))?.at;
    let listed = ours()
        .find(|event| event.at >= ended && matches!(event.kind, EventKind::Listed { .. }))?
        .at;
    Some(listed.saturating_sub(ended))
}

/// Every grant with all fields that must not change.
fn facts(grants: Result<Vec<Grant>, impl fmt::Display>) -> String {
    grants.map_or_else(|error| error.to_string(), facts_of)
}

fn facts_of(mut grants: Vec<Grant>) -> String {
    grants.sort_by(|a, b| a.alloc_id.cmp(&b.alloc_id));
    let of = |grant: &Grant| {
        let ids: Vec<&str> = grant.devices.iter().map(|device| device.id.as_str()).collect();
        format!("{} {} {} {}", grant.alloc_id, grant.state_name(), holder(grant), ids.join(" "))
    };
    grants.iter().map(of).collect::<Vec<_>>().join("\n")
}

fn facts_held(grants: Result<Vec<Grant>, String>) -> String {
    grants.map_or_else(|error| error, |grants| held_by_grants(&grants))
}
