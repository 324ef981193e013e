//! The daemon's answers: Allocate's errors, the lists that follow, and the replies to operators and
//! monitoring.

use crate::common::{
    HANG, Node, Unpolled, allocate, count, dial, files_below, ids, name, offered, resource, run,
    soon, until,
};
use holdfast::domain::{Durability, Entry, Grant, GrantState, ResourceName};
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, PodPhase, PodSpec};
use holdfast::store::{self, Store};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::Instant;
use tonic::Code;

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

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

async fn admit(kubelet: &Kubelet, pod: PodSpec) -> String {
    let outcome = soon("an admission", kubelet.add_pod(pod)).await;
    assert_eq!(outcome.phase, PodPhase::Running);
    outcome.uid
}

#[test]
fn an_allocate_that_cannot_be_granted_names_the_id_and_writes_nothing() {
    run(async {
        let node = Node::with(&[("gpu", 3)]);
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 3).await;
        node.remove_device("gpu", 2);
        listed(&kubelet, &gpu(), (2, 1)).await;

        let mut api = dial(&kubelet, &node, &gpu()).await;
        let held = allocate(&mut api, &["dev:gpu0"]).await.unwrap();
        for (request, code, parts) in [
            (vec!["dev:gpu1", "dev:ghost"], Code::NotFound, vec!["`dev:ghost`", "example.com/gpu"]),
            (
                vec!["dev:gpu1", "dev:gpu1"],
                Code::InvalidArgument,
                vec!["`dev:gpu1`", "example.com/gpu"],
            ),
            (
                vec!["dev:gpu1", "dev:gpu2"],
                Code::FailedPrecondition,
                vec!["`dev:gpu2`", "example.com/gpu"],
            ),
            (vec![], Code::InvalidArgument, vec!["example.com/gpu"]),
        ] {
            let error = allocate(&mut api, &request).await.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            for part in parts {
                assert!(error.message().contains(part), "`{part}` is not in: {}", error.message());
            }
        }
        let grants: Vec<_> = node.grants().into_iter().map(|grant| grant.alloc_id).collect();
        assert_eq!(grants, [held]);
    });
}

#[test]
fn every_container_of_a_pool_gets_all_its_devices() {
    run(async {
        let node = Node::with(&[("gpu", 3)]);
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}pool = 2\n", resource("gpu")));
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 2).await;
        let pods =
            ["first", "second"].map(|pod| PodSpec::new("default", pod).app("main", &gpu(), 1));
        let mut uids = Vec::new();
        for pod in pods {
            uids.push(admit(&kubelet, pod).await);
        }
        let nodes = |uid: &String| {
            let main = kubelet.view(|view| view.pod(uid).unwrap().containers["main"].clone());
            main.edits.devices.iter().map(|node| node.host.clone()).collect::<Vec<_>>()
        };
        for uid in &uids {
            assert_eq!(nodes(uid), ["/dev/gpu0", "/dev/gpu1", "/dev/gpu2"]);
        }
        let held: BTreeSet<_> =
            node.grants().iter().flat_map(ids).map(|id| id.to_string()).collect();
        assert_eq!(held.into_iter().collect::<Vec<_>>(), ["0", "1"]);

        // Held ids stay in the next process's list, also when the pool is absent.
        for index in 0..3 {
            node.remove_device("gpu", index);
        }
        listed(&kubelet, &gpu(), (0, 2)).await;
        let is_list =
            |kind: &EventKind| matches!(kind, EventKind::Listed { healthy: 0, unhealthy: 2, .. });
        let lists = count(&kubelet, is_list);
        daemon.kill();
        let _next = node.start_daemon();
        kubelet
            .wait_for(
                |view| view.events().iter().filter(|event| is_list(&event.kind)).count() > lists,
                HANG,
            )
            .await
            .unwrap();
        // One of the devices is enough for all shares.
        node.create_device("gpu", 1);
        listed(&kubelet, &gpu(), (2, 0)).await;
    });
}

#[test]
fn cdi_specs_are_written_before_the_answer_and_again_after_a_reboot() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let directory = node.path("run/cdi");
        let config = |directory: &std::path::Path| {
            let cdi = format!(
                "cdi = [\"cri\", \"annotations\"]\n[cdi]\ndirectory = \"{}\"\n",
                directory.display()
            );
            node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}{cdi}", resource("gpu")));
        };
        config(&directory);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 2).await;
        let uid = admit(&kubelet, PodSpec::new("default", "holder").app("main", &gpu(), 2)).await;
        let edits = kubelet.view(|view| view.pod(&uid).unwrap().containers["main"].edits.clone());
        assert_eq!(
            (edits.devices.len(), &*edits.cdi_devices),
            (
                0,
                ["holdfast.dev/char=dev:gpu0", "holdfast.dev/char=dev:gpu1"]
                    .map(String::from)
                    .as_slice()
            )
        );
        assert!(
            edits.annotations.values().any(|names| *names == edits.cdi_devices.join(",")),
            "{edits:?}"
        );
        let nodes = || {
            let read = |(path, bytes): (std::path::PathBuf, Vec<u8>)| {
                assert!(
                    path.file_name().unwrap().to_str().unwrap().starts_with("holdfast-"),
                    "{}",
                    path.display()
                );
                let spec: Value = serde_json::from_slice(&bytes).unwrap();
                spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"]
                    .as_str()
                    .unwrap()
                    .to_owned()
            };
            files_below(&directory).into_iter().map(read).collect::<BTreeSet<_>>()
        };
        let both = BTreeSet::from(["/dev/gpu0", "/dev/gpu1"].map(str::to_owned));
        assert_eq!(nodes(), both);

        daemon.kill();
        std::fs::remove_dir_all(&directory).unwrap();
        let mut daemon = node.start_daemon();
        daemon.logged("registered with the kubelet").await;
        assert_eq!(nodes(), both);

        // Without its files on disk, a container must not get names that its runtime cannot
        // resolve.
        daemon.kill();
        std::fs::write(node.path("run/file"), "").unwrap();
        config(&node.path("run/file/cdi"));
        let daemon = node.start_daemon();
        daemon.logged("registered with the kubelet").await;
        let mut api = dial(&kubelet, &node, &gpu()).await;
        let error = allocate(&mut api, &["dev:gpu0"]).await.unwrap_err();
        assert!(
            error.code() == Code::Unavailable
                && error.message().contains("but it cannot be written"),
            "{error}"
        );
    });
}

#[test]
fn a_request_for_more_shares_than_allowed_is_refused_with_the_reason() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n{}replicas = 2\nper_container = \"distinct\"\n",
            resource("gpu")
        ));
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 4).await;
        let mut api = dial(&kubelet, &node, &gpu()).await;
        let error = allocate(&mut api, &["dev:gpu0::0", "dev:gpu0::1"]).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(
            error
                .message()
                .contains("`dev:gpu0::0` and `dev:gpu0::1` are shares of the same device"),
            "{error}"
        );
        // The kubelet is led to different devices, as long as there are any.
        let uid = admit(&kubelet, PodSpec::new("default", "both").app("main", &gpu(), 2)).await;
        let devices =
            kubelet.view(|view| view.pod(&uid).unwrap().containers["main"].edits.devices.len());
        assert_eq!(devices, 2);
    });
}

#[test]
fn a_device_that_vanishes_before_its_allocate_is_refused_and_unhealthy_at_once() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        // Behind a link into an unwatched folder: the Allocate is the first to find the loss.
        std::fs::create_dir(node.path("host/dev/hidden")).unwrap();
        std::fs::write(node.path("host/dev/hidden/node"), "").unwrap();
        symlink("hidden/node", node.path("host/dev/gpu9")).unwrap();
        let kubelet = node.start_kubelet().await;
        // A new directory triggers a scan, which would find the loss too.
        std::fs::create_dir(node.sockets()).unwrap();
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 3).await;
        let mut api = dial(&kubelet, &node, &gpu()).await;
        let (unpolled, began) = (Unpolled::begin().await, Instant::now());
        std::fs::remove_file(node.path("host/dev/hidden/node")).unwrap();
        let error = allocate(&mut api, &["gpu9"]).await.unwrap_err();
        assert!(
            error.code() == Code::FailedPrecondition && error.message().contains("`gpu9`"),
            "{error}"
        );
        listed(&kubelet, &gpu(), (2, 1)).await;
        unpolled.end("the list");
        println!(
            "from the Allocate to the list that has the device unhealthy: {:?}",
            began.elapsed()
        );
        assert!(node.grants().is_empty());

        // The same for a pod: it is rejected, and the next pod gets the remaining devices.
        admit(&kubelet, PodSpec::new("default", "next").app("main", &gpu(), 2)).await;
    });
}

#[test]
fn a_held_device_that_disappears_stays_in_the_list_unhealthy_until_it_is_back() {
    run(async {
        let node = Node::with(&[("gpu", 3)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 3).await;
        let uid = admit(&kubelet, PodSpec::new("default", "holder").app("main", &gpu(), 3)).await;
        for index in 0..3 {
            node.remove_device("gpu", index);
        }
        listed(&kubelet, &gpu(), (0, 3)).await;

        // A new process has only the ledger's record of them.
        let is_list = |kind: &EventKind| matches!(kind, EventKind::Listed { .. });
        let lists = count(&kubelet, is_list);
        daemon.kill();
        let daemon = node.start_daemon();
        kubelet
            .wait_for(
                |view| view.events().iter().filter(|event| is_list(&event.kind)).count() > lists,
                HANG,
            )
            .await
            .unwrap();
        listed(&kubelet, &gpu(), (0, 3)).await;
        assert_eq!(kubelet.capacity(&gpu()).capacity, 3);
        assert_eq!(kubelet.devices(&uid, "main")[&gpu()].len(), 3);

        (0..3).for_each(|index| node.create_device("gpu", index));
        listed(&kubelet, &gpu(), (3, 0)).await;
        let shorter = |kind: &EventKind| matches!(kind, EventKind::Listed { healthy, unhealthy, .. } if healthy + unhealthy != 3);
        assert_eq!(count(&kubelet, shorter), 0, "a held device was not in a list");
        assert_eq!(kubelet.panicked(), None);
        drop(daemon);
    });
}

/// No container holds it, but the kubelet may be about to give it out: no list of this process
/// lacks ids of the last list.
#[test]
fn a_free_device_that_is_lost_while_no_daemon_runs_is_in_the_next_ones_list() {
    run(async {
        let node = Node::with(&[("gpu", 3)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 3).await;
        let remembered = || {
            store::peek(&node.state())
                .ok()
                .and_then(|seen| seen.listed.get(&gpu()).map(|list| list.len()))
        };
        until("the list on disk", remembered, |listed| *listed == Some(3)).await;
        daemon.kill();
        node.remove_device("gpu", 1);
        let _daemon = node.start_daemon();
        listed(&kubelet, &gpu(), (2, 1)).await;
        let shorter = |kind: &EventKind| matches!(kind, EventKind::Listed { healthy, unhealthy, .. } if healthy + unhealthy != 3);
        assert_eq!(count(&kubelet, shorter), 0, "a list lacked it");
        assert_eq!(kubelet.panicked(), None);
    });
}

/// Rows of a document of grants, sorted by creation, with the fields of schema 1; later schemas
/// have these too.
fn rows(document: &Value) -> Vec<Value> {
    assert!([1, 2].map(Value::from).contains(&document["schema"]));
    let mut rows = document["grants"].as_array().unwrap().clone();
    rows.sort_by_key(|row| row["alloc_id"].to_string());
    for row in rows.iter_mut().filter_map(Value::as_object_mut) {
        row.retain(|key, _| SCHEMA_1.contains(&key.as_str()));
        assert_eq!(row.len(), SCHEMA_1.len(), "{row:?}");
    }
    rows
}

const SCHEMA_1: [&str; 10] = [
    "alloc_id",
    "resource",
    "devices",
    "state",
    "pod",
    "container",
    "granted_at",
    "bound_at",
    "released_at",
    "released_by",
];

/// Both copies are lost, including the releases: the kubelet's records come back with alloc-id and
/// pod, and the ones of deleted pods are released again.
#[test]
fn a_removed_pod_that_only_the_kubelets_checkpoint_has_is_released_without_another_allocate() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 4).await;
        let uid = admit(&kubelet, PodSpec::new("ops", "probe").app("main", &gpu(), 1)).await;
        daemon.logged_often(" pod=\"", 1).await;
        // As after a drain, before Holdfast replaces another plugin: its ledger is empty.
        daemon.kill();
        std::fs::remove_dir_all(node.state()).unwrap();
        assert!(kubelet.delete_pod(&uid).unwrap());
        // The kubelet removes this directory some time after the pod.
        std::fs::create_dir_all(node.path(&format!("host/var/log/pods/ops_probe_{uid}"))).unwrap();
        let daemon = node.start_daemon();
        daemon.logged("the ledger lacked grants that the kubelet's checkpoint has").await;
        until("the release", || node.grants(), Vec::is_empty).await;
        assert_eq!(node.json(&["history"])["grants"][0]["released_by"], "pod_gone");
        // A list that has not changed makes the kubelet write its checkpoint.
        let clients: Vec<u64> = kubelet.view(|view| {
            let events = view.events().iter();
            let client = |kind: &EventKind| match kind {
                EventKind::Listed { client, .. } => Some(*client),
                _ => None,
            };
            events.filter_map(|event| client(&event.kind)).collect()
        });
        let distinct = BTreeSet::from_iter(&clients).len();
        assert!(distinct < clients.len(), "one list for each stream: {clients:?}");
    });
}

#[test]
fn a_ledger_that_lost_both_copies_is_rebuilt_from_the_kubelets_checkpoint() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 4).await;
        admit(
            &kubelet,
            PodSpec::new("shop", "web-0").init("prepare", &gpu(), 1).app("main", &gpu(), 2),
        )
        .await;
        admit(&kubelet, PodSpec::new("ops", "probe").app("main", &gpu(), 1)).await;
        daemon.logged_often(" pod=\"", 3).await;
        let key = |row: &Value| {
            ["alloc_id", "resource", "devices", "pod", "container"].map(|field| row[field].clone())
        };
        let before: Vec<_> = rows(&node.json(&["who"])).iter().map(key).collect();
        daemon.kill();

        std::fs::remove_dir_all(node.state()).unwrap();
        let mut daemon = node.start_daemon();
        daemon.logged("the ledger lacked grants that the kubelet's checkpoint has").await;
        // The names come with the first scan of the pods' logs.
        daemon.logged_often(" pod=\"", 3).await;
        let after: Vec<_> = rows(&node.json(&["who"])).iter().map(key).collect();
        assert_eq!(after, before);

        // Again, next to an unreadable journal: the loss is reported, and nothing is counted twice.
        daemon.kill();
        for (path, mut bytes) in files_below(&node.state()) {
            bytes.iter_mut().skip(3).for_each(|byte| *byte ^= 0x5a);
            std::fs::write(path, bytes).unwrap();
        }
        let daemon = node.start_daemon();
        daemon.logged("the ledger lacked grants that the kubelet's checkpoint has").await;
        daemon.logged_often(" pod=\"", 3).await;
        let after: Vec<_> = rows(&node.json(&["who"])).iter().map(key).collect();
        assert_eq!(after, before);
        let recovery = node.json(&["status"])["recovery"].as_str().unwrap().to_owned();
        assert!(
            recovery.contains("3 grants from the kubelet's checkpoint")
                && recovery.contains("moved to"),
            "{recovery}"
        );
    });
}

/// A sound ledger is older than the kubelet's checkpoint: its directory was restored from a copy,
/// or the power was cut under `process-crash`. Missing grants come back, and released ones do not.
#[test]
fn an_intact_but_older_ledger_takes_missing_grants_from_the_kubelets_checkpoint() {
    run(async {
        let node = Node::with(&[("gpu", 4), ("nic", 1)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 4).await;
        offered(&kubelet, &name("example.com/nic"), 1).await;
        admit(&kubelet, PodSpec::new("shop", "web-0").app("main", &gpu(), 1)).await;
        daemon.logged(" pod=\"").await;
        daemon.kill();
        let copy = files_below(&node.state());

        let mut daemon = node.start_daemon();
        daemon.logged("INFO ready").await;
        offered(&kubelet, &gpu(), 4).await;
        offered(&kubelet, &name("example.com/nic"), 1).await;
        admit(&kubelet, PodSpec::new("shop", "web-1").app("main", &gpu(), 2)).await;
        admit(&kubelet, PodSpec::new("ops", "gone").app("main", &gpu(), 1)).await;
        admit(&kubelet, PodSpec::new("ops", "other").app("main", &name("example.com/nic"), 1))
            .await;
        daemon.logged_often(" pod=\"", 3).await;
        let before = node.grants();
        daemon.kill();

        std::fs::remove_dir_all(node.state()).unwrap();
        for (path, bytes) in copy {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        let of = |pod: &str| {
            before
                .iter()
                .find(|grant| grant.pod().unwrap().name.as_deref() == Some(pod))
                .unwrap()
                .clone()
        };
        let state = GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: of("gone").granted_at,
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        };
        let gone = Grant { state, ..of("gone") };
        let (mut store, _) = Store::open(&node.state(), Durability::PowerLoss, None).unwrap();
        store.append(&[Entry::Grant(Arc::new(gone))]).unwrap();
        store.close().unwrap();
        // By now the resource belongs to another plugin.
        node.write_config(&resource("gpu"));

        let daemon = node.start_daemon();
        let back = daemon.logged("they are back").await;
        assert!(back.contains("grants=1"), "{back}");
        let bound = || {
            node.grants()
                .into_iter()
                .filter(|grant| grant.pod().is_some_and(|pod| pod.name.is_some()))
                .count()
        };
        until("the pods' names", bound, |bound| *bound == 2).await;
        let held: Vec<_> = node
            .grants()
            .iter()
            .map(|grant| (grant.alloc_id.clone(), ids(grant), grant.pod().cloned()))
            .collect();
        let [web_0, web_1] = ["web-0", "web-1"]
            .map(of)
            .map(|grant| (grant.alloc_id.clone(), ids(&grant), grant.pod().cloned()));
        assert_eq!(held, [web_0, web_1]);
        drop(daemon);
    });
}

/// A node that moves from another plugin to Holdfast while pods run: the first list has the devices
/// that the checkpoint records for them, including devices that the host does not show, and `who`
/// names the pods.
#[test]
fn devices_granted_by_another_plugin_are_in_the_first_list_with_their_holders() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 4).await;
        admit(
            &kubelet,
            PodSpec::new("shop", "web-0").init("prepare", &gpu(), 1).app("main", &gpu(), 2),
        )
        .await;
        let probe = admit(&kubelet, PodSpec::new("ops", "probe").app("main", &gpu(), 1)).await;
        daemon.logged_often(" pod=\"", 3).await;
        let held = kubelet.devices(&probe, "main").remove(&gpu()).unwrap();
        let id = held.first().unwrap().as_str().to_owned();
        kubelet.stop();
        daemon.kill();

        // Another plugin's answers have no data of ours, and Holdfast never ran here.
        let checkpoint = node.path("kubelet/device-plugins/kubelet_internal_checkpoint");
        let mut kept: Value = serde_json::from_slice(&std::fs::read(&checkpoint).unwrap()).unwrap();
        for entry in kept["Data"]["PodDeviceEntries"].as_array_mut().unwrap() {
            entry["AllocResp"] = json!("");
        }
        std::fs::write(&checkpoint, kept.to_string()).unwrap();
        std::fs::remove_dir_all(node.state()).unwrap();
        node.remove_device("gpu", id.strip_prefix("dev:gpu").unwrap().parse().unwrap());

        let lists = count(&kubelet, |kind| matches!(kind, EventKind::Listed { .. }));
        kubelet.start_again().await.unwrap();
        let daemon = node.start_daemon();
        let first = |view: &holdfast::lab::sim::kubelet::View<'_>| {
            let mut of_gpus =
                view.events().iter().filter(|event| event.kind.resource() == Some(&gpu()));
            let mut listed = of_gpus.by_ref().filter_map(|event| match &event.kind {
                EventKind::Listed { healthy, unhealthy, .. } => Some((*healthy, *unhealthy)),
                _ => None,
            });
            listed.nth(lists)
        };
        assert_eq!(
            kubelet.wait_for_some(first, HANG).await.unwrap(),
            (3, 1),
            "the held device is removed from the host, and listed"
        );

        let names = || -> BTreeSet<String> {
            let who = rows(&node.json(&["who"]));
            who.iter()
                .map(|row| {
                    format!(
                        "{}/{} {} {}",
                        row["pod"]["namespace"],
                        row["pod"]["name"],
                        row["container"],
                        row["devices"]
                    )
                })
                .collect()
        };
        let named = |names: &BTreeSet<String>| names.iter().all(|name| !name.contains("null/"));
        until("the pods' names", names, |names| names.len() == 3 && named(names)).await;
        let of_probe = names().into_iter().find(|name| name.contains("probe")).unwrap();
        assert_eq!(of_probe, format!("\"ops\"/\"probe\" \"main\" [\"{id}\"]"));

        // Again: nothing is taken over twice.
        drop(daemon);
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 3).await;
        assert_eq!(names().len(), 3);
    });
}

/// Checks the document of `status` for two GPUs and one interface in use.
fn check_status(status: &Value) {
    assert_eq!((&status["schema"], &status["ready"]), (&json!(1), &json!(true)));
    assert!(status["recovery"].is_null());
    assert!(
        status["kubelet"]["inode"].is_u64()
            && status["version"].is_string()
            && status["uptime_seconds"].is_u64()
    );
    for (row, (resource, devices, held)) in status["resources"]
        .as_array()
        .unwrap()
        .iter()
        .zip([("example.com/gpu", 4, 2), ("example.com/nic", 2, 1)])
    {
        let mut row = row.clone();
        assert!(row["last_registration_ms"].take().is_f64(), "{row}");
        let wanted = json!({
            "name": resource, "registered": true, "devices": devices, "healthy": devices, "allocatable": devices, "held": held, "problem": null,
            "disagreement": null, "last_registration_ms": null, "api_version": "v1beta1"
        });
        assert_eq!(row, wanted);
    }
}

#[test]
fn who_status_and_export_agree_with_and_without_the_daemon() {
    run(async {
        let node = Node::with(&[("gpu", 4), ("nic", 2)]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        let nic = name("example.com/nic");
        offered(&kubelet, &gpu(), 4).await;
        offered(&kubelet, &nic, 2).await;
        let web = admit(
            &kubelet,
            PodSpec::new("shop", "web-0").init("prepare", &gpu(), 1).app("main", &gpu(), 2),
        )
        .await;
        let probe = admit(&kubelet, PodSpec::new("ops", "probe").app("main", &nic, 1)).await;
        daemon.logged_often(" pod=\"", 3).await;

        let who = rows(&node.json(&["who"]));
        assert_eq!(who.len(), 3);
        for (row, (namespace, pod, uid, container, resource)) in who.iter().zip([
            ("shop", "web-0", &web, "prepare", "example.com/gpu"),
            ("shop", "web-0", &web, "main", "example.com/gpu"),
            ("ops", "probe", &probe, "main", "example.com/nic"),
        ]) {
            assert_eq!(row["pod"], json!({ "namespace": namespace, "name": pod, "uid": uid }));
            assert_eq!(
                (&row["container"], &row["resource"], &row["state"]),
                (&json!(container), &json!(resource), &json!("bound"))
            );
            let held = kubelet
                .devices(uid, container)
                .into_values()
                .flatten()
                .map(|id| id.to_string())
                .collect::<BTreeSet<_>>();
            let told = row["devices"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_str().unwrap().to_owned())
                .collect::<BTreeSet<_>>();
            assert_eq!(told, held);
            assert!(
                row["bound_at"].is_string()
                    && row["released_at"].is_null()
                    && row["released_by"].is_null()
            );
        }
        assert_eq!(rows(&node.json(&["ledger", "export"])), who);
        let table = String::from_utf8(node.output(&["who"]).stdout).unwrap();
        assert!(table.lines().count() == 4 && table.contains("web-0"), "{table}");

        check_status(&node.json(&["status"]));

        daemon.kill();
        assert_eq!(rows(&node.json(&["ledger", "export"])), who);
        let output = node.output(&["who", "-o", "json"]);
        assert_eq!(rows(&serde_json::from_slice(&output.stdout).unwrap()), who);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.contains("no holdfast daemon answers") && said.contains("journal"),
            "the source of the answer is printed: {said}"
        );
        assert_eq!(node.output(&["status"]).status.code(), Some(1));
    });
}
