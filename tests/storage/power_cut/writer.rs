//! The process that writes the ledger on the disk: it executes commands, one a line, and answers
//! each when it is done.
//!
//! It waits for the next line after every answer. So the answer depends on exactly the requests
//! that the disk has got by then.

use holdfast::domain::{Durability, Entry};
use holdfast::store::Store;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Set in the writer: its directory, and how durable an answer is.
const WRITES: &str = "HOLDFAST_POWER_CUT_WRITES";
/// What its answers begin with; the harness prints other lines.
const DONE: &str = "done ";

/// A command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Make these durable.
    Append(Vec<Entry>),
    /// Begin a checkpoint, which runs during the commands that follow.
    BeginCheckpoint,
    /// Do a whole checkpoint.
    Checkpoint,
}

/// The part of the writer, where this process is one.
pub(crate) fn run_writer_if_ordered() -> bool {
    let Ok(told) = std::env::var(WRITES) else { return false };
    let (durability, dir) = told.split_once(' ').unwrap();
    let durability =
        if durability == "power-loss" { Durability::PowerLoss } else { Durability::ProcessCrash };
    let (mut store, recovered) =
        Store::open(Path::new(dir), durability, Some("the boot before")).unwrap();
    let answer = |text: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n{DONE}{text}").and_then(|()| out.flush()).unwrap();
    };
    answer(recovered.report.to_string());
    for line in std::io::stdin().lines() {
        match serde_json::from_str(&line.unwrap()).unwrap() {
            Order::Append(entries) => store.append(&entries).unwrap(),
            Order::BeginCheckpoint => drop(store.begin_checkpoint().unwrap()),
            Order::Checkpoint => store.checkpoint().unwrap(),
        }
        answer(String::new());
    }
    true
}

/// The handle of a writer. It is killed with this value.
#[derive(Debug)]
pub(crate) struct Writer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Writer {
    /// Starts one, and waits until it has opened the ledger in `dir`.
    pub(crate) fn start(test: &str, dir: &Path, durability: &str) -> Writer {
        let mut told = std::ffi::OsString::from(format!("{durability} "));
        told.push(PathBuf::from(dir));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", test, "--nocapture"])
            .env(WRITES, told)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (orders, answers) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut writer = Writer { child, orders, answers };
        writer.wait();
        writer
    }

    /// Has it do something, and waits until it is done.
    pub(crate) fn order(&mut self, order: &Order) {
        let mut line = serde_json::to_string(order).unwrap();
        line.push('\n');
        self.orders.write_all(line.as_bytes()).unwrap();
        self.wait();
    }

    fn wait(&mut self) {
        let mut line = String::new();
        while !line.starts_with(DONE) {
            line.clear();
            assert!(
                self.answers.read_line(&mut line).unwrap() > 0,
                "the writer ended; its output is above"
            );
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
