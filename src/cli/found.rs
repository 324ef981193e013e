//! One scan of the host by a verb: with the ids of the ledger, so that devices have the ids that
//! the kubelet knows, and with NVML where the driver's files are not enough.

use crate::config::Config;
use crate::console::{Global, block_on};
use crate::discovery;
use crate::domain::{Grant, NvmlLibrary, NvmlSnapshot, requests_names};
use crate::hardware::{self, DiscoverInput, Discovery};
use crate::host::{self, HostRoot};
use crate::store::{self, StoreError};
use std::sync::Arc;
use std::time::Duration;

/// Timeout of NVML, which first has to wake idle GPUs.
const NVML_DEADLINE: Duration = Duration::from_secs(10);

/// The devices of the host under a configuration.
#[derive(Debug)]
pub struct Found {
    /// The scan.
    pub discovery: Discovery,
    /// The ledger; empty if there is none, or if it cannot be read.
    pub recovered: store::Recovered,
    /// The live grants of the ledger.
    pub grants: Vec<Arc<Grant>>,
    /// NVML's answers; empty if it was not queried, or did not answer.
    pub nvml: NvmlSnapshot,
    /// Why the ledger or NVML could not be read, one sentence each. Devices may then have other
    /// ids, or be missing.
    pub unread: Vec<String>,
}

/// Scans the host with the configured resources, or the usual ones if none are configured.
#[must_use]
pub fn find(global: &Global, config: &Config, root: &HostRoot) -> Found {
    scanned(global, config, root, false)
}

/// As [`find`], with the sizes and versions that only NVML reports.
#[must_use]
pub fn find_described(global: &Global, config: &Config, root: &HostRoot) -> Found {
    scanned(global, config, root, true)
}

fn scanned(global: &Global, config: &Config, root: &HostRoot, described: bool) -> Found {
    let mut unread = Vec::new();
    let recovered = match store::peek(&global.state_dir) {
        Ok(recovered) => recovered,
        Err(StoreError::NoJournal { .. }) => store::Recovered::default(),
        Err(error) => {
            unread.push(format!(
                "the ids and holders of the ledger are not shown, since it cannot be read: {error}"
            ));
            store::Recovered::default()
        }
    };
    let scan = hardware::scan(root);
    let specs = hardware::defaults::or_usual(&config.resources, config.mig_strategy, &scan);
    let grants: Vec<Arc<Grant>> = recovered.grants.iter().cloned().map(Arc::new).collect();
    let held = discovery::held_nodes(&grants);
    let known = DiscoverInput { held: &held, ..DiscoverInput::first(&recovered.names) };
    let mut found = hardware::discover_with(root, scan.clone(), &specs, &known);
    let (nvml, failed) = query_nvml(root, &config.nvml, &found, described);
    unread.extend(failed.map(|why| format!("NVML did not report all facts: {why}")));
    if let Some(nvml) = &nvml {
        found = hardware::discover_with(root, scan, &specs, &DiscoverInput { nvml, ..known });
    }
    Found { discovery: found, grants, recovered, nvml: nvml.unwrap_or_default(), unread }
}

/// Facts that only NVML reports; an empty snapshot if it misses the deadline, with the reason if a
/// device needs them. No facts if NVML is off, or if nothing needs it.
fn query_nvml(
    root: &HostRoot,
    library: &NvmlLibrary,
    found: &Discovery,
    described: bool,
) -> (Option<NvmlSnapshot>, Option<String>) {
    let question = hardware::nvml_query(root, &found.selection, described);
    if question.is_empty() || *library == NvmlLibrary::Off {
        return (None, None);
    }
    let is_needed = requests_names(&question);
    let answer = block_on(async {
        let answer = host::query_nvml(root.clone(), library.clone(), question);
        tokio::time::timeout(NVML_DEADLINE, answer)
            .await
            .map_err(|_| format!("no answer within {}", humantime::format_duration(NVML_DEADLINE)))
    });
    let answer = answer.unwrap_or_else(|failed| Err(failed.sentence.unwrap_or_default()));
    let (facts, failed) = answer.map_or_else(
        |why| (NvmlSnapshot::default(), Some(why)),
        |answer| (answer.facts, answer.failed),
    );
    // NVLink is optional information: a failure that concerns only NVLink causes no warning.
    (Some(facts), failed.filter(|_| is_needed))
}
