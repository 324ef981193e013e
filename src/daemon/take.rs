//! NEW's side of a handover: requests it, starts, and confirms when the kubelet has every resource
//! from this instance.

use super::DaemonError;
use super::start::{Backoff, START_WITHIN, start};
use crate::admin::Views;
use crate::app::{App, Settings, StartError};
use crate::handover::{Message, PROTOCOL, PassedFds, Peer, fd_store, socket_path};
use crate::store::{RECORDS, StoreError};
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout};

/// How long another process may hold the ledger without handing it over: one that is starting or
/// ending.
const LOCKED_FOR: Duration = Duration::from_secs(30);
/// How long OLD may take to send its offer. It answers at once, unless it hangs.
const OFFER_WITHIN: Duration = Duration::from_secs(5);
/// How long OLD may take to close the ledger: the deadlines of its checkpoint and of the calls that
/// it answers first, and those of a handover that is already in progress.
const YOURS_WITHIN: Duration = Duration::from_secs(60);
/// How long the kubelet may refuse a resource before the handover is confirmed all the same.
const REGISTERED_WITHIN: Duration = Duration::from_secs(5);

/// The instance that has handed over, or will.
#[derive(Debug)]
pub(super) struct OldInstance {
    peer: Peer,
    version: String,
}

/// Starts. With `take_over` it first takes over from a running instance, if there is one.
///
/// # Errors
/// When the start or the handover fails.
pub(super) async fn take(
    settings: &Settings,
    take_over: bool,
) -> Result<(App, Option<OldInstance>), DaemonError> {
    let mut passed = fd_store::restore(&settings.roots.run);
    let mut began = Instant::now();
    let (mut backoff, mut is_logged, mut old) = (Backoff::default(), false, None);
    loop {
        if take_over && old.is_none() {
            old = ask(&settings.roots.run, &mut passed).await.map_err(DaemonError::TakeOver)?;
            // The wait may have been for another handover: the time counts from here.
            began = old.as_ref().map_or(began, |_| Instant::now());
        }
        match start(settings, &mut passed, Instant::now() + START_WITHIN).await {
            // The process that has locked the ledger does not listen: it is starting or ending. Try
            // again.
            Err(StartError::Store(StoreError::InUse { .. }))
                if take_over && began.elapsed() < LOCKED_FOR =>
            {
                if old.is_none() && !std::mem::replace(&mut is_logged, true) {
                    tracing::info!(
                        "another process has locked the ledger and does not accept handover requests yet; trying again"
                    );
                }
                tokio::time::sleep(backoff.next()).await;
            }
            started => return Ok((started?, old)),
        }
    }
}

/// Requests a handover from a running instance. `None` when none is running, or when it exited
/// before it handed over; the descriptors that it sent until then are in `passed`. The error is the
/// reason why it does not hand over. It continues to serve then.
async fn ask(run_dir: &Path, passed: &mut PassedFds) -> Result<Option<OldInstance>, String> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => {
            return Err(format!(
                "cannot connect to holdfast on `{}` for a handover: {error}; only root may request it",
                path.display()
            ));
        }
    };
    let silent = || {
        Err(format!(
            "holdfast on `{}` does not answer the handover request; if it hangs, stop it and start again",
            path.display()
        ))
    };
    let mut peer = Peer::new(stream);
    let (protocol, version, records, fds) = match timeout(OFFER_WITHIN, peer.recv()).await {
        Ok(Some(Message::Offer { protocol, version, records, fds })) => {
            (protocol, version, records, fds)
        }
        Ok(Some(Message::Refused { why })) => {
            return Err(format!("the running holdfast does not hand over now: {why}"));
        }
        // It has exited since the connect.
        Ok(None) => return Ok(None),
        Ok(Some(_)) | Err(_) => return silent(),
    };
    for (what, theirs, known) in
        [("a ledger", records, RECORDS), ("a handover protocol", protocol, PROTOCOL)]
    {
        if theirs > known {
            let ours = env!("CARGO_PKG_VERSION");
            return Err(format!(
                "the running holdfast {version} has {what} of version {theirs}, and this holdfast {ours} knows up to version {known}; \
                 nothing was changed, and the running one continues; install {version} or newer"
            ));
        }
    }
    tracing::info!(
        version,
        pid = peer.pid,
        connections = fds.len(),
        "requesting a handover from another instance"
    );
    *passed = PassedFds::of(fds, peer.fds()).unwrap_or_default();
    if peer.send(&Message::Take { version: env!("CARGO_PKG_VERSION").into() }, &[]).await.is_err() {
        return Ok(None);
    }
    match timeout(YOURS_WITHIN, peer.recv()).await {
        Ok(Some(Message::Yours { fds })) => {
            // If they do not arrive, the copies that came with the offer are used.
            if let Some(newer) = PassedFds::of(fds, peer.fds()) {
                *passed = newer;
            }
            Ok(Some(OldInstance { peer, version }))
        }
        Ok(None) => Ok(None),
        Ok(Some(_)) | Err(_) => silent(),
    }
}

impl OldInstance {
    /// Waits until the kubelet has every resource from this instance, and confirms the handover.
    pub(super) async fn confirm(&mut self, views: &Views) {
        if timeout(REGISTERED_WITHIN, views.registered()).await.is_err() {
            tracing::warn!(
                "the kubelet does not accept every resource from this instance; confirming the handover all the same"
            );
        }
        // If OLD has exited, it needs no confirmation.
        if self.peer.send(&Message::Confirmed, &[]).await.is_ok() {
            tracing::info!(from = self.version, "took over from another instance");
        }
    }

    /// Waits for OLD's end. While this value lives, OLD knows that this instance lives.
    pub(super) async fn gone(&mut self) {
        self.peer.gone().await;
    }
}
