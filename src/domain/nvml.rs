//! Facts about GPUs that only NVIDIA's management library (NVML) has, and the query for them.

use super::nvlink::{self, NvLinks};
use super::pci::PciAddress;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A MIG instance, by the numbers of its GPU instance and its compute instance. They stay the same
/// while the instance exists.
pub type MigPlace = (u32, u32);

/// The query to NVML: the facts that the driver's own files do not contain. Empty: NVML is not
/// needed.
pub type NvmlQuery = BTreeMap<PciAddress, NvmlGpuQuery>;

/// The query for one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlGpuQuery {
    /// Its UUID, which is unknown, or is needed to query its instances.
    pub uuid: bool,
    /// The names of these MIG instances.
    pub instances: BTreeSet<MigPlace>,
    /// Its NVLink connections to the other GPUs with this flag.
    pub links: bool,
    /// Whether it is in MIG mode. A GPU in MIG mode cannot be used as a whole.
    pub mig_mode: bool,
    /// What labels of the node describe.
    pub described: bool,
}

impl NvmlGpuQuery {
    /// A query for its UUID, and for the names of these instances.
    #[must_use]
    pub fn names(instances: impl Into<BTreeSet<MigPlace>>) -> Self {
        NvmlGpuQuery { uuid: true, instances: instances.into(), ..NvmlGpuQuery::default() }
    }
}

/// Whether the query contains names. Without a name a device is not offered, or has a less stable
/// name. Links are only a preference, and the driver's files show MIG mode once there are
/// instances.
#[must_use]
pub fn requests_names(query: &NvmlQuery) -> bool {
    query.values().any(|wanted| wanted.uuid)
}

/// How the GPUs that no configured resource selects are offered where MIG splits some of them: the
/// three strategies of NVIDIA's device plugin (`migStrategy`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigStrategy {
    /// Whole GPUs only.
    #[default]
    None,
    /// Whole GPUs, or MIG instances of one profile, under the name of GPUs. A mixture is refused.
    Single,
    /// Whole GPUs, and the MIG instances of each profile under a name of their own.
    Mixed,
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

/// NVML's answer for one MIG instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// `MIG-<uuid>`.
    pub uuid: String,
    /// Its profile, such as `1g.10gb`, `1g.10gb+me` or `1c.3g.40gb`; `None` if NVML has not
    /// returned it.
    pub profile: Option<String>,
    /// Its number among the instances of its GPU, as NVIDIA's tools count. It may change when an
    /// instance is created or destroyed. `None` if NVML has not returned it.
    pub index: Option<u32>,
}

/// What labels of the node describe of a GPU and the driver's files do not contain. `None`: NVML or
/// the GPU does not have the fact.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDescription {
    /// Its memory in MiB.
    pub memory_mib: Option<u64>,
    /// Its CUDA compute capability, major and minor.
    pub compute: Option<(i32, i32)>,
    /// Its brand, as NVIDIA's DRA driver names it: `Nvidia`, `Tesla`.
    pub brand: Option<String>,
    /// Whether it has a MIG mode.
    pub has_mig_mode: bool,
    /// The newest CUDA version that the driver supports, major and minor. The same for all GPUs.
    pub cuda: Option<(i32, i32)>,
    /// Its MIG instances.
    #[serde(with = "by_place")]
    pub instances: BTreeMap<MigPlace, MigAttributes>,
}

/// The size of a MIG instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigAttributes {
    /// Its memory in MB, in NVML's unit.
    pub memory_mb: u64,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// The slices of its GPU instance, and of its compute instance.
    pub slices: (u32, u32),
    /// Its engines: copy, decoder, encoder, JPEG, optical flow.
    pub engines: [u32; 5],
}

/// NVML's answer for one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlGpu {
    /// `GPU-<uuid>`.
    pub uuid: Option<String>,
    /// Its MIG instances.
    #[serde(with = "by_place")]
    pub instances: BTreeMap<MigPlace, MigInstance>,
    /// Its links; `None` if NVML has not returned them.
    pub links: Option<NvLinks>,
    /// Whether it is in MIG mode; `None` if NVML has not returned it.
    pub mig_mode: Option<bool>,
    /// Its description; `None` if NVML has not returned it.
    pub description: Option<GpuDescription>,
}

/// NVML's answers, by the GPUs' addresses. Like the text of a file, the value may be older than the
/// hardware's state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlSnapshot {
    /// The GPUs.
    pub gpus: BTreeMap<PciAddress, NvmlGpu>,
}

/// Maps by place as lists, because a key of JSON is a text.
mod by_place {
    use super::MigPlace;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::collections::BTreeMap;

    pub(super) fn serialize<T: Serialize, S: Serializer>(
        map: &BTreeMap<MigPlace, T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<MigPlace, T>, D::Error> {
        Ok(Vec::deserialize(deserializer)?.into_iter().collect())
    }
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

    /// A MIG instance.
    #[must_use]
    pub fn instance(&self, gpu: PciAddress, place: MigPlace) -> Option<&MigInstance> {
        self.gpus.get(&gpu)?.instances.get(&place)
    }

    /// The number of a MIG instance among those of its GPU, while the GPU has exactly the instances
    /// that NVML has counted.
    #[must_use]
    pub fn index(
        &self,
        gpu: PciAddress,
        place: MigPlace,
        places: &BTreeSet<MigPlace>,
    ) -> Option<u32> {
        let instances = &self.gpus.get(&gpu)?.instances;
        instances.keys().eq(places).then(|| instances.get(&place)?.index).flatten()
    }

    /// The profiles of all MIG instances.
    #[must_use]
    pub fn mig_profiles(&self) -> BTreeSet<&str> {
        let instances = self.gpus.values().flat_map(|gpu| gpu.instances.values());
        instances.filter_map(|instance| instance.profile.as_deref()).collect()
    }

    /// Whether the profile of a MIG instance of the query is not known (yet).
    #[must_use]
    pub fn lacks_profile(&self, query: &NvmlQuery) -> bool {
        query.iter().any(|(gpu, wanted)| {
            let profile = |place| self.instance(*gpu, place).and_then(|it| it.profile.as_ref());
            wanted.instances.iter().any(|place| profile(*place).is_none())
        })
    }

    /// Whether a GPU is known to be in MIG mode.
    #[must_use]
    pub fn is_in_mig_mode(&self, gpu: PciAddress) -> bool {
        self.gpus.get(&gpu).is_some_and(|gpu_facts| gpu_facts.mig_mode == Some(true))
    }

    /// Whether a GPU of the query is in MIG mode and the query contains none of its instances. The
    /// GPU is offered once it has left that mode.
    #[must_use]
    pub fn withholds_whole(&self, query: &NvmlQuery) -> bool {
        query.iter().any(|(gpu, wanted)| wanted.instances.is_empty() && self.is_in_mig_mode(*gpu))
    }

    /// The hive of each GPU that is in one, as [`topology::hives`](super::topology::hives) reads
    /// it.
    #[must_use]
    pub fn hives(&self) -> BTreeMap<PciAddress, String> {
        nvlink::hives(
            &self
                .gpus
                .iter()
                .filter_map(|(gpu, gpu_facts)| Some((*gpu, gpu_facts.links.as_ref()?)))
                .collect(),
        )
    }

    /// Whether links of the query are unknown or inactive, or another fact but a name is unknown.
    #[must_use]
    pub fn is_incomplete_for(&self, query: &NvmlQuery) -> bool {
        let nothing = NvmlGpu::default();
        query.iter().any(|(gpu, wanted)| {
            let gpu_facts = self.gpus.get(gpu).unwrap_or(&nothing);
            let has_links = || gpu_facts.links.as_ref().is_some_and(|links| links.down == 0);
            wanted.links && !has_links()
                || wanted.mig_mode && gpu_facts.mig_mode.is_none()
                || wanted.described && gpu_facts.description.is_none()
        })
    }

    /// The snapshot after an answer to `query`. A fact that is missing in the answer stays as it
    /// was known before. A fact that is no longer in the query is forgotten: if it returns, it may
    /// be of other hardware.
    #[must_use]
    pub fn merged(&self, answer: NvmlSnapshot, query: &NvmlQuery) -> NvmlSnapshot {
        let links = |of: &NvmlSnapshot, gpu: &PciAddress| {
            of.gpus.get(gpu).and_then(|gpu| gpu.links.clone())
        };
        let mig_mode =
            |of: &NvmlSnapshot, gpu: &PciAddress| of.gpus.get(gpu).and_then(|gpu| gpu.mig_mode);
        let of = |(gpu, wanted): (&PciAddress, &NvmlGpuQuery)| {
            let instance = |place: &MigPlace| {
                let former = self.instance(*gpu, *place);
                let mut instance = answer.instance(*gpu, *place).or(former)?.clone();
                // Another instance at the same place has another UUID.
                let same = former.filter(|former| former.uuid == instance.uuid);
                instance.profile =
                    instance.profile.or_else(|| same.and_then(|former| former.profile.clone()));
                Some(instance)
            };
            let uuid = answer.uuid(*gpu).or_else(|| self.uuid(*gpu)).map(str::to_owned);
            let instances = wanted
                .instances
                .iter()
                .filter_map(|place| Some((*place, instance(place)?)))
                .collect();
            let links =
                wanted.links.then(|| links(&answer, gpu).or_else(|| links(self, gpu))).flatten();
            let mig_mode = wanted
                .mig_mode
                .then(|| mig_mode(&answer, gpu).or_else(|| mig_mode(self, gpu)))
                .flatten();
            let description = [&answer, self]
                .into_iter()
                .filter(|_| wanted.described)
                .find_map(|of| of.gpus.get(gpu)?.description.clone());
            let known = NvmlGpu { uuid, instances, links, mig_mode, description };
            (known != NvmlGpu::default()).then_some((*gpu, known))
        };
        NvmlSnapshot { gpus: query.iter().filter_map(of).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_answer_keeps_known_facts_until_they_leave_the_query() {
        let gpu: PciAddress = "0000:08:00.0".parse().unwrap();
        let snapshot = |names: &[(MigPlace, (&str, &str))]| {
            let instance = |(uuid, profile): (&str, &str)| MigInstance {
                uuid: uuid.to_owned(),
                profile: (!profile.is_empty()).then(|| profile.to_owned()),
                index: None,
            };
            let instances = names.iter().map(|(place, it)| (*place, instance(*it))).collect();
            NvmlSnapshot { gpus: [(gpu, NvmlGpu { instances, ..NvmlGpu::default() })].into() }
        };
        let query = NvmlQuery::from([(gpu, NvmlGpuQuery::names([(1, 0), (2, 0)]))]);
        let [a, b, c] = [("MIG-a", "1g.10gb"), ("MIG-b", "2g.20gb"), ("MIG-c", "2g.20gb")];
        let before = snapshot(&[((1, 0), a), ((2, 0), b), ((3, 0), c)]);
        let after = before.merged(snapshot(&[((2, 0), ("MIG-new", ""))]), &query);
        assert_eq!(after, snapshot(&[((1, 0), a), ((2, 0), ("MIG-new", ""))]));
        assert!(after.lacks_profile(&query) && !before.lacks_profile(&query));
        assert_eq!(after.mig_profiles().into_iter().collect::<Vec<_>>(), ["1g.10gb"]);
        // The same instance, in an answer without its profile.
        assert_eq!(
            before.merged(snapshot(&[((2, 0), ("MIG-b", ""))]), &query).gpus[&gpu].instances
                [&(2, 0)]
                .profile
                .as_deref(),
            Some("2g.20gb")
        );
        assert_eq!(
            before.merged(NvmlSnapshot::default(), &NvmlQuery::new()),
            NvmlSnapshot::default()
        );
    }

    #[test]
    fn an_instance_has_its_number_while_no_other_comes_or_goes() {
        let gpu: PciAddress = "0000:08:00.0".parse().unwrap();
        let instance = |index| MigInstance { index, ..MigInstance::default() };
        let instances = [((1, 0), instance(Some(1))), ((2, 0), instance(None))].into();
        let known =
            NvmlSnapshot { gpus: [(gpu, NvmlGpu { instances, ..NvmlGpu::default() })].into() };
        let index =
            |place, places: &[MigPlace]| known.index(gpu, place, &places.iter().copied().collect());
        assert_eq!(index((1, 0), &[(1, 0), (2, 0)]), Some(1));
        assert_eq!(index((2, 0), &[(1, 0), (2, 0)]), None, "NVML has not returned it");
        assert_eq!(index((1, 0), &[(1, 0)]), None, "one was destroyed");
        assert_eq!(index((1, 0), &[(1, 0), (2, 0), (3, 0)]), None, "one was created");
        // After an answer without a number none is known.
        let query = NvmlQuery::from([(gpu, NvmlGpuQuery::names([(1, 0)]))]);
        let answer = instance(None);
        let gpus = [(gpu, NvmlGpu { instances: [((1, 0), answer)].into(), ..NvmlGpu::default() })];
        let after = known.merged(NvmlSnapshot { gpus: gpus.into() }, &query);
        assert_eq!(after.instance(gpu, (1, 0)).unwrap().index, None);
    }

    #[test]
    fn links_stay_known_while_they_are_queried() {
        let gpus: [PciAddress; 2] =
            ["0000:08:00.0", "0000:09:00.0"].map(|gpu| gpu.parse().unwrap());
        let links = |to| Some(NvLinks { peers: [(to, 4)].into(), down: 0 });
        let wanted = |links| NvmlGpuQuery { links, ..NvmlGpuQuery::default() };
        let snapshot = [(gpus[0], links(gpus[1])), (gpus[1], links(gpus[0]))]
            .map(|(gpu, links)| (gpu, NvmlGpu { links, ..NvmlGpu::default() }));
        let (known, query) = (
            NvmlSnapshot { gpus: snapshot.into() },
            NvmlQuery::from(gpus.map(|gpu| (gpu, wanted(true)))),
        );
        assert_eq!(known.hives().into_values().collect::<Vec<_>>(), ["nvlink:0000:08:00.0"; 2]);
        assert_eq!(known.merged(NvmlSnapshot::default(), &query), known, "an answer without links");
        assert!(
            !requests_names(&query)
                && !known.is_incomplete_for(&query)
                && NvmlSnapshot::default().is_incomplete_for(&query)
        );
        let cut =
            NvmlQuery::from([(gpus[0], wanted(true)), (gpus[1], NvmlGpuQuery::names([(1, 0)]))]);
        let nothing = NvmlSnapshot::default();
        assert_eq!(nothing.merged(nothing.clone(), &query), nothing, "and is no news");
        assert!(
            known.merged(NvmlSnapshot::default(), &cut).hives().is_empty() && requests_names(&cut)
        );
    }

    #[test]
    fn a_description_stays_known_while_it_is_queried() {
        let gpu: PciAddress = "0000:08:00.0".parse().unwrap();
        let wanted = |described| {
            NvmlQuery::from([(gpu, NvmlGpuQuery { described, ..NvmlGpuQuery::default() })])
        };
        let description = GpuDescription { memory_mib: Some(81_559), ..GpuDescription::default() };
        let answer = NvmlSnapshot {
            gpus: [(gpu, NvmlGpu { description: Some(description), ..NvmlGpu::default() })].into(),
        };
        let nothing = NvmlSnapshot::default();
        assert!(nothing.is_incomplete_for(&wanted(true)) && !requests_names(&wanted(true)));
        let known = nothing.merged(answer.clone(), &wanted(true));
        assert!(!known.is_incomplete_for(&wanted(true)) && known == answer);
        assert_eq!(known.merged(nothing.clone(), &wanted(true)), answer);
        assert_eq!(known.merged(nothing.clone(), &wanted(false)), nothing);
    }

    #[test]
    fn a_mig_mode_stays_known_while_queried_and_withholds_the_whole() {
        let gpu: PciAddress = "0000:08:00.0".parse().unwrap();
        let wanted = |instances: &[MigPlace]| {
            let instances = instances.iter().copied().collect();
            NvmlQuery::from([(
                gpu,
                NvmlGpuQuery { mig_mode: true, instances, ..NvmlGpuQuery::default() },
            )])
        };
        let snapshot = |mig_mode| NvmlSnapshot {
            gpus: [(gpu, NvmlGpu { mig_mode: Some(mig_mode), ..NvmlGpu::default() })].into(),
        };
        let nothing = NvmlSnapshot::default();
        assert!(nothing.is_incomplete_for(&wanted(&[])) && !requests_names(&wanted(&[])));
        let cut = nothing.merged(snapshot(true), &wanted(&[(1, 0)]));
        assert!(
            !cut.is_incomplete_for(&wanted(&[(1, 0)])) && !cut.withholds_whole(&wanted(&[(1, 0)]))
        );
        // Its instances were removed, and NVML has not been queried since.
        let uncut = cut.merged(nothing.clone(), &wanted(&[]));
        assert!(uncut.is_in_mig_mode(gpu) && uncut.withholds_whole(&wanted(&[])));
        assert!(!uncut.merged(snapshot(false), &wanted(&[])).is_in_mig_mode(gpu));
        assert_eq!(uncut.merged(nothing.clone(), &NvmlQuery::new()), nothing);
    }
}
