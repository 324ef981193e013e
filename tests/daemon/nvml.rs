//! Facts that only NVML has, from a small library that a test compiles in its place: names of MIG
//! instances, UUIDs of GPUs that were never used, a hanging call, and libraries that are missing or
//! incomplete.

#![cfg(feature = "nvml")]

use crate::common::inside::{has_program, say};
use crate::common::{Node, allocate, count, dial, name, offered, pause, run, soon, until};
use holdfast::domain::{ContainerEdits, NvLinks, NvmlGpuQuery, NvmlLibrary, NvmlQuery, PciAddress};
use holdfast::host::{HostRoot, NvmlAnswer, query_nvml_here};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use holdfast::lab::sim::kubelet::EventKind;
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tonic::transport::Channel;

/// The library. `SCRIPT` has a line for each of its facts: `<key of the query> <its UUID>`; for
/// each MIG instance with a profile `name <its UUID> <profile>`, and with a number
/// `index <UUID of its GPU>/<number> <its UUID>`; for
/// each link `link <UUID>/<number> <1: it is active>/<the other end>`; for two GPUs that reach each
/// other by NVLink `p2p <UUID>/<UUID>`; `mig <UUID> <1: it is in MIG mode>`; `memory <UUID> <MiB>`
/// of a GPU with the compute capability 9.0; and `lost <UUID>`.
/// While `<SCRIPT>.hang` exists, every call hangs; while `<SCRIPT>.crash` exists, each start of the
/// library and each wait crashes. A start adds the number of its process to `<SCRIPT>.starts`, and
/// an end to `<SCRIPT>.ends`.
///
/// A file `<SCRIPT>.event` with `<UUID> <type> <data> <recovery action>` is an event. A wait for
/// one writes its timeout to `<SCRIPT>.waits`. It ends early without an event while
/// `<SCRIPT>.early` exists, and hangs while `<SCRIPT>.stuck` does. `mute <UUID> -` is a GPU
/// without Xid events, and `dumb <UUID> -` one that does not return its address.
pub(crate) const LIBRARY: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static char names[64][128];
static int known = 0;
static int says(const char *word, const char *what, char *rest) {
    char line[256], key[128], name[128];
    FILE *script = fopen(SCRIPT, "r");
    int found = 0;
    while (script && !found && fgets(line, sizeof line, script)) {
        rest[0] = 0;
        found = sscanf(line, "%127s %127s %127s", key, name, rest) >= 2 && !strcmp(key, word) && !strcmp(name, what);
    }
    if (script) fclose(script);
    return found;
}
static int find(const char *by, void **device) {
    char line[256], key[128], name[128];
    FILE *script = fopen(SCRIPT, "r");
    int found = 6;
    while (script && found && fgets(line, sizeof line, script))
        if (sscanf(line, "%127s %127s", key, name) == 2 && !strcmp(key, by)) {
            char *slot = names[__atomic_fetch_add(&known, 1, __ATOMIC_SEQ_CST) % 64];
            strcpy(slot, name);
            *device = slot;
            found = 0;
        }
    if (script) fclose(script);
    return found;
}
static void note(const char *name) {
    FILE *file = fopen(name, "a");
    if (file) { fprintf(file, "%d\n", getpid()); fclose(file); }
}
static void crash(void) { if (!access(SCRIPT ".crash", F_OK)) *(volatile int *)0 = 0; }
int nvmlInit_v2(void) {
    note(SCRIPT ".starts");
    crash();
    while (!access(SCRIPT ".hang", F_OK)) usleep(1000);
    return 0;
}
int nvmlShutdown(void) {
    note(SCRIPT ".ends");
    return 0;
}
#ifndef OLD
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) { return find(address, device); }
#endif
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return find(uuid, device); }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    strncpy(uuid, device, length);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    char rest[128];
    snprintf(name, length, "NVIDIA H100 80GB HBM3%s%s", says("name", device, rest) ? " MIG " : "", rest);
    return 0;
}
struct memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory *memory) {
    char rest[128];
    if (!says("memory", device, rest)) return 3;
    memory->total = strtoull(rest, 0, 10) << 20;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    char rest[128];
    if (!says("memory", device, rest)) return 3;
    *major = 9;
    *minor = 0;
    return 0;
}
static int link_of(void *device, unsigned number, char *rest) {
    char what[192];
    if (says("lost", device, rest)) return 15;
    snprintf(what, sizeof what, "%s/%u", (char *)device, number);
    return says("link", what, rest) ? 0 : number < 18 ? 3 : 2;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned number, unsigned *active) {
    char rest[128];
    int failed = link_of(device, number, rest);
    *active = !failed && rest[0] == '1';
    return failed;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    char rest[128];
    if (says("lost", device, rest)) return 15;
    if (!says("mig", device, rest)) return 3;
    *current = rest[0] == '1';
    *pending = rest[0] != '1';
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    char rest[128];
    if (says("lost", device, rest)) return 15;
    *count = 7;
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned number, void **instance) {
    char what[192], rest[128];
    snprintf(what, sizeof what, "%s/%u", (char *)device, number);
    if (!says("index", what, rest)) return 6;
    char *slot = names[__atomic_fetch_add(&known, 1, __ATOMIC_SEQ_CST) % 64];
    strcpy(slot, rest);
    *instance = slot;
    return 0;
}
struct pci { char legacy[16]; unsigned domain, bus, device, ids, subsystem; char bus_id[32]; };
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned number, struct pci *pci) {
    char rest[128];
    int failed = link_of(device, number, rest);
    if (!failed) strncpy(pci->bus_id, rest + 2, sizeof pci->bus_id);
    return failed;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, unsigned of, unsigned *status) {
    char what[256], rest[128];
    if (says("lost", one, rest) || says("lost", other, rest)) return 15;
    snprintf(what, sizeof what, "%s/%s", (char *)one, (char *)other);
    *status = of == 2 && says("p2p", what, rest) ? 0 : 5;
    return 0;
}
#ifndef WITHOUT_EVENTS
static char registered[64][128];
static int registers = 0;
static unsigned long long action = 0;
int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    char rest[128];
    if (says("lost", device, rest)) return 15;
    *types = says("mute", device, rest) ? 16 : 8 | 2 | 1;
    return 0;
}
int nvmlEventSetCreate(void **set) { registers = 0; *set = &registers; return 0; }
int nvmlEventSetFree(void *set) { (void)set; registers = 0; return 0; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    (void)set;
    if (types != 8) return 3;
    strcpy(registered[registers++ % 64], device);
    return 0;
}
struct event { void *device; unsigned long long type, data; unsigned gi, ci; };
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout) {
    (void)set;
    FILE *waits = fopen(SCRIPT ".waits", "a");
    if (waits) { fprintf(waits, "%u\n", timeout); fclose(waits); }
    for (unsigned waited = 0; waited < timeout; waited += 2) {
        char uuid[128];
        while (!access(SCRIPT ".stuck", F_OK)) usleep(1000);
        crash();
        if (!access(SCRIPT ".early", F_OK)) { usleep(20000); return 10; }
        FILE *script = rename(SCRIPT ".event", SCRIPT ".taken") ? 0 : fopen(SCRIPT ".taken", "r");
        if (script && fscanf(script, "%127s %llu %llu %llu", uuid, &event->type, &event->data, &action) == 4) {
            fclose(script);
            event->gi = event->ci = 0xffffffff;
            for (int one = 0; one < registers; one++)
                if (!strcmp(registered[one], uuid)) { event->device = registered[one]; return 0; }
        }
        usleep(2000);
    }
    return 10;
}
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
    char line[256], key[128], name[128], rest[128];
    if (says("dumb", device, rest)) return 15;
    FILE *script = fopen(SCRIPT, "r");
    int found = 6;
    memset(pci, 0, sizeof *pci);
    while (script && found && fgets(line, sizeof line, script))
        if (sscanf(line, "%127s %127s", key, name) == 2 && !strcmp(name, device) && strchr(key, ':')) {
            snprintf(pci->bus_id, sizeof pci->bus_id, "0000%s", key);
            found = 0;
        }
    if (script) fclose(script);
    return found;
}
struct field { unsigned id, scope; long long timestamp, latency; int type, failed; unsigned long long value; };
int nvmlDeviceGetFieldValues(void *device, int count, struct field *fields) {
    (void)device;
    for (int one = 0; one < count; one++) {
        fields[one].type = 1;
        fields[one].failed = 0;
        fields[one].value = action;
    }
    return 0;
}
#endif
"#;

/// Compiles `text` to `library`, which reads `script`. Without a compiler it prints a SKIPPED line
/// and returns false.
pub(crate) fn compile(
    test: &str,
    text: &str,
    library: &Path,
    script: &Path,
    also: &[&str],
) -> bool {
    if !has_program("cc") {
        say(format_args!(
            "SKIPPED: {test}: there is no `cc` to compile a library in the place of NVML with"
        ));
        return false;
    }
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    let source = script.with_extension("c");
    fs::write(&source, text).unwrap();
    let script = format!("-DSCRIPT=\"{}\"", script.display());
    let mut cc = Command::new("cc");
    crate::common::inside::command(
        cc.args(["-shared", "-fPIC", &script, "-o"]).arg(library).args(also).arg(&source),
    );
    true
}

pub(crate) const LIBRARY_OF_THE_HOST: &str = "host/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
pub(crate) const FIRST: &str = "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f";
const SECOND: &str = "MIG-90443af0-2fe6-57fb-86fe-54186d5a6581";
/// A resource that offers MIG instances and whole GPUs under one name.
pub(crate) const WHOLES_AND_PARTS: &str = "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\ncontract = \"nvidia\"\nselect = { vendor = [\"10de\"] }\n";
/// The GPU that is split into MIG instances, and the one that shows no UUID.
pub(crate) const CUT: usize = 2;
const UNUSED: usize = 5;

pub(crate) fn write(node: &Node, rel: &str, text: &str) {
    let path = node.path("host").join(rel);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A MIG instance as the driver shows it, with its nodes.
pub(crate) fn cut(node: &Node, gi: u32) {
    let mig = format!("proc/driver/nvidia/capabilities/gpu{CUT}/mig/gi{gi}");
    for (path, minor) in [("access", 10 * gi), ("ci0/access", 10 * gi + 1)] {
        write(
            node,
            &format!("{mig}/{path}"),
            &format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\n"),
        );
        write(node, &format!("dev/nvidia-caps/nvidia-cap{minor}"), "");
    }
}

/// A node whose driver omits some facts, and the script of its library.
fn node(config: &str) -> (Node, SimNode, PathBuf) {
    let node = Node::new();
    let hardware = SimNode::create(node.path("host")).unwrap();
    cut(&node, 1);
    let address = hardware.gpu_address(UNUSED);
    let information = format!(
        "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t {UNUSED}\n"
    );
    write(&node, &format!("proc/driver/nvidia/gpus/{address}/information"), &information);
    node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{config}"));
    let script = node.path("script");
    let (cut, uuid) = (hardware.gpu_address(CUT), hardware.gpu_uuid(CUT));
    let unused = hardware.gpu_uuid(UNUSED);
    fs::write(
        &script,
        format!(
            "{cut} {uuid}\nMIG-{uuid}/1/0 {FIRST}\nMIG-{uuid}/2/0 {SECOND}\n{address} {unused}\n"
        ),
    )
    .unwrap();
    (node, hardware, script)
}

fn nvml_is_off(node: &Node) -> Option<String> {
    node.json(&["status"])["signals_off"]["nvml"].as_str().map(str::to_owned)
}

fn visible(edits: &ContainerEdits) -> &str {
    &edits.envs["NVIDIA_VISIBLE_DEVICES"]
}

#[test]
fn a_mig_instance_is_offered_by_its_name_as_soon_as_nvml_has_reported_it() {
    run(async {
        let (node, hardware, script) = node(WHOLES_AND_PARTS);
        if !compile("names", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        // At first the driver hangs: the daemon does not wait for it.
        fs::write(node.path("script.hang"), "").unwrap();
        let kubelet = node.start_kubelet().await;
        let gpu = name("nvidia.com/gpu");
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu, GPUS - 1).await;
        let refused = daemon.logged("comes from NVML only").await;
        assert!(refused.contains("gi1-ci0 is not offered"), "{refused}");

        fs::remove_file(node.path("script.hang")).unwrap();
        offered(&kubelet, &gpu, GPUS).await;
        // Created without an event: a scan of the driver's files finds it, as each poll does.
        cut(&node, 2);
        write(&node, "dev/nvidia-caps-made", "");
        offered(&kubelet, &gpu, GPUS + 1).await;
        assert_eq!(nvml_is_off(&node), None);

        let whole = hardware.gpu_uuid(CUT);
        let mut api = dial(&kubelet, &node, &gpu).await;
        // A published id stays, even if a better name becomes known later (I6).
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
        assert_eq!(names(&found), 2, "the text output has the same");
        drop(daemon);

        // Held devices stay in the list of the next daemon, but cannot be given without their
        // names.
        fs::write(node.path("script.hang"), "").unwrap();
        let registered = |kind: &EventKind| matches!(kind, EventKind::Registered { .. });
        let before = count(&kubelet, registered);
        let daemon = node.start_daemon();
        kubelet
            .wait_for(
                |view| {
                    view.events().iter().filter(|event| registered(&event.kind)).count() > before
                },
                crate::common::HANG,
            )
            .await
            .unwrap();
        offered(&kubelet, &gpu, GPUS + 1).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        let id = format!("{whole}-gi1-ci0");
        let refused = allocate(&mut api, &[&id]).await.unwrap_err();
        assert!(refused.message().contains("comes from NVML only"), "{refused}");
        fs::remove_file(node.path("script.hang")).unwrap();
        soon("the name", async {
            while allocate(&mut api, &[&id]).await.is_err() {
                pause().await;
            }
        })
        .await;
        assert_eq!(visible(&node.grants().last().unwrap().edits), FIRST);
        drop(daemon);
    });
}

/// The script's lines for the MIG instances of a GPU: number of the GPU instance, UUID, profile.
fn instances(hardware: &SimNode, all: &[(u32, &str, &str)]) -> String {
    let uuid = hardware.gpu_uuid(CUT);
    let lines = all.iter().map(|(gi, instance, profile)| {
        format!("MIG-{uuid}/{gi}/0 {instance}\nname {instance} {profile}\n")
    });
    format!("{} {uuid}\n{}", hardware.gpu_address(CUT), lines.collect::<String>())
}

/// Removes a MIG instance as `nvidia-smi mig -dci -dgi` does.
fn uncut(node: &Node, gi: u32) {
    let mig = format!("host/proc/driver/nvidia/capabilities/gpu{CUT}/mig/gi{gi}");
    fs::remove_dir_all(node.path(&mig)).unwrap();
    for minor in [10 * gi, 10 * gi + 1] {
        fs::remove_file(node.path(&format!("host/dev/nvidia-caps/nvidia-cap{minor}"))).unwrap();
    }
}

#[test]
fn under_mixed_each_profile_is_a_resource_and_a_new_partition_is_followed() {
    run(async {
        let (node, hardware, script) = node("[nvidia]\nmig_strategy = \"mixed\"\n");
        if !compile("mixed", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        let [gpu, small, large] =
            ["gpu", "mig-1g.10gb", "mig-3g.40gb.me"].map(|of| name(&format!("nvidia.com/{of}")));
        cut(&node, 2);
        let two = [(1, FIRST, "1g.10gb"), (2, SECOND, "1g.10gb")];
        fs::write(&script, instances(&hardware, &two)).unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu, GPUS - 1).await;
        offered(&kubelet, &small, 2).await;
        let mut api = dial(&kubelet, &node, &small).await;
        let held = format!("{}-gi1-ci0", hardware.gpu_uuid(CUT));
        allocate(&mut api, &[&held]).await.unwrap();
        assert_eq!(visible(&node.grants()[0].edits), FIRST);

        // The free instance is replaced by one of another profile: a new resource comes, and the
        // held instance stays in the list of its own.
        uncut(&node, 2);
        cut(&node, 3);
        let other = "MIG-2c2a6d2c-0f0b-5b9a-a7f5-0d5c0a1d9a11";
        let now = [(1, FIRST, "1g.10gb"), (3, other, "3g.40gb+me")];
        fs::write(&script, instances(&hardware, &now)).unwrap();
        write(&node, "dev/nvidia-caps-made", "");
        offered(&kubelet, &large, 1).await;
        offered(&kubelet, &small, 1).await;
        drop(daemon);

        // The next daemon knows the held instance before NVML has answered.
        fs::write(node.path("script.hang"), "").unwrap();
        let registered = |kind: &EventKind| matches!(kind, EventKind::Registered { resource, .. } if *resource == small);
        let before = count(&kubelet, registered);
        let _daemon = node.start_daemon();
        soon("the next registration", async {
            while count(&kubelet, registered) == before {
                pause().await;
            }
        })
        .await;
        offered(&kubelet, &small, 1).await;
        fs::remove_file(node.path("script.hang")).unwrap();
        offered(&kubelet, &large, 1).await;
        offered(&kubelet, &gpu, GPUS - 1).await;
    });
}

#[test]
fn under_single_a_mixture_is_refused() {
    run(async {
        let (node, hardware, script) = node("[nvidia]\nmig_strategy = \"single\"\n");
        if !compile("single", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        fs::write(&script, instances(&hardware, &[(1, FIRST, "1g.10gb")])).unwrap();
        let gpu = name("nvidia.com/gpu");
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        let mixture = format!("1 × MIG 1g.10gb, {} × whole devices", GPUS - 1);
        let refused = daemon.logged(&mixture).await;
        assert!(refused.contains("no device is offered, because `uniform` requires"), "{refused}");
        // The GPU leaves MIG mode: all are wholes.
        uncut(&node, 1);
        write(&node, "dev/nvidia-caps-made", "");
        offered(&kubelet, &gpu, GPUS).await;
    });
}

#[test]
fn without_a_strategy_mig_instances_are_not_offered() {
    run(async {
        let (node, hardware, script) = node("");
        if !compile("none", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        fs::write(&script, instances(&hardware, &[(1, FIRST, "1g.10gb")])).unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &name("nvidia.com/gpu"), GPUS - 1).await;
        let told = daemon.logged("is split into parts (mig)").await;
        assert!(told.contains("mig_strategy"), "{told}");
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
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n[nvidia]\nnvml = \"{}\"\n{resource}",
            library.display()
        ));
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
fn a_mig_instance_is_named_by_its_number_with_the_library_of_the_configured_root() {
    run(async {
        let resource = "[nvidia]\ndriver_root = \"/opt/nvidia\"\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\ncontract = \"nvidia\"\n\
            select = { part = true }\nnvidia = { device_id_strategy = \"index\", device_list_strategy = [\"envvar\", \"cdi-cri\"] }\n";
        let (node, hardware, script) = node(resource);
        cut(&node, 2);
        let uuid = hardware.gpu_uuid(CUT);
        let (first, second) =
            (format!("index {uuid}/3 {FIRST}\n"), format!("index {uuid}/0 {SECOND}\n"));
        let two = instances(&hardware, &[(1, FIRST, "1g.10gb"), (2, SECOND, "1g.10gb")]);
        fs::write(&script, format!("{two}{first}{second}")).unwrap();
        let library = node.path("host/opt/nvidia/lib64/libnvidia-ml.so.1");
        if !compile("numbers", LIBRARY, &library, &script, &[]) {
            return;
        }
        let kubelet = node.start_kubelet().await;
        let gpu = name("nvidia.com/gpu");
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu, 2).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        for gi in [1, 2] {
            allocate(&mut api, &[&format!("{uuid}-gi{gi}-ci0")]).await.unwrap();
        }
        let grants = node.grants();
        let told = |of: usize| (visible(&grants[of].edits), &*grants[of].edits.cdi_devices[0]);
        assert_eq!(told(0), ("2:3", "nvidia.com/gpu=2:3"));
        assert_eq!(told(1), ("2:0", "nvidia.com/gpu=2:0"));
    });
}

#[test]
fn missing_nvml_is_reported_once_and_only_where_it_is_needed() {
    run(async {
        let gpu = name("nvidia.com/gpu");
        for (config, why) in [
            ("", "was not found in the usual driver folders"),
            ("[nvidia]\nnvml = \"off\"\n", "it is disabled in the configuration"),
        ] {
            let (node, ..) = node(&format!("{config}{WHOLES_AND_PARTS}"));
            let kubelet = node.start_kubelet().await;
            let daemon = node.start_daemon();
            offered(&kubelet, &gpu, GPUS - 1).await;
            let line = daemon.logged("NVML is not available; the UUIDs of MIG instances").await;
            assert!(line.contains(why), "{line}");
            assert!(nvml_is_off(&node).unwrap().contains(why));
        }
        // If the driver's files have every fact, and no GPU has a neighbour, the daemon does not
        // call NVML.
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        let script = node.path("script");
        let one = format!(
            "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nselect = {{ address = [\"{}\"] }}\n",
            hardware.gpu_address(0)
        );
        let off = "[telemetry]\nlisten = \"off\"\n[nvidia]\nevents = false\n";
        node.write_config(&format!("{off}{one}"));
        if compile("no resource needs it", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            let kubelet = node.start_kubelet().await;
            let daemon = node.start_daemon();
            offered(&kubelet, &gpu, 1).await;
            soon("READY", daemon.logged("ready")).await;
            assert_eq!(nvml_is_off(&node), None);
            assert!(!node.path("script.starts").exists(), "the library was started");
        }
    });
}

/// The answer to one query.
fn answer(root: &Path, library: &NvmlLibrary, question: NvmlQuery) -> NvmlAnswer {
    query_nvml_here(&HostRoot::new(root), library, &question)
}

#[test]
fn a_library_that_crashes_ends_only_the_process_that_uses_it() {
    run(async {
        let (node, hardware, script) = node(WHOLES_AND_PARTS);
        if !compile("crashes", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        fs::write(node.path("script.crash"), "").unwrap();
        let kubelet = node.start_kubelet().await;
        let gpu = name("nvidia.com/gpu");
        let mut daemon = node.start_daemon();
        // All but the GPU that is split, whose instance has no UUID yet.
        offered(&kubelet, &gpu, GPUS - 1).await;
        let why = daemon.logged("ended the process that used it").await;
        assert!(why.contains("signal: 11 (SIGSEGV)"), "{why}");
        // The log has it a moment before the status.
        let is_shown =
            |off: &Option<String>| off.as_ref().is_some_and(|why| why.contains("SIGSEGV"));
        until("the status has the signal", || nvml_is_off(&node), is_shown).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        allocate(&mut api, &[&hardware.gpu_uuid(1)]).await.unwrap();
        // A verb reports it too, and lists the others.
        let shown = node.output(&["discover"]);
        let warned = String::from_utf8_lossy(&shown.stderr).into_owned();
        assert!(shown.status.success() && warned.contains("SIGSEGV"), "{warned}");

        // Another instance changes the question, so NVML is queried at once.
        fs::remove_file(node.path("script.crash")).unwrap();
        cut(&node, 2);
        write(&node, "dev/nvidia-caps-made", "");
        offered(&kubelet, &gpu, GPUS + 1).await;
        soon("the end of the signal's failure", async {
            while nvml_is_off(&node).is_some() {
                pause().await;
            }
        })
        .await;
        daemon.signal(Signal::SIGTERM);
        assert!(daemon.exited().await.success(), "it was alive");
    });
}

#[test]
fn an_unusable_library_is_reported_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let gpu: PciAddress = "0000:18:00.0".parse().unwrap();
    let question = NvmlQuery::from([(gpu, NvmlGpuQuery::names([(1, 0)]))]);
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
    assert!(why(ask()).contains("is incomplete"), "{:?}", ask());

    // A partial answer has all the facts that the library knows. (The library before was never
    // unloaded, and keeps its path.)
    let library = dir.path().join("another/libnvidia-ml.so.1");
    compile("partial", LIBRARY, &library, &script, &[]);
    fs::write(&script, format!("{gpu} GPU-1\nMIG-GPU-1/1/0 {FIRST}\n")).unwrap();
    let other: PciAddress = "0000:19:00.0".parse().unwrap();
    let question = NvmlQuery::from([
        (gpu, NvmlGpuQuery::names([(1, 0), (7, 0)])),
        (other, NvmlGpuQuery::names([])),
    ]);
    let partial = answer(dir.path(), &NvmlLibrary::At(library.clone()), question);
    assert_eq!(
        (
            partial.facts.uuid(gpu),
            partial.facts.instance(gpu, (1, 0)).map(|instance| instance.uuid.as_str())
        ),
        (Some("GPU-1"), Some(FIRST))
    );
    assert_eq!((partial.facts.instance(gpu, (7, 0)), partial.facts.uuid(other)), (None, None));
    assert!(why(partial).starts_with("the MIG instance 7/0 of 0000:18:00.0"));
}

/// The library's facts on GPUs at 0000:01:00.0, 0000:02:00.0 and so on, `GPU-1`, `GPU-2` and so on;
/// the last one is not queried for its links. Also the reason if a fact is missing.
fn links_of(script: &str, gpus: u8) -> Option<(Vec<Option<NvLinks>>, Option<String>)> {
    let dir = tempfile::tempdir().unwrap();
    let (library, path) = (dir.path().join("libnvidia-ml.so.1"), dir.path().join("script"));
    if !compile("links", LIBRARY, &library, &path, &[]) {
        return None;
    }
    let named: Vec<(PciAddress, String)> = (1..=gpus)
        .map(|gpu| (format!("0000:{gpu:02x}:00.0").parse().unwrap(), format!("GPU-{gpu}")))
        .collect();
    let known: String = named.iter().map(|(address, uuid)| format!("{address} {uuid}\n")).collect();
    fs::write(&path, format!("{known}{script}")).unwrap();
    let asked = |address: &PciAddress| NvmlGpuQuery {
        links: *address != named.last().unwrap().0,
        ..NvmlGpuQuery::default()
    };
    let question = named.iter().map(|(address, _)| (*address, asked(address))).collect();
    let NvmlAnswer { facts: mut told, failed, incomplete } =
        answer(dir.path(), &NvmlLibrary::At(library), question);
    assert_eq!(failed, None, "no name was asked for");
    Some((named.iter().map(|(address, _)| told.gpus.remove(address)?.links).collect(), incomplete))
}

fn to(peers: &[(u8, u32)], down: u32) -> Option<NvLinks> {
    let peers = peers
        .iter()
        .map(|(gpu, links)| (format!("0000:{gpu:02x}:00.0").parse().unwrap(), *links))
        .collect();
    Some(NvLinks { peers, down })
}

#[test]
fn bridges_are_counted_by_their_active_links_to_gpus() {
    let script = "link GPU-1/0 1/00000000:02:00.0\nlink GPU-1/1 1/00000000:02:00.0\nlink GPU-1/2 0/\n\
                  link GPU-2/0 1/00000000:01:00.0\nlink GPU-2/1 1/00000000:01:00.0\nlink GPU-2/3 1/00000006:00:00.1\n\
                  link GPU-3/5 1/00000006:00:00.0\nlink GPU-5/0 1/00000000:03:00.0\n\
                  p2p GPU-1/GPU-2\np2p GPU-2/GPU-1\np2p GPU-3/GPU-6\np2p GPU-4/GPU-1\n";
    let Some((links, failed)) = links_of(script, 6) else { return };
    assert_eq!(
        links,
        [to(&[(2, 2)], 1), to(&[(1, 2)], 0), to(&[], 0), to(&[], 0), to(&[], 0), None]
    );
    assert_eq!(failed, None, "a GPU without links is no failure");
}

#[test]
fn gpus_behind_a_switch_are_equal_and_a_lost_gpu_affects_no_other() {
    // The switch has an address, or none that is visible; each GPU has another number of links to
    // it.
    let links: String = (1..=4)
        .flat_map(|gpu| {
            (0..gpu).map(move |link| format!("link GPU-{gpu}/{link} 1/00000000:c{link}:00.0\n"))
        })
        .collect();
    let pairs: String = (1..=4)
        .flat_map(|one| (1..=4).map(move |other| format!("p2p GPU-{one}/GPU-{other}\n")))
        .collect();
    let Some((told, failed)) = links_of(&format!("{links}{pairs}"), 4) else { return };
    assert_eq!(
        (told, failed),
        (
            vec![
                to(&[(2, 1), (3, 1)], 0),
                to(&[(1, 1), (3, 1)], 0),
                to(&[(1, 1), (2, 1)], 0),
                None
            ],
            None
        )
    );

    let Some((told, failed)) = links_of(&format!("lost GPU-2\n{links}{pairs}"), 4) else { return };
    assert_eq!(told, [to(&[(3, 1)], 1), None, to(&[(1, 1)], 1), None], "and is looked for again");
    assert!(
        failed.as_ref().is_some_and(|why| why.starts_with("the links of the GPU 0000:02:00.0")),
        "{failed:?}"
    );
}

#[test]
fn the_present_mig_mode_is_reported_and_not_the_pending_one() {
    let dir = tempfile::tempdir().unwrap();
    let (library, script) = (dir.path().join("libnvidia-ml.so.1"), dir.path().join("script"));
    if !compile("modes", LIBRARY, &library, &script, &[]) {
        return;
    }
    let gpus: Vec<PciAddress> =
        (1..=4).map(|gpu| format!("0000:0{gpu}:00.0").parse().unwrap()).collect();
    let known: String = gpus.iter().map(|gpu| format!("{gpu} GPU-{gpu}\n")).collect();
    fs::write(
        &script,
        format!("{known}mig GPU-{} 1\nmig GPU-{} 0\nlost GPU-{} -\n", gpus[0], gpus[1], gpus[3]),
    )
    .unwrap();
    let question = gpus
        .iter()
        .map(|gpu| (*gpu, NvmlGpuQuery { mig_mode: true, ..NvmlGpuQuery::default() }))
        .collect();
    let NvmlAnswer { facts: told, failed, incomplete } =
        answer(dir.path(), &NvmlLibrary::At(library), question);
    let modes: Vec<Option<bool>> = gpus.iter().map(|gpu| told.gpus.get(gpu)?.mig_mode).collect();
    assert_eq!(
        modes,
        [Some(true), Some(false), Some(false), None],
        "the third knows of no such mode, the fourth is lost"
    );
    assert!(
        failed.is_none()
            && incomplete
                .is_some_and(|why| why.starts_with("the MIG mode of the GPU 0000:04:00.0"))
    );
}

#[test]
fn a_gpu_in_mig_mode_is_offered_by_its_instances_only_also_while_it_has_none() {
    run(async {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{WHOLES_AND_PARTS}"));
        let (script, gpu) = (node.path("script"), name("nvidia.com/gpu"));
        if !compile("mode", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        let (address, uuid) = (hardware.gpu_address(CUT), hardware.gpu_uuid(CUT));
        fs::write(&script, format!("{address} {uuid}\nmig {uuid} 1\nMIG-{uuid}/1/0 {FIRST}\n"))
            .unwrap();
        fs::create_dir_all(
            node.path(&format!("host/proc/driver/nvidia/capabilities/gpu{CUT}/mig")),
        )
        .unwrap();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu, GPUS - 1).await;
        let line = daemon.logged("because it is in MIG mode without an instance").await;
        assert!(line.contains(&uuid) && line.contains("nvidia-smi mig -cgi"), "{line}");

        cut(&node, 1);
        write(&node, "dev/nvidia-caps-made", "");
        offered(&kubelet, &gpu, GPUS).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        assert!(allocate(&mut api, &[&uuid]).await.is_err());
        allocate(&mut api, &[&format!("{uuid}-gi1-ci0")]).await.unwrap();
        assert_eq!(visible(&node.grants()[0].edits), FIRST);
    });
}

#[test]
fn bridged_gpus_are_preferred_under_their_ids_once_nvml_has_reported_them() {
    run(async {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        node.write_config("[telemetry]\nlisten = \"off\"\n");
        let (script, gpu) = (node.path("script"), name("nvidia.com/gpu"));
        if !compile("preferred", LIBRARY, &node.path(LIBRARY_OF_THE_HOST), &script, &[]) {
            return;
        }
        // A bridge from socket to socket; while the library hangs, it is unknown.
        let [one, other] = [1, 6];
        let known: String = (0..GPUS)
            .map(|index| format!("{} {}\n", hardware.gpu_address(index), hardware.gpu_uuid(index)))
            .collect();
        let half = |one: usize, other: usize| {
            let [from, to] = [one, other].map(|index| hardware.gpu_uuid(index));
            format!("link {from}/0 1/0000{}\np2p {from}/{to}\n", hardware.gpu_address(other))
        };
        fs::write(&script, format!("{known}{}{}", half(one, other), half(other, one))).unwrap();
        fs::write(node.path("script.hang"), "").unwrap();
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        offered(&kubelet, &gpu, GPUS).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        let all: Vec<String> = (0..GPUS).map(|index| hardware.gpu_uuid(index)).collect();
        assert_eq!(preferred(&mut api, &all, 2).await, all[..2], "behind one switch");

        fs::remove_file(node.path("script.hang")).unwrap();
        let bridged = [all[one].clone(), all[other].clone()];
        soon("the bridge", async {
            while preferred(&mut api, &all, 2).await != bridged {
                pause().await;
            }
        })
        .await;
        let dropped = |kind: &EventKind| {
            matches!(kind, EventKind::Listed { healthy, unhealthy, .. } if (*healthy, *unhealthy) != (GPUS, 0))
                && kind.resource() == Some(&gpu)
        };
        assert_eq!(count(&kubelet, dropped), 0, "no device was lost for it");
        assert_eq!(
            preferred(&mut api, &all, i32::try_from(GPUS).unwrap()).await.len(),
            GPUS,
            "all by the ids that they had"
        );
        assert_eq!(nvml_is_off(&node), None);

        let found = node.json(&["discover"]);
        let hives = found["devices"].as_array().unwrap().iter().filter_map(|device| {
            Some((device["id"].as_str()?, device["attributes"]["hive"].as_str()?))
        });
        let hive = format!("nvlink:{}", hardware.gpu_address(one));
        assert_eq!(
            hives.collect::<Vec<_>>(),
            [(bridged[0].as_str(), hive.as_str()), (bridged[1].as_str(), hive.as_str())]
        );
    });
}

/// The preferred ones of these ids.
async fn preferred(
    api: &mut DevicePluginClient<Channel>,
    available: &[String],
    size: i32,
) -> Vec<String> {
    let request = api::ContainerPreferredAllocationRequest {
        available_device_i_ds: available.to_vec(),
        must_include_device_i_ds: Vec::new(),
        allocation_size: size,
    };
    let request = api::PreferredAllocationRequest { container_requests: vec![request] };
    api.get_preferred_allocation(request)
        .await
        .unwrap()
        .into_inner()
        .container_responses
        .remove(0)
        .device_i_ds
}
