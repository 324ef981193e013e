//! The ledger's part in hooks after release: it says which are due, and writes down what became of them.

use super::actor::LedgerActor;
use super::core::{ended, undue};
use crate::domain::{HookState, OwedHook};
use crate::host;
use crate::messages::HookEnded;
use crate::store::StoreError;
use actix::{Context, Handler, ResponseFuture};
use std::sync::Arc;

impl LedgerActor {
    /// Publishes the hooks that may run, before the grants whose end made them due: nobody sees the device free before.
    pub(super) fn publish_due(&self) {
        let due = self.ledger().due(&self.config.hooks);
        self.config.due.send_if_modified(|published| {
            let is_new = **published != due;
            if is_new {
                *published = Arc::new(due);
            }
            is_new
        });
    }

    /// Forgets what a former configuration has left.
    pub(super) fn drop_undue(&mut self, context: &mut Context<Self>) {
        let entries = undue(self.ledger(), &self.config.hooks);
        if !entries.is_empty() {
            tracing::warn!(
                hooks = entries.len(),
                "the configuration has no hook any more for devices that are owed one; they are free without it"
            );
            drop(self.submit(entries, context));
        }
    }
}

impl Handler<HookEnded> for LedgerActor {
    type Result = ResponseFuture<Result<(), Arc<StoreError>>>;

    fn handle(&mut self, HookEnded { hook, result }: HookEnded, context: &mut Self::Context) -> Self::Result {
        let Some(entry) = ended(self.ledger(), &hook, result, host::now().wall) else {
            return Box::pin(std::future::ready(Ok(())));
        };
        let answered = self.submit(vec![entry], context);
        Box::pin(super::actor::answer(answered))
    }
}

/// One line of the log for how far a hook has come.
pub(super) fn tell(hook: &OwedHook) {
    let OwedHook { resource, device, alloc_id, state, .. } = hook;
    match state {
        HookState::Due => tracing::info!(%resource, %device, %alloc_id, "given back; the hook after release is due"),
        HookState::Failed { tries, why, .. } => {
            tracing::error!(%resource, %device, %alloc_id, tries, why, "the hook after release has failed; the device stays unhealthy");
        }
        HookState::Done => tracing::info!(%resource, %device, %alloc_id, "the hook after release is done"),
    }
}
