//! The one table of metrics: every name, its kind, its unit and its help. Base units; bounded labels.

use crate::domain::Timestamp;
use crate::host;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

const ACTOR_RESTARTS: &str = "holdfast_actor_restarts_total";
const ALLOCATE_SECONDS: &str = "holdfast_allocate_duration_seconds";
const ALLOCATIONS: &str = "holdfast_allocations_total";
const BUILD_INFO: &str = "holdfast_build_info";
const CONFIG_RELOADS: &str = "holdfast_config_reloads_total";
const CONFIG_SUCCESSFUL: &str = "holdfast_config_last_reload_successful";
const CONFIG_SUCCESS_TIME: &str = "holdfast_config_last_reload_success_timestamp_seconds";
const DEVICES: &str = "holdfast_devices";
const DISAGREEMENTS: &str = "holdfast_kubelet_disagreements_total";
const DOUBTS: &str = "holdfast_allocations_of_held_devices_total";
const GRANTS: &str = "holdfast_grants";
const HOOKS: &str = "holdfast_hooks_total";
const JOURNAL_SYNC_SECONDS: &str = "holdfast_journal_sync_duration_seconds";
const CONTESTED: &str = "holdfast_registration_contested";
const LEDGER_KEPT: &str = "holdfast_ledger_kept";
const NOT_DURABLE: &str = "holdfast_ledger_entries_not_durable";
const REFUSED: &str = "holdfast_connections_refused_total";
const REGISTRATIONS: &str = "holdfast_registrations_total";
const SCAN_SECONDS: &str = "holdfast_scan_duration_seconds";
const UNHEALTHY: &str = "holdfast_devices_unhealthy";
const STREAM_ENDS: &str = "holdfast_stream_ends_total";

/// How often samples are folded into buckets.
const UPKEEP: Duration = Duration::from_secs(60);

/// Upper bounds of the histograms' buckets, in seconds: from a call without a disk to the internal deadline.
const BUCKETS: [f64; 14] = [0.000_05, 0.000_1, 0.000_2, 0.000_4, 0.000_8, 0.001_6, 0.003_2, 0.006_4, 0.012_8, 0.05, 0.1, 0.5, 1.0, 2.0];

/// When nobody has scraped before: by then every resource is registered.
const INSTALL_AFTER: Duration = Duration::from_millis(300);
/// Samples that may wait for the recorder; a start makes a few for each resource.
const EARLY_MAX: usize = 10_000;

type Sample = Box<dyn FnOnce() + Send>;

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
/// What was measured before there was a recorder; `None` since there is one.
static EARLY: Mutex<Option<Vec<Sample>>> = Mutex::new(Some(Vec::new()));
/// The same, to be looked at without a lock.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Starts the recorder for the whole process, once; later calls return the same one. What was measured before is counted
/// now.
///
/// It takes 1 to 200 ms, which is why it waits until the daemon serves: the recorder's clock is calibrated first, in a loop.
pub fn install() -> PrometheusHandle {
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
    let handle = HANDLE.get_or_init(start).clone();
    // Under the lock, so that no later value of a gauge is set before an earlier one.
    let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
    early.take().into_iter().flatten().for_each(|sample| sample());
    INSTALLED.store(true, Ordering::Release);
    handle
}

/// Takes a sample, or keeps it until there is a recorder.
fn sample(take: impl FnOnce() + Send + 'static) {
    if !INSTALLED.load(Ordering::Acquire) {
        let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(early) = early.as_mut() {
            if early.len() < EARLY_MAX {
                early.push(Box::new(take));
            }
            return;
        }
    }
    take();
}

/// Installs the recorder, soon and on a thread that steps back behind those that serve, then keeps the histograms small where nobody scrapes: their samples are
/// folded into buckets once a minute.
pub async fn upkeep() {
    tokio::time::sleep(INSTALL_AFTER).await;
    let (done, installed) = tokio::sync::oneshot::channel();
    let calibrate = move || {
        host::step_back();
        // The daemon may be ending.
        let _ = done.send(install());
    };
    if let Err(error) = std::thread::Builder::new().name("metrics".into()).spawn(calibrate) {
        tracing::warn!(%error, "no thread for the metrics' recorder; the first scrape installs it");
    }
    let Ok(metrics) = installed.await else { return };
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
    metrics::describe_counter!(CONFIG_RELOADS, "How often the configuration was read, by result (ok or error); the start counts.");
    metrics::describe_gauge!(CONFIG_SUCCESSFUL, "1 when the configuration could be read the last time; 0 while the last good one stays.");
    metrics::describe_gauge!(CONFIG_SUCCESS_TIME, "When the configuration was read last that was good, in seconds since 1970.");
    metrics::describe_gauge!(DEVICES, "Device ids offered to the kubelet, by resource and health.");
    metrics::describe_gauge!(UNHEALTHY, "Unhealthy device ids, by resource and reason.");
    metrics::describe_counter!(
        DISAGREEMENTS,
        "How often the kubelet had a resource otherwise than it was listed, by resource and kind (list, or answer: another plugin gave it)."
    );
    metrics::describe_counter!(
        DOUBTS,
        "Allocates of an exclusive device that a running pod has, by resource, by whether that was proven, and by result (refused or granted)."
    );
    metrics::describe_gauge!(GRANTS, "Grants that hold devices, by resource and state.");
    metrics::describe_counter!(
        HOOKS,
        "Hooks that have run, by resource, phase (before_start, after_release or check) and result (ok or error)."
    );
    metrics::describe_histogram!(JOURNAL_SYNC_SECONDS, "One group commit of the ledger's journal.");
    metrics::describe_gauge!(CONTESTED, "1 while another plugin seems to take the resource again and again.");
    metrics::describe_gauge!(
        LEDGER_KEPT,
        "1 while this copy of the ledger (journal or database) can be written; without the journal grants are refused, or answered and not durable."
    );
    metrics::describe_gauge!(NOT_DURABLE, "Entries that were answered while the ledger could not be written, and are in memory only.");
    metrics::describe_counter!(REFUSED, "Connections refused to somebody who is not root, by socket (plugin, control or handover).");
    metrics::describe_counter!(REGISTRATIONS, "Register calls by resource and result (ok or error).");
    metrics::describe_histogram!(SCAN_SECONDS, "One scan of the node's hardware.");
    metrics::describe_counter!(STREAM_ENDS, "ListAndWatch streams that ended, by resource.");
    metrics::gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

/// The configuration was read, and is good or not.
pub fn config_loaded(ok: bool, at: Timestamp) {
    sample(move || {
        metrics::counter!(CONFIG_RELOADS, "result" => result(ok)).increment(1);
        gauge(&metrics::gauge!(CONFIG_SUCCESSFUL), usize::from(ok));
        if ok {
            metrics::gauge!(CONFIG_SUCCESS_TIME).set(Duration::from_millis(at.0).as_secs_f64());
        }
    });
}

/// An actor died.
pub fn actor_restarted(actor: &'static str) {
    sample(move || metrics::counter!(ACTOR_RESTARTS, "actor" => actor).increment(1));
}

/// A connection of somebody who may not ask was refused; `socket` is `plugin`, `control` or `handover`.
pub fn refused(socket: &'static str) {
    sample(move || metrics::counter!(REFUSED, "socket" => socket).increment(1));
}

/// An Allocate was answered.
pub fn allocated(resource: &str, ok: bool, took: Duration) {
    let resource = resource.to_owned();
    sample(move || {
        metrics::counter!(ALLOCATIONS, "resource" => resource.clone(), "result" => result(ok)).increment(1);
        metrics::histogram!(ALLOCATE_SECONDS, "resource" => resource).record(took.as_secs_f64());
    });
}

/// A hook has run.
pub fn hook_ended(resource: &str, phase: &'static str, ok: bool) {
    let resource = resource.to_owned();
    sample(move || metrics::counter!(HOOKS, "resource" => resource, "phase" => phase, "result" => result(ok)).increment(1));
}

/// A Register was answered or failed.
pub fn registered(resource: &str, ok: bool) {
    let resource = resource.to_owned();
    sample(move || metrics::counter!(REGISTRATIONS, "resource" => resource, "result" => result(ok)).increment(1));
}

/// An exclusive device was asked for while a running pod has it, provably or not.
pub fn doubted(resource: &str, proven: bool, refused: bool) {
    let resource = resource.to_owned();
    let (proof, result) = (if proven { "yes" } else { "no" }, if refused { "refused" } else { "granted" });
    sample(move || metrics::counter!(DOUBTS, "resource" => resource, "proven" => proof, "result" => result).increment(1));
}

/// The kubelet had another list of the resource, or another plugin's answer.
pub fn disagreed(resource: &str, kind: &'static str) {
    let resource = resource.to_owned();
    sample(move || metrics::counter!(DISAGREEMENTS, "resource" => resource, "kind" => kind).increment(1));
}

/// The resource is fought for with another plugin, or no longer.
pub fn contested(resource: &str, contested: bool) {
    let resource = resource.to_owned();
    sample(move || gauge(&metrics::gauge!(CONTESTED, "resource" => resource), usize::from(contested)));
}

/// A ListAndWatch stream ended.
pub fn stream_ended(resource: &str) {
    let resource = resource.to_owned();
    sample(move || metrics::counter!(STREAM_ENDS, "resource" => resource).increment(1));
}

/// The inventory changed.
pub fn devices(resource: &str, healthy: usize, unhealthy: usize) {
    for (health, count) in [("healthy", healthy), ("unhealthy", unhealthy)] {
        let resource = resource.to_owned();
        sample(move || gauge(&metrics::gauge!(DEVICES, "resource" => resource, "health" => health), count));
    }
}

/// The same, of one reason for which ids are unhealthy.
pub fn unhealthy(resource: &str, reason: &'static str, count: usize) {
    let resource = resource.to_owned();
    sample(move || gauge(&metrics::gauge!(UNHEALTHY, "resource" => resource, "reason" => reason), count));
}

/// The ledger changed.
pub fn grants(resource: &str, state: &'static str, count: usize) {
    let resource = resource.to_owned();
    sample(move || gauge(&metrics::gauge!(GRANTS, "resource" => resource, "state" => state), count));
}

/// A copy of the ledger can be written, or not.
pub fn ledger_kept(copy: &'static str, kept: bool) {
    sample(move || gauge(&metrics::gauge!(LEDGER_KEPT, "copy" => copy), usize::from(kept)));
}

/// So many entries were answered and are not on the disk yet.
pub fn not_durable(entries: usize) {
    sample(move || gauge(&metrics::gauge!(NOT_DURABLE), entries));
}

/// A group commit took this long.
pub fn journal_synced(took: Duration) {
    sample(move || metrics::histogram!(JOURNAL_SYNC_SECONDS).record(took.as_secs_f64()));
}

/// A scan took this long.
pub fn scanned(took: Duration) {
    sample(move || metrics::histogram!(SCAN_SECONDS).record(took.as_secs_f64()));
}

fn gauge(gauge: &metrics::Gauge, count: usize) {
    // Counts stay far below 2^52, where an f64 is exact.
    #[expect(clippy::cast_precision_loss, reason = "a count of devices or grants")]
    gauge.set(count as f64);
}
