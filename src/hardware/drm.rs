//! GPUs of AMD and Intel: nodes in `/dev/dri`, and AMD's shared compute node `/dev/kfd` (Linux
//! `drivers/gpu/drm/amd/amdgpu`, attribute `unique_id`; `drivers/gpu/drm/i915`, `xe`).

use super::facts::{Facts, optional, required};
use super::kfd::{self, Kfd};
use super::pci::{folder, is_numbered};
use crate::domain::PciFunction;
use crate::host::HostRoot;

/// PCI vendor id of AMD's GPUs.
pub(super) const VENDOR_AMD: u16 = 0x1002;
/// PCI vendor id of Intel.
pub(super) const VENDOR_INTEL: u16 = 0x8086;

pub(super) fn facts(root: &HostRoot, function: &PciFunction, kfd: &Kfd) -> Facts {
    let mut facts = Facts::default();
    if function.driver.is_none() {
        return facts;
    }
    let amd = function.vendor == Some(VENDOR_AMD);
    let node = |name: &String| format!("/dev/dri/{name}");
    let render: Vec<_> = function.drm.iter().filter(|name| is_numbered(name, "renderD")).collect();
    let cards = function.drm.iter().filter(|name| is_numbered(name, "card"));
    if amd && !render.is_empty() {
        facts.nodes.push(required("/dev/kfd"));
    }
    // A container computes through the render node; the card node is for displays and older tools.
    facts.nodes.extend(
        cards.map(
            |name| if render.is_empty() { required(node(name)) } else { optional(node(name)) },
        ),
    );
    facts.nodes.extend(render.iter().map(|name| required(node(name))));
    if amd {
        // Missing on APUs and consumer cards. `serial_number` is no substitute: two dies of one
        // MI250X share it.
        let unique = root.read(&format!("{}/unique_id", folder(function.address)));
        let unique = unique.filter(|id| {
            id.bytes().any(|byte| byte != b'0') && id.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        facts.note("unique_id", unique.clone());
        facts.identity = unique.filter(|_| !function.is_vf());
        // Linux `amdgpu_fru_eeprom.c`: empty without such a memory on the card.
        let model = root.read(&format!("{}/product_name", folder(function.address)));
        facts.note("model", model.filter(|model| !model.is_empty()));
        // Linux `amdgpu_xgmi.c`; 0 means no hive.
        let hive = root.read(&format!("{}/xgmi_hive_info/xgmi_hive_id", folder(function.address)));
        facts.note("hive", hive.filter(|id| id != "0").map(|id| format!("xgmi:{id}")));
        // The in-tree driver has the version of the kernel, and states none.
        for (name, file) in [("driver_version", "version"), ("driver_source", "srcversion")] {
            let at = format!("{}/driver/module/{file}", folder(function.address));
            facts.note(name, root.read(&at));
        }
        kfd::cut(root, function, kfd, &mut facts);
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    #[test]
    fn an_amd_gpu_has_kfd_and_its_render_node() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/bus/pci/devices/0000:0a:00.0/unique_id", "5a1f2c3d4e5f6071\n");
        let hive = |id: &str| {
            write(dir.path(), "sys/bus/pci/devices/0000:0a:00.0/xgmi_hive_info/xgmi_hive_id", id);
        };
        hive("13258203473827\n");
        let gpu = PciFunction {
            vendor: Some(VENDOR_AMD),
            driver: Some("amdgpu".into()),
            drm: vec!["card1".into(), "controlD64".into(), "renderD129".into()],
            ..function("0000:0a:00.0")
        };
        let read = || facts(&HostRoot::new(dir.path()), &gpu, &Kfd::default());
        let facts = read();
        let nodes: Vec<_> =
            facts.nodes.iter().map(|node| (node.host.as_str(), node.required)).collect();
        assert_eq!(
            nodes,
            [("/dev/kfd", true), ("/dev/dri/card1", false), ("/dev/dri/renderD129", true)]
        );
        assert_eq!(facts.identity.as_deref(), Some("5a1f2c3d4e5f6071"));
        assert_eq!(&facts.attributes["hive"], "xgmi:13258203473827");
        assert!(!facts.attributes.contains_key("model"));
        let at = |file: &str| format!("sys/bus/pci/devices/0000:0a:00.0/{file}");
        write(dir.path(), &at("product_name"), "AMD Instinct MI300X\n");
        write(dir.path(), &at("current_compute_partition"), "SPX\n");
        write(dir.path(), &at("current_memory_partition"), "NPS1\n");
        let whole = read().attributes;
        let of = ["model", "compute_partition", "memory_partition"].map(|name| &whole[name]);
        assert_eq!(of, ["AMD Instinct MI300X", "spx", "nps1"]);
        write(dir.path(), &at("product_name"), "\n");
        assert!(!read().attributes.contains_key("model"), "a card without the memory for it");
        hive("0\n");
        assert!(!read().attributes.contains_key("hive"), "a GPU without links of its own");
    }

    #[test]
    fn a_display_function_is_of_use_once_a_driver_has_it() {
        let root = HostRoot::new("/nonexistent");
        let nodes = |driver: Option<&str>, drm: &[&str]| -> Vec<String> {
            let vf = PciFunction {
                vendor: Some(VENDOR_INTEL),
                driver: driver.map(str::to_owned),
                physfn: "0000:03:00.0".parse().ok(),
                drm: drm.iter().map(|name| (*name).to_owned()).collect(),
                ..function("0000:03:00.1")
            };
            facts(&root, &vf, &Kfd::default()).nodes.into_iter().map(|node| node.host).collect()
        };
        assert_eq!(
            nodes(None, &[]),
            Vec::<String>::new(),
            "a virtual function before the host binds it"
        );
        for driver in ["xe", "i915"] {
            assert_eq!(
                nodes(Some(driver), &["card2", "renderD130"]),
                ["/dev/dri/card2", "/dev/dri/renderD130"]
            );
        }
    }

    #[test]
    fn a_unique_id_of_zeros_names_nothing() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/bus/pci/devices/0000:0a:00.0/unique_id", "0000000000000000\n");
        let gpu = PciFunction {
            vendor: Some(VENDOR_AMD),
            driver: Some("amdgpu".into()),
            ..function("0000:0a:00.0")
        };
        assert_eq!(facts(&HostRoot::new(dir.path()), &gpu, &Kfd::default()).identity, None);
    }
}
