//! Events and the condition of the node, if the configuration switches them on.

use super::wiring::Wiring;
use crate::cluster::{Client, Credentials};
use crate::reporting::{Announcer, Keeper};
use crate::tasks::reporting::ReportingTask;

impl Wiring {
    /// The task that writes them. `None` if both are switched off, or the node has no name.
    pub(super) fn reporting(&self) -> Option<ReportingTask> {
        let config = &self.settings.config;
        let reported = config.reported;
        if !reported.events && !reported.condition {
            return None;
        }
        let Some(node) = config.node.api_name() else {
            let why = "Events and the condition of this node are not written: the name of this \
                       node is unknown; set `NODE_NAME`";
            tracing::warn!("{why}");
            self.publishers.not_reported.send_replace(vec![why.to_owned()]);
            return None;
        };
        let roots = &self.settings.roots;
        let credentials = Credentials::new(&config.credentials, &roots.kubelet, &roots.host);
        // The files were read before the first scan: a failure since then is news.
        let started = self.views.config.borrow().loaded_at;
        Some(ReportingTask {
            client: Client::new(credentials),
            inventory: self.views.inventory.clone(),
            grants: self.views.grants.clone(),
            judgement: self.views.judgement.clone(),
            events: reported.events.then(|| Announcer::new(&node, started)),
            condition: reported.condition.then(|| Keeper::new(&node)),
            problems: self.publishers.not_reported.clone(),
            node,
        })
    }
}
