//! An operator's mistakes end in one sentence on standard error and a documented exit code, and
//! lose no data.

use crate::common::inside::say;
use crate::common::{
    Node, allocate, count, dial, files_below, is_root, name, offered, resource, run, until,
};
use holdfast::console::exit;
use holdfast::lab::sim::kubelet::EventKind;
use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// Runs to the end and returns the sentence, which must be the only output.
fn sentence(command: &mut Command, code: u8) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code.into()), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "not one line:\n{said}");
    assert!(said.starts_with("holdfast: ") && !said.contains("panic"), "{said}");
    assert!(output.stdout.is_empty());
    said
}

/// The daemon does not start, prints one sentence with `parts`, and leaves the ledger as it was.
fn refuses_to_run(node: &Node, code: u8, parts: &[&str]) {
    let before = files_below(&node.path(""));
    let said = sentence(&mut node.command(&["run"]), code);
    for part in parts {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
    assert!(
        files_below(&node.path("")) == before,
        "files were changed by a start that failed: {said}"
    );
}

/// A node with a grant of an earlier daemon.
fn node_with_a_grant() -> Node {
    let node = Node::with(&[("gpu", 2)]);
    run(async {
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        offered(&kubelet, &name("example.com/gpu"), 2).await;
        let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
        allocate(&mut api, &["dev:gpu0"]).await.unwrap();
        app.shut_down().await;
    });
    node
}

#[test]
fn a_configuration_error_is_reported_with_its_line_and_the_valid_values() {
    let node = node_with_a_grant();
    let replaced = |from: &str, to: &str| resource("gpu").replace(from, to);
    for (text, parts) in [
        (
            replaced("class", "clas"),
            vec!["config.toml", "line 3", "`clas`", "did you mean `class`?"],
        ),
        (
            format!("{}replica = 2\n", resource("gpu")),
            vec!["line 5", "`replica`", "did you mean `replicas`?"],
        ),
        (
            replaced("example.com/gpu", "gpu"),
            vec!["`…` is not a resource name", "`example.com/device`"],
        ),
        (replaced("example.com/gpu", "Example.com/gpu"), vec!["resource `…`", "lower-case"]),
        (
            resource("gpu").repeat(2),
            vec!["two resources are named `example.com/gpu`", "give each resource its own name"],
        ),
        (replaced("char", "gppu"), vec!["unknown value `…`", "did you mean `gpu`?"]),
        (replaced("/dev/gpu*", "gpu*"), vec!["`example.com/gpu`", "must begin with `/dev/`"]),
        (
            "[telemetry]\nlisten = \"everywhere\"\n".to_owned(),
            vec!["`telemetry.listen` is `…`", "such as"],
        ),
        ("[ledger\n".to_owned(), vec!["config.toml", "line 1"]),
    ] {
        node.write_config(&text);
        // Many can read the logs, so this sentence has no values; `config check` prints them for
        // the editor of the file.
        refuses_to_run(&node, exit::CONFIG, &parts);
        let checked = String::from_utf8(node.output(&["config", "check"]).stdout).unwrap();
        for value in ["Example.com/gpu", "gppu", "everywhere"]
            .into_iter()
            .filter(|value| text.contains(value))
        {
            assert!(checked.contains(&format!("`{value}`")), "{checked}");
        }
    }
    assert_eq!(node.grants().len(), 1);
}

#[test]
fn a_missing_configuration_file_is_named() {
    let node = node_with_a_grant();
    std::fs::remove_file(node.config_file()).unwrap();
    refuses_to_run(&node, exit::CONFIG, &["config.toml", "No such file", "--config"]);
    assert_eq!(node.grants().len(), 1);
}

#[test]
fn an_unusable_kubelet_directory_is_named() {
    let node = node_with_a_grant();
    let kubelet = node.path("kubelet");
    std::fs::remove_dir_all(&kubelet).unwrap();
    std::fs::write(&kubelet, "").unwrap();
    refuses_to_run(
        &node,
        exit::KUBELET_DIR,
        &[kubelet.to_str().unwrap(), "not a directory", "--kubelet-dir"],
    );

    // A link to itself cannot be read, even by root.
    std::fs::remove_file(&kubelet).unwrap();
    symlink("kubelet", &kubelet).unwrap();
    refuses_to_run(
        &node,
        exit::KUBELET_DIR,
        &[kubelet.to_str().unwrap(), "symbolic links", "--kubelet-dir"],
    );

    std::fs::remove_file(&kubelet).unwrap();
    std::fs::create_dir_all(kubelet.join("device-plugins/kubelet.sock")).unwrap();
    refuses_to_run(&node, exit::KUBELET_DIR, &["kubelet.sock", "--kubelet-dir"]);
    assert_eq!(node.grants().len(), 1);
}

#[test]
fn a_state_directory_that_cannot_be_written_is_named() {
    let node = Node::with(&[("gpu", 2)]);
    std::fs::write(node.state(), "somebody's file").unwrap();
    refuses_to_run(&node, exit::STATE, &[node.state().to_str().unwrap(), "a file is in the way"]);
    assert_eq!(std::fs::read_to_string(node.state()).unwrap(), "somebody's file");
}

#[test]
fn a_missing_permission_is_named() {
    if is_root() {
        say("SKIPPED: permissions do not hinder root; run the tests as a normal user too");
        return;
    }
    let node = node_with_a_grant();
    let forbid = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let kubelet = node.path("kubelet");
    forbid(&kubelet, 0o000);
    refuses_to_run(
        &node,
        exit::KUBELET_DIR,
        &[kubelet.to_str().unwrap(), "ermission denied", "--kubelet-dir"],
    );
    forbid(&kubelet, 0o755);
    let folders = [node.state(), node.state().join("journal")];
    folders.iter().for_each(|folder| forbid(folder, 0o555));
    let said = sentence(&mut node.command(&["run"]), exit::STATE);
    assert!(said.contains("ermission denied") && said.contains("--state-dir"), "{said}");
    folders.iter().for_each(|folder| forbid(folder, 0o755));
    assert_eq!(node.grants().len(), 1);
}

#[test]
fn a_second_daemon_on_the_same_state_is_refused_and_the_first_still_serves() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let first = node.start_daemon();
        let gpu = name("example.com/gpu");
        offered(&kubelet, &gpu, 2).await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        allocate(&mut api, &["dev:gpu0"]).await.unwrap();

        let said = sentence(&mut node.command(&["run"]), exit::ALREADY_RUNNING);
        assert!(said.contains(node.state().to_str().unwrap()) && said.contains("in use"), "{said}");

        allocate(&mut api, &["dev:gpu1"]).await.unwrap();
        assert_eq!(count(&kubelet, |kind| matches!(kind, EventKind::StreamEnded { .. })), 0);
        let both = |who: &serde_json::Value| who["grants"].as_array().unwrap().len() == 2;
        until("both grants at the first one's control socket", || node.json(&["who"]), both).await;
        // `<resource>-<daemon>-<registration>.sock`. The first one may have registered twice, and a
        // kubelet may read both streams.
        let sockets = std::fs::read_dir(node.sockets()).unwrap();
        let names = sockets.map(|it| it.unwrap().file_name().into_string().unwrap());
        let daemons = names.map(|name| name.rsplit_once('-').unwrap().0.to_owned());
        let daemons: BTreeSet<String> = daemons.collect();
        assert_eq!(daemons.len(), 1, "{daemons:?}");
        drop(first);
    });
}

#[test]
fn an_invalid_command_line_is_answered_with_one_sentence() {
    let node = Node::with(&[]);
    for (verb, parts) in [
        (vec!["rum"], vec!["'rum'", "'run'", "--help"]),
        (vec!["frobnicate"], vec!["'frobnicate'", "--help"]),
        (vec!["who", "--outptu", "json"], vec!["'--outptu'", "'--output'", "--help"]),
        (vec!["who", "--output", "yaml"], vec!["'yaml'", "table, ascii, json, svg", "--help"]),
        (vec!["ledger", "exprot"], vec!["'exprot'", "'export'", "--help"]),
    ] {
        let said = sentence(&mut node.command(&verb), exit::USAGE);
        for part in parts {
            assert!(said.contains(part), "`{part}` is not in: {said}");
        }
    }
}

#[test]
fn verbs_without_a_daemon_or_a_ledger_name_the_missing_part() {
    let node = Node::with(&[]);
    let said = sentence(&mut node.command(&["status"]), exit::FAILURE);
    assert!(
        said.contains("no holdfast daemon answers on")
            && said.contains("control.sock")
            && said.contains("--run-dir"),
        "{said}"
    );
    for verb in [vec!["who"], vec!["ledger", "export"]] {
        let said = sentence(&mut node.command(&verb), exit::STATE);
        assert!(said.contains("no journal") && said.contains("--state-dir"), "{said}");
    }
    assert!(!node.state().exists(), "a question makes no ledger");
}

#[test]
fn a_glob_that_matches_nothing_registers_an_empty_resource_and_warns() {
    run(async {
        let node = Node::with(&[("gpu", 2), ("tpu", 0)]);
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &name("example.com/gpu"), 2).await;
        let tpu = name("example.com/tpu");
        let empty = |kind: &EventKind| matches!(kind, EventKind::Listed { resource, healthy: 0, unhealthy: 0, .. } if *resource == tpu);
        kubelet.wait_for(|view| view.last(empty).is_some(), crate::common::HANG).await.unwrap();
        let warning = daemon.logged("/dev/tpu*").await;
        assert!(warning.contains("WARN") && warning.contains("example.com/tpu"), "{warning}");

        // It was only a warning: the daemon runs.
        node.create_device("tpu", 0);
        offered(&kubelet, &tpu, 1).await;
    });
}

#[test]
fn a_configuration_is_checked_shown_and_compared_without_a_daemon() {
    let node = Node::with(&[("gpu", 2)]);
    node.write_config(&resource("gpu"));
    let said = |arguments: &[&str], code: u8| {
        let output = node.command(arguments).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(code.into()),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let file = node.config_file();
    let file = file.to_str().unwrap();
    assert!(
        said(&["config", "check"], exit::SUCCESS)
            .starts_with(&format!("valid: {file}\noffers: example.com/gpu\n"))
    );
    assert!(
        said(&["config", "show"], exit::SUCCESS)
            .contains(&format!("name = \"example.com/gpu\"  # {file}:2\n"))
    );
    let other = node.path("other.toml");
    std::fs::write(&other, format!("{}replicas = 2\n", resource("gpu"))).unwrap();
    let other = other.to_str().unwrap();
    assert_eq!(said(&["config", "diff", other], exit::SUCCESS), "~ example.com/gpu: sharing\n");
    assert_eq!(said(&["config", "diff", file], exit::SUCCESS), "no change\n");
    // Commands are all or nothing: only a valid configuration is shown, and every mistake is
    // reported.
    node.write_config("[ledgr]\n[telemetry]\nlisten = 1\n");
    let told = said(&["config", "check"], exit::CONFIG);
    assert_eq!(told.lines().count(), 2, "{told}");
    assert!(told.starts_with(&format!("{file}:1:2: unknown key `ledgr`")), "{told}");
    sentence(&mut node.command(&["config", "show"]), exit::CONFIG);
    assert!(said(&["config", "check", other], exit::SUCCESS).contains("offers: example.com/gpu"));
    // Another plugin's file: our configuration on standard output, warnings on standard error.
    let source = node.path("sriov.json");
    std::fs::write(
        &source,
        r#"{"resourceList": [{"resourceName": "a", "selectors": {"drivers": ["vfio-pci"]}, "allowTopology": true}]}"#,
    )
    .unwrap();
    let output =
        node.command(&["config", "import", "sriov", source.to_str().unwrap()]).output().unwrap();
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("warning: `resourceList[0].allowTopology` (line 1) is not a setting of")
    );
    node.write_config(&String::from_utf8(output.stdout).unwrap());
    assert!(said(&["config", "check"], exit::SUCCESS).contains("offers: intel.com/a\n"));
    std::fs::write(&source, "{}").unwrap();
    assert!(
        sentence(
            &mut node.command(&["config", "import", "sriov", source.to_str().unwrap()]),
            exit::FAILURE
        )
        .contains("`resourceList`")
    );
}

#[test]
fn a_wrong_value_in_another_plugins_file_drops_only_its_own_resource() {
    let node = Node::with(&[("gpu", 1)]);
    let source = node.path("sriov.json");
    let import =
        || node.command(&["config", "import", "sriov", source.to_str().unwrap()]).output().unwrap();
    let pool = |name: &str, vendors: &str| {
        format!(
            r#"{{"resourceName": "{name}", "selectors": {{"drivers": ["vfio-pci"], "vendors": {vendors}}}}}"#
        )
    };
    let write = |pools: &[String]| {
        std::fs::write(&source, format!("{{\"resourceList\": [\n{}\n]}}", pools.join(",\n")))
            .unwrap();
    };

    write(&[
        pool("a", "[8086]"),
        pool("b", r#"["8086"]"#),
        pool("c", r#"["xyz"]"#),
        pool("b", "[]"),
    ]);
    let output = import();
    let (toml, told) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(exit::INCOMPLETE.into()), "{told}");
    assert!(
        toml.contains("\"intel.com/b\"")
            && !toml.contains("intel.com/a")
            && !toml.contains("intel.com/c"),
        "{toml}"
    );
    for expected in [
        "`resourceList[0]` (line 2, intel.com/a) is left out: line 2: `resourceList[0].selectors.vendors[0]` is `8086`",
        "intel.com/c is left out: `resourceList[2].selectors.vendors` (line 4): the vendor id `xyz` must be",
        "intel.com/b at `resourceList[3]` (line 5) is left out: another resource has this name",
        "holdfast: 3 parts of `",
    ] {
        assert!(told.contains(expected), "{told}\nshould contain: {expected}");
    }
    node.write_config(&toml);
    assert!(node.command(&["config", "check"]).output().unwrap().status.success());

    write(&[pool("a", "[8086]")]);
    let output = import();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(exit::FAILURE.into()), "{told}");
    assert!(
        output.stdout.is_empty()
            && told.contains("(line 2, intel.com/a) is left out")
            && told.contains("no resource can be imported"),
        "{told}"
    );
}
