//! The faults of a soak, and how each is caused.

use super::super::node::plain_file;
use super::{FILES, RESOURCES, Soak, config};
use crate::console::exit::Failed;
use crate::lab::sim::kubelet::{Hook, Verdict};
use std::fs;

/// The faults, repeated in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    DeviceGone,
    DeviceBack,
    KubeletRestart,
    StreamEnd,
    Reload,
    Kill,
}

impl Fault {
    pub(super) const ALL: [Fault; 6] = [
        Fault::DeviceGone,
        Fault::DeviceBack,
        Fault::KubeletRestart,
        Fault::StreamEnd,
        Fault::Reload,
        Fault::Kill,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Fault::DeviceGone => "device_gone",
            Fault::DeviceBack => "device_back",
            Fault::KubeletRestart => "kubelet_restart",
            Fault::StreamEnd => "stream_end",
            Fault::Reload => "reload",
            Fault::Kill => "kill",
        }
    }
}

impl Soak<'_> {
    pub(super) async fn fault(&mut self, fault: Fault) -> Result<(), Failed> {
        let count = self.faults.entry(fault).or_default();
        *count += 1;
        let count = *count;
        let place = usize::try_from(count).unwrap_or(0);
        let host = self.node.roots().host;
        let device = plain_file(&host, place % RESOURCES, place / RESOURCES % FILES);
        match fault {
            Fault::DeviceGone => fs::remove_file(device)?,
            Fault::DeviceBack => fs::write(device, "")?,
            Fault::KubeletRestart => self.node.kubelet.restart().await?,
            Fault::StreamEnd => {
                // The next list fails, which ends its stream; a new device node causes that list.
                self.node.hooks.gate(Hook::OnList).open(Verdict::Fail);
                fs::write(plain_file(&host, 0, FILES + usize::from(count.is_multiple_of(2))), "")?;
                let old_node = plain_file(&host, 0, FILES + usize::from(!count.is_multiple_of(2)));
                // In the first round there is none.
                drop(fs::remove_file(old_node));
            }
            Fault::Reload => self.node.reload(&config(count))?,
            Fault::Kill => {
                self.node.kill()?;
                self.daemon_run += 1;
                (self.sampled.1, self.sampled.2) = (f64::NAN, f64::NAN);
            }
        }
        Ok(())
    }
}
