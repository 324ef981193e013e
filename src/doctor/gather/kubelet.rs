//! The kubelet: its directory, the mounts in it, its sockets, and its resources.

use super::super::{Facts, Kubelet, Listing, PathState};
use super::mounts::{mount_of, mounts};
use super::{AddFacts, QUERY_DEADLINE, ReaderInput, ask};
use crate::host::{self, HostRoot};
use crate::kubelet::checkpoint;
use crate::kubelet::pod_resources::{PodResources, PodResourcesError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Kubelet directories of distributions: default, k0s, MicroK8s, old k3s, Cloud Foundry.
const USUAL_DIRS: [&str; 5] = [
    "/var/lib/kubelet",
    "/var/lib/k0s/kubelet",
    "/var/snap/microk8s/common/var/lib/kubelet",
    "/var/lib/rancher/k3s/agent/kubelet",
    "/var/vcap/data/kubelet",
];
/// Maximum number of sockets to try; a directory usually has a dozen.
const OTHERS_MAX: usize = 64;

pub(super) fn directory(input: &ReaderInput) -> AddFacts {
    let (roots, host) = (&input.target.roots, HostRoot::new(&input.target.roots.host));
    let plugins = roots.kubelet.join("device-plugins");
    let socket = plugins.join("kubelet.sock");
    let mounts = mounts(input);
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_mount = |path: PathBuf| mounts.iter().any(|mount| mount.at == path);
    let canonical_plugins = canonical(&plugins);
    let root_is_layers =
        mounts.iter().any(|mount| mount.at == Path::new("/") && mount.kind == "overlay");
    let mounted =
        || mount_of(&mounts, &canonical_plugins).is_some_and(|mount| mount.at != Path::new("/"));
    let elsewhere =
        USUAL_DIRS.iter().map(|dir| host.path(dir)).filter(|dir| !is_same(dir, &roots.kubelet));
    let kubelet = Kubelet {
        dir: kind_at(&roots.kubelet),
        plugins: kind_at(&plugins),
        socket: socket_state(&socket),
        elsewhere: elsewhere
            .filter(|dir| is_socket(&dir.join("device-plugins/kubelet.sock")))
            .collect(),
        root_dir: root_dir(&host),
        is_file_mount: [&roots.kubelet, &plugins]
            .into_iter()
            .any(|dir| !dir.is_dir() && is_mount(canonical(dir))),
        socket_is_mounted: is_mount(canonical_plugins.join("kubelet.sock")),
        is_mounted: root_is_layers.then(mounted),
        checkpoint: checkpoint::read(&plugins)
            .err()
            .filter(|error| !error.is_missing())
            .map(|error| error.to_string()),
        others: listening_plugins(&plugins).unwrap_or_default(),
        label: host::selinux_label(&plugins),
    };
    Box::new(|facts: &mut Facts| facts.kubelet = Some(kubelet))
}

fn is_same(one: &Path, other: &Path) -> bool {
    one == other
        || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|about| about.file_type().is_socket())
}

/// The kind of object at a path: a directory, nothing, or another object.
fn kind_at(path: &Path) -> PathState {
    match path.metadata() {
        Ok(about) if about.is_dir() => match path.read_dir() {
            Ok(_) => PathState::Directory,
            Err(error) => PathState::Denied(error.to_string()),
        },
        Ok(_) => PathState::Other,
        Err(error) if error.kind() == ErrorKind::NotFound => PathState::Missing,
        Err(error) if error.kind() == ErrorKind::NotADirectory => PathState::Other,
        Err(error) => PathState::Denied(error.to_string()),
    }
}

/// Whether a socket has a listener. Connects, but sends nothing.
fn socket_state(path: &Path) -> PathState {
    match path.metadata() {
        Ok(about) if about.file_type().is_socket() => {}
        Ok(about) if about.is_dir() => return PathState::Directory,
        Ok(_) => return PathState::Other,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return PathState::Missing;
        }
        Err(error) => return PathState::Denied(error.to_string()),
    }
    match ask(async { timeout(QUERY_DEADLINE, UnixStream::connect(path)).await }) {
        Some(Ok(Ok(_connected))) => PathState::Listening,
        Some(Ok(Err(error))) if error.kind() == ErrorKind::ConnectionRefused => {
            PathState::NoListener
        }
        Some(Ok(Err(error))) if error.kind() == ErrorKind::NotFound => PathState::Missing,
        // The backlog is full: the listener accepts no connections.
        Some(Ok(Err(error))) if error.kind() == ErrorKind::WouldBlock => PathState::Unresponsive,
        Some(Err(_elapsed)) => PathState::Unresponsive,
        Some(Ok(Err(error))) => PathState::Denied(error.to_string()),
        None => PathState::Denied("no async runtime could be created to connect to it".into()),
    }
}

/// The sockets in `device-plugins` that have a listener, by name, without the kubelet's own.
/// Holdfast's own sockets are in a subdirectory.
///
/// # Errors
/// When the directory cannot be read.
pub fn listening_plugins(plugins: &Path) -> io::Result<Vec<String>> {
    let entries = plugins.read_dir()?.collect::<io::Result<Vec<_>>>()?;
    let names = entries
        .into_iter()
        .filter(|entry| is_socket(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name != "kubelet.sock");
    let mut names: Vec<String> = names.take(OTHERS_MAX).collect();
    names.sort_unstable();
    names.retain(|name| socket_state(&plugins.join(name)) == PathState::Listening);
    Ok(names)
}

/// The `--root-dir` of a kubelet of this host.
fn root_dir(host: &HostRoot) -> Option<PathBuf> {
    let is_kubelet =
        |pid: &String| host.read(&format!("proc/{pid}/comm")).as_deref() == Some("kubelet");
    let pid = host
        .entries("proc")
        .into_iter()
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        .find(is_kubelet)?;
    let arguments = super::daemon::arguments(host, &pid);
    super::daemon::option(&arguments, "root-dir")
}

pub(super) fn listing(input: &ReaderInput) -> AddFacts {
    let socket = input.target.pod_resources(input.config.as_ref());
    let is = socket_state(&socket);
    // GetAllocatableResources only. Never call `List`: it makes the kubelet forget an Allocate that
    // is in flight.
    let allocatable = (is == PathState::Listening).then(|| {
        ask(async {
            let client = PodResources::new(&socket);
            timeout(QUERY_DEADLINE, client.allocatable()).await
        })
    });
    let mut is_old = false;
    let allocatable = allocatable.flatten().map(|answer| match answer {
        Ok(Ok(found)) => {
            Ok(found.into_iter().map(|(name, ids)| (name.to_string(), ids.len())).collect())
        }
        Ok(Err(PodResourcesError::Refused { status, .. })) => {
            is_old = status.code() == tonic::Code::Unimplemented;
            Err(format!("the kubelet refused GetAllocatableResources: {}", status.message()))
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_elapsed) => {
            Err("the kubelet did not answer GetAllocatableResources in time".to_owned())
        }
    });
    let listing = Listing { socket, is, allocatable, is_old };
    Box::new(|facts: &mut Facts| facts.listing = Some(listing))
}
