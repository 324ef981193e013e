//! What an operator sees of the slices: in `status`, and in the metrics.

use super::DRIVER;
use super::api::{Attribute, NO_EXECUTE, NO_SCHEDULE, ResourceSlice};
use super::others::OtherDriver;
use crate::domain::Verdicts;
use std::collections::BTreeMap;

/// Entries of each map: another program may write slices with this driver's name and any content.
const ENTRIES_MAX: usize = 64;
/// Devices that a problem names.
const NAMED_MAX: usize = 4;

/// The slices and devices of one pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolSize {
    /// Slices.
    pub slices: usize,
    /// Devices in them.
    pub devices: usize,
}

/// What the API server has of this node, as far as is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Published {
    /// The pools of this driver.
    pub pools: BTreeMap<String, PoolSize>,
    /// The taints of its devices: by the reason, which is the key without the driver's domain, and
    /// by the effect.
    pub taints: BTreeMap<(String, &'static str), usize>,
    /// The devices of each resource in these slices.
    pub resources: Vec<(String, usize)>,
    /// Whether the API server has dropped the taints of a device: their feature gate
    /// (`DRADeviceTaints`) is off.
    pub drops_taints: bool,
    /// Whether the API server has made a device for parts of its capacity one for one claim: the
    /// feature gate (`DRAConsumableCapacity`) is off.
    pub drops_parts: bool,
    /// Other drivers of this node, at most [`DRIVERS_MAX`](super::others::DRIVERS_MAX).
    pub others: Vec<OtherDriver>,
}

impl Published {
    /// Counts the slices of this driver.
    #[must_use]
    pub fn of<'a>(slices: impl Iterator<Item = &'a ResourceSlice>, drops_taints: bool) -> Self {
        let mut published = Published { drops_taints, ..Published::default() };
        for slice in slices {
            let pool = &slice.spec.pool.name;
            if published.pools.len() >= ENTRIES_MAX && !published.pools.contains_key(pool) {
                continue;
            }
            let size = published.pools.entry(pool.clone()).or_default();
            size.slices += 1;
            size.devices += slice.spec.devices.len();
            for device in &slice.spec.devices {
                if let Some(Attribute::Text(resource)) = device.attributes.get("resource") {
                    published.count(resource);
                }
            }
            for taint in slice.spec.devices.iter().flat_map(|device| &device.taints) {
                let reason = taint.key.strip_prefix(DRIVER).and_then(|it| it.strip_prefix('/'));
                let effects = [NO_SCHEDULE, NO_EXECUTE];
                let effect = effects.into_iter().find(|effect| taint.effect == *effect);
                let Some(key) = reason.map(str::to_owned).zip(effect) else { continue };
                if published.taints.len() < ENTRIES_MAX || published.taints.contains_key(&key) {
                    *published.taints.entry(key).or_default() += 1;
                }
            }
        }
        published
    }

    fn count(&mut self, resource: &str) {
        if let Some((_, devices)) = self.resources.iter_mut().find(|(known, _)| known == resource) {
            *devices += 1;
        } else if self.resources.len() < ENTRIES_MAX {
            self.resources.push((resource.to_owned(), 1));
        }
    }

    /// How many devices of a resource the slices have.
    #[must_use]
    pub fn devices_of(&self, resource: &str) -> usize {
        let mut resources = self.resources.iter();
        resources.find(|(known, _)| known == resource).map_or(0, |(_, devices)| *devices)
    }

    /// What an operator must decide, one sentence each.
    #[must_use]
    pub fn problems(&self, verdicts: &Verdicts) -> Vec<String> {
        let overlaps = self.others.iter().filter(|other| !other.same.is_empty());
        let overlap = |other: &OtherDriver| {
            let named: Vec<&str> = other.same.iter().map(String::as_str).take(NAMED_MAX).collect();
            let more = other.same.len().saturating_sub(NAMED_MAX);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!(
                "the DRA driver `{}` publishes the same hardware as Holdfast, and the scheduler may \
                 give it to two claims: {}{more}; let one of the two drivers publish it",
                other.driver,
                named.join(", ")
            )
        };
        let evicted: Vec<&str> = verdicts
            .iter()
            .filter(|(_, verdict)| self.drops_taints && verdict.evicts())
            .map(|(device, _)| device.as_str())
            .collect();
        let not_evicted = (!evicted.is_empty()).then(|| {
            format!(
                "the API server drops taints of devices (feature gate DRADeviceTaints), so no pod \
                 is evicted from the devices that were cordoned with --evict: {}; delete the pods",
                evicted.join(", ")
            )
        });
        let undivided = self.drops_parts.then(|| {
            "the API server drops parts of capacities (feature gate DRAConsumableCapacity), so a \
             device of a resource with `capacity` has one claim at a time; enable the gate, or \
             remove `capacity`: then each of the `replicas` is a device for one claim"
                .to_owned()
        });
        overlaps.map(overlap).chain(not_evicted).chain(undivided).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Cordon, DeviceId, Timestamp, Verdict};
    use serde_json::json;

    fn slice(pool: &str, taints: &[(&str, &str)]) -> ResourceSlice {
        let devices: Vec<_> = taints
            .iter()
            .map(|(key, effect)| json!({ "name": "d", "taints": [{ "key": key, "effect": effect }] }))
            .collect();
        let spec = json!({ "driver": DRIVER, "pool": { "name": pool }, "devices": devices });
        serde_json::from_value(json!({ "spec": spec })).unwrap()
    }

    #[test]
    fn pools_and_taints_are_counted_and_bounded() {
        let taints = [
            ("holdfast.dev/xid", NO_SCHEDULE),
            ("holdfast.dev/xid", NO_SCHEDULE),
            ("holdfast.dev/cordoned", NO_EXECUTE),
            ("example.com/other", NO_SCHEDULE),
            ("holdfast.dev/xid", "Later"),
        ];
        let slices = [slice("n1/gpu", &taints), slice("n1/gpu", &[]), slice("n1/net", &[])];
        let published = Published::of(slices.iter(), false);
        let size = |slices, devices| PoolSize { slices, devices };
        assert_eq!(
            published.pools,
            [("n1/gpu".to_owned(), size(2, 5)), ("n1/net".to_owned(), size(1, 0))].into()
        );
        let count = |reason: &str, effect| ((reason.to_owned(), effect), 1);
        let ((key, effect), _) = count("xid", NO_SCHEDULE);
        assert_eq!(published.taints, [count("cordoned", NO_EXECUTE), ((key, effect), 2)].into());
        let many: Vec<_> = (0..99)
            .map(|it| {
                let key = format!("holdfast.dev/r{it}");
                slice(&format!("p{it}"), &[(&key, NO_SCHEDULE)])
            })
            .collect();
        let published = Published::of(many.iter(), false);
        assert_eq!((published.pools.len(), published.taints.len()), (ENTRIES_MAX, ENTRIES_MAX));
    }

    #[test]
    fn the_devices_of_each_resource_are_counted_and_bounded() {
        let slice = |resources: &[String]| -> ResourceSlice {
            let device = |resource: &String| json!({ "name": "d", "attributes": { "resource": { "string": resource } } });
            let devices: Vec<_> = resources.iter().map(device).collect();
            let pool = json!({ "name": "n1/gpu" });
            serde_json::from_value(
                json!({ "spec": { "driver": DRIVER, "pool": pool, "devices": devices } }),
            )
            .unwrap()
        };
        let name = |n: usize| format!("a.b/r{n}");
        let slices = [slice(&[name(0), name(1), name(0)]), slice(&[name(0)])];
        let published = Published::of(slices.iter(), false);
        assert_eq!([0, 1, 2].map(|n| published.devices_of(&name(n))), [3, 1, 0]);
        let many: Vec<String> = (0..99).map(name).chain([name(0)]).collect();
        let published = Published::of([slice(&many)].iter(), false);
        assert_eq!((published.resources.len(), published.devices_of("a.b/r0")), (ENTRIES_MAX, 2));
    }

    #[test]
    fn an_overlap_and_an_eviction_without_taints_are_problems() {
        let same = (0..6).map(|it| format!("g{it}")).collect();
        let other = |driver: &str, same| OtherDriver { driver: driver.into(), devices: 8, same };
        let others = vec![other("dra.cpu", Default::default()), other("gpu.nvidia.com", same)];
        let mut published = Published { others, ..Published::default() };
        let cordon = Cordon { reason: String::new(), at: Timestamp(0), evicts: true };
        let verdict = Verdict { cordon: Some(cordon), ..Verdict::default() };
        let verdicts: Verdicts = [(DeviceId::new("GPU-1"), verdict)].into();
        let problems = published.problems(&verdicts);
        assert_eq!(problems.len(), 1, "a driver without the same hardware is none: {problems:?}");
        assert!(problems[0].contains("`gpu.nvidia.com`"), "{problems:?}");
        assert!(problems[0].contains("g0, g1, g2, g3 and 2 more"), "{problems:?}");
        published.drops_taints = true;
        let problems = published.problems(&verdicts);
        assert!(problems[1].contains("DRADeviceTaints") && problems[1].contains("GPU-1"));
        assert_eq!(published.problems(&Verdicts::new()).len(), 1);
        published.drops_parts = true;
        assert!(published.problems(&Verdicts::new())[1].contains("DRAConsumableCapacity"));
    }
}
