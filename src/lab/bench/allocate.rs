//! `holdfast bench allocate`: a kubelet's calls to a private daemon or to any plugin, and the
//! floors, round by round.
//!
//! Every round measures Allocates and all floors, so that a machine that becomes slower makes all
//! of them slower.

use super::caller::{self, Caller, failed};
use super::floor::{Append, Rewrite};
use super::instance::{Common, Instance, Interrupts, Offer};
use super::report::{Durations, Report, ratio, span, tenth};
use crate::console::exit::Failed;
use crate::console::progress::Progress;
use crate::console::{Global, block_on, eprintln};
use crate::domain::Durability;
use crate::store::journal_bytes;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Rounds of a run with several calls at a time: Allocates, empty calls, appends; then the next.
const ROUNDS: u64 = 20;
/// Calls of a round for each of the callers, at least: at its begin and end not all of them are
/// busy.
const CALLS_OF_A_CALLER_MIN: u64 = 16;
/// How long a plugin may take to send its list, and the private daemon to register.
const READY_DEADLINE: Duration = Duration::from_secs(30);
/// As many ids as eight resources of 64 devices have.
const OFFER: Offer = Offer { resources: 1, files: 64, replicas: 8 };
/// The limit of a durable Allocate, as a multiple of an append with its fdatasync, and of an empty
/// call.
const APPENDS_MAX: f64 = 1.8;
/// What a grant of one device comes to in Holdfast's journal, about: the floor's record where
/// another plugin is measured.
const RECORD_BYTES: u64 = 512;

/// `--durability`, in the words of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Promise {
    /// On disk before the answer
    PowerLoss,
    /// Written before the answer, on disk right after
    ProcessCrash,
}

impl Promise {
    /// The configuration's durability, unless `promise` names one.
    pub(super) fn durability(
        promise: Option<Promise>,
        global: &Global,
    ) -> Result<Durability, Failed> {
        Ok(match promise {
            Some(Promise::PowerLoss) => Durability::PowerLoss,
            Some(Promise::ProcessCrash) => Durability::ProcessCrash,
            None => global.load_config()?.durability,
        })
    }
}

/// How much, and how.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Allocate calls that count
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    calls: u64,
    /// Calls under way at a time
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    concurrency: u64,
    /// Devices in each call
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    devices: u64,
    /// What a grant survives when it is answered [default: the configuration's]
    #[arg(long, value_name = "PROMISE", conflicts_with = "endpoint")]
    durability: Option<Promise>,
    /// Measure the plugin that serves this socket, of any vendor, instead of a private daemon. The
    /// plugin performs every Allocate: GRANTS MAY STAY IN ITS RECORDS. A running Holdfast accepts
    /// calls of its own user and of root only, and releases the grants that no container was
    /// started with; use this only on nodes without workloads
    #[arg(long, value_name = "SOCKET")]
    endpoint: Option<PathBuf>,
    /// Allocate calls before the first that counts
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    warm_up: u64,
    /// Milliseconds without load before each measurement of a single caller. A kubelet calls
    /// rarely, when all threads are idle
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=1000))]
    pause: u64,
    #[command(flatten)]
    common: Common,
}

impl Options {
    /// Milliseconds between the measurements of a single caller. In this time the daemon finishes
    /// the work after a commit and its threads become idle. Several callers make no pause.
    fn pause_ms(&self) -> Option<u64> {
        (self.concurrency == 1).then_some(self.pause)
    }
}

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let report = match &options.endpoint {
        None => {
            let durability = Promise::durability(options.durability, global)?;
            let instance =
                Instance::create(options.common.place(&global.state_dir)?, durability, OFFER)?;
            let (device_plugins, state_dir) =
                (instance.kubelet_dir().join("device-plugins"), instance.state_dir().to_owned());
            let options = options.clone();
            instance.measure_with_daemon(Box::new(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    let mut heard = caller::serve(&device_plugins)?;
                    let first =
                        tokio::time::timeout(READY_DEADLINE, heard.recv()).await.ok().flatten();
                    let caller =
                        Caller::new(first.ok_or_else(|| {
                            failed("the private daemon did not register in time")
                        })?)?;
                    measure(&caller, &state_dir, Some(durability), &options).await
                })
            }))?
        }
        Some(socket) => {
            let place = options.common.place(&global.state_dir)?;
            let measured = async {
                let caller = Caller::dial(socket, READY_DEADLINE).await?;
                eprintln(format_args!(
                    "{} Allocates go to the living plugin at `{}`, and may stay in its books as grants without containers",
                    options.calls + options.warm_up,
                    socket.display()
                ));
                measure(&caller, place.path(), None, options).await
            };
            block_on(async { Interrupts::new()?.or(measured).await })??
        }
    };
    report.show(global, options.common.plot.as_deref())
}

/// Everything that one run measured.
struct Measured {
    allocate: Durations,
    grpc_empty: Durations,
    append: Durations,
    rewrite: Durations,
    rewrite_synced: Durations,
    /// The time in which Allocates were made.
    allocating: Duration,
    /// The time in which as many empty calls were made, as many of them at a time.
    emptying: Duration,
}

impl Measured {
    fn new() -> Result<Self, Failed> {
        Ok(Measured {
            allocate: Durations::new()?,
            grpc_empty: Durations::new()?,
            append: Durations::new()?,
            rewrite: Durations::new()?,
            rewrite_synced: Durations::new()?,
            allocating: Duration::ZERO,
            emptying: Duration::ZERO,
        })
    }
}

/// Measures. `durability` is that of the private daemon, whose journal gives the size of its
/// records.
async fn measure(
    caller: &Caller,
    dir: &Path,
    durability: Option<Durability>,
    options: &Options,
) -> Result<Report, Failed> {
    let mut measured = Measured::new()?;
    let written = || durability.map_or(Ok(0), |_| journal_bytes(dir));
    let before = written()?;
    caller.allocate(options.warm_up, options.concurrency, options.devices, |_| {}).await?;
    let record_bytes =
        if durability.is_some() { (written()? - before) / options.warm_up } else { RECORD_BYTES };
    let (mut disk, mut checkpoint) = (Append::create(dir, record_bytes)?, Rewrite::new(dir));

    // One after the other, so that each finds the processors and the disk as idle as the others do:
    // a sync that comes right behind another one is faster than one after a pause, and so is a
    // call. Hence something of the disk's between two calls.
    let pause = async || {
        if let Some(ms @ 1..) = options.pause_ms() {
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
    };
    let per_round = match options.concurrency {
        1 => 1,
        callers => options.calls.div_ceil(ROUNDS).max(callers * CALLS_OF_A_CALLER_MIN),
    };
    let mut left = options.calls;
    let mut progress = Progress::new("calls measured");
    let number = |calls| usize::try_from(calls).unwrap_or(usize::MAX);
    while left > 0 {
        progress.at(number(options.calls - left), Some(number(options.calls)));
        let calls = per_round.min(left);
        left -= calls;
        pause().await;
        let began = Instant::now();
        caller
            .allocate(calls, options.concurrency, options.devices, |took| {
                measured.allocate.add(took);
            })
            .await?;
        measured.allocating += began.elapsed();
        pause().await;
        for _ in 0..calls {
            measured.append.add(disk.append()?);
        }
        pause().await;
        for _ in 0..calls {
            measured.grpc_empty.add(caller.empty().await?);
        }
        let began = Instant::now();
        caller.empties(calls, options.concurrency).await?;
        measured.emptying += began.elapsed();
        pause().await;
        for _ in 0..calls {
            let (renamed, synced) = checkpoint.rewrite()?;
            measured.rewrite.add(renamed);
            measured.rewrite_synced.add(synced);
        }
    }
    Ok(report(options, durability, measured))
}

#[expect(clippy::cast_precision_loss, reason = "a count of calls")]
fn report(options: &Options, durability: Option<Durability>, measured: Measured) -> Report {
    let Measured { allocate, grpc_empty, append, rewrite, rewrite_synced, allocating, emptying } =
        measured;
    let per_second = |took: Duration| tenth(options.calls as f64 / took.as_secs_f64());
    let (allocates, empties) = (per_second(allocating), per_second(emptying));
    let (p50, grpc, disk, file) =
        (allocate.us(0.5), grpc_empty.us(0.5), append.us(0.5), rewrite.us(0.5));
    let mut document = allocate.document();
    let more = json!({
        "calls": options.calls,
        "concurrency": options.concurrency,
        "durability": durability.map(Durability::as_str),
        "endpoint": options.endpoint,
        "pause_ms": options.pause_ms(),
        "per_second": allocates,
        "floor": {
            "grpc_empty_p50_us": grpc,
            "grpc_empty_per_second": empties,
            "append_fdatasync_p50_us": disk,
            "rewrite_fsync_p50_us": file,
            "rewrite_fsync_dir_p50_us": rewrite_synced.us(0.5),
            "grpc_empty": grpc_empty.document(),
            "append_fdatasync": append.document(),
            "rewrite_fsync": rewrite.document(),
            "rewrite_fsync_dir": rewrite_synced.document(),
        },
        "ratio": {
            "grpc_p50": ratio(p50, grpc),
            "grpc_and_append_p50": ratio(p50, grpc + disk),
            "grpc_and_rewrite_p50": ratio(p50, grpc + file),
            "rewrite_p50": ratio(p50, file),
            "limit_p50": ratio(p50, APPENDS_MAX * disk + grpc),
        },
    });
    if let (Value::Object(document), Value::Object(more)) = (&mut document, more) {
        document.extend(more);
    }

    let whose = durability
        .map_or_else(|| "another plugin".to_owned(), |durability| durability.as_str().to_owned());
    let peace =
        options.pause_ms().map_or_else(String::new, |ms| format!(" behind {ms} ms of peace"));
    let title = format!(
        "Allocate: {} calls, {} at a time{peace}, {whose}",
        options.calls, options.concurrency
    );
    let mut remarks = vec![format!("{title}: {allocates:.0} per second")];
    if options.concurrency == 1 && durability == Some(Durability::ProcessCrash) {
        remarks.push(format!("p50 is {:.2} × an empty call: no disk is waited for", p50 / grpc));
    } else if options.concurrency == 1 {
        let limit = APPENDS_MAX * disk + grpc;
        remarks.push(format!(
            "p50 is {:.2} × a checkpoint as the kubelet writes it (new file + fsync + rename: {}); the limit is 1.00",
            p50 / file,
            span(file)
        ));
        remarks.push(format!(
            "p50 is {:.2} × ({APPENDS_MAX} × (append + fdatasync) + an empty call: {}); the limit is 1.00",
            p50 / limit,
            span(limit)
        ));
    } else {
        let share = 100.0 * allocates / empties;
        remarks
            .push(format!("empty gRPC calls, {} at a time: {empties:.0} per second; Allocates: {share:.0} % of that", options.concurrency));
    }
    let rows = vec![
        ("Allocate", allocate),
        ("empty gRPC call", grpc_empty),
        ("append + fdatasync", append),
        ("file anew + fsync + rename", rewrite),
        ("file anew + fsync of directory", rewrite_synced),
    ];
    Report { heading: "call", title, document, rows, remarks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn reported(concurrency: &str, durability: Durability) -> Report {
        let options =
            Line::parse_from(["allocate", "--calls=1000", "--concurrency", concurrency]).options;
        let mut measured = Measured::new().unwrap();
        (1..=1000).for_each(|us| measured.allocate.add(Duration::from_micros(us)));
        let us = |us| {
            let mut durations = Durations::new().unwrap();
            durations.add(Duration::from_micros(us));
            durations
        };
        (measured.grpc_empty, measured.append) = (us(50), us(200));
        (measured.rewrite, measured.rewrite_synced) = (us(450), us(700));
        (measured.allocating, measured.emptying) =
            (Duration::from_secs(2), Duration::from_millis(250));
        report(&options, Some(durability), measured)
    }

    #[test]
    fn the_document_is_what_is_promised() {
        let one = |us: f64| {
            format!(
                r#"{{"count":1,"max_us":{us:?},"p50_us":{us:?},"p90_us":{us:?},"p999_us":{us:?},"p99_us":{us:?}}}"#
            )
        };
        let wanted = [
            r#"{"calls":1000,"concurrency":1,"count":1000,"durability":"power-loss","endpoint":null,"floor":{"append_fdatasync":"#,
            &one(200.1),
            r#","append_fdatasync_p50_us":200.1,"grpc_empty":"#,
            &one(50.0),
            r#","grpc_empty_p50_us":50.0,"grpc_empty_per_second":4000.0,"rewrite_fsync":"#,
            &one(450.0),
            r#","rewrite_fsync_dir":"#,
            &one(700.4),
            r#","rewrite_fsync_dir_p50_us":700.4,"rewrite_fsync_p50_us":450.0},"max_us":1000.4,"#,
            r#""p50_us":500.2,"p90_us":900.1,"p999_us":999.4,"p99_us":990.2,"pause_ms":10,"per_second":500.0,"#,
            r#""ratio":{"grpc_and_append_p50":2.0,"grpc_and_rewrite_p50":1.0,"grpc_p50":10.0,"limit_p50":1.22,"rewrite_p50":1.11}}"#,
        ];
        assert_eq!(reported("1", Durability::PowerLoss).document.to_string(), wanted.concat());
    }

    #[test]
    fn the_figures_are_compared_with_the_floors_where_that_means_something() {
        let wanted = [
            "Allocate: 1000 calls, 1 at a time behind 10 ms of peace, power-loss: 500 per second",
            "p50 is 1.11 × a checkpoint as the kubelet writes it (new file + fsync + rename: 450.0 µs); the limit is 1.00",
            "p50 is 1.22 × (1.8 × (append + fdatasync) + an empty call: 410.2 µs); the limit is 1.00",
        ];
        assert_eq!(reported("1", Durability::PowerLoss).remarks, wanted);
        let without_disk = reported("1", Durability::ProcessCrash).remarks;
        assert_eq!(without_disk[1..], ["p50 is 10.00 × an empty call: no disk is waited for"]);
        assert_eq!(
            reported("8", Durability::PowerLoss).remarks[1],
            "empty gRPC calls, 8 at a time: 4000 per second; Allocates: 12 % of that"
        );
    }
}
