//! The ledger's part in claims of DRA: it records and releases them.
//!
//! A request waits in the mailbox behind a commit that concerns the same claim. So each decision
//! knows every earlier one. A request that changes nothing has a commit without entries: a process
//! that was killed before its fdatasync may have left the record in memory only.

use super::actor::LedgerActor;
use super::committer::Reply;
use super::core::{Recording, Vouched, is_one_claim, restore_claims, stuck_claim};
use crate::domain::{AllocId, Entry, Grant, NotReleased, Refusal};
use crate::host;
use crate::messages::{
    Reconcile, RecordClaim, RecordError, ReleaseClaim, ReleaseStuck, RestoreClaims, WithReply,
};
use actix::{AsyncContext, Context, Handler};
use std::sync::Arc;

impl Handler<WithReply<RecordClaim>> for LedgerActor {
    type Result = ();

    fn handle(&mut self, request: WithReply<RecordClaim>, context: &mut Self::Context) {
        let grants = &request.message.grants;
        if !is_one_claim(grants) {
            return drop(request.reply.send(Err(RecordError::NotOneClaim)));
        }
        let hold = grants.first().and_then(|grant| grant.claim.clone());
        let uid = hold.as_ref().map(|hold| hold.claim.uid.as_str()).unwrap_or_default();
        if self.state.is_uncommitted(uid) {
            return context.notify(request);
        }
        let cgroup = |uid: &str| self.reconciler.observer.cgroup(uid);
        let Recording { entries, answer } = self.state.record_claim(grants, &cgroup, host::now());
        match answer {
            Err(refusal) => {
                self.note_refused(grants, &refusal, context);
                let _ = request.reply.send(Err(RecordError::from(refusal)));
                if !entries.is_empty() {
                    // The former allocation. No caller waits for it: the request comes again.
                    drop(self.submit(entries, context));
                }
            }
            Ok(grants) => {
                self.schedule_commit(entries, Reply::Claim(request.reply, grants), context);
            }
        }
    }
}

impl Handler<WithReply<ReleaseClaim>> for LedgerActor {
    type Result = ();

    fn handle(&mut self, request: WithReply<ReleaseClaim>, context: &mut Self::Context) {
        let ReleaseClaim { claim, pods } = &request.message;
        let uid = &claim.uid;
        if self.state.is_uncommitted(uid) {
            return context.notify(request);
        }
        let cgroup = |uid: &str| self.reconciler.observer.cgroup(uid);
        let entries = self.state.release_claim(uid, pods, &cgroup, host::now().wall);
        self.schedule_commit(entries, Reply::Internal(request.reply), context);
    }
}

impl Handler<WithReply<RestoreClaims>> for LedgerActor {
    type Result = ();

    fn handle(&mut self, request: WithReply<RestoreClaims>, context: &mut Self::Context) {
        let RestoreClaims { kept, named } = &request.message;
        if kept.claims.keys().any(|uid| self.state.is_uncommitted(uid)) {
            return context.notify(request);
        }
        let new_id = || AllocId::new(uuid::Uuid::now_v7().to_string());
        let named = |name: &_| named.get(name).cloned();
        let restored = restore_claims(
            kept,
            self.ledger(),
            named,
            new_id,
            &self.config.boot_id,
            host::now().wall,
        );
        let count = restored.grants.len();
        if count == 0 {
            return drop(request.reply.send(Ok(0)));
        }
        let entries = restored.grants.into_iter().map(|grant| Entry::Grant(Arc::new(grant)));
        let written = self.submit(entries.collect(), context);
        actix::spawn(async move {
            // If the actor fails before the commit, the caller sends its message again.
            if let Ok(written) = written.await {
                drop(request.reply.send(written.map(|()| count)));
            }
        });
        // The kubelet's record does not have the pods' names.
        context.notify(Reconcile);
    }
}

impl Handler<WithReply<ReleaseStuck>> for LedgerActor {
    type Result = ();

    fn handle(&mut self, request: WithReply<ReleaseStuck>, context: &mut Self::Context) {
        let ReleaseStuck { claim, is_confirmed, kept } = &request.message;
        let claim = match stuck_claim(self.ledger(), claim) {
            Ok(claim) => claim,
            Err(error) => return drop(request.reply.send(Err(error))),
        };
        if self.state.is_uncommitted(&claim.uid) {
            return context.notify(request);
        }
        let cgroup = |uid: &str| self.reconciler.observer.cgroup(uid);
        let pods = Vouched { kept: kept.as_deref(), is_confirmed: *is_confirmed };
        let entries = self.state.release_stuck(&claim, pods, &cgroup, host::now().wall);
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) => return drop(request.reply.send(Err(error))),
        };
        tracing::warn!(%claim, uid = claim.uid, "an operator releases a claim");
        let written = self.submit(entries, context);
        actix::spawn(async move {
            if let Ok(written) = written.await {
                let done = written.map_err(|error| NotReleased::NotRecorded(error.to_string()));
                drop(request.reply.send(done.map(|()| claim)));
            }
        });
    }
}

impl LedgerActor {
    /// Observes the kubelet and the pods if the holder of a refused device may have ended: the
    /// usual pass may be later than the caller waits.
    fn note_refused(
        &mut self,
        wanted: &[Arc<Grant>],
        refusal: &Refusal,
        context: &mut Context<Self>,
    ) {
        tracing::debug!(%refusal, "claim not recorded yet");
        let lives =
            |grant: &Grant| grant.pods().any(|pod| self.reconciler.observer.lives(&pod.uid));
        let has_ended = wanted.iter().any(|grant| {
            grant.held_devices().any(|device| {
                self.ledger().holders(&grant.resource, &device.id).any(|holder| !lives(holder))
            })
        });
        if has_ended {
            self.reconcile(context);
        }
    }
}
