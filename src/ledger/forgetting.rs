//! Forgets absent devices, so that devices under ever new names do not fill the memory.

use super::actor::LedgerActor;
use super::core::forget;
use crate::domain::{DeviceId, Entry};
use crate::host;
use crate::messages::{Forget, Found};
use actix::{AsyncContext, Context, Handler};
use std::sync::Arc;
use std::time::Duration;

/// The debounce of the check for absent devices, after a scan or a change of a list: many removals
/// at once cause one check.
const LOOKS_AFTER: Duration = Duration::from_secs(2);

impl LedgerActor {
    /// Schedules the check for absent devices.
    pub(super) fn forget_later(&mut self, context: &mut Context<Self>) {
        if self.upkeep.forgetting.found.is_some()
            && !std::mem::replace(&mut self.upkeep.forgetting.is_due, true)
        {
            context.run_later(LOOKS_AFTER, Self::forget_now);
        }
    }

    fn forget_now(&mut self, context: &mut Context<Self>) {
        self.upkeep.forgetting.is_due = false;
        if self.committer.entries().next().is_some() {
            // A grant that waits for the commit holds its devices too.
            return self.forget_later(context);
        }
        let Some(found) = self.upkeep.forgetting.found.clone() else { return };
        let inventory = Arc::clone(&self.config.inventory.borrow());
        let may_be_there = |id: &DeviceId, keys: &[&str]| {
            let keys = if keys.is_empty() { &[""] } else { keys };
            found.devices.contains_key(id) || keys.iter().any(|key| found.unread.may_hide(key))
        };
        let (entries, reported) = forget(&self.ledger, may_be_there, &inventory, host::now().wall);
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

impl Handler<Found> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Found(evidence): Found, context: &mut Self::Context) {
        self.upkeep.forgetting.found = Some(evidence);
        self.forget_later(context);
    }
}
