//! Runs the same scripts on a real kubelet and on the simulated one. A device plugin must observe
//! the same behaviour of both.
//!
//! A recording plugin on a socket of the device-plugin directory records calls, ends of streams and
//! connections. inotify records files. The pod-resources API and the states of the pods are read.
//! `golden/` has the recordings of a real kubelet, as a partial order (see
//! [`crate::recording::timeline`]). Both kubelets are compared with it: the real one if
//! `KUBELET_BIN` names it, the simulated one always.
//! Times are printed side by side. Those that the simulator has as defaults must be of the same
//! order of magnitude.
//!
//! `HOLDFAST_RECORD=1` prints the recording instead of comparing it.

mod player;
mod plugin;
mod rig;
mod scripts;
mod tap;

use self::player::{Player, TO_FIRST_BATCH, TO_KUBELET_SOCKET};
use self::rig::{Real, Rig, Simulated};
use self::scripts::{ALL, Script};
use crate::node::Node;
use crate::recording::directory::{Directory, Folder};
use crate::recording::steps::Watching;
use crate::recording::timeline::Timeline;
use crate::timeline::median;
use crate::{SOON, say, wait_for};
use holdfast::lab::sim::kubelet::Behaviour;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Milliseconds by the name of the measured time.
pub(crate) type Figures = BTreeMap<&'static str, Vec<f64>>;

/// Runs the scripts on the real kubelet.
pub(crate) fn on_the_real(node: &mut Node) -> Figures {
    play("the real kubelet", &mut Real(node))
}

/// Runs the scripts on the simulated kubelet.
pub(crate) fn on_ours() -> Figures {
    play("the simulated kubelet", &mut Simulated::start())
}

/// The folders with sockets of the kubelet.
const FOLDERS: [Folder; 2] = [
    Folder { path: "device-plugins", prefix: "", only: None },
    Folder { path: "pod-resources", prefix: "pod-resources/", only: Some("kubelet.sock") },
];

/// How often a script is repeated if the kubelet was too fast.
const REPLAYS: usize = 4;

fn play(who: &str, rig: &mut dyn Rig) -> Figures {
    let (mut figures, mut differences) = (Figures::new(), Vec::new());
    let socket = rig.kubelet_dir().join("device-plugins/kubelet.sock");
    wait_for("the kubelet takes registrations", SOON, || UnixStream::connect(&socket).ok());
    let directory = Directory::watch(&rig.kubelet_dir(), &FOLDERS);
    // The plugin detects a new kubelet at once.
    let watching = Watching::start(directory);
    let recorder = &watching.recorder;
    let records = std::env::var_os("HOLDFAST_RECORD").is_some();
    for Script { name, play, golden } in ALL {
        let (began, golden) = (Instant::now(), Timeline::parse(golden));
        let once = |rig: &mut dyn Rig, attempt| {
            let mut player =
                Player::new(rig, recorder.clone(), (!records).then_some(&golden), attempt);
            play(&mut player);
            player.finish()
        };
        let mut played = once(rig, 0);
        for attempt in 1..=REPLAYS {
            if played.is_lost {
                say(format_args!(
                    "{who}: {name}: the kubelet processed its pods before the plugin was back; running it again"
                ));
                played = once(rig, attempt);
            }
        }
        played.figures.into_iter().for_each(|(what, ms)| figures.entry(what).or_default().push(ms));
        if records {
            say(format_args!("---- {name} on {who}\n{}", Timeline::of(&played.notes).text()));
            continue;
        }
        let found = golden.differences(&played.notes);
        say(format_args!(
            "{who}: {name}: {} observations, {} differences, {:.1} s",
            played.notes.len(),
            found.len(),
            began.elapsed().as_secs_f64()
        ));
        differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    assert!(differences.is_empty(), "{who} does otherwise:\n{}", differences.join("\n"));
    figures
}

/// Prints the times of both, and compares those that the simulator has as defaults.
pub(crate) fn compare(real: &Figures, ours: &Figures) {
    let say_of = |figures: &Figures, what| {
        let Some(ms) = figures.get(what) else { return "-".to_owned() };
        let least = ms.iter().copied().fold(f64::INFINITY, f64::min);
        format!("{:.1} (from {least:.1}, {} times)", median(ms), ms.len())
    };
    say(format_args!("{:<50} | {:>26} | {:>26}", "median, in ms", "real", "simulated"));
    for what in real.keys() {
        say(format_args!("{what:<50} | {:>26} | {:>26}", say_of(real, what), say_of(ours, what)));
    }
    // Of the same order of magnitude: neither a busy machine nor a fast start is ten times off.
    let gaps = Behaviour::default().gaps;
    let defaults = [
        (TO_KUBELET_SOCKET, gaps.to_container_manager + gaps.to_device_manager),
        (TO_FIRST_BATCH, gaps.to_first_batch),
    ];
    for (what, default) in defaults {
        let (default, real) = (default.as_secs_f64() * 1000.0, median(&real[what]));
        assert!(
            (default / 10.0..default * 10.0).contains(&real),
            "{what}: {default} ms in the simulator, {real:.1} ms in the real kubelet"
        );
    }
}
