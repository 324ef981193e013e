//! NVIDIA's management library (NVML), for facts that the driver's files do not contain, and for
//! errors where the kernel's log cannot be read ([`events`]). The only files that use it.
//!
//! The library belongs to the driver. A call may take seconds (an idle GPU wakes up first) or never
//! return (a driver that hangs), and the library may crash. So only another process loads it
//! ([`process`]). While that process runs, the GPUs are open: they cannot be reset, their MIG mode
//! cannot be changed and the driver cannot be unloaded. So it ends after a query.
//!
//! A MIG instance is queried by its place: since drivers give it
//! a UUID, the library accepts both (NVML's change log, `nvmlDeviceGetHandleByUUID`).
//!
//! NVLink connections are queried pair by pair (`nvmlDeviceGetP2PStatus`). The result is the same
//! for a bridge between two cards, for a mesh, and for a switch, visible or not. Links are counted
//! by their remote end.
//!
//! A GPU without MIG mode, or a library without that function, returns an error: this counts as not
//! in MIG mode.

mod events;
mod process;

pub use events::{EVENT_WAIT_MAX, NvmlReport};
pub use process::{NVML_PROCESS, query_nvml, query_nvml_here, serve_nvml, watch_nvml_events};

use super::HostRoot;
#[cfg(feature = "nvml")]
use crate::domain::{GpuDescription, MigAttributes, MigPlace, NvLinks, PciAddress};
use crate::domain::{NvmlLibrary, NvmlQuery, NvmlSnapshot};
use serde::{Deserialize, Serialize};
#[cfg(feature = "nvml")]
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The library's name for the loader.
const NAME: &str = "libnvidia-ml.so.1";

/// The directories of the library, below a root of the driver.
const FOLDERS: [&str; 5] =
    ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "lib64"];

/// The result of a query.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlAnswer {
    /// The facts.
    pub facts: NvmlSnapshot,
    /// Why requested names are missing, or why all facts are.
    pub failed: Option<String>,
    /// Why links or MIG modes are missing. Names do not depend on them.
    pub incomplete: Option<String>,
}

impl NvmlAnswer {
    fn failed(why: impl Into<String>) -> Self {
        NvmlAnswer { failed: Some(why.into()), ..NvmlAnswer::default() }
    }
}

/// The libraries to try. In a captured tree this machine's library is not used.
fn candidates(root: &HostRoot, library: &NvmlLibrary) -> Vec<PathBuf> {
    match library {
        NvmlLibrary::Off => Vec::new(),
        NvmlLibrary::At(path) => vec![path.clone()],
        NvmlLibrary::Auto => {
            let roots = root.nvidia().of_driver();
            // The loader's library comes first: it fits this process. It is that of the host.
            let own = (root.is_live() && roots.contains(&"")).then(|| PathBuf::from(NAME));
            let mut found: Vec<PathBuf> = own.into_iter().collect();
            // Where a driver runs in a container, that of the host is an unused one.
            for below in roots.into_iter().rev() {
                let inside = root.rooted_at(below);
                let paths = FOLDERS.iter().filter_map(|folder| {
                    // Links are followed inside the driver's root.
                    Some(inside.path(&inside.installed(&format!("{folder}/{NAME}"))?.path))
                });
                for path in paths {
                    if !found.contains(&path) {
                        found.push(path);
                    }
                }
            }
            found
        }
    }
}

/// The answer of the first library that can be loaded and returns an answer.
fn query_first(libraries: &[PathBuf], query: &NvmlQuery) -> NvmlAnswer {
    let mut why = Vec::new();
    for library in libraries {
        match query_library(library, query) {
            Ok(answer) => return answer,
            Err(error) => why.push(format!("{}: {error}", library.display())),
        }
    }
    if why.is_empty() {
        why.push(not_found());
    }
    NvmlAnswer::failed(why.join("; "))
}

fn not_found() -> String {
    format!("{NAME} was not found in the usual driver folders; set its path in `[nvidia] nvml`")
}

#[cfg(not(feature = "nvml"))]
const NOT_BUILT: &str = "this build of Holdfast does not support NVML (cargo feature `nvml`)";

#[cfg(not(feature = "nvml"))]
fn query_library(_: &std::path::Path, _: &NvmlQuery) -> Result<NvmlAnswer, &'static str> {
    Err(NOT_BUILT)
}

#[cfg(feature = "nvml")]
fn query_library(
    library: &std::path::Path,
    query: &NvmlQuery,
) -> Result<NvmlAnswer, nvml_wrapper::error::NvmlError> {
    use crate::domain::{MigInstance, NvmlGpu, NvmlGpuQuery};

    let nvml = nvml_wrapper::Nvml::builder().lib_path(library.as_os_str()).init()?;
    let mut answer = NvmlAnswer::default();
    let mut linked = Vec::new();
    for (address, NvmlGpuQuery { uuid, instances, links, mig_mode, described }) in query {
        let device = nvml.device_by_pci_bus_id(address.to_string());
        let (device, uuid) = match device
            .and_then(|device| Ok((uuid.then(|| device.uuid()).transpose()?, device)))
        {
            Ok((uuid, device)) => (device, uuid),
            Err(error) => {
                let failed = if *uuid { &mut answer.failed } else { &mut answer.incomplete };
                failed.get_or_insert_with(|| format!("the GPU {address}: {error}"));
                continue;
            }
        };
        let mut gpu = NvmlGpu::default();
        let mut sizes = Ok(BTreeMap::new());
        let numbers = numbers(&device, instances.is_empty()).unwrap_or_else(|error| {
            let why = || format!("the numbers of the MIG instances of {address}: {error}");
            answer.incomplete.get_or_insert_with(why);
            BTreeMap::new()
        });
        for (gi, ci) in instances {
            let whole = uuid.as_deref().unwrap_or_default();
            match nvml
                .device_by_uuid(format!("MIG-{whole}/{gi}/{ci}"))
                .and_then(|instance| Ok((instance.uuid()?, known(instance.name())?, instance)))
            {
                Ok((uuid, name, instance)) => {
                    // Names do not depend on sizes.
                    let size = described.then(|| attributes(&instance)).transpose();
                    sizes = sizes.and_then(|mut sizes: BTreeMap<_, _>| {
                        sizes.extend(size?.flatten().map(|size| ((*gi, *ci), size)));
                        Ok(sizes)
                    });
                    let profile = name.as_deref().and_then(profile_in).map(str::to_owned);
                    let index = numbers.get(&uuid).copied();
                    gpu.instances.insert((*gi, *ci), MigInstance { uuid, profile, index });
                }
                Err(error) => drop(answer.failed.get_or_insert_with(|| {
                    format!("the MIG instance {gi}/{ci} of {address}: {error}")
                })),
            }
        }
        if *mig_mode {
            // A mode that is set for later does not count yet.
            match known(device.mig_mode()) {
                Ok(mode) => gpu.mig_mode = Some(mode.is_some_and(|mode| mode.current != 0)),
                Err(error) => {
                    answer.incomplete.get_or_insert_with(|| {
                        format!("the MIG mode of the GPU {address}: {error}")
                    });
                }
            }
        }
        if *described {
            match sizes.and_then(|sizes| describe(&nvml, &device, sizes)) {
                Ok(description) => gpu.description = Some(description),
                Err(error) => {
                    answer.incomplete.get_or_insert_with(|| {
                        format!("the description of the GPU {address}: {error}")
                    });
                }
            }
        }
        gpu.uuid = uuid;
        answer.facts.gpus.insert(*address, gpu);
        linked.extend(links.then_some((*address, device)));
    }
    for (address, device) in &linked {
        match links(device, *address, &linked) {
            Ok(links) => answer.facts.gpus.entry(*address).or_default().links = Some(links),
            Err(error) => drop(
                answer
                    .incomplete
                    .get_or_insert_with(|| format!("the links of the GPU {address}: {error}")),
            ),
        }
    }
    Ok(answer)
}

/// The MIG instances of a GPU by their UUIDs, with the numbers by which NVML counts them. Numbers
/// without an instance are skipped: NVIDIA's plugin has the same numbers
/// (`nvmlDeviceGetMigDeviceHandleByIndex`, go-nvlib's `VisitMigDevices`). NVML is not called for a
/// whole GPU.
#[cfg(feature = "nvml")]
fn numbers(
    device: &nvml_wrapper::Device<'_>,
    is_whole: bool,
) -> Result<BTreeMap<String, u32>, nvml_wrapper::error::NvmlError> {
    use nvml_wrapper::error::NvmlError::NotFound;

    if is_whole {
        return Ok(BTreeMap::new());
    }
    let count = known(device.mig_device_count())?.unwrap_or_default();
    let mut numbers = BTreeMap::new();
    for number in 0..count.min(INSTANCES_MAX) {
        match device.mig_device_by_index(number) {
            Err(NotFound) => {}
            instance => {
                let Some(instance) = known(instance)? else { continue };
                numbers.insert(instance.uuid()?, number);
            }
        }
    }
    Ok(numbers)
}

/// What labels describe of a GPU.
#[cfg(feature = "nvml")]
fn describe(
    nvml: &nvml_wrapper::Nvml,
    device: &nvml_wrapper::Device<'_>,
    instances: BTreeMap<MigPlace, MigAttributes>,
) -> Result<GpuDescription, nvml_wrapper::error::NvmlError> {
    // The library loads libcuda.so.1 for it, which a container may lack. That is no failure of the
    // GPU.
    let cuda = nvml.sys_cuda_driver_version().ok().filter(|version| *version > 0);
    let memory = known(device.memory_info())?;
    let compute = known(device.cuda_compute_capability())?;
    Ok(GpuDescription {
        memory_mib: memory.map(|memory| memory.total / (1024 * 1024)),
        compute: compute.map(|version| (version.major, version.minor)),
        // A brand of a newer library is no failure of the GPU.
        brand: device.brand().ok().map(|of| brand(of).to_owned()),
        has_mig_mode: known(device.mig_mode())?.is_some(),
        cuda: cuda.map(|version| (version / 1000, version % 1000 / 10)),
        instances,
    })
}

/// A brand as NVIDIA's DRA driver publishes it (go-nvlib, `GetBrandAsString`).
#[cfg(feature = "nvml")]
fn brand(brand: nvml_wrapper::enum_wrappers::device::Brand) -> &'static str {
    use nvml_wrapper::enum_wrappers::device::Brand;

    match brand {
        Brand::Unknown => "Unknown",
        Brand::Quadro => "Quadro",
        Brand::Tesla => "Tesla",
        Brand::NVS => "NVS",
        Brand::GRID => "Grid",
        Brand::GeForce => "GeForce",
        Brand::Titan => "Titan",
        Brand::VApps => "NvidiaVApps",
        Brand::VPC => "NvidiaVPC",
        Brand::VCS => "NvidiaVCS",
        Brand::VWS => "NvidiaVWS",
        Brand::CloudGaming | Brand::VGaming => "NvidiaCloudGaming",
        Brand::QuadroRTX => "QuadroRTX",
        Brand::NvidiaRTX => "NvidiaRTX",
        Brand::Nvidia => "Nvidia",
        Brand::GeForceRTX => "GeForceRTX",
        Brand::TitanRTX => "TitanRTX",
    }
}

/// The size of a MIG instance.
#[cfg(feature = "nvml")]
fn attributes(
    instance: &nvml_wrapper::Device<'_>,
) -> Result<Option<MigAttributes>, nvml_wrapper::error::NvmlError> {
    Ok(known(instance.attributes())?.map(|of| MigAttributes {
        memory_mb: of.memory_size_mb,
        multiprocessors: of.multiprocessor_count,
        slices: (of.gpu_instance_slice_count, of.compute_instance_slice_count),
        engines: [
            of.shared_copy_engine_count,
            of.shared_decoder_count,
            of.shared_encoder_count,
            of.shared_jpeg_count,
            of.shared_ofa_count,
        ],
    }))
}

/// The profile in the name of a MIG instance, `NVIDIA H100 80GB HBM3 MIG 1g.10gb`: "When used with
/// MIG device handles the API returns MIG device names which can be used to identify devices based
/// on their attributes" (`nvmlDeviceGetName`).
#[cfg(feature = "nvml")]
fn profile_in(name: &str) -> Option<&str> {
    let (_, profile) = name.rsplit_once("MIG ")?;
    let is_profile = profile.starts_with(|c: char| c.is_ascii_digit())
        && profile.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-'));
    is_profile.then_some(profile)
}

/// More MIG instances than any GPU has: seven slices, each with one compute instance for each
/// multiprocessor slice.
#[cfg(feature = "nvml")]
const INSTANCES_MAX: u32 = 64;

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
            Some(true) => ends.push(
                known(link.remote_pci_info())?
                    .and_then(|remote| remote.bus_id.parse::<PciAddress>().ok()),
            ),
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
            // The other GPU may be lost: that is no failure of this one, and is queried again.
            Err(_) => links.down += 1,
        }
    }
    Ok(links)
}

/// `None` if the feature does not exist, or if the library is too old for it.
#[cfg(feature = "nvml")]
fn known<T>(
    result: Result<T, nvml_wrapper::error::NvmlError>,
) -> Result<Option<T>, nvml_wrapper::error::NvmlError> {
    use nvml_wrapper::error::NvmlError::{
        FailedToLoadSymbol, InvalidArg, NotSupported, UnexpectedVariant,
    };

    match result {
        Ok(value) => Ok(Some(value)),
        Err(NotSupported | InvalidArg | FailedToLoadSymbol(_) | UnexpectedVariant(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::NvidiaRoots;
    use std::fs;

    #[test]
    fn the_library_is_searched_in_the_roots_of_the_driver() {
        let dir = tempfile::tempdir().unwrap();
        let (gke, container) = ("home/kubernetes/bin/nvidia", "run/nvidia/driver");
        let folders = ["usr/lib64", &format!("{gke}/lib64"), &format!("{container}/usr/lib64")];
        for folder in folders {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
            fs::write(dir.path().join(folder).join(NAME), "").unwrap();
        }
        // A link of a container leads to its own root.
        std::os::unix::fs::symlink("/usr/lib64", dir.path().join(container).join("lib64")).unwrap();
        let found = |driver: Option<&str>| -> Vec<String> {
            let roots = NvidiaRoots { driver: driver.map(str::to_owned), dev: None };
            let root = HostRoot::new(dir.path()).with_nvidia(&roots);
            let found = candidates(&root, &NvmlLibrary::Auto).into_iter();
            let path = |path: PathBuf| path.strip_prefix(dir.path()).unwrap().display().to_string();
            found.map(path).collect()
        };
        let [host, of_gke, of_container] = folders.map(|folder| format!("{folder}/{NAME}"));
        assert_eq!(found(None), [&*of_gke, &of_container, &host]);
        assert_eq!(found(Some("")), [&*host]);
        assert_eq!(found(Some(&format!("/{container}"))), [&*of_container]);
        assert_eq!(found(Some(&format!("/{gke}"))), [&*of_gke]);
        assert_eq!(found(Some("/nothing")), Vec::<String>::new());
    }
}
