//! The shell: makes sockets, and says what an Allocate comes to. The connection it came on has that recorded, and answers.

use super::core;
use super::files::SpecFiles;
use super::plugin::{Plugin, Shared};
use crate::contract;
use crate::domain::{AllocId, ContainerEdits, Device, Grant, GrantState, GrantedDevice, KubeletGeneration, Reason, Refusal};
use crate::hardware;
use crate::host::{self, HostRoot, Listings};
use crate::kubelet::api;
use crate::kubelet::conversation::Followed;
use crate::messages::{Bind, Crash, Prepare, Prepared, Record, Retire};
use actix::{Actor, Context, Handler, MessageResult};
use futures_util::TryStreamExt as _;
use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long it is known where a directory of nodes really is: Allocates come many at a time.
const DIRECTORIES_KNOWN_FOR: Duration = Duration::from_millis(100);

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct ServingConfig {
    /// What the services behind the sockets need, which outlive the actor.
    pub shared: Shared,
    /// Where device nodes are looked for.
    pub host_root: HostRoot,
    /// The files that others read to know what a container has.
    pub files: SpecFiles,
    /// This boot's identity.
    pub boot_id: String,
    /// The kubelet's socket as last seen by the host watch.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
}

/// The actor.
#[derive(Debug)]
pub struct Serving {
    config: ServingConfig,
    /// Where the nodes of the last Allocates lie, and since when that is known.
    directories: RefCell<(Instant, Listings)>,
    _life: Box<dyn Any + Send>,
}

impl Serving {
    /// Builds one life of the actor.
    pub fn new(config: ServingConfig, life: impl Any + Send) -> Self {
        Serving { config, directories: RefCell::new((Instant::now(), Listings::default())), _life: Box::new(life) }
    }

    /// Decides, and says what the container gets and what the ledger has to know; changes nothing.
    fn prepare(&self, request: &Prepare) -> Result<Prepared, Refusal> {
        let Prepare { alloc_id, resource, ids, wire } = request;
        let inventory = self.config.shared.inventory.borrow().clone();
        let offering = inventory.resources.get(resource).ok_or_else(|| Refusal::NotOffered(resource.clone()))?;
        let offered = core::decide(offering, ids)?;
        let nodes = Nodes::new(&self.config.host_root, &self.directories);
        let node_exists = |path: &str| nodes.exist(path);
        // The list may be older than the loss of a node.
        for (id, offered) in ids.iter().zip(&offered) {
            let missing = |node: &crate::domain::DeviceNode| node.required && !node_exists(&node.host);
            if offered.device.nodes.iter().any(missing) {
                return Err(Refusal::Unhealthy { resource: resource.clone(), id: id.clone(), reason: Reason::NodeMissing });
            }
            // A held device stays in the list while NVML does not tell its name.
            let unanswerable = contract::unanswerable(&offering.spec, &offered.device);
            // Nor is a disk given away that has been mounted since the list was made.
            let used = || hardware::used_for(&self.config.host_root, &offered.device).map(|by| format!("the host uses it: {by}"));
            if let Some(why) = unanswerable.or_else(used) {
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
        Ok(Prepared { edits, record: Record { grant, exclusive: offering.spec.is_exclusive() } })
    }
}

/// Which nodes exist, looked at once each for one Allocate.
struct Nodes<'a> {
    root: &'a HostRoot,
    directories: &'a RefCell<(Instant, Listings)>,
    seen: RefCell<Vec<(String, bool)>>,
}

impl<'a> Nodes<'a> {
    fn new(root: &'a HostRoot, directories: &'a RefCell<(Instant, Listings)>) -> Self {
        let mut known = directories.borrow_mut();
        if known.0.elapsed() > DIRECTORIES_KNOWN_FOR {
            *known = (Instant::now(), Listings::default());
        }
        Nodes { root, directories, seen: RefCell::default() }
    }

    fn exist(&self, path: &str) -> bool {
        let mut seen = self.seen.borrow_mut();
        if let Some((_, exists)) = seen.iter().find(|(known, _)| known == path) {
            return *exists;
        }
        let exists = self.root.node_exists_among(&mut self.directories.borrow_mut().1, path);
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

impl Handler<Prepare> for Serving {
    type Result = MessageResult<Prepare>;

    fn handle(&mut self, request: Prepare, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.prepare(&request))
    }
}

impl Handler<Bind> for Serving {
    type Result = Result<String, String>;

    fn handle(&mut self, Bind { resource, registration }: Bind, _: &mut Self::Context) -> Self::Result {
        let shared = self.config.shared.clone();
        let problem = |error| format!("no socket can be made in `{}`: {error}", shared.sockets.directory().display());
        let bound = shared.sockets.bind(&resource, registration).map_err(problem)?;
        let plugin = Arc::new(Plugin { resource: resource.clone(), registration, shared });
        let (mut close, serving) = (bound.close.clone(), bound.close);
        let closed = Box::pin(async move {
            // An error means that the table itself is gone, and the daemon with it.
            drop(close.wait_for(|close| *close).await);
        });
        let follower = Arc::clone(&plugin);
        let broke_off: Arc<dyn Fn() + Send + Sync> = Arc::new(move || follower.tell_of_hang_up());
        let plugin: Arc<dyn api::Plugin> = plugin;
        let incoming = bound.listener.incoming().map_ok(move |stream| Followed::new(stream, Arc::clone(&broke_off)));
        let server = tonic::transport::Server::builder().serve_with_incoming_shutdown(api::serve(&plugin), incoming, closed);
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
        self.config.shared.sockets.supersede(&resource, newest);
    }
}

impl Handler<Crash> for Serving {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
