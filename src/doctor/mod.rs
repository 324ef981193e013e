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
mod claims;
mod codes;
mod facts;
mod finding;
mod gather;
mod outline;
mod redact;
#[cfg(test)]
mod testing;

pub use checks::{CHECKS, Check, examine, resource_of_socket};
pub use claims::{Dra, DraApi, RefusedRequest};
pub use codes::{ALL as CODES, Code, Level};
pub use facts::{
    Answer, Cdi, Clock, ContainerdFile, Daemon, Facts, HostFacts, Kubelet, Ledger, Listing,
    NvidiaFacts, PathState, Process, Requirements, Resource, State, WriteAccess,
};
pub use finding::{Finding, Report};
pub use gather::{Target, gather, listening_plugins};
pub use redact::Redactor;

use std::time::Duration;

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
