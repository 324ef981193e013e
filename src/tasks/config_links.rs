//! The links by which the kubelet replaces the files of a mounted `ConfigMap` or secret at once.

use crate::config::Config;
use std::path::{Path, PathBuf};

/// The directories where the kubelet may replace a mounted `ConfigMap` or secret.
pub(crate) fn directories(config: &Config) -> [PathBuf; 2] {
    let main = config.source().parent().unwrap_or(Path::new("/")).to_owned();
    let drop_ins = main.join("config.d");
    [main, drop_ins]
}

/// The link that the kubelet replaces after it has written all files of a volume again.
pub(super) const DATA_LINK: &str = "..data";

/// The current targets of these links. Files that a person edits have none: the editor sends SIGHUP
/// when they are complete.
pub(super) fn targets(directories: &[PathBuf]) -> Vec<Option<PathBuf>> {
    directories.iter().map(|directory| std::fs::read_link(directory.join(DATA_LINK)).ok()).collect()
}
