//! Forgets absent devices, so that devices under ever new names do not fill the memory.

use super::actor::LedgerActor;
use super::core::forget;
use crate::domain::{DeviceId, Entry};
use crate::host;
use crate::messages::{Forget, Found};
use actix::Handler;
use std::sync::Arc;

impl Handler<Found> for LedgerActor {
    type Result = ();

    /// Checks for absent devices after every scan. The node is scanned every 30 s and at each
    /// hardware event, so a device that a released grant held is found here too.
    fn handle(&mut self, Found(found): Found, context: &mut Self::Context) {
        if self.state.uncommitted().next().is_some() {
            // A grant that waits for the commit holds its devices too. The next scan finds them.
            return;
        }
        let inventory = Arc::clone(&self.config.inventory.borrow());
        let may_be_there = |id: &DeviceId, keys: &[&str]| {
            let keys = if keys.is_empty() { &[""] } else { keys };
            found.devices.contains_key(id) || keys.iter().any(|key| found.unread.may_hide(key))
        };
        let (entries, reported) = forget(self.ledger(), may_be_there, &inventory, host::now().wall);
        if entries.is_empty() {
            return;
        }
        for device in reported {
            tracing::error!(
                %device,
                "absent device forgotten, with its cordon, its verdict or its pending hook: it was absent for more than 30 days, \
                 or its kind was over its limit"
            );
        }
        let forgotten = entries.iter().filter_map(|entry| {
            if let Entry::Forgotten { devices } = entry { Some(devices) } else { None }
        });
        let forgotten: Vec<_> = forgotten.flatten().cloned().collect();
        let (recorded, health) = (self.submit(entries, context), self.config.forget.clone());
        actix::spawn(async move {
            // A failed write is logged, and the next check finds the same devices again.
            if let (Ok(Ok(())), Some(health)) = (recorded.await, health)
                && !forgotten.is_empty()
            {
                health.send(Forget(forgotten));
            }
        });
    }
}
