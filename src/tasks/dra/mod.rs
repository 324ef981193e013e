//! The DRA driver: answers the kubelet's calls about claims, keeps the claims' CDI files, and
//! publishes the devices in the API server.
//!
//! ```text
//! kubelet ── Prepare, Unprepare ─▶ Driver ─▶ serving::claims ─┬─▶ ApiClaims ─▶ API server
//!                                                             └─▶ Recorder  ─▶ ledger
//! inventory, grants ─▶ slices ─▶ API server                    CDI files ◀─ files
//!                   ├▶ statuses ─▶ API server
//!                   └▶ health ─▶ kubelet
//! the kubelet's record ─▶ records ─▶ ledger
//! ```
//!
//! The kubelet's sockets and the API server are tried again until they work. The device plugin does
//! not depend on either.

mod api_claims;
mod evidence;
mod health;
mod known;
mod owner;
mod recorder;
mod records;
mod restorer;
mod slices;
mod statuses;
mod suspects;

pub(crate) use self::api_claims::ApiClaims;
pub(crate) use self::evidence::EvidenceTask;
pub(crate) use self::health::Healths;
pub(crate) use self::recorder::Recorder;
pub(crate) use self::records::{Records, RecordsTask};
pub(crate) use self::restorer::Restorer;
pub(crate) use self::slices::SlicesTask;
pub(crate) use self::statuses::StatusesTask;

use crate::domain::{ClaimHealth, ClaimHold, ClaimRef, Grant, PreparedDevice};
use crate::kubelet::dra::{Answers, Claims, Listeners, Notice, Server, Tracking};
use crate::kubelet::tracked_stream::TrackedStream;
use crate::serving::Sockets;
use crate::serving::claims::{ClaimFiles, ClaimPreparer, NotPrepared};
use crate::telemetry::metrics;
use futures_util::future::join_all;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Between two attempts to open the sockets.
const OPEN_AGAIN: Duration = Duration::from_millis(250);
/// How often the files of the sockets are checked. Without them, a kubelet that restarts does not
/// find the driver.
const CHECK_SOCKETS: Duration = Duration::from_secs(10);

/// Answers the kubelet.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    pub(crate) preparer: Arc<ClaimPreparer>,
    pub(crate) health: watch::Receiver<Arc<[ClaimHealth]>>,
}

impl Claims for Driver {
    async fn prepare(&self, claims: Vec<ClaimRef>) -> Answers<Vec<PreparedDevice>> {
        let one = |claim: ClaimRef| async {
            let began = Instant::now();
            let prepared = self.preparer.prepare(&claim).await;
            let result = prepared.as_ref().map_or_else(NotPrepared::as_str, |_| "ok");
            metrics::claim_answered("prepare", result, began.elapsed());
            (claim, prepared.map_err(|error| error.to_string()))
        };
        join_all(claims.into_iter().map(one)).await
    }

    async fn unprepare(&self, claims: Vec<ClaimRef>) -> Answers<()> {
        let one = |claim: ClaimRef| async {
            let began = Instant::now();
            let released = self.preparer.unprepare(&claim).await;
            let result = if released.is_ok() { "ok" } else { "error" };
            metrics::claim_answered("unprepare", result, began.elapsed());
            (claim, released)
        };
        join_all(claims.into_iter().map(one)).await
    }

    fn health(&self) -> watch::Receiver<Arc<[ClaimHealth]>> {
        self.health.clone()
    }
}

/// Serves the driver on the kubelet's sockets.
#[derive(Debug)]
pub(crate) struct SocketsTask {
    /// The kubelet's directory.
    pub(crate) root: PathBuf,
    pub(crate) driver: Driver,
    /// The kubelet's latest report about the registration.
    pub(crate) notices: watch::Sender<Option<Notice>>,
    /// Why the driver is not served at present.
    pub(crate) problem: watch::Sender<Option<String>>,
    /// Keeps the server, which outlives this task, and the connections.
    pub(crate) sockets: Arc<Sockets>,
    /// Becomes true when this instance ends or hands over.
    pub(crate) leaving: watch::Receiver<bool>,
}

impl SocketsTask {
    /// Opens the sockets and answers on them, again whenever their files have disappeared.
    pub(crate) async fn run(self) {
        let tracking = self.tracking();
        loop {
            let listeners = self.open().await;
            let server = Server::start(listeners, &self.driver, &tracking);
            let mut notices = server.notices();
            self.sockets.dra.set_server(Some(server));
            let mut check = tokio::time::interval(CHECK_SOCKETS);
            while self.sockets.dra.is_reachable() {
                tokio::select! {
                    changed = notices.changed() => {
                        if changed.is_err() {
                            // The server of the registration socket has ended.
                            break;
                        }
                        if let Some(notice) = notices.borrow_and_update().clone() {
                            self.problem.send_replace(notice.result.clone().err().map(|why| {
                                format!("the kubelet has refused the DRA driver: {why}")
                            }));
                            self.notices.send_replace(Some(notice));
                        }
                    }
                    _ = check.tick() => {}
                }
            }
            self.sockets.dra.set_server(None);
            tracing::warn!(
                root = %self.root.display(),
                "a socket of the DRA driver has disappeared, or its server has ended; opening both again"
            );
        }
    }

    /// The connections are passed on with those of the device plugin.
    fn tracking(&self) -> Tracking {
        let sockets = Arc::clone(&self.sockets);
        let track = Arc::new(move |stream, on_end| {
            let changed = Arc::clone(&sockets.connections.changed);
            let stream = TrackedStream::new(stream, changed, on_end);
            sockets.connections.serve(None, &stream);
            stream
        });
        Tracking { track, leaving: self.leaving.clone() }
    }

    /// Continues with the sockets of an earlier instance if there are any, and else opens new ones.
    async fn open(&self) -> Listeners {
        loop {
            match self.adopted().map_or_else(|| Listeners::open(&self.root), Ok) {
                Ok(listeners) => {
                    self.problem.send_replace(None);
                    return listeners;
                }
                Err(error) => {
                    let why = format!("cannot open the sockets of the DRA driver: {error}");
                    if self.problem.send_replace(Some(why)).is_none() {
                        tracing::warn!(root = %self.root.display(), %error, "cannot open the sockets of the DRA driver; trying again");
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(OPEN_AGAIN) => {}
                () = self.sockets.dra.passed() => {}
            }
        }
    }

    /// The sockets of an earlier instance. Those that cannot be used are closed.
    fn adopted(&self) -> Option<Listeners> {
        let passed = self.sockets.dra.take_passed();
        if passed.is_empty() {
            return None;
        }
        let failed = |error: &std::io::Error| tracing::warn!(%error, "cannot continue with the DRA sockets of the earlier instance; opening new ones");
        Listeners::adopt(&self.root, &passed).inspect_err(failed).ok()
    }
}

/// The claims of the live grants.
pub(crate) fn live_claims(grants: &[Arc<Grant>]) -> impl Iterator<Item = &ClaimHold> {
    grants.iter().filter(|grant| grant.is_live()).filter_map(|grant| grant.claim.as_deref())
}

/// Keeps the CDI files of the claims: a claim may end without an Unprepare.
pub(crate) async fn keep_files(
    files: ClaimFiles,
    mut grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
) {
    while grants.changed().await.is_ok() {
        let (files, now) = (files.clone(), grants.borrow_and_update().clone());
        let keeping = tokio::task::spawn_blocking(move || files.keep(live_claims(&now)));
        if let Ok(Err(error)) = keeping.await {
            tracing::warn!(%error, "cannot update the CDI files of claims");
        }
    }
}
