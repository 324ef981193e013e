//! Each part of the daemon, made of the wiring: the configurations of the actors, the background
//! tasks and the servers.

use super::wiring::Wiring;
use crate::admin::control::{self, Mailboxes};
use crate::admin::processors::CpuQuery;
use crate::admin::{UpgradeOrder, listen, status};
use crate::discovery::DiscoveryConfig;
use crate::domain::{Durability, GrantState, NvmlQuery, NvmlSnapshot};
use crate::handover::{self, Asked, Offer};
use crate::hardware;
use crate::health::HealthConfig;
use crate::host::Orphans;
use crate::ledger::LedgerConfig;
use crate::ledger::core::Ledger;
use crate::registration::RegistrationConfig;
use crate::serving::{Affinity, Preparer, Shared, hold_until_recorded};
use crate::tasks::label_file::LabelFile;
use crate::tasks::mps::MpsTask;
use crate::tasks::nvml::NvmlTask;
use crate::tasks::watcher::{self, Watcher};
use crate::tasks::{checks, config_links, hooks, node_labels, spec_files, xid_events};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// The actors.
impl Wiring {
    /// Lists no pods before the kubelet has recorded the last answers, which an earlier process may
    /// have given.
    pub(super) fn hold_unrecorded(&self, ledger: &Ledger) {
        let answered = ledger.grants().filter(|grant| grant.state == GrantState::Granted);
        let answered = answered.map(|grant| grant.alloc_id.clone()).collect();
        if let Ok(gate) = Arc::clone(&self.gate).try_read_owned() {
            hold_until_recorded(gate, answered, self.views.grants.clone());
        }
    }

    pub(super) fn ledger(&self, recovered: Ledger) -> LedgerConfig {
        let (views, publishers) = (&self.views, &self.publishers);
        LedgerConfig {
            store: Arc::clone(&self.store),
            recovered: Arc::new(Mutex::new(Some(recovered))),
            process_crash: self.settings.config.durability == Durability::ProcessCrash,
            plan: views.plan.clone(),
            kept: Arc::clone(&publishers.ledger_health),
            grants: Arc::clone(&publishers.grants),
            due: Arc::clone(&publishers.due),
            forget: Some(self.actors.health.mailbox()),
            names: Arc::clone(&publishers.names),
            inventory: views.inventory.clone(),
            checkpoint: views.checkpoint.clone(),
            pod_resources: self.pod_resources.clone(),
            host_root: self.settings.roots.host.clone(),
            boot_id: self.boot_id.clone(),
            kubelet: views.kubelet.clone(),
            claims: publishers.claim_evidence.subscribe(),
            gate: Arc::clone(&self.gate),
            resend: Arc::clone(&self.resend),
        }
    }

    pub(super) fn health(&self) -> HealthConfig {
        let (views, publishers, host_root) =
            (&self.views, &self.publishers, self.host_root.clone());
        HealthConfig {
            plan: views.plan.clone(),
            boot_id: self.boot_id.clone(),
            leave_after: self.settings.leave_after,
            listed: Arc::clone(&self.listed),
            grants: views.grants.clone(),
            due: views.due.clone(),
            mps: views.mps.clone(),
            kubelet: views.kubelet.clone(),
            inventory: Arc::clone(&publishers.inventory),
            lists: Arc::clone(&publishers.lists),
            judgement: Arc::clone(&publishers.judgement),
            probe_device: Arc::new(move |device| hardware::signals(&host_root, device)),
            rescan: self.actors.discovery.mailbox(),
            ledger: self.actors.ledger.mailbox(),
        }
    }

    pub(super) fn discovery(
        &self,
        question: Arc<watch::Sender<NvmlQuery>>,
        nvml: watch::Receiver<Arc<NvmlSnapshot>>,
    ) -> DiscoveryConfig {
        let config = &self.settings.config;
        let has_labels = config.features_directory.is_some();
        DiscoveryConfig {
            host_root: self.host_root.clone(),
            plan: self.publishers.plan.clone(),
            grants: self.views.grants.clone(),
            inventory: self.views.inventory.clone(),
            names: self.names.clone(),
            nvml,
            question,
            described: has_labels || config.dra,
            labels: has_labels.then(|| self.publishers.gpus.clone()),
            unread: Arc::clone(&self.publishers.unread),
            remember: self.actors.ledger.mailbox(),
            discovered: self.actors.health.mailbox(),
            found: self.actors.ledger.mailbox(),
        }
    }

    pub(super) fn serving(&self) -> Shared {
        let (views, actors) = (&self.views, &self.actors);
        let preparer = Preparer::new(
            views.lists.clone(),
            self.host_root.clone(),
            self.spec_files.clone(),
            self.boot_id.clone(),
            views.kubelet.clone(),
        );
        Shared {
            lists: views.lists.clone(),
            grants: views.grants.clone(),
            performer: self.executor.clone(),
            preparer: Arc::new(preparer),
            record: actors.ledger.replying_mailbox(),
            unusable: actors.health.mailbox(),
            check_start: actors.ledger.mailbox(),
            opened: actors.registration.mailbox(),
            ended: actors.registration.mailbox(),
            closed_early: actors.registration.mailbox(),
            sockets: Arc::clone(&self.sockets),
            affinity: Affinity::default(),
            refusals: views.refusals.clone(),
            gate: Arc::clone(&self.gate),
            resend: self.resend.subscribe(),
            leaving: self.leaving.subscribe(),
        }
    }

    pub(super) fn registration(&self) -> RegistrationConfig {
        RegistrationConfig {
            kubelet_socket: watcher::kubelet_socket(&self.settings.device_plugins()),
            checkpoint: self.views.checkpoint.clone(),
            pod_resources: self.pod_resources.clone(),
            lists: self.views.lists.clone(),
            bind: self.actors.serving.mailbox(),
            retire: self.actors.serving.mailbox(),
            kubelet: self.views.kubelet.clone(),
            status: Arc::clone(&self.publishers.registrations),
            registering: Arc::clone(&self.registering),
            leaving: self.leaving.subscribe(),
        }
    }
}

/// The background tasks.
impl Wiring {
    pub(super) fn nvml(
        &self,
    ) -> (NvmlTask, Arc<watch::Sender<NvmlQuery>>, watch::Receiver<Arc<NvmlSnapshot>>) {
        NvmlTask::new(
            self.host_root.clone(),
            self.settings.config.nvml.clone(),
            self.actors.discovery.mailbox(),
            Arc::clone(&self.publishers.judgement),
        )
    }

    pub(super) fn watcher(&self, config_changed: mpsc::Sender<()>) -> Watcher {
        let actors = &self.actors;
        Watcher {
            device_plugins: self.settings.device_plugins(),
            host_root: self.host_root.clone(),
            plan: self.views.plan.clone(),
            config_dirs: config_links::directories(&self.settings.config),
            config_changed,
            labels: LabelFile::new(self.reloader.labels(), self.publishers.labels_not_read.clone()),
            kubelet: Arc::clone(&self.publishers.kubelet),
            sockets: Arc::clone(&self.sockets),
            rescan: actors.discovery.mailbox(),
            unread: Arc::clone(&self.publishers.unread),
            device_events: actors.health.mailbox(),
            judgement: Arc::clone(&self.publishers.judgement),
            reconcile: actors.ledger.mailbox(),
            kubelet_seen: actors.registration.mailbox(),
            checkpoint_written: actors.registration.mailbox(),
            socket_lost: actors.registration.mailbox(),
        }
    }

    pub(super) fn spec_files(&self) -> spec_files::Writer {
        spec_files::Writer {
            files: self.spec_files.clone(),
            host_root: self.host_root.clone(),
            inventory: self.views.inventory.clone(),
            grants: self.views.grants.clone(),
        }
    }

    pub(super) fn mps(&self) -> MpsTask {
        MpsTask::new(
            self.host_root.clone(),
            &self.settings.roots.run,
            self.views.inventory.clone(),
            self.views.grants.clone(),
            Arc::clone(&self.publishers.mps),
        )
    }

    fn hooks(&self) -> hooks::Runner {
        hooks::Runner {
            performer: self.executor.clone(),
            due: self.views.due.clone(),
            inventory: self.views.inventory.clone(),
            grants: self.views.grants.clone(),
            ended: self.actors.ledger.mailbox(),
        }
    }

    fn checks(&self) -> checks::Runner {
        checks::Runner {
            performer: self.executor.clone(),
            inventory: self.views.inventory.clone(),
            checked: self.actors.health.mailbox(),
        }
    }

    /// Starts the background tasks. The devices are known now, so kernel messages can be matched to
    /// them.
    pub(super) fn background(
        &self,
        watcher: Watcher,
        nvml: NvmlTask,
        spec_files: spec_files::Writer,
    ) -> Vec<JoinHandle<()>> {
        #[cfg(feature = "cluster")]
        let dra = self.dra(&nvml);
        let mut tasks = vec![
            tokio::spawn(watcher.run()),
            tokio::spawn(status::become_ready(self.views.clone(), self.publishers.ready.clone())),
            tokio::spawn(nvml.run()),
            tokio::spawn(self.hooks().run()),
            tokio::spawn(self.checks().run()),
            tokio::spawn(spec_files.run()),
        ];
        tasks.extend(xid_events::spawn(
            self.host_root.clone(),
            self.settings.config.nvml.clone(),
            self.actors.health.mailbox(),
            Arc::clone(&self.publishers.judgement),
            self.views.plan.clone(),
            self.views.inventory.clone(),
        ));
        if std::process::id() == 1 {
            tasks.push(tokio::spawn(reap_orphans()));
        }
        let folder = self.settings.config.features_directory.clone();
        let sources = node_labels::Sources {
            inventory: self.views.inventory.clone(),
            plan: self.views.plan.clone(),
            gpus: self.publishers.gpus.subscribe(),
        };
        let not_written = self.publishers.labels_not_written.clone();
        tasks.extend(
            folder.map(|folder| tokio::spawn(node_labels::keep(folder, sources, not_written))),
        );
        #[cfg(feature = "cluster")]
        tasks.extend(
            super::api_labels::task(&self.settings, self.publishers.not_followed.clone())
                .map(|task| tokio::spawn(task.keep())),
        );
        #[cfg(feature = "cluster")]
        tasks.extend(dra);
        #[cfg(feature = "cluster")]
        tasks.extend(self.reporting().map(|task| tokio::spawn(task.run())));
        tasks
    }
}

/// How often orphans are waited for. A hook that is killed may leave some.
const REAP_EVERY: Duration = Duration::from_secs(5);

/// Waits for the orphans that a container leaves to its first process.
async fn reap_orphans() {
    let mut orphans = Orphans::default();
    loop {
        orphans.reap();
        tokio::time::sleep(REAP_EVERY).await;
    }
}

/// The servers.
impl Wiring {
    /// Starts the servers for telemetry, for other verbs and for handovers.
    pub(super) fn servers(
        &self,
        upgrade: mpsc::Sender<UpgradeOrder>,
        asked: mpsc::Sender<Asked>,
    ) -> Vec<JoinHandle<()>> {
        let (roots, limits) = (&self.settings.roots, &self.limits);
        let telemetry = listen::serve(
            &self.settings.config,
            roots,
            &self.views,
            limits.telemetry,
            &self.publishers.telemetry,
        );
        let processors = CpuQuery {
            pod_resources: self.pod_resources.clone(),
            gate: Arc::clone(&self.gate),
            host_root: self.host_root.clone(),
        };
        let source = control::Source::new(
            self.views.clone(),
            &self.store,
            Mailboxes {
                publish: self.actors.ledger.mailbox(),
                pending: self.actors.ledger.mailbox(),
                operator: self.actors.health.mailbox(),
                release: self.actors.ledger.replying_mailbox(),
            },
            self.settings.kubelet_root(),
            processors,
            upgrade,
            self.executor.outputs().clone(),
        );
        let control = control::serve(&control::socket_path(&roots.run), source, limits.control);
        let (sockets, views) = (Arc::clone(&self.sockets), self.views.clone());
        let offer = Offer {
            fds: Arc::new(move || sockets.share()),
            refusal: Arc::new(move || views.refuses_handover()),
            registering: Arc::clone(&self.registering),
        };
        let handover = handover::listen(&roots.run, offer, asked, limits.handover);
        [telemetry, control, handover].into_iter().flatten().collect()
    }

    /// The sockets of these servers, which are removed at the end.
    pub(super) fn socket_files(&self) -> Vec<PathBuf> {
        let run = &self.settings.roots.run;
        vec![control::socket_path(run), handover::socket_path(run)]
    }
}
