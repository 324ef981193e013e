//! Take-over of resources that another plugin offered before.

use crate::domain::ResourceName;
use crate::messages::{Mailbox, TakeOver};
use std::time::Duration;

/// How long the ledger may take to read the kubelet's checkpoint, and to record the grants in it.
const TAKE_OVER_DEADLINE: Duration = Duration::from_secs(5);

/// Makes the ledger record the devices that another plugin has given away, before their resources
/// are offered.
pub(super) async fn from_other_plugins(ledger: &Mailbox<TakeOver>, resources: Vec<ResourceName>) {
    let taken = ledger.call(TakeOver(resources), TAKE_OVER_DEADLINE).await;
    if let Err(error) = taken {
        tracing::warn!(%error, "the grants of another plugin are not recorded yet; a device that only such a grant names is not listed");
    }
}
