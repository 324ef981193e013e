//! The parts of NVIDIA's driver that not every node has, and their nodes, as NVIDIA's container
//! toolkit finds them (`internal/discover/gdrcopy.go`, `gds.go` and `mofed.go`,
//! `pkg/nvcdi/lib-imex.go`).

use super::facts::required;
use super::nvidia;
use crate::domain::{DeviceNode, DriverFile, NvidiaFeature, NvidiaFeatures};
use crate::host::HostRoot;

/// The features whose kernel module is loaded and whose nodes exist.
#[must_use]
pub fn nvidia_features(root: &HostRoot) -> NvidiaFeatures {
    let is_there = |feature: &NvidiaFeature| {
        root.is_dir(&format!("sys/module/{}", feature.module()))
            && !nvidia_feature_nodes(root, *feature).is_empty()
    };
    NvidiaFeature::ALL.into_iter().filter(is_there).collect()
}

/// The nodes of a feature that exist now.
#[must_use]
pub fn nvidia_feature_nodes(root: &HostRoot, feature: NvidiaFeature) -> Vec<DeviceNode> {
    let (patterns, is_of_kernel): (&[&str], bool) = match feature {
        NvidiaFeature::GdrCopy => (&["/dev/gdrdrv"], false),
        NvidiaFeature::Gds => (&["/dev/nvidia-fs*"], false),
        // udev makes these on the host, wherever NVIDIA's driver is.
        NvidiaFeature::Mofed => (&["/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"], true),
    };
    let mut roots = root.nvidia().of_nodes();
    roots.extend(is_of_kernel.then_some(""));
    let below = |of: &&str| {
        let paths = patterns.iter().flat_map(|pattern| root.glob(&format!("{of}{pattern}")));
        let nodes = paths.filter(|path| root.node_exists(path)).map(|path| {
            let container = path.strip_prefix(of).unwrap_or(&path).to_owned();
            DeviceNode { container, ..required(path) }
        });
        nodes.collect::<Vec<_>>()
    };
    // The common node without a device is of no use.
    let is_device = |node: &DeviceNode| !node.container.ends_with("/rdma_cm");
    roots.iter().map(below).find(|nodes| nodes.iter().any(is_device)).unwrap_or_default()
}

/// The folder and the file that a container with GPUDirect Storage gets, where they exist: udev's
/// records of disks, and the settings of cuFile.
#[must_use]
pub fn gds_files(root: &HostRoot) -> Vec<DriverFile> {
    let mut roots = root.nvidia().of_driver();
    roots.push("");
    let find = |path: &str, is_folder: bool| {
        let there = |of: &&str| {
            let inside = root.rooted_at(of);
            let real = if is_folder {
                inside.real_folder(path)
            } else {
                inside.installed(path).map(|file| file.path)
            };
            Some(DriverFile { host: format!("{of}{}", real?), container: path.to_owned() })
        };
        roots.iter().find_map(there)
    };
    [find("/run/udev", true), find("/etc/cufile.json", false)].into_iter().flatten().collect()
}

/// The node of an IMEX channel; its path in `/dev` where it does not exist.
#[must_use]
pub fn imex_channel(root: &HostRoot, channel: u32) -> DeviceNode {
    let mut node = required(format!("/dev/nvidia-caps-imex-channels/channel{channel}"));
    nvidia::place(root, &mut node);
    node
}

#[cfg(test)]
mod tests {
    use super::super::testing::write;
    use super::*;
    use crate::domain::NvidiaRoots;
    use std::fs;

    #[test]
    fn a_feature_needs_its_module_and_its_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let names =
            || nvidia_features(&root).into_iter().map(NvidiaFeature::as_str).collect::<Vec<_>>();
        write(dir.path(), "dev/gdrdrv", "");
        write(dir.path(), "dev/infiniband/rdma_cm", "");
        assert_eq!(names(), Vec::<&str>::new(), "a node that is left behind");
        write(dir.path(), "sys/module/gdrdrv/refcnt", "0");
        write(dir.path(), "sys/module/nvidia_fs/refcnt", "0");
        assert_eq!(names(), ["gdrcopy"], "the module without nodes");
        write(dir.path(), "dev/nvidia-fs0", "");
        assert_eq!(names(), ["gdrcopy", "gds"], "rdma_cm alone is no device");
        write(dir.path(), "dev/infiniband/uverbs0", "");
        assert_eq!(names(), ["gdrcopy", "gds", "mofed"]);
        fs::remove_dir_all(dir.path().join("sys/module/nvidia_fs")).unwrap();
        assert_eq!(names(), ["gdrcopy"], "RDMA devices are for GPUDirect Storage");
    }

    #[test]
    fn nodes_of_a_driver_in_a_container_are_found_below_its_root() {
        let dir = tempfile::tempdir().unwrap();
        let usual = HostRoot::new(dir.path());
        for file in ["run/nvidia/driver/dev/gdrdrv", "x/dev/gdrdrv", "dev/infiniband/uverbs3"] {
            write(dir.path(), file, "");
        }
        let gdr = |root: &HostRoot| nvidia_feature_nodes(root, NvidiaFeature::GdrCopy);
        let found = gdr(&usual);
        assert_eq!(found[0].host, "/run/nvidia/driver/dev/gdrdrv");
        assert_eq!(found[0].container, "/dev/gdrdrv");
        let roots = NvidiaRoots { dev: Some("/x".into()), ..NvidiaRoots::default() };
        let set = usual.clone().with_nvidia(&roots);
        assert_eq!(gdr(&set)[0].host, "/x/dev/gdrdrv");
        assert_eq!(
            nvidia_feature_nodes(&set, NvidiaFeature::Mofed)[0].host,
            "/dev/infiniband/uverbs3",
            "the kernel's nodes stay on the host"
        );
        assert_eq!(imex_channel(&set, 2).host, "/x/dev/nvidia-caps-imex-channels/channel2");
        assert_eq!(imex_channel(&usual, 2).host, "/dev/nvidia-caps-imex-channels/channel2");
    }

    #[test]
    fn udevs_records_and_the_settings_of_cufile_are_those_of_the_driver_or_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        assert_eq!(gds_files(&root), []);
        write(dir.path(), "run/udev/data/b8:0", "");
        write(dir.path(), "run/nvidia/driver/etc/cufile.json", "{}");
        let hosts: Vec<String> = gds_files(&root).into_iter().map(|file| file.host).collect();
        assert_eq!(hosts, ["/run/udev", "/run/nvidia/driver/etc/cufile.json"]);
    }
}
