//! Compares the tables of docs/importers.md with the results of their examples.
//!
//! A setting that is in no table, or that has another effect, fails the test.

use super::tests::take_lookups;
use super::{
    Imported, Peer, akri, amd, generic, gke, import, intel_gpu, kubevirt, nvidia, rdma_shared,
    smarter, sriov,
};
use std::collections::BTreeSet;

const PAGE: &str = include_str!("../../../docs/importers.md");

/// Keys that are looked up in every file, before its kind is known.
const OF_ANY_FILE: [&str; 8] = [
    "kind",
    "apiVersion",
    "config",
    "config.map",
    "device",
    "groups",
    "SelectorObj",
    "SelectorObjs",
];

#[derive(Debug)]
struct Row<'a> {
    setting: &'a str,
    source: String,
    outcome: &'a str,
}

/// The warnings of a cell, which are in quotes, and the rest of the cell.
fn warnings(cell: &str) -> (Vec<&str>, String) {
    let mut parts = cell.split('“');
    let mut rest = parts.next().unwrap_or_default().to_owned();
    let mut warnings = Vec::new();
    for part in parts {
        let (warning, behind) = part.split_once('”').unwrap_or_else(|| panic!("{cell}"));
        warnings.push(warning);
        rest.push_str(behind);
    }
    (warnings, rest)
}

/// The rows below a heading.
fn rows(peer: &str) -> Vec<Row<'static>> {
    let (_, section) = PAGE.split_once(&format!("\n## `{peer}`\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let frame = section
        .lines()
        .find_map(|line| line.strip_prefix("Examples stand in `")?.strip_suffix("`."))
        .unwrap();
    let row = |line: &'static str| {
        let cells: Vec<&str> =
            line.strip_prefix("| `")?.strip_suffix('|')?.split('|').map(str::trim).collect();
        let [setting, _, _, example, outcome] = cells.as_slice() else { panic!("{line}") };
        let example = example
            .strip_prefix('`')
            .and_then(|example| example.strip_suffix('`'))
            .unwrap_or_else(|| panic!("{line}"));
        let source = if example.starts_with('{') {
            example.to_owned()
        } else {
            frame.replace('…', example)
        };
        Some(Row { setting: setting.strip_suffix('`')?, source, outcome })
    };
    section.lines().filter_map(row).collect()
}

/// The path of a key without indices, as in the tables.
fn plain(path: &str) -> String {
    let mut plain = String::new();
    for part in path.split('[') {
        match part.split_once(']') {
            Some((_, rest)) => plain.push_str(&format!("[]{rest}")),
            None => plain.push_str(part),
        }
    }
    let plain = plain.replace("selectors[].", "selectors.").replace("device[]", "devices[]");
    plain.replace("usbHostDevices[]", "usb[]")
}

/// Warnings that docs/importers.md lists for every file of a plugin.
const OF_EVERY_FILE: [&str; 3] =
    ["device ids change", "no domain is given", "pods that request `akri.sh/"];

fn check_table(peer: Peer, name: &str, keys: &[&str]) {
    let rows = rows(name);
    let listed: BTreeSet<&str> = rows.iter().map(|row| row.setting).collect();
    assert_eq!(
        listed,
        keys.iter().copied().collect(),
        "{name}: the table and the keys that are read"
    );
    let (mut all, mut read) = (BTreeSet::new(), BTreeSet::new());
    for Row { setting, source, outcome } in &rows {
        take_lookups();
        let imported = import(peer, source, None, None);
        let looked_up: BTreeSet<String> = take_lookups().iter().map(|path| plain(path)).collect();
        read.extend(
            looked_up.iter().any(|path| path.eq_ignore_ascii_case(setting)).then_some(*setting),
        );
        // The keys of a manifest are those of Kubernetes.
        if !source.starts_with("{kind: ") {
            all.extend(looked_up);
        }
        let (toml, warnings, wrong) = match &imported {
            Ok(Imported { toml, warnings, wrong }) => (toml.as_str(), warnings.clone(), *wrong > 0),
            Err(error) => (
                "",
                error.warnings.clone(),
                error.warnings.iter().any(|warning| {
                    warning.contains(" is expected") || warning.contains("unknown value")
                }),
            ),
        };
        let details = || format!("{name}: {source}\n{toml}\n{warnings:#?}\n{outcome}");
        let (wanted, rest) = self::warnings(outcome);
        for no in rest.split("no `").skip(1).filter_map(|no| no.split('`').next()) {
            assert!(!toml.contains(no), "{}", details());
        }
        // Required text: code that does not follow a `no`.
        let mut before = "";
        for (n, part) in rest.split('`').enumerate() {
            let is_wanted = n % 2 == 1 && !before.ends_with("no ");
            assert!(!is_wanted || toml.contains(part), "{}", details());
            before = part;
        }
        for wanted in &wanted {
            assert!(warnings.iter().any(|warning| warning.contains(wanted)), "{}", details());
        }
        let unexpected =
            warnings.iter().filter(|warning| !wanted.iter().any(|wanted| warning.contains(wanted)));
        let is_usual = |warning: &str| OF_EVERY_FILE.iter().any(|usual| warning.starts_with(usual));
        let unexpected: Vec<&String> = unexpected.filter(|warning| !is_usual(warning)).collect();
        assert!(unexpected.is_empty(), "{unexpected:?}\n{}", details());
        assert_eq!(outcome.contains("not offered"), imported.is_err(), "{}", details());
        assert_eq!(outcome.contains("wrong value"), wrong, "{}", details());
    }
    assert_eq!(read, listed, "{name}: the keys with an example of their own, and the table");
    let is_above = |path: &str, key: &str| {
        key.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']))
    };
    let is_listed = |path: &str| {
        keys.iter().any(|key| {
            path.eq_ignore_ascii_case(key)
                || is_above(&path.to_ascii_lowercase(), &key.to_ascii_lowercase())
        })
    };
    let is_of_any = |path: &str| {
        OF_ANY_FILE.iter().any(|of| path == *of || path.ends_with(&format!("].{of}")))
            || peer == Peer::IntelGpu && intel_gpu::DEPLOYMENT.contains(&path)
    };
    let unlisted: Vec<&String> =
        all.iter().filter(|path| !is_listed(path) && !is_of_any(path)).collect();
    assert!(unlisted.is_empty(), "{name}: read, and in no table: {unlisted:?}");
}

#[test]
fn the_table_of_nvidias_plugin_is_complete_and_correct() {
    check_table(Peer::Nvidia, "nvidia", nvidia::KEYS);
}

#[test]
fn the_table_of_the_sriov_plugin_is_complete_and_correct() {
    check_table(Peer::Sriov, "sriov", sriov::KEYS);
}

#[test]
fn the_table_of_mellanox_plugin_is_complete_and_correct() {
    check_table(Peer::RdmaShared, "rdma-shared", rdma_shared::KEYS);
}

#[test]
fn the_table_of_squats_plugin_is_complete_and_correct() {
    check_table(Peer::Generic, "generic", generic::KEYS);
}

#[test]
fn the_table_of_smarters_plugin_is_complete_and_correct() {
    check_table(Peer::Smarter, "smarter", smarter::KEYS);
}

#[test]
fn the_table_of_gkes_plugin_is_complete_and_correct() {
    check_table(Peer::Gke, "gke", gke::KEYS);
}

#[test]
fn the_table_of_kubevirts_host_devices_is_complete_and_correct() {
    check_table(Peer::Kubevirt, "kubevirt", kubevirt::KEYS);
}

#[test]
fn the_table_of_amds_gpu_plugin_is_complete_and_correct() {
    check_table(Peer::Amd, "amd", &amd::KEYS);
}

#[test]
fn the_table_of_akris_rules_is_complete_and_correct() {
    check_table(Peer::Akri, "akri", akri::KEYS);
}

#[test]
fn the_table_of_intels_gpu_plugin_is_complete_and_correct() {
    check_table(Peer::IntelGpu, "intel-gpu", &intel_gpu::KEYS);
}
