//! Runs the same scripts on a real kubelet and on the simulated DRA manager. A driver must observe
//! the same behaviour of both.
//!
//! A recording driver notes the calls of the kubelet and the ends of streams. inotify notes each
//! write of the kubelet's record of claims. `golden/` has the recordings of a real kubelet, as a
//! partial order (see [`crate::recording::timeline`]). Both kubelets are compared with it: the real
//! one on the control plane, the simulated one always.
//!
//! Where the feature gate `ResourceHealthStatus` is off, the kubelet does not watch the health of
//! devices, and that part of the recordings is left out. Then the kubelet learns only from its next
//! call that a driver is away, so that script is not played.
//!
//! `HOLDFAST_RECORD=1` prints the recording instead of comparing it.

mod driver;
mod rig;
mod scripts;

use self::driver::{DRIVER, Driver, USUAL};
use self::rig::{Real, Rig, Simulated, State};
use self::scripts::{ALL, Script};
use crate::cluster::Cluster;
use crate::recording::directory::{Directory, Folder};
use crate::recording::steps::{Steps, Watching};
use crate::recording::timeline::{Recorder, Timeline};
use crate::{SOON, say, wait_for};
use holdfast::domain::CheckpointClaim;
use holdfast::kubelet::dra::state::read_claims;
use std::collections::{BTreeMap, BTreeSet};
use std::slice::from_ref;
use std::thread;
use std::time::{Duration, Instant};

/// The kubelet's record of claims.
const FOLDERS: [Folder; 1] = [Folder { path: "", prefix: "", only: Some("dra_manager_state") }];
/// Without a golden timeline, a step is over when nothing was observed for this time.
const QUIET: Duration = Duration::from_secs(5);
/// The lane of a driver's health stream, in the recordings.
const HEALTH: &str = " health: ";
/// The script whose recording depends on that stream.
const NEEDS_HEALTH: &str = "the_driver_is_away";
/// A lane that is read at the end of a step.
const RECORD: &str = "the record has";

pub(crate) fn on_the_real(cluster: &mut Cluster) {
    let watches_health = !cluster.is_off("ResourceHealthStatus");
    play("the real kubelet", &mut Real::new(cluster), ALL, watches_health);
}

#[test]
fn the_simulated_dra_manager_does_what_the_kubelet_does() {
    // Each has a kubelet of its own: they wait most of the time.
    thread::scope(|scope| {
        for script in ALL {
            let play =
                || play("the simulated kubelet", &mut Simulated::start(), from_ref(script), true);
            scope.spawn(play);
        }
    });
}

fn play(who: &str, rig: &mut dyn Rig, scripts: &[Script], watches_health: bool) {
    let watching = Watching::start(Directory::watch(&rig.kubelet_dir(), &FOLDERS));
    let records = std::env::var_os("HOLDFAST_RECORD").is_some();
    let mut differences = Vec::new();
    for Script { name, play, golden } in scripts {
        if !watches_health && *name == NEEDS_HEALTH {
            say(format_args!("SKIPPED {name}: the gate `ResourceHealthStatus` is off"));
            continue;
        }
        let began = Instant::now();
        let is_observed = |line: &&str| watches_health || !line.contains(HEALTH);
        let golden: Vec<&str> = golden.lines().filter(is_observed).collect();
        let golden = Timeline::parse(&golden.join("\n"));
        let recorder = watching.recorder.clone();
        let steps = Steps::new(recorder, (!records).then_some(&golden), QUIET);
        let mut player = Player { rig, steps, running: BTreeMap::new() };
        play(&mut player);
        let notes = player.steps.finish();
        player.rig.clear();
        if records {
            say(format_args!("---- {name} on {who}\n{}", Timeline::of(&notes).text()));
            continue;
        }
        let found = golden.differences(&notes);
        say(format_args!(
            "{who}: {name}: {} observations, {} differences, {:.1} s",
            notes.len(),
            found.len(),
            began.elapsed().as_secs_f64()
        ));
        differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    assert!(differences.is_empty(), "{who} does otherwise:\n{}", differences.join("\n"));
}

/// Runs a script on one kubelet, and records its observations.
pub(crate) struct Player<'a> {
    rig: &'a mut dyn Rig,
    steps: Steps<'a>,
    running: BTreeMap<String, String>,
}

impl Player<'_> {
    fn recorder(&self) -> &Recorder {
        &self.steps.recorder
    }

    fn driver(&self, name: &'static str) -> Driver {
        self.driver_of(name, &USUAL)
    }

    fn driver_of(&self, name: &'static str, versions: &[&str]) -> Driver {
        Driver::start(&self.rig.kubelet_dir(), self.recorder(), name, versions)
    }

    fn begin(&mut self, step: &str) {
        self.steps.begin(step);
    }

    /// Waits for the rest of a step, and records the claims that the kubelet knows then.
    fn end(&self) {
        self.steps.end();
        let claims = read_claims(&self.rig.kubelet_dir(), DRIVER).unwrap_or_default();
        let entry = |claim: &CheckpointClaim| {
            let pods: BTreeSet<String> = claim.pods.iter().map(|uid| self.rig.name(uid)).collect();
            let pods = pods.into_iter().collect::<Vec<_>>().join(" ");
            format!("{} for {pods}: {} devices", claim.claim.name, claim.devices.len())
        };
        // The kubelet writes them in any order.
        let entries: BTreeSet<String> = claims.iter().map(entry).collect();
        entries.into_iter().for_each(|entry| self.recorder().note(RECORD, entry));
    }

    /// Waits until a pod runs, and records whether its container has started again.
    fn runs(&mut self, pod: &str) {
        let start = wait_for(&format!("{pod} runs"), SOON, || match self.rig.state(pod) {
            State::Runs(start) => Some(start),
            State::Absent | State::Open => None,
        });
        let before = self.running.insert(pod.to_owned(), start.clone());
        let text = if before.as_ref() == Some(&start) { "runs on" } else { "runs" };
        self.recorder().note(format!("pod {pod}"), text);
    }

    /// Waits until no pod has this name.
    fn is_gone(&mut self, pod: &str) {
        wait_for(&format!("{pod} was removed"), SOON, || {
            (self.rig.state(pod) == State::Absent).then_some(())
        });
        self.recorder().note(format!("pod {pod}"), "gone");
    }

    /// Waits until a call for a pod has failed, and records the kubelet's words.
    fn has_failed(&mut self, pod: &str) {
        let error = wait_for(&format!("an error of {pod}"), SOON, || self.rig.error(pod));
        self.recorder().note(format!("pod {pod}"), error);
    }
}
