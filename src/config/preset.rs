//! Presets: a name in place of the keys of a resource. `presets.toml` has them as configuration.
//!
//! A preset is expanded before anything reads the resource. So it can express nothing that a file
//! cannot, and `config show` shows what it stands for.

use super::ConfigError;
use super::error::unknown;
use super::tree::{Entry, Is, Place, Table, Value};
use std::path::Path;

/// Each table is the keys of a resource.
const PRESETS: &str = include_str!("presets.toml");

/// A resource has one of these keys, so its own one replaces that of the preset.
const EXCLUSIVE: [&str; 2] = ["replicas", "pool"];

/// Adds the keys of the preset of a resource, if it has one. The resource's own keys come first: a
/// table is merged key by key, and any other value stays. All added values have the place of the
/// preset.
///
/// # Errors
/// An unknown preset, and a resource without a name whose preset has none either.
pub(super) fn expand(resource: &mut Value) -> Result<(), ConfigError> {
    let Is::Table(table) = &mut resource.is else { return Ok(()) };
    let Some(preset) = table.get("preset") else { return Ok(()) };
    let place = preset.place.clone();
    let wrong = |problem: String| Err(ConfigError::new(problem).at(place.as_ref()));
    let Some(name) = preset.as_text() else {
        return wrong("`preset` must be the name of a preset in quotes, such as \"gaudi\"".into());
    };
    let presets = Table::parse(PRESETS, Path::new("presets.toml"))?;
    let Some(keys) = presets.get(name).and_then(Value::as_table) else {
        let known: Vec<&str> = presets.0.iter().map(|entry| entry.key.as_str()).collect();
        return wrong(unknown("preset", name, &known));
    };
    if keys.get("name").is_none() && table.get("name").is_none() {
        return wrong(format!(
            "the preset `{name}` has no name for the resource, as no device plugin of the vendor \
             gave it one; add `name`"
        ));
    }
    let mut keys = keys.clone();
    if EXCLUSIVE.iter().any(|key| table.get(key).is_some()) {
        keys.0.retain(|entry| !EXCLUSIVE.contains(&entry.key.as_str()));
    }
    add(table, &keys, place.as_ref());
    Ok(())
}

/// Adds the keys that a table does not have.
fn add(table: &mut Table, keys: &Table, place: Option<&Place>) {
    for Entry { key, value, .. } in &keys.0 {
        let there = table.0.iter_mut().find(|entry| entry.key == *key);
        match (there.map(|entry| &mut entry.value.is), &value.is) {
            (Some(Is::Table(there)), Is::Table(keys)) => add(there, keys, place),
            (Some(_), _) => {}
            (None, _) => table.put(Entry {
                key: key.clone(),
                place: place.cloned(),
                value: at(value, place),
            }),
        }
    }
}

/// The value with another place.
fn at(value: &Value, place: Option<&Place>) -> Value {
    let is = match &value.is {
        Is::List(list) => Is::List(list.iter().map(|value| at(value, place)).collect()),
        Is::Table(keys) => {
            let mut table = Table::default();
            add(&mut table, keys, place);
            Is::Table(table)
        }
        other => other.clone(),
    };
    Value { place: place.cloned(), is }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Examined, Node};
    use super::*;
    use crate::contract::companions;
    use crate::domain::{Device, ResourceSpec, Sharing, template};
    use crate::hardware::{Discovery, discover};
    use crate::host::HostRoot;
    use crate::host::faults::with_faults;
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;

    fn examined(text: &str) -> Examined {
        Examined::alone(text.as_bytes(), Path::new("f"), &Node::default())
    }

    fn config(text: &str) -> Config {
        examined(text).config().unwrap_or_else(|error| panic!("{}\n{text}", error.in_full()))
    }

    fn names() -> Vec<String> {
        let presets = Table::parse(PRESETS, Path::new("presets.toml")).unwrap();
        presets.0.into_iter().map(|entry| entry.key).collect()
    }

    /// The resource of a preset, in one line if the preset has a name.
    fn spec(preset: &str) -> Arc<ResourceSpec> {
        let name =
            if preset == "tenstorrent" { "name = \"example.com/tenstorrent\"\n" } else { "" };
        Arc::clone(&config(&format!("[[resource]]\npreset = \"{preset}\"\n{name}")).resources[0])
    }

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A node with a device of every preset, and others that look like them.
    fn tree(root: &Path) {
        let nodes = "neuron0 neuron15 neuron-rtd accel0 accel/accel0 accel/accel_controlD0 accel/accel1 \
            accel/accel2 apex_0 apex hailo0 hailo tenstorrent/0 tenstorrent/12 tenstorrent/by-id/x davinci0 \
            davinci7 davinci_manager devmm_svm hisi_hdc dsa/wq0.0 dsa/wq1.3 dsa/wq1.4 dsa/wq1.5 iax/wq2.0 iax/wq2.1 dlb0 dlb sgx_enclave \
            sgx_provision sgx_vepc hfi1_0 hfi1_1 hfi1_diagpkt0 cxi0 cxi1 kvm net/tun net/tap0 vhost-net \
            vhost-vsock vsock fuse vfio/vfio vfio/7 vfio/8 bus/usb/001/003 bus/usb/001/004 bus/usb/001/005";
        nodes.split_whitespace().for_each(|node| write(root, &format!("dev/{node}"), ""));
        for (class, queue, kind, mode) in [
            ("dsa", "wq0.0", "user", "dedicated"),
            ("dsa", "wq1.3", "user", "dedicated"),
            ("dsa", "wq1.4", "user", "shared"),
            ("dsa", "wq1.5", "kernel", "dedicated"),
            ("iax", "wq2.0", "user", "dedicated"),
            ("iax", "wq2.1", "user", "shared"),
        ] {
            let place = format!("devices/pci0000:6a/0000:6a:01.0/{class}/{queue}");
            write(root, &format!("sys/{place}/type"), &format!("{kind}\n"));
            write(root, &format!("sys/{place}/mode"), &format!("{mode}\n"));
            let classes = root.join("sys/class").join(class);
            std::fs::create_dir_all(&classes).unwrap();
            symlink(format!("../../{place}/{class}!{queue}"), classes.join(queue)).unwrap();
        }
        for (address, class, id, driver, accel) in [
            ("0000:33:00.0", "120000", "1DA3:1020", "habanalabs", Some(0)),
            ("0000:34:00.0", "120000", "1DA3:1020", "vfio-pci", None),
            ("0000:00:0b.0", "120000", "8086:7D1D", "intel_vpu", Some(1)),
            ("0000:c5:00.1", "118000", "1022:17F0", "amdxdna", Some(2)),
            ("0000:c5:00.2", "118000", "1022:17F1", "pci-other", None),
            ("0000:6b:00.0", "0b4000", "8086:4940", "4xxx", None),
            ("0000:6b:00.1", "0b4000", "8086:4941", "vfio-pci", None),
            ("0000:6b:00.2", "0b4000", "8086:4941", "4xxxvf", None),
            ("0000:18:00.1", "020000", "8086:1889", "vfio-pci", None),
        ] {
            let place = format!("sys/bus/pci/devices/{address}");
            let text = format!("DRIVER={driver}\nPCI_CLASS={class}\nPCI_ID={id}\n");
            write(root, &format!("{place}/uevent"), &text);
            if let Some(number) = accel {
                write(root, &format!("{place}/accel/accel{number}/dev"), "261:0\n");
            }
            if driver == "vfio-pci" {
                let group = if address == "0000:6b:00.1" { 7 } else { 8 };
                let groups = root.join(format!("sys/kernel/iommu_groups/{group}/devices"));
                std::fs::create_dir_all(groups).unwrap();
                let target = format!("../../../../kernel/iommu_groups/{group}");
                symlink(target, root.join(&place).join("iommu_group")).unwrap();
            }
            if matches!(address, "0000:6b:00.1" | "0000:6b:00.2" | "0000:18:00.1") {
                symlink("../0000:6b:00.0", root.join(&place).join("physfn")).unwrap();
            }
        }
        for (port, number, vendor, product) in
            [("1-1", 3, "1a6e", "089a"), ("1-2", 4, "18d1", "9302"), ("1-3", 5, "18d1", "4ee7")]
        {
            let place = format!("sys/bus/usb/devices/{port}");
            for (file, text) in [("idVendor", vendor), ("idProduct", product), ("busnum", "1")] {
                write(root, &format!("{place}/{file}"), text);
            }
            write(root, &format!("{place}/devnum"), &number.to_string());
        }
    }

    /// The nodes and variables of each device of a resource.
    fn devices(found: &Discovery, spec: &ResourceSpec) -> Vec<String> {
        let of = |device: &Arc<Device>| {
            let own = device.nodes.iter().map(|node| node.host.clone());
            let with = companions(spec, device).map(|node| format!("+{}", node.host));
            let env =
                spec.env.iter().filter(|(_, text)| !text.ends_with("?}")).map(|(name, text)| {
                    format!("{name}={}", template::fill(text, device).unwrap())
                });
            let parts: Vec<String> = own.chain(with).chain(env).collect();
            parts.join(" ").replace("/dev/", "")
        };
        found.selection.resources[&spec.name].iter().map(of).collect()
    }

    /// What each preset offers of the node above.
    const EXPECTED: [(&str, &str, &[&str]); 24] = [
        (
            "gaudi",
            "habana.ai/gaudi",
            &[
                "accel/accel0 accel/accel_controlD0 HABANA_VISIBLE_DEVICES=0 HL_VISIBLE_DEVICES=accel/accel0",
            ],
        ),
        ("neuron", "aws.amazon.com/neuron", &["neuron0", "neuron15"]),
        ("tpu", "google.com/tpu", &["accel0"]),
        ("coral", "coral.ai/tpu", &["apex_0", "bus/usb/001/004", "bus/usb/001/003"]),
        ("hailo", "hailo.ai/npu", &["hailo0"]),
        ("tenstorrent", "example.com/tenstorrent", &["tenstorrent/0", "tenstorrent/12"]),
        (
            "ascend",
            "huawei.com/Ascend910",
            &[
                "davinci0 +davinci_manager +devmm_svm +hisi_hdc ASCEND_RUNTIME_OPTIONS= ASCEND_VISIBLE_DEVICES=0",
                "davinci7 +davinci_manager +devmm_svm +hisi_hdc ASCEND_RUNTIME_OPTIONS= ASCEND_VISIBLE_DEVICES=7",
            ],
        ),
        ("qat", "qat.intel.com/generic", &["vfio/vfio vfio/7 QAT{n}=0000:6b:00.1"]),
        ("dsa", "dsa.intel.com/wq-user-dedicated", &["dsa/wq0.0", "dsa/wq1.3"]),
        ("dsa-shared", "dsa.intel.com/wq-user-shared", &["dsa/wq1.4"]),
        ("iaa", "iaa.intel.com/wq-user-dedicated", &["iax/wq2.0"]),
        ("iaa-shared", "iaa.intel.com/wq-user-shared", &["iax/wq2.1"]),
        ("dlb", "dlb.intel.com/pf", &["dlb0"]),
        ("sgx-enclave", "sgx.intel.com/enclave", &["sgx_enclave"]),
        ("sgx-provision", "sgx.intel.com/provision", &["sgx_provision"]),
        ("intel-npu", "npu.intel.com/accel", &["accel/accel1"]),
        ("amd-npu", "amd.com/npu", &["accel/accel2"]),
        ("omni-path", "cornelis.com/hfi", &["hfi1_0 FI_PROVIDER=opx", "hfi1_1 FI_PROVIDER=opx"]),
        ("slingshot", "beta.hpe.com/cxi", &["cxi0", "cxi1"]),
        ("kvm", "devices.kubevirt.io/kvm", &["kvm"]),
        ("tun", "devices.kubevirt.io/tun", &["net/tun"]),
        ("vhost-net", "devices.kubevirt.io/vhost-net", &["vhost-net"]),
        ("vhost-vsock", "devices.kubevirt.io/vhost-vsock", &["vhost-vsock"]),
        ("fuse", "smarter-devices/fuse", &["fuse"]),
    ];

    #[test]
    fn each_preset_offers_exactly_its_devices() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        let root = HostRoot::new(dir.path());
        let expected = &EXPECTED;
        let all: Vec<Arc<ResourceSpec>> = names().iter().map(|name| spec(name)).collect();
        let together = discover(&root, &all, &BTreeMap::new());
        assert_eq!(names(), expected.iter().map(|(preset, ..)| *preset).collect::<Vec<_>>());
        for ((preset, name, offered), spec) in expected.iter().zip(&all) {
            assert_eq!(spec.name.as_str(), *name, "{preset}");
            let alone = discover(&root, std::slice::from_ref(spec), &BTreeMap::new());
            let warnings = &alone.selection.warnings;
            assert_eq!(devices(&alone, spec), *offered, "{preset}: {warnings:?}");
            assert_eq!(devices(&together, spec), *offered, "{preset}, with all others");
        }
    }

    /// A node without the devices of any preset.
    fn other_node(root: &Path) {
        for n in 0..200 {
            write(root, &format!("dev/tty{n}"), "");
            let place = format!("sys/bus/pci/devices/0000:00:{:02x}.{}", n / 8, n % 8);
            let text = "DRIVER=pcieport\nPCI_CLASS=60400\nPCI_ID=8086:1234\nMODALIAS=x\n";
            write(root, &format!("{place}/uevent"), text);
        }
        for file in ["idVendor", "idProduct", "busnum", "devnum"] {
            write(root, &format!("sys/bus/usb/devices/1-1/{file}"), "0001\n");
        }
    }

    /// Calls of the host (open, read, list, link) that these resources add to a scan of a node
    /// without their devices, which has another resource of nodes.
    fn calls_added_by(root: &HostRoot, specs: &[Arc<ResourceSpec>]) -> u64 {
        let config =
            config("[[resource]]\nname = \"a.b/tty\"\nclass = \"char\"\npaths = [\"/dev/tty1\"]\n");
        let calls = |specs: &[Arc<ResourceSpec>]| {
            let (found, calls) = with_faults(|_| None, || discover(root, specs, &BTreeMap::new()));
            let offered = found.selection.resources.values().flatten().count();
            assert_eq!(offered, 1, "only the other resource has a device");
            calls
        };
        let with: Vec<_> = config.resources.iter().chain(specs).cloned().collect();
        calls(&with) - calls(&config.resources)
    }

    #[test]
    fn a_preset_costs_a_node_without_its_devices_a_few_calls() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/FIGURES.md"))
                .unwrap();
        let dir = tempfile::tempdir().unwrap();
        other_node(dir.path());
        let root = HostRoot::new(dir.path());
        let mut measured = Vec::new();
        for name in names() {
            measured.push((calls_added_by(&root, &[spec(&name)]), format!("`{name}`")));
        }
        let all: Vec<_> = names().iter().map(|name| spec(name)).collect();
        measured.push((calls_added_by(&root, &all), "all of them".to_owned()));
        let mut by_calls: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        for (calls, name) in measured {
            by_calls.entry(calls).or_default().push(name);
        }
        let rows =
            by_calls.iter().map(|(calls, names)| format!("| {} | {calls} |", names.join(", ")));
        let missing: Vec<String> = rows.filter(|row| !page.contains(row)).collect();
        assert!(missing.is_empty(), "the page lacks:\n{}", missing.join("\n"));
    }

    #[test]
    fn the_keys_of_the_resource_override_the_preset() {
        let text = "[[resource]]\npreset = \"gaudi\"\nreplicas = 2\nselect = { numa_node = [1], driver = [\"x\"] }\n\
             env.HL_VISIBLE_DEVICES = \"\"\n[[resource]]\nname = \"example.com/fuse\"\npreset = \"fuse\"\nreplicas = 3\n\
             [[resource]]\npreset = \"fuse\"\npaths = [\"/dev/other\"]\npool = 4\n";
        let config = config(text);
        let gaudi = &config.resources[0];
        assert_eq!((gaudi.name.as_str(), gaudi.sharing), ("habana.ai/gaudi", Sharing::Replicas(2)));
        assert_eq!((&*gaudi.select.vendor, &*gaudi.select.numa_node), (&[0x1da3][..], &[1][..]));
        assert_eq!(gaudi.select.driver, ["x"]);
        let env: Vec<&str> = gaudi.env.values().map(String::as_str).collect();
        assert_eq!(env, ["{index}", "{module_id?}", ""]);
        let names: Vec<&str> = config.resources.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names[1..], ["example.com/fuse", "smarter-devices/fuse"]);
        assert_eq!(config.resources[1].sharing, Sharing::Replicas(3));
        assert_eq!(config.resources[2].paths.len(), 1, "a list is replaced");
        assert_eq!(config.resources[2].sharing, Sharing::Pool(4), "without `replicas`");
        let shown = examined(text).show(&Node::default()).unwrap().text;
        for line in [
            "preset = \"gaudi\"  # f:2",
            "class = \"accelerator\"  # f:2",
            "name = \"habana.ai/gaudi\"  # f:2",
            "replicas = 2  # f:3",
        ] {
            assert!(shown.lines().any(|found| found == line), "{line}\nis not in\n{shown}");
        }
        let again = self::config(&shown);
        assert_eq!(again.resources, config.resources, "{shown}");
    }

    #[test]
    fn a_section_may_use_a_preset_and_replaces_the_resource_of_its_name() {
        let text = "[[resource]]\npreset = \"kvm\"\n[[node]]\nmatch.name = \"a\"\n[[node.resource]]\npreset = \"kvm\"\nreplicas = 5\n";
        let node = Node::named("a", Path::new("/"));
        let config = Examined::alone(text.as_bytes(), Path::new("f"), &node).config().unwrap();
        assert_eq!(config.resources.len(), 1);
        assert_eq!(config.resources[0].sharing, Sharing::Replicas(5));
    }

    #[test]
    fn every_mistake_is_one_sentence_with_its_place() {
        for (keys, expected) in [
            (
                "preset = \"gaudy\"",
                "line 2, column 10: unknown preset `gaudy`; did you mean `gaudi`?",
            ),
            ("preset = \"zzz\"", "the known presets are `gaudi`, `neuron`"),
            ("preset = 1", "`preset` must be the name of a preset in quotes"),
            ("preset = \"tenstorrent\"", "the preset `tenstorrent` has no name for the resource"),
            ("preset = \"fuse\"\npool = 0", "line 3, column 1: "),
            ("preset = \"fuse\"\nclass = \"gpu\"", "`paths` belongs to the class `char`"),
            ("preset = \"fuse\"\n[[resource]]\npreset = \"fuse\"", "two resources are named"),
        ] {
            let examined = examined(&format!("[[resource]]\n{keys}\n"));
            let error = examined.config().unwrap_err().in_full();
            assert!(error.contains(expected), "{error}\nshould contain: {expected}");
        }
    }

    #[test]
    fn the_documentation_has_every_preset_with_its_resource_and_nodes() {
        let page = include_str!("../../docs/presets.md");
        let rows: Vec<Vec<&str>> = page
            .lines()
            .filter(|line| line.starts_with("| `"))
            .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
            .collect();
        let documented: Vec<&str> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
        assert_eq!(documented, names());
        for row in &rows {
            let preset = row[0].trim_matches('`');
            let spec = spec(preset);
            let name =
                if preset == "tenstorrent" { "`name` is required" } else { spec.name.as_str() };
            assert!(row[1].contains(name), "{row:?}");
            let usb = spec.usb.iter().map(|usb| usb.to_string().replace("USB ", ""));
            let paths = spec.device_paths().map(|path| path.host.to_string());
            let drivers = spec.select.driver.iter().cloned();
            for part in usb.chain(paths).chain(drivers) {
                assert!(row[2].contains(&format!("`{part}`")), "{part}: {row:?}");
            }
            let nodes = spec.nodes.iter().map(|node| node.path.host.to_string());
            let env = spec.env.iter().map(|(name, text)| format!("{name}={text}"));
            for part in nodes.chain(env) {
                assert!(row[3].contains(&format!("`{part}`")), "{part}: {row:?}");
            }
            let shares = match spec.sharing {
                Sharing::Exclusive => "1".to_owned(),
                Sharing::Replicas(shares) | Sharing::Pool(shares) => shares.to_string(),
            };
            assert!(row[4].starts_with(&shares), "{shares}: {row:?}");
        }
    }
}
