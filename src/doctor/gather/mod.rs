//! Reads the facts of a node. Each reader has its own thread and all start at once: one that hangs
//! (a socket with a stopped owner, a network file system, a driver) delays no other. Results that
//! miss the deadline are ignored.

mod daemon;
#[cfg(feature = "cluster")]
mod dra;
mod files;
mod hardware;
mod host;
mod kubelet;
mod mounts;
mod nvidia;
#[cfg(feature = "cluster")]
mod reviews;
mod runtime;

use super::Facts;
use crate::config::{self, Config, Node, POD_RESOURCES, Roots};
use crate::host as system;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

pub(super) use self::host::INSTANCES_WANTED as INOTIFY_WANTED;
pub use self::kubelet::listening_plugins;

/// Deadline of all readers together. The configuration is read before them, with the same deadline.
const DEADLINE: Duration = Duration::from_secs(10);
/// Deadline of one query over a socket. It is shorter than `DEADLINE`, so that a missing answer is
/// reported as such.
const QUERY_DEADLINE: Duration = Duration::from_secs(2);

/// The place to examine.
#[derive(Debug, Clone)]
pub struct Target {
    /// The root directories.
    pub roots: Roots,
    /// The configuration file; `None` is the default one.
    pub config: Option<PathBuf>,
    /// `/proc/self`: facts about this process, and so about its container.
    pub own: PathBuf,
}

impl Target {
    /// Path of the pod-resources socket.
    fn pod_resources(&self, config: Option<&Config>) -> PathBuf {
        let kubelet = &self.roots.kubelet;
        config.map_or_else(|| kubelet.join(POD_RESOURCES), |config| config.pod_resources(kubelet))
    }
}

/// The input of every reader.
#[derive(Debug)]
struct ReaderInput {
    target: Target,
    /// The configuration, if it is valid.
    config: Option<Config>,
    /// Whether this process can read everything on the host.
    may_read_all: bool,
}

/// The result of a reader: it adds facts.
type AddFacts = Box<dyn FnOnce(&mut Facts) + Send>;

struct Reader {
    /// The subject, for the message that it hangs.
    what: &'static str,
    run: fn(&ReaderInput) -> AddFacts,
}

const READERS: &[Reader] = &[
    Reader { what: "the kubelet's directory", run: kubelet::directory },
    Reader { what: "the kubelet's pod-resources API", run: kubelet::listing },
    Reader { what: "the daemon", run: daemon::daemon },
    Reader { what: "the processes of this host", run: daemon::processes },
    Reader { what: "the devices of this host", run: hardware::resources },
    Reader { what: "the programs of NVIDIA's driver", run: hardware::mps_programs },
    Reader { what: "the state directory", run: files::state },
    Reader { what: "the ledger", run: files::ledger },
    Reader { what: "NVIDIA's driver", run: nvidia::driver },
    Reader { what: "the container runtime's configuration", run: runtime::cdi },
    #[cfg(feature = "cluster")]
    Reader { what: "the API server", run: dra::dra },
    #[cfg(feature = "cluster")]
    Reader { what: "the API server's reviews", run: reviews::reviews },
    Reader { what: "the host's settings", run: host::host },
    Reader { what: "/dev/kmsg", run: host::kernel_log },
];

/// Runs all readers. Takes seconds at most, even if one hangs.
#[must_use]
pub fn gather(target: Target) -> Facts {
    let mut facts = Facts::unknown(target.roots.clone(), system::now());
    facts.is_root = system::peer::is_root();
    facts.uid_map = std::fs::read_to_string(target.own.join("uid_map"))
        .ok()
        .and_then(|map| map.lines().next().map(str::to_owned));
    // First, since it contains paths for the other readers.
    let load = {
        let target = target.clone();
        move || {
            let node = Node::here(&target.roots.host, &target.roots.state);
            let loaded = config::load(target.config.as_deref(), &node);
            let wants = files::wants(&loaded, &target);
            (loaded.ok(), wants)
        }
    };
    let (what, loaded) = (
        "the configuration",
        all(vec![("", Box::new(load))], DEADLINE).pop().and_then(|(_, loaded)| loaded),
    );
    let (config, wants) = loaded.unzip();
    if wants.is_none() {
        facts.hanging.push(what);
    }
    facts.config = wants;
    let input = Arc::new(ReaderInput {
        target,
        config: config.flatten(),
        may_read_all: facts.may_read_all(),
    });
    let runs = READERS.iter().map(|reader| {
        let (input, run) = (Arc::clone(&input), reader.run);
        (reader.what, Box::new(move || run(&input)) as Box<dyn FnOnce() -> AddFacts + Send>)
    });
    for (what, found) in all(runs.collect(), DEADLINE) {
        match found {
            Some(found) => found(&mut facts),
            None => facts.hanging.push(what),
        }
    }
    facts
}

/// A subject and its reader.
type Run<T> = (&'static str, Box<dyn FnOnce() -> T + Send>);

/// Runs each reader on its own thread until the deadline; `None` for one that did not finish.
fn all<T: Send + 'static>(runs: Vec<Run<T>>, patience: Duration) -> Vec<(&'static str, Option<T>)> {
    let until = Instant::now() + patience;
    let start = |(what, run): Run<T>| {
        let (sender, receiver) = mpsc::sync_channel(1);
        // The send fails after the deadline. A thread that cannot be created counts as one without
        // a result.
        let started =
            thread::Builder::new().name("reader".into()).spawn(move || drop(sender.send(run())));
        (what, started.is_ok().then_some(receiver))
    };
    let started: Vec<_> = runs.into_iter().map(start).collect();
    let wait = |receiver: mpsc::Receiver<T>| {
        receiver.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    };
    started.into_iter().map(|(what, receiver)| (what, receiver.and_then(wait))).collect()
}

/// Runs a query over a socket on a runtime of this thread; `None` if no runtime can be created.
fn ask<F: Future>(question: F) -> Option<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    Some(runtime.block_on(question))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_hangs_does_not_delay_the_others() {
        let (held, release) = mpsc::channel::<()>();
        let hang: Box<dyn FnOnce() -> u32 + Send> = Box::new(move || {
            // Returns when the other end is dropped.
            release.recv().map_or(1, |()| 0)
        });
        let all = all(vec![("stuck", hang), ("fine", Box::new(|| 2))], Duration::from_millis(200));
        assert_eq!(all, [("stuck", None), ("fine", Some(2))]);
        drop(held);
    }
}
