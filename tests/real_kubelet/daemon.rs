//! The daemon under test, and its verbs.

use crate::real::binary::{as_in_unit, binary};
use crate::real::process::Process;
use crate::sandbox::output;
use crate::systemd::Systemd;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The link to a made host root, in the directory of a run that has one.
const HOST_ROOT: &str = "host-root";

#[derive(Debug)]
pub(crate) struct Daemon {
    dir: PathBuf,
    process: Process,
    starts: usize,
    /// The pod and container that hold it, if they are known.
    systemd: Option<Systemd>,
}

/// One grant of `who -o json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) alloc_id: String,
    pub(crate) resource: String,
    pub(crate) devices: Vec<String>,
    pub(crate) state: String,
    /// `namespace/name uid container`, once all three are known.
    pub(crate) holder: Option<String>,
}

/// Runs one of its verbs.
fn holdfast(dir: &Path) -> Command {
    with_options(Command::new(binary()), dir)
}

/// The daemon.
fn run(dir: &Path) -> Command {
    let mut command = with_options(as_in_unit(), dir);
    command.arg("run");
    command
}

fn with_options(mut command: Command, dir: &Path) -> Command {
    command.arg("--config").arg(dir.join("holdfast.toml"));
    if dir.join(HOST_ROOT).exists() {
        command.arg("--host-root").arg(dir.join(HOST_ROOT));
    }
    command.arg("--state-dir").arg(dir.join("state")).arg("--run-dir").arg(dir.join("run"));
    command
}

/// The grants of a document of `who -o json`.
pub(crate) fn grants(document: &Value) -> Vec<Held> {
    let held = |grant: &Value| {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let pod = &grant["pod"];
        let holder = || {
            let (namespace, name) = (text(&pod["namespace"])?, text(&pod["name"])?);
            Some(format!(
                "{namespace}/{name} {} {}",
                text(&pod["uid"])?,
                text(&grant["container"])?
            ))
        };
        Held {
            alloc_id: text(&grant["alloc_id"]).unwrap(),
            resource: text(&grant["resource"]).unwrap(),
            devices: grant["devices"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| text(id).unwrap())
                .collect(),
            state: text(&grant["state"]).unwrap(),
            holder: holder(),
        }
    };
    document["grants"].as_array().unwrap().iter().map(held).collect()
}

impl Daemon {
    /// Starts the daemon with another host root: a made one.
    pub(crate) fn start_below(dir: &Path, host_root: &Path, config: &str) -> Self {
        std::os::unix::fs::symlink(host_root, dir.join(HOST_ROOT)).unwrap();
        Self::start(dir, config)
    }

    pub(crate) fn start(dir: &Path, config: &str) -> Self {
        fs::write(dir.join("holdfast.toml"), config).unwrap();
        let process = Process::start(&mut run(dir), dir.join("holdfast-1.log"));
        Daemon { dir: dir.to_owned(), process, starts: 1, systemd: None }
    }

    /// Ends the daemon with `signal` and starts it again.
    pub(crate) fn restart(&mut self, signal: Signal) {
        self.starts += 1;
        let log = self.dir.join(format!("holdfast-{}.log", self.starts));
        self.process.stop(signal);
        let mut command = run(&self.dir);
        if let Some(systemd) = &self.systemd {
            command = systemd.in_unit(&command);
        }
        self.process = Process::start(&mut command, log);
    }

    /// Restarts the daemon as a process of a simulated systemd, whose fd store works from now on.
    pub(crate) fn put_into_unit(&mut self) {
        self.systemd.get_or_insert_with(|| Systemd::new(&self.dir.join("notify")));
        self.restart(Signal::SIGTERM);
    }

    /// Whether the process under systemd is ready, and the fd store is empty.
    pub(crate) fn has_succeeded(&self) -> bool {
        let systemd = self.systemd.as_ref().expect("it is in no unit");
        self.is_alone() && systemd.heard.borrow().times("READY=1") > 0 && systemd.keeps() == 0
    }

    /// Starts another daemon that takes over. `leaves` gets the pid of the former one and the log
    /// of the new one, and returns the signal that ends the former one when `leaves` returns:
    /// before the handover is complete, or after it.
    pub(crate) fn hand_over(&mut self, leaves: impl FnOnce(Pid, &Path) -> Signal) {
        self.starts += 1;
        let log = self.dir.join(format!("holdfast-{}.log", self.starts));
        let mut next = Process::start(run(&self.dir).arg("--take-over"), log.clone());
        let signal = leaves(Pid::from_raw(self.process.pid().cast_signed()), &log);
        std::mem::swap(&mut self.process, &mut next);
        next.stop(signal);
    }

    /// Whether the handover is complete. Before that this daemon cannot hand over again.
    pub(crate) fn is_alone(&self) -> bool {
        self.process.log_text().lines().any(|line| line.ends_with(" INFO ready"))
    }

    fn ask(&self, verb: &str) -> Value {
        serde_json::from_str(&output(holdfast(&self.dir).args([verb, "-o", "json"]))).unwrap()
    }

    /// Runs a verb that changes something.
    pub(crate) fn instruct(&self, verb: &[&str]) {
        output(holdfast(&self.dir).args(verb));
    }

    /// The grants by `who`.
    pub(crate) fn who(&self) -> Vec<Held> {
        grants(&self.ask("who"))
    }

    /// Whether the kubelet has opened a stream for every resource.
    pub(crate) fn is_registered(&self) -> bool {
        // A daemon that is just starting does not answer yet.
        let answer = holdfast(&self.dir).args(["status", "-o", "json"]).output().unwrap();
        let Some(status) = serde_json::from_slice::<Value>(&answer.stdout)
            .ok()
            .filter(|_| answer.status.success())
        else {
            return false;
        };
        let resources = status["resources"].as_array().unwrap();
        !resources.is_empty() && resources.iter().all(|resource| resource["registered"] == true)
    }

    /// How the kubelet's data differs from the daemon's, by resource.
    pub(crate) fn disagreements(&self) -> Vec<String> {
        let status = self.ask("status");
        let told = status["resources"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|resource| resource["disagreement"].as_str());
        told.map(str::to_owned).collect()
    }

    /// Resident memory in KiB, and the anonymous part of it.
    pub(crate) fn resident_kib(&self) -> (u64, u64) {
        let status = self.proc("status");
        (number(&status, "VmRSS:"), number(&status, "RssAnon:"))
    }

    /// The number of voluntary context switches of each thread, by its name.
    pub(crate) fn sleeps(&self) -> BTreeMap<String, u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.pid())).unwrap();
        let ids = tasks.map(|task| task.unwrap().file_name().into_string().unwrap());
        ids.map(|id| {
            let name = self.proc(&format!("task/{id}/comm"));
            (
                format!("{} {id}", name.trim()),
                number(&self.proc(&format!("task/{id}/status")), "voluntary_ctxt_switches:"),
            )
        })
        .collect()
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.process.pid())).unwrap()
    }
}

/// The number behind a key of a `status` file.
fn number(text: &str, key: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap()
}
