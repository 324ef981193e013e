//! Objects of the kernel: the identity of a granted device, independent of the id or path that
//! leads to it.
//!
//! A container gets device numbers. Through them it gets a kernel device (its place in sysfs), a
//! disk, a PCI function or an IOMMU group. An id, a udev link, a path or a partition is only one
//! way to reach such an object. While a container holds the object by one id, Holdfast grants the
//! object by no other id. This rule is in [`Objects::conflict`], and nowhere else.
//!
//! An object is a text: its kind, and a path where each `/` leads to a part. An object overlaps
//! with its parts: a disk with its partition, a PCI function with its MIG instance or with any
//! kernel device below it.
//!
//! | text | object |
//! | --- | --- |
//! | `node:/dev/ttyUSB0` | the path that the runtime opens again at each start of the container |
//! | `char:188:0`, `block:8:16` | the device number that the container's cgroup allows |
//! | `pci:0000:18:00.0`, `pci:0000:18:00.0/gi1-ci0` | a PCI function, and a part of it |
//! | `aux:mlx5_core.sf.4` | a scalable function: as a virtual one, it is no part of its function |
//! | `pci:0000:00:14.0/usb1/1-2/1-2:1.0/ttyUSB0/tty/ttyUSB0` | a kernel device below a function |
//! | `sys:virtual/misc/fuse` | a kernel device that is below no function |
//! | `disk:eui.0025385591b03a1f`, `disk:…/2` | a disk by its own identity, and its partition |
//! | `iommu_group:12` | an IOMMU group, which a guest always gets as a whole |

use super::device_id::DeviceId;
use super::pci::{PciAddress, is_scalable_name};
use super::resource_name::ResourceName;
use super::safeguard::Safeguard;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

/// One object, as a text of the table above.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Object(Arc<str>);

/// The number of a device node, `makedev(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// True for a block device, false for a character device.
    pub is_block: bool,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for DeviceNumber {
    /// Writes for example `char:188:0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", if self.is_block { "block" } else { "char" }, self.major, self.minor)
    }
}

impl Object {
    /// The text of the object.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A path below `/dev`, as on the host.
    #[must_use]
    pub fn node(path: &str) -> Self {
        Object(format!("node:{path}").into())
    }

    /// The path, if the object is a node; `None` for other objects.
    #[must_use]
    pub fn as_node(&self) -> Option<&str> {
        self.0.strip_prefix("node:")
    }

    /// A device number.
    #[must_use]
    pub fn number(number: DeviceNumber) -> Self {
        Object(number.to_string().into())
    }

    /// Whether this is a device number. After a reboot the kernel may give it to another device.
    #[must_use]
    pub fn is_number(&self) -> bool {
        self.0.starts_with("char:") || self.0.starts_with("block:")
    }

    /// Whether the kernel may give its number or name to another device after a reboot.
    #[must_use]
    pub fn is_of_boot(&self) -> bool {
        self.is_number() || self.as_node().is_some() || self.0.starts_with("iommu_group:")
    }

    /// A PCI function.
    #[must_use]
    pub fn function(address: PciAddress) -> Self {
        Object(format!("pci:{address}").into())
    }

    /// A PCI function, or a part of it, by the key of a device:
    /// `pci:0000:18:00.0/10de:2330/gi1-ci0`. `None` for other keys.
    #[must_use]
    pub fn of_key(key: &str) -> Option<Self> {
        let mut parts = key.strip_prefix("pci:")?.splitn(3, '/');
        let function = parts.next()?;
        // The vendor and device id come between the function and the part.
        Some(match parts.nth(1) {
            Some(part) if is_scalable_name(part) => Object(format!("aux:{part}").into()),
            Some(part) => Object(format!("pci:{function}/{part}").into()),
            None => Object(format!("pci:{function}").into()),
        })
    }

    /// A kernel device, by its path below `/sys/devices`. A device below a PCI function is a part
    /// of the nearest function.
    #[must_use]
    pub fn kernel_device(path: &str) -> Self {
        let path = path.trim_matches('/');
        let begins = path.match_indices('/').map(|(at, _)| at + 1).rev().chain([0]);
        let is_function = |at: &usize| {
            path[*at..].split('/').next().is_some_and(|name| name.parse::<PciAddress>().is_ok())
        };
        let nearest = begins.into_iter().find(is_function);
        Object(
            nearest
                .map_or_else(|| format!("sys:{path}"), |at| format!("pci:{}", &path[at..]))
                .into(),
        )
    }

    /// A disk by its own identity (`wwid`), or one of its partitions.
    #[must_use]
    pub fn disk(wwid: &str, partition: Option<u32>) -> Self {
        // A slash would make it a part of another object.
        let wwid = wwid.replace('/', "_");
        Object(
            partition
                .map_or_else(|| format!("disk:{wwid}"), |number| format!("disk:{wwid}/{number}"))
                .into(),
        )
    }

    /// A part of this object, by its name.
    #[must_use]
    pub fn part(&self, name: &str) -> Self {
        Object(format!("{}/{}", self.0, name.replace('/', "_")).into())
    }

    /// An object by its text.
    #[must_use]
    pub fn of_text(text: &str) -> Self {
        Object(text.into())
    }

    /// An IOMMU group.
    #[must_use]
    pub fn iommu_group(group: u32) -> Self {
        Object(format!("iommu_group:{group}").into())
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Borrow<str> for Object {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// Nodes that belong to a driver as a whole and are given with every device of that driver. Holding
/// such a node does not mean holding a device.
const DRIVER_WIDE: [&str; 12] = [
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
    "/dev/nvidia-nvlink",
    "/dev/nvidia-nvswitchctl",
    "/dev/kfd",
    "/dev/infiniband/rdma_cm",
    "/dev/vfio/vfio",
    "/dev/iommu",
    "/dev/vhost-net",
    "/dev/net/tun",
];
/// Folders of such nodes.
const DRIVER_WIDE_FOLDERS: [&str; 1] = ["/dev/nvidia-caps-imex-channels/"];

/// Whether a node belongs to a driver as a whole.
#[must_use]
pub fn is_driver_wide(node: &str) -> bool {
    DRIVER_WIDE.contains(&node) || DRIVER_WIDE_FOLDERS.iter().any(|folder| node.starts_with(folder))
}

/// Whether two sets of objects overlap: they have an object in common, or an object of one set is a
/// part of an object of the other.
#[must_use]
pub fn overlap(some: &[Object], others: &[Object]) -> bool {
    let is_part = |part: &str, whole: &str| {
        part.strip_prefix(whole).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let overlaps = |one: &Object, other: &Object| {
        is_part(one.as_str(), other.as_str()) || is_part(other.as_str(), one.as_str())
    };
    Safeguard::HeldObjects.is_on()
        && some.iter().any(|one| others.iter().any(|other| overlaps(one, other)))
}

/// Whether two ids of one object may be held at the same time. There are three such cases:
///
/// - one id of one resource, which an init container passes to the next container of its pod;
/// - shares of one device;
/// - ids of one pool, since each id stands for the whole pool.
#[must_use]
pub fn share(one: (&ResourceName, &DeviceId), other: (&ResourceName, &DeviceId)) -> bool {
    let is_one = match (one.1.shared(), other.1.shared()) {
        (Some(_), Some(_)) => true,
        (None, None) => one.1 == other.1 || one.1.is_number() && other.1.is_number(),
        // One id is from a time when the device was shared; now the device is offered whole.
        _ => false,
    };
    is_one && one.0 == other.0
}

/// The same between a claim and another holder, which is another claim or a container that got the
/// id by an Allocate: [`share`] without its first case. A claim passes nothing on.
#[must_use]
pub fn share_with_claim(
    one: (&ResourceName, &DeviceId),
    other: (&ResourceName, &DeviceId),
) -> bool {
    share(one, other) && (one.1.shared().is_some() || one.1.is_number())
}

/// The holders of each object. A `K` names a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Objects<K>(BTreeMap<Object, BTreeSet<K>>);

impl<K> Default for Objects<K> {
    fn default() -> Self {
        Objects(BTreeMap::new())
    }
}

impl<K: Ord + Clone> Objects<K> {
    /// Records that a holder has these objects.
    pub fn hold(&mut self, holder: &K, objects: impl IntoIterator<Item = Object>) {
        for object in objects {
            self.0.entry(object).or_default().insert(holder.clone());
        }
    }

    /// Records that a holder no longer has these objects.
    pub fn release<'a>(&mut self, holder: &K, objects: impl IntoIterator<Item = &'a Object>) {
        for object in objects {
            let Some(holders) = self.0.get_mut(object) else { continue };
            holders.remove(holder);
            if holders.is_empty() {
                self.0.remove(object);
            }
        }
    }

    /// Whether no object is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A holder of an overlapping object that excludes the caller. This is **the rule** that no
    /// object has two holders. Objects overlap if they are the same or if one is a part of the
    /// other. `is_beside` returns which holders the caller may share an object with, by [`share`].
    pub fn conflict<'a>(
        &self,
        objects: impl IntoIterator<Item = &'a Object>,
        is_beside: impl Fn(&K) -> bool,
    ) -> Option<&K> {
        let mut objects = objects.into_iter().filter(|_| Safeguard::HeldObjects.is_on());
        objects
            .find_map(|object| self.overlapping(object.as_str()).find(|holder| !is_beside(holder)))
    }

    /// The holders of an object, of its parts, and of the objects that it is a part of.
    fn overlapping(&self, object: &str) -> impl Iterator<Item = &K> {
        let ends = object.match_indices('/').map(|(end, _)| end).chain([object.len()]);
        let mut found: Vec<&BTreeSet<K>> =
            ends.filter_map(|end| self.0.get(&object[..end])).collect();
        let begin = format!("{object}/");
        let parts = self.0.range::<str, _>((Bound::Excluded(begin.as_str()), Bound::Unbounded));
        found.extend(
            parts
                .take_while(|(part, _)| part.as_str().starts_with(&begin))
                .map(|(_, holders)| holders),
        );
        found.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Attributes;

    fn object(text: &str) -> Object {
        Object(text.into())
    }

    #[test]
    fn a_kernel_device_is_a_part_of_the_nearest_function_above_it() {
        for (path, expected) in [
            (
                "pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0/ttyUSB0/tty/ttyUSB0",
                "pci:0000:00:14.0/usb1/1-2/1-2:1.0/ttyUSB0/tty/ttyUSB0",
            ),
            (
                "pci0000:00/0000:00:1d.0/10000:e1:00.0/nvme/nvme0/nvme0n1/nvme0n1p2",
                "pci:10000:e1:00.0/nvme/nvme0/nvme0n1/nvme0n1p2",
            ),
            ("pci0000:16/0000:16:02.0/0000:18:00.0", "pci:0000:18:00.0"),
            ("/virtual/misc/fuse/", "sys:virtual/misc/fuse"),
            ("platform/serial8250/tty/ttyS0", "sys:platform/serial8250/tty/ttyS0"),
        ] {
            assert_eq!(Object::kernel_device(path).as_str(), expected);
        }
    }

    #[test]
    fn a_key_names_its_function_and_its_part() {
        let of = |key| Object::of_key(key).map(|object| object.to_string());
        assert_eq!(of("pci:0000:18:00.0/10de:2330").as_deref(), Some("pci:0000:18:00.0"));
        assert_eq!(
            of("pci:0000:18:00.0/10de:2330/gi1-ci0").as_deref(),
            Some("pci:0000:18:00.0/gi1-ci0")
        );
        assert_eq!(of("pci:0000:18:00.0").as_deref(), Some("pci:0000:18:00.0"));
        assert_eq!((of("dev:/dev/fuse"), of("pool:a.com/x"), of("")), (None, None, None));
    }

    #[test]
    fn the_card_node_of_a_partition_is_held_with_it() {
        use super::super::device::{Device, DeviceClass, DeviceNode};
        let device = |key: &str, class, nodes| {
            let (id, attributes) = (DeviceId::new(key), Attributes::default());
            Device {
                id,
                key: key.to_owned(),
                class,
                pci: None,
                numa_nodes: Vec::new(),
                nodes,
                attributes,
            }
        };
        let nodes = vec![
            DeviceNode::at("/dev/dri/renderD129"),
            DeviceNode::at("/dev/dri/card2").optional(),
        ];
        let partition = device("pci:0000:18:00.0/1002:74a1/partition1", DeviceClass::Gpu, nodes);
        let card = |path: &str| {
            device(&format!("dev:{path}"), DeviceClass::Char, vec![DeviceNode::at(path)])
        };
        assert!(overlap(&partition.objects(), &card("/dev/dri/card2").objects()));
        assert!(!overlap(&partition.objects(), &card("/dev/dri/card3").objects()));
    }

    #[test]
    fn an_object_overlaps_its_parts_and_wholes_only() {
        let mut objects = Objects::default();
        let held = [
            "pci:0000:18:00.0",
            "pci:0000:19:00.0/gi1-ci0",
            "disk:a/1",
            "char:188:0",
            "node:/dev/ttyUSB1",
        ];
        for (holder, text) in held.iter().enumerate() {
            objects.hold(&holder, [object(text)]);
        }
        let who = |text: &str| objects.conflict([&object(text)], |_| false).copied();
        for (text, holder) in [
            ("pci:0000:18:00.0", Some(0)),
            ("pci:0000:18:00.0/drm/card0", Some(0)),
            ("pci:0000:18:00.1", None),
            ("pci:0000:18:00", None),
            ("pci:0000:19:00.0", Some(1)),
            ("pci:0000:19:00.0/gi1-ci1", None),
            ("pci:0000:19:00.0/gi1-ci0/x", Some(1)),
            ("pci:0000:19:00.0/gi1", None),
            ("disk:a", Some(2)),
            ("disk:a/1", Some(2)),
            ("disk:a/10", None),
            ("disk:ab", None),
            ("char:188:0", Some(3)),
            ("char:188:01", None),
            ("block:188:0", None),
            ("node:/dev/ttyUSB1", Some(4)),
            ("node:/dev/ttyUSB10", None),
        ] {
            assert_eq!(who(text), holder, "{text}");
            let held: Vec<Object> = held.iter().map(|text| object(text)).collect();
            assert_eq!(overlap(&held, &[object(text)]), holder.is_some(), "{text}");
        }
        assert_eq!(objects.conflict([&object("char:188:0")], |holder| *holder == 3), None);
        for (holder, text) in held.iter().enumerate() {
            objects.release(&holder, [&object(text)]);
        }
        assert!(objects.is_empty());
    }

    #[test]
    fn only_one_use_of_one_object_is_shared() {
        let (a, b): (ResourceName, ResourceName) =
            ("a.com/x".parse().unwrap(), "b.com/x".parse().unwrap());
        let share = |one: (&ResourceName, &str), other: (&ResourceName, &str)| {
            share((one.0, &DeviceId::new(one.1)), (other.0, &DeviceId::new(other.1)))
        };
        assert!(share((&a, "GPU-1"), (&a, "GPU-1")));
        assert!(!share((&a, "GPU-1"), (&b, "GPU-1")));
        assert!(!share((&a, "GPU-1"), (&a, "GPU-2")));
        assert!(share((&a, "GPU-1::0"), (&a, "GPU-1::1")));
        assert!(
            share((&a, "dev:fuse::0"), (&a, "misc:fuse::1")),
            "a shared node that has got a better name"
        );
        assert!(!share((&a, "GPU-1::0"), (&a, "GPU-1")), "offered whole now, and shared before");
        assert!(share((&a, "0"), (&a, "7")), "a pool");
        assert!(!share((&a, "0"), (&b, "0")));
    }
}
