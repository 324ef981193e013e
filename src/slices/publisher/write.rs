//! The next write: what the API server has, compared with what it should have.
//!
//! The scheduler uses the slices of the highest generation of a pool, and only if all of them are
//! there. While only one slice differs, it is written in the same generation. Otherwise, or when
//! the number of slices changes, all slices of the pool get the next generation. New slices
//! are created first, and obsolete ones are deleted last. The slice that gets a device is written
//! before the one that loses it: a device that moves is never in no slice, and a slice of a former
//! generation does no harm.

use super::super::api::{self, ObjectMeta, OwnerReference, ResourceSlice, Spec, object};
use super::super::names::NodeName;
use super::mirror::Mirror;
use super::refusals::Place;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The slices of one pool by number, each with its devices or counters.
pub(super) type Contents = BTreeMap<u32, Spec>;

/// What was last written to an object, and what the API server made of it. A server drops fields of
/// features that are off. Such a difference is no reason for another write.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) sent: Spec,
    pub(super) returned: Spec,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Write {
    Create(ResourceSlice, Place),
    Update(ResourceSlice, Place),
    Delete(ObjectMeta),
}

impl Write {
    /// The slice that it writes.
    pub(super) fn place(&self) -> Option<&Place> {
        match self {
            Write::Create(_, place) | Write::Update(_, place) => Some(place),
            Write::Delete(_) => None,
        }
    }

    /// The object that it sends.
    pub(super) fn sent(&self) -> Option<&ResourceSlice> {
        match self {
            Write::Create(slice, _) | Write::Update(slice, _) => Some(slice),
            Write::Delete(_) => None,
        }
    }

    /// The same, for a slice of this owner.
    pub(super) fn owned_by(mut self, owner: Option<&OwnerReference>) -> Self {
        if let (Write::Create(slice, _) | Write::Update(slice, _), Some(owner)) = (&mut self, owner)
        {
            let references = &mut slice.metadata.owner_references;
            references.retain(|other| other.kind != owner.kind);
            references.push(owner.clone());
        }
        self
    }

    /// The name of the object, or its beginning.
    pub(super) fn name(&self) -> &str {
        let meta = match self {
            Write::Create(slice, _) | Write::Update(slice, _) => &slice.metadata,
            Write::Delete(meta) => meta,
        };
        if meta.name.is_empty() { &meta.generate_name } else { &meta.name }
    }
}

/// What is known of the API server.
#[derive(Debug, Clone, Copy)]
pub(super) struct Observed<'a> {
    pub(super) node: &'a NodeName,
    /// The owner that each slice should have, if it is known.
    pub(super) owner: Option<&'a OwnerReference>,
    pub(super) mirror: &'a Mirror,
    pub(super) answers: &'a BTreeMap<String, Answer>,
    /// The highest known generation of each pool: a pool without slices continues from there.
    pub(super) generations: &'a BTreeMap<String, i64>,
    /// The names of objects that other nodes or drivers have.
    pub(super) taken: &'a BTreeSet<String>,
    /// Pools that are left as they are for now.
    pub(super) paused: &'a BTreeMap<String, Duration>,
}

impl Observed<'_> {
    /// The next write that these pools need; `None` if the API server has them.
    pub(super) fn next_write(&self, pools: &BTreeMap<String, Contents>) -> Option<Write> {
        let is_paused = |pool: &String| self.paused.contains_key(pool);
        let mut active = pools.iter().filter(|(pool, _)| !is_paused(pool));
        let of_pools = active.find_map(|(pool, wanted)| self.next_of_pool(pool, wanted));
        of_pools.or_else(|| {
            let mut all = self.mirror.slices().filter(|slice| !is_paused(&slice.spec.pool.name));
            let unwanted = all.find(|slice| !pools.contains_key(&slice.spec.pool.name))?;
            Some(delete(unwanted))
        })
    }

    fn next_of_pool(&self, pool: &str, wanted: &Contents) -> Option<Write> {
        let all = || self.mirror.slices().filter(|slice| slice.spec.pool.name == pool);
        let mut present: BTreeMap<u32, &ResourceSlice> = BTreeMap::new();
        let mut obsolete: Vec<&ResourceSlice> = Vec::new();
        for slice in all() {
            let index = self.node.slice_index(pool, &slice.metadata.name);
            let Some(index) = index.filter(|index| wanted.contains_key(index)) else {
                obsolete.push(slice);
                continue;
            };
            match present.get(&index) {
                Some(known) if known.spec.pool.generation >= slice.spec.pool.generation => {
                    obsolete.push(slice);
                }
                Some(_) => obsolete.extend(present.insert(index, slice)),
                None => drop(present.insert(index, slice)),
            }
        }
        let count = i64::try_from(wanted.len()).unwrap_or(i64::MAX);
        let generation = self.generation(pool, wanted, &present, all(), count);
        let is_owned = |slice: &ResourceSlice| {
            let mut references = slice.metadata.owner_references.iter();
            self.owner.is_none_or(|owner| references.any(|it| it.uid == owner.uid))
        };
        let is_done = |index: u32, slice: &ResourceSlice| {
            is_owned(slice)
                && slice.spec.pool.generation == generation
                && slice.spec.pool.resource_slice_count == count
                && self.holds(slice, &wanted[&index])
        };
        let content = |index: u32| wanted[&index].clone();
        let written =
            |index: u32| object(self.node, pool, index, generation, wanted.len(), content(index));
        let place = |index: u32| (pool.to_owned(), index);
        if let Some(index) = wanted.keys().find(|index| !present.contains_key(index)) {
            let mut slice = written(*index);
            if self.taken.contains(&slice.metadata.name) {
                let generate_name = format!("{}-", slice.metadata.name);
                slice.metadata = ObjectMeta { generate_name, ..ObjectMeta::default() };
            }
            return Some(Write::Create(slice, place(*index)));
        }
        let stale = || present.iter().filter(|(index, it)| !is_done(**index, it));
        let waits = |(index, slice): &(&u32, &&ResourceSlice)| {
            waits_for_another(**index, slice, wanted, &present)
        };
        if let Some((index, slice)) = stale().find(|it| !waits(it)).or_else(|| stale().next()) {
            let metadata = slice.metadata.clone();
            let mut update = ResourceSlice { metadata, ..written(*index) };
            keep_times(&mut update.spec.devices, &slice.spec.devices);
            return Some(Write::Update(update, place(*index)));
        }
        obsolete.first().map(|slice| delete(slice))
    }

    /// The generation that the pool's slices should have.
    fn generation<'a>(
        &self,
        pool: &str,
        wanted: &Contents,
        present: &BTreeMap<u32, &ResourceSlice>,
        all: impl Iterator<Item = &'a ResourceSlice>,
        count: i64,
    ) -> i64 {
        let known = self.generations.get(pool).copied().unwrap_or(1);
        let Some(newest) = all.map(|slice| slice.spec.pool.generation).max() else { return known };
        let current = || present.iter().filter(|(_, slice)| slice.spec.pool.generation == newest);
        let same_count = current().all(|(_, it)| it.spec.pool.resource_slice_count == count);
        let stale = current().filter(|(index, it)| !self.holds(it, &wanted[index])).count();
        if same_count && stale <= 1 { newest } else { newest.saturating_add(1) }
    }

    /// Whether an object has this content, or what the API server made of it.
    fn holds(&self, slice: &ResourceSlice, wanted: &Spec) -> bool {
        slice.spec.has_content_like(wanted)
            || self.answers.get(&slice.metadata.name).is_some_and(|answer| {
                answer.sent.has_content_like(wanted)
                    && answer.returned.has_content_like(&slice.spec)
            })
    }
}

/// Keeps the times of taints that stay: without one the API server sets the present time, and the
/// tolerations of pods would begin again.
fn keep_times(devices: &mut [api::Device], former: &[api::Device]) {
    for device in devices.iter_mut().filter(|device| !device.taints.is_empty()) {
        let Some(known) = former.iter().find(|known| known.name == device.name) else { continue };
        for taint in &mut device.taints {
            let same = known.taints.iter().find(|known| known.is_like(taint));
            taint.time_added = same.and_then(|same| same.time_added.clone());
        }
    }
}

/// Whether the write of a slice would remove a device that another slice gets, and does not have
/// yet. That slice is written first, so that a claim's device is never in no slice.
fn waits_for_another(
    index: u32,
    slice: &ResourceSlice,
    wanted: &Contents,
    present: &BTreeMap<u32, &ResourceSlice>,
) -> bool {
    let has = |devices: &[api::Device], name: &str| devices.iter().any(|it| it.name == name);
    slice.spec.devices.iter().any(|device| {
        let home = wanted.iter().find(|(_, content)| has(&content.devices, &device.name));
        home.is_some_and(|(home, _)| {
            let is_there =
                present.get(home).is_some_and(|slice| has(&slice.spec.devices, &device.name));
            *home != index && !is_there
        })
    })
}

fn delete(slice: &ResourceSlice) -> Write {
    Write::Delete(slice.metadata.clone())
}
