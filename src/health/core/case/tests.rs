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
struct Story(Verdict);

impl Story {
    fn new() -> Self {
        Story(Verdict { boot_id: "boot".into(), ..Verdict::default() })
    }

    fn look(&mut self, time: u64, reasons: &[Reason]) -> Health {
        self.look_at_what_was_seen(time, time, reasons)
    }

    /// An observation at `time`, with the symptoms of a probe at `probed`.
    fn look_at_what_was_seen(&mut self, time: u64, probed: u64, reasons: &[Reason]) -> Health {
        let symptom = |reason: &Reason| Symptom { reason: *reason, detail: "seen".into() };
        let sightings: Vec<_> = reasons.iter().map(|reason| Sighting { at: at(probed), symptom: symptom(reason) }).collect();
        let is_away = reasons.contains(&Reason::DeviceGone);
        self.0.look(&Look { at: at(time), complete_at: secs(probed), is_away, sightings: &sightings });
        self.0.health()
    }

    fn happened(&mut self, time: u64, kind: &EventKind) -> Health {
        self.0.happened(kind, at(time), &BTreeSet::from([79]));
        self.0.health()
    }

    /// When it is healthy again, with an observation every second from `time` on.
    fn heals(&mut self, time: u64) -> u64 {
        (time..time + 10_000).find(|now| self.look(*now, &[]).is_healthy()).expect("it heals within three hours")
    }
}

const fn bad(reason: Reason) -> Health {
    Health::Unhealthy(reason)
}

#[test]
fn a_hard_complaint_counts_at_once_and_is_forgotten_after_its_hold() {
    let mut story = Story::new();
    assert_eq!(story.look(10, &[Reason::OffTheBus]), bad(Reason::OffTheBus));
    assert_eq!(story.heals(11), 11 + 30);
    assert_eq!(story.0.incidents.len(), 1);
    assert_eq!(story.0.incidents[0].until, Some(at(41).wall));
}

#[test]
fn a_soft_complaint_counts_when_it_has_lasted() {
    let mut story = Story::new();
    assert!(story.look(10, &[Reason::PortDown]).is_healthy());
    assert!(story.look(39, &[Reason::PortDown]).is_healthy());
    assert_eq!(story.0.wants_look_at(), Some(secs(40)));
    assert_eq!(story.look(40, &[Reason::PortDown]), bad(Reason::PortDown));
    // A symptom that ended meanwhile starts again.
    let mut story = Story::new();
    for (time, reasons) in [(10, &[Reason::PortDown][..]), (20, &[]), (30, &[Reason::PortDown]), (59, &[Reason::PortDown])] {
        assert!(story.look(time, reasons).is_healthy(), "{time}");
    }
    assert_eq!(story.look(60, &[Reason::PortDown]), bad(Reason::PortDown));
    assert!(Story::new().0.incidents.is_empty());
}

#[test]
fn any_complaint_while_it_recovers_begins_the_hold_anew() {
    let mut story = Story::new();
    story.look(10, &[Reason::NvmeDead]);
    story.look(11, &[]);
    assert_eq!(story.look(20, &[Reason::NvmeNotLive]), bad(Reason::NvmeNotLive), "the newest reason is told");
    assert_eq!(story.heals(21), 21 + 30);
    assert_eq!((story.0.flaps, story.0.incidents.len()), (1, 1), "it was never healthy between them");
}

#[test]
fn the_hold_doubles_with_each_failure_that_follows_soon_and_then_an_operator_is_to_look() {
    let mut story = Story::new();
    let mut now = 10;
    for hold in [30, 60, 120, 240] {
        story.look(now, &[Reason::OffTheBus]);
        assert_eq!(story.heals(now + 1), now + 1 + hold);
        now += 1 + hold + 1;
    }
    story.look(now, &[Reason::OffTheBus]);
    assert_eq!(story.look(now + 5000, &[]), bad(Reason::Flapping));
    assert_eq!(story.look(now + 9000, &[]), bad(Reason::Flapping), "time does not heal it");
    story.0.instructed(&OperatorRequest::Uncordon, at(now + 9001));
    assert!(story.look(now + 9002, &[]).is_healthy(), "it has been in order for long");
    story.look(now + 9003, &[Reason::OffTheBus]);
    assert_eq!(story.heals(now + 9004), now + 9004 + 30, "the operator's word begins the count anew");
}

#[test]
fn after_an_hour_in_order_a_failure_is_the_first_one() {
    let mut story = Story::new();
    story.look(10, &[Reason::OffTheBus]);
    let healed = story.heals(11);
    story.look(healed + 3600, &[Reason::OffTheBus]);
    assert_eq!(story.heals(healed + 3601), healed + 3601 + 30);
}

#[test]
fn what_is_plugged_in_and_out_is_back_soon_and_never_waits_for_an_operator() {
    let mut story = Story::new();
    story.look(10, &[Reason::DeviceGone]);
    assert_eq!(story.heals(11), 12);
    let mut now = 20;
    for hold in [2, 4, 4, 4, 4, 4, 4] {
        story.look(now, &[Reason::DeviceGone]);
        assert_eq!(story.heals(now + 1), now + 1 + hold);
        now += 1 + hold + 1;
    }
    assert!(story.look(now, &[]).is_healthy());
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
        for cure in [Some(EventKind::Bound), Some(EventKind::Recovered), Some(EventKind::WasReset), Some(done), None] {
            let mut story = Story::new();
            assert_eq!(story.happened(10, &fault), bad(reason));
            assert_eq!(story.look(5000, &[]), bad(reason), "{fault:?} heals by itself");
            match cure {
                Some(cure) => drop(story.happened(5001, &cure)),
                // It was removed and returned.
                None => drop(story.look(5001, &[Reason::DeviceGone])),
            }
            assert!(!story.look(5002, &[]).is_healthy());
            assert_eq!(story.heals(5003), 5002 + if story.0.incidents.len() == 1 { 30 } else { 60 });
        }
    }
}

#[test]
fn an_error_of_an_application_and_a_letting_go_are_no_failures() {
    let mut story = Story::new();
    for kind in [EventKind::Xid(13), EventKind::Unbound, EventKind::WasReset, EventKind::Bound, EventKind::RecoveryAction(None)] {
        assert!(story.happened(10, &kind).is_healthy());
    }
    assert!(story.0.is_blank());
}

#[test]
fn what_happened_before_a_reset_is_not_told_again() {
    let mut story = Story::new();
    story.happened(10, &EventKind::Xid(79));
    story.happened(20, &EventKind::Bound);
    let healed = story.heals(21);
    assert!(story.happened(10, &EventKind::Xid(79)).is_healthy(), "a restarted daemon reads the kernel's log from its begin");
    assert_eq!(story.happened(healed + 1, &EventKind::Xid(79)), bad(Reason::Xid));
}

#[test]
fn a_recovery_of_the_kernel_is_waited_for() {
    let mut story = Story::new();
    assert_eq!(story.happened(10, &EventKind::RecoveryBegan), bad(Reason::ErrorRecovery));
    story.happened(13, &EventKind::Recovered);
    assert_eq!(story.heals(14), 14 + 30);
}

#[test]
fn a_recovery_that_does_not_end_is_waited_for_however_long() {
    let mut story = Story::new();
    story.happened(10, &EventKind::RecoveryBegan);
    assert_eq!(story.look(500, &[]), bad(Reason::ErrorRecovery));
    assert_eq!(story.happened(501, &EventKind::RecoveryFailed), bad(Reason::RecoveryFailed));
    assert_eq!(story.look(502, &[]), bad(Reason::RecoveryFailed));
}

#[test]
fn a_probe_of_before_a_reset_speaks_of_what_is_over() {
    let mut story = Story::new();
    assert_eq!(story.look(10, &[Reason::AerFatal]), bad(Reason::AerFatal));
    story.happened(12, &EventKind::Recovered);
    assert_eq!(story.look_at_what_was_seen(13, 10, &[Reason::AerFatal]), bad(Reason::AerFatal), "nobody has looked since");
    assert_eq!(story.heals(14), 14 + 30);
    // The same for errors that were counted before the reset and are read after it.
    let counters = |value| BTreeMap::from([(Counter { reason: Reason::AerFatal, at: own() }, value)]);
    story.0.count(&counters(1), own(), at(100));
    story.happened(105, &EventKind::Recovered);
    assert!(story.0.count(&counters(2), own(), at(110)).is_empty());
    assert_eq!(story.0.count(&counters(3), own(), at(120)).len(), 1);
}

#[test]
fn a_soft_complaint_does_not_last_because_something_else_was_looked_at() {
    let mut story = Story::new();
    story.look(10, &[Reason::PortDown]);
    assert!(story.look_at_what_was_seen(39, 30, &[Reason::PortDown]).is_healthy());
    assert!(story.look_at_what_was_seen(40, 30, &[Reason::PortDown]).is_healthy(), "a scan that overtook the probe");
    assert!(story.look(41, &[]).is_healthy() && story.0.incidents.is_empty());
}

#[test]
fn one_failure_after_a_day_of_drivers_that_come_and_go_waits_for_no_operator() {
    let mut story = Story::new();
    let mut now = 10;
    for _ in 0..6 {
        story.look(now, &[Reason::DriverLost]);
        now = story.heals(now + 1) + 1;
    }
    story.look(now, &[Reason::OffTheBus]);
    assert!(!story.0.is_latched);
    story.heals(now + 1);
}

#[test]
fn counters_count_from_where_they_were_first_seen() {
    let counter = |reason| Counter { reason, at: own() };
    let mut verdict = Story::new().0;
    let mut count = |value: u64, time| {
        let risen = verdict.count(&BTreeMap::from([(counter(Reason::AerFatal), value)]), own(), at(time));
        risen.into_iter().map(|symptom| symptom.detail).collect::<Vec<_>>()
    };
    assert_eq!(count(7, 1), Vec::<String>::new(), "of an earlier time");
    assert_eq!(count(7, 2), Vec::<String>::new());
    assert_eq!(count(9, 3), ["2 more at 0000:01:00.0"]);
    assert_eq!(count(9, 4), Vec::<String>::new());
    assert_eq!(count(0, 5), Vec::<String>::new(), "the device was reset");
    assert_eq!(count(1, 6), ["1 more at 0000:01:00.0"]);
    assert_eq!(verdict.reset_at, secs(5));
}

#[test]
fn a_lower_counter_of_the_device_is_evidence_of_a_reset_and_one_of_a_bridge_is_not() {
    let bridge: PciAddress = "0000:00:01.0".parse().unwrap();
    for (of, heals) in [(own(), true), (bridge, false)] {
        let mut story = Story::new();
        let counters = |value| BTreeMap::from([(Counter { reason: Reason::AerNonfatal, at: of }, value)]);
        story.0.count(&counters(5), own(), at(9));
        story.look(10, &[Reason::AerFatal]);
        assert_eq!(story.look(500, &[]), bad(Reason::AerFatal));
        story.0.count(&counters(0), own(), at(501));
        assert_eq!(story.look(502, &[]).is_healthy() || story.look(600, &[]).is_healthy(), heals);
    }
}

#[test]
fn a_new_boot_forgives_what_was_not_an_operators_and_asks_for_one_good_look() {
    let mut story = Story::new();
    story.happened(10, &EventKind::Xid(79));
    story.0.continue_in("boot");
    assert_eq!(story.look(11, &[]), bad(Reason::Xid), "it is the same boot");
    story.0.continue_in("next");
    assert_eq!(story.0.health(), bad(Reason::Xid), "nobody has looked yet");
    assert_eq!(story.clone().look(1, &[Reason::OffTheBus]), bad(Reason::OffTheBus));
    assert_eq!(story.look_at_what_was_seen(1, 0, &[]), bad(Reason::Xid), "it was not probed yet");
    assert!(story.look(1, &[]).is_healthy());
    story.0.instructed(&OperatorRequest::Cordon { reason: "fan".into() }, at(2));
    story.0.continue_in("one more");
    assert_eq!(story.look(1, &[]), bad(Reason::Cordoned));
    assert_eq!(story.0.cordon.as_ref().map(|cordon| cordon.reason.as_str()), Some("fan"));
    assert_eq!(story.0.detail(Reason::Cordoned), "", "their words are not what logs and pages show");
    story.0.instructed(&OperatorRequest::Uncordon, at(3));
    assert!(story.0.health().is_healthy());
}

#[test]
fn a_device_that_fails_once_after_each_boot_and_is_in_order_until_the_next_waits_for_no_operator() {
    let mut story = Story::new();
    for boot in 0..2 * FLAPS_MAX {
        story.0.continue_in(&format!("boot {boot}"));
        // The port waits for its subnet manager.
        assert!(story.look(5, &[Reason::PortDown]).is_healthy());
        assert_eq!(story.look(35, &[Reason::PortDown]), bad(Reason::PortDown));
        assert_eq!(story.heals(36), 36 + 30, "boot {boot}");
        assert!(story.look(30 * 86_400, &[]).is_healthy());
    }
}

#[test]
fn a_device_with_which_the_machine_goes_down_each_time_waits_for_an_operator_over_all_boots() {
    let mut story = Story::new();
    for boot in 1..=FLAPS_MAX {
        story.0.continue_in(&format!("boot {boot}"));
        assert!(story.look(5, &[]).is_healthy(), "boot {boot}");
        story.look(300, &[Reason::OffTheBus]);
    }
    for boot in ["one more", "and another"] {
        story.0.continue_in(boot);
        assert_eq!(story.look(5, &[]), bad(Reason::Flapping));
        assert_eq!(story.look(90_000, &[]), bad(Reason::Flapping));
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

fn play(story: &mut Story, now: u64, what: u8, which: u8) {
    let reason = REASONS[usize::from(which) % REASONS.len()];
    match what {
        0..=5 => drop(story.look(now, &[])),
        6..=8 => drop(story.look(now, &[reason])),
        9 => drop(story.happened(now, &EventKind::Xid(79))),
        10 => drop(story.happened(now, &EventKind::Bound)),
        11 => drop(story.happened(now, &EventKind::RecoveryBegan)),
        12 => drop(story.happened(now, &EventKind::Recovered)),
        13 => story.0.instructed(&OperatorRequest::Cordon { reason: "x".into() }, at(now)),
        _ => story.0.instructed(&OperatorRequest::Uncordon, at(now)),
    }
}

/// The verdict after a restart of the daemon.
fn restarted(story: &Story) -> Story {
    let mut verdict: Verdict = serde_json::from_str(&serde_json::to_string(&story.0).unwrap()).unwrap();
    verdict.continue_in("boot");
    Story(verdict)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history(steps in prop::collection::vec((0..40_u64, 0..15_u8, 0..7_u8), 0..120)) {
        let steps: Vec<Step> = steps;
        let mut story = Story::new();
        let (mut now, mut failed_at, mut hold) = (0, None, Duration::ZERO);
        for (wait, what, which) in steps {
            now += wait;
            let was = story.0.state;
            let mut again = restarted(&story);
            let mut same = story.clone();
            play(&mut story, now, what, which);
            // The same events give the same verdict, with or without a restart of the daemon
            // before.
            play(&mut same, now, what, which);
            play(&mut again, now, what, which);
            prop_assert_eq!(&same, &story);
            prop_assert_eq!(&again, &story);
            let is_failed = |state: &VerdictState| matches!(state, VerdictState::Unhealthy { .. } | VerdictState::Recovering { .. });
            if let VerdictState::Unhealthy { reason, .. } = story.0.state {
                failed_at = Some(now);
                hold = reason.timings().recover_after;
            }
            if is_failed(&was) && !is_failed(&story.0.state) {
                // Only an observation without symptoms heals, and only if it is newer than the
                // last failure by the hold time.
                prop_assert!(what <= 5, "{:?}", what);
                prop_assert!(secs(now) > secs(failed_at.unwrap()));
                prop_assert!(secs(now) >= secs(failed_at.unwrap()) + hold, "{} {:?} {:?}", now, failed_at, hold);
                prop_assert!(story.0.faults.is_empty());
            }
            // A fault and an operator's order are never ignored.
            if !story.0.faults.is_empty() || story.0.cordon.is_some() || story.0.is_latched {
                prop_assert!(!story.0.health().is_healthy());
            }
            prop_assert!(story.0.incidents.len() <= INCIDENTS_MAX);
        }
    }
}
