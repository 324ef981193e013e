//! The paths that a pattern selects, and the resources of a name with a placeholder: one resource
//! for each existing node (`{node}`), or for each profile of a MIG instance (`{mig_profile}`).

use super::profiles;
use crate::domain::{
    CharPath, InvalidResourceName, NodePattern, NvmlSnapshot, ResourceName, ResourceSpec,
};
use crate::host::{DevEntry, HostRoot, Listings, ReadFailure, TooMany};
use regex_lite::Regex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most resources that are made for single nodes: each has a socket and a server. A board has
/// some dozens of useful nodes; more come from a pattern such as `tty`.
const EXPANDED_MAX: usize = 256;
/// The most links that a warning names: a pattern such as `char` matches a link of each node.
const LINKS_NAMED_MAX: usize = 8;

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
    let mut matched: Vec<(&Arc<ResourceSpec>, &CharPath, Vec<Matched>)> = Vec::new();
    for spec in specs.iter().filter(is_pattern) {
        for path in &spec.paths {
            let mut warn = |warning| found.warnings.push(format!("{}: {warning}", spec.name));
            let paths = dev.paths(root, &mut listings, &path.host);
            let nodes = nodes(root, paths, path, &mut warn);
            if nodes.is_empty() {
                warn(format!("no device node matches {}", path.host));
            }
            matched.push((spec, path, nodes));
        }
    }
    let mut names = own_names(&matched);
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
        for (_, path, nodes) in matched.iter().filter(|(of, ..)| Arc::ptr_eq(of, spec)) {
            let mut warn = |warning| found.warnings.push(format!("{}: {warning}", spec.name));
            let mut links = Vec::new();
            for Matched { path: node, real } in nodes {
                if let Some(name) = names.get(real).filter(|_| node != real) {
                    links.push(format!("{node} ({name})"));
                    continue;
                }
                let name = match name_of(spec, node) {
                    Ok(name) => name,
                    Err(error) => {
                        warn(format!("{node} is not offered, because {error}"));
                        continue;
                    }
                };
                match named.get(&name) {
                    Some(other) if other == node => continue,
                    Some(other) => warn(format!(
                        "{node} is not offered, because {other} already uses the name {name}"
                    )),
                    None if made == EXPANDED_MAX => left += 1,
                    None => {
                        made += 1;
                        named.insert(name.clone(), node.clone());
                        names.insert(real.clone(), name.clone());
                        found.specs.push(Arc::new(of_node(spec, name, node, path)));
                    }
                }
            }
            if !links.is_empty() {
                warn(links_left_out(&links));
            }
        }
    }
    if left > 0 {
        found.warnings.push(format!("{left} nodes beyond the limit of {EXPANDED_MAX} resources are not offered; use narrower patterns"));
    }
    Ok(found)
}

/// A path that a pattern matches.
struct Matched {
    path: String,
    /// The real path of the node or folder that it leads to.
    real: String,
}

fn name_of(spec: &ResourceSpec, node: &str) -> Result<ResourceName, InvalidResourceName> {
    spec.name.of_node(node.trim_start_matches("/dev/"))
}

/// The resources of the nodes that a pattern matches by their own path, by this path. A node is in
/// one resource: a link such as `/dev/rtc` must not take it from `rtc0`, wherever it is matched.
fn own_names(
    matched: &[(&Arc<ResourceSpec>, &CharPath, Vec<Matched>)],
) -> BTreeMap<String, ResourceName> {
    let mut names = BTreeMap::new();
    for (spec, _, nodes) in matched {
        for node in nodes.iter().filter(|node| node.path == node.real) {
            if let Ok(name) = name_of(spec, &node.path) {
                names.entry(node.real.clone()).or_insert(name);
            }
        }
    }
    names
}

/// The warning of links whose nodes other names have.
fn links_left_out(links: &[String]) -> String {
    let named = links.iter().take(LINKS_NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
    let more = match links.len().saturating_sub(LINKS_NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "links are not offered, because their nodes have the resources in brackets: {named}{more}"
    )
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
) -> Vec<Matched> {
    let (mut all, mut others) = (Vec::new(), Vec::new());
    for path in paths {
        match root.canonical_node(&path).filter(|node| node.starts_with("/dev/")) {
            Some(real) => all.push(Matched { path, real }),
            None => others.push(path),
        }
    }
    if matches!(path.host, NodePattern::Glob(_)) && !all.is_empty() {
        return all;
    }
    for path in others {
        match root.folder_nodes(&path) {
            Ok(found) => {
                let found = found.filter(|found| !found.nodes.is_empty());
                all.extend(found.map(|found| Matched { path, real: found.path }));
            }
            Err(error) => warn(format!("{path} is not offered, because {error}")),
        }
    }
    all.sort_by(|one, other| one.path.cmp(&other.path));
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
            "/dev/serial/by-id/usb-cam (d/video0)",
        ] {
            assert!(warnings.contains(expected), "{warnings}\nshould contain {expected}");
        }
        assert_eq!(found.warnings.len(), 5, "{warnings}");
    }

    #[test]
    fn a_link_does_not_take_a_node_from_its_own_name() {
        let dir = tempfile::tempdir().unwrap();
        for node in ["gpiochip0", "rtc0", "ttyAMA10", "video0", "snd/seq", "_odd"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        for (link, node) in [
            ("gpiochip4", "gpiochip0"),
            ("rtc", "rtc0"),
            ("serial0", "ttyAMA10"),
            ("cam-a", "video0"),
            ("cam-b", "video0"),
            ("sound", "snd"),
            ("odd", "_odd"),
        ] {
            symlink(node, dir.path().join("dev").join(link)).unwrap();
        }
        let root = HostRoot::new(dir.path());
        let specs = [
            pattern("d/{node}", &["^gpiochip[0-9]*$", "^rtc[0-9]*$", "^serial0$", "^sound$"]),
            pattern("d/{node}", &["^ttyAMA", "^cam", "^snd$", "odd"]),
        ];
        let found = expand_patterns(&root, &specs, &NvmlSnapshot::empty()).unwrap();
        let expected = ["gpiochip0", "rtc0", "ttyAMA10", "cam-a", "snd", "odd"]
            .map(|node| (format!("d/{node}"), format!("/dev/{node}")));
        let made: Vec<_> =
            made(&found).into_iter().map(|(name, path)| (name.to_owned(), path)).collect();
        assert_eq!(made, expected);
        let left_out = |links: &str| {
            format!(
                "d/{{node}}: links are not offered, because their nodes have the resources in \
                 brackets: {links}"
            )
        };
        let expected = [
            left_out("/dev/gpiochip4 (d/gpiochip0)"),
            left_out("/dev/rtc (d/rtc0)"),
            left_out("/dev/serial0 (d/ttyAMA10)"),
            left_out("/dev/sound (d/snd)"),
            left_out("/dev/cam-b (d/cam-a)"),
            "d/{node}: /dev/_odd is not offered, because `d/_odd` is not a resource name".into(),
        ];
        assert_eq!(found.warnings.len(), expected.len(), "{:?}", found.warnings);
        for (warning, expected) in found.warnings.iter().zip(expected) {
            assert!(warning.starts_with(&expected), "{warning}\nshould be {expected}");
        }
        let many: Vec<String> = (0..10).map(|n| format!("/dev/l{n} (d/n)")).collect();
        assert!(links_left_out(&many).ends_with("/dev/l7 (d/n) and 2 more"));
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
