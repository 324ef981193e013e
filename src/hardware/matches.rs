//! The nodes of `/dev`, and the folders of them, that the paths of `char` resources lead to.

use super::char_devices::{CharDevices, note_failure};
use super::disks::Disks;
use super::node_names::base_name;
use super::patterns::Dev;
use crate::domain::{CharPath, NodePattern, ResourceName, ResourceSpec};
use crate::host::{HostNode, HostRoot, Listings, NodeFolder, TooMany};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One device: a node or a folder of nodes, with the configured path that led to it.
pub(super) struct Match<'a> {
    pub(super) spec: &'a ResourceSpec,
    pub(super) path: &'a CharPath,
    pub(super) folder: Option<String>,
    /// The node, or those in the folder.
    pub(super) nodes: Vec<HostNode>,
    /// The path that the pattern matched: a link, or the real path.
    pub(super) matched: String,
}

impl Match<'_> {
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
    for spec in specs {
        found.by_resource.entry(spec.name.clone()).or_default();
        for path in &spec.paths {
            if matches!(path.host, NodePattern::Regex(_)) {
                root.repeat_failures(&of_dev);
            }
            let candidates = matches_of_path(root, dev.as_ref(), &mut listings, spec, path);
            let (failures, before) = (root.take_failures(), matches.len());
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
                    let why =
                        if is_folder { ", which is a folder without device nodes" } else { "" };
                    warn(format!("no device node matches {}{why}", path.host));
                    continue;
                }
                Ok(candidates) => candidates,
            };
            let mut of_other: Option<ResourceName> = None;
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
                    taken.extend(
                        candidate.nodes.iter().map(|node| (node.path.clone(), spec.name.clone())),
                    );
                    matches.push(candidate);
                }
            }
            if let Some(other) = of_other.filter(|_| matches.len() == before) {
                warn(format!(
                    "the nodes of {} already belong to {other}, the first resource that matches them",
                    path.host
                ));
            }
        }
    }
    matches
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
    let of_node = |(node, matched): (HostNode, &String)| Match {
        spec,
        path,
        folder: None,
        nodes: vec![node],
        matched: matched.clone(),
    };
    let mut candidates: Vec<Match<'_>> = nodes.into_iter().map(of_node).collect();
    if is_glob && !candidates.is_empty() {
        return Ok(candidates);
    }
    let mut folders = BTreeMap::new();
    for matched in paths {
        if let Some(NodeFolder { path, nodes }) =
            root.folder_nodes(&matched)?.filter(|folder| !folder.nodes.is_empty())
        {
            folders.entry(path).or_insert((nodes, matched));
        }
    }
    candidates.extend(folders.into_iter().map(|(folder, (nodes, matched))| Match {
        spec,
        path,
        folder: Some(folder),
        nodes,
        matched,
    }));
    Ok(candidates)
}
