//! `/metrics`, `/healthz` and `/readyz`, on one TCP address, beside the page that `app` puts at `/`; on a [thread](super::thread) of their
//! own, with the limits of a [door](super::door).
//!
//! `/healthz` and `/readyz` are answered at once, to anybody. A page is made by the [press](super::press), for whoever has the
//! [token](super::token) where one is asked for.

use super::door::{self, Door, Limits};
use super::press::{Press, Subject};
use super::thread;
use super::token::{Denied, Token};
use super::visit::{PageRoom, Visit};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Extension;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
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

/// What is served, in words.
const WHAT: &str = "/metrics, /healthz and /readyz";

/// A probe or a scraper sends its whole head with the first packet. A connection that is kept open for the next request ends as soon:
/// whoever asks every few seconds keeps it, and others connect again.
const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// What reads slowly has so long for all of its answers, and a few seconds more: a scraper gives up after ten.
const LASTS: Duration = Duration::from_secs(15);
/// When somebody who was refused may ask again, in seconds.
const RETRY_AFTER_SECONDS: &str = "1";

/// Writes the page of `/metrics`.
pub type Scrape = Arc<dyn Fn() -> String + Send + Sync>;

/// Answers with pages.
#[derive(Debug, Clone)]
pub struct Pages {
    press: Arc<Press>,
    token: Option<Token>,
}

impl Pages {
    /// For whoever has the token, or for everybody.
    #[must_use]
    pub fn new(token: Option<Token>) -> Self {
        Pages { press: Arc::default(), token }
    }

    /// The page about `subject`, made by `make`, for the request with these headers that has come on this visit.
    ///
    /// # Errors
    /// What is answered in place of it.
    pub async fn page(
        &self,
        visit: &Arc<Visit>,
        headers: &HeaderMap,
        subject: Subject,
        make: impl FnOnce() -> String + Send + 'static,
    ) -> Result<Body, Refused> {
        let refuse = |why: Why| {
            visit.refused(why.reason());
            Refused(why)
        };
        if let Some(token) = &self.token {
            token.check(headers).map_err(|denied| refuse(Why::Denied(denied)))?;
        }
        let room = visit.page().ok_or_else(|| refuse(Why::Busy))?;
        let page = self.press.page(subject, make).await.map_err(|_| refuse(Why::Busy))?;
        // Both are kept until the last byte has gone.
        Ok(Body::from(Bytes::from_owner(Sent { page, _room: room })))
    }
}

/// A page that is being sent.
struct Sent {
    page: Arc<String>,
    _room: PageRoom,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        self.page.as_bytes()
    }
}

/// Why there is no page.
#[derive(Debug, Clone, Copy)]
pub struct Refused(Why);

#[derive(Debug, Clone, Copy)]
enum Why {
    /// Too many ask, or it takes too long.
    Busy,
    /// Whoever asks may not.
    Denied(Denied),
}

impl Why {
    fn reason(self) -> &'static str {
        match self {
            Why::Busy => "busy",
            Why::Denied(Denied::Unknown) => "unauthorized",
            Why::Denied(Denied::NoToken) => "no_token",
        }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let later = [(RETRY_AFTER, RETRY_AFTER_SECONDS)];
        match self.0 {
            Why::Busy => (StatusCode::SERVICE_UNAVAILABLE, later, "too many ask for pages; ask again\n").into_response(),
            Why::Denied(Denied::NoToken) => {
                (StatusCode::SERVICE_UNAVAILABLE, later, "the token file cannot be read; see the log\n").into_response()
            }
            Why::Denied(Denied::Unknown) => {
                (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")], "a token is asked for\n").into_response()
            }
        }
    }
}

/// The routes. `scrape` writes what `/metrics` says; `ready` becomes true when the ledger is recovered, the first scan is done and every
/// resource is registered or waits for an absent kubelet (I11).
pub fn routes(scrape: Scrape, ready: watch::Receiver<bool>, pages: Pages) -> Router {
    let metrics = move |Extension(visit): Extension<Arc<Visit>>, headers: HeaderMap| async move {
        let page = pages.page(&visit, &headers, Subject::Metrics, move || scrape()).await?;
        Ok::<_, Refused>(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page))
    };
    let readyz =
        move || async move { if *ready.borrow() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") } };
    Router::new().route("/metrics", get(metrics)).route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz))
}

/// What holds at telemetry's address, with so many connections at a time.
fn limits(connections: usize) -> Limits {
    Limits { door: "telemetry", connections, head_within: HEAD_WITHIN, lasts: LASTS, takes_bodies: false }
}

/// Listens, in the runtime of telemetry's thread.
fn bind(address: SocketAddr) -> io::Result<Door> {
    let handle = thread::handle()?;
    let _entered = handle.enter();
    Door::at(address)
}

/// Says that this process is alive, while another instance serves: what that one's probes see is its own. Where it has the
/// address, nothing is said here.
pub async fn stand_by(address: SocketAddr, connections: usize) {
    if let (Ok(door), Ok(thread)) = (bind(address), thread::handle()) {
        let alive = || async { "standing by\n" };
        let routes = Router::new().route("/healthz", get(alive)).route("/readyz", get(alive));
        there(&thread, door::serve(door, routes, limits(connections))).await;
    }
}

/// Runs on another thread, and ends there when this is dropped.
async fn there(thread: &Handle, task: impl Future<Output = ()> + Send + 'static) {
    let mut tasks = JoinSet::new();
    tasks.spawn_on(task, thread);
    drop(tasks.join_next().await);
}

/// Between tries at an address that another process has.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Serves `routes` on `address`, to so many connections at a time. Where that cannot be the daemon works on without, says so, in
/// `not_served` too, and tries again. When what is returned has ended, the address is free.
pub fn serve(address: SocketAddr, routes: Router, connections: usize, not_served: watch::Sender<Option<String>>) -> JoinHandle<()> {
    let serving = Serving { address, routes, connections, not_served };
    match thread::handle() {
        Ok(thread) => {
            // The first try before anything else, so that what is served is served when READY is said.
            let bound = bind(address);
            thread.spawn(serving.run(bound))
        }
        Err(error) => tokio::spawn(async move {
            serving.cannot(&error);
            let thread = loop {
                sleep(TRY_AGAIN_AFTER).await;
                if let Ok(thread) = thread::handle() {
                    break thread;
                }
            };
            let bound = bind(address);
            there(&thread, serving.run(bound)).await;
        }),
    }
}

struct Serving {
    address: SocketAddr,
    routes: Router,
    connections: usize,
    not_served: watch::Sender<Option<String>>,
}

impl Serving {
    async fn run(self, mut bound: io::Result<Door>) {
        let door = loop {
            match bound {
                Ok(door) => break door,
                Err(error) => self.cannot(&error),
            }
            sleep(TRY_AGAIN_AFTER).await;
            bound = bind(self.address);
        };
        self.not_served.send_replace(None);
        // Port 0 asks for any.
        let address = door.address().unwrap_or(self.address);
        tracing::info!(%address, "serving {WHAT}");
        door::serve(door, self.routes, limits(self.connections)).await;
    }

    fn cannot(&self, error: &io::Error) {
        let why = format!("{WHAT} are not served on {}: {error}", self.address);
        if self.not_served.send_replace(Some(why.clone())).is_none() {
            tracing::error!("{why}; set `telemetry.listen` to a free address");
        }
    }
}
