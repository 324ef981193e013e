//! The time until a device's failure is in the kubelet's list. One part runs the whole daemon with
//! a simulated host kernel below all its readers. The other runs on virtual time, where the bounds
//! of `docs/health.md` hold to the millisecond.
//!
//! `HOLDFAST_ROUNDS` is the number of rounds of `the_time_from_a_failure_to_its_list_is_printed`:
//! eight devices each.

use crate::common::{Daemon, HANG, Node, name, percentiles, run};
use holdfast::domain::{
    DeviceClass, DeviceEvent, DeviceId, EventKind, HealthPolicy, Reason, ResourceName,
    ResourceSpec, VerdictState,
};
use holdfast::host::{HostRoot, SIMULATED_EVENTS};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use holdfast::lab::sim::health::HealthSimulation;
use holdfast::lab::sim::kubelet::Kubelet;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::socket::{self, AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time between two lists of a resource (`serving/plugin.rs`).
const LISTS_APART: Duration = Duration::from_millis(50);
/// The values that a function reads as when it has fallen off the bus.
const ONES: [u8; 64] = [0xff; 64];

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

/// A machine with GPUs, and its kernel.
struct Machine {
    node: Node,
    host: SimNode,
    /// A terminal in place of `/dev/kmsg`: each typed line is one read.
    log: OpenptyResult,
    listener: OwnedFd,
}

impl Machine {
    fn new(poll: &str) -> Machine {
        let node = Node::new();
        let host = SimNode::create(node.path("host")).unwrap();
        let resource = "[[resource]]\nname = \"example.com/gpu\"\nclass = \"gpu\"\n";
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n[health]\npoll = \"{poll}\"\n{resource}"
        ));
        let log = openpty(None, None).unwrap();
        symlink(nix::unistd::ttyname(&log.slave).unwrap(), host.root().join("dev/kmsg")).unwrap();
        let events = host.root().join(SIMULATED_EVENTS);
        fs::create_dir_all(events.parent().unwrap()).unwrap();
        let listener =
            socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
                .unwrap();
        socket::bind(listener.as_raw_fd(), &UnixAddr::new(&events).unwrap()).unwrap();
        socket::listen(&listener, Backlog::new(1).unwrap()).unwrap();
        Machine { node, host, log, listener }
    }

    /// The daemon and its kubelet when all GPUs are offered, and the channel of the kernel's events
    /// to the daemon.
    async fn start(&self) -> (Kubelet, Daemon, Events) {
        let kubelet = self.node.start_kubelet().await;
        let daemon = self.node.start_daemon();
        crate::common::offered(&kubelet, &gpu(), GPUS).await;
        let events = Events(socket::accept(self.listener.as_raw_fd()).unwrap());
        (kubelet, daemon, events)
    }

    /// Writes a line of the log; a priority below 8 marks it as the kernel's own.
    fn logs(&self, priority: u32, line: &str) {
        nix::unistd::write(&self.log.master, format!("{priority},7,1000,-;{line}\n").as_bytes())
            .unwrap();
    }

    fn xid(&self, gpu: usize, code: u32) -> String {
        let slot = self.host.gpu_address(gpu).to_string();
        format!(
            "NVRM: Xid (PCI:{}): {code}, pid=1, GPU has fallen off the bus.",
            slot.strip_suffix(".0").unwrap()
        )
    }

    /// An event of a GPU's function, or of a device below it.
    fn event(&self, gpu: usize, below: &str, fields: &str) -> String {
        let folder = self.file(gpu, "").canonicalize().unwrap();
        let path = folder.to_str().unwrap().split_once("/sys/").unwrap().1.to_owned();
        format!("change@/{path}{below}\0ACTION=change\0{}\0SEQNUM=7\0", fields.replace(' ', "\0"))
    }

    fn file(&self, gpu: usize, file: &str) -> PathBuf {
        self.host.root().join(format!("sys/bus/pci/devices/{}/{file}", self.host.gpu_address(gpu)))
    }

    fn id(&self, gpu: usize) -> DeviceId {
        DeviceId::new(self.host.gpu_uuid(gpu))
    }
}

/// The channel of the kernel's events to one daemon.
struct Events(RawFd);

impl Events {
    fn send(&self, event: &str) {
        socket::send(self.0, event.as_bytes(), MsgFlags::empty()).unwrap();
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        nix::unistd::close(self.0).unwrap();
    }
}

/// Waits until exactly these are unhealthy in the list.
async fn unhealthy(kubelet: &Kubelet, machine: &Machine, gpus: impl IntoIterator<Item = usize>) {
    let gone: BTreeSet<DeviceId> = gpus.into_iter().map(|gpu| machine.id(gpu)).collect();
    let healthy: BTreeSet<DeviceId> =
        (0..GPUS).map(|gpu| machine.id(gpu)).filter(|id| !gone.contains(id)).collect();
    kubelet
        .wait_for(|view| view.endpoint_state(&gpu()).healthy == healthy, HANG)
        .await
        .unwrap_or_else(|error| panic!("{gone:?}: {error}"));
}

#[test]
fn kernel_events_reach_the_kubelets_list_and_forged_ones_do_not() {
    run(async {
        // The poll is too slow to matter here.
        let machine = Machine::new("60s");
        let (kubelet, _daemon, events) = machine.start().await;
        let (began, failed) = (
            "SUBSYSTEM=pci ERROR_EVENT=BEGIN_RECOVERY",
            "SUBSYSTEM=pci ERROR_EVENT=FAILED_RECOVERY",
        );
        let wedged = "SUBSYSTEM=drm DEVNAME=dri/card3 WEDGED=rebind,bus-reset";
        // No failures of the first GPU: lines of other processes, repeated events of udev, and
        // events that are no failure.
        machine.logs(12, &machine.xid(0, 79));
        machine.logs(4, &machine.xid(0, 13));
        machine.logs(4, &format!("hello: {}", machine.xid(0, 79)));
        events.send(&machine.event(0, "", &format!("{began} SYNTH_UUID=0")));
        events.send(&machine.event(
            0,
            "/drm/card0",
            &format!("{wedged} SYNTH_UUID=fe4d7c9d-b8c6-4a70-9ef1-3d8a58d18eed"),
        ));
        events.send(&machine.event(0, "/drm/card0", "SUBSYSTEM=drm HOTPLUG=1"));
        events.send(&format!("libudev\0{}", machine.event(0, "", began)));
        // The kernel's own messages, about the other GPUs. Earlier messages are read earlier.
        machine.logs(4, &machine.xid(1, 79));
        unhealthy(&kubelet, &machine, [1]).await;
        events.send(&machine.event(2, "", began));
        unhealthy(&kubelet, &machine, [1, 2]).await;
        events.send(&machine.event(3, "/drm/card3", wedged));
        unhealthy(&kubelet, &machine, [1, 2, 3]).await;
        events.send(&machine.event(4, "", began));
        events.send(&machine.event(4, "", failed));
        unhealthy(&kubelet, &machine, [1, 2, 3, 4]).await;
        let shown = |gpu: usize| {
            machine.node.json(&["device", "show", machine.id(gpu).as_str()])["devices"][0].clone()
        };
        for (gpu, reason) in
            [(1, "xid"), (2, "error_recovery"), (3, "wedged"), (4, "recovery_failed")]
        {
            assert_eq!(
                (&shown(gpu)["health"], &shown(gpu)["reason"]),
                (&"Unhealthy".into(), &reason.into()),
                "{gpu}"
            );
        }
        for gpu in [0, 5] {
            assert_eq!(
                (&shown(gpu)["health"], &shown(gpu)["state"]),
                (&"Healthy".into(), &"healthy".into()),
                "{gpu}"
            );
        }
    });
}

/// Prints the time from a failure to its list. No figure is asserted, since the machine may be
/// busy.
#[test]
fn the_time_from_a_failure_to_its_list_is_printed() {
    let rounds = std::env::var("HOLDFAST_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap());
    let (mut logged, mut heard, mut polled) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        run(async {
            let machine = Machine::new("1s");
            let (kubelet, _daemon, events) = machine.start().await;
            for gpu in 0..GPUS {
                // A change right after another list would wait for the rate limit.
                tokio::time::sleep(LISTS_APART * 2).await;
                let began = Instant::now();
                let times = match gpu % 4 {
                    0 => {
                        machine.logs(4, &machine.xid(gpu, 79));
                        &mut logged
                    }
                    1 | 2 => {
                        events.send(&machine.event(
                            gpu,
                            "/drm/card3",
                            "SUBSYSTEM=drm WEDGED=bus-reset",
                        ));
                        &mut heard
                    }
                    _ => {
                        fs::write(machine.file(gpu, "config"), ONES).unwrap();
                        &mut polled
                    }
                };
                unhealthy(&kubelet, &machine, 0..=gpu).await;
                times.push(began.elapsed());
            }
        });
    }
    println!("Xid record → list ({}): {}", logged.len(), percentiles(logged));
    println!("uevent → list ({}): {}", heard.len(), percentiles(heard));
    println!(
        "config reads ones → list, polled every second ({}): {}",
        polled.len(),
        percentiles(polled)
    );
}

/// The same machine with the judge alone, on virtual time.
fn simulate(host: &SimNode, poll: u64) -> HealthSimulation {
    let spec = Arc::new(ResourceSpec::new(gpu(), DeviceClass::Gpu));
    let policy = HealthPolicy { poll: secs(poll), ..HealthPolicy::default() };
    HealthSimulation::start(HostRoot::new(host.root()), vec![spec], policy, secs(900))
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn simulated() -> (SimNode, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (SimNode::create(dir.path()).unwrap(), dir)
}

/// The number of changes of the list until then, with `act` in every step.
fn lists(
    simulation: &mut HealthSimulation,
    until: Duration,
    step: Duration,
    mut act: impl FnMut(&mut HealthSimulation),
) -> usize {
    let (mut lists, mut before) = (0, simulation.unhealthy());
    while simulation.now() < until {
        act(simulation);
        simulation.advance(simulation.now() + step);
        let now = simulation.unhealthy();
        lists += usize::from(now != before);
        before = now;
    }
    lists
}

#[test]
fn polled_failures_show_at_the_next_tick_and_events_at_once() {
    let (host, _dir) = simulated();
    let config = host.root().join(format!("sys/bus/pci/devices/{}/config", host.gpu_address(0)));
    let id = DeviceId::new(host.gpu_uuid(0));
    for poll in [1, 10, 60] {
        for tenth in 0..10 {
            let mut simulation = simulate(&host, poll);
            let last_tick = secs(960);
            simulation.advance(last_tick + secs(poll) * tenth / 10);
            fs::write(&config, ONES).unwrap();
            simulation.advance(last_tick + secs(poll) - Duration::from_millis(1));
            assert!(simulation.unhealthy().is_empty(), "every {poll} s, {tenth}");
            simulation.advance(last_tick + secs(poll));
            assert_eq!(
                simulation.unhealthy(),
                [(id.clone(), Reason::OffTheBus)].into(),
                "every {poll} s, {tenth}"
            );
            fs::remove_file(&config).unwrap();
        }
    }
    let mut simulation = simulate(&host, 60);
    simulation.advance(secs(967));
    simulation.deliver_event(&DeviceEvent {
        at: host.gpu_address(0),
        whole_slot: false,
        instance: None,
        kind: EventKind::Wedged("unknown".into()),
    });
    assert_eq!(
        (simulation.now(), simulation.unhealthy()),
        (secs(967), [(id, Reason::Wedged)].into())
    );
}

#[test]
fn a_flapping_device_is_listed_a_few_times_and_then_latched() {
    let (host, _dir) = simulated();
    let config = host.root().join(format!("sys/bus/pci/devices/{}/config", host.gpu_address(0)));
    let id = DeviceId::new(host.gpu_uuid(0));
    let poll = secs(10);
    let set = |is_bad: bool| {
        if is_bad { fs::write(&config, ONES).unwrap() } else { drop(fs::remove_file(&config)) }
    };

    // Bad at every second poll: it is never good for long enough.
    let mut bad = false;
    let mut every_poll = simulate(&host, 10);
    let count = lists(&mut every_poll, secs(900 + 300), poll, |_| {
        bad = !bad;
        set(bad);
    });
    assert_eq!(count, 1);

    // The worst case: good until its recovery is believed, and then bad again.
    let mut hidden = simulate(&host, 10);
    let count = lists(&mut hidden, secs(900 + 3600), poll, |simulation| {
        let verdict = simulation.verdict(&id).map(|verdict| verdict.state);
        set(matches!(verdict, None | Some(VerdictState::Healthy)));
    });
    assert_eq!(count, 9, "five failures, four recoveries");
    assert_eq!(hidden.unhealthy(), [(id.clone(), Reason::Flapping)].into());
    set(false);

    // A node that comes and goes, with a scan each time.
    let mut flapping = simulate(&host, 10);
    let mut there = true;
    let count = lists(&mut flapping, secs(910), Duration::from_millis(200), |simulation| {
        there = !there;
        if there {
            host.restore_gpu_node(0).unwrap();
        } else {
            host.remove_gpu_node(0).unwrap();
        }
        simulation.scan();
    });
    assert_eq!(count, 1, "it is not there for a second together");
}
