//! The ledger: its disk, its records, and the system clock, judged by the times of the records.

use super::super::codes::{
    CLOCK_MOVED_BACK, CLOCK_MOVED_FORWARD, LEDGER_DAMAGED, LEDGER_MOVED_ASIDE, LEDGER_NOT_WRITTEN,
    LEDGER_ONE_COPY, LEDGER_UNREADABLE, STATE_DISK_FULL, STATE_DISK_LOW, STATE_IN_CONTAINER,
    STATE_IN_MEMORY, STATE_ON_NETWORK, STATE_READ_ONLY,
};
use super::super::{Clock, Facts, Finding, State, WriteAccess};
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
const RESERVE_BYTES: u64 = 32 * 1024 * 1024;
/// Minimum number of free inodes: the journal and sled create and remove files all the time.
const LOW_FILES: u64 = 64;
/// Difference of clocks that is no jump: a machine's oscillator drifts by seconds in a month.
const SLACK_MILLIS: u64 = 60 * 1000;

pub(super) fn state(facts: &Facts) -> Option<Vec<Finding>> {
    let state = facts.state.as_ref()?;
    let on = state.dir.display();
    let mut found: Vec<Finding> =
        write_access(state).or_else(|| disk_space(state)).into_iter().collect();
    let elsewhere =
        "put --state-dir on a disk of the node: /var/lib/holdfast, in a container a hostPath";
    found.extend(match state.medium {
        Some(Medium::Memory) => {
            Some(Finding::new(&STATE_IN_MEMORY, &on, "it is on a file system in memory", elsewhere))
        }
        Some(Medium::Overlay) => Some(Finding::new(
            &STATE_IN_CONTAINER,
            &on,
            "it is in the layers of a container (overlay)",
            elsewhere,
        )),
        Some(Medium::Network) => {
            Some(Finding::new(&STATE_ON_NETWORK, &on, "it is on a network file system", elsewhere))
        }
        Some(Medium::Disk) | None => None,
    });
    Some(found)
}

fn write_access(state: &State) -> Option<Finding> {
    let kernel = "dmesg | grep -i -e error -e remount".to_owned();
    let failed = "the kernel log shows the cause; check the file system (fsck) or replace its \
                  disk, and mount it again";
    let (what, todo, command) = match &state.writes {
        WriteAccess::Allowed => return None,
        WriteAccess::MountReadOnly => (
            "it is mounted read-only here, although its file system is not".to_owned(),
            "mount it writable (in a pod, a volume without `readOnly`; in a unit, add it to \
             ReadWritePaths=)",
            format!("findmnt -o TARGET,VFS-OPTIONS,FS-OPTIONS -T {}", state.dir.display()),
        ),
        WriteAccess::ReadOnly => (
            "its file system is read-only".to_owned(),
            "mount it writable; if the kernel made it read-only, the disk has failed, and the \
             kernel log shows how",
            kernel,
        ),
        WriteAccess::StoppedByError => (
            "the kernel refuses all writes to its file system since an error".to_owned(),
            failed,
            kernel,
        ),
        WriteAccess::DiskFailed(why) => {
            (format!("its file system can no longer be read or written: {why}"), failed, kernel)
        }
    };
    Some(Finding::new(&STATE_READ_ONLY, state.dir.display(), what, todo).by(command))
}

fn disk_space(state: &State) -> Option<Finding> {
    let State { free_bytes, root_reserve_bytes, free_inodes, .. } = *state;
    let (code, what) = match (free_bytes, free_inodes) {
        (_, 0) => (&STATE_DISK_FULL, "the file system has no free inode".to_owned()),
        (0..FULL_BYTES, _) if root_reserve_bytes > RESERVE_BYTES => {
            let mib = (root_reserve_bytes - RESERVE_BYTES) / 1024 / 1024;
            (
                &STATE_DISK_LOW,
                format!(
                    "only the space that the file system reserves for root is free, about {mib} MiB"
                ),
            )
        }
        (0..FULL_BYTES, _) => (&STATE_DISK_FULL, format!("{} KiB are free", free_bytes / 1024)),
        (_, 1..LOW_FILES) => (&STATE_DISK_LOW, format!("{free_inodes} inodes are free")),
        (0..LOW_BYTES, _) => {
            (&STATE_DISK_LOW, format!("{} MiB are free", free_bytes / 1024 / 1024))
        }
        _ => return None,
    };
    Some(Finding::new(
        code,
        state.dir.display(),
        what,
        "free space on this file system, or give the daemon another --state-dir",
    ))
}

pub(super) fn ledger(facts: &Facts) -> Option<Vec<Finding>> {
    let dir = facts.roots.state.display();
    let mut found = Vec::new();
    let verify = "holdfast ledger verify";
    // A ledger on a failed disk cannot be read; that does not mean that it is damaged.
    let has_failed_disk = facts
        .state
        .as_ref()
        .is_some_and(|state| matches!(state.writes, WriteAccess::DiskFailed(_)));
    if let Some(ledger) = facts.ledger.as_ref().filter(|_| !has_failed_disk) {
        if let Some(why) = &ledger.unreadable {
            let todo = "if a later version wrote it, install that version; otherwise the daemon logs at \
                        its start what it could not rebuild";
            found.push(Finding::new(&LEDGER_UNREADABLE, &dir, why, todo).by(verify));
        }
        let todo =
            "nothing is lost if the other copy has it; the daemon compares the copies at its start";
        found.extend(
            ledger
                .findings
                .iter()
                .map(|what| Finding::new(&LEDGER_DAMAGED, &dir, what, todo).by(verify)),
        );
    }
    if let Some(status) = facts.status() {
        let kept = status.get("ledger");
        let is_kept = |copy| kept.is_none_or(|kept| is_true(kept, copy));
        if !is_kept("journal") {
            let todo = "fix the disk, which is full, read-only or broken; the daemon writes the \
                        pending entries as soon as it can";
            found.push(
                Finding::new(&LEDGER_NOT_WRITTEN, &dir, "the journal cannot be written", todo)
                    .by("journalctl -u holdfast -n 50"),
            );
        } else if !is_kept("database") {
            let todo =
                "free space on the disk; the second copy is written only with enough free space";
            found.push(Finding::new(
                &LEDGER_ONE_COPY,
                &dir,
                "the second copy of the ledger (the database) is not written at present",
                todo,
            ));
        }
        let recovery = text(status, "recovery");
        if !recovery.is_empty() && found.is_empty() {
            let todo = "compare the live grants (`holdfast who`) with the running pods; the \
                        damaged files were moved aside and are kept";
            found.push(
                Finding::new(
                    &LEDGER_DAMAGED,
                    &dir,
                    format!("it was damaged when the daemon started: {recovery}"),
                    todo,
                )
                .by(verify),
            );
        }
    }
    let aside = facts.state.as_ref().map(|state| state.moved_aside.as_slice()).unwrap_or_default();
    let todo = "delete it when it is no longer needed for inspection; the daemon never reads it";
    found.extend(aside.iter().map(|path| {
        Finding::new(&LEDGER_MOVED_ASIDE, path.display(), "the daemon moved this file aside", todo)
    }));
    if facts.ledger.is_none() && facts.status().is_none() && found.is_empty() {
        None
    } else {
        Some(found)
    }
}

pub(super) fn clock(facts: &Facts) -> Option<Vec<Finding>> {
    let Clock { newest, oldest_of_boot } = facts.ledger.as_ref()?.clock;
    let now = facts.now.wall;
    let booted = Timestamp(
        now.0.saturating_sub(u64::try_from(facts.now.boot.as_millis()).unwrap_or(u64::MAX)),
    );
    let dir = facts.roots.state.display();
    let sync = "synchronize the clock with NTP, and start the daemon after the first \
                synchronization (systemd-time-wait-sync, chrony-wait)";
    if let Some(newest) = newest.filter(|newest| newest.0 > now.0.saturating_add(SLACK_MILLIS)) {
        let found = format!(
            "the newest record is of {}, but the clock shows {}",
            newest.to_seconds(),
            now.to_seconds()
        );
        return Some(vec![Finding::new(&CLOCK_MOVED_BACK, dir, found, sync).by("timedatectl")]);
    }
    if let Some(oldest) =
        oldest_of_boot.filter(|oldest| oldest.0.saturating_add(SLACK_MILLIS) < booted.0)
    {
        let found = format!(
            "a grant of this boot is of {}, but by the present clock the machine booted at {}",
            oldest.to_seconds(),
            booted.to_seconds()
        );
        return Some(vec![Finding::new(&CLOCK_MOVED_FORWARD, dir, found, sync).by("timedatectl")]);
    }
    Some(Vec::new())
}
