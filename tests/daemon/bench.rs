//! The benchmark verbs run and print the documented fields. Figures of a test machine mean nothing,
//! so none is asserted.

use crate::common::{Node, name, offered, run, soon, until_blocking};
use holdfast::domain::Durability;
use holdfast::host;
use holdfast::lab::sim::kubelet::EventKind;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

fn place() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn command(verb: &str, state_dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(["bench", verb, "--state-dir"]).arg(state_dir).args(arguments);
    command
}

/// The output of a measurement. The tests' own directory may be a tmpfs.
fn bench(verb: &str, state_dir: &Path, arguments: &[&str]) -> String {
    let output = command(verb, state_dir, arguments).arg("--allow-tmpfs").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks a distribution of `count` durations with sorted quantiles.
fn is_distribution(value: &Value, count: u64) {
    assert_eq!(value["count"], count, "{value}");
    let quantiles = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"]
        .map(|name| value[name].as_f64().unwrap());
    assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{value}");
}

fn nothing_is_left(dir: &Path) {
    let left: Vec<_> = dir.read_dir().unwrap().collect();
    assert!(left.is_empty(), "it left something behind: {left:?}");
}

#[test]
fn allocates_are_measured_with_their_floors() {
    let dir = place();
    for (durability, concurrency) in [("power-loss", 1), ("process-crash", 4)] {
        let arguments = [
            "--calls=50",
            "--warm-up=5",
            "--devices=2",
            "-o",
            "json",
            "--durability",
            durability,
            "--concurrency",
        ];
        let json = bench(
            "allocate",
            &dir.path().join("not-made-yet"),
            &[&arguments[..], &[&concurrency.to_string()]].concat(),
        );
        let report: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&report["calls"], &report["concurrency"], &report["durability"], &report["pause_ms"]),
            (
                &50.into(),
                &concurrency.into(),
                &durability.into(),
                &if concurrency == 1 { 10.into() } else { Value::Null }
            )
        );
        is_distribution(&report, 50);
        assert!(report["per_second"].as_f64().unwrap() > 0.0);
        for floor in ["grpc_empty", "append_fdatasync", "rewrite_fsync", "rewrite_fsync_dir"] {
            is_distribution(&report["floor"][floor], 50);
            assert_eq!(
                report["floor"][format!("{floor}_p50_us")],
                report["floor"][floor]["p50_us"],
                "{json}"
            );
        }
    }
    nothing_is_left(dir.path());
}

#[test]
fn the_text_output_has_a_table_and_a_figure() {
    let (dir, figure) = (place(), place());
    let figure = figure.path().join("allocate.svg");
    let arguments = [
        "--calls=10",
        "--warm-up=5",
        "--durability=power-loss",
        "--plot",
        figure.to_str().unwrap(),
    ];
    let table = bench("allocate", dir.path(), &arguments);
    assert!(
        table.starts_with("CALL")
            && table.contains("× (1.8 × (append + fdatasync) + an empty call"),
        "{table}"
    );
    assert!(bench("allocate", dir.path(), &["--calls=2", "--warm-up=1", "-o", "ascii"]).is_ascii());
    let svg = std::fs::read_to_string(figure).unwrap();
    assert!(
        svg.starts_with("<svg ")
            && svg.ends_with("</svg>\n")
            && svg.contains(">file anew + fsync + rename</text>"),
        "{svg}"
    );
}

#[test]
fn an_unwritable_figure_fails_before_the_measurement() {
    // No daemon could be set up in this directory.
    let output =
        command("restart", Path::new("/proc"), &["--allow-tmpfs", "--plot", "/nowhere/figure.svg"])
            .output()
            .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("cannot write the figure to `/nowhere/figure.svg`"),
        "{}",
        said(&output)
    );
}

#[test]
fn a_running_plugin_is_measured_on_its_own_socket_and_the_caller_is_warned() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &name("example.com/gpu"), 4).await;
        daemon.logged("ready").await;
        let endpoint = kubelet.view(|view| {
            let registered =
                view.last(|kind| matches!(kind, EventKind::Registered { .. })).unwrap();
            let EventKind::Registered { endpoint, .. } = &registered.kind else { unreachable!() };
            node.path("kubelet/device-plugins").join(endpoint)
        });
        let dir = place();
        let mut bench = command(
            "allocate",
            dir.path(),
            &["--allow-tmpfs", "--calls=10", "--warm-up=2", "-o", "json", "--endpoint"],
        );
        bench.arg(&endpoint);
        let output =
            soon("the measurement", tokio::task::spawn_blocking(move || bench.output().unwrap()))
                .await
                .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert!(
            said(&output).contains("12 Allocates go to the living plugin"),
            "{}",
            said(&output)
        );
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        is_distribution(&report, 10);
        assert_eq!((&report["durability"], &report["endpoint"]), (&Value::Null, &json!(endpoint)));
        assert_eq!(node.grants().len(), 12, "they are in its books");
        nothing_is_left(dir.path());

        let absent =
            command("allocate", dir.path(), &["--allow-tmpfs", "--endpoint", "/nowhere.sock"])
                .output()
                .unwrap();
        assert_eq!(absent.status.code(), Some(1));
        assert!(said(&absent).contains("no process serves `/nowhere.sock`"), "{}", said(&absent));
    });
}

#[test]
fn a_tmpfs_is_refused_unless_it_is_wanted() {
    let memory = Path::new("/dev/shm");
    if !host::is_tmpfs(memory) {
        crate::common::inside::say("SKIPPED: /dev/shm is no tmpfs");
        return;
    }
    let dir = tempfile::tempdir_in(memory).unwrap();
    for verb in ["allocate", "restart", "upgrade"] {
        let refused = command(verb, dir.path(), &[]).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
        assert!(
            said(&refused).contains("is on a tmpfs") && said(&refused).contains("--allow-tmpfs"),
            "{}",
            said(&refused)
        );
    }
    bench("allocate", dir.path(), &["--calls=5", "--warm-up=1"]);
    nothing_is_left(dir.path());
}

#[test]
fn restarts_are_compared_with_a_minimal_plugin() {
    let dir = place();
    // An operator's `TMPDIR` may be too long for a socket's path.
    let long = dir.path().join("a".repeat(100));
    std::fs::create_dir(&long).unwrap();
    let mut restart = command(
        "restart",
        dir.path(),
        &["--allow-tmpfs", "--rounds=2", "--resources=2", "--devices=3", "-o", "json"],
    );
    let output = restart.env("TMPDIR", &long).output().unwrap();
    std::fs::remove_dir(long).unwrap();
    let json = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{}", said(&output)));
    assert_eq!(
        (&report["rounds"], &report["resources"], &report["devices"]),
        (&json!(2), &json!(2), &json!(3))
    );
    for side in [&report, &report["floor"]] {
        is_distribution(&side["registered"], 2);
        is_distribution(&side["listed"], 2);
    }
    assert!(report["ratio"]["listed_p99"].as_f64().unwrap() > 0.0, "{json}");
    nothing_is_left(dir.path());
}

#[test]
fn an_upgrade_is_measured_by_its_effects_on_the_kubelet() {
    let dir = place();
    let arguments =
        ["--rounds=1", "--devices=4", "-o", "json", "--durability", Durability::PowerLoss.as_str()];
    let json = bench("upgrade", dir.path(), &arguments);
    let report: Value = serde_json::from_str(&json).unwrap();
    // The number in half a second without load depends on the machine.
    let answered = report["during"]["allocate"]["count"].as_u64().unwrap();
    is_distribution(&report["during"]["allocate"], answered);
    for part in ["before", "during", "after"] {
        assert_eq!(report[part]["longest_silence"]["count"], 1, "{part}: {json}");
    }
    is_distribution(&report["handover"], 1);
    assert_eq!(report["longest_silence_us"], report["during"]["longest_silence"]["max_us"]);
    assert_eq!(
        (&report["refused"], &report["lists_that_lost_a_device"]),
        (&json!(0), &json!(0)),
        "{json}"
    );
    assert_eq!(
        report["moments_without_devices"],
        json!({ "count": 0, "p50_us": null, "p90_us": null, "p99_us": null, "p999_us": null, "max_us": null })
    );
    assert!(report["registers"].as_u64().unwrap() >= 1, "the new instance: {json}");
    nothing_is_left(dir.path());
}

#[test]
fn a_restart_in_place_is_measured_by_how_long_the_kubelet_has_no_devices() {
    let dir = place();
    let json =
        bench("upgrade", dir.path(), &["--in-place", "--rounds=2", "--devices=4", "-o", "json"]);
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&report["rounds"], &report["devices"]), (&json!(2), &json!(4)));
    is_distribution(&report["moments_without_devices"], 2);
    nothing_is_left(dir.path());
}

#[test]
fn an_interrupted_benchmark_leaves_nothing_behind() {
    let dir = place();
    let bench = command("restart", dir.path(), &["--allow-tmpfs", "--rounds=10000"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let has_ledger =
        || dir.path().read_dir().unwrap().flatten().any(|own| own.path().join("journal").exists());
    until_blocking("its ledger", has_ledger, |has| *has);
    kill(Pid::from_raw(i32::try_from(bench.id()).unwrap()), Signal::SIGINT).unwrap();
    let output = bench.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), said(&output).as_str()),
        (Some(1), "holdfast: interrupted\n")
    );
    nothing_is_left(dir.path());
}

#[test]
fn scan_and_daemon_benchmarks_can_be_interrupted_too() {
    let verbs: [(&[&str], Option<i32>); 3] = [
        (&["scan", "--functions=560", "--rounds=100000"], Some(1)),
        (&["scale", "--devices=64", "--resources=1", "--idle=600"], Some(1)),
        // It prints its results so far.
        (&["soak", "--minutes=60"], Some(0)),
    ];
    for (arguments, code) in verbs {
        let (state, temp) =
            (place(), tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command
            .arg("bench")
            .args(arguments)
            .arg("--state-dir")
            .arg(state.path())
            .env("TMPDIR", temp.path());
        let bench = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Waits for its signal handler: an earlier signal would end it as any process.
        let listens = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", bench.id())).unwrap();
            let caught =
                status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).unwrap().to_owned();
            let made = temp.path().read_dir().unwrap().count() > 0;
            made && u64::from_str_radix(&caught, 16).unwrap() & (1 << (Signal::SIGTERM as u64 - 1))
                != 0
        };
        until_blocking("that it has begun", listens, |listens| *listens);
        kill(Pid::from_raw(i32::try_from(bench.id()).unwrap()), Signal::SIGTERM).unwrap();
        let output = bench.wait_with_output().unwrap();
        assert_eq!(output.status.code(), code, "{arguments:?}: {}", said(&output));
        nothing_is_left(state.path());
        nothing_is_left(temp.path());
    }
}

/// Any benchmark verb, in separate directories, so that leftover files are noticed.
fn measure(arguments: &[&str]) -> (Output, Vec<std::ffi::OsString>) {
    let (state, temp) = (
        tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap(),
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command
        .arg("bench")
        .args(arguments)
        .arg("--state-dir")
        .arg(state.path())
        .env("TMPDIR", temp.path());
    let output = command.output().unwrap();
    let left = [state.path(), temp.path()]
        .into_iter()
        .flat_map(|dir| dir.read_dir().unwrap())
        .map(|entry| entry.unwrap().file_name());
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
fn a_scan_is_compared_with_plain_reads_of_the_same_functions() {
    let report = document(&["scan", "--functions=200,300", "--vfs=40", "--rounds=3"]);
    assert_eq!(
        (&report["schema"], &report["rounds"], &report["root"]),
        (&1.into(), &3.into(), &Value::Null)
    );
    let scans = report["scans"].as_array().unwrap();
    let counts: Vec<_> = scans
        .iter()
        .map(|scan| {
            [&scan["functions"], &scan["vfs"], &scan["floor_files"]]
                .map(|figure| figure.as_u64().unwrap())
        })
        .collect();
    assert_eq!(counts, [[200, 48, 200], [300, 48, 300]]);
    for scan in scans {
        let names = [
            "devices",
            "offered",
            "p50_ms",
            "p99_ms",
            "max_ms",
            "us_per_function",
            "floor_p50_ms",
            "floor_us_per_function",
            "times_floor",
        ];
        assert_figures(scan, &names);
        assert!(
            ["p50_ms", "p99_ms", "max_ms"].map(|name| scan[name].as_f64().unwrap()).is_sorted(),
            "{scan}"
        );
    }
}

#[test]
fn a_tree_of_another_machine_is_scanned_and_an_empty_one_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    holdfast::lab::sim::hardware::SimNode::create(dir.path()).unwrap();
    let (tree, plot) = (dir.path().to_str().unwrap(), dir.path().join("scan.svg"));
    let report =
        document(&["scan", "--root", tree, "--rounds=2", "--plot", plot.to_str().unwrap()]);
    assert_eq!((&report["root"], report["scans"].as_array().unwrap().len()), (&tree.into(), 1));
    assert!(std::fs::read_to_string(plot).unwrap().starts_with("<svg"));
    let empty = tempfile::tempdir().unwrap();
    let (output, _) = measure(&["scan", "--root", empty.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("has no PCI functions"));
}

#[test]
fn a_daemon_under_load_and_faults_agrees_with_the_kubelets_mappings() {
    let arguments = [
        "soak",
        "--minutes=0.25",
        "--grants-per-minute=600",
        "--pods=16",
        "--every=1",
        "--faults-every=2",
        "--kill",
    ];
    let report = document(&arguments);
    let faults = report["faults"].as_object().unwrap();
    for fault in ["device_gone", "device_back", "kubelet_restart", "stream_end", "reload", "kill"] {
        assert!(faults.contains_key(fault), "{fault} of {faults:?}");
    }
    assert_eq!(
        (&report["differences"], &report["kubelet_would_have_crashed"]),
        (&Value::Array(Vec::new()), &Value::Null)
    );
    assert_eq!(report["lives"], 2);
    assert_figures(&report, &["minutes", "pods", "grants", "mappings"]);
    let samples = report["samples"].as_array().unwrap();
    let names = ["rss_kib", "anon_kib", "descriptors", "threads", "state_kib", "life"];
    samples.iter().for_each(|sample| assert_figures(sample, &names));
    assert_figures(
        samples.last().unwrap(),
        &["minute", "grants", "live_pods", "sleeps_per_second"],
    );
    for name in ["anon_kib", "descriptors", "threads"] {
        assert!(report["trends_per_hour"].as_object().unwrap().contains_key(name), "{report}");
    }
}

#[test]
fn daemons_of_every_size_are_measured_and_end_with_the_measurement() {
    let report = document(&[
        "scale",
        "--devices=8,40",
        "--resources=4",
        "--vfs=16",
        "--daemons=1,3",
        "--idle=1",
    ]);
    for (sheet, sizes) in [("devices", &[8, 40][..]), ("vfs", &[16]), ("daemons", &[1, 3])] {
        let rows = report[sheet].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| row[sheet].as_u64().unwrap()).collect::<Vec<_>>(), sizes);
        let names = [
            "first_lists_ms",
            "rss_mib",
            "anon_mib",
            "private_mib",
            "descriptors",
            "threads",
            "state_kib",
        ];
        rows.iter().for_each(|row| assert_figures(row, &names));
    }
}

#[test]
fn a_daemon_that_cannot_run_is_reported_as_an_error() {
    for verb in ["soak", "scale"] {
        let (output, left) = measure(&[verb, "--binary", "/bin/false"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            String::from_utf8_lossy(&output.stderr)
                .contains("the private daemon exited (exit status: 1)"),
            "{output:?}"
        );
        assert!(left.is_empty(), "it left something behind: {left:?}");
    }
}
