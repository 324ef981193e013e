//! An operator's queries of the ledger: present holders, past holders, verification, export,
//! import. The answers are the same with and without a daemon, and no Allocate waits for them.

use crate::common::{Daemon, HANG, Node, allocate, dial, name, offered, run, until};
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, EditDevice, Entry, Grant, GrantState,
    GrantedDevice, PodRef, Timestamp,
};
use holdfast::lab::sim::hardware::SimNode;
use holdfast::store::Store;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

const HOUR: u64 = 3600 * 1000;

fn now() -> u64 {
    Timestamp::from_system(SystemTime::now()).0
}

/// A grant of one device, made `hours` hours ago.
fn grant(n: u64, resource: &str, (key, id): (&str, &str), hours: u64) -> Grant {
    let node = EditDevice {
        host: format!("/dev/node{n}"),
        container: "/dev/node".into(),
        permissions: "rw".into(),
    };
    Grant {
        alloc_id: AllocId::new(format!("01890a5d-ac96-774b-bcce-{n:012}")),
        resource: name(resource),
        devices: vec![GrantedDevice {
            id: DeviceId::new(id),
            key: key.into(),
            numa_nodes: vec![1],
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits {
            envs: BTreeMap::from([("N".into(), n.to_string())]),
            devices: vec![node],
            ..ContainerEdits::default()
        },
        claim: None,
        boot_id: "a boot".into(),
        kubelet: None,
        granted_at: Timestamp(now() - hours * HOUR),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }
}

fn pod(name: &str) -> PodRef {
    PodRef { uid: format!("uid-{name}"), namespace: Some("ml".into()), name: Some(name.into()) }
}

fn bound(grant: &Grant, name: &str) -> Entry {
    let state =
        GrantState::Bound { pod: pod(name), container: "main".into(), bound_at: grant.granted_at };
    Entry::Moved { alloc_id: grant.alloc_id.clone(), state }
}

fn released(grant: &Grant, name: Option<&str>, hours: u64) -> Entry {
    let state = GrantState::Released {
        pod: name.map(pod),
        container: name.map(|_| "main".into()),
        bound_at: name.map(|_| grant.granted_at),
        released_at: Timestamp(now() - hours * HOUR),
        other_pods: Vec::new(),
        released_by: if name.is_some() { "pod_gone" } else { "never_started" }.into(),
    };
    Entry::Moved { alloc_id: grant.alloc_id.clone(), state }
}

const A: (&str, &str) = ("pci:0000:18:00.0/10de:2330", "GPU-5a7c1f00");
const B: (&str, &str) = ("pci:0000:3b:00.0/10de:2330", "GPU-5a990000");
const C: (&str, &str) = ("pci:0000:86:00.0/10de:2330", "GPU-c0000000");

/// A node with a history: A was held by `old`, then free, and is held by `train`; B was released
/// two hours ago; C was never held.
fn node() -> Node {
    node_with(&[])
}

/// The same, with more entries in its ledger.
fn node_with(more: &[Entry]) -> Node {
    let node = Node::with(&[("gpu", 2)]);
    let [old, train, failed, web, shared] = [
        grant(1, "nvidia.com/gpu", A, 50),
        grant(2, "nvidia.com/gpu", A, 10),
        grant(3, "nvidia.com/gpu", B, 9),
        grant(4, "nvidia.com/gpu", B, 8),
        // The same id of another resource.
        grant(5, "example.com/gpu", A, 1),
    ];
    let suspect = GrantState::Suspect {
        pod: pod("shared"),
        container: "main".into(),
        bound_at: shared.granted_at,
        suspect_at: Timestamp(now() - HOUR / 2),
    };
    let mut entries: Vec<Entry> = [A, B, C]
        .iter()
        .map(|(key, id)| Entry::Named { key: (*key).into(), id: DeviceId::new(*id) })
        .collect();
    entries.extend(
        [&old, &train, &failed, &web, &shared].map(|grant| Entry::Grant(Arc::new(grant.clone()))),
    );
    entries.extend([
        bound(&train, "train"),
        released(&old, Some("old"), 20),
        released(&failed, None, 9),
        released(&web, Some("web"), 2),
    ]);
    entries.push(Entry::Moved { alloc_id: shared.alloc_id, state: suspect });
    let (mut store, _) = Store::open(&node.state(), Durability::ProcessCrash, None).unwrap();
    entries.extend_from_slice(more);
    for entries in entries.chunks(1000) {
        store.append(entries).unwrap();
        store.checkpoint().unwrap();
    }
    store.close().unwrap();
    node
}

async fn start(node: &Node) -> Daemon {
    let daemon = node.start_daemon();
    daemon.logged("ready").await;
    daemon
}

/// Exit code, standard output, standard error.
fn ask(node: &Node, verb: &[&str]) -> (i32, String, String) {
    let output = node.output(verb);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The number of each grant in a document.
fn numbers(document: &Value) -> Vec<u64> {
    let id = |grant: &Value| {
        grant["alloc_id"].as_str().unwrap().rsplit('-').next().unwrap().parse().unwrap()
    };
    document["grants"].as_array().unwrap().iter().map(id).collect()
}

/// The document; checks that the verb has the wanted exit code.
fn document(node: &Node, verb: &[&str], code: i32) -> Value {
    let (exit, stdout, stderr) = ask(node, &[verb, &["-o", "json"]].concat());
    assert_eq!(exit, code, "{verb:?}: {stdout}{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// Runs the checks on the files alone, and then with a daemon that has read them.
fn with_and_without_a_daemon(check: impl Fn(&Node)) {
    run(async {
        let node = node();
        check(&node);
        let _daemon = start(&node).await;
        let (_, _, stderr) = ask(&node, &["who", "GPU-5a7c1f00"]);
        assert_eq!(stderr, "", "the daemon was asked");
        check(&node);
    });
}

#[test]
fn a_device_is_found_by_any_of_its_names() {
    with_and_without_a_daemon(|node| {
        for device in
            ["GPU-5a7c1f00", "gpu-5A7C1F00", "5a7", "0000:18:00.0", "18:00.0", "00000000:18:00.0"]
        {
            let answer = document(node, &["who", device], 0);
            // Of both resources that have it.
            assert_eq!(numbers(&answer), [2, 5], "{device}");
            assert!(answer["last"].is_null());
        }
        assert_eq!(numbers(&document(node, &["who", "/dev/node2"], 0)), [2]);
        assert_eq!(
            numbers(&document(node, &["who", "GPU-5a7c1f00", "--resource", "nvidia.com/gpu"], 0)),
            [2]
        );
        assert_eq!(numbers(&document(node, &["who", "--pod", "train"], 0)), [2]);
        assert_eq!(numbers(&document(node, &["who", "--pod", "ml/train"], 0)), [2]);
        assert_eq!(numbers(&document(node, &["who", "--resource", "example.com/gpu"], 0)), [5]);
        let (_, table, _) = ask(node, &["who", "GPU-5a7c"]);
        assert!(
            table.starts_with("NAMESPACE") && table.contains("train") && table.lines().count() == 3,
            "{table}"
        );
    });
}

/// The answer has no node: NVIDIA's toolkit, or the runtime, adds the nodes of the name.
#[test]
fn a_gpu_that_was_answered_by_its_name_is_found_by_its_node() {
    run(async {
        for strategy in ["cdi-cri", "envvar"] {
            let node = Node::new();
            let hardware = SimNode::create(node.path("host")).unwrap();
            node.write_config(&format!(
                "[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\ncontract = \"nvidia\"\nnvidia = {{ device_list_strategy = [\"{strategy}\"] }}\n"
            ));
            let kubelet = node.start_kubelet().await;
            let mut daemon = node.start_daemon();
            let gpu = name("nvidia.com/gpu");
            offered(&kubelet, &gpu, 8).await;
            let mut api = dial(&kubelet, &node, &gpu).await;
            for index in [3, 5] {
                allocate(&mut api, &[&hardware.gpu_uuid(index)]).await.unwrap();
            }
            let holder = |path: &str| -> Vec<String> {
                let found = document(&node, &["who", path], 0);
                found["grants"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|grant| grant["devices"][0].as_str().unwrap().to_owned())
                    .collect()
            };
            assert_eq!(holder("/dev/nvidia3"), [hardware.gpu_uuid(3)], "{strategy}");
            assert_eq!(holder("/dev/nvidiactl").len(), 2, "the driver's own node comes with each");
            daemon.kill();
            assert_eq!(
                holder("/dev/nvidia5"),
                [hardware.gpu_uuid(5)],
                "{strategy}, from the files"
            );
        }
    });
}

#[test]
fn for_a_free_device_the_last_holder_is_shown_with_its_proof() {
    with_and_without_a_daemon(|node| {
        let (code, stdout, _) = ask(node, &["who", "GPU-5a99"]);
        assert_eq!(code, 8, "{stdout}");
        assert!(
            stdout.starts_with(
                "no container holds GPU-5a990000\n  last held by  ml/web, container main\n  \
                 devices       GPU-5a990000 (nvidia.com/gpu)\n"
            ),
            "{stdout}"
        );
        assert!(
            stdout.contains("\n  proof         pod_gone: the kubelet no longer listed the pod"),
            "{stdout}"
        );
        let answer = document(node, &["who", "3b:00.0"], 8);
        assert_eq!(answer["grants"].as_array().unwrap().len(), 0);
        assert_eq!(
            (answer["last"]["pod"]["name"].as_str(), answer["last"]["released_by"].as_str()),
            (Some("web"), Some("pod_gone"))
        );

        let (code, stdout, _) = ask(node, &["who", "86:00.0"]);
        let never = "no container holds GPU-c0000000\n  nor did any before, as far as the history \
                     goes back\n";
        assert_eq!((code, stdout.as_str()), (8, never));
        let (code, stdout, _) = ask(node, &["who", "--pod", "ml/old"]);
        assert_eq!(code, 8);
        assert!(
            stdout.starts_with(
                "no pod ml/old holds a device\n  last held by  ml/old, container main\n"
            ),
            "{stdout}"
        );
        assert_eq!(ask(node, &["who", "--pod", "other/train"]).0, 8);
    });
}

#[test]
fn an_unknown_or_ambiguous_device_is_an_error() {
    with_and_without_a_daemon(|node| {
        let (code, stdout, stderr) = ask(node, &["who", "GPU-ffff"]);
        assert_eq!((code, stdout.as_str()), (1, ""));
        assert!(stderr.contains("the ledger knows no device `GPU-ffff`"), "{stderr}");
        for verb in ["who", "history"] {
            let (code, stdout, stderr) = ask(node, &[verb, "--resource", "nvidia.com/gpus"]);
            assert_eq!((code, stdout.as_str()), (1, ""));
            assert!(
                stderr.contains(
                    "knows the resource `nvidia.com/gpus`; did you mean `nvidia.com/gpu`? "
                ),
                "{stderr}"
            );
            assert_eq!(ask(node, &[verb, "--pod", " "]).0, 2);
        }
        let (code, _, stderr) = ask(node, &["who", "train"]);
        assert_eq!(code, 1);
        assert!(
            stderr.contains("there is a pod of this name, see `holdfast who --pod ml/train`"),
            "{stderr}"
        );
        assert_eq!(
            ask(node, &["device", "cordon", "GPU-5a7c1f00", "--reason", " "]).0,
            2,
            "an operator's word is one"
        );
        let (code, stdout, stderr) = ask(node, &[]);
        assert_eq!(
            (
                code,
                stdout.as_str(),
                stderr.contains("Usage: holdfast") && stderr.contains("  topology ")
            ),
            (2, "", true),
            "{stderr}"
        );
        let (code, _, stderr) = ask(node, &["history", "--device", "GPU-5a"]);
        assert_eq!(code, 1);
        assert!(stderr.contains("`GPU-5a` matches `GPU-5a7c1f00`, `GPU-5a990000`"), "{stderr}");
        let (code, _, stderr) = ask(node, &["history", "--at", "lunchtime"]);
        assert_eq!(
            (code, stderr.contains("`lunchtime` is not a time; use 2026")),
            (2, true),
            "{stderr}"
        );
        assert_eq!(ask(node, &["history", "--at", "1h", "--since", "2h"]).0, 2);
    });
}

#[test]
fn the_history_shows_the_holders_at_any_time() {
    with_and_without_a_daemon(|node| {
        let history =
            |options: &[&str]| numbers(&document(node, &[&["history"], options].concat(), 0));
        assert_eq!(history(&[]), [1, 2, 3, 4, 5], "the newest last");
        assert_eq!(history(&["--device", "GPU-5a7c1f00"]), [1, 2, 5]);
        assert_eq!(history(&["--device", "18:00.0", "--at", "30h"]), [1]);
        assert_eq!(history(&["--device", "18:00.0", "--at", "15h"]), [] as [u64; 0]);
        assert_eq!(history(&["--device", "18:00.0", "--at", "5h"]), [2]);
        assert_eq!(history(&["--at", "5h"]), [2, 4]);
        assert_eq!(history(&["--since", "5h"]), [2, 4, 5]);
        assert_eq!(history(&["--since", "15h"]), [2, 3, 4, 5]);
        assert_eq!(history(&["--pod", "web"]), [4]);
        assert_eq!(history(&["--resource", "example.com/gpu"]), [5]);
        let then = Timestamp(now() - 30 * HOUR).to_string();
        let answer = document(node, &["history", "--at", &then], 0);
        assert_eq!((numbers(&answer), answer["at"].as_str()), (vec![1], Some(then.as_str())));

        let (_, table, remarks) = ask(node, &["history"]);
        let last = table.lines().last().unwrap();
        assert!(
            table.starts_with("FROM ")
                && last.contains(" suspect ")
                && last.ends_with("GPU-5a7c1f00"),
            "{table}"
        );
        assert!(
            remarks.contains("is suspect: the kubelet has not listed the pod since"),
            "{remarks}"
        );
        let (_, stdout, remarks) = ask(node, &["history", "--at", "40 days"]);
        assert!(
            stdout.starts_with("no container is known to have held a device at 20"),
            "{stdout}"
        );
        assert!(!remarks.contains("the history begins"), "no release was removed: {remarks}");
        assert!(remarks_of(node, "5h").contains("holdfast: grants held at 20"));
        // `who` answers the same question, with its own exit code.
        let answer = document(node, &["who", "18:00.0", "--at", "5h"], 0);
        assert_eq!(numbers(&answer), [2]);
        assert_eq!(ask(node, &["who", "18:00.0", "--at", "15h"]).0, 8);
        assert_eq!(ask(node, &["who", "18:00.0", "--at", "soon"]).0, 2);
        assert_eq!(
            document(node, &["history", "--at", "40 days"], 0)["remembers_from"],
            Value::Null
        );
    });
}

/// The remarks of `history` about a past time.
fn remarks_of(node: &Node, at: &str) -> String {
    ask(node, &["history", "--at", at]).2
}

#[test]
fn a_stalled_reader_blocks_neither_an_allocate_nor_the_shutdown() {
    run(async {
        // More than fits into all buffers on the way.
        let more = (100..3100).map(|n| grant(n, "nvidia.com/gpu", B, 5));
        let more = more.flat_map(|grant| {
            [released(&grant, Some("some"), 4)]
                .into_iter()
                .chain([Entry::Grant(Arc::new(grant))])
                .rev()
        });
        let node = node_with(&more.collect::<Vec<_>>());
        let kubelet = node.start_kubelet().await;
        let mut daemon = start(&node).await;
        let gpu = name("example.com/gpu");
        kubelet.wait_for(|view| view.capacity(&gpu).allocatable >= 2, HANG).await.unwrap();

        let mut reader = UnixStream::connect(node.path("run/control.sock")).unwrap();
        reader.write_all(b"GET /v1/ledger HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut first = [0; 15];
        reader.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200 OK");
        let mut api = dial(&kubelet, &node, &gpu).await;
        for _ in 0..20 {
            allocate(&mut api, &["dev:gpu0"]).await.unwrap();
        }
        // Another reader is answered meanwhile, with the new grants.
        assert_eq!(
            document(&node, &["history"], 0)["grants"].as_array().unwrap().len(),
            3000 + 5 + 20
        );
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
        drop(reader);
    });
}

#[test]
fn an_export_makes_the_same_ledger_again() {
    run(async {
        let node = node();
        let (code, exported, _) = ask(&node, &["ledger", "export"]);
        assert_eq!(code, 0);
        std::fs::write(node.path("export.json"), &exported).unwrap();
        let file = node.path("export.json").to_string_lossy().into_owned();
        let fresh = node.another_instance("fresh");
        let (code, stdout, stderr) = ask(&fresh, &["ledger", "import", &file]);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(stdout, "imported grants: 2 live, 3 released; names: 3; lists: 0\n");
        assert_eq!(ask(&fresh, &["ledger", "export"]).1, exported);
        assert_eq!(ask(&fresh, &["ledger", "verify"]).0, 0);

        // A second import changes nothing; this one is from standard input.
        let input = std::fs::File::open(&file).unwrap();
        let output =
            fresh.command(&["ledger", "import", "-", "-o", "json"]).stdin(input).output().unwrap();
        let done: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (done["live"].as_u64(), done["released"].as_u64(), done["already_there"].as_u64()),
            (Some(0), Some(0), Some(5))
        );
        assert_eq!(ask(&fresh, &["ledger", "export"]).1, exported);

        // A daemon exports the same grants, and an import is refused.
        let _daemon = start(&fresh).await;
        let (code, told, stderr) = ask(&fresh, &["ledger", "export"]);
        assert_eq!((code, stderr.as_str()), (0, ""));
        let grants = |text: &str| serde_json::from_str::<Value>(text).unwrap()["grants"].clone();
        assert_eq!(grants(&told), grants(&exported));
        let (code, stdout, stderr) = ask(&fresh, &["ledger", "import", &file]);
        assert_eq!((code, stdout.as_str()), (6, ""));
        assert!(
            stderr.contains("is in use by another process: stop the other Holdfast first"),
            "{stderr}"
        );
    });
}

#[test]
fn an_import_that_contradicts_the_ledger_changes_nothing() {
    let node = node();
    let (_, exported, _) = ask(&node, &["ledger", "export"]);
    let other = exported
        .replace("01890a5d-ac96-774b-bcce-000000000001", "01890a5d-ac96-774b-bcce-000000000009");
    std::fs::write(
        node.path("export.json"),
        other.replace("ml\",\"name\":\"train", "ml\",\"name\":\"other"),
    )
    .unwrap();
    let file = node.path("export.json").to_string_lossy().into_owned();
    let (code, stdout, stderr) = ask(&node, &["ledger", "import", &file]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("contradicts the ledger: grant 01890a5d-ac96-774b-bcce-000000000002 is bound in the ledger"), "{stderr}");
    // Nor is the grant imported that the ledger does not have.
    assert_eq!(ask(&node, &["ledger", "export"]).1, exported);
    assert_eq!(ask(&node, &["ledger", "import", "/nonexistent"]).0, 1);
}

#[test]
fn an_import_names_the_grant_that_is_too_large() {
    let node = node();
    let (_, exported, _) = ask(&node, &["ledger", "export"]);
    let container = format!(r#""container":"{}""#, "x".repeat(2_000_000));
    let file = node.path("export.json");
    std::fs::write(&file, exported.replacen(r#""container":"main""#, &container, 1)).unwrap();
    let (file, fresh) = (file.to_string_lossy().into_owned(), node.another_instance("fresh"));
    let (code, stdout, stderr) = ask(&fresh, &["ledger", "import", &file]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    let wanted = format!("cannot import `{file}`: grant 01890a5d-ac96-774b-bcce-0000000000");
    assert!(stderr.contains(&wanted) && stderr.contains("holds at most 2 MB"), "{stderr}");
}

#[test]
fn a_ledger_is_verified_with_and_without_its_daemon() {
    with_and_without_a_daemon(|node| {
        let (code, stdout, _) = ask(node, &["ledger", "verify"]);
        assert_eq!(code, 0, "{stdout}");
        assert!(
            stdout.starts_with(
                "the ledger is sound: 2 of 2 live grants are the same in both copies\n"
            ),
            "{stdout}"
        );
        let found = document(node, &["ledger", "verify"], 0);
        assert_eq!(
            (found["sound"].as_bool(), found["database"]["released"].as_u64()),
            (Some(true), Some(3)),
            "{found:#}"
        );
    });
    let node = node();
    let journal =
        std::fs::read_dir(node.state().join("journal")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&journal).unwrap();
    bytes[400] ^= 1;
    std::fs::write(&journal, bytes).unwrap();
    let before = crate::common::files_below(&node.state());
    let (code, stdout, _) = ask(&node, &["ledger", "verify"]);
    assert_eq!(code, 1);
    assert!(
        stdout.starts_with("the ledger is NOT sound")
            && stdout.contains("problem: journal segment"),
        "{stdout}"
    );
    assert!(crate::common::files_below(&node.state()) == before, "a check changes nothing");
}

#[test]
fn the_history_has_the_configured_length() {
    run(async {
        let more = (100..2600).map(|n| grant(n, "nvidia.com/gpu", B, 5));
        let more = more.flat_map(|grant| {
            [released(&grant, Some("some"), 4)]
                .into_iter()
                .chain([Entry::Grant(Arc::new(grant))])
                .rev()
        });
        let node = node_with(&more.collect::<Vec<_>>());
        let text = std::fs::read_to_string(node.config_file()).unwrap();
        node.write_config(&format!("[ledger]\nhistory_size = 1000\n{text}"));
        // The database is opened after the start. A stop shortens its history only if the database
        // is open by then.
        let begun = Instant::now();
        let left = loop {
            let mut daemon = start(&node).await;
            let history = || {
                let output = node.output(&["history", "-o", "json"]);
                serde_json::from_slice::<Value>(&output.stdout).unwrap()
            };
            until("the database is open", history, |history| history["problem"].is_null()).await;
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().await.code(), Some(0));
            let left = document(&node, &["history"], 0);
            if left["grants"].as_array().unwrap().len() <= 2 + 1000 || begun.elapsed() > 3 * HANG {
                break left;
            }
        };
        let live = left["grants"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|grant| grant["state"] != "released")
            .count();
        assert_eq!((live, left["grants"].as_array().unwrap().len()), (2, 2 + 1000));
        // Every affected answer mentions the removed history, with and without a daemon.
        let doubts = |node: &Node| {
            let begins =
                document(node, &["history"], 0)["remembers_from"].as_str().unwrap().to_owned();
            (
                begins,
                remarks_of(node, "5h").contains("the history begins at"),
                remarks_of(node, "1h").contains("the history begins at"),
            )
        };
        let alone = doubts(&node);
        assert_eq!((alone.1, alone.2), (true, false));
        let _daemon = start(&node).await;
        assert_eq!(doubts(&node), alone);
    });
}
