//! Reconciliation as a part of the actor: the observer of the kubelet, and the time of the next
//! pass.

use super::config::LedgerConfig;
use super::core::{Agenda, LOOK_HELD, LedgerState, pending_releases};
use super::observe::{KubeletAge, KubeletObserver, Wants};
use super::sight::{Seen, refusal};
use crate::domain::{Grant, Moment, PendingReleases, Refusal};
use actix::SpawnHandle;
use std::cell::LazyCell;
use std::time::{Duration, Instant};

/// Rate limit: the minimum pause after a pass, as a multiple of its duration. Passes get slower as
/// more grants are held, and a busy kubelet requests a pass all the time.
const REST: u32 = 4;
/// The longest such pause: a kubelet that answers late must not delay the next pass for long.
const REST_MAX: Duration = Duration::from_secs(1);

/// The longest pause between two lists that are sent again.
const RESEND_MAX: Duration = Duration::from_secs(60);

/// The time of the next pass.
#[derive(Debug)]
pub(super) struct ReconcileTimer {
    /// The start of the running pass.
    pub(super) under_way: Option<Instant>,
    /// Whether another pass was requested during this one, or before the pause ended.
    pub(super) again: bool,
    rest_until: Instant,
    pub(super) timer: Option<SpawnHandle>,
}

impl ReconcileTimer {
    pub(super) fn new() -> Self {
        ReconcileTimer { under_way: None, again: false, rest_until: Instant::now(), timer: None }
    }

    /// Begins a pass if the rate limit allows it. Otherwise a later one is noted.
    pub(super) fn begin(&mut self, now: Instant) -> bool {
        self.again = self.under_way.is_some() || self.rest_until > now;
        if !self.again {
            self.under_way = Some(now);
        }
        !self.again
    }

    pub(super) fn end(&mut self, now: Instant) {
        let took = self
            .under_way
            .take()
            .map_or(Duration::ZERO, |began| now.saturating_duration_since(began));
        self.rest_until = now + took.saturating_mul(REST).min(REST_MAX);
    }

    /// The wait until the next pass: `usual`, unless one was requested.
    pub(super) fn wait(&self, now: Instant, usual: impl FnOnce() -> Duration) -> Duration {
        if self.again { self.rest_until.saturating_duration_since(now) } else { usual() }
    }
}

/// When the lists are sent again, so that the kubelet writes its checkpoint. It forgets no pod
/// before it has heard from the API server, and each of its writes causes a pass.
#[derive(Debug, Default)]
pub(super) struct Resend {
    /// The time of the last one, and the pause after it.
    last: Option<(Instant, Duration)>,
}

impl Resend {
    /// Whether they are sent now. `is_outdated` is whether the checkpoint still has a removed pod.
    pub(super) fn is_due(&mut self, is_outdated: bool, now: Instant) -> bool {
        let pause = match self.last.filter(|_| is_outdated) {
            None => LOOK_HELD,
            Some((at, pause)) if now.saturating_duration_since(at) >= pause => {
                (pause * 2).min(RESEND_MAX)
            }
            Some(_) => return false,
        };
        self.last = is_outdated.then_some((now, pause));
        is_outdated
    }
}

/// The state of reconciliation.
pub(super) struct Reconciler {
    pub(super) observer: KubeletObserver,
    pub(super) timer: ReconcileTimer,
    pub(super) resend: Resend,
    kubelet_age: KubeletAge,
}

impl Reconciler {
    pub(super) fn new(config: &LedgerConfig) -> Self {
        Reconciler {
            observer: KubeletObserver::new(config),
            timer: ReconcileTimer::new(),
            resend: Resend::default(),
            kubelet_age: KubeletAge::default(),
        }
    }

    /// The questions for the next pass.
    pub(super) fn wants<R>(
        &mut self,
        state: &LedgerState<R>,
        config: &LedgerConfig,
        now: Moment,
    ) -> Wants {
        let kubelet = *config.kubelet.borrow();
        let agenda = Agenda::of(state.ledger(), state.watchlist(), now);
        Wants { agenda, kubelet, kubelet_settled: self.kubelet_age.is_settled(kubelet, now) }
    }

    /// The releases that wait for proof. Reads the cgroups of all pods, as the timer's check does.
    pub(super) fn pending<R>(
        &mut self,
        state: &LedgerState<R>,
        config: &LedgerConfig,
        now: Moment,
    ) -> PendingReleases {
        let ledger = state.ledger();
        let settled = self.kubelet_age.is_settled(*config.kubelet.borrow(), now);
        let cgroups = self.observer.cgroups(ledger.pods().union(&ledger.claim_pods()).copied());
        let cgroup = |uid: &str| cgroups.get(uid).copied().unwrap_or_default();
        let (logs, boot_id) = (LazyCell::new(|| self.observer.names()), &config.boot_id);
        let has_logs = |uid: &str| logs.contains_key(uid);
        pending_releases(ledger, state.watchlist(), boot_id, settled, &cgroup, &has_logs, now)
    }

    /// Why an exclusive grant is refused, from the observations of the kubelet (I2).
    pub(super) fn refusal<R>(
        &mut self,
        state: &LedgerState<R>,
        config: &LedgerConfig,
        grant: &Grant,
        seen: &Seen,
        now: Moment,
    ) -> Option<Refusal> {
        let settled = self.kubelet_age.is_settled(*config.kubelet.borrow(), now);
        let refuse = config.plan.borrow().ledger.refuse;
        refusal(state.ledger(), state.watchlist(), grant, &self.observer, settled, seen, refuse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_is_called_for_comes_after_a_rest_four_times_as_long_as_the_last_one() {
        let mut timer = ReconcileTimer::new();
        let ms = Duration::from_millis;
        let begin = Instant::now();
        let usual = || Duration::from_secs(15);
        assert!(timer.begin(begin));
        assert!(!timer.begin(begin + ms(5)), "one at a time");
        timer.end(begin + ms(20));
        assert_eq!(timer.wait(begin + ms(20), usual), ms(80), "a pass was requested");
        assert!(!timer.begin(begin + ms(99)));
        assert_eq!(timer.wait(begin + ms(99), usual), ms(1));
        assert!(timer.begin(begin + ms(100)));
        assert_eq!(timer.wait(begin + ms(100), usual), usual(), "no other pass was requested");
        timer.end(begin + Duration::from_secs(60));
        assert!(!timer.begin(begin + Duration::from_secs(60)));
        assert_eq!(timer.wait(begin + Duration::from_secs(60), usual), REST_MAX);
    }

    /// Each write of the checkpoint causes a pass, and a kubelet without an API server forgets no
    /// pod.
    #[test]
    fn the_lists_are_sent_again_with_growing_pauses() {
        let begin = Instant::now();
        let mut resend = Resend::default();
        let sent: Vec<u64> = (0..2000)
            .filter(|second| resend.is_due(true, begin + Duration::from_secs(*second)))
            .collect();
        assert_eq!(sent[..6], [0, 15, 45, 105, 165, 225]);
        let later = begin + Duration::from_secs(2001);
        assert!(!resend.is_due(false, later));
        assert!(resend.is_due(true, later), "it is another case");
    }
}
