//! How long Prepare takes, and how much memory the daemon needs with the driver switched on.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node::DEVICES;
use crate::objects::{LISTS, text_of};
use crate::pki::kubeconfig;
use crate::real::binary::is_named;
use crate::socket::{self, Driver, Plugin};
use crate::{SOON, say, wait_for};
use holdfast::cluster::{Client, Credentials};
use holdfast::domain::{ApiCredentials, ClaimRef};
use std::path::Path;
use std::time::{Duration, Instant};

const RUNS: usize = 100;
const RESIDENT_KIB_MAX: u64 = 24 * 1024;

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

async fn timed<F: Future>(times: &mut Vec<Duration>, call: F) -> F::Output {
    let began = Instant::now();
    let output = call.await;
    times.push(began.elapsed());
    output
}

/// Allocates devices of the plugin: another one each time.
async fn allocate() -> Vec<Duration> {
    let (mut plugin, mut times) = (Plugin::connect().await, Vec::new());
    for id in plugin.ids.clone().iter().take(RUNS) {
        timed(&mut times, plugin.allocate(id)).await;
    }
    times
}

/// Reads the claim and prepares it, again and again.
async fn measure(client: &Client, claim: &ClaimRef) -> (Vec<Duration>, Vec<Duration>) {
    let mut driver = Driver::connect().await;
    let (mut reads, mut prepares) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let found = timed(&mut reads, client.claim(&claim.namespace, &claim.name)).await;
        assert!(found.unwrap().is_some(), "there is no claim");
        let prepared = timed(&mut prepares, driver.prepare(claim)).await;
        assert_eq!(prepared, Ok(1));
        driver.unprepare(claim).await;
    }
    (reads, prepares)
}

pub(crate) fn prepare(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    cluster.published(DEVICES);
    let allocate = median(&socket::wait(allocate()));
    // The kubelet is down: the pod never starts, and the calls are the test's.
    cluster.node.kill_kubelet();
    cluster.create_holder("measured", &[0], LISTS);
    let claim = wait_for("the claim is reserved", SOON, || {
        let claim = cluster.api.get(&format!("{CLAIMS}/measured"))?;
        let pod = cluster.pod("measured")?;
        let is_bound = !pod["spec"]["nodeName"].is_null();
        (is_bound && !claim["status"]["reservedFor"].is_null()).then_some(claim)
    });
    let claim = ClaimRef {
        uid: text_of(&claim, "uid"),
        namespace: "default".into(),
        name: "measured".into(),
    };
    let credentials = ApiCredentials::Kubeconfig(kubeconfig(&cluster.dir, "kubelet"));
    let credentials = Credentials::new(&credentials, Path::new("/var/lib/kubelet"), Path::new("/"));
    let (reads, prepares) = socket::wait(measure(&Client::new(credentials), &claim));
    let (get, prepare) = (median(&reads), median(&prepares));
    say(format_args!(
        "medians of {RUNS}: Prepare {prepare:.2?}; GET of the claim with the kubelet's credentials {get:.2?}, \
         durable Allocate {allocate:.2?}"
    ));
    cluster.api.delete(&format!("{PODS}/measured"), Some(0));
    drop(daemon);
    cluster.node.start_kubelet();
    if is_named() {
        assert!(prepare <= (get + allocate) * 2, "Prepare takes more than twice its parts");
    }
}

pub(crate) fn memory(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    cluster.published(DEVICES);
    let started = daemon.resident_kib();
    for _ in 0..5 {
        cluster.create_holder("small", &[0, 1], LISTS);
        cluster.running("small");
        cluster.end("small");
        daemon.wait_until_released("small");
        cluster.api.delete(&format!("{CLAIMS}/small"), None);
        wait_for("the claim is deleted", SOON, || {
            cluster.api.get(&format!("{CLAIMS}/small")).is_none().then_some(())
        });
    }
    let resident = daemon.resident_kib();
    say(format_args!(
        "with [dra] enabled: {started} KiB resident after the start, {resident} KiB after five claims"
    ));
    if is_named() {
        assert!(resident <= RESIDENT_KIB_MAX, "{resident} KiB resident: more than 24 MiB");
    }
}
