//! A small machine: its plugged-in devices, their names, and the result of a scan.

use super::super::random::Random;
use crate::domain::{
    AllocId, Attributes, CharPath, Device, DeviceClass, DeviceId, DeviceNode, DeviceNumber,
    Evidence, Inventory, Listed, Moment, NodePattern, Object, PciFunction, PendingHooks,
    ResourceName, ResourceSpec, Select, Sharing, Timestamp, Unread,
};
use crate::hardware::{HeldNode, NamedNode, name_nodes, select};
use crate::health::core::{self, Judge, Rules};
use crate::ledger::core::Ledger;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Sticks that may be plugged in; the first two are twins that share one link by id.
pub(super) const STICKS: usize = 3;
/// Device numbers that a stick may get.
pub(super) const NUMBERS: usize = 3;
/// The nodes of the disk: its own, its two partitions, the generic node, and a second path.
pub(super) const DISK_NODES: [&str; 5] = ["sda", "sda1", "sda2", "sg0", "sdb"];

/// A stick that is plugged in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plugged {
    pub(super) number: usize,
    /// Whether udev has created its link by path.
    pub(super) by_path: bool,
}

/// The devices that really exist, and the objects that are really held.
pub(super) struct Machine {
    pub(super) random: Random,
    pub(super) now: u64,
    pub(super) sticks: [Option<Plugged>; STICKS],
    /// The stick that the twins' link by id points to, and the one of the third stick's link.
    pub(super) by_id: [Option<usize>; 2],
    pub(super) disk_nodes: BTreeSet<&'static str>,
    pub(super) specs: Vec<Arc<ResourceSpec>>,
    pub(super) names: BTreeMap<String, DeviceId>,
    pub(super) ledger: Ledger,
    pub(super) judge: Judge,
    /// The newest inventory. `known` is the list that the kubelet has read last, which may be
    /// older.
    pub(super) inventory: Arc<Inventory>,
    pub(super) known: Arc<Inventory>,
    /// The ids that the kubelet has given away, with the objects behind the nodes of the answers.
    pub(super) pods: Vec<Pod>,
    pub(super) grants: u64,
    pub(super) history: Vec<String>,
}

pub(super) struct Pod {
    pub(super) alloc_id: AllocId,
    pub(super) resource: ResourceName,
    pub(super) id: DeviceId,
    /// The node that the answer contained.
    pub(super) node: String,
    pub(super) real_objects: BTreeSet<String>,
    pub(super) is_shared: bool,
}

pub(super) fn resource(
    name: &str,
    class: DeviceClass,
    globs: &[&str],
    sharing: Sharing,
) -> Arc<ResourceSpec> {
    let path = |glob: &&str| CharPath {
        host: (*glob).into(),
        container: None,
        permissions: "rw".into(),
        udev: Vec::new(),
    };
    let paths = globs.iter().map(path).collect();
    Arc::new(ResourceSpec { paths, sharing, ..ResourceSpec::new(name.parse().unwrap(), class) })
}

/// Configurations: the nodes of each resource.
pub(super) fn configurations() -> Vec<Vec<Arc<ResourceSpec>>> {
    let tty = |sharing| resource("a.com/tty", DeviceClass::Char, &["tty"], sharing);
    let gpu = |sharing| {
        Arc::new(ResourceSpec {
            select: Select::default(),
            sharing,
            ..(*resource("a.com/gpu", DeviceClass::Gpu, &[], sharing)).clone()
        })
    };
    let node = |sharing| resource("b.com/render", DeviceClass::Char, &["renderD128"], sharing);
    let (one, two) = (Sharing::Exclusive, Sharing::Replicas(2));
    vec![
        vec![
            tty(one),
            resource("a.com/disk", DeviceClass::Char, &DISK_NODES, one),
            gpu(one),
            node(one),
        ],
        vec![
            tty(two),
            resource("a.com/disk", DeviceClass::Char, &["sda1", "sda2"], one),
            resource("b.com/disk", DeviceClass::Char, &["sda", "sdb"], one),
            gpu(two),
            node(one),
        ],
        vec![
            resource("b.com/tty", DeviceClass::Char, &["tty"], one),
            resource("a.com/disk", DeviceClass::Char, &["sg0"], one),
            node(one),
        ],
    ]
}

impl Machine {
    pub(super) fn new(seed: u64) -> Self {
        let specs = configurations().remove(0);
        let judge = Judge::new(
            specs.clone().into(),
            Arc::default(),
            &Listed::new(),
            Rules::default(),
            &BTreeMap::new(),
        );
        Machine {
            random: Random::new(seed),
            now: 1000,
            sticks: [None; STICKS],
            by_id: [None; 2],
            disk_nodes: DISK_NODES.into(),
            specs,
            names: BTreeMap::new(),
            ledger: Ledger::default(),
            judge,
            inventory: Arc::default(),
            known: Arc::default(),
            pods: Vec::new(),
            grants: 0,
            history: Vec::new(),
        }
    }

    pub(super) fn moment(&self) -> Moment {
        Moment { boot: Duration::from_secs(self.now), wall: Timestamp(self.now * 1000) }
    }

    /// The nodes of `/dev` with the links to them, as a scan finds them, and the names of the
    /// matching globs.
    pub(super) fn nodes(&self) -> Vec<(NamedNode, DeviceNumber, &'static str, Attributes)> {
        let mut nodes = Vec::new();
        for (stick, plugged) in self.sticks.iter().enumerate() {
            let Some(Plugged { number, by_path }) = plugged else { continue };
            let mut links = Vec::new();
            for (link, name) in self.by_id.iter().zip(["usb-twin", "usb-own"]) {
                links.extend((*link == Some(stick)).then(|| format!("/dev/serial/by-id/{name}")));
            }
            links.extend(by_path.then(|| format!("/dev/serial/by-path/pci-{stick}")));
            let kernel =
                format!("pci0000:00/0000:00:14.0/usb1/1-{stick}/ttyUSB{number}/tty/ttyUSB{number}");
            let device = DeviceNumber {
                is_block: false,
                major: 188,
                minor: u32::try_from(*number).unwrap(),
            };
            nodes.push((
                node(&format!("/dev/ttyUSB{number}"), links, device, &kernel),
                device,
                "tty",
                attributes(&kernel, None),
            ));
        }
        for (minor, name) in
            DISK_NODES.iter().enumerate().filter(|(_, name)| self.disk_nodes.contains(*name))
        {
            let (kernel, partition) = match *name {
                "sda1" => ("pci0000:00/0000:00:17.0/host0/0:0:0:0/block/sda/sda1", Some("1")),
                "sda2" => ("pci0000:00/0000:00:17.0/host0/0:0:0:0/block/sda/sda2", Some("2")),
                "sdb" => ("pci0000:00/0000:00:18.0/host1/1:0:0:0/block/sdb", None),
                "sg0" => ("pci0000:00/0000:00:17.0/host0/0:0:0:0/scsi_generic/sg0", None),
                _ => ("pci0000:00/0000:00:17.0/host0/0:0:0:0/block/sda", None),
            };
            let device = DeviceNumber {
                is_block: *name != "sg0",
                major: 8,
                minor: u32::try_from(minor).unwrap(),
            };
            nodes.push((
                node(&format!("/dev/{name}"), Vec::new(), device, kernel),
                device,
                name,
                attributes(kernel, Some(partition)),
            ));
        }
        let kernel = "pci0000:00/0000:18:00.0/drm/renderD128";
        let device = DeviceNumber { is_block: false, major: 226, minor: 128 };
        nodes.push((
            node("/dev/dri/renderD128", Vec::new(), device, kernel),
            device,
            "renderD128",
            attributes(kernel, None),
        ));
        nodes
    }

    /// A scan and its consequences.
    pub(super) fn scan(&mut self) {
        let held: Vec<HeldNode> = self
            .ledger
            .grants()
            .flat_map(|grant| grant.devices.iter().map(move |device| (grant, device)))
            .map(|(grant, device)| HeldNode {
                id: device.id.shared().unwrap_or_else(|| device.id.clone()),
                objects: if device.objects.is_empty() {
                    grant.objects()
                } else {
                    device.objects.clone()
                },
            })
            .collect();
        let nodes = self.nodes();
        let named: Vec<NamedNode> = nodes.iter().map(|(node, ..)| node.clone()).collect();
        let mut chars: BTreeMap<String, ResourceName> = BTreeMap::new();
        let mut devices = vec![Arc::new(gpu())];
        for (name, (found, number, glob, attributes)) in
            name_nodes(&named, &held).into_iter().zip(&nodes)
        {
            let of = self
                .specs
                .iter()
                .find(|spec| spec.paths.iter().any(|path| path.host == NodePattern::from(*glob)));
            let Some(spec) = of else { continue };
            chars.insert(name.key.clone(), spec.name.clone());
            devices.push(Arc::new(Device {
                id: name.id,
                key: name.key,
                class: DeviceClass::Char,
                pci: None,
                numa_nodes: Vec::new(),
                nodes: vec![DeviceNode {
                    number: Some(*number),
                    ..DeviceNode::at(found.path.clone())
                }],
                attributes: attributes.clone(),
            }));
        }
        let selection = select(&devices, &chars, &self.specs);
        let ids =
            |devices: &Vec<Arc<Device>>| devices.iter().map(|device| device.id.clone()).collect();
        let evidence = Evidence {
            began: self.moment(),
            selected: selection
                .resources
                .iter()
                .map(|(name, devices)| (name.clone(), ids(devices)))
                .collect(),
            devices: devices.into_iter().map(|device| (device.id.clone(), device)).collect(),
            missing_nodes: BTreeSet::new(),
            unfulfilled: BTreeMap::new(),
            unread: Unread::default(),
        };
        self.judge.discovered(Arc::new(evidence));
        self.publish();
    }

    pub(super) fn publish(&mut self) {
        let held = core::held(self.ledger.grants().map(AsRef::as_ref));
        if let Some(inventory) =
            self.judge.judge(&held, &PendingHooks::new(), Duration::from_secs(self.now))
        {
            self.inventory = inventory;
        }
    }

    /// The objects behind a node now: a container that uses the node acts on these.
    pub(super) fn real_objects(&self, path: &str) -> BTreeSet<String> {
        let name = path.rsplit('/').next().unwrap();
        let all = match name {
            "sda" | "sdb" | "sg0" => vec!["part1".to_owned(), "part2".to_owned()],
            "sda1" => vec!["part1".to_owned()],
            "sda2" => vec!["part2".to_owned()],
            "renderD128" => vec!["gpu".to_owned()],
            _ => {
                let number: usize = name.strip_prefix("ttyUSB").unwrap().parse().unwrap();
                let stick = self
                    .sticks
                    .iter()
                    .position(|stick| stick.is_some_and(|plugged| plugged.number == number));
                // The cgroup lets the container open any device with this number, now and later.
                stick
                    .map(|stick| format!("stick{stick}"))
                    .into_iter()
                    .chain([format!("number{number}")])
                    .collect()
            }
        };
        all.into_iter().collect()
    }
}

pub(super) fn node(
    path: &str,
    links: Vec<String>,
    number: DeviceNumber,
    kernel: &str,
) -> NamedNode {
    NamedNode {
        path: path.into(),
        links,
        kernel: None,
        objects: vec![Object::node(path), Object::number(number), Object::kernel_device(kernel)],
    }
}

pub(super) fn attributes(kernel: &str, disk: Option<Option<&str>>) -> Attributes {
    let mut attributes = Attributes::default();
    attributes.insert("kernel_device", kernel);
    if let Some(partition) = disk {
        attributes.insert("disk_id", "eui.1");
        attributes.extend(partition.map(|number| ("disk_partition", number)));
    }
    attributes
}

/// A GPU whose render node may also be offered alone.
pub(super) fn gpu() -> Device {
    let function = PciFunction {
        driver: Some("amdgpu".into()),
        ..PciFunction::at("0000:18:00.0".parse().unwrap())
    };
    let number = Some(DeviceNumber { is_block: false, major: 226, minor: 128 });
    Device {
        id: DeviceId::new("0000:18:00.0"),
        key: "pci:0000:18:00.0/1002:74a1".into(),
        class: DeviceClass::Gpu,
        pci: Some(Box::new(function)),
        numa_nodes: Vec::new(),
        nodes: vec![DeviceNode { number, ..DeviceNode::at("/dev/dri/renderD128") }],
        attributes: Attributes::default(),
    }
}
