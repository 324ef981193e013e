//! The names that a CDI file of another program defines.

use super::doc::{Doc, Is, Lines};
use std::collections::BTreeSet;

/// The qualified names that a CDI file defines, in YAML or JSON. A runtime ignores a file that
/// cannot be read, so it defines no name.
#[must_use]
pub fn cdi_names(text: &str) -> BTreeSet<String> {
    let Ok(documents) = Doc::parse(text, Lines::From(1)) else { return BTreeSet::new() };
    let Some(spec) = documents.first() else { return BTreeSet::new() };
    let text = |doc: &Doc, key| match doc.value(key).map(|value| &value.is) {
        Some(Is::Scalar(scalar)) => Some(scalar.text.clone()),
        _ => None,
    };
    let (Some(kind), Some(Is::List(devices))) =
        (text(spec, "kind"), spec.value("devices").map(|value| &value.is))
    else {
        return BTreeSet::new();
    };
    let names = devices.iter().filter_map(|device| text(device, "name"));
    names.map(|name| format!("{kind}={name}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_from_yaml_and_json() {
        let yaml = "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n    - name: \"0\"\n      containerEdits:\n        \
                    deviceNodes:\n            - path: /dev/nvidia0\n    - name: all\ncontainerEdits:\n    env: [A=b]\n";
        let json = r#"{ "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{ "name": "0" }, { "name": "all" }] }"#;
        for text in [yaml, json] {
            let names: Vec<String> = cdi_names(text).into_iter().collect();
            assert_eq!(names, ["nvidia.com/gpu=0", "nvidia.com/gpu=all"]);
        }
        for text in ["", "{", "kind: a", "devices: [x]", "kind: [a]\ndevices: {}"] {
            assert!(cdi_names(text).is_empty(), "{text}");
        }
    }
}
