//! What the operator has chosen for the moments in which there is no answer that is right for everybody.

use serde::{Deserialize, Serialize};

/// What is done about an exclusive device that a running container of another pod provably has (I2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refuse {
    /// It is refused to the next one.
    #[default]
    Proven,
    /// It is granted, as the kubelet wants it, with an alarm.
    Never,
}

/// What is done about an Allocate while the ledger cannot be written (I1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenNotDurable {
    /// It is refused: pods wait, and nothing that was granted is forgotten.
    #[default]
    Refuse,
    /// It is answered, and written as soon as that is possible: pods start, and the ledger may forget them if the daemon
    /// ends before.
    Serve,
}

/// The choices of the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// About a device that somebody has.
    pub refuse: Refuse,
    /// About a disk that takes nothing.
    pub when_not_durable: WhenNotDurable,
}
