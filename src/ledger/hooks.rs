//! The ledger's part in after-release hooks: it publishes the due hooks, records their results, and
//! keeps a container from starting while a hook of its device is pending.

use super::actor::LedgerActor;
use super::core::{HeldBack, Passage, View, ended, owing, passage, undue};
use super::observe::KubeletObserver;
use crate::domain::{
    AllocId, CgroupState, Checkpoint, DeviceId, Entry, KubeletGeneration, PodName, StartBlocked,
};
use crate::host;
use crate::messages::{CheckStart, HookEnded};
use crate::store::StoreError;
use actix::{
    ActorFutureExt, Context, Handler, ResponseActFuture, ResponseFuture, StreamHandler, WrapFuture,
};
use std::sync::Arc;

impl LedgerActor {
    /// Publishes the hooks that may run, before the grants whose release made them due: no
    /// subscriber sees the device free earlier.
    pub(super) fn publish_due(&self) {
        let due = self.ledger.due(&self.hooks, &self.held_back);
        self.config.due.send_if_modified(|published| {
            let is_new = **published != due;
            if is_new {
                *published = Arc::new(due);
            }
            is_new
        });
    }

    /// Adopts the hooks of the current list, which may come from another plan.
    pub(super) fn follow_hooks(&mut self, context: &mut Context<Self>) {
        let hooks = self.config.release_hooks();
        if hooks != self.hooks {
            self.hooks = hooks;
            self.drop_undue(context);
            self.publish_due();
        }
    }

    /// Drops pending hooks that only a former configuration had.
    pub(super) fn drop_undue(&mut self, context: &mut Context<Self>) {
        let entries = undue(&self.ledger, &self.hooks);
        if !entries.is_empty() {
            tracing::warn!(
                hooks = entries.len(),
                "the configuration no longer has a hook for devices with a pending one; they are free without it"
            );
            drop(self.submit(entries, context));
        }
    }
}

impl Handler<HookEnded> for LedgerActor {
    type Result = ResponseFuture<Result<(), Arc<StoreError>>>;

    fn handle(
        &mut self,
        HookEnded { hook, result }: HookEnded,
        context: &mut Self::Context,
    ) -> Self::Result {
        let Some(entry) = ended(&self.ledger, &hook, result, host::now().wall) else {
            return Box::pin(std::future::ready(Ok(())));
        };
        let answered = self.submit(vec![entry], context);
        Box::pin(super::committer::answer(answered))
    }
}

impl Handler<CheckStart> for LedgerActor {
    type Result = ResponseActFuture<Self, Result<(), (DeviceId, StartBlocked)>>;

    fn handle(&mut self, pass: CheckStart, _: &mut Self::Context) -> Self::Result {
        let checkpoint = self.reconciler.observer.checkpoint().into_actor(self);
        Box::pin(checkpoint.map(|checkpoint, this, context| this.pass(pass, checkpoint, context)))
    }
}

impl LedgerActor {
    fn pass(
        &mut self,
        CheckStart { resource, ids }: CheckStart,
        checkpoint: Option<Arc<Checkpoint>>,
        context: &mut Context<Self>,
    ) -> Result<(), (DeviceId, StartBlocked)> {
        let view = Now { observer: &self.reconciler.observer, checkpoint };
        let passage = passage(&self.ledger, &self.hooks, &resource, &ids, &view, host::now().wall);
        let Some(sharing) = self.hooks.get(&resource) else { return Ok(()) };
        let devices = ids.iter().map(|id| (resource.clone(), sharing.whole(&resource, id)));
        if passage.waits_for_hooks() {
            self.held_back.extend(devices);
            self.publish_due();
        } else {
            let devices: HeldBack = devices.collect();
            self.held_back.retain(|device| !devices.contains(device));
        }
        match passage {
            Passage::Open => Ok(()),
            Passage::Barred(id, barred) => {
                if let StartBlocked::Runs { cgroup: CgroupState::Unknown, .. } = barred {
                    // A pass finds the kubelet's cgroup hierarchies again.
                    self.reconcile(context);
                }
                Err((id, barred))
            }
            Passage::HandedOn(id, former, moves) => {
                // Such an entry may already wait for the commit.
                let released: Vec<&AllocId> = moves.iter().filter_map(released).collect();
                if !self
                    .committer
                    .entries()
                    .filter_map(self::released)
                    .any(|alloc_id| released.contains(&alloc_id))
                {
                    let mut entries =
                        owing(&self.ledger, &self.hooks, &moves, self.committer.entries());
                    entries.extend(moves);
                    // The container waits for the hooks that become due by this commit.
                    drop(self.submit(entries, context));
                }
                Err((id, StartBlocked::Due { former: former.to_string() }))
            }
        }
    }
}

/// Another kubelet may start, without a call, a container that the previous one had to leave. A
/// container that still has to wait calls again.
impl StreamHandler<Option<KubeletGeneration>> for LedgerActor {
    fn handle(&mut self, _: Option<KubeletGeneration>, _: &mut Self::Context) {
        self.held_back.clear();
        self.publish_due();
    }

    /// The publisher ends only with the daemon.
    fn finished(&mut self, _: &mut Self::Context) {}
}

fn released(entry: &Entry) -> Option<&AllocId> {
    if let Entry::Moved { alloc_id, .. } = entry { Some(alloc_id) } else { None }
}

/// The observations available while a container waits for its start.
struct Now<'a> {
    observer: &'a KubeletObserver,
    checkpoint: Option<Arc<Checkpoint>>,
}

impl View for Now<'_> {
    fn cgroup(&self, uid: &str) -> CgroupState {
        self.observer.cgroup(uid)
    }

    fn name(&self, uid: &str) -> Option<PodName> {
        self.observer.name(uid)
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_deref()
    }
}
