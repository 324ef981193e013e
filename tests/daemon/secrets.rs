//! Data that only root may read: environments, arguments and the output of hooks and checks, an
//! operator's texts, and wrong values of the configuration. The open page, `/metrics`, the log,
//! answers to the kubelet and the archive of `doctor --bundle` contain none of it, in whole or in
//! part. The control socket returns the output of commands.

use crate::common::{Node, dial, http_get, name, offered, resource, run, soon, telemetry, until};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::lab::sim::kubelet::PodSpec;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use tokio::process::Command;

/// Parts of secrets, which must not appear.
const PARTS: [&str; 12] = [
    "hunter2xyz",
    "swordfish",
    "LONGSECRET",
    "89abcdef0123",
    "FIRSTLINE",
    "SECONDLINE",
    "QUOTED",
    "4242424242",
    "rotated-secret",
    "ask-jane",
    "mounted-secret",
    "U1dPUkRGSVNI",
];

fn config(argument: &str, env: &str) -> String {
    let long = format!("LONGSECRET{}", "0123456789abcdef".repeat(40));
    let say = |code: u8| {
        format!(
            "echo said: $0 $1 $2 $(printf %s $0 | tr a-z A-Z | base64) >&2; printf '%s' \"$2\"; exit {code}"
        )
    };
    let command = |code| {
        format!(
            "[\"/bin/sh\", \"-c\", {:?}, {argument:?}, {long:?}, \"FIRSTLINE\\nSECONDLINE\"]",
            say(code)
        )
    };
    format!(
        "[telemetry]\nlisten = \"127.0.0.1:0\"\n{}env = {{ LICENCE = {env}, Q = 'QUOTED\"SECRET\\bs', HARMLESS = \"1\" }}\n\
         mounts = [{{ host = \"/srv/mounted-secret\", container = \"/x\", read_only = true }}]\n\
         after_release = {{ command = {}, timeout = \"5s\" }}\nbefore_start = {{ command = {}, timeout = \"5s\" }}\n\
         check = {{ command = {}, timeout = \"5s\", every = \"5s\" }}\n",
        resource("sensor"),
        command(3),
        command(4),
        command(1),
    )
}

fn holds_none(what: &str, text: &str) {
    for part in PARTS {
        let at = text.find(part);
        assert!(
            at.is_none(),
            "{what} has {part}: {}",
            at.map_or("", |at| &text[text.floor_char_boundary(at.saturating_sub(200))..])
        );
    }
}

fn unpacked(path: &Path) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(std::fs::File::open(path).unwrap());
    let read = |entry: std::io::Result<tar::Entry<'_, std::fs::File>>| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (name, text)
    };
    archive.entries().unwrap().map(read).collect()
}

/// Checks all open pages and all files that are passed on.
async fn looked_at(node: &Node, when: &str, address: SocketAddr, log: &[String]) {
    for path in ["/", "/metrics"] {
        let body = tokio::task::spawn_blocking(move || http_get(address, path).1).await.unwrap();
        holds_none(&format!("{path} {when}"), &body);
    }
    let text = log.join("\n");
    holds_none(&format!("the log {when}"), &text);
    // In the kubelet's log folder.
    let pod_log = node.path("host/var/log/pods/kube-system_holdfast-x_uid/holdfast/0.log");
    std::fs::create_dir_all(pod_log.parent().unwrap()).unwrap();
    std::fs::write(pod_log, text).unwrap();
    let bundle = node.path(&format!("{when}.tar"));
    let output = Command::from(node.command(&["doctor", "--bundle", bundle.to_str().unwrap()]))
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    holds_none("the contents", &String::from_utf8_lossy(&output.stderr));
    let files = unpacked(&bundle);
    for file in ["config.json", "doctor.json", "status.json", "devices.json", "who.json", "log.txt"]
    {
        assert!(
            files.contains_key(file),
            "{file} is missing {when}: {:?}",
            files.get("README.txt")
        );
    }
    files.iter().for_each(|(file, text)| holds_none(&format!("{file} {when}"), text));
    assert!(
        files["config.json"].contains("\"after_release\""),
        "names are printed: {}",
        files["config.json"]
    );
}

#[test]
fn secrets_of_root_are_in_no_page_log_or_archive() {
    run(async {
        let node = Node::with(&[("sensor", 3)]);
        node.write_config(&config("swordfish", "\"hunter2xyz\""));
        let sensor = name("example.com/sensor");
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let daemon = node.start_daemon();
        let address = telemetry(&daemon).await;
        // The check fails for each of them; its exit status is reported.
        daemon.logged_often("reason=check_failed", 3).await;
        let mut api = dial(&kubelet, &node, &sensor).await;
        let request = api::PreStartContainerRequest { devices_ids: vec!["dev:sensor0".into()] };
        let refused = api.pre_start_container(request).await.unwrap_err();
        holds_none("the answer to the kubelet", refused.message());
        assert!(
            refused.message().contains("exit status: 4")
                && refused.message().contains("`holdfast device show dev:sensor0`"),
            "{refused}"
        );
        let cordon = ["device", "cordon", "dev:sensor1", "--reason", "ask-jane"];
        assert!(Command::from(node.command(&cordon)).output().await.unwrap().status.success());
        looked_at(&node, "running", address, &daemon.log()).await;

        // Root gets the output, through the control socket.
        let shown =
            Command::from(node.command(&["device", "show", "dev:sensor0"])).output().await.unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(
            shown.contains("exit status: 4")
                && shown.contains("SECONDLINE")
                && shown.contains("before_start"),
            "{shown}"
        );
        let shown =
            Command::from(node.command(&["device", "show", "dev:sensor1"])).output().await.unwrap();
        assert!(String::from_utf8(shown.stdout).unwrap().contains("ask-jane"));

        // Another argument and another value: the former ones are still in memory, in grants and in
        // the log.
        node.write_config(&config("rotated-secret-argument", "\"rotated-secret-value\""));
        daemon.signal(Signal::SIGHUP);
        daemon.logged("configuration reloaded").await;
        looked_at(&node, "rotated", address, &daemon.log()).await;

        // A number in place of a text.
        node.write_config(&config("swordfish", "424242424242"));
        daemon.signal(Signal::SIGHUP);
        daemon.logged("configuration rejected").await;
        looked_at(&node, "invalid", address, &daemon.log()).await;
        drop(daemon);
        // A start with this configuration; the service manager writes its sentence to the log.
        let started = Command::from(node.command(&["run"])).output().await.unwrap();
        assert_eq!(started.status.code(), Some(3));
        let said = String::from_utf8(started.stderr).unwrap();
        holds_none("the sentence of a start", &said);
        assert!(
            said.contains("found integer `…`") && said.contains("`holdfast config check`"),
            "{said}"
        );
        let checked = Command::from(node.command(&["config", "check"])).output().await.unwrap();
        assert!(
            String::from_utf8(checked.stdout).unwrap().contains("424242424242"),
            "root sees the value"
        );
    });
}

/// A hook after release fails. The ledger records that, `status` and PreStartContainer report it,
/// and it survives a restart.
#[test]
fn the_end_of_a_hook_is_recorded_without_its_output() {
    run(async {
        let node = Node::with(&[("sensor", 1)]);
        let hooks = |after: &str| {
            format!(
                "[telemetry]\nlisten = \"127.0.0.1:0\"\n{}after_release = {{ command = {after} }}\n",
                resource("sensor")
            )
        };
        node.write_config(&hooks(
            "[\"/bin/sh\", \"-c\", \"echo key swordfish refused; exit 3\", \"LONGSECRET\"]",
        ));
        let sensor = name("example.com/sensor");
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let daemon = node.start_daemon();
        offered(&kubelet, &sensor, 1).await;
        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &sensor, 1)),
        )
        .await;
        until(
            "the names",
            || node.grants(),
            |grants| grants.iter().any(|grant| grant.pod().is_some_and(|pod| pod.name.is_some())),
        )
        .await;
        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        daemon.logged("why=\"exit status: 3\"").await;
        let address = telemetry(&daemon).await;
        looked_at(&node, "failed", address, &daemon.log()).await;
        drop(daemon);
        let owed = holdfast::store::peek(&node.state()).unwrap().owed;
        let recorded = format!("{owed:?}");
        holds_none("the ledger", &recorded);
        assert!(recorded.contains("exit status: 3"), "{recorded}");
    });
}
