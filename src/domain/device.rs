//! A device: one thing that can be offered to a container.

use super::attributes::Attributes;
use super::health::{Health, Reason};
use super::object::{DeviceNumber, Object, is_driver_wide};
use super::pci::PciFunction;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The id that the kubelet knows a device (or a share of one) by.
///
/// Its text is in memory once however many lists have it: a node of ten thousand devices has each in a dozen.
///
/// Chosen once and remembered (I6): from a UUID, serial number or address, never from an enumeration order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// Takes the text as it is.
    pub fn new(text: impl Into<String>) -> Self {
        DeviceId(Arc::from(text.into()))
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of the device of which this is a share; `None` when it is no share.
    #[must_use]
    pub fn shared(&self) -> Option<Self> {
        let (device, n) = self.0.rsplit_once("::")?;
        n.parse::<u32>().is_ok().then(|| DeviceId(Arc::from(device)))
    }

    /// Whether this may be the id of a pool, a plain number.
    #[must_use]
    pub fn is_number(&self) -> bool {
        self.0.parse::<u32>().is_ok()
    }

    /// The id of the `n`-th share of this device, `id::n`, as NVIDIA's plugin names its replicas.
    #[must_use]
    pub fn share(&self, n: u32) -> Self {
        DeviceId(Arc::from(format!("{}::{n}", self.0)))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What kind of hardware a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClass {
    /// Graphics or compute GPU; display controllers of management chips are `Other`.
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
    /// The word of the configuration file and of `discover -o json`.
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

/// A node in `/dev` that a container gets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNode {
    /// Path on the host, as the kubelet and the container runtime see it (without `--host-root`).
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Any of `r`, `w` and `m` (mknod), as the device cgroup writes them.
    pub permissions: String,
    /// Whether the device is of no use without it. A missing node that is not required is left out.
    pub required: bool,
    /// Its device number when it was found; `None` where it was not there, and for a plain file in its place.
    pub number: Option<DeviceNumber>,
}

impl DeviceNode {
    /// The node at `path`, at the same path in the container, readable and writable, required.
    pub fn at(path: impl Into<String>) -> Self {
        let host = path.into();
        DeviceNode { container: host.clone(), host, permissions: "rw".into(), required: true, number: None }
    }

    /// The same node, but the device is usable without it.
    #[must_use]
    pub fn optional(self) -> Self {
        DeviceNode { required: false, ..self }
    }
}

/// One device as discovery found it: what it is, where it is, and which nodes make it usable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The stable id.
    pub id: DeviceId,
    /// Names the physical thing while it stays where it is, so that a remembered id finds it again:
    /// `pci:0000:18:00.0/10de:2330`, `pci:0000:18:00.0/10de:2330/gi1-ci0` for a part of it, or `dev:/dev/fuse`.
    pub key: String,
    /// What it is.
    pub class: DeviceClass,
    /// The PCI function; `None` for a plain `/dev` node.
    pub pci: Option<Box<PciFunction>>,
    /// The NUMA nodes that it is near. Empty: nothing is known, and no topology is told to the kubelet.
    pub numa_nodes: Vec<u32>,
    /// Nodes that a container needs, in the order in which it gets them.
    pub nodes: Vec<DeviceNode>,
    /// Identity and description by name. What is not known has no entry.
    ///
    /// | name | of | value |
    /// | --- | --- | --- |
    /// | `uuid` | NVIDIA | of the GPU; of a MIG instance as NVML tells it, or as drivers before 470 spell it, `MIG-<GPU>/<gi>/<ci>` |
    /// | `minor`, `index` | NVIDIA GPU | number of `/dev/nvidiaN`; place among the driver's GPUs by address |
    /// | `gi`, `ci`, `gi_cap`, `ci_cap` | MIG instance | ids of GPU and compute instance; numbers of their `/dev/nvidia-caps/nvidia-capN` |
    /// | `vgpu_type` | NVIDIA virtual function | number of the vGPU type that it is set to |
    /// | `mdev_uuid`, `mdev_type`, `mdev_type_name`, `mdev_driver` | mediated device | as sysfs has them: `nvidia-754`, `NVIDIA A2-4Q` |
    /// | `unique_id`, `compute_partition`, `memory_partition` | AMD | of the GPU: identity, `cpx`, `nps4` |
    /// | `partition`, `render_minor`, `kfd_node`, `xcp` | AMD partition | its number on the GPU; of its render node; in KFD's topology; its platform device |
    /// | `afu_id`, `interface_id`, `fme_node` | Intel FPGA port | accelerator function; interface of its region; management node |
    /// | `hive` | GPU with links of its own | who it is joined with, by NVLink or XGMI: [`topology::hives`](super::topology::hives) reads it |
    /// | `mgmt` | Alveo user function | address of the card's management function |
    /// | `node_guid`, `sys_image_guid`, `link_layer` | RDMA | GUIDs; `InfiniBand` or `Ethernet` |
    /// | `link_type` | network, RDMA | `ether` or `infiniband` |
    /// | `serial`, `model`, `firmware`, `state` | NVMe, and what of it others know | as the device tells |
    /// | `subsystem_nqn`, `nsid`, `wwid`, `in_use` | NVMe, and the last of any disk | of the controller; of its only namespace, or of this one; by what the host uses the disk |
    /// | `second_path` | NVMe | id of the disk that another controller reaches too, and that has the disk's name |
    /// | `member_of` | disk | the pool that it is a member of, whether or not that is in use |
    /// | `default_route` | network, RDMA | the interface that the host's default route leads through |
    /// | `vdpa`, `vdpa_driver` | network function | `vdpa0`; `vhost_vdpa` or `virtio_vdpa` |
    /// | `iommu_group`, `group_members`, `group_blocked_by` | for guests | group; all functions in it; who keeps it from guests |
    /// | `kernel_name`, `kernel_device`, `disk` | node of `/dev` | `subsystem:name`; the kernel's device, below `/sys/devices`; its name where it is a disk or a partition |
    /// | `disk_id`, `disk_partition` | node of `/dev` | the identity of the disk (`wwid`), or of several, with commas; the number of the partition |
    /// | `stacked_on` | node of `/dev` | what a block device lies on, one object a line: `slaves` of device mapper and MD, the disk below a loop device |
    /// | `pci_parent` | node of `/dev` | address of the PCI function that its device is below |
    /// | `part`, `parent` | part of a function | `mig`, `mdev`, `partition`, `port` or `namespace`; id of the whole |
    /// | `parts` | function that is cut into parts | what they are: then the whole is not offered |
    pub attributes: Attributes,
}

impl Device {
    /// An attribute by its name.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.get(name)
    }

    /// What its record says of its health, and whether its required nodes are there.
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

    /// The nodes that it needs, and that are this device and no other. Others belong to a driver as a whole (`/dev/nvidiactl`), or to the whole of which
    /// this is a part.
    pub fn own_nodes(&self) -> impl Iterator<Item = &DeviceNode> {
        let is_of_whole = |node: &str| self.attribute("part") == Some("mig") && !node.starts_with("/dev/nvidia-caps/");
        let is_own =
            move |node: &&DeviceNode| self.class == DeviceClass::Char || !is_driver_wide(&node.container) && !is_of_whole(&node.container);
        self.nodes.iter().filter(|node| node.required).filter(is_own)
    }

    /// What a container holds that has this device, whatever it is called.
    #[must_use]
    pub fn objects(&self) -> Vec<Object> {
        let mut objects: Vec<Object> = Object::of_key(&self.key).into_iter().collect();
        // A card node is needed by few, and given where it is there.
        let cards = self.nodes.iter().filter(|node| !node.required && node.host.starts_with("/dev/dri/"));
        for node in self.own_nodes().chain(cards) {
            objects.push(Object::node(&node.host));
            objects.extend(node.number.map(Object::number));
        }
        objects.extend(self.attribute("kernel_device").map(Object::kernel_device));
        let partition = self.attribute("disk_partition").and_then(|number| number.parse().ok());
        let disks = self.attribute("disk_id").or_else(|| self.attribute("wwid")).into_iter().flat_map(|ids| ids.split(','));
        objects.extend(disks.map(|id| Object::disk(id, partition)));
        objects.extend(self.attribute("stacked_on").into_iter().flat_map(|texts| texts.lines()).map(Object::of_text));
        if self.own_nodes().any(|node| node.host.starts_with("/dev/vfio/")) {
            objects.extend(self.iommu_group().map(Object::iommu_group));
        }
        objects
    }

    /// The IOMMU group that a guest gets with it: its own, else that of its function.
    #[must_use]
    pub fn iommu_group(&self) -> Option<u32> {
        let own = self.attribute("iommu_group").and_then(|group| group.parse().ok());
        own.or_else(|| self.pci.as_ref()?.iommu_group)
    }
}
