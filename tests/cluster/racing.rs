//! One resource by both APIs: pods with a number and pods with a claim race for its devices.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node::MAJOR;
use crate::objects::{claim_of, pod, text_of};
use crate::pki::kubeconfig;
use crate::real::gpus;
use crate::{SOON, say, wait_for};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const NAME: &str = "example.com/raced";
const RESOURCE: &str = r#"
[[resource]]
name = "example.com/raced"
class = "char"
paths = [{ host = "/dev/raced*", container = "/dev/raced/" }]
api = "both"
"#;
/// The number of devices, and of pods that have not ended at a time.
const DEVICES: usize = 8;
const AT_ONCE: usize = 24;
/// Pods that must end well; `HOLDFAST_PODS` is another number.
const PODS_WANTED: usize = 40;
/// Kills of the daemon, evenly spread. In the middle the kubelet is killed too.
const KILLS: usize = 4;

/// Marks its device while it has it. A mark of another container is a violation.
const HOLDS: &str = r#"
node=$(ls /dev/raced)
[ "$(echo $node | wc -w)" = 1 ] || { echo "it has: $node" > /marks/violation-NAME; exit 1; }
mkdir /marks/$node || { echo "another has $node" > /marks/violation-NAME; exit 1; }
trap "rmdir /marks/$node; exit 3" TERM
sleep SECONDS & wait $!
rmdir /marks/$node
"#;

/// How the pods of a race ended.
#[derive(Debug, Default)]
struct Ends {
    /// Well: with a number, and with a claim.
    by_number: usize,
    by_claim: usize,
    /// Rejected by the kubelet, and deleted by the control plane.
    rejected: usize,
    evicted: usize,
    /// Not started because of the kill of the kubelet.
    interrupted: usize,
}

#[derive(Debug)]
struct Race {
    marks: PathBuf,
    left: usize,
    created: usize,
    /// Pods that have not ended, and whether they have a claim.
    running: BTreeMap<String, bool>,
    ends: Ends,
}

impl Race {
    fn create(&mut self, cluster: &Cluster, has_claim: bool) {
        self.created += 1;
        let name = format!("races-{}", self.created);
        let seconds = (self.created % 3).to_string();
        let script = HOLDS.replace("NAME", &name).replace("SECONDS", &seconds);
        let claims: &[&str] = if has_claim { &[&name] } else { &[] };
        let mut pod = pod(&name, claims, &script);
        pod["spec"]["restartPolicy"] = "Never".into();
        let marks = json!({"name": "marks", "hostPath": {"path": self.marks}});
        pod["spec"]["volumes"] = json!([marks]);
        let main = &mut pod["spec"]["containers"][0];
        main["volumeMounts"] = json!([{"name": "marks", "mountPath": "/marks"}]);
        if has_claim {
            let expression = r#"device.attributes["holdfast.dev"].path.startsWith("/dev/raced")"#;
            let device = json!({
                "deviceClassName": "char.holdfast.dev",
                "selectors": [{"cel": {"expression": expression}}],
            });
            let requests = json!([{"name": "device", "exactly": device}]);
            cluster.api.create(CLAIMS, &claim_of(&name, json!({"requests": requests})));
        } else {
            main["resources"] = json!({"limits": {NAME: "1"}});
        }
        cluster.api.create(PODS, &pod);
        self.running.insert(name, has_claim);
    }

    /// Removes what has ended and creates others, as controllers do. Returns whether a pod has
    /// ended well.
    fn step(&mut self, cluster: &mut Cluster) -> bool {
        cluster.plane.check();
        cluster.node.check();
        let is_even = |n: usize| n.is_multiple_of(2);
        while self.left > 0 && self.running.len() < AT_ONCE {
            self.left -= 1;
            self.create(cluster, is_even(self.left));
        }
        let pods = cluster.api.list(PODS);
        let pods: BTreeMap<String, Value> =
            pods.into_iter().map(|pod| (text_of(&pod, "name"), pod)).collect();
        let before = self.ends.by_number + self.ends.by_claim;
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
                    let is_rejected =
                        reason == "UnexpectedAdmissionError" || reason == format!("OutOf{NAME}");
                    // The kubelet was killed while the runtime started the container.
                    let main = &status["containerStatuses"][0]["state"]["terminated"];
                    let is_interrupted = main["reason"] == "StartError";
                    assert!(is_interrupted || is_rejected && !has_claim, "{name}: {status}");
                    *(if is_rejected {
                        &mut self.ends.rejected
                    } else {
                        &mut self.ends.interrupted
                    }) += 1;
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
        self.ends.by_number + self.ends.by_claim > before
    }

    fn violations(&self) -> Vec<String> {
        let marks = fs::read_dir(&self.marks).unwrap().map(|entry| entry.unwrap().path());
        let read = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            format!("{}: {text}", path.file_name().unwrap().display())
        };
        marks.map(read).filter(|text| text.starts_with("violation")).collect()
    }
}

pub(crate) fn both_apis(cluster: &mut Cluster) {
    let wanted = std::env::var("HOLDFAST_PODS").map_or(PODS_WANTED, |text| text.parse().unwrap());
    (0..DEVICES).for_each(|n| {
        gpus::make_node(Path::new(&format!("/dev/raced{n}")), MAJOR, 100 + n as u64);
    });
    let marks = cluster.dir.join("marks");
    fs::create_dir(&marks).unwrap();
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, RESOURCE);
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    let (left, running, ends) = (wanted, BTreeMap::new(), Ends::default());
    let mut race = Race { marks, left, created: 0, running, ends };
    let mut kills: BTreeSet<usize> = (1..=KILLS).map(|n| n * wanted / (KILLS + 1)).collect();
    while race.left > 0 || !race.running.is_empty() {
        wait_for("another pod ends well", 2 * SOON, || race.step(cluster).then_some(()));
        assert_eq!(race.violations(), Vec::<String>::new(), "{}", daemon.log());
        let ended = race.ends.by_number + race.ends.by_claim;
        if kills.first().is_some_and(|at| ended >= *at) {
            kills.pop_first();
            daemon.kill_and_start(|| {
                if kills.len() == KILLS / 2 {
                    cluster.node.kill_kubelet();
                    cluster.node.start_kubelet();
                }
            });
        }
    }
    let Race { created, ends, .. } = &race;
    assert_eq!(ends.by_number + ends.by_claim, wanted);
    assert!(kills.is_empty(), "too few pods for the kills: {kills:?}");
    let live = || daemon.held(NAME);
    wait_for("every device is released", SOON, || (live() == 0).then_some(()));
    say(format_args!(
        "{created} pods for {wanted} ends, {DEVICES} devices by both APIs, {KILLS} kills of the daemon, one of the \
         kubelet: no device in two containers; {ends:?}"
    ));
}
