//! The USB devices of a group.

use super::super::draft::Draft;
use super::super::error::ImportError;
use super::super::field::{Decoder, Field};
use super::super::values::text;
use crate::config::tree::{Is, Table};

/// The entries of `paths` for a list of USB devices.
pub(super) fn entries(usb: &Field<'_>, draft: &mut Draft) -> Result<Vec<Table>, ImportError> {
    let mut entries = Vec::new();
    let mut is_exact = true;
    for device in usb.items()? {
        let mut select = Table::default();
        for key in ["vendor", "product"] {
            let id = device.get(key).ok_or_else(|| device.wrong("a `vendor` and a `product`"))?;
            select.set(key, text(&id_in_group(&id, draft)?));
        }
        let serial = device.get("serial").map(|serial| serial.text()).transpose()?;
        match serial.filter(|serial| !serial.is_empty()) {
            Some(serial) => select.set("serial", text(serial)),
            None => is_exact = false,
        }
        let mut entry = Table::default();
        entry.set("usb", Is::Table(select));
        entries.push(entry);
    }
    if !is_exact || entries.len() > 1 {
        draft.warn(format!(
            "{}: the plugin gives all of these USB devices that are plugged in to a container as \
             one device; Holdfast offers each of them",
            usb.place()
        ));
    }
    Ok(entries)
}

/// A vendor or product id, which may be a number without quotes. In a flag the plugin reads its
/// digits as hexadecimal ones, and in a file it takes the number itself.
fn id_in_group(id: &Field<'_>, draft: &mut Draft) -> Result<String, ImportError> {
    let scalar = id.scalar_text()?;
    let digits = scalar.text.as_str();
    let is_decimal = digits.bytes().all(|byte| byte.is_ascii_digit());
    // A number that begins with 0 may be octal.
    let is_number =
        scalar.is_plain && (is_decimal && !digits.starts_with('0') || digits.starts_with("0x"));
    let number = id.number().ok().filter(|number| is_number && *number <= 0xffff);
    let Some(number) = number else { return id_of(id).map(str::to_owned) };
    if id.decoder() == Decoder::JsonOfYaml {
        let digits = number.to_string();
        return if digits.len() <= 4 { Ok(digits) } else { id_of(id).map(str::to_owned) };
    }
    if is_decimal {
        draft.warn(format!(
            "{}: `{digits}` without quotes is a decimal number for the plugin, the id `{number:04x}`; \
             put an id in quotes",
            id.place()
        ));
    }
    Ok(format!("{number:04x}"))
}

/// A vendor or product id as a text. Without quotes some are other numbers: `0403` is 403, or
/// octal.
pub(in crate::config::import) fn id_of<'a>(id: &Field<'a>) -> Result<&'a str, ImportError> {
    let scalar = id.scalar_text()?;
    let is_number = scalar.is_plain && scalar.text.parse::<f64>().is_ok();
    let is_id = (1..=4).contains(&scalar.text.len())
        && scalar.text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id && !is_number {
        Ok(&scalar.text)
    } else {
        Err(id.wrong("an id of four hexadecimal digits in quotes"))
    }
}
