//! Facts about GPUs that only NVIDIA's management library (NVML) has, and the query for them.

use super::nvlink::{self, NvLinks};
use super::pci::PciAddress;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A MIG instance, by the numbers of its GPU instance and its compute instance. They stay the same
/// while the instance exists.
pub type MigPlace = (u32, u32);

/// The query to NVML: the facts that the driver's own files do not contain. Empty: NVML is not
/// needed.
pub type NvmlQuestion = BTreeMap<PciAddress, NvmlAsked>;

/// The query for one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmlAsked {
    /// Its UUID, which is unknown, or is needed to query its instances.
    pub uuid: bool,
    /// The names of these MIG instances.
    pub instances: BTreeSet<MigPlace>,
    /// Its NVLink connections to the other GPUs with this flag.
    pub links: bool,
    /// Whether it is in MIG mode. A GPU in MIG mode cannot be used as a whole.
    pub mig_mode: bool,
}

impl NvmlAsked {
    /// A query for its UUID, and for the names of these instances.
    #[must_use]
    pub fn names(instances: impl Into<BTreeSet<MigPlace>>) -> Self {
        NvmlAsked { uuid: true, instances: instances.into(), ..NvmlAsked::default() }
    }
}

/// Whether the query contains names. Without a name a device is not offered, or has a less stable
/// name. Links are only a preference, and the driver's files show MIG mode once there are
/// instances.
#[must_use]
pub fn asks_for_names(question: &NvmlQuestion) -> bool {
    question.values().any(|asked| asked.uuid)
}

/// The library to query.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NvmlLibrary {
    /// The library at the driver's usual paths.
    #[default]
    Auto,
    /// The library at this path, as the daemon sees it.
    At(PathBuf),
    /// No library.
    Off,
}

/// NVML's answer for one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmlGpu {
    /// `GPU-<uuid>`.
    pub uuid: Option<String>,
    /// The name of each MIG instance, `MIG-<uuid>`.
    pub instances: BTreeMap<MigPlace, String>,
    /// Its links; `None` if NVML has not returned them.
    pub links: Option<NvLinks>,
    /// Whether it is in MIG mode; `None` if NVML has not returned it.
    pub mig_mode: Option<bool>,
}

/// NVML's answers, by the GPUs' addresses. Like the text of a file, the value may be older than the
/// hardware's state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmlSnapshot {
    /// The GPUs.
    pub gpus: BTreeMap<PciAddress, NvmlGpu>,
}

impl NvmlSnapshot {
    /// No answers yet.
    #[must_use]
    pub const fn empty() -> Self {
        NvmlSnapshot { gpus: BTreeMap::new() }
    }

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

    /// Whether a GPU is known to be in MIG mode.
    #[must_use]
    pub fn is_in_mig_mode(&self, gpu: PciAddress) -> bool {
        self.gpus.get(&gpu).is_some_and(|told| told.mig_mode == Some(true))
    }

    /// Whether a GPU of the query is in MIG mode and the query contains none of its instances. The
    /// GPU is offered once it has left that mode.
    #[must_use]
    pub fn keeps_whole_back(&self, question: &NvmlQuestion) -> bool {
        question.iter().any(|(gpu, asked)| asked.instances.is_empty() && self.is_in_mig_mode(*gpu))
    }

    /// The hive of each GPU that is in one, as [`topology::hives`](super::topology::hives) reads
    /// it.
    #[must_use]
    pub fn hives(&self) -> BTreeMap<PciAddress, String> {
        nvlink::hives(&self.gpus.iter().filter_map(|(gpu, told)| Some((*gpu, told.links.as_ref()?))).collect())
    }

    /// Whether links of the query are unknown or inactive, or a MIG mode is unknown.
    #[must_use]
    pub fn leaves_open(&self, question: &NvmlQuestion) -> bool {
        let nothing = NvmlGpu::default();
        question.iter().any(|(gpu, asked)| {
            let told = self.gpus.get(gpu).unwrap_or(&nothing);
            let has_links = || told.links.as_ref().is_some_and(|links| links.down == 0);
            asked.links && !has_links() || asked.mig_mode && told.mig_mode.is_none()
        })
    }

    /// The snapshot after an answer to `question`. A fact that is missing in the answer stays as it
    /// was known before. A fact that is no longer in the query is forgotten: if it returns, it may
    /// be of other hardware.
    #[must_use]
    pub fn renewed(&self, answer: NvmlSnapshot, question: &NvmlQuestion) -> NvmlSnapshot {
        let links = |of: &NvmlSnapshot, gpu: &PciAddress| of.gpus.get(gpu).and_then(|gpu| gpu.links.clone());
        let mig_mode = |of: &NvmlSnapshot, gpu: &PciAddress| of.gpus.get(gpu).and_then(|gpu| gpu.mig_mode);
        let of = |(gpu, asked): (&PciAddress, &NvmlAsked)| {
            let name = |place: &MigPlace| answer.instance(*gpu, *place).or_else(|| self.instance(*gpu, *place)).map(str::to_owned);
            let uuid = answer.uuid(*gpu).or_else(|| self.uuid(*gpu)).map(str::to_owned);
            let instances = asked.instances.iter().filter_map(|place| Some((*place, name(place)?))).collect();
            let links = asked.links.then(|| links(&answer, gpu).or_else(|| links(self, gpu))).flatten();
            let mig_mode = asked.mig_mode.then(|| mig_mode(&answer, gpu).or_else(|| mig_mode(self, gpu))).flatten();
            let known = NvmlGpu { uuid, instances, links, mig_mode };
            (known != NvmlGpu::default()).then_some((*gpu, known))
        };
        NvmlSnapshot { gpus: question.iter().filter_map(of).collect() }
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
            NvmlSnapshot { gpus: [(gpu, NvmlGpu { instances, ..NvmlGpu::default() })].into() }
        };
        let question = NvmlQuestion::from([(gpu, NvmlAsked::names([(1, 0), (2, 0)]))]);
        let before = told(&[((1, 0), "MIG-a"), ((2, 0), "MIG-b"), ((3, 0), "MIG-c")]);
        let after = before.renewed(told(&[((2, 0), "MIG-new")]), &question);
        assert_eq!(after, told(&[((1, 0), "MIG-a"), ((2, 0), "MIG-new")]));
        assert_eq!(before.renewed(NvmlSnapshot::default(), &NvmlQuestion::new()), NvmlSnapshot::default());
    }

    #[test]
    fn links_stay_known_while_they_are_asked_for_and_no_longer() {
        let gpus: [PciAddress; 2] = ["0000:08:00.0", "0000:09:00.0"].map(|gpu| gpu.parse().unwrap());
        let links = |to| Some(NvLinks { peers: [(to, 4)].into(), down: 0 });
        let asked = |links| NvmlAsked { links, ..NvmlAsked::default() };
        let told =
            [(gpus[0], links(gpus[1])), (gpus[1], links(gpus[0]))].map(|(gpu, links)| (gpu, NvmlGpu { links, ..NvmlGpu::default() }));
        let (known, question) = (NvmlSnapshot { gpus: told.into() }, NvmlQuestion::from(gpus.map(|gpu| (gpu, asked(true)))));
        assert_eq!(known.hives().into_values().collect::<Vec<_>>(), ["nvlink:0000:08:00.0"; 2]);
        assert_eq!(known.renewed(NvmlSnapshot::default(), &question), known, "an answer without links");
        assert!(!asks_for_names(&question) && !known.leaves_open(&question) && NvmlSnapshot::default().leaves_open(&question));
        let cut = NvmlQuestion::from([(gpus[0], asked(true)), (gpus[1], NvmlAsked::names([(1, 0)]))]);
        let nothing = NvmlSnapshot::default();
        assert_eq!(nothing.renewed(nothing.clone(), &question), nothing, "and is no news");
        assert!(known.renewed(NvmlSnapshot::default(), &cut).hives().is_empty() && asks_for_names(&cut));
    }

    #[test]
    fn a_mig_mode_stays_known_while_it_is_asked_for_and_keeps_back_a_whole_without_instances() {
        let gpu: PciAddress = "0000:08:00.0".parse().unwrap();
        let asked = |instances: &[MigPlace]| {
            let instances = instances.iter().copied().collect();
            NvmlQuestion::from([(gpu, NvmlAsked { mig_mode: true, instances, ..NvmlAsked::default() })])
        };
        let told = |mig_mode| NvmlSnapshot { gpus: [(gpu, NvmlGpu { mig_mode: Some(mig_mode), ..NvmlGpu::default() })].into() };
        let nothing = NvmlSnapshot::default();
        assert!(nothing.leaves_open(&asked(&[])) && !asks_for_names(&asked(&[])));
        let cut = nothing.renewed(told(true), &asked(&[(1, 0)]));
        assert!(!cut.leaves_open(&asked(&[(1, 0)])) && !cut.keeps_whole_back(&asked(&[(1, 0)])));
        // Its instances were removed, and NVML has not been queried since.
        let uncut = cut.renewed(nothing.clone(), &asked(&[]));
        assert!(uncut.is_in_mig_mode(gpu) && uncut.keeps_whole_back(&asked(&[])));
        assert!(!uncut.renewed(told(false), &asked(&[])).is_in_mig_mode(gpu));
        assert_eq!(uncut.renewed(nothing.clone(), &NvmlQuestion::new()), nothing);
    }
}
