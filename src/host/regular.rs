//! Files where others could have put something else: a pipe keeps its reader waiting for ever, a device may have no end.

use nix::fcntl::OFlag;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file for reading, without waiting for anything.
///
/// # Errors
/// When it cannot be opened, or is something else than a file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits()).open(path)?;
    match file.metadata()?.file_type() {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file, but a pipe, a socket or a device")),
    }
}

/// Reads a file whole, if it has no more bytes than so many.
///
/// # Errors
/// As [`open_regular`], and when it is larger.
pub fn read_regular(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_whole(open_regular(path)?, bytes_max)
}

/// The same of a file that is open.
///
/// # Errors
/// When it cannot be read, or is larger.
pub fn read_whole(file: File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;

    #[test]
    fn what_is_no_file_is_told_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&at("pipe"), Mode::from_bits_truncate(0o600)).unwrap();
        std::fs::write(at("file"), "four").unwrap();
        let kind = |path: &Path| read_regular(path, 4).map_err(|error| error.kind());
        assert_eq!(kind(&at("file")), Ok(b"four".to_vec()));
        assert_eq!(read_regular(&at("file"), 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(kind(&at("pipe")), Err(io::ErrorKind::InvalidInput));
        assert_eq!(kind(Path::new("/dev/zero")), Err(io::ErrorKind::InvalidInput));
        assert_eq!(kind(dir.path()), Err(io::ErrorKind::IsADirectory));
        assert_eq!(kind(&at("absent")), Err(io::ErrorKind::NotFound));
    }
}
