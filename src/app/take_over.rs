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
    match taken.map_err(|error| error.to_string()).and_then(|taken| taken) {
        Ok(0) => {}
        Ok(grants) => tracing::info!(
            grants,
            "recorded grants that another plugin made; their containers keep the devices"
        ),
        Err(error) => {
            tracing::warn!(%error, "cannot read the grants of another plugin; a device that only such a grant names is not listed");
        }
    }
}
