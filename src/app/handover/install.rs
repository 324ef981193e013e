//! `holdfast handover`: this instance starts the installed binary in its own place, so that systemd finds it in the unit,
//! with the unit's limits and namespaces, and hands over to it.

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

/// What `holdfast handover` asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// The binary to be started: the one that asks.
    pub executable: PathBuf,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// The version that has handed over.
    pub from: String,
    /// The version that serves now.
    pub to: String,
    /// Its process.
    pub pid: u32,
}

/// The order, and where the answer goes.
#[derive(Debug)]
pub struct UpgradeOrder {
    /// The order.
    pub upgrade: Upgrade,
    /// The answer, or why there is none.
    pub answer: oneshot::Sender<Result<Installed, String>>,
}

/// Starts it as this process was started, but for `--take-over`.
///
/// # Errors
/// When it cannot be started.
pub fn start_installed(upgrade: &Upgrade) -> io::Result<Child> {
    let mut command = Command::new(&upgrade.executable);
    // What systemd told this process is not true of the other one before it is the main process.
    for told in ["WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
        command.env_remove(told);
    }
    command.args(arguments(std::env::args_os().skip(1))).stdin(Stdio::null()).spawn()
}

fn arguments(own: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let take_over = OsString::from("--take-over");
    own.filter(|argument| *argument != take_over).chain([take_over.clone()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_instance_is_started_as_this_one_was_and_takes_over() {
        let given = |text: &[&str]| arguments(text.iter().map(OsString::from));
        assert_eq!(given(&["run"]), ["run", "--take-over"]);
        assert_eq!(
            given(&["--state-dir", "/s", "run", "--take-over", "-o", "json"]),
            ["--state-dir", "/s", "run", "-o", "json", "--take-over"]
        );
    }
}
