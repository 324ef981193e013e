//! How each plugin is recognised: the image and the program of its container, and the keys of its
//! file.

use clap::ValueEnum;

/// The plugins whose files can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// NVIDIA/k8s-device-plugin: its YAML, `version: v1`.
    Nvidia,
    /// k8snetworkplumbingwg/sriov-network-device-plugin: `config.json`.
    Sriov,
    /// Mellanox/k8s-rdma-shared-dev-plugin: `config.json`.
    RdmaShared,
    /// squat/generic-device-plugin: its YAML, or its `--device` flags.
    Generic,
    /// smarter-device-manager: `conf.yaml`.
    Smarter,
    /// GKE's own plugin for NVIDIA's GPUs: `gpu_config.json`.
    Gke,
    /// Intel's GPU plugin: its flags, or a GpuDevicePlugin object.
    IntelGpu,
    /// KubeVirt's host devices: `permittedHostDevices` of its object.
    Kubevirt,
    /// AMD's GPU plugin: its flags, or a DeviceConfig object.
    Amd,
    /// Akri's rules for udev: a Configuration object.
    Akri,
}

/// The marks of a plugin's container and of its file.
pub(super) struct Facts {
    /// Part of its image's name.
    pub(super) image: &'static str,
    /// Its program.
    pub(super) program: &'static str,
    /// Flags without a following value.
    pub(super) booleans: &'static [&'static str],
    /// The flags and the variable that name its file.
    pub(super) file: (&'static [&'static str], &'static str),
    /// A file of the plugin begins with one of these keys.
    pub(super) keys: &'static [&'static str],
    /// Other Kubernetes objects that contain the file: kind and path.
    pub(super) objects: &'static [(&'static str, &'static [&'static str])],
}

const INTEL_GPU: Facts = Facts {
    image: "intel-gpu-plugin",
    program: "intel_gpu_device_plugin",
    booleans: &["enable-monitoring", "health-management", "wsl"],
    file: (&[], ""),
    keys: &[
        "sharedDevNum",
        "preferredAllocationPolicy",
        "allocationPolicy",
        "allowIDs",
        "denyIDs",
        "bypathMode",
        "enableMonitoring",
    ],
    objects: &[("GpuDevicePlugin", &["spec"])],
};

const KUBEVIRT: Facts = Facts {
    image: "virt-handler",
    program: "virt-handler",
    booleans: &[],
    file: (&[], ""),
    keys: &["permittedHostDevices", "pciHostDevices", "mediatedDevices", "usb"],
    objects: &[("KubeVirt", &["spec", "configuration"]), ("HyperConverged", &["spec"])],
};

const AMD: Facts = Facts {
    image: "rocm/k8s-device-plugin",
    program: "k8s-device-plugin",
    booleans: &["logtostderr", "alsologtostderr"],
    file: (&[], ""),
    keys: &["resource_naming_strategy", "devicePlugin", "driver"],
    objects: &[("DeviceConfig", &["spec"])],
};

const AKRI: Facts = Facts {
    image: "akri/agent",
    program: "agent",
    booleans: &[],
    file: (&[], ""),
    keys: &["spec"],
    objects: &[("Configuration", &[])],
};

pub(super) fn facts(peer: Peer) -> Facts {
    match peer {
        Peer::Nvidia => Facts {
            image: "k8s-device-plugin",
            program: "nvidia-device-plugin",
            booleans: &[
                "fail-on-init-error",
                "pass-device-specs",
                "gdrcopy-enabled",
                "gds-enabled",
                "mofed-enabled",
                "imex-required",
            ],
            file: (&["config-file"], "CONFIG_FILE"),
            keys: &["version", "flags", "sharing", "resources", "imex"],
            objects: &[],
        },
        Peer::Sriov => Facts {
            image: "sriov-network-device-plugin",
            program: "sriovdp",
            booleans: &["use-cdi", "logtostderr", "alsologtostderr"],
            file: (&["config-file"], ""),
            keys: &["resourceList"],
            objects: &[("NicClusterPolicy", &["spec", "sriovDevicePlugin", "config"])],
        },
        Peer::RdmaShared => Facts {
            image: "k8s-rdma-shared-dev-plugin",
            program: "k8s-rdma-shared-dp",
            booleans: &["use-cdi", "version", "v"],
            file: (&["config-file"], ""),
            keys: &["configList"],
            objects: &[("NicClusterPolicy", &["spec", "rdmaSharedDevicePlugin", "config"])],
        },
        Peer::Generic => Facts {
            image: "generic-device-plugin",
            program: "generic-device-plugin",
            booleans: &["version"],
            file: (&["config"], "CONFIG"),
            keys: &["devices", "device", "domain", "groups"],
            objects: &[],
        },
        Peer::Smarter => Facts {
            image: "smarter-device-manager",
            program: "smarter-device-management",
            booleans: &["logtostderr", "alsologtostderr"],
            file: (&["config"], ""),
            keys: &["devicematch"],
            objects: &[],
        },
        Peer::Gke => Facts {
            image: "nvidia-gpu-device-plugin",
            program: "nvidia-gpu-device-plugin",
            booleans: &[
                "enable-container-gpu-metrics",
                "enable-health-monitoring",
                "publish-driver-version",
                "logtostderr",
                "alsologtostderr",
            ],
            file: (&["gpu-config"], ""),
            keys: &[
                "GPUPartitionSize",
                "GPUSharingConfig",
                "MaxTimeSharedClientsPerGPU",
                "HealthCriticalXid",
            ],
            objects: &[],
        },
        Peer::IntelGpu => INTEL_GPU,
        Peer::Kubevirt => KUBEVIRT,
        Peer::Amd => AMD,
        Peer::Akri => AKRI,
    }
}
