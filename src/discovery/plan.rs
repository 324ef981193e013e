//! The plan of a scan, with the resources of each node of `/dev` and of each MIG profile.

use crate::domain::{NvmlSnapshot, Plan, ResourceName, ResourceSpec};
use crate::hardware::{self, Scan};
use crate::host::{HostRoot, ReadFailure};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::watch;

/// The plan, with a resource for each existing node, or MIG profile, of the resources with patterns
/// in their names. Where `/dev` cannot be read, no resource comes or goes. `held` collects the
/// resources of all grants: it is called only for a plan with patterns. Also returns warnings, or
/// the read failure.
pub(super) fn planned(
    root: &HostRoot,
    current: &watch::Sender<Arc<Plan>>,
    (nvml, lacks_profile): (&NvmlSnapshot, bool),
    held: impl FnOnce() -> BTreeSet<ResourceName>,
) -> (Arc<Plan>, Result<Vec<String>, ReadFailure>) {
    let plan = current.borrow().clone();
    if plan.patterns.is_empty() {
        return (plan, Ok(Vec::new()));
    }
    let hardware::ExpandedSpecs { specs, warnings } =
        match hardware::expand_patterns(root, &plan.patterns, nvml) {
            Ok(each) => each,
            Err(failure) => return (plan, Err(failure)),
        };
    let held = held();
    // A resource that only the ledger knows stays until its last id has left the list. That of a
    // MIG profile stays while it is held, and while NVML has not returned all profiles.
    let stays = |spec: &ResourceSpec| {
        spec.is_orphan()
            || (lacks_profile || held.contains(&spec.name))
                && hardware::spec_named(&plan.patterns, &spec.name).is_some()
    };
    let is_gone = |spec: &&Arc<ResourceSpec>| !specs.iter().any(|known| known.name == spec.name);
    let kept: Vec<_> =
        plan.specs.iter().filter(is_gone).filter(|spec| stays(spec)).cloned().collect();
    // An equal resource is shared: none is in memory twice.
    let same = |spec: Arc<ResourceSpec>| {
        plan.specs.iter().find(|known| **known == spec).map_or(spec, Arc::clone)
    };
    let specs: Arc<[_]> = specs.into_iter().chain(kept).map(same).collect();
    if specs != plan.specs {
        publish(current, &plan, specs, Arc::clone(&plan.patterns));
    }
    (current.borrow().clone(), Ok(warnings))
}

/// Adds the usual resources of hardware that was not there before, if the plan is made of the known
/// hardware. The scan of the new plan finds their devices.
pub(super) fn add_usual(current: &watch::Sender<Arc<Plan>>, plan: &Plan, scan: &Scan) {
    let Some(mig) = plan.usual else { return };
    let known = |name: &ResourceName| {
        plan.specs.iter().chain(&*plan.patterns).any(|spec| spec.name == *name && !spec.is_orphan())
    };
    let mut new = hardware::defaults::specs(scan, mig);
    new.retain(|spec| !known(&spec.name));
    if new.is_empty() {
        return;
    }
    let new: Vec<Arc<ResourceSpec>> = new.into_iter().map(Arc::new).collect();
    let is_replaced = |spec: &&Arc<ResourceSpec>| !new.iter().any(|added| added.name == spec.name);
    let and_new = |specs: &[Arc<ResourceSpec>]| -> Vec<Arc<ResourceSpec>> {
        specs.iter().filter(is_replaced).chain(&new).cloned().collect()
    };
    let patterns = Plan::patterns_of(&and_new(plan.configured()));
    let mut specs = and_new(&plan.specs);
    specs.retain(|spec| !spec.name.is_pattern());
    publish(current, plan, specs.into(), patterns);
}

/// Publishes other resources, unless the configuration has changed since this plan: that has its
/// own resources, and requests a scan.
fn publish(
    current: &watch::Sender<Arc<Plan>>,
    plan: &Plan,
    specs: Arc<[Arc<ResourceSpec>]>,
    patterns: Arc<[Arc<ResourceSpec>]>,
) {
    current.send_if_modified(|current| {
        let is_current = current.number == plan.number;
        if is_current {
            let number = plan.number + 1;
            *current = Arc::new(Plan { number, specs, patterns, ..plan.clone() });
        }
        is_current
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{CharPath, DeviceClass, MigInstance, NodePattern, NvmlGpu};
    use crate::host::faults::with_faults;

    #[test]
    fn a_dev_that_cannot_be_read_leaves_the_resources_of_its_nodes_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().join("dev");
        let host = NodePattern::Regex("^i2c-[0-9]*$".into());
        let pattern = ResourceSpec {
            paths: vec![CharPath {
                host,
                container: None,
                permissions: "rw".into(),
                udev: Vec::new(),
            }],
            ..ResourceSpec::new(
                ResourceName::for_each_node("board/{node}").unwrap(),
                DeviceClass::Char,
            )
        };
        let plan = Plan { number: 1, patterns: Arc::new([Arc::new(pattern)]), ..Plan::default() };
        let (root, plan) = (HostRoot::new(dir.path()), watch::Sender::new(Arc::new(plan)));
        let nvml = NvmlSnapshot::empty();
        let rescan = || {
            let (planned, warnings) = planned(&root, &plan, (&nvml, false), BTreeSet::new);
            assert_eq!(planned, *plan.borrow());
            (
                planned.number,
                planned
                    .specs
                    .iter()
                    .map(|spec| spec.name.to_string())
                    .collect::<Vec<_>>()
                    .join(" "),
                warnings.ok(),
            )
        };
        std::fs::create_dir(&dev).unwrap();
        std::fs::write(dev.join("i2c-1"), "").unwrap();
        assert_eq!(rescan(), (2, "board/i2c-1".into(), Some(vec![])));
        std::fs::write(dev.join("i2c-13"), "").unwrap();
        assert_eq!(rescan(), (3, "board/i2c-1 board/i2c-13".into(), Some(vec![])));
        assert_eq!(rescan().0, 3, "nothing has changed");
        let (_, calls) = with_faults(|_| None, rescan);
        assert!(calls >= 3, "the directory and its nodes");
        for failing in 0..calls {
            let seen = with_faults(move |call| (call == failing).then_some(24), rescan).0;
            assert_eq!(seen, (3, "board/i2c-1 board/i2c-13".into(), None));
        }
        std::fs::remove_file(dev.join("i2c-1")).unwrap();
        assert_eq!(rescan(), (4, "board/i2c-13".into(), Some(vec![])));
    }

    #[test]
    fn hardware_that_comes_later_is_offered_under_its_usual_name() {
        use crate::domain::{MigStrategy, PciFunction};
        let gpu = |address: &str, vendor| {
            let address = address.parse().unwrap();
            let function = PciFunction {
                vendor: Some(vendor),
                class: Some(0x03_0200),
                driver: (vendor == 0x8086).then(|| "i915".into()),
                ..PciFunction::at(address)
            };
            (address, function)
        };
        let current = watch::Sender::new(Arc::new(Plan { number: 1, ..Plan::default() }));
        let found = |functions: &[(&str, u16)]| {
            let functions = functions.iter().map(|(address, vendor)| gpu(address, *vendor));
            let scan = Scan::of(functions.collect());
            let plan = current.borrow().clone();
            let number = plan.number;
            add_usual(&current, &plan, &scan);
            let plan = current.borrow().clone();
            let are_new = plan.number != number;
            let names = plan.specs.iter().map(|spec| spec.name.to_string());
            (are_new, names.collect::<Vec<_>>().join(" "), plan.patterns.len())
        };
        let (nvidia, intel) = (("0000:01:00.0", 0x10de), ("0000:02:00.0", 0x8086));
        assert_eq!(found(&[nvidia]), (false, String::new(), 0), "resources are configured");
        current.send_modify(|plan| Arc::make_mut(plan).usual = Some(MigStrategy::Mixed));
        assert_eq!(found(&[]), (false, String::new(), 0));
        let (are_new, names, patterns) = found(&[intel]);
        assert_eq!((are_new, &*names, patterns), (true, "gpu.intel.com/i915", 0));
        assert!(!found(&[intel]).0);
        let both = "gpu.intel.com/i915 nvidia.com/gpu";
        let (are_new, names, patterns) = found(&[intel, nvidia]);
        assert_eq!((are_new, &*names, patterns), (true, both, 3), "with that of each MIG profile");
        assert_eq!(found(&[]), (false, both.into(), 3), "absent hardware keeps its resource");
    }

    #[test]
    fn grants_are_read_only_for_a_plan_with_patterns() {
        let plan = watch::Sender::new(Arc::new(Plan { number: 1, ..Plan::default() }));
        let (root, nvml) = (HostRoot::new("/nonexistent"), NvmlSnapshot::empty());
        let held = || panic!("no resource depends on the grants");
        assert_eq!(planned(&root, &plan, (&nvml, false), held).0.number, 1);
    }

    #[test]
    fn the_resource_of_a_profile_stays_while_it_is_held_or_profiles_are_unknown() {
        let name = ResourceName::for_each_profile("a.b/mig-{mig_profile}").unwrap();
        let pattern = ResourceSpec::new(name, DeviceClass::Gpu);
        let plan = Plan { number: 1, patterns: Arc::new([Arc::new(pattern)]), ..Plan::default() };
        let dir = tempfile::tempdir().unwrap();
        let (root, plan) = (HostRoot::new(dir.path()), watch::Sender::new(Arc::new(plan)));
        let snapshot = |profiles: &[&str]| {
            let instance = |(gi, profile): (u32, &&str)| {
                let (uuid, profile) = (format!("MIG-{gi}"), Some((*profile).to_owned()));
                ((gi, 0), MigInstance { uuid, profile, index: None })
            };
            let instances = (1..).zip(profiles).map(instance).collect();
            let gpu = NvmlGpu { instances, ..NvmlGpu::default() };
            NvmlSnapshot { gpus: [("0000:01:00.0".parse().unwrap(), gpu)].into() }
        };
        let rescan = |profiles: &[&str], lacks_profile: bool, held: &[&str]| {
            let held = || held.iter().map(|name| name.parse().unwrap()).collect();
            let (planned, _) = planned(&root, &plan, (&snapshot(profiles), lacks_profile), held);
            let names = planned.specs.iter().map(|spec| spec.name.to_string());
            names.collect::<Vec<_>>().join(" ")
        };
        let (small, all) = ("a.b/mig-1g.10gb", "a.b/mig-1g.10gb a.b/mig-2g.20gb");
        assert_eq!(rescan(&[], true, &[]), "");
        assert_eq!(rescan(&["2g.20gb", "1g.10gb", "1c.2g.20gb", "1g.10gb"], false, &[]), all);
        assert_eq!(rescan(&["1g.10gb"], false, &["a.b/mig-2g.20gb"]), all);
        assert_eq!(rescan(&["1g.10gb"], true, &[]), all);
        assert_eq!(rescan(&["1g.10gb"], false, &[]), small);
        assert_eq!(rescan(&["1g.10gb+me"], false, &[small]), "a.b/mig-1g.10gb.me a.b/mig-1g.10gb");
    }
}
