//! Resets a PCI function with the kernel's interface: `1` into its `reset` in sysfs.
//!
//! The kernel chooses the method (`reset_method` shows it: `flr`, `pm`, `bus`, a quirk of the
//! device) and saves and restores the configuration. The driver stays bound and is notified. A
//! function that cannot be reset has no such file. Resetting a physical function also resets its
//! virtual and its scalable functions, so a function with any is not reset.

use super::HostRoot;
use crate::domain::{PciAddress, is_scalable_name};
use std::fs::OpenOptions;
use std::io::{self, Write};

/// Why a function is not reset.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// It does not exist.
    #[error("PCI function {0} no longer exists")]
    NotFound(PciAddress),
    /// The kernel has no reset method for it.
    #[error(
        "PCI function {0} cannot be reset: the kernel has no reset method for it (its sysfs folder has no file `reset`)"
    )]
    NoWay(PciAddress),
    /// Other functions would be reset with it.
    #[error(
        "PCI function {address} is not reset, because its {vfs} virtual functions would be reset too"
    )]
    HasVirtualFunctions {
        /// The function.
        address: PciAddress,
        /// The number of its virtual functions.
        vfs: u32,
    },
    /// Its scalable functions would be reset with it.
    #[error(
        "PCI function {address} is not reset, because its scalable function {name} would be reset too"
    )]
    HasScalableFunctions {
        /// The function.
        address: PciAddress,
        /// The first of them, by its name on the auxiliary bus.
        name: String,
    },
    /// The write failed.
    #[error("PCI function {address} cannot be reset: {source}{}", hint(.source))]
    Failed {
        /// The function.
        address: PciAddress,
        /// The kernel's error.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; a reset needs root, and in a container a writable mount of the host's /sys"
        }
        _ => "",
    }
}

/// Resets a function, and waits for the end: milliseconds, or seconds if the whole bus is reset.
///
/// # Errors
/// If it does not exist, cannot be reset, or if the kernel refuses.
pub fn reset_function(root: &HostRoot, address: PciAddress) -> Result<(), ResetError> {
    let folder = format!("sys/bus/pci/devices/{address}");
    if !root.is_dir(&folder) {
        return Err(ResetError::NotFound(address));
    }
    let vfs = root
        .read(&format!("{folder}/sriov_numvfs"))
        .and_then(|count| count.parse().ok())
        .unwrap_or(0);
    if vfs > 0 {
        return Err(ResetError::HasVirtualFunctions { address, vfs });
    }
    if let Some(name) = root.entries(&folder).into_iter().find(|name| is_scalable_name(name)) {
        return Err(ResetError::HasScalableFunctions { address, name });
    }
    let file = root.path(&format!("{folder}/reset"));
    let written =
        OpenOptions::new().write(true).open(file).and_then(|mut file| file.write_all(b"1"));
    written.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ResetError::NoWay(address),
        _ => ResetError::Failed { address, source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_reset_only_if_no_other_is_affected() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let address: PciAddress = "0000:18:00.0".parse().unwrap();
        let folder = dir.path().join("sys/bus/pci/devices/0000:18:00.0");
        let error = || reset_function(&root, address).unwrap_err().to_string();
        assert_eq!(error(), "PCI function 0000:18:00.0 no longer exists");
        std::fs::create_dir_all(&folder).unwrap();
        assert!(error().contains("no file `reset`"), "{}", error());
        assert!(!folder.join("reset").exists(), "nothing is made in a tree");
        std::fs::write(folder.join("reset"), "").unwrap();
        std::fs::write(folder.join("sriov_numvfs"), "4\n").unwrap();
        assert!(error().contains("its 4 virtual functions"), "{}", error());
        std::fs::write(folder.join("sriov_numvfs"), "0\n").unwrap();
        std::fs::create_dir(folder.join("mlx5_core.sf.2")).unwrap();
        assert!(error().contains("scalable function mlx5_core.sf.2"), "{}", error());
        std::fs::remove_dir(folder.join("mlx5_core.sf.2")).unwrap();
        reset_function(&root, address).unwrap();
        assert_eq!(std::fs::read_to_string(folder.join("reset")).unwrap(), "1");
    }
}
