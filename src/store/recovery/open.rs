//! Opening the store.
//!
//! ```text
//!   the journal is of this boot or was closed cleanly ─▶ its newest segments are read, back to a
//!                                    complete head, usually one segment; older segments and the
//!                                    database are read after the start
//!   otherwise, or if these segments lack an entry ─▶ the journal and the database are read in
//!                                    parallel, before anything is served
//!   the database is slow, or the system refuses to open it ─▶ the journal alone; entries that only
//!                                    the database has are recorded later ([`Store::found`])
//! ```
//!
//! Within one boot no written byte is lost, synced or not. After a clean stop, which is recorded
//! durably, no entry is lost either.

use super::{RecoveryReport, recover};
use crate::domain::{Durability, Entry, Retention};
use crate::host::private::make_private_folder;
use crate::store::index::{IndexWorker, Start, database_finding};
use crate::store::journal::{Journal, JournalReplay, codec, segments, sizes_before};
use crate::store::layout::{database_dir, journal_dir, quarantine};
use crate::store::lock::Lock;
use crate::store::notes::{encode_all, open_segment};
use crate::store::{OLD_SEGMENTS_MAX, Recovered, SEGMENT_BYTES_MAX, Store, StoreError};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The content of the copies that were read.
struct Found {
    replay: JournalReplay,
    report: RecoveryReport,
    start: Start,
    /// Whether the database was not ready in time.
    is_late: bool,
}

impl Store {
    /// Opens the store, or creates it, and recovers everything live. `boot_id` is that of the
    /// machine (`/proc/sys/kernel/random/boot_id`). Without one the database is always read before
    /// anything is served.
    ///
    /// # Errors
    /// When the directory is in use, cannot be written, or was written by a later version. Damage
    /// is no error: it is in the report.
    pub fn open(
        state_dir: &Path,
        durability: Durability,
        boot_id: Option<&str>,
    ) -> Result<(Store, Recovered), StoreError> {
        Store::open_keeping(state_dir, durability, boot_id, Retention::default())
    }

    /// [`Store::open`] with a limit of the history.
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
        let newest = segments(&journal_dir)?.last().map(|(first, _)| *first);
        let lost_nothing =
            boot_id.is_some() && (lock.is_of_boot(boot_id) || lock.is_closed_with(newest));
        let alone = if lost_nothing { JournalReplay::read_newest(state_dir)? } else { None };
        let reads_all = alone.is_none();
        let existed = database_dir(state_dir).exists();
        let index = IndexWorker::start(state_dir, retention)?;
        let Found { mut replay, mut report, start, is_late } = match alone {
            Some(replay) => journal_alone(replay, existed),
            None => read_both(state_dir, existed, &index)?,
        };

        // Always a new segment: an old one is never written again.
        let first = replay.last.max(newest.unwrap_or(0)).max(lock.confirmed()) + 1;
        let (live, notes) = (replay.live_payloads()?, replay.notes.clone());
        let (mut journal, mut next_seq) = match open_segment(&journal_dir, first, &live, &notes) {
            // The holders are known. Answering queries is better than to fail.
            Err(error) if error.is_out_of_resources() => {
                tracing::error!(%error, "the ledger cannot be written; grants are not recorded until it can");
                (Journal::none(&journal_dir)?, first)
            }
            opened => opened?,
        };
        if reads_all && !journal.is_broken() {
            if !replay.damaged.is_empty() {
                // The database follows the journal later, and then without the damaged segments.
                let released = released(&mut replay)?;
                let mut bytes = Vec::new();
                codec::frame(&mut bytes, next_seq, released.iter().map(Vec::as_slice));
                journal.append(&bytes)?;
                next_seq += released.len() as u64;
            }
            journal.sync()?;
            // Everything is durable in the new segment, so damaged ones may be quarantined.
            for path in &replay.damaged {
                report.quarantined.push(quarantine(path)?);
            }
        }
        lock.note_boot(boot_id);
        index.begin(start)?;
        let mut store = Store {
            dir: state_dir.to_owned(),
            durability,
            retention,
            journal,
            failed: false,
            unwritten: Vec::new(),
            next_seq,
            live,
            notes,
            index,
            report,
            buffer: Vec::new(),
            lock,
        };
        store.repair_after_start(is_late, first)?;
        store.report.took = began.elapsed();
        let recovered = Recovered::of(replay, store.report.clone());
        Ok((store, recovered))
    }

    /// After damage, repairs both copies before anything is served.
    fn repair_after_start(&mut self, is_late: bool, first: u64) -> Result<(), StoreError> {
        if is_late {
            tracing::warn!("starting without the query database, which is not open yet");
        } else if !self.report.is_clean() {
            match self.checkpoint() {
                Err(error) if error.is_out_of_resources() => {
                    tracing::error!(%error, "the ledger was damaged and cannot be repaired");
                }
                done => done?,
            }
        } else if is_long(&journal_dir(&self.dir), first)? {
            self.begin_checkpoint()?;
        }
        Ok(())
    }
}

/// The payloads of the released grants.
fn released(replay: &mut JournalReplay) -> Result<Vec<Vec<u8>>, StoreError> {
    let released = replay.take_released().into_iter();
    let entries: Vec<Entry> = released.map(|(_, grant)| Entry::Grant(Arc::new(grant))).collect();
    encode_all(&entries)
}

fn journal_alone(replay: JournalReplay, existed: bool) -> Found {
    let start = Start { existed: Some(existed), recounts: false, lost_after: replay.last };
    Found { report: RecoveryReport::of(&replay), replay, start, is_late: false }
}

/// Reads both copies in parallel. A slow disk of the database is not waited for.
fn read_both(state_dir: &Path, existed: bool, index: &IndexWorker) -> Result<Found, StoreError> {
    let opening = index.open()?;
    let mut journal = JournalReplay::read(state_dir)?;
    journal.expect_confirmed();
    let mut report = RecoveryReport::of(&journal);
    let lost_after =
        if journal.is_whole() { journal.last } else { journal.complete_from.saturating_sub(1) };
    let mut start = Start { existed: Some(existed), recounts: true, lost_after };
    let is_late = match opening.wait() {
        Ok(snapshot) => {
            if report.findings.is_empty() || !existed {
                report.findings.extend(database_finding(
                    journal.oldest(),
                    snapshot.applied,
                    existed,
                ));
            }
            let mut found = index.late();
            report.findings.append(&mut found.findings);
            report.quarantined.append(&mut found.quarantined);
            drop(found);
            journal = recover(state_dir, journal, &snapshot, &mut report)?;
            (start.existed, start.lost_after) = (None, u64::MAX);
            false
        }
        Err(error @ (StoreError::InUse { .. } | StoreError::Newer { .. })) => return Err(error),
        Err(error) => {
            tracing::warn!(%error, "failed to open the query database for the start");
            true
        }
    };
    Ok(Found { replay: journal, report, start, is_late })
}

/// Whether the older segments need a checkpoint at once: a daemon that dies before its first
/// checkpoint adds one at each start.
fn is_long(journal_dir: &Path, first: u64) -> Result<bool, StoreError> {
    let older = sizes_before(journal_dir, first)?;
    Ok(older.len() > OLD_SEGMENTS_MAX
        || older.iter().map(|(_, _, bytes)| bytes).sum::<u64>() > SEGMENT_BYTES_MAX)
}
