//! One resource by both APIs: pods with a number and pods with a claim race for its devices.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node::MAJOR;
use crate::objects::{claim_of, main_started, pod, text_of};
use crate::pki::kubeconfig;
use crate::real::gpus;
use crate::{SOON, number, say, wait_for};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The resource of a race.
pub(crate) const NAME: &str = "example.com/raced";
pub(crate) const BOTH: &str = r#"
[[resource]]
name = "example.com/raced"
class = "char"
paths = [{ host = "/dev/raced*", container = "/dev/raced/" }]
api = "both"
"#;
/// The number of devices, and of pods that have not ended at a time.
pub(crate) const DEVICES: usize = 8;
const AT_ONCE: usize = 24;
/// Pods that must end well; `HOLDFAST_PODS` is another number.
const PODS_WANTED: usize = 40;
/// Kills of the daemon, evenly spread. In the middle the kubelet is killed too.
const KILLS: usize = 4;

/// How long a race waits for an end before it continues.
const PATIENCE: Duration = Duration::from_secs(15);

/// Pods that run all the time, and whether they have a claim.
const STAY: [(&str, bool); 2] = [("stays-number", false), ("stays-claim", true)];

/// Marks its device, a raced one or a GPU, while it has it. A mark of another container is a
/// violation.
const HOLDS: &str = r#"
node=$(ls /dev/raced /dev | grep -xE '(raced|nvidia)[0-9]+')
[ "$(echo $node | wc -w)" = 1 ] || { echo "it has: $node" > /marks/violation-NAME; exit 1; }
mkdir /marks/$node || { echo "another has $node" > /marks/violation-NAME; exit 1; }
trap "rmdir /marks/$node; exit 3" TERM
sleep SECONDS & wait $!
rmdir /marks/$node
"#;

/// How the pods of a race ended.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Well: with a number, and with a claim.
    pub(crate) by_number: usize,
    pub(crate) by_claim: usize,
    /// Rejected by the kubelet, also by its Topology Manager, and deleted by the control plane.
    pub(crate) rejected: usize,
    pub(crate) misaligned: usize,
    pub(crate) evicted: usize,
    /// Not started because of the kill of the kubelet.
    pub(crate) interrupted: usize,
}

#[derive(Debug)]
pub(crate) struct Race {
    /// The beginning of the names of its pods.
    name: &'static str,
    marks: PathBuf,
    left: usize,
    pub(crate) created: usize,
    /// Whether every second pod has a claim.
    has_claims: bool,
    /// Whether the Topology Manager may reject a pod: the kubelet's list has NUMA nodes.
    pub(crate) is_aligned: bool,
    /// Pods that have not ended, and whether they have a claim.
    running: BTreeMap<String, bool>,
    pub(crate) ends: Ends,
}

impl Race {
    fn create(&mut self, cluster: &Cluster, has_claim: bool) {
        self.created += 1;
        let name = format!("{}-{}", self.name, self.created);
        let seconds = (self.created % 3).to_string();
        let script = HOLDS.replace("NAME", &name).replace("SECONDS", &seconds);
        self.create_pod(cluster, &name, has_claim, &script);
        self.running.insert(name, has_claim);
    }

    fn create_pod(&self, cluster: &Cluster, name: &str, has_claim: bool, script: &str) {
        let claims: &[&str] = if has_claim { &[name] } else { &[] };
        let mut pod = pod(name, claims, script);
        pod["spec"]["restartPolicy"] = "Never".into();
        let marks = json!({"name": "marks", "hostPath": {"path": self.marks}});
        pod["spec"]["volumes"] = json!([marks]);
        let main = &mut pod["spec"]["containers"][0];
        main["volumeMounts"] = json!([{"name": "marks", "mountPath": "/marks"}]);
        if has_claim {
            let expression =
                format!("device.attributes[\"holdfast.dev\"].resource.startsWith(\"{NAME}\")");
            let device = json!({
                "deviceClassName": "holdfast.dev",
                "selectors": [{"cel": {"expression": expression}}],
            });
            let requests = json!([{"name": "device", "exactly": device}]);
            cluster.api.create(CLAIMS, &claim_of(name, json!({"requests": requests})));
        } else {
            main["resources"] = json!({"limits": {NAME: "1"}});
        }
        cluster.api.create(PODS, &pod);
    }

    /// Removes what has ended and creates others, as controllers do. Returns whether a pod has
    /// ended well.
    pub(crate) fn step(&mut self, cluster: &mut Cluster) -> bool {
        cluster.plane.check();
        cluster.node.check();
        while self.left > 0 && self.running.len() < AT_ONCE {
            self.left -= 1;
            self.create(cluster, self.has_claims && self.left.is_multiple_of(2));
        }
        let pods = cluster.api.list(PODS);
        let pods: BTreeMap<String, Value> =
            pods.into_iter().map(|pod| (text_of(&pod, "name"), pod)).collect();
        let before = self.ended();
        for (name, has_claim) in self.running.clone() {
            let pod = pods.get(&name);
            let status = pod.map_or(&Value::Null, |pod| &pod["status"]);
            match status["phase"].as_str() {
                Some("Succeeded") if has_claim => self.ends.by_claim += 1,
                Some("Succeeded") => self.ends.by_number += 1,
                // The container has ended with 3 by the TERM of a deletion, which is not yet over.
                Some("Failed") if !pod.unwrap()["metadata"]["deletionTimestamp"].is_null() => {
                    continue;
                }
                Some("Failed") => {
                    let reason = status["reason"].as_str().unwrap_or_default();
                    // The kubelet was killed while the runtime started the container.
                    let main = &status["containerStatuses"][0]["state"]["terminated"];
                    *match reason {
                        "UnexpectedAdmissionError" if !has_claim => &mut self.ends.rejected,
                        "TopologyAffinityError" if !has_claim && self.is_aligned => {
                            &mut self.ends.misaligned
                        }
                        _ if !has_claim && reason == format!("OutOf{NAME}") => {
                            &mut self.ends.rejected
                        }
                        _ if main["reason"] == "StartError" => &mut self.ends.interrupted,
                        _ => panic!("{name}: {status}"),
                    } += 1;
                    self.create(cluster, has_claim);
                }
                Some(_) => continue,
                None => {
                    assert!(has_claim, "{name} was deleted, and has no claim");
                    self.ends.evicted += 1;
                    self.create(cluster, has_claim);
                }
            }
            self.running.remove(&name);
            cluster.api.delete(&format!("{PODS}/{name}"), Some(0));
            if has_claim {
                cluster.api.delete(&format!("{CLAIMS}/{name}"), None);
            }
        }
        self.ended() > before
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        let marks = fs::read_dir(&self.marks).unwrap().map(|entry| entry.unwrap().path());
        let read = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            format!("{}: {text}", path.file_name().unwrap().display())
        };
        marks.map(read).filter(|text| text.starts_with("violation")).collect()
    }
}

/// Creates the raced devices.
pub(crate) fn make_devices() {
    for n in 0..DEVICES {
        let path = format!("/dev/raced{n}");
        if !Path::new(&path).exists() {
            gpus::make_node(Path::new(&path), MAJOR, 100 + n as u64);
        }
    }
}

/// `HOLDFAST_PODS`, or the usual number.
pub(crate) fn wanted() -> usize {
    number("HOLDFAST_PODS", PODS_WANTED)
}

/// The containers of [`STAY`]. The kubelet starts no other ones for them.
pub(crate) fn started(cluster: &mut Cluster) -> [String; STAY.len()] {
    STAY.map(|(name, _)| main_started(&cluster.running(name)))
}

impl Race {
    /// A race on a node with this number of devices for pods with a number.
    pub(crate) fn new(
        cluster: &Cluster,
        name: &'static str,
        wanted: usize,
        devices: usize,
    ) -> Self {
        // The kubelet reports it a moment after the list.
        cluster.until_allocatable(NAME, devices);
        let marks = cluster.dir.join(format!("marks-{name}"));
        fs::create_dir(&marks).unwrap();
        let (running, ends) = (BTreeMap::new(), Ends::default());
        let (created, has_claims, is_aligned) = (0, true, false);
        Race { name, marks, left: wanted, created, has_claims, is_aligned, running, ends }
    }

    /// Creates [`STAY`], one after the other, so that neither loses its device to the other one.
    pub(crate) fn create_stays(&self, cluster: &mut Cluster) {
        for (name, has_claim) in STAY {
            let script = HOLDS.replace("NAME", name).replace("SECONDS", "1000000");
            self.create_pod(cluster, name, has_claim, &script);
            cluster.running(name);
        }
    }

    /// Ends [`STAY`].
    pub(crate) fn end_stays(cluster: &Cluster) {
        for (name, _) in STAY {
            cluster.end(name);
            cluster.api.delete(&format!("{CLAIMS}/{name}"), None);
        }
    }

    /// The pods that have ended well.
    pub(crate) fn ended(&self) -> usize {
        self.ends.by_number + self.ends.by_claim
    }

    /// A race of pods with a number, which lasts until [`Race::end`].
    pub(crate) fn of_numbers(cluster: &Cluster, name: &'static str) -> Self {
        Race { has_claims: false, ..Self::new(cluster, name, usize::MAX, DEVICES) }
    }

    /// Creates only pods for those that were rejected, and waits for the end of all.
    pub(crate) fn end(&mut self, cluster: &mut Cluster) {
        self.left = 0;
        self.run(cluster, |_, _, _| ());
    }

    /// Runs all pods. After each end, and when there was none for a while, `between` gets this
    /// race, and whether a pod has just ended.
    pub(crate) fn run(
        &mut self,
        cluster: &mut Cluster,
        mut between: impl FnMut(&mut Self, &mut Cluster, bool),
    ) {
        let mut last_end = Instant::now();
        while self.left > 0 || !self.running.is_empty() {
            let began = Instant::now();
            let has_ended = wait_for("a pod ends well or the time is over", SOON, || {
                let has_ended = self.step(cluster);
                (has_ended || began.elapsed() > PATIENCE).then_some(has_ended)
            });
            assert_eq!(self.violations(), Vec::<String>::new());
            if has_ended {
                last_end = Instant::now();
            }
            assert!(last_end.elapsed() < 2 * SOON, "no pod ends: {:?}", self.running);
            between(self, cluster, has_ended);
        }
    }
}

/// Waits until no device of these resources is held.
pub(crate) fn until_released(daemon: &Daemon, resources: &[&str]) {
    for resource in resources {
        wait_for("every device is released", SOON, || (daemon.held(resource) == 0).then_some(()));
    }
}

pub(crate) fn both_apis(cluster: &mut Cluster) {
    make_devices();
    let wanted = wanted();
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, BOTH);
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    let mut race = Race::new(cluster, "races", wanted, DEVICES);
    let mut kills: BTreeSet<usize> = (1..=KILLS).map(|n| n * wanted / (KILLS + 1)).collect();
    race.run(cluster, |race, cluster, _| {
        if kills.first().is_some_and(|at| race.ended() >= *at) {
            kills.pop_first();
            daemon.kill_and_start(|| {
                if kills.len() == KILLS / 2 {
                    cluster.node.kill_kubelet();
                    cluster.node.start_kubelet();
                }
            });
        }
    });
    let Race { created, ends, .. } = &race;
    assert_eq!(race.ended(), wanted);
    assert!(kills.is_empty(), "too few pods for the kills: {kills:?}");
    until_released(&daemon, &[NAME]);
    say(format_args!(
        "{created} pods for {wanted} ends, {DEVICES} devices by both APIs, {KILLS} kills of the daemon, one of the \
         kubelet: no device in two containers; {ends:?}"
    ));
}
