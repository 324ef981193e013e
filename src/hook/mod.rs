//! Runs hooks: the only place that runs a command or resets a function for a device.
//!
//! There are three callers: serving before a container starts (the kubelet waits), the
//! application's hook runner after a release, and its periodic checks. Callers wait here without a
//! thread. Each run has its own thread, and the number of concurrent runs is bounded. If a caller
//! stops waiting, the run ends: its process group is killed. A command is not run by a shell. It
//! gets its configured arguments, and the device's data as environment variables
//! ([`environment()`]).
//!
//! Callers must ensure that a hook disturbs no container. The ledger lets a hook after a release
//! run only when no container holds the device. Serving checks the holders before a reset.
//!
//! A run that was not possible (no process, thread or descriptor available) is no result: hooks are
//! tried again, and a check changes no verdict. [`Outputs`] keeps the output of commands for the
//! operator.
//!
//! A program may wait in the kernel for a dead device, where it cannot be killed. Its run has
//! failed then, and does not take the place of another device's. No other run for its device begins
//! before it has ended.

mod environment;
mod records;

pub use environment::{Occasion, environment};
pub use records::{HookOutput, NotRun, Outputs, Shortages};

use crate::domain::{Device, DeviceId, Hook, PciAddress, Phase};
use crate::host::{self, CommandError, HostRoot, ResetError};
use crate::telemetry::metrics;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, oneshot, watch};

/// Concurrent hooks before a start: enough for one container with all devices of a node, but not
/// more processes than that.
const BEFORE_START_MAX: usize = 8;
/// Concurrent hooks after a release. They may take long, and no caller needs them soon.
const AFTER_RELEASE_MAX: usize = 4;
/// Concurrent checks. They run repeatedly and must not disturb other work.
const CHECKS_MAX: usize = 2;

/// The number of threads that must be possible after a failed check. With less capacity, the system
/// may have refused a process that the check wanted to start.
const TASKS_OF_A_CHECK: usize = 8;

/// How long a reset may take. The kernel waits for a minute for each function to return.
const RESET_WITHIN: Duration = Duration::from_secs(300);
/// How long a program may take to end after it was killed.
const KILLED_WITHIN: Duration = Duration::from_secs(2);

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The command failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The reset failed.
    #[error(transparent)]
    Reset(#[from] ResetError),
    /// There is no function to reset.
    #[error("the device has no PCI function to reset")]
    NoFunction,
    /// The reset would affect other devices.
    #[error("the device is a part of PCI function {0}; a reset would affect the other parts")]
    Part(PciAddress),
    /// The system lacks the resources to run it.
    #[error("it cannot be run: {0}")]
    NotRun(#[from] io::Error),
    /// A check failed, but the system may have refused a process that it wanted to start.
    #[error(
        "the check failed, perhaps only because the system refuses further threads and processes; \
         raise the limit of tasks"
    )]
    OutOfTasks,
}

impl HookError {
    /// Whether this is no result of a run, because the system lacked resources. For a check, two
    /// more cases give no result: its program could not be started for any reason, or another
    /// process killed it (the kernel, out of memory).
    #[must_use]
    pub fn is_no_result(&self, phase: Phase) -> bool {
        match self {
            HookError::Command(error) => {
                error.is_shortage() || phase == Phase::Check && error.is_no_result()
            }
            HookError::NotRun(_) | HookError::OutOfTasks => true,
            HookError::Reset(_) | HookError::NoFunction | HookError::Part(_) => false,
        }
    }
}

/// The runs that no caller waits for any longer, by device: they were given up at their limit, or
/// their caller has ended. Each has its channel open until it ends.
#[derive(Debug, Clone, Default)]
struct LeftRuns(Arc<Mutex<BTreeMap<DeviceId, watch::Receiver<()>>>>);

impl LeftRuns {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DeviceId, watch::Receiver<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no run of the device is left after this time.
    async fn have_ended(&self, device: &DeviceId, within: Duration) -> bool {
        let run = self.lock().get(device).cloned();
        let Some(mut run) = run else { return true };
        tokio::time::timeout(within, run.changed()).await.is_ok()
    }
}

/// A run whose caller waits for it.
struct Awaited<'a> {
    left: &'a LeftRuns,
    device: &'a DeviceId,
    run: watch::Receiver<()>,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let mut left = self.left.lock();
        left.retain(|_, run| run.has_changed().is_ok());
        if self.run.has_changed().is_ok() {
            left.insert(self.device.clone(), self.run.clone());
        }
    }
}

/// How a run ended, and the last line of its output.
type Ended = (Result<(), HookError>, String);

/// Runs hooks.
#[derive(Debug, Clone)]
pub struct HookExecutor {
    host_root: HostRoot,
    before_start: Arc<Semaphore>,
    after_release: Arc<Semaphore>,
    checks: Arc<Semaphore>,
    left: LeftRuns,
    outputs: Outputs,
    shortages: Shortages,
}

impl HookExecutor {
    /// One for the whole daemon: its bounds cover all callers.
    #[must_use]
    pub fn new(host_root: HostRoot) -> Self {
        let [before_start, after_release, checks] =
            [BEFORE_START_MAX, AFTER_RELEASE_MAX, CHECKS_MAX]
                .map(|max| Arc::new(Semaphore::new(max)));
        HookExecutor {
            host_root,
            before_start,
            after_release,
            checks,
            left: LeftRuns::default(),
            outputs: Outputs::default(),
            shortages: Shortages::default(),
        }
    }

    /// The host of the hooks.
    #[must_use]
    pub fn host_root(&self) -> &HostRoot {
        &self.host_root
    }

    /// The output of failed commands.
    #[must_use]
    pub fn outputs(&self) -> &Outputs {
        &self.outputs
    }

    /// Hooks that cannot be run.
    #[must_use]
    pub fn shortages(&self) -> &Shortages {
        &self.shortages
    }

    /// Runs a hook and waits for its end. Dropping the future ends the run.
    ///
    /// # Errors
    /// When the hook failed, with the reason in one line.
    pub async fn run(&self, hook: &Hook, occasion: &Occasion) -> Result<(), HookError> {
        let slots = match occasion.phase {
            Phase::BeforeStart => &self.before_start,
            Phase::AfterRelease => &self.after_release,
            Phase::Check => &self.checks,
        };
        // The semaphore is never closed.
        let _slot = slots.acquire().await.map_err(io::Error::other)?;
        let (began, id) = (Instant::now(), &occasion.device.id);
        let ran = match hook {
            Hook::Reset => {
                let (root, address) = (self.host_root.clone(), function(&occasion.device));
                let run = move || {
                    (
                        address.and_then(|address| Ok(host::reset_function(&root, address)?)),
                        String::new(),
                    )
                };
                self.ended(id, RESET_WITHIN, run).await
            }
            Hook::Command { argv, limit } => {
                let (argv, limit, env) =
                    (argv.clone(), *limit, environment(occasion, &self.host_root));
                let is_check = occasion.phase == Phase::Check;
                match io::pipe() {
                    Ok((cancelled, cancel)) => {
                        let run = move || {
                            let host::Ran { ended, output } =
                                host::run_command(&argv, &env, limit, &cancelled);
                            let may_lack_tasks =
                                is_check && matches!(ended, Err(CommandError::Failed(_)));
                            if may_lack_tasks && host::check_task_limit(TASKS_OF_A_CHECK).is_err() {
                                return (Err(HookError::OutOfTasks), output);
                            }
                            (ended.map_err(HookError::from), output)
                        };
                        let ran = self.ended(id, limit + KILLED_WITHIN, run).await;
                        // Also closed when this future is dropped, at any point.
                        drop(cancel);
                        ran
                    }
                    Err(error) => (Err(error.into()), String::new()),
                }
            }
        };
        self.note(occasion, began, ran)
    }

    /// Runs it on a thread of its own, which it may occupy for a day. The result comes within this
    /// time. A run that no caller waits for any longer ends before another one for its device
    /// begins.
    async fn ended(
        &self,
        device: &DeviceId,
        within: Duration,
        run: impl FnOnce() -> Ended + Send + 'static,
    ) -> Ended {
        let failed = || (Err(CommandError::Unkillable(within).into()), String::new());
        if !self.left.have_ended(device, KILLED_WITHIN).await {
            return failed();
        }
        let (sender, receiver) = oneshot::channel();
        let (running, left_open) = watch::channel(());
        let _awaited = Awaited { left: &self.left, device, run: left_open };
        let work = move || {
            let ended = run();
            drop(running);
            // A caller that no longer waits does not receive it.
            drop(sender.send(ended));
        };
        let result = match thread::Builder::new().name("hook".into()).spawn(work) {
            Ok(_) => receiver,
            Err(error) => return (Err(error.into()), String::new()),
        };
        let panicked = |_| (Err(io::Error::other("its thread has panicked").into()), String::new());
        match tokio::time::timeout(within, result).await {
            Ok(ended) => ended.unwrap_or_else(panicked),
            Err(_) => failed(),
        }
    }

    fn note(
        &self,
        occasion: &Occasion,
        began: Instant,
        (ended, output): Ended,
    ) -> Result<(), HookError> {
        let Occasion { phase, resource, device, .. } = occasion;
        let (now, wrote) = (host::now().wall, output.len());
        match &ended {
            Err(error) if error.is_no_result(*phase) => {
                metrics::hook_not_run(resource.as_str(), phase.as_str());
                if self.shortages.begun(occasion, now, error.to_string()) {
                    tracing::warn!(%resource, device = %device.id, %phase, %error, "hook cannot be run; it is retried");
                }
            }
            _ => {
                metrics::hook_ended(resource.as_str(), phase.as_str(), ended.is_ok());
                self.outputs.ended(
                    occasion,
                    now,
                    ended.as_ref().err().map(ToString::to_string),
                    output,
                );
                if self.shortages.over(occasion) {
                    tracing::info!(%resource, %phase, "hooks can run again");
                }
                tracing::debug!(%resource, device = %device.id, %phase, wrote, took = ?began.elapsed(), "hook finished");
            }
        }
        ended
    }
}

/// The function that a reset of the device resets; an error if the reset would affect other
/// devices.
fn function(device: &Device) -> Result<PciAddress, HookError> {
    let address = device.pci.as_ref().map(|pci| pci.address).ok_or(HookError::NoFunction)?;
    if device.attribute("part").is_some() { Err(HookError::Part(address)) } else { Ok(address) }
}

#[cfg(test)]
mod tests {
    use super::environment::testing::occasion;
    use super::*;

    fn command(script: String) -> Hook {
        Hook::Command {
            argv: vec!["/bin/sh".into(), "-c".into(), script],
            limit: Duration::from_secs(60),
        }
    }

    #[test]
    fn only_a_whole_function_is_reset() {
        let mut occasion = occasion();
        let device = Arc::make_mut(&mut occasion.device);
        assert_eq!(function(device).unwrap().to_string(), "0000:18:00.0");
        device.attributes.insert("part", "mig");
        assert!(matches!(function(device), Err(HookError::Part(_))));
        device.pci = None;
        assert!(matches!(function(device), Err(HookError::NoFunction)));
    }

    /// The runs stand for programs that wait in the kernel.
    #[tokio::test]
    async fn a_run_that_cannot_be_killed_has_failed_and_keeps_only_its_own_device() {
        let performer = HookExecutor::new(HostRoot::new("/nonexistent"));
        let [short, long] = [10, 60_000].map(Duration::from_millis);
        let run = async |id: &str, within: Duration, run: Box<dyn FnOnce() + Send>| {
            let run = move || {
                run();
                (Ok(()), String::new())
            };
            performer.ended(&DeviceId::new(id), within, run).await.0
        };
        let stuck = |ended: &Result<(), HookError>| {
            matches!(ended, Err(HookError::Command(CommandError::Unkillable(_))))
        };
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let ended = run("a", short, Box::new(move || _ = wait.recv())).await;
        assert!(stuck(&ended), "{ended:?}");
        assert!(run("b", long, Box::new(|| ())).await.is_ok());
        assert!(stuck(&run("a", long, Box::new(|| panic!("it does not run again"))).await));
        drop(end);
        assert!(run("a", long, Box::new(|| ())).await.is_ok());
        // The next one waits for one that is being killed.
        let (end, wait) = std::sync::mpsc::channel::<()>();
        assert!(stuck(&run("a", short, Box::new(move || _ = wait.recv())).await));
        let (again, ()) = tokio::join!(run("a", long, Box::new(|| ())), async move { drop(end) });
        assert!(again.is_ok(), "{again:?}");
    }

    /// The bound holds: the allowed number run, not one more, and the next begins when one ends.
    #[tokio::test]
    async fn runs_are_bounded_and_a_dropped_one_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let performer = HookExecutor::new(HostRoot::new(dir.path()));
        assert_eq!(performer.after_release.available_permits(), AFTER_RELEASE_MAX);
        assert_eq!(performer.before_start.available_permits(), BEFORE_START_MAX);
        let wait = |n: usize| {
            let (performer, file) = (performer.clone(), dir.path().join(n.to_string()));
            let script =
                format!("echo >{0}; while [ ! -e {0}.go ]; do sleep 0.01; done", file.display());
            tokio::spawn(async move { performer.run(&command(script), &occasion()).await })
        };
        let runs: Vec<_> = (0..=AFTER_RELEASE_MAX).map(wait).collect();
        let started =
            || (0..=AFTER_RELEASE_MAX).filter(|n| dir.path().join(n.to_string()).exists()).count();
        let until = async |count: usize| {
            let seen = async {
                while started() < count {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), seen).await.expect("they start");
        };
        until(AFTER_RELEASE_MAX).await;
        assert_eq!(performer.after_release.available_permits(), 0);
        assert_eq!(started(), AFTER_RELEASE_MAX);
        let first =
            (0..=AFTER_RELEASE_MAX).position(|n| dir.path().join(n.to_string()).exists()).unwrap();
        runs[first].abort();
        until(AFTER_RELEASE_MAX + 1).await;
        for n in 0..=AFTER_RELEASE_MAX {
            std::fs::write(dir.path().join(format!("{n}.go")), "").unwrap();
        }
        for (n, run) in runs.into_iter().enumerate() {
            match run.await {
                Ok(ended) => ended.unwrap(),
                Err(error) => assert!(n == first && error.is_cancelled()),
            }
        }
    }
}
