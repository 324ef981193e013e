//! Recovery: one base, and then the later entries of the other copy.
//!
//! ```text
//!   the journal has everything from a complete head up to the last confirmed entry ─▶ the journal is the base
//!   otherwise ─▶ the newest whole copy is: the database as it was after its last entry, or an older head of the journal
//!   what the other copy has of later entries, whole, is applied by sequence number
//!   an entry after the base that neither has is missing: it is counted, and the kubelet's checkpoint is asked
//! ```

mod open;
mod verify;

pub use self::verify::{DatabaseCheck, JournalCheck, LiveCheck, Verification, Verifier, verify};

use super::StoreError;
use super::index::DatabaseSnapshot;
use super::journal::{JournalReplay, damage_finding};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What was found at start, for the log, `status` and `ledger verify`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Journal segments that were read.
    pub segments: usize,
    /// Entries that were read from them.
    pub entries: u64,
    /// Bytes of torn writes at the ends of segments: entries that were never confirmed.
    pub torn_bytes: u64,
    /// Live grants that only the query database still had.
    pub from_database: usize,
    /// Grants that only the kubelet's checkpoint still had.
    pub from_kubelet: usize,
    /// Entries that neither copy has. More than 0: the ledger is partial.
    pub missing: u64,
    /// Damaged files and directories, by the name that they were given.
    pub quarantined: Vec<PathBuf>,
    /// What was wrong, in words.
    pub findings: Vec<String>,
    /// How long opening took.
    pub took: Duration,
}

impl RecoveryReport {
    /// Whether there may have been grants that neither copy has: after damage, and where there is no journal at all.
    #[must_use]
    pub fn may_lack_grants(&self) -> bool {
        !self.is_clean() || self.segments == 0
    }

    /// Whether everything was there and sound. A torn write is no damage: kill -9 leaves one.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.missing == 0 && self.findings.is_empty()
    }

    /// What the journal alone has to report.
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
            write!(f, ", {torn_bytes} bytes of a torn write left out")?;
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

/// The rule. `journal` is all of the journal, `database` what the database held when it was opened.
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
        let over = JournalReplay::over(
            state_dir,
            database.last,
            &database.live,
            database.names.clone(),
            database.hooks.clone(),
        );
        let mut recovered = over.with_segments(&journal.segments)?;
        recovered.expect_confirmed();
        // A segment whose end is missing shows damage only beside the journal's own last entry.
        recovered.damaged = journal.damaged;
        recovered
    };
    // After a power cut the database may have entries that the journal lost.
    let last = recovered.last;
    for (id, (seq, payload)) in database.live.iter().filter(|(_, (seq, _))| *seq > last) {
        recovered.add_live(id, *seq, payload);
    }
    for (key, named) in database.names.iter().filter(|(_, (seq, _))| *seq > last) {
        recovered.names.insert(key.clone(), named.clone());
    }
    for (key, hook) in database.hooks.iter().filter(|(_, (seq, _))| *seq > last) {
        recovered.owed.insert(key.clone(), hook.clone());
    }
    recovered.last = last.max(database.last);
    report.missing = recovered.missing();
    report.from_database =
        recovered.live().filter(|(id, _)| known.binary_search(id).is_err()).count();
    Ok(recovered)
}
