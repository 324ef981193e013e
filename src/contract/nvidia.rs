//! `nvidia`: what NVIDIA's own plugin answers with its default strategy, `envvar` — the ids in
//! `NVIDIA_VISIBLE_DEVICES`, from which the NVIDIA container runtime adds nodes and libraries.

use crate::domain::{ContainerEdits, Device};
use std::collections::BTreeMap;

pub(super) fn edits(devices: &[&Device]) -> ContainerEdits {
    let visible: Vec<&str> = devices.iter().map(|device| name(device)).collect();
    let envs = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), visible.join(","))]);
    ContainerEdits { envs, ..ContainerEdits::default() }
}

/// How the NVIDIA runtime knows the GPU: its UUID, else its number. The driver shows no UUID before a GPU's first
/// use, and a GPU that is never offered would never be used.
fn name(device: &Device) -> &str {
    let attribute = |name: &str| device.attributes.get(name).map(String::as_str);
    attribute("uuid").or_else(|| attribute("minor")).unwrap_or(device.id.as_str())
}
