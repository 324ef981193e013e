//! `holdfast demo`: shows on the terminal how Holdfast works, and checks each claim before it is
//! printed.
//!
//! ```text
//!   stage      a simulated node and kubelet in a temporary directory; the real daemon on a thread
//!   story      beginning (devices, registration, pods) · faults (kubelet, actors, a device)
//!              · ending (restart, release)
//!   screen     headings, facts and claims; a claim that does not hold ends the demo
//! ```
//!
//! Nothing is simulated between the two sides: the daemon and the kubelet talk gRPC over unix
//! sockets, and see each other's files. Every sentence marked `ok` was compared before it was
//! printed: with the kubelet's events, with the daemon's own views, or with the files on disk.

mod beginning;
mod daemon;
mod ending;
mod faults;
mod screen;
mod stage;

use self::screen::Screen;
use self::stage::Stage;
use crate::console::exit::{FAILURE, Failed};
use clap::ValueEnum;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Options of `holdfast demo`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Spoil one chapter for real, to see that the demo notices
    #[arg(long = "break", value_name = "CHAPTER", hide = true)]
    spoil: Option<Chapter>,
    /// The time from the kubelet's socket to the pods that it already has, in milliseconds: on a
    /// busy machine a real kubelet takes longer too
    #[arg(long, value_name = "MS", default_value_t = 75, hide = true)]
    admit_after: u32,
}

/// The chapters, by the names in the messages of failed claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Chapter {
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

impl Chapter {
    /// Its number and its heading.
    fn heading(self) -> (usize, &'static str) {
        match self {
            Chapter::Devices => (1, "Holdfast finds the node's devices"),
            Chapter::Registration => (2, "It offers them to the kubelet"),
            Chapter::Pods => (3, "Pods get devices"),
            Chapter::KubeletRestart => (4, "The kubelet restarts"),
            Chapter::ActorDeath => (5, "Two of the daemon's actors die while a pod is admitted"),
            Chapter::DeviceFailure => (6, "A device fails"),
            Chapter::DeviceReturn => (7, "The device comes back"),
            Chapter::DaemonRestart => (8, "The daemon restarts"),
            Chapter::Release => (9, "A pod is deleted"),
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
    Refuted(Refuted),
    /// The demo itself cannot continue: no directory, no thread, an interrupt.
    Trouble(String),
}

/// A claim that does not hold.
#[derive(Debug)]
struct Refuted {
    claim: String,
    expected: String,
    seen: String,
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Stop::Trouble(error.to_string())
    }
}

impl From<Failed> for Stop {
    fn from(failed: Failed) -> Self {
        Stop::Trouble(failed.sentence.unwrap_or_default())
    }
}

/// The parts that every chapter needs.
struct Story {
    stage: Stage,
    screen: Screen,
}

/// Runs the demo.
///
/// # Errors
/// If one of its claims does not hold, or if the demo cannot be set up.
pub fn run(options: &Options) -> Result<(), Failed> {
    let began = Instant::now();
    crate::console::block_on(async {
        let mut story = Story { stage: Stage::set(options).await?, screen: Screen::new() };
        let told = tokio::select! {
            told = story.tell(began) => told,
            stop = interrupted() => Err(stop),
        };
        told.map_err(|stop| story.give_up(stop))
    })?
}

impl From<Stop> for Failed {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Refuted(refuted) => Failed::new(FAILURE, refuted.claim),
            Stop::Trouble(why) => Failed::new(FAILURE, format_args!("the demo cannot go on: {why}")),
        }
    }
}

impl Story {
    async fn tell(&mut self, began: Instant) -> Result<(), Stop> {
        self.screen.title(self.stage.spoilt())?;
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

    fn begin(&mut self, chapter: Chapter) -> Result<(), Stop> {
        self.screen.chapter(chapter)
    }

    /// Prints expected and actual lines, and names the chapter for the caller.
    fn give_up(&self, stop: Stop) -> Failed {
        match (&stop, self.screen.current()) {
            (Stop::Refuted(refuted), Some(chapter)) => {
                drop(self.screen.refuted(refuted));
                Failed::new(FAILURE, format_args!("the demo's claim `{}` does not hold: {}", chapter.name(), refuted.claim))
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
            Stop::Trouble("interrupted".to_owned())
        }
        (Err(error), _) | (_, Err(error)) => error.into(),
    }
}

/// Milliseconds, as the demo prints them.
fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
