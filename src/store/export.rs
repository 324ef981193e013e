//! Reading out what was: the history, and everything for `ledger export`.

use super::database::{History, Shelf};
use super::layout::database_dir;
use super::recovery::{LivePayloads, decode_grant};
use super::{Store, StoreError};
use crate::domain::Grant;

/// An export that has begun: what was live at that moment, and the way to the history.
#[derive(Debug)]
pub struct Export {
    live: LivePayloads,
    history: History,
}

impl Export {
    /// Every grant: those that were live, then the history, newest first. A grant that was released since is told once,
    /// as the live one that it was.
    ///
    /// # Errors
    /// When the query database fails.
    pub fn read(&self) -> Result<Vec<Grant>, StoreError> {
        let mut grants: Vec<Grant> = self.live.values().filter_map(|(_, payload)| decode_grant(payload)).collect();
        self.history.read(|grant| {
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
        self.shelved_history()?.read(|grant| {
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
    /// When the query database is closed.
    pub fn exporter(&self) -> Result<Export, StoreError> {
        Ok(Export { live: self.live.clone(), history: self.shelved_history()? })
    }

    fn shelved_history(&self) -> Result<History, StoreError> {
        let closed = || StoreError::Database { path: database_dir(&self.dir), why: "it is closed after an error".into() };
        self.shelf.as_ref().map(Shelf::history).ok_or_else(closed)
    }
}
