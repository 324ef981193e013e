//! What labels describe of a node with GPUs of NVIDIA's driver.

use super::nvml::{GpuDescription, MigAttributes, MigPlace};
use super::pci::PciAddress;
use std::fmt::Write as _;

/// The driver and its GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaNode {
    /// The driver's version, `550.54.15`.
    pub driver: Option<String>,
    /// The product name of the machine, from its firmware.
    pub machine: Option<String>,
    /// The GPUs, without excluded ones.
    pub gpus: Vec<NvidiaGpu>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvidiaGpu {
    /// Its address.
    pub address: PciAddress,
    /// Its model, `NVIDIA H100 80GB HBM3`.
    pub model: Option<String>,
    /// Its PCI class, 24 bits.
    pub class: Option<u32>,
    /// Whether it is known to be in MIG mode.
    pub in_mig_mode: bool,
    /// Its MIG instances, in the order of their places.
    pub instances: Vec<NvidiaInstance>,
    /// NVML's description; `None` if it has not answered.
    pub description: Option<GpuDescription>,
}

/// One MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvidiaInstance {
    /// Its place.
    pub place: MigPlace,
    /// Its profile; `None` if NVML has not answered.
    pub profile: Option<String>,
    /// Its size; `None` if NVML has not answered, or does not know it.
    pub attributes: Option<MigAttributes>,
}

impl NvidiaNode {
    /// Whether NVML has described every GPU.
    #[must_use]
    pub fn is_described(&self) -> bool {
        self.gpus.iter().all(|gpu| gpu.description.is_some())
    }

    /// The node without NVML's answers.
    #[must_use]
    pub fn without_nvml(&self) -> Self {
        let unknown = |it: &NvidiaInstance| NvidiaInstance {
            place: it.place,
            profile: None,
            attributes: None,
        };
        let gpu = |gpu: &NvidiaGpu| NvidiaGpu {
            in_mig_mode: !gpu.instances.is_empty(),
            instances: gpu.instances.iter().map(unknown).collect(),
            description: None,
            ..gpu.clone()
        };
        NvidiaNode { gpus: self.gpus.iter().map(gpu).collect(), ..self.clone() }
    }

    /// The facts that do not come from NVML, as a text. NVML's former answers fit a node with an
    /// equal text.
    #[must_use]
    pub fn hardware(&self) -> String {
        let unknown = "-".to_owned();
        let mut text = format!(
            "{};{}",
            self.driver.as_ref().unwrap_or(&unknown),
            self.machine.as_ref().unwrap_or(&unknown)
        );
        for NvidiaGpu { address, model, class, instances, .. } in &self.gpus {
            let model = model.as_ref().unwrap_or(&unknown);
            // Writes to a string do not fail.
            let _ = write!(text, ";{address} {model} {:06x}", class.unwrap_or_default());
            for (gi, ci) in instances.iter().map(|instance| instance.place) {
                let _ = write!(text, " {gi}/{ci}");
            }
        }
        text
    }
}
