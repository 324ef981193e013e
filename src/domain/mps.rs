//! NVIDIA's Multi-Process Service (MPS): one control daemon for each resource whose GPUs containers
//! share by it, and the limits of a share.
//!
//! The folders, the commands and their order are those of NVIDIA's plugin
//! (`cmd/mps-control-daemon/mps`).

use super::contract::{Contract, MpsControl, NvidiaOptions};
use super::device::Device;
use super::health::{Health, Reason};
use super::inventory::Offering;
use super::resource::ResourceSpec;
use super::resource_name::ResourceName;
use super::sharing::Sharing;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The number of clients that a server of MPS has for one GPU ("Volta MPS Execution Resource
/// Provisioning" in NVIDIA's manual; NVIDIA's plugin refuses more replicas).
pub const MPS_CLIENTS_MAX: u32 = 48;

/// What Holdfast sets up for the shares of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsSetup {
    /// The folder of all control daemons (`mps_root`).
    pub root: String,
    /// The GPUs as `nvidia-smi -i` takes them: by UUID, else by PCI address.
    pub gpus: BTreeSet<String>,
    /// The shares of each GPU.
    pub replicas: u32,
    /// The memory of a GPU for one share, in MiB; 0 means no limit. `None`: an equal part.
    pub memory_mib: Option<u64>,
    /// The percentage of a GPU's threads for one share. `None`: an equal part.
    pub thread_percentage: Option<u8>,
}

/// The state of the control daemon of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum MpsState {
    /// It is not known yet, or is being started.
    #[default]
    Starting,
    /// It answers.
    Ready,
    /// It does not run, or does not answer.
    Down {
        /// Why, in one sentence.
        why: String,
    },
}

/// The states of all control daemons that Holdfast runs.
pub type MpsStates = BTreeMap<ResourceName, MpsState>;

/// The options of a resource whose control daemon Holdfast runs.
#[must_use]
pub fn mps_run_here(spec: &ResourceSpec) -> Option<&NvidiaOptions> {
    match &spec.contract {
        Contract::Nvidia(options)
            if options.mps_root.is_some() && options.mps_control == MpsControl::Run =>
        {
            Some(options)
        }
        _ => None,
    }
}

impl MpsSetup {
    /// The setup of a resource; `None` if Holdfast does not run its control daemon. A GPU with a
    /// failure of its own is left out: a query of it may not return.
    #[must_use]
    pub fn of(offering: &Offering) -> Option<Self> {
        let spec = &offering.spec;
        let options = mps_run_here(spec)?;
        let is_usable = |health: Health| health.reason().is_none_or(Reason::is_of_the_list);
        let usable = offering.devices.values().filter(|offered| is_usable(offered.health));
        Some(MpsSetup {
            root: options.mps_root.as_ref()?.trim_end_matches('/').to_owned(),
            gpus: usable.filter_map(|offered| gpu(&offered.device)).collect(),
            replicas: match spec.sharing {
                Sharing::Replicas(replicas) => replicas,
                Sharing::Exclusive | Sharing::Pool(_) => 1,
            },
            memory_mib: options.mps_memory_mib,
            thread_percentage: options.mps_thread_percentage,
        })
    }

    /// The limit of a share's memory in MiB on a GPU with this memory; `None` if there is none. A
    /// GPU may not report its memory (unified memory): then an equal part is unknown.
    #[must_use]
    pub fn memory_limit(&self, total_mib: Option<u64>) -> Option<u64> {
        let part = || Some(total_mib? / u64::from(self.replicas.max(1)));
        self.memory_mib.or_else(part).filter(|limit| *limit > 0)
    }

    /// The commands for the control daemon, in their order. `gpus` are the number and the memory in
    /// MiB of each GPU.
    #[must_use]
    pub fn limits(&self, gpus: &[(u32, Option<u64>)]) -> Vec<String> {
        let memory = gpus.iter().filter_map(|(index, total)| {
            let limit = self.memory_limit(*total)?;
            Some(format!("set_default_device_pinned_mem_limit {index} {limit}M"))
        });
        let part = || u8::try_from(100 / self.replicas.clamp(1, 100)).unwrap_or(100);
        let threads = self.thread_percentage.unwrap_or_else(part);
        memory.chain([format!("set_default_active_thread_percentage {threads}")]).collect()
    }
}

/// A whole GPU, as the driver's programs take it.
fn gpu(device: &Device) -> Option<String> {
    let address = device.pci.as_ref().map(|pci| pci.address.to_string());
    device.attribute("uuid").map(str::to_owned).or(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(replicas: u32) -> MpsSetup {
        MpsSetup {
            root: "/run/nvidia/mps".into(),
            gpus: BTreeSet::new(),
            replicas,
            memory_mib: None,
            thread_percentage: None,
        }
    }

    #[test]
    fn a_share_has_an_equal_part_unless_the_configuration_sets_one() {
        let gpus = [(0, Some(81_559)), (3, None), (1, Some(24_576))];
        assert_eq!(
            setup(10).limits(&gpus),
            [
                "set_default_device_pinned_mem_limit 0 8155M",
                "set_default_device_pinned_mem_limit 1 2457M",
                "set_default_active_thread_percentage 10",
            ]
        );
        assert_eq!(setup(3).limits(&[]), ["set_default_active_thread_percentage 33"]);
        assert_eq!(
            setup(1).limits(&gpus[..1]),
            [
                "set_default_device_pinned_mem_limit 0 81559M",
                "set_default_active_thread_percentage 100"
            ]
        );
        let chosen = MpsSetup { memory_mib: Some(512), thread_percentage: Some(40), ..setup(4) };
        assert_eq!(
            chosen.limits(&gpus[1..2]),
            [
                "set_default_device_pinned_mem_limit 3 512M",
                "set_default_active_thread_percentage 40"
            ]
        );
        let unlimited = MpsSetup { memory_mib: Some(0), ..setup(4) };
        assert_eq!(unlimited.limits(&gpus), ["set_default_active_thread_percentage 25"]);
        // More shares than megabytes: a limit of nothing would let no client start.
        assert_eq!(setup(40).memory_limit(Some(30)), None);
    }
}
