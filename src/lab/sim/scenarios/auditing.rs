//! The daemon's audit: compares the kubelet's list with the daemon's own.

use super::daemon::Inner;
use crate::domain::Safeguard;
use crate::registration::audit::{Audit, Foreign, Healthy, Seen};
use crate::registration::core::Event;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;

/// The deadline of a query.
const DEADLINE: Duration = Duration::from_secs(2);

/// The time that the daemon waits for another write of the checkpoint.
const SEEN_AFTER: Duration = Duration::from_millis(50);

/// The time of the next audit, and its result.
#[derive(Debug)]
pub(super) struct Auditing {
    audit: Mutex<Audit>,
    sooner: Notify,
}

impl Auditing {
    pub(super) fn new(now: Duration) -> Self {
        Auditing { audit: Mutex::new(Audit::new(now)), sooner: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Audit> {
        self.audit.lock().unwrap()
    }

    pub(super) fn registered(&self, now: Duration, doubt_until: Option<Duration>) {
        self.lock().registered(now, doubt_until);
        self.sooner.notify_one();
    }
}

impl Inner {
    pub(super) async fn audit(self: Arc<Self>) {
        let (mut written, mut kubelet) =
            (self.node.checkpoint_writes(), self.node.kubelet_socket());
        loop {
            let now = self.node.moment().boot;
            let due = self.audit.lock().next_deadline();
            if due <= now {
                self.audit.lock().begin(now);
                if Safeguard::Audit.is_on() {
                    self.compare().await;
                }
                continue;
            }
            tokio::select! {
                biased;
                _ = kubelet.changed() => self.audit.lock().new_kubelet(),
                _ = written.changed() => self.audit.lock().checkpoint_written(self.node.moment().boot + SEEN_AFTER),
                () = self.audit.sooner.notified() => {}
                () = self.node.handle().sleep(due - now) => {}
            }
        }
    }

    async fn compare(&self) {
        let healthy = self
            .node
            .handle()
            .timeout(DEADLINE, self.node.allocatable())
            .await
            .and_then(Result::ok);
        let seen = Seen {
            healthy,
            foreign: self.node.checkpoint().map(|checkpoint| Foreign::of(&checkpoint)),
        };
        let inventory = self.inventory.borrow().clone();
        let registered = self
            .registrations
            .iter()
            .filter(|(_, registration)| registration.lock().machine.is_registered());
        let ours: Healthy = registered
            .filter_map(|(name, _)| Some((name.clone(), inventory.resources.get(name)?.healthy())))
            .collect();
        let found = self.audit.lock().compare(&ours, seen, |_| true, self.node.moment().boot);
        for resource in found.keys() {
            self.registration(resource).send(Event::Mismatch);
        }
    }
}
