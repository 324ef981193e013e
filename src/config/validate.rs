//! Turns the keys of the files into the validated configuration.

use super::contract::contract;
use super::error::{hidden, hidden_in};
use super::fragments::{self, Class, Fragment, HistorySize, LinkType};
use super::health;
use super::hooks::hooks;
use super::sharing::sharing;
use super::text;
use super::{Config, ConfigError, Node};
use crate::domain::{
    CharPath, DeviceClass, DeviceId, MIG_PROFILE, MountSpec, NODE, NodePattern, NvmlLibrary,
    PciAddress, PerContainer, PfSelect, Policy, ResourceName, ResourceSpec, Retention, Select,
};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The default address of telemetry.
const DEFAULT_LISTEN: &str = "127.0.0.1:9477";

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
/// The memory limit of a regular expression: thousands of times the size of one for names.
const REGEX_BYTES_MAX: usize = 256 * 1024;

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
    let token_file = fragment.telemetry.token_file.clone();
    if token_file.as_ref().is_some_and(|path| !path.is_absolute()) {
        return Err(ConfigError::new("`telemetry.token_file` must be an absolute path"));
    }
    if let Some(path) = &token_file {
        text::path(&path.to_string_lossy(), "telemetry.token_file").map_err(ConfigError::new)?;
    }
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
        listen: listen(fragment.telemetry.listen.as_deref().unwrap_or(DEFAULT_LISTEN))?,
        token_file,
        pod_resources_socket,
        cdi_directory: directory("cdi", &fragment.cdi.directory, CDI_DIRECTORY)?,
        features_directory: features(fragment.labels.features_d.as_deref())?,
        nvml: nvml(fragment.nvidia.nvml.as_deref().unwrap_or("auto"))?,
        mig_strategy: fragment.nvidia.mig_strategy.unwrap_or_default(),
        health: health::health(&fragment.health, &fragment.nvidia)?,
        device_info_directory: directory(
            "device_info",
            &fragment.device_info.directory,
            DEVICE_INFO_DIRECTORY,
        )?,
        resources,
        files,
        requested_file: None,
        node: Node::default(),
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

fn listen(text: &str) -> Result<Option<SocketAddr>, ConfigError> {
    let problem = || {
        let text = hidden(text);
        ConfigError::new(format!(
            "`telemetry.listen` is `{text}`, but must be an address and port such as `{DEFAULT_LISTEN}`, or `off`"
        ))
    };
    if text == "off" { Ok(None) } else { text.parse().map(Some).map_err(|_| problem()) }
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

fn spec(resource: &fragments::Resource) -> Result<ResourceSpec, String> {
    let is_each = resource.name.contains(NODE);
    let is_each_profile = resource.name.contains(MIG_PROFILE);
    let name = if is_each {
        ResourceName::for_each_node(&resource.name)
    } else if is_each_profile {
        ResourceName::for_each_profile(&resource.name)
    } else {
        resource.name.parse()
    };
    let name = name.map_err(|error| hidden_in(&error.to_string(), &resource.name))?;
    let class = class(resource.class);
    let is_char = class == DeviceClass::Char;
    if is_each && !is_char {
        return Err(format!("`{NODE}` in the name is for the class `char`, not for `{class}`"));
    }
    if is_each_profile && class != DeviceClass::Gpu {
        return Err(format!(
            "`{MIG_PROFILE}` in the name is for the class `gpu`, not for `{class}`"
        ));
    }
    if is_char && resource.paths.is_empty() {
        return Err("the class `char` needs `paths`, such as paths = [\"/dev/fuse\"]".into());
    }
    if !is_char && !resource.paths.is_empty() {
        return Err(format!("`paths` belongs to the class `char`, not to `{class}`; use `select`"));
    }
    let select = select(&resource.select)?;
    if is_char && select != (Select { id: select.id.clone(), ..Select::default() }) {
        return Err(
            "the class `char` is selected by `paths`; its `select` supports only `id`".into()
        );
    }
    // If a container, or a resource, has only one device, several hosts may have the same path in
    // the container.
    let is_one = resource.per_container == Some(PerContainer::One) || is_each;
    let paths = resource
        .paths
        .iter()
        .map(|path| self::path(path, is_one))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some((target, first, second)) = duplicate_target(&paths).filter(|_| !is_one) {
        let (first, second, target) = (hidden(first), hidden(second), hidden(target));
        return Err(format!(
            "`{first}` and `{second}` would both be `{target}` in the container; give each its \
             own path, or set per_container = \"one\""
        ));
    }
    text::environment(&resource.env)?;
    let contract = contract(resource, class, &select)?;
    let (sharing, per_container) = sharing(resource, &contract)?;
    let hooks = hooks(resource, class, &select, sharing)?;
    Ok(ResourceSpec {
        name,
        class,
        contract,
        select,
        exclude: resource.exclude.as_ref().map(self::select).transpose()?,
        paths,
        cdi: resource.cdi.clone(),
        sharing,
        per_container,
        placement: resource.placement.unwrap_or_default(),
        env: resource.env.clone(),
        mounts: mounts(&resource.mounts)?,
        hooks,
    })
}

fn class(class: Class) -> DeviceClass {
    match class {
        Class::Gpu => DeviceClass::Gpu,
        Class::Fpga => DeviceClass::Fpga,
        Class::Rdma => DeviceClass::Rdma,
        Class::Nic => DeviceClass::Nic,
        Class::Nvme => DeviceClass::Nvme,
        Class::Accelerator => DeviceClass::Accelerator,
        Class::Char => DeviceClass::Char,
    }
}

fn select(fragment: &fragments::Select) -> Result<Select, String> {
    let hex = |what: &'static str| {
        move |text: &String| {
            let digits = text.strip_prefix("0x").unwrap_or(text);
            let plain = digits.len() <= 4 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            let id = plain.then(|| u16::from_str_radix(digits, 16).ok()).flatten();
            id.ok_or_else(|| {
                format!(
                    "the {what} id `{}` must be up to four hex digits, as in \"10de\"",
                    hidden(text)
                )
            })
        }
    };
    let address = |text: &String| {
        let text = text.to_ascii_lowercase();
        text.parse::<PciAddress>().map_err(|error| hidden_in(&error.to_string(), &text))
    };
    let pf = |text: &String| {
        text.parse::<PfSelect>().map_err(|error| hidden_in(&error.to_string(), text))
    };
    let link_type = |kind: &LinkType| match kind {
        LinkType::Ether => "ether".to_owned(),
        LinkType::Infiniband => "infiniband".to_owned(),
    };
    let glob = |what: &'static str| {
        move |text: &String| match glob::Pattern::new(text) {
            Ok(_) => Ok(text.clone()),
            Err(error) => {
                Err(format!("the {what} `{}` is not a valid glob: {error}", hidden(text)))
            }
        }
    };
    Ok(Select {
        vendor: fragment.vendor.iter().map(hex("vendor")).collect::<Result<_, _>>()?,
        device: fragment.device.iter().map(hex("device")).collect::<Result<_, _>>()?,
        driver: fragment.driver.clone(),
        address: fragment.address.iter().map(address).collect::<Result<_, _>>()?,
        vf: fragment.vf,
        id: fragment.id.iter().map(DeviceId::new).collect(),
        pf: fragment.pf.iter().map(pf).collect::<Result<_, _>>()?,
        link_type: fragment.link_type.iter().map(link_type).collect(),
        model: fragment.model.iter().map(glob("model")).collect::<Result<_, _>>()?,
        uuid: fragment.uuid.clone(),
        numa_node: fragment.numa_node.clone(),
        iommu_group: fragment.iommu_group.clone(),
        mdev_type: fragment.mdev_type.clone(),
        mig_profile: fragment
            .mig_profile
            .iter()
            .map(glob("MIG profile"))
            .collect::<Result<_, _>>()?,
        uniform: fragment.uniform,
        part: fragment.part,
        interface: fragment.interface.clone(),
    })
}

fn path(path: &fragments::Path, is_one: bool) -> Result<CharPath, String> {
    let host = &path.host;
    match host {
        NodePattern::Glob(glob) => self::glob(glob)?,
        NodePattern::Regex(regex) => self::regex(regex)?,
    }
    if let Some(container) = &path.container {
        text::path(container, "paths")?;
    }
    if let Some(container) = path
        .container
        .as_ref()
        .filter(|container| host.literal().is_none() && !container.ends_with('/') && !is_one)
    {
        let (host, container) = (hidden(host), hidden(container));
        return Err(format!(
            "every match of `{host}` would be `{container}` in the container; end a folder with \
             `/`, as in `{container}/`, or set per_container = \"one\""
        ));
    }
    let permissions = path.permissions.clone().unwrap_or_else(|| "rw".into());
    let distinct: BTreeSet<char> = permissions.chars().collect();
    if permissions.is_empty()
        || distinct.len() != permissions.len()
        || !distinct.iter().all(|c| "rwm".contains(*c))
    {
        let permissions = hidden(permissions);
        return Err(format!(
            "the permissions `{permissions}` of `{}` must be some of `r`, `w` and `m` (mknod)",
            hidden(host)
        ));
    }
    Ok(CharPath { host: host.clone(), container: path.container.clone(), permissions })
}

fn glob(host: &str) -> Result<(), String> {
    let shown = hidden(host);
    if host.contains(char::is_control) {
        return Err(format!("the path `{shown}` of `paths` contains a control character"));
    }
    let parts = host
        .strip_prefix("/dev/")
        .map(|rest| rest.split('/').any(|part| matches!(part, "" | "." | "..")));
    if parts != Some(false) {
        return Err(format!(
            "the path `{shown}` must begin with `/dev/` and must not contain empty parts, `.` or \
             `..`"
        ));
    }
    glob::Pattern::new(host)
        .map(drop)
        .map_err(|error| format!("the path `{shown}` is not a valid glob: {error}"))
}

fn regex(regex: &str) -> Result<(), String> {
    let shown = hidden(regex);
    if regex.is_empty() || regex.contains(char::is_control) {
        return Err(format!(
            "`regex` is `{shown}`, but must be a regular expression for paths below /dev, such as `^video[0-9]+$`"
        ));
    }
    // The beginning of a host path. A regular expression is matched with the part below /dev.
    if regex.trim_start_matches('^').starts_with("/dev/") {
        return Err(format!(
            "`regex` is `{shown}`, but is matched with paths below /dev; leave out `/dev/`"
        ));
    }
    regex_lite::RegexBuilder::new(regex).size_limit(REGEX_BYTES_MAX).build().map(drop).map_err(
        |error| format!("`regex` is `{shown}`, which is not a valid regular expression: {error}"),
    )
}

/// Two hosts with the same path in the container, and that path. Hosts are compared by name; the
/// matches of a wildcard are not known here.
fn duplicate_target(paths: &[CharPath]) -> Option<(String, &str, &str)> {
    let mut taken = BTreeMap::new();
    paths.iter().filter_map(|path| Some((path.host.literal()?, &path.container))).find_map(
        |(host, container)| {
            let target = match container {
                None => host.to_owned(),
                Some(folder) if folder.ends_with('/') => {
                    format!("{folder}{}", host.rsplit('/').next().unwrap_or(host))
                }
                Some(container) => container.clone(),
            };
            let first: &str = taken.entry(target.clone()).or_insert(host);
            (first != host).then_some((target, first, host))
        },
    )
}

fn mounts(mounts: &[fragments::Mount]) -> Result<Vec<MountSpec>, String> {
    let mut taken = BTreeMap::new();
    for fragments::Mount { host, container, .. } in mounts {
        text::path(host, "mounts")?;
        text::path(container, "mounts")?;
        let place = container.trim_matches('/');
        let (shown, at) = (hidden(host), hidden(container));
        if place.is_empty() {
            return Err(format!(
                "the mount of `{shown}` at `{at}` of `mounts` would hide the container's own files"
            ));
        }
        if let Some(first) = taken.insert(place, host) {
            return Err(format!(
                "`{}` and `{shown}` of `mounts` would both be `{at}` in the container",
                hidden(first)
            ));
        }
    }
    let mount = |mount: &fragments::Mount| MountSpec {
        host: mount.host.clone(),
        container: mount.container.clone(),
        read_only: mount.read_only,
    };
    Ok(mounts.iter().map(mount).collect())
}
