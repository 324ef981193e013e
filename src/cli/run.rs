//! `holdfast run`: the daemon in the foreground, until a signal.

use super::Global;
use super::exit::{ESCALATED, Failed};
use crate::app::{App, Settings, heartbeat};
use tokio::signal::unix::{SignalKind, signal};

/// Runs the daemon until SIGTERM or SIGINT, which end it in order, or until an actor has died too often.
///
/// # Errors
/// What hinders the start, or the escalation.
pub fn run(global: &Global) -> Result<(), Failed> {
    let settings = Settings { roots: global.roots(), config: global.load_config()? };
    // gRPC and the light actors share one thread; the ledger and discovery get their own in `App::start`.
    let system = actix::System::new();
    system.block_on(serve(settings))
}

async fn serve(settings: Settings) -> Result<(), Failed> {
    stay_at_hangups()?;
    heartbeat::begin();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut app = tokio::select! {
        app = App::start(settings) => app?,
        // Nothing has been promised yet: there is nothing to end in order.
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let mut ready = app.views.ready.clone();
    let announce = tokio::spawn(async move {
        if ready.wait_for(|ready| *ready).await.is_ok() {
            notify(sd_notify::NotifyState::Ready);
            tracing::info!("ready");
        }
    });
    let outcome = tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("SIGINT"),
        actor = app.escalated() => Err(Failed::new(ESCALATED, format_args!("the {actor} actor died too often; see the log for its panics"))),
    };
    if let Ok(signal) = &outcome {
        tracing::info!(signal, "ending: open requests first, streams last");
    }
    announce.abort();
    notify(sd_notify::NotifyState::Stopping);
    app.shut_down().await;
    outcome.map(drop)
}

/// SIGHUP ends nothing: a service manager or a person sends it to have the configuration read anew.
fn stay_at_hangups() -> std::io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            tracing::warn!("SIGHUP: the configuration is read at the start only; restart the daemon to have it read anew");
        }
    });
    Ok(())
}

/// Tells systemd, where it listens.
fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd could not be told");
    }
}
