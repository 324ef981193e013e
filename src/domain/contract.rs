//! Contracts: the formats of an Allocate response, and their options.
//!
//! Each contract except [`ContractKind::Generic`] is compatible with another device plugin that
//! Holdfast replaces. The options have the names that this plugin uses, so that an operator can
//! copy them.

use super::device::DeviceClass;
use super::nvidia_feature::{NvidiaFeature, Switch};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The kinds of contract, by the word in the configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContractKind {
    /// The device's nodes, and the configured environment and mounts.
    Generic,
    /// NVIDIA's k8s-device-plugin: `NVIDIA_VISIBLE_DEVICES` or CDI names, for the NVIDIA container
    /// toolkit.
    Nvidia,
    /// ROCm's k8s-device-plugin.
    Amd,
    /// The GPU plugin of Intel's device plugins.
    IntelGpu,
    /// The FPGA plugin of Intel's device plugins.
    IntelFpga,
    /// Xilinx' FPGA as a service.
    Xilinx,
    /// The SR-IOV network device plugin.
    Sriov,
    /// Mellanox' shared RDMA device plugin.
    RdmaShared,
    /// The host-device handlers of KubeVirt and Harvester.
    Kubevirt,
}

impl ContractKind {
    /// The word in the configuration file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ContractKind::Generic => "generic",
            ContractKind::Nvidia => "nvidia",
            ContractKind::Amd => "amd",
            ContractKind::IntelGpu => "intel-gpu",
            ContractKind::IntelFpga => "intel-fpga",
            ContractKind::Xilinx => "xilinx",
            ContractKind::Sriov => "sriov",
            ContractKind::RdmaShared => "rdma-shared",
            ContractKind::Kubevirt => "kubevirt",
        }
    }

    /// The default contract of a resource: that of the vendor's own plugin, if the resource selects
    /// one vendor. Devices bound to `vfio-pci` are for guests, and the vendor's plugin does not
    /// support them.
    #[must_use]
    pub fn usual(class: DeviceClass, vendors: &[u16], drivers: &[String]) -> Self {
        let is_for_guests = drivers == ["vfio-pci"];
        match (class, vendors) {
            _ if is_for_guests => ContractKind::Generic,
            (DeviceClass::Gpu, [0x10de]) => ContractKind::Nvidia,
            (DeviceClass::Gpu, [0x1002]) => ContractKind::Amd,
            (DeviceClass::Gpu, [0x8086]) => ContractKind::IntelGpu,
            (DeviceClass::Fpga, [0x8086]) => ContractKind::IntelFpga,
            (DeviceClass::Fpga, [0x10ee]) => ContractKind::Xilinx,
            _ => ContractKind::Generic,
        }
    }
}

impl fmt::Display for ContractKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A contract with its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Contract {
    /// [`ContractKind::Generic`].
    Generic,
    /// [`ContractKind::Nvidia`].
    Nvidia(NvidiaOptions),
    /// [`ContractKind::Amd`].
    Amd,
    /// [`ContractKind::IntelGpu`].
    IntelGpu(IntelGpuOptions),
    /// [`ContractKind::IntelFpga`].
    IntelFpga(IntelFpgaOptions),
    /// [`ContractKind::Xilinx`].
    Xilinx(XilinxOptions),
    /// [`ContractKind::Sriov`].
    Sriov(SriovOptions),
    /// [`ContractKind::RdmaShared`].
    RdmaShared,
    /// [`ContractKind::Kubevirt`].
    Kubevirt,
}

impl Contract {
    /// The kind, without the options.
    #[must_use]
    pub fn kind(&self) -> ContractKind {
        match self {
            Contract::Generic => ContractKind::Generic,
            Contract::Nvidia(_) => ContractKind::Nvidia,
            Contract::Amd => ContractKind::Amd,
            Contract::IntelGpu(_) => ContractKind::IntelGpu,
            Contract::IntelFpga(_) => ContractKind::IntelFpga,
            Contract::Xilinx(_) => ContractKind::Xilinx,
            Contract::Sriov(_) => ContractKind::Sriov,
            Contract::RdmaShared => ContractKind::RdmaShared,
            Contract::Kubevirt => ContractKind::Kubevirt,
        }
    }
}

/// With the default options.
impl From<ContractKind> for Contract {
    fn from(kind: ContractKind) -> Self {
        match kind {
            ContractKind::Generic => Contract::Generic,
            ContractKind::Nvidia => Contract::Nvidia(NvidiaOptions::default()),
            ContractKind::Amd => Contract::Amd,
            ContractKind::IntelGpu => Contract::IntelGpu(IntelGpuOptions::default()),
            ContractKind::IntelFpga => Contract::IntelFpga(IntelFpgaOptions::default()),
            ContractKind::Xilinx => Contract::Xilinx(XilinxOptions::default()),
            ContractKind::Sriov => Contract::Sriov(SriovOptions::default()),
            ContractKind::RdmaShared => Contract::RdmaShared,
            ContractKind::Kubevirt => Contract::Kubevirt,
        }
    }
}

/// How the response passes CDI names to the container runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CdiAnswer {
    /// In the field of the API (kubelet 1.28 and newer).
    Cri,
    /// In an annotation of the container.
    Annotations,
}

/// How the response passes the GPUs of a container to NVIDIA's container toolkit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceListStrategy {
    /// In the variable `NVIDIA_VISIBLE_DEVICES`.
    #[serde(rename = "envvar")]
    EnvVar,
    /// As mounts of `/dev/null`, which a pod cannot request.
    VolumeMounts,
    /// As CDI names in an annotation.
    CdiAnnotations,
    /// As CDI names in the field of the API (kubelet 1.28 and newer).
    CdiCri,
}

impl DeviceListStrategy {
    /// Whether it uses CDI names.
    #[must_use]
    pub fn is_cdi(self) -> bool {
        matches!(self, DeviceListStrategy::CdiAnnotations | DeviceListStrategy::CdiCri)
    }
}

/// The name of a GPU in the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceIdStrategy {
    /// Its UUID.
    Uuid,
    /// Its number, in the order of the PCI addresses.
    Index,
}

/// Who runs the control daemon of a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MpsControl {
    /// Holdfast. A control daemon that already answers is taken over.
    #[default]
    Run,
    /// Another program, such as NVIDIA's own DaemonSet. Holdfast neither starts nor asks it.
    External,
}

/// The table `nvidia` of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NvidiaOptions {
    /// The ways to pass the devices. Several can be combined.
    pub device_list_strategy: Vec<DeviceListStrategy>,
    /// The name of a GPU in the response.
    pub device_id_strategy: DeviceIdStrategy,
    /// Whether the response also contains the device nodes. Without them the kubelet's CPU manager
    /// would remove the nodes that only the runtime added.
    pub pass_device_specs: bool,
    /// The vendor in CDI names: `nvidia.com` also in files of `nvidia-ctk cdi generate`.
    pub cdi_vendor: String,
    /// The prefix of the key of the CDI annotation.
    pub cdi_annotation_prefix: String,
    /// `NVIDIA_GDRCOPY=enabled`.
    pub gdrcopy: Switch,
    /// `NVIDIA_GDS=enabled`.
    pub gds: Switch,
    /// `NVIDIA_MOFED=enabled`.
    pub mofed: Switch,
    /// IMEX channels for every container.
    pub imex_channels: Vec<u32>,
    /// The directory of the control daemons of MPS, with their pipes and logs; `None` disables MPS.
    pub mps_root: Option<String>,
    /// Who runs the control daemon of this resource.
    pub mps_control: MpsControl,
    /// The memory of a GPU for one share by MPS, in MiB; 0 means no limit. `None`: an equal part.
    pub mps_memory_mib: Option<u64>,
    /// The percentage of a GPU's threads for one share by MPS. `None`: an equal part.
    pub mps_thread_percentage: Option<u8>,
}

impl Default for NvidiaOptions {
    fn default() -> Self {
        NvidiaOptions {
            device_list_strategy: vec![DeviceListStrategy::EnvVar],
            device_id_strategy: DeviceIdStrategy::Uuid,
            pass_device_specs: false,
            cdi_vendor: "nvidia.com".into(),
            cdi_annotation_prefix: "cdi.k8s.io/".into(),
            gdrcopy: Switch::Auto,
            gds: Switch::Auto,
            mofed: Switch::Auto,
            imex_channels: Vec::new(),
            mps_root: None,
            mps_control: MpsControl::Run,
            mps_memory_mib: None,
            mps_thread_percentage: None,
        }
    }
}

impl NvidiaOptions {
    /// Whether an answer has CDI names.
    #[must_use]
    pub fn has_cdi_names(&self) -> bool {
        self.device_list_strategy.iter().any(|strategy| strategy.is_cdi())
    }

    /// Whether containers get a feature.
    #[must_use]
    pub fn switch(&self, feature: NvidiaFeature) -> Switch {
        match feature {
            NvidiaFeature::GdrCopy => self.gdrcopy,
            NvidiaFeature::Gds => self.gds,
            NvidiaFeature::Mofed => self.mofed,
        }
    }
}

/// The links of `/dev/dri/by-path` for a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ByPath {
    /// The links of its own devices.
    #[default]
    Single,
    /// The whole folder.
    All,
    /// No links.
    None,
}

/// The table `intel-gpu` of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IntelGpuOptions {
    /// The links of `/dev/dri/by-path` for a container.
    pub by_path: ByPath,
}

/// The nodes of an Intel FPGA for a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FpgaMode {
    /// The ports, with the function that is programmed into them.
    #[default]
    Af,
    /// The ports. Intel's hook programs the function that the container requests.
    Region,
    /// The ports and the management node: the container programs the card itself.
    #[serde(rename = "regiondevel")]
    RegionDevel,
}

/// The table `intel-fpga` of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IntelFpgaOptions {
    /// The nodes of a card for a container.
    pub mode: FpgaMode,
}

/// The table `xilinx` of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct XilinxOptions {
    /// Whether a container also gets the card's management node, if it exists, as with Xilinx'
    /// plugin.
    pub management_node: bool,
}

impl Default for XilinxOptions {
    fn default() -> Self {
        XilinxOptions { management_node: true }
    }
}

/// The driver of a vDPA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VdpaType {
    /// `vhost_vdpa`: the container gets the node.
    Vhost,
    /// `virtio_vdpa`: a network interface, which a CNI plugin moves.
    Virtio,
}

/// The table `sriov` of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SriovOptions {
    /// Whether the container gets the RDMA nodes of its functions. The default is true in the class
    /// `rdma`.
    pub rdma: Option<bool>,
    /// Whether the container gets `/dev/vhost-net` and `/dev/net/tun`.
    pub vhost_net: bool,
    /// The kind of vDPA device of its functions.
    pub vdpa: Option<VdpaType>,
    /// Additional content of `PCIDEVICE_…_INFO`, by PCI address, or `*` for every function.
    pub additional_info: BTreeMap<String, BTreeMap<String, String>>,
}
