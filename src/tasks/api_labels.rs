//! Keeps a copy of the labels that the node has in the API server.
//!
//! `watcher` notices another copy, and the configuration is chosen again. So an API server that
//! does not answer changes nothing: the last labels stay.

use crate::cluster::{ObjectWatch, Report};
use crate::config::copied_labels;
use crate::host::private::replace_file;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// How long a start without known labels may wait for the API server. systemd starts the kubelet
/// after this daemon, and the API server may be a pod of that kubelet.
pub(crate) const FIRST_WITHIN: Duration = Duration::from_secs(10);

/// The task.
#[derive(Debug)]
pub(crate) struct ApiLabels {
    pub(crate) watch: ObjectWatch,
    /// The node's name in the API server.
    pub(crate) node: String,
    /// The copy.
    pub(crate) file: PathBuf,
    /// Why the labels are not followed at present.
    pub(crate) not_followed: watch::Sender<Option<String>>,
}

impl ApiLabels {
    /// Follows the labels.
    pub(crate) async fn keep(mut self) {
        loop {
            self.step().await;
        }
    }

    /// Waits for the first labels, at most this long. Returns whether there is a copy now.
    pub(crate) async fn first(mut self, within: Duration) -> bool {
        let until_known = async { while !self.step().await {} };
        tokio::time::timeout(within, until_known).await.is_ok()
    }

    /// Processes one report. Returns whether the copy is current.
    async fn step(&mut self) -> bool {
        match self.watch.next().await {
            Report::Present(meta) => {
                let text = copied_labels(&self.node, &meta.labels);
                match self.write(text).await {
                    Ok(true) => tracing::info!(
                        node = self.node,
                        labels = meta.labels.len(),
                        "the API server has sent the labels of this node"
                    ),
                    Ok(false) => {}
                    Err(error) => {
                        let file = self.file.display();
                        self.fails(format!("cannot write `{file}`: {error}"));
                        return false;
                    }
                }
                if self.not_followed.send_replace(None).is_some() {
                    tracing::info!(node = self.node, "the labels of this node are followed again");
                }
                true
            }
            Report::Absent => {
                self.fails(format!(
                    "the API server has no node `{}`; the kubelet has not registered it yet, or \
                     `NODE_NAME` is another name",
                    self.node
                ));
                false
            }
            Report::Failed { error, pause } => {
                tracing::debug!(%error, ?pause, "the API server is tried again later");
                self.fails(error.to_string());
                false
            }
        }
    }

    /// Logs the first failure of several, and publishes the last one.
    fn fails(&self, why: String) {
        if self.not_followed.borrow().is_none() {
            tracing::warn!(
                why,
                "cannot follow the labels of this node; its last known labels stay"
            );
        }
        self.not_followed.send_replace(Some(why));
    }

    /// Writes the copy if it has changed, on another thread than the one that answers the kubelet.
    async fn write(&self, text: String) -> io::Result<bool> {
        let file = self.file.clone();
        let writing = tokio::task::spawn_blocking(move || {
            if std::fs::read(&file).is_ok_and(|known| known == text.as_bytes()) {
                return Ok(false);
            }
            replace_file(&file, text.as_bytes()).map(|()| true)
        });
        writing.await.map_err(io::Error::other)?
    }
}

#[cfg(all(test, feature = "lab"))]
mod tests {
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
}
