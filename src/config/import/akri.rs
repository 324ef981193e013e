//! Akri: a Configuration whose discovery handler is `udev` (project-akri/akri:
//! `discovery-handlers/udev`, `shared/src/akri/configuration.rs`).
//!
//! A rule becomes a path with properties of udev. Akri matches the values of `ATTRS` as regular
//! expressions and all others as globs. A part of a rule without an equivalent leaves out the rule:
//! without that part more nodes would match. The others stay, since a node matches any of them.

use super::super::sharing::SHARES_MAX;
use super::super::tree::{Is, Table, Value};
use super::doc::Doc;
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::generic::glob;
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text};
use crate::domain::template;

/// Every key that is read. Those of `discoveryDetails` are in a text.
pub(super) const KEYS: &[&str] = &[
    "metadata.name",
    "spec.capacity",
    "spec.brokerProperties",
    "spec.brokerSpec",
    "spec.instanceServiceSpec",
    "spec.configurationServiceSpec",
    "spec.discoveryHandler.name",
    "spec.discoveryHandler.discoveryDetails",
    "spec.discoveryHandler.discoveryDetails.udevRules",
    "spec.discoveryHandler.discoveryDetails.groupRecursive",
    "spec.discoveryHandler.discoveryDetails.permissions",
    "spec.discoveryHandler.discoveryProperties",
];

/// The subsystems whose nodes are known, with a glob for all of them. The part before the last
/// slash is the folder of the nodes.
const SUBSYSTEMS: [(&str, &str); 10] = [
    ("video4linux", "/dev/video*"),
    ("media", "/dev/media*"),
    ("tty", "/dev/tty*"),
    ("hidraw", "/dev/hidraw*"),
    ("i2c-dev", "/dev/i2c-*"),
    ("spidev", "/dev/spidev*"),
    ("gpio", "/dev/gpiochip*"),
    ("sound", "/dev/snd/*"),
    ("input", "/dev/input/*"),
    ("drm", "/dev/dri/*"),
];
/// Names of the kernel whose nodes are in a folder, by their beginning.
const FOLDERS: [(&str, &str); 8] = [
    ("controlC", "snd/"),
    ("pcmC", "snd/"),
    ("midiC", "snd/"),
    ("event", "input/"),
    ("mouse", "input/"),
    ("js", "input/"),
    ("renderD", "dri/"),
    ("card", "dri/"),
];
/// Properties that the kernel states and udev does not record.
const OF_KERNEL: [&str; 7] =
    ["DEVNAME", "DEVPATH", "DEVTYPE", "MAJOR", "MINOR", "SUBSYSTEM", "ACTION"];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let Some(file) = &source.file else {
        return Err(ImportError::new("the manifest has no Configuration of Akri"));
    };
    let root = Field::root(file, Decoder::Yaml);
    let metadata = root.get("metadata");
    let name = metadata.as_ref().and_then(|metadata| metadata.get("name"));
    let name = name.ok_or_else(|| root.wrong("a Configuration with `metadata.name`"))?.text()?;
    metadata.iter().for_each(Field::read_all);
    let spec = root.get("spec").ok_or_else(|| root.wrong("a Configuration with `spec`"))?;
    let handler = spec.get("discoveryHandler");
    let handler = handler.ok_or_else(|| spec.wrong("a `discoveryHandler`"))?;
    let kind = handler.get("name").ok_or_else(|| handler.wrong("a `name`"))?;
    if kind.text()? != "udev" {
        return Err(ImportError::new(format!(
            "{} is `{}`; only the devices of `udev` are nodes of a host",
            kind.place(),
            kind.text()?
        )));
    }
    let details = handler.get("discoveryDetails");
    let details = details.ok_or_else(|| handler.wrong("`discoveryDetails` with `udevRules`"))?;
    let scalar = details.scalar_text()?;
    let parsed = Doc::parse(&scalar.text, scalar.lines)?;
    let inner = parsed.first().ok_or_else(|| details.wrong("a mapping with `udevRules`"))?;
    let inner = Field::at(inner, Decoder::Yaml, &details.path);
    match offer(name, &spec, &inner, draft) {
        Ok(Ok(offered)) => draft.offer(offered, &inner),
        // The settings of a resource that is left out need no warnings.
        Ok(Err(why)) => {
            inner.read_all();
            spec.get("capacity")
                .iter()
                .chain(&spec.get("brokerProperties"))
                .for_each(Field::read_all);
            draft.warn(format!("akri.sh/{name} is left out: {why}"));
        }
        Err(error) => {
            inner.read_all();
            spec.get("capacity")
                .iter()
                .chain(&spec.get("brokerProperties"))
                .for_each(Field::read_all);
            draft.wrong(&format!("akri.sh/{name}"), &error);
        }
    }
    let why = "a workload of your own that requests the resource takes its place";
    draft.no_equivalent(spec.get("brokerSpec"), why);
    draft.no_equivalent(
        handler.get("discoveryProperties"),
        "variables are set by `env`, and functions for guests by the class `pci`",
    );
    for key in ["instanceServiceSpec", "configurationServiceSpec"] {
        spec.get(key).iter().for_each(Field::read_all);
    }
    for key in ["apiVersion", "kind"] {
        root.get(key).iter().for_each(Field::read_all);
    }
    draft.warn(format!(
        "pods that request `akri.sh/{name}-<hash>`, the resource of one device, must request \
         `akri.sh/{name}`; drain the node first"
    ));
    draft.unknown(&root, KEYS);
    draft.unknown(&inner, KEYS);
    Ok(())
}

/// The resource of a Configuration, or why it cannot be expressed here.
fn offer(
    name: &str,
    spec: &Field<'_>,
    details: &Field<'_>,
    draft: &mut Draft,
) -> Result<Result<Table, String>, ImportError> {
    let grouped = details.get("groupRecursive");
    if grouped.as_ref().map_or(Ok(false), Field::truth)? {
        return Ok(Err(
            "`groupRecursive` makes one device of the nodes above and below the one that \
                       a rule selects; name the nodes of each device in a `group`"
                .into(),
        ));
    }
    let permissions = details.get("permissions").filter(Field::has_effect);
    let permissions = permissions.map_or(Ok("rwm"), |of| match of.text()? {
        known @ ("r" | "w" | "m" | "rw" | "rm" | "rwm" | "wm") => Ok(known),
        _ => Err(of.wrong("`r`, `w`, `m` or several of them, as in `rwm`")),
    })?;
    let rules = details.get("udevRules").ok_or_else(|| details.wrong("`udevRules`, a list,"))?;
    let mut paths = Vec::new();
    for rule in rules.items()? {
        match path(rule.text()?, draft, &rule) {
            Ok(mut path) => {
                path.set("permissions", text(permissions));
                paths.push(Value { place: None, is: Is::Table(path) });
            }
            Err(why) => draft.warn(format!("{} is left out: {why}", rule.place())),
        }
    }
    if paths.is_empty() {
        return Ok(Err("no rule of it has an equivalent".into()));
    }
    let mut offered = resource(&format!("akri.sh/{name}"), "char");
    set_from(&mut offered, "paths", Is::List(paths), &rules);
    let capacity = spec.get("capacity").filter(Field::has_effect);
    let shares = draft.setting(capacity.clone(), |of| match of.number()? {
        number if (1..=SHARES_MAX).contains(&number) => Ok(number),
        _ => Err(of.wrong(&format!("a number from 1 to {SHARES_MAX}"))),
    });
    if let Some((shares, from)) = shares.zip(capacity).filter(|(shares, _)| *shares > 1) {
        set_from(&mut offered, "replicas", plain(shares), &from);
    }
    let mut env = Table::default();
    env.set("UDEV_DEVNODE", text("{node}"));
    if let Some(properties) = spec.get("brokerProperties").filter(Field::has_effect) {
        for (name, value) in properties.entries()? {
            let plain = value.text()?;
            if template::has_placeholder(plain) {
                let why = "its braces would be a placeholder";
                draft.warn(format!("{} is left out: {why}", value.place()));
            } else {
                env.set(name, text(plain));
            }
        }
    }
    set_table(&mut offered, "env", env);
    Ok(Ok(offered))
}

/// One part of a rule: `ATTRS{idVendor}=="0403"`.
struct Filter<'a> {
    field: &'a str,
    key: &'a str,
    value: &'a str,
}

impl Filter<'_> {
    /// The property that it becomes: `ATTR` is read as `ATTRS`.
    fn property(&self) -> (&str, &str) {
        (if self.field == "ATTR" { "ATTRS" } else { self.field }, self.key)
    }
}

/// The nodes that a rule selects by `KERNEL` and `SUBSYSTEM`, or why they are not known.
fn nodes(filters: &[Filter<'_>]) -> Result<String, String> {
    let of = |field: &str| {
        filters.iter().find(|filter| filter.field == field).map(|filter| filter.value)
    };
    let subsystem = of("SUBSYSTEM").map(|named| {
        let known = SUBSYSTEMS.iter().find(|(name, _)| *name == named);
        known
            .map(|(_, nodes)| *nodes)
            .ok_or_else(|| format!("the nodes of the subsystem `{named}` are not known"))
    });
    let subsystem = subsystem.transpose()?;
    let Some(kernel) = of("KERNEL") else {
        let nodes = subsystem.ok_or("it has neither `KERNEL` nor `SUBSYSTEM`")?;
        return Ok(nodes.to_owned());
    };
    let folder = match subsystem.and_then(|nodes| nodes.rsplit_once('/')) {
        // The node of another subsystem may be in the same folder.
        Some((_, names)) if !kernel.starts_with(names.trim_end_matches('*')) => {
            return Err(format!("`{kernel}` may match nodes of another subsystem"));
        }
        Some((folder, _)) => format!("{folder}/"),
        None => {
            let usual = FOLDERS.iter().find(|(begin, _)| kernel.starts_with(begin));
            format!("/dev/{}", usual.map(|(_, folder)| *folder).unwrap_or_default())
        }
    };
    // A name in sysfs has `!` in place of a slash.
    Ok(format!("{folder}{}", glob_of(&kernel.replace('!', "/"))?))
}

/// The path that a rule selects, or why there is none.
fn path(rule: &str, draft: &mut Draft, at: &Field<'_>) -> Result<Table, String> {
    let filters = filters(rule)?;
    let is_new = |(n, filter): (usize, &Filter<'_>)| {
        filters[..n].iter().all(|earlier| earlier.property() != filter.property())
    };
    // A node must match both, and a property has one pattern.
    if !filters.iter().enumerate().all(is_new) {
        return Err("it has a field twice".into());
    }
    let host = nodes(&filters)?;
    let mut path = Table::default();
    path.set("host", text(&host));
    let mut udev = Table::default();
    for Filter { field, key, value } in &filters {
        match *field {
            "KERNEL" | "SUBSYSTEM" => {}
            "ENV" if OF_KERNEL.contains(key) || key.contains(['*', '?', '[']) => {
                return Err(format!("udev does not record `ENV{{{key}}}`"));
            }
            "ENV" => udev.set(key, text(&glob_of(value)?)),
            "ATTRS" => udev.set(&format!("ATTRS{{{key}}}"), text(&glob_of_expression(value)?)),
            "ATTR" => {
                draft.warn(format!(
                    "{}: `ATTR{{{key}}}` becomes `ATTRS{{{key}}}`, which a device above may have \
                     too",
                    at.place()
                ));
                udev.set(&format!("ATTRS{{{key}}}"), text(&glob_of(value)?));
            }
            other => return Err(format!("`{other}` has no equivalent")),
        }
    }
    set_table(&mut path, "udev", udev);
    Ok(path)
}

fn glob_of(value: &str) -> Result<String, String> {
    glob::glob(value).map_err(|why| format!("`{value}` {why}"))
}

/// A regular expression of literal text, `.` and `.*` as a glob.
fn glob_of_expression(value: &str) -> Result<String, String> {
    let is_literal = |c: char| c.is_alphanumeric() || " _-:/,".contains(c);
    let plain: String = value.split(".*").collect::<Vec<_>>().concat();
    if !plain.chars().all(|c| is_literal(c) || c == '.') {
        return Err(format!("`{value}` is a regular expression without an equivalent"));
    }
    Ok(value.replace(".*", "*").replace('.', "?"))
}

/// The parts of a rule, or why it cannot be read.
fn filters(rule: &str) -> Result<Vec<Filter<'_>>, String> {
    let mut filters = Vec::new();
    let mut rest = rule.trim();
    while !rest.is_empty() {
        let unclear = || format!("`{rule}` is not a rule of the form FIELD==\"value\", …");
        let end = rest.find(|c: char| !c.is_ascii_uppercase()).ok_or_else(unclear)?;
        let field = &rest[..end];
        rest = &rest[end..];
        let mut key = "";
        if let Some(inner) = rest.strip_prefix('{') {
            (key, rest) = inner.split_once('}').ok_or_else(unclear)?;
        }
        rest = rest.trim_start();
        if rest.starts_with("!=") {
            return Err(format!("`{field}` with `!=` has no equivalent"));
        }
        let behind = rest.strip_prefix("==").ok_or_else(unclear)?;
        let quoted = behind.trim_start().strip_prefix('"').ok_or_else(unclear)?;
        let (value, behind) = quoted.split_once('"').ok_or_else(unclear)?;
        filters.push(Filter { field, key: key.trim(), value: value.trim() });
        rest = behind.trim_start();
        rest = match rest.strip_prefix(',') {
            Some(next) if !next.trim().is_empty() => next.trim_start(),
            None if rest.is_empty() => rest,
            _ => return Err(unclear()),
        };
    }
    if filters.is_empty() { Err("it is empty".into()) } else { Ok(filters) }
}
