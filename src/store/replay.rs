//! Reading the journal: segments folded, oldest first, into what each grant became and which entries are missing.
//!
//! A complete head is a statement about everything: what is not in it is not held. So damage in an older segment, or a
//! gap before this one, costs no live grant; and a grant whose write failed, and which Allocate therefore never
//! confirmed, does not come back although its bytes may have reached the disk.

use super::codec::{self, Defect, Record};
use super::journal::{self, HEADER_BYTES_MAX, MAGIC};
use super::layout::{journal_dir, peek_confirmed};
use super::{OLD_SEGMENTS_MAX, StoreError};
use crate::domain::{
    AllocId, DeviceId, Entry, Gone, Grant, GrantState, HookState, Listed, PendingHook, ResourceName, Verdicts, note_gone, note_list,
    note_verdict,
};
use crate::host;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The hooks that are owed, with the sequence number of the latest entry about each.
pub(super) type OwedAt = BTreeMap<(ResourceName, DeviceId), (u64, PendingHook)>;

/// What the journal says.
#[derive(Debug, Default)]
pub(super) struct Fold {
    /// Every grant that it knows, the released ones too, with the sequence number of the latest entry about it.
    pub(super) grants: BTreeMap<AllocId, (u64, Grant)>,
    /// The payloads of those that are as a record says. Every head repeats them: what is known already is not decoded
    /// again, nor encoded for the next head, and keeps the fields of a later version.
    pub(super) payloads: BTreeMap<AllocId, Vec<u8>>,
    /// Names of devices.
    pub(super) names: BTreeMap<String, (u64, DeviceId)>,
    /// What the kubelet was told last.
    pub(super) listed: Listed,
    /// What is owed to devices after their release.
    pub(super) owed: OwedAt,
    /// What is remembered of devices' health.
    pub(super) verdicts: Verdicts,
    /// Since when devices have been gone.
    pub(super) gone: Gone,
    /// The latest state of grants whose own entry could not be read.
    pub(super) orphans: BTreeMap<AllocId, (u64, GrantState)>,
    /// First sequence number of the newest complete head; 0 without one.
    pub(super) complete_from: u64,
    /// The highest sequence number that was read.
    pub(super) last: u64,
    /// Sequence numbers, from and to, both included, that should be there and are not.
    pub(super) gaps: Vec<(u64, u64)>,
    /// Segments that were read.
    pub(super) segments: Vec<(u64, PathBuf)>,
    /// Segments with damage inside.
    pub(super) damaged: Vec<PathBuf>,
    /// Bytes of writes that were cut off at the end of a segment.
    pub(super) torn_bytes: u64,
    /// Entries that were read.
    pub(super) entries: u64,
    /// Up to which number entries are known to have been confirmed.
    confirmed: u64,
    /// Later entries are passed over.
    upto: Option<u64>,
}

/// What one segment's header says.
enum Header {
    Head { records: u64, bytes: usize },
    Newer(u32),
    Torn,
    Damaged,
}

impl Fold {
    /// Reads every segment of a state directory.
    pub(super) fn read(state_dir: &Path) -> Result<Self, StoreError> {
        Fold::read_before(state_dir, u64::MAX)
    }

    /// Reads every segment whose first number is below `end`.
    pub(super) fn read_before(state_dir: &Path, end: u64) -> Result<Self, StoreError> {
        let fold = Fold::of(state_dir);
        let mut segments = journal::segments(&journal_dir(state_dir))?;
        segments.retain(|(first, _)| *first < end);
        fold.with_segments(&segments)
    }

    /// Reads what the journal said when `seq` was its latest entry.
    pub(super) fn read_upto(state_dir: &Path, seq: u64) -> Result<Self, StoreError> {
        let fold = Fold { upto: Some(seq), ..Fold::of(state_dir) };
        let mut segments = journal::segments(&journal_dir(state_dir))?;
        segments.retain(|(first, _)| *first <= seq);
        fold.with_segments(&segments)
    }

    /// Reads the newest segments, as many as it takes to know everything that is live: usually one. `None` where that is in
    /// doubt, or does not reach to the last confirmed entry.
    pub(super) fn read_newest(state_dir: &Path) -> Result<Option<Self>, StoreError> {
        let segments = journal::segments(&journal_dir(state_dir))?;
        for from in (0..segments.len()).rev() {
            let fold = Fold::of(state_dir).with_segments(&segments[from..])?;
            // Without a complete head, a kill came while it was written: the segment before has everything.
            if fold.complete_from > 0 {
                return Ok(Some(fold).filter(|fold| fold.is_whole() && fold.last >= fold.confirmed));
            }
        }
        Ok(None)
    }

    /// Nothing read yet.
    pub(super) fn of(state_dir: &Path) -> Self {
        Fold { confirmed: peek_confirmed(state_dir), ..Fold::default() }
    }

    /// Misses what had been confirmed and is not there: a file that was cut between two records, or is gone, shows no damage
    /// by itself.
    pub(super) fn expect_confirmed(&mut self) {
        if self.confirmed > self.last {
            self.gap_before(self.confirmed + 1);
            self.damaged.extend(self.segments.last().map(|(_, path)| path.clone()));
            self.damaged.dedup();
        }
    }

    fn with_segments(mut self, segments: &[(u64, PathBuf)]) -> Result<Self, StoreError> {
        segments.iter().try_for_each(|(first, path)| self.read_segment(*first, path))?;
        Ok(self)
    }

    /// Reads the next segment.
    pub(super) fn read_segment(&mut self, first: u64, path: &Path) -> Result<(), StoreError> {
        self.segments.push((first, path.to_owned()));
        match host::read_regular(path) {
            Ok(bytes) => self.segment(first, path, &bytes),
            // The disk cannot read its own sectors: that is damage, and the other copy is asked.
            Err(error) if error.raw_os_error() == Some(EIO) => {
                self.damaged.push(path.to_owned());
                Ok(())
            }
            Err(error) => Err(StoreError::io("read", path)(error)),
        }
    }

    /// Whether an entry may be missing.
    pub(super) fn is_broken(&self) -> bool {
        self.torn_bytes > 0 || !self.gaps.is_empty() || !self.damaged.is_empty()
    }

    /// Whether it has everything that is live, without doubt: all of it was readable, from a complete head on.
    fn is_whole(&self) -> bool {
        self.complete_from > 0 && self.damaged.is_empty() && self.gaps.is_empty()
    }

    /// First sequence number of the oldest segment; 0 without one.
    pub(super) fn oldest(&self) -> u64 {
        self.segments.first().map_or(0, |(first, _)| *first)
    }

    /// Reads every segment although a daemon may be writing: a segment that is deleted under the reader starts it anew.
    pub(super) fn read_beside_a_writer(state_dir: &Path) -> Result<Self, StoreError> {
        // A checkpoint deletes the oldest first, so each lost race is one segment less to lose the next one about.
        for _ in 0..2 * OLD_SEGMENTS_MAX {
            match Fold::read(state_dir) {
                Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound && journal_dir(state_dir).exists() => {}
                done => return done,
            }
        }
        Fold::read(state_dir)
    }

    fn segment(&mut self, first: u64, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let bytes = &bytes[..journal::used(bytes)];
        let (head, mut at) = match header(bytes) {
            Header::Head { records, bytes } => (Some(records), bytes),
            Header::Newer(version) => return Err(StoreError::Newer { path: path.to_owned(), version }),
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
        // The entries of a head are copies. With everything up to it at hand, damage in it costs nothing.
        let covered = self.complete_from > 0 && self.gaps.is_empty() && self.last + 1 == first;
        let copies_to = if covered { first + head.unwrap_or(0) } else { first };
        self.gap_before(first);
        let mut expected = first;
        let mut in_head: Option<BTreeSet<AllocId>> = head.map(|_| BTreeSet::new());
        loop {
            if let (Some(records), Some(held)) = (head, in_head.take_if(|_| Some(expected - first) >= head)) {
                debug_assert_eq!(expected, first + records, "a complete head has no gap");
                self.gaps.truncate(0);
                self.orphans.clear();
                self.grants.retain(|id, (_, grant)| !grant.is_live() || held.contains(id));
                // What was done, or forgotten, may have been said in a part that is lost.
                self.owed.retain(|_, (seq, _)| *seq >= first);
                self.names.retain(|_, (seq, _)| *seq >= first);
                self.complete_from = first;
            }
            if at >= bytes.len() {
                break;
            }
            match codec::unframe(&bytes[at..]) {
                Ok(record) if record.seq == expected => {
                    at += record.len();
                    expected += 1;
                    match self.record(record) {
                        Ok(granted) => in_head.iter_mut().for_each(|held| held.extend(granted.clone())),
                        Err(Defect::Newer(version)) => return Err(StoreError::Newer { path: path.to_owned(), version }),
                        // The crc holds and the text does not: written so. One entry is missing.
                        Err(Defect::Torn | Defect::Damaged) => {
                            self.damage(path, record.seq.max(copies_to), record.seq);
                            in_head = None;
                        }
                    }
                }
                _ => match resynchronise(bytes, at, expected).filter(|(next, _)| self.was_confirmed(expected, &bytes[*next..])) {
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
        // A head that was cut off promised entries that are not there. The next segment's head makes up for it, if one follows.
        if let (Some(records), true, false) = (head, in_head.is_some(), covered) {
            self.gaps.push((expected, first + records - 1));
        }
        Ok(())
    }

    /// Whether the write of a record that cannot be read was confirmed, by what is known or by the `rest` of its segment,
    /// which begins with a readable record: a later write began only after that. Otherwise it was cut off, and is there in
    /// parts.
    fn was_confirmed(&self, lost: u64, rest: &[u8]) -> bool {
        // Where nothing is known everything counts.
        self.confirmed == 0 || lost <= self.confirmed || is_followed(rest, lost)
    }

    /// Notes what is missing in front of a segment, until its head makes up for it.
    fn gap_before(&mut self, first: u64) {
        let from = self.gaps.last().map_or(0, |(_, to)| *to).max(self.last) + 1;
        if first > from {
            self.gaps.push((from, first - 1));
        }
    }

    fn damage(&mut self, path: &Path, from: u64, to: u64) {
        self.damaged.push(path.to_owned());
        if from <= to {
            self.gaps.push((from, to));
        }
    }

    /// Takes in one record. The grant, if it is one.
    fn record(&mut self, record: Record<'_>) -> Result<Option<AllocId>, Defect> {
        let granted = codec::alloc_id_of(record.payload);
        if self.upto.is_some_and(|upto| record.seq > upto) {
            return Ok(granted);
        }
        if let Some(id) = &granted
            && self.payloads.get(id).is_some_and(|known| known == record.payload)
            && let Some((seq, _)) = self.grants.get_mut(id)
        {
            *seq = record.seq;
            self.entries += 1;
            return Ok(granted);
        }
        let entry = codec::decode(record.payload)?;
        let granted = if let Entry::Grant(grant) = &entry { Some(grant.alloc_id.clone()) } else { None };
        if let Some(id) = &granted {
            self.payloads.insert(id.clone(), record.payload.to_vec());
        }
        self.apply(record.seq, entry);
        Ok(granted)
    }

    fn apply(&mut self, seq: u64, entry: Entry) {
        self.entries += 1;
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
            Entry::Named { key, id } => {
                self.names.insert(key, (seq, id));
            }
            Entry::Listed { resource, devices } => note_list(&mut self.listed, &resource, devices),
            Entry::Judged { device, verdict } => note_verdict(&mut self.verdicts, &device, verdict.map(|verdict| *verdict)),
            Entry::Gone { devices, since } => note_gone(&mut self.gone, &devices, since),
            Entry::Forgotten { devices } => self.forget(&devices),
            Entry::Hook(hook) => {
                let key = (hook.resource.clone(), hook.device.clone());
                if hook.state == HookState::Done {
                    self.owed.remove(&key);
                } else {
                    self.owed.insert(key, (seq, *hook));
                }
            }
        }
    }
}

impl Fold {
    fn forget(&mut self, devices: &[DeviceId]) {
        let devices: BTreeSet<&DeviceId> = devices.iter().collect();
        self.names.retain(|_, (_, id)| !devices.contains(id));
        self.verdicts.retain(|id, _| !devices.contains(id));
        self.gone.retain(|id, _| !devices.contains(id));
    }
}

/// `EIO` of Linux.
const EIO: i32 = 5;

fn header(bytes: &[u8]) -> Header {
    let front = &bytes[..bytes.len().min(HEADER_BYTES_MAX)];
    let Some(end) = front.iter().position(|byte| *byte == b'\n') else {
        return if bytes.len() < HEADER_BYTES_MAX { Header::Torn } else { Header::Damaged };
    };
    let sound = |line: &str| {
        let (text, crc) = line.rsplit_once(" crc=")?;
        (u32::from_str_radix(crc, 16).ok()? == crc32fast::hash(text.as_bytes())).then(|| text.to_owned())
    };
    let Some(text) = std::str::from_utf8(&front[..end]).ok().and_then(sound) else {
        return Header::Damaged;
    };
    let Some((version, rest)) = text.strip_prefix(MAGIC).and_then(|rest| rest.split_once(' ')) else {
        return Header::Damaged;
    };
    match (version.parse::<u32>(), rest.strip_prefix("head=").and_then(|count| count.parse().ok())) {
        (Ok(version), _) if version > codec::FRAMING => Header::Newer(version),
        (Ok(1..=codec::FRAMING), Some(records)) => Header::Head { records, bytes: end + 1 },
        _ => Header::Damaged,
    }
}

/// Whether a later write than that of the record `lost` is among `bytes`, which begin with a readable record.
fn is_followed(bytes: &[u8], lost: u64) -> bool {
    let mut at = 0;
    let mut expected = lost;
    loop {
        match codec::unframe(&bytes[at..]) {
            Ok(record) if record.write() > lost => return true,
            Ok(record) => (at, expected) = (at + record.len(), record.seq + 1),
            Err(_) => match resynchronise(bytes, at, expected) {
                Some((next, _)) => at = next,
                None => return false,
            },
        }
    }
}

/// The next readable record at or after `at`, and its sequence number. None: nothing follows, so the write was cut off.
///
/// A random place passes for a record only if its crc holds and its sequence number is one that this many bytes could
/// have reached (a record has at least 17), so the crc is computed for next to no place.
fn resynchronise(bytes: &[u8], at: usize, expected: u64) -> Option<(usize, u64)> {
    let highest = expected + (bytes.len() - at) as u64 / 17 + 1;
    (at..bytes.len().saturating_sub(codec::PREFIX_BYTES)).find_map(|place| {
        let seq = bytes.get(place + 4..place + 12)?.try_into().ok().map(u64::from_le_bytes)?;
        if !(expected..=highest).contains(&seq) {
            return None;
        }
        codec::unframe(&bytes[place..]).ok().map(|record| (place, record.seq))
    })
}
