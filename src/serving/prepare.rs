//! Decides an Allocate, checks the nodes, and builds the answer, on the task of the call's
//! connection. It changes no state and waits for no actor: it reads the published lists and the
//! host's files.
//!
//! A Prepare of DRA is decided in `claims` (`flow.rs`, `decide.rs`). Of each of its devices this
//! file has what is the same as for an Allocate: the checks, what a container gets, and the
//! attributes ([`ClaimDevices`]).

use super::claims::ClaimDevices;
use super::core;
use super::files::SpecFiles;
use super::nvidia_extras;
use crate::contract;
use crate::domain::{
    AllocId, Api, ApiCapabilities, ContainerEdits, Device, DeviceId, DeviceNode, Grant, GrantState,
    GrantedDevice, Inventory, KubeletGeneration, NvmlSnapshot, Object, Offered, Offering, Reason,
    Refusal, ResourceName, Sharing,
};
use crate::hardware;
use crate::host::{self, HostRoot, Listings, ReadFailure};
use crate::messages::Record;
use crate::slices::api::Attribute;
use crate::slices::attributes::{self, Facts};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long the real path of a node's directory is cached, because Allocates come in bursts.
const DIRECTORIES_KNOWN_FOR: Duration = Duration::from_millis(100);

/// One container's request.
#[derive(Debug)]
pub(super) struct Request<'a> {
    /// Chosen when the request arrived, so that a repeated message is one grant.
    pub(super) alloc_id: AllocId,
    pub(super) resource: &'a ResourceName,
    /// In the order of the request.
    pub(super) ids: &'a [DeviceId],
    /// The capabilities of the API version that carries the answer.
    pub(super) capabilities: ApiCapabilities,
}

/// A decided Allocate that is not recorded yet.
#[derive(Debug)]
pub(super) struct Prepared {
    /// What the container gets.
    pub(super) edits: ContainerEdits,
    /// The message to the ledger, which has to be recorded before the answer.
    pub(super) record: Record,
}

/// Decides Allocates: the published devices, the host's files, and the boot and kubelet that a
/// grant records. For claims it answers about single devices ([`ClaimDevices`]), and
/// [`ClaimPreparer`](super::claims::ClaimPreparer) decides.
#[derive(Debug)]
pub struct Preparer {
    /// The lists of the device plugin. Another instance, for claims, has the inventory.
    inventory: watch::Receiver<Arc<Inventory>>,
    host_root: HostRoot,
    files: SpecFiles,
    boot_id: String,
    kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The real directories of the last Allocates' nodes, and when they were read.
    directories: Mutex<(Instant, Listings)>,
    metadata: Option<MetadataFacts>,
}

/// What the metadata of devices has besides their records (`[dra] device_metadata`).
#[derive(Debug)]
pub struct MetadataFacts {
    /// NVML's answers.
    pub nvml: watch::Receiver<Arc<NvmlSnapshot>>,
    /// Whether there are the attributes of vendors' drivers too.
    pub vendors: bool,
}

impl Preparer {
    /// Checks device nodes below `host_root`. `boot_id` is this boot's identity, `kubelet` the
    /// kubelet's socket as the host watch saw it last.
    #[must_use]
    pub fn new(
        inventory: watch::Receiver<Arc<Inventory>>,
        host_root: HostRoot,
        files: SpecFiles,
        boot_id: String,
        kubelet: watch::Receiver<Option<KubeletGeneration>>,
    ) -> Self {
        Preparer {
            inventory,
            host_root,
            files,
            boot_id,
            kubelet,
            directories: Mutex::new((Instant::now(), Listings::default())),
            metadata: None,
        }
    }

    /// Gives the containers of claims the metadata of their devices.
    #[must_use]
    pub fn with_metadata(self, metadata: Option<MetadataFacts>) -> Self {
        Preparer { metadata, ..self }
    }

    /// Decides, and returns the container's edits and the message to the ledger. It changes no
    /// state.
    ///
    /// # Errors
    /// When the ids may not be granted, or the answer would lack a part that the container needs.
    pub(super) fn prepare(&self, request: Request<'_>) -> Result<Prepared, Refusal> {
        let Request { alloc_id, resource, ids, capabilities } = request;
        let inventory = Arc::clone(&self.inventory.borrow());
        let offering = inventory
            .resources
            .get(resource)
            .ok_or_else(|| Refusal::NotOffered(resource.clone()))?;
        let offered = core::decide(offering, ids)?;
        let root = self.host_root.recording();
        let nodes = Nodes::new(&root, &self.directories);
        let node_exists = |path: &str| nodes.exist(path);
        for (id, offered) in ids.iter().zip(&offered) {
            self.check(offering, id, offered, &root, &node_exists)?;
        }
        let devices: Vec<&Device> = offered.iter().map(|offered| offered.device.as_ref()).collect();
        // The names that only claims have are no condition for an answer by number.
        let mut spec = Cow::Borrowed(&*offering.spec);
        if spec.api.serves_claims() {
            spec.to_mut().api = Api::Plugin;
        }
        let nvidia = nvidia_extras::extras(&spec, &inventory, &root, &self.files.gpus);
        let request = contract::Request {
            spec: &offering.spec,
            devices: &devices,
            alloc_id: &alloc_id,
            node_exists: &node_exists,
            nvidia: &nvidia,
        };
        let mut edits = contract::edits(&request);
        // A node whose existence could not be checked would be missing from the answer.
        no_failure(&root, resource, &ids[0])?;
        core::fits(&offering.spec, &edits, capabilities)?;
        let granted = ids.iter().zip(devices.iter().copied());
        self.files.ensure(&offering.spec, granted, &inventory, &node_exists)?;
        edits.annotations.insert(AllocId::ANNOTATION.into(), alloc_id.to_string());
        let granted = |(id, device): (&DeviceId, &&Device)| GrantedDevice {
            id: id.clone(),
            key: device.key.clone(),
            numa_nodes: device.numa_nodes.clone(),
            nodes: nodes_behind(device, &edits),
            // The answer contains the nodes of a whole pool already.
            objects: if matches!(offering.spec.sharing, Sharing::Pool(_)) {
                Vec::new()
            } else {
                device.objects()
            },
        };
        let grant = Arc::new(Grant {
            resource: resource.clone(),
            devices: ids.iter().zip(&devices).map(granted).collect(),
            edits: edits.clone(),
            claim: None,
            boot_id: self.boot_id.clone(),
            kubelet: *self.kubelet.borrow(),
            granted_at: host::now().wall,
            version: env!("CARGO_PKG_VERSION").into(),
            state: GrantState::Granted,
            alloc_id,
        });
        Ok(Prepared { edits, record: Record { grant, exclusive: offering.spec.is_exclusive() } })
    }

    /// Checks the host again: a list may be older than the loss of a node.
    fn check(
        &self,
        offering: &Offering,
        id: &DeviceId,
        offered: &Offered,
        root: &HostRoot,
        node_exists: &dyn Fn(&str) -> bool,
    ) -> Result<(), Refusal> {
        let resource = &offering.spec.name;
        let missing = |node: &DeviceNode| node.required && !node_exists(&node.host);
        // A held device stays in the list while a node that a container needs is missing.
        if offered.device.nodes.iter().any(missing)
            || contract::companions(&offering.spec, &offered.device).any(|node| missing(&node))
            || contract::missing(&offering.spec, &offered.device).is_some()
        {
            no_failure(root, resource, id)?;
            return Err(Refusal::Unhealthy {
                resource: resource.clone(),
                id: id.clone(),
                reason: Reason::NodeMissing,
            });
        }
        // A held device stays in the list while NVML does not report its name.
        let unanswerable = contract::unanswerable(&offering.spec, &offered.device);
        // A disk that was mounted after the list was made is not granted, nor is an uplink.
        let used = hardware::used_for(&self.host_root, &offered.device)
            .and_then(|used| match used {
                None => hardware::uplink(&self.host_root, &offering.spec, &offered.device),
                used => Ok(used),
            })
            .map_err(|failure| unreadable(resource, id, &failure))?;
        match unanswerable.or(used.map(|by| format!("the host uses it: {by}"))) {
            None => Ok(()),
            Some(why) => {
                Err(Refusal::Unanswerable { resource: resource.clone(), id: id.clone(), why })
            }
        }
    }

    /// What the containers of a claim get of a device. The files of other programs that the edits
    /// name exist afterwards.
    fn claimed_edits(
        &self,
        offering: &Offering,
        id: &DeviceId,
        offered: &Offered,
        together: &[&Device],
    ) -> Result<ContainerEdits, Refusal> {
        let (spec, inventory) = (&offering.spec, Arc::clone(&self.inventory.borrow()));
        let root = self.host_root.recording();
        let nodes = Nodes::new(&root, &self.directories);
        let node_exists = |path: &str| nodes.exist(path);
        self.check(offering, id, offered, &root, &node_exists)?;
        let device = offered.device.as_ref();
        self.files.ensure(spec, std::iter::once((id, device)), &inventory, &node_exists)?;
        let gpus = &self.files.gpus;
        let lacks_name = Cell::new(false);
        let is_defined = |qualified: &str| {
            let parts = qualified.split_once('=');
            let is_defined = parts.is_some_and(|(kind, name)| gpus.defines(kind, name, &inventory));
            lacks_name.set(lacks_name.get() || !is_defined);
            is_defined
        };
        let request = contract::Request {
            spec,
            devices: together,
            alloc_id: &AllocId::new(""),
            node_exists: &node_exists,
            nvidia: &nvidia_extras::extras(spec, &inventory, &root, gpus),
        };
        let edits = contract::claim::edits(&request, device, &is_defined);
        // A node whose existence could not be checked would be missing.
        no_failure(&root, &spec.name, id)?;
        match gpus.driver_unread().filter(|_| lacks_name.get()) {
            // The edits stay for the whole boot: they must not lack the driver's libraries.
            Some(why) => {
                Err(Refusal::Unreadable { resource: spec.name.clone(), id: id.clone(), why })
            }
            None => Ok(edits),
        }
    }
}

impl ClaimDevices for Preparer {
    fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.inventory.borrow())
    }

    fn claimed(
        &self,
        offering: &Offering,
        id: &DeviceId,
        offered: &Offered,
        together: &[&Device],
    ) -> Result<(ContainerEdits, GrantedDevice), String> {
        let edits = self.claimed_edits(offering, id, offered, together);
        let edits = edits.map_err(|error| error.to_string())?;
        let device = offered.device.as_ref();
        let granted = GrantedDevice {
            id: id.clone(),
            key: device.key.clone(),
            numa_nodes: device.numa_nodes.clone(),
            nodes: nodes_behind(device, &edits),
            objects: device.objects(),
        };
        Ok((edits, granted))
    }

    fn objects_of_node(&self, node: &str) -> Vec<Object> {
        hardware::objects_of_node(&self.host_root, node)
    }

    fn metadata_path(&self, file: &str) -> Option<String> {
        let path = self.metadata.is_some().then(|| self.files.cdi.file(file))?;
        path.into_os_string().into_string().ok()
    }

    fn attributes(
        &self,
        offering: &Offering,
        id: &DeviceId,
        offered: &Offered,
    ) -> BTreeMap<String, Attribute> {
        let Some(MetadataFacts { nvml, vendors }) = &self.metadata else { return BTreeMap::new() };
        let driver = hardware::nvidia_driver_version(&self.host_root);
        let nvml = nvml.borrow().clone();
        let nvidia_driver = driver.as_deref();
        let facts = Facts { nvidia_driver, nvml: Some(&nvml), vendors: *vendors, taken: 0 };
        attributes::describe("", &offering.spec, id, &offered.device, facts).0.attributes
    }
}

/// Refuses the request if a read failed: that a node was not found is no evidence then.
fn no_failure(root: &HostRoot, resource: &ResourceName, id: &DeviceId) -> Result<(), Refusal> {
    root.take_failures().first().map_or(Ok(()), |failure| Err(unreadable(resource, id, failure)))
}

fn unreadable(resource: &ResourceName, id: &DeviceId, failure: &ReadFailure) -> Refusal {
    Refusal::Unreadable { resource: resource.clone(), id: id.clone(), why: failure.to_string() }
}

/// Checks which nodes exist, each once per Allocate.
struct Nodes<'a> {
    root: &'a HostRoot,
    directories: RefCell<MutexGuard<'a, (Instant, Listings)>>,
    seen: RefCell<Vec<(String, bool)>>,
}

impl<'a> Nodes<'a> {
    fn new(root: &'a HostRoot, directories: &'a Mutex<(Instant, Listings)>) -> Self {
        // A cache that a panic left incomplete is read again.
        let mut known = directories.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0.elapsed() > DIRECTORIES_KNOWN_FOR {
            *known = (Instant::now(), Listings::default());
        }
        Nodes { root, directories: RefCell::new(known), seen: RefCell::default() }
    }

    fn exist(&self, path: &str) -> bool {
        let mut seen = self.seen.borrow_mut();
        if let Some((_, exists)) = seen.iter().find(|(known, _)| known == path) {
            return *exists;
        }
        let exists = self.root.node_exists_among(&mut self.directories.borrow_mut().1, path);
        seen.push((path.to_owned(), exists));
        exists
    }
}

/// The nodes of a device that the answer does not contain.
fn nodes_behind(device: &Device, edits: &ContainerEdits) -> Vec<String> {
    let nodes = device.nodes.iter().filter(|node| node.required).map(DeviceNode::lasting_path);
    let is_behind = |node: &&str| !edits.devices.iter().any(|edit| edit.host == *node);
    nodes.filter(is_behind).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Contract, DeviceClass, Health, IntelGpuOptions, ResourceSpec};
    use crate::host::faults::{ERRORS, with_faults};
    use std::fs;
    use std::path::Path;

    fn write(root: &Path, rel: &str, text: &str) {
        fs::create_dir_all(root.join(rel).parent().unwrap()).unwrap();
        fs::write(root.join(rel), text).unwrap();
    }

    fn device(id: &str, class: DeviceClass, nodes: Vec<DeviceNode>) -> Arc<Device> {
        let pci = (class == DeviceClass::Gpu)
            .then(|| Box::new(crate::domain::PciFunction::at("0000:03:00.0".parse().unwrap())));
        let attributes = [("disk", "sdx")].into_iter().filter(|_| id == "disk").collect();
        Arc::new(Device {
            id: DeviceId::new(id),
            key: format!("dev:/dev/{id}"),
            class,
            pci,
            numa_nodes: Vec::new(),
            nodes,
            attributes,
        })
    }

    /// A preparer below this root for one device with this contract.
    fn preparer(root: &Path, device: &Arc<Device>, contract: Contract) -> (Preparer, ResourceName) {
        let name: ResourceName = "a.com/x".parse().unwrap();
        let spec =
            Arc::new(ResourceSpec { contract, ..ResourceSpec::new(name.clone(), device.class) });
        let offered = Offered { device: Arc::clone(device), health: Health::Healthy };
        let offering = Offering { spec, devices: BTreeMap::from([(device.id.clone(), offered)]) };
        let inventory = Inventory { resources: [(name.clone(), Arc::new(offering))].into() };
        let (files, root) = {
            let host = HostRoot::new(root);
            (SpecFiles::new(&root.join("cdi"), &root.join("info"), &host), host)
        };
        let (inventory, kubelet) = (watch::channel(Arc::new(inventory)).1, watch::channel(None).1);
        (Preparer::new(inventory, root, files, "boot".into(), kubelet), name)
    }

    fn allocate(
        preparer: &Preparer,
        resource: &ResourceName,
        id: &DeviceId,
    ) -> Result<ContainerEdits, Refusal> {
        let capabilities = ApiCapabilities { api: "v1beta1", has_cdi: true, has_pre_start: true };
        let request = Request {
            alloc_id: AllocId::new("a"),
            resource,
            ids: std::slice::from_ref(id),
            capabilities,
        };
        preparer.prepare(request).map(|prepared| prepared.edits)
    }

    /// A GPU and a disk on a host in this folder, which has mounted another disk.
    fn machine(root: &Path) -> [(Arc<Device>, Contract); 2] {
        for node in [
            "dev/sdx",
            "dev/dri/card0",
            "dev/dri/renderD128",
            "dev/dri/by-path/pci-0000:03:00.0-card",
        ] {
            write(root, node, "");
        }
        write(root, "sys/class/block/sdx/dev", "8:0\n");
        write(root, "proc/swaps", "Filename\n");
        write(root, "proc/1/mountinfo", "36 35 254:0 / / rw - ext4 /dev/vda rw\n");
        let gpu = vec![
            DeviceNode::at("/dev/dri/card0").optional(),
            DeviceNode::at("/dev/dri/renderD128"),
        ];
        let gpu = device("gpu", DeviceClass::Gpu, gpu);
        let disk = device("disk", DeviceClass::Char, vec![DeviceNode::at("/dev/sdx")]);
        [(gpu, Contract::IntelGpu(IntelGpuOptions::default())), (disk, Contract::Generic)]
    }

    /// The directories are cached for a short time.
    fn forget_directories(preparer: &Preparer) {
        *preparer.directories.lock().unwrap() = (Instant::now(), Listings::default());
    }

    /// Mounts the disk of [`machine`].
    fn mount(root: &Path) {
        write(root, "proc/1/mountinfo", "36 35 8:0 / /data rw - ext4 /dev/sdx rw\n");
    }

    /// A failed call never leaves a node out of the answer or makes a device unhealthy, and a disk
    /// that the host uses is never granted.
    #[test]
    fn a_failed_read_is_refused_and_is_no_absence() {
        let dir = tempfile::tempdir().unwrap();
        let devices = machine(dir.path());
        for (device, contract) in &devices {
            let (preparer, name) = preparer(dir.path(), device, contract.clone());
            let (whole, calls) =
                with_faults(|_| None, || allocate(&preparer, &name, &device.id).unwrap());
            assert!(calls > 3 && !whole.devices.is_empty());
            for (errno, failing) in
                ERRORS.iter().flat_map(|errno| (0..calls).map(move |call| (*errno, call)))
            {
                forget_directories(&preparer);
                let (answer, _) = with_faults(
                    move |call| (call == failing).then_some(errno),
                    || allocate(&preparer, &name, &device.id),
                );
                match answer {
                    Ok(answer) => {
                        assert_eq!(answer, whole, "{} errno {errno} at {failing}", device.id);
                    }
                    Err(Refusal::Unreadable { why, .. }) => {
                        assert!(why.contains("cannot be read"), "{why}");
                    }
                    Err(other) => panic!("{} errno {errno} at {failing}: {other}", device.id),
                }
            }
        }
        // The host mounts the disk.
        let (disk, contract) = &devices[1];
        let (preparer, name) = preparer(dir.path(), disk, contract.clone());
        mount(dir.path());
        let (refused, calls) = with_faults(|_| None, || allocate(&preparer, &name, &disk.id));
        assert!(refused.is_err_and(|refusal| {
            refusal.to_string().contains("the host uses it: mounted at /data")
        }));
        for (errno, failing) in
            ERRORS.iter().flat_map(|errno| (0..=calls).map(move |call| (*errno, call)))
        {
            let fault = move |call| (call == failing || failing == calls).then_some(errno);
            assert!(
                with_faults(fault, || allocate(&preparer, &name, &disk.id)).0.is_err(),
                "errno {errno} at {failing}"
            );
        }
    }

    /// The same for the containers of a claim.
    #[test]
    fn a_failed_read_is_no_absence_for_a_claim_either() {
        let dir = tempfile::tempdir().unwrap();
        for (device, contract) in machine(dir.path()) {
            let (preparer, name) = preparer(dir.path(), &device, contract);
            let whole = allocate(&preparer, &name, &device.id).unwrap();
            let offering = Arc::clone(&preparer.inventory.borrow().resources[&name]);
            let offered = &offering.devices[&device.id];
            let claimed = || preparer.claimed_edits(&offering, &device.id, offered, &[]);
            forget_directories(&preparer);
            let (given, calls) = with_faults(|_| None, || claimed().unwrap());
            assert!(calls > 3);
            assert_eq!((&given.devices, &given.mounts), (&whole.devices, &whole.mounts));
            for (errno, failing) in
                ERRORS.iter().flat_map(|errno| (0..calls).map(move |call| (*errno, call)))
            {
                forget_directories(&preparer);
                let fault = move |call| (call == failing).then_some(errno);
                match with_faults(fault, claimed).0 {
                    Ok(answer) => assert_eq!(answer, given, "errno {errno} at {failing}"),
                    Err(refusal) => assert!(matches!(refusal, Refusal::Unreadable { .. })),
                }
            }
            if device.id.as_str() == "disk" {
                mount(dir.path());
                let refused = preparer.claimed(&offering, &device.id, offered, &[]);
                assert!(refused.is_err_and(|why| why.contains("the host uses it: mounted at")));
            }
        }
    }
}
