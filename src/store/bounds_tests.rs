//! The state directory is bounded, and reducing its size loses nothing.

use super::index::compact_dir;
use super::layout::{database_dir, delete_quarantined, journal_dir, quarantined};
use super::samples::{grant, hook, made, named, released_at};
use super::testing::slow;
use super::*;
use crate::domain::{HookState, Retention, Timestamp};
use crate::host;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

const MIB: u64 = 1024 * 1024;
const THIS: Option<&str> = Some("this boot");

fn open(dir: &Path, retention: Retention) -> Store {
    Store::open_keeping(dir, Durability::ProcessCrash, THIS, retention).unwrap().0
}

fn now() -> u64 {
    Timestamp::from_system(SystemTime::now()).0
}

/// Grants and releases in batches, with a checkpoint after each batch.
fn come_and_go(store: &mut Store, numbers: std::ops::Range<u64>, mut look: impl FnMut()) {
    for batch in numbers.collect::<Vec<_>>().chunks(250) {
        store.append(&batch.iter().map(|n| made(*n)).collect::<Vec<_>>()).unwrap();
        store.append(&batch.iter().map(|n| released_at(*n, now())).collect::<Vec<_>>()).unwrap();
        store.checkpoint().unwrap();
        look();
    }
}

fn past(store: &Store) -> Vec<AllocId> {
    store.history(usize::MAX, |_| true).unwrap().into_iter().map(|grant| grant.alloc_id).collect()
}

/// A database whose files are far longer than its records, since most of its history expired.
fn bloated(dir: &Path) -> Store {
    let mut store = open(dir, Retention::of_bytes(64 * MIB));
    store.append(&[made(1), made(2), named(1), hook(2, HookState::Due)]).unwrap();
    come_and_go(&mut store, 10..3000, || {});
    store.close().unwrap();
    assert!(host::size_below(&database_dir(dir)) > 4 * MIB);
    open(dir, Retention { grants: 100, ..Retention::of_bytes(64 * MIB) })
}

#[test]
fn the_directory_stays_small_with_any_number_of_grants() {
    let dir = tempfile::tempdir().unwrap();
    let retention = Retention::of_bytes(3 * MIB);
    let mut store = open(dir.path(), retention);
    let mut most = 0;
    come_and_go(&mut store, 0..8000, || most = most.max(host::size_below(dir.path())));
    store.index.settle();
    assert!(most < 4 * 4 * MIB, "{most}");
    let left = past(&store);
    let bytes: usize = left.len() * 700;
    assert!(
        bytes as u64 <= retention.records(0) && bytes as u64 > retention.records(0) / 2,
        "{} grants are kept",
        left.len()
    );
    assert_eq!(left[0], grant(7999).alloc_id, "the newest are kept");
    store.checkpoint().unwrap();
    let found = store.verifier().verify().unwrap();
    assert!(found.sound && found.database.unwrap().released == left.len() as u64);
}

#[test]
fn a_database_with_long_files_and_few_records_is_compacted_without_loss() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = bloated(dir.path());
    store.checkpoint().unwrap();
    store.append(&[made(5000)]).unwrap();
    // The work after a checkpoint is done when the next one is.
    store.checkpoint().unwrap();
    store.index.settle();
    let (db, known) = (host::size_below(&database_dir(dir.path())), past(&store));
    assert!(db < 3 * MIB / 2, "{db}");
    assert_eq!((known.len(), &known[0]), (100, &grant(2999).alloc_id));
    let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let is_other = |name: &OsString| !["db", "journal", "lock"].map(Into::into).contains(name);
    assert_eq!(names.filter(is_other).collect::<Vec<_>>(), [""; 0]);
    let verified = store.verifier().verify().unwrap();
    assert!(verified.sound, "{verified:#?}");
    let forgotten = store.exporter().unwrap().read(|_| true).unwrap();
    assert!(forgotten.is_some(), "the expiry is still known");
    drop(store);
    // The database alone has everything too.
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    fs::remove_file(dir.path().join("lock")).unwrap();
    let (_, recovered) = Store::open(dir.path(), Durability::PowerLoss, None).unwrap();
    assert_eq!((recovered.grants.len(), recovered.names.len(), recovered.owed.len()), (3, 1, 1));
}

#[test]
fn a_database_with_a_reader_is_compacted_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = bloated(dir.path());
    let mut lines = 0;
    let export = store.exporter().unwrap();
    let db = database_dir(dir.path());
    // A compaction replaces the directory. sled itself may shorten the files in it.
    let directory = |when: &str| fs::metadata(&db).expect(when).ino();
    let (before, first) = (host::size_below(&db), directory("before"));
    export
        .read(|_| {
            if lines == 50 {
                store.checkpoint().unwrap();
                store.index.settle();
                assert_eq!(directory("while read"), first, "its files are not replaced");
            }
            lines += 1;
            true
        })
        .unwrap();
    assert!(lines > 100);
    store.checkpoint().unwrap();
    store.index.settle();
    assert_ne!(directory("after"), first);
    assert!(host::size_below(&db) < before / 2);
}

/// The files of a process that ended during a compaction: before the copy is complete, and after it
/// has replaced the database.
#[test]
fn a_process_that_ends_during_a_compaction_loses_nothing() {
    for ends in ["before", "after"] {
        let dir = tempfile::tempdir().unwrap();
        let mut store = open(dir.path(), Retention::default());
        come_and_go(&mut store, 0..50, || {});
        store.append(&[made(50)]).unwrap();
        store.close().unwrap();
        // A new segment, so that the database alone has the history.
        let mut store = open(dir.path(), Retention::default());
        store.checkpoint().unwrap();
        store.close().unwrap();
        let db = database_dir(dir.path());
        let fresh = compact_dir(&db);
        layout::copy_directory(&db, &fresh).unwrap();
        match ends {
            "before" => fs::write(fresh.join("db"), b"half of it").unwrap(),
            _ => host::exchange(&fresh, &db).unwrap(),
        }
        assert_eq!(
            peek_history(dir.path()).unwrap().released.len(),
            50,
            "{ends}: read from the files"
        );
        assert!(verify(dir.path()).unwrap().sound, "{ends}");
        for boot in [THIS, Some("next boot")] {
            let (store, recovered) = Store::open(dir.path(), Durability::PowerLoss, boot).unwrap();
            assert!(
                recovered.report.is_clean() && recovered.grants.len() == 1,
                "{ends}: {}",
                recovered.report
            );
            assert_eq!(past(&store).len(), 50, "{ends}");
            assert!(store.load().report.is_clean(), "{ends}: {}", store.load().report);
        }
        assert!(!fresh.exists() && quarantined(dir.path()).is_empty(), "{ends}: nothing remains");
    }
}

#[test]
fn a_close_does_not_wait_for_a_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = bloated(dir.path());
    store.index.end_soon();
    store.checkpoint().unwrap();
    store.index.settle();
    assert!(
        host::size_below(&database_dir(dir.path())) > 4 * MIB
            && !compact_dir(&database_dir(dir.path())).exists()
    );
    store.close().unwrap();
    let mut store = open(dir.path(), Retention { grants: 100, ..Retention::of_bytes(64 * MIB) });
    store.checkpoint().unwrap();
    store.index.settle();
    assert!(host::size_below(&database_dir(dir.path())) < 2 * MIB, "the next start compacts it");
}

/// Records after the database's last checkpoint are counted at the next one.
#[test]
fn repeated_kills_do_not_change_the_count_of_the_history() {
    let dir = tempfile::tempdir().unwrap();
    let retention = Retention { grants: 60, ..Retention::default() };
    for life in 0..6 {
        let mut store = open(dir.path(), retention);
        store
            .append(
                &(life * 20..life * 20 + 20)
                    .flat_map(|n| [made(n), released_at(n, now())])
                    .collect::<Vec<_>>(),
            )
            .unwrap();
        // sled writes without a checkpoint, as before a late kill.
        store.index.settle();
        drop(store);
    }
    let mut store = open(dir.path(), retention);
    store.checkpoint().unwrap();
    assert_eq!(past(&store).len(), 60);
}

#[test]
fn a_journal_without_a_database_is_bounded_and_deleted_history_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let retention = Retention::of_bytes(12 * MIB);
    let mut store = open(dir.path(), retention);
    store.append(&[made(1)]).unwrap();
    store.close().unwrap();
    let held = slow::hold(&database_dir(dir.path()));
    let mut store = open(dir.path(), retention);
    let mut most = 0;
    come_and_go(&mut store, 10..14_000, || {
        most = most.max(host::size_below(&journal_dir(dir.path())));
    });
    assert!(most < 11 * MIB, "{most}");
    drop(held);
    while store.kept().unreadable.is_some() || !store.kept().database {
        store.index.with_database(|_| {});
    }
    let known = past(&store);
    assert!(known.len() > 2000 && known[0] == grant(13_999).alloc_id, "{}", known.len());
    let forgotten = store.exporter().unwrap().read(|_| true).unwrap();
    assert!(forgotten.is_some(), "the end of the history is known");
    let report = store.load().report;
    assert!(report.is_clean(), "nothing was damaged: {report}");
    store.checkpoint().unwrap();
    assert_eq!(store.load().grants.len(), 1);
    assert!(store.verifier().verify().unwrap().sound);
}

#[test]
fn quarantined_files_are_bounded_and_the_newest_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(journal_dir(dir.path())).unwrap();
    let retention = Retention { age: Duration::from_secs(100), ..Retention::of_bytes(10_000) };
    let quarantine = |name: &str, at: u64, bytes: usize| {
        let path = dir.path().join(format!("{name}.quarantine-{at}"));
        if name == "db" {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("db"), vec![7; bytes]).unwrap();
        } else {
            fs::write(path, vec![7; bytes]).unwrap();
        }
    };
    let left = || {
        let mut left: Vec<u64> = quarantined(dir.path())
            .iter()
            .map(|path| path.to_string_lossy().rsplit('-').next().unwrap().parse().unwrap())
            .collect();
        left.sort_unstable();
        left
    };
    quarantine("db", 1_000_050, 50_000);
    delete_quarantined(dir.path(), retention, Timestamp(1_000_060));
    assert_eq!(left(), [1_000_050], "it is large, and the only one");
    quarantine("db", 1_000_070, 4_000);
    quarantine("journal/1.log", 1_000_080, 3_000);
    delete_quarantined(dir.path(), retention, Timestamp(1_000_090));
    assert_eq!(left(), [1_000_070, 1_000_080], "together they would be too much");
    (0..12).for_each(|n| quarantine("db", 1_000_100 + n, 10));
    delete_quarantined(dir.path(), retention, Timestamp(1_000_200));
    assert_eq!(left(), (1_000_104..1_000_112).collect::<Vec<_>>(), "they are too many");
    delete_quarantined(dir.path(), retention, Timestamp(1_000_110 + 100_000));
    assert_eq!(left(), [1_000_110, 1_000_111], "the others are too old");
    delete_quarantined(dir.path(), retention, Timestamp(2_000_000));
    assert!(left().is_empty());
}
