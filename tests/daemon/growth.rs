//! Many grants that come and go: the ledger stays within `history_size` at every moment, and an
//! Allocate does not become slower. Many devices that come and go: the ledger and health forget
//! those that were removed.
//!
//! `HOLDFAST_GRANTS` is the number of grants, `HOLDFAST_HISTORY_MIB` the size of the history,
//! `HOLDFAST_BIN` another binary, such as the release build. The duration of an Allocate is
//! measured and judged only with `HOLDFAST_JUDGE_TIMES`, because the machine may be busy.

use crate::common::{Node, allocate, dial, name, offered, pause, resource, run, soon};
use actix::{Actor, Arbiter};
use futures_util::future::BoxFuture;
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, Entry, Evidence, Grant, GrantState,
    GrantedDevice, Moment, Timestamp, Unread,
};
use holdfast::kubelet::checkpoint::CheckpointReader;
use holdfast::kubelet::pod_resources::PodResources;
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::lab::sim::kubelet::{PodPhase, PodSpec};
use holdfast::ledger::{LedgerActor, LedgerConfig};
use holdfast::messages::{CallError, Deliver, Forget, Found, Mailbox, Remember};
use holdfast::store::{self, Store};
use nix::sys::signal::Signal;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tonic::transport::Channel;

const MIB: u64 = 1024 * 1024;
/// Devices, and pods that run at a time.
const DEVICES: usize = 64;
const PODS: usize = 48;
/// The grants from one count of the live ones to the next.
const SAMPLED: usize = 50;
/// Allocates in each round.
const COMPARED: usize = 1000;
/// Rounds. The lowest percentile of them counts: other work of the machine can only raise it.
const ROUNDS: usize = 3;
/// The pause before each Allocate. A kubelet finds the daemon idle.
const PAUSE: Duration = Duration::from_millis(3);

fn asked(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The bytes of all files below a directory, which others write meanwhile.
fn size(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| {
            entry
                .metadata()
                .map_or(0, |about| if about.is_dir() { size(&entry.path()) } else { about.len() })
        })
        .sum()
}

/// Reads the size of a directory all the time.
struct Watch {
    most: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    watching: thread::JoinHandle<()>,
}

impl Watch {
    fn begin(dir: PathBuf) -> Self {
        let (most, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, end) = (Arc::clone(&most), Arc::clone(&ends));
        let watching = thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                seen.fetch_max(size(&dir), Ordering::Relaxed);
                thread::park_timeout(Duration::from_millis(2));
            }
        });
        Watch { most, ends, watching }
    }

    fn end(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.watching.join().unwrap();
        self.most.load(Ordering::Relaxed)
    }
}

/// The 99th percentiles of a lone client's Allocates at two daemons, in turn: other work of the
/// machine meets both. The lowest of several rounds counts.
async fn p99(apis: &mut [DevicePluginClient<Channel>; 2], id: &str) -> [Duration; 2] {
    let mut best = [Duration::MAX; 2];
    for _ in 0..ROUNDS {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..COMPARED {
            for (api, times) in apis.iter_mut().zip(&mut times) {
                tokio::time::sleep(PAUSE).await;
                let began = Instant::now();
                allocate(api, &[id]).await.unwrap();
                times.push(began.elapsed());
            }
        }
        for (best, times) in best.iter_mut().zip(&mut times) {
            times.sort_unstable();
            *best = times[times.len() * 99 / 100].min(*best);
        }
    }
    best
}

/// The number of released grants in the history.
fn history_length(node: &Node) -> usize {
    let history = node.json(&["history"]);
    assert!(history["problem"].is_null(), "{}", history["problem"]);
    let grants = history["grants"].as_array().unwrap();
    grants.iter().filter(|grant| grant["state"] == "released").count()
}

#[test]
fn the_state_directory_stays_below_four_times_the_history() {
    run(async {
        let grants = usize::try_from(asked("HOLDFAST_GRANTS", 2000)).unwrap();
        let history = asked("HOLDFAST_HISTORY_MIB", 4);
        let node = Node::with(&[("gpu", DEVICES), ("probe", 1)]);
        let resources = resource("gpu") + &resource("probe");
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n[ledger]\nhistory_size = \"{history}MiB\"\n{resources}"
        ));
        let [gpu, probe] = ["example.com/gpu", "example.com/probe"].map(name);
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu, DEVICES).await;
        offered(&kubelet, &probe, 1).await;
        let api = dial(&kubelet, &node, &probe).await;
        let is_judged = std::env::var_os("HOLDFAST_JUDGE_TIMES").is_some();
        let watch = Watch::begin(node.state());
        let (mut pods, began) = (VecDeque::new(), Instant::now());
        let mut most_live = 0;
        for n in 0..grants {
            let pod = PodSpec::new("team", format!("train-{n}")).app("main", &gpu, 1);
            let added = kubelet.add_pod(pod).await;
            assert_eq!(added.phase, PodPhase::Running, "{n}");
            pods.push_back(added.uid);
            if pods.len() > PODS {
                assert!(kubelet.delete_pod(&pods.pop_front().unwrap()).unwrap());
            }
            if n % SAMPLED == 0 {
                most_live = node.grants().len().max(most_live);
            }
            if n % 10_000 == 9_999 {
                println!(
                    "{} grants, {:?}, {} KiB",
                    n + 1,
                    began.elapsed(),
                    size(&node.state()) / 1024
                );
            }
        }
        let took = began.elapsed();
        // The kubelet answers on this thread. A pod that ended before a pass saw it is released
        // after a minute; those few are not waited for.
        let released = async {
            while node.grants().len() > 4 * PODS {
                pause().await;
            }
        };
        let released = tokio::time::timeout(3 * crate::common::HANG, released).await;
        assert!(released.is_ok(), "{} grants are live", node.grants().len());
        let most = watch.end();
        let now = size(&node.state());
        println!(
            "{grants} grants in {took:?} with history_size = {history} MiB: the state directory had {:.1} MiB at most and has {:.1}",
            most as f64 / MIB as f64,
            now as f64 / MIB as f64,
        );
        let most_allowed = 4 * history * MIB;
        assert!(most <= most_allowed, "{} KiB, of at most {}", most / 1024, most_allowed / 1024);
        if is_judged {
            // A daemon whose ledger is new.
            let other = Node::with(&[("probe", 1)]);
            let other_kubelet = other.start_old_kubelet(other.kubelet_config()).await;
            let _other_daemon = other.start_daemon();
            offered(&other_kubelet, &probe, 1).await;
            let mut apis = [dial(&other_kubelet, &other, &probe).await, api];
            let [new, old] = p99(&mut apis, "dev:probe0").await;
            println!(
                "Allocate p99 of {COMPARED}, the best of {ROUNDS} rounds, with a new ledger: {new:?}, after the grants: {old:?}"
            );
            assert!(old.as_secs_f64() <= 1.2 * new.as_secs_f64(), "{old:?} against {new:?}");
        }
        let released = history_length(&node);
        // A grant of one device takes less than 1 KiB there, and the live grants take theirs.
        let remembered = ((history * MIB / 3 / 1024) as usize).saturating_sub(most_live + SAMPLED);
        assert!(
            released >= (grants - 4 * PODS).min(remembered),
            "{released} released grants are remembered, with {most_live} live ones at most"
        );
        daemon.signal(Signal::SIGTERM);
        daemon.ended().await;
    });
}

/// Takes what health would forget.
struct Health(mpsc::UnboundedSender<Vec<DeviceId>>);

impl Deliver<Forget> for Health {
    fn call(&self, message: Forget, _: Duration) -> BoxFuture<'static, Result<(), CallError>> {
        self.send(message);
        Box::pin(std::future::ready(Ok(())))
    }

    fn send(&self, Forget(devices): Forget) {
        self.0.send(devices).unwrap();
    }
}

/// A scan that found nothing, and could not read this.
fn nothing_found(unread: Unread) -> Found {
    Found(Arc::new(Evidence {
        began: Moment { boot: Duration::ZERO, wall: Timestamp(0) },
        devices: BTreeMap::new(),
        selected: BTreeMap::new(),
        missing_nodes: BTreeSet::new(),
        unfulfilled: BTreeMap::new(),
        unread,
    }))
}

#[test]
fn removed_devices_are_forgotten_unless_they_are_held_or_unreadable() {
    run(async {
        let (arbiter, dir) = (Arbiter::new(), tempfile::tempdir().unwrap());
        let (mut store, _) =
            Store::open(&dir.path().join("state"), Durability::PowerLoss, None).unwrap();
        let key = |n: usize| {
            (format!("dev:/dev/sensor-{n:04}"), DeviceId::new(format!("dev:sensor-{n:04}")))
        };
        // The first one would leave first.
        let device = GrantedDevice {
            id: key(0).1,
            key: key(0).0,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        };
        let held = Grant {
            alloc_id: AllocId::new("a"),
            resource: name("example.com/sensor"),
            devices: vec![device],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: GrantState::Granted,
        };
        store.append(&[Entry::Grant(Arc::new(held))]).unwrap();
        let (names, mut named) = watch::channel(Arc::default());
        let (forget, mut forgotten) = mpsc::unbounded_channel();
        let config = LedgerConfig {
            kept: Arc::new(watch::Sender::new(store.kept())),
            store: Arc::new(Mutex::new(store)),
            recovered: Arc::default(),
            process_crash: false,
            plan: watch::channel(Arc::default()).1,
            grants: Arc::default(),
            due: Arc::default(),
            forget: Some(Mailbox::new(Health(forget))),
            names: Arc::new(names),
            inventory: watch::channel(Arc::default()).1,
            checkpoint: CheckpointReader::new(dir.path().join("device-plugins")),
            pod_resources: PodResources::new(dir.path().join("pod-resources.sock")),
            host_root: dir.path().join("host"),
            boot_id: "boot".into(),
            kubelet: watch::channel(None).1,
            claims: watch::channel(Arc::default()).1,
            gate: Arc::default(),
            resend: Arc::default(),
        };
        let ledger =
            LedgerActor::start_in_arbiter(&arbiter.handle(), move |_| LedgerActor::new(config, ()));
        ledger.send(Remember((0..400).map(key).collect())).await.unwrap().unwrap();
        let unread = Unread {
            resources: [(name("example.com/sensor"), "EIO".into())].into(),
            ..Unread::default()
        };
        // A device that is no node, and that this scan could search for: once it is removed, the
        // check is done.
        let pci = ("pci:0000:3b:00.0/10de:2330".to_owned(), DeviceId::new("GPU-1"));
        ledger.send(Remember(vec![pci])).await.unwrap().unwrap();
        ledger.send(nothing_found(unread)).await.unwrap();
        let gone = async {
            while store::peek(&dir.path().join("state")).unwrap().gone.is_empty() {
                pause().await;
            }
        };
        soon("a look", gone).await;
        assert_eq!(named.borrow_and_update().len(), 401, "what could not be read has not gone");
        ledger.send(nothing_found(Unread::default())).await.unwrap();
        let left =
            soon("the look", named.wait_for(|names| names.len() < 401)).await.unwrap().clone();
        let devices = soon("health learns of it", forgotten.recv()).await.unwrap();
        // 256 have gone and are remembered, one of them the GPU; one is held.
        assert_eq!((left.len(), devices.len()), (257, 144));
        assert_eq!(left.get(&key(0).0), Some(&key(0).1), "what a container holds has not gone");
        assert_eq!(*left, store::peek(&dir.path().join("state")).unwrap().names);
        arbiter.stop();
    });
}
