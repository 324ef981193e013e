//! A restart by systemd, which keeps what the kubelet has open from one process to the next. The test does what systemd does.

use super::{DEVICES, config, dips, gpu, nothing_is_lost, pods_come_and_go, refusals, rounds};
use crate::common::{Daemon, HANG, Node, offered, run, soon};
use command_fds::{CommandFdExt as _, FdMapping};
use nix::sys::signal::Signal;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::cell::Cell;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::process::Command;
use tokio::io::Interest;
use tokio::net::UnixDatagram;

/// Where it comes from does not matter to what is kept.
const FIRST_FD: i32 = 3;

struct Systemd {
    socket: UnixDatagram,
    kept: Vec<OwnedFd>,
}

impl Systemd {
    fn new(node: &Node) -> Self {
        Systemd { socket: UnixDatagram::bind(node.path("notify")).unwrap(), kept: Vec::new() }
    }

    /// Does what it is told, until it is told this.
    async fn hears(&mut self, wanted: &str) {
        let hears = async { while !self.heard().await.lines().any(|line| line == wanted) {} };
        soon(wanted, hears).await;
    }

    async fn heard(&mut self) -> String {
        let (mut buffer, mut files) = ([0; 1024], Vec::new());
        let receive = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(sent) = message {
                    files.extend(sent);
                }
            }
            Ok(received.bytes)
        };
        let length = self.socket.async_io(Interest::READABLE, receive).await.unwrap();
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if text.contains("FDSTORE=1\nFDNAME=kubelet") {
            self.kept.append(&mut files);
        }
        if text.contains("FDSTOREREMOVE=1\nFDNAME=kubelet") {
            self.kept.clear();
        }
        text
    }

    /// Starts the next process, with what it keeps, in an order of its own.
    fn start(&self, node: &Node) -> Daemon {
        let daemon = node.command(&["run"]);
        let mut command = Command::new("sh");
        command.args(["-c", r#"LISTEN_PID=$$ exec "$0" "$@""#]).arg(daemon.get_program()).args(daemon.get_args());
        command.env("NOTIFY_SOCKET", node.path("notify")).env("LISTEN_FDS", self.kept.len().to_string());
        let files = self.kept.iter().rev().map(|file| file.try_clone().unwrap());
        let mappings = files.zip(FIRST_FD..).map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd }).collect();
        Daemon::spawn(command.env_remove("HOLDFAST_LOG").fd_mappings(mappings).unwrap())
    }

    /// Stops it, as for a restart.
    async fn stop(&mut self, mut daemon: Daemon) {
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
        self.hears("FDSTORE=1").await;
    }
}

async fn restarted_under_load(detach: bool) {
    let node = Node::with(&[("gpu", DEVICES)]);
    node.write_config(&config(detach));
    let kubelet = node.start_kubelet().await;
    let mut systemd = Systemd::new(&node);
    let mut daemon = systemd.start(&node);
    systemd.hears("READY=1").await;
    offered(&kubelet, &gpu(), DEVICES).await;

    let began = kubelet.now();
    let stop = Cell::new(false);
    let restarts = async {
        for _ in 0..rounds(3) {
            systemd.stop(daemon).await;
            daemon = systemd.start(&node);
            systemd.hears("FDSTOREREMOVE=1").await;
            systemd.hears("READY=1").await;
        }
        stop.set(true);
        (systemd, daemon)
    };
    let (outcomes, (mut systemd, daemon)) = tokio::join!(pods_come_and_go(&kubelet, &stop), restarts);
    assert!(outcomes.len() > 3, "the load has hardly run");
    assert_eq!((dips(&kubelet, began), refusals(&kubelet)), (vec![], vec![]), "detach {detach}");
    nothing_is_lost(&node);

    // Nobody follows.
    systemd.stop(daemon).await;
    offered(&kubelet, &gpu(), DEVICES).await;
    systemd.kept.clear();
    kubelet.wait_for(|view| view.capacity(&gpu()).allocatable == 0, HANG).await.unwrap();
    assert_eq!(kubelet.panicked(), None);
}

#[test]
fn a_restart_takes_no_device_from_the_kubelet_and_fails_no_pod() {
    run(restarted_under_load(true));
}

#[test]
fn nor_does_one_without_detach() {
    run(restarted_under_load(false));
}
