//! Hooks, with the whole daemon and a kubelet that calls PreStartContainer: when each hook runs,
//! which pod waits for it, and its state after a kill.

use crate::common::{
    Daemon, HANG, Node, allocate, dial, name, offered, pause, resource, run, soon, until,
};
use holdfast::domain::{
    AllocId, DeviceId, Durability, Entry, Grant, HookState, PendingHook, PodRef, ResourceName,
    Timestamp,
};
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, KubeletConfig, PodPhase, PodSpec};
use holdfast::store::{self, Store};
use std::path::PathBuf;
use std::time::Duration;
use tonic::Code;

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

/// A node with one device, and additional settings of its resource.
fn node(more: &str) -> Node {
    let node = Node::with(&[("gpu", 1)]);
    node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}{more}\n", resource("gpu")));
    node
}

/// A script of the node, as the command of a hook. `$1` is a folder for the script's files.
fn script(node: &Node, text: &str) -> String {
    let (script, folder) = (node.path("script"), node.path("left"));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(&script, text).unwrap();
    format!("command = [\"/bin/sh\", \"{}\", \"{}\"]", script.display(), folder.display())
}

fn left(node: &Node, file: &str) -> PathBuf {
    node.path("left").join(file)
}

/// The lines that the script wrote to a file.
fn lines(node: &Node, file: &str) -> Vec<String> {
    std::fs::read_to_string(left(node, file))
        .unwrap_or_default()
        .lines()
        .map(str::to_owned)
        .collect()
}

async fn listed(
    kubelet: &Kubelet,
    resource: &ResourceName,
    wanted: (usize, usize),
    within: Duration,
) {
    let newest = |kind: &EventKind| {
        matches!(kind, EventKind::Listed { .. }) && kind.resource() == Some(resource)
    };
    let seen = |view: &holdfast::lab::sim::kubelet::View<'_>| {
        let event = view.last(newest).map(|event| &event.kind);
        matches!(event, Some(EventKind::Listed { healthy, unhealthy, .. }) if (*healthy, *unhealthy) == wanted)
    };
    kubelet.wait_for(seen, within).await.unwrap();
}

/// The hook that `status` shows, and the reason if it has failed.
fn shown(node: &Node) -> Option<(String, String)> {
    let status = node.json(&["status"]);
    let hook = status["hooks"].as_array().unwrap().first()?.clone();
    Some((
        hook["hook"].as_str().unwrap().to_owned(),
        hook["why"].as_str().unwrap_or_default().to_owned(),
    ))
}

/// A ledger after a kill: a release is written and its hook has not run.
fn write_due_hook(node: &Node, resource: &ResourceName, device: &str) {
    let (mut store, _) = Store::open(&node.state(), Durability::PowerLoss, None).unwrap();
    let hook = PendingHook {
        resource: resource.clone(),
        device: DeviceId::new(device),
        key: String::new(),
        objects: Vec::new(),
        alloc_id: AllocId::new("a-1"),
        pod: Some(PodRef { uid: "u1".into(), namespace: None, name: None }),
        container: Some("main".into()),
        released_at: Timestamp(1_700_000_000_000),
        state: HookState::Due,
    };
    store.append(&[Entry::Hook(Box::new(hook))]).unwrap();
    store.close().unwrap();
}

fn due_hooks(node: &Node) -> usize {
    store::peek(&node.state()).unwrap().owed.values().map(|devices| devices.len()).sum()
}

/// A node whose hook after release waits for `go`, and fails without `key`.
fn node_with_a_hook_that_waits() -> Node {
    let node = node("");
    let text = "env >\"$1/env\"; echo run >>\"$1/runs\"\n\
                while [ ! -e \"$1/go\" ]; do sleep 0.05; done\n\
                [ -e \"$1/key\" ] || { echo no key >&2; exit 3; }\n";
    let after_release = format!("after_release = {{ {}, timeout = \"1h\" }}", script(&node, text));
    node.write_config(&format!(
        "[telemetry]\nlisten = \"off\"\n{}{after_release}\n",
        resource("gpu")
    ));
    node
}

/// Waits until the ledger has the names of `pods` pods. It may read the kubelet's checkpoint first,
/// which has only UIDs.
async fn named(node: &Node, pods: usize) {
    let are_named = |grants: &Vec<Grant>| {
        grants.iter().filter(|grant| grant.pod().is_some_and(|pod| pod.name.is_some())).count()
            == pods
    };
    until("the names", || node.grants(), are_named).await;
}

/// A complete sequence: the device is released, its hook is running, killed, run again, failed, and
/// its cause fixed. No pod gets the device before the hook has ended well.
#[test]
fn a_released_device_is_not_granted_until_its_hook_is_done_across_a_kill() {
    run(async {
        let node = node_with_a_hook_that_waits();
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)),
        )
        .await;
        assert_eq!(pod.phase, PodPhase::Running);
        // And its pod's name: a deleted pod is not listed, and would stay without a name.
        named(&node, 1).await;
        assert_eq!(
            (shown(&node), lines(&node, "runs").len()),
            (None, 0),
            "nothing is done to a held device"
        );
        let alloc_id = node.grants()[0].alloc_id.clone();

        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        listed(&kubelet, &gpu(), (0, 1), HANG).await;
        until("the run", || lines(&node, "runs").len(), |runs| *runs == 1).await;
        assert_eq!(shown(&node), Some(("due".to_owned(), String::new())));
        let mut api = dial(&kubelet, &node, &gpu()).await;
        let refused = allocate(&mut api, &["dev:gpu0"]).await.unwrap_err();
        assert!(
            refused.code() == Code::FailedPrecondition
                && refused.message().contains("hook_pending"),
            "{refused}"
        );
        let env = lines(&node, "env");
        for told in [
            "HOLDFAST_PHASE=after_release",
            "HOLDFAST_RESOURCE=example.com/gpu",
            "HOLDFAST_DEVICE_ID=dev:gpu0",
            "HOLDFAST_DEVICE_NODES=/dev/gpu0",
            "HOLDFAST_POD_NAMESPACE=default",
            "HOLDFAST_POD_NAME=train",
            "HOLDFAST_CONTAINER=main",
            &format!("HOLDFAST_POD_UID={}", pod.uid),
            &format!("HOLDFAST_ALLOC_ID={alloc_id}"),
        ] {
            assert!(env.iter().any(|line| line == told), "`{told}` is not in {env:#?}");
        }

        daemon.kill();
        assert!(node.grants().is_empty() && due_hooks(&node) == 1, "given back, with its hook");
        let daemon = node.start_daemon();
        until("the second run", || lines(&node, "runs").len(), |runs| *runs == 2).await;
        daemon.logged("registered with the kubelet").await;
        assert_eq!(
            kubelet.capacity(&gpu()).allocatable,
            0,
            "the first list of the next process has it already"
        );
        std::fs::write(left(&node, "go"), "").unwrap();
        daemon.logged("the hook after release has failed").await;
        let (state, why) =
            until("the failure", || shown(&node).unwrap(), |(state, _)| state == "failed").await;
        assert!(state == "failed" && why == "exit status: 3", "{why}");
        let text = String::from_utf8(node.output(&["status"]).stdout).unwrap();
        assert!(
            text.contains("example.com/gpu: device dev:gpu0 is unhealthy")
                && text.contains("exit status: 3"),
            "{text}"
        );
        let mut api = dial(&kubelet, &node, &gpu()).await;
        let refused = allocate(&mut api, &["dev:gpu0"]).await.unwrap_err();
        assert!(
            refused.code() == Code::FailedPrecondition && refused.message().contains("hook_failed"),
            "{refused}"
        );

        std::fs::write(left(&node, "key"), "").unwrap();
        listed(&kubelet, &gpu(), (1, 0), HANG).await;
        assert_eq!((shown(&node), due_hooks(&node)), (None, 0));
        allocate(&mut api, &["dev:gpu0"]).await.unwrap();
    });
}

/// The hook gets the former pod.
fn check_environment_of_the_hook(node: &Node, uid: &str) {
    for variable in [
        "HOLDFAST_PHASE=after_release",
        "HOLDFAST_POD_NAME=one",
        &format!("HOLDFAST_POD_UID={uid}"),
    ] {
        assert!(
            lines(node, "env").iter().any(|line| line == variable),
            "`{variable}` is not in {:#?}",
            lines(node, "env")
        );
    }
}

/// The message of the waiting container names the hook, the device, the former pod and the remedy.
fn check_start_error(message: &str) {
    for part in [
        "CreateContainerConfigError",
        "FailedPrecondition",
        "example.com/gpu",
        "`dev:gpu0`",
        "default/one",
        "exit status: 3",
        "fix the cause",
    ] {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// The kubelet gives a device to the next pod while a process of the former pod still runs. The
/// next pod's container must not start until that process has exited and the hook has ended well,
/// across two kills. Afterwards it is not disturbed.
#[test]
fn a_regranted_device_starts_only_after_the_former_holders_hook_across_kills() {
    run(async {
        let node = node_with_a_hook_that_waits();
        // A kubelet that has started recently: nothing is refused to it, and its listings release
        // nothing.
        let restart_after = Duration::from_millis(100);
        let kubelet =
            Kubelet::start(KubeletConfig { restart_after, ..node.kubelet_config() }).await.unwrap();
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        let one = PodSpec::new("default", "one").init("prepare", &gpu(), 1).app("main", &gpu(), 1);
        let one = soon("an admission", kubelet.add_pod(one)).await;
        let runs = |uid: &str| {
            kubelet.view(|view| view.pod(uid).is_some_and(|pod| pod.phase == PodPhase::Running))
        };
        until("the first pod", || runs(&one.uid), |runs| *runs).await;
        daemon.logged_often("grant bound to container", 2).await;

        assert!(kubelet.force_delete_pod(&one.uid));
        let spec = PodSpec::new("default", "two").app("main", &gpu(), 1);
        let two = spec.uid.clone();
        let mut adding = Box::pin(kubelet.add_pod(spec));
        tokio::select! {
            decided = &mut adding => panic!("it does not wait: {decided:?}"),
            said = daemon.logged("a container has to wait before it starts") => {
                assert!(said.contains("dev:gpu0") && said.contains("default/one"), "{said}");
            }
        }
        daemon.kill();
        assert!(
            lines(&node, "runs").is_empty() && node.grants().len() == 3 && due_hooks(&node) == 0
        );
        let mut daemon = node.start_daemon();
        tokio::select! {
            said = daemon.logged("a container has to wait before it starts") => assert!(said.contains("default/one"), "{said}"),
            () = async { drop(adding.await); std::future::pending().await } => {}
        }
        named(&node, 3).await;

        assert!(kubelet.delete_pod(&one.uid).unwrap());
        until("the run", || lines(&node, "runs").len(), |runs| *runs == 1).await;
        assert!(
            !runs(&two) && due_hooks(&node) == 1 && node.grants().len() == 1,
            "the former ones are released, with a hook"
        );
        check_environment_of_the_hook(&node, &one.uid);
        assert_eq!(
            kubelet.capacity(&gpu()).allocatable,
            1,
            "a held device stays healthy, or a restart rejects the pod that waits"
        );
        daemon.kill();
        let daemon = node.start_daemon();
        until("the second run", || lines(&node, "runs").len(), |runs| *runs == 2).await;
        assert!(!runs(&two) && due_hooks(&node) == 1);
        std::fs::write(left(&node, "go"), "").unwrap();
        let waiting = || {
            kubelet
                .view(|view| view.pod(&two)?.containers.get("main")?.waiting.clone())
                .unwrap_or_default()
        };
        let said = until("the error", waiting, |text| text.contains("exit status: 3")).await;
        check_start_error(&said);
        assert!(!runs(&two));
        let status = String::from_utf8(node.output(&["status"]).stdout).unwrap();
        let waits = "pod default/two cannot start yet with device dev:gpu0, since the hook after its release has failed ";
        assert!(status.contains(waits) && !status.contains("unhealthy"), "{status}");
        std::fs::write(left(&node, "key"), "").unwrap();
        until("the second pod", || runs(&two), |runs| *runs).await;
        daemon.logged("the hook after release is done").await;
        let often = lines(&node, "runs").len();
        assert_eq!((due_hooks(&node), node.grants().len()), (0, 1));

        // A later start of the same container needs no hook.
        let starts = || {
            crate::common::count(
                &kubelet,
                |kind| matches!(kind, EventKind::ContainerStarted { pod_uid, .. } if *pod_uid == two),
            )
        };
        let before = starts();
        kubelet.crash_container(&two, "main");
        until("another start", starts, |starts| *starts > before).await;
        assert_eq!(lines(&node, "runs").len(), often);
    });
}

#[test]
fn a_reset_is_written_to_sysfs_and_a_failed_one_keeps_the_device_unhealthy() {
    run(async {
        let node = Node::new();
        let host = SimNode::create(node.path("host")).unwrap();
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nafter_release = \"reset\"\n",
        );
        let gpus = name("nvidia.com/gpu");
        write_due_hook(&node, &gpus, &host.gpu_uuid(3));
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        listed(&kubelet, &gpus, (7, 1), HANG).await;
        let said = daemon.logged("the hook after release has failed").await;
        assert!(said.contains("no file `reset`") && said.contains(&host.gpu_uuid(3)), "{said}");
        let reset = |index: usize| {
            node.path(&format!("host/sys/bus/pci/devices/{}/reset", host.gpu_address(index)))
        };
        (0..8).for_each(|index| std::fs::write(reset(index), "").unwrap());
        listed(&kubelet, &gpus, (8, 0), HANG).await;
        let written: Vec<_> =
            (0..8).filter(|index| std::fs::read_to_string(reset(*index)).unwrap() == "1").collect();
        assert_eq!((written, due_hooks(&node)), (vec![3], 0));
    });
}

#[test]
fn a_command_that_hangs_is_killed_with_its_children() {
    run(async {
        let node = node("");
        let text = "sleep 1000 & echo $! >>\"$1/children\"; echo at it; wait\n";
        let after_release =
            format!("after_release = {{ {}, timeout = \"1s\" }}", script(&node, text));
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n{}{after_release}\n",
            resource("gpu")
        ));
        write_due_hook(&node, &gpu(), "dev:gpu0");
        let daemon = node.start_daemon();
        let said = daemon.logged("the hook after release has failed").await;
        assert!(said.contains("did not end within 1s"), "{said}");
        let child = lines(&node, "children").remove(0);
        let is_running = || {
            std::fs::read_to_string(format!("/proc/{child}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        until("the end of the child", is_running, |is_running| !is_running).await;
    });
}

/// A daemon that ends kills its running hooks, and the next one starts them again.
#[test]
fn a_hook_run_ends_with_the_daemon_and_stays_due() {
    run(async {
        let node = node("");
        let text = "echo $$ >>\"$1/runs\"; while :; do sleep 0.05; done\n";
        let after_release =
            format!("after_release = {{ {}, timeout = \"1h\" }}", script(&node, text));
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n{}{after_release}\n",
            resource("gpu")
        ));
        write_due_hook(&node, &gpu(), "dev:gpu0");
        for run in 1..=2 {
            let mut daemon = node.start_daemon();
            until("the run", || lines(&node, "runs").len(), |runs| *runs == run).await;
            daemon.logged("starting").await;
            daemon.signal(nix::sys::signal::Signal::SIGTERM);
            assert_eq!(daemon.ended().await.code(), Some(0));
            let pid = lines(&node, "runs").pop().unwrap();
            let is_running = || {
                std::fs::read_to_string(format!("/proc/{pid}/stat"))
                    .is_ok_and(|stat| !stat.contains(") Z "))
            };
            until("the end of the run", is_running, |is_running| !is_running).await;
            assert_eq!(due_hooks(&node), 1);
        }
    });
}

#[test]
fn a_hook_that_the_configuration_no_longer_has_is_dropped_and_logged() {
    run(async {
        let node = node("");
        write_due_hook(&node, &gpu(), "dev:gpu0");
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        daemon.logged("they are free without it").await;
        offered(&kubelet, &gpu(), 1).await;
        until("no hook is due", || due_hooks(&node), |due| *due == 0).await;
    });
}

/// With the new configuration the daemon does not know the former resource, nor its hook.
#[test]
fn a_device_whose_resource_was_renamed_is_wiped_after_its_release() {
    run(async {
        let node = node("");
        let wipe = script(&node, "echo \"$HOLDFAST_POD_NAME\" >>\"$1/runs\"\n");
        let config = |name: &str| {
            let resource = resource("gpu").replace("example.com/gpu", name);
            format!("[telemetry]\nlisten = \"off\"\n{resource}after_release = {{ {wipe} }}\n")
        };
        node.write_config(&config("example.com/gpu"));
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        let spec = PodSpec::new("default", "train").app("main", &gpu(), 1);
        let pod = soon("an admission", kubelet.add_pod(spec)).await;
        named(&node, 1).await;
        daemon.kill();
        node.write_config(&config("example.com/renamed"));
        let _daemon = node.start_daemon();
        let renamed = name("example.com/renamed");
        listed(&kubelet, &renamed, (0, 1), HANG).await;
        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        until("the run", || lines(&node, "runs"), |runs| *runs == ["train"]).await;
        listed(&kubelet, &renamed, (1, 0), HANG).await;
        assert_eq!(due_hooks(&node), 0);
    });
}

/// A mount causes no event: before a disk is wiped or given away, the daemon checks its mounts.
#[test]
fn a_disk_mounted_by_the_host_since_the_last_scan_is_neither_wiped_nor_granted() {
    run(async {
        let node = node("");
        let write = |file: &str, text: &str| {
            std::fs::create_dir_all(node.path(file).parent().unwrap()).unwrap();
            std::fs::write(node.path(file), text).unwrap();
        };
        write("host/sys/class/block/gpu0/dev", "259:7\n");
        let mount = || {
            write(
                "host/proc/1/mountinfo",
                "36 35 259:7 / /data rw - xfs /dev/disk/by-id/nvme-x rw\n",
            );
        };
        let unmount = || std::fs::remove_file(node.path("host/proc/1/mountinfo")).unwrap();
        // The first start on a node creates this directory, gets its event, and scans again; that
        // scan must not find the mount.
        std::fs::create_dir_all(node.path("kubelet/device-plugins/.holdfast")).unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        mount();
        let mut plugin = dial(&kubelet, &node, &gpu()).await;
        let refused = allocate(&mut plugin, &["block:gpu0"]).await.unwrap_err();
        assert!(
            refused.message().contains("because the host uses it: mounted at /data"),
            "{refused}"
        );
        unmount();
        allocate(&mut plugin, &["block:gpu0"]).await.unwrap();
        drop((daemon, plugin));

        // A failed hook is retried, and by then an operator has mounted the disk to read its data.
        let text = format!(
            "[ -e {} ] && echo >\"$1/wiped\"; echo run >>\"$1/runs\"; exit 3\n",
            node.path("host/proc/1/mountinfo").display()
        );
        let wipe = script(&node, &text);
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n{}after_release = {{ {wipe} }}\n",
            resource("gpu")
        ));
        std::fs::remove_dir_all(node.state()).unwrap();
        write_due_hook(&node, &gpu(), "block:gpu0");
        let _daemon = node.start_daemon();
        until("the run", || lines(&node, "runs").len(), |runs| *runs == 1).await;
        mount();
        until(
            "the refusal",
            || shown(&node),
            |shown| {
                shown.as_ref().is_some_and(|(_, why)| {
                    why.contains("the host uses the device: mounted at /data")
                })
            },
        )
        .await;
        assert!(!left(&node, "wiped").exists(), "what the host has mounted was wiped");
    });
}

/// As the real kubelet, this one calls the hook before every start, shows its error in the
/// container's status, and retries.
#[test]
fn a_container_starts_after_its_hook_succeeded_and_each_start_has_its_own() {
    run(async {
        let node = node("");
        let text = "env >\"$1/env\"; echo run >>\"$1/runs\"; [ -e \"$1/key\" ] || { echo no key >&2; exit 3; }\n";
        let before_start = format!("before_start = {{ {} }}", script(&node, text));
        node.create_device("plain", 0);
        let config = format!(
            "[telemetry]\nlisten = \"off\"\n{}{before_start}\n{}",
            resource("gpu"),
            resource("plain")
        );
        node.write_config(&config);
        let restart_after = Duration::from_millis(100);
        let kubelet =
            Kubelet::start(KubeletConfig { restart_after, ..node.kubelet_config() }).await.unwrap();
        let _daemon: Daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        offered(&kubelet, &name("example.com/plain"), 1).await;
        let plain = PodSpec::new("default", "plain").app("main", &name("example.com/plain"), 1);
        assert_eq!(soon("an admission", kubelet.add_pod(plain)).await.phase, PodPhase::Running);
        assert!(lines(&node, "runs").is_empty(), "it has no hook");

        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)),
        )
        .await;
        assert_eq!(pod.phase, PodPhase::Pending);
        let waiting = kubelet
            .view(|view| view.pod(&pod.uid).unwrap().containers["main"].waiting.clone())
            .unwrap();
        for part in [
            "CreateContainerConfigError",
            "before_start",
            "example.com/gpu",
            "`dev:gpu0`",
            "exit status: 3",
            "holdfast device show",
        ] {
            assert!(waiting.contains(part), "`{part}` is not in: {waiting}");
        }
        std::fs::write(left(&node, "key"), "").unwrap();
        let runs = |view: &holdfast::lab::sim::kubelet::View<'_>| {
            view.pod(&pod.uid).is_some_and(|pod| pod.phase == PodPhase::Running)
        };
        kubelet.wait_for(runs, HANG).await.unwrap();
        let env = lines(&node, "env");
        for told in [
            "HOLDFAST_PHASE=before_start",
            "HOLDFAST_DEVICE_ID=dev:gpu0",
            &format!("HOLDFAST_ALLOC_ID={}", alloc_of(&node)),
        ] {
            assert!(env.iter().any(|line| line == told), "`{told}` is not in {env:#?}");
        }
        let before = lines(&node, "runs").len();
        kubelet.crash_container(&pod.uid, "main");
        // The kubelet runs on this thread.
        let again = async {
            while lines(&node, "runs").len() == before {
                pause().await;
            }
        };
        soon("another run", again).await;
    });
}

fn alloc_of(node: &Node) -> AllocId {
    node.grants().into_iter().find(|grant| grant.resource == gpu()).unwrap().alloc_id
}

/// The grants of an init container and of the next one are of one pod. The reset waits until the
/// ledger knows that, then runs.
#[test]
fn a_reset_before_the_start_is_done_for_every_container_of_a_pod() {
    run(async {
        let node = Node::new();
        let host = SimNode::create(node.path("host")).unwrap();
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nbefore_start = \"reset\"\n",
        );
        let gpus = name("nvidia.com/gpu");
        let reset = |index: usize| {
            node.path(&format!("host/sys/bus/pci/devices/{}/reset", host.gpu_address(index)))
        };
        (0..8).for_each(|index| std::fs::write(reset(index), "").unwrap());
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpus, 8).await;
        let spec = PodSpec::new("default", "train").init("prepare", &gpus, 1).app("main", &gpus, 1);
        let pod = soon("an admission", kubelet.add_pod(spec)).await;
        let runs = |view: &holdfast::lab::sim::kubelet::View<'_>| {
            view.pod(&pod.uid).is_some_and(|pod| pod.phase == PodPhase::Running)
        };
        kubelet.wait_for(runs, HANG).await.unwrap();
        let held = kubelet.devices(&pod.uid, "main").remove(&gpus).unwrap();
        let written = (0..8).filter(|index| std::fs::read_to_string(reset(*index)).unwrap() == "1");
        let written: Vec<_> = written.map(|index| DeviceId::new(host.gpu_uuid(index))).collect();
        assert_eq!(written, held.into_iter().collect::<Vec<_>>());
    });
}

/// A pod that a later handler rejects never gets a sandbox, so its name stays unknown; the kubelet
/// still gives its devices to the next pod.
#[test]
fn a_pod_rejected_after_its_allocate_does_not_block_the_next_pods_reset() {
    run(async {
        let node = Node::new();
        let host = SimNode::create(node.path("host")).unwrap();
        let resource =
            "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nbefore_start = \"reset\"\n";
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{resource}"));
        let gpus = name("nvidia.com/gpu");
        let reset = |index: usize| {
            node.path(&format!("host/sys/bus/pci/devices/{}/reset", host.gpu_address(index)))
        };
        (0..8).for_each(|index| std::fs::write(reset(index), "").unwrap());
        let restart_after = Duration::from_millis(100);
        let kubelet =
            node.start_old_kubelet(KubeletConfig { restart_after, ..node.kubelet_config() }).await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpus, 8).await;
        let rejected = PodSpec::new("default", "large").app("main", &gpus, 8).without_cpu();
        let rejected = soon("a rejection", kubelet.add_pod(rejected)).await;
        assert!(matches!(rejected.phase, PodPhase::Failed { .. }), "{:?}", rejected.phase);
        daemon.logged("grant bound to container").await;

        let next = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpus, 8)),
        )
        .await;
        let runs = |view: &holdfast::lab::sim::kubelet::View<'_>| {
            view.pod(&next.uid).is_some_and(|pod| pod.phase == PodPhase::Running)
        };
        kubelet.wait_for(runs, HANG).await.unwrap();
        let has_it_alone = |grants: &Vec<Grant>| matches!(&grants[..], [one] if one.pod().is_some_and(|pod| pod.uid == next.uid));
        until("the release", || node.grants(), has_it_alone).await;
    });
}
