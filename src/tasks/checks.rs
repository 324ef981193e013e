//! Runs the check commands of resources periodically and sends each result to the health actor.
//!
//! A check runs once at the daemon's start, because earlier results are not stored. After that it
//! runs at the multiples of its period on the boot clock, as every poll does. A new device is
//! checked in the next round. All checks of one period end before the next round of that period
//! begins. A check that could not be run proves nothing about its device and is run again in the
//! next round.

use crate::domain::{Check, CheckResult, Device, Inventory, Phase, ResourceName};
use crate::hook::{HookExecutor, Occasion};
use crate::host;
use crate::messages::{Checked, Mailbox};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// The runner of checks.
#[derive(Debug, Clone)]
pub(crate) struct Runner {
    pub(crate) performer: HookExecutor,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) checked: Mailbox<Checked>,
}

impl Runner {
    /// Runs until the daemon ends. Checks that still run then are killed. Checks of a period that
    /// no resource uses any longer are killed too.
    pub(crate) async fn run(mut self) {
        let every = |inventory: &Inventory| -> BTreeSet<Duration> {
            let checks = inventory
                .resources
                .values()
                .filter_map(|offering| offering.spec.hooks.check.as_ref());
            checks.map(|check| check.every).collect()
        };
        let mut rounds: JoinSet<()> = JoinSet::new();
        let mut running: BTreeMap<Duration, AbortHandle> = BTreeMap::new();
        loop {
            let periods = every(&self.inventory.borrow_and_update());
            running.retain(|every, round| {
                let is_wanted = periods.contains(every);
                if !is_wanted {
                    round.abort();
                }
                is_wanted
            });
            for every in periods {
                running.entry(every).or_insert_with(|| rounds.spawn(self.clone().rounds(every)));
            }
            while rounds.try_join_next().is_some() {}
            if self.inventory.changed().await.is_err() {
                return;
            }
        }
    }

    /// Runs the checks of one period, round after round.
    async fn rounds(self, every: Duration) {
        loop {
            let mut round: JoinSet<()> = self
                .wanted(every)
                .into_iter()
                .map(|(resource, check, device)| self.clone().run_one(resource, check, device))
                .collect();
            while round.join_next().await.is_some() {}
            tokio::time::sleep(host::until_tick(every)).await;
        }
    }

    /// The devices to check: each device once, even if it has several ids.
    fn wanted(&self, every: Duration) -> Vec<(ResourceName, Check, Arc<Device>)> {
        let inventory = self.inventory.borrow().clone();
        let mut wanted = BTreeMap::new();
        for (resource, offering) in &inventory.resources {
            let Some(check) =
                offering.spec.hooks.check.as_ref().filter(|check| check.every == every)
            else {
                continue;
            };
            for offered in offering.devices.values() {
                wanted.entry(offered.device.id.clone()).or_insert_with(|| {
                    (resource.clone(), check.clone(), Arc::clone(&offered.device))
                });
            }
        }
        wanted.into_values().collect()
    }

    async fn run_one(self, resource: ResourceName, check: Check, device: Arc<Device>) {
        let (id, at) = (device.id.clone(), host::now());
        let occasion = Occasion {
            phase: Phase::Check,
            resource,
            device,
            alloc_id: None,
            pod: None,
            container: None,
        };
        let result = match self.performer.run(&check.run, &occasion).await {
            Ok(()) => CheckResult::Passed,
            Err(error) if error.is_no_result(Phase::Check) => CheckResult::NotRun,
            Err(error) => CheckResult::Failed(error.to_string()),
        };
        self.checked.send(Checked { device: id, at, result });
    }
}
