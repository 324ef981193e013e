//! The laboratory: a simulated node and kubelet (`sim`), and the demo and benchmarks that use them.
//! It requires the cargo feature `lab`. Packages ship the daemon without it; `holdfast-lab` is this
//! program built with the feature.

pub mod bench;
pub mod demo;
pub mod sim;

use std::io;
use std::path::{Path, PathBuf};

/// The daemon that demo and benchmarks start as a process: `holdfast` next to `holdfast-lab`, which
/// is the one that the node runs, or this program if there is none.
///
/// # Errors
/// When the kernel does not report the path of this program.
pub(crate) fn daemon() -> io::Result<PathBuf> {
    std::env::current_exe().map(|program| daemon_of(&program))
}

fn daemon_of(program: &Path) -> PathBuf {
    let daemon = program.with_file_name("holdfast");
    if program.file_name().is_some_and(|name| name == "holdfast-lab") && daemon.is_file() {
        daemon
    } else {
        program.to_path_buf()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lab_uses_the_daemon_installed_next_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let lab = dir.path().join("holdfast-lab");
        assert_eq!(daemon_of(&lab), lab);
        std::fs::write(dir.path().join("holdfast"), "").unwrap();
        assert_eq!(daemon_of(&lab), dir.path().join("holdfast"));
        let other = dir.path().join("holdfast-0123");
        assert_eq!(daemon_of(&other), other);
    }
}
