//! Follows the lists: registers new resources, ends removed ones, and registers again if the
//! announced options have changed.

use super::actor::{Registration, Resource};
use super::core::{Event, Machine};
use crate::domain::{Inventory, ResourceName};
use crate::host;
use crate::messages::{RegistrationNumber, Retire};
use actix::{Context, StreamHandler};
use std::sync::Arc;

impl Registration {
    pub(super) fn follow(&mut self, context: &mut Context<Self>) {
        if *self.config.leaving.borrow() {
            return;
        }
        let lists = self.config.lists.borrow().clone();
        let gone: Vec<ResourceName> = self
            .resources
            .keys()
            .filter(|name| !lists.resources.contains_key(*name))
            .cloned()
            .collect();
        for name in gone {
            self.end(&name);
        }
        let kubelet = *self.config.kubelet.borrow();
        for (name, offering) in &lists.resources {
            if let Some(resource) = self.resources.get(name) {
                if resource.pre_start != offering.spec.needs_pre_start() {
                    self.on(name, Event::Changed, context);
                }
                continue;
            }
            let now = host::now().boot;
            self.resources.insert(name.clone(), Resource::new(Machine::new(now, self.base), now));
            self.on(name, Event::Kubelet(kubelet), context);
            // If no kubelet was seen, one try reports that.
            self.on(name, Event::Tick, context);
        }
    }

    pub(super) fn on_all(&mut self, event: Event, context: &mut Context<Self>) {
        let names: Vec<ResourceName> = self.resources.keys().cloned().collect();
        for name in names {
            self.on(&name, event, context);
        }
    }

    /// Ends a resource that is no longer offered, after its last device has left. Its streams end
    /// on their own.
    fn end(&mut self, name: &ResourceName) {
        let Some(resource) = self.resources.remove(name) else { return };
        tracing::info!(resource = %name, "no longer offered; its registration ends");
        self.base = self.base.max(resource.machine.latest());
        if let Some(under_way) = resource.under_way {
            under_way.abort();
        }
        self.config.retire.send(Retire { resource: name.clone(), newest: RegistrationNumber::MAX });
        self.publish();
    }
}

impl StreamHandler<Arc<Inventory>> for Registration {
    fn handle(&mut self, _: Arc<Inventory>, context: &mut Context<Self>) {
        self.follow(context);
    }

    /// The publisher ends only with the daemon.
    fn finished(&mut self, _: &mut Context<Self>) {}
}
