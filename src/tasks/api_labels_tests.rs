//! The copy of the labels against a simulated API server.

use super::*;
use crate::cluster::Credentials;
use crate::domain::ApiCredentials;
use crate::lab::sim::api_server::ApiServer;
use std::path::Path;

/// The task for the node `gpu-7`, with its files in `dir`.
fn task(dir: &Path, kubeconfig: &Path) -> ApiLabels {
    let configured = ApiCredentials::Kubeconfig(kubeconfig.to_owned());
    let credentials = Credentials::new(&configured, dir, dir);
    ApiLabels {
        watch: ObjectWatch::node(credentials, "gpu-7"),
        node: "gpu-7".into(),
        file: dir.join("node/labels"),
        not_followed: watch::Sender::default(),
    }
}

fn read(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("node/labels")).unwrap_or_default()
}

#[tokio::test]
async fn the_copy_has_the_last_labels_and_stays_without_the_node_or_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[("role", "a")]).await.unwrap();
    let mut task = task(dir.path(), &server.kubeconfig(dir.path(), "t").unwrap());
    assert!(task.step().await);
    assert_eq!(read(dir.path()), "# Labels of the node gpu-7: 1\nrole=a\n");
    server.set_labels(&[("role", "b")]);
    assert!(task.step().await);
    let last = "# Labels of the node gpu-7: 1\nrole=b\n";
    assert_eq!(read(dir.path()), last);
    server.delete_node();
    assert!(!task.step().await);
    assert!(task.not_followed.borrow().as_ref().unwrap().contains("has no node `gpu-7`"));
    drop(server);
    assert!(!task.step().await);
    assert_eq!(read(dir.path()), last);
}

#[tokio::test]
async fn a_first_start_waits_for_the_server_within_its_bound_only() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[("role", "a")]).await.unwrap();
    let kubeconfig = server.kubeconfig(dir.path(), "t").unwrap();
    server.refuse(Some((503, None)));
    assert!(!task(dir.path(), &kubeconfig).first(Duration::from_millis(100)).await);
    assert_eq!(read(dir.path()), "");
    server.refuse(None);
    assert!(task(dir.path(), &kubeconfig).first(FIRST_WITHIN).await);
    assert!(read(dir.path()).ends_with("role=a\n"));
}

#[tokio::test]
async fn the_same_labels_are_not_written_again() {
    use std::os::unix::fs::MetadataExt as _;
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[("role", "a")]).await.unwrap();
    let mut task = task(dir.path(), &server.kubeconfig(dir.path(), "t").unwrap());
    assert!(task.step().await);
    let inode = || std::fs::metadata(dir.path().join("node/labels")).unwrap().ino();
    let before = inode();
    server.set_labels(&[("role", "a")]);
    assert!(task.step().await);
    assert_eq!(inode(), before);
}
