//! The kubelet's older APIs: pod-resources v1alpha1 together with v1, and alone.

use super::*;
use crate::kubelet::proto::podresources_v1alpha1 as alpha;
use crate::kubelet::proto::podresources_v1alpha1::pod_resources_lister_client::PodResourcesListerClient as AlphaLister;
use crate::kubelet::proto::v1alpha::RegisterRequest;
use crate::kubelet::proto::v1alpha::registration_client::RegistrationClient as AlphaRegistrationClient;

/// The containers of every pod, with the ids that v1alpha1 lists for them.
async fn listed(node: &Node) -> Vec<(String, Vec<(String, String)>)> {
    let socket = node.dir.path().join("kubelet/pod-resources/kubelet.sock");
    let mut client = AlphaLister::new(uds::connect(socket).await.unwrap());
    let pods =
        client.list(alpha::ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources;
    let ids = |devices: Vec<alpha::ContainerDevices>| {
        devices.into_iter().flat_map(|devices| devices.device_ids).collect::<Vec<_>>()
    };
    let containers = |pod: alpha::PodResources| {
        pod.containers.into_iter().map(|found| (found.name, ids(found.devices).join(",")))
    };
    pods.into_iter().map(|pod| (pod.name.clone(), containers(pod).collect())).collect()
}

fn pod(name: &str, containers: &[(&str, &str)]) -> (String, Vec<(String, String)>) {
    (
        name.to_owned(),
        containers.iter().map(|(name, ids)| ((*name).to_owned(), (*ids).to_owned())).collect(),
    )
}

#[tokio::test]
async fn v1alpha1_lists_application_containers_of_every_pod_without_numa_nodes() {
    let node = Node::start().await;
    let mut spread = device("a", "Healthy");
    spread.topology =
        Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 0 }, api::NumaNode { id: 1 }] });
    let _plugin = TestPlugin::registered(
        &node,
        "gpu.sock",
        vec![spread, device("b", "Healthy")],
        Behaviour::Usual,
    )
    .await;
    let spec = PodSpec::new("default", "train").sidecar("proxy", &gpu(), 1).app("main", &gpu(), 1);
    node.kubelet.add_pod(spec).await;
    // No device is left for this pod.
    let failed = node.kubelet.add_pod(PodSpec::new("default", "late").app("main", &gpu(), 1)).await;
    failure(&failed.phase);

    let PodPhase::Failed { .. } =
        node.kubelet.view(|view| view.pod(&failed.uid).unwrap().phase.clone())
    else {
        panic!("it has ended")
    };
    assert_eq!(listed(&node).await, [pod("train", &[("main", "b")]), pod("late", &[("main", "")])]);
    let client = PodResources::new(node.dir.path().join("kubelet/pod-resources/kubelet.sock"));
    let v1 = client.list().await.unwrap();
    assert_eq!(
        (v1.len(), v1[0].containers.len()),
        (1, 2),
        "v1 has the sidecar, and no pod that has ended"
    );
}

#[tokio::test]
async fn a_kubelet_without_v1_is_queried_in_v1alpha1_and_lacks_get() {
    let node = Node::start_with(|config| config.profile = Profile::K19).await;
    node.settled().await;
    node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 0)).await;
    let client = PodResources::new(node.dir.path().join("kubelet/pod-resources/kubelet.sock"));
    let names =
        async || client.list().await.unwrap().into_iter().map(|pod| pod.name).collect::<Vec<_>>();
    assert_eq!(names().await, ["train"]);
    let Err(PodResourcesError::Refused { status, .. }) = client.get("default", "train").await
    else {
        panic!("v1alpha1 has no Get")
    };
    assert_eq!(
        status.code(),
        Code::Unimplemented,
        "which is not the same as a pod that is not there"
    );

    // An upgraded kubelet is queried in v1 again, and a stopped one does not give an empty list.
    node.kubelet.replace(Profile::K125).await.unwrap();
    node.settled().await;
    assert_eq!(names().await, ["train"]);
    assert!(client.get("default", "train").await.unwrap().is_some());
    node.kubelet.stop();
    assert!(client.list().await.is_err());
}

#[tokio::test]
async fn kubelets_before_v1beta1_and_after_it_do_not_understand_each_others_plugins() {
    let node = Node::start_with(|config| config.profile = Profile::K19).await;
    let refused = node.register(&gpu(), "x.sock").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    // Answered before the plugin is dialled: there is no plugin.
    let channel = uds::connect(node.plugins_dir().join("kubelet.sock")).await.unwrap();
    let request = RegisterRequest {
        version: "v1alpha2".to_owned(),
        endpoint: "x.sock".to_owned(),
        resource_name: gpu().as_str().to_owned(),
    };
    AlphaRegistrationClient::new(channel.clone()).register(request.clone()).await.unwrap();
    let other = RegisterRequest { version: "v1beta1".to_owned(), ..request };
    let refused = AlphaRegistrationClient::new(channel).register(other).await.unwrap_err();
    let text = "requested API version \"v1beta1\" is not supported by kubelet. Supported version is \"v1alpha2\"";
    assert_eq!((refused.code(), refused.message()), (Code::Unknown, text));
}
