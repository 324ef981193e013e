//! The checks: facts in, findings out. A report lists each check without findings by its name.

mod config;
mod daemon;
mod devices;
mod dra;
mod host;
mod kubelet;
mod ledger;
mod nvidia;
mod runtime;

pub use self::kubelet::resource_of_socket;

use super::{Facts, Finding, Level, Report};

/// One check.
#[derive(Debug)]
pub struct Check {
    /// Its name; `docs/doctor.md` lists them.
    pub name: &'static str,
    /// Returns the findings; `None` if too few facts are known.
    pub run: fn(&Facts) -> Option<Vec<Finding>>,
}

/// All checks, in the order that a person would follow.
pub const CHECKS: &[Check] = &[
    Check { name: "privileges", run: host::privileges },
    Check { name: "looks", run: host::readers },
    Check { name: "user-namespace", run: host::user_namespace },
    Check { name: "config", run: config::valid },
    Check { name: "config-in-force", run: config::in_force },
    Check { name: "kubelet-dir", run: kubelet::directory },
    Check { name: "kubelet-mounts", run: kubelet::mounts },
    Check { name: "kubelet", run: kubelet::listens },
    Check { name: "pod-resources", run: kubelet::pod_resources },
    Check { name: "kubelet-version", run: kubelet::version },
    Check { name: "kubelet-list", run: kubelet::list_is_ours },
    Check { name: "kubelet-checkpoint", run: kubelet::checkpoint },
    Check { name: "other-plugins", run: kubelet::other_plugins },
    Check { name: "daemon", run: daemon::answers },
    Check { name: "daemon-alone", run: daemon::alone },
    Check { name: "registrations", run: daemon::registrations },
    Check { name: "hooks", run: daemon::hooks },
    Check { name: "mps", run: daemon::mps },
    Check { name: "metrics-readers", run: daemon::readers },
    Check { name: "signals", run: daemon::signals },
    Check { name: "resources", run: devices::selected },
    Check { name: "nvidia-driver", run: nvidia::driver },
    Check { name: "devices", run: devices::healthy },
    Check { name: "iommu", run: devices::iommu },
    Check { name: "cdi", run: runtime::cdi },
    Check { name: "dra-directories", run: dra::directories },
    Check { name: "dra-api-server", run: dra::api_server },
    Check { name: "dra", run: dra::reported },
    Check { name: "state-dir", run: ledger::state },
    Check { name: "ledger", run: ledger::ledger },
    Check { name: "clock", run: ledger::clock },
    Check { name: "inotify", run: host::inotify },
    Check { name: "kernel-log", run: host::kernel_log },
    Check { name: "selinux", run: host::selinux },
];

/// Runs every check.
#[must_use]
pub fn examine(facts: &Facts) -> Report {
    let (mut findings, mut unknown) = (Vec::new(), Vec::new());
    for check in CHECKS {
        match (check.run)(facts) {
            None => unknown.push(check.name),
            Some(found) if found.is_empty() => findings.push(passed(check.name)),
            Some(found) => findings.extend(found),
        }
    }
    // The sort is stable: within a level the order of the checks remains.
    findings.sort_by_key(|finding| finding.level);
    Report { schema: 1, version: env!("CARGO_PKG_VERSION"), findings, unknown }
}

fn passed(code: &'static str) -> Finding {
    Finding {
        level: Level::Ok,
        code,
        on: String::new(),
        found: "no problem".into(),
        why: "",
        todo: String::new(),
        command: None,
    }
}

/// A string of a JSON document; empty if absent.
fn text<'a>(value: &'a serde_json::Value, key: &str) -> &'a str {
    value.get(key).and_then(serde_json::Value::as_str).unwrap_or_default()
}

/// A list of a JSON document; empty if absent.
fn list<'a>(value: &'a serde_json::Value, key: &str) -> &'a [serde_json::Value] {
    value.get(key).and_then(serde_json::Value::as_array).map_or(&[], Vec::as_slice)
}

/// A number of a JSON document; 0 if absent.
fn number(value: &serde_json::Value, key: &str) -> u64 {
    value.get(key).and_then(serde_json::Value::as_u64).unwrap_or_default()
}

/// A boolean of a JSON document; false if absent.
fn is_true(value: &serde_json::Value, key: &str) -> bool {
    value.get(key).and_then(serde_json::Value::as_bool).unwrap_or_default()
}

#[cfg(test)]
mod tests;
