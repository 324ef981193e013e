//! OLD's side: hands the ledger and the kubelet over, and serves again when NEW is gone.

use super::start::{Backoff, START_WITHIN, start};
use crate::app::{App, Settings, StartError};
use crate::domain::limits::ConnectionLimits;
use crate::handover::{Asked, Message, PassedFds, Peer};
use crate::host;
use crate::store::StoreError;
use crate::telemetry::http;
use std::time::Duration;
use tokio::process::Child;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long NEW may take until the kubelet has everything from it. It takes a tenth of a second; the bounds of its own steps are shorter.
const CONFIRM_WITHIN: Duration = Duration::from_secs(20);
/// How long another process may hold the ledger before that is logged: one that was killed lets go of it at once.
const LOCKED_FOR: Duration = Duration::from_secs(1);

/// How a handover ended.
pub(super) enum Given {
    /// NEW serves, and this instance is to end.
    Left {
        /// NEW's version.
        version: String,
        /// NEW sees the end of this instance when it is dropped.
        connection: Peer,
    },
    /// This instance is to end, whatever becomes of NEW, which has the kubelet's connections.
    Stopped,
    /// NEW is gone, and this instance serves again.
    Back(Box<App>),
}

/// Hands over to the instance that asked. `own` is its process if this one has started it: it is killed when it does not get on,
/// and this instance ends when it is done. Otherwise this one stands by until `stop`, or until the other one is gone.
///
/// # Errors
/// When NEW is gone and this instance cannot start again.
pub(super) async fn give(
    app: App,
    asked: Asked,
    settings: &Settings,
    own: Option<&mut Child>,
    stop: impl Future<Output = ()>,
) -> Result<Given, StartError> {
    let Asked { mut peer, version, quiet: _quiet } = asked;
    tracing::info!(version, pid = peer.pid, "handing over to another instance");
    let mut passed = app.hand_over().await;
    if let Err(error) = peer.send(&Message::Yours { fds: passed.labels() }, &passed.fds()).await {
        // What comes next is its end.
        tracing::warn!(%error, "the instance that takes over did not get the kubelet's connections");
    }
    tokio::select! {
        is_left = wait_for_end(&mut peer, &mut passed, settings, own) => {
            if is_left {
                return Ok(Given::Left { version, connection: peer });
            }
        }
        () = stop => return Ok(Given::Stopped),
    }
    drop(peer);
    Ok(Given::Back(Box::new(take_back(passed, settings).await?)))
}

/// Waits until NEW has everything, and then, unless this instance has started it, for its end. Whether this instance is to end.
async fn wait_for_end(peer: &mut Peer, passed: &mut PassedFds, settings: &Settings, own: Option<&mut Child>) -> bool {
    let is_own = own.is_some();
    match (tokio::time::timeout(CONFIRM_WITHIN, peer.recv()).await, own) {
        (Ok(Some(Message::Confirmed)), _) => {}
        (Ok(_), _) => {
            tracing::warn!("the instance that takes over is gone; serving again");
            return false;
        }
        (Err(_), Some(child)) => {
            tracing::error!("the instance that takes over does not get on and is killed; serving again");
            // One that is gone already is as good.
            drop(child.kill().await);
            return false;
        }
        (Err(_), None) => {
            tracing::error!("the instance that takes over does not get on; the kubelet sees that the devices are gone");
            std::mem::take(passed).end();
            if !matches!(peer.recv().await, Some(Message::Confirmed)) {
                tracing::warn!("the instance that takes over is gone; serving again");
                return false;
            }
        }
    }
    tracing::info!("handed over: the other instance has the ledger and the kubelet");
    drop(std::mem::take(passed));
    if is_own {
        return true;
    }
    tracing::info!("standing by until SIGTERM, to serve again if the other instance ends");
    // Probes of this instance still find it alive, where the other one has not the same address.
    let mut standby = JoinSet::new();
    if let Some(address) = settings.config.listen {
        standby.spawn(http::stand_by(address, ConnectionLimits::of(host::open_files()).telemetry));
    }
    peer.gone().await;
    tracing::warn!("the instance that took over is gone; serving again");
    false
}

/// Starts again in this process.
async fn take_back(mut passed: PassedFds, settings: &Settings) -> Result<App, StartError> {
    let began = Instant::now();
    let (mut backoff, mut is_logged) = (Backoff::default(), false);
    loop {
        match start(settings, &mut passed, began + START_WITHIN).await {
            Err(StartError::Store(StoreError::InUse { .. })) => {
                if began.elapsed() > LOCKED_FOR && !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!("another process has the ledger; standing by until it lets go of it");
                    // A third instance, which was offered the same.
                    drop(std::mem::take(&mut passed));
                }
                tokio::time::sleep(backoff.next()).await;
            }
            done => return done,
        }
    }
}
