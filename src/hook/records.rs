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
const OUTPUTS_MAX: usize = 256;

/// The last line of a failed command's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookOutput {
    /// When it ended.
    pub at: Timestamp,
    /// The resource of the run.
    pub resource: String,
    /// Its phase: `before_start`, `after_release` or `check`.
    pub phase: String,
    /// How it ended.
    pub ended: String,
    /// The line.
    #[serde(rename = "said")]
    pub output: String,
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

type LastLines = BTreeMap<(DeviceId, ResourceName, Phase), HookOutput>;

impl Outputs {
    /// The lines of a device.
    #[must_use]
    pub fn of(&self, device: &DeviceId) -> Vec<HookOutput> {
        lock(&self.0)
            .iter()
            .filter(|((of, ..), _)| of == device)
            .map(|(_, output)| output.clone())
            .collect()
    }

    /// Records the end of a run: a success (`None`) removes the line.
    pub(super) fn ended(
        &self,
        occasion: &Occasion,
        at: Timestamp,
        failed: Option<String>,
        output: String,
    ) {
        let Occasion { phase, resource, device, .. } = occasion;
        let mut kept = lock(&self.0);
        let key = (device.id.clone(), resource.clone(), *phase);
        let Some(ended) = failed.filter(|_| !output.is_empty()) else {
            return drop(kept.remove(&key));
        };
        let oldest = kept.iter().min_by_key(|(_, output)| output.at).map(|(key, _)| key.clone());
        if let Some(oldest) =
            oldest.filter(|_| kept.len() >= OUTPUTS_MAX && !kept.contains_key(&key))
        {
            kept.remove(&oldest);
        }
        kept.insert(
            key,
            HookOutput {
                at,
                resource: resource.to_string(),
                phase: phase.to_string(),
                ended,
                output,
            },
        );
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
        let not_run =
            |((resource, phase), (since, why)): (&(ResourceName, Phase), &(Timestamp, String))| {
                NotRun {
                    resource: resource.to_string(),
                    phase: phase.to_string(),
                    since: *since,
                    why: why.clone(),
                }
            };
        lock(&self.0).iter().map(not_run).collect()
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
    fn a_failures_output_is_kept_until_the_next_run_and_bounded() {
        let (outputs, mut occasion) = (Outputs::default(), occasion());
        let device = occasion.device.id.clone();
        outputs.ended(&occasion, Timestamp(1), Some("exit status: 1".into()), "no key".into());
        assert_eq!(outputs.of(&device)[0].output, "no key");
        outputs.ended(&occasion, Timestamp(2), None, "fine".into());
        assert_eq!(outputs.of(&device), [], "a successful run has no output to explain");
        for n in 0..OUTPUTS_MAX as u64 + 10 {
            Arc::make_mut(&mut occasion.device).id = DeviceId::new(format!("GPU-{n}"));
            outputs.ended(&occasion, Timestamp(n), Some("exit status: 1".into()), n.to_string());
        }
        assert_eq!(lock(&outputs.0).len(), OUTPUTS_MAX);
        assert_eq!(outputs.of(&DeviceId::new("GPU-9")), [], "the oldest was removed");
    }

    #[test]
    fn hooks_that_cannot_run_are_listed_since_the_first_time() {
        let (shortages, occasion) = (Shortages::default(), occasion());
        assert!(!shortages.over(&occasion));
        assert!(shortages.begun(&occasion, Timestamp(5), "first".into()));
        assert!(!shortages.begun(&occasion, Timestamp(6), "second".into()));
        let [not_run] = shortages.all().try_into().unwrap();
        assert_eq!(
            (not_run.since, not_run.why.as_str(), not_run.phase.as_str()),
            (Timestamp(5), "second", "after_release")
        );
        assert!(shortages.over(&occasion));
        assert_eq!(shortages.all(), []);
    }
}
