//! The page compared with a reviewed one, and tested with hostile names and with too many rows.

use super::*;
use crate::admin::ConfigReport;
use crate::admin::page::kubelet_since;
use crate::domain::{
    AllocId, ContainerEdits, DeviceId, GrantState, GrantedDevice, Incident, KubeletGeneration,
    LedgerHealth, PodRef, Reason,
};
use crate::picture::markup;
use std::collections::BTreeMap;

const START: u64 = 1_700_000_000_000;

fn device(id: &str, health: &str) -> DeviceReport {
    let is_sick = health == "Unhealthy";
    let failed = Incident {
        reason: Reason::Xid,
        detail: "Xid 79".into(),
        at: Timestamp(START + 60_000),
        until: None,
        held_by: Vec::new(),
    };
    DeviceReport {
        id: id.into(),
        key: String::new(),
        resources: ["nvidia.com/gpu".to_owned()].into(),
        health: Some(health.into()),
        reason: is_sick.then(|| "xid".into()),
        by_resource: BTreeMap::new(),
        detail: is_sick.then(|| "Xid 79".into()),
        state: if is_sick { "unhealthy" } else { "healthy" }.into(),
        healthy_in_seconds: None,
        cordoned: None,
        cordoned_at: None,
        evicts: false,
        outputs: Vec::new(),
        flaps: 0,
        incidents: if is_sick { vec![failed] } else { Vec::new() },
        class: None,
        numa_nodes: Vec::new(),
        bridges: Vec::new(),
        names: Vec::new(),
    }
}

fn grant(pod: &str, container: &str, id: &str) -> Arc<Grant> {
    let pod = PodRef { uid: "u-1".into(), namespace: Some("ml".into()), name: Some(pod.into()) };
    let edits = ContainerEdits {
        envs: BTreeMap::from([("TOKEN".into(), "secret-of-the-container".into())]),
        ..ContainerEdits::default()
    };
    Arc::new(Grant {
        alloc_id: AllocId::new("a-1"),
        resource: "nvidia.com/gpu".parse().unwrap(),
        devices: vec![GrantedDevice {
            id: DeviceId::new(id),
            key: "pci:x".into(),
            numa_nodes: vec![],
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits,
        claim: None,
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(START + 30_000),
        version: "0.1.0".into(),
        state: GrantState::Bound {
            pod,
            container: container.into(),
            bound_at: Timestamp(START + 31_000),
        },
    })
}

fn status(devices: &[DeviceReport]) -> Status {
    let healthy =
        devices.iter().filter(|device| device.health.as_deref() == Some("Healthy")).count();
    let report = ResourceReport {
        name: "nvidia.com/gpu".into(),
        registered: true,
        only_claims: false,
        api: None,
        devices: devices.len(),
        healthy,
        allocatable: healthy,
        held: 1,
        problem: None,
        too_long: false,
        disagreement: None,
        last_registration_ms: Some(2.25),
        api_version: Some("v1beta1".into()),
    };
    Status {
        checkpoint_unread: None,
        schema: 1,
        version: "0.1.0".into(),
        uptime_seconds: 120,
        ready: true,
        kubelet: Some(KubeletGeneration {
            inode: 7,
            made_ns: i64::try_from(START).unwrap() * 1_000_000,
        }),
        socket_left_behind: false,
        config: ConfigReport {
            files: vec!["/etc/x.toml".into()],
            generation: 1,
            loaded_at: Timestamp(START),
            ..ConfigReport::default()
        },
        ledger: LedgerHealth { journal: true, database: true, not_durable: 0, unreadable: None },
        ledger_hangs: false,
        ledger_refuses: true,
        not_recorded: None,
        recovery: None,
        not_served: None,
        not_readable: Vec::new(),
        labels_not_followed: None,
        labels_not_written: None,
        not_reported: Vec::new(),
        dra_problems: Vec::new(),
        hooks: Vec::new(),
        pending_releases: Vec::new(),
        not_run: Vec::new(),
        mps: crate::domain::MpsStates::new(),
        resources: vec![report],
        ailing: devices
            .iter()
            .filter(|device| device.health.as_deref() == Some("Unhealthy"))
            .cloned()
            .collect(),
        signals_off: BTreeMap::new(),
        nvidia_driver: None,
        unread: Default::default(),
    }
}

fn made(devices: &[DeviceReport], grants: &[Arc<Grant>]) -> String {
    let status = status(devices);
    let picture = "<svg></svg>".to_owned();
    let facts = Facts {
        status: &status,
        devices,
        grants,
        picture,
        refresh: Some(5),
        now: Timestamp(START + 120_000),
    };
    page(&facts, "STYLE\n")
}

/// Counts the elements of the page, which is valid XML after its first line.
fn elements(html: &str) -> usize {
    markup::elements(html.strip_prefix("<!DOCTYPE html>").unwrap())
}

/// People read the page, so a person must review each change of it in a browser.
#[test]
fn the_page_matches_the_golden_file() {
    let html = made(
        &[device("GPU-aa", "Healthy"), device("GPU-ab", "Unhealthy")],
        &[grant("train-0", "main", "GPU-aa")],
    );
    elements(&html);
    let golden = include_str!("golden.html");
    assert_eq!(
        html, golden,
        "if the change is wanted, and a browser shows it well, this is the new golden.html:\n{html}"
    );
}

#[test]
fn a_hostile_name_is_escaped_and_no_secret_is_shown() {
    let evil = "\"/></td><script src=//evil>alert(1)</script><!-- '&amp; \u{202e}\u{0}";
    let mut sick = device(evil, "Unhealthy");
    (sick.detail, sick.reason) = (Some(evil.into()), Some(evil.into()));
    sick.resources = [evil.to_owned()].into();
    let html = made(&[sick], &[grant(evil, evil, evil)]);
    let harmless = made(&[device("GPU-aa", "Unhealthy")], &[grant("train-0", "main", "GPU-aa")]);
    assert_eq!(elements(&html), elements(&harmless), "a name is one text node");
    assert!(
        !html.contains("<script")
            && !html.contains("<!--")
            && !html.contains('\u{202e}')
            && !html.contains('\u{0}'),
        "{html}"
    );
    assert!(
        !html.contains("secret-of-the-container") && !html.contains("TOKEN"),
        "what a container was given is its own"
    );
}

#[test]
fn the_size_of_the_page_is_bounded() {
    let long = "x".repeat(100_000);
    let devices: Vec<_> = (0..2000)
        .map(|n| device(&format!("{n}{long}"), if n % 2 == 0 { "Healthy" } else { "Unhealthy" }))
        .collect();
    let grants: Vec<_> = (0..2000).map(|n| grant(&format!("{n}{long}"), &long, &long)).collect();
    let html = made(&devices, &grants);
    elements(&html);
    assert!(html.len() < 512 * 1024, "{} bytes", html.len());
    assert!(
        html.contains("1000 healthy</summary>")
            && html.contains("and 872 more: <code>holdfast device show</code>")
    );
    assert!(
        html.contains("2000 grants are held")
            && html.contains("and 1872 more: <code>holdfast who</code>")
    );
}

#[test]
fn an_absent_kubelet_is_a_problem() {
    let mut status = status(&[]);
    status.kubelet = None;
    assert_eq!(kubelet_since(&status), None);
    let facts = Facts {
        status: &status,
        devices: &[],
        grants: &[],
        picture: String::new(),
        refresh: None,
        now: Timestamp(START),
    };
    let html = page(&facts, "");
    elements(&html);
    for text in [
        "one problem",
        "socket is missing",
        "<dt>kubelet</dt><dd>absent</dd>",
        "No container holds a device",
    ] {
        assert!(html.contains(text), "{text}");
    }
    assert!(!html.contains("http-equiv"));
}
