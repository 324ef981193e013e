//! The bodies of the fuzz targets (fuzz/README.md): one function for each format that other
//! programs, the kernel, or a damaged disk may fill with anything.
//!
//! A target panics if its input breaks a promise: a damaged file is never read as an empty one,
//! what is read and written is the same, the end of a file that is missing is reported. The fuzzers
//! of `fuzz/` call these functions, and the tests below call them with every file of the corpus.
//! Nothing of this is in a shipped binary.

mod cdi;
mod config;
mod device_plugin;
mod dra;
mod input;
mod journal;
mod kernel;
mod kubelet;
mod protocols;
mod records;
#[cfg(test)]
mod tests;

pub use cdi::cdi;
pub use config::{config, import};
pub use device_plugin::device_plugin;
pub use dra::dra;
pub use journal::journal;
pub use kernel::{kernel_log, nvml, uevent};
pub use kubelet::{checkpoint, claim_state};
pub use protocols::{control, handover, http2};
pub use records::records;

/// Files of a corpus, with their names.
type Seeds = Vec<(&'static str, Vec<u8>)>;

/// A fuzz target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name of its program in `fuzz/fuzz_targets`, and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Panics if the input breaks a promise.
    pub run: fn(&[u8]),
    /// The inputs that the fuzzer begins with.
    pub seeds: fn() -> Seeds,
}

/// Every target.
pub const TARGETS: [Target; 15] = [
    Target { name: "cdi", run: cdi, seeds: cdi::seeds },
    Target { name: "checkpoint", run: checkpoint, seeds: kubelet::checkpoint_seeds },
    Target { name: "claim_state", run: claim_state, seeds: kubelet::claim_state_seeds },
    Target { name: "config", run: config, seeds: config::config_seeds },
    Target { name: "control", run: control, seeds: protocols::control_seeds },
    Target { name: "device_plugin", run: device_plugin, seeds: device_plugin::seeds },
    Target { name: "dra", run: dra, seeds: dra::seeds },
    Target { name: "handover", run: handover, seeds: protocols::handover_seeds },
    Target { name: "http2", run: http2, seeds: protocols::http2_seeds },
    Target { name: "import", run: import, seeds: config::import_seeds },
    Target { name: "journal", run: journal, seeds: journal::seeds },
    Target { name: "kernel_log", run: kernel_log, seeds: kernel::kernel_log_seeds },
    Target { name: "nvml", run: nvml, seeds: kernel::nvml_seeds },
    Target { name: "records", run: records, seeds: records::seeds },
    Target { name: "uevent", run: uevent, seeds: kernel::uevent_seeds },
];
