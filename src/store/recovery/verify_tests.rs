//! Checks of both copies.

use super::*;
use crate::domain::{Durability, Entry, Timestamp};
use crate::store::index::{Database, Update};
use crate::store::layout::{database_dir, journal_dir, quarantine};
use crate::store::samples::{bound, grant, made, named, released_at};
use std::time::SystemTime;

fn released(n: u64) -> Entry {
    released_at(n, Timestamp::from_system(SystemTime::now()).0)
}

/// A record of a grant under the id of another.
fn live(id: u64, n: u64) -> Update {
    Update::Live(grant(id).alloc_id, codec::encode(&made(n)).unwrap())
}

fn open(dir: &Path) -> Store {
    Store::open(dir, Durability::PowerLoss, Some("this boot")).unwrap().0
}

fn write(dir: &Path) -> Store {
    let mut store = open(dir);
    store.append(&[named(1), made(1), bound(1), made(2), released(2)]).unwrap();
    store.checkpoint().unwrap();
    store.append(&[made(3), released(1)]).unwrap();
    store
}

fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let inside =
        |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
    let all =
        inside(dir.to_owned()).chain(inside(journal_dir(dir))).chain(inside(database_dir(dir)));
    let mut files: Vec<_> = all
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

/// The problems that a check of the files finds. It changes no file.
fn problems(dir: &Path) -> Vec<String> {
    let before = files(dir);
    let found = verify(dir).unwrap();
    assert!(files(dir) == before, "a check changes nothing");
    assert_eq!(found.sound, found.problems.is_empty());
    found.problems
}

#[test]
fn an_intact_ledger_is_sound_at_every_time() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(verify(dir.path()), Err(StoreError::NoJournal { .. })));
    let store = write(dir.path());
    // Both for a running daemon, and for the files of a killed one.
    let found = store.verifier().verify().unwrap();
    assert!(found.sound, "{found:#?}");
    assert_eq!(
        (found.journal.live, found.live.in_both, found.database.unwrap().released),
        (1, 1, 2)
    );
    assert_eq!(problems(dir.path()), [] as [&str; 0]);
    drop(store);
    for _ in 0..3 {
        assert_eq!(problems(dir.path()), [] as [&str; 0]);
        open(dir.path()).append(&[made(4), released(4)]).unwrap();
    }
    open(dir.path()).close().unwrap();
    let found = verify(dir.path()).unwrap();
    assert_eq!(
        (found.live.in_both, found.live.following, found.remarks.len()),
        (1, 0, 0),
        "{found:#?}"
    );
}

#[test]
fn missing_additional_and_different_grants_of_the_database_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let id = |n: u64| grant(n).alloc_id;
    let check = |with_database: fn(&mut Database), wanted: String| {
        let dir = tempfile::tempdir().unwrap();
        let store = write(dir.path());
        store.index.with_database(move |database| with_database(database.as_mut().unwrap()));
        let found = store.verifier().verify().unwrap();
        assert!(!found.sound && found.problems.contains(&wanted), "{found:#?}\n{wanted}");
        let mut store = store;
        store.checkpoint().unwrap();
        drop(store);
        assert!(problems(dir.path()).contains(&wanted), "the same from the files: {wanted}");
    };
    check(
        |database| database.write(0, &Update::Discard(grant(3).alloc_id)).unwrap(),
        format!("grant {} is live, and is not in the query database", id(3)),
    );
    let other = "is live in the query database, and not in the journal";
    check(|database| database.write(3, &live(9, 9)).unwrap(), format!("grant {} {other}", id(9)));
    let other = "differs between the query database and the journal";
    check(|database| database.write(3, &live(3, 8)).unwrap(), format!("grant {} {other}", id(3)));

    // A database with a damaged record does not open.
    let store = write(dir.path());
    store
        .index
        .with_database(|database| database.as_mut().unwrap().damage_for_test(&grant(3).alloc_id));
    assert!(
        store
            .verifier()
            .verify()
            .unwrap()
            .problems
            .contains(&"damaged records in the query database: 1".to_owned())
    );
    drop(store);
    assert!(problems(dir.path())[0].contains("records are damaged"), "{:?}", problems(dir.path()));
}

#[test]
fn damaged_missing_and_quarantined_files_are_named() {
    let damaged = |damage: fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).close().unwrap();
        damage(dir.path());
        problems(dir.path()).join("; ")
    };
    let newest = |dir: &Path| segments(&journal_dir(dir)).unwrap().pop().unwrap().1;
    assert_eq!(damaged(|_| {}), "");
    let flipped = damaged(|dir| {
        let path = segments(&journal_dir(dir)).unwrap().pop().unwrap().1;
        let mut bytes = fs::read(&path).unwrap();
        bytes[200] ^= 1;
        fs::write(path, bytes).unwrap();
    });
    assert!(
        flipped.contains("is damaged") && flipped.contains("entries missing from the journal: 1"),
        "{flipped}"
    );
    assert!(
        damaged(|dir| fs::remove_dir_all(database_dir(dir)).unwrap()).is_empty(),
        "a new ledger may have none"
    );
    let gone = damaged(|dir| {
        segments(&journal_dir(dir))
            .unwrap()
            .iter()
            .for_each(|(_, path)| fs::remove_file(path).unwrap());
    });
    assert!(
        gone.contains("the journal is missing") && gone.contains("entries up to 7 were confirmed"),
        "{gone}"
    );

    let dir = tempfile::tempdir().unwrap();
    write(dir.path()).close().unwrap();
    let aside = quarantine(&newest(dir.path())).unwrap();
    assert_eq!(verify(dir.path()).unwrap().moved_aside, [aside]);
}
