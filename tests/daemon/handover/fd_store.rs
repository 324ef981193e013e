//! A restart by systemd, whose fd store holds what the kubelet has open from one process to the
//! next.

use super::load::{rounds, unnoticed_under_load};
use super::{DEVICES, config, gpu};
use crate::common::{Daemon, HANG, Node, offered, run, soon};
use crate::systemd::Systemd;
use nix::sys::signal::Signal;
use std::os::unix::net::UnixDatagram;

/// Waits until it has heard this so often.
async fn heard(systemd: &Systemd, wanted: &str, times: usize) {
    let mut heard = systemd.heard.clone();
    let often = heard.wait_for(|heard| heard.times(wanted) >= times);
    drop(soon(wanted, often).await.unwrap());
}

fn start(systemd: &Systemd, node: &Node) -> Daemon {
    Daemon::spawn(&mut systemd.in_unit(&node.command(&["run"])))
}

/// Stops one, as for a restart.
async fn stop(systemd: &Systemd, mut daemon: Daemon, times: usize) {
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    heard(systemd, "FDSTORE=1", times).await;
    assert!(systemd.keeps() > 1, "a socket and a connection");
}

async fn restarted_under_load() {
    let node = Node::with(&[("gpu", DEVICES)]);
    node.write_config(&config());
    let kubelet = node.start_kubelet().await;
    let systemd = Systemd::new(&node.path("notify"));
    let mut daemon = start(&systemd, &node);
    heard(&systemd, "READY=1", 1).await;
    offered(&kubelet, &gpu(), DEVICES).await;

    let restarts = async {
        for round in 1..=rounds(3) {
            stop(&systemd, daemon, round).await;
            daemon = start(&systemd, &node);
            heard(&systemd, "READY=1", round + 1).await;
            assert_eq!(systemd.keeps(), 0, "the process holds them alone");
        }
        daemon
    };
    let (pods, daemon) = unnoticed_under_load(&node, &kubelet, restarts).await;
    println!("restarted by systemd: {pods} pods");
    assert!(pods > 3, "the load has hardly run");

    stop(&systemd, daemon, rounds(3) + 1).await;
    // The next one cannot start, and has what was kept all the same.
    node.write_config("[nonsense]\n");
    assert_eq!(start(&systemd, &node).ended().await.code(), Some(3));
    offered(&kubelet, &gpu(), DEVICES).await;
    // Then the unit has it forgotten (`ExecStopPost=`).
    UnixDatagram::unbound()
        .unwrap()
        .send_to(b"FDSTOREREMOVE=1\nFDNAME=kubelet\n", node.path("notify"))
        .unwrap();
    kubelet.wait_for(|view| view.capacity(&gpu()).allocatable == 0, HANG).await.unwrap();
    assert_eq!(kubelet.panicked(), None);
}

#[test]
fn a_restart_takes_no_device_from_the_kubelet_and_fails_no_pod() {
    run(restarted_under_load());
}
