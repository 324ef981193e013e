//! `holdfast demo` as an operator runs it: it passes, quickly, and detects every step that is
//! broken deliberately.

use nix::pty::{Winsize, openpty};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The steps by the names under which they fail, with the beginning of a claim that each makes.
const STEPS: [(&str, &str); 9] = [
    ("devices", "ok  every device is found once"),
    ("registration", "ok  the kubelet counts every device as allocatable"),
    ("pods", "ok  every grant is on disk"),
    ("kubelet-restart", "ok  every pod survives"),
    ("actor-death", "ok  no stream of the kubelet ended"),
    ("device-failure", "ok  the device is unhealthy, with the reason"),
    ("device-return", "ok  the device becomes healthy without an operator"),
    ("daemon-restart", "ok  the new daemon has lost nothing"),
    ("release", "ok  nothing was released without proof"),
];

/// Runs the demo with a separate temporary directory, and checks that nothing stays in it.
fn demo(arguments: &[&str]) -> Output {
    // A short path, since sockets are below it.
    let temp = tempfile::Builder::new().prefix("d").tempdir_in("/tmp").unwrap();
    let output = command(arguments, temp.path()).output().unwrap();
    let left: Vec<_> =
        std::fs::read_dir(temp.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    output
}

fn command(arguments: &[&str], temp: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    // The demo is a race with the kubelet. The other tests of this machine must not make it lose.
    command
        .args(["demo", "--admit-after", "1000"])
        .args(arguments)
        .env("TMPDIR", temp)
        .env_remove("HOLDFAST_LOG")
        .stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_demo_passes() {
    let began = Instant::now();
    let output = demo(&[]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(began.elapsed() < Duration::from_secs(15));
    assert_eq!(err, "", "no noise");
    for (step, claim) in STEPS {
        assert!(out.contains(claim), "{step}: {claim}\n{out}");
    }
    for number in 1..=STEPS.len() {
        assert!(
            out.lines().any(|line| line.starts_with(&format!("{number}  "))),
            "step {number}\n{out}"
        );
    }
    assert!(out.contains("train-0/stage-data, train-0/trainer"), "{out}");
    assert!(out.contains("all of them hold"), "{out}");
    assert!(!out.contains("FAILED") && !out.contains('\x1b'), "{out}");
    let long: Vec<_> =
        out.lines().filter(|line| line.chars().count() > 100 || line.ends_with(' ')).collect();
    assert!(long.is_empty(), "{long:#?}");
}

#[test]
fn on_an_80_column_terminal_lines_break_between_words() {
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).unwrap();
    let temp = tempfile::Builder::new().prefix("d").tempdir_in("/tmp").unwrap();
    let mut child = command(&[], temp.path())
        .env("NO_COLOR", "1")
        .stdout(terminal.slave)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = Vec::new();
    // A terminal without a writer is an error to its reader.
    drop(File::from(terminal.master).read_to_end(&mut out));
    let out = text(&out);
    assert!(child.wait().unwrap().success(), "{out}");
    let long: Vec<_> = out.lines().filter(|line| line.trim_end().chars().count() > 80).collect();
    assert!(long.is_empty() && out.contains("all of them hold"), "{long:#?}\n{out}");
    assert!(
        out.contains("\nGPU-5ca1ab1e-0000-4000-8000-000000000007  late-0/train"),
        "the output shows which container holds a GPU: {out}"
    );
}

#[test]
fn a_long_temporary_directory_works() {
    let temp = tempfile::tempdir().unwrap();
    let long = temp
        .path()
        .join("a-directory-whose-name-leaves-no-room-for-the-path-of-a-socket".repeat(2));
    std::fs::create_dir(&long).unwrap();
    let output = command(&[], &long).output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn a_closed_standard_error_does_not_end_the_demo() {
    let temp = tempfile::Builder::new().prefix("d").tempdir_in("/tmp").unwrap();
    let mut command = command(&[], temp.path());
    let mut child = command
        .env("HOLDFAST_LOG", "debug")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stdout));
}

/// One broken step: the demo names the failed claim, its expected and its actual value, and
/// exits with an error.
fn broken_step(step: &str) {
    let output = demo(&["--break", step]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{out}{err}");
    assert!(err.contains(&format!("the demo's claim `{step}` does not hold")), "{out}{err}");
    let failed = out.lines().skip_while(|line| !line.contains("FAILED"));
    let after: Vec<&str> = failed.skip(1).collect();
    assert!(after.first().is_some_and(|line| line.trim_start().starts_with("expected")), "{out}");
    assert!(after.iter().any(|line| line.trim_start().starts_with("seen")), "{out}");
    assert!(!out.contains("all of them hold"), "{out}");
}

macro_rules! every_broken_step_is_detected {
    ($($name:ident: $step:literal),* $(,)?) => {
        $(#[test] fn $name() { broken_step($step); })*

        #[test]
        fn every_step_has_a_test() {
            assert_eq!([$($step),*], STEPS.map(|(step, _)| step));
            let output = demo(&["--break", "nothing"]);
            let (steps, err) = (STEPS.map(|(step, _)| step).join(", "), text(&output.stderr));
            assert!(err.contains(&format!("[possible values: {steps}]")), "{err}");
        }
    };
}

every_broken_step_is_detected! {
    devices: "devices",
    registration: "registration",
    pods: "pods",
    kubelet_restart: "kubelet-restart",
    actor_death: "actor-death",
    device_failure: "device-failure",
    device_return: "device-return",
    daemon_restart: "daemon-restart",
    release: "release",
}
