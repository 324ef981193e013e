//! `holdfast doctor`: each misconfiguration of a node in a folder is found by its code, and a
//! healthy node has no finding.

use crate::common::inside::say;
use crate::common::{Node, allocate, dial, is_root, name, offered, resource, run, until};
use holdfast::config::Roots;
use holdfast::console::exit;
use holdfast::doctor::{CHECKS, CODES, Facts, Level, Report, Target, examine, gather};
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, Entry, Grant, GrantState, GrantedDevice,
    Timestamp,
};
use holdfast::host::{Medium, medium};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use holdfast::store::Store;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

const MOUNTS: &str = "21 1 253:0 / / rw - ext4 /dev/vda rw\n";

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// The directories of this node. Facts of the process come from the test's `own` folder.
fn place(node: &Node) -> Target {
    let own = node.path("own");
    if !own.exists() {
        write(&own.join("uid_map"), "0 0 4294967295\n");
        write(&own.join("mountinfo"), MOUNTS);
    }
    let roots = Roots {
        host: node.path("host"),
        kubelet: node.path("kubelet"),
        state: node.state(),
        run: node.path("run"),
    };
    Target { roots, config: Some(node.config_file()), own }
}

fn look(place: Target) -> (Facts, Report) {
    let facts = gather(place);
    let report = examine(&facts);
    (facts, report)
}

/// The codes of the findings, without those of the test machine itself: no root, or a disk in
/// layers or in memory.
fn codes(report: &Report, place: &Target) -> BTreeSet<&'static str> {
    let on_disk = medium(place.roots.state.ancestors().find(|dir| dir.is_dir()).unwrap())
        == Some(Medium::Disk);
    let own =
        |code: &str| code == "not-root" && !is_root() || code.starts_with("state-") && !on_disk;
    report
        .findings
        .iter()
        .filter(|finding| finding.level != Level::Ok)
        .map(|finding| finding.code)
        .filter(|code| !own(code))
        .collect()
}

/// Fails unless exactly these are found.
fn finds(node: &Node, expected: &[&'static str]) {
    let place = place(node);
    let (_, report) = look(place.clone());
    let wanted: BTreeSet<&str> = expected.iter().copied().collect();
    assert_eq!(codes(&report, &place), wanted, "{report:#?}");
}

/// The same, with a daemon and a kubelet that run on the thread of the test.
async fn finds_of_living(node: &Node, expected: &[&'static str]) {
    let place = place(node);
    let (_, report) = tokio::task::spawn_blocking({
        let place = place.clone();
        move || look(place)
    })
    .await
    .unwrap();
    let wanted: BTreeSet<&str> = expected.iter().copied().collect();
    assert_eq!(codes(&report, &place), wanted, "{report:#?}");
}

/// A listening socket in place of a kubelet's.
fn listen(path: &Path) -> UnixListener {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    UnixListener::bind(path).unwrap()
}

fn set_modified(path: &Path, time: SystemTime) {
    fs::File::options().append(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn a_healthy_node_has_no_findings_and_each_injected_fault_has_one() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        offered(&kubelet, &name("example.com/gpu"), 2).await;
        finds_of_living(&node, &[]).await;
        let text = fs::read_to_string(node.config_file()).unwrap();

        set_modified(&node.config_file(), SystemTime::now() + Duration::from_secs(3600));
        // The file has another time and the same content.
        finds_of_living(&node, &[]).await;
        node.write_config(&format!("{text}# another word\n"));
        finds_of_living(&node, &["config-changed"]).await;
        node.write_config("[ledgr]\n");
        finds_of_living(&node, &["config-invalid"]).await;
        node.write_config(&text);

        let own = |file: &str, text: &str| write(&node.path("own").join(file), text);
        let sockets = node.path("kubelet/device-plugins").canonicalize().unwrap();
        own(
            "mountinfo",
            &format!(
                "{MOUNTS}30 21 0:5 / {}/kubelet.sock rw - tmpfs tmpfs rw\n",
                sockets.display()
            ),
        );
        finds_of_living(&node, &["kubelet-socket-mounted"]).await;
        own("mountinfo", "21 1 0:40 / / rw - overlay overlay rw\n");
        finds_of_living(&node, &["kubelet-dir-not-mounted"]).await;
        own(
            "mountinfo",
            &format!(
                "21 1 0:40 / / rw - overlay overlay rw\n30 21 253:0 / {} rw - ext4 /dev/vda rw\n",
                sockets.display()
            ),
        );
        finds_of_living(&node, &[]).await;
        own("uid_map", "         0     100000      65536\n");
        finds_of_living(&node, &["user-namespace"]).await;
        own("uid_map", "0 0 4294967295\n");

        let process = |pid: u32, arguments: &str| {
            let dir = node.path(&format!("host/proc/{pid}"));
            write(&dir.join("comm"), "holdfast\n");
            write(&dir.join("cmdline"), arguments);
        };
        let own_kubelet = node.path("kubelet").display().to_string();
        process(101, &format!("/usr/bin/holdfast\0run\0--kubelet-dir={own_kubelet}\0"));
        process(102, "holdfast\0run\0");
        process(103, "holdfast\0status\0");
        finds_of_living(&node, &[]).await;
        process(102, &format!("holdfast\0run\0--take-over\0--kubelet-dir\0{own_kubelet}\0"));
        finds_of_living(&node, &["two-daemons"]).await;
        fs::remove_dir_all(node.path("host/proc")).unwrap();

        let other = listen(&sockets.join("example.com_gpu.sock"));
        finds_of_living(&node, &["other-plugin-socket"]).await;
        fs::remove_file(sockets.join("example.com_gpu.sock")).unwrap();
        drop(other);

        node.remove_device("gpu", 1);
        offered(&kubelet, &name("example.com/gpu"), 1).await;
        finds_of_living(&node, &["device-unhealthy"]).await;
        app.shut_down().await;
    });
}

#[test]
fn a_wrong_kubelet_directory_is_distinguished_from_a_stopped_kubelet() {
    let node = Node::with(&[("gpu", 1)]);
    let absent = "daemon-absent";
    finds(&node, &["kubelet-dir-missing", absent]);
    let _elsewhere = listen(&node.path("host/var/lib/k0s/kubelet/device-plugins/kubelet.sock"));
    finds(&node, &["kubelet-dir-missing", absent]);
    let (_, report) = look(place(&node));
    let there = node.path("host/var/lib/k0s/kubelet");
    let todo = &report.findings[0];
    assert!(
        todo.todo.contains("--kubelet-dir") && todo.todo.contains(there.to_str().unwrap()),
        "{todo:?}"
    );
    fs::create_dir_all(node.path("kubelet/device-plugins")).unwrap();
    finds(&node, &["kubelet-dir-other", absent]);
    fs::remove_dir_all(node.path("host/var")).unwrap();
    finds(&node, &["kubelet-absent", absent]);
    let socket = node.path("kubelet/device-plugins/kubelet.sock");
    drop(listen(&socket));
    finds(&node, &["kubelet-absent", absent]);
    fs::remove_file(&socket).unwrap();
    fs::create_dir(&socket).unwrap();
    finds(&node, &["kubelet-dir-unusable", absent]);
    fs::remove_dir_all(node.path("kubelet/device-plugins")).unwrap();
    fs::write(node.path("kubelet/device-plugins"), "").unwrap();
    finds(&node, &["kubelet-dir-unusable", absent]);
}

#[test]
fn a_peer_that_accepts_but_never_answers_is_named_after_a_time_limit() {
    let node = Node::with(&[("gpu", 1)]);
    let _kubelet = listen(&node.path("kubelet/device-plugins/kubelet.sock"));
    finds(&node, &["pod-resources-unreachable", "daemon-absent"]);
    let _listing = listen(&node.path("kubelet/pod-resources/kubelet.sock"));
    let _daemon = listen(&node.path("run/control.sock"));
    finds(&node, &["pod-resources-unreachable", "daemon-hangs"]);
}

#[test]
fn a_stale_kubelet_socket_is_not_treated_as_a_kubelet() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        drop(listen(&node.path("kubelet/device-plugins/kubelet.sock")));
        let daemon = node.start_daemon();
        daemon.logged("ready").await;
        until(
            "the socket was tried",
            || node.json(&["status"]),
            |status| status["socket_left_behind"] == true,
        )
        .await;
        let text = String::from_utf8(node.output(&["status"]).stdout).unwrap();
        assert!(text.contains("; kubelet absent (socket left behind)"), "{text}");
        finds(&node, &["kubelet-absent"]);

        fs::remove_file(node.path("kubelet/device-plugins/kubelet.sock")).unwrap();
        let kubelet = node.start_kubelet().await;
        offered(&kubelet, &name("example.com/gpu"), 1).await;
        until(
            "the kubelet is there",
            || node.json(&["status"]),
            |status| status["socket_left_behind"] == false,
        )
        .await;
    });
}

/// A node without a daemon, with a kubelet that listens but never answers.
struct Quiet {
    node: Node,
    _sockets: [UnixListener; 1],
}

const QUIET: [&str; 2] = ["pod-resources-unreachable", "daemon-absent"];

impl Quiet {
    fn new() -> Quiet {
        let node = Node::with(&[("gpu", 1)]);
        let _sockets = [listen(&node.path("kubelet/device-plugins/kubelet.sock"))];
        Quiet { node, _sockets }
    }

    /// Fails unless exactly these are found, and the findings of every such node.
    fn finds(&self, expected: &[&'static str]) {
        finds(&self.node, &[&QUIET, expected].concat());
    }

    fn host(&self, rel: &str, text: &str) {
        write(&self.node.path("host").join(rel), text);
    }
}

#[test]
fn a_resource_without_devices_is_explained() {
    let quiet = Quiet::new();
    quiet.node.remove_device("gpu", 0);
    quiet.finds(&["resource-selects-nothing"]);
    quiet.node.write_config(
        "[[resource]]\nname = \"a.b/gpu\"\nclass = \"gpu\"\nselect = { driver = [\"vfio-pci\"] }\n",
    );
    fs::remove_dir_all(quiet.node.path("host")).unwrap();
    let node = SimNode::create(quiet.node.path("host")).unwrap();
    fs::create_dir_all(quiet.node.path("host/sys/kernel/iommu_groups")).unwrap();
    quiet.finds(&["resource-selects-nothing", "iommu-off"]);
    let (_, report) = look(place(&quiet.node));
    let finding =
        report.findings.iter().find(|finding| finding.code == "resource-selects-nothing").unwrap();
    assert!(
        finding.found.contains("if not for `driver`: wanted vfio-pci, found nvidia"),
        "{finding:?}"
    );
    fs::create_dir_all(quiet.node.path("host/sys/kernel/iommu_groups/7")).unwrap();
    quiet.finds(&["resource-selects-nothing"]);
    quiet.host("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
    quiet.finds(&["resource-selects-nothing", "iommu-unsafe"]);

    quiet.node.write_config("[[resource]]\nname = \"a.b/gpu\"\nclass = \"gpu\"\n");
    quiet.finds(&[]);
    node.remove_gpu_node(1).unwrap();
    quiet.finds(&["device-unhealthy"]);
    node.restore_gpu_node(1).unwrap();
    (0..GPUS).for_each(|index| node.unbind_driver(node.gpu_address(index)).unwrap());
    quiet.finds(&["driver-not-bound"]);
}

#[test]
fn a_runtime_without_cdi_is_found_where_cdi_is_used() {
    let quiet = Quiet::new();
    let directory = quiet.node.path("cdi");
    let cdi = format!("[cdi]\ndirectory = \"{}\"\n", directory.display());
    quiet.host("etc/containerd/config.toml", "version = 2\n");
    quiet.finds(&[]);
    quiet.node.write_config(&format!("{cdi}{}cdi = [\"cri\"]\n", resource("gpu")));
    quiet.finds(&["cdi-off", "cdi-directory-unread"]);
    let cri = format!(
        "[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\ncdi_spec_dirs = [\"{}\"]\n",
        directory.display()
    );
    quiet.host("etc/containerd/config.toml", &format!("version = 2\n{cri}"));
    quiet.finds(&[]);
    quiet.host(
        "etc/containerd/config.toml",
        "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\ncdi_spec_dirs = [\"/etc/cdi\"]\n",
    );
    quiet.finds(&["cdi-directory-unread"]);
    fs::remove_file(quiet.node.path("host/etc/containerd/config.toml")).unwrap();
    quiet.host("etc/crio/crio.conf", "[crio.runtime]\ncdi_spec_dirs = [\"/etc/cdi\"]\n");
    quiet.finds(&["cdi-directory-unread"]);
}

#[test]
fn a_daemon_that_should_run_or_does_not_answer_is_found() {
    let quiet = Quiet::new();
    let unit = quiet.node.path("host/etc/systemd/system/multi-user.target.wants/holdfast.service");
    fs::create_dir_all(unit.parent().unwrap()).unwrap();
    symlink("/usr/lib/systemd/system/holdfast.service", &unit).unwrap();
    finds(&quiet.node, &["pod-resources-unreachable", "daemon-not-running"]);
    let mask = quiet.node.path("host/etc/systemd/system/holdfast.service");
    symlink("/dev/null", &mask).unwrap();
    quiet.finds(&[]);
    fs::remove_file(&mask).unwrap();
    fs::remove_file(&unit).unwrap();
    // The drop-in of the system extension.
    let upholds = "usr/lib/systemd/system/multi-user.target.d/10-holdfast.conf";
    quiet.host(upholds, "[Unit]\nUpholds=holdfast.service\n");
    finds(&quiet.node, &["pod-resources-unreachable", "daemon-not-running"]);
    fs::remove_file(quiet.node.path("host").join(upholds)).unwrap();
    fs::create_dir_all(quiet.node.state()).unwrap();
    let lock = fs::File::create(quiet.node.state().join("lock")).unwrap();
    lock.try_lock().unwrap();
    quiet.finds(&[]);
    fs::write(quiet.node.path("locks"), fs::read_to_string("/proc/locks").unwrap()).unwrap();
    quiet.finds(&["two-daemons"]);
}

#[test]
fn a_label_that_selinux_would_refuse_is_found_where_it_is_enforcing() {
    let quiet = Quiet::new();
    let dir = quiet.node.path("kubelet/device-plugins");
    let label = |text: &str| {
        rustix::fs::setxattr(
            &dir,
            "security.selinux",
            text.as_bytes(),
            rustix::fs::XattrFlags::empty(),
        )
    };
    if let Err(error) = label("system_u:object_r:var_lib_t:s0\0") {
        say(format_args!(
            "SKIPPED: a_label_that_selinux_would_refuse_is_found_where_it_is_enforcing: no label can be set here: {error}"
        ));
        return;
    }
    quiet.host("sys/fs/selinux/enforce", "0\n");
    quiet.finds(&[]);
    quiet.host("sys/fs/selinux/enforce", "1\n");
    quiet.finds(&["selinux-label"]);
    label("system_u:object_r:container_file_t:s0\0").unwrap();
    quiet.finds(&[]);
}

/// A grant of the present boot, by the host of `quiet`.
fn grant(number: u64, at: u64) -> Entry {
    let device = GrantedDevice {
        id: DeviceId::new("dev:gpu0"),
        key: "dev:/dev/gpu0".into(),
        numa_nodes: vec![],
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Entry::Grant(Arc::new(Grant {
        alloc_id: AllocId::new(format!("01890a5d-ac96-774b-bcce-{number:012}")),
        resource: name("example.com/gpu"),
        devices: vec![device],
        edits: ContainerEdits {
            envs: BTreeMap::from([("TOKEN".into(), OLD_SECRET.into())]),
            ..ContainerEdits::default()
        },
        claim: None,
        boot_id: "this-boot".into(),
        kubelet: None,
        granted_at: Timestamp(at),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }))
}

fn record(node: &Node, entries: &[Entry]) {
    let (mut store, _) = Store::open(&node.state(), Durability::ProcessCrash, None).unwrap();
    store.append(entries).unwrap();
    store.checkpoint().unwrap();
    store.close().unwrap();
}

fn now() -> u64 {
    Timestamp::from_system(SystemTime::now()).0
}

#[test]
fn records_of_another_time_and_a_damaged_journal_are_found() {
    const DAY: u64 = 24 * 3600 * 1000;
    let quiet = Quiet::new();
    quiet.host("proc/sys/kernel/random/boot_id", "this-boot\n");
    record(&quiet.node, &[grant(1, now())]);
    quiet.finds(&[]);
    record(&quiet.node, &[grant(2, now() + DAY)]);
    quiet.finds(&["clock-moved-back"]);

    // No machine has been up since 1970.
    let quiet = Quiet::new();
    quiet.host("proc/sys/kernel/random/boot_id", "this-boot\n");
    record(&quiet.node, &[grant(1, 1)]);
    quiet.finds(&["clock-moved-forward"]);
    quiet.host("proc/sys/kernel/random/boot_id", "another-boot\n");
    quiet.finds(&[]);

    fs::create_dir(quiet.node.state().join("db.quarantine-1")).unwrap();
    quiet.finds(&["ledger-moved-aside"]);
    fs::remove_dir(quiet.node.state().join("db.quarantine-1")).unwrap();
    let newest = fs::read_dir(quiet.node.state().join("journal"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .max()
        .unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    bytes[40] ^= 0xff;
    fs::write(&newest, bytes).unwrap();
    quiet.finds(&["ledger-damaged"]);
}

#[test]
fn a_ledger_in_memory_is_found() {
    let quiet = Quiet::new();
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        say("SKIPPED: a_ledger_in_memory_is_found: nothing can be made in /dev/shm");
        return;
    };
    if medium(memory.path()) != Some(Medium::Memory) {
        say("SKIPPED: a_ledger_in_memory_is_found: /dev/shm is no tmpfs here");
        return;
    }
    let mut place = place(&quiet.node);
    place.roots.state = memory.path().join("state");
    let (facts, report) = look(place);
    assert_eq!(facts.state.unwrap().medium, Some(Medium::Memory));
    assert!(report.findings.iter().any(|finding| finding.code == "state-in-memory"), "{report:#?}");
}

#[test]
fn the_verb_prints_problems_first_counts_the_rest_and_ends_with_its_own_code() {
    let node = Node::with(&[("gpu", 1)]);
    let output = node.output(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(exit::FINDINGS.into()), "{text}");
    assert!(
        text.starts_with("error    kubelet-dir-missing: ")
            && text.contains(" passed")
            && !text.contains("\nok "),
        "{text}"
    );
    let all = String::from_utf8(node.output(&["doctor", "--all"]).stdout).unwrap();
    assert!(all.contains("\nok       config\n") && all.contains("not run"), "{all}");
    let output = node.output(&["doctor", "-o", "json"]);
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (document["schema"].as_u64(), output.status.code()),
        (Some(1), Some(exit::FINDINGS.into()))
    );
    let first = &document["findings"][0];
    assert_eq!(
        (first["level"].as_str(), first["code"].as_str()),
        (Some("error"), Some("kubelet-dir-missing"))
    );
    assert!(
        ["on", "found", "why", "todo"]
            .iter()
            .all(|key| first[key].as_str().is_some_and(|text| !text.is_empty())),
        "{first}"
    );
}

const SECRET: &str = "planted-in-the-environment";
const OLD_SECRET: &str = "planted-in-an-older-grant";
const ARGUMENT: &str = "planted-as-an-argument";
const NAMED: &str = "planted-behind-a-name";
const COMMENT: &str = "planted-in-a-comment";

/// The files of an archive by name, without its folder.
fn unpacked(path: &Path) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(fs::File::open(path).unwrap());
    let read = |entry: std::io::Result<tar::Entry<'_, fs::File>>| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (name, text)
    };
    archive.entries().unwrap().map(read).collect()
}

/// Runs `doctor --bundle` with this destination.
fn bundle(node: &Node, to: &Path) -> Output {
    node.output(&["doctor", "--bundle", to.to_str().unwrap()])
}

/// An archive never replaces a file, and may be written to standard output or into a directory.
fn check_destinations(node: &Node, path: &Path, files: &BTreeMap<String, String>) {
    let before = fs::read(path).unwrap();
    assert_eq!(
        bundle(node, path).status.code(),
        Some(exit::FAILURE.into()),
        "what is there is not written over"
    );
    assert_eq!(fs::read(path).unwrap(), before);
    assert_eq!(bundle(node, &node.path("bundle.tar.gz")).status.code(), Some(exit::USAGE.into()));
    let output = bundle(node, Path::new("-"));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    fs::write(node.path("streamed.tar"), output.stdout).unwrap();
    assert!(
        unpacked(&node.path("streamed.tar")).keys().eq(files.keys()),
        "standard output has the archive and nothing else"
    );
    let dir = node.path("bundles");
    fs::create_dir(&dir).unwrap();
    let named = PathBuf::from(String::from_utf8(bundle(node, &dir).stdout).unwrap().trim_end());
    assert!(
        named.starts_with(&dir) && unpacked(&named).len() == files.len(),
        "{}",
        named.display()
    );
}

#[test]
fn an_archive_has_all_that_is_needed_and_none_of_the_secrets() {
    use base64::Engine as _;
    let node = Node::with(&[("gpu", 2)]);
    let more = format!(
        "env = {{ TOKEN = \"{SECRET}\" }} # {COMMENT}\nafter_release = {{ command = [\"/bin/true\", \"{ARGUMENT}\"], timeout = \"5s\" }}\n"
    );
    node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}{more}", resource("gpu")));
    let log = node.path("host/var/log/pods/kube-system_holdfast-x_uid/holdfast/0.log");
    write(
        &log,
        &format!(
            "ready\nhook told {SECRET}, {OLD_SECRET} and {ARGUMENT}\nAuthorization: Bearer {NAMED}\nend\n"
        ),
    );
    record(&node, &[grant(1, now())]);
    let grant_more = async {
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        offered(&kubelet, &name("example.com/gpu"), 2).await;
        let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
        allocate(&mut api, &["dev:gpu1"]).await.unwrap();
        app.shut_down().await;
    };
    run(grant_more);
    let response =
        base64::engine::general_purpose::STANDARD.encode(format!("\n\x05TOKEN\x12{SECRET}"));
    let entry = format!(
        r#"{{"PodUID":"u1","ContainerName":"main","ResourceName":"example.com/gpu","DeviceIDs":{{"-1":["dev:gpu1"]}},"AllocResp":"{response}"}}"#
    );
    let checkpoint = format!(
        r#"{{"Data":{{"PodDeviceEntries":[{entry}],"RegisteredDevices":{{}}}},"Checksum":1}}"#
    );
    write(&node.path("kubelet/device-plugins/kubelet_internal_checkpoint"), &checkpoint);

    let path = node.path("bundle.tar");
    let output = bundle(&node, &path);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), path.to_str().unwrap());
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let raw = fs::read(&path).unwrap();
    for secret in [SECRET, OLD_SECRET, ARGUMENT, NAMED, COMMENT, &response] {
        assert!(
            !raw.windows(secret.len()).any(|window| window == secret.as_bytes()),
            "{secret} is in the archive"
        );
    }
    let files = unpacked(&path);
    for (file, part) in [
        ("README.txt", "left out: status.json"),
        ("doctor.json", "\"daemon-absent\""),
        ("config.json", "\"after_release\""),
        ("who.json", "dev:gpu1"),
        ("history.json", "\"grants\""),
        ("discover.json", "\"devices\""),
        ("ledger-verify.json", "\"sound\": true"),
        ("kubelet-checkpoint.json", "dev:gpu1"),
        ("mountinfo.txt", " / "),
    ] {
        assert!(
            files.get(file).is_some_and(|text| text.contains(part)),
            "{file} without {part}: {:?}",
            files.get(file)
        );
    }
    let log = &files["log.txt"];
    assert!(!log.contains("planted"), "{log}");

    check_destinations(&node, &path, &files);
}

#[test]
fn the_page_has_a_section_for_each_code_and_a_line_for_each_check() {
    let page =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/doctor.md")).unwrap();
    let sections: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let codes: BTreeSet<&str> = CODES.iter().map(|code| code.name).collect();
    assert_eq!(sections, codes);
    for code in CODES {
        let section = page.split(&format!("### {}\n", code.name)).nth(1).unwrap();
        let level = code.level.as_str();
        assert!(
            section.trim_start().starts_with(&format!("*{level}*")),
            "{} is of the level {level}",
            code.name
        );
    }
    for check in CHECKS {
        assert!(page.contains(&format!("| `{}` |", check.name)), "{} is in no line", check.name);
    }
    assert!(page.contains(&format!("`{}`", exit::FINDINGS)));
}
