//! The files that other programs read about a container's devices: CDI specs for the container
//! runtime, device-info for CNI plugins.

use super::claims::ClaimFiles;
use super::gpu_specs::GpuSpecs;
use crate::contract::{cdi, device_info};
use crate::domain::{Device, DeviceId, Inventory, Refusal, ResourceSpec};
use crate::host::{HostRoot, SpecFolder};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The folders. The Allocate path and the clean-up share them.
#[derive(Debug, Clone)]
pub struct SpecFiles {
    /// The folder of CDI specs.
    pub cdi: Arc<SpecFolder>,
    /// The folder of device-info files, which Multus reads.
    pub device_info: Arc<SpecFolder>,
    /// The CDI specs of NVIDIA GPUs.
    pub gpus: Arc<GpuSpecs>,
    /// The CDI specs of claims.
    pub claims: ClaimFiles,
    /// The device-info files of grants that the published ones may still lack, and since when.
    fresh: Arc<Mutex<BTreeMap<String, Instant>>>,
}

/// How long a device-info file stays without a published grant.
const FRESH_FOR: Duration = Duration::from_secs(10);

impl SpecFiles {
    /// The folders at these paths. They are not created yet.
    #[must_use]
    pub fn new(cdi: &Path, device_info: &Path, root: &HostRoot) -> Self {
        let folder = |path, prefix| Arc::new(SpecFolder::new(path, prefix));
        // Device-info files have the names that other programs expect, so none is ours by its name.
        let specs = folder(cdi, cdi::FILE_PREFIX);
        let gpus = Arc::new(GpuSpecs::new(Arc::clone(&specs), cdi, root.clone()));
        let claims = ClaimFiles::new(Arc::clone(&specs), root.clone());
        let device_info = folder(device_info, "");
        SpecFiles { cdi: specs, device_info, gpus, claims, fresh: Arc::default() }
    }

    /// Ensures that the files of these devices exist.
    pub(crate) fn ensure<'a>(
        &self,
        spec: &ResourceSpec,
        devices: impl Iterator<Item = (&'a DeviceId, &'a Device)> + Clone,
        inventory: &Inventory,
        node_exists: &dyn Fn(&str) -> bool,
    ) -> Result<(), Refusal> {
        self.gpus.ensure(spec, devices.clone().map(|(_, device)| device), inventory).map_err(
            |error| Refusal::FileNotWritten {
                resource: spec.name.clone(),
                file: self.cdi.file("").display().to_string(),
                why: error.to_string(),
            },
        )?;
        let cdi = cdi::files(spec, devices.clone().map(|(_, device)| device), node_exists)
            .into_iter()
            .map(|file| (&self.cdi, file));
        let infos: Vec<_> =
            devices.filter_map(|(id, device)| device_info::file(spec, id, device)).collect();
        // Before they are written: the clean-up may run at any time.
        let now = Instant::now();
        self.fresh().extend(infos.iter().map(|file| (file.name.clone(), now)));
        let infos = infos.into_iter().map(|file| (&self.device_info, file));
        for (folder, file) in cdi.chain(infos) {
            folder.ensure(&file.name, &file.text).map_err(|error| Refusal::FileNotWritten {
                resource: spec.name.clone(),
                file: folder.file(&file.name).display().to_string(),
                why: error.to_string(),
            })?;
        }
        Ok(())
    }

    /// Whether a device-info file was written for a grant that may not be published yet.
    pub(crate) fn is_fresh(&self, name: &str) -> bool {
        let mut fresh = self.fresh();
        fresh.retain(|_, since| since.elapsed() < FRESH_FOR);
        fresh.contains_key(name)
    }

    fn fresh(&self) -> MutexGuard<'_, BTreeMap<String, Instant>> {
        // Each change is a single call.
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
