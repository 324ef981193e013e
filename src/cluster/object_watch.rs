//! The watch of the metadata of one object by its name: a [`Watch`] whose selector is the name.

use super::collection::{Collection, NODES};
use super::credentials::Credentials;
use super::error::ClusterError;
use super::metadata::{Object, ObjectMeta};
use super::watch::{METADATA, Times, Watch, WatchEvent};
use std::time::Duration;

/// What the watch reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The object exists. It is reported at each list and each change, also if its metadata is the
    /// same as before.
    Present(ObjectMeta),
    /// The object does not exist.
    Absent,
    /// The API server could not be used. The watch tries again after the pause.
    Failed {
        /// Why.
        error: ClusterError,
        /// How long.
        pause: Duration,
    },
}

/// The watch of one object.
#[derive(Debug)]
pub struct ObjectWatch {
    name: String,
    watch: Watch<Object>,
}

impl ObjectWatch {
    /// Watches the node of this name. Nothing happens before [`ObjectWatch::next`].
    #[must_use]
    pub fn node(credentials: Credentials, name: &str) -> Self {
        Self::with_times(credentials, name, Times::default())
    }

    pub(super) fn with_times(credentials: Credentials, name: &str, times: Times) -> Self {
        let nodes = Collection::at(NODES).with_field("metadata.name", name);
        ObjectWatch {
            name: name.to_owned(),
            watch: Watch::with(credentials, nodes, METADATA, times),
        }
    }

    /// The next report. Returns within the pause after a failure, otherwise when there is something
    /// to report. The future may be dropped; the next one continues.
    pub async fn next(&mut self) -> Report {
        match self.watch.next().await {
            WatchEvent::Listed(items, _) => {
                let found = items.into_iter().find(|item| item.metadata.name == self.name);
                found.map_or(Report::Absent, |Object { metadata }| Report::Present(metadata))
            }
            WatchEvent::Added(Object { metadata }) | WatchEvent::Modified(Object { metadata }) => {
                Report::Present(metadata)
            }
            WatchEvent::Deleted(_) => Report::Absent,
            WatchEvent::Failed { error, pause } => Report::Failed { error, pause },
        }
    }
}
