//! What only NVML reports of GPUs, in the slices of the DRA driver.

use crate::common::{Daemon, Node, run, until};
use crate::dra::{NODE, stop};
use crate::nvml::{LIBRARY, LIBRARY_OF_THE_HOST, compile};
use holdfast::lab::sim::api_server::{ApiServer, Kind};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use serde_json::Value;
use std::fs;
use std::path::Path;

const MEMORY_MIB: u64 = 143_771;

/// NVIDIA's GPUs are for claims, with these further keys of their resource.
pub(crate) fn write_config(node: &Node, kubeconfig: &Path, keys: &str) {
    node.write_config(&format!(
        "[telemetry]\nlisten = \"off\"\n[cluster]\ncredentials = {:?}\n[cdi]\ndirectory = {:?}\n\
         [dra]\nenabled = true\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\n\
         select = {{ vendor = [\"10de\"] }}\napi = \"dra\"\n{keys}",
        kubeconfig.display().to_string(),
        node.path("run/cdi").display().to_string(),
    ));
}

/// The slices have the memory and the compute capability, also if nothing else is asked of NVML. A
/// start of the daemon writes no slice without them, however late NVML answers.
#[test]
fn slices_have_what_nvml_reports_and_no_start_removes_it() {
    run(async {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        let server = ApiServer::start(NODE, &[]).await.unwrap();
        let kubeconfig = server.kubeconfig(&node.path("etc"), "token").unwrap();
        write_config(&node, &kubeconfig, "");
        let script = node.path("script");
        if !compile("slices", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        let lines = (0..GPUS).map(|gpu| {
            let (address, uuid) = (hardware.gpu_address(gpu), hardware.gpu_uuid(gpu));
            format!("{address} {uuid}\nmemory {uuid} {MEMORY_MIB}\n")
        });
        fs::write(&script, lines.collect::<String>()).unwrap();

        let start = || Daemon::spawn(node.command(&["run"]).env("NODE_NAME", NODE));
        let devices = || {
            let slices = server.objects(Kind::ResourceSlice);
            let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array());
            devices.flatten().cloned().collect::<Vec<Value>>()
        };
        let mut first = start();
        let published = until("the slices", devices, |devices| devices.len() == GPUS).await;
        for device in &published {
            let memory = &device["capacity"]["memory"]["value"];
            assert_eq!(*memory, format!("{MEMORY_MIB}Mi"), "{device}");
            let capability = &device["attributes"]["cudaComputeCapability"]["version"];
            assert_eq!(*capability, "9.0.0", "{device}");
        }

        first.kill();
        let writes = || {
            let mut requests = server.requests();
            requests.retain(|it| it.contains("resourceslices") && it.starts_with('P'));
            requests
        };
        let written = writes();
        let hang = node.path("script.hang");
        fs::write(&hang, "").unwrap();
        let starts = || fs::read_to_string(node.path("script.starts")).unwrap().lines().count();
        let before = starts();
        let second = start();
        until("a call that hangs", starts, |now| *now > before).await;
        second.logged("ready").await;
        // A cordon is a reason to write. Its write is the only one, and keeps the memory.
        fs::remove_file(&hang).unwrap();
        let cordoned =
            node.output(&["device", "cordon", &hardware.gpu_uuid(0), "--reason", "test"]);
        assert!(cordoned.status.success(), "{}", String::from_utf8_lossy(&cordoned.stderr));
        let tainted = |devices: &Vec<Value>| devices.iter().any(|it| it["taints"].is_array());
        let now = until("the taint of the cordoned GPU", devices, tainted).await;
        assert!(now.iter().all(|device| device["capacity"]["memory"].is_object()), "{now:?}");
        assert_eq!(writes()[written.len()..].len(), 1, "{:?}", writes());
        stop(second).await;
    });
}
