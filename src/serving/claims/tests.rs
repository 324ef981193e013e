//! Prepare and Unprepare over parts in memory, on virtual time.

use super::*;
use crate::contract::cdi::FILE_PREFIX;
use crate::domain::{
    Allocated, Api, Attributes, ClaimedDevice, ConfigSource, Device, EditDevice, GrantState,
    Health, OpaqueConfig, PciFunction, PreparedDevice, Reason, ResourceSpec, Sharing, Timestamp,
};
use crate::host::{HostRoot, SpecFolder};
use crate::lab::sim::executor::{Executor, Handle};
use futures_util::future::BoxFuture;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Mutex;
use std::task::Poll;
use std::time::Duration;

thread_local! {
    /// The time of the running test.
    static TIME: RefCell<Option<Handle>> = const { RefCell::new(None) };
}

fn time() -> Handle {
    TIME.with_borrow(|time| time.clone().unwrap())
}

fn now() -> Duration {
    time().now()
}

/// Runs a test on virtual time.
fn virtually(test: impl Future<Output = ()> + Send + 'static) {
    let mut executor = Executor::new(1);
    TIME.set(Some(executor.handle()));
    executor.run(Duration::from_secs(3600), test).expect("it does not end");
}

struct VirtualTime(Handle);

impl Clock for VirtualTime {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn sleep_until(&self, deadline: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.0.sleep_until(deadline))
    }
}

const UID: &str = "5d2f6c3e-0c1b-4c8e-9d5a-3f0f5a7c1e42";

fn claim() -> ClaimRef {
    ClaimRef { uid: UID.into(), namespace: "ml".into(), name: "train".into() }
}

fn name_of(id: &DeviceId, class: DeviceClass) -> DraName {
    let device = id.as_str().to_ascii_lowercase().replace("::", "-s");
    DraName { pool: format!("n1/{class}"), device }
}

fn allocated(request: &str, id: &str, class: DeviceClass) -> Allocated {
    let name = name_of(&DeviceId::new(id), class);
    Allocated { request: request.into(), name, share_id: None, admin: false }
}

/// A claim for a GPU, by an alternative of a request, and for two network functions.
fn allocation() -> AllocatedClaim {
    let pod = PodRef { uid: "p".into(), namespace: Some("ml".into()), name: Some("p".into()) };
    AllocatedClaim {
        claim: claim(),
        is_allocated: true,
        devices: vec![
            allocated("nics", "NIC-B", DeviceClass::Nic),
            allocated("nics", "NIC-A", DeviceClass::Nic),
            allocated("gpu/large", "GPU-A", DeviceClass::Gpu),
        ],
        reserved_for: vec![pod],
        configs: Vec::new(),
        is_by_number: false,
        pod_claim: None,
        is_deleted: false,
    }
}

/// The API server.
#[derive(Default)]
struct Source {
    /// The next answers. The last one stays.
    answers: Mutex<VecDeque<Result<Option<AllocatedClaim>, String>>>,
    is_silent: bool,
}

#[tonic::async_trait]
impl ClaimSource for Source {
    async fn get(&self, of: &ClaimRef) -> Result<Option<AllocatedClaim>, String> {
        assert_eq!(of.name, "train");
        time().pass().await;
        if self.is_silent {
            std::future::pending::<()>().await;
        }
        let mut answers = self.answers.lock().unwrap();
        if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() }
    }
}

/// The ledger. Its snapshot is as late as a caller lets it be.
#[derive(Default)]
struct Ledger {
    recorded: Mutex<BTreeMap<String, DecidedClaim>>,
    /// Whether the published snapshot lacks the records.
    is_late: Mutex<bool>,
    /// How often it answers that a device is not free.
    blocked: Mutex<usize>,
    fails: Mutex<Option<String>>,
    /// Whether a container has the GPU, and whether the control plane evicts the claim's pods.
    by_number: Mutex<Option<bool>>,
    evicted: Mutex<Vec<(BTreeSet<DraName>, AllocId)>>,
    /// The device that the container has.
    lost_id: Mutex<Option<DeviceId>>,
    /// Whether the machine has booted since the claim was recorded.
    has_booted: Mutex<bool>,
    records: Mutex<usize>,
    /// The last request to record.
    last: Mutex<Option<DecidedClaim>>,
    /// What other claims and containers hold.
    others: Mutex<Vec<Arc<Grant>>>,
}

#[tonic::async_trait]
impl ClaimLedger for Ledger {
    fn recorded(&self, claim: &ClaimRef) -> Option<RecordedClaim> {
        let recorded = self.recorded.lock().unwrap();
        let recorded = recorded.get(&claim.uid).filter(|_| !*self.is_late.lock().unwrap());
        let is_of_boot = !*self.has_booted.lock().unwrap();
        Some(RecordedClaim { claim: recorded?.clone(), is_of_boot })
    }

    fn grants(&self) -> Arc<Vec<Arc<Grant>>> {
        Arc::new(self.others.lock().unwrap().clone())
    }

    async fn record(&self, decided: DecidedClaim) -> Result<Vec<ClaimHold>, NotRecorded> {
        // The call may be dropped before the commit, and after it.
        time().pass().await;
        *self.records.lock().unwrap() += 1;
        *self.last.lock().unwrap() = Some(decided.clone());
        let result = self.commit(decided);
        time().pass().await;
        result
    }

    async fn release(&self, claim: &ClaimRef) -> Result<(), String> {
        time().pass().await;
        if let Some(why) = self.fails.lock().unwrap().clone() {
            return Err(why);
        }
        self.recorded.lock().unwrap().remove(&claim.uid);
        time().pass().await;
        Ok(())
    }

    fn evict(&self, lost: &BTreeSet<DraName>, container: &AllocId) -> bool {
        self.evicted.lock().unwrap().push((lost.clone(), container.clone()));
        self.by_number.lock().unwrap().unwrap()
    }
}

impl Ledger {
    fn commit(&self, decided: DecidedClaim) -> Result<Vec<ClaimHold>, NotRecorded> {
        if let Some(why) = self.fails.lock().unwrap().clone() {
            return Err(NotRecorded::Failed(why));
        }
        let mut blocked = self.blocked.lock().unwrap();
        if *blocked > 0 {
            *blocked -= 1;
            return Err(NotRecorded::Blocked("pod ml/former runs on GPU-A".into()));
        }
        if self.by_number.lock().unwrap().is_some() {
            let lost = self.lost_id.lock().unwrap().clone();
            return Err(NotRecorded::HeldByNumber(HeldByNumber {
                resource: "x.y/gpu".parse().unwrap(),
                id: lost.unwrap_or_else(|| DeviceId::new("GPU-A")),
                container: AllocId::new("a-1"),
                why: "device `GPU-A` of x.y/gpu is held by pod ml/web".into(),
            }));
        }
        let mut recorded = self.recorded.lock().unwrap();
        let holds = |claim: &DecidedClaim| -> Vec<ClaimHold> {
            claim.holds.iter().map(|each| each.hold.clone()).collect()
        };
        let of = decided.claim.uid.clone();
        let allocation =
            |claim: &DecidedClaim| holds(claim).first().map(|hold| hold.allocation.clone());
        match recorded.get(&of) {
            Some(known) if allocation(known) == allocation(&decided) => {
                if std::mem::take(&mut *self.has_booted.lock().unwrap()) {
                    recorded.insert(of.clone(), decided);
                }
                Ok(holds(&recorded[&of]))
            }
            Some(_) => Err(NotRecorded::Blocked("the former allocation".into())),
            None => Ok(holds(recorded.entry(of).or_insert(decided))),
        }
    }
}

/// The devices.
struct Devices {
    inventory: Mutex<Arc<Inventory>>,
    /// The node of every device, and why a device cannot be used.
    node: Mutex<String>,
    unusable: Mutex<Option<String>>,
    /// Whether containers get metadata.
    has_metadata: Mutex<bool>,
    /// The kind of the object behind `/dev/x/GPU-A`, before the id; empty if that is not there.
    leads_to: Mutex<String>,
}

impl ClaimDevices for Devices {
    fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.inventory.lock().unwrap())
    }

    fn claimed(
        &self,
        _: &Offering,
        id: &DeviceId,
        offered: &Offered,
        together: &[&Device],
    ) -> Result<(ContainerEdits, GrantedDevice), String> {
        if let Some(why) = self.unusable.lock().unwrap().clone() {
            return Err(why);
        }
        let path = format!("{}/{id}", self.node.lock().unwrap());
        let node = EditDevice { host: path.clone(), container: path, permissions: "rw".into() };
        let ids: Vec<&str> = together.iter().map(|device| device.id.as_str()).collect();
        let all = (!ids.is_empty()).then(|| ("ALL".to_owned(), ids.join(",")));
        let envs = all.into_iter().collect();
        let edits = ContainerEdits { devices: vec![node], envs, ..ContainerEdits::default() };
        let granted = GrantedDevice {
            id: id.clone(),
            key: offered.device.key.clone(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: vec![Object::of_text(&format!("pci:{id}"))],
        };
        Ok((edits, granted))
    }

    fn objects_of_node(&self, node: &str) -> Vec<Object> {
        let kind = self.leads_to.lock().unwrap();
        let id = node.rsplit('/').next().filter(|_| !kind.is_empty());
        id.map(|id| Object::of_text(&format!("{kind}{id}"))).into_iter().collect()
    }

    fn metadata_path(&self, file: &str) -> Option<String> {
        self.has_metadata.lock().unwrap().then(|| format!("/cdi/{file}"))
    }

    fn attributes(
        &self,
        offering: &Offering,
        id: &DeviceId,
        _: &Offered,
    ) -> BTreeMap<String, Attribute> {
        let resource = ("resource".to_owned(), Attribute::text(offering.spec.name.as_str()));
        [("id".to_owned(), Attribute::text(id.as_str())), resource].into()
    }
}

fn offering(name: &str, class: DeviceClass, ids: &[&str]) -> (ResourceName, Arc<Offering>) {
    let spec = ResourceSpec::new(format!("x.y/{name}").parse().unwrap(), class);
    let spec = Arc::new(ResourceSpec { api: Api::Dra, ..spec });
    let offered = |id: &&str| {
        let device = Device {
            id: DeviceId::new(*id),
            key: format!("dev:{id}"),
            class,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        (DeviceId::new(*id), Offered { device: Arc::new(device), health: Health::Healthy })
    };
    let devices = ids.iter().map(offered).collect();
    (spec.name.clone(), Arc::new(Offering { spec, devices }))
}

struct World {
    dir: tempfile::TempDir,
    source: Arc<Source>,
    ledger: Arc<Ledger>,
    devices: Arc<Devices>,
    preparer: Arc<ClaimPreparer>,
}

impl World {
    fn new() -> Self {
        World::with(Source::default(), [Ok(Some(allocation()))])
    }

    fn with(
        source: Source,
        answers: impl IntoIterator<Item = Result<Option<AllocatedClaim>, String>>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source =
            Arc::new(Source { answers: Mutex::new(answers.into_iter().collect()), ..source });
        let ledger = Arc::new(Ledger::default());
        let resources = [
            offering("gpu", DeviceClass::Gpu, &["GPU-A", "GPU-B"]),
            offering("nic", DeviceClass::Nic, &["NIC-A", "NIC-B"]),
        ];
        let devices = Arc::new(Devices {
            inventory: Mutex::new(Arc::new(Inventory { resources: resources.into() })),
            node: Mutex::new("/dev".into()),
            unusable: Mutex::default(),
            has_metadata: Mutex::default(),
            leads_to: Mutex::default(),
        });
        let folder = Arc::new(SpecFolder::new(&dir.path().join("cdi"), FILE_PREFIX));
        let preparer = ClaimPreparer::new(
            Arc::clone(&source) as Arc<dyn ClaimSource>,
            Arc::clone(&ledger) as Arc<dyn ClaimLedger>,
            Arc::clone(&devices) as Arc<dyn ClaimDevices>,
            Arc::new(name_of),
            ClaimFiles::new(folder, HostRoot::new(dir.path())),
        );
        let preparer = preparer.with_clock(Arc::new(VirtualTime(time())));
        World { dir, source, ledger, devices, preparer: Arc::new(preparer) }
    }

    fn changed(change: impl FnOnce(&mut AllocatedClaim)) -> Self {
        let mut claim = allocation();
        change(&mut claim);
        World::with(Source::default(), [Ok(Some(claim))])
    }

    async fn prepare(&self) -> Result<Vec<PreparedDevice>, NotPrepared> {
        self.preparer.prepare(&claim()).await
    }

    /// The error of Prepare, and that nothing is recorded or written.
    async fn refusal(&self) -> String {
        let error = self.prepare().await.unwrap_err().to_string();
        assert!(self.ledger.recorded.lock().unwrap().is_empty(), "{error}");
        assert!(self.files().is_empty(), "{error}");
        assert!(!error.contains("  "), "{error}");
        error
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join(format!("cdi/holdfast-claim-{UID}.json"))
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path().join("cdi")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn change_inventory(&self, change: impl FnOnce(&mut Inventory)) {
        let mut inventory = self.devices.inventory.lock().unwrap();
        change(Arc::make_mut(&mut inventory));
    }

    fn set_health(&self, resource: &str, id: &str, reason: Reason) {
        self.change_inventory(|inventory| {
            let offering = inventory.resources.get_mut(&resource.parse().unwrap()).unwrap();
            let devices = &mut Arc::make_mut(offering).devices;
            devices.get_mut(&DeviceId::new(id)).unwrap().health = Health::Unhealthy(reason);
        });
    }
}

/// The names in an answer: request, pool and device.
fn names(answer: &[PreparedDevice]) -> Vec<String> {
    answer.iter().map(|device| format!("{} {}", device.request, device.name)).collect()
}

const ANSWER: [&str; 3] = ["gpu n1/gpu/gpu-a", "nics n1/nic/nic-a", "nics n1/nic/nic-b"];

/// A power cut may leave the first of two grants of one commit.
#[test]
fn a_part_of_a_record_is_no_answer() {
    virtually(async {
        let world = World::new();
        world.prepare().await.unwrap();
        {
            let mut recorded = world.ledger.recorded.lock().unwrap();
            recorded.get_mut(UID).unwrap().holds.truncate(1);
        }
        world.prepare().await.unwrap();
        let asked = world.ledger.last.lock().unwrap().clone().unwrap();
        let devices: Vec<usize> = asked.holds.iter().map(|each| each.hold.devices.len()).collect();
        assert_eq!(devices, [1, 2], "the ledger is asked to record the lost part too");
    });
}

#[test]
fn a_claim_is_recorded_written_and_answered() {
    virtually(async {
        let world = World::new();
        let answer = world.prepare().await.unwrap();
        assert_eq!(names(&answer), ANSWER);
        assert_eq!(answer[0].cdi_devices, [format!("k8s.holdfast.dev/claim={UID}-gpu-a")]);
        let text = std::fs::read_to_string(world.file()).unwrap();
        for device in &answer {
            let name = device.cdi_devices[0].split_once('=').unwrap().1;
            assert!(text.contains(&format!("\"name\": \"{name}\"")), "{text}");
        }
        let recorded = world.ledger.recorded(&claim()).unwrap().claim;
        assert_eq!(recorded.reserved_for, allocation().reserved_for);
        let holds: Vec<(&str, usize)> = recorded
            .holds
            .iter()
            .map(|each| (each.resource.as_str(), each.devices.len()))
            .collect();
        assert_eq!(holds, [("x.y/gpu", 1), ("x.y/nic", 2)]);
        let requests: Vec<&str> = recorded.holds[1]
            .hold
            .devices
            .iter()
            .map(|device| device.allocated.name.device.as_str())
            .collect();
        assert_eq!(requests, ["nic-a", "nic-b"], "sorted");
    });
}

#[test]
fn the_same_allocation_has_the_same_answer_after_any_change() {
    virtually(async {
        let world = World::new();
        let first = world.prepare().await.unwrap();
        let text = std::fs::read(world.file()).unwrap();
        // Other nodes, no device any longer, and a reboot has emptied the folder.
        *world.devices.node.lock().unwrap() = "/dev/other".into();
        world.change_inventory(|inventory| inventory.resources.clear());
        std::fs::remove_file(world.file()).unwrap();
        assert_eq!(world.prepare().await.unwrap(), first);
        assert_eq!(std::fs::read(world.file()).unwrap(), text);
        // The snapshot may lack the record. The record in the ledger is older, and stays.
        let world = World::new();
        let recorded = world.prepare().await.unwrap();
        *world.devices.node.lock().unwrap() = "/dev/other".into();
        *world.ledger.is_late.lock().unwrap() = true;
        assert_eq!(world.prepare().await.unwrap(), recorded);
    });
}

#[test]
fn after_a_reboot_a_claim_keeps_its_devices_and_gets_their_present_nodes() {
    virtually(async {
        let world = World::new();
        let first = world.prepare().await.unwrap();
        let boot = |node: &str| {
            *world.ledger.has_booted.lock().unwrap() = true;
            *world.devices.node.lock().unwrap() = node.into();
        };
        let text = || std::fs::read_to_string(world.file()).unwrap();
        let fail = |reason| {
            world.change_inventory(|inventory| {
                let gpus = inventory.resources.values_mut().next().unwrap();
                let gpus = Arc::make_mut(gpus);
                let spec = ResourceSpec { api: Api::Plugin, ..ResourceSpec::clone(&gpus.spec) };
                gpus.spec = Arc::new(spec);
                gpus.devices.values_mut().for_each(|it| it.health = Health::Unhealthy(reason));
            });
        };
        // It is not checked as a new one is.
        boot("/dev/second");
        fail(Reason::Xid);
        assert_eq!(world.prepare().await.unwrap(), first);
        assert_eq!(text().matches("/dev/second/").count(), 3, "{}", text());
        boot("/dev/third");
        fail(Reason::DeviceGone);
        let error = world.prepare().await.unwrap_err();
        assert!(matches!(error, NotPrepared::Unhealthy { reason: Reason::DeviceGone, .. }));
        // Of a removed resource no device is found. Its nodes may lead to another one.
        world.change_inventory(|inventory| inventory.resources.clear());
        assert!(matches!(world.prepare().await.unwrap_err(), NotPrepared::NotHere(_)));
        *world.devices.leads_to.lock().unwrap() = "pci:".into();
        assert_eq!(world.prepare().await.unwrap(), first);
        assert_eq!(text().matches("/dev/second/").count(), 3, "{}", text());
    });
}

#[test]
fn another_allocation_under_the_same_uid_is_decided_again() {
    virtually(async {
        let mut other = allocation();
        other.devices = vec![allocated("gpu", "GPU-B", DeviceClass::Gpu)];
        let world = World::with(Source::default(), [Ok(Some(allocation())), Ok(Some(other))]);
        world.prepare().await.unwrap();
        let error = world.prepare().await.unwrap_err().to_string();
        assert!(error.contains("the former allocation"), "{error}");
        world.preparer.unprepare(&claim()).await.unwrap();
        assert_eq!(names(&world.prepare().await.unwrap()), ["gpu n1/gpu/gpu-b"]);
        let text = std::fs::read_to_string(world.file()).unwrap();
        assert!(text.contains("gpu-b") && !text.contains("gpu-a"), "{text}");
    });
}

/// The kubelet has cancelled a call that waits, unprepared the claim, and a scheduler has allocated
/// it again.
#[test]
fn a_call_that_waits_does_not_record_an_allocation_from_before_another_call() {
    virtually(async {
        let mut other = allocation();
        other.devices = vec![allocated("gpu", "GPU-B", DeviceClass::Gpu)];
        let world = World::with(Source::default(), [Ok(Some(allocation())), Ok(Some(other))]);
        *world.ledger.blocked.lock().unwrap() = 3;
        let preparer = Arc::clone(&world.preparer);
        let waiting = time().spawn(async move {
            let ended = preparer.prepare(&claim()).await;
            assert_eq!(ended, Err(NotPrepared::Unprepared(claim())), "it records nothing");
        });
        time().sleep(Duration::from_millis(300)).await;
        world.preparer.unprepare(&claim()).await.unwrap();
        while !waiting.is_finished() {
            time().sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(names(&world.prepare().await.unwrap()), ["gpu n1/gpu/gpu-b"]);
    });
}

#[test]
fn a_claim_waits_for_its_devices_within_the_budget() {
    virtually(async {
        let world = World::new();
        *world.ledger.blocked.lock().unwrap() = 10;
        let began = now();
        assert_eq!(names(&world.prepare().await.unwrap()), ANSWER);
        assert_eq!((now() - began), Duration::from_secs(2), "ten times 0.2 s");

        let world = World::new();
        *world.ledger.blocked.lock().unwrap() = usize::MAX;
        let began = now();
        let error = world.refusal().await;
        assert!(
            error.contains("still waits") && error.contains("pod ml/former runs on"),
            "{error}"
        );
        let took = now() - began;
        assert!(
            took <= PREPARE_BUDGET && took > PREPARE_BUDGET - Duration::from_secs(1),
            "{took:?}"
        );
    });
}

#[test]
fn a_claim_that_lost_a_device_to_a_container_is_evicted_when_the_time_is_over() {
    virtually(async {
        for (is_evicted, advice) in [
            (true, "a taint of the device evicts the pods of the claim; a new pod gets another"),
            (false, "delete pod ml/p, because the API server drops taints of devices"),
        ] {
            let world = World::new();
            *world.ledger.by_number.lock().unwrap() = Some(is_evicted);
            let began = now();
            let error = world.refusal().await;
            assert!(now() - began > PREPARE_BUDGET - Duration::from_secs(1), "the pod may end");
            assert!(error.contains("`GPU-A` of x.y/gpu is held by pod ml/web; "), "{error}");
            assert!(error.contains(advice), "{error}");
            let lost = BTreeSet::from([name_of(&DeviceId::new("GPU-A"), DeviceClass::Gpu)]);
            let evicted = world.ledger.evicted.lock().unwrap().clone();
            assert_eq!(evicted, [(lost, AllocId::new("a-1"))]);
        }
        // The container ends in time.
        let world = World::new();
        *world.ledger.by_number.lock().unwrap() = Some(true);
        let (preparer, ledger) = (Arc::clone(&world.preparer), Arc::clone(&world.ledger));
        let prepare = time().spawn(async move { drop(preparer.prepare(&claim()).await.unwrap()) });
        time().sleep(Duration::from_secs(20)).await;
        *ledger.by_number.lock().unwrap() = None;
        while !prepare.is_finished() {
            time().sleep(Duration::from_millis(1)).await;
        }
        assert!(ledger.evicted.lock().unwrap().is_empty() && world.file().exists());
    });
}

#[test]
fn unprepare_does_not_wait_for_a_prepare_that_waits() {
    virtually(async {
        let world = World::new();
        *world.ledger.blocked.lock().unwrap() = usize::MAX;
        let preparer = Arc::clone(&world.preparer);
        let waiting = time().spawn(async move { drop(preparer.prepare(&claim()).await) });
        time().sleep(Duration::from_secs(1)).await;
        let began = now();
        world.preparer.unprepare(&claim()).await.unwrap();
        assert_eq!((now() - began), Duration::ZERO);
        assert!(!waiting.is_finished());
        waiting.abort();
    });
}

#[test]
fn the_api_server_is_asked_again_until_it_answers() {
    virtually(async {
        let error = |n: usize| Err(format!("error {n}"));
        let world =
            World::with(Source::default(), (1..=4).map(error).chain([Ok(Some(allocation()))]));
        let began = now();
        assert_eq!(names(&world.prepare().await.unwrap()), ANSWER);
        assert_eq!((now() - began), Duration::from_millis(100 + 200 + 400 + 800));

        let world = World::with(Source::default(), [Err("no route".to_owned())]);
        let began = now();
        let error = world.refusal().await;
        assert!(error.contains("did not return claim ml/train in time: no route"), "{error}");
        assert!((now() - began) <= PREPARE_BUDGET);
        assert!((now() - began) > PREPARE_BUDGET - Duration::from_secs(3), "{:?}", (now() - began));

        let silent = Source { is_silent: true, ..Source::default() };
        let world = World::with(silent, [Ok(None)]);
        let began = now();
        let error = world.refusal().await;
        assert!(error.contains("it has not answered at all"), "{error}");
        assert_eq!((now() - began).as_secs(), PREPARE_BUDGET.as_secs());
    });
}

#[test]
fn a_claim_that_is_not_ours_to_prepare_is_an_error() {
    virtually(async {
        let world = World::with(Source::default(), [Ok(None)]);
        assert_eq!(world.refusal().await, "claim ml/train with this UID no longer exists");
        let world = World::changed(|claim| claim.claim.uid = "other".into());
        assert_eq!(world.refusal().await, "claim ml/train with this UID no longer exists");
        let world = World::changed(|claim| claim.is_allocated = false);
        assert_eq!(world.refusal().await, "claim ml/train is not allocated");
        let world = World::changed(|claim| claim.devices.clear());
        assert_eq!(world.refusal().await, "claim ml/train has no device of this driver");
        let world = World::changed(|claim| claim.reserved_for.clear());
        assert_eq!(world.refusal().await, "claim ml/train is not reserved for a pod");
        // A pod may still start with a claim that is being deleted.
        let world = World::changed(|claim| claim.is_deleted = true);
        assert_eq!(names(&world.prepare().await.unwrap()), ANSWER);
        assert_eq!(*world.ledger.records.lock().unwrap(), 1);
    });
}

#[test]
fn an_unknown_configuration_is_named() {
    virtually(async {
        let config = |source, parameters: &str| OpaqueConfig {
            driver: "holdfast.dev".into(),
            source,
            requests: Vec::new(),
            parameters: parameters.into(),
        };
        for (source, parameters, expected) in [
            (
                ConfigSource::FromClaim,
                r#"{"apiVersion":"x.example.com/v1","kind":"GpuConfig"}"#,
                "the claim ml/train has the configuration `GpuConfig of x.example.com/v1`",
            ),
            (
                ConfigSource::FromClass,
                "{}",
                "the DeviceClass has the configuration `without a kind`",
            ),
            (ConfigSource::FromClass, "no JSON", "the DeviceClass has the configuration `without"),
            (ConfigSource::FromClaim, "{\"kind\":\"a\\nb\"}", "the configuration `a\\nb`"),
        ] {
            let world = World::changed(|claim| claim.configs = vec![config(source, parameters)]);
            let error = world.refusal().await;
            assert!(error.contains(expected), "{error}");
        }
        let long = format!("{{\"kind\":\"{}\"}}", "a".repeat(10_000));
        let world =
            World::changed(|claim| claim.configs = vec![config(ConfigSource::FromClaim, &long)]);
        assert!(world.refusal().await.len() < 300);
    });
}

#[test]
fn a_configuration_for_the_driver_in_whose_place_a_device_is_used_is_refused() {
    let prepared = |driver: &'static str, request: &'static str| async move {
        let world = World::changed(|claim| {
            claim.configs = vec![OpaqueConfig {
                driver: driver.into(),
                source: ConfigSource::FromClaim,
                requests: vec![request.into()],
                parameters: r#"{"kind":"GpuConfig"}"#.into(),
            }];
        });
        world.change_inventory(|inventory| {
            let offering = inventory.resources.get_mut(&"x.y/gpu".parse().unwrap()).unwrap();
            let devices = &mut Arc::make_mut(offering).devices;
            let gpu = &mut devices.get_mut(&DeviceId::new("GPU-A")).unwrap().device;
            let gpu = Arc::make_mut(gpu);
            gpu.pci = Some(Box::new(PciFunction {
                vendor: Some(0x10de),
                driver: Some("nvidia".into()),
                ..PciFunction::at("0000:18:00.0".parse().unwrap())
            }));
        });
        let prepared = world.prepare().await;
        (prepared.map_err(|error| error.to_string()), world)
    };
    virtually(async move {
        for request in ["gpu", "gpu/large"] {
            let (prepared, world) = prepared("gpu.nvidia.com", request).await;
            let error = prepared.unwrap_err();
            let expected = "the claim ml/train has the configuration `GpuConfig` for the driver \
                            gpu.nvidia.com, and device n1/gpu/gpu-a was allocated in place";
            assert!(error.starts_with(expected), "{error}");
            assert!(world.ledger.recorded.lock().unwrap().is_empty() && world.files().is_empty());
        }
        // Those of other requests, alternatives and drivers were never for this device.
        let mut digests = BTreeSet::new();
        for (driver, request) in
            [("gpu.nvidia.com", "nics"), ("gpu.nvidia.com", "gpu/small"), ("gpu.amd.com", "gpu")]
        {
            let (prepared, world) = prepared(driver, request).await;
            assert_eq!(names(&prepared.unwrap()), ANSWER);
            let last = world.ledger.last.lock().unwrap().take().unwrap();
            digests.insert(last.holds[0].hold.allocation.clone());
        }
        assert_eq!(digests, BTreeSet::from([digest(&allocation())]), "the allocation is the same");
    });
}

#[test]
fn each_device_must_be_one_of_this_node_that_is_given_to_claims() {
    virtually(async {
        let world = World::changed(|claim| claim.devices[2].name.pool = "n2/gpu".into());
        let error = world.refusal().await;
        assert!(error.contains("device n2/gpu/gpu-a is not a device of this node"), "{error}");
        let world = World::changed(|claim| claim.devices[2].name.device = "gpu-z".into());
        assert!(world.refusal().await.contains("device n1/gpu/gpu-z is not"));
        let world = World::new();
        world.change_inventory(|inventory| {
            let gpus = inventory.resources.get_mut(&"x.y/gpu".parse().unwrap()).unwrap();
            let gpus = Arc::make_mut(gpus);
            gpus.spec = Arc::new(ResourceSpec { api: Api::Plugin, ..(*gpus.spec).clone() });
        });
        let error = world.refusal().await;
        assert!(
            error.contains("belongs to x.y/gpu, whose devices are not given to claims"),
            "{error}"
        );
        // A device that moves is in two lists.
        world.change_inventory(|inventory| {
            inventory.resources.extend([offering("moved", DeviceClass::Gpu, &["GPU-A"])]);
        });
        assert_eq!(names(&world.prepare().await.unwrap()), ANSWER);
        assert_eq!(
            world.ledger.recorded(&claim()).unwrap().claim.holds[0].resource.as_str(),
            "x.y/moved"
        );
        let world = World::new();
        *world.devices.unusable.lock().unwrap() = Some("the host uses it: /mnt".into());
        assert!(world.refusal().await.contains("device n1/gpu/gpu-a: the host uses it: /mnt"));
        // The CDI names have no pool.
        let world = World::changed(|claim| {
            claim.devices[0] = allocated("nics", "GPU-A", DeviceClass::Nic);
        });
        world.change_inventory(|inventory| {
            inventory.resources.extend([offering("nic", DeviceClass::Nic, &["NIC-A", "GPU-A"])]);
        });
        assert!(world.refusal().await.contains("two devices named `gpu-a`"));
    });
}

#[test]
fn a_failed_device_is_an_error_and_a_soft_failure_is_not() {
    virtually(async {
        for (reason, is_prepared) in [
            (Reason::Xid, false),
            (Reason::DeviceGone, false),
            (Reason::NodeMissing, false),
            (Reason::Cordoned, false),
            (Reason::PortDown, true),
            (Reason::ProbeStuck, true),
            // The ledger knows what to wait for.
            (Reason::HookPending, true),
            (Reason::HeldAsOther, true),
        ] {
            let world = World::new();
            world.set_health("x.y/nic", "NIC-A", reason);
            if is_prepared {
                assert_eq!(names(&world.prepare().await.unwrap()), ANSWER, "{reason}");
            } else {
                let error = world.refusal().await;
                let expected = format!("(`NIC-A` of x.y/nic) is unhealthy: {reason}");
                assert!(error.contains(&expected), "{error}");
            }
        }
        // A device that fails later stays the claim's.
        let world = World::new();
        let first = world.prepare().await.unwrap();
        world.set_health("x.y/nic", "NIC-A", Reason::Xid);
        assert_eq!(world.prepare().await.unwrap(), first);
    });
}

/// A container gets all devices of its request for a number, and none of another one. The first one
/// has the list: with a list for each, the record would grow with the square of their number.
#[test]
fn the_devices_for_a_number_of_one_container_are_listed_together() {
    virtually(async {
        for (is_by_number, expected) in
            [(true, [Some("GPU-A"), Some("NIC-A"), Some("NIC-B,NIC-C"), None]), (false, [None; 4])]
        {
            let world = World::changed(|claim| {
                claim.is_by_number = is_by_number;
                claim.devices = vec![
                    allocated("container-1-request-0", "NIC-C", DeviceClass::Nic),
                    allocated("container-0-request-1", "NIC-A", DeviceClass::Nic),
                    allocated("container-0-request-0", "GPU-A", DeviceClass::Gpu),
                    allocated("container-1-request-0", "NIC-B", DeviceClass::Nic),
                ];
            });
            world.change_inventory(|inventory| {
                let ids = ["NIC-A", "NIC-B", "NIC-C"];
                inventory.resources.extend([offering("nic", DeviceClass::Nic, &ids)]);
            });
            world.prepare().await.unwrap();
            let recorded = world.ledger.recorded(&claim()).unwrap().claim;
            let devices = recorded.holds.iter().flat_map(|each| &each.hold.devices);
            let listed: Vec<Option<&str>> =
                devices.map(|device| device.edits.envs.get("ALL").map(String::as_str)).collect();
            assert_eq!(listed, expected);
        }
    });
}

#[test]
fn the_first_device_of_a_request_mounts_the_metadata_of_all() {
    virtually(async {
        let world = World::changed(|claim| claim.pod_claim = Some("devices".into()));
        *world.devices.has_metadata.lock().unwrap() = true;
        world.prepare().await.unwrap();
        let recorded = world.ledger.recorded(&claim()).unwrap().claim;
        let devices: Vec<&ClaimedDevice> =
            recorded.holds.iter().flat_map(|each| &each.hold.devices).collect();
        let mounted: Vec<Option<String>> = devices
            .iter()
            .map(|device| device.edits.mounts.first())
            .map(|mount| mount.map(|it| format!("{} {}", it.host, it.container)))
            .collect();
        let mount = |device: &str, request: &str| {
            Some(format!(
                "/cdi/holdfast-claim-{UID}+{device}.metadata /var/run/kubernetes.io/\
                 dra-device-attributes/resourceclaimtemplates/devices/{request}/\
                 holdfast.dev-metadata.json"
            ))
        };
        assert_eq!(mounted, [mount("gpu-a", "gpu"), mount("nic-a", "nics"), None]);
        let file = |device: &str| {
            let name = format!("cdi/holdfast-claim-{UID}+{device}.metadata");
            std::fs::read_to_string(world.dir.path().join(name)).unwrap()
        };
        let (gpu, nics) = (file("gpu-a"), file("nic-a"));
        assert!(gpu.contains(r#""name":"gpu/large""#) && gpu.contains("GPU-A"), "{gpu}");
        assert!(nics.contains("NIC-A") && nics.contains("NIC-B") && nics.contains("x.y/nic"));
        let text = std::fs::read_to_string(world.file()).unwrap();
        assert!(text.contains("nic-a.metadata") && !text.contains("nic-b.metadata"), "{text}");
        world.preparer.unprepare(&claim()).await.unwrap();
        assert!(world.files().is_empty());
    });
}

#[test]
fn shares_of_one_device_are_devices_of_their_own() {
    virtually(async {
        let world = World::changed(|claim| {
            claim.devices = vec![
                allocated("b", "GPU-A::1", DeviceClass::Gpu),
                allocated("a", "GPU-A::0", DeviceClass::Gpu),
            ];
        });
        world.change_inventory(|inventory| {
            let (name, mut gpus) = offering("gpu", DeviceClass::Gpu, &["GPU-A::0", "GPU-A::1"]);
            let of = Arc::make_mut(&mut gpus);
            let sharing = Sharing::Replicas(2);
            of.spec = Arc::new(ResourceSpec { sharing, ..(*of.spec).clone() });
            inventory.resources.insert(name, gpus);
        });
        let answer = world.prepare().await.unwrap();
        assert_eq!(names(&answer), ["a n1/gpu/gpu-a-s0", "b n1/gpu/gpu-a-s1"]);
    });
}

#[test]
fn a_hostile_uid_is_refused_before_anything_else() {
    virtually(async {
        let world = World::new();
        for uid in ["../../etc/x", "", "a/b", ".", "a\n"] {
            let of = ClaimRef { uid: uid.into(), ..claim() };
            let error = world.preparer.prepare(&of).await.unwrap_err();
            assert_eq!(error, NotPrepared::Uid(of.clone()));
            world.preparer.unprepare(&of).await.unwrap();
        }
        assert!(world.files().is_empty());
        assert_eq!(*world.ledger.records.lock().unwrap(), 0);
        assert_eq!(world.source.answers.lock().unwrap().len(), 1);
        assert!(!Path::new(&world.dir.path().join("etc")).exists());
    });
}

#[test]
fn unprepare_releases_and_an_unknown_claim_is_released() {
    virtually(async {
        let world = World::new();
        world.preparer.unprepare(&claim()).await.unwrap();
        world.prepare().await.unwrap();
        *world.ledger.fails.lock().unwrap() = Some("the disk is full".into());
        assert_eq!(world.preparer.unprepare(&claim()).await, Err("the disk is full".into()));
        assert!(world.file().exists(), "it is still held");
        *world.ledger.fails.lock().unwrap() = None;
        world.preparer.unprepare(&claim()).await.unwrap();
        assert!(world.files().is_empty() && world.ledger.recorded(&claim()).is_none());
    });
}

#[test]
fn what_cannot_be_recorded_or_written_is_an_error_and_the_next_try_completes_it() {
    virtually(async {
        let world = World::new();
        *world.ledger.fails.lock().unwrap() = Some("the disk is full".into());
        assert!(world.refusal().await.ends_with("it is not prepared: the disk is full"));
        *world.ledger.fails.lock().unwrap() = None;
        // A file is where the folder should be.
        std::fs::write(world.dir.path().join("cdi"), "").unwrap();
        let error = world.prepare().await.unwrap_err().to_string();
        assert!(error.contains("the CDI file of claim ml/train cannot be written"), "{error}");
        assert!(world.ledger.recorded(&claim()).is_some(), "it stays for the next try");
        std::fs::remove_file(world.dir.path().join("cdi")).unwrap();
        assert_eq!(names(&world.prepare().await.unwrap()), ANSWER);
        assert!(world.file().exists());
    });
}

/// Runs a call, and drops it after this number of steps. `None` if it was not done by then.
async fn dropped_after<T>(steps: usize, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    let mut left = steps;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        call.as_mut().poll(context).map(Some)
    })
    .await
}

#[test]
fn a_call_may_be_dropped_between_any_two_steps() {
    virtually(async {
        let slow = || {
            let world = World::with(
                Source::default(),
                [Err("no route".to_owned()), Ok(Some(allocation()))],
            );
            *world.ledger.blocked.lock().unwrap() = 2;
            world
        };
        let expected = World::new().prepare().await.unwrap();
        for steps in 0.. {
            // Prepare is dropped, and comes again.
            let world = slow();
            let whole = dropped_after(steps, world.prepare()).await;
            assert_eq!(world.prepare().await.unwrap(), expected, "{steps}");
            assert!(world.file().exists(), "{steps}");
            // Then Unprepare, which is dropped and comes again.
            for release in 0.. {
                let done = dropped_after(release, world.preparer.unprepare(&claim())).await;
                if done.is_some() {
                    break;
                }
            }
            assert!(world.files().is_empty(), "{steps}");
            assert!(world.ledger.recorded(&claim()).is_none(), "{steps}");
            // Prepare is dropped, and the pod ends instead.
            let world = slow();
            drop(dropped_after(steps, world.prepare()).await);
            world.preparer.unprepare(&claim()).await.unwrap();
            assert!(
                world.files().is_empty() && world.ledger.recorded(&claim()).is_none(),
                "{steps}"
            );
            // Unprepare is dropped, and the claim is prepared again.
            let world = World::new();
            world.prepare().await.unwrap();
            drop(dropped_after(steps, world.preparer.unprepare(&claim())).await);
            assert_eq!(world.prepare().await.unwrap(), expected, "{steps}");
            assert!(world.file().exists(), "{steps}");
            if whole.is_some() {
                assert!(steps > 10, "only {steps} steps");
                break;
            }
        }
    });
}

#[test]
fn prepare_and_unprepare_of_one_claim_never_mix() {
    virtually(async {
        for steps in 0..12 {
            let world = World::new();
            world.prepare().await.unwrap();
            std::fs::remove_file(world.file()).unwrap();
            let (preparer, other) = (Arc::clone(&world.preparer), Arc::clone(&world.preparer));
            let prepare = time().spawn(async move {
                let ended = preparer.prepare(&claim()).await;
                assert!(matches!(ended, Ok(_) | Err(NotPrepared::Unprepared(_))), "{ended:?}");
            });
            for _ in 0..steps {
                time().pass().await;
            }
            let release = time().spawn(async move { other.unprepare(&claim()).await.unwrap() });
            while !prepare.is_finished() || !release.is_finished() {
                time().sleep(Duration::from_millis(1)).await;
            }
            let is_recorded = world.ledger.recorded(&claim()).is_some();
            assert_eq!(world.file().exists(), is_recorded, "{steps}");
        }
    });
}

/// The same devices, which also have a name in the CDI file of another program.
struct Named(Devices);

impl ClaimDevices for Named {
    fn inventory(&self) -> Arc<Inventory> {
        self.0.inventory()
    }

    fn claimed(
        &self,
        offering: &Offering,
        id: &DeviceId,
        offered: &Offered,
        together: &[&Device],
    ) -> Result<(ContainerEdits, GrantedDevice), String> {
        let (mut edits, granted) = self.0.claimed(offering, id, offered, together)?;
        edits.cdi_devices.push(format!("x.y/gpu={id}"));
        Ok((edits, granted))
    }
}

#[test]
fn a_lost_device_is_found_by_its_name_also_if_its_contract_cannot_be_fulfilled() {
    let devices = Named(Devices {
        inventory: Mutex::new(Arc::new(Inventory {
            resources: [offering("gpu", DeviceClass::Gpu, &["GPU-A", "GPU-B"])].into(),
        })),
        node: Mutex::new("/dev".into()),
        unusable: Mutex::new(None),
        has_metadata: Mutex::default(),
        leads_to: Mutex::default(),
    });
    let name_of = |id: &DeviceId, _| DraName {
        pool: "n1/gpu".into(),
        device: id.as_str().to_ascii_lowercase(),
    };
    let wanted = DraName { pool: "n1/gpu".into(), device: "gpu-a".into() };
    let named = |devices: &Named| named_devices(devices, |name| *name == wanted, &name_of);
    let found = named(&devices);
    assert_eq!(found.keys().collect::<Vec<_>>(), [&wanted]);
    assert_eq!(found[&wanted].device.id, DeviceId::new("GPU-A"));
    assert_eq!(found[&wanted].resource.to_string(), "x.y/gpu");
    assert_eq!(found[&wanted].edits.devices[0].host, "/dev/GPU-A");
    assert!(found[&wanted].edits.cdi_devices.is_empty(), "the answer has the names");
    *devices.0.unusable.lock().unwrap() = Some("its node is missing".into());
    let found = named(&devices);
    assert_eq!(found[&wanted].device.id, DeviceId::new("GPU-A"), "a container may have it");
    assert_eq!(found[&wanted].edits, ContainerEdits::default());
}

/// A grant of these shares of `GPU-A` to a claim with this UID, or to a container.
fn grant(uid: Option<&str>, shares: &[(u32, &str)]) -> Arc<Grant> {
    let whole = DeviceId::new("GPU-A");
    let hold = uid.map(|uid| {
        let claimed = |(share, share_id): &(u32, &str)| {
            let of = part("gpu", share_id);
            claimed(uid, of, whole.share(*share))
        };
        let claim = ClaimRef { uid: uid.into(), ..claim() };
        let devices = shares.iter().map(claimed).collect();
        Arc::new(ClaimHold { claim, allocation: String::new(), devices })
    });
    let device = |(share, _): &(u32, &str)| GrantedDevice {
        id: whole.share(*share),
        key: String::new(),
        numa_nodes: Vec::new(),
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Arc::new(Grant {
        alloc_id: AllocId::new("a-1"),
        resource: "x.y/gpu".parse().unwrap(),
        devices: shares.iter().map(device).collect(),
        edits: ContainerEdits::default(),
        claim: hold,
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state: GrantState::Granted,
    })
}

fn part(request: &str, share_id: &str) -> Allocated {
    let of = allocated(request, "GPU-A", DeviceClass::Gpu);
    Allocated { share_id: Some(share_id.into()), ..of }
}

fn claimed(uid: &str, allocated: Allocated, id: DeviceId) -> ClaimedDevice {
    let own = name_of(&id, DeviceClass::Gpu).device;
    let cdi_devices = vec![format!("k8s.holdfast.dev/claim={uid}-{own}")];
    let edits = ContainerEdits::default();
    ClaimedDevice { allocated, id, cdi_devices, edits, metadata: String::new() }
}

/// A claim for parts of `GPU-A`, which has three shares. `by_capacity` is the key of the resource.
fn parts(by_capacity: bool, of: Vec<Allocated>) -> World {
    let world = World::changed(|claim| claim.devices = of);
    let (name, mut offering) =
        offering("gpu", DeviceClass::Gpu, &["GPU-A::0", "GPU-A::1", "GPU-A::2"]);
    let shared = Arc::make_mut(&mut offering);
    let sharing = Sharing::Replicas(3);
    let spec = ResourceSpec::clone(&shared.spec);
    shared.spec = Arc::new(ResourceSpec { sharing, capacity: by_capacity, ..spec });
    let resources = [(name, offering)].into();
    *world.devices.inventory.lock().unwrap() = Arc::new(Inventory { resources });
    world
}

/// The shares that the claim gets, by its share ids.
async fn shares_of(world: &World) -> Vec<(String, String)> {
    let answer = world.prepare().await.unwrap();
    assert_eq!(world.prepare().await.unwrap(), answer, "the same bytes again");
    let recorded = world.ledger.recorded.lock().unwrap()[UID].clone();
    let shares = recorded.holds.iter().flat_map(|of| &of.hold.devices).map(|device| {
        let own = device.cdi_devices.last().unwrap().clone();
        assert!(own.ends_with(&device.id.as_str().to_lowercase().replace("::", "-s")), "{own}");
        assert!(answer.iter().any(|it| it.cdi_devices == device.cdi_devices));
        (device.allocated.share_id.clone().unwrap_or_default(), device.id.to_string())
    });
    shares.collect()
}

#[test]
fn each_part_of_a_device_takes_a_share_that_nobody_holds() {
    virtually(async {
        let is = |found: Vec<(String, String)>, expected: &[(&str, &str)]| {
            let found: Vec<_> = found.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            assert_eq!(found, expected);
        };
        for by_capacity in [true, false] {
            let world = parts(by_capacity, vec![part("gpu", "x"), part("gpu", "y")]);
            *world.ledger.others.lock().unwrap() = vec![grant(Some("other"), &[(1, "z")])];
            is(shares_of(&world).await, &[("x", "GPU-A::0"), ("y", "GPU-A::2")]);
            let text = std::fs::read_to_string(world.file()).unwrap();
            assert!(text.contains("-gpu-a-s0\"") && text.contains("-gpu-a-s2\""), "{text}");
        }
        // What the claim itself holds stays, of a restored grant or of a torn write.
        let world = parts(true, vec![part("gpu", "x"), part("gpu", "y")]);
        *world.ledger.others.lock().unwrap() =
            vec![grant(Some("other"), &[(0, "z")]), grant(Some(UID), &[(1, "y")])];
        is(shares_of(&world).await, &[("x", "GPU-A::2"), ("y", "GPU-A::1")]);
        // One device of an API server without the feature gate.
        let whole = Allocated { share_id: None, ..part("gpu", "") };
        let world = parts(true, vec![whole.clone()]);
        is(shares_of(&world).await, &[("", "GPU-A::0")]);
        // A share by its name, which the claim got before the key was set.
        let world = parts(true, vec![allocated("gpu", "GPU-A::1", DeviceClass::Gpu)]);
        is(shares_of(&world).await, &[("", "GPU-A::1")]);
        // No share is offered under the name of its device without the key.
        let world = parts(false, vec![whole]);
        assert!(world.refusal().await.contains("is not a device of this node"));
    });
}

#[test]
fn a_claim_without_a_free_share_waits_for_a_claim_rather_than_for_a_container() {
    virtually(async {
        let world = parts(true, vec![part("gpu", "x")]);
        *world.ledger.others.lock().unwrap() =
            vec![grant(None, &[(0, ""), (1, "")]), grant(Some("other"), &[(2, "z")])];
        *world.ledger.blocked.lock().unwrap() = usize::MAX;
        assert!(world.refusal().await.contains("still waits"));
        let last = world.ledger.last.lock().unwrap().clone().unwrap();
        assert_eq!(last.holds[0].devices[0].id, DeviceId::new("GPU-A::2"));
    });
}

#[test]
fn the_other_claims_of_a_device_are_not_evicted_for_one_without_a_share() {
    virtually(async {
        for (of, is_evicted) in [(part("gpu", "x"), false), (part("gpu", ""), true)] {
            let share_id = of.share_id.clone().filter(|id| !id.is_empty());
            let world = parts(true, vec![Allocated { share_id, ..of }]);
            *world.ledger.by_number.lock().unwrap() = Some(true);
            *world.ledger.lost_id.lock().unwrap() = Some(DeviceId::new("GPU-A::0"));
            let error = world.refusal().await;
            assert_eq!(error.contains("a taint of the device evicts"), is_evicted, "{error}");
            assert_eq!(error.contains("delete pod ml/p, because"), !is_evicted, "{error}");
            assert_eq!(world.ledger.evicted.lock().unwrap().is_empty(), !is_evicted);
        }
    });
}
