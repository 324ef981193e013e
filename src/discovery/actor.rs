//! The shell of discovery: scans on a request of the host watch, has new ids recorded, and forwards
//! the evidence.

use super::evidence::{evidence, held_devices, held_nodes, keep_known};
use super::plan::{add_usual, planned};
use crate::domain::{
    Device, DeviceId, Evidence, Grant, Inventory, NvidiaNode, NvmlQuery, NvmlSnapshot, Plan, Unread,
};
use crate::hardware;
use crate::host::{self, HostRoot, ReadFailure};
use crate::messages::{Crash, Discovered, Found, Mailbox, Remember, Rescan};
use crate::telemetry::metrics;
use actix::{
    Actor, ActorFutureExt, AsyncContext, AtomicResponse, Context, Handler, SpawnHandle, WrapFuture,
};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Backoff after a scan with read failures: the first wait. Each further one doubles it.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// The longest wait of this backoff.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// The most incomplete scans in a row that are not forwarded while the list is still empty. After a
/// start the list can wait that long (1.5 s without the scans), and needs the devices.
const FIRST_TRIES: u32 = 4;

/// How long the ledger may take to make ids durable, and health to accept the evidence.
const PUBLISH_DEADLINE: Duration = Duration::from_secs(5);

/// The actor's dependencies, the same for every life.
#[derive(Debug, Clone)]
pub struct DiscoveryConfig {
    /// The root of the host's trees.
    pub host_root: HostRoot,
    /// The resources that select devices. Published again when nodes that are resources of their
    /// own come or go.
    pub plan: watch::Sender<Arc<Plan>>,
    /// The live grants: a held node is read even when no resource names it any longer.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// The current list: a listed node is read in the same case.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The assigned ids, by physical key.
    pub names: watch::Receiver<Arc<BTreeMap<String, DeviceId>>>,
    /// NVML's answers so far: empty at the first scan, which does not wait for them.
    pub nvml: watch::Receiver<Arc<NvmlSnapshot>>,
    /// Publishes the question for NVML.
    pub question: Arc<watch::Sender<NvmlQuery>>,
    /// Whether NVML must describe every GPU: for the labels of the node, or for the slices.
    pub described: bool,
    /// Publishes the GPUs of NVIDIA's driver for the labels of the node; `None` if it has none.
    pub labels: Option<watch::Sender<Option<Arc<NvidiaNode>>>>,
    /// Publishes what the last scan could not read, for `status` and the metrics.
    pub unread: Arc<watch::Sender<Unread>>,
    /// The ledger, which makes new ids durable.
    pub remember: Mailbox<Remember>,
    /// Health.
    pub discovered: Mailbox<Discovered>,
    /// The ledger, which gets the evidence of each scan.
    pub found: Mailbox<Found>,
}

/// The discovery actor.
#[derive(Debug)]
pub struct DiscoveryActor {
    config: DiscoveryConfig,
    /// When the last scan began.
    scanned_at: Option<Duration>,
    /// The result of the last scan: what cannot be read stays as it was there.
    former: Option<hardware::Discovery>,
    /// Incomplete scans in a row.
    incomplete: u32,
    /// The next scan after an incomplete one.
    retry: Option<SpawnHandle>,
    /// Warnings that were logged: each is logged once, not at every poll.
    warned: BTreeSet<String>,
    _life: Box<dyn Any + Send>,
}

impl DiscoveryActor {
    /// Builds one life of the actor.
    pub fn new(config: DiscoveryConfig, life: impl Any + Send) -> Self {
        DiscoveryActor {
            config,
            scanned_at: None,
            former: None,
            incomplete: 0,
            retry: None,
            warned: BTreeSet::new(),
            _life: Box::new(life),
        }
    }

    /// Scans the host. Returns the evidence, and the new ids.
    fn scan(
        &mut self,
        plan: &Plan,
        of_plan: Result<Vec<String>, ReadFailure>,
    ) -> (Evidence, Vec<(String, DeviceId)>) {
        let (began, clock) = (host::now(), Instant::now());
        let DiscoveryConfig { host_root, names, .. } = &self.config;
        let remembered = names.borrow().clone();
        let nvml = self.config.nvml.borrow().clone();
        let grants = self.config.grants.borrow().clone();
        let inventory = self.config.inventory.borrow().clone();
        let scan = hardware::scan_after(
            host_root,
            self.former.as_ref().map_or(&[], |former| &former.devices),
        );
        add_usual(&self.config.plan, plan, &scan);
        let held = held_nodes(&grants);
        let known = hardware::DiscoverInput {
            names: &remembered,
            nvml: &nvml,
            held: &held,
            former: self.former.as_ref(),
        };
        let mut found = hardware::discover_with(host_root, scan, &plan.specs, &known);
        let question = hardware::nvml_query(host_root, &found.selection, self.config.described);
        self.config.question.send_if_modified(|query| {
            *query != question && {
                *query = question;
                true
            }
        });
        self.publish_gpus(&found.devices, &nvml);
        let of_plan = of_plan.unwrap_or_else(|failure| {
            let patterns = plan.patterns.iter().filter(|spec| spec.name.is_pattern());
            found
                .unread
                .resources
                .extend(patterns.map(|spec| (spec.name.clone(), failure.to_string())));
            Vec::new()
        });
        keep_known(&mut found.devices, &inventory);
        let listed = inventory.resources.iter().flat_map(|(name, offering)| {
            offering.devices.values().map(move |listed| (name, listed.device.as_ref()))
        });
        let evidence = evidence(host_root, began, &mut found, held_devices(&grants), listed);
        metrics::scanned(clock.elapsed());
        let warnings: BTreeSet<String> =
            of_plan.into_iter().chain(std::mem::take(&mut found.selection.warnings)).collect();
        for warning in warnings.difference(&self.warned) {
            tracing::warn!("{warning}");
        }
        self.warned = warnings;
        let named = std::mem::take(&mut found.named);
        // The devices contain the functions too.
        found.scan = hardware::Scan::default();
        self.former = Some(found);
        (evidence, named)
    }

    /// Publishes the GPUs for the labels of the node. Where they cannot be read, they stay.
    fn publish_gpus(&self, devices: &[Arc<Device>], nvml: &NvmlSnapshot) {
        let Some(labels) = &self.config.labels else { return };
        if let Ok(node) = hardware::nvidia_node(&self.config.host_root, devices, nvml) {
            labels.send_if_modified(|known| {
                known.as_deref() != Some(&node) && {
                    *known = Some(Arc::new(node));
                    true
                }
            });
        }
    }

    /// Records whether a scan was complete. Returns the wait until the next scan if it was not.
    fn note_unread(&mut self, unread: &Unread) -> Option<Duration> {
        self.config.unread.send_if_modified(|known| {
            *known != *unread && {
                known.clone_from(unread);
                true
            }
        });
        self.incomplete = if unread.is_empty() { 0 } else { self.incomplete.saturating_add(1) };
        let doublings = self.incomplete.checked_sub(1)?.min(16);
        Some(RETRY_FIRST.saturating_mul(1 << doublings).min(RETRY_MAX))
    }
}

impl Actor for DiscoveryActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        request_scan(&context.address());
    }
}

/// Requests a scan. With a full mailbox a scan is pending anyway.
fn request_scan(address: &actix::Addr<DiscoveryActor>) {
    drop(address.try_send(Rescan { asked_at: host::now().boot }));
}

impl Handler<Rescan> for DiscoveryActor {
    /// One scan at a time: an older result must not overtake a newer one.
    type Result = AtomicResponse<Self, Duration>;

    fn handle(&mut self, Rescan { asked_at }: Rescan, context: &mut Self::Context) -> Self::Result {
        // Events come in bursts. A scan that began after this event has seen its change.
        if self.scanned_at.is_some_and(|scanned_at| scanned_at > asked_at) {
            return AtomicResponse::new(Box::pin(
                std::future::ready(Duration::ZERO).into_actor(self),
            ));
        }
        let began = host::thread_time();
        self.scanned_at = Some(host::now().boot);
        let DiscoveryConfig { host_root, plan, grants, nvml, question, .. } = &self.config;
        let held = || grants.borrow().iter().map(|grant| grant.resource.clone()).collect();
        let nvml = nvml.borrow().clone();
        let profiles = (&*nvml, nvml.lacks_profile(&question.borrow()));
        let (plan, warnings) = planned(host_root, plan, profiles, held);
        let (evidence, named) = self.scan(&plan, warnings);
        let used = host::thread_time().saturating_sub(began);
        if self.config.plan.borrow().number != plan.number {
            request_scan(&context.address());
        }
        if let Some(retry) = self.retry.take() {
            context.cancel_future(retry);
        }
        if let Some(wait) = self.note_unread(&evidence.unread) {
            let retry = context.run_later(wait, |_, context| request_scan(&context.address()));
            self.retry = Some(retry);
            if self.incomplete <= FIRST_TRIES && self.config.inventory.borrow().resources.is_empty()
            {
                return AtomicResponse::new(Box::pin(std::future::ready(used).into_actor(self)));
            }
        }
        let config = self.config.clone();
        let publish = publish(evidence, plan, named, config);
        AtomicResponse::new(Box::pin(publish.into_actor(self).map(move |(), _, _| used)))
    }
}

/// Makes new ids durable, then sends the evidence to health. A device whose id cannot be recorded
/// is not offered, and the next scan tries again. The others are not delayed.
async fn publish(
    mut evidence: Evidence,
    plan: Arc<Plan>,
    named: Vec<(String, DeviceId)>,
    config: DiscoveryConfig,
) {
    let DiscoveryConfig { remember, discovered, found, .. } = config;
    if !named.is_empty() {
        let recorded = match remember.call(Remember(named.clone()), PUBLISH_DEADLINE).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = recorded {
            tracing::error!(%error, devices = named.len(), "failed to record the ids of new devices; these devices are not offered");
            for (_, id) in &named {
                evidence.devices.remove(id);
                evidence.selected.values_mut().for_each(|selected| {
                    selected.remove(id);
                });
            }
        }
    }
    let evidence = Arc::new(evidence);
    let to_publish = Discovered { evidence: Arc::clone(&evidence), plan };
    if let Err(error) = discovered.call(to_publish, PUBLISH_DEADLINE).await {
        tracing::warn!(%error, "health evaluation of a scan failed; the next scan retries");
    }
    // After the list, which decides what is absent.
    found.send(Found(evidence));
}

impl Handler<Crash> for DiscoveryActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message requests it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
