//! NVIDIA's management library (NVML), for what the driver's files do not tell; the only place that names it.
//!
//! The library belongs to the driver and is loaded at run time, asked, and let go again: until it is ended it keeps the GPUs open,
//! and nobody could reset them, change their MIG mode or unload the driver. Afterwards no file of the driver is open; that of driver 580
//! stays mapped all the same, with 4 MB.
//!
//! A call may take seconds (a GPU that nobody uses is first woken up) or never end (a driver that hangs), so it is made on a
//! thread of its own. A MIG instance is asked for by its place: since it has a UUID of its own, the library knows it by both
//! (NVML's change log, `nvmlDeviceGetHandleByUUID`).
//!
//! Which GPUs are joined by NVLink is asked pair by pair (`nvmlDeviceGetP2PStatus`), which says the same of a bridge between two
//! cards, of a mesh and of a switch, whether the switch can be seen or not; links are counted by where they lead.
//!
//! A GPU that has no MIG mode, or a library that knows of none, says so by an error: that is a GPU that is not in it.

use super::HostRoot;
#[cfg(feature = "nvml")]
use crate::domain::{NvLinks, PciAddress};
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
    /// Why names that were asked for were not told, or nothing at all.
    pub failed: Option<String>,
    /// Why links or MIG modes were not told, which no name waits for.
    pub untold: Option<String>,
}

impl NvmlAnswer {
    fn failed(why: impl Into<String>) -> Self {
        NvmlAnswer { failed: Some(why.into()), ..NvmlAnswer::default() }
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
    use crate::domain::{NvmlAsked, NvmlGpu};

    let nvml = nvml_wrapper::Nvml::builder().lib_path(library.as_os_str()).init()?;
    let mut answer = NvmlAnswer::default();
    let mut linked = Vec::new();
    for (address, NvmlAsked { uuid, instances, links, mig_mode }) in question {
        let device = nvml.device_by_pci_bus_id(address.to_string());
        let (device, uuid) = match device.and_then(|device| Ok((uuid.then(|| device.uuid()).transpose()?, device))) {
            Ok((uuid, device)) => (device, uuid),
            Err(error) => {
                let failed = if *uuid { &mut answer.failed } else { &mut answer.untold };
                failed.get_or_insert_with(|| format!("the GPU {address}: {error}"));
                continue;
            }
        };
        let mut gpu = NvmlGpu::default();
        for (gi, ci) in instances {
            let whole = uuid.as_deref().unwrap_or_default();
            match nvml.device_by_uuid(format!("MIG-{whole}/{gi}/{ci}")).and_then(|instance| instance.uuid()) {
                Ok(name) => drop(gpu.instances.insert((*gi, *ci), name)),
                Err(error) => drop(answer.failed.get_or_insert_with(|| format!("the MIG instance {gi}/{ci} of {address}: {error}"))),
            }
        }
        if *mig_mode {
            // What is set for later does not count yet.
            match known(device.mig_mode()) {
                Ok(mode) => gpu.mig_mode = Some(mode.is_some_and(|mode| mode.current != 0)),
                Err(error) => drop(answer.untold.get_or_insert_with(|| format!("the MIG mode of the GPU {address}: {error}"))),
            }
        }
        gpu.uuid = uuid;
        answer.told.gpus.insert(*address, gpu);
        linked.extend(links.then_some((*address, device)));
    }
    for (address, device) in &linked {
        match links(device, *address, &linked) {
            Ok(links) => answer.told.gpus.entry(*address).or_default().links = Some(links),
            Err(error) => drop(answer.untold.get_or_insert_with(|| format!("the links of the GPU {address}: {error}"))),
        }
    }
    Ok(answer)
}

/// More links than any GPU has: Blackwell's have 18.
#[cfg(feature = "nvml")]
const LINKS_MAX: u32 = 36;

/// The links of a GPU, and which of `all` it reaches by them.
#[cfg(feature = "nvml")]
fn links(
    device: &nvml_wrapper::Device<'_>,
    own: PciAddress,
    all: &[(PciAddress, nvml_wrapper::Device<'_>)],
) -> Result<NvLinks, nvml_wrapper::error::NvmlError> {
    use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus};

    let (mut links, mut ends) = (NvLinks::default(), Vec::new());
    for link in (0..LINKS_MAX).map(|number| device.link_wrapper_for(number)) {
        match known(link.is_active())? {
            Some(true) => ends.push(known(link.remote_pci_info())?.and_then(|remote| remote.bus_id.parse::<PciAddress>().ok())),
            Some(false) => links.down += 1,
            None => {}
        }
    }
    for (address, other) in all.iter().filter(|(address, _)| *address != own && !ends.is_empty()) {
        match known(device.p2p_status(other, P2pCapabilitiesIndex::NvLink)) {
            Ok(Some(P2pStatus::Ok)) => {
                let straight = ends.iter().filter(|end| **end == Some(*address)).count();
                links.peers.insert(*address, u32::try_from(straight).unwrap_or(u32::MAX).max(1));
            }
            Ok(_) => {}
            // The other one may be lost: that is no failure of this one, and is looked at again.
            Err(_) => links.down += 1,
        }
    }
    Ok(links)
}

/// `None` where there is nothing of the kind, or a library so old that it knows of none.
#[cfg(feature = "nvml")]
fn known<T>(told: Result<T, nvml_wrapper::error::NvmlError>) -> Result<Option<T>, nvml_wrapper::error::NvmlError> {
    use nvml_wrapper::error::NvmlError::{FailedToLoadSymbol, InvalidArg, NotSupported, UnexpectedVariant};

    match told {
        Ok(told) => Ok(Some(told)),
        Err(NotSupported | InvalidArg | FailedToLoadSymbol(_) | UnexpectedVariant(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
