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

#[cfg(test)]
#[cfg(feature = "lab")]
#[path = "api_labels_tests.rs"]
mod tests;
