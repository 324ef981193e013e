//! The node's status of a resource, and its history at every time.

use super::core::Capacity;
use super::event::EventKind;
use super::state::Shared;
use crate::domain::ResourceName;
use std::collections::BTreeSet;
use std::time::Duration;

/// Older readings are dropped: a day of node status has 8640 of them.
const READINGS_MAX: usize = 10_000;

/// A resource's numbers over time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Readings {
    /// Every change inside the kubelet, with its time; `None` while the kubelet is down.
    pub inside: Vec<(Duration, Option<Capacity>)>,
    /// The values in the node's status, every ten seconds.
    pub reported: Vec<(Duration, Capacity)>,
}

impl Readings {
    pub(super) fn note(&mut self, now: Duration, capacity: Capacity) {
        if self.inside.last().map(|(_, last)| *last) != Some(Some(capacity)) {
            self.push(now, Some(capacity));
        }
    }

    pub(super) fn down(&mut self, now: Duration) {
        self.push(now, None);
    }

    fn push(&mut self, now: Duration, capacity: Option<Capacity>) {
        if self.inside.len() == READINGS_MAX {
            self.inside.remove(0);
        }
        self.inside.push((now, capacity));
    }

    fn report(&mut self, now: Duration, capacity: Capacity) {
        if self.reported.len() == READINGS_MAX {
            self.reported.remove(0);
        }
        self.reported.push((now, capacity));
    }

    /// Device-seconds that were missing inside the kubelet between two times, out of `expected`
    /// allocatable ones. A kubelet that is down counts as complete.
    #[must_use]
    pub fn dip(&self, expected: usize, from: Duration, to: Duration) -> f64 {
        missing(
            self.inside.iter().map(|(at, capacity)| {
                (*at, capacity.map_or(expected, |capacity| capacity.allocatable))
            }),
            expected,
            from,
            to,
        )
    }

    /// The same as the API server saw it.
    #[must_use]
    pub fn dip_reported(&self, expected: usize, from: Duration, to: Duration) -> f64 {
        missing(
            self.reported.iter().map(|(at, capacity)| (*at, capacity.allocatable)),
            expected,
            from,
            to,
        )
    }
}

/// The integral of the shortfall from `expected` over a series of values; each value holds until
/// the next one.
fn missing(
    series: impl Iterator<Item = (Duration, usize)>,
    expected: usize,
    from: Duration,
    to: Duration,
) -> f64 {
    let (mut sum, mut since, mut lacking) = (0.0, from, 0_usize);
    let mut add = |since: Duration, until: Duration, lacking: usize| {
        let lacking = u32::try_from(lacking).unwrap_or(u32::MAX);
        sum += until.saturating_sub(since).as_secs_f64() * f64::from(lacking);
    };
    for (at, allocatable) in series {
        let at = at.clamp(from, to);
        add(since, at, lacking);
        (since, lacking) = (at, expected.saturating_sub(allocatable));
    }
    add(since, to, lacking);
    sum
}

/// A longer Allocate makes the kubelet's health check fail, and the machine's watchdog may kill the
/// kubelet.
const STUCK_AFTER: Duration = Duration::from_secs(5 * 60);

/// Reports the node's status to the API server until the instance ends.
pub(super) async fn report_status(shared: &Shared, instance: u64) {
    shared.environment.sleep(shared.behaviour.gaps.to_first_status).await;
    let mut is_stuck = false;
    loop {
        let expired = shared
            .with_instance(instance, |present| present.manager.expire(shared.environment.now()));
        if expired == Some(true) {
            // A failure is in the event log.
            let _ = shared.write_checkpoint(instance).await;
        }
        shared.in_instance(instance, |state| {
            let now = shared.environment.now();
            let Some(present) = &state.instance else { return };
            // A deleted resource is reported as 0 from then on.
            let known: BTreeSet<ResourceName> =
                present.manager.healthy().keys().chain(state.readings.keys()).cloned().collect();
            for resource in known {
                let capacity = present.manager.capacity(&resource, now);
                let readings = state.readings.entry(resource).or_default();
                readings.note(now, capacity);
                readings.report(now, capacity);
            }
        });
        let stuck = shared.with_instance(instance, |present| {
            present.allocating > 0
                && shared.environment.now().saturating_sub(present.allocating_since) > STUCK_AFTER
        });
        if stuck == Some(true) && !std::mem::replace(&mut is_stuck, true) {
            shared.log(EventKind::Stuck);
        }
        // Every ten seconds, plus or minus 4 %.
        let jitter = u64::try_from(shared.environment.below(801)).unwrap_or_default();
        shared.environment.sleep(Duration::from_millis(9600 + jitter)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dip_is_what_was_missing_times_how_long() {
        let at = Duration::from_secs;
        let capacity = |allocatable| Capacity { capacity: 8, allocatable };
        let mut readings = Readings::default();
        readings.note(at(0), capacity(8));
        readings.note(at(10), capacity(0));
        readings.note(at(11), capacity(0));
        readings.note(at(12), capacity(6));
        readings.down(at(20));
        readings.note(at(30), capacity(8));
        assert_eq!(readings.inside.len(), 5);
        assert!((readings.dip(8, at(0), at(40)) - (2.0 * 8.0 + 8.0 * 2.0)).abs() < 1e-9);
        assert!((readings.dip(8, at(11), at(13)) - (8.0 + 2.0)).abs() < 1e-9);
        assert!(readings.dip(6, at(12), at(40)).abs() < 1e-9);
        assert!(readings.dip_reported(8, at(0), at(40)).abs() < 1e-9);
    }
}
