//! What the operator has chosen for the moments in which there is no answer that is right for everybody.

use super::health::Reason;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

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

/// What a kubelet that has just started is told of held devices whose failure is a soft one.
///
/// Such a kubelet admits every pod anew, and rejects one of which a container that does not run (an init container that has
/// finished, one that crashes and waits) holds a device that is unhealthy: the containers of that pod that do run are killed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AtKubeletStart {
    /// That they are healthy, until it has admitted its pods: nobody new gets a device that is held, and a link that is down
    /// is no reason to kill a pod that lives with it.
    #[default]
    Withhold,
    /// What they are.
    Tell,
}

/// The choices of health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthPolicy {
    /// How often devices are probed.
    pub poll: Duration,
    /// Numbers of NVIDIA's driver after which a GPU needs a reset.
    pub fatal_xids: BTreeSet<u32>,
    /// What is not held against a device.
    pub ignored: BTreeSet<Reason>,
    /// About a kubelet that has just started.
    pub at_kubelet_start: AtKubeletStart,
}

impl Default for HealthPolicy {
    fn default() -> Self {
        HealthPolicy {
            poll: Duration::from_secs(10),
            // Uncorrectable memory errors (48, 64, 95, 140), NVLink (74), off the bus (79), its own processor (119, 120), and 143,
            // by NVIDIA's catalogue of Xid errors. Others are the application's, or can be used on.
            fatal_xids: BTreeSet::from([48, 64, 74, 79, 95, 119, 120, 140, 143]),
            ignored: BTreeSet::new(),
            at_kubelet_start: AtKubeletStart::default(),
        }
    }
}

/// The choices of the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// About a device that somebody has.
    pub refuse: Refuse,
    /// About a disk that takes nothing.
    pub when_not_durable: WhenNotDurable,
}
