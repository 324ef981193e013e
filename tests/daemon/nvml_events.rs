//! Xid errors by NVML's events, from the library that replaces NVML in tests (`nvml.rs`).

#![cfg(feature = "nvml")]

use crate::common::{Daemon, HANG, Node, allocate, dial, name, offered, pause, run, soon, until};
use crate::nvml::{CUT, FIRST, LIBRARY, LIBRARY_OF_THE_HOST, WHOLES_AND_PARTS, compile, cut};
use holdfast::domain::{DeviceId, ResourceName};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use holdfast::lab::sim::kubelet::Kubelet;
use nix::pty::openpty;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;

const COVERED: &str = "NVML's events report NVIDIA's Xid errors";
const HEAD: &str = "[telemetry]\nlisten = \"off\"\n";

fn gpu() -> ResourceName {
    name("nvidia.com/gpu")
}

/// A node with the library, which knows all GPUs. `None` without a compiler.
fn node(test: &str, config: &str, also: &[&str]) -> Option<(Node, SimNode)> {
    let node = Node::new();
    let hardware = SimNode::create(node.path("host")).unwrap();
    node.write_config(&format!("{HEAD}{config}{WHOLES_AND_PARTS}"));
    let known: String = (0..GPUS)
        .map(|index| format!("{} {}\n", hardware.gpu_address(index), hardware.gpu_uuid(index)))
        .collect();
    fs::write(node.path("script"), known).unwrap();
    let library = node.path(LIBRARY_OF_THE_HOST);
    compile(test, LIBRARY, &library, &node.path("script"), also).then_some((node, hardware))
}

/// An event of a GPU, as soon as the library has taken the one before.
async fn event(node: &Node, hardware: &SimNode, gpu: usize, xid: u64, action: u64) {
    let file = node.path("script.event");
    until("the event before", || file.exists(), |exists| !exists).await;
    let text = format!("{} 8 {xid} {action}\n", hardware.gpu_uuid(gpu));
    fs::write(node.path("script.next"), text).unwrap();
    fs::rename(node.path("script.next"), file).unwrap();
}

/// Waits until exactly these ids are unhealthy.
async fn unhealthy(kubelet: &Kubelet, all: &BTreeSet<String>, ids: &[&str]) {
    let healthy: BTreeSet<DeviceId> = all
        .iter()
        .filter(|id| !ids.contains(&&***id))
        .map(|id| DeviceId::new(id.as_str()))
        .collect();
    kubelet
        .wait_for(|view| view.endpoint_state(&gpu()).healthy == healthy, HANG)
        .await
        .unwrap_or_else(|error| panic!("{ids:?}: {error}"));
}

fn wholes(hardware: &SimNode) -> BTreeSet<String> {
    (0..GPUS).map(|index| hardware.gpu_uuid(index)).collect()
}

fn shown(node: &Node, id: &str) -> Value {
    let devices = node.json(&["device", "show"]);
    let devices = devices.as_array().cloned().or(devices["devices"].as_array().cloned()).unwrap();
    devices.into_iter().find(|device| device["id"] == id).unwrap()
}

fn xids_are_off(node: &Node) -> Option<String> {
    node.json(&["status"])["signals_off"]["kernel_log"].as_str().map(str::to_owned)
}

#[test]
fn an_xid_by_event_makes_its_gpu_unhealthy_at_once() {
    run(async {
        // No probe finds anything here.
        let Some((node, hardware)) = node("events", "[health]\npoll = \"60s\"\n", &[]) else {
            return;
        };
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu(), GPUS).await;
        daemon.logged(COVERED).await;
        let all = wholes(&hardware);
        event(&node, &hardware, 0, 31, 0).await;
        event(&node, &hardware, 2, 79, 0).await;
        unhealthy(&kubelet, &all, &[&hardware.gpu_uuid(2)]).await;
        event(&node, &hardware, 3, 154, 1).await;
        let two = [hardware.gpu_uuid(2), hardware.gpu_uuid(3)];
        let two = two.each_ref().map(String::as_str);
        unhealthy(&kubelet, &all, &two).await;
        let reasons = two.map(|id| shown(&node, id)["detail"].as_str().map(str::to_owned));
        assert_eq!(reasons, ["Xid 79", "Xid 154: GPU Reset Required"].map(|d| Some(d.to_owned())));
        assert_eq!(xids_are_off(&node), None);
        // Idle, the thread waits for longer and longer, up to 30 s.
        let waits = fs::read_to_string(node.path("script.waits")).unwrap();
        let waits: Vec<u32> = waits.lines().map(|wait| wait.parse().unwrap()).collect();
        assert!(waits.iter().all(|wait| *wait <= 30_001) && waits.len() < 100, "{waits:?}");
        drop(daemon);

        // The next daemon knows it, and does not watch these two GPUs.
        let daemon = node.start_daemon();
        daemon.logged(COVERED).await;
        unhealthy(&kubelet, &all, &two).await;
        event(&node, &hardware, 2, 48, 0).await;
        event(&node, &hardware, 5, 119, 0).await;
        let mut three = two.to_vec();
        let fifth = hardware.gpu_uuid(5);
        three.push(&fifth);
        unhealthy(&kubelet, &all, &three).await;
        assert_eq!(shown(&node, two[0])["incidents"].as_array().unwrap().len(), 1);
    });
}

#[test]
fn a_gpu_that_does_not_return_its_address_is_found_by_its_handle() {
    run(async {
        let Some((node, hardware)) = node("dumb", "", &[]) else { return };
        let script = fs::read_to_string(node.path("script")).unwrap();
        let script = format!("{script}mute {} -\n", hardware.gpu_uuid(7));
        fs::write(node.path("script"), &script).unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu(), GPUS).await;
        // One GPU without events does not hide the errors of the others.
        let off = daemon.logged("it reports no Xid errors").await;
        assert!(off.contains(&hardware.gpu_address(7).to_string()), "{off}");
        let lost = hardware.gpu_uuid(4);
        fs::write(node.path("script"), format!("{script}dumb {lost} -\n")).unwrap();
        event(&node, &hardware, 4, 79, 0).await;
        unhealthy(&kubelet, &wholes(&hardware), &[&lost]).await;
    });
}

#[test]
fn an_event_of_a_gpu_in_mig_mode_makes_its_instances_unhealthy() {
    run(async {
        let Some((node, hardware)) = node("mig events", "", &[]) else { return };
        cut(&node, 1);
        cut(&node, 2);
        let whole = hardware.gpu_uuid(CUT);
        let script = fs::read_to_string(node.path("script")).unwrap();
        let names = format!("MIG-{whole}/1/0 {FIRST}\nMIG-{whole}/2/0 MIG-2\n");
        fs::write(node.path("script"), format!("{script}{names}")).unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu(), GPUS + 1).await;
        daemon.logged(COVERED).await;
        let parts = [1, 2].map(|gi| format!("{whole}-gi{gi}-ci0"));
        let mut all = wholes(&hardware);
        all.remove(&whole);
        all.extend(parts.clone());
        // The GPU is watched a little after its instances are listed.
        let events = async {
            loop {
                event(&node, &hardware, CUT, 79, 0).await;
                pause().await;
            }
        };
        let parts = parts.each_ref().map(String::as_str);
        tokio::select! {
            () = unhealthy(&kubelet, &all, &parts) => {}
            () = events => {}
        }
    });
}

#[test]
fn where_the_kernel_log_is_read_it_is_the_only_source_and_names_the_mig_instance() {
    run(async {
        let Some((node, hardware)) = node("one source", "", &[]) else { return };
        cut(&node, 1);
        cut(&node, 2);
        let whole = hardware.gpu_uuid(CUT);
        let script = fs::read_to_string(node.path("script")).unwrap();
        let names = format!("MIG-{whole}/1/0 {FIRST}\nMIG-{whole}/2/0 MIG-2\n");
        fs::write(node.path("script"), format!("{script}{names}")).unwrap();
        let log = openpty(None, None).unwrap();
        let kmsg = node.path("host/dev/kmsg");
        symlink(nix::unistd::ttyname(&log.slave).unwrap(), kmsg).unwrap();
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), GPUS + 1).await;
        let mut all = wholes(&hardware);
        all.remove(&whole);
        all.extend([1, 2].map(|gi| format!("{whole}-gi{gi}-ci0")));
        let logs = |index: usize, instance: &str| {
            let slot = hardware.gpu_address(index).to_string();
            let slot = slot.strip_suffix(".0").unwrap();
            let line = format!("4,7,1000,-;NVRM: Xid (PCI:{slot}{instance}): 95, pid=1, x\n");
            nix::unistd::write(&log.master, line.as_bytes()).unwrap();
        };
        // The same error by both ways.
        event(&node, &hardware, 3, 95, 0).await;
        logs(3, "");
        logs(CUT, " GPU-I:02 GPU-CI:00");
        let (third, second) = (hardware.gpu_uuid(3), format!("{whole}-gi2-ci0"));
        unhealthy(&kubelet, &all, &[&third, &second]).await;
        assert_eq!(shown(&node, &third)["incidents"].as_array().unwrap().len(), 1);
        assert!(!node.path("script.waits").exists(), "the library is not asked for events");
        assert!(node.path("script.event").exists());
        assert_eq!(xids_are_off(&node), None);
    });
}

#[test]
fn a_library_that_hangs_in_the_wait_or_has_no_events_changes_nothing() {
    run(async {
        for hangs in [true, false] {
            let also: &[&str] = if hangs { &[] } else { &["-DWITHOUT_EVENTS"] };
            let Some((node, hardware)) = node("hanging events", "", also) else { return };
            fs::write(node.path("script.stuck"), "").unwrap();
            let kubelet = node.start_kubelet().await;
            let mut daemon = node.start_daemon();
            offered(&kubelet, &gpu(), GPUS).await;
            if hangs {
                daemon.logged(COVERED).await;
                until("the wait", || node.path("script.waits").exists(), |waits| *waits).await;
            } else {
                let off = daemon.logged("NVML's events are not used").await;
                assert!(off.contains("nvmlDeviceGetSupportedEventTypes"), "{off}");
                assert!(xids_are_off(&node).unwrap().contains("the kernel log cannot be read"));
            }
            let mut api = dial(&kubelet, &node, &gpu()).await;
            allocate(&mut api, &[&hardware.gpu_uuid(1)]).await.unwrap();
            assert_eq!(node.json(&["status"])["signals_off"]["nvml"], Value::Null);
            daemon.signal(Signal::SIGTERM);
            assert!(daemon.exited().await.success());
            drop(node);
        }
    });
}

/// The processes in which NVML is initialised.
fn clients(node: &Node) -> usize {
    let pids = |file: &str| -> BTreeSet<i32> {
        let text = fs::read_to_string(node.path(file)).unwrap_or_default();
        text.lines().filter_map(|pid| pid.parse().ok()).collect()
    };
    // The ends are read first: another query may begin in between.
    let ended = pids("script.ends");
    let is_alive = |pid: &&i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    };
    pids("script.starts").difference(&ended).filter(is_alive).count()
}

/// Waits until NVML is initialised (or not) by the watch alone.
async fn open(node: &Node, wanted: usize) {
    until("the clients of NVML", || clients(node), |now| *now == wanted).await;
}

#[test]
fn nvml_is_closed_by_a_reload_and_by_a_cordon_of_the_last_gpu() {
    run(async {
        let Some((node, hardware)) = node("release", "", &[]) else { return };
        let one = format!(
            "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nselect = {{ address = [\"{}\"] }}\n",
            hardware.gpu_address(0)
        );
        node.write_config(&format!("{HEAD}{one}"));
        fs::write(node.path("script.early"), "").unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon: Daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        daemon.logged(COVERED).await;
        open(&node, 1).await;

        node.write_config(&format!("{HEAD}[nvidia]\nevents = false\n{one}"));
        daemon.signal(Signal::SIGHUP);
        open(&node, 0).await;
        soon("the reason", daemon.logged("`[nvidia] events = false`")).await;
        assert!(xids_are_off(&node).is_some());
        node.write_config(&format!("{HEAD}{one}"));
        daemon.signal(Signal::SIGHUP);
        open(&node, 1).await;

        let id = hardware.gpu_uuid(0);
        assert!(node.output(&["device", "cordon", &id, "--reason", "MIG"]).status.success());
        open(&node, 0).await;
        assert_eq!(xids_are_off(&node), None, "no error of a cordoned GPU counts");
        assert!(node.output(&["device", "uncordon", &id]).status.success());
        open(&node, 1).await;
        // The process does not outlive the daemon.
        let mut daemon = daemon;
        daemon.kill();
        open(&node, 0).await;
    });
}

#[test]
fn a_crash_in_the_wait_is_reported_and_the_next_process_watches_again() {
    run(async {
        let Some((node, hardware)) = node("crashing wait", "", &[]) else { return };
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), GPUS).await;
        daemon.logged(COVERED).await;
        fs::write(node.path("script.crash"), "").unwrap();
        let off = daemon.logged("NVML's events are not used").await;
        assert!(off.contains("signal: 11 (SIGSEGV)"), "{off}");
        assert!(xids_are_off(&node).unwrap().contains("SIGSEGV"));
        let mut api = dial(&kubelet, &node, &gpu()).await;
        allocate(&mut api, &[&hardware.gpu_uuid(1)]).await.unwrap();
        fs::remove_file(node.path("script.crash")).unwrap();
        // Another set of GPUs to watch is tried at once.
        let last = hardware.gpu_uuid(GPUS - 1);
        assert!(node.output(&["device", "cordon", &last, "--reason", "x"]).status.success());
        until("the watch", || xids_are_off(&node), Option::is_none).await;
        event(&node, &hardware, 2, 79, 0).await;
        unhealthy(&kubelet, &wholes(&hardware), &[&hardware.gpu_uuid(2), &last]).await;
        daemon.signal(Signal::SIGTERM);
        assert!(daemon.exited().await.success(), "it was alive");
    });
}
