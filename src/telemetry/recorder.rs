//! The recorder behind the facade of the `metrics` crate: it stores every series of the process.
//!
//! It ignores metrics that are not in the [table](super::table). The counters belong to the process
//! and outlive every actor.

use super::table::{Kind, Metric, TABLE};
use metrics::{
    Counter, Gauge, HistogramFn, Key, KeyName, Label, Metadata, Recorder, SharedString, Unit,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// Upper bounds of the histograms' buckets, in microseconds, and in seconds as the format writes
/// them. They reach from a call without a disk to the internal deadline.
pub(super) const BUCKETS: [(u64, &str); 14] = [
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

/// The limit of series per metric; further ones are not counted. A node has about ten resources.
const SERIES_MAX: usize = 1000;

/// A lock for each metric. It is held only to find or to copy series. The thread that renders a
/// page has a low priority, and an Allocate may wait for the lock.
static SERIES: [Mutex<Vec<Series>>; TABLE.len()] = [const { Mutex::new(Vec::new()) }; TABLE.len()];

#[derive(Clone)]
pub(super) struct Series {
    /// The values of its labels.
    pub(super) labels: Arc<[Box<str>]>,
    pub(super) value: Value,
}

#[derive(Clone)]
pub(super) enum Value {
    /// A counter, or the bits of a gauge's `f64`.
    Number(Arc<AtomicU64>),
    Histogram(Arc<Histogram>),
}

#[derive(Default)]
pub(super) struct Histogram {
    /// One count for each bucket, the last one without a bound. Each sample is in one bucket.
    pub(super) counts: [AtomicU64; BUCKETS.len() + 1],
    pub(super) sum_ns: AtomicU64,
}

impl HistogramFn for Histogram {
    fn record(&self, seconds: f64) {
        let took = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        // A sample equal to a bound belongs below it; a sample a fraction larger does not.
        let us = u64::try_from(took.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        self.counts[BUCKETS.partition_point(|(bound, _)| *bound < us)]
            .fetch_add(1, Ordering::Relaxed);
        self.sum_ns
            .fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

pub(super) fn series(metric: Metric) -> MutexGuard<'static, Vec<Series>> {
    SERIES[metric as usize].lock().unwrap_or_else(PoisonError::into_inner)
}

/// The recorder of the facade.
struct MetricsRecorder;

impl MetricsRecorder {
    /// The series of a key, which begins at 0; `None` for a metric that is not in the table, and
    /// beyond the limit of series.
    fn value(key: &Key, kind: Kind) -> Option<Value> {
        let metric = Metric::named(key.name()).filter(|metric| metric.row().kind == kind)?;
        let mut all = series(metric);
        let values = || key.labels().map(Label::value);
        let at = match all
            .binary_search_by(|series| series.labels.iter().map(AsRef::as_ref).cmp(values()))
        {
            Ok(at) => at,
            Err(_) if all.len() >= SERIES_MAX => return None,
            Err(at) => {
                let value = if kind == Kind::Histogram {
                    Value::Histogram(Arc::default())
                } else {
                    Value::Number(Arc::default())
                };
                all.insert(at, Series { labels: values().map(Box::from).collect(), value });
                at
            }
        };
        Some(all[at].value.clone())
    }
}

impl Recorder for MetricsRecorder {
    // The table has all descriptions.
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        match MetricsRecorder::value(key, Kind::Counter) {
            Some(Value::Number(number)) => Counter::from_arc(number),
            _ => Counter::noop(),
        }
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        match MetricsRecorder::value(key, Kind::Gauge) {
            Some(Value::Number(number)) => Gauge::from_arc(number),
            _ => Gauge::noop(),
        }
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> metrics::Histogram {
        match MetricsRecorder::value(key, Kind::Histogram) {
            Some(Value::Histogram(histogram)) => metrics::Histogram::from_arc(histogram),
            _ => metrics::Histogram::noop(),
        }
    }
}

/// A row's labels with these values, for the facade.
fn labels(metric: Metric, values: &[&str]) -> Vec<Label> {
    static INSTALLED: Once = Once::new();
    // A process has one recorder. If there is another one already, the program that embeds this
    // crate installed it.
    INSTALLED.call_once(|| drop(metrics::set_global_recorder(MetricsRecorder)));
    let names = metric.row().labels.iter();
    names.zip(values).map(|(name, value)| Label::new(*name, (*value).to_owned())).collect()
}

pub(super) fn count(metric: Metric, values: &[&str]) {
    add(metric, values, 1);
}

/// Adds to a counter. Adding 0 creates the series before its first count, so that a rate over that
/// count is correct.
pub(super) fn add(metric: Metric, values: &[&str], amount: u64) {
    metrics::counter!(metric.row().name, labels(metric, values)).increment(amount);
}

#[expect(clippy::cast_precision_loss, reason = "a time in seconds, or 0 and 1")]
pub(super) fn set(metric: Metric, values: &[&str], now: u64) {
    metrics::gauge!(metric.row().name, labels(metric, values)).set(now as f64);
}

pub(super) fn took(metric: Metric, values: &[&str], took: Duration) {
    metrics::histogram!(metric.row().name, labels(metric, values)).record(took);
}

/// The value of one series of a counter.
#[must_use]
pub fn counted(metric: Metric, labels: &[&str]) -> u64 {
    let all = series(metric);
    let found = all
        .iter()
        .find(|series| series.labels.iter().map(AsRef::as_ref).eq(labels.iter().copied()));
    match found.map(|series| &series.value) {
        Some(Value::Number(number)) => number.load(Ordering::Relaxed),
        Some(Value::Histogram(_)) | None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_series_is_bounded() {
        // No series of the daemon: other tests of this process count those.
        for number in 0..SERIES_MAX + 10 {
            set(Metric::UnhealthyDevice, &["test.dev/many", &number.to_string(), "xid"], 1);
        }
        set(Metric::UnhealthyDevice, &["test.dev/many", "0", "xid"], 2);
        let all = series(Metric::UnhealthyDevice);
        assert_eq!(all.len(), SERIES_MAX);
        let Value::Number(first) = &all[0].value else { panic!("a gauge") };
        assert_eq!(
            f64::from_bits(first.load(Ordering::Relaxed)),
            2.0,
            "those that are there are counted on"
        );
    }
}
