//! Why the daemon cannot start.

use crate::store::StoreError;
use std::io;
use std::path::{Path, PathBuf};

/// A start that failed. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The kubelet's directory cannot be one.
    #[error("the kubelet directory `{}` is not usable: {why}; set the kubelet's own directory with \
         `--kubelet-dir`", path.display())]
    KubeletDir {
        /// The path that was given.
        path: PathBuf,
        /// The obstacle.
        why: String,
    },
    /// The ledger cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system has no thread or no descriptors for it.
    #[error(
        "cannot start a thread for {what}: {why}; raise the limits of this process (`TasksMax` \
         and `LimitNOFILE` of the unit, the pod's limit of PIDs)"
    )]
    NoThread {
        /// The task of the thread.
        what: &'static str,
        /// The system's error.
        why: io::Error,
    },
    /// An actor died too often before the first inventory was there.
    #[error("the {0} actor panicked too often during the start; see the log for its panics")]
    Escalated(&'static str),
}

/// A missing directory is waited for; one that never can be the kubelet's is an error.
pub(super) fn check_kubelet_dir(path: &Path) -> Result<(), StartError> {
    let unusable =
        |path: &Path, why: String| Err(StartError::KubeletDir { path: path.to_owned(), why });
    for dir in [path.to_owned(), path.join("device-plugins")] {
        match std::fs::metadata(&dir) {
            Ok(metadata) if !metadata.is_dir() => {
                return unusable(&dir, "it is not a directory".into());
            }
            Ok(_) => {
                if let Err(error) = std::fs::read_dir(&dir) {
                    return unusable(&dir, not_read(&error));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return unusable(&dir, not_read(&error)),
        }
    }
    let socket = path.join("device-plugins/kubelet.sock");
    if socket.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return unusable(&socket, "its `kubelet.sock` is a directory".into());
    }
    Ok(())
}

/// Why the directory cannot be read, with what to do about a missing permission.
fn not_read(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!("{error}: run Holdfast as root"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_directory_is_accepted_and_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(check_kubelet_dir(&dir.path().join("later")).is_ok());
        assert!(check_kubelet_dir(dir.path()).is_ok());
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            assert!(check_kubelet_dir(&path).unwrap_err().to_string().contains("--kubelet-dir"));
        }
    }
}
