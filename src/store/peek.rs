//! Reads without the lock: for `who`, `history` and `ledger export` next to a daemon, or without
//! one.
//!
//! Nothing is written. The journal's segments have everything live.

use super::index::{Database, DatabaseSnapshot, open};
use super::journal::{self, JournalReplay};
use super::layout::{copy_directory, database_dir, journal_dir, require_journal, scratch};
use super::lock::read_confirmed;
use super::{Recovered, RecoveryReport, StoreError};
use crate::domain::{AllocId, Grant, GrantState, Timestamp};
use std::collections::BTreeMap;
use std::path::Path;

/// The live state by the journal.
///
/// # Errors
/// When there is no journal, it cannot be read, or a later version wrote it.
pub fn peek(state_dir: &Path) -> Result<Recovered, StoreError> {
    // First: the writer confirms only entries that it has written.
    let confirmed = read_confirmed(state_dir);
    let replay = read(state_dir)?;
    let mut report = RecoveryReport::of(&replay);
    report.findings.extend(journal::end_finding(replay.last, confirmed));
    Ok(Recovered::of(replay, report))
}

/// The bytes that were appended to the journal. Its files are longer, because zeros are written
/// ahead.
///
/// # Errors
/// When it cannot be read.
pub fn journal_bytes(state_dir: &Path) -> Result<u64, StoreError> {
    journal::bytes_used(&journal_dir(state_dir))
}

/// The released grants in the files.
#[derive(Debug)]
pub struct History {
    /// Every readable released grant, newest first.
    pub released: Vec<Grant>,
    /// The latest release that was removed because of age or number. The history is complete after
    /// it.
    pub forgotten_until: Option<Timestamp>,
    /// The reason why the query database, which has most of the history, could not be read.
    pub problem: Option<StoreError>,
}

/// Reads the history from the journal and from a copy of the query database in the temporary
/// directory.
///
/// # Errors
/// As [`peek`].
pub fn peek_history(state_dir: &Path) -> Result<History, StoreError> {
    let replay = read(state_dir)?;
    let copied =
        scratch().and_then(|scratch| history_of_copy(&database_dir(state_dir), scratch.path()));
    let ((stored, forgotten_until), problem) = match copied {
        Ok(read) => (read, None),
        Err(error) => (Default::default(), Some(error)),
    };
    let recent = replay.grants.into_values().map(|(_, grant)| grant);
    let recent = recent.filter(|grant| !grant.is_live());
    let all: BTreeMap<AllocId, Grant> =
        stored.into_iter().chain(recent).map(|grant| (grant.alloc_id.clone(), grant)).collect();
    let mut newest_first: Vec<Grant> = all.into_values().collect();
    let released_at = |grant: &Grant| {
        if let GrantState::Released { released_at, .. } = grant.state {
            released_at
        } else {
            grant.granted_at
        }
    };
    // The order of the database.
    newest_first.sort_by(|one, other| {
        (released_at(other), &other.alloc_id).cmp(&(released_at(one), &one.alloc_id))
    });
    Ok(History { released: newest_first, forgotten_until, problem })
}

fn read(state_dir: &Path) -> Result<JournalReplay, StoreError> {
    require_journal(state_dir)?;
    JournalReplay::read_during_writes(state_dir)
}

/// The released grants of the database in `dir`, and the latest removed release, read from a copy
/// in `scratch`.
fn history_of_copy(
    dir: &Path,
    scratch: &Path,
) -> Result<(Vec<Grant>, Option<Timestamp>), StoreError> {
    let (database, _) = copy_database(dir, scratch)?;
    let mut grants = Vec::new();
    let reader = database.reader();
    let read = reader.history(|grant| {
        grants.push(grant);
        true
    });
    let forgotten = read.and_then(|()| reader.forgotten_until());
    drop(reader);
    database.close();
    forgotten.map(|until| (grants, until))
}

/// Opens a copy of the database in `dir`: sled cannot open read-only, and two processes must not
/// open one database. A copy from during a write may not open.
pub(super) fn copy_database(
    dir: &Path,
    scratch: &Path,
) -> Result<(Database, DatabaseSnapshot), StoreError> {
    let copy = scratch.join("db");
    copy_directory(dir, &copy)?;
    open(&copy)
}
