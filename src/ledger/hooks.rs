//! The ledger's part in after-release hooks: it publishes the due hooks, records their results, and
//! keeps a container from starting while a hook of its device is pending.

use super::actor::LedgerActor;
use super::core::{View, ended};
use super::observe::KubeletObserver;
use crate::domain::{CgroupState, Checkpoint, DeviceId, KubeletGeneration, PodName, StartBlocked};
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
        let due = self.state.due();
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
        if self.state.follow(self.config.release_hooks()) {
            self.drop_undue(context);
            self.publish_due();
        }
    }

    /// Drops pending hooks that only a former configuration had.
    pub(super) fn drop_undue(&mut self, context: &mut Context<Self>) {
        let entries = self.state.undue();
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
        let Some(entry) = ended(self.ledger(), &hook, result, host::now().wall) else {
            return Box::pin(std::future::ready(Ok(())));
        };
        let answered = self.submit(vec![entry], context);
        Box::pin(super::committer::answer(answered))
    }
}

impl Handler<CheckStart> for LedgerActor {
    type Result = ResponseActFuture<Self, Result<(), (DeviceId, StartBlocked)>>;

    fn handle(&mut self, asked: CheckStart, _: &mut Self::Context) -> Self::Result {
        let checkpoint = self.reconciler.observer.checkpoint().into_actor(self);
        Box::pin(
            checkpoint
                .map(|checkpoint, this, context| this.check_start(asked, checkpoint, context)),
        )
    }
}

impl LedgerActor {
    fn check_start(
        &mut self,
        CheckStart { resource, ids }: CheckStart,
        checkpoint: Option<Arc<Checkpoint>>,
        context: &mut Context<Self>,
    ) -> Result<(), (DeviceId, StartBlocked)> {
        let view = Now { observer: &self.reconciler.observer, checkpoint };
        let (answer, entries) = self.state.check_start(&resource, &ids, &view, host::now().wall);
        match &answer {
            Err((_, StartBlocked::Due { .. } | StartBlocked::Failed { .. })) => self.publish_due(),
            // A pass finds the kubelet's cgroup hierarchies again.
            Err((_, StartBlocked::Runs { cgroup: CgroupState::Unknown, .. })) => {
                self.reconcile(context);
            }
            _ => {}
        }
        if !entries.is_empty() {
            drop(self.submit(entries, context));
        }
        answer
    }
}

impl StreamHandler<Option<KubeletGeneration>> for LedgerActor {
    fn handle(&mut self, _: Option<KubeletGeneration>, _: &mut Self::Context) {
        self.state.new_kubelet();
        self.publish_due();
    }

    /// The publisher ends only with the daemon.
    fn finished(&mut self, _: &mut Self::Context) {}
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
