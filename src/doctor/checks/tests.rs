//! Each misconfiguration alone, as facts: exactly its code is found. A healthy node has no
//! findings.

use super::super::codes;
use super::super::testing::{NOW, healthy};
use super::super::{
    Answer, CODES, Code, ContainerdFile, DraApi, Facts, Level, PathState, Process, RefusedRequest,
    Resource, WriteAccess,
};
use super::{CHECKS, examine};
use crate::domain::{DeviceId, Timestamp};
use crate::hardware::NearMiss;
use crate::host::{InotifyLimits, InotifyRefusal, Medium};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

type Break = fn(&mut Facts);

fn status(facts: &mut Facts) -> &mut Value {
    match &mut facts.daemon.as_mut().unwrap().answer {
        Answer::Status(status) => status,
        other => panic!("{other:?}"),
    }
}

fn api(facts: &mut Facts) -> &mut DraApi {
    facts.dra.as_mut().unwrap().api.as_mut().unwrap().as_mut().unwrap()
}

fn denied() -> RefusedRequest {
    let why = "resourceslices is forbidden: ValidatingAdmissionPolicy 'p' denied request: no node";
    RefusedRequest { request: "create resourceslices".into(), why: why.into(), is_of_policy: false }
}

/// Removes all devices of the resource, from the scan and from the daemon's report.
fn empty(facts: &mut Facts) -> &mut Resource {
    status(facts)["resources"][0]["devices"] = 0.into();
    let resource = &mut facts.resources.as_mut().unwrap()[0];
    resource.devices = 0;
    resource
}

fn has_no_daemon(facts: &mut Facts) {
    let daemon = facts.daemon.as_mut().unwrap();
    (daemon.answer, daemon.pid, daemon.lock_holder) = (Answer::Absent, None, None);
    facts.processes = Some(Vec::new());
}

fn near(criterion: &'static str, wanted: &str, found: Option<&str>) -> Vec<NearMiss> {
    let miss = |id: &str| NearMiss {
        device: DeviceId::new(id),
        criterion,
        wanted: wanted.into(),
        found: found.map(str::to_owned),
    };
    vec![miss("0000:01:00.0"), miss("0000:02:00.0")]
}

const LIMIT: InotifyRefusal =
    InotifyRefusal::Limit { name: "fs.inotify.max_user_instances", value: Some(8192) };

/// Each misconfiguration, with all findings that it causes apart from those of level `Ok`.
const BROKEN: &[(&[Code], Break)] = &[
    (&[codes::NOT_ROOT], |facts| facts.is_root = false),
    (&[codes::LOOK_HANGS], |facts| facts.hanging.push("the devices of this host")),
    (&[codes::USER_NAMESPACE], |facts| facts.uid_map = Some("0 100000 65536".into())),
    (&[codes::KUBELET_DIR_MISSING], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        (kubelet.dir, kubelet.plugins, kubelet.socket) =
            (PathState::Missing, PathState::Missing, PathState::Missing);
        kubelet.elsewhere = vec!["/var/snap/microk8s/common/var/lib/kubelet".into()];
    }),
    (&[codes::KUBELET_DIR_OTHER], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        kubelet.socket = PathState::Missing;
        kubelet.elsewhere = vec!["/var/lib/k0s/kubelet".into()];
    }),
    (&[codes::KUBELET_DIR_UNUSABLE], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        (kubelet.plugins, kubelet.socket) = (PathState::Other, PathState::Missing);
        kubelet.is_mounted = None;
        kubelet.elsewhere = vec!["/var/lib/k0s/kubelet".into()];
    }),
    (&[codes::KUBELET_DIR_UNUSABLE], |facts| {
        facts.kubelet.as_mut().unwrap().socket = PathState::Directory;
    }),
    (&[codes::KUBELET_DIR_UNUSABLE], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        (kubelet.plugins, kubelet.socket, kubelet.is_file_mount) =
            (PathState::Other, PathState::Missing, true);
    }),
    (&[codes::KUBELET_SOCKET_MOUNTED], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        (kubelet.socket_is_mounted, kubelet.socket) = (true, PathState::Other);
    }),
    (&[codes::KUBELET_ABSENT], |facts| facts.kubelet.as_mut().unwrap().socket = PathState::Other),
    (&[codes::KUBELET_DIR_NOT_MOUNTED], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        (kubelet.is_mounted, kubelet.socket) = (Some(false), PathState::Missing);
    }),
    (&[codes::KUBELET_SOCKET_MOUNTED], |facts| {
        facts.kubelet.as_mut().unwrap().socket_is_mounted = true;
    }),
    (&[codes::KUBELET_SOCKET_MOUNTED], |facts| {
        let kubelet = facts.kubelet.as_mut().unwrap();
        (kubelet.socket_is_mounted, kubelet.socket) = (true, PathState::NoListener);
    }),
    (&[codes::KUBELET_ABSENT], |facts| facts.kubelet.as_mut().unwrap().socket = PathState::Missing),
    (&[codes::KUBELET_ABSENT], |facts| {
        facts.kubelet.as_mut().unwrap().socket = PathState::NoListener;
    }),
    (&[codes::KUBELET_HANGS], |facts| {
        facts.kubelet.as_mut().unwrap().socket = PathState::Unresponsive;
    }),
    (&[codes::KUBELET_TOO_OLD], |facts| {
        status(facts)["resources"][0]["api_version"] = "v1alpha1".into();
    }),
    (&[codes::KUBELET_TOO_OLD], |facts| {
        let listing = facts.listing.as_mut().unwrap();
        (listing.is_old, listing.allocatable) = (true, Some(Err("unknown method".into())));
    }),
    (&[codes::KUBELET_LACKS_DEVICES], |facts| {
        facts.listing.as_mut().unwrap().allocatable = Some(Ok(BTreeMap::new()));
    }),
    (&[codes::POD_RESOURCES_UNREACHABLE], |facts| {
        let listing = facts.listing.as_mut().unwrap();
        (listing.is, listing.allocatable) = (PathState::Missing, None);
    }),
    (&[codes::POD_RESOURCES_UNREACHABLE], |facts| {
        facts.listing.as_mut().unwrap().allocatable =
            Some(Err("the kubelet has not answered in time".into()));
    }),
    (&[codes::OTHER_PLUGIN], |facts| {
        status(facts)["resources"][0]["problem"] =
            "the kubelet ends one stream after the other; another plugin seems to".into();
        status(facts)["resources"][0]["registered"] = false.into();
    }),
    (&[codes::KUBELET_CHECKPOINT_UNREADABLE], |facts| {
        facts.kubelet.as_mut().unwrap().checkpoint = Some("Is a directory".into());
    }),
    (&[codes::KUBELET_CHECKPOINT_UNREADABLE], |facts| {
        status(facts)["checkpoint_unread"] =
            json!({ "since": Timestamp(NOW), "missing": true, "why": "No such file or directory" });
    }),
    (&[codes::OTHER_PLUGIN_SOCKET], |facts| {
        facts.kubelet.as_mut().unwrap().others.push("nvidia-gpu.sock".into());
    }),
    (&[codes::OTHER_PLUGIN_SOCKET], |facts| {
        facts.kubelet.as_mut().unwrap().others.push("nvidia.com_gpu.sock".into());
    }),
    (&[codes::DAEMON_ABSENT], has_no_daemon),
    (&[codes::DAEMON_NOT_RUNNING], |facts| {
        has_no_daemon(facts);
        facts.daemon.as_mut().unwrap().is_enabled = true;
    }),
    (&[codes::DAEMON_HANGS], |facts| {
        facts.daemon.as_mut().unwrap().answer = Answer::Unresponsive("no answer in time".into());
    }),
    (&[codes::DAEMON_NOT_READY], |facts| status(facts)["ready"] = false.into()),
    (&[codes::DAEMON_OTHER_VERSION], |facts| status(facts)["version"] = "0.0.9".into()),
    (&[codes::TWO_DAEMONS], |facts| {
        facts
            .processes
            .as_mut()
            .unwrap()
            .push(Process { pid: 2, kubelet: "/var/lib/kubelet".into() });
    }),
    (&[codes::TWO_DAEMONS], |facts| facts.daemon.as_mut().unwrap().lock_holder = Some(77)),
    (&[codes::RESOURCE_NOT_REGISTERED], |facts| {
        status(facts)["resources"][0]["registered"] = false.into();
        status(facts)["resources"][0]["problem"] = "the kubelet refuses it".into();
    }),
    (&[codes::HOOK_FAILED], |facts| {
        let pending = json!({ "resource": "nvidia.com/gpu", "device": "GPU-1", "hook": "failed", "tries": 3, "why": "exit status: 1" });
        status(facts)["hooks"] =
            json!([pending, { "resource": "a.b/c", "device": "x", "hook": "due" }]);
    }),
    (&[codes::HOOK_NOT_RUN], |facts| {
        let not_run = json!({ "resource": "nvidia.com/gpu", "phase": "check", "since": NOW, "why": "Resource temporarily unavailable" });
        status(facts)["not_run"] = json!([not_run]);
    }),
    (&[codes::MPS_DOWN], |facts| {
        status(facts)["mps"] = json!({ "nvidia.com/gpu": { "state": "down", "why": "it has ended" },
            "nvidia.com/other": { "state": "ready" } });
    }),
    (&[codes::DAEMON_ABSENT, codes::MPS_PROGRAMS_MISSING], |facts| {
        has_no_daemon(facts);
        facts.mps_programs = Some(false);
    }),
    (&[codes::METRICS_UNDECIDED], |facts| facts.reviews = Some(Err("forbidden".into()))),
    (&[codes::SIGNALS_OFF], |facts| status(facts)["signals_off"] = json!({ "nvml": "no library" })),
    (&[codes::KERNEL_LOG_UNREADABLE], |facts| {
        status(facts)["signals_off"] = json!({ "kernel_log": "permission denied" });
    }),
    (&[codes::DAEMON_ABSENT, codes::KERNEL_LOG_UNREADABLE], |facts| {
        has_no_daemon(facts);
        facts.host.as_mut().unwrap().kernel_log = Some("permission denied".into());
    }),
    (&[codes::CONFIG_INVALID], |facts| {
        facts.config = Some(Err("config.toml: line 3: unknown key `clas`".into()));
    }),
    (&[codes::CONFIG_CHANGED], |facts| {
        facts.config.as_mut().unwrap().as_mut().unwrap().changed_at = Some(Timestamp(NOW - 60_000));
    }),
    (&[codes::CONFIG_CHANGED], |facts| {
        status(facts)["config"] = json!({ "hash": "0badcafe", "error": "line 3: unknown key" });
    }),
    (&[codes::CONFIG_CHANGED], |facts| {
        status(facts)["config"] = json!({ "hash": "00000000", "error": null });
    }),
    (&[codes::CONFIG_CHANGED], |facts| {
        status(facts)["config"] =
            json!({ "hash": "0badcafe", "needs_restart": ["ledger.durability"] });
    }),
    (&[codes::RESOURCE_SELECTS_NOTHING], |facts| {
        empty(facts);
    }),
    (&[codes::RESOURCE_SELECTS_NOTHING], |facts| {
        let resource = empty(facts);
        (resource.devices, resource.paths) = (0, vec!["/dev/fuse".into()]);
    }),
    (&[codes::RESOURCE_SELECTS_NOTHING], |facts| {
        let resource = empty(facts);
        (resource.devices, resource.near) = (0, near("driver", "nvidia", Some("nouveau")));
    }),
    (&[codes::DRIVER_NOT_BOUND], |facts| {
        let resource = empty(facts);
        (resource.devices, resource.near) = (0, near("driver", "any", None));
    }),
    (&[codes::DEVICE_UNHEALTHY], |facts| {
        let sick = json!({ "id": "GPU-1", "health": "Unhealthy", "reason": "xid", "detail": "Xid 79", "state": "unhealthy" });
        status(facts)["ailing"] = json!([sick]);
    }),
    (&[codes::DAEMON_ABSENT, codes::DEVICE_UNHEALTHY], |facts| {
        has_no_daemon(facts);
        facts.resources.as_mut().unwrap()[0].unhealthy =
            vec![("GPU-1".into(), "node_missing".into())];
    }),
    (&[codes::DEVICE_SUSPECT], |facts| {
        status(facts)["ailing"] =
            json!([{ "id": "mlx5_0", "health": "Healthy", "reason": null, "state": "suspect" }]);
    }),
    (&[codes::DEVICE_CORDONED], |facts| {
        let cordoned = json!({ "id": "GPU-1", "health": "Unhealthy", "reason": "cordoned", "state": "healthy", "cordoned": "fan rattles" });
        status(facts)["ailing"] = json!([cordoned]);
    }),
    (&[codes::DRIVER_NODES_ELSEWHERE], |facts| {
        facts.nvidia.as_mut().unwrap().nodes_root = Some("/run/nvidia/driver".into());
    }),
    (&[codes::DRIVER_ROOT], |facts| {
        facts.nvidia.as_mut().unwrap().libraries =
            Some(("/run/nvidia/driver".into(), "580.95.05".into()));
    }),
    (&[codes::DRIVER_ROOT_MISSING], |facts| {
        facts.nvidia.as_mut().unwrap().missing_roots = vec![("driver_root", "/x".into())];
    }),
    (&[codes::DRIVER_LIBRARIES_MISSING], |facts| {
        let driver = facts.nvidia.as_mut().unwrap();
        (driver.libraries, driver.has_hook) = (None, false);
        driver.no_libraries = Some("they are not installed".into());
    }),
    (&[codes::DRIVER_HOOK_MISSING], |facts| facts.nvidia.as_mut().unwrap().has_hook = false),
    (&[codes::IOMMU_OFF], |facts| {
        facts.resources.as_mut().unwrap()[0].is_for_guests = true;
        facts.host.as_mut().unwrap().iommu_groups = Some(0);
    }),
    (&[codes::IOMMU_UNSAFE], |facts| {
        facts.resources.as_mut().unwrap()[0].is_for_guests = true;
        facts.host.as_mut().unwrap().is_unsafe = true;
    }),
    (&[codes::DRA_DIRECTORY_UNUSABLE], |facts| {
        let registry = "/var/lib/kubelet/plugins_registry".into();
        facts.dra.as_mut().unwrap().unusable = vec![(registry, "it is mounted read-only".into())];
    }),
    (&[codes::DRA_API_UNREACHABLE], |facts| {
        facts.dra.as_mut().unwrap().api = Some(Err("no credentials".into()));
    }),
    (&[codes::DRA_API_NOT_SERVED], |facts| api(facts).versions = Some(Vec::new())),
    (&[codes::DRA_API_NOT_SERVED], |facts| api(facts).versions = Some(vec!["v1beta1".into()])),
    (&[codes::DRA_NODE_UNKNOWN], |facts| api(facts).has_node = Some(false)),
    (&[codes::DRA_NODE_UNKNOWN], |facts| api(facts).node = String::new()),
    (&[codes::DRA_NODE_UNKNOWN], |facts| api(facts).node_of_credentials = Some("gpu-8".into())),
    (&[codes::DRA_RIGHT_MISSING], |facts| {
        let request = "get resourceclaims".into();
        api(facts).refused = vec![RefusedRequest { request, ..RefusedRequest::default() }];
    }),
    (&[codes::DRA_STATUS_RIGHT_MISSING], |facts| {
        let request = "patch resourceclaims/status".into();
        api(facts).refused = vec![RefusedRequest { request, ..RefusedRequest::default() }];
    }),
    (&[codes::DRA_POLICY_DENIES], |facts| {
        api(facts).refused = vec![RefusedRequest { is_of_policy: true, ..denied() }];
    }),
    (&[codes::DRA_PROBLEM], |facts| {
        status(facts)["dra_problems"] = json!(["another program writes the ResourceSlice"]);
    }),
    (&[codes::CDI_DIRECTORY_MISSING], |facts| facts.cdi.as_mut().unwrap().exists = false),
    (&[codes::CDI_OFF], |facts| facts.cdi.as_mut().unwrap().containerd[0].enable_cdi = Some(false)),
    (&[codes::CDI_OFF], |facts| facts.cdi.as_mut().unwrap().containerd[0].enable_cdi = None),
    (&[codes::CDI_DIRECTORY_UNREAD], |facts| {
        facts.cdi.as_mut().unwrap().directory = "/opt/cdi".into();
    }),
    (&[codes::CDI_DIRECTORY_UNREAD], |facts| {
        facts.cdi.as_mut().unwrap().containerd[0].cdi_spec_dirs =
            Some(BTreeSet::from(["/opt/cdi".into()]));
    }),
    (&[codes::STATE_DISK_FULL], |facts| {
        let state = facts.state.as_mut().unwrap();
        (state.free_bytes, state.root_reserve_bytes) = (4096, 16 << 20);
    }),
    (&[codes::STATE_DISK_FULL], |facts| facts.state.as_mut().unwrap().free_inodes = 0),
    (&[codes::STATE_DISK_LOW], |facts| facts.state.as_mut().unwrap().free_bytes = 50 << 20),
    (&[codes::STATE_DISK_LOW], |facts| facts.state.as_mut().unwrap().free_bytes = 0),
    (&[codes::STATE_READ_ONLY], |facts| {
        facts.state.as_mut().unwrap().writes = WriteAccess::ReadOnly;
    }),
    (&[codes::STATE_READ_ONLY], |facts| {
        facts.state.as_mut().unwrap().writes = WriteAccess::MountReadOnly;
    }),
    (&[codes::STATE_READ_ONLY], |facts| {
        facts.state.as_mut().unwrap().writes = WriteAccess::StoppedByError;
    }),
    (&[codes::STATE_READ_ONLY], |facts| {
        facts.state.as_mut().unwrap().writes = WriteAccess::DiskFailed("Input/output error".into());
        facts.ledger.as_mut().unwrap().findings.push("journal segment is damaged".into());
    }),
    (&[codes::STATE_IN_MEMORY], |facts| {
        facts.state.as_mut().unwrap().medium = Some(Medium::Memory);
    }),
    (&[codes::STATE_IN_CONTAINER], |facts| {
        facts.state.as_mut().unwrap().medium = Some(Medium::Overlay);
    }),
    (&[codes::STATE_ON_NETWORK], |facts| {
        facts.state.as_mut().unwrap().medium = Some(Medium::Network);
    }),
    (&[codes::LEDGER_UNREADABLE], |facts| {
        facts.ledger.as_mut().unwrap().unreadable = Some("a later version wrote it".into());
    }),
    (&[codes::LEDGER_DAMAGED], |facts| {
        facts.ledger.as_mut().unwrap().findings.push("journal segment is damaged".into());
    }),
    (&[codes::LEDGER_DAMAGED], |facts| {
        status(facts)["recovery"] = "2 grants could not be read".into();
    }),
    (&[codes::LEDGER_NOT_WRITTEN], |facts| status(facts)["ledger"]["journal"] = false.into()),
    (&[codes::LEDGER_ONE_COPY], |facts| status(facts)["ledger"]["database"] = false.into()),
    (&[codes::LEDGER_MOVED_ASIDE], |facts| {
        facts.state.as_mut().unwrap().moved_aside.push("/var/lib/holdfast/db.quarantine-1".into());
    }),
    (&[codes::CLOCK_MOVED_BACK], |facts| {
        facts.ledger.as_mut().unwrap().clock.newest = Some(Timestamp(NOW + 3600 * 1000));
    }),
    (&[codes::CLOCK_MOVED_FORWARD], |facts| {
        facts.ledger.as_mut().unwrap().clock.oldest_of_boot =
            Some(Timestamp(NOW - 48 * 3600 * 1000));
    }),
    (&[codes::INOTIFY_EXHAUSTED], |facts| {
        facts.host.as_mut().unwrap().inotify =
            Some(InotifyLimits { instances: 0, refused: Some(LIMIT) });
    }),
    (&[codes::INOTIFY_LOW], |facts| {
        facts.host.as_mut().unwrap().inotify =
            Some(InotifyLimits { instances: 1, refused: Some(LIMIT) });
    }),
    (&[codes::INOTIFY_EXHAUSTED], |facts| {
        let refused = Some(InotifyRefusal::Other("Function not implemented".into()));
        facts.host.as_mut().unwrap().inotify = Some(InotifyLimits { instances: 0, refused });
    }),
    (&[codes::SELINUX_LABEL], |facts| {
        facts.kubelet.as_mut().unwrap().label = Some("system_u:object_r:var_lib_t:s0".into());
    }),
];

fn found(facts: &Facts) -> Vec<&'static str> {
    let findings = examine(facts).findings;
    let mut codes: Vec<&str> = findings
        .iter()
        .filter(|finding| finding.level != Level::Ok)
        .map(|finding| finding.code)
        .collect();
    codes.sort_unstable();
    codes
}

#[test]
fn on_a_healthy_node_every_check_passes() {
    let report = examine(&healthy());
    assert_eq!(found(&healthy()), Vec::<&str>::new(), "{report:#?}");
    assert!(
        report.unknown.is_empty() && report.is_healthy() && report.count(Level::Ok) == CHECKS.len(),
        "{:?}",
        report.unknown
    );
}

#[test]
fn devices_that_are_given_to_claims_are_no_finding() {
    let mut facts = healthy();
    status(&mut facts)["resources"][0]["allocatable"] = 7.into();
    let allocatable = BTreeMap::from([("nvidia.com/gpu".to_owned(), 7)]);
    facts.listing.as_mut().unwrap().allocatable = Some(Ok(allocatable));
    let mut only_claims = status(&mut facts)["resources"][0].clone();
    only_claims["name"] = "example.com/claimed".into();
    only_claims["registered"] = false.into();
    only_claims["only_claims"] = true.into();
    status(&mut facts)["resources"].as_array_mut().unwrap().push(only_claims);
    assert_eq!(found(&facts), Vec::<&str>::new());
}

#[test]
fn each_misconfiguration_has_exactly_its_findings() {
    let mut problems = Vec::new();
    for (index, (expected, breakage)) in BROKEN.iter().enumerate() {
        let mut facts = healthy();
        breakage(&mut facts);
        let mut expected: Vec<&str> = expected.iter().map(|code| code.name).collect();
        expected.sort_unstable();
        let found = found(&facts);
        if found != expected {
            problems.push(format!("row {index}: {found:?} instead of {expected:?}"));
        }
        for finding in examine(&facts).findings.iter().filter(|finding| finding.level != Level::Ok)
        {
            let texts = [&finding.on, &finding.found, &finding.todo];
            assert!(
                texts.iter().all(|text| !text.is_empty() && !text.contains('\n'))
                    && !finding.why.is_empty(),
                "{finding:?}"
            );
        }
    }
    assert!(
        problems.is_empty(),
        "{} of {}:\n{}",
        problems.len(),
        BROKEN.len(),
        problems.join("\n")
    );
}

#[test]
fn every_code_has_a_row_and_a_unique_name() {
    let tried: BTreeSet<&str> =
        BROKEN.iter().flat_map(|(codes, _)| *codes).map(|code| code.name).collect();
    let names: BTreeSet<&str> = CODES.iter().map(|code| code.name).collect();
    assert_eq!((names.len(), tried), (CODES.len(), names));
}

#[test]
fn unknown_facts_cause_no_finding() {
    let known = healthy();
    let facts = Facts::unknown(known.roots.clone(), known.now);
    assert_eq!(found(&facts), ["not-root"]);
    assert_eq!(
        examine(&facts).unknown.len(),
        CHECKS.len() - 2,
        "privileges and hanging readers are always known"
    );
}

#[test]
fn a_reason_of_the_configuration_is_not_a_finding() {
    let mut facts = healthy();
    status(&mut facts)["ailing"] = json!([
        { "id": "GPU-1", "health": "Unhealthy", "reason": "deselected", "state": "unhealthy" },
        { "id": "GPU-2", "health": "Unhealthy", "reason": "held_as_other", "state": "unhealthy" },
    ]);
    assert_eq!(found(&facts), Vec::<&str>::new());
}

#[test]
fn the_worst_level_comes_first() {
    let mut facts = healthy();
    facts.is_root = false;
    facts.state.as_mut().unwrap().free_inodes = 0;
    status(&mut facts)["ready"] = false.into();
    let levels: Vec<Level> =
        examine(&facts).findings.iter().map(|finding| finding.level).take(4).collect();
    assert_eq!(levels, [Level::Error, Level::Warning, Level::Note, Level::Ok]);
}

#[test]
fn the_daemons_count_of_devices_is_used() {
    let mut facts = healthy();
    facts.resources.as_mut().unwrap()[0].devices = 0;
    assert_eq!(found(&facts), Vec::<&str>::new(), "the daemon reports devices");
    has_no_daemon(&mut facts);
    facts.resources.as_mut().unwrap()[0].needs_nvml = true;
    assert_eq!(found(&facts), ["daemon-absent"], "without NVML the number of devices is unknown");
}

#[test]
fn a_near_miss_is_reported_with_its_criterion() {
    let mut facts = healthy();
    empty(&mut facts).near = near("driver", "vfio-pci", Some("nvidia"));
    let finding = examine(&facts).findings.remove(0);
    let wanted = "0000:01:00.0, 0000:02:00.0 would be offered if not for `driver`: wanted vfio-pci, found nvidia";
    assert_eq!(
        (finding.found.as_str(), finding.todo.contains("bind these devices to vfio-pci")),
        (wanted, true)
    );
    let misses = &mut empty(&mut facts).near;
    (misses[0].found, misses[1].found) = (None, Some("mlx5_core".into()));
    let finding = examine(&facts).findings.remove(0);
    assert!(
        finding.found.ends_with("wanted vfio-pci, found mlx5_core or not known"),
        "{}",
        finding.found
    );
    empty(&mut facts).near = near("driver", "netdevice", Some("mlx5_core"));
    let finding = examine(&facts).findings.remove(0);
    assert_eq!(
        finding.todo,
        "`netdevice` is not a driver; remove `driver` from the resource's `select`"
    );
}

#[test]
fn a_default_of_a_newer_containerd_is_not_a_finding() {
    let mut facts = healthy();
    let file = |version, enable_cdi| ContainerdFile {
        version,
        enable_cdi,
        ..healthy().cdi.unwrap().containerd.remove(0)
    };
    for (files, expected) in [
        (vec![file(Some(3), None)], 0),
        (vec![file(Some(2), None), file(Some(2), Some(true))], 0),
        (vec![file(Some(3), Some(false)), file(Some(3), Some(true))], 0),
        (vec![file(Some(2), None), file(Some(2), None)], 1),
        (vec![file(None, None)], 1),
        (vec![], 0),
    ] {
        facts.cdi.as_mut().unwrap().containerd = files;
        assert_eq!(found(&facts).len(), expected);
    }
}

#[test]
fn cdi_is_enabled_in_the_last_file_that_has_the_key() {
    let mut facts = healthy();
    let file = |path: &str, version, enable_cdi| ContainerdFile {
        path: path.into(),
        version,
        enable_cdi,
        cdi_spec_dirs: None,
    };
    let main = |version, enable_cdi| file("/etc/containerd/config.toml", version, enable_cdi);
    let drop_in = |version| file("/etc/containerd/conf.d/a.toml", version, Some(false));
    let k3s = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml";
    let (old, new) = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
    for (files, path, table) in [
        (vec![main(Some(3), Some(true)), drop_in(Some(3))], "/etc/containerd/conf.d/a.toml", new),
        (vec![main(Some(3), Some(false)), drop_in(None)], "/etc/containerd/conf.d/a.toml", new),
        (vec![main(Some(3), None), drop_in(Some(2))], "/etc/containerd/conf.d/a.toml", old),
        (vec![main(Some(2), None)], "/etc/containerd/config.toml", old),
        // Another containerd than that of the first file.
        (vec![main(Some(3), Some(true)), file(k3s, Some(3), Some(false))], k3s, new),
    ] {
        facts.cdi.as_mut().unwrap().containerd = files;
        assert_eq!(found(&facts), ["cdi-off"], "{path}");
        let findings = examine(&facts).findings;
        let finding = findings.iter().find(|finding| finding.code == "cdi-off").unwrap();
        assert_eq!(finding.on, path);
        assert!(finding.todo.contains(&format!("[plugins.\"{table}\"]")), "{}", finding.todo);
    }
}

#[test]
fn without_the_driver_for_claims_nothing_of_it_is_checked() {
    let mut facts = healthy();
    facts.config.as_mut().unwrap().as_mut().unwrap().dra = false;
    facts.dra = None;
    assert_eq!((found(&facts).len(), examine(&facts).unknown.len()), (0, 0));
    facts.config.as_mut().unwrap().as_mut().unwrap().dra = true;
    assert_eq!(examine(&facts).unknown, ["dra-directories", "dra-api-server"]);
}

#[test]
fn nodes_of_another_resource_are_not_reported_as_absent() {
    let found = |why: &[&str]| {
        let mut facts = healthy();
        let resource = empty(&mut facts);
        resource.paths = vec!["/dev/rtc0".into()];
        resource.why_none = why.iter().map(ToString::to_string).collect();
        let findings = super::devices::selected(&facts).unwrap();
        findings.into_iter().next().unwrap().found
    };
    assert_eq!(found(&[]), "nothing in /dev matches /dev/rtc0");
    let why = "the nodes of /dev/rtc0 already belong to a.b/rtc";
    assert_eq!(found(&[why, "b"]), format!("{why}; b"));
}
