//! sled: the only file that opens it.
//!
//! sled 0.34.7 is fast and small, but: its `flush()` survives a kill and not a power cut (no fsync), a damaged log tail rolls back
//! silently, and some damaged images panic at open. So every call runs under `catch_unwind`, opening reads every live record
//! with its crc, a checkpoint adds the fdatasync, and a damaged database is renamed and rebuilt from the journal. Nothing is
//! repaired in place: deleting a bad snapshot of sled's can leave an empty database without an error.

use super::failure::{BLOBS, check_files, failure, guard};
use super::length::Length;
use super::reader::{DatabaseSnapshot, Reader, history_key, hook_key};
use crate::domain::{AllocId, DeviceId, Grant, HookState, PendingHook, Retention, Timestamp};
use crate::host::{self, TimerSlack};
use crate::store::StoreError;
use crate::store::journal::codec;
use crate::store::layout::{note, sync_data, sync_directory};
use std::collections::BTreeSet;
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

/// Threads of sled's pool, one for all databases of the process, and one that opens.
const POOL_THREADS: usize = 8;
/// Whether the pool is there.
static HAS_POOL: AtomicBool = AtomicBool::new(false);

pub(super) const APPLIED: &str = "applied";
const OPENED: &str = "opened";
pub(super) const SCHEMA: &str = "schema";
const HISTORY_COUNT: &str = "history-count";
const HISTORY_BYTES: &str = "history-bytes";
const CLOCK: &str = "clock";
pub(super) const FORGOTTEN: &str = "forgotten";

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    pub(super) dir: PathBuf,
    db: sled::Db,
    pub(super) live: sled::Tree,
    pub(super) past: sled::Tree,
    pub(super) names: sled::Tree,
    pub(super) hooks: sled::Tree,
    pub(super) meta: sled::Tree,
    /// sled's own log, opened once more for the fdatasync that sled does not do.
    log: File,
    pub(super) history: Length,
    /// Everything up to this sequence number was there at the last checkpoint.
    applied: u64,
    /// What went into the history since.
    since_checkpoint: BTreeSet<Vec<u8>>,
    /// One for each reader, and this one: as long as there are any, nobody may take the files away.
    pub(super) readers: Arc<()>,
}

/// A change of the database, with what it needs of the journal.
#[derive(Debug)]
pub(crate) enum Update {
    /// A live grant; the former value is replaced.
    Live(AllocId, Vec<u8>),
    /// A grant that moves from the live ones into the history. To do so twice changes nothing.
    Released(Arc<Grant>, Vec<u8>),
    /// A live grant that the journal does not have.
    Discard(AllocId),
    /// The id of a device, by its physical key.
    Name(String, DeviceId),
    /// A name that is forgotten.
    ForgetName(String),
    /// The state of a hook; one that is done is deleted.
    Hook(Box<PendingHook>, Vec<u8>),
}

impl Database {
    /// Opens or creates the database in `dir`.
    pub(super) fn open_here(dir: &Path) -> Result<(Self, DatabaseSnapshot), StoreError> {
        let failed = |error: sled::Error| failure(dir, &error);
        let damaged = |why: String| StoreError::Database { path: dir.to_owned(), why };
        let newer = |version| StoreError::Newer { path: dir.to_owned(), version };
        // sled goes on without a thread that it does not get, and without any of them it never answers.
        if !HAS_POOL.load(Ordering::Relaxed) {
            host::check_task_limit(POOL_THREADS).map_err(StoreError::io("open", dir))?;
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
                Err(sled::Error::Io(error))
                    if error.to_string().contains("could not acquire lock") =>
                {
                    if began.elapsed() > LOCK_PATIENCE {
                        return Err(StoreError::InUse {
                            path: dir.parent().unwrap_or(dir).to_owned(),
                        });
                    }
                    // This sleep is not to be late: past the limit a sound database would pass for a damaged one.
                    drop(late_timers);
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(failed(error)),
            }
        };
        HAS_POOL.store(true, Ordering::Relaxed);
        let database = Database::with_trees(dir, db).map_err(failed)?;
        if fresh {
            let noted =
                database.set_number(SCHEMA, codec::TREES.into()).and_then(|()| database.persist());
            noted.map_err(failed)?;
            sync_directory(dir).and_then(|()| sync_directory(dir.parent().unwrap_or(dir)))?;
        }
        let snapshot = database.reader().snapshot()?;
        let schema = database
            .number(SCHEMA)
            .map_err(failed)?
            .ok_or_else(|| damaged("it opens empty although it is not new".into()))?;
        if schema > u64::from(codec::TREES) {
            return Err(newer(u32::try_from(schema).unwrap_or(u32::MAX)));
        }
        if let Some(version) = snapshot.newer {
            return Err(newer(version));
        }
        if snapshot.damaged > 0 {
            return Err(damaged(format!("{} of its records are damaged", snapshot.damaged)));
        }
        // A database that reads and does not write is found now.
        let opened = database
            .number(OPENED)
            .and_then(|opened| database.set_number(OPENED, opened.unwrap_or(0) + 1));
        opened.map_err(failed)?;
        Ok((database, snapshot))
    }

    pub(super) fn with_trees(dir: &Path, db: sled::Db) -> sled::Result<Self> {
        let log = File::open(dir.join("db"))?;
        let (live, past) = (db.open_tree("live")?, db.open_tree("history")?);
        let (names, hooks, meta) =
            (db.open_tree("names")?, db.open_tree("hooks")?, db.open_tree("meta")?);
        let [count, bytes, applied] =
            [HISTORY_COUNT, HISTORY_BYTES, APPLIED].map(|key| number(&meta, key));
        let history = Length { count: count?.unwrap_or(0), bytes: bytes?.unwrap_or(0) };
        let applied = applied?.unwrap_or(0);
        let (dir, since_checkpoint, readers) = (dir.to_owned(), BTreeSet::new(), Arc::default());
        Ok(Database {
            dir,
            db,
            live,
            past,
            names,
            hooks,
            meta,
            log,
            history,
            applied,
            since_checkpoint,
            readers,
        })
    }

    /// Applies one change, which the journal has as the entry `seq`.
    pub(crate) fn write(&mut self, seq: u64, update: &Update) -> Result<(), StoreError> {
        self.run(|database| match update {
            Update::Live(id, payload) => database
                .live
                .insert(id.as_str(), codec::stamp(id.as_str().as_bytes(), seq, payload))
                .map(drop),
            Update::Released(grant, payload) => database.release(grant, seq, payload),
            Update::Discard(id) => database.live.remove(id.as_str()).map(drop),
            Update::Name(key, id) => database
                .names
                .insert(key, codec::stamp(key.as_bytes(), seq, id.as_str().as_bytes()))
                .map(drop),
            Update::ForgetName(key) => database.names.remove(key).map(drop),
            Update::Hook(hook, payload) => {
                let key = hook_key(hook);
                match hook.state {
                    HookState::Done => database.hooks.remove(&key).map(drop),
                    HookState::Due | HookState::Failed { .. } => {
                        database.hooks.insert(&key, codec::stamp(&key, seq, payload)).map(drop)
                    }
                }
            }
        })
    }

    fn release(&mut self, grant: &Grant, seq: u64, payload: &[u8]) -> sled::Result<()> {
        let key = history_key(grant);
        let value = codec::stamp(&key, seq, payload);
        let old = self.past.insert(key.as_slice(), value.as_slice())?;
        self.history.add(&key, &value);
        let is_new = self.since_checkpoint.insert(key.clone());
        // A record after the last checkpoint of a process that was killed is there, and not counted.
        let is_counted = |old: &[u8]| {
            !is_new || codec::unstamp(&key, old).is_ok_and(|record| record.seq <= self.applied)
        };
        if let Some(old) = old.filter(|old| is_counted(old)) {
            self.history.remove(&key, &old);
        }
        self.live.remove(grant.alloc_id.as_str()).map(drop)
    }

    /// Trims the history, beside so many bytes of what is live, then makes everything up to `applied` survive a power cut.
    pub(crate) fn checkpoint(
        &mut self,
        applied: u64,
        now: Timestamp,
        retention: Retention,
        live: u64,
    ) -> Result<(), StoreError> {
        let step = u64::try_from(CLOCK_STEP_MAX.as_millis()).unwrap_or(u64::MAX);
        let now = self.run(|database| {
            Ok(database.number(CLOCK)?.map_or(now.0, |last| now.0.min(last + step)))
        })?;
        let (old, left) =
            self.run(|database| database.outlived(now, retention, retention.records(live)))?;
        self.run(|database| {
            // At once, and before they go: what is counted is there, whatever a power cut leaves of this.
            let mut numbers = Database::length(left);
            numbers.extend([(APPLIED, applied), (CLOCK, now)]);
            if let Some(latest) = old.last() {
                numbers.push((
                    FORGOTTEN,
                    released_at(latest).max(database.number(FORGOTTEN)?.unwrap_or(0)),
                ));
            }
            database.set_numbers(&numbers)?;
            (database.history, database.applied) = (left, applied);
            database.since_checkpoint.clear();
            for key in old {
                database.past.remove(key)?;
            }
            database.persist()
        })
    }

    /// Notes that releases up to this one may be forgotten.
    pub(crate) fn forget_until(&mut self, at: Timestamp) -> Result<(), StoreError> {
        self.run(|database| {
            let known = database.number(FORGOTTEN)?.unwrap_or(0);
            database.set_number(FORGOTTEN, at.0.max(known))
        })
    }

    /// What is noted of the length of the history.
    pub(super) fn length(Length { count, bytes }: Length) -> Vec<(&'static str, u64)> {
        vec![(HISTORY_COUNT, count), (HISTORY_BYTES, bytes)]
    }

    pub(super) fn persist(&self) -> sled::Result<()> {
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
    fn outlived(
        &self,
        now: u64,
        retention: Retention,
        records: u64,
    ) -> sled::Result<(Vec<sled::IVec>, Length)> {
        let oldest =
            now.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX));
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
    pub(crate) fn recount(&mut self) -> Result<u64, StoreError> {
        let counted = self.run(|database| {
            let mut counted = Length::default();
            for pair in &database.past {
                let (key, value) = pair?;
                counted.add(&key, &value);
            }
            Ok(counted)
        })?;
        Ok(std::mem::replace(&mut self.history, counted).count.saturating_sub(counted.count))
    }

    /// The database for whoever wants to read it.
    pub(crate) fn reader(&self) -> Reader {
        let Database { dir, live, past, names, hooks, meta, .. } = self;
        let (live, history, names, hooks) =
            (live.clone(), past.clone(), names.clone(), hooks.clone());
        Reader {
            dir: dir.clone(),
            live,
            history,
            names,
            hooks,
            meta: meta.clone(),
            _open: Arc::clone(&self.readers),
        }
    }

    fn number(&self, key: &str) -> sled::Result<Option<u64>> {
        number(&self.meta, key)
    }

    /// All of them or none.
    pub(super) fn set_numbers(&self, numbers: &[(&str, u64)]) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        numbers.iter().for_each(|(key, number)| batch.insert(*key, &number.to_le_bytes()));
        self.meta.apply_batch(batch)
    }

    pub(super) fn set_number(&self, key: &str, number: u64) -> sled::Result<()> {
        self.meta.insert(key, &number.to_le_bytes()).map(drop)
    }

    fn run<T>(
        &mut self,
        operation: impl FnOnce(&mut Self) -> sled::Result<T>,
    ) -> Result<T, StoreError> {
        #[cfg(test)]
        if self.dir.join("unwritable").exists() {
            return Err(failure(
                &self.dir,
                &sled::Error::ReportableBug("as after a power cut".into()),
            ));
        }
        guard(|| operation(self)).map_err(|error| failure(&self.dir, &error))
    }

    /// Closes the database; sled writes what it has buffered.
    pub(crate) fn close(self) {
        // A panic here would come after everything that matters.
        drop(guard(move || {
            drop(self);
            Ok(())
        }));
    }
}

/// As every database of ours is opened.
pub(super) fn options(dir: &Path) -> sled::Config {
    sled::Config::new()
        .path(dir)
        .cache_capacity(CACHE_BYTES)
        .segment_size(LOG_SEGMENT_BYTES)
        .flush_every_ms(None)
}

/// The time with which a key of the history begins.
fn released_at(key: &[u8]) -> u64 {
    key.get(..8).and_then(|at| at.try_into().ok()).map_or(0, u64::from_be_bytes)
}

pub(super) fn number(meta: &sled::Tree, key: &str) -> sled::Result<Option<u64>> {
    Ok(meta.get(key)?.and_then(|value| value.as_ref().try_into().ok()).map(u64::from_le_bytes))
}
