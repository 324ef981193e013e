//! Explanations as golden text, and the names that find them.

use super::*;
use crate::domain::{
    AllocId, ContainerEdits, GrantState, GrantedDevice, HookState, MissingProof, PendingHook,
    PodRef, PodSight, Timestamp,
};

fn report(id: &str, health: &str, reason: Option<&str>) -> DeviceReport {
    let reason = reason.map_or("null".to_owned(), |reason| format!("\"{reason}\""));
    serde_json::from_str(&format!(
        r#"{{"id":"{id}","key":"pci:0000:18:00.0/10de:2330","resources":["nvidia.com/gpu"],"health":"{health}",
            "reason":{reason},"detail":null,"state":"healthy","healthy_in_seconds":null,"cordoned":null,"flaps":0,
            "incidents":[],"said":[],"class":"gpu","numa_nodes":[1],"bridges":[],"names":["/dev/nvidia0"]}}"#
    ))
    .unwrap()
}

fn grant(n: u64, id: &str, name: &str, state: fn(PodRef) -> GrantState) -> Grant {
    let pod =
        PodRef { uid: format!("u{n}"), namespace: Some("ml".into()), name: Some(name.into()) };
    let device = GrantedDevice {
        id: DeviceId::new(id),
        key: "pci:0000:18:00.0/10de:2330".into(),
        numa_nodes: vec![1],
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Grant {
        alloc_id: AllocId::new(format!("a-{n}")),
        resource: "nvidia.com/gpu".parse().unwrap(),
        devices: vec![device],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: String::new(),
        kubelet: None,
        granted_at: Timestamp(1_700_000_000_000),
        version: String::new(),
        state: state(pod),
    }
}

fn bound(pod: PodRef) -> GrantState {
    GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(1_700_000_001_000) }
}

/// A free device, one of a running pod, and one of a removed pod.
fn facts() -> Facts {
    let release = PendingRelease {
        pod: PodSight::Gone,
        since: Some(Timestamp(1_700_000_060_000)),
        lists: 1,
        waits_for: vec![MissingProof::KubeletSettled, MissingProof::Lists],
    };
    Facts {
        devices: vec![
            report("GPU-aa", "Healthy", None),
            report("GPU-bb", "Healthy", None),
            report("GPU-cc", "Unhealthy", Some("xid")),
        ],
        grants: vec![grant(1, "GPU-bb", "web-0", bound), grant(2, "GPU-cc", "train-0", bound)],
        pending: PendingReleases::from([(AllocId::new("a-2"), release)]),
        hooks: Vec::new(),
    }
}

/// The explanation, as a terminal without colours shows it.
fn explained(facts: &Facts, subject: &str) -> String {
    let subject = facts.find(subject).unwrap();
    text(&document(facts, &subject), Screen::default()).to_string()
}

#[test]
fn a_device_is_explained_in_a_few_lines_of_80_columns() {
    let facts = facts();
    let wanted = "\
GPU-cc: gpu, 0000:18:00.0, /dev/nvidia0, NUMA node 1
  offered    no: it is in the list of nvidia.com/gpu as unhealthy
  health     Unhealthy: xid
  held by    ml/train-0, container main, since 2023-11-14T22:13:20Z
  by         an Allocate (device plugin)
  state      pod gone: the pod has ended, and the kubelet has removed its
             cgroup; the kubelet has not listed it since 2023-11-14T22:14:20Z
  waits for  a kubelet that has run for a minute; before that its list may lack
             pods
  waits for  two lists of the kubelet without the pod, 5 s apart (one came)
  then       the device is released as soon as that is proven, usually within a
             minute; if not, see HoldfastGrantSuspect in docs/operate.md
  next       no new container gets it until the cause has ended; docs/health.md
             explains the reason
";
    assert_eq!(explained(&facts, "GPU-cc"), wanted);
    for (lists, has_addition) in [(0, false), (1, true), (2, false)] {
        let mut facts = self::facts();
        facts.pending.values_mut().for_each(|release| release.lists = lists);
        let text = explained(&facts, "GPU-cc");
        assert_eq!(text.contains("(one came)"), has_addition, "{lists}: {text}");
        assert!(text.contains("two lists of the kubelet"), "{lists}: {text}");
    }
    let wanted = "\
GPU-aa: gpu, 0000:18:00.0, /dev/nvidia0, NUMA node 1
  offered    yes, as nvidia.com/gpu
  health     Healthy
  next       it is free: the next container that asks may get it
";
    assert_eq!(explained(&facts, "GPU-aa"), wanted);
}

#[test]
fn a_pod_is_explained_with_each_of_its_devices() {
    let mut facts = facts();
    facts.grants.push(grant(1, "GPU-aa", "web-0", bound));
    let shown = explained(&facts, "ml/web-0");
    assert!(shown.starts_with("pod ml/web-0 has 2 devices\n\nGPU-aa: gpu"), "{shown}");
    assert!(shown.contains("\n\nGPU-bb: gpu"), "{shown}");
    assert!(shown.contains("\n  state      bound: the container may use it\n"), "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() <= COLUMNS), "{shown}");
    assert_eq!(explained(&facts, "uid:u1").lines().next(), shown.lines().next());
}

#[test]
fn a_cordon_and_a_hook_are_what_happens_next() {
    let mut facts = facts();
    facts.devices[0].cordoned = Some("fan".into());
    let shown = explained(&facts, "GPU-aa");
    let wanted = "no new container gets it until `holdfast device uncordon GPU-aa`";
    assert!(shown.contains(wanted), "{shown}");

    let owed = PendingHook {
        resource: "nvidia.com/gpu".parse().unwrap(),
        device: DeviceId::new("GPU-bb"),
        key: String::new(),
        objects: Vec::new(),
        alloc_id: AllocId::new("a-0"),
        pod: None,
        container: None,
        released_at: Timestamp(0),
        state: HookState::Due,
    };
    facts.hooks = vec![HookReport { owed, awaited_by: Vec::new() }];
    let shown = explained(&facts, "GPU-bb");
    assert!(shown.contains("no container starts with it until its hook"), "{shown}");
}

#[test]
fn a_device_without_a_list_and_a_released_grant_are_explained() {
    let mut facts = facts();
    facts.devices.clear();
    let shown = explained(&facts, "GPU-bb");
    assert!(shown.starts_with("GPU-bb: 0000:18:00.0\n  offered    no: no resource"), "{shown}");

    let last = grant(9, "GPU-zz", "old", |pod| GrantState::Released {
        pod: Some(pod),
        container: Some("main".into()),
        bound_at: None,
        released_at: Timestamp(1_700_000_002_000),
        released_by: "pod_gone".into(),
        other_pods: Vec::new(),
    });
    let subject = Subject { last: Some(last), ..Subject::default() };
    let shown = text(&document(&facts, &subject), Screen::default());
    assert!(
        shown.starts_with(
            "it holds no device\n  last held  by ml/old, container main, from \
             2023-11-14T22:13:20Z until\n             2023-11-14T22:13:22Z\n  proof      pod_gone: "
        ),
        "{shown}"
    );
}

#[test]
fn an_unknown_name_gets_near_matches_of_every_kind() {
    let facts = facts();
    assert!(facts.find("GPU-xx").is_none());
    for (typed, near) in [("GPU-ad", "`GPU-aa`"), ("web-1", "`ml/web-0`"), ("ml/trian-0", "`ml/t")]
    {
        let sentence = facts.unknown(typed).unwrap();
        assert!(sentence.starts_with(&format!("{NO_NAME}{typed}`; did you mean ")), "{sentence}");
        assert!(sentence.contains(near), "{sentence}");
    }
    let sentence = facts.unknown("nothing").unwrap();
    assert!(!sentence.contains("did you mean"), "{sentence}");
    // A prefix of several devices is not unknown.
    assert!(facts.find("GPU-").is_none() && facts.unknown("GPU-").is_err());
}

#[test]
fn the_document_has_the_grant_and_the_words() {
    let facts = facts();
    let subject = facts.find("train-0").unwrap();
    let json = serde_json::to_value(document(&facts, &subject)).unwrap();
    assert_eq!((&json["schema"], &json["holder"]), (&1.into(), &"pod ml/train-0".into()));
    let held = &json["devices"][0]["held_by"][0];
    assert_eq!((&held["alloc_id"], &held["state"]), (&"a-2".into(), &"bound".into()));
    assert_eq!(held["pending_release"]["waits_for"][1], "lists");
    assert_eq!(held["waits"].as_array().unwrap().len(), 2);
    assert!(json["last"].is_null());
}
