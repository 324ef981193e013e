//! What only NVIDIA's management library (NVML) tells of a node's GPUs, and what it is asked for.

use super::Gather;
use super::pci::PciAddress;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A MIG instance by the numbers of its GPU instance and of its compute instance, which it has for as long as it exists.
pub type MigPlace = (u32, u32);

/// What the driver's own files leave open: GPUs that lack a UUID or are cut into MIG instances, with these instances.
/// Empty: NVML is not needed.
pub type NvmlQuestion = BTreeMap<PciAddress, BTreeSet<MigPlace>>;

/// Which library is asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NvmlLibrary {
    /// The one that is found where drivers put it.
    #[default]
    Auto,
    /// The one at this path, as the daemon sees it.
    At(PathBuf),
    /// None.
    Off,
}

/// What NVML has told of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmlGpu {
    /// `GPU-<uuid>`.
    pub uuid: Option<String>,
    /// The name of each MIG instance, `MIG-<uuid>`.
    pub instances: BTreeMap<MigPlace, String>,
}

/// What NVML has told, by the GPUs' addresses. A value like the text of a file: it may be older than what it speaks of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmlSnapshot {
    /// The GPUs.
    pub gpus: BTreeMap<PciAddress, NvmlGpu>,
}

impl NvmlSnapshot {
    /// The UUID of a GPU.
    #[must_use]
    pub fn uuid(&self, gpu: PciAddress) -> Option<&str> {
        self.gpus.get(&gpu)?.uuid.as_deref()
    }

    /// The name of a MIG instance.
    #[must_use]
    pub fn instance(&self, gpu: PciAddress, place: MigPlace) -> Option<&str> {
        self.gpus.get(&gpu)?.instances.get(&place).map(String::as_str)
    }

    /// What is known after an answer to `question`: the answer, and where it says nothing what was known before. What is not
    /// asked for any more is forgotten: if it comes back, it may be another thing.
    #[must_use]
    pub fn renewed(&self, answer: NvmlSnapshot, question: &NvmlQuestion) -> NvmlSnapshot {
        let of = |(gpu, places): (&PciAddress, &BTreeSet<MigPlace>)| {
            let name = |place: &MigPlace| answer.instance(*gpu, *place).or_else(|| self.instance(*gpu, *place)).map(str::to_owned);
            let uuid = answer.uuid(*gpu).or_else(|| self.uuid(*gpu)).map(str::to_owned);
            let instances = places.iter().filter_map(|place| Some((*place, name(place)?))).gather();
            (*gpu, NvmlGpu { uuid, instances })
        };
        NvmlSnapshot { gpus: question.iter().map(of).gather() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_lacks_something_takes_nothing_away_but_what_is_gone_is_forgotten() {
        let gpu: PciAddress = "0000:08:00.0".parse().unwrap();
        let told = |names: &[(MigPlace, &str)]| {
            let instances = names.iter().map(|(place, name)| (*place, (*name).to_owned())).collect();
            NvmlSnapshot { gpus: [(gpu, NvmlGpu { uuid: None, instances })].into() }
        };
        let question = NvmlQuestion::from([(gpu, BTreeSet::from([(1, 0), (2, 0)]))]);
        let before = told(&[((1, 0), "MIG-a"), ((2, 0), "MIG-b"), ((3, 0), "MIG-c")]);
        let after = before.renewed(told(&[((2, 0), "MIG-new")]), &question);
        assert_eq!(after, told(&[((1, 0), "MIG-a"), ((2, 0), "MIG-new")]));
        assert_eq!(before.renewed(NvmlSnapshot::default(), &NvmlQuestion::new()), NvmlSnapshot::default());
    }
}
