//! OLD's side of a handover: gives the ledger and the connections to NEW, and serves again when NEW
//! has exited.

use super::start::{Backoff, START_WITHIN, start};
use crate::app::{App, Settings, StartError};
use crate::domain::limits::ConnectionLimits;
use crate::handover::{Asked, Message, PassedFds, Peer};
use crate::host;
use crate::store::StoreError;
use crate::telemetry::{Tls, http};
use std::time::Duration;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long NEW may take until the kubelet has every resource from it. It takes a tenth of a
/// second; each step of NEW has a shorter bound of its own.
const CONFIRM_WITHIN: Duration = Duration::from_secs(20);
/// When this instance begins to answer probes again although NEW has not confirmed. NEW, which may
/// need the same address, tries it every two seconds. Probes that fail for so long end no pod.
const STAND_BY_AFTER: Duration = Duration::from_secs(5);
/// How long another process may hold the ledger before that is logged. A killed process releases it
/// at once.
const LOCKED_FOR: Duration = Duration::from_secs(1);

/// How a handover ended.
pub(super) enum Given {
    /// NEW serves, and this instance shall end.
    Left {
        /// NEW's version.
        version: String,
        /// NEW sees the end of this instance when this connection is dropped.
        connection: Peer,
    },
    /// This instance shall end. NEW has the kubelet's connections, or has exited.
    Stopped,
    /// NEW has exited, and this instance serves again.
    Back(Box<App>),
}

/// Hands over to the instance that requested it. `own` is NEW's process if this instance started
/// it: then NEW is killed when it makes no progress, and this instance ends after the handover.
/// Otherwise this instance stays on standby until `stop`, or until NEW exits.
///
/// # Errors
/// When NEW has exited and this instance cannot start again.
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
        // If it cannot be sent, the connection to NEW ends next.
        tracing::warn!(%error, "failed to send the kubelet's connections to the new instance");
    }
    tokio::pin!(stop);
    tokio::select! {
        is_left = wait_for_end(&mut peer, &mut passed, settings, own) => {
            if is_left {
                return Ok(Given::Left { version, connection: peer });
            }
        }
        () = &mut stop => return Ok(Given::Stopped),
    }
    drop(peer);
    tokio::select! {
        app = take_back(passed, settings) => Ok(Given::Back(Box::new(app?))),
        () = stop => Ok(Given::Stopped),
    }
}

/// Waits until NEW has confirmed. Unless this instance started NEW, it then waits for NEW's end.
/// Returns whether this instance shall end.
async fn wait_for_end(
    peer: &mut Peer,
    passed: &mut PassedFds,
    settings: &Settings,
    own: Option<&mut Child>,
) -> bool {
    let is_own = own.is_some();
    let began = Instant::now();
    let mut standby = (!is_own).then(|| stand_by(settings, STAND_BY_AFTER));
    match (tokio::time::timeout(CONFIRM_WITHIN, peer.recv()).await, own) {
        (Ok(Some(Message::Confirmed)), _) => {}
        (Ok(_), _) => {
            tracing::warn!("the new instance has exited; serving again");
            return false;
        }
        (Err(_), Some(child)) => {
            tracing::error!("the new instance made no progress; killing it and serving again");
            // A process that has already exited needs no kill.
            drop(child.kill().await);
            return false;
        }
        (Err(_), None) => {
            tracing::error!(
                "the new instance made no progress; ending the kubelet's connections, so that it sees that the devices are absent"
            );
            std::mem::take(passed).end();
            if !matches!(peer.recv().await, Some(Message::Confirmed)) {
                tracing::warn!("the new instance has exited; serving again");
                return false;
            }
        }
    }
    tracing::info!("handed over: the other instance serves the kubelet");
    drop(std::mem::take(passed));
    if is_own {
        return true;
    }
    tracing::info!("on standby until SIGTERM; serving again if the other instance exits");
    if let Some(standby) = &mut standby {
        // If the address was in use here, NEW may wait for it.
        standby.shutdown().await;
        let waited = began.elapsed() > STAND_BY_AFTER;
        *standby = stand_by(settings, if waited { STAND_BY_AFTER } else { Duration::ZERO });
    }
    peer.gone().await;
    tracing::warn!("the instance that took over has exited; serving again");
    false
}

/// Answers the probes of this instance `after` this time, as long as the returned tasks live,
/// unless NEW listens on the same address.
fn stand_by(settings: &Settings, after: Duration) -> JoinSet<()> {
    let mut standby = JoinSet::new();
    if let Some(address) = settings.config.listen {
        let tls = Tls::new(settings.config.tls.as_ref(), watch::Sender::default());
        let connections = ConnectionLimits::of(host::open_files()).telemetry;
        standby.spawn(async move {
            tokio::time::sleep(after).await;
            http::stand_by(address, tls, connections).await;
        });
    }
    standby
}

/// Starts again in this process.
async fn take_back(mut passed: PassedFds, settings: &Settings) -> Result<App, StartError> {
    let began = Instant::now();
    let (mut backoff, mut is_logged) = (Backoff::default(), false);
    loop {
        match start(settings, &mut passed, began + START_WITHIN).await {
            Err(StartError::Store(StoreError::InUse { .. })) => {
                if began.elapsed() > LOCKED_FOR && !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!(
                        "another process has locked the ledger; on standby until it releases it"
                    );
                    // A third instance, which got the same connections in its offer.
                    drop(std::mem::take(&mut passed));
                }
                tokio::time::sleep(backoff.next()).await;
            }
            done => return done,
        }
    }
}
