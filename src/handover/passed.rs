//! The kubelet's connections and our sockets, as descriptors that pass from one process to another.
//!
//! The kubelet treats the end of a connection as the loss of its devices. A connection that is open
//! in two processes ends when both have closed it. So the kubelet does not notice that one of the
//! two processes ends.

use crate::domain::ResourceName;
use crate::kubelet::dra::DraSocket;
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What a descriptor is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Label {
    /// A listening socket. The kubelet dials it again when a connection on it accepts no further
    /// calls (GOAWAY).
    Socket(ResourceName),
    /// A connection that the kubelet has opened.
    Connection {
        /// The resource of the socket that accepted it.
        resource: ResourceName,
        /// The HTTP/2 stream id of ListAndWatch, 0 if there is none.
        lists: u32,
    },
    /// A listening socket of the DRA driver.
    DraSocket(DraSocket),
    /// A connection that the kubelet has opened to the DRA driver.
    DraConnection,
}

impl Label {
    /// Whether it is a connection, and no listening socket.
    #[must_use]
    pub fn is_connection(&self) -> bool {
        matches!(self, Label::Connection { .. } | Label::DraConnection)
    }
}

/// Descriptors with their labels.
#[derive(Debug, Default)]
pub struct PassedFds(pub Vec<(Label, OwnedFd)>);

impl PassedFds {
    /// The descriptors that came with a message, in the order of its labels. `None` when one is
    /// missing: a security module can block it, as SELinux does between containers of different
    /// categories. The remaining ones cannot be matched to their labels then.
    #[must_use]
    pub fn of(labels: Vec<Label>, fds: Vec<OwnedFd>) -> Option<Self> {
        if labels.len() == fds.len() {
            return Some(PassedFds(labels.into_iter().zip(fds).collect()));
        }
        tracing::warn!(
            sent = labels.len(),
            received = fds.len(),
            "not every descriptor arrived; the kubelet may notice the end of the old instance"
        );
        None
    }

    /// The labels, in the order of the descriptors.
    #[must_use]
    pub fn labels(&self) -> Vec<Label> {
        self.0.iter().map(|(label, _)| label.clone()).collect()
    }

    /// The descriptors.
    #[must_use]
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(|(_, fd)| fd.as_fd()).collect()
    }

    /// The number of connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.iter().filter(|(label, _)| label.is_connection()).count()
    }

    /// Shuts the connections down, also for other processes that hold them. The kubelet's
    /// unanswered calls fail, and it sees that the devices are absent.
    pub fn end(self) {
        for (label, fd) in self.0 {
            if label.is_connection() {
                // One that has ended already needs no shutdown.
                let _ended = shutdown(fd, Shutdown::Both);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    #[test]
    fn an_incomplete_set_is_dropped_and_end_closes_connections_that_others_hold() {
        let label = Label::Connection { resource: "example.com/gpu".parse().unwrap(), lists: 3 };
        let (ours, mut kubelet) = UnixStream::pair().unwrap();
        assert!(PassedFds::of(vec![label.clone()], vec![]).is_none());
        let elsewhere = ours.try_clone().unwrap();
        let passed = PassedFds::of(vec![label.clone()], vec![ours.into()]).unwrap();
        assert_eq!(
            (passed.labels(), passed.fds().len(), passed.connections()),
            (vec![label], 1, 1)
        );
        passed.end();
        assert_eq!(kubelet.read(&mut [0]).unwrap(), 0);
        drop(elsewhere);
    }
}
