//! A whole and its parts in one pool, on a made node: two claims never have both, and the scheduler
//! knows why one of them waits.

use crate::api::{CLAIMS, PODS, SLICES};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::hardware;
use crate::objects::{claim_of, pod};
use crate::pki::kubeconfig;
use crate::real::gpus;
use crate::{SOON, say, wait_for};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Instant;

/// The physical function of the second adapter, two of its virtual ones, and one of the first.
const PF: &str = "0000:9e:00.0";
const VFS: [&str; 2] = ["0000:9e:00.1", "0000:9e:00.2"];
const OTHER_VF: &str = "0000:1c:00.1";
/// The id of a GPU, and its number.
const GPU: (&str, usize) = ("GPU-5ca1ab1e-0000-4000-8000-000000000006", 6);
/// The major number of the nodes of its MIG instances, which no driver here has.
const CAPABILITIES: u64 = 240;
const DOMAIN: &str = "device.attributes[\"holdfast.dev\"]";
const SCRIPT: &str = "exec sleep 1000000";

fn resources(dir: &Path) -> String {
    format!(
        r#"
[device_info]
directory = "{}/device-info"
[[resource]]
name = "example.com/adapter"
class = "rdma"
select = {{ address = ["{PF}"] }}
api = "dra"
[[resource]]
name = "example.com/function"
class = "rdma"
select = {{ vendor = ["15b3"], vf = true }}
api = "dra"
[[resource]]
name = "example.com/gpu"
class = "gpu"
contract = "generic"
select = {{ vendor = ["10de"] }}
api = "dra"
"#,
        dir.display()
    )
}

/// A claim for the device of a class with this value of an attribute. It tolerates any taint, so
/// that no taint is the reason why it waits.
fn claim(name: &str, class: &str, expression: &str) -> Value {
    let exactly = json!({
        "deviceClassName": format!("{class}.holdfast.dev"),
        "selectors": [{"cel": {"expression": expression}}],
        "tolerations": [{"operator": "Exists"}],
    });
    claim_of(name, json!({"requests": [{"name": "one", "exactly": exactly}]}))
}

fn at(function: &str) -> String {
    format!("device.attributes[\"resource.kubernetes.io\"].pciBusID == \"{function}\"")
}

/// The names of the sets of counters in the slices of the driver, once there are these.
fn wait_for_sets(cluster: &Cluster, expected: &[&str]) {
    wait_for(&format!("sets of counters: {expected:?}"), SOON, || {
        let slices = cluster.api.list(SLICES);
        let sets = slices.iter().filter_map(|slice| slice["spec"]["sharedCounters"].as_array());
        let mut names: Vec<&str> =
            sets.flatten().map(|set| set["name"].as_str().unwrap()).collect();
        names.sort_unstable();
        (names == expected).then_some(())
    });
}

/// Creates a claim and a pod with it.
fn create(cluster: &Cluster, name: &str, class: &str, expression: &str) {
    cluster.api.create(CLAIMS, &claim(name, class, expression));
    cluster.api.create(PODS, &pod(name, &[name], SCRIPT));
}

/// Waits until the scheduler has found no device for a pod: its claim is not even allocated.
fn waits(cluster: &Cluster, daemon: &Daemon, name: &str) {
    cluster.unschedulable(name);
    let claim = cluster.api.get(&format!("{CLAIMS}/{name}")).unwrap();
    assert!(claim["status"]["allocation"].is_null(), "{claim}");
    assert!(daemon.holders(name).is_empty(), "{name} holds a device");
}

/// Ends one pod, and waits until another one runs.
fn follows(cluster: &mut Cluster, ends: &str, runs: &str) {
    cluster.end(ends);
    let began = Instant::now();
    cluster.running(runs);
    say(format_args!("{runs} runs {:.1?} after the end of {ends}", began.elapsed()));
}

pub(crate) fn a_whole_or_its_parts_run(cluster: &mut Cluster) {
    if cluster.lacks("DRAPartitionableDevices") {
        return;
    }
    let root = hardware::made(cluster);
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let resources = resources(&cluster.dir);
    let daemon = Daemon::launch(cluster, &root, &credentials, &resources);
    daemon.wait_until_registered(cluster);
    let adapter = PF.replace([':', '.'], "-");
    wait_for_sets(cluster, &[&adapter]);

    create(cluster, "other", "rdma", &at(OTHER_VF));
    create(cluster, "whole", "rdma", &at(PF));
    cluster.running("other");
    cluster.running("whole");
    create(cluster, "part", "rdma", &at(VFS[0]));
    waits(cluster, &daemon, "part");
    follows(cluster, "whole", "part");
    create(cluster, "second-part", "rdma", &at(VFS[1]));
    cluster.running("second-part");
    create(cluster, "next-whole", "rdma", &at(PF));
    waits(cluster, &daemon, "next-whole");
    cluster.end("part");
    daemon.wait_until_released("part");
    waits(cluster, &daemon, "next-whole");
    follows(cluster, "second-part", "next-whole");

    // A GPU is cut into instances while a claim holds it.
    let (id, number) = GPU;
    let gpu = id.to_lowercase();
    create(cluster, "gpu", "gpu", &format!("{DOMAIN}.id == \"{id}\""));
    cluster.running("gpu");
    let instances = root.join(format!("proc/driver/nvidia/capabilities/gpu{number}/mig"));
    fs::create_dir_all(instances.join("gi1/ci0")).unwrap();
    for (file, minor) in [("gi1/access", 900), ("gi1/ci0/access", 901)] {
        let driver = root.join("run/nvidia/driver/dev/nvidia-caps");
        fs::create_dir_all(&driver).unwrap();
        gpus::make_node(&driver.join(format!("nvidia-cap{minor}")), CAPABILITIES, minor);
        fs::write(instances.join(file), format!("DeviceFileMinor: {minor}\n")).unwrap();
    }
    wait_for_sets(cluster, &[&adapter, &gpu]);
    create(cluster, "instance", "gpu", &format!("{DOMAIN}.?parent.orValue(\"\") == \"{id}\""));
    waits(cluster, &daemon, "instance");
    follows(cluster, "gpu", "instance");
    wait_for_sets(cluster, &[&adapter]);
    for pod in ["other", "next-whole", "instance"] {
        cluster.end(pod);
        daemon.wait_until_released(pod);
    }
    fs::remove_dir_all(instances).unwrap();
}
