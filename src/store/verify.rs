//! Whether both copies hold what they should, for `ledger verify`. It reads, and changes nothing.
//!
//! The database follows the journal, so at any moment it may lack the latest entries. What it must have is what was live at
//! a moment that it has passed: for a daemon, when it was asked, since the shelver answers after everything before; for
//! files, the last checkpoint. What came later may be in the journal alone, and is counted as following.

use super::database::Image;
use super::layout::{database_to_read, is_there, moved_aside, peek_confirmed, scratch};
use super::peek::open_copy;
use super::recovery::{self, LivePayloads, Truth, database_finding, decode_grant, encode_live};
use super::replay::Fold;
use super::shelver::PendingReader;
use super::{RecoveryReport, Store, StoreError, journal};
use crate::domain::AllocId;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What both copies say, and whether they agree (`ledger verify -o json`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// The version of this document's form.
    pub schema: u32,
    /// Whether nothing is missing, damaged or contradicted.
    pub sound: bool,
    /// What the journal holds.
    pub journal: JournalCheck,
    /// What the query database holds; `null` where it cannot be read.
    pub database: Option<DatabaseCheck>,
    /// The live grants, in both.
    pub live: LiveCheck,
    /// What was damaged once and is kept for a person to look at.
    pub moved_aside: Vec<PathBuf>,
    /// What is wrong, in words.
    pub problems: Vec<String>,
    /// What is worth knowing and is no harm, in words.
    pub remarks: Vec<String>,
}

/// What the journal holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalCheck {
    /// Its files.
    pub segments: usize,
    /// Entries whose checksums hold.
    pub entries: u64,
    /// The number of the first entry.
    pub from: u64,
    /// The number of the last entry.
    pub to: u64,
    /// Live grants.
    pub live: usize,
    /// Names of devices.
    pub names: usize,
    /// Hooks that are owed to devices after their release.
    #[serde(default)]
    pub hooks: usize,
    /// Entries that should be there and are not, by number.
    pub missing: u64,
    /// Files with damage inside.
    pub damaged: Vec<PathBuf>,
    /// Bytes of writes that were cut off, and never confirmed.
    pub cut_off_bytes: u64,
}

/// What the query database holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatabaseCheck {
    /// Live grants.
    pub live: usize,
    /// Released grants.
    pub released: u64,
    /// Names of devices.
    pub names: usize,
    /// Hooks that are owed to devices after their release.
    #[serde(default)]
    pub hooks: usize,
    /// It had everything up to this entry at its last checkpoint.
    pub applied: u64,
    /// Records whose checksum does not hold.
    pub damaged: u64,
}

/// The live grants, in both copies.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveCheck {
    /// In both, and the same.
    pub in_both: usize,
    /// Newer in the journal, which the database follows.
    pub following: usize,
    /// Should be in the database and are not.
    pub only_in_journal: Vec<AllocId>,
    /// Not live by the journal.
    pub only_in_database: Vec<AllocId>,
    /// In both, and not the same.
    pub different: Vec<AllocId>,
}

/// A check of a running store that has begun.
#[derive(Debug)]
pub struct Verifier {
    dir: PathBuf,
    /// What was live when it began, and the number of the latest entry.
    live: LivePayloads,
    confirmed: u64,
    reader: Result<PendingReader, StoreError>,
    remarks: Vec<String>,
}

impl Store {
    /// What a check needs, taken in the time that a copy of the live grants takes. The check itself reads the disk, and is
    /// done without the store.
    #[must_use]
    pub fn verifier(&self) -> Verifier {
        let report = &self.load().report;
        let remarks = if report.is_clean() { Vec::new() } else { vec![format!("found at the start: {report}")] };
        Verifier { dir: self.dir.clone(), live: self.live.clone(), confirmed: self.next_seq - 1, reader: self.shelver.reader(), remarks }
    }
}

impl Verifier {
    /// Reads both copies.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn verify(self) -> Result<Verification, StoreError> {
        let Verifier { dir, live, confirmed, reader, remarks } = self;
        // The database first: what it has is then in the journal too.
        let read = || {
            let reader = reader?.wait()?;
            Ok((reader.image()?, reader))
        };
        let read: Result<_, StoreError> = read();
        let journal = Journal::read(&dir)?;
        let mut check = Check::new(&dir, journal, confirmed);
        check.found.remarks.extend(remarks);
        match read {
            Ok((image, reader)) => {
                check.database(&image, true);
                check.live(&live, &image, confirmed);
                let counted = reader.check_history(|record| check.released(record));
                check.counted(counted);
            }
            Err(error) => check.found.problems.push(error.to_string()),
        }
        Ok(check.done())
    }
}

/// Checks the files of a ledger that no daemon uses.
///
/// # Errors
/// When there is no journal, it cannot be read or a later version wrote it, or when somebody writes to it meanwhile.
pub fn verify(state_dir: &Path) -> Result<Verification, StoreError> {
    let journal_dir = is_there(state_dir)?;
    let before = stamps(&journal_dir);
    let scratch = scratch()?;
    let database_dir = database_to_read(state_dir);
    let had_database = database_dir.exists();
    let opened = had_database.then(|| open_copy(&database_dir, scratch.path()));
    let mut check = Check::new(state_dir, Journal::read(state_dir)?, peek_confirmed(state_dir));
    match opened {
        Some(Ok((shelf, image))) => {
            let then = Journal::fold(Fold::read_upto(state_dir, image.applied)?)?;
            check.database(&image, true);
            check.live(&then.live, &image, image.applied);
            let counted = shelf.reader().check_history(|record| check.released(record));
            check.counted(counted);
            shelf.close();
        }
        Some(Err(error @ StoreError::Database { .. })) => check.found.problems.push(error.to_string()),
        Some(Err(error)) => return Err(error),
        // A daemon that died within its first moments has not made one yet.
        None => {
            check.database(&Image::default(), false);
            check.live(&LivePayloads::new(), &Image::default(), 0);
        }
    }
    if stamps(&journal_dir) != before {
        return Err(StoreError::InUse { path: state_dir.to_owned() });
    }
    Ok(check.done())
}

/// The journal's files, to see whether somebody writes there. The size alone does not tell: there is room in them.
fn stamps(dir: &Path) -> Vec<(PathBuf, Option<(u64, SystemTime)>)> {
    let stamp = |path: &Path| fs::metadata(path).and_then(|file| Ok((file.len(), file.modified()?))).ok();
    journal::segments(dir).unwrap_or_default().into_iter().map(|(_, path)| (path.clone(), stamp(&path))).collect()
}

/// What the journal says.
struct Journal {
    found: JournalCheck,
    oldest: u64,
    truth: Truth,
    live: LivePayloads,
}

impl Journal {
    fn read(state_dir: &Path) -> Result<Self, StoreError> {
        Journal::fold(Fold::read_beside_a_writer(state_dir)?)
    }

    fn fold(fold: Fold) -> Result<Self, StoreError> {
        let found = JournalCheck {
            segments: fold.segments.len(),
            entries: fold.entries,
            from: fold.oldest(),
            to: fold.last,
            live: 0,
            names: fold.names.len(),
            hooks: fold.owed.len(),
            missing: fold.gaps.iter().map(|(from, to)| to + 1 - from).sum(),
            damaged: fold.damaged.clone(),
            cut_off_bytes: fold.torn_bytes,
        };
        let oldest = fold.oldest();
        let mut truth = recovery::merge(fold, &Image::default(), &mut RecoveryReport::default(), |_| None);
        let live = encode_live(&mut truth)?;
        Ok(Journal { found: JournalCheck { live: live.len(), ..found }, oldest, truth, live })
    }
}

/// A check under way.
struct Check {
    journal: Journal,
    found: Verification,
}

impl Check {
    fn new(state_dir: &Path, journal: Journal, confirmed: u64) -> Self {
        let mut found = Verification { schema: 1, moved_aside: moved_aside(state_dir), ..Verification::default() };
        found.journal = journal.found.clone();
        let JournalCheck { to, missing, damaged, cut_off_bytes, .. } = &mut found.journal;
        found.problems.extend(damaged.iter().map(|path| super::desk::damaged(path)));
        if *missing > 0 {
            found.problems.push(format!("entries missing from the journal: {missing}"));
        }
        if confirmed > *to {
            found.problems.push(format!("the journal ends with entry {to}, and entries up to {confirmed} were confirmed"));
            *missing += confirmed - *to;
        }
        if *cut_off_bytes > 0 {
            found.remarks.push(format!("{cut_off_bytes} bytes of a write that was cut off: it was never confirmed"));
        }
        Check { journal, found }
    }

    fn database(&mut self, image: &Image, exists: bool) {
        let found = DatabaseCheck {
            live: image.live.len(),
            released: 0,
            names: image.names.len(),
            hooks: image.hooks.len(),
            applied: image.applied,
            damaged: image.damaged,
        };
        self.found.problems.extend(database_finding(self.journal.oldest, image, exists));
        self.found.database = exists.then_some(found);
    }

    /// Compares. What was live when entry `seq` was the latest must be in the database, if it is live still.
    fn live(&mut self, then: &LivePayloads, image: &Image, seq: u64) {
        let found = &mut self.found.live;
        for (id, (_, payload)) in &self.journal.live {
            match (image.live.get(id), then.get(id)) {
                (Some((_, there)), _) if is_same(there, payload) => found.in_both += 1,
                (Some(_), Some((_, before))) if is_same(before, payload) => found.different.push(id.clone()),
                (None, Some(_)) => found.only_in_journal.push(id.clone()),
                _ => found.following += 1,
            }
        }
        for id in image.live.keys().filter(|id| !self.journal.live.contains_key(*id)) {
            match self.journal.truth.released.get(id) {
                Some((released, _)) if *released > seq => found.following += 1,
                _ => found.only_in_database.push(id.clone()),
            }
        }
        let gone = then.keys().filter(|id| !self.journal.live.contains_key(*id) && !self.journal.truth.released.contains_key(*id));
        self.found.problems.extend(gone.map(|id| format!("grant {id} is live and not in the journal")));
    }

    /// Takes note of a record of the history.
    fn released(&mut self, record: Option<(AllocId, u64)>) {
        let Some(database) = &mut self.found.database else { return };
        match record {
            None => database.damaged += 1,
            Some((id, seq)) => {
                database.released += 1;
                if self.journal.live.get(&id).is_some_and(|(live, _)| (live + 1..=self.journal.found.to).contains(&seq)) {
                    self.found.problems.push(format!("grant {id} is live in the journal, and given back by entry {seq} of the database"));
                }
            }
        }
    }

    fn counted(&mut self, counted: Result<(), StoreError>) {
        self.found.problems.extend(counted.err().map(|error| error.to_string()));
    }

    fn done(self) -> Verification {
        let mut found = self.found;
        if let Some(damaged) = found.database.as_ref().map(|database| database.damaged).filter(|damaged| *damaged > 0) {
            found.problems.push(format!("damaged records in the query database: {damaged}"));
        }
        let LiveCheck { following, only_in_journal, only_in_database, different, .. } = &found.live;
        let list = |ids: &[AllocId], what: &str| ids.iter().map(|id| format!("grant {id} {what}")).collect::<Vec<_>>();
        found.problems.extend(list(only_in_journal, "is live, and is not in the query database"));
        found.problems.extend(list(only_in_database, "is live in the query database, and not by the journal"));
        found.problems.extend(list(different, "is not the same in the query database as in the journal"));
        if *following > 0 {
            found.remarks.push(format!("the query database follows the journal and has yet to take over {following} grants"));
        }
        found.sound = found.problems.is_empty();
        found
    }
}

/// Payloads of one grant may be spelled by different versions.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    one == other || decode_grant(one).is_some_and(|grant| decode_grant(other) == Some(grant))
}

#[cfg(test)]
mod tests {
    use super::super::layout::database_dir;
    use super::super::layout::journal_dir;
    use super::super::samples::{bound, grant, made, named, released_at};
    use super::*;
    use crate::domain::{Durability, Entry, Timestamp};
    use std::time::SystemTime;

    fn released(n: u64) -> Entry {
        released_at(n, Timestamp::from_system(SystemTime::now()).0)
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
        let inside = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
        let all = inside(dir.to_owned()).chain(inside(journal_dir(dir))).chain(inside(database_dir(dir)));
        let mut files: Vec<_> = all.filter(|path| path.is_file()).map(|path| (path.clone(), fs::read(path).unwrap())).collect();
        files.sort();
        files
    }

    /// What a check of the files says, which changes none of them.
    fn problems(dir: &Path) -> Vec<String> {
        let before = files(dir);
        let found = verify(dir).unwrap();
        assert!(files(dir) == before, "a check changes nothing");
        assert_eq!(found.sound, found.problems.is_empty());
        found.problems
    }

    #[test]
    fn a_sound_ledger_is_sound_at_every_moment_of_its_life() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(verify(dir.path()), Err(StoreError::NoJournal { .. })));
        let store = write(dir.path());
        // Both as the daemon is asked, and as a kill at this moment leaves it.
        let found = store.verifier().verify().unwrap();
        assert!(found.sound, "{found:#?}");
        assert_eq!((found.journal.live, found.live.in_both, found.database.unwrap().released), (1, 1, 2));
        assert_eq!(problems(dir.path()), [] as [&str; 0]);
        drop(store);
        for _ in 0..3 {
            assert_eq!(problems(dir.path()), [] as [&str; 0]);
            open(dir.path()).append(&[made(4), released(4)]).unwrap();
        }
        open(dir.path()).close().unwrap();
        let found = verify(dir.path()).unwrap();
        assert_eq!((found.live.in_both, found.live.following, found.remarks.len()), (1, 0, 0), "{found:#?}");
    }

    #[test]
    fn what_the_database_lacks_has_too_much_or_has_otherwise_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let id = |n: u64| grant(n).alloc_id;
        let check = |meddle: fn(&mut super::super::database::Shelf), wanted: String| {
            let dir = tempfile::tempdir().unwrap();
            let store = write(dir.path());
            store.shelver.meddle(move |shelf| meddle(shelf.as_mut().unwrap()));
            let found = store.verifier().verify().unwrap();
            assert!(!found.sound && found.problems.contains(&wanted), "{found:#?}\n{wanted}");
            let mut store = store;
            store.checkpoint().unwrap();
            drop(store);
            assert!(problems(dir.path()).contains(&wanted), "the same from the files: {wanted}");
        };
        check(|shelf| shelf.discard(&grant(3).alloc_id).unwrap(), format!("grant {} is live, and is not in the query database", id(3)));
        let other = "is live in the query database, and not by the journal";
        check(|shelf| shelf.put(&grant(9).alloc_id, 3, &recovery::encode(&made(9)).unwrap()).unwrap(), format!("grant {} {other}", id(9)));
        let other = "is not the same in the query database as in the journal";
        check(|shelf| shelf.put(&grant(3).alloc_id, 3, &recovery::encode(&made(8)).unwrap()).unwrap(), format!("grant {} {other}", id(3)));

        // The files of one whose record is damaged do not open.
        let store = write(dir.path());
        store.shelver.meddle(|shelf| shelf.as_mut().unwrap().damage_for_test(&grant(3).alloc_id));
        assert!(store.verifier().verify().unwrap().problems.contains(&"damaged records in the query database: 1".to_owned()));
        drop(store);
        assert!(problems(dir.path())[0].contains("records are damaged"), "{:?}", problems(dir.path()));
    }

    #[test]
    fn what_is_damaged_gone_or_was_moved_aside_is_named() {
        let damaged = |damage: fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path()).close().unwrap();
            damage(dir.path());
            problems(dir.path()).join("; ")
        };
        let newest = |dir: &Path| journal::segments(&journal_dir(dir)).unwrap().pop().unwrap().1;
        assert_eq!(damaged(|_| {}), "");
        let flipped = damaged(|dir| {
            let path = journal::segments(&journal_dir(dir)).unwrap().pop().unwrap().1;
            let mut bytes = fs::read(&path).unwrap();
            bytes[200] ^= 1;
            fs::write(path, bytes).unwrap();
        });
        assert!(flipped.contains("is damaged") && flipped.contains("entries missing from the journal: 1"), "{flipped}");
        assert!(damaged(|dir| fs::remove_dir_all(database_dir(dir)).unwrap()).is_empty(), "a young ledger may be without");
        let gone = damaged(|dir| journal::segments(&journal_dir(dir)).unwrap().iter().for_each(|(_, path)| fs::remove_file(path).unwrap()));
        assert!(gone.contains("the journal is gone") && gone.contains("entries up to 7 were confirmed"), "{gone}");

        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).close().unwrap();
        let aside = super::super::layout::quarantine(&newest(dir.path())).unwrap();
        assert_eq!(verify(dir.path()).unwrap().moved_aside, [aside]);
    }
}
