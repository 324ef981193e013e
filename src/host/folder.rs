//! An open directory: all reads are of one device, even if another device takes its name meanwhile.
//! Reads need no path lookup, which a scan of hundreds of devices would do thousands of times.

use super::failure::{Failures, call};
use super::text::{read_bounded, text_of};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat};
use rustix::fs::{FileType, RawDir, readlinkat_raw};
use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// The buffer for one call that lists a directory. The directory of a PCI function needs half of
/// it.
const ENTRIES_BYTES: usize = 4096;
/// The maximum size of an attribute of sysfs.
const ATTRIBUTE_BYTES: u64 = 4096;
/// More than the longest target of a link (`PATH_MAX` without its end).
const LINK_BYTES: usize = 4096;

/// The directory, and its content when it was first listed. Listing costs as much as all other
/// reads of most devices.
#[derive(Debug)]
pub struct Folder {
    dir: OwnedFd,
    /// Its path without the root, for messages.
    path: String,
    failures: Failures,
    names: OnceCell<Names>,
    lost: Cell<bool>,
}

/// Sorted names. A scan reads ten thousand of them to find a few, so they share one text.
#[derive(Debug, Default)]
struct Names {
    text: String,
    places: Vec<Place>,
}

/// The position of a name in the common text, and whether the directory lists a regular file.
#[derive(Debug)]
struct Place {
    range: Range<usize>,
    is_file: bool,
}

impl Names {
    fn push(&mut self, name: &str, is_file: bool) {
        let start = self.text.len();
        self.text.push_str(name);
        self.places.push(Place { range: start..self.text.len(), is_file });
    }

    fn name(&self, place: &Place) -> &str {
        &self.text[place.range.clone()]
    }

    fn sort(&mut self) {
        self.places.sort_unstable_by(|one, other| {
            self.text[one.range.clone()].cmp(&self.text[other.range.clone()])
        });
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        self.places.iter().map(|place| self.name(place))
    }

    fn get(&self, name: &str) -> Option<&Place> {
        let found = self.places.binary_search_by(|place| self.name(place).cmp(name)).ok()?;
        self.places.get(found)
    }
}

impl Folder {
    /// Opens it; `None` if there is no such directory, or if it cannot be read. The path without
    /// the root is for messages. Failed reads are recorded in `failures`.
    pub(super) fn open(
        at: impl AsFd,
        path: &Path,
        path_text: String,
        failures: Failures,
    ) -> Option<Self> {
        let open = || {
            Ok(openat(
                at,
                path,
                OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
                Mode::empty(),
            )?)
        };
        let dir = failures.found(|| path_text.clone(), call(open))?;
        Some(Folder {
            dir,
            path: path_text,
            failures,
            names: OnceCell::new(),
            lost: Cell::new(false),
        })
    }

    fn list(&self) -> Names {
        // Only one system call: readdir(3) makes four more for each directory, and a scan opens a
        // thousand.
        let mut buffer = [MaybeUninit::uninit(); ENTRIES_BYTES];
        let mut entries = RawDir::new(&self.dir, &mut buffer);
        let mut names = Names::default();
        while let Some(entry) = entries.next() {
            let Some(entry) = self.failures.found(|| self.path.clone(), call(|| Ok(entry?))) else {
                break;
            };
            if let Some(name) =
                entry.file_name().to_str().ok().filter(|name| !matches!(*name, "." | ".."))
            {
                names.push(name, entry.file_type() == FileType::RegularFile);
            }
        }
        names.sort();
        names
    }

    fn listed(&self) -> &Names {
        self.names.get_or_init(|| self.list())
    }

    /// Whether the list, without another call, shows that it has no entry with that name.
    fn lacks_by_list(&self, name: &str) -> bool {
        self.names.get().is_some_and(|names| names.get(name).is_none())
    }

    /// The names in it when it was listed, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.listed().iter()
    }

    /// Whether it had an entry with that name when it was listed.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.listed().get(name).is_some()
    }

    /// Whether there is no entry with that name now. Makes one call, which neither lists nor opens.
    #[must_use]
    pub fn lacks(&self, name: &str) -> bool {
        if self.lacks_by_list(name) {
            return true;
        }
        // The kernel cuts the target to the buffer. Its text is not needed.
        let mut buffer = [MaybeUninit::<u8>::uninit()];
        let link = call(|| Ok(readlinkat_raw(&self.dir, name, &mut buffer[..]).map(|_| ())?));
        self.note(name, &link);
        link.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Whether a listed entry could no longer be found. Then the facts may be a mix of two states.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.lost.get()
    }

    /// Whether there is a directory with that name now.
    #[must_use]
    pub fn has_folder_now(&self, name: &str) -> bool {
        let stat = call(|| Ok(fstatat(&self.dir, name, AtFlags::empty())?));
        self.note(name, &stat);
        stat.is_ok_and(|stat| kind(stat.st_mode) == SFlag::S_IFDIR)
    }

    /// A directory in it, or behind a link in it.
    #[must_use]
    pub fn folder(&self, name: &str) -> Option<Folder> {
        if self.lacks_by_list(name) {
            return None;
        }
        Folder::open(&self.dir, Path::new(name), self.below(name), self.failures.clone())
    }

    /// The text of a file in it, like [`HostRoot::read`](super::HostRoot::read).
    #[must_use]
    pub fn read(&self, name: &str) -> Option<String> {
        let is_listed_as_other = match self.names.get() {
            Some(names) => !names.get(name)?.is_file,
            None => false,
        };
        // With O_NONBLOCK, a pipe without a writer opens at once and ends at once.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let file = self.found(name, call(|| Ok(openat(&self.dir, name, flags, Mode::empty())?)))?;
        // An entry with another listed kind may be a link to a file, and not every file system
        // lists kinds. Before the listing this check is skipped: it would be one of every four
        // calls of a scan.
        if is_listed_as_other
            && kind(self.found(name, call(|| Ok(fstat(&file)?)))?.st_mode) != SFlag::S_IFREG
        {
            return None;
        }
        // An attribute of sysfs reports the size of a page.
        let bytes = self.found(name, call(|| read_bounded(File::from(file), ATTRIBUTE_BYTES)))?;
        Some(text_of(&bytes)).filter(|text| !text.is_empty())
    }

    /// The literal target of a link in it, also if the target does not exist.
    #[must_use]
    pub fn link_target(&self, name: &str) -> Option<String> {
        if self.lacks_by_list(name) {
            return None;
        }
        let mut buffer = [MaybeUninit::<u8>::uninit(); LINK_BYTES];
        let read = call(|| Ok(readlinkat_raw(&self.dir, name, &mut buffer[..])?.0));
        Some(str::from_utf8(self.found(name, read)?).ok()?.to_owned())
    }

    /// The last component of a link's target, like
    /// [`HostRoot::link_name`](super::HostRoot::link_name).
    #[must_use]
    pub fn link_name(&self, name: &str) -> Option<String> {
        Some(Path::new(&self.link_target(name)?).file_name()?.to_str()?.to_owned())
    }

    fn found<T>(&self, name: &str, result: io::Result<T>) -> Option<T> {
        self.note(name, &result);
        // Before it was listed, a missing file is no surprise.
        let is_gone = |error: &io::Error| {
            matches!(
                Errno::from_raw(error.raw_os_error().unwrap_or_default()),
                Errno::ENOENT | Errno::ENODEV
            )
        };
        if result.as_ref().is_err_and(is_gone) && self.names.get().is_some() {
            self.lost.set(true);
        }
        result.ok()
    }

    /// Records an error unless it proves absence.
    fn note<T>(&self, name: &str, result: &io::Result<T>) {
        if let Err(error) = result {
            self.failures.note(|| self.below(name), error);
        }
    }

    fn below(&self, name: &str) -> String {
        [&self.path, "/", name].concat()
    }
}

/// The file kind of a mode.
fn kind(mode: u32) -> SFlag {
    SFlag::from_bits_truncate(mode) & SFlag::S_IFMT
}

#[cfg(test)]
mod tests {
    use super::super::HostRoot;
    use nix::unistd::mkfifo;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn reads_are_of_the_opened_directory_and_removals_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("device");
        fs::create_dir_all(device.join("net/eth0")).unwrap();
        fs::write(device.join("uevent"), "DRIVER=one\n").unwrap();
        fs::write(device.join("empty"), "").unwrap();
        fs::write(device.join("long"), "x".repeat(9000)).unwrap();
        symlink("../../drivers/one", device.join("driver")).unwrap();
        mkfifo(&device.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        symlink("uevent", device.join("same")).unwrap();
        symlink("device", dir.path().join("link")).unwrap();

        let root = HostRoot::new(dir.path());
        assert!(root.folder("none").is_none() && root.folder("device/uevent").is_none());
        let folder = root.folder("link").unwrap();
        // Before it is listed no entry counts as lost, and a pipe is not a regular file.
        assert_eq!(
            (folder.read("uevent").as_deref(), folder.read("pipe"), folder.read("other")),
            (Some("DRIVER=one"), None, None)
        );
        assert!(
            folder.lacks("other")
                && !folder.lacks("uevent")
                && !folder.lacks("driver")
                && !folder.has_lost()
        );
        assert_eq!(
            folder.names().collect::<Vec<_>>(),
            ["driver", "empty", "long", "net", "pipe", "same", "uevent"]
        );
        assert_eq!(folder.read("uevent").as_deref(), Some("DRIVER=one"));
        assert_eq!(
            folder.read("same").as_deref(),
            Some("DRIVER=one"),
            "a link to a file is read as the file"
        );
        assert_eq!(folder.read("long").map(|text| text.len()), Some(9000));
        assert_eq!(
            (folder.read("empty"), folder.read("pipe"), folder.read("net"), folder.read("other")),
            (None, None, None, None)
        );
        assert_eq!(folder.link_name("driver").as_deref(), Some("one"));
        assert_eq!(folder.folder("net").unwrap().names().collect::<Vec<_>>(), ["eth0"]);
        assert!(!folder.has_lost());

        // Another device takes its name.
        fs::rename(&device, dir.path().join("old")).unwrap();
        fs::create_dir(&device).unwrap();
        fs::write(device.join("uevent"), "DRIVER=two\n").unwrap();
        assert_eq!(folder.read("uevent").as_deref(), Some("DRIVER=one"));
        fs::remove_file(dir.path().join("old/uevent")).unwrap();
        assert_eq!(folder.read("uevent"), None);
        assert!(folder.has_lost());
        let above = root.folder("/").unwrap();
        assert!(above.has_folder_now("device") && !above.has_folder_now("gone"));
    }
}
