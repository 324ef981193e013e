//! NVML in a process of its own: this program once more, under the name [`NVML_PROCESS`].
//!
//! ```text
//!  daemon ─ stdin: the request, then each other set of GPUs ─▶ process ─▶ NVML
//!     ▲──── stdout: the answer, or reports ────────────────────┘
//! ```
//!
//! Each message is one line of JSON; both sides are the same binary. If the library crashes or
//! exits, only that process ends. It ends when its standard input is closed, so also when the
//! daemon dies, unless the driver keeps it in an uninterruptible sleep.

use super::events::{NvmlReport, watch_events};
use super::{NAME, NvmlAnswer, candidates, not_found, query_first};
use crate::domain::{NvmlLibrary, NvmlQuery, PciAddress};
use crate::host::{HostRoot, lower_thread_priority};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, watch};

/// The name (`argv[0]`) of the process.
pub const NVML_PROCESS: &str = "holdfast-nvml";

/// This program, also after its file was replaced by an upgrade (proc_pid_exe(5)).
const THIS_PROGRAM: &str = "/proc/self/exe";

/// The first line to the process.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    /// The libraries to try, in this order.
    libraries: Vec<PathBuf>,
    task: Task,
}

#[derive(Debug, Serialize, Deserialize)]
enum Task {
    Query(NvmlQuery),
    Watch(BTreeSet<PciAddress>),
}

/// Queries NVML. It may take as long as the library takes, also for ever. The process is killed
/// when the future is dropped.
pub async fn query_nvml(root: HostRoot, library: NvmlLibrary, query: NvmlQuery) -> NvmlAnswer {
    let libraries = candidates(&root, &library);
    if libraries.is_empty() {
        return NvmlAnswer::failed(not_found());
    }
    match Process::start(&Request { libraries, task: Task::Query(query) }).await {
        Ok(mut process) => match process.next().await {
            Some(answer) => answer,
            None => NvmlAnswer::failed(process.ended().await),
        },
        Err(error) => NvmlAnswer::failed(not_started(&error)),
    }
}

/// Queries NVML in this process. Only for tests: they are another program, which cannot start
/// itself as [`NVML_PROCESS`].
#[must_use]
pub fn query_nvml_here(root: &HostRoot, library: &NvmlLibrary, query: &NvmlQuery) -> NvmlAnswer {
    answer(&candidates(root, library), query)
}

/// Watches the GPUs of `gpus` until the channel is closed or has no GPU. A process that has another
/// set of GPUs to watch registers them at the end of its next wait without an event.
pub async fn watch_nvml_events(
    root: HostRoot,
    library: NvmlLibrary,
    gpus: watch::Receiver<BTreeSet<PciAddress>>,
    reports: mpsc::Sender<NvmlReport>,
) {
    let why = follow(candidates(&root, &library), gpus, &reports).await;
    // The send fails only when the daemon ends.
    drop(reports.send(NvmlReport::Ended(why)).await);
}

/// Passes on the reports of a process. Returns why it has ended.
async fn follow(
    libraries: Vec<PathBuf>,
    mut gpus: watch::Receiver<BTreeSet<PciAddress>>,
    reports: &mpsc::Sender<NvmlReport>,
) -> Option<String> {
    if libraries.is_empty() {
        return Some(not_found());
    }
    let task = Task::Watch(gpus.borrow_and_update().clone());
    let mut process = match Process::start(&Request { libraries, task }).await {
        Ok(process) => process,
        Err(error) => return Some(not_started(&error)),
    };
    loop {
        tokio::select! {
            report = process.next() => match report {
                Some(NvmlReport::Ended(why)) => return why,
                Some(report) => reports.send(report).await.ok()?,
                None => return Some(process.ended().await),
            },
            changed = gpus.changed() => {
                changed.ok()?;
                let wanted = gpus.borrow_and_update().clone();
                // NVML is not to stay open until the end of the wait.
                if wanted.is_empty() {
                    return None;
                }
                // If the process has ended, its output ends too.
                drop(process.send(&wanted).await);
            }
        }
    }
}

fn not_started(error: &io::Error) -> String {
    format!("cannot start a process for NVML: {error}")
}

/// The process. It is killed when this value is dropped.
struct Process {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    async fn start(request: &Request) -> io::Result<Process> {
        let mut child = Command::new(THIS_PROGRAM)
            .arg0(NVML_PROCESS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let mut process = Process { child, input, output: BufReader::new(output).lines() };
        process.send(request).await?;
        Ok(process)
    }

    async fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.input.write_all(&line(message)?).await
    }

    /// The next message; `None` at the end.
    async fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        loop {
            let line = self.output.next_line().await.ok()??;
            // Any other line is the library's.
            if let Ok(message) = serde_json::from_slice(line.as_bytes()) {
                return Some(message);
            }
        }
    }

    /// How the process has ended, in a sentence.
    async fn ended(mut self) -> String {
        match self.child.wait().await {
            Ok(status) => format!("{NAME} ended the process that used it ({status})"),
            Err(error) => format!("cannot wait for the process that uses {NAME}: {error}"),
        }
    }
}

fn line(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Carries out the request on standard input. The `main` of the process.
#[must_use]
pub fn serve_nvml() -> ExitCode {
    lower_thread_priority();
    let mut lines = io::stdin().lock().lines().map_while(Result::ok);
    let request = lines.next().and_then(|line| serde_json::from_slice(line.as_bytes()).ok());
    let Some(Request { libraries, task }) = request else { return ExitCode::FAILURE };
    let (query, gpus) = match task {
        Task::Query(query) => (Some(query), BTreeSet::new()),
        Task::Watch(gpus) => (None, gpus),
    };
    let (sets, gpus) = watch::channel(gpus);
    let work = move || match query {
        Some(query) => print(&answer(&libraries, &query)),
        None => {
            let ended =
                catch_panic(|| watch_events(&libraries, gpus, &mut |report| print(&report)));
            print(&NvmlReport::Ended(ended.unwrap_or_else(Some)));
        }
    };
    if std::thread::Builder::new().name("nvml".into()).spawn(work).is_err() {
        return ExitCode::FAILURE;
    }
    // The thread may hang in NVML. The process ends with this loop.
    for line in lines {
        if let Ok(gpus) = serde_json::from_slice(line.as_bytes()) {
            sets.send_replace(gpus);
        }
    }
    ExitCode::SUCCESS
}

/// The daemon may be gone.
fn print(message: &impl Serialize) {
    drop(line(message).and_then(|line| io::stdout().write_all(&line)));
}

/// A library without the shutdown function panics when it is dropped.
fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| format!("{NAME} is incomplete"))
}

fn answer(libraries: &[PathBuf], query: &NvmlQuery) -> NvmlAnswer {
    catch_panic(|| query_first(libraries, query)).unwrap_or_else(NvmlAnswer::failed)
}
