//! Resources that another plugin has offered before.

use crate::domain::ResourceName;
use crate::messages::{Mailbox, TakeOver};
use std::time::Duration;

/// How long the ledger may take to read the kubelet's checkpoint, and to record what that tells.
const TAKE_OVER_DEADLINE: Duration = Duration::from_secs(5);

/// Has the ledger take over what other plugins have given away of resources that are about to be offered.
pub(super) async fn from_other_plugins(ledger: &Mailbox<TakeOver>, resources: Vec<ResourceName>) {
    let taken = ledger.call(TakeOver(resources), TAKE_OVER_DEADLINE).await;
    match taken.map_err(|error| error.to_string()).and_then(|taken| taken) {
        Ok(0) => {}
        Ok(grants) => tracing::info!(grants, "containers hold devices that another plugin has given them; they are held as before"),
        Err(error) => {
            tracing::warn!(%error, "what another plugin has given away cannot be read; its devices are listed only if they are found");
        }
    }
}
