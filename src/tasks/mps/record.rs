//! The record of what was set up, in the run directory: the next process puts back the compute mode
//! of GPUs that its configuration no longer shares by MPS. A reboot resets that mode and removes
//! the directory.

use super::machine::Left;
use crate::domain::ResourceName;
use crate::host::private::make_private_folder;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The file, and its content.
#[derive(Debug)]
pub(super) struct Record {
    file: PathBuf,
    known: Mutex<BTreeMap<ResourceName, Left>>,
}

impl Record {
    /// Reads the file. Without one, or with one that cannot be read, nothing is known.
    pub(super) fn read(file: PathBuf) -> Self {
        let read = match fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(error),
        };
        let known = read.unwrap_or_else(|error| {
            tracing::warn!(file = %file.display(), %error, "the record of MPS cannot be read; the compute mode of GPUs that are no longer shared by MPS stays");
            BTreeMap::new()
        });
        Record { file, known: Mutex::new(known) }
    }

    /// What is recorded.
    pub(super) fn all(&self) -> BTreeMap<ResourceName, Left> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds the GPUs of a resource.
    pub(super) fn add(
        &self,
        resource: &ResourceName,
        root: &str,
        gpus: &BTreeSet<String>,
    ) -> Result<(), String> {
        self.change(|known| {
            let left = known.entry(resource.clone()).or_default();
            root.clone_into(&mut left.root);
            left.gpus.extend(gpus.iter().cloned());
        })
    }

    pub(super) fn remove(&self, resource: &ResourceName) -> Result<(), String> {
        self.change(|known| drop(known.remove(resource)))
    }

    /// Written under another name and renamed: a crash leaves the former content or the new one.
    fn change(&self, change: impl FnOnce(&mut BTreeMap<ResourceName, Left>)) -> Result<(), String> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = known.clone();
        change(&mut next);
        if next == *known {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            // A start comes here before its sockets exist.
            if let Some(folder) = self.file.parent() {
                make_private_folder(folder)?;
            }
            let new = self.file.with_extension("new");
            fs::write(&new, serde_json::to_vec(&next)?)?;
            fs::rename(new, &self.file)
        };
        write().map_err(|error| {
            format!("the record of MPS in {} cannot be written: {error}", self.file.display())
        })?;
        *known = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_knows_every_gpu_that_was_set_up() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run/mps.json");
        let name: ResourceName = "nvidia.com/gpu".parse().unwrap();
        let gpus = |all: &[&str]| all.iter().map(|gpu| (*gpu).to_owned()).collect();
        let record = Record::read(file.clone());
        record.add(&name, "/run/mps", &gpus(&["GPU-1", "GPU-2"])).unwrap();
        record.add(&name, "/run/mps", &gpus(&["GPU-3"])).unwrap();
        let left = Left { root: "/run/mps".into(), gpus: gpus(&["GPU-1", "GPU-2", "GPU-3"]) };
        let next = Record::read(file.clone());
        assert_eq!(next.all(), BTreeMap::from([(name.clone(), left)]));
        next.remove(&name).unwrap();
        assert!(Record::read(file.clone()).all().is_empty());

        fs::write(&file, "{").unwrap();
        assert!(Record::read(file.clone()).all().is_empty());
        fs::remove_dir_all(dir.path().join("run")).unwrap();
        fs::write(dir.path().join("run"), "").unwrap();
        let lost = next.add(&name, "/run/mps", &gpus(&["GPU-1"])).unwrap_err();
        assert!(lost.contains("mps.json cannot be written"), "{lost}");
        assert!(next.all().is_empty(), "what is not recorded is not known");
    }
}
