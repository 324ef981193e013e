//! What is wrong with a node, and what to do: `holdfast doctor`.
//!
//! ```text
//!  the node's files, sockets, the daemon ── gather (looks, each on a thread, none waited for long) ─▶ Facts
//!  Facts ── CHECKS (pure, one file for each subject) ─▶ findings ─▶ Report
//!  Facts, the daemon's answers, its log ── bundle (without secrets) ─▶ an archive
//! ```
//!
//! A look reads and changes nothing: it may be taken of a node in production at any moment. What cannot be found out is
//! unknown, and nothing is said against it; a check that knows nothing says that it could not be made. Findings have codes
//! that stay (`codes.rs`), and `docs/doctor.md` has a section for each.

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
    Answer, Cdi, Clock, ContainerdFile, Daemon, Facts, HostFacts, Is, Kubelet, Ledger, Listing, Process, Resource, State, Wants, Writes,
};
pub use gather::{Place, gather};
pub use redact::Redactor;

use serde::Serialize;
use std::time::Duration;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Devices are not served, or what is remembered of them is in danger.
    Error,
    /// Something does not work as it was meant, or soon will not.
    Warning,
    /// Worth knowing; nothing has to be done.
    Note,
    /// Looked at, and in order.
    Ok,
}

impl Level {
    /// As it is printed.
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

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub level: Level,
    /// Names the kind of the finding for ever; of what is in order, the check.
    pub code: &'static str,
    /// On what: a path, a resource, a device.
    pub on: String,
    /// What was found.
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// What to do, in words.
    pub todo: String,
    /// What to type, where that is all.
    pub command: Option<String>,
}

impl Finding {
    /// A finding of this kind.
    pub fn new(code: &Code, on: impl ToString, found: impl Into<String>, todo: impl Into<String>) -> Self {
        let (level, why) = (code.level, code.why);
        Finding { level, code: code.name, on: on.to_string(), found: found.into(), why, todo: todo.into(), command: None }
    }

    /// The same, with a command that does it.
    #[must_use]
    pub fn by(self, command: impl Into<String>) -> Self {
        Finding { command: Some(command.into()), ..self }
    }
}

/// Everything that was found, the worst first (`doctor -o json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The version of this document's form.
    pub schema: u32,
    /// The version of the program that has looked.
    pub version: &'static str,
    /// The findings, what is in order last.
    pub findings: Vec<Finding>,
    /// The checks that could not be made, since nothing was known.
    pub unknown: Vec<&'static str>,
}

/// What may be true for a moment only: while a list is on its way to the kubelet, or while one daemon takes over from another.
const PASSING: [&str; 2] = [codes::KUBELET_LACKS_DEVICES.name, codes::TWO_DAEMONS.name];
/// How long such a moment is, and more.
const MOMENT: Duration = Duration::from_secs(2);

/// Looks at a node and makes every check; a second time where the first finds what may pass by itself.
#[must_use]
pub fn look(place: &Place) -> (Facts, Report) {
    let once = || {
        let facts = gather(place.clone());
        let report = examine(&facts);
        (facts, report)
    };
    let (facts, report) = once();
    if !report.findings.iter().any(|finding| PASSING.contains(&finding.code)) {
        return (facts, report);
    }
    std::thread::sleep(MOMENT);
    once()
}

impl Report {
    /// How many findings of a level there are.
    #[must_use]
    pub fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Whether somebody should do something.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.count(Level::Error) + self.count(Level::Warning) == 0
    }
}
