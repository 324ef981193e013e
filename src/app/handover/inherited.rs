//! What the kubelet has open at the former instance, and this one holds open too.
//!
//! The kubelet takes the end of a connection for the loss of its devices. A connection that is open in two processes ends when both have
//! closed it: so the kubelet does not notice whether the former instance leaves or dies, and loses nothing until this one has
//! registered. What it has asked one that is dead it asks again, here (`kubelet/go_away.rs`).

use crate::domain::ResourceName;
use crate::kubelet::go_away;
use crate::messages::{Adopt, Mailbox};
use crate::serving::{Connection, Connections};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long what the kubelet has asked a dead instance may wait for this one to start: as long as a request waits anywhere in a handover.
const STARTED_WITHIN: Duration = Duration::from_secs(10);

/// Connections, and the sockets that they were made on.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: BTreeMap<ResourceName, Arc<OwnedFd>>,
    connections: Vec<Connection>,
    /// Dropped, it ends what is answered on those sockets.
    adopted: Option<watch::Sender<bool>>,
}

impl Inherited {
    /// Adds what an instance has sent: `files` are the sockets of these resources, in their order, and then the connections, with these
    /// streams of lists.
    pub(super) fn add(&mut self, sockets: Vec<ResourceName>, lists: Vec<u32>, files: Vec<OwnedFd>) {
        if files.len() < sockets.len() + lists.len() {
            // A security module can hinder that, as SELinux does between containers of different categories.
            tracing::warn!("the former instance's connections did not arrive; the kubelet will notice its end");
        }
        let mut files = files.into_iter().map(Arc::new);
        self.sockets.extend(sockets.into_iter().zip(files.by_ref()));
        self.connections.extend(lists.into_iter().zip(files).map(|(lists, file)| Connection { file, lists }));
    }

    /// Whether there is nothing that could be missed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// The former instance has died: what the kubelet has asked there it asks here.
    pub(super) fn answer(&mut self, adopt: &Mailbox<Adopt>) {
        if self.adopted.is_some() || self.connections.is_empty() {
            return;
        }
        tracing::info!("the former instance has ended; what the kubelet asked there is answered here");
        let (adopted, close) = watch::channel(false);
        self.adopted = Some(adopted);
        for (resource, listener) in std::mem::take(&mut self.sockets) {
            adopt.tell(Adopt { resource, listener, close: close.clone() });
        }
        for connection in &self.connections {
            // One that has ended meanwhile needs nothing.
            if let Err(error) = go_away::ask_again(&connection.file, connection.lists) {
                tracing::debug!(%error, "a connection of the former instance has ended");
            }
        }
    }

    /// Has the kubelet see the end of the connections, unless somebody else holds them too.
    pub(super) fn let_go(&mut self) {
        self.connections.clear();
    }

    /// Leaves the connections open for as long as this instance lives.
    pub(super) fn keep(&self, connections: &Connections) {
        connections.hold(self.connections.iter().cloned());
    }

    /// Waits for this instance to start. When the former one does not live and answer, nothing is held for longer than the kubelet may wait
    /// for an answer: its node stands still.
    pub async fn until_started<T>(&mut self, started: impl Future<Output = T>, lives: bool) -> T {
        tokio::pin!(started);
        tokio::select! {
            started = &mut started => return started,
            () = tokio::time::sleep(STARTED_WITHIN), if !lives && !self.is_empty() => {
                tracing::warn!("this instance does not start in time; the kubelet sees that the former one is gone");
                *self = Inherited::default();
            }
        }
        started.await
    }
}
