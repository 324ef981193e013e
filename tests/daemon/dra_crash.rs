//! A daemon that is killed at any moment of Prepare and Unprepare, on real sockets: no answered
//! claim is missing afterwards, the repeated Prepare has the same bytes, a repeated Unprepare
//! releases, and no device has two claims.
//!
//! `HOLDFAST_KILLS` is the number of kills. `HOLDFAST_SEED` repeats the moments of an earlier run.

use super::dra::{World, claim_ref};
use crate::common::{Daemon, Random, run, soon};
use holdfast::domain::{DRA_DRIVER, DeviceId};
use holdfast::lab::sim::kubelet::claims::{Claim, Release, Times};
use nix::sys::signal::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The devices of each claim: two claims that follow each other have one in common.
const WANTED: [[usize; 2]; 3] = [[0, 1], [1, 2], [2, 0]];

/// Rounds without a kill, which show how long the calls take.
const WARM: usize = 4;

/// What became of the kills.
#[derive(Debug, Default)]
struct Tally {
    prepares: Vec<Duration>,
    unprepares: Vec<Duration>,
    unanswered_prepares: usize,
    recorded_unanswered: usize,
    unanswered_unprepares: usize,
    released_unanswered: usize,
}

/// The shortest of the calls without a kill: the first ones take longer.
fn usual(calls: &[Duration]) -> Duration {
    calls.iter().min().copied().unwrap()
}

/// Kills from a thread of its own, since a timer of the runtime knows no microseconds.
fn kill_within(
    daemon: &Daemon,
    usual: Duration,
    random: &mut Random,
) -> std::thread::JoinHandle<()> {
    let window = u64::try_from(usual.as_micros()).unwrap() * 6 / 5;
    let (pid, wait) = (daemon.pid(), Duration::from_micros(random.below(window)));
    let at = Instant::now() + wait;
    std::thread::spawn(move || {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    })
}

/// The devices of the live grants of each claim, as the files have them while no daemon runs.
fn recorded(world: &World) -> BTreeMap<String, Vec<DeviceId>> {
    let mut claims: BTreeMap<String, Vec<DeviceId>> = BTreeMap::new();
    for grant in world.node.grants() {
        let uid = grant.claim.as_ref().unwrap().claim.uid.clone();
        claims.entry(uid).or_default().extend(grant.devices.iter().map(|device| device.id.clone()));
    }
    let all: Vec<&DeviceId> = claims.values().flatten().collect();
    let distinct: BTreeSet<&DeviceId> = all.iter().copied().collect();
    assert_eq!(all.len(), distinct.len(), "a device has two claims: {claims:?}");
    claims
}

/// Starts the daemon, and the kubelet again, which then does not know what is prepared.
async fn serve(world: &World) -> Daemon {
    let daemon = world.start();
    world.manager.restart(Release::V1_36).await.unwrap();
    world.until_registered().await;
    daemon
}

async fn prepare(world: &World, pod: &str, claim: &Claim) -> Result<(), String> {
    let prepared = world.manager.prepare(pod, std::slice::from_ref(claim));
    soon("Prepare", prepared).await
}

/// The kubelet repeats both calls. It may register the driver once more in between: it has seen the
/// socket of the former process.
async fn prepare_at_last(world: &World, pod: &str, claim: &Claim) {
    while prepare(world, pod, claim).await.is_err() {
        world.until_registered().await;
    }
}

async fn unprepare_at_last(world: &World, pod: &str) {
    while soon("Unprepare", world.manager.unprepare(pod)).await.is_err() {
        world.until_registered().await;
    }
}

/// A Prepare, and a kill before its answer or just after. Returns the daemon after it, which has
/// answered the repeated Prepare.
async fn kill_in_prepare(
    world: &World,
    mut daemon: Daemon,
    (pod, claim): (&str, &Claim),
    random: &mut Random,
    tally: &mut Tally,
) -> Daemon {
    let killer = kill_within(&daemon, usual(&tally.prepares), random);
    let first = prepare(world, pod, claim).await;
    killer.join().unwrap();
    daemon.kill();
    let uid = &claim.claim.uid;
    let is_recorded = recorded(world).contains_key(uid);
    let answered = world.cdi_names(claim);
    let file = std::fs::read_to_string(world.cdi_file(&claim.claim.name)).ok();
    match first {
        Ok(()) => {
            assert!(is_recorded && file.is_some(), "{uid} was answered and is lost");
            assert_eq!(answered.len(), 2);
        }
        Err(_) => {
            tally.unanswered_prepares += 1;
            tally.recorded_unanswered += usize::from(is_recorded);
        }
    }

    let daemon = serve(world).await;
    soon("Prepare", prepare_at_last(world, pod, claim)).await;
    // This kubelet appends: another answer would be a third name.
    let again: BTreeSet<String> = world.cdi_names(claim).into_iter().collect();
    assert_eq!(again.len(), 2, "{again:?}");
    assert!(answered.iter().all(|name| again.contains(name)), "{answered:?}, then {again:?}");
    let now = std::fs::read_to_string(world.cdi_file(&claim.claim.name)).unwrap();
    assert!(file.is_none_or(|file| file == now), "the file has changed");
    for name in &again {
        assert!(now.contains(name.split_once('=').unwrap().1), "{name} is in no file: {now}");
    }
    daemon
}

/// An Unprepare, and a kill before its answer or just after. Returns the daemon after it.
async fn kill_in_unprepare(
    world: &World,
    mut daemon: Daemon,
    (pod, claim): (&str, &Claim),
    random: &mut Random,
    tally: &mut Tally,
) -> Daemon {
    let killer = kill_within(&daemon, usual(&tally.unprepares), random);
    let first = soon("Unprepare", world.manager.unprepare(pod)).await;
    killer.join().unwrap();
    daemon.kill();
    let is_recorded = recorded(world).contains_key(&claim.claim.uid);
    if first.is_ok() {
        assert!(!is_recorded, "{} was unprepared and is held again", claim.claim.uid);
    } else {
        tally.unanswered_unprepares += 1;
        tally.released_unanswered += usize::from(!is_recorded);
    }
    let daemon = serve(world).await;
    soon("Unprepare", unprepare_at_last(world, pod)).await;
    assert!(world.manager.devices(&claim.claim, DRA_DRIVER).is_empty());
    assert!(!world.cdi_file(&claim.claim.name).exists());
    daemon
}

#[test]
fn a_daemon_killed_in_any_prepare_or_unprepare_loses_no_claim_and_gives_no_device_twice() {
    run(async {
        let kills: usize = std::env::var("HOLDFAST_KILLS").map_or(12, |text| text.parse().unwrap());
        let (mut random, mut tally) = (Random::new(), Tally::default());
        let fast = Times {
            turn: Duration::from_millis(20),
            dial_again: Duration::from_millis(20),
            again: Duration::from_millis(20),
            again_max: Duration::from_millis(100),
            ..Times::default()
        };
        let world = World::with(3, "off", fast).await;
        // It has the cgroups of the pods, which show that no process runs.
        let _kubelet = world.node.start_kubelet().await;
        let mut daemon = world.start();
        let names = world.until_published(3).await;
        world.until_registered().await;
        for round in 0..WARM + kills.div_ceil(2).max(1) {
            let (name, pod) = (format!("claim-{round}"), format!("pod-{round}"));
            let devices = WANTED[round % WANTED.len()].map(|at| names[at].clone());
            let claim = world.allocate(&name, &pod, &devices);
            assert_eq!(claim.claim, claim_ref(&name));
            if round < WARM {
                // The usual times.
                let began = Instant::now();
                prepare(&world, &pod, &claim).await.unwrap();
                tally.prepares.push(began.elapsed());
                let began = Instant::now();
                soon("Unprepare", world.manager.unprepare(&pod)).await.unwrap();
                tally.unprepares.push(began.elapsed());
                continue;
            }
            let pair = (pod.as_str(), &claim);
            daemon = kill_in_prepare(&world, daemon, pair, &mut random, &mut tally).await;
            // A claim with one of its devices waits.
            let rival_pod = format!("rival-{round}");
            let rival = world.allocate(&format!("rival-{round}"), &rival_pod, &devices[..1]);
            let waits = prepare_at_last(&world, &rival_pod, &rival);
            let prepared = tokio::time::timeout(Duration::from_millis(150), waits).await;
            assert!(prepared.is_err(), "a device has two claims");
            assert!(world.holders(&rival.claim.name).is_empty());
            soon("Unprepare", unprepare_at_last(&world, &rival_pod)).await;
            daemon = kill_in_unprepare(&world, daemon, pair, &mut random, &mut tally).await;
        }
        daemon.signal(Signal::SIGTERM);
        assert!(daemon.ended().await.success());
        assert!(recorded(&world).is_empty());
        println!("{kills} kills: {tally:?}");
        let unanswered = tally.unanswered_prepares + tally.unanswered_unprepares;
        assert!(unanswered * 4 >= kills, "only {unanswered} of {kills} kills fell into a call");
    });
}
