//! Discovery on damaged trees: files, links and folders that are missing, truncated, full of noise,
//! renamed or swapped, or pipes without a writer.
//!
//! Guarantees for every such tree:
//!
//! - The scan ends, and does not panic.
//! - No device is invented: each has an address that the tree has, and ids and keys are unique.
//! - Damage in one function's folder affects only that function: all others are described as
//!   before, under their ids.
//! - A probe of every device ends and does not panic, for the found devices and for those before
//!   the damage.
//!
//! `HOLDFAST_VARIANTS` is the number of damaged trees; `HOLDFAST_SEED` selects others. A failure
//! names its variant, and `HOLDFAST_VARIANT` runs only that one.

use crate::hardware::captures::archive::{captures, copy_tree, folder};
use holdfast::cli::discover::document;
use holdfast::domain::{
    CharPath, Device, DeviceClass, DeviceId, MigStrategy, PciAddress, ResourceSpec, Select,
};
use holdfast::hardware::{Discovery, defaults, discover, scan, signals};
use holdfast::host::HostRoot;
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Repeats the same variants in every run; another seed gives others.
const SEED: u64 = 8_212_771_320_174_923_019;
/// The number of variants in a default run.
const VARIANTS: u64 = 300;
/// A scan takes milliseconds. A scan that takes this long waits for an event that will not come.
const SCAN_DEADLINE: Duration = Duration::from_secs(120);
const DEVICES: &str = "sys/bus/pci/devices";

/// Entries that discovery reads deliberately: much of the damage is done to these.
const READ: [&str; 38] = [
    "vendor",
    "device",
    "class",
    "uevent",
    "driver",
    "physfn",
    "virtfn",
    "iommu_group",
    "numa_node",
    "local_cpulist",
    "cpulist",
    "sriov_",
    "net",
    "infiniband",
    "ibdev",
    "node_guid",
    "link_layer",
    "nvme",
    "serial",
    "model",
    "wwid",
    "drm",
    "card",
    "renderD",
    "unique_id",
    "properties",
    "information",
    "fpga_region",
    "dfl-port",
    "config",
    "power",
    "aer_dev_",
    "link_",
    "state",
    "phys_state",
    "flags",
    "carrier",
    "errors",
];

/// A tree that can be damaged and restored.
struct Tree {
    name: String,
    root: PathBuf,
    /// The entries that can be damaged, relative to the root.
    entries: Vec<PathBuf>,
    /// The indices of the entries that discovery reads deliberately.
    read: Vec<usize>,
    /// The indices of the functions' own entries: without one, the function is absent.
    places: Vec<usize>,
    /// The indices of the entries that affect one function only.
    inside: Vec<usize>,
    addresses: BTreeSet<PciAddress>,
    /// The discovery of the undamaged tree.
    whole: Arc<Discovery>,
    /// The ids that a daemon remembers from the undamaged tree.
    remembered: BTreeMap<String, DeviceId>,
    _dir: tempfile::TempDir,
}

impl Tree {
    fn new(name: &str, dir: tempfile::TempDir) -> Self {
        let root = dir.path().join("root");
        let mut entries = Vec::new();
        walk(&root, Path::new(""), &mut entries);
        entries.sort();
        let is_read = |path: &Path| {
            let name = path.file_name().unwrap().to_string_lossy();
            READ.iter().any(|read| name.starts_with(read)) || name.parse::<PciAddress>().is_ok()
        };
        let indices = |chosen: &dyn Fn(&Path) -> bool| {
            (0..entries.len()).filter(|index| chosen(&entries[*index])).collect::<Vec<_>>()
        };
        let (read, inside) = (indices(&is_read), indices(&|path| function_of(path).is_some()));
        let places = indices(&|path| path.parent() == Some(Path::new(DEVICES)));
        let whole = look(&root, &BTreeMap::new());
        let remembered =
            whole.devices.iter().map(|device| (device.key.clone(), device.id.clone())).collect();
        let addresses = addresses(&root);
        Tree {
            name: name.to_owned(),
            root,
            entries,
            read,
            places,
            inside,
            addresses,
            whole: Arc::new(whole),
            remembered,
            _dir: dir,
        }
    }

    /// One of the entries; with `confined` one inside of a function's folder, if there is any.
    fn entry(&self, random: &mut Random, confined: bool) -> &Path {
        let chosen = match random.below(4) {
            _ if confined => &self.inside,
            0 => &self.places,
            1 => &self.read,
            _ => return &self.entries[random.below(self.entries.len())],
        };
        let index = if chosen.is_empty() {
            random.below(self.entries.len())
        } else {
            chosen[random.below(chosen.len())]
        };
        &self.entries[index]
    }
}

fn walk(root: &Path, rel: &Path, entries: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root.join(rel)).unwrap() {
        let entry = entry.unwrap();
        let below = rel.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            walk(root, &below, entries);
        }
        entries.push(below);
    }
}

fn addresses(root: &Path) -> BTreeSet<PciAddress> {
    HostRoot::new(root).entries(DEVICES).iter().filter_map(|name| name.parse().ok()).collect()
}

fn trees() -> Vec<Tree> {
    let simulated = folder();
    SimNode::create(simulated.path().join("root")).unwrap();
    let mut trees = vec![Tree::new("simulated", simulated)];
    for capture in captures().unwrap_or_default() {
        let dir = folder();
        copy_tree(&capture.root, &dir.path().join("root"));
        trees.push(Tree::new(&capture.name, dir));
    }
    trees
}

/// Discovers with resources that select everything, after the default ones.
fn look(root: &Path, remembered: &BTreeMap<String, DeviceId>) -> Discovery {
    let root = HostRoot::new(root);
    let mut specs: Vec<Arc<ResourceSpec>> =
        defaults::specs(&scan(&root), MigStrategy::None).into_iter().map(Arc::new).collect();
    for class in ["gpu", "fpga", "rdma", "nic", "nvme", "accelerator", "char"] {
        let name = format!("example.com/{class}").parse().unwrap();
        let class: DeviceClass = serde_json::from_str(&format!("\"{class}\"")).unwrap();
        let glob = |host: &str| CharPath {
            host: host.into(),
            container: None,
            permissions: "rw".into(),
            udev: Vec::new(),
        };
        let paths = if class == DeviceClass::Char {
            vec![glob("/dev/*"), glob("/dev/*/*")]
        } else {
            Vec::new()
        };
        specs.push(Arc::new(ResourceSpec {
            class,
            select: Select::default(),
            paths,
            ..ResourceSpec::orphan(name)
        }));
    }
    let found = discover(&root, &specs, remembered);
    drop(document(&root, &found, true));
    found
}

/// The damage of a tree, and the steps to undo it.
#[derive(Default)]
struct Damage {
    done: Vec<Done>,
    words: Vec<String>,
}

struct Done {
    /// The path of the entry; the damage may have put another one there.
    path: PathBuf,
    /// The path where the original is kept; `None` where there was no entry.
    kept: Option<PathBuf>,
}

impl Damage {
    /// Moves the entry at `path` away.
    fn take(&mut self, tree: &Tree, rel: &Path, how: &str) -> Option<PathBuf> {
        let path = tree.root.join(rel);
        path.symlink_metadata().ok()?;
        let kept = tree.root.with_file_name(format!("kept{}", self.done.len()));
        fs::rename(&path, &kept).unwrap();
        self.done.push(Done { path, kept: Some(kept.clone()) });
        self.words.push(format!("{} {how}", rel.display()));
        Some(kept)
    }

    fn put_text(
        &mut self,
        tree: &Tree,
        rel: &Path,
        how: &str,
        text: impl FnOnce(Vec<u8>) -> Vec<u8>,
    ) {
        if let Some(kept) = self.take(tree, rel, how) {
            fs::write(tree.root.join(rel), text(text_of(&kept))).unwrap();
        }
    }

    /// Damages one entry.
    fn do_one(&mut self, tree: &Tree, confined: bool, random: &mut Random) {
        let rel = tree.entry(random, confined);
        let other = tree.entry(random, false);
        let (path, place) = (tree.root.join(rel), random.below(4096));
        match random.below(10) {
            0 | 1 => drop(self.take(tree, rel, "is gone")),
            2 => self.put_text(tree, rel, "is empty", |_| Vec::new()),
            3 => self.put_text(tree, rel, "is cut off", |text| {
                text[..place.min(text.len() / 2)].to_vec()
            }),
            4 => {
                let noise = (0..place % 200).map(|_| random.number().to_le_bytes()[0]).collect();
                self.put_text(tree, rel, "is noise", |_| noise);
            }
            5 => {
                let text = text_of(&tree.root.join(other));
                self.put_text(tree, rel, &format!("has the text of {}", other.display()), |_| text);
            }
            6 => {
                let numbers = [
                    "0",
                    "-1",
                    "4294967296",
                    "0xffffffff",
                    "18446744073709551616",
                    "????",
                    "../../..",
                    "0-4294967295",
                ];
                let text = numbers[place % numbers.len()];
                self.put_text(tree, rel, &format!("says {text}"), |_| text.into());
            }
            7 => {
                if self.take(tree, rel, "is a pipe").is_some() {
                    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
                }
            }
            8 => {
                let targets = [
                    rel.file_name().unwrap().into(),
                    PathBuf::from("../../../../../nowhere/0000:ff:1f.7"),
                    back_to(rel, other),
                ];
                let target = &targets[place % targets.len()];
                if self.take(tree, rel, &format!("leads to {}", target.display())).is_some() {
                    symlink(target, &path).unwrap();
                }
            }
            _ => {
                let name = rel.file_name().unwrap().to_string_lossy();
                let names = [
                    format!("{name}0"),
                    format!("{name} (copy)"),
                    name.replace('0', "1"),
                    name.to_uppercase(),
                    "0000:ff:1f.7".into(),
                ];
                let renamed = rel.with_file_name(&names[place % names.len()]);
                if tree.root.join(&renamed).symlink_metadata().is_err()
                    && let Some(kept) =
                        self.take(tree, rel, &format!("is called {}", renamed.display()))
                {
                    // The kept entry is the original, so it is moved to its new name, and moved
                    // back before the other steps are undone.
                    let path = tree.root.join(renamed);
                    fs::rename(&kept, &path).unwrap();
                    self.done.push(Done { path: kept, kept: Some(path) });
                }
            }
        }
    }

    fn mend(self) {
        for Done { path, kept } in self.done.into_iter().rev() {
            match path.symlink_metadata() {
                Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path).unwrap(),
                Ok(_) => fs::remove_file(&path).unwrap(),
                Err(_) => {}
            }
            if let Some(kept) = kept {
                fs::rename(kept, path).unwrap();
            }
        }
    }
}

/// Empty where there is no file: the entry may be a pipe by now.
fn text_of(path: &Path) -> Vec<u8> {
    if path.is_file() { fs::read(path).unwrap_or_default() } else { Vec::new() }
}

/// The relative path from one entry to another, through the root.
fn back_to(rel: &Path, other: &Path) -> PathBuf {
    let up: PathBuf = rel.components().skip(1).map(|_| "..").collect();
    up.join(other)
}

/// The function whose folder contains an entry, directly or in a subfolder. `None` where others may
/// depend on the entry: outside of all functions, a function's own entry, and entries that connect
/// functions.
fn function_of(rel: &Path) -> Option<PciAddress> {
    let below = rel.strip_prefix("sys/devices").or_else(|_| rel.strip_prefix(DEVICES)).ok()?;
    let names: Vec<_> = below
        .components()
        .map(|component| component.as_os_str().to_string_lossy().into_owned())
        .collect();
    let at = names.iter().rposition(|name| name.parse::<PciAddress>().is_ok())?;
    let inside = names.get(at + 1)?;
    let ties = [
        "virtfn",
        "physfn",
        "iommu_group",
        "driver",
        "nvme",
        "vendor",
        "device",
        "class",
        "uevent",
    ];
    (!ties.iter().any(|tie| inside.starts_with(tie))).then(|| names[at].parse().unwrap())
}

/// The violated guarantees of a discovery in a damaged tree.
fn judge(tree: &Tree, damage: &Damage, touched: &[PathBuf], found: &Discovery) -> Vec<String> {
    let mut wrong = Vec::new();
    let unique = |names: Vec<&str>, what: &str, wrong: &mut Vec<String>| {
        if names.iter().collect::<BTreeSet<_>>().len() != names.len() {
            wrong.push(format!("two devices share {what}"));
        }
    };
    unique(found.devices.iter().map(|device| device.id.as_str()).collect(), "an id", &mut wrong);
    unique(found.devices.iter().map(|device| device.key.as_str()).collect(), "a key", &mut wrong);
    let now = addresses(&tree.root);
    let renamed = damage.words.iter().any(|word| word.contains("is called"));
    for device in &found.devices {
        let Some(function) = &device.pci else { continue };
        if !now.contains(&function.address)
            || (!renamed && !tree.addresses.contains(&function.address))
        {
            wrong.push(format!("{} is invented", function.address));
        }
    }
    let outside = |device: &Device| {
        let is_odd = |path: &str| {
            !path.starts_with("/dev/")
                || path.split('/').any(|part| part == "..")
                || path.contains('\0')
        };
        device.nodes.iter().any(|node| is_odd(&node.host) || is_odd(&node.container))
    };
    wrong.extend(
        found
            .devices
            .iter()
            .filter(|device| outside(device))
            .map(|device| format!("{}: a node outside of /dev", device.id)),
    );
    // If all damage is inside of functions, it affects only these.
    let inside: Option<BTreeSet<PciAddress>> = touched.iter().map(|rel| function_of(rel)).collect();
    if let Some(inside) = inside {
        let elsewhere = |device: &&Arc<Device>| {
            device.pci.as_ref().is_some_and(|function| !inside.contains(&function.address))
        };
        let before: BTreeMap<&str, &Arc<Device>> = tree
            .whole
            .devices
            .iter()
            .filter(elsewhere)
            .map(|device| (device.key.as_str(), device))
            .collect();
        let after: BTreeMap<&str, &Arc<Device>> = found
            .devices
            .iter()
            .filter(elsewhere)
            .map(|device| (device.key.as_str(), device))
            .collect();
        for key in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
            if before.get(key) != after.get(key) {
                wrong.push(format!(
                    "{key} changed with the damage of another function: {:?} to {:?}",
                    before.get(key),
                    after.get(key)
                ));
            }
        }
    }
    wrong
}

type Order = (PathBuf, Arc<BTreeMap<String, DeviceId>>, Arc<Discovery>);

/// Discovers on a separate thread, so that a hanging scan fails the test and does not hang it.
struct Looker {
    orders: Sender<Order>,
    answers: Receiver<Result<Discovery, String>>,
}

impl Looker {
    fn start() -> Self {
        let (orders, inbox) = channel::<Order>();
        let (outbox, answers) = channel();
        std::thread::spawn(move || {
            for (root, remembered, whole) in inbox {
                let found = catch_unwind(AssertUnwindSafe(|| {
                    let found = look(&root, &remembered);
                    let root = HostRoot::new(&root);
                    found
                        .devices
                        .iter()
                        .chain(&whole.devices)
                        .for_each(|device| drop(signals(&root, device)));
                    found
                }));
                let said = |panic: Box<dyn std::any::Any + Send>| {
                    let text = panic.downcast_ref::<String>().cloned();
                    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                        .unwrap_or_default()
                };
                if outbox.send(found.map_err(said)).is_err() {
                    return;
                }
            }
        });
        Looker { orders, answers }
    }

    fn look(
        &self,
        tree: &Tree,
        remembered: BTreeMap<String, DeviceId>,
    ) -> Result<Discovery, String> {
        self.orders
            .send((tree.root.clone(), Arc::new(remembered), Arc::clone(&tree.whole)))
            .unwrap();
        match self.answers.recv_timeout(SCAN_DEADLINE) {
            Ok(answer) => answer.map_err(|panic| format!("the scan panics: {panic}")),
            Err(_) => Err(format!("the scan does not end in {SCAN_DEADLINE:?}")),
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn no_damage_stops_a_scan_or_invents_a_device() {
    let seed = number("HOLDFAST_SEED").unwrap_or(SEED);
    let variants = number("HOLDFAST_VARIANTS").unwrap_or(VARIANTS);
    let chosen = number("HOLDFAST_VARIANT").map_or(0..variants, |one| one..one + 1);
    let (trees, looker) = (trees(), Looker::start());
    let (mut failures, mut confined) = (Vec::new(), 0);
    for variant in chosen.clone() {
        let tree = &trees[usize::try_from(variant).unwrap() % trees.len()];
        // Each variant has its own random sequence: it can be repeated without the earlier ones.
        let mut random = Random::new(seed ^ Random::new(variant).number());
        let mut damage = Damage::default();
        // Mostly little damage; in some variants hardly anything stays intact.
        let wanted = if random.chance(0.05) { 200 } else { 1 + random.below(4) };
        let within_functions = random.chance(0.4);
        let mut touched = Vec::new();
        for _ in 0..wanted {
            let done = damage.done.len();
            damage.do_one(tree, within_functions, &mut random);
            touched.extend(
                damage
                    .done
                    .get(done)
                    .map(|done| done.path.strip_prefix(&tree.root).unwrap().to_owned()),
            );
        }
        let remembered =
            if random.chance(0.5) || touched.iter().all(|rel| function_of(rel).is_some()) {
                tree.remembered.clone()
            } else {
                BTreeMap::new()
            };
        confined += usize::from(touched.iter().all(|rel| function_of(rel).is_some()));
        let wrong = match looker.look(tree, remembered) {
            Ok(found) => judge(tree, &damage, &touched, &found),
            Err(why) => vec![why],
        };
        if !wrong.is_empty() {
            failures.push(format!(
                "variant {variant}, {}: {}\n    {}",
                tree.name,
                wrong.join("\n  "),
                damage.words.join("\n    ")
            ));
        }
        let hangs = wrong.iter().any(|why| why.contains("does not end"));
        damage.mend();
        assert!(!hangs, "{}", failures.join("\n"));
    }
    // The trees are restored: each result depended on the damage of its variant alone.
    for tree in &trees {
        assert!(*tree.whole == look(&tree.root, &BTreeMap::new()), "{} was not mended", tree.name);
    }
    println!(
        "{} damaged trees of {} machines, seed {seed}; in {confined} the damage was inside of functions",
        chosen.count(),
        trees.len()
    );
    assert!(
        failures.is_empty(),
        "{} of {variants} variants, seed {seed}:\n{}",
        failures.len(),
        failures.join("\n")
    );
}
