//! The daemon under test, and its verbs.

use crate::node::Process;
use crate::sandbox::output;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether another binary than the one just built was named: then it is worth measuring.
pub(crate) fn is_named() -> bool {
    std::env::var_os("HOLDFAST_BIN").is_some()
}

#[derive(Debug)]
pub(crate) struct Daemon {
    dir: PathBuf,
    process: Process,
    starts: usize,
}

/// One grant of `who -o json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) alloc_id: String,
    pub(crate) resource: String,
    pub(crate) devices: Vec<String>,
    pub(crate) state: String,
    /// `namespace/name uid container`, once all of it is known.
    pub(crate) holder: Option<String>,
}

/// The one under test: `HOLDFAST_BIN`, else the one just built.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("HOLDFAST_BIN").map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_holdfast")), PathBuf::from)
}

fn holdfast(dir: &Path) -> Command {
    let mut command = Command::new(binary());
    command.arg("--config").arg(dir.join("holdfast.toml"));
    command.arg("--state-dir").arg(dir.join("state")).arg("--run-dir").arg(dir.join("run"));
    command.envs(unit_environment());
    command
}

/// What its systemd unit sets: how much memory it keeps depends on that.
fn unit_environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = include_str!("../../systemd/holdfast.service").lines();
    lines.filter_map(|line| line.strip_prefix("Environment=")).flat_map(str::split_whitespace).filter_map(|pair| pair.split_once('='))
}

/// The grants of a document of `who -o json`.
pub(crate) fn grants(document: &Value) -> Vec<Held> {
    let held = |grant: &Value| {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let pod = &grant["pod"];
        let holder = || {
            let (namespace, name) = (text(&pod["namespace"])?, text(&pod["name"])?);
            Some(format!("{namespace}/{name} {} {}", text(&pod["uid"])?, text(&grant["container"])?))
        };
        Held {
            alloc_id: text(&grant["alloc_id"]).unwrap(),
            resource: text(&grant["resource"]).unwrap(),
            devices: grant["devices"].as_array().unwrap().iter().map(|id| text(id).unwrap()).collect(),
            state: text(&grant["state"]).unwrap(),
            holder: holder(),
        }
    };
    document["grants"].as_array().unwrap().iter().map(held).collect()
}

impl Daemon {
    pub(crate) fn start(dir: &Path, config: &str) -> Self {
        fs::write(dir.join("holdfast.toml"), config).unwrap();
        let process = Process::start(holdfast(dir).arg("run"), dir.join("holdfast-1.log"));
        Daemon { dir: dir.to_owned(), process, starts: 1 }
    }

    /// Ends it with `signal` and starts it again.
    pub(crate) fn restart(&mut self, signal: Signal) {
        self.starts += 1;
        let log = self.dir.join(format!("holdfast-{}.log", self.starts));
        self.process.stop(signal);
        self.process = Process::start(holdfast(&self.dir).arg("run"), log);
    }

    /// Changes what the next instance finds.
    pub(crate) fn configure(&self, change: impl FnOnce(&str) -> String) {
        let file = self.dir.join("holdfast.toml");
        fs::write(&file, change(crate::CONFIG)).unwrap();
    }

    /// Has another one take over, and ends it when `leaves` says so, before or after that is complete.
    pub(crate) fn hand_over(&mut self, leaves: impl FnOnce(&Path) -> Signal) {
        self.starts += 1;
        let log = self.dir.join(format!("holdfast-{}.log", self.starts));
        let mut next = Process::start(holdfast(&self.dir).args(["run", "--take-over"]), log.clone());
        let signal = leaves(&log);
        std::mem::swap(&mut self.process, &mut next);
        next.stop(signal);
    }

    fn ask(&self, verb: &str) -> Value {
        serde_json::from_str(&output(holdfast(&self.dir).args([verb, "-o", "json"]))).unwrap()
    }

    /// Has it do something.
    pub(crate) fn instruct(&self, verb: &[&str]) {
        output(holdfast(&self.dir).args(verb));
    }

    /// Who holds what.
    pub(crate) fn who(&self) -> Vec<Held> {
        grants(&self.ask("who"))
    }

    /// Whether the kubelet has opened a stream for every resource.
    pub(crate) fn is_registered(&self) -> bool {
        // One that is just starting does not answer yet.
        let answer = holdfast(&self.dir).args(["status", "-o", "json"]).output().unwrap();
        let Some(status) = serde_json::from_slice::<Value>(&answer.stdout).ok().filter(|_| answer.status.success()) else { return false };
        let resources = status["resources"].as_array().unwrap();
        !resources.is_empty() && resources.iter().all(|resource| resource["registered"] == true)
    }

    /// What the kubelet has otherwise than it was told, by resource.
    pub(crate) fn disagreements(&self) -> Vec<String> {
        let status = self.ask("status");
        let told = status["resources"].as_array().unwrap().iter().filter_map(|resource| resource["disagreement"].as_str());
        told.map(str::to_owned).collect()
    }

    /// Resident memory in KiB, and how much of it is not the binary.
    pub(crate) fn resident_kib(&self) -> (u64, u64) {
        let status = self.proc("status");
        (number(&status, "VmRSS:"), number(&status, "RssAnon:"))
    }

    /// By thread, with its name: how often it has gone to sleep by itself so far.
    pub(crate) fn sleeps(&self) -> BTreeMap<String, u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.pid())).unwrap();
        let ids = tasks.map(|task| task.unwrap().file_name().into_string().unwrap());
        ids.map(|id| {
            let name = self.proc(&format!("task/{id}/comm"));
            (format!("{} {id}", name.trim()), number(&self.proc(&format!("task/{id}/status")), "voluntary_ctxt_switches:"))
        })
        .collect()
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.process.pid())).unwrap()
    }
}

/// The number behind a key of a `status` file.
fn number(text: &str, key: &str) -> u64 {
    text.lines().find_map(|line| line.strip_prefix(key)).unwrap().split_whitespace().next().unwrap().parse().unwrap()
}
