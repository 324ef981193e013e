//! What the kubelet's checkpoint has of ours and the ledger has never heard of, looked for once in each life.
//!
//! A damaged ledger knows that it may lack grants, and takes them from there before anything is served. A sound one may lack some
//! too: its directory was put back from an older copy, or the power was cut under `process-crash`. Nothing in it tells. So what
//! the kubelet keeps is held against it behind the start, and comes back bound, by the alloc-id that the kubelet has stored.

use super::actor::LedgerActor;
use super::committer::lock;
use super::config::LedgerConfig;
use super::core::{rebuild, unheard_of};
use crate::domain::{AllocId, CheckpointGrant, Entry};
use crate::hardware;
use crate::host;
use crate::kubelet::checkpoint::CheckpointError;
use crate::messages::Reconcile;
use crate::store::StoreError;
use actix::{AsyncContext, Context, Handler, Message};
use std::collections::BTreeSet;
use std::error::Error;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

/// Behind the registrations, and the opening of the query database.
const AFTER: Duration = Duration::from_secs(1);
/// How long after a look that could not ask the query database there is another one.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// What came of a look.
#[derive(Debug, Message)]
#[rtype(result = "()")]
enum Lacking {
    /// Answers of ours that the kubelet has kept, and that were never here.
    These(Vec<CheckpointGrant>),
    /// What was released cannot be read yet.
    Unknown,
}

impl LedgerActor {
    pub(super) fn look_for_lacking(&self, context: &mut Context<Self>) {
        context.run_later(AFTER, Self::look_for_lacking_now);
    }

    fn look_for_lacking_now(&mut self, context: &mut Context<Self>) {
        let (config, me) = (self.config.clone(), context.address());
        actix::spawn(async move {
            let found = tokio::task::spawn_blocking(move || lacking(&config)).await;
            let lacking = match found.unwrap_or_else(|error| Err(error.into())) {
                Ok(lacking) if lacking.is_empty() => return,
                Ok(lacking) => Lacking::These(lacking),
                Err(error) if matches!(error.downcast_ref(), Some(StoreError::Unopened { .. })) => Lacking::Unknown,
                Err(error) => return tracing::warn!(%error, "whether the ledger lacks what the kubelet's checkpoint has is not known"),
            };
            // The actor may have died meanwhile; its next life looks for itself.
            let _ = me.send(lacking).await;
        });
    }
}

/// Looks, on a thread that may wait.
fn lacking(config: &LedgerConfig) -> Result<Vec<CheckpointGrant>, Box<dyn Error + Send + Sync>> {
    let mut kept = match config.checkpoint.read_kept() {
        // No device was ever given out on this node.
        Err(CheckpointError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    let plan = Arc::clone(&config.plan.borrow());
    // Another Holdfast on this node may have other resources, and a ledger of its own.
    kept.retain(|kept| plan.specs.iter().any(|spec| spec.name == kept.resource));
    let past = {
        let store = lock(&config.store);
        kept.retain(|kept| !store.is_live(&kept.alloc_id));
        if kept.is_empty() {
            return Ok(kept);
        }
        store.past()?
    };
    let ids: BTreeSet<AllocId> = kept.iter().map(|kept| kept.alloc_id.clone()).collect();
    // Entries of pods that have gone stay in the checkpoint until it is written again.
    let (released, forgotten_until) = past.look_up(&ids)?;
    Ok(unheard_of(kept, &released, forgotten_until))
}

impl Handler<Lacking> for LedgerActor {
    type Result = ();

    fn handle(&mut self, lacking: Lacking, context: &mut Self::Context) {
        let Lacking::These(mut lacking) = lacking else {
            context.run_later(AGAIN_AFTER, Self::look_for_lacking_now);
            return;
        };
        lacking.retain(|kept| self.ledger.grant(&kept.alloc_id).is_none());
        let grants = rebuild(lacking, &BTreeSet::new(), self.ledger.names(), host::now().wall);
        tracing::warn!(
            grants = grants.len(),
            "the ledger lacked grants that the kubelet's checkpoint has, as after a power cut or when its directory was put back from \
             an older copy; they are back"
        );
        let root = self.host_root();
        let resolved = grants.into_iter().map(|grant| grant.resolve(|node| hardware::objects_of_node(&root, node)));
        let entries = resolved.map(|grant| Entry::Grant(Arc::new(grant))).collect();
        // Nobody waits for this answer; a failed write is logged, and the next life finds the same again.
        drop(self.submit(entries, context));
        // The checkpoint does not have the pods' names.
        context.notify(Reconcile);
    }
}
