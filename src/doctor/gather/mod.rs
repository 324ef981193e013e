//! Reads the facts of a node. Each reader has its own thread and all start at once: one that hangs
//! (a socket with a stopped owner, a network file system, a driver) delays no other. Results that
//! miss the deadline are ignored.

mod daemon;
mod files;
mod hardware;
mod host;
mod kubelet;
mod mounts;
mod runtime;

use super::Facts;
use crate::config::{self, Config, Node, Roots};
use crate::host as system;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

pub(super) use self::host::INSTANCES_WANTED as INOTIFY_WANTED;

/// Deadline of all readers together. The configuration is read before them, with the same deadline.
const PATIENCE: Duration = Duration::from_secs(4);
/// Deadline of one query over a socket. It is shorter than `PATIENCE`, so that a missing answer is
/// reported as such.
const QUESTION: Duration = Duration::from_secs(2);

/// The place to examine.
#[derive(Debug, Clone)]
pub struct Place {
    /// The root directories.
    pub roots: Roots,
    /// The configuration file; `None` is the default one.
    pub config: Option<PathBuf>,
    /// `/proc/self`: facts about this process, and so about its container.
    pub own: PathBuf,
}

impl Place {
    /// Path of the pod-resources socket.
    fn pod_resources(&self, config: Option<&Config>) -> PathBuf {
        let named = config.and_then(|config| config.pod_resources_socket.clone());
        named.unwrap_or_else(|| self.roots.kubelet.join("pod-resources/kubelet.sock"))
    }
}

/// The input of every reader.
#[derive(Debug)]
struct Ground {
    place: Place,
    /// The configuration, if it is valid.
    config: Option<Config>,
    /// Whether this process can read everything on the host.
    may_read_all: bool,
}

/// The result of a reader: it adds facts.
type Found = Box<dyn FnOnce(&mut Facts) + Send>;

struct Look {
    /// The subject, for the message that it hangs.
    what: &'static str,
    run: fn(&Ground) -> Found,
}

const LOOKS: &[Look] = &[
    Look { what: "the kubelet's directory", run: kubelet::directory },
    Look { what: "the kubelet's pod-resources API", run: kubelet::listing },
    Look { what: "the daemon", run: daemon::daemon },
    Look { what: "the processes of this host", run: daemon::processes },
    Look { what: "the devices of this host", run: hardware::resources },
    Look { what: "the state directory", run: files::state },
    Look { what: "the ledger", run: files::ledger },
    Look { what: "the container runtime's configuration", run: runtime::cdi },
    Look { what: "the host's settings", run: host::host },
    Look { what: "/dev/kmsg", run: host::kernel_log },
];

/// Runs all readers. Takes seconds at most, even if one hangs.
#[must_use]
pub fn gather(place: Place) -> Facts {
    let mut facts = Facts::unknown(place.roots.clone(), system::now());
    facts.is_root = system::peer::is_root();
    facts.uid_map = std::fs::read_to_string(place.own.join("uid_map")).ok().and_then(|map| map.lines().next().map(str::to_owned));
    // First, since it contains paths for the other readers.
    let load = {
        let place = place.clone();
        move || {
            let loaded = config::load(place.config.as_deref(), &Node::here(&place.roots.host));
            let wants = files::wants(&loaded, &place);
            (loaded.ok(), wants)
        }
    };
    let (what, loaded) = ("the configuration", all(vec![("", Box::new(load))], PATIENCE).pop().and_then(|(_, loaded)| loaded));
    let (config, wants) = loaded.unzip();
    if wants.is_none() {
        facts.hanging.push(what);
    }
    facts.config = wants;
    let ground = Arc::new(Ground { place, config: config.flatten(), may_read_all: facts.may_read_all() });
    let looks = LOOKS.iter().map(|look| {
        let (ground, run) = (Arc::clone(&ground), look.run);
        (look.what, Box::new(move || run(&ground)) as Box<dyn FnOnce() -> Found + Send>)
    });
    for (what, found) in all(looks.collect(), PATIENCE) {
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
    let begin = |(what, run): Run<T>| {
        let (tell, told) = mpsc::sync_channel(1);
        // The send fails after the deadline. A thread that cannot be created counts as one without
        // a result.
        let begun = thread::Builder::new().name("look".into()).spawn(move || drop(tell.send(run())));
        (what, begun.is_ok().then_some(told))
    };
    let begun: Vec<_> = runs.into_iter().map(begin).collect();
    let wait = |told: mpsc::Receiver<T>| told.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
    begun.into_iter().map(|(what, told)| (what, told.and_then(wait))).collect()
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
    fn what_hangs_is_left_behind_and_everything_else_is_told() {
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
