//! Records of the latest runs of hooks and checks besides their results: their output, and which
//! could not be run.
//!
//! The output of a command may contain a secret: its arguments, its environment, a server's answer.
//! So it is kept in memory here, and only the control socket returns it, to root. It appears in no
//! log, page, metric, pod event or ledger record.

use super::Occasion;
use crate::domain::{DeviceId, Phase, ResourceName, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most lines that are kept: more than the devices of a usual node, and some 100 KB.
const SAID_MAX: usize = 256;

/// The last line of a failed command's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// When it ended.
    pub at: Timestamp,
    /// The resource of the run.
    pub resource: String,
    /// Its phase: `before_start`, `after_release` or `check`.
    pub phase: String,
    /// How it ended.
    pub ended: String,
    /// The line.
    pub said: String,
}

/// Hooks of a resource that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRun {
    /// The resource.
    pub resource: String,
    /// Their phase: `before_start`, `after_release` or `check`.
    pub phase: String,
    /// Since when.
    pub since: Timestamp,
    /// The system's error.
    pub why: String,
}

/// The output of failed commands. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Outputs(Arc<Mutex<LastLines>>);

type LastLines = BTreeMap<(DeviceId, ResourceName, Phase), Said>;

impl Outputs {
    /// The lines of a device.
    #[must_use]
    pub fn of(&self, device: &DeviceId) -> Vec<Said> {
        lock(&self.0).iter().filter(|((of, ..), _)| of == device).map(|(_, said)| said.clone()).collect()
    }

    /// Records the end of a run: a success (`None`) removes the line.
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

/// Hooks that cannot be run. Cheap to clone.
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

    /// Records that a run was possible. Returns whether that is new.
    pub(super) fn over(&self, occasion: &Occasion) -> bool {
        lock(&self.0).remove(&(occasion.resource.clone(), occasion.phase)).is_some()
    }

    /// Records that a run was not possible. Returns whether that is new.
    pub(super) fn begun(&self, occasion: &Occasion, at: Timestamp, why: String) -> bool {
        let mut kept = lock(&self.0);
        let key = (occasion.resource.clone(), occasion.phase);
        let since = kept.get(&key).map(|(since, _)| *since);
        kept.insert(key, (since.unwrap_or(at), why));
        since.is_none()
    }
}

fn lock<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves no half-done change here.
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
        assert_eq!(outputs.of(&device), [], "a successful run has no output to explain");
        for n in 0..SAID_MAX as u64 + 10 {
            Arc::make_mut(&mut occasion.device).id = DeviceId::new(format!("GPU-{n}"));
            outputs.ended(&occasion, Timestamp(n), Some("exit status: 1".into()), n.to_string());
        }
        assert_eq!(lock(&outputs.0).len(), SAID_MAX);
        assert_eq!(outputs.of(&DeviceId::new("GPU-9")), [], "the oldest was removed");
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
