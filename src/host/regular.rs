//! Opens regular files only. Opening a FIFO would block for ever, and opening a device may have
//! side effects.

use super::process::is_shortage;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Another kind of file in place of a regular file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is {0}, not a regular file")]
pub struct NotRegular(&'static str);

impl NotRegular {
    /// Whether an error is one of these.
    #[must_use]
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<NotRegular>())
    }
}

/// Opens a file by `options`, if it is a regular file; a symbolic link is not followed.
///
/// # Errors
/// [`NotRegular`], and the errors of open(2).
pub fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    match fs::symlink_metadata(path) {
        // Opening a device may already have side effects.
        Ok(about) => check(about.file_type())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    // A file that replaces it meanwhile does not block this call.
    let file = options.custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits()).open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// The content of a regular file.
///
/// # Errors
/// As [`open_regular`], and if it cannot be read.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path, File::options().read(true))?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a file for reading. A symbolic link is followed, since kubelets and users of ConfigMaps
/// make them.
///
/// # Errors
/// As [`open_regular`].
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
        .open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// The content of a file of at most `bytes_max` bytes, which may be a symbolic link.
///
/// # Errors
/// As [`open_to_read`], and `FileTooLarge`.
pub fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_whole(open_to_read(path)?, bytes_max)
}

/// The same for an open file or a pipe.
///
/// # Errors
/// If it cannot be read, and `FileTooLarge`.
pub fn read_whole(from: impl Read, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let most = if bytes_max.is_multiple_of(1 << 20) {
            format!("{} MiB", bytes_max >> 20)
        } else {
            format!("{bytes_max} bytes")
        };
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {most}"),
        ));
    }
    Ok(bytes)
}

fn check(found: FileType) -> io::Result<()> {
    let kind = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a directory",
        found if found.is_symlink() => "a symbolic link",
        found if found.is_fifo() => "a FIFO",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, NotRegular(kind)))
}

/// Whether nothing is at a path. A link that leads nowhere is something, and a path that cannot be
/// examined may be.
#[must_use]
pub fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Whether the cause of an error may end without a change of the files: a disk or a network that
/// fails, or a limit of the process or the machine.
#[must_use]
pub fn may_pass(error: &io::Error) -> bool {
    let causes = [Errno::EIO, Errno::ESTALE, Errno::ETIMEDOUT, Errno::ENOLINK];
    let is_cause = |code| causes.contains(&Errno::from_raw(code));
    is_shortage(error) || error.raw_os_error().is_some_and(is_cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_file_that_is_not_regular_is_named_without_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "text").unwrap();
        fs::create_dir(at("directory")).unwrap();
        mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        symlink("file", at("link")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        assert_eq!(read_regular(&at("file")).unwrap(), b"text");
        assert_eq!(read_regular(&at("nothing")).unwrap_err().kind(), io::ErrorKind::NotFound);
        let others = [
            ("directory", "a directory"),
            ("fifo", "a FIFO"),
            ("link", "a symbolic link"),
            ("socket", "a socket"),
        ];
        for (name, kind) in others {
            for options in [
                File::options().read(true),
                File::options().create(true).truncate(false).read(true).write(true),
            ] {
                let error = open_regular(&at(name), options).unwrap_err();
                assert!(
                    NotRegular::is(&error)
                        && error.to_string() == format!("it is {kind}, not a regular file"),
                    "{name}: {error}"
                );
            }
        }
        let error = read_regular(Path::new("/dev/null")).unwrap_err();
        assert_eq!(error.to_string(), "it is a device, not a regular file");
    }

    #[test]
    fn links_are_followed_where_allowed_and_reads_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        mkfifo(&at("pipe"), Mode::from_bits_truncate(0o600)).unwrap();
        fs::write(at("file"), "four").unwrap();
        symlink(at("file"), at("link")).unwrap();
        assert_eq!(read_bounded(&at("link"), 4).unwrap(), b"four");
        assert_eq!(read_bounded(&at("file"), 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(read_bounded(&at("absent"), 4).unwrap_err().kind(), io::ErrorKind::NotFound);
        for other in [&at("pipe"), Path::new("/dev/zero"), dir.path()] {
            assert!(NotRegular::is(&read_bounded(other, 4).unwrap_err()), "{}", other.display());
        }
    }
}
