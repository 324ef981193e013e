//! What only NVML tells, from a small library in its place that a test compiles: names of MIG instances, UUIDs of GPUs that
//! nobody has used yet, a call that hangs, libraries that are missing or lack something.

#![cfg(feature = "nvml")]
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod common;

use common::inside::{has_program, say};
use common::{Node, allocate, count, dial, name, offered, run, soon};
use holdfast::domain::{ContainerEdits, NvmlLibrary, NvmlQuestion, PciAddress};
use holdfast::host::{HostRoot, NvmlAnswer, ask_nvml};
use holdfast::sim::hardware::{GPUS, SimNode};
use holdfast::sim::kubelet::EventKind;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

/// The library. `SCRIPT` has a line for each thing that it knows: `<what it is asked by> <its UUID>`. While `<SCRIPT>.hang`
/// is there no call ends; each start of it adds a byte to `<SCRIPT>.starts`.
const LIBRARY: &str = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static char names[64][128];
static int known = 0;
static int find(const char *by, void **device) {
    char line[256], key[128], name[128];
    FILE *script = fopen(SCRIPT, "r");
    int found = 6;
    while (script && found && fgets(line, sizeof line, script))
        if (sscanf(line, "%127s %127s", key, name) == 2 && !strcmp(key, by)) {
            strcpy(names[known % 64], name);
            *device = names[known++ % 64];
            found = 0;
        }
    if (script) fclose(script);
    return found;
}
int nvmlInit_v2(void) {
    FILE *starts = fopen(SCRIPT ".starts", "a");
    if (starts) { fputc('.', starts); fclose(starts); }
    while (!access(SCRIPT ".hang", F_OK)) usleep(1000);
    return 0;
}
int nvmlShutdown(void) { return 0; }
#ifndef OLD
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) { return find(address, device); }
#endif
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return find(uuid, device); }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    strncpy(uuid, device, length);
    return 0;
}
"#;

/// Compiles `text` to `library`, which obeys `script`. False, and it is said, where nothing compiles.
fn compile(test: &str, text: &str, library: &Path, script: &Path, also: &[&str]) -> bool {
    if !has_program("cc") {
        say(format_args!("SKIPPED: {test}: there is no `cc` to compile a library in the place of NVML with"));
        return false;
    }
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    let source = script.with_extension("c");
    fs::write(&source, text).unwrap();
    let script = format!("-DSCRIPT=\"{}\"", script.display());
    let mut cc = Command::new("cc");
    common::inside::command(cc.args(["-shared", "-fPIC", &script, "-o"]).arg(library).args(also).arg(&source));
    true
}

const LIBRARY_OF_THE_HOST: &str = "host/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
const FIRST: &str = "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f";
const SECOND: &str = "MIG-90443af0-2fe6-57fb-86fe-54186d5a6581";
/// The GPU that is cut into MIG instances, and the one that shows no UUID.
const CUT: usize = 2;
const UNUSED: usize = 5;

fn write(node: &Node, rel: &str, text: &str) {
    let path = node.path("host").join(rel);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A MIG instance as the driver shows it, with its nodes.
fn cut(node: &Node, gi: u32) {
    let mig = format!("proc/driver/nvidia/capabilities/gpu{CUT}/mig/gi{gi}");
    for (path, minor) in [("access", 10 * gi), ("ci0/access", 10 * gi + 1)] {
        write(node, &format!("{mig}/{path}"), &format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\n"));
        write(node, &format!("dev/nvidia-caps/nvidia-cap{minor}"), "");
    }
}

/// A node of which the driver does not tell everything, and the script of its library.
fn node(config: &str) -> (Node, SimNode, PathBuf) {
    let node = Node::new();
    let hardware = SimNode::create(node.path("host")).unwrap();
    cut(&node, 1);
    let address = hardware.gpu_address(UNUSED);
    let information = format!("GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t {UNUSED}\n");
    write(&node, &format!("proc/driver/nvidia/gpus/{address}/information"), &information);
    node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{config}"));
    let script = node.path("script");
    let (cut, uuid) = (hardware.gpu_address(CUT), hardware.gpu_uuid(CUT));
    let unused = hardware.gpu_uuid(UNUSED);
    fs::write(&script, format!("{cut} {uuid}\nMIG-{uuid}/1/0 {FIRST}\nMIG-{uuid}/2/0 {SECOND}\n{address} {unused}\n")).unwrap();
    (node, hardware, script)
}

fn nvml_is_off(node: &Node) -> Option<String> {
    node.json(&["status"])["signals_off"]["nvml"].as_str().map(str::to_owned)
}

fn visible(edits: &ContainerEdits) -> &str {
    &edits.envs["NVIDIA_VISIBLE_DEVICES"]
}

#[test]
fn a_mig_instance_is_offered_by_its_name_as_soon_as_nvml_has_told_it() {
    run(async {
        let (node, hardware, script) = node("");
        if !compile("names", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        // The driver hangs at first: nobody waits for it.
        fs::write(node.path("script.hang"), "").unwrap();
        let kubelet = node.start_kubelet().await;
        let gpu = name("nvidia.com/gpu");
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu, GPUS - 1).await;
        let refused = daemon.logged("told by NVML only").await;
        assert!(refused.contains("gi1-ci0 is not offered"), "{refused}");

        fs::remove_file(node.path("script.hang")).unwrap();
        offered(&kubelet, &gpu, GPUS).await;
        // Made without an event: a look at the driver's files finds it, as every poll is one.
        cut(&node, 2);
        write(&node, "dev/nvidia-caps-made", "");
        offered(&kubelet, &gpu, GPUS + 1).await;
        assert_eq!(nvml_is_off(&node), None);

        let whole = hardware.gpu_uuid(CUT);
        let mut api = dial(&kubelet, &node, &gpu).await;
        // An id that was published keeps, whatever better name is told later (I6).
        let unused = hardware.gpu_address(UNUSED).to_string();
        for id in [&format!("{whole}-gi1-ci0"), &format!("{whole}-gi2-ci0"), &unused] {
            allocate(&mut api, &[id]).await.unwrap();
        }
        let grants = node.grants();
        let told: Vec<&str> = grants.iter().map(|grant| visible(&grant.edits)).collect();
        assert_eq!(told, [FIRST, SECOND, &hardware.gpu_uuid(UNUSED)]);

        let found = node.json(&["discover"]);
        let names = |found: &serde_json::Value| {
            let devices = found["devices"].as_array().unwrap().iter();
            devices
                .filter_map(|device| device["attributes"]["uuid"].as_str().map(str::to_owned))
                .filter(|uuid| uuid.starts_with("MIG-"))
                .count()
        };
        assert_eq!(names(&found), 2, "a person is told the same");
        drop(daemon);

        // Held devices stay in the list of the next daemon, but cannot be given without their names.
        fs::write(node.path("script.hang"), "").unwrap();
        let registered = |kind: &EventKind| matches!(kind, EventKind::Registered { .. });
        let before = count(&kubelet, registered);
        let daemon = node.start_daemon();
        kubelet.wait_for(|view| view.events().iter().filter(|event| registered(&event.kind)).count() > before, common::HANG).await.unwrap();
        offered(&kubelet, &gpu, GPUS + 1).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        let id = format!("{whole}-gi1-ci0");
        let refused = allocate(&mut api, &[&id]).await.unwrap_err();
        assert!(refused.message().contains("told by NVML only"), "{refused}");
        fs::remove_file(node.path("script.hang")).unwrap();
        soon("the name", async { while allocate(&mut api, &[&id]).await.is_err() {} }).await;
        assert_eq!(visible(&node.grants().last().unwrap().edits), FIRST);
        drop(daemon);
    });
}

#[test]
fn a_mig_instance_has_a_cdi_name_with_its_own_uuid() {
    run(async {
        let resource = "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\ncontract = \"nvidia\"\nselect = { part = true }\nnvidia = { device_list_strategy = [\"cdi-cri\"] }\n";
        let (node, hardware, script) = node(resource);
        let library = node.path("elsewhere/libnvidia-ml.so.1");
        if !compile("cdi", LIBRARY, &library, &script, &[]) {
            return;
        }
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n[nvidia]\nnvml = \"{}\"\n{resource}", library.display()));
        let kubelet = node.start_kubelet().await;
        let gpu = name("nvidia.com/gpu");
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu, 1).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        allocate(&mut api, &[&format!("{}-gi1-ci0", hardware.gpu_uuid(CUT))]).await.unwrap();
        assert_eq!(node.grants()[0].edits.cdi_devices, [format!("nvidia.com/gpu={FIRST}")]);
    });
}

#[test]
fn what_is_missing_is_told_once_and_only_where_it_is_needed() {
    run(async {
        let gpu = name("nvidia.com/gpu");
        for (config, why) in [("", "is in none of the folders"), ("[nvidia]\nnvml = \"off\"\n", "the configuration says so")] {
            let (node, ..) = node(config);
            let kubelet = node.start_kubelet().await;
            let daemon = node.start_daemon();
            offered(&kubelet, &gpu, GPUS - 1).await;
            let line = daemon.logged("what only NVML tells is not known").await;
            assert!(line.contains(why), "{line}");
            assert!(nvml_is_off(&node).unwrap().contains(why));
        }
        // Where the driver tells everything nobody asks.
        let node = Node::new();
        SimNode::create(node.path("host")).unwrap();
        let script = node.path("script");
        node.write_config("[telemetry]\nlisten = \"off\"\n");
        if compile("nobody asks", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            let kubelet = node.start_kubelet().await;
            let daemon = node.start_daemon();
            offered(&kubelet, &gpu, GPUS).await;
            soon("READY", daemon.logged("ready")).await;
            assert_eq!(nvml_is_off(&node), None);
            assert!(!node.path("script.starts").exists(), "the library was started");
        }
    });
}

/// One call, waited for.
fn answer(root: &Path, library: &NvmlLibrary, question: NvmlQuestion) -> NvmlAnswer {
    let (tell, told) = mpsc::channel();
    ask_nvml(&HostRoot::new(root), library, question, move |answer| tell.send(answer).unwrap()).unwrap();
    told.recv_timeout(common::HANG).unwrap()
}

#[test]
fn a_library_that_lacks_something_or_is_none_is_told_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let gpu: PciAddress = "0000:18:00.0".parse().unwrap();
    let question = NvmlQuestion::from([(gpu, [(1, 0)].into())]);
    let (library, script) = (dir.path().join("libnvidia-ml.so.1"), dir.path().join("script"));
    let ask = || answer(dir.path(), &NvmlLibrary::At(library.clone()), question.clone());
    let why = |answer: NvmlAnswer| answer.failed.unwrap_or_default();
    fs::write(&library, "no library").unwrap();
    assert!(why(ask()).contains("libnvidia-ml.so.1: a libloading error"), "{:?}", ask());

    fs::remove_file(&library).unwrap();
    if !compile("old", LIBRARY, &library, &script, &["-DOLD"]) {
        return;
    }
    assert!(why(ask()).contains("nvmlDeviceGetHandleByPciBusId_v2"), "{:?}", ask());
    fs::remove_file(&library).unwrap();
    compile("foreign", "int something_else(void) { return 0; }", &library, &script, &[]);
    assert!(why(ask()).contains("nvmlInit_v2"), "{:?}", ask());
    fs::remove_file(&library).unwrap();
    compile("endless", "int nvmlInit_v2(void) { return 0; }", &library, &script, &[]);
    assert!(why(ask()).contains("is not complete"), "{:?}", ask());

    // What it does know is told, whatever else it does not. (The one before was never let go, and keeps its path.)
    let library = dir.path().join("another/libnvidia-ml.so.1");
    compile("partial", LIBRARY, &library, &script, &[]);
    fs::write(&script, format!("{gpu} GPU-1\nMIG-GPU-1/1/0 {FIRST}\n")).unwrap();
    let other: PciAddress = "0000:19:00.0".parse().unwrap();
    let question = NvmlQuestion::from([(gpu, [(1, 0), (7, 0)].into()), (other, [].into())]);
    let partial = answer(dir.path(), &NvmlLibrary::At(library.clone()), question);
    assert_eq!((partial.told.uuid(gpu), partial.told.instance(gpu, (1, 0))), (Some("GPU-1"), Some(FIRST)));
    assert_eq!((partial.told.instance(gpu, (7, 0)), partial.told.uuid(other)), (None, None));
    assert!(why(partial).starts_with("the MIG instance 7/0 of 0000:18:00.0"));
}
