//! gRPC over unix sockets.

use hyper_util::rt::TokioIo;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Connects to the gRPC server on `path`.
///
/// The authority is `localhost`, as the kubelet's own clients say; there is no name to resolve behind a unix socket.
///
/// # Errors
/// The system's own error (`ENOENT`, `ECONNREFUSED`, …), or `TimedOut` after `deadline`.
pub async fn connect(path: &Path, deadline: Duration) -> std::io::Result<Channel> {
    let connecting = async {
        // Connected here, not in tonic's connector, so that the caller sees the system's own error.
        let mut stream = Some(UnixStream::connect(path).await?);
        let connector = tower::service_fn(move |_| {
            let stream = stream.take().map(TokioIo::new);
            // One channel, one connection: who loses it asks for another channel.
            async move { stream.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::ConnectionReset)) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        endpoint.connect_with_connector(connector).await.map_err(std::io::Error::other)
    };
    tokio::time::timeout(deadline, connecting).await.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))?
}
