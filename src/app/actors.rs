//! The five actors: their slots before the start, and their handles.

use crate::discovery::DiscoveryActor;
use crate::health::HealthActor;
use crate::ledger::LedgerActor;
use crate::registration::Registration;
use crate::serving::Serving;
use crate::supervisor::Handle;

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
