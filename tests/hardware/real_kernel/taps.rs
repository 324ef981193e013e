//! Interfaces in a private network namespace: without a node they are not offered; with a node they
//! are, wherever they are moved.

use super::machine::{Host, alone, done, output};
use crate::common::inside::{inside_a_network, say};
use crate::common::{run, soon, until_blocking};
use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Child, Command, Stdio};

/// One `ip` for all of these commands. Meanwhile the kubelet of this thread continues.
async fn ip(commands: impl IntoIterator<Item = String>) {
    let text: String = commands.into_iter().map(|command| command + "\n").collect();
    let batch = move || {
        let mut batch =
            Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        batch.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(batch.wait().unwrap().success(), "ip -batch: {text}");
    };
    soon("ip", tokio::task::spawn_blocking(batch)).await.unwrap();
}

/// Interfaces with a node that is named by their number. Each test has its own numbers, which no
/// other interface of this machine has.
#[derive(Debug, Clone, Copy)]
struct Taps(u32);

impl Taps {
    /// In a private network namespace. `None` if that is impossible, or if the test has run there.
    fn new(test: &str, first: u32) -> Option<Taps> {
        inside_a_network(test, &["nsenter"])?;
        let taps = Taps(first);
        done("ip", &["link", "add", "trunk", "type", "veth", "peer", "name", "trunk-end"]);
        let tried = output("ip", &taps.add(999).split(' ').collect::<Vec<_>>());
        if !tried.status.success() {
            say(format_args!(
                "SKIPPED: {test}: this kernel has no macvtap: {}",
                String::from_utf8_lossy(&tried.stderr).trim()
            ));
            return None;
        }
        Some(taps)
    }

    /// The host with a resource of these nodes: all but the last hundred.
    fn host(self) -> Host {
        Host::new(&format!("/dev/tap{}[0-8]??", self.0 / 1000))
    }

    fn add(self, number: u32) -> String {
        format!(
            "link add link trunk name tap-{number} index {} type macvtap mode bridge",
            self.0 + number
        )
    }

    fn delete(number: u32) -> String {
        format!("link del tap-{number}")
    }

    fn id(self, number: u32) -> String {
        format!("macvtap:tap{}", self.0 + number)
    }
}

/// A network namespace that belongs to a process, as a pod's does.
struct Pod(Child);

impl Pod {
    fn new() -> Pod {
        let child = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pod = Pod(child);
        let network =
            |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
        until_blocking(
            "a network of the pod's own",
            || network(&pod.pid()),
            |theirs| *theirs != network("self"),
        );
        pod
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn an_interface_that_is_moved_into_a_pods_network_stays_offered() {
    let _alone = alone();
    let Some(taps) = Taps::new(
        "hardware::real_kernel::taps::an_interface_that_is_moved_into_a_pods_network_stays_offered",
        771_000,
    ) else {
        return;
    };
    run(async {
        let host = taps.host();
        ip([taps.add(1)]).await;
        let running = host.start().await;
        running.listed(&taps.id(1), true).await;
        let pod = Pod::new();
        // The kernel removes its node, and creates it again there.
        ip([format!("link set tap-1 netns {}", pod.pid())]).await;
        assert!(
            !std::path::Path::new("/sys/class/net/tap-1").exists(),
            "this network no longer has it"
        );
        ip([taps.add(2)]).await;
        running.listed(&taps.id(2), true).await;
        running.listed(&taps.id(1), true).await;
        assert_eq!(
            running.healthy(),
            [taps.id(1), taps.id(2)].into(),
            "it has kept its name, although this network's sysfs shows none"
        );
        // The removal sends no event to this network; the node's removal does.
        done("nsenter", &["--net", "--target", &pod.pid(), "ip", "link", "del", "tap-1"]);
        running.listed(&taps.id(1), false).await;
        assert_eq!(running.healthy(), [taps.id(2)].into());
    });
}

#[test]
fn a_burst_of_unoffered_interfaces_makes_no_list() {
    let _alone = alone();
    let Some(taps) = Taps::new(
        "hardware::real_kernel::taps::a_burst_of_unoffered_interfaces_makes_no_list",
        772_000,
    ) else {
        return;
    };
    run(async {
        let host = taps.host();
        ip([taps.add(1)]).await;
        let running = host.start().await;
        running.listed(&taps.id(1), true).await;
        let mut scans = Vec::new();
        for _ in 0..5 {
            running.rest().await;
            let before = running.work().await;
            ip((0..500).map(|n| format!("link add a{n} group 7 type veth peer name b{n}"))).await;
            ip(["link del group 7".to_owned()]).await;
            running.rest().await;
            let work = running.work().await.since(before);
            assert_eq!(work.lists, 0, "no resource offers the added and removed devices");
            scans.push(work.scans);
        }
        println!("scans in a storm of 500 pairs: {scans:?}");
        // Other events may come to this machine meanwhile; not every time.
        assert!(
            scans.iter().any(|scans| *scans <= 2),
            "each time was looked for what 500 pairs of interfaces have changed: {scans:?}"
        );
        ip([taps.add(2)]).await;
        running.listed(&taps.id(2), true).await;
        assert_eq!(running.healthy(), [taps.id(1), taps.id(2)].into());
    });
}

#[test]
fn a_burst_of_devices_makes_few_lists_and_the_last_one_is_correct() {
    let _alone = alone();
    let Some(taps) = Taps::new(
        "hardware::real_kernel::taps::a_burst_of_devices_makes_few_lists_and_the_last_one_is_correct",
        773_000,
    ) else {
        return;
    };
    run(async {
        let host = taps.host();
        let running = host.start().await;
        let before = running.work().await;
        for _ in 0..2 {
            ip((1..=100).map(|n| taps.add(n))).await;
            ip((1..=100).rev().map(Taps::delete)).await;
        }
        ip((1..=50).map(|n| taps.add(n))).await;
        ip((1..=50).filter(|n| n % 2 == 0).map(Taps::delete)).await;
        let odd: BTreeSet<String> = (1..=50).filter(|n| n % 2 == 1).map(|n| taps.id(n)).collect();
        running.healthy_are(&odd).await;
        running.rest().await;
        let now = running.work().await;
        let (work, most) = (now.since(before), now.most(before));
        println!(
            "275 taps came and went: {} scans, {} lists, at most {most} of each",
            work.scans, work.lists
        );
        assert!(work.lists <= most && work.scans <= most, "{work:?}, at most {most} of each");
        assert_eq!(running.healthy(), odd);
    });
}
