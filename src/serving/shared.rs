//! The dependencies of every service behind a socket.

use super::affinity::Affinity;
use super::prepare::Preparer;
use super::refusals::Refusals;
use super::sockets::Sockets;
use crate::domain::{Grant, Inventory};
use crate::hook::HookExecutor;
use crate::messages::{
    CheckStart, ClosedEarly, Mailbox, Record, ReportUnusable, StreamEnded, StreamOpened,
};
use std::sync::Arc;
use tokio::sync::{RwLock, watch};

/// The dependencies of every service behind a socket. They outlive the actor.
#[derive(Debug, Clone)]
pub struct Shared {
    /// The lists for the device-plugin API.
    pub lists: watch::Receiver<Arc<Inventory>>,
    /// The live grants.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// Runs the hooks before a start.
    pub performer: HookExecutor,
    /// Decides an Allocate.
    pub preparer: Arc<Preparer>,
    /// Records grants in the ledger.
    pub record: Mailbox<Record>,
    /// Reports unusable devices to health.
    pub unusable: Mailbox<ReportUnusable>,
    /// Checks the start gate in the ledger.
    pub check_start: Mailbox<CheckStart>,
    /// Reports an open stream to registration.
    pub opened: Mailbox<StreamOpened>,
    /// Reports the end of a stream to registration.
    pub ended: Mailbox<StreamEnded>,
    /// Reports a connection that closed early to registration.
    pub closed_early: Mailbox<ClosedEarly>,
    /// The table of sockets.
    pub sockets: Arc<Sockets>,
    /// The latest grants.
    pub affinity: Affinity,
    /// The refused Allocates.
    pub refusals: Refusals,
    /// Separates Allocates from pod listings: locked for reading from an Allocate until the kubelet
    /// has recorded the answer, and for writing during a List call, which would make the kubelet
    /// forget the devices that it has just reserved.
    pub gate: Arc<RwLock<()>>,
    /// Sends the lists again although they are the same.
    pub resend: watch::Receiver<()>,
    /// Whether this instance ends or hands over. The end of its connections is no loss then.
    pub leaving: watch::Receiver<bool>,
}
