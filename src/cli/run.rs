//! `holdfast run`: the daemon in the foreground, until a signal, or until another instance has taken over.

use crate::app::handover::{self, Asked, Former, Given, Inherited, Installed, Pauses, UpgradeOrder};
use crate::app::{App, AppEvent, Settings, StartError, heartbeat};
use crate::console::Global;
use crate::console::exit::{self, ESCALATED, FAILURE, Failed, LIMITS};
use crate::host::{self, ExitOnSignal};
use crate::store::StoreError;
use clap::Args;
use sd_notify::NotifyState;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// How long another process may hold the ledger without handing it over: one that is starting, or ending.
const LOCKED_FOR: Duration = Duration::from_secs(30);
/// How long a former instance may take to tell systemd who the main process is.
const NAMED_WITHIN: Duration = Duration::from_secs(2);
/// How long a handover to this instance may go on before the next one begins.
const RELIEVED_WITHIN: Duration = Duration::from_secs(20);
/// How long an instance that was started here may take to ask for the ledger, which is the first thing that it does.
const ASKS_WITHIN: Duration = Duration::from_secs(60);
/// Turns of the event loop that an answer on the control socket takes, and more.
const TURNS: usize = 32;

/// How it begins.
#[derive(Debug, Args)]
pub struct Options {
    /// Ask a daemon that runs already to hand over, instead of ending; start as usual when there is none
    #[arg(long)]
    take_over: bool,
}

/// Runs the daemon until SIGTERM or SIGINT, which end it in order, until another instance has taken over, or until an actor
/// has died too often.
///
/// # Errors
/// What hinders the start, or the escalation.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let settings = Settings::new(global.roots(), global.load_config()?);
    if let Err(error) = host::raise_open_files() {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    host::ignore_sigxfsz()?;
    if let Some(sentence) = host::insufficient_limit(settings.config.resources.len()) {
        return Err(Failed::new(LIMITS, sentence));
    }
    // gRPC and the light actors share one thread; the ledger and discovery get their own in `App::start`.
    let runtime = host::runtime().map_err(|why| StartError::NoThread { what: "the daemon", why })?;
    let system = actix::System::with_tokio_rt(move || runtime);
    // In a box: moved into the system and polled there it would leave three copies of itself on this thread's stack, 50 KB each.
    let ended = system.block_on(Box::pin(serve(settings, options.take_over)));
    // Its drop would wait for whatever a thread still reads, be it a device that answers no more, and the next instance for it:
    // the kubelet is without devices from here on.
    std::mem::forget(system);
    ended
}

async fn serve(settings: Settings, take_over: bool) -> Result<(), Failed> {
    heartbeat::begin();
    let ends_at_once = ExitOnSignal::install()?;
    // From the first moment on it ends nothing; one that comes during the start, or a handover, is answered after it.
    let hangups = signal(SignalKind::hangup())?;
    let mut signals = Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let (app, former, inherited) = tokio::select! {
        started = start(&settings, take_over) => started?,
        // Nothing has been promised yet: there is nothing to end in order.
        _ = signals.next() => return Ok(()),
    };
    drop(ends_at_once);
    let relieving = relieve(&app, former, inherited, settings.config.detaches);
    Daemon { hangups, relieving, settings, upgrade: None }.live(app, &mut signals).await
}

async fn start(settings: &Settings, take_over: bool) -> Result<(App, Option<Former>, Inherited), Failed> {
    let mut inherited = handover::kept(&settings.roots.run);
    let until = Instant::now() + LOCKED_FOR;
    let (mut pauses, mut said) = (Pauses::default(), false);
    loop {
        let mut former = None;
        if take_over {
            former = handover::ask(&settings.roots.run, &mut inherited).await.map_err(|error| Failed::new(FAILURE, error))?;
        }
        let patience = if former.is_some() { LOCKED_FOR } else { Duration::ZERO };
        match inherited.until_started(handover::start_when_free(settings, patience), former.as_mut()).await {
            // Whoever has the ledger and cannot be asked is just starting, or ending: soon it can, or is gone.
            Err(StartError::Store(StoreError::InUse { .. })) if take_over && former.is_none() && Instant::now() < until => {
                if !std::mem::replace(&mut said, true) {
                    tracing::info!("another process has the ledger and cannot be asked to hand it over yet");
                }
                tokio::time::sleep(pauses.pause()).await;
            }
            started => return Ok((started?, former, inherited)),
        }
    }
}

/// What comes of a former instance.
struct Relieving {
    task: JoinHandle<()>,
    /// Whether the daemon was said to be ready.
    ready: watch::Receiver<bool>,
}

/// Says that the daemon is ready, once it is, and once a former instance has left the kubelet to it.
fn relieve(app: &App, former: Option<Former>, inherited: Inherited, detaches: bool) -> Relieving {
    let (mut registered, standing) = (app.views.ready.clone(), app.standing());
    let (is_ready, ready) = watch::channel(false);
    let task = tokio::spawn(async move {
        let mut relieved = None;
        if former.is_some() || !inherited.is_empty() {
            relieved = handover::relieve(former, inherited, standing, detaches).await;
        }
        if registered.wait_for(|registered| *registered).await.is_err() {
            return;
        }
        if let Some(relieved) = &mut relieved {
            // systemd listens to the main process, which this one is when the former instance has said so and ended.
            drop(tokio::time::timeout(NAMED_WITHIN, relieved.gone()).await);
        }
        notify(&[NotifyState::Ready]);
        tracing::info!("ready");
        is_ready.send_replace(true);
        if let Some(relieved) = relieved {
            relieved.over().await;
        }
    });
    Relieving { task, ready }
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

/// Another binary that is to take the place of this one.
struct Upgrade {
    child: Child,
    asks_until: Instant,
    answer: oneshot::Sender<Result<Installed, String>>,
}

/// The daemon through all of its handovers.
struct Daemon {
    /// SIGHUP, to have the configuration read anew.
    hangups: Signal,
    settings: Settings,
    /// Becomes ready, and takes over from a former instance.
    relieving: Relieving,
    upgrade: Option<Upgrade>,
}

impl Daemon {
    async fn live(mut self, mut app: App, signals: &mut Signals) -> Result<(), Failed> {
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
                        return Err(Failed::new(ESCALATED, format_args!("the {actor} actor died too often; see the log for its panics")));
                    }
                    AppEvent::ConfigChanged => signal = self.reload(&mut app, signals).await,
                    AppEvent::Upgrade(order) => self.begin(order),
                    AppEvent::Asked(asked) => match self.give(app, asked, signals).await? {
                        Some(back) => app = back,
                        None => return Ok(()),
                    },
                },
                why = failed(&mut self.upgrade) => self.fail(why),
            }
            if let Some(signal) = signal {
                tracing::info!(signal, "ending: open requests first, streams last");
                self.end(app).await;
                return Ok(());
            }
        }
    }

    /// Has the configuration read anew. The signal, if one comes meanwhile that ends the daemon.
    async fn reload(&mut self, app: &mut App, signals: &mut Signals) -> Option<&'static str> {
        // Before READY was promised there is nothing to take back, and it must not be promised here.
        let is_ready = *self.relieving.ready.borrow();
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

    async fn end(&self, app: App) {
        self.relieving.task.abort();
        notify(&[NotifyState::Stopping]);
        app.shut_down_for_the_next(&self.settings.roots.run).await;
    }

    /// Starts the binary of an order, which will ask this process to hand over.
    fn begin(&mut self, UpgradeOrder { upgrade, answer }: UpgradeOrder) {
        let refuse = |answer: oneshot::Sender<_>, why: String| {
            tracing::warn!(executable = %upgrade.executable.display(), why, "no handover");
            // Whoever asked may have gone.
            drop(answer.send(Err(why)));
        };
        if self.upgrade.is_some() {
            return refuse(answer, "a handover is under way already".into());
        }
        match handover::start_installed(&upgrade) {
            Ok(child) => {
                tracing::info!(executable = %upgrade.executable.display(), pid = child.id(), "started the instance that is to take over");
                self.upgrade = Some(Upgrade { child, asks_until: Instant::now() + ASKS_WITHIN, answer });
            }
            Err(error) => refuse(answer, format!("`{}` cannot be started: {error}", upgrade.executable.display())),
        }
    }

    /// The order has come to nothing, and this instance serves.
    fn fail(&mut self, why: String) {
        if let Some(Upgrade { answer, .. }) = self.upgrade.take() {
            tracing::error!(why, "no handover; this instance goes on");
            drop(answer.send(Err(why)));
        }
    }

    /// Hands over. The daemon, if it serves again.
    async fn give(&mut self, app: App, asked: Asked, signals: &mut Signals) -> Result<Option<App>, Failed> {
        // One handover after the other. Whoever was relieved here goes on standing by.
        if tokio::time::timeout(RELIEVED_WITHIN, self.relieving.ready.wait_for(|ready| *ready)).await.is_err() {
            tracing::warn!("the handover to this instance is not complete yet");
        }
        let mut own = self.upgrade.take_if(|upgrade| asked.is_of(&upgrade.child));
        let stop = async {
            signals.next().await;
        };
        let given = handover::give(app, asked, &self.settings, own.as_mut().map(|upgrade| &mut upgrade.child), stop).await?;
        match given {
            Given::Stopped => Ok(None),
            Given::Left { version, connection } => {
                if let Some(Upgrade { child, answer, .. }) = own
                    && let Some(pid) = child.id()
                {
                    // Before the other one hears the end and says READY, which systemd takes from the main process alone.
                    notify(&[NotifyState::MainPid(pid)]);
                    drop(connection);
                    drop(answer.send(Ok(Installed { from: env!("CARGO_PKG_VERSION").into(), to: version, pid })));
                    // The answer is written before this process ends.
                    for _ in 0..TURNS {
                        tokio::task::yield_now().await;
                    }
                }
                Ok(None)
            }
            Given::Back(app) => {
                self.upgrade = own;
                self.fail("the new instance ended before everything was handed over; its log says why".into());
                self.relieving = relieve(&app, None, Inherited::default(), false);
                Ok(Some(*app))
            }
        }
    }
}

/// Waits until the other binary's process has ended instead of asking, while there is one; one that hangs is ended. Why it did not ask.
async fn failed(upgrade: &mut Option<Upgrade>) -> String {
    let Some(Upgrade { child, asks_until, .. }) = upgrade else { return std::future::pending().await };
    match tokio::time::timeout_at(*asks_until, child.wait()).await {
        Ok(Ok(status)) => format!("the new instance ended before it took over ({}); its log says why", in_words(status)),
        Ok(Err(error)) => format!("the new instance cannot be watched: {error}"),
        Err(_) => {
            // One that is gone already is as good.
            drop(child.kill().await);
            format!("the new instance did nothing for {} s and was killed", ASKS_WITHIN.as_secs())
        }
    }
}

/// With what the code means, where it has a meaning.
fn in_words(status: ExitStatus) -> String {
    let meaning = status.code().and_then(exit::meaning);
    meaning.map_or_else(|| status.to_string(), |meaning| format!("{status}: {meaning}"))
}

/// Tells systemd, where it listens.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd could not be told");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::process::Command;

    /// Why a program that is started for an upgrade, and has so long to ask, does not take over.
    fn fails(script: &str, within: Duration) -> (String, Option<Upgrade>) {
        actix::System::new().block_on(async {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let (answer, _) = oneshot::channel();
            let mut upgrade = Some(Upgrade { child, asks_until: Instant::now() + within, answer });
            (failed(&mut upgrade).await, upgrade)
        })
    }

    #[test]
    fn a_new_instance_that_ends_is_told_with_what_its_code_means_and_one_that_hangs_is_killed() {
        let ever = Duration::from_secs(3600);
        let said = |code: u8| fails(&format!("exit {code}"), ever).0;
        assert_eq!(
            said(3),
            "the new instance ended before it took over (exit status: 3: the configuration is not valid); its log says why"
        );
        assert_eq!(said(77), "the new instance ended before it took over (exit status: 77); its log says why");
        let (why, upgrade) = fails("exec sleep 3600", Duration::from_millis(1));
        assert!(why.contains("was killed"), "{why}");
        assert_eq!(upgrade.unwrap().child.id(), None, "its end was seen");
    }
}
