//! The daemon under kubelets of several versions, and in the event orders that make a
//! re-registration fail.

use crate::common::{HANG, Node, name, offered, run, soon};
use holdfast::lab::sim::kubelet::{
    EventKind, Hook, HookTable, Interleaving, Kubelet, KubeletConfig, PodPhase, PodSpec, Profile,
    Verdict, View,
};
use std::time::Duration;

/// A kubelet whose flows a test can hold. A longer gap before the first pods allows for a busy test
/// machine.
async fn start(node: &Node, profile: Profile) -> (Kubelet, HookTable) {
    let hooks = HookTable::default();
    let first_batch_after = Duration::from_millis(500);
    let config =
        KubeletConfig { profile, hooks: hooks.clone(), first_batch_after, ..node.kubelet_config() };
    (Kubelet::start(config).await.unwrap(), hooks)
}

fn registered(view: &View<'_>) -> usize {
    view.events().iter().filter(|event| matches!(event.kind, EventKind::Registered { .. })).count()
}

/// Waits until an Allocate would succeed, and the kubelet would notice the end of the serving
/// client.
async fn served(kubelet: &Kubelet, profile: Profile) {
    let gpu = name("example.com/gpu");
    let is_served = |view: &View<'_>| {
        let endpoint = view.endpoint_state(&gpu);
        // Up to 1.24 there is no map of clients.
        let is_tracked = endpoint.is_tracked || profile.answers_first();
        !endpoint.is_stopped && endpoint.is_streaming && is_tracked && !endpoint.healthy.is_empty()
    };
    kubelet.wait_for(is_served, HANG).await.unwrap();
}

#[test]
fn every_kubelet_gets_the_devices_again_after_a_restart() {
    run(async {
        for profile in [Profile::K110, Profile::K125, Profile::K137, Profile::K137Dedupe] {
            let node = Node::with(&[("gpu", 4)]);
            let gpu = name("example.com/gpu");
            let (kubelet, _) = start(&node, profile).await;
            let _daemon = node.start_daemon();
            offered(&kubelet, &gpu, 4).await;
            // Including the settling Register.
            kubelet.wait_for(|view| registered(view) == 2, HANG).await.unwrap();
            let spec = PodSpec::new("default", "train").init("warm", &gpu, 1).app("main", &gpu, 2);
            assert_eq!(
                soon("an admission", kubelet.add_pod(spec)).await.phase,
                PodPhase::Running,
                "{profile:?}"
            );
            kubelet.restart().await.unwrap();
            kubelet.wait_for(|view| view.is_settled(), HANG).await.unwrap();
            served(&kubelet, profile).await;
            assert_eq!(kubelet.view(|view| view.rejections()), 0, "{profile:?}");
            let failed = kubelet.view(|view| {
                view.events()
                    .iter()
                    .filter(|event| matches!(event.kind, EventKind::RegisterFailed { .. }))
                    .count()
            });
            assert_eq!(failed, 0, "{profile:?}");
        }
    });
}

#[test]
fn a_stopped_endpoint_with_an_open_stream_is_repaired_without_a_kubelet_signal() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let gpu = name("example.com/gpu");
        let (kubelet, hooks) = start(&node, Profile::K125).await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu, 4).await;
        kubelet.wait_for(|view| registered(view) == 2 && view.is_settled(), HANG).await.unwrap();

        let (mut list, mut stop) =
            (hooks.gate(Hook::OnList), hooks.gate(Hook::BeforePluginDisconnected));
        node.create_device("gpu", 4);
        soon("the list with another device", list.reached()).await;
        list.open(Verdict::Fail);
        soon("the cut", stop.reached()).await;
        kubelet
            .wait_for(|view| registered(view) == 3 && view.lists(&gpu) >= 3, HANG)
            .await
            .unwrap();
        stop.open(Verdict::Pass);
        kubelet
            .wait_for(
                |view| view.interleavings().contains_key(&Interleaving::StoppedWhileStreaming),
                HANG,
            )
            .await
            .unwrap();

        served(&kubelet, Profile::K125).await;
        let outcome = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu, 1)),
        )
        .await;
        assert_eq!(outcome.phase, PodPhase::Running);
    });
}

#[test]
fn a_register_without_a_stream_is_repeated() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let gpu = name("example.com/gpu");
        let (kubelet, hooks) = start(&node, Profile::K125).await;
        let mut gate = hooks.gate(Hook::BeforeListAndWatch);
        let _daemon = node.start_daemon();
        soon("the registration", gate.reached()).await;
        // The stream of the first Register never comes.
        offered(&kubelet, &gpu, 4).await;
        assert!(kubelet.view(registered) >= 2);
        gate.open(Verdict::Fail);
        kubelet
            .wait_for(
                |view| view.interleavings().contains_key(&Interleaving::OldStreamEndsLate),
                HANG,
            )
            .await
            .unwrap();
        served(&kubelet, Profile::K125).await;
    });
}
