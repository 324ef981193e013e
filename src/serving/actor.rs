//! The shell: makes sockets, and answers Allocate in one order — decide, look, record, answer.

use super::core;
use super::files::SpecFiles;
use super::plugin::{Affinity, Plugin, Shared};
use super::sockets::Sockets;
use crate::contract;
use crate::domain::{
    AllocId, ContainerEdits, Device, Grant, GrantState, GrantedDevice, Inventory, KubeletGeneration, Reason, Refusal, Stage,
};
use crate::hook::Performer;
use crate::host::{self, Awake, HostRoot};
use crate::kubelet::api;
use crate::messages::{
    Allocate, AllocateError, Bind, Broken, Crash, Mailbox, Pass, Record, RecordError, Retire, StreamEnded, StreamOpened,
};
use actix::{Actor, Context, Handler, ResponseFuture};
use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{RwLock, watch};

/// How long an Allocate waits for the ledger, and for health to publish a broken device.
const RECORD_DEADLINE: Duration = Duration::from_millis(1800);
const BROKEN_DEADLINE: Duration = Duration::from_millis(200);

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct ServingConfig {
    /// What is offered.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Who holds what.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// Runs the hooks before a start.
    pub performer: Performer,
    /// The table of sockets, which outlives the actor.
    pub sockets: Arc<Sockets>,
    /// What was granted last, which outlives it too.
    pub affinity: Affinity,
    /// Who waits for an answer to an Allocate; it outlives the actor too.
    pub awake: Awake,
    /// Where device nodes are looked for.
    pub host_root: HostRoot,
    /// The files that others read to know what a container has.
    pub files: SpecFiles,
    /// This boot's identity.
    pub boot_id: String,
    /// The kubelet's socket as last seen by the host watch.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The ledger.
    pub record: Mailbox<Record>,
    /// The ledger.
    pub pass: Mailbox<Pass>,
    /// Health.
    pub broken: Mailbox<Broken>,
    /// This actor itself, across its deaths: where the kubelet's calls go.
    pub allocate: Mailbox<Allocate>,
    /// Registration.
    pub opened: Mailbox<StreamOpened>,
    /// Registration.
    pub ended: Mailbox<StreamEnded>,
    /// Keeps pod listings and Allocates apart.
    pub gate: Arc<RwLock<()>>,
    /// What this instance is to the kubelet.
    pub stage: watch::Receiver<Stage>,
}

/// The actor.
#[derive(Debug)]
pub struct Serving {
    config: ServingConfig,
    _life: Box<dyn Any + Send>,
}

impl Serving {
    /// Builds one life of the actor.
    pub fn new(config: ServingConfig, life: impl Any + Send) -> Self {
        Serving { config, _life: Box::new(life) }
    }

    /// Decides, and says what the container gets and what the ledger has to know; changes nothing.
    fn prepare(&self, request: &Allocate) -> Result<(ContainerEdits, Record), Refusal> {
        let Allocate { alloc_id, resource, ids, wire } = request;
        let inventory = self.config.inventory.borrow().clone();
        let offering = inventory.resources.get(resource).ok_or_else(|| Refusal::NotOffered(resource.clone()))?;
        let offered = core::decide(offering, ids)?;
        let nodes = Nodes::new(&self.config.host_root);
        let node_exists = |path: &str| nodes.exist(path);
        // The list may be older than the loss of a node.
        for (id, offered) in ids.iter().zip(&offered) {
            let missing = |node: &crate::domain::DeviceNode| node.required && !node_exists(&node.host);
            if offered.device.nodes.iter().any(missing) {
                return Err(Refusal::Unhealthy { resource: resource.clone(), id: id.clone(), reason: Reason::NodeMissing });
            }
            // A held device stays in the list while NVML does not tell its name.
            if let Some(why) = contract::unanswerable(&offering.spec, &offered.device) {
                return Err(Refusal::Unanswerable { resource: resource.clone(), id: id.clone(), why });
            }
        }
        let devices: Vec<&Device> = offered.iter().map(|offered| offered.device.as_ref()).collect();
        let mut edits =
            contract::edits(&contract::Request { spec: &offering.spec, devices: &devices, alloc_id, node_exists: &node_exists });
        core::fits(&offering.spec, &edits, *wire)?;
        self.config.files.ensure(&offering.spec, ids.iter().zip(devices.iter().copied()), &node_exists)?;
        edits.annotations.insert(AllocId::ANNOTATION.into(), alloc_id.to_string());
        let granted = |(id, device): (&crate::domain::DeviceId, &&Device)| GrantedDevice {
            id: id.clone(),
            key: device.key.clone(),
            numa_nodes: device.numa_nodes.clone(),
            nodes: nodes_behind(device, &edits),
        };
        let grant = Arc::new(Grant {
            alloc_id: alloc_id.clone(),
            resource: resource.clone(),
            devices: ids.iter().zip(&devices).map(granted).collect(),
            edits: edits.clone(),
            boot_id: self.config.boot_id.clone(),
            kubelet: *self.config.kubelet.borrow(),
            granted_at: host::now().wall,
            version: env!("CARGO_PKG_VERSION").into(),
            state: GrantState::Granted,
        });
        Ok((edits, Record { grant, exclusive: offering.spec.is_exclusive() }))
    }
}

/// Which nodes exist, looked at once each for one Allocate.
struct Nodes<'a> {
    root: &'a HostRoot,
    seen: RefCell<Vec<(String, bool)>>,
}

impl<'a> Nodes<'a> {
    fn new(root: &'a HostRoot) -> Self {
        Nodes { root, seen: RefCell::default() }
    }

    fn exist(&self, path: &str) -> bool {
        let mut seen = self.seen.borrow_mut();
        if let Some((_, exists)) = seen.iter().find(|(known, _)| known == path) {
            return *exists;
        }
        let exists = self.root.node_exists(path);
        seen.push((path.to_owned(), exists));
        exists
    }
}

/// The nodes of a device that no answer names.
fn nodes_behind(device: &Device, edits: &ContainerEdits) -> Vec<String> {
    let nodes = device.nodes.iter().filter(|node| node.required).map(|node| &node.host);
    nodes.filter(|node| !edits.devices.iter().any(|told| told.host == **node)).cloned().collect()
}

impl Actor for Serving {
    type Context = Context<Self>;
}

impl Handler<Allocate> for Serving {
    type Result = ResponseFuture<Result<ContainerEdits, AllocateError>>;

    fn handle(&mut self, request: Allocate, _: &mut Self::Context) -> Self::Result {
        let prepared = self.prepare(&request);
        let (record, broken) = (self.config.record.clone(), self.config.broken.clone());
        Box::pin(async move {
            let (edits, grant) = match prepared {
                Ok(prepared) => prepared,
                Err(error) => {
                    // A hook that is due is no news, and no scan would find its end.
                    if let Refusal::Unhealthy { resource, id, reason } = &error
                        && !reason.is_of_hook()
                    {
                        let news = Broken { resource: resource.clone(), id: id.clone(), reason: *reason };
                        // The kubelet should learn of it before it tries again; the error does not wait for long.
                        drop(broken.call(news, BROKEN_DEADLINE).await);
                    }
                    return Err(error.into());
                }
            };
            let resource = grant.grant.resource.clone();
            let not_recorded = |why: String| AllocateError::NotRecorded { resource, why };
            match record.call(grant, RECORD_DEADLINE).await {
                Ok(Ok(())) => Ok(edits),
                Ok(Err(RecordError::Refused(refusal))) => Err(refusal.into()),
                Ok(Err(RecordError::Store(error))) => Err(not_recorded(error.to_string())),
                Err(error) => Err(not_recorded(error.to_string())),
            }
        })
    }
}

impl Handler<Bind> for Serving {
    type Result = Result<String, String>;

    fn handle(&mut self, Bind { resource, registration }: Bind, _: &mut Self::Context) -> Self::Result {
        let ServingConfig { inventory, grants, performer, sockets, affinity, awake, allocate, pass, opened, ended, gate, stage, .. } =
            self.config.clone();
        let problem = |error| format!("no socket can be made in `{}`: {error}", sockets.directory().display());
        let bound = sockets.bind(&resource, registration).map_err(problem)?;
        let shared = Shared {
            inventory,
            grants,
            performer,
            allocate,
            pass,
            opened,
            ended,
            sockets: Arc::clone(&sockets),
            affinity,
            awake,
            gate,
            stage,
        };
        let plugin: Arc<dyn api::Plugin> = Arc::new(Plugin { resource: resource.clone(), registration, shared });
        let (mut close, serving) = (bound.close.clone(), bound.close);
        let closed = Box::pin(async move {
            // An error means that the table itself is gone, and the daemon with it.
            drop(close.wait_for(|close| *close).await);
        });
        let server = tonic::transport::Server::builder()
            .add_routes(api::serve(&plugin))
            .serve_with_incoming_shutdown(bound.listener.incoming(), closed);
        tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%resource, %error, "the server of a socket failed");
            }
            drop(serving);
        });
        Ok(bound.endpoint)
    }
}

impl Handler<Retire> for Serving {
    type Result = ();

    fn handle(&mut self, Retire { resource, newest }: Retire, _: &mut Self::Context) {
        self.config.sockets.supersede(&resource, newest);
    }
}

impl Handler<Crash> for Serving {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
