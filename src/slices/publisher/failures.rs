//! What the publisher does when the API server refuses a request, or drops fields of an object.

use super::super::api::{self, Spec};
use super::refusals::{Found, Place};
use super::write::Write;
use super::{BAD_NEWS_AFTER, Cause, Failure, Publisher, Report, Request};
use std::time::Duration;

/// The pause after a refusal that another try does not change.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// Conflicts in succession without a pause: the list after each one shows its reason.
const CONFLICTS_MAX: u32 = 3;

/// A field whose loss changes what is published.
pub const TAINTS: &str = "taints";
/// Another one: without counters, the scheduler may give a whole and its parts to several claims.
pub const COUNTERS: &str = "counters";
/// A third one: without it, a device with parts of its capacity has one claim at a time.
pub const PARTS: &str = "parts of capacities";

impl Publisher {
    /// The request that was sent has failed.
    pub(super) fn failed(&mut self, failure: &Failure, now: Duration) {
        let write = match self.in_flight.take() {
            Some(Request::Write(write)) => Some(*write),
            Some(Request::List) | None => None,
        };
        match (failure.status, &write) {
            // The object has another version, or there is one of this name.
            (Some(409), Some(write)) => {
                self.conflicts += 1;
                self.list_at = now;
                if let Write::Create(slice, _) = write {
                    let name = slice.metadata.name.clone();
                    self.conflict = Some(name).filter(|name| !name.is_empty());
                }
                if self.conflicts > CONFLICTS_MAX {
                    self.pace.fail(now);
                }
            }
            (Some(404), Some(write @ (Write::Update(..) | Write::Delete(_)))) => {
                self.mirror.remove(write.name());
            }
            // The node authorizer answers so for an object that no longer exists, too.
            (Some(403), Some(Write::Update(..) | Write::Delete(_)))
                if self.conflicts < CONFLICTS_MAX =>
            {
                self.conflicts += 1;
                self.list_at = now;
            }
            (Some(422), Some(Write::Create(slice, place) | Write::Update(slice, place))) => {
                if !self.learned(&slice.spec, place, failure, now) {
                    self.refused(write.as_ref(), failure, now);
                }
            }
            (Some(400 | 403 | 404 | 405 | 413 | 415 | 422), _) => {
                self.refused(write.as_ref(), failure, now);
            }
            _ => {
                // Without an answer the write may have been carried out.
                if failure.status.is_none() {
                    self.list_at = now;
                }
                self.pace.fail(now);
                self.pace.pause_as_asked(now, failure.retry_after.unwrap_or_default());
            }
        }
    }

    /// Whether the API server keeps these fields, as far as is known.
    pub(super) fn keeps(&self, fields: &'static str) -> bool {
        !self.dropped.contains(fields)
    }

    /// Learns that the API server drops these fields.
    pub(super) fn lose(&mut self, fields: &'static str, now: Duration) {
        if self.dropped.insert(fields) {
            self.reports.push(Report::FieldsDropped(fields));
        }
        if [TAINTS, COUNTERS, PARTS].contains(&fields) {
            self.write_after(BAD_NEWS_AFTER, now);
        }
    }

    /// The next try waits, since nothing has changed. A refused write is about its pool: the taints
    /// of the others do not wait.
    fn refused(&mut self, write: Option<&Write>, failure: &Failure, now: Duration) {
        let retry_after = failure.retry_after.unwrap_or_default().max(REFUSED_FOR);
        match write.and_then(|write| self.pool_of(write)) {
            Some(pool) => drop(self.pauses.insert(pool, now + retry_after)),
            None => self.pace.pause(now, retry_after),
        }
        self.reports.push(Report::Refused {
            slice: write.map(|write| write.name().to_owned()).unwrap_or_default(),
            status: failure.status.unwrap_or_default(),
            why: failure.message.clone(),
            retry_after,
        });
    }

    /// A device as the API server has it.
    pub(super) fn published(&self, pool: &str, device: &str) -> Option<&api::Device> {
        let slices = self.mirror.slices().filter(|slice| slice.spec.pool.name == pool);
        slices.flat_map(|slice| &slice.spec.devices).find(|known| known.name == device)
    }

    fn pool_of(&self, write: &Write) -> Option<String> {
        let known = || self.mirror.get(write.name()).map(|slice| slice.spec.pool.name.clone());
        write.place().map(|(pool, _)| pool.clone()).or_else(known)
    }

    /// Learns from a refused slice which devices to leave out. Returns whether the next write is
    /// another one.
    fn learned(&mut self, sent: &Spec, place: &Place, failure: &Failure, now: Duration) -> bool {
        // Kubernetes 1.34 wants them in the slices of the devices.
        let is_of_counters = |cause: &Cause| cause.field.contains("Counters");
        let is_about_them =
            !sent.shared_counters.is_empty() || failure.causes.iter().any(is_of_counters);
        if is_about_them && self.keeps(COUNTERS) {
            self.lose(COUNTERS, now);
            return true;
        }
        let sent = &sent.devices;
        let named: Vec<(&api::Device, &Cause)> = failure
            .causes
            .iter()
            .filter_map(|cause| Some((sent.get(index_of(&cause.field)?)?, cause)))
            .collect();
        if named.is_empty() {
            let is_of_devices = |cause: &Cause| cause.field.starts_with("spec.devices");
            if !failure.causes.is_empty() && !failure.causes.iter().any(is_of_devices) {
                return false;
            }
            let free = sent.iter().filter(|device| !self.is_claimed(place, &device.name));
            let free = free.map(|device| device.name.clone()).collect();
            let found = self.refusals.search(place, free);
            self.narrowed(&found, place, now);
            return found != Found::NoDevice;
        }
        let mut has_learned = false;
        for (device, cause) in named {
            // It cannot be left out, and there is no other form of it.
            let is_known = self.published(&place.0, &device.name);
            if self.is_claimed(place, &device.name) && is_known.is_some_and(|it| it.is_like(device))
            {
                continue;
            }
            has_learned = true;
            self.refuse(&place.0, device.clone(), &cause.message, now);
        }
        has_learned
    }

    /// Takes the result of a search by halves.
    pub(super) fn narrowed(&mut self, found: &Found, place: &Place, now: Duration) {
        let Found::Device(name) = found else { return };
        let device = self.layout.as_ref().and_then(|layout| {
            let mut pools = layout.pools(self.keeps(TAINTS));
            let (_, slices) = pools.find(|(pool, _)| *pool == place.0)?;
            slices.into_values().flatten().find(|device| device.name == *name)
        });
        if let Some(device) = device {
            let why = "the API server accepts its slice only without it";
            self.refuse(&place.0, device, why, now);
        }
    }

    fn refuse(&mut self, pool: &str, mut device: api::Device, why: &str, now: Duration) {
        device.consumes_counters.clear();
        self.reports.push(Report::DeviceRefused {
            pool: pool.to_owned(),
            device: device.name.clone(),
            why: why.to_owned(),
        });
        self.refusals.refuse(pool, device, now);
    }

    fn is_claimed(&self, (pool, _): &Place, device: &str) -> bool {
        self.layout.as_ref().is_some_and(|layout| layout.is_claimed(pool, device))
    }
}

/// The number of a device in the path of a field: 3 of `spec.devices[3].name`.
fn index_of(field: &str) -> Option<usize> {
    field.strip_prefix("spec.devices[")?.split_once(']')?.0.parse().ok()
}

/// The kinds of fields that were sent and did not come back.
pub(super) fn dropped(sent: &Spec, returned: &Spec) -> Vec<&'static str> {
    let of = |device: &api::Device| returned.devices.iter().find(|it| it.name == device.name);
    let any = |is_lost: fn(&api::Device, &api::Device) -> bool| {
        let mut sent = sent.devices.iter();
        sent.any(|device| of(device).is_none_or(|returned| is_lost(device, returned)))
    };
    let counters = sent.shared_counters.len() > returned.shared_counters.len()
        || any(|sent, returned| sent.consumes_counters.len() > returned.consumes_counters.len());
    let taints = any(|sent, returned| {
        sent.taints.iter().any(|taint| !returned.taints.iter().any(|it| it.is_like(taint)))
    });
    let attributes = any(|sent, returned| {
        sent.attributes.keys().any(|it| !returned.attributes.contains_key(it))
    });
    let capacity =
        any(|sent, returned| sent.capacity.keys().any(|it| !returned.capacity.contains_key(it)));
    let parts = any(|sent, returned| {
        sent.allow_multiple_allocations && !returned.allow_multiple_allocations
    });
    let kinds = [
        (parts, PARTS),
        (taints, TAINTS),
        (counters, COUNTERS),
        (attributes, "attributes"),
        (capacity, "capacity"),
    ];
    kinds.into_iter().filter_map(|(is_lost, kind)| is_lost.then_some(kind)).collect()
}
