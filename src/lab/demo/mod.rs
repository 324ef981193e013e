//! `holdfast demo`: shows on the terminal how Holdfast works, and checks each claim before it is
//! printed.
//!
//! ```text
//!   environment  a simulated node and kubelet in a temporary directory; the daemon on a thread
//!   steps        first_steps (devices, registration, pods) · faults (kubelet, actors, a device)
//!                · last_steps (restart, release)
//!   screen       headings, facts and claims; a claim that does not hold ends the demo
//! ```
//!
//! Nothing is simulated between the two sides: the daemon and the kubelet talk gRPC over unix
//! sockets, and see each other's files. Every sentence marked `ok` was compared before it was
//! printed: with the kubelet's events, with the daemon's own views, or with the files on disk.

mod daemon;
mod environment;
mod faults;
mod first_steps;
mod last_steps;
mod screen;

use self::environment::Environment;
use self::screen::Screen;
use crate::console::exit::{FAILURE, Failed};
use clap::ValueEnum;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Options of `holdfast demo`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Break one step for real, to check that the demo notices
    #[arg(long = "break", value_name = "STEP", hide = true)]
    break_step: Option<Step>,
    /// The time from the kubelet's socket to the pods that it already has, in milliseconds: on a
    /// busy machine a real kubelet takes longer too
    #[arg(long, value_name = "MS", default_value_t = 75, hide = true)]
    admit_after: u32,
}

/// The steps, by the names in the messages of failed claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// The daemon finds the node's devices.
    Devices,
    /// The kubelet gets the devices.
    Registration,
    /// Pods get devices.
    Pods,
    /// The kubelet restarts.
    KubeletRestart,
    /// Actors panic.
    ActorDeath,
    /// A device fails.
    DeviceFailure,
    /// The device returns.
    DeviceReturn,
    /// The daemon restarts.
    DaemonRestart,
    /// A pod is deleted.
    Release,
}

impl Step {
    /// Its number and its heading.
    fn heading(self) -> (usize, &'static str) {
        match self {
            Step::Devices => (1, "Holdfast finds the node's devices"),
            Step::Registration => (2, "It offers them to the kubelet"),
            Step::Pods => (3, "Pods get devices"),
            Step::KubeletRestart => (4, "The kubelet restarts"),
            Step::ActorDeath => (5, "Two of the daemon's actors panic while a pod is admitted"),
            Step::DeviceFailure => (6, "A device fails"),
            Step::DeviceReturn => (7, "The device comes back"),
            Step::DaemonRestart => (8, "The daemon restarts"),
            Step::Release => (9, "A pod is deleted"),
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Why the demo ended early.
#[derive(Debug)]
enum Stop {
    /// A claim does not hold.
    ClaimFailed(FailedClaim),
    /// The demo itself cannot continue: no directory, no thread, an interrupt.
    Aborted(String),
}

/// A claim that does not hold.
#[derive(Debug)]
struct FailedClaim {
    claim: String,
    expected: String,
    seen: String,
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Stop::Aborted(error.to_string())
    }
}

impl From<Failed> for Stop {
    fn from(failed: Failed) -> Self {
        Stop::Aborted(failed.sentence.unwrap_or_default())
    }
}

/// The parts that every step needs.
struct Demo {
    env: Environment,
    screen: Screen,
}

/// Runs the demo.
///
/// # Errors
/// If one of its claims does not hold, or if the demo cannot be set up.
pub fn run(options: &Options) -> Result<(), Failed> {
    let began = Instant::now();
    crate::console::block_on(async {
        let mut demo = Demo { env: Environment::set(options).await?, screen: Screen::new() };
        let ended = tokio::select! {
            ended = demo.run_steps(began) => ended,
            stop = interrupted() => Err(stop),
        };
        ended.map_err(|stop| demo.failure_of(stop))
    })?
}

impl From<Stop> for Failed {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::ClaimFailed(failed_claim) => Failed::new(FAILURE, failed_claim.claim),
            Stop::Aborted(why) => {
                Failed::new(FAILURE, format_args!("the demo cannot continue: {why}"))
            }
        }
    }
}

impl Demo {
    async fn run_steps(&mut self, began: Instant) -> Result<(), Stop> {
        self.screen.title(self.env.broken_step())?;
        self.devices().await?;
        self.registration().await?;
        self.pods().await?;
        self.kubelet_restart().await?;
        self.actor_death().await?;
        self.device_failure().await?;
        self.device_return().await?;
        self.daemon_restart().await?;
        self.release().await?;
        self.who_holds_what().await?;
        self.screen.end(began.elapsed())
    }

    fn begin(&mut self, step: Step) -> Result<(), Stop> {
        self.screen.step(step)
    }

    /// Prints expected and actual lines, and names the step for the caller.
    fn failure_of(&self, stop: Stop) -> Failed {
        match (&stop, self.screen.current()) {
            (Stop::ClaimFailed(failed_claim), Some(step)) => {
                drop(self.screen.failed_claim(failed_claim));
                Failed::new(
                    FAILURE,
                    format_args!(
                        "the demo's claim `{}` does not hold: {}",
                        step.name(),
                        failed_claim.claim
                    ),
                )
            }
            _ => stop.into(),
        }
    }
}

/// Ctrl-C and SIGTERM end the demo cleanly, so that no files stay behind.
async fn interrupted() -> Stop {
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            Stop::Aborted("interrupted".to_owned())
        }
        (Err(error), _) | (_, Err(error)) => error.into(),
    }
}

/// Milliseconds, as the demo prints them.
fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
