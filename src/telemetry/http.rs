//! `/metrics`, `/healthz` and `/readyz` on one TCP address, together with the page that `app`
//! serves at `/`.
//!
//! They run on a thread of their own (`telemetry/thread.rs`), with the limits of
//! `telemetry/server.rs`. `/healthz` and `/readyz` are answered at once, without a token. Pages
//! come from the renderer (`telemetry/render.rs`), and may need a token or a certificate
//! (`telemetry/readers.rs`). With TLS (`telemetry/tls.rs`) all paths have it.

use super::connections::{Connection, PageSlot};
use super::readers::Readers;
use super::render::{PageKey, Renderer};
use super::server::{self, Limits, Listener};
use super::thread;
use super::tls::Tls;
use super::token::Denied;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Extension;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

/// The served paths, for log messages.
const WHAT: &str = "/metrics, /healthz and /readyz";

/// A probe or a scraper sends the head of its request in one packet. An idle connection is closed
/// after the same time.
const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// How long a slow reader may take; the last answer gets a few seconds more. Prometheus gives up
/// after ten seconds.
const LIFETIME: Duration = Duration::from_secs(15);
/// The `Retry-After` of a refusal, in seconds.
const RETRY_AFTER_SECONDS: &str = "1";

/// Writes the page of `/metrics`.
pub type Scrape = Arc<dyn Fn() -> String + Send + Sync>;

/// Serves pages.
#[derive(Debug, Clone)]
pub struct Pages {
    renderer: Arc<Renderer>,
    readers: Readers,
}

impl Pages {
    /// For these readers only.
    #[must_use]
    pub fn new(readers: Readers) -> Self {
        Pages { renderer: Arc::default(), readers }
    }

    /// The page `key`, rendered by `render`, for a request with these headers on this connection.
    ///
    /// # Errors
    /// The answer in place of the page.
    pub async fn page(
        &self,
        connection: &Arc<Connection>,
        headers: &HeaderMap,
        key: PageKey,
        render: impl FnOnce() -> String + Send + 'static,
    ) -> Result<Body, Refused> {
        let refuse = |why: Why| {
            connection.refused(why.reason());
            Refused(why)
        };
        let checked = self.readers.check(connection, headers).await;
        checked.map_err(|denied| refuse(Why::Denied(denied)))?;
        let slot = connection.page_slot().ok_or_else(|| refuse(Why::Busy))?;
        let page = self.renderer.page(key, render).await.map_err(|_| refuse(Why::Busy))?;
        // The page and its slot are kept until the last byte was written.
        Ok(Body::from(Bytes::from_owner(SentPage { page, _slot: slot })))
    }
}

/// A page that is being sent.
struct SentPage {
    page: Arc<String>,
    _slot: PageSlot,
}

impl AsRef<[u8]> for SentPage {
    fn as_ref(&self) -> &[u8] {
        self.page.as_bytes()
    }
}

/// Why there is no page.
#[derive(Debug, Clone, Copy)]
pub struct Refused(Why);

#[derive(Debug, Clone, Copy)]
enum Why {
    /// Too many requests wait, or rendering takes too long.
    Busy,
    /// The request may not read pages.
    Denied(Denied),
}

impl Why {
    fn reason(self) -> &'static str {
        match self {
            Why::Busy => "busy",
            Why::Denied(Denied::Unknown) => "unauthorized",
            Why::Denied(Denied::NoToken) => "no_token",
            Why::Denied(Denied::NoCertificate) => "no_certificate",
            Why::Denied(Denied::Forbidden) => "forbidden",
            Why::Denied(Denied::Undecided) => "undecided",
            Why::Denied(Denied::TooOften) => "too_many_tokens",
        }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (code, text) = match self.0 {
            Why::Busy => {
                (StatusCode::SERVICE_UNAVAILABLE, "too many requests for pages; try again\n")
            }
            Why::Denied(denied) => match denied {
                Denied::NoToken => (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the token file cannot be read; see the log\n",
                ),
                Denied::Undecided => (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the API server has not decided about the token; see the log\n",
                ),
                Denied::TooOften => (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "too many tokens that are not known; try again\n",
                ),
                Denied::Unknown => (StatusCode::UNAUTHORIZED, "this page needs a token\n"),
                Denied::NoCertificate => {
                    (StatusCode::FORBIDDEN, "this page needs a client certificate\n")
                }
                Denied::Forbidden => {
                    (StatusCode::FORBIDDEN, "the user of the token may not get /metrics\n")
                }
            },
        };
        let mut response = (code, text).into_response();
        let headers = response.headers_mut();
        if code == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECONDS));
        } else if code == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The routes. `scrape` writes the page of `/metrics`. `ready` becomes true when the ledger is
/// recovered, the first scan is done and every resource is registered or waits for an absent
/// kubelet (I11).
pub fn routes(scrape: Scrape, ready: watch::Receiver<bool>, pages: Pages) -> Router {
    let metrics = move |Extension(connection): Extension<Arc<Connection>>, headers: HeaderMap| async move {
        let page = pages.page(&connection, &headers, PageKey::Metrics, move || scrape()).await?;
        Ok::<_, Refused>(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page))
    };
    let readyz = move || async move {
        if *ready.borrow() {
            (StatusCode::OK, "ready\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
        }
    };
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
}

/// The limits of telemetry's address.
fn limits(connections: usize) -> Limits {
    Limits {
        socket: "telemetry",
        connections,
        head_within: HEAD_WITHIN,
        lifetime: LIFETIME,
        bodies: false,
    }
}

/// Listens, in the runtime of telemetry's thread.
fn bind(address: SocketAddr) -> io::Result<Listener> {
    let handle = thread::handle()?;
    let _entered = handle.enter();
    Listener::bind(address)
}

/// Answers probes of this process while another instance serves: that instance answers only its own
/// probes. If the other instance has the address, this one serves nothing.
pub async fn stand_by(address: SocketAddr, tls: Option<Tls>, connections: usize) {
    if let (Ok(listener), Ok(thread)) = (bind(address), thread::handle()) {
        let alive = || async { "standing by\n" };
        let routes = Router::new().route("/healthz", get(alive)).route("/readyz", get(alive));
        run_on(&thread, server::serve(listener, routes, tls, limits(connections))).await;
    }
}

/// Runs a task on another thread. When this is dropped, the task ends.
async fn run_on(thread: &Handle, task: impl Future<Output = ()> + Send + 'static) {
    let mut tasks = JoinSet::new();
    tasks.spawn_on(task, thread);
    drop(tasks.join_next().await);
}

/// The pause between tries at an address that another process has.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Serves `routes` on `address`, with TLS if it is given, and with at most `connections`
/// connections at a time. If that fails, the daemon continues without it, reports the reason in the
/// log and in `not_served`, and tries again. When the returned task has ended, the address is free.
pub fn serve(
    address: SocketAddr,
    routes: Router,
    tls: Option<Tls>,
    connections: usize,
    not_served: watch::Sender<Option<String>>,
) -> JoinHandle<()> {
    let serving = Serving { address, routes, tls, connections, not_served };
    match thread::handle() {
        Ok(thread) => {
            // The first try comes before READY is reported, so that the routes are served by then.
            let bound = bind(address);
            thread.spawn(serving.run(bound))
        }
        Err(error) => tokio::spawn(async move {
            serving.failed(&error);
            let thread = loop {
                sleep(TRY_AGAIN_AFTER).await;
                if let Ok(thread) = thread::handle() {
                    break thread;
                }
            };
            let bound = bind(address);
            run_on(&thread, serving.run(bound)).await;
        }),
    }
}

struct Serving {
    address: SocketAddr,
    routes: Router,
    tls: Option<Tls>,
    connections: usize,
    not_served: watch::Sender<Option<String>>,
}

impl Serving {
    async fn run(self, mut bound: io::Result<Listener>) {
        let listener = loop {
            match bound {
                Ok(listener) => break listener,
                Err(error) => self.failed(&error),
            }
            sleep(TRY_AGAIN_AFTER).await;
            bound = bind(self.address);
        };
        self.not_served.send_replace(None);
        // With port 0 the system chooses the port.
        let address = listener.address().unwrap_or(self.address);
        tracing::info!(%address, "serving {WHAT}");
        server::serve(listener, self.routes, self.tls, limits(self.connections)).await;
    }

    fn failed(&self, error: &io::Error) {
        let why = format!("{WHAT} are not served on {}: {error}", self.address);
        if self.not_served.send_replace(Some(why.clone())).is_none() {
            tracing::error!("{why}; set `telemetry.listen` to a free address");
        }
    }
}
