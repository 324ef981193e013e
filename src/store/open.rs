//! Opening: what both copies say becomes one truth.
//!
//! ```text
//!  the journal's newest segment is sound, and was written in this boot or closed in another ─▶ it is the truth; older
//!                                                    segments and the database are read behind the start
//!  otherwise ─▶ read everything, merge, and make both copies whole again before anybody relies on them
//! ```
//!
//! Within one boot nothing that was written can have been lost, synced or not: a sound segment then has everything that
//! is live. So has one whose last entry is noted durably as the last of all. After a power cut sled may have entries that
//! the journal lost.

use super::database::Image;
use super::desk::{Database, history_stays};
use super::journal::Journal;
use super::layout::{Lock, database_dir, journal_dir, quarantine};
use super::opening::{Opened, Opening, open_or_replace};
use super::recovery::{self, Notes, Truth, database_finding, encode_live, journal_findings, open_segment};
use super::replay::Fold;
use super::shelver::Shelver;
use super::{OLD_SEGMENTS_MAX, Recovered, RecoveryReport, Store, StoreError, journal};
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
        let had_database = database_dir.exists();
        let newest = journal::segments(&journal_dir)?.last().map(|(first, _)| *first);
        let vouched = boot_id.is_some() && (lock.is_of_boot(boot_id) || lock.is_closed_with(newest));
        let alone = if vouched { Fold::read_newest(state_dir)? } else { None };
        // Otherwise the two copies are read side by side.
        let opening = alone.is_none().then(|| Opening::begin(&database_dir));
        let mut fold = alone.map_or_else(|| Fold::read(state_dir), Ok)?;
        fold.expect_confirmed();

        let mut report = RecoveryReport { findings: journal_findings(&fold), ..RecoveryReport::default() };
        let (newest, damaged) = (fold.segments.last().map_or(0, |(first, _)| *first), fold.damaged.clone());
        let waits = opening.is_some();
        let (mut truth, database) = if let Some(opening) = opening {
            let opened = match open_or_replace(opening, &database_dir, &mut report.quarantined) {
                Ok(opened) => Some(Box::new(opened)),
                Err(error @ (StoreError::InUse { .. } | StoreError::Newer { .. })) => return Err(error),
                // The journal alone is enough to go on; every checkpoint tries the database again.
                Err(error) if error.is_for_want_of_room() => {
                    tracing::error!(%error, "the query database stays closed");
                    None
                }
                Err(error) => {
                    report.findings.push(error.to_string());
                    None
                }
            };
            (merge(fold, opened.as_deref(), had_database, &mut report), Database::Opened(opened))
        } else {
            let truth = recovery::merge(fold, &Image::default(), &mut report, |_| None);
            (truth, Database::Later { existed: had_database })
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
        // Only now is everything in a sound place, and the damaged may go.
        for path in damaged.iter().filter(|_| !journal.is_broken()) {
            report.quarantined.push(quarantine(path)?);
        }
        lock.note_boot(boot_id);
        let grants = std::mem::take(&mut truth.live).into_values().map(|(_, grant)| grant).collect();
        let shelver = Shelver::start(state_dir, retention, database, first, truth, live.clone())?;
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
        if !store.report.is_clean() {
            // After damage both copies are made whole before anybody relies on them.
            match store.checkpoint() {
                Err(error) if error.is_for_want_of_room() => tracing::error!(%error, "the ledger was damaged and cannot be mended"),
                done => done?,
            }
        } else if journal::segments(&journal_dir)?.len() > OLD_SEGMENTS_MAX + 1 {
            store.begin_checkpoint()?;
        }
        store.report.took = began.elapsed();
        let Notes { names, listed, owed, verdicts } = store.notes.clone();
        let recovered = Recovered { grants, names, listed, owed, verdicts, report: store.report.clone() };
        Ok((store, recovered))
    }
}

/// Both copies together, and what is wrong with the database.
fn merge(fold: Fold, opened: Option<&Opened>, had_database: bool, report: &mut RecoveryReport) -> Truth {
    let empty = Image::default();
    let image = match opened {
        Some(Opened { holds, salvaged, .. }) => {
            if report.findings.is_empty() || !had_database {
                report.findings.extend(database_finding(fold.oldest(), holds, had_database));
            }
            // What could be read of a damaged one counts, record by record.
            salvaged.as_ref().map_or(holds, |(image, why)| {
                report.findings.push(history_stays(why));
                image
            })
        }
        None => &empty,
    };
    recovery::merge(fold, image, report, |wanted| opened?.shelf.released_among(wanted).ok())
}
