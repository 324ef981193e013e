//! `holdfast doctor`: reports the problems of this node and how to fix them.

use crate::config;
use crate::console::exit::{FAILURE, FINDINGS, Failed, USAGE};
use crate::console::screen::{Screen, Tint};
use crate::console::text::Text;
use crate::console::{Global, block_on, eprint, eprintln, not_printed, print, show};
use crate::doctor::bundle::Bundle;
use crate::doctor::{self, Finding, Level, Redactor, Report, Target};
use crate::host;
use crate::store;
use clap::Args;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// Time limit for each verb that the bundle runs.
const VERB_DEADLINE: Duration = Duration::from_secs(30);
/// Time limit for `journalctl`.
const LOG_DEADLINE: Duration = Duration::from_secs(10);
/// Lines of the systemd journal that the bundle contains.
const LOG_LINES: &str = "2000";

/// As the target of `--bundle`: standard output, since a container may have no writable directory.
const STDOUT: &str = "-";

/// Options of the report and of the bundle.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Also list the checks that found no problem, and those that could not run
    #[arg(long)]
    all: bool,
    /// Write the data for a problem report, without secrets, to this file (a tar, mode 0600), to a
    /// new file in this directory, or to standard output (`-`)
    #[arg(long, value_name = "FILE|DIR")]
    bundle: Option<PathBuf>,
}

/// Examines the node, then prints the report or writes the bundle.
///
/// # Errors
/// [`FINDINGS`] when there is a warning or an error to fix.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let global = &with_paths_of_daemon(global);
    let target =
        Target { roots: global.roots(), config: global.config.clone(), own: "/proc/self".into() };
    if let Some(to) = &options.bundle {
        check_target(to)?;
    }
    let (facts, report) = doctor::examine_node(&target);
    if let Some(to) = &options.bundle {
        let loaded = config::load(global.config.as_deref(), &global.node(None)).ok();
        let grants =
            store::peek(&global.state_dir).map(|recovered| recovered.grants).unwrap_or_default();
        let redactor = Redactor::of(loaded.as_ref(), &grants);
        let bundle = Bundle::collect(&target, &facts, redactor, |words| verb(global, words), log);
        return write_bundle(&bundle, to);
    }
    show(global.output, &report, |report| text(report, options.all, Screen::get()))?;
    if report.is_healthy() { Ok(()) } else { Err(Failed::reported(FINDINGS)) }
}

/// Writes the bundle and lists its contents on standard error, so that the user can review it
/// before sharing it.
fn write_bundle(bundle: &Bundle, to: &Path) -> Result<(), Failed> {
    let cannot =
        |error| Failed::new(FAILURE, format_args!("cannot write `{}`: {error}", to.display()));
    let now = host::now().wall;
    if to == Path::new(STDOUT) {
        bundle.write_to(&mut std::io::stdout().lock(), now).map_err(|error| not_printed(&error))?;
    } else {
        let path = bundle.write(to, now).map_err(cannot)?;
        print(&Text::of_line(format_args!("{}", path.display())))?;
    }
    eprint(&Text::document(&bundle.contents()));
    eprintln(format_args!("check the content of the archive before you share it"));
    Ok(())
}

/// In the DaemonSet's container, process 1 is the daemon. If the user set no `--host-root`, this
/// takes `--host-root=…` from its command line, and `--config=…` unless the user set one.
fn with_paths_of_daemon(global: &Global) -> Global {
    let mut global = global.clone();
    if global.host_root != Path::new("/")
        || std::fs::read_to_string("/proc/1/comm").is_ok_and(|name| name.trim() != "holdfast")
    {
        return global;
    }
    let line = std::fs::read_to_string("/proc/1/cmdline").unwrap_or_default();
    let value_of = |name: &str| {
        line.split('\0')
            .find_map(|argument| argument.strip_prefix("--")?.strip_prefix(name)?.strip_prefix('='))
            .map(PathBuf::from)
    };
    if let Some(root) = value_of("host-root") {
        eprintln(format_args!(
            "using the --host-root of the daemon in this container: {}",
            root.display()
        ));
        global.host_root = root;
    }
    global.config = global.config.or_else(|| value_of("config"));
    global
}

/// Rejects an unusable target before any data is collected.
fn check_target(to: &Path) -> Result<(), Failed> {
    if to == Path::new(STDOUT) && std::io::stdout().is_terminal() {
        return Err(Failed::new(
            USAGE,
            "an archive cannot be written to a terminal; name a file, or \
             use `--bundle - > FILE.tar`",
        ));
    }
    let name = to.to_string_lossy();
    if [".gz", ".tgz", ".xz", ".zst"].iter().any(|ending| name.ends_with(ending)) {
        let why = "the archive is not compressed; name it `.tar`, and compress it afterwards";
        return Err(Failed::new(USAGE, format_args!("cannot write `{name}`: {why}")));
    }
    if to.exists() && !to.is_dir() {
        return Err(Failed::new(
            FAILURE,
            format_args!("cannot write `{name}`: it exists already; name another file"),
        ));
    }
    Ok(())
}

/// The JSON document of a verb of this program. The verb runs in another process, so that it can be
/// killed if it hangs.
fn verb(global: &Global, words: &[&str]) -> Result<Vec<u8>, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.args(words).args(["-o", "json", "--log-format", "text"]);
    for (option, path) in [
        ("--host-root", Some(&global.host_root)),
        ("--kubelet-dir", Some(&global.kubelet_dir)),
        ("--state-dir", Some(&global.state_dir)),
        ("--run-dir", Some(&global.run_dir)),
        ("--config", global.config.as_ref()),
    ] {
        if let Some(path) = path {
            command.arg(option).arg(path);
        }
    }
    output(command, VERB_DEADLINE)
}

/// The latest log lines of the daemon in systemd's journal.
fn log() -> Result<String, String> {
    let mut command = Command::new("journalctl");
    command.args(["-u", "holdfast", "-n", LOG_LINES, "--no-pager", "--quiet"]);
    let text = String::from_utf8_lossy(&output(command, LOG_DEADLINE)?).into_owned();
    if text.trim().is_empty() {
        Err("systemd's journal has no entries of a unit `holdfast`".into())
    } else {
        Ok(text)
    }
}

/// The standard output of a program. A non-zero exit code is no error here: the program may still
/// have printed its document.
fn output(mut command: Command, deadline: Duration) -> Result<Vec<u8>, String> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    command.kill_on_drop(true).stdin(std::process::Stdio::null());
    let ended = block_on(async { timeout(deadline, command.output()).await })
        .map_err(|failed| failed.sentence.unwrap_or_default())?;
    let output = ended.map_err(|_elapsed| format!("`{program}` did not end in time"))?;
    let output = output.map_err(|error| format!("cannot run `{program}`: {error}"))?;
    if output.stdout.is_empty() {
        let last_line =
            String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned();
        return Err(if last_line.is_empty() {
            format!("`{program}` printed nothing ({})", output.status)
        } else {
            last_line
        });
    }
    Ok(output.stdout)
}

fn text(report: &Report, all: bool, screen: Screen) -> Text {
    let mut text = Text::default();
    for finding in report.findings.iter().filter(|finding| all || finding.level != Level::Ok) {
        text += entry(finding, screen);
    }
    let unknown = report.unknown.join(", ");
    if all && !unknown.is_empty() {
        text.line(format_args!("not run, since facts are missing: {unknown}"));
        text.end_line();
    }
    text += summary(report, all, screen);
    text
}

/// Indentation of the sentences of a finding: the width of the longest level.
const INDENT: usize = 9;

fn entry(finding: &Finding, screen: Screen) -> Text {
    let Finding { level, code, on, found, why, todo, command } = finding;
    let tint = match level {
        Level::Error => Tint::Red,
        Level::Warning => Tint::Yellow,
        Level::Note => Tint::Plain,
        Level::Ok => Tint::Green,
    };
    let mut text = Text::default();
    text.paint(screen, tint, &format!("{:<8}", level.as_str()));
    text.put(format_args!(" {code}"));
    if *level == Level::Ok {
        text.end_line();
        return text;
    }
    text.line(format_args!(": {on}"));
    for sentence in [found, *why, todo] {
        text.put(format_args!("{:INDENT$}", ""));
        text.wrap(screen, INDENT, sentence);
        text.end_line();
    }
    if let Some(command) = command {
        text.line(format_args!("{:INDENT$}$ {command}", ""));
    }
    text.end_line();
    text
}

fn summary(report: &Report, all: bool, screen: Screen) -> Text {
    let plural =
        |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let [errors, warnings, notes, fine] =
        [Level::Error, Level::Warning, Level::Note, Level::Ok].map(|level| report.count(level));
    let unknown = report.unknown.len();
    let made = format!("{} passed", plural(fine, "check"));
    let left = if unknown > 0 { format!(", {unknown} could not run") } else { String::new() };
    let hint = if all || fine + unknown == 0 { "" } else { " (--all shows them)" };
    let found = if errors + warnings + notes == 0 {
        "no problems".to_owned()
    } else {
        format!(
            "{}, {}, {}",
            plural(errors, "error"),
            plural(warnings, "warning"),
            plural(notes, "note")
        )
    };
    let mut text = Text::default();
    text.wrap(screen, 0, &format!("{found}; {made}{left}{hint}"));
    text.end_line();
    if errors + warnings > 0 {
        text.line(format_args!("docs/doctor.md describes each code"));
    }
    text
}
