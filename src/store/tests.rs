//! The store as a whole, on real files.

use super::layout::{database_dir, journal_dir};
use super::notes::open_segment;
use super::samples::{
    bound, damage_grant, grant, hook_in_each_state, listed, made, named, released_at, suspect,
};
use super::*;
use crate::domain::{
    AllocId, DeviceId, Gone, GrantState, HookState, Listed, PendingHooks, Retention, Timestamp,
    UnreadableReason,
};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// Released just now: the first checkpoint would remove an old release.
fn released(n: u64) -> Entry {
    released_at(n, Timestamp::from_system(SystemTime::now()).0)
}

fn open(dir: &Path) -> (Store, Recovered) {
    Store::open(dir, Durability::PowerLoss, None).unwrap()
}

/// As the daemon opens it, within one boot.
fn open_again(dir: &Path) -> (Store, Recovered) {
    Store::open(dir, Durability::PowerLoss, Some("this boot")).unwrap()
}

fn ids(recovered: &Recovered) -> Vec<u64> {
    let number =
        |grant: &Grant| grant.devices[0].id.as_str().trim_start_matches("GPU-").parse().unwrap();
    recovered.grants.iter().map(number).collect()
}

/// Leaves the store as a kill does: not closed, and without sled's buffer.
fn kill(store: Store, dir: &Path, keep_database: &Path) {
    // sled writes its buffer on drop; a killed process does not. So the old database is restored.
    drop(store);
    let _ = fs::remove_dir_all(database_dir(dir));
    if keep_database.exists() {
        copy(keep_database, &database_dir(dir));
    }
}

/// sled's threads may replace a snapshot file meanwhile; then it copies again.
fn copy(from: &Path, to: &Path) {
    while let Err(error) = try_to_copy(from, to) {
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
        fs::remove_dir_all(to).unwrap();
    }
}

fn try_to_copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            try_to_copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to).map(drop)?;
        }
    }
    Ok(())
}

/// Opens the database as another process does.
fn open_database(dir: &Path) -> index::Database {
    index::open(&database_dir(dir)).unwrap().0
}

/// Makes the database readable and not writable, as a power cut may.
fn make_database_unwritable(dir: &Path) {
    fs::write(database_dir(dir).join("unwritable"), "").unwrap();
}

/// Closes the database, as after an error of sled.
fn abandon_database(store: &Store) {
    store.index.with_database(|database| database.take().unwrap().close());
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    journal::segments(&journal_dir(dir)).unwrap().into_iter().map(|(_, path)| path).collect()
}

/// The appended bytes of a segment, without the zeros.
fn written(path: &Path) -> Vec<u8> {
    let mut bytes = fs::read(path).unwrap();
    bytes.truncate(journal::used(&bytes));
    bytes
}

fn quarantined(dir: &Path) -> usize {
    let count = |dir: &Path| {
        fs::read_dir(dir)
            .unwrap()
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().contains(".quarantine-"))
            .count()
    };
    count(dir) + count(&journal_dir(dir))
}

#[test]
fn appended_entries_are_recovered() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, recovered) = open(dir.path());
    assert!(recovered.grants.is_empty() && recovered.report.is_clean(), "{}", recovered.report);
    store.append(&[named(1), made(1), made(2)]).unwrap();
    store.append(&[bound(1)]).unwrap();
    store.append(&[made(3), bound(3), suspect(3), released(2)]).unwrap();
    let live = store.load();
    assert_eq!(ids(&live), [1, 3]);
    drop(store);
    let (store, again) = open(dir.path());
    assert!(again.report.is_clean(), "{}", again.report);
    assert_eq!((&again.grants, &again.names), (&live.grants, &live.names));
    assert!(matches!(again.grants[0].state, GrantState::Bound { .. }));
    assert!(matches!(again.grants[1].state, GrantState::Suspect { .. }));
    assert_eq!(store.load().grants, again.grants, "an actor loads the recovered state");
    assert_eq!(store.history(10, |_| true).unwrap().len(), 1);
    assert_eq!(grants_of(store.exporter().unwrap()).unwrap().len(), 3);
}

#[test]
fn a_killed_process_loses_nothing_that_was_appended() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[named(1), made(1), made(2)]).unwrap();
    store.append(&[bound(1), released(2), made(3)]).unwrap();
    let before = store.load();
    kill(store, dir.path(), Path::new("/nonexistent"));
    let (store, after) = open(dir.path());
    assert_eq!((&before.grants, &before.names), (&after.grants, &after.names));
    assert_eq!(
        store.history(10, |_| true).unwrap().len(),
        1,
        "the history too comes from the journal"
    );
}

#[test]
fn a_second_store_on_the_same_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_store, _) = open(dir.path());
    let error = Store::open(dir.path(), Durability::PowerLoss, None).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
}

#[test]
fn a_checkpoint_leaves_one_segment_and_an_equal_database() {
    let dir = tempfile::tempdir().unwrap();
    for n in 1..=3 {
        let (mut store, _) = open(dir.path());
        store.append(&[made(n)]).unwrap();
    }
    assert_eq!(segments(dir.path()).len(), 3);
    let (mut store, _) = open(dir.path());
    store.checkpoint().unwrap();
    assert_eq!(segments(dir.path()).len(), 1);
    drop(store);
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    let (_store, recovered) = open(dir.path());
    assert_eq!(ids(&recovered), [1, 2, 3]);
    assert_eq!(recovered.report.from_database, 3);
    assert!(!recovered.report.is_clean(), "a missing journal is reported");
}

#[test]
fn a_checkpoint_replaces_a_long_segment_and_deletes_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let batch: Vec<_> = (1..=500).map(made).collect();
    while !store.journal.has_outgrown(SEGMENT_BYTES) {
        store.append(&batch).unwrap();
    }
    store.checkpoint().unwrap();
    let left = segments(dir.path());
    assert_eq!(left, [journal_dir(dir.path()).join(journal::file_name(store.journal.first()))]);
    assert_eq!(store.journal.bytes_appended(), 0);
    assert_eq!(peek(dir.path()).unwrap().grants.len(), 500);
}

#[test]
fn without_checkpoints_an_append_starts_the_new_segment() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let batch: Vec<_> = (1..=500).map(made).collect();
    for _ in 0..SEGMENT_BYTES_MAX / 300_000 + 2 {
        store.append(&batch).unwrap();
    }
    assert!(segments(dir.path()).len() > 1);
    assert!(store.journal.bytes_appended() < SEGMENT_BYTES_MAX);
}

#[test]
fn a_head_is_copied_again_only_after_as_much_was_appended() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let batch = |from: u64| (from..from + 2000).map(made).collect::<Vec<_>>();
    let mut from = 1;
    let mut heads = Vec::new();
    while heads.len() < 4 {
        let before = store.journal.first();
        store.append(&batch(from)).unwrap();
        from += 2000;
        if store.journal.first() != before {
            heads.push(store.live.len() as u64 - 2000);
        }
    }
    assert!(heads.windows(2).all(|pair| pair[1] >= 2 * pair[0]), "grants in each head: {heads:?}");
}

#[test]
fn daemons_that_die_at_once_do_not_accumulate_segments() {
    let dir = tempfile::tempdir().unwrap();
    let lives = OLD_SEGMENTS_MAX as u64 + 20;
    for n in 1..=lives {
        let (mut store, _) = open_again(dir.path());
        store.append(&[made(n)]).unwrap();
        // Unlike a killed process, this runs the queued work.
        drop(store);
    }
    assert!(segments(dir.path()).len() <= OLD_SEGMENTS_MAX + 2, "{}", segments(dir.path()).len());
    assert_eq!(ids(&open_again(dir.path()).1).len() as u64, lives);
}

/// The damaged segment is quarantined before the database reads the journal.
#[test]
fn a_release_in_a_damaged_journal_stays_in_the_history() {
    let (dir, database) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = database.path().join("db");
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    store.checkpoint().unwrap();
    copy(&database_dir(dir.path()), &database);
    for entry in [released(1), made(3), made(4)] {
        store.append(&[entry]).unwrap();
    }
    kill(store, dir.path(), &database);
    damage_grant(3, dir.path());

    let (mut store, recovered) = open(dir.path());
    let report = &recovered.report;
    assert!(report.missing == 1 && report.quarantined.len() == 1, "{report}");
    assert_eq!(ids(&recovered), [2, 4]);
    store.checkpoint().unwrap();
    let past = store.history(usize::MAX, |_| true).unwrap();
    assert_eq!(past.iter().map(|grant| &grant.alloc_id).collect::<Vec<_>>(), [&grant(1).alloc_id]);
    drop(store);
    assert_eq!(ids(&open(dir.path()).1), [2, 4]);
}

#[test]
fn a_journal_that_cannot_be_written_refuses_until_a_new_segment_opens() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1)]).unwrap();
    // Every write fails, as on a disk that became read-only.
    store.journal.break_for_test();
    assert!(store.append(&[made(2)]).is_err());
    assert_eq!(store.is_sound(), (false, true));
    assert_eq!(ids(&store.load()), [1], "an unconfirmed entry is not in the state");
    let verified = store.verifier().verify().unwrap();
    assert!(verified.sound, "nothing is lost: {:?}", verified.problems);
    fs::rename(journal_dir(dir.path()), dir.path().join("away")).unwrap();
    let error = store.append(&[made(2)]).unwrap_err();
    assert!(error.to_string().contains("journal"), "{error}");
    fs::rename(dir.path().join("away"), journal_dir(dir.path())).unwrap();
    store.append(&[made(2)]).unwrap();
    assert_eq!(store.is_sound(), (true, true));
    drop(store);
    assert_eq!(ids(&open(dir.path()).1), [1, 2]);
}

/// A failed attempt at a new segment may leave an empty file, a part of a head, or a whole one,
/// which cannot be deleted.
#[test]
fn remains_of_a_failed_rotation_are_ignored() {
    for (left, attempts) in
        [0, 10, 47, 300, usize::MAX].into_iter().flat_map(|left| [(left, 1), (left, 3)])
    {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        store.append(&[made(1), made(2), named(1), named(2)]).unwrap();
        store.journal.break_for_test();
        assert!(store.append(&[made(3)]).is_err());
        let mut seq = store.next_seq;
        for _ in 0..attempts {
            let (_, next) =
                open_segment(&journal_dir(dir.path()), seq, &store.live, &store.notes).unwrap();
            let path = journal_dir(dir.path()).join(journal::file_name(seq));
            let bytes = written(&path);
            fs::write(&path, &bytes[..left.min(bytes.len())]).unwrap();
            seq = next;
        }
        if attempts == 3 {
            assert!(store.append(&[made(3)]).is_err(), "a rotation is tried twice");
            assert_eq!(store.is_sound(), (false, true));
        }
        store.append(&[made(3), released(1)]).unwrap();
        let path = dir.path().to_owned();
        kill(store, &path, Path::new("/nonexistent"));
        assert_eq!(ids(&peek(&path).unwrap()), [2, 3]);
        let (mut store, recovered) = open(&path);
        assert_eq!(
            (ids(&recovered), recovered.report.missing),
            (vec![2, 3], 0),
            "{left} left: {}",
            recovered.report
        );
        assert_eq!(quarantined(&path), 0);
        store.checkpoint().unwrap();
        assert_eq!(segments(&path).len(), 1, "the checkpoint deletes the remains");
    }
}

/// The present segment is intact, but too long. The file in the way would be read as its successor.
#[test]
fn a_full_segment_is_not_written_if_a_file_has_its_successors_name() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let batch: Vec<_> = (1..=500).map(made).collect();
    while !store.journal.has_outgrown(SEGMENT_BYTES_MAX) {
        store.append(&batch).unwrap();
    }
    for seq in [store.next_seq, store.next_seq + 500] {
        open_segment(&journal_dir(dir.path()), seq, &store.live, &store.notes).unwrap();
    }
    assert!(store.append(&[released(1)]).is_err());
    store.append(&[released(1)]).unwrap();
    kill(store, dir.path(), Path::new("/nonexistent"));
    assert_eq!(ids(&peek(dir.path()).unwrap()), (2..=500).collect::<Vec<_>>());
}

#[test]
fn a_failed_database_costs_no_grant_and_is_restored_by_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    abandon_database(&store);
    store.append(&[made(3), bound(1), released(2)]).unwrap();
    assert!(store.history(1, |_| true).is_err());
    store.checkpoint().unwrap();
    assert_eq!(store.is_sound(), (true, true));
    assert_eq!(
        store.history(9, |_| true).unwrap().len(),
        1,
        "released while the database was closed"
    );
    drop(store);
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    assert_eq!(ids(&open(dir.path()).1), [1, 3]);
}

#[test]
fn a_damaged_database_is_quarantined_and_rebuilt() {
    for file in ["db", "conf"] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        store.append(&(1..=50).map(made).collect::<Vec<_>>()).unwrap();
        store.checkpoint().unwrap();
        drop(store);
        fs::write(database_dir(dir.path()).join(file), vec![0xa5; 700_000]).unwrap();
        let (store, recovered) = open(dir.path());
        assert_eq!(recovered.grants.len(), 50, "{file}");
        assert_eq!(quarantined(dir.path()), 1, "{file}: {}", recovered.report);
        assert!(recovered.report.missing == 0 && !recovered.report.is_clean());
        drop(store);
        let (_, again) = open(dir.path());
        assert!(again.report.is_clean(), "repaired: {}", again.report);
    }
}

#[test]
fn a_database_that_rolled_back_does_not_bring_released_grants_back() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    store.checkpoint().unwrap();
    drop(store);
    let old = tempfile::tempdir().unwrap();
    copy(&database_dir(dir.path()), &old.path().join("db"));
    let (mut store, _) = open(dir.path());
    store.append(&[released(1), made(3)]).unwrap();
    store.checkpoint().unwrap();
    store.journal.first();
    drop(store);
    // After two starts and checkpoints no segment contains the release.
    let (mut store, _) = open(dir.path());
    store.checkpoint().unwrap();
    drop(store);
    fs::remove_dir_all(database_dir(dir.path())).unwrap();
    copy(&old.path().join("db"), &database_dir(dir.path()));
    let (_, recovered) = open(dir.path());
    assert_eq!(ids(&recovered), [2, 3]);
    assert!(
        recovered.report.findings.iter().any(|f| f.contains("has lost its entries after")),
        "{}",
        recovered.report
    );
}

#[test]
fn a_journal_without_its_end_does_not_bring_released_grants_back() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    let kept = fs::read(&segments(dir.path())[0]).unwrap();
    store.append(&[released(1), made(3)]).unwrap();
    store.checkpoint().unwrap();
    drop(store);
    fs::write(&segments(dir.path())[0], kept).unwrap();
    let (_, recovered) = open(dir.path());
    assert_eq!(ids(&recovered), [2, 3], "{}", recovered.report);
}

#[test]
fn an_entry_lost_in_the_middle_comes_from_the_database_or_is_reported() {
    for checkpointed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        store.append(&[made(1)]).unwrap();
        let at = written(&segments(dir.path())[0]).len();
        store.append(&[made(2), made(3)]).unwrap();
        if checkpointed {
            store.checkpoint().unwrap();
            drop(store);
        } else {
            kill(store, dir.path(), Path::new("/nonexistent"));
        }
        let path = segments(dir.path())[0].clone();
        let mut bytes = written(&path);
        bytes[at + 40] ^= 1;
        fs::write(&path, bytes).unwrap();
        let (_, recovered) = open(dir.path());
        if checkpointed {
            assert_eq!((ids(&recovered), recovered.report.missing), (vec![1, 2, 3], 0));
        } else {
            assert_eq!((ids(&recovered), recovered.report.missing), (vec![1, 3], 1));
            assert!(
                recovered.report.to_string().starts_with("partial, 1 missing"),
                "{}",
                recovered.report
            );
        }
        assert_eq!(quarantined(dir.path()), 1);
        assert!(open(dir.path()).1.report.is_clean(), "the next start is clean");
    }
}

#[test]
fn damage_in_the_head_of_a_closed_journal_is_reported_and_costs_nothing() {
    for open_next in [open, open_again] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open_again(dir.path());
        store.append(&[made(1), made(2), made(3)]).unwrap();
        store.close().unwrap();
        // Its journal is only a head.
        open_again(dir.path()).0.close().unwrap();
        let [segment] = &segments(dir.path())[..] else { panic!("one segment") };
        let mut bytes = fs::read(segment).unwrap();
        let middle = journal::used(&bytes) / 2;
        bytes[middle] ^= 0xff;
        fs::write(segment, bytes).unwrap();

        let (_store, recovered) = open_next(dir.path());
        assert_eq!(
            (ids(&recovered), recovered.report.missing),
            (vec![1, 2, 3], 0),
            "{}",
            recovered.report
        );
        assert_eq!(
            (quarantined(dir.path()), recovered.report.is_clean()),
            (1, false),
            "{}",
            recovered.report
        );
    }
}

#[test]
fn a_journal_of_a_later_version_stops_the_start_and_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1)]).unwrap();
    drop(store);
    let path = segments(dir.path())[0].clone();
    let mut bytes = written(&path);
    let payload = br#"{"v":9,"record":{"entry":"leased"}}"#;
    codec::frame(&mut bytes, 2, std::iter::once(&payload[..]));
    fs::write(&path, &bytes).unwrap();
    let error = Store::open(dir.path(), Durability::PowerLoss, None).unwrap_err();
    assert!(matches!(error, StoreError::Newer { version: 9, .. }), "{error}");
    assert_eq!(written(&path), bytes);
    assert_eq!(quarantined(dir.path()), 0);
}

/// With a journal and without one: none of it may be treated as damage and deleted.
#[test]
fn a_database_of_a_later_version_stops_the_start_and_is_not_changed() {
    for (what, version) in [("trees", codec::TREES + 1), ("record", 9)] {
        for keeps_journal in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (mut store, _) = open(dir.path());
            store.append(&[made(1)]).unwrap();
            store.checkpoint().unwrap();
            store.index.with_database(move |database| {
                database.as_ref().unwrap().write_newer_for_test(what);
            });
            abandon_database(&store);
            drop(store);
            if !keeps_journal {
                fs::remove_dir_all(journal_dir(dir.path())).unwrap();
            }
            for _ in 0..2 {
                match Store::open(dir.path(), Durability::PowerLoss, None) {
                    Err(StoreError::Newer { version: found, .. }) => {
                        assert_eq!(found, version, "{what}");
                    }
                    other => panic!("{what}: {other:?}"),
                }
            }
            assert_eq!(quarantined(dir.path()), 0);
        }
    }
}

#[test]
fn peek_reads_confirmed_entries_of_a_running_daemon_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(peek(dir.path()), Err(StoreError::NoJournal { .. })));
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2), released(2), named(1)]).unwrap();
    store.checkpoint().unwrap();
    store.append(&[made(3), released(3)]).unwrap();
    let seen = peek(dir.path()).unwrap();
    assert_eq!((seen.grants, seen.names), (store.load().grants, store.load().names));
    let history = peek_history(dir.path()).unwrap();
    assert!(history.problem.is_none() && history.forgotten_until.is_none(), "{history:?}");
    assert_eq!(history.released.len(), 2);
    assert!(history.released[0].devices[0].id.as_str() == "GPU-3", "newest first");
}

#[test]
fn history_expires_by_age() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let now = Timestamp::from_system(SystemTime::now()).0;
    let day = 24 * 3600 * 1000;
    store
        .append(&[made(1), made(2), released_at(1, now - 91 * day), released_at(2, now - 89 * day)])
        .unwrap();
    assert_eq!(store.history(9, |_| true).unwrap().len(), 2);
    store.checkpoint().unwrap();
    let left = store.history(9, |_| true).unwrap();
    assert_eq!(
        left.iter().map(|grant| grant.devices[0].id.as_str()).collect::<Vec<_>>(),
        ["GPU-2"]
    );
}

/// A look-up includes all entries so far, and ends where no grant had been made.
#[test]
fn released_grants_are_found_by_their_ids() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let now = Timestamp::from_system(SystemTime::now()).0;
    let (hour, day) = (3600 * 1000, 24 * 3600 * 1000);
    let made_at = |at: u64| {
        AllocId::new(format!("{:08x}-{:04x}-774b-bcce-b302099a8057", at >> 16, at & 0xffff))
    };
    let record = |id: &AllocId, at| {
        let (Entry::Grant(grant), Entry::Moved { state, .. }) = (made(1), released_at(1, at))
        else {
            panic!()
        };
        Entry::Grant(Arc::new(Grant { alloc_id: id.clone(), state, ..Grant::clone(&grant) }))
    };
    let [early, late, before, unknown] =
        [now - 9 * day, now - 3 * day, now - 3 * day + 1, now - 4 * day].map(made_at);
    let between = record(&made_at(now - 5 * day), now - 3 * day - hour / 2);
    // The clock was set back by an hour while a grant was held.
    store
        .append(&[
            record(&early, now - 8 * day),
            record(&late, now - day),
            record(&before, now - 3 * day - hour),
            between,
        ])
        .unwrap();
    let look_up = |store: &Store, ids: &[&AllocId]| {
        store.released_grants().unwrap().look_up(&ids.iter().copied().cloned().collect()).unwrap()
    };
    assert_eq!(look_up(&store, &[&late, &before]), ([late.clone(), before.clone()].into(), None));
    assert_eq!(look_up(&store, &[&unknown, &early]).0, [early.clone()].into());
    assert_eq!(look_up(&store, &[&unknown]).0, [].into());
    store.append(&[record(&made_at(now - 99 * day), now - 95 * day)]).unwrap();
    store.checkpoint().unwrap();
    assert_eq!(look_up(&store, &[&early]), ([early].into(), Some(Timestamp(now - 95 * day))));
}

/// Many at the same time, some at short intervals, some with years between, and times of wrong
/// clocks.
#[test]
fn history_is_read_newest_first_for_every_distribution_of_times() {
    let (day, start) = (24 * 3600 * 1000, 1_700_000_000_000);
    let same = (0..700).map(|_| start);
    let close = (0..900).map(|n| start + day + n * 3);
    let distant = (0..40).map(|n| n * 700 * day);
    let wrong = [0, 1, u64::MAX - 1, u64::MAX, u64::MAX];
    let times: Vec<u64> = same.chain(close).chain(distant).chain(wrong).collect();

    let dir = tempfile::tempdir().unwrap();
    let retention = Retention { age: Duration::MAX, ..Retention::of_bytes(u64::MAX) };
    let (mut store, _) =
        Store::open_keeping(dir.path(), Durability::ProcessCrash, None, retention).unwrap();
    assert!(store.history(9, |_| true).unwrap().is_empty());
    let entries = times.iter().zip(1..).flat_map(|(at, n)| [made(n), released_at(n, *at)]);
    store.append(&entries.collect::<Vec<_>>()).unwrap();

    let mut expected: Vec<_> =
        times.iter().zip(1..).map(|(at, n)| (*at, grant(n).alloc_id)).collect();
    expected.sort();
    let expected: Vec<_> = expected.into_iter().rev().map(|(_, id)| id).collect();
    let read = |limit| {
        store
            .history(limit, |_| true)
            .unwrap()
            .into_iter()
            .map(|grant| grant.alloc_id)
            .collect::<Vec<_>>()
    };
    assert!(
        read(usize::MAX) == expected,
        "{} of {} were read",
        read(usize::MAX).len(),
        expected.len()
    );
    assert_eq!(read(3), expected[..3]);
}

#[test]
fn limits_of_the_history_never_touch_live_grants() {
    let dir = tempfile::tempdir().unwrap();
    let keep = |age, grants| {
        let retention = Retention { age: Duration::from_secs(age), grants, bytes: u64::MAX };
        Store::open_keeping(dir.path(), Durability::PowerLoss, Some("this boot"), retention)
            .unwrap()
    };
    let (mut store, _) = keep(3600, 2);
    // The live grants are two years old, in every state, and more than the limit of the history.
    let live = [made(1), made(2), bound(2), made(3), bound(3), suspect(3)];
    store.append(&live).unwrap();
    store.append(&(4..9).flat_map(|n| [made(n), released(n)]).collect::<Vec<_>>()).unwrap();
    store.checkpoint().unwrap();
    assert_eq!(store.history(9, |_| true).unwrap().len(), 2);
    let before = store.load().grants;
    drop(store);

    // A history of nothing.
    let (mut store, recovered) = keep(0, 0);
    assert_eq!(recovered.grants, before);
    store.checkpoint().unwrap();
    assert!(store.history(9, |_| true).unwrap().is_empty());
    store.close().unwrap();
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    let (_, recovered) = open(dir.path());
    assert_eq!(recovered.grants, before, "they are in the database alone too");
}

/// Every grant of an export.
fn grants_of(export: Export) -> Result<Vec<Grant>, StoreError> {
    let mut grants = Vec::new();
    export.read(|line| {
        grants.extend(if let ExportLine::Grant(grant) = line { Some(*grant) } else { None });
        true
    })?;
    Ok(grants)
}

#[test]
fn an_export_is_read_during_writes_and_has_each_grant_once() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2), made(3), released(1)]).unwrap();
    let (export, later) = (store.exporter().unwrap(), store.exporter().unwrap());
    store.append(&[made(4), released(2)]).unwrap();
    store.checkpoint().unwrap();
    let first = grants_of(export).unwrap();
    let seen: Vec<_> =
        first.iter().map(|grant| (grant.devices[0].id.as_str(), grant.is_live())).collect();
    assert_eq!(seen, [("GPU-2", true), ("GPU-3", true), ("GPU-1", false)]);
    abandon_database(&store);
    assert!(grants_of(store.exporter().unwrap()).is_err());
    assert_eq!(grants_of(later).unwrap(), first, "it does not need the store");
}

/// Syncs the journal. Returns whether there was anything to sync.
fn sync(store: &mut Store) -> bool {
    let pending = store.begin_sync().unwrap();
    if let Some(pending) = &pending {
        store.end_sync(pending, pending.run()).unwrap();
    }
    pending.is_some()
}

#[test]
fn an_append_during_a_sync_needs_another_sync_and_a_failed_sync_a_new_segment() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = Store::open(dir.path(), Durability::ProcessCrash, None).unwrap();
    store.append(&[made(1)]).unwrap();
    let pending = store.begin_sync().unwrap().unwrap();
    store.append(&[made(2)]).unwrap();
    store.end_sync(&pending, pending.run()).unwrap();
    let pending = store.begin_sync().unwrap().unwrap();
    let refused = StoreError::io("sync", dir.path())(std::io::ErrorKind::StorageFull.into());
    assert!(store.end_sync(&pending, Err(refused)).is_err());
    assert!(store.begin_sync().unwrap().is_none(), "the segment accepts no entries");
    let before = segments(dir.path()).len();
    store.append(&[made(3)]).unwrap();
    assert_eq!(segments(dir.path()).len(), before + 1);
    assert_eq!(ids(&peek(dir.path()).unwrap()), [1, 2, 3]);
}

#[test]
fn process_crash_durability_writes_at_once_and_syncs_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = Store::open(dir.path(), Durability::ProcessCrash, None).unwrap();
    store.append(&[made(1)]).unwrap();
    assert_eq!(ids(&peek(dir.path()).unwrap()), [1], "written before the sync");
    assert!(sync(&mut store));
    assert!(!sync(&mut store), "nothing is new");
}

/// The last confirmed entry is written after the entry is durable. The numbers of a failed write
/// are used, and never confirmed.
#[test]
fn the_last_confirmed_entry_is_written_after_the_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1)]).unwrap();
    let noted = lock::read_confirmed(dir.path());
    store.commit(&[made(2), made(3)]).unwrap();
    assert_eq!(ids(&peek(dir.path()).unwrap()), [1, 2, 3]);
    assert_eq!(lock::read_confirmed(dir.path()), noted);
    store.journal.break_for_test();
    assert!(store.commit(&[made(4)]).is_err());
    store.after_commit();
    assert_eq!(lock::read_confirmed(dir.path()), noted + 2);
}

/// A power cut may tear a write, so that any of its sectors are on the disk. The write was
/// confirmed, or it was not.
#[test]
fn a_torn_write_is_damage_only_if_it_was_confirmed() {
    // Confirmed by the lock, by a later write, not at all; the lock is unknown.
    for (knows, later, found, missing) in [
        (3, false, vec![1, 3], 1),
        (1, true, vec![1, 3, 4], 1),
        (1, false, vec![1], 0),
        (0, false, vec![1, 3], 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        store.append(&[made(1)]).unwrap();
        let path = segments(dir.path())[0].clone();
        let at = written(&path).len();
        store.append(&[made(2), made(3)]).unwrap();
        if later {
            store.append(&[made(4)]).unwrap();
        }
        kill(store, dir.path(), Path::new("/nonexistent"));
        let mut bytes = fs::read(&path).unwrap();
        assert!(bytes.len() > written(&path).len(), "zeros are ahead");
        bytes[at..at + 100].fill(0);
        fs::write(&path, &bytes).unwrap();
        match knows {
            0 => fs::remove_file(dir.path().join("lock")).unwrap(),
            seq => set_confirmed(dir.path(), seq),
        }
        let (_, recovered) = open(dir.path());
        assert_eq!(
            (ids(&recovered), recovered.report.missing),
            (found, missing),
            "{knows}, {later}: {}",
            recovered.report
        );
        assert_eq!(quarantined(dir.path()), usize::from(missing > 0));
    }
}

#[test]
fn zeros_ahead_are_used_by_appends_and_truncated_by_the_close() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let path = segments(dir.path())[0].clone();
    let long = || fs::metadata(&path).unwrap().len();
    let before = long();
    (1..=100).for_each(|n| store.append(&[made(n)]).unwrap());
    assert_eq!(long(), before, "100 grants fit into the zeros");
    (101..=600).for_each(|n| store.append(&[made(n)]).unwrap());
    assert!(long() > before && long() > written(&path).len() as u64);
    assert_eq!(journal_bytes(dir.path()).unwrap(), written(&path).len() as u64);
    store.close().unwrap();
    assert_eq!(long(), written(&path).len() as u64);
    assert_eq!(ids(&open(dir.path()).1).len(), 600);
}

#[test]
fn a_record_cut_out_of_the_middle_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let path = segments(dir.path())[0].clone();
    let length = || written(&path).len();
    store.append(&[made(1)]).unwrap();
    let from = length();
    store.append(&[made(2)]).unwrap();
    let to = length();
    store.append(&[made(3)]).unwrap();
    kill(store, dir.path(), Path::new("/nonexistent"));
    let mut bytes = written(&path);
    bytes.drain(from..to);
    fs::write(&path, bytes).unwrap();
    let (_, recovered) = open(dir.path());
    assert_eq!(
        (ids(&recovered), recovered.report.missing),
        (vec![1, 3], 1),
        "{}",
        recovered.report
    );
}

#[test]
fn a_grant_that_was_never_confirmed_does_not_come_back_from_an_older_segment() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1)]).unwrap();
    let path = segments(dir.path())[0].clone();
    store.journal.break_for_test();
    assert!(store.append(&[made(2)]).is_err());
    // The write failed, and its bytes are on the disk, as after a failed fdatasync.
    let mut bytes = written(&path);
    codec::frame(&mut bytes, 2, std::iter::once(&codec::encode(&made(2)).unwrap()[..]));
    fs::write(&path, bytes).unwrap();
    store.append(&[made(3)]).unwrap();
    kill(store, dir.path(), Path::new("/nonexistent"));
    let (_, recovered) = open(dir.path());
    assert_eq!(
        (ids(&recovered), recovered.report.missing),
        (vec![1, 3], 0),
        "{}",
        recovered.report
    );
}

#[test]
fn segments_are_kept_until_the_database_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    abandon_database(&store);
    let other = open_database(dir.path());
    store.append(&[released(1)]).unwrap();
    store.rotate().unwrap();
    store.checkpoint().unwrap();
    assert_eq!((store.is_sound(), segments(dir.path()).len()), ((true, false), 2));
    other.close();
    // It is tried again after the backoff.
    while store.is_sound() != (true, true) {
        store.checkpoint().unwrap();
    }
    store.checkpoint().unwrap();
    assert_eq!(segments(dir.path()).len(), 1);
    assert_eq!(store.history(9, |_| true).unwrap().len(), 1);
}

#[test]
fn a_damaged_record_in_the_database_discards_the_database() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    store.checkpoint().unwrap();
    store
        .index
        .with_database(|database| database.as_ref().unwrap().damage_for_test(&grant(1).alloc_id));
    drop(store);
    let (_, recovered) = open(dir.path());
    assert_eq!(
        (ids(&recovered), recovered.report.missing, quarantined(dir.path())),
        (vec![1, 2], 0, 1),
        "{}",
        recovered.report
    );
    assert!(open(dir.path()).1.report.is_clean());
}

/// These file systems keep unsynced data, so the test checks the order of the steps (I1).
#[test]
fn data_is_synced_before_it_is_relied_on() {
    use super::testing::take_steps;
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    assert_eq!(
        take_steps(),
        ["write", "sync", "sync directory"],
        "a segment: its data, then its name"
    );
    store.append(&[made(1), made(2)]).unwrap();
    assert_eq!(take_steps(), ["write", "sync"], "one write and one sync for any number of entries");
    store.rotate().unwrap();
    take_steps();
    store.checkpoint().unwrap();
    let steps = ["sync", "sync directory", "flush", "sync", "delete"];
    assert_eq!(
        take_steps(),
        steps,
        "the new head and sled are durable before old segments are deleted"
    );
    drop(store);
    let (mut store, _) = Store::open(dir.path(), Durability::ProcessCrash, None).unwrap();
    take_steps();
    store.append(&[made(3)]).unwrap();
    assert_eq!(take_steps(), ["write"]);
    assert!(sync(&mut store));
    assert!(!sync(&mut store), "nothing is new");
    assert_eq!(take_steps(), ["sync"]);
}

/// A process that is killed between a write and its sync leaves an entry that a power cut would
/// lose. The next process of the same boot finds it, and does not sync at its start.
#[test]
fn a_commit_without_entries_makes_durable_what_was_found_at_the_start() {
    use super::testing::take_steps;
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open_again(dir.path());
    store.append(&[made(1)]).unwrap();
    drop(store);
    let (mut store, recovered) = open_again(dir.path());
    assert_eq!(ids(&recovered), [1]);
    take_steps();
    store.commit(&[]).unwrap();
    assert_eq!(take_steps(), ["sync", "sync directory"], "the head with the entry, and its name");
    store.commit(&[]).unwrap();
    assert!(take_steps().is_empty(), "nothing is new");
    store.append(&[made(2)]).unwrap();
    assert_eq!(take_steps(), ["write", "sync"]);
    drop(store);
    let (mut store, _) = Store::open(dir.path(), Durability::ProcessCrash, None).unwrap();
    take_steps();
    store.commit(&[]).unwrap();
    assert!(take_steps().is_empty(), "this durability syncs after the answer");
}

#[test]
fn with_a_whole_journal_of_this_boot_a_start_does_not_wait_for_the_database() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open_again(dir.path());
    store.append(&[made(1), made(2), released(2)]).unwrap();
    drop(store);
    let other = open_database(dir.path());
    let (mut store, recovered) = open_again(dir.path());
    assert!(recovered.report.is_clean() && ids(&recovered) == [1], "{}", recovered.report);
    store.append(&[made(3)]).unwrap();
    other.close();
    assert_eq!(store.history(9, |_| true).unwrap().len(), 1, "a query waits for the database");
    store.checkpoint().unwrap();
    drop(store);
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    assert_eq!(ids(&open(dir.path()).1), [1, 3]);
}

#[test]
fn only_a_closed_journal_needs_no_database_in_another_boot() {
    for closed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open_again(dir.path());
        store.append(&[made(1), made(2), released(2)]).unwrap();
        store.close().unwrap();
        if !closed {
            // A later run. Only its confirmed entries are durable.
            let (mut store, _) = open_again(dir.path());
            let lock = fs::read(dir.path().join("lock")).unwrap();
            store.append(&[made(3)]).unwrap();
            drop(store);
            fs::write(dir.path().join("lock"), lock).unwrap();
        }
        let other = open_database(dir.path());
        let opened = Store::open(dir.path(), Durability::PowerLoss, Some("next boot"));
        other.close();
        if closed {
            let (store, recovered) = opened.unwrap();
            assert!(recovered.report.is_clean() && ids(&recovered) == [1], "{}", recovered.report);
            assert_eq!(store.history(9, |_| true).unwrap().len(), 1);
        } else {
            assert!(matches!(opened, Err(StoreError::InUse { .. })), "it waits for the database");
        }
    }
}

/// After a power cut the journal may end earlier than sled does. Within one boot the cause is
/// another one, and nothing is lost either.
#[test]
fn later_entries_that_only_the_database_has_are_recovered() {
    for (boot, found) in
        [(Some("next boot"), vec![1, 2]), (None, vec![1, 2]), (Some("this boot"), vec![1])]
    {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open_again(dir.path());
        store.append(&[made(1)]).unwrap();
        let kept = fs::read(&segments(dir.path())[0]).unwrap();
        store.append(&[made(2)]).unwrap();
        store.checkpoint().unwrap();
        drop(store);
        fs::write(&segments(dir.path())[0], kept).unwrap();
        set_confirmed(dir.path(), 1);
        let (mut store, recovered) = Store::open(dir.path(), Durability::PowerLoss, boot).unwrap();
        assert_eq!(ids(&recovered), found, "{boot:?}: {}", recovered.report);
        drop(store.history(1, |_| true));
        let later = store.found();
        assert_eq!(later.len(), 2 - found.len(), "{boot:?}");
        store.append(&later).unwrap();
        let known = store.load();
        assert_eq!(
            (ids(&known), known.report.from_database, quarantined(dir.path())),
            (vec![1, 2], 1, 0),
            "{boot:?}"
        );
        store.close().unwrap();
        assert_eq!(ids(&open(dir.path()).1), [1, 2], "{boot:?}");
    }
}

/// sled may lose one update and keep later ones. With a damaged journal it is the base.
#[test]
fn an_update_that_the_database_lost_comes_from_a_damaged_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2), made(3)]).unwrap();
    store.append(&[bound(2), released(3)]).unwrap();
    store.append(&[made(4), named(4)]).unwrap();
    store.checkpoint().unwrap();
    store.index.with_database(|database| {
        let database = database.as_mut().unwrap();
        for n in [2, 3] {
            let Entry::Grant(grant) = made(n) else { unreachable!() };
            let payload = codec::encode(&Entry::Grant(Arc::clone(&grant))).unwrap();
            database.write(n, &Update::Live(grant.alloc_id.clone(), payload)).unwrap();
        }
    });
    drop(store);
    let path = segments(dir.path())[0].clone();
    let mut bytes = written(&path);
    let first = bytes.windows(6).position(|window| window == b"GPU-1\"").unwrap();
    bytes[first] ^= 1;
    fs::write(&path, bytes).unwrap();
    let (_, recovered) = open(dir.path());
    assert_eq!(
        (ids(&recovered), recovered.report.missing),
        (vec![1, 2, 4], 0),
        "{}",
        recovered.report
    );
    assert!(matches!(recovered.grants[1].state, GrantState::Bound { .. }));
}

/// Sets the last confirmed entry in the lock file.
fn set_confirmed(dir: &Path, seq: u64) {
    let mut lock = Lock::take(dir).unwrap();
    lock.confirm(seq);
    lock.write_confirmed();
}

#[test]
fn a_journal_cut_between_two_entries_is_detected_in_any_boot_and_completed_by_the_database() {
    let boots = [None, Some("this boot"), Some("next boot")];
    for (boot, with_database, closed) in boots
        .into_iter()
        .flat_map(|boot| [(boot, true, false), (boot, true, true), (boot, false, true)])
    {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open_again(dir.path());
        store.append(&[made(1), made(2)]).unwrap();
        let kept = fs::read(&segments(dir.path())[0]).unwrap();
        store.append(&[released(1), made(3)]).unwrap();
        if closed {
            store.close().unwrap();
        } else {
            drop(store);
        }
        fs::write(&segments(dir.path())[0], kept).unwrap();
        if !with_database {
            fs::remove_dir_all(database_dir(dir.path())).unwrap();
        }
        let (store, recovered) = Store::open(dir.path(), Durability::PowerLoss, boot).unwrap();
        assert_eq!(quarantined(dir.path()), 1, "{}", recovered.report);
        if with_database {
            assert_eq!(ids(&recovered), [2, 3], "{boot:?}: {}", recovered.report);
        } else {
            assert_eq!(
                (ids(&recovered), recovered.report.missing),
                (vec![1, 2], 2),
                "{boot:?}: {}",
                recovered.report
            );
        }
        drop(store);
        assert!(open(dir.path()).1.report.is_clean(), "it is reported once");
    }
}

#[test]
fn a_confirmed_list_that_is_cut_off_is_missing_too() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open_again(dir.path());
    store.append(&[made(1)]).unwrap();
    let kept = fs::read(&segments(dir.path())[0]).unwrap();
    store.append(&[listed(&[1, 2])]).unwrap();
    drop(store);
    fs::write(&segments(dir.path())[0], kept).unwrap();
    let (_, recovered) = open_again(dir.path());
    assert_eq!((ids(&recovered), recovered.report.missing), (vec![1], 1), "{}", recovered.report);
}

#[test]
fn a_ledger_without_both_copies_is_not_a_new_node() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    drop(store);
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    fs::remove_dir_all(database_dir(dir.path())).unwrap();
    let (mut store, recovered) = open(dir.path());
    assert_eq!(recovered.report.missing, 2, "{}", recovered.report);
    store.append(&[made(3)]).unwrap();
    drop(store);
    let (_, recovered) = open(dir.path());
    assert!(recovered.report.is_clean() && ids(&recovered) == [3], "{}", recovered.report);
}

#[test]
fn a_damaged_lock_file_is_ignored() {
    for text in ["this boot", "", "00000000000000000009 00000000 this boot"] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open_again(dir.path());
        store.append(&[made(1)]).unwrap();
        drop(store);
        fs::write(dir.path().join("lock"), text).unwrap();
        let (mut store, recovered) = open_again(dir.path());
        assert!(
            recovered.report.is_clean() && ids(&recovered) == [1],
            "{text}: {}",
            recovered.report
        );
        store.append(&[made(2)]).unwrap();
        drop(store);
        let lock = Lock::take(dir.path()).unwrap();
        assert!(lock.is_of_boot(Some("this boot")) && lock.confirmed() >= 2);
    }
}

#[test]
fn a_database_that_opens_and_cannot_be_written_is_replaced_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2), released(2)]).unwrap();
    // The journal still has the entries that the database lacks.
    kill(store, dir.path(), Path::new("/nonexistent"));
    let (store, _) = open(dir.path());
    kill(store, dir.path(), Path::new("/nonexistent"));
    drop(open_database(dir.path()));
    make_database_unwritable(dir.path());
    let (mut store, _) = open(dir.path());
    assert_eq!(store.history(9, |_| true).unwrap().len(), 1, "the new database has it");
    let report = store.load().report;
    assert_eq!(
        (store.is_sound(), quarantined(dir.path()), report.missing),
        ((true, true), 1, 0),
        "{report}"
    );
    assert!(report.findings[0].contains("its history stays"), "{report}");
    store.append(&[made(3)]).unwrap();
    store.checkpoint().unwrap();
    drop(store);
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    assert_eq!(ids(&open(dir.path()).1), [1, 3]);
}

#[test]
fn an_intact_value_under_a_wrong_key_in_the_database_is_no_grant() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    store.index.with_database(|database| {
        database
            .as_ref()
            .unwrap()
            .misplace_for_test(&grant(2).alloc_id, "01890a5d-ac96-774b-bcce-9");
    });
    drop(store);
    let (_, recovered) = open(dir.path());
    assert_eq!(
        (ids(&recovered), recovered.report.missing, quarantined(dir.path())),
        (vec![1, 2], 0, 1),
        "{}",
        recovered.report
    );
}

#[test]
fn a_loss_of_history_after_a_boot_is_reported_once() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2), made(3), released(1), released(2)]).unwrap();
    store.checkpoint().unwrap();
    store.index.with_database(|database| database.as_ref().unwrap().lose_for_test());
    drop(store);
    for lost in [true, false] {
        let (store, recovered) = open(dir.path());
        assert!(recovered.report.is_clean() && ids(&recovered) == [3], "{}", recovered.report);
        assert_eq!(store.history(9, |_| true).unwrap().len(), 1);
        let findings = store.load().report.findings;
        assert_eq!(
            findings,
            if lost {
                vec!["the query database has lost 1 of its released grants"]
            } else {
                vec![]
            }
        );
        store.close().unwrap();
    }
}

#[test]
fn a_clock_that_is_wrong_by_a_year_expires_no_history() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let now = Timestamp::from_system(SystemTime::now()).0;
    let year = 365 * 24 * 3600 * 1000;
    store.append(&[made(1), made(2), made(3), made(4), released_at(1, now)]).unwrap();
    store.checkpoint().unwrap();
    store.append(&[released_at(2, now + year)]).unwrap();
    store.index.with_database(move |database| {
        database
            .as_mut()
            .unwrap()
            .checkpoint(1, Timestamp(now + year), Retention::default(), 0)
            .unwrap();
    });
    store.append(&[released_at(3, now - year)]).unwrap();
    store.index.with_database(move |database| {
        database
            .as_mut()
            .unwrap()
            .checkpoint(1, Timestamp(now - year), Retention::default(), 0)
            .unwrap();
    });
    let ids: Vec<_> = store
        .history(9, |_| true)
        .unwrap()
        .iter()
        .map(|grant| grant.devices[0].id.to_string())
        .collect();
    assert_eq!(ids, ["GPU-2", "GPU-1", "GPU-3"], "by the clock of their release");
    store.append(&[released(4)]).unwrap();
    drop(store);
    let (mut store, recovered) = open(dir.path());
    assert!(recovered.grants.is_empty() && recovered.report.is_clean(), "{}", recovered.report);
    store.checkpoint().unwrap();
    // By the clock the third release is a year old.
    assert_eq!(store.history(9, |_| true).unwrap().len(), 4);
}

#[test]
fn damage_to_the_database_found_after_the_start_is_reported_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open_again(dir.path());
    store.append(&[made(1), made(2), released(2)]).unwrap();
    store.checkpoint().unwrap();
    drop(store);
    fs::write(database_dir(dir.path()).join("db"), vec![0xa5; 700_000]).unwrap();
    let (mut store, recovered) = open_again(dir.path());
    assert_eq!(ids(&recovered), [1]);
    store.checkpoint().unwrap();
    let report = store.load().report;
    assert!(
        report.findings[0].contains("its history stays in the quarantined copy")
            && report.quarantined.len() == 1,
        "{report}"
    );
    assert_eq!((quarantined(dir.path()), store.is_sound()), (1, (true, true)));
    drop(store);
    assert!(open(dir.path()).1.report.is_clean());
}

#[test]
fn an_append_never_waits_for_the_database_which_catches_up_from_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let go_on = hang(&store);
    for batch in 0..10 {
        store.append(&(1..=500).map(|n| made(500 * batch + n)).collect::<Vec<_>>()).unwrap();
    }
    store.append(&[released(4999)]).unwrap();
    assert_eq!(store.is_sound(), (true, false));
    assert!(store.begin_checkpoint().is_err(), "it is tried again later");
    drop(go_on);
    store.index.settle();
    store.checkpoint().unwrap();
    assert_eq!((store.is_sound(), segments(dir.path()).len()), ((true, true), 1));
    assert_eq!(store.history(9, |_| true).unwrap().len(), 1);
    drop(store);
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    assert_eq!(open(dir.path()).1.grants.len(), 4999);
}

/// Blocks the index thread, as sled does on a full disk, until the sender is dropped.
fn hang(store: &Store) -> std::sync::mpsc::Sender<()> {
    let (go_on, wait) = std::sync::mpsc::channel();
    let (hangs, does_hang) = std::sync::mpsc::channel();
    store.index.begin_with_database(move |_| {
        hangs.send(()).unwrap();
        let _ = wait.recv();
    });
    does_hang.recv().unwrap();
    go_on
}

/// Queries and checkpoints fail at once, and the journal records the grants.
#[test]
fn with_a_hung_database_the_journal_works_alone_and_the_next_start_has_everything() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2), made(3), released(1)]).unwrap();
    store.checkpoint().unwrap();
    let _hangs = std::mem::ManuallyDrop::new(hang(&store));
    store.append(&[released(2)]).unwrap();
    store.index.set_hangs_after(Duration::ZERO);
    assert_eq!(
        (store.is_sound(), store.kept().unreadable.unwrap().because),
        ((true, false), UnreadableReason::Failed)
    );
    assert!(matches!(store.history(1, |_| true), Err(StoreError::Unopened { .. })));
    assert!(matches!(store.begin_checkpoint(), Err(StoreError::Unopened { .. })));
    store.append(&[made(4)]).unwrap();
    // A copy as a killed process leaves it, since this process has the lock of the database.
    let copied = tempfile::tempdir().unwrap();
    copy(dir.path(), copied.path());
    drop(store);
    let (store, recovered) = open(copied.path());
    assert!(recovered.report.is_clean() && ids(&recovered) == [3, 4], "{}", recovered.report);
    assert_eq!(store.history(9, |_| true).unwrap().len(), 2, "released before the hang, and since");
}

/// The thread was only slow.
#[test]
fn a_database_that_responds_again_follows_at_the_next_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), made(2)]).unwrap();
    let go_on = hang(&store);
    store.index.set_hangs_after(Duration::ZERO);
    store.append(&[released(2)]).unwrap();
    assert_eq!(store.is_sound(), (true, false));
    store.index.set_hangs_after(Duration::MAX);
    drop(go_on);
    store.checkpoint().unwrap();
    assert_eq!((store.is_sound(), store.history(9, |_| true).unwrap().len()), ((true, true), 1));
    assert!(store.kept().unreadable.is_none() && store.load().report.is_clean());
}

/// A start that does not wait for the database syncs nothing: no entry is confirmed before the
/// first append.
#[test]
fn the_first_append_makes_the_new_segment_and_its_name_durable() {
    use super::testing::take_steps;
    let dir = tempfile::tempdir().unwrap();
    drop(open_again(dir.path()));
    take_steps();
    let (mut store, _) = open_again(dir.path());
    assert_eq!(take_steps(), ["write"]);
    store.append(&[made(1)]).unwrap();
    assert_eq!(take_steps(), ["write", "sync", "sync directory"]);
    store.append(&[made(2)]).unwrap();
    assert_eq!(take_steps(), ["write", "sync"]);
}

/// A step of a ledger. There are few grants, so steps concern the same ones.
fn step() -> impl Strategy<Value = Vec<Entry>> {
    let entry = (0..16_u8, 1..6_u64).prop_map(|(kind, n)| match kind {
        0 => made(n),
        1 => bound(n),
        2 => suspect(n),
        3 => released(n),
        4 => listed(&(1..n).collect::<Vec<_>>()),
        kind @ 5..=7 => hook_in_each_state(n).swap_remove(usize::from(kind - 5)),
        8 => samples::gone(&[n, n + 1]),
        9 => samples::back(n),
        10 => samples::forgotten_for_good(&[n]),
        11 => samples::claimed(n),
        12 => samples::claim_nic(n),
        13 => samples::prepared(n, Some(Timestamp(1_700_000_002_000))),
        14 => samples::unprepared(n),
        _ => named(n),
    });
    prop::collection::vec(entry, 1..4)
}

/// Drops entries that no ledger writes: an alloc-id is granted once, and nothing follows its
/// release. If the journal loses a release, a later entry could not be distinguished from an
/// earlier one.
fn as_a_ledger_writes(steps: Vec<Vec<Entry>>) -> Vec<Vec<Entry>> {
    let (mut made, mut gone) = (BTreeSet::new(), BTreeSet::new());
    let mut written = |entry: &Entry| match entry {
        Entry::Grant(grant) => made.insert(grant.alloc_id.clone()),
        Entry::Moved { alloc_id, state: GrantState::Released { .. } } => {
            made.contains(alloc_id) && gone.insert(alloc_id.clone())
        }
        Entry::Moved { alloc_id, .. } => made.contains(alloc_id) && !gone.contains(alloc_id),
        _ => true,
    };
    steps.into_iter().map(|step| step.into_iter().filter(&mut written).collect()).collect()
}

/// The model of the live grants.
fn model(entries: &[Entry]) -> BTreeMap<AllocId, Grant> {
    let mut live: BTreeMap<AllocId, Grant> = BTreeMap::new();
    for entry in entries {
        match entry {
            Entry::Grant(grant) => drop(live.insert(grant.alloc_id.clone(), (**grant).clone())),
            Entry::Moved { alloc_id, state } => {
                if let Some(grant) = live.get_mut(alloc_id) {
                    grant.state = state.clone();
                    if !grant.is_live() {
                        live.remove(alloc_id);
                    }
                }
            }
            _ => {}
        }
    }
    live
}

/// The model of the lists.
fn model_of_lists(entries: &[Entry]) -> Listed {
    let mut lists = Listed::new();
    for entry in entries {
        if let Entry::Listed { resource, devices } = entry {
            lists.insert(resource.clone(), devices.clone());
        }
    }
    lists.retain(|_, devices| !devices.is_empty());
    lists
}

/// The models of the names, and of absent devices.
fn model_of_devices(entries: &[Entry]) -> (BTreeMap<String, DeviceId>, Gone) {
    let (mut names, mut gone) = (BTreeMap::new(), Gone::new());
    for entry in entries {
        match entry {
            Entry::Named { key, id } => drop(names.insert(key.clone(), id.clone())),
            Entry::Gone { devices, since: Some(since) } => {
                gone.extend(devices.iter().map(|device| (device.clone(), *since)));
            }
            Entry::Gone { devices, since: None } => {
                gone.retain(|device, _| !devices.contains(device));
            }
            Entry::Forgotten { devices } => {
                names.retain(|_, id| !devices.contains(id));
                gone.retain(|device, _| !devices.contains(device));
            }
            _ => {}
        }
    }
    (names, gone)
}

/// The model of the pending hooks.
fn model_of_hooks(entries: &[Entry]) -> PendingHooks {
    let mut owed = PendingHooks::new();
    for entry in entries {
        if let Entry::Hook(hook) = entry {
            owed.entry(hook.resource.clone())
                .or_default()
                .insert(hook.device.clone(), (**hook).clone());
        }
    }
    owed.values_mut().for_each(|devices| devices.retain(|_, hook| hook.state != HookState::Done));
    owed.retain(|_, devices| !devices.is_empty());
    owed
}

/// A hook whose end was lost with its segment does not stay pending: a complete head has all
/// pending hooks.
#[test]
fn a_hook_that_is_not_in_the_newest_head_is_not_pending() {
    let dir = tempfile::tempdir().unwrap();
    let [due, failed, done] = <[Entry; 3]>::try_from(hook_in_each_state(1)).unwrap();
    let owed = |dir: &Path| peek(dir).unwrap().owed.into_values().flatten().count();
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), due]).unwrap();
    store.append(&[failed]).unwrap();
    assert_eq!(owed(dir.path()), 1);
    store.rotate().unwrap();
    assert_eq!(owed(dir.path()), 1, "a head has it");
    store.append(&[done]).unwrap();
    let ended_in = segments(dir.path()).pop().unwrap();
    store.rotate().unwrap();
    drop(store);
    fs::remove_file(ended_in).unwrap();
    assert_eq!(owed(dir.path()), 0);
}

/// The same for the notes that only the journal has. A damaged head does not replace them.
#[test]
fn notes_that_are_not_in_the_newest_head_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let notes = |dir: &Path| {
        let Recovered { listed, verdicts, gone, report, .. } = peek(dir).unwrap();
        ((listed.len(), verdicts.len(), gone.len()), report.is_clean())
    };
    let (mut store, _) = open(dir.path());
    store.append(&[made(1), listed(&[1]), samples::judged(1), samples::gone(&[2])]).unwrap();
    store.rotate().unwrap();
    assert_eq!(notes(dir.path()), ((1, 1, 1), true), "a head has them");
    store.append(&[listed(&[]), samples::forgotten(1), samples::back(2)]).unwrap();
    let ended_in = segments(dir.path()).pop().unwrap();
    store.rotate().unwrap();
    drop(store);
    fs::remove_file(&ended_in).unwrap();
    assert_eq!(notes(dir.path()), ((0, 0, 0), true), "the newest head has none");
    let newest = segments(dir.path()).pop().unwrap();
    let head = written(&newest);
    fs::write(&newest, &head[..head.len() - 1]).unwrap();
    assert_eq!(notes(dir.path()), ((1, 1, 1), false), "the newest head is incomplete");
}

/// With a missing and with a damaged journal: the database has the hook too, and its end.
#[test]
fn a_pending_hook_is_in_both_copies() {
    let [due, _, done] = <[Entry; 3]>::try_from(hook_in_each_state(1)).unwrap();
    for (entries, is_owed) in [(vec![due.clone()], true), (vec![due.clone(), done], false)] {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        store.append(&[made(1), named(1)]).unwrap();
        store.append(&entries).unwrap();
        store.close().unwrap();
        for segment in segments(dir.path()) {
            fs::remove_file(segment).unwrap();
        }
        let (store, recovered) = open(dir.path());
        let owed = model_of_hooks(&entries);
        assert_eq!((&recovered.owed, owed.is_empty()), (&owed, !is_owed));
        drop(store);
        // And the other way round.
        fs::remove_dir_all(database_dir(dir.path())).unwrap();
        let (store, recovered) = open(dir.path());
        assert_eq!(recovered.owed, owed);
        assert_eq!(
            store.index.reader().unwrap().wait().unwrap().snapshot().unwrap().notes.hooks.len(),
            usize::from(is_owed)
        );
    }
}

fn as_map(recovered: Recovered) -> BTreeMap<AllocId, Grant> {
    recovered.grants.into_iter().map(|grant| (grant.alloc_id.clone(), grant)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(std::env::var("HOLDFAST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(24)))]

    #[test]
    fn replay_equals_live(lives in prop::collection::vec((prop::collection::vec(step(), 0..6), 0..4_u8, 0..3_usize), 1..5)) {
        let dir = tempfile::tempdir().unwrap();
        let mut all = Vec::new();
        for (steps, ending, boot) in lives {
            let boot = [None, Some("this boot"), Some("another boot")][boot];
            let (mut store, recovered) = Store::open(dir.path(), Durability::PowerLoss, boot).unwrap();
            prop_assert_eq!(&recovered.listed, &model_of_lists(&all));
            prop_assert_eq!(&recovered.owed, &model_of_hooks(&all));
            prop_assert_eq!((recovered.names.clone(), recovered.gone.clone()), model_of_devices(&all));
            prop_assert_eq!(as_map(recovered), model(&all));
            store.index.with_database(|_| {});
            let database = tempfile::tempdir().unwrap();
            copy(&database_dir(dir.path()), &database.path().join("db"));
            for step in steps {
                store.append(&step).unwrap();
                all.extend(step);
                prop_assert_eq!(as_map(store.load()), model(&all));
            }
            match ending {
                0 => store.close().unwrap(),
                1 => drop(store),
                // The database as it was at the start, or after sled has written.
                2 => kill(store, dir.path(), &database.path().join("db")),
                _ => { store.checkpoint().unwrap(); drop(store); }
            }
            prop_assert_eq!(as_map(peek(dir.path()).unwrap()), model(&all));
        }
        let (_, recovered) = open(dir.path());
        prop_assert!(recovered.report.missing == 0, "{}", recovered.report);
        prop_assert_eq!(as_map(recovered), model(&all));
    }

    #[test]
    fn a_flipped_bit_in_the_journal_loses_no_live_grant_silently(
        steps in prop::collection::vec(step(), 1..12).prop_map(as_a_ledger_writes), at in any::<prop::sample::Index>(), bit in 0..8_u8, checkpointed in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        let all: Vec<Entry> = steps.concat();
        for step in &steps {
            store.append(step).unwrap();
        }
        if checkpointed { store.checkpoint().unwrap(); drop(store); } else { kill(store, dir.path(), Path::new("/nonexistent")); }
        let path = segments(dir.path()).pop().unwrap();
        let mut bytes = written(&path);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        let (_, recovered) = open(dir.path());
        let report = recovered.report.clone();
        let (found, wanted) = (as_map(recovered), model(&all));
        if checkpointed {
            prop_assert_eq!(found, wanted, "{}", report);
        } else {
            let lost = wanted.keys().filter(|id| !found.contains_key(*id)).count();
            prop_assert!(lost == 0 || report.missing > 0 || report.torn_bytes > 0, "{lost} lost: {report}");
        }
    }

    #[test]
    fn sleds_files_may_be_damaged_in_any_way(
        steps in prop::collection::vec(step(), 1..12).prop_map(as_a_ledger_writes), how in 0..3_u8, file in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path());
        let all: Vec<Entry> = steps.concat();
        store.append(&all).unwrap();
        store.checkpoint().unwrap();
        drop(store);
        let files: Vec<_> = fs::read_dir(database_dir(dir.path())).unwrap().flatten().map(|e| e.path()).filter(|p| p.is_file()).collect();
        let path = file.get(&files);
        let mut bytes = fs::read(path).unwrap();
        let at = at.index(bytes.len().max(1));
        match how {
            0 => bytes.truncate(at),
            1 => for byte in bytes.iter_mut().skip(at).take(64) { *byte ^= 0xff; },
            _ => bytes = Vec::new(),
        }
        if bytes.is_empty() && how == 2 { fs::remove_file(path).unwrap(); } else { fs::write(path, bytes).unwrap(); }
        let (_, recovered) = open(dir.path());
        prop_assert_eq!(as_map(recovered), model(&all));
    }
}

/// A crash may cut the file at every length. Complete entries are recovered, and nothing else.
#[test]
fn a_journal_cut_at_any_byte_has_every_complete_entry_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let batches =
        [vec![made(1), named(1)], vec![bound(1), made(2)], vec![released(1)], vec![made(3)]];
    let path = segments(dir.path())[0].clone();
    let header = written(&path).len();
    let mut confirmed = vec![(header, 0)];
    let mut all = Vec::new();
    for batch in &batches {
        store.append(batch).unwrap();
        all.extend(batch.clone());
        confirmed.push((written(&path).len(), all.len()));
    }
    let bytes = written(&path);
    drop(store);
    for cut in header..=bytes.len() {
        let copy = tempfile::tempdir().unwrap();
        fs::create_dir_all(journal_dir(copy.path())).unwrap();
        fs::write(journal_dir(copy.path()).join(path.file_name().unwrap()), &bytes[..cut]).unwrap();
        let seen = peek(copy.path()).unwrap();
        let confirmed = confirmed.iter().rev().find(|(length, _)| *length <= cut).unwrap().1;
        let found = states(&as_map(seen));
        let is_prefix = |n: usize| states(&model(&all[..n])) == found;
        assert!((confirmed..=all.len()).any(is_prefix), "cut at {cut}: {found:?}");
        // Reading is fast and is tested for every byte. Opening uses the same replay, so it is
        // tested for every 97th.
        if cut % 97 == 0 {
            let (_, opened) = open(copy.path());
            assert_eq!(states(&as_map(opened)), found, "cut at {cut}");
        }
    }
}

/// The grants of one claim are one commit. A crash leaves a prefix of what was being written, and
/// all that was confirmed.
#[test]
fn claims_in_a_journal_cut_at_any_byte_are_those_of_the_complete_entries() {
    let dir = tempfile::tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let unprepared_at = Some(Timestamp(1_700_000_002_000));
    let batches = [
        vec![samples::claimed(1), samples::claim_nic(1)],
        vec![samples::prepared(1, unprepared_at), made(1)],
        vec![samples::hook(1, HookState::Due), samples::unprepared(1), samples::claimed(3)],
    ];
    let path = segments(dir.path())[0].clone();
    let mut confirmed = vec![(written(&path).len(), 0)];
    let mut all = Vec::new();
    for batch in &batches {
        store.append(batch).unwrap();
        all.extend(batch.clone());
        confirmed.push((written(&path).len(), all.len()));
    }
    let bytes = written(&path);
    drop(store);
    for cut in confirmed[0].0..=bytes.len() {
        let copy = tempfile::tempdir().unwrap();
        fs::create_dir_all(journal_dir(copy.path())).unwrap();
        fs::write(journal_dir(copy.path()).join(path.file_name().unwrap()), &bytes[..cut]).unwrap();
        let found = as_map(peek(copy.path()).unwrap());
        let least = confirmed.iter().rev().find(|(length, _)| *length <= cut).unwrap().1;
        assert!((least..=all.len()).any(|n| model(&all[..n]) == found), "cut at {cut}: {found:?}");
        if cut % 97 == 0 {
            let (_, opened) = open(copy.path());
            assert_eq!(as_map(opened), found, "cut at {cut}");
        }
    }
}

/// Version 2 is only for claims: an earlier Holdfast reads a ledger whose claims have ended in the
/// journal, and does not call a live claim damage.
#[test]
fn a_claim_survives_every_copy_of_the_ledger() {
    let dir = tempfile::tempdir().unwrap();
    let claim = samples::claim_grant(1);
    let (mut store, _) = open(dir.path());
    store.append(&[samples::claimed(1), samples::claim_nic(1)]).unwrap();
    store.checkpoint().unwrap();
    store.append(&[samples::prepared(1, Some(Timestamp(1_700_000_002_000)))]).unwrap();
    drop(store);
    // By the head of the next segment, and by the database alone.
    for journal in [true, false] {
        if !journal {
            for segment in segments(dir.path()) {
                fs::remove_file(segment).unwrap();
            }
        }
        let (mut store, recovered) = open_again(dir.path());
        let found = as_map(recovered);
        assert_eq!(found.len(), 2);
        let found = &found[&claim.alloc_id];
        assert_eq!((&found.claim, found.state_name()), (&claim.claim, "prepared"));
        store.checkpoint().unwrap();
    }
    let (mut store, _) = open_again(dir.path());
    let mut unprepared = samples::unprepared(1);
    if let Entry::Moved { state: GrantState::Released { released_at, .. }, .. } = &mut unprepared {
        *released_at = Timestamp::from_system(SystemTime::now());
    }
    store.append(&[unprepared]).unwrap();
    store.checkpoint().unwrap();
    let released: Vec<Grant> = grants_of(store.exporter().unwrap())
        .unwrap()
        .into_iter()
        .filter(|grant| !grant.is_live())
        .collect();
    let [past] = &released[..] else { panic!("{released:?}") };
    assert_eq!(past.pods().count(), 2, "the history has both pods");
}

fn states(live: &BTreeMap<AllocId, Grant>) -> Vec<(AllocId, &'static str)> {
    live.iter().map(|(id, grant)| (id.clone(), grant.state_name())).collect()
}

#[test]
#[ignore = "a measurement: cargo test --release -- --ignored --nocapture opening"]
fn opening_with_1000_live_grants_is_fast() {
    let dir = tempfile::tempdir_in(
        std::env::var("HOLDFAST_BENCH_DIR").unwrap_or_else(|_| "/var/tmp".into()),
    )
    .unwrap();
    let (mut store, _) = open(dir.path());
    for n in 1..=1000 {
        store.append(&[made(n), named(n)]).unwrap();
        store.append(&[bound(n)]).unwrap();
    }
    for ending in ["killed", "checkpointed", "checkpointed"] {
        if ending == "checkpointed" {
            store.checkpoint().unwrap();
        }
        drop(store);
        let began = Instant::now();
        let (opened, recovered) = open(dir.path());
        println!("{ending}: opened in {:?}: {}", began.elapsed(), recovered.report);
        assert_eq!(recovered.grants.len(), 1000);
        store = opened;
    }
    let mut micros: Vec<_> = (2000..4000)
        .map(|n| {
            let began = Instant::now();
            store.append(&[made(n)]).unwrap();
            began.elapsed().as_nanos() / 1000
        })
        .collect();
    micros.sort_unstable();
    println!("append: p50 {} us, p99 {} us", micros[1000], micros[1980]);
    let mut file = File::create(dir.path().join("floor")).unwrap();
    let mut floor: Vec<_> = (0..2000)
        .map(|_| {
            let began = Instant::now();
            std::io::Write::write_all(&mut file, &[7; 800]).unwrap();
            file.sync_data().unwrap();
            began.elapsed().as_nanos() / 1000
        })
        .collect();
    floor.sort_unstable();
    println!("write + fdatasync of 800 bytes: p50 {} us, p99 {} us", floor[1000], floor[1980]);
    let began = Instant::now();
    store.checkpoint().unwrap();
    println!("checkpoint: {:?}", began.elapsed());
}
