//! The GPU of a Tegra system on a chip: Jetson, DRIVE and IGX boards.
//!
//! Up to Orin it is a platform device under NVIDIA's driver nvgpu, and no PCI function: neither
//! `/proc/driver/nvidia` nor a UUID names it. Since Thor it is a PCI function under the driver of
//! NVIDIA's other GPUs. NVIDIA's device plugin names either one `tegra`
//! (`internal/rm/tegra_devices.go`).
//!
//! NVIDIA's container toolkit takes what a container needs from lists of the platform's packages,
//! in [`FOLDER`] (`internal/platform-support/tegra/csv`). Each line has a kind and a path:
//!
//! | kind | path of |
//! | --- | --- |
//! | `dev` | a device node, which may be a glob |
//! | `lib` | a library or another file |
//! | `sym` | a link |
//! | `dir` | a folder |

use super::facts::{Facts, optional, required};
use crate::domain::{DeviceNode, DriverFile, DriverLibrary, DriverLink};
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};

/// The id of the GPU, and its name for the NVIDIA runtime.
pub(super) const ID: &str = "tegra";
/// The attribute of the GPU, with [`ID`] as its value.
pub(super) const ATTRIBUTE: &str = "integrated";
/// The folder of the lists.
const FOLDER: &str = "etc/nvidia-container-runtime/host-files-for-container.d";
/// The lists that the toolkit reads, in its order. Others need a request of the image.
const LISTS: [&str; 3] = ["devices.csv", "drivers.csv", "l4t.csv"];
/// The release of the platform's software. It marks a Tegra system (go-nvlib, `HasTegraFiles`).
const RELEASE: &str = "/etc/nv_tegra_release";
/// The family of the chip, `Tegra`.
const FAMILY: &str = "sys/devices/soc0/family";

const PLATFORM: &str = "sys/bus/platform/devices";
/// The names of the platform device of the GPU end with these: `17000000.ga10b`, `17000000.gpu`.
const CHIPS: [&str; 6] = [".gpu", ".gk20a", ".gm20b", ".gp10b", ".gv11b", ".ga10b"];
/// The name of the driver nvgpu on the platform bus is that of its first chip.
const DRIVERS: [&str; 2] = ["gk20a", "nvgpu"];
/// The control node of the GPU: since release 34 of the platform's software, and before.
const CONTROL: [&str; 2] = ["/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu"];
/// The node through which all engines of the chip share memory.
const MEMORY: &str = "/dev/nvmap";
/// The nodes of the GPU where no list names them.
const USUAL: [&str; 2] = ["/dev/nvgpu/igpu0/*", "/dev/nvhost-*gpu"];
/// The most links that are followed from one to the next, as in the kernel.
const LINKS_MAX: usize = 40;

/// Whether it is a Tegra system.
pub(super) fn is_system(root: &HostRoot) -> bool {
    let family = || root.read(FAMILY).unwrap_or_default().to_ascii_lowercase();
    root.installed(RELEASE).is_some() || family().starts_with("tegra")
}

/// Whether a GPU of this model belongs to a Tegra system. No driver file states it, and NVIDIA's
/// own programs decide by the model too (go-nvlib, `IsIntegratedGPUName`).
pub(super) fn is_model(model: &str) -> bool {
    model.contains("(nvgpu)") || model.contains("NVIDIA Thor")
}

/// The GPU that is a platform device; `None` if the system has none, or if a driver uses it that is
/// not NVIDIA's.
pub(super) fn platform_gpu(root: &HostRoot) -> Option<Facts> {
    let control = CONTROL.into_iter().find(|node| root.node_exists(node));
    if control.is_none() {
        let is_gpu = |name: &String| CHIPS.iter().any(|chip| name.ends_with(chip));
        let device = root.entries(PLATFORM).into_iter().find(is_gpu)?;
        let driver = root.link_name(&format!("{PLATFORM}/{device}/driver"));
        driver.is_none_or(|driver| DRIVERS.contains(&driver.as_str())).then_some(())?;
    }
    let mut facts = Facts {
        identity: Some(ID.to_owned()),
        nodes: [control.unwrap_or(CONTROL[1]), MEMORY].map(required).into(),
        ..Facts::default()
    };
    facts.note(ATTRIBUTE, Some(ID));
    facts.note("index", Some(0));
    let files = Files::read(root);
    let listed = if files.of("dev").next().is_some() {
        files.nodes(root)
    } else {
        USUAL.iter().flat_map(|pattern| root.glob(pattern)).collect()
    };
    add_nodes(&mut facts.nodes, listed);
    Some(facts)
}

/// Marks a PCI function as the GPU of a Tegra system, and adds the nodes of the platform that its
/// containers need. `others` has the nodes of other GPUs.
pub(super) fn mark(root: &HostRoot, facts: &mut Facts, others: &BTreeSet<String>) {
    facts.identity = Some(ID.to_owned());
    facts.note(ATTRIBUTE, Some(ID));
    let listed = Files::read(root).nodes(root).into_iter().filter(|node| !others.contains(node));
    add_nodes(&mut facts.nodes, listed.collect());
}

/// Adds nodes, each once.
fn add_nodes(nodes: &mut Vec<DeviceNode>, listed: Vec<String>) {
    for path in listed {
        if !nodes.iter().any(|node| node.container == path) {
            nodes.push(optional(path));
        }
    }
}

/// The lines of the platform's lists: kind and path.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<(String, String)>);

impl Files {
    pub(super) fn read(root: &HostRoot) -> Self {
        let line = |line: &str| {
            let (kind, path) = line.trim().split_once(',')?;
            let path = path.trim();
            // A list may begin a path with two slashes.
            let path = format!("/{}", path.strip_prefix('/')?.trim_start_matches('/'));
            (path != "/").then(|| (kind.trim().to_owned(), path))
        };
        let text = |list: &&str| root.read_all(&format!("{FOLDER}/{list}")).ok();
        let texts: Vec<String> = LISTS.iter().filter_map(text).collect();
        Files(texts.iter().flat_map(|text| text.lines()).filter_map(line).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(of, _)| of == kind).map(|(_, path)| path.as_str())
    }

    /// The device nodes that exist.
    fn nodes(&self, root: &HostRoot) -> Vec<String> {
        let found = self.of("dev").flat_map(|pattern| root.glob(pattern));
        found.filter(|path| path.starts_with("/dev/") && root.node_exists(path)).collect()
    }

    /// The libraries, and the other files that links lead to.
    pub(super) fn libraries(&self, root: &HostRoot) -> Vec<DriverLibrary> {
        let mut links: BTreeMap<String, BTreeSet<DriverLink>> = BTreeMap::new();
        let real = |path: &str| root.installed(path).map(|file| file.path);
        let listed = self.of("lib").flat_map(|pattern| root.glob(pattern));
        for path in listed.filter_map(|path| real(&path)).filter(|path| is_library(path)) {
            links.entry(path).or_default();
        }
        for (path, of_path) in &mut links {
            *of_path = links_beside(root, path);
        }
        for path in self.of("sym").flat_map(|pattern| root.glob(pattern)) {
            let Some(file) = real(&path) else { continue };
            links.entry(file).or_default().extend(links_from(root, path));
        }
        let library = |(path, links): (String, BTreeSet<DriverLink>)| DriverLibrary {
            path,
            links: links.into_iter().collect(),
        };
        links.into_iter().map(library).collect()
    }

    /// The folders, and the files that are no libraries.
    pub(super) fn others(&self, root: &HostRoot) -> Vec<DriverFile> {
        let folder =
            |path: String| Some(DriverFile { host: root.real_folder(&path)?, container: path });
        let file = |path: String| {
            let host = root.installed(&path)?.path;
            (!is_library(&host)).then(|| DriverFile { container: host.clone(), host })
        };
        let folders = self.of("dir").flat_map(|pattern| root.glob(pattern)).filter_map(folder);
        let files = self.of("lib").flat_map(|pattern| root.glob(pattern)).filter_map(file);
        folders.chain(files).chain(file(RELEASE.to_owned())).collect()
    }
}

/// Whether the loader may load a file of this name.
pub(super) fn is_library(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.ends_with(".so") || name.contains(".so.")
}

/// The links to a library in its folder, and `libcuda.so`, which programs expect.
fn links_beside(root: &HostRoot, path: &str) -> BTreeSet<DriverLink> {
    let Some((folder, name)) = path.rsplit_once('/') else { return BTreeSet::new() };
    let stem = name.split(".so").next().unwrap_or(name);
    let is_short = |short: &String| {
        short.split(".so").next() == Some(stem) && short.len() < name.len() && is_library(short)
    };
    let link = |short: String| {
        let path = format!("{folder}/{short}");
        let target = root.link_target(&path).filter(|target| !target.contains('/'))?;
        Some(DriverLink { path, target })
    };
    let leads_here =
        |link: &DriverLink| root.installed(&link.path).is_some_and(|file| file.path == path);
    let mut links: BTreeSet<DriverLink> = root
        .entries(folder)
        .into_iter()
        .filter(is_short)
        .filter_map(link)
        .filter(leads_here)
        .collect();
    if stem == "libcuda" && name.len() > "libcuda.so.1".len() {
        let (path, target) = (format!("{folder}/libcuda.so"), "libcuda.so.1".to_owned());
        links.retain(|link| link.path != path);
        links.insert(DriverLink { path, target });
    }
    links
}

/// A link, and those that it leads to.
fn links_from(root: &HostRoot, mut path: String) -> Vec<DriverLink> {
    let mut links = Vec::new();
    while let Some(target) = root.link_target(&path).filter(|_| links.len() < LINKS_MAX) {
        let next = joined(&path, &target);
        links.push(DriverLink { path, target });
        path = next;
    }
    links
}

/// The path of a link's target, without `.` and `..`.
fn joined(link: &str, target: &str) -> String {
    let folder = link.rsplit_once('/').map_or("", |(folder, _)| folder);
    let whole =
        if target.starts_with('/') { target.to_owned() } else { format!("{folder}/{target}") };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{spec, write};
    use super::super::{DiscoverInput, defaults, discover_with, scan, scan_after};
    use super::*;
    use crate::domain::{DeviceClass, INTEGRATED_KEY, MigStrategy, Select};
    use crate::host::faults::with_faults;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn driver(root: &Path, device: &str, driver: &str) {
        let folder = root.join(PLATFORM).join(device);
        std::fs::create_dir_all(&folder).unwrap();
        symlink(format!("../../drivers/{driver}"), folder.join("driver")).unwrap();
    }

    fn required_nodes(facts: Option<Facts>) -> Vec<String> {
        let nodes = facts.into_iter().flat_map(|facts| facts.nodes);
        nodes.filter(|node| node.required).map(|node| node.host).collect()
    }

    #[test]
    fn a_tegra_system_is_known_by_its_release_or_its_chip() {
        for (file, text, expected) in [
            ("etc/nv_tegra_release", "# R32 (release)", true),
            ("sys/devices/soc0/family", "Tegra\n", true),
            ("sys/devices/soc0/family", "tegra264\n", true),
            ("sys/devices/soc0/family", "Snapdragon\n", false),
            ("etc/nv_tegra_release/a", "a folder of this name", false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), file, text);
            assert_eq!(is_system(&HostRoot::new(dir.path())), expected, "{file}: {text}");
        }
    }

    #[test]
    fn the_gpu_of_each_generation_is_found() {
        let found = |device: Option<(&str, &str)>, nodes: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            if let Some((device, bound)) = device {
                driver(dir.path(), device, bound);
            }
            for node in nodes {
                write(dir.path(), &format!("dev/{node}"), "");
            }
            required_nodes(platform_gpu(&HostRoot::new(dir.path())))
        };
        let (old, new) = ("/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/ctrl");
        assert_eq!(found(None, &["nvhost-ctrl-gpu", "nvmap"]), [old, MEMORY], "Nano");
        let both = ["nvhost-ctrl-gpu", "nvgpu/igpu0/ctrl"];
        assert_eq!(found(Some(("17000000.gpu", "gk20a")), &both), [new, MEMORY], "Orin");
        for device in ["57000000.gpu", "17000000.gp10b", "17000000.gv11b", "17000000.ga10b"] {
            assert_eq!(found(Some((device, "gk20a")), &[]), [old, MEMORY], "{device}, no node");
        }
        assert!(found(Some(("57000000.gpu", "nouveau")), &[]).is_empty(), "CUDA cannot use it");
        assert!(found(Some(("3960000.cec", "tegra-cec")), &["nvmap"]).is_empty(), "no GPU");
    }

    #[test]
    fn the_gpu_is_offered_beside_a_card_and_is_the_first() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/devices/soc0/family", "Tegra\n");
        for node in ["nvgpu/igpu0/ctrl", "nvgpu/igpu0/channel", "nvmap", "nvidia0", "nvidiactl"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        let card = "0005:01:00.0";
        write(
            dir.path(),
            &format!("sys/bus/pci/devices/{card}/uevent"),
            "DRIVER=nvidia\nPCI_CLASS=30000\nPCI_ID=10DE:26B1\n",
        );
        write(
            dir.path(),
            &format!("proc/driver/nvidia/gpus/{card}/information"),
            "Model: \t NVIDIA RTX 6000 Ada\nGPU UUID: \t GPU-1\nDevice Minor: \t 0\n",
        );
        let root = HostRoot::new(dir.path());
        let scanned = scan(&root);
        let specs = defaults::or_usual(&[], MigStrategy::None, &scanned);
        let found = discover_with(&root, scanned, &specs, &DiscoverInput::first(&BTreeMap::new()));
        let listed: Vec<_> = found.selection.resources.values().next().unwrap().iter().collect();
        let named: Vec<_> =
            listed.iter().map(|device| (device.id.as_str(), device.attribute("index"))).collect();
        assert_eq!(named, [("GPU-1", Some("1")), ("tegra", Some("0"))]);
        let nodes: Vec<&str> = listed[1].nodes.iter().map(|node| node.host.as_str()).collect();
        assert_eq!(nodes, ["/dev/nvgpu/igpu0/ctrl", "/dev/nvmap", "/dev/nvgpu/igpu0/channel"]);
        assert!(found.selection.warnings.is_empty(), "{:?}", found.selection.warnings);
    }

    #[test]
    fn a_failed_read_keeps_the_gpu() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), RELEASE.trim_start_matches('/'), "# R36 (release)\n");
        driver(dir.path(), "17000000.gpu", "gk20a");
        write(dir.path(), "dev/nvgpu/igpu0/ctrl", "");
        write(dir.path(), "dev/nvmap", "");
        let root = HostRoot::new(dir.path());
        let specs = [spec("a.com/gpu", DeviceClass::Gpu, Select::default())];
        let names = BTreeMap::new();
        let first = discover_with(&root, scan(&root), &specs, &DiscoverInput::first(&names));
        let known = DiscoverInput { former: Some(&first), ..DiscoverInput::first(&names) };
        let again = || discover_with(&root, scan_after(&root, &first.devices), &specs, &known);
        let (second, calls) = with_faults(|_| None, again);
        assert_eq!(second.devices, first.devices);
        assert!(second.unread.is_empty() && calls > 10, "{calls} calls");
        for failing in 0..calls {
            // EMFILE
            let (found, _) = with_faults(move |call| (call == failing).then_some(24), again);
            assert_eq!(found.devices, first.devices, "call {failing}");
            assert_eq!(found.missing_nodes, first.missing_nodes, "call {failing}");
        }
        // All fail, and it is recorded.
        let (found, _) = with_faults(|_| Some(24), again);
        assert_eq!(found.devices, first.devices);
        assert!(found.unread.may_hide(INTEGRATED_KEY));
    }
}
