//! The daemon: its answer, the owner of its ledger, and the processes.

use super::super::{Answer, Daemon, Facts, Process};
use super::{AddFacts, QUERY_DEADLINE, ReaderInput, ask};
use crate::admin::{ControlError, control_get};
use crate::host::{self, HostRoot};
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The link that systemd creates for a unit that starts at boot.
const ENABLED: &str = "etc/systemd/system/multi-user.target.wants/holdfast.service";
/// The drop-in of the system extension (`packaging/sysext/build`), which starts the unit at boot.
const UPHELD: &str = "usr/lib/systemd/system/multi-user.target.d/10-holdfast.conf";
/// A link to `/dev/null` while the unit is masked.
const MASK: &str = "etc/systemd/system/holdfast.service";

/// Whether systemd starts the unit at boot.
fn is_enabled(host_root: &HostRoot) -> bool {
    let is_masked = host_root.link_target(MASK).is_some_and(|target| target.ends_with("dev/null"));
    !is_masked && (host_root.link_target(ENABLED).is_some() || host_root.read(UPHELD).is_some())
}

pub(super) fn daemon(input: &ReaderInput) -> AddFacts {
    let roots = &input.target.roots;
    let host_root = HostRoot::new(&roots.host);
    let asked = ask(async {
        let pid = match timeout(QUERY_DEADLINE, UnixStream::connect(roots.run.join("control.sock")))
            .await
        {
            Ok(Ok(stream)) => host::peer::pid(&stream),
            Ok(Err(error)) if error.kind() == ErrorKind::PermissionDenied => {
                return (Answer::Denied, None);
            }
            _ => None,
        };
        match timeout(QUERY_DEADLINE, control_get::<Value>(&roots.run, "/v1/status")).await {
            Ok(Ok(status)) => (Answer::Status(status), pid),
            Ok(Err(ControlError::Absent { .. })) => (Answer::Absent, None),
            // A healthy daemon refuses an unauthorised client, with any mode of the socket.
            Ok(Err(_)) if !input.may_read_all => (Answer::Denied, pid),
            Ok(Err(error)) => (Answer::Unresponsive(error.to_string()), pid),
            Err(_elapsed) => (
                Answer::Unresponsive(
                    "a daemon accepts the query, but does not answer in time".into(),
                ),
                pid,
            ),
        }
    });
    let Some((answer, pid)) = asked else { return Box::new(|_| ()) };
    // Read this process's `/proc/locks`: its pids are of the same namespace as the peer pid of the
    // socket.
    let locks = fs::read_to_string(input.target.own.with_file_name("locks")).unwrap_or_default();
    let daemon = Daemon {
        answer,
        pid,
        is_enabled: is_enabled(&host_root),
        lock_holder: host::lock_holder(&locks, &roots.state.join("lock")),
    };
    Box::new(|facts: &mut Facts| facts.daemon = Some(daemon))
}

pub(super) fn processes(input: &ReaderInput) -> AddFacts {
    let host = HostRoot::new(&input.target.roots.host);
    let pids = host
        .entries("proc")
        .into_iter()
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let named =
        pids.filter(|pid| host.read(&format!("proc/{pid}/comm")).as_deref() == Some("holdfast"));
    let process = |pid: String| {
        let arguments = arguments(&host, &pid);
        let is_daemon = verb(&arguments) == Some("run");
        is_daemon.then(|| Process {
            pid: pid.parse().unwrap_or_default(),
            kubelet: option(&arguments, "kubelet-dir").unwrap_or_else(|| "/var/lib/kubelet".into()),
        })
    };
    let processes: Vec<Process> = named.filter_map(process).collect();
    let is_seen = host.is_dir("proc/self") || !processes.is_empty();
    Box::new(move |facts: &mut Facts| facts.processes = is_seen.then_some(processes))
}

/// The command line of a process, without the program.
pub(super) fn arguments(host: &HostRoot, pid: &str) -> Vec<String> {
    let line = host.read(&format!("proc/{pid}/cmdline")).unwrap_or_default();
    line.split('\0').skip(1).map(str::to_owned).collect()
}

/// The first argument that is neither an option nor the value of one. Every option before a verb
/// takes a value.
fn verb(arguments: &[String]) -> Option<&str> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.strip_prefix('-') {
            None => return Some(argument),
            Some(option)
                if option.contains('=') || !(option.starts_with('-') || option.len() == 1) => {}
            Some(_) => {
                let _value = rest.next();
            }
        }
    }
    None
}

/// The value of `--name VALUE` or `--name=VALUE`.
pub(super) fn option(arguments: &[String], name: &str) -> Option<PathBuf> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let Some(found) =
            argument.strip_prefix("--").and_then(|argument| argument.strip_prefix(name))
        else {
            continue;
        };
        match found.strip_prefix('=') {
            Some(value) => return Some(value.into()),
            None if found.is_empty() => return rest.next().map(PathBuf::from),
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::verb;

    #[test]
    fn an_option_value_named_run_is_not_the_verb() {
        let verb_of = |line: &str| {
            verb(&line.split(' ').map(str::to_owned).collect::<Vec<_>>()).map(str::to_owned)
        };
        assert_eq!(verb_of("--run-dir run doctor").as_deref(), Some("doctor"));
        assert_eq!(verb_of("--run-dir=run -o json -ojson run --take-over").as_deref(), Some("run"));
        assert_eq!(verb_of("run --run-dir run").as_deref(), Some("run"));
        assert_eq!(verb_of("--run-dir run"), None);
    }
}
