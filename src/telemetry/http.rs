//! `/metrics`, `/healthz` and `/readyz`, on one TCP address, beside the page that `app` puts at `/`.

use crate::host::peer::TrustedListener;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::serve::Listener;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::either::Either;

/// What is served, in words.
const WHAT: &str = "/metrics, /healthz and /readyz";

/// Writes the page of `/metrics`.
pub type Scrape = Arc<dyn Fn() -> String + Send + Sync>;

/// The routes. `page` is what `/metrics` says; `ready` becomes true when the ledger is recovered, the first scan is done and every resource is
/// registered or waits for an absent kubelet (I11).
pub fn routes(page: Scrape, ready: watch::Receiver<bool>) -> Router {
    Router::new()
        .route("/metrics", get(move || scrape(page.clone())))
        .route("/healthz", get(|| async { "ok\n" }))
        .route(
            "/readyz",
            get(move || async move {
                if *ready.borrow() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
            }),
        )
}

/// Away from the thread that serves the kubelet: a page asks the disk for its room.
async fn scrape(page: Scrape) -> Result<impl IntoResponse, (StatusCode, String)> {
    let text = tokio::task::spawn_blocking(move || page()).await.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

/// Where HTTP is spoken: to anybody who reaches an address, or to root at a socket. One type for both, so that what serves a
/// connection is in the binary once.
#[derive(Debug)]
pub enum Door {
    /// For Prometheus and the kubelet's probes.
    Tcp(TcpListener),
    /// For the verbs of `holdfast`.
    Unix(TrustedListener),
}

impl Listener for Door {
    type Io = Either<TcpStream, UnixStream>;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let stream = match self {
            Door::Tcp(listener) => Either::Left(Listener::accept(listener).await.0),
            Door::Unix(listener) => Either::Right(listener.accept().await),
        };
        (stream, ())
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(())
    }
}

/// Says that this process is alive, while another instance serves: what that one's probes see is its own. Where it has the
/// address, nothing is said here.
pub async fn stand_by(address: SocketAddr) {
    if let Ok(listener) = TcpListener::bind(address).await {
        let alive = || async { "standing by\n" };
        let routes = Router::new().route("/healthz", get(alive)).route("/readyz", get(alive));
        drop(axum::serve(Door::Tcp(listener), routes).await);
    }
}

/// Between tries at an address that somebody else has.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Serves `routes` on `address`. Where that is taken the daemon works on without, says so, in `not_served` too, and tries again.
pub async fn serve(address: SocketAddr, routes: Router, not_served: watch::Sender<Option<String>>) -> JoinHandle<()> {
    // The first try before anything else, so that what is served is served when READY is said.
    let mut bound = TcpListener::bind(address).await;
    tokio::spawn(async move {
        let listener = loop {
            match bound {
                Ok(listener) => break listener,
                Err(error) => {
                    let why = format!("{WHAT} are not served on {address}: {error}");
                    if not_served.send_replace(Some(why.clone())).is_none() {
                        tracing::error!("{why}; set `telemetry.listen` to a free address");
                    }
                }
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
            bound = TcpListener::bind(address).await;
        };
        not_served.send_replace(None);
        // Port 0 asks for any.
        let address = listener.local_addr().unwrap_or(address);
        tracing::info!(%address, "serving {WHAT}");
        if let Err(error) = axum::serve(Door::Tcp(listener), routes).await {
            tracing::error!(%error, "telemetry failed");
        }
    })
}
