//! The table of metrics: every name, its kind, its labels and its help. Only metrics of this table
//! can be counted.
//!
//! Names follow Prometheus' conventions: `holdfast_` first, base units, the unit last, `_total` for
//! values that only rise. Labels of Kubernetes' objects are named as its instrumentation guidelines
//! name them (`namespace`, `pod`, `container`). A row that changes breaks users' alerts:
//! `docs/metrics.md` has the same list, and `tests/daemon/metrics.rs` compares them.

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only rises, and begins at 0 with the process.
    Counter,
    /// It rises and falls.
    Gauge,
    /// A distribution of durations.
    Histogram,
}

impl Kind {
    /// The word of the exposition format.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The metric's name.
    pub name: &'static str,
    /// The kind.
    pub kind: Kind,
    /// The names of its labels, in the order of their values.
    pub labels: &'static [&'static str],
    /// One line for the readers of `/metrics`.
    pub help: &'static str,
}

impl Row {
    /// The unit in the name; `None` for a count.
    #[must_use]
    pub fn unit(&self) -> Option<&'static str> {
        let name = self.name.strip_suffix("_total").unwrap_or(self.name);
        ["seconds", "bytes"].into_iter().find(|unit| name.rsplit('_').next() == Some(unit))
    }
}

macro_rules! table {
    ($($metric:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        /// Names a row of [`TABLE`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Metric {
            $(#[doc = $help] $metric,)*
        }

        impl Metric {
            const ALL: &[Metric] = &[$(Metric::$metric),*];
        }

        /// Every metric, in the order of the names.
        pub const TABLE: &[Row] = &[$(Row { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help },)*];
    };
}

table! {
    ActorRestarts = Counter "holdfast_actor_restarts_total" ["actor"]
        "Restarts of each actor after a panic.";
    AllocateDuration = Histogram "holdfast_allocate_duration_seconds" ["resource", "result"]
        "From an Allocate's arrival to its answer, durable as configured.";
    Doubts = Counter "holdfast_allocations_of_held_devices_total" ["resource", "proven", "result"]
        "Allocates of an exclusive device that a running pod holds, by proof (proven is yes or \
         no) and result (refused or granted).";
    Allocations = Counter "holdfast_allocations_total" ["resource", "result"]
        "Allocate calls by result (ok or error).";
    BuildInfo = Gauge "holdfast_build_info" ["version"]
        "1, with the version.";
    ConfigReloadTime = Gauge "holdfast_config_last_reload_success_timestamp_seconds" []
        "When the configuration in force was read, in seconds since 1970.";
    ConfigReloadSuccessful = Gauge "holdfast_config_last_reload_successful" []
        "1 when the last read of the configuration succeeded, at the start or later; 0 while an \
         earlier one is still in force.";
    ConfigReloads = Counter "holdfast_config_reloads_total" ["result"]
        "Reads of the configuration by result (ok or error), with the one at the start.";
    Evicted = Counter "holdfast_connections_evicted_total" ["socket"]
        "Connections closed to free a slot for another one, by socket (telemetry, plugin, control \
         or handover).";
    Refused = Counter "holdfast_connections_refused_total" ["socket"]
        "Connections refused because the peer is not root, by socket (plugin, control or \
         handover).";
    Devices = Gauge "holdfast_devices" ["resource", "health"]
        "Device ids offered to the kubelet, by health (healthy or unhealthy).";
    DevicesHeld = Gauge "holdfast_devices_held" ["namespace", "pod", "container", "resource"]
        "Device ids that each container holds, init containers too; the names are empty until \
         they are known from the kubelet's checkpoint.";
    DevicesInUse = Gauge "holdfast_devices_in_use" ["resource"]
        "Device ids that a grant holds; one that several containers of a pod hold counts once.";
    DevicesUnhealthy = Gauge "holdfast_devices_unhealthy" ["resource", "reason"]
        "Unhealthy device ids by reason; a reason without devices has no series.";
    DraCalls = Counter "holdfast_dra_claim_calls_total" ["call", "result"]
        "Answered calls of the kubelet for one claim (prepare or unprepare), by result (ok, error, \
         or why a claim is not prepared: refused, unhealthy, blocked or api_server).";
    DraCallDuration = Histogram "holdfast_dra_claim_duration_seconds" ["call", "result"]
        "From such a call to its answer, by result (ok or error); Prepare waits up to 35 s for \
         devices that are not free.";
    DraClaims = Gauge "holdfast_dra_claims" []
        "Claims that hold devices, with each claim counted once.";
    DraOthers = Gauge "holdfast_dra_other_driver_devices" ["driver", "same_hardware"]
        "Devices of other DRA drivers on this node, of at most 16: those that they publish \
         (same_hardware is no), and the devices of Holdfast among them (yes).";
    DraProblems = Gauge "holdfast_dra_problems" ["part"]
        "1 while a part of the DRA driver has a problem (sockets, slices, claims, statuses or drivers); the status \
         verb shows it.";
    DraDevices = Gauge "holdfast_dra_published_devices" ["pool"]
        "Devices in the ResourceSlices of this node, as the API server has them.";
    DraSlices = Gauge "holdfast_dra_published_slices" ["pool"]
        "ResourceSlices of this node, as the API server has them.";
    DraWrites = Counter "holdfast_dra_slice_writes_total" ["verb", "result"]
        "Writes of ResourceSlices by verb (create, update or delete) and result (ok, conflict, \
         forbidden, policy, invalid, not_found, throttled or error).";
    DraTaints = Gauge "holdfast_dra_taints" ["reason", "effect"]
        "Taints of published devices, by reason and effect; one without devices has no series.";
    DraWatchFailures = Counter "holdfast_dra_watch_failures_total" ["reason"]
        "Watches of the ResourceSlices that failed and were opened again, by reason \
         (credentials, connect, silent, broken, refused, expired or unreadable).";
    Grants = Gauge "holdfast_grants" ["resource", "state"]
        "Grants that hold devices, by state (granted, bound, suspect or prepared).";
    SignalsOff = Gauge "holdfast_health_signals_off" ["signal"]
        "1 for each health signal that is not available; the status verb shows the reason.";
    HooksOwed = Gauge "holdfast_hooks_owed" ["resource", "state"]
        "Hooks after release that have not succeeded, by state (due or failed); their devices are \
         not granted again.";
    Hooks = Counter "holdfast_hooks_total" ["resource", "phase", "result"]
        "Hooks that have run, by phase (before_start, after_release or check) and result (ok, \
         error, or not_run: the system lacked resources).";
    Incidents = Counter "holdfast_incidents_total" ["resource", "reason"]
        "How often a device became unhealthy, by reason; shares of one device count once.";
    JournalSync = Histogram "holdfast_journal_sync_duration_seconds" []
        "One group commit of the ledger's journal: written, and synced unless durability is process-crash.";
    JournalFailures = Counter "holdfast_journal_sync_failures_total" []
        "Group commits and syncs of the journal that failed.";
    CheckpointReadable = Gauge "holdfast_kubelet_checkpoint_readable" []
        "0 while the kubelet's checkpoint cannot be read, or is missing although devices are held: no new grant is bound to its pod then.";
    Disagreements = Counter "holdfast_kubelet_disagreements_total" ["resource", "kind"]
        "How often the kubelet's view of a resource differed from our list, by kind (list, or \
         answer: another plugin answered).";
    KubeletPresent = Gauge "holdfast_kubelet_present" []
        "1 while the kubelet's registration socket exists and a process listens on it.";
    KubeletStart = Gauge "holdfast_kubelet_start_time_seconds" []
        "When the kubelet created its registration socket, in seconds since 1970; it changes with \
         every start of the kubelet.";
    LedgerDamaged = Gauge "holdfast_ledger_damaged" []
        "1 when the ledger was damaged at the daemon's start; the status verb shows the result of \
         the recovery.";
    NotDurable = Gauge "holdfast_ledger_entries_not_durable" []
        "Entries that exist only in memory, because the ledger could not be written before the \
         answer.";
    LedgerFree = Gauge "holdfast_ledger_free_bytes" []
        "Free bytes on the file system of the state directory; 0 when it is read-only.";
    LedgerKept = Gauge "holdfast_ledger_kept" ["copy"]
        "1 while this copy of the ledger (journal or database) can be written; without the journal grants are refused, or answered and not durable.";
    LedgerSize = Gauge "holdfast_ledger_size_bytes" []
        "Size of the files in the state directory.";
    HistoryUnreadable = Gauge "holdfast_ledger_unreadable_since_time_seconds" []
        "When the history became unreadable, in seconds since 1970; absent while it is readable.";
    LogLinesLost = Counter "holdfast_log_lines_lost_total" []
        "Log lines that were lost because the log was not read in time.";
    Ready = Gauge "holdfast_ready" []
        "1 once the ledger is recovered, the first scan done and each resource registered, \
         refused or without a kubelet; it never returns to 0.";
    Reconciliations = Counter "holdfast_reconciliations_total" ["result"]
        "Reconciliations with the kubelet's checkpoint and pods, by result (changed, unchanged, \
         or blind: no checkpoint could be read).";
    Contested = Gauge "holdfast_registration_contested" ["resource"]
        "1 while another plugin seems to register the resource repeatedly.";
    RegistrationDuration = Histogram "holdfast_registration_duration_seconds" ["resource"]
        "From the start of a registration to the kubelet's stream.";
    Registrations = Counter "holdfast_registrations_total" ["resource", "result"]
        "Register calls by result (ok or error).";
    Releases = Counter "holdfast_releases_total" ["released_by"]
        "Released grants by proof (pod_gone, handed_on, superseded or never_started; for a claim unprepared, reallocated, claim_gone, never_prepared or operator).";
    ReportWrites = Counter "holdfast_report_writes_total" ["kind", "result"]
        "Writes of what users of the cluster see, by kind (event, condition or claim) and result \
         (ok, conflict, forbidden, policy, invalid, not_found, throttled or error).";
    RequestsRefused = Counter "holdfast_requests_refused_total" ["socket", "reason"]
        "Requests and connections refused by a limit or without the token, by socket (telemetry, plugin or control) and reason.";
    Registered = Gauge "holdfast_resource_registered" ["resource"]
        "1 while the kubelet has a stream of the resource open.";
    Scan = Histogram "holdfast_scan_duration_seconds" []
        "One scan of the node's hardware.";
    ScanUnread = Gauge "holdfast_scan_unread" []
        "Objects of the host that the last scan could not read; the affected devices keep their \
         last state.";
    Start = Gauge "holdfast_start_time_seconds" []
        "When the daemon started, in seconds since 1970.";
    StreamEnds = Counter "holdfast_stream_ends_total" ["resource", "reason"]
        "ListAndWatch streams that ended, by reason (superseded by a newer registration, withdrawn with its resource, or lost).";
    UnhealthyDevice = Gauge "holdfast_unhealthy_device_info" ["resource", "device", "reason"]
        "1 for each unhealthy device id, of the first 64 of a node.";
}

impl Metric {
    /// Its row.
    #[must_use]
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// The metric of this name; the table is sorted by name.
    #[must_use]
    pub fn named(name: &str) -> Option<Metric> {
        TABLE.binary_search_by(|row| row.name.cmp(name)).ok().map(|at| Metric::ALL[at])
    }

    /// All metrics.
    pub fn all() -> impl Iterator<Item = Metric> {
        Metric::ALL.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_keep_the_conventions() {
        assert!(TABLE.is_sorted_by(|one, next| one.name < next.name), "by name, once each");
        for row in TABLE {
            let Row { name, kind, labels, help } = row;
            assert!(
                name.starts_with("holdfast_")
                    && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{name}"
            );
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
            assert!(*kind != Kind::Histogram || row.unit() == Some("seconds"), "{name}");
            assert!(["_count", "_sum", "_bucket"].iter().all(|end| !name.ends_with(end)), "{name}");
            assert!(
                labels.iter().all(|label| !["le", "job", "instance", "quantile"].contains(label)),
                "{name}"
            );
            assert!(help.ends_with('.') && !help.contains('\n'), "{name}");
        }
        assert_eq!(Metric::UnhealthyDevice.row().name, TABLE[TABLE.len() - 1].name);
    }
}
