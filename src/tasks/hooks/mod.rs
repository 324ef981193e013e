//! Runs the hooks after release. The ledger publishes the due hooks, and gets the result of each
//! run.
//!
//! ```text
//!   ledger ── due hooks (watch) ──▶ Schedule ── run ──▶ HookExecutor (a thread)
//!      ▲                              ▲  inventory: is the device present?  │
//!      └───────── HookEnded ──────────┴─────────────────────────────────────┘
//! ```
//!
//! Due hooks are durable in the ledger. A daemon that is killed between a release and its hook runs
//! the hook at its next start. A daemon that is killed between a run and its record runs the hook
//! twice. If the record cannot be written, the hook runs again too. Each device has one run at a
//! time. An absent device cannot be reset or wiped, and it may come back unchanged. So its hook
//! waits for its return.

mod schedule;

use self::schedule::{Run, Schedule};
use crate::domain::{Device, DueHooks, Grant, GrantedDevice, Hook, Inventory, PendingHook, Phase};
use crate::hardware;
use crate::hook::{HookExecutor, Occasion};
use crate::host;
use crate::messages::{CallError, HookEnded, Mailbox};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long the ledger may take to record the result of a run, before that is logged and the result
/// is sent again.
const RECORD_DEADLINE: Duration = Duration::from_secs(10);
/// The pause before a hook is tried again that could not start for lack of processes or memory.
const RETRY_START_AFTER: Duration = Duration::from_secs(2);
/// The wait when no hook is due. Every change causes an event, so nothing depends on its length.
const IDLE: Duration = Duration::from_secs(3600);

/// The runner of hooks.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) performer: HookExecutor,
    pub(crate) due: watch::Receiver<Arc<DueHooks>>,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) ended: Mailbox<HookEnded>,
}

impl Runner {
    /// Runs until the daemon ends. Hooks that still run then are killed, and stay due.
    pub(crate) async fn run(mut self) {
        let mut schedule = Schedule::default();
        let (mut runs, mut running) = (JoinSet::new(), BTreeMap::new());
        loop {
            let (due, inventory) =
                (self.due.borrow_and_update().clone(), self.inventory.borrow_and_update().clone());
            let now = host::now().boot;
            for run in schedule.start(&due, &inventory, now) {
                let key = run.key.clone();
                let task = runs.spawn(one(
                    self.performer.clone(),
                    self.grants.clone(),
                    self.ended.clone(),
                    run,
                ));
                running.insert(task.id(), key);
            }
            let wait =
                schedule.next_deadline().map_or(IDLE, |deadline| deadline.saturating_sub(now));
            tokio::select! {
                changed = self.due.changed() => if changed.is_err() { return },
                changed = self.inventory.changed() => if changed.is_err() { return },
                Some(ended) = runs.join_next_with_id() => {
                    // A panic was logged. It is a failure that the ledger did not record.
                    let task = ended.map_or_else(|error| error.id(), |(task, ())| task);
                    if let Some(key) = running.remove(&task) {
                        schedule.ended(&key, host::now().boot);
                    }
                }
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}

/// One run, and its record.
async fn one(
    performer: HookExecutor,
    grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    ended: Mailbox<HookEnded>,
    run: Run,
) {
    let Run { key, pending, hook, device } = run;
    let sharer = sharer(&grants.borrow(), &hook, &device);
    let sharer = sharer.map(|alloc_id| format!("a reset would also reset another part of its PCI function, which grant {alloc_id} holds"));
    // A hook would reset or wipe a device that the host uses.
    let used = || match hardware::used_for(performer.host_root(), &device) {
        Ok(used) => used.map(|by| format!("the host uses the device: {by}")),
        Err(failure) => Some(format!("cannot check whether the host uses the device: {failure}")),
    };
    let result = match sharer.or_else(used) {
        Some(why) => Err(why),
        None => perform(&performer, &hook, &pending, device).await,
    };
    let message = HookEnded { hook: pending, result };
    loop {
        match ended.call(message.clone(), RECORD_DEADLINE).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => {
                return tracing::warn!(device = %key.1, %error, "cannot record the end of a hook; the hook will run again");
            }
            // The result may be recorded at any time, and then a pod may start with the device. So
            // the hook does not run again here.
            Err(error @ CallError::TimedOut(..)) => {
                tracing::warn!(device = %key.1, %error, "the end of a hook is not recorded yet");
            }
            Err(error @ CallError::GivenUp(_)) => {
                return tracing::warn!(device = %key.1, %error, "the end of a hook is not recorded");
            }
        }
    }
}

/// A hook that could not start for lack of processes or memory has not failed: it is tried again.
async fn perform(
    performer: &HookExecutor,
    hook: &Hook,
    pending: &PendingHook,
    device: Arc<Device>,
) -> Result<(), String> {
    let PendingHook { resource, alloc_id, pod, container, .. } = pending.clone();
    let occasion = Occasion {
        phase: Phase::AfterRelease,
        resource,
        device,
        alloc_id: Some(alloc_id),
        pod,
        container,
    };
    loop {
        match performer.run(hook, &occasion).await {
            Err(error) if error.is_no_result(Phase::AfterRelease) => {
                tokio::time::sleep(RETRY_START_AFTER).await;
            }
            ended => return ended.map_err(|error| error.to_string()),
        }
    }
}

/// A grant of another part of the PCI function, which a reset of this device would also reset. The
/// holder of the device itself cannot start before the hook has ended.
fn sharer(grants: &[Arc<Grant>], hook: &Hook, device: &Device) -> Option<String> {
    let function = device.pci.as_ref().filter(|_| *hook == Hook::Reset)?.address.to_string();
    let has_it = |grant: &&Arc<Grant>| {
        let is_reset =
            |held: &GrantedDevice| held.function() == Some(&function) && held.key != device.key;
        grant.is_live() && grant.held_devices().any(is_reset)
    };
    grants.iter().find(has_it).map(|grant| grant.alloc_id.to_string())
}
