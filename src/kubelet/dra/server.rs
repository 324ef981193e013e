//! Answers on both sockets of the driver.

use super::registration::Notice;
use super::sockets::{Listeners, Listening};
use super::{Claims, health, plugin, registration};
use crate::kubelet::api;
use crate::kubelet::services::Services;
use crate::kubelet::tracked_stream::TrackedStream;
use futures_util::TryStreamExt as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

/// Connections of one socket. A kubelet has one; more wait in the socket's queue.
pub(super) const CONNECTIONS_MAX: usize = 16;

/// How long a stop waits for calls in flight. The kubelet waits for 45 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(45);

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
    task: JoinHandle<()>,
}

impl Server {
    /// Answers with `claims`. Must be called inside a tokio runtime.
    #[must_use]
    pub fn start<C: Claims>(listeners: Listeners, claims: &C) -> Self {
        let (notify, notices) = watch::channel(None);
        let endpoint = listeners.service.path.to_string_lossy().into_owned();
        let service = Served::start(listeners.service, |closed| {
            plugin::serve(claims, health::serve(claims, closed, Services::default()))
        });
        let registration = Served::start(listeners.registration, |_| {
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

    /// Stops: the kubelet forgets the driver, the health streams end, and calls in flight are
    /// answered. Ends after 45 s for each socket at the latest.
    pub async fn stop(mut self) {
        self.registration.close();
        self.service.close();
        for served in [&mut self.registration, &mut self.service] {
            if tokio::time::timeout(ANSWER_WITHIN, &mut served.task).await.is_err() {
                tracing::warn!(path = %served.socket.path.display(), "calls on a DRA socket were not answered in time");
                served.task.abort();
            }
        }
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
    fn start(socket: Listening, services: impl FnOnce(watch::Receiver<bool>) -> Services) -> Self {
        let (close, mut closed) = watch::channel(false);
        let services = services(closed.clone());
        let socket = Arc::new(socket);
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let incoming = Arc::clone(&socket.listener).incoming().and_then(move |stream| {
            let connections = Arc::clone(&connections);
            async move {
                let permit = connections.acquire_owned().await.map_err(std::io::Error::other)?;
                // Kept with the connection, and never called for a kubelet that reads no lists.
                let held: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
                    let _held = &permit;
                });
                Ok(TrackedStream::new(stream, Arc::default(), held))
            }
        });
        let closed = async move {
            // An error means that the daemon is ending.
            drop(closed.wait_for(|closed| *closed).await);
        };
        let incoming = Box::pin(incoming);
        let server =
            api::server().serve_with_incoming_shutdown(services, incoming, Box::pin(closed));
        let path = socket.path.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(path = %path.display(), %error, "gRPC server of a DRA socket failed");
            }
        });
        Served { socket, close, task }
    }

    /// Removes the file, and stops to accept connections and calls.
    fn close(&self) {
        if !self.close.send_replace(true) {
            self.socket.remove();
        }
    }
}
