//! The paths that a pattern selects, and the resources of a name with a placeholder: one resource
//! for each existing node (`{node}`), or for each profile of a MIG instance (`{mig_profile}`).

use super::profiles;
use crate::domain::{CharPath, NodePattern, NvmlSnapshot, ResourceName, ResourceSpec};
use crate::host::{DevEntry, HostRoot, Listings, ReadFailure, TooMany};
use regex_lite::Regex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most resources that are made for single nodes: each has a socket and a server. A board has
/// some dozens of useful nodes; more come from a pattern such as `tty`.
const EXPANDED_MAX: usize = 256;

/// The entries of `/dev` that regular expressions are matched against; empty without a regular
/// expression.
#[derive(Debug, Default)]
pub(super) struct Dev(Vec<DevEntry>);

impl Dev {
    /// The entries of `/dev` that these patterns may match.
    ///
    /// # Errors
    /// When it has too many entries.
    pub(super) fn of<'a>(
        root: &HostRoot,
        patterns: impl Iterator<Item = &'a NodePattern>,
    ) -> Result<Self, TooMany> {
        let beginnings: Vec<String> = patterns
            .filter(|pattern| matches!(pattern, NodePattern::Regex(_)))
            .map(NodePattern::beginning)
            .collect();
        if beginnings.is_empty() {
            return Ok(Dev::default());
        }
        let may_have = |folder: &str| {
            let folder = format!("/dev/{folder}/");
            beginnings
                .iter()
                .any(|beginning| folder.starts_with(beginning) || beginning.starts_with(&folder))
        };
        root.dev_entries(&may_have).map(Dev)
    }

    /// The paths that a pattern matches, including links and folders. The entries of a matched
    /// folder belong to the folder.
    pub(super) fn paths(
        &self,
        root: &HostRoot,
        listings: &mut Listings,
        pattern: &NodePattern,
    ) -> Vec<String> {
        let regex = match pattern {
            NodePattern::Glob(glob) => return root.glob_among(listings, glob),
            NodePattern::Regex(regex) => regex,
        };
        let Ok(regex) = Regex::new(regex) else { return Vec::new() };
        // Skips most of ten thousand entries, which begin differently.
        let beginning = pattern.beginning();
        let beginning = beginning.trim_start_matches("/dev/");
        let mut folder: Option<String> = None;
        let mut paths = Vec::new();
        for entry in &self.0 {
            let is_inside = folder.as_ref().is_some_and(|folder| entry.path.starts_with(folder));
            if is_inside || !entry.path.starts_with(beginning) || !regex.is_match(&entry.path) {
                continue;
            }
            folder = entry.is_folder.then(|| format!("{}/", entry.path)).or(folder);
            paths.push(format!("/dev/{}", entry.path));
        }
        paths
    }
}

/// The resources of a configuration, with those for each node among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpandedSpecs {
    /// The resources, in the order of selection. None has a name for each node.
    pub specs: Vec<Arc<ResourceSpec>>,
    /// Warnings for the operator, one sentence each.
    pub warnings: Vec<String>,
}

/// Makes one resource for each node of the resources with a name for each node, and for each
/// profile of the resources with a name for each profile.
///
/// # Errors
/// The first read that failed: then none of these resources is known.
pub fn expand_patterns(
    root: &HostRoot,
    specs: &[Arc<ResourceSpec>],
    nvml: &NvmlSnapshot,
) -> Result<ExpandedSpecs, ReadFailure> {
    let root = &root.recording();
    let found = expand(root, specs, nvml)?;
    root.take_failures().into_iter().next().map_or(Ok(found), Err)
}

fn expand(
    root: &HostRoot,
    specs: &[Arc<ResourceSpec>],
    nvml: &NvmlSnapshot,
) -> Result<ExpandedSpecs, ReadFailure> {
    let is_pattern = |spec: &&Arc<ResourceSpec>| spec.name.is_pattern();
    let mut found = ExpandedSpecs::default();
    if !specs.iter().any(|spec| is_pattern(&spec)) {
        found.specs = specs.to_vec();
        return Ok(found);
    }
    let dev = Dev::of(
        root,
        specs.iter().filter(is_pattern).flat_map(|spec| &spec.paths).map(|path| &path.host),
    )
    .map_err(|error| ReadFailure { path: "/dev".to_owned(), error: error.to_string() })?;
    let mut listings = Listings::default();
    // A resource with its own name in the configuration keeps it, at any position.
    let mut named: BTreeMap<ResourceName, String> = specs
        .iter()
        .filter(|spec| !is_pattern(spec))
        .map(|spec| (spec.name.clone(), "the configuration".to_owned()))
        .collect();
    let (mut made, mut left) = (0, 0);
    for spec in specs {
        if !spec.name.is_pattern() {
            found.specs.push(Arc::clone(spec));
            continue;
        }
        for spec in of_profiles(spec, nvml, &mut found.warnings) {
            if !named.contains_key(&spec.name) {
                named.insert(spec.name.clone(), "the configuration".to_owned());
                found.specs.push(Arc::new(spec));
            }
        }
        for path in &spec.paths {
            let paths = dev.paths(root, &mut listings, &path.host);
            let paths = nodes(root, paths, path, &mut |warning| {
                found.warnings.push(format!("{}: {warning}", spec.name));
            });
            if paths.is_empty() {
                found.warnings.push(format!("{}: no device node matches {}", spec.name, path.host));
            }
            for node in paths {
                let name = match spec.name.of_node(node.trim_start_matches("/dev/")) {
                    Ok(name) => name,
                    Err(error) => {
                        found
                            .warnings
                            .push(format!("{}: {node} is not offered, because {error}", spec.name));
                        continue;
                    }
                };
                match named.get(&name) {
                    Some(other) if *other == node => continue,
                    Some(other) => {
                        found.warnings.push(format!("{}: {node} is not offered, because {other} already uses the name {name}", spec.name));
                        continue;
                    }
                    None if made == EXPANDED_MAX => left += 1,
                    None => {
                        made += 1;
                        named.insert(name.clone(), node.clone());
                        found.specs.push(Arc::new(of_node(spec, name, &node, path)));
                    }
                }
            }
        }
    }
    if left > 0 {
        found.warnings.push(format!("{left} nodes beyond the limit of {EXPANDED_MAX} resources are not offered; use narrower patterns"));
    }
    Ok(found)
}

/// The resources of the profiles that a resource with a name for each profile selects.
fn of_profiles(
    pattern: &ResourceSpec,
    nvml: &NvmlSnapshot,
    warnings: &mut Vec<String>,
) -> Vec<ResourceSpec> {
    if !pattern.name.is_for_each_profile() {
        return Vec::new();
    }
    let (shared, own): (Vec<&str>, Vec<&str>) = nvml
        .mig_profiles()
        .into_iter()
        .filter(|profile| profiles::is_selected(&pattern.select, profile))
        .partition(|profile| profiles::is_of_a_shared_instance(profile));
    warnings.extend(shared.iter().map(|profile| {
        format!(
            "{}: MIG instances of the profile {profile} are not offered, because each shares its \
             GPU instance with others; select them with `mig_profile` in a resource of their own",
            pattern.name
        )
    }));
    own.into_iter().filter_map(|profile| profiles::spec_of(pattern, profile)).collect()
}

/// The resource of one node.
fn of_node(spec: &ResourceSpec, name: ResourceName, node: &str, path: &CharPath) -> ResourceSpec {
    let host = NodePattern::Glob(glob::Pattern::escape(node));
    ResourceSpec { name, paths: vec![CharPath { host, ..path.clone() }], ..spec.clone() }
}

/// The paths that lead to a node, or to a folder with nodes in it. A wildcard selects folders only
/// if it matches no node.
fn nodes(
    root: &HostRoot,
    paths: Vec<String>,
    path: &CharPath,
    warn: &mut dyn FnMut(String),
) -> Vec<String> {
    let is_in_dev =
        |path: &String| root.canonical_node(path).is_some_and(|node| node.starts_with("/dev/"));
    let (nodes, others): (Vec<String>, Vec<String>) = paths.into_iter().partition(is_in_dev);
    if matches!(path.host, NodePattern::Glob(_)) && !nodes.is_empty() {
        return nodes;
    }
    let mut all = nodes;
    for folder in others {
        match root.folder_nodes(&folder) {
            Ok(found) => all.extend(found.filter(|found| !found.nodes.is_empty()).map(|_| folder)),
            Err(error) => warn(format!("{folder} is not offered, because {error}")),
        }
    }
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, write};
    use super::*;
    use crate::host::faults::with_faults;
    use std::os::unix::fs::symlink;

    fn pattern(name: &str, regexes: &[&str]) -> Arc<ResourceSpec> {
        let mut spec = (*char_spec("example.com/x", &[])).clone();
        spec.name = ResourceName::for_each_node(name).unwrap();
        let path = |regex: &&str| CharPath {
            host: NodePattern::Regex((*regex).to_owned()),
            container: None,
            permissions: "r".into(),
            udev: Vec::new(),
        };
        spec.paths = regexes.iter().map(path).collect();
        Arc::new(spec)
    }

    fn made(expanded: &ExpandedSpecs) -> Vec<(&str, String)> {
        expanded
            .specs
            .iter()
            .map(|spec| {
                (spec.name.as_str(), spec.paths.iter().map(|path| path.host.to_string()).collect())
            })
            .collect()
    }

    #[test]
    fn each_node_that_is_there_is_a_resource() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = [
            "i2c-1",
            "i2c-13",
            "i2c-x",
            "video0",
            "snd/timer",
            "snd/seq",
            "net/tun",
            "_odd",
            "a.b",
            "a_b",
            "bus/usb/001/001",
            "shm/i2c-7",
        ];
        for node in nodes {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        std::fs::create_dir_all(dir.path().join("dev/serial/by-id")).unwrap();
        std::fs::create_dir_all(dir.path().join("dev/i2c-99")).unwrap();
        symlink("../../video0", dir.path().join("dev/serial/by-id/usb-cam")).unwrap();
        symlink("/etc/passwd", dir.path().join("dev/i2c-5")).unwrap();
        write(dir.path(), "etc/passwd", "");
        let root = HostRoot::new(dir.path());
        let specs = [
            pattern("d/{node}", &["^i2c-[0-9]*$", "^snd$", "^none$"]),
            char_spec("d/video0", &["/dev/video0"]),
            pattern(
                "d/{node}",
                &[
                    "^video",
                    "^snd",
                    "^net/",
                    "^_odd$",
                    "^a.b$",
                    "^bus/usb/",
                    "i2c-13",
                    "^serial/by-id/.*$",
                ],
            ),
        ];
        let found = expand_patterns(&root, &specs, &NvmlSnapshot::empty()).unwrap();
        let expected = [
            ("d/i2c-1", "/dev/i2c-1"),
            ("d/i2c-13", "/dev/i2c-13"),
            ("d/snd", "/dev/snd"),
            ("d/video0", "/dev/video0"),
            ("d/net_tun", "/dev/net/tun"),
            ("d/a_b", "/dev/a.b"),
            ("d/bus_usb_001", "/dev/bus/usb/001"),
            ("d/serial_by-id_usb-cam", "/dev/serial/by-id/usb-cam"),
        ];
        assert_eq!(made(&found), expected.map(|(name, path)| (name, path.to_owned())));
        assert_eq!(
            (found.specs[0].paths[0].permissions.as_str(), found.specs[0].name.is_for_each_node()),
            ("r", false)
        );
        let warnings = found.warnings.join("\n");
        for expected in [
            "d/{node}: no device node matches ^none$",
            "d/{node}: /dev/video0 is not offered, because the configuration already uses the name d/video0",
            "d/{node}: /dev/_odd is not offered, because `d/_odd` is not a resource name",
            "d/{node}: /dev/a_b is not offered, because /dev/a.b already uses the name d/a_b",
        ] {
            assert!(warnings.contains(expected), "{warnings}\nshould contain {expected}");
        }
        assert_eq!(found.warnings.len(), 4, "{warnings}");
    }

    #[test]
    fn a_glob_expands_to_a_bounded_number_of_resources() {
        let dir = tempfile::tempdir().unwrap();
        (0..300).for_each(|n| write(dir.path(), &format!("dev/ttyS{n}"), ""));
        let root = HostRoot::new(dir.path());
        let mut spec = (*pattern("d/com-{node}", &[])).clone();
        spec.paths = char_spec("a.b/c", &["/dev/ttyS1*"]).paths.clone();
        let found =
            expand_patterns(&root, &[Arc::new(spec.clone())], &NvmlSnapshot::empty()).unwrap();
        assert_eq!((found.specs.len(), found.specs[0].name.as_str()), (111, "d/com-ttyS1"));
        spec.paths = char_spec("a.b/c", &["/dev/ttyS*"]).paths.clone();
        let found = expand_patterns(&root, &[Arc::new(spec)], &NvmlSnapshot::empty()).unwrap();
        assert_eq!((found.specs.len(), found.warnings.len()), (EXPANDED_MAX, 1));
        assert!(
            found.warnings[0].starts_with("44 nodes beyond the limit of 256"),
            "{:?}",
            found.warnings
        );
    }

    #[test]
    fn a_dev_that_cannot_be_read_is_not_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let specs = [pattern("d/{node}", &["^i2c-[0-9]*$"])];
        assert_eq!(
            expand_patterns(&root, &specs, &NvmlSnapshot::empty()).unwrap().specs,
            [],
            "a tree without a /dev has no nodes"
        );
        std::fs::create_dir(dir.path().join("dev")).unwrap();
        let unreadable = |specs: &[_]| {
            with_faults(|_| Some(24), || expand_patterns(&root, specs, &NvmlSnapshot::empty())).0
        };
        assert!(unreadable(&specs).unwrap_err().to_string().contains("/dev"));
        let plain = [char_spec("a.b/c", &["/dev/fuse"])];
        assert_eq!(
            unreadable(&plain).unwrap().specs,
            plain,
            "without a resource that needs it, /dev is not read"
        );
    }
}
