//! Events: they only trigger a rescan, many of them trigger few scans, and lost ones are recovered.

use super::machine::{Host, ZRAM, Zram, alone, can};
use crate::common::run;
use nix::sys::signal::Signal;
use std::fs;
use std::path::Path;

fn has_zram(test: &str) -> bool {
    can(test, "a kernel with zram", Path::new(ZRAM).exists())
}

#[test]
fn a_forged_event_changes_nothing() {
    let _alone = alone();
    if !has_zram("a_forged_event_changes_nothing") {
        return;
    }
    run(async {
        let host = Host::new("/dev/zram*");
        let (first, running) = Zram::offered(&host).await;
        let mut others = Vec::new();
        for action in ["remove", "unbind", "offline", "move", "change", "bind", "add", "online"] {
            first.say(action);
            // The list with the second disk is from a scan that began after the event.
            let second = Zram::new();
            running.listed(&second.id(), true).await;
            assert!(running.healthy().contains(&first.id()), "{action}");
            others.push(second);
        }
        let doubted = |line: &String| {
            line.contains("unhealthy") && line.contains(&format!("device={} ", first.id()))
        };
        assert!(!running.daemon.log().iter().any(doubted), "nor was it doubted for a moment");
    });
}

#[test]
fn a_burst_of_events_causes_few_scans() {
    let _alone = alone();
    let functions =
        fs::read_dir("/sys/bus/pci/devices").map(Iterator::collect::<Result<Vec<_>, _>>);
    let function = functions
        .ok()
        .and_then(Result::ok)
        .and_then(|mut functions| functions.pop())
        .map(|entry| entry.path().join("uevent"));
    let Some(function) = function.filter(|_| has_zram("a_burst_of_events_causes_few_scans")) else {
        return;
    };
    run(async {
        let host = Host::new("/dev/zram*");
        let (_first, running) = Zram::offered(&host).await;
        running.rest().await;
        let before = running.work().await;
        // The effect of `udevadm trigger`.
        (0..3000).for_each(|_| fs::write(&function, "change").unwrap());
        running.rest().await;
        let now = running.work().await;
        let (work, most) = (now.since(before), now.most(before));
        println!("3000 events of a PCI function: {work:?}, at most {most} scans");
        assert!(work.scans >= 1, "a function that is there may have changed");
        assert!(work.scans <= most, "{work:?}, at most {most} scans");
        assert_eq!(work.lists, 0, "but it has not");
    });
}

#[test]
fn lost_events_are_compensated_by_a_scan() {
    let _alone = alone();
    if !has_zram("lost_events_are_compensated_by_a_scan") {
        return;
    }
    run(async {
        let host = Host::new("/dev/zram*");
        let (first, running) = Zram::offered(&host).await;
        running.daemon.signal(Signal::SIGSTOP);
        // More than the socket's buffer holds.
        (0..20_000).for_each(|_| first.say("change"));
        let second = Zram::new();
        running.daemon.signal(Signal::SIGCONT);
        running.listed(&second.id(), true).await;
        running.daemon.logged("event=None").await;
        assert!(running.healthy().contains(&first.id()));
    });
}

/// `HOLDFAST_REBIND=0000:00:05.0` names a function of this machine that is not needed, such as a
/// virtual machine's random number generator: the test unbinds and rebinds its driver.
#[test]
fn the_events_of_a_driver_come_in_the_kernels_order() {
    let _alone = alone();
    let address = std::env::var("HOLDFAST_REBIND").unwrap_or_default();
    let folder = format!("/sys/bus/pci/devices/{address}");
    let driver = fs::canonicalize(format!("{folder}/driver")).ok().filter(|_| !address.is_empty());
    let named = "a PCI function with a driver that may be taken away, named by HOLDFAST_REBIND";
    if !can("the_events_of_a_driver_come_in_the_kernels_order", named, driver.is_some()) {
        return;
    }
    let driver = driver.unwrap();
    run(async {
        let host = Host::new("/dev/zram*");
        let running = host.start().await;
        running.rest().await;
        let before = running.work().await;
        fs::write(driver.join("unbind"), &address).unwrap();
        let seen = |action: &str| {
            format!("action: \"{action}\", devpath: \"/devices/pci0000:00/{address}\"")
        };
        let unbound = running.daemon.logged(&seen("unbind")).await;
        fs::write(driver.join("bind"), &address).unwrap();
        let bound = running.daemon.logged(&seen("bind")).await;
        let log = running.daemon.log();
        let at = |line: &str| log.iter().position(|logged| logged == line).unwrap();
        let below: Vec<_> = log
            .iter()
            .enumerate()
            .filter(|(_, line)| line.contains(&format!("{address}/")))
            .collect();
        println!(
            "{}",
            log.iter()
                .filter(|line| line.contains("uevent"))
                .cloned()
                .collect::<Vec<_>>()
                .join("\n")
        );
        let of = |action: &str| -> Vec<usize> {
            below
                .iter()
                .filter(|(_, line)| line.contains(&format!("action: \"{action}\"")))
                .map(|(at, _)| *at)
                .collect()
        };
        assert!(of("remove").iter().all(|child| *child < at(&unbound)), "what is below goes first");
        assert!(
            of("add").iter().all(|child| (at(&unbound)..at(&bound)).contains(child)),
            "and is there when the driver is"
        );
        running.rest().await;
        assert_eq!(running.work().await.since(before).lists, 0, "no resource offers it");
    });
}
