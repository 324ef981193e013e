//! Takes over the grants that another plugin made for a resource that Holdfast offers now, before
//! its first list, and whenever the checkpoint has another one: two plugins may run for some time.
//!
//! A node moves to Holdfast without a drain if the ids are the same. The kubelet's checkpoint shows
//! which container has which id, so these ids are in the first list, and held. Otherwise a network
//! function in a pod's network namespace would be missing from the list, and the kubelet would
//! reject its pod at the next restart.

use super::actor::LedgerActor;
use super::committer::lock;
use super::core::rebuild;
use crate::domain::{AllocId, Checkpoint, CheckpointGrant, Entry, ResourceName};
use crate::hardware;
use crate::host;
use crate::kubelet::checkpoint::{CheckpointError, CheckpointReader};
use crate::messages::{Reconcile, TakeOver};
use actix::{
    ActorFutureExt, AsyncContext, Context, Handler, Message, ResponseActFuture, WrapFuture,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The kubelet's checkpoint, read while no device is held.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Read(Option<Arc<Checkpoint>>);

impl LedgerActor {
    /// Reads the checkpoint while there is nothing to reconcile.
    pub(super) fn look_for_others(&self, context: &Context<Self>) {
        let (checkpoint, me) = (self.reconciler.observer.checkpoint(), context.address());
        actix::spawn(async move {
            let checkpoint = checkpoint.await;
            // If the actor has failed in the meantime, its successor reads again.
            let _ = me.send(Read(checkpoint)).await;
        });
    }
}

impl Handler<Read> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Read(checkpoint): Read, context: &mut Self::Context) {
        let Some(checkpoint) = checkpoint else { return };
        let plan = Arc::clone(&self.config.plan.borrow());
        let resources = self.state.others(&checkpoint, |resource| plan.has(resource));
        if !resources.is_empty() {
            context.notify(TakeOver(resources.into_iter().collect()));
        }
    }
}

/// The delay before the next try after an error.
const AFTER_ERROR: Duration = Duration::from_secs(60);

/// The answers of other plugins for these resources in the kubelet's checkpoint.
fn others(
    checkpoint: &CheckpointReader,
    resources: &[ResourceName],
) -> Result<Vec<CheckpointGrant>, CheckpointError> {
    let mut kept = match checkpoint.read_others() {
        // No device was ever granted on this node.
        Err(error) if error.is_missing() => return Ok(Vec::new()),
        read => read?,
    };
    kept.retain(|kept| resources.contains(&kept.resource));
    Ok(kept)
}

impl Handler<TakeOver> for LedgerActor {
    type Result = ResponseActFuture<Self, Result<usize, String>>;

    fn handle(&mut self, message: TakeOver, _: &mut Self::Context) -> Self::Result {
        let TakeOver(resources) = message.clone();
        let (checkpoint, store) = (self.config.checkpoint.clone(), Arc::clone(&self.config.store));
        let read = move || {
            let kept = others(&checkpoint, &resources).map_err(|error| error.to_string())?;
            let ids: BTreeSet<AllocId> = kept.iter().map(|kept| kept.alloc_id.clone()).collect();
            // A released grant may stay in the checkpoint until its next write.
            let known = lock(&store).known_among(ids);
            Ok((kept, known()))
        };
        let read = async move {
            tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| Err(error.to_string()))
        };
        let record = |read: Result<(Vec<CheckpointGrant>, BTreeSet<AllocId>), String>,
                      this: &mut Self,
                      context: &mut Self::Context| {
            let entries: Result<Vec<Entry>, String> = read.map(|(kept, known)| {
                let grants = rebuild(kept, &known, this.ledger().names(), host::now().wall);
                grants
                    .into_iter()
                    .map(|grant| {
                        Entry::Grant(Arc::new(
                            grant
                                .resolve(|node| hardware::objects_of_node(&this.host_root(), node)),
                        ))
                    })
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
        let publish = |recorded: Result<usize, String>,
                       this: &mut Self,
                       context: &mut Self::Context| {
            match &recorded {
                Ok(0) => {}
                Ok(grants) => {
                    tracing::info!(
                        grants,
                        "recorded grants that another plugin made; their containers keep the devices"
                    );
                    // The next list must contain them.
                    this.publish();
                    // The checkpoint does not contain the pods' names.
                    context.notify(Reconcile);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot record the grants of another plugin; a device that only such a grant names is not listed; trying again in a minute");
                    context.notify_later(message, AFTER_ERROR);
                }
            }
            recorded
        };
        Box::pin(read.into_actor(self).then(record).map(publish))
    }
}
