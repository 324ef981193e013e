//! NVIDIA's management library (NVML), for what the driver's files do not tell; the only place that names it.
//!
//! The library belongs to the driver and is loaded at run time, asked, and let go again: as long as it is loaded it keeps the
//! GPUs open, and nobody could reset them, change their MIG mode or unload the driver.
//!
//! A call may take seconds (a GPU that nobody uses is first woken up) or never end (a driver that hangs), so it is made on a
//! thread of its own. A MIG instance is asked for by its place: since it has a UUID of its own, the library knows it by both
//! (NVML's change log, `nvmlDeviceGetHandleByUUID`).

use super::HostRoot;
use crate::domain::{NvmlLibrary, NvmlQuestion, NvmlSnapshot};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

/// The name by which the loader knows it.
const NAME: &str = "libnvidia-ml.so.1";

/// Where drivers put it, below the root of the host: first a driver that came in a container, then those of distributions,
/// then that of a read-only system.
const FOLDERS: [&str; 8] = [
    "run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "run/nvidia/driver/usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "home/kubernetes/bin/nvidia/lib64",
];

/// What came of asking.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmlAnswer {
    /// What was told.
    pub told: NvmlSnapshot,
    /// Why it is not all that was asked for.
    pub failed: Option<String>,
}

impl NvmlAnswer {
    fn failed(why: impl Into<String>) -> Self {
        NvmlAnswer { told: NvmlSnapshot::default(), failed: Some(why.into()) }
    }
}

/// Asks on a thread of its own, which hands the answer to `tell`, sooner, later or never.
///
/// # Errors
/// When there is no thread to be had.
pub fn ask_nvml(
    root: &HostRoot,
    library: &NvmlLibrary,
    question: NvmlQuestion,
    tell: impl FnOnce(NvmlAnswer) + Send + 'static,
) -> io::Result<()> {
    let libraries = candidates(root, library);
    let work = move || {
        super::step_back();
        // A library that lacks the function to end it panics where it is let go.
        let answer = catch_unwind(AssertUnwindSafe(|| ask_first(&libraries, &question)));
        tell(answer.unwrap_or_else(|_| NvmlAnswer::failed(format!("{NAME} is not complete"))));
    };
    std::thread::Builder::new().name("nvml".into()).spawn(work).map(drop)
}

/// The libraries to try. In a captured tree that of this machine has nothing to say.
fn candidates(root: &HostRoot, library: &NvmlLibrary) -> Vec<PathBuf> {
    match library {
        NvmlLibrary::Off => Vec::new(),
        NvmlLibrary::At(path) => vec![path.clone()],
        NvmlLibrary::Auto => {
            // The loader's own comes first: it fits to this process.
            let own = root.is_live().then(|| PathBuf::from(NAME));
            let below = FOLDERS.iter().map(|folder| format!("{folder}/{NAME}")).filter(|path| root.exists(path));
            own.into_iter().chain(below.map(|path| root.path(&path))).collect()
        }
    }
}

/// The answer of the first library that can be loaded and has something to say.
fn ask_first(libraries: &[PathBuf], question: &NvmlQuestion) -> NvmlAnswer {
    let mut why = Vec::new();
    for library in libraries {
        match library_says(library, question) {
            Ok(answer) => return answer,
            Err(error) => why.push(format!("{}: {error}", library.display())),
        }
    }
    if why.is_empty() {
        why.push(format!("{NAME} is in none of the folders where drivers put it; `[nvidia] nvml` has room for its path"));
    }
    NvmlAnswer::failed(why.join("; "))
}

#[cfg(not(feature = "nvml"))]
fn library_says(_: &std::path::Path, _: &NvmlQuestion) -> Result<NvmlAnswer, &'static str> {
    Err("this build of Holdfast has no part that asks NVML (cargo feature `nvml`)")
}

#[cfg(feature = "nvml")]
fn library_says(library: &std::path::Path, question: &NvmlQuestion) -> Result<NvmlAnswer, nvml_wrapper::error::NvmlError> {
    use crate::domain::NvmlGpu;

    let nvml = nvml_wrapper::Nvml::builder().lib_path(library.as_os_str()).init()?;
    let mut answer = NvmlAnswer::default();
    for (address, places) in question {
        let uuid = nvml.device_by_pci_bus_id(address.to_string()).and_then(|gpu| gpu.uuid());
        let uuid = match uuid {
            Ok(uuid) => uuid,
            Err(error) => {
                answer.failed.get_or_insert_with(|| format!("the GPU {address}: {error}"));
                continue;
            }
        };
        let mut gpu = NvmlGpu::default();
        for (gi, ci) in places {
            match nvml.device_by_uuid(format!("MIG-{uuid}/{gi}/{ci}")).and_then(|instance| instance.uuid()) {
                Ok(name) => drop(gpu.instances.insert((*gi, *ci), name)),
                Err(error) => drop(answer.failed.get_or_insert_with(|| format!("the MIG instance {gi}/{ci} of {address}: {error}"))),
            }
        }
        gpu.uuid = Some(uuid);
        answer.told.gpus.insert(*address, gpu);
    }
    Ok(answer)
}
