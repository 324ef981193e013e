//! A device: one piece of hardware that can be offered to a container.

use super::attributes::Attributes;
use super::device_id::DeviceId;
use super::health::{Health, Reason};
use super::object::{DeviceNumber, Object, is_driver_wide};
use super::pci::PciFunction;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClass {
    /// Graphics or compute GPU. Display controllers of management chips are `Other`.
    Gpu,
    /// FPGA accelerator card.
    Fpga,
    /// A function with an RDMA device below it: InfiniBand, RoCE, iWARP, EFA.
    Rdma,
    /// Network function without RDMA.
    Nic,
    /// NVMe controller.
    Nvme,
    /// Other processing accelerator or co-processor.
    Accelerator,
    /// A node in `/dev`, offered by its path.
    Char,
    /// Everything else: bridges, USB hosts, audio.
    Other,
}

impl DeviceClass {
    /// The word in the configuration file and in `discover -o json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            DeviceClass::Gpu => "gpu",
            DeviceClass::Fpga => "fpga",
            DeviceClass::Rdma => "rdma",
            DeviceClass::Nic => "nic",
            DeviceClass::Nvme => "nvme",
            DeviceClass::Accelerator => "accelerator",
            DeviceClass::Char => "char",
            DeviceClass::Other => "other",
        }
    }
}

impl fmt::Display for DeviceClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A node in `/dev` that is given to a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNode {
    /// Path on the host, as the kubelet and the container runtime see it (without `--host-root`).
    pub host: String,
    /// udev's link to the node by the disk's own identity, `/dev/disk/by-id/nvme-eui.…`. Of another
    /// node the link that selects it, `/dev/zigbee`. `None` if there is none, or if another device
    /// may get it.
    pub link: Option<String>,
    /// Path in the container.
    pub container: String,
    /// Any of `r`, `w` and `m` (mknod), as the device cgroup writes them.
    pub permissions: String,
    /// Whether the device is unusable without this node. A node that is not required is left out
    /// when it is missing.
    pub required: bool,
    /// The device number at the scan; `None` if the node was missing, or if it is a plain file.
    pub number: Option<DeviceNumber>,
}

impl DeviceNode {
    /// The node at `path`, at the same path in the container, readable and writable, required.
    pub fn at(path: impl Into<String>) -> Self {
        let host = path.into();
        DeviceNode {
            container: host.clone(),
            host,
            link: None,
            permissions: "rw".into(),
            required: true,
            number: None,
        }
    }

    /// The path that stays right for as long as a container may be started again: the kernel may
    /// give the path of a device to another one at the next boot.
    #[must_use]
    pub fn lasting_path(&self) -> &str {
        self.link.as_deref().unwrap_or(&self.host)
    }

    /// The same node, but not required.
    #[must_use]
    pub fn optional(self) -> Self {
        DeviceNode { required: false, ..self }
    }
}

/// The [`Device::key`] of the GPU of a system on a chip, which is no PCI function. There is at most
/// one.
pub const INTEGRATED_KEY: &str = "soc:gpu";

/// One device as discovery found it: its identity, its place and its nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The stable id.
    pub id: DeviceId,
    /// Names the hardware in its place, so that a scan finds the remembered id again:
    /// `pci:0000:18:00.0/10de:2330`, `pci:0000:18:00.0/10de:2330/gi1-ci0` for a part of it,
    /// `dev:/dev/fuse`, or [`INTEGRATED_KEY`].
    pub key: String,
    /// Its class.
    pub class: DeviceClass,
    /// The PCI function; `None` for a plain `/dev` node, and for the GPU of a system on a chip.
    pub pci: Option<Box<PciFunction>>,
    /// The nearest NUMA nodes. Empty: unknown, and the kubelet's list has no topology for the
    /// device.
    pub numa_nodes: Vec<u32>,
    /// The nodes for a container, in the order of the response.
    pub nodes: Vec<DeviceNode>,
    /// Identity and description by name. An unknown attribute has no entry.
    ///
    /// | name | of | value |
    /// | --- | --- | --- |
    /// | `uuid` | NVIDIA GPU | its UUID |
    /// | `uuid` | MIG instance | of NVML, or of drivers before 470: `MIG-<GPU>/<gi>/<ci>` |
    /// | `minor` | NVIDIA GPU | number of `/dev/nvidiaN` |
    /// | `index` | NVIDIA GPU | position among the driver's GPUs by address |
    /// | `integrated` | GPU of a Tegra system | `tegra`, its name for the NVIDIA runtime |
    /// | `gi`, `ci` | MIG instance | ids of the GPU instance and the compute instance |
    /// | `mig_profile` | MIG instance | of NVML: `1g.10gb`, `1c.3g.40gb` |
    /// | `gi_cap`, `ci_cap` | MIG instance | numbers of their `/dev/nvidia-caps/nvidia-capN` |
    /// | `vgpu_type` | NVIDIA virtual function | number of its vGPU type |
    /// | `mdev_uuid`, `mdev_driver` | mediated device | as in sysfs |
    /// | `mdev_type`, `mdev_type_name` | mediated device | type: `nvidia-754`, `NVIDIA A2-4Q` |
    /// | `unique_id` | AMD | identity of the GPU |
    /// | `compute_partition`, `memory_partition` | AMD | modes of the GPU: `cpx`, `nps4` |
    /// | `compute_partitions`, `memory_partitions` | AMD | modes that the GPU can have |
    /// | `vram_mib`, `simd_count`, `cu_count` | AMD | memory; vector units and compute units |
    /// | `gfx_version` | AMD | version of the graphics engine, as in KFD's topology: `90402` |
    /// | `driver_version`, `driver_source` | AMD | `version` and `srcversion` of the module |
    /// | `module_id` | Gaudi | number of the module on its board |
    /// | `acpi_index` | network, RDMA, accelerator | number that the firmware gives the function |
    /// | `partition`, `render_minor` | AMD partition | its number on the GPU; of its render node |
    /// | `kfd_node`, `xcp` | AMD partition | number in KFD's topology; its platform device |
    /// | `afu_id`, `interface_id` | Intel FPGA port | accelerator function; region's interface |
    /// | `fme_node` | Intel FPGA port | management node |
    /// | `hive` | GPU with NVLink or XGMI | see [`topology::hives`](super::topology::hives) |
    /// | `auxiliary` | scalable function | its name on the auxiliary bus: `mlx5_core.sf.4` |
    /// | `mgmt` | Alveo user function | address of the card's management function |
    /// | `node_guid`, `sys_image_guid` | RDMA | GUIDs |
    /// | `pkey` | InfiniBand | the first partition key of its first port: `0x8001` |
    /// | `link_layer` | RDMA | `InfiniBand` or `Ethernet` |
    /// | `link_type` | network, RDMA | `ether` or `infiniband` |
    /// | `serial`, `model`, `firmware`, `state` | NVMe, some of others | as the device reports |
    /// | `subsystem_nqn` | NVMe | of the controller |
    /// | `nsid`, `wwid` | NVMe | of its only namespace, or of this one |
    /// | `in_use` | disk | how the host uses the disk |
    /// | `second_path` | NVMe | id of the disk, if another controller reaches it and has its name |
    /// | `member_of` | disk | the pool that it is a member of, in use or not |
    /// | `default_route` | network, RDMA | the interface of the host's default route |
    /// | `master` | network, RDMA | the host's bond, bridge or switch with its interface |
    /// | `vdpa`, `vdpa_driver` | network function | `vdpa0`; `vhost_vdpa` or `virtio_vdpa` |
    /// | `iommu_group`, `group_members` | for guests | group; all functions in it |
    /// | `group_twins` | for guests | others in the group with the same ids, for guests too |
    /// | `group_blocked_by` | for guests | the function that keeps the group from guests |
    /// | `kernel_name` | node of `/dev` | `subsystem:name` |
    /// | `kernel_device` | node of `/dev` | the kernel's device, below `/sys/devices` |
    /// | `usb_ids` | USB device | vendor and product: `0403:6001`; also has `serial` and `model` |
    /// | `disk` | node of `/dev` | the disk's name, for a disk or partition |
    /// | `disk_id` | node of `/dev` | identity of the disk (`wwid`), or of several, with commas |
    /// | `disk_partition` | node of `/dev` | the number of the partition |
    /// | `stacked_on` | node of `/dev` | objects below a block device, one a line; see below |
    /// | `pci_parent` | node of `/dev` | address of the PCI function above its device |
    /// | `part` | part of a function | `mig`, `mdev`, `partition`, `port`, `namespace` or `sf` |
    /// | `parent` | part of a function | id of the whole |
    /// | `parts` | function with parts | their kind: then the whole is not offered |
    ///
    /// `stacked_on` has the `slaves` of device mapper and MD, and the disk below a loop device.
    pub attributes: Attributes,
}

impl Device {
    /// An attribute by its name.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.get(name)
    }

    /// Its health by its record and by the presence of its required nodes.
    #[must_use]
    pub fn health(&self, has_nodes: bool) -> Health {
        if self.attribute("group_blocked_by").is_some() {
            Health::Unhealthy(Reason::GroupNotViable)
        } else if has_nodes {
            Health::Healthy
        } else {
            Health::Unhealthy(Reason::NodeMissing)
        }
    }

    /// The required nodes that belong to this device alone. Other nodes belong to a driver as a
    /// whole (`/dev/nvidiactl`), or to the whole that this device is a part of.
    pub fn own_nodes(&self) -> impl Iterator<Item = &DeviceNode> {
        let is_of_whole = |node: &str| {
            self.attribute("part") == Some("mig") && !node.starts_with("/dev/nvidia-caps/")
        };
        let is_own = move |node: &&DeviceNode| {
            self.class == DeviceClass::Char
                || !is_driver_wide(&node.container) && !is_of_whole(&node.container)
        };
        self.nodes.iter().filter(|node| node.required).filter(is_own)
    }

    /// The objects that a container with this device holds.
    #[must_use]
    pub fn objects(&self) -> Vec<Object> {
        let mut objects: Vec<Object> = Object::of_key(&self.key).into_iter().collect();
        // Few containers need the card node, so it is optional. A container gets it if it exists.
        // An optional node of a group belongs to the group alone, if it is a node of the kernel.
        let is_of_group = self.class == DeviceClass::Char;
        let optional = self.nodes.iter().filter(|node| {
            let is_real = node.number.is_some();
            !node.required && (node.host.starts_with("/dev/dri/") || is_of_group && is_real)
        });
        for node in self.own_nodes().chain(optional) {
            objects.push(Object::node(node.lasting_path()));
            objects.extend(node.number.map(Object::number));
        }
        objects.extend(self.attribute("kernel_device").map(Object::kernel_device));
        let partition = self.attribute("disk_partition").and_then(|number| number.parse().ok());
        let disks = self
            .attribute("disk_id")
            .or_else(|| self.attribute("wwid"))
            .into_iter()
            .flat_map(|ids| ids.split(','));
        objects.extend(disks.map(|id| Object::disk(id, partition)));
        objects.extend(
            self.attribute("stacked_on")
                .into_iter()
                .flat_map(|texts| texts.lines())
                .map(Object::of_text),
        );
        if self.own_nodes().any(|node| node.host.starts_with("/dev/vfio/")) {
            objects.extend(self.iommu_group().map(Object::iommu_group));
        }
        objects
    }

    /// The IOMMU group that a guest gets with it: its own, or that of its function.
    #[must_use]
    pub fn iommu_group(&self) -> Option<u32> {
        let own = self.attribute("iommu_group").and_then(|group| group.parse().ok());
        own.or_else(|| self.pci.as_ref()?.iommu_group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optional_node_of_a_group_is_held_with_it() {
        let numbered = |path: &str, minor| DeviceNode {
            number: Some(DeviceNumber { is_block: false, major: 81, minor }),
            ..DeviceNode::at(path)
        };
        let nodes = vec![numbered("/dev/video0", 0), numbered("/dev/media0", 1).optional()];
        let group = Device {
            id: DeviceId::new("cam"),
            key: "dev:/dev/video0".into(),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes,
            attributes: Attributes::default(),
        };
        let objects = group.objects();
        for text in ["node:/dev/video0", "char:81:0", "node:/dev/media0", "char:81:1"] {
            assert!(objects.contains(&Object::of_text(text)), "{text}: {objects:?}");
        }
        let accelerator = Device { class: DeviceClass::Accelerator, ..group };
        assert!(!accelerator.objects().contains(&Object::node("/dev/media0")));
    }
}
