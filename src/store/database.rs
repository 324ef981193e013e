//! sled, behind a guard: the only file that names it.
//!
//! sled 0.34.7 is fast and small, and must not be trusted further than it deserves: its `flush()` survives a kill but
//! not a power cut (no fsync), a damaged log tail rolls back in silence, and some damaged images panic at open. So
//! everything here runs under `catch_unwind`, opening has a time limit and reads every live record with its crc and
//! sequence number, a checkpoint adds the fdatasync, and whatever looks wrong is renamed away and rebuilt from the
//! journal. Nothing is ever repaired in place: deleting a bad snapshot of sled's can leave an empty database without an
//! error.

mod anew;
mod length;
mod reader;
mod refusal;
#[cfg(test)]
mod testing;

pub(super) use self::length::Length;
pub(super) use self::reader::Reader;
use self::reader::{LOOKS, history_key, hook_key, released_id};
#[cfg(test)]
pub(super) use self::refusal::refusal_of;
pub(super) use self::refusal::{Refusal, guard};
use self::refusal::{check_files, failure};
use super::StoreError;
use super::codec;
use super::layout::{note, sync_data, sync_directory};
use super::replay::OwedAt;
use crate::domain::{AllocId, DeviceId, Grant, HookState, PendingHook, Retention, Timestamp};
use crate::host::{self, TimerSlack};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
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

/// The directory of sled's large pages.
const BLOBS: &str = "blobs";

/// Threads of sled's pool, one for all databases of the process, and one that opens.
const POOL_THREADS: usize = 8;
/// Whether the pool is there.
static HAS_POOL: AtomicBool = AtomicBool::new(false);

const APPLIED: &str = "applied";
const OPENED: &str = "opened";
const SCHEMA: &str = "schema";
const HISTORY_COUNT: &str = "history-count";
/// The bytes of the history's records, and how many of them these are: an earlier version counts them and not their bytes.
const HISTORY_BYTES: &str = "history-bytes";
const HISTORY_BYTES_OF: &str = "history-bytes-of";
const CLOCK: &str = "clock";
const FORGOTTEN: &str = "forgotten";

/// An open database.
#[derive(Debug)]
pub(super) struct Shelf {
    dir: PathBuf,
    db: sled::Db,
    live: sled::Tree,
    past: sled::Tree,
    names: sled::Tree,
    hooks: sled::Tree,
    meta: sled::Tree,
    /// sled's own log, opened once more for the fdatasync that sled does not do.
    log: File,
    history: Length,
    /// Whether these are the bytes of the records; an earlier version has not counted them.
    is_measured: bool,
    /// Everything up to this sequence number was there at the last checkpoint.
    applied: u64,
    /// What went into the history since.
    since_checkpoint: BTreeSet<Vec<u8>>,
    /// One for each reader, and this one: as long as there are any, nobody may take the files away.
    readers: Arc<()>,
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

impl Shelf {
    /// Opens or creates the database in `dir`, however long that takes and whether or not it panics.
    pub(super) fn open_here(dir: &Path) -> Result<(Self, Image), Refusal> {
        // sled goes on without a thread that it does not get, and without any of them it never answers.
        if !HAS_POOL.load(Ordering::Relaxed) {
            host::check_task_limit(POOL_THREADS).map_err(Refusal::NoRoom)?;
        }
        let fresh = !dir.exists();
        check_files(dir)?;
        let began = Instant::now();
        let (db, _late_timers) = loop {
            // sled's seven threads wake up every second for nothing to do. They are born here, with the first segment that
            // is read or written, and inherit this thread's leave to be late for timers; work wakes them at once.
            let late_timers = TimerSlack::set(POOL_WAKES_WITHIN);
            match options(dir).open() {
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
            sync_directory(dir).and_then(|()| sync_directory(parent)).map_err(|error| Refusal::Unable(error.to_string()))?;
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
            Err(error) => Err(Refusal::of(&error, image)),
        }
    }

    fn with_trees(dir: &Path, db: sled::Db) -> sled::Result<Self> {
        let log = File::open(dir.join("db"))?;
        let (live, past) = (db.open_tree("live")?, db.open_tree("history")?);
        let (names, hooks, meta) = (db.open_tree("names")?, db.open_tree("hooks")?, db.open_tree("meta")?);
        let [count, bytes, bytes_of, applied] = [HISTORY_COUNT, HISTORY_BYTES, HISTORY_BYTES_OF, APPLIED].map(|key| number(&meta, key));
        let history = Length { count: count?.unwrap_or(0), bytes: bytes?.unwrap_or(0) };
        let (is_measured, applied) = (bytes_of?.unwrap_or(0) == history.count, applied?.unwrap_or(0));
        let (dir, since_checkpoint, readers) = (dir.to_owned(), BTreeSet::new(), Arc::default());
        Ok(Shelf { dir, db, live, past, names, hooks, meta, log, history, is_measured, applied, since_checkpoint, readers })
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
        let value = codec::stamp(&key, seq, payload);
        self.run(|shelf| {
            let old = shelf.past.insert(key.as_slice(), value.as_slice())?;
            shelf.history.add(&key, &value);
            let is_new = shelf.since_checkpoint.insert(key.clone());
            // What came after the last checkpoint of a process that was killed is there, and not counted.
            let is_counted = |old: &[u8]| !is_new || codec::unstamp(&key, old).is_ok_and(|record| record.seq <= shelf.applied);
            if let Some(old) = old.filter(|old| is_counted(old)) {
                shelf.history.remove(&key, &old);
            }
            shelf.live.remove(grant.alloc_id.as_str()).map(drop)
        })
    }

    /// Removes a live grant that the journal says is none.
    pub(super) fn discard(&mut self, alloc_id: &AllocId) -> Result<(), StoreError> {
        self.run(|shelf| shelf.live.remove(alloc_id.as_str()).map(drop))
    }

    /// Remembers a device's name.
    pub(super) fn name(&mut self, key: &str, seq: u64, id: &DeviceId) -> Result<(), StoreError> {
        self.run(|shelf| shelf.names.insert(key, codec::stamp(key.as_bytes(), seq, id.as_str().as_bytes())).map(drop))
    }

    /// Forgets a device's name.
    pub(super) fn forget_name(&mut self, key: &str) -> Result<(), StoreError> {
        self.run(|shelf| shelf.names.remove(key).map(drop))
    }

    /// Remembers how far a hook has come; one that is done goes.
    pub(super) fn hook(&mut self, hook: &PendingHook, seq: u64, payload: &[u8]) -> Result<(), StoreError> {
        let key = hook_key(hook);
        self.run(|shelf| match hook.state {
            HookState::Done => shelf.hooks.remove(&key).map(drop),
            HookState::Due | HookState::Failed { .. } => shelf.hooks.insert(&key, codec::stamp(&key, seq, payload)).map(drop),
        })
    }

    /// Trims the history, beside so many bytes of what is live, then makes everything up to `applied` survive a power cut.
    pub(super) fn checkpoint(&mut self, applied: u64, now: Timestamp, retention: Retention, live: u64) -> Result<(), StoreError> {
        let step = u64::try_from(CLOCK_STEP_MAX.as_millis()).unwrap_or(u64::MAX);
        let now = self.run(|shelf| Ok(shelf.number(CLOCK)?.map_or(now.0, |last| now.0.min(last + step))))?;
        if !self.is_measured {
            self.recount()?;
        }
        let (old, left) = self.run(|shelf| shelf.outlived(now, retention, retention.records(live)))?;
        self.run(|shelf| {
            // At once, and before they go: what is counted is there, whatever a power cut leaves of this.
            let mut numbers = Shelf::length(left);
            numbers.extend([(APPLIED, applied), (CLOCK, now)]);
            if let Some(latest) = old.last() {
                numbers.push((FORGOTTEN, released_at(latest).max(shelf.number(FORGOTTEN)?.unwrap_or(0))));
            }
            shelf.set_numbers(&numbers)?;
            (shelf.history, shelf.applied) = (left, applied);
            shelf.since_checkpoint.clear();
            for key in old {
                shelf.past.remove(key)?;
            }
            shelf.persist()
        })
    }

    /// Notes that releases up to this one may be forgotten.
    pub(super) fn forget_until(&mut self, at: Timestamp) -> Result<(), StoreError> {
        self.run(|shelf| {
            let known = shelf.number(FORGOTTEN)?.unwrap_or(0);
            shelf.set_number(FORGOTTEN, at.0.max(known))
        })
    }

    /// What is noted of the length of the history.
    fn length(Length { count, bytes }: Length) -> Vec<(&'static str, u64)> {
        vec![(HISTORY_COUNT, count), (HISTORY_BYTES, bytes), (HISTORY_BYTES_OF, count)]
    }

    fn persist(&self) -> sled::Result<()> {
        note("flush");
        self.db.flush()?;
        // Large pages are files that sled does not sync either. There are none as long as grants are small.
        let blobs = self.dir.join(BLOBS);
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

    /// Keys of released grants that are to be forgotten, the earliest release first, and how long the history is without them.
    fn outlived(&self, now: u64, retention: Retention, records: u64) -> sled::Result<(Vec<sled::IVec>, Length)> {
        let oldest = now.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX));
        let (mut old, mut left) = (Vec::new(), self.history);
        for pair in &self.past {
            let (key, value) = pair?;
            let is_too_long = left.count > retention.grants || left.bytes > records;
            if !is_too_long && released_at(&key) >= oldest {
                break;
            }
            left.remove(&key, &value);
            old.push(key);
        }
        Ok((old, left))
    }

    /// Counts the released grants, and tells how many of those that the last checkpoint had are gone. After a power cut sled
    /// has, once in some thousand times, lost single records of a checkpoint without a word. All of them are read: 100,000 in
    /// half a second.
    pub(super) fn recount(&mut self) -> Result<u64, StoreError> {
        let counted = self.run(|shelf| {
            let mut counted = Length::default();
            for pair in &shelf.past {
                let (key, value) = pair?;
                counted.add(&key, &value);
            }
            Ok(counted)
        })?;
        self.is_measured = true;
        Ok(std::mem::replace(&mut self.history, counted).count.saturating_sub(counted.count))
    }

    /// The database for whoever wants to read it.
    pub(super) fn reader(&self) -> Reader {
        let Shelf { dir, live, past, names, hooks, meta, .. } = self;
        let (live, history, names, hooks) = (live.clone(), past.clone(), names.clone(), hooks.clone());
        Reader { dir: dir.clone(), live, history, names, hooks, meta: meta.clone(), _open: Arc::clone(&self.readers) }
    }

    /// Which of `wanted` are among the released grants, and by which entry. All of them are looked at: by a clock that was
    /// set back the latest release is among the oldest.
    pub(super) fn released_among(&self, wanted: &BTreeSet<AllocId>) -> Result<BTreeMap<AllocId, u64>, StoreError> {
        let found = guard(|| {
            let mut found = BTreeMap::new();
            for pair in &self.past {
                let (key, value) = pair?;
                if let Some(id) = released_id(&key).filter(|id| wanted.contains(id))
                    && let Ok(record) = codec::unstamp(&key, &value)
                {
                    found.entry(id).or_insert(record.seq);
                }
            }
            Ok(found)
        });
        found.map_err(|error| failure(&self.dir, &error))
    }

    fn number(&self, key: &str) -> sled::Result<Option<u64>> {
        number(&self.meta, key)
    }

    /// All of them or none.
    fn set_numbers(&self, numbers: &[(&str, u64)]) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        numbers.iter().for_each(|(key, number)| batch.insert(*key, &number.to_le_bytes()));
        self.meta.apply_batch(batch)
    }

    fn set_number(&self, key: &str, number: u64) -> sled::Result<()> {
        self.meta.insert(key, &number.to_le_bytes()).map(drop)
    }

    fn run<T>(&mut self, operation: impl FnOnce(&mut Self) -> sled::Result<T>) -> Result<T, StoreError> {
        #[cfg(test)]
        if self.dir.join("unwritable").exists() {
            return Err(failure(&self.dir, &sled::Error::ReportableBug("as after a power cut".into())));
        }
        guard(|| operation(self)).map_err(|error| failure(&self.dir, &error))
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

/// As every database of ours is opened.
fn options(dir: &Path) -> sled::Config {
    sled::Config::new().path(dir).cache_capacity(CACHE_BYTES).segment_size(LOG_SEGMENT_BYTES).flush_every_ms(None)
}

/// The time with which a key of the history begins.
fn released_at(key: &[u8]) -> u64 {
    key.get(..8).and_then(|at| at.try_into().ok()).map_or(0, u64::from_be_bytes)
}

fn number(meta: &sled::Tree, key: &str) -> sled::Result<Option<u64>> {
    Ok(meta.get(key)?.and_then(|value| value.as_ref().try_into().ok()).map(u64::from_le_bytes))
}
