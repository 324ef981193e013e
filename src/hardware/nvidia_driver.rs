//! The installed files of NVIDIA's driver, found where NVIDIA's container toolkit finds them
//! (`pkg/nvcdi`, `internal/lookup/root`): libraries by the release in their names, programs,
//! firmware, files of settings, sockets of the daemons, and the program for hooks.
//!
//! The driver is the host's own, or it runs in a container whose root is mounted on the host. Then
//! links are followed inside that root.

use super::{ld_cache, nvidia, tegra};
use crate::domain::{CdiHookProgram, DriverFile, DriverLibrary, DriverLink, NvidiaDriver};
use crate::host::{HostRoot, ReadFailure, Stamp};
use std::collections::{BTreeMap, BTreeSet};

/// The folders of libraries, in the order of the toolkit. `/usr/lib` is not one of them: on some
/// distributions it has the 32-bit libraries. Other folders are found by the loader's cache.
const LIBRARY_FOLDERS: [&str; 10] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu/nvidia/current",
    "/lib/aarch64-linux-gnu/nvidia/current",
];
/// Their names show the release of the driver.
const RELEASE_OF: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];
/// Libraries of the driver with a release of their own.
const OTHER_RELEASES: [&str; 5] = [
    "libnvidia-egl-gbm.so.",
    "libnvidia-egl-wayland.so.",
    "libnvidia-egl-wayland2.so.",
    "libnvidia-egl-xcb.so.",
    "libnvidia-egl-xlib.so.",
];
/// An older library of the driver, with a number of its own.
const OLDER: &str = "libnvidia-nvvm70.so.";
pub(super) const PROGRAM_FOLDERS: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
const PROGRAMS: [&str; 8] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
];
const SETTINGS_FOLDERS: [&str; 3] = ["/etc", "/usr/local/share", "/usr/share"];
/// Files of settings, with their folder in the container.
const SETTINGS: [(&str, &str); 15] = [
    ("/usr/share", "glvnd/egl_vendor.d/10_nvidia.json"),
    ("/usr/share", "egl/egl_external_platform.d/15_nvidia_gbm.json"),
    ("/usr/share", "egl/egl_external_platform.d/10_nvidia_wayland.json"),
    ("/usr/share", "egl/egl_external_platform.d/09_nvidia_wayland2.json"),
    ("/usr/share", "egl/egl_external_platform.d/20_nvidia_xcb.json"),
    ("/usr/share", "egl/egl_external_platform.d/20_nvidia_xlib.json"),
    ("/usr/share", "nvidia/nvoptix.bin"),
    ("/usr/share", "X11/xorg.conf.d/10-nvidia.conf"),
    ("/usr/share", "X11/xorg.conf.d/nvidia-drm-outputclass.conf"),
    ("/etc", "OpenCL/vendors/nvidia.icd"),
    ("/etc", "vulkan/icd.d/nvidia_icd.json"),
    ("/etc", "vulkan/icd.d/nvidia_layers.json"),
    ("/etc", "vulkan/implicit_layer.d/nvidia_layers.json"),
    ("/etc", "vulkan/icd.d/nvidia_icd.x86_64.json"),
    ("/etc", "vulkan/icd.d/nvidia_icd.aarch64.json"),
];
/// Folders of the modules of an X server, in a folder of libraries.
const XORG_FOLDERS: [&str; 5] = [
    "nvidia/xorg",
    "xorg/modules/drivers",
    "xorg/modules/extensions",
    "xorg/modules/updates/drivers",
    "xorg/modules/updates/extensions",
];
const RUN_FOLDERS: [&str; 2] = ["/run", "/var/run"];
const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];
const MPS_SOCKETS: &str = "/tmp/nvidia-mps";

/// Where the program for hooks is installed: by packages, and by the GPU operator.
const HOOK_FOLDERS: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit"];
const HOOK_PROGRAMS: [&str; 2] = ["nvidia-cdi-hook", "nvidia-ctk"];
/// Hooks that later releases added. Before release 1.18 an unknown hook is an error, and the
/// container does not start.
const LATER_HOOKS: [&str; 3] =
    ["enable-cuda-compat", "disable-device-node-modification", "update-application-profile"];

/// The program for hooks as it was read last: it has several megabytes.
#[derive(Debug, Default)]
pub struct KnownHook(Option<(Stamp, CdiHookProgram)>);

/// The driver of the host; `None` if none is installed. With libraries in several roots, the one
/// counts whose release is loaded into the kernel. On a Tegra system it is what the platform's
/// lists name.
///
/// # Errors
/// If a file could not be read: then it is unknown what is installed.
pub fn nvidia_driver(
    root: &HostRoot,
    known: &mut KnownHook,
) -> Result<Option<NvidiaDriver>, ReadFailure> {
    let root = &root.recording();
    if tegra::is_system(root) {
        let driver = of_tegra(root, known);
        return match root.take_failures().into_iter().next() {
            Some(failure) => Err(failure),
            None => Ok(driver),
        };
    }
    let loaded = nvidia::driver_version(root);
    let roots = root.nvidia().of_driver();
    let mut found: Vec<Libraries> = roots
        .into_iter()
        .filter_map(|below| Libraries::find(root, below, loaded.as_deref()))
        .collect();
    let loaded = found.iter().position(|found| Some(&found.release) == loaded.as_ref());
    let driver = (!found.is_empty()).then(|| {
        let libraries = found.swap_remove(loaded.unwrap_or(0));
        NvidiaDriver { hook: hook(root, known), ..libraries.driver(root) }
    });
    match root.take_failures().into_iter().next() {
        Some(failure) => Err(failure),
        None => Ok(driver),
    }
}

/// Why no driver was found, in words.
#[must_use]
pub fn no_nvidia_driver(root: &HostRoot) -> String {
    match root.nvidia().driver.as_deref().filter(|driver| !driver.is_empty()) {
        Some(driver) if !root.is_dir(driver) => {
            format!("`nvidia.driver_root` {driver} does not exist on the host")
        }
        Some(driver) => format!(
            "the usual folders below `nvidia.driver_root` {driver} have no libcuda.so or \
             libnvidia-ml.so of NVIDIA's driver"
        ),
        None => "NVIDIA's driver is not installed in the usual folders of the host; set \
             `nvidia.driver_root` to its root"
            .into(),
    }
}

/// The files of the driver of a Tegra system, by the lists of the platform's packages; `None`
/// without these. Their libraries have several releases. Of the toolkit's hooks they need only
/// those of its first releases (`pkg/nvcdi/lib-csv.go`, `driverDiscoverer`).
fn of_tegra(root: &HostRoot, known: &mut KnownHook) -> Option<NvidiaDriver> {
    let files = tegra::Files::read(root);
    (!files.is_empty()).then(|| NvidiaDriver {
        libraries: files.libraries(root),
        files: files.others(root),
        hook: hook(root, known).map(|hook| CdiHookProgram { hooks: Vec::new(), ..hook }),
        ..NvidiaDriver::default()
    })
}

/// A folder with the names in it.
struct Folder {
    path: String,
    names: Vec<String>,
}

impl Folder {
    fn read(root: &HostRoot, path: String) -> Self {
        Folder { names: root.entries(&path), path }
    }
}

/// The folders of a root with libraries of the driver.
struct Libraries {
    /// The root of the driver on the host; empty for the host itself.
    below: String,
    root: HostRoot,
    release: String,
    folders: Vec<Folder>,
}

impl Libraries {
    fn find(host: &HostRoot, below: &str, loaded: Option<&str>) -> Option<Self> {
        let root = host.rooted_at(below);
        let usual = LIBRARY_FOLDERS.iter().filter_map(|folder| root.real_folder(folder));
        let mut folders = read_once(&root, usual);
        let release = release(&folders, loaded).or_else(|| {
            folders = read_once(&root, cached_folders(&root).into_iter());
            release(&folders, loaded)
        })?;
        Some(Libraries { below: below.to_owned(), root, release, folders })
    }

    fn driver(self, host: &HostRoot) -> NvidiaDriver {
        let libraries = self.libraries();
        let mut files: Vec<DriverFile> = Vec::new();
        let programs = PROGRAMS.iter().filter_map(|name| self.program(name));
        let settings = SETTINGS.iter().filter_map(|(folder, name)| self.setting(folder, name));
        for file in programs.chain(self.firmware(host)).chain(settings).chain(self.xorg_modules()) {
            if !files.iter().any(|known| known.container == file.container) {
                files.push(file);
            }
        }
        NvidiaDriver {
            root: self.below.clone(),
            libraries,
            files,
            sockets: self.sockets(),
            hook: None,
            version: self.release,
        }
    }

    /// The regular file at a path, with this path in the container.
    fn file(&self, path: &str, container: String) -> Option<DriverFile> {
        let host = self.root.installed(path)?.path;
        Some(DriverFile { host: format!("{}{host}", self.below), container })
    }

    fn libraries(&self) -> Vec<DriverLibrary> {
        let suffix = format!(".so.{}", self.release);
        let is_wanted = |name: &str| {
            let is_other = |stem: &&str| name.strip_prefix(*stem).is_some_and(is_release);
            name.ends_with(&suffix)
                || name.starts_with(OLDER)
                || OTHER_RELEASES.iter().any(is_other)
        };
        let vdpau: Vec<Folder> = self
            .folders
            .iter()
            .filter(|folder| folder.names.iter().any(|name| name == "vdpau"))
            .map(|folder| Folder::read(&self.root, format!("{}/vdpau", folder.path)))
            .collect();
        let mut links: BTreeMap<String, BTreeSet<DriverLink>> = BTreeMap::new();
        for folder in self.folders.iter().chain(&vdpau) {
            let wanted: Vec<&String> = folder.names.iter().filter(|name| is_wanted(name)).collect();
            let real = |name: &str| self.root.installed(&format!("{}/{name}", folder.path));
            for file in wanted.iter().filter_map(|name| real(name)) {
                links.entry(file.path).or_default();
            }
            let stems: BTreeSet<&str> =
                wanted.iter().filter_map(|name| Some(name.split_once(".so.")?.0)).collect();
            let is_of_one = |name: &&String| {
                name.split_once(".so").is_some_and(|(stem, _)| stems.contains(stem))
            };
            for name in folder.names.iter().filter(is_of_one) {
                let path = format!("{}/{name}", folder.path);
                // A target elsewhere may be a link of a package manager, which no container has.
                let target = self.root.link_target(&path).filter(|target| !target.contains('/'));
                let to = target.as_ref().and_then(|_| real(name));
                if let Some((target, links)) = target.zip(to.and_then(|to| links.get_mut(&to.path)))
                {
                    links.insert(DriverLink { path, target });
                }
            }
        }
        let library = |(path, links): (String, BTreeSet<DriverLink>)| DriverLibrary {
            path,
            links: links.into_iter().collect(),
        };
        links.into_iter().map(library).collect()
    }

    fn program(&self, name: &str) -> Option<DriverFile> {
        let paths = PROGRAM_FOLDERS.iter().map(|folder| format!("{folder}/{name}"));
        let is_program =
            |path: &String| self.root.installed(path).is_some_and(|file| file.is_program);
        let path = paths.into_iter().find(is_program)?;
        self.file(&path, path.clone())
    }

    /// The kernel's search path for firmware. A folder of the kernel's parameter comes first.
    fn firmware(&self, host: &HostRoot) -> Vec<DriverFile> {
        let kernel = host.read("proc/sys/kernel/osrelease").unwrap_or_default();
        let custom = host.read("sys/module/firmware_class/parameters/path");
        let custom = custom.filter(|path| path.starts_with('/'));
        let folders = custom.into_iter().chain([
            format!("/lib/firmware/updates/{kernel}"),
            "/lib/firmware/updates".to_owned(),
            format!("/lib/firmware/{kernel}"),
            "/lib/firmware".to_owned(),
        ]);
        let found = folders.flat_map(|folder| {
            let folder = format!("{}/nvidia/{}", folder.trim_end_matches('/'), self.release);
            self.root.glob(&format!("{folder}/gsp*.bin"))
        });
        found.filter_map(|path| self.file(&path, path.clone())).collect()
    }

    fn setting(&self, folder: &str, name: &str) -> Option<DriverFile> {
        let container = format!("{folder}/{name}");
        SETTINGS_FOLDERS
            .iter()
            .find_map(|found| self.file(&format!("{found}/{name}"), container.clone()))
    }

    fn xorg_modules(&self) -> Vec<DriverFile> {
        let usual = ["/usr/lib", "/usr/lib64", "/usr/X11R6/lib", "/usr/X11R6/lib64"];
        let places: Vec<&str> =
            self.folders.iter().map(|folder| folder.path.as_str()).chain(usual).collect();
        let modules =
            ["nvidia_drv.so".to_owned(), format!("libglxserver_nvidia.so.{}", self.release)];
        let find = |module: &String| {
            let folders = places.iter().flat_map(|place| {
                XORG_FOLDERS.iter().map(move |folder| format!("{place}/{folder}"))
            });
            folders
                .map(|folder| format!("{folder}/{module}"))
                .find_map(|path| self.file(&path, path.clone()))
        };
        modules.iter().filter_map(find).collect()
    }

    fn sockets(&self) -> Vec<DriverFile> {
        let socket = |path: String| {
            let host = self.root.real_socket(&path)?;
            Some(DriverFile { host: format!("{}{host}", self.below), container: path })
        };
        let of_daemon =
            |name: &&str| RUN_FOLDERS.iter().find_map(|folder| socket(format!("{folder}/{name}")));
        SOCKETS.iter().filter_map(of_daemon).chain(socket(MPS_SOCKETS.into())).collect()
    }
}

/// These folders, each once.
fn read_once(root: &HostRoot, paths: impl Iterator<Item = String>) -> Vec<Folder> {
    let mut folders: Vec<Folder> = Vec::new();
    for path in paths {
        if !folders.iter().any(|known| known.path == path) {
            folders.push(Folder::read(root, path));
        }
    }
    folders
}

/// The folders of the driver's libraries that the loader knows.
fn cached_folders(root: &HostRoot) -> BTreeSet<String> {
    const BYTES_MAX: u64 = 16 << 20;
    let cache = root.first_bytes("etc/ld.so.cache", BYTES_MAX).unwrap_or_default();
    let is_of_driver = |path: &String| {
        let name = path.rsplit_once('/').map_or("", |(_, name)| name);
        RELEASE_OF.iter().any(|library| name.starts_with(library))
    };
    let real = ld_cache::paths(&cache)
        .into_iter()
        .filter(is_of_driver)
        .filter_map(|path| root.installed(&path));
    real.filter_map(|file| Some(file.path.rsplit_once('/')?.0.to_owned())).collect()
}

/// The release in the names of the driver's main libraries: the loaded one if it is among them.
fn release(folders: &[Folder], loaded: Option<&str>) -> Option<String> {
    let mut releases = RELEASE_OF.iter().flat_map(|library| {
        let names = folders.iter().flat_map(|folder| &folder.names);
        names.filter_map(move |name| name.strip_prefix(library)).filter(|text| is_release(text))
    });
    let first = releases.clone().next()?;
    Some(releases.find(|release| Some(*release) == loaded).unwrap_or(first).to_owned())
}

/// Whether a text is a number such as `580.95.05` or `1.1.2`.
fn is_release(text: &str) -> bool {
    text.contains('.')
        && text
            .split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

fn hook(root: &HostRoot, known: &mut KnownHook) -> Option<CdiHookProgram> {
    let paths = HOOK_PROGRAMS
        .iter()
        .flat_map(|name| HOOK_FOLDERS.iter().map(move |folder| format!("{folder}/{name}")));
    let found = paths.into_iter().find_map(|path| {
        let program = root.installed(&path).filter(|file| file.is_program)?;
        // The operator installs a script that runs the program.
        let program = root.installed(&format!("{path}.real")).unwrap_or(program);
        Some((path, program))
    });
    let Some((path, program)) = found else {
        known.0 = None;
        return None;
    };
    if let Some((_, hook)) =
        known.0.as_ref().filter(|(stamp, hook)| *stamp == program.stamp && hook.path == path)
    {
        return Some(hook.clone());
    }
    let failed = root.failure_count();
    let hook = CdiHookProgram { path, hooks: root.texts_in(&program.path, &LATER_HOOKS) };
    known.0 = (root.failure_count() == failed).then(|| (program.stamp, hook.clone()));
    Some(hook)
}
