//! The reader of the kubelet's file of claims: at each of its changes, with the delay of inotify,
//! and by a poll. Of several writes within the delay only the last one is seen, as after an
//! overflow.

use super::super::world::{MS, SECOND};
use super::LedgerShell;
use crate::domain::{Grant, KubeletClaims, Safeguard};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The poll, and the poll without inotify.
const POLL: Duration = Duration::from_secs(15);
const POLL_ALONE: Duration = SECOND;
/// The delay of an event: usually, and of a busy machine.
const DELAY: Duration = Duration::from_millis(10);
const LONG_DELAY: Duration = Duration::from_millis(300);

impl LedgerShell {
    pub(super) async fn follow_record(self: Arc<Self>) {
        let mut changes = self.world.records.subscribe();
        let mut grants = self.snapshot.subscribe();
        let is_deaf = self.world.random(|random| random.chance(0.1));
        let is_followed = Safeguard::ClaimChanges.is_on() && !is_deaf;
        let poll = if is_deaf && Safeguard::ClaimChanges.is_on() { POLL_ALONE } else { POLL };
        self.read_record();
        loop {
            if self.has_new_pod() {
                self.to_look.notify_one();
            }
            tokio::select! {
                biased;
                Ok(()) = changes.changed(), if is_followed => {
                    let is_late = self.world.random(|random| random.chance(0.05));
                    let most = if is_late { LONG_DELAY } else { DELAY };
                    self.world.pause(MS / 20, most).await;
                    self.read_record();
                }
                Ok(()) = grants.changed() => {}
                () = self.world.handle.sleep(poll) => drop(self.read_record()),
            }
        }
    }

    /// Reads the file now.
    pub(super) fn read_record(&self) -> KubeletClaims {
        let mut record = self.world.machine().kubelet_claims(self.world.moment());
        let grants = self.snapshot.borrow().clone();
        let is_recorded = |uid: &str, pod: &str| {
            let mut of_claim = live(&grants, uid).peekable();
            of_claim.peek().is_some() && of_claim.all(|known| known.contains(pod))
        };
        let mut cores = self.cores();
        record.keep_pods_of(&cores.record, is_recorded);
        cores.record = record.clone();
        record
    }

    /// Whether a live claim has a pod in the record that a grant of it lacks.
    fn has_new_pod(&self) -> bool {
        let (record, grants) = (self.cores().record.clone(), self.snapshot.borrow().clone());
        record.claims.iter().any(|(uid, claim)| {
            let mut lacks = live(&grants, uid)
                .map(|known| claim.pods.iter().any(|pod| !known.contains(pod.as_str())));
            lacks.any(|lacks| lacks)
        })
    }
}

/// The pods of each live grant of a claim.
fn live<'a>(
    grants: &'a [Arc<Grant>],
    claim: &'a str,
) -> impl Iterator<Item = BTreeSet<&'a str>> + 'a {
    let is_its =
        move |grant: &&Arc<Grant>| grant.claim.as_ref().is_some_and(|of| of.claim.uid == claim);
    let of_claim = grants.iter().filter(|grant| grant.is_live()).filter(is_its);
    of_claim.map(|grant| grant.pods().map(|pod| pod.uid.as_str()).collect())
}
