//! The facts of a healthy node.

use super::{
    Answer, Cdi, Clock, ContainerdFile, Daemon, Dra, DraApi, Facts, HostFacts, Kubelet, Ledger,
    Listing, NvidiaFacts, PathState, Process, Requirements, Resource, State, WriteAccess,
};
use crate::config::Roots;
use crate::domain::{Moment, Timestamp};
use crate::host::{InotifyLimits, Medium};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

pub(super) const NOW: u64 = 1_800_000_000_000;

/// A GPU node, seen from a container of the DaemonSet. The node has run for a day, the daemon for
/// an hour.
pub(super) fn healthy() -> Facts {
    let roots = Roots {
        host: "/host".into(),
        kubelet: "/var/lib/kubelet".into(),
        state: "/var/lib/holdfast".into(),
        run: "/run/holdfast".into(),
    };
    let now = Moment { boot: Duration::from_secs(24 * 3600), wall: Timestamp(NOW) };
    let wants = Requirements {
        files: vec!["/etc/holdfast/config.toml".into()],
        hash: "0badcafe".into(),
        changed_at: Some(Timestamp(NOW - 2 * 3600 * 1000)),
        has_resources: true,
        writes_cdi: true,
        cdi: vec!["nvidia.com/gpu".into()],
        mps: vec!["nvidia.com/gpu".into()],
        dra: true,
        authorize: true,
    };
    let containerd = ContainerdFile {
        path: "/etc/containerd/config.toml".into(),
        version: Some(2),
        enable_cdi: Some(true),
        cdi_spec_dirs: None,
    };
    Facts {
        is_root: true,
        uid_map: Some("         0          0 4294967295".into()),
        config: Some(Ok(wants)),
        kubelet: Some(kubelet()),
        listing: Some(Listing {
            socket: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
            is: PathState::Listening,
            allocatable: Some(Ok(BTreeMap::from([("nvidia.com/gpu".to_owned(), 8)]))),
            is_old: false,
        }),
        daemon: Some(Daemon {
            answer: Answer::Status(status()),
            pid: Some(1),
            is_enabled: false,
            lock_holder: Some(1),
        }),
        processes: Some(vec![Process { pid: 1, kubelet: "/var/lib/kubelet".into() }]),
        resources: Some(vec![Resource {
            name: "nvidia.com/gpu".into(),
            class: "gpu".into(),
            devices: 8,
            is_nvidia: true,
            ..Resource::default()
        }]),
        state: Some(State {
            dir: "/var/lib/holdfast".into(),
            medium: Some(Medium::Disk),
            free_bytes: 1 << 34,
            free_inodes: 1 << 20,
            root_reserve_bytes: 1 << 30,
            writes: WriteAccess::Allowed,
            moved_aside: Vec::new(),
        }),
        ledger: Some(Ledger {
            clock: Clock {
                newest: Some(Timestamp(NOW - 1000)),
                oldest_of_boot: Some(Timestamp(NOW - 3600 * 1000)),
            },
            ..Ledger::default()
        }),
        cdi: Some(Cdi {
            directory: "/var/run/cdi".into(),
            exists: true,
            containerd: vec![containerd],
            crio_dirs: None,
        }),
        reviews: Some(Ok(())),
        dra: Some(Dra { unusable: Vec::new(), api: Some(Ok(api_server())) }),
        mps_programs: Some(true),
        nvidia: Some(installed_driver()),
        host: Some(host()),
        ..Facts::unknown(roots, now)
    }
}

fn host() -> HostFacts {
    HostFacts {
        inotify: Some(InotifyLimits { instances: 3, refused: None }),
        kernel_log: None,
        iommu_groups: Some(40),
        is_unsafe: false,
        is_enforcing: true,
    }
}

fn api_server() -> DraApi {
    DraApi {
        node: "gpu-7".into(),
        has_node: Some(true),
        node_of_credentials: Some("gpu-7".into()),
        versions: Some(vec!["v1".into(), "v1beta2".into()]),
        refused: Vec::new(),
    }
}

fn installed_driver() -> NvidiaFacts {
    NvidiaFacts {
        nodes_root: Some(String::new()),
        libraries: Some((String::new(), "580.95.05".into())),
        has_hook: true,
        needs_files: true,
        ..NvidiaFacts::default()
    }
}

/// The answer of the daemon.
fn status() -> serde_json::Value {
    json!({
        "schema": 1, "version": env!("CARGO_PKG_VERSION"), "uptime_seconds": 3600, "ready": true,
        "ledger": { "journal": true, "database": true, "not_durable": 0 }, "recovery": null, "hooks": [], "ailing": [],
        "signals_off": {},
        "resources": [{ "name": "nvidia.com/gpu", "registered": true, "devices": 8, "healthy": 8, "allocatable": 8, "held": 2, "problem": null,
            "disagreement": null, "api_version": "v1beta1" }],
    })
}

fn kubelet() -> Kubelet {
    Kubelet {
        dir: PathState::Directory,
        plugins: PathState::Directory,
        socket: PathState::Listening,
        elsewhere: Vec::new(),
        root_dir: None,
        is_file_mount: false,
        socket_is_mounted: false,
        is_mounted: Some(true),
        checkpoint: None,
        others: vec!["example.com_dongle.sock".into()],
        label: Some("system_u:object_r:container_file_t:s0".into()),
    }
}
