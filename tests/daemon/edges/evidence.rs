//! Evidence that the ledger gets or misses: rejected pods, empty or refused listings, lost
//! checkpoints, repeated names. The release itself takes more than a minute of a kubelet's life;
//! `src/ledger/core/tests.rs` tests it with time as an argument.

use crate::common::{Node, soon};
use crate::edges::lister::{Answer, Lister};
use crate::edges::stage::{GPUS, Stage, alloc_id, gpu, granted, is_bound_to, on_every_profile};
use holdfast::app::App;
use holdfast::domain::GrantState;
use holdfast::kubelet::proto::podresources_v1 as api;
use holdfast::lab::sim::kubelet::{EventKind, Pod, PodPhase, PodSpec, Profile};
use holdfast::ledger::core::ABSENCE_MIN;
use holdfast::messages::Reconcile;
use std::fs;
use std::time::Instant;

async fn bound(app: &App, pod: &Pod) {
    granted(app, "the grant is bound", |grants| {
        grants.iter().any(|grant| is_bound_to(grant, &pod.spec.uid))
    })
    .await;
}

/// A later handler of the admission may reject a pod that has its devices. The kubelet keeps the
/// grant and notifies no plugin. The grant waits for proof, and blocks nothing.
#[test]
fn edge_16_a_pod_rejected_after_its_allocate_blocks_no_pod_and_is_recorded() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let rejected = PodSpec::new("default", "too-large").app("main", &gpu(), 2).without_cpu();
        let outcome = soon("the rejection", stage.kubelet.add_pod(rejected)).await;
        assert!(matches!(outcome.phase, PodPhase::Failed { .. }), "{outcome:?}");
        let all = stage.admit_one("next", u32::try_from(GPUS).unwrap()).await;
        bound(&app, &all).await;
        assert_eq!(stage.node.grants().len(), 2, "no proof, no release");
        app.shut_down().await;
    });
}

/// A kubelet without its checkpoint treats every device as free while their containers run. The
/// ledger frees nothing.
#[test]
fn edge_19_a_lost_checkpoint_frees_nothing_in_the_ledger() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let running = stage.admit_one("running", u32::try_from(GPUS).unwrap()).await;
        bound(&app, &running).await;
        let checkpoint = stage.node.path("kubelet/device-plugins/kubelet_internal_checkpoint");
        for is_corrupt in [true, false] {
            stage.kubelet.stop();
            if is_corrupt {
                fs::write(&checkpoint, "{\"Data\":").unwrap();
            } else {
                fs::remove_file(&checkpoint).unwrap();
            }
            stage.kubelet.start_again().await.unwrap();
            stage.settled_after(0).await;
            stage.wait(|view| view.is_settled()).await;
            assert!(
                stage.kubelet.devices(&running.spec.uid, "main").is_empty(),
                "the kubelet was to forget them"
            );
            let other = stage.admit_one("other", 1).await;
            bound(&app, &other).await;
            assert!(stage.node.grants().iter().any(|grant| is_bound_to(grant, &running.spec.uid)));
        }
        stage.saw_event(|kind| matches!(kind, EventKind::CheckpointUnreadable { .. })).await;
        app.shut_down().await;
    });
}

/// A kubelet that has just started lists no pods, or only some. From a kubelet that has not
/// settled, a missing pod is no proof, even if it is missing often and other evidence suggests
/// its end.
#[test]
fn edge_23_the_empty_listings_of_a_young_kubelet_release_nothing() {
    crate::common::run(async {
        let node = Node::with(&[("gpu", GPUS)]);
        let lister = Lister::start(&node, Answer::Pods(Vec::new()));
        let stage = Stage::on(node, Profile::K125, |_| {}).await;
        // A young kubelet is asked only for the name of a pod.
        let logs = stage.node.path("host/var/log/pods");
        fs::remove_dir(&logs).unwrap();
        fs::write(&logs, "").unwrap();
        let app = stage.start_app().await;
        let pod = stage.admit_one("silent", 1).await;
        bound(&app, &pod).await;
        fs::remove_dir_all(
            stage.node.path(&format!("host/sys/fs/cgroup/kubepods/pod{}", pod.spec.uid)),
        )
        .unwrap();
        let look = app.actors.ledger.mailbox::<Reconcile>();
        look.send(Reconcile);
        lister.was_requested(1).await;
        let began = Instant::now();
        // Each listing starts after the last one was judged. Their number and distance would
        // suffice for a release.
        while began.elapsed() <= ABSENCE_MIN {
            lister.was_requested(lister.requests() + 1).await;
        }
        look.send(Reconcile);
        lister.was_requested(lister.requests() + 1).await;
        let grants = stage.node.grants();
        assert!(grants.len() == 1 && is_bound_to(&grants[0], &pod.spec.uid), "{grants:#?}");
        app.shut_down().await;
    });
}

/// The next pod of a StatefulSet has the name of the last one, and pod-resources has no UIDs. Each
/// grant is bound by its alloc-id, to the pod that has it.
#[test]
fn edge_24_a_pod_of_the_same_name_is_another_pod() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let mut pods = Vec::new();
        for _ in 0..3 {
            let pod = stage.admit(PodSpec::new("shop", "web-0").app("main", &gpu(), 1)).await;
            stage.kubelet.delete_pod(&pod.spec.uid).unwrap();
            pods.push(pod);
        }
        let last = stage.admit(PodSpec::new("shop", "web-0").app("main", &gpu(), 1)).await;
        bound(&app, &last).await;
        for grant in stage.node.grants() {
            // A grant whose pod was deleted early may be without a pod; none has another grant's
            // pod.
            let Some(holder) = grant.pod() else { continue };
            let pod = pods
                .iter()
                .chain([&last])
                .find(|pod| alloc_id(pod, "main") == grant.alloc_id)
                .unwrap();
            assert_eq!(holder.uid, pod.spec.uid);
        }
        app.shut_down().await;
    });
}

/// The kubelet forgets a pod that is deleted by force while its containers run, and gives its
/// devices again. The ledger has both pods.
#[test]
fn edge_25_a_force_deleted_pod_keeps_its_grant_along_with_the_next_pod() {
    on_every_profile(async |profile| {
        let stage = Stage::on(Node::with(&[("gpu", 1)]), profile, |_| {}).await;
        let app = stage.node.start_app().await;
        stage.wait_until_recovered(1).await;
        let old = stage.admit_one("old", 1).await;
        bound(&app, &old).await;
        assert!(stage.kubelet.force_delete_pod(&old.spec.uid));
        let new = stage.admit_one("new", 1).await;
        bound(&app, &new).await;
        let holders: Vec<_> = stage
            .node
            .grants()
            .into_iter()
            .filter_map(|grant| grant.pod().map(|pod| pod.uid.clone()))
            .collect();
        assert_eq!(holders, [old.spec.uid, new.spec.uid]);
        app.shut_down().await;
    });
}

/// All clients of pod-resources share one rate limit, so other clients can exhaust it. A refused
/// listing is no evidence, and is requested again.
#[test]
fn edge_26_a_refused_listing_is_repeated() {
    on_every_profile(async |profile| {
        let node = Node::with(&[("gpu", GPUS)]);
        let lister = Lister::start(&node, Answer::Busy);
        let stage = Stage::on(node, profile, |_| {}).await;
        // Without log folders, only a listing has the pod's name.
        let logs = stage.node.path("host/var/log/pods");
        fs::remove_dir(&logs).unwrap();
        fs::write(&logs, "").unwrap();
        let app = stage.start_app().await;
        let pod = stage.admit_one("named", 1).await;
        bound(&app, &pod).await;
        lister.was_requested(1).await;
        let id = pod.containers["main"].devices[&gpu()].first().unwrap().to_string();
        let devices = vec![api::ContainerDevices {
            resource_name: gpu().to_string(),
            device_ids: vec![id],
            topology: None,
        }];
        let containers = vec![api::ContainerResources {
            name: "main".to_owned(),
            devices,
            cpu_ids: Vec::new(),
            memory: Vec::new(),
        }];
        lister.answers(Answer::Pods(vec![api::PodResources {
            name: "named".to_owned(),
            namespace: "default".to_owned(),
            containers,
        }]));
        // The kubelet's next write triggers a pass.
        stage.admit_one("next", 1).await;
        let is_named = |state: &GrantState| matches!(state, GrantState::Bound { pod, .. } if pod.name.as_deref() == Some("named"));
        granted(&app, "the pod's name", |grants| grants.iter().any(|grant| is_named(&grant.state)))
            .await;
        app.shut_down().await;
    });
}
