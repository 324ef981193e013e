//! `holdfast bench soak`: runs a daemon under load and faults, and checks whether its resource use
//! grows.
//!
//! ```text
//!  pods: create, finish, delete ─▶ simulated kubelet ◀─ gRPC ─▶ daemon process ─▶ /proc ─▶ trends
//!  faults, one after the other ──────────┴─────────────────────────┘
//!  at the end: every container that runs with devices is compared with the output of `who -o json`
//! ```
//!
//! A trend has a confidence interval of 95 %. The first third of the samples is left out: the first
//! use of memory is not a leak. A holder that differs from the kubelet's is a failure.

mod faults;
mod report;

use self::faults::Fault;
use super::measurements::{Column, Measurements, column, number, quantile};
use super::node::{Node, NodeOptions, interrupted, plain_config, plain_files};
use crate::console::exit::Failed;
use crate::console::progress::Progress;
use crate::console::{Global, block_on};
use crate::lab::sim::kubelet::{EventKind, PodSpec};
use crate::lab::sim::random::Random;
use clap::Args;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::time::MissedTickBehavior;

/// Resources, the files of each, and the ids of each file: 512 ids, as a node with eight resources
/// of 64 devices has.
const RESOURCES: usize = 2;
const FILES: usize = 32;
const REPLICAS: usize = 8;
/// Maximum number of finished pods that are not deleted yet.
const FINISHED_MAX: usize = 8;
/// One of this many pods has an init container, which passes its devices to the next container.
const WITH_INIT: u64 = 5;
/// Maximum wait for the decision on a pod; a killed daemon is back earlier.
const DECISION_TIMEOUT: Duration = Duration::from_secs(20);

const COLUMNS: [Column; 14] = [
    column("minute", "minute", 2),
    column("rss_kib", "rss KiB", 0),
    column("anon_kib", "anon KiB", 0),
    column("descriptors", "fds", 0),
    column("threads", "threads", 0),
    column("sleeps_per_second", "sleeps/s", 1),
    column("cpu_percent", "cpu %", 1),
    column("state_kib", "state KiB", 0),
    column("grants", "grants", 0),
    column("live_pods", "pods", 0),
    column("allocate_p50_us", "p50 us", 0),
    column("allocate_p99_us", "p99 us", 0),
    column("rejected", "rejected", 0),
    column("life", "life", 0),
];

/// Duration, load and faults.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Duration in minutes; fractions are allowed, such as 0.5
    #[arg(long, value_name = "M", default_value_t = 10.0)]
    minutes: f64,
    /// Pods created per minute; most are granted once, those with an init container twice
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    grants_per_minute: u64,
    /// Number of pods that run at the same time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=400))]
    pods: u64,
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: u64,
    /// Seconds between two faults: a device is removed, it returns, the kubelet restarts, a stream
    /// ends, the configuration is reloaded; 0 for none
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    faults_every: u64,
    /// Also kill the daemon (SIGKILL) after each round of the other faults. Trends then cover its
    /// longest run
    #[arg(long)]
    kill: bool,
    /// Seed of the random decisions
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Draw memory and descriptors to FILE, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    node: NodeOptions,
}

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    if !(0.01..=60.0 * 24.0 * 30.0).contains(&options.minutes) {
        return Err(Failed::new(
            crate::console::exit::USAGE,
            "--minutes must be between 0.01 and 43200",
        ));
    }
    block_on(async {
        let node = options
            .node
            .start(&global.state_dir, &config(0), |host| {
                plain_files(host, RESOURCES, RESOURCES * FILES)
            })
            .await?;
        let mut soak = Soak::new(node, options);
        // An early end is a normal end: report the data so far.
        let outcome = tokio::select! {
            ended = soak.run_load() => ended,
            () = interrupted() => Ok(()),
        };
        outcome?;
        soak.finish(global).await
    })?
}

/// The configuration; another number changes it, but not the offered devices.
fn config(number: u64) -> String {
    plain_config(RESOURCES, REPLICAS)
        .replace("\nreplicas", &format!("\nenv = {{ BENCH_ROUND = \"{number}\" }}\nreplicas"))
}

struct Soak<'a> {
    node: Node,
    options: &'a Options,
    random: Random,
    began: Instant,
    /// The running pods and the finished ones, by UID.
    pods: Vec<String>,
    finished: VecDeque<String>,
    made: u64,
    grants: u64,
    rejected: u64,
    faults: BTreeMap<Fault, u64>,
    daemon_run: u64,
    measurements: Measurements,
    /// Time of the newest sample on the kubelet's clock, with the context switches and the CPU time
    /// until then.
    sampled: (Duration, f64, f64),
}

impl<'a> Soak<'a> {
    fn new(node: Node, options: &'a Options) -> Self {
        let sampled = (node.kubelet.now(), f64::NAN, f64::NAN);
        Soak {
            node,
            options,
            random: Random::new(options.seed),
            began: Instant::now(),
            pods: Vec::new(),
            finished: VecDeque::new(),
            made: 0,
            grants: 0,
            rejected: 0,
            faults: BTreeMap::new(),
            daemon_run: 1,
            measurements: Measurements::new(&COLUMNS),
            sampled,
        }
    }

    async fn run_load(&mut self) -> Result<(), Failed> {
        let length = Duration::from_secs_f64(self.options.minutes * 60.0);
        let kinds = if self.options.kill { &Fault::ALL[..] } else { &Fault::ALL[..5] };
        let mut kinds = kinds.iter().cycle();
        let faults = Duration::from_secs(self.options.faults_every);
        let (mut next_fault, mut next_sample) = (faults, Duration::ZERO);
        let mut tick = tokio::time::interval(
            Duration::from_secs(60)
                / u32::try_from(self.options.grants_per_minute).unwrap_or(u32::MAX),
        );
        // Pods that were delayed by a fault follow in a burst, as on a node.
        tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut progress = Progress::new("seconds");
        let seconds = |time: Duration| usize::try_from(time.as_secs()).unwrap_or(0);
        loop {
            let now = self.began.elapsed();
            if now >= length {
                return self.sample();
            }
            progress.at(seconds(now), Some(seconds(length)));
            if now >= next_sample {
                self.sample()?;
                next_sample += Duration::from_secs(self.options.every);
            }
            if !faults.is_zero() && now >= next_fault {
                if let Some(fault) = kinds.next() {
                    self.fault(*fault).await?;
                }
                next_fault += faults;
            }
            tick.tick().await;
            self.churn().await?;
        }
    }

    /// Creates a pod, and ends another one.
    async fn churn(&mut self) -> Result<(), Failed> {
        self.made += 1;
        let resource = &self.node.resources[self.random.below(RESOURCES)];
        let devices = 1 + u32::from(self.random.chance(0.2));
        let spec = PodSpec::new("soak", format!("pod-{}", self.made));
        let spec = if self.made.is_multiple_of(WITH_INIT) {
            spec.init("init", resource, devices)
        } else {
            spec
        };
        let spec = spec.app("main", resource, devices);
        let uid = spec.uid.clone();
        // A pod without a decision stays; the next run of the kubelet or of the daemon decides it.
        drop(tokio::time::timeout(DECISION_TIMEOUT, self.node.kubelet.add_pod(spec)).await);
        self.pods.push(uid);
        if self.pods.len() <= usize::try_from(self.options.pods).unwrap_or(usize::MAX) {
            return Ok(());
        }
        let uid = self.pods.swap_remove(self.random.below(self.pods.len()));
        if self.random.chance(0.5) && self.node.kubelet.complete_pod(&uid)? {
            self.finished.push_back(uid);
            if self.finished.len() <= FINISHED_MAX {
                return Ok(());
            }
            let Some(uid) = self.finished.pop_front() else { return Ok(()) };
            self.node.kubelet.delete_pod(&uid)?;
        } else {
            self.node.kubelet.delete_pod(&uid)?;
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<(), Failed> {
        let read = self.node.readings()?;
        let (since, sleeps, cpu) = self.sampled;
        let now = self.node.kubelet.now();
        let seconds = (now - since).as_secs_f64();
        let (took, rejected) = self.node.kubelet.view(|view| {
            let new = view.events().iter().rev().take_while(|event| event.at > since);
            let took = |kind: &EventKind| match kind {
                EventKind::Allocated { took, .. } => Some(took.as_secs_f64() * 1e6),
                _ => None,
            };
            (new.filter_map(|event| took(&event.kind)).collect::<Vec<f64>>(), view.rejections())
        });
        self.grants += took.len() as u64;
        let rejected_now = rejected - self.rejected;
        self.rejected = rejected;
        self.measurements.add(&[
            self.began.elapsed().as_secs_f64() / 60.0,
            read.rss_kib,
            read.anon_kib,
            read.descriptors,
            read.threads,
            (read.switches - sleeps) / seconds,
            (read.cpu_seconds - cpu) / seconds * 100.0,
            number(usize::try_from(self.node.state_bytes()).unwrap_or(usize::MAX)) / 1024.0,
            number(usize::try_from(self.grants).unwrap_or(usize::MAX)),
            number(self.pods.len()),
            quantile(&took, 0.5),
            quantile(&took, 0.99),
            number(usize::try_from(rejected_now).unwrap_or(usize::MAX)),
            number(usize::try_from(self.daemon_run).unwrap_or(usize::MAX)),
        ]);
        self.sampled = (now, read.switches, read.cpu_seconds);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::report::trend;
    use super::*;

    #[test]
    fn a_trend_covers_the_longest_run_without_its_first_third() {
        let mut measurements = Measurements::new(&COLUMNS);
        for minute in 0..40 {
            let mut row = [0.0; COLUMNS.len()];
            row[0] = f64::from(minute);
            // A run of ten minutes, and one of thirty that first grows in steps and then by 1 KiB a
            // minute.
            (row[13], row[2]) = if minute < 10 {
                (1.0, 1e6)
            } else {
                (2.0, if minute < 20 { 50.0 * f64::from(minute) } else { f64::from(minute) })
            };
            measurements.add(&row);
        }
        let trend = trend(&measurements, "anon_kib").unwrap();
        assert_eq!((trend.count, trend.slope.round()), (20, 60.0));
    }

    #[test]
    fn each_round_has_another_configuration_with_the_same_devices() {
        assert_ne!(config(1), config(2));
        assert_eq!(config(1).matches("[[resource]]").count(), RESOURCES);
        assert_eq!(config(1).matches("BENCH_ROUND").count(), RESOURCES);
    }
}
