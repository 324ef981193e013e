//! Keeps the files that other programs read in line with the inventory and the grants.
//!
//! A CDI file of NVIDIA GPUs also depends on the files of other programs and on the installed
//! driver. So the folders of CDI files are watched, and both are read again now and then.
//!
//! The container runtime reads the CDI files at every start of a container. There is one for every
//! device that is offered by CDI names, and for every such device that is still held. A device-info
//! file exists while its device is held. Both folders are empty after a boot.

use crate::contract::{cdi, claim, device_info, nvidia_cdi};
use crate::domain::{Grant, Inventory, Offering};
use crate::host::{self, Change, DirWatch, HostRoot, SpecFolder};
use crate::serving::{GpuSpecs, SpecFiles};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How often the driver and the folders are read again: its daemons create their sockets late.
/// Every file is also ensured then: a write may have failed, and another program may have removed
/// the file.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 30_000 });
/// When a file of another program is read again that could not be read. The pause is doubled with
/// each further try: until then this file may define the names of ours.
const UNREAD_AGAIN: Duration = Duration::from_secs(1);

/// Writes the files of both folders.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) files: SpecFiles,
    pub(crate) host_root: HostRoot,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
}

impl Writer {
    /// Makes the first pass, before any resource is registered.
    pub(crate) fn begin(mut self) -> Self {
        if self.is_needed() {
            self.files.gpus.update(&self.inventory.borrow(), &held_names(&self.grants.borrow()));
            self.update();
        }
        self
    }

    /// Without a resource that uses such files, no folder is touched.
    fn is_needed(&self) -> bool {
        let is_used = |offering: &Arc<Offering>| {
            cdi::is_used(&offering.spec)
                || device_info::is_used(&offering.spec)
                || nvidia_cdi::kind(&offering.spec).is_some()
        };
        self.inventory.borrow().resources.values().any(is_used) || !self.files.cdi.own().is_empty()
    }

    /// Keeps the files until the daemon ends.
    pub(crate) async fn run(mut self) {
        let (mut watch, mut pause) = (None, UNREAD_AGAIN);
        loop {
            if !self.is_needed() {
                // Another configuration may need them.
                if self.inventory.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let has_gpus = GpuSpecs::is_needed(&self.inventory.borrow());
            if has_gpus && watch.is_none() {
                // Without inotify the poll remains.
                watch = DirWatch::new(self.files.gpus.directories()).ok();
            }
            let held = self.update();
            let again = if self.update_gpus().await {
                pause = UNREAD_AGAIN;
                host::until_tick(AGAIN)
            } else {
                let wait = pause;
                pause = (pause * 2).min(AGAIN);
                wait
            };
            let is_given_back =
                |grants: &Arc<Vec<Arc<Grant>>>| !held.is_subset(&held_files(grants));
            tokio::select! {
                changed = self.inventory.changed() => if changed.is_err() { return },
                changed = self.grants.wait_for(is_given_back) => if changed.is_err() { return },
                () = another_file(&mut watch), if has_gpus => {}
                () = tokio::time::sleep(again) => {}
            }
        }
    }

    /// Reads the driver on a thread of its own: its folders have thousands of names. Returns
    /// whether every file of other programs was read.
    async fn update_gpus(&self) -> bool {
        let inventory = Arc::clone(&self.inventory.borrow());
        let held = held_names(&self.grants.borrow());
        let gpus = Arc::clone(&self.files.gpus);
        let update = tokio::task::spawn_blocking(move || gpus.update(&inventory, &held));
        update.await.unwrap_or(true)
    }

    /// Writes missing files and removes unused ones. Returns the files of held devices.
    fn update(&mut self) -> BTreeSet<String> {
        let inventory = Arc::clone(&self.inventory.borrow_and_update());
        let held = held_files(&self.grants.borrow_and_update());
        let mut needed = held.clone();
        needed.extend(self.files.gpus.files());
        for offering in inventory.resources.values() {
            if cdi::is_used(&offering.spec) {
                needed.extend(
                    offering
                        .devices
                        .values()
                        .flat_map(|offered| cdi::file_names_of(&offering.spec, &offered.device)),
                );
                self.write_cdi(offering);
            }
            if device_info::is_used(&offering.spec) {
                self.write_device_info(offering, &held);
            }
        }
        // The files of claims have a keeper of their own, which knows the claims.
        let is_unused =
            |file: &String| !needed.contains(file) && claim::uid_of_file(file).is_none();
        for file in self.files.cdi.own().into_iter().filter(is_unused) {
            remove(&self.files.cdi, &file);
        }
        held
    }

    fn write_cdi(&self, offering: &Offering) {
        // Nothing is known of a device that is not there: its file stays as it was.
        let whole = offering
            .devices
            .values()
            .filter(|offered| offered.health.is_present())
            .map(|offered| offered.device.as_ref());
        for file in cdi::files(&offering.spec, whole, &|path| self.host_root.node_exists(path)) {
            write(&self.files.cdi, &file);
        }
    }

    fn write_device_info(&self, offering: &Offering, held: &BTreeSet<String>) {
        for (id, offered) in &offering.devices {
            let name = device_info::file_name(&offering.spec.name, id);
            if !held.contains(&name) {
                if !self.files.is_fresh(&name) {
                    remove(&self.files.device_info, &name);
                }
            } else if let Some(file) = device_info::file(&offering.spec, id, &offered.device)
                .filter(|_| offered.device.pci.is_some())
            {
                write(&self.files.device_info, &file);
            }
        }
    }
}

fn write(folder: &SpecFolder, file: &cdi::SpecFile) {
    if let Err(error) = folder.ensure(&file.name, &file.text) {
        tracing::error!(file = %folder.file(&file.name).display(), %error, "cannot write a file that containers need");
    }
}

fn remove(folder: &SpecFolder, file: &str) {
    if let Err(error) = folder.remove(file) {
        tracing::warn!(file = %folder.file(file).display(), %error, "cannot remove an unused file");
    }
}

/// Waits until another program changes a file in the folders of CDI files.
async fn another_file(watch: &mut Option<DirWatch>) {
    let Some(watching) = watch else { return std::future::pending().await };
    loop {
        match watching.next().await {
            Ok(Change::Entry { name, .. })
                if name.trim_start_matches('.').starts_with(cdi::FILE_PREFIX) => {}
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(%error, "inotify failed; falling back to polling");
                *watch = None;
                return;
            }
        }
    }
}

/// The CDI names that live grants have.
fn held_names(grants: &[Arc<Grant>]) -> BTreeSet<String> {
    let live = grants.iter().filter(|grant| grant.is_live());
    live.flat_map(|grant| cdi_names(grant)).map(str::to_owned).collect()
}

/// The CDI names in the answer of a grant.
fn cdi_names(grant: &Grant) -> impl Iterator<Item = &str> {
    let claimed = grant.claim.iter().flat_map(|hold| &hold.devices);
    let claimed = claimed.flat_map(|device| &device.cdi_devices).map(String::as_str);
    cdi::names(&grant.edits).chain(claimed)
}

/// The files that the devices of live grants need.
fn held_files(grants: &[Arc<Grant>]) -> BTreeSet<String> {
    let files = |grant: &Arc<Grant>| {
        let infos =
            grant.devices.iter().map(|device| device_info::file_name(&grant.resource, &device.id));
        cdi_names(grant).map(cdi::file_name).chain(infos).collect::<Vec<_>>()
    };
    grants.iter().filter(|grant| grant.is_live()).flat_map(files).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        AllocId, Attributes, CdiAnswer, ContainerEdits, Contract, ContractKind, Device,
        DeviceClass, DeviceId, DeviceListStrategy, DeviceNode, GrantState, GrantedDevice, Health,
        NvidiaOptions, Offered, PciFunction, Reason, ResourceSpec, Timestamp,
    };
    use std::collections::BTreeMap;
    use std::time::Duration;

    /// An inventory in which these devices are healthy or unhealthy, with or without CDI names.
    fn inventory(devices: &[(&str, bool)], cdi: bool) -> Arc<Inventory> {
        let cdi = cdi.then_some(CdiAnswer::Cri).into_iter().collect();
        let spec = ResourceSpec {
            cdi,
            ..ResourceSpec::new("example.com/device".parse().unwrap(), DeviceClass::Char)
        };
        let offered = |(id, is_healthy): &(&str, bool)| {
            // An absent device is known from the ledger only, and the ledger has no nodes.
            let nodes =
                if *is_healthy { vec![DeviceNode::at(format!("/dev/{id}"))] } else { Vec::new() };
            let id = DeviceId::new(*id);
            let device = Device {
                id: id.clone(),
                key: format!("dev:/dev/{id}"),
                class: DeviceClass::Char,
                pci: None,
                numa_nodes: Vec::new(),
                nodes,
                attributes: Attributes::default(),
            };
            let health =
                if *is_healthy { Health::Healthy } else { Health::Unhealthy(Reason::DeviceGone) };
            (id, Offered { device: Arc::new(device), health })
        };
        let offering =
            Offering { devices: devices.iter().map(offered).collect(), spec: Arc::new(spec) };
        Arc::new(Inventory {
            resources: BTreeMap::from([(offering.spec.name.clone(), Arc::new(offering))]),
        })
    }

    fn holding(ids: &[&str]) -> Arc<Vec<Arc<Grant>>> {
        let grant = |id: &&str| {
            Arc::new(Grant {
                alloc_id: AllocId::new(*id),
                resource: "example.com/device".parse().unwrap(),
                devices: Vec::new(),
                edits: ContainerEdits {
                    cdi_devices: vec![format!("holdfast.dev/char={id}")],
                    ..ContainerEdits::default()
                },
                claim: None,
                boot_id: "boot".into(),
                kubelet: None,
                granted_at: Timestamp(0),
                version: "0.1.0".into(),
                state: GrantState::Granted,
            })
        };
        Arc::new(ids.iter().map(grant).collect())
    }

    fn file(id: &str) -> String {
        format!("holdfast-holdfast.dev+char@{id}.json")
    }

    struct Setup {
        dir: tempfile::TempDir,
        inventory: watch::Sender<Arc<Inventory>>,
        grants: watch::Sender<Arc<Vec<Arc<Grant>>>>,
    }

    impl Setup {
        fn new(devices: &[(&str, bool)], cdi: bool) -> Self {
            let inventory = watch::Sender::new(inventory(devices, cdi));
            Setup {
                dir: tempfile::tempdir().unwrap(),
                inventory,
                grants: watch::Sender::new(Arc::default()),
            }
        }

        fn writer(&self) -> Writer {
            let root = HostRoot::new(self.dir.path().join("host"));
            Writer {
                files: SpecFiles::new(
                    &self.dir.path().join("cdi"),
                    &self.dir.path().join("info"),
                    &root,
                ),
                host_root: root,
                inventory: self.inventory.subscribe(),
                grants: self.grants.subscribe(),
            }
        }

        fn files(&self) -> Vec<String> {
            let mut files = self.writer().files.cdi.own();
            files.sort();
            files
        }
    }

    #[test]
    fn held_devices_keep_their_files_and_unused_files_are_removed() {
        let setup = Setup::new(&[("a", true), ("b", true), ("c", true)], true);
        let mut writer = setup.writer().begin();
        assert_eq!(setup.files(), [file("a"), file("b"), file("c")]);
        let text =
            || std::fs::read_to_string(setup.dir.path().join("cdi").join(file("a"))).unwrap();
        let before = text();
        // One device is absent while it is held, one is held and no longer listed, one is free and
        // absent.
        setup.grants.send_replace(holding(&["a", "b"]));
        setup.inventory.send_replace(inventory(&[("a", false)], true));
        writer.update();
        assert_eq!(setup.files(), [file("a"), file("b")]);
        assert_eq!(text(), before, "nothing is known of it any more that would be better");
        setup.grants.send_replace(holding(&["a"]));
        writer.update();
        assert_eq!(setup.files(), [file("a")]);
    }

    #[test]
    fn the_files_of_claims_are_left_to_their_keeper() {
        let setup = Setup::new(&[("a", true)], true);
        let mut writer = setup.writer().begin();
        let claim = "holdfast-claim-5d2f6c3e.json";
        let folder = setup.dir.path().join("cdi");
        // The second one looks like one, and is that of a kind of another vendor.
        for name in [claim, "holdfast-claim-x.com+gpu.json"] {
            std::fs::write(folder.join(name), "{}").unwrap();
        }
        writer.update();
        assert_eq!(setup.files(), [claim.to_owned(), file("a")]);
    }

    #[test]
    fn the_files_are_written_again_after_a_boot() {
        let setup = Setup::new(&[("a", true)], true);
        drop(setup.writer().begin());
        std::fs::remove_dir_all(setup.dir.path().join("cdi")).unwrap();
        drop(setup.writer().begin());
        assert_eq!(setup.files(), [file("a")]);
    }

    #[test]
    fn the_directory_is_created_only_for_a_resource_that_needs_it() {
        let setup = Setup::new(&[("a", true)], false);
        assert!(!setup.writer().begin().is_needed());
        assert!(!setup.dir.path().join("cdi").exists());
        // A file that an earlier configuration left stays while its device is held.
        std::fs::create_dir(setup.dir.path().join("cdi")).unwrap();
        for id in ["a", "b"] {
            std::fs::write(setup.dir.path().join("cdi").join(file(id)), "{}").unwrap();
        }
        setup.grants.send_replace(holding(&["b"]));
        assert!(setup.writer().begin().is_needed());
        assert_eq!(setup.files(), [file("b")]);
    }

    #[tokio::test]
    async fn a_file_is_removed_after_its_last_release() {
        let setup = Setup::new(&[("a", true)], true);
        setup.grants.send_replace(holding(&["b", "c"]));
        let writer = setup.writer();
        for id in ["b", "c"] {
            writer.files.cdi.ensure(&file(id), "{}").unwrap();
        }
        let writing = tokio::spawn(writer.begin().run());
        setup.grants.send_replace(holding(&["c"]));
        let removed = async {
            while setup.files() != [file("a"), file("c")] {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), removed).await.expect("the file is removed");
        writing.abort();
    }

    #[tokio::test]
    async fn a_file_that_another_program_removes_is_written_again() {
        let setup = Setup::new(&[("a", true)], true);
        let writing = tokio::spawn(setup.writer().begin().run());
        tokio::task::yield_now().await;
        std::fs::remove_file(setup.dir.path().join("cdi").join(file("a"))).unwrap();
        let there = async {
            while setup.files() != [file("a")] {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), there)
            .await
            .expect("the file is written again");
        writing.abort();
    }

    #[tokio::test]
    async fn a_file_of_another_program_that_cannot_be_read_is_read_again_soon() {
        let setup = Setup::new(&[], false);
        let path = |rel: &str| setup.dir.path().join(rel);
        for folder in ["host/usr/lib64", "host/dev", "cdi", "elsewhere"] {
            std::fs::create_dir_all(path(folder)).unwrap();
        }
        for file in ["usr/lib64/libcuda.so.580.95.05", "dev/nvidia0"] {
            std::fs::write(path("host").join(file), "").unwrap();
        }
        // No event comes for a file behind a link.
        std::os::unix::fs::symlink(path("elsewhere"), path("cdi/nvidia.yaml")).unwrap();
        let options = NvidiaOptions {
            device_list_strategy: vec![DeviceListStrategy::CdiCri],
            ..NvidiaOptions::default()
        };
        let name = "nvidia.com/gpu".parse().unwrap();
        let spec = ResourceSpec {
            contract: Contract::Nvidia(options),
            ..ResourceSpec::new(name, DeviceClass::Gpu)
        };
        let id = DeviceId::new("GPU-1");
        let device = Device {
            id: id.clone(),
            key: "pci:0000:18:00.0".into(),
            class: DeviceClass::Gpu,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: vec![DeviceNode::at("/dev/nvidia0")],
            attributes: [("uuid", "GPU-1")].into_iter().collect(),
        };
        let offered = Offered { device: Arc::new(device), health: Health::Healthy };
        let offering = Offering { devices: [(id, offered)].into(), spec: Arc::new(spec) };
        let resources = [(offering.spec.name.clone(), Arc::new(offering))].into();
        setup.inventory.send_replace(Arc::new(Inventory { resources }));
        let (writer, file) = (setup.writer().begin(), path("cdi/holdfast-nvidia.com+gpu.json"));
        std::fs::remove_file(&file).expect("nothing is known of the other file");
        let writing = tokio::spawn(writer.run());
        let is_there = async |wanted: bool| {
            let waiting = async {
                while file.exists() != wanted {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), waiting).await
        };
        is_there(true).await.expect("the next pass could not read the other file either");
        std::fs::remove_dir(path("elsewhere")).unwrap();
        let other = "kind: nvidia.com/gpu\ndevices: [{name: GPU-1}]\n";
        std::fs::write(path("elsewhere"), other).unwrap();
        is_there(false).await.expect("it is read again");
        writing.abort();
    }

    #[test]
    fn a_device_info_file_exists_while_the_function_is_held() {
        let setup = Setup::new(&[], false);
        let addresses = ["0000:3b:00.2", "0000:3b:00.3"];
        let mut inventory = (**setup.inventory.borrow()).clone();
        let offering = Arc::make_mut(inventory.resources.values_mut().next().unwrap());
        offering.spec = Arc::new(ResourceSpec {
            contract: ContractKind::Sriov.into(),
            ..(*offering.spec).clone()
        });
        for address in addresses {
            let device = Device {
                id: DeviceId::new(address),
                key: format!("pci:{address}"),
                class: DeviceClass::Nic,
                pci: Some(Box::new(PciFunction::at(address.parse().unwrap()))),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: Attributes::default(),
            };
            offering.devices.insert(
                device.id.clone(),
                Offered { device: Arc::new(device), health: Health::Healthy },
            );
        }
        setup.inventory.send_replace(Arc::new(inventory));
        let hold = |addresses: &[&str]| {
            let device = |address: &&str| GrantedDevice {
                id: DeviceId::new(*address),
                key: String::new(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: Vec::new(),
            };
            let mut grant = (*holding(&["x"])[0]).clone();
            grant.devices = addresses.iter().map(device).collect();
            setup.grants.send_replace(Arc::new(vec![Arc::new(grant)]));
        };
        let infos = || {
            let entries =
                std::fs::read_dir(setup.dir.path().join("info")).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect::<BTreeSet<_>>()
        };
        let named = |addresses: &[&str]| {
            addresses
                .iter()
                .map(|address| format!("example.com-device-{address}-device.json"))
                .collect()
        };

        let mut writer = setup.writer().begin();
        assert_eq!(infos(), BTreeSet::new(), "no function is held");
        // As after a boot: held devices are published again.
        hold(&addresses);
        writer.update();
        assert_eq!(infos(), named(&addresses));
        hold(&addresses[..1]);
        writer.update();
        assert_eq!(infos(), named(&addresses[..1]));

        // An Allocate was answered, and its grant is not published yet.
        let inventory = Arc::clone(&setup.inventory.borrow());
        let offering = inventory.resources.values().next().unwrap();
        let (id, offered) = offering.devices.last_key_value().unwrap();
        let granted = std::iter::once((id, offered.device.as_ref()));
        writer.files.ensure(&offering.spec, granted, &inventory, &|_| true).unwrap();
        writer.update();
        assert_eq!(infos(), named(&addresses));
    }
}
