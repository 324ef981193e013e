//! The health of the devices for claims, for the kubelet.

use crate::domain::{Api, ClaimHealth, Health, Inventory};
use crate::health::Judgement;
use crate::serving::claims::NameOf;
use std::sync::Arc;
use tokio::sync::watch;

/// Follows the inventory.
pub(crate) struct Healths {
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) judgement: watch::Receiver<Judgement>,
    pub(crate) name_of: NameOf,
    pub(crate) health: watch::Sender<Arc<[ClaimHealth]>>,
}

impl Healths {
    /// Publishes each change.
    pub(crate) async fn keep(mut self) {
        loop {
            let now = self.now();
            self.health.send_if_modified(|known| {
                let is_other = **known != *now;
                if is_other {
                    *known = now;
                }
                is_other
            });
            if self.inventory.changed().await.is_err() {
                return;
            }
        }
    }

    fn now(&mut self) -> Arc<[ClaimHealth]> {
        let inventory = self.inventory.borrow_and_update().clone();
        let judgement = self.judgement.borrow();
        let offerings = inventory.resources.values().filter(|it| it.spec.api == Api::Dra);
        let devices = offerings.flat_map(|offering| &offering.devices);
        let health = devices.map(|(id, offered)| {
            let message = match offered.health {
                Health::Healthy => String::new(),
                Health::Unhealthy(reason) => {
                    let verdict = judgement.verdicts.get(&offered.device.id);
                    let detail = verdict.map(|verdict| verdict.detail(reason).to_owned());
                    match detail.filter(|detail| !detail.is_empty()) {
                        Some(detail) => format!("{reason}: {detail}"),
                        None => reason.to_string(),
                    }
                }
            };
            ClaimHealth {
                name: (self.name_of)(id, offered.device.class),
                is_healthy: Some(offered.health.is_healthy()),
                message,
            }
        });
        health.collect()
    }
}
