//! A CDI file for NVIDIA GPUs and MIG instances: their nodes, and what a container needs of the
//! driver. It has the content of the file that `nvidia-ctk cdi generate` writes.
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
    CdiHookProgram, Contract, Device, DeviceIdStrategy, NvidiaDriver, NvidiaOptions, ResourceSpec,
};
use std::collections::{BTreeMap, BTreeSet};

/// The name of all devices of a file together.
pub const ALL: &str = "all";

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

/// What a file is made from.
#[expect(missing_debug_implementations, reason = "a function shows nothing")]
pub struct Input<'a> {
    /// `vendor/class`.
    pub kind: &'a str,
    /// The driver; `None` if it is not known now.
    pub driver: Option<&'a NvidiaDriver>,
    /// The healthy devices.
    pub gpus: &'a [Gpu],
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
    Some(format!("{}/gpu", options(spec)?.cdi_vendor))
}

/// The name of the file of a kind.
#[must_use]
pub fn file_name(kind: &str) -> String {
    format!("{}{}.json", super::cdi::FILE_PREFIX, kind.replace('/', "+"))
}

/// The name of a device in an answer; `None` if the device cannot be named.
#[must_use]
pub fn name(spec: &ResourceSpec, device: &Device) -> Option<String> {
    let name = nvidia::name(device, options(spec)?.device_id_strategy);
    (is_valid(name) && unanswerable(spec, device).is_none()).then(|| name.to_owned())
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
    let nodes = device.nodes.iter().filter(|node| node_exists(&node.host)).map(|node| Node {
        path: node.container.clone(),
        host_path: (node.host != node.container).then(|| node.host.clone()),
        permissions: "rw".into(),
    });
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
                own.push(Node { path, host_path: None, permissions: "rw".into() });
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
    has_device.then(|| Document::of(input.kind, devices, common))
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

/// The options of a resource whose answers have CDI names.
fn options(spec: &ResourceSpec) -> Option<&NvidiaOptions> {
    let Contract::Nvidia(options) = &spec.contract else { return None };
    let is_cdi = options.device_list_strategy.iter().any(|strategy| strategy.is_cdi());
    is_cdi.then_some(options)
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
