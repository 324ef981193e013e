//! What the kubelet's checkpoint has of ours and the ledger has never heard of, looked for once in each life.
//!
//! A damaged ledger knows that it may lack grants, and takes them from there before anything is served. A sound one may lack some
//! too: its directory was put back from an older copy, or the power was cut under `process-crash`. Nothing in it tells. So what
//! the kubelet keeps is held against it behind the start, and comes back bound, by the alloc-id that the kubelet has stored.

use super::actor::{LedgerActor, lock};
use super::core::{rebuild, unheard_of};
use crate::domain::{AllocId, Entry, Gather, KeptGrant};
use crate::host;
use crate::kubelet::checkpoint::{self, CheckpointError};
use crate::messages::Reconcile;
use actix::{AsyncContext, Context, Handler, Message};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

/// Behind the registrations, and the opening of the query database.
const AFTER: Duration = Duration::from_secs(1);

/// The answers of ours that the kubelet has kept.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Checkpointed(Vec<KeptGrant>);

/// Those of them that were never here.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Lacking(Vec<KeptGrant>);

impl LedgerActor {
    pub(super) fn look_for_lacking(&self, context: &mut Context<Self>) {
        context.run_later(AFTER, |this, context| {
            let (directory, me) = (this.config.device_plugins.clone(), context.address());
            actix::spawn(async move {
                match tokio::task::spawn_blocking(move || checkpoint::read_kept(&directory)).await {
                    // The actor may have died meanwhile; its next life looks for itself.
                    Ok(Ok(kept)) => drop(me.send(Checkpointed(kept)).await),
                    Ok(Err(CheckpointError::Io { source, .. })) if source.kind() == ErrorKind::NotFound => {}
                    Ok(Err(error)) => tracing::warn!(%error, "what the ledger may lack cannot be looked for"),
                    Err(error) => tracing::warn!(%error, "what the ledger may lack could not be looked for"),
                }
            });
        });
    }

    /// Whether it is live, or about to be written.
    fn has(&self, alloc_id: &AllocId) -> bool {
        let is_written = |entry: &Entry| matches!(entry, Entry::Grant(grant) if grant.alloc_id == *alloc_id);
        self.ledger.grant(alloc_id).is_some() || self.written().any(is_written)
    }
}

impl Handler<Checkpointed> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Checkpointed(mut kept): Checkpointed, context: &mut Self::Context) {
        let plan = Arc::clone(&self.config.plan.borrow());
        // Another Holdfast on this node may have other resources, and a ledger of its own.
        kept.retain(|kept| plan.specs.iter().any(|spec| spec.name == kept.resource) && !self.has(&kept.alloc_id));
        if kept.is_empty() {
            return;
        }
        let (past, me) = (lock(&self.config.store).past(), context.address());
        actix::spawn(async move {
            let ids: BTreeSet<AllocId> = kept.iter().map(|kept| kept.alloc_id.clone()).gather();
            match tokio::task::spawn_blocking(move || past?.look_up(&ids)).await {
                Ok(Ok((released, forgotten_until))) => {
                    // Entries of pods that have gone stay in the checkpoint until it is written again. As above.
                    let _ = me.send(Lacking(unheard_of(kept, &released, forgotten_until))).await;
                }
                Ok(Err(error)) => tracing::warn!(%error, "whether the ledger lacks what the kubelet's checkpoint has is not known"),
                Err(error) => tracing::warn!(%error, "what the ledger may lack could not be looked for"),
            }
        });
    }
}

impl Handler<Lacking> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Lacking(mut kept): Lacking, context: &mut Self::Context) {
        kept.retain(|kept| !self.has(&kept.alloc_id));
        let grants = rebuild(kept, &BTreeSet::new(), self.ledger.names(), host::now().wall);
        if grants.is_empty() {
            return;
        }
        tracing::warn!(
            grants = grants.len(),
            "the ledger lacked grants that the kubelet's checkpoint has, as after a power cut or when its directory was put back from \
             an older copy; they are back"
        );
        let entries = grants.into_iter().map(|grant| Entry::Grant(Arc::new(grant))).collect();
        let (written, me) = (self.submit(entries, context), context.address());
        actix::spawn(async move {
            // A failed write is logged, and the next life finds the same again.
            if let Ok(Ok(())) = written.await {
                // The checkpoint does not have the pods' names.
                let _ = me.send(Reconcile).await;
            }
        });
    }
}
