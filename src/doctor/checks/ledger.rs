//! The ledger: its disk, its records, and what they say of the clock.

use super::super::codes::{
    CLOCK_MOVED_BACK, CLOCK_MOVED_FORWARD, LEDGER_DAMAGED, LEDGER_MOVED_ASIDE, LEDGER_NOT_WRITTEN, LEDGER_ONE_COPY, LEDGER_UNREADABLE,
    STATE_DISK_FULL, STATE_DISK_LOW, STATE_IN_CONTAINER, STATE_IN_MEMORY, STATE_ON_NETWORK, STATE_READ_ONLY,
};
use super::super::{Clock, Facts, Finding};
use super::{is_true, text};
use crate::domain::Timestamp;
use crate::host::Medium;

/// Below this sled is not written any more, and soon the journal cannot be.
const FULL_BYTES: u64 = 1024 * 1024;
/// A full history takes so much; below it a log that grows beside it may take the rest within a day.
const LOW_BYTES: u64 = 128 * 1024 * 1024;
/// The journal and sled make and remove files all the time.
const LOW_FILES: u64 = 64;
/// What clocks may differ by without having jumped: a machine's oscillator is wrong by seconds in a month.
const SLACK_MILLIS: u64 = 60 * 1000;

pub(super) fn state(facts: &Facts) -> Option<Vec<Finding>> {
    let state = facts.state.as_ref()?;
    let on = state.dir.display();
    let mut found = Vec::new();
    let make_room = "make room on this file system, or give the daemon another --state-dir";
    let mib = state.room / 1024 / 1024;
    if state.is_read_only {
        let todo = "mount it writable; a disk that the kernel has made read-only has failed: its log says how";
        found.push(Finding::new(&STATE_READ_ONLY, &on, "its file system is read-only", todo).by("dmesg | grep -i -e error -e remount"));
    } else if state.room < FULL_BYTES || state.files_left == 0 {
        let what =
            if state.files_left == 0 { "no more files can be made".to_owned() } else { format!("{} KiB are left", state.room / 1024) };
        found.push(Finding::new(&STATE_DISK_FULL, &on, what, make_room));
    } else if state.room < LOW_BYTES || state.files_left < LOW_FILES {
        let what = if state.files_left < LOW_FILES {
            format!("{} more files can be made", state.files_left)
        } else {
            format!("{mib} MiB are left")
        };
        found.push(Finding::new(&STATE_DISK_LOW, &on, what, make_room));
    }
    let elsewhere = "put --state-dir on a disk of the node: /var/lib/holdfast there, a hostPath in a container";
    found.extend(match state.medium {
        Some(Medium::Memory) => Some(Finding::new(&STATE_IN_MEMORY, &on, "it lies in memory (tmpfs)", elsewhere)),
        Some(Medium::Overlay) => Some(Finding::new(&STATE_IN_CONTAINER, &on, "it lies in the layers of a container (overlay)", elsewhere)),
        Some(Medium::Network) => Some(Finding::new(&STATE_ON_NETWORK, &on, "it lies on another machine", elsewhere)),
        Some(Medium::Disk) | None => None,
    });
    Some(found)
}

pub(super) fn ledger(facts: &Facts) -> Option<Vec<Finding>> {
    let dir = facts.roots.state.display();
    let mut found = Vec::new();
    let look = "holdfast ledger verify";
    if let Some(ledger) = &facts.ledger {
        if let Some(why) = &ledger.unreadable {
            let todo = "a later version may have written it: install that one; else the daemon says at its start what it could not rebuild";
            found.push(Finding::new(&LEDGER_UNREADABLE, &dir, why, todo).by(look));
        }
        let todo = "nothing is lost as long as the other copy has it, which a start finds out by itself";
        found.extend(ledger.findings.iter().map(|what| Finding::new(&LEDGER_DAMAGED, &dir, what, todo).by(look)));
    }
    if let Some(status) = facts.status() {
        let kept = status.get("ledger");
        let is_kept = |copy| kept.is_none_or(|kept| is_true(kept, copy));
        if !is_kept("journal") {
            let todo = "see to the disk: it is full, read-only or broken; the daemon writes what it owes as soon as it can";
            found.push(Finding::new(&LEDGER_NOT_WRITTEN, &dir, "the journal cannot be written", todo).by("journalctl -u holdfast -n 50"));
        } else if !is_kept("database") {
            let todo = "see to the disk: the second copy is written only where there is room";
            found.push(Finding::new(&LEDGER_ONE_COPY, &dir, "the second copy of the ledger is not kept at present", todo));
        }
        let recovery = text(status, "recovery");
        if !recovery.is_empty() && found.is_empty() {
            let todo = "compare what is live with what you know to run: `holdfast who`; what was moved aside is kept for you";
            found.push(Finding::new(&LEDGER_DAMAGED, &dir, format!("it was damaged when the daemon started: {recovery}"), todo).by(look));
        }
    }
    let aside = facts.state.as_ref().map(|state| state.moved_aside.as_slice()).unwrap_or_default();
    let todo = "delete it when nobody wants to look at it any more; it is never read again";
    found.extend(aside.iter().map(|path| Finding::new(&LEDGER_MOVED_ASIDE, path.display(), "it was moved aside", todo)));
    if facts.ledger.is_none() && facts.status().is_none() && found.is_empty() { None } else { Some(found) }
}

pub(super) fn clock(facts: &Facts) -> Option<Vec<Finding>> {
    let Clock { newest, oldest_of_boot } = facts.ledger.as_ref()?.clock;
    let now = facts.now.wall;
    let booted = Timestamp(now.0.saturating_sub(u64::try_from(facts.now.boot.as_millis()).unwrap_or(u64::MAX)));
    let dir = facts.roots.state.display();
    let sync = "have the clock kept by NTP, and let that step it before the daemon starts (systemd-time-wait-sync, chrony-wait)";
    if let Some(newest) = newest.filter(|newest| newest.0 > now.0.saturating_add(SLACK_MILLIS)) {
        let found = format!("the newest record is of {}, and now it is {}", newest.to_seconds(), now.to_seconds());
        return Some(vec![Finding::new(&CLOCK_MOVED_BACK, dir, found, sync).by("timedatectl")]);
    }
    if let Some(oldest) = oldest_of_boot.filter(|oldest| oldest.0.saturating_add(SLACK_MILLIS) < booted.0) {
        let found = format!(
            "a grant of this boot is of {}, and by the clock of now the machine has booted at {}",
            oldest.to_seconds(),
            booted.to_seconds()
        );
        return Some(vec![Finding::new(&CLOCK_MOVED_FORWARD, dir, found, sync).by("timedatectl")]);
    }
    Some(Vec::new())
}
