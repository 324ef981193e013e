//! Registration when clients, streams and Registers of one resource overlap.

use crate::common::{Node, count, soon};
use crate::edges::alone::{Alone, Heard};
use crate::edges::rival_plugin::{self, RivalPlugin};
use crate::edges::stage::{
    GPUS, PROFILES, Stage, alloc_id, ended, gpu, has_listed, on_every_profile, registrations,
};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::lab::sim::kubelet::{
    EventKind, Hook, Interleaving, Kubelet, KubeletConfig, Profile, Verdict, View,
};
use holdfast::messages::{ClosedEarly, Mailbox, StreamEnded};
use std::collections::BTreeSet;
use tokio::sync::mpsc;

/// Up to 1.36 clients are known by name alone, so the end of the old instance's stream cuts the new
/// instance. The new one registers again without an operator; from 1.37 on it is not affected.
#[test]
fn edge_01_a_new_client_cut_by_the_old_streams_late_end_registers_again() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let mut old = stage.node.another_instance("old-").start_daemon();
        stage.settled_after(0).await;
        let theirs = stage.kubelet.view(registrations);
        let app = stage.start_app().await;

        old.kill();
        for (client, _) in &theirs {
            stage.saw_event(ended(*client)).await;
        }
        stage.wait_until_recovered(GPUS).await;
        let ours = stage.kubelet.view(registrations).split_off(theirs.len());
        let cut = |kind: &EventKind| matches!(kind, EventKind::StreamEnded { client, .. } if ours.iter().any(|(own, _)| own == client));
        let (cuts, seen) = (
            count(&stage.kubelet, cut),
            stage
                .kubelet
                .view(|view| view.interleavings().contains_key(&Interleaving::OldStreamEndsLate)),
        );
        if profile == Profile::K125 {
            assert!(cuts > 0 && seen, "the old instance's end was to cut the new one");
        } else {
            assert!(cuts == 0 && !seen, "{cuts} streams were cut");
        }
        stage.admit_one("after", 2).await;
        assert_eq!(stage.node.grants().len(), 1, "the new instance gave them");
        app.shut_down().await;
    });
}

/// The goroutine of a client that was cut finds its successor under the name, and cuts that one
/// too. Registration continues until no client is left to cut.
#[test]
fn edge_02_the_late_end_of_a_cut_stream_disconnects_its_replacement() {
    crate::common::run(async {
        let stage = Stage::new(Profile::K125).await;
        let old = RivalPlugin::start(&stage).await;
        let app = stage.start_app().await;
        let before = stage.kubelet.view(registrations).len();
        // The end of the old stream passes; the end of the client that it cuts is held until the
        // successor is registered.
        let mut gate = stage.hooks.gate_after(Hook::OnStreamEnd, 1);
        old.end_streams();
        gate.reached().await;
        stage
            .wait(|view| {
                registrations(view).get(before).is_some_and(|(client, _)| has_listed(view, *client))
            })
            .await;
        let successor = stage.kubelet.view(|view| registrations(view)[before].0);
        gate.open(Verdict::Pass);
        stage.saw(Interleaving::CutStreamEndsLate).await;
        stage.saw_event(ended(successor)).await;
        stage.wait_until_recovered(GPUS).await;
        stage.admit_one("after", 1).await;
        app.shut_down().await;
    });
}

/// The stopped endpoint is newer than the disconnected client: its stream stays open, without any
/// signal. The settling Register gives the resource a fresh endpoint.
#[test]
fn edge_03_an_unreported_stopped_endpoint_is_repaired_by_the_settling_register() {
    crate::common::run(async {
        let stage = Stage::new(Profile::K125).await;
        let old = RivalPlugin::start(&stage).await;
        let app = stage.start_app().await;
        let before = stage.kubelet.view(registrations).len();
        let mut end = stage.hooks.gate_after(Hook::OnStreamEnd, 1);
        let mut stop = stage.hooks.gate(Hook::BeforePluginDisconnected);
        old.end_streams();
        stop.reached().await;
        stage
            .wait(|view| {
                registrations(view).get(before).is_some_and(|(client, _)| has_listed(view, *client))
            })
            .await;
        stop.open(Verdict::Pass);
        stage.saw(Interleaving::StoppedWhileStreaming).await;
        // From here on only the daemon itself acts.
        stage
            .wait(|view| {
                !view.endpoint_state(&gpu()).is_stopped
                    && view.endpoint_state(&gpu()).healthy.len() == GPUS
            })
            .await;
        stage.admit_one("after", 1).await;
        // The held flow continues now, and finds a client to cut.
        end.reached().await;
        end.open(Verdict::Pass);
        stage.saw(Interleaving::CutStreamEndsLate).await;
        stage.wait_until_recovered(GPUS).await;
        app.shut_down().await;
    });
}

/// A client that is cut before its ListAndWatch is registered, but its stream is never opened. If
/// no stream comes within a quarter of a second, the daemon registers again.
#[test]
fn edge_04_a_register_without_a_stream_is_repeated() {
    crate::common::run(async {
        let stage = Stage::new(Profile::K125).await;
        let old = RivalPlugin::start(&stage).await;
        let mut gate = stage.hooks.gate(Hook::BeforeListAndWatch);
        let app = stage.node.start_app().await;
        gate.reached().await;
        old.end_streams();
        stage.saw_event(|kind| matches!(kind, EventKind::Disconnected { .. })).await;
        gate.open(Verdict::Pass);
        stage.saw(Interleaving::CutBeforeListAndWatch).await;
        stage.wait_until_recovered(GPUS).await;
        assert!(
            !stage.kubelet.view(|view| has_listed(view, registrations(view)[0].0)),
            "the first client was to have no stream"
        );
        stage.admit_one("after", 1).await;
        app.shut_down().await;
    });
}

/// A Register that fails makes a kubelet up to 1.36 forget the client that it has: it would not
/// notice that client's end. After a failure the daemon registers again, with success.
#[test]
fn edge_05_a_failed_register_of_our_own_is_followed_by_a_successful_one() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        // The first Register succeeds; the settling one fails at the options.
        stage.hooks.gate_after(Hook::AfterDial, 1).open(Verdict::Fail);
        let app = stage.node.start_app().await;
        stage.saw_event(|kind| matches!(kind, EventKind::RegisterFailed { .. })).await;
        stage.wait(|view| registrations(view).len() >= 2).await;
        stage.wait_until_recovered(GPUS).await;
        let seen = stage.kubelet.view(|view| {
            view.interleavings().contains_key(&Interleaving::FailedRegisterForgetsClient)
        });
        assert_eq!(seen, profile == Profile::K125);
        app.shut_down().await;
    });
}

/// A failing Register of another plugin has the same effect, silently: while the daemon is dead,
/// the kubelet continues to trust it. The daemon's next start corrects that.
#[test]
fn edge_05_a_restarted_daemon_replaces_its_dead_client_in_the_kubelet() {
    on_every_profile(async |profile| {
        let node = Node::with(&[("gpu", GPUS)]);
        let stage = Stage::on(node, profile, |config| {
            config.dial_within = std::time::Duration::from_millis(20);
        })
        .await;
        let mut daemon = stage.node.start_daemon();
        stage.settled_after(0).await;
        let clients = stage.kubelet.view(registrations);
        rival_plugin::register(&stage, "missing.sock").await.unwrap_err();
        daemon.kill();
        for (client, _) in &clients {
            stage.saw_event(ended(*client)).await;
        }
        let believed = stage.kubelet.capacity(&gpu()).allocatable;
        assert_eq!(believed, if profile == Profile::K125 { GPUS } else { 0 });
        let _daemon = stage.node.start_daemon();
        stage.settled_after(clients.len()).await;
        stage.admit_one("after", 1).await;
    });
}

/// The kubelet dials for ten seconds and waits for the options without limit, all inside Register.
/// The daemon gives up after two seconds, and the result of that Register does not matter.
#[test]
fn edge_06_a_register_that_hangs_times_out_and_the_next_one_succeeds() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let mut gate = stage.hooks.gate(Hook::AfterDial);
        let app = stage.node.start_app().await;
        gate.reached().await;
        stage
            .wait(|view| {
                registrations(view).first().is_some_and(|(client, _)| has_listed(view, *client))
            })
            .await;
        assert!(stage.kubelet.view(|view| view.registers(&gpu())) >= 2);
        gate.open(Verdict::Pass);
        if profile == Profile::K125 {
            // It ends only now, and removes the later client from the map.
            stage.saw(Interleaving::FailedRegisterForgetsClient).await;
        }
        stage.settled_after(0).await;
        app.shut_down().await;
    });
}

/// Up to 1.36 every stream of a resource feeds the same list, and the last message wins. The daemon
/// feeds all streams.
#[test]
fn edge_28_every_open_stream_gets_every_change() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let mut streams = Vec::new();
        for _ in 0..3 {
            let mut plugin = crate::common::dial(&stage.kubelet, &stage.node, &gpu()).await;
            streams.push(
                plugin
                    .list_and_watch(holdfast::kubelet::proto::v1beta1::Empty {})
                    .await
                    .unwrap()
                    .into_inner(),
            );
        }
        let clients: Vec<u64> = stage
            .kubelet
            .view(|view| registrations(view).iter().map(|(client, _)| *client).collect());
        for sick in [0, 1, 0] {
            for stream in &mut streams {
                let healthy = async {
                    loop {
                        let list = stream.message().await.unwrap().unwrap();
                        if list.devices.iter().filter(|device| device.health != "Healthy").count()
                            == sick
                        {
                            break assert_eq!(list.devices.len(), GPUS);
                        }
                    }
                };
                soon("the list", healthy).await;
            }
            let newest_of = |view: &View<'_>, number: u64| {
                let event =
                    view.last(|kind| matches!(kind, EventKind::Listed { client, .. } if *client == number)).map(|event| &event.kind);
                matches!(event, Some(EventKind::Listed { unhealthy, .. }) if *unhealthy == sick)
            };
            stage.wait(|view| clients.iter().all(|client| newest_of(view, *client))).await;
            match sick {
                0 => stage.node.remove_device("gpu", 1),
                _ => stage.node.create_device("gpu", 1),
            }
        }
        app.shut_down().await;
    });
}

/// From 1.37 on a socket in use is refused for ever. No two registrations share a socket, after a
/// settling Register, a restart of the kubelet or a restart of the daemon.
#[test]
fn edge_43_no_socket_is_registered_twice() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let (mut used, mut registered) = (BTreeSet::new(), 0);
        for _ in 0..2 {
            let app = stage.start_app().await;
            for _ in 0..2 {
                let now = stage.kubelet.view(registrations);
                registered += now.len();
                used.extend(now.into_iter().map(|(_, endpoint)| endpoint));
                stage.kubelet.restart().await.unwrap();
                stage.settled_after(0).await;
            }
            let now = stage.kubelet.view(registrations);
            registered += now.len();
            used.extend(now.into_iter().map(|(_, endpoint)| endpoint));
            app.shut_down().await;
            stage.kubelet.restart().await.unwrap();
        }
        assert_eq!(used.len(), registered);
        assert_eq!(
            count(&stage.kubelet, |kind| matches!(kind, EventKind::RegisterFailed { .. })),
            0
        );
    });
}

/// A kubelet that hangs up between the options and the lists sends no other signal, and would not
/// connect again: registration gets a message about that connection, and about no other.
#[test]
fn a_connection_that_ends_before_list_and_watch_is_reported() {
    crate::common::run(async {
        let node = Node::with(&[("gpu", GPUS)]);
        let app = node.start_app().await;
        let ((early_close, mut early_closes), (ended, mut ends)) =
            (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let alone = Alone::serve(&node, &app, |shared| {
            shared.closed_early = Mailbox::new(Heard(early_close));
            shared.ended = Mailbox::new(Heard(ended));
        });
        let mut lasting = DevicePluginClient::new(alone.connect(&node, 7).await);
        lasting.get_device_plugin_options(api::Empty {}).await.unwrap();
        let mut lists = lasting.list_and_watch(api::Empty {}).await.unwrap().into_inner();
        assert_eq!(lists.message().await.unwrap().unwrap().devices.len(), GPUS);
        drop((lists, lasting));
        let StreamEnded { resource, registration } =
            soon("the end of the stream", ends.recv()).await.unwrap();
        assert_eq!((resource, registration), (gpu(), 7));

        let mut brief = DevicePluginClient::new(alone.connect(&node, 8).await);
        brief.get_device_plugin_options(api::Empty {}).await.unwrap();
        drop(brief);
        let ClosedEarly { resource, registration } =
            soon("the end of the connection", early_closes.recv()).await.unwrap();
        assert_eq!((resource, registration), (gpu(), 8));
        assert!(
            early_closes.try_recv().is_err() && ends.try_recv().is_err(),
            "each is reported once"
        );
        app.shut_down().await;
    });
}

/// A kubelet of another version replaces the node's kubelet. The daemon behaves the same with each
/// version.
#[test]
fn edge_44_a_kubelet_of_another_version_may_replace_the_running_one() {
    crate::common::run(async {
        let mut stage = Stage::new(Profile::K125).await;
        let app = stage.start_app().await;
        let pod = stage.admit_one("lasting", 1).await;
        for profile in PROFILES.into_iter().skip(1).chain(PROFILES) {
            stage.kubelet.stop();
            let config = KubeletConfig {
                profile,
                hooks: stage.hooks.clone(),
                ..stage.node.kubelet_config()
            };
            stage.kubelet = Kubelet::start(config).await.unwrap();
            stage.settled_after(0).await;
            stage.wait(|view| view.is_settled()).await;
            stage.admit_one("next", 1).await;
            assert!(
                stage.node.grants().iter().any(|grant| grant.alloc_id == alloc_id(&pod, "main"))
            );
        }
        app.shut_down().await;
    });
}
