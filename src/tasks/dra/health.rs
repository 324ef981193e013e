//! The health of the devices for claims, for the kubelet.

use crate::domain::{ClaimHealth, DraName, Grant, Health, Inventory};
use crate::health::Judgement;
use crate::serving::claims::NameOf;
use crate::slices::holders::Holders;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// Follows the inventory.
pub(crate) struct Healths {
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
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
            let changed = tokio::select! {
                changed = self.inventory.changed() => changed,
                changed = self.grants.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// The devices that claims may get, and those that claims have although their resource gives no
    /// device to new claims.
    fn now(&mut self) -> Arc<[ClaimHealth]> {
        let inventory = self.inventory.borrow_and_update().clone();
        let Holders { claimed, shares, .. } = Holders::of(&self.grants.borrow_and_update());
        let judgement = self.judgement.borrow();
        let mut health: BTreeMap<DraName, ClaimHealth> = BTreeMap::new();
        let mut offerings: Vec<_> = inventory.resources.values().collect();
        // A device may be in two lists while it moves from one resource to another.
        offerings.sort_by_key(|offering| offering.spec.api.serves_claims());
        for offering in offerings {
            for (id, offered) in &offering.devices {
                let class = offered.device.class;
                let name = (self.name_of)(id, class);
                // A claim has a share, or a part of the capacity of the whole device.
                let names = match offering.spec.divided(id) {
                    None if offering.spec.api.serves_claims() => vec![name],
                    None => Some(name).filter(|it| claimed.contains(it)).into_iter().collect(),
                    Some(whole) => {
                        let name = Some(name).filter(|it| claimed.contains(it));
                        name.into_iter().chain([(self.name_of)(&whole, class)]).collect()
                    }
                };
                // As long as a claim has the share, also after a reload without `capacity`.
                let part = shares.get(&(offering.spec.name.clone(), id.clone())).cloned();
                let part = part.filter(|part| !names.contains(part));
                let names: Vec<DraName> = names.into_iter().chain(part).collect();
                if names.is_empty() {
                    continue;
                }
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
                let is_healthy = Some(offered.health.is_healthy());
                for name in names {
                    let message = message.clone();
                    let of = ClaimHealth { name: name.clone(), is_healthy, message };
                    health.insert(name, of);
                }
            }
        }
        health.into_values().collect()
    }
}
