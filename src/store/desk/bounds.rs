//! What keeps the state directory small: nothing in it grows for ever, and no Allocate waits for that.
//!
//! | what | its bound |
//! | --- | --- |
//! | the history's records | a third of `history_size`, and less beside thousands of live grants |
//! | the database's files | five and a half times its records: then it is written anew beside them, which takes three and a half times more |
//! | the journal, beside what is live | some megabytes; half of `history_size` while the database cannot be written |
//! | what was damaged once | `history_size`, and the age of the history; the newest stays whatever its size |
//!
//! Together four times `history_size`, beside what was damaged: [`Retention::records`] has the sum.

use super::{Desk, check_mine, now};
use crate::domain::{GrantState, Retention, Timestamp};
use crate::host;
use crate::store::journal;
use crate::store::layout::{ROOM_MIN, fresh_dir, journal_dir, moved_aside, put_fresh_in_place, remove};
use crate::store::opening::Attempt;
use crate::store::replay::Fold;
use crate::store::{SEGMENT_BYTES_MAX, StoreError};
use std::fs;
use std::path::Path;

/// So much of the journal is kept for a database that cannot be written, however small the history is to be.
const JOURNAL_MIN: u64 = 2 * SEGMENT_BYTES_MAX;
/// So many damaged files and directories are kept.
const ASIDE_MAX: usize = 8;

impl Desk {
    /// Behind a checkpoint: nobody waits for it.
    pub(super) fn keep_small(&mut self) {
        self.write_anew();
        if !self.shared.is_left() {
            forget_aside(&self.state_dir, self.retention, now());
        }
    }

    /// Writes a database anew whose files are far longer than what is in them. Until the new one is whole and durable the old one is the
    /// database, and what is recorded meanwhile is in the journal.
    fn write_anew(&mut self) {
        let Some(shelf) = self.shelf.as_ref().filter(|_| !self.stays_large) else { return };
        match shelf.is_bloated() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return self.abandon(&error),
        }
        let before = host::size_below(&self.dir);
        if host::free_bytes(&self.dir) < before.saturating_add(ROOM_MIN) {
            return tracing::debug!(bytes = before, "there is no room to write the query database anew");
        }
        let fresh = fresh_dir(&self.dir);
        let go_on = || {
            self.shared.beat();
            !self.shared.is_left() && !self.shared.hurries()
        };
        let written = remove(&fresh).and_then(|()| shelf.write_anew(&fresh, go_on));
        let written = written.and_then(|written| check_mine(&self.shared, &self.dir).map(|()| written));
        if !matches!(written, Ok(true)) {
            if let Err(error) = &written {
                tracing::warn!(%error, "the query database cannot be written anew, and stays as large as it is");
                self.stays_large = true;
            }
            drop(remove(&fresh));
            return;
        }
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
        match put_fresh_in_place(&self.dir) {
            Ok(()) => tracing::debug!(before, after = host::size_below(&self.dir), "the query database was written anew"),
            Err(error) => {
                tracing::warn!(%error, "the query database that was written anew cannot take its place");
                self.stays_large = true;
            }
        }
        self.closed_at = now();
        self.attempt = Some(Attempt::begin(&self.dir));
    }

    /// Gives up the journal's oldest segments when it is longer than it may be without a database. Their live grants are in every later
    /// head; what goes is history, and that is said.
    pub(super) fn give_up_oldest(&mut self, newest: u64) -> Result<(), StoreError> {
        let dir = journal_dir(&self.state_dir);
        let older = journal::sizes_before(&dir, newest)?;
        let newest_bytes = fs::metadata(dir.join(journal::file_name(newest))).map_or(0, |about| about.len());
        // With thousands of live grants the heads are most of it.
        let most = self.retention.journal().max(JOURNAL_MIN).max(2 * newest_bytes);
        let mut bytes: u64 = older.iter().map(|(_, _, bytes)| bytes).sum();
        for (first, path, length) in &older {
            if bytes <= most {
                break;
            }
            bytes -= length;
            let released = self.released_in(*first, path);
            let until = released.iter().copied().max();
            self.given_up = self.given_up.max(until).or(Some(Timestamp(0)));
            tracing::warn!(
                grants = released.len(),
                until = until.map(Timestamp::to_seconds),
                "the history loses grants that were given back: the journal is as long as it may be while the query database cannot be written"
            );
            journal::delete(path)?;
        }
        Ok(())
    }

    /// When grants were released that a segment tells of.
    fn released_in(&self, first: u64, segment: &Path) -> Vec<Timestamp> {
        let mut fold = Fold::of(&self.state_dir);
        // What cannot be read is of no use for the database either.
        drop(fold.read_segment(first, segment));
        let at = |state: &GrantState| if let GrantState::Released { released_at, .. } = state { Some(*released_at) } else { None };
        fold.take_released().iter().filter_map(|(_, grant)| at(&grant.state)).collect()
    }
}

/// Deletes the oldest of what was moved aside when there is too much of it.
pub(in crate::store) fn forget_aside(state_dir: &Path, retention: Retention, now: Timestamp) {
    // Its name ends with the time.
    let moved_at = |path: &Path| path.to_string_lossy().rsplit('-').next().and_then(|millis| millis.parse().ok()).unwrap_or(0_u64);
    let mut aside: Vec<_> = moved_aside(state_dir).into_iter().map(|path| (moved_at(&path), path)).collect();
    aside.sort_unstable_by(|one, other| other.cmp(one));
    let oldest = now.0.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX));
    let mut kept = 0_u64;
    for (place, (at, path)) in aside.iter().enumerate() {
        let bytes = if path.is_dir() { host::size_below(path) } else { path.metadata().map_or(0, |about| about.len()) };
        let is_too_much = place > 0 && (place >= ASIDE_MAX || kept.saturating_add(bytes) > retention.bytes);
        if !is_too_much && *at >= oldest {
            kept += bytes;
            continue;
        }
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Ok(()) => tracing::warn!(
                path = %path.display(), bytes,
                "what was damaged and moved aside is deleted, with whatever only it had: it is {}", if is_too_much { "too much" } else { "too old" }
            ),
            Err(error) => tracing::debug!(path = %path.display(), %error, "what was moved aside stays"),
        }
    }
}
