//! `holdfast handover`: this instance starts the installed binary in its own place, so that systemd finds it in the unit,
//! with the unit's limits and namespaces, and hands over to it.

use super::Meaning;
use crate::app::{Installed, UpgradeOrder};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How long the new instance may take to ask for the ledger, which is the first thing that it does.
const ASKS_WITHIN: Duration = Duration::from_secs(60);

/// Another binary that is to take the place of this one.
pub(super) struct Upgrade {
    pub(super) child: Child,
    asks_until: Instant,
    answer: oneshot::Sender<Result<Installed, String>>,
    written: oneshot::Receiver<()>,
}

impl Upgrade {
    /// Starts the binary of an order, which will ask this process to hand over. `None` when it cannot be started, which is answered.
    pub(super) fn begin(order: UpgradeOrder) -> Option<Self> {
        let executable = &order.upgrade.executable;
        match start(executable) {
            Ok(child) => {
                tracing::info!(executable = %executable.display(), pid = child.id(), "started the instance that is to take over");
                let UpgradeOrder { answer, written, .. } = order;
                Some(Upgrade { child, asks_until: Instant::now() + ASKS_WITHIN, answer, written })
            }
            Err(error) => {
                let why = format!("`{}` cannot be started: {error}", executable.display());
                refuse(order, why);
                None
            }
        }
    }

    /// Waits until its process has ended instead of asking; one that hangs is ended. Why it did not ask.
    pub(super) async fn failed(&mut self, meaning: Meaning) -> String {
        match tokio::time::timeout_at(self.asks_until, self.child.wait()).await {
            Ok(Ok(status)) => format!("the new instance ended before it took over ({}); its log says why", in_words(status, meaning)),
            Ok(Err(error)) => format!("the new instance cannot be watched: {error}"),
            Err(_) => {
                // One that is gone already is as good.
                drop(self.child.kill().await);
                format!("the new instance did nothing for {} s and was killed", ASKS_WITHIN.as_secs())
            }
        }
    }

    /// Answers, and waits until the answer is written: this process is about to end.
    pub(super) async fn succeed(self, installed: Installed) {
        drop(self.answer.send(Ok(installed)));
        // An error is its end.
        drop(self.written.await);
    }

    /// Answers that this instance goes on.
    pub(super) fn fail(self, why: String) {
        tracing::error!(why, "no handover; this instance goes on");
        drop(self.answer.send(Err(why)));
    }
}

/// Answers an order that cannot be followed.
pub(super) fn refuse(order: UpgradeOrder, why: String) {
    tracing::warn!(executable = %order.upgrade.executable.display(), why, "no handover");
    // The verb may have gone.
    drop(order.answer.send(Err(why)));
}

/// With what the code means, where it has a meaning.
fn in_words(status: ExitStatus, meaning: Meaning) -> String {
    let meaning = status.code().and_then(meaning);
    meaning.map_or_else(|| status.to_string(), |meaning| format!("{status}: {meaning}"))
}

/// Starts it as this process was started, but for `--take-over`.
fn start(executable: &Path) -> io::Result<Child> {
    let mut command = Command::new(executable);
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

    /// Why a program that is started for an upgrade, and has so long to ask, does not take over.
    fn fails(script: &str, within: Duration) -> (String, Upgrade) {
        actix::System::new().block_on(async {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let ((answer, _), (_, written)) = (oneshot::channel(), oneshot::channel());
            let mut upgrade = Upgrade { child, asks_until: Instant::now() + within, answer, written };
            (upgrade.failed(|code| (code == 3).then_some("the configuration is not valid")).await, upgrade)
        })
    }

    #[test]
    fn a_new_instance_that_ends_is_told_with_what_its_code_means_and_one_that_hangs_is_killed() {
        let ever = Duration::from_secs(3600);
        let said = |code: u8| fails(&format!("exit {code}"), ever).0;
        assert_eq!(
            said(3),
            "the new instance ended before it took over (exit status: 3: the configuration is not valid); its log says why"
        );
        assert_eq!(said(77), "the new instance ended before it took over (exit status: 77); its log says why");
        let (why, upgrade) = fails("exec sleep 3600", Duration::from_millis(1));
        assert!(why.contains("was killed"), "{why}");
        assert_eq!(upgrade.child.id(), None, "its end was seen");
    }

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
