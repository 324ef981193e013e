//! `generic`: the device's nodes, nothing else; environment and mounts come from the configuration.

use crate::domain::{ContainerEdits, Device};

pub(super) fn edits(devices: &[&Device]) -> ContainerEdits {
    ContainerEdits { devices: super::nodes(devices), ..ContainerEdits::default() }
}
