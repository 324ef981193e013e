//! The labels of NVIDIA's gpu-feature-discovery, under its names and with its values, so that
//! selectors of pods stay as they are.
//!
//! A fact that is not known omits its label. So does a value that Kubernetes does not accept, which
//! Node Feature Discovery would refuse. Where that program chooses at random, the result here is
//! fixed: of several models on a node, the most frequent one is described.

use super::label_value::is_valid;
use crate::domain::{
    Contract, MigAttributes, MigStrategy, NvidiaGpu, NvidiaNode, Plan, ResourceSpec, Sharing,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The resource of whole GPUs, and the prefix of those of MIG profiles.
const GPU: &str = "nvidia.com/gpu";
const MIG: &str = "nvidia.com/mig-";
/// The end of a resource's name that the plugin appends to shared ones (`renameByDefault`).
const RENAMED: &str = ".shared";
/// PCI classes: a VGA controller, and a 3D controller.
const VGA: u32 = 0x03_0000;
const CONTROLLER_3D: u32 = 0x03_0200;

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// How the resources of a plan offer the GPUs of NVIDIA's driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuOffers {
    /// How MIG instances are offered.
    strategy: MigStrategy,
    /// The shares, by the resource's name.
    shares: BTreeMap<String, Shares>,
}

/// How a resource shares its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shares {
    /// The shares of a device; `None` for a pool, which has no shares of one device.
    replicas: Option<u32>,
    by_mps: bool,
    /// Whether the resource has another name than without sharing.
    is_renamed: bool,
}

impl GpuOffers {
    /// The offers of a plan; `None` if it offers no GPUs of NVIDIA's driver. Another plugin then
    /// has its own labels.
    #[must_use]
    pub fn of(plan: &Plan) -> Option<Self> {
        let mut offers = GpuOffers::default();
        let specs = plan.specs.iter().chain(plan.patterns.iter());
        let mut is_any = false;
        for spec in specs.filter(|spec| !spec.is_orphan()) {
            let Contract::Nvidia(options) = &spec.contract else { continue };
            is_any = true;
            offers.strategy = stronger(offers.strategy, strategy(spec));
            if spec.name.is_pattern() {
                continue;
            }
            let replicas = match spec.sharing {
                Sharing::Exclusive => Some(1),
                Sharing::Replicas(replicas) => Some(replicas),
                Sharing::Pool(_) => None,
            };
            let by_mps = options.mps_root.is_some();
            let shares = Shares { replicas, by_mps, is_renamed: false };
            offers.shares.insert(spec.name.to_string(), shares);
        }
        is_any.then_some(offers)
    }

    /// The shares of the resource of this name. A resource of whole GPUs may have any name if it is
    /// the only one.
    fn shares(&self, name: &str) -> Option<Shares> {
        let renamed = || {
            let mut others = self.shares.iter().filter(|(name, _)| !name.starts_with(MIG));
            let only = others.next().filter(|_| others.next().is_none() && name == GPU);
            self.shares.get(&format!("{name}{RENAMED}")).or(only.map(|(_, shares)| shares))
        };
        self.shares
            .get(name)
            .copied()
            .or_else(|| renamed().map(|shares| Shares { is_renamed: true, ..*shares }))
    }
}

/// Which MIG instances a resource offers. The names are those of the plugin.
fn strategy(spec: &ResourceSpec) -> MigStrategy {
    let offers_instances = spec.select.uniform
        || spec.select.part == Some(true)
        || !spec.select.mig_profile.is_empty();
    if spec.name.as_str().starts_with(MIG) {
        MigStrategy::Mixed
    } else if offers_instances {
        MigStrategy::Single
    } else {
        MigStrategy::None
    }
}

fn stronger(one: MigStrategy, other: MigStrategy) -> MigStrategy {
    match (one, other) {
        (MigStrategy::Mixed, _) | (_, MigStrategy::Mixed) => MigStrategy::Mixed,
        (MigStrategy::Single, _) | (_, MigStrategy::Single) => MigStrategy::Single,
        (MigStrategy::None, MigStrategy::None) => MigStrategy::None,
    }
}

/// The labels of a node.
#[must_use]
pub fn gpu_labels(node: &NvidiaNode, offers: &GpuOffers) -> Labels {
    if node.gpus.is_empty() {
        return Labels::new();
    }
    let mut labels = Labels::new();
    of_node(node, &mut labels);
    of_sharing(node, offers, &mut labels);
    of_gpus(node, offers, &mut labels);
    match offers.strategy {
        MigStrategy::None => {}
        MigStrategy::Single => {
            labels.insert("nvidia.com/mig.strategy".into(), "single".into());
            of_single(node, offers, &mut labels);
        }
        MigStrategy::Mixed => {
            labels.insert("nvidia.com/mig.strategy".into(), "mixed".into());
            for (profile, instances) in &profiles(node) {
                if let Some(profile) = profile {
                    let name = format!("{MIG}{profile}");
                    of_profile(&name, profile, instances, offers, &mut labels);
                }
            }
        }
    }
    labels.retain(|_, value| value.is_empty() || is_valid(value));
    labels
}

/// The machine, the versions, the mode, and whether a GPU has a MIG mode.
fn of_node(node: &NvidiaNode, labels: &mut Labels) {
    let mut put = |name: &str, value: String| {
        labels.insert(format!("nvidia.com/{name}"), value);
    };
    if let Some(machine) = node.machine.as_deref().map(sanitised).filter(|text| !text.is_empty()) {
        put("gpu.machine", machine);
    }
    let parts: Vec<&str> = node.driver.iter().flat_map(|version| version.split('.')).collect();
    if let ([major, minor] | [major, minor, _], Some(full)) = (&parts[..], &node.driver) {
        let revision = parts.get(2).copied().unwrap_or_default();
        for (name, value) in [
            ("driver.major", *major),
            ("driver.minor", *minor),
            ("driver.rev", revision),
            ("driver-version.major", *major),
            ("driver-version.minor", *minor),
            ("driver-version.revision", revision),
            ("driver-version.full", full.as_str()),
        ] {
            put(&format!("cuda.{name}"), value.to_owned());
        }
    }
    let described = || node.gpus.iter().filter_map(|gpu| gpu.description.as_ref());
    if let Some((major, minor)) = described().find_map(|gpu| gpu.cuda) {
        for name in ["runtime", "runtime-version"] {
            put(&format!("cuda.{name}.major"), major.to_string());
            put(&format!("cuda.{name}.minor"), minor.to_string());
        }
        put("cuda.runtime-version.full", format!("{major}.{minor}"));
    }
    let is_capable = described().any(|gpu| gpu.has_mig_mode);
    if is_capable || node.is_described() {
        put("mig.capable", is_capable.to_string());
    }
    let classes: Option<BTreeSet<u32>> = node.gpus.iter().map(|gpu| gpu.class).collect();
    if let Some(classes) = classes {
        let mode = match classes.into_iter().collect::<Vec<_>>()[..] {
            [VGA] => "graphics",
            [CONTROLLER_3D] => "compute",
            _ => "unknown",
        };
        put("gpu.mode", mode.to_owned());
    }
}

/// Whether the node offers shares by MPS. MIG instances are not shared in this way.
fn of_sharing(node: &NvidiaNode, offers: &GpuOffers, labels: &mut Labels) {
    let by_mps = offers.shares.values().any(|shares| shares.by_mps);
    let is_capable = by_mps && !node.gpus.iter().any(|gpu| gpu.in_mig_mode);
    labels.insert("nvidia.com/mps.capable".into(), is_capable.to_string());
}

/// The GPUs of the most frequent model. Whole GPUs come before those in MIG mode.
fn of_gpus(node: &NvidiaNode, offers: &GpuOffers, labels: &mut Labels) {
    let mut counts: BTreeMap<Option<&str>, usize> = BTreeMap::new();
    for gpu in &node.gpus {
        *counts.entry(gpu.model.as_deref()).or_default() += 1;
    }
    let count = |gpu: &NvidiaGpu| counts.get(&gpu.model.as_deref()).copied().unwrap_or_default();
    let rank = |gpu: &&NvidiaGpu| (gpu.in_mig_mode, Reverse(count(gpu)), gpu.model.clone());
    let Some(gpu) = node.gpus.iter().min_by_key(rank) else { return };
    if gpu.in_mig_mode {
        base(GPU, gpu.model.as_deref(), &[], count(gpu), None, labels);
        labels.insert(format!("{GPU}.replicas"), "0".into());
        labels.insert(format!("{GPU}.sharing-strategy"), "none".into());
    } else {
        base(GPU, gpu.model.as_deref(), &[], count(gpu), offers.shares(GPU), labels);
    }
    let Some(description) = &gpu.description else { return };
    let mut put = |name: &str, value: String| {
        labels.insert(format!("{GPU}.{name}"), value);
    };
    if let Some(memory) = description.memory_mib.filter(|memory| *memory != 0) {
        put("memory", memory.to_string());
    }
    if let Some((major, minor)) = description.compute.filter(|(major, _)| *major != 0) {
        put("family", family(major, minor).to_owned());
        put("compute.major", major.to_string());
        put("compute.minor", minor.to_string());
    }
}

/// Product, number and shares of a resource.
fn base(
    resource: &str,
    model: Option<&str>,
    more: &[&str],
    count: usize,
    shares: Option<Shares>,
    labels: &mut Labels,
) {
    let replicas = shares.and_then(|shares| shares.replicas);
    let is_shared = shares.is_some_and(|shares| !shares.is_renamed && shares.replicas != Some(1));
    if let Some(model) = model {
        let mut parts = vec![sanitised(model)];
        parts.extend(more.iter().copied().map(str::to_owned));
        parts.extend(is_shared.then(|| "SHARED".to_owned()));
        labels.insert(format!("{resource}.product"), parts.join("-"));
    }
    labels.insert(format!("{resource}.count"), count.to_string());
    if let Some(replicas) = replicas {
        let by_mps = shares.is_some_and(|shares| shares.by_mps);
        let strategy = match replicas {
            1 => "none",
            _ if by_mps => "mps",
            _ => "time-slicing",
        };
        labels.insert(format!("{resource}.replicas"), replicas.to_string());
        labels.insert(format!("{resource}.sharing-strategy"), strategy.to_owned());
    }
}

/// An instance, and its GPU's model.
type OfGpu<'a> = (Option<&'a str>, Option<MigAttributes>);

/// The instances of each profile. `+` in a profile becomes `.`, as in the names of resources.
fn profiles(node: &NvidiaNode) -> BTreeMap<Option<String>, Vec<OfGpu<'_>>> {
    let mut profiles: BTreeMap<Option<String>, Vec<OfGpu<'_>>> = BTreeMap::new();
    for gpu in &node.gpus {
        for instance in &gpu.instances {
            let profile = instance.profile.as_deref().map(|profile| profile.replace('+', "."));
            profiles.entry(profile).or_default().push((gpu.model.as_deref(), instance.attributes));
        }
    }
    profiles
}

/// Replaces the labels of whole GPUs by those of MIG instances, if a GPU is in MIG mode. A node
/// with instances of several profiles, with whole GPUs next to instances, or with a GPU without an
/// instance is invalid under this strategy.
fn of_single(node: &NvidiaNode, offers: &GpuOffers, labels: &mut Labels) {
    let Some(first) = node.gpus.iter().find(|gpu| gpu.in_mig_mode) else { return };
    let profiles = profiles(node);
    let is_mixture = node.gpus.iter().any(|gpu| !gpu.in_mig_mode || gpu.instances.is_empty());
    let is_unknown = profiles.contains_key(&None);
    let of_gpu = ["product", "count", "replicas", "sharing-strategy", "memory"];
    of_gpu.iter().for_each(|name| drop(labels.remove(&format!("{GPU}.{name}"))));
    match profiles.first_key_value() {
        Some((Some(profile), instances)) if profiles.len() == 1 && !is_mixture => {
            of_profile(GPU, profile, instances, offers, labels);
        }
        _ if is_unknown && !is_mixture => {}
        _ => {
            base(GPU, first.model.as_deref(), &["MIG", "INVALID"], 0, None, labels);
            for (name, value) in [("replicas", "0"), ("sharing-strategy", ""), ("memory", "0")] {
                labels.insert(format!("{GPU}.{name}"), value.to_owned());
            }
        }
    }
}

/// The labels of the instances of one profile, under the name of their resource.
fn of_profile(
    resource: &str,
    profile: &str,
    instances: &[OfGpu<'_>],
    offers: &GpuOffers,
    labels: &mut Labels,
) {
    let model = instances.first().and_then(|(model, _)| *model);
    base(resource, model, &["MIG", profile], instances.len(), offers.shares(resource), labels);
    let Some(size) = instances.iter().find_map(|(_, size)| *size) else { return };
    let [copy, decoder, encoder, jpeg, ofa] = size.engines.map(u64::from);
    for (name, value) in [
        ("memory", size.memory_mb),
        ("multiprocessors", size.multiprocessors.into()),
        ("slices.gi", size.slices.0.into()),
        ("slices.ci", size.slices.1.into()),
        ("engines.copy", copy),
        ("engines.decoder", decoder),
        ("engines.encoder", encoder),
        ("engines.jpeg", jpeg),
        ("engines.ofa", ofa),
    ] {
        labels.insert(format!("{resource}.{name}"), value.to_string());
    }
}

/// The architecture of a compute capability.
fn family(major: i32, minor: i32) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, ..5) => "volta",
        (7, _) => "turing",
        (8, ..9) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10 | 12, _) => "blackwell",
        (13, _) => "rubin",
        _ => "undefined",
    }
}

/// A name as that program writes it: only letters, digits, `-`, `_` and `.`, its words joined by
/// `-`.
fn sanitised(text: &str) -> String {
    let kept = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ');
    let plain: String = text.chars().filter(kept).collect();
    plain.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
#[path = "gpu_labels_tests.rs"]
mod tests;
