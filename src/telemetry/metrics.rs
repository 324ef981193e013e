//! The counters of events: one function for each event that a metric counts, and the page of all of
//! them.
//!
//! The file `recorder.rs` stores them, and the [table](super::table) describes them. The
//! current state (devices, grants, holders) is not stored: each scrape reads it from the daemon's
//! snapshots. The usual exporters keep every series that they have ever seen, and pods come and go.
//! So the page is [our own](super::exposition).

use super::exposition::Page;
use super::recorder::{BUCKETS, Histogram, Series, Value, add, count, series, set, took};
use super::table::{Kind, Metric};
use crate::domain::Timestamp;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use super::recorder::counted;

/// Counters with a fixed, small set of label values. They are created at 0, because `increase`
/// ignores the first count of a series that did not exist.
const FIXED_LABELS: [(Metric, &[&str]); 4] = [
    (Metric::Evicted, &["control", "handover", "plugin", "telemetry"]),
    (Metric::Reconciliations, &["blind", "changed", "unchanged"]),
    (Metric::Refused, &["control", "handover", "plugin"]),
    (
        Metric::Releases,
        &[
            "claim_gone",
            "handed_on",
            "never_prepared",
            "never_started",
            "operator",
            "pod_gone",
            "reallocated",
            "superseded",
            "unprepared",
        ],
    ),
];

/// The same, with two labels.
const FIXED_SECOND_LABELS: [(Metric, &str, &[&str]); 3] = [
    (
        Metric::RequestsRefused,
        "telemetry",
        &[
            "body",
            "busy",
            "forbidden",
            "handshake",
            "head_late",
            "head_too_large",
            "no_certificate",
            "no_token",
            "not_read",
            "not_understood",
            "too_many_tokens",
            "unauthorized",
            "undecided",
        ],
    ),
    (
        Metric::RequestsRefused,
        "control",
        &["head_late", "head_too_large", "not_read", "not_understood"],
    ),
    (Metric::RequestsRefused, "plugin", &["lists", "memory"]),
];

/// The results of a Prepare of one claim.
const PREPARE_RESULTS: [&str; 6] = ["api_server", "blocked", "error", "ok", "refused", "unhealthy"];
/// The results of a write of a `ResourceSlice`.
const WRITE_RESULTS: [&str; 8] =
    ["conflict", "error", "forbidden", "invalid", "not_found", "ok", "policy", "throttled"];

/// Writes all counters, after the samples of the current state that `now` writes.
#[must_use]
pub fn page(now: impl FnOnce(&mut Page)) -> String {
    let mut page = Page::default();
    now(&mut page);
    for (metric, words) in FIXED_LABELS {
        words.iter().for_each(|word| add(metric, &[word], 0));
    }
    for (metric, first, words) in FIXED_SECOND_LABELS {
        words.iter().for_each(|word| add(metric, &[first, word], 0));
    }
    for metric in Metric::all() {
        let kind = metric.row().kind;
        if metric.row().labels.is_empty() && kind == Kind::Counter {
            add(metric, &[], 0);
        }
        let all = series(metric).clone();
        for Series { labels, value } in &all {
            let labels: Vec<&str> = labels.iter().map(AsRef::as_ref).collect();
            match value {
                Value::Number(number) if kind == Kind::Gauge => {
                    page.begin(metric);
                    page.line(
                        metric.row(),
                        "",
                        &labels,
                        None,
                        f64::from_bits(number.load(Ordering::Relaxed)),
                    );
                }
                Value::Number(number) => {
                    page.sample(metric, &labels, number.load(Ordering::Relaxed));
                }
                Value::Histogram(histogram) => {
                    write_histogram(&mut page, metric, &labels, histogram);
                }
            }
        }
    }
    page.into_text()
}

fn write_histogram(
    page: &mut Page,
    metric: Metric,
    labels: &[&str],
    Histogram { counts, sum_ns }: &Histogram,
) {
    page.begin(metric);
    let mut below = 0;
    let bounds = BUCKETS.iter().map(|(_, bound)| *bound).chain(["+Inf"]);
    for (count, bound) in counts.iter().zip(bounds) {
        below += count.load(Ordering::Relaxed);
        page.line(metric.row(), "_bucket", labels, Some(bound), below);
    }
    page.line(
        metric.row(),
        "_sum",
        labels,
        None,
        Duration::from_nanos(sum_ns.load(Ordering::Relaxed)).as_secs_f64(),
    );
    page.line(metric.row(), "_count", labels, None, below);
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

/// An actor of this name exists.
pub fn actor_begins(actor: &'static str) {
    add(Metric::ActorRestarts, &[actor], 0);
}

/// An actor died.
pub fn actor_restarted(actor: &'static str) {
    count(Metric::ActorRestarts, &[actor]);
}

/// The DRA driver is switched on: creates its series at 0. Without this call it has none.
pub fn dra_begins() {
    for result in PREPARE_RESULTS {
        add(Metric::DraCalls, &["prepare", result], 0);
    }
    for result in ["error", "ok"] {
        add(Metric::DraCalls, &["unprepare", result], 0);
    }
    for verb in ["create", "delete", "update"] {
        for result in WRITE_RESULTS {
            add(Metric::DraWrites, &[verb, result], 0);
        }
    }
    for reason in ["broken", "connect", "credentials", "expired", "refused", "silent", "unreadable"]
    {
        add(Metric::DraWatchFailures, &[reason], 0);
    }
}

/// A Prepare or Unprepare of one claim was answered; `call` is `prepare` or `unprepare`.
pub fn claim_answered(call: &'static str, result: &'static str, time: Duration) {
    count(Metric::DraCalls, &[call, result]);
    let is_ok = result == "ok";
    took(Metric::DraCallDuration, &[call, self::result(is_ok)], time);
}

/// A write of a `ResourceSlice` was answered, or has failed.
pub fn slice_written(verb: &'static str, result: &'static str) {
    count(Metric::DraWrites, &[verb, result]);
}

/// Writes of this kind begin at zero: `event` or `condition`.
pub fn reporting_begins(kind: &'static str) {
    for result in WRITE_RESULTS {
        add(Metric::ReportWrites, &[kind, result], 0);
    }
}

/// A write of an `event` or of the `condition` of the node was answered, or has failed.
pub fn reported(kind: &'static str, result: &'static str) {
    count(Metric::ReportWrites, &[kind, result]);
}

/// The watch of the `ResourceSlice` objects has failed.
pub fn slices_watch_failed(reason: &'static str) {
    count(Metric::DraWatchFailures, &[reason]);
}

/// A connection was closed to free its place for another one; `socket` is `telemetry`, `plugin`,
/// `control` or `handover`.
pub fn connection_evicted(socket: &'static str) {
    count(Metric::Evicted, &[socket]);
}

/// A limit or a missing token refused a request, or a connection before its first request.
pub fn request_refused(socket: &'static str, reason: &'static str) {
    count(Metric::RequestsRefused, &[socket, reason]);
}

/// A connection of a peer without permission was refused; `socket` is `plugin`, `control` or
/// `handover`.
pub fn refused(socket: &'static str) {
    count(Metric::Refused, &[socket]);
}

/// A resource is offered: creates its series at 0.
pub fn offered(resource: &str) {
    for result in ["ok", "error"] {
        add(Metric::Allocations, &[resource, result], 0);
        add(Metric::Registrations, &[resource, result], 0);
    }
    for reason in ["lost", "superseded", "withdrawn"] {
        add(Metric::StreamEnds, &[resource, reason], 0);
    }
    for kind in ["answer", "list"] {
        add(Metric::Disagreements, &[resource, kind], 0);
    }
    for (proven, result) in [("no", "granted"), ("yes", "granted"), ("yes", "refused")] {
        add(Metric::Doubts, &[resource, proven, result], 0);
    }
}

/// An Allocate was answered.
pub fn allocated(resource: &str, ok: bool, time: Duration) {
    count(Metric::Allocations, &[resource, result(ok)]);
    took(Metric::AllocateDuration, &[resource, result(ok)], time);
}

/// The configuration was read, at the start or later. If that failed, the earlier one stays in
/// force.
pub fn config_loaded(ok: bool, at: Timestamp) {
    add(Metric::ConfigReloads, &[result(!ok)], 0);
    count(Metric::ConfigReloads, &[result(ok)]);
    set(Metric::ConfigReloadSuccessful, &[], u64::from(ok));
    if ok {
        set(Metric::ConfigReloadTime, &[], at.0 / 1000);
    }
}

/// A hook has run.
pub fn hook_ended(resource: &str, phase: &'static str, ok: bool) {
    count(Metric::Hooks, &[resource, phase, result(ok)]);
}

/// A hook could not be run.
pub fn hook_not_run(resource: &str, phase: &'static str) {
    count(Metric::Hooks, &[resource, phase, "not_run"]);
}

/// A device became unhealthy.
pub fn failed(resource: &str, reason: &'static str) {
    count(Metric::Incidents, &[resource, reason]);
}

/// A Register was answered or failed.
pub fn registered(resource: &str, ok: bool) {
    count(Metric::Registrations, &[resource, result(ok)]);
}

/// The kubelet opened our stream, this long after the registration began.
pub fn registration_took(resource: &str, time: Duration) {
    took(Metric::RegistrationDuration, &[resource], time);
}

/// An Allocate requested an exclusive device of a running pod. `proven` is whether that pod
/// provably has it.
pub fn doubted(resource: &str, proven: bool, refused: bool) {
    let (proof, result) =
        (if proven { "yes" } else { "no" }, if refused { "refused" } else { "granted" });
    count(Metric::Doubts, &[resource, proof, result]);
}

/// The kubelet had another list of the resource, or another plugin's answer.
pub fn disagreed(resource: &str, kind: &'static str) {
    count(Metric::Disagreements, &[resource, kind]);
}

/// A ListAndWatch stream ended; `reason` is `superseded`, `withdrawn` or `lost`.
pub fn stream_ended(resource: &str, reason: &'static str) {
    count(Metric::StreamEnds, &[resource, reason]);
}

/// A reconcile ended; `result` is `changed`, `unchanged` or `blind`.
pub fn reconciled(result: &'static str) {
    count(Metric::Reconciliations, &[result]);
}

/// A grant was released by this proof.
pub fn released(released_by: &str) {
    count(Metric::Releases, &[released_by]);
}

/// A group commit took this long.
pub fn journal_synced(time: Duration) {
    took(Metric::JournalSync, &[], time);
}

/// A group commit, or a sync after it, failed.
pub fn journal_failed() {
    count(Metric::JournalFailures, &[]);
}

/// Log lines were dropped. With 0 the series is created.
pub fn log_lines_lost(lines: u64) {
    add(Metric::LogLinesLost, &[], lines);
}

/// A scan took this long.
pub fn scanned(time: Duration) {
    took(Metric::Scan, &[], time);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(of: &str) -> Vec<String> {
        page(|_| {}).lines().filter(|line| line.contains(of)).map(str::to_owned).collect()
    }

    #[test]
    fn counters_with_fixed_labels_start_at_zero() {
        let page = page(|_| {});
        for (metric, words) in FIXED_LABELS {
            for word in words {
                let begin =
                    format!("{}{{{}=\"{word}\"}} ", metric.row().name, metric.row().labels[0]);
                assert!(page.lines().any(|line| line.starts_with(&begin)), "{begin}\n{page}");
            }
        }
    }

    #[test]
    fn a_histogram_counts_every_sample_in_all_buckets_above_it() {
        for us in [50, 51, 2_000_000] {
            registration_took("test.dev/histogram", Duration::from_micros(us));
        }
        registration_took("test.dev/histogram", Duration::from_nanos(2_000_000_001));
        let lines = lines("test.dev/histogram");
        let ends = |end: &str| lines.iter().any(|line| line.ends_with(end));
        assert!(
            ends("le=\"0.00005\"} 1")
                && ends("le=\"0.0001\"} 2")
                && ends("le=\"1\"} 2")
                && ends("le=\"2\"} 3"),
            "{lines:#?}"
        );
        assert!(
            ends("le=\"+Inf\"} 4") && ends("_count{resource=\"test.dev/histogram\"} 4"),
            "{lines:#?}"
        );
        assert!(ends("_sum{resource=\"test.dev/histogram\"} 4.000101001"), "{lines:#?}");
        for (us, text) in BUCKETS {
            assert_eq!(Duration::from_secs_f64(text.parse().unwrap()), Duration::from_micros(us));
        }
    }

    #[test]
    fn a_metric_outside_the_table_is_not_counted() {
        offered("test.dev/known");
        metrics::counter!("holdfast_of_nobody_total").increment(1);
        metrics::counter!(Metric::Scan.row().name, "resource" => "test.dev/of-another-kind")
            .increment(1);
        assert!(lines("of_nobody").is_empty() && lines("of-another-kind").is_empty());
    }

    #[test]
    fn the_counters_of_the_driver_for_claims_start_at_zero_once_it_is_on() {
        dra_begins();
        let begun = lines("holdfast_dra_");
        for line in [
            r#"holdfast_dra_claim_calls_total{call="unprepare",result="error"} 0"#,
            r#"holdfast_dra_slice_writes_total{verb="delete",result="policy"} 0"#,
            r#"holdfast_dra_watch_failures_total{reason="unreadable"} 0"#,
        ] {
            assert!(begun.iter().any(|one| one == line), "{line}: {begun:#?}");
        }
        claim_answered("prepare", "blocked", Duration::from_secs(35));
        let now = lines("holdfast_dra_claim_");
        for line in [
            r#"holdfast_dra_claim_calls_total{call="prepare",result="blocked"} 1"#,
            r#"holdfast_dra_claim_duration_seconds_count{call="prepare",result="error"} 1"#,
        ] {
            assert!(now.iter().any(|one| one == line), "{line}: {now:#?}");
        }
    }

    #[test]
    fn the_counters_of_a_new_resource_start_at_zero() {
        offered("test.dev/unused");
        assert!(
            lines("test.dev/unused").iter().all(|line| line.ends_with(" 0"))
                && lines("test.dev/unused").len() == 12
        );
        assert!(page(|_| {}).contains("\nholdfast_journal_sync_failures_total 0\n"));
    }
}
