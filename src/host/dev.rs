//! The entries of `/dev`, for selection by a pattern.

use super::nodes::TooMany;
use super::root::HostRoot;

/// Folders of `/dev` without devices: shared memory, message queues, huge pages, the reader's own
/// descriptors.
const NO_DEVICES: [&str; 4] = ["shm", "mqueue", "hugepages", "fd"];
/// The kernel's deepest path is `/dev/bus/usb/001/001`.
const DEPTH_MAX: usize = 10;
/// A node with ten thousand disks has a few links to each.
const ENTRIES_MAX: usize = 100_000;

/// An entry of `/dev`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevEntry {
    /// Its path below `/dev`.
    pub path: String,
    /// Whether it is a folder.
    pub is_folder: bool,
}

impl HostRoot {
    /// The entries of `/dev`, and of the folders in it that `may_have` accepts. A folder comes
    /// before its content.
    ///
    /// # Errors
    /// If there are more than a hundred thousand entries.
    pub fn dev_entries(&self, may_have: &dyn Fn(&str) -> bool) -> Result<Vec<DevEntry>, TooMany> {
        let mut entries = Vec::new();
        self.add_entries("", DEPTH_MAX, may_have, &mut entries)?;
        Ok(entries)
    }

    fn add_entries(
        &self,
        folder: &str,
        depth: usize,
        may_have: &dyn Fn(&str) -> bool,
        entries: &mut Vec<DevEntry>,
    ) -> Result<(), TooMany> {
        let mut here = Vec::new();
        for (name, kind) in self.typed_entries(&format!("dev/{folder}")) {
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            here.push(DevEntry { path, is_folder: kind.is_dir() });
        }
        if entries.len() + here.len() > ENTRIES_MAX {
            return Err(TooMany { folder: "/dev".into(), kind: "entries", max: ENTRIES_MAX });
        }
        here.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        for entry in here {
            let goes_down = entry.is_folder
                && depth > 0
                && !NO_DEVICES.contains(&&*entry.path)
                && may_have(&entry.path);
            let path = goes_down.then(|| entry.path.clone());
            entries.push(entry);
            if let Some(path) = path {
                self.add_entries(&path, depth - 1, may_have, entries)?;
            }
        }
        Ok(())
    }
}
