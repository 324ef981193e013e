//! Replaying the journal: segments, oldest first, into the state of each grant and the entries that are missing.
//!
//! A complete head replaces everything before it: a grant that is not in it is not held. So damage in an older segment, or
//! a gap before the head, costs no live grant. A grant whose write failed, and which was never confirmed, does not come back
//! although its bytes may have reached the disk.

use super::codec::{self, Defect, Record};
use super::scan::{Header, header, is_followed, resynchronise};
use super::{segments, used};
use crate::domain::{
    AllocId, DeviceId, Entry, Gone, Grant, GrantState, HookState, Listed, PendingHook,
    ResourceName, Verdicts, note_gone, note_list, note_verdict,
};
use crate::host;
use crate::store::layout::journal_dir;
use crate::store::lock::read_confirmed;
use crate::store::{LivePayloads, OLD_SEGMENTS_MAX, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The hooks that have not run yet, with the sequence number of the latest entry about each.
pub(crate) type OwedAt = BTreeMap<(ResourceName, DeviceId), (u64, PendingHook)>;

/// `EIO` of Linux.
const EIO: i32 = 5;

/// The state after the entries that were read.
#[derive(Debug, Default)]
pub(crate) struct JournalReplay {
    /// Every grant, the released ones too, with the sequence number of the latest entry about it.
    pub(crate) grants: BTreeMap<AllocId, (u64, Grant)>,
    /// Payloads of the grants that are as a record says. Every head repeats them, so they are not decoded again.
    payloads: BTreeMap<AllocId, Vec<u8>>,
    /// Names of devices.
    pub(crate) names: BTreeMap<String, (u64, DeviceId)>,
    /// The last list of each resource.
    pub(crate) listed: Listed,
    /// Hooks that have not run yet.
    pub(crate) owed: OwedAt,
    /// Verdicts on devices' health.
    pub(crate) verdicts: Verdicts,
    /// Since when devices have been gone.
    pub(crate) gone: Gone,
    /// The latest state of grants whose own entry could not be read.
    orphans: BTreeMap<AllocId, (u64, GrantState)>,
    /// First sequence number of the newest complete head; 0 without one.
    pub(crate) complete_from: u64,
    /// The highest sequence number that was read.
    pub(crate) last: u64,
    /// Sequence numbers, from and to, both included, that should be there and are not.
    gaps: Vec<(u64, u64)>,
    /// Segments that were read.
    pub(crate) segments: Vec<(u64, PathBuf)>,
    /// Segments with damage inside.
    pub(crate) damaged: Vec<PathBuf>,
    /// Bytes of torn writes at the ends of segments.
    pub(crate) torn_bytes: u64,
    /// Entries that were read.
    pub(crate) entries: u64,
    /// The last entry that is known to have been confirmed.
    confirmed: u64,
    /// The database's snapshot that this replay began with is of this entry. Earlier entries about what it has are skipped.
    base: u64,
    /// Later entries are skipped.
    upto: Option<u64>,
}

impl JournalReplay {
    /// An empty state.
    pub(crate) fn of(state_dir: &Path) -> Self {
        JournalReplay { confirmed: read_confirmed(state_dir), ..JournalReplay::default() }
    }

    /// A state that begins with live grants, names and hooks as they were after the entry `base`.
    pub(crate) fn over(
        state_dir: &Path,
        base: u64,
        live: &LivePayloads,
        names: BTreeMap<String, (u64, DeviceId)>,
        owed: OwedAt,
    ) -> Self {
        let mut replay =
            JournalReplay { names, owed, base, last: base, ..JournalReplay::of(state_dir) };
        live.iter().for_each(|(id, (seq, payload))| replay.add_live(id, *seq, payload));
        replay
    }

    /// Adds a live grant of the database. One that cannot be decoded is missing.
    pub(crate) fn add_live(&mut self, id: &AllocId, seq: u64, payload: &[u8]) {
        if let Some(grant) = codec::decode_grant(payload) {
            self.grants.insert(id.clone(), (seq, grant));
            self.payloads.insert(id.clone(), payload.to_vec());
        } else {
            self.gaps.push((seq, seq));
        }
    }

    /// Reads every segment of a state directory.
    pub(crate) fn read(state_dir: &Path) -> Result<Self, StoreError> {
        JournalReplay::of(state_dir).with_segments(&segments(&journal_dir(state_dir))?)
    }

    /// Reads the journal as it was when `seq` was its latest entry.
    pub(crate) fn read_upto(state_dir: &Path, seq: u64) -> Result<Self, StoreError> {
        let replay = JournalReplay { upto: Some(seq), ..JournalReplay::of(state_dir) };
        let mut segments = segments(&journal_dir(state_dir))?;
        segments.retain(|(first, _)| *first <= seq);
        replay.with_segments(&segments)
    }

    /// Reads the newest segments, as many as it takes to find a complete head: usually one. `None` if that is not whole.
    pub(crate) fn read_newest(state_dir: &Path) -> Result<Option<Self>, StoreError> {
        let segments = segments(&journal_dir(state_dir))?;
        for from in (0..segments.len()).rev() {
            let replay = JournalReplay::of(state_dir).with_segments(&segments[from..])?;
            // Without a complete head a kill came while it was written: the segment before has everything.
            if replay.complete_from > 0 {
                return Ok(Some(replay).filter(JournalReplay::is_whole));
            }
        }
        Ok(None)
    }

    /// Reads every segment although a daemon may be writing: a segment that is deleted under the reader starts it again.
    pub(crate) fn read_beside_a_writer(state_dir: &Path) -> Result<Self, StoreError> {
        // A checkpoint deletes the oldest first, so each lost race leaves one segment less to lose the next one about.
        for _ in 0..2 * OLD_SEGMENTS_MAX {
            match JournalReplay::read(state_dir) {
                Err(StoreError::Io { source, .. })
                    if source.kind() == io::ErrorKind::NotFound
                        && journal_dir(state_dir).exists() => {}
                done => return done,
            }
        }
        JournalReplay::read(state_dir)
    }

    /// Reads these segments too.
    pub(crate) fn with_segments(mut self, segments: &[(u64, PathBuf)]) -> Result<Self, StoreError> {
        segments.iter().try_for_each(|(first, path)| self.read_segment(*first, path))?;
        Ok(self)
    }

    /// Reads the next segment.
    pub(crate) fn read_segment(&mut self, first: u64, path: &Path) -> Result<(), StoreError> {
        self.segments.push((first, path.to_owned()));
        match host::read_regular(path) {
            Ok(bytes) => self.segment(first, path, &bytes[..used(&bytes)]),
            // The disk cannot read its own sectors: that is damage.
            Err(error) if error.raw_os_error() == Some(EIO) => {
                self.damage(path, first, first);
                Ok(())
            }
            Err(error) => Err(StoreError::io("read", path)(error)),
        }
    }

    /// Counts confirmed entries that are not there as missing: a file that is gone, or was cut between two records, shows no damage.
    pub(crate) fn expect_confirmed(&mut self) {
        if self.confirmed > self.last {
            self.gap_before(self.confirmed + 1);
            self.damaged.extend(self.segments.last().map(|(_, path)| path.clone()));
            self.damaged.dedup();
        }
    }

    /// Whether it has everything that is live: from a complete head on nothing is missing up to the last confirmed entry.
    pub(crate) fn is_whole(&self) -> bool {
        self.complete_from > 0 && self.gaps.is_empty() && self.last >= self.confirmed
    }

    /// Entries that are missing. An orphan's grant is one of them, and not one more.
    pub(crate) fn missing(&self) -> u64 {
        // With every entry at hand there was no such grant.
        let is_broken = self.torn_bytes > 0 || !self.gaps.is_empty() || !self.damaged.is_empty();
        let lost = self
            .orphans
            .values()
            .filter(|(_, state)| is_broken && !matches!(state, GrantState::Released { .. }));
        self.missing_in_gaps().max(lost.count() as u64)
    }

    /// Entries whose numbers should be there and are not.
    pub(crate) fn missing_in_gaps(&self) -> u64 {
        self.gaps.iter().map(|(from, to)| to + 1 - from).sum()
    }

    /// First sequence number of the oldest segment; 0 without one.
    pub(crate) fn oldest(&self) -> u64 {
        self.segments.first().map_or(0, |(first, _)| *first)
    }

    /// The live grants.
    pub(crate) fn live(&self) -> impl Iterator<Item = (&AllocId, &(u64, Grant))> {
        self.grants.iter().filter(|(_, (_, grant))| grant.is_live())
    }

    /// The payload of every live grant.
    pub(crate) fn live_payloads(&self) -> Result<LivePayloads, StoreError> {
        let encode = |grant: &Grant| codec::encode(&Entry::Grant(Arc::new(grant.clone())));
        let payload = |id: &AllocId, grant: &Grant| {
            self.payloads.get(id).cloned().map_or_else(|| encode(grant), Ok)
        };
        self.live()
            .map(|(id, (seq, grant))| Ok((id.clone(), (*seq, payload(id, grant)?))))
            .collect()
    }

    /// Forgets the released grants, and returns them with the number of the entry that released each. Nothing follows that entry.
    pub(crate) fn take_released(&mut self) -> Vec<(u64, Grant)> {
        let released: Vec<AllocId> = self
            .grants
            .iter()
            .filter(|(_, (_, grant))| !grant.is_live())
            .map(|(id, _)| id.clone())
            .collect();
        released.iter().for_each(|id| drop(self.payloads.remove(id)));
        released.iter().filter_map(|id| self.grants.remove(id)).collect()
    }

    /// Forgets the released grants whose own entry could not be read, and returns their states.
    pub(crate) fn take_released_orphans(&mut self) -> Vec<(AllocId, (u64, GrantState))> {
        let is_released =
            |(_, state): &(u64, GrantState)| matches!(state, GrantState::Released { .. });
        let (taken, left) = std::mem::take(&mut self.orphans)
            .into_iter()
            .partition(|(_, orphan)| is_released(orphan));
        self.orphans = left;
        BTreeMap::into_iter(taken).collect()
    }

    fn segment(&mut self, first: u64, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let (head, mut at) = match header(bytes) {
            Header::Head { records, bytes } => (Some(records), bytes),
            Header::Newer(version) => {
                return Err(StoreError::Newer { path: path.to_owned(), version });
            }
            Header::Torn => {
                self.gap_before(first);
                self.torn_bytes += bytes.len() as u64;
                return Ok(());
            }
            Header::Damaged => {
                self.damaged.push(path.to_owned());
                (None, 0)
            }
        };
        // The entries of a head are copies. With everything before it at hand, damage in it costs nothing.
        let covered = (self.complete_from > 0 || self.base > 0)
            && self.gaps.is_empty()
            && self.last + 1 >= first;
        let copies_to = if covered { first + head.unwrap_or(0) } else { first };
        self.gap_before(first);
        let mut expected = first;
        let mut in_head: Option<BTreeSet<AllocId>> = head.map(|_| BTreeSet::new());
        loop {
            if let Some(held) = in_head.take_if(|_| Some(expected - first) >= head) {
                self.complete_head(first, &held);
            }
            if at >= bytes.len() {
                break;
            }
            match codec::unframe(&bytes[at..]) {
                Ok(record) if record.seq == expected => {
                    at += record.len();
                    expected += 1;
                    match self.record(record) {
                        Ok(granted) => {
                            in_head.iter_mut().for_each(|held| held.extend(granted.clone()))
                        }
                        Err(Defect::Newer(version)) => {
                            return Err(StoreError::Newer { path: path.to_owned(), version });
                        }
                        // The crc holds and the text does not: it was written so. One entry is missing.
                        Err(Defect::Torn | Defect::Damaged) => {
                            self.damage(path, record.seq.max(copies_to), record.seq);
                            in_head = None;
                        }
                    }
                }
                _ => match resynchronise(bytes, at, expected)
                    .filter(|(next, _)| self.was_confirmed(expected, &bytes[*next..]))
                {
                    Some((next, seq)) => {
                        self.damage(path, expected.max(copies_to), seq - 1);
                        in_head = None;
                        (at, expected) = (next, seq);
                    }
                    None => {
                        self.torn_bytes += (bytes.len() - at) as u64;
                        break;
                    }
                },
            }
        }
        self.last = self.last.max(expected - 1);
        self.damaged.dedup();
        // A torn head promised entries that are not there. The next segment's head makes up for it, if one follows.
        if let (Some(records), true, false) = (head, in_head.is_some(), covered) {
            self.gap(expected, first + records - 1);
        }
        Ok(())
    }

    /// The head of the segment `first` is complete, and these grants are in it.
    fn complete_head(&mut self, first: u64, held: &BTreeSet<AllocId>) {
        self.complete_from = first;
        if first > self.base {
            self.gaps.clear();
            self.orphans.clear();
            self.grants.retain(|id, (_, grant)| !grant.is_live() || held.contains(id));
            // The entry that ended or forgot something may be lost.
            self.owed.retain(|_, (seq, _)| *seq >= first);
            self.names.retain(|_, (seq, _)| *seq >= first);
        }
    }

    /// Whether the write of an unreadable record was confirmed: by the lock file, or by a later write in the `rest` of its segment,
    /// which begins with a readable record. Otherwise the write is torn.
    fn was_confirmed(&self, lost: u64, rest: &[u8]) -> bool {
        // Where nothing is known every entry counts.
        self.confirmed == 0 || lost <= self.confirmed || is_followed(rest, lost)
    }

    /// Notes what is missing in front of a segment, until its head makes up for it.
    fn gap_before(&mut self, first: u64) {
        let from = self.gaps.last().map_or(0, |(_, to)| *to).max(self.last) + 1;
        self.gap(from, first - 1);
    }

    fn damage(&mut self, path: &Path, from: u64, to: u64) {
        self.damaged.push(path.to_owned());
        self.gap(from, to);
    }

    fn gap(&mut self, from: u64, to: u64) {
        let from = from.max(self.base + 1);
        if from <= to {
            self.gaps.push((from, to));
        }
    }

    /// Applies one record. Returns its grant, if it is one.
    fn record(&mut self, record: Record<'_>) -> Result<Option<AllocId>, Defect> {
        let granted = codec::alloc_id_of(record.payload);
        if self.upto.is_some_and(|upto| record.seq > upto) {
            return Ok(granted);
        }
        if let Some(id) = &granted
            && self.payloads.get(id).is_some_and(|known| known == record.payload)
            && let Some((seq, _)) = self.grants.get_mut(id)
        {
            *seq = record.seq.max(*seq);
            self.entries += 1;
            return Ok(granted);
        }
        let entry = codec::decode(record.payload)?;
        let granted =
            if let Entry::Grant(grant) = &entry { Some(grant.alloc_id.clone()) } else { None };
        self.entries += 1;
        if record.seq > self.base || is_in_journal_alone(&entry) {
            if let Some(id) = &granted {
                self.payloads.insert(id.clone(), record.payload.to_vec());
            }
            self.apply(record.seq, entry);
        }
        Ok(granted)
    }

    fn apply(&mut self, seq: u64, entry: Entry) {
        match entry {
            Entry::Grant(grant) => {
                self.orphans.remove(&grant.alloc_id);
                self.grants.insert(grant.alloc_id.clone(), (seq, Arc::unwrap_or_clone(grant)));
            }
            Entry::Moved { alloc_id, state } => match self.grants.get_mut(&alloc_id) {
                // Nothing follows a release; the store did not apply such an entry either.
                Some((_, grant)) if !grant.is_live() => {}
                Some((at, grant)) => {
                    *at = seq;
                    grant.state = state;
                    self.payloads.remove(&alloc_id);
                }
                None => match self.orphans.get(&alloc_id) {
                    Some((_, GrantState::Released { .. })) => {}
                    _ => drop(self.orphans.insert(alloc_id, (seq, state))),
                },
            },
            Entry::Named { key, id } => drop(self.names.insert(key, (seq, id))),
            Entry::Listed { resource, devices } => note_list(&mut self.listed, &resource, devices),
            Entry::Judged { device, verdict } => {
                note_verdict(&mut self.verdicts, &device, verdict.map(|verdict| *verdict))
            }
            Entry::Gone { devices, since } => note_gone(&mut self.gone, &devices, since),
            Entry::Forgotten { devices } => {
                let devices: BTreeSet<DeviceId> = devices.into_iter().collect();
                if seq > self.base {
                    self.names.retain(|_, (_, id)| !devices.contains(id));
                }
                self.verdicts.retain(|id, _| !devices.contains(id));
                self.gone.retain(|id, _| !devices.contains(id));
            }
            Entry::Hook(hook) => {
                let key = (hook.resource.clone(), hook.device.clone());
                match hook.state {
                    HookState::Done => drop(self.owed.remove(&key)),
                    HookState::Due | HookState::Failed { .. } => {
                        drop(self.owed.insert(key, (seq, *hook)))
                    }
                }
            }
        }
    }
}

/// Whether the database does not have what this entry says.
fn is_in_journal_alone(entry: &Entry) -> bool {
    matches!(
        entry,
        Entry::Listed { .. } | Entry::Judged { .. } | Entry::Gone { .. } | Entry::Forgotten { .. }
    )
}
