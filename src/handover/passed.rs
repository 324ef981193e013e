//! What the kubelet has open, as descriptors that go from one process to another.
//!
//! The kubelet takes the end of a connection for the loss of its devices. A connection that is open in two processes ends when both
//! have closed it. So the kubelet does not notice that one of them ends, whichever does and whenever.

use crate::domain::ResourceName;
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What a descriptor is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Label {
    /// A listening socket. The kubelet dials it again when a connection on it takes no more calls.
    Socket(ResourceName),
    /// A connection of the kubelet.
    Connection {
        /// The resource of its socket.
        resource: ResourceName,
        /// The HTTP/2 stream of the lists, 0 where none are read.
        lists: u32,
    },
}

/// Descriptors with their labels.
#[derive(Debug, Default)]
pub struct PassedFds(pub Vec<(Label, OwnedFd)>);

impl PassedFds {
    /// What came with a message, in the order of its labels. `None` when a descriptor is missing: a security module can hinder that, as
    /// SELinux does between containers of different categories. Then nothing tells which is which.
    #[must_use]
    pub fn of(labels: Vec<Label>, fds: Vec<OwnedFd>) -> Option<Self> {
        if labels.len() == fds.len() {
            return Some(PassedFds(labels.into_iter().zip(fds).collect()));
        }
        tracing::warn!(
            sent = labels.len(),
            received = fds.len(),
            "connections did not arrive; the kubelet may notice the end of the old instance"
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

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.iter().filter(|(label, _)| matches!(label, Label::Connection { .. })).count()
    }

    /// Ends the connections, also where another process holds them too: what the kubelet has asked fails, and it sees that the devices are gone.
    pub fn end(self) {
        for (label, fd) in self.0 {
            if let Label::Connection { .. } = label {
                // One that has ended already is as good.
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
    fn what_does_not_arrive_whole_is_nothing_and_an_end_is_seen_whoever_else_holds_the_connection() {
        let label = Label::Connection { resource: "example.com/gpu".parse().unwrap(), lists: 3 };
        let (ours, mut kubelet) = UnixStream::pair().unwrap();
        assert!(PassedFds::of(vec![label.clone()], vec![]).is_none());
        let elsewhere = ours.try_clone().unwrap();
        let passed = PassedFds::of(vec![label.clone()], vec![ours.into()]).unwrap();
        assert_eq!((passed.labels(), passed.fds().len(), passed.connections()), (vec![label], 1, 1));
        passed.end();
        assert_eq!(kubelet.read(&mut [0]).unwrap(), 0);
        drop(elsewhere);
    }
}
