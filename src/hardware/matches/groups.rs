//! A group of paths: several nodes, and folders of nodes, that are one device.
//!
//! The device exists while the first path of the group leads to a node. It then has every other
//! node that the group names and that exists. A missing one that is not optional makes the device
//! unhealthy.

use super::super::disks::Disks;
use super::super::node_names::base_name;
use super::super::patterns::Dev;
use super::{Match, matches_of_path};
use crate::domain::{DeviceNode, MemberPath, ResourceName, ResourceSpec};
use crate::host::{HostRoot, Listings, TooMany};
use std::collections::BTreeMap;

/// What a group is looked up in.
pub(super) struct Sources<'a> {
    pub(super) root: &'a HostRoot,
    pub(super) dev: Result<&'a Dev, &'a TooMany>,
    pub(super) disks: &'a Disks<'a>,
}

/// What was found of a group.
#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) device: Option<Match<'a>>,
    /// Sentences for the operator.
    pub(super) warnings: Vec<String>,
}

impl Sources<'_> {
    /// The device of a group. `taken` has the nodes of earlier devices, with their resources.
    pub(super) fn group<'a>(
        &self,
        listings: &mut Listings,
        spec: &'a ResourceSpec,
        group: &'a [MemberPath],
        taken: &BTreeMap<String, ResourceName>,
    ) -> Result<Found<'a>, TooMany> {
        let mut found = Found::default();
        let Some((first, others)) = group.split_first() else { return Ok(found) };
        let name = &first.path.host;
        let matched = matches_of_path(self.root, self.dev, listings, spec, &first.path)?;
        let Some(mut device) = matched.into_iter().next() else {
            found.warnings.push(format!(
                "no device node matches {name}, the first path of a group, so the group is no \
                 device"
            ));
            return Ok(found);
        };
        device.is_group = true;
        let disk_in = |found: &Match<'_>| {
            let names = found.nodes.iter().map(|node| base_name(&node.path).to_owned());
            names.into_iter().find(|name| found.folder.is_some() && self.disks.has(name))
        };
        let mut disk = disk_in(&device);
        for MemberPath { path, optional } in others {
            let matched = matches_of_path(self.root, self.dev, listings, spec, path)?;
            if matched.is_empty() && !optional {
                found.warnings.push(format!(
                    "the group of {name} is unhealthy, because no device node matches {}",
                    path.host
                ));
                let host = path.host.to_string();
                let container = path.container.clone().unwrap_or_else(|| host.clone());
                let permissions = path.permissions.clone();
                device.others.push(DeviceNode { container, permissions, ..DeviceNode::at(host) });
            }
            for member in &matched {
                disk = disk.or_else(|| disk_in(member));
                let nodes = member.nodes_of_path(!optional);
                // An optional node that another device has is left out.
                let is_free = |node: &DeviceNode| !optional || !taken.contains_key(&node.host);
                device.others.extend(nodes.into_iter().filter(is_free));
            }
        }
        // Two members may lead to one node: the first one counts.
        let mut known: Vec<String> = device.nodes.iter().map(|node| node.path.clone()).collect();
        device.others.retain(|node| {
            let is_new = !known.contains(&node.host);
            known.push(node.host.clone());
            is_new
        });
        let other = known.iter().find_map(|node| Some((node, taken.get(node)?)));
        if let Some(disk) = disk {
            found.warnings.push(format!(
                "the group of {name} has a folder that contains the disk {disk}; configure disks by \
                 their own paths"
            ));
        } else if let Some((node, other)) = other {
            found.warnings.push(format!(
                "the group of {name} is not offered, because {node} already belongs to {other}, the \
                 first resource that matches it; a node that several devices need belongs into \
                 `nodes`"
            ));
        } else {
            found.device = Some(device);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{char_spec, fail_each_call, write};
    use crate::domain::{Device, DeviceId, MemberPath, ResourceSpec, overlap};
    use crate::hardware::{Discovery, discover};
    use crate::host::HostRoot;
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::Arc;

    /// A resource with these groups. A `?` behind a path makes it optional.
    fn groups(name: &str, groups: &[&[&str]]) -> Arc<ResourceSpec> {
        let member = |text: &&str| MemberPath {
            path: char_spec("a.b/c", &[text.trim_end_matches('?')]).paths[0].clone(),
            optional: text.ends_with('?'),
        };
        let mut spec = (*char_spec(name, &[])).clone();
        spec.groups = groups.iter().map(|group| group.iter().map(member).collect()).collect();
        Arc::new(spec)
    }

    fn found(dir: &Path, specs: &[Arc<ResourceSpec>]) -> Discovery {
        discover(&HostRoot::new(dir), specs, &BTreeMap::new())
    }

    fn nodes(device: &Device) -> Vec<(&str, bool)> {
        device.nodes.iter().map(|node| (&*node.container, node.required)).collect()
    }

    /// The devices of a resource, with their ids and whether they are healthy.
    fn devices(dir: &Path, found: &Discovery, spec: &ResourceSpec) -> Vec<(String, bool)> {
        let health = |device: &Arc<Device>| {
            let health = found.health(&HostRoot::new(dir), device);
            (device.id.to_string(), health.unwrap().is_healthy())
        };
        found.selection.resources[&spec.name].iter().map(health).collect()
    }

    #[test]
    fn a_group_is_one_device_with_all_its_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let nodes_there = ["snd/controlC0", "snd/pcmC0D0p", "snd/pcmC0D1p", "media0", "dvb/a/net0"];
        nodes_there.iter().for_each(|node| write(dir.path(), &format!("dev/{node}"), ""));
        let path =
            ["/dev/snd/controlC0", "/dev/snd/pcmC0*", "/dev/snd/seq?", "/dev/dvb", "/dev/media0?"];
        let spec = groups("example.com/card", &[&path]);
        let found = found(dir.path(), std::slice::from_ref(&spec));
        assert_eq!(devices(dir.path(), &found, &spec), [("dev:snd-controlC0".to_owned(), true)]);
        let device = &found.selection.resources[&spec.name][0];
        let expected = [
            ("/dev/snd/controlC0", true),
            ("/dev/snd/pcmC0D0p", true),
            ("/dev/snd/pcmC0D1p", true),
            ("/dev/dvb/a/net0", true),
            ("/dev/media0", false),
        ];
        assert_eq!((nodes(device), &*device.key), (expected.into(), "dev:/dev/snd/controlC0"));
        assert_eq!(found.selection.warnings, Vec::<String>::new());
        let single = |path: &str| {
            let specs = [char_spec("example.com/one", &[path])];
            let found = discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
            found.selection.resources[&specs[0].name][0].objects()
        };
        for path in ["/dev/snd/controlC0", "/dev/snd/pcmC0D1p", "/dev/dvb/a/net0"] {
            assert!(overlap(&device.objects(), &single(path)), "a holder of the group has {path}");
        }
    }

    #[test]
    fn a_missing_node_makes_the_device_unhealthy_and_an_optional_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        for node in ["video0", "video1", "media1"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        let spec = groups(
            "example.com/camera",
            &[
                &["/dev/video0", "/dev/media0"],
                &["/dev/video1", "/dev/media1", "/dev/radio1?"],
                &["/dev/video2", "/dev/media2"],
            ],
        );
        let specs = std::slice::from_ref(&spec);
        let before = found(dir.path(), specs);
        let expected = [("dev:video0".to_owned(), false), ("dev:video1".to_owned(), true)];
        assert_eq!(devices(dir.path(), &before, &spec), expected);
        let expected = [
            "example.com/camera: the group of /dev/video0 is unhealthy, because no device node matches /dev/media0",
            "example.com/camera: no device node matches /dev/video2, the first path of a group, so the group is no device",
        ];
        assert_eq!(before.selection.warnings, expected);
        write(dir.path(), "dev/media0", "");
        write(dir.path(), "dev/radio1", "");
        let after = found(dir.path(), specs);
        let expected = [("dev:video0".to_owned(), true), ("dev:video1".to_owned(), true)];
        assert_eq!(devices(dir.path(), &after, &spec), expected, "under the same ids");
        let second = &after.selection.resources[&spec.name][1];
        assert_eq!(nodes(second)[2], ("/dev/radio1", false));
    }

    #[test]
    fn a_group_that_begins_with_a_link_keeps_its_id_when_the_kernel_numbers_again() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("dev/snd/by-path")).unwrap();
        let spec = groups(
            "example.com/card",
            &[&["/dev/snd/by-path/pci-0000:00:1f.3", "/dev/snd/pcmC*D0p"]],
        );
        for number in [0, 3] {
            let link = dir.path().join("dev/snd/by-path/pci-0000:00:1f.3");
            let _ = std::fs::remove_file(&link);
            for name in ["controlC", "pcmC"] {
                let end = if name == "pcmC" { "D0p" } else { "" };
                let _ = std::fs::remove_file(dir.path().join(format!("dev/snd/{name}0{end}")));
                write(dir.path(), &format!("dev/snd/{name}{number}{end}"), "");
            }
            symlink(format!("../controlC{number}"), &link).unwrap();
            let found = found(dir.path(), std::slice::from_ref(&spec));
            let device = &found.selection.resources[&spec.name][0];
            assert_eq!(device.id, DeviceId::new("pci-0000:00:1f.3"));
            assert_eq!(device.key, "dev:/dev/snd/by-path/pci-0000:00:1f.3");
            assert_eq!(device.nodes[0].host, format!("/dev/snd/controlC{number}"));
            assert_eq!(device.nodes[0].container, "/dev/snd/by-path/pci-0000:00:1f.3");
            assert_eq!(device.nodes[1].host, format!("/dev/snd/pcmC{number}D0p"));
        }
    }

    #[test]
    fn a_group_that_cannot_be_read_stays_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        for node in ["a0", "b0", "c0"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        let spec = groups("example.com/one", &[&["/dev/a0", "/dev/b*", "/dev/c0?"]]);
        let specs = std::slice::from_ref(&spec);
        let before = found(dir.path(), specs);
        let (unread, calls) = fail_each_call(dir.path(), specs, &before);
        assert!(unread > 2, "{unread} of {calls} reads are of the group");
    }

    #[test]
    fn a_node_belongs_to_one_device() {
        let dir = tempfile::tempdir().unwrap();
        for node in ["a0", "a1", "timer", "disk/sda"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        write(dir.path(), "sys/class/block/sda/dev", "8:0");
        let specs = [
            groups("example.com/one", &[&["/dev/a0", "/dev/timer"]]),
            groups("example.com/two", &[&["/dev/a1", "/dev/timer?"], &["/dev/a1", "/dev/disk"]]),
            groups("example.com/three", &[&["/dev/a1", "/dev/timer"]]),
            groups("example.com/four", &[&["/dev/disk", "/dev/none?"]]),
        ];
        let found = found(dir.path(), &specs);
        let ids = |spec: &Arc<ResourceSpec>| devices(dir.path(), &found, spec);
        assert_eq!(ids(&specs[0]), [("dev:a0".to_owned(), true)]);
        assert_eq!(ids(&specs[1]), [("dev:a1".to_owned(), true)]);
        assert_eq!(nodes(&found.selection.resources[&specs[1].name][0]), [("/dev/a1", true)]);
        assert_eq!((ids(&specs[2]).len(), ids(&specs[3]).len()), (0, 0));
        let text = found.selection.warnings.join("\n");
        for part in [
            "example.com/two: the group of /dev/a1 has a folder that contains the disk sda",
            "example.com/three: the group of /dev/a1 is not offered, because /dev/a1 already belongs to example.com/two",
            "example.com/four: the group of /dev/disk has a folder that contains the disk sda",
        ] {
            assert!(text.contains(part), "{text}\nshould contain: {part}");
        }
    }
}
