//! `holdfast topology`: the node as a tree, a JSON document or a picture, with the health and the
//! holder of each device.

use super::source;
use crate::admin::{ControlError, DeviceReport, control_get};
use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::{Screen, Tint};
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, Output, block_on, json, print};
use crate::domain::{
    Device, DeviceClass, DeviceId, DeviceNode, Grant, Health, PciAddress, PciFunction,
    PendingReleases, Reason, Verdicts,
};
use crate::hardware::{self, Discovery, node_health};
use crate::host::HostRoot;
use crate::picture::{self, Alike, Count, Cpus, Figure, Leaf, Picture, Shown, fold, svg};
use crate::store;
use clap::Args;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Maximum number of characters of a part's id on a terminal.
const PART_CHARS: usize = 16;

/// Options of the drawing.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Draw every virtual function and every device separately, even if they are alike
    #[arg(long)]
    all: bool,
    /// Write the picture to FILE; `-o svg` prints it
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Scans the host, queries the running daemon (or the files that it left) for health and holders,
/// and draws the node.
///
/// # Errors
/// When the configuration is invalid, or the picture cannot be written.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let known = Known::ask(global)?;
    let config = global.load_config()?;
    let root = HostRoot::new(&global.host_root).with_nvidia(&config.nvidia_roots);
    let scan = hardware::scan(&root);
    let specs = hardware::defaults::or_usual(&config.resources, config.mig_strategy, &scan);
    let discovery =
        hardware::discover_with(&root, scan, &specs, &hardware::DiscoverInput::first(&known.names));
    let picture = picture(&root, &discovery, &known);
    let figure = fold(&picture, options.all);
    let drawing = || svg::draw(&figure, picture.count(), usize::MAX);
    if let Some(file) = &options.svg {
        let written = std::fs::write(file, drawing());
        return written.map_err(|error| {
            Failed::new(FAILURE, format_args!("cannot write `{}`: {error}", file.display()))
        });
    }
    match global.output {
        Output::Json => print(&json(&picture)?),
        // The drawing escapes its texts, as the HTTP page does.
        Output::Svg => print(&Text::document(&drawing())),
        Output::Table | Output::Ascii => print(&text(&figure, picture.count(), Screen::get())),
    }
}

/// Knowledge about devices that is not in the host's files.
#[derive(Debug, Default)]
pub struct Known {
    /// Assigned ids by physical key.
    pub names: BTreeMap<String, DeviceId>,
    /// All known grants.
    pub grants: Vec<Grant>,
    /// The releases that wait for proof; empty without a daemon.
    pub pending: PendingReleases,
    /// Devices as the daemon judges them; empty without a daemon.
    pub judged: BTreeMap<String, DeviceReport>,
    /// Verdicts of the ledger.
    pub verdicts: Verdicts,
}

impl Known {
    /// Queries the daemon, or reads the ledger if there is one. A captured tree of another machine
    /// has neither.
    fn ask(global: &Global) -> Result<Known, Failed> {
        // Use the ledger's device ids if it can be read, so that devices have the ids that the
        // kubelet knows.
        let remembered = source::ledger_if_any(global);
        let judged = block_on(control_get::<Vec<DeviceReport>>(&global.run_dir, "/v1/devices"))?;
        let grants = block_on(control_get::<Vec<Grant>>(&global.run_dir, "/v1/grants"))?;
        let (judged, asked) = match (judged, grants) {
            (Ok(judged), Ok(grants)) => (judged, Some(grants)),
            (Err(error @ ControlError::Failed { .. }), _)
            | (_, Err(error @ ControlError::Failed { .. })) => {
                crate::console::eprintln(format_args!(
                    "holdfast: {error}; health and holders are from the files"
                ));
                (Vec::new(), None)
            }
            _ => (Vec::new(), None),
        };
        let store::Recovered { grants, mut names, verdicts, .. } = remembered.unwrap_or_default();
        names.extend(
            judged
                .iter()
                .filter(|device| !device.key.is_empty())
                .map(|device| (device.key.clone(), DeviceId::new(&device.id))),
        );
        let judged = judged.into_iter().map(|device| (device.id.clone(), device)).collect();
        let (grants, pending) = (asked.unwrap_or(grants), source::pending_releases(global));
        Ok(Known { names, grants, pending, judged, verdicts })
    }

    fn leaf(
        &self,
        device: &Device,
        resource: Option<String>,
        judged: Option<&DeviceReport>,
        probe: impl FnOnce() -> Option<Health>,
    ) -> Leaf {
        let mut leaf = Leaf::of(device);
        leaf.resources = resource.into_iter().collect();
        if let Some(judged) = judged {
            if !judged.resources.is_empty() {
                leaf.resources = judged.resources.iter().cloned().collect();
            }
            leaf.health = judged
                .health
                .as_deref()
                .map(|health| if health == "Healthy" { "Healthy" } else { "Unhealthy" });
            (leaf.reason, leaf.detail) =
                (judged.reason.clone(), judged.explanation().map(str::to_owned));
            return leaf;
        }
        if leaf.resources.is_empty() {
            return leaf;
        }
        let remembered = self.verdicts.get(&device.id).map(|verdict| (verdict.health(), verdict));
        let found = remembered.filter(|(health, _)| !health.is_healthy());
        if let Some(health) = found.map(|(health, _)| health).or_else(probe) {
            leaf.health = Some(health.as_str());
            leaf.reason = health.reason().map(|reason| reason.to_string());
            let detail = found
                .zip(health.reason())
                .map(|((_, verdict), reason)| verdict.detail(reason).to_owned());
            leaf.detail = detail.filter(|detail| !detail.is_empty());
        }
        leaf
    }

    /// Devices that the daemon lists or a container holds, but that the scan does not find: they
    /// were removed, but are not forgotten.
    fn removed(&self, root: &HostRoot, found: &BTreeSet<&DeviceId>) -> Vec<Leaf> {
        let whole = |id: &DeviceId| id.shared().unwrap_or_else(|| id.clone());
        // The number of a pool's share is not a device.
        let is_removed = |id: &DeviceId| !found.contains(id) && !id.is_number();
        let mut removed: BTreeMap<DeviceId, Leaf> = BTreeMap::new();
        for judged in self.judged.values().filter(|judged| judged.health.is_some()) {
            let id = whole(&DeviceId::new(&judged.id));
            if is_removed(&id) {
                let device =
                    absent(&id, &judged.key, judged.class, &judged.numa_nodes, &judged.bridges);
                removed.insert(id, self.leaf(&device, None, Some(judged), || None));
            }
        }
        for grant in self.grants.iter().filter(|grant| grant.is_live()) {
            for granted in &grant.devices {
                let id = whole(&granted.id);
                if is_removed(&id) && !removed.contains_key(&id) {
                    let device = absent(&id, &granted.key, None, &granted.numa_nodes, &[]);
                    // The node may still exist, if only the configuration no longer offers it.
                    let node_exists = || {
                        device.pci.is_none()
                            && node_health(root, &device).is_some_and(Health::is_healthy)
                    };
                    let probe =
                        || (!node_exists()).then_some(Health::Unhealthy(Reason::DeviceGone));
                    removed.insert(
                        id,
                        self.leaf(&device, Some(grant.resource.to_string()), None, probe),
                    );
                }
            }
        }
        removed.into_values().collect()
    }
}

/// A device built from its record alone.
fn absent(
    id: &DeviceId,
    key: &str,
    class: Option<DeviceClass>,
    numa_nodes: &[u32],
    bridges: &[PciAddress],
) -> Device {
    let node = key.strip_prefix("dev:");
    let mut place = key.strip_prefix("pci:").into_iter().flat_map(|key| key.split('/'));
    let address = place.next().and_then(|address| address.parse().ok());
    // The key is address/kind/part: a part has the address of its function.
    let part = place.nth(1).map(|part| ("part", part.to_owned()));
    Device {
        id: id.clone(),
        key: key.to_owned(),
        class: class.unwrap_or(if node.is_some() { DeviceClass::Char } else { DeviceClass::Other }),
        pci: address.map(|address| {
            Box::new(PciFunction { bridges: bridges.to_vec(), ..PciFunction::at(address) })
        }),
        numa_nodes: numa_nodes.to_vec(),
        // A USB device has a name in place of a path.
        nodes: node.filter(|node| node.starts_with('/')).map(DeviceNode::at).into_iter().collect(),
        attributes: part.into_iter().collect(),
    }
}

/// The devices of known classes, those that a resource offers, and those that are listed or held
/// but no longer exist.
#[must_use]
pub fn picture(root: &HostRoot, discovery: &Discovery, known: &Known) -> Picture {
    let resources = discovery.selection.resource_of();
    let holders = picture::holders(&known.grants, &known.pending);
    let found: BTreeSet<&DeviceId> = discovery.devices.iter().map(|device| &device.id).collect();
    let mut leaves: Vec<Leaf> = Vec::new();
    for device in &discovery.devices {
        let resource = resources.get(device.key.as_str()).map(ToString::to_string);
        if device.class != DeviceClass::Other || resource.is_some() {
            leaves.push(known.leaf(device, resource, known.judged.get(device.id.as_str()), || {
                discovery.health(root, device)
            }));
        }
    }
    leaves.extend(known.removed(root, &found));
    for leaf in &mut leaves {
        leaf.holders = holders.get(&DeviceId::new(&leaf.id)).cloned().unwrap_or_default();
    }
    picture::tree(leaves, &cpus(root))
}

/// The CPUs of each NUMA node (Linux `Documentation/ABI/stable/sysfs-devices-node`).
fn cpus(root: &HostRoot) -> Cpus {
    let dir = "sys/devices/system/node";
    let number = |name: &str| name.strip_prefix("node")?.parse().ok();
    let nodes = root.entries(dir).into_iter().filter_map(|name| Some((number(&name)?, name)));
    nodes
        .filter_map(|(node, name)| {
            Some((node, root.read(&format!("{dir}/{name}/cpulist"))?.trim().to_owned()))
        })
        .collect()
}

/// Draws a figure as lines of text.
#[must_use]
pub fn text(figure: &Figure, count: Count, screen: Screen) -> Text {
    if figure.parts.is_empty() {
        return Text::of_line(format_args!(
            "no devices found; `holdfast discover --all` lists every PCI function"
        ));
    }
    let table = Table::new(&["device", "class", "name", "resource", "health", "held by"]);
    let mut table = table
        .shrinking(&["name", "resource", "health", "held by"])
        .tinted("health", health_tint)
        .sparse();
    lines(&figure.parts, "", true, screen, &mut table);
    let mut text = table.on(screen);
    text.end_line();
    text.line(format_args!("{count}"));
    text
}

/// The colour of a health cell, by its sign.
fn health_tint(cell: &str) -> Tint {
    match cell.chars().next() {
        Some('✓' | '+') => Tint::Green,
        Some('✗' | '!') => Tint::Red,
        _ => Tint::Plain,
    }
}

fn lines(parts: &[Shown], before: &str, is_top: bool, screen: Screen, table: &mut Table) {
    let [branch, last_branch, trunk] =
        if screen.ascii { ["|- ", "`- ", "|  "] } else { ["├─ ", "└─ ", "│  "] };
    for (index, part) in parts.iter().enumerate() {
        let is_last = index + 1 == parts.len();
        let (own, below) = match (is_top, is_last) {
            (true, _) => (String::new(), String::new()),
            (_, true) => (format!("{before}{last_branch}"), format!("{before}   ")),
            _ => (format!("{before}{branch}"), format!("{before}{trunk}")),
        };
        match part {
            Shown::Group { title, parts } => {
                let title = if screen.ascii { title.replace(" · ", ", ") } else { title.clone() };
                table.line(&format!("{own}{title}"));
                lines(parts, &below, false, screen, table);
            }
            Shown::Device { leaf, parts } => {
                table.row(device(leaf, &own, screen));
                lines(parts, &below, false, screen, table);
            }
            Shown::Alike(alike) => table.row(group_row(alike, &own, screen)),
        }
    }
}

fn device(leaf: &Leaf, before: &str, screen: Screen) -> [String; 6] {
    let held = match leaf.holders.as_slice() {
        [] => String::new(),
        [only] => only.with_state(),
        [first, rest @ ..] => format!("{} +{}", first.with_state(), rest.len()),
    };
    let health =
        leaf.state().map(|state| signed(&state, !leaf.is_unhealthy(), screen)).unwrap_or_default();
    // The prefix of an id is enough to query it; a full UUID would leave no space for other
    // columns.
    let max_chars =
        if leaf.part.is_some() && screen.width.is_some() { PART_CHARS } else { usize::MAX };
    [
        format!("{before}{}", screen.clip(&leaf.name(), max_chars)),
        leaf.kind(),
        leaf.about().unwrap_or_default(),
        leaf.resources.join(","),
        health,
        held,
    ]
}

fn group_row(alike: &Alike, before: &str, screen: Screen) -> [String; 6] {
    let (times, to) = if screen.ascii { ("x", "..") } else { ("×", "–") };
    let short = |name: &str| name.strip_prefix("0000:").unwrap_or(name).to_owned();
    let health =
        alike.state().map(|state| signed(&state, alike.unhealthy == 0, screen)).unwrap_or_default();
    let held = if alike.held > 0 { format!("{} held", alike.held) } else { String::new() };
    let range = format!("{}{to}{}", short(&alike.range.0), short(&alike.range.1));
    [
        format!("{before}{times} {}", alike.count),
        alike.kind.clone(),
        range,
        alike.resources.join(","),
        health,
        held,
    ]
}

/// Prefixes a sign, since not all users can see colours.
fn signed(state: &str, is_healthy: bool, screen: Screen) -> String {
    let sign = match (is_healthy, screen.ascii) {
        (true, false) => '✓',
        (false, false) => '✗',
        (true, true) => '+',
        (false, true) => '!',
    };
    format!("{sign} {state}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{AllocId, ContainerEdits, GrantState, GrantedDevice, PodRef, Timestamp};
    use crate::picture::testing::machine;
    use crate::picture::tree;

    #[test]
    fn the_tree_fits_a_terminal() {
        let wanted = "\
DEVICE                 CLASS    RESOURCE          HEALTH          HELD BY
NUMA node 0
└─ host bridge 0000:15 · switch 0000:16:00.0
   ├─ 0000:18:00.0     gpu      nvidia.com/gpu    ✓ healthy       ml/train-0
   ├─ 0000:19:00.0     gpu      nvidia.com/gpu    ✗ xid (Xid 79)
   └─ 0000:1a:00.0     rdma
      ├─ 0000:1a:05.1  rdma vf                                    ml/net-0
      └─ × 63          rdma vf
NUMA node 1
└─ host bridge 0000:97
   └─ 0000:9a:00.0     gpu      nvidia.com/gpu    ✓ healthy
nodes of /dev
└─ /dev/fuse           char     example.com/fuse  ✓ healthy
left out on this width: NAME

69 devices, 4 offered, 1 unhealthy, 2 held
";
        let picture = tree(machine(), &Cpus::new());
        let figure = fold(&picture, false);
        let narrow =
            text(&figure, picture.count(), Screen { width: Some(80), ..Screen::default() });
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
        assert_eq!(narrow, wanted);
    }

    #[test]
    fn a_removed_device_is_drawn_while_it_is_listed_or_held() {
        let report = |text: &str| serde_json::from_str::<DeviceReport>(text).unwrap();
        let listed = report(
            r#"{"id":"GPU-a","key":"pci:0000:18:00.0/10de:2330","resources":["nvidia.com/gpu"],"health":"Unhealthy","reason":"device_gone",
                "detail":null,"state":"unhealthy","healthy_in_seconds":null,"cordoned":null,"flaps":1,"incidents":[],"class":"gpu",
                "numa_nodes":[1],"bridges":["0000:15:01.0"],"names":[],"said":[]}"#,
        );
        let forgotten = report(
            r#"{"id":"GPU-z","key":"","resources":[],"health":null,"reason":"cordoned","detail":"fan","state":"healthy",
                "healthy_in_seconds":null,"cordoned":"fan","flaps":0,"incidents":[],"numa_nodes":[],"bridges":[],"names":[],"said":[]}"#,
        );
        let held = |id: &str, key: &str| GrantedDevice {
            id: DeviceId::new(id),
            key: key.into(),
            numa_nodes: vec![0],
            nodes: Vec::new(),
            objects: Vec::new(),
        };
        let pod =
            PodRef { uid: "u".into(), namespace: Some("ml".into()), name: Some("train-0".into()) };
        let grant = Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "example.com/fuse".parse().unwrap(),
            devices: vec![
                held("fuse::1", "dev:/dev/fuse"),
                held("GPU-b", "pci:0000:3b:00.0/10de:2330"),
                held("3", ""),
            ],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            granted_at: Timestamp(0),
            version: String::new(),
            state: GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(0) },
        };
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let discovery = hardware::discover_with(
            &root,
            hardware::scan(&root),
            &[],
            &hardware::DiscoverInput::first(&BTreeMap::new()),
        );
        let judged = [listed, forgotten].map(|device| (device.id.clone(), device)).into();
        let known = Known { judged, grants: vec![grant], ..Known::default() };
        let picture = picture(&root, &discovery, &known);
        let wanted = "\
DEVICE              CLASS  RESOURCE          HEALTH         HELD BY
NUMA node 0
└─ host bridge 0000:3b
   └─ 0000:3b:00.0  other  example.com/fuse  ✗ device_gone  ml/train-0
NUMA node 1
└─ host bridge 0000:15
   └─ 0000:18:00.0  gpu    nvidia.com/gpu    ✗ device_gone
nodes of /dev
└─ /dev/fuse        char   example.com/fuse  ✗ device_gone  ml/train-0

3 devices, 3 offered, 3 unhealthy, 2 held
";
        assert_eq!(text(&fold(&picture, false), picture.count(), Screen::default()), wanted);
        let json = serde_json::to_value(&picture).unwrap().to_string();
        assert!(json.contains(r#""id":"fuse""#) && json.contains("device_gone"), "{json}");
    }

    #[test]
    fn on_an_ascii_terminal_it_is_ascii() {
        let picture = tree(machine(), &Cpus::new());
        let ascii = text(
            &fold(&picture, false),
            picture.count(),
            Screen { width: Some(60), ascii: true, ..Screen::default() },
        );
        assert!(ascii.is_ascii(), "{ascii}");
        assert!(
            ascii.contains("`- host bridge 0000:15, switch 0000:16:00.0\n   |- 0000:18:00.0"),
            "{ascii}"
        );
    }
}
