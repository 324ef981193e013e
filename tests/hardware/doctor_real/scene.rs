//! Helpers of these tests: mounts that end with the test, and doctor with checks of its findings.

use crate::common::inside::command;
use crate::common::{Daemon, Node, name, offered};
use holdfast::console::exit;
use holdfast::lab::sim::kubelet::Kubelet;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The programs that a mount needs.
pub(crate) const MOUNT: [&str; 2] = ["mount", "umount"];

/// A mount that ends when this is dropped.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Mounted {
    pub(crate) fn new(options: &[&str], what: &Path, at: &Path) -> Mounted {
        command(Command::new("mount").args(options).arg(what).arg(at));
        Mounted(at.to_owned())
    }

    /// Mounts a file system without a disk.
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
        // After a failed test a process may still use it.
        if !umount(&[]).is_ok_and(|output| output.status.success()) {
            drop(umount(&["--lazy"]));
        }
    }
}

/// The findings and the exit code of doctor.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) findings: Vec<Value>,
    pub(crate) code: Option<i32>,
}

impl Said {
    pub(crate) fn of(output: &Output) -> Said {
        let document: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let findings = document["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|finding| finding["level"] != "ok");
        // The machine of this test may be a container: there the kubelet's directory need not be a
        // mount.
        let findings =
            findings.filter(|finding| finding["code"] != "kubelet-dir-not-mounted").cloned();
        Said { findings: findings.collect(), code: output.status.code() }
    }

    pub(crate) fn codes(&self) -> BTreeSet<&str> {
        self.findings.iter().map(|finding| finding["code"].as_str().unwrap()).collect()
    }

    /// Fails unless exactly these codes are found with the matching exit code, and the first one
    /// names the place and each of `words`.
    pub(crate) fn is(&self, codes: &[&str], on: &Path, words: &[&str]) {
        assert_eq!(self.codes(), codes.iter().copied().collect(), "{self:#?}");
        let is_bad = self.findings.iter().any(|finding| finding["level"] != "note");
        assert_eq!(self.code, Some(if is_bad { exit::FINDINGS.into() } else { 0 }));
        if let Some(first) = codes.first() {
            self.tells(first, on, words);
        }
    }

    pub(crate) fn tells(&self, code: &str, on: &Path, words: &[&str]) {
        let finding = self
            .findings
            .iter()
            .find(|finding| finding["code"] == code)
            .unwrap_or_else(|| panic!("{code}: {self:#?}"));
        assert_eq!(finding["on"].as_str(), on.to_str(), "{finding:#}");
        let text = |key: &str| finding[key].as_str().unwrap_or_default();
        let said = ["found", "todo", "command"].map(text).join("\n");
        assert!(
            !text("todo").is_empty() && words.iter().all(|word| said.contains(word)),
            "{words:?} in {finding:#}"
        );
    }
}

/// Runs this command and parses its findings. The node's kubelet runs on the thread of the test.
pub(crate) async fn asked(mut command: Command) -> Said {
    Said::of(&tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap())
}

pub(crate) async fn doctor(node: &Node) -> Said {
    asked(node.command(&["doctor", "-o", "json"])).await
}

/// A command with a prefix, such as `nsenter`.
pub(crate) fn behind(prefix: &[&str], inner: &Command) -> Command {
    let mut command = Command::new(prefix[0]);
    command.args(&prefix[1..]).arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
    command
}

/// A running kubelet and daemon.
pub(crate) async fn start(node: &Node) -> (Kubelet, Daemon) {
    let kubelet = node.start_kubelet().await;
    let daemon = node.start_daemon();
    offered(&kubelet, &name("example.com/gpu"), 2).await;
    daemon.logged("registered").await;
    (kubelet, daemon)
}

/// Checks that doctor finds nothing.
pub(crate) async fn is_in_order(node: &Node) {
    let nothing = Path::new("");
    doctor(node).await.is(&[], nothing, &[]);
}
