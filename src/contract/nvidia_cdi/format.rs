//! The format of a CDI file, as far as NVIDIA's devices need it.

use crate::domain::DeviceNode;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The content of a CDI file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    pub(super) cdi_version: String,
    pub(super) kind: String,
    pub(super) devices: Vec<Named>,
    #[serde(default)]
    pub(super) container_edits: Edits,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) container_edits: Edits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) device_nodes: Vec<Node>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) mounts: Vec<Mount>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Node {
    pub(super) path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) host_path: Option<String>,
    pub(super) permissions: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Hook {
    pub(super) hook_name: String,
    pub(super) path: String,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Mount {
    pub(super) host_path: String,
    pub(super) container_path: String,
    pub(super) options: Vec<String>,
}

impl Node {
    /// Without `m`: a container uses the node that it gets, and makes none. NVIDIA's plugin passes
    /// nodes in this way too (`apiDeviceSpecs`).
    pub(super) fn of(node: &DeviceNode) -> Self {
        Node {
            path: node.container.clone(),
            host_path: (node.host != node.container).then(|| node.host.clone()),
            permissions: "rw".into(),
        }
    }
}

impl Document {
    pub(super) fn of(kind: &str, devices: BTreeMap<String, Edits>, container_edits: Edits) -> Self {
        let is_number = |name: &String| name.starts_with(|c: char| c.is_ascii_digit());
        let edits = devices.values().chain([&container_edits]);
        let is_elsewhere =
            edits.flat_map(|edits| &edits.device_nodes).any(|node| node.host_path.is_some());
        let is_newer = is_elsewhere || devices.keys().any(is_number);
        Document {
            // The lowest version with these features: a runtime refuses what it does not know.
            cdi_version: if is_newer { "0.5.0" } else { "0.3.0" }.into(),
            kind: kind.to_owned(),
            devices: devices
                .into_iter()
                .map(|(name, container_edits)| Named { name, container_edits })
                .collect(),
            container_edits,
        }
    }

    /// A file that was written before; `None` for another text.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    /// `vendor/class`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether it defines a name.
    #[must_use]
    pub fn defines(&self, name: &str) -> bool {
        self.devices.iter().any(|device| device.name == name)
    }

    /// The text of the file.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        Some(serde_json::to_string_pretty(self).ok()? + "\n")
    }
}

impl Edits {
    /// Adds the nodes and hooks of another device, each once: instances of one GPU share its node.
    pub(super) fn add(&mut self, other: &Edits) {
        for node in &other.device_nodes {
            if !self.device_nodes.contains(node) {
                self.device_nodes.push(node.clone());
            }
        }
        for hook in &other.hooks {
            if !self.hooks.contains(hook) {
                self.hooks.push(hook.clone());
            }
        }
    }
}
