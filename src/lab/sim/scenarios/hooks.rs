//! After-release hooks: their runner, and the gate before a container starts.

use super::daemon::Inner;
use crate::domain::{
    CgroupState, Checkpoint, DeviceId, PendingHook, PodName, ResourceName, StartBlocked,
};
use crate::lab::sim::memory::Node;
use crate::ledger::core::{View, ended};
use std::sync::Arc;
use std::time::Duration;

/// How long a run takes at most.
const RUN_MAX: Duration = Duration::from_millis(400);
/// The share of runs that fail, and the pause after one.
const FAILURES: f64 = 0.1;
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How often a container that has to wait is checked, and for how long.
const CHECK_EVERY: Duration = Duration::from_millis(200);
const CHECKED_FOR: Duration = Duration::from_secs(28);

impl Inner {
    /// Runs the hooks that may run, one after the other.
    pub(super) async fn run_hooks(self: Arc<Self>) {
        loop {
            let due = self.lock().actor.state.due();
            let Some(hook) = due.all().next().cloned() else {
                self.to_run.notified().await;
                continue;
            };
            let is_gated = due.free.is_empty();
            {
                let mut journal = self.disk.lock();
                journal.free_hooks += u64::from(!is_gated);
                journal.gated_hooks += u64::from(is_gated);
            }
            self.note_use(&hook);
            let (took, fails) = self.node.handle().random(|random| {
                (random.between(Duration::ZERO, RUN_MAX), random.chance(FAILURES))
            });
            self.node.handle().sleep(took).await;
            self.note_use(&hook);
            let result = if fails { Err("it failed".to_owned()) } else { Ok(()) };
            self.turn().await;
            let entry = ended(self.lock().actor.ledger(), &hook, result, self.node.moment().wall);
            self.commit(entry.into_iter().collect()).await;
            if fails {
                self.node.handle().sleep(AGAIN_AFTER).await;
            }
        }
    }

    /// Notes a container that has the device of a running hook.
    fn note_use(&self, hook: &PendingHook) {
        let user = self.node.view(|view| {
            let holders = view.holders();
            let has = |id: &DeviceId| *id == hook.device;
            let mut ours = holders.iter().filter(|holder| {
                let is_ours = holder.alloc_ids.contains_key(&hook.resource);
                is_ours && holder.devices.get(&hook.resource).is_some_and(|ids| ids.iter().any(has))
            });
            ours.next().map(|holder| format!("{}/{}", holder.pod_uid, holder.container))
        });
        if let Some(user) = user {
            let what = format!("the hook of {} ran while {user} had it", hook.device);
            self.disk.lock().hook_in_use.get_or_insert(what);
        }
    }

    /// Lets a container start, or waits as PreStartContainer does.
    pub(super) async fn wait_for_gate(
        &self,
        resource: &ResourceName,
        ids: &[DeviceId],
    ) -> Result<(), String> {
        let until = self.node.handle().now() + CHECKED_FOR;
        loop {
            self.turn().await;
            let view = Gate { node: &self.node, checkpoint: self.node.checkpoint() };
            let (answer, entries) =
                self.lock().actor.state.check_start(resource, ids, &view, self.node.moment().wall);
            if !entries.is_empty() {
                // The next check sees its effect.
                drop(self.submit(entries));
            }
            self.to_run.notify_one();
            let Err((id, blocked)) = answer else { return Ok(()) };
            let is_late = self.node.handle().now() + CHECK_EVERY > until;
            if is_late || matches!(blocked, StartBlocked::Failed { .. }) {
                return Err(format!("device {id} has to wait: {blocked}"));
            }
            self.node.handle().sleep(CHECK_EVERY).await;
        }
    }

    /// Another kubelet may start a container without a call.
    pub(super) async fn follow_kubelet(self: Arc<Self>) {
        let mut kubelet = self.node.kubelet_socket();
        while kubelet.changed().await.is_ok() {
            self.turn().await;
            self.lock().actor.state.new_kubelet();
        }
    }
}

struct Gate<'a> {
    node: &'a Node,
    checkpoint: Option<Arc<Checkpoint>>,
}

impl View for Gate<'_> {
    fn cgroup(&self, uid: &str) -> CgroupState {
        self.node.cgroup(uid)
    }

    fn name(&self, uid: &str) -> Option<PodName> {
        self.node.names().remove(uid)
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_deref()
    }
}
