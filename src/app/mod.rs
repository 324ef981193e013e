//! The application: wiring, reload and shutdown. It is the only module that knows all actors.
//!
//! [`App::start`] (`start.rs`) starts everything in order. What the parts share is in a `Wiring`
//! (`wiring.rs`), which also makes the configuration of each part (`parts.rs`). [`App::shut_down`]
//! (`ending.rs`) goes the reverse way. The streams end last, because the kubelet keeps the devices
//! while they are open.

mod actors;
#[cfg(feature = "cluster")]
mod api_labels;
#[cfg(feature = "cluster")]
mod dra;
mod ending;
mod error;
mod parts;
mod recovery;
mod reload;
#[cfg(feature = "cluster")]
mod reporting;
mod returning;
mod settings;
mod specs;
mod start;
mod take_over;
mod wiring;

pub use actors::Actors;
pub use error::StartError;
pub use settings::Settings;

use self::reload::Reloader;
use crate::admin::{UpgradeOrder, Views};
use crate::handover::Asked;
use crate::serving::Shared;
use crate::store::Store;
use actix::Arbiter;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::{OwnedRwLockReadGuard, mpsc, watch};
use tokio::task::JoinHandle;

/// A running daemon.
#[derive(Debug)]
pub struct App {
    /// The actors.
    pub actors: Actors,
    /// The published state, for readers outside the actors.
    pub views: Views,
    escalated: mpsc::Receiver<&'static str>,
    store: Arc<Mutex<Store>>,
    shared: Shared,
    leaving: watch::Sender<bool>,
    ending: watch::Sender<bool>,
    arbiters: Vec<Arbiter>,
    ledger_guardian: JoinHandle<()>,
    tasks: FuturesUnordered<JoinHandle<()>>,
    asked: mpsc::Receiver<Asked>,
    upgrades: mpsc::Receiver<UpgradeOrder>,
    reloader: Reloader,
    config_changes: mpsc::Receiver<()>,
    /// Files that are removed at the end.
    files: Vec<PathBuf>,
    /// While it is there, the kubelet's pods are not listed.
    unlisted: Option<OwnedRwLockReadGuard<()>>,
}

/// An event that concerns the whole daemon.
#[derive(Debug)]
pub enum AppEvent {
    /// This actor has died too often.
    Escalated(&'static str),
    /// A background task has panicked, and no other one does its work.
    TaskPanicked,
    /// Another instance requests a handover.
    Asked(Asked),
    /// An operator requests an upgrade to another binary.
    Upgrade(UpgradeOrder),
    /// The configuration files have changed.
    ConfigChanged,
}

impl App {
    /// Waits for an event that concerns the whole daemon.
    pub async fn event(&mut self) -> AppEvent {
        tokio::select! {
            () = one_panicked(&mut self.tasks) => AppEvent::TaskPanicked,
            actor = self.escalated.recv() => AppEvent::Escalated(actor.unwrap_or("supervisor")),
            Some(asked) = self.asked.recv() => AppEvent::Asked(asked),
            Some(order) = self.upgrades.recv() => AppEvent::Upgrade(order),
            Some(()) = self.config_changes.recv() => AppEvent::ConfigChanged,
            () = self.reloader.retry() => AppEvent::ConfigChanged,
        }
    }

    /// Waits until an actor has died too often. Returns its name.
    pub async fn escalated(&mut self) -> &'static str {
        self.escalated.recv().await.unwrap_or("supervisor")
    }
}

/// Waits until a task has panicked. Some of them end when their work is done.
async fn one_panicked(tasks: &mut FuturesUnordered<JoinHandle<()>>) {
    while let Some(ended) = tasks.next().await {
        if ended.is_err_and(|error| error.is_panic()) {
            return;
        }
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn only_a_panic_of_a_task_ends_the_daemon() {
        let ended = tokio::spawn(async {});
        let aborted = tokio::spawn(std::future::pending());
        aborted.abort();
        let mut tasks: FuturesUnordered<_> = [ended, aborted].into_iter().collect();
        tokio::task::yield_now().await;
        assert_eq!(one_panicked(&mut tasks).now_or_never(), None);
        assert!(tasks.is_empty(), "both have ended");
        #[expect(clippy::panic, reason = "the subject of the test")]
        tasks.push(tokio::spawn(async { panic!("a fault") }));
        one_panicked(&mut tasks).await;
    }
}
