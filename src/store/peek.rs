//! Reading without a lock: for `who`, `history` and `ledger export` while a daemon runs, or when none does.
//!
//! Nothing is written. The journal's segments alone have everything that is live.

use super::index::{Database, DatabaseSnapshot, open};
use super::journal::{self, JournalReplay};
use super::layout::{copy_directory, database_dir, journal_dir, require_journal, scratch};
use super::lock::read_confirmed;
use super::{Recovered, RecoveryReport, StoreError};
use crate::domain::{AllocId, Grant, GrantState, Timestamp};
use std::collections::BTreeMap;
use std::path::Path;

/// What is live, as the journal tells it.
///
/// # Errors
/// When there is no journal, it cannot be read, or a later version wrote it.
pub fn peek(state_dir: &Path) -> Result<Recovered, StoreError> {
    // First: a writer confirms only what it has written.
    let confirmed = read_confirmed(state_dir);
    let replay = read(state_dir)?;
    let mut report = RecoveryReport::of(&replay);
    if confirmed > replay.last {
        report.findings.push(format!(
            "the journal ends with entry {}, and entries up to {confirmed} were confirmed",
            replay.last
        ));
    }
    Ok(Recovered::of(replay, report))
}

/// How many bytes the journal has written and keeps; files are longer, since room is made ahead.
///
/// # Errors
/// When it cannot be read.
pub fn journal_bytes(state_dir: &Path) -> Result<u64, StoreError> {
    journal::bytes_used(&journal_dir(state_dir))
}

/// What was given back, as far as the files tell.
#[derive(Debug)]
pub struct History {
    /// Every released grant that can be read, newest first.
    pub released: Vec<Grant>,
    /// The latest release that was forgotten, of age or for the number of them; after it nothing was.
    pub forgotten_until: Option<Timestamp>,
    /// Why the query database could not be read, which has most of it.
    pub problem: Option<StoreError>,
}

/// The history: what the journal still tells of and a copy of the query database, made in the temporary directory.
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
    let told = replay.grants.into_values().map(|(_, grant)| grant).filter(|grant| !grant.is_live());
    let all: BTreeMap<AllocId, Grant> =
        stored.into_iter().chain(told).map(|grant| (grant.alloc_id.clone(), grant)).collect();
    let mut newest_first: Vec<Grant> = all.into_values().collect();
    let released_at = |grant: &Grant| {
        if let GrantState::Released { released_at, .. } = grant.state {
            released_at
        } else {
            grant.granted_at
        }
    };
    // As the database has them.
    newest_first.sort_by(|one, other| {
        (released_at(other), &other.alloc_id).cmp(&(released_at(one), &one.alloc_id))
    });
    Ok(History { released: newest_first, forgotten_until, problem })
}

fn read(state_dir: &Path) -> Result<JournalReplay, StoreError> {
    require_journal(state_dir)?;
    JournalReplay::read_beside_a_writer(state_dir)
}

/// Released grants of the database in `dir`, and the latest that was forgotten, read from a copy in `scratch`.
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

/// The database in `dir`, as a copy in `scratch`: sled cannot open read-only, and must not be opened under a daemon that
/// uses it. A copy that was taken while sled was writing may not open.
pub(super) fn copy_database(
    dir: &Path,
    scratch: &Path,
) -> Result<(Database, DatabaseSnapshot), StoreError> {
    let copy = scratch.join("db");
    copy_directory(dir, &copy)?;
    open(&copy)
}
