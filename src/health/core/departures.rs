//! Removal from a list: of a resource that the plan no longer has, and of a device that another
//! resource has now.
//!
//! A removed resource stays as it was, without selecting devices, while one of its ids is in its
//! list: held, with a pending hook, or about to leave (I3). Then it has an empty list for a short
//! time, which is the last list that the kubelet gets for it.
//!
//! A device that moves is in two lists for a time, and healthy in at most one of them. The new list
//! has it as `held_as_other` until no container holds it under the former id. Also until no
//! Allocate for that id can be in flight. The same applies to any other id that leads to the same
//! object: `domain/object.rs` has the rule.

use super::held::{Held, IdsInUse};
use super::{Judge, Rules};
use crate::domain::{
    DeviceId, Evidence, Health, Objects, Offering, PendingHooks, Reason, ResourceName, ResourceSpec,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long an Allocate for an id may still be in flight after the id became unhealthy. The kubelet
/// gets the list within a second, and an answer takes two seconds at most.
pub(super) const ALLOCATE_IN_FLIGHT_MAX: Duration = Duration::from_secs(3);
/// How long a resource has an empty list before it ends. The kubelet gets a list within a second.
pub(super) const EMPTY_LIST_FOR: Duration = Duration::from_secs(2);

impl Judge {
    /// Uses these resources from now on, since the next evidence was made with them. Resources that
    /// are no longer among them leave with their last id.
    pub(crate) fn apply_plan(&mut self, specs: Arc<[Arc<ResourceSpec>]>, rules: Rules) {
        self.specs = specs;
        self.cases.apply_rules(rules);
        self.forget_checks();
    }

    /// The resources to judge: those of the plan, then those that are being removed. Returns the
    /// number of the first group too.
    pub(super) fn judged(&self) -> (Vec<Arc<ResourceSpec>>, usize) {
        let mut specs: Vec<Arc<ResourceSpec>> =
            self.specs.iter().filter(|spec| !spec.is_orphan()).cloned().collect();
        let planned = specs.len();
        let mut names: BTreeSet<ResourceName> =
            specs.iter().map(|spec| spec.name.clone()).collect();
        let listed = self.inventory.resources.values().map(|offering| &offering.spec);
        // As it was in its list, or else as an orphan of the ledger.
        for spec in listed.chain(self.specs.iter()) {
            if names.insert(spec.name.clone()) {
                specs.push(Arc::clone(spec));
            }
        }
        (specs, planned)
    }

    /// Forgets these devices, except those that were found again since.
    pub(crate) fn forget(&mut self, mut devices: Vec<DeviceId>) {
        devices.retain(|id| {
            self.evidence.as_ref().is_none_or(|evidence| !evidence.devices.contains_key(id))
        });
        self.cases.forget(&devices);
    }

    /// When the last list of a resource has been published for long enough.
    pub(super) fn next_removal(&self) -> Option<Duration> {
        self.emptied.values().min().map(|since| *since + EMPTY_LIST_FOR)
    }

    /// Devices whose resource no longer has a check do not wait for one.
    fn forget_checks(&mut self) {
        let is_checked = |name: &ResourceName| {
            self.specs.iter().any(|spec| spec.name == *name && spec.hooks.check.is_some())
        };
        let former = self.inventory.resources.iter().filter(|(name, _)| !is_checked(name));
        let devices: BTreeSet<DeviceId> = former
            .flat_map(|(_, offering)| {
                offering.devices.values().map(|offered| offered.device.id.clone())
            })
            .collect();
        self.cases.forget_checks(&devices);
    }
}

/// Makes every id unhealthy whose device may be in use under another id. Such a device is held, has
/// a pending hook, or is about to leave (`in_use`). Returns whether there is such an id.
pub(super) fn resolve_conflicts(
    resources: &mut BTreeMap<ResourceName, Offering>,
    mut in_use: Vec<IdsInUse>,
    held: &Held,
    due: &PendingHooks,
) -> bool {
    let mut has_conflicts = false;
    // A held id also uses the present nodes of its device, which may differ from those that its
    // holder got.
    for (resource, ids) in &held.ids {
        let devices = resources.get(resource).map(|offering| &offering.devices);
        let listed = ids.keys().filter_map(|id| Some((id, devices?.get(id)?)));
        in_use
            .extend(listed.map(|(id, offered)| IdsInUse::of(resource, id, &offered.device, true)));
    }
    // The device still has the state of its last holder, so no other id may grant it.
    let due_hooks = due.values().flat_map(BTreeMap::values).filter(|hook| !hook.objects.is_empty());
    in_use.extend(due_hooks.map(|hook| IdsInUse {
        resource: hook.resource.clone(),
        ids: vec![hook.device.clone()],
        objects: hook.objects.clone(),
        is_held: true,
        is_of_claim: false,
    }));
    let in_use: Vec<&IdsInUse> = in_use.iter().chain(&held.grants).collect();
    if in_use.is_empty() {
        return has_conflicts;
    }
    let mut objects: Objects<usize> = Objects::default();
    // For some grants the ledger has nothing but the id.
    let mut by_device: BTreeMap<DeviceId, Vec<&IdsInUse>> = BTreeMap::new();
    for (index, used) in in_use.iter().enumerate() {
        objects.hold(&index, used.objects.iter().cloned());
        for id in &used.ids {
            by_device.entry(id.shared().unwrap_or_else(|| id.clone())).or_default().push(used);
        }
    }
    for (name, offering) in resources {
        let held = held.of(name);
        for (id, offered) in &mut offering.devices {
            if !offered.health.is_healthy() || held.is_some_and(|held| held.contains_key(id)) {
                continue;
            }
            let is_other = |used: &&IdsInUse| !used.may_coexist_with(name, id);
            let by_id = || {
                by_device.get(&offered.device.id).is_some_and(|in_use| in_use.iter().any(&is_other))
            };
            if by_id()
                || objects
                    .conflict(&offered.device.objects(), |index| {
                        in_use[*index].may_coexist_with(name, id)
                    })
                    .is_some()
            {
                offered.health = Health::Unhealthy(Reason::HeldAsOther);
                has_conflicts = true;
            }
        }
    }
    has_conflicts
}

/// Whether two offered devices lead to one object.
pub(super) fn overlaps(evidence: &Evidence) -> bool {
    let mut given: Objects<&DeviceId> = Objects::default();
    let offered = evidence.selected.values().flatten().filter_map(|id| evidence.devices.get(id));
    for device in offered {
        let objects = device.objects();
        if given.conflict(&objects, |other| **other == device.id).is_some() {
            return true;
        }
        given.hold(&&device.id, objects);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::LEAVE_AFTER;
    use super::*;
    use crate::domain::{
        Attributes, Device, DeviceClass, DeviceNode, GrantedDevice, Inventory, Listed, Moment,
        Sharing, Timestamp, Verdict, Verdicts,
    };
    use proptest::prelude::*;

    fn name(text: &str) -> ResourceName {
        format!("example.com/{text}").parse().unwrap()
    }

    fn at(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn device(id: &str) -> Arc<Device> {
        Arc::new(Device {
            id: DeviceId::new(id),
            key: format!("dev:/dev/{id}"),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: vec![DeviceNode {
                container: format!("/dev/as/{id}"),
                ..DeviceNode::at(format!("/dev/{id}"))
            }],
            attributes: Attributes::default(),
        })
    }

    /// A plan: the devices that each resource selects.
    type Plan<'a> = [(&'a str, Sharing, &'a [&'a str])];

    struct TestJudge {
        judge: Judge,
        held: Held,
    }

    impl TestJudge {
        fn new() -> Self {
            let judge = Judge::new(
                Arc::from([]),
                Arc::default(),
                &Listed::new(),
                Rules::default(),
                &Verdicts::new(),
            );
            TestJudge { judge, held: Held::default() }
        }

        /// The devices `a` and `b` are present, under any plan.
        fn plan(&mut self, secs: u64, plan: &Plan<'_>) -> Arc<Inventory> {
            let spec = |(resource, sharing, _): &(&str, Sharing, _)| {
                Arc::new(ResourceSpec {
                    sharing: *sharing,
                    ..ResourceSpec::new(name(resource), DeviceClass::Char)
                })
            };
            self.judge.apply_plan(plan.iter().map(spec).collect(), Rules::default());
            let ids = |ids: &[&str]| ids.iter().map(|id| DeviceId::new(*id)).collect();
            let evidence = Evidence {
                began: Moment { boot: at(secs), wall: Timestamp(0) },
                devices: ["a", "b"].map(|id| (DeviceId::new(id), device(id))).into(),
                selected: plan
                    .iter()
                    .map(|(resource, _, selected)| (name(resource), ids(selected)))
                    .collect(),
                missing_nodes: BTreeSet::new(),
                unfulfilled: Default::default(),
                unread: crate::domain::Unread::default(),
            };
            self.judge.discovered(Arc::new(evidence));
            self.at(secs)
        }

        fn at(&mut self, secs: u64) -> Arc<Inventory> {
            self.judge.judge(&self.held, &PendingHooks::new(), at(secs)).unwrap()
        }

        fn hold(&mut self, resource: &str, id: &str) {
            let known = GrantedDevice {
                id: DeviceId::new(id),
                key: format!("dev:/dev/{id}"),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: Vec::new(),
            };
            self.held.ids.entry(name(resource)).or_default().insert(known.id.clone(), known);
        }
    }

    /// Every list as `resource:id=health`.
    fn lists(inventory: &Inventory) -> Vec<String> {
        let word = |health: Health| health.reason().map_or("ok", Reason::as_str);
        let of = |(name, offering): (&ResourceName, &Arc<Offering>)| {
            let short = name.as_str().rsplit('/').next().unwrap().to_owned();
            let ids = offering
                .devices
                .iter()
                .map(|(id, offered)| format!("{short}:{id}={}", word(offered.health)));
            ids.chain(offering.devices.is_empty().then(|| format!("{short}:"))).collect::<Vec<_>>()
        };
        inventory.resources.iter().flat_map(of).collect()
    }

    use Sharing::{Exclusive, Replicas};

    #[test]
    fn a_removed_resource_ends_after_its_last_device_and_one_empty_list() {
        let mut test = TestJudge::new();
        assert_eq!(lists(&test.plan(0, &[("x", Exclusive, &["a", "b"])])), ["x:a=ok", "x:b=ok"]);
        test.hold("x", "a");
        let removed = test.plan(1, &[]);
        assert_eq!(lists(&removed), ["x:a=ok", "x:b=deselected"]);
        // The list keeps the device as it was: its node has its own name in the container.
        assert_eq!(
            removed.resources[&name("x")].devices[&DeviceId::new("a")].device.nodes[0].container,
            "/dev/as/a"
        );
        assert_eq!(test.judge.next_deadline(at(1)), Some(at(1) + LEAVE_AFTER));
        assert_eq!(lists(&test.at(61)), ["x:a=ok"]);
        test.held.ids.clear();
        assert_eq!(lists(&test.at(100)), ["x:a=deselected"]);
        let left = 100 + LEAVE_AFTER.as_secs();
        assert_eq!(lists(&test.at(left)), ["x:"], "the kubelet gets an empty list");
        assert_eq!(test.judge.next_deadline(at(left)), Some(at(left) + EMPTY_LIST_FOR));
        assert_eq!(lists(&test.at(left + EMPTY_LIST_FOR.as_secs())), Vec::<String>::new());
        // A resource that returns meanwhile is like any other.
        assert_eq!(lists(&test.plan(200, &[("x", Exclusive, &["b"])])), ["x:b=ok"]);
    }

    #[test]
    fn a_resource_known_only_from_the_ledger_ends_like_a_removed_one() {
        let mut test = TestJudge::new();
        test.hold("x", "a");
        let orphan: Arc<[_]> = Arc::from([Arc::new(ResourceSpec::orphan(name("x")))]);
        test.judge =
            Judge::new(orphan, Arc::default(), &Listed::new(), Rules::default(), &Verdicts::new());
        let evidence = Evidence {
            began: Moment { boot: at(0), wall: Timestamp(0) },
            devices: [(DeviceId::new("a"), device("a"))].into(),
            selected: BTreeMap::new(),
            missing_nodes: BTreeSet::new(),
            unfulfilled: Default::default(),
            unread: crate::domain::Unread::default(),
        };
        test.judge.discovered(Arc::new(evidence));
        assert_eq!(lists(&test.at(0)), ["x:a=ok"]);
        test.held.ids.clear();
        test.at(10);
        assert_eq!(lists(&test.at(70)), ["x:"]);
        assert_eq!(lists(&test.at(72)), Vec::<String>::new());
    }

    #[test]
    fn a_forgotten_device_has_no_verdict_unless_it_was_found_again() {
        let verdicts: Verdicts = ["a", "gone"]
            .map(|id| (DeviceId::new(id), Verdict { is_latched: true, ..Verdict::default() }))
            .into();
        let mut test = TestJudge::new();
        test.judge =
            Judge::new(Arc::from([]), Arc::default(), &Listed::new(), Rules::default(), &verdicts);
        test.plan(0, &[("x", Exclusive, &["a"])]);
        assert!(test.judge.verdicts().contains_key(&DeviceId::new("gone")));
        test.judge.forget(vec![DeviceId::new("a"), DeviceId::new("gone")]);
        assert_eq!(test.judge.verdicts().keys().map(DeviceId::as_str).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_device_that_moves_is_healthy_in_one_list_at_most() {
        let mut test = TestJudge::new();
        test.plan(0, &[("x", Exclusive, &["a", "b"]), ("y", Exclusive, &[])]);
        test.hold("x", "a");
        let moved = lists(&test.plan(1, &[("x", Exclusive, &[]), ("y", Exclusive, &["a", "b"])]));
        assert_eq!(moved, ["x:a=ok", "x:b=deselected", "y:a=held_as_other", "y:b=held_as_other"]);
        assert_eq!(test.judge.next_deadline(at(1)), Some(at(1) + ALLOCATE_IN_FLIGHT_MAX));
        assert_eq!(lists(&test.at(4)), ["x:a=ok", "x:b=deselected", "y:a=held_as_other", "y:b=ok"]);
        test.held.ids.clear();
        assert_eq!(
            lists(&test.at(5))[..3],
            ["x:a=deselected", "x:b=deselected", "y:a=held_as_other"]
        );
        assert_eq!(lists(&test.at(8))[2..], ["y:a=ok", "y:b=ok"]);
        // And back again, with another name of the resource.
        let back = lists(&test.plan(9, &[("z", Exclusive, &["a", "b"])]));
        assert_eq!(
            back,
            [
                "x:a=deselected",
                "x:b=deselected",
                "y:a=deselected",
                "y:b=deselected",
                "z:a=held_as_other",
                "z:b=held_as_other"
            ]
        );
        assert_eq!(lists(&test.at(12))[4..], ["z:a=ok", "z:b=ok"]);
    }

    #[test]
    fn shares_of_a_device_wait_for_its_exclusive_holder() {
        let mut test = TestJudge::new();
        test.plan(0, &[("x", Exclusive, &["a", "b"])]);
        test.hold("x", "a");
        let shared = test.plan(1, &[("x", Replicas(2), &["a", "b"])]);
        let healthy = |inventory: &Inventory| {
            lists(inventory).into_iter().filter(|list| list.ends_with("=ok")).collect::<Vec<_>>()
        };
        assert_eq!(healthy(&shared), ["x:a=ok"]);
        assert_eq!(healthy(&test.at(4)), ["x:a=ok", "x:b::0=ok", "x:b::1=ok"]);
        test.held.ids.clear();
        test.at(5);
        assert_eq!(healthy(&test.at(8)), ["x:a::0=ok", "x:a::1=ok", "x:b::0=ok", "x:b::1=ok"]);
        // With fewer shares the others stay healthy. An exclusive device waits for the last of the
        // shares.
        test.hold("x", "a::0");
        assert_eq!(
            healthy(&test.plan(9, &[("x", Replicas(3), &["a"])])),
            ["x:a::0=ok", "x:a::1=ok", "x:a::2=ok"]
        );
        assert_eq!(
            healthy(&test.plan(10, &[("x", Replicas(2), &["a"])])),
            ["x:a::0=ok", "x:a::1=ok"]
        );
        test.plan(11, &[("x", Exclusive, &["a"])]);
        assert_eq!(healthy(&test.at(20)), ["x:a::0=ok"]);
        test.held.ids.clear();
        test.at(21);
        assert_eq!(healthy(&test.at(24)), ["x:a=ok"]);
    }

    /// One step of a node whose configuration changes all the time.
    #[derive(Debug, Clone)]
    enum Step {
        /// Each device is selected by `x`, by `y` or by none. Each resource is shared, exclusive or
        /// absent.
        Plan([usize; 2], [Option<Sharing>; 2]),
        /// The kubelet allocates one of the healthy free ids, and the grant is known this many
        /// seconds later.
        Allocate(usize, u64),
        /// One of the holds ends.
        Release(usize),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let sharing = || {
            proptest::sample::select(vec![
                None,
                Some(Exclusive),
                Some(Exclusive),
                Some(Replicas(2)),
            ])
        };
        prop_oneof![
            ([0..3usize, 0..3usize], [sharing(), sharing()])
                .prop_map(|(to, sharing)| Step::Plan(to, sharing)),
            (any::<usize>(), 0..3u64).prop_map(|(nth, late)| Step::Allocate(nth, late)),
            any::<usize>().prop_map(Step::Release),
            prop_oneof![0..5u64, 55..70u64].prop_map(Step::Wait),
        ]
    }

    proptest! {
        /// An exclusive holder never shares its device, with any change of the configuration, and
        /// every held id is listed.
        #[test]
        fn no_container_is_given_an_exclusive_device_of_another_one(steps in proptest::collection::vec(step(), 1..60)) {
            let mut test = TestJudge::new();
            let (mut now, mut late) = (0, Vec::<(u64, String, DeviceId)>::new());
            let mut inventory = test.plan(0, &[]);
            for step in steps {
                match step {
                    Step::Plan(to, sharing) => {
                        let of = |resource: usize| ["a", "b"].into_iter().zip(to).filter(move |(_, to)| *to == resource).map(|(id, _)| id).collect::<Vec<_>>();
                        let selected = [of(0), of(1)];
                        let plan: Vec<_> = ["x", "y"].into_iter().enumerate().filter_map(|(n, name)| Some((name, sharing[n]?, &selected[n][..]))).collect();
                        inventory = test.plan(now, &plan);
                    }
                    Step::Allocate(nth, after) => {
                        let free: Vec<_> = lists(&inventory).into_iter().filter_map(|list| {
                            let (resource, id) = list.strip_suffix("=ok")?.split_once(':')?;
                            let (resource, id) = (resource.to_owned(), DeviceId::new(id));
                            let is_held = test.held.ids.get(&name(&resource)).is_some_and(|held| held.contains_key(&id));
                            (!is_held && !late.iter().any(|(_, of, known)| *of == resource && *known == id)).then_some((resource, id))
                        }).collect();
                        if !free.is_empty() {
                            let (resource, id) = free[nth % free.len()].clone();
                            late.push((now + after, resource, id));
                        }
                    }
                    Step::Release(nth) => {
                        let held: Vec<_> = test.held.ids.iter().flat_map(|(name, ids)| ids.keys().map(|id| (name.clone(), id.clone()))).collect();
                        if !held.is_empty() {
                            let (name, id) = &held[nth % held.len()];
                            test.held.ids.get_mut(name).unwrap().remove(id);
                            inventory = test.at(now);
                        }
                    }
                    Step::Wait(secs) => {
                        // Second by second, so that all deadlines are kept.
                        for _ in 0..=secs {
                            for (_, resource, id) in late.extract_if(.., |(due, ..)| *due <= now) {
                                test.hold(&resource, id.as_str());
                            }
                            inventory = test.at(now);
                            now += 1;
                        }
                    }
                }
                let mut holders: BTreeMap<DeviceId, Vec<(&ResourceName, &DeviceId)>> = BTreeMap::new();
                for (name, ids) in &test.held.ids {
                    for id in ids.keys() {
                        prop_assert!(inventory.resources.get(name).is_some_and(|offering| offering.devices.contains_key(id)), "{id} left {name}");
                        holders.entry(id.shared().unwrap_or_else(|| id.clone())).or_default().push((name, id));
                    }
                }
                for (device, holders) in holders {
                    let shared = holders.iter().all(|(name, id)| *name == holders[0].0 && id.shared().is_some());
                    prop_assert!(holders.len() == 1 || shared, "{device} is held as {holders:?}");
                }
            }
        }
    }
}
