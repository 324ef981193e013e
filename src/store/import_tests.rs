//! Imports of another ledger.

use super::layout::{database_dir, journal_dir};
use super::samples::{bound, grant, listed, made, named, released_at};
use super::testing::take_steps;
use super::*;
use crate::domain::Timestamp;
use std::fs;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::SystemTime;

fn open(dir: &Path) -> Store {
    Store::open(dir, Durability::PowerLoss, Some("this boot")).unwrap().0
}

fn entries(range: std::ops::Range<u64>) -> Vec<Entry> {
    let now = Timestamp::from_system(SystemTime::now()).0;
    let state = |n| if n % 2 == 0 { bound(n) } else { released_at(n, now) };
    let grants = range.map(|n| match state(n) {
        Entry::Moved { state, .. } => Entry::Grant(Arc::new(Grant { state, ..grant(n) })),
        other => other,
    });
    grants.chain([named(7), listed(&[7])]).collect()
}

#[test]
fn an_import_is_in_both_copies_with_the_entries_before() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path());
    store.append(&[made(1), named(1)]).unwrap();
    take_steps();
    store.import(&entries(100..5000)).unwrap();
    let steps: Vec<_> = take_steps().into_iter().take(4).collect();
    assert_eq!(
        steps,
        ["write", "sync", "rename", "sync directory"],
        "it is durable before it has its name"
    );
    store.append(&[made(2)]).unwrap();
    let known = store.load();
    assert_eq!((known.grants.len(), known.names.len(), known.listed.len()), (2450 + 2, 2, 1));
    store.checkpoint().unwrap();
    assert_eq!(store.history(9999, |_| true).unwrap().len(), 2450);
    let found = store.verifier().verify().unwrap();
    assert!(found.sound && found.live.in_both == 2452, "{found:#?}");
    store.close().unwrap();
    assert_eq!(open(dir.path()).load().grants, known.grants);
}

/// The next start reads no long journal: the import waits for the database, and no kubelet does.
#[test]
fn an_import_is_in_the_database_when_the_store_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path());
    // The thread is blocked, so its queue is not emptied.
    let (go_on, blocked) = channel::<()>();
    store.index.begin_with_database(move |_| assert!(blocked.recv().is_err(), "nothing is sent"));
    store.import(&entries(0..6_000)).unwrap();
    let known = store.load().grants;
    let checkpoint = store.begin_checkpoint().unwrap();
    drop(go_on);
    checkpoint.wait().unwrap();
    store.close().unwrap();
    fs::remove_dir_all(journal_dir(dir.path())).unwrap();
    let store = open(dir.path());
    assert_eq!(store.load().grants, known);
    assert_eq!(store.history(usize::MAX, |_| true).unwrap().len(), 3_000);
}

#[test]
fn an_interrupted_import_has_no_effect() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path());
    store.append(&[made(1)]).unwrap();
    // The file of a kill: everything is written, but not yet renamed.
    let first = store.next_seq;
    store.import(&entries(10..20)).unwrap();
    drop(store);
    let dir_of_journal = journal_dir(dir.path());
    let whole = dir_of_journal.join(journal::file_name(first));
    fs::rename(&whole, whole.with_extension("draft")).unwrap();
    fs::remove_dir_all(database_dir(dir.path())).unwrap();
    let known =
        |dir: &Path| (peek(dir).unwrap().grants.len(), peek_history(dir).unwrap().released.len());
    assert_eq!(known(dir.path()), (1, 0));
    fs::remove_file(dir.path().join("lock")).unwrap();
    let mut store = open(dir.path());
    store.import(&entries(10..20)).unwrap();
    store.close().unwrap();
    assert_eq!(known(dir.path()), (6, 5));
}
