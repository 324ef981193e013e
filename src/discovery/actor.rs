//! The shell: scans on a hint or on the poll, has new names remembered, and hands the evidence on.

use crate::domain::{
    Device, DeviceClass, DeviceId, DeviceNode, Evidence, Gather, Grant, GrantedDevice, Inventory, Moment, NvmlQuestion, NvmlSnapshot, Plan,
    ResourceSpec,
};
use crate::hardware;
use crate::host::{self, HostRoot, Listings};
use crate::messages::{Crash, Discovered, Mailbox, Remember, Rescan};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, AtomicResponse, Context, Handler, WrapFuture};
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
    /// The resources that select devices; published anew when nodes come or go that are resources of their own.
    pub plan: watch::Sender<Arc<Plan>>,
    /// Who holds what: a held node is looked at even when no resource names it any more.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// What is in the list: so is such a node.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The ids that devices have been given, by physical key.
    pub names: watch::Receiver<Arc<BTreeMap<String, DeviceId>>>,
    /// What NVML has told so far: nothing at the first scan, which does not wait for it.
    pub nvml: watch::Receiver<Arc<NvmlSnapshot>>,
    /// Where it is published what NVML is to be asked for.
    pub question: Arc<watch::Sender<NvmlQuestion>>,
    /// The ledger.
    pub remember: Mailbox<Remember>,
    /// Health.
    pub discovered: Mailbox<Discovered>,
}

/// The actor.
#[derive(Debug)]
pub struct DiscoveryActor {
    config: DiscoveryConfig,
    /// When the last scan began.
    looked_at: Option<Duration>,
    /// Warnings that have been logged: the same one of every poll is no news.
    said: BTreeSet<String>,
    _life: Box<dyn Any + Send>,
}

impl DiscoveryActor {
    /// Builds one life of the actor.
    pub fn new(config: DiscoveryConfig, life: impl Any + Send) -> Self {
        DiscoveryActor { config, looked_at: None, said: BTreeSet::new(), _life: Box::new(life) }
    }

    /// Looks at the host. Returns the evidence, and the names that are new.
    fn look(&mut self, plan: &Plan, of_plan: Vec<String>) -> (Evidence, Vec<(String, DeviceId)>) {
        let (began, clock) = (host::now(), Instant::now());
        let DiscoveryConfig { host_root, names, .. } = &self.config;
        let remembered = names.borrow().clone();
        let nvml = self.config.nvml.borrow().clone();
        let mut found = hardware::discover_told(host_root, hardware::scan(host_root), &plan.specs, &remembered, &nvml);
        let question = hardware::nvml_question(host_root, &found.selection);
        self.config.question.send_if_modified(|asked| {
            *asked != question && {
                *asked = question;
                true
            }
        });
        let grants = self.config.grants.borrow().clone();
        let inventory = self.config.inventory.borrow().clone();
        keep_known(&mut found.devices, &inventory);
        let held = grants.iter().flat_map(|grant| &grant.devices);
        let listed = inventory.resources.values().flat_map(|offering| offering.devices.values());
        let (evidence, warnings, named) = evidence(host_root, began, found, held, listed.map(|listed| listed.device.as_ref()));
        metrics::scanned(clock.elapsed());
        let warnings: BTreeSet<String> = of_plan.into_iter().chain(warnings).gather();
        for warning in warnings.difference(&self.said) {
            tracing::warn!("{warning}");
        }
        self.said = warnings;
        (evidence, named)
    }
}

/// What is as it was is the device that is in the list already: the list keeps its own, and ten thousand devices would else be in memory
/// twice from the second scan on.
fn keep_known(found: &mut [Arc<Device>], inventory: &Inventory) {
    let listed = inventory.resources.values().flat_map(|offering| offering.devices.values().map(|offered| &offered.device));
    let known: BTreeMap<&DeviceId, &Arc<Device>> = listed.map(|device| (&device.id, device)).gather();
    for device in found {
        if let Some(known) = known.get(&device.id).filter(|known| ***known == *device) {
            *device = Arc::clone(known);
        }
    }
}

/// What a scan that began then says, of nodes too that no resource names any more and that are held, or still in the list; the
/// warnings, and the names that are new.
pub(crate) fn evidence<'a>(
    host_root: &HostRoot,
    began: Moment,
    found: hardware::Discovery,
    held: impl Iterator<Item = &'a GrantedDevice>,
    listed: impl Iterator<Item = &'a Device>,
) -> (Evidence, Vec<String>, Vec<(String, DeviceId)>) {
    let mut devices: BTreeMap<DeviceId, Arc<Device>> = found.devices.into_iter().map(|device| (device.id.clone(), device)).gather();
    // That a node has got another name is no reason to look at it by the former one.
    let keys: BTreeSet<&str> = devices.values().map(|device| device.key.as_str()).gather();
    let held = held.map(|held| (held.id.shared().unwrap_or_else(|| held.id.clone()), &held.key, &held.numa_nodes));
    let listed =
        listed.filter(|device| !keys.contains(device.key.as_str())).map(|device| (device.id.clone(), &device.key, &device.numa_nodes));
    let unfound = held.chain(listed).filter(|(id, ..)| !devices.contains_key(id));
    let known: Vec<Device> = unfound.filter_map(|(id, key, numa_nodes)| known_node(id, key, numa_nodes, host_root)).collect();
    for device in known {
        devices.entry(device.id.clone()).or_insert_with(|| Arc::new(device));
    }
    // What is nothing but a node was found there a moment ago.
    let others = devices.values().filter(|device| device.class != DeviceClass::Char);
    let required = others.flat_map(|device| &device.nodes).filter(|node| node.required);
    let nodes: BTreeSet<&String> = required.map(|node| &node.host).gather();
    let mut listings = Listings::default();
    let missing_nodes = nodes.into_iter().filter(|node| host_root.node_among(&mut listings, node).is_none()).cloned().gather();
    let ids = |devices: Vec<Arc<Device>>| devices.iter().map(|device| device.id.clone()).gather();
    let selected = found.selection.resources.into_iter().map(|(name, devices)| (name, ids(devices))).gather();
    (Evidence { began, devices, selected, missing_nodes }, found.selection.warnings, found.named)
}

/// The `/dev` node of an id, or the folder of nodes, found by the path in its key: no resource may name it any more.
fn known_node(id: DeviceId, key: &str, numa_nodes: &[u32], host_root: &HostRoot) -> Option<Device> {
    let path = key.strip_prefix("dev:")?;
    let nodes = match host_root.canonical_node(path) {
        Some(node) => vec![node],
        None => host_root.folder_nodes(path).ok().flatten()?.nodes.into_iter().map(|node| node.path).collect(),
    };
    if nodes.is_empty() {
        return None;
    }
    Some(Device {
        id,
        key: key.to_owned(),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: numa_nodes.to_vec(),
        nodes: nodes.into_iter().map(DeviceNode::at).collect(),
        attributes: BTreeMap::new(),
    })
}

impl Actor for DiscoveryActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        ask(&context.address());
        schedule_poll(context);
    }
}

/// The poll, at the same moments as everybody's.
fn schedule_poll(context: &mut Context<DiscoveryActor>) {
    context.run_later(host::until_tick(POLL), |_, context| {
        ask(&context.address());
        schedule_poll(context);
    });
}

/// Asks for a scan. A full mailbox means that one is due anyway.
fn ask(address: &actix::Addr<DiscoveryActor>) {
    drop(address.try_send(Rescan { asked_at: host::now().boot }));
}

impl Handler<Rescan> for DiscoveryActor {
    /// One scan after the other: what an older one found must not overtake what a newer one found.
    type Result = AtomicResponse<Self, ()>;

    fn handle(&mut self, Rescan { asked_at }: Rescan, _: &mut Self::Context) -> Self::Result {
        // Hints come in swarms; the scan that began after this one was given has seen what it hints at.
        if self.looked_at.is_some_and(|looked_at| looked_at > asked_at) {
            return AtomicResponse::new(Box::pin(std::future::ready(()).into_actor(self)));
        }
        self.looked_at = Some(host::now().boot);
        let (plan, warnings) = planned(&self.config.host_root, &self.config.plan);
        let (evidence, named) = self.look(&plan, warnings);
        let (remember, discovered) = (self.config.remember.clone(), self.config.discovered.clone());
        AtomicResponse::new(Box::pin(hand_on(evidence, plan, named, remember, discovered).into_actor(self)))
    }
}

/// Makes new names durable, then tells health. A device whose name cannot be recorded is not offered, and the next scan
/// tries again; the others are not held up by it.
async fn hand_on(
    mut evidence: Evidence,
    plan: Arc<Plan>,
    named: Vec<(String, DeviceId)>,
    remember: Mailbox<Remember>,
    discovered: Mailbox<Discovered>,
) {
    if !named.is_empty() {
        let recorded = match remember.call(Remember(named.clone()), HAND_ON_DEADLINE).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = recorded {
            tracing::error!(%error, devices = named.len(), "the ids of new devices cannot be recorded; these devices are not offered");
            for (_, id) in &named {
                evidence.devices.remove(id);
                evidence.selected.values_mut().for_each(|selected| {
                    selected.remove(id);
                });
            }
        }
    }
    if let Err(error) = discovered.call(Discovered { evidence: Arc::new(evidence), plan }, HAND_ON_DEADLINE).await {
        tracing::warn!(%error, "what a scan found was not judged");
    }
}

impl Handler<Crash> for DiscoveryActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}

/// The plan, with a resource for each node that is there now of those that have a name for each. Where nobody can say what is there,
/// nothing has come and nothing has gone. Returns warnings beside it.
fn planned(root: &HostRoot, current: &watch::Sender<Arc<Plan>>) -> (Arc<Plan>, Vec<String>) {
    let plan = current.borrow().clone();
    if plan.patterns.is_empty() {
        return (plan, Vec::new());
    }
    let hardware::Each { specs, warnings } = match hardware::each(root, &plan.patterns) {
        Ok(each) => each,
        Err(error) => return (plan, vec![format!("/dev cannot be looked at, and resources for each node stay as they are: {error}")]),
    };
    // What only the ledger knows stays until its last id has left.
    let orphans = plan.specs.iter().filter(|spec| spec.is_orphan() && !specs.iter().any(|known| known.name == spec.name));
    let orphans: Vec<_> = orphans.cloned().collect();
    // Equal resources are the same ones: nothing is kept twice.
    let same = |spec: Arc<ResourceSpec>| plan.specs.iter().find(|known| **known == spec).map_or(spec, Arc::clone);
    let specs: Arc<[_]> = specs.into_iter().chain(orphans).map(same).collect();
    if specs != plan.specs {
        current.send_if_modified(|current| {
            // Another configuration since then has nodes of its own; the next scan, which it asks for, sees them.
            let is_current = current.number == plan.number;
            if is_current {
                *current = Arc::new(Plan { number: plan.number + 1, specs, ..Plan::clone(&plan) });
            }
            is_current
        });
    }
    (current.borrow().clone(), warnings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{CharPath, Health, NodePattern, Offered, Offering, ResourceName, ResourceSpec};

    fn device(id: &str, node: &str) -> Arc<Device> {
        let nodes = vec![DeviceNode::at(node)];
        let (key, attributes) = (format!("dev:{node}"), BTreeMap::new());
        Arc::new(Device { id: DeviceId::new(id), key, class: DeviceClass::Char, pci: None, numa_nodes: Vec::new(), nodes, attributes })
    }

    #[test]
    fn a_device_that_has_not_changed_is_in_memory_once() {
        let name: ResourceName = "example.com/x".parse().unwrap();
        let offered = |(id, device)| (DeviceId::new(id), Offered { device, health: Health::Healthy });
        let (same, moved, shared) = (device("same", "/dev/a"), device("moved", "/dev/b"), device("shared", "/dev/c"));
        let listed = [("same", same.clone()), ("moved", moved.clone()), ("shared::0", shared.clone()), ("shared::1", shared.clone())];
        let spec = Arc::new(ResourceSpec::new(name.clone(), DeviceClass::Char));
        let offering = Offering { spec, devices: listed.into_iter().map(offered).collect() };
        let inventory = Inventory { resources: [(name, Arc::new(offering))].into() };

        let mut found = [device("same", "/dev/a"), device("moved", "/dev/z"), device("shared", "/dev/c"), device("new", "/dev/n")];
        let before = found.clone();
        keep_known(&mut found, &inventory);
        assert_eq!(found, before, "what is found is what is found");
        let kept = [&same, &moved, &shared].map(|known| found.iter().any(|device| Arc::ptr_eq(device, known)));
        assert_eq!(kept, [true, false, true]);
    }

    #[test]
    fn a_node_that_a_device_needs_and_that_is_not_there_is_told_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("dev")).unwrap();
        std::fs::write(dir.path().join("dev/there"), "").unwrap();
        let gpu = |id: &str, nodes: Vec<DeviceNode>| {
            let mut gpu = (*device(id, "/dev/none")).clone();
            (gpu.class, gpu.nodes) = (DeviceClass::Gpu, nodes);
            Arc::new(gpu)
        };
        let devices = vec![
            gpu("whole", vec![DeviceNode::at("/dev/there"), DeviceNode::at("/dev/optional").optional()]),
            gpu("broken", vec![DeviceNode::at("/dev/there"), DeviceNode::at("/dev/gone")]),
            device("node", "/dev/there"),
        ];
        let found = hardware::Discovery { devices, ..hardware::Discovery::default() };
        let (told, ..) = evidence(&HostRoot::new(dir.path()), host::now(), found, std::iter::empty(), std::iter::empty());
        assert_eq!(told.missing_nodes, ["/dev/gone".to_owned()].into());
        assert_eq!(told.devices.len(), 3);
    }

    #[test]
    fn a_dev_that_cannot_be_read_leaves_the_resources_of_its_nodes_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().join("dev");
        let host = NodePattern::Regex("^i2c-[0-9]*$".into());
        let pattern = ResourceSpec {
            paths: vec![CharPath { host, container: None, permissions: "rw".into() }],
            ..ResourceSpec::new(ResourceName::for_each_node("board/{node}").unwrap(), DeviceClass::Char)
        };
        let plan = Plan { number: 1, patterns: Arc::new([Arc::new(pattern)]), ..Plan::default() };
        let (root, plan) = (HostRoot::new(dir.path()), watch::Sender::new(Arc::new(plan)));
        let look = || {
            let (planned, warnings) = planned(&root, &plan);
            assert_eq!(planned, *plan.borrow());
            (planned.number, planned.specs.iter().map(|spec| spec.name.to_string()).collect::<Vec<_>>().join(" "), warnings)
        };
        std::fs::create_dir(&dev).unwrap();
        std::fs::write(dev.join("i2c-1"), "").unwrap();
        assert_eq!(look(), (2, "board/i2c-1".into(), vec![]));
        std::fs::write(dev.join("i2c-13"), "").unwrap();
        assert_eq!(look(), (3, "board/i2c-1 board/i2c-13".into(), vec![]));
        assert_eq!(look().0, 3, "nothing has changed");
        std::fs::rename(&dev, dir.path().join("kept")).unwrap();
        std::fs::write(&dev, "").unwrap();
        let (number, names, warnings) = look();
        assert_eq!((number, &*names), (3, "board/i2c-1 board/i2c-13"));
        assert!(warnings[0].starts_with("/dev cannot be looked at"), "{warnings:?}");
        std::fs::remove_file(&dev).unwrap();
        std::fs::rename(dir.path().join("kept"), &dev).unwrap();
        std::fs::remove_file(dev.join("i2c-1")).unwrap();
        assert_eq!(look(), (4, "board/i2c-13".into(), vec![]));
    }
}
