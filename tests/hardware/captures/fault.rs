//! Faults of a copied machine: files with other content, missing files, and files whose read hangs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The content that reads return when no device answers.
pub(crate) const ONES: [u8; 64] = [0xff; 64];

/// A change of a function's file, relative to its folder, or of the machine's, relative to its
/// root.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Edit<'a> {
    Text(&'a str, &'a [u8]),
    Gone(&'a str),
    Pipe(&'a str),
    /// A link with another target.
    Leads(&'a str, &'a str),
}

impl<'a> Edit<'a> {
    /// The file that the edit changes.
    pub(crate) fn file(&self) -> &'a str {
        match self {
            Edit::Text(file, _) | Edit::Gone(file) | Edit::Pipe(file) | Edit::Leads(file, _) => {
                file
            }
        }
    }
}

/// A fault that can be undone.
pub(crate) struct Fault {
    /// Each path, where its file is kept, whether there was one, and the first folder that was
    /// created for it.
    undo: Vec<(PathBuf, PathBuf, bool, Option<PathBuf>)>,
}

impl Fault {
    /// Replaces files of the machine.
    pub(crate) fn make(root: &Path, address: &str, edits: &[Edit<'_>]) -> Fault {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let mut undo = Vec::new();
        for edit in edits {
            let rel = edit.file();
            let is_of_machine = rel.starts_with("sys/") || rel.starts_with("dev/");
            let path = if is_of_machine {
                root.join(rel)
            } else {
                root.join("sys/bus/pci/devices").join(address).join(rel)
            };
            let made = path
                .parent()
                .unwrap()
                .ancestors()
                .take_while(|folder| !folder.exists())
                .last()
                .map(PathBuf::from);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let kept =
                root.with_file_name(format!("kept{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
            let was_there = fs::rename(&path, &kept).is_ok();
            match edit {
                Edit::Text(_, text) => fs::write(&path, text).unwrap(),
                Edit::Gone(_) => assert!(was_there, "{}", path.display()),
                Edit::Leads(_, target) => symlink(target, &path).unwrap(),
                Edit::Pipe(_) => nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            }
            undo.push((path, kept, was_there, made));
        }
        Fault { undo }
    }

    /// Restores all files.
    pub(crate) fn mend(self) {
        for (path, kept, was_there, made) in self.undo.into_iter().rev() {
            drop(fs::remove_file(&path));
            if was_there {
                fs::rename(kept, path).unwrap();
            }
            made.into_iter().for_each(|made| fs::remove_dir_all(made).unwrap());
        }
    }
}
