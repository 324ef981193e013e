//! Nodes of `/dev` that come and go under a running daemon: folders as one device, and devices in
//! thousands of shares.

use crate::common::{HANG, Node, allocate, dial, name, offered, run, soon};
use holdfast::domain::ResourceName;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, PodPhase, PodSpec};
use nix::sys::signal::Signal;
use std::fs;

/// Waits for a list with these numbers of healthy and of other devices.
async fn listed(kubelet: &Kubelet, resource: &ResourceName, wanted: (usize, usize)) {
    let newest = |kind: &EventKind| {
        matches!(kind, EventKind::Listed { .. }) && kind.resource() == Some(resource)
    };
    let seen = |view: &holdfast::lab::sim::kubelet::View<'_>| {
        let event = view.last(newest).map(|event| &event.kind);
        matches!(event, Some(EventKind::Listed { healthy, unhealthy, .. }) if (*healthy, *unhealthy) == wanted)
    };
    kubelet.wait_for(seen, HANG).await.unwrap();
}

/// The nodes that a pod with one device of a resource gets.
async fn nodes_of_a_pod(kubelet: &Kubelet, pod: &str, resource: &ResourceName) -> Vec<String> {
    let outcome = soon(
        "an admission",
        kubelet.add_pod(PodSpec::new("default", pod).app("main", resource, 1)),
    )
    .await;
    assert_eq!(outcome.phase, PodPhase::Running);
    let edits =
        kubelet.view(|view| view.pod(&outcome.uid).unwrap().containers["main"].edits.clone());
    edits.devices.iter().map(|node| node.container.clone()).collect()
}

fn make(node: &Node, path: &str) {
    let path = node.path("host/dev").join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

#[test]
fn a_folder_of_nodes_is_one_device_for_as_many_containers_as_it_is_shared_by() {
    run(async {
        let node = Node::with(&[]);
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"example.com/audio\"\nclass = \"char\"\npaths = [\"/dev/snd\"]\nreplicas = 2\n",
        );
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        let audio = name("example.com/audio");
        listed(&kubelet, &audio, (0, 0)).await;
        make(&node, "snd/controlC0");
        listed(&kubelet, &audio, (2, 0)).await;
        assert_eq!(nodes_of_a_pod(&kubelet, "first", &audio).await, ["/dev/snd/controlC0"]);
        // A later node is in the next answer, and the device is the same.
        make(&node, "snd/by-path/pcm");
        let had = |status: &serde_json::Value| {
            status["devices"].to_string().contains("/dev/snd/by-path/pcm")
        };
        crate::common::until("the new node", || node.json(&["device", "show", "dev:snd"]), had)
            .await;
        assert_eq!(
            nodes_of_a_pod(&kubelet, "second", &audio).await,
            ["/dev/snd/by-path/pcm", "/dev/snd/controlC0"]
        );
        assert_eq!(node.grants().len(), 2);
        // Without a node the device is absent, but its held shares stay in the list.
        fs::remove_dir_all(node.path("host/dev/snd")).unwrap();
        listed(&kubelet, &audio, (0, 2)).await;
        make(&node, "snd/controlC1");
        listed(&kubelet, &audio, (2, 0)).await;
    });
}

#[test]
fn sixteen_thousand_shares_are_one_list_that_is_recorded() {
    const SHARES: usize = 16_384;
    run(async {
        // As long as a GPU's id.
        let id = "GPU-1b2c3d4e-0001-4002-8003-0a0b0c0d0e";
        let node = Node::with(&[(id, 1)]);
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"example.com/gpu\"\nclass = \"char\"\npaths = [\"/dev/{id}0\"]\nreplicas = {SHARES}\n"
        ));
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        let gpu = name("example.com/gpu");
        offered(&kubelet, &gpu, SHARES).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        let shares: Vec<String> = (0..4).map(|n| format!("dev:{id}0::{n}")).collect();
        allocate(&mut api, &shares.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
        daemon.kill();
        // The kubelet's last list is remembered, including free shares: none leaves the list at
        // once (I3).
        node.remove_device(id, 0);
        let _daemon = node.start_daemon();
        listed(&kubelet, &gpu, (0, SHARES)).await;
    });
}

#[test]
fn each_new_node_is_a_resource_and_a_held_one_outlives_its_node() {
    run(async {
        let node = Node::with(&[]);
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"board/{node}\"\nclass = \"char\"\npaths = [{ regex = \"^i2c-[0-9]*$\" }, { regex = \"^snd$\" }]\n",
        );
        make(&node, "i2c-1");
        make(&node, "i2c-x");
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        let (first, second, sound) = (name("board/i2c-1"), name("board/i2c-13"), name("board/snd"));
        listed(&kubelet, &first, (1, 0)).await;
        make(&node, "i2c-13");
        listed(&kubelet, &second, (1, 0)).await;
        make(&node, "snd/timer");
        listed(&kubelet, &sound, (1, 0)).await;
        assert_eq!(nodes_of_a_pod(&kubelet, "sound", &sound).await, ["/dev/snd/timer"]);
        assert_eq!(nodes_of_a_pod(&kubelet, "bus", &second).await, ["/dev/i2c-13"]);
        let resources = |document: &serde_json::Value| -> Vec<String> {
            let devices = document["devices"].as_array().unwrap();
            devices
                .iter()
                .filter_map(|device| device["resource"].as_str().map(str::to_owned))
                .collect()
        };
        assert_eq!(
            resources(&node.json(&["discover"])),
            ["board/i2c-1", "board/i2c-13", "board/snd"]
        );

        // Its resource has no node any longer, and is removed when it is free.
        fs::remove_file(node.path("host/dev/i2c-13")).unwrap();
        listed(&kubelet, &second, (0, 1)).await;
        daemon.kill();
        let daemon = node.start_daemon();
        daemon.logged("registered with the kubelet").await;
        listed(&kubelet, &second, (0, 1)).await;
        make(&node, "i2c-13");
        listed(&kubelet, &second, (1, 0)).await;
        assert_eq!(node.grants().len(), 2);

        // Another configuration applies to the present nodes.
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"board/{node}\"\nclass = \"char\"\npaths = [{ regex = \"^i2c-[0-9]*$\" }]\nreplicas = 3\n",
        );
        assert!(node.command(&["config", "check"]).output().unwrap().status.success());
        daemon.signal(Signal::SIGHUP);
        // The former id stays for the minute before it leaves.
        listed(&kubelet, &first, (3, 1)).await;
        listed(&kubelet, &sound, (1, 0)).await;
    });
}

/// A Jetson's GPU, which is no PCI function, in time slices: as with NVIDIA's plugin, the shares
/// are `tegra::<n>`, and each container gets the name `tegra` (`internal/rm/tegra_manager.go`).
#[test]
fn a_jetsons_gpu_is_shared_and_is_healthy_while_its_nodes_exist() {
    run(async {
        let node = Node::with(&[]);
        let release = node.path("host/etc/nv_tegra_release");
        fs::create_dir_all(release.parent().unwrap()).unwrap();
        fs::write(release, "# R36 (release), REVISION: 4.0\n").unwrap();
        make(&node, "nvgpu/igpu0/ctrl");
        make(&node, "nvmap");
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\n\
             select = { vendor = [\"10de\"], driver = [\"nvidia\"] }\nreplicas = 3\n\
             nvidia = { pass_device_specs = true }\n",
        );
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        let gpu = name("nvidia.com/gpu");
        listed(&kubelet, &gpu, (3, 0)).await;
        let pod = PodSpec::new("default", "pod").app("main", &gpu, 1);
        let outcome = soon("an admission", kubelet.add_pod(pod)).await;
        let edits = kubelet.view(|view| {
            let pod = view.pod(&outcome.uid).unwrap();
            pod.containers["main"].edits.clone()
        });
        assert_eq!(edits.envs["NVIDIA_VISIBLE_DEVICES"], "tegra");
        assert!(edits.devices.is_empty(), "the toolkit adds the nodes");
        let held = node.grants()[0].devices[0].id.clone();
        assert_eq!(held.shared().unwrap().as_str(), "tegra");
        let nvmap = node.path("host/dev/nvmap");
        fs::remove_file(&nvmap).unwrap();
        listed(&kubelet, &gpu, (0, 3)).await;
        fs::write(&nvmap, "").unwrap();
        listed(&kubelet, &gpu, (3, 0)).await;
    });
}

/// A driver in a container, at a root that the configuration names.
#[test]
fn the_nodes_of_a_driver_are_found_below_its_configured_root() {
    run(async {
        let node = Node::with(&[]);
        let write = |path: &str, text: &str| {
            let path = node.path("host").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let uevent = "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n";
        write("sys/bus/pci/devices/0000:3b:00.0/uevent", uevent);
        let information = "Model: \t H100\nGPU UUID: \t GPU-1\nDevice Minor: \t 0\n";
        write("proc/driver/nvidia/gpus/0000:3b:00.0/information", information);
        write("opt/driver/dev/nvidia0", "");
        write("opt/driver/dev/nvidiactl", "");
        node.write_config(
            "[telemetry]\nlisten = \"off\"\n[nvidia]\ndriver_root = \"/opt/driver\"\nnvml = \"off\"\n\
             [[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\n\
             select = { vendor = [\"10de\"], driver = [\"nvidia\"] }\n\
             nvidia = { pass_device_specs = true }\n",
        );
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        let gpu = name("nvidia.com/gpu");
        listed(&kubelet, &gpu, (1, 0)).await;
        let nodes = nodes_of_a_pod(&kubelet, "pod", &gpu).await;
        assert_eq!(nodes, ["/dev/nvidiactl", "/dev/nvidia0"]);
    });
}
