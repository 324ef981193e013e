//! Counters, for a whole and its parts in one pool: a physical function and its virtual functions,
//! or a GPU that a claim holds and the MIG instances that it was cut into.
//!
//! A whole with parts has a set of counters (KEP-4815, by default from Kubernetes 1.36 on). The
//! whole consumes the set, and a part a little of it. So the scheduler gives the whole only while
//! no part is allocated, and parts only while the whole is not. A toleration does not change that.
//!
//! Counters follow from the published devices alone, so they are added where a slice is written.
//! The scheduler does not know what containers hold by the device plugin: the set lacks that.

use super::super::api::{Attribute, Capacity, Counters, Device, Spec, limits};
use super::super::attributes::PCI_BUS_ID;
use super::{Layout, Slices, taints};
use std::collections::{BTreeMap, BTreeSet};

/// The number of the first slice with sets. From Kubernetes 1.35 on, a slice has devices or
/// counters. A pool of this driver has far fewer slices with devices: each has 64 of them.
pub(in crate::slices) const FIRST: u32 = 1000;

/// The one counter of a set.
const COUNTER: &str = "parts";
/// What a whole consumes, while a part consumes 1. It is the largest number of virtual functions
/// (`TotalVFs` of PCI Express has 16 bits), so the number of parts does not matter.
const WHOLE: u64 = u16::MAX as u64;

impl Layout {
    /// The slices of a pool as they are written. `has_counters`: whether the API server keeps
    /// counters. Without them nothing keeps the scheduler from a whole and its parts but taints.
    pub fn contents(
        &self,
        pool: &str,
        mut slices: Slices,
        has_counters: bool,
    ) -> BTreeMap<u32, Spec> {
        let wholes = if has_counters { wholes(&slices) } else { BTreeMap::new() };
        // By the name of the set: what containers hold of it, and what claims hold.
        let mut sets: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for device in slices.values_mut().flatten() {
            let consumed: Vec<(&str, u64)> = consumed(device, &wholes).collect();
            for (set, amount) in &consumed {
                let (held, claimed) = sets.entry(set).or_default();
                if taints::is_held_by_container(device) {
                    *held += amount;
                }
                if self.is_claimed(pool, &device.name) {
                    *claimed += amount;
                }
            }
            let consumed = consumed.into_iter().map(|(set, amount)| Counters {
                counter_set: set.to_owned(),
                counters: counter(amount),
                ..Counters::default()
            });
            device.consumes_counters = consumed.collect();
        }
        let sets: Vec<Counters> = sets
            .into_iter()
            .map(|(set, (held, claimed))| Counters {
                name: set.to_owned(),
                // Never less than what is allocated: while any set of a pool lacks something, the
                // scheduler gives no device with counters of the pool.
                counters: counter(WHOLE.saturating_sub(held).max(claimed)),
                ..Counters::default()
            })
            .collect();
        let sets = sets.chunks(limits::COUNTER_SETS);
        let sets = sets.map(|sets| Spec { shared_counters: sets.to_vec(), ..Spec::default() });
        let devices =
            slices.into_iter().map(|(index, devices)| (index, Spec { devices, ..Spec::default() }));
        devices.chain((FIRST..).zip(sets)).collect()
    }
}

/// The set of each whole that has parts in the pool, by the address of its function. The set has
/// the name of the device.
fn wholes(slices: &Slices) -> BTreeMap<String, String> {
    let devices = || slices.values().flatten();
    let with_parts: BTreeSet<&str> = devices().flat_map(functions_of).collect();
    let mut wholes = BTreeMap::new();
    for device in devices() {
        if let Some(function) = function_of_whole(device).filter(|it| with_parts.contains(it)) {
            let set = wholes.entry(function.to_owned());
            set.or_insert_with(|| device.name.clone());
        }
    }
    wholes
}

/// The sets that a device consumes, and how much: at most its own as a whole, and those of its
/// function and of its physical function as a part. A part is no whole, so there are at most two.
fn consumed<'a>(
    device: &Device,
    wholes: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (&'a str, u64)> {
    let whole = function_of_whole(device).map(|function| (function, WHOLE));
    let of_parts = functions_of(device).map(|function| (function, 1));
    whole
        .into_iter()
        .chain(of_parts)
        .filter_map(|(function, amount)| Some((wholes.get(function)?.as_str(), amount)))
}

/// The address of a whole function. A shared one is none: its shares exclude each other from
/// nothing, so they cannot consume all of a set.
fn function_of_whole(device: &Device) -> Option<&str> {
    let is_shared = device.attributes.get("shared") != Some(&Attribute::Bool(false));
    text(device, PCI_BUS_ID).filter(|_| !is_shared && text(device, "part").is_none())
}

/// The addresses of the functions that a device is a part of.
fn functions_of(device: &Device) -> impl Iterator<Item = &str> {
    let own = text(device, PCI_BUS_ID).filter(|_| text(device, "part").is_some());
    own.into_iter().chain(text(device, "pf"))
}

fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    match device.attributes.get(name)? {
        Attribute::Text(text) => Some(text),
        _ => None,
    }
}

fn counter(value: u64) -> BTreeMap<String, Capacity> {
    BTreeMap::from([(
        COUNTER.to_owned(),
        Capacity { value: value.to_string(), request_policy: None },
    )])
}

#[cfg(test)]
mod tests {
    use super::super::{WantedDevices, object};
    use super::*;
    use crate::domain::DraName;
    use crate::slices::api::Taint;
    use crate::slices::attributes::violations;
    use crate::slices::names::NodeName;

    const POOL: &str = "n1/net";

    fn node() -> NodeName {
        NodeName::new("n1").unwrap()
    }

    /// A device of a function, with more attributes. Its name is that of its id.
    fn device(function: &str, id: &str, more: &[(&str, &str)]) -> Device {
        let texts = [(PCI_BUS_ID, function), ("id", id)].into_iter().chain(more.iter().copied());
        let attributes = texts.map(|(key, value)| (key.to_owned(), Attribute::text(value)));
        let shared = ("shared".to_owned(), Attribute::Bool(false));
        Device {
            name: id.replace([':', '.'], "-"),
            attributes: attributes.chain([shared]).collect(),
            ..Device::default()
        }
    }

    fn pf(function: &str) -> Device {
        device(function, function, &[])
    }

    fn vf(function: &str, pf: &str) -> Device {
        device(function, function, &[("pf", pf)])
    }

    fn layout(devices: &[Device], claimed: &[&str]) -> Layout {
        let claimed = claimed.iter().map(|it| DraName { pool: POOL.into(), device: (*it).into() });
        let devices = devices.iter().map(|it| (it.name.clone(), it.clone())).collect();
        Layout::new(node()).followed_by(&WantedDevices {
            node: node(),
            pools: BTreeMap::from([(POOL.to_owned(), devices)]),
            claimed: claimed.collect(),
            dropped: BTreeSet::new(),
        })
    }

    fn contents(devices: &[Device], claimed: &[&str]) -> BTreeMap<u32, Spec> {
        let layout = layout(devices, claimed);
        let (_, slices) = layout.pools(true).next().unwrap();
        layout.contents(POOL, slices, true)
    }

    fn value(counters: &Counters) -> i64 {
        let [(name, counter)] = &counters.counters.iter().collect::<Vec<_>>()[..] else {
            panic!("one counter: {counters:?}")
        };
        assert_eq!(*name, COUNTER);
        counter.value.parse().unwrap()
    }

    /// Whether the scheduler of Kubernetes 1.36 gives the device to one more claim
    /// (`checkAvailableCounters`): no set of the pool may lack anything after that.
    fn is_given(contents: &BTreeMap<u32, Spec>, allocated: &[&str], next: &str) -> bool {
        let all = || contents.values().flat_map(|content| &content.devices);
        let of = |name: &str| all().find(|it| it.name == name).unwrap();
        let mut sets = contents.values().flat_map(|content| &content.shared_counters);
        let uses = |name: &str, set: &str| -> i64 {
            let mut consumed = of(name).consumes_counters.iter();
            consumed.find(|it| it.counter_set == set).map_or(0, value)
        };
        of(next).consumes_counters.is_empty()
            || sets.all(|set| {
                let used: i64 = allocated.iter().map(|name| uses(name, &set.name)).sum();
                used + uses(next, &set.name) <= value(set)
            })
    }

    #[test]
    fn the_scheduler_gives_a_whole_or_its_parts() {
        let (a, b) = ("0000:18:00.0", "0000:3b:00.0");
        let devices = [
            pf(a),
            vf("0000:18:00.1", a),
            vf("0000:18:00.2", a),
            pf(b),
            vf("0000:3b:00.1", b),
            pf("0000:5e:00.0"),
            vf("0000:9e:00.1", "0000:9e:00.0"),
        ];
        let (pf_a, vf_1, vf_2) = ("0000-18-00-0", "0000-18-00-1", "0000-18-00-2");
        let (pf_b, vf_b) = ("0000-3b-00-0", "0000-3b-00-1");
        let contents = contents(&devices, &[]);
        assert_eq!(contents.keys().copied().collect::<Vec<_>>(), [0, FIRST]);
        let sets: Vec<&str> =
            contents[&FIRST].shared_counters.iter().map(|set| set.name.as_str()).collect();
        assert_eq!(sets, [pf_a, pf_b], "a whole without parts has none, and parts without a whole");
        for (allocated, next, expected) in [
            (&[][..], pf_a, true),
            (&[], vf_1, true),
            (&[pf_a], vf_1, false),
            (&[pf_a], vf_b, true),
            (&[pf_a], pf_b, true),
            (&[vf_1], vf_2, true),
            (&[vf_1], pf_a, false),
            (&[vf_1, vf_2], pf_a, false),
            (&[pf_a, vf_b], "0000-5e-00-0", true),
            (&[pf_a, vf_b], "0000-9e-00-1", true),
        ] {
            assert_eq!(is_given(&contents, allocated, next), expected, "{allocated:?}, {next}");
        }
    }

    #[test]
    fn two_holders_of_one_whole_block_no_other_device() {
        let (a, b) = ("0000:18:00.0", "0000:3b:00.0");
        let mut devices =
            [pf(a), vf("0000:18:00.1", a), vf("0000:18:00.2", a), pf(b), vf("0000:3b:00.1", b)];
        // Claims of an earlier version, without counters.
        let held = ["0000-18-00-0", "0000-18-00-1"];
        let both = contents(&devices, &held);
        assert!(is_given(&both, &held, "0000-3b-00-1"), "the other adapter");
        assert!(!is_given(&both, &held, "0000-18-00-2"), "the same adapter");
        let neither = contents(&devices, &[]);
        assert!(!is_given(&neither, &held, "0000-3b-00-1"), "why the set has more then");
        // A container got it by number, and the scheduler does not know.
        for (by_number, next) in [(0, "0000-18-00-2"), (1, "0000-18-00-0")] {
            devices.iter_mut().for_each(|device| device.taints.clear());
            devices[by_number].taints.push(Taint {
                key: "holdfast.dev/held".into(),
                value: "device-plugin".into(),
                ..Taint::default()
            });
            let contents = contents(&devices, &[]);
            assert!(!is_given(&contents, &[], next), "{by_number}");
            assert!(is_given(&contents, &[], "0000-3b-00-0"), "the other adapter");
        }
    }

    #[test]
    fn a_gpu_of_a_claim_and_the_instances_it_was_cut_into_exclude_each_other() {
        let gpu = "0000:18:00.0";
        let part = |name: &str, kind| device(gpu, name, &[("part", kind), ("parent", "gpu-1")]);
        let devices = [device(gpu, "gpu-1", &[]), part("gi1-ci0", "mig"), part("gi2-ci0", "mig")];
        let contents = contents(&devices, &["gpu-1"]);
        assert!(!is_given(&contents, &["gpu-1"], "gi1-ci0"));
        assert!(!is_given(&contents, &["gi1-ci0"], "gpu-1"));
        assert!(is_given(&contents, &["gi1-ci0"], "gi2-ci0"));
    }

    #[test]
    fn a_part_of_a_virtual_function_consumes_two_sets_and_no_device_more() {
        let (pf_at, vf_at) = ("0000:18:00.0", "0000:18:00.1");
        let mdev = device(vf_at, "mdev", &[("part", "mdev"), ("pf", pf_at)]);
        let contents = contents(&[pf(pf_at), vf(vf_at, pf_at), mdev], &[]);
        let consumed: Vec<usize> =
            contents[&0].devices.iter().map(|it| it.consumes_counters.len()).collect();
        assert_eq!(consumed, [1, 2, 2]);
        assert!(contents[&0].devices.iter().all(|it| violations(it).is_empty()));
        for (allocated, next) in
            [("0000-18-00-0", "mdev"), ("mdev", "0000-18-00-0"), ("0000-18-00-1", "mdev")]
        {
            assert!(!is_given(&contents, &[allocated], next), "{allocated}, {next}");
        }
    }

    #[test]
    fn the_shares_of_a_whole_consume_nothing() {
        let at = "0000:18:00.0";
        let mut share = device(at, "0000:18:00.0::0", &[]);
        share.attributes.insert("shared".into(), Attribute::Bool(true));
        let contents = contents(&[share, vf("0000:18:00.1", at)], &[]);
        assert_eq!(contents.len(), 1, "{contents:?}");
        assert!(contents[&0].devices.iter().all(|it| it.consumes_counters.is_empty()));
    }

    #[test]
    fn sets_are_in_slices_of_their_own_that_hold_no_device() {
        let adapters: Vec<Device> = (1..10)
            .flat_map(|bus| {
                let at = format!("0000:0{bus}:00.0");
                [pf(&at), vf(&format!("0000:0{bus}:00.1"), &at)]
            })
            .collect();
        let layout = layout(&adapters, &[]);
        let objects = layout.objects();
        let sizes: Vec<_> = objects
            .iter()
            .map(|it| (it.spec.devices.len(), it.spec.shared_counters.len()))
            .collect();
        assert_eq!(sizes, [(18, 0), (0, 8), (0, 1)]);
        assert!(objects.iter().all(|it| it.spec.pool.resource_slice_count == 3));
        assert_eq!(objects[2].metadata.name, "n1-holdfast.dev-net-1001");
        let read = Layout::of_slices(node(), &objects);
        assert_eq!(read.pools[POOL].keys().copied().collect::<Vec<_>>(), [0], "read again");
        let (_, slices) = read.pools(true).next().unwrap();
        let without = read.contents(POOL, slices, false);
        assert_eq!(without.len(), 1);
        assert!(without[&0].devices.iter().all(|it| it.consumes_counters.is_empty()));
        let one = object(&node(), POOL, 0, 1, 1, without[&0].clone());
        assert!(one.spec.has_content_like(&without[&0]));
    }
}
