//! The CDI files of NVIDIA GPUs: one for each kind, with the names that no file of another program
//! defines.
//!
//! The background task writes them before the first Register, and again after each change. An
//! Allocate writes them too if a name of its answer is missing. Of a device that is not there
//! nothing is known, so it keeps its definition, and so does a held one.

use super::nvidia_features::by_node;
use crate::config::import::cdi_names;
use crate::contract::{cdi::FILE_PREFIX, nvidia_cdi};
use crate::domain::{
    Device, DeviceNode, DriverFile, Inventory, NvidiaDriver, NvidiaFeature, ResourceSpec, Switch,
};
use crate::hardware::{self, KnownHook, nvidia_driver};
use crate::host::{HostRoot, SpecFolder, Stamp, read_bounded};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// The other directory of runtimes. Its files count less than those of ours, but they are an
/// operator's.
const ETC: &str = "etc/cdi";
/// The limit of a file: NVIDIA's file for 56 MIG instances has 100 kB.
const BYTES_MAX: u64 = 4 << 20;

/// The files, and what they were made from.
#[derive(Debug)]
pub struct GpuSpecs {
    own: Arc<SpecFolder>,
    etc: SpecFolder,
    directories: [PathBuf; 2],
    root: HostRoot,
    state: Mutex<State>,
    problem: watch::Sender<Option<String>>,
}

#[derive(Debug, Default)]
struct State {
    is_loaded: bool,
    /// The files by kind, with their text.
    written: BTreeMap<String, (nvidia_cdi::Document, String)>,
    /// The names of other programs' files.
    others: BTreeMap<PathBuf, (Stamp, BTreeSet<String>)>,
    hook: KnownHook,
    /// Whether a file of another program, or their folder, could not be read.
    is_unread: bool,
    /// Why the driver could not be read the last time.
    driver_unread: Option<String>,
}

impl State {
    fn is_taken(&self, name: &str) -> bool {
        self.others.values().any(|(_, names)| names.contains(name))
    }
}

impl GpuSpecs {
    pub(super) fn new(own: Arc<SpecFolder>, directory: &Path, root: HostRoot) -> Self {
        let etc = root.path(ETC);
        GpuSpecs {
            own,
            etc: SpecFolder::new(&etc, FILE_PREFIX),
            directories: [directory.to_owned(), etc],
            root,
            state: Mutex::default(),
            problem: watch::Sender::default(),
        }
    }

    /// The directories whose files matter.
    #[must_use]
    pub fn directories(&self) -> [PathBuf; 2] {
        self.directories.clone()
    }

    /// Why containers lack a part of NVIDIA's driver; `None` while they lack none.
    #[must_use]
    pub fn problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.subscribe()
    }

    /// Whether a resource of the inventory needs these files.
    #[must_use]
    pub fn is_needed(inventory: &Inventory) -> bool {
        inventory.resources.values().any(|offering| nvidia_cdi::kind(&offering.spec).is_some())
    }

    /// The names of the files that exist now.
    #[must_use]
    pub fn files(&self) -> BTreeSet<String> {
        let mut state = self.state();
        self.load(&mut state);
        state.written.keys().map(|kind| nvidia_cdi::file_name(kind)).collect()
    }

    /// Writes the files for the inventory. Definitions of `held` names stay. Returns whether every
    /// file of other programs was read.
    pub fn update(&self, inventory: &Inventory, held: &BTreeSet<String>) -> bool {
        let mut state = self.state();
        if let Err(error) = self.write(&mut state, inventory, &|name| held.contains(name)) {
            tracing::error!(%error, "cannot write a file that containers need");
        }
        !state.is_unread
    }

    /// Ensures that the names of these devices in an answer are defined. What cannot be defined is
    /// left to the runtime, which names it to the user.
    pub(super) fn ensure<'a>(
        &self,
        spec: &ResourceSpec,
        devices: impl Iterator<Item = &'a Device>,
        inventory: &Inventory,
    ) -> io::Result<()> {
        let Some(kind) = nvidia_cdi::kind(spec) else { return Ok(()) };
        let mut may_move = false;
        let names: Vec<String> = devices
            .inspect(|device| may_move |= nvidia_cdi::may_move(spec, device))
            .filter_map(|device| nvidia_cdi::name(spec, device))
            .collect();
        let mut state = self.state();
        self.load(&mut state);
        let is_taken = |name: &String| state.is_taken(&format!("{kind}={name}"));
        if let Some((document, text)) = state.written.get(&kind).filter(|_| !may_move)
            && names.iter().all(|name| document.defines(name) || is_taken(name))
        {
            return self.own.ensure(&nvidia_cdi::file_name(&kind), text);
        }
        if names.iter().all(is_taken) {
            return Ok(());
        }
        self.write(&mut state, inventory, &|_| true)
    }

    /// Whether a runtime finds the definition of a name beyond GPUs. A missing one is written.
    pub(super) fn defines(&self, kind: &str, name: &str, inventory: &Inventory) -> bool {
        let mut state = self.state();
        self.load(&mut state);
        let own = |state: &State| {
            let written = state.written.get(kind).filter(|(document, _)| document.defines(name));
            let file = nvidia_cdi::file_name(kind);
            written.map(|(_, text)| self.own.ensure(&file, text).is_ok())
        };
        let qualified = format!("{kind}={name}");
        if state.is_taken(&qualified) {
            return true;
        }
        own(&state).unwrap_or_else(|| {
            let is_written = self.write(&mut state, inventory, &|_| true).is_ok();
            is_written && (state.is_taken(&qualified) || own(&state) == Some(true))
        })
    }

    /// Why the driver could not be read when the files were written last. A name that is not
    /// defined may be defined later then.
    pub(super) fn driver_unread(&self) -> Option<String> {
        self.state().driver_unread.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // What a panic left incomplete is made again.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the files of the process before.
    fn load(&self, state: &mut State) {
        if std::mem::replace(&mut state.is_loaded, true) {
            return;
        }
        for name in self.own.own() {
            let Ok(bytes) = read_bounded(&self.own.file(&name), BYTES_MAX) else { continue };
            let document = nvidia_cdi::Document::parse(&bytes)
                .filter(|document| nvidia_cdi::file_name(document.kind()) == name);
            let text = document.as_ref().and_then(nvidia_cdi::Document::text);
            if let Some((document, text)) = document.zip(text) {
                state.written.insert(document.kind().to_owned(), (document, text));
            }
        }
    }

    fn write(
        &self,
        state: &mut State,
        inventory: &Inventory,
        is_held: &dyn Fn(&str) -> bool,
    ) -> io::Result<()> {
        self.load(state);
        self.read_others(state);
        let wanted = self.wanted(inventory);
        let driver = if wanted.values().any(|wanted| !wanted.gpus.is_empty()) {
            self.driver(state, &wanted)
        } else {
            self.report(None);
            None
        };
        let extras = self.extras(inventory);
        let kinds: BTreeSet<String> =
            wanted.keys().chain(extras.keys()).chain(state.written.keys()).cloned().collect();
        let (none, no_extras) = (Wanted::default(), Extras::default());
        let mut result = Ok(());
        for kind in kinds {
            let wanted = wanted.get(&kind).unwrap_or(&none);
            let extras = extras.get(&kind).unwrap_or(&no_extras);
            let is_kept = |name: &str| {
                let is_all = name == nvidia_cdi::ALL && !wanted.listed.is_empty();
                let is_known = is_all || wanted.listed.contains(name) || extras.is_unread;
                is_known || is_held(&format!("{kind}={name}"))
            };
            let document = nvidia_cdi::document(&nvidia_cdi::Input {
                kind: &kind,
                driver: driver.as_ref(),
                gpus: &wanted.gpus,
                extras: &extras.present,
                is_taken: &|name| state.is_taken(name),
                is_kept: &is_kept,
                before: state.written.get(&kind).map(|(document, _)| document),
            });
            let file = nvidia_cdi::file_name(&kind);
            let done = match document.and_then(|document| Some((document.text()?, document))) {
                Some((text, document)) => {
                    let done = self.own.ensure(&file, &text);
                    state.written.insert(kind, (document, text));
                    done
                }
                None => match state.written.remove(&kind) {
                    Some(_) => self.own.remove(&file),
                    None => Ok(()),
                },
            };
            result = result.and(done);
        }
        result
    }

    /// The devices of each kind.
    fn wanted(&self, inventory: &Inventory) -> BTreeMap<String, Wanted> {
        let mut wanted: BTreeMap<String, Wanted> = BTreeMap::new();
        let node_exists = |path: &str| self.root.node_exists(path);
        for offering in inventory.resources.values() {
            let Some(kind) = nvidia_cdi::kind(&offering.spec) else { continue };
            let of_kind = wanted.entry(kind).or_default();
            for offered in offering.devices.values() {
                let Some(name) = nvidia_cdi::name(&offering.spec, &offered.device) else {
                    continue;
                };
                // Shares of one device have one definition.
                let is_new = of_kind.listed.insert(name.clone());
                if offered.health.is_present() && (is_new || !of_kind.defined.contains(&name)) {
                    let gpu = nvidia_cdi::gpu(&offering.spec, &offered.device, &node_exists);
                    of_kind.defined.extend(gpu.as_ref().map(|_| name));
                    of_kind.gpus.extend(gpu);
                }
            }
        }
        wanted
    }

    /// What the node has beyond GPUs, by kind.
    fn extras(&self, inventory: &Inventory) -> BTreeMap<String, Extras> {
        let root = self.root.recording();
        let mut extras: BTreeMap<String, Extras> = BTreeMap::new();
        let mut features = None;
        let specs = inventory.resources.values().map(|offering| &offering.spec);
        for spec in specs.filter(|spec| nvidia_cdi::kind(spec).is_some()) {
            for feature in NvidiaFeature::ALL {
                let Some((kind, switch)) = nvidia_cdi::feature_kind(spec, feature) else {
                    continue;
                };
                let of_node = features.get_or_insert_with(|| by_node(&root, inventory));
                let is_on = switch == Switch::On || of_node.contains(&feature);
                let of_kind = extras.entry(kind).or_default();
                let nodes =
                    if is_on { hardware::nvidia_feature_nodes(&root, feature) } else { Vec::new() };
                let files = match feature {
                    NvidiaFeature::Gds if !nodes.is_empty() => hardware::gds_files(&root),
                    _ => Vec::new(),
                };
                of_kind.add(nvidia_cdi::ALL, nodes, files);
            }
            let Some((kind, channels)) = nvidia_cdi::channels(spec) else { continue };
            let of_kind = extras.entry(kind).or_default();
            for channel in channels {
                let node = hardware::imex_channel(&root, *channel);
                let nodes = if root.node_exists(&node.host) { vec![node] } else { Vec::new() };
                of_kind.add(&channel.to_string(), nodes, Vec::new());
            }
        }
        // What cannot be read is not absent.
        let is_unread = !root.take_failures().is_empty();
        extras.values_mut().for_each(|of_kind| of_kind.is_unread = is_unread);
        extras
    }

    /// The installed driver, with a warning if a container would lack something.
    fn driver(&self, state: &mut State, wanted: &BTreeMap<String, Wanted>) -> Option<NvidiaDriver> {
        let found = nvidia_driver(&self.root, &mut state.hook);
        let undefined = wanted.iter().find_map(|(kind, wanted)| {
            let names = wanted.defined.iter().map(|name| format!("{kind}={name}"));
            names.into_iter().find(|name| !state.is_taken(name))
        });
        let warning = match (&found, undefined) {
            (_, None) => None,
            (Err(failure), Some(name)) => Some(format!("{name} is not defined: {failure}")),
            (Ok(None), Some(name)) => {
                let why = hardware::no_nvidia_driver(&self.root);
                Some(format!("no CDI file defines {name}, and {why}"))
            }
            (Ok(Some(driver)), Some(_)) => driver.hook.is_none().then(|| {
                "nvidia-cdi-hook is not installed: libraries of NVIDIA's driver are mounted at their names only, \
                 and an image of another distribution may not find them"
                    .to_owned()
            }),
        };
        self.report(warning);
        state.driver_unread = found.as_ref().err().map(ToString::to_string);
        found.ok().flatten()
    }

    /// Publishes a problem, and logs each once.
    fn report(&self, problem: Option<String>) {
        self.problem.send_if_modified(|known| {
            let is_news = *known != problem;
            if let Some(problem) = problem.as_ref().filter(|_| is_news) {
                tracing::warn!("{problem}");
            }
            *known = problem;
            is_news
        });
    }

    /// Reads the files of other programs. What cannot be read defines the names that it defined
    /// before (I12), and is read again at the next pass.
    fn read_others(&self, state: &mut State) {
        let (Ok(own), Ok(etc)) = (self.own.others(), self.etc.others()) else {
            state.is_unread = true;
            return;
        };
        state.is_unread = false;
        let mut before = std::mem::take(&mut state.others);
        for other in own.into_iter().chain(etc) {
            let known = match before.remove(&other.path) {
                Some(known) if known.0 == other.stamp => Some(known),
                former => match read_bounded(&other.path, BYTES_MAX) {
                    Ok(text) => Some((other.stamp, cdi_names(&String::from_utf8_lossy(&text)))),
                    Err(_) => {
                        state.is_unread = true;
                        former
                    }
                },
            };
            state.others.extend(known.map(|known| (other.path, known)));
        }
    }
}

/// The devices of a kind.
#[derive(Default)]
struct Wanted {
    /// Those that can be defined.
    gpus: Vec<nvidia_cdi::Gpu>,
    defined: BTreeSet<String>,
    /// The names of all that are offered.
    listed: BTreeSet<String>,
}

/// What is there beyond GPUs of a kind.
#[derive(Default)]
struct Extras {
    present: Vec<nvidia_cdi::Extra>,
    /// Whether something could not be read: then the definitions before stay.
    is_unread: bool,
}

impl Extras {
    /// Adds a name with nodes, once.
    fn add(&mut self, name: &str, nodes: Vec<DeviceNode>, files: Vec<DriverFile>) {
        if !nodes.is_empty() && !self.present.iter().any(|extra| extra.name == name) {
            self.present.push(nvidia_cdi::Extra { name: name.to_owned(), nodes, files });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        Contract, ContractKind, DeviceClass, DeviceId, DeviceIdStrategy, DeviceListStrategy,
        Health, NvidiaOptions, NvidiaRoots, Offered, Offering, PciFunction, Reason,
    };
    use proptest::prelude::*;
    use serde_json::Value;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    const LIB: &str = "usr/lib/x86_64-linux-gnu";
    const HOOK: &str = "usr/local/nvidia/toolkit/nvidia-cdi-hook";
    /// The files of a driver of release 580.95.05, below its root.
    const DRIVER: [&str; 17] = [
        "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
        "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05",
        "usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.580.95.05",
        "usr/lib/x86_64-linux-gnu/libnvidia-allocator.so.580.95.05",
        "usr/lib/x86_64-linux-gnu/libnvidia-egl-gbm.so.1.1.2",
        "usr/lib/x86_64-linux-gnu/libcudart.so.12.4.1",
        "usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.580.95.05",
        "usr/bin/nvidia-smi",
        "usr/bin/nvidia-cuda-mps-server",
        "usr/bin/bash",
        "lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
        "lib/firmware/nvidia/580.95.05/gsp_tu10x.bin",
        "lib/firmware/nvidia/575.57.08/gsp_tu10x.bin",
        "run/nvidia-persistenced/socket",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "etc/vulkan/icd.d/nvidia_icd.json",
        "etc/passwd",
    ];

    struct Setup {
        dir: tempfile::TempDir,
        options: NvidiaOptions,
        roots: NvidiaRoots,
    }

    impl Setup {
        /// A host whose driver has these files below `root`.
        fn new(root: &str, files: &[&str]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let options = NvidiaOptions {
                device_list_strategy: vec![DeviceListStrategy::CdiCri],
                ..NvidiaOptions::default()
            };
            let setup = Setup { dir, options, roots: NvidiaRoots::default() };
            for file in files {
                setup.write(&format!("{root}/{file}"), "");
            }
            for node in
                ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "dri/card1", "dri/renderD128"]
            {
                setup.write(&format!("dev/{node}"), "");
            }
            for cap in ["nvidia-cap12", "nvidia-cap13"] {
                setup.write(&format!("dev/nvidia-caps/{cap}"), "");
            }
            let lib = setup.dir.path().join("host").join(root).join(LIB);
            if lib.is_dir() {
                symlink("libcuda.so.580.95.05", lib.join("libcuda.so.1")).unwrap();
                symlink("libnvidia-ml.so.580.95.05", lib.join("libnvidia-ml.so.1")).unwrap();
            }
            setup
        }

        fn write(&self, file: &str, text: &str) {
            // Joining an absolute path would leave the tree, and write to this machine.
            let file = file.trim_start_matches('/');
            let path = self.dir.path().join("host").join(file);
            assert!(path.starts_with(self.dir.path()), "{} is outside of the tree", path.display());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            let mode = if file.contains("bin/") || file == HOOK { 0o755 } else { 0o644 };
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }

        fn specs(&self) -> GpuSpecs {
            let cdi = self.dir.path().join("cdi");
            let own = Arc::new(SpecFolder::new(&cdi, FILE_PREFIX));
            let root = HostRoot::new(self.dir.path().join("host")).with_nvidia(&self.roots);
            GpuSpecs::new(own, &cdi, root)
        }

        /// A GPU, and a MIG instance of another one.
        fn inventory(&self, health: Health) -> Inventory {
            let mut spec = ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu);
            spec.contract = Contract::Nvidia(self.options.clone());
            let offered = |id: &str, nodes: &[&str], attributes: &[(&'static str, &str)]| {
                let mut function = PciFunction::at("0000:18:00.0".parse().unwrap());
                function.drm = vec!["card1".into(), "renderD128".into()];
                let shared = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset"];
                let device = Device {
                    id: DeviceId::new(id),
                    key: format!("pci:{id}"),
                    class: DeviceClass::Gpu,
                    pci: Some(Box::new(function)),
                    numa_nodes: Vec::new(),
                    nodes: nodes.iter().chain(&shared).map(|node| DeviceNode::at(*node)).collect(),
                    attributes: attributes.iter().map(|(name, text)| (*name, *text)).collect(),
                };
                (DeviceId::new(id), Offered { device: Arc::new(device), health })
            };
            let caps =
                ["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"];
            let devices = [
                offered("GPU-1", &["/dev/nvidia0"], &[("uuid", "GPU-1"), ("index", "0")]),
                offered("GPU-1::1", &["/dev/nvidia0"], &[("uuid", "GPU-1"), ("index", "0")]),
                offered("GPU-2-gi1-ci0", &caps, &[("uuid", "MIG-1"), ("part", "mig")]),
                offered("GPU-2-gi2-ci0", &caps, &[("part", "mig")]),
            ];
            let offering = Offering { devices: devices.into(), spec: Arc::new(spec) };
            Inventory { resources: [(offering.spec.name.clone(), Arc::new(offering))].into() }
        }

        fn text(&self) -> Option<String> {
            fs::read_to_string(self.dir.path().join("cdi/holdfast-nvidia.com+gpu.json")).ok()
        }

        fn document(&self) -> Option<Value> {
            Some(serde_json::from_str(&self.text()?).unwrap())
        }

        fn names(&self) -> Vec<String> {
            let document = self.document().unwrap_or_default();
            let devices = document["devices"].as_array().cloned().unwrap_or_default();
            devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
        }

        fn other(&self, folder: &str, text: &str) {
            let path = self.dir.path().join(folder);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("nvidia.yaml"), text).unwrap();
        }
    }

    fn golden(name: &str, text: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/contract/golden").join(name);
        assert!(fs::read_to_string(path).unwrap_or_default() == text, "{name}:\n{text}");
    }

    fn held(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| format!("nvidia.com/gpu={name}")).collect()
    }

    #[test]
    fn a_file_that_cannot_be_read_keeps_its_names() {
        let setup = Setup::new("", &DRIVER);
        let (specs, inventory) = (setup.specs(), setup.inventory(Health::Healthy));
        let defines_gpu = || {
            let was_read = specs.update(&inventory, &held(&[]));
            (setup.names().contains(&"GPU-1".to_owned()), was_read)
        };
        setup.other("host/etc/cdi", "kind: nvidia.com/gpu\ndevices: [{name: GPU-1}]\n");
        assert_eq!(defines_gpu(), (false, true), "another file does");
        let (folder, file) = (
            setup.dir.path().join("host/etc/cdi"),
            setup.dir.path().join("host/etc/cdi/nvidia.yaml"),
        );
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert_eq!(defines_gpu(), (false, false), "the file cannot be read");
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        assert_eq!(defines_gpu(), (false, false), "the folder cannot be read");
        fs::remove_file(&folder).unwrap();
        assert_eq!(defines_gpu(), (true, true), "no file defines it any longer");
    }

    #[test]
    fn a_gpu_and_a_mig_instance_have_the_file_of_nvidias_toolkit() {
        let mut setup = Setup::new("", &DRIVER);
        setup.options.device_id_strategy = DeviceIdStrategy::Index;
        setup.write(HOOK, "#!/bin/sh\n");
        setup.write(
            &format!("{HOOK}.real"),
            "create-symlinks enable-cuda-compat update-ldcache disable-device-node-modification",
        );
        setup.write("dev/dri/by-path/pci-0000:18:00.0-card", "");
        setup.specs().update(&setup.inventory(Health::Healthy), &held(&[]));
        golden("nvidia-cdi-spec.json", &setup.text().unwrap());
        assert_eq!(setup.names(), ["0", "GPU-1", "MIG-1", "all"]);
    }

    #[test]
    fn a_driver_in_a_container_is_mounted_without_its_root() {
        let setup = Setup::new("run/nvidia/driver", &DRIVER);
        // Another release on the host is not the one of the kernel.
        setup.write(&format!("{LIB}/libcuda.so.575.57.08"), "");
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n";
        setup.write("proc/driver/nvidia/version", version);
        setup.specs().update(&setup.inventory(Health::Healthy), &held(&[]));
        golden("nvidia-cdi-spec-container.json", &setup.text().unwrap());
    }

    #[test]
    fn a_configured_root_is_the_only_one() {
        const GKE: &str = "home/kubernetes/bin/nvidia";
        let files = ["lib64/libcuda.so.535.1.2", "lib64/libnvidia-ml.so.535.1.2", "bin/nvidia-smi"];
        let mut setup = Setup::new(GKE, &files);
        // The host has a driver too.
        setup.write(&format!("{LIB}/libcuda.so.580.95.05"), "");
        let mounts = |setup: &Setup| -> Option<Vec<(String, String)>> {
            let specs = setup.specs();
            specs.update(&setup.inventory(Health::Healthy), &held(&[]));
            let edits = setup.document()?["containerEdits"].clone();
            let path = |mount: &Value, key: &str| mount[key].as_str().unwrap().to_owned();
            let mounts = edits["mounts"].as_array().cloned().unwrap_or_default();
            let both = |mount: &Value| (path(mount, "hostPath"), path(mount, "containerPath"));
            Some(mounts.iter().map(both).collect())
        };
        setup.roots.driver = Some(format!("/{GKE}"));
        let found = mounts(&setup).unwrap();
        for path in ["/lib64/libcuda.so.535.1.2", "/bin/nvidia-smi"] {
            let both = (format!("/{GKE}{path}"), path.to_owned());
            assert!(found.contains(&both), "{path}: {found:?}");
        }
        assert!(found.iter().all(|(host, _)| host.starts_with(&format!("/{GKE}/"))), "{found:?}");
        setup.roots.driver = Some(String::new());
        assert!(mounts(&setup).unwrap().iter().all(|(host, _)| host.starts_with("/usr/lib/")));
        // Without a driver below the root, nothing is taken from elsewhere.
        setup.roots.driver = Some("/opt/nvidia".into());
        let problem = || {
            let specs = setup.specs();
            specs.update(&setup.inventory(Health::Healthy), &held(&[]));
            specs.problem().borrow().clone().unwrap_or_default()
        };
        let absent = problem();
        assert!(absent.contains("`nvidia.driver_root` /opt/nvidia does not exist"), "{absent}");
        setup.write("opt/nvidia/README", "");
        assert!(problem().contains("below `nvidia.driver_root` /opt/nvidia have no libcuda.so"));
    }

    #[test]
    fn the_number_of_an_instance_is_defined_again_for_each_answer() {
        let mut setup = Setup::new("", &DRIVER);
        setup.options.device_id_strategy = DeviceIdStrategy::Index;
        setup.write("dev/nvidia-caps/nvidia-cap21", "");
        // The instance with these capabilities has the number 0:1.
        let inventory = |cap: &str| {
            let mut inventory = setup.inventory(Health::Healthy);
            let offering = Arc::make_mut(inventory.resources.values_mut().next().unwrap());
            let id = DeviceId::new("GPU-2-gi1-ci0");
            let mut device = (*offering.devices[&id].device).clone();
            device.attributes.insert("index", "0:1".to_owned());
            device.nodes = vec![DeviceNode::at(cap)];
            offering.devices.get_mut(&id).unwrap().device = Arc::new(device);
            inventory
        };
        let specs = setup.specs();
        let ensure = |cap: &str| {
            let inventory = inventory(cap);
            let offering = inventory.resources.values().next().unwrap();
            let device = &*offering.devices[&DeviceId::new("GPU-2-gi1-ci0")].device;
            specs.ensure(&offering.spec, [device].into_iter(), &inventory).unwrap();
            let document = setup.document().unwrap();
            let devices = document["devices"].as_array().unwrap().iter();
            let found = devices.into_iter().find(|device| device["name"] == "0:1").unwrap();
            found["containerEdits"]["deviceNodes"][0]["path"].as_str().unwrap().to_owned()
        };
        for cap in ["/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap21"] {
            assert_eq!(ensure(cap), cap);
        }
    }

    #[test]
    fn a_missing_part_of_the_driver_is_a_problem_until_it_is_there() {
        let setup = Setup::new("", &DRIVER);
        let (specs, inventory) = (setup.specs(), setup.inventory(Health::Healthy));
        let problem = || {
            specs.update(&inventory, &held(&[]));
            specs.problem().borrow().clone()
        };
        assert!(problem().unwrap().contains("nvidia-cdi-hook is not installed"));
        setup.write(HOOK, "");
        assert_eq!(problem(), None);
        fs::remove_dir_all(setup.dir.path().join("host/usr/lib")).unwrap();
        assert!(problem().unwrap().contains("no CDI file defines nvidia.com/gpu="));
        setup.other("cdi", "kind: nvidia.com/gpu\ndevices: [{name: GPU-1}, {name: MIG-1}]\n");
        assert_eq!(problem(), None, "another program defines all names");
    }

    #[test]
    fn a_name_of_another_file_is_left_out_while_it_is_there() {
        let setup = Setup::new("", &DRIVER);
        let (specs, inventory) = (setup.specs(), setup.inventory(Health::Healthy));
        let update = || {
            specs.update(&inventory, &held(&["GPU-1"]));
            setup.names()
        };
        assert_eq!(update(), ["GPU-1", "MIG-1", "all"]);
        let yaml =
            |names: &str| format!("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n{names}");
        setup.other("cdi", &yaml("- name: GPU-1\n- name: all\n"));
        assert_eq!(update(), ["MIG-1"]);
        // The operator's file has all names, in the other directory.
        setup.other("host/etc/cdi", &yaml("- name: MIG-1\n"));
        assert_eq!(update(), Vec::<String>::new());
        assert_eq!((setup.text(), specs.files()), (None, BTreeSet::new()));
        // The file of the operator for management has another kind.
        setup.other("host/etc/cdi", "kind: management.nvidia.com/gpu\ndevices:\n- name: all\n");
        fs::remove_file(setup.dir.path().join("cdi/nvidia.yaml")).unwrap();
        assert_eq!(update(), ["GPU-1", "MIG-1", "all"]);
    }

    #[test]
    fn offered_and_held_devices_keep_their_definitions() {
        let setup = Setup::new("", &DRIVER);
        setup.specs().update(&setup.inventory(Health::Healthy), &held(&[]));
        let before = setup.text().unwrap();
        // Another process, while nothing is known of the devices.
        let specs = setup.specs();
        specs.update(&setup.inventory(Health::Unhealthy(Reason::DeviceGone)), &held(&[]));
        assert_eq!(setup.text().as_ref(), Some(&before), "the file stays as it was");
        fs::remove_dir_all(setup.dir.path().join("host/usr/lib")).unwrap();
        specs.update(&Inventory::default(), &held(&["MIG-1"]));
        assert_eq!(setup.names(), ["MIG-1"]);
        let common =
            |text: &str| serde_json::from_str::<Value>(text).unwrap()["containerEdits"].clone();
        assert_eq!(common(&setup.text().unwrap()), common(&before));
        specs.update(&Inventory::default(), &held(&[]));
        assert_eq!(setup.text(), None);
    }

    /// As after a boot: the folder is empty.
    #[test]
    fn a_device_that_is_there_is_defined_also_while_it_is_unhealthy() {
        let setup = Setup::new("", &DRIVER);
        setup.specs().update(&setup.inventory(Health::Unhealthy(Reason::Cordoned)), &held(&[]));
        assert_eq!(setup.names(), ["GPU-1", "MIG-1", "all"]);
    }

    #[test]
    fn an_answer_waits_for_its_names_and_a_node_without_a_driver_has_no_file() {
        let setup = Setup::new("", &DRIVER);
        let (specs, inventory) = (setup.specs(), setup.inventory(Health::Healthy));
        let offering = inventory.resources.values().next().unwrap();
        let device = &*offering.devices[&DeviceId::new("GPU-1")].device;
        let ensure =
            |specs: &GpuSpecs| specs.ensure(&offering.spec, [device].into_iter(), &inventory);
        ensure(&specs).unwrap();
        assert!(setup.names().contains(&"GPU-1".to_owned()));
        fs::remove_file(setup.dir.path().join("cdi/holdfast-nvidia.com+gpu.json")).unwrap();
        ensure(&specs).unwrap();
        assert!(setup.text().is_some(), "a removed file is restored");

        let bare = Setup::new("", &["usr/bin/nvidia-smi"]);
        ensure(&bare.specs()).unwrap();
        assert_eq!(bare.text(), None);
        let plain = ResourceSpec {
            contract: ContractKind::Nvidia.into(),
            ..ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu)
        };
        assert_eq!(nvidia_cdi::kind(&plain), None, "answers by environment have no names");
    }

    #[test]
    fn a_library_elsewhere_is_found_by_the_loaders_cache() {
        let setup = Setup::new("", &["opt/nvidia/libcuda.so.580.95.05"]);
        let mut cache = b"glibc-ld.so.cache1.1".to_vec();
        cache.extend(1_u32.to_le_bytes());
        cache.resize(48, 0);
        cache.extend(0x0303_u32.to_le_bytes());
        cache.extend([0; 4]);
        cache.extend(72_u32.to_le_bytes());
        cache.extend([0; 12]);
        cache.extend(b"/opt/nvidia/libcuda.so.580.95.05\0");
        setup.write("etc/ld.so.conf", "");
        fs::write(setup.dir.path().join("host/etc/ld.so.cache"), cache).unwrap();
        setup.specs().update(&setup.inventory(Health::Healthy), &held(&[]));
        assert!(setup.text().unwrap().contains("/opt/nvidia/libcuda.so.580.95.05"));
    }

    #[test]
    fn a_tegra_system_has_what_its_lists_name() {
        let mut setup = Setup::new("", &[]);
        setup.options.device_id_strategy = DeviceIdStrategy::Index;
        setup.write(HOOK, "#!/bin/sh\n");
        setup.write(&format!("{HOOK}.real"), "enable-cuda-compat disable-device-node-modification");
        setup.write("etc/nv_tegra_release", "# R36 (release), REVISION: 4.0\n");
        for node in ["nvgpu/igpu0/ctrl", "nvgpu/igpu0/channel", "nvmap"] {
            setup.write(&format!("dev/{node}"), "");
        }
        let lib = "usr/lib/aarch64-linux-gnu/nvidia";
        for file in ["libcuda.so.1.1", "libnvidia-ml.so.1", "nvidia_icd.json"] {
            setup.write(&format!("{lib}/{file}"), "");
        }
        setup.write("usr/sbin/nvidia-smi", "");
        setup.write("usr/share/fonts/a.ttf", "");
        let host = setup.dir.path().join("host");
        let link = |target: &str, path: &str| symlink(target, host.join(path)).unwrap();
        link("libcuda.so.1.1", &format!("{lib}/libcuda.so.1"));
        link("nvidia/libcuda.so", "usr/lib/aarch64-linux-gnu/libcuda.so");
        link("libcuda.so.1.1", &format!("{lib}/libcuda.so"));
        fs::create_dir_all(host.join("etc/vulkan/icd.d")).unwrap();
        let icd = "../../../usr/lib/aarch64-linux-gnu/nvidia/nvidia_icd.json";
        link(icd, "etc/vulkan/icd.d/nvidia_icd.json");
        let lists = "etc/nvidia-container-runtime/host-files-for-container.d";
        // `/dev/fb0` and one library do not exist, and two lines are no lines of a list.
        setup.write(
            &format!("{lists}/devices.csv"),
            "dev, /dev/nvgpu/igpu0/*\ndev, /dev/nvmap\ndev, /dev/fb0\ndev, nvmap\nnothing\n",
        );
        setup.write(
            &format!("{lists}/drivers.csv"),
            &format!(
                "lib, /{lib}/libcuda.so.1.1\nlib, /{lib}/libnvidia-ml.so.1\n\
                 lib, /{lib}/libnvos.so\nlib, //usr/sbin/nvidia-smi\ndir, /usr/share/fonts\n\
                 sym, /usr/lib/aarch64-linux-gnu/libcuda.so\n\
                 sym, /etc/vulkan/icd.d/nvidia_icd.json\n"
            ),
        );
        setup.write(&format!("{lists}/others.csv"), "lib, /usr/share/fonts/a.ttf\n");
        let root = HostRoot::new(&host);
        let mut spec = ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu);
        spec.contract = Contract::Nvidia(setup.options.clone());
        let found = hardware::discover(&root, &[], &BTreeMap::new());
        let device = found.devices.last().unwrap();
        let offered = Offered { device: Arc::clone(device), health: Health::Healthy };
        let devices = [(device.id.clone(), offered)].into();
        let offering = Offering { devices, spec: Arc::new(spec) };
        let inventory =
            Inventory { resources: [(offering.spec.name.clone(), Arc::new(offering))].into() };
        setup.specs().update(&inventory, &held(&[]));
        assert_eq!(setup.names(), ["0", "all", "tegra"]);
        golden("nvidia-cdi-spec-tegra.json", &setup.text().unwrap());

        // Without lists nothing is known of the files, and an incomplete file would be wrong.
        fs::remove_dir_all(host.join(lists)).unwrap();
        fs::remove_dir_all(setup.dir.path().join("cdi")).unwrap();
        setup.specs().update(&inventory, &held(&[]));
        assert_eq!(setup.text(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn every_path_of_the_host_exists_and_no_path_of_a_container_is_there_twice(
            files in proptest::sample::subsequence(DRIVER.to_vec(), 0..=DRIVER.len()),
            is_contained: bool,
            has_hook: bool,
        ) {
            let setup = Setup::new(if is_contained { "run/nvidia/driver" } else { "" }, &files);
            if has_hook {
                setup.write(HOOK, "");
            }
            setup.specs().update(&setup.inventory(Health::Healthy), &held(&[]));
            let has_driver = files.iter().any(|file| {
                file.contains("libcuda.so.") || file.contains("libnvidia-ml.so.")
            });
            prop_assert_eq!(setup.text().is_some(), has_driver);
            let document = setup.document().unwrap_or_default();
            let mut paths = BTreeSet::new();
            let edits = &document["containerEdits"];
            for mount in edits["mounts"].as_array().into_iter().flatten() {
                let host = mount["hostPath"].as_str().unwrap();
                prop_assert!(setup.dir.path().join("host").join(&host[1..]).is_file(), "{}", host);
                prop_assert_eq!(host.starts_with("/run/nvidia/driver/"), is_contained);
                let path = mount["containerPath"].as_str().unwrap();
                prop_assert!(!path.starts_with("/run/nvidia/driver/"));
                prop_assert!(paths.insert(path.to_owned()), "{} twice", path);
            }
            prop_assert_eq!(edits.get("hooks").is_some(), has_driver && has_hook);
            let lib = format!("/{LIB}/libcuda.so.1");
            let has_cuda = files.iter().any(|file| file.contains("libcuda.so."));
            prop_assert_eq!(paths.contains(&lib), has_cuda && !has_hook);
        }
    }
}
