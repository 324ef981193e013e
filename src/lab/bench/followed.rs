//! `holdfast run` as a process of the measurement's own, whose log is followed.

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

/// How long a process may take to do what is waited for.
const WITHIN: Duration = Duration::from_secs(60);

/// How long one may take to be gone after it was killed.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// A daemon; it is killed with the value.
#[derive(Debug)]
pub(super) struct Followed {
    child: Child,
    /// Read as it comes: a daemon does not wait for its log's reader.
    log: UnboundedReceiver<String>,
    /// Its last line, for whoever has to know why it ended.
    last: String,
}

impl Followed {
    /// Starts the daemon on the instance, with nothing of this process's environment.
    pub(super) fn start(instance: &Instance, verb: &[&str]) -> Result<Followed, Failed> {
        let roots = instance.roots();
        let mut command = Command::new(daemon()?);
        command.args(verb).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
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
        let stderr = child.stderr.take().ok_or_else(|| failed("a daemon has no standard error"))?;
        let (tell, log) = unbounded_channel();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Followed { child, log, last: String::new() })
    }

    /// Waits until it has logged this.
    pub(super) async fn logs(&mut self, wanted: &str) -> Result<(), Failed> {
        let said = async {
            while let Some(line) = self.log.recv().await {
                let found = line.contains(wanted);
                self.last = line;
                if found {
                    return true;
                }
            }
            false
        };
        match tokio::time::timeout(WITHIN, said).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(format_args!("a private daemon ended: {}", self.last))),
            Err(_) => Err(failed(format_args!("a private daemon did not come to `{wanted}`; its last words: {}", self.last))),
        }
    }

    /// Has it end in order, and waits for that.
    pub(super) async fn end(mut self) -> Result<(), Failed> {
        if let Some(id) = self.child.id() {
            host::terminate(id)?;
        }
        let ended = async { while self.log.recv().await.is_some() {} };
        if tokio::time::timeout(WITHIN, ended).await.is_err() {
            return Err(failed("a private daemon does not end"));
        }
        self.child.wait().await?;
        Ok(())
    }
}

impl Drop for Followed {
    /// Waits until it is gone: what it still writes would keep its directories from being removed.
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.start_kill());
        let until = Instant::now() + GONE_WITHIN;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}
