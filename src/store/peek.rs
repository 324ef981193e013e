//! Reading without the daemon's leave: for `who`, `history` and `ledger export` while one runs, or when none does.
//!
//! No lock is taken and nothing is written. The journal's segments alone tell everything that is live.

use super::layout::{database_dir, journal_dir};
use super::replay::Fold;
use super::{Recovered, RecoveryReport, StoreError, database, recovery};
use crate::domain::{AllocId, Grant, GrantState};
use std::collections::BTreeMap;
use std::path::Path;

/// What is live, as the journal tells it.
///
/// # Errors
/// When there is no journal, it cannot be read, or a later version wrote it.
pub fn peek(state_dir: &Path) -> Result<Recovered, StoreError> {
    let fold = read(state_dir)?;
    let mut report = RecoveryReport::default();
    let damaged: Vec<_> = fold.damaged.iter().map(|path| format!("journal segment `{}` is damaged", path.display())).collect();
    report.findings.extend(damaged);
    let truth = recovery::merge(fold, &database::Image::default(), &mut report, |_| BTreeMap::new());
    Ok(Recovered {
        grants: truth.live.into_values().map(|(_, grant)| grant).collect(),
        names: truth.names.into_iter().map(|(key, (_, id))| (key, id)).collect(),
        report,
    })
}

/// Every released grant that can be read, newest first: those that the journal still tells of and those of a copy of
/// the query database, made in the temporary directory. The second value says why the copy could not be read.
///
/// # Errors
/// As [`peek`].
pub fn peek_history(state_dir: &Path) -> Result<(Vec<Grant>, Option<StoreError>), StoreError> {
    let fold = read(state_dir)?;
    let copied = tempfile::tempdir()
        .map_err(StoreError::io("create", &std::env::temp_dir()))
        .and_then(|scratch| database::history_of_copy(&database_dir(state_dir), scratch.path()));
    let (shelved, trouble) = match copied {
        Ok(grants) => (grants, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let told = fold.grants.into_values().map(|(_, grant)| grant).filter(|grant| !grant.is_live());
    let all: BTreeMap<AllocId, Grant> = shelved.into_iter().chain(told).map(|grant| (grant.alloc_id.clone(), grant)).collect();
    let mut newest_first: Vec<Grant> = all.into_values().collect();
    newest_first.sort_by_key(|grant| match grant.state {
        GrantState::Released { released_at, .. } => std::cmp::Reverse(released_at),
        _ => std::cmp::Reverse(grant.granted_at),
    });
    Ok((newest_first, trouble))
}

fn read(state_dir: &Path) -> Result<Fold, StoreError> {
    let dir = journal_dir(state_dir);
    if !dir.exists() {
        return Err(StoreError::NoJournal { path: state_dir.to_owned() });
    }
    Fold::read_beside_a_writer(&dir)
}
