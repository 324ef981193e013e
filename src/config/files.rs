//! The files of a configuration: the main file and its drop-ins.

use super::ConfigError;
use crate::host::{is_missing, may_pass, read_whole};
use std::fs::{DirEntry, File};
use std::io;
use std::path::{Path, PathBuf};

/// The size limit of a file. A ConfigMap has at most 1 MiB. A much larger file is a wrong one, or
/// has no end.
pub(super) const FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Reads a configuration file, or another plugin's; `-` is standard input.
///
/// # Errors
/// The system's error; `FileTooLarge` for more than 16 MiB.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    if path == Path::new("-") {
        read_whole(io::stdin().lock(), FILE_BYTES_MAX)
    } else {
        read_whole(File::open(path)?, FILE_BYTES_MAX)
    }
}

/// Whether the path itself does not exist. A dangling link exists, and the user meant its target.
pub(super) fn is_absent(path: &Path, error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound && is_missing(path)
}

pub(super) fn unreadable(path: &Path, error: &io::Error, advice: &str) -> ConfigError {
    let target = path.read_link().ok().filter(|_| error.kind() == io::ErrorKind::NotFound);
    let problem = match target {
        Some(target) => format!(
            "is a dangling link to `{}`; create or mount its target, or remove the link",
            target.display()
        ),
        None => format!("cannot be read: {error}{advice}"),
    };
    let unreadable = ConfigError::new(problem).in_file(path);
    if may_pass(error) { unreadable.unread() } else { unreadable }
}

pub(super) fn drop_ins(main: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let dir = main.with_file_name("config.d");
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if is_absent(&dir, &error) => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(&dir, &error, "")),
    };
    // Like a shell's `*.toml`. Hidden files belong to editors: Emacs' `.#site.toml` is a dangling
    // link.
    let is_drop_in = |path: &PathBuf| {
        let is_hidden =
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        !is_hidden && path.extension().is_some_and(|extension| extension == "toml")
    };
    let entries: Vec<_> =
        entries.collect::<io::Result<_>>().map_err(|error| unreadable(&dir, &error, ""))?;
    let mut paths: Vec<PathBuf> = entries.iter().map(DirEntry::path).filter(is_drop_in).collect();
    paths.sort();
    Ok(paths)
}
