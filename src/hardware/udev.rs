//! Properties that udev recorded of a device node, and files of its device in sysfs.
//!
//! udev writes them to `run/udev/data/c81:0`, by the kind and the number of the node, in lines such
//! as `E:ID_MODEL=C920` (systemd `src/libsystemd/sd-device`). `udevadm info NODE` shows the same.
//! `ATTRS{mode}` names a file of the node's device in sysfs, or of a device above it, as in a rule
//! of udev. Like there, one device must have all of them. `udevadm info -a NODE` shows these.

use super::disks::UDEV_DATA;
use super::node_names::{base_name, below_devices};
use crate::domain::CharPath;
use crate::host::{HostNode, HostRoot, ReadFailure};

/// Why the properties of all nodes are unknown; `None` if they can be read.
pub(super) fn unknown(root: &HostRoot) -> Option<ReadFailure> {
    let failed = root.failure_count();
    let is_absent = !root.is_dir(UDEV_DATA) && root.failure_count() == failed;
    let error = "it does not exist, so the properties of udev are unknown".to_owned();
    is_absent.then(|| ReadFailure { path: format!("/{UDEV_DATA}"), error })
}

/// Whether a path needs the records of udev.
pub(super) fn needs_records(path: &CharPath) -> bool {
    path.udev.iter().any(|(key, _)| attribute(key).is_none())
}

/// Whether one of these nodes has every property that the path wants.
pub(super) fn is_wanted(root: &HostRoot, path: &CharPath, nodes: &[HostNode]) -> bool {
    let has = |node| has_properties(root, path, node) && has_attributes(root, path, node);
    path.udev.is_empty() || nodes.iter().any(has)
}

/// The file of a key `ATTRS{file}`.
fn attribute(key: &str) -> Option<&str> {
    key.strip_prefix("ATTRS{")?.strip_suffix('}')
}

fn has_properties(root: &HostRoot, path: &CharPath, node: &HostNode) -> bool {
    if !needs_records(path) {
        return true;
    }
    let record = number(root, node).and_then(|name| root.read(&format!("{UDEV_DATA}/{name}")));
    let Some(record) = record else { return false };
    let properties = || record.lines().filter_map(|line| line.strip_prefix("E:")?.split_once('='));
    path.udev
        .iter()
        .filter(|(key, _)| attribute(key).is_none())
        .all(|(key, glob)| properties().any(|(name, value)| name == key && is_match(glob, value)))
}

fn has_attributes(root: &HostRoot, path: &CharPath, node: &HostNode) -> bool {
    let wanted = || path.udev.iter().filter_map(|(key, glob)| Some((attribute(key)?, glob)));
    if wanted().next().is_none() {
        return true;
    }
    let Some(device) = device(root, node) else { return false };
    let mut folder = device.as_str();
    loop {
        let has = |(file, glob): (&str, &String)| {
            let value = root.read(&format!("sys/devices/{folder}/{file}"));
            value.is_some_and(|value| is_match(glob, &value))
        };
        if wanted().all(has) {
            return true;
        }
        let Some((above, _)) = folder.rsplit_once('/') else { return false };
        folder = above;
    }
}

fn is_match(glob: &str, value: &str) -> bool {
    glob::Pattern::new(glob).is_ok_and(|glob| glob.matches(value))
}

/// The device of a node, below `/sys/devices`.
fn device(root: &HostRoot, node: &HostNode) -> Option<String> {
    let target = if let Some(number) = node.number {
        let kind = if number.is_block { "block" } else { "char" };
        root.link_target(&format!("sys/dev/{kind}/{}:{}", number.major, number.minor))
    } else {
        let name = base_name(&node.path);
        let classes = root.entries("sys/class").into_iter();
        let mut links = classes.map(|class| format!("sys/class/{class}/{name}"));
        links.find_map(|link| root.link_target(&link))
    };
    below_devices(&target?)
}

/// The name of the record of a node: its kind and its number.
fn number(root: &HostRoot, node: &HostNode) -> Option<String> {
    if let Some(number) = node.number {
        let kind = if number.is_block { 'b' } else { 'c' };
        return Some(format!("{kind}{}:{}", number.major, number.minor));
    }
    // In a captured tree a node has no number, but its device in sysfs states one.
    let name = base_name(&node.path);
    root.entries("sys/class").into_iter().find_map(|class| {
        let number = root.read(&format!("sys/class/{class}/{name}/dev"))?;
        Some(format!("{}{number}", if class == "block" { 'b' } else { 'c' }))
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, write};
    use super::super::{DiscoverInput, Discovery, discover, discover_with, scan};
    use crate::domain::ResourceSpec;
    use crate::host::HostRoot;
    use crate::host::faults::with_faults;
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::Arc;

    fn wants(name: &str, glob: &str, udev: &[(&str, &str)]) -> Arc<ResourceSpec> {
        let mut spec = (*char_spec(name, &[glob])).clone();
        spec.paths[0].udev =
            udev.iter().map(|(key, glob)| ((*key).to_owned(), (*glob).to_owned())).collect();
        Arc::new(spec)
    }

    fn nodes(found: &Discovery, spec: &ResourceSpec) -> Vec<String> {
        let devices = &found.selection.resources[&spec.name];
        devices.iter().map(|device| device.nodes[0].host.clone()).collect()
    }

    fn cameras(root: &Path) {
        for (n, model) in [(0, "C920"), (1, "C920_HD"), (2, "Other")] {
            write(root, &format!("dev/video{n}"), "");
            write(root, &format!("sys/class/video4linux/video{n}/dev"), &format!("81:{n}\n"));
            let text =
                format!("I:1\nE:ID_MODEL={model}\nE:ID_V4L_CAPABILITIES=:capture:\nG:seat\n");
            write(root, &format!("run/udev/data/c81:{n}"), &text);
        }
        write(root, "dev/video3", "");
        write(root, "sys/class/video4linux/video3/dev", "81:3\n");
    }

    #[test]
    fn nodes_are_selected_by_the_properties_that_udev_recorded() {
        let dir = tempfile::tempdir().unwrap();
        cameras(dir.path());
        let specs = [
            wants("a.b/one", "/dev/video*", &[("ID_MODEL", "C920"), ("ID_V4L_CAPABILITIES", "*")]),
            wants("a.b/two", "/dev/video*", &[("ID_MODEL", "C92*")]),
            wants("a.b/none", "/dev/video*", &[("ID_MODEL", "C92*"), ("ID_SERIAL", "*")]),
            char_spec("a.b/rest", &["/dev/video*"]),
        ];
        let found = discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
        let all: Vec<Vec<String>> = specs.iter().map(|spec| nodes(&found, spec)).collect();
        let expected =
            [vec!["/dev/video0"], vec!["/dev/video1"], vec![], vec!["/dev/video2", "/dev/video3"]];
        assert_eq!(all, expected);
        let warnings = found.selection.warnings.join("\n");
        assert!(
            warnings.contains("a.b/none: no device node matches /dev/video* with the properties of udev that it must have"),
            "{warnings}"
        );
    }

    #[test]
    fn a_record_that_cannot_be_read_moves_no_node_to_another_resource() {
        let dir = tempfile::tempdir().unwrap();
        cameras(dir.path());
        let specs = [
            wants("a.b/one", "/dev/video*", &[("ID_MODEL", "C920*")]),
            char_spec("a.b/rest", &["/dev/video*"]),
        ];
        let (root, names) = (HostRoot::new(dir.path()), BTreeMap::new());
        let before = discover(&root, &specs, &names);
        let again = || {
            let input = DiscoverInput { former: Some(&before), ..DiscoverInput::first(&names) };
            discover_with(&root, scan(&root), &specs, &input)
        };
        let (_, calls) = with_faults(|_| None, again);
        let mut unread = 0;
        for failing in 0..calls {
            let one = move |call: u64| (call == failing).then_some(24);
            let (after, _) = with_faults(one, again);
            let why = after.unread.resources.get(&specs[0].name);
            if why.is_some_and(|why| !why.contains("udev") && !why.contains("/sys/class")) {
                continue; // Of the nodes themselves, as for any path.
            }
            assert_eq!(after.selection.resources, before.selection.resources, "call {failing}");
            unread += usize::from(why.is_some());
        }
        assert!(unread > 4, "{unread} of {calls} reads are of the nodes");
    }

    #[test]
    fn nodes_are_selected_by_the_files_of_their_device_and_of_those_above() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for (n, mode, kind) in [(0, "dedicated", "user"), (1, "shared", "user"), (2, "shared", "x")]
        {
            let queue = format!("devices/pci0000:6a/0000:6a:01.0/dsa0/wq{n}");
            write(root, &format!("sys/{queue}/mode"), &format!("{mode}\n"));
            write(root, &format!("sys/{queue}/type"), &format!("{kind}\n"));
            write(root, &format!("sys/{queue}/dsa!wq{n}/dev"), "1:1\n");
            write(root, "sys/devices/pci0000:6a/0000:6a:01.0/vendor", "0x8086\n");
            std::fs::create_dir_all(root.join("sys/class/dsa")).unwrap();
            let link = root.join(format!("sys/class/dsa/wq{n}"));
            std::os::unix::fs::symlink(format!("../../{queue}/dsa!wq{n}"), link).unwrap();
            write(root, &format!("dev/dsa/wq{n}"), "");
        }
        let wants = |name: &str, udev: &[(&str, &str)]| wants(name, "/dev/dsa/wq*", udev);
        let specs = [
            wants("a.b/none", &[("ATTRS{mode}", "*"), ("ATTRS{vendor}", "0x8086")]),
            wants("a.b/shared", &[("ATTRS{mode}", "shared"), ("ATTRS{type}", "user")]),
            wants("a.b/above", &[("ATTRS{vendor}", "0x8086")]),
        ];
        let found = discover(&HostRoot::new(root), &specs, &BTreeMap::new());
        let all: Vec<Vec<String>> = specs.iter().map(|spec| nodes(&found, spec)).collect();
        let expected = [vec![], vec!["/dev/dsa/wq1"], vec!["/dev/dsa/wq0", "/dev/dsa/wq2"]];
        assert_eq!(all, expected, "one device has all of them; no record of udev is needed");
    }

    #[test]
    fn without_the_records_of_udev_nothing_is_offered_and_the_log_names_them() {
        let dir = tempfile::tempdir().unwrap();
        cameras(dir.path());
        std::fs::remove_dir_all(dir.path().join("run/udev")).unwrap();
        let specs = [
            wants("a.b/one", "/dev/video*", &[("ID_MODEL", "C920")]),
            char_spec("a.b/rest", &["/dev/video*"]),
        ];
        let found = discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
        assert_eq!((nodes(&found, &specs[0]).len(), nodes(&found, &specs[1]).len()), (0, 4));
        let why = &found.unread.resources[&specs[0].name];
        assert!(why.contains("/run/udev/data cannot be read: it does not exist"), "{why}");
        assert!(found.selection.warnings.iter().any(|warning| warning.contains(why.as_str())));
    }
}
