//! The rules of the judge, from the configuration.

use super::case::FatalXids;
use crate::domain::Reason;
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a free id that is no longer found stays in the list, unhealthy. The kubelet gives out
/// only healthy ids, and our Allocate ends within two seconds. So after this time no Allocate for
/// the id can be in flight, and a kubelet of 1.35 or newer does not panic when the id leaves.
pub(crate) const LEAVE_AFTER: Duration = Duration::from_secs(60);

/// The rules of the judge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    /// This boot.
    pub(crate) boot_id: String,
    /// Whether PCI functions are probed: then none of them recovers before a probe.
    pub(crate) has_probes: bool,
    /// Numbers of Xid errors after which a GPU needs a reset.
    pub(crate) fatal_xids: FatalXids,
    /// Reasons that do not make a device unhealthy.
    pub(crate) ignored: BTreeSet<Reason>,
    /// How often devices are probed.
    pub(crate) poll: Duration,
    /// How long a free id that is no longer found stays in the list: [`LEAVE_AFTER`], except in
    /// tests.
    pub(crate) leave_after: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            boot_id: String::new(),
            has_probes: false,
            fatal_xids: FatalXids::default(),
            ignored: BTreeSet::new(),
            poll: Duration::ZERO,
            leave_after: LEAVE_AFTER,
        }
    }
}
