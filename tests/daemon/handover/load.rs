//! Handovers while pods come and go.

use super::{DEVICES, dips, gpu, served, served_with, take_over};
use crate::common::{HANG, Node, Random, offered, percentiles, run, soon, until};
use futures_util::future;
use holdfast::domain::{AllocId, Grant};
use holdfast::kubelet::checkpoint;
use holdfast::lab::sim::kubelet::{
    Event, EventKind, Hook, HookTable, Kubelet, PodOutcome, PodPhase, PodSpec, Verdict,
};
use holdfast::store;
use nix::sys::signal::Signal;
use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Pods that are there at a time: others have gone, and their devices are free for the kubelet.
const PODS: usize = 6;
/// The newer instance's log lines after which the older instance is killed.
const MOMENTS: [&str; 4] = [
    "requesting a handover",
    "ledger recovered",
    "registered with the kubelet",
    "took over from another instance",
];

/// How many handovers of a kind are made under load.
pub(crate) fn rounds(in_every_run: usize) -> usize {
    std::env::var("HOLDFAST_ROUNDS").map_or(in_every_run, |text| text.parse().unwrap())
}

/// Makes pods come and go, one after the other, until `stop` is set. Returns the outcome of each.
async fn pods_come_and_go(kubelet: &Kubelet, stop: &Cell<bool>) -> Vec<PodOutcome> {
    let (mut outcomes, mut there) = (Vec::new(), VecDeque::new());
    while !stop.get() {
        let spec =
            PodSpec::new("default", format!("pod-{}", outcomes.len())).app("main", &gpu(), 1);
        let outcome = soon("an admission", kubelet.add_pod(spec)).await;
        there.push_back(outcome.uid.clone());
        outcomes.push(outcome);
        if there.len() > PODS {
            kubelet.force_delete_pod(&there.pop_front().unwrap());
        }
        // The kubelet admits what it hears of, and hears of it now and then.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    outcomes
}

/// Every answer that the kubelet has got is known, live or released.
fn nothing_is_lost(node: &Node) {
    let checkpoint = checkpoint::read(&node.path("kubelet/device-plugins")).unwrap();
    let answered: BTreeSet<AllocId> = checkpoint.grant_ids().cloned().collect();
    let mut known: BTreeSet<AllocId> =
        node.grants().into_iter().map(|grant| grant.alloc_id).collect();
    if !answered.is_subset(&known) {
        known.extend(
            store::peek_history(&node.state())
                .unwrap()
                .released
                .into_iter()
                .map(|grant| grant.alloc_id),
        );
    }
    assert!(answered.is_subset(&known), "{:?}", answered.difference(&known).collect::<Vec<_>>());
}

/// What the kubelet rejected pods for.
fn refusals(kubelet: &Kubelet) -> Vec<String> {
    let rejected = |event: &&Event| matches!(event.kind, EventKind::Rejected { .. });
    kubelet.view(|view| view.events().iter().filter(rejected).map(ToString::to_string).collect())
}

/// Runs `work` while pods come and go: the kubelet loses no device in that time and rejects no pod,
/// and every grant is known. Returns the number of pods and the result of `work`.
pub(crate) async fn unnoticed_under_load<T>(
    node: &Node,
    kubelet: &Kubelet,
    work: impl Future<Output = T>,
) -> (usize, T) {
    let began = kubelet.now();
    let is_over = Cell::new(false);
    let work = async {
        let done = work.await;
        is_over.set(true);
        done
    };
    let (outcomes, done) = tokio::join!(pods_come_and_go(kubelet, &is_over), work);
    offered(kubelet, &gpu(), DEVICES).await;
    assert_eq!((dips(kubelet, began), refusals(kubelet)), (vec![], vec![]));
    nothing_is_lost(node);
    assert_eq!(kubelet.panicked(), None);
    (outcomes.len(), done)
}

async fn handed_over_under_load() {
    let (node, kubelet, mut old) = served().await;
    let handovers = async {
        for round in 0..rounds(3) {
            let new = take_over(&node);
            if round % 3 == 1 {
                // A little too early: what is under way is completed.
                new.logged("registered with the kubelet").await;
            } else {
                new.logged("took over from another instance").await;
                old.logged("on standby").await;
            }
            old.signal(Signal::SIGTERM);
            assert_eq!(old.ended().await.code(), Some(0));
            old = new;
        }
        old
    };
    let (pods, mut old) = unnoticed_under_load(&node, &kubelet, handovers).await;
    println!("{pods} pods");
    assert!(pods > 3, "the load has hardly run");
    // Its end is seen all the same, and so is the next one.
    old.kill();
    kubelet.wait_for(|view| view.capacity(&gpu()).allocatable == 0, HANG).await.unwrap();
    let _next = take_over(&node);
    offered(&kubelet, &gpu(), DEVICES).await;
    nothing_is_lost(&node);
    assert_eq!(kubelet.panicked(), None);
}

#[test]
fn a_handover_takes_no_device_from_the_kubelet_and_fails_no_pod() {
    run(handed_over_under_load());
}

/// Kills the older instance at several moments of a handover, with what the kubelet has just asked
/// it.
async fn killed_under_load() {
    let hooks = HookTable::default();
    let (node, kubelet, mut old) = served_with(&hooks).await;
    let handovers = async {
        for round in 0..rounds(2 * MOMENTS.len()) {
            let new = take_over(&node);
            new.logged(MOMENTS[round / 2 % MOMENTS.len()]).await;
            if round % 2 == 1 {
                // It handles no further events, and still gets requests.
                let mut about_to_ask = hooks.gate(Hook::BeforeAllocate);
                soon("an Allocate", about_to_ask.reached()).await;
                old.signal(Signal::SIGSTOP);
                let mut asked = hooks.gate(Hook::DuringAllocate);
                about_to_ask.open(Verdict::Pass);
                soon("the same one", asked.reached()).await;
                asked.open(Verdict::Pass);
            }
            old.kill();
            new.logged("INFO ready").await;
            old = new;
        }
        old
    };
    let (pods, _old) = unnoticed_under_load(&node, &kubelet, handovers).await;
    println!("killed: {pods} pods");
    assert!(pods > 8, "the load has hardly run");
}

#[test]
fn an_older_instance_that_is_killed_takes_no_device_from_the_kubelet_and_fails_no_pod() {
    run(killed_under_load());
}

/// Where the kubelet lists its pods, it forgets the devices of an Allocate that is not answered
/// yet, and may give them to another pod.
#[test]
fn a_new_instance_does_not_list_the_pods_while_an_allocate_waits_for_it() {
    run(async {
        let hooks = HookTable::default();
        let (node, kubelet, mut old) = served_with(&hooks).await;
        kubelet.wait_for(|view| view.is_settled(), HANG).await.unwrap();
        let pod =
            |name: &str| kubelet.add_pod(PodSpec::new("default", name).app("main", &gpu(), 1));
        let first = soon("an admission", pod("first")).await;
        assert_eq!(first.phase, PodPhase::Running);
        let bound = |grants: &Vec<Grant>| grants.iter().any(|grant| grant.pod().is_some());
        until("its holder", || node.grants(), bound).await;
        let listings = || kubelet.view(|view| view.listings_in_allocate());

        let mut about_to_ask = hooks.gate(Hook::BeforeAllocate);
        let handover = async {
            soon("an Allocate", about_to_ask.reached()).await;
            let new = take_over(&node);
            new.logged(MOMENTS[0]).await;
            old.signal(Signal::SIGSTOP);
            let mut asked = hooks.gate(Hook::DuringAllocate);
            about_to_ask.open(Verdict::Pass);
            soon("the same one", asked.reached()).await;
            // It may list the pods when it is registered.
            let mut registers = hooks.gate(Hook::BeforeRegisterClient);
            // For this pod, a start lists the pods.
            kubelet.delete_pod(&first.uid).unwrap();
            let before = listings();
            old.kill();
            soon("a Register", registers.reached()).await;
            new.logged("grant recorded").await;
            asked.open(Verdict::Pass);
            (new, registers, before)
        };
        let (outcome, (new, registers, before)) =
            soon("an admission", future::join(pod("second"), handover)).await;
        assert_eq!(outcome.phase, PodPhase::Running);
        assert_eq!(listings(), before);
        registers.open(Verdict::Pass);
        new.logged("INFO ready").await;
        nothing_is_lost(&node);
    });
}

#[test]
fn when_one_instance_is_killed_at_any_time_the_other_one_serves() {
    run(async {
        let rounds = rounds(12);
        let mut random = Random::new();
        let (node, kubelet, mut old) = served().await;
        let began = kubelet.now();
        let stop = Cell::new(false);
        let mut usual = Duration::from_millis(1500);
        let handovers = async {
            for round in 0..rounds {
                let started = Instant::now();
                let mut new = take_over(&node);
                let wait = usual.mul_f64(random.below(1000) as f64 / 900.0);
                match round % 3 {
                    0 => {
                        new.logged("took over from another instance").await;
                        usual = started.elapsed();
                        old.signal(Signal::SIGTERM);
                        assert_eq!(old.ended().await.code(), Some(0));
                        old = new;
                    }
                    1 => {
                        tokio::time::sleep(wait).await;
                        old.kill();
                        new.logged("ready").await;
                        old = new;
                    }
                    _ => {
                        tokio::time::sleep(wait).await;
                        new.kill();
                    }
                }
                offered(&kubelet, &gpu(), DEVICES).await;
                // Not only listed: an instance answers too, as soon as the kubelet has seen the end
                // of the other one.
                let answered =
                    async {
                        for attempt in 0.. {
                            let spec = PodSpec::new("default", format!("after-{round}-{attempt}"))
                                .app("main", &gpu(), 1);
                            let outcome = kubelet.add_pod(spec).await;
                            kubelet.force_delete_pod(&outcome.uid);
                            if outcome.phase == PodPhase::Running {
                                return;
                            }
                        }
                    };
                soon("an answer", answered).await;
            }
            stop.set(true);
        };
        let (outcomes, ()) = tokio::join!(pods_come_and_go(&kubelet, &stop), handovers);
        nothing_is_lost(&node);
        assert_eq!(kubelet.panicked(), None);
        let rejected = outcomes.iter().filter(|outcome| outcome.phase != PodPhase::Running).count();
        let dips = dips(&kubelet, began);
        println!(
            "{rounds} rounds: {} pods, {rejected} rejected; moments without devices: {}, {}",
            outcomes.len(),
            dips.len(),
            percentiles(dips)
        );
        drop(old);
    });
}
