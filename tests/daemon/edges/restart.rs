//! Restarts of the kubelet, of the daemon and of the node: the timing of both sides, and the
//! devices of started containers.

use crate::common::{count, run, soon};
use crate::edges::stage::{
    GPUS, Stage, alloc_id, gpu, granted, is_bound_to, on_every_profile, registrations,
};
use holdfast::lab::sim::kubelet::{EventKind, Hook, PodPhase, PodSpec, Profile, Verdict, View};
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::net::UnixListener;

/// Whether the first list of this start has arrived, with every device healthy.
fn first_list_is_whole(view: &View<'_>) -> Option<bool> {
    let events: Vec<_> = view.events().iter().map(|event| &event.kind).collect();
    let start = events.iter().rposition(|kind| matches!(kind, EventKind::Started { .. }))?;
    events[start..].iter().find_map(|kind| match kind {
        EventKind::Listed { healthy, unhealthy, .. } => Some((*healthy, *unhealthy) == (GPUS, 0)),
        _ => None,
    })
}

fn allocations(stage: &Stage) -> usize {
    count(&stage.kubelet, |kind| matches!(kind, EventKind::Allocated { .. }))
}

/// A kubelet that ends unlinks nothing: its socket exists without a listener. The daemon waits, and
/// registers when there is one.
#[test]
fn edge_07_a_stale_kubelet_socket_is_retried() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        stage.kubelet.stop();
        assert!(stage.node.path("kubelet/device-plugins/kubelet.sock").exists());
        let app = stage.node.start_app().await;
        let mut status = app.views.registrations.clone();
        let waits = status.wait_for(|status| {
            status.get(&gpu()).is_some_and(|status| status.awaiting_kubelet && !status.registered)
        });
        drop(soon("the wait", waits).await.unwrap());
        stage.kubelet.start_again().await.unwrap();
        stage.settled_after(0).await;
        app.shut_down().await;
    });
}

/// A starting kubelet removes the sockets next to its own, including those created since its last
/// end. Ours are in a sub-directory, which it skips: those for the last kubelet still exist, and a
/// daemon that starts meanwhile is not too early.
#[test]
fn edge_08_a_starting_kubelet_removes_top_level_sockets_and_not_ours() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let mut app = stage.start_app().await;
        for is_new in [false, true] {
            let used = stage.kubelet.view(registrations).pop().unwrap().1;
            stage.kubelet.stop();
            let beside = stage.node.path("kubelet/device-plugins/beside.sock");
            let _listener = UnixListener::bind(&beside).unwrap();
            if is_new {
                app.shut_down().await;
                app = stage.node.start_app().await;
            }
            let ours = stage.node.path("kubelet/device-plugins").join(used);
            assert_eq!(ours.exists(), !is_new);
            stage.kubelet.start_again().await.unwrap();
            assert!(!beside.exists());
            assert_eq!(ours.exists(), !is_new, "it is not the kubelet's to remove");
            stage.settled_after(0).await;
        }
        stage.admit_one("after", 1).await;
        app.shut_down().await;
    });
}

/// A kubelet in a crash loop: each of its sockets triggers a new Register, and work with the
/// previous one does not matter. It dies at every stage of a registration.
#[test]
fn edge_10_a_kubelet_in_a_crash_loop_has_the_resource_after_its_last_start() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let hooks = [
            Hook::BeforeRegisterClient,
            Hook::AfterRegisterClient,
            Hook::AfterDial,
            Hook::AfterOptions,
            Hook::AfterEndpointSet,
            Hook::BeforeListAndWatch,
            Hook::OnList,
            Hook::BeforeCheckpoint,
            Hook::DuringCheckpoint,
        ];
        for round in 0..50 {
            match hooks.get(round % (hooks.len() + 1)) {
                None => {
                    stage.kubelet.restart().await.unwrap();
                    stage.kubelet.restart().await.unwrap();
                }
                Some(hook) => {
                    stage.hooks.gate(*hook).open(Verdict::Crash);
                    stage.kubelet.restart().await.unwrap();
                    stage.wait(|view| !view.is_running()).await;
                    stage.kubelet.start_again().await.unwrap();
                }
            }
        }
        stage.settled_after(0).await;
        let registers = stage.kubelet.view(|view| view.registers(&gpu()));
        assert!(
            registers <= 10,
            "{registers} Registers, where one and its settling one are enough"
        );
        stage.admit_one("after", 1).await;
        app.shut_down().await;
    });
}

/// After a reboot nothing is allocated: the kubelet starts every pod with its stored answers, if
/// their devices are listed as healthy. The ledger still has the grants, although no process and no
/// cgroup of the pods is left.
#[test]
fn edge_20_after_a_reboot_pods_are_admitted_with_their_devices() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let boot_id = stage.node.path("host/proc/sys/kernel/random/boot_id");
        fs::create_dir_all(boot_id.parent().unwrap()).unwrap();
        fs::write(&boot_id, "first\n").unwrap();
        let mut app = stage.start_app().await;
        let pod = stage.admit_one("lasting", 2).await;
        granted(&app, "the grant is bound", |grants| {
            grants.iter().any(|grant| is_bound_to(grant, &pod.spec.uid))
        })
        .await;
        for daemon_first in [true, false] {
            stage.kubelet.stop();
            app.shut_down().await;
            fs::remove_dir_all(stage.node.path("host/sys/fs/cgroup/kubepods")).unwrap();
            fs::write(&boot_id, format!("after {daemon_first}\n")).unwrap();
            stage.kubelet.crash_container(&pod.spec.uid, "main");
            let mut gate = stage.hooks.gate(Hook::BeforeFirstBatch);
            if daemon_first {
                app = stage.node.start_app().await;
                stage.kubelet.start_again().await.unwrap();
            } else {
                stage.kubelet.start_again().await.unwrap();
                app = stage.node.start_app().await;
            }
            gate.reached().await;
            stage.settled_after(0).await;
            gate.open(Verdict::Pass);
            stage.wait(|view| view.is_settled()).await;
            assert_eq!(stage.pod(&pod.spec.uid).phase, PodPhase::Running);
            assert_eq!(stage.kubelet.view(|view| view.rejections()), 0);
            let grants = stage.node.grants();
            assert!(
                grants.len() == 1 && grants[0].alloc_id == alloc_id(&pod, "main"),
                "{grants:#?}"
            );
        }
        assert_eq!(allocations(&stage), 1);
        app.shut_down().await;
    });
}

/// The kubelet dies between the Allocates of a pod. A later kubelet starts the first container with
/// the stored answer, with a later daemon. The ledger has that very answer.
#[test]
fn edge_21_a_container_starts_with_the_answer_of_an_earlier_daemon() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        stage.hooks.gate_after(Hook::BeforeAllocate, 1).open(Verdict::Crash);
        let pod =
            PodSpec::new("default", "train").init("prepare", &gpu(), 2).app("main", &gpu(), 2);
        let outcome = stage.kubelet.add_pod(pod).await;
        assert_eq!((outcome.phase, allocations(&stage)), (PodPhase::Pending, 1));
        app.shut_down().await;
        let before = stage.node.grants();

        let mut gate = stage.hooks.gate(Hook::BeforeFirstBatch);
        stage.kubelet.start_again().await.unwrap();
        let app = stage.start_app().await;
        gate.reached().await;
        gate.open(Verdict::Pass);
        stage
            .wait(|view| view.pod(&outcome.uid).is_some_and(|pod| pod.phase == PodPhase::Running))
            .await;
        let pod = stage.pod(&outcome.uid);
        assert_eq!(allocations(&stage), 2, "only the second container is allocated for");
        assert_eq!(alloc_id(&pod, "prepare"), before[0].alloc_id);
        assert_eq!(
            pod.containers["prepare"].edits, before[0].edits,
            "what was answered, word for word"
        );
        assert_eq!(pod.containers["main"].devices, pod.containers["prepare"].devices);
        let grants = granted(&app, "both are bound", |grants| {
            grants.iter().filter(|grant| is_bound_to(grant, &outcome.uid)).count() == 2
        })
        .await;
        assert!(grants.iter().any(|grant| grant.alloc_id == before[0].alloc_id));
        app.shut_down().await;
    });
}

/// A starting kubelet admits its pods again. It rejects a pod with a stopped container (an ended
/// init container, a crash loop) unless all its devices are listed as healthy: so the very first
/// list is complete.
#[test]
fn edge_22_the_first_list_after_a_restart_has_every_held_device() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        stage
            .admit(PodSpec::new("default", "init").init("prepare", &gpu(), 1).app(
                "main",
                &gpu(),
                1,
            ))
            .await;
        stage
            .admit(PodSpec::new("default", "sidecar").init("prepare", &gpu(), 1).sidecar(
                "proxy",
                &gpu(),
                1,
            ))
            .await;
        let crashing = stage.admit_one("crashing", 1).await;
        for round in 0..3 {
            stage.kubelet.crash_container(&crashing.spec.uid, "main");
            let mut gate = stage.hooks.gate(Hook::BeforeFirstBatch);
            stage.kubelet.restart().await.unwrap();
            gate.reached().await;
            stage.wait(|view| first_list_is_whole(view).is_some()).await;
            assert_eq!(stage.kubelet.view(first_list_is_whole), Some(true), "round {round}");
            gate.open(Verdict::Pass);
            stage.wait(|view| view.is_settled()).await;
            assert!(
                stage.kubelet.pods().iter().all(|pod| pod.phase == PodPhase::Running),
                "{:#?}",
                stage.kubelet.pods()
            );
        }
        app.shut_down().await;
    });
}

/// inotify's queue is bounded; on overflow the kernel reports that some events were lost, but not
/// which. The event of the new kubelet is among them.
#[test]
fn edge_39_a_kubelet_start_that_inotify_did_not_report_is_found() {
    run(async {
        let stage = Stage::new(Profile::K125).await;
        let daemon = stage.node.start_daemon();
        stage.settled_after(0).await;
        stage.kubelet.stop();
        daemon.logged("waiting for the kubelet").await;
        daemon.signal(Signal::SIGSTOP);
        let queue = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")
            .unwrap()
            .trim()
            .parse::<usize>()
            .unwrap();
        // Two events each, never the same one twice in a row: the kernel would merge those.
        let [one, other] =
            ["one", "other"].map(|name| stage.node.path(&format!("kubelet/device-plugins/{name}")));
        for _ in 0..=queue / 4 {
            for file in [&one, &other] {
                fs::write(file, "").unwrap();
            }
            for file in [&one, &other] {
                fs::remove_file(file).unwrap();
            }
        }
        stage.kubelet.start_again().await.unwrap();
        daemon.signal(Signal::SIGCONT);
        stage.settled_after(0).await;
        stage.admit_one("after", 1).await;
    });
}
