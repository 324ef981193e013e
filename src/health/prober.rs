//! Probes devices on threads of its own, since a probe may never return: a read of sysfs hangs if
//! the driver hangs.
//!
//! A round is a queue of devices and one thread that probes them. If a probe takes too long, its
//! device is stuck, and another thread continues with the queue. A stuck device is not probed again
//! before its probe has returned. The number of stuck threads is bounded.

use crate::domain::{Device, DeviceId, Moment, Signals};
use crate::host;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The deadline of a probe. A healthy one takes microseconds.
pub(crate) const PROBE_DEADLINE: Duration = Duration::from_secs(2);
/// The maximum number of stuck threads. At this number probing stops, which is logged.
const STUCK_MAX: usize = 8;

/// Probes one device. May block.
pub type ProbeDevice = Arc<dyn Fn(&Device) -> Signals + Send + Sync>;

/// The result of one probe.
#[derive(Debug)]
pub(super) struct Probed {
    pub(super) device: Arc<Device>,
    /// When it began: its result is not older.
    pub(super) at: Moment,
    pub(super) signals: Signals,
}

/// A probe that is running.
#[derive(Debug)]
struct RunningProbe {
    device: Arc<Device>,
    since: Instant,
    is_stuck: bool,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Arc<Device>>,
    /// By the thread's number.
    running: BTreeMap<u64, RunningProbe>,
    /// Threads that work on the queue: one, or none.
    working: usize,
    threads: u64,
    /// No thread could be started the last time, which was logged.
    spawn_failed: bool,
    probed: Vec<Probed>,
}

/// The prober: its queue, threads and results.
pub(super) struct Prober {
    probe_device: ProbeDevice,
    /// Called when a round has ended, or when a stuck probe has returned.
    notify: Arc<dyn Fn() + Send + Sync>,
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for Prober {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prober").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Prober {
    pub(super) fn new(
        probe_device: ProbeDevice,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Prober { probe_device, notify: Arc::new(notify), state: Arc::default() }
    }

    /// Adds devices to the end of the queue.
    pub(super) fn enqueue(&self, devices: Vec<Arc<Device>>) {
        let mut state = lock(&self.state);
        for device in devices {
            let is_known = state
                .queue
                .iter()
                .chain(state.running.values().map(|running| &running.device))
                .any(|known| known.id == device.id);
            if !is_known {
                state.queue.push_back(device);
            }
        }
        self.ensure_thread(&mut state);
    }

    /// The results since the last call.
    pub(super) fn take_results(&self) -> Vec<Probed> {
        std::mem::take(&mut lock(&self.state).probed)
    }

    /// Whether a round is running.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.state).working > 0
    }

    /// Marks probes beyond the deadline as stuck, and continues without them. Returns the stuck
    /// devices.
    pub(super) fn check_deadlines(&self) -> Vec<DeviceId> {
        let mut state = lock(&self.state);
        let late: Vec<u64> = state
            .running
            .iter()
            .filter(|(_, running)| !running.is_stuck && running.since.elapsed() >= PROBE_DEADLINE)
            .map(|(thread, _)| *thread)
            .collect();
        for thread in late {
            if let Some(running) = state.running.get_mut(&thread) {
                running.is_stuck = true;
                state.working -= 1;
            }
        }
        self.ensure_thread(&mut state);
        state
            .running
            .values()
            .filter(|running| running.is_stuck)
            .map(|running| running.device.id.clone())
            .collect()
    }

    /// Whether the maximum of probes is stuck, so that no device is probed any longer.
    pub(super) fn is_exhausted(&self) -> bool {
        let state = lock(&self.state);
        state.running.values().filter(|running| running.is_stuck).count() >= STUCK_MAX
    }

    /// Ensures that a thread works on the queue.
    fn ensure_thread(&self, state: &mut State) {
        let stuck = state.running.values().filter(|running| running.is_stuck).count();
        if state.working > 0 || state.queue.is_empty() || stuck >= STUCK_MAX {
            return;
        }
        let thread = state.threads;
        let (probe_device, notify, shared) =
            (Arc::clone(&self.probe_device), Arc::clone(&self.notify), Arc::clone(&self.state));
        let work = move || {
            host::lower_thread_priority();
            while let Some(probed) = probe_next(thread, &probe_device, &shared) {
                let was_stuck = finish(thread, probed, &shared);
                if was_stuck {
                    return notify();
                }
            }
            notify();
        };
        match std::thread::Builder::new().name("probe".into()).spawn(work) {
            Ok(_) => (state.working, state.threads, state.spawn_failed) = (1, thread + 1, false),
            Err(error) => {
                if !std::mem::replace(&mut state.spawn_failed, true) {
                    tracing::warn!(%error, "failed to start a probe thread; retrying at the next poll");
                }
                state.queue.clear();
            }
        }
    }
}

/// Probes the next device of the queue. `None` at its end.
fn probe_next(thread: u64, probe_device: &ProbeDevice, shared: &Mutex<State>) -> Option<Probed> {
    let device = {
        let mut state = lock(shared);
        let Some(device) = state.queue.pop_front() else {
            state.working -= 1;
            return None;
        };
        state.running.insert(
            thread,
            RunningProbe { device: Arc::clone(&device), since: Instant::now(), is_stuck: false },
        );
        device
    };
    let at = host::now();
    Some(Probed { at, signals: probe_device(&device), device })
}

/// Returns whether another thread has taken over meanwhile.
fn finish(thread: u64, probed: Probed, shared: &Mutex<State>) -> bool {
    let mut state = lock(shared);
    state.probed.push(probed);
    state.running.remove(&thread).is_some_and(|running| running.is_stuck)
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic leaves no partial state in here.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Attributes, DeviceClass, Reason};
    use std::sync::mpsc;

    fn device(id: &str) -> Arc<Device> {
        Arc::new(Device {
            id: DeviceId::new(id),
            key: id.into(),
            class: DeviceClass::Nvme,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        })
    }

    /// A prober whose probes of `stuck` block until they are released. Also the channel of its
    /// notifications, and a function that makes one more probe block.
    fn prober() -> (Prober, mpsc::Receiver<()>, impl Fn() -> mpsc::Sender<()>) {
        let gates: Arc<Mutex<Vec<mpsc::Receiver<()>>>> = Arc::default();
        let (sender, notifications) = mpsc::channel();
        let waits = Arc::clone(&gates);
        let probe_device: ProbeDevice = Arc::new(move |device: &Device| {
            if device.id.as_str().starts_with("stuck") {
                let gate = waits.lock().unwrap().pop();
                if let Some(gate) = gate {
                    let _ = gate.recv();
                }
            }
            Signals::default()
        });
        let sender = Mutex::new(sender);
        let prober =
            Prober::new(probe_device, move || sender.lock().unwrap().send(()).unwrap_or(()));
        let more = Arc::clone(&gates);
        let gate = move || {
            let (open, gate) = mpsc::channel();
            more.lock().unwrap().push(gate);
            open
        };
        (prober, notifications, gate)
    }

    fn ids(probed: &[Probed]) -> Vec<&str> {
        probed.iter().map(|probed| probed.device.id.as_str()).collect()
    }

    /// The check, as if the deadline had passed.
    fn check_late(prober: &Prober) -> Vec<DeviceId> {
        // The probe has begun when it is among the running ones.
        while lock(&prober.state).running.values().all(|running| running.is_stuck) {
            std::thread::yield_now();
        }
        let long_ago = Instant::now().checked_sub(PROBE_DEADLINE).unwrap();
        lock(&prober.state).running.values_mut().for_each(|running| running.since = long_ago);
        prober.check_deadlines()
    }

    #[test]
    fn a_stuck_probe_does_not_stop_the_probes_of_other_devices() {
        let (prober, notifications, gate) = prober();
        let open = gate();
        prober.enqueue(vec![device("a"), device("stuck"), device("b")]);
        while lock(&prober.state).queue.len() > 1 {
            std::thread::yield_now();
        }
        assert_eq!(check_late(&prober), [DeviceId::new("stuck")]);
        notifications.recv().unwrap();
        assert_eq!(ids(&prober.take_results()), ["a", "b"]);
        assert!(!prober.is_busy());
        // It is not probed again while it is stuck.
        prober.enqueue(vec![device("stuck"), device("a")]);
        notifications.recv().unwrap();
        assert_eq!(ids(&prober.take_results()), ["a"]);
        open.send(()).unwrap();
        notifications.recv().unwrap();
        assert_eq!(ids(&prober.take_results()), ["stuck"]);
        assert!(prober.check_deadlines().is_empty());
        assert_ne!(Reason::ProbeStuck.timings().fail_after, Duration::ZERO);
    }

    #[test]
    fn the_number_of_stuck_threads_is_bounded() {
        let (prober, notifications, gate) = prober();
        let opens: Vec<_> = (0..=STUCK_MAX).map(|_| gate()).collect();
        prober.enqueue((0..=STUCK_MAX).map(|n| device(&format!("stuck{n}"))).collect());
        for n in 1..=STUCK_MAX {
            assert_eq!(check_late(&prober).len(), n);
        }
        assert!(prober.is_exhausted() && !prober.is_busy());
        assert_eq!(lock(&prober.state).queue.len(), 1);
        drop(opens);
        for _ in 0..STUCK_MAX {
            notifications.recv().unwrap();
        }
        assert!(!prober.is_exhausted());
        // The next check continues with the queue.
        prober.check_deadlines();
        notifications.recv().unwrap();
        assert_eq!(prober.take_results().len(), STUCK_MAX + 1);
    }
}
