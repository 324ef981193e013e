//! smarter-device-manager: `conf.yaml`, a list of regular expressions.
//!
//! Each node that matches one of them is a resource of its own.

use super::super::sharing::SHARES_MAX;
use super::super::tree::{Is, Table, Value};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, text};
use crate::domain::NODE;

/// Every key that is read.
pub(super) const KEYS: &[&str] = &["[].devicematch", "[].nummaxdevices"];

/// A keyword in place of a pattern, for Tegra's GPU, which has no node.
const TEGRA: &str = "nvidia-gpu";

/// Usual folders of nodes, each with a node or a folder in it.
const FOLDERS: [(&str, &str); 9] = [
    ("snd", "snd/controlC0"),
    ("dri", "dri/renderD128"),
    ("input", "input/event0"),
    ("infiniband", "infiniband/uverbs0"),
    ("vfio", "vfio/10"),
    ("net", "net/tun"),
    ("bus", "bus/usb"),
    ("bus/usb", "bus/usb/001"),
    ("bus/usb/001", "bus/usb/001/002"),
];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let root = source.root(Decoder::Yaml)?;
    let mut patterns: Vec<(String, Field<'_>)> = Vec::new();
    for item in root.items()? {
        let offered = offer(&item, draft).unwrap_or_else(|error| {
            draft.wrong(&item.place(), &error);
            None
        });
        let Some((pattern, table)) = offered else {
            item.read_all();
            continue;
        };
        // Of two equal patterns the plugin registers the last one over the first.
        if let Some(same) = patterns.iter().position(|(of, _)| *of == pattern) {
            draft.warn(format!(
                "{} is left out: {} has the same pattern, and the plugin uses the last one",
                patterns[same].1.place(),
                item.place()
            ));
            draft.offers.remove(same);
            patterns.remove(same);
        }
        draft.offer(table, &item);
        patterns.push((pattern, item));
    }
    // Of the patterns that match a node, the last one counts in the plugin, and the first one here.
    draft.offers.reverse();
    if !patterns.is_empty() {
        let named: Vec<String> =
            patterns.iter().map(|(pattern, _)| format!("`{pattern}`")).collect();
        draft.warn(format!(
            "each node that matches one of these patterns is a resource, as with the plugin, unless \
             the pattern also matches a folder that it is in; a link such as /dev/rtc is left out \
             if a pattern matches its node, so request the node; Holdfast also adds nodes that appear \
             later, and drops nodes that disappear: {}",
            named.join(", ")
        ));
    }
    draft.unknown(&root, KEYS);
    draft.warn(
        "device ids change: drain the node before the change, so that no running pod holds an old \
         id",
    );
    Ok(())
}

/// Warns of a pattern that matches a folder, which then is one device here.
fn note_folder(regex: &regex_lite::Regex, item: &Field<'_>, draft: &mut Draft) {
    let is_match = |(folder, _): &&(&str, &str)| regex.is_match(folder);
    let Some((folder, inside)) = FOLDERS.iter().find(is_match) else { return };
    let place = item.place();
    draft.warn(if regex.is_match(inside) {
        format!(
            "{place}: /dev/{folder} matches and is a folder, so it is one device with every node in \
             it; the plugin also offers the matches in it, such as `smarter-devices/{}`; for these, \
             write a pattern that no folder matches",
            inside.replace('/', "_")
        )
    } else {
        format!(
            "{place}: /dev/{folder} is a folder, and one device with every node in it, as with the \
             plugin"
        )
    });
}

/// The pattern and its resource; `None` if it is left out.
fn offer(item: &Field<'_>, draft: &mut Draft) -> Result<Option<(String, Table)>, ImportError> {
    let need = || item.wrong("a `devicematch` and `nummaxdevices`, in lower case,");
    let field = item.get("devicematch").ok_or_else(need)?;
    let most = item.get("nummaxdevices").ok_or_else(need)?;
    let (pattern, number) = (field.text()?, most.number()?);
    if !(1..=SHARES_MAX).contains(&number) {
        return Err(most.wrong(&format!("a number from 1 to {SHARES_MAX}")));
    }
    let regex = regex_lite::Regex::new(pattern);
    let why = match (pattern, &regex) {
        (TEGRA, _) => {
            "it means the GPU of a Tegra system; a resource of the class `gpu` offers it".to_owned()
        }
        ("", _) => "every node would be a resource".to_owned(),
        (_, Err(error)) => format!("it is not a valid regular expression here: {error}"),
        (_, Ok(_)) => String::new(),
    };
    if !why.is_empty() {
        draft.warn(format!("{} is left out: `{pattern}`: {why}", item.place()));
        return Ok(None);
    }
    if let Ok(regex) = regex {
        note_folder(&regex, item, draft);
    }
    let mut offered = resource(&format!("smarter-devices/{NODE}"), "char");
    let mut path = Table::default();
    path.set("regex", text(pattern));
    set_from(
        &mut offered,
        "paths",
        Is::List(vec![Value { place: None, is: Is::Table(path) }]),
        &field,
    );
    if number > 1 {
        set_from(&mut offered, "replicas", plain(number), &most);
    }
    Ok(Some((pattern.to_owned(), offered)))
}
