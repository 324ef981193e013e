//! A CDI file for NVIDIA GPUs and MIG instances: their nodes, and what a container needs of the
//! driver. It has the content of the file that `nvidia-ctk cdi generate` writes.
//!
//! Features of the driver (GDRCopy and others) and IMEX channels have files of their own kinds.
//!
//! One file has all devices of a kind: a runtime applies the common edits of a file once, and each
//! hook takes time.
//!
//! Two files that define one name make it invalid for every container. So a name that a file of
//! another program defines is left out here.
//!
//! The loader finds `libcuda.so.1` by that name. NVIDIA's program for hooks creates this link in
//! the container, and adds the folder to the loader's cache. Without the program the library is
//! mounted at the names of its links too. Then the loader finds it in its own folders, but not in
//! the folder of another distribution.

mod common;
mod format;

pub use self::format::Document;

use self::common::{common_edits, create_symlinks};
use self::format::{Edits, Node};
use super::{attribute, nvidia, unanswerable};
use crate::domain::{
    CdiHookProgram, Contract, Device, DeviceIdStrategy, DeviceNode, DriverFile, NvidiaDriver,
    NvidiaFeature, NvidiaOptions, ResourceSpec, Switch,
};
use std::collections::{BTreeMap, BTreeSet};

/// The name of all devices of a file together.
pub const ALL: &str = "all";
/// The class in the names of GPUs and MIG instances.
const GPU_CLASS: &str = "gpu";

/// A GPU or a MIG instance, as a file defines it.
#[derive(Debug, Clone)]
pub struct Gpu {
    names: BTreeSet<String>,
    /// Nodes of the driver as a whole.
    shared: Vec<Node>,
    own: Vec<Node>,
    /// Links to its own nodes, `<target>::<path>`.
    links: Vec<String>,
}

/// What a container gets of NVIDIA's driver by another name than that of a GPU: a feature, or an
/// IMEX channel.
#[derive(Debug, Clone)]
pub struct Extra {
    /// The name: `all`, or the number of a channel.
    pub name: String,
    /// Its nodes.
    pub nodes: Vec<DeviceNode>,
    /// Its folders and files.
    pub files: Vec<DriverFile>,
}

/// What a file is made from.
#[expect(missing_debug_implementations, reason = "a function shows nothing")]
pub struct Input<'a> {
    /// `vendor/class`.
    pub kind: &'a str,
    /// The driver; `None` if it is not known now.
    pub driver: Option<&'a NvidiaDriver>,
    /// The healthy devices.
    pub gpus: &'a [Gpu],
    /// What is there beyond GPUs. A kind has GPUs or extras.
    pub extras: &'a [Extra],
    /// Whether a file of another program defines this qualified name.
    pub is_taken: &'a dyn Fn(&str) -> bool,
    /// Whether a name of the file before stays although its device is not among the healthy ones.
    pub is_kept: &'a dyn Fn(&str) -> bool,
    /// The file before.
    pub before: Option<&'a Document>,
}

/// The kind of the names that answers of the resource have; `None` if they have no CDI names of
/// NVIDIA GPUs.
#[must_use]
pub fn kind(spec: &ResourceSpec) -> Option<String> {
    Some(format!("{}/{GPU_CLASS}", options(spec)?.cdi_vendor))
}

/// The kind of the name of a feature, and whether answers have it; `None` if no answer of the
/// resource has that name.
#[must_use]
pub fn feature_kind(spec: &ResourceSpec, feature: NvidiaFeature) -> Option<(String, Switch)> {
    let options = options(spec)?;
    let switch = options.switch(feature);
    let kind = || format!("{}/{}", options.cdi_vendor, feature.as_str());
    (switch != Switch::Off).then(|| (kind(), switch))
}

/// The kind of the names of IMEX channels, and the channels in the answers of the resource.
#[must_use]
pub fn channels(spec: &ResourceSpec) -> Option<(String, &[u32])> {
    let options = options(spec).filter(|options| !options.imex_channels.is_empty())?;
    Some((format!("{}/imex-channel", options.cdi_vendor), &options.imex_channels))
}

/// The name of the file of a kind.
#[must_use]
pub fn file_name(kind: &str) -> String {
    format!("{}{}.json", super::cdi::FILE_PREFIX, kind.replace('/', "+"))
}

/// The name of a device in an answer; `None` if the device cannot be named.
#[must_use]
pub fn name(spec: &ResourceSpec, device: &Device) -> Option<String> {
    name_by(spec, device, options(spec)?.device_id_strategy)
}

/// The name of a device by its UUID, for any strategy. The kubelet keeps the names of a claim over
/// a reboot, when an index may be that of another device.
#[must_use]
pub fn lasting_name(spec: &ResourceSpec, device: &Device) -> Option<String> {
    options(spec)?;
    name_by(spec, device, DeviceIdStrategy::Uuid)
}

fn name_by(spec: &ResourceSpec, device: &Device, strategy: DeviceIdStrategy) -> Option<String> {
    let name = nvidia::name(device, strategy);
    (is_valid(name) && unanswerable(spec, device).is_none()).then(|| name.to_owned())
}

/// Whether the name of a device may have been that of another one before: the number of a MIG
/// instance.
#[must_use]
pub fn may_move(spec: &ResourceSpec, device: &Device) -> bool {
    options(spec).is_some_and(|options| options.device_id_strategy == DeviceIdStrategy::Index)
        && attribute(device, "part") == Some("mig")
}

/// The definition of a device; `None` if it cannot be named.
#[must_use]
pub fn gpu(
    spec: &ResourceSpec,
    device: &Device,
    node_exists: &dyn Fn(&str) -> bool,
) -> Option<Gpu> {
    let strategy = options(spec)?.device_id_strategy;
    let mut names = BTreeSet::from([name(spec, device)?]);
    names.extend(
        ["integrated", "uuid"].iter().filter_map(|name| Some(attribute(device, name)?.to_owned())),
    );
    if strategy == DeviceIdStrategy::Index {
        names.extend(attribute(device, "index").map(str::to_owned));
    }
    names.retain(|name| is_valid(name));
    let nodes = device.nodes.iter().filter(|node| node_exists(&node.host)).map(Node::of);
    let (shared, mut own): (Vec<_>, Vec<_>) =
        nodes.partition(|node| nvidia::SHARED_NODES.contains(&node.path.as_str()));
    let mut links = Vec::new();
    if let Some(function) = device.pci.as_ref().filter(|_| draws(device)) {
        for (kind, begin) in [("card", "card"), ("render", "renderD")] {
            for name in function.drm.iter().filter(|name| name.starts_with(begin)) {
                let path = format!("/dev/dri/{name}");
                if !node_exists(&path) {
                    continue;
                }
                own.push(Node::of(&DeviceNode::at(path)));
                let link = format!("/dev/dri/by-path/pci-{}-{kind}", function.address);
                if node_exists(&link) {
                    links.push(format!("../{name}::{link}"));
                }
            }
        }
    }
    (!own.is_empty()).then_some(Gpu { names, shared, own, links })
}

/// The file of a kind; `None` if there is nothing to define.
#[must_use]
pub fn document(input: &Input<'_>) -> Option<Document> {
    let is_taken = |name: &str| (input.is_taken)(&format!("{}={name}", input.kind));
    let (mut devices, mut common) = (BTreeMap::new(), Edits::default());
    if let Some(before) = input.before {
        common = before.container_edits.clone();
        let kept = before
            .devices
            .iter()
            .filter(|device| (input.is_kept)(&device.name) && !is_taken(&device.name));
        devices.extend(kept.map(|device| (device.name.clone(), device.container_edits.clone())));
    }
    if let Some(driver) = input.driver.filter(|_| !input.gpus.is_empty()) {
        common = common_edits(driver, input.gpus);
        let mut all = Edits::default();
        let mut defines = false;
        for gpu in input.gpus {
            let edits = gpu.edits(driver.hook.as_ref());
            all.add(&edits);
            for name in gpu.names.iter().filter(|name| !is_taken(name)) {
                devices.insert(name.clone(), edits.clone());
                defines = true;
            }
        }
        if defines && !is_taken(ALL) {
            devices.insert(ALL.to_owned(), all);
        }
    }
    let has_device = devices.keys().any(|name| name != ALL);
    for extra in input.extras.iter().filter(|extra| !is_taken(&extra.name)) {
        devices.insert(extra.name.clone(), extra.edits());
    }
    // The name of all GPUs does not stay alone.
    let is_extra = input.kind.rsplit_once('/').is_none_or(|(_, class)| class != GPU_CLASS);
    let is_needed = if is_extra { !devices.is_empty() } else { has_device };
    is_needed.then(|| Document::of(input.kind, devices, common))
}

impl Extra {
    fn edits(&self) -> Edits {
        Edits {
            device_nodes: self.nodes.iter().map(Node::of).collect(),
            mounts: self.files.iter().map(common::read_only).collect(),
            ..Edits::default()
        }
    }
}

impl Gpu {
    fn edits(&self, hook: Option<&CdiHookProgram>) -> Edits {
        Edits {
            device_nodes: self.own.clone(),
            hooks: hook.and_then(|hook| create_symlinks(hook, &self.links)).into_iter().collect(),
            ..Edits::default()
        }
    }
}

/// The options of a resource whose answers have CDI names. Those for claims always have them.
fn options(spec: &ResourceSpec) -> Option<&NvidiaOptions> {
    let Contract::Nvidia(options) = &spec.contract else { return None };
    (options.has_cdi_names() || spec.api.serves_claims()).then_some(options)
}

/// Whether a container may draw with it: a whole GPU, or an instance of a profile for graphics.
fn draws(device: &Device) -> bool {
    attribute(device, "part") != Some("mig")
        || attribute(device, "mig_profile").is_some_and(|profile| profile.contains("gfx"))
}

/// Whether CDI allows a name.
fn is_valid(name: &str) -> bool {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    name.chars().all(fits) && is_end(name.chars().next()) && is_end(name.chars().last())
}
