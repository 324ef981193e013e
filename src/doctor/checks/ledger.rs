//! The ledger: its disk, its records, and the system clock, judged by the times of the records.

use super::super::codes::{
    CLOCK_MOVED_BACK, CLOCK_MOVED_FORWARD, LEDGER_DAMAGED, LEDGER_MOVED_ASIDE, LEDGER_NOT_WRITTEN, LEDGER_ONE_COPY, LEDGER_UNREADABLE,
    STATE_DISK_FULL, STATE_DISK_LOW, STATE_IN_CONTAINER, STATE_IN_MEMORY, STATE_ON_NETWORK, STATE_READ_ONLY,
};
use super::super::{Clock, Facts, Finding, State, Writes};
use super::{is_true, text};
use crate::domain::Timestamp;
use crate::host::Medium;

/// With less free space, sled is no longer written, and soon the journal cannot be written either.
const FULL_BYTES: u64 = 1024 * 1024;
/// Size of a full history. With less free space, a log that grows on the same disk may use up the
/// rest within a day.
const LOW_BYTES: u64 = 128 * 1024 * 1024;
/// Of the space that ext4 reserves for root, it uses at most 4096 blocks of 4 KiB itself. As much
/// again is too little to continue with.
const KEPT_BACK_BYTES: u64 = 32 * 1024 * 1024;
/// Minimum number of free inodes: the journal and sled create and remove files all the time.
const LOW_FILES: u64 = 64;
/// Difference of clocks that is no jump: a machine's oscillator drifts by seconds in a month.
const SLACK_MILLIS: u64 = 60 * 1000;

pub(super) fn state(facts: &Facts) -> Option<Vec<Finding>> {
    let state = facts.state.as_ref()?;
    let on = state.dir.display();
    let mut found: Vec<Finding> = refuses(state).or_else(|| has_no_room(state)).into_iter().collect();
    let elsewhere = "put --state-dir on a disk of the node: /var/lib/holdfast there, a hostPath in a container";
    found.extend(match state.medium {
        Some(Medium::Memory) => Some(Finding::new(&STATE_IN_MEMORY, &on, "it lies in memory", elsewhere)),
        Some(Medium::Overlay) => Some(Finding::new(&STATE_IN_CONTAINER, &on, "it lies in the layers of a container (overlay)", elsewhere)),
        Some(Medium::Network) => Some(Finding::new(&STATE_ON_NETWORK, &on, "it lies on another machine", elsewhere)),
        Some(Medium::Disk) | None => None,
    });
    Some(found)
}

fn refuses(state: &State) -> Option<Finding> {
    let kernel = "dmesg | grep -i -e error -e remount".to_owned();
    let failed = "look for why in the kernel's log; check the file system (fsck) or replace its disk, and mount it anew";
    let (what, todo, command) = match &state.writes {
        Writes::Taken => return None,
        Writes::RefusedHere => (
            "it is mounted read-only here, although its file system is not".to_owned(),
            "mount it writable: in a pod, a volume without `readOnly`; in a unit, name it in ReadWritePaths=",
            format!("findmnt -o TARGET,VFS-OPTIONS,FS-OPTIONS -T {}", state.dir.display()),
        ),
        Writes::Refused => (
            "its file system is read-only".to_owned(),
            "mount it writable; a disk that the kernel has made read-only has failed: its log says how",
            kernel,
        ),
        Writes::Stopped => ("since an error the kernel lets nothing be written to its file system".to_owned(), failed, kernel),
        Writes::Gone(why) => (format!("its file system can be neither written nor read any more: {why}"), failed, kernel),
    };
    Some(Finding::new(&STATE_READ_ONLY, state.dir.display(), what, todo).by(command))
}

fn has_no_room(state: &State) -> Option<Finding> {
    let State { room, room_of_root, files_left, .. } = *state;
    let (code, what) = match (room, files_left) {
        (_, 0) => (&STATE_DISK_FULL, "no more files can be made".to_owned()),
        (0..FULL_BYTES, _) if room_of_root > KEPT_BACK_BYTES => {
            let mib = (room_of_root - KEPT_BACK_BYTES) / 1024 / 1024;
            (&STATE_DISK_LOW, format!("nothing is left but what the file system keeps back for root, some {mib} MiB"))
        }
        (0..FULL_BYTES, _) => (&STATE_DISK_FULL, format!("{} KiB are left", room / 1024)),
        (_, 1..LOW_FILES) => (&STATE_DISK_LOW, format!("{files_left} more files can be made")),
        (0..LOW_BYTES, _) => (&STATE_DISK_LOW, format!("{} MiB are left", room / 1024 / 1024)),
        _ => return None,
    };
    Some(Finding::new(code, state.dir.display(), what, "make room on this file system, or give the daemon another --state-dir"))
}

pub(super) fn ledger(facts: &Facts) -> Option<Vec<Finding>> {
    let dir = facts.roots.state.display();
    let mut found = Vec::new();
    let look = "holdfast ledger verify";
    // A ledger on a failed disk cannot be read; that does not mean that it is damaged.
    let is_gone = facts.state.as_ref().is_some_and(|state| matches!(state.writes, Writes::Gone(_)));
    if let Some(ledger) = facts.ledger.as_ref().filter(|_| !is_gone) {
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
