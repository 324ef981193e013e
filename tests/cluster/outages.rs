//! Parts that fail while claims are held: the kubelet in the middle of Prepare, the whole node, and
//! the API server.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::holders::{NEXT, STUBBORN};
use crate::node::{self, CDI, DEVICES};
use crate::objects::{LISTS, claim, main_started, pod, text_of};
use crate::{SOON, say, socket, wait_for};
use holdfast::domain::{ClaimRef, DRA_DRIVER};
use holdfast::kubelet::dra::state::read_claims;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const KUBELET: &str = "/var/lib/kubelet";
/// How long the API server does not answer.
const AWAY: Duration = Duration::from_secs(120);

impl Cluster {
    fn claim_ref(&self, name: &str) -> ClaimRef {
        let claim: Value = self.api.get(&format!("{CLAIMS}/{name}")).unwrap();
        ClaimRef { uid: text_of(&claim, "uid"), namespace: "default".into(), name: name.into() }
    }
}

/// The CDI names in the kubelet's record of a claim, each once: a kubelet of Kubernetes 1.36 adds
/// those of a repeated answer, and the runtime applies each once. `None` if it has no such claim.
fn recorded(claim: &ClaimRef) -> Option<Vec<String>> {
    let claims = read_claims(Path::new(KUBELET), DRA_DRIVER).unwrap_or_default();
    let found = claims.into_iter().find(|each| each.claim == *claim)?;
    Some(found.devices.into_iter().flat_map(|device| device.cdi_devices).collect())
}

pub(crate) fn killed_kubelet(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    cluster.create_holder("killed-former", &[0], STUBBORN);
    let former = cluster.running("killed-former");
    cluster.printed(&former, 0, "holds");
    cluster.api.delete(&format!("{PODS}/killed-former"), Some(0));
    cluster.create_holder("killed-next", &[0], NEXT);
    let claim = cluster.claim_ref("killed-next");
    // The kubelet records a claim before it calls Prepare, and the devices after the answer.
    let names = wait_for("Prepare has begun", SOON, || recorded(&claim));
    assert!(names.is_empty(), "Prepare was answered while the former pod ran: {names:?}");
    assert!(!node::processes_of_pod(&text_of(&former, "uid")).is_empty(), "it waits for nothing");
    cluster.node.kill_kubelet();
    cluster.node.start_kubelet();
    let next = cluster.running("killed-next");
    let log = cluster.printed(&next, 0, "checked");
    assert!(log.contains("alone"), "two containers had the device: {log}\n{}", daemon.log());
    let names = recorded(&claim).unwrap();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(daemon.holders("killed-next").len(), 1);
    daemon.wait_until_released("killed-former");
    cluster.end("killed-next");
    daemon.wait_until_released("killed-next");
}

pub(crate) fn reboot(cluster: &mut Cluster) {
    let mut daemon = Daemon::start(cluster);
    cluster.create_holder("boots", &[0, 1], LISTS);
    let before = cluster.running("boots");
    cluster.printed(&before, 0, "done");
    let claim = cluster.claim_ref("boots");
    let names = recorded(&claim).unwrap();
    let holders = daemon.holders("boots");
    daemon.reboot(cluster);
    cluster.node.start_kubelet();
    daemon.wait_until_registered(cluster);
    let after = wait_for("the pod starts again", SOON, || {
        cluster.node.check();
        let pod = cluster.pod("boots")?;
        let is_new = main_started(&pod) != main_started(&before);
        (is_new && !pod["status"]["containerStatuses"][0]["state"]["running"].is_null())
            .then_some(pod)
    });
    let log = cluster.printed(&after, 1, "done");
    assert_eq!(log.matches("No such device or address").count(), 2, "{log}");
    assert_eq!(recorded(&claim).unwrap(), names, "other CDI names after a reboot");
    assert_eq!(daemon.holders("boots").len(), holders.len());
    let files = || fs::read_dir(CDI).unwrap().count();
    assert_eq!(files(), 1, "one file of one claim");
    cluster.published(DEVICES);
    cluster.end("boots");
    daemon.wait_until_released("boots");
    assert_eq!(files(), 0, "the file of a released claim");
}

pub(crate) fn no_api_server(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    let before = cluster.published(DEVICES);
    cluster.create_holder("stays-on", &[0], LISTS);
    let stays = cluster.running("stays-on");
    // This one ends alone, while the API server is away.
    let mut ends = pod("ends-alone", &["ends-alone"], "sleep 10");
    ends["spec"]["restartPolicy"] = "Never".into();
    cluster.api.create(CLAIMS, &claim("ends-alone", &[1]));
    cluster.api.create(PODS, &ends);
    cluster.running("ends-alone");
    let held = cluster.claim_ref("stays-on");

    cluster.plane.api_server.signal(Signal::SIGSTOP);
    let began = Instant::now();
    assert_eq!(daemon.holders("ends-alone").len(), 1, "it has ended too early");
    daemon.wait_until_released("ends-alone");
    let released = began.elapsed();
    assert!(released < AWAY, "{released:?}");
    // The kubelet starts a container again without the API server, with the devices it has.
    end_main(&text_of(&stays, "uid"));
    let log = cluster.printed(&stays, 1, "done");
    assert!(log.contains("No such device or address"), "{log}");
    // Without the claim no Prepare is answered, not even a repeated one.
    let asked = Instant::now();
    let error = socket::prepare(&held).expect_err("it was prepared without the API server");
    let answered = asked.elapsed();
    assert!(error.contains("did not return claim"), "{error}");
    assert!(answered < Duration::from_secs(45), "the kubelet does not wait for {answered:?}");
    wait_for("two minutes have passed", AWAY, || (began.elapsed() > AWAY).then_some(()));
    assert_eq!(daemon.holders("stays-on").len(), 1, "a claim was released without the API server");
    assert!(!node::processes_of_pod(&text_of(&stays, "uid")).is_empty(), "the pod was ended");
    let problems = daemon.problems();
    cluster.plane.api_server.signal(Signal::SIGCONT);

    wait_for("the API server answers", SOON, || cluster.api.is_ready().then_some(()));
    wait_for("the daemon has no problem", SOON, || daemon.problems().is_null().then_some(()));
    let specs = |slices: &[Value]| -> Vec<Value> {
        slices.iter().map(|slice| slice["spec"].clone()).collect()
    };
    assert_eq!(specs(&cluster.published(DEVICES)), specs(&before), "the slices were changed");
    cluster.end("ends-alone");
    cluster.create_holder("after", &[1], LISTS);
    cluster.running("after");
    say(format_args!(
        "two minutes without the API server: a pod that ends releases its claim after {released:.1?}, Prepare reports \
         its error after {answered:.1?} ({error}), status reported {problems}"
    ));
    for name in ["stays-on", "after"] {
        cluster.end(name);
        daemon.wait_until_released(name);
    }
}

/// Ends the first process of a pod's container.
fn end_main(uid: &str) {
    let is_main = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        name.ends_with("sleep\u{0}1000000\u{0}")
    };
    let processes = node::processes_of_pod(uid);
    // The sandbox's process has the same program; the container's one is the younger.
    let main = processes.into_iter().filter(is_main).max().unwrap();
    kill(Pid::from_raw(main), Signal::SIGKILL).unwrap();
}
