//! Refused Allocates: at most one log line per resource every few seconds, and the number of
//! refusals since the ledger recorded its last grant.

use crate::domain::ResourceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The shortest time between two log lines of a resource. A controller replaces a refused pod at
/// once, and the next one is refused for the same reason.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// The refused Allocates of all resources and registrations. It outlives the serving actor.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Mutex<Refused>>);

#[derive(Debug, Default)]
struct Refused {
    /// The time of the last log line, and the number of refusals since without a line.
    logged: BTreeMap<ResourceName, (Instant, u64)>,
    unrecorded: Option<Unrecorded>,
}

/// Allocates that were refused because the grant could not be recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unrecorded {
    /// Number of refused Allocates since the last recorded grant.
    pub refused: u64,
    /// The reason of the last refusal.
    pub why: String,
}

impl Refusals {
    // Every change is a single step, so a panic elsewhere cannot leave it half done.
    fn lock(&self) -> MutexGuard<'_, Refused> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a refusal. If it is to be logged, returns the number of refusals without a line since
    /// the last one.
    pub(super) fn refused(&self, resource: &ResourceName, now: Instant) -> Option<u64> {
        let mut refused = self.lock();
        match refused.logged.get_mut(resource) {
            Some((at, untold)) if now < *at + LOG_EVERY => {
                *untold += 1;
                None
            }
            logged => {
                let untold = logged.map_or(0, |(_, untold)| *untold);
                refused.logged.insert(resource.clone(), (now, 0));
                Some(untold)
            }
        }
    }

    /// Counts a grant that could not be recorded.
    pub(super) fn not_recorded(&self, why: &str) {
        let mut refused = self.lock();
        let before = refused.unrecorded.as_ref().map_or(0, |unrecorded| unrecorded.refused);
        refused.unrecorded = Some(Unrecorded { refused: before + 1, why: why.to_owned() });
    }

    /// Resets the count: a grant was recorded.
    pub(super) fn recorded(&self) {
        self.lock().unrecorded = None;
    }

    /// The Allocates that were refused because no grant can be recorded, since the last recorded
    /// grant.
    #[must_use]
    pub fn unrecorded(&self) -> Option<Unrecorded> {
        self.lock().unrecorded.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_refusals_make_one_line_every_few_seconds_with_the_number_of_suppressed_ones() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let [gpu, nic] =
            ["nvidia.com/gpu", "example.com/nic"].map(|name| name.parse::<ResourceName>().unwrap());
        let logged =
            |resource, seconds| refusals.refused(resource, start + Duration::from_secs(seconds));
        assert_eq!(
            [logged(&gpu, 0), logged(&gpu, 1), logged(&nic, 1), logged(&gpu, 4)],
            [Some(0), None, Some(0), None]
        );
        assert_eq!([logged(&gpu, 5), logged(&gpu, 20)], [Some(2), Some(0)]);
    }

    #[test]
    fn unrecorded_grants_are_counted_until_one_is_recorded() {
        let refusals = Refusals::default();
        refusals.not_recorded("full");
        refusals.not_recorded("read-only");
        assert_eq!(refusals.unrecorded(), Some(Unrecorded { refused: 2, why: "read-only".into() }));
        refusals.recorded();
        assert_eq!(refusals.unrecorded(), None);
    }
}
