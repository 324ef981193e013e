//! A folder with files of ours and of others, such as that of CDI. Readers always see complete
//! files: a file appears and changes by a rename. Others read it, so the folder and its files have
//! modes of their own (0755, 0644).

use super::private::make_open_folder;
use super::regular::read_bounded;
use std::collections::BTreeMap;
use std::fs::{Metadata, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The suffixes of the files that container runtimes read.
const SUFFIXES: [&str; 2] = [".json", ".yaml"];

/// A version of a file. Every write of a file changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    inode: u64,
    length: u64,
    changed_ns: i64,
}

impl Stamp {
    /// The version of the file at this path, or at the end of a link; `None` if there is none.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        path.metadata().ok().map(|metadata| Stamp::of(&metadata))
    }

    pub(super) fn of(metadata: &Metadata) -> Self {
        Stamp {
            inode: metadata.ino(),
            length: metadata.len(),
            changed_ns: metadata
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(metadata.mtime_nsec()),
        }
    }
}

/// A file of another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherSpec {
    /// Its path.
    pub path: PathBuf,
    /// Its version.
    pub stamp: Stamp,
}

/// The folder, and the files written to it: an unchanged file costs only one check.
#[derive(Debug)]
pub struct SpecFolder {
    path: PathBuf,
    prefix: &'static str,
    written: Mutex<BTreeMap<String, String>>,
}

impl SpecFolder {
    /// The folder at `path`. Files whose names begin with `prefix` are ours. Nothing is created
    /// yet.
    #[must_use]
    pub fn new(path: &Path, prefix: &'static str) -> Self {
        SpecFolder { path: path.to_owned(), prefix, written: Mutex::default() }
    }

    /// Ensures that a file with this text exists.
    ///
    /// # Errors
    /// If the folder cannot be made or written.
    pub fn ensure(&self, name: &str, text: &str) -> io::Result<()> {
        let file = self.path.join(name);
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.get(name).is_some_and(|known| known == text) && file.exists() {
            return Ok(());
        }
        if read_bounded(&file, text.len() as u64).ok().as_deref() != Some(text.as_bytes()) {
            make_open_folder(&self.path)?;
            // Hidden, and without the suffix that readers expect.
            let mut fresh = tempfile::Builder::new()
                .prefix(&format!(".{}", self.prefix))
                .suffix(".new")
                .tempfile_in(&self.path)?;
            fresh.write_all(text.as_bytes())?;
            fresh.as_file().set_permissions(Permissions::from_mode(0o644))?;
            fresh.persist(&file).map_err(|error| error.error)?;
        }
        written.insert(name.to_owned(), text.to_owned());
        Ok(())
    }

    /// The path of a file.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Our files, including those left by an interrupted write.
    #[must_use]
    pub fn own(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter(|name| name.strip_prefix('.').unwrap_or(name).starts_with(self.prefix))
            .collect()
    }

    /// The files of other programs that a container runtime reads, sorted. A folder that does not
    /// exist has none.
    ///
    /// # Errors
    /// If the folder or a file in it cannot be read.
    pub fn others(&self) -> io::Result<Vec<OtherSpec>> {
        let entries = match std::fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?.collect::<io::Result<Vec<_>>>()?,
        };
        let is_read = |name: &str| {
            SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) && !name.starts_with(self.prefix)
        };
        let other = |name: String| {
            let path = self.path.join(name);
            match path.metadata() {
                Ok(found) => Some(Ok(OtherSpec { path, stamp: Stamp::of(&found) })),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => Some(Err(error)),
            }
        };
        let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
        let others = names.filter(|name| is_read(name)).filter_map(other);
        let mut others = others.collect::<io::Result<Vec<OtherSpec>>>()?;
        others.sort_unstable_by(|one, two| one.path.cmp(&two.path));
        Ok(others)
    }

    /// Removes one of our files.
    ///
    /// # Errors
    /// If it exists and cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.remove(name);
        match std::fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_file_is_restored_after_any_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/cdi");
        let folder = SpecFolder::new(&path, "own-");
        assert_eq!(folder.own(), Vec::<String>::new());
        let text = || std::fs::read_to_string(path.join("own-a.json")).unwrap();
        folder.ensure("own-a.json", "1").unwrap();
        assert_eq!(text(), "1");
        folder.ensure("own-a.json", "2").unwrap();
        assert_eq!(text(), "2");
        std::fs::remove_file(path.join("own-a.json")).unwrap();
        folder.ensure("own-a.json", "2").unwrap();
        assert_eq!(text(), "2", "another process has removed it");
        let mode = std::fs::metadata(path.join("own-a.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "the runtime may be another user");
        std::fs::write(path.join("other.json"), "").unwrap();
        assert_eq!(folder.own(), ["own-a.json"], "nothing is left over from the writing");
        std::fs::write(path.join(".own-cut.new"), "").unwrap();
        assert!(
            folder.own().contains(&".own-cut.new".to_owned()),
            "a file left by a killed process is ours"
        );
        std::fs::write(path.join("other.conf"), "").unwrap();
        let others = folder.others().unwrap();
        assert_eq!(others.len(), 1, "neither ours nor one that runtimes ignore");
        std::fs::write(path.join("other.json"), "{}").unwrap();
        assert_ne!(folder.others().unwrap(), others, "another version of the same file");
        std::fs::remove_file(path.join("other.conf")).unwrap();
        folder.remove(".own-cut.new").unwrap();
        folder.remove("own-a.json").unwrap();
        folder.remove("own-a.json").unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1, "a file of another program stays");
    }
}
