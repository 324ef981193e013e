//! Applies another configuration while the daemon runs; one reload at a time.
//!
//! ```text
//!   SIGHUP, another `..data`,
//!   other labels of the node ─▶ App::reload ─ read, and validated as a whole
//!                                   │ valid        └─ invalid ─▶ the last valid one stays;
//!                                   │                            the error is reported
//!                                   ▼
//!      plan (watch) ─▶ discovery scans with it ─▶ health judges by it ─▶ inventory
//!                                                                          │
//!      serving adds new resources ◀────────────────────────────────────────┤
//!      registration registers new resources and ends removed ones ◀────────┘
//! ```
//!
//! A resource that returns from claims to the device plugin does so in two steps (`returning.rs`).
//!
//! No actor gets a command: every actor follows the plan or the inventory. So an actor that was
//! rebuilt uses the newest plan, and an unchanged resource is not touched. Keys that only a start
//! can change are reported as such.

use super::App;
use super::returning::{self, Returning};
use super::specs::Specs;
use crate::admin::ConfigReport;
use crate::config::{Change, ComparedLabels, Config, ConfigError};
use crate::domain::{Plan, ResourceName, ResourceSpec};
use crate::hardware;
use crate::host::{self, HostRoot};
use crate::messages::{Mailbox, Rescan, TakeOver};
use crate::telemetry::metrics;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// How long a reload waits for the first list that follows from it. A scan takes milliseconds. A
/// disk or a driver that hangs must not block signals.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// How long a reload waits for the files. A disk that hangs must block neither a handover nor a
/// change of the kubelet's socket.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// How long after a reload whose files could not be read the next one comes.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// What a reload reads: the configuration, and the resources that it makes of this host.
type Read = Result<(Config, Specs), ConfigError>;

/// The state of reloads.
#[derive(Debug)]
pub(super) struct Reloader {
    host_root: HostRoot,
    /// The configuration that this process runs on.
    running: Config,
    /// The last valid files: the configuration of the next start in this process.
    latest: Config,
    plan: watch::Sender<Arc<Plan>>,
    report: watch::Sender<ConfigReport>,
    /// The labels of the node that `latest` was chosen by.
    labels: watch::Sender<Arc<ComparedLabels>>,
    rescan: Mailbox<Rescan>,
    take_over: Mailbox<TakeOver>,
    returning: Returning,
    /// A read that has not ended in time.
    hanging: Option<JoinHandle<Read>>,
    /// When the files are read again, because they could not be read.
    retry_at: Option<Instant>,
}

impl Reloader {
    pub(super) fn new(
        config: &Config,
        host_root: HostRoot,
        plan: watch::Sender<Arc<Plan>>,
        rescan: Mailbox<Rescan>,
        take_over: Mailbox<TakeOver>,
    ) -> Self {
        let report = watch::Sender::new(report(config, 1, Vec::new()));
        metrics::config_loaded(true, report.borrow().loaded_at);
        Reloader {
            host_root,
            running: config.clone(),
            latest: config.clone(),
            plan,
            report,
            labels: watch::Sender::new(Arc::new(config.compared_labels.clone())),
            rescan,
            take_over,
            returning: Returning::default(),
            hanging: None,
            retry_at: None,
        }
    }

    pub(super) fn report(&self) -> watch::Receiver<ConfigReport> {
        self.report.subscribe()
    }

    pub(super) fn labels(&self) -> watch::Receiver<Arc<ComparedLabels>> {
        self.labels.subscribe()
    }

    /// Waits until the files are to be read again.
    pub(super) async fn retry(&self) {
        match self.retry_at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Reads on another thread than the one that answers the kubelet. While a read hangs, there is
    /// no second one.
    async fn read(&mut self) -> Read {
        let late = || {
            let problem = format!("cannot be read: no answer within {READ_WITHIN:?}");
            Err(ConfigError::new(problem).unread())
        };
        if let Some(hanging) = &mut self.hanging
            && timeout(READ_WITHIN, hanging).await.is_err()
        {
            return late();
        }
        let reading = self.hanging.insert(self.begin_read());
        let Ok(read) = timeout(READ_WITHIN, reading).await else { return late() };
        self.hanging = None;
        read.unwrap_or_else(|error| Err(ConfigError::new(format!("cannot be read: {error}"))))
    }

    fn begin_read(&self) -> JoinHandle<Read> {
        let (previous, host_root) = (self.latest.clone(), self.host_root.clone());
        let (plan, is_usual) = (self.plan.borrow().clone(), self.running.resources.is_empty());
        let (mig_strategy, dra) = (self.running.mig_strategy, self.running.dra);
        tokio::task::spawn_blocking(move || {
            let config = previous.load_again()?;
            let configured = if config.resources.is_empty() {
                // The usual resources stay when their hardware is absent for a short time.
                let kept = plan.configured().iter().filter(|spec| is_usual && !spec.is_orphan());
                let mut usual: Vec<_> = kept.cloned().collect();
                for spec in super::specs::usual(&host_root, mig_strategy) {
                    if !usual.iter().any(|known| known.name == spec.name) {
                        usual.push(spec);
                    }
                }
                usual
            } else {
                config.offered(dra)
            };
            let mut specs = super::specs::each(&configured, &host_root).map_err(|error| {
                ConfigError::new(format!(
                    "/dev cannot be read, and the configuration has a resource for each node in \
                     it: {error}"
                ))
                .unread()
            })?;
            // The known MIG profiles are those of the current plan.
            for known in plan.specs.iter() {
                if !specs.iter().any(|spec| spec.name == known.name) {
                    specs.extend(hardware::spec_named(&configured, &known.name).map(Arc::new));
                }
            }
            Ok((config, Specs { specs: specs.into(), patterns: Plan::patterns_of(&configured) }))
        })
    }

    /// Publishes the plan if it is a new one.
    fn publish(&mut self, Specs { specs, patterns }: Specs) -> bool {
        let previous = self.plan.borrow().clone();
        // An equal resource keeps its previous value, so none is stored twice.
        let same = |spec: Arc<ResourceSpec>| {
            previous.specs.iter().find(|known| **known == spec).map_or(spec, Arc::clone)
        };
        let specs: Arc<[_]> = specs.iter().cloned().map(same).collect();
        let specs = returning::after(&previous.specs, &specs);
        let patterns = returning::after(&previous.specs, &patterns);
        let (health, ledger) = (self.running.health.clone(), self.running.policy);
        let usual = super::specs::usual_of(&self.running);
        let plan = Plan { number: previous.number, specs, patterns, usual, health, ledger };
        let stays = previous.specs.iter().filter(|spec| !spec.is_orphan()).eq(plan.specs.iter())
            && previous.patterns == plan.patterns;
        let same_rules = plan.health == previous.health && plan.ledger == previous.ledger;
        if stays && same_rules && plan.usual == previous.usual {
            return false;
        }
        // Discovery may have published a plan since then, because of new nodes in /dev.
        self.plan.send_modify(|current| {
            *current = Arc::new(Plan { number: current.number + 1, ..plan });
        });
        self.returning.follow(&previous, &self.plan, &self.rescan);
        true
    }

    async fn reload(&mut self) -> Result<Change, ConfigError> {
        self.retry_at = None;
        let (config, specs) = match self.read().await {
            Ok(read) => read,
            Err(error) => {
                tracing::error!(%error, "configuration rejected; keeping the previous one");
                self.retry_at = error.is_unread().then(|| Instant::now() + RETRY_AFTER);
                self.report.send_modify(|report| report.error = Some(error.to_string()));
                metrics::config_loaded(false, host::now().wall);
                return Err(error);
            }
        };
        let change = Change::between(&self.running, &config);
        self.running = self.running.taking(&config);
        self.latest = config;
        self.labels.send_replace(Arc::new(self.latest.compared_labels.clone()));
        let known: BTreeSet<ResourceName> =
            self.plan.borrow().specs.iter().map(|spec| spec.name.clone()).collect();
        let new: Vec<ResourceName> = specs
            .specs
            .iter()
            .map(|spec| spec.name.clone())
            .filter(|name| !known.contains(name))
            .collect();
        if !new.is_empty() {
            super::take_over::from_other_plugins(&self.take_over, new).await;
        }
        let is_new = self.publish(specs);
        let generation = self.report.borrow().generation + u64::from(is_new);
        self.report.send_replace(report(
            &self.latest,
            generation,
            change.needs_restart.iter().map(ToString::to_string).collect(),
        ));
        metrics::config_loaded(true, self.report.borrow().loaded_at);
        let changes = change.to_string().replace('\n', "; ");
        tracing::info!(
            generation,
            change = if change.is_empty() { "none" } else { &changes },
            "configuration reloaded"
        );
        if is_new
            && let Err(error) =
                self.rescan.call(Rescan { asked_at: host::now().boot }, SETTLED_WITHIN).await
        {
            tracing::warn!(%error, "the new configuration takes effect with the next scan");
        }
        Ok(change)
    }
}

fn report(config: &Config, generation: u64, needs_restart: Vec<String>) -> ConfigReport {
    ConfigReport {
        source: config.source().to_owned(),
        files: config.files.clone(),
        generation,
        hash: format!("{:08x}", config.hash),
        loaded_at: host::now().wall,
        error: None,
        needs_restart,
    }
}

impl App {
    /// Reads the configuration again and applies the keys that can change while the daemon runs.
    /// Returns when the first list that follows from it is published. The future may be dropped at
    /// any time.
    ///
    /// # Errors
    /// When it is not valid; then nothing has changed.
    pub async fn reload(&mut self) -> Result<Change, ConfigError> {
        self.reloader.reload().await
    }

    /// The last valid configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.reloader.latest
    }
}
