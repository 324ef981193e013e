//! The shell: scans on a hint or on the poll, has new names remembered, and hands the evidence on.

use crate::domain::{Device, DeviceId, Evidence, ResourceSpec};
use crate::hardware;
use crate::host::{self, HostRoot};
use crate::messages::{Crash, Discovered, Mailbox, Remember, Rescan};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, Context, Handler, ResponseFuture};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The slow poll: every hint may be lost, this one is not.
const POLL: Duration = Duration::from_secs(30);

/// How long the ledger may take to make names durable, and health to take the evidence.
const HAND_ON_DEADLINE: Duration = Duration::from_secs(5);

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct DiscoveryConfig {
    /// The root of the host's trees.
    pub host_root: HostRoot,
    /// The configured resources.
    pub specs: Arc<[Arc<ResourceSpec>]>,
    /// The ids that devices have been given, by physical key.
    pub names: watch::Receiver<Arc<BTreeMap<String, DeviceId>>>,
    /// The ledger.
    pub remember: Mailbox<Remember>,
    /// Health.
    pub discovered: Mailbox<Discovered>,
}

/// The actor.
#[derive(Debug)]
pub struct DiscoveryActor {
    config: DiscoveryConfig,
    /// Warnings that have been logged: the same one of every poll is no news.
    said: BTreeSet<String>,
    _life: Box<dyn Any + Send>,
}

impl DiscoveryActor {
    /// Builds one life of the actor.
    pub fn new(config: DiscoveryConfig, life: impl Any + Send) -> Self {
        DiscoveryActor { config, said: BTreeSet::new(), _life: Box::new(life) }
    }

    /// Looks at the host. Returns the evidence, and the names that are new.
    fn look(&mut self) -> (Evidence, Vec<(String, DeviceId)>) {
        let (began, clock) = (host::now(), Instant::now());
        let DiscoveryConfig { host_root, specs, names, .. } = &self.config;
        let remembered = names.borrow().clone();
        let found = hardware::discover(host_root, specs, &remembered);
        let required = found.devices.iter().flat_map(|device| &device.nodes).filter(|node| node.required);
        let nodes: BTreeSet<&String> = required.map(|node| &node.host).collect();
        let missing_nodes = nodes.into_iter().filter(|node| !host_root.node_exists(node)).cloned().collect();
        let ids = |devices: Vec<Arc<Device>>| devices.iter().map(|device| device.id.clone()).collect();
        let selected = found.selection.resources.into_iter().map(|(name, devices)| (name, ids(devices))).collect();
        let devices = found.devices.into_iter().map(|device| (device.id.clone(), device)).collect();
        metrics::scanned(clock.elapsed());
        let warnings: BTreeSet<String> = found.selection.warnings.into_iter().collect();
        for warning in warnings.difference(&self.said) {
            tracing::warn!("{warning}");
        }
        self.said = warnings;
        (Evidence { began, devices, selected, missing_nodes }, found.named)
    }
}

impl Actor for DiscoveryActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        let address = context.address();
        let scan = move |address: &actix::Addr<Self>| {
            // Full means that a scan is due anyway.
            drop(address.try_send(Rescan));
        };
        scan(&address);
        context.run_interval(POLL, move |_, context| scan(&context.address()));
    }
}

impl Handler<Rescan> for DiscoveryActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Rescan, _: &mut Self::Context) -> Self::Result {
        let (evidence, new_names) = self.look();
        let (remember, discovered) = (self.config.remember.clone(), self.config.discovered.clone());
        Box::pin(async move {
            if !new_names.is_empty() {
                // Not published before it is durable; the next scan tries again.
                match remember.call(Remember(new_names), HAND_ON_DEADLINE).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return tracing::error!(%error, "the ids of new devices cannot be recorded; they are not offered"),
                    Err(error) => return tracing::error!(%error, "the ids of new devices cannot be recorded; they are not offered"),
                }
            }
            if let Err(error) = discovered.call(Discovered(Arc::new(evidence)), HAND_ON_DEADLINE).await {
                tracing::warn!(%error, "what a scan found was not judged");
            }
        })
    }
}

impl Handler<Crash> for DiscoveryActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
