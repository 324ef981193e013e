//! A process with its log.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A process with its log.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pub(crate) log: PathBuf,
}

impl Process {
    pub(crate) fn start(command: &mut Command, log: PathBuf) -> Self {
        let file = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Process {
            child: command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")),
            log,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log_text(&self) -> String {
        self.log_since(0)
    }

    /// The log from this byte on, so that a long log is not read again for its last lines.
    pub(crate) fn log_since(&self, position: u64) -> String {
        let mut file = File::open(&self.log).unwrap();
        file.seek(SeekFrom::Start(position)).unwrap();
        let mut text = Vec::new();
        file.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Panics if the process has ended.
    pub(crate) fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            let text = self.log_text();
            let tail: Vec<&str> = text.lines().rev().take(5).collect();
            panic!("it has ended ({status}), see {}: {tail:#?}", self.log.display());
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    /// Ends the process and waits for it.
    pub(crate) fn stop(&mut self, signal: Signal) {
        self.signal(signal);
        self.child.wait().unwrap();
    }
}
