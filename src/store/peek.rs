//! Reading without the daemon's leave: for `who`, `history` and `ledger export` while one runs, or when none does.
//!
//! No lock is taken and nothing is written. The journal's segments alone tell everything that is live.

use super::database::{Image, Shelf};
use super::layout::{copy_directory, database_to_read, is_there, journal_dir, peek_confirmed, scratch};
use super::replay::Fold;
use super::{Recovered, RecoveryReport, StoreError, journal, opening, recovery};
use crate::domain::{AllocId, Grant, GrantState, Timestamp};
use std::collections::BTreeMap;
use std::path::Path;

/// What is live, as the journal tells it.
///
/// # Errors
/// When there is no journal, it cannot be read, or a later version wrote it.
pub fn peek(state_dir: &Path) -> Result<Recovered, StoreError> {
    // First: a writer confirms only what it has written.
    let confirmed = peek_confirmed(state_dir);
    let fold = read(state_dir)?;
    let mut report = RecoveryReport::default();
    report.findings.extend(recovery::journal_findings(&fold));
    if confirmed > fold.last {
        report.findings.push(format!("the journal ends with entry {}, and entries up to {confirmed} were confirmed", fold.last));
    }
    let truth = recovery::merge(fold, &Image::default(), &mut report, |_| None);
    Ok(Recovered {
        owed: truth.owed(),
        grants: truth.live.into_values().map(|(_, grant)| grant).collect(),
        names: truth.names.into_iter().map(|(key, (_, id))| (key, id)).collect(),
        listed: truth.listed,
        verdicts: truth.verdicts,
        gone: truth.gone,
        report,
    })
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
    let fold = read(state_dir)?;
    let copied = scratch().and_then(|scratch| history_of_copy(&database_to_read(state_dir), scratch.path()));
    let ((shelved, forgotten_until), problem) = match copied {
        Ok(read) => (read, None),
        Err(error) => (Default::default(), Some(error)),
    };
    let told = fold.grants.into_values().map(|(_, grant)| grant).filter(|grant| !grant.is_live());
    let all: BTreeMap<AllocId, Grant> = shelved.into_iter().chain(told).map(|grant| (grant.alloc_id.clone(), grant)).collect();
    let mut newest_first: Vec<Grant> = all.into_values().collect();
    let released_at =
        |grant: &Grant| if let GrantState::Released { released_at, .. } = grant.state { released_at } else { grant.granted_at };
    // As the database has them.
    newest_first.sort_by(|one, other| (released_at(other), &other.alloc_id).cmp(&(released_at(one), &one.alloc_id)));
    Ok(History { released: newest_first, forgotten_until, problem })
}

fn read(state_dir: &Path) -> Result<Fold, StoreError> {
    is_there(state_dir)?;
    Fold::read_beside_a_writer(state_dir)
}

/// Released grants of the database in `dir`, and the latest that was forgotten, read from a copy in `scratch`.
fn history_of_copy(dir: &Path, scratch: &Path) -> Result<(Vec<Grant>, Option<Timestamp>), StoreError> {
    let (shelf, _) = open_copy(dir, scratch)?;
    let mut grants = Vec::new();
    let reader = shelf.reader();
    let read = reader.history(|grant| {
        grants.push(grant);
        true
    });
    let forgotten = read.and_then(|()| reader.forgotten_until());
    drop(reader);
    shelf.close();
    forgotten.map(|until| (grants, until))
}

/// The database in `dir`, as a copy in `scratch`: sled cannot open read-only, and must not be opened under a daemon that
/// uses it. A copy that was taken while sled was writing may not open.
pub(super) fn open_copy(dir: &Path, scratch: &Path) -> Result<(Shelf, Image), StoreError> {
    let copy = scratch.join("db");
    copy_directory(dir, &copy)?;
    opening::open_copy(&copy, dir)
}
