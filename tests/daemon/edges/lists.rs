//! The list: ids that may never leave it, ids that may never be in it, and its rate.

use crate::common::{Node, allocate, dial, name, offered, resource, run, soon};
use crate::edges::stage::{GPUS, Stage, gpu, on_every_profile};
use holdfast::domain::ResourceName;
use holdfast::host;
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::lab::sim::hardware::{GPUS as SIM_GPUS, SimNode};
use holdfast::lab::sim::kubelet::{EventKind, Hook, Kubelet, PodPhase, PodSpec, Verdict, View};
use holdfast::messages::Rescan;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

/// Whether the newest list of a resource has these numbers of healthy and of other devices.
fn lists(view: &View<'_>, resource: &ResourceName, wanted: (usize, usize)) -> bool {
    let event = view
        .last(|kind| matches!(kind, EventKind::Listed { .. }) && kind.resource() == Some(resource))
        .map(|event| &event.kind);
    matches!(event, Some(EventKind::Listed { healthy, unhealthy, .. }) if (*healthy, *unhealthy) == wanted)
}

fn vanished(view: &View<'_>) -> bool {
    view.last(|kind| matches!(kind, EventKind::Vanished { .. })).is_some()
}

/// The list as a new stream gets it.
async fn list(kubelet: &Kubelet, node: &Node, resource: &ResourceName) -> Vec<api::Device> {
    let mut stream = dial(kubelet, node, resource)
        .await
        .list_and_watch(api::Empty {})
        .await
        .unwrap()
        .into_inner();
    soon("a list", stream.message()).await.unwrap().unwrap().devices
}

/// From 1.35 on a kubelet dereferences held devices without checking that they are listed; with a
/// topology policy it does so at every start. A held id stays in the list, unhealthy, across
/// restarts of both sides.
#[test]
fn edge_11_a_held_device_that_is_pulled_stays_listed_and_no_kubelet_crashes() {
    on_every_profile(async |profile| {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        node.write_config("[telemetry]\nlisten = \"off\"\n");
        let stage = Stage::on(node, profile, |config| config.topology_manager = true).await;
        let gpu = name("nvidia.com/gpu");
        let app = stage.node.start_app().await;
        offered(&stage.kubelet, &gpu, SIM_GPUS).await;
        let pod = stage.admit(PodSpec::new("default", "train").app("main", &gpu, 2)).await;
        for index in 0..SIM_GPUS {
            let id = hardware.gpu_uuid(index);
            if pod.containers["main"].devices[&gpu].iter().any(|held| held.as_str() == id) {
                hardware.remove_function(hardware.gpu_address(index)).unwrap();
                hardware.remove_gpu_node(index).unwrap();
            }
        }
        let is_listed = |view: &View<'_>| lists(view, &gpu, (SIM_GPUS - 2, 2));
        stage.wait(is_listed).await;
        app.shut_down().await;
        // Only the ledger has them for the next daemon.
        let app = stage.node.start_app().await;
        for _ in 0..3 {
            stage.kubelet.restart().await.unwrap();
            stage
                .wait(|view| {
                    view.first_list(&gpu).is_some() && view.is_settled() && is_listed(view)
                })
                .await;
            stage.admit(PodSpec::new("default", "next").app("main", &gpu, 1)).await;
        }
        assert!(!stage.kubelet.view(vanished));
        assert_eq!(stage.kubelet.panicked(), None);
        app.shut_down().await;
    });
}

/// The kubelet reads the device again after the Allocate. A device that is pulled meanwhile stays
/// listed, unhealthy.
#[test]
fn edge_12_a_device_that_is_pulled_during_its_allocate_is_still_listed_after_it() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let mut gate = stage.hooks.gate(Hook::DuringAllocate);
        let pull = async {
            gate.reached().await;
            (0..GPUS).for_each(|index| stage.node.remove_device("gpu", index));
            stage.wait(|view| lists(view, &gpu(), (0, GPUS))).await;
            gate.open(Verdict::Pass);
        };
        let pod = PodSpec::new("default", "train").app("main", &gpu(), 1);
        let (outcome, ()) =
            soon("the admission", futures_util::future::join(stage.kubelet.add_pod(pod), pull))
                .await;
        assert_ne!(outcome.phase, PodPhase::Pending);
        assert!(!stage.kubelet.view(vanished));
        assert_eq!(stage.kubelet.panicked(), None);
        app.shut_down().await;
    });
}

/// The kubelet checks nothing: an id that is listed twice counts twice, and the NUMA node -1 is its
/// own value for none.
#[test]
fn edge_27_ids_are_listed_once_and_only_with_existing_numa_nodes() {
    run(async {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        let fact = |gpu, file| {
            node.path(&format!("host/sys/bus/pci/devices/{}/{file}", hardware.gpu_address(gpu)))
        };
        fs::write(fact(0, "numa_node"), "-1\n").unwrap();
        // One more than the kubelet can count, without a CPU list to correct it.
        fs::write(fact(1, "numa_node"), "64\n").unwrap();
        fs::write(fact(1, "local_cpulist"), "\n").unwrap();
        // One node by three names.
        node.create_device("fuse", 0);
        symlink("fuse0", node.path("host/dev/fuse1")).unwrap();
        let paths = "paths = [\"/dev/fuse0\", \"/dev/fuse*\"]\n";
        let gpus = "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\n";
        let config = "[telemetry]\nlisten = \"off\"\n";
        node.write_config(&format!(
            "{config}{gpus}[[resource]]\nname = \"example.com/fuse\"\nclass = \"char\"\n{paths}"
        ));
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        let (gpu, fuse) = (name("nvidia.com/gpu"), name("example.com/fuse"));
        offered(&kubelet, &gpu, SIM_GPUS).await;
        kubelet
            .wait_for(|view| view.first_list(&fuse).is_some(), crate::common::HANG)
            .await
            .unwrap();

        let (gpus, fuses) = (list(&kubelet, &node, &gpu).await, list(&kubelet, &node, &fuse).await);
        let ids: BTreeSet<&str> =
            gpus.iter().chain(&fuses).map(|device| device.id.as_str()).collect();
        assert_eq!(ids.len(), gpus.len() + fuses.len(), "ids are unique, over all resources too");
        let nodes = |device: &api::Device| {
            device
                .topology
                .as_ref()
                .map(|topology| topology.nodes.iter().map(|node| node.id).collect::<Vec<_>>())
        };
        let nodes: BTreeMap<&str, _> =
            gpus.iter().map(|device| (device.id.as_str(), nodes(device))).collect();
        for index in 0..SIM_GPUS {
            let wanted =
                if index < 2 { None } else { Some(vec![i64::from(index >= SIM_GPUS / 2)]) };
            assert_eq!(nodes[hardware.gpu_uuid(index).as_str()], wanted, "GPU {index}");
        }
        app.shut_down().await;
    });
}

/// The kubelet writes and syncs its checkpoint for every list. A device that flaps a thousand times
/// a second causes as few lists as one that flaps twenty times a second.
#[test]
fn edge_29_a_flapping_device_makes_few_lists() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let rescan = app.actors.discovery.mailbox::<Rescan>();
        let (before, began, mut flaps) =
            (stage.kubelet.view(|view| view.lists(&gpu())), Instant::now(), 0);
        // Each flap is scanned: no event is dropped, so only the rate limit of lists applies.
        while began.elapsed() < Duration::from_secs(1) {
            match flaps % 2 {
                0 => stage.node.remove_device("gpu", 0),
                _ => stage.node.create_device("gpu", 0),
            }
            rescan.call(Rescan { asked_at: host::now().boot }, crate::common::HANG).await.unwrap();
            flaps += 1;
        }
        let took = began.elapsed();
        let sent = usize::try_from(stage.kubelet.view(|view| view.lists(&gpu())) - before).unwrap();
        // Including the lists of a Register at the same time.
        let streams = stage.kubelet.view(|view| view.endpoint_state(&gpu()).streams);
        let most = (took.as_millis() / 50 + 2) as usize * streams;
        println!("{flaps} flaps in {took:?}: {sent} lists on {streams} streams");
        assert!(sent <= most, "{sent} lists on {streams} streams in {took:?}");
        if flaps % 2 == 1 {
            stage.node.create_device("gpu", 0);
        }
        stage.wait_until_recovered(GPUS).await;
        app.shut_down().await;
    });
}

/// A message above 4 MiB ends the stream, and the next one too. A list of that size is not sent at
/// all: the stream stays, there is no new registration, and the other resources are not affected.
#[test]
fn edge_30_a_list_that_is_too_long_for_the_kubelet_is_not_sent() {
    on_every_profile(async |profile| {
        let node = Node::with(&[("gpu", GPUS)]);
        let stem = "a-very-long-name-".repeat(8);
        (0..4).for_each(|index| node.create_device(&stem, index));
        let replicas = format!(
            "{}replicas = 10000\n",
            resource(&stem).replacen(&format!("example.com/{stem}"), "example.com/many", 1)
        );
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{replicas}{}", resource("gpu")));
        let stage = Stage::on(node, profile, |_| {}).await;
        let app = stage.start_app().await;
        let many = name("example.com/many");
        stage
            .wait(|view| view.registers(&many) >= 2 && view.endpoint_state(&many).is_streaming)
            .await;
        stage.admit_one("other", 1).await;
        // The kubelet lacks its devices: the daemon reports that, and registers some more times,
        // without effect.
        let mut registrations = app.views.registrations.clone();
        let reported = registrations
            .wait_for(|all| all.get(&many).is_some_and(|status| status.disagreement.is_some()));
        assert!(
            soon("the disagreement", reported).await.unwrap()[&many]
                .disagreement
                .as_ref()
                .unwrap()
                .contains("lacks 40000")
        );
        let mut command = stage.node.command(&["status", "-o", "json"]);
        let asked = tokio::task::spawn_blocking(move || command.output().unwrap());
        let asked = asked.await.unwrap().stdout;
        let status: serde_json::Value = serde_json::from_slice(&asked).unwrap();
        let mut rows = status["resources"].as_array().unwrap().iter();
        let row = rows.find(|row| row["name"] == "example.com/many").unwrap();
        assert_eq!((&row["registered"], &row["allocatable"]), (&false.into(), &0.into()), "{row}");
        assert_eq!(
            row["problem"],
            "the list of 40000 devices is longer than the kubelet accepts in one message, and is \
             not sent"
        );
        stage
            .wait(|view| {
                view.endpoint_state(&many).is_streaming
                    && view.endpoint_state(&many).is_tracked
                    && !view.endpoint_state(&many).is_stopped
            })
            .await;
        stage.kubelet.view(|view| {
            assert_eq!(view.lists(&many), 0);
            let ended = |kind: &EventKind| {
                matches!(kind, EventKind::StreamEnded { .. }) && kind.resource() == Some(&many)
            };
            assert!(view.last(ended).is_none(), "its stream was to stay");
        });
        // Its devices can still be allocated: a kubelet that knows them already continues.
        let mut plugin = dial(&stage.kubelet, &stage.node, &many).await;
        allocate(&mut plugin, &[&format!("dev:{stem}0::7")]).await.unwrap();
        app.shut_down().await;
    });
}
