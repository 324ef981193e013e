//! The rules of the API for a device: names, values and numbers of its parts.

use super::semver;
use crate::slices::api::{self, Attribute, limits};
use crate::slices::names;

/// Why the API server would refuse the name of an attribute or capacity; `None` if it would not.
#[must_use]
pub fn refused_key(key: &str) -> Option<&'static str> {
    let (domain, name) = key.split_once('/').map_or((None, key), |(at, name)| (Some(at), name));
    if domain.is_some_and(|domain| domain.len() > limits::DOMAIN || !names::is_subdomain(domain)) {
        return Some("its domain is no DNS subdomain of at most 63 bytes");
    }
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let is_identifier =
        name.bytes().all(is_word) && name.bytes().next().is_some_and(|b| !b.is_ascii_digit());
    (!is_identifier || name.len() > limits::KEY)
        .then_some("its name is no identifier of C with at most 32 bytes")
}

/// Why the API server would refuse the value of an attribute; `None` if it would not.
#[must_use]
pub fn refused_value(value: &Attribute) -> Option<&'static str> {
    match value {
        Attribute::Text(text) => {
            (text.len() > limits::VALUE).then_some("its text has more than 64 bytes")
        }
        Attribute::Version(version) if version.len() > limits::VALUE => {
            Some("its version has more than 64 bytes")
        }
        Attribute::Version(version) => (semver(version).as_ref() != Some(version))
            .then_some("its version is not of semver 2.0.0"),
        Attribute::Int(_) | Attribute::Bool(_) => None,
        Attribute::Unknown => Some("its type is unknown"),
    }
}

/// Every rule of the API that a device violates, one sentence each. Empty if the API server accepts
/// the device.
#[must_use]
pub fn violations(device: &api::Device) -> Vec<String> {
    let mut found = Vec::new();
    if !names::is_label(&device.name) {
        found.push(format!("`{}` is no DNS label", device.name));
    }
    if device.attributes.len() + device.capacity.len() > limits::ATTRIBUTES {
        found.push("more than 32 attributes and capacities".to_owned());
    }
    let keys = device.attributes.keys().chain(device.capacity.keys());
    found.extend(keys.filter_map(|key| Some(format!("`{key}`: {}", refused_key(key)?))));
    let values = device.attributes.iter();
    found.extend(
        values.filter_map(|(key, value)| Some(format!("`{key}`: {}", refused_value(value)?))),
    );
    if device.consumes_counters.len() > limits::CONSUMED_SETS {
        found.push("more than 2 sets of counters".to_owned());
    }
    if device.taints.len() > limits::TAINTS {
        found.push("more than 16 taints".to_owned());
    }
    for taint in &device.taints {
        let (domain, name) = taint.key.split_once('/').unwrap_or(("", &taint.key));
        let is_key = names::is_subdomain(domain) && is_label_value(name) && !name.is_empty();
        let is_effect =
            ["None", api::NO_SCHEDULE, api::NO_EXECUTE].contains(&taint.effect.as_str());
        if !is_key || !is_label_value(&taint.value) || !is_effect {
            found.push(format!("the taint `{}`", taint.key));
        }
    }
    found
}

/// Whether the text is the value of a label: at most 63 letters, digits, `-`, `_` and `.`, with a
/// letter or digit at both ends; or empty.
#[must_use]
pub fn is_label_value(text: &str) -> bool {
    let is_end = |b: Option<u8>| b.is_none_or(|b| b.is_ascii_alphanumeric());
    text.len() <= limits::TAINT_VALUE
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && is_end(text.bytes().next())
        && is_end(text.bytes().next_back())
}
