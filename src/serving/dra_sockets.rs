//! The sockets of the DRA driver: those that this instance serves, and those that an earlier
//! instance has passed on.
//!
//! They have the same paths in every instance, so that the kubelet never registers the driver
//! again. The next instance continues with the open sockets, and calls wait in their queues until
//! then.

use crate::handover::Label;
use crate::kubelet::dra::{DraSocket, Server, remove_passed};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, watch};

/// The sockets.
#[derive(Debug, Default)]
pub(crate) struct DraSockets {
    state: Mutex<State>,
    /// Notified when an earlier instance's sockets have been passed on.
    passed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Whether this instance has a DRA driver.
    is_served: bool,
    server: Option<Server>,
    /// Sockets that no server has yet.
    passed: Vec<(DraSocket, OwnedFd)>,
}

/// For the driver.
#[cfg(feature = "cluster")]
impl DraSockets {
    /// Notes that this instance has a DRA driver.
    pub(crate) fn set_served(&self) {
        self.state().is_served = true;
    }

    /// Keeps the server until this instance ends. The former one, if any, closes its sockets.
    pub(crate) fn set_server(&self, server: Option<Server>) {
        let former = std::mem::replace(&mut self.state().server, server);
        drop(former);
    }

    /// Whether the kubelet finds the driver: there is a server, and the files of its sockets.
    pub(crate) fn is_reachable(&self) -> bool {
        self.state().server.as_ref().is_some_and(Server::is_reachable)
    }

    /// Waits until there are sockets of an earlier instance.
    pub(crate) async fn passed(&self) {
        self.passed.notified().await;
    }

    /// The sockets of an earlier instance. They end when they are dropped.
    pub(crate) fn take_passed(&self) -> Vec<(DraSocket, OwnedFd)> {
        std::mem::take(&mut self.state().passed)
    }
}

impl DraSockets {
    /// Every change is a single step, so a panic elsewhere cannot leave one half done.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this instance has a DRA driver.
    pub(crate) fn is_served(&self) -> bool {
        self.state().is_served
    }

    /// Keeps an earlier instance's sockets for the driver.
    pub(crate) fn pass(&self, sockets: Vec<(DraSocket, OwnedFd)>) {
        if !sockets.is_empty() {
            self.state().passed = sockets;
            self.passed.notify_one();
        }
    }

    /// Removes the files of the sockets among these, which this instance does not serve. Returns
    /// the others.
    pub(crate) fn remove(&self, unserved: Vec<(Label, OwnedFd)>) -> Vec<(Label, OwnedFd)> {
        let (mut sockets, mut others) = (Vec::new(), Vec::new());
        for (label, fd) in unserved {
            match label {
                Label::DraSocket(socket) => sockets.push((socket, fd)),
                _ => others.push((label, fd)),
            }
        }
        remove_passed(&sockets);
        others
    }

    /// Copies of the sockets, for another process.
    pub(super) fn copies(&self) -> Vec<(Label, OwnedFd)> {
        let state = self.state();
        let copies = match &state.server {
            Some(server) => server.copies().map(Vec::from),
            None => {
                let copy = |(of, fd): &(DraSocket, OwnedFd)| Ok((*of, fd.try_clone()?));
                state.passed.iter().map(copy).collect()
            }
        };
        match copies {
            Ok(copies) => copies.into_iter().map(|(of, fd)| (Label::DraSocket(of), fd)).collect(),
            Err(error) => {
                tracing::warn!(%error, "cannot copy the sockets of the DRA driver for the next process");
                Vec::new()
            }
        }
    }

    /// Ends the server. With `keep_files`, another process has copies of the sockets. Returns a
    /// channel for each socket that closes when its server has ended.
    pub(super) fn release(&self, keep_files: bool) -> Vec<watch::Sender<bool>> {
        let server = self.state().server.take();
        server.map(|server| Vec::from(server.release(keep_files))).unwrap_or_default()
    }
}
