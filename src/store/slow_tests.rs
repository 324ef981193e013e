//! A database that opens slowly, that the system refuses to open, or that is another kind of file.
//! It is not damaged, no caller waits for it, and no entry is lost.

use super::layout::{database_dir, journal_dir, quarantined};
use super::lock::Lock;
use super::samples::{bound, damage_grant, grant, hook, made, named, released_at};
use super::testing::slow;
use super::*;
use crate::domain::{HookState, Timestamp, UnreadableReason};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, SystemTime};

const THIS: Option<&str> = Some("this boot");
const NEXT: Option<&str> = Some("next boot");

fn open(dir: &Path, boot: Option<&str>) -> (Store, Recovered) {
    Store::open(dir, Durability::PowerLoss, boot).unwrap()
}

fn make_fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn released(n: u64) -> Entry {
    released_at(n, Timestamp::from_system(SystemTime::now()).0)
}

fn numbers(grants: &[Grant]) -> Vec<u64> {
    let mut numbers: Vec<u64> =
        grants.iter().map(|grant| grant.granted_at.0 - 1_700_000_000_000).collect();
    numbers.sort_unstable();
    numbers
}

fn past(store: &Store) -> Vec<u64> {
    numbers(&store.history(usize::MAX, |_| true).unwrap())
}

/// A ledger of this boot: grant 1 is held, 2 and 3 are released.
fn ledger(dir: &Path) {
    let (mut store, _) = open(dir, THIS);
    store.append(&[made(1), made(2), made(3), released(2), released(3), named(1)]).unwrap();
    store.checkpoint().unwrap();
    drop(store);
    // The new segment begins with the live grants.
    open(dir, THIS).0.checkpoint().unwrap();
}

const POLL: Duration = Duration::from_millis(1);

/// Waits until the database is open.
fn until_open(store: &Store) {
    loop {
        store.index.with_database(|_| {});
        if store.kept().unreadable.is_none() && store.kept().database {
            return;
        }
        thread::sleep(POLL);
    }
}

/// Waits until the history is unreadable, and returns the reason.
fn until_unreadable(store: &Store) -> UnreadableReason {
    loop {
        if let Some(unreadable) = store.kept().unreadable {
            return unreadable.because;
        }
        drop(store.history(1, |_| true));
        thread::sleep(POLL);
    }
}

fn exported(store: &Store) -> (Vec<u64>, Vec<u64>, Result<(), String>) {
    let (mut live, mut past) = (Vec::new(), Vec::new());
    let end = store.exporter().unwrap().read(|line| {
        if let ExportLine::Grant(grant) = line {
            if grant.is_live() { &mut live } else { &mut past }.push(*grant);
        }
        true
    });
    (numbers(&live), numbers(&past), end.map(drop).map_err(|error| error.to_string()))
}

#[test]
fn a_slow_database_opens_after_the_start_and_nothing_is_lost() {
    for boot in [THIS, NEXT, None] {
        let dir = tempfile::tempdir().unwrap();
        ledger(dir.path());
        let held = slow::hold(&database_dir(dir.path()));
        let (mut store, recovered) = open(dir.path(), boot);
        assert!(
            recovered.report.is_clean() && numbers(&recovered.grants) == [1],
            "{boot:?}: {}",
            recovered.report
        );
        assert_eq!(
            (recovered.names.len(), until_unreadable(&store)),
            (1, UnreadableReason::Slow),
            "{boot:?}"
        );
        // Grants are recorded and changed in the meantime.
        store.append(&[made(4), made(5), released(4)]).unwrap();
        store.append(&[bound(5)]).unwrap();
        store.checkpoint().unwrap();
        let error = store.history(9, |_| true).unwrap_err();
        assert!(
            error.to_string().contains("is not open yet: it has been opening since"),
            "{error}"
        );
        let (live, known, end) = exported(&store);
        assert_eq!((live, known), (vec![1, 5], vec![4]), "known grants are exported");
        assert!(end.unwrap_err().contains("is not open yet"), "and the export is incomplete");
        assert!(!store.verifier().verify().unwrap().sound, "an unreadable copy is not sound");
        drop(held);
        until_open(&store);
        assert_eq!((past(&store), quarantined(dir.path()).len()), (vec![2, 3, 4], 0), "{boot:?}");
        assert!(
            store.load().report.is_clean() && store.found().is_empty(),
            "{boot:?}: {}",
            store.load().report
        );
        store.checkpoint().unwrap();
        assert!(store.verifier().verify().unwrap().sound, "{boot:?}");
        assert_eq!(
            journal::segments(&journal_dir(dir.path())).unwrap().len(),
            1,
            "old segments are deleted"
        );
    }
}

/// After a power cut the journal may end earlier than sled does.
#[test]
fn entries_that_only_a_slow_database_has_after_a_power_cut_are_recovered_when_it_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path(), THIS);
    store.append(&[made(1), made(2), released(2)]).unwrap();
    let segment = journal::segments(&journal_dir(dir.path())).unwrap().pop().unwrap().1;
    let (kept, confirmed) = (fs::read(&segment).unwrap(), store.next_seq - 1);
    store
        .append(&[made(3), made(4), named(3), hook(2, HookState::Due), made(5), released(5)])
        .unwrap();
    store.checkpoint().unwrap();
    drop(store);
    fs::write(&segment, kept).unwrap();
    let mut lock = Lock::take(dir.path()).unwrap();
    lock.confirm(confirmed);
    lock.write_confirmed();
    drop(lock);

    let held = slow::hold(&database_dir(dir.path()));
    let (mut store, recovered) = open(dir.path(), NEXT);
    assert_eq!(numbers(&recovered.grants), [1]);
    // One of them was recovered from the kubelet's checkpoint in the meantime.
    let Entry::Grant(three) = made(3) else { unreachable!() };
    store.adopt(&[Arc::unwrap_or_clone(three)]).unwrap();
    drop(held);
    until_open(&store);
    let found = store.found();
    assert_eq!(found, [made(4), named(3), hook(2, HookState::Due)], "{}", store.load().report);
    store.append(&found).unwrap();
    let known = store.load();
    assert_eq!(
        (numbers(&known.grants), known.names.len(), known.owed.len()),
        (vec![1, 3, 4], 1, 1)
    );
    assert_eq!((past(&store), quarantined(dir.path()).len()), (vec![2, 5], 0));
    assert!(known.report.is_clean() && known.report.from_database == 1, "{}", known.report);
    store.close().unwrap();
    assert_eq!(numbers(&open(dir.path(), NEXT).1.grants), [1, 3, 4]);
}

/// The store writes on into the segment, so that a start must find it.
#[test]
fn a_damaged_segment_that_is_being_written_is_not_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let held = slow::hold(&database_dir(dir.path()));
    let (mut store, _) = open(dir.path(), THIS);
    for n in 1..=3 {
        store.append(&[made(n)]).unwrap();
    }
    damage_grant(2, dir.path());
    drop(held);
    until_open(&store);
    assert!(!store.load().report.is_clean(), "it is reported");
    assert_eq!(quarantined(dir.path()).len(), 0);
    store.append(&[made(4)]).unwrap();
    drop(store);
    let (_, recovered) = open(dir.path(), THIS);
    assert_eq!((numbers(&recovered.grants), quarantined(dir.path()).len()), (vec![1, 3, 4], 1));
}

#[test]
fn a_damaged_journal_with_a_slow_database_is_reported_and_repaired_later() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path(), THIS);
    for n in 1..=3 {
        store.append(&[made(n)]).unwrap();
    }
    store.checkpoint().unwrap();
    drop(store);
    damage_grant(2, dir.path());

    let held = slow::hold(&database_dir(dir.path()));
    let (mut store, recovered) = open(dir.path(), NEXT);
    assert_eq!(numbers(&recovered.grants), [1, 3]);
    assert!(
        recovered.report.may_lack_grants() && recovered.report.missing == 1,
        "{}",
        recovered.report
    );
    let ids = [1, 2].map(|n| grant(n).alloc_id).into();
    assert_eq!(store.known_among(ids)().len(), 1, "the kubelet has the unknown one");
    drop(held);
    until_open(&store);
    let found = store.found();
    assert_eq!(found, [made(2)]);
    // Its commit fails, and the database follows the journal once more.
    store.index.fall_behind();
    store.checkpoint().unwrap();
    store.index.with_database(|database| {
        let live = database.as_ref().unwrap().reader().snapshot().unwrap().live;
        assert!(live.contains_key(&grant(2).alloc_id), "the only copy is kept");
    });
    assert_eq!(store.found(), found);
    store.append(&found).unwrap();
    assert_eq!(store.found(), [], "it is known");
    assert_eq!(quarantined(dir.path()).len(), 1, "the segment is kept for inspection");
    store.close().unwrap();
    let (_, recovered) = open(dir.path(), NEXT);
    assert!(
        recovered.report.is_clean() && numbers(&recovered.grants) == [1, 2, 3],
        "{}",
        recovered.report
    );
}

#[test]
fn a_slow_database_that_is_damaged_is_quarantined_when_it_opens() {
    for boot in [THIS, NEXT] {
        let dir = tempfile::tempdir().unwrap();
        ledger(dir.path());
        fs::write(database_dir(dir.path()).join("db"), vec![0xa5; 700_000]).unwrap();
        let held = slow::hold(&database_dir(dir.path()));
        let (mut store, recovered) = open(dir.path(), boot);
        assert!(
            recovered.report.is_clean() && numbers(&recovered.grants) == [1],
            "{}",
            recovered.report
        );
        until_unreadable(&store);
        store.append(&[made(4), released(4)]).unwrap();
        assert_eq!(quarantined(dir.path()).len(), 0, "slow is not damaged");
        drop(held);
        until_open(&store);
        let report = store.load().report;
        assert!(
            report.findings[0].contains("its history stays in the quarantined copy"),
            "{report}"
        );
        assert_eq!((quarantined(dir.path()).len(), report.quarantined.len()), (1, 1), "{report}");
        assert!(past(&store).ends_with(&[4]), "the new one has the history of the journal");
        store.checkpoint().unwrap();
        assert!(store.kept().database && open_is_clean(store, dir.path()));
    }
}

fn open_is_clean(store: Store, dir: &Path) -> bool {
    store.close().unwrap();
    open(dir, NEXT).1.report.is_clean()
}

/// Asserts that `run` ends although the database does not open. The limit of a minute is reached
/// only if it hangs.
fn ends(run: impl FnOnce() + Send + 'static) {
    let (done, is_done) = channel::<()>();
    let running = thread::spawn(move || {
        run();
        drop(done);
    });
    assert_eq!(
        is_done.recv_timeout(Duration::from_secs(60)),
        Err(RecvTimeoutError::Disconnected),
        "it waits for the database"
    );
    running.join().unwrap();
}

#[test]
fn a_stop_while_the_database_opens_ends_in_time_and_the_next_start_has_everything() {
    for closes in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        ledger(dir.path());
        let held = slow::hold(&database_dir(dir.path()));
        let (mut store, _) = open(dir.path(), THIS);
        until_unreadable(&store);
        store.append(&[made(4), made(5), released(5)]).unwrap();
        ends(move || if closes { store.close().unwrap() } else { drop(store) });
        // A clean reboot, or a handover: the old instance still has the files open.
        let (mut store, recovered) = open(dir.path(), if closes { NEXT } else { THIS });
        assert!(
            recovered.report.is_clean() && numbers(&recovered.grants) == [1, 4],
            "{}",
            recovered.report
        );
        store.append(&[released(4)]).unwrap();
        drop(held);
        until_open(&store);
        assert_eq!((past(&store), quarantined(dir.path()).len()), (vec![2, 3, 4, 5], 0));
        assert!(store.load().report.is_clean(), "{}", store.load().report);
    }
}

/// EIO, EAGAIN, ENOMEM, EACCES, EMFILE, ENOSPC
#[test]
fn an_opening_that_the_system_refuses_is_retried_and_no_file_is_quarantined() {
    for errno in [5, 11, 12, 13, 24, 28] {
        for boot in [THIS, NEXT] {
            let dir = tempfile::tempdir().unwrap();
            ledger(dir.path());
            let held = slow::refuse(&database_dir(dir.path()), errno, u32::MAX);
            let (mut store, recovered) = open(dir.path(), boot);
            assert!(
                recovered.report.is_clean() && numbers(&recovered.grants) == [1],
                "{errno}: {}",
                recovered.report
            );
            assert_eq!(until_unreadable(&store), UnreadableReason::Refused, "{errno}");
            store.append(&[made(4), released(4)]).unwrap();
            store.checkpoint().unwrap();
            let error = store.history(9, |_| true).unwrap_err().to_string();
            assert!(
                error.contains(&std::io::Error::from_raw_os_error(errno).to_string()),
                "{errno}: {error}"
            );
            drop(held);
            until_open(&store);
            assert_eq!(
                (past(&store), quarantined(dir.path()).len()),
                (vec![2, 3, 4], 0),
                "{errno}"
            );
        }
    }
}

#[test]
fn a_fifo_in_place_of_a_file_is_reported_and_blocks_nothing() {
    let (lock, journal) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    make_fifo(&lock.path().join("lock"));
    fs::create_dir(journal_dir(journal.path())).unwrap();
    make_fifo(&journal_dir(journal.path()).join(journal::file_name(1)));
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir_all(journal_dir(directory.path()).join(journal::file_name(1))).unwrap();
    for (dir, name, what) in [
        (&lock, "lock", "a FIFO"),
        (&journal, "journal/", "a FIFO"),
        (&directory, "journal/", "a directory"),
    ] {
        let error = Store::open(dir.path(), Durability::PowerLoss, NEXT).unwrap_err().to_string();
        assert!(
            error.contains(name)
                && error.contains(&format!("it is {what}, not a regular file: move it away")),
            "{error}"
        );
    }
    assert!(peek(journal.path()).is_err() && journal_bytes(journal.path()).is_err());
    for name in ["db", "snap.0000000000000001", "blobs"] {
        for boot in [THIS, NEXT] {
            let dir = tempfile::tempdir().unwrap();
            ledger(dir.path());
            let (there, aside) = (database_dir(dir.path()).join(name), dir.path().join("aside"));
            drop(fs::rename(&there, &aside));
            make_fifo(&there);
            let (store, recovered) = open(dir.path(), boot);
            assert_eq!(
                (numbers(&recovered.grants), until_unreadable(&store)),
                (vec![1], UnreadableReason::Refused),
                "{name}"
            );
            let error = store.history(9, |_| true).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            fs::remove_file(&there).unwrap();
            drop(fs::rename(&aside, &there));
            until_open(&store);
            assert_eq!((past(&store), quarantined(dir.path()).len()), (vec![2, 3], 0), "{name}");
        }
    }
}
