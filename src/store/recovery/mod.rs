//! Recovery: one base, and then the later entries of the other copy.
//!
//! ```text
//!   the journal has everything from a complete head to the last confirmed entry ─▶ it is the base
//!   otherwise ─▶ the newest whole copy: sled at its last entry, or an older head of the journal
//!   later entries of the other copy are applied by sequence number
//!   a later entry that neither copy has is counted as missing; the kubelet's checkpoint is read
//! ```

mod open;
mod verify;

pub use self::verify::{DatabaseCheck, JournalCheck, LiveCheck, Verification, Verifier, verify};

use super::StoreError;
use super::index::DatabaseSnapshot;
use super::journal::{JournalReplay, damage_finding};
use super::notes::Notes;
use crate::domain::{DeviceId, Gone, Grant, Listed, PendingHooks, Verdicts};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The durable state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Live grants in the order of their ids, which is the order of their creation.
    pub grants: Vec<Grant>,
    /// The id of each known device, by physical key.
    pub names: BTreeMap<String, DeviceId>,
    /// The last list that the kubelet received for each resource.
    pub listed: Listed,
    /// After-release hooks that have not run.
    pub owed: PendingHooks,
    /// Verdicts on devices' health.
    pub verdicts: Verdicts,
    /// The times since when devices are absent.
    pub gone: Gone,
    /// The report of the recovery.
    pub report: RecoveryReport,
}

impl Recovered {
    pub(super) fn of(replay: JournalReplay, report: RecoveryReport) -> Self {
        let grants = replay.grants.into_values().map(|(_, grant)| grant);
        Recovered::with(grants.filter(Grant::is_live).collect(), replay.notes, report)
    }

    pub(super) fn with(grants: Vec<Grant>, notes: Notes, report: RecoveryReport) -> Self {
        let (names, owed) = (notes.device_names(), notes.pending_hooks());
        let Notes { listed, verdicts, gone, .. } = notes;
        Recovered { grants, names, listed, owed, verdicts, gone, report }
    }
}

/// The result of a recovery, for the log, `status` and `ledger verify`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Journal segments that were read.
    pub segments: usize,
    /// Entries that were read from them.
    pub entries: u64,
    /// Bytes of torn writes at the ends of segments. These entries were never confirmed.
    pub torn_bytes: u64,
    /// Live grants that only the query database had.
    pub from_database: usize,
    /// Grants that only the kubelet's checkpoint had.
    pub from_kubelet: usize,
    /// Entries that neither copy has. If more than 0, the ledger is partial.
    pub missing: u64,
    /// The new paths of damaged files and directories.
    pub quarantined: Vec<PathBuf>,
    /// Problems, one sentence each.
    pub findings: Vec<String>,
    /// The duration of the opening.
    pub took: Duration,
}

impl RecoveryReport {
    /// Whether grants may be missing: after damage, and if there was no journal.
    #[must_use]
    pub fn may_lack_grants(&self) -> bool {
        !self.is_clean() || self.segments == 0
    }

    /// Whether both copies were complete and intact. A torn write is no damage: kill -9 leaves one.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.missing == 0 && self.findings.is_empty()
    }

    /// The report on the journal alone.
    pub(super) fn of(journal: &JournalReplay) -> Self {
        RecoveryReport {
            segments: journal.segments.len(),
            entries: journal.entries,
            torn_bytes: journal.torn_bytes,
            missing: journal.missing(),
            findings: journal.damaged.iter().map(|path| damage_finding(path)).collect(),
            ..RecoveryReport::default()
        }
    }
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecoveryReport {
            segments,
            entries,
            torn_bytes,
            from_database,
            from_kubelet,
            missing,
            ..
        } = self;
        if *missing > 0 {
            write!(f, "partial, {missing} missing: ")?;
        }
        write!(f, "{entries} entries of {segments} journal segments")?;
        if *torn_bytes > 0 {
            write!(f, ", {torn_bytes} bytes of a torn write skipped")?;
        }
        if *from_database > 0 {
            write!(f, ", {from_database} grants from the query database")?;
        }
        if *from_kubelet > 0 {
            write!(f, ", {from_kubelet} grants from the kubelet's checkpoint")?;
        }
        for finding in &self.findings {
            write!(f, "; {finding}")?;
        }
        for path in &self.quarantined {
            write!(f, "; moved to `{}`", path.display())?;
        }
        Ok(())
    }
}

/// Applies the rule. `journal` is the whole journal, `database` the content of sled at its opening.
pub(super) fn recover(
    state_dir: &Path,
    journal: JournalReplay,
    database: &DatabaseSnapshot,
    report: &mut RecoveryReport,
) -> Result<JournalReplay, StoreError> {
    let known: Vec<_> = journal.grants.keys().cloned().collect();
    let mut recovered = if journal.is_whole() || database.last < journal.complete_from {
        journal
    } else {
        let over = JournalReplay::over(state_dir, database);
        let mut recovered = over.with_segments(&journal.segments)?;
        recovered.expect_confirmed();
        // Only the journal alone shows that the end of a segment is missing.
        recovered.damaged = journal.damaged;
        recovered
    };
    // After a power cut sled may have entries that the journal lost.
    recovered.add_later(database);
    report.missing = recovered.missing();
    report.from_database =
        recovered.live().filter(|(id, _)| known.binary_search(id).is_err()).count();
    Ok(recovered)
}
