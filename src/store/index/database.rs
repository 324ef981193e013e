//! sled, and the workarounds for it. This is the only file that opens it.
//!
//! sled 0.34.7 is fast and small, with three faults. `flush()` survives a kill and not a power cut,
//! since it does not sync. A damaged log tail is rolled back without an error. Some damaged files
//! make it panic. So every call runs under `catch_unwind`, opening checks the crc of every live
//! record, and a checkpoint adds the fdatasync. A damaged database is quarantined and rebuilt from
//! the journal. It is never repaired in place: deleting a bad snapshot file can leave an empty
//! database without an error.

use super::failure::{BLOBS, check_files, failure, guard};
use super::history_size::HistorySize;
use super::reader::{DatabaseSnapshot, Reader, history_key, hook_key};
use super::work::Update;
use crate::domain::{Grant, HookState, Retention, Timestamp};
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

/// An ending process holds sled's lock until its last thread has exited.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// Timer slack of sled's threads.
const POOL_WAKES_WITHIN: Duration = Duration::from_secs(600);
/// sled's page cache, small because of the daemon's memory limit. In a test with 4000 grants and
/// 1000 live ones the process grew to 44 MB with 2 MiB and sled's default segments of 512 KiB, and
/// to 34 MB with these values. The rest is mostly glibc's: with `MALLOC_ARENA_MAX=1`,
/// `MALLOC_MMAP_THRESHOLD_=65536` and `MALLOC_TRIM_THRESHOLD_=65536` it stays at 13.5 MB.
const CACHE_BYTES: u64 = 256 * 1024;
/// The segments of sled's log. A page larger than a quarter of this (17 records of 1.9 KB) goes
/// into a file of its own below `blobs/`.
const LOG_SEGMENT_BYTES: usize = 128 * 1024;
/// The maximum progress of the clock between two checkpoints. A clock that is wrong by a year would
/// expire the whole history at once. With this limit it expires one day at each checkpoint, until
/// the clock is set.
const CLOCK_STEP_MAX: Duration = Duration::from_secs(24 * 3600);

/// Threads of sled's pool, which all databases of the process share, and one for opening.
const POOL_THREADS: usize = 8;
/// Whether the pool exists.
static HAS_POOL: AtomicBool = AtomicBool::new(false);

pub(super) const APPLIED: &str = "applied";
const OPENED: &str = "opened";
pub(super) const SCHEMA: &str = "schema";
const HISTORY_COUNT: &str = "history-count";
const HISTORY_BYTES: &str = "history-bytes";
const CLOCK: &str = "clock";
pub(super) const FORGOTTEN: &str = "forgotten";

/// The trees of a database.
#[derive(Debug, Clone)]
pub(super) struct Trees {
    pub(super) live: sled::Tree,
    pub(super) history: sled::Tree,
    pub(super) names: sled::Tree,
    pub(super) hooks: sled::Tree,
    pub(super) meta: sled::Tree,
}

impl Trees {
    fn open(db: &sled::Db) -> sled::Result<Self> {
        let [live, history, names, hooks, meta] =
            ["live", "history", "names", "hooks", "meta"].map(|name| db.open_tree(name));
        Ok(Trees { live: live?, history: history?, names: names?, hooks: hooks?, meta: meta? })
    }

    pub(super) fn all(&self) -> [&sled::Tree; 5] {
        [&self.live, &self.history, &self.names, &self.hooks, &self.meta]
    }
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    pub(super) dir: PathBuf,
    db: sled::Db,
    pub(super) trees: Trees,
    /// sled's log file, opened again for the fdatasync that sled omits.
    log: File,
    pub(super) history: HistorySize,
    /// The last entry at the last checkpoint.
    applied: u64,
    /// The keys that were added to the history since.
    since_checkpoint: BTreeSet<Vec<u8>>,
    /// Counts the readers. While there are any, the files may not be replaced.
    pub(super) readers: Arc<()>,
}

impl Database {
    /// Opens or creates the database in `dir`, and reads all of it but the history.
    pub(super) fn open_here(dir: &Path) -> Result<(Self, DatabaseSnapshot), StoreError> {
        let failed = |error: sled::Error| failure(dir, &error);
        let damaged = |why: String| StoreError::Database { path: dir.to_owned(), why };
        let newer = |version| StoreError::Newer { path: dir.to_owned(), version };
        // sled continues with fewer threads than it needs, and with none it never answers.
        if !HAS_POOL.load(Ordering::Relaxed) {
            host::check_task_limit(POOL_THREADS).map_err(StoreError::io("open", dir))?;
        }
        let fresh = !dir.exists();
        check_files(dir)?;
        let began = Instant::now();
        let (db, _timer_slack) = loop {
            // sled's seven threads wake up every second without work. They start here, with the
            // first segment that is read or written, and inherit this thread's timer slack. Work
            // wakes them at once.
            let timer_slack = TimerSlack::set(POOL_WAKES_WITHIN);
            match options(dir).open() {
                Ok(db) => break (db, timer_slack),
                // sled 0.34.7 has no error kind for a refused lock.
                Err(sled::Error::Io(error))
                    if error.to_string().contains("could not acquire lock") =>
                {
                    if began.elapsed() > LOCK_PATIENCE {
                        return Err(StoreError::InUse {
                            path: dir.parent().unwrap_or(dir).to_owned(),
                        });
                    }
                    // This sleep must be exact: after the time limit an intact database would count
                    // as failed.
                    drop(timer_slack);
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
            .ok_or_else(|| damaged("it is empty although it is not new".into()))?;
        if schema > u64::from(codec::TREES) {
            return Err(newer(u32::try_from(schema).unwrap_or(u32::MAX)));
        }
        if let Some(version) = snapshot.newer {
            return Err(newer(version));
        }
        if snapshot.damaged > 0 {
            return Err(damaged(format!("{} of its records are damaged", snapshot.damaged)));
        }
        // Detects a database that is readable and not writable.
        let opened = database
            .number(OPENED)
            .and_then(|opened| database.set_number(OPENED, opened.unwrap_or(0) + 1));
        opened.map_err(failed)?;
        Ok((database, snapshot))
    }

    pub(super) fn with_trees(dir: &Path, db: sled::Db) -> sled::Result<Self> {
        let (log, trees) = (File::open(dir.join("db"))?, Trees::open(&db)?);
        let stored = |key| Ok::<u64, sled::Error>(number(&trees.meta, key)?.unwrap_or(0));
        let history = HistorySize { count: stored(HISTORY_COUNT)?, bytes: stored(HISTORY_BYTES)? };
        let (applied, since_checkpoint, readers) =
            (stored(APPLIED)?, BTreeSet::new(), Arc::default());
        let dir = dir.to_owned();
        Ok(Database { dir, db, trees, log, history, applied, since_checkpoint, readers })
    }

    /// Applies the change of the journal's entry `seq`.
    pub(crate) fn write(&mut self, seq: u64, update: &Update) -> Result<(), StoreError> {
        self.run(|database| match update {
            Update::Live(id, payload) => database
                .trees
                .live
                .insert(id.as_str(), codec::stamp(id.as_str().as_bytes(), seq, payload))
                .map(drop),
            Update::Released(grant, payload) => database.release(grant, seq, payload),
            Update::Discard(id) => database.trees.live.remove(id.as_str()).map(drop),
            Update::Name(key, id) => database
                .trees
                .names
                .insert(key, codec::stamp(key.as_bytes(), seq, id.as_str().as_bytes()))
                .map(drop),
            Update::ForgetName(key) => database.trees.names.remove(key).map(drop),
            Update::Hook(hook, payload) => {
                let key = hook_key(hook);
                match hook.state {
                    HookState::Done => database.trees.hooks.remove(&key).map(drop),
                    HookState::Due | HookState::Failed { .. } => database
                        .trees
                        .hooks
                        .insert(&key, codec::stamp(&key, seq, payload))
                        .map(drop),
                }
            }
        })
    }

    fn release(&mut self, grant: &Grant, seq: u64, payload: &[u8]) -> sled::Result<()> {
        let key = history_key(grant);
        let value = codec::stamp(&key, seq, payload);
        let old = self.trees.history.insert(key.as_slice(), value.as_slice())?;
        self.history.add(&key, &value);
        let is_new = self.since_checkpoint.insert(key.clone());
        // A record that a killed process wrote after its last checkpoint exists, but is not
        // counted.
        let is_counted = |old: &[u8]| {
            !is_new || codec::unstamp(&key, old).is_ok_and(|record| record.seq <= self.applied)
        };
        if let Some(old) = old.filter(|old| is_counted(old)) {
            self.history.remove(&key, &old);
        }
        self.trees.live.remove(grant.alloc_id.as_str()).map(drop)
    }

    /// Removes expired history (`live_bytes` reduce its limit), then makes everything up to
    /// `applied` durable.
    pub(crate) fn checkpoint(
        &mut self,
        applied: u64,
        now: Timestamp,
        retention: Retention,
        live_bytes: u64,
    ) -> Result<(), StoreError> {
        let step = u64::try_from(CLOCK_STEP_MAX.as_millis()).unwrap_or(u64::MAX);
        let now = self.run(|database| {
            Ok(database.number(CLOCK)?.map_or(now.0, |last| now.0.min(last + step)))
        })?;
        let (old, left) =
            self.run(|database| database.expired(now, retention, retention.records(live_bytes)))?;
        self.run(|database| {
            // In one batch, before the removal: after a power cut the numbers never count more than
            // there is.
            let mut numbers = Database::size_numbers(left);
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
                database.trees.history.remove(key)?;
            }
            database.persist()
        })
    }

    /// Records that releases up to this time may be missing.
    pub(crate) fn forget_until(&mut self, at: Timestamp) -> Result<(), StoreError> {
        self.run(|database| {
            let known = database.number(FORGOTTEN)?.unwrap_or(0);
            database.set_number(FORGOTTEN, at.0.max(known))
        })
    }

    /// The stored numbers of the history's size.
    pub(super) fn size_numbers(
        HistorySize { count, bytes }: HistorySize,
    ) -> Vec<(&'static str, u64)> {
        vec![(HISTORY_COUNT, count), (HISTORY_BYTES, bytes)]
    }

    pub(super) fn persist(&self) -> sled::Result<()> {
        note("flush");
        self.db.flush()?;
        // sled does not sync large pages either. There are none as long as grants are small.
        let blobs = self.dir.join(BLOBS);
        for blob in fs::read_dir(&blobs)? {
            match File::open(blob?.path()) {
                Ok(blob) => blob.sync_data()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        File::open(blobs)?.sync_all()?;
        // In simulated power cuts flush() alone lost up to everything; with this, 0 of 46 cuts lost
        // anything.
        Ok(sync_data(&self.log)?)
    }

    /// The keys of expired releases, the earliest first, and the size of the history without them.
    fn expired(
        &self,
        now: u64,
        retention: Retention,
        records: u64,
    ) -> sled::Result<(Vec<sled::IVec>, HistorySize)> {
        let oldest =
            now.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX));
        let (mut old, mut left) = (Vec::new(), self.history);
        for pair in &self.trees.history {
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

    /// Counts the released grants. Returns how many of those at the last checkpoint are missing:
    /// after a power cut sled has, once in some thousand times, lost single records without an
    /// error. 100,000 records take half a second.
    pub(crate) fn recount(&mut self) -> Result<u64, StoreError> {
        let counted = self.run(|database| {
            let mut counted = HistorySize::default();
            for pair in &database.trees.history {
                let (key, value) = pair?;
                counted.add(&key, &value);
            }
            Ok(counted)
        })?;
        Ok(std::mem::replace(&mut self.history, counted).count.saturating_sub(counted.count))
    }

    /// Another view of the database, for a reader.
    pub(crate) fn reader(&self) -> Reader {
        let (dir, trees) = (self.dir.clone(), self.trees.clone());
        Reader { dir, trees, _in_use: Arc::clone(&self.readers) }
    }

    fn number(&self, key: &str) -> sled::Result<Option<u64>> {
        number(&self.trees.meta, key)
    }

    /// Sets all of them in one batch.
    pub(super) fn set_numbers(&self, numbers: &[(&str, u64)]) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        numbers.iter().for_each(|(key, number)| batch.insert(*key, &number.to_le_bytes()));
        self.trees.meta.apply_batch(batch)
    }

    pub(super) fn set_number(&self, key: &str, number: u64) -> sled::Result<()> {
        self.trees.meta.insert(key, &number.to_le_bytes()).map(drop)
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

    /// Closes the database. sled writes its buffers.
    pub(crate) fn close(self) {
        // A panic here is harmless: the last checkpoint is durable.
        drop(guard(move || {
            drop(self);
            Ok(())
        }));
    }
}

/// The options of every database.
pub(super) fn options(dir: &Path) -> sled::Config {
    sled::Config::new()
        .path(dir)
        .cache_capacity(CACHE_BYTES)
        .segment_size(LOG_SEGMENT_BYTES)
        .flush_every_ms(None)
}

/// The time of release in a key of the history.
fn released_at(key: &[u8]) -> u64 {
    key.get(..8).and_then(|at| at.try_into().ok()).map_or(0, u64::from_be_bytes)
}

pub(super) fn number(meta: &sled::Tree, key: &str) -> sled::Result<Option<u64>> {
    Ok(meta.get(key)?.and_then(|value| value.as_ref().try_into().ok()).map(u64::from_le_bytes))
}
