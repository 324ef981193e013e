//! The kernel's device behind a node of `/dev`.

use super::node_names::{base_name, below_devices};
use crate::domain::DeviceNumber;
use crate::host::{HostNode, HostRoot};
use std::cell::OnceCell;
use std::collections::BTreeMap;

/// The kernel's device behind a node.
#[derive(Debug, Clone)]
pub(super) struct KernelRecord {
    /// `subsystem:name`.
    pub(super) name: String,
    /// Its path below `/sys/devices`, where it is known.
    pub(super) device: Option<String>,
}

/// Finds the kernel's device behind a node.
pub(super) struct KernelNames<'a> {
    root: &'a HostRoot,
    /// The class that has a device of this name; `None` if several have one. Read when the first
    /// node without numbers is met.
    class_of: OnceCell<BTreeMap<String, Option<String>>>,
}

impl<'a> KernelNames<'a> {
    pub(super) fn of(root: &'a HostRoot) -> Self {
        KernelNames { root, class_of: OnceCell::new() }
    }

    /// Read from `sys/dev/{char,block}/MAJOR:MINOR`. In a captured tree a node has no numbers.
    /// There the record comes from the only class that has a device of its name.
    pub(super) fn of_node(&self, node: &HostNode) -> Option<KernelRecord> {
        let Some(DeviceNumber { is_block, major, minor }) = node.number else {
            let name = base_name(&node.path);
            let class = self.class_of.get_or_init(|| self.list_classes()).get(name)?.as_ref()?;
            let device = self.root.link_target(&format!("sys/class/{class}/{name}"));
            return Some(KernelRecord {
                name: format!("{class}:{name}"),
                device: device.as_deref().and_then(below_devices),
            });
        };
        let link = format!("sys/dev/{}/{major}:{minor}", if is_block { "block" } else { "char" });
        let target = self.root.link_target(&link)?;
        let name = format!(
            "{}:{}",
            self.root.link_name(&format!("{link}/subsystem"))?,
            base_name(&target)
        );
        Some(KernelRecord { name, device: below_devices(&target) })
    }

    fn list_classes(&self) -> BTreeMap<String, Option<String>> {
        let mut class_of = BTreeMap::new();
        for class in self.root.entries("sys/class") {
            let folder = format!("sys/class/{class}");
            // A link to a device that was not captured does not count.
            for name in self
                .root
                .entries(&folder)
                .into_iter()
                .filter(|name| self.root.exists(&format!("{folder}/{name}")))
            {
                class_of
                    .entry(name)
                    .and_modify(|class| *class = None)
                    .or_insert_with(|| Some(class.clone()));
            }
        }
        class_of
    }
}
