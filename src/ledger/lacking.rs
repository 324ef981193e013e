//! Finds grants that the kubelet's checkpoint has and the ledger never had, once after each start
//! of the actor.
//!
//! A damaged ledger knows that it may lack grants, and restores them from the checkpoint before it
//! serves. An undamaged ledger may lack grants too: its directory was restored from an older copy,
//! or the power was cut under `process-crash`. Its own content does not show that. So the ledger is
//! compared with the kubelet's checkpoint after the start, and missing grants come back as bound,
//! by the alloc-id that the kubelet stored.

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

/// The delay after the start: registrations, and the opening of the query database, come first.
const AFTER: Duration = Duration::from_secs(1);
/// The delay before the next try while the query database opens.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// The same after an error.
const AFTER_ERROR: Duration = Duration::from_secs(60);

/// The result of a comparison.
#[derive(Debug, Message)]
#[rtype(result = "()")]
enum Lacking {
    /// Our answers in the checkpoint that the ledger never had.
    These(Vec<CheckpointGrant>),
    /// The released grants or the checkpoint cannot be read yet.
    Unknown(Duration),
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
                Err(error) if matches!(error.downcast_ref(), Some(StoreError::Unopened { .. })) => {
                    Lacking::Unknown(AGAIN_AFTER)
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot compare the ledger with the kubelet's checkpoint; trying again in a minute");
                    Lacking::Unknown(AFTER_ERROR)
                }
            };
            // If the actor has failed in the meantime, its successor compares again.
            let _ = me.send(lacking).await;
        });
    }
}

/// Compares, on a thread that may block.
fn lacking(config: &LedgerConfig) -> Result<Vec<CheckpointGrant>, Box<dyn Error + Send + Sync>> {
    let mut kept = match config.checkpoint.read_kept() {
        // No device was ever granted on this node.
        Err(CheckpointError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(Vec::new());
        }
        read => read?,
    };
    let plan = Arc::clone(&config.plan.borrow());
    // Another Holdfast on this node may have other resources and its own ledger.
    kept.retain(|kept| plan.has(&kept.resource));
    let released = {
        let store = lock(&config.store);
        kept.retain(|kept| !store.is_live(&kept.alloc_id));
        if kept.is_empty() {
            return Ok(kept);
        }
        store.released_grants()?
    };
    let ids: BTreeSet<AllocId> = kept.iter().map(|kept| kept.alloc_id.clone()).collect();
    // Entries of removed pods stay in the checkpoint until its next write.
    let (released, forgotten_until) = released.look_up(&ids)?;
    Ok(unheard_of(kept, &released, forgotten_until))
}

impl Handler<Lacking> for LedgerActor {
    type Result = ();

    fn handle(&mut self, lacking: Lacking, context: &mut Self::Context) {
        let mut lacking = match lacking {
            Lacking::These(lacking) => lacking,
            Lacking::Unknown(pause) => {
                context.run_later(pause, Self::look_for_lacking_now);
                return;
            }
        };
        lacking.retain(|kept| self.ledger().grant(&kept.alloc_id).is_none());
        let grants = rebuild(lacking, &BTreeSet::new(), self.ledger().names(), host::now().wall);
        tracing::warn!(
            grants = grants.len(),
            "the ledger lacked grants that the kubelet's checkpoint has, as after a power cut or when its directory was put back from \
             an older copy; they are back"
        );
        let root = self.host_root();
        let resolved = grants
            .into_iter()
            .map(|grant| grant.resolve(|node| hardware::objects_of_node(&root, node)));
        let entries = resolved.map(|grant| Entry::Grant(Arc::new(grant))).collect();
        // No caller waits for this answer. A failed write is logged, and the next actor finds the
        // same again.
        drop(self.submit(entries, context));
        // The checkpoint does not contain the pods' names.
        context.notify(Reconcile);
    }
}
