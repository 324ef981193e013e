//! The sockets that only root may open: a process that holds many connections there does not affect
//! the kubelet either.

use super::{DEVICES, OWN_DESCRIPTORS, Stage, gpu};
use crate::common::{allocate, dial, offered, run, until};
use holdfast::domain::limits::LISTS_MAX;
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::lab::sim::kubelet::EventKind;
use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tonic::Code;

/// The socket of the only resource.
fn plugin_socket(stage: &Stage) -> PathBuf {
    let mut files: Vec<_> = std::fs::read_dir(stage.node.sockets())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files.pop().unwrap()
}

/// Connections without any bytes sent.
fn connect(socket: &Path, count: usize) -> Vec<UnixStream> {
    (0..count).map(|_| UnixStream::connect(socket).unwrap()).collect()
}

fn lost_streams(stage: &Stage) -> usize {
    stage.daemon.log().iter().filter(|line| line.contains("stream ended")).count()
}

#[test]
fn connections_of_plugin_sockets_are_limited_and_the_kubelets_stays() {
    run(async {
        let stage = Stage::new(256).await;
        let held = connect(&plugin_socket(&stage), 300);
        let most = OWN_DESCRIPTORS + 2 * stage.limits.plugin;
        until("the others closed", || stage.descriptors(), |open| *open <= most).await;
        // The list comes on the stream that the kubelet already has open.
        stage.node.create_device("gpu", DEVICES);
        offered(&stage.kubelet, &gpu(), DEVICES + 1).await;
        allocate(&mut dial(&stage.kubelet, &stage.node, &gpu()).await, &["dev:gpu0"])
            .await
            .unwrap();
        assert_eq!(lost_streams(&stage), 0, "{:#?}", stage.daemon.log());
        assert!(stage.counted("holdfast_connections_evicted_total{socket=\"plugin\"}").await);
        drop(held);
    });
}

#[test]
fn list_streams_of_a_socket_are_limited_until_one_ends() {
    run(async {
        let stage = Stage::new(2048).await;
        let mut streams = Vec::new();
        // The kubelet has one.
        for _ in 1..LISTS_MAX {
            let mut plugin = dial(&stage.kubelet, &stage.node, &gpu()).await;
            let mut stream = plugin.list_and_watch(api::Empty {}).await.unwrap().into_inner();
            assert_eq!(stream.message().await.unwrap().unwrap().devices.len(), DEVICES);
            streams.push(stream);
        }
        let mut plugin = dial(&stage.kubelet, &stage.node, &gpu()).await;
        assert_eq!(
            plugin.list_and_watch(api::Empty {}).await.unwrap_err().code(),
            Code::ResourceExhausted
        );
        stage.node.create_device("gpu", DEVICES);
        offered(&stage.kubelet, &gpu(), DEVICES + 1).await;
        assert_eq!(streams[0].message().await.unwrap().unwrap().devices.len(), DEVICES + 1);
        assert!(
            stage
                .counted("holdfast_requests_refused_total{socket=\"plugin\",reason=\"lists\"}")
                .await
        );
        streams.pop();
        loop {
            match plugin.list_and_watch(api::Empty {}).await {
                Ok(_) => break,
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
        }
        // The kubelet's next socket is one without any such stream.
        stage.kubelet.restart().await.unwrap();
        offered(&stage.kubelet, &gpu(), DEVICES + 1).await;
        let registered = |kind: &EventKind| matches!(kind, EventKind::Registered { .. });
        assert!(
            stage.kubelet.view(|view| view
                .events()
                .iter()
                .filter(|event| registered(&event.kind))
                .count())
                >= 2
        );
    });
}

/// A request has each id of the longest list at most twice.
#[test]
fn an_oversized_call_is_refused() {
    run(async {
        let stage = Stage::new(2048).await;
        let mut plugin =
            dial(&stage.kubelet, &stage.node, &gpu()).await.max_encoding_message_size(usize::MAX);
        let huge = vec!["x".repeat(1 << 20); 9];
        let refused = plugin
            .get_preferred_allocation(api::PreferredAllocationRequest {
                container_requests: vec![api::ContainerPreferredAllocationRequest {
                    available_device_i_ds: huge,
                    must_include_device_i_ds: vec![],
                    allocation_size: 1,
                }],
            })
            .await
            .map_or_else(|status| status.code(), |_| Code::Ok);
        assert!(matches!(refused, Code::OutOfRange | Code::ResourceExhausted), "{refused:?}");
        allocate(&mut plugin, &["dev:gpu0"]).await.unwrap();
    });
}

#[test]
fn connections_of_control_and_handover_sockets_are_limited_and_still_answered() {
    run(async {
        let stage = Stage::new(256).await;
        let run_dir = stage.node.path("run");
        let held: Vec<_> = ["control.sock", "handover.sock"]
            .map(|name| connect(&run_dir.join(name), 60))
            .into_iter()
            .flatten()
            .collect();
        let most = OWN_DESCRIPTORS + stage.limits.control + stage.limits.handover;
        until("the others closed", || stage.descriptors(), |open| *open <= most).await;
        let status = stage.node.output(&["status"]);
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
        let mut offer = String::new();
        BufReader::new(UnixStream::connect(run_dir.join("handover.sock")).unwrap())
            .read_line(&mut offer)
            .unwrap();
        assert!(offer.contains("\"message\":\"offer\""), "{offer}");
        for socket in ["control", "handover"] {
            assert!(
                stage
                    .counted(&format!("holdfast_connections_evicted_total{{socket=\"{socket}\"}}"))
                    .await,
                "{socket}"
            );
        }
        drop(held);
    });
}
