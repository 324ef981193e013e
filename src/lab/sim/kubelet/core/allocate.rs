//! The choice of devices for a container: checks, reusable devices, NUMA alignment, preference, and
//! the record of an answered Allocate.

use super::affinity;
use super::{Choice, DeviceManager, Step};
use crate::domain::{ContainerEdits, DeviceId, ResourceName};
use crate::lab::sim::kubelet::error::{AllocateError, NilDereference};
use crate::lab::sim::kubelet::held::{Held, NO_NUMA_NODE};
use std::collections::{BTreeMap, BTreeSet};

impl<C: Clone> DeviceManager<C> {
    /// Decides which devices a container needs, up to the call for the plugin's preference.
    pub fn allocate(
        &mut self,
        pod_uid: &str,
        container: &str,
        resource: &ResourceName,
        required: usize,
    ) -> Result<Step, AllocateError> {
        if !self.needs_devices(pod_uid, container, resource, required)? {
            return Ok(Step::Nothing);
        }
        let reusable = self
            .reuse
            .get(pod_uid)
            .and_then(|reuse| reuse.get(resource))
            .cloned()
            .unwrap_or_default();
        let mut taken = BTreeSet::new();
        // As in the kubelet, reused ids are taken even if they are unhealthy.
        if self.take(resource, reusable.iter().cloned().collect(), &mut taken, required, &mut |_| 0)
        {
            return Ok(Step::Allocate(taken));
        }
        let in_use = self.allocated.entry(resource.clone()).or_default();
        let available: BTreeSet<DeviceId> = self
            .healthy
            .get(resource)
            .map(|healthy| healthy.difference(in_use).cloned().collect())
            .unwrap_or_default();
        let requested = required - taken.len();
        if available.len() < requested {
            return Err(AllocateError::Unavailable {
                resource: resource.clone(),
                requested,
                available: available.len(),
            });
        }
        let places = match self.all.get(resource).filter(|_| self.aligns) {
            Some(all) => affinity::places(all, &available, &reusable, required),
            None => affinity::Places { anywhere: available.clone(), ..affinity::Places::default() },
        };
        let resource = resource.clone();
        if requested < places.aligned.len() {
            let rest = [places.aligned.clone(), BTreeSet::new()];
            return Ok(Step::Choose(Choice {
                resource,
                taken,
                available: places.aligned,
                rest,
                required,
            }));
        }
        if self.take(
            &resource,
            places.aligned.into_iter().collect(),
            &mut taken,
            required,
            &mut |_| 0,
        ) {
            return Ok(Step::Allocate(taken));
        }
        Ok(Step::Choose(Choice {
            resource,
            taken,
            available,
            rest: [places.unaligned, places.anywhere],
            required,
        }))
    }

    /// The checks before devices are chosen. Returns whether the container needs new devices.
    fn needs_devices(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &ResourceName,
        required: usize,
    ) -> Result<bool, AllocateError> {
        let held = self.held.get(pod_uid, container, resource).map(Held::ids);
        if let Some(held) = &held
            && held.len() != required
        {
            return Err(AllocateError::RequestChanged {
                pod: pod_uid.to_owned(),
                container: container.to_owned(),
                resource: resource.clone(),
                held: held.len(),
                required,
            });
        }
        let running =
            || self.initially_running.contains(&(pod_uid.to_owned(), container.to_owned()));
        if !self.sources_ready && running() {
            return Ok(false);
        }
        let Some(healthy) = self.healthy.get(resource) else {
            return Err(AllocateError::Unregistered(resource.clone()));
        };
        if healthy.is_empty() {
            return Err(AllocateError::NoHealthyDevice(resource.clone()));
        }
        if held.as_ref().is_some_and(|held| !held.is_subset(healthy)) {
            return Err(AllocateError::NoLongerHealthy(resource.clone()));
        }
        Ok(held.is_none() && required > 0)
    }

    /// Completes an allocation: preferred ids first, then any. `below(n)` chooses a number below
    /// `n`.
    pub fn choose(
        &mut self,
        choice: Choice,
        preferred: &BTreeSet<DeviceId>,
        below: &mut dyn FnMut(usize) -> usize,
    ) -> Result<BTreeSet<DeviceId>, AllocateError> {
        let Choice { resource, mut taken, available, rest, required } = choice;
        let preferred = preferred.intersection(&available).cloned().collect();
        let rest = rest.into_iter().map(|ids| ids.into_iter().collect());
        for from in std::iter::once(preferred).chain(rest) {
            if self.take(&resource, from, &mut taken, required, below) {
                return Ok(taken);
            }
        }
        Err(AllocateError::Fewer { required, got: taken.len() })
    }

    /// Reserves ids from `from` until `required` are taken. Returns whether that many are taken.
    fn take(
        &mut self,
        resource: &ResourceName,
        mut from: Vec<DeviceId>,
        taken: &mut BTreeSet<DeviceId>,
        required: usize,
        below: &mut dyn FnMut(usize) -> usize,
    ) -> bool {
        let allocated = self.allocated.entry(resource.clone()).or_default();
        while taken.len() < required && !from.is_empty() {
            let id = from.remove(below(from.len()));
            if taken.insert(id.clone()) {
                allocated.insert(id);
            }
        }
        taken.len() == required
    }

    /// An Allocate failed: reservations that no container holds are dropped.
    pub fn forget_reservations(&mut self) {
        self.allocated = self.held.ids();
    }

    /// An Allocate succeeded: the container holds the ids, with their present topology.
    pub fn granted(
        &mut self,
        pod_uid: &str,
        container: &str,
        resource: &ResourceName,
        ids: &BTreeSet<DeviceId>,
        edits: ContainerEdits,
    ) -> Result<(), NilDereference> {
        let mut by_numa: BTreeMap<i64, Vec<DeviceId>> = BTreeMap::new();
        for id in ids {
            let nodes = self.topology(resource, id, "after the Allocate call")?;
            let nodes = if nodes.is_empty() { &[NO_NUMA_NODE][..] } else { nodes };
            for node in nodes {
                by_numa.entry(*node).or_default().push(id.clone());
            }
        }
        self.held.insert(pod_uid, container, resource, Held { by_numa, edits });
        Ok(())
    }
}
