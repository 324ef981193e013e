//! `holdfast handover`: this instance starts the installed binary as its child, and hands over to
//! it. So the new process is in systemd's unit, with the unit's limits and namespaces.

use super::Meaning;
use crate::admin::{Installed, UpgradeOrder};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How long the new instance may take to request the handover, which is its first step.
const ASKS_WITHIN: Duration = Duration::from_secs(60);

/// An upgrade in progress: the child process that will take over from this one.
pub(super) struct Upgrade {
    pub(super) child: Child,
    asks_until: Instant,
    answer: oneshot::Sender<Result<Installed, String>>,
    written: oneshot::Receiver<()>,
}

impl Upgrade {
    /// Starts the binary of an order, which will request a handover from this process. `None` when
    /// it cannot be started; the order is then answered with the error.
    pub(super) fn begin(order: UpgradeOrder) -> Option<Self> {
        if order.answer.is_closed() {
            tracing::info!("the client that requested a handover has disconnected; none begins");
            return None;
        }
        let executable = &order.upgrade.executable;
        match start(executable) {
            Ok(child) => {
                tracing::info!(executable = %executable.display(), pid = child.id(), "started the new instance, which will take over");
                let UpgradeOrder { answer, written, .. } = order;
                Some(Upgrade { child, asks_until: Instant::now() + ASKS_WITHIN, answer, written })
            }
            Err(error) => {
                let why = format!("cannot start `{}`: {error}", executable.display());
                refuse(order, why);
                None
            }
        }
    }

    /// Waits until the child has exited without a handover request, and returns the reason. A child
    /// that hangs is killed.
    pub(super) async fn failed(&mut self, meaning: Meaning) -> String {
        match tokio::time::timeout_at(self.asks_until, self.child.wait()).await {
            Ok(Ok(status)) => format!(
                "the new instance exited before it took over ({}); see its log",
                in_words(status, meaning)
            ),
            Ok(Err(error)) => format!("cannot wait for the new instance: {error}"),
            Err(_) => {
                // A process that has already exited needs no kill.
                drop(self.child.kill().await);
                format!(
                    "the new instance did nothing for {} s and was killed",
                    ASKS_WITHIN.as_secs()
                )
            }
        }
    }

    /// Answers the order, and waits until the answer is written, because this process is about to
    /// end.
    pub(super) async fn succeed(self, installed: Installed) {
        drop(self.answer.send(Ok(installed)));
        // An error means that the writer has ended.
        drop(self.written.await);
    }

    /// Answers that this instance continues to serve.
    pub(super) fn fail(self, why: String) {
        tracing::error!(why, "handover failed; this instance continues to serve");
        drop(self.answer.send(Err(why)));
    }
}

/// Why a process with this id must not start another instance and end.
pub(super) fn refusal(pid: u32) -> Option<String> {
    (pid == 1).then(|| {
        "this daemon is the first process of its container, so that the end of the daemon also ends a process that \
         it starts; roll out the DaemonSet with the new image instead"
            .to_owned()
    })
}

/// Answers an order that cannot be carried out.
pub(super) fn refuse(order: UpgradeOrder, why: String) {
    tracing::warn!(executable = %order.upgrade.executable.display(), why, "handover request rejected");
    // The client may have disconnected.
    drop(order.answer.send(Err(why)));
}

/// The exit status, with the meaning of its code if it has one.
fn in_words(status: ExitStatus, meaning: Meaning) -> String {
    let meaning = status.code().and_then(meaning);
    meaning.map_or_else(|| status.to_string(), |meaning| format!("{status}: {meaning}"))
}

/// Starts it with the arguments of this process, and with `--take-over`.
fn start(executable: &Path) -> io::Result<Child> {
    let mut command = Command::new(executable);
    // systemd set these for this process. They do not hold for the child before it is the main
    // process.
    for variable in ["WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
        command.env_remove(variable);
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

    /// The failure of an upgrade whose child runs this script and may take this long.
    fn fails(script: &str, within: Duration) -> (String, Upgrade) {
        actix::System::new().block_on(async {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let ((answer, _), (_, written)) = (oneshot::channel(), oneshot::channel());
            let mut upgrade =
                Upgrade { child, asks_until: Instant::now() + within, answer, written };
            (
                upgrade
                    .failed(|code| (code == 3).then_some("the configuration is not valid"))
                    .await,
                upgrade,
            )
        })
    }

    #[test]
    fn an_exit_is_reported_with_the_meaning_of_its_code_and_a_hanging_instance_is_killed() {
        let ever = Duration::from_secs(3600);
        let why = |code: u8| fails(&format!("exit {code}"), ever).0;
        assert_eq!(
            why(3),
            "the new instance exited before it took over (exit status: 3: the configuration is not valid); see its log"
        );
        assert_eq!(
            why(77),
            "the new instance exited before it took over (exit status: 77); see its log"
        );
        let (why, upgrade) = fails("exec sleep 3600", Duration::from_millis(1));
        assert!(why.contains("was killed"), "{why}");
        assert_eq!(upgrade.child.id(), None, "its exit was collected");
    }

    #[test]
    fn the_first_process_of_a_container_starts_no_other_instance() {
        assert!(refusal(1).is_some_and(|why| why.contains("roll out the DaemonSet")));
        assert_eq!(refusal(2), None);
    }

    #[test]
    fn a_handover_whose_client_has_left_does_not_begin() {
        let ((answer, _), (_, written)) = (oneshot::channel(), oneshot::channel());
        let upgrade = crate::admin::Upgrade { executable: "/bin/true".into() };
        assert!(Upgrade::begin(UpgradeOrder { upgrade, answer, written }).is_none());
    }

    #[test]
    fn the_next_instance_gets_the_same_arguments_and_take_over() {
        let given = |text: &[&str]| arguments(text.iter().map(OsString::from));
        assert_eq!(given(&["run"]), ["run", "--take-over"]);
        assert_eq!(
            given(&["--state-dir", "/s", "run", "--take-over", "-o", "json"]),
            ["--state-dir", "/s", "run", "-o", "json", "--take-over"]
        );
    }
}
