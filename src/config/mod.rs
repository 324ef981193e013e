//! Configuration: TOML files and drop-ins, merged, then validated into what the daemon runs on.
//!
//! A file is read as a `tree` in which every value knows its place. `merge` looks at each part of it alone, so that every
//! mistake is one sentence with its place, and lays `config.toml`, the drop-ins of `config.d/` (by name) and the sections
//! for this `node` over each other — a later key wins, resources add up. `effective` shows what comes out, as TOML again;
//! `fragments` is what it may say, as `typed` reads it, and `validate` turns that into a [`Config`] (`contract` does so for the
//! options of a contract, `sharing` for how many containers have a device, `health` for how it is judged, `text` for
//! what can reach a container or a program as it is written). `keys` has every
//! key with its default; `import` writes such a file from another plugin's; `change` tells two configurations apart.

mod change;
mod contract;
mod effective;
mod error;
mod fragments;
mod health;
mod hooks;
pub mod import;
mod keys;
mod merge;
mod node;
mod sharing;
mod text;
mod tree;
mod typed;
mod validate;

#[cfg(test)]
mod tests;

pub use change::{Change, ResourceChange};
pub use effective::{Origin, Shown};
pub use error::ConfigError;
pub use merge::{Examined, PROBLEMS_MAX, load, read_file};
pub use node::{Node, Section};

use crate::domain::{Durability, HealthPolicy, NvmlLibrary, Policy, ResourceSpec, Retention};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the configuration is looked for when `--config` does not say.
pub const DEFAULT_PATH: &str = "/etc/holdfast/config.toml";

/// The four roots that everything hangs off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// `sys`, `proc`, `dev`, `run/udev` and `var/log/pods` of the node lie below it.
    pub host: PathBuf,
    /// The kubelet's directory.
    pub kubelet: PathBuf,
    /// The ledger's directory.
    pub state: PathBuf,
    /// Sockets and other things that do not outlive the boot.
    pub run: PathBuf,
}

/// The validated configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// When a grant counts as recorded.
    pub durability: Durability,
    /// How much of the history is kept.
    pub retention: Retention,
    /// What the ledger does where no answer is right for everybody.
    pub policy: Policy,
    /// Where `/metrics`, `/healthz` and `/readyz` are served; `None` is nowhere.
    pub listen: Option<SocketAddr>,
    /// The token that readers of `/metrics` and `/` have to send is in this file; `None` lets everybody read.
    pub token_file: Option<PathBuf>,
    /// The pod-resources socket, where it is not the kubelet directory's own.
    pub pod_resources_socket: Option<PathBuf>,
    /// Where CDI files are written, if a resource asks for them.
    pub cdi_directory: PathBuf,
    /// Where device-info files are written, for resources with the contract `sriov`.
    pub device_info_directory: PathBuf,
    /// Where the node's labels are written for Node Feature Discovery; `None` is nowhere.
    pub features_directory: Option<PathBuf>,
    /// Which NVML is asked for what NVIDIA's driver does not tell in its files.
    pub nvml: NvmlLibrary,
    /// How devices are judged.
    pub health: HealthPolicy,
    /// The resources in the order of the files: the first that selects a device gets it. Empty means that known
    /// hardware is offered under its usual names.
    pub resources: Vec<Arc<ResourceSpec>>,
    /// The files that were read.
    pub files: Vec<PathBuf>,
    /// The file that was asked for; `None` is the default one, which may be missing.
    pub asked: Option<PathBuf>,
    /// The node that it was read for.
    pub node: Node,
    /// CRC-32 of the texts of the files.
    pub hash: u32,
}

impl Config {
    /// The main file.
    #[must_use]
    pub fn source(&self) -> &Path {
        self.asked.as_deref().unwrap_or(Path::new(DEFAULT_PATH))
    }

    /// Reads what it was read from again.
    ///
    /// # Errors
    /// As [`load`].
    pub fn load_again(&self) -> Result<Config, ConfigError> {
        load(self.asked.as_deref(), &self.node)
    }
}
