//! The binary under test.

use std::path::PathBuf;
use std::process::Command;

/// Whether `HOLDFAST_BIN` names a binary. Only then figures are compared with their limits.
pub(crate) fn is_named() -> bool {
    std::env::var_os("HOLDFAST_BIN").is_some()
}

/// `HOLDFAST_BIN`, otherwise the one just built.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("HOLDFAST_BIN")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_holdfast")), PathBuf::from)
}

/// The binary with the environment and the priority of its systemd unit. The environment decides
/// how much memory the daemon keeps. Without the priority its start waits for threads of the
/// kubelet and the runtime.
pub(crate) fn as_in_unit() -> Command {
    let nice = unit("Nice=").next().expect("the unit has a priority");
    let mut command = Command::new("nice");
    command.args(["-n", nice]).arg(binary());
    command.envs(
        unit("Environment=")
            .flat_map(str::split_whitespace)
            .filter_map(|pair| pair.split_once('=')),
    );
    command
}

/// The values of this key in the unit, one for each line.
fn unit(key: &str) -> impl Iterator<Item = &'static str> {
    include_str!("../../../systemd/holdfast.service")
        .lines()
        .filter_map(move |line| line.strip_prefix(key))
}
