//! One actor's death is not the daemon's (I10): pods are admitted, streams stay open, nothing is
//! lost or given twice.

use crate::common::{
    HANG, Node, allocate, count, dial, hide_expected_panics, ids, name, offered, percentiles, run,
    soon,
};
use futures_util::future::{join, join_all};
use holdfast::app::App;
use holdfast::domain::{AllocId, DeviceId, GrantState};
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, PodPhase, PodSpec};
use holdfast::messages::CallError;
use holdfast::telemetry::metrics;
use holdfast::telemetry::table::Metric;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

const DEVICES: usize = 48;
/// Pods that hold devices at one time: always enough to reveal a double grant.
const PODS_ALIVE: usize = 20;
/// The least number of pods, so that devices are reused.
const PODS_MIN: usize = 80;
/// The supervisor escalates at the tenth death within a minute.
const DEATHS: usize = 9;

/// Lets each actor die as often as the supervisor allows: once one after the other, then in
/// parallel.
async fn kill_all(app: &App, took: &RefCell<Vec<Duration>>) {
    let actors = &app.actors;
    let kill = async |number: usize| {
        let began = Instant::now();
        let died = match number {
            0 => actors.discovery.crash().await,
            1 => actors.health.crash().await,
            2 => actors.ledger.crash().await,
            3 => actors.serving.crash().await,
            _ => actors.registration.crash().await,
        };
        died.unwrap();
        began.elapsed()
    };
    // Only the first death of an actor is followed by a rebuild without a wait.
    for number in 0..5 {
        let elapsed = kill(number).await;
        took.borrow_mut().push(elapsed);
    }
    let kill_often = async |number: usize| {
        for _ in 1..DEATHS {
            kill(number).await;
        }
    };
    join_all((0..5).map(kill_often)).await;
}

/// Every container of the pod: its alloc-id, and the ids that the kubelet has recorded.
fn containers(kubelet: &Kubelet, uid: &str) -> Vec<(AllocId, BTreeSet<DeviceId>)> {
    let pod = kubelet.view(|view| view.pod(uid).cloned()).unwrap();
    let edits = pod.containers.into_iter().map(|(name, container)| (name, container.edits));
    let held = |container: &str| kubelet.devices(uid, container).into_values().flatten().collect();
    edits
        .map(|(container, edits)| {
            (AllocId::new(edits.annotations[AllocId::ANNOTATION].clone()), held(&container))
        })
        .collect()
}

/// Admits pods until `done`, each with an init container that leaves its devices to the next one;
/// every pod must run.
async fn admit(kubelet: &Kubelet, done: &Cell<bool>) -> BTreeMap<AllocId, BTreeSet<DeviceId>> {
    let gpu = name("example.com/gpu");
    let mut granted = BTreeMap::new();
    let mut alive: VecDeque<(String, BTreeSet<DeviceId>)> = VecDeque::new();
    let mut number = 0;
    while !done.get() || number < PODS_MIN {
        let pod = PodSpec::new("default", format!("pod-{number}"))
            .init("prepare", &gpu, 2)
            .app("main", &gpu, 2);
        let outcome = soon("an admission", kubelet.add_pod(pod)).await;
        assert_eq!(outcome.phase, PodPhase::Running, "pod {number}");
        let containers = containers(kubelet, &outcome.uid);
        let held: BTreeSet<DeviceId> = containers.iter().flat_map(|(_, ids)| ids.clone()).collect();
        assert!(
            alive.iter().all(|(_, others)| others.is_disjoint(&held)),
            "pod {number} shares {held:?}"
        );
        assert_eq!(containers.len(), 2);
        granted.extend(containers);
        alive.push_back((outcome.uid, held));
        if alive.len() > PODS_ALIVE {
            let (oldest, _) = alive.pop_front().unwrap();
            assert!(kubelet.delete_pod(&oldest).unwrap());
        }
        number += 1;
    }
    granted
}

#[test]
fn actors_that_die_repeatedly_fail_no_admission_under_load() {
    hide_expected_panics();
    run(async {
        let node = Node::with(&[("gpu", DEVICES), ("nic", 4)]);
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        for (resource, devices) in [("example.com/gpu", DEVICES), ("example.com/nic", 4)] {
            offered(&kubelet, &name(resource), devices).await;
        }

        let (done, took) = (Cell::new(false), RefCell::default());
        let kill = async {
            kill_all(&app, &took).await;
            done.set(true);
        };
        let (granted, ()) =
            soon("admissions under deaths", join(admit(&kubelet, &done), kill)).await;

        let ended = count(&kubelet, |kind| {
            matches!(kind, EventKind::StreamEnded { .. } | EventKind::Disconnected { .. })
        });
        assert_eq!(ended, 0, "a stream of the kubelet ended");
        assert_eq!(kubelet.panicked(), None);
        let ledger: BTreeMap<_, _> =
            node.grants().into_iter().map(|grant| (grant.alloc_id.clone(), ids(&grant))).collect();
        for (alloc_id, held) in &granted {
            assert_eq!(ledger.get(alloc_id), Some(held), "{alloc_id}");
        }
        println!(
            "{} deaths of 5 actors while {} containers were given devices; from a death to the next life: {}",
            5 * DEATHS,
            granted.len(),
            percentiles(took.into_inner())
        );

        for actor in ["discovery", "health", "ledger", "registration", "serving"] {
            assert!(metrics::counted(Metric::ActorRestarts, &[actor]) >= DEATHS as u64, "{actor}");
        }

        // The rebuilt actors have the whole state: the list is complete, new devices are found,
        // grants find their pods.
        node.create_device("gpu", DEVICES);
        offered(&kubelet, &name("example.com/gpu"), DEVICES + 1).await;
        let mut grants = app.views.grants.clone();
        let pods: BTreeSet<String> = kubelet.pods().into_iter().map(|pod| pod.spec.uid).collect();
        let bound = soon("every grant finds its pod", async {
            let all_bound = |uid: &String, grants: &Vec<_>| {
                let of_pod = |grant: &&std::sync::Arc<holdfast::domain::Grant>| matches!(&grant.state, GrantState::Bound { pod, .. } if pod.uid == *uid);
                grants.iter().filter(of_pod).count() == 2
            };
            drop(
                grants
                    .wait_for(|grants| pods.iter().all(|uid| all_bound(uid, grants)))
                    .await
                    .unwrap(),
            );
        });
        bound.await;
        app.shut_down().await;
    });
}

#[test]
fn an_actor_that_keeps_dying_ends_the_daemon() {
    hide_expected_panics();
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let mut app = node.start_app().await;
        offered(&kubelet, &name("example.com/gpu"), 2).await;
        let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
        let before = allocate(&mut api, &["dev:gpu0"]).await.unwrap();

        let mut deaths = 1;
        while app.actors.ledger.crash().await.is_ok() {
            deaths += 1;
            assert!(deaths <= DEATHS + 1, "it was never given up");
        }
        assert_eq!(deaths, DEATHS + 1);
        assert_eq!(app.actors.ledger.crash().await, Err(CallError::GivenUp("ledger")));
        assert_eq!(soon("the escalation", app.escalated()).await, "ledger");

        // Until the process ends, no grant is given without a record.
        let refused = allocate(&mut api, &["dev:gpu1"]).await.unwrap_err();
        assert!(refused.message().contains("died too often"), "{refused}");
        assert_eq!(
            node.grants().into_iter().map(|grant| grant.alloc_id).collect::<Vec<_>>(),
            [before]
        );
        tokio::time::timeout(HANG, app.shut_down()).await.unwrap();
    });
}
