//! The five actors: their slots before the start, and their handles.

use crate::discovery::DiscoveryActor;
use crate::health::HealthActor;
use crate::ledger::LedgerActor;
use crate::registration::Registration;
use crate::serving::Serving;
use crate::supervisor::{Handle, Slot};

/// The handles of the five actors, for tests and the demo, which make actors panic.
#[derive(Debug, Clone)]
pub struct Actors {
    /// Finds devices and watches the host.
    pub discovery: Handle<DiscoveryActor>,
    /// Judges the devices.
    pub health: Handle<HealthActor>,
    /// Records the grants.
    pub ledger: Handle<LedgerActor>,
    /// Serves the device-plugin API.
    pub serving: Handle<Serving>,
    /// Keeps the resources registered.
    pub registration: Handle<Registration>,
}

/// The actors before they are started. Their handles exist first, so that each part can have the
/// mailboxes of the others.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) discovery: Slot<DiscoveryActor>,
    pub(super) health: Slot<HealthActor>,
    pub(super) ledger: Slot<LedgerActor>,
    pub(super) serving: Slot<Serving>,
    pub(super) registration: Slot<Registration>,
}

impl Slots {
    pub(super) fn new() -> Self {
        Slots {
            discovery: Slot::new("discovery"),
            health: Slot::new("health"),
            ledger: Slot::new("ledger"),
            serving: Slot::new("serving"),
            registration: Slot::new("registration"),
        }
    }

    pub(super) fn actors(&self) -> Actors {
        Actors {
            discovery: self.discovery.handle(),
            health: self.health.handle(),
            ledger: self.ledger.handle(),
            serving: self.serving.handle(),
            registration: self.registration.handle(),
        }
    }
}
