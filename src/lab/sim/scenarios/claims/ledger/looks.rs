//! What the ledger sees of the node and the control plane, and what follows from it.

use super::super::cluster;
use super::super::machine::Machine;
use super::super::world::World;
use super::LedgerShell;
use crate::domain::{
    CheckpointEntry, ClaimEvidence, ClaimHold, ClaimLook, Grant, ListedContainer, ListedPod,
    Observation, PodName, PodReport,
};
use crate::ledger::core::{Agenda, Observed, PodQuery, next_look};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Between two rounds of questions.
const ASK_EVERY: Duration = Duration::from_secs(5);

impl LedgerShell {
    pub(super) async fn reconcile_all(self: Arc<Self>) {
        loop {
            self.reconcile_once().await;
            let wait = {
                let cores = self.cores();
                next_look(cores.actor.ledger(), cores.actor.state.watchlist(), self.world.moment())
            };
            tokio::select! {
                biased;
                () = self.to_look.notified() => {}
                () = self.world.handle.sleep(wait) => {}
            }
        }
    }

    async fn reconcile_once(&self) {
        let now = self.world.moment();
        let (agenda, settled, evidence) = {
            let mut cores = self.cores();
            let kubelet = self.world.machine().kubelet;
            let settled = cores.age.is_settled(kubelet, now);
            let (api, kubelet) = (cores.looks.clone(), Some(cores.record.clone()));
            let agenda = Agenda::of(cores.actor.ledger(), cores.actor.state.watchlist(), now);
            (agenda, settled, ClaimEvidence { api, kubelet })
        };
        let is_up = self.world.kubelet().is_some();
        let mut observation = observe(&self.world.machine(), &agenda, settled, evidence);
        while is_up && let Some(query) = agenda.query(&observation) {
            observation.pods = answer(&self.world, query);
        }
        self.turn().await;
        let Observed::Decided(entries, _) =
            self.cores().actor.state.observe(&observation, |_| true, now)
        else {
            return;
        };
        if !entries.is_empty() {
            drop(self.submit(entries).await);
        }
    }

    /// Asks the API server, again and again. A slow answer delays no pass.
    pub(super) async fn ask_all(self: Arc<Self>) {
        loop {
            if self.ask_for_claims().await {
                self.to_look.notify_one();
            }
            self.world.handle.sleep(ASK_EVERY).await;
        }
    }

    /// Asks the API server for the claims whose pods have ended. Returns whether there are any.
    async fn ask_for_claims(&self) -> bool {
        if self.world.cluster().hides_ends {
            return false;
        }
        let suspicious: BTreeMap<String, ClaimHold> = {
            let (cores, machine) = (self.cores(), self.world.machine());
            let ended =
                |grant: &&Arc<Grant>| grant.pods().all(|pod| machine.cgroup(&pod.uid).is_dead());
            let holds = cores
                .actor
                .ledger()
                .grants()
                .filter(ended)
                .filter_map(|grant| grant.claim.as_deref());
            holds.map(|hold| (hold.claim.uid.clone(), hold.clone())).collect()
        };
        self.cores().looks.retain(|uid, _| suspicious.contains_key(uid));
        let are_any = !suspicious.is_empty();
        for (uid, hold) in suspicious {
            let Ok(found) = cluster::ask(&self.world, &hold.claim.name).await else { continue };
            let at = self.world.moment().boot;
            let found = found.filter(|found| found.claim.uid == uid);
            let is_gone = found.as_ref().is_none_or(|found| found.devices.is_empty());
            let pods = found.map(|found| found.reserved_for).unwrap_or_default();
            self.cores().looks.insert(uid, ClaimLook { is_gone, at, pods });
        }
        are_any
    }
}

fn observe(
    machine: &Machine,
    agenda: &Agenda,
    kubelet_settled: bool,
    evidence: ClaimEvidence,
) -> Observation {
    let uids = agenda.pods.iter().chain(&agenda.claim_pods).chain(machine.names.keys());
    Observation {
        boot_id: machine.boot_id(),
        kubelet: machine.kubelet,
        kubelet_settled,
        checkpoint: Some(machine.checkpoint()),
        pods: PodReport::Nothing,
        names: machine.names.clone(),
        cgroups: uids.map(|uid| (uid.clone(), machine.cgroup(uid))).collect(),
        claims: Arc::new(evidence),
    }
}

/// The pods that the kubelet has, with their devices by number.
fn answer(world: &World, query: PodQuery) -> PodReport {
    let (machine, cluster) = (world.machine(), world.cluster());
    let pod = |uid: &String| {
        let entries = machine.checkpoint_entries().iter().filter(|entry| entry.pod_uid == *uid);
        let container = |entry: &CheckpointEntry| ListedContainer {
            name: entry.container.clone(),
            devices: [(entry.resource.clone(), entry.device_ids.clone())].into(),
            cpus: BTreeSet::new(),
        };
        ListedPod {
            namespace: "ml".into(),
            name: format!("pod-{uid}"),
            containers: entries.map(container).collect(),
        }
    };
    let pods = cluster.pods.values().filter(|pod| pod.is_bound).map(|of| pod(&of.uid));
    match query {
        PodQuery::All => PodReport::All(pods.collect()),
        PodQuery::Named(names) => {
            let named: BTreeMap<PodName, ListedPod> =
                pods.map(|pod| (pod.full_name(), pod)).collect();
            let found = |name: PodName| (name.clone(), named.get(&name).cloned());
            PodReport::Named(names.into_iter().map(found).collect())
        }
    }
}
