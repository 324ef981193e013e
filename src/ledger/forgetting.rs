//! Forgets devices that have gone, so that ever new ones do not fill the memory.

use super::actor::LedgerActor;
use super::core::forget;
use crate::domain::{DeviceId, Entry};
use crate::host;
use crate::messages::{Forget, Found};
use actix::{AsyncContext, Context, Handler};
use std::sync::Arc;
use std::time::Duration;

/// How long after a scan or a change of a list the ledger looks which devices have gone: many that go at once are one look.
const LOOKS_AFTER: Duration = Duration::from_secs(2);

impl LedgerActor {
    /// Looks after a while which devices have gone.
    pub(super) fn forget_later(&mut self, context: &mut Context<Self>) {
        if self.upkeep.forgetting.found.is_some() && !std::mem::replace(&mut self.upkeep.forgetting.is_due, true) {
            context.run_later(LOOKS_AFTER, Self::forget_now);
        }
    }

    fn forget_now(&mut self, context: &mut Context<Self>) {
        self.upkeep.forgetting.is_due = false;
        if self.committer.entries().next().is_some() {
            // A grant that is about to be written holds its devices too.
            return self.forget_later(context);
        }
        let Some(found) = self.upkeep.forgetting.found.clone() else { return };
        let inventory = Arc::clone(&self.config.inventory.borrow());
        let may_be_there = |id: &DeviceId, keys: &[&str]| {
            let keys = if keys.is_empty() { &[""] } else { keys };
            found.devices.contains_key(id) || keys.iter().any(|key| found.unread.may_hide(key))
        };
        let (entries, told) = forget(&self.ledger, may_be_there, &inventory, host::now().wall);
        if entries.is_empty() {
            return;
        }
        for device in told {
            tracing::error!(
                %device,
                "a device that has gone is forgotten, with its cordon, the verdict that waited for a person or the hook that it was owed: it was \
                 gone for 30 days, or too many others have gone since"
            );
        }
        let forgotten = entries.iter().filter_map(|entry| if let Entry::Forgotten { devices } = entry { Some(devices) } else { None });
        let forgotten: Vec<_> = forgotten.flatten().cloned().collect();
        let (recorded, health) = (self.submit(entries, context), self.config.forget.clone());
        actix::spawn(async move {
            // A failed write is logged, and the next look finds the same again.
            if let (Ok(Ok(())), Some(health)) = (recorded.await, health)
                && !forgotten.is_empty()
            {
                health.send(Forget(forgotten));
            }
        });
    }
}

impl Handler<Found> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Found(evidence): Found, context: &mut Self::Context) {
        self.upkeep.forgetting.found = Some(evidence);
        self.forget_later(context);
    }
}
