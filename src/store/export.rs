//! The history, and the export of everything for `ledger export`.

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

/// One line of an export: the notes first, then every live grant, then the released ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportLine {
    /// The durable facts other than grants.
    Notes {
        /// The id of each known device, by physical key.
        names: BTreeMap<String, DeviceId>,
        /// The last lists that the kubelet received.
        listed: Listed,
        /// After-release hooks that have not run.
        #[serde(default, skip_serializing_if = "PendingHooks::is_empty")]
        owed: PendingHooks,
        /// The verdicts on devices' health.
        #[serde(default, skip_serializing_if = "Verdicts::is_empty")]
        verdicts: Verdicts,
    },
    /// A grant.
    Grant(Box<Grant>),
}

/// An export that has begun: the live state at that moment, and a reader of the history.
#[derive(Debug)]
pub struct Export {
    dir: PathBuf,
    notes: Notes,
    live: LivePayloads,
    reader: Result<PendingReader, StoreError>,
}

impl Export {
    /// Passes every line to `take` until it returns false, the history newest first. Only the live
    /// state is in memory. A grant that was released since the beginning is passed once, as live.
    /// Returns the latest release that was removed because of age or number.
    ///
    /// # Errors
    /// When the query database fails, or is not open yet. The live grants, and the releases in the
    /// journal, were passed then.
    pub fn read(
        self,
        mut take: impl FnMut(ExportLine) -> bool,
    ) -> Result<Option<Timestamp>, StoreError> {
        let Export { dir, notes, live, reader } = self;
        let (names, owed) = (notes.device_names(), notes.pending_hooks());
        let Notes { listed, verdicts, .. } = notes;
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

/// The released grants in the journal, newest first. Each segment begins with everything live, so
/// it is read alone, and only one at a time is in memory.
fn released_in_journal(
    state_dir: &Path,
    take: &mut impl FnMut(Grant) -> bool,
) -> Result<(), StoreError> {
    for (first, path) in segments(&journal_dir(state_dir))?.into_iter().rev() {
        let mut replay = JournalReplay::of(state_dir);
        match replay.read_segment(first, &path) {
            // If a checkpoint has deleted it, the database has it.
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

/// A reader of the history that does not need the store.
#[derive(Debug)]
pub struct ReleasedGrants(PendingReader);

impl ReleasedGrants {
    /// Returns which of these grants were released, and the latest release that was removed: an
    /// older grant may be among the removed ones.
    ///
    /// # Errors
    /// When the query database fails: then the released grants are unknown.
    pub fn look_up(
        self,
        ids: &BTreeSet<AllocId>,
    ) -> Result<(BTreeSet<AllocId>, Option<Timestamp>), StoreError> {
        let reader = self.0.wait()?;
        Ok((reader.look_up(ids)?, reader.forgotten_until()?))
    }
}

impl Store {
    /// A reader of the releases up to now, for a thread that may block.
    ///
    /// # Errors
    /// When the queue of the query database is full.
    pub fn released_grants(&self) -> Result<ReleasedGrants, StoreError> {
        self.index.reader().map(ReleasedGrants)
    }

    /// Released grants for which `keep` returns true, newest first, at most `limit`.
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

    /// Begins an export. This takes as long as a copy of the live grants. Reading the history takes
    /// seconds, and does not need the store.
    ///
    /// # Errors
    /// When the queue of the query database is full.
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
