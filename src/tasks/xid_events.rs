//! Takes NVIDIA's Xid errors from NVML's events where the kernel log cannot be read.
//!
//! ```text
//!  inventory, plan, kernel log ─▶ task ─ GPUs (watch) ─▶ process ─▶ NVML
//!           health actor ◀─ Xids ───┘ ◀──── reports ────────┘
//! ```
//!
//! There is one source for all GPUs, so no error counts twice. The kernel log comes first: its
//! lines name the MIG instance and contain older errors, and no open library blocks a reset.
//!
//! The process may hang for ever, and no code waits for it. A second process is never started next
//! to it. No GPU is watched that an operator has cordoned, or that waits for a reset. After both,
//! earlier errors do not count.

use super::kernel_log::{self, LogState};
use super::nvml::{at, at_tick};
use crate::domain::{
    DeviceId, Health, Inventory, NvmlLibrary, Offered, PciAddress, Plan, Reason, Source, Verdicts,
};
use crate::hardware;
use crate::health::Judgement;
use crate::host::{self, EVENT_WAIT_MAX, HostRoot, NvmlReport, watch_nvml_events};
use crate::messages::{DeviceEventSeen, Mailbox};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Reports of the process that wait for the task.
const REPORTS_MAX: usize = 64;

/// The timing of the watch.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// After this time without a report the process counts as hanging. Waking up the GPUs of a node
    /// may take tens of seconds.
    deadline: Duration,
    /// The period of polls, and the longest time between two reports of a process that does not
    /// hang.
    tick: Duration,
    /// The first pause after a failure. It is doubled with each further try.
    retry: Duration,
    /// The longest pause.
    retry_max: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            deadline: Duration::from_secs(60),
            tick: EVENT_WAIT_MAX,
            retry: Duration::from_secs(10),
            retry_max: Duration::from_secs(600),
        }
    }
}

type Gpus = BTreeSet<PciAddress>;
/// Starts the process that watches these GPUs, and sends its reports.
type StartWatch = Box<dyn Fn(watch::Receiver<Gpus>, mpsc::Sender<NvmlReport>) + Send>;

/// The task that decides which GPUs are watched.
struct EventTask {
    /// `None` when the configuration switches NVML off.
    start: Option<StartWatch>,
    log: watch::Receiver<LogState>,
    inventory: watch::Receiver<Arc<Inventory>>,
    plan: watch::Receiver<Arc<Plan>>,
    /// The GPUs to watch.
    gpus: watch::Sender<Gpus>,
    device_events: Mailbox<DeviceEventSeen>,
    judgement: Arc<watch::Sender<Judgement>>,
    judged: watch::Receiver<Judgement>,
    pace: Pace,
    /// Whether a NVIDIA GPU is listed.
    has_gpu: bool,
    /// Whether a process runs, hanging or not.
    runs: bool,
    /// Why GPUs are not watched by the last process; an error also while it hangs. `None` until it
    /// has reported.
    outcome: Option<Result<(), String>>,
    /// The last outcome without the hang.
    coverage: Option<Result<(), String>>,
    was_logged: bool,
}

/// Spawns both sources of Xid errors: the reader of the kernel log, and the task that watches
/// NVML's events while the log cannot be read.
pub(crate) fn spawn(
    root: HostRoot,
    library: NvmlLibrary,
    device_events: Mailbox<DeviceEventSeen>,
    judgement: Arc<watch::Sender<Judgement>>,
    plan: watch::Receiver<Arc<Plan>>,
    inventory: watch::Receiver<Arc<Inventory>>,
) -> [JoinHandle<()>; 2] {
    let (state, log) = watch::channel(LogState::default());
    let reader = kernel_log::follow(root.clone(), device_events.clone(), state);
    let start = (library != NvmlLibrary::Off).then(|| -> StartWatch {
        Box::new(move |gpus, reports| {
            tokio::spawn(watch_nvml_events(root.clone(), library.clone(), gpus, reports));
        })
    });
    let task = EventTask {
        start,
        log,
        inventory,
        plan,
        gpus: watch::channel(Gpus::new()).0,
        device_events,
        judged: judgement.subscribe(),
        judgement,
        pace: Pace::default(),
        has_gpu: false,
        runs: false,
        outcome: None,
        coverage: None,
        was_logged: false,
    };
    [tokio::spawn(reader), tokio::spawn(task.run())]
}

impl EventTask {
    /// Runs until the daemon ends.
    async fn run(mut self) {
        let (sender, mut reports) = mpsc::channel(REPORTS_MAX);
        // When the next try is due, and until when a report is waited for.
        let (mut due, mut deadline) = (None, None);
        let mut pause = self.pace.retry;
        loop {
            if self.choose() {
                pause = self.pace.retry;
                due = (!self.runs && !self.gpus.borrow().is_empty()).then(Instant::now);
            }
            self.publish();
            tokio::select! {
                Ok(()) = self.log.changed() => {}
                Ok(()) = self.plan.changed() => {}
                Ok(()) = self.judged.changed() => {}
                changed = self.inventory.changed() => if changed.is_err() { return },
                Some(report) = reports.recv() => {
                    deadline = Some(Instant::now() + self.pace.tick + self.pace.deadline);
                    let is_over = matches!(report, NvmlReport::Ended(_));
                    let begins = matches!(report, NvmlReport::Watching(_));
                    self.take(report);
                    if begins && self.outcome == Some(Ok(())) {
                        (due, pause) = (None, self.pace.retry);
                    } else if begins || (is_over && self.outcome.is_some()) {
                        due = Some(at_tick(pause, self.pace.tick));
                        pause = (pause * 2).min(self.pace.retry_max);
                    } else if is_over {
                        due = Some(Instant::now());
                    }
                    if is_over {
                        deadline = None;
                    }
                }
                () = at(deadline) => {
                    deadline = None;
                    let why = "NVML does not return: the driver hangs, or its GPUs take long to wake up";
                    self.outcome = Some(Err(why.to_owned()));
                }
                () = at(due) => {
                    due = None;
                    if self.runs {
                        // Some GPUs could not be watched: the process tries it again.
                        self.gpus.send_modify(|_| ());
                    } else if let Some(start) = &self.start && !self.gpus.borrow().is_empty() {
                        start(self.gpus.subscribe(), sender.clone());
                        self.runs = true;
                        deadline = Some(Instant::now() + self.pace.deadline);
                    }
                }
            }
        }
    }

    /// Chooses the GPUs to watch. Returns whether they have changed.
    fn choose(&mut self) -> bool {
        let mut watched = Gpus::new();
        self.has_gpu = false;
        let inventory = self.inventory.borrow_and_update().clone();
        let verdicts = Arc::clone(&self.judged.borrow_and_update().verdicts);
        let offered = inventory.resources.values().flat_map(|offering| offering.devices.values());
        for offered in offered {
            let Some(gpu) = hardware::nvidia_gpu(&offered.device) else { continue };
            self.has_gpu = true;
            if is_watched(offered, &verdicts) {
                watched.insert(gpu);
            }
        }
        let is_unreadable = matches!(*self.log.borrow_and_update(), LogState::Unreadable(_));
        let is_on = self.plan.borrow_and_update().health.nvml_events && self.start.is_some();
        if !is_unreadable || !is_on {
            watched.clear();
        }
        self.gpus.send_if_modified(|gpus| {
            let is_news = *gpus != watched;
            *gpus = watched;
            is_news
        })
    }

    fn take(&mut self, report: NvmlReport) {
        match report {
            NvmlReport::Watching(None) => self.coverage = Some(Ok(())),
            NvmlReport::Watching(Some(why)) => self.coverage = Some(Err(why)),
            NvmlReport::Idle => {}
            NvmlReport::Seen(event) => {
                self.device_events.send(DeviceEventSeen { event, at: host::now() });
            }
            NvmlReport::Ended(why) => {
                self.runs = false;
                self.coverage = why.map(Err);
            }
        }
        self.outcome.clone_from(&self.coverage);
    }

    /// Why NVML's events do not replace the kernel log. `None` while it is not yet known.
    fn coverage(&self) -> Option<Result<(), String>> {
        let off = |key: &str| Some(Err(format!("it is disabled in the configuration ({key})")));
        if !self.has_gpu {
            return Some(Err(String::new()));
        }
        if self.start.is_none() {
            return off("`[nvidia] nvml = \"off\"`");
        }
        if !self.plan.borrow().health.nvml_events {
            return off("`[nvidia] events = false`");
        }
        if self.gpus.borrow().is_empty() { Some(Ok(())) } else { self.outcome.clone() }
    }

    /// Publishes and logs the state of the signal when it changes.
    fn publish(&mut self) {
        let off = match &*self.log.borrow() {
            LogState::Opening => return,
            LogState::Read => None,
            LogState::Unreadable(why) => match self.coverage() {
                None => return,
                Some(Ok(())) => None,
                Some(Err(also)) if also.is_empty() => Some(why.clone()),
                Some(Err(also)) => Some(format!("{why}; NVML's events are not used: {also}")),
            },
        };
        let is_read = *self.log.borrow() == LogState::Read;
        let is_news = self.judgement.send_if_modified(|judgement| {
            let before = judgement.off.get(&Source::KernelLog).cloned();
            match &off {
                Some(why) => drop(judgement.off.insert(Source::KernelLog, why.clone())),
                None => drop(judgement.off.remove(&Source::KernelLog)),
            }
            before != off
        });
        match &off {
            Some(why) if is_news => {
                tracing::info!(
                    why,
                    "cannot read the kernel log; NVIDIA's Xid errors are not detected"
                );
                self.was_logged = false;
            }
            None if !is_read && !self.was_logged => {
                tracing::info!(
                    "cannot read the kernel log; NVML's events report NVIDIA's Xid errors"
                );
                self.was_logged = true;
            }
            _ => {}
        }
    }
}

/// Whether errors of a device matter. NVML must not stay open for a GPU that an operator changes,
/// or that must be reset: after a cordon and after a reset no earlier error counts.
fn is_watched(offered: &Offered, verdicts: &Verdicts) -> bool {
    let Offered { device, health } = offered;
    let needs_reset = |id: &DeviceId| {
        verdicts.get(id).is_some_and(|verdict| verdict.faults.contains_key(&Reason::Xid))
    };
    let is_away = matches!(
        health,
        Health::Unhealthy(
            Reason::Cordoned
                | Reason::OffTheBus
                | Reason::DeviceGone
                | Reason::DriverLost
                | Reason::Deselected
        )
    );
    let whole = device.attribute("parent").map(DeviceId::new);
    !is_away && !needs_reset(&device.id) && !whole.is_some_and(|whole| needs_reset(&whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        Attributes, Device, DeviceClass, DeviceEvent, EventKind, HealthPolicy, Offering,
        PciFunction, ResourceName, ResourceSpec, Verdict,
    };
    use crate::messages::{CallError, Deliver};
    use futures_util::future::BoxFuture;
    use std::sync::Mutex;

    const HANG: Duration = Duration::from_secs(60);
    const GPU: &str = "0000:18:00.0";
    const OTHER: &str = "0000:19:00.0";

    /// A health actor that counts the errors.
    struct CountingHealth(watch::Sender<usize>);

    impl Deliver<DeviceEventSeen> for CountingHealth {
        fn call(
            &self,
            _: DeviceEventSeen,
            _: Duration,
        ) -> BoxFuture<'static, Result<(), CallError>> {
            Box::pin(std::future::ready(Ok(())))
        }

        fn send(&self, _: DeviceEventSeen) {
            self.0.send_modify(|seen| *seen += 1);
        }
    }

    type Processes = Arc<Mutex<Vec<(watch::Receiver<Gpus>, mpsc::Sender<NvmlReport>)>>>;

    /// A task whose processes report what the test reports.
    struct Setup {
        processes: Processes,
        started: watch::Receiver<usize>,
        seen: watch::Receiver<usize>,
        log: watch::Sender<LogState>,
        inventory: watch::Sender<Arc<Inventory>>,
        plan: watch::Sender<Arc<Plan>>,
        judgement: Arc<watch::Sender<Judgement>>,
    }

    fn offered(gpu: &str, health: Health) -> Offered {
        let function = PciFunction {
            vendor: Some(0x10de),
            driver: Some("nvidia".into()),
            ..PciFunction::at(gpu.parse().unwrap())
        };
        let device = Device {
            id: DeviceId::new(gpu),
            key: gpu.to_owned(),
            class: DeviceClass::Gpu,
            pci: Some(Box::new(function)),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        Offered { device: Arc::new(device), health }
    }

    fn inventory(gpus: &[(&str, Health)]) -> Arc<Inventory> {
        let name: ResourceName = "nvidia.com/gpu".parse().unwrap();
        let devices = gpus.iter().map(|(gpu, health)| (DeviceId::new(*gpu), offered(gpu, *health)));
        let spec = Arc::new(ResourceSpec::new(name.clone(), DeviceClass::Gpu));
        let offering = Offering { spec, devices: devices.collect() };
        Arc::new(Inventory { resources: [(name, Arc::new(offering))].into() })
    }

    fn unreadable() -> LogState {
        LogState::Unreadable("no log".into())
    }

    impl Setup {
        fn begin(log: LogState, deadline: Duration) -> Setup {
            let processes = Processes::default();
            let (started, started_view) = watch::channel(0);
            let known = Arc::clone(&processes);
            let start: StartWatch = Box::new(move |gpus, reports| {
                known.lock().unwrap().push((gpus, reports));
                started.send_modify(|started| *started += 1);
            });
            let (seen, seen_view) = watch::channel(0);
            let (log, log_view) = watch::channel(log);
            let (inventory, inventory_view) =
                watch::channel(inventory(&[(GPU, Health::Healthy), (OTHER, Health::Healthy)]));
            let (plan, plan_view) = watch::channel(Arc::new(Plan::default()));
            let judgement = Arc::new(watch::channel(Judgement::default()).0);
            let pace = Pace {
                deadline,
                tick: Duration::from_millis(1),
                retry: Duration::from_millis(1),
                retry_max: Duration::from_millis(1),
            };
            let task = EventTask {
                start: Some(start),
                log: log_view,
                inventory: inventory_view,
                plan: plan_view,
                gpus: watch::channel(Gpus::new()).0,
                device_events: Mailbox::new(CountingHealth(seen)),
                judged: judgement.subscribe(),
                judgement: Arc::clone(&judgement),
                pace,
                has_gpu: false,
                runs: false,
                outcome: None,
                coverage: None,
                was_logged: false,
            };
            tokio::spawn(task.run());
            Setup {
                processes,
                started: started_view,
                seen: seen_view,
                log,
                inventory,
                plan,
                judgement,
            }
        }

        async fn started(&mut self, processes: usize) {
            let started = self.started.wait_for(|started| *started == processes);
            tokio::time::timeout(HANG, started).await.unwrap().unwrap();
        }

        /// Lets the last process report, and waits until the task has processed it.
        async fn report(&self, report: NvmlReport) {
            let reports = self.processes.lock().unwrap().last().unwrap().1.clone();
            reports.send(report).await.unwrap();
            self.settle().await;
        }

        /// Gives every other task of this thread its turns.
        async fn settle(&self) {
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
        }

        fn watched(&self) -> Vec<String> {
            let processes = self.processes.lock().unwrap();
            processes.last().unwrap().0.borrow().iter().map(ToString::to_string).collect()
        }

        fn off(&self) -> Option<String> {
            self.judgement.borrow().off.get(&Source::KernelLog).cloned()
        }
    }

    #[tokio::test]
    async fn events_are_watched_only_where_the_kernel_log_is_not_read() {
        let mut setup = Setup::begin(LogState::Opening, HANG);
        setup.settle().await;
        setup.log.send_replace(LogState::Read);
        setup.settle().await;
        assert_eq!((*setup.started.borrow(), setup.off()), (0, None));

        setup.log.send_replace(unreadable());
        setup.started(1).await;
        assert_eq!(setup.watched(), [GPU, OTHER]);
        assert_eq!(setup.off(), None, "the first answer is waited for");
        setup.report(NvmlReport::Watching(None)).await;
        let kind = EventKind::Xid(79);
        let at = GPU.parse().unwrap();
        let event = DeviceEvent { at, whole_slot: true, instance: None, kind };
        setup.report(NvmlReport::Seen(event)).await;
        assert_eq!((*setup.seen.borrow(), setup.off()), (1, None));

        let health = HealthPolicy { nvml_events: false, ..HealthPolicy::default() };
        setup.plan.send_replace(Arc::new(Plan { health, ..Plan::default() }));
        setup.settle().await;
        assert!(setup.watched().is_empty());
        assert!(setup.off().unwrap().starts_with("no log; NVML's events"), "{:?}", setup.off());
        setup.report(NvmlReport::Ended(None)).await;
        setup.plan.send_replace(Arc::default());
        setup.started(2).await;
    }

    #[tokio::test]
    async fn a_gpu_that_is_cordoned_or_needs_a_reset_is_not_watched() {
        let mut setup = Setup::begin(unreadable(), HANG);
        setup.started(1).await;
        setup.report(NvmlReport::Watching(None)).await;
        let faults = [(Reason::Xid, "Xid 79".to_owned())].into();
        let verdict = Verdict { faults, ..Verdict::default() };
        let verdicts = Arc::new([(DeviceId::new(GPU), verdict)].into());
        setup.judgement.send_modify(|judgement| judgement.verdicts = verdicts);
        setup.settle().await;
        assert_eq!(setup.watched(), [OTHER]);
        let cordoned = Health::Unhealthy(Reason::Cordoned);
        let recovering = Health::Unhealthy(Reason::Xid);
        setup.inventory.send_replace(inventory(&[(GPU, recovering), (OTHER, cordoned)]));
        setup.settle().await;
        assert!(setup.watched().is_empty());
        setup.report(NvmlReport::Ended(None)).await;
        assert_eq!((*setup.started.borrow(), setup.off()), (1, None), "no error is missed");
        // After the reset an error counts again, also before the GPU is healthy.
        setup.judgement.send_modify(|judgement| judgement.verdicts = Arc::default());
        setup.started(2).await;
        assert_eq!(setup.watched(), [GPU]);
    }

    #[tokio::test]
    async fn a_failure_is_reported_and_tried_again() {
        let mut setup = Setup::begin(unreadable(), HANG);
        for process in 1..4 {
            setup.started(process).await;
            setup.report(NvmlReport::Ended(Some("no library".into()))).await;
            assert_eq!(
                setup.off().as_deref(),
                Some("no log; NVML's events are not used: no library")
            );
        }
        setup.started(4).await;
        setup.report(NvmlReport::Watching(Some("half of it".into()))).await;
        assert!(setup.off().unwrap().contains("half of it"));
        // The process is asked to register all again.
        let mut gpus = setup.processes.lock().unwrap().last().unwrap().0.clone();
        gpus.mark_unchanged();
        tokio::time::timeout(HANG, gpus.changed()).await.unwrap().unwrap();
        setup.report(NvmlReport::Ended(None)).await;
        setup.started(5).await;
        setup.report(NvmlReport::Watching(None)).await;
        assert_eq!(setup.off(), None);
    }

    #[tokio::test]
    async fn a_hanging_process_is_reported_and_no_second_one_is_started() {
        let mut setup = Setup::begin(unreadable(), Duration::from_millis(1));
        setup.started(1).await;
        let mut judged = setup.judgement.subscribe();
        let off = judged.wait_for(|judgement| judgement.off.contains_key(&Source::KernelLog));
        tokio::time::timeout(HANG, off).await.unwrap().unwrap();
        assert!(setup.off().unwrap().contains("NVML does not return"), "{:?}", setup.off());
        setup.inventory.send_replace(inventory(&[(GPU, Health::Healthy)]));
        setup.settle().await;
        assert_eq!(*setup.started.borrow(), 1);
        setup.report(NvmlReport::Watching(None)).await;
        setup.report(NvmlReport::Ended(None)).await;
        setup.started(2).await;
        assert_eq!(setup.watched(), [GPU]);
    }

    #[tokio::test]
    async fn without_a_gpu_of_nvidia_the_library_is_not_loaded() {
        let setup = Setup::begin(LogState::Opening, HANG);
        setup.inventory.send_replace(inventory(&[]));
        setup.log.send_replace(unreadable());
        setup.settle().await;
        assert_eq!((*setup.started.borrow(), setup.off().as_deref()), (0, Some("no log")));
    }
}
