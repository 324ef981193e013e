//! Runs the hooks after release: asked by what the ledger publishes as due, telling it what became of each run.
//!
//! ```text
//!   ledger ── due hooks (watch) ──▶ Schedule ── run ──▶ HookExecutor (a thread)
//!      ▲                              ▲  inventory: is the device there?       │
//!      └───────── HookEnded ──────────┴────────────────────────────────────────┘
//! ```
//!
//! What is owed is the ledger's, durable, and outlives everything here: a daemon that is killed between a release and its
//! hook runs it at its next start, and one that is killed between a run and its record runs it twice. A hook of which the
//! record cannot be written is run again too. Each device has one run at a time; a device that is not there waits for its
//! return, since there is nothing to be reset or wiped, and it may come back as it was left.

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

/// How long the ledger may take to write down what became of a run, before that is said and it is told again.
const RECORD_DEADLINE: Duration = Duration::from_secs(10);
/// Until a hook is tried again for which the system has no room.
const ROOM_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// When nothing is due, to look again all the same: nothing depends on it.
const IDLE: Duration = Duration::from_secs(3600);

/// Runs them.
#[derive(Debug)]
pub(super) struct Runner {
    pub(super) performer: HookExecutor,
    pub(super) due: watch::Receiver<Arc<DueHooks>>,
    pub(super) inventory: watch::Receiver<Arc<Inventory>>,
    pub(super) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(super) ended: Mailbox<HookEnded>,
}

impl Runner {
    /// Runs until the daemon ends; then what runs is killed, and stays owed.
    pub(super) async fn run(mut self) {
        let mut schedule = Schedule::default();
        let (mut runs, mut running) = (JoinSet::new(), BTreeMap::new());
        loop {
            let (due, inventory) = (self.due.borrow_and_update().clone(), self.inventory.borrow_and_update().clone());
            let now = host::now().boot;
            for run in schedule.start(&due, &inventory, now) {
                let key = run.key.clone();
                let task = runs.spawn(one(self.performer.clone(), self.grants.clone(), self.ended.clone(), run));
                running.insert(task.id(), key);
            }
            let wait = schedule.next_deadline().map_or(IDLE, |deadline| deadline.saturating_sub(now));
            tokio::select! {
                changed = self.due.changed() => if changed.is_err() { return },
                changed = self.inventory.changed() => if changed.is_err() { return },
                Some(ended) = runs.join_next_with_id() => {
                    // A panic has been logged, and is a failure that nobody has written down.
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
async fn one(performer: HookExecutor, grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>, ended: Mailbox<HookEnded>, run: Run) {
    let Run { key, owed, hook, device } = run;
    let sharer = sharer(&grants.borrow(), &hook, &device);
    let sharer = sharer.map(|alloc_id| format!("grant {alloc_id} has another part of its PCI function, which a reset would hit"));
    // What was wiped for the next pod would be the host's.
    let used = || match hardware::used_for(performer.host_root(), &device) {
        Ok(used) => used.map(|by| format!("the host uses it: {by}")),
        Err(failure) => Some(format!("it is not known whether the host uses it: {failure}")),
    };
    let result = match sharer.or_else(used) {
        Some(why) => Err(why),
        None => perform(&performer, &hook, &owed, device).await,
    };
    let message = HookEnded { hook: owed, result };
    loop {
        match ended.call(message.clone(), RECORD_DEADLINE).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => {
                return tracing::warn!(device = %key.1, %error, "the end of a hook cannot be written down; it will be run again");
            }
            // It may be written down any moment, and somebody start with the device: nothing is run beside that.
            Err(error @ CallError::TimedOut(..)) => tracing::warn!(device = %key.1, %error, "the end of a hook is not written down yet"),
            Err(error @ CallError::GivenUp(_)) => return tracing::warn!(device = %key.1, %error, "the end of a hook is not written down"),
        }
    }
}

/// One that the system has no room for has not failed: it waits, and is tried again.
async fn perform(performer: &HookExecutor, hook: &Hook, owed: &PendingHook, device: Arc<Device>) -> Result<(), String> {
    let PendingHook { resource, alloc_id, pod, container, .. } = owed.clone();
    let occasion = Occasion { phase: Phase::AfterRelease, resource, device, alloc_id: Some(alloc_id), pod, container };
    loop {
        match performer.run(hook, &occasion).await {
            Err(error) if error.is_no_result(Phase::AfterRelease) => tokio::time::sleep(ROOM_AGAIN_AFTER).await,
            ended => return ended.map_err(|error| error.to_string()),
        }
    }
}

/// A grant that a reset would hit, although it does not have the device itself: whoever has that is held back.
fn sharer(grants: &[Arc<Grant>], hook: &Hook, device: &Device) -> Option<String> {
    let function = device.pci.as_ref().filter(|_| *hook == Hook::Reset)?.address.to_string();
    let has_it = |grant: &&Arc<Grant>| {
        let is_hit = |held: &GrantedDevice| held.function() == Some(&function) && held.key != device.key;
        grant.is_live() && grant.devices.iter().any(is_hit)
    };
    grants.iter().find(has_it).map(|grant| grant.alloc_id.to_string())
}
