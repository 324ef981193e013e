//! Reading out what was: the history, and everything for `ledger export`.

use super::index::PendingReader;
use super::journal::{JournalReplay, codec, segments};
use super::layout::journal_dir;
use super::notes::Notes;
use super::{LivePayloads, Store, StoreError};
use crate::domain::{AllocId, DeviceId, Grant, Listed, PendingHooks, Timestamp, Verdicts};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// One of the things that a ledger tells: its notes first, then every live grant, then what was given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportLine {
    /// What is remembered beside grants.
    Notes {
        /// The id of each device that ever got one, by physical key.
        names: BTreeMap<String, DeviceId>,
        /// What the kubelet was told last.
        listed: Listed,
        /// What is owed to devices after their release.
        #[serde(default, skip_serializing_if = "PendingHooks::is_empty")]
        owed: PendingHooks,
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
    dir: PathBuf,
    notes: Notes,
    live: LivePayloads,
    reader: Result<PendingReader, StoreError>,
}

impl Export {
    /// Tells everything, the history newest first, until `take` says no more; nothing is kept in memory but what was live.
    /// A grant that was released since is told once, as the live one that it was. Returns the latest release that was forgotten, of age or
    /// for the number of them.
    ///
    /// # Errors
    /// When the query database fails, or is not open yet. What was live has been told then, and what the journal still has of the rest.
    pub fn read(
        self,
        mut take: impl FnMut(ExportLine) -> bool,
    ) -> Result<Option<Timestamp>, StoreError> {
        let Export { dir, notes: Notes { names, listed, owed, verdicts, gone: _ }, live, reader } =
            self;
        let held = live
            .values()
            .filter_map(|(_, payload)| codec::decode_grant(payload))
            .map(|grant| ExportLine::Grant(Box::new(grant)));
        if !std::iter::once(ExportLine::Notes { names, listed, owed, verdicts })
            .chain(held)
            .all(&mut take)
        {
            return Ok(None);
        }
        let mut take = |grant: Grant| {
            live.contains_key(&grant.alloc_id) || take(ExportLine::Grant(Box::new(grant)))
        };
        match reader.and_then(|reader| reader.wait()) {
            Ok(reader) => {
                reader.history(take)?;
                reader.forgotten_until()
            }
            Err(error) => {
                released_in_journal(&dir, &mut take)?;
                Err(error)
            }
        }
    }
}

/// What the journal tells of released grants, newest first. Each segment begins with everything that is live: so each tells by itself what
/// was released in it, and one at a time is in memory.
fn released_in_journal(
    state_dir: &Path,
    take: &mut impl FnMut(Grant) -> bool,
) -> Result<(), StoreError> {
    for (first, path) in segments(&journal_dir(state_dir))?.into_iter().rev() {
        let mut replay = JournalReplay::of(state_dir);
        match replay.read_segment(first, &path) {
            // A checkpoint has deleted it: then the database has it.
            Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => continue,
            read => read?,
        }
        let mut released = replay.take_released();
        released.sort_by(|(one, _), (other, _)| other.cmp(one));
        if !released.into_iter().all(|(_, grant)| take(grant)) {
            return Ok(());
        }
    }
    Ok(())
}

/// The way to the history, for whoever looks grants up in it without the store.
#[derive(Debug)]
pub struct Past(PendingReader);

impl Past {
    /// Which of these grants were released, and the latest release that was forgotten: one of an older grant may be among those.
    ///
    /// # Errors
    /// When the query database fails: then nobody knows what was released.
    pub fn look_up(
        self,
        ids: &BTreeSet<AllocId>,
    ) -> Result<(BTreeSet<AllocId>, Option<Timestamp>), StoreError> {
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
        self.index.reader().map(Past)
    }

    /// Released grants for which `keep` holds, newest first, at most `limit`.
    ///
    /// # Errors
    /// When the query database fails.
    pub fn history(
        &self,
        limit: usize,
        mut keep: impl FnMut(&Grant) -> bool,
    ) -> Result<Vec<Grant>, StoreError> {
        let mut found = Vec::new();
        self.index.reader()?.wait()?.history(|grant| {
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
        let reader = match self.index.reader() {
            Err(error @ StoreError::Database { .. }) => return Err(error),
            reader => reader,
        };
        Ok(Export {
            dir: self.dir.clone(),
            notes: self.notes.clone(),
            live: self.live.clone(),
            reader,
        })
    }
}
