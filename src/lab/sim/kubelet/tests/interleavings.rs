//! The event orders that make a re-registration fail, each provoked by gates on real sockets.

use super::*;

fn count(node: &Node, fits: impl Fn(&EventKind) -> bool) -> usize {
    node.kubelet.view(|view| view.events().iter().filter(|event| fits(&event.kind)).count())
}

async fn seen(node: &Node, which: Interleaving) {
    node.wait_for_event(|kind| matches!(kind, EventKind::Interleaving { which: seen, .. } if *seen == which)).await;
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
async fn a_and_b_the_late_end_of_the_old_stream_cuts_the_new_client() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new = TestPlugin::registered(&node, "new.sock", healthy(&["a", "b"]), Behaviour::Usual).await;
    seen(&node, Interleaving::A).await;
    old.list(healthy(&["a"]));
    node.wait_for_capacity(1, 1).await;
    new.list(healthy(&["a", "b"]));
    node.wait_for_capacity(2, 2).await;

    let mut gate = hooks.gate(Hook::BeforePluginDisconnected);
    old.end_streams();
    gate.reached().await;
    assert_eq!(node.allocatable(), (2, 2), "the connection is cut, and the devices are not stopped yet");
    new.lists.closed().await;
    gate.open(Verdict::Pass);
    node.wait_for_capacity(2, 0).await;
    seen(&node, Interleaving::B).await;
}

#[tokio::test]
async fn c_a_failing_register_makes_the_kubelet_lose_sight_of_a_live_plugin() {
    let (node, hooks) = start(Profile::K125).await;
    let live = TestPlugin::registered(&node, "live.sock", healthy(&["a"]), Behaviour::Usual).await;
    let gate = hooks.gate(Hook::AfterRegisterClient);
    let resource = gpu();
    let failing = node.register(&resource, "live.sock");
    let fail = async { gate.open(Verdict::Fail) };
    let (failed, ()) = tokio::join!(failing, fail);
    assert_eq!(failed.unwrap_err().message(), "failed to dial device plugin: context deadline exceeded");
    seen(&node, Interleaving::C).await;
    live.end_streams();
    node.wait_for_event(ended(1)).await;
    assert_eq!(node.allocatable(), (1, 1));
    let outcome = node.kubelet.add_pod(PodSpec::new("default", "late").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Running, "the plugin itself lives on");
}

#[tokio::test]
async fn d_a_client_that_is_cut_before_its_stream_is_registered_and_never_listened_to() {
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
    seen(&node, Interleaving::D).await;
    assert_eq!(new.lists.receiver_count(), 0);
}

#[tokio::test]
async fn d_a_client_that_is_cut_before_its_options_fails_to_register() {
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
async fn e_the_end_of_a_cut_stream_cuts_the_one_that_came_for_it() {
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
    seen(&node, Interleaving::E).await;
    node.wait_for_capacity(1, 0).await;
}

#[tokio::test]
async fn f_a_zombie_looks_healthy_and_cannot_be_allocated_from() {
    let (node, hooks) = start(Profile::K125).await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new = TestPlugin::registered(&node, "new.sock", healthy(&["a"]), Behaviour::Usual).await;
    let mut gate = hooks.gate(Hook::BeforePluginDisconnected);
    old.end_streams();
    gate.reached().await;
    new.register(&node).await;
    gate.open(Verdict::Pass);
    seen(&node, Interleaving::F).await;
    node.wait_for_capacity(1, 0).await;
    let standing = node.kubelet.view(|view| view.standing(&gpu()));
    assert!(standing.is_stopped && standing.is_streaming && standing.is_tracked, "{standing:?}");

    new.list(healthy(&["a", "b"]));
    node.wait_for_capacity(2, 2).await;
    let outcome = node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    let text = "Pod was rejected: Allocate failed due to endpoint example.com/gpu has been stopped, which is unexpected";
    assert_eq!(failure(&outcome.phase), text);
    new.register(&node).await;
    let outcome = node.kubelet.add_pod(PodSpec::new("default", "again").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Running, "one more Register is the cure");
}

#[tokio::test]
async fn g_one_socket_twice_has_two_streams_and_the_first_end_cuts_the_second() {
    let (node, _) = start(Profile::K125).await;
    let plugin = TestPlugin::registered(&node, "one.sock", healthy(&["a"]), Behaviour::Usual).await;
    plugin.register(&node).await;
    seen(&node, Interleaving::G).await;
    assert_eq!((plugin.lists.receiver_count(), node.kubelet.view(|view| view.standing(&gpu()).streams)), (2, 2));
}

#[tokio::test]
async fn h_the_register_that_is_overtaken_serves_and_the_other_one_is_known() {
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
    seen(&node, Interleaving::H).await;
    let standing = node.kubelet.view(|view| view.standing(&gpu()));
    assert_eq!((standing.serving, standing.tracked), (Some(1), Some(2)));
}

#[tokio::test]
async fn from_1_37_on_an_old_stream_ends_alone_and_a_socket_in_use_is_refused_or_ignored() {
    for profile in [Profile::K137, Profile::K137Dedupe] {
        let (node, _) = start(profile).await;
        let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
        let _new = TestPlugin::registered(&node, "new.sock", healthy(&["a"]), Behaviour::Usual).await;
        old.end_streams();
        node.wait_for_event(ended(1)).await;
        node.kubelet.wait_for(|view| view.standing(&gpu()).streams == 1, SOON).await.unwrap();
        assert_eq!(node.allocatable(), (1, 1));
        assert_eq!(count(&node, |kind| matches!(kind, EventKind::Disconnected { .. })), 0);

        let again = node.register(&gpu(), "new.sock").await;
        assert_eq!(again.is_err(), profile == Profile::K137);
        let standing = node.kubelet.view(|view| view.standing(&gpu()));
        assert!(standing.is_tracked && !standing.is_stopped && standing.streams == 1, "{standing:?}");
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
    assert_eq!(node.allocatable(), (1, 1), "the end of the old stream is its own");
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
    let (outcome, ()) = tokio::join!(node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)), change);
    assert_eq!(outcome.phase, PodPhase::Pending);
    assert!(node.kubelet.panicked().is_some());
}

#[tokio::test]
async fn a_kubelet_that_dies_during_an_allocate_has_recorded_nothing() {
    let (node, hooks) = start(Profile::K125).await;
    let plugin = TestPlugin::registered(&node, "sub/one.sock", healthy(&["a"]), Behaviour::Usual).await;
    let mut gate = hooks.gate(Hook::AfterAllocate);
    let die = async {
        gate.reached().await;
        gate.open(Verdict::Crash);
    };
    let (outcome, ()) = tokio::join!(node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)), die);
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
    let outcome = node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Running);
    assert_eq!(node.checkpoint()["Data"]["PodDeviceEntries"][0]["ContainerName"], "main");
    gate.open(Verdict::Pass);
    plugin.list(healthy(&["a"]));
    // The lists of one stream are processed one after the other: this one only after that
    // checkpoint.
    let mut next = hooks.gate(Hook::DuringCheckpoint);
    next.reached().await;
    assert_eq!(node.checkpoint()["Data"]["PodDeviceEntries"], serde_json::Value::Null, "a running pod is missing in it");
}
