//! Reading out what was: the history, and everything for `ledger export`.

use super::recovery::{LivePayloads, Notes, decode_grant};
use super::shelver::PendingReader;
use super::{Store, StoreError};
use crate::domain::{AllocId, DeviceId, Grant, Listed, Owed, Timestamp, Verdicts};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One of the things that a ledger tells: its notes first, then every live grant, then what was given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// What is remembered beside grants.
    Notes {
        /// The id of each device that ever got one, by physical key.
        names: BTreeMap<String, DeviceId>,
        /// What the kubelet was told last.
        listed: Listed,
        /// What is owed to devices after their release.
        #[serde(default, skip_serializing_if = "Owed::is_empty")]
        owed: Owed,
        /// What is remembered of devices' health.
        #[serde(default, skip_serializing_if = "Verdicts::is_empty")]
        verdicts: Verdicts,
    },
    /// A grant.
    Grant(Box<Grant>),
}

/// An export that has begun: what was live at that moment, and the way to the history.
#[derive(Debug)]
pub struct Export {
    notes: Notes,
    live: LivePayloads,
    reader: PendingReader,
}

impl Export {
    /// Tells everything, the history newest first, until `take` says no more; nothing is kept in memory but what was live.
    /// A grant that was released since is told once, as the live one that it was. Returns the latest release that was forgotten, of age or
    /// for the number of them.
    ///
    /// # Errors
    /// When the query database fails. What was live has been told then.
    pub fn read(self, mut take: impl FnMut(Told) -> bool) -> Result<Option<Timestamp>, StoreError> {
        let Export { notes: Notes { names, listed, owed, verdicts }, live, reader } = self;
        let held = live.values().filter_map(|(_, payload)| decode_grant(payload)).map(|grant| Told::Grant(Box::new(grant)));
        if !std::iter::once(Told::Notes { names, listed, owed, verdicts }).chain(held).all(&mut take) {
            return Ok(None);
        }
        let reader = reader.wait()?;
        reader.history(|grant| live.contains_key(&grant.alloc_id) || take(Told::Grant(Box::new(grant))))?;
        reader.forgotten_until()
    }
}

/// The way to the history, for whoever looks grants up in it without the store.
#[derive(Debug)]
pub struct Past(PendingReader);

impl Past {
    /// Which of these grants were released, and the latest release that was forgotten: one of an older grant may be among those.
    ///
    /// # Errors
    /// When the query database fails: then nobody knows what was released.
    pub fn look_up(self, ids: &BTreeSet<AllocId>) -> Result<(BTreeSet<AllocId>, Option<Timestamp>), StoreError> {
        let reader = self.0.wait()?;
        Ok((reader.look_up(ids)?, reader.forgotten_until()?))
    }
}

impl Store {
    /// What was released up to now, to be looked up on a thread that may wait.
    ///
    /// # Errors
    /// When too much waits for the query database.
    pub fn past(&self) -> Result<Past, StoreError> {
        self.shelver.reader().map(Past)
    }

    /// Released grants for which `keep` holds, newest first, at most `limit`.
    ///
    /// # Errors
    /// When the query database fails.
    pub fn history(&self, limit: usize, mut keep: impl FnMut(&Grant) -> bool) -> Result<Vec<Grant>, StoreError> {
        let mut found = Vec::new();
        self.shelver.reader()?.wait()?.history(|grant| {
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
        Ok(Export { notes: self.notes.clone(), live: self.live.clone(), reader: self.shelver.reader()? })
    }
}
