//! Tests of conditions on the node itself.

use super::super::labels::copied_labels;
use super::super::section::Section;
use super::super::tree::Table;
use super::*;
use std::fs;
use std::path::Path;

fn write(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A node with one H100, on EC2.
fn h100(root: &Path) {
    let uevent = "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n";
    write(root, "sys/bus/pci/devices/0000:18:00.0/uevent", uevent);
    write(
        root,
        "proc/driver/nvidia/gpus/0000:18:00.0/information",
        "Model: \t\t NVIDIA H100 80GB HBM3\n",
    );
    write(root, "sys/class/dmi/id/product_name", "p5.48xlarge\n");
    write(root, "sys/class/dmi/id/sys_vendor", "Amazon EC2\n");
}

fn outcome(condition: &str, node: &Node) -> Result<(bool, String), String> {
    outcome_with(condition, node, &NodeLabels::default())
}

fn outcome_with(
    condition: &str,
    node: &Node,
    labels: &NodeLabels,
) -> Result<(bool, String), String> {
    let text = format!("[[node]]\nmatch = {condition}\n");
    let table = Table::parse(&text, Path::new("f")).unwrap();
    let value = &table.get("node").unwrap().as_list().unwrap()[0];
    let read = Section::read(value, &NodeFacts::of(node, labels));
    read.map(|section| (section.matches(), section.why().to_owned()))
        .map_err(|error| error.in_full())
}

#[track_caller]
fn fails(condition: &str, node: &Node, expected: &str) {
    let problem = outcome(condition, node).unwrap_err();
    assert!(problem.contains(expected), "{problem}\nshould contain: {expected}");
}

#[test]
fn a_section_is_for_nodes_with_a_gpu_or_a_machine() {
    let dir = tempfile::tempdir().unwrap();
    h100(dir.path());
    let node = Node::named("x", dir.path());
    for (condition, matches, why) in [
        (
            "{ gpu = \"NVIDIA H100*\" }",
            true,
            "the GPU `NVIDIA H100 80GB HBM3` matches `NVIDIA H100*`",
        ),
        (
            "{ gpu = [\"*a100*\", \"*h100*\"] }",
            true,
            "the GPU `NVIDIA H100 80GB HBM3` matches `*h100*`",
        ),
        ("{ gpu = \"NVIDIA A100*\" }", false, "its GPUs are `NVIDIA H100 80GB HBM3`"),
        ("{ gpu = [\"10DE:2330\"] }", true, "a device has the PCI id `10DE:2330`"),
        ("{ gpu = [\"10de:2331\"] }", false, "no device has one of its PCI ids"),
        (
            "{ dmi = { product_name = \"p5.*\", sys_vendor = [\"amazon ec2\"] } }",
            true,
            "the DMI field `product_name` is `p5.48xlarge` and matches `p5.*`, and the DMI field \
             `sys_vendor` is `Amazon EC2` and matches `amazon ec2`",
        ),
        (
            "{ dmi = { product_name = [\"p4*\", \"g5.*\"] } }",
            false,
            "the DMI field `product_name` is `p5.48xlarge` and matches none of its patterns",
        ),
        ("{ dmi = { product_sku = \"*\" } }", false, "the DMI field `product_sku` does not exist"),
        (
            "{ gpu = \"10de:2330\", dmi = { sys_vendor = \"Dell*\" } }",
            false,
            "a device has the PCI id `10de:2330`, and the DMI field `sys_vendor` is `Amazon EC2` \
             and matches none of its patterns",
        ),
        ("{ label = { a = \"b\" } }", false, "the labels of a node of another name are unknown"),
    ] {
        assert_eq!(outcome(condition, &node), Ok((matches, why.to_owned())), "{condition}");
    }
}

#[test]
fn a_fact_that_cannot_be_read_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::named("x", dir.path());
    fails("{ gpu = \"10de:2330\" }", &node, "`match.gpu` cannot be evaluated: /sys/bus is missing");
    fails("{ dmi = { sys_vendor = \"*\" } }", &node, "`match.dmi` cannot be evaluated: /sys/class");
    h100(dir.path());
    fs::remove_dir_all(dir.path().join("proc")).unwrap();
    fails("{ gpu = \"*\" }", &node, "`match.gpu` cannot be evaluated: /proc is missing");
    // The driver is not loaded yet.
    let uevent = "PCI_CLASS=30200\nPCI_ID=10DE:2330\n";
    write(dir.path(), "sys/bus/pci/devices/0000:18:00.0/uevent", uevent);
    fs::create_dir_all(dir.path().join("proc")).unwrap();
    let unknown = "the model of the GPU 0000:18:00.0 is unknown, because NVIDIA's driver does";
    fails("{ gpu = \"NVIDIA H100*\" }", &node, unknown);
    let by_id = outcome("{ gpu = [\"NVIDIA H100*\", \"10de:2330\"] }", &node);
    assert_eq!(by_id, Ok((true, "a device has the PCI id `10de:2330`".to_owned())));
    let section = format!("[[node]]\nmatch = {}\n", "{ gpu = \"NVIDIA H100*\" }");
    let table = Table::parse(&section, Path::new("f")).unwrap();
    let value = &table.get("node").unwrap().as_list().unwrap()[0];
    let error = Section::read(value, &NodeFacts::of(&node, &NodeLabels::default())).unwrap_err();
    assert!(error.is_unread(), "the next start may succeed");
    // Its neighbour has the driver: one GPU without it must not cost the others.
    write(
        dir.path(),
        "sys/bus/pci/devices/0000:19:00.0/uevent",
        "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n",
    );
    write(dir.path(), "proc/driver/nvidia/gpus/0000:19:00.0/information", "Model: NVIDIA H100\n");
    let other = outcome("{ gpu = \"NVIDIA A10*\" }", &node);
    assert_eq!(other, Ok((false, "its GPUs are `NVIDIA H100`".to_owned())));
    fs::remove_dir_all(dir.path().join("proc/driver")).unwrap();
    fs::remove_dir_all(dir.path().join("sys/bus/pci/devices/0000:19:00.0")).unwrap();
    // A GPU that is passed to virtual machines never has a model.
    let uevent = "DRIVER=vfio-pci\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n";
    write(dir.path(), "sys/bus/pci/devices/0000:18:00.0/uevent", uevent);
    let none = outcome("{ gpu = \"NVIDIA H100*\" }", &node);
    assert_eq!(none, Ok((false, "this node has no GPU of NVIDIA's driver".to_owned())));
}

#[test]
fn a_failed_call_is_an_error_and_never_a_mismatch() {
    use crate::host::faults::{ERRORS, with_faults};
    let dir = tempfile::tempdir().unwrap();
    h100(dir.path());
    let node = Node::named("x", dir.path());
    for condition in ["{ gpu = \"*H100*\" }", "{ dmi = { product_name = \"p5*\" } }"] {
        let calls = with_faults(|_| None, || outcome(condition, &node)).1;
        for errno in ERRORS {
            for failing in 0..calls {
                let fault = move |number| (number == failing).then_some(errno);
                let found = with_faults(fault, || outcome(condition, &node)).0;
                assert!(
                    found.as_ref().is_ok_and(|(matches, _)| *matches) || found.is_err(),
                    "{found:?}"
                );
            }
        }
    }
}

#[test]
fn labels_are_read_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("labels");
    let node = Node::named("x", dir.path()).with_state(dir.path());
    let labels = NodeLabels::File(file.clone());
    let outcome = |condition| outcome_with(condition, &node, &labels);
    let fails = |condition, expected: &str| {
        let problem = outcome(condition).unwrap_err();
        assert!(problem.contains(expected), "{problem}");
    };
    let gpu = "{ label = { \"example.com/pool\" = [\"gpu-*\"], zone = \"a\" } }";
    fails(gpu, "cannot be read: No such file");
    fs::write(&file, "# of the node\n\nexample.com/pool=\"gpu-7\"\nzone=a\n").unwrap();
    let why = "the label `example.com/pool` is `gpu-7` and matches `gpu-*`, and the label `zone` \
               is `a` and matches `a`";
    assert_eq!(outcome(gpu), Ok((true, why.to_owned())));
    let other = outcome("{ label = { role = \"*\" } }");
    assert_eq!(other, Ok((false, "the label `role` does not exist".to_owned())));
    fs::write(&file, "zone=a\nrole\n").unwrap();
    fails(gpu, "has no `key=value` in line 2");
    fs::write(&file, b"a=\xff\n").unwrap();
    fails(gpu, "is not UTF-8");
}

#[test]
fn an_empty_pattern_matches_a_label_that_is_empty_or_missing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("labels");
    let node = Node::named("x", dir.path()).with_state(dir.path());
    let labels = NodeLabels::File(file.clone());
    let holds = |condition| outcome_with(condition, &node, &labels).unwrap().0;
    for (text, empty, either) in [
        ("", true, true),
        ("role=\n", true, true),
        ("role=a\n", false, true),
        ("role=b\n", false, false),
    ] {
        fs::write(&file, text).unwrap();
        assert_eq!(holds("{ label = { role = \"\" } }"), empty, "{text}");
        assert_eq!(holds("{ label = { role = [\"\", \"a\"] } }"), either, "{text}");
    }
}

#[test]
fn labels_of_the_api_server_are_unknown_until_it_has_answered_and_never_again() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::named("GPU-7", dir.path()).with_state(dir.path());
    let labels = NodeLabels::Api;
    let condition = "{ label = { role = [\"\", \"a\"] } }";
    let unknown = "the labels of the node are unknown until the API server has answered once";
    // An unknown label is not a missing one.
    assert_eq!(outcome_with(condition, &node, &labels), Ok((false, unknown.to_owned())));
    let known = [("role".to_owned(), "a".to_owned())].into();
    write(dir.path(), "node/labels", &copied_labels("gpu-7", &known));
    let why = "the label `role` is `a` and matches `a`";
    assert_eq!(outcome_with(condition, &node, &labels), Ok((true, why.to_owned())));
    // A running daemon that knew them keeps its configuration.
    fs::remove_file(dir.path().join("node/labels")).unwrap();
    let running = node.pinned(&labels, true);
    let lost = outcome_with(condition, &running, &NodeLabels::default()).unwrap_err();
    assert!(lost.contains("has disappeared or is damaged"), "{lost}");
}

#[test]
fn every_mistake_is_one_sentence() {
    let node = Node::default();
    for (condition, expected) in [
        ("{ gpu = [] }", "`match.gpu` must be a list of models or PCI ids"),
        ("{ gpu = { a = 1 } }", "`match.gpu` must be a list of models or PCI ids"),
        ("{ gpu = \"[\" }", "the pattern `[` of `match.gpu` is not a valid glob"),
        ("{ dmi = {} }", "`match.dmi` must be a table of fields"),
        ("{ dmi = \"p5\" }", "`match.dmi` must be a table of fields"),
        (
            "{ dmi = { product_nam = \"x\" } }",
            "unknown key `product_nam`; did you mean `product_name`?",
        ),
        ("{ dmi = { product_serial = \"x\" } }", "unknown key `product_serial`"),
        ("{ label = [\"a=b\"] }", "`match.label` must be a table of labels"),
        ("{ label = { a = 1 } }", "`match.label` must be a table of labels"),
    ] {
        fails(condition, &node, expected);
    }
}
