//! A daemon of the measurement's own: nothing of the machine's is used but its disk.

use super::super::exit::{FAILURE, Failed};
use crate::app::Settings;
use crate::config::{self, Roots};
use crate::domain::Durability;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Files that stand for device nodes, and ids of each: as many as eight resources of 64 devices have.
const FILES: u32 = 64;
const REPLICAS: u32 = 8;

/// The places of a private daemon; they go with the value.
#[derive(Debug)]
pub(super) struct Instance {
    /// Sockets and the host's tree: short paths, and any file system will do.
    scratch: TempDir,
    /// The ledger, where the machine's own would be.
    state: TempDir,
}

impl Instance {
    /// Makes the directories: the ledger's on the file system of `state_dir`.
    pub(super) fn create(state_dir: &Path, durability: Durability) -> Result<Self, Failed> {
        let absolute = std::path::absolute(state_dir)?;
        let near = absolute.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
        let temporary = |dir: &Path| {
            let made = tempfile::Builder::new().prefix(".holdfast-bench-").tempdir_in(dir);
            made.map_err(|error| Failed::new(FAILURE, format_args!("no directory can be made in `{}`: {error}", dir.display())))
        };
        let instance = Instance { scratch: temporary(&std::env::temp_dir())?, state: temporary(near)? };
        let roots = instance.roots();
        for dir in [roots.host.join("dev"), roots.kubelet.join("device-plugins"), roots.run] {
            fs::create_dir_all(dir)?;
        }
        for file in 0..FILES {
            fs::write(roots.host.join(format!("dev/bench{file}")), "")?;
        }
        let durability = durability.as_str();
        let config = format!(
            "[ledger]\ndurability = \"{durability}\"\n[telemetry]\nlisten = \"off\"\n\
             [[resource]]\nname = \"example.com/bench\"\nclass = \"char\"\npaths = [\"/dev/bench*\"]\nreplicas = {REPLICAS}\n"
        );
        fs::write(instance.config_file(), config)?;
        Ok(instance)
    }

    fn config_file(&self) -> PathBuf {
        self.scratch.path().join("config.toml")
    }

    fn roots(&self) -> Roots {
        let below = |name: &str| self.scratch.path().join(name);
        Roots { host: below("host"), kubelet: self.kubelet_dir(), state: self.state_dir().to_owned(), run: below("run") }
    }

    pub(super) fn kubelet_dir(&self) -> PathBuf {
        self.scratch.path().join("kubelet")
    }

    pub(super) fn state_dir(&self) -> &Path {
        self.state.path()
    }

    pub(super) fn settings(&self) -> Result<Settings, Failed> {
        Ok(Settings { roots: self.roots(), config: config::load(Some(&self.config_file()), &config::Node::default())? })
    }
}
