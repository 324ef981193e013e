//! How long the history is kept.

use std::time::Duration;

/// How much of what was given back is remembered. Live grants are no history: no bound of it touches them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How long a released grant is kept.
    pub age: Duration,
    /// Released grants that are kept, at most.
    pub grants: u64,
}

impl Default for Retention {
    /// Longer than the question "who had it when it failed?" usually takes to be asked.
    fn default() -> Self {
        Retention { age: Duration::from_secs(90 * 24 * 3600), grants: 100_000 }
    }
}
