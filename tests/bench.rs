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

/// Any of the measuring verbs, with places of its own: what it leaves behind is seen.
fn measure(arguments: &[&str]) -> (std::process::Output, Vec<std::ffi::OsString>) {
    let (state, temp) =
        (tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.arg("bench").args(arguments).arg("--state-dir").arg(state.path()).env("TMPDIR", temp.path());
    let output = command.output().unwrap();
    let left = [state.path(), temp.path()].into_iter().flat_map(|dir| dir.read_dir().unwrap()).map(|entry| entry.unwrap().file_name());
    (output, left.collect())
}

/// The document of a measurement that succeeds and leaves nothing behind.
fn document(arguments: &[&str]) -> Value {
    let (output, left) = measure(&[arguments, &["-o", "json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(left.is_empty(), "it left something behind: {left:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn assert_figures(row: &Value, names: &[&str]) {
    for name in names {
        assert!(row[name].as_f64().is_some_and(|figure| figure > 0.0), "{name} of {row}");
    }
}

#[test]
fn a_scan_is_measured_beside_plain_reads_of_the_same_functions() {
    let report = document(&["scan", "--functions=200,300", "--vfs=40", "--rounds=3"]);
    assert_eq!((&report["schema"], &report["rounds"], &report["root"]), (&1.into(), &3.into(), &Value::Null));
    let scans = report["scans"].as_array().unwrap();
    let counts: Vec<_> =
        scans.iter().map(|scan| [&scan["functions"], &scan["vfs"], &scan["floor_files"]].map(|figure| figure.as_u64().unwrap())).collect();
    assert_eq!(counts, [[200, 48, 400], [300, 48, 600]]);
    for scan in scans {
        let names =
            ["devices", "offered", "p50_ms", "p99_ms", "max_ms", "us_per_function", "floor_p50_ms", "floor_us_per_function", "times_floor"];
        assert_figures(scan, &names);
        assert!(["p50_ms", "p99_ms", "max_ms"].map(|name| scan[name].as_f64().unwrap()).is_sorted(), "{scan}");
    }
}

#[test]
fn a_tree_of_another_machine_is_scanned_and_drawn_and_one_without_functions_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    holdfast::sim::hardware::SimNode::create(dir.path()).unwrap();
    let (tree, plot) = (dir.path().to_str().unwrap(), dir.path().join("scan.svg"));
    let report = document(&["scan", "--root", tree, "--rounds=2", "--plot", plot.to_str().unwrap()]);
    assert_eq!((&report["root"], report["scans"].as_array().unwrap().len()), (&tree.into(), 1));
    assert!(std::fs::read_to_string(plot).unwrap().starts_with("<svg"));
    let empty = tempfile::tempdir().unwrap();
    let (output, _) = measure(&["scan", "--root", empty.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("has no PCI functions"));
}

#[test]
fn a_daemon_under_load_and_every_fault_has_the_kubelets_mappings() {
    let arguments = ["soak", "--minutes=0.25", "--grants-per-minute=600", "--pods=16", "--every=1", "--faults-every=2", "--kill"];
    let report = document(&arguments);
    let faults = report["faults"].as_object().unwrap();
    for fault in ["device_gone", "device_back", "kubelet_restart", "stream_end", "reload", "kill"] {
        assert!(faults.contains_key(fault), "{fault} of {faults:?}");
    }
    assert_eq!((&report["differences"], &report["kubelet_would_have_crashed"]), (&Value::Array(Vec::new()), &Value::Null));
    assert_eq!(report["lives"], 2);
    assert_figures(&report, &["minutes", "pods", "grants", "mappings"]);
    let samples = report["samples"].as_array().unwrap();
    let names = ["rss_kib", "anon_kib", "descriptors", "threads", "state_kib", "life"];
    samples.iter().for_each(|sample| assert_figures(sample, &names));
    assert_figures(samples.last().unwrap(), &["minute", "grants", "live_pods", "sleeps_per_second"]);
    for name in ["anon_kib", "descriptors", "threads"] {
        assert!(report["trends_per_hour"].as_object().unwrap().contains_key(name), "{report}");
    }
}

#[test]
fn daemons_of_every_size_are_measured_and_end_with_the_measurement() {
    let report = document(&["scale", "--devices=8,40", "--resources=4", "--vfs=16", "--daemons=1,3", "--idle=1"]);
    for (sheet, sizes) in [("devices", &[8, 40][..]), ("vfs", &[16]), ("daemons", &[1, 3])] {
        let rows = report[sheet].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| row[sheet].as_u64().unwrap()).collect::<Vec<_>>(), sizes);
        let names = ["first_lists_ms", "rss_mib", "anon_mib", "private_mib", "descriptors", "threads", "state_kib"];
        rows.iter().for_each(|row| assert_figures(row, &names));
    }
}

#[test]
fn a_daemon_that_cannot_run_is_an_error_that_says_so() {
    for verb in ["soak", "scale"] {
        let (output, left) = measure(&[verb, "--binary", "/bin/false"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("the private daemon has ended (exit status: 1)"), "{output:?}");
        assert!(left.is_empty(), "it left something behind: {left:?}");
    }
}
