//! The measuring verbs run and print what they promise. Figures of a test machine say nothing, so none is judged.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use serde_json::Value;
use std::path::Path;
use std::process::Command;

fn bench(state_dir: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    let output = command.args(["bench", "allocate", "--state-dir"]).arg(state_dir).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn allocates_are_measured_with_their_floors() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (durability, concurrency) in [("power-loss", 1), ("process-crash", 4)] {
        let arguments = ["--calls=50", "--warm-up=5", "--devices=2", "-o", "json", "--durability", durability, "--concurrency"];
        let json = bench(&dir.path().join("not-made-yet"), &[&arguments[..], &[&concurrency.to_string()]].concat());
        let report: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&report["calls"], &report["concurrency"], &report["durability"]),
            (&50.into(), &concurrency.into(), &durability.into())
        );
        let us = |value: &Value| value.as_f64().filter(|us| *us > 0.0).unwrap_or_else(|| panic!("{json}"));
        let quantiles = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"].map(|name| us(&report[name]));
        assert!(quantiles.is_sorted(), "{json}");
        us(&report["per_second"]);
        us(&report["floor"]["grpc_empty_p50_us"]);
        us(&report["floor"]["append_fdatasync_p50_us"]);
    }
    let left: Vec<_> = dir.path().read_dir().unwrap().collect();
    assert!(left.is_empty(), "it left something behind: {left:?}");
}

#[test]
fn people_get_a_table() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let table = bench(dir.path(), &["--calls=10", "--warm-up=5", "--durability=power-loss"]);
    assert!(table.starts_with("ALLOCATE") && table.contains("the sum of both"), "{table}");
}
