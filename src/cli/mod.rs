//! The command line: verbs, output and exit codes. Results go to standard output, everything else
//! to standard error.

pub mod configuration;
pub mod device;
pub mod discover;
pub mod doctor;
pub mod document;
pub mod explain;
pub mod found;
pub mod handover;
pub mod history;
#[cfg(feature = "kubectl")]
pub mod kubectl;
#[cfg(any(test, not(all(feature = "lab", feature = "kubectl"))))]
mod lab_command;
pub mod ledger;
#[cfg(all(test, feature = "lab", feature = "kubectl"))]
mod manual_tests;
pub mod migrate;
pub mod query;
pub mod release;
pub mod run;
pub mod slices;
pub mod source;
pub mod status;
pub mod topology;
pub mod watch;
pub mod when;
pub mod who;

use crate::console::exit::{self, Failed};
use crate::console::text::Text;
use crate::console::{Global, Output, eprint, not_printed, screen};
use crate::host::private::keep_files_private;
use crate::host::{NVML_PROCESS, serve_nvml};
#[cfg(feature = "lab")]
use crate::lab::{bench, demo};
use crate::telemetry::logging;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Offer the devices of a Kubernetes node to the kubelet, and record durably which container holds
/// each device.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten, next_help_heading = "Options of every verb")]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 usage, 3 configuration, 4 kubelet directory, 5 state directory, \
                          6 already running, 7 an actor died too often, 8 `who` found no holder, 9 `config import` left out wrong values, \
                          10 `doctor` found a problem, 11 limits of the process, \
                          12 `kubectl`: some nodes did not answer, 13 `explain` knows no such name.";

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the daemon
    Run(run::Options),
    /// Demonstrate Holdfast on a simulated node with a simulated kubelet; needs no privileges and
    /// no hardware
    #[cfg(feature = "lab")]
    Demo(demo::Options),
    /// Demonstrate Holdfast on a simulated node with a simulated kubelet (package holdfast-lab)
    #[cfg(not(feature = "lab"))]
    Demo(lab_command::Arguments),
    /// List the devices of this node
    Discover(discover::Options),
    /// Check this node and report each problem with its fix; or collect the data for a problem
    /// report
    Doctor(doctor::Options),
    /// Draw the node: NUMA nodes, host bridges, switches, devices with their health and holders
    Topology(topology::Options),
    /// Show the state of the running daemon
    Status(status::Options),
    /// Show which container holds which device, or the holder of one device
    Who(who::Options),
    /// Explain a device, a pod or a claim: what is known, why, and what happens next
    Explain(explain::Options),
    /// Show past and present grants: who held which device, and when
    History(history::Options),
    /// Show the health of devices; cordon or uncordon a device
    #[command(subcommand)]
    Device(device::Verb),
    /// Release the devices of a `ResourceClaim` that has ended and is still held
    Release(release::Options),
    /// Hand over from the running daemon to this binary without a failed Allocate; use it after an
    /// upgrade
    Handover,
    /// Check, show and compare configurations; import one from another plugin
    #[command(subcommand)]
    Config(configuration::Verb),
    /// Check a switch from another device plugin; move resources between the device plugin and
    /// Dynamic Resource Allocation
    #[command(subcommand)]
    Migrate(migrate::Verb),
    /// Export, import or verify the ledger
    #[command(subcommand)]
    Ledger(ledger::Verb),
    /// Ask all or selected nodes of a cluster, from a workstation; the same as `kubectl holdfast`
    #[cfg(feature = "kubectl")]
    Kubectl(kubectl::Options),
    /// Ask all or selected nodes of a cluster, from a workstation (package holdfast-lab)
    #[cfg(not(feature = "kubectl"))]
    Kubectl(lab_command::Arguments),
    /// Run benchmarks
    #[cfg(feature = "lab")]
    #[command(subcommand)]
    Bench(bench::Verb),
    /// Run benchmarks (package holdfast-lab)
    #[cfg(not(feature = "lab"))]
    Bench(lab_command::Arguments),
}

/// The complete command line, from which `examples/manual.rs` generates manual pages and
/// completions.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// The name of kubectl's plugin. kubectl runs the program of this name in PATH for `kubectl
/// holdfast`.
const PLUGIN: &str = "kubectl-holdfast";

/// Ask the daemons of all or selected nodes of a cluster.
#[cfg(feature = "kubectl")]
#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    bin_name = "kubectl holdfast",
    version,
    max_term_width = 100,
    after_help = EXIT_CODES
)]
struct Plugin {
    #[command(flatten, next_help_heading = "Options of every verb")]
    global: Global,
    #[command(flatten)]
    options: kubectl::Options,
}

/// Whether this program was called as kubectl's plugin.
fn is_plugin(program: Option<&OsString>) -> bool {
    cfg!(feature = "kubectl")
        && program.and_then(|program| Path::new(program).file_name()).is_some_and(|it| it == PLUGIN)
}

/// Parses the command line. As kubectl's plugin, this program is the verb `kubectl`.
fn parse(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    #[cfg(feature = "kubectl")]
    if is_plugin(arguments.first()) {
        let Plugin { global, options } = Plugin::try_parse_from(arguments)?;
        return Ok(Cli { global, verb: Verb::Kubectl(options) });
    }
    Cli::try_parse_from(arguments)
}

/// The help of this program as it was called.
fn help(is_plugin: bool) -> String {
    #[cfg(feature = "kubectl")]
    if is_plugin {
        return Plugin::command().render_help().to_string();
    }
    let _only_with_the_feature = is_plugin;
    command().render_help().to_string()
}

/// Parses the command line and runs its verb.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.first().is_some_and(|name| name == NVML_PROCESS) {
        return serve_nvml();
    }
    let is_plugin = is_plugin(arguments.first());
    let Cli { global, verb } = match parse(&arguments) {
        // Without a verb, print the help too; the exit code is that of a usage error.
        Err(error) if error.kind() == ErrorKind::MissingSubcommand => {
            eprint(&Text::document(&help(is_plugin)));
            return ExitCode::from(exit::USAGE);
        }
        Ok(cli) => cli,
        // `--help` and `--version` succeed. A verb without its subcommand prints help and is a
        // usage error.
        Err(error)
            if !error.use_stderr()
                || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            let printed = error.print().map_err(|error| not_printed(&error));
            return if error.use_stderr() {
                ExitCode::from(exit::USAGE)
            } else {
                exit::end(printed)
            };
        }
        Err(error) => {
            let sentence = usage(&error.to_string(), &called(&arguments, is_plugin));
            return exit::end(Err(Failed::new(exit::USAGE, sentence)));
        }
    };
    if global.output == Output::Svg && !matches!(verb, Verb::Topology(_)) {
        return exit::end(Err(Failed::new(
            exit::USAGE,
            "only `holdfast topology` supports `-o svg`; use `-o table` or `-o json`",
        )));
    }
    if let Err(failed) = check_host_root(&global.host_root) {
        return exit::end(Err(failed));
    }
    screen::init(global.color, global.output);
    // Pictures may be read by other users. All other verbs create files for their owner only (umask
    // 077).
    if !matches!(verb, Verb::Topology(_) | Verb::Bench(_) | Verb::Demo(_)) {
        keep_files_private();
    }
    let is_log_off = matches!(verb, Verb::Demo(_) | Verb::Bench(_));
    logging::init(global.log_format, if is_log_off { "off" } else { "info" });
    exit::end(match verb {
        Verb::Run(options) => run::run(&global, &options),
        Verb::Handover => handover::run(&global),
        #[cfg(feature = "lab")]
        Verb::Demo(options) => demo::run(&options),
        #[cfg(feature = "lab")]
        Verb::Bench(verb) => bench::run(&global, &verb),
        #[cfg(not(feature = "lab"))]
        Verb::Demo(_) => lab_command::run("demo"),
        #[cfg(not(feature = "lab"))]
        Verb::Bench(_) => lab_command::run("bench"),
        #[cfg(feature = "kubectl")]
        Verb::Kubectl(options) => kubectl::run(&global, &options),
        #[cfg(not(feature = "kubectl"))]
        Verb::Kubectl(_) => lab_command::run("kubectl"),
        Verb::Discover(options) if options.slices => {
            slices::run(&global, options.node_name.as_deref())
        }
        Verb::Discover(options) => discover::run(&global, options.all),
        Verb::Doctor(options) => doctor::run(&global, &options),
        Verb::Topology(options) => topology::run(&global, &options),
        Verb::Status(options) => status::run(&global, &options),
        Verb::Who(options) => who::run(&global, &options),
        Verb::Explain(options) => explain::run(&global, &options),
        Verb::History(options) => history::run(&global, &options),
        Verb::Device(verb) => device::run(&global, &verb),
        Verb::Release(options) => release::run(&global, &options),
        Verb::Config(verb) => configuration::run(&global, &verb),
        Verb::Migrate(verb) => migrate::run(&global, &verb),
        Verb::Ledger(verb) => ledger::run(&global, &verb),
    })
}

/// clap's error report as one line: the problem, a suggestion if there is one, and a pointer to
/// `--help`.
fn usage(report: &str, program: &str) -> String {
    let mut paragraphs = report
        .split("\n\n")
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let problem = paragraphs.next().unwrap_or_default();
    let tip = paragraphs
        .find_map(|paragraph| paragraph.strip_prefix("tip: ").map(|tip| format!("; {tip}")));
    format!(
        "{}{}; see `{program} --help`",
        problem.trim_start_matches("error: "),
        tip.unwrap_or_default(),
    )
}

/// The program and the verb of a command line, which may have errors: `holdfast device cordon`.
fn called(arguments: &[OsString], is_plugin: bool) -> String {
    let (mut called, root) = ("holdfast".to_owned(), command());
    let mut command = &root;
    if is_plugin {
        called.insert_str(0, "kubectl ");
        command = root.find_subcommand("kubectl").unwrap_or(&root);
    }
    for word in arguments.iter().skip(1).filter_map(|word| word.to_str()) {
        if let Some(verb) = command.find_subcommand(word) {
            called = format!("{called} {word}");
            command = verb;
        }
    }
    called
}

/// Fails if the host's root is no directory: a scan would find no device there, which would look
/// like a node without devices.
fn check_host_root(path: &Path) -> Result<(), Failed> {
    let why = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => "it is not a directory".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Failed::new(
        exit::USAGE,
        format_args!(
            "the host's root `{}` cannot be used: {why}; set `--host-root` to the directory that \
             contains the node's sys, proc and dev",
            path.display()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "kubectl")]
    #[test]
    fn the_plugin_of_kubectl_is_the_verb_kubectl_with_a_usage_of_its_own() {
        let words = |words: &str| words.split(' ').map(OsString::from).collect::<Vec<_>>();
        let is_kubectl = |line: &str| matches!(parse(&words(line)).unwrap().verb, Verb::Kubectl(_));
        for line in
            ["kubectl-holdfast who", "/usr/bin/kubectl-holdfast who", "holdfast kubectl who"]
        {
            assert!(is_kubectl(line), "{line}");
        }
        for line in ["holdfast who", "/kubectl-holdfast/holdfast who"] {
            assert!(!is_kubectl(line), "{line}");
        }
        let shown = parse(&words("kubectl-holdfast --help")).unwrap_err().to_string();
        assert!(shown.contains("Usage: kubectl holdfast [OPTIONS] <COMMAND>"), "{shown}");
        let shown = parse(&words("kubectl-holdfast who --help")).unwrap_err().to_string();
        assert!(shown.contains("Usage: kubectl holdfast who "), "{shown}");
        let wrong = parse(&words("kubectl-holdfast what")).unwrap_err().to_string();
        let sentence = usage(&wrong, &called(&words("kubectl-holdfast what"), true));
        assert!(sentence.ends_with("see `kubectl holdfast --help`"), "{sentence}");
        assert!(help(true).contains("Usage: kubectl holdfast "));
        assert_eq!(called(&words("kubectl-holdfast who a"), true), "kubectl holdfast who");
    }

    #[test]
    fn a_usage_error_names_the_help_of_its_verb() {
        for (line, verb) in [
            ("holdfast device cordon sensor0", "holdfast device cordon"),
            ("holdfast --run-dir /x who --nope", "holdfast who"),
            ("holdfast stauts", "holdfast"),
        ] {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let report = parse(&words).unwrap_err().to_string();
            let sentence = usage(&report, &called(&words, false));
            assert!(sentence.ends_with(&format!("; see `{verb} --help`")), "{sentence}");
        }
    }

    #[test]
    fn a_missing_host_root_is_an_error_and_no_node_without_devices() {
        let dir = tempfile::tempdir().unwrap();
        assert!(check_host_root(dir.path()).is_ok());
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for wrong in [file, dir.path().join("absent")] {
            let failed = check_host_root(&wrong).unwrap_err();
            assert_eq!(failed.code, exit::USAGE);
            let sentence = failed.sentence.unwrap();
            assert!(sentence.contains(&format!("`{}`", wrong.display())), "{sentence}");
        }
    }
}
