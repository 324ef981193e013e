//! The daemon under test, and its verbs.

use crate::cluster::Cluster;
use crate::node::{self, NODE, PLUGIN_DEVICE};
use crate::pki::kubeconfig;
use crate::real::binary::{as_in_unit, binary};
use crate::real::process::Process;
use crate::{SOON, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The resource of the device plugin.
pub(crate) const COUNTED: &str = "example.com/counted";

/// Logged after each registration with the kubelet.
pub(crate) const REGISTERED: &str = "the kubelet registered the DRA driver";

/// The configuration of all but the resources for claims. `keys` are further ones of `[cluster]`.
fn common(credentials: &Path, keys: &str) -> String {
    format!(
        r#"
[telemetry]
listen = "off"
[cluster]
credentials = "{}"
{keys}[dra]
enabled = true
vendor_attributes = true
[[resource]]
name = "{COUNTED}"
class = "char"
paths = ["{PLUGIN_DEVICE}"]
replicas = 100
"#,
        credentials.display()
    )
}

/// A resource with all devices for claims.
pub(crate) const CLAIMED: &str = r#"
[[resource]]
name = "example.com/claimed"
class = "char"
paths = [{ host = "/dev/claimed*", container = "/dev/claimed/" }]
api = "dra"
"#;

/// The daemon; it is killed with this value.
#[derive(Debug)]
pub(crate) struct Daemon {
    /// Its directories.
    dir: PathBuf,
    host_root: PathBuf,
    process: Process,
    starts: usize,
}

impl Daemon {
    /// Starts it with an empty ledger and the kubelet's credentials, and waits until it serves.
    pub(crate) fn start(cluster: &mut Cluster) -> Self {
        let credentials = kubeconfig(&cluster.dir, "kubelet");
        let daemon = Self::launch(cluster, Path::new("/"), &credentials, CLAIMED);
        daemon.wait_until_registered(cluster);
        daemon
    }

    /// Starts it with this host root, these credentials and these resources for claims.
    pub(crate) fn launch(
        cluster: &mut Cluster,
        host_root: &Path,
        credentials: &Path,
        resources: &str,
    ) -> Self {
        Self::launch_with(cluster, host_root, credentials, "", resources)
    }

    /// The same with these keys of `[cluster]`.
    pub(crate) fn launch_with(
        cluster: &mut Cluster,
        host_root: &Path,
        credentials: &Path,
        keys: &str,
        resources: &str,
    ) -> Self {
        cluster.daemons += 1;
        let dir = cluster.dir.join(format!("holdfast-{}", cluster.daemons));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("config.toml"), common(credentials, keys) + resources).unwrap();
        let process = run(&dir, host_root, 1);
        Daemon { dir, host_root: host_root.to_owned(), process, starts: 1 }
    }

    /// Waits until the kubelet knows the driver and the device plugin.
    pub(crate) fn wait_until_registered(&self, cluster: &mut Cluster) {
        wait_for("the daemon is registered", SOON, || {
            cluster.node.check();
            let status = self.ask(&["status"])?;
            let resources = status["resources"].as_array()?;
            let counted = resources.iter().find(|each| each["name"] == COUNTED)?;
            (counted["registered"] == true && self.log().contains(REGISTERED)).then_some(())
        });
    }

    /// Kills the daemon and the node, and starts the daemon again, before the kubelet.
    pub(crate) fn reboot(&mut self, cluster: &mut Cluster) {
        let run = self.dir.join("run");
        self.kill_and_start(|| {
            cluster.node.reboot();
            node::empty(&run);
        });
    }

    /// Kills the daemon and starts it again, after `between`.
    pub(crate) fn kill_and_start(&mut self, between: impl FnOnce()) {
        self.process.stop(Signal::SIGKILL);
        between();
        self.starts += 1;
        self.process = run(&self.dir, &self.host_root, self.starts);
    }

    /// Starts another instance that takes over, and ends this one. The log is the new one's.
    pub(crate) fn hand_over(&mut self) {
        self.starts += 1;
        let new = take_over(&self.dir, &self.host_root, self.starts);
        let mut old = std::mem::replace(&mut self.process, new);
        self.wait_until_logged("took over from another instance");
        old.stop(Signal::SIGTERM);
    }

    /// Replaces a text of the configuration, and waits until it was reloaded.
    pub(crate) fn configure(&self, from: &str, to: &str) {
        let file = self.dir.join("config.toml");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&file, text.replace(from, to)).unwrap();
        let reloads = || self.log().matches("configuration reloaded").count();
        let before = reloads();
        self.process.signal(Signal::SIGHUP);
        wait_for("the configuration is reloaded", SOON, || (reloads() > before).then_some(()));
    }

    /// Waits until the log has this text.
    pub(crate) fn wait_until_logged(&self, text: &str) {
        wait_for(text, SOON, || self.log().contains(text).then_some(()));
    }

    /// The answer of a verb; `None` from a daemon that does not answer yet.
    fn ask(&self, verb: &[&str]) -> Option<Value> {
        let output = self.verb(&[verb, &["-o", "json"]].concat());
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    /// Runs a verb.
    pub(crate) fn verb(&self, verb: &[&str]) -> Output {
        with_options(&mut Command::new(binary()), &self.dir, &self.host_root)
            .args(verb)
            .output()
            .unwrap()
    }

    /// Runs a verb that must succeed.
    pub(crate) fn instruct(&self, verb: &[&str]) {
        let output = self.verb(verb);
        assert!(output.status.success(), "{verb:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// All live grants.
    pub(crate) fn who(&self) -> Value {
        wait_for("who answers", SOON, || self.ask(&["who"]))
    }

    /// The state of the daemon.
    pub(crate) fn status(&self) -> Value {
        wait_for("status answers", SOON, || self.ask(&["status"]))
    }

    /// The grants of claims with this name, from `who`.
    pub(crate) fn holders(&self, claim: &str) -> Vec<Value> {
        let who = self.who();
        let grants = who["grants"].as_array().unwrap().iter();
        grants.filter(|grant| grant["claim"]["name"] == claim).cloned().collect()
    }

    /// The number of live grants of a resource, from `who`.
    pub(crate) fn held(&self, resource: &str) -> usize {
        let who = self.who();
        let grants = who["grants"].as_array().unwrap().iter();
        grants.filter(|grant| grant["resource"] == resource).count()
    }

    /// The problems of the driver, from `status`.
    pub(crate) fn problems(&self) -> Value {
        self.status()["dra_problems"].clone()
    }

    /// Why Events and the condition cannot be written, from `status`.
    pub(crate) fn not_reported(&self) -> Value {
        self.status()["not_reported"].clone()
    }

    /// The whole status of the grants of a claim, from `history`.
    pub(crate) fn history(&self, claim: &str) -> String {
        let history = self.ask(&["history", "--claim", &format!("default/{claim}")]);
        history.unwrap_or_default().to_string()
    }

    pub(crate) fn log(&self) -> String {
        self.process.log_text()
    }

    /// Resident memory in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        resident_kib(&self.process)
    }
}

/// Resident memory of a process in KiB (`VmRSS`, `proc_pid_status(5)`).
pub(crate) fn resident_kib(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.stop(Signal::SIGKILL);
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(30).collect();
            crate::say(format_args!("the daemon's log, last line first:\n{}", tail.join("\n")));
        }
    }
}

fn run(dir: &Path, host_root: &Path, start: usize) -> Process {
    start_with(&["run"], dir, host_root, start)
}

fn take_over(dir: &Path, host_root: &Path, start: usize) -> Process {
    start_with(&["run", "--take-over"], dir, host_root, start)
}

fn start_with(verb: &[&str], dir: &Path, host_root: &Path, start: usize) -> Process {
    let mut command = as_in_unit();
    with_options(&mut command, dir, host_root).args(verb).env("NODE_NAME", NODE);
    Process::start(&mut command, dir.join(format!("log-{start}")))
}

fn with_options<'a>(command: &'a mut Command, dir: &Path, host_root: &Path) -> &'a mut Command {
    command.arg("--config").arg(dir.join("config.toml")).arg("--host-root").arg(host_root);
    command.arg("--state-dir").arg(dir.join("state")).arg("--run-dir").arg(dir.join("run"))
}
