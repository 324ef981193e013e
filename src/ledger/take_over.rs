//! What another plugin has given away of a resource that Holdfast offers from now on.
//!
//! A node moves to Holdfast without a drain where the ids are the same: the kubelet's checkpoint tells who has which of them, so they are in the
//! first list, and held. Without that a function that is in a pod's network namespace would not be in the list at all, and the kubelet
//! would reject its pod at the next restart.

use super::actor::LedgerActor;
use super::committer::lock;
use super::core::rebuild;
use crate::domain::{AllocId, CheckpointGrant, Entry, ResourceName};
use crate::hardware;
use crate::host;
use crate::kubelet::checkpoint::{CheckpointError, CheckpointReader};
use crate::messages::{Reconcile, TakeOver};
use actix::{ActorFutureExt, AsyncContext, Handler, ResponseActFuture, WrapFuture};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What the kubelet's checkpoint has of other plugins' answers for these resources.
fn others(checkpoint: &CheckpointReader, resources: &[ResourceName]) -> Result<Vec<CheckpointGrant>, CheckpointError> {
    let mut kept = match checkpoint.read_others() {
        // No device was ever given out on this node.
        Err(error) if error.is_missing() => return Ok(Vec::new()),
        read => read?,
    };
    kept.retain(|kept| resources.contains(&kept.resource));
    Ok(kept)
}

impl Handler<TakeOver> for LedgerActor {
    type Result = ResponseActFuture<Self, Result<usize, String>>;

    fn handle(&mut self, TakeOver(resources): TakeOver, _: &mut Self::Context) -> Self::Result {
        let (checkpoint, store) = (self.config.checkpoint.clone(), Arc::clone(&self.config.store));
        let read = move || {
            let kept = others(&checkpoint, &resources).map_err(|error| error.to_string())?;
            let ids: BTreeSet<AllocId> = kept.iter().map(|kept| kept.alloc_id.clone()).collect();
            // One that was released may be in the checkpoint until it is written again. If it comes back, it is released again.
            let live = || ids.iter().filter(|id| lock(&store).is_live(id)).cloned().collect();
            let known = if ids.is_empty() { BTreeSet::new() } else { lock(&store).known_among(&ids).unwrap_or_else(|_| live()) };
            Ok((kept, known))
        };
        let read = async move { tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| Err(error.to_string())) };
        let record = |read: Result<(Vec<CheckpointGrant>, BTreeSet<AllocId>), String>, this: &mut Self, context: &mut Self::Context| {
            let entries: Result<Vec<Entry>, String> = read.map(|(kept, known)| {
                let grants = rebuild(kept, &known, this.ledger.names(), host::now().wall);
                grants
                    .into_iter()
                    .map(|grant| Entry::Grant(Arc::new(grant.resolve(|node| hardware::objects_of_node(&this.host_root(), node)))))
                    .collect()
            });
            let recorded = entries.map(|entries| {
                let count = entries.len();
                (count, (count > 0).then(|| this.submit(entries, context)))
            });
            async move {
                let (count, answered) = recorded?;
                if let Some(answered) = answered {
                    super::committer::answer(answered).await.map_err(|error| error.to_string())?;
                }
                Ok(count)
            }
            .into_actor(this)
        };
        let publish = |recorded: Result<usize, String>, this: &mut Self, context: &mut Self::Context| {
            if recorded.as_ref().is_ok_and(|count| *count > 0) {
                // The list that follows is to have them.
                this.publish();
                // The checkpoint does not have the pods' names.
                context.notify(Reconcile);
            }
            recorded
        };
        Box::pin(read.into_actor(self).then(record).map(publish))
    }
}
