//! `holdfast demo`, `holdfast bench` and `holdfast kubectl` in a build without the features `lab`
//! and `kubectl`. They run `holdfast-lab`, a package of its own: the daemon on each node contains
//! neither a simulator nor benchmarks, nor the client of a workstation.

use crate::console::exit::{FAILURE, Failed};
use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
#[cfg(not(all(feature = "lab", feature = "kubectl")))]
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program's name; also the name of its package.
const PROGRAM: &str = "holdfast-lab";

/// All arguments after the verb; `holdfast-lab` parses them.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(super) struct Arguments {
    /// Arguments of `holdfast-lab`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

/// Replaces this process by `holdfast-lab` with the same command line (exec).
///
/// # Errors
/// When `holdfast-lab` is not installed or cannot be run. The error names the package.
#[cfg(not(all(feature = "lab", feature = "kubectl")))]
pub(super) fn run(verb: &str) -> Result<(), Failed> {
    let executable = env::current_exe().unwrap_or_default();
    let path = env::var_os("PATH").unwrap_or_default();
    Err(replace(verb, &executable, &path, env::args_os().skip(1), CommandExt::exec))
}

/// Returns only if `exec` fails. A failed exec leaves SIGPIPE at its default, so tests pass another
/// function.
fn replace(
    verb: &str,
    executable: &Path,
    path: &OsStr,
    arguments: impl Iterator<Item = OsString>,
    exec: impl FnOnce(&mut Command) -> io::Error,
) -> Failed {
    let Some(program) = find(executable, path) else {
        let own_dir = executable.parent().unwrap_or(Path::new("/")).display();
        return Failed::new(
            FAILURE,
            format_args!(
                "`holdfast {verb}` needs `{PROGRAM}`, which is neither in {own_dir} nor \
                 in PATH; install the package {PROGRAM}"
            ),
        );
    };
    let error = exec(Command::new(&program).args(arguments));
    Failed::new(
        FAILURE,
        format_args!("cannot run {} for `holdfast {verb}`: {error}", program.display()),
    )
}

/// The path of the program: first in the directory of this executable, so that both have one
/// version, then in the directories of `path`.
fn find(executable: &Path, path: &OsStr) -> Option<PathBuf> {
    let own_dir = executable.parent().map(Path::to_path_buf);
    // Skip relative entries: an empty entry of PATH is the working directory, which another user
    // may have chosen.
    let folders =
        own_dir.into_iter().chain(env::split_paths(path)).filter(|folder| folder.is_absolute());
    folders.map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_lab_is_searched_next_to_the_executable_and_then_in_path() {
        let dir = tempfile::tempdir().unwrap();
        let (bin, other) = (dir.path().join("bin"), dir.path().join("other"));
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(&other).unwrap();
        let executable = bin.join("holdfast");
        let path = env::join_paths([Path::new(""), Path::new("relative"), &other]).unwrap();
        assert_eq!(find(&executable, &path), None);
        fs::write(other.join(PROGRAM), "").unwrap();
        assert_eq!(find(&executable, &path), Some(other.join(PROGRAM)));
        fs::write(bin.join(PROGRAM), "").unwrap();
        assert_eq!(find(&executable, &path), Some(bin.join(PROGRAM)));
        // A directory with that name is not a program.
        fs::remove_file(bin.join(PROGRAM)).unwrap();
        fs::create_dir(bin.join(PROGRAM)).unwrap();
        assert_eq!(find(&executable, &path), Some(other.join(PROGRAM)));
    }

    #[test]
    fn without_the_lab_the_error_names_the_package() {
        let failed = replace(
            "demo",
            Path::new("/nowhere/holdfast"),
            OsStr::new(""),
            std::iter::empty(),
            |_| unreachable!("no program"),
        );
        let sentence = failed.sentence.unwrap();
        assert_eq!(failed.code, FAILURE);
        assert!(sentence.contains("install the package holdfast-lab"), "{sentence}");
        assert!(sentence.contains("/nowhere"), "{sentence}");
    }

    #[test]
    fn a_failed_exec_is_reported_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(PROGRAM), "not a program").unwrap();
        let failed = replace(
            "bench",
            &dir.path().join("holdfast"),
            OsStr::new(""),
            std::iter::empty(),
            |_| io::ErrorKind::PermissionDenied.into(),
        );
        let sentence = failed.sentence.unwrap();
        assert!(
            sentence.starts_with(&format!("cannot run {}", dir.path().join(PROGRAM).display())),
            "{sentence}"
        );
        assert!(sentence.contains("permission denied"), "{sentence}");
    }
}
