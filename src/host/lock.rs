//! One daemon for each state directory: an advisory lock that the kernel drops with the process.

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Held as long as the daemon lives.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

/// Why the lock is not ours.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("another holdfast{} already runs on the state directory `{}`; stop it first, or give this one another `--state-dir`", pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default(), path.display())]
    Taken {
        /// The state directory.
        path: PathBuf,
        /// The holder, by its own account.
        pid: Option<u32>,
    },
    /// The lock file cannot be made or locked.
    #[error("the state directory `{}` cannot be used: {source}; it must be a writable directory", path.display())]
    Unusable {
        /// The state directory.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
}

impl Lock {
    /// Makes `dir` where it is missing (mode 0700: grants name pods) and locks it.
    ///
    /// # Errors
    /// When another process has the lock, or the directory cannot be written.
    pub fn take(dir: &Path) -> Result<Self, LockError> {
        let unusable = |source: std::io::Error| LockError::Unusable { path: dir.to_owned(), source };
        let mut builder = std::fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(dir).map_err(unusable)?;
        let path = dir.join("lock");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(unusable)?;
        let mut locked = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => locked,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut text = String::new();
                let pid = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(LockError::Taken { path: dir.to_owned(), pid });
            }
            Err((_, errno)) => return Err(unusable(errno.into())),
        };
        // The pid is for people only; the lock itself is the kernel's.
        let note = |file: &mut File| -> std::io::Result<()> {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        note(&mut locked).map_err(unusable)?;
        Ok(Lock { _file: locked })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_taker_is_told_who_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("deep/state");
        let first = Lock::take(&state).unwrap();
        let error = Lock::take(&state).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()) && error.contains("deep/state"), "{error}");
        drop(first);
        Lock::take(&state).unwrap();
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        std::fs::write(&state, "").unwrap();
        assert!(Lock::take(&state).unwrap_err().to_string().contains("state"));
    }
}
