//! A second view of an open database, for queries and checks while the index thread writes.

use super::database::{APPLIED, FORGOTTEN, Trees, number};
use super::failure::{failure, guard};
use crate::domain::{AllocId, DeviceId, Entry, Grant, GrantState, PendingHook, Timestamp};
use crate::store::journal::codec::{self, Record};
use crate::store::notes::Notes;
use crate::store::{LivePayloads, StoreError};
use std::collections::BTreeSet;
use std::ops::Bound;
use std::path::PathBuf;
use std::sync::Arc;

/// How often each record is read. sled's cache evicts a page of one of its 256 shards only after 64
/// uses of the shard. A reader that touches each page once would keep the whole history in memory,
/// 100 MB and more. With some 17 records in a page, this many reads make every page evict the one
/// before: over 100,000 grants the process grows by 8 MB instead of 120.
pub(super) const READS_PER_RECORD: usize = 4;

/// The clock of a release may be this far behind the clock of its grant, if it was set in between.
const CLOCK_ERROR_MS: u64 = 24 * 3600 * 1000;

/// Keys that are read forwards before their records are read backwards.
const PAGE: usize = 256;

/// The content of the database without its history.
#[derive(Debug, Default)]
pub(crate) struct DatabaseSnapshot {
    /// The last entry at its last checkpoint.
    pub(crate) applied: u64,
    /// The highest sequence number in it.
    pub(crate) last: u64,
    /// Live grants: the sequence number of the latest entry, and the payload.
    pub(crate) live: LivePayloads,
    /// Names of devices, and hooks that have not run. It has no other notes.
    pub(crate) notes: Notes,
    /// Records that cannot be read.
    pub(crate) damaged: u64,
    /// The highest record version that only a later Holdfast can read.
    pub(crate) newer: Option<u32>,
}

impl DatabaseSnapshot {
    /// The entries after `seq`; `None` for a grant that cannot be decoded.
    pub(crate) fn entries_after(&self, seq: u64) -> impl Iterator<Item = (u64, Option<Entry>)> {
        let grant = |payload: &[u8]| {
            codec::decode_grant(payload).map(|grant| Entry::Grant(Arc::new(grant)))
        };
        let Notes { names, hooks, .. } = &self.notes;
        let live = self.live.values().filter(move |(at, _)| *at > seq);
        let names = names.iter().filter(move |(_, (at, _))| *at > seq);
        let hooks = hooks.values().filter(move |(at, _)| *at > seq);
        live.map(move |(at, payload)| (*at, grant(payload)))
            .chain(names.map(|(key, (at, id))| {
                (*at, Some(Entry::Named { key: key.clone(), id: id.clone() }))
            }))
            .chain(hooks.map(|(at, hook)| (*at, Some(Entry::Hook(Box::new(hook.clone()))))))
    }

    /// Checks a record and adds it with `add`, which returns `None` for an unreadable payload.
    fn add(
        &mut self,
        key: &[u8],
        value: &[u8],
        add: impl FnOnce(&mut Self, &str, Record<'_>) -> Option<()>,
    ) {
        let checked = codec::unstamp(key, value).ok().zip(std::str::from_utf8(key).ok());
        let added = checked.and_then(|(record, key)| {
            self.last = self.last.max(record.seq);
            add(self, key, record)
        });
        self.damaged += u64::from(added.is_none());
    }
}

/// A reader. sled's lock is held as long as it exists.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(super) dir: PathBuf,
    pub(super) trees: Trees,
    /// Prevents that a compaction replaces the files.
    pub(super) _in_use: Arc<()>,
}

impl Reader {
    /// Reads the live grants, the names, and the hooks that have not run.
    pub(crate) fn snapshot(&self) -> Result<DatabaseSnapshot, StoreError> {
        guard(|| self.scan()).map_err(|error| failure(&self.dir, &error))
    }

    fn scan(&self) -> sled::Result<DatabaseSnapshot> {
        let applied = number(&self.trees.meta, APPLIED)?.unwrap_or(0);
        let mut found = DatabaseSnapshot { applied, last: applied, ..DatabaseSnapshot::default() };
        for pair in &self.trees.live {
            let (key, value) = pair?;
            found.add(&key, &value, |found, id, record| {
                found.newer = found.newer.max(codec::newer(record.payload));
                let live = (record.seq, record.payload.to_vec());
                found.live.insert(AllocId::new(id), live);
                Some(())
            });
        }
        for pair in &self.trees.names {
            let (key, value) = pair?;
            found.add(&key, &value, |found, key, record| {
                let id = DeviceId::new(std::str::from_utf8(record.payload).ok()?);
                found.notes.names.insert(key.to_owned(), (record.seq, id));
                Some(())
            });
        }
        for pair in &self.trees.hooks {
            let (key, value) = pair?;
            found.add(&key, &value, |found, _, record| {
                found.newer = found.newer.max(codec::newer(record.payload));
                let entry = codec::decode(record.payload).ok()?;
                matches!(entry, Entry::Hook(_)).then(|| drop(found.notes.apply(record.seq, &entry)))
            });
        }
        Ok(found)
    }

    /// Passes released grants to `take`, newest first, until it returns false. Unreadable records
    /// are skipped.
    pub(crate) fn history(&self, mut take: impl FnMut(Grant) -> bool) -> Result<(), StoreError> {
        self.each_released(|key, value| {
            let grant = codec::unstamp(key, value)
                .ok()
                .and_then(|record| codec::decode(record.payload).ok());
            if let Some(Entry::Grant(grant)) = grant {
                take(Arc::unwrap_or_clone(grant))
            } else {
                true
            }
        })
    }

    /// Returns which of these grants were released. Stops at releases from before the oldest was
    /// made, and keeps nothing else in memory.
    pub(crate) fn look_up(&self, ids: &BTreeSet<AllocId>) -> Result<BTreeSet<AllocId>, StoreError> {
        let made =
            ids.iter().map(|id| id.made_at().unwrap_or(Timestamp(0)).0).min().unwrap_or(u64::MAX);
        let since = made.saturating_sub(CLOCK_ERROR_MS).to_be_bytes();
        let mut found = BTreeSet::new();
        self.each_released(|key, _| {
            found.extend(released_id(key).filter(|id| ids.contains(id)));
            found.len() < ids.len() && *key >= since[..]
        })?;
        Ok(found)
    }

    /// The latest release that was removed because of age or number. The history is complete after
    /// it.
    pub(crate) fn forgotten_until(&self) -> Result<Option<Timestamp>, StoreError> {
        guard(|| number(&self.trees.meta, FORGOTTEN))
            .map(|at| at.map(Timestamp))
            .map_err(|error| failure(&self.dir, &error))
    }

    /// Passes every record of the history to `take`: its grant and the entry of its release; `None`
    /// for an unreadable one.
    pub(crate) fn check_history(
        &self,
        mut take: impl FnMut(Option<(AllocId, u64)>),
    ) -> Result<(), StoreError> {
        self.each_released(|key, value| {
            let read = codec::unstamp(key, value)
                .ok()
                .filter(|record| matches!(codec::decode(record.payload), Ok(Entry::Grant(_))));
            take(released_id(key).zip(read.map(|record| record.seq)));
            true
        })
    }

    /// Reads the history newest first, in spans of time that are each read forwards. sled's reverse
    /// iterator would add a key of 1 MB of 0xff to the binary.
    fn each_released(&self, mut take: impl FnMut(&[u8], &[u8]) -> bool) -> Result<(), StoreError> {
        let read = guard(|| {
            let (mut from, mut until) =
                (self.latest_release()?.saturating_add(1), Bound::Unbounded);
            let mut span = 1;
            while from > 0 {
                let start = from.saturating_sub(span);
                let low = if start == 0 {
                    Bound::Unbounded
                } else {
                    Bound::Included(start.to_be_bytes())
                };
                let most = if span == 1 { usize::MAX } else { PAGE };
                let keys = self.trees.history.range((low, until)).keys();
                let page = keys.take(most.saturating_add(1)).collect::<sled::Result<Vec<_>>>()?;
                if page.len() > most {
                    span /= 2;
                    continue;
                }
                for key in page.iter().rev() {
                    for _ in 1..READS_PER_RECORD {
                        self.trees.history.contains_key(key)?;
                    }
                    if !self.trees.history.get(key)?.is_none_or(|value| take(key, &value)) {
                        return Ok(());
                    }
                }
                (from, until) = (start, Bound::Excluded(start.to_be_bytes()));
                if page.len() < PAGE / 2 {
                    span = span.saturating_mul(2);
                }
            }
            Ok(())
        });
        read.map_err(|error| failure(&self.dir, &error))
    }

    /// The time of the newest release, found bit by bit.
    fn latest_release(&self) -> sled::Result<u64> {
        let mut latest = 0_u64;
        for bit in (0..u64::BITS).rev() {
            let later = latest | 1 << bit;
            if self.trees.history.range(later.to_be_bytes()..).next().transpose()?.is_some() {
                latest = later;
            }
        }
        Ok(latest)
    }
}

/// The key of a hook. A resource's name has no space.
pub(super) fn hook_key(hook: &PendingHook) -> Vec<u8> {
    format!("{} {}", hook.resource, hook.device).into_bytes()
}

/// The grant of a key of the history.
pub(super) fn released_id(key: &[u8]) -> Option<AllocId> {
    key.get(8..).and_then(|id| std::str::from_utf8(id).ok()).map(AllocId::new)
}

/// The key of a released grant. The time of release comes first, so the newest are found without an
/// index.
pub(super) fn history_key(grant: &Grant) -> Vec<u8> {
    let at =
        if let GrantState::Released { released_at, .. } = &grant.state { released_at.0 } else { 0 };
    let mut key = at.to_be_bytes().to_vec();
    key.extend_from_slice(grant.alloc_id.as_str().as_bytes());
    key
}
