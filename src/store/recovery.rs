//! Two copies, one truth: the journal's fold and sled's image merged by sequence number.
//!
//! | a live grant that is in | is |
//! | --- | --- |
//! | both | what the higher sequence number says |
//! | the journal only | live, unless sled has it as released by a later entry (the journal's tail was lost) |
//! | sled only, older than the newest complete head | released: a head names every live grant (sled rolled back) |
//! | sled only, by an entry that the journal has, whole | nothing: sled is wrong |
//! | sled only, otherwise | live: the journal has lost it |

use super::StoreError;
use super::codec;
use super::database::Image;
use super::desk::damaged;
use super::journal::Journal;
use super::replay::{Fold, OwedAt};
use crate::domain::{AllocId, DeviceId, Entry, Gone, Grant, GrantState, Listed, PendingHooks, Timestamp, Verdict, Verdicts, note_hook};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What was found at start, for the log, `status` and `ledger verify`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Journal segments that were read.
    pub segments: usize,
    /// Entries that were read from them.
    pub entries: u64,
    /// Bytes of cut-off writes at the ends of segments: entries that were never confirmed.
    pub torn_bytes: u64,
    /// Live grants that only the query database still had.
    pub from_database: usize,
    /// Grants that only the kubelet's checkpoint still had.
    pub from_kubelet: usize,
    /// Entries that neither copy has. More than 0: the ledger is partial.
    pub missing: u64,
    /// Damaged files and directories, by the name that they were given.
    pub quarantined: Vec<PathBuf>,
    /// What was wrong, in words.
    pub findings: Vec<String>,
    /// How long opening took.
    pub took: Duration,
}

impl RecoveryReport {
    /// Whether there may have been grants that neither copy tells of: after damage, and where there is no journal at all.
    #[must_use]
    pub fn may_lack_grants(&self) -> bool {
        !self.is_clean() || self.segments == 0
    }

    /// Whether everything was there and sound. A cut-off write is no damage: kill -9 leaves one.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.missing == 0 && self.findings.is_empty()
    }
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecoveryReport { segments, entries, torn_bytes, from_database, from_kubelet, missing, .. } = self;
        if *missing > 0 {
            write!(f, "partial, {missing} missing: ")?;
        }
        write!(f, "{entries} entries of {segments} journal segments")?;
        if *torn_bytes > 0 {
            write!(f, ", {torn_bytes} bytes of a cut-off write left out")?;
        }
        if *from_database > 0 {
            write!(f, ", {from_database} grants from the query database")?;
        }
        if *from_kubelet > 0 {
            write!(f, ", {from_kubelet} grants from the kubelet's checkpoint")?;
        }
        for finding in &self.findings {
            write!(f, "; {finding}")?;
        }
        for path in &self.quarantined {
            write!(f, "; moved to `{}`", path.display())?;
        }
        Ok(())
    }
}

/// The payload of every live grant, with the sequence number of the latest entry about it.
pub(super) type LivePayloads = BTreeMap<AllocId, (u64, Vec<u8>)>;

/// What both copies together say.
#[derive(Debug, Default)]
pub(super) struct Truth {
    /// Live grants, by the sequence number of the latest entry.
    pub(super) live: BTreeMap<AllocId, (u64, Grant)>,
    /// Payloads of live grants, where they need no encoding.
    payloads: BTreeMap<AllocId, Vec<u8>>,
    /// Released grants that the journal still tells of.
    pub(super) released: BTreeMap<AllocId, (u64, Grant)>,
    /// Names of devices.
    pub(super) names: BTreeMap<String, (u64, DeviceId)>,
    /// What the kubelet was told last. Only the journal has it.
    pub(super) listed: Listed,
    /// What is owed to devices after their release.
    pub(super) owed: OwedAt,
    /// What is remembered of devices' health. Only the journal has it.
    pub(super) verdicts: Verdicts,
    /// Since when devices have been gone. Only the journal has it.
    pub(super) gone: Gone,
    /// The highest sequence number that either has.
    pub(super) last: u64,
}

impl Truth {
    /// What is owed, without the numbers.
    pub(super) fn owed(&self) -> PendingHooks {
        let mut owed = PendingHooks::new();
        self.owed.values().for_each(|(_, hook)| note_hook(&mut owed, hook));
        owed
    }
}

/// Merges. `released_in_history` says which of some grants the database has among its released ones; `None` where those
/// cannot be read.
pub(super) fn merge(
    fold: Fold,
    image: &Image,
    report: &mut RecoveryReport,
    released_in_history: impl FnOnce(&BTreeSet<AllocId>) -> Option<BTreeMap<AllocId, u64>>,
) -> Truth {
    report.segments = fold.segments.len();
    report.entries = fold.entries;
    report.torn_bytes = fold.torn_bytes;
    let broken = fold.is_broken();
    let mut truth = Truth {
        last: fold.last.max(image.last),
        names: fold.names,
        listed: fold.listed,
        owed: fold.owed,
        verdicts: fold.verdicts,
        gone: fold.gone,
        payloads: fold.payloads,
        ..Truth::default()
    };
    for (id, (seq, grant)) in fold.grants {
        if grant.is_live() { &mut truth.live } else { &mut truth.released }.insert(id, (seq, grant));
    }

    let mut unreadable = 0;
    for (id, (seq, payload)) in &image.live {
        let known = truth.live.get(id).or_else(|| truth.released.get(id)).map(|(seq, _)| *seq);
        let newer = match known {
            Some(known) => *seq > known,
            None => *seq >= fold.complete_from && (broken || *seq > fold.last),
        };
        if !newer {
            continue;
        }
        let Ok(Entry::Grant(grant)) = codec::decode(payload) else {
            unreadable += 1;
            continue;
        };
        report.from_database += usize::from(known.is_none());
        truth.released.remove(id);
        truth.live.insert(id.clone(), (*seq, Arc::unwrap_or_clone(grant)));
        truth.payloads.insert(id.clone(), payload.clone());
    }

    // Entries that say what became of a grant whose own entry only the database has, or nobody.
    let mut lost_grants = 0;
    for (id, (seq, state)) in fold.orphans {
        match truth.live.remove(&id) {
            Some((known, grant)) if known > seq => drop(truth.live.insert(id, (known, grant))),
            Some((_, grant)) => {
                truth.payloads.remove(&id);
                let moved = Grant { state, ..grant };
                if moved.is_live() { &mut truth.live } else { &mut truth.released }.insert(id, (seq, moved));
            }
            // With every entry at hand there was no such grant, and so nothing is lost.
            None => lost_grants += u64::from(broken && !matches!(state, GrantState::Released { .. })),
        }
    }

    // What sled has as released by a later entry than the journal knows does not come back.
    let doubtful: BTreeSet<AllocId> = truth
        .live
        .iter()
        .filter(|(id, (seq, _))| !image.live.contains_key(*id) && (broken || *seq <= image.applied))
        .map(|(id, _)| id.clone())
        .collect();
    let mut applied = image.applied;
    if !doubtful.is_empty() {
        let released = released_in_history(&doubtful);
        if released.is_none() {
            // Then what it had applied is no answer either.
            applied = 0;
        }
        for (id, seq) in released.unwrap_or_default() {
            if truth.live.get(&id).is_some_and(|(known, _)| *known < seq) {
                truth.live.remove(&id);
                truth.last = truth.last.max(seq);
            }
        }
    }
    merge_notes(&mut truth, image, |seq| seq >= fold.complete_from && (broken || seq > fold.last));
    // A gap takes the grants' own entries with it: an orphan is one of those missing, not one more.
    report.missing = missing(&fold.gaps, image, applied).max(lost_grants) + unreadable;
    truth
}

/// Takes in what only the database has, beside grants. `may_be_lost`: whether the journal may lack an entry of that number,
/// and what came of it.
fn merge_notes(truth: &mut Truth, image: &Image, may_be_lost: impl Fn(u64) -> bool) {
    // As with grants: a head has every name and every hook, and a journal that is whole has the end of each.
    for (key, (seq, id)) in &image.names {
        if truth.names.get(key).map_or_else(|| may_be_lost(*seq), |(known, _)| known < seq) {
            truth.names.insert(key.clone(), (*seq, id.clone()));
        }
    }
    for (key, (seq, hook)) in &image.hooks {
        if truth.owed.get(key).map_or_else(|| may_be_lost(*seq), |(known, _)| known < seq) {
            truth.owed.insert(key.clone(), (*seq, hook.clone()));
        }
    }
}

/// Entries in the journal's gaps that neither copy has. A gap that sled had already applied costs nothing; of the rest, sled
/// may have had single entries.
fn missing(gaps: &[(u64, u64)], image: &Image, applied: u64) -> u64 {
    let (live, names, hooks) = (image.live.values(), image.names.values(), image.hooks.values());
    let notes = names.map(|(seq, _)| *seq).chain(hooks.map(|(seq, _)| *seq));
    let in_database: BTreeSet<u64> = live.map(|(seq, _)| *seq).chain(notes).collect();
    let gone = |(from, to): &(u64, u64)| {
        let from = (*from).max(applied + 1);
        (*to + 1).saturating_sub(from) - in_database.range(from..=(*to).max(from)).filter(|seq| **seq <= *to).count() as u64
    };
    gaps.iter().map(gone).sum()
}

/// What is wrong with the journal, in words.
pub(super) fn journal_findings(fold: &Fold) -> Vec<String> {
    fold.damaged.iter().map(|path| damaged(path)).collect()
}

/// What is wrong with the database beside a journal whose oldest segment begins at `oldest`, in words.
pub(super) fn database_finding(oldest: u64, image: &Image, had_database: bool) -> Option<String> {
    if !had_database && oldest > 1 {
        Some("the query database is gone, and with it the history".into())
    } else if image.applied + 1 < oldest {
        Some(format!("the query database has lost what it had after entry {}", image.applied))
    } else if oldest == 0 && image.applied > 0 {
        Some("the journal is gone; grants come from the query database".into())
    } else {
        None
    }
}

pub(super) fn encode(entry: &Entry) -> Result<Vec<u8>, StoreError> {
    // Every map of an entry has strings for keys, so serde_json has nothing to refuse.
    let payload = codec::encode(entry).unwrap_or_default();
    match payload.len() {
        1..=codec::PAYLOAD_BYTES_MAX => Ok(payload),
        bytes => Err(StoreError::TooLarge { bytes }),
    }
}

pub(super) fn decode_grant(payload: &[u8]) -> Option<Grant> {
    match codec::decode(payload) {
        Ok(Entry::Grant(grant)) => Some(Arc::unwrap_or_clone(grant)),
        _ => None,
    }
}

/// What is remembered beside grants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Notes {
    pub(super) names: BTreeMap<String, DeviceId>,
    pub(super) listed: Listed,
    pub(super) owed: PendingHooks,
    pub(super) verdicts: Verdicts,
    pub(super) gone: Gone,
}

impl Notes {
    /// Forgets devices. Returns the keys of their names.
    pub(super) fn forget(&mut self, devices: &[DeviceId]) -> Vec<String> {
        let devices: BTreeSet<&DeviceId> = devices.iter().collect();
        let keys: Vec<String> = self.names.iter().filter(|(_, id)| devices.contains(id)).map(|(key, _)| key.clone()).collect();
        keys.iter().for_each(|key| drop(self.names.remove(key)));
        for device in devices {
            self.verdicts.remove(device);
            self.gone.remove(device);
        }
        keys
    }

    pub(super) fn of(truth: &Truth) -> Self {
        let names = truth.names.iter().map(|(key, (_, id))| (key.clone(), id.clone())).collect();
        Notes { names, listed: truth.listed.clone(), owed: truth.owed(), verdicts: truth.verdicts.clone(), gone: truth.gone.clone() }
    }

    pub(super) fn len(&self) -> usize {
        let owed = self.owed.values().map(BTreeMap::len).sum::<usize>();
        self.names.len() + self.listed.len() + owed + self.verdicts.len() + self.gone_since().len()
    }

    /// Those that have been gone since the same moment, together.
    fn gone_since(&self) -> BTreeMap<Timestamp, Vec<DeviceId>> {
        let mut gone: BTreeMap<Timestamp, Vec<DeviceId>> = BTreeMap::new();
        for (device, since) in &self.gone {
            gone.entry(*since).or_default().push(device.clone());
        }
        gone
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        let names = self.names.iter().map(|(key, id)| Entry::Named { key: key.clone(), id: id.clone() });
        let listed = self.listed.iter().map(|(resource, devices)| Entry::Listed { resource: resource.clone(), devices: devices.clone() });
        let judged =
            |(device, verdict): (&DeviceId, &Verdict)| Entry::Judged { device: device.clone(), verdict: Some(Box::new(verdict.clone())) };
        let owed = self.owed.values().flat_map(BTreeMap::values).map(|hook| Entry::Hook(Box::new(hook.clone())));
        let gone = self.gone_since().into_iter().map(|(since, devices)| Entry::Gone { devices, since: Some(since) });
        names.chain(listed).chain(owed).chain(self.verdicts.iter().map(judged)).chain(gone)
    }
}

/// The payload of every live grant.
pub(super) fn encode_live(truth: &mut Truth) -> Result<LivePayloads, StoreError> {
    let mut payloads = std::mem::take(&mut truth.payloads);
    let one = |(id, (seq, grant)): (&AllocId, &(u64, Grant))| {
        let payload = payloads.remove(id).map_or_else(|| encode(&Entry::Grant(Arc::new(grant.clone()))), Ok)?;
        Ok((id.clone(), (*seq, payload)))
    };
    truth.live.iter().map(one).collect()
}

/// Opens the segment `first` with everything live as its head. Returns the sequence number after that.
pub(super) fn open_segment(dir: &Path, first: u64, live: &LivePayloads, notes: &Notes) -> Result<(Journal, u64), StoreError> {
    let notes = notes.entries().map(|entry| encode(&entry)).collect::<Result<Vec<_>, _>>()?;
    let head: Vec<&[u8]> = live.values().map(|(_, payload)| payload.as_slice()).chain(notes.iter().map(Vec::as_slice)).collect();
    let records = head.len() as u64;
    // An entry has a number only if the head before it is complete, so an empty head still takes none.
    Ok((Journal::create(dir, first, head.into_iter())?, first + records))
}
