//! What a node has of NVIDIA's driver beyond its GPUs, for an answer: features and IMEX channels.

use super::gpu_specs::GpuSpecs;
use super::nvidia_features::by_node;
use crate::contract::{NvidiaExtras, nvidia_cdi};
use crate::domain::{
    Contract, Inventory, NvidiaFeature, NvidiaFeatures, NvidiaOptions, ResourceSpec, Switch,
};
use crate::hardware;
use crate::host::HostRoot;

/// The extras of an answer. A feature that the configuration leaves to the node is among them if
/// its CDI name, if the answer has one, is defined: a feature never makes a container fail.
pub(super) fn extras(
    spec: &ResourceSpec,
    inventory: &Inventory,
    root: &HostRoot,
    gpus: &GpuSpecs,
) -> NvidiaExtras {
    let Contract::Nvidia(options) = &spec.contract else { return NvidiaExtras::default() };
    let has_names = options.has_cdi_names() || spec.api.serves_claims();
    let mut features = if needs_features(options, has_names) {
        by_node(root, inventory)
    } else {
        NvidiaFeatures::new()
    };
    let channel = |channel: &u32| hardware::imex_channel(root, *channel);
    let channels: Vec<_> = options.imex_channels.iter().map(channel).collect();
    features.retain(|feature| {
        nvidia_cdi::feature_kind(spec, *feature)
            .is_none_or(|(kind, _)| gpus.defines(&kind, nvidia_cdi::ALL, inventory))
    });
    if let Some((kind, numbers)) = nvidia_cdi::channels(spec) {
        // An undefined one is left to the runtime, which names it to the user.
        let present =
            numbers.iter().zip(&channels).filter(|(_, node)| root.node_exists(&node.host));
        present.for_each(|(number, _)| {
            gpus.defines(&kind, &number.to_string(), inventory);
        });
    }
    NvidiaExtras { features, channels }
}

/// Whether the answer depends on the features of the node, or on their CDI names.
fn needs_features(options: &NvidiaOptions, has_names: bool) -> bool {
    let switches = NvidiaFeature::ALL.map(|feature| options.switch(feature));
    switches.contains(&Switch::Auto) || has_names && switches.contains(&Switch::On)
}

#[cfg(test)]
mod tests {
    use super::super::SpecFiles;
    use super::*;
    use crate::domain::{
        Device, DeviceClass, DeviceId, DeviceListStrategy, DeviceNode, Health, Offered, Offering,
    };
    use crate::host::faults::with_faults;
    use std::collections::BTreeSet;
    use std::fs;
    use std::sync::Arc;

    const ALL: [NvidiaFeature; 3] = NvidiaFeature::ALL;

    struct Setup {
        dir: tempfile::TempDir,
        options: NvidiaOptions,
        /// Whether this daemon offers an RDMA device too.
        has_rdma: bool,
    }

    impl Setup {
        /// A node that has every feature, and a resource with CDI names.
        fn new() -> Self {
            let options = NvidiaOptions {
                device_list_strategy: vec![DeviceListStrategy::CdiCri],
                ..NvidiaOptions::default()
            };
            let setup = Setup { dir: tempfile::tempdir().unwrap(), options, has_rdma: false };
            for file in [
                "sys/module/gdrdrv/refcnt",
                "sys/module/nvidia_fs/refcnt",
                "dev/gdrdrv",
                "dev/nvidia-fs0",
                "dev/nvidia-fs1",
                "dev/infiniband/uverbs0",
                "dev/infiniband/rdma_cm",
                "run/udev/control",
                "etc/cufile.json",
            ] {
                setup.write(&format!("host/{file}"), "");
            }
            setup
        }

        fn write(&self, file: &str, text: &str) {
            let path = self.dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn root(&self) -> HostRoot {
            HostRoot::new(self.dir.path().join("host"))
        }

        fn files(&self) -> SpecFiles {
            let path = |name: &str| self.dir.path().join(name);
            SpecFiles::new(&path("cdi"), &path("info"), &self.root())
        }

        fn spec(&self) -> ResourceSpec {
            let name = "nvidia.com/gpu".parse().unwrap();
            let contract = Contract::Nvidia(self.options.clone());
            ResourceSpec { contract, ..ResourceSpec::new(name, DeviceClass::Gpu) }
        }

        fn inventory(&self) -> Inventory {
            let offering = |spec: ResourceSpec, nodes: &[&str]| {
                let id = DeviceId::new(nodes[0]);
                let device = Device {
                    id: id.clone(),
                    key: nodes[0].to_owned(),
                    class: spec.class,
                    pci: None,
                    numa_nodes: Vec::new(),
                    nodes: nodes.iter().map(|node| DeviceNode::at(*node)).collect(),
                    attributes: [("uuid", "GPU-1")].into_iter().collect(),
                };
                let offered = Offered { device: Arc::new(device), health: Health::Healthy };
                let devices = [(id, offered)].into();
                (spec.name.clone(), Arc::new(Offering { devices, spec: Arc::new(spec) }))
            };
            let rdma = ResourceSpec::new("a.b/rdma".parse().unwrap(), DeviceClass::Rdma);
            let rdma = self.has_rdma.then(|| offering(rdma, &["/dev/infiniband/uverbs0"]));
            let gpus = offering(self.spec(), &["/dev/nvidia0"]);
            Inventory { resources: [gpus].into_iter().chain(rdma).collect() }
        }

        fn extras(&self, files: &SpecFiles) -> NvidiaExtras {
            extras(&self.spec(), &self.inventory(), &self.root(), &files.gpus)
        }

        fn features(&self) -> Vec<NvidiaFeature> {
            self.extras(&self.files()).features.into_iter().collect()
        }

        /// The file of a kind.
        fn file(&self, class: &str) -> Option<serde_json::Value> {
            let path = self.dir.path().join(format!("cdi/holdfast-nvidia.com+{class}.json"));
            Some(serde_json::from_str(&fs::read_to_string(path).ok()?).unwrap())
        }

        fn remove(&self, file: &str) {
            fs::remove_file(self.dir.path().join("host").join(file)).unwrap();
        }
    }

    #[test]
    fn a_feature_of_the_node_is_in_the_answer_with_a_file_for_its_name() {
        let setup = Setup::new();
        assert_eq!(setup.features(), ALL);
        let paths = |class: &str, key: &str, path: &str| -> Vec<String> {
            let edits = setup.file(class).unwrap()["devices"][0]["containerEdits"].clone();
            let entries = edits[key].as_array().cloned().unwrap_or_default();
            entries.iter().map(|entry| entry[path].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(paths("gdrcopy", "deviceNodes", "path"), ["/dev/gdrdrv"]);
        assert_eq!(paths("gds", "deviceNodes", "path"), ["/dev/nvidia-fs0", "/dev/nvidia-fs1"]);
        assert_eq!(paths("gds", "mounts", "hostPath"), ["/run/udev", "/etc/cufile.json"]);
        let rdma = ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"];
        assert_eq!(paths("mofed", "deviceNodes", "path"), rdma);
        assert_eq!(setup.file("mofed").unwrap()["devices"][0]["name"], "all");
    }

    #[test]
    fn a_node_that_leaves_ends_the_feature_and_a_held_name_stays_defined() {
        let setup = Setup::new();
        let (files, inventory) = (setup.files(), setup.inventory());
        assert!(files.gpus.update(&inventory, &BTreeSet::new()));
        setup.remove("dev/gdrdrv");
        assert_eq!(setup.extras(&files).features.into_iter().collect::<Vec<_>>(), ALL[1..]);
        let held = BTreeSet::from(["nvidia.com/gdrcopy=all".to_owned()]);
        files.gpus.update(&inventory, &held);
        assert!(setup.file("gdrcopy").is_some(), "its container may start again");
        files.gpus.update(&inventory, &BTreeSet::new());
        assert_eq!((setup.file("gdrcopy"), setup.file("gds").is_some()), (None, true));
    }

    #[test]
    fn a_name_that_cannot_be_defined_is_left_out_and_one_of_another_program_is_used() {
        let setup = Setup::new();
        setup.write("cdi", "");
        assert_eq!(setup.features(), []);
        fs::remove_file(setup.dir.path().join("cdi")).unwrap();
        setup.write("cdi/nvidia.yaml", "kind: nvidia.com/gdrcopy\ndevices: [{name: all}]\n");
        assert_eq!(setup.features(), ALL);
        assert_eq!((setup.file("gdrcopy"), setup.file("gds").is_some()), (None, true));
    }

    #[test]
    fn rdma_devices_that_this_daemon_offers_are_not_given_with_a_gpu() {
        let mut setup = Setup::new();
        setup.has_rdma = true;
        assert_eq!(setup.features(), ALL[..2]);
        assert_eq!(setup.file("mofed"), None);
        setup.options.mofed = Switch::On;
        setup.files().gpus.update(&setup.inventory(), &BTreeSet::new());
        assert!(setup.file("mofed").is_some(), "an operator wants it");
    }

    #[test]
    fn what_cannot_be_read_keeps_its_definition() {
        let setup = Setup::new();
        let (files, inventory) = (setup.files(), setup.inventory());
        files.gpus.update(&inventory, &BTreeSet::new());
        let before = setup.file("gdrcopy");
        assert!(before.is_some());
        let update = || files.gpus.update(&inventory, &BTreeSet::new());
        with_faults(|_| Some(24), update);
        assert_eq!(setup.file("gdrcopy"), before);
    }

    #[test]
    fn a_channel_has_a_file_while_its_node_exists() {
        let mut setup = Setup::new();
        setup.options.imex_channels = vec![0, 3];
        setup.write("host/dev/nvidia-caps-imex-channels/channel3", "");
        let channels = setup.extras(&setup.files()).channels;
        assert_eq!(channels[1].host, "/dev/nvidia-caps-imex-channels/channel3");
        let file = setup.file("imex-channel").unwrap();
        let names = file["devices"].as_array().unwrap().iter().map(|device| &device["name"]);
        assert_eq!(names.collect::<Vec<_>>(), ["3"], "the runtime refuses the other one by name");
        setup.options.device_list_strategy = vec![DeviceListStrategy::EnvVar];
        assert_eq!(setup.extras(&setup.files()).channels.len(), 2);
    }
}
