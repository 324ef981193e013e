//! How the thread comes by an open database, and what it says meanwhile.

use super::{Desk, check_mine, damaged, history_stays};
use crate::domain::{Timestamp, Unreadable, UnreadableReason};
use crate::store::StoreError;
use crate::store::database::{Image, Shelf};
use crate::store::follow::{Start, follow};
use crate::store::layout::{exchange, quarantine, remove, require_room};
use crate::store::opening::{Attempt, Opened};
use crate::store::recovery::database_finding;
use crate::store::shared::Late;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long after it could not be opened it is tried again: twice as long each time, up to the second.
const RETRY_AFTER: Duration = if cfg!(test) { Duration::from_millis(1) } else { Duration::from_secs(1) };
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// The next attempt to open the database.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    pub(super) at: Instant,
    /// Whether somebody who wants it need not wait for that time.
    pub(super) may_come_before: bool,
}

impl Desk {
    pub(super) fn try_to_open(&mut self) {
        self.next = None;
        match require_room(&self.dir) {
            Ok(()) => self.attempt = Some(Attempt::begin(&self.dir)),
            Err(error) => self.refuse(&error),
        }
    }

    /// Looks how the opening gets on, or begins it when it is time.
    pub(super) fn go_on(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            let mut moved = Vec::new();
            let outcome = attempt.wait_for(Duration::ZERO, || check_mine(&self.shared, &self.dir), &mut moved);
            let is_late = attempt.is_late();
            self.shared.late().add(Late { quarantined: std::mem::take(&mut moved), ..Late::default() });
            match outcome {
                None if is_late => self.say_late(),
                None => {}
                Some(outcome) => {
                    self.attempt = None;
                    self.end_attempt(outcome);
                }
            }
        } else if self.shelf.is_none() && self.next.is_some_and(|next| next.at <= Instant::now()) {
            self.try_to_open();
        }
        if self.attempt.as_ref().is_none_or(Attempt::is_late) {
            for order in std::mem::take(&mut self.waiting) {
                self.answer(order);
            }
        }
    }

    fn end_attempt(&mut self, outcome: Result<Opened, StoreError>) {
        let outcome = match outcome {
            // Nobody else has it: the state directory is ours.
            Err(StoreError::InUse { .. }) if self.is_beside_stuck && self.stuck.is_none() => exchange(&self.dir).map(|stuck| {
                self.stuck = Some(stuck);
                self.attempt = Some(Attempt::begin(&self.dir));
            }),
            Err(error) => Err(error),
            Ok(opened) => self.fill(opened),
        };
        if let Err(error) = outcome {
            self.refuse(&error);
        }
    }

    /// Gives the open database what the journal has. A database that contradicts the journal is moved away for a person to look at, and
    /// one that cannot be written although there is room is damaged too.
    fn fill(&mut self, Opened { mut shelf, holds, salvaged }: Opened) -> Result<(), StoreError> {
        let start = self.start.clone();
        if let Some(Start { last, may_have_lost: false, .. }) = start
            && salvaged.is_none()
            && holds.last > last
        {
            let finding = format!("the query database knows entry {}, and the journal ends at {last}", holds.last);
            shelf.close();
            self.move_away(finding)?;
            self.attempt = Some(Attempt::begin(&self.dir));
            return Ok(());
        }
        // What comes from now on is told.
        self.shared.behind.store(false, Ordering::Release);
        let may_be_lost = salvaged.as_ref().map_or(&holds, |(image, _)| image);
        let followed = match follow(&mut shelf, &holds, may_be_lost, &self.state_dir, start.as_ref(), || self.shared.beat()) {
            Ok(followed) => followed,
            Err(StoreError::Database { why, .. }) if salvaged.is_none() => {
                shelf.close();
                self.move_away(history_stays(&why))?;
                self.attempt = Some(Attempt::beside(&self.dir, (Image::default(), String::new())));
                return Ok(());
            }
            Err(error) => {
                shelf.close();
                return Err(error);
            }
        };
        if let Some(until) = self.given_up.filter(|until| *until > Timestamp(0)) {
            shelf.forget_until(until)?;
        }
        let mut found = Late { found: followed.found, ..Late::default() };
        match (&salvaged, &start) {
            // That has been said.
            (Some((_, why)), _) if why.is_empty() => {}
            (Some((_, why)), _) => found.findings.push(history_stays(why)),
            (None, Some(start)) if self.given_up.is_none() => {
                found.findings.extend(database_finding(followed.oldest, &holds, start.existed));
            }
            (None, Some(_)) => {}
            (None, None) => {}
        }
        for path in followed.damaged.iter().filter(|_| start.is_some()) {
            // The start has told of those that it has read.
            found.findings.extend(start.iter().filter(|start| !start.may_have_lost).map(|_| damaged(path)));
            match quarantine(path) {
                Ok(moved) => found.quarantined.push(moved),
                Err(error) => tracing::warn!(%error, "a damaged segment of the journal stays where it is"),
            }
        }
        if let Some(stuck) = self.stuck.take() {
            // The copy has everything that it has.
            if salvaged.is_some() {
                found.quarantined.push(stuck);
            } else if let Err(error) = remove(&stuck) {
                tracing::warn!(%error, "a database that hangs stays where it is");
            }
        }
        self.given_up = None;
        self.shared.late().add(found);
        self.is_open(shelf, start.as_ref());
        Ok(())
    }

    fn is_open(&mut self, shelf: Shelf, start: Option<&Start>) {
        let (was_closed, found) = (self.shared.unreadable(), self.shared.late().found.len());
        (self.shelf, self.start, self.refused, self.is_beside_stuck) = (Some(shelf), None, 0, false);
        self.shared.note_unreadable(None);
        if let Some(Unreadable { since, .. }) = was_closed {
            tracing::info!(since = since.to_seconds(), found, "the query database is open, and has what the journal has");
        }
        let Some(start) = start else { return };
        if start.may_have_lost {
            self.recount();
        }
        let late = self.shared.late();
        if !late.findings.is_empty() {
            let found = late.findings.join("; ");
            tracing::warn!(found, moved = ?late.quarantined, "the ledger was damaged, and has lost nothing that is live");
        }
    }

    /// Moves the database away, which is closed.
    fn move_away(&self, finding: String) -> Result<(), StoreError> {
        check_mine(&self.shared, &self.dir)?;
        let moved = quarantine(&self.dir)?;
        self.shared.late().add(Late { findings: vec![finding], quarantined: vec![moved], ..Late::default() });
        Ok(())
    }

    /// The system does not let it be opened: it is tried again after a while.
    fn refuse(&mut self, error: &StoreError) {
        if self.shared.is_left() {
            return;
        }
        self.why = error.to_string();
        let wait = RETRY_AFTER.saturating_mul(1 << self.refused.min(6)).min(RETRY_AFTER_MAX);
        self.next = Some(Next { at: Instant::now() + wait, may_come_before: false });
        self.shared.note_unreadable(Some(Unreadable { since: self.closed_at, because: UnreadableReason::Refused }));
        // There are many attempts; the first one tells.
        if self.refused == 0 {
            tracing::error!(%error, "the query database stays closed, and is tried again; grants are still recorded in the journal");
        } else {
            tracing::debug!(%error, "the query database stays closed");
        }
        self.refused = self.refused.saturating_add(1);
    }

    fn say_late(&mut self) {
        let slow = Unreadable { since: self.closed_at, because: UnreadableReason::Slow };
        if self.shared.unreadable() != Some(slow) {
            self.why = format!("it has been opening since {}, as on a slow disk", self.closed_at.to_seconds());
            self.shared.note_unreadable(Some(slow));
            tracing::warn!(
                since = self.closed_at.to_seconds(),
                "the history cannot be read yet: its database is slow to open, and goes on; grants are recorded in the journal, and nothing is lost"
            );
        }
    }

    /// Whether the database is open soon, so that it is worth waiting for; one that need not be closed is opened for it.
    pub(super) fn is_opening(&mut self, is_checkpoint: bool) -> bool {
        let may_try = self.next.map_or(is_checkpoint, |next| next.may_come_before);
        if self.shelf.is_none() && self.attempt.is_none() && may_try {
            self.try_to_open();
        }
        self.shelf.is_none() && self.attempt.as_ref().is_some_and(|attempt| !attempt.is_late())
    }

    /// Says how much of the history is gone.
    pub(super) fn recount(&mut self) {
        let mut lost = 0;
        self.write(|shelf| shelf.recount().map(|count| lost = count));
        if lost > 0 {
            let finding = format!("the query database has lost {lost} of its released grants");
            tracing::warn!("{finding}; what is live is not touched by that");
            self.shared.late().findings.push(finding);
        }
    }
}
