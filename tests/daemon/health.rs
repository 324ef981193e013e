//! Health with the whole daemon: faults below the host's root appear in the kubelet's list, and
//! instructions of an operator and verdicts of an earlier process persist.
//!
//! No test waits for a patience or a hold: its ledger starts with a verdict whose time is nearly
//! over.

use crate::common::{HANG, Node, Unpolled, name, offered, pause, resource, run, soon, until};
use actix::{Actor, Message};
use futures_util::future::BoxFuture;
use holdfast::app::App;
use holdfast::domain::{
    AllocId, Attributes, ClaimHold, ClaimRef, ContainerEdits, Device, DeviceClass, DeviceId,
    Durability, Entry, Evidence, Grant, GrantState, GrantedDevice, Health, HealthPolicy, Inventory,
    KubeletGeneration, PciAddress, PciFunction, Plan, Reason, ResourceName, ResourceSpec, Signals,
    Symptom, Timestamp, Verdict, VerdictState, Verdicts,
};
use holdfast::hardware::{self, discover};
use holdfast::health::{HealthActor, HealthConfig, Judgement};
use holdfast::host::{self, HostRoot, KernelRecord, Uevent};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, PodPhase, PodSpec, View};
use holdfast::messages::{
    CallError, Deliver, DeviceEventSeen, Discovered, Mailbox, RecordVerdicts, Rescan,
};
use holdfast::store::Store;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The bound of lists of one resource within a second (`serving/plugin.rs`).
const LISTS_A_SECOND: usize = 20;

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

/// Waits until the newest list has these numbers of healthy and of other devices.
async fn listed(kubelet: &Kubelet, resource: &ResourceName, wanted: (usize, usize)) {
    let newest = |kind: &EventKind| {
        matches!(kind, EventKind::Listed { .. }) && kind.resource() == Some(resource)
    };
    let seen = |view: &View<'_>| {
        let event = view.last(newest).map(|event| &event.kind);
        matches!(event, Some(EventKind::Listed { healthy, unhealthy, .. }) if (*healthy, *unhealthy) == wanted)
    };
    kubelet
        .wait_for(seen, HANG)
        .await
        .unwrap_or_else(|error| panic!("{resource} {wanted:?}: {error}"));
}

/// The output of `device show` for one device.
fn shown(node: &Node, device: &str) -> serde_json::Value {
    node.json(&["device", "show", device])["devices"][0].clone()
}

/// Writes this verdict on a device to the ledger, in the boot of the node's tree.
fn remember(node: &Node, device: &DeviceId, state: VerdictState) {
    let (mut store, _) = Store::open(&node.state(), Durability::PowerLoss, None).unwrap();
    let verdict = Verdict { boot_id: "unknown".into(), state, ..Verdict::default() };
    store
        .append(&[Entry::Judged { device: device.clone(), verdict: Some(Box::new(verdict)) }])
        .unwrap();
    store.close().unwrap();
}

/// A simulated machine with these resources, and with `[health]`.
fn machine(resources: &str, health: &str) -> (Node, SimNode) {
    let node = Node::new();
    let host = SimNode::create(node.path("host")).unwrap();
    node.write_config(&format!(
        "[telemetry]\nlisten = \"off\"\n[health]\npoll = \"1s\"\n{health}\n{resources}"
    ));
    (node, host)
}

const GPU_RESOURCE: &str = "[[resource]]\nname = \"example.com/gpu\"\nclass = \"gpu\"\n";
const RDMA_RESOURCE: &str = "[[resource]]\nname = \"example.com/rdma\"\nclass = \"rdma\"\n";

#[test]
fn a_removed_node_is_unhealthy_until_it_returns_and_flapping_makes_few_lists() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        listed(&kubelet, &gpu(), (2, 0)).await;
        let unpolled = Unpolled::begin().await;
        node.remove_device("gpu", 0);
        listed(&kubelet, &gpu(), (1, 1)).await;
        unpolled.end("the list");
        assert_eq!(shown(&node, "dev:gpu0")["reason"], "device_gone");
        let said = daemon.logged("the device is unhealthy").await;
        assert!(said.contains("dev:gpu0") && said.contains("device_gone"), "{said}");
        node.create_device("gpu", 0);
        listed(&kubelet, &gpu(), (2, 0)).await;
        daemon.logged("the device is healthy again").await;
        let (before, _) = kubelet.view(|view| view.busiest_second(&gpu()));
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(1) {
            node.remove_device("gpu", 1);
            pause().await;
            node.create_device("gpu", 1);
            pause().await;
        }
        // The lists of the second come before that of another device.
        node.create_device("gpu", 2);
        listed(&kubelet, &gpu(), (3, 0)).await;
        let (registers, lists) = kubelet.view(|view| view.busiest_second(&gpu()));
        assert!(
            registers == before && lists <= LISTS_A_SECOND,
            "{registers} registrations, {lists} lists in a second"
        );
    });
}

/// Waits until `device show` has this value.
async fn until_shown(node: &Node, id: &DeviceId, key: &str, value: &str) {
    let what = format!("{key} of {id} is {value}");
    until(&what, || shown(node, id.as_str())[key].clone(), |shown| shown == value).await;
}

#[test]
fn a_port_that_stays_down_is_unhealthy_until_it_is_up_again() {
    run(async {
        let (node, host) = machine(RDMA_RESOURCE, "at_kubelet_start = \"tell\"");
        let rdma = name("example.com/rdma");
        let root = HostRoot::new(host.root());
        let found = discover(&root, &[], &BTreeMap::new()).devices;
        let of = |function: u8| {
            let address = PciAddress { function, ..host.adapter_address(0) };
            found
                .iter()
                .find(|device| device.pci.as_ref().unwrap().address == address)
                .unwrap()
                .id
                .clone()
        };
        let port = |function: u8| {
            let address = PciAddress { function, ..host.adapter_address(0) };
            let folder = host.root().join(format!("sys/bus/pci/devices/{address}/infiniband"));
            let adapter = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
            adapter.join("ports/1/state")
        };
        // One has been down for its whole patience; another has been up again for its whole hold.
        remember(
            &node,
            &of(1),
            VerdictState::Suspect { reason: Reason::PortDown, since: Duration::ZERO },
        );
        remember(
            &node,
            &of(2),
            VerdictState::Recovering {
                reason: Reason::PortDown,
                since: Duration::ZERO,
                hold: Duration::from_secs(1),
            },
        );
        for function in [1, 3] {
            std::fs::write(port(function), "2: INIT\n").unwrap();
        }
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        listed(&kubelet, &rdma, (7, 1)).await;
        // Until the first probe the second device is the unhealthy one.
        until_shown(&node, &of(1), "health", "Unhealthy").await;
        until_shown(&node, &of(2), "health", "Healthy").await;
        let down = shown(&node, of(1).as_str());
        assert_eq!(
            (&down["health"], &down["reason"], &down["state"]),
            (&"Unhealthy".into(), &"port_down".into(), &"unhealthy".into())
        );
        assert_eq!(down["detail"], "port 1 is 2: INIT, 5: LinkUp");
        until_shown(&node, &of(3), "state", "suspect").await;
        assert_eq!(shown(&node, of(2).as_str())["state"], "healthy");
        let status = node.json(&["status"]);
        assert_eq!(status["ailing"][0]["reason"], "port_down", "{status}");

        // A recovered device is held back, and the next process continues that hold.
        std::fs::write(port(1), "4: ACTIVE\n").unwrap();
        std::fs::write(port(3), "4: ACTIVE\n").unwrap();
        until_shown(&node, &of(1), "state", "recovering").await;
        daemon.signal(Signal::SIGTERM);
        daemon.ended().await;
        remember(
            &node,
            &of(1),
            VerdictState::Recovering {
                reason: Reason::PortDown,
                since: Duration::ZERO,
                hold: Duration::from_secs(1),
            },
        );
        let _daemon = node.start_daemon();
        listed(&kubelet, &rdma, (8, 0)).await;
    });
}

/// A kubelet that has just started rejects pods with unhealthy devices. A failure that may end soon
/// is hidden from it.
#[test]
fn a_soft_failure_of_a_held_device_is_hidden_from_a_kubelet_that_just_started() {
    run(async {
        let (node, host) = machine(RDMA_RESOURCE, "");
        let rdma = name("example.com/rdma");
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        listed(&kubelet, &rdma, (8, 0)).await;
        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &rdma, 1)),
        )
        .await;
        assert_eq!(pod.phase, PodPhase::Running);
        let held = node.grants()[0].devices[0].id.clone();
        daemon.signal(Signal::SIGTERM);
        daemon.ended().await;
        let root = HostRoot::new(host.root());
        let found = discover(&root, &[], &BTreeMap::new()).devices;
        let address =
            found.iter().find(|device| device.id == held).unwrap().pci.as_ref().unwrap().address;
        let folder = host.root().join(format!("sys/bus/pci/devices/{address}/infiniband"));
        let adapter = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
        std::fs::write(adapter.join("ports/1/state"), "2: INIT\n").unwrap();
        remember(
            &node,
            &held,
            VerdictState::Suspect { reason: Reason::PortDown, since: Duration::ZERO },
        );

        let mut daemon = node.start_daemon();
        until(
            "the verdict",
            || node.output(&["device", "show", held.as_str(), "-o", "json"]),
            |output| {
                String::from_utf8_lossy(&output.stdout).contains("\"state\": \"unhealthy\"")
                    || String::from_utf8_lossy(&output.stdout).contains("\"state\":\"unhealthy\"")
            },
        )
        .await;
        listed(&kubelet, &rdma, (8, 0)).await;
        assert_eq!(
            shown(&node, held.as_str())["health"],
            "Healthy",
            "the same as in the kubelet's list"
        );
        daemon.signal(Signal::SIGTERM);
        daemon.ended().await;

        let text = std::fs::read_to_string(node.config_file()).unwrap();
        node.write_config(&text.replace("[health]\n", "[health]\nat_kubelet_start = \"tell\"\n"));
        let _daemon = node.start_daemon();
        listed(&kubelet, &rdma, (7, 1)).await;
        // Every view has the reason, and the history has the holder.
        assert_eq!(node.json(&["who"])["grants"][0]["unhealthy"][held.as_str()], "port_down");
        assert_eq!(
            node.json(&["who", held.as_str()])["grants"][0]["unhealthy"][held.as_str()],
            "port_down"
        );
        let failure = node.json(&["history", "--device", held.as_str()])["failures"][0].clone();
        assert_eq!(
            (&failure["reason"], &failure["held_by"][0]),
            (&"port_down".into(), &node.grants()[0].alloc_id.to_string().into())
        );
        let text =
            String::from_utf8(node.output(&["history", "--device", held.as_str()]).stdout).unwrap();
        assert!(
            text.contains(
                "port_down (port 1 is 2: INIT, 5: LinkUp)  default/train, container main"
            ),
            "{text}"
        );
        let found = node.json(&["discover"])["devices"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["id"] == held.as_str())
            .cloned()
            .unwrap();
        assert_eq!(
            (&found["reason"], &found["detail"]),
            (&"port_down".into(), &"port 1 is 2: INIT, 5: LinkUp".into())
        );
    });
}

#[test]
fn a_cordon_survives_a_restart_and_a_kill() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        listed(&kubelet, &gpu(), (2, 0)).await;
        let done = node.output(&["device", "cordon", "dev:gpu0", "--reason", "its fan rattles"]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        listed(&kubelet, &gpu(), (1, 1)).await;
        for kills in [false, true] {
            if kills {
                daemon.kill();
            } else {
                daemon.signal(Signal::SIGTERM);
                daemon.ended().await;
            }
            daemon = node.start_daemon();
            daemon.logged("registered with the kubelet").await;
            listed(&kubelet, &gpu(), (1, 1)).await;
            let told = shown(&node, "dev:gpu0");
            assert_eq!(
                (&told["reason"], &told["cordoned"]),
                (&"cordoned".into(), &"its fan rattles".into())
            );
        }
        let unknown = node.output(&["device", "cordon", "dev:gpu7", "--reason", "none"]);
        assert!(!unknown.status.success());
        assert!(node.output(&["device", "uncordon", "dev:gpu0"]).status.success());
        listed(&kubelet, &gpu(), (2, 0)).await;
        // Nothing of it remains, for the next process either.
        daemon.kill();
        let _daemon = node.start_daemon();
        listed(&kubelet, &gpu(), (2, 0)).await;
    });
}

#[test]
fn a_failing_check_makes_a_device_unhealthy_until_it_passes_again() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let (script, sick) = (node.path("check"), node.path("sick"));
        std::fs::write(&script, "[ \"$HOLDFAST_DEVICE_ID\" != dev:gpu1 ] || [ ! -e \"$1\" ] || { echo it coughs >&2; exit 4; }\n").unwrap();
        let check = format!(
            "check = {{ command = [\"/bin/sh\", \"{}\", \"{}\"], every = \"5s\", timeout = \"5s\" }}\n",
            script.display(),
            sick.display()
        );
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}{check}", resource("gpu")));
        std::fs::write(&sick, "").unwrap();
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        listed(&kubelet, &gpu(), (1, 1)).await;
        let told = shown(&node, "dev:gpu1");
        assert!(
            told["reason"] == "check_failed"
                && told["detail"] == "exit status: 4"
                && told["said"][0]["said"] == "it coughs",
            "{told}"
        );
        std::fs::remove_file(&sick).unwrap();
        until(
            "its recovery",
            || shown(&node, "dev:gpu1")["state"].clone(),
            |state| state == "recovering",
        )
        .await;
        daemon.kill();
        let hold = Duration::from_secs(1);
        remember(
            &node,
            &DeviceId::new("dev:gpu1"),
            VerdictState::Recovering { reason: Reason::CheckFailed, since: Duration::ZERO, hold },
        );
        let _daemon = node.start_daemon();
        listed(&kubelet, &gpu(), (2, 0)).await;
    });
}

/// Sends health the kernel's message, as the readers of its log and of its uevents do.
fn send_kernel_message(app: &App, record: Option<&[u8]>, uevent: Option<&[u8]>) -> bool {
    let of_log =
        record.and_then(KernelRecord::parse).and_then(|record| hardware::xid(&record.text));
    let event = of_log.or_else(|| hardware::event(&Uevent::parse(uevent?)?));
    let Some(event) = event else { return false };
    app.actors.health.mailbox::<DeviceEventSeen>().send(DeviceEventSeen { event, at: host::now() });
    true
}

#[test]
fn a_kernel_error_of_a_gpu_counts_until_a_reset_or_a_reboot() {
    run(async {
        let (node, host) = machine(GPU_RESOURCE, "");
        let boot_id = node.path("host/proc/sys/kernel/random/boot_id");
        std::fs::create_dir_all(boot_id.parent().unwrap()).unwrap();
        std::fs::write(&boot_id, "first\n").unwrap();
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        offered(&kubelet, &gpu(), GPUS).await;
        let slot = host.gpu_address(2).to_string();
        let line = format!(
            "NVRM: Xid (PCI:{}): 79, pid=1, GPU has fallen off the bus.",
            slot.strip_suffix(".0").unwrap()
        );
        // Messages of other processes: any process may write to the log, and udev can repeat its
        // events.
        assert!(!send_kernel_message(&app, Some(format!("12,1,1000,-;{line}").as_bytes()), None));
        let path = host.root().join(format!("sys/bus/pci/devices/{slot}")).canonicalize().unwrap();
        let path = path.to_str().unwrap().split_once("/sys/").unwrap().1.to_owned();
        let began = |more: &str| {
            format!(
                "change@/{path}\0ACTION=change\0SUBSYSTEM=pci\0ERROR_EVENT=BEGIN_RECOVERY\0SEQNUM=7\0{more}"
            )
        };
        assert!(!send_kernel_message(&app, None, Some(began("SYNTH_UUID=0\0").as_bytes())));
        // The kernel's own message.
        assert!(send_kernel_message(&app, Some(format!("4,2,1000,-;{line}").as_bytes()), None));
        listed(&kubelet, &gpu(), (GPUS - 1, 1)).await;
        app.shut_down().await;

        let app = node.start_app().await;
        listed(&kubelet, &gpu(), (GPUS - 1, 1)).await;
        let verdicts = app.views.judgement.borrow().verdicts.clone();
        assert_eq!(
            verdicts.values().next().unwrap().detail(Reason::Xid),
            "Xid 79",
            "the next process knows it"
        );
        let mut judgement = app.views.judgement.clone();
        let gone = format!("remove@/{path}\0ACTION=remove\0SUBSYSTEM=pci\0SEQNUM=8\0");
        let back = format!("bind@/{path}\0ACTION=bind\0SUBSYSTEM=pci\0DRIVER=nvidia\0SEQNUM=9\0");
        assert!(
            send_kernel_message(&app, None, Some(gone.as_bytes()))
                && send_kernel_message(&app, None, Some(back.as_bytes()))
        );
        let recovers = |verdicts: &BTreeMap<DeviceId, Verdict>| {
            verdicts
                .values()
                .any(|verdict| matches!(verdict.state, VerdictState::Recovering { .. }))
        };
        let _ = soon("its recovery", judgement.wait_for(|judgement| recovers(&judgement.verdicts)))
            .await
            .unwrap();
        // And again, in two ways at once.
        assert!(send_kernel_message(&app, None, Some(began("").as_bytes())));
        assert!(send_kernel_message(&app, Some(format!("4,3,2000,-;{line}").as_bytes()), None));
        let _ = soon(
            "its faults",
            judgement.wait_for(|judgement| {
                judgement.verdicts.values().any(|verdict| verdict.faults.len() == 2)
            }),
        )
        .await
        .unwrap();
        app.shut_down().await;

        std::fs::write(&boot_id, "second\n").unwrap();
        let app = node.start_app().await;
        listed(&kubelet, &gpu(), (GPUS, 0)).await;
        let incidents =
            app.views.judgement.borrow().verdicts.values().next().unwrap().incidents.clone();
        assert!(incidents.len() == 1 && incidents[0].at > Timestamp(0), "{incidents:?}");
        app.shut_down().await;
    });
}

/// A receiver that never answers and keeps nothing.
struct NoReceiver;

impl Deliver<Rescan> for NoReceiver {
    fn call(&self, _: Rescan, _: Duration) -> BoxFuture<'static, Result<Duration, CallError>> {
        Box::pin(std::future::pending())
    }

    fn send(&self, _: Rescan) {}
}

impl Deliver<RecordVerdicts> for NoReceiver {
    fn call(
        &self,
        _: RecordVerdicts,
        _: Duration,
    ) -> BoxFuture<'static, Result<<RecordVerdicts as Message>::Result, CallError>> {
        Box::pin(std::future::pending())
    }

    fn send(&self, _: RecordVerdicts) {}
}

/// The actor alone, with two devices `a` and `b`, its inputs and its published views.
struct StandaloneHealth {
    inventory: watch::Receiver<Arc<Inventory>>,
    lists: watch::Receiver<Arc<Inventory>>,
    judgement: watch::Receiver<Judgement>,
    kubelet: watch::Sender<Option<KubeletGeneration>>,
    grants: watch::Sender<Arc<Vec<Arc<Grant>>>>,
    /// Triggers a scan that finds both.
    scan: Box<dyn Fn()>,
    _due: Box<dyn std::any::Any>,
}

impl StandaloneHealth {
    fn start(
        probe_device: impl Fn(&Device) -> Signals + Send + Sync + 'static,
        remembered: Verdicts,
        held: &[&str],
    ) -> StandaloneHealth {
        Self::polling(Duration::from_secs(1), probe_device, remembered, held)
    }

    fn polling(
        poll: Duration,
        probe_device: impl Fn(&Device) -> Signals + Send + Sync + 'static,
        remembered: Verdicts,
        held: &[&str],
    ) -> StandaloneHealth {
        let device = |id: &str, address: &str| Device {
            id: DeviceId::new(id),
            key: id.into(),
            class: DeviceClass::Rdma,
            pci: Some(Box::new(PciFunction::at(address.parse().unwrap()))),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        let spec = Arc::new(ResourceSpec::new(gpu(), DeviceClass::Rdma));
        let grants = held.iter().map(|id| Arc::new(holder(id)));
        let (inventory, inventory_view) = watch::channel(Arc::default());
        let (judgement, judgement_view) =
            watch::channel(Judgement { verdicts: Arc::new(remembered), ..Judgement::default() });
        let (kubelet, kubelet_view) = watch::channel(None);
        let (grants, grants_view) = watch::channel(Arc::new(grants.collect::<Vec<_>>()));
        let (due, due_view) = watch::channel(Arc::default());
        let (lists, lists_view) = watch::channel(Arc::default());
        let health = HealthPolicy { poll, ..HealthPolicy::default() };
        let plan =
            Arc::new(Plan { specs: Arc::from([Arc::clone(&spec)]), health, ..Plan::default() });
        let config = HealthConfig {
            plan: watch::channel(Arc::clone(&plan)).1,
            boot_id: "boot".into(),
            leave_after: Duration::from_secs(60),
            listed: Arc::default(),
            grants: grants_view,
            due: due_view,
            mps: watch::channel(Arc::default()).1,
            kubelet: kubelet_view,
            inventory: Arc::new(inventory),
            lists: Arc::new(lists),
            judgement: Arc::new(judgement),
            probe_device: Arc::new(probe_device),
            rescan: Mailbox::new(NoReceiver),
            ledger: Mailbox::new(NoReceiver),
        };
        let actor = HealthActor::new(config, ()).start();
        let devices = [device("a", "0000:01:00.0"), device("b", "0000:02:00.0")]
            .map(|device| (device.id.clone(), Arc::new(device)));
        let evidence = Evidence {
            began: host::now(),
            selected: [(gpu(), devices.iter().map(|(id, _)| id.clone()).collect())].into(),
            devices: devices.into(),
            missing_nodes: Default::default(),
            unfulfilled: Default::default(),
            unread: Default::default(),
        };
        let scan = Box::new(move || {
            let evidence = Evidence { began: host::now(), ..evidence.clone() };
            actor
                .try_send(Discovered { evidence: Arc::new(evidence), plan: Arc::clone(&plan) })
                .unwrap();
        });
        scan();
        StandaloneHealth {
            inventory: inventory_view,
            lists: lists_view,
            judgement: judgement_view,
            kubelet,
            grants,
            scan,
            _due: Box::new(due),
        }
    }

    /// Waits until both devices have these states: the reason, or none.
    async fn shows(&mut self, wanted: [Option<Reason>; 2]) {
        let seen = |inventory: &Arc<Inventory>| reasons(inventory) == wanted;
        let _ = soon("the inventory", self.inventory.wait_for(seen)).await.unwrap();
    }

    /// The same for the kubelet's list.
    async fn lists(&mut self, wanted: [Option<Reason>; 2]) {
        let seen = |lists: &Arc<Inventory>| reasons(lists) == wanted;
        let _ = soon("the list", self.lists.wait_for(seen)).await.unwrap();
    }
}

/// What each device has.
fn reasons(inventory: &Inventory) -> Vec<Option<Reason>> {
    let offered = inventory.resources.values().flat_map(|offering| offering.devices.values());
    offered.map(|offered| Health::reason(offered.health)).collect()
}

/// A claim makes its device unhealthy in the list, and its release makes it healthy again. Nothing
/// else causes a list here: the next poll is far away.
#[test]
fn the_list_follows_the_claims_at_once() {
    run(async {
        let far = Duration::from_secs(3600);
        let mut health =
            StandaloneHealth::polling(far, |_| Signals::default(), Verdicts::default(), &[]);
        health.lists([None, None]).await;
        let claim = ClaimRef { uid: "u".into(), namespace: "n".into(), name: "c".into() };
        let hold = ClaimHold { claim, allocation: "digest".into(), devices: Vec::new() };
        let held = Grant { claim: Some(Arc::new(hold)), ..holder("b") };
        health.grants.send_replace(Arc::new(vec![Arc::new(held)]));
        health.lists([None, Some(Reason::Deselected)]).await;
        health.grants.send_replace(Arc::default());
        health.lists([None, None]).await;
    });
}

fn symptom(reason: Reason) -> Signals {
    Signals { symptoms: [Symptom { reason, detail: "seen".into() }].into(), ..Signals::default() }
}

#[test]
fn a_stuck_probe_affects_only_its_own_device_until_it_returns() {
    run(async {
        // A pipe in place of a file of sysfs: a read blocks, as with a driver that does not answer.
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let read = file.clone();
        let probe_device = move |device: &Device| {
            if device.id.as_str() == "a" {
                let text = std::fs::read_to_string(&read).unwrap();
                return if text == "live\n" {
                    Signals::default()
                } else {
                    symptom(Reason::NvmeDead)
                };
            }
            symptom(Reason::OffTheBus)
        };
        // It has hung until its patience is nearly over.
        let stuck = Verdict {
            boot_id: "boot".into(),
            state: VerdictState::Suspect { reason: Reason::ProbeStuck, since: Duration::ZERO },
            ..Verdict::default()
        };
        let mut health =
            StandaloneHealth::start(probe_device, [(DeviceId::new("a"), stuck)].into(), &[]);
        health.shows([Some(Reason::ProbeStuck), Some(Reason::OffTheBus)]).await;
        // The probe that hangs ends, and the next one finds the file in its place.
        let mut pipe = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "live\n").unwrap();
        std::io::Write::write_all(&mut pipe, b"live\n").unwrap();
        drop(pipe);
        let recovers = |judgement: &Judgement| {
            let state = judgement.verdicts.get(&DeviceId::new("a")).map(|verdict| verdict.state);
            matches!(state, Some(VerdictState::Recovering { reason: Reason::ProbeStuck, .. }))
        };
        let has_recovered = async {
            // The result counts when a scan and a probe are newer than the one that hung.
            while !recovers(&health.judgement.borrow_and_update()) {
                (health.scan)();
                drop(
                    tokio::time::timeout(Duration::from_millis(100), health.judgement.changed())
                        .await,
                );
            }
        };
        soon("its recovery", has_recovered).await;
        health.shows([Some(Reason::ProbeStuck), Some(Reason::OffTheBus)]).await;
    });
}

#[test]
fn a_kubelet_gets_soft_failures_of_held_devices_after_running_for_a_minute() {
    run(async {
        let down = |since| Verdict {
            boot_id: "boot".into(),
            state: VerdictState::Suspect { reason: Reason::PortDown, since },
            ..Verdict::default()
        };
        let remembered: Verdicts =
            ["a", "b"].map(|id| (DeviceId::new(id), down(Duration::ZERO))).into();
        let started = |age: Duration| {
            let now = i64::try_from(host::now().wall.0 * 1_000_000).unwrap();
            Some(KubeletGeneration {
                inode: 1,
                made_ns: now - i64::try_from(age.as_nanos()).unwrap(),
            })
        };
        let mut health = StandaloneHealth::start(|_| symptom(Reason::PortDown), remembered, &["a"]);
        health.shows([Some(Reason::PortDown), Some(Reason::PortDown)]).await;
        health.kubelet.send_replace(started(Duration::from_secs(1)));
        health.shows([None, Some(Reason::PortDown)]).await;
        let of_a = health.judgement.borrow().verdicts[&DeviceId::new("a")].health();
        assert_eq!(of_a, Health::Unhealthy(Reason::PortDown), "it is known");
        health.kubelet.send_replace(started(Duration::from_millis(59_500)));
        health.shows([Some(Reason::PortDown), Some(Reason::PortDown)]).await;
    });
}

/// A grant that holds this device.
fn holder(id: &str) -> Grant {
    let device = GrantedDevice {
        id: DeviceId::new(id),
        key: id.into(),
        numa_nodes: Vec::new(),
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Grant {
        alloc_id: AllocId::new("a-1"),
        resource: gpu(),
        devices: vec![device],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state: GrantState::Granted,
    }
}
