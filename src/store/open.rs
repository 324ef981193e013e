//! Opening: what both copies say becomes one truth.
//!
//! ```text
//!  the journal's newest segment is sound, and was written in this boot or closed in another ─▶ it is the truth; older
//!                                                    segments and the database are read behind the start
//!  otherwise ─▶ read everything, merge, and make both copies whole again before anybody relies on them
//!  but for a database that is slow to open nobody waits ─▶ the journal is the truth; what only the database has is found
//!                                                    when it is open, and recorded again ([`Store::take_found`])
//! ```
//!
//! Within one boot nothing that was written can have been lost, synced or not: a sound segment then has everything that
//! is live. So has one whose last entry is noted durably as the last of all. After a power cut sled may have entries that
//! the journal lost.

use super::database::Image;
use super::desk::history_stays;
use super::follow::Start;
use super::journal::Journal;
use super::layout::{Lock, database_dir, journal_dir, quarantine, take_former_back};
use super::opening::{Attempt, LATE_AFTER, Opened};
use super::recovery::{self, Notes, Truth, database_finding, encode_live, journal_findings, open_segment};
use super::replay::Fold;
use super::shelver::Shelver;
use super::work::Database;
use super::{OLD_SEGMENTS_MAX, Recovered, RecoveryReport, SEGMENT_BYTES_MAX, Store, StoreError, journal};
use crate::domain::{Durability, Retention};
use crate::host::private::make_private_folder;
use std::path::Path;
use std::time::Instant;

impl Store {
    /// Opens the store, creating it where there is none, and rebuilds what is live. `boot_id` is that of the machine
    /// (`/proc/sys/kernel/random/boot_id`); without one both copies are always compared before anything is believed.
    ///
    /// # Errors
    /// When the directory is in use, cannot be written, or was written by a later version. Damage is no error: it is in
    /// the report.
    pub fn open(state_dir: &Path, durability: Durability, boot_id: Option<&str>) -> Result<(Store, Recovered), StoreError> {
        Store::open_keeping(state_dir, durability, boot_id, Retention::default())
    }

    /// The same, with a history of another length than the usual one.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_keeping(
        state_dir: &Path,
        durability: Durability,
        boot_id: Option<&str>,
        retention: Retention,
    ) -> Result<(Store, Recovered), StoreError> {
        let began = Instant::now();
        let journal_dir = journal_dir(state_dir);
        make_private_folder(&journal_dir).map_err(StoreError::io("create", &journal_dir))?;
        let mut lock = Lock::take(state_dir)?;

        let database_dir = database_dir(state_dir);
        take_former_back(&database_dir);
        let had_database = database_dir.exists();
        let newest = journal::segments(&journal_dir)?.last().map(|(first, _)| *first);
        let vouched = boot_id.is_some() && (lock.is_of_boot(boot_id) || lock.is_closed_with(newest));
        let alone = if vouched { Fold::read_newest(state_dir)? } else { None };
        // Otherwise the two copies are read side by side.
        let attempt = alone.is_none().then(|| Attempt::begin(&database_dir));
        let waits = attempt.is_some();
        let mut fold = alone.map_or_else(|| Fold::read(state_dir), Ok)?;
        fold.expect_confirmed();

        let mut report = RecoveryReport { findings: journal_findings(&fold), ..RecoveryReport::default() };
        let (newest, last) = (fold.segments.last().map_or(0, |(first, _)| *first), fold.last);
        let damaged = fold.damaged.clone();
        let opened = attempt.map_or(Ok(Err(None)), |attempt| wait_for(attempt, &mut report))?;
        let mut truth = match &opened {
            Ok(opened) => merge(fold, opened, had_database, &mut report),
            Err(_) => recovery::merge(fold, &Image::default(), &mut report, |_| None),
        };

        // A new segment always: an old one is never written to again.
        let first = truth.last.max(newest).max(lock.confirmed()) + 1;
        let live = encode_live(&mut truth)?;
        let notes = Notes::of(&truth);
        let (mut journal, next_seq) = match open_segment(&journal_dir, first, &live, &notes) {
            // What is held is known, and to go on answering that is worth more than to fail.
            Err(error) if error.is_for_want_of_room() => {
                tracing::error!(%error, "the ledger cannot be written; nothing is recorded until it can");
                (Journal::none(&journal_dir)?, first)
            }
            opened => opened?,
        };
        if waits && !journal.is_broken() {
            journal.sync()?;
        }
        // Only now is everything in a sound place, and the damaged may go. A database that opens later is told of them too.
        for path in damaged.iter().filter(|_| opened.is_ok() && !journal.is_broken()) {
            report.quarantined.push(quarantine(path)?);
        }
        lock.note_boot(boot_id);
        let grants = std::mem::take(&mut truth.live).into_values().map(|(_, grant)| grant).collect();
        let is_late = waits && opened.is_err();
        let database = match opened {
            Ok(opened) => Database::Opened(Box::new((opened, truth, live.clone()))),
            Err(attempt) => {
                let start = Start { first, last, existed: had_database, may_have_lost: waits };
                Database::Later(Box::new((attempt, start)))
            }
        };
        let shelver = Shelver::start(state_dir, retention, database)?;
        let mut store = Store {
            dir: state_dir.to_owned(),
            durability,
            journal,
            failed: false,
            owed: Vec::new(),
            next_seq,
            live,
            notes,
            shelver,
            report,
            buffer: Vec::new(),
            lock,
        };
        if is_late {
            tracing::warn!("the ledger goes on without its query database, which is not open yet");
        } else if !store.report.is_clean() {
            // After damage both copies are made whole before anybody relies on them.
            match store.checkpoint() {
                Err(error) if error.is_for_want_of_room() => tracing::error!(%error, "the ledger was damaged and cannot be mended"),
                done => done?,
            }
        } else if is_long(&journal_dir, first)? {
            store.begin_checkpoint()?;
        }
        store.report.took = began.elapsed();
        let Notes { names, listed, owed, verdicts, gone } = store.notes.clone();
        let recovered = Recovered { grants, names, listed, owed, verdicts, gone, report: store.report.clone() };
        Ok((store, recovered))
    }
}

/// Whether the segments before this one should not wait for the first checkpoint: a daemon that does not live that long adds one at each
/// start.
fn is_long(journal_dir: &Path, first: u64) -> Result<bool, StoreError> {
    let older = journal::sizes_before(journal_dir, first)?;
    Ok(older.len() > OLD_SEGMENTS_MAX || older.iter().map(|(_, _, bytes)| bytes).sum::<u64>() > SEGMENT_BYTES_MAX)
}

/// Waits for the database, but not for a slow disk: the attempt itself where that goes on, nothing where the system refuses.
///
/// # Errors
/// When another process has the database, or a later version wrote it.
fn wait_for(mut attempt: Attempt, report: &mut RecoveryReport) -> Result<Result<Opened, Option<Attempt>>, StoreError> {
    match attempt.wait_for(LATE_AFTER, || Ok(()), &mut report.quarantined) {
        None => Ok(Err(Some(attempt))),
        Some(Ok(opened)) => Ok(Ok(opened)),
        Some(Err(error @ (StoreError::InUse { .. } | StoreError::Newer { .. }))) => Err(error),
        // The journal alone is enough to go on, and the database is tried again.
        Some(Err(error)) => {
            tracing::error!(%error, "the query database cannot be opened");
            Ok(Err(None))
        }
    }
}

/// Both copies together, and what is wrong with the database.
fn merge(fold: Fold, opened: &Opened, had_database: bool, report: &mut RecoveryReport) -> Truth {
    let Opened { shelf, holds, salvaged } = opened;
    if report.findings.is_empty() || !had_database {
        report.findings.extend(database_finding(fold.oldest(), holds, had_database));
    }
    // What could be read of a damaged one counts, record by record.
    let image = salvaged.as_ref().map_or(holds, |(image, why)| {
        report.findings.push(history_stays(why));
        image
    });
    recovery::merge(fold, image, report, |wanted| shelf.released_among(wanted).ok())
}
