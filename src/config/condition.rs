//! Conditions of `[[node]]` sections on the node itself: its GPUs, its firmware, its labels.
//!
//! A fact that cannot be read is an error, never a section that does not match. A running daemon
//! then keeps its configuration.

use super::error::{hidden, unknown};
use super::labels::{ComparedLabels, LabelFile, Labels};
use super::node::Node;
use super::tree::{Is, Value};
use crate::domain::NodeLabels;
use crate::host::HostRoot;
use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

/// Whether a condition holds, and the reason.
pub(super) type Outcome = Result<(bool, String), NoResult>;

/// Why a condition has no result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoResult {
    /// It is invalid.
    Invalid(String),
    /// A fact of the node cannot be read now.
    Unread(String),
}

impl NoResult {
    /// For the key of a condition.
    pub(super) fn unread(key: &str, why: impl std::fmt::Display) -> Self {
        NoResult::Unread(format!("`{key}` cannot be evaluated: {why}"))
    }
}

impl From<String> for NoResult {
    fn from(problem: String) -> Self {
        NoResult::Invalid(problem)
    }
}

impl From<&str> for NoResult {
    fn from(problem: &str) -> Self {
        NoResult::Invalid(problem.to_owned())
    }
}

const PCI: &str = "sys/bus/pci/devices";
const GPUS: &str = "proc/driver/nvidia/gpus";
const DMI: &str = "sys/class/dmi/id";

/// The fields of the firmware that every user may read.
const DMI_FIELDS: [&str; 18] = [
    "bios_date",
    "bios_release",
    "bios_vendor",
    "bios_version",
    "board_asset_tag",
    "board_name",
    "board_vendor",
    "board_version",
    "chassis_asset_tag",
    "chassis_type",
    "chassis_vendor",
    "chassis_version",
    "ec_firmware_release",
    "product_family",
    "product_name",
    "product_sku",
    "product_version",
    "sys_vendor",
];

/// A PCI function.
#[derive(Debug, Clone)]
struct Function {
    address: String,
    /// Vendor and device, `10de:2330`.
    id: String,
    is_display: bool,
    is_virtual: bool,
    driver: Option<String>,
}

/// The facts of a node, each read once for all sections.
#[derive(Debug)]
pub(super) struct NodeFacts<'a> {
    pub(super) node: &'a Node,
    pub(super) root: HostRoot,
    functions: OnceCell<Result<Vec<Function>, String>>,
    /// The models of the GPUs of NVIDIA's driver, by address.
    models: OnceCell<Result<BTreeMap<String, String>, String>>,
    /// The file with the labels; `None` for a node of another name.
    label_file: Option<LabelFile>,
    labels: OnceCell<Result<Option<Labels>, String>>,
    /// The keys that conditions have compared.
    compared: RefCell<BTreeSet<String>>,
}

impl<'a> NodeFacts<'a> {
    /// `labels` is the configured source of the node's labels.
    pub(super) fn of(node: &'a Node, labels: &NodeLabels) -> Self {
        NodeFacts {
            node,
            root: HostRoot::new(node.root()),
            functions: OnceCell::new(),
            models: OnceCell::new(),
            label_file: node.labels(labels),
            labels: OnceCell::new(),
            compared: RefCell::default(),
        }
    }

    /// The labels that were compared so far.
    pub(super) fn compared(self) -> ComparedLabels {
        let compared = ComparedLabels {
            file: self.label_file,
            keys: self.compared.into_inner(),
            values: None,
        };
        let labels = self.labels.into_inner().and_then(Result::ok).flatten();
        let values = labels.map(|labels| compared.only_compared(labels));
        ComparedLabels { values, ..compared }
    }

    fn functions(&self) -> Result<&[Function], String> {
        let read = || {
            let root = self.looking("sys/bus")?;
            let of = |address: String| function(&root, address);
            let functions = root.entries(PCI).into_iter().map(of).collect();
            complete(&root, functions)
        };
        self.functions.get_or_init(read).as_deref().map_err(Clone::clone)
    }

    fn models(&self) -> Result<&BTreeMap<String, String>, String> {
        let read = || {
            let root = self.looking("proc")?;
            let of = |address: String| {
                let text = root.read(&format!("{GPUS}/{address}/information"))?;
                let model = text
                    .lines()
                    .find_map(|line| line.strip_prefix("Model")?.trim_start().strip_prefix(':'))?;
                Some((address, model.trim().to_owned()))
            };
            let models = root.entries(GPUS).into_iter().filter_map(of).collect();
            complete(&root, models)
        };
        self.models.get_or_init(read).as_ref().map_err(Clone::clone)
    }

    /// The labels; `None` while they are unknown.
    fn labels(&self, file: &LabelFile) -> Result<Option<&Labels>, String> {
        self.labels.get_or_init(|| file.read()).as_ref().map(Option::as_ref).map_err(Clone::clone)
    }

    /// The root for a read below this folder, which every node has.
    fn looking(&self, folder: &str) -> Result<HostRoot, String> {
        let root = self.root.recording();
        let is_there = root.is_dir(folder);
        complete(&root, ())?;
        if is_there {
            Ok(root)
        } else {
            Err(format!("/{folder} is missing; mount it from the host, below `--host-root`"))
        }
    }
}

/// The PCI function at an address. Some kernels let a read of `uevent` wait for the device's
/// driver. Only a capture may lack the other files.
fn function(root: &HostRoot, address: String) -> Function {
    let dir = format!("{PCI}/{address}");
    let file = |name: &str| root.read(&format!("{dir}/{name}"));
    let (id, class, driver) = if root.exists(&format!("{dir}/vendor")) {
        let hex = |name| Some(file(name)?.trim_start_matches("0x").to_owned());
        let id = || Some(format!("{}:{}", hex("vendor")?, hex("device")?));
        (id(), hex("class"), None)
    } else {
        let uevent = file("uevent").unwrap_or_default();
        let field = |name: &str| {
            let value = uevent.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.map(str::to_owned)
        };
        (field("PCI_ID"), field("PCI_CLASS"), field("DRIVER"))
    };
    let class = class.and_then(|class| u32::from_str_radix(&class, 16).ok());
    Function {
        id: id.unwrap_or_default().to_ascii_lowercase(),
        is_display: class.is_some_and(|class| class >> 16 == 0x03),
        is_virtual: root.link_target(&format!("{dir}/physfn")).is_some(),
        driver: root.link_name(&format!("{dir}/driver")).or(driver),
        address,
    }
}

/// The result, unless a read failed.
fn complete<T>(root: &HostRoot, result: T) -> Result<T, String> {
    root.take_failures().first().map_or(Ok(result), |failure| Err(failure.to_string()))
}

/// A glob that ignores case.
pub(super) struct Glob<'a> {
    pub(super) text: &'a str,
    glob: glob::Pattern,
}

impl Glob<'_> {
    pub(super) fn matches(&self, text: &str) -> bool {
        let options = glob::MatchOptions { case_sensitive: false, ..glob::MatchOptions::default() };
        self.glob.matches_with(text, options)
    }
}

/// One glob or a list of globs. `shape` describes the value of this key.
pub(super) fn globs<'a>(key: &str, value: &'a Value, shape: &str) -> Result<Vec<Glob<'a>>, String> {
    let list = match &value.is {
        Is::Text(_) => std::slice::from_ref(value),
        Is::List(list) if !list.is_empty() => list.as_slice(),
        _ => return Err(shape.to_owned()),
    };
    let glob = |value: &'a Value| {
        let text = value.as_text().ok_or_else(|| shape.to_owned())?;
        let glob = glob::Pattern::new(text).map_err(|error| {
            format!("the pattern `{}` of `{key}` is not a valid glob: {error}", hidden(text))
        })?;
        Ok(Glob { text, glob })
    };
    list.iter().map(glob).collect()
}

/// Whether the node has a GPU of one of these models, or a PCI function with one of these ids.
pub(super) fn by_gpu(value: &Value, facts: &NodeFacts<'_>) -> Outcome {
    let shape = "`match.gpu` must be a list of models or PCI ids, such as [\"NVIDIA H100*\", \
                 \"10de:2330\"]";
    let globs = globs("match.gpu", value, shape)?;
    let cannot = |why: String| NoResult::unread("match.gpu", why);
    let (ids, models): (Vec<&Glob<'_>>, Vec<&Glob<'_>>) =
        globs.iter().partition(|glob| is_pci_id(glob.text));
    let functions = facts.functions().map_err(cannot)?;
    for id in ids {
        if functions.iter().any(|function| function.id.eq_ignore_ascii_case(id.text)) {
            return Ok((true, format!("a device has the PCI id `{}`", id.text)));
        }
    }
    if models.is_empty() {
        return Ok((false, "no device has one of its PCI ids".into()));
    }
    let known = facts.models().map_err(cannot)?;
    for model in known.values() {
        if let Some(glob) = models.iter().find(|glob| glob.matches(model)) {
            return Ok((true, format!("the GPU `{model}` matches `{}`", glob.text)));
        }
    }
    // A GPU without its driver has the model of another one with its PCI id.
    let known_ids: BTreeSet<&str> = functions
        .iter()
        .filter(|function| known.contains_key(&function.address))
        .map(|function| &*function.id)
        .collect();
    let lacks_model = |function: &&Function| {
        function.is_display
            && !function.is_virtual
            && function.id.starts_with("10de:")
            && function.driver.as_deref().is_none_or(|driver| driver == "nvidia")
            && !known_ids.contains(&*function.id)
    };
    if let Some(Function { address, id, .. }) = functions.iter().find(lacks_model) {
        return Err(cannot(format!(
            "the model of the GPU {address} is unknown, because NVIDIA's driver does not have it; \
             load the driver before, or use the PCI id `{id}`, which needs no driver"
        )));
    }
    let mut names: Vec<&str> = known.values().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    Ok((
        false,
        match names[..] {
            [] => "this node has no GPU of NVIDIA's driver".into(),
            _ => format!("its GPUs are `{}`", names.join("`, `")),
        },
    ))
}

/// `10de:2330`.
fn is_pci_id(text: &str) -> bool {
    let is_hex = |part: &str| part.len() == 4 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    text.split_once(':').is_some_and(|(vendor, device)| is_hex(vendor) && is_hex(device))
}

/// Whether each of these fields of the firmware matches one of its patterns.
pub(super) fn by_dmi(value: &Value, facts: &NodeFacts<'_>) -> Outcome {
    let shape = "`match.dmi` must be a table of fields of /sys/class/dmi/id and their patterns, \
                 such as { product_name = [\"p5.*\"] }";
    let fields = value.as_table().filter(|table| !table.0.is_empty()).ok_or(shape)?;
    let mut outcomes = Vec::new();
    for entry in &fields.0 {
        let field = &*entry.key;
        if !DMI_FIELDS.contains(&field) {
            return Err(unknown("key", field, &DMI_FIELDS).into());
        }
        let globs = globs("match.dmi", &entry.value, shape)?;
        let cannot = |why: String| NoResult::unread("match.dmi", why);
        let root = facts.looking("sys/class").map_err(cannot)?;
        let text = root.read(&format!("{DMI}/{field}"));
        complete(&root, ()).map_err(cannot)?;
        outcomes.push(compared(&format!("the DMI field `{field}`"), text.as_deref(), &globs));
    }
    Ok(all(outcomes))
}

/// Whether each of these labels matches one of its patterns.
pub(super) fn by_label(value: &Value, facts: &NodeFacts<'_>) -> Outcome {
    let shape = "`match.label` must be a table of labels and their patterns, such as \
                 { \"example.com/pool\" = [\"gpu-*\"] }";
    let wanted = value.as_table().filter(|table| !table.0.is_empty()).ok_or(shape)?;
    let mut all_globs = Vec::new();
    for entry in &wanted.0 {
        all_globs.push((&entry.key, globs("match.label", &entry.value, shape)?));
    }
    facts.compared.borrow_mut().extend(all_globs.iter().map(|(key, _)| (**key).to_owned()));
    let Some(file) = &facts.label_file else {
        return Ok((false, "the labels of a node of another name are unknown".into()));
    };
    let labels = facts.labels(file).map_err(|why| NoResult::unread("match.label", why))?;
    let Some(labels) = labels else {
        let why = "the labels of the node are unknown until the API server has answered once";
        return Ok((false, why.into()));
    };
    let outcomes = all_globs.iter().map(|(key, globs)| {
        let value = labels.get(&**key).map(String::as_str);
        // NVIDIA's plugin and others treat an empty label as none.
        let takes_none = globs.iter().any(|glob| glob.text.is_empty());
        if takes_none && value.is_none_or(str::is_empty) {
            return (true, format!("the label `{key}` is empty or does not exist"));
        }
        compared(&format!("the label `{key}`"), value, globs)
    });
    Ok(all(outcomes))
}

fn compared(what: &str, text: Option<&str>, globs: &[Glob<'_>]) -> (bool, String) {
    let Some(text) = text else { return (false, format!("{what} does not exist")) };
    match globs.iter().find(|glob| glob.matches(text)) {
        Some(glob) => (true, format!("{what} is `{text}` and matches `{}`", glob.text)),
        None => (false, format!("{what} is `{text}` and matches none of its patterns")),
    }
}

fn all(outcomes: impl IntoIterator<Item = (bool, String)>) -> (bool, String) {
    let (mut holds, mut why) = (true, Vec::new());
    for (one, reason) in outcomes {
        holds &= one;
        why.push(reason);
    }
    (holds, why.join(", and "))
}

#[cfg(test)]
#[path = "condition_tests.rs"]
mod tests;
