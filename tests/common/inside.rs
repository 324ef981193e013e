//! Mounts in a separate namespace: they end with the test in every case.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Set in the inner run: its directory.
const INSIDE: &str = "HOLDFAST_INSIDE";
/// The file that an inner run leaves in its directory, below its own mounts. It shows that the test
/// ran: a run without any test succeeds too.
const RAN: &str = "ran";

/// Prints at once: the harness would hide the text.
pub(crate) fn say(text: impl std::fmt::Display) {
    // When standard error is closed, the text is dropped.
    drop(writeln!(std::io::stderr(), "{text}"));
}

/// Runs a program to its end.
pub(crate) fn command(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Whether the program (by name) or the file (by absolute path) exists.
pub(crate) fn has_program(need: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if need.starts_with('/') {
        Path::new(need).exists()
    } else {
        std::env::split_paths(&path).any(|dir| dir.join(need).is_file())
    }
}

/// Runs `test` of this binary again with private mounts, and returns its directory there, which is
/// in memory. Outside it returns `None`, after the inner run has been checked, or after a SKIPPED
/// line.
pub(crate) fn inside(test: &str, needs: &[&str]) -> Option<PathBuf> {
    inside_of(test, needs, &[])
}

/// The same with a private network too: its interfaces end with it, and its `/sys` shows that
/// network.
pub(crate) fn inside_a_network(test: &str, needs: &[&str]) -> Option<PathBuf> {
    let needs: Vec<&str> = needs.iter().chain(&["ip"]).copied().collect();
    let dir = inside_of(test, &needs, &["--net"])?;
    command(Command::new("mount").args(["-t", "sysfs", "sysfs", "/sys"]));
    command(Command::new("ip").args(["link", "set", "lo", "up"]));
    Some(dir)
}

fn inside_of(test: &str, needs: &[&str], also: &[&str]) -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os(INSIDE).map(PathBuf::from) {
        std::fs::write(dir.join(RAN), test).unwrap();
        command(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&dir));
        return Some(dir);
    }
    let missing: Vec<_> =
        needs.iter().chain(&["unshare"]).filter(|need| !has_program(need)).collect();
    if !super::is_root() || !missing.is_empty() {
        say(format_args!(
            "SKIPPED: {test}: only root can have mounts and networks of its own, with {needs:?}; missing: {missing:?}"
        ));
        return None;
    }
    let dir = tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap();
    let unshare = [&["--mount", "--propagation", "private"], also].concat();
    // The kernel may forbid an operation that root usually has.
    let allowed = Command::new("unshare")
        .args(&unshare)
        .args(["mount", "-t", "tmpfs", "tmpfs"])
        .arg(dir.path())
        .output()
        .unwrap();
    if !allowed.status.success() {
        say(format_args!("SKIPPED: {test}: {}", String::from_utf8_lossy(&allowed.stderr).trim()));
        return None;
    }
    let mut inner = Command::new("unshare");
    inner
        .args(&unshare)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, dir.path());
    // sled panics on some damaged files, and each backtrace takes half a second.
    let status = inner.env("RUST_BACKTRACE", "0").stdin(Stdio::null()).status().unwrap();
    assert!(status.success(), "the inner run failed; its output is above");
    assert!(
        dir.path().join(RAN).exists(),
        "this binary has no test `{test}`: a name begins with its module"
    );
    None
}
