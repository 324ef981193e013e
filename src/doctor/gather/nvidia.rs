//! NVIDIA's driver: its roots, and the files of it that containers with CDI names need.

use super::super::{Facts, NvidiaFacts};
use super::{AddFacts, ReaderInput};
use crate::config::Config;
use crate::config::import::cdi_names;
use crate::contract::cdi::FILE_PREFIX;
use crate::contract::nvidia_cdi;
use crate::hardware::{self, KnownHook};
use crate::host::{HostRoot, SpecFolder, read_bounded};
use std::collections::BTreeSet;

/// The other directory of CDI files.
const ETC: &str = "etc/cdi";
/// The limit of such a file.
const BYTES_MAX: u64 = 4 << 20;

pub(super) fn driver(input: &ReaderInput) -> AddFacts {
    let Some(config) = &input.config else { return Box::new(|_| ()) };
    let host = HostRoot::new(&input.target.roots.host);
    let root = host.with_nvidia(&config.nvidia_roots);
    // Without the driver's files nothing is known of it.
    let Ok(driver) = hardware::nvidia_driver(&root, &mut KnownHook::default()) else {
        return Box::new(|_| ());
    };
    let missing = config.nvidia_roots.configured().filter(|(_, path)| !root.is_dir(path));
    let facts = NvidiaFacts {
        missing_roots: missing.map(|(key, path)| (key, path.to_owned())).collect(),
        is_configured: config.nvidia_roots.driver.is_some(),
        is_dev_configured: config.nvidia_roots.dev.is_some(),
        nodes_root: nodes_root(&root),
        no_libraries: driver.is_none().then(|| hardware::no_nvidia_driver(&root)),
        libraries: driver.as_ref().map(|driver| (driver.root.clone(), driver.version.clone())),
        has_hook: driver.is_some_and(|driver| driver.hook.is_some()),
        needs_files: needs_files(config, &root),
    };
    Box::new(move |all: &mut Facts| all.nvidia = Some(facts))
}

/// The root whose `dev` has the driver's nodes; empty for the host's own.
fn nodes_root(root: &HostRoot) -> Option<String> {
    let has = |of: &&str| {
        ["nvidiactl", "nvidia0"].iter().any(|node| root.node_exists(&format!("{of}/dev/{node}")))
    };
    root.nvidia().of_nodes().into_iter().find(has).map(str::to_owned)
}

/// Whether Holdfast defines CDI names of GPUs: no other program's file has any of that kind.
fn needs_files(config: &Config, root: &HostRoot) -> bool {
    let kinds: BTreeSet<String> =
        config.resources.iter().filter_map(|spec| nvidia_cdi::kind(spec)).collect();
    if kinds.is_empty() {
        return false;
    }
    let folders = [config.cdi_directory.clone(), root.path(ETC)];
    let files =
        folders.iter().flat_map(|folder| SpecFolder::new(folder, FILE_PREFIX).others()).flatten();
    let texts = files.filter_map(|file| read_bounded(&file.path, BYTES_MAX).ok());
    let names: BTreeSet<String> =
        texts.flat_map(|text| cdi_names(&String::from_utf8_lossy(&text))).collect();
    let is_defined = |kind: &String| {
        let begin = format!("{kind}=");
        names.iter().any(|name| name.starts_with(&begin))
    };
    !kinds.iter().all(is_defined)
}

#[cfg(test)]
mod tests {
    use super::super::Target;
    use super::*;
    use crate::config::{self, Node, Roots};
    use std::fs;
    use std::path::Path;

    fn write(root: &Path, file: &str, text: &str) {
        fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
        fs::write(root.join(file), text).unwrap();
    }

    /// The facts of a host in a folder, with this `[nvidia]`.
    fn facts(dir: &Path, nvidia: &str) -> NvidiaFacts {
        let cdi = dir.join("cdi").display().to_string();
        let text = format!(
            "[cdi]\ndirectory = \"{cdi}\"\n[nvidia]\n{nvidia}\n[[resource]]\nname = \"nvidia.com/gpu\"\n\
             class = \"gpu\"\ncontract = \"nvidia\"\nnvidia = {{ device_list_strategy = [\"cdi-cri\"] }}\n"
        );
        write(dir, "config.toml", &text);
        let [host, kubelet, state, run] =
            ["host", "kubelet", "state", "run"].map(|of| dir.join(of));
        let roots = Roots { host, kubelet, state, run };
        let config = config::load(Some(&dir.join("config.toml")), &Node::default()).unwrap();
        let target = Target { roots: roots.clone(), config: None, own: dir.to_owned() };
        let input = ReaderInput { target, config: Some(config), may_read_all: true };
        let mut all = Facts::unknown(roots, crate::host::now());
        driver(&input)(&mut all);
        all.nvidia.unwrap()
    }

    #[test]
    fn the_root_in_use_and_what_is_missing_of_the_driver_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        let bare = facts(dir.path(), "");
        assert!(bare.needs_files && bare.no_libraries.is_some());
        assert_eq!((bare.nodes_root.as_deref(), bare.libraries.as_ref()), (None, None));

        write(&host, "run/nvidia/driver/dev/nvidiactl", "");
        write(&host, "run/nvidia/driver/usr/lib64/libcuda.so.580.95.05", "");
        let usual = facts(dir.path(), "");
        let root = "/run/nvidia/driver".to_owned();
        assert_eq!(usual.nodes_root.as_ref(), Some(&root));
        assert_eq!(usual.libraries, Some((root, "580.95.05".to_owned())));
        assert!(!usual.has_hook && !usual.is_configured && usual.missing_roots.is_empty());

        let set =
            facts(dir.path(), "driver_root = \"/nothing\"\ndev_root = \"/run/nvidia/driver\"");
        assert_eq!(set.missing_roots, [("driver_root", "/nothing".to_owned())]);
        let why = set.no_libraries.unwrap();
        assert!(why.contains("`nvidia.driver_root` /nothing does not exist"), "{why}");
        assert!(set.is_configured && set.is_dev_configured && set.nodes_root.is_some());

        write(&host, "home/kubernetes/bin/nvidia/lib64/libcuda.so.535.1.2", "");
        let gke = facts(dir.path(), "driver_root = \"/home/kubernetes/bin/nvidia/\"");
        let root = "/home/kubernetes/bin/nvidia".to_owned();
        assert_eq!(gke.libraries, Some((root, "535.1.2".to_owned())));

        let spec = "kind: nvidia.com/gpu\ndevices: [{name: all}]\n";
        write(&host, "etc/cdi/nvidia.yaml", spec);
        assert!(!facts(dir.path(), "").needs_files, "another program defines the names");
    }
}
