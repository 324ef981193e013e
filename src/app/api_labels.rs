//! The labels of the node from the API server, if the configuration requests them.

use super::Settings;
use crate::cluster::{Credentials, ObjectWatch};
use crate::config::copy_of_labels;
use crate::tasks::api_labels::{ApiLabels, FIRST_WITHIN};
use tokio::sync::watch;

/// The task that follows them. `None` if they are not requested, or the node has no name.
pub(super) fn task(
    settings: &Settings,
    not_followed: watch::Sender<Option<String>>,
) -> Option<ApiLabels> {
    if !settings.config.follows_api_labels() {
        return None;
    }
    let Some(node) = settings.config.node.api_name() else {
        let why = "the name of this node is unknown; set `NODE_NAME`".to_owned();
        tracing::warn!(why, "cannot follow the labels of this node");
        not_followed.send_replace(Some(why));
        return None;
    };
    let roots = &settings.roots;
    let credentials = Credentials::new(&settings.config.credentials, &roots.kubelet, &roots.host);
    Some(ApiLabels {
        watch: ObjectWatch::node(credentials, &node),
        node,
        file: copy_of_labels(&roots.state),
        not_followed,
    })
}

impl Settings {
    /// Chooses the configuration by the first labels of this node. Waits for the API server a short
    /// time if no labels are known yet: later starts use the last ones. Without an answer the
    /// sections that match labels do not apply until the first one.
    pub async fn wait_for_labels(&mut self) {
        if !self.config.compares_unknown_labels() {
            return;
        }
        let Some(task) = task(self, watch::Sender::default()) else { return };
        let within = FIRST_WITHIN.as_secs();
        tracing::info!(within, "waiting for the labels of this node from the API server");
        if !task.first(FIRST_WITHIN).await {
            tracing::warn!(
                "starting without the labels of this node; sections that match labels apply as soon as the API server answers"
            );
            return;
        }
        let previous = self.config.clone();
        match tokio::task::spawn_blocking(move || previous.load_again()).await {
            Ok(Ok(config)) => self.config = config,
            Ok(Err(error)) => {
                tracing::error!(%error, "the configuration for the labels of this node is rejected; starting without it");
            }
            Err(error) => tracing::error!(%error, "cannot read the configuration again"),
        }
    }
}
