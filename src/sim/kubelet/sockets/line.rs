//! The connection to one plugin, whatever is spoken on it.

use super::link::Links;
use crate::kubelet::uds;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tonic::transport::Channel;

/// The kubelet's end.
#[derive(Debug)]
pub(super) struct Line {
    client: u64,
    links: Links,
    closed: Arc<AtomicBool>,
}

impl Line {
    /// Dials until it works, as grpc-go does: at once, then after 1 s, 1.6 s, 2.56 s and so on.
    pub(super) async fn dial(client: u64, socket: PathBuf, links: Links) -> (Self, Channel) {
        let closed = Arc::new(AtomicBool::new(false));
        let mut pause = Duration::from_secs(1);
        loop {
            let (wrapped, over) = (links.clone(), Arc::clone(&closed));
            let wrap = move |stream| {
                if over.load(Ordering::Acquire) {
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "grpc: the client connection is closing"));
                }
                wrapped.add(client, stream)
            };
            if let Ok(channel) = uds::connect_through(&socket, wrap).await {
                return (Line { client, links, closed }, channel);
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
