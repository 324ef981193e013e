//! How the index thread comes by an open database, and what it reports meanwhile.

use super::follow::follow;
use super::opening::{Attempt, Next, Opened};
use super::task::IndexTask;
use crate::domain::{Timestamp, Unreadable, UnreadableReason};
use crate::store::StoreError;
use crate::store::journal::damage_finding;
use crate::store::layout::{has_free_space, quarantine, require_free_space};
use crate::store::recovery::{database_finding, history_finding};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Backoff after the system has refused to open it: doubled each time, up to the second.
const RETRY_AFTER: Duration = if cfg!(test) { Duration::from_millis(1) } else { Duration::from_secs(1) };
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

impl IndexTask {
    /// Whether the database opens, so that a request waits. A database that is not due yet is opened for it.
    pub(super) fn is_opening(&mut self, is_checkpoint: bool) -> bool {
        let may_try = self.next.map_or(is_checkpoint, |next| next.may_come_before);
        if self.database.is_none() && self.attempt.is_none() && may_try {
            self.try_to_open();
        }
        self.database.is_none() && self.attempt.as_ref().is_some_and(|attempt| !attempt.is_late())
    }

    /// Opens the database when it is time, or looks how the opening gets on.
    pub(super) fn drive(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            let mut moved = Vec::new();
            let outcome = attempt.wait_for(Duration::ZERO, &mut moved);
            let is_late = attempt.is_late();
            moved.into_iter().for_each(|path| self.shared.late().quarantined(path));
            match outcome {
                None if is_late => self.report_late(),
                None => {}
                Some(outcome) => {
                    self.attempt = None;
                    self.end_attempt(outcome);
                }
            }
        } else if self.database.is_none() && self.next.is_some_and(|next| next.at <= Instant::now()) {
            self.try_to_open();
        }
        if self.attempt.as_ref().is_none_or(Attempt::is_late) {
            for request in std::mem::take(&mut self.waiting) {
                self.answer(request);
            }
        }
    }

    pub(super) fn try_to_open(&mut self) {
        self.next = None;
        match require_free_space(&self.dir) {
            Ok(()) => self.attempt = Some(Attempt::begin(&self.dir, None)),
            Err(error) => self.retry_later(&error),
        }
    }

    pub(super) fn end_attempt(&mut self, outcome: Result<Opened, StoreError>) {
        let filled = match outcome {
            Ok(opened) if has_free_space(&self.dir) => self.fill(opened),
            Ok(opened) => {
                self.database = Some(opened.database);
                return self.wait_for_space();
            }
            Err(error) => Err(error),
        };
        if let Err(error) = filled {
            self.retry_later(&error);
        }
    }

    /// Gives the open database what the journal has. One that cannot be written although there is space is damaged too.
    pub(super) fn fill(&mut self, Opened { mut database, snapshot, replaced }: Opened) -> Result<(), StoreError> {
        self.shared.behind.store(false, Ordering::Release);
        let followed = match follow(&mut database, &snapshot, &self.state_dir, self.start.as_ref(), || self.shared.beat()) {
            Ok(followed) => followed,
            Err(StoreError::Database { why, .. }) if replaced.is_none() => {
                database.close();
                let moved = quarantine(&self.dir)?;
                self.shared.late().quarantined(moved);
                self.attempt = Some(Attempt::begin(&self.dir, Some(why)));
                return Ok(());
            }
            Err(error) => {
                database.close();
                return Err(error);
            }
        };
        let given_up = *self.shared.given_up();
        if let Some(until) = given_up.filter(|until| *until > Timestamp(0)) {
            database.forget_until(until)?;
        }
        let finding = match (&replaced, &self.start) {
            (Some(why), _) => Some(history_finding(why)),
            (None, Some(start)) if given_up.is_none() => {
                start.existed.and_then(|existed| database_finding(followed.oldest, snapshot.applied, existed))
            }
            (None, _) => None,
        };
        self.database = Some(database);
        *self.shared.given_up() = None;
        let mut late = self.shared.late();
        finding.into_iter().for_each(|finding| late.finding(finding));
        for path in followed.damaged.iter().filter(|_| self.start.is_some()) {
            late.finding(damage_finding(path));
            match quarantine(path) {
                Ok(moved) => late.quarantined(moved),
                Err(error) => tracing::warn!(%error, "failed to move a damaged journal segment away"),
            }
        }
        let found = followed.found.len();
        late.found.extend(followed.found);
        drop(late);
        self.report_open(found);
        Ok(())
    }

    pub(super) fn report_open(&mut self, found: usize) {
        self.refused = 0;
        if let Some(Unreadable { since, .. }) = self.shared.note_readable() {
            tracing::info!(since = since.to_seconds(), found, "the query database is open, and has what the journal has");
        }
        let Some(start) = self.start.take() else { return };
        if start.recounts {
            self.recount();
        }
        let late = self.shared.late();
        if !late.findings.is_empty() {
            let found = late.findings.join("; ");
            tracing::warn!(found, moved = ?late.quarantined, "the ledger was damaged, and has lost nothing that is live");
        }
    }

    /// Reports how much of the history is gone.
    pub(super) fn recount(&mut self) {
        let mut lost = 0;
        self.write(|database| database.recount().map(|count| lost = count));
        if lost > 0 {
            let finding = format!("the query database has lost {lost} of its released grants");
            tracing::warn!("{finding}; live grants are not affected");
            self.shared.late().finding(finding);
        }
    }

    /// The system does not let it be opened: it is tried again after a while.
    pub(super) fn retry_later(&mut self, error: &StoreError) {
        self.why = error.to_string();
        let wait = RETRY_AFTER.saturating_mul(1 << self.refused.min(6)).min(RETRY_AFTER_MAX);
        self.next = Some(Next { at: Instant::now() + wait, may_come_before: false });
        self.shared.note_unreadable(self.closed_at, UnreadableReason::Refused);
        // There are many attempts; the first one is logged.
        if self.refused == 0 {
            tracing::error!(%error, "the query database stays closed, and is tried again; grants are still recorded in the journal");
        } else {
            tracing::debug!(%error, "the query database stays closed");
        }
        self.refused = self.refused.saturating_add(1);
    }

    pub(super) fn report_late(&mut self) {
        let slow = Unreadable { since: self.closed_at, because: UnreadableReason::Slow };
        if self.shared.unreadable() != Some(slow) {
            self.why = format!("it has been opening since {}, as on a slow disk", self.closed_at.to_seconds());
            self.shared.note_unreadable(slow.since, slow.because);
            tracing::warn!(
                since = self.closed_at.to_seconds(),
                "the history cannot be read yet: its database is slow to open; grants are recorded in the journal, and nothing is lost"
            );
        }
    }
}
