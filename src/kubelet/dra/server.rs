//! Answers on both sockets of the driver.

use super::registration::Notice;
use super::sockets::{DraSocket, Listeners, Listening};
use super::{Claims, health, plugin, registration};
use crate::kubelet::api;
use crate::kubelet::services::Services;
use crate::kubelet::tracked_stream::TrackedStream;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, watch};

/// Connections of one socket. A kubelet has one; more wait in the socket's queue.
pub(super) const CONNECTIONS_MAX: usize = 16;

/// What is called with a connection that ends.
pub type OnEnd = Arc<dyn Fn() + Send + Sync>;

/// What a server has to know so that another process can continue with its connections.
#[derive(Clone)]
pub struct Tracking {
    /// Tracks a connection. The second value lives as long as the connection.
    pub track: Arc<dyn Fn(UnixStream, OnEnd) -> TrackedStream + Send + Sync>,
    /// Becomes true when this instance ends or hands over. Later connections wait in the queues of
    /// the sockets, for another process.
    pub leaving: watch::Receiver<bool>,
}

impl Tracking {
    /// For a server whose connections no other process continues with.
    #[must_use]
    pub fn none() -> Self {
        let track = |stream, on_end| TrackedStream::new(stream, Arc::default(), on_end);
        Tracking { track: Arc::new(track), leaving: watch::channel(false).1 }
    }
}

impl fmt::Debug for Tracking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracking").field("leaving", &self.leaving).finish_non_exhaustive()
    }
}

/// The services of the driver, on both sockets. Dropping it closes them and removes their files.
#[derive(Debug)]
pub struct Server {
    service: Served,
    registration: Served,
    notices: watch::Receiver<Option<Notice>>,
}

/// The server of one socket.
#[derive(Debug)]
struct Served {
    socket: Arc<Listening>,
    close: watch::Sender<bool>,
    /// Whether the file stays when it is closed.
    keeps_file: AtomicBool,
}

impl Server {
    /// Answers with `claims`. Must be called inside a tokio runtime.
    #[must_use]
    pub fn start<C: Claims>(listeners: Listeners, claims: &C, tracking: &Tracking) -> Self {
        let (notify, notices) = watch::channel(None);
        let endpoint = listeners.service.path.to_string_lossy().into_owned();
        let service = Served::start(listeners.service, tracking, |closed| {
            plugin::serve(claims, health::serve(claims, closed, Services::default()))
        });
        let registration = Served::start(listeners.registration, tracking, |_| {
            registration::serve(endpoint, notify, Services::default())
        });
        Server { service, registration, notices }
    }

    /// The kubelet's reports about the registration; `None` until the first one.
    #[must_use]
    pub fn notices(&self) -> watch::Receiver<Option<Notice>> {
        self.notices.clone()
    }

    /// Whether the files of both sockets are there. A kubelet that starts finds the driver by them.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.service.socket.has_file() && self.registration.socket.has_file()
    }

    /// Copies of both sockets, for another process. This one continues to serve.
    ///
    /// # Errors
    /// If the process cannot open more descriptors.
    pub fn copies(&self) -> std::io::Result<[(DraSocket, OwnedFd); 2]> {
        let copy = |served: &Served| served.socket.listener.as_fd().try_clone_to_owned();
        Ok([
            (DraSocket::Service, copy(&self.service)?),
            (DraSocket::Registration, copy(&self.registration)?),
        ])
    }

    /// Ends: calls in flight are answered, and the health streams end. The kubelet forgets the
    /// driver, unless `keep_files`: then another process has the sockets. Returns a channel for
    /// each socket that closes when its server has ended.
    #[must_use]
    pub fn release(self, keep_files: bool) -> [watch::Sender<bool>; 2] {
        [&self.registration, &self.service].map(|served| {
            served.keeps_file.store(keep_files, Ordering::Relaxed);
            served.close();
            served.close.clone()
        })
    }
}

impl Drop for Server {
    /// The registration socket first, so that no new call comes.
    fn drop(&mut self) {
        self.registration.close();
        self.service.close();
    }
}

impl Served {
    fn start(
        socket: Listening,
        Tracking { track, leaving }: &Tracking,
        services: impl FnOnce(watch::Receiver<bool>) -> Services,
    ) -> Self {
        let (close, mut closed) = watch::channel(false);
        let services = services(closed.clone());
        let socket = Arc::new(socket);
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let (track, mut leaving) = (Arc::clone(track), leaving.clone());
        let left = async move {
            // An error means that no other process follows.
            if leaving.wait_for(|leaving| *leaving).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let accepted = Arc::clone(&socket.listener).incoming().take_until(left);
        let tracked = accepted.and_then(move |stream| {
            let (connections, track) = (Arc::clone(&connections), Arc::clone(&track));
            async move {
                let permit = connections.acquire_owned().await.map_err(std::io::Error::other)?;
                // Kept with the connection, and never called for a kubelet that reads no lists.
                let held: OnEnd = Arc::new(move || {
                    let _held = &permit;
                });
                Ok(track(stream, held))
            }
        });
        // A server whose incoming stream ends would send GOAWAY on each connection.
        let incoming = tracked.chain(stream::pending());
        let closed = async move {
            // An error means that the daemon is ending.
            drop(closed.wait_for(|closed| *closed).await);
        };
        let incoming = Box::pin(incoming);
        let server =
            api::server().serve_with_incoming_shutdown(services, incoming, Box::pin(closed));
        let path = socket.path.clone();
        tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(path = %path.display(), %error, "gRPC server of a DRA socket failed");
            }
        });
        Served { socket, close, keeps_file: AtomicBool::new(false) }
    }

    /// Removes the file unless it is kept, and stops to accept connections and calls.
    fn close(&self) {
        if !self.close.send_replace(true) && !self.keeps_file.load(Ordering::Relaxed) {
            self.socket.remove();
        }
    }
}
