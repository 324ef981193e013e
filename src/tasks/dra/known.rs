//! What the task of the slices knows besides the publisher, and what the reports of the watch and
//! of the publisher mean for an operator.

use crate::cluster::{ClusterError, WatchEvent};
use crate::slices::api::ResourceSlice;
use crate::slices::attributes::Dropped;
use crate::slices::others::Others;
use crate::slices::publisher::{COUNTERS, Cause, Event, Failure, PARTS, Report, TAINTS};
use crate::slices::wanted::WantedDevices;
use crate::telemetry::metrics;
use std::collections::BTreeSet;

/// Why the slices are not published at present, by the part that has the problem. Each part ends
/// its own problem only.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Problems {
    /// The slices cannot be listed and watched.
    pub(super) watch: Option<String>,
    /// A write has failed.
    pub(super) write: Option<String>,
    /// Another program writes the slices too.
    pub(super) truce: Option<String>,
}

impl Problems {
    /// The worst one.
    pub(super) fn worst(&self) -> Option<&String> {
        [&self.watch, &self.truce, &self.write].into_iter().find_map(Option::as_ref)
    }
}

/// What the task knows besides the publisher.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) problems: Problems,
    /// The slices of other drivers.
    pub(super) others: Others,
    /// The parts of devices whose loss was logged.
    pub(super) dropped: BTreeSet<Dropped>,
    /// The devices to publish, since the last change.
    pub(super) wanted: Option<WantedDevices>,
}

impl Known {
    /// What a report of the watch means. `is_answer` is true if it ends a list.
    pub(super) fn noticed(
        &mut self,
        event: WatchEvent<ResourceSlice>,
        is_answer: bool,
    ) -> Vec<Event> {
        match event {
            WatchEvent::Listed(slices, _) => {
                // It may have been restarted with other feature gates, in the same version too.
                let was_lost = self.problems.watch.take().is_some();
                self.others.list(&slices);
                let events =
                    [was_lost.then_some(Event::ServerChanged), Some(Event::Listed(slices))];
                events.into_iter().flatten().collect()
            }
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                self.others.change(&slice);
                vec![Event::Changed(slice)]
            }
            WatchEvent::Deleted(slice) => {
                self.others.delete(&slice);
                vec![Event::Deleted(slice)]
            }
            WatchEvent::Failed { error, pause } => {
                metrics::slices_watch_failed(error.as_str());
                if self.problems.watch.replace(not_published(&error)).is_none() {
                    tracing::warn!(%error, ?pause, "cannot watch the slices of this node");
                }
                let failed = is_answer.then(|| Event::Failed(failure(&error)));
                failed.into_iter().chain([Event::WatchLost]).collect()
            }
        }
    }

    /// Logs what the publisher reports.
    pub(super) fn report(&mut self, reports: Vec<Report>) {
        for report in reports {
            match report {
                Report::Uncontended => {
                    self.problems.truce = None;
                    tracing::info!("no other program writes the slices of this node any more");
                }
                Report::Contended(slice) => {
                    tracing::warn!(slice, "another program writes the slices of this node");
                    self.problems.truce = Some(format!(
                        "another program writes the ResourceSlice `{slice}` of this node; one try \
                         is made every 30 s"
                    ));
                }
                Report::Refused { slice, status, why, retry_after } => {
                    tracing::warn!(slice, status, why, ?retry_after, "cannot publish the devices");
                    // That of a list has been noticed with its watch.
                    if self.problems.watch.is_none() {
                        self.problems.write = Some(format!("cannot publish the devices: {why}"));
                    }
                }
                Report::FieldsDropped(fields) => {
                    let gate = gate_of(fields);
                    tracing::warn!(
                        fields,
                        gate,
                        "the API server drops fields of devices: a feature gate is off"
                    );
                }
                Report::DeviceRefused { pool, device, why } => {
                    tracing::warn!(pool, device, why, "the API server refuses a device");
                }
            }
        }
    }
}

/// The feature gate of fields that the API server drops, if one of them is known.
fn gate_of(fields: &str) -> Option<&'static str> {
    let gates = [
        (TAINTS, "DRADeviceTaints"),
        (COUNTERS, "DRAPartitionableDevices"),
        (PARTS, "DRAConsumableCapacity"),
    ];
    gates.into_iter().find(|(of, _)| *of == fields).map(|(_, gate)| gate)
}

pub(super) fn not_published(error: &ClusterError) -> String {
    format!("cannot publish the devices: {error}")
}

/// The result of a write in one word, for the metrics.
pub(super) fn result_of(error: Option<&ClusterError>) -> &'static str {
    error.map_or("ok", ClusterError::result)
}

pub(super) fn failure(error: &ClusterError) -> Failure {
    let causes = error.details().map(|details| details.causes.as_slice()).unwrap_or_default();
    let cause = |cause: &crate::cluster::Cause| Cause {
        field: cause.field.clone(),
        message: cause.message.clone(),
    };
    Failure {
        status: error.code(),
        message: error.to_string(),
        causes: causes.iter().map(cause).collect(),
        retry_after: error.retry_after(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Details;
    use std::time::Duration;

    fn refused(code: u16, message: &str) -> ClusterError {
        let details = Details {
            path: "/apis/resource.k8s.io/v1/resourceslices".into(),
            ..Details::default()
        };
        let message = message.to_owned();
        ClusterError::Refused { code, message, retry_after: None, details: Box::new(details) }
    }

    #[test]
    fn each_part_ends_its_own_problem_only() {
        let mut known = Known::default();
        let worst = |known: &Known| known.problems.worst().cloned().unwrap_or_default();
        known.report(vec![Report::Contended("s-0".into())]);
        let retry_after = Duration::from_secs(60);
        let why = "denied".to_owned();
        known.report(vec![Report::Refused { slice: "s-0".into(), status: 403, why, retry_after }]);
        assert!(worst(&known).contains("another program writes the ResourceSlice `s-0`"));
        let pause = Duration::from_secs(1);
        let lost = || WatchEvent::Failed { error: refused(503, "starting"), pause };
        assert_eq!(known.noticed(lost(), true).len(), 2, "the list and the watch have failed");
        assert!(worst(&known).contains("503: starting"));
        let listed = || WatchEvent::Listed(Vec::new(), "1".into());
        let events = known.noticed(listed(), true);
        assert!(matches!(events[..], [Event::ServerChanged, Event::Listed(_)]), "{events:?}");
        assert_eq!(known.noticed(listed(), true).len(), 1, "the watch was not lost");
        assert!(worst(&known).contains("another program"));
        known.report(vec![Report::Uncontended]);
        assert_eq!(worst(&known), "cannot publish the devices: denied");
        known.problems.write = None;
        assert_eq!(known.problems, Problems::default());
    }

    #[test]
    fn a_denial_of_a_policy_is_no_missing_right() {
        let policy =
            "s is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no";
        let results = [(403, policy, "policy"), (422, policy, "policy"), (403, "no", "forbidden")];
        for (code, message, result) in results {
            let error = refused(code, message);
            assert_eq!(result_of(Some(&error)), result, "{error}");
            let text = not_published(&error);
            assert_eq!(text.contains("a right is not missing"), message == policy, "{text}");
            assert_eq!(text.contains("; grant"), (code, message) == (403, "no"), "{text}");
        }
        assert_eq!(result_of(None), "ok");
    }
}
