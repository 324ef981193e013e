//! Copies of a captured tree with the same hardware at other addresses or in another order of
//! discovery.

use holdfast::domain::PciAddress;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// The classes that discovery reads; the rest of a tree is not copied.
const CLASSES: [&str; 7] =
    ["net", "infiniband", "infiniband_verbs", "infiniband_mad", "nvme", "drm", "fpga_region"];
/// The largest file that is copied, in bytes.
const FILE_BYTES_MAX: u64 = 4096;

/// The depth of copied folders below a function.
const DEPTH: u32 = 7;
/// The folders that are read: most of a tree is not.
const FOLDERS: [&str; 12] = [
    "net",
    "infiniband",
    "nvme",
    "drm",
    "fpga",
    "accel",
    "ve",
    "virtio",
    "nvidia",
    "mdev",
    "vdpa",
    "iommu_group",
];
/// The facts that identify a device among others of its kind, by the name of the file or the line.
const IDENTITIES: [&str; 6] = ["unique_id", "serial", "model", "node_guid", "wwid", "GPU UUID"];

/// The folder of a mediated device.
const UUID_LENGTH: usize = 36;

/// The difference between a copy and the original.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// Other domains, buses, NUMA nodes, and names of network and RDMA devices.
    Elsewhere,
    /// The same machine after a boot with other driver timing: numbers are swapped in pairs.
    Renumbered,
    /// The same machine while no identifying fact can be read yet.
    Anonymous,
}

impl Mapping {
    pub(crate) fn numa(&self, node: u64) -> u64 {
        if *self == Mapping::Elsewhere { node + 3 } else { node }
    }

    /// The content of a file with this name; `None` where the file is absent.
    fn file(&self, name: &str, text: &str) -> Option<String> {
        match self {
            Mapping::Anonymous if IDENTITIES.contains(&name) => None,
            Mapping::Anonymous if name == "information" => {
                let lines = text
                    .lines()
                    .filter(|line| !IDENTITIES.iter().any(|identity| line.starts_with(identity)));
                Some(lines.map(|line| format!("{line}\n")).collect())
            }
            // The only number without a prefix in a text.
            Mapping::Renumbered if name == "information" => {
                let swap = |line: &str| match line
                    .rsplit_once(' ')
                    .and_then(|(name, minor)| Some((name, minor.parse::<u32>().ok()?)))
                {
                    Some((name, minor)) if name.starts_with("Device Minor") => {
                        format!("{name} {}\n", minor ^ 1)
                    }
                    _ => format!("{line}\n"),
                };
                Some(text.lines().map(swap).collect())
            }
            _ => Some(self.text(text)),
        }
    }

    /// Maps every word of a text: a path, a link's target, a file's content, an id.
    pub(crate) fn text(&self, text: &str) -> String {
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, ':' | '.' | '_' | '-');
        let mut out = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let end = rest.find(|c| is_word(c) != is_word(first)).unwrap_or(rest.len());
            let (word, tail) = rest.split_at(end);
            out.push_str(&if is_word(first) { self.word(word) } else { word.to_owned() });
            rest = tail;
        }
        out
    }

    fn word(&self, word: &str) -> String {
        match self {
            Mapping::Elsewhere => elsewhere(word),
            Mapping::Renumbered => renumbered(word),
            Mapping::Anonymous => word.to_owned(),
        }
    }
}

fn elsewhere(word: &str) -> String {
    // A bus of a host bridge, `pci0000:15`, and a function, `0000:15:01.0`. XOR keeps different
    // buses different.
    let (prefix, place) = word.strip_prefix("pci").map_or(("", word), |place| ("pci", place));
    let parts: Vec<&str> = place.splitn(3, ':').collect();
    let hex = |text: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&text.len()).then(|| u32::from_str_radix(text, 16).ok()).flatten()
    };
    if let [domain, bus, rest @ ..] = parts.as_slice()
        && let (Some(domain), Some(bus)) = (hex(domain, 4..=8), hex(bus, 2..=2))
        && rest.first().is_none_or(|rest| rest.len() == 4 && rest.as_bytes()[2] == b'.')
        && (prefix == "pci") == rest.is_empty()
    {
        let tail: String = rest.iter().map(|rest| format!(":{rest}")).collect();
        return format!("{prefix}{:04x}:{:02x}{tail}", domain + 0x1_a000, bus ^ 0x55);
    }
    if is_interface(word) { format!("zz-{word}") } else { word.to_owned() }
}

/// Names of network and RDMA devices in the captures.
fn is_interface(word: &str) -> bool {
    let names = ["eth", "eno", "enp", "ens", "enP", "ib", "hsi", "mlx4_", "mlx5_", "hfi1_"];
    names.iter().any(|name| {
        word.strip_prefix(name).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

fn renumbered(word: &str) -> String {
    for prefix in [
        "mlx4_",
        "mlx5_",
        "nvme",
        "renderD",
        "card",
        "eth",
        "eno",
        "ib",
        "hsi",
        "uverbs",
        "umad",
        "issm",
        "nvidia",
        "dfl-port.",
    ] {
        if let Some(rest) = word.strip_prefix(prefix) {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            if let Ok(number) = rest[..digits].parse::<u32>() {
                return format!("{prefix}{}{}", number ^ 1, &rest[digits..]);
            }
        }
    }
    word.to_owned()
}

/// Copies the files of `root` that discovery reads, with every name and text mapped.
pub(crate) fn copy(root: &Path, mapping: &Mapping) -> tempfile::TempDir {
    let copy = crate::hardware::captures::archive::folder();
    let walk = |rel: &str, depth| walk(root, copy.path(), Path::new(rel), mapping, depth);
    walk("sys/bus/pci/devices", DEPTH);
    walk("proc/driver/nvidia", 4);
    walk("dev", 2);
    for class in CLASSES {
        walk(&format!("sys/class/{class}"), 2);
    }
    for host_bridge in fs::read_dir(root.join("sys/devices")).into_iter().flatten() {
        let name = host_bridge.unwrap().file_name().into_string().unwrap();
        if name.starts_with("pci") {
            walk(&format!("sys/devices/{name}"), DEPTH);
        }
    }
    copy
}

/// `depth` counts the folders below a function; folders of functions and host bridges do not count.
fn walk(from: &Path, to: &Path, rel: &Path, mapping: &Mapping, depth: u32) {
    let source = from.join(rel);
    let Ok(metadata) = source.symlink_metadata() else { return };
    let target = to.join(mapping.text(rel.to_str().unwrap()));
    if metadata.is_symlink() {
        symlink(mapping.text(fs::read_link(&source).unwrap().to_str().unwrap()), target).unwrap();
    } else if metadata.is_dir() {
        fs::create_dir_all(&target).unwrap();
        let is_function = rel
            .file_name()
            .is_some_and(|name| name.to_str().unwrap().parse::<PciAddress>().is_ok());
        for entry in fs::read_dir(&source).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name();
            let child = rel.join(&name);
            let name = name.to_str().unwrap();
            let is_place = name.contains(':');
            let is_read = is_place
                || name.len() == UUID_LENGTH
                || FOLDERS.iter().any(|folder| name.starts_with(folder));
            if is_function && !is_read && entry.file_type().unwrap().is_dir() {
                continue;
            }
            let below = if is_place { DEPTH } else { depth.saturating_sub(1) };
            if below > 0 || !from.join(&child).is_dir() || from.join(&child).is_symlink() {
                walk(from, to, &child, mapping, below);
            }
        }
    } else if metadata.len() <= FILE_BYTES_MAX
        && let Ok(text) = fs::read_to_string(&source)
    {
        let name = rel.file_name().unwrap().to_str().unwrap();
        let node = text.trim().parse::<u64>().ok().filter(|_| name == "numa_node");
        let text = node
            .map_or_else(|| mapping.file(name, &text), |node| Some(mapping.numa(node).to_string()));
        if let Some(text) = text {
            fs::write(target, text).unwrap();
        }
    }
}
