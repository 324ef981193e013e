//! `holdfast bench allocate`: a private daemon, a kubelet's calls, and the two floors, round by round.
//!
//! The daemon runs on this thread as `holdfast run` would; the caller has a thread and a runtime of its own, as the
//! kubelet is a process of its own. Every round measures Allocates and both floors, so that a machine that becomes slower
//! makes all three slower.

use super::super::exit::{FAILURE, Failed};
use super::super::progress::Progress;
use super::super::{Global, eprintln, show};
use super::caller::{Caller, Kubelet};
use super::floor::DiskFloor;
use super::instance::Instance;
use super::report::{Measured, Report};
use crate::app::App;
use crate::domain::Durability;
use crate::host;
use crate::store::journal_bytes;
use clap::{Args, ValueEnum};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Rounds of a run with several calls at a time: Allocates, empty calls, appends; then the next.
const ROUNDS: u64 = 20;
/// Calls of a round for each of the callers, at least: at its begin and end not all of them are busy.
const CALLS_OF_A_CALLER_MIN: u64 = 16;
/// How long the private daemon may take to register.
const READY_DEADLINE: Duration = Duration::from_secs(30);

/// `--durability`, in the words of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Promise {
    /// On disk before the answer
    PowerLoss,
    /// Written before the answer, on disk right after
    ProcessCrash,
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
    #[arg(long, value_name = "PROMISE")]
    durability: Option<Promise>,
    /// Allocate calls before the first that counts
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    warm_up: u64,
}

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let durability = match options.durability {
        Some(Promise::PowerLoss) => Durability::PowerLoss,
        Some(Promise::ProcessCrash) => Durability::ProcessCrash,
        None => global.load_config()?.durability,
    };
    let instance = Instance::create(&global.state_dir, durability)?;
    if host::is_tmpfs(instance.state_dir()) {
        eprintln(format_args!(
            "`{}` is a tmpfs: syncing costs nothing there, and nothing there survives a power cut; choose another with --state-dir",
            instance.state_dir().display()
        ));
    }
    let measured = actix::System::new().block_on(beside(&instance, options.clone()))?;
    let report = Report::new(options.calls, options.concurrency, durability, &measured);
    show(global.output, &report, Report::table)
}

/// Runs the daemon here and the measurement on a thread of its own.
async fn beside(instance: &Instance, options: Options) -> Result<Measured, Failed> {
    let (kubelet_dir, state_dir) = (instance.kubelet_dir(), instance.state_dir().to_owned());
    let (done, answer) = oneshot::channel();
    let thread = std::thread::Builder::new().name("caller".into()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let measured = match runtime {
            Ok(runtime) => runtime.block_on(async {
                let kubelet = Kubelet::start(&kubelet_dir)?;
                let registered = tokio::time::timeout(READY_DEADLINE, kubelet.plugin());
                let caller = registered.await.map_err(|_| failed("the private daemon did not register in time"))??;
                measure(&caller, &state_dir, &options).await
            }),
            Err(error) => Err(error.into()),
        };
        // Nobody waits for it when the daemon could not be started.
        drop(done.send(measured));
    })?;
    let app = App::start(instance.settings()?).await?;
    let measured = answer.await.map_err(|_| failed("the calling thread died"));
    app.shut_down().await;
    drop(thread.join());
    measured?
}

fn failed(why: impl std::fmt::Display) -> Failed {
    Failed::new(FAILURE, why)
}

async fn measure(caller: &Caller, state_dir: &std::path::Path, options: &Options) -> Result<Measured, Failed> {
    let mut measured = Measured::new()?;
    let before = journal_bytes(state_dir)?;
    caller.allocate(options.warm_up, options.concurrency, options.devices, |_| {}).await?;
    let record_bytes = (journal_bytes(state_dir)? - before) / options.warm_up;
    let mut disk = DiskFloor::create(state_dir, record_bytes)?;

    // One after the other, so that each finds the processors and the disk as idle as the others do: a sync that comes right
    // behind another one is faster than one after a pause.
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
        let began = Instant::now();
        caller.allocate(calls, options.concurrency, options.devices, |took| measured.allocate.add(took)).await?;
        measured.allocating += began.elapsed();
        for _ in 0..calls {
            measured.grpc_empty.add(caller.empty().await?);
        }
        let began = Instant::now();
        caller.empties(calls, options.concurrency).await?;
        measured.emptying += began.elapsed();
        for _ in 0..calls {
            measured.append_fdatasync.add(disk.append()?);
        }
    }
    Ok(measured)
}
