//! A node with any number of PCI functions up to `FUNCTIONS_MAX`: as large as a large server, and
//! larger.
//!
//! It is the small node plus two PCI domains of its own:
//!
//! ```text
//!  0001  blocks of 64 functions: 4 bridges, a GPU, an NVMe controller, and 58 without a driver
//!        (uncore, ports, counters), which are most of a real server's functions
//!  0002  RDMA adapters of 64 virtual functions each, one adapter for each bus
//! ```

use super::{ADAPTERS, Function, GPUS, SimNode, VFS_PER_ADAPTER, address};
use crate::domain::PciAddress;
use std::fs;
use std::io;
use std::path::Path;

/// Virtual functions of one adapter; the last adapter gets the rest.
const VFS_OF_ADAPTER: usize = 64;
/// Functions of a bus, with ARI.
const FUNCTIONS_OF_BUS: usize = 256;
/// The most functions of a node: fills the buses of one domain, and is more than any machine has.
pub const FUNCTIONS_MAX: usize = 10_000;
/// The most virtual functions among them.
pub const VFS_MAX: usize = 4096;

/// The PCI domains of the blocks and of the adapters.
const BLOCKS: u32 = 1;
const CARDS: u32 = 2;

/// Functions of a block: four bridges, a GPU, a disk, and functions without a driver.
const BLOCK: usize = 64;
const BRIDGES: usize = 4;

/// The files of a function without a driver. The first ones are named as in the kernel's
/// `Documentation/ABI/testing/sysfs-bus-pci`.
const IDLE: [(&str, &str); 15] = [
    ("vendor", "0x8086"),
    ("device", "0x09a2"),
    ("subsystem_vendor", "0x8086"),
    ("subsystem_device", "0x0000"),
    ("class", "0x088000"),
    ("numa_node", "0"),
    ("local_cpulist", "0-55,112-167"),
    (
        "uevent",
        "PCI_CLASS=88000\nPCI_ID=8086:09A2\nPCI_SUBSYS_ID=8086:0000\nMODALIAS=pci:v00008086d000009A2sv00008086sd00000000bc08sc80i00",
    ),
    ("config", "\u{6}\u{1}\u{2}\u{9}"),
    ("power_state", "unknown"),
    ("power/runtime_status", "unsupported"),
    ("aer_dev_fatal", "Undefined 0\nDLP 0\nSDES 0\nTLP 0\nFCP 0\nTOTAL_ERR_FATAL 0"),
    ("aer_dev_nonfatal", "Undefined 0\nDLP 0\nSDES 0\nTLP 0\nFCP 0\nTOTAL_ERR_NONFATAL 0"),
    ("enable", "0"),
    ("irq", "0"),
];

impl SimNode {
    /// Writes a node with `functions` PCI functions below `dir`. `vfs` of them are virtual ones, in
    /// addition to those of the small node, as far as `functions` allows. A node is never smaller
    /// than the small one.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn create_large(dir: &Path, functions: usize, vfs: usize) -> io::Result<SimNode> {
        let node = SimNode::create(dir)?;
        let small = fs::read_dir(dir.join("sys/bus/pci/devices"))?.count();
        let mut remaining = functions.min(FUNCTIONS_MAX).saturating_sub(small);
        let mut left = vfs.min(VFS_MAX);
        for adapter in 0.. {
            // Each adapter also needs a physical function and the port above it.
            let vfs = left.min(VFS_OF_ADAPTER).min(remaining.saturating_sub(2));
            if vfs == 0 {
                break;
            }
            node.write_card(adapter, vfs)?;
            (left, remaining) = (left - vfs, remaining - vfs - 2);
        }
        (0..remaining).try_for_each(|number| node.write_one_of_block(number))?;
        Ok(node)
    }

    fn write_card(&self, adapter: usize, vfs: usize) -> io::Result<()> {
        let numa = adapter % ADAPTERS;
        let (port, pf) = (
            at(CARDS, adapter * FUNCTIONS_OF_BUS + FUNCTIONS_OF_BUS - 1),
            at(CARDS, adapter * FUNCTIONS_OF_BUS),
        );
        let root = format!("pci0002:00/{port}");
        self.function(&Function {
            path: root.clone(),
            numa,
            class: "0x060400",
            ids: ("0x8086", "0x352a"),
            driver: Some("pcieport"),
        })?;
        let function = |path: &str, device| {
            let driver = Some("mlx5_core");
            self.function(&Function {
                path: path.to_owned(),
                numa,
                class: "0x020000",
                ids: ("0x15b3", device),
                driver,
            })
        };
        let path = format!("{root}/{pf}");
        function(&path, "0x1021")?;
        self.write(&format!("sys/devices/{path}/sriov_totalvfs"), "127")?;
        self.write(&format!("sys/devices/{path}/sriov_numvfs"), &vfs.to_string())?;
        // Numbered after those of the small node; each adapter has one RDMA device for itself and
        // one for each virtual function.
        let first = ADAPTERS * (1 + VFS_PER_ADAPTER) + adapter * (1 + VFS_OF_ADAPTER);
        self.rdma_device(
            &path,
            &format!("mlx5_{first}"),
            first,
            &format!("a088:c203:0051:{adapter:04x}"),
        )?;
        self.net_device(&path, &format!("ens2{adapter:02}np0"))?;
        for number in 0..vfs {
            let vf = at(CARDS, adapter * FUNCTIONS_OF_BUS + 1 + number);
            let path = format!("{root}/{vf}");
            function(&path, "0x101e")?;
            self.link(&format!("sys/devices/{root}/{pf}/virtfn{number}"), &format!("../{vf}"))?;
            self.link(&format!("sys/devices/{path}/physfn"), &format!("../{pf}"))?;
            let device = first + 1 + number;
            self.rdma_device(&path, &format!("mlx5_{device}"), device, "0000:0000:0000:0000")?;
            self.net_device(&path, &format!("ens2{adapter:02}v{number}"))?;
        }
        Ok(())
    }

    /// Writes the function with this number; all blocks are alike.
    fn write_one_of_block(&self, number: usize) -> io::Result<()> {
        let (block, place) = (number / BLOCK, number % BLOCK);
        let (own, numa) = (at(BLOCKS, number), block % ADAPTERS);
        let bridges: Vec<String> = (0..place.min(BRIDGES))
            .map(|bridge| at(BLOCKS, block * BLOCK + bridge).to_string())
            .collect();
        let under = |bridges: &[String]| {
            [&["pci0001:00".to_owned()], bridges, &[own.to_string()]].concat().join("/")
        };
        let driven = |class, ids, driver| {
            self.function(&Function {
                path: under(&bridges),
                numa,
                class,
                ids,
                driver: Some(driver),
            })
        };
        match place {
            0..BRIDGES => driven("0x060400", ("0x1000", "0xc030"), "pcieport"),
            BRIDGES => {
                driven("0x030200", ("0x10de", "0x2330"), "nvidia")?;
                self.gpu_information(GPUS + block, own)
            }
            5 => {
                driven("0x010802", ("0x144d", "0xa80a"), "nvme")?;
                self.write_disk(&under(&bridges), block)
            }
            _ => self.write_idle(&under(&bridges[..1]), own),
        }
    }

    fn write_disk(&self, path: &str, number: usize) -> io::Result<()> {
        let (controller, disk) = (format!("{path}/nvme/nvme{number}"), format!("nvme{number}n1"));
        let files = [
            ("state", "live"),
            ("transport", "pcie"),
            ("model", "SAMSUNG MZQL23T8HCLS-00A07"),
            ("firmware_rev", "GDC5602Q"),
        ];
        for (file, text) in files {
            self.write(&format!("sys/devices/{controller}/{file}"), text)?;
        }
        self.write(&format!("sys/devices/{controller}/serial"), &format!("S64HNE0T{number:06}"))?;
        self.write(&format!("sys/devices/{controller}/{disk}/nsid"), "1")?;
        self.write(
            &format!("sys/devices/{controller}/{disk}/wwid"),
            &format!("eui.36344830{number:016x}"),
        )?;
        self.class_link("nvme", &format!("nvme{number}"), &controller)?;
        self.create_node(&format!("/dev/{disk}"))
    }

    /// Nearly all functions are of this kind, with the same content. They share their files by hard
    /// links; otherwise a tree of ten thousand functions would fill a disk.
    fn write_idle(&self, path: &str, own: PciAddress) -> io::Result<()> {
        let (folder, shared) =
            (self.root.join(format!("sys/devices/{path}")), self.root.join("idle"));
        fs::create_dir_all(folder.join("power"))?;
        for (file, text) in IDLE {
            let shared = shared.join(file.replace('/', "-"));
            if !shared.exists() {
                fs::create_dir_all(self.root.join("idle"))?;
                fs::write(&shared, format!("{text}\n"))?;
            }
            fs::hard_link(shared, folder.join(file))?;
        }
        self.link(&format!("sys/bus/pci/devices/{own}"), &format!("../../../devices/{path}"))
    }
}

/// The address of the function with this number in a domain whose buses are full.
fn at(domain: u32, number: usize) -> PciAddress {
    let small = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
    let place = number % FUNCTIONS_OF_BUS;
    PciAddress {
        domain,
        device: small(place / 8),
        ..address(number / FUNCTIONS_OF_BUS, small(place % 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::MigStrategy;
    use crate::domain::{DeviceClass, Select};
    use crate::hardware::testing::spec;
    use crate::hardware::{defaults, discover, scan};
    use crate::host::HostRoot;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn a_large_node_has_as_many_functions_as_it_was_asked_for_of_every_kind() {
        let dir = tempfile::tempdir().unwrap();
        let node = SimNode::create_large(dir.path(), 300, 100).unwrap();
        let root = HostRoot::new(node.root());
        let found = scan(&root);
        assert_eq!(found.functions.len(), 300);
        let vfs = found.functions.values().filter(|function| function.is_vf()).count();
        assert_eq!(vfs, 100 + ADAPTERS * VFS_PER_ADAPTER);
        assert!(
            found.functions.values().all(|function| !function.is_vf()
                || function.vf_index.is_some() && function.net.len() == 1)
        );

        let mut specs: Vec<_> = defaults::specs(&found, MigStrategy::None)
            .into_iter()
            .map(std::sync::Arc::new)
            .collect();
        specs.push(spec(
            "example.com/vf",
            DeviceClass::Rdma,
            Select { vf: Some(true), ..Select::default() },
        ));
        specs.push(spec("example.com/disk", DeviceClass::Nvme, Select::default()));
        let found = discover(&root, &specs, &BTreeMap::new());
        let offered: Vec<usize> = ["example.com/disk", "example.com/vf", "nvidia.com/gpu"]
            .map(|name| found.selection.resources[&name.parse().unwrap()].len())
            .to_vec();
        assert_eq!(offered, [3, vfs, GPUS + 3]);
        // Ids, nodes and indexes are unique.
        let of = |name: &str| -> BTreeSet<&str> {
            found.devices.iter().filter_map(|device| device.attribute(name)).collect()
        };
        assert_eq!(
            (of("uuid").len(), of("index").len(), of("serial").len()),
            (GPUS + 3, GPUS + 3, 3)
        );
        assert!(
            found
                .devices
                .iter()
                .all(|device| device.nodes.iter().all(|node| root.node_exists(&node.host)))
        );
    }

    #[test]
    fn a_node_is_never_smaller_than_the_small_one() {
        let dir = tempfile::tempdir().unwrap();
        let large = SimNode::create_large(&dir.path().join("large"), 0, 0).unwrap();
        let small = SimNode::create(dir.path().join("small")).unwrap();
        assert_eq!(scan(&HostRoot::new(large.root())), scan(&HostRoot::new(small.root())));
    }
}
