//! The one table of metrics: every name, its kind, its unit and its help. Base units; bounded labels.

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::sync::OnceLock;
use std::time::Duration;

const ACTOR_RESTARTS: &str = "holdfast_actor_restarts_total";
const ALLOCATE_SECONDS: &str = "holdfast_allocate_duration_seconds";
const ALLOCATIONS: &str = "holdfast_allocations_total";
const BUILD_INFO: &str = "holdfast_build_info";
const DEVICES: &str = "holdfast_devices";
const GRANTS: &str = "holdfast_grants";
const JOURNAL_SYNC_SECONDS: &str = "holdfast_journal_sync_duration_seconds";
const REGISTRATIONS: &str = "holdfast_registrations_total";
const SCAN_SECONDS: &str = "holdfast_scan_duration_seconds";
const STREAM_ENDS: &str = "holdfast_stream_ends_total";

/// How often samples are folded into buckets.
const UPKEEP: Duration = Duration::from_secs(60);

/// Upper bounds of the histograms' buckets, in seconds: from a call without a disk to the internal deadline.
const BUCKETS: [f64; 14] = [0.000_05, 0.000_1, 0.000_2, 0.000_4, 0.000_8, 0.001_6, 0.003_2, 0.006_4, 0.012_8, 0.05, 0.1, 0.5, 1.0, 2.0];

/// Starts the recorder for the whole process, once; later calls return the same one.
pub fn install() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    let start = || {
        let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BUCKETS);
        let recorder = builder.expect("the buckets are not empty").build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("another metrics recorder is installed; /metrics stays empty");
        }
        describe();
        handle
    };
    HANDLE.get_or_init(start).clone()
}

/// Keeps the histograms small where nobody scrapes: their samples are folded into buckets once a minute.
pub async fn upkeep(metrics: PrometheusHandle) {
    let mut every = tokio::time::interval(UPKEEP);
    loop {
        every.tick().await;
        metrics.run_upkeep();
    }
}

fn describe() {
    metrics::describe_counter!(ACTOR_RESTARTS, "How often each actor died and was built again.");
    metrics::describe_histogram!(ALLOCATE_SECONDS, "From an Allocate's arrival to its answer, by resource.");
    metrics::describe_counter!(ALLOCATIONS, "Allocate calls by resource and result (ok or error).");
    metrics::describe_gauge!(BUILD_INFO, "1, with the version as a label.");
    metrics::describe_gauge!(DEVICES, "Device ids offered to the kubelet, by resource and health.");
    metrics::describe_gauge!(GRANTS, "Grants that hold devices, by resource and state.");
    metrics::describe_histogram!(JOURNAL_SYNC_SECONDS, "One group commit of the ledger's journal.");
    metrics::describe_counter!(REGISTRATIONS, "Register calls by resource and result (ok or error).");
    metrics::describe_histogram!(SCAN_SECONDS, "One scan of the node's hardware.");
    metrics::describe_counter!(STREAM_ENDS, "ListAndWatch streams that ended, by resource.");
    metrics::gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

/// An actor died.
pub fn actor_restarted(actor: &'static str) {
    metrics::counter!(ACTOR_RESTARTS, "actor" => actor).increment(1);
}

/// An Allocate was answered.
pub fn allocated(resource: &str, ok: bool, took: Duration) {
    metrics::counter!(ALLOCATIONS, "resource" => resource.to_owned(), "result" => result(ok)).increment(1);
    metrics::histogram!(ALLOCATE_SECONDS, "resource" => resource.to_owned()).record(took.as_secs_f64());
}

/// A Register was answered or failed.
pub fn registered(resource: &str, ok: bool) {
    metrics::counter!(REGISTRATIONS, "resource" => resource.to_owned(), "result" => result(ok)).increment(1);
}

/// A ListAndWatch stream ended.
pub fn stream_ended(resource: &str) {
    metrics::counter!(STREAM_ENDS, "resource" => resource.to_owned()).increment(1);
}

/// The inventory changed.
pub fn devices(resource: &str, healthy: usize, unhealthy: usize) {
    for (health, count) in [("healthy", healthy), ("unhealthy", unhealthy)] {
        gauge(metrics::gauge!(DEVICES, "resource" => resource.to_owned(), "health" => health), count);
    }
}

/// The ledger changed.
pub fn grants(resource: &str, state: &'static str, count: usize) {
    gauge(metrics::gauge!(GRANTS, "resource" => resource.to_owned(), "state" => state), count);
}

/// A group commit took this long.
pub fn journal_synced(took: Duration) {
    metrics::histogram!(JOURNAL_SYNC_SECONDS).record(took.as_secs_f64());
}

/// A scan took this long.
pub fn scanned(took: Duration) {
    metrics::histogram!(SCAN_SECONDS).record(took.as_secs_f64());
}

fn gauge(gauge: metrics::Gauge, count: usize) {
    // Counts stay far below 2^52, where an f64 is exact.
    #[expect(clippy::cast_precision_loss, reason = "a count of devices or grants")]
    gauge.set(count as f64);
}
