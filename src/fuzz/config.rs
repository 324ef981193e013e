//! Configuration files, and the files of other plugins that `holdfast config import` converts.

use super::Seeds;
use super::input::Input;
use crate::config::import::{Imported, Peer, import as convert};
use crate::config::{Change, Examined, Node};
use crate::domain::is_unprintable;
use std::path::Path;

/// The folder of no node: conditions about hardware and files find nothing.
const NOWHERE: &str = "/nonexistent";

/// A file is valid, or each of its errors has a place. The effective configuration of a valid file
/// is a file with the same meaning.
pub fn config(data: &[u8]) {
    let node = Node::named("gpu-1", Path::new(NOWHERE));
    let file = Path::new("f");
    let examined = Examined::alone(data, file, &node);
    let config = match examined.config() {
        Ok(config) => config,
        Err(error) => {
            assert!(!examined.problems.is_empty(), "found only after the merge: {error}");
            let lines = data.split(|byte| *byte == b'\n').count();
            for problem in &examined.problems {
                let place = problem.line().zip(problem.column());
                let is_there = place.is_some_and(|(line, column)| line <= lines && column > 0);
                assert!(is_there || problem.line().is_none(), "{problem}");
                let text = problem.to_string();
                assert!(!text.contains(is_unprintable), "{text:?}");
            }
            return;
        }
    };
    assert!(examined.problems.is_empty(), "{:?}", examined.problems);
    let shown = examined.show(&node).expect("a valid file can be shown");
    let again = Examined::alone(shown.text.as_bytes(), file, &node);
    let again = again.config().unwrap_or_else(|error| panic!("{error}\n{}", shown.text));
    assert_eq!(again, config, "{}", shown.text);
    let change = Change::between(&config, &again);
    assert!(change.is_empty(), "{change:?}");
}

/// The shipped file without its comment signs, and a file with sections for nodes.
pub(super) fn config_seeds() -> Seeds {
    let shipped = include_str!("../../packaging/config.toml");
    let is_key = |text: &str| {
        let key = text.split_once(" = ").map_or("", |(key, _)| key);
        let is_bare = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
        text.starts_with('[') || !key.is_empty() && key.chars().all(is_bare)
    };
    let lines = shipped.lines().filter_map(|line| line.strip_prefix("# "));
    let shipped: String =
        lines.filter(|line| is_key(line)).map(|line| format!("{line}\n")).collect();
    let whole = r#"[ledger]
durability = "process-crash"
history_size = "64MiB"
[health]
poll = "10s"
fatal_xids = [48, 64]
ignore = ["no_carrier"]

[[resource]]
name = "nvidia.com/gpu"
class = "gpu"
contract = "nvidia"
nvidia = { device_list_strategy = ["envvar", "cdi-cri"], pass_device_specs = true }
select = { vendor = ["10de"], driver = ["nvidia"], vf = false, numa_node = [0, 1] }
exclude = { address = ["0000:18:00.0"] }
replicas = 4
check = { command = ["/usr/bin/check", "--all"], every = "1m" }

[[resource]]
name = "example.com/{node}"
class = "char"
paths = ["/dev/fuse", { host = "/dev/net/tun", container = "/dev/tun", permissions = "rw" }]
env = { EXAMPLE = "1" }
mounts = [{ host = "/etc/a", container = "/etc/a", read_only = true }]
"#;
    let sections = r#"[cluster]
node_labels = "api"
[[resource]]
name = "intel.com/vf"
class = "nic"
contract = "sriov"
select = { pf = ["ens1f0#0,2-5"] }
cdi = ["cri", "annotations"]
pool = 4
[[node]]
match = { name = ["gpu-*"] }
[node.nvidia]
nvml = "off"
[[node.resource]]
name = "intel.com/vf"
class = "nic"
before_start = "reset"
[[node]]
match = { gpu = ["10de:2330"], dmi = { product_name = ["p5.*"] }, label = { "a.b/c" = "d" } }
health.poll = "5s"
"#;
    vec![
        ("shipped", shipped.into_bytes()),
        ("whole", whole.as_bytes().to_vec()),
        ("sections", sections.as_bytes().to_vec()),
        ("empty", Vec::new()),
    ]
}

const PEERS: [Peer; 6] =
    [Peer::Nvidia, Peer::Sriov, Peer::RdmaShared, Peer::Generic, Peer::Smarter, Peer::Gke];

/// A key that no plugin has.
const UNKNOWN: &str = "zzUnknown";

/// Another plugin's file, after a digit for the plugin. The result is a valid configuration, each
/// resource of a JSON file is in it or in a warning, and so is a setting that the plugin does not
/// have.
pub fn import(data: &[u8]) {
    let mut input = Input::new(data);
    let peer = PEERS[usize::from(input.byte() % 6)];
    let place = input.byte();
    let Ok(text) = std::str::from_utf8(input.rest()) else { return };
    let imported = match convert(peer, text, None, None) {
        Ok(imported) => imported,
        Err(error) => {
            let sentence = error.to_string();
            assert!(!sentence.starts_with("the result is not a valid"), "{sentence}");
            assert!(!sentence.contains(is_unprintable), "{sentence:?}");
            return;
        }
    };
    is_printable(&imported);
    assert_eq!(convert(peer, text, None, None).as_ref(), Ok(&imported), "the same each time");
    let file: Option<serde_json::Value> = serde_json::from_str(text).ok();
    if let Some(file) = &file {
        has_every_resource(peer, file, &imported);
    }
    if let Some(changed) = file.and_then(|_| with_unknown(text, place)) {
        names_unknown(peer, &changed);
    }
}

fn is_printable(imported: &Imported) {
    let node = Node::named("gpu-1", Path::new(NOWHERE));
    let examined = Examined::alone(imported.toml.as_bytes(), Path::new("f"), &node);
    assert!(examined.config().is_ok(), "{:?}\n{}", examined.problems, imported.toml);
    for warning in &imported.warnings {
        assert!(!warning.contains(is_unprintable), "{warning:?}");
    }
    let is_wrong = imported.warnings.iter().any(|warning| warning.contains("left out"));
    assert!(imported.wrong == 0 || is_wrong, "{} wrong parts: {imported:?}", imported.wrong);
}

/// Each resource of a JSON file of the SR-IOV and RDMA plugins is offered, or a warning names it.
fn has_every_resource(peer: Peer, file: &serde_json::Value, imported: &Imported) {
    let list = match peer {
        Peer::Sriov => &file["resourceList"],
        Peer::RdmaShared => &file["configList"],
        _ => return,
    };
    for (index, pool) in list.as_array().into_iter().flatten().enumerate() {
        let Some(name) = pool["resourceName"].as_str() else { continue };
        let is_plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric());
        let place = format!("[{index}]");
        let is_named = |text: &String| {
            text.contains(name) || text.contains(&place) || text.contains("overrides")
        };
        assert!(
            !is_plain || is_named(&imported.toml) || imported.warnings.iter().any(is_named),
            "`{name}` was lost: {imported:#?}"
        );
    }
}

/// The text with an unknown key in one of its mappings. `None` for an object of Kubernetes, where
/// others' settings are no settings of the plugin.
fn with_unknown(text: &str, place: u8) -> Option<String> {
    if text.contains("kind") || text.contains("\\u") {
        return None;
    }
    let starts: Vec<usize> = mappings(text);
    let at = *starts.get(usize::from(place) % starts.len().max(1))?;
    let is_empty = text[at..].trim_ascii_start().starts_with('}');
    let comma = if is_empty { "" } else { "," };
    Some(format!("{}\"{UNKNOWN}\":7{comma}{}", &text[..at], &text[at..]))
}

/// The places behind each `{` of a JSON text that is not in a string.
fn mappings(text: &str) -> Vec<usize> {
    let (mut in_text, mut is_escaped) = (false, false);
    let mut starts = Vec::new();
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if in_text => is_escaped = true,
            '"' => in_text = !in_text,
            '{' if !in_text => starts.push(at + 1),
            _ => {}
        }
    }
    starts
}

fn names_unknown(peer: Peer, text: &str) {
    let Ok(imported) = convert(peer, text, None, None) else { return };
    // A part that is left out is named as a whole, and a map of names may have any key.
    let is_named = |text: &String| text.contains(UNKNOWN);
    let is_left_out = |text: &String| text.contains("left out");
    assert!(
        is_named(&imported.toml)
            || imported.warnings.iter().any(|it| is_named(it) || is_left_out(it)),
        "an unknown setting was ignored: {text}\n{imported:#?}"
    );
}

/// The sources of the golden files, and a file of each plugin in JSON.
pub(super) fn import_seeds() -> Seeds {
    let with = |peer: u8, text: &str| [&[b'0' + peer, b'0'], text.as_bytes()].concat();
    vec![
        ("nvidia-mps", with(0, include_str!("../config/import/golden/nvidia-mps.source"))),
        ("nvidia-shared", with(0, include_str!("../config/import/golden/nvidia-shared.source"))),
        (
            "nvidia-json",
            with(
                0,
                r#"{"version":"v1","flags":{"migStrategy":"single","plugin":{"passDeviceSpecs":true,"deviceIDStrategy":"index"}},"sharing":{"timeSlicing":{"renameByDefault":true,"resources":[{"name":"nvidia.com/gpu","replicas":4}]}}}"#,
            ),
        ),
        ("sriov", with(1, include_str!("../config/import/golden/sriov-pools.source"))),
        (
            "sriov-small",
            with(
                1,
                r#"{"resourceList":[{"resourceName":"a","selectors":{"vendors":["8086"],"drivers":["vfio-pci"]}}]}"#,
            ),
        ),
        ("rdma", with(2, include_str!("../config/import/golden/rdma-shared-hcas.source"))),
        (
            "rdma-small",
            with(
                2,
                r#"{"configList":[{"resourceName":"a","rdmaHcaMax":3,"selectors":{"ifNames":["ib0"]}}]}"#,
            ),
        ),
        ("generic", with(3, include_str!("../config/import/golden/generic-devices.source"))),
        (
            "generic-json",
            with(
                3,
                r#"{"devices":[{"name":"fuse","groups":[{"count":2,"paths":[{"path":"/dev/fuse"}]}]}]}"#,
            ),
        ),
        ("smarter", with(4, include_str!("../config/import/golden/smarter-conf.source"))),
        ("smarter-json", with(4, r#"[{"devicematch":"^fuse$","nummaxdevices":20}]"#)),
        ("gke", with(5, include_str!("../config/import/golden/gke-daemonset.source"))),
        ("gke-shared", with(5, include_str!("../config/import/golden/gke-shared.source"))),
        (
            "gke-json",
            with(
                5,
                r#"{"GPUPartitionSize":"1g.5gb","GPUSharingConfig":{"GPUSharingStrategy":"time-sharing","MaxSharedClientsPerGPU":4},"HealthCriticalXid":[48]}"#,
            ),
        ),
    ]
}
