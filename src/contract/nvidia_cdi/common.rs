//! What every container with an NVIDIA GPU needs of the driver: libraries, programs, firmware,
//! sockets, and the hooks that make the libraries known to the loader.

use super::super::nvidia;
use super::Gpu;
use super::format::{Edits, Hook, Mount, Node};
use crate::domain::{CdiHookProgram, DriverFile, NvidiaDriver};
use std::collections::{BTreeMap, BTreeSet};

const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
const SOCKET: [&str; 5] = ["nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// What every container needs.
pub(super) fn common_edits(driver: &NvidiaDriver, gpus: &[Gpu]) -> Edits {
    let mut shared: Vec<Node> = Vec::new();
    for path in nvidia::SHARED_NODES {
        let node = gpus.iter().flat_map(|gpu| &gpu.shared).find(|node| node.path == path);
        shared.extend(node.cloned());
    }
    let library = |path: &str| mount(driver.host_path(path), path, &READ_ONLY);
    let file = |file: &DriverFile, options| mount(file.host.clone(), &file.container, options);
    let mut mounts: Vec<Mount> =
        driver.libraries.iter().map(|found| library(&found.path)).collect();
    mounts.extend(driver.files.iter().map(|found| file(found, &READ_ONLY)));
    mounts.extend(driver.sockets.iter().map(|found| file(found, &SOCKET)));
    let links = links(driver);
    let mut hooks = Vec::new();
    match &driver.hook {
        Some(program) => hooks = common_hooks(driver, program, &links),
        None => {
            mounts
                .extend(links.iter().map(|link| mount(link.host.clone(), &link.path, &READ_ONLY)));
        }
    }
    let folders = main_folders(driver);
    let libcuda =
        (!folders.is_empty()).then(|| format!("NVIDIA_CTK_LIBCUDA_DIR={}", folders.join(":")));
    // NVIDIA's runtime has nothing to add.
    let env = libcuda.into_iter().chain(["NVIDIA_VISIBLE_DEVICES=void".to_owned()]).collect();
    Edits { env, device_nodes: shared, hooks, mounts }
}

/// A folder or file of the host that a container reads.
pub(super) fn read_only(file: &DriverFile) -> Mount {
    mount(file.host.clone(), &file.container, &READ_ONLY)
}

fn mount(host_path: String, container: &str, options: &[&str]) -> Mount {
    let options = options.iter().map(|option| (*option).to_owned()).collect();
    Mount { host_path, container_path: container.to_owned(), options }
}

/// A link in the container.
struct Link {
    path: String,
    target: String,
    /// The real path of the file on the host.
    host: String,
}

/// The links to libraries: those of the host, and those that programs expect without a link on the
/// host.
fn links(driver: &NvidiaDriver) -> Vec<Link> {
    let mut links: BTreeMap<String, Link> = BTreeMap::new();
    let mut add = |path: String, target: String, host: String| {
        links.entry(path.clone()).or_insert(Link { path, target, host });
    };
    let libraries = driver
        .libraries
        .iter()
        .map(|library| (library.path.as_str(), driver.host_path(&library.path)));
    for library in &driver.libraries {
        for link in &library.links {
            add(link.path.clone(), link.target.clone(), driver.host_path(&library.path));
        }
    }
    let files = driver.files.iter().map(|file| (file.container.as_str(), file.host.clone()));
    for (path, host) in libraries.chain(files) {
        let Some((folder, name)) = path.rsplit_once('/') else { continue };
        let Some(stem) = name.strip_suffix(&format!(".so.{}", driver.version)) else { continue };
        let (link, target) = match stem {
            "libcuda" => ("libcuda.so", "libcuda.so.1"),
            "libnvidia-opticalflow" => ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
            "libGLX_nvidia" => ("libGLX_indirect.so.0", name),
            "libnvidia-vulkan-producer" => ("libnvidia-vulkan-producer.so", name),
            "libglxserver_nvidia" => ("libglxserver_nvidia.so", name),
            "libnvidia-allocator" => ("gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
            _ => continue,
        };
        add(format!("{folder}/{link}"), target.to_owned(), host);
    }
    links.into_values().collect()
}

/// The folders of the libraries whose names have the driver's release.
fn main_folders(driver: &NvidiaDriver) -> Vec<String> {
    let suffix = format!(".so.{}", driver.version);
    let paths = driver.libraries.iter().map(|library| library.path.as_str());
    let main = paths.filter(|path| path.ends_with(&suffix));
    let folders: BTreeSet<&str> = main.filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    folders.into_iter().filter(|folder| !folder.ends_with("/vdpau")).map(str::to_owned).collect()
}

fn common_hooks(driver: &NvidiaDriver, program: &CdiHookProgram, links: &[Link]) -> Vec<Hook> {
    let arguments: Vec<String> =
        links.iter().map(|link| format!("{}::{}", link.target, link.path)).collect();
    let has = |name: &str| program.hooks.contains(&name);
    let loaded = driver.libraries.iter().filter(|library| library.path.contains(".so"));
    let folders: BTreeSet<&str> =
        loaded.filter_map(|library| Some(library.path.rsplit_once('/')?.0)).collect();
    let folders = folders.iter().flat_map(|folder| ["--folder".to_owned(), (*folder).to_owned()]);
    let mut hooks: Vec<Hook> = create_symlinks(program, &arguments).into_iter().collect();
    if has("enable-cuda-compat") {
        let release = format!("--host-driver-version={}", driver.version);
        hooks.push(hook(program, "enable-cuda-compat", [release]));
    }
    hooks.push(hook(program, "update-ldcache", folders));
    for name in ["disable-device-node-modification", "update-application-profile"] {
        hooks.extend(has(name).then(|| hook(program, name, [])));
    }
    hooks
}

/// The hook that creates links; `None` without links, because the program requires one.
pub(super) fn create_symlinks(program: &CdiHookProgram, links: &[String]) -> Option<Hook> {
    let arguments = links.iter().flat_map(|link| ["--link".to_owned(), link.clone()]);
    (!links.is_empty()).then(|| hook(program, "create-symlinks", arguments))
}

fn hook(program: &CdiHookProgram, name: &str, arguments: impl IntoIterator<Item = String>) -> Hook {
    let own = program.path.rsplit_once('/').map_or(program.path.as_str(), |(_, own)| own);
    let verb = (own == "nvidia-ctk").then(|| "hook".to_owned());
    let begin = [own.to_owned()].into_iter().chain(verb).chain([name.to_owned()]);
    Hook {
        hook_name: "createContainer".into(),
        path: program.path.clone(),
        args: begin.chain(arguments).collect(),
        env: vec!["NVIDIA_CTK_DEBUG=false".into()],
    }
}
