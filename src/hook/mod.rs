//! Carries hooks out: the one place that runs a command or resets a function for a device.
//!
//! Two ask: serving, before a container starts (the kubelet waits), and the application's runner, after a release. Both
//! wait here without a thread; the run itself has a thread of its own, and at most so many run at a time. Whoever
//! stops waiting ends the run: its process group is killed. A command is no shell: it gets its arguments as they are
//! configured, and what it may want to know as environment variables ([`environment()`]).
//!
//! Who may be disturbed is the asker's to know: the ledger lets a hook after release run only when nobody holds the device,
//! and serving looks at the holders before a reset.
//!
//! A run that was not possible (no process, thread or descriptor to be had) is no result: hooks are tried again, and a check says nothing of its
//! device. What a command writes is kept in [`Outputs`], for its operator.

mod environment;
mod records;

pub use environment::{Occasion, environment};
pub use records::{NotRun, Outputs, Said, Shortages};

use crate::domain::{Device, Hook, PciAddress, Phase};
use crate::host::{self, CommandError, HostRoot, ResetError};
use crate::telemetry::metrics;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;
use tokio::sync::{Semaphore, oneshot};

/// Hooks before a start that run at a time: the devices of a whole node for one container, and no more processes than that.
const BEFORE_START_MAX: usize = 8;
/// Hooks after a release that run at a time. They may take long, and nobody waits for them.
const AFTER_RELEASE_MAX: usize = 4;
/// Checks that run at a time. They come again and again, and are to disturb nobody.
const CHECKS_MAX: usize = 2;

/// After a check that failed so many threads must be possible: with less room than that, what it wanted to start may have been refused.
const ROOM_FOR_A_CHECK: usize = 8;

/// Why a hook has not ended well.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The reset.
    #[error(transparent)]
    Reset(#[from] ResetError),
    /// There is nothing to be reset.
    #[error("it has no PCI function that could be reset")]
    NoFunction,
    /// The reset would hit other devices.
    #[error("it is a part of PCI function {0}, whose other parts a reset would hit")]
    Part(PciAddress),
    /// The system has no room for it.
    #[error("it cannot be run: {0}")]
    NotRun(#[from] io::Error),
    /// It was a check, and what it wanted to run in its turn may have been refused.
    #[error("it has failed, but this process can have no more threads and processes, nor could the check")]
    NoRoom,
}

impl HookError {
    /// Whether it is no result of a run: the system had no room for it now. Of a check also what tells nothing of the device: a program that
    /// cannot be started for any reason, or that something else has killed (the kernel, out of memory).
    #[must_use]
    pub fn is_no_result(&self, phase: Phase) -> bool {
        match self {
            HookError::Command(error) => error.is_shortage() || phase == Phase::Check && error.is_no_result(),
            HookError::NotRun(_) | HookError::NoRoom => true,
            HookError::Reset(_) | HookError::NoFunction | HookError::Part(_) => false,
        }
    }
}

/// Carries hooks out.
#[derive(Debug, Clone)]
pub struct Performer {
    host_root: HostRoot,
    before_start: Arc<Semaphore>,
    after_release: Arc<Semaphore>,
    checks: Arc<Semaphore>,
    outputs: Outputs,
    shortages: Shortages,
}

impl Performer {
    /// One for the whole daemon: its bounds are for all.
    #[must_use]
    pub fn new(host_root: HostRoot) -> Self {
        let [before_start, after_release, checks] =
            [BEFORE_START_MAX, AFTER_RELEASE_MAX, CHECKS_MAX].map(|max| Arc::new(Semaphore::new(max)));
        Performer { host_root, before_start, after_release, checks, outputs: Outputs::default(), shortages: Shortages::default() }
    }

    /// The host that the hooks are of.
    #[must_use]
    pub fn host_root(&self) -> &HostRoot {
        &self.host_root
    }

    /// What commands wrote that have failed.
    #[must_use]
    pub fn outputs(&self) -> &Outputs {
        &self.outputs
    }

    /// Which hooks cannot be run.
    #[must_use]
    pub fn shortages(&self) -> &Shortages {
        &self.shortages
    }

    /// Runs a hook and waits for its end; what is dropped while it waits is ended.
    ///
    /// # Errors
    /// When it has failed, with the reason in one line.
    pub async fn perform(&self, hook: &Hook, occasion: &Occasion) -> Result<(), HookError> {
        let slots = match occasion.phase {
            Phase::BeforeStart => &self.before_start,
            Phase::AfterRelease => &self.after_release,
            Phase::Check => &self.checks,
        };
        // Nobody closes it.
        let slot = Arc::clone(slots).acquire_owned().await.map_err(io::Error::other)?;
        let began = Instant::now();
        let ran = match hook {
            Hook::Reset => {
                let (root, address) = (self.host_root.clone(), function(&occasion.device));
                let run = move || (address.and_then(|address| Ok(host::reset_function(&root, address)?)), String::new());
                self.ended(slot, run).await
            }
            Hook::Command { argv, limit } => {
                let (argv, limit, env) = (argv.clone(), *limit, environment(occasion, &self.host_root));
                let is_check = occasion.phase == Phase::Check;
                match io::pipe() {
                    Ok((cancelled, cancel)) => {
                        let run = move || {
                            let host::Ran { ended, said } = host::run_command(&argv, &env, limit, &cancelled);
                            let may_lack_room = is_check && matches!(ended, Err(CommandError::Failed(_)));
                            if may_lack_room && host::room_for_tasks(ROOM_FOR_A_CHECK).is_err() {
                                return (Err(HookError::NoRoom), said);
                            }
                            (ended.map_err(HookError::from), said)
                        };
                        let ran = self.ended(slot, run).await;
                        // Closed when this future is dropped too, wherever it stands.
                        drop(cancel);
                        ran
                    }
                    Err(error) => (Err(error.into()), String::new()),
                }
            }
        };
        self.note(occasion, began, ran)
    }

    /// The end of a run on a thread of its own, which it may keep for a day. Its slot is free when it has really ended, also when nobody waits
    /// any more.
    async fn ended(
        &self,
        slot: tokio::sync::OwnedSemaphorePermit,
        run: impl FnOnce() -> (Result<(), HookError>, String) + Send + 'static,
    ) -> (Result<(), HookError>, String) {
        let (tell, told) = oneshot::channel();
        let work = move || {
            let ended = run();
            drop(slot);
            // Whoever does not wait any more does not hear it.
            drop(tell.send(ended));
        };
        match thread::Builder::new().name("hook".into()).spawn(work) {
            Ok(_) => told.await.unwrap_or_else(|_| (Err(io::Error::other("its thread has panicked").into()), String::new())),
            Err(error) => (Err(error.into()), String::new()),
        }
    }

    fn note(&self, occasion: &Occasion, began: Instant, (ended, said): (Result<(), HookError>, String)) -> Result<(), HookError> {
        let Occasion { phase, resource, device, .. } = occasion;
        let (now, wrote) = (host::now().wall, said.len());
        match &ended {
            Err(error) if error.is_no_result(*phase) => {
                metrics::hook_not_run(resource.as_str(), phase.as_str());
                if self.shortages.begun(occasion, now, error.to_string()) {
                    tracing::warn!(%resource, device = %device.id, %phase, %error, "a hook cannot be run");
                }
            }
            _ => {
                metrics::hook_ended(resource.as_str(), phase.as_str(), ended.is_ok());
                self.outputs.ended(occasion, now, ended.as_ref().err().map(ToString::to_string), said);
                if self.shortages.over(occasion) {
                    tracing::info!(%resource, %phase, "hooks can be run again");
                }
                tracing::debug!(%resource, device = %device.id, %phase, wrote, took = ?began.elapsed(), "a hook has run");
            }
        }
        ended
    }
}

/// The function that a reset of the device resets, and nothing else with it.
fn function(device: &Device) -> Result<PciAddress, HookError> {
    let address = device.pci.as_ref().map(|pci| pci.address).ok_or(HookError::NoFunction)?;
    if device.attribute("part").is_some() { Err(HookError::Part(address)) } else { Ok(address) }
}

#[cfg(test)]
mod tests {
    use super::environment::testing::occasion;
    use super::*;
    use std::time::Duration;

    fn command(script: String) -> Hook {
        Hook::Command { argv: vec!["/bin/sh".into(), "-c".into(), script], limit: Duration::from_secs(60) }
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

    /// A bound that is seen: as many as may run do, none more, and the next begins when one ends.
    #[tokio::test]
    async fn so_many_run_at_a_time_and_one_that_nobody_waits_for_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let performer = Performer::new(HostRoot::new(dir.path()));
        assert_eq!(performer.after_release.available_permits(), AFTER_RELEASE_MAX);
        assert_eq!(performer.before_start.available_permits(), BEFORE_START_MAX);
        let wait = |n: usize| {
            let (performer, file) = (performer.clone(), dir.path().join(n.to_string()));
            let script = format!("echo >{0}; while [ ! -e {0}.go ]; do sleep 0.01; done", file.display());
            tokio::spawn(async move { performer.perform(&command(script), &occasion()).await })
        };
        let runs: Vec<_> = (0..=AFTER_RELEASE_MAX).map(wait).collect();
        let started = || (0..=AFTER_RELEASE_MAX).filter(|n| dir.path().join(n.to_string()).exists()).count();
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
        let first = (0..=AFTER_RELEASE_MAX).position(|n| dir.path().join(n.to_string()).exists()).unwrap();
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
