//! What is known of the latest runs of hooks and checks, beside their results: what they wrote, and which of them could not be run.
//!
//! What a command writes may hold a secret: its arguments, its environment, an answer of a server. So it is kept here, in memory, and the control
//! socket alone gives it out, to root. No log, no page, no metric, no pod's event and no record of the ledger has it.

use super::Occasion;
use crate::domain::{DeviceId, Phase, ResourceName, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lines that are kept: more than the devices of a usual node, and some 100 KB.
const SAID_MAX: usize = 256;

/// The last line that a command wrote that has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// When it ended.
    pub at: Timestamp,
    /// The resource that it was run for.
    pub resource: String,
    /// When it is run: `before_start`, `after_release` or `check`.
    pub phase: String,
    /// How it ended.
    pub ended: String,
    /// Its line.
    pub said: String,
}

/// Hooks of a resource that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRun {
    /// The resource.
    pub resource: String,
    /// When they would be run: `before_start`, `after_release` or `check`.
    pub phase: String,
    /// Since when.
    pub since: Timestamp,
    /// What the system says.
    pub why: String,
}

/// What commands wrote that have failed. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Outputs(Arc<Mutex<LastLines>>);

type LastLines = BTreeMap<(DeviceId, ResourceName, Phase), Said>;

impl Outputs {
    /// Of this device.
    #[must_use]
    pub fn of(&self, device: &DeviceId) -> Vec<Said> {
        lock(&self.0).iter().filter(|((of, ..), _)| of == device).map(|(_, said)| said.clone()).collect()
    }

    /// A run has ended, well (`None`) or not.
    pub(super) fn ended(&self, occasion: &Occasion, at: Timestamp, failed: Option<String>, said: String) {
        let Occasion { phase, resource, device, .. } = occasion;
        let mut kept = lock(&self.0);
        let key = (device.id.clone(), resource.clone(), *phase);
        let Some(ended) = failed.filter(|_| !said.is_empty()) else { return drop(kept.remove(&key)) };
        let oldest = kept.iter().min_by_key(|(_, said)| said.at).map(|(key, _)| key.clone());
        if let Some(oldest) = oldest.filter(|_| kept.len() >= SAID_MAX && !kept.contains_key(&key)) {
            kept.remove(&oldest);
        }
        kept.insert(key, Said { at, resource: resource.to_string(), phase: phase.to_string(), ended, said });
    }
}

/// Which hooks cannot be run. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Shortages(Arc<Mutex<SinceWhen>>);

/// Since when hooks cannot be run, and why.
type SinceWhen = BTreeMap<(ResourceName, Phase), (Timestamp, String)>;

impl Shortages {
    /// All of them.
    #[must_use]
    pub fn all(&self) -> Vec<NotRun> {
        let told = |((resource, phase), (since, why)): (&(ResourceName, Phase), &(Timestamp, String))| NotRun {
            resource: resource.to_string(),
            phase: phase.to_string(),
            since: *since,
            why: why.clone(),
        };
        lock(&self.0).iter().map(told).collect()
    }

    /// A run was possible. Whether that is news.
    pub(super) fn over(&self, occasion: &Occasion) -> bool {
        lock(&self.0).remove(&(occasion.resource.clone(), occasion.phase)).is_some()
    }

    /// A run was not possible. Whether that is news.
    pub(super) fn begun(&self, occasion: &Occasion, at: Timestamp, why: String) -> bool {
        let mut kept = lock(&self.0);
        let key = (occasion.resource.clone(), occasion.phase);
        let since = kept.get(&key).map(|(since, _)| *since);
        kept.insert(key, (since.unwrap_or(at), why));
        since.is_none()
    }
}

fn lock<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here is left half done by a panic.
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::environment::testing::occasion;
    use super::*;

    #[test]
    fn the_line_of_a_failure_is_kept_until_the_next_end_and_no_more_than_so_many() {
        let (outputs, mut occasion) = (Outputs::default(), occasion());
        let device = occasion.device.id.clone();
        outputs.ended(&occasion, Timestamp(1), Some("exit status: 1".into()), "no key".into());
        assert_eq!(outputs.of(&device)[0].said, "no key");
        outputs.ended(&occasion, Timestamp(2), None, "fine".into());
        assert_eq!(outputs.of(&device), [], "what ends well has nothing to be explained");
        for n in 0..SAID_MAX as u64 + 10 {
            Arc::make_mut(&mut occasion.device).id = DeviceId::new(format!("GPU-{n}"));
            outputs.ended(&occasion, Timestamp(n), Some("exit status: 1".into()), n.to_string());
        }
        assert_eq!(lock(&outputs.0).len(), SAID_MAX);
        assert_eq!(outputs.of(&DeviceId::new("GPU-9")), [], "the oldest has gone");
    }

    #[test]
    fn what_cannot_be_run_is_told_since_the_first_time_until_it_can() {
        let (shortages, occasion) = (Shortages::default(), occasion());
        assert!(!shortages.over(&occasion));
        assert!(shortages.begun(&occasion, Timestamp(5), "first".into()));
        assert!(!shortages.begun(&occasion, Timestamp(6), "second".into()));
        let [told] = shortages.all().try_into().unwrap();
        assert_eq!((told.since, told.why.as_str(), told.phase.as_str()), (Timestamp(5), "second", "after_release"));
        assert!(shortages.over(&occasion));
        assert_eq!(shortages.all(), []);
    }
}
