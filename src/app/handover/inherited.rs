//! What the kubelet has open at the former instance, and this one holds open too.
//!
//! The kubelet takes the end of a connection for the loss of its devices. A connection that is open in two processes ends when both have
//! closed it: so the kubelet does not notice whether the former instance leaves or dies, and loses nothing until this one has
//! registered. What it has asked one that is dead it asks again, here (`kubelet/go_away.rs`).

use super::take::Former;
use crate::domain::ResourceName;
use crate::kubelet::go_away;
use crate::messages::{Adopt, Mailbox};
use crate::serving::{Connection, Connections};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long what the kubelet has asked a dead instance may wait for this one to start: as long as a request waits anywhere in a handover.
const STARTED_WITHIN: Duration = Duration::from_secs(10);

/// Connections, and the sockets that they were made on.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: Vec<(ResourceName, Arc<OwnedFd>)>,
    connections: Vec<Connection>,
    /// When nothing is held any more if this instance has not started: the former one is dead.
    until: Option<Instant>,
    /// Dropped, it ends what is answered on those sockets.
    adopted: Option<watch::Sender<bool>>,
}

impl Inherited {
    /// What an instance has sent, in place of what one has sent before: `files` are sockets of these resources, in their order, and then the
    /// connections, with these streams of lists.
    pub(super) fn arrived(&mut self, resources: Vec<ResourceName>, lists: Vec<u32>, files: Vec<OwnedFd>) {
        if files.len() != resources.len() + lists.len() {
            // A security module can hinder that, as SELinux does between containers of different categories. What is which is not known then.
            return tracing::warn!("connections of the former instance did not arrive; the kubelet may notice its end");
        }
        let mut files = files.into_iter().map(Arc::new);
        let sockets = resources.into_iter().zip(files.by_ref()).collect();
        let connections = lists.into_iter().zip(files).map(|(lists, file)| Connection { file, lists }).collect();
        *self = Inherited { sockets, connections, until: None, adopted: None };
    }

    /// What the kubelet has open there is about these resources.
    pub(super) fn resources(&self) -> impl Iterator<Item = &ResourceName> {
        self.sockets.iter().map(|(resource, _)| resource)
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
        for (resource, listener) in &self.sockets {
            adopt.tell(Adopt { resource: resource.clone(), listener: Arc::clone(listener), close: close.clone() });
        }
        // One that has ended meanwhile needs nothing, and one that takes no more bytes has to end: what was asked on it must not wait for ever.
        let is_told = |connection: &Connection| go_away::ask_again(&connection.file, connection.lists);
        self.connections.retain(|connection| {
            is_told(connection).inspect_err(|error| tracing::debug!(%error, "a connection of the former instance ends")).is_ok()
        });
    }

    /// Has the kubelet see the end of the connections, unless somebody else holds them too.
    pub(super) fn let_go(&mut self) {
        self.connections.clear();
        self.sockets.clear();
    }

    /// Leaves the connections open for as long as this instance lives. They stay known here too: the former one may still die.
    pub(super) fn keep(&self, connections: &Connections) {
        connections.hold(self.connections.iter().cloned());
    }

    /// Waits for this instance to start. From the end of the former one on nothing is held for longer than the kubelet may wait for an
    /// answer: its node stands still.
    pub async fn until_started<T>(&mut self, started: impl Future<Output = T>, former: Option<&mut Former>) -> T {
        tokio::pin!(started);
        let until = match former {
            None => Some(*self.until.get_or_insert_with(|| Instant::now() + STARTED_WITHIN)),
            Some(_) => None,
        };
        let too_late = async {
            if let Some(former) = former {
                former.gone().await;
            }
            tokio::time::sleep_until(until.unwrap_or_else(|| Instant::now() + STARTED_WITHIN)).await;
        };
        tokio::select! {
            started = &mut started => return started,
            () = too_late, if !self.is_empty() => {
                tracing::warn!("this instance does not start in time; the kubelet sees that the former one is gone");
                *self = Inherited::default();
            }
        }
        started.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_arrive_whole_leaves_what_came_before_and_what_does_takes_its_place() {
        let file = || OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
        let gpu = |count| vec!["example.com/gpu".parse::<ResourceName>().unwrap(); count];
        let mut inherited = Inherited::default();
        inherited.arrived(gpu(1), vec![3], vec![file()]);
        assert!(inherited.is_empty() && inherited.resources().next().is_none());
        let count = |inherited: &Inherited| (inherited.sockets.len(), inherited.connections.iter().map(|of| of.lists).collect::<Vec<_>>());
        inherited.arrived(gpu(1), vec![3], vec![file(), file()]);
        assert_eq!(count(&inherited), (1, vec![3]));
        for files in [vec![], vec![file()], vec![file(), file(), file()]] {
            inherited.arrived(gpu(1), vec![5], files);
            assert_eq!(count(&inherited), (1, vec![3]));
        }
        inherited.arrived(gpu(2), vec![5, 7], vec![file(), file(), file(), file()]);
        assert_eq!(count(&inherited), (2, vec![5, 7]));
    }
}
