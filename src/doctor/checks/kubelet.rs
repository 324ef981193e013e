//! The kubelet: its directory, its sockets, and the resources that it has from Holdfast.

use super::super::codes::{
    KUBELET_ABSENT, KUBELET_CHECKPOINT_UNREADABLE, KUBELET_DIR_MISSING, KUBELET_DIR_NOT_MOUNTED,
    KUBELET_DIR_OTHER, KUBELET_DIR_UNUSABLE, KUBELET_HANGS, KUBELET_LACKS_DEVICES,
    KUBELET_SOCKET_MOUNTED, KUBELET_TOO_OLD, OTHER_PLUGIN, OTHER_PLUGIN_SOCKET,
    POD_RESOURCES_UNREACHABLE,
};
use super::super::{Facts, Finding, Kubelet, PathState};
use super::{is_true, list, number, text};
use crate::kubelet::checkpoint::FILE_NAME;
use serde_json::Value;
use std::path::PathBuf;

fn device_plugins(facts: &Facts) -> PathBuf {
    facts.roots.kubelet.join("device-plugins")
}

fn socket(facts: &Facts) -> PathBuf {
    device_plugins(facts).join("kubelet.sock")
}

/// Another kubelet directory on this host, as a sentence and a command with `--kubelet-dir`.
fn elsewhere(kubelet: &Kubelet) -> Option<(String, String)> {
    let dir = kubelet.elsewhere.first()?.display().to_string();
    let todo = format!(
        "a kubelet of this host has its socket below `{dir}`; pass that directory \
         to the daemon with --kubelet-dir"
    );
    Some((todo, format!("holdfast --kubelet-dir {dir} doctor")))
}

pub(super) fn directory(facts: &Facts) -> Option<Vec<Finding>> {
    let kubelet = facts.kubelet.as_ref()?;
    let dir = facts.roots.kubelet.display();
    let other_dir = elsewhere(kubelet);
    if kubelet.dir == PathState::Missing {
        let (todo, command) = match other_dir {
            Some((todo, command)) => (todo, Some(command)),
            None => {
                let todo = "name the kubelet's directory with --kubelet-dir, or start the kubelet, which \
                            creates it";
                (todo.to_owned(), None)
            }
        };
        let found = Finding::new(&KUBELET_DIR_MISSING, dir, "the directory does not exist", todo);
        return Some(vec![Finding { command, ..found }]);
    }
    for (is, path) in
        [(&kubelet.dir, facts.roots.kubelet.clone()), (&kubelet.plugins, device_plugins(facts))]
    {
        let found = match is {
            PathState::Denied(why) if facts.may_read_all() => format!("it cannot be read: {why}"),
            PathState::Denied(_) => return None,
            PathState::Directory | PathState::Missing => continue,
            _ => "it is not a directory".to_owned(),
        };
        let (found, todo) = if kubelet.is_file_mount {
            let todo = "mount the kubelet's own directory there (in a pod, as a hostPath of the type Directory), or name the right one with \
                        --kubelet-dir";
            ("a file is mounted in place of a directory".to_owned(), todo)
        } else {
            (
                found,
                "the daemon needs the kubelet's own directory; move aside the present object, or \
                 name the right directory with --kubelet-dir",
            )
        };
        return Some(vec![Finding::new(&KUBELET_DIR_UNUSABLE, path.display(), found, todo)]);
    }
    if kubelet.socket == PathState::Directory {
        let todo = "remove it and restart the kubelet. A container that mounts the socket file creates this directory when no kubelet runs; \
                    mount the directory `device-plugins` instead";
        let found = "a directory is in the place of the kubelet's socket";
        return Some(vec![Finding::new(
            &KUBELET_DIR_UNUSABLE,
            socket(facts).display(),
            found,
            todo,
        )]);
    }
    let is_empty = kubelet.socket == PathState::Missing && kubelet.is_mounted != Some(false);
    Some(match other_dir.filter(|_| is_empty) {
        Some((todo, command)) => vec![
            Finding::new(&KUBELET_DIR_OTHER, dir, "no kubelet has a socket here", todo).by(command),
        ],
        None => Vec::new(),
    })
}

pub(super) fn mounts(facts: &Facts) -> Option<Vec<Finding>> {
    let kubelet = facts.kubelet.as_ref()?;
    let mut found = Vec::new();
    if kubelet.socket_is_mounted {
        let todo = "mount the directory `device-plugins` into the container, not the file `kubelet.sock` (a hostPath of the type Directory)";
        found.push(Finding::new(
            &KUBELET_SOCKET_MOUNTED,
            socket(facts).display(),
            "the socket itself is a mount",
            todo,
        ));
    } else if kubelet.is_mounted == Some(false) {
        let todo = "mount the kubelet's `device-plugins` into the container at the same path, as a hostPath";
        found.push(Finding::new(
            &KUBELET_DIR_NOT_MOUNTED,
            device_plugins(facts).display(),
            "this container does not mount it from the host",
            todo,
        ));
    }
    Some(found)
}

pub(super) fn listens(facts: &Facts) -> Option<Vec<Finding>> {
    let kubelet = facts.kubelet.as_ref()?;
    let is_known = kubelet.dir == PathState::Directory
        && kubelet.plugins != PathState::Other
        && kubelet.is_mounted != Some(false)
        && kubelet.elsewhere.is_empty();
    let on = socket(facts).display().to_string();
    let start = "start the kubelet; its log shows why it does not run";
    match &kubelet.socket {
        PathState::Listening => Some(Vec::new()),
        PathState::Missing | PathState::NoListener | PathState::Other
            if kubelet.socket_is_mounted =>
        {
            None
        }
        PathState::Missing if is_known => Some(vec![
            Finding::new(&KUBELET_ABSENT, on, "no kubelet has created its socket here", start)
                .by("systemctl status kubelet"),
        ]),
        PathState::NoListener => Some(vec![
            Finding::new(&KUBELET_ABSENT, on, "no process listens on this socket", start)
                .by("systemctl status kubelet"),
        ]),
        PathState::Other => {
            let found = "this is not a socket; a kubelet that starts replaces it with its own";
            Some(vec![
                Finding::new(&KUBELET_ABSENT, on, found, start).by("systemctl status kubelet"),
            ])
        }
        PathState::Unresponsive => {
            let todo = "read the kubelet's log, and restart the kubelet if it is stuck";
            Some(vec![
                Finding::new(&KUBELET_HANGS, on, "the kubelet accepts no connection", todo)
                    .by("journalctl -u kubelet -n 100"),
            ])
        }
        _ => None,
    }
}

/// Whether a kubelet listens.
fn has_kubelet(facts: &Facts) -> bool {
    facts.kubelet.as_ref().is_some_and(|kubelet| kubelet.socket == PathState::Listening)
}

pub(super) fn pod_resources(facts: &Facts) -> Option<Vec<Finding>> {
    let listing = facts.listing.as_ref().filter(|_| has_kubelet(facts))?;
    let found = match &listing.is {
        PathState::Missing => "the socket does not exist".to_owned(),
        PathState::NoListener => "no process listens on this socket".to_owned(),
        PathState::Unresponsive => "its owner accepts no connection".to_owned(),
        PathState::Listening => match &listing.allocatable {
            Some(Err(why)) if !listing.is_old => why.clone(),
            _ => return Some(Vec::new()),
        },
        PathState::Denied(_) if !facts.may_read_all() => return None,
        PathState::Denied(why) => why.clone(),
        PathState::Directory | PathState::Other => "it is not a socket".to_owned(),
    };
    // `device-plugins` has a fixed place; this socket follows the kubelet's root directory.
    let root_dir = facts
        .kubelet
        .as_ref()
        .and_then(|kubelet| kubelet.root_dir.as_ref())
        .filter(|dir| **dir != facts.roots.kubelet);
    let todo = match root_dir {
        Some(dir) => format!(
            "the kubelet runs with --root-dir {}; set `pod_resources_socket = \"{}\"` in [kubelet] \
             of the configuration",
            dir.display(),
            dir.join("pod-resources/kubelet.sock").display()
        ),
        None => "in a container, mount the kubelet's directory `pod-resources` too; if the socket is elsewhere, set \
                 `pod_resources_socket` in [kubelet] of the configuration"
            .to_owned(),
    };
    Some(vec![Finding::new(&POD_RESOURCES_UNREACHABLE, listing.socket.display(), found, todo)])
}

pub(super) fn version(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "upgrade the kubelet to 1.26 or newer (docs/supported.md)";
    let old = |found: String| {
        Some(vec![Finding::new(&KUBELET_TOO_OLD, socket(facts).display(), found, todo)])
    };
    let spoken = facts.status().map(|status| {
        list(status, "resources").iter().map(|resource| text(resource, "api_version"))
    });
    if let Some(version) =
        spoken.into_iter().flatten().find(|version| version.starts_with("v1alpha"))
    {
        return old(format!("the kubelet uses version {version} of the device-plugin API"));
    }
    match facts.listing.as_ref() {
        Some(listing) if listing.is_old => {
            old("its pod-resources API lacks GetAllocatableResources, so it is older than 1.23"
                .into())
        }
        Some(listing) if matches!(listing.allocatable, Some(Ok(_))) => Some(Vec::new()),
        _ => None,
    }
}

fn counts(facts: &Facts) -> Option<Vec<(String, u64, u64)>> {
    let status = facts.status()?;
    let Some(Ok(allocatable)) = &facts.listing.as_ref()?.allocatable else { return None };
    let registered =
        list(status, "resources").iter().filter(|resource| is_true(resource, "registered"));
    let of = |resource: &Value| {
        let name = text(resource, "name");
        (
            name.to_owned(),
            number(resource, "allocatable"),
            allocatable.get(name).map_or(0, |count| *count as u64),
        )
    };
    Some(registered.map(of).collect())
}

pub(super) fn list_is_ours(facts: &Facts) -> Option<Vec<Finding>> {
    let lacking = counts(facts)?.into_iter().filter(|(_, ours, theirs)| theirs < ours);
    let todo = "the daemon detects this and registers again within a minute. If it persists, the cause is another plugin or the kubelet's \
                limit for a list (4 MiB); read the logs of both";
    let find = |(name, ours, theirs)| {
        let found = format!(
            "the daemon offers {ours} healthy devices, but the kubelet counts \
             {theirs} as allocatable"
        );
        Finding::new(&KUBELET_LACKS_DEVICES, name, found, todo)
            .by("journalctl -u holdfast -u kubelet -n 200")
    };
    Some(lacking.map(find).collect())
}

pub(super) fn checkpoint(facts: &Facts) -> Option<Vec<Finding>> {
    let kubelet =
        facts.kubelet.as_ref().filter(|kubelet| kubelet.plugins == PathState::Directory)?;
    // The daemon also knows since when, and whether a missing checkpoint should exist.
    let unread = facts
        .status()
        .map(|status| &status["checkpoint_unread"])
        .filter(|unread| !unread.is_null());
    let found = match (unread, &kubelet.checkpoint) {
        (Some(unread), _) => {
            format!("since {}: {}", text(unread, "since"), text(unread, "why"))
        }
        (None, Some(_)) if !facts.may_read_all() => return None,
        (None, Some(why)) => why.clone(),
        (None, None) => return Some(Vec::new()),
    };
    // A kubelet that starts without the file treats the devices of running pods as free.
    let todo = "if it is damaged or not a file, move it aside. The kubelet writes the file again when the next pod gets a device; do not \
                restart the kubelet before that";
    let path = device_plugins(facts).join(FILE_NAME);
    Some(vec![
        Finding::new(&KUBELET_CHECKPOINT_UNREADABLE, path.display(), found, todo)
            .by("journalctl -u kubelet -n 100"),
    ])
}

/// Prefixes of the sockets of well-known plugins, with the domain of their resources.
const KNOWN_SOCKETS: &[(&str, &str)] = &[
    ("nvidia", "nvidia.com"),
    ("amd.com", "amd.com"),
    ("gpu.intel.com", "gpu.intel.com"),
    ("fpga.intel.com", "fpga.intel.com"),
    ("rdma", "rdma"),
    ("kubevirt", "devices.kubevirt.io"),
];

/// The resource to which a plugin's socket belongs by its name: exactly, or by the domain of a
/// well-known plugin. The API does not show which resource a socket serves.
#[must_use]
pub fn resource_of_socket<'a>(socket: &str, resources: &[&'a str]) -> Option<&'a str> {
    let stem = socket.trim_end_matches(".sock");
    let same_name = |of: &&&str| stem == of.replace('/', "_") || stem == of.replace('/', "-");
    let known = KNOWN_SOCKETS
        .iter()
        .find(|(beginning, _)| stem.starts_with(beginning))
        .map(|(_, domain)| *domain);
    let of_domain = |of: &&&str| known.is_some_and(|domain| of.split('/').next() == Some(domain));
    resources.iter().find(same_name).or_else(|| resources.iter().find(of_domain)).copied()
}

pub(super) fn other_plugins(facts: &Facts) -> Option<Vec<Finding>> {
    let kubelet = facts.kubelet.as_ref()?;
    let stop = "stop that plugin, or give one of the two another resource name; stopping the \
                plugin loses nothing";
    let mut found = Vec::new();
    for resource in facts.status().map(|status| list(status, "resources")).unwrap_or_default() {
        let message = [text(resource, "disagreement"), text(resource, "problem")];
        if let Some(message) =
            message.into_iter().find(|message| message.contains("another plugin"))
        {
            found.push(Finding::new(&OTHER_PLUGIN, text(resource, "name"), message, stop));
        }
    }
    if !found.is_empty() {
        return Some(found);
    }
    let ours: Vec<&str> = facts
        .resources
        .iter()
        .flatten()
        .filter(|resource| resource.devices > 0)
        .map(|of| of.name.as_str())
        .collect();
    for name in &kubelet.others {
        if let Some(resource) = resource_of_socket(name, &ours) {
            let found_there = format!(
                "a plugin listens here whose socket name belongs to \
                 {resource}, which Holdfast offers too"
            );
            found.push(Finding::new(
                &OTHER_PLUGIN_SOCKET,
                device_plugins(facts).join(name).display(),
                found_there,
                stop,
            ));
        }
    }
    Some(found)
}
