//! The exclusive processors of a container, in addition to its devices.

use crate::common::{Node, soon};
use crate::edges::lister::{Answer, Lister};
use crate::edges::stage::{GPUS, Stage, granted, is_bound_to};
use holdfast::kubelet::proto::podresources_v1 as api;
use holdfast::lab::sim::kubelet::Profile;
use std::fs;

/// An old kubelet lists its pods. A newer one is asked for the holders' pods one by one, because
/// List may free the devices of other Allocates in flight.
#[test]
fn who_shows_the_exclusive_processors_of_containers() {
    for has_get in [false, true] {
        let answer = if has_get { Answer::Single } else { Answer::Pods };
        crate::common::run(who_shows_processors(answer, has_get));
    }
}

async fn who_shows_processors(answer: fn(Vec<api::PodResources>) -> Answer, has_get: bool) {
    let node = Node::with(&[("gpu", GPUS)]);
    for (number, list) in [(0, "0-3"), (1, "4-7")] {
        let folder = node.path(&format!("host/sys/devices/system/node/node{number}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cpulist"), format!("{list}\n")).unwrap();
    }
    let container = |cpu_ids: &[i64]| api::ContainerResources {
        name: "main".to_owned(),
        devices: Vec::new(),
        cpu_ids: cpu_ids.to_vec(),
        memory: Vec::new(),
    };
    let pod = |name: &str, cpus: &[i64]| api::PodResources {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        containers: vec![container(cpus)],
    };
    let pods = vec![pod("pinned", &[5, 4, 7]), pod("floating", &[])];
    let lister = Lister::start(&node, answer(pods));
    let stage = Stage::on(node, Profile::K125, |_| {}).await;
    let app = stage.start_app().await;
    for name in ["pinned", "floating"] {
        let uid = stage.admit_one(name, 1).await.spec.uid;
        granted(&app, "the pod's name", |grants| {
            grants.iter().any(|grant| {
                is_bound_to(grant, &uid) && grant.pod().is_some_and(|pod| pod.name.is_some())
            })
        })
        .await;
    }
    // The daemon and the kubelet are on this thread.
    let (json, text) = (stage.node.command(&["who", "-o", "json"]), stage.node.command(&["who"]));
    let run = |mut verb: std::process::Command| {
        soon("who", tokio::task::spawn_blocking(move || verb.output().unwrap().stdout))
    };
    let json: serde_json::Value = serde_json::from_slice(&run(json).await.unwrap()).unwrap();
    let of = |name: &str| {
        let row = json["grants"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["pod"]["name"] == name)
            .unwrap();
        (row["cpus"].to_string(), row["cpu_numa_nodes"].to_string())
    };
    assert_eq!(of("pinned"), ("\"4-5,7\"".to_owned(), "[1]".to_owned()));
    assert_eq!(of("floating"), ("null".to_owned(), "null".to_owned()));
    let text = String::from_utf8(run(text).await.unwrap()).unwrap();
    assert!(text.contains("4-5,7 (NUMA 1)"), "{text}");
    assert_eq!(lister.requests() == 0, has_get, "{} listings", lister.requests());
    app.shut_down().await;
}
