//! Read-only check of both copies, for `ledger verify`.
//!
//! The database follows the journal, so it may lack the latest entries. It must have everything
//! that was live at a known entry. For a daemon this is the latest entry, since the index thread
//! answers after all changes before. For files it is the last checkpoint. Later entries may be only
//! in the journal, and are counted as following.

use crate::domain::AllocId;
use crate::store::index::{DatabaseSnapshot, PendingReader, database_finding};
use crate::store::journal::{JournalReplay, codec, damage_finding, end_finding, segments};
use crate::store::layout::{database_dir, quarantined, require_journal, scratch};
use crate::store::lock::read_confirmed;
use crate::store::peek::copy_database;
use crate::store::{LivePayloads, Store, StoreError};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The content of both copies, and whether they agree (`ledger verify -o json`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// The version of this document's format.
    pub schema: u32,
    /// Whether nothing is missing, damaged or contradictory.
    pub sound: bool,
    /// The content of the journal.
    pub journal: JournalCheck,
    /// The content of the query database; `null` if it is unreadable.
    pub database: Option<DatabaseCheck>,
    /// The comparison of the live grants.
    pub live: LiveCheck,
    /// Damaged files of the past, kept for inspection.
    pub moved_aside: Vec<PathBuf>,
    /// Problems, one sentence each.
    pub problems: Vec<String>,
    /// Harmless remarks, one sentence each.
    pub remarks: Vec<String>,
}

/// The content of the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalCheck {
    /// The number of its files.
    pub segments: usize,
    /// Entries with a correct checksum.
    pub entries: u64,
    /// The number of the first entry.
    pub from: u64,
    /// The number of the last entry.
    pub to: u64,
    /// Live grants.
    pub live: usize,
    /// Names of devices.
    pub names: usize,
    /// Hooks after release that have not run.
    pub hooks: usize,
    /// Missing sequence numbers.
    pub missing: u64,
    /// Damaged files.
    pub damaged: Vec<PathBuf>,
    /// Bytes of torn writes, which were never confirmed.
    pub cut_off_bytes: u64,
}

/// The content of the query database.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatabaseCheck {
    /// Live grants.
    pub live: usize,
    /// Released grants.
    pub released: u64,
    /// Names of devices.
    pub names: usize,
    /// Hooks after release that have not run.
    pub hooks: usize,
    /// The last entry at its last checkpoint.
    pub applied: u64,
    /// Records with a wrong checksum.
    pub damaged: u64,
}

/// The comparison of the live grants.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveCheck {
    /// Equal in both copies.
    pub in_both: usize,
    /// Newer in the journal. The database follows.
    pub following: usize,
    /// Missing in the database.
    pub only_in_journal: Vec<AllocId>,
    /// Live in the database, and not in the journal.
    pub only_in_database: Vec<AllocId>,
    /// Different in the two copies.
    pub different: Vec<AllocId>,
}

/// A check of a running store that has begun.
#[derive(Debug)]
pub struct Verifier {
    dir: PathBuf,
    /// The live grants at the beginning, and the number of the latest entry.
    live: LivePayloads,
    confirmed: u64,
    reader: Result<PendingReader, StoreError>,
    remarks: Vec<String>,
}

impl Store {
    /// Begins a check. This takes as long as a copy of the live grants. The check itself reads the
    /// disk, and does not need the store.
    #[must_use]
    pub fn verifier(&self) -> Verifier {
        let report = &self.load().report;
        let remarks = if report.is_clean() {
            Vec::new()
        } else {
            vec![format!("found at the start: {report}")]
        };
        Verifier {
            dir: self.dir.clone(),
            live: self.live.clone(),
            confirmed: self.lock.confirmed(),
            reader: self.index.reader(),
            remarks,
        }
    }
}

impl Verifier {
    /// Reads both copies.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn verify(self) -> Result<Verification, StoreError> {
        let Verifier { dir, live, confirmed, reader, remarks } = self;
        // The database first: all its content is then in the journal too.
        let read = || {
            let reader = reader?.wait()?;
            Ok((reader.snapshot()?, reader))
        };
        let read: Result<_, StoreError> = read();
        let mut check = Check::new(&dir, confirmed)?;
        check.found.remarks.extend(remarks);
        match read {
            Ok((snapshot, reader)) => {
                check.database(&snapshot, true);
                check.live(&live, &snapshot, confirmed);
                let counted = reader.check_history(|record| check.released(record));
                check.problem(counted.err());
            }
            Err(error) => check.problem(Some(error)),
        }
        Ok(check.done())
    }
}

/// Checks the files of a ledger while no daemon runs.
///
/// # Errors
/// When there is no journal, it cannot be read, or a later version wrote it; and when another
/// process writes to it.
pub fn verify(state_dir: &Path) -> Result<Verification, StoreError> {
    let journal_dir = require_journal(state_dir)?;
    let before = stamps(&journal_dir);
    let scratch = scratch()?;
    let database_dir = database_dir(state_dir);
    let opened = database_dir.exists().then(|| copy_database(&database_dir, scratch.path()));
    let mut check = Check::new(state_dir, read_confirmed(state_dir))?;
    match opened {
        Some(Ok((database, snapshot))) => {
            let then = JournalReplay::read_upto(state_dir, snapshot.applied)?.live_payloads()?;
            check.database(&snapshot, true);
            check.live(&then, &snapshot, snapshot.applied);
            let counted = database.reader().check_history(|record| check.released(record));
            check.problem(counted.err());
            database.close();
        }
        Some(Err(error @ StoreError::Database { .. })) => check.problem(Some(error)),
        Some(Err(error)) => return Err(error),
        // A daemon that was killed soon after its first start has no database yet.
        None => {
            check.database(&DatabaseSnapshot::default(), false);
            check.live(&LivePayloads::new(), &DatabaseSnapshot::default(), 0);
        }
    }
    if stamps(&journal_dir) != before {
        return Err(StoreError::InUse { path: state_dir.to_owned() });
    }
    Ok(check.done())
}

/// The sizes and times of the journal's files, which show writes. The size alone does not: zeros
/// are written ahead.
fn stamps(dir: &Path) -> Vec<(PathBuf, Option<(u64, SystemTime)>)> {
    let stamp =
        |path: &Path| fs::metadata(path).and_then(|file| Ok((file.len(), file.modified()?))).ok();
    segments(dir)
        .unwrap_or_default()
        .into_iter()
        .map(|(_, path)| (path.clone(), stamp(&path)))
        .collect()
}

/// A check in progress.
struct Check {
    journal: JournalReplay,
    live: LivePayloads,
    found: Verification,
}

impl Check {
    /// Reads the journal. The last confirmed entry is known.
    fn new(state_dir: &Path, confirmed: u64) -> Result<Self, StoreError> {
        let journal = JournalReplay::read_during_writes(state_dir)?;
        let live = journal.live_payloads()?;
        let mut missing = journal.missing_in_gaps();
        let mut problems: Vec<String> =
            journal.damaged.iter().map(|path| damage_finding(path)).collect();
        if missing > 0 {
            problems.push(format!("entries missing from the journal: {missing}"));
        }
        problems.extend(end_finding(journal.last, confirmed));
        missing += confirmed.saturating_sub(journal.last);
        let torn = (journal.torn_bytes > 0)
            .then(|| format!("{} bytes of a torn write, never confirmed", journal.torn_bytes));
        let check = JournalCheck {
            segments: journal.segments.len(),
            entries: journal.entries,
            from: journal.oldest(),
            to: journal.last,
            live: live.len(),
            names: journal.notes.names.len(),
            hooks: journal.notes.hooks.len(),
            missing,
            damaged: journal.damaged.clone(),
            cut_off_bytes: journal.torn_bytes,
        };
        let remarks = torn.into_iter().collect();
        let moved_aside = quarantined(state_dir);
        let found = Verification {
            schema: 1,
            journal: check,
            moved_aside,
            problems,
            remarks,
            ..Verification::default()
        };
        Ok(Check { journal, live, found })
    }

    fn problem(&mut self, error: Option<StoreError>) {
        self.found.problems.extend(error.map(|error| error.to_string()));
    }

    fn database(&mut self, snapshot: &DatabaseSnapshot, exists: bool) {
        let found = DatabaseCheck {
            live: snapshot.live.len(),
            released: 0,
            names: snapshot.notes.names.len(),
            hooks: snapshot.notes.hooks.len(),
            applied: snapshot.applied,
            damaged: snapshot.damaged,
        };
        self.found.problems.extend(database_finding(
            self.journal.oldest(),
            snapshot.applied,
            exists,
        ));
        self.found.database = exists.then_some(found);
    }

    /// Compares the live grants. Those that were live at the entry `seq`, and still are, must be in
    /// the database.
    fn live(&mut self, then: &LivePayloads, snapshot: &DatabaseSnapshot, seq: u64) {
        let found = &mut self.found.live;
        for (id, (_, payload)) in &self.live {
            match (snapshot.live.get(id), then.get(id)) {
                (Some((_, there)), _) if is_same(there, payload) => found.in_both += 1,
                (Some(_), Some((_, before))) if is_same(before, payload) => {
                    found.different.push(id.clone());
                }
                (None, Some(_)) => found.only_in_journal.push(id.clone()),
                _ => found.following += 1,
            }
        }
        for id in snapshot.live.keys().filter(|id| !self.live.contains_key(*id)) {
            match self.journal.grants.get(id) {
                Some((released, _)) if *released > seq => found.following += 1,
                _ => found.only_in_database.push(id.clone()),
            }
        }
        let gone = then.keys().filter(|id| !self.journal.grants.contains_key(*id));
        self.found
            .problems
            .extend(gone.map(|id| format!("grant {id} is live, and is not in the journal")));
    }

    /// Checks a record of the history; `None` is unreadable.
    fn released(&mut self, record: Option<(AllocId, u64)>) {
        let Some(database) = &mut self.found.database else { return };
        let Some((id, seq)) = record else {
            database.damaged += 1;
            return;
        };
        database.released += 1;
        if self.live.get(&id).is_some_and(|(live, _)| (live + 1..=self.journal.last).contains(&seq))
        {
            self.found.problems.push(format!(
                "grant {id} is live in the journal, and released by entry {seq} in the database"
            ));
        }
    }

    fn done(self) -> Verification {
        let mut found = self.found;
        if let Some(damaged) =
            found.database.as_ref().map(|database| database.damaged).filter(|damaged| *damaged > 0)
        {
            found.problems.push(format!("damaged records in the query database: {damaged}"));
        }
        let LiveCheck { following, only_in_journal, only_in_database, different, .. } = &found.live;
        let list = |ids: &[AllocId], what: &str| {
            ids.iter().map(|id| format!("grant {id} {what}")).collect::<Vec<_>>()
        };
        found.problems.extend(list(only_in_journal, "is live, and is not in the query database"));
        found.problems.extend(list(
            only_in_database,
            "is live in the query database, and not in the journal",
        ));
        found
            .problems
            .extend(list(different, "differs between the query database and the journal"));
        if *following > 0 {
            found.remarks.push(format!(
                "the query database follows the journal, and does not have {following} grants yet"
            ));
        }
        found.sound = found.problems.is_empty();
        found
    }
}

/// Different versions may encode the same grant differently.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    one == other
        || codec::decode_grant(one).is_some_and(|grant| codec::decode_grant(other) == Some(grant))
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
