//! Labels of the node choose its configuration: from the API server, and from a file.

use crate::common::{Daemon, Node, Unpolled, count, name, offered, resource, run, soon};
use holdfast::domain::ResourceName;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet};
use nix::sys::signal::Signal;
use std::path::Path;

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

fn nic() -> ResourceName {
    name("example.com/nic")
}

/// A node with two devices of each kind. Its adapters are offered only with the label `role=nic`.
fn node() -> Node {
    let node = Node::with(&[("gpu", 2)]);
    (0..2).for_each(|index| node.create_device("nic", index));
    node
}

fn configure(node: &Node, cluster: &str) {
    node.write_config(&format!(
        "[telemetry]\nlisten = \"off\"\n[cluster]\n{cluster}{}[[node]]\nmatch.label = {{ role = \"nic\" }}\n{}",
        resource("gpu"),
        resource("nic").replace("[[resource]]", "[[node.resource]]")
    ));
}

/// The daemon of the node `gpu-7`.
fn start(node: &Node) -> Daemon {
    Daemon::spawn(node.command(&["run"]).env("NODE_NAME", "gpu-7"))
}

/// The ends of the kubelet's streams of a resource.
fn ends(kubelet: &Kubelet, resource: &ResourceName) -> usize {
    count(kubelet, |kind| {
        matches!(kind, EventKind::StreamEnded { .. }) && kind.resource() == Some(resource)
    })
}

async fn stop(mut daemon: Daemon) {
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.ended().await.success());
}

/// Replaces a file at once.
fn replace(file: &Path, text: &str) {
    let fresh = file.with_extension("fresh");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(fresh, file).unwrap();
}

#[test]
fn another_file_of_labels_is_a_reload_and_an_unreadable_one_changes_nothing() {
    run(async {
        let node = node();
        let labels = node.path("etc/labels");
        replace(&labels, "role=\"\"\n");
        configure(&node, &format!("node_labels = {:?}\n", labels.display().to_string()));
        let kubelet = node.start_kubelet().await;
        let daemon = start(&node);
        offered(&kubelet, &gpu(), 2).await;
        let unpolled = Unpolled::begin().await;
        replace(&labels, "role=nic\n");
        offered(&kubelet, &nic(), 2).await;
        unpolled.end("the reload");
        replace(&labels, "this is no file of labels\n");
        daemon.logged("cannot read the labels of this node").await;

        // A reload with a wrong file keeps the configuration, and is tried again at the next label.
        let valid = std::fs::read_to_string(node.config_file()).unwrap();
        node.write_config("[telemetry]\nlisten = 1\n");
        replace(&labels, "role=none\n");
        daemon.logged("configuration rejected; keeping the previous one").await;
        offered(&kubelet, &nic(), 2).await;
        node.write_config(&valid);
        replace(&labels, "role=other\n");
        offered(&kubelet, &nic(), 0).await;
        assert_eq!(ends(&kubelet, &gpu()), 0);
        stop(daemon).await;
    });
}

#[cfg(feature = "cluster")]
mod api {
    use super::*;
    use holdfast::lab::sim::api_server::ApiServer;

    fn with_api(node: &Node, server: &ApiServer) {
        let kubeconfig = server.kubeconfig(&node.path("etc"), "token").unwrap();
        let path = kubeconfig.display().to_string();
        configure(node, &format!("node_labels = \"api\"\ncredentials = {path:?}\n"));
    }

    #[test]
    fn a_changed_label_changes_the_resources_at_once() {
        run(async {
            let node = node();
            let server = ApiServer::start("gpu-7", &[("role", "gpu")]).await.unwrap();
            with_api(&node, &server);
            let kubelet = node.start_kubelet().await;
            let daemon = start(&node);
            offered(&kubelet, &gpu(), 2).await;
            soon("a watch", server.served().wait_for(|served| served.watches > 0)).await.unwrap();
            // A label that no section compares leads to no reload.
            server.set_labels(&[("role", "gpu"), ("other", "1")]);
            server.set_labels(&[("role", "nic"), ("other", "1")]);
            offered(&kubelet, &nic(), 2).await;
            server.set_labels(&[]);
            offered(&kubelet, &nic(), 0).await;
            let reloads = daemon.log();
            let reloads = reloads.iter().filter(|line| line.contains("configuration reloaded"));
            assert_eq!(reloads.count(), 2);
            assert_eq!(ends(&kubelet, &gpu()), 0);
            stop(daemon).await;
        });
    }

    #[test]
    fn a_restart_without_the_api_server_has_the_same_labels() {
        run(async {
            let node = node();
            let server = ApiServer::start("gpu-7", &[("role", "nic")]).await.unwrap();
            with_api(&node, &server);
            let kubelet = node.start_kubelet().await;
            let daemon = start(&node);
            offered(&kubelet, &nic(), 2).await;
            // The API server fails, and its node is missing: neither changes anything.
            server.delete_node();
            daemon.logged("has no node `gpu-7`").await;
            drop(server);
            stop(daemon).await;
            let daemon = start(&node);
            daemon.logged("ready").await;
            offered(&kubelet, &nic(), 2).await;
            daemon.logged("cannot follow the labels of this node").await;
            let waited = daemon.log().iter().any(|line| line.contains("waiting for the labels"));
            assert!(!waited, "the last labels are known");
            let status = node.json(&["status"]);
            let why = status["labels_not_followed"].as_str().unwrap();
            assert!(why.contains("API server"), "{why}");
            stop(daemon).await;
        });
    }

    #[test]
    fn a_first_start_without_the_api_server_begins_without_the_labels_and_takes_them_later() {
        run(async {
            let node = node();
            let server = ApiServer::start("gpu-7", &[("role", "nic")]).await.unwrap();
            with_api(&node, &server);
            server.refuse(Some((503, None)));
            let kubelet = node.start_kubelet().await;
            let daemon = start(&node);
            daemon.logged("waiting for the labels of this node").await;
            daemon.logged("starting without the labels of this node").await;
            offered(&kubelet, &gpu(), 2).await;
            server.refuse(None);
            offered(&kubelet, &nic(), 2).await;
            stop(daemon).await;

            // The first start of another instance gets them before it offers anything.
            let other = node.another_instance("b");
            let daemon = start(&other);
            offered(&kubelet, &nic(), 2).await;
            daemon.logged("the API server has sent the labels of this node").await;
            let reloaded = daemon.log().iter().any(|line| line.contains("configuration reloaded"));
            assert!(!reloaded, "{:?}", daemon.log());
            stop(daemon).await;
        });
    }
}
