//! The nodes of `/dev`, and the folders of them, that the paths of `char` resources lead to.

mod groups;

use super::char_devices::{CharDevices, note_failure};
use super::disks::{DISK_LINKS, Disks};
use super::node_names::base_name;
use super::patterns::Dev;
use super::udev;
use super::usb::{self, UsbDevice};
use crate::domain::{
    CharPath, DeviceNode, MemberPath, NodePattern, ResourceName, ResourceSpec, UsbSelect,
};
use crate::host::{HostNode, HostRoot, Listings, NodeFolder, TooMany};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The permissions for the nodes of a USB device.
const USB_PERMISSIONS: &str = "rw";

/// One device: a node, a folder of nodes, a group or a USB device.
pub(super) struct Match<'a> {
    pub(super) spec: &'a ResourceSpec,
    /// The configured path in the container.
    container: Option<&'a str>,
    permissions: &'a str,
    pub(super) folder: Option<String>,
    /// The node, or those in the folder.
    pub(super) nodes: Vec<HostNode>,
    /// The path that the pattern matched: a link, or the real path.
    pub(super) matched: String,
    /// The link by which it is selected; `None` if the pattern matches the real path too.
    pub(super) link: Option<String>,
    /// The nodes of the other members of a group, as containers get them. One without a number may
    /// be absent.
    pub(super) others: Vec<DeviceNode>,
    /// Whether it has `others`: a group, or a USB device.
    pub(super) is_group: bool,
    pub(super) usb: Option<UsbDevice>,
}

impl Match<'_> {
    /// All nodes, as a container gets them.
    pub(super) fn device_nodes(&self) -> Vec<DeviceNode> {
        let mut nodes = self.nodes_of_path(true);
        nodes.extend(self.others.iter().cloned());
        nodes
    }

    /// Whether the path is udev's link to a disk by its own identity.
    fn is_disk_link(&self) -> bool {
        let folder = self.matched.strip_prefix('/').and_then(|path| path.rsplit_once('/'));
        self.folder.is_none() && folder.is_some_and(|(folder, _)| folder == DISK_LINKS)
    }

    /// The link by which a container may get the node: `discover` checks what it leads to. Runtimes
    /// leave out the links in a folder.
    fn lasting_link(&self) -> Option<String> {
        let by_disk = self.is_disk_link().then(|| self.matched.clone());
        by_disk.or_else(|| self.link.clone().filter(|_| self.folder.is_none()))
    }

    /// The nodes of this path.
    fn nodes_of_path(&self, required: bool) -> Vec<DeviceNode> {
        let real_path = self.real_path();
        let container = match self.container {
            // The path where a program expects it: the configured, stable path, not the current
            // kernel number.
            None => self.matched.clone(),
            Some(folder) if folder.ends_with('/') => format!("{folder}{}", base_name(real_path)),
            Some(container) => container.to_owned(),
        };
        let node = |node: &HostNode| DeviceNode {
            host: node.path.clone(),
            link: self.lasting_link(),
            container: format!(
                "{container}{}",
                node.path.strip_prefix(real_path).unwrap_or_default()
            ),
            permissions: self.permissions.to_owned(),
            required,
            number: node.number,
        };
        self.nodes.iter().map(node).collect()
    }

    /// The real path.
    pub(super) fn real_path(&self) -> &str {
        let first = || self.nodes.first().map_or("", |node| node.path.as_str());
        self.folder.as_deref().unwrap_or_else(first)
    }
}

/// The matches of the configured paths. Each node is in the first resource that names it.
pub(super) fn matches<'a>(
    root: &HostRoot,
    specs: &[&'a Arc<ResourceSpec>],
    disks: &Disks<'_>,
    found: &mut CharDevices,
) -> Vec<Match<'a>> {
    let mut matches = Vec::new();
    let (mut taken, mut listings) = (BTreeMap::new(), Listings::default());
    let dev = Dev::of(root, specs.iter().flat_map(|spec| &spec.paths).map(|path| &path.host));
    let of_dev = root.take_failures();
    let usb =
        if specs.iter().any(|spec| !spec.usb.is_empty()) { usb::devices(root) } else { Vec::new() };
    let of_usb = root.take_failures();
    let mut paths = specs.iter().flat_map(|spec| &spec.paths);
    let no_udev = paths.any(udev::needs_records).then(|| udev::unknown(root)).flatten();
    let of_udev: Vec<_> = no_udev.into_iter().chain(root.take_failures()).collect();
    let mut of_records = Vec::new();
    for spec in specs {
        found.by_resource.entry(spec.name.clone()).or_default();
        for path in &spec.paths {
            if matches!(path.host, NodePattern::Regex(_)) {
                root.repeat_failures(&of_dev);
            }
            if udev::needs_records(path) {
                root.repeat_failures(&of_udev);
            }
            let candidates = matches_of_path(root, dev.as_ref(), &mut listings, spec, path);
            let failed = root.failure_count();
            let candidates = candidates.map(|mut found| {
                found.retain(|found| udev::is_wanted(root, path, &found.nodes));
                found
            });
            let is_unread = root.failure_count() > failed;
            let failures = root.take_failures();
            if is_unread {
                of_records.extend(failures.iter().cloned());
            }
            note_failure(found, spec, &failures);
            let mut warn =
                |warning: String| found.warnings.push(format!("{}: {warning}", spec.name));
            let candidates = match candidates {
                Err(error) => {
                    // Nodes that the former scan found may still exist.
                    warn(format!("{} is not scanned, because {error}", path.host));
                    found.unread.entry(spec.name.clone()).or_insert_with(|| error.to_string());
                    continue;
                }
                Ok(candidates) if candidates.is_empty() && failures.is_empty() => {
                    let is_folder = path.host.literal().is_some_and(|path| root.is_dir(path));
                    let why = match (path.udev.is_empty(), is_folder) {
                        (false, _) => " with the properties of udev that it must have",
                        (true, true) => ", which is a folder without device nodes",
                        (true, false) => "",
                    };
                    warn(format!("no device node matches {}{why}", path.host));
                    continue;
                }
                Ok(candidates) => candidates,
            };
            let of_path = add_path((spec, path), candidates, disks, &mut taken, &mut warn);
            matches.extend(of_path);
        }
        let sources = groups::Sources { root, dev: dev.as_ref(), disks };
        for group in &spec.groups {
            matches.extend(add_group(&sources, &mut listings, (spec, group), &mut taken, found));
        }
        for select in &spec.usb {
            root.repeat_failures(&of_usb);
            let devices = usb.iter().filter(|device| device.is_selected(select));
            let devices: Vec<Match<'_>> = devices
                .filter_map(|device| of_usb_device(root, &mut listings, spec, device))
                .collect();
            matches.extend(add_usb(root, (spec, select), devices, &mut taken, found));
        }
    }
    // A node whose record cannot be read may belong to any of the resources.
    root.repeat_failures(&of_records);
    matches
}

/// The candidates of a path without the nodes that earlier paths have.
fn add_path<'a>(
    (spec, path): (&ResourceSpec, &CharPath),
    candidates: Vec<Match<'a>>,
    disks: &Disks<'_>,
    taken: &mut BTreeMap<String, ResourceName>,
    warn: &mut dyn FnMut(String),
) -> Vec<Match<'a>> {
    let (mut matches, mut of_other): (Vec<Match<'_>>, Option<ResourceName>) = (Vec::new(), None);
    for mut candidate in candidates {
        let other = candidate.nodes.iter().find_map(|node| taken.get(&node.path));
        of_other = other.filter(|other| **other != spec.name).cloned().or(of_other);
        candidate.nodes.retain(|node| !taken.contains_key(&node.path));
        let disk = candidate
            .nodes
            .iter()
            .map(|node| base_name(&node.path))
            .find(|name| candidate.folder.is_some() && disks.has(name));
        if let Some(disk) = disk {
            warn(format!(
                "{} is a folder that contains the disk {disk}; configure disks by their own paths",
                path.host
            ));
        } else if !candidate.nodes.is_empty() {
            taken.extend(candidate.nodes.iter().map(|node| (node.path.clone(), spec.name.clone())));
            matches.push(candidate);
        }
    }
    if let Some(other) = of_other.filter(|_| matches.is_empty()) {
        warn(format!(
            "the nodes of {} already belong to {other}, the first resource that matches them",
            path.host
        ));
    }
    matches
}

/// A USB device with the nodes of its drivers; `None` if it has just been unplugged.
fn of_usb_device<'a>(
    root: &HostRoot,
    listings: &mut Listings,
    spec: &'a ResourceSpec,
    usb: &UsbDevice,
) -> Option<Match<'a>> {
    let path = usb.node(root)?;
    // Without its node it is a device that is unhealthy.
    let absent = || HostNode { path: path.clone(), number: None };
    let node = root.node_among(listings, &path).unwrap_or_else(absent);
    let of_driver = |path: String| {
        let node = root.node_among(listings, &path)?;
        let permissions = USB_PERMISSIONS.to_owned();
        let number = node.number;
        Some(DeviceNode { number, permissions, ..DeviceNode::at(node.path) }.optional())
    };
    Some(Match {
        spec,
        container: None,
        permissions: USB_PERMISSIONS,
        folder: None,
        matched: node.path.clone(),
        link: None,
        nodes: vec![node],
        others: usb.nodes_of_drivers(root).into_iter().filter_map(of_driver).collect(),
        is_group: true,
        usb: Some(usb.clone()),
    })
}

/// The USB devices that no earlier resource has. After a failed read the resource stays as in the
/// former scan.
fn add_usb<'a>(
    root: &HostRoot,
    (spec, select): (&'a ResourceSpec, &UsbSelect),
    devices: Vec<Match<'a>>,
    taken: &mut BTreeMap<String, ResourceName>,
    found: &mut CharDevices,
) -> Vec<Match<'a>> {
    let failures = root.take_failures();
    note_failure(found, spec, &failures);
    if !failures.is_empty() {
        return Vec::new();
    }
    let mut warn = |warning: String| found.warnings.push(format!("{}: {warning}", spec.name));
    if devices.is_empty() {
        warn(format!("no device matches {select}"));
    }
    let mut free = Vec::new();
    for device in devices {
        let nodes = device.device_nodes();
        if taken.get(device.real_path()) == Some(&spec.name) {
            continue; // By another entry of this resource.
        }
        match nodes.iter().find_map(|node| Some((node, taken.get(&node.host)?))) {
            Some((node, other)) => warn(format!(
                "{} is not offered by {select}, because {} already belongs to {other}, the first \
                 resource that matches it",
                device.matched, node.host
            )),
            None => {
                taken.extend(nodes.into_iter().map(|node| (node.host, spec.name.clone())));
                free.push(device);
            }
        }
    }
    free
}

/// The device of a group. After a failed read it stays as in the former scan: it could lack nodes.
fn add_group<'a>(
    sources: &groups::Sources<'_>,
    listings: &mut Listings,
    (spec, group): (&'a ResourceSpec, &'a [MemberPath]),
    taken: &mut BTreeMap<String, ResourceName>,
    found: &mut CharDevices,
) -> Option<Match<'a>> {
    let looked_up = sources.group(listings, spec, group, taken);
    let failures = sources.root.take_failures();
    note_failure(found, spec, &failures);
    match looked_up {
        Ok(groups::Found { device, warnings }) if failures.is_empty() => {
            let of_spec = warnings.iter().map(|warning| format!("{}: {warning}", spec.name));
            found.warnings.extend(of_spec);
            let nodes = device.iter().flat_map(Match::device_nodes);
            taken.extend(nodes.map(|node| (node.host, spec.name.clone())));
            device
        }
        Ok(_) => None,
        Err(error) => {
            found.unread.entry(spec.name.clone()).or_insert_with(|| error.to_string());
            None
        }
    }
}

/// The matches of one path.
fn matches_of_path<'a>(
    root: &HostRoot,
    dev: Result<&Dev, &TooMany>,
    listings: &mut Listings,
    spec: &'a ResourceSpec,
    path: &'a CharPath,
) -> Result<Vec<Match<'a>>, TooMany> {
    let paths = match (&path.host, dev) {
        (NodePattern::Regex(_), Err(error)) => return Err(error.clone()),
        (host, dev) => dev.unwrap_or(&Dev::default()).paths(root, listings, host),
    };
    // Two links to one node are one device. A link that leads out of `/dev` leads to no node of
    // this host.
    let mut nodes: BTreeMap<HostNode, &String> = BTreeMap::new();
    for matched in &paths {
        if let Some(node) =
            root.node_among(listings, matched).filter(|node| node.path.starts_with("/dev/"))
        {
            nodes.entry(node).or_insert(matched);
        }
    }
    let is_glob = matches!(path.host, NodePattern::Glob(_));
    let all: BTreeSet<&str> = paths.iter().map(String::as_str).collect();
    let link = |matched: &String, real: &str| (!all.contains(real)).then(|| matched.clone());
    let (container, permissions) = (path.container.as_deref(), path.permissions.as_str());
    let of_node = |(node, matched): (HostNode, &String)| Match {
        spec,
        container,
        permissions,
        folder: None,
        link: link(matched, &node.path),
        nodes: vec![node],
        matched: matched.clone(),
        others: Vec::new(),
        is_group: false,
        usb: None,
    };
    let mut candidates: Vec<Match<'_>> = nodes.into_iter().map(of_node).collect();
    if is_glob && !candidates.is_empty() {
        return Ok(candidates);
    }
    let mut folders = BTreeMap::new();
    for matched in &paths {
        if let Some(NodeFolder { path, nodes }) =
            root.folder_nodes(matched)?.filter(|folder| !folder.nodes.is_empty())
        {
            folders.entry(path).or_insert((nodes, matched));
        }
    }
    candidates.extend(folders.into_iter().map(|(folder, (nodes, matched))| Match {
        spec,
        container,
        permissions,
        link: link(matched, &folder),
        folder: Some(folder),
        nodes,
        matched: matched.clone(),
        others: Vec::new(),
        is_group: false,
        usb: None,
    }));
    Ok(candidates)
}
