//! Whose status is written next, and when.

use super::claims::{ClaimPatch, EntryKey, SeenClaim, SeenEntry, StoredEntry};
use super::{FORBIDDEN_FOR, Outcome, Step};
use crate::domain::{ClaimRef, Moment, Pace, Timestamp};
use std::collections::BTreeMap;
use std::time::Duration;

/// Until a change is written: several changes in quick succession are one write.
const CHANGE_AFTER: Duration = Duration::from_secs(1);
/// Until another message alone is written: the reading in it may change with each probe.
const MESSAGE_AFTER: Duration = Duration::from_secs(60);
/// The time between two writes of one claim: a device that flaps writes six times a minute.
const CLAIM_EVERY: Duration = Duration::from_secs(10);
/// Requests at once after a pause: the claims of the pods of a node that was empty.
const BURST: u32 = 8;
/// One request in this time, for as long as there are changes.
const REQUEST_EVERY: Duration = Duration::from_secs(1);
/// The first reads after a start are spread over this time by node: a rollout of the DaemonSet
/// starts many nodes at once.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// After the end of a claim its entries are removed, unless the control plane has deallocated or
/// deleted it by then: it does so when the pods have ended, and that removes the entries too.
const REMOVED_AFTER: Duration = Duration::from_secs(10);
/// Ended claims whose entries are still to be removed. The oldest are forgotten for new ones: their
/// entries stay until the control plane deallocates them.
const ENDED_MAX: usize = 256;
/// A claim whose write was refused is tried again after this time: the control plane may have
/// deallocated it, and its pods end.
const REFUSED_FOR: Duration = Duration::from_secs(300);

/// A request about one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Get the claim: what an earlier process wrote is compared with what is true.
    Read(ClaimRef),
    /// Apply this patch to its status.
    Write(ClaimRef, Box<ClaimPatch>),
}

/// The entries of this driver in the status of a claim.
pub type Stored = BTreeMap<EntryKey, StoredEntry>;

/// What the API server has of a claim.
#[derive(Debug)]
enum Known {
    /// Not read yet.
    Nothing,
    /// These entries.
    Stored(Stored),
    /// The claim does not exist any more. Its devices are held until its processes have ended.
    Gone,
}

#[derive(Debug)]
struct Claim {
    claim: ClaimRef,
    /// `None` after its end: the entries are to be removed.
    seen: Option<SeenClaim>,
    /// Since when each condition has its status.
    since: BTreeMap<EntryKey, [Timestamp; 2]>,
    known: Known,
    /// When what is known began to differ from what is true, and the pause after that.
    due: Option<Duration>,
    /// No request before this time.
    not_before: Duration,
}

impl Claim {
    /// A claim of this process has no entries yet.
    fn new(claim: ClaimRef, is_older: bool) -> Self {
        let known = if is_older { Known::Nothing } else { Known::Stored(Stored::new()) };
        let (seen, since, due, not_before) = (None, BTreeMap::new(), None, Duration::ZERO);
        Claim { claim, seen, since, known, due, not_before }
    }

    /// Takes what is true now.
    fn take(&mut self, seen: SeenClaim, now: Moment) {
        let former = self.seen.take();
        if former.as_ref().is_none_or(|former| former.grants != seen.grants) {
            // Allocated or prepared again. The API server has removed the former entries, or
            // the next write replaces them.
            if former.is_some() || !matches!(self.known, Known::Nothing) {
                self.known = Known::Stored(Stored::new());
                (self.due, self.not_before) = (None, Duration::ZERO);
            }
        }
        let mut since = std::mem::take(&mut self.since);
        for (key, entry) in &seen.entries {
            let mut times = since.remove(key).unwrap_or([now.wall; 2]);
            let before = former.as_ref().and_then(|former| former.entries.get(key));
            for (number, condition) in entry.conditions.iter().enumerate() {
                let same =
                    before.is_some_and(|it| it.conditions[number].status == condition.status);
                if !same {
                    times[number] = now.wall;
                }
            }
            self.since.insert(key.clone(), times);
        }
        self.seen = Some(seen);
    }

    /// The pause before the next request; `None` if the API server has what is true.
    fn pause(&self, read_within: Duration) -> Option<Duration> {
        let stored = match &self.known {
            Known::Gone => return None,
            Known::Nothing if self.seen.is_none() => return Some(REMOVED_AFTER),
            Known::Nothing => return Some(read_within),
            Known::Stored(stored) => stored,
        };
        let Some(seen) = &self.seen else {
            return (!stored.is_empty()).then_some(REMOVED_AFTER);
        };
        let all = |is_it: fn(&StoredEntry, &SeenEntry) -> bool| {
            let mut entries = seen.entries.iter();
            entries.all(|(key, entry)| stored.get(key).is_some_and(|it| is_it(it, entry)))
        };
        if stored.len() != seen.entries.len() || !all(StoredEntry::is_like) {
            return Some(CHANGE_AFTER);
        }
        (!all(StoredEntry::has_messages)).then_some(MESSAGE_AFTER)
    }

    /// The entries that it should have.
    fn wanted(&self) -> Stored {
        let Some(seen) = &self.seen else { return Stored::new() };
        let empty = Stored::new();
        let stored = match &self.known {
            Known::Stored(stored) => stored,
            Known::Nothing | Known::Gone => &empty,
        };
        let entries = seen.entries.iter().map(|(key, entry)| {
            let known = stored.get(key);
            let since = self.since.get(key).copied().unwrap_or_default();
            let conditions = std::array::from_fn(|number| {
                let content = entry.conditions[number].clone();
                let known = known.and_then(|known| known.conditions[number].as_ref());
                let same = known.filter(|(known, _)| known.status == content.status);
                Some((content, same.map_or(since[number], |(_, time)| *time)))
            });
            let network = entry.network.clone().or_else(|| known?.network.clone());
            (key.clone(), StoredEntry { conditions, network })
        });
        entries.collect()
    }
}

/// Decides the requests about the claims of one node.
#[derive(Debug)]
pub struct Statuses {
    pace: Pace,
    is_begun: bool,
    claims: BTreeMap<String, Claim>,
    /// The UID of the claim, and the entries that are written; `None`: it is read.
    in_flight: Option<(String, Option<Stored>)>,
}

impl Statuses {
    /// Those of a node.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Statuses {
            pace: Pace::new(node, BURST, REQUEST_EVERY),
            is_begun: false,
            claims: BTreeMap::new(),
            in_flight: None,
        }
    }

    /// Takes the claims that are prepared now. The first ones may be those of an earlier process.
    pub fn observe(&mut self, seen: BTreeMap<String, SeenClaim>, now: Moment) {
        let is_first = !std::mem::replace(&mut self.is_begun, true);
        for (uid, claim) in &mut self.claims {
            if !seen.contains_key(uid) && claim.seen.take().is_some() {
                claim.due = None;
            }
        }
        for (uid, seen) in seen {
            let claim = self
                .claims
                .entry(uid)
                .or_insert_with(|| Claim::new(seen.claim.clone(), is_first || seen.is_older));
            claim.take(seen, now);
        }
        self.update(now.boot);
    }

    /// Decides when each claim is due.
    fn update(&mut self, now: Duration) {
        let read_within = self.pace.share(READ_WITHIN);
        for claim in self.claims.values_mut() {
            let pause = claim.pause(read_within);
            claim.due = pause.map(|pause| claim.due.unwrap_or(Duration::MAX).min(now + pause));
        }
        self.claims.retain(|_, claim| claim.seen.is_some() || claim.due.is_some());
        let ended = self.claims.iter().filter(|(_, claim)| claim.seen.is_none());
        let mut ended: Vec<_> = ended.map(|(uid, claim)| (claim.due, uid.clone())).collect();
        ended.sort();
        let surplus = ended.len().saturating_sub(ENDED_MAX);
        for (_, uid) in ended.into_iter().take(surplus) {
            self.claims.remove(&uid);
        }
    }

    /// Whether nothing has to be written.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.claims.values().all(|claim| claim.due.is_none())
    }

    /// The next step.
    pub fn next(&mut self, now: Moment) -> Step<Request> {
        let due = self
            .claims
            .iter()
            .filter_map(|(uid, claim)| Some((claim.due?.max(claim.not_before), uid, claim)));
        let Some((at, uid, claim)) = due.min_by_key(|(at, uid, _)| (*at, *uid)) else {
            return Step::Wait(None);
        };
        let ready = self.pace.ready_at().max(at);
        if now.boot < ready {
            return Step::Wait(Some(ready));
        }
        self.pace.spend(now.boot);
        let of = claim.claim.clone();
        if matches!(claim.known, Known::Nothing) && claim.seen.is_some() {
            self.in_flight = Some((uid.clone(), None));
            return Step::Write(Request::Read(of));
        }
        let wanted = claim.wanted();
        let patch = Box::new(ClaimPatch::new(&of, &wanted));
        self.in_flight = Some((uid.clone(), Some(wanted)));
        Step::Write(Request::Write(of, patch))
    }

    /// The answer to the last request: after a read, the entries of the claim. A claim of this name
    /// with another UID is [`Outcome::Absent`].
    pub fn done(&mut self, outcome: Outcome<Stored>, now: Moment) {
        let Some((uid, sent)) = self.in_flight.take() else { return };
        let spread = self.pace.share(FORBIDDEN_FOR);
        let Some(claim) = self.claims.get_mut(&uid) else { return };
        let was_read = sent.is_none();
        match outcome {
            Outcome::Accepted(found) => {
                self.pace.succeed();
                // Not the answer to a write: a program that changes each write would cause a write
                // each time.
                claim.known = Known::Stored(sent.unwrap_or(found));
                claim.due = None;
                if !was_read {
                    claim.not_before = now.boot + CLAIM_EVERY;
                }
            }
            Outcome::Absent => {
                self.pace.succeed();
                claim.known = Known::Gone;
            }
            // All that it has is replaced. The answer to the write shows whether that is permitted.
            Outcome::Refused | Outcome::Forbidden if was_read => {
                self.pace.succeed();
                claim.known = Known::Stored(Stored::new());
                claim.due = None;
            }
            Outcome::Refused if claim.seen.is_none() => {
                self.pace.succeed();
                claim.known = Known::Gone;
            }
            Outcome::Refused => {
                self.pace.succeed();
                claim.not_before = now.boot + REFUSED_FOR + self.pace.share(REFUSED_FOR);
            }
            Outcome::Forbidden => self.pace.pause(now.boot, FORBIDDEN_FOR + spread),
            Outcome::Failed(retry_after) => {
                // Other claims first: the failure may be that of this object.
                claim.not_before = now.boot + CLAIM_EVERY;
                self.pace.fail(now.boot);
                self.pace.pause_as_asked(now.boot, retry_after.unwrap_or_default());
            }
        }
        self.update(now.boot);
    }
}

#[cfg(test)]
mod tests;
