//! `holdfast doctor`: finds the problems of a node, and how to fix them.
//!
//! ```text
//!  node's files, sockets, the daemon ── gather (each reader on a thread, with a deadline) ─▶ Facts
//!  Facts ── CHECKS (pure, one file for each subject) ─▶ findings ─▶ Report
//!  Facts, the daemon's answers, its log ── bundle (without secrets) ─▶ an archive
//! ```
//!
//! A reader changes nothing: it is safe on a production node at any time. Missing information is
//! unknown, and never counts as a problem; a check without enough facts reports that it could not
//! run. Findings have stable codes (`codes.rs`), and `docs/doctor.md` has a section for each.

pub mod bundle;
mod checks;
mod codes;
mod facts;
mod gather;
mod outline;
mod redact;
#[cfg(test)]
mod testing;

pub use checks::{CHECKS, Check, examine};
pub use codes::{ALL as CODES, Code};
pub use facts::{
    Answer, Cdi, Clock, ContainerdFile, Daemon, Facts, HostFacts, Kubelet, Ledger, Listing,
    PathState, Process, Requirements, Resource, State, WriteAccess,
};
pub use gather::{Target, gather};
pub use redact::Redactor;

use serde::Serialize;
use std::time::Duration;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Devices are not served, or their records are in danger.
    Error,
    /// A function does not work as intended, or will soon fail.
    Warning,
    /// Information; no action is needed.
    Note,
    /// A check without a problem.
    Ok,
}

impl Level {
    /// The level as it is printed.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Note => "note",
            Level::Ok => "ok",
        }
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its severity.
    pub level: Level,
    /// The stable name of its kind; for level `Ok`, the name of the check.
    pub code: &'static str,
    /// The object: a path, a resource, a device.
    pub on: String,
    /// The problem.
    pub found: String,
    /// The impact.
    pub why: &'static str,
    /// The fix, in words.
    pub todo: String,
    /// The command of the fix, if one is enough.
    pub command: Option<String>,
}

impl Finding {
    /// A finding of this kind.
    pub fn new(
        code: &Code,
        on: impl ToString,
        found: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        let (level, why) = (code.level, code.why);
        Finding {
            level,
            code: code.name,
            on: on.to_string(),
            found: found.into(),
            why,
            todo: todo.into(),
            command: None,
        }
    }

    /// Adds the command of the fix.
    #[must_use]
    pub fn by(self, command: impl Into<String>) -> Self {
        Finding { command: Some(command.into()), ..self }
    }
}

/// All findings, the worst first (`doctor -o json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The version of this document's format.
    pub schema: u32,
    /// The version of this program.
    pub version: &'static str,
    /// The findings; level `Ok` last.
    pub findings: Vec<Finding>,
    /// The checks that could not run without more facts.
    pub unknown: Vec<&'static str>,
}

/// Findings that may be transient: a list may be on its way to the kubelet, or one daemon may be
/// taking over from another.
const TRANSIENT: [&str; 2] = [codes::KUBELET_LACKS_DEVICES.name, codes::TWO_DAEMONS.name];
/// Longer than such a transition takes.
const RECHECK_AFTER: Duration = Duration::from_secs(2);

/// Examines a node with every check. Repeats it once if a finding may be transient.
#[must_use]
pub fn examine_node(target: &Target) -> (Facts, Report) {
    let once = || {
        let facts = gather(target.clone());
        let report = examine(&facts);
        (facts, report)
    };
    let (facts, report) = once();
    if !report.findings.iter().any(|finding| TRANSIENT.contains(&finding.code)) {
        return (facts, report);
    }
    std::thread::sleep(RECHECK_AFTER);
    once()
}

impl Report {
    /// Number of findings of a level.
    #[must_use]
    pub fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Whether there is neither an error nor a warning.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.count(Level::Error) + self.count(Level::Warning) == 0
    }
}
