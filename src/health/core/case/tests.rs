//! The rules of a verdict as examples, and as properties of any history.

use super::*;
use crate::domain::{Health, Timestamp};
use proptest::prelude::*;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn at(time: u64) -> Moment {
    Moment { boot: secs(time), wall: Timestamp(1_000_000 + time * 1000) }
}

fn own() -> PciAddress {
    "0000:01:00.0".parse().unwrap()
}

/// A verdict and its history, in whole seconds.
#[derive(Debug, Clone, Default, PartialEq)]
struct History(Verdict);

impl History {
    fn new() -> Self {
        History(Verdict { boot_id: "boot".into(), ..Verdict::default() })
    }

    fn observe(&mut self, time: u64, reasons: &[Reason]) -> Health {
        self.observe_with_probe_at(time, time, reasons)
    }

    /// An observation at `time`, with the symptoms of a probe at `probed`.
    fn observe_with_probe_at(&mut self, time: u64, probed: u64, reasons: &[Reason]) -> Health {
        let symptom = |reason: &Reason| Symptom { reason: *reason, detail: "seen".into() };
        let symptoms_seen: Vec<_> = reasons
            .iter()
            .map(|reason| SymptomSeen { at: at(probed), symptom: symptom(reason) })
            .collect();
        let is_away = reasons.contains(&Reason::DeviceGone);
        self.0.observe(&Observation {
            at: at(time),
            complete_at: secs(probed),
            is_away,
            symptoms_seen: &symptoms_seen,
        });
        self.0.health()
    }

    fn apply_event(&mut self, time: u64, kind: &EventKind) -> Health {
        self.0.apply_event(kind, at(time), &BTreeSet::from([79]));
        self.0.health()
    }

    /// When it is healthy again, with an observation every second from `time` on.
    fn healthy_again_at(&mut self, time: u64) -> u64 {
        (time..time + 10_000)
            .find(|now| self.observe(*now, &[]).is_healthy())
            .expect("it is not healthy again within three hours")
    }
}

const fn bad(reason: Reason) -> Health {
    Health::Unhealthy(reason)
}

#[test]
fn a_hard_symptom_counts_at_once_and_is_cleared_after_its_hold_time() {
    let mut history = History::new();
    assert_eq!(history.observe(10, &[Reason::OffTheBus]), bad(Reason::OffTheBus));
    assert_eq!(history.healthy_again_at(11), 11 + 30);
    assert_eq!(history.0.incidents.len(), 1);
    assert_eq!(history.0.incidents[0].until, Some(at(41).wall));
}

#[test]
fn a_soft_symptom_counts_when_it_has_lasted() {
    let mut history = History::new();
    assert!(history.observe(10, &[Reason::PortDown]).is_healthy());
    assert!(history.observe(39, &[Reason::PortDown]).is_healthy());
    assert_eq!(history.0.next_observation_at(), Some(secs(40)));
    assert_eq!(history.observe(40, &[Reason::PortDown]), bad(Reason::PortDown));
    // A symptom that ended meanwhile starts again.
    let mut history = History::new();
    for (time, reasons) in [
        (10, &[Reason::PortDown][..]),
        (20, &[]),
        (30, &[Reason::PortDown]),
        (59, &[Reason::PortDown]),
    ] {
        assert!(history.observe(time, reasons).is_healthy(), "{time}");
    }
    assert_eq!(history.observe(60, &[Reason::PortDown]), bad(Reason::PortDown));
    assert!(History::new().0.incidents.is_empty());
}

#[test]
fn any_symptom_during_recovery_restarts_the_hold_time() {
    let mut history = History::new();
    history.observe(10, &[Reason::NvmeDead]);
    history.observe(11, &[]);
    assert_eq!(
        history.observe(20, &[Reason::NvmeNotLive]),
        bad(Reason::NvmeNotLive),
        "the newest reason is reported"
    );
    assert_eq!(history.healthy_again_at(21), 21 + 30);
    assert_eq!(
        (history.0.flaps, history.0.incidents.len()),
        (1, 1),
        "it was never healthy between them"
    );
}

#[test]
fn the_hold_time_doubles_with_each_repeated_failure_until_the_device_latches() {
    let mut history = History::new();
    let mut now = 10;
    for hold in [30, 60, 120, 240] {
        history.observe(now, &[Reason::OffTheBus]);
        assert_eq!(history.healthy_again_at(now + 1), now + 1 + hold);
        now += 1 + hold + 1;
    }
    history.observe(now, &[Reason::OffTheBus]);
    assert_eq!(history.observe(now + 5000, &[]), bad(Reason::Flapping));
    assert_eq!(history.observe(now + 9000, &[]), bad(Reason::Flapping), "time does not clear it");
    history.0.apply_request(&OperatorRequest::Uncordon, at(now + 9001));
    assert!(history.observe(now + 9002, &[]).is_healthy(), "it has long been without symptoms");
    history.observe(now + 9003, &[Reason::OffTheBus]);
    assert_eq!(
        history.healthy_again_at(now + 9004),
        now + 9004 + 30,
        "an uncordon resets the count of failures"
    );
}

#[test]
fn after_an_hour_in_health_a_failure_counts_as_the_first_one() {
    let mut history = History::new();
    history.observe(10, &[Reason::OffTheBus]);
    let healthy_at = history.healthy_again_at(11);
    history.observe(healthy_at + 3600, &[Reason::OffTheBus]);
    assert_eq!(history.healthy_again_at(healthy_at + 3601), healthy_at + 3601 + 30);
}

#[test]
fn a_device_that_is_replugged_recovers_soon_and_never_latches() {
    let mut history = History::new();
    history.observe(10, &[Reason::DeviceGone]);
    assert_eq!(history.healthy_again_at(11), 12);
    let mut now = 20;
    for hold in [2, 4, 4, 4, 4, 4, 4] {
        history.observe(now, &[Reason::DeviceGone]);
        assert_eq!(history.healthy_again_at(now + 1), now + 1 + hold);
        now += 1 + hold + 1;
    }
    assert!(history.observe(now, &[]).is_healthy());
}

#[test]
fn a_sticky_fault_stays_until_there_is_evidence_of_a_reset() {
    for (fault, reason) in [
        (EventKind::Xid(79), Reason::Xid),
        (EventKind::Wedged("rebind".into()), Reason::Wedged),
        (EventKind::RecoveryFailed, Reason::RecoveryFailed),
        (EventKind::RecoveryAction(Some("GPU Reset Required".into())), Reason::Xid),
    ] {
        let done = EventKind::RecoveryAction(None);
        for cure in [
            Some(EventKind::Bound),
            Some(EventKind::Recovered),
            Some(EventKind::WasReset),
            Some(done),
            None,
        ] {
            let mut history = History::new();
            assert_eq!(history.apply_event(10, &fault), bad(reason));
            assert_eq!(
                history.observe(5000, &[]),
                bad(reason),
                "{fault:?} was cleared without a reset"
            );
            match cure {
                Some(cure) => drop(history.apply_event(5001, &cure)),
                // It was removed and returned.
                None => drop(history.observe(5001, &[Reason::DeviceGone])),
            }
            assert!(!history.observe(5002, &[]).is_healthy());
            assert_eq!(
                history.healthy_again_at(5003),
                5002 + if history.0.incidents.len() == 1 { 30 } else { 60 }
            );
        }
    }
}

#[test]
fn the_driver_asks_for_one_action_after_the_other() {
    let mut history = History::new();
    let asks = |action: &str| EventKind::RecoveryAction(Some(action.to_owned()));
    let mut time = 10;
    for (event, detail) in [
        (EventKind::Xid(79), "Xid 79"),
        (asks("Drain P2P"), "Xid 154: Drain P2P"),
        (asks("Drain and Reset"), "Xid 154: Drain and Reset"),
        (asks("GPU Reset Required"), "Xid 154: GPU Reset Required"),
        (asks("Node Reboot Required"), "Xid 154: Node Reboot Required"),
        (EventKind::Xid(79), "Xid 154: Node Reboot Required"),
    ] {
        assert_eq!(history.apply_event(time, &event), bad(Reason::Xid), "{event:?}");
        assert_eq!(history.0.faults[&Reason::Xid], detail, "{event:?}");
        assert_eq!(history.observe(time + 3000, &[]), bad(Reason::Xid), "{event:?}");
        time += 5000;
    }
    assert_eq!(history.0.incidents.len(), 1, "it is one failure");
    history.apply_event(time, &EventKind::RecoveryAction(None));
    assert_eq!(history.healthy_again_at(time + 1), time + 1 + 30);
}

#[test]
fn application_errors_and_unbinds_are_no_failures() {
    let mut history = History::new();
    for kind in [
        EventKind::Xid(13),
        EventKind::Unbound,
        EventKind::WasReset,
        EventKind::Bound,
        EventKind::RecoveryAction(None),
    ] {
        assert!(history.apply_event(10, &kind).is_healthy());
    }
    assert!(history.0.is_blank());
}

#[test]
fn events_from_before_a_reset_are_ignored() {
    let mut history = History::new();
    history.apply_event(10, &EventKind::Xid(79));
    history.apply_event(20, &EventKind::Bound);
    let healthy_at = history.healthy_again_at(21);
    assert!(
        history.apply_event(10, &EventKind::Xid(79)).is_healthy(),
        "a restarted daemon reads the kernel's log from its start"
    );
    assert_eq!(history.apply_event(healthy_at + 1, &EventKind::Xid(79)), bad(Reason::Xid));
}

#[test]
fn a_device_is_unhealthy_while_the_kernel_recovers_it() {
    let mut history = History::new();
    assert_eq!(history.apply_event(10, &EventKind::RecoveryBegan), bad(Reason::ErrorRecovery));
    history.apply_event(13, &EventKind::Recovered);
    assert_eq!(history.healthy_again_at(14), 14 + 30);
}

#[test]
fn a_device_stays_unhealthy_while_its_recovery_does_not_end() {
    let mut history = History::new();
    history.apply_event(10, &EventKind::RecoveryBegan);
    assert_eq!(history.observe(500, &[]), bad(Reason::ErrorRecovery));
    assert_eq!(history.apply_event(501, &EventKind::RecoveryFailed), bad(Reason::RecoveryFailed));
    assert_eq!(history.observe(502, &[]), bad(Reason::RecoveryFailed));
}

#[test]
fn symptoms_from_before_a_reset_do_not_count() {
    let mut history = History::new();
    assert_eq!(history.observe(10, &[Reason::AerFatal]), bad(Reason::AerFatal));
    history.apply_event(12, &EventKind::Recovered);
    assert_eq!(
        history.observe_with_probe_at(13, 10, &[Reason::AerFatal]),
        bad(Reason::AerFatal),
        "there has been no probe since"
    );
    assert_eq!(history.healthy_again_at(14), 14 + 30);
    // The same for errors that were counted before the reset and are read after it.
    let counters =
        |value| BTreeMap::from([(Counter { reason: Reason::AerFatal, at: own() }, value)]);
    history.0.count(&counters(1), own(), at(100));
    history.apply_event(105, &EventKind::Recovered);
    assert!(history.0.count(&counters(2), own(), at(110)).is_empty());
    assert_eq!(history.0.count(&counters(3), own(), at(120)).len(), 1);
}

#[test]
fn a_scan_does_not_prolong_the_symptom_of_a_probe() {
    let mut history = History::new();
    history.observe(10, &[Reason::PortDown]);
    assert!(history.observe_with_probe_at(39, 30, &[Reason::PortDown]).is_healthy());
    assert!(
        history.observe_with_probe_at(40, 30, &[Reason::PortDown]).is_healthy(),
        "a scan that overtook the probe"
    );
    assert!(history.observe(41, &[]).is_healthy() && history.0.incidents.is_empty());
}

#[test]
fn a_device_that_is_removed_has_one_failure_although_its_driver_goes_first() {
    let mut history = History::new();
    history.observe(10, &[Reason::DriverLost]);
    history.observe(11, &[Reason::DeviceGone]);
    history.observe(12, &[Reason::DriverLost]);
    let reasons: Vec<Reason> = history.0.incidents.iter().map(|incident| incident.reason).collect();
    assert_eq!(reasons, [Reason::DeviceGone]);
}

#[test]
fn one_failure_after_many_driver_reloads_does_not_latch() {
    let mut history = History::new();
    let mut now = 10;
    for _ in 0..6 {
        history.observe(now, &[Reason::DriverLost]);
        now = history.healthy_again_at(now + 1) + 1;
    }
    history.observe(now, &[Reason::OffTheBus]);
    assert!(!history.0.is_latched);
    history.healthy_again_at(now + 1);
}

#[test]
fn counters_count_from_their_first_value() {
    let counter = |reason| Counter { reason, at: own() };
    let mut verdict = History::new().0;
    let mut count = |value: u64, time| {
        let risen =
            verdict.count(&BTreeMap::from([(counter(Reason::AerFatal), value)]), own(), at(time));
        risen.into_iter().map(|symptom| symptom.detail).collect::<Vec<_>>()
    };
    assert_eq!(count(7, 1), Vec::<String>::new(), "from before the daemon's start");
    assert_eq!(count(7, 2), Vec::<String>::new());
    assert_eq!(count(9, 3), ["2 more at 0000:01:00.0"]);
    assert_eq!(count(9, 4), Vec::<String>::new());
    assert_eq!(count(0, 5), Vec::<String>::new(), "the device was reset");
    assert_eq!(count(1, 6), ["1 more at 0000:01:00.0"]);
    assert_eq!(verdict.reset_at, secs(5));
}

#[test]
fn a_lower_counter_proves_a_reset_if_it_is_the_devices_own() {
    let bridge: PciAddress = "0000:00:01.0".parse().unwrap();
    for (of, is_cleared) in [(own(), true), (bridge, false)] {
        let mut history = History::new();
        let counters =
            |value| BTreeMap::from([(Counter { reason: Reason::AerNonfatal, at: of }, value)]);
        history.0.count(&counters(5), own(), at(9));
        history.observe(10, &[Reason::AerFatal]);
        assert_eq!(history.observe(500, &[]), bad(Reason::AerFatal));
        history.0.count(&counters(0), own(), at(501));
        assert_eq!(
            history.observe(502, &[]).is_healthy() || history.observe(600, &[]).is_healthy(),
            is_cleared
        );
    }
}

#[test]
fn a_reboot_clears_failures_but_no_cordon_after_one_probe_without_symptoms() {
    let mut history = History::new();
    history.apply_event(10, &EventKind::Xid(79));
    history.0.continue_in("boot");
    assert_eq!(history.observe(11, &[]), bad(Reason::Xid), "it is the same boot");
    history.0.continue_in("next");
    assert_eq!(history.0.health(), bad(Reason::Xid), "there has been no probe yet");
    assert_eq!(history.clone().observe(1, &[Reason::OffTheBus]), bad(Reason::OffTheBus));
    assert_eq!(history.observe_with_probe_at(1, 0, &[]), bad(Reason::Xid), "it was not probed yet");
    assert!(history.observe(1, &[]).is_healthy());
    history.0.apply_request(&OperatorRequest::Cordon { reason: "fan".into() }, at(2));
    history.0.continue_in("one more");
    assert_eq!(history.observe(1, &[]), bad(Reason::Cordoned));
    assert_eq!(history.0.cordon.as_ref().map(|cordon| cordon.reason.as_str()), Some("fan"));
    assert_eq!(
        history.0.detail(Reason::Cordoned),
        "",
        "logs and pages do not show the operator's text"
    );
    history.0.apply_request(&OperatorRequest::Uncordon, at(3));
    assert!(history.0.health().is_healthy());
}

#[test]
fn one_failure_after_each_boot_does_not_latch() {
    let mut history = History::new();
    for boot in 0..2 * FLAPS_MAX {
        history.0.continue_in(&format!("boot {boot}"));
        // The port waits for its subnet manager.
        assert!(history.observe(5, &[Reason::PortDown]).is_healthy());
        assert_eq!(history.observe(35, &[Reason::PortDown]), bad(Reason::PortDown));
        assert_eq!(history.healthy_again_at(36), 36 + 30, "boot {boot}");
        assert!(history.observe(30 * 86_400, &[]).is_healthy());
    }
}

#[test]
fn a_device_that_fails_before_each_reboot_latches_and_stays_so() {
    let mut history = History::new();
    for boot in 1..=FLAPS_MAX {
        history.0.continue_in(&format!("boot {boot}"));
        assert!(history.observe(5, &[]).is_healthy(), "boot {boot}");
        history.observe(300, &[Reason::OffTheBus]);
    }
    for boot in ["one more", "and another"] {
        history.0.continue_in(boot);
        assert_eq!(history.observe(5, &[]), bad(Reason::Flapping));
        assert_eq!(history.observe(90_000, &[]), bad(Reason::Flapping));
    }
}

/// One step of a history: how much later than the one before, and two numbers that choose the step.
type Step = (u64, u8, u8);

const REASONS: [Reason; 7] = [
    Reason::DeviceGone,
    Reason::NodeMissing,
    Reason::OffTheBus,
    Reason::AerFatal,
    Reason::PortDown,
    Reason::NvmeNotLive,
    Reason::AerNonfatal,
];

fn play(history: &mut History, now: u64, what: u8, which: u8) {
    let reason = REASONS[usize::from(which) % REASONS.len()];
    match what {
        0..=5 => drop(history.observe(now, &[])),
        6..=8 => drop(history.observe(now, &[reason])),
        9 => drop(history.apply_event(now, &EventKind::Xid(79))),
        10 => drop(history.apply_event(now, &EventKind::Bound)),
        11 => drop(history.apply_event(now, &EventKind::RecoveryBegan)),
        12 => drop(history.apply_event(now, &EventKind::Recovered)),
        13 => history.0.apply_request(&OperatorRequest::Cordon { reason: "x".into() }, at(now)),
        _ => history.0.apply_request(&OperatorRequest::Uncordon, at(now)),
    }
}

/// The verdict after a restart of the daemon.
fn restarted(history: &History) -> History {
    let mut verdict: Verdict =
        serde_json::from_str(&serde_json::to_string(&history.0).unwrap()).unwrap();
    verdict.continue_in("boot");
    History(verdict)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_histories_keep_the_rules(steps in prop::collection::vec((0..40_u64, 0..15_u8, 0..7_u8), 0..120)) {
        let steps: Vec<Step> = steps;
        let mut history = History::new();
        let (mut now, mut failed_at, mut hold) = (0, None, Duration::ZERO);
        for (wait, what, which) in steps {
            now += wait;
            let was = history.0.state;
            let mut again = restarted(&history);
            let mut same = history.clone();
            play(&mut history, now, what, which);
            // The same events give the same verdict, with or without a restart of the daemon
            // before.
            play(&mut same, now, what, which);
            play(&mut again, now, what, which);
            prop_assert_eq!(&same, &history);
            prop_assert_eq!(&again, &history);
            let is_failed = |state: &VerdictState| matches!(state, VerdictState::Unhealthy { .. } | VerdictState::Recovering { .. });
            if let VerdictState::Unhealthy { reason, .. } = history.0.state {
                failed_at = Some(now);
                hold = reason.timings().recover_after;
            }
            if is_failed(&was) && !is_failed(&history.0.state) {
                // Only an observation without symptoms clears it, and only if it is newer
                // than the last failure by the hold time.
                prop_assert!(what <= 5, "{:?}", what);
                prop_assert!(secs(now) > secs(failed_at.unwrap()));
                prop_assert!(secs(now) >= secs(failed_at.unwrap()) + hold, "{} {:?} {:?}", now, failed_at, hold);
                prop_assert!(history.0.faults.is_empty());
            }
            // A fault and an operator's order are never ignored.
            if !history.0.faults.is_empty() || history.0.cordon.is_some() || history.0.is_latched {
                prop_assert!(!history.0.health().is_healthy());
            }
            prop_assert!(history.0.incidents.len() <= INCIDENTS_MAX);
        }
    }
}
