//! The versions of the kubelet's APIs: old and new kubelets on one node, with one daemon.

use crate::common::{Daemon, HANG, Node, dial, hide_expected_panics, name, offered, run, soon};
use holdfast::domain::{AllocId, ResourceName};
use holdfast::kubelet::proto::v1alpha as alpha;
use holdfast::kubelet::proto::v1alpha::device_plugin_client::DevicePluginClient as AlphaClient;
use holdfast::kubelet::proto::v1alpha::registration_client::RegistrationClient;
use holdfast::kubelet::uds;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, KubeletConfig, PodPhase, PodSpec, Profile};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::Duration;
use tonic::Code;

/// Twice the time until a daemon settles a loss by another Register: a Register that has not come
/// by then does not come.
const SETTLED_WITHIN: Duration = Duration::from_millis(1400);

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

async fn start(node: &Node, profile: Profile) -> Kubelet {
    Kubelet::start(KubeletConfig { profile, ..node.kubelet_config() }).await.unwrap()
}

async fn admit(kubelet: &Kubelet, pod: &str, count: u32) -> String {
    let outcome =
        soon("an admission", kubelet.add_pod(PodSpec::new("shop", pod).app("main", &gpu(), count)))
            .await;
    assert_eq!(outcome.phase, PodPhase::Running);
    outcome.uid
}

/// The API version of the resource in `status`.
fn api_version(node: &Node) -> Value {
    let status = node.json(&["status"]);
    assert_eq!(status["resources"][0]["registered"], true);
    status["resources"][0]["api_version"].clone()
}

/// Waits until the daemon has logged `times` registrations: the kubelet knows each one slightly
/// earlier.
async fn registered(daemon: &Daemon, kubelet: &Kubelet, devices: usize, times: usize) {
    offered(kubelet, &gpu(), devices).await;
    daemon.logged_often("registered with the kubelet", times).await;
}

/// A pod's row in `who`: its name, its container and its devices.
fn who(node: &Node, uid: &str) -> (String, String, BTreeSet<String>) {
    let who = node.json(&["who"]);
    let row =
        who["grants"].as_array().unwrap().iter().find(|row| row["pod"]["uid"] == uid).unwrap();
    let devices = row["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_str().unwrap().to_owned())
        .collect();
    (
        row["pod"]["name"].as_str().unwrap().to_owned(),
        row["container"].as_str().unwrap().to_owned(),
        devices,
    )
}

fn held(kubelet: &Kubelet, uid: &str) -> BTreeSet<String> {
    kubelet.devices(uid, "main").into_values().flatten().map(|id| id.to_string()).collect()
}

/// Admits a pod and checks that the daemon knows it by name.
async fn admitted_and_known(
    node: &Node,
    daemon: &Daemon,
    kubelet: &Kubelet,
    pod: &str,
    bound: usize,
) -> String {
    let uid = admit(kubelet, pod, 1).await;
    daemon.logged_often(" pod=\"", bound).await;
    assert_eq!(who(node, &uid), (pod.to_owned(), "main".to_owned(), held(kubelet, &uid)));
    uid
}

#[test]
fn a_kubelet_that_speaks_only_v1alpha_gets_everything() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = start(&node, Profile::K19).await;
        let daemon = node.start_daemon();
        registered(&daemon, &kubelet, 4, 1).await;
        assert_eq!(api_version(&node), "v1alpha2");
        let table = String::from_utf8(node.output(&["status"]).stdout).unwrap();
        assert!(table.contains("API") && table.contains("v1alpha2"), "{table}");

        let uid = admitted_and_known(&node, &daemon, &kubelet, "web-0", 1).await;
        assert_eq!(held(&kubelet, &uid).len(), 1);
        let edits = kubelet.view(|view| view.pod(&uid).unwrap().containers["main"].edits.clone());
        assert!(
            edits.annotations.contains_key(AllocId::ANNOTATION) && edits.devices.len() == 1,
            "{edits:?}"
        );
        // A failed device is reported in this version too.
        node.remove_device(
            "gpu",
            (0..4)
                .find(|index| !held(&kubelet, &uid).contains(&format!("dev:gpu{index}")))
                .unwrap(),
        );
        offered(&kubelet, &gpu(), 3).await;
    });
}

#[test]
fn a_kubelet_that_is_downgraded_and_upgraded_in_place_is_followed() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = start(&node, Profile::K125).await;
        let daemon = node.start_daemon();
        registered(&daemon, &kubelet, 4, 1).await;
        assert_eq!(api_version(&node), "v1beta1");
        let mut uids = vec![admitted_and_known(&node, &daemon, &kubelet, "web-0", 1).await];

        for (number, (profile, version)) in
            [(Profile::K19, "v1alpha2"), (Profile::K125, "v1beta1")].into_iter().enumerate()
        {
            let before = uids.iter().map(|uid| held(&kubelet, uid)).collect::<Vec<_>>();
            kubelet.replace(profile).await.unwrap();
            registered(&daemon, &kubelet, 4, number + 2).await;
            assert_eq!(api_version(&node), version);
            let after = uids.iter().map(|uid| held(&kubelet, uid)).collect::<Vec<_>>();
            assert_eq!(before, after, "what a pod holds outlives the kubelet");
            uids.push(
                admitted_and_known(
                    &node,
                    &daemon,
                    &kubelet,
                    &format!("web-{}", number + 1),
                    number + 2,
                )
                .await,
            );
        }
        let all: BTreeSet<String> = uids.iter().flat_map(|uid| held(&kubelet, uid)).collect();
        assert_eq!(all.len(), 3, "nothing is given twice");
        assert_eq!(kubelet.panicked(), None);
    });
}

#[test]
fn a_kubelet_that_ends_the_former_stream_at_each_register_causes_no_endless_loop() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = start(&node, Profile::K19).await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 2).await;
        // The settling Register makes the kubelet close the first connection.
        let ended = |kind: &EventKind| matches!(kind, EventKind::StreamEnded { client: 1, .. });
        kubelet.wait_for(|view| view.last(ended).is_some(), HANG).await.unwrap();
        let third = kubelet.wait_for(|view| view.registers(&gpu()) > 2, SETTLED_WITHIN).await;
        assert!(third.is_err(), "the end of the first stream was taken for a loss");
        let endpoint = kubelet.view(|view| view.endpoint_state(&gpu()));
        assert!(
            endpoint.streams == 1 && endpoint.serving == Some(2) && !endpoint.is_stopped,
            "{endpoint:?}"
        );
        admit(&kubelet, "web-0", 1).await;

        // The end of the newest stream is still a loss.
        kubelet.restart().await.unwrap();
        offered(&kubelet, &gpu(), 2).await;
    });
}

#[test]
fn a_rebuilt_actor_negotiates_the_version_again() {
    hide_expected_panics();
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = start(&node, Profile::K19).await;
        let app = node.start_app().await;
        offered(&kubelet, &gpu(), 2).await;
        let before = kubelet.view(|view| view.registers(&gpu()));
        app.actors.registration.crash().await.unwrap();
        kubelet.wait_for(|view| view.registers(&gpu()) > before, HANG).await.unwrap();
        app.actors.serving.crash().await.unwrap();
        admit(&kubelet, "web-0", 1).await;
        let refused = |kind: &EventKind| matches!(kind, EventKind::RegisterFailed { .. });
        assert_eq!(
            kubelet.view(|view| view.last(refused).cloned()),
            None,
            "only a version that it speaks is used"
        );
        assert_eq!(node.grants().len(), 1);
        app.shut_down().await;
    });
}

#[test]
fn both_versions_are_answered_on_one_socket_by_one_ledger() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = start(&node, Profile::K125).await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 2).await;
        let endpoint = kubelet.view(|view| view.endpoint_state(&gpu()).socket).unwrap();
        let mut api = AlphaClient::new(
            uds::connect(node.path("kubelet/device-plugins").join(endpoint)).await.unwrap(),
        );
        let request = |ids: &[&str]| alpha::AllocateRequest {
            devices_i_ds: ids.iter().map(ToString::to_string).collect(),
        };
        let answer = api.allocate(request(&["dev:gpu0"])).await.unwrap().into_inner();
        let mut beta = dial(&kubelet, &node, &gpu()).await;
        let other = crate::common::allocate(&mut beta, &["dev:gpu1"]).await.unwrap();
        let granted: BTreeSet<_> = node.grants().into_iter().map(|grant| grant.alloc_id).collect();
        assert_eq!(
            granted,
            BTreeSet::from([AllocId::new(answer.annotations[AllocId::ANNOTATION].clone()), other])
        );

        let error = api.allocate(request(&["dev:ghost"])).await.unwrap_err();
        assert!(
            error.code() == Code::NotFound && error.message().contains("`dev:ghost`"),
            "{error}"
        );
    });
}

#[test]
fn an_unknown_version_is_refused_with_the_kubelets_text() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let kubelet = start(&node, Profile::K125).await;
        let socket = node.path("kubelet/device-plugins/kubelet.sock");
        let register = async |version: &str| {
            let mut client = RegistrationClient::new(uds::connect(&socket).await.unwrap());
            let request = alpha::RegisterRequest {
                version: version.to_owned(),
                endpoint: "x.sock".to_owned(),
                resource_name: "example.com/gpu".to_owned(),
            };
            client.register(request).await.unwrap_err()
        };
        assert_eq!(register("v1alpha2").await.code(), Code::Unimplemented);
        assert_eq!(kubelet.view(|view| view.registers(&gpu())), 0);

        kubelet.replace(Profile::K19).await.unwrap();
        let error = register("v1alpha1").await;
        let text = "requested API version \"v1alpha1\" is not supported by kubelet. Supported version is \"v1alpha2\"";
        assert_eq!((error.code(), error.message()), (Code::Unknown, text));
        let failed = |kind: &EventKind| matches!(kind, EventKind::RegisterFailed { .. });
        kubelet.wait_for(|view| view.last(failed).is_some(), HANG).await.unwrap();
    });
}
