//! The shell of discovery: scans on an event or on the poll, has new ids recorded, and forwards the
//! evidence.

use crate::domain::{
    Device, DeviceId, Evidence, Grant, GrantedDevice, Inventory, Moment, NvidiaNode, NvmlQuery,
    NvmlSnapshot, Object, Plan, ResourceName, ResourceSpec, Unread,
};
use crate::hardware::{self, HeldNode};
use crate::host::{self, HostRoot, ReadFailure};
use crate::messages::{Crash, Discovered, Found, Mailbox, Remember, Rescan};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, AtomicResponse, Context, Handler, WrapFuture};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The slow poll: events may be lost, the poll is not.
const POLL: Duration = Duration::from_secs(30);

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
        let held = held_nodes(&grants);
        let known = hardware::DiscoverInput {
            names: &remembered,
            nvml: &nvml,
            held: &held,
            former: self.former.as_ref(),
        };
        let mut found = hardware::discover_with(host_root, scan, &plan.specs, &known);
        let question =
            hardware::nvml_query(host_root, &found.selection, self.config.labels.is_some());
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

/// The nodes of `/dev` that containers hold.
pub(crate) fn held_nodes(grants: &[Arc<Grant>]) -> Vec<HeldNode> {
    let devices =
        grants.iter().flat_map(|grant| grant.devices.iter().map(move |device| (grant, device)));
    let nodes =
        devices.filter(|(_, device)| device.key.starts_with("dev:") || device.key.is_empty());
    let held = nodes.map(|(grant, device)| HeldNode {
        id: device.id.shared().unwrap_or_else(|| device.id.clone()),
        objects: if device.objects.is_empty() { grant.objects() } else { device.objects.clone() },
    });
    held.collect()
}

/// The devices that containers hold, with the resource.
pub(crate) fn held_devices(
    grants: &[Arc<Grant>],
) -> impl Iterator<Item = (&ResourceName, &GrantedDevice)> {
    grants
        .iter()
        .flat_map(|grant| grant.devices.iter().map(move |device| (&grant.resource, device)))
}

/// Replaces each unchanged device by the one in the list. Otherwise ten thousand devices would be
/// in memory twice from the second scan on.
fn keep_known(found: &mut [Arc<Device>], inventory: &Inventory) {
    let listed = inventory
        .resources
        .values()
        .flat_map(|offering| offering.devices.values().map(|offered| &offered.device));
    let known: BTreeMap<&DeviceId, &Arc<Device>> =
        listed.map(|device| (&device.id, device)).collect();
    for device in found {
        if let Some(known) = known.get(&device.id).filter(|known| ***known == *device) {
            *device = Arc::clone(known);
        }
    }
}

/// The evidence of a scan that began then. It includes nodes that no resource names any longer but
/// that are held or still in the list.
pub(crate) fn evidence<'a>(
    host_root: &HostRoot,
    began: Moment,
    found: &mut hardware::Discovery,
    held: impl Iterator<Item = (&'a ResourceName, &'a GrantedDevice)>,
    listed: impl Iterator<Item = (&'a ResourceName, &'a Device)>,
) -> Evidence {
    let root = host_root.recording();
    let mut devices: BTreeMap<DeviceId, Arc<Device>> =
        found.devices.iter().map(|device| (device.id.clone(), Arc::clone(device))).collect();
    // A listed node that was found under a new id is not read again under the old one.
    let keys: BTreeSet<&str> = found.devices.iter().map(|device| device.key.as_str()).collect();
    let held = held.map(|(resource, held)| {
        let node = held.objects.iter().find_map(Object::as_node);
        (
            resource,
            held.id.shared().unwrap_or_else(|| held.id.clone()),
            &held.key,
            node,
            &held.numa_nodes,
        )
    });
    let listed = listed.filter(|(_, device)| !keys.contains(device.key.as_str())).map(
        |(resource, device)| (resource, device.id.clone(), &device.key, None, &device.numa_nodes),
    );
    for (resource, id, key, node, numa_nodes) in held.chain(listed) {
        if devices.contains_key(&id) {
            continue;
        }
        let known = known_node(&id, key, node, numa_nodes, &root);
        if let Some(failure) = root.take_failures().first() {
            found.unread.resources.entry(resource.clone()).or_insert_with(|| failure.to_string());
        } else if let Some(device) = known {
            devices.insert(device.id.clone(), Arc::new(device));
        }
    }
    let ids = |devices: &Vec<Arc<Device>>| devices.iter().map(|device| device.id.clone()).collect();
    let selected = found
        .selection
        .resources
        .iter()
        .map(|(name, devices)| (name.clone(), ids(devices)))
        .collect();
    Evidence {
        began,
        devices,
        selected,
        missing_nodes: found.missing_nodes.clone(),
        unfulfilled: found.unfulfilled.clone(),
        unread: found.unread.clone(),
    }
}

/// The `/dev` node of an id that resources may no longer name: the node that its holder has, else
/// the node that its key leads to now.
fn known_node(
    id: &DeviceId,
    key: &str,
    node: Option<&str>,
    numa_nodes: &[u32],
    root: &HostRoot,
) -> Option<Device> {
    // Other devices have a key of another kind. In a rebuilt ledger the key is unknown.
    let path = key.strip_prefix("dev:").or(node.filter(|_| key.is_empty()))?;
    let of = |path: &str| hardware::known_node(root, id.clone(), key, path, numa_nodes);
    node.and_then(of).or_else(|| of(path))
}

impl Actor for DiscoveryActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        request_scan(&context.address());
        schedule_poll(context);
    }
}

/// Schedules the poll at a common tick, so that all pollers wake the machine once.
fn schedule_poll(context: &mut Context<DiscoveryActor>) {
    context.run_later(host::until_tick(POLL), |_, context| {
        request_scan(&context.address());
        schedule_poll(context);
    });
}

/// Requests a scan. With a full mailbox a scan is pending anyway.
fn request_scan(address: &actix::Addr<DiscoveryActor>) {
    drop(address.try_send(Rescan { asked_at: host::now().boot }));
}

impl Handler<Rescan> for DiscoveryActor {
    /// One scan at a time: an older result must not overtake a newer one.
    type Result = AtomicResponse<Self, ()>;

    fn handle(&mut self, Rescan { asked_at }: Rescan, context: &mut Self::Context) -> Self::Result {
        // Events come in bursts. A scan that began after this event has seen its change.
        if self.scanned_at.is_some_and(|scanned_at| scanned_at > asked_at) {
            return AtomicResponse::new(Box::pin(std::future::ready(()).into_actor(self)));
        }
        self.scanned_at = Some(host::now().boot);
        let DiscoveryConfig { host_root, plan, grants, nvml, question, .. } = &self.config;
        let held: BTreeSet<ResourceName> =
            grants.borrow().iter().map(|grant| grant.resource.clone()).collect();
        let nvml = nvml.borrow().clone();
        let profiles = (&*nvml, nvml.lacks_profile(&question.borrow()));
        let (plan, warnings) = planned(host_root, plan, profiles, &held);
        let (evidence, named) = self.scan(&plan, warnings);
        if let Some(wait) = self.note_unread(&evidence.unread) {
            context.run_later(wait, |_, context| request_scan(&context.address()));
            if self.incomplete <= FIRST_TRIES && self.config.inventory.borrow().resources.is_empty()
            {
                return AtomicResponse::new(Box::pin(std::future::ready(()).into_actor(self)));
            }
        }
        let config = self.config.clone();
        AtomicResponse::new(Box::pin(publish(evidence, plan, named, config).into_actor(self)))
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
    found.send(Found(Arc::clone(&evidence)));
    if let Err(error) = discovered.call(Discovered { evidence, plan }, PUBLISH_DEADLINE).await {
        tracing::warn!(%error, "health evaluation of a scan failed; the next scan retries");
    }
}

impl Handler<Crash> for DiscoveryActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message requests it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}

/// The plan, with a resource for each existing node, or MIG profile, of the resources with patterns
/// in their names. Where `/dev` cannot be read, no resource comes or goes. Also returns warnings,
/// or the read failure.
fn planned(
    root: &HostRoot,
    current: &watch::Sender<Arc<Plan>>,
    (nvml, lacks_profile): (&NvmlSnapshot, bool),
    held: &BTreeSet<ResourceName>,
) -> (Arc<Plan>, Result<Vec<String>, ReadFailure>) {
    let plan = current.borrow().clone();
    if plan.patterns.is_empty() {
        return (plan, Ok(Vec::new()));
    }
    let hardware::ExpandedSpecs { specs, warnings } =
        match hardware::expand_patterns(root, &plan.patterns, nvml) {
            Ok(each) => each,
            Err(failure) => return (plan, Err(failure)),
        };
    // A resource that only the ledger knows stays until its last id has left the list. That of a
    // MIG profile stays while it is held, and while NVML has not returned all profiles.
    let stays = |spec: &ResourceSpec| {
        spec.is_orphan()
            || (lacks_profile || held.contains(&spec.name))
                && hardware::spec_named(&plan.patterns, &spec.name).is_some()
    };
    let is_gone = |spec: &&Arc<ResourceSpec>| !specs.iter().any(|known| known.name == spec.name);
    let kept: Vec<_> =
        plan.specs.iter().filter(is_gone).filter(|spec| stays(spec)).cloned().collect();
    // An equal resource is shared: none is in memory twice.
    let same = |spec: Arc<ResourceSpec>| {
        plan.specs.iter().find(|known| **known == spec).map_or(spec, Arc::clone)
    };
    let specs: Arc<[_]> = specs.into_iter().chain(kept).map(same).collect();
    if specs != plan.specs {
        current.send_if_modified(|current| {
            // A newer configuration has its own nodes. The next scan, which it requests, sees them.
            let is_current = current.number == plan.number;
            if is_current {
                *current = Arc::new(Plan { number: plan.number + 1, specs, ..Plan::clone(&plan) });
            }
            is_current
        });
    }
    (current.borrow().clone(), Ok(warnings))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        Attributes, CharPath, DeviceClass, DeviceNode, Health, MigInstance, NodePattern, NvmlGpu,
        Offered, Offering,
    };
    use crate::host::faults::with_faults;

    fn device(id: &str, node: &str) -> Arc<Device> {
        let nodes = vec![DeviceNode::at(node)];
        let (key, attributes) = (format!("dev:{node}"), Attributes::default());
        Arc::new(Device {
            id: DeviceId::new(id),
            key,
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes,
            attributes,
        })
    }

    #[test]
    fn a_device_that_has_not_changed_is_in_memory_once() {
        let name: ResourceName = "example.com/x".parse().unwrap();
        let offered =
            |(id, device)| (DeviceId::new(id), Offered { device, health: Health::Healthy });
        let (same, moved, shared) =
            (device("same", "/dev/a"), device("moved", "/dev/b"), device("shared", "/dev/c"));
        let listed = [
            ("same", same.clone()),
            ("moved", moved.clone()),
            ("shared::0", shared.clone()),
            ("shared::1", shared.clone()),
        ];
        let spec = Arc::new(ResourceSpec::new(name.clone(), DeviceClass::Char));
        let offering = Offering { spec, devices: listed.into_iter().map(offered).collect() };
        let inventory = Inventory { resources: [(name, Arc::new(offering))].into() };

        let mut found = [
            device("same", "/dev/a"),
            device("moved", "/dev/z"),
            device("shared", "/dev/c"),
            device("new", "/dev/n"),
        ];
        let before = found.clone();
        keep_known(&mut found, &inventory);
        assert_eq!(found, before, "the known devices do not change the result");
        let kept = [&same, &moved, &shared]
            .map(|known| found.iter().any(|device| Arc::ptr_eq(device, known)));
        assert_eq!(kept, [true, false, true]);
    }

    #[test]
    fn a_dev_that_cannot_be_read_leaves_the_resources_of_its_nodes_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().join("dev");
        let host = NodePattern::Regex("^i2c-[0-9]*$".into());
        let pattern = ResourceSpec {
            paths: vec![CharPath { host, container: None, permissions: "rw".into() }],
            ..ResourceSpec::new(
                ResourceName::for_each_node("board/{node}").unwrap(),
                DeviceClass::Char,
            )
        };
        let plan = Plan { number: 1, patterns: Arc::new([Arc::new(pattern)]), ..Plan::default() };
        let (root, plan) = (HostRoot::new(dir.path()), watch::Sender::new(Arc::new(plan)));
        let (nvml, held) = (NvmlSnapshot::empty(), BTreeSet::new());
        let rescan = || {
            let (planned, warnings) = planned(&root, &plan, (&nvml, false), &held);
            assert_eq!(planned, *plan.borrow());
            (
                planned.number,
                planned
                    .specs
                    .iter()
                    .map(|spec| spec.name.to_string())
                    .collect::<Vec<_>>()
                    .join(" "),
                warnings.ok(),
            )
        };
        std::fs::create_dir(&dev).unwrap();
        std::fs::write(dev.join("i2c-1"), "").unwrap();
        assert_eq!(rescan(), (2, "board/i2c-1".into(), Some(vec![])));
        std::fs::write(dev.join("i2c-13"), "").unwrap();
        assert_eq!(rescan(), (3, "board/i2c-1 board/i2c-13".into(), Some(vec![])));
        assert_eq!(rescan().0, 3, "nothing has changed");
        let (_, calls) = with_faults(|_| None, rescan);
        assert!(calls >= 3, "the directory and its nodes");
        for failing in 0..calls {
            let seen = with_faults(move |call| (call == failing).then_some(24), rescan).0;
            assert_eq!(seen, (3, "board/i2c-1 board/i2c-13".into(), None));
        }
        std::fs::remove_file(dev.join("i2c-1")).unwrap();
        assert_eq!(rescan(), (4, "board/i2c-13".into(), Some(vec![])));
    }

    #[test]
    fn the_resource_of_a_profile_stays_while_it_is_held_or_profiles_are_unknown() {
        let name = ResourceName::for_each_profile("a.b/mig-{mig_profile}").unwrap();
        let pattern = ResourceSpec::new(name, DeviceClass::Gpu);
        let plan = Plan { number: 1, patterns: Arc::new([Arc::new(pattern)]), ..Plan::default() };
        let dir = tempfile::tempdir().unwrap();
        let (root, plan) = (HostRoot::new(dir.path()), watch::Sender::new(Arc::new(plan)));
        let snapshot = |profiles: &[&str]| {
            let instance = |(gi, profile): (u32, &&str)| {
                let (uuid, profile) = (format!("MIG-{gi}"), Some((*profile).to_owned()));
                ((gi, 0), MigInstance { uuid, profile })
            };
            let instances = (1..).zip(profiles).map(instance).collect();
            let gpu = NvmlGpu { instances, ..NvmlGpu::default() };
            NvmlSnapshot { gpus: [("0000:01:00.0".parse().unwrap(), gpu)].into() }
        };
        let rescan = |profiles: &[&str], lacks_profile: bool, held: &[&str]| {
            let held = held.iter().map(|name| name.parse().unwrap()).collect();
            let (planned, _) = planned(&root, &plan, (&snapshot(profiles), lacks_profile), &held);
            let names = planned.specs.iter().map(|spec| spec.name.to_string());
            names.collect::<Vec<_>>().join(" ")
        };
        let (small, all) = ("a.b/mig-1g.10gb", "a.b/mig-1g.10gb a.b/mig-2g.20gb");
        assert_eq!(rescan(&[], true, &[]), "");
        assert_eq!(rescan(&["2g.20gb", "1g.10gb", "1c.2g.20gb", "1g.10gb"], false, &[]), all);
        assert_eq!(rescan(&["1g.10gb"], false, &["a.b/mig-2g.20gb"]), all);
        assert_eq!(rescan(&["1g.10gb"], true, &[]), all);
        assert_eq!(rescan(&["1g.10gb"], false, &[]), small);
        assert_eq!(rescan(&["1g.10gb+me"], false, &[small]), "a.b/mig-1g.10gb.me a.b/mig-1g.10gb");
    }
}
