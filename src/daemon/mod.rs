//! The daemon's process: it starts, handles signals and requests, hands over, and ends.
//!
//! `start.rs` has the one way to begin to serve, `take.rs` and `give.rs` the two sides of a
//! handover (`handover` draws it). `upgrade.rs` starts another binary for `holdfast handover`.

mod give;
mod heartbeat;
mod start;
mod take;
mod upgrade;

use self::give::{Given, give};
use self::take::{OldInstance, take};
use self::upgrade::Upgrade;
use crate::admin::{Installed, UpgradeOrder};
use crate::app::{App, AppEvent, Settings, StartError};
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

/// How long an old instance may take to notify systemd of the main process.
const MAIN_PID_WITHIN: Duration = Duration::from_secs(2);
/// How long a handover to this instance may take before the next one begins.
const TAKEN_WITHIN: Duration = Duration::from_secs(20);
/// How long writing the answer to an upgrade may take.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// Why the daemon ends, or does not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The limits of the process are too low for the daemon.
    #[error("{0}")]
    Limits(String),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] io::Error),
    /// A running instance does not hand over.
    #[error("{0}")]
    TakeOver(String),
    /// The start failed.
    #[error(transparent)]
    Start(#[from] StartError),
    /// An actor died too often.
    #[error("the {0} actor died too often; see the log for its panics")]
    Escalated(&'static str),
    /// A background task has panicked.
    #[error("a background task has panicked; see the log for the panic")]
    TaskPanicked,
}

/// The meaning of another instance's exit code, if it has one.
pub type Meaning = fn(i32) -> Option<&'static str>;

/// Runs the daemon until one of these: SIGTERM or SIGINT (a clean shutdown), another instance has
/// taken over, or an actor has died too often. With `take_over` it requests a handover from an
/// instance that is already running.
///
/// # Errors
/// When the start fails, or an actor has died too often.
pub fn run(settings: Settings, take_over: bool, meaning: Meaning) -> Result<(), DaemonError> {
    if let Err(error) = host::raise_open_files() {
        tracing::warn!(%error, "failed to raise RLIMIT_NOFILE");
    }
    host::ignore_sigxfsz()?;
    if let Some(sentence) = host::insufficient_limit(settings.config.resources.len()) {
        return Err(DaemonError::Limits(sentence));
    }
    // gRPC, health and registration share one thread; `App::start` makes threads for the ledger and
    // discovery.
    let runtime =
        host::runtime().map_err(|why| StartError::NoThread { what: "the daemon", why })?;
    // The process ends after it. Its drop would wait for blocking threads, such as a read of a
    // device that hangs, and the next instance would wait too. The kubelet has no devices during
    // that time.
    let system = ManuallyDrop::new(actix::System::with_tokio_rt(move || runtime));
    // Boxed: moved into the system and polled there, the future would leave three copies of itself
    // on this thread's stack, 50 KB each.
    system.block_on(Box::pin(serve(settings, take_over, meaning)))
}

async fn serve(
    mut settings: Settings,
    take_over: bool,
    meaning: Meaning,
) -> Result<(), DaemonError> {
    heartbeat::begin();
    let ends_at_once = ExitOnSignal::install()?;
    // From here on SIGHUP does not end the process. One that comes during the start or a handover
    // is handled after it.
    let hangups = signal(SignalKind::hangup())?;
    let mut signals = Signals {
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
    };
    let begin = async {
        settings.wait_for_labels().await;
        take(&settings, take_over).await
    };
    let (app, old) = tokio::select! {
        taken = begin => taken?,
        // Nothing is served yet, so there is nothing to shut down.
        _ = signals.next() => return Ok(()),
    };
    drop(ends_at_once);
    let readiness = Readiness::begin(&app, old);
    Daemon { hangups, readiness, settings, meaning, upgrade: None }.live(app, &mut signals).await
}

/// Waits until the daemon is ready, and confirms a handover to this instance.
struct Readiness {
    task: JoinHandle<()>,
    /// Whether systemd was notified.
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
                // systemd accepts messages from the main process only. That is this one after the
                // old instance has notified systemd of it and ended.
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

/// The daemon's state across all of its handovers.
struct Daemon {
    /// SIGHUP: reload the configuration.
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
                    tracing::info!("SIGHUP received; reloading the configuration");
                    signal = self.reload(&mut app, signals).await;
                }
                event = app.event() => match event {
                    AppEvent::Escalated(actor) => {
                        self.end(app).await;
                        return Err(DaemonError::Escalated(actor));
                    }
                    AppEvent::TaskPanicked => {
                        self.end(app).await;
                        return Err(DaemonError::TaskPanicked);
                    }
                    AppEvent::ConfigChanged => signal = self.reload(&mut app, signals).await,
                    AppEvent::Upgrade(order) => self.begin_upgrade(order, &app),
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
                self.end_by(signal, app).await;
                return Ok(());
            }
        }
    }

    /// Starts the binary of an order, unless there is a reason against it.
    fn begin_upgrade(&mut self, order: UpgradeOrder, app: &App) {
        let refusal = if self.upgrade.is_some() {
            Some("another handover is in progress".to_owned())
        } else {
            app.views.refuses_handover().or_else(|| upgrade::refusal(std::process::id()))
        };
        match refusal {
            Some(why) => upgrade::refuse(order, why),
            None => self.upgrade = Upgrade::begin(order),
        }
    }

    /// Reloads the configuration. Returns a signal that ends the daemon, if one comes during the
    /// reload.
    async fn reload(&mut self, app: &mut App, signals: &mut Signals) -> Option<&'static str> {
        // Before READY was sent there is no state to announce, and READY must not be sent here.
        let is_ready = *self.readiness.ready.borrow();
        if is_ready {
            match NotifyState::monotonic_usec_now() {
                Ok(now) => notify(&[NotifyState::Reloading, now]),
                Err(error) => tracing::warn!(%error, "failed to notify systemd of a reload"),
            }
        }
        let ends = tokio::select! {
            // It logs its result.
            _ = app.reload() => None,
            ends = signals.next() => Some(ends),
        };
        self.settings.config = app.config().clone();
        if is_ready && ends.is_none() {
            notify(&[NotifyState::Ready]);
        }
        ends
    }

    /// Ends because of a signal.
    async fn end_by(&self, signal: &'static str, app: App) {
        tracing::info!(
            signal,
            "shutting down: open requests are answered first, connections end last"
        );
        self.end(app).await;
    }

    /// Ends. If systemd has an fd store, the kubelet's connections go there for the next process.
    async fn end(&self, app: App) {
        self.readiness.task.abort();
        notify(&[NotifyState::Stopping]);
        if fd_store::is_there() {
            // Without a next process, the connections end when the unit stops.
            fd_store::store(&app.shut_down_for_next().await, &self.settings.roots.run);
            tracing::info!("ended");
        } else {
            app.shut_down().await;
        }
    }

    /// Hands over. Returns the daemon if it serves again.
    async fn give(
        &mut self,
        app: App,
        mut asked: Asked,
        signals: &mut Signals,
    ) -> Result<Option<App>, DaemonError> {
        if !*self.readiness.ready.borrow() {
            // Registers continue, or this instance could never become ready.
            asked.quiet = None;
        }
        // One handover after the other. An old instance that has handed over to this one stays on
        // standby.
        let prepare = async {
            let ready = self.readiness.ready.wait_for(|ready| *ready);
            if timeout(TAKEN_WITHIN, ready).await.is_err() {
                tracing::warn!(
                    "the handover to this instance is not complete yet; handing over to the next one all the same"
                );
            }
            app.checkpoint().await;
        };
        let signal = tokio::select! {
            () = prepare => None,
            signal = signals.next() => Some(signal),
        };
        if let Some(signal) = signal {
            self.end_by(signal, app).await;
            return Ok(None);
        }
        if asked.peer.is_gone() {
            tracing::warn!(
                "the instance that requested the handover has exited; continuing to serve"
            );
            return Ok(Some(app));
        }
        let mut own = self
            .upgrade
            .take_if(|upgrade| asked.peer.pid.is_some() && upgrade.child.id() == asked.peer.pid);
        let stop = async {
            signals.next().await;
        };
        match give(app, asked, &self.settings, own.as_mut().map(|upgrade| &mut upgrade.child), stop)
            .await?
        {
            Given::Stopped => Ok(None),
            Given::Left { version, connection } => {
                if let Some(upgrade) = own
                    && let Some(pid) = upgrade.child.id()
                {
                    // Before the other instance sees the end of this one and sends READY: systemd
                    // accepts that from the main process only.
                    notify(&[NotifyState::MainPid(pid)]);
                    drop(connection);
                    let installed =
                        Installed { from: env!("CARGO_PKG_VERSION").into(), to: version, pid };
                    // A client that does not read the answer is not waited for.
                    drop(timeout(ANSWERED_WITHIN, upgrade.succeed(installed)).await);
                }
                Ok(None)
            }
            Given::Back(app) => {
                if let Some(upgrade) = own {
                    upgrade.fail(
                        "the new instance exited before the handover was complete; see its log"
                            .into(),
                    );
                }
                self.readiness = Readiness::begin(&app, None);
                Ok(Some(*app))
            }
        }
    }
}

/// Waits until the instance of an upgrade has failed. Never returns if there is no upgrade.
async fn failed(upgrade: &mut Option<Upgrade>, meaning: Meaning) -> String {
    match upgrade {
        Some(upgrade) => upgrade.failed(meaning).await,
        None => std::future::pending().await,
    }
}

/// Notifies systemd, if it listens.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "failed to notify systemd");
    }
}
