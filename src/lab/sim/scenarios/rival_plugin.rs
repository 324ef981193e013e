//! A foreign plugin of the same resource, as an old DaemonSet may leave it on a node. It has one
//! socket with a fixed name, registers it at random times, is killed after its stay and leaves its
//! file behind.
//!
//! Its answers to the kubelet are not Holdfast's: the oracles excuse exactly these answers.

use super::hardware::gpu;
use crate::domain::{ContainerEdits, DeviceId};
use crate::lab::sim::kubelet::core::{ListedDevice, Options};
use crate::lab::sim::memory::{
    Bound, ConnectionId, ListStream, Node, Plugin, Process, RegisterError, RegisterRequest,
};
use crate::lab::sim::random::Random;
use futures_util::StreamExt as _;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tonic::Status;

/// Its socket, directly in the kubelet's directory, as old plugins have it.
const SOCKET: &str = "rival.sock";

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// The time until it notices that it has lost the resource.
const NOTICED: Duration = Duration::from_millis(50);

/// The behaviour of a foreign plugin.
#[derive(Debug, Clone, Copy)]
pub(super) struct Habits {
    /// The longest time between two of its Registers.
    register_interval_max: Duration,
    /// Whether it registers as soon as one of its streams ends.
    pub(super) registers_on_loss: bool,
    /// The probability that it recreates its socket before it registers, which ends its streams.
    rebinds: f64,
}

impl Habits {
    pub(super) fn draw(random: &mut Random) -> Self {
        let register_interval_max = random.between(50 * MS, 3 * SECOND);
        Habits {
            register_interval_max,
            registers_on_loss: random.chance(0.5),
            rebinds: if random.chance(0.5) { 0.0 } else { 0.3 },
        }
    }
}

/// Starts now with devices of its own, registers once and stays, like a plugin that was deployed by
/// mistake.
pub(super) fn run_forever(node: &Node, version: &'static str, answers: &Answers) {
    let process = node.process();
    let devices = (0..4).map(|n| ListedDevice {
        id: DeviceId::new(format!("vendor-{n}")),
        healthy: true,
        numa_nodes: Vec::new(),
    });
    let rival = Arc::new(RivalPlugin {
        node: node.clone(),
        devices: devices.collect(),
        answers: answers.clone(),
        lost: Arc::default(),
    });
    let socket = process.clone();
    process.spawn(async move {
        let Ok(_bound) = socket.bind(SOCKET, Arc::clone(&rival) as Arc<_>) else { return };
        let _ = rival.register(version).await;
        std::future::pending::<()>().await;
    });
}

/// The ids of each container that it answered for, until the oracles match them with a container.
#[derive(Debug, Clone, Default)]
pub(super) struct Answers(Arc<Mutex<Vec<BTreeSet<DeviceId>>>>);

impl Answers {
    /// Whether it gave such an id to a container that is not matched yet.
    pub(super) fn has(&self, fits: impl Fn(&DeviceId) -> bool) -> bool {
        self.0.lock().unwrap().iter().flatten().any(fits)
    }

    /// Whether it gave exactly these ids to a container that is not matched yet. Each answer counts
    /// once.
    pub(super) fn take(&self, ids: &BTreeSet<DeviceId>) -> bool {
        let mut answers = self.0.lock().unwrap();
        let found = answers.iter().position(|answer| answer == ids);
        found.map(|index| answers.remove(index)).is_some()
    }
}

/// Starts now and stays for a time; then it is killed at any point of its work.
pub(super) fn run_until_killed(
    node: &Node,
    version: &'static str,
    devices: Vec<DeviceId>,
    habits: Habits,
    stay: Duration,
    answers: &Answers,
) {
    let process = node.process();
    // It does not rescan: its list is always the same.
    let devices = devices
        .into_iter()
        .map(|id| ListedDevice { id, healthy: true, numa_nodes: Vec::new() })
        .collect();
    let rival = Arc::new(RivalPlugin {
        node: node.clone(),
        devices,
        answers: answers.clone(),
        lost: Arc::default(),
    });
    process.spawn(rival.serve(process.clone(), version, habits));
    let handle = node.handle().clone();
    node.handle().spawn(async move {
        handle.sleep(stay).await;
        process.kill();
    });
}

struct RivalPlugin {
    node: Node,
    devices: Vec<ListedDevice>,
    answers: Answers,
    /// Notified when one of its streams ends.
    lost: Arc<Notify>,
}

impl RivalPlugin {
    async fn serve(self: Arc<Self>, process: Process, version: &'static str, habits: Habits) {
        let handle = self.node.handle();
        let mut kubelet = self.node.kubelet_socket();
        let mut bound: Option<Bound> = None;
        loop {
            kubelet.borrow_and_update();
            let rebinds = handle.random(|random| random.chance(habits.rebinds));
            // The kubelet removes the socket at every start.
            if rebinds || !bound.as_ref().is_some_and(Bound::is_linked) {
                bound.into_iter().for_each(Bound::close);
                self.node.unlink(SOCKET);
                bound = process.bind(SOCKET, Arc::clone(&self) as Arc<_>).ok();
            }
            // It tries again in any case.
            let _ = handle.timeout(SECOND, self.register(version)).await;
            let pause = handle.random(|random| random.between(MS, habits.register_interval_max));
            tokio::select! {
                biased;
                _ = kubelet.changed() => {}
                () = self.lost.notified(), if habits.registers_on_loss => handle.sleep(NOTICED).await,
                () = handle.sleep(pause) => {}
            }
        }
    }
}

impl RivalPlugin {
    async fn register(&self, version: &str) -> Result<(), RegisterError> {
        let request = RegisterRequest {
            version: version.into(),
            resource: gpu().to_string(),
            endpoint: SOCKET.into(),
            options: None,
        };
        self.node.register(request).await
    }
}

/// Notifies of its stream's end when it is dropped.
struct Streaming(Arc<Notify>);

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[tonic::async_trait]
impl Plugin for RivalPlugin {
    async fn options(&self) -> Result<Options, Status> {
        Ok(Options { preferred_allocation: false, pre_start: false })
    }

    async fn list_and_watch(&self, _: ConnectionId) -> Result<ListStream, Status> {
        let streaming = Streaming(Arc::clone(&self.lost));
        let lists = futures_util::stream::iter([self.devices.clone()])
            .chain(futures_util::stream::pending());
        // The guard is owned by the stream.
        Ok(lists.inspect(move |_| _ = &streaming).boxed())
    }

    async fn preferred(
        &self,
        _: Vec<DeviceId>,
        _: Vec<DeviceId>,
        _: usize,
    ) -> Result<BTreeSet<DeviceId>, Status> {
        Err(Status::unimplemented("not offered"))
    }

    async fn allocate(&self, ids: Vec<DeviceId>) -> Result<Option<ContainerEdits>, Status> {
        self.answers.0.lock().unwrap().push(ids.into_iter().collect());
        Ok(Some(ContainerEdits::default()))
    }

    async fn pre_start(&self, _: Vec<DeviceId>) -> Result<(), Status> {
        Ok(())
    }
}
