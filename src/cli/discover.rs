//! `holdfast discover`: the devices of this host, as a JSON document or a table.

use super::found::{Found, find};
use crate::console::exit::Failed;
use crate::console::screen::Tint;
use crate::console::table::{Table, UNKNOWN};
use crate::console::text::Text;
use crate::console::{Global, show};
use crate::domain::{
    Attributes, Device, DeviceClass, DeviceId, Grant, Health, Objects, PciAddress, Reason, Verdicts,
};
use crate::hardware::{self, Discovery};
use crate::host::{self, HostRoot};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Options of `discover`.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// List every PCI function, bridges included
    #[arg(long)]
    pub(super) all: bool,
    /// List the devices that would be published for Dynamic Resource Allocation (DRA); with
    /// `-o json` the ResourceSlices themselves
    #[arg(long, conflicts_with = "all")]
    pub(super) slices: bool,
    /// The name of this node in the cluster, for --slices [default: NODE_NAME, or the host's name]
    #[arg(long, value_name = "NAME", requires = "slices")]
    pub(super) node_name: Option<String>,
}

/// Scans the host and prints its devices, with the configured resources, or the default ones if
/// none are configured.
///
/// # Errors
/// When the configuration is invalid.
pub fn run(global: &Global, all: bool) -> Result<(), Failed> {
    let config = global.load_config()?;
    let root = HostRoot::new(&global.host_root).with_nvidia(&config.nvidia_roots);
    let Found { discovery: found, recovered, grants, unread, .. } = find(global, &config, &root);
    for why in &unread {
        crate::console::eprintln(format_args!("holdfast: {why}"));
    }
    for warning in &found.selection.warnings {
        crate::console::eprintln(format_args!("holdfast: {warning}"));
    }
    let boot_id = host::boot_id(&global.host_root).unwrap_or_else(|| "unknown".into());
    let document = document(&root, &found, all)
        .with_verdicts(&recovered.verdicts, &boot_id)
        .with_holders(&grants, &found);
    show(global.output, &document, |document| {
        let table = table(document);
        if table.is_empty() {
            Text::of_line(format_args!(
                "no devices found; `holdfast discover --all` lists every PCI function"
            ))
        } else {
            table.into()
        }
    })
}

/// The version of the document's format.
const SCHEMA: u32 = 1;

/// The document of `discover -o json`. An unknown value is `null`, never 0 or an empty text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Document {
    /// The version of this format.
    pub schema: u32,
    /// The devices: PCI functions in the order of their addresses, each followed by its parts, then
    /// nodes of `/dev`.
    pub devices: Vec<Row>,
}

/// One device of the document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The stable id, as sent to the kubelet.
    pub id: String,
    /// Device class.
    pub class: DeviceClass,
    /// PCI vendor, four hex digits.
    pub vendor_id: Option<String>,
    /// PCI device, four hex digits.
    pub device_id: Option<String>,
    /// PCI class with sub-class and programming interface, six hex digits.
    pub pci_class: Option<String>,
    /// PCI address.
    pub pci_address: Option<PciAddress>,
    /// NUMA node as the kernel reports it.
    pub numa_node: Option<u32>,
    /// Kernel driver.
    pub driver: Option<String>,
    /// Whether it is an SR-IOV virtual function.
    pub is_vf: bool,
    /// The physical function of a virtual one.
    pub pf: Option<PciAddress>,
    /// The virtual functions of a physical one.
    pub vfs: Vec<PciAddress>,
    /// IOMMU group.
    pub iommu_group: Option<u32>,
    /// Network interfaces.
    pub net: Vec<String>,
    /// RDMA devices.
    pub rdma: Vec<String>,
    /// NVMe controllers.
    pub nvme: Vec<String>,
    /// Device nodes that a container gets.
    pub nodes: Vec<String>,
    /// Bridges from the root port down.
    pub bridges: Vec<PciAddress>,
    /// The resource that offers it.
    pub resource: Option<String>,
    /// `Healthy` or `Unhealthy`; `null` if no resource offers the device, or if its health cannot
    /// be determined.
    pub health: Option<&'static str>,
    /// Why it is unhealthy.
    pub reason: Option<&'static str>,
    /// Identity and description by name ([`Device::attributes`]).
    pub attributes: Attributes,
    /// The index of a virtual function among those of its physical one.
    pub vf_index: Option<u32>,
    /// Details of the reason from the ledger; `null` if the scan itself found the reason.
    pub detail: Option<String>,
}

impl Document {
    /// Adds the verdicts of the ledger. A scan of sysfs sees neither kernel events nor cordons.
    /// Verdicts of another boot are ignored, unless they wait for an operator (cordoned or
    /// flapping).
    #[must_use]
    pub fn with_verdicts(mut self, verdicts: &Verdicts, boot_id: &str) -> Self {
        let verdict_on = |id: &str| {
            let verdict = verdicts.get(&DeviceId::new(id))?;
            let reason = Health::reason(verdict.health())?;
            let waits = matches!(reason, Reason::Cordoned | Reason::Flapping);
            (waits || verdict.boot_id == boot_id)
                .then(|| (reason, verdict.detail(reason).to_owned()))
        };
        let by_address: BTreeMap<PciAddress, String> = self
            .devices
            .iter()
            .filter(|row| !row.attributes.contains_key("part"))
            .filter_map(|row| Some((row.pci_address?, row.id.clone())))
            .collect();
        for row in
            self.devices.iter_mut().filter(|row| row.health == Some(Health::Healthy.as_str()))
        {
            let above = [
                row.attributes.get("parent"),
                row.pf.and_then(|pf| by_address.get(&pf)).map(String::as_str),
            ];
            let found =
                verdict_on(&row.id).or_else(|| above.into_iter().flatten().find_map(&verdict_on));
            if let Some((reason, detail)) = found {
                (row.health, row.reason) =
                    (Some(Health::Unhealthy(reason).as_str()), Some(reason.as_str()));
                row.detail = Some(detail).filter(|detail| !detail.is_empty());
            }
        }
        self
    }
}

impl Document {
    /// Adds the holders. A device that shares a kernel object with a held device is not given to
    /// another container meanwhile, so it is shown as unhealthy (`held_as_other`).
    #[must_use]
    pub fn with_holders(mut self, grants: &[Arc<Grant>], discovery: &Discovery) -> Self {
        let mut held: Objects<usize> = Objects::default();
        for (index, grant) in grants.iter().enumerate() {
            held.hold(&index, grant.objects());
        }
        let found: BTreeMap<&str, &Arc<Device>> =
            discovery.devices.iter().map(|device| (device.id.as_str(), device)).collect();
        for row in
            self.devices.iter_mut().filter(|row| row.health == Some(Health::Healthy.as_str()))
        {
            let Some(device) = found.get(row.id.as_str()) else { continue };
            // One row represents all shares of its device.
            let is_its = |id: &DeviceId| {
                *id == device.id || id.shared().as_ref() == Some(&device.id) || id.is_number()
            };
            let is_own_grant = |grant: &usize| {
                let grant = &grants[*grant];
                row.resource.as_deref() == Some(grant.resource.as_str())
                    && grant.devices.iter().any(|held| is_its(&held.id))
            };
            if let Some(holder) = held.conflict(&device.objects(), is_own_grant) {
                let reason = Reason::HeldAsOther;
                (row.health, row.reason) =
                    (Some(Health::Unhealthy(reason).as_str()), Some(reason.as_str()));
                row.detail = Some(format!("by grant {}", grants[*holder].alloc_id));
            }
        }
        self
    }
}

/// Builds the document. Without `all` it contains the devices of known classes and those that a
/// resource offers. With `all` it contains every PCI function.
#[must_use]
pub fn document(root: &HostRoot, discovery: &Discovery, all: bool) -> Document {
    let resources = discovery.selection.resource_of();
    let rows = discovery.devices.iter().filter_map(|device| {
        let resource = resources.get(device.key.as_str());
        if !all && resource.is_none() && device.class == DeviceClass::Other {
            return None;
        }
        let health = resource.and_then(|_| discovery.health(root, device));
        Some(row(root, device, resource.map(ToString::to_string), health))
    });
    Document { schema: SCHEMA, devices: rows.collect() }
}

fn row(root: &HostRoot, device: &Device, resource: Option<String>, health: Option<Health>) -> Row {
    let pci = device.pci.as_ref();
    let hex16 = |number: u16| format!("{number:04x}");
    Row {
        id: device.id.to_string(),
        class: device.class,
        vendor_id: pci.and_then(|pci| pci.vendor).map(hex16),
        device_id: pci.and_then(|pci| pci.device).map(hex16),
        pci_class: pci.and_then(|pci| pci.class).map(|class| format!("{class:06x}")),
        pci_address: pci.map(|pci| pci.address),
        numa_node: pci.and_then(|pci| hardware::stated_numa_node(root, pci.address)),
        driver: pci.and_then(|pci| pci.driver.clone()),
        is_vf: pci.is_some_and(|pci| pci.is_vf()),
        pf: pci.and_then(|pci| pci.physfn),
        vfs: pci.map(|pci| pci.virtfns.clone()).unwrap_or_default(),
        iommu_group: pci.and_then(|pci| pci.iommu_group),
        net: pci.map(|pci| pci.net.clone()).unwrap_or_default(),
        rdma: pci.map(|pci| pci.rdma.clone()).unwrap_or_default(),
        nvme: pci.map(|pci| pci.nvme.clone()).unwrap_or_default(),
        nodes: device.nodes.iter().map(|node| node.host.clone()).collect(),
        bridges: pci.map(|pci| pci.bridges.clone()).unwrap_or_default(),
        resource,
        health: health.map(Health::as_str),
        reason: health.and_then(Health::reason).map(|reason| reason.as_str()),
        attributes: device.attributes.clone(),
        vf_index: pci.and_then(|pci| pci.vf_index),
        detail: None,
    }
}

/// The devices as a table of at most 120 columns; only the document has PCI ids, groups and
/// bridges. The id is the last column because a UUID or a serial number is the longest cell.
#[must_use]
pub fn table(document: &Document) -> Table {
    let table =
        Table::new(&["address", "class", "driver", "numa", "names", "resource", "health", "id"]);
    let mut table = table
        .shrinking(&["id", "names", "driver", "health", "resource"])
        .omitting(&["driver", "names"])
        .tinted("health", tint);
    for row in &document.devices {
        let address = row
            .pci_address
            .map(|address| address.to_string())
            .or_else(|| row.nodes.first().cloned());
        let kind = row.attributes.get("part").or_else(|| row.is_vf.then_some("vf"));
        let class =
            kind.map_or_else(|| row.class.to_string(), |kind| format!("{} {kind}", row.class));
        let health = row.health.map(|health| row.reason.unwrap_or(health).to_owned());
        let names = [&row.rdma, &row.nvme, &row.net]
            .into_iter()
            .find(|names| !names.is_empty())
            .map(|names| short_list(names));
        // The id is printed in full, since configurations use it too; for some devices it is the
        // address.
        let id = Some(row.id.clone());
        table.row(
            [address, Some(class), row.driver.clone(), row.numa_node.map(|node| node.to_string())]
                .into_iter()
                .chain([names, row.resource.clone(), health, id])
                .map(Option::unwrap_or_default),
        );
    }
    table
}

/// The colour of a health cell. An unhealthy device shows its reason there.
fn tint(cell: &str) -> Tint {
    match cell {
        "Healthy" => Tint::Green,
        UNKNOWN => Tint::Plain,
        _ => Tint::Red,
    }
}

/// The first name and the number of the others: a physical function can have hundreds of
/// representors.
fn short_list(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [only] => only.clone(),
        [first, rest @ ..] => format!("{first} +{}", rest.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::screen::Screen;
    use crate::domain::MigStrategy;
    use crate::hardware::{DiscoverInput, defaults, discover_with, scan};
    use crate::lab::sim::hardware::{GPUS, SimNode};

    fn simulated(all: bool, breakage: impl Fn(&SimNode)) -> Document {
        let dir = tempfile::tempdir().unwrap();
        let node = SimNode::create(dir.path()).unwrap();
        breakage(&node);
        let root = HostRoot::new(node.root());
        let functions = scan(&root);
        let specs = defaults::or_usual(&[], MigStrategy::None, &functions);
        document(
            &root,
            &discover_with(&root, functions, &specs, &DiscoverInput::first(&BTreeMap::new())),
            all,
        )
    }

    /// The document is an interface: a change here affects every program that reads it.
    #[test]
    fn the_document_is_what_is_promised() {
        let document = simulated(false, |node| node.remove_gpu_node(1).unwrap());
        let json = serde_json::to_string(&document).unwrap();
        let start = concat!(
            r#"{"schema":1,"devices":[{"id":"GPU-5ca1ab1e-0000-4000-8000-000000000000","class":"gpu","vendor_id":"10de","#,
            r#""device_id":"2330","pci_class":"030200","pci_address":"0000:18:00.0","numa_node":0,"driver":"nvidia","#,
            r#""is_vf":false,"pf":null,"vfs":[],"iommu_group":null,"net":[],"rdma":[],"nvme":[],"#,
            r#""nodes":["/dev/nvidia0","/dev/nvidiactl","/dev/nvidia-uvm","/dev/nvidia-uvm-tools"],"#,
            r#""bridges":["0000:15:01.0","0000:16:00.0","0000:17:00.0"],"resource":"nvidia.com/gpu","#,
            r#""health":"Healthy","reason":null,"attributes":{"index":"0","minor":"0","model":"NVIDIA H100 80GB HBM3","#,
            r#""uuid":"GPU-5ca1ab1e-0000-4000-8000-000000000000"},"vf_index":null,"detail":null},"#,
        );
        assert!(json.starts_with(start), "{json}");
        let broken = &document.devices[1];
        assert_eq!((broken.health, broken.reason), (Some("Unhealthy"), Some("node_missing")));
        let adapter = document.devices.iter().find(|row| row.rdma == ["mlx5_0"]).unwrap();
        assert_eq!((adapter.resource.as_ref(), adapter.health, adapter.vfs.len()), (None, None, 4));
    }

    #[test]
    fn verdicts_of_the_ledger_are_shown_for_devices_that_look_healthy() {
        use crate::domain::{Cordon, Timestamp, Verdict, VerdictState};
        use std::time::Duration;
        let found = simulated(false, |node| node.remove_gpu_node(1).unwrap());
        let failed = VerdictState::Unhealthy { reason: Reason::Xid, seen: Duration::ZERO };
        let faults = [(Reason::Xid, "Xid 79".to_owned())].into();
        let verdict =
            Verdict { boot_id: "boot".into(), state: failed, faults, ..Verdict::default() };
        let cordon = Some(Cordon { reason: "fan".into(), at: Timestamp(0), evicts: false });
        let ids: Vec<DeviceId> = found.devices.iter().map(|row| DeviceId::new(&row.id)).collect();
        let taken_out = Verdict { cordon, ..verdict.clone() };
        let verdicts = Verdicts::from([
            (ids[0].clone(), verdict.clone()),
            (ids[1].clone(), verdict),
            (ids[2].clone(), taken_out),
        ]);
        let reasons = |boot_id| {
            let devices = found.clone().with_verdicts(&verdicts, boot_id).devices;
            devices.into_iter().take(4).map(|row| (row.reason, row.detail)).collect::<Vec<_>>()
        };
        let (missing, cordoned) = ((Some("node_missing"), None), (Some("cordoned"), None));
        assert_eq!(
            reasons("boot"),
            [
                (Some("xid"), Some("Xid 79".to_owned())),
                missing.clone(),
                cordoned.clone(),
                (None, None)
            ]
        );
        assert_eq!(reasons("next"), [(None, None), missing, cordoned, (None, None)]);
    }

    #[test]
    fn a_device_held_under_another_id_is_unhealthy() {
        use crate::domain::{AllocId, ContainerEdits, GrantState, GrantedDevice, Timestamp};
        let dir = tempfile::tempdir().unwrap();
        let node = SimNode::create(dir.path()).unwrap();
        let root = HostRoot::new(node.root());
        let functions = scan(&root);
        let specs = defaults::or_usual(&[], MigStrategy::None, &functions);
        let found =
            discover_with(&root, functions, &specs, &DiscoverInput::first(&BTreeMap::new()));
        let health = |resource: &str, as_id: Option<&str>| {
            let gpu = found.devices.iter().find(|device| device.class == DeviceClass::Gpu).unwrap();
            let id = as_id.map_or_else(|| gpu.id.clone(), DeviceId::new);
            let device = GrantedDevice {
                id,
                key: gpu.key.clone(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: gpu.objects(),
            };
            let grant = Arc::new(Grant {
                alloc_id: AllocId::new("a-1"),
                resource: resource.parse().unwrap(),
                devices: vec![device],
                edits: ContainerEdits::default(),
                claim: None,
                boot_id: "boot".into(),
                kubelet: None,
                granted_at: Timestamp(0),
                version: String::new(),
                state: GrantState::Granted,
            });
            let rows = document(&root, &found, false).with_holders(&[grant], &found).devices;
            let unhealthy = rows
                .iter()
                .filter(|row| row.health.is_some_and(|health| health != "Healthy"))
                .count();
            (
                unhealthy,
                rows.into_iter().find(|row| row.id == gpu.id.as_str()).and_then(|row| row.reason),
            )
        };
        assert_eq!(health("nvidia.com/gpu", None), (0, None), "its own grant does not block it");
        assert_eq!(health("nvidia.com/gpu", Some("GPU-another")), (1, Some("held_as_other")));
        assert_eq!(health("example.com/gpu", None), (1, Some("held_as_other")));
    }

    #[test]
    fn all_shows_the_bridges_too() {
        let (known, all) = (simulated(false, |_| ()), simulated(true, |_| ()));
        assert!(known.devices.iter().all(|row| row.class != DeviceClass::Other));
        assert!(all.devices.iter().any(|row| row.class == DeviceClass::Other));
        assert_eq!(known.devices.iter().filter(|row| row.resource.is_some()).count(), GPUS);
    }

    #[test]
    fn every_row_has_the_id_even_if_it_is_the_address() {
        let document = simulated(false, |_| ());
        let text = table(&document).on(Screen::default());
        let ids: Vec<&str> =
            text.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
        assert_eq!(
            ids,
            document.devices.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(),
            "{text}"
        );
        assert!(
            document.devices.iter().any(|row| row.is_vf
                && row.pci_address.is_some_and(|address| address.to_string() == row.id))
        );
    }

    #[test]
    fn the_table_can_be_read_on_a_terminal() {
        let text =
            table(&simulated(true, |node| node.remove_gpu_node(1).unwrap())).on(Screen::default());
        assert!(text.lines().all(|line| line.len() <= 120 && line == line.trim_end()), "{text}");
        assert!(
            text.contains(
                "0000:19:00.0  gpu      nvidia     0     -       nvidia.com/gpu  node_missing"
            ),
            "{text}"
        );
    }
}
