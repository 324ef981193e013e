//! Dynamic Resource Allocation, if the configuration switches it on: the driver's parts.

use super::wiring::Wiring;
use crate::cluster::{Client, Credentials};
use crate::domain::{ClaimHealth, DeviceClass, DeviceId, DraName};
use crate::reporting::Statuses;
use crate::serving::claims::{ClaimDevices, ClaimFiles, ClaimPreparer, NameOf};
use crate::serving::{MetadataFacts, Preparer};
use crate::slices::holders::Lost;
use crate::slices::names::{Family, NodeName, device_name};
use crate::tasks::dra::{
    ApiClaims, Driver, EvidenceTask, Healths, Recorder, Records, RecordsTask, Restorer, SlicesTask,
    SocketsTask, StatusesTask, keep_files, live_claims,
};
use crate::tasks::nvml::NvmlTask;
use crate::telemetry::metrics;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

impl Wiring {
    /// Starts the tasks of the driver. None if it is switched off, or if the node has no name.
    pub(super) fn dra(&self, nvml: &NvmlTask) -> Vec<JoinHandle<()>> {
        let config = &self.settings.config;
        if !config.dra {
            return Vec::new();
        }
        metrics::dra_begins();
        self.publishers.published.send_replace(Some(Arc::default()));
        let Some(node) = self.node_name() else {
            return Vec::new();
        };
        let roots = &self.settings.roots;
        let credentials = Credentials::new(&config.credentials, &roots.kubelet, &roots.host);
        let client = Client::new(credentials.clone());
        let views = &self.views;
        let files = self.spec_files.claims.clone();
        // The directory is empty after a boot, and the kubelet may start containers at once. The
        // files of other claims stay until it is known whether the ledger has lost them.
        files.spare_all();
        if let Err(error) = files.keep(live_claims(&views.grants.borrow())) {
            tracing::warn!(%error, "cannot update the CDI files of claims");
        }
        let records = Records::new(self.settings.kubelet_root(), views.grants.clone());
        let lost = watch::Sender::default();
        // The one of the device plugin knows only the lists for the kubelet.
        let devices = Preparer::new(
            views.inventory.clone(),
            self.host_root.clone(),
            self.spec_files.clone(),
            self.boot_id.clone(),
            views.kubelet.clone(),
        );
        let facts = MetadataFacts { nvml: nvml.snapshots(), vendors: config.vendor_attributes };
        let devices = Arc::new(devices.with_metadata(config.device_metadata.then_some(facts)));
        let name_of = names(node.clone());
        let preparer = ClaimPreparer::new(
            Arc::new(ApiClaims { client, vendors: config.vendor_attributes }),
            Arc::new(self.recorder(&records, &lost)),
            Arc::clone(&devices) as _,
            Arc::clone(&name_of),
            files.clone(),
        );
        let restorer = self.restorer(&records, files.clone(), devices, Arc::clone(&name_of));
        let evidence = self.claim_evidence(node.clone(), Client::new(credentials.clone()));
        let statuses = self.claim_statuses(&node, &credentials);
        let (health, healths) = watch::channel(Arc::from([]));
        let (notices, noticed) = watch::channel(None);
        let driver = Driver { preparer: Arc::new(preparer), health: healths };
        self.sockets.dra.set_served();
        let sockets = SocketsTask {
            root: self.settings.kubelet_root(),
            driver,
            notices,
            problem: self.publishers.dra_sockets.clone(),
            sockets: Arc::clone(&self.sockets),
            leaving: self.leaving.subscribe(),
        };
        let healths = self.healths(name_of, health);
        let slices = SlicesTask {
            node,
            // Requests on one connection wait for each other: no Prepare waits for a write.
            client: Client::new(credentials.clone()),
            credentials,
            host_root: self.host_root.clone(),
            inventory: views.inventory.clone(),
            grants: views.grants.clone(),
            judgement: views.judgement.clone(),
            nvml: nvml.snapshots(),
            nvml_called: nvml.called(),
            vendors: config.vendor_attributes,
            lost: lost.subscribe(),
            notices: noticed,
            problem: self.publishers.dra_slices.clone(),
            published: self.publishers.published.clone(),
        };
        let keep = keep_files(files, views.grants.clone());
        let mut tasks = vec![
            tokio::spawn(healths.keep()),
            tokio::spawn(self.claim_records(records).run()),
            tokio::spawn(begin(restorer, keep, sockets, slices, evidence)),
        ];
        tasks.extend(statuses.map(|task| tokio::spawn(task.run())));
        tasks
    }

    fn healths(&self, name_of: NameOf, health: watch::Sender<Arc<[ClaimHealth]>>) -> Healths {
        let views = &self.views;
        Healths {
            inventory: views.inventory.clone(),
            grants: views.grants.clone(),
            judgement: views.judgement.clone(),
            name_of,
            health,
        }
    }

    /// The task that writes the status of claims. `None` if it is switched off.
    fn claim_statuses(&self, node: &NodeName, credentials: &Credentials) -> Option<StatusesTask> {
        let views = &self.views;
        self.settings.config.claim_status.then(|| StatusesTask {
            client: Client::new(credentials.clone()),
            host_root: self.host_root.clone(),
            inventory: views.inventory.clone(),
            grants: views.grants.clone(),
            judgement: views.judgement.clone(),
            statuses: Statuses::new(node.as_str()),
            problem: self.publishers.dra_statuses.clone(),
        })
    }

    /// The name of this node, or `None`, which is logged.
    fn node_name(&self) -> Option<NodeName> {
        let name = self.settings.config.node.api_name().ok_or_else(|| "set `NODE_NAME`".to_owned());
        name.and_then(|name| NodeName::new(&name).map_err(|error| error.to_string()))
            .map_err(|why| {
                let why = format!("the name of this node is unknown: {why}");
                tracing::error!(why, "devices are not given to claims");
                self.publishers.dra_sockets.send_replace(Some(why));
            })
            .ok()
    }

    fn recorder(&self, records: &Records, lost: &watch::Sender<Arc<Lost>>) -> Recorder {
        let (views, ledger) = (&self.views, &self.actors.ledger);
        Recorder {
            record: ledger.replying_mailbox(),
            release: ledger.replying_mailbox(),
            grants: views.grants.clone(),
            boot_id: self.boot_id.clone(),
            kubelet: views.kubelet.clone(),
            records: records.clone(),
            lost: lost.clone(),
            published: views.published.clone(),
        }
    }

    fn restorer(
        &self,
        records: &Records,
        files: ClaimFiles,
        devices: Arc<dyn ClaimDevices>,
        name_of: NameOf,
    ) -> Restorer {
        Restorer {
            records: records.clone(),
            files,
            devices,
            name_of,
            restore: self.actors.ledger.replying_mailbox(),
            grants: self.views.grants.clone(),
            inventory: self.views.inventory.clone(),
            problem: self.publishers.dra_claims.clone(),
        }
    }

    fn claim_records(&self, records: Records) -> RecordsTask {
        RecordsTask {
            records,
            grants: self.views.grants.clone(),
            evidence: self.publishers.claim_evidence.clone(),
            reconcile: self.actors.ledger.mailbox(),
        }
    }

    fn claim_evidence(&self, node: NodeName, client: Client) -> EvidenceTask {
        let (views, roots) = (&self.views, &self.settings.roots);
        EvidenceTask {
            node,
            client,
            host_root: roots.host.clone(),
            grants: views.grants.clone(),
            kubelet: views.kubelet.clone(),
            evidence: self.publishers.claim_evidence.clone(),
            reconcile: self.actors.ledger.mailbox(),
        }
    }
}

/// Restores lost claims first: then no claim gets a device that another one holds, and the slices
/// keep the devices of all claims.
async fn begin(
    mut restorer: Restorer,
    keep: impl Future<Output = ()>,
    sockets: SocketsTask,
    slices: SlicesTask,
    evidence: EvidenceTask,
) {
    let left = restorer.begin().await;
    tokio::join!(keep, sockets.run(), slices.run(), evidence.run(), restorer.follow(left));
}

/// The names of this node's devices in the DRA API. A class without a family is never published, so
/// no claim has a name in the empty pool.
fn names(node: NodeName) -> NameOf {
    Arc::new(move |id: &DeviceId, class: DeviceClass| DraName {
        pool: Family::of(class).map(|family| node.pool(family)).unwrap_or_default(),
        device: device_name(id),
    })
}
