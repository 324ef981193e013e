//! What users of Kubernetes see of the devices: Events of pods and of the node, a condition of the
//! node, and the status of claims. Pure: no clock, disk, log or connection.
//!
//! ```text
//!   inventory, ─┬▶ Seen ─┬─▶ Announcer ─▶ the next Event, or a wait
//!   verdicts,   │        └─▶ Keeper ────▶ the next patch of the node, or a wait
//!   grants      └▶ SeenClaim ▶ Statuses ▶ the next patch of a claim, or a wait
//! ```
//!
//! [`Announcer`], [`Keeper`] and [`Statuses`] compare what is true now with what they have written.
//! So there is no queue: while the API server is away, changes that were undone are never written,
//! and the newest state is written after it. The calls between a step and its [`Outcome`] are the
//! shell's.

pub mod announcer;
pub mod claims;
pub mod condition;
pub mod objects;
pub mod seen;
pub mod statuses;
mod words;

#[cfg(test)]
mod tests;

pub use announcer::Announcer;
pub use condition::Keeper;
pub use seen::Seen;
pub use statuses::Statuses;

use std::time::Duration;

/// The name of this program in the objects that it writes (`reportingController`).
pub const CONTROLLER: &str = crate::domain::DRA_DRIVER;

/// The pause after a refusal that only an administrator can end: a missing right. A cluster without
/// the right gets one request from each node in this time.
const FORBIDDEN_FOR: Duration = Duration::from_secs(300);

/// The next step of a core. Times are those of the caller's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<W> {
    /// Send this request, and report its outcome.
    Write(W),
    /// Nothing to do until this time; `None`: until something is observed.
    Wait(Option<Duration>),
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<T> {
    /// It was done.
    Accepted(T),
    /// The object does not exist (404).
    Absent,
    /// This request is refused, and will be: the namespace is terminating, a quota is used up, a
    /// policy denies it.
    Refused,
    /// A right is missing.
    Forbidden,
    /// No answer, or the API server is busy. It may want a pause (`Retry-After`).
    Failed(Option<Duration>),
}
