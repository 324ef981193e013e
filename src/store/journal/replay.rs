//! Replay of the journal: segments, oldest first, into the state of each grant and a list of
//! missing entries.
//!
//! A complete head replaces everything before it: a grant that is not in it is not held. So damage
//! in an older segment, or a gap before the head, costs no live grant. A grant whose write failed
//! was never confirmed, and does not come back although its bytes may be on the disk.

mod file;
mod taken;
#[cfg(test)]
mod tests;

use self::file::{read, read_again};
use super::codec::{self, Defect, Record};
use super::scan::{Header, header, is_followed, resynchronise};
use super::segments;
use crate::domain::{AllocId, Entry, Grant, GrantState};
use crate::store::index::DatabaseSnapshot;
use crate::store::layout::journal_dir;
use crate::store::lock::read_confirmed;
use crate::store::notes::{Notes, is_only_in_journal};
use crate::store::{OLD_SEGMENTS_MAX, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The grants of a head that is being read, and the notes before it that only the journal has.
type InHead = (BTreeSet<AllocId>, Notes);

/// The state after the entries that were read.
#[derive(Debug, Default)]
pub(crate) struct JournalReplay {
    /// Every grant, also the released ones, with the sequence number of its latest entry.
    pub(crate) grants: BTreeMap<AllocId, (u64, Grant)>,
    /// Payloads of grants that no later entry has changed. Every head repeats them, and they are
    /// not decoded again.
    payloads: BTreeMap<AllocId, Vec<u8>>,
    /// The durable facts other than grants.
    pub(crate) notes: Notes,
    /// The latest state of grants whose own entry is unreadable.
    orphans: BTreeMap<AllocId, (u64, GrantState)>,
    /// First sequence number of the newest complete head; 0 without one.
    pub(crate) complete_from: u64,
    /// The highest sequence number that was read.
    pub(crate) last: u64,
    /// Ranges of missing sequence numbers, both ends included.
    gaps: Vec<(u64, u64)>,
    /// Segments that were read.
    pub(crate) segments: Vec<(u64, PathBuf)>,
    /// Damaged segments.
    pub(crate) damaged: Vec<PathBuf>,
    /// Bytes of torn writes at the ends of segments.
    pub(crate) torn_bytes: u64,
    /// Entries that were read.
    pub(crate) entries: u64,
    /// The last entry that is known to be confirmed.
    confirmed: u64,
    /// The latest entry of the database with which this replay began; 0 without one. Earlier
    /// entries are skipped if the database has them.
    base: u64,
    /// Later entries are skipped.
    upto: Option<u64>,
}

impl JournalReplay {
    /// An empty state.
    pub(crate) fn of(state_dir: &Path) -> Self {
        JournalReplay { confirmed: read_confirmed(state_dir), ..JournalReplay::default() }
    }

    /// The state of the database, onto which the journal's later entries are replayed.
    pub(crate) fn over(state_dir: &Path, database: &DatabaseSnapshot) -> Self {
        let mut replay = JournalReplay::of(state_dir);
        replay.add_later(database);
        JournalReplay { base: database.last, ..replay }
    }

    /// Applies the database's entries after the last one. One that cannot be decoded is missing.
    pub(crate) fn add_later(&mut self, database: &DatabaseSnapshot) {
        for (seq, entry) in database.entries_after(self.last) {
            match entry {
                Some(entry) => self.apply(seq, entry),
                None => self.gaps.push((seq, seq)),
            }
        }
        self.last = self.last.max(database.last);
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

    /// Reads the newest segments back to a complete head: usually one segment. `None` if entries
    /// are missing.
    pub(crate) fn read_newest(state_dir: &Path) -> Result<Option<Self>, StoreError> {
        let segments = segments(&journal_dir(state_dir))?;
        for from in (0..segments.len()).rev() {
            let replay = JournalReplay::of(state_dir).with_segments(&segments[from..])?;
            // Without a complete head: a kill interrupted its write. The segment before has
            // everything.
            if replay.complete_from > 0 {
                return Ok(Some(replay).filter(JournalReplay::is_whole));
            }
        }
        Ok(None)
    }

    /// Reads every segment while a daemon may be writing. Starts again if a segment was deleted
    /// meanwhile.
    pub(crate) fn read_during_writes(state_dir: &Path) -> Result<Self, StoreError> {
        // A checkpoint deletes the oldest first, so each retry has fewer segments to lose.
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

    /// Reads more segments.
    pub(crate) fn with_segments(mut self, segments: &[(u64, PathBuf)]) -> Result<Self, StoreError> {
        segments.iter().try_for_each(|(first, path)| self.read_segment(*first, path))?;
        Ok(self)
    }

    /// Reads the next segment.
    pub(crate) fn read_segment(&mut self, first: u64, path: &Path) -> Result<(), StoreError> {
        self.segments.push((first, path.to_owned()));
        match read(path)? {
            Some(bytes) => self.segment(first, path, bytes),
            None => {
                self.damage(path, first, first);
                Ok(())
            }
        }
    }

    /// Counts confirmed entries after the last one as missing. A deleted file, or one that was cut
    /// between two records, shows no damage itself.
    pub(crate) fn expect_confirmed(&mut self) {
        if self.confirmed > self.last {
            self.gap_before(self.confirmed + 1);
            self.damaged.extend(self.segments.last().map(|(_, path)| path.clone()));
            self.damaged.dedup();
        }
    }

    /// Whether everything live is known: from a complete head on, no entry is missing up to the
    /// last confirmed one.
    pub(crate) fn is_whole(&self) -> bool {
        self.complete_from > 0 && self.gaps.is_empty() && self.last >= self.confirmed
    }

    /// The number of missing entries. The entry of an orphan is one of them.
    pub(crate) fn missing(&self) -> u64 {
        // If no entry is missing, there was no such grant.
        let is_broken = self.torn_bytes > 0 || !self.gaps.is_empty() || !self.damaged.is_empty();
        let lost = self
            .orphans
            .values()
            .filter(|(_, state)| is_broken && !matches!(state, GrantState::Released { .. }));
        self.missing_in_gaps().max(lost.count() as u64)
    }

    /// The number of missing sequence numbers.
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

    fn segment(&mut self, first: u64, path: &Path, mut bytes: Vec<u8>) -> Result<(), StoreError> {
        let (head, mut at) = match header(&bytes) {
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
        // The entries of a head are copies. If everything before the head was read, damage in it
        // costs nothing.
        let covered = (self.complete_from > 0 || self.base > 0)
            && self.gaps.is_empty()
            && self.last + 1 >= first;
        let copies_to = if covered { first + head.unwrap_or(0) } else { first };
        self.gap_before(first);
        let (mut expected, mut was_read_again) = (first, false);
        let mut in_head: Option<InHead> =
            head.map(|_| (BTreeSet::new(), self.notes.take_of_journal()));
        loop {
            if let Some(in_head) = in_head.take_if(|_| Some(expected - first) >= head) {
                self.complete_head(first, expected, in_head);
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
                            in_head.iter_mut().for_each(|(held, _)| held.extend(granted.clone()));
                        }
                        Err(Defect::Newer(version)) => {
                            return Err(StoreError::Newer { path: path.to_owned(), version });
                        }
                        // The crc is right and the text is not, so it was written like this. One
                        // entry is missing.
                        Err(Defect::Torn | Defect::Damaged) => {
                            self.damage(path, record.seq.max(copies_to), record.seq);
                            self.leave_head(in_head.take());
                        }
                    }
                }
                _ => match resynchronise(&bytes, at, expected)
                    .filter(|(next, _)| self.was_confirmed(expected, &bytes[*next..]))
                {
                    Some(_) if !was_read_again => {
                        bytes = read_again(path, bytes)?;
                        was_read_again = true;
                    }
                    Some((next, seq)) => {
                        self.damage(path, expected.max(copies_to), seq - 1);
                        self.leave_head(in_head.take());
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
        // A torn head lacks entries. The head of a following segment makes up for them.
        if let (Some(records), true, false) = (head, in_head.is_some(), covered) {
            self.gap(expected, first + records - 1);
        }
        self.leave_head(in_head);
        Ok(())
    }

    /// Replaces the state by the complete head of the segment `first`, which ends before `end`.
    fn complete_head(&mut self, first: u64, end: u64, (held, older): InHead) {
        self.complete_from = first;
        // Entries after `upto` were not applied.
        if self.upto.is_some_and(|upto| upto + 1 < end) {
            self.notes.put_back(older);
        }
        if first > self.base {
            self.gaps.clear();
            self.orphans.clear();
            self.grants.retain(|id, (_, grant)| !grant.is_live() || held.contains(id));
            // The entry that removed it may be lost.
            self.notes.drop_before(first);
        }
    }

    /// An incomplete head does not replace what was known before it.
    fn leave_head(&mut self, in_head: Option<InHead>) {
        in_head.into_iter().for_each(|(_, older)| self.notes.put_back(older));
    }

    /// Whether the write of an unreadable record was confirmed: by the lock file, or by a later
    /// write in the `rest` of its segment, which begins with a readable record. Otherwise the write
    /// is torn.
    fn was_confirmed(&self, lost: u64, rest: &[u8]) -> bool {
        // Without a lock file every entry counts.
        self.confirmed == 0 || lost <= self.confirmed || is_followed(rest, lost)
    }

    /// Records the missing entries before a segment, until its head makes up for them.
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

    /// Applies one record. Returns the grant's id, if it is a grant.
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
        if record.seq > self.base
            || self.has_older(record.seq, &entry)
            || is_only_in_journal(&entry)
        {
            self.apply(record.seq, entry);
            if let Some(id) = &granted {
                self.payloads.insert(id.clone(), record.payload.to_vec());
            }
        }
        Ok(granted)
    }

    /// Whether the database has an older state of the entry's grant: sled may lose single updates.
    fn has_older(&self, seq: u64, entry: &Entry) -> bool {
        let id = match entry {
            Entry::Grant(grant) => &grant.alloc_id,
            Entry::Moved { alloc_id, .. } => alloc_id,
            _ => return false,
        };
        self.grants.get(id).is_some_and(|(at, _)| *at < seq)
    }

    fn apply(&mut self, seq: u64, entry: Entry) {
        match entry {
            Entry::Grant(grant) => {
                self.orphans.remove(&grant.alloc_id);
                self.payloads.remove(&grant.alloc_id);
                self.grants.insert(grant.alloc_id.clone(), (seq, Arc::unwrap_or_clone(grant)));
            }
            Entry::Moved { alloc_id, state } => match self.grants.get_mut(&alloc_id) {
                // No entry follows a release. The store ignores such an entry too.
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
            // The database has removed their names already.
            Entry::Forgotten { devices } if seq <= self.base => self.notes.forget_health(&devices),
            note => drop(self.notes.apply(seq, &note)),
        }
    }
}
