//! `holdfast run` as a private process whose log is read.

use super::caller::failed;
use super::instance::Instance;
use crate::console::exit::Failed;
use crate::host;
use crate::lab::daemon;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Maximum wait for an event in the log.
const LOG_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum wait for the process to exit after a kill.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A daemon; dropping the value kills it.
#[derive(Debug)]
pub(super) struct LoggedDaemon {
    child: Child,
    /// Read continuously: a daemon does not wait for the reader of its log.
    log: UnboundedReceiver<String>,
    /// The last line, for an error that reports why the process exited.
    last: String,
}

impl LoggedDaemon {
    /// Starts the daemon on the instance, with an empty environment.
    pub(super) fn start(instance: &Instance, verb: &[&str]) -> Result<LoggedDaemon, Failed> {
        let roots = instance.roots();
        let mut command = Command::new(daemon()?);
        command
            .args(verb)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        for (option, path) in [
            ("--host-root", roots.host),
            ("--kubelet-dir", roots.kubelet),
            ("--state-dir", roots.state),
            ("--run-dir", roots.run),
            ("--config", instance.config_file()),
        ] {
            command.arg(option).arg(path);
        }
        let mut child = command.spawn()?;
        let stderr = child
            .stderr
            .take()
            .ok_or_else(|| failed("the private daemon has no standard error"))?;
        let (lines_out, log) = unbounded_channel();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if lines_out.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(LoggedDaemon { child, log, last: String::new() })
    }

    /// Waits for a log line that contains `wanted`.
    pub(super) async fn logs(&mut self, wanted: &str) -> Result<(), Failed> {
        let found_line = async {
            while let Some(line) = self.log.recv().await {
                let found = line.contains(wanted);
                self.last = line;
                if found {
                    return true;
                }
            }
            false
        };
        match tokio::time::timeout(LOG_TIMEOUT, found_line).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(format_args!("the private daemon exited: {}", self.last))),
            Err(_) => Err(failed(format_args!(
                "the private daemon did not log `{wanted}` in time; its last line: {}",
                self.last
            ))),
        }
    }

    /// Sends SIGTERM and waits for the exit.
    pub(super) async fn end(mut self) -> Result<(), Failed> {
        if let Some(id) = self.child.id() {
            host::terminate(id)?;
        }
        let ended = async { while self.log.recv().await.is_some() {} };
        if tokio::time::timeout(LOG_TIMEOUT, ended).await.is_err() {
            return Err(failed("the private daemon does not exit"));
        }
        self.child.wait().await?;
        Ok(())
    }
}

impl Drop for LoggedDaemon {
    /// Waits for the exit: a write of the process would keep its directories from being removed.
    fn drop(&mut self) {
        // The process may have exited already.
        drop(self.child.start_kill());
        let until = Instant::now() + EXIT_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
