//! Tests of the state machine: one for each race of the kubelet, and a property over all of them.

use super::*;
use proptest::prelude::*;

const KUBELET: KubeletGeneration = KubeletGeneration { inode: 1, made_ns: 1 };

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A machine whose first registration (number 1) is open and proven at 10 s.
fn steady() -> Machine {
    let mut machine = Machine::new(ms(0), 0);
    // The state after the settling Registers of a start.
    (machine.unsettled, machine.doubt_until) = (false, None);
    assert_eq!(machine.on(Event::Kubelet(Some(KUBELET)), ms(0)), Some(1));
    assert_eq!(machine.on(Event::Registered(1), ms(2)), None);
    assert_eq!(machine.on(Event::StreamOpened(1), ms(3)), None);
    assert_eq!(machine.state(), State::Steady);
    assert_eq!(machine.next_deadline(), None);
    machine
}

#[test]
fn the_stream_may_come_before_the_answer_to_register() {
    let mut machine = Machine::new(ms(0), 0);
    machine.on(Event::Kubelet(Some(KUBELET)), ms(0));
    machine.on(Event::StreamOpened(1), ms(1));
    machine.on(Event::Registered(1), ms(2));
    assert!(machine.is_registered());
}

#[test]
fn the_first_registration_of_a_life_is_settled_too() {
    let mut machine = Machine::new(ms(0), 0);
    machine.on(Event::Kubelet(Some(KUBELET)), ms(0));
    machine.on(Event::Registered(1), ms(2));
    machine.on(Event::StreamOpened(1), ms(3));
    assert_eq!(machine.state(), State::Settling { until: ms(3) + SETTLE_AFTER });
    assert_eq!(machine.on(Event::Tick, ms(3) + SETTLE_AFTER), Some(2));
}

#[test]
fn a_register_without_a_stream_is_repeated_after_250_ms() {
    let mut machine = Machine::new(ms(0), 0);
    machine.on(Event::Kubelet(Some(KUBELET)), ms(0));
    machine.on(Event::Registered(1), ms(1));
    assert_eq!(machine.on(Event::Tick, ms(250)), None);
    assert_eq!(machine.next_deadline(), Some(ms(251)));
    assert_eq!(machine.on(Event::Tick, ms(251)), None);
    assert_eq!(machine.on(Event::Tick, machine.next_deadline().unwrap()), Some(2));
}

#[test]
fn a_lost_stream_is_answered_at_once_and_settled_later() {
    let mut machine = steady();
    assert_eq!(machine.on(Event::StreamEnded(1), ms(10_000)), Some(2));
    machine.on(Event::Registered(2), ms(10_001));
    machine.on(Event::StreamOpened(2), ms(10_002));
    assert_eq!(machine.state(), State::Settling { until: ms(10_002) + SETTLE_AFTER });
    assert!(machine.is_registered());
    assert_eq!(machine.on(Event::Tick, ms(10_002) + SETTLE_AFTER), Some(3));
    assert!(machine.is_registered(), "the stream that is to be settled is still open");
    machine.on(Event::Registered(3), ms(10_800));
    machine.on(Event::StreamOpened(3), ms(10_801));
    // A goroutine of the kubelet may be stuck for longer than that.
    assert_eq!(machine.state(), State::Settling { until: ms(10_000) + DOUBT_FOR });
    assert_eq!(machine.on(Event::Tick, ms(10_000) + DOUBT_FOR), Some(4));
    machine.on(Event::Registered(4), ms(22_001));
    machine.on(Event::StreamOpened(4), ms(22_002));
    assert_eq!(machine.state(), State::Steady);
}

#[test]
fn a_failed_register_is_settled_after_the_longest_time_that_a_kubelet_may_be_stuck() {
    let mut machine = steady();
    machine.on(Event::StreamEnded(1), ms(10_000));
    let again = machine
        .on(Event::Refused(2), ms(12_000))
        .or_else(|| machine.on(Event::Tick, ms(12_010)))
        .unwrap();
    machine.on(Event::Registered(again), ms(12_011));
    machine.on(Event::StreamOpened(again), ms(12_012));
    let settled = machine.on(Event::Tick, ms(12_012) + SETTLE_AFTER).unwrap();
    machine.on(Event::Registered(settled), ms(12_800));
    machine.on(Event::StreamOpened(settled), ms(12_801));
    assert_eq!(machine.state(), State::Settling { until: ms(12_000) + DOUBT_FOR });
}

#[test]
fn a_register_without_a_stream_is_settled_after_the_longest_time_that_a_kubelet_dials() {
    let mut machine = steady();
    assert_eq!(machine.on(Event::StreamEnded(1), ms(10_000)), Some(2));
    machine.on(Event::Registered(2), ms(11_000));
    let missed = ms(11_000) + STREAM_DEADLINE;
    machine.on(Event::Tick, missed);
    let again = machine.on(Event::Tick, machine.next_deadline().unwrap()).unwrap();
    machine.on(Event::Registered(again), ms(11_300));
    machine.on(Event::StreamOpened(again), ms(11_301));
    let settled = machine.on(Event::Tick, ms(11_301) + SETTLE_AFTER).unwrap();
    machine.on(Event::Registered(settled), ms(12_010));
    machine.on(Event::StreamOpened(settled), ms(12_011));
    assert_eq!(machine.state(), State::Settling { until: missed + DOUBT_FOR });
}

#[test]
fn a_connection_that_closes_before_the_lists_leads_to_register_at_once() {
    let after = |events: &[Event]| {
        let mut machine = steady();
        assert_eq!(machine.on(Event::StreamEnded(1), ms(10_000)), Some(2));
        let begun: Vec<u64> =
            events.iter().filter_map(|event| machine.on(*event, ms(10_001))).collect();
        (begun, machine)
    };
    let (begun, mut machine) = after(&[Event::Registered(2), Event::ClosedEarly(2)]);
    let next = machine.next_deadline().unwrap();
    assert!(
        begun.is_empty() && next == ms(10_002),
        "the second try comes a millisecond later: {next:?}"
    );
    assert_eq!(machine.on(Event::Tick, next), Some(3));
    machine.on(Event::Registered(3), ms(10_003));
    assert_eq!(
        machine.next_deadline(),
        Some(ms(10_003) + STREAM_DEADLINE),
        "that was another registration's"
    );
    // The event may come before the answer.
    let (_, machine) = after(&[Event::ClosedEarly(2), Event::Registered(2)]);
    assert_eq!(machine.next_deadline(), Some(ms(10_002)));
    // Other registrations' connections do not count.
    for events in [
        [Event::ClosedEarly(1), Event::Registered(2)],
        [Event::Registered(2), Event::ClosedEarly(1)],
    ] {
        assert_eq!(after(&events).1.next_deadline(), Some(ms(10_001) + STREAM_DEADLINE));
    }
    let (begun, machine) =
        after(&[Event::Registered(2), Event::StreamOpened(2), Event::ClosedEarly(2)]);
    assert!(begun.is_empty() && matches!(machine.state(), State::Settling { .. }));
}

#[test]
fn a_stream_that_comes_and_goes_before_the_answer_leads_to_register_at_once() {
    let after = |events: &[Event]| {
        let mut machine = steady();
        assert_eq!(machine.on(Event::StreamEnded(1), ms(10_000)), Some(2));
        for event in events {
            assert_eq!(machine.on(*event, ms(10_001)), None, "one Register at a time");
        }
        machine
    };
    let mut machine = after(&[Event::StreamOpened(2), Event::StreamEnded(2), Event::Registered(2)]);
    let next = machine.next_deadline().unwrap();
    assert_eq!(
        (next, machine.on(Event::Tick, next)),
        (ms(10_002), Some(3)),
        "the second try comes a millisecond later"
    );
    machine.on(Event::Registered(3), ms(10_003));
    assert_eq!(
        machine.next_deadline(),
        Some(ms(10_003) + STREAM_DEADLINE),
        "that was another registration's"
    );
    // After another registration's stream ended, this one's may still come. If one of two ended,
    // one is open.
    let machine = after(&[Event::StreamOpened(1), Event::StreamEnded(1), Event::Registered(2)]);
    assert_eq!(machine.next_deadline(), Some(ms(10_001) + STREAM_DEADLINE));
    let machine = after(&[
        Event::StreamOpened(2),
        Event::StreamOpened(2),
        Event::StreamEnded(2),
        Event::Registered(2),
    ]);
    assert!(matches!(machine.state(), State::Settling { .. }));
}

#[test]
fn the_late_end_of_a_superseded_stream_leads_to_register_too() {
    let mut machine = steady();
    machine.on(Event::StreamEnded(1), ms(10_000));
    machine.on(Event::Registered(2), ms(10_001));
    machine.on(Event::StreamOpened(2), ms(10_002));
    // The settling registration has its own stream, and number 2's stays open.
    machine.on(Event::Tick, ms(10_702));
    machine.on(Event::Registered(3), ms(10_703));
    machine.on(Event::StreamOpened(3), ms(10_704));
    assert_eq!(machine.on(Event::StreamEnded(2), ms(20_000)), Some(4));
}

#[test]
fn a_new_kubelet_is_answered_from_every_state() {
    let other = |n| Event::Kubelet(Some(KubeletGeneration { inode: n, made_ns: 1 }));
    let mut machine = steady();
    assert_eq!(machine.on(other(2), ms(5_000)), Some(2), "steady");
    assert_eq!(machine.on(other(3), ms(5_001)), Some(3), "registering");
    machine.on(Event::Registered(3), ms(5_002));
    assert_eq!(machine.on(other(4), ms(5_003)), Some(4), "awaiting the stream");
    machine.on(Event::Refused(4), ms(5_004));
    assert_eq!(machine.on(other(5), ms(5_004)), Some(5), "backing off");
    assert_eq!(machine.on(other(5), ms(5_005)), None, "the same kubelet again changes nothing");
}

#[test]
fn a_loss_with_one_kubelet_has_no_consequence_with_the_next_one() {
    let mut machine = steady();
    machine.on(Event::StreamEnded(1), ms(10_000));
    machine.on(Event::Absent(2), ms(10_001));
    machine.on(Event::Kubelet(None), ms(10_002));
    assert!(machine.doubt_until().is_some());
    let next = machine
        .on(Event::Kubelet(Some(KubeletGeneration { inode: 2, made_ns: 2 })), ms(10_300))
        .unwrap();
    assert_eq!(machine.doubt_until(), None);
    machine.on(Event::Registered(next), ms(10_301));
    machine.on(Event::StreamOpened(next), ms(10_302));
    let settled = machine.on(Event::Tick, ms(10_302) + SETTLE_AFTER).unwrap();
    machine.on(Event::Registered(settled), ms(11_010));
    machine.on(Event::StreamOpened(settled), ms(11_011));
    assert_eq!(machine.state(), State::Steady);
}

/// The former kubelet may have had a stream whose end is not seen yet.
#[test]
fn the_streams_of_another_kubelet_do_not_count() {
    let mut machine = steady();
    let next = KubeletGeneration { inode: 2, made_ns: 2 };
    assert_eq!(machine.on(Event::Kubelet(Some(next)), ms(10_000)), Some(2));
    assert!(!machine.is_registered(), "not with the new one");
    machine.on(Event::StreamOpened(2), ms(10_001));
    machine.on(Event::Registered(2), ms(10_002));
    assert!(machine.is_registered());
    machine.on(Event::StreamEnded(1), ms(10_003));
    assert_eq!(
        machine.on(Event::Tick, machine.next_deadline().unwrap()),
        Some(3),
        "a late end leads to Register as usual"
    );
}

#[test]
fn an_absent_kubelet_is_tried_quickly_then_slowly() {
    let mut machine = steady();
    let mut now = ms(10_000);
    let mut tries = 1;
    let mut number = machine.on(Event::StreamEnded(1), now).unwrap();
    assert!(!machine.is_kubelet_absent());
    while !matches!(machine.state(), State::AwaitingKubelet { .. }) {
        number = machine.on(Event::Absent(number), now).unwrap_or(number);
        assert!(machine.is_kubelet_absent(), "known at once, before the quick tries end");
        if matches!(machine.state(), State::BackingOff { .. }) {
            now = machine.next_deadline().unwrap();
            number = machine.on(Event::Tick, now).unwrap();
            tries += 1;
        }
    }
    assert_eq!(tries, BACKOFF_MS.len());
    assert_eq!(machine.next_deadline(), Some(now + ABSENT_RETRY));
    machine.on(Event::Kubelet(Some(KubeletGeneration { inode: 77, made_ns: 0 })), now).unwrap();
    assert!(!machine.is_kubelet_absent());
}

#[test]
fn events_of_a_superseded_registration_change_nothing() {
    let mut machine = steady();
    machine.on(Event::StreamEnded(1), ms(10_000));
    for stale in [Event::Registered(1), Event::Refused(1), Event::Absent(1), Event::SocketLost(1)] {
        assert_eq!(machine.on(stale, ms(10_001)), None);
        assert_eq!(machine.state(), State::Registering);
    }
    assert!(!machine.is_registered(), "the stream before has ended");
    machine.on(Event::Registered(2), ms(10_002));
    machine.on(Event::StreamOpened(2), ms(10_003));
    let state = machine.state();
    assert_eq!(machine.on(Event::SocketLost(1), ms(10_004)), None);
    assert_eq!(machine.state(), state);
}

#[test]
fn other_options_lead_to_register_while_the_stream_is_open() {
    let mut machine = steady();
    assert_eq!(machine.on(Event::Changed, ms(10_000)), Some(2));
    assert_eq!(machine.on(Event::Changed, ms(10_001)), None, "a Register is in progress");
}

#[test]
fn a_lost_socket_of_our_own_leads_to_register() {
    assert_eq!(steady().on(Event::SocketLost(1), ms(60_000)), Some(2));
}

#[test]
fn a_mismatch_leads_to_register_and_is_settled() {
    let mut machine = steady();
    assert_eq!(machine.on(Event::Mismatch, ms(10_000)), Some(2));
    assert_eq!(machine.on(Event::Mismatch, ms(10_001)), None, "a Register is in progress");
    machine.on(Event::Registered(2), ms(10_002));
    assert_eq!(machine.on(Event::Mismatch, ms(10_003)), None, "its stream has not come yet");
    machine.on(Event::StreamOpened(2), ms(10_004));
    assert_eq!(machine.state(), State::Settling { until: ms(10_004) + SETTLE_AFTER });
}

/// Another plugin registers whenever it loses the resource, and takes it from us within `lifetime`.
fn contest(machine: &mut Machine, mut now: Duration, lifetime: Duration) -> (Duration, u32) {
    let (mut open, mut registers) = (machine.latest(), 0);
    while !machine.is_contested() {
        now += lifetime;
        let mut begun = machine.on(Event::StreamEnded(open), now);
        while begun.is_none() && !machine.is_contested() {
            now = now.max(machine.next_deadline().unwrap());
            begun = machine.on(Event::Tick, now);
        }
        let Some(number) = begun else { break };
        (open, registers) = (number, registers + 1);
        machine.on(Event::Registered(open), now);
        machine.on(Event::StreamOpened(open), now);
    }
    (now, registers)
}

#[test]
fn a_contested_resource_is_tried_every_half_minute() {
    for lifetime in [0, 3, 900, 5_000, 59_000] {
        let mut machine = steady();
        let (now, registers) = contest(&mut machine, ms(3), ms(lifetime));
        assert_eq!(
            (machine.state(), registers),
            (State::Contested { until: now + CONTESTED_RETRY }, LOSSES_MAX),
            "streams of {lifetime} ms"
        );
        assert!(!machine.is_registered());
        assert_eq!(
            machine.on(Event::StreamEnded(1), now + ms(1)),
            None,
            "the end of an older stream does not end the pause"
        );
        let tried = machine.on(Event::Tick, now + CONTESTED_RETRY).unwrap();
        machine.on(Event::Registered(tried), now + CONTESTED_RETRY);
        machine.on(Event::StreamOpened(tried), now + CONTESTED_RETRY);
        assert!(machine.is_contested() && machine.is_registered());
        // The settling Register's stream is the one that counts.
        let settled = machine.on(Event::Tick, now + CONTESTED_RETRY + SETTLE_AFTER).unwrap();
        machine.on(Event::Registered(settled), now + CONTESTED_RETRY + SETTLE_AFTER);
        machine.on(Event::StreamOpened(settled), now + CONTESTED_RETRY + SETTLE_AFTER);
        assert_eq!(
            machine.on(Event::StreamEnded(settled), now + CONTESTED_RETRY + ms(2_000)),
            None,
            "taken again: the next pause"
        );
        let last = machine.on(Event::Tick, now + 2 * CONTESTED_RETRY + ms(2_000)).unwrap();
        machine.on(Event::Registered(last), now + 2 * CONTESTED_RETRY + ms(2_000));
        machine.on(Event::StreamOpened(last), now + 2 * CONTESTED_RETRY + ms(2_000));
        let uncontested = now + 2 * CONTESTED_RETRY + ms(2_000) + UNCONTESTED_AFTER;
        assert!(
            machine.on(Event::StreamEnded(last), uncontested).is_some(),
            "after a stream of a minute a loss leads to Register at once"
        );
        assert!(!machine.is_contested());
    }
}

#[test]
fn each_safeguard_can_be_turned_off() {
    let state = |safeguard: Safeguard| {
        safeguard.without(|| {
            let mut machine = Machine::new(ms(0), 0);
            machine.on(Event::Kubelet(Some(KUBELET)), ms(0));
            machine.on(Event::Registered(1), ms(1));
            if safeguard != Safeguard::StreamDeadline {
                machine.on(Event::StreamOpened(1), ms(2));
                machine.on(Event::StreamEnded(1), ms(3));
            }
            (machine.state(), machine.next_deadline())
        })
    };
    assert_eq!(
        state(Safeguard::HeldIds).0,
        State::BackingOff { until: ms(4) },
        "all on: the end of the stream leads to Register"
    );
    assert_eq!(state(Safeguard::ReRegister).0, State::Settling { until: ms(2) + SETTLE_AFTER });
    assert_eq!(state(Safeguard::StreamDeadline).1, None);
    assert_eq!(steady().state(), State::Steady);
}

#[test]
fn another_kubelet_ends_the_pause() {
    let mut machine = steady();
    let (now, _) = contest(&mut machine, ms(3), ms(5));
    assert!(
        machine
            .on(Event::Kubelet(Some(KubeletGeneration { inode: 9, made_ns: 9 })), now + ms(1))
            .is_some()
    );
    assert!(!machine.is_contested());
}

fn any_event() -> impl Strategy<Value = Event> {
    let number = 0..12_u64;
    prop_oneof![
        (0..4_u64).prop_map(|n| Event::Kubelet(
            (n > 0).then_some(KubeletGeneration { inode: n, made_ns: 0 })
        )),
        number.clone().prop_map(Event::Registered),
        number.clone().prop_map(Event::Refused),
        number.clone().prop_map(Event::Absent),
        number.clone().prop_map(Event::StreamOpened),
        number.clone().prop_map(Event::StreamEnded),
        number.clone().prop_map(Event::ClosedEarly),
        number.prop_map(Event::SocketLost),
        Just(Event::Mismatch),
        Just(Event::Tick),
    ]
}

proptest! {
    /// After any events in any order: once the kubelet works, the resource is registered and stays
    /// so.
    #[test]
    fn after_any_history_a_working_kubelet_gets_the_resource(history in proptest::collection::vec((any_event(), 0..400_u64), 0..60)) {
        let mut machine = Machine::new(ms(0), 0);
        let mut now = ms(0);
        let mut begun = Vec::new();
        for (event, wait) in history {
            now += ms(wait);
            begun.extend(machine.on(event, now));
        }
        prop_assert!(begun.windows(2).all(|pair| pair[0] < pair[1]), "a registration number is never used twice");
        // From here on Register succeeds and the stream comes.
        let mut under_way = (machine.state() == State::Registering).then_some(machine.latest());
        for _ in 0..10 {
            if let Some(number) = under_way.take() {
                under_way = machine.on(Event::Registered(number), now);
                under_way = machine.on(Event::StreamOpened(number), now).or(under_way);
            } else if let Some(deadline) = machine.next_deadline() {
                now = now.max(deadline);
                under_way = machine.on(Event::Tick, now);
            } else if machine.state() != State::Steady {
                prop_assert!(false, "stuck in {:?}", machine.state());
            }
        }
        prop_assert_eq!(machine.state(), State::Steady);
        prop_assert!(machine.is_registered());
    }

    /// Streams that keep ending do not make a busy loop: the rate of Registers is bounded.
    #[test]
    fn streams_that_keep_ending_do_not_make_a_busy_loop(lifetimes in proptest::collection::vec(0..900_u64, 50)) {
        let mut machine = steady();
        let start = ms(10_000);
        let mut now = start;
        let mut registers = 0_u32;
        let mut open = 1;
        for lifetime in lifetimes {
            now += ms(lifetime);
            let mut begun = machine.on(Event::StreamEnded(open), now);
            while begun.is_none() {
                now = now.max(machine.next_deadline().unwrap());
                begun = machine.on(Event::Tick, now);
            }
            open = begun.unwrap();
            registers += 1;
            machine.on(Event::Registered(open), now);
            machine.on(Event::StreamOpened(open), now);
        }
        let seconds = (now - start).as_secs_f64();
        prop_assert!(f64::from(registers) <= 10.0 + 20.0 * seconds, "{registers} registers in {seconds} s");
    }
}
