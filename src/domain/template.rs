//! Texts of the configuration with placeholders that each device fills, such as
//! `/dev/accel/accel_controlD{index}`.
//!
//! A placeholder is a name of small letters and `_` in braces. A device without its value is not
//! offered, unless a `?` follows the name: `{module_id?}`. `{{index}}` stands for the text
//! `{index}`. Other braces, as in JSON, are text.

use super::device::Device;
use std::fmt::Write as _;

/// In the name of a variable: the position of the device in the container, from 0.
pub const NUMBER: &str = "{n}";

/// A value of a device: the names in braces, and what fills them.
type Placeholder = (&'static str, fn(&Device) -> Option<String>);

/// Every placeholder. `docs/configure.md` has the same list.
const PLACEHOLDERS: [Placeholder; 15] = [
    ("id", |device| Some(device.id.to_string())),
    ("address", |device| Some(device.pci.as_ref()?.address.to_string())),
    ("vendor", |device| Some(format!("{:04x}", device.pci.as_ref()?.vendor?))),
    ("device", |device| Some(format!("{:04x}", device.pci.as_ref()?.device?))),
    ("uuid", |device| attribute(device, &["uuid", "mdev_uuid"])),
    ("serial", |device| attribute(device, &["serial"])),
    ("model", |device| attribute(device, &["model"])),
    ("index", |device| attribute(device, &["index"]).or_else(|| number_at_end(&name(device)?))),
    ("minor", |device| {
        let of_node = || Some(device.own_nodes().next()?.number?.minor.to_string());
        attribute(device, &["minor"]).or_else(of_node)
    }),
    ("major", |device| Some(device.own_nodes().next()?.number?.major.to_string())),
    ("node", |device| Some(device.own_nodes().next()?.container.clone())),
    ("name", name),
    ("module_id", |device| attribute(device, &["module_id"])),
    ("numa_node", |device| Some(device.numa_nodes.first()?.to_string())),
    ("iommu_group", |device| Some(device.iommu_group()?.to_string())),
];

fn attribute(device: &Device, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| device.attribute(name)).map(str::to_owned)
}

/// The name of its first node on the host, without the folders.
fn name(device: &Device) -> Option<String> {
    let node = &device.own_nodes().next()?.host;
    Some(node.rsplit('/').next().unwrap_or(node).to_owned())
}

fn number_at_end(name: &str) -> Option<String> {
    let begin = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
    (begin < name.len()).then(|| name[begin..].to_owned())
}

/// A part of a text.
enum Part<'a> {
    Text(&'a str),
    /// The name in braces.
    Value(&'a str),
    /// The same, with a `?`.
    Optional(&'a str),
}

/// The parts of a text, in their order.
fn parts(text: &str) -> Vec<Part<'_>> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some(open) = rest.find('{') {
        let inside = &rest[open + 1..];
        let end = inside.find(|c: char| !c.is_ascii_lowercase() && c != '_');
        let name = end.map_or(inside, |end| &inside[..end]);
        let behind = &inside[name.len()..];
        let escaped = inside.strip_prefix('{').map(|inside| {
            let end = inside.find(|c: char| !c.is_ascii_lowercase() && c != '_');
            end.map_or(0, |end| if inside[end..].starts_with("}}") { end } else { 0 })
        });
        if let Some(length) = escaped.filter(|length| *length > 0) {
            // `{{name}}`: without the outer braces.
            parts.push(Part::Text(&rest[..open]));
            parts.push(Part::Text(&rest[open + 1..open + length + 3]));
            rest = &rest[open + length + 4..];
        } else if !name.is_empty() && behind.starts_with('}') {
            parts.push(Part::Text(&rest[..open]));
            parts.push(Part::Value(name));
            rest = &behind[1..];
        } else if !name.is_empty() && behind.starts_with("?}") {
            parts.push(Part::Text(&rest[..open]));
            parts.push(Part::Optional(name));
            rest = &behind[2..];
        } else {
            parts.push(Part::Text(&rest[..=open]));
            rest = inside;
        }
    }
    parts.push(Part::Text(rest));
    parts
}

/// Whether a text has a placeholder, known or not.
#[must_use]
pub fn has_placeholder(text: &str) -> bool {
    parts(text).iter().any(|part| !matches!(part, Part::Text(_)))
}

/// The first placeholder of a text that no device has; `None` where all are known.
#[must_use]
pub fn unknown(text: &str) -> Option<&str> {
    parts(text).into_iter().find_map(|part| match part {
        Part::Value(name) | Part::Optional(name) => {
            PLACEHOLDERS.iter().all(|(known, _)| *known != name).then_some(name)
        }
        Part::Text(_) => None,
    })
}

/// The first placeholder without a `?` that the device has no value for.
#[must_use]
pub fn lacking<'a>(text: &'a str, device: &Device) -> Option<&'a str> {
    parts(text).into_iter().find_map(|part| match part {
        Part::Value(name) => value(name, device).is_none().then_some(name),
        Part::Optional(_) | Part::Text(_) => None,
    })
}

fn value(name: &str, device: &Device) -> Option<String> {
    PLACEHOLDERS.iter().find(|(known, _)| *known == name).and_then(|(_, value)| value(device))
}

/// The names of all placeholders, as a list with commas.
#[must_use]
pub fn known() -> String {
    let mut list = String::new();
    for (name, _) in PLACEHOLDERS {
        let comma = if list.is_empty() { "" } else { ", " };
        let _ = write!(list, "{comma}`{{{name}}}`");
    }
    list
}

/// A text without placeholders, for any device.
#[must_use]
pub fn plain(text: &str) -> String {
    let texts = parts(text).into_iter().map(|part| match part {
        Part::Text(text) | Part::Value(text) | Part::Optional(text) => text,
    });
    texts.collect()
}

/// The text for one device.
///
/// # Errors
/// The placeholder that the device has no value for.
pub fn fill<'a>(text: &'a str, device: &Device) -> Result<String, &'a str> {
    fill_with(text, device, |_| true)
}

/// The same for a path: the values may come from the hardware, so none may lead elsewhere.
///
/// # Errors
/// The placeholder that the device has no value for, or whose value has a `/`, a control character
/// or only dots.
pub fn fill_path<'a>(text: &'a str, device: &Device) -> Result<String, &'a str> {
    let is_name = |value: &str| {
        !value.contains(|c: char| c == '/' || c.is_control()) && !value.trim_matches('.').is_empty()
    };
    fill_with(text, device, is_name)
}

fn fill_with<'a>(
    text: &'a str,
    device: &Device,
    may_be: impl Fn(&str) -> bool,
) -> Result<String, &'a str> {
    let mut filled = String::with_capacity(text.len());
    for part in parts(text) {
        match part {
            Part::Text(text) => filled.push_str(text),
            Part::Value(name) | Part::Optional(name) => {
                let value = value(name, device).filter(|of| may_be(of));
                filled.push_str(&value.ok_or(name)?);
            }
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::super::{Attributes, DeviceClass, DeviceId, DeviceNode, DeviceNumber, PciFunction};
    use super::*;
    use proptest::prelude::*;

    fn gaudi() -> Device {
        let mut function = PciFunction::at("0000:33:00.0".parse().unwrap());
        (function.vendor, function.device) = (Some(0x1da3), Some(0x1020));
        let number = Some(DeviceNumber { is_block: false, major: 261, minor: 7 });
        Device {
            id: DeviceId::new("0000:33:00.0"),
            key: "pci:0000:33:00.0/1da3:1020".into(),
            class: DeviceClass::Accelerator,
            pci: Some(Box::new(function)),
            numa_nodes: vec![1, 3],
            nodes: vec![DeviceNode { number, ..DeviceNode::at("/dev/accel/accel12") }],
            attributes: Attributes::default(),
        }
    }

    #[test]
    fn a_device_fills_the_placeholders() {
        let device = gaudi();
        for (text, filled) in [
            ("plain", Ok("plain")),
            ("{index}", Ok("12")),
            ("a{index}b{major}:{minor}{numa_node}", Ok("a12b261:71")),
            ("{id} {address} {vendor}:{device}", Ok("0000:33:00.0 0000:33:00.0 1da3:1020")),
            ("{node} {name}", Ok("/dev/accel/accel12 accel12")),
            ("{{index}} {{{index}}}", Ok("{index} {{index}}")),
            (
                r#"{"a": {"b": 1}} {} {A} {a-b} {{.Name}} {{"#,
                Ok(r#"{"a": {"b": 1}} {} {A} {a-b} {{.Name}} {{"#),
            ),
            ("{index", Ok("{index")),
            ("x{uuid}", Err("uuid")),
            ("x{uuid?}", Err("uuid")),
            ("x{index?}{?}{index??}", Ok("x12{?}{index??}")),
            ("{serial}", Err("serial")),
            ("{other}", Err("other")),
        ] {
            assert_eq!(fill(text, &device), filled.map(str::to_owned), "{text}");
        }
        assert_eq!((unknown("{index}{what}"), unknown("{index}{{what}}")), (Some("what"), None));
        assert_eq!(unknown("{index?}{what?}"), Some("what"));
        assert_eq!(
            (lacking("{uuid?}{serial}", &device), lacking("{uuid?}", &device)),
            (Some("serial"), None)
        );
        assert!(has_placeholder("{b?}"));
        assert!(has_placeholder("a{b}") && !has_placeholder("{{b}} {1}"));
        assert!(known().starts_with("`{id}`, `{address}`"), "{}", known());
    }

    #[test]
    fn no_value_of_the_hardware_leads_out_of_a_path() {
        let mut device = gaudi();
        for (serial, is_path) in
            [("A1", true), ("a.b", true), ("..", false), ("../x", false), ("a\nb", false)]
        {
            device.attributes.insert("serial", serial);
            let path = fill_path("/dev/x{serial}", &device);
            assert_eq!(path.ok(), is_path.then(|| format!("/dev/x{serial}")), "{serial}");
            assert!(fill("{serial}", &device).is_ok());
        }
        assert_eq!(fill_path("/dev/{node}", &device), Err("node"));
    }

    proptest! {
        #[test]
        fn a_text_without_placeholders_stays(text in "[a-z{}?A_ é]{0,20}") {
            let filled = fill(&text, &gaudi());
            prop_assert!(filled.is_err() || unknown(&text).is_none());
            prop_assert!(filled.is_ok() || has_placeholder(&text));
            if !has_placeholder(&text) {
                prop_assert_eq!(filled, Ok(plain(&text)));
                prop_assert!(text.contains("{{") || plain(&text) == text);
            }
        }
    }
}
