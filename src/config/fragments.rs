//! The keys of one file as serde types: every key is optional, every unknown key is an error.

use super::path_entries::{Path, PathOrGroup};
use crate::domain::{
    AtKubeletStart, CdiAnswer, ContractKind, Durability, IntelFpgaOptions, IntelGpuOptions,
    NvidiaOptions, PerContainer, Reason, Refuse, SriovOptions, WhenNotDurable, XilinxOptions,
};
use crate::domain::{MigStrategy, topology::Placement};
use serde::Deserialize;
use serde::de::{
    Deserializer, Error, MapAccess, Unexpected, Visitor, value::MapAccessDeserializer,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Fragment {
    pub(super) ledger: Ledger,
    pub(super) telemetry: Telemetry,
    pub(super) kubelet: Kubelet,
    pub(super) cdi: Folder,
    pub(super) device_info: Folder,
    pub(super) health: Health,
    pub(super) nvidia: Nvidia,
    pub(super) labels: Labels,
    pub(super) cluster: Cluster,
    pub(super) dra: Dra,
    pub(super) resource: Vec<Resource>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Ledger {
    pub(super) durability: Option<Durability>,
    /// How long a released grant stays in the history, such as `90d`.
    pub(super) history_age: Option<String>,
    /// The limit of the history: its size, such as `256MiB`, or a number of grants.
    pub(super) history_size: Option<HistorySize>,
    pub(super) refuse: Option<Refuse>,
    pub(super) when_not_durable: Option<WhenNotDurable>,
}

/// The limit of the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HistorySize {
    Grants(u64),
    Bytes(String),
}

/// Implemented by hand: serde's `untagged` answers a misspelt key with "did not match any variant".
impl<'de> Deserialize<'de> for HistorySize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeOrCount;

        impl Visitor<'_> for SizeOrCount {
            type Value = HistorySize;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a size such as \"256MiB\", or a number of grants")
            }

            fn visit_u64<E: Error>(self, grants: u64) -> Result<HistorySize, E> {
                Ok(HistorySize::Grants(grants))
            }

            fn visit_i64<E: Error>(self, grants: i64) -> Result<HistorySize, E> {
                u64::try_from(grants)
                    .map(HistorySize::Grants)
                    .map_err(|_| E::invalid_value(Unexpected::Signed(grants), &self))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<HistorySize, E> {
                Ok(HistorySize::Bytes(text.to_owned()))
            }
        }

        deserializer.deserialize_any(SizeOrCount)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Telemetry {
    /// An address and port, or `off`.
    pub(super) listen: Option<String>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) tls_cert: Option<PathBuf>,
    pub(super) tls_key: Option<PathBuf>,
    pub(super) tls_client_ca: Option<PathBuf>,
    /// `kubernetes`, or `off`.
    pub(super) authorize: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Kubelet {
    pub(super) pod_resources_socket: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Health {
    /// A time such as `10s`.
    pub(super) poll: Option<String>,
    pub(super) fatal_xids: Option<BTreeSet<u32>>,
    pub(super) ignore: Option<BTreeSet<Reason>>,
    pub(super) at_kubelet_start: Option<AtKubeletStart>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Nvidia {
    /// `auto`, `off`, or the path of the library.
    pub(super) nvml: Option<String>,
    pub(super) mig_strategy: Option<MigStrategy>,
    pub(super) events: Option<bool>,
    /// `auto`, or an absolute path.
    pub(super) driver_root: Option<String>,
    /// The same.
    pub(super) dev_root: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Labels {
    /// The folder of feature files, or `off`.
    pub(super) features_d: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Cluster {
    /// The path of a file, or `api`.
    pub(super) node_labels: Option<String>,
    /// `auto`, or the path of a kubeconfig.
    pub(super) credentials: Option<String>,
    pub(super) events: Option<bool>,
    pub(super) node_condition: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Dra {
    pub(super) enabled: Option<bool>,
    pub(super) vendor_attributes: Option<bool>,
    pub(super) device_metadata: Option<bool>,
    pub(super) claim_status: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Folder {
    pub(super) directory: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Resource {
    pub(super) name: String,
    /// Already expanded: the other keys have its values.
    #[serde(rename = "preset")]
    _preset: Option<String>,
    /// `plugin` or `dra`.
    pub(super) api: Option<String>,
    pub(super) class: Class,
    pub(super) contract: Option<ContractKind>,
    // The options of a contract: a table with the name of the contract.
    pub(super) nvidia: Option<NvidiaOptions>,
    #[serde(rename = "intel-gpu")]
    pub(super) intel_gpu: Option<IntelGpuOptions>,
    #[serde(rename = "intel-fpga")]
    pub(super) intel_fpga: Option<IntelFpgaOptions>,
    pub(super) xilinx: Option<XilinxOptions>,
    pub(super) sriov: Option<SriovOptions>,
    #[serde(default)]
    pub(super) cdi: Vec<CdiAnswer>,
    #[serde(default)]
    pub(super) select: Select,
    #[serde(default)]
    pub(super) or: Vec<Select>,
    pub(super) exclude: Option<Select>,
    #[serde(default)]
    pub(super) paths: Vec<PathOrGroup>,
    #[serde(default)]
    pub(super) nodes: Vec<Path>,
    pub(super) replicas: Option<u32>,
    pub(super) pool: Option<u32>,
    #[serde(default)]
    pub(super) capacity: bool,
    pub(super) per_container: Option<PerContainer>,
    pub(super) placement: Option<Placement>,
    pub(super) topology: Option<bool>,
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) mounts: Vec<Mount>,
    pub(super) before_start: Option<Hook>,
    pub(super) after_release: Option<Hook>,
    pub(super) check: Option<Check>,
}

/// The classes that can be offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Class {
    Gpu,
    Fpga,
    Rdma,
    Nic,
    /// `nic` and `rdma` together.
    Network,
    Nvme,
    Accelerator,
    Char,
    Other,
    /// Every PCI function, of any class.
    Pci,
}

/// The link layer of a network function.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LinkType {
    Ether,
    Infiniband,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Select {
    pub(super) vendor: Vec<String>,
    pub(super) device: Vec<String>,
    pub(super) driver: Vec<String>,
    pub(super) address: Vec<String>,
    pub(super) vf: Option<bool>,
    pub(super) id: Vec<String>,
    /// An interface or an address, and numbers of virtual functions: `ens1f0#0-3,7`.
    pub(super) pf: Vec<String>,
    pub(super) link_type: Vec<LinkType>,
    pub(super) model: Vec<String>,
    pub(super) uuid: Vec<String>,
    pub(super) numa_node: Vec<u32>,
    pub(super) iommu_group: Vec<u32>,
    pub(super) mdev_type: Vec<String>,
    pub(super) mig_profile: Vec<String>,
    pub(super) uniform: bool,
    pub(super) part: Option<bool>,
    pub(super) interface: Vec<String>,
    /// Globs by the names of attributes.
    pub(super) attribute: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mount {
    pub(super) host: String,
    pub(super) container: String,
    #[serde(default)]
    pub(super) read_only: bool,
}

/// A hook: a word, or a command with its time limit.
#[derive(Debug)]
pub(super) enum Hook {
    None,
    Reset,
    Command { command: Vec<String>, timeout: Option<String> },
}

/// A periodic check command.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Check {
    pub(super) command: Vec<String>,
    /// Times such as `10s`.
    pub(super) timeout: Option<String>,
    pub(super) every: Option<String>,
}

/// Implemented by hand: serde's `untagged` answers a misspelt key with "did not match any variant".
impl<'de> Deserialize<'de> for Hook {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            command: Vec<String>,
            timeout: Option<String>,
        }

        struct WordOrTable;

        impl<'de> Visitor<'de> for WordOrTable {
            type Value = Hook;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("`none`, `reset`, or a table such as { command = [\"/usr/bin/wipe\", \"--all\"], timeout = \"30s\" }")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Hook, E> {
                match text {
                    "none" => Ok(Hook::None),
                    "reset" => Ok(Hook::Reset),
                    other => Err(E::unknown_variant(other, &["none", "reset"])),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Hook, A::Error> {
                let Table { command, timeout } =
                    Table::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Hook::Command { command, timeout })
            }
        }

        deserializer.deserialize_any(WordOrTable)
    }
}
