//! A stand-in for systemd: it receives a unit's notifications, and keeps files for its next process
//! (`FileDescriptorStoreMax=`).

use command_fds::{CommandFdExt as _, FdMapping};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::sync::watch;

/// The number of the first file that a process gets.
const FIRST_FD: i32 = 3;

/// Sent after all notifications of the processes.
const BARRIER: &str = "BARRIER=1";

/// It receives until the test ends.
#[derive(Debug)]
pub(crate) struct Systemd {
    path: PathBuf,
    pub(crate) heard: watch::Receiver<Heard>,
}

/// The notifications, and the kept files.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    lines: Vec<String>,
    kept: Vec<OwnedFd>,
}

impl Systemd {
    pub(crate) fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        let (sender, heard) = watch::channel(Heard::default());
        std::thread::spawn(move || {
            while let Ok((text, files)) = receive(&socket) {
                sender.send_modify(|heard| heard.take(&text, files));
            }
        });
        Systemd { path: path.to_owned(), heard }
    }

    /// The number of kept files.
    pub(crate) fn keeps(&self) -> usize {
        self.heard.borrow().kept.len()
    }

    /// Waits until it has received every notification that was sent so far.
    fn catch_up(&self) {
        let caught_up = || self.heard.borrow().times(BARRIER);
        let before = caught_up();
        UnixDatagram::unbound().unwrap().send_to(BARRIER.as_bytes(), &self.path).unwrap();
        while caught_up() == before {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The command as part of a unit: its notifications are received, and it gets the kept files,
    /// in an order of systemd's own.
    pub(crate) fn in_unit(&self, command: &Command) -> Command {
        self.catch_up();
        let heard = self.heard.borrow();
        let files = heard.kept.iter().rev().map(|file| file.try_clone().unwrap());
        let mappings: Vec<_> = files
            .zip(FIRST_FD..)
            .map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd })
            .collect();
        let mut started = Command::new("sh");
        started
            .args(["-c", r#"LISTEN_PID=$$ exec "$0" "$@""#])
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            value.map(|value| started.env(name, value));
        }
        started
            .env("NOTIFY_SOCKET", &self.path)
            .env("LISTEN_FDS", mappings.len().to_string())
            .env_remove("HOLDFAST_LOG");
        started.fd_mappings(mappings).unwrap();
        started
    }
}

impl Heard {
    /// The number of notifications with this line.
    pub(crate) fn times(&self, line: &str) -> usize {
        self.lines.iter().filter(|told| *told == line).count()
    }

    fn take(&mut self, text: &str, files: Vec<OwnedFd>) {
        if text.contains("FDSTORE=1\nFDNAME=kubelet\n") {
            self.kept.extend(files);
        }
        if text.contains("FDSTOREREMOVE=1\nFDNAME=kubelet\n") {
            self.kept.clear();
        }
        self.lines.extend(text.lines().map(str::to_owned));
    }
}

fn receive(socket: &impl AsFd) -> io::Result<(String, Vec<OwnedFd>)> {
    let (mut buffer, mut files) = ([0; 1024], Vec::new());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            files.extend(sent);
        }
    }
    Ok((String::from_utf8_lossy(&buffer[..received.bytes]).into_owned(), files))
}
