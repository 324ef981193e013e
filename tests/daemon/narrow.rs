//! A large node on a terminal of 80 columns: eight GPUs, 512 virtual functions and 100 pods. No
//! verb prints a longer line, and what is cut is marked.

use crate::common::{Daemon, Node, name, offered, run, soon, until};
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::kubelet::{Kubelet, PodSpec};
use nix::pty::{Winsize, openpty};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::process::Stdio;

const COLUMNS: u16 = 80;
const ADAPTERS: usize = 8;
const VFS: usize = 64 * ADAPTERS;
/// The small node has eight more.
const LISTED: usize = VFS + 8;
const PODS: usize = 100;
/// Verbs with a row for each grant or device.
const LISTS: [&str; 3] = ["who", "history", "discover"];

const CONFIG: &str = r#"
[telemetry]
listen = "127.0.0.1:0"

[[resource]]
name = "nvidia.com/gpu"
class = "gpu"

[[resource]]
name = "nvidia.com/mlnx_sriov_rdma"
class = "rdma"
select = { vf = true }
"#;

struct Large {
    node: Node,
    _kubelet: Kubelet,
    _daemon: Daemon,
    hardware: SimNode,
}

/// Names as controllers make them.
fn pod_name(index: usize) -> (&'static str, String) {
    match index % 4 {
        0 => ("ml-platform", format!("llama-3-70b-finetune-7f9c6d5b8-{index:05}")),
        1 => ("team-vision", format!("resnet50-worker-{index}")),
        2 => ("default", format!("job-{index}")),
        _ => ("inference", format!("triton-inference-server-gpu-pool-a-5d8f7c9b6-x{index:04}")),
    }
}

async fn large() -> Large {
    let node = Node::new();
    // Each adapter has a physical function and a port above it.
    SimNode::create(node.path("small")).unwrap();
    let small = std::fs::read_dir(node.path("small/sys/bus/pci/devices")).unwrap().count();
    let functions = small + VFS + 2 * ADAPTERS;
    let hardware = SimNode::create_large(&node.path("host"), functions, VFS).unwrap();
    node.write_config(CONFIG);
    let kubelet = node.start_kubelet().await;
    let daemon = node.start_daemon();
    let (gpu, vf) = (name("nvidia.com/gpu"), name("nvidia.com/mlnx_sriov_rdma"));
    offered(&kubelet, &gpu, 8).await;
    offered(&kubelet, &vf, LISTED).await;
    for index in 0..PODS {
        let (namespace, name) = pod_name(index);
        let (resource, count) = match index {
            0 => (&gpu, 4),
            1..=3 => (&gpu, 1),
            4 => (&vf, 64),
            5..10 => (&vf, 8),
            _ => (&vf, 1),
        };
        let mut pod = PodSpec::new(namespace, name).app("main", resource, count);
        if index == 0 {
            pod.containers[0].resources.insert(vf.clone(), 8);
        }
        soon("a pod", kubelet.add_pod(pod)).await;
    }
    hardware.remove_gpu_node(7).unwrap();
    let reason = "the fan rattles since the last maintenance; ticket 4711 is with the vendor";
    let cordoned = node.output(&["device", "cordon", &hardware.gpu_uuid(6), "--reason", reason]);
    assert!(cordoned.status.success(), "{}", String::from_utf8_lossy(&cordoned.stderr));
    offered(&kubelet, &gpu, 6).await;
    // One pod has ended some time ago.
    let uid = kubelet.pods().iter().find(|pod| pod.spec.name == "job-98").unwrap().spec.uid.clone();
    kubelet.delete_pod(&uid).unwrap();
    until(
        "the grants have their pods",
        || node.json(&["who"]),
        |who| {
            let grants = who["grants"].as_array().unwrap();
            grants.len() >= PODS && grants.iter().all(|grant| !grant["pod"]["name"].is_null())
        },
    )
    .await;
    Large { node, _kubelet: kubelet, _daemon: daemon, hardware }
}

/// What a verb prints on a terminal. Its errors and its progress are sentences of any length.
async fn on_terminal(node: &Node, verb: &[&str]) -> String {
    let size = Winsize { ws_row: 24, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).unwrap();
    let mut command = node.command(verb);
    command.env("NO_COLOR", "1").env("LC_ALL", "C.UTF-8");
    let (stdin, stderr) = (Stdio::null(), Stdio::null());
    let mut child = command.stdout(terminal.slave).stderr(stderr).stdin(stdin).spawn().unwrap();
    drop(command);
    // A terminal without a writer is an error to its reader. The kubelet of this thread runs on.
    let read = tokio::task::spawn_blocking(move || {
        let mut out = Vec::new();
        drop(File::from(terminal.master).read_to_end(&mut out));
        String::from_utf8(out).unwrap().replace("\r\n", "\n")
    });
    let out = soon("the end of a verb", read).await.unwrap();
    child.wait().unwrap();
    out
}

#[test]
fn every_verb_fits_into_80_columns() {
    run(async {
        let large = large().await;
        let gpu = large.hardware.gpu_uuid(0);
        let broken = large.hardware.gpu_uuid(7);
        let pod = format!("ml-platform/{}", pod_name(0).1);
        let verbs: &[&[&str]] = &[
            &["status"],
            &["who"],
            &["who", &gpu],
            &["who", &broken],
            &["who", "--pod", &pod],
            &["explain", &gpu],
            &["explain", &broken],
            &["explain", &pod],
            &["explain", "default/job-98"],
            &["history"],
            &["history", "--device", &gpu],
            &["history", "--pod", &pod],
            &["discover"],
            &["discover", "--all"],
            &["discover", "--slices"],
            &["topology"],
            &["topology", "--all"],
            &["device", "show"],
            &["device", "show", &broken],
            &["doctor"],
            &["doctor", "--all"],
            &["migrate", "check"],
            &["migrate", "status"],
            &["migrate", "plan", "--to", "dra"],
            &["config", "check"],
            &["config", "show"],
            &["ledger", "verify"],
        ];
        let mut wide = Vec::new();
        for verb in verbs {
            let out = on_terminal(&large.node, verb).await;
            let too_wide = |line: &&str| line.chars().count() > COLUMNS.into();
            wide.extend(out.lines().filter(too_wide).map(|line| format!("{verb:?}: {line}")));
            // Cut names still differ.
            if LISTS.contains(&verb[0]) && verb.len() == 1 {
                let rows: Vec<&str> = out.lines().skip(1).collect();
                let distinct: BTreeSet<&str> = rows.iter().copied().collect();
                assert_eq!(distinct.len(), rows.len(), "{verb:?}:\n{out}");
            }
        }
        assert!(wide.is_empty(), "{wide:#?}");
        // The columns that do not fit are named, and devices that are alike are explained once.
        let who = on_terminal(&large.node, &["who"]).await;
        assert!(who.contains("\nleft out on this width: CONTAINER, SINCE"), "{who}");
        let explained = on_terminal(&large.node, &["explain", &pod]).await;
        assert!(explained.contains("\n8 devices: 0002:"), "{explained}");
        assert!(explained.lines().count() < 30, "{explained}");
    });
}
