//! The life of the process: it starts, follows signals and requests, hands over, and ends.
//!
//! `start.rs` has the one way to begin to serve, `take.rs` and `give.rs` both sides of a handover (`handover` draws it), and `upgrade.rs` starts
//! another binary for `holdfast handover`.

mod give;
mod heartbeat;
mod start;
mod take;
mod upgrade;

use self::give::{Given, give};
use self::take::{OldInstance, take};
use self::upgrade::Upgrade;
use crate::app::{App, AppEvent, Installed, Settings, StartError};
use crate::handover::{Asked, fd_store};
use crate::host::{self, ExitOnSignal};
use sd_notify::NotifyState;
use std::io;
use std::mem::ManuallyDrop;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long an old instance may take to tell systemd which process is the main one.
const MAIN_PID_WITHIN: Duration = Duration::from_secs(2);
/// How long a handover to this instance may go on before the next one begins.
const TAKEN_WITHIN: Duration = Duration::from_secs(20);
/// How long the answer to an upgrade may take to be written.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// Why the daemon ends, or does not begin.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The limits of the process leave no room for it.
    #[error("{0}")]
    Limits(String),
    /// The system refuses something.
    #[error(transparent)]
    System(#[from] io::Error),
    /// A running instance does not hand over.
    #[error("{0}")]
    TakeOver(String),
    /// It cannot start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// An actor died too often.
    #[error("the {0} actor died too often; see the log for its panics")]
    Escalated(&'static str),
}

/// What an exit code of another instance means, where it has a meaning.
pub type Meaning = fn(i32) -> Option<&'static str>;

/// Runs the daemon until SIGTERM or SIGINT, which end it in order, until another instance has taken over, or until an actor
/// has died too often. With `take_over` it asks an instance that runs already to hand over.
///
/// # Errors
/// What hinders the start, or the escalation.
pub fn run(settings: Settings, take_over: bool, meaning: Meaning) -> Result<(), DaemonError> {
    if let Err(error) = host::raise_open_files() {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    host::ignore_sigxfsz()?;
    if let Some(sentence) = host::insufficient_limit(settings.config.resources.len()) {
        return Err(DaemonError::Limits(sentence));
    }
    // gRPC and the light actors share one thread; the ledger and discovery get their own in `App::start`.
    let runtime = host::runtime().map_err(|why| StartError::NoThread { what: "the daemon", why })?;
    // The process ends after it. Its drop would wait for whatever a thread still reads, be it a device that answers no more, and the next
    // instance for it: the kubelet is without devices by then.
    let system = ManuallyDrop::new(actix::System::with_tokio_rt(move || runtime));
    // In a box: moved into the system and polled there it would leave three copies of itself on this thread's stack, 50 KB each.
    system.block_on(Box::pin(serve(settings, take_over, meaning)))
}

async fn serve(settings: Settings, take_over: bool, meaning: Meaning) -> Result<(), DaemonError> {
    heartbeat::begin();
    let ends_at_once = ExitOnSignal::install()?;
    // From the first moment on it ends nothing; one that comes during the start, or a handover, is answered after it.
    let hangups = signal(SignalKind::hangup())?;
    let mut signals = Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let (app, old) = tokio::select! {
        taken = take(&settings, take_over) => taken?,
        // Nothing has been promised yet: there is nothing to end in order.
        _ = signals.next() => return Ok(()),
    };
    drop(ends_at_once);
    let readiness = Readiness::begin(&app, old);
    Daemon { hangups, readiness, settings, meaning, upgrade: None }.live(app, &mut signals).await
}

/// Becomes ready, and confirms a handover to this instance.
struct Readiness {
    task: JoinHandle<()>,
    /// Whether systemd was told.
    ready: watch::Receiver<bool>,
}

impl Readiness {
    fn begin(app: &App, mut old: Option<OldInstance>) -> Self {
        let views = app.views.clone();
        let (is_ready, ready) = watch::channel(false);
        let task = tokio::spawn(async move {
            if let Some(old) = &mut old {
                old.confirm(&views).await;
            }
            if views.ready.clone().wait_for(|ready| *ready).await.is_err() {
                return;
            }
            if let Some(old) = &mut old {
                // systemd listens to the main process, which this one is when the old instance has said so and ended.
                drop(timeout(MAIN_PID_WITHIN, old.gone()).await);
            }
            notify(&[NotifyState::Ready]);
            tracing::info!("ready");
            is_ready.send_replace(true);
            if let Some(mut old) = old {
                old.gone().await;
            }
        });
        Readiness { task, ready }
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// The daemon through all of its handovers.
struct Daemon {
    /// SIGHUP, to have the configuration read anew.
    hangups: Signal,
    settings: Settings,
    readiness: Readiness,
    meaning: Meaning,
    upgrade: Option<Upgrade>,
}

impl Daemon {
    async fn live(mut self, mut app: App, signals: &mut Signals) -> Result<(), DaemonError> {
        loop {
            let mut signal = None;
            tokio::select! {
                ends = signals.next() => signal = Some(ends),
                _ = self.hangups.recv() => {
                    tracing::info!("SIGHUP: reading the configuration anew");
                    signal = self.reload(&mut app, signals).await;
                }
                event = app.event() => match event {
                    AppEvent::Escalated(actor) => {
                        self.end(app).await;
                        return Err(DaemonError::Escalated(actor));
                    }
                    AppEvent::ConfigChanged => signal = self.reload(&mut app, signals).await,
                    AppEvent::Upgrade(order) if self.upgrade.is_some() => upgrade::refuse(order, "a handover is under way already".into()),
                    AppEvent::Upgrade(order) => self.upgrade = Upgrade::begin(order),
                    AppEvent::Asked(asked) => match self.give(app, asked, signals).await? {
                        Some(back) => app = back,
                        None => return Ok(()),
                    },
                },
                why = failed(&mut self.upgrade, self.meaning) => {
                    if let Some(upgrade) = self.upgrade.take() {
                        upgrade.fail(why);
                    }
                }
            }
            if let Some(signal) = signal {
                tracing::info!(signal, "ending: open requests first, connections last");
                self.end(app).await;
                return Ok(());
            }
        }
    }

    /// Has the configuration read anew. The signal, if one comes meanwhile that ends the daemon.
    async fn reload(&mut self, app: &mut App, signals: &mut Signals) -> Option<&'static str> {
        // Before READY was promised there is nothing to take back, and it must not be promised here.
        let is_ready = *self.readiness.ready.borrow();
        if is_ready {
            match NotifyState::monotonic_usec_now() {
                Ok(now) => notify(&[NotifyState::Reloading, now]),
                Err(error) => tracing::warn!(%error, "systemd could not be told of a reload"),
            }
        }
        let ends = tokio::select! {
            // It says itself what came of it.
            _ = app.reload() => None,
            ends = signals.next() => Some(ends),
        };
        self.settings.config = app.config().clone();
        if is_ready && ends.is_none() {
            notify(&[NotifyState::Ready]);
        }
        ends
    }

    /// Ends, and leaves what the kubelet has open to systemd, where it keeps that for the next process.
    async fn end(&self, app: App) {
        self.readiness.task.abort();
        notify(&[NotifyState::Stopping]);
        if fd_store::is_there() {
            // Without a process to go on, they end with this one.
            fd_store::store(&app.shut_down_for_next().await, &self.settings.roots.run);
            tracing::info!("ended");
        } else {
            app.shut_down().await;
        }
    }

    /// Hands over. The daemon, if it serves again.
    async fn give(&mut self, app: App, mut asked: Asked, signals: &mut Signals) -> Result<Option<App>, DaemonError> {
        if !*self.readiness.ready.borrow() {
            // Or it could not become ready.
            asked.quiet = None;
        }
        // One handover after the other. An instance that has handed over to this one goes on standing by.
        if timeout(TAKEN_WITHIN, self.readiness.ready.wait_for(|ready| *ready)).await.is_err() {
            tracing::warn!("the handover to this instance is not complete yet");
        }
        app.checkpoint().await;
        if asked.peer.is_gone() {
            tracing::warn!("the instance that asked for the ledger is gone; this one goes on");
            return Ok(Some(app));
        }
        let mut own = self.upgrade.take_if(|upgrade| asked.peer.pid.is_some() && upgrade.child.id() == asked.peer.pid);
        let stop = async {
            signals.next().await;
        };
        match give(app, asked, &self.settings, own.as_mut().map(|upgrade| &mut upgrade.child), stop).await? {
            Given::Stopped => Ok(None),
            Given::Left { version, connection } => {
                if let Some(upgrade) = own
                    && let Some(pid) = upgrade.child.id()
                {
                    // Before the other one sees the end and says READY, which systemd takes from the main process alone.
                    notify(&[NotifyState::MainPid(pid)]);
                    drop(connection);
                    let installed = Installed { from: env!("CARGO_PKG_VERSION").into(), to: version, pid };
                    // A verb that does not read it is not waited for.
                    drop(timeout(ANSWERED_WITHIN, upgrade.succeed(installed)).await);
                }
                Ok(None)
            }
            Given::Back(app) => {
                if let Some(upgrade) = own {
                    upgrade.fail("the new instance ended before everything was handed over; its log says why".into());
                }
                self.readiness = Readiness::begin(&app, None);
                Ok(Some(*app))
            }
        }
    }
}

/// Waits until the instance that was started for an upgrade has failed, while there is one.
async fn failed(upgrade: &mut Option<Upgrade>, meaning: Meaning) -> String {
    match upgrade {
        Some(upgrade) => upgrade.failed(meaning).await,
        None => std::future::pending().await,
    }
}

/// Tells systemd, where it listens.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd could not be told");
    }
}
