//! The real daemon, on a thread and an actix system of its own: as separate from the kubelet as one
//! process allows.

use super::Stop;
use crate::admin::Views;
use crate::app::{Actors, App, Settings, StartError};
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// A running daemon. Dropping it shuts it down, and waits until it has ended completely.
#[derive(Debug)]
pub(super) struct Daemon {
    pub(super) actors: Actors,
    pub(super) views: Views,
    stop: Option<oneshot::Sender<()>>,
    /// Closed when the thread is about to end.
    ended: oneshot::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    /// Starts it, as `holdfast run` does.
    pub(super) async fn start(settings: Settings) -> Result<Daemon, Stop> {
        let (stop, stopped) = oneshot::channel();
        let (report, reported) = oneshot::channel();
        let (end, ended) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("holdfast".to_owned()).spawn(move || {
            let system = actix::System::new();
            system.block_on(serve(settings, report, stopped));
            // The last actor's drop releases the ledger's lock.
            drop(system);
            drop(end);
        })?;
        match reported.await {
            Ok(Ok((actors, views))) => {
                Ok(Daemon { actors, views, stop: Some(stop), ended, thread: Some(thread) })
            }
            Ok(Err(error)) => Err(Stop::Aborted(error.to_string())),
            Err(_) => Err(Stop::Aborted("the daemon's thread panicked".to_owned())),
        }
    }

    /// Shuts it down cleanly.
    pub(super) async fn stop(mut self) {
        drop(self.stop.take());
        // The kubelet continues on this thread meanwhile. This waits only for the drop of the
        // sender.
        drop((&mut self.ended).await);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been logged; there is no other way to handle it here.
            drop(thread.join());
        }
    }
}

async fn serve(
    settings: Settings,
    report: oneshot::Sender<Result<(Actors, Views), StartError>>,
    stopped: oneshot::Receiver<()>,
) {
    match App::start(settings).await {
        Ok(app) => {
            if report.send(Ok((app.actors.clone(), app.views.clone()))).is_ok() {
                // The sender is never used, only dropped.
                drop(stopped.await);
            }
            app.shut_down().await;
        }
        Err(error) => drop(report.send(Err(error))),
    }
}
