//! A second view of an open database: for queries and checks, while the index thread goes on writing.

use super::database::{APPLIED, FORGOTTEN, number};
use super::failure::{failure, guard};
use crate::domain::{AllocId, DeviceId, Entry, Grant, GrantState, PendingHook, Timestamp};
use crate::store::journal::{OwedAt, codec};
use crate::store::{LivePayloads, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::PathBuf;
use std::sync::Arc;

/// sled counts 64 uses of the pages of one of its 256 shards before it lets any of them go. A reader that goes over them once
/// would have all of the history in memory, 100 MB and more, and leave it there. So each record is looked up this often:
/// with some 17 records to a page that is enough for every page to push out the one before. Over 100,000 grants the process
/// then grows by 8 MB, instead of 120.
pub(super) const LOOKS: usize = 4;

/// How far the clock of a release may be behind that of the grant: it was set meanwhile.
const CLOCK_ERROR_MS: u64 = 24 * 3600 * 1000;

/// How many keys are read before their records are, in the other order.
const PAGE: usize = 256;

/// The content of the database, history aside.
#[derive(Debug, Default)]
pub(crate) struct DatabaseSnapshot {
    /// The last entry that its last checkpoint had.
    pub(crate) applied: u64,
    /// The highest sequence number in it.
    pub(crate) last: u64,
    /// Live grants: sequence number of the latest entry, and the payload.
    pub(crate) live: LivePayloads,
    /// Names of devices.
    pub(crate) names: BTreeMap<String, (u64, DeviceId)>,
    /// Hooks that have not run yet.
    pub(crate) hooks: OwedAt,
    /// Records that cannot be read.
    pub(crate) damaged: u64,
    /// The highest version of records that only a later Holdfast can read.
    pub(crate) newer: Option<u32>,
}

/// It keeps sled's lock as long as it lives.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(super) dir: PathBuf,
    pub(super) live: sled::Tree,
    pub(super) history: sled::Tree,
    pub(super) names: sled::Tree,
    pub(super) hooks: sled::Tree,
    pub(super) meta: sled::Tree,
    /// Held as long as it reads.
    pub(super) _open: Arc<()>,
}

impl Reader {
    /// Reads every live grant, every name and every hook that has not run yet.
    pub(crate) fn snapshot(&self) -> Result<DatabaseSnapshot, StoreError> {
        guard(|| self.scan()).map_err(|error| failure(&self.dir, &error))
    }

    pub(super) fn scan(&self) -> sled::Result<DatabaseSnapshot> {
        let applied = number(&self.meta, APPLIED)?.unwrap_or(0);
        let mut snapshot =
            DatabaseSnapshot { applied, last: applied, ..DatabaseSnapshot::default() };
        for pair in &self.live {
            let (key, value) = pair?;
            match (std::str::from_utf8(&key), codec::unstamp(&key, &value)) {
                (Ok(id), Ok(record)) => {
                    snapshot.newer = snapshot.newer.max(codec::newer(record.payload));
                    snapshot.live.insert(AllocId::new(id), (record.seq, record.payload.to_vec()));
                }
                _ => snapshot.damaged += 1,
            }
        }
        for pair in &self.names {
            let (key, value) = pair?;
            let read = codec::unstamp(&key, &value)
                .map(|record| (record.seq, std::str::from_utf8(record.payload)));
            match (std::str::from_utf8(&key), read) {
                (Ok(key), Ok((seq, Ok(id)))) => {
                    drop(snapshot.names.insert(key.to_owned(), (seq, DeviceId::new(id))))
                }
                _ => snapshot.damaged += 1,
            }
        }
        for pair in &self.hooks {
            let (key, value) = pair?;
            let read = codec::unstamp(&key, &value).map(|record| (record.seq, record.payload));
            snapshot.newer = snapshot
                .newer
                .max(read.as_ref().ok().and_then(|(_, payload)| codec::newer(payload)));
            match read.map(|(seq, payload)| (seq, codec::decode(payload))) {
                Ok((seq, Ok(Entry::Hook(hook)))) => {
                    drop(
                        snapshot
                            .hooks
                            .insert((hook.resource.clone(), hook.device.clone()), (seq, *hook)),
                    );
                }
                _ => snapshot.damaged += 1,
            }
        }
        let seqs = snapshot
            .live
            .values()
            .map(|(seq, _)| *seq)
            .chain(snapshot.names.values().map(|(seq, _)| *seq));
        let latest = seqs.chain(snapshot.hooks.values().map(|(seq, _)| *seq)).max();
        snapshot.last = snapshot.last.max(latest.unwrap_or(0));
        Ok(snapshot)
    }

    /// Released grants, newest first, until `take` says no more. A record that cannot be read is skipped.
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

    /// Which of these grants were released. It goes back no further than the oldest was made, and keeps nothing in memory.
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

    /// The latest release that was forgotten on purpose, of age or for the number of them: the history is whole after that.
    pub(crate) fn forgotten_until(&self) -> Result<Option<Timestamp>, StoreError> {
        guard(|| number(&self.meta, FORGOTTEN))
            .map(|at| at.map(Timestamp))
            .map_err(|error| failure(&self.dir, &error))
    }

    /// Every record of the history: its grant and the entry that released it; `None` for one that cannot be read.
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

    /// Newest first, by spans of time that are each read forwards: sled's own way backwards begins at a key of a megabyte of
    /// 0xff, which would be a tenth of the binary.
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
                let keys = self.history.range((low, until)).keys();
                let page = keys.take(most.saturating_add(1)).collect::<sled::Result<Vec<_>>>()?;
                if page.len() > most {
                    span /= 2;
                    continue;
                }
                for key in page.iter().rev() {
                    for _ in 1..LOOKS {
                        self.history.contains_key(key)?;
                    }
                    if !self.history.get(key)?.is_none_or(|value| take(key, &value)) {
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

    /// The time of the newest key, found bit by bit.
    fn latest_release(&self) -> sled::Result<u64> {
        let mut latest = 0_u64;
        for bit in (0..u64::BITS).rev() {
            let later = latest | 1 << bit;
            if self.history.range(later.to_be_bytes()..).next().transpose()?.is_some() {
                latest = later;
            }
        }
        Ok(latest)
    }
}

/// One for each device of a resource, whose name has no blank.
pub(super) fn hook_key(hook: &PendingHook) -> Vec<u8> {
    format!("{} {}", hook.resource, hook.device).into_bytes()
}

/// Whose record of the history has this key.
pub(super) fn released_id(key: &[u8]) -> Option<AllocId> {
    key.get(8..).and_then(|id| std::str::from_utf8(id).ok()).map(AllocId::new)
}

/// The time of release first, so that the newest are found without an index.
pub(super) fn history_key(grant: &Grant) -> Vec<u8> {
    let at =
        if let GrantState::Released { released_at, .. } = &grant.state { released_at.0 } else { 0 };
    let mut key = at.to_be_bytes().to_vec();
    key.extend_from_slice(grant.alloc_id.as_str().as_bytes());
    key
}
