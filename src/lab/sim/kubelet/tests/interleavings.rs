//! The event orders that make a re-registration fail, each provoked by gates on real sockets.

use super::*;

fn count(node: &Node, fits: impl Fn(&EventKind) -> bool) -> usize {
    node.kubelet.view(|view| view.events().iter().filter(|event| fits(&event.kind)).count())
}

async fn seen(node: &Node, which: Interleaving) {
    node.wait_for_event(
        |kind| matches!(kind, EventKind::Interleaving { which: seen, .. } if *seen == which),
    )
    .await;
}

fn ended(client: u64) -> impl Fn(&EventKind) -> bool {
    move |kind| matches!(kind, EventKind::StreamEnded { client: ended, .. } if *ended == client)
}

async fn start(profile: Profile) -> (Node, HookTable) {
    let hooks = HookTable::default();
    let node = Node::start_with(|config| {
        config.profile = profile;
        config.hooks = hooks.clone();
    })
    .await;
    node.settled().await;
    (node, hooks)
}

#[tokio::test]
async fn the_late_end_of_the_old_stream_disconnects_the_new_client() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new =
        TestPlugin::registered(&node, "new.sock", healthy(&["a", "b"]), Behaviour::Usual).await;
    seen(&node, Interleaving::BothClientsFeedList).await;
    old.list(healthy(&["a"]));
    node.wait_for_capacity(1, 1).await;
    new.list(healthy(&["a", "b"]));
    node.wait_for_capacity(2, 2).await;

    let mut gate = hooks.gate(Hook::BeforePluginDisconnected);
    old.end_streams();
    gate.reached().await;
    assert_eq!(
        node.allocatable(),
        (2, 2),
        "the connection is cut, and the devices are not stopped yet"
    );
    new.lists.closed().await;
    gate.open(Verdict::Pass);
    node.wait_for_capacity(2, 0).await;
    seen(&node, Interleaving::OldStreamEndsLate).await;
}

#[tokio::test]
async fn a_failing_register_makes_the_kubelet_forget_a_live_plugin() {
    let (node, hooks) = start(Profile::K125).await;
    let live = TestPlugin::registered(&node, "live.sock", healthy(&["a"]), Behaviour::Usual).await;
    let gate = hooks.gate(Hook::AfterRegisterClient);
    let resource = gpu();
    let failing = node.register(&resource, "live.sock");
    let fail = async { gate.open(Verdict::Fail) };
    let (failed, ()) = tokio::join!(failing, fail);
    assert_eq!(
        failed.unwrap_err().message(),
        "failed to dial device plugin: context deadline exceeded"
    );
    seen(&node, Interleaving::FailedRegisterForgetsClient).await;
    live.end_streams();
    node.wait_for_event(ended(1)).await;
    assert_eq!(node.allocatable(), (1, 1));
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "late").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Running, "the plugin itself still answers");
}

#[tokio::test]
async fn a_client_cut_before_list_and_watch_is_registered_without_a_stream() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new = TestPlugin::serve(&node, "new.sock", healthy(&["a"]), Behaviour::Usual);
    let mut gate = hooks.gate(Hook::BeforeListAndWatch);
    node.register(&gpu(), "new.sock").await.unwrap();
    gate.reached().await;
    old.end_streams();
    node.wait_for_capacity(1, 0).await;
    gate.open(Verdict::Pass);
    node.wait_for_event(ended(2)).await;
    seen(&node, Interleaving::CutBeforeListAndWatch).await;
    assert_eq!(new.lists.receiver_count(), 0);
}

#[tokio::test]
async fn a_client_cut_before_its_options_fails_to_register() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let _new = TestPlugin::serve(&node, "new.sock", healthy(&["a"]), Behaviour::Usual);
    let mut gate = hooks.gate(Hook::AfterDial);
    let resource = gpu();
    let cut = async {
        gate.reached().await;
        old.end_streams();
        node.wait_for_capacity(1, 0).await;
        gate.open(Verdict::Pass);
    };
    let (failed, ()) = tokio::join!(node.register(&resource, "new.sock"), cut);
    let text = "failed to get device plugin options: rpc error: code = Canceled desc = grpc: the client connection is closing";
    assert_eq!(failed.unwrap_err().message(), text);
}

#[tokio::test]
async fn the_end_of_a_cut_stream_disconnects_its_replacement() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new = TestPlugin::registered(&node, "new.sock", healthy(&["a"]), Behaviour::Usual).await;
    // The end of the old stream passes, the end of the new one is held.
    let mut gate = hooks.gate_after(Hook::OnStreamEnd, 1);
    old.end_streams();
    gate.reached().await;
    node.wait_for_capacity(1, 0).await;
    new.register(&node).await;
    assert_eq!(node.allocatable(), (1, 1));
    gate.open(Verdict::Pass);
    node.wait_for_event(ended(3)).await;
    seen(&node, Interleaving::CutStreamEndsLate).await;
    node.wait_for_capacity(1, 0).await;
}

#[tokio::test]
async fn a_stopped_endpoint_with_an_open_stream_lists_devices_and_fails_allocates() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new = TestPlugin::registered(&node, "new.sock", healthy(&["a"]), Behaviour::Usual).await;
    let mut gate = hooks.gate(Hook::BeforePluginDisconnected);
    old.end_streams();
    gate.reached().await;
    new.register(&node).await;
    gate.open(Verdict::Pass);
    seen(&node, Interleaving::StoppedWhileStreaming).await;
    node.wait_for_capacity(1, 0).await;
    let endpoint = node.kubelet.view(|view| view.endpoint_state(&gpu()));
    assert!(endpoint.is_stopped && endpoint.is_streaming && endpoint.is_tracked, "{endpoint:?}");

    new.list(healthy(&["a", "b"]));
    node.wait_for_capacity(2, 2).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    let text = "Pod was rejected: Allocate failed due to endpoint example.com/gpu has been stopped, which is unexpected";
    assert_eq!(failure(&outcome.phase), text);
    new.register(&node).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "again").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Running, "another Register repairs it");
}

#[tokio::test]
async fn one_socket_registered_twice_has_two_streams() {
    let (node, _) = start(Profile::K125).await;
    let plugin = TestPlugin::registered(&node, "one.sock", healthy(&["a"]), Behaviour::Usual).await;
    plugin.register(&node).await;
    seen(&node, Interleaving::SocketRegisteredTwice).await;
    assert_eq!(
        (
            plugin.lists.receiver_count(),
            node.kubelet.view(|view| view.endpoint_state(&gpu()).streams)
        ),
        (2, 2)
    );
}

#[tokio::test]
async fn the_overtaken_register_serves_and_the_other_one_is_recorded() {
    let (node, hooks) = start(Profile::K125).await;
    let _first = TestPlugin::serve(&node, "first.sock", healthy(&["a"]), Behaviour::Usual);
    let second = TestPlugin::serve(&node, "second.sock", healthy(&["a"]), Behaviour::Usual);
    let mut gate = hooks.gate(Hook::AfterOptions);
    let resource = gpu();
    let overtake = async {
        gate.reached().await;
        second.register(&node).await;
        gate.open(Verdict::Pass);
    };
    let (registered, ()) = tokio::join!(node.register(&resource, "first.sock"), overtake);
    registered.unwrap();
    seen(&node, Interleaving::RegisterOvertaken).await;
    let endpoint = node.kubelet.view(|view| view.endpoint_state(&gpu()));
    assert_eq!((endpoint.serving, endpoint.tracked), (Some(1), Some(2)));
}

#[tokio::test]
async fn from_1_37_on_an_old_stream_ends_alone_and_a_socket_in_use_is_refused_or_ignored() {
    for profile in [Profile::K137, Profile::K137Dedupe] {
        let (node, _) = start(profile).await;
        let old =
            TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
        let _new =
            TestPlugin::registered(&node, "new.sock", healthy(&["a"]), Behaviour::Usual).await;
        old.end_streams();
        node.wait_for_event(ended(1)).await;
        node.kubelet.wait_for(|view| view.endpoint_state(&gpu()).streams == 1, SOON).await.unwrap();
        assert_eq!(node.allocatable(), (1, 1));
        assert_eq!(count(&node, |kind| matches!(kind, EventKind::Disconnected { .. })), 0);

        let again = node.register(&gpu(), "new.sock").await;
        assert_eq!(again.is_err(), profile == Profile::K137);
        let endpoint = node.kubelet.view(|view| view.endpoint_state(&gpu()));
        assert!(
            endpoint.is_tracked && !endpoint.is_stopped && endpoint.streams == 1,
            "{endpoint:?}"
        );
    }
}

#[tokio::test]
async fn up_to_1_24_register_is_answered_before_the_plugin_is_dialled() {
    let (node, hooks) = start(Profile::K110).await;
    let mut gate = hooks.gate(Hook::BeforeRegisterClient);
    node.register(&gpu(), "one.sock").await.unwrap();
    gate.reached().await;
    let old = TestPlugin::serve(&node, "one.sock", healthy(&["a"]), Behaviour::NoOptions);
    gate.open(Verdict::Pass);
    node.wait_for_capacity(1, 1).await;
    let new = TestPlugin::registered(&node, "two.sock", healthy(&["a"]), Behaviour::Usual).await;
    old.end_streams();
    node.wait_for_event(ended(1)).await;
    assert_eq!(node.allocatable(), (1, 1), "the end of the old stream stops only its own endpoint");
    new.end_streams();
    node.wait_for_capacity(1, 0).await;
}

#[tokio::test]
async fn a_list_between_the_request_and_the_answer_counts() {
    let (node, hooks) = start(Profile::K125).await;
    let plugin = TestPlugin::registered(&node, "one.sock", healthy(&["a"]), Behaviour::Usual).await;
    let mut gate = hooks.gate(Hook::DuringAllocate);
    let change = async {
        gate.reached().await;
        plugin.list(healthy(&["other"]));
        node.wait_for_event(|kind| matches!(kind, EventKind::Vanished { .. })).await;
        gate.open(Verdict::Pass);
    };
    let (outcome, ()) = tokio::join!(
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)),
        change
    );
    assert_eq!(outcome.phase, PodPhase::Pending);
    assert!(node.kubelet.panicked().is_some());
}

#[tokio::test]
async fn a_kubelet_that_dies_during_an_allocate_has_recorded_nothing() {
    let (node, hooks) = start(Profile::K125).await;
    let plugin =
        TestPlugin::registered(&node, "sub/one.sock", healthy(&["a"]), Behaviour::Usual).await;
    let mut gate = hooks.gate(Hook::AfterAllocate);
    let die = async {
        gate.reached().await;
        gate.open(Verdict::Crash);
    };
    let (outcome, ()) = tokio::join!(
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)),
        die
    );
    assert_eq!(outcome.phase, PodPhase::Pending);
    assert!(!node.kubelet.view(|view| view.is_running()));
    assert_eq!(plugin.allocated.lock().unwrap().len(), 1, "the plugin has answered");
    assert_eq!(node.checkpoint()["Data"]["PodDeviceEntries"], serde_json::Value::Null);
}

#[tokio::test]
async fn the_older_of_two_checkpoints_may_be_written_last() {
    let (node, hooks) = start(Profile::K125).await;
    let plugin = TestPlugin::registered(&node, "one.sock", healthy(&["a"]), Behaviour::Usual).await;
    let mut gate = hooks.gate(Hook::DuringCheckpoint);
    plugin.list(healthy(&["a", "b"]));
    gate.reached().await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Running);
    assert_eq!(node.checkpoint()["Data"]["PodDeviceEntries"][0]["ContainerName"], "main");
    gate.open(Verdict::Pass);
    plugin.list(healthy(&["a"]));
    // The lists of one stream are processed one after the other: this one only after that
    // checkpoint.
    let mut next = hooks.gate(Hook::DuringCheckpoint);
    next.reached().await;
    assert_eq!(
        node.checkpoint()["Data"]["PodDeviceEntries"],
        serde_json::Value::Null,
        "a running pod is missing in it"
    );
}
