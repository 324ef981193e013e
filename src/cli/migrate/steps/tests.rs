//! Plans for every state, and that following one leads to its goal.

use super::*;

const TARGETS: [Api; 3] = [Api::Plugin, Api::Dra, Api::Both];

fn holding(claim: bool) -> Holding {
    let (holder, device) = if claim {
        ("claim ml/train, pod ml/train-0", "dev:gpu1")
    } else {
        ("ml/web, container main", "dev:gpu0")
    };
    Holding { claim, holder: holder.into(), devices: vec![device.into()], ..Holding::default() }
}

/// A resource with three devices.
fn resource(api: &str, holders: &[bool]) -> Resource {
    Resource {
        name: "example.com/gpu".into(),
        returning: api == "returning",
        api: if api == "returning" { "plugin".into() } else { api.into() },
        listed: api != "dra" || holders.contains(&false),
        registered: api != "dra" || holders.contains(&false),
        by_number: if api == "plugin" || api == "both" { 3 - holders.len() } else { 0 },
        by_claim: if api == "dra" || api == "both" { 3 - holders.len() } else { 0 },
        published: if api == "plugin" { 0 } else { 3 },
        held: holders.iter().map(|claim| holding(*claim)).collect(),
        ..Resource::default()
    }
}

fn state(dra: bool, resources: Vec<Resource>) -> State {
    State { dra, kubelet: true, resources, ..State::default() }
}

fn plan_of(state: &State, to: Api) -> Plan {
    steps(state, to, &state.resources.iter().collect::<Vec<_>>())
}

fn kinds(plan: &Plan) -> Vec<&'static str> {
    plan.steps.iter().map(|step| step.kind).collect()
}

/// Every API with every set of holders.
fn states() -> Vec<(bool, &'static str, Vec<bool>)> {
    let holders = [vec![], vec![false], vec![true], vec![false, true]];
    let mut all = vec![(false, "plugin", vec![]), (false, "plugin", vec![false])];
    for api in ["plugin", "dra", "both", "returning"] {
        all.extend(holders.iter().map(|held| (true, api, held.clone())));
    }
    all
}

#[test]
fn each_state_has_the_steps_to_each_api() {
    for (dra, api, held) in states() {
        for to in TARGETS {
            let mut expected = Vec::new();
            if !dra && to != Api::Plugin {
                expected.push("enable");
            }
            let is_there = api == to.as_str() || (api == "returning" && to == Api::Plugin);
            if !is_there {
                expected.push("set");
            }
            if to == Api::Plugin && api != "plugin" {
                expected.push("wait");
            }
            if to != Api::Both && held.contains(&(to == Api::Plugin)) {
                expected.push("end");
            }
            let state = state(dra, vec![resource(api, &held)]);
            let plan = plan_of(&state, to);
            assert_eq!(kinds(&plan), expected, "{api} with {held:?} to {to:?}");
            assert_eq!(plan.steps.is_empty(), plan.warnings.is_empty());
            let is_full = |step: &Step| !step.pods.is_empty() && !step.reboot.is_empty();
            assert!(plan.steps.iter().all(is_full), "{plan:?}");
        }
    }
}

/// The state after a step, as the daemon reports it.
fn after(state: State, kind: &str, to: Api) -> State {
    let move_on = |it: Resource| {
        let held: Vec<bool> = it.held.iter().map(|held| held.claim).collect();
        let api = if it.returning { "returning" } else { it.api.as_str() };
        match kind {
            "set" if to == Api::Plugin => resource("returning", &held),
            "set" => resource(to.as_str(), &held),
            "wait" => resource("plugin", &held),
            "end" => {
                let left = held.into_iter().filter(|claim| *claim != (to == Api::Plugin));
                resource(api, &left.collect::<Vec<_>>())
            }
            _ => it,
        }
    };
    let dra = state.dra || kind == "enable";
    State { dra, resources: state.resources.into_iter().map(move_on).collect(), ..state }
}

#[test]
fn after_each_step_the_plan_has_the_remaining_ones() {
    for (dra, api, held) in states() {
        for to in TARGETS {
            let mut state = state(dra, vec![resource(api, &held)]);
            let mut left = kinds(&plan_of(&state, to));
            while !left.is_empty() {
                state = after(state, left.remove(0), to);
                assert_eq!(kinds(&plan_of(&state, to)), left, "{api} with {held:?} to {to:?}");
            }
            assert_eq!(state.resources[0].api, to.as_str());
            let waits = state.resources[0].waits(&state);
            assert!(waits.is_empty(), "{api} with {held:?} to {to:?}: {waits:?}");
        }
    }
}

#[test]
fn each_state_says_what_the_next_step_waits_for() {
    let waits = |resource: Resource| {
        let state = state(true, vec![resource]);
        state.resources[0].waits(&state).join("\n")
    };
    assert_eq!(waits(resource("both", &[false, true])), "");
    assert_eq!(waits(resource("plugin", &[false])), "");
    assert_eq!(waits(resource("dra", &[true])), "");
    let dra = waits(resource("dra", &[false, true]));
    assert!(dra.contains("ml/web, container main (dev:gpu0)") && !dra.contains("train"), "{dra}");
    for api in ["plugin", "returning"] {
        let number = waits(resource(api, &[false, true]));
        assert!(number.contains("ml/train") && !number.contains("ml/web"), "{number}");
        assert_eq!(number.contains("10 s"), api == "returning", "{number}");
    }
    let mut ended = resource("dra", &[false]);
    ended.held[0].release_waits_for = Some("the removal of its cgroup".into());
    assert!(waits(ended).contains("(dev:gpu0) waits for the removal of its cgroup"));
    let alone = Resource { registered: false, ..resource("both", &[]) };
    assert!(waits(alone).contains("kubelet"));
    assert!(waits(Resource { published: 0, ..resource("dra", &[]) }).contains("API server"));
}

#[test]
fn a_restart_and_a_reboot_name_the_holders_of_that_step() {
    let mut sick = resource("plugin", &[false, true]);
    sick.held[0].unhealthy = vec!["dev:gpu0 (cordoned)".into()];
    let state = state(true, vec![sick]);
    let plan = plan_of(&state, Api::Dra);
    let [set, end] = &plan.steps[..] else { panic!("{plan:?}") };
    let (at_set, at_end) = (set.kubelet_restart.join("\n"), end.kubelet_restart.join("\n"));
    assert!(at_set.contains("slices") && at_set.contains("with a claim run on"), "{at_set}");
    assert!(at_set.contains("ml/web, container main may be rejected: unhealthy: dev:gpu0"));
    assert!(at_end.contains("slices") && at_end.contains("with a claim run on"), "{at_end}");
    assert!(!at_end.contains("number"), "{at_end}");
    // After the reload no free device is given by number.
    assert!(set.reboot.join("\n").contains("which stay Pending without a claim"));
    let enable = plan_of(&self::state(false, vec![resource("plugin", &[false])]), Api::Both);
    let of_enable = enable.steps[0].reboot.join("\n");
    assert!(of_enable.contains("create others") && !of_enable.contains("Pending"), "{of_enable}");
    let number = plan_of(&self::state(true, vec![resource("dra", &[true])]), Api::Plugin);
    assert_eq!(number.steps.last().unwrap().reboot, ["no pod has a device"]);
}

#[test]
fn a_plan_warns_of_what_the_kubelet_and_the_scheduler_do() {
    let warnings = |resource: Resource, to: Api| {
        let state = State {
            problems: vec!["the API server answered 403".into()],
            ..state(true, vec![resource])
        };
        plan_of(&state, to).warnings.join("\n")
    };
    let plain = warnings(resource("plugin", &[]), Api::Dra);
    assert!(plain.contains("403") && plain.contains("extendedResourceName"), "{plain}");
    assert!(!plain.contains("five minutes"), "{plain}");
    let hooked = Resource { pre_start: true, ..resource("plugin", &[]) };
    assert!(warnings(hooked, Api::Dra).contains("their start fails"));
    let lost = Resource { registered: false, ..resource("plugin", &[false]) };
    assert!(warnings(lost, Api::Both).contains("does not have example.com/gpu, whose containers"));
    assert!(warnings(resource("dra", &[]), Api::Both).contains("race for a device"));
    assert!(warnings(resource("dra", &[true]), Api::Plugin).contains("unprepare"));
    for (pre_start, to, is_expected) in [
        (true, Api::Both, true),
        (true, Api::Plugin, true),
        (true, Api::Dra, false),
        (false, Api::Both, false),
    ] {
        let held = Resource {
            pre_start,
            ..resource(if to == Api::Dra { "both" } else { "dra" }, &[true])
        };
        let text = warnings(held, to);
        assert_eq!(text.contains("does not start its container again"), is_expected, "{text}");
        assert_eq!(text.contains("counts twice"), to != Api::Dra, "{text}");
    }
    let away = State { kubelet: false, ..state(true, vec![resource("plugin", &[])]) };
    assert!(plan_of(&away, Api::Dra).warnings[0].contains("socket is missing"));
}

/// A class makes a claim for such a pod only where no device is allocatable by number.
#[test]
fn pods_that_request_a_number_get_what_containers_leave_or_a_claim() {
    let plan =
        |holders: &[bool]| plan_of(&state(true, vec![resource("plugin", holders)]), Api::Dra);
    let free = plan(&[]).steps[0].pods.join("\n");
    assert!(free.contains("stay Pending, or get a claim by a DeviceClass"), "{free}");
    let held = plan(&[false]);
    let [set, end] = &held.steps[..] else { panic!("{held:?}") };
    let (set, end) = (set.pods.join("\n"), end.pods.join("\n"));
    assert!(set.contains("get the device of a container that ends") && !set.contains("a claim"));
    assert!(end.contains("get a claim if a DeviceClass"), "{end}");
    assert!(held.warnings.join("\n").contains("Cordon the node until then"));
}

#[test]
fn resources_move_together_and_those_that_are_there_stay() {
    let second = Resource { name: "example.com/nic".into(), ..resource("dra", &[]) };
    let state = state(true, vec![resource("both", &[false]), second]);
    let plan = plan_of(&state, Api::Dra);
    assert_eq!(kinds(&plan), ["set", "end"]);
    assert!(plan.steps[0].action.contains("\"dra\"` for example.com/gpu, run"), "{plan:?}");
    let both = plan_of(&state, Api::Plugin);
    assert_eq!(kinds(&both), ["set", "wait"]);
    assert!(both.steps[0].action.contains("for example.com/gpu, example.com/nic, run"));
    assert_eq!(both.steps[1].pods, ["new pods that request a number get free devices after it"]);
}

#[test]
fn a_sentence_names_a_few_of_many_holders() {
    let held = Resource { held: vec![holding(false); 20], ..resource("dra", &[false]) };
    let plan = plan_of(&state(true, vec![held]), Api::Dra);
    assert!(plan.steps[0].action.ends_with("and 12 more (`holdfast migrate status`)"));
}
