//! A host with one function, for the tests of the signals.

use super::super::testing::{device, write};
use super::{Probe, signals};
use crate::domain::{Device, PciFunction, Reason, Signals};
use crate::host::HostRoot;
use std::path::PathBuf;

/// A function, with the device that discovery made of it.
pub(super) struct Host {
    dir: tempfile::TempDir,
    pub(super) root: HostRoot,
    pub(super) device: Device,
}

impl Host {
    /// A GPU whose folder is empty.
    pub(super) fn new(address: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Host { root: HostRoot::new(dir.path()), device: device(address, "one"), dir };
        std::fs::create_dir_all(host.path("")).unwrap();
        host
    }

    pub(super) fn function(&mut self) -> &mut PciFunction {
        self.device.pci.as_mut().unwrap()
    }

    /// The path of a file in the function's folder.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        let address = self.device.pci.as_ref().unwrap().address;
        self.dir.path().join(format!("sys/bus/pci/devices/{address}")).join(file)
    }

    /// Writes a file in the function's folder.
    pub(super) fn write(&self, file: &str, text: &str) {
        write(&self.path(""), file, text);
    }

    /// Writes a file below the root.
    pub(super) fn write_at(&self, rel: &str, text: impl AsRef<[u8]>) {
        let path = self.dir.path().join(rel);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(super) fn probe(&self) -> Probe<'_> {
        let function = self.device.pci.as_ref().unwrap();
        Probe {
            root: &self.root,
            function,
            dir: super::folder(function.address),
            signals: Signals::default(),
        }
    }

    pub(super) fn signals(&self) -> Signals {
        signals(&self.root, &self.device)
    }

    /// The symptoms, as reason and text.
    pub(super) fn symptoms(&self) -> Vec<(Reason, String)> {
        self.signals()
            .symptoms
            .into_iter()
            .map(|symptom| (symptom.reason, symptom.detail))
            .collect()
    }

    pub(super) fn remarks(&self) -> Vec<String> {
        self.signals().remarks.into_iter().collect()
    }
}
