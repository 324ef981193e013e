//! The shell: hands evidence to the judge, publishes what it says, logs what changed.

use super::core::{self, Judge};
use crate::domain::{Grant, Health, Inventory, Listed, Owed, ResourceSpec};
use crate::host;
use crate::messages::{Broken, Crash, Discovered, Mailbox, Rescan};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, Context, Handler, SpawnHandle, StreamHandler};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct HealthConfig {
    /// The configured resources.
    pub specs: Arc<[Arc<ResourceSpec>]>,
    /// What the kubelet was told by an earlier process.
    pub listed: Arc<Listed>,
    /// Who holds what.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// The hooks that free devices wait for.
    pub due: watch::Receiver<Arc<Owed>>,
    /// Where the inventory is published. Outlives the actor, as does what was published last.
    pub inventory: Arc<watch::Sender<Arc<Inventory>>>,
    /// Discovery: asked for fresh evidence when a life begins, and when a device was found broken.
    pub rescan: Mailbox<Rescan>,
}

/// The actor.
#[derive(Debug)]
pub struct HealthActor {
    config: HealthConfig,
    judge: Judge,
    /// The grants that the list is known to have the devices of.
    judged: Arc<Vec<Arc<Grant>>>,
    timer: Option<SpawnHandle>,
    _life: Box<dyn Any + Send>,
}

impl HealthActor {
    /// Builds one life of the actor; it begins with what was published last.
    pub fn new(config: HealthConfig, life: impl Any + Send) -> Self {
        let judge = Judge::new(Arc::clone(&config.specs), config.inventory.borrow().clone(), &config.listed);
        HealthActor { config, judge, judged: Arc::default(), timer: None, _life: Box::new(life) }
    }

    fn publish(&mut self, context: &mut Context<Self>) {
        let grants = self.config.grants.borrow().clone();
        self.judged = Arc::clone(&grants);
        let held = core::held(grants.iter().map(AsRef::as_ref));
        let now = host::now().boot;
        // After the grants: the ledger publishes a hook before the end of the hold that makes it due.
        let due = self.config.due.borrow().clone();
        let Some(inventory) = self.judge.judge(&held, &due, now) else { return };
        let before = self.config.inventory.borrow().clone();
        if before != inventory {
            report(&before, &inventory);
            self.config.inventory.send_replace(inventory);
        }
        if let Some(timer) = self.timer.take() {
            context.cancel_future(timer);
        }
        if let Some(deadline) = self.judge.next_deadline() {
            self.timer = Some(context.run_later(deadline.saturating_sub(now), |this, context| {
                this.timer = None;
                this.publish(context);
            }));
        }
    }
}

/// The grants that are not the same as before. Both lists are in the order of their ids.
fn new_since<'a>(before: &'a [Arc<Grant>], grants: &'a [Arc<Grant>]) -> impl Iterator<Item = &'a Grant> {
    let mut before = before.iter().peekable();
    let is_new = move |grant: &&Arc<Grant>| {
        while before.next_if(|known| !Arc::ptr_eq(known, grant) && known.alloc_id < grant.alloc_id).is_some() {}
        before.next_if(|known| Arc::ptr_eq(known, grant)).is_none()
    };
    grants.iter().filter(is_new).map(AsRef::as_ref)
}

/// One line for each id whose health changed, and one for each resource that is new; the metrics in any case.
fn report(before: &Inventory, after: &Inventory) {
    for (name, offering) in &after.resources {
        let healthy = offering.devices.values().filter(|offered| offered.health.is_healthy()).count();
        metrics::devices(name.as_str(), healthy, offering.devices.len() - healthy);
        let Some(before) = before.resources.get(name) else {
            tracing::info!(resource = %name, devices = offering.devices.len(), healthy, "offered");
            continue;
        };
        let was: BTreeMap<_, Health> = before.devices.iter().map(|(id, offered)| (id, offered.health)).collect();
        for (id, offered) in &offering.devices {
            match (was.get(id), offered.health) {
                (Some(was), is) if *was == is => {}
                (_, Health::Unhealthy(reason)) => tracing::warn!(resource = %name, device = %id, %reason, "the device is unhealthy"),
                (Some(_), Health::Healthy) => tracing::info!(resource = %name, device = %id, "the device is healthy again"),
                (None, Health::Healthy) => tracing::info!(resource = %name, device = %id, "the device is new"),
            }
        }
        for id in before.devices.keys().filter(|id| !offering.devices.contains_key(*id)) {
            tracing::info!(resource = %name, device = %id, "the device left the list");
        }
    }
}

impl Actor for HealthActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // A change of the holders can change the list: what is no longer held may leave it.
        context.add_stream(WatchStream::from_changes(self.config.grants.clone()));
        context.add_stream(WatchStream::from_changes(self.config.due.clone()));
        // The first life is told of the first scan anyway; a later one has lost the evidence.
        if !self.config.inventory.borrow().resources.is_empty() {
            self.config.rescan.tell(Rescan { asked_at: host::now().boot });
        }
    }
}

impl StreamHandler<Arc<Vec<Arc<Grant>>>> for HealthActor {
    fn handle(&mut self, grants: Arc<Vec<Arc<Grant>>>, context: &mut Self::Context) {
        // Every Allocate brings one new among many known ones.
        if !self.judge.is_judged_with(new_since(&self.judged, &grants)) {
            self.publish(context);
        } else {
            self.judged = grants;
        }
    }

    /// The ledger's publisher ends with the daemon only; the actor has other sources.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl StreamHandler<Arc<Owed>> for HealthActor {
    fn handle(&mut self, _: Arc<Owed>, context: &mut Self::Context) {
        self.publish(context);
    }

    /// As that of the grants.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Handler<Discovered> for HealthActor {
    type Result = ();

    fn handle(&mut self, Discovered(evidence): Discovered, context: &mut Self::Context) {
        self.judge.discovered(evidence);
        self.publish(context);
    }
}

impl Handler<Broken> for HealthActor {
    type Result = ();

    fn handle(&mut self, broken: Broken, context: &mut Self::Context) {
        self.judge.broken(&broken.resource, &broken.id, broken.reason, host::now().boot);
        self.publish(context);
        self.config.rescan.tell(Rescan { asked_at: host::now().boot });
    }
}

impl Handler<Crash> for HealthActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{AllocId, ContainerEdits, GrantState, Timestamp};

    fn grant(id: &str) -> Arc<Grant> {
        Arc::new(Grant {
            alloc_id: AllocId::new(id),
            resource: "example.com/gpu".parse().unwrap(),
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: GrantState::Granted,
        })
    }

    #[test]
    fn only_what_is_new_or_has_changed_is_looked_at_again() {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(grant);
        let new = |before: &[&Arc<Grant>], grants: &[&Arc<Grant>]| {
            let owned = |grants: &[&Arc<Grant>]| grants.iter().map(|grant| Arc::clone(grant)).collect::<Vec<_>>();
            let (before, grants) = (owned(before), owned(grants));
            new_since(&before, &grants).map(|grant| grant.alloc_id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(new(&[], &[&a, &b]), ["a", "b"]);
        assert_eq!(new(&[&a, &b], &[&a, &b, &c]), ["c"]);
        assert_eq!(new(&[&a, &b, &c], &[&b, &d]), ["d"], "two were released");
        assert_eq!(new(&[&b, &d], &[&a, &b, &c, &d]), ["a", "c"]);
        assert_eq!(new(&[&a, &b], &[&a, &grant("b")]), ["b"], "it has moved on");
        assert_eq!(new(&[&a, &b], &[]), [""; 0]);
    }
}
