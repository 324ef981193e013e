//! An instance of the daemon: its parts, and the calls of the kubelet.

use super::cluster;
use super::ledger::{LedgerShell, granted};
use super::machine::{Machine, devices};
use super::slices;
use super::world::{Step, World, name_of};
use crate::contract::cdi::FILE_PREFIX;
use crate::domain::{
    AllocId, AllocatedClaim, Api, Attributes, ClaimRef, ContainerEdits, Device, DeviceId,
    EditDevice, GrantedDevice, Health, Inventory, Offered, Offering, PreparedDevice, ResourceSpec,
    Safeguard, Sharing,
};
use crate::host::{HostRoot, SpecFolder};
use crate::lab::sim::executor::{Handle, Task};
use crate::serving::claims::{ClaimDevices, ClaimFiles, ClaimPreparer, ClaimSource, Clock};
use futures_util::future::{BoxFuture, join_all};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;

/// The daemon.
#[derive(Debug)]
pub(super) struct Daemon {
    pub(super) ledger: Arc<LedgerShell>,
    preparer: Arc<ClaimPreparer>,
}

/// The answers for the claims of one call.
pub(super) type Answers<T> = Vec<(ClaimRef, Result<T, String>)>;

struct VirtualTime(Handle);

impl Clock for VirtualTime {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn sleep_until(&self, deadline: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.0.sleep_until(deadline))
    }
}

/// The API server, and the answers so far for a daemon that reads no claim twice.
struct Source(Arc<World>, Mutex<BTreeMap<String, AllocatedClaim>>);

#[tonic::async_trait]
impl ClaimSource for Source {
    async fn get(&self, claim: &ClaimRef) -> Result<Option<AllocatedClaim>, String> {
        let known = self.1.lock().unwrap().get(&claim.uid).cloned();
        if known.is_some() && !Safeguard::ClaimRead.is_on() {
            return Ok(known);
        }
        let answer = cluster::ask(&self.0, &claim.name).await;
        self.0.step(Step::Read).await;
        if let Ok(Some(found)) = &answer {
            self.1.lock().unwrap().insert(claim.uid.clone(), found.clone());
        }
        answer
    }
}

struct Devices(Arc<World>);

impl ClaimDevices for Devices {
    fn inventory(&self) -> Arc<Inventory> {
        Arc::new(inventory())
    }

    /// What containers get depends on the driver's version, as the names of nodes and files do.
    fn claimed(
        &self,
        _: &Offering,
        id: &DeviceId,
        _: &Offered,
        _: &[&Device],
    ) -> Result<(ContainerEdits, GrantedDevice), String> {
        let machine = self.0.machine();
        let cdi_devices = vec![format!("vendor.example.com/gpu=driver-{}", machine.driver)];
        Ok((ContainerEdits { cdi_devices, ..edits(id, &machine) }, granted(id)))
    }
}

/// The content of a device's CDI device.
pub(super) fn edits(id: &DeviceId, machine: &Machine) -> ContainerEdits {
    let node = EditDevice {
        host: machine.node(id),
        container: format!("/dev/{id}"),
        permissions: "rw".into(),
    };
    ContainerEdits {
        devices: vec![node],
        envs: BTreeMap::from([("DRIVER".to_owned(), machine.driver.to_string())]),
        ..ContainerEdits::default()
    }
}

/// The devices of the node.
pub(super) fn inventory() -> Inventory {
    let mut inventory = Inventory::default();
    for (id, pool) in devices() {
        let name = pool.resource.parse().unwrap();
        let offering = inventory.resources.entry(name).or_insert_with_key(|name| {
            let spec = ResourceSpec::new(name.clone(), pool.class);
            let mut spec = ResourceSpec { api: Api::Dra, ..spec };
            if pool.is_divided {
                (spec.sharing, spec.capacity) = (Sharing::Replicas(pool.count), true);
            }
            let spec = Arc::new(spec);
            Arc::new(Offering { spec, devices: BTreeMap::new() })
        });
        let device = Device {
            id: id.clone(),
            key: format!("pci:{id}"),
            class: pool.class,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        let offered = Offered { device: Arc::new(device), health: Health::Healthy };
        Arc::make_mut(offering).devices.insert(id, offered);
    }
    inventory
}

/// Ends the work for a caller that has given up, or leaves it to run on: the daemon learns of a
/// cancelled call a little later, or too late.
struct Cancel {
    world: Arc<World>,
    task: Task,
}

impl Drop for Cancel {
    fn drop(&mut self) {
        if !self.task.is_finished() && self.world.random(|random| random.chance(0.6)) {
            self.task.abort();
        }
    }
}

impl Daemon {
    /// Starts it on the state of the machine.
    pub(super) fn start(world: &Arc<World>) -> Arc<Self> {
        let folder = Arc::new(SpecFolder::new(&world.machine().cdi(), FILE_PREFIX));
        let host_root = HostRoot::new(world.machine().cdi());
        let files = ClaimFiles::new(folder, host_root.clone());
        let ledger = LedgerShell::start(world, files.clone());
        let written = if Safeguard::ClaimFile.is_on() {
            files
        } else {
            // It reaches its place with the next snapshot only.
            let draft = world.machine().cdi().with_extension("draft");
            ClaimFiles::new(Arc::new(SpecFolder::new(&draft, FILE_PREFIX)), host_root)
        };
        let preparer = ClaimPreparer::new(
            Arc::new(Source(Arc::clone(world), Mutex::default())),
            Arc::clone(&ledger) as Arc<_>,
            Arc::new(Devices(Arc::clone(world))),
            Arc::new(name_of),
            written,
        );
        let preparer = preparer.with_clock(Arc::new(VirtualTime(world.handle.clone())));
        ledger.spawn(slices::publish(Arc::clone(world), ledger.snapshot.subscribe()));
        Arc::new(Daemon { ledger, preparer: Arc::new(preparer) })
    }

    /// `kill -9`: every task ends at its present wait.
    pub(super) fn kill(&self) {
        let tasks = self.ledger.tasks.lock().unwrap().take();
        tasks.iter().for_each(Task::abort);
    }

    /// Runs a call of the kubelet in this process.
    async fn call<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        answered: Step,
    ) -> Result<T, String> {
        let world = Arc::clone(&self.ledger.world);
        let (reply, answer) = oneshot::channel();
        let task = self.ledger.spawn(async move {
            let result = work.await;
            // The caller may have given up.
            drop(reply.send(result));
            world.step(answered).await;
        });
        let _cancel = Cancel { world: Arc::clone(&self.ledger.world), task };
        answer.await.map_err(|_| "the connection was closed".to_owned())
    }

    /// `NodePrepareResources`.
    pub(super) async fn prepare(
        &self,
        claims: Vec<ClaimRef>,
    ) -> Result<Answers<Vec<PreparedDevice>>, String> {
        let (world, preparer) = (Arc::clone(&self.ledger.world), Arc::clone(&self.preparer));
        let work = async move {
            world.step(Step::PrepareAsked).await;
            let one = async |claim: ClaimRef| {
                let prepared = preparer.prepare(&claim).await;
                (claim, prepared.map_err(|error| error.to_string()))
            };
            let answers = join_all(claims.into_iter().map(one)).await;
            world.step(Step::Filed).await;
            answers
        };
        self.call(work, Step::PrepareAnswered).await
    }

    /// `NodeUnprepareResources`.
    pub(super) async fn unprepare(&self, claims: Vec<ClaimRef>) -> Result<Answers<()>, String> {
        let (world, preparer) = (Arc::clone(&self.ledger.world), Arc::clone(&self.preparer));
        let work = async move {
            world.step(Step::UnprepareAsked).await;
            let one = async |claim: ClaimRef| {
                let released = preparer.unprepare(&claim).await;
                (claim, released)
            };
            let answers = join_all(claims.into_iter().map(one)).await;
            world.step(Step::Removed).await;
            answers
        };
        self.call(work, Step::UnprepareAnswered).await
    }

    /// Allocate: devices by number.
    pub(super) async fn allocate(&self, ids: BTreeSet<DeviceId>) -> Result<AllocId, String> {
        let ledger = Arc::clone(&self.ledger);
        let work = async move { ledger.allocate(&ids).await };
        self.call(work, Step::PrepareAnswered).await?
    }
}
