//! sled, behind a guard: the only file that names it.
//!
//! sled 0.34.7 is fast and small, and must not be trusted further than it deserves: its `flush()` survives a kill but
//! not a power cut (no fsync), a damaged log tail rolls back in silence, and some damaged images panic at open. So
//! everything here runs under `catch_unwind`, opening has a time limit and reads every live record with its crc and
//! sequence number, a checkpoint adds the fdatasync, and whatever looks wrong is renamed away and rebuilt from the
//! journal. Nothing is ever repaired in place: deleting a bad snapshot of sled's can leave an empty database without an
//! error.

mod reader;

pub(super) use self::reader::Reader;
use self::reader::{history_key, hook_key, released_id};
use super::StoreError;
use super::codec;
use super::error::wants_room;
use super::layout::{note, sync_data, sync_directory};
use super::replay::OwedAt;
use crate::domain::{AllocId, DeviceId, Grant, HookState, OwedHook, Retention, Timestamp};
use crate::host::{self, LateTimers};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A process that has just ended may hold sled's lock until its last thread is gone.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// How late the timers of sled's threads may be.
const POOL_WAKES_WITHIN: Duration = Duration::from_secs(600);
/// sled's page cache and the segments of its log, small because the whole daemon may use 12 MiB. Over 4000 grants beside
/// 1000 live ones the process grew to 44 MB with 2 MiB and sled's usual 512 KiB, to 34 MB with these. What remains is
/// mostly glibc's: with `MALLOC_ARENA_MAX=1`, `MALLOC_MMAP_THRESHOLD_=65536` and `MALLOC_TRIM_THRESHOLD_=65536` it stays
/// at 13.5 MB.
const CACHE_BYTES: u64 = 256 * 1024;
/// A page of more than a quarter of this (17 records of 1.9 KB) goes into a file of its own below `blobs/`.
const LOG_SEGMENT_BYTES: usize = 128 * 1024;
/// How far the clock is believed to have gone on between two checkpoints. A clock that is wrong by a year would forget the
/// whole history at once; so it forgets a day of it at a time, until somebody sets the clock.
const CLOCK_STEP_MAX: Duration = Duration::from_secs(24 * 3600);

/// Threads of sled's pool, one for all databases of the process, and one that opens.
const POOL_THREADS: usize = 8;
/// Whether the pool is there.
static HAS_POOL: AtomicBool = AtomicBool::new(false);

const APPLIED: &str = "applied";
const OPENED: &str = "opened";
const SCHEMA: &str = "schema";
const HISTORY_COUNT: &str = "history-count";
const CLOCK: &str = "clock";
const FORGOTTEN: &str = "forgotten";

/// An open database.
#[derive(Debug)]
pub(super) struct Shelf {
    dir: PathBuf,
    db: sled::Db,
    live: sled::Tree,
    history: sled::Tree,
    names: sled::Tree,
    hooks: sled::Tree,
    meta: sled::Tree,
    /// sled's own log, opened once more for the fdatasync that sled does not do.
    log: File,
    history_count: u64,
}

/// What the database holds, history aside.
#[derive(Debug, Default)]
pub(super) struct Image {
    /// Everything up to this sequence number had been applied at its last checkpoint.
    pub(super) applied: u64,
    /// The highest sequence number seen in it.
    pub(super) last: u64,
    /// Live grants: sequence number of the latest entry, and the payload.
    pub(super) live: BTreeMap<AllocId, (u64, Vec<u8>)>,
    /// Names of devices.
    pub(super) names: BTreeMap<String, (u64, DeviceId)>,
    /// Hooks that are owed.
    pub(super) hooks: OwedAt,
    /// Records that cannot be read.
    pub(super) damaged: u64,
    /// The highest version of records that only a later Holdfast can read.
    pub(super) newer: Option<u32>,
}

/// Why the database could not be opened or is not to be used.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Another process has it.
    InUse,
    /// A later version wrote it.
    Newer(u32),
    /// The file system takes nothing more, or the system has no thread or descriptor for it now, which says nothing against the database.
    NoRoom(io::Error),
    /// It is damaged, with what could be read.
    Damaged { why: String, readable: Box<Image> },
}

impl From<sled::Error> for Refusal {
    fn from(error: sled::Error) -> Self {
        match error {
            sled::Error::Io(error) if wants_room(&error) || host::is_shortage(&error) => Refusal::NoRoom(error),
            error => Refusal::Damaged { why: error.to_string(), readable: Box::default() },
        }
    }
}

impl Shelf {
    /// Opens or creates the database in `dir`, however long that takes and whether or not it panics.
    pub(super) fn open_here(dir: &Path) -> Result<(Self, Image), Refusal> {
        // sled goes on without a thread that it does not get, and without any of them it never answers.
        if !HAS_POOL.load(Ordering::Relaxed) {
            host::room_for_tasks(POOL_THREADS).map_err(Refusal::NoRoom)?;
        }
        let fresh = !dir.exists();
        let began = Instant::now();
        let (db, _late_timers) = loop {
            // sled's seven threads wake up every second for nothing to do. They are born here, with the first segment that
            // is read or written, and inherit this thread's leave to be late for timers; work wakes them at once.
            let late_timers = LateTimers::allow(POOL_WAKES_WITHIN);
            let config = sled::Config::new().path(dir).cache_capacity(CACHE_BYTES).segment_size(LOG_SEGMENT_BYTES);
            match config.flush_every_ms(None).open() {
                Ok(db) => break (db, late_timers),
                // 0.34.7 gives a refused lock no kind of its own.
                Err(sled::Error::Io(error)) if error.to_string().contains("could not acquire lock") => {
                    if began.elapsed() > LOCK_PATIENCE {
                        return Err(Refusal::InUse);
                    }
                    // This sleep is not to be late: past the limit a sound database would pass for a damaged one.
                    drop(late_timers);
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        };
        HAS_POOL.store(true, Ordering::Relaxed);
        let shelf = Shelf::with_trees(dir, db)?;
        if fresh {
            let parent = dir.parent().unwrap_or(dir);
            shelf.set_number(SCHEMA, codec::TREES.into()).and_then(|()| shelf.persist())?;
            sync_directory(dir).and_then(|()| sync_directory(parent)).map_err(|error| reported(&error))?;
        }
        let image = shelf.reader().scan()?;
        if shelf.number(SCHEMA)?.is_none() {
            return Err(Refusal::Damaged { why: "it opens empty although it is not new".into(), readable: Box::new(image) });
        }
        if let Some(version) = shelf.number(SCHEMA)?.filter(|version| *version > u64::from(codec::TREES)) {
            return Err(Refusal::Newer(u32::try_from(version).unwrap_or(u32::MAX)));
        }
        if let Some(version) = image.newer {
            return Err(Refusal::Newer(version));
        }
        if image.damaged > 0 {
            return Err(Refusal::Damaged { why: format!("{} of its records are damaged", image.damaged), readable: Box::new(image) });
        }
        match shelf.probe() {
            Ok(()) => Ok((shelf, image)),
            Err(sled::Error::Io(error)) if wants_room(&error) => Err(Refusal::NoRoom(error)),
            Err(error) => Err(Refusal::Damaged { why: error.to_string(), readable: Box::new(image) }),
        }
    }

    fn with_trees(dir: &Path, db: sled::Db) -> sled::Result<Self> {
        let log = File::open(dir.join("db"))?;
        let (live, history) = (db.open_tree("live")?, db.open_tree("history")?);
        let (names, hooks, meta) = (db.open_tree("names")?, db.open_tree("hooks")?, db.open_tree("meta")?);
        let mut shelf = Shelf { dir: dir.to_owned(), db, live, history, names, hooks, meta, log, history_count: 0 };
        shelf.history_count = shelf.number(HISTORY_COUNT)?.unwrap_or(0);
        Ok(shelf)
    }

    /// Writes something, so that a database which reads and does not write is found out now.
    fn probe(&self) -> sled::Result<()> {
        self.set_number(OPENED, self.number(OPENED)?.unwrap_or(0) + 1)
    }

    /// Puts a live grant; the value that was there is replaced.
    pub(super) fn put(&mut self, alloc_id: &AllocId, seq: u64, payload: &[u8]) -> Result<(), StoreError> {
        self.run(|shelf| shelf.live.insert(alloc_id.as_str(), codec::stamp(alloc_id.as_str().as_bytes(), seq, payload)).map(drop))
    }

    /// Moves a grant from the live ones into the history. Doing so twice changes nothing.
    pub(super) fn retire(&mut self, grant: &Grant, seq: u64, payload: &[u8]) -> Result<(), StoreError> {
        let key = history_key(grant);
        let new = self.run(|shelf| {
            let old = shelf.history.insert(key.as_slice(), codec::stamp(&key, seq, payload))?;
            shelf.live.remove(grant.alloc_id.as_str())?;
            Ok(old.is_none())
        })?;
        self.history_count += u64::from(new);
        Ok(())
    }

    /// Removes a live grant that the journal says is none.
    pub(super) fn discard(&mut self, alloc_id: &AllocId) -> Result<(), StoreError> {
        self.run(|shelf| shelf.live.remove(alloc_id.as_str()).map(drop))
    }

    /// Remembers a device's name.
    pub(super) fn name(&mut self, key: &str, seq: u64, id: &DeviceId) -> Result<(), StoreError> {
        self.run(|shelf| shelf.names.insert(key, codec::stamp(key.as_bytes(), seq, id.as_str().as_bytes())).map(drop))
    }

    /// Remembers how far a hook has come; one that is done goes.
    pub(super) fn hook(&mut self, hook: &OwedHook, seq: u64, payload: &[u8]) -> Result<(), StoreError> {
        let key = hook_key(hook);
        self.run(|shelf| match hook.state {
            HookState::Done => shelf.hooks.remove(&key).map(drop),
            HookState::Due | HookState::Failed { .. } => shelf.hooks.insert(&key, codec::stamp(&key, seq, payload)).map(drop),
        })
    }

    /// Trims the history, then makes everything up to `applied` survive a power cut.
    pub(super) fn checkpoint(&mut self, applied: u64, now: Timestamp, retention: Retention) -> Result<(), StoreError> {
        let step = u64::try_from(CLOCK_STEP_MAX.as_millis()).unwrap_or(u64::MAX);
        let now = self.run(|shelf| Ok(shelf.number(CLOCK)?.map_or(now.0, |last| now.0.min(last + step))))?;
        let old = self.run(|shelf| shelf.outlived(now, retention))?;
        self.history_count = self.history_count.saturating_sub(old.len() as u64);
        self.run(|shelf| {
            // Before they go: what is counted is there, whatever a power cut leaves of this.
            shelf.set_number(HISTORY_COUNT, shelf.history_count)?;
            if let Some(latest) = old.last() {
                let known = shelf.number(FORGOTTEN)?.unwrap_or(0);
                shelf.set_number(FORGOTTEN, released_at(latest).max(known))?;
            }
            for key in old {
                shelf.history.remove(key)?;
            }
            shelf.set_number(APPLIED, applied)?;
            shelf.set_number(CLOCK, now)?;
            shelf.persist()
        })
    }

    fn persist(&self) -> sled::Result<()> {
        note("flush");
        self.db.flush()?;
        // Large pages are files that sled does not sync either. There are none as long as grants are small.
        let blobs = self.dir.join("blobs");
        for blob in fs::read_dir(&blobs)? {
            match File::open(blob?.path()) {
                Ok(blob) => blob.sync_data()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        File::open(blobs)?.sync_all()?;
        // In simulated power cuts flush() alone lost up to everything; with this, nothing in 46 cuts.
        Ok(sync_data(&self.log)?)
    }

    /// Keys of released grants that are to be forgotten, the earliest release first.
    fn outlived(&self, now: u64, retention: Retention) -> sled::Result<Vec<sled::IVec>> {
        let oldest = now.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX));
        let excess = self.history_count.saturating_sub(retention.grants);
        let mut old = Vec::new();
        for key in self.history.iter().keys() {
            let key = key?;
            if old.len() as u64 >= excess && released_at(&key) >= oldest {
                break;
            }
            old.push(key);
        }
        Ok(old)
    }

    /// Counts the released grants, and tells how many of those that the last checkpoint had are gone. After a power cut sled
    /// has, once in some thousand times, lost single records of a checkpoint without a word. All of them are read: 100,000 in
    /// half a second.
    pub(super) fn recount(&mut self) -> Result<u64, StoreError> {
        let counted = self.run(|shelf| shelf.history.iter().keys().try_fold(0, |count, key| key.map(|_| count + 1)))?;
        Ok(std::mem::replace(&mut self.history_count, counted).saturating_sub(counted))
    }

    /// The database for whoever wants to read it.
    pub(super) fn reader(&self) -> Reader {
        let Shelf { dir, live, history, names, hooks, meta, .. } = self;
        let (live, history, names, hooks) = (live.clone(), history.clone(), names.clone(), hooks.clone());
        Reader { dir: dir.clone(), live, history, names, hooks, meta: meta.clone() }
    }

    /// Which of `wanted` are among the released grants, and by which entry. All of them are looked at: by a clock that was
    /// set back the latest release is among the oldest.
    pub(super) fn released_among(&self, wanted: &BTreeSet<AllocId>) -> Result<BTreeMap<AllocId, u64>, StoreError> {
        let found = guard(|| {
            let mut found = BTreeMap::new();
            for pair in &self.history {
                let (key, value) = pair?;
                if let Some(id) = released_id(&key).filter(|id| wanted.contains(id))
                    && let Ok(record) = codec::unstamp(&key, &value)
                {
                    found.entry(id).or_insert(record.seq);
                }
            }
            Ok(found)
        });
        found.map_err(|error| failure(&self.dir, error))
    }

    fn number(&self, key: &str) -> sled::Result<Option<u64>> {
        number(&self.meta, key)
    }

    fn set_number(&self, key: &str, number: u64) -> sled::Result<()> {
        self.meta.insert(key, &number.to_le_bytes()).map(drop)
    }

    fn run<T>(&mut self, operation: impl FnOnce(&mut Self) -> sled::Result<T>) -> Result<T, StoreError> {
        #[cfg(test)]
        if self.dir.join("unwritable").exists() {
            return Err(failure(&self.dir, sled::Error::ReportableBug("as after a power cut".into())));
        }
        guard(|| operation(self)).map_err(|error| failure(&self.dir, error))
    }

    /// Writes as a later version of Holdfast would: its trees, or one record.
    #[cfg(test)]
    pub(super) fn write_newer_for_test(&self, what: &str) {
        if what == "trees" {
            self.set_number(SCHEMA, u64::from(codec::TREES) + 1).unwrap();
        } else {
            self.live.insert("later", codec::stamp(b"later", 1_000, br#"{"v":9,"record":{"entry":"unheard-of"}}"#)).unwrap();
        }
        self.persist().unwrap();
    }

    /// Gives a value to another key too, as sled does after some power cuts.
    #[cfg(test)]
    pub(super) fn misplace_for_test(&self, alloc_id: &AllocId, key: &str) {
        let value = self.live.get(alloc_id.as_str()).unwrap().unwrap();
        self.live.insert(key, value).unwrap();
    }

    /// Loses a released grant, as sled does after some power cuts.
    #[cfg(test)]
    pub(super) fn lose_for_test(&self) {
        self.history.pop_min().unwrap();
        self.persist().unwrap();
    }

    /// Changes a byte of a live grant, as a disk may.
    #[cfg(test)]
    pub(super) fn damage_for_test(&self, alloc_id: &AllocId) {
        let mut value = self.live.get(alloc_id.as_str()).unwrap().unwrap().to_vec();
        value[20] ^= 1;
        self.live.insert(alloc_id.as_str(), value).unwrap();
    }

    /// Closes the database; sled writes what it has buffered.
    pub(super) fn close(self) {
        // A panic here would come after everything that matters.
        drop(guard(move || {
            drop(self);
            Ok(())
        }));
    }
}

/// The time with which a key of the history begins.
fn released_at(key: &[u8]) -> u64 {
    key.get(..8).and_then(|at| at.try_into().ok()).map_or(0, u64::from_be_bytes)
}

fn number(meta: &sled::Tree, key: &str) -> sled::Result<Option<u64>> {
    Ok(meta.get(key)?.and_then(|value| value.as_ref().try_into().ok()).map(u64::from_le_bytes))
}

/// Runs something of sled's; a panic becomes an error.
pub(super) fn guard<T>(operation: impl FnOnce() -> sled::Result<T>) -> sled::Result<T> {
    catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(sled::Error::ReportableBug(text.unwrap_or_else(|| "it panicked".into())))
    })
}

/// What has failed of the database in `dir`.
fn failure(dir: &Path, error: sled::Error) -> StoreError {
    match error {
        sled::Error::Io(source) if wants_room(&source) => StoreError::io("write", dir)(source),
        error => StoreError::Database { path: dir.to_owned(), why: error.to_string() },
    }
}

fn reported(error: &StoreError) -> sled::Error {
    sled::Error::ReportableBug(error.to_string())
}
