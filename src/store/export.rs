//! Reading out what was: the history, and everything for `ledger export`.

use super::recovery::{LivePayloads, decode_grant};
use super::shelver::PendingHistory;
use super::{Store, StoreError};
use crate::domain::Grant;

/// An export that has begun: what was live at that moment, and the way to the history.
#[derive(Debug)]
pub struct Export {
    live: LivePayloads,
    history: PendingHistory,
}

impl Export {
    /// Every grant: those that were live, then the history, newest first. A grant that was released since is told once,
    /// as the live one that it was.
    ///
    /// # Errors
    /// When the query database fails.
    pub fn read(self) -> Result<Vec<Grant>, StoreError> {
        let mut grants: Vec<Grant> = self.live.values().filter_map(|(_, payload)| decode_grant(payload)).collect();
        self.history.wait()?.read(|grant| {
            if !self.live.contains_key(&grant.alloc_id) {
                grants.push(grant);
            }
            true
        })?;
        Ok(grants)
    }
}

impl Store {
    /// Released grants for which `keep` holds, newest first, at most `limit`.
    ///
    /// # Errors
    /// When the query database fails.
    pub fn history(&self, limit: usize, mut keep: impl FnMut(&Grant) -> bool) -> Result<Vec<Grant>, StoreError> {
        let mut found = Vec::new();
        self.shelver.history()?.wait()?.read(|grant| {
            if found.len() < limit && keep(&grant) {
                found.push(grant);
            }
            found.len() < limit
        })?;
        Ok(found)
    }

    /// What an export of every grant needs, taken in the time that a copy of the live ones takes. Reading the history
    /// takes seconds, and is done without the store.
    ///
    /// # Errors
    /// When too much waits for the query database.
    pub fn exporter(&self) -> Result<Export, StoreError> {
        Ok(Export { live: self.live.clone(), history: self.shelver.history()? })
    }
}
