//! Records of the ledger other than grants, kept for other actors: the ids of devices, and their
//! verdicts.

use super::actor::LedgerActor;
use crate::domain::Entry;
use crate::messages::{RecordVerdicts, Remember};
use crate::store::StoreError;
use actix::{Handler, ResponseFuture};
use std::sync::Arc;

impl Handler<Remember> for LedgerActor {
    type Result = ResponseFuture<Result<(), Arc<StoreError>>>;

    fn handle(&mut self, Remember(names): Remember, context: &mut Self::Context) -> Self::Result {
        let new = names.into_iter().filter(|(key, id)| self.ledger().names().get(key) != Some(id));
        let entries: Vec<Entry> = new.map(|(key, id)| Entry::Named { key, id }).collect();
        if entries.is_empty() {
            return Box::pin(std::future::ready(Ok(())));
        }
        let answered = self.submit(entries, context);
        Box::pin(super::committer::answer(answered))
    }
}

impl Handler<RecordVerdicts> for LedgerActor {
    type Result = ResponseFuture<Result<(), Arc<StoreError>>>;

    fn handle(
        &mut self,
        RecordVerdicts(verdicts): RecordVerdicts,
        context: &mut Self::Context,
    ) -> Self::Result {
        let news = verdicts
            .into_iter()
            .filter(|(device, verdict)| self.ledger().verdicts().get(device) != verdict.as_ref());
        let entries: Vec<Entry> = news
            .map(|(device, verdict)| Entry::Judged { device, verdict: verdict.map(Box::new) })
            .collect();
        if entries.is_empty() {
            return Box::pin(std::future::ready(Ok(())));
        }
        let answered = self.submit(entries, context);
        Box::pin(super::committer::answer(answered))
    }
}
