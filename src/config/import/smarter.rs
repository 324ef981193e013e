//! smarter-device-manager: `conf.yaml`, a list of patterns, each node that matches being a resource of its own.

use super::super::tree::{Is, Value};
use super::field::{Decoder, Field};
use super::source::Source;
use super::{Draft, ImportError, plain, resource, text};
use std::collections::BTreeSet;

/// A pattern that would be more resources than this is a mistake; each has a socket at the kubelet.
const NAMES_MAX: usize = 64;

/// Folders of nodes, which the plugin gives whole.
const FOLDERS: [&str; 7] = ["snd", "dri", "input", "infiniband", "vfio", "bus", "net"];

/// Every key that is read.
pub(super) const KEYS: &[&str] = &["[].devicematch", "[].nummaxdevices"];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let Some(file) = &source.file else {
        return Err(ImportError::new("the manifest has the plugin's container and not its file; add the ConfigMap, behind a line `---`"));
    };
    let root = &Field::root(file, Decoder::Yaml);
    let mut taken = BTreeSet::new();
    for item in root.items()? {
        let pattern = item.get("devicematch").ok_or_else(|| item.wrong("a `devicematch` and `nummaxdevices`"))?;
        let most = item.get("nummaxdevices").map_or(Ok(1), |most| most.number())?;
        let (names, is_cut) = match names_of(pattern.text()?) {
            Ok(names) => names,
            Err(why) => {
                draft.warn(format!(
                    "`{}` is left out: `{}` {why}; write a [[resource]] for each node that is meant",
                    item.path,
                    pattern.text()?
                ));
                continue;
            }
        };
        if is_cut {
            draft.warn(format!(
                "`{}`: of `{}` only the numbers 0 to 9 are taken over; further ones need a [[resource]] each",
                pattern.path,
                pattern.text()?
            ));
        }
        if let Some(folder) = names.iter().find(|name| FOLDERS.contains(&name.as_str())) {
            draft.warn(format!("`{}` is left out: /dev/{folder} is a folder of nodes, and a device is one node here", item.path));
            continue;
        }
        // The first pattern that matches a node has it.
        for name in names.into_iter().filter(|name| taken.insert(name.clone())).collect::<Vec<_>>() {
            let plain_name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '_' }).collect();
            let mut offered = resource(&format!("smarter-devices/{plain_name}"), "char");
            offered.set("paths", Is::List(vec![Value { place: None, is: text(&format!("/dev/{name}")) }]));
            if most > 1 {
                offered.set("replicas", plain(most));
            }
            draft.offer(offered, &item);
        }
    }
    draft.unknown(root, KEYS);
    draft.warn("ids are others here: drain the node before the change, so that no running pod holds one that is gone");
    Ok(())
}

/// The names below `/dev` that a pattern means, and whether a repetition was cut at one digit; or why it cannot be said.
fn names_of(pattern: &str) -> Result<(Vec<String>, bool), &'static str> {
    let inner = pattern.strip_prefix('^').and_then(|rest| rest.strip_suffix('$'));
    let mut rest = inner.ok_or("does not begin with `^` and end in `$`, and may be any part of a name")?;
    let (mut names, mut is_cut) = (vec![String::new()], false);
    while let Some(first) = rest.chars().next() {
        let (choices, length): (Vec<char>, usize) = if let Some(class) = rest.strip_prefix('[') {
            let end = class.find(']').ok_or("is not a pattern")?;
            (class_of(&class[..end])?, end + 2)
        } else if rest.starts_with("\\d") {
            (('0'..='9').collect(), 2)
        } else if let Some(escaped) = rest.strip_prefix('\\') {
            let escaped = escaped.chars().next().filter(|c| !c.is_alphanumeric()).ok_or("is not a pattern that ends")?;
            (vec![escaped], 1 + escaped.len_utf8())
        } else if ".()|?*+{}^$".contains(first) {
            return Err("means any name of a kind");
        } else {
            (vec![first], first.len_utf8())
        };
        rest = &rest[length..];
        if names.len().saturating_mul(choices.len()) > NAMES_MAX {
            return Err("means too many names");
        }
        names = names.iter().flat_map(|name| choices.iter().map(move |choice| format!("{name}{choice}"))).collect();
        if let Some(after) = rest.strip_prefix(['*', '+']) {
            if choices.len() == 1 {
                return Err("means any name of a kind");
            }
            (rest, is_cut) = (after, true);
        }
    }
    Ok((names, is_cut))
}

/// The characters of `[0-9a]`.
fn class_of(class: &str) -> Result<Vec<char>, &'static str> {
    let mut characters = Vec::new();
    let mut rest = class.chars().peekable();
    while let Some(from) = rest.next() {
        if matches!(from, '^' | '\\' | '[') {
            return Err("means any name of a kind");
        }
        if rest.peek() == Some(&'-') {
            rest.next();
            let to = rest.next().ok_or("is not a pattern")?;
            if !from.is_ascii() || !to.is_ascii() {
                return Err("means too many names");
            }
            characters.extend(from..=to);
        } else {
            characters.push(from);
        }
    }
    if characters.is_empty() { Err("is not a pattern") } else { Ok(characters) }
}

#[cfg(test)]
mod tests {
    use super::names_of;

    #[test]
    fn a_pattern_that_ends_is_its_names() {
        let names = |pattern| names_of(pattern).map(|(names, cut)| (names.join(" "), cut));
        assert_eq!(names("^snd$"), Ok(("snd".into(), false)));
        assert_eq!(names("^i2c-[01]$"), Ok(("i2c-0 i2c-1".into(), false)));
        assert_eq!(names("^video[0-9]*$"), Ok(((0..10).map(|n| format!("video{n}")).collect::<Vec<_>>().join(" "), true)));
        assert_eq!(names("^a\\.b\\d$").map(|(names, _)| names.starts_with("a.b0 a.b1")), Ok(true));
        for unsayable in ["video0", "^video.*$", "^(a|b)$", "^[^0]$", "^a[0-9][0-9]$", "^a*$", "^a[$", "^a\\$", "^[]$", "^[0-]$", "^[z-a]$"]
        {
            assert!(names(unsayable).is_err(), "{unsayable}: {:?}", names(unsayable));
        }
    }
}
