//! File modes: files and folders for root alone, and those that others must read, independent of
//! the umask.

use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, umask};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Mode of a private folder.
const FOLDER: u32 = 0o700;
/// Mode of a private file.
pub const FILE: u32 = 0o600;
/// Mode of a folder with files for others.
const OPEN_FOLDER: u32 = 0o755;

/// Makes new files of this process and its children private to their user, unless they have a mode
/// of their own.
pub fn keep_files_private() {
    umask(Mode::from_bits_truncate(0o077));
}

/// Makes a private folder, and those above it. An existing folder keeps its mode.
///
/// # Errors
/// If it cannot be made.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER).create(path)
}

/// Replaces a private file durably, and makes the folders above it. Readers see the former or the
/// new content, also after a power cut.
///
/// # Errors
/// If it cannot be written; the former file is then unchanged.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    make_private_folder(folder)?;
    // The mode of a temporary file is that of a private one.
    let mut fresh = tempfile::Builder::new().prefix(".").suffix(".new").tempfile_in(folder)?;
    fresh.write_all(bytes)?;
    fresh.as_file().sync_all()?;
    fresh.persist(path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()
}

/// Makes a folder that others may read, and those above it. Existing folders keep their modes.
///
/// # Errors
/// If it cannot be made.
pub fn make_open_folder(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(above) = path.parent() {
        make_open_folder(above)?;
    }
    match fs::create_dir(path) {
        // The umask does not apply to this call.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(OPEN_FOLDER)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes the access of others from these entries of a folder and from everything below them. Also
/// from the folder, if it has no other entries. Returns the number of changed modes. Links are
/// skipped; files of another user cannot be changed.
///
/// # Errors
/// The first that could not be changed; the others were.
pub fn make_private(folder: &Path, is_own: impl Fn(&str) -> bool) -> io::Result<usize> {
    let (mut changed, mut failed, mut has_others) = (0, Ok(()), false);
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&is_own) {
            match tighten(&entry.path()) {
                Ok(count) => changed += count,
                Err(error) => failed = failed.and(Err(error)),
            }
        } else {
            has_others = true;
        }
    }
    if !has_others {
        changed += usize::from(tighten_one(&open(folder)?)?);
    }
    failed.map(|()| changed)
}

fn tighten(path: &Path) -> io::Result<usize> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if !kind.is_dir() && !kind.is_file() {
        return Ok(0);
    }
    let changed = usize::from(tighten_one(&open(path)?)?);
    if !kind.is_dir() {
        return Ok(changed);
    }
    let below = fs::read_dir(path)?.map(|entry| tighten(&entry?.path()));
    below.sum::<io::Result<usize>>().map(|below| changed + below)
}

/// Returns whether it was changed.
fn tighten_one(file: &File) -> io::Result<bool> {
    let about = file.metadata()?;
    let mode = about.mode() & 0o7777;
    let wanted = if about.is_dir() { FOLDER } else { FILE };
    if mode & !wanted == 0 {
        return Ok(false);
    }
    file.set_permissions(Permissions::from_mode(mode & wanted))?;
    Ok(true)
}

/// Anyone with write access here may have replaced a file by a link, or by a FIFO that blocks its
/// reader.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
}

/// Removes the access of others from a folder. A link, or a missing folder, stays as it is. Returns
/// whether it was changed.
///
/// # Errors
/// If it cannot be changed.
pub fn make_folder_private(folder: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(folder) {
        Ok(about) if about.is_dir() => tighten_one(&open(folder)?),
        _ => Ok(false),
    }
}

/// Removes the right of others to replace the sockets of a folder, unless the sticky bit prevents
/// that already. Returns whether it was changed.
///
/// # Errors
/// If it cannot be changed.
pub fn keep_others_from_writing(folder: &Path) -> io::Result<bool> {
    let file = open(folder)?;
    let mode = file.metadata()?.mode() & 0o7777;
    if mode & 0o1000 != 0 || mode & 0o022 == 0 {
        return Ok(false);
    }
    file.set_permissions(Permissions::from_mode(mode & !0o022))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn only_own_files_get_stricter_modes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |rel: &str| dir.path().join(rel);
        let set =
            |rel: &str, mode| fs::set_permissions(at(rel), Permissions::from_mode(mode)).unwrap();
        fs::create_dir_all(at("state/db/blobs")).unwrap();
        for file in ["state/lock", "state/db/db", "state/db/blobs/1", "elsewhere"] {
            fs::write(at(file), "").unwrap();
            set(file, 0o666);
        }
        symlink(at("elsewhere"), at("state/db/link")).unwrap();
        nix::unistd::mkfifo(&at("state/db/pipe"), Mode::from_bits_truncate(0o666)).unwrap();
        set("state", 0o777);
        set("state/db", 0o755);
        set("state/db/blobs", 0o700);
        let is_own = |name: &str| ["lock", "db"].contains(&name);
        assert_eq!(make_private(&at("state"), is_own).unwrap(), 5);
        let modes = ["state", "state/lock", "state/db", "state/db/db", "state/db/blobs/1"]
            .map(|rel| mode(&at(rel)));
        assert_eq!(modes, [0o700, 0o600, 0o700, 0o600, 0o600]);
        assert_eq!(mode(&at("elsewhere")), 0o666, "no link is followed");
        assert_eq!(make_private(&at("state"), is_own).unwrap(), 0);
        // A folder that is shared with others keeps its mode.
        fs::write(at("state/others"), "").unwrap();
        set("state", 0o755);
        assert_eq!(make_private(&at("state"), is_own).unwrap(), 0);
        assert_eq!(mode(&at("state")), 0o755);
    }

    #[test]
    fn folders_have_the_mode_that_is_meant() {
        let dir = tempfile::tempdir().unwrap();
        let (private, open) = (dir.path().join("a/b"), dir.path().join("c/d"));
        make_private_folder(&private).unwrap();
        make_open_folder(&open).unwrap();
        make_open_folder(&open).unwrap();
        assert_eq!(
            [&private, &open, &dir.path().join("c")].map(|path| mode(path)),
            [0o700, 0o755, 0o755]
        );
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        assert!(keep_others_from_writing(&open).unwrap() && mode(&open) == 0o755);
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
        assert!(!keep_others_from_writing(&open).unwrap());
    }
}
