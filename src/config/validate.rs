//! Turns the keys of the files into the validated configuration.

use super::error::hidden;
use super::fragments::{self, Fragment, HistorySize};
use super::labels::ComparedLabels;
use super::resource::spec;
use super::telemetry::telemetry;
use super::tree::{Table, Value};
use super::{Config, ConfigError, Node, health, text};
use crate::domain::{
    ApiCredentials, NodeLabels, NvidiaRoots, NvmlLibrary, Policy, Reported, ResourceName, Retention,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The directory of CDI files that do not outlive the boot, where container runtimes read them.
const CDI_DIRECTORY: &str = "/var/run/cdi";

/// The only directory where Multus reads the device-info files of device plugins.
const DEVICE_INFO_DIRECTORY: &str = "/var/run/k8s.cni.cncf.io/devinfo/dp";

/// The only directory where the worker of Node Feature Discovery reads feature files.
const FEATURES_DIRECTORY: &str = "/etc/kubernetes/node-feature-discovery/features.d";

/// The shortest history. A device that was released a day ago may still be in the kubelet's
/// checkpoint, or in an older copy of the ledger. Only the history shows that it is no longer held.
const HISTORY_AGE_MIN: Duration = Duration::from_secs(24 * 3600);
/// The smallest history, for the same reason.
const HISTORY_SIZE_MIN: u64 = 1000;
/// The name of a resource; hidden if it is not a valid name.
pub(super) fn name_of(text: &str) -> String {
    if text.parse::<ResourceName>().is_ok() { text.to_owned() } else { hidden(text) }
}

/// Names of resources are compared in `merge`, which knows which ones may be equal.
pub(super) fn validate(fragment: &Fragment, files: Vec<PathBuf>) -> Result<Config, ConfigError> {
    let mut resources = Vec::with_capacity(fragment.resource.len());
    for resource in &fragment.resource {
        let spec = spec(resource).map_err(|problem| {
            ConfigError::new(format!("resource `{}`: {problem}", name_of(&resource.name)))
        })?;
        resources.push(Arc::new(spec));
    }
    let pod_resources_socket = fragment.kubelet.pod_resources_socket.clone();
    if let Some(path) = &pod_resources_socket {
        check_path(path, "kubelet.pod_resources_socket")?;
    }
    let telemetry = telemetry(&fragment.telemetry)?;
    let directory = |key: &str, directory: &Option<PathBuf>, usual: &str| {
        let directory = directory.clone().unwrap_or_else(|| PathBuf::from(usual));
        let problem = || {
            ConfigError::new(format!(
                "`{key}.directory` must be an absolute path that its readers use too; the default \
                 is {usual}"
            ))
        };
        if !directory.is_absolute() {
            return Err(problem());
        }
        check_path(&directory, &format!("{key}.directory"))?;
        Ok(directory)
    };
    Ok(Config {
        durability: fragment.ledger.durability.unwrap_or_default(),
        retention: retention(&fragment.ledger)?,
        policy: Policy {
            refuse: fragment.ledger.refuse.unwrap_or_default(),
            when_not_durable: fragment.ledger.when_not_durable.unwrap_or_default(),
        },
        listen: telemetry.listen,
        token_file: telemetry.token_file,
        tls: telemetry.tls,
        authorize: telemetry.authorize,
        pod_resources_socket,
        cdi_directory: directory("cdi", &fragment.cdi.directory, CDI_DIRECTORY)?,
        features_directory: features(fragment.labels.features_d.as_deref())?,
        nvml: nvml(fragment.nvidia.nvml.as_deref().unwrap_or("auto"))?,
        nvidia_roots: NvidiaRoots {
            driver: nvidia_root(fragment.nvidia.driver_root.as_deref(), "driver_root")?,
            dev: nvidia_root(fragment.nvidia.dev_root.as_deref(), "dev_root")?,
        },
        mig_strategy: fragment.nvidia.mig_strategy.unwrap_or_default(),
        health: health::health(&fragment.health, &fragment.nvidia)?,
        device_info_directory: directory(
            "device_info",
            &fragment.device_info.directory,
            DEVICE_INFO_DIRECTORY,
        )?,
        node_labels: fragment
            .cluster
            .node_labels
            .as_deref()
            .map_or(Ok(Default::default()), node_labels)?,
        credentials: credentials(fragment.cluster.credentials.as_deref().unwrap_or("auto"))?,
        reported: reported(&fragment.cluster)?,
        dra: dra(&fragment.dra)?,
        vendor_attributes: fragment.dra.vendor_attributes.unwrap_or_default(),
        device_metadata: fragment.dra.device_metadata.unwrap_or_default(),
        claim_status: fragment.dra.claim_status.unwrap_or_default(),
        resources,
        files,
        requested_file: None,
        node: Node::default(),
        compared_labels: ComparedLabels::default(),
        hash: 0,
    })
}

/// Checks that a path is absolute, without `.` and `..`.
fn check_path(path: &Path, of: &str) -> Result<(), ConfigError> {
    text::path(&path.to_string_lossy(), of).map_err(ConfigError::new)
}

fn retention(ledger: &fragments::Ledger) -> Result<Retention, ConfigError> {
    let usual = Retention::default();
    let age = |text: &String| {
        let problem = |wanted| {
            ConfigError::new(format!(
                "`ledger.history_age` is `{}`, but must be {wanted}",
                hidden(text)
            ))
        };
        let age = humantime::parse_duration(text).map_err(|_| problem("a time such as `90d`"))?;
        if age < HISTORY_AGE_MIN { Err(problem("at least a day, `1d`")) } else { Ok(age) }
    };
    let problem = |value: &str, wanted: &str| {
        ConfigError::new(format!("`ledger.history_size` is {value}, but must be {wanted}"))
    };
    let sized = match &ledger.history_size {
        None => usual,
        Some(HistorySize::Grants(grants)) if *grants < HISTORY_SIZE_MIN => {
            return Err(problem(
                &hidden(grants),
                &format!("at least {HISTORY_SIZE_MIN} grants, or a size such as \"256MiB\""),
            ));
        }
        Some(HistorySize::Grants(grants)) => Retention::of_grants(*grants),
        Some(HistorySize::Bytes(text)) => {
            let quoted = format!("`{}`", hidden(text));
            let bytes = size(text).ok_or_else(|| {
                problem(&quoted, "a size such as `256MiB` (KiB, MiB, GiB), or a number of grants")
            })?;
            if bytes < HISTORY_SIZE_MIN * Retention::BYTES_PER_GRANT {
                return Err(problem(&quoted, "at least `4MiB`"));
            }
            Retention::of_bytes(bytes)
        }
    };
    Ok(Retention { age: ledger.history_age.as_ref().map_or(Ok(usual.age), age)?, ..sized })
}

/// The bytes of `16MiB`, `16Mi` or `16MB`.
fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim_start() {
        "KiB" | "Ki" => 1024,
        "MiB" | "Mi" => 1024 * 1024,
        "GiB" | "Gi" => 1024 * 1024 * 1024,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

fn features(folder: Option<&Path>) -> Result<Option<PathBuf>, ConfigError> {
    match folder {
        None => Ok(None),
        Some(folder) if folder == Path::new("off") => Ok(None),
        Some(folder) if folder.is_absolute() => {
            check_path(folder, "labels.features_d").map(|()| Some(folder.to_owned()))
        }
        Some(_) => Err(ConfigError::new(format!(
            "`labels.features_d` must be an absolute path, such as {FEATURES_DIRECTORY}, or \
             `off`"
        ))),
    }
}

/// The source of the node's labels in the merged files, before their sections. An invalid one is an
/// error of its own, and counts as the default here.
pub(super) fn label_source(merged: &Table) -> NodeLabels {
    let cluster = merged.get("cluster").and_then(Value::as_table);
    let text = cluster.and_then(|table| table.get("node_labels")?.as_text());
    text.and_then(|text| node_labels(text).ok()).unwrap_or_default()
}

/// The source of the node's labels.
fn node_labels(text: &str) -> Result<NodeLabels, ConfigError> {
    match text {
        "api" if cfg!(feature = "cluster") => Ok(NodeLabels::Api),
        "api" => Err(ConfigError::new(
            "`cluster.node_labels` is `api`, but this build of Holdfast cannot connect to the API \
             server (the cargo feature `cluster`)",
        )),
        path if path.starts_with('/') => check_path(Path::new(path), "cluster.node_labels")
            .map(|()| NodeLabels::File(path.into())),
        other => Err(ConfigError::new(format!(
            "`cluster.node_labels` is `{}`, but must be `api`, or the absolute path of a file with \
             the node's labels",
            hidden(other)
        ))),
    }
}

fn credentials(text: &str) -> Result<ApiCredentials, ConfigError> {
    match text {
        "auto" => Ok(ApiCredentials::Auto),
        path if path.starts_with('/') => check_path(Path::new(path), "cluster.credentials")
            .map(|()| ApiCredentials::Kubeconfig(path.into())),
        other => Err(ConfigError::new(format!(
            "`cluster.credentials` is `{}`, but must be `auto`, or the absolute path of a kubeconfig",
            hidden(other)
        ))),
    }
}

fn reported(fragment: &fragments::Cluster) -> Result<Reported, ConfigError> {
    Ok(Reported {
        events: needs_client(fragment.events, "cluster.events")?,
        condition: needs_client(fragment.node_condition, "cluster.node_condition")?,
    })
}

fn dra(fragment: &fragments::Dra) -> Result<bool, ConfigError> {
    needs_client(fragment.enabled, "dra.enabled")
}

/// A key whose value `true` needs the client of the API server; `false` without a value.
fn needs_client(value: Option<bool>, key: &str) -> Result<bool, ConfigError> {
    match value.unwrap_or_default() {
        true if !cfg!(feature = "cluster") => Err(ConfigError::new(format!(
            "`{key}` is `true`, but this build of Holdfast cannot connect to the API server (the \
             cargo feature `cluster`)"
        ))),
        value => Ok(value),
    }
}

/// A root of NVIDIA's driver; `None` for `auto`.
fn nvidia_root(text: Option<&str>, key: &str) -> Result<Option<String>, ConfigError> {
    match text {
        None | Some("auto") => Ok(None),
        Some(path) if path.starts_with('/') => {
            check_path(Path::new(path), &format!("nvidia.{key}"))?;
            Ok(Some(path.trim_end_matches('/').to_owned()))
        }
        Some(other) => Err(ConfigError::new(format!(
            "`nvidia.{key}` is `{}`, but must be `auto`, or an absolute path such as `/` or \
             /run/nvidia/driver",
            hidden(other)
        ))),
    }
}

fn nvml(text: &str) -> Result<NvmlLibrary, ConfigError> {
    match text {
        "auto" => Ok(NvmlLibrary::Auto),
        "off" => Ok(NvmlLibrary::Off),
        path if path.starts_with('/') => {
            check_path(Path::new(path), "nvidia.nvml").map(|()| NvmlLibrary::At(path.into()))
        }
        other => Err(ConfigError::new(format!(
            "`nvidia.nvml` is `{}`, but must be `auto`, `off`, or the absolute path of libnvidia-ml.so.1",
            hidden(other)
        ))),
    }
}
