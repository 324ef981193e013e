//! The connection to one plugin, independent of the API version on it.

use super::link::Links;
use crate::kubelet::uds;
use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tonic::Status;
use tonic::transport::Channel;

/// Makes a call, and repeats it if it was not sent or the other side reports that it has not
/// started it. grpc-go does so automatically (its A6, transparent retries).
pub(in super::super) async fn call<C: Clone, R: Clone, T, F: Future<Output = Result<T, Status>>>(
    client: &C,
    request: R,
    make: impl Fn(C, R) -> F,
) -> Result<T, Status> {
    loop {
        match make(client.clone(), request.clone()).await {
            // The channel needs a turn to notice that its connection accepts no further call.
            Err(status) if is_not_begun(&status) => tokio::task::yield_now().await,
            made => return made,
        }
    }
}

fn is_not_begun(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        let is_refused = |error: &h2::Error| {
            error.is_remote()
                && (error.is_go_away()
                    || error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM))
        };
        let is_refused = error.downcast_ref::<h2::Error>().is_some_and(is_refused);
        if is_refused || error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled)
        {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The kubelet's end of the connection.
#[derive(Debug)]
pub(super) struct PluginChannel {
    client: u64,
    links: Links,
    closed: Arc<AtomicBool>,
}

impl PluginChannel {
    /// Dials until it succeeds, as grpc-go does: at once, then after 1 s, 1.6 s, 2.56 s and so on.
    pub(super) async fn dial(client: u64, socket: PathBuf, links: Links) -> (Self, Channel) {
        let closed = Arc::new(AtomicBool::new(false));
        let mut pause = Duration::from_secs(1);
        loop {
            let (wrapped, over) = (links.clone(), Arc::clone(&closed));
            let wrap = move |stream| {
                if over.load(Ordering::Acquire) {
                    return Err(io::Error::new(
                        io::ErrorKind::ConnectionAborted,
                        "grpc: the client connection is closing",
                    ));
                }
                wrapped.add(client, stream)
            };
            if let Ok(channel) = uds::connect_through(&socket, wrap).await {
                return (PluginChannel { client, links, closed }, channel);
            }
            tokio::time::sleep(pause).await;
            pause = pause.mul_f64(1.6);
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.links.cut(self.client);
    }

    pub(super) fn is_open(&self) -> bool {
        self.links.is_open(self.client)
    }
}
