//! The documents of the control socket that are not reports: orders, and the lines of the ledger.

use crate::domain::{DeviceId, OperatorRequest, Timestamp};
use crate::store::ExportLine;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One line of `/v1/ledger`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// A part of the ledger.
    #[serde(rename = "told")]
    Part(ExportLine),
    /// The end. Without this line the document is incomplete.
    End(LedgerEnd),
}

/// The last line of a ledger that was sent completely.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerEnd {
    /// Why the history is incomplete; `None` when it is complete.
    pub problem: Option<String>,
    /// The latest release that was deleted from the history, because of its age or of the number of
    /// releases. No later release was deleted.
    pub forgotten_until: Option<Timestamp>,
}

/// An operator's order for one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The device's own id.
    pub device: DeviceId,
    /// The instruction.
    #[serde(flatten)]
    pub instruction: OperatorRequest,
}

/// An operator's order to release a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseOrder {
    /// The claim's UID, or its namespace and name.
    pub claim: String,
    /// Whether the operator vouches for a claim whose pods are not known.
    pub force: bool,
}

/// What `holdfast handover` asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// The binary to be started: the one that asks.
    pub executable: PathBuf,
}

/// The answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// The version that has handed over.
    pub from: String,
    /// The version that serves now.
    pub to: String,
    /// Its process.
    pub pid: u32,
}
