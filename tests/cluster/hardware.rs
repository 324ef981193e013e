//! A GPU and a network function below one PCIe root, on a made node: the scheduler finds them by
//! `matchAttribute`, and one container gets both.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::objects::{claim_of, pod};
use crate::pki::kubeconfig;
use crate::real::gpus;
use crate::real::sandbox::output;
use crate::{SOON, say, wait_for};
use holdfast::lab::sim::hardware::GPUS;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

/// A function of the second adapter. The first GPUs in the slice are below the other root, so
/// without the constraint the scheduler would take one of those.
const FUNCTION: &str = "0000:9e:00.2";
/// The number of its node: five for each adapter, the second virtual function of the second one.
const VERBS_NODE: &str = "7";
/// The RDMA verbs' major number (`drivers/infiniband/core/uverbs_main.c`).
const VERBS: u64 = 231;
const SCRIPT: &str = "env; ls /dev/nvidia* /dev/infiniband/*; echo done; exec sleep 1000000";

/// The configuration. The files of Multus are not written outside the directory of the run.
fn resources(dir: &Path) -> String {
    format!(
        r#"
[device_info]
directory = "{}/device-info"
[[resource]]
name = "nvidia.com/gpu"
class = "gpu"
select = {{ vendor = ["10de"] }}
api = "dra"
[[resource]]
name = "example.com/verbs"
class = "rdma"
contract = "sriov"
select = {{ vendor = ["15b3"], vf = true }}
api = "dra"
"#,
        dir.display()
    )
}

/// Makes the node below `root`, and its nodes where the runtime finds them.
fn make(root: &Path) {
    gpus::make(root);
    let version = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}\n", gpus::RELEASE);
    fs::write(root.join("proc/driver/nvidia/version"), version).unwrap();
    let nodes = root.join("dev/infiniband");
    for (minor, entry) in (192..).zip(fs::read_dir(&nodes).unwrap().collect::<Vec<_>>()) {
        let path = entry.unwrap().path();
        fs::remove_file(&path).unwrap();
        gpus::make_node(&path, VERBS, minor);
    }
    // Released claims need a proof: the cgroups of the pods.
    for (from, to) in [
        (nodes, Path::new("/dev/infiniband").to_owned()),
        ("/sys/fs/cgroup".into(), root.join("sys/fs/cgroup")),
    ] {
        fs::create_dir_all(&to).unwrap();
        output(Command::new("mount").arg("--rbind").arg(from).arg(to));
    }
    // Without its node, the resource of the device plugin would be empty.
    gpus::make_node(&root.join("dev/counted"), 240, 4);
}

/// The root of the made node, which the first test with it makes.
pub(crate) fn made(cluster: &Cluster) -> PathBuf {
    static MADE: Once = Once::new();

    let root = cluster.dir.join("host");
    MADE.call_once(|| make(&root));
    root
}

/// Starts the daemon on the made node.
pub(crate) fn daemon(cluster: &mut Cluster) -> Daemon {
    let root = made(cluster);
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let resources = resources(&cluster.dir);
    let daemon = Daemon::launch(cluster, &root, &credentials, &resources);
    daemon.wait_until_registered(cluster);
    wait_for("GPUs and functions are published", SOON, || {
        let has_function = cluster.device("resource.kubernetes.io/pciBusID", FUNCTION).is_some();
        let gpu = format!("GPU-5ca1ab1e-0000-4000-8000-{:012x}", GPUS - 1);
        (has_function && cluster.device("id", &gpu).is_some()).then_some(())
    });
    daemon
}

pub(crate) fn the_same_root(cluster: &mut Cluster) {
    let daemon = daemon(cluster);
    let bus = "device.attributes[\"resource.kubernetes.io\"].pciBusID";
    let function = json!({"cel": {"expression": format!("{bus} == \"{FUNCTION}\"")}});
    let devices = json!({
        "requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "gpu.holdfast.dev"}},
            {"name": "nic", "exactly": {
                "deviceClassName": "rdma.holdfast.dev",
                "selectors": [function],
            }},
        ],
        "constraints": [{
            "requests": ["gpu", "nic"],
            "matchAttribute": "resource.kubernetes.io/pcieRoot",
        }],
    });
    cluster.api.create(CLAIMS, &claim_of("same-root", devices));
    cluster.api.create(PODS, &pod("same-root", &["same-root"], SCRIPT));
    let pod = cluster.running("same-root");
    let log = cluster.printed(&pod, 0, "done");
    let gpus: Vec<usize> =
        (0..GPUS).filter(|gpu| log.contains(&format!("/dev/nvidia{gpu}\n"))).collect();
    assert!(matches!(gpus[..], [gpu] if gpu >= GPUS / 2), "{gpus:?}: {log}");
    let verbs: Vec<&str> = log
        .lines()
        .filter_map(|line| Some(line.split_once(" /dev/infiniband/uverbs")?.1))
        .collect();
    assert_eq!(verbs, [VERBS_NODE], "{log}");
    assert!(log.contains("PCIDEVICE_EXAMPLE_COM_VERBS_0000_9E_00_2=0000:9e:00.2\n"), "{log}");
    assert!(log.contains("NVIDIA_VISIBLE_DEVICES=void\n"), "{log}");
    say(format_args!("a pod gets GPU {} with {FUNCTION}, below the same root", gpus[0]));
    cluster.end("same-root");
    daemon.wait_until_released("same-root");
}
