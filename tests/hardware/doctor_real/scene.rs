//! What each test is made of: mounts that end with it, and doctor, asked and judged.

use crate::common::inside::command;
use crate::common::{Daemon, Node, name, offered};
use holdfast::console::exit;
use holdfast::lab::sim::kubelet::Kubelet;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What a mount takes.
pub(crate) const MOUNT: [&str; 2] = ["mount", "umount"];

/// Something that is mounted until this goes.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Mounted {
    pub(crate) fn new(options: &[&str], what: &Path, at: &Path) -> Mounted {
        command(Command::new("mount").args(options).arg(what).arg(at));
        Mounted(at.to_owned())
    }

    /// A file system that is no disk.
    pub(crate) fn of_type(kind: &str, options: &str, at: &Path) -> Mounted {
        fs::create_dir_all(at).unwrap();
        Mounted::new(&["-t", kind, "-o", options], Path::new(kind), at)
    }

    pub(crate) fn remount(&self, options: &str) {
        command(Command::new("mount").arg("-o").arg(format!("remount,{options}")).arg(&self.0));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let umount = |options: &[&str]| Command::new("umount").args(options).arg(&self.0).output();
        // Somebody may be in it still when a test has failed.
        if !umount(&[]).is_ok_and(|output| output.status.success()) {
            drop(umount(&["--lazy"]));
        }
    }
}

/// What doctor has said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) findings: Vec<Value>,
    pub(crate) code: Option<i32>,
}

impl Said {
    pub(crate) fn of(output: &Output) -> Said {
        let document: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let findings = document["findings"].as_array().unwrap().iter().filter(|finding| finding["level"] != "ok");
        // The machine of this test may be a container, in which its folders are nobody's mounts.
        let findings = findings.filter(|finding| finding["code"] != "kubelet-dir-not-mounted").cloned();
        Said { findings: findings.collect(), code: output.status.code() }
    }

    pub(crate) fn codes(&self) -> BTreeSet<&str> {
        self.findings.iter().map(|finding| finding["code"].as_str().unwrap()).collect()
    }

    /// Fails unless these are found and nothing else, the exit code says so, and the first one names the place and each of `words`.
    pub(crate) fn is(&self, codes: &[&str], on: &Path, words: &[&str]) {
        assert_eq!(self.codes(), codes.iter().copied().collect(), "{self:#?}");
        let is_bad = self.findings.iter().any(|finding| finding["level"] != "note");
        assert_eq!(self.code, Some(if is_bad { exit::FINDINGS.into() } else { 0 }));
        if let Some(first) = codes.first() {
            self.tells(first, on, words);
        }
    }

    pub(crate) fn tells(&self, code: &str, on: &Path, words: &[&str]) {
        let finding = self.findings.iter().find(|finding| finding["code"] == code).unwrap_or_else(|| panic!("{code}: {self:#?}"));
        assert_eq!(finding["on"].as_str(), on.to_str(), "{finding:#}");
        let text = |key: &str| finding[key].as_str().unwrap_or_default();
        let said = ["found", "todo", "command"].map(text).join("\n");
        assert!(!text("todo").is_empty() && words.iter().all(|word| said.contains(word)), "{words:?} in {finding:#}");
    }
}

/// What a verb of this node says, asked in such a way; its kubelet lives on the thread of the test.
pub(crate) async fn asked(mut command: Command) -> Said {
    Said::of(&tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap())
}

pub(crate) async fn doctor(node: &Node) -> Said {
    asked(node.command(&["doctor", "-o", "json"])).await
}

/// A command behind another, such as `nsenter`.
pub(crate) fn behind(prefix: &[&str], inner: &Command) -> Command {
    let mut command = Command::new(prefix[0]);
    command.args(&prefix[1..]).arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
    command
}

/// A kubelet and a daemon at work.
pub(crate) async fn start(node: &Node) -> (Kubelet, Daemon) {
    let kubelet = node.start_kubelet().await;
    let daemon = node.start_daemon();
    offered(&kubelet, &name("example.com/gpu"), 2).await;
    daemon.logged("registered").await;
    (kubelet, daemon)
}

/// Nothing is found.
pub(crate) async fn is_in_order(node: &Node) {
    let nothing = Path::new("");
    doctor(node).await.is(&[], nothing, &[]);
}
