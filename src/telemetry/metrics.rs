//! What has happened, counted: the counters and histograms of the [table](super::table).
//!
//! They belong to the process and outlive every actor. What is so at the moment (devices, grants, who holds them) is not kept
//! here: it is read from the daemon's snapshots when somebody scrapes.

use super::exposition::Page;
use super::table::{Kind, Metric, TABLE};
use crate::domain::Timestamp;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Upper bounds of the histograms' buckets, in microseconds and as the format writes them in seconds: from a call without a disk to
/// the internal deadline.
const BUCKETS: [(u64, &str); 14] = [
    (50, "0.00005"),
    (100, "0.0001"),
    (200, "0.0002"),
    (400, "0.0004"),
    (800, "0.0008"),
    (1_600, "0.0016"),
    (3_200, "0.0032"),
    (6_400, "0.0064"),
    (12_800, "0.0128"),
    (50_000, "0.05"),
    (100_000, "0.1"),
    (500_000, "0.5"),
    (1_000_000, "1"),
    (2_000_000, "2"),
];

/// So many series has a metric at most; what comes after them is not counted. A node has some ten resources.
const SERIES_MAX: usize = 1000;

/// A lock for each metric, so that a scrape is in nobody's way for long.
static SERIES: [Mutex<Vec<Series>>; TABLE.len()] = [const { Mutex::new(Vec::new()) }; TABLE.len()];

struct Series {
    /// The values of its labels.
    labels: Box<[Box<str>]>,
    value: Value,
}

enum Value {
    Number(u64),
    Histogram(Box<Histogram>),
}

#[derive(Default)]
struct Histogram {
    /// By bucket, the last one without a bound; each sample is in one of them.
    counts: [u64; BUCKETS.len() + 1],
    sum: Duration,
}

fn series(metric: Metric) -> MutexGuard<'static, Vec<Series>> {
    // A number is changed in one step: a panic elsewhere cannot leave it half done.
    SERIES[metric as usize].lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes one series, which begins at 0.
fn change(metric: Metric, labels: &[&str], change: impl FnOnce(&mut Value)) {
    let mut all = series(metric);
    let found = all.binary_search_by(|series| series.labels.iter().map(AsRef::as_ref).cmp(labels.iter().copied()));
    let at = match found {
        Ok(at) => at,
        Err(_) if all.len() >= SERIES_MAX => return,
        Err(at) => {
            let is_histogram = metric.row().kind == Kind::Histogram;
            let value = if is_histogram { Value::Histogram(Box::default()) } else { Value::Number(0) };
            all.insert(at, Series { labels: labels.iter().map(|label| Box::from(*label)).collect(), value });
            at
        }
    };
    change(&mut all[at].value);
}

fn count(metric: Metric, labels: &[&str]) {
    add(metric, labels, 1);
}

/// Adds to a counter. With 0 it is there before it has counted anything: a rate over its first count is then no riddle.
fn add(metric: Metric, labels: &[&str], more: u64) {
    change(metric, labels, |value| {
        if let Value::Number(number) = value {
            *number += more;
        }
    });
}

fn set(metric: Metric, labels: &[&str], now: u64) {
    change(metric, labels, |value| *value = Value::Number(now));
}

fn took(metric: Metric, labels: &[&str], took: Duration) {
    change(metric, labels, |value| {
        if let Value::Histogram(histogram) = value {
            // A sample at a bound is below it, and one of a fraction more is not.
            let us = u64::try_from(took.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
            histogram.counts[BUCKETS.partition_point(|(bound, _)| *bound < us)] += 1;
            histogram.sum += took;
        }
    });
}

/// Writes everything that has been counted, behind what `now` writes of the moment.
#[must_use]
pub fn page(now: impl FnOnce(&mut Page)) -> String {
    let mut page = Page::default();
    now(&mut page);
    for metric in Metric::all() {
        if metric.row().labels.is_empty() && metric.row().kind == Kind::Counter {
            add(metric, &[], 0);
        }
        for Series { labels, value } in series(metric).iter() {
            let labels: Vec<&str> = labels.iter().map(AsRef::as_ref).collect();
            match value {
                Value::Number(number) => page.sample(metric, &labels, *number),
                Value::Histogram(histogram) => write_histogram(&mut page, metric, &labels, histogram),
            }
        }
    }
    page.into_text()
}

fn write_histogram(page: &mut Page, metric: Metric, labels: &[&str], Histogram { counts, sum }: &Histogram) {
    page.begin(metric);
    let mut below = 0;
    let bounds = BUCKETS.iter().map(|(_, bound)| *bound).chain(["+Inf"]);
    for (count, bound) in counts.iter().zip(bounds) {
        below += count;
        page.line(metric.row(), "_bucket", labels, Some(bound), below);
    }
    page.line(metric.row(), "_sum", labels, None, sum.as_secs_f64());
    page.line(metric.row(), "_count", labels, None, below);
}

/// How often something was counted: one series of a counter.
#[must_use]
pub fn counted(metric: Metric, labels: &[&str]) -> u64 {
    let all = series(metric);
    let found = all.iter().find(|series| series.labels.iter().map(AsRef::as_ref).eq(labels.iter().copied()));
    match found.map(|series| &series.value) {
        Some(Value::Number(number)) => *number,
        Some(Value::Histogram(_)) | None => 0,
    }
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

/// There is an actor of this name.
pub fn actor_begins(actor: &'static str) {
    add(Metric::ActorRestarts, &[actor], 0);
}

/// An actor died.
pub fn actor_restarted(actor: &'static str) {
    count(Metric::ActorRestarts, &[actor]);
}

/// A connection of somebody who may not ask was refused; `socket` is `plugin`, `control` or `handover`.
pub fn refused(socket: &'static str) {
    count(Metric::Refused, &[socket]);
}

/// A resource is offered: what may happen to it has not happened yet.
pub fn offered(resource: &str) {
    for result in ["ok", "error"] {
        add(Metric::Allocations, &[resource, result], 0);
        add(Metric::Registrations, &[resource, result], 0);
    }
    for reason in ["lost", "superseded"] {
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

/// The configuration was read, at the start or later; where that failed the earlier one stays in force.
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

/// A device became unhealthy.
pub fn failed(resource: &str, reason: &'static str) {
    count(Metric::Incidents, &[resource, reason]);
}

/// A Register was answered or failed.
pub fn registered(resource: &str, ok: bool) {
    count(Metric::Registrations, &[resource, result(ok)]);
}

/// The kubelet has opened our stream, so long after the registration began.
pub fn registration_took(resource: &str, time: Duration) {
    took(Metric::RegistrationDuration, &[resource], time);
}

/// An exclusive device was asked for while a running pod has it, provably or not.
pub fn doubted(resource: &str, proven: bool, refused: bool) {
    let (proof, result) = (if proven { "yes" } else { "no" }, if refused { "refused" } else { "granted" });
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

/// A look at the kubelet has come to an end; `result` is `changed`, `unchanged` or `blind`.
pub fn reconciled(result: &'static str) {
    count(Metric::Reconciliations, &[result]);
}

/// A grant was given back, by this proof.
pub fn released(released_by: &str) {
    count(Metric::Releases, &[released_by]);
}

/// A group commit took this long.
pub fn journal_synced(time: Duration) {
    took(Metric::JournalSync, &[], time);
}

/// A group commit, or a sync behind it, failed.
pub fn journal_failed() {
    count(Metric::JournalFailures, &[]);
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
    fn a_histogram_counts_every_sample_in_all_buckets_above_it() {
        for us in [50, 51, 2_000_000] {
            registration_took("test.dev/histogram", Duration::from_micros(us));
        }
        registration_took("test.dev/histogram", Duration::from_nanos(2_000_000_001));
        let lines = lines("test.dev/histogram");
        let ends = |end: &str| lines.iter().any(|line| line.ends_with(end));
        assert!(ends("le=\"0.00005\"} 1") && ends("le=\"0.0001\"} 2") && ends("le=\"1\"} 2") && ends("le=\"2\"} 3"), "{lines:#?}");
        assert!(ends("le=\"+Inf\"} 4") && ends("_count{resource=\"test.dev/histogram\"} 4"), "{lines:#?}");
        assert!(ends("_sum{resource=\"test.dev/histogram\"} 4.000101001"), "{lines:#?}");
        for (us, text) in BUCKETS {
            assert_eq!(Duration::from_secs_f64(text.parse().unwrap()), Duration::from_micros(us));
        }
    }

    #[test]
    fn what_has_not_happened_yet_is_counted_as_none() {
        offered("test.dev/quiet");
        assert!(lines("test.dev/quiet").iter().all(|line| line.ends_with(" 0")) && lines("test.dev/quiet").len() == 11);
        assert!(page(|_| {}).contains("\nholdfast_journal_sync_failures_total 0\n"));
    }

    #[test]
    fn the_number_of_series_is_bounded() {
        // No daemon's: other tests of this process count those.
        for number in 0..SERIES_MAX + 10 {
            set(Metric::UnhealthyDevice, &["test.dev/many", &number.to_string(), "xid"], 1);
        }
        set(Metric::UnhealthyDevice, &["test.dev/many", "0", "xid"], 2);
        let all = series(Metric::UnhealthyDevice);
        assert_eq!(all.len(), SERIES_MAX);
        assert!(matches!(all[0].value, Value::Number(2)), "those that are there are counted on");
    }
}
