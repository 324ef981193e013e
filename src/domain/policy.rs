//! Choices of the operator where no answer suits every cluster.

use super::health::Reason;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// The answer to an Allocate for an exclusive device that a running container of another pod
/// provably has (I2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refuse {
    /// Refuse the device to the next container.
    #[default]
    Proven,
    /// Grant the device, as the kubelet requests, with an alarm.
    Never,
}

/// The answer to an Allocate while the ledger cannot be written (I1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenNotDurable {
    /// Refuse: pods wait, and no grant is forgotten.
    #[default]
    Refuse,
    /// Grant, and write the grant as soon as possible. Pods start, but the grants are lost if the
    /// daemon ends before that.
    Serve,
}

/// The health of held devices with a soft failure in the list for a kubelet that has just started.
///
/// Such a kubelet admits every pod again. It rejects a pod if a container that is not running holds
/// an unhealthy device. Such a container is an init container that has finished, or one in a crash
/// loop. The running containers of that pod are killed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AtKubeletStart {
    /// Healthy, until the kubelet has admitted its pods. No new container gets a held device, and a
    /// link that is down is no reason to kill a pod that tolerates it.
    #[default]
    Withhold,
    /// Their actual health.
    #[serde(rename = "tell")]
    Report,
}

/// The choices for health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthPolicy {
    /// How often devices are probed.
    pub poll: Duration,
    /// Numbers of Xid errors after which a GPU needs a reset.
    pub fatal_xids: BTreeSet<u32>,
    /// Reasons that do not make a device unhealthy.
    pub ignored: BTreeSet<Reason>,
    /// The lists for a kubelet that has just started.
    pub at_kubelet_start: AtKubeletStart,
    /// Whether Xid errors are taken from NVML's events where the kernel's log cannot be read.
    pub nvml_events: bool,
}

impl Default for HealthPolicy {
    fn default() -> Self {
        HealthPolicy {
            poll: Duration::from_secs(10),
            // Uncorrectable memory errors (48, 64, 95, 140), NVLink (74), off the bus (79), the
            // GPU's own processor (119, 120), and 143, by NVIDIA's catalogue of Xid errors. The
            // others are errors of the application, or the GPU stays usable.
            fatal_xids: BTreeSet::from([48, 64, 74, 79, 95, 119, 120, 140, 143]),
            ignored: BTreeSet::new(),
            at_kubelet_start: AtKubeletStart::default(),
            nvml_events: true,
        }
    }
}

/// The choices for the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// The answer for a device that another container has.
    pub refuse: Refuse,
    /// The answer while the disk is not writable.
    pub when_not_durable: WhenNotDurable,
}
