//! A node's hardware as plain files: a host root that an unprivileged process can create, scan and
//! break.
//!
//! ```text
//!  NUMA 0  pci0000:15 ─ 15:01.0 ─ 16:00.0 ─┬ 17:00.0..17:03.0 ─ GPU 0..3  (18:00.0 .. 1b:00.0)
//!                                          └ 17:04.0 ────────── HCA 0     (1c:00.0, VFs 1c:00.1-4)
//!  NUMA 1  pci0000:97 ─ 97:01.0 ─ 98:00.0 ─┬ 99:00.0..99:03.0 ─ GPU 4..7  (9a:00.0 .. 9d:00.0)
//!                                          └ 99:04.0 ────────── HCA 1     (9e:00.0, VFs 9e:00.1-4)
//!          pci0000:b0 ─ b0:02.0 ─────────────────────────────── FPGA      (b1:00.0)
//! ```
//!
//! Links are relative and directories nest as in a real sysfs; plain files replace the device
//! nodes.

mod large;

pub use self::large::{FUNCTIONS_MAX, VFS_MAX};

use crate::domain::PciAddress;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// GPUs of the node.
pub const GPUS: usize = 8;
/// RDMA adapters of the node.
pub const ADAPTERS: usize = 2;
/// Virtual functions of each adapter.
pub const VFS_PER_ADAPTER: usize = 4;

const GPUS_PER_SWITCH: usize = GPUS / ADAPTERS;
/// Processors of each NUMA node; the second half of each pair of ranges are hyper-threads.
const CPU_LISTS: [&str; ADAPTERS] = ["0-55,112-167", "56-111,168-223"];

/// One simulated node. Its files stay when it is dropped: they belong to the owner of the folder.
#[derive(Debug)]
pub struct SimNode {
    root: PathBuf,
}

/// The facts of one PCI function in sysfs.
struct Function<'a> {
    path: String,
    numa: usize,
    class: &'a str,
    ids: (&'a str, &'a str),
    driver: Option<&'a str>,
}

impl SimNode {
    /// Writes the node's files below `dir`.
    pub fn create(dir: impl Into<PathBuf>) -> io::Result<SimNode> {
        let node = SimNode { root: dir.into() };
        for (numa, cpulist) in CPU_LISTS.iter().enumerate() {
            node.write(&format!("sys/devices/system/node/node{numa}/cpulist"), cpulist)?;
            node.write_switch(numa)?;
            node.write_adapter(numa)?;
        }
        for index in 0..GPUS {
            node.restore_gpu(index)?;
        }
        node.write_fpga()?;
        for path in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "infiniband/rdma_cm", "fuse"] {
            node.create_node(&format!("/dev/{path}"))?;
        }
        Ok(node)
    }

    /// The folder with its `sys`, `proc` and `dev`: the value of `--host-root`.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The address of the GPU with this index.
    #[must_use]
    pub fn gpu_address(&self, index: usize) -> PciAddress {
        let bus = [0x18, 0x9a][index / GPUS_PER_SWITCH % ADAPTERS] + index % GPUS_PER_SWITCH;
        address(bus, 0)
    }

    /// The UUID of the GPU with this index, which is also its id.
    #[must_use]
    pub fn gpu_uuid(&self, index: usize) -> String {
        format!("GPU-5ca1ab1e-0000-4000-8000-{index:012x}")
    }

    /// The address of an adapter's physical function.
    #[must_use]
    pub fn adapter_address(&self, index: usize) -> PciAddress {
        address([0x1c, 0x9e][index % ADAPTERS], 0)
    }

    /// The address of the FPGA card.
    #[must_use]
    pub fn fpga_address(&self) -> PciAddress {
        address(0xb1, 0)
    }

    /// Removes the GPU's node, as a driver that fails to initialise the GPU does.
    pub fn remove_gpu_node(&self, index: usize) -> io::Result<()> {
        self.remove_node(&format!("/dev/nvidia{index}"))
    }

    /// Restores the GPU's node.
    pub fn restore_gpu_node(&self, index: usize) -> io::Result<()> {
        self.create_node(&format!("/dev/nvidia{index}"))
    }

    /// Creates a node, such as `/dev/ttyUSB0`.
    pub fn create_node(&self, path: &str) -> io::Result<()> {
        self.write(path.trim_start_matches('/'), "")
    }

    /// Removes a node.
    pub fn remove_node(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.root.join(path.trim_start_matches('/')))
    }

    /// Surprise removal: the function's entry disappears first, then its folder and the links of
    /// its class devices.
    pub fn remove_function(&self, address: PciAddress) -> io::Result<()> {
        let link = self.root.join(format!("sys/bus/pci/devices/{address}"));
        let folder = fs::canonicalize(&link)?;
        fs::remove_file(&link)?;
        fs::remove_dir_all(folder)?;
        for class in fs::read_dir(self.root.join("sys/class"))? {
            for entry in fs::read_dir(class?.path())? {
                let entry = entry?.path();
                // A link that is now dangling pointed below the function.
                if !entry.exists() {
                    fs::remove_file(entry)?;
                }
            }
        }
        Ok(())
    }

    /// Puts a GPU into its slot with all files that its driver shows; the reverse of
    /// [`SimNode::remove_function`].
    pub fn restore_gpu(&self, index: usize) -> io::Result<()> {
        let (numa, slot) = (index / GPUS_PER_SWITCH % ADAPTERS, index % GPUS_PER_SWITCH);
        let address = self.gpu_address(index);
        let path = format!("{}/{address}", downstream(numa, slot));
        self.function(&Function {
            path,
            numa,
            class: "0x030200",
            ids: ("0x10de", "0x2330"),
            driver: Some("nvidia"),
        })?;
        self.gpu_information(index, address)
    }

    /// The `information` file that NVIDIA's driver shows for the GPU with this number, and its
    /// node.
    fn gpu_information(&self, index: usize, address: PciAddress) -> io::Result<()> {
        let uuid = self.gpu_uuid(index);
        let information = format!(
            "Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t {uuid}\nBus Location: \t {address}\nDevice Minor: \t {index}\n"
        );
        self.write(&format!("proc/driver/nvidia/gpus/{address}/information"), &information)?;
        self.restore_gpu_node(index)
    }

    /// Unbinds a function's driver, as a write to the driver's `unbind` does.
    pub fn unbind_driver(&self, address: PciAddress) -> io::Result<()> {
        let folder = format!("sys/bus/pci/devices/{address}");
        let uevent = self.root.join(&folder).join("uevent");
        let text = fs::read_to_string(&uevent)?;
        let rest: String = text
            .lines()
            .filter(|line| !line.starts_with("DRIVER="))
            .map(|line| format!("{line}\n"))
            .collect();
        fs::write(uevent, rest)?;
        fs::remove_file(self.root.join(folder).join("driver"))
    }

    fn write_switch(&self, numa: usize) -> io::Result<()> {
        let bridge = |path: String, ids| Function {
            path,
            numa,
            class: "0x060400",
            ids,
            driver: Some("pcieport"),
        };
        self.function(&bridge(root_port(numa), ("0x8086", "0x352a")))?;
        self.function(&bridge(upstream(numa), ("0x1000", "0xc030")))?;
        (0..=GPUS_PER_SWITCH).try_for_each(|slot| {
            self.function(&bridge(downstream(numa, slot), ("0x1000", "0xc030")))
        })
    }

    fn write_adapter(&self, index: usize) -> io::Result<()> {
        let pf = self.adapter_address(index);
        let slot = downstream(index, GPUS_PER_SWITCH);
        let at = |address: PciAddress| format!("{slot}/{address}");
        let function = |path, device| Function {
            path,
            numa: index,
            class: "0x020000",
            ids: ("0x15b3", device),
            driver: Some("mlx5_core"),
        };
        self.function(&function(at(pf), "0x1021"))?;
        self.write(&format!("sys/devices/{}/sriov_totalvfs", at(pf)), "16")?;
        self.write(&format!("sys/devices/{}/sriov_numvfs", at(pf)), &VFS_PER_ADAPTER.to_string())?;
        // As on real machines, the numbers of the nodes do not follow those of the RDMA devices.
        let first_node = index * (VFS_PER_ADAPTER + 1);
        self.rdma_device(
            &at(pf),
            &format!("mlx5_{index}"),
            first_node,
            &format!("a088:c203:0050:{:04x}", 0x1000 + index),
        )?;
        self.net_device(&at(pf), &format!("ens{}np0", index + 1))?;
        for number in 0..VFS_PER_ADAPTER {
            let vf =
                PciAddress { function: pf.function + u8::try_from(number + 1).unwrap_or(0), ..pf };
            self.function(&function(at(vf), "0x101e"))?;
            self.link(&format!("sys/devices/{}/virtfn{number}", at(pf)), &format!("../{vf}"))?;
            self.link(&format!("sys/devices/{}/physfn", at(vf)), &format!("../{pf}"))?;
            let device = ADAPTERS + index * VFS_PER_ADAPTER + number;
            self.rdma_device(
                &at(vf),
                &format!("mlx5_{device}"),
                first_node + 1 + number,
                "0000:0000:0000:0000",
            )?;
            self.net_device(&at(vf), &format!("ens{}v{number}", index + 1))?;
        }
        Ok(())
    }

    fn write_fpga(&self) -> io::Result<()> {
        let port = format!("pci0000:b0/{}", PciAddress { device: 2, ..address(0xb0, 0) });
        self.function(&Function {
            path: port.clone(),
            numa: 1,
            class: "0x060400",
            ids: ("0x8086", "0x352a"),
            driver: Some("pcieport"),
        })?;
        let path = format!("{port}/{}", self.fpga_address());
        self.function(&Function {
            path: path.clone(),
            numa: 1,
            class: "0x120000",
            ids: ("0x8086", "0xbcce"),
            driver: Some("dfl-pci"),
        })?;
        let region = format!("{path}/fpga_region/region0");
        self.write(
            &format!("sys/devices/{region}/dfl-port.0/afu_id"),
            "d8424dc4a4a3c413f89e433683f9040b",
        )?;
        self.write(&format!("sys/devices/{region}/dfl-fme.0/ports_num"), "1")?;
        self.class_link("fpga_region", "region0", &region)?;
        self.create_node("/dev/dfl-port.0")?;
        self.create_node("/dev/dfl-fme.0")
    }

    fn function(&self, function: &Function<'_>) -> io::Result<()> {
        let Function { path, numa, class, ids, driver } = function;
        let folder = format!("sys/devices/{path}");
        let name = path.rsplit('/').next().unwrap_or_default();
        let up = "../".repeat(path.split('/').count() + 1);
        let hex = |id: &str| id.trim_start_matches("0x").to_uppercase();
        // The format of the kernel (`pci_uevent` in `drivers/pci/pci-driver.c`).
        let (class_hex, vendor, device) = (hex(class), hex(ids.0), hex(ids.1));
        let (base, sub, interface) = (&class_hex[..2], &class_hex[2..4], &class_hex[4..]);
        let mut uevent = format!(
            "PCI_CLASS={}\nPCI_ID={vendor}:{device}\nPCI_SUBSYS_ID={vendor}:0001\nPCI_SLOT_NAME={name}\n\
             MODALIAS=pci:v0000{vendor}d0000{device}sv0000{vendor}sd00000001bc{base}sc{sub}i{interface}\n",
            class_hex.trim_start_matches('0'),
        );
        if let Some(driver) = driver {
            uevent.insert_str(0, &format!("DRIVER={driver}\n"));
            self.link(&format!("{folder}/driver"), &format!("{up}bus/pci/drivers/{driver}"))?;
        }
        let files = [
            ("class", *class),
            ("vendor", ids.0),
            ("device", ids.1),
            ("subsystem_vendor", ids.0),
            ("subsystem_device", "0x0001"),
            ("numa_node", &numa.to_string()),
            ("local_cpulist", CPU_LISTS[numa % ADAPTERS]),
            ("uevent", uevent.trim_end()),
        ];
        for (file, text) in files {
            self.write(&format!("{folder}/{file}"), text)?;
        }
        self.link(&format!("sys/bus/pci/devices/{name}"), &format!("../../../devices/{path}"))
    }

    fn rdma_device(&self, path: &str, name: &str, node: usize, guid: &str) -> io::Result<()> {
        let device = format!("{path}/infiniband/{name}");
        let files = [
            ("node_guid", guid),
            ("node_type", "1: CA"),
            ("fw_ver", "28.39.1002"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/phys_state", "5: LinkUp"),
            ("ports/1/link_layer", "Ethernet"),
        ];
        for (file, text) in files {
            self.write(&format!("sys/devices/{device}/{file}"), text)?;
        }
        self.class_link("infiniband", name, &device)?;
        let verbs = format!("uverbs{node}");
        self.write(&format!("sys/devices/{path}/infiniband_verbs/{verbs}/ibdev"), name)?;
        self.class_link("infiniband_verbs", &verbs, &format!("{path}/infiniband_verbs/{verbs}"))?;
        self.create_node(&format!("/dev/infiniband/{verbs}"))
    }

    fn net_device(&self, path: &str, name: &str) -> io::Result<()> {
        self.write(&format!("sys/devices/{path}/net/{name}/operstate"), "up")?;
        self.class_link("net", name, &format!("{path}/net/{name}"))
    }

    fn class_link(&self, class: &str, name: &str, path: &str) -> io::Result<()> {
        self.link(&format!("sys/class/{class}/{name}"), &format!("../../devices/{path}"))
    }

    fn write(&self, rel: &str, text: &str) -> io::Result<()> {
        let path = self.root.join(rel);
        self.make_parent(&path)?;
        fs::write(path, if text.is_empty() { String::new() } else { format!("{text}\n") })
    }

    fn link(&self, rel: &str, target: &str) -> io::Result<()> {
        let path = self.root.join(rel);
        self.make_parent(&path)?;
        symlink(target, path)
    }

    fn make_parent(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(&self.root))
    }
}

fn address(bus: usize, function: u8) -> PciAddress {
    PciAddress { domain: 0, bus: u8::try_from(bus).unwrap_or(u8::MAX), device: 0, function }
}

fn root_port(numa: usize) -> String {
    ["pci0000:15/0000:15:01.0", "pci0000:97/0000:97:01.0"][numa % ADAPTERS].to_owned()
}

fn upstream(numa: usize) -> String {
    format!("{}/{}", root_port(numa), address([0x16, 0x98][numa % ADAPTERS], 0))
}

fn downstream(numa: usize, slot: usize) -> String {
    let port = PciAddress {
        device: u8::try_from(slot).unwrap_or(u8::MAX),
        ..address([0x17, 0x99][numa % ADAPTERS], 0)
    };
    format!("{}/{port}", upstream(numa))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::MigStrategy;
    use crate::domain::{Device, DeviceClass, Health, Reason, ResourceSpec, Select};
    use crate::hardware::testing::spec;
    use crate::hardware::{
        DiscoverInput, Discovery, defaults, discover, discover_with, node_health, scan,
    };
    use crate::host::HostRoot;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    fn offered<'a>(found: &'a Discovery, resource: &str) -> &'a [Arc<Device>] {
        &found.selection.resources[&resource.parse().unwrap()]
    }

    #[test]
    fn discovery_finds_exactly_this_node() {
        let dir = tempfile::tempdir().unwrap();
        let node = SimNode::create(dir.path()).unwrap();
        let root = HostRoot::new(node.root());
        let mut specs: Vec<Arc<ResourceSpec>> =
            defaults::specs(&scan(&root), MigStrategy::None).into_iter().map(Arc::new).collect();
        assert_eq!(specs.len(), 1);
        specs.push(spec("example.com/rdma", DeviceClass::Rdma, Select::default()));
        specs.push(spec("example.com/fpga", DeviceClass::Fpga, Select::default()));
        let found = discover(&root, &specs, &BTreeMap::new());

        let gpus = offered(&found, "nvidia.com/gpu");
        assert_eq!(gpus.len(), GPUS);
        for (index, gpu) in gpus.iter().enumerate() {
            assert_eq!(gpu.id.as_str(), node.gpu_uuid(index));
            assert_eq!(gpu.pci.as_ref().unwrap().address, node.gpu_address(index));
            assert_eq!(gpu.numa_nodes, [u32::try_from(index / 4).unwrap()]);
            assert_eq!(gpu.pci.as_ref().unwrap().bridges.len(), 3);
            assert_eq!(gpu.nodes[0].host, format!("/dev/nvidia{index}"));
            assert_eq!(gpu.nodes.len(), 4);
            assert_eq!(node_health(&root, gpu), Some(Health::Healthy));
        }
        // The virtual functions are offered, therefore the two physical ones are not.
        let vfs = offered(&found, "example.com/rdma");
        assert_eq!(vfs.len(), ADAPTERS * VFS_PER_ADAPTER);
        assert!(vfs.iter().all(|vf| vf.pci.as_ref().unwrap().is_vf()
            && node_health(&root, vf) == Some(Health::Healthy)));
        assert_eq!(vfs[0].id.as_str(), "0000:1c:00.1");
        assert_eq!(vfs[0].nodes[0].host, "/dev/infiniband/uverbs1");
        assert_eq!(found.selection.warnings.len(), ADAPTERS);
        let fpgas = offered(&found, "example.com/fpga");
        assert_eq!((fpgas.len(), fpgas[0].nodes[0].host.as_str()), (1, "/dev/dfl-port.0"));

        let bridges =
            found.devices.iter().filter(|device| device.class == DeviceClass::Other).count();
        assert_eq!(bridges, 2 * (2 + GPUS_PER_SWITCH + 1) + 1);
        assert_eq!(found.devices.len(), bridges + GPUS + ADAPTERS * (1 + VFS_PER_ADAPTER) + 1);
        assert_eq!(found.named.len(), GPUS + ADAPTERS * VFS_PER_ADAPTER + 1);
        let pf = found
            .devices
            .iter()
            .find(|device| device.attribute("node_guid") == Some("a088:c203:0050:1000"))
            .unwrap();
        assert_eq!(pf.pci.as_ref().unwrap().net, ["ens1np0"]);
    }

    #[test]
    fn scans_find_broken_and_repaired_devices() {
        let dir = tempfile::tempdir().unwrap();
        let node = SimNode::create(dir.path()).unwrap();
        let root = HostRoot::new(node.root());
        let discover = || {
            let functions = scan(&root);
            let specs: Vec<_> =
                defaults::specs(&functions, MigStrategy::None).into_iter().map(Arc::new).collect();
            discover_with(&root, functions, &specs, &DiscoverInput::first(&BTreeMap::new()))
        };
        let health =
            |index: usize| node_health(&root, &offered(&discover(), "nvidia.com/gpu")[index]);

        node.remove_gpu_node(3).unwrap();
        assert_eq!(health(3), Some(Health::Unhealthy(Reason::NodeMissing)));
        assert_eq!(health(2), Some(Health::Healthy));
        node.restore_gpu_node(3).unwrap();
        assert_eq!(health(3), Some(Health::Healthy));

        let before = discover();
        node.remove_function(node.gpu_address(5)).unwrap();
        assert_eq!(offered(&discover(), "nvidia.com/gpu").len(), GPUS - 1);
        node.restore_gpu(5).unwrap();
        assert_eq!(discover(), before);

        node.unbind_driver(node.gpu_address(0)).unwrap();
        assert_eq!(offered(&discover(), "nvidia.com/gpu").len(), GPUS - 1);
        node.remove_function(node.adapter_address(0)).unwrap();
        assert!(!root.exists("sys/class/infiniband/mlx5_0"));
    }

    /// The functions of the first adapter that a scan finds, for a resource of whole adapters and
    /// for one of virtual functions.
    fn adapters(node: &SimNode) -> (Vec<String>, Vec<String>) {
        let root = HostRoot::new(node.root());
        let only = |vf| Select { vf: Some(vf), ..Select::default() };
        let specs = [
            spec("example.com/nic", DeviceClass::Nic, only(false)),
            spec("example.com/nic-vf", DeviceClass::Nic, only(true)),
            spec("example.com/hca", DeviceClass::Rdma, only(false)),
            spec("example.com/hca-vf", DeviceClass::Rdma, only(true)),
        ];
        let found = discover(&root, &specs, &BTreeMap::new());
        let of = |names: [&str; 2]| {
            let devices = names
                .iter()
                .flat_map(|name| offered(&found, name))
                .map(|device| device.pci.as_ref().unwrap().address);
            devices
                .filter(|address| address.bus == 0x1c)
                .map(|address| address.to_string())
                .collect()
        };
        (
            of(["example.com/nic", "example.com/hca"]),
            of(["example.com/nic-vf", "example.com/hca-vf"]),
        )
    }

    /// The kernel's order. On creation, `add` of a virtual function comes before the links between
    /// it and its physical function. `change` comes when the links exist, and `bind` when the
    /// driver has created its class devices. On removal the links disappear first.
    #[test]
    fn a_changing_virtual_function_is_never_treated_as_a_whole_adapter() {
        let dir = tempfile::tempdir().unwrap();
        let node = SimNode::create(dir.path()).unwrap();
        let (pf, vf) =
            (node.adapter_address(0), PciAddress { function: 1, ..node.adapter_address(0) });
        let folder = format!("sys/devices/{}", downstream(0, GPUS_PER_SWITCH));
        let remove_link =
            |path: &str| fs::remove_file(node.root.join(format!("{folder}/{path}"))).unwrap();
        for number in 0..VFS_PER_ADAPTER {
            remove_link(&format!("{pf}/virtfn{number}"));
            node.remove_function(PciAddress { function: u8::try_from(number + 1).unwrap(), ..pf })
                .unwrap();
        }
        let (whole, none) = ([pf.to_string()], Vec::<String>::new());
        assert_eq!(adapters(&node), (whole.to_vec(), none.clone()));

        let path = format!("{}/{vf}", downstream(0, GPUS_PER_SWITCH));
        let function = |driver| Function {
            path: path.clone(),
            numa: 0,
            class: "0x020000",
            ids: ("0x15b3", "0x101e"),
            driver,
        };
        node.function(&function(None)).unwrap();
        assert_eq!(adapters(&node), (whole.to_vec(), none.clone()), "add");
        node.link(&format!("{folder}/{pf}/virtfn0"), &format!("../{vf}")).unwrap();
        assert_eq!(
            adapters(&node),
            (whole.to_vec(), none.clone()),
            "it is named by its physical function"
        );
        node.link(&format!("{folder}/{vf}/physfn"), &format!("../{pf}")).unwrap();
        assert_eq!(adapters(&node), (whole.to_vec(), none.clone()), "change");
        fs::remove_file(node.root.join(format!("sys/bus/pci/devices/{vf}"))).unwrap();
        node.function(&function(Some("mlx5_core"))).unwrap();
        assert_eq!(
            adapters(&node),
            (none.clone(), vec![vf.to_string()]),
            "a driver, and nothing below it yet: only an interface"
        );
        node.rdma_device(&path, "mlx5_2", 1, "0000:0000:0000:0000").unwrap();
        node.net_device(&path, "ens1v0").unwrap();
        assert_eq!(adapters(&node), (none.clone(), vec![vf.to_string()]), "bind");

        // A scan that read the physical function before its link disappeared.
        remove_link(&format!("{vf}/physfn"));
        assert_eq!(adapters(&node), (none.clone(), vec![vf.to_string()]));
        remove_link(&format!("{pf}/virtfn0"));
        node.unbind_driver(vf).unwrap();
        fs::remove_dir_all(node.root.join(format!("{folder}/{vf}/infiniband"))).unwrap();
        fs::remove_file(node.root.join("sys/class/infiniband/mlx5_2")).unwrap();
        assert_eq!(adapters(&node), (whole.to_vec(), none.clone()), "unbind");
        node.remove_function(vf).unwrap();
        assert_eq!(adapters(&node), (whole.to_vec(), none), "remove");
    }
}
