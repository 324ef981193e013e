//! Many grants that come and go: the ledger stays as small as `history_size` says, at every moment, and an Allocate does not become slower.
//!
//! `HOLDFAST_GRANTS` is how many, `HOLDFAST_HISTORY_MIB` what the history may take, `HOLDFAST_BIN` another binary, such as the release
//! build. What takes how long is printed, and judged with `HOLDFAST_JUDGE_TIMES` alone, since the machine may be busy.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod common;

use common::{Node, name, offered, resource, run, soon};
use holdfast::sim::kubelet::{EventKind, PodPhase, PodSpec};
use nix::sys::signal::Signal;
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1024 * 1024;
/// Devices, and pods that run at a time.
const DEVICES: usize = 64;
const PODS: usize = 48;
/// How many Allocates are compared.
const COMPARED: usize = 1000;

fn asked(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The bytes of all files below a directory, which others write meanwhile.
fn size(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.metadata().map_or(0, |about| if about.is_dir() { size(&entry.path()) } else { about.len() })).sum()
}

/// Looks at the size of a directory all the time.
struct Watch {
    most: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    watching: thread::JoinHandle<()>,
}

impl Watch {
    fn begin(dir: PathBuf) -> Self {
        let (most, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, end) = (Arc::clone(&most), Arc::clone(&ends));
        let watching = thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                seen.fetch_max(size(&dir), Ordering::Relaxed);
                thread::park_timeout(Duration::from_millis(2));
            }
        });
        Watch { most, ends, watching }
    }

    fn end(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.watching.join().unwrap();
        self.most.load(Ordering::Relaxed)
    }
}

fn p99(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() * 99 / 100]
}

#[test]
fn the_state_directory_stays_below_four_times_the_history() {
    run(async {
        let grants = usize::try_from(asked("HOLDFAST_GRANTS", 2000)).unwrap();
        let history = asked("HOLDFAST_HISTORY_MIB", 4);
        let node = Node::with(&[("gpu", DEVICES)]);
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n[ledger]\nhistory_size = \"{history}MiB\"\n{}", resource("gpu")));
        let gpu = name("example.com/gpu");
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu, DEVICES).await;
        let watch = Watch::begin(node.state());
        let (mut pods, mut times, began) = (VecDeque::new(), Vec::new(), Instant::now());
        for n in 0..grants {
            let pod = PodSpec::new("team", format!("train-{n}")).app("main", &gpu, 1);
            let added = kubelet.add_pod(pod).await;
            assert_eq!(added.phase, PodPhase::Running, "{n}");
            pods.push_back(added.uid);
            let took = kubelet.view(|view| {
                let took = |event: &EventKind| if let EventKind::Allocated { took, .. } = event { Some(*took) } else { None };
                view.events().iter().rev().find_map(|event| took(&event.kind))
            });
            times.extend(took);
            if pods.len() > PODS {
                assert!(kubelet.delete_pod(&pods.pop_front().unwrap()).unwrap());
            }
            if n % 10_000 == 9_999 {
                println!("{} grants, {:?}, {} KiB", n + 1, began.elapsed(), size(&node.state()) / 1024);
            }
        }
        let (first, last) = (p99(&times[..COMPARED.min(times.len())]), p99(&times[times.len().saturating_sub(COMPARED)..]));
        let took = began.elapsed();
        // The kubelet answers on this thread.
        let released = async {
            while node.grants().len() > PODS {
                tokio::task::yield_now().await;
            }
        };
        soon("the last releases", released).await;
        let most = watch.end();
        let now = size(&node.state());
        println!(
            "{grants} grants in {took:?} with history_size = {history} MiB: the state directory had {:.1} MiB at most and has {:.1}; Allocate \
             p99 of the first {COMPARED}: {first:?}, of the last: {last:?}",
            most as f64 / MIB as f64,
            now as f64 / MIB as f64,
        );
        let most_allowed = 4 * history * MIB;
        assert!(most <= most_allowed, "{} KiB, of at most {}", most / 1024, most_allowed / 1024);
        if std::env::var_os("HOLDFAST_JUDGE_TIMES").is_some() {
            assert!(last.as_secs_f64() <= 1.2 * first.as_secs_f64(), "{last:?} against {first:?}");
        }
        let told = node.json(&["history"]);
        let released = told["grants"].as_array().unwrap().iter().filter(|grant| grant["state"] == "released").count();
        // A grant of one device takes less than 1 KiB there.
        let remembered = (history * MIB / 3 / 1024) as usize;
        assert!(released >= (grants - PODS).min(remembered), "{released} released grants are remembered");
        assert!(told["problem"].is_null(), "{}", told["problem"]);
        daemon.signal(Signal::SIGTERM);
        daemon.ended().await;
    });
}
