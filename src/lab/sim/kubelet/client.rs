//! The kubelet's state for one Register.

use super::core::Options;
use super::environment::{CLOSING, Connection, Lists};
use crate::domain::{ContainerEdits, DeviceId, ResourceName};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A client of a plugin.
#[derive(Debug)]
pub(in crate::lab::sim) struct Client {
    /// Counts the Register calls, from 1.
    pub(super) number: u64,
    pub(super) resource: ResourceName,
    /// Relative to the device-plugin directory.
    pub(super) socket: String,
    connection: OnceLock<Arc<dyn Connection>>,
    cut: AtomicBool,
    /// Whether its endpoint was ever set.
    pub(super) served: AtomicBool,
}

impl Client {
    pub(super) fn new(number: u64, resource: ResourceName, socket: String) -> Self {
        Client {
            number,
            resource,
            socket,
            connection: OnceLock::new(),
            cut: AtomicBool::new(false),
            served: AtomicBool::new(false),
        }
    }

    pub(super) fn connect(&self, connection: Arc<dyn Connection>) {
        // A client is dialled once.
        let _ = self.connection.set(connection);
    }

    fn connection(&self) -> Result<&Arc<dyn Connection>, String> {
        self.connection.get().filter(|_| !self.is_cut()).ok_or_else(|| CLOSING.to_owned())
    }

    /// Whether the kubelet has closed it.
    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Whether its connection is open at both ends.
    pub(super) fn is_open(&self) -> bool {
        self.connection().is_ok_and(|connection| connection.is_open())
    }

    /// Closes the connection if there is one. A connection that is made later is not closed, as in
    /// the kubelet.
    pub(super) fn close(&self) {
        if let Some(connection) = self.connection.get() {
            self.cut.store(true, Ordering::Release);
            connection.close();
        }
    }

    /// The result of a call. After [`Client::close`] every error is a cancellation, independent of
    /// the transport's error.
    fn map_error<T>(&self, result: Result<T, String>) -> Result<T, String> {
        result.map_err(|error| if self.is_cut() { CLOSING.to_owned() } else { error })
    }

    pub(super) async fn options(&self) -> Result<Options, String> {
        let options = match self.connection() {
            Ok(connection) => self.map_error(connection.options().await),
            Err(error) => Err(error),
        };
        options.map_err(|error| format!("failed to get device plugin options: {error}"))
    }

    pub(super) async fn list_and_watch(&self) -> Result<Box<dyn Lists>, String> {
        let connection = self.connection()?;
        self.map_error(connection.list_and_watch().await)
    }

    pub(super) async fn preferred(
        &self,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, String> {
        let connection = self.connection()?;
        self.map_error(connection.preferred(available, must_include, size).await)
    }

    pub(super) async fn allocate(
        &self,
        ids: &BTreeSet<DeviceId>,
    ) -> Result<Option<ContainerEdits>, String> {
        let connection = self.connection()?;
        self.map_error(connection.allocate(ids).await)
    }

    pub(super) async fn pre_start(&self, ids: &BTreeSet<DeviceId>) -> Result<(), String> {
        let connection = self.connection()?;
        self.map_error(connection.pre_start(ids).await)
    }
}
