//! Software that is installed on the host: files that are found by their names, and followed
//! through links to their real paths.

use super::failure::call;
use super::root::HostRoot;
use super::spec_folder::Stamp;
use std::fs::Metadata;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};

/// The size of one read of a program.
const CHUNK: usize = 64 * 1024;

/// A regular file of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Its real path, without the root.
    pub path: String,
    /// Its version.
    pub stamp: Stamp,
    /// Whether it can be executed.
    pub is_program: bool,
}

impl HostRoot {
    /// The root below this path, such as that of a driver's container. It shares the record of
    /// failed reads.
    #[must_use]
    pub fn rooted_at(&self, rel: &str) -> HostRoot {
        HostRoot { root: self.path(rel), ..self.clone() }
    }

    /// The regular file to which a path leads.
    #[must_use]
    pub fn installed(&self, path: &str) -> Option<Installed> {
        let (path, metadata) = self.resolve(path)?;
        metadata.is_file().then(|| Installed {
            path,
            stamp: Stamp::of(&metadata),
            is_program: metadata.permissions().mode() & 0o111 != 0,
        })
    }

    /// The real path of a folder.
    #[must_use]
    pub fn real_folder(&self, path: &str) -> Option<String> {
        self.resolve(path).filter(|(_, metadata)| metadata.is_dir()).map(|(real, _)| real)
    }

    /// The real path of a socket or of a folder of sockets. In a captured tree plain files replace
    /// the sockets.
    #[must_use]
    pub fn real_socket(&self, path: &str) -> Option<String> {
        let is_socket = |metadata: &Metadata| {
            let kind = metadata.file_type();
            kind.is_socket() || kind.is_dir() || (!self.live && kind.is_file())
        };
        self.resolve(path).filter(|(_, metadata)| is_socket(metadata)).map(|(real, _)| real)
    }

    /// Those of `texts` that a file contains anywhere.
    #[must_use]
    pub fn texts_in(&self, path: &str, texts: &[&'static str]) -> Vec<&'static str> {
        let mut found = Vec::new();
        let Some(mut file) = self.found(path, call(|| std::fs::File::open(self.path(path)))) else {
            return found;
        };
        let overlap = texts.iter().map(|text| text.len()).max().unwrap_or_default();
        let mut bytes = Vec::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            let length = match file.read(&mut chunk) {
                Ok(0) => return found,
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.found::<()>(path, Err(error));
                    return found;
                }
            };
            // A text may begin in one chunk and end in the next.
            let kept = bytes.len().min(overlap);
            bytes.drain(..bytes.len() - kept);
            bytes.extend_from_slice(&chunk[..length]);
            for text in texts {
                if !found.contains(text) && contains(&bytes, text.as_bytes()) {
                    found.push(text);
                }
            }
        }
    }
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    let Some((first, rest)) = text.split_first() else { return true };
    let begins = bytes.iter().enumerate().filter(|(_, byte)| *byte == first);
    begins.into_iter().any(|(at, _)| bytes[at + 1..].starts_with(rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_is_followed_inside_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("run/nvidia/driver");
        fs::create_dir_all(below.join("usr/bin")).unwrap();
        fs::create_dir_all(below.join("etc")).unwrap();
        fs::write(below.join("usr/bin/tool"), "x").unwrap();
        symlink("/usr/bin/tool", below.join("etc/tool")).unwrap();
        symlink("usr/bin", below.join("bin")).unwrap();
        let root = HostRoot::new(dir.path()).rooted_at("run/nvidia/driver");
        let tool = root.installed("/etc/tool").unwrap();
        assert_eq!((tool.path.as_str(), tool.is_program), ("/usr/bin/tool", false));
        fs::set_permissions(below.join("usr/bin/tool"), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(root.installed("/bin/tool").unwrap().is_program);
        assert_eq!(root.real_folder("/bin").as_deref(), Some("/usr/bin"));
        assert_eq!(root.real_folder("/etc/tool"), None);
        assert_eq!(root.installed("/bin"), None);
        assert_eq!(root.real_socket("/bin/tool").as_deref(), Some("/usr/bin/tool"));
    }

    #[test]
    fn a_text_is_found_across_the_border_of_two_reads() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = vec![b'c'; CHUNK - 3];
        bytes.extend_from_slice(b"create-symlinks");
        bytes.extend(std::iter::repeat_n(b'x', 2 * CHUNK));
        bytes.extend_from_slice(b"update-ldcache");
        fs::write(dir.path().join("program"), bytes).unwrap();
        let root = HostRoot::new(dir.path());
        let texts = ["update-ldcache", "create-symlinks", "chmod"];
        assert_eq!(root.texts_in("/program", &texts), ["create-symlinks", "update-ldcache"]);
        assert!(root.texts_in("/absent", &texts).is_empty());
    }
}
