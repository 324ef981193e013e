//! Allocates that were refused: one line in the log for each, a few seconds apart where they come in a crowd, and how many have been
//! refused since the ledger took its last grant.

use crate::domain::ResourceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// A controller replaces a pod that was refused at once, and the next one is refused for the same reason.
const SAID_EVERY: Duration = Duration::from_secs(5);

/// What has been refused, over all resources and registrations. It outlives the serving actor.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Mutex<Refused>>);

#[derive(Debug, Default)]
struct Refused {
    /// When one was told last, and how many were not since.
    said: BTreeMap<ResourceName, (Instant, u64)>,
    unrecorded: Option<Unrecorded>,
}

/// What was refused because the grant could not be recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unrecorded {
    /// How many Allocates, since one was recorded.
    pub refused: u64,
    /// Why the last of them was.
    pub why: String,
}

impl Refusals {
    // Every change is a single step, so a panic elsewhere cannot leave it half done.
    fn lock(&self) -> MutexGuard<'_, Refused> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of one. How many have not been told since the last that was, if this one is to be told.
    pub(super) fn refused(&self, resource: &ResourceName, now: Instant) -> Option<u64> {
        let mut refused = self.lock();
        match refused.said.get_mut(resource) {
            Some((at, untold)) if now < *at + SAID_EVERY => {
                *untold += 1;
                None
            }
            said => {
                let untold = said.map_or(0, |(_, untold)| *untold);
                refused.said.insert(resource.clone(), (now, 0));
                Some(untold)
            }
        }
    }

    /// A grant could not be recorded.
    pub(super) fn not_recorded(&self, why: &str) {
        let mut refused = self.lock();
        let before = refused.unrecorded.as_ref().map_or(0, |unrecorded| unrecorded.refused);
        refused.unrecorded = Some(Unrecorded { refused: before + 1, why: why.to_owned() });
    }

    /// A grant was recorded.
    pub(super) fn recorded(&self) {
        self.lock().unrecorded = None;
    }

    /// What was refused since a grant was recorded, because none can be.
    #[must_use]
    pub fn unrecorded(&self) -> Option<Unrecorded> {
        self.lock().unrecorded.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_of_refusals_is_a_line_every_few_seconds_with_how_many_were_not_told() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let [gpu, nic] = ["nvidia.com/gpu", "example.com/nic"].map(|name| name.parse::<ResourceName>().unwrap());
        let told = |resource, seconds| refusals.refused(resource, start + Duration::from_secs(seconds));
        assert_eq!([told(&gpu, 0), told(&gpu, 1), told(&nic, 1), told(&gpu, 4)], [Some(0), None, Some(0), None]);
        assert_eq!([told(&gpu, 5), told(&gpu, 20)], [Some(2), Some(0)]);
    }

    #[test]
    fn what_could_not_be_recorded_is_counted_until_something_is() {
        let refusals = Refusals::default();
        refusals.not_recorded("full");
        refusals.not_recorded("read-only");
        assert_eq!(refusals.unrecorded(), Some(Unrecorded { refused: 2, why: "read-only".into() }));
        refusals.recorded();
        assert_eq!(refusals.unrecorded(), None);
    }
}
