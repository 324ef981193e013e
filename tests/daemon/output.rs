//! The output of the verbs. Devices, a cordon's reason, files, arguments and values of the
//! configuration may contain line breaks, escape sequences and characters that change the text's
//! direction. No verb, log, metric, page or answer to the kubelet shows them raw, and JSON keeps
//! them exactly. Output that could not be written completely is an error.

use crate::common::{Daemon, HANG, Node, allocate, dial, http_get, name, offered, run};
use holdfast::domain::is_unprintable;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::process::{Output, Stdio};
use tokio::process::Command;

/// Characters that act on a terminal, one of each kind.
const HOSTILE: &str = "\u{1b}[2J\u{1b}]0;own\u{7}\r\n2026-01-01T00:00:00Z ERROR forged\u{85}\u{9b}31m\u{2028}\u{202e}\u{2066}\u{feff}\u{7f}";

/// Runs a verb while the kubelet of this thread runs. All of its output must be printable.
async fn printable(node: &Node, verb: &[&str]) -> (String, String) {
    // `doctor --bundle` creates a file with the given name.
    let Output { stdout, stderr, .. } =
        Command::from(node.command(verb)).current_dir(node.path("")).output().await.unwrap();
    let said = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    for text in [&said.0, &said.1] {
        let found = text.chars().find(|c| is_unprintable(*c) && *c != '\n');
        assert!(
            found.is_none() && !text.lines().any(|line| line.starts_with("2026-01-01")),
            "{verb:?} prints {found:?}: {text:?}"
        );
    }
    said
}

/// The same for a verb that prints a JSON document.
async fn json_document(node: &Node, verb: &[&str]) -> serde_json::Value {
    let (document, _) = printable(node, &[verb, &["-o", "json"]].concat()).await;
    serde_json::from_str(&document).unwrap_or_else(|error| panic!("{verb:?}: {error}: {document}"))
}

/// A node with a device of a hostile name, one whose name is not valid text, and a usual one.
fn node() -> Node {
    let node = Node::with(&[("sensor", 1)]);
    node.write_config(
        &std::fs::read_to_string(node.config_file()).unwrap().replace("\"off\"", "\"127.0.0.1:0\""),
    );
    std::fs::write(node.path(&format!("host/dev/sensor{HOSTILE}")), "").unwrap();
    let no_text = OsString::from_vec(b"sensor\x1b[2J\xff\xfe".to_vec());
    std::fs::write(node.path("host/dev").join(no_text), "").unwrap();
    node
}

/// Every verb that shows a name or an argument.
fn verbs<'a>(id: &'a str, unknown: &'a str, config: &'a str) -> Vec<Vec<&'a str>> {
    vec![
        vec!["status"],
        vec!["who"],
        vec!["who", id],
        vec!["who", unknown],
        vec!["who", "--pod", HOSTILE],
        vec!["explain", id],
        vec!["explain", unknown],
        vec!["history", "--device", id],
        vec!["history", "--at", HOSTILE],
        vec!["discover", "--all"],
        vec!["discover", "--slices"],
        vec!["discover", "--slices", "--node-name", HOSTILE],
        vec!["migrate", "check"],
        vec!["migrate", "check", "--keep", unknown],
        vec!["migrate", "status"],
        vec!["migrate", "plan", "--to", "dra"],
        vec!["migrate", "plan", "--to", "dra", unknown],
        vec!["topology", "--all"],
        vec!["topology", "-o", "svg"],
        vec!["topology", "--svg", unknown, "--host-root", "/usr"],
        vec!["device", "show"],
        vec!["device", "show", "dev:sensor0"],
        vec!["device", "show", unknown],
        vec!["device", "uncordon", unknown],
        vec!["doctor", "--all"],
        vec!["doctor", "--bundle", unknown],
        vec!["ledger", "verify"],
        vec!["ledger", "import", unknown],
        vec!["config", "show", "--node", HOSTILE],
        vec!["config", "check", "--node", HOSTILE],
        vec!["config", "check", unknown],
        vec!["config", "check", config],
        vec!["config", "diff", config],
        vec!["config", "import", "generic", unknown],
        vec!["config", "import", "generic", config],
        vec!["status", HOSTILE],
        vec![HOSTILE],
        vec!["status", "--color", HOSTILE],
    ]
}

/// `-o json` has the names as they are.
async fn json_has_exact_names(node: &Node, id: &str) {
    let devices = json_document(node, &["device", "show"]).await;
    let of = |id: &str| {
        devices["devices"]
            .as_array()
            .unwrap()
            .iter()
            .find(|device| device["id"] == id)
            .unwrap()
            .clone()
    };
    assert_eq!(of("dev:sensor0")["cordoned"], format!("fan{HOSTILE}"));
    assert_eq!(of(id)["id"], id);
    for verb in [
        &["status"][..],
        &["who"],
        &["history"],
        &["discover", "--all"],
        &["discover", "--slices", "--node-name", "n1"],
        &["migrate", "status"],
        &["migrate", "plan", "--to", "both"],
        &["topology"],
        &["doctor"],
        &["config", "show"],
    ] {
        json_document(node, verb).await;
    }
    let (export, _) = printable(node, &["ledger", "export"]).await;
    let export: serde_json::Value = serde_json::from_str(&export).unwrap();
    assert_eq!(export["grants"][0]["devices"][0], id);
}

#[test]
fn no_verb_prints_a_hostile_name_unescaped_and_json_keeps_it() {
    run(async {
        let (node, id, sensor) =
            (node(), format!("dev:sensor{HOSTILE}"), name("example.com/sensor"));
        let kubelet = node.start_kubelet().await;
        let daemon = Daemon::spawn(node.command(&["run"]).args(["--log-format", "json"]));
        offered(&kubelet, &sensor, 2).await;
        let mut api = dial(&kubelet, &node, &sensor).await;
        allocate(&mut api, &[&id]).await.unwrap();
        for unknown in [format!("dev:{HOSTILE}"), String::new()] {
            let refused = allocate(&mut api, &[&unknown]).await.unwrap_err();
            assert!(!refused.message().contains(is_unprintable), "{refused:?}");
        }
        printable(
            &node,
            &["device", "cordon", "dev:sensor0", "--reason", &format!("fan{HOSTILE}")],
        )
        .await;
        let unknown = format!("dev:sensor0{HOSTILE}");
        let config = node.path("etc/evil.toml");
        let quoted = serde_json::to_string(HOSTILE).unwrap();
        std::fs::write(
            &config,
            format!("[[resource]]\nname = {quoted}\nclass = {quoted}\n{quoted} = {quoted}\n"),
        )
        .unwrap();
        let config = config.to_str().unwrap();
        for verb in verbs(&id, &unknown, config) {
            printable(&node, &verb).await;
        }
        json_has_exact_names(&node, &id).await;
        let serving: serde_json::Value =
            serde_json::from_str(&daemon.logged("serving /metrics").await).unwrap();
        let address = serving["address"].as_str().unwrap().parse().unwrap();
        for path in ["/metrics", "/"] {
            let body =
                tokio::task::spawn_blocking(move || http_get(address, path).1).await.unwrap();
            assert!(!body.contains(|c| is_unprintable(c) && c != '\n'), "{path}: {body:?}");
        }
        std::fs::remove_file(node.path(&format!("host/dev/sensor{HOSTILE}"))).unwrap();
        kubelet.wait_for(|view| view.capacity(&sensor).allocatable == 0, HANG).await.unwrap();
        let gone = daemon.logged("device_gone").await;
        assert_eq!(serde_json::from_str::<serde_json::Value>(&gone).unwrap()["device"], id);
        for line in daemon.log() {
            assert!(!line.contains(is_unprintable), "{line:?}");
            serde_json::from_str::<serde_json::Value>(&line).unwrap();
        }
        drop(daemon);
        // The content of the files, without a daemon; and a log in text format.
        for verb in [
            &["who"][..],
            &["history"],
            &["ledger", "verify"],
            &["discover"],
            &["topology"],
            &["who", &unknown],
        ] {
            printable(&node, verb).await;
        }
        let daemon = node.start_daemon();
        daemon.logged("ready").await;
        offered(&kubelet, &sensor, 0).await;
        let lines = daemon.log();
        assert!(
            lines
                .iter()
                .all(|line| !line.contains(is_unprintable)
                    && !line.starts_with("2026-01-01T00:00:00Z")),
            "{lines:#?}"
        );
    });
}

/// A closed reader and a full disk are errors of every verb: a script must not treat a part as the
/// complete output.
#[test]
fn failed_output_is_an_error_of_every_verb() {
    run(async {
        let node = Node::with(&[("sensor", 1)]);
        let daemon = node.start_daemon();
        daemon.logged("ready").await;
        let config = node.config_file();
        let config = config.to_str().unwrap();
        let generic = node.path("etc/generic.yaml");
        std::fs::write(&generic, "domain: example.com\ndevices:\n- name: fuse\n  groups:\n  - paths:\n    - path: /dev/fuse\n").unwrap();
        let generic = generic.to_str().unwrap();
        for verb in [
            &["status"][..],
            &["status", "--watch"],
            &["who"],
            &["who", "dev:sensor0", "-o", "json"],
            &["who", "--watch", "-o", "json"],
            &["explain", "dev:sensor0"],
            &["history"],
            &["discover"],
            &["topology"],
            &["topology", "-o", "svg"],
            &["topology", "-o", "json"],
            &["device", "show"],
            &["device", "cordon", "dev:sensor0", "--reason", "fan"],
            &["doctor", "--all"],
            &["doctor", "--bundle", "-"],
            &["ledger", "export"],
            &["ledger", "verify"],
            &["config", "check"],
            &["config", "show"],
            &["config", "diff", config],
            &["config", "import", "generic", generic],
            &["--help"],
            &["ledger", "--help"],
            &["--version"],
        ] {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            for (out, wanted) in [
                (Stdio::from(writer), "standard output was closed"),
                (Stdio::from(full), "cannot print: "),
            ] {
                let printed = node.command(verb).stdout(out).output().unwrap();
                let said = String::from_utf8(printed.stderr).unwrap();
                assert_eq!(printed.status.code(), Some(1), "{verb:?}: {said}");
                assert!(
                    said.lines().any(|line| line.starts_with(&format!("holdfast: {wanted}"))),
                    "{verb:?}: {said}"
                );
            }
        }
    });
}
