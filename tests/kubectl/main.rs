//! `kubectl holdfast` with many nodes: the real program, a stand-in for `kubectl proxy`, and an API
//! server that lists pods and nodes and runs commands over WebSocket. With `HOLDFAST_CLUSTER_BIN`
//! also the real kubectl.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

#[path = "../common/exec.rs"]
mod exec;
mod server;

use exec::Behaviour;
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, Entry, Grant, GrantState, GrantedDevice, PodRef,
    Timestamp,
};
use holdfast::store::Store;
use serde_json::{Value, json};
use server::Server;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;
use std::{env, fs};
use tempfile::TempDir;

/// The binary that was just built.
const HOLDFAST: &str = env!("CARGO_BIN_EXE_holdfast");

/// A workstation: a folder with a kubectl that leads to the server.
struct Workstation {
    dir: TempDir,
    server: Server,
}

impl Workstation {
    fn new(
        nodes: usize,
        behaviour: impl Fn(&str, &[String]) -> Behaviour + Send + Sync + 'static,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(&dir.path().join("api"), nodes, behaviour);
        let workstation = Workstation { dir, server };
        // The socket of the server in the place of that of `kubectl proxy`.
        workstation.install_kubectl(&format!(
            "#!/bin/sh\nprintf '%s\\n' \"$@\" > {dir}/arguments\nfor word; do case $word in \
             --unix-socket=*) socket=${{word#*=}};; esac; done\nln -s {dir}/api \"$socket\"\n\
             echo \"Starting to serve on $socket\"\nexec tail -f /dev/null\n",
            dir = workstation.path().display()
        ));
        workstation
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn install_kubectl(&self, script: &str) {
        let kubectl = self.path().join("kubectl");
        fs::write(&kubectl, script).unwrap();
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, words: &[&str]) -> Command {
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = [self.path().to_path_buf()].into_iter().chain(env::split_paths(&path));
        let mut command = Command::new(HOLDFAST);
        command
            .arg0("kubectl-holdfast")
            .args(words)
            .env("PATH", env::join_paths(folders).unwrap())
            .stdin(Stdio::null());
        command
    }

    /// Exit code, standard output, standard error.
    fn ask(&self, words: &[&str]) -> (i32, String, String) {
        let output = self.command(words).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// The document, if the exit code is the wanted one.
    fn document(&self, words: &[&str], code: i32) -> Value {
        let (exit, stdout, stderr) = self.ask(&[words, &["-o", "json"]].concat());
        assert_eq!(exit, code, "{words:?}: {stdout}{stderr}");
        serde_json::from_str(&stdout).unwrap()
    }
}

fn node(index: usize) -> String {
    format!("node-{index:03}")
}

/// Every tenth node does not answer, each in one of four ways.
fn with_nodes_away(name: &str, words: &[String]) -> Behaviour {
    let index: usize = name.strip_prefix("node-").unwrap().parse().unwrap();
    match index % 40 {
        0 => Behaviour::Hang,
        10 => Behaviour::Refuse(500, "error dialing backend: no route to host"),
        20 => Behaviour::Refuse(404, "pods \"x\" not found"),
        30 => Behaviour::Cut,
        _ if words[4] == "who" => who(index),
        _ => Behaviour::Print(1, String::new(), format!("holdfast: {words:?}\n")),
    }
}

/// The document of a node, with a field of a later version.
fn who(index: usize) -> Behaviour {
    let grant = json!({
        "alloc_id": format!("a-{index}"), "resource": "nvidia.com/gpu", "state": "bound",
        "devices": [format!("GPU-{index:03}")], "later": index,
        "pod": {"namespace": "ml", "name": format!("train-{index}"), "uid": "u"}, "container": "main",
        "granted_at": "2026-11-21T03:12:00.000Z",
    });
    Behaviour::Print(0, json!({"schema": 1, "grants": [grant]}).to_string(), String::new())
}

#[test]
fn two_hundred_nodes_answer_and_those_away_are_named_with_the_reason() {
    let workstation = Workstation::new(200, with_nodes_away);
    let started = Instant::now();
    let document = workstation.document(&["who", "--timeout", "2s"], 12);
    println!("200 nodes, 20 of them away, a deadline of 2 s: {:?}", started.elapsed());

    let grants = document["grants"].as_array().unwrap();
    let wanted: Vec<usize> = (0..200).filter(|index| index % 10 != 0).collect();
    let nodes: Vec<&str> = grants.iter().map(|grant| grant["node"].as_str().unwrap()).collect();
    assert_eq!(nodes, wanted.iter().map(|index| node(*index)).collect::<Vec<_>>());
    for (grant, index) in grants.iter().zip(&wanted) {
        assert_eq!(grant["devices"], json!([format!("GPU-{index:03}")]));
        assert_eq!(grant["later"], json!(index), "unknown fields are kept");
    }
    let failed = document["failed"].as_array().unwrap();
    assert_eq!(failed.len(), 20);
    let reason = |index: usize| {
        let is_it = |failed: &&Value| failed["node"] == json!(node(index));
        failed.iter().find(is_it).unwrap()["reason"].as_str().unwrap()
    };
    for (index, wanted) in [
        (40, "no answer within 2s"),
        (50, "error dialing backend: no route to host"),
        (60, "pods \"x\" not found"),
        (70, "the connection "),
    ] {
        assert!(reason(index).starts_with(wanted), "{index}: {}", reason(index));
    }

    let (code, stdout, stderr) = workstation.ask(&["who", "--timeout", "1s"]);
    assert_eq!(code, 12);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 181);
    let line = "node-001  ml         train-1    main       nvidia.com/gpu  bound  \
                2026-11-21T03:12:00Z  -          GPU-001";
    assert_eq!(lines[1], line);
    for wanted in [
        "holdfast: 20 of 200 nodes did not answer:\n",
        "  node-000, node-040, node-080, node-120, node-160: no answer within 1s\n",
        "  node-010, node-050, node-090, node-130, node-170: error dialing backend: no route to host\n",
    ] {
        assert!(stderr.contains(wanted), "{stderr}");
    }
}

#[test]
fn no_more_nodes_than_the_bound_are_asked_at_a_time() {
    let workstation = Workstation::new(100, |_, _| Behaviour::Hang);
    let (code, _, stderr) = workstation.ask(&["status", "--timeout", "300ms"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("holdfast: 100 of 100 nodes did not answer:\n"), "{stderr}");
    let most = workstation.server.most_at_a_time();
    assert!((2..=32).contains(&most), "{most}");
}

#[test]
fn nodes_are_selected_by_name_and_by_label() {
    let workstation =
        Workstation::new(6, |name, _| who(name.strip_prefix("node-").unwrap().parse().unwrap()));
    let nodes = |words: &[&str], code| {
        let document = workstation.document(&[&["who"], words].concat(), code);
        let names = document["nodes"].as_array().unwrap().iter();
        let names = names.map(|node| node["node"].as_str().unwrap().to_owned());
        (names.collect::<Vec<_>>(), document["failed"].clone())
    };
    assert_eq!(nodes(&["--nodes", "node-004,node-001"], 0).0, [node(1), node(4)]);
    // The server gives the label `parity` to its nodes.
    assert_eq!(nodes(&["-l", "parity=odd"], 0).0, [node(1), node(3), node(5)]);
    let (found, failed) = nodes(&["-l", "parity=odd", "--nodes", "node-001,node-002"], 12);
    assert_eq!(found, [node(1)]);
    assert_eq!(failed[0]["node"], json!("node-002"));

    // The last two nodes of the server have no daemon.
    let (code, _, stderr) = workstation.ask(&["who"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        stderr.contains("no daemon pod in namespace kube-system on bare-0, bare-1; "),
        "{stderr}"
    );
    let (code, _, stderr) = workstation.ask(&["who", "--nodes", "bare-0"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("bare-0: no daemon pod in namespace kube-system is on it"), "{stderr}");
    let (code, _, stderr) = workstation.ask(&["who", "-n", "other"]);
    assert_eq!(code, 1);
    let wanted = "no selected node has a pod with the labels app.kubernetes.io/name=holdfast in \
                  namespace other; ";
    assert!(stderr.contains(wanted), "{stderr}");
}

#[test]
fn kubectl_accepts_only_the_paths_in_use_and_gets_the_operators_options() {
    let workstation = Workstation::new(1, |_, _| who(0));
    assert_eq!(workstation.ask(&["who", "--context", "prod", "--as", "me"]).0, 0);
    let arguments = fs::read_to_string(workstation.path().join("arguments")).unwrap();
    let arguments: Vec<&str> = arguments.lines().collect();
    assert_eq!(arguments[0], "proxy");
    for wanted in
        ["--context=prod", "--as=me", "--reject-methods=^(POST|PUT|PATCH|DELETE|OPTIONS)$"]
    {
        assert!(arguments.contains(&wanted), "{arguments:?}");
    }
    assert!(arguments.iter().any(|word| word.starts_with("--accept-paths=^/api/v1/nodes$,")));
    let socket = arguments.iter().find_map(|word| word.strip_prefix("--unix-socket=")).unwrap();
    assert!(!Path::new(socket).exists(), "the folder is removed at the end");

    workstation
        .install_kubectl("#!/bin/sh\necho 'error: context \"x\" does not exist' >&2\nexit 1\n");
    let (code, stdout, stderr) = workstation.ask(&["who"]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("context \"x\" does not exist\n"), "{stderr}");
    assert!(stderr.contains("`kubectl proxy` has ended (exit status: 1)"), "{stderr}");
}

/// A ledger with one grant, held by `holder` from an hour ago, or until a minute ago.
fn ledger(dir: &Path, device: &str, holder: &str, is_released: bool) {
    let minutes = |minutes: u64| {
        Timestamp(Timestamp::from_system(std::time::SystemTime::now()).0 - minutes * 60_000)
    };
    let pod = PodRef {
        uid: format!("uid-{holder}"),
        namespace: Some("ml".into()),
        name: Some(holder.into()),
    };
    let (granted_at, bound_at) = (minutes(60), minutes(59));
    let state = if is_released {
        GrantState::Released {
            pod: Some(pod),
            container: Some("main".into()),
            bound_at: Some(bound_at),
            released_at: minutes(1),
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        }
    } else {
        GrantState::Bound { pod, container: "main".into(), bound_at }
    };
    let grant = Grant {
        alloc_id: AllocId::new("01890a5d-ac96-774b-bcce-000000000001"),
        resource: "nvidia.com/gpu".parse().unwrap(),
        devices: vec![GrantedDevice {
            id: DeviceId::new(device),
            key: "pci:0000:18:00.0/10de:2330".into(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "a boot".into(),
        kubelet: None,
        granted_at,
        version: "0.1.0".into(),
        state: GrantState::Granted,
    };
    let moved = Entry::Moved { alloc_id: grant.alloc_id.clone(), state };
    let (mut store, _) = Store::open(dir, Durability::ProcessCrash, None).unwrap();
    store.append(&[Entry::Grant(Arc::new(grant)), moved]).unwrap();
    store.checkpoint().unwrap();
    store.close().unwrap();
}

/// Three nodes whose commands are run by the real program, on ledgers without a daemon.
fn real_nodes() -> (Workstation, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    for (index, (device, holder, is_released)) in
        [("GPU-aaaa", "train", false), ("GPU-bbbb", "old", true), ("GPU-cccc", "web", false)]
            .into_iter()
            .enumerate()
    {
        let state = dir.path().join(node(index)).join("state");
        fs::create_dir_all(&state).unwrap();
        fs::create_dir_all(dir.path().join(node(index)).join("host")).unwrap();
        ledger(&state, device, holder, is_released);
    }
    let root = dir.path().to_path_buf();
    (Workstation::new(3, move |name, words| run_on(&root.join(name), words)), dir)
}

/// Runs a command of a container: the paths of the server's pods are those of a node.
fn run_on(node: &Path, words: &[String]) -> Behaviour {
    let words = words.iter().map(|word| word.replace("/node", &node.display().to_string()));
    let output = Command::new(HOLDFAST).args(words).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Behaviour::Print(output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_holder_of_a_device_is_found_among_real_ledgers() {
    let (workstation, _dir) = real_nodes();
    let (code, stdout, stderr) = workstation.ask(&["who", "GPU-aa"]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    let found: Vec<&str> = stdout.lines().skip(1).flat_map(str::split_whitespace).collect();
    assert_eq!(found[..6], ["node-000", "ml", "train", "main", "nvidia.com/gpu", "bound"]);
    assert_eq!(stdout.lines().count(), 2, "{stdout}");
    // Each node remarks that no daemon runs on it.
    assert!(stderr.contains("holdfast: node-000"), "{stderr}");

    let document = workstation.document(&["who", "GPU-bbbb"], 8);
    assert_eq!(document["last"][0]["node"], json!("node-001"));
    assert_eq!(document["last"][0]["pod"]["name"], json!("old"));

    let held = workstation.document(&["who", "GPU-bbbb", "--at", "30m"], 0);
    assert_eq!(held["grants"][0]["pod"]["name"], json!("old"));
    assert_eq!(workstation.ask(&["who", "GPU-bbbb", "--at", "2h"]).0, 8);
    let address = workstation.document(&["history", "--device", "18:00.0"], 0);
    assert_eq!(address["grants"].as_array().unwrap().len(), 3);

    let (code, _, stderr) = workstation.ask(&["who", "GPU-aaab"]);
    assert_eq!(code, 1);
    let wanted = "no node knows a device or resource of this name (nodes with an answer: 3); did you \
                  mean `GPU-aaaa`?";
    assert!(stderr.contains(wanted), "{stderr}");
    let (code, _, stderr) = workstation.ask(&["who", "--at", "yesterday"]);
    assert_eq!(code, 2, "{stderr}");
}

#[test]
fn every_other_verb_reaches_the_nodes() {
    let (workstation, _dir) = real_nodes();
    let doctor = workstation.document(&["doctor"], 10);
    let findings = doctor["findings"].as_array().unwrap();
    for index in 0..3 {
        assert!(findings.iter().any(|finding| finding["node"] == json!(node(index))), "{index}");
    }
    let topology = workstation.document(&["topology"], 0);
    let nodes: BTreeMap<&str, &Value> = topology["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| (node["node"].as_str().unwrap(), &node["parts"]))
        .collect();
    assert_eq!(nodes.len(), 3);
    // A held device that the node does not have any longer is in the picture.
    let devices = workstation.document(&["topology", "--match", "GPU-C"], 0);
    assert_eq!(devices["devices"][0]["id"], json!("GPU-cccc"));
    assert_eq!(devices["devices"].as_array().unwrap().len(), 1);
    // These need a daemon on the node.
    for words in [
        &["status"][..],
        &["devices"],
        &["cordon", "GPU-aaaa", "--reason", "fan"],
        &["uncordon", "GPU-aaaa"],
    ] {
        let (code, _, stderr) = workstation.ask(words);
        assert_eq!(code, 1, "{stderr}");
        assert!(
            stderr.contains("did not answer") && stderr.contains("no holdfast daemon"),
            "{words:?}: {stderr}"
        );
    }
}

#[test]
fn a_device_is_cordoned_on_the_node_that_has_it() {
    let workstation = Workstation::new(4, |name, words| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            [_, _, _, _, "device", "show", .., "shared"] => {
                Behaviour::Print(0, json!({"devices": [{"id": name}]}).to_string(), String::new())
            }
            // The function of a node that does not answer may have the same address.
            [_, _, _, _, "device", "show", .., "0000:3b:00.2"] if name == "node-001" => {
                Behaviour::Hang
            }
            [_, _, _, _, "device", "show", .., device @ ("GPU-a" | "0000:3b:00.2")]
                if name == "node-002" =>
            {
                Behaviour::Print(0, json!({"devices": [{"id": device}]}).to_string(), String::new())
            }
            [_, _, _, _, "device", "cordon", "--output=json", "--reason=fan", "--", device] => {
                Behaviour::Print(0, json!({"device": device}).to_string(), String::new())
            }
            _ => Behaviour::Print(
                1,
                String::new(),
                "holdfast: the ledger knows no device `x`; y\n".into(),
            ),
        }
    });
    let (code, stdout, stderr) = workstation.ask(&["cordon", "GPU-a", "--reason", "fan"]);
    assert_eq!((code, stdout.as_str()), (0, "node-002: GPU-a is cordoned\n"), "{stderr}");
    let (code, stdout, stderr) = workstation.ask(&["cordon", "shared", "--reason", "fan"]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("`shared` is a device of 4 nodes"), "{stderr}");
    let words = ["cordon", "shared", "--reason", "fan", "--nodes", "node-000,node-003"];
    let (code, stdout, _) = workstation.ask(&words);
    assert_eq!(code, 0);
    assert_eq!(stdout, "node-000: shared is cordoned\nnode-003: shared is cordoned\n");
    let words = ["cordon", "0000:3b:00.2", "--reason", "fan", "--timeout", "1s"];
    let (code, stdout, stderr) = workstation.ask(&words);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("if node-002 is meant, add `--nodes=node-002`"), "{stderr}");
}

/// With the real kubectl: `kubectl proxy` passes exec on, and kubectl finds the plugin.
#[test]
fn the_real_kubectl_leads_to_the_api_server() {
    let Some(kubectl) =
        env::var_os("HOLDFAST_CLUSTER_BIN").map(|bin| Path::new(&bin).join("kubectl"))
    else {
        // The harness would hide a text of print.
        let text = "SKIPPED: HOLDFAST_CLUSTER_BIN names no folder with kubectl";
        drop(writeln!(std::io::stderr(), "{text}"));
        return;
    };
    for (away, wanted) in [(false, 0), (true, 12)] {
        let workstation = Workstation::new(200, move |name, words| match away {
            true => with_nodes_away(name, words),
            false => who(name.strip_prefix("node-").unwrap().parse().unwrap()),
        });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": workstation.server.url()}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        });
        let kubeconfig = workstation.path().join("kubeconfig");
        fs::write(&kubeconfig, config.to_string()).unwrap();
        fs::remove_file(workstation.path().join("kubectl")).unwrap();
        std::os::unix::fs::symlink(&kubectl, workstation.path().join("kubectl")).unwrap();
        std::os::unix::fs::symlink(HOLDFAST, workstation.path().join("kubectl-holdfast")).unwrap();
        let mut command = workstation.command(&[]);
        let path =
            command.get_envs().find(|(name, _)| *name == "PATH").unwrap().1.unwrap().to_owned();
        command = Command::new(&kubectl);
        command
            .args(["holdfast", "who", "-o", "json"])
            .env("PATH", path)
            .env("KUBECONFIG", &kubeconfig);
        let started = Instant::now();
        let output = command.stdin(Stdio::null()).output().unwrap();
        println!("the real kubectl, 200 nodes, some away: {away}: {:?}", started.elapsed());
        let stderr = String::from_utf8(output.stderr).unwrap();
        println!("{stderr}");
        assert_eq!(output.status.code(), Some(wanted), "{stderr}");
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["grants"].as_array().unwrap().len(), if away { 180 } else { 200 });
    }
}

/// The commands of docs/kubectl.md are understood.
#[test]
fn the_examples_of_the_documentation_are_commands() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/kubectl.md"));
    let page = page.unwrap();
    let examples = page.lines().filter_map(|line| line.strip_prefix("kubectl holdfast "));
    let examples: Vec<&str> =
        examples.map(|line| line.split('#').next().unwrap_or_default()).collect();
    assert!(examples.len() >= 3, "{examples:?}");
    for example in examples {
        let line = ["holdfast", "kubectl"].into_iter().chain(example.split_whitespace());
        let parsed = holdfast::cli::command().try_get_matches_from(line);
        assert!(parsed.is_ok(), "{example}: {parsed:?}");
    }
}
